"""What a live selection will run: everything the user gave is checked here, before any training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..scaling.cost import OPERATIONS
from ..tasks.examples import DataError, Task
from ..tasks.files import file_task
from ..tasks.spec import selected
from .candidates import CandidateModel, load_candidate
from .jobs import SubsetJob
from .predict import METHODS, fewest_sizes, has_probabilities
from .settings import LiveSettings

SMALLEST = 16
"""Rows of the smallest subset, where none are given."""
_MOST = 7  # sizes, where none are given and the budget is a share


@dataclass(frozen=True)
class Plan:
    """A live selection that can be run.

    Attributes:
        settings: what was asked for.
        task: its training rows in the order they are taken in.
        candidates: in the order given.
        sizes: subsets, ascending, without 0.
        target: training examples to predict for.
    """

    settings: LiveSettings
    task: Task
    candidates: tuple[CandidateModel, ...]
    sizes: tuple[int, ...]
    target: int

    @property
    def rounds(self) -> tuple[int, ...]:
        """Sizes in the order they are run, the model before fine-tuning first."""
        growing = self.settings.order == "growing"
        return (0, *(self.sizes if growing else reversed(self.sizes)))

    def job(self, candidate: CandidateModel, size: int) -> SubsetJob:
        """The run of a model on the first `size` rows."""
        rows = replace(
            self.task, train=self.task.train.first(size), unlabelled=self.task.unlabelled.first(0)
        )
        probe = self.task.train.first(self.settings.probe)
        settings = self.settings
        return SubsetJob(
            *(candidate.model, candidate.version, rows, probe, settings.seed, settings.recipe)
        )

    def training_flops(self, candidate: CandidateModel, size: float) -> float:
        """Expected: 6 N × tokens × epochs."""
        return _training_flops(candidate, size, self.settings.recipe.epochs)


def _training_flops(candidate: CandidateModel, size: float, epochs: float) -> float:
    return OPERATIONS * candidate.parameters * candidate.tokens * size * epochs


def make_plan(settings: LiveSettings) -> Plan:
    """Reads the data, loads every model once, and decides on the sizes.

    Raises:
        DataError: data, models, sizes or budget that cannot be used; nothing was trained.
        MissingExtra: transformers is not installed.
    """
    _check_method(settings)
    task = _read(settings)
    target = settings.target or len(task.train)
    if settings.sizes is not None:
        _check_sizes(settings, settings.sizes, len(task.train), target)
    candidates = tuple(
        load_candidate(model, task, settings.seed, settings.recipe.max_length)
        for model in settings.models
    )
    sizes = settings.sizes or _halvings(settings, candidates, task, target)
    _check_sizes(settings, sizes, len(task.train), target)
    first = task.train.first(sizes[0])
    if len(set(first.labels)) < 2:
        raise DataError(
            f"the smallest subset, {sizes[0]} rows, holds one class only; begin with more rows, or "
            "draw others with another data seed"
        )
    _check_steps(settings, sizes[0])
    plan = Plan(settings, task, candidates, sizes, target)
    _check_flops(plan)
    return plan


def _check_method(settings: LiveSettings) -> None:
    if settings.method not in METHODS:
        raise DataError(
            f"unknown method {settings.method!r}; a live selection knows {', '.join(METHODS)}"
        )
    for name in ("confidence", "drop"):
        if getattr(settings, name) is not None and not has_probabilities(settings.method):
            raise DataError(
                f"{name} needs probabilities of being the best, and {settings.method} gives none; "
                "bayes does"
            )


def _read(settings: LiveSettings) -> Task:
    train, dev = settings.train, settings.dev
    if train.exists() and dev.exists() and train.samefile(dev):
        raise DataError(f"{dev} is the training file; losses must be measured on other rows")
    if settings.columns.regression:
        raise DataError("a live selection compares classifiers; labels must be classes")
    task = file_task(train, dev, settings.columns)
    if task.train == task.dev:
        raise DataError(f"{dev} holds the rows of {train}; losses must be measured on other rows")
    if settings.probe > len(task.train):
        raise DataError(f"probe is {settings.probe}, and {train} has {len(task.train)} rows")
    return selected(task, None, 1, settings.dev_size, settings.data_seed)


def _check_sizes(settings: LiveSettings, sizes: Sequence[int], rows: int, target: int) -> None:
    largest = sizes[-1]
    if largest > rows:
        raise DataError(f"the size {largest} is above the data: {settings.train} has {rows} rows")
    budget = settings.budget
    if budget.unit == "share" and settings.sizes is not None and largest > budget.amount * target:
        raise DataError(
            f"the size {largest} is above the budget {budget.text} of {target} rows "
            f"({int(budget.amount * target)})"
        )
    if largest >= target:
        raise DataError(
            f"the largest subset, {largest} rows, is not below the target {target}: nothing would "
            "be left to predict; take a smaller budget or smaller sizes"
        )
    deciding = settings.confidence is not None or settings.drop is not None
    needed = fewest_sizes(settings.method, distribution=deciding)
    if len(sizes) < needed:
        raise DataError(
            f"{settings.method} needs {needed} sizes or more, and there are {len(sizes)} "
            f"({', '.join(map(str, sizes))}); give more sizes or a larger budget"
        )


def _check_steps(settings: LiveSettings, smallest: int) -> None:
    """A single step is the warm-up's first, whose learning rate is 0: nothing would be trained."""
    recipe = settings.recipe
    batches = math.ceil(smallest / (recipe.batch_size * recipe.gradient_accumulation))
    if recipe.epochs * batches <= 1:
        raise DataError(
            f"the smallest subset, {smallest} rows, is trained on in one step, whose learning rate "
            "is 0 (warm-up); take more rows, more epochs or smaller batches"
        )


