"""The examples in the docstrings of the comparison and of the demo, run as they stand."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import jachess_ext.compare

MODULES = [
    "demo",
    "smoothness.corruption",
    *(f"compare.{each.name}" for each in pkgutil.iter_modules(jachess_ext.compare.__path__)),
]
EXAMPLES = [
    example
    for module in MODULES
    for example in doctest.DocTestFinder().find(importlib.import_module(f"jachess_ext.{module}"))
    if example.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example: doctest.DocTest) -> None:
    assert doctest.DocTestRunner().run(example).failed == 0
