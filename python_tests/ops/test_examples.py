"""The examples in the operators' docstrings print what they say."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    "name", ["activation", "attention", "directions", "library", "norm", "ntk", "softmax"]
)
def test_examples(name: str) -> None:
    results = doctest.testmod(import_module(f"jachess_ext.ops.{name}"))
    assert results.attempted
    assert not results.failed
