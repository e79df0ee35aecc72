"""What the demo runs and how it trains; importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..compare.settings import Columns

Method = Literal["none", "recommended", "train", "unlab"]
Form = Literal["joint", "alternating"]

TITLES: dict[Method, str] = {
    "none": "no regulariser",
    "recommended": "recommended",
    "train": "JacHess-train",
    "unlab": "JacHess-unlab",
}
"""The methods compared, and what they are called in tables and figures."""


@dataclass(frozen=True)
class Recipe:
    """How all methods train; only the last six fields concern JacHess.

    `strength` multiplies R after each layer's norms were divided by their value in the base model
    (R is 2 before training). In the joint form, a step minimises task loss + strength · R with R on
    an unlabelled batch. In the alternating form, a step on the task is followed by a step on R with
    an optimiser of its own: AdamW cancels the size of a loss, so there strength multiplies the
    learning rate instead.
    """

    steps: int = 160
    batch_size: int = 8
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.1
    strength: float = 0.01
    weights: str = "softmax"
    form: Form = "joint"
    directions: int = 2
    dimensions: int = 10
    scope: Literal["all", "first", "last"] = "all"


@dataclass(frozen=True)
class Options:
    """What to run. `train` and `dev`, or `dataset`, replace the demo's own task."""

    out: Path = Path("jachess-demo")
    model: str | None = None
    train: Path | None = None
    dev: Path | None = None
    dataset: str | None = None
    columns: Columns = field(default_factory=Columns)
    seeds: int = 3
    recipe: Recipe = field(default_factory=Recipe)
    methods: tuple[Method, ...] = tuple(TITLES)
    train_size: int = 600
    unlabelled_size: int = 600
    dev_size: int = 480
    max_length: int = 48
    threads: int = 1

    def quick(self) -> Options:
        """The same at a size for continuous integration: it shows that everything runs."""
        return replace(
            self,
            seeds=min(self.seeds, 1),
            recipe=replace(self.recipe, steps=min(self.recipe.steps, 20)),
            train_size=240,
            unlabelled_size=120,
            dev_size=120,
        )
