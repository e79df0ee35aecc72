"""JacHess in a loop of one's own: train mode on labelled batches, then passes over unlabelled text.

python examples/plain_loop.py [--tiny]
"""

from __future__ import annotations

from itertools import islice

import torch
from small_task import accuracy, load, parse
from torch.utils.data import DataLoader

import jachess_ext as jx


def main() -> None:
    """Fine-tunes and prints the accuracy."""
    options = parse(__doc__)
    torch.manual_seed(0)
    model, train, unlabelled, dev = load(options.tiny)
    loader = DataLoader(train, 8, shuffle=True, collate_fn=train.collate)
    free = DataLoader(unlabelled, 8, shuffle=True, collate_fn=unlabelled.collate)

    reg = jx.JacHess(model, strength=options.strength, normalize=True, seed=0)
    reg.calibrate(islice(loader, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # unlab mode: R alone, with an optimiser of its own; leave it out for train mode alone
    passes = jx.training.DualSchedule(reg, free, lr=1e-5)

    model.train()
    for epoch in range(1 if options.tiny else 2):
        for batch in loader:
            out = reg(batch)  # one forward: task loss and penalty
            out.total.backward()
            optimizer.step()
            optimizer.zero_grad()
        summary = passes.after_epoch()
        assert summary is not None
        print(f"epoch {epoch}: penalty {summary['penalty']:.4f}")
    print(f"accuracy {accuracy(model, dev):.3f}")


if __name__ == "__main__":
    main()
