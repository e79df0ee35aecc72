"""Every reader of a user's file, with a valid file for it and how it is called."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from jachess_ext import JacHess
from jachess_ext._io import from_json, read_json
from jachess_ext.cli import main
from jachess_ext.commands.ntk import class_numbers, read_samples
from jachess_ext.compare.records import RunRecord as ComparedRun
from jachess_ext.compare.records import read_records
from jachess_ext.compare.report import sections
from jachess_ext.compare.runs import run_all
from jachess_ext.compare.settings import Columns, Grid
from jachess_ext.compare.tasks import file_task, folder_task
from jachess_ext.live import LiveSelection, read_selection
from jachess_ext.live.trial import RunRecord
from jachess_ext.scaling import Search
from jachess_ext.training import DualSchedule
from jachess_ext.training.batches import UnlabelledBatches
from jachess_ext.training.trainer import STATE, read_state
from python_tests.compare.records import record

ROWS = [("a good film", "ein guter Film", 1), ('a, "bad" one', "ein schlechter", 0)] * 3


class Refused(Exception):
    """The command line said what is wrong, in its argument, and gave exit code 2."""


@dataclass(frozen=True)
class Reader:
    """`call` reads the file at a path; other than by `refusals` it must not fail.

    `out` files must exist after it exactly where it did not fail.
    """

    file: str
    valid: bytes
    call: Callable[[Path], object]
    refusals: tuple[type[Exception], ...] = (ValueError,)
    out: str | None = None


def json_lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def delimited(separator: str) -> bytes:
    lines = [("text", "text_pair", "label"), *ROWS]
    quoted = [[f'"{str(c).replace(chr(34), chr(34) * 2)}"' for c in line] for line in lines]
    return "".join(separator.join(line) + "\n" for line in quoted).encode()


JSONL = json_lines([{"text": a, "text_pair": b, "label": c} for a, b, c in ROWS])
CURVES = (
    b"name,size,0,200,400,800,1600\n"
    b"one,1000000,3.1,2.1,1.9,1.7,1.6\n"
    b"two,2000000,3.2,2.3,2.0,1.6,1.4\n"
    b"three,3000000,3.0,2.0,1.9,1.8,1.75\n"
)
GRID = json.dumps(
    asdict(Grid("model", ("a:b",), ("none", "jachess"), shift={"a": ("c:d",)})), indent=1
).encode()
RECORDS = json_lines(
    [
        asdict(record(method, "task", seed, 0.5 + 0.01 * seed))
        for method in ("none", "jachess")
        for seed in (0, 1)
    ]
)


def task(path: Path) -> object:
    return file_task(path, path, Columns())


def regression(path: Path) -> object:
    return file_task(path, path, Columns(label="label", regression=True))


def labels(path: Path) -> object:
    for name in ("train", "dev"):
        (path.parent / f"{name}.jsonl").write_bytes(JSONL)
    return folder_task(path.parent, Columns())


def ntk_samples(path: Path) -> object:
    _, labels = read_samples(path, ["text"], "label", 64)
    return class_numbers(labels)


def command(*arguments: str) -> None:
    """The command line, which must say one line where it refuses."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    if code == 2:
        raise Refused(said.getvalue().strip())
    assert code == 0


def live_selection() -> LiveSelection:
    """Two models on three subsets, by a formula."""
    search = Search(["a", "b"], [4, 8, 16], 256, metric="loss")
    records = []
    while ask := search.ask():
        loss = ask.rows ** (-0.3 if ask.model == "a" else -0.1)
        search.tell(ask, loss, cost=float(ask.rows))
        run = RunRecord(
            run=str(ask),
            model=ask.model,
            parameters=10,
            size=ask.rows,
            epochs=1.0,
            steps=1,
            seed=0,
            learning_rate=1e-3,
            time=1.0,
            tokens=9,
            metric="accuracy",
            dev_loss=loss,
        )
        records.append(asdict(run))
    return LiveSelection("t", 256, 40, {}, search, records)


