"""The examples in the docstrings of public functions, run as they stand."""

from __future__ import annotations

import doctest
import importlib
import inspect
from typing import Any

import pytest
import torch

import jachess_ext as jx
from jachess_ext.jet import registry
from python_tests.smoothness.tiny_models import classifier, token_batch

PACKAGES = ("jachess_ext.jet", "jachess_ext.ntk", "jachess_ext.ops", "jachess_ext.smoothness")


def _public() -> list[Any]:
    """Each package's functions, and those of its classes that have an example."""
    modules = [importlib.import_module(package) for package in PACKAGES]
    values = [getattr(module, name) for module in modules for name in module.__all__]
    return [v for v in values if inspect.isfunction(v) or ">>>" in (inspect.getdoc(v) or "")]


@pytest.mark.parametrize("value", _public(), ids=lambda value: value.__name__)
def test_example(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))  # one example adds a rule
    torch.manual_seed(0)
    module = importlib.import_module(value.__module__)
    batch = token_batch([5, 4]) | {"labels": torch.tensor([0, 1])}
    names = {"torch": torch, "jx": jx, "model": classifier("bert"), "batch": batch}
    names = {**vars(module), **names}
    (example,) = doctest.DocTestFinder(recurse=False).find(value, value.__name__, globs=names)
    assert example.examples, f"{value.__name__} has no example"
    assert doctest.DocTestRunner().run(example).failed == 0
