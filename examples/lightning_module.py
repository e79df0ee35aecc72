"""JacHess in a Lightning module.

python examples/lightning_module.py [--tiny]
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import lightning
import torch
from small_task import accuracy, load, parse
from torch.utils.data import DataLoader

import jachess_ext as jx


class Classifier(lightning.LightningModule):
    """A transformers classifier with the penalty in train mode."""

    def __init__(self, model: Any, strength: float) -> None:
        super().__init__()
        self.model = model
        self.regulariser = jx.JacHess(model, strength=strength, normalize=True, seed=0)

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """Task loss and penalty from one forward."""
        out = self.regulariser(batch)
        self.log_dict({"task": out.model_output.loss, "penalty": out.loss}, prog_bar=True)
        return out.total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain AdamW."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def main() -> None:
    """Fine-tunes and prints the accuracy."""
    options = parse(__doc__)
    lightning.seed_everything(0)
    model, train, _, dev = load(options.tiny)
    model.train()
    loader = DataLoader(train, 8, shuffle=True, collate_fn=train.collate)
    trainer = lightning.Trainer(
        max_epochs=1 if options.tiny else 2,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    module = Classifier(model, options.strength)
    module.regulariser.calibrate(islice(loader, 4))  # the base model's norms, before training
    trainer.fit(module, loader)
    print(f"accuracy {accuracy(model, dev):.3f}")


if __name__ == "__main__":
    main()
