"""On a GPU the Trainer logs and learns what it does on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .runs import entries, parameters, trainer
from .test_trainer import normalised

pytestmark = pytest.mark.cuda
USE_CPU = False


def test_steps_are_the_cpus(tmp_path: Path) -> None:
    logs, models = [], []
    for use_cpu in (True, USE_CPU):
        made = trainer(
            tmp_path / str(use_cpu), {"strength": 0.2, "seed": 0}, max_steps=3, use_cpu=use_cpu
        )
        made.train()
        logs.append(entries(made, "loss"))
        models.append({n: p.cpu() for n, p in parameters(made.model).items()})
    for ours, theirs in zip(logs[1], logs[0], strict=True):
        for key in theirs:
            if key.startswith("jachess/") or key == "loss":
                assert ours[key] == pytest.approx(theirs[key], rel=2e-3), key
    for name, expected in models[0].items():
        torch.testing.assert_close(models[1][name], expected, rtol=1e-3, atol=1e-4, msg=name)


def test_bf16(tmp_path: Path) -> None:
    made = trainer(tmp_path, {"strength": 0.3}, bf16=True, use_cpu=USE_CPU)
    made.train()
    assert all(torch.isfinite(p).all() for p in made.model.parameters())
    for entry in entries(made, "loss"):
        assert entry["jachess/penalty"] == pytest.approx(0.3 * normalised(made, entry), rel=1e-4)
