"""Files whole or absent, strict JSON as the types a hint says, and what a missing library says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import pytest

from jachess_ext import _io
from jachess_ext._io import (
    DataError,
    MissingExtra,
    from_json,
    parse_json,
    read_json,
    require,
    whole_folder,
    write_json,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_json_is_strict_and_nan_becomes_null(tmp_path: Path) -> None:
    content = {"a": np.array([1.0, np.nan]), "b": (np.float64(2), float("inf")), 3: "é"}
    path = tmp_path / "deep" / "r.json"
    write_json(path, content)
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1.0, None], "b": [2.0, None]} | {
        "3": "é"
    }
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path)["3"] == "é" and names(path.parent) == ["r.json"]


@pytest.mark.parametrize("fail_at", ["fdopen", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: str
) -> None:
    path = tmp_path / "report.html"
    write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(_io.os, fail_at, full)
        with pytest.raises(OSError, match=r"No space left on device: '.*report\.html'$"):
            write_text(path, "new")
    assert path.read_text() == "old" and names(tmp_path) == ["report.html"]


@pytest.mark.parametrize("error", [None, OSError, KeyboardInterrupt])
def test_a_folder_is_there_as_a_whole_or_not_at_all(tmp_path: Path, error: Any) -> None:
    target = tmp_path / "a"
    target.mkdir()
    (target / "old").touch()
    killed = whole_folder(target)
    (killed.__enter__() / "half").touch()  # and never left

    def write() -> None:
        with whole_folder(target) as folder:
            (folder / "new").touch()
            assert names(target) == ["old"] and folder.parent == target.parent
            if error is not None:
                raise error

    if error is None:
        write()
    else:
        with pytest.raises(error):
            write()
    assert names(target) == (["new"] if error is None else ["old"]) and names(tmp_path) == ["a"]


def test_missing_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingExtra, match="pip install a_library_that"):
        require("a_library_that_is_not_there.part")
    (tmp_path / "broken_extra.py").write_text("import something_it_needs")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError) as caught:
        require("broken_extra")
    assert not isinstance(caught.value, MissingExtra), "a broken one is not missing"


BAD_TEXTS = [
    ('{"a": 1, "b": {"c": 1, "c": 2}}', "the name 'c' stands twice"),
    ("[NaN]", "NaN is no number"),
    ("-Infinity", "Infinity is no number"),
    ("[" * 100_000, "nested too deeply"),
    (r'["\ud800"]', "surrogates not allowed"),
    ("{", "is not JSON"),
]


@pytest.mark.parametrize("text, words", BAD_TEXTS)
def test_bad_texts(text: str, words: str) -> None:
    with pytest.raises(DataError, match=f"^it .*{words}"):
        parse_json(text, "it")


def test_good_texts(tmp_path: Path) -> None:
    text = r'{"a": ["\ud83d\ude00", "\u2028", 1e3]}'
    assert parse_json(text, "it") == {"a": ["😀", "\u2028", 1000.0]}
    assert parse_json('["a\nb", NaN]', "it", lenient=True)[0] == "a\nb"
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1]\r\n")
    assert read_json(tmp_path / "a.json") == [1]


@dataclass
class Part:
    size: int
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size is {self.size}; expected a number from 0 up")


class Needed(TypedDict):
    name: str
    part: Part


GOOD = [
    (1, float, 1),
    (None, float | None, None),
    ([1, 2.5], list[float], [1, 2.5]),
    ([[1], [2]], tuple[tuple[int, ...], ...], ((1,), (2,))),
    ({"a": "b"}, Mapping[str, str], {"a": "b"}),
    ("x", Literal["x", "y"], "x"),
    ({"size": 3}, Part, Part(3)),
    (Part(3), Part, Part(3)),
    ({"name": "n", "part": {"size": 1, "rate": 0.5}}, Needed, {"name": "n", "part": Part(1, 0.5)}),
    ("any", Any, "any"),
]
BAD = [
    (True, int, "it is True; expected a whole number"),
    (2**63, int, "expected a whole number"),
    (2**64, float, "expected a finite number"),
    (float("inf"), float, "expected a finite number"),
    ("1", float | None, "it is '1'; expected a finite number or null"),
    ([1, "a"], list[int], r"it\[1\] is 'a'"),
    ("ab", tuple[str, ...], "expected a list"),
    ({"a": 1}, Mapping[str, str], r"it\['a'\] is 1; expected a text"),
    ("z", Literal["x", "y"], "expected one of 'x', 'y'"),
    ({"sizes": 3}, Part, "it has no setting 'sizes'; it has size, rate"),
    ({"rate": 3}, Part, "it lacks size"),
    ({"size": -1}, Part, "size is -1; expected"),
    ({"name": "n"}, Needed, "it lacks part"),
    ({"name": "n", "part": {"rate": "fast"}}, Needed, "it's part lacks size"),
    ("x" * 200, int, r"'x{56}\.\.\.; expected"),
]


@pytest.mark.parametrize("value, hint, expected", GOOD)
def test_good_values(value: object, hint: Any, expected: object) -> None:
    assert from_json(value, hint, "it") == expected


@pytest.mark.parametrize("value, hint, words", BAD)
def test_bad_values(value: object, hint: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        from_json(value, hint, "it")
