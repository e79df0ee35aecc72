"""`LiveSettings`: what a live selection is asked for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from ..experiment.grid import Recipe
from ..scaling.input_checks import check_sizes
from ..scaling.registry import DEFAULT, canonical
from ..tasks.examples import DataError
from ..tasks.files import Columns
from .budget import Budget
from .scores import LOSS, OF_CLASSES, OF_NUMBERS
from .transferability import SCORES

Order = Literal["growing", "promotion", "algorithm1"]
ORDERS = ("growing", "promotion", "algorithm1")
FORMER_ORDER = "halving"
"""What algorithm1 was called."""
PROBE = 32
"""Rows Θ is measured on for lensllm, where no number is given."""


@dataclass(frozen=True)
class LiveSettings:
    """A live selection.

    Attributes:
        models: candidates, hub ids or paths.
        train, dev: files that `tasks.files` reads; labels are classes, or numbers where `columns`
            say so.
        budget: see `Budget`.
        sizes: subsets, increasing; None: from the largest that the budget allows down, see
            `plan.ladder`.
        target: training examples to predict for; None: all rows of `train`.
        order: "growing": all models on the smallest subset, then all on the next; "promotion":
            likewise, but only the share `promote` with the best forecasts goes on to the next
            (successive halving); "algorithm1": from the largest down, each model until a loss
            leaves its line.
        promote: share of the models that goes on, two at least.
        method: of the ranking, the probabilities and the stops; see `scaling.registry`.
        rank_by: "loss", or a score of `scores.OF_CLASSES` (`OF_NUMBERS` in a regression).
        gamma, tau: Algorithm 1's points accepted unseen, and deviations that stop it.
        confidence: stop when one model is the best with this probability.
        drop: run no more of a model whose probability of being the best is below this.
        level: of the intervals.
        rates: learning rates tried for every model, the best counting: all of them on the first
            subset, and after each the better half; empty: the recipe's.
        seeds: runs of one model and size, at most: another is made for models among which the
            ranking is open (none is the best with probability 0.9, these are with 0.1 or more),
            and means count.
        screen: share of the models that is fine-tuned at all, the best by `screen_by`, two at
            least; None: all of them.
        screen_by: a score of frozen features (`transferability.SCORES`).
        screen_rows: training rows it is computed on, the first of the order.
        probe: training rows that Θ is measured on, the first of the order; 0: no Θ is measured;
            None: 0, or `PROBE` where the method reads Θ.
        seed: of head, order within a run, and dropout; further seeds count on from it.
        data_seed: of the order the training rows are taken in.
        dev_size: dev rows used; None: as many as keep judging cheap, see `plan.judged_rows`.
        keep: "winner": the best model is fine-tuned on the target's rows and saved.
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
    promote: float = 0.5
    method: str = DEFAULT
    rank_by: str = LOSS
    gamma: int = 3
    tau: float = 5.0
    confidence: float | None = None
    drop: float | None = None
    level: float = 0.9
    rates: tuple[float, ...] = ()
    seeds: int = 1
    screen: float | None = None
    screen_by: str = "logme"
    screen_rows: int = 512
    probe: int | None = None
    seed: int = 0
    data_seed: int = 0
    dev_size: int | None = None
    keep: Literal["winner"] | None = None
    columns: Columns = field(default_factory=Columns)
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", canonical(self.method))
        if self.order == FORMER_ORDER:
            object.__setattr__(self, "order", "algorithm1")
            warnings.warn(
                "the order 'halving' is now called 'algorithm1'; successive halving, which runs "
                "only the promising on larger subsets, is 'promotion'",
                FutureWarning,
                stacklevel=3,
            )
        if self.probe is None:
            object.__setattr__(self, "probe", PROBE if self.method == "lensllm" else 0)
        if not self.rates:
            object.__setattr__(self, "rates", (self.recipe.learning_rate,))
        self._check_choices()
        self._check_numbers()

    def _check_choices(self) -> None:
        twice = [model for place, model in enumerate(self.models) if model in self.models[:place]]
        if twice:
            raise DataError(f"the model {twice[0]!r} is given twice; expected each model once")
        if len(self.models) < 2:
            raise DataError(f"{len(self.models)} model to choose from; expected two or more")
        known = (LOSS, *(OF_NUMBERS if self.columns.regression else OF_CLASSES))
        for name, value, choices in (
            ("order", self.order, ORDERS),
            ("rank_by", self.rank_by, known),
            ("screen_by", self.screen_by, tuple(SCORES)),
            ("keep", self.keep, ("winner", None)),
        ):
            if value not in choices:
                words = ", ".join(str(choice) for choice in choices)
                raise DataError(f"{name} is {value!r}; expected one of {words}")
        if self.columns.regression and self.screen is not None and self.screen_by == "hscore":
            raise DataError("hscore compares classes; screen a regression by logme or knn")
        if self.order == "algorithm1" and self.budget.unit == "seconds":
            raise DataError(
                "algorithm1 begins with the largest subset, which minutes do not tell; give the "
                "budget as a share of the data or in FLOPs"
            )
        if self.method == "lensllm" and not self.probe:
            raise DataError(
                "lensllm reads the kernel Θ of every run, and probe is 0; give it rows to measure "
                "Θ on, or take rectified, which is the same law with F free"
            )

    def _check_numbers(self) -> None:
        for name, least in (
            *(("probe", 0), ("dev_size", 1), ("target", 1), ("seeds", 1), ("screen_rows", 8)),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DataError(f"{name} is {value}; expected {least} or more")
        for name in ("confidence", "drop", "level", "promote", "screen"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                kind = "share" if name in ("promote", "screen") else "probability"
                raise DataError(f"{name} is {value}; expected a {kind} between 0 and 1")
        if self.gamma < 3:
            raise DataError(f"gamma is {self.gamma}; expected 3 or more points for a line")
        if not self.tau > 0:
            raise DataError(f"tau is {self.tau}; expected a positive number of deviations")

        for place, rate in enumerate(self.rates):
            if not 0 < rate < float("inf"):
                raise DataError(f"lr is {rate}; expected a number above 0")
            if rate in self.rates[:place]:
                raise DataError(f"the learning rate {rate:g} is given twice; expected each once")
        if self.sizes is None:
            return
        if not self.sizes or self.sizes[0] < 1:
            raise DataError(f"sizes is {list(self.sizes)}; expected numbers of rows from 1 up")
        try:
            check_sizes(np.array(self.sizes, dtype=np.float64))
        except ValueError as error:
            raise DataError(str(error)) from None
