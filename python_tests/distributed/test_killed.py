"""A rank killed with -9 in the middle of a run: the job ends, and resumed gives the same result."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from python_tests import processes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def launch(folder: Path, *arguments: str) -> CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "python_tests.distributed.trainer_job",
        str(folder),
        *arguments,
    ]
    return processes.run(command, cwd=ROOT)


def result(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "parameters.pt", weights_only=True)


@pytest.mark.parametrize("mode", ["train", "joint"])
def test_a_killed_rank(tmp_path: Path, mode: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed = launch(whole, "--mode", mode)
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]

    killed = launch(broken, "--mode", mode, "--die-at", "5")
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr
    assert not (broken / "parameters.pt").exists()
    assert [path.name for path in broken.glob("checkpoint-*")] == ["checkpoint-3"]

    resumed = launch(broken, "--mode", mode, "--resume")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    expected, found = result(whole), result(broken)
    for name, value in expected["parameters"].items():
        assert torch.equal(found["parameters"][name], value), name
    last = [logs["logs"][-1]["jachess/penalty"] for logs in (expected, found)]
    assert last[0] == last[1]
