"""What each process of `accelerate launch` runs: `accelerate_job` as a module, with a folder.

The main process leaves the parameters in FOLDER/results.pt.
"""

from __future__ import annotations

import sys
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

STEPS, MICRO = 4, 2


def rows(steps: int, world: int) -> list[dict[str, Tensor]]:
    """In an order that gives process r at step s the rows of `shard(s, r)`."""
    shards = [shard(step, rank) for step in range(steps) for rank in range(world)]
    return [{name: v[i] for name, v in one.items()} for one in shards for i in range(ROWS)]


def main(folder: Path) -> None:
    die_with_parent()  # the launcher gives every rank a session of its own
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    model: Any = classifier("bert")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    data: Any = rows(STEPS * MICRO, accelerator.num_processes)
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
        what |= {"parameters": found, "model": type(model).__name__}
        torch.save(what, folder / "results.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
