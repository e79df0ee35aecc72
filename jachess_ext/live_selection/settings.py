"""`LiveSettings`: what a live selection is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..experiment.grid import Recipe
from ..tasks.examples import DataError
from ..tasks.files import Columns
from .budget import Budget

Order = Literal["growing", "halving"]


@dataclass(frozen=True)
class LiveSettings:
    """A live selection.

    Attributes:
        models: candidates, hub ids or paths.
        train, dev: files that `tasks.files` reads; labels are classes.
        budget: see `Budget`.
        sizes: subsets, increasing; None: halvings of the largest that the budget allows, down to
            16 rows (with a share: seven at most).
        target: training examples to predict for; None: all rows of `train`.
        order: "growing": all models on the smallest subset, then all on the next; "halving": from
            the largest down (Algorithm 1), each model until a loss leaves its line.
        method: of the ranking, the probabilities and the stop; see `predict.METHODS`.
        gamma, tau: Algorithm 1's points accepted unseen, and deviations that stop it.
        confidence: stop when one model is the best with this probability.
        drop: run no more of a model whose probability of being the best is below this.
        level: of the intervals.
        probe: training rows that Θ is measured on, the first of the order.
        seed: of head, order within a run, and dropout.
        data_seed: of the order the training rows are taken in.
        dev_size: dev rows used; None: all.
        columns: of the files.
        recipe: how every model is fine-tuned.
    """

    models: tuple[str, ...]
    train: Path
    dev: Path
    budget: Budget = field(default_factory=lambda: Budget.parse("1/8"))
    sizes: tuple[int, ...] | None = None
    target: int | None = None
    order: Order = "growing"
    method: str = "bayes"
    gamma: int = 3
    tau: float = 5.0
    confidence: float | None = None
    drop: float | None = None
    level: float = 0.9
    probe: int = 32
    seed: int = 0
    data_seed: int = 0
    dev_size: int | None = None
    columns: Columns = field(default_factory=Columns)
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        twice = [model for place, model in enumerate(self.models) if model in self.models[:place]]
        if twice:
            raise DataError(f"the model {twice[0]!r} is given twice; expected each model once")
        if len(self.models) < 2:
            raise DataError(f"{len(self.models)} model to choose from; expected two or more")
        for name in ("probe", "dev_size", "target"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name} is {value}; expected 1 or more")
        for name in ("confidence", "drop", "level"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise DataError(f"{name} is {value}; expected a probability between 0 and 1")
        if self.gamma < 3:
            raise DataError(f"gamma is {self.gamma}; expected 3 or more points for a line")
        if not self.tau > 0:
            raise DataError(f"tau is {self.tau}; expected a positive number of deviations")
        if self.recipe.lora:
            raise DataError("a live selection counts 6 N D of full fine-tuning; leave lora out")
        if self.order == "halving" and self.budget.unit == "seconds":
            raise DataError(
                "halving begins with the largest subset, which minutes do not tell; give the "
                "budget as a share of the data or in FLOPs"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.sizes is None:
            return
        if not self.sizes or self.sizes[0] < 1:
            raise DataError(f"sizes is {list(self.sizes)}; expected numbers of rows from 1 up")
        for one, following in zip(self.sizes, self.sizes[1:], strict=False):
            if following <= one:
                raise DataError(
                    f"sizes must increase strictly, but {one} is followed by {following}; sort "
                    "them and give each once"
                )
