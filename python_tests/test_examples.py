"""Every public name has an example in its docstring, and each example runs as it stands."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PrinterCallback, Trainer

import jachess_ext as jx
from jachess_ext import ops
from jachess_ext.jet.engine import registry
from jachess_ext.jet.rules.pointwise import pointwise
from jachess_ext.smoothness import directions
from python_tests.lab.live.test_examples import LIVE
from python_tests.smoothness.tiny_models import classifier, token_batch
from python_tests.training import runs

PACKAGES = (
    "jachess_ext",
    "jachess_ext.lab.attack",
    "jachess_ext.jet",
    "jachess_ext.ntk",
    "jachess_ext.ops",
    "jachess_ext.lab.live",
    "jachess_ext.scaling",
    "jachess_ext.smoothness",
    "jachess_ext.training",
)
# Functions that are not exported by a package, but documented for whoever adds a rule.
FOR_RULES = (
    *(registry.recognise, registry.spellings, pointwise),
    *(directions.draw_directions, directions.DrawCounter),
)


def _public() -> list[Any]:
    """List the functions and classes, once each, that the packages export."""
    values = {}
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            try:
                value = getattr(package, name)
            except ImportError:  # Lightning is optional
                continue
            error = isinstance(value, type) and issubclass(value, Exception)
            if callable(value) and not error:
                values[id(value)] = value
    return [*values.values(), *FOR_RULES]


def _name(value: Any) -> str:
    """Return the subpackage and the name, such as "jet.jvp" or "lab.live.select_live"."""
    names = value.__module__.split(".")[1:]
    return ".".join([*names[: 2 if names[0] == "lab" else 1], value.__name__])


def _twin(value: Any) -> Any:
    """Return the operator whose example an operator's reference shares, else the value itself."""
    name = value.__name__
    return getattr(ops, name.removesuffix("_reference")) if name.endswith("_reference") else value


def _has_example(value: Any) -> bool:
    return ">>>" in (inspect.getdoc(_twin(value)) or "")


def test_every_public_name_has_an_example() -> None:
    assert not [_name(value) for value in _public() if not _has_example(value)]


OF_RUNS = {f"lab.live.{name}" for name in LIVE}  # they need a folder of runs


@pytest.mark.parametrize(
    "value", [value for value in _public() if _name(value) not in OF_RUNS], ids=_name
)
def test_example(value: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))  # one example adds a rule
    monkeypatch.setattr(PrinterCallback, "on_log", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = importlib.import_module(value.__module__)
    batch = token_batch([5, 4]) | {"labels": torch.tensor([0, 1])}
    names = {"torch": torch, "jx": jx, "model": classifier("bert"), "batch": batch}
    names |= {"rows": runs.examples(2), "arguments": runs.arguments(tmp_path, max_steps=1)}
    shown = _twin(value)
    names = {"Trainer": Trainer, **vars(module), **names, shown.__name__: value}
    (example,) = doctest.DocTestFinder(recurse=False).find(shown, shown.__name__, globs=names)
    assert example.examples
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example).failed == 0
