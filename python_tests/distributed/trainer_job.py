"""A JacHess run of the Trainer on every rank, which leaves its parameters in FOLDER/parameters.pt.

torchrun … -m python_tests.distributed.trainer_job FOLDER [--mode MODE] [--die-at STEP] [--resume]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from python_tests.processes import die_with_parent
from python_tests.training.runs import examples, trainer

STEPS, SAVE_EVERY = 8, 3


class _Dies(TrainerCallback):
    """Rank 1 is killed, as by the system, at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    die_with_parent()  # the launcher gives every rank a session of its own
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--mode", default="train")
    options.add_argument("--die-at", type=int, default=0)
    options.add_argument("--resume", action="store_true")
    given = options.parse_args()
    made = trainer(
        given.folder,
        {"mode": given.mode, "strength": 0.1, "dimensions": 4},
        data=examples(64),
        unlabelled=None if given.mode == "train" else examples(14, seed=5, labels=False),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        ddp_backend="gloo",
        gradient_accumulation_steps=2,
    )
    made.add_callback(_Dies(given.die_at))
    made.train(resume_from_checkpoint=given.resume)
    if made.args.process_index == 0:
        found = {name: value.detach() for name, value in made.model.named_parameters()}
        logs = [entry for entry in made.state.log_history if "jachess/penalty" in entry]
        torch.save({"parameters": found, "logs": logs}, given.folder / "parameters.pt")


if __name__ == "__main__":
    main()