LIVE = live_selection()


def live_records(path: Path) -> object:
    (path.parent / "selection.json").write_text(json.dumps(LIVE.to_dict()))
    return read_selection(path.parent).to_frame()


def live_result(path: Path) -> object:
    (path.parent / "records.jsonl").write_bytes(json_lines(list(LIVE.records)))
    return read_selection(path.parent).to_dict()


def select(path: Path) -> None:
    arguments = ["--target", "3200", "--method", "ats", "--out", str(path.parent / OUT)]
    command("select", str(path), *arguments)


def grid(path: Path) -> object:
    return from_json(read_json(path), Grid, "the grid")


def results(path: Path) -> object:
    return [section.title for section in sections(read_records(path))]


def run_file(path: Path) -> object:
    """A damaged file costs its run alone."""
    job = argparse.Namespace(name=path.stem)

    def usable(_: Any, found: Any) -> bool:
        from_json(found, ComparedRun, "the record")
        return True

    return list(run_all([job], lambda _: {"again": True}, path.parent, usable=usable))


def regulariser() -> JacHess:
    return JacHess(torch.nn.Linear(2, 2), weights="softmax", strength=0.1, seed=3)


REGULARISER = {
    "step": 3,
    "seed": 11,
    "base": {"jacobian": [1.0, 2.0], "hessian": [3.0, 4.0], "tokens": 100},
    "skipped": {"1": 2},
    "layer_weights": [0.75, 0.25],
}


def checkpoint_parts() -> dict[str, Any]:
    """What is restored from a checkpoint, by the part's name in it."""
    made = regulariser()
    batches = UnlabelledBatches([], torch.Generator(), seed=(0,), prepare=dict)
    return {
        "regulariser": made,
        "schedule": DualSchedule(made, [], lr=0.1),
        "unlabelled": batches,
    }


def _checkpoint() -> bytes:
    parts = checkpoint_parts()
    parts["regulariser"].load_state_dict(REGULARISER)
    for parameter in parts["regulariser"].model.parameters():
        parameter.grad = torch.ones_like(parameter)
    parts["schedule"].optimizer.step()
    parts["unlabelled"].load_state_dict({"round": 2, "taken": 1})
    file = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    return file.getvalue()


def checkpoint(path: Path) -> object:
    """What is refused a state stays as it was."""
    state, parts = read_state(path), checkpoint_parts()
    for name, part in parts.items():
        before = part.state_dict()
        try:
            if name in state:
                part.load_state_dict(state[name])
        except Exception:
            assert part.state_dict() == before
            raise
    return state


OUT = "out.json"
READERS = {
    "task jsonl": Reader("task.jsonl", JSONL, task),
    "task csv": Reader("task.csv", delimited(","), task),
    "task tsv": Reader("task.tsv", delimited("\t"), task),
    "task jsonl.gz": Reader("task.jsonl.gz", gzip.compress(JSONL, mtime=0), task),
    "regression csv": Reader("task.csv", delimited(","), regression),
    "labels.json": Reader("labels.json", b'["0 = bad", "1 = good"]', labels),
    "ntk jsonl": Reader("data.jsonl", JSONL, ntk_samples),
    "ntk txt": Reader("data.txt", b"one text\nanother\n", ntk_samples),
    "grid": Reader("grid.json", GRID, grid),
    "results.jsonl": Reader("results.jsonl", RECORDS, results),
    "run file": Reader("runs/run.json", RECORDS.splitlines()[0], run_file, (OSError,)),
    "live records": Reader("records.jsonl", json_lines(list(LIVE.records)), live_records),
    "live selection": Reader("selection.json", json.dumps(LIVE.to_dict()).encode(), live_result),
    "curves select": Reader("curves.csv", CURVES, select, (Refused,), OUT),
    "checkpoint": Reader(STATE, _checkpoint(), checkpoint),
}
SLOW = ("results.jsonl", "curves select")  # draws figures, or fits
"""Readers that take tenths of a second where the file is well."""
