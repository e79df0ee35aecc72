"""JacHess under Accelerate: task loss of a labelled batch, penalty of an unlabelled one, one step.

accelerate launch examples/accelerate_loop.py [--tiny]     (or just python …)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from small_task import accuracy, load, parse
from torch.utils.data import DataLoader

import jachess_ext as jx
from jachess_ext.models import without_labels


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Its batches again and again: labelled epochs keep their length, however few these are.

    Started anew each time, so that it shuffles; itertools.cycle would keep every batch.
    """
    while True:
        yield from loader


def main() -> None:
    """Fine-tunes and prints the accuracy."""
    options = parse(__doc__)
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, train, unlabelled, dev = load(options.tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(train, 8, shuffle=True, collate_fn=train.collate)
    free = DataLoader(unlabelled, 8, shuffle=True, collate_fn=unlabelled.collate)
    model, optimizer, loader, free = accelerator.prepare(model, optimizer, loader, free)

    # The regulariser calls the prepared model, so mixed precision and data-parallel hooks act.
    reg = jx.JacHess(model, strength=options.strength, normalize=True, seed=0)
    reg.calibrate(islice(map(without_labels, free), 4))

    model.train()
    others = endless(free)
    for _ in range(1 if options.tiny else 2):
        for batch, other in zip(loader, others, strict=False):
            with accelerator.accumulate(model):
                loss = model(**batch).loss + reg(without_labels(other)).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.print(f"accuracy {accuracy(accelerator.unwrap_model(model), dev):.3f}")


if __name__ == "__main__":
    main()
