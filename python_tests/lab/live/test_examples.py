"""The examples of live selections; python_tests/test_examples.py runs the others."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

from jachess_ext import scaling
from jachess_ext.lab import live
from python_tests.lab.live.tiny import write_rows

LIVE = ("LiveSettings", "select_live", "read_selection", "LiveSelection")  # in this order


def run(name: str, **names: Any) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(getattr(live, name), name, globs=names)
    assert tests and tests[0].examples, f"{name} has no example"
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(tests[0])
    assert result.failed == 0


def test_examples_of_live_selections(
    models: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.csv", 256, 0)
    write_rows(tmp_path / "dev.csv", 40, 1)
    for name in LIVE:
        run(name, models=models)


def test_modules_of_public_names() -> None:
    assert {getattr(scaling, name).__module__.rpartition(".")[0] for name in scaling.__all__} == {
        "jachess_ext.scaling"
    }
    assert {getattr(live, name).__module__ for name in live.__all__} == {
        "jachess_ext.lab.live.choice",
        "jachess_ext.lab.live.plan",
    }
