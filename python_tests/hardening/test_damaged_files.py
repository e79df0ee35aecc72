"""Damaged files to every reader: a result, or one sentence and nothing written.

Damages are those of disks, editors and hostile hands, and some drawn from a seed.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from jachess_ext import JacHess
from jachess_ext._io import DataError, from_json, read_json
from jachess_ext.lab.cli import main
from jachess_ext.lab.compare.records import read_records
from jachess_ext.lab.compare.report import sections
from jachess_ext.lab.compare.settings import Grid
from jachess_ext.lab.workbench.tasks import load_task
from jachess_ext.training.trainer import STATE, read_state, write_state
from python_tests.lab.compare.records import record

LONGEST = 600
"""Characters of a refusal, without the path."""
SEEDS = 5

# Damages ----------------------------------------------------------------------------------------

NUMBER = re.compile(rb"-?\d+(\.\d+)?")
STRANGE = [
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"1e308", b"5e-324", b"null", b"true", b"[]"),
    *(b"9" * 25, b"9" * 5000, b'"text"', b"{}", b'"\\ud800"', b"1_0", "\u0664".encode(), b'""'),
]
INSERTED = [
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n", b'"', b",", b"{", b"]", b"\\", b":"),
    *(b"\xe2\x80\xa8", b"\xed\xa0\x80", b"<script>"),
]


def hostile(valid: bytes) -> dict[str, bytes]:
    """Return damages by name, the same every time."""
    half = len(valid) // 2
    lines = valid.split(b"\n")
    return {
        "empty": b"",
        "white space": b" \n\n\t\n",
        "a NUL byte": valid[:half] + b"\x00" + valid[half:],
        "not UTF-8": valid[:half] + b"\xff" + valid[half:],
        "UTF-16": valid.decode("latin-1").encode("utf-16"),
        "two byte-order marks": b"\xef\xbb\xbf" * 2 + valid,
        "CR alone": valid.replace(b"\n", b"\r"),
        "twice": valid * 2,
        "nested deeply": b"[" * 100_000,
        "nested objects": b'{"a":' * 100_000,
        "nested deeply and closed": b"[" * 50_000 + b"]" * 50_000,
        "a long line": b"a" * 300_000,
        "a quote without an end": valid + b'"',
        "gzip header": b"\x1f\x8b\x08" + valid,
        "half of a surrogate pair": valid.replace(b"e", b"\\ud800", 1),
        "names twice": valid.replace(b"{", b'{"a": 1, "a": 2, ', 1),
        "first line only": lines[0] + b"\n",
        "without its first line": b"\n".join(lines[1:]),
        **{f"cut to {n} %": valid[: len(valid) * n // 100] for n in (1, 10, 50, 90, 99)},
        **{f"every number {t[:9]!r}": NUMBER.sub(lambda _, t=t: t, valid) for t in STRANGE},
        **{f"seed {seed}": mutated(valid, seed) for seed in range(SEEDS)},
    }


def mutated(valid: bytes, seed: int) -> bytes:
    """Return one to four random damages: cut, left out, repeated, put in, a number changed."""
    draw = random.Random(seed)
    content = valid
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(content) + 1)
        end = place + draw.choice((1, 2, 8, 40))
        head, middle, tail = content[:place], content[place:end], content[end:]
        found = list(NUMBER.finditer(content)) or [re.search(b"", content)]
        number = draw.choice(found)
        assert number is not None
        content = draw.choice(
            [
                head,
                head + tail,
                head + middle * 200 + tail,
                head + draw.choice(INSERTED) + middle + tail,
                head + draw.randbytes(len(middle)) + tail,
                content[: number.start()] + draw.choice(STRANGE) + content[number.end() :],
            ]
        )
    return content


# Readers ----------------------------------------------------------------------------------------


class Refused(Exception):
    """The command line said what is wrong, in its argument, and gave exit code 2."""


@dataclass(frozen=True)
class Reader:
    """`call` reads the file at a path; other than by a ValueError or `Refused` it must not fail.

    `out` exists after it exactly where it did not fail.
    """

    file: str
    valid: bytes
    call: Callable[[Path], object]
    out: str | None = None


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


JSONL = json_lines([{"text": "a film", "label": 1}, {"text": 'a, "bad" one', "label": 0}] * 3)
CSV = b'text,label\n"a film",1\n"a, ""bad"" one",0\n' + b"more,1\nless,0\n" * 2
CURVES = (
    b"name,size,0,200,400,800,1600\n"
    b"one,1000000,3.1,2.1,1.9,1.7,1.6\n"
    b"two,2000000,3.2,2.3,2.0,1.6,1.4\n"
    b"three,3000000,3.0,2.0,1.9,1.8,1.75\n"
)
GRID = Grid("model", ("a:b",), ("none", "jachess"), shift={"a": ("c:d",)})
RECORDS = json_lines(
    [
        asdict(record(method, "task", seed, 0.5 + 0.01 * seed))
        for method in ("none", "jachess")
        for seed in (0, 1)
    ]
)


def regulariser() -> JacHess:
    return JacHess(torch.nn.Linear(2, 2), weights="softmax", strength=0.1, seed=3)


def checkpoint_bytes() -> bytes:
    base = {"jacobian": [1.0, 2.0], "hessian": [3.0, 4.0], "tokens": 100}
    state = {
        "step": 3,
        "seed": 11,
        "base": base,
        "skipped": {"1": 2},
        "layer_weights": [0.75, 0.25],
    }
    schedule = {"taken": 1, "passes": 1, "moments": {0: {"exp_avg": torch.ones(3, 2)}}}
    with tempfile.TemporaryDirectory() as folder:
        write_state(Path(folder, STATE), {"regulariser": state, "schedule": schedule})
        return Path(folder, STATE).read_bytes()


def checkpoint(path: Path) -> object:
    """Restore a regulariser; what is refused a state stays as it was."""
    state, made = read_state(path), regulariser()
    before = made.state_dict()
    try:
        if "regulariser" in state:
            made.load_state_dict(state["regulariser"])
    except Exception:
        assert made.state_dict() == before
        raise
    return state


def results(path: Path) -> list[str]:
    return [section.title for section in sections(read_records(path))]


def select(path: Path) -> None:
    """Call the command, which must say one line where it refuses."""
    said, out = io.StringIO(), path.parent / "out.json"
    given = ["select", str(path), "--target", "3200", "--method", "ats", "--out", str(out)]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(given)
    if code == 2:
        raise Refused(said.getvalue().strip())
    assert code == 0


READERS = {
    "task jsonl": Reader("task.jsonl", JSONL, lambda path: load_task(f"{path}:{path}")),
    "task csv": Reader("task.csv", CSV, lambda path: load_task(f"{path}:{path}")),
    "grid": Reader(
        "grid.json",
        json.dumps(asdict(GRID), indent=1).encode(),
        lambda path: from_json(read_json(path), Grid, "the grid"),
    ),
    "results.jsonl": Reader("results.jsonl", RECORDS, results),
    "curves": Reader("curves.csv", CURVES, select, "out.json"),
    "checkpoint": Reader(STATE, checkpoint_bytes(), checkpoint),
}


def attempt(reader: Reader, folder: Path, content: bytes | None = None) -> str:
    """Read `content` (None: what is there); "read" or "refused".

    Raises:
        AssertionError: neither, as the message says.
    """
    path = folder / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    before = set(folder.rglob("*"))
    answer, refusal = "read", Exception()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reader.call(path)
        except (ValueError, Refused) as error:
            answer, refusal = "refused", error
    if answer == "refused":
        text = str(refusal).replace(str(folder), "")
        text = text.partition(", as in\n  jachess select ")[0]  # a command to paste follows
        assert text and "\n" not in text and len(text) <= LONGEST, f"no sentence: {text}"
        assert not isinstance(refusal, UnicodeError), text
    written = {path.name for path in set(folder.rglob("*")) - before}
    assert written == ({reader.out} if reader.out and answer == "read" else set()), written
    return answer


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    reader, answers = READERS[name], []
    assert attempt(reader, tmp_path / "whole", reader.valid) == "read"
    for number, (damage, content) in enumerate(hostile(reader.valid).items()):
        try:
            answers.append(attempt(reader, tmp_path / str(number), content))
        except Exception as error:
            raise AssertionError(f"{damage}: {error!r}") from error
    assert answers.count("refused") > 15


@pytest.mark.parametrize("name", READERS)
def test_no_file_and_links(tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    missing, folder, loop, link = (tmp_path / str(n) / reader.file for n in range(4))
    for path in (missing, loop, link):
        path.parent.mkdir()
    folder.mkdir(parents=True)
    loop.symlink_to(loop)
    (tmp_path / "elsewhere").write_bytes(reader.valid)
    link.symlink_to(tmp_path / "elsewhere")
    expected = {"refused", "read"} if name == "checkpoint" else {"refused"}  # none is none
    for path in (missing, folder, loop):
        assert attempt(reader, path.parent) in expected
    assert attempt(reader, link.parent) == "read"


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


@pytest.mark.parametrize(
    "old, new, title",
    [
        # U+2028 within a task's name: no line break for JSON, one for str.splitlines
        (b'"task": "task"', '"task": "a\u2028b"'.encode(), "Scores"),
        # null in the file is not finite: the run is left out of the mean
        (b'"jacobian": [1.0, 2.0]', b'"jacobian": [null, 2.0]', "Smoothness"),
        (b'"0.2": ', b'"0.3": null, "0.2": ', "Smoothness"),
    ],
)
def test_unusual_results_are_drawn(tmp_path: Path, old: bytes, new: bytes, title: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(RECORDS.replace(old, new))
    assert title in results(path)


WHOLE = {"step": 1, "seed": 1, "base": None, "skipped": {}, "layer_weights": None}
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
def test_states_of_no_regulariser(changes: dict[str, Any], words: str) -> None:
    made = regulariser()
    with pytest.raises(ValueError, match=words):
        made.load_state_dict(WHOLE | changes)
    assert made.step == 0 and made.base is None
