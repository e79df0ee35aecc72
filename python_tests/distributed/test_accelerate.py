"""`accelerate launch` of two processes (gloo) against one process on the joined batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from python_tests import processes
from python_tests.distributed.accelerate_job import MICRO, STEPS
from python_tests.distributed.test_data_parallel import (  # noqa: F401  a fixture among them
    assert_same,
    joined_directions,
    training_steps,
)

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
# --cpu would start one process whatever --num_processes says (accelerate 1.15): the script asks
# for the CPU itself, with Accelerator(cpu=True).
LAUNCH = f"""-m accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes {WORLD}
--mixed_precision no --dynamo_backend no --main_process_port 0
-m python_tests.distributed.accelerate_job"""


@pytest.mark.slow
def test_training_steps(tmp_path: Path, joined_directions: None) -> None:  # noqa: F811
    """Its own data loader, optimiser, backward and accumulation: the same parameters, to 1e-6."""
    expected = training_steps(WORLD, MICRO)
    run = processes.run([sys.executable, *LAUNCH.split(), str(tmp_path)], cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    found = torch.load(tmp_path / "results.pt", weights_only=True)
    assert found["processes"] == WORLD and found["model"] == "DistributedDataParallel"
    assert found["steps"] == STEPS * MICRO
    assert_same(found["parameters"], expected)
