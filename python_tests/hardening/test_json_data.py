"""JSON as data: what standard json lets pass is refused, in words; values against type hints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest
from jachess_ext.json_data import BadJSON, check

from jachess_ext._io import DataError, parse_json, read_json
from jachess_ext.compare.tasks import Columns, file_task

from .readers import RECORDS, regulariser, results

BAD_TEXTS = [
    ('{"a": 1, "b": {"c": 1, "c": 2}}', "has the name 'c' twice"),
    ("[NaN]", "NaN is no number"),
    ("-Infinity", "Infinity is no number"),
    ("[" * 100_000, "nested too deeply"),
    ("1" * 5000, "is not JSON"),
    (r'["\ud800"]', "half of a surrogate pair"),
    ("{", "is not JSON"),
    ("", "is not JSON"),
]


@pytest.mark.parametrize("text, words", BAD_TEXTS)
def test_bad_texts(text: str, words: str) -> None:
    with pytest.raises(BadJSON, match=words):
        parse_json(text)


def test_good_texts(tmp_path: Path) -> None:
    assert parse_json(r'{"a": ["\ud83d\ude00", "\u2028", 1e3]}') == {"a": ["😀", "\u2028", 1000.0]}
    assert parse_json("[NaN]", constants=True)[0] != 0
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1]\r\n")
    assert read_json(tmp_path / "a.json") == [1]


@dataclass
class Part:
    size: int = 1
    rate: float | None = None


class Needed(TypedDict):
    name: str
    part: Part


GOOD = [
    (1, float),
    (None, float | None),
    ([1, 2.5], list[float]),
    ((1,), tuple[int, ...]),
    ({"a": "b"}, Mapping[str, str]),
    ("x", Literal["x", "y"]),
    ({"size": 3}, Part),
    (Part(), Part),
    ({"name": "n", "part": {"rate": 0.5}}, Needed),
    (object(), Any),
]
BAD = [
    (True, int, "it is True; expected a whole number"),
    (1.0, int, "expected a whole number"),
    (2**63, int, "expected a whole number"),
    (2**64, float, "expected a finite number"),
    (float("inf"), float, "expected a finite number"),
    ("1", float | None, "it is '1'; expected a finite number or null"),
    ([1, "a"], list[int], r"it\[1\] is 'a'"),
    ("ab", tuple[str, ...], "expected a list"),
    ({"a": 1}, Mapping[str, str], r"it\['a'\] is 1; expected a text"),
    ("z", Literal["x", "y"], "expected one of 'x', 'y'"),
    ({"sizes": 3}, Part, "it has no setting 'sizes'; it has size, rate"),
    ([], Part, "expected an object"),
    ({"name": "n"}, Needed, r"it lacks \['part'\]"),
    ({"name": "n", "part": {"rate": "fast"}}, Needed, "it's part's rate is 'fast'"),
    ("x" * 200, int, r"'x{56}\.\.\.; expected"),
]


@pytest.mark.parametrize("value, hint", GOOD)
def test_good_values(value: object, hint: Any) -> None:
    check(value, hint, "it")


@pytest.mark.parametrize("value, hint, words", BAD)
def test_bad_values(value: object, hint: Any, words: str) -> None:
    with pytest.raises(BadJSON, match=words):
        check(value, hint, "it")


TABLES = [
    ("text,label\na,b,1\nc,0\n", "record 1 has more cells than the header has names"),
    ("text,label,text\na,1,b\n", "has the column 'text' twice"),
]


@pytest.mark.parametrize("content, words", TABLES)
def test_tables_that_would_lose_text(tmp_path: Path, content: str, words: str) -> None:
    """Python's csv keeps the last of equal columns, and puts cells too many aside."""
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        file_task(path, path, Columns())


RESULTS = [
    (RECORDS.replace(b'"final"', b'"tuning"'), "has no finished run yet"),
    (RECORDS.replace(b'"score": 0.5', b'"score": "best"', 1), "score is 'best'"),
    (RECORDS.replace(b'"counts": [0, ', b'"counts": [', 1), "has 7 values for 8 bins"),
    (RECORDS.replace(b'"edges": [0.0', b'"edges": [0.1', 1), "diagrams of different bins"),
    (RECORDS.replace(b'"weights": "', b'"wights": "', 1), "have no 'weights'"),
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


STATES = [
    ({"step": 1.5, "seed": 1, "base": None}, "step is 1.5"),
    ({"step": 1, "seed": 1, "base": {"jacobian": [1.0], "hessian": None}}, r"lacks \['tokens'\]"),
    (
        {"step": 1, "seed": 1, "base": {"jacobian": [1.0], "hessian": [1.0, 2.0], "tokens": 1}},
        "unequal numbers of layers",
    ),
    (
        {"step": 1, "seed": 1, "base": {"jacobian": [-1.0], "hessian": None, "tokens": 1}},
        "not positive",
    ),
    ({"step": 1, "seed": 1, "base": None, "skipped": {"last": 1}}, "the layer 'last'"),
    ({"step": 1, "seed": 1, "base": None, "layer_weights": [True]}, r"layer_weights\[0\] is True"),
]


@pytest.mark.parametrize("state, words", STATES)
def test_states_of_no_regulariser(state: dict, words: str) -> None:
    made = regulariser()
    with pytest.raises(ValueError, match=words):
        made.load_state_dict(state)
    assert made.step == 0 and made.base is None
