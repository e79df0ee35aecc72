"""The task loss has one size, on however many ranks and micro-batches a step is spread."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from python_tests import processes
from python_tests.training.runs import method_trainer

from .scale_job import cases, runs

ROOT = Path(__file__).resolve().parents[2]
Runs = dict[Any, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Runs]:
    """The same steps in one process and on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "-m", "python_tests.distributed.scale_job", str(folder)]
    run = processes.run(command, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    return runs(folder, 1), torch.load(folder / "runs.pt")


@pytest.mark.parametrize("method, kind", cases())
def test_steps_are_the_same(by_ranks: tuple[Runs, Runs], method: str, kind: str) -> None:
    expected = by_ranks[0][method, kind, 1]
    for found in by_ranks:
        for micro in (1, 2):
            for name, value in found[method, kind, micro].items():
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-6, atol=1e-8, msg=f"{micro} {name}"
                )


def test_a_loss_function_that_ignores_the_count(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels)

    settings = {"options": {"compute_loss_func": loss}, "gradient_accumulation_steps": 2}
    with pytest.raises(
        ValueError, match=r"compute_loss_func is given .* 2 times too large; return"
    ):
        method_trainer(tmp_path, "none", **settings).train()
