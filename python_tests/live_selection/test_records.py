"""Records, kernels and results on disk: read back as written, and half a file is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jachess_ext.live_selection import (
    Candidate,
    Flops,
    Kernel,
    LiveSelection,
    Prediction,
    RunRecord,
    Seconds,
    SelectionFolder,
    read_records,
    read_selection,
)
from jachess_ext.live_selection.records import merged
from jachess_ext.tasks.examples import DataError

RECORD = RunRecord(
    run="a-50-s0",
    model="a",
    parameters=1000,
    size=50,
    epochs=3.0,
    steps=12,
    seed=0,
    learning_rate=1e-3,
    time=6.5,
    tokens=400,
    metric="accuracy",
    dev_loss=0.7,
    dev_score=0.5,
    kernel="a-50-s0.npz",
    seconds=Seconds(1.0, 2.0, 3.0),
)


def kernel(examples: int = 3, outputs: int = 2) -> Kernel:
    n = examples * outputs
    root = np.random.default_rng(0).standard_normal((n, n))
    theta = (root @ root.T).astype(np.float32)
    return Kernel(
        theta.reshape(examples, outputs, examples, outputs),
        np.ones((examples, outputs)),
        np.linalg.eigvalsh(theta.astype(np.float64)),
        np.arange(examples),
    )


@pytest.fixture
def folder(tmp_path: Path) -> SelectionFolder:
    made = SelectionFolder(tmp_path)
    with made.locked():
        made.add(RECORD, kernel())
    return made


def test_a_run_is_read_back(folder: SelectionFolder) -> None:
    found = folder.finished(RECORD.run)
    assert found == RECORD and found.seconds == RECORD.seconds
    assert found == replace(RECORD, seconds=None) and found != replace(RECORD, dev_loss=0.8)
    assert folder.finished("another") is None
    for name, value in vars(kernel()).items():
        np.testing.assert_array_equal(getattr(folder.kernel(RECORD), name), value)
    folder.assemble([RECORD])
    assert read_records(folder.folder) == [RECORD]


@pytest.mark.parametrize("name", ["runs/a-50-s0.json", "kernels/a-50-s0.npz"])
@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_half_a_file_is_noticed_and_only_its_run_is_lost(
    folder: SelectionFolder, name: str, kept: int
) -> None:
    other = replace(RECORD, run="b-50-s0", kernel="b-50-s0.npz")
    folder.add(other, kernel())
    path = folder.folder / name
    content = path.read_bytes()
    path.write_bytes(content[: kept - 1] if kept < 0 else content[:kept])
    with pytest.warns(RuntimeWarning, match="only this run is made again"):
        assert folder.finished(RECORD.run) is None
    assert folder.finished(RECORD.run) is None and folder.finished(other.run) == other
    assert (folder.runs / "a-50-s0.broken").is_file(), "nothing is thrown away"


@pytest.mark.parametrize("content", ["{}", "[]", "3", '{"record": {"run": "a"}}'])
def test_other_json_is_no_record(folder: SelectionFolder, content: str) -> None:
    (folder.runs / "a-50-s0.json").write_text(content)
    with pytest.warns(RuntimeWarning, match="is not a whole record"):
        assert folder.finished(RECORD.run) is None


def test_a_kernel_of_other_shapes_is_refused(folder: SelectionFolder) -> None:
    wrong = replace(kernel(), residual=np.ones((2, 2)))
    with pytest.raises(ValueError, match="a kernel of shape"):
        Kernel.from_bytes(wrong.to_bytes())
    with pytest.raises(DataError, match="has no kernel: it diverged"):
        folder.kernel(replace(RECORD, kernel=None, error="it diverged"))
    with pytest.raises(DataError, match="cannot be read"):
        folder.kernel(replace(RECORD, kernel="none.npz"))


def selection() -> LiveSelection:
    return LiveSelection(
        task="t",
        train_rows=800,
        dev_rows=100,
        method="blend",
        target=800,
        level=0.9,
        order="growing",
        budget="1/8",
        sizes=(25, 50, 100),
        candidates=(Candidate("a", 10, (0, 25, 50, 100), "done"), Candidate("b", 9, (0,), "out")),
        predictions={
            "blend": (Prediction("b", 0.3, 0.3, 0.2, 0.4, 0.9), Prediction("a", 0.5, 0.5)),
            "modelsize": (Prediction("a", -2.3), Prediction("b", -2.2)),
        },
        missing={"power": "too few points"},
        stop="the budget is spent",
        flops=Flops(1.0, 2.0, 3.0, 0.5, 13.0, 2.0),
        seconds=4.0,
    )


def test_a_selection_is_read_back(tmp_path: Path) -> None:
    SelectionFolder(tmp_path).write_selection(selection())
    found = read_selection(tmp_path)
    assert found == selection() == replace(selection(), seconds=9.0)
    assert found.best == "b" and found.share == 1 / 8
    assert found.flops.spent == 6.5 and found.flops.share == 0.5


def test_an_unfinished_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="may not have finished"):
        read_selection(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        read_records(tmp_path)
    (tmp_path / "selection.json").write_text(json.dumps(selection().to_dict())[:-9])
    with pytest.raises(DataError, match="is not the result of a live selection"):
        read_selection(tmp_path)
    (tmp_path / "records.jsonl").write_text('{"run": 1}\n')
    with pytest.raises(DataError, match="line 1 is no record"):
        read_records(tmp_path)


def test_the_best_rate_counts_and_every_run_is_charged() -> None:
    """Rate .1 has the lower mean loss, rate .2 the lowest single one and the higher accuracy."""
    runs = [
        replace(
            RECORD,
            learning_rate=rate,
            seed=seed,
            dev_loss=loss,
            scores={"accuracy": accuracy},
            dev_rows=40,
            training_flops=100.0,
            judging_flops=10.0,
            probe_flops=1.0,
        )
        for rate, seed, loss, accuracy in (
            *((0.1, 0, 0.5, 0.6), (0.1, 1, 0.7, 0.7)),
            *((0.2, 0, 0.4, 0.8), (0.2, 1, 0.9, 0.9)),
        )
    ]
    found = merged(runs, "loss")
    assert (found.learning_rate, found.dev_loss) == (0.1, pytest.approx(0.6))
    assert found.scores == {"accuracy": pytest.approx(0.65)}
    assert (found.training_flops, found.judging_flops, found.probe_flops) == (400.0, 40.0, 4.0)
    assert found.seconds == Seconds(4.0, 8.0, 12.0)
    found = merged(runs, "accuracy")
    assert (found.learning_rate, found.dev_loss) == (0.2, pytest.approx(0.65))
