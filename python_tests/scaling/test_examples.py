"""The examples in the docstrings of `jachess_ext.scaling` give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

import jachess_ext.scaling as scaling

FUNCTIONS = [name for name in scaling.__all__ if name[0].islower()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example(name: str) -> None:
    function = getattr(scaling, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    assert test.examples, f"{name} has no example"
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert result.failed == 0


def test_modules_of_public_names() -> None:
    for name, module in scaling._MODULES.items():
        assert hasattr(import_module(f"jachess_ext.scaling.{module}"), name)
