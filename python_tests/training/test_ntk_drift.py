"""The drift callback in real, tiny Trainer runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import jachess_ext as jx
from jachess_ext.ntk import label_alignment
from jachess_ext.training import NTKDrift

from .runs import assert_same_parameters, examples, tensors, trainer


def _batch() -> dict[str, torch.Tensor]:
    return tensors(examples(5, tokens=4, seed=9))


def _run(folder: Path, drift: NTKDrift, kind: type = Trainer, **settings: Any) -> Any:
    return trainer(folder, kind=kind, options={"callbacks": [drift]}, **settings)


def test_a_run(tmp_path: Path) -> None:
    """Measured at the start, every other step and at the end; the numbers are ntk's own."""
    drift = NTKDrift(_batch(), every=2)
    run = _run(tmp_path, drift, max_steps=5, learning_rate=0.01)
    first = jx.ntk(run.model, _batch())
    run.train()
    assert [point["step"] for point in drift.history] == [0, 2, 4, 5]
    last = jx.ntk(run.model, _batch())
    assert torch.equal(drift.start, first)
    begin, end = drift.history[0], drift.history[-1]
    assert begin["ntk/drift"] == begin["ntk/change"] == 0
    expected = float((last.double() - first.double()).norm() / first.double().norm())
    assert end["ntk/drift"] == pytest.approx(expected, rel=1e-5) and expected > 1e-3
    assert end["ntk/alignment"] == pytest.approx(
        label_alignment(last, _batch()["labels"]), rel=1e-5
    )
    assert run.model.training  # as the Trainer left it: the measurement changes no mode
    logged = [entry for entry in run.state.log_history if "ntk/drift" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4, 5]
    assert logged[-1]["ntk/drift"] == end["ntk/drift"]
    assert logged[-1]["ntk/alignment"] == end["ntk/alignment"]


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    with_drift = _run(tmp_path / "a", NTKDrift(_batch(), every=1), max_steps=3)
    plain = trainer(tmp_path / "b", kind=Trainer, max_steps=3)
    for run in (with_drift, plain):
        run.train()
    assert_same_parameters(with_drift.model, plain.model, rtol=0, atol=0)


def test_entries_through_the_trainers_log(tmp_path: Path) -> None:
    from jachess_ext.training import MethodTrainer

    drift = NTKDrift(_batch(), every=2, outputs="sum", method="gram")
    run = _run(tmp_path, drift, kind=MethodTrainer, max_steps=2)
    seen: list[dict] = []
    log = run.log
    run.log = lambda logs, *rest: (seen.append(dict(logs)), log(logs, *rest))
    drift.log = run.log
    run.train()
    assert sum("ntk/drift" in entry for entry in seen) == 2
    assert [e["step"] for e in run.state.log_history if "loss" in e] == [1, 2]
    assert drift.start is not None and drift.start.shape == (5, 1, 5, 1)


def test_stabilised() -> None:
    drift = NTKDrift({})
    changes = [0, 0.5, 0.01, 0.3, 0.02, 0.01]
    drift.history = [{"step": 10 * i, "ntk/change": c} for i, c in enumerate(changes)]
    assert drift.stabilised(0.05) == 30
    assert drift.stabilised(0.4) == 10
    assert drift.stabilised(0.001) is None


def test_resuming_without_the_start_is_warned_of(tmp_path: Path) -> None:
    run = _run(tmp_path, NTKDrift(_batch(), every=5), max_steps=1, save_strategy="steps",
               save_steps=1)  # fmt: skip
    run.train()
    again = _run(tmp_path, NTKDrift(_batch(), every=5), max_steps=2)
    with pytest.warns(RuntimeWarning, match="resumes at step 1.*pass start="):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("settings, sentence", [
    ({"every": 0}, "every is 0; expected a number of steps"),
    ({"group": 1}, "group cannot be used in a callback"),
    ({"method": "explain"}, "method='explain' cannot be used"),
])  # fmt: skip
def test_bad_arguments(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NTKDrift(_batch(), **settings)
