"""What each process of `accelerate launch` runs:
`… -m python_tests.distributed.accelerate_job FOLDER [--micro N]`.

The main process leaves the parameters in FOLDER/results.pt.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

import jachess_ext as jx
from python_tests.distributed.rank_jobs import ROWS, SETTINGS, parameters, shard
from python_tests.processes import die_with_parent
from python_tests.smoothness.tiny_models import classifier

STEPS = 4


def rows(steps: int, world: int) -> list[dict[str, Tensor]]:
    """In an order that gives process r at step s the rows of `shard(s, r)`."""
    shards = [shard(step, rank) for step in range(steps) for rank in range(world)]
    return [{name: v[i] for name, v in one.items()} for one in shards for i in range(ROWS)]


def main() -> None:
    die_with_parent()  # the launcher gives every rank a session of its own
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--micro", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=given.micro)
    model: Any = classifier("bert")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    data: Any = rows(STEPS * given.micro, accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, ROWS))
    regulariser = jx.JacHess(model, **SETTINGS)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(regulariser(batch).total)
            optimizer.step()
            optimizer.zero_grad()
    found = parameters(model)
    if accelerator.is_main_process:
        what = {"processes": accelerator.num_processes, "steps": regulariser.step}
        what |= {"engine": accelerator.distributed_type.value, "model": type(model).__name__}
        torch.save({"parameters": found} | what, given.folder / "results.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
