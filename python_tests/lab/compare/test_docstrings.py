"""The examples in docstrings of the lab, run as they stand."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import jachess_ext.lab

MODULES = [
    "jachess_ext.training.corruption",
    *(
        module.name
        for module in pkgutil.walk_packages(jachess_ext.lab.__path__, "jachess_ext.lab.")
        if not module.name.startswith("jachess_ext.lab.live")  # whose examples need runs
    ),
]
EXAMPLES = [
    example
    for module in MODULES
    for example in doctest.DocTestFinder().find(importlib.import_module(module))
    if example.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example: doctest.DocTest) -> None:
    assert doctest.DocTestRunner().run(example).failed == 0
