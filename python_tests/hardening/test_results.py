"""Files of results and checkpoints that parse, but hold what no report can be drawn from."""

from __future__ import annotations

from pathlib import Path

import pytest

from jachess_ext._io import DataError

from .readers import RECORDS, regulariser, results

RESULTS = [
    (RECORDS.replace(b'"final"', b'"tuning"'), "no run has finished yet"),
    (RECORDS.replace(b'"score": 0.5', b'"score": "best"', 1), "score is 'best'"),
    (RECORDS.replace(b'"counts": [0, ', b'"counts": [', 1), "counts': 7}, which do not fit"),
    (RECORDS.replace(b'"edges": [0.0', b'"edges": [0.1', 1), "diagrams of different bins"),
    (RECORDS.replace(b'"control": true, ', b"", 1), "line 1 lacks control"),
    (RECORDS.replace(b'"rows": [10, ', b'"rows": [', 1), "expected three numbers"),
    (RECORDS.replace(b'"task": "task"', b'"task": "\xff"', 1), "is not UTF-8 text"),
    (RECORDS.replace(b'"run": ', b'"ran": ', 1), "has no setting 'ran'"),
    (RECORDS.replace(b'"0.05": ', b'"much": ', 1), "could not convert string to float: 'much'"),
]


@pytest.mark.parametrize("content, words", RESULTS)
def test_results_that_no_report_can_be_drawn_from(
    tmp_path: Path, content: bytes, words: str
) -> None:
    assert content != RECORDS
    (tmp_path / "results.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        results(tmp_path / "results.jsonl")


def test_a_text_with_a_line_separator_is_one_record(tmp_path: Path) -> None:
    """U+2028 within a task's name: no line break for JSON, one for str.splitlines."""
    path = tmp_path / "results.jsonl"
    path.write_bytes(RECORDS.replace(b'"task": "task"', '"task": "a\u2028b"'.encode()))
    assert "Scores" in results(path)


UNUSUAL = [
    (b'"jacobian": [1.0, 2.0]', b'"jacobian": [null, 2.0]'),
    (b'"0.2": ', b'"0.3": null, "0.2": '),
]


@pytest.mark.parametrize("old, new", UNUSUAL)
def test_figures_that_were_not_finite(tmp_path: Path, old: bytes, new: bytes) -> None:
    """They are null in the file, and their runs are left out of the mean."""
    path = tmp_path / "results.jsonl"
    path.write_bytes(RECORDS.replace(old, new))
    assert "Smoothness" in results(path)


STATE = {"step": 1, "seed": 1, "base": None, "skipped": {}, "layer_weights": None}
BASE = {"jacobian": [1.0], "hessian": None, "tokens": 1}
STATES = [
    ({"step": 1.5}, "step is 1.5"),
    ({"base": {"jacobian": [1.0], "hessian": None}}, "lacks tokens"),
    ({"base": BASE | {"hessian": [1.0, 2.0]}}, "unequal numbers of layers"),
    ({"base": BASE | {"jacobian": [-1.0]}}, "not positive"),
    ({"skipped": {"last": 1}}, "the layer 'last'"),
    ({"layer_weights": [True]}, r"layer_weights\[0\] is True"),
]


@pytest.mark.parametrize("changes, words", STATES)
def test_states_of_no_regulariser(changes: dict, words: str) -> None:
    made = regulariser()
    with pytest.raises(ValueError, match=words):
        made.load_state_dict(STATE | changes)
    assert made.step == 0 and made.base is None