# Sizes from the budget --------------------------------------------------------------------------


def _halvings(
    settings: LiveSettings, candidates: Sequence[CandidateModel], task: Task, target: int
) -> tuple[int, ...]:
    rows, budget = len(task.train), settings.budget
    if budget.unit == "share":
        largest = int(budget.amount * target)
        if largest < SMALLEST:
            raise DataError(
                f"the budget {budget.text} of {target} rows is {largest}; halving begins at "
                f"{SMALLEST} rows or more: take a larger budget, or give the sizes"
            )
        return _down_from(min(largest, rows))[-_MOST:]
    largest = min((target - 1) // 2, rows)
    if settings.order == "halving":
        largest = _affordable(settings, candidates, largest)
    if largest < SMALLEST:
        raise DataError(
            f"the budget {budget.text} does not pay for subsets of {SMALLEST} rows; give a larger "
            "one"
        )
    return _down_from(largest)


def _down_from(largest: int) -> tuple[int, ...]:
    sizes = [largest]
    while sizes[-1] // 2 >= SMALLEST:
        sizes.append(sizes[-1] // 2)
    return tuple(reversed(sizes))


def _affordable(settings: LiveSettings, candidates: Sequence[CandidateModel], largest: int) -> int:
    """The largest subset whose halvings all together cost no more than the budget in FLOPs."""
    epochs = settings.recipe.epochs
    row = sum(_training_flops(candidate, 1, epochs) for candidate in candidates)
    while largest >= SMALLEST and row * sum(_down_from(largest)) > settings.budget.amount:
        largest = largest * 9 // 10
    return largest


def _check_flops(plan: Plan) -> None:
    """Whether a budget in FLOPs is below the data and pays for the sizes the method needs."""
    budget = plan.settings.budget
    if budget.unit != "flops":
        return
    full = sum(plan.training_flops(one, plan.target) for one in plan.candidates)
    if budget.amount > full:
        raise DataError(
            f"the budget {budget.text} is above the data: training every model on all "
            f"{plan.target} rows costs {full:.3g} FLOPs"
        )
    needed = plan.sizes[: fewest_sizes(plan.settings.method)]
    least = sum(plan.training_flops(one, sum(needed)) for one in plan.candidates)
    if least > budget.amount:
        raise DataError(
            f"the budget {budget.text} does not pay for the {len(needed)} sizes "
            f"{plan.settings.method} needs: they cost {least:.3g} FLOPs"
        )
