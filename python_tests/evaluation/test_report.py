"""Strict JSON, nothing half-written, and what a missing library says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from jachess_ext.evaluation import extras
from jachess_ext.evaluation.report import write_json

from jachess_ext._io import write_text


def test_json_is_strict_and_nan_becomes_null(tmp_path: Path) -> None:
    content = {"a": np.array([1.0, np.nan]), "b": (np.float64(2), float("inf")), 3: "é"}
    write_json(tmp_path / "deep" / "r.json", content)
    text = (tmp_path / "deep" / "r.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": [1.0, None], "b": [2.0, None], "3": "é"}


def test_unwritable_content_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_failed_move_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("jachess_ext.evaluation.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "x", "y")
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_says_what_to_install() -> None:
    with pytest.raises(extras.MissingExtra, match=r"pip install 'jachess-ext\[demo\]'"):
        extras.require("a_library_that_is_not_there.part")


def test_a_broken_extra_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_extra.py").write_text("import something_it_needs")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError) as caught:
        extras.require("broken_extra")
    assert not isinstance(caught.value, extras.MissingExtra)
