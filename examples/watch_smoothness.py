"""Looking without penalising: a model's smoothness over three fine-tunings, as a picture.

transformers' Trainer without and with JacHess, and Lightning's, each with its monitor.

python examples/watch_smoothness.py [--tiny] [--out smoothness.png]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from small_task import load
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import jachess_ext as jx
from jachess_ext.lab.workbench.page import COLOURS, MARKERS, panels
from jachess_ext.training import MethodTrainer

SHOWN = {
    "smoothness/jacobian": "Σ over blocks of ‖J‖",
    "smoothness/logit_jacobian": "‖∂ logits/∂x‖",
    "smoothness/margin_over_slope": "margin over slope",
}


class Classifier(lightning.LightningModule):
    """A transformers classifier, trained as it is."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """The task's loss."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain AdamW."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def with_transformers(method: str, steps: int, every: int, tiny: bool) -> list[dict[str, float]]:
    """The monitor's entries of one run of transformers' Trainer."""
    model, train, _, dev = load(tiny)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-3,
            save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = MethodTrainer(
            model=model, args=arguments, train_dataset=train, data_collator=train.collate,
            method=method,
        )  # fmt: skip
        monitor = jx.SmoothnessMonitor(dev.batch(range(16)), every=every, log=trainer.log)
        trainer.add_callback(monitor)
        trainer.train()
    return monitor.history


def with_lightning(steps: int, every: int, tiny: bool) -> list[dict[str, float]]:
    """The monitor's entries of one run of Lightning's Trainer, without a penalty."""
    lightning.seed_everything(0)
    model, train, _, dev = load(tiny)
    module = Classifier(model.train())
    monitor = jx.LightningSmoothnessMonitor(dev.batch(range(16)), every=every)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="auto", logger=False, callbacks=[monitor],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(train, 8, shuffle=True, collate_fn=train.collate))
    return monitor.history


def main() -> None:
    """Trains three times and draws the figures over the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few steps: does it run?")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    steps, every = (4, 2) if options.tiny else (80, 10)
    runs = {
        "Trainer": with_transformers("none", steps, every, options.tiny),
        "Trainer, JacHess": with_transformers("jachess-train,strength=0.03", steps, every,
                                              options.tiny),
        "Lightning": with_lightning(steps, every, options.tiny),
    }  # fmt: skip
    for name, history in runs.items():
        first, last = history[0], history[-1]
        changes = [f"{label} {first[key]:.3g} → {last[key]:.3g}" for key, label in SHOWN.items()]
        print(f"{name}: {', '.join(changes)}")
    if options.out is not None:
        figure, axes = panels(columns=len(SHOWN), width=3.0 * len(SHOWN), height=2.8)
        for panel, (key, label) in zip(axes, SHOWN.items(), strict=True):
            for (name, history), colour, marker in zip(
                runs.items(), COLOURS, MARKERS, strict=False
            ):
                places = [entry["step"] for entry in history]
                heights = [entry[key] for entry in history]
                panel.plot(
                    places, heights, color=colour, marker=marker, markersize=3, label=name
                )  # fmt: skip
            panel.set(title=label, xlabel="step")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
        figure.savefig(options.out)


if __name__ == "__main__":
    main()
