"""What a live selection will run: everything the user gave is checked here, before any training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..scaling.registry import DEFAULT, FEATURES, LIVE, REGISTRY
from ..tasks.examples import DataError, Examples, Task
from ..tasks.files import file_task
from .candidates import CandidateModel, load_candidate
from .jobs import SubsetJob
from .settings import LiveSettings

SMALLEST = 16
"""Rows of the smallest subset, at least, where no sizes are given."""
_STEPS = 8  # optimiser steps on it, at least
_RATIO = 4.0  # of one size to the next, at most
_FEWEST = 3  # sizes, as long as the ratio stays at 2 or more
_TRAINING = 4 / 3  # rows of all sizes together, as a share of those of the largest, at most
_JUDGING = 0.005  # cost of judging a model once, as a share of training it on the target's rows
_MOST_JUDGING = 1 / 6  # and of judging after all sizes, as a share of training on them, at most
_FEWEST_JUDGED = 200  # rows, where that allows it
_ALWAYS_JUDGED = 80


@dataclass(frozen=True)
class Plan:
    """A live selection that can be run.

    Attributes:
        settings: what was asked for.
        task: its training rows in the order they are taken in, and the dev rows judged on.
        candidates: those that load, in the order given.
        sizes: subsets, ascending, without 0.
        target: training examples to predict for.
        unloadable: the other models, and why.
    """

    settings: LiveSettings
    task: Task
    candidates: tuple[CandidateModel, ...]
    sizes: tuple[int, ...]
    target: int
    unloadable: dict[str, str] = field(default_factory=dict)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Sizes in the order they are run; first 0, the model before fine-tuning, if needed."""
        down = self.settings.order == "algorithm1"
        first = (0,) if starts_at_zero(self.settings) else ()
        if REGISTRY[self.settings.method].trains == "none":
            return first
        return (*first, *(reversed(self.sizes) if down else self.sizes))

    def job(
        self, candidate: CandidateModel, size: int, rate: float | None = None, extra: int = 0
    ) -> SubsetJob:
        """The run of a model on the first `size` rows.

        Args:
            rate: learning rate; None: the first.
            extra: added to the seed.
        """
        settings, rows = self.settings, self.task.train
        task = replace(self.task, train=rows.first(size), unlabelled=rows.first(0))
        scored = settings.screen_rows if size == 0 and scores_features(settings) else 0
        recipe = replace(settings.recipe, lr=settings.rates[0] if rate is None else rate)
        return SubsetJob(
            *(candidate.model, candidate.version, task),
            *(rows.first(settings.probe or 0), rows.first(scored)),
            *(settings.seed + extra, recipe),
        )

    def flops(self, candidate: CandidateModel, size: float) -> float:
        """Expected of one run and judging it."""
        judging = candidate.judging_flops(len(self.task.dev))
        return candidate.training_flops(size, self.settings.recipe) + judging


def starts_at_zero(settings: LiveSettings) -> bool:
    """Whether something is measured before fine-tuning."""
    method = REGISTRY[settings.method]
    reads = method.reads_zero or method.trains == "none"
    return reads or scores_features(settings) or bool(settings.probe)


def scores_features(settings: LiveSettings) -> bool:
    """Whether frozen features are asked for."""
    return settings.screen is not None or settings.method in FEATURES


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
    dev = stratified(task.dev, settings.data_seed, task.regression)
    task = replace(task, dev=task.dev.chosen(dev))
    candidates, unloadable = _load(settings, task)
    sizes = settings.sizes or ladder(settings, candidates, task, target)
    _check_sizes(settings, sizes, len(task.train), target)
    judged = judged_rows(settings, candidates, target, sizes)
    in_order = sorted(range(len(dev)), key=dev.__getitem__)
    task = replace(task, dev=task.dev.chosen([place for place in in_order if place < judged]))
    first = task.train.first(sizes[0])
    if len(set(first.labels)) < 2:
        what = "label" if task.regression else "class"
        raise DataError(
            f"the smallest subset, {sizes[0]} rows, holds one {what} only; begin with more rows, "
            "or draw others with another data seed"
        )
    _check_steps(settings, sizes[0])
    plan = Plan(settings, task, candidates, sizes, target, unloadable)
    _check_flops(plan)
    return plan


def _load(settings: LiveSettings, task: Task) -> tuple[tuple[CandidateModel, ...], dict[str, str]]:
    """The candidates that load, and why the others do not."""
    loaded: list[CandidateModel] = []
    failed: dict[str, str] = {}
    for model in settings.models:
        try:
            loaded.append(load_candidate(model, task, settings.seed, settings.recipe))
        except DataError as error:
            failed[model] = str(error)
        except (MemoryError, RuntimeError, ValueError) as error:  # of peft, or too large a model
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            failed[model] = f"the model {model!r} could not be loaded: {reason}"
    if len(loaded) < 2:
        raise DataError(
            f"{len(loaded)} of {len(settings.models)} models can be used, and a choice needs two: "
            + "; ".join(failed.values())
        )
    return tuple(loaded), failed


def _check_method(settings: LiveSettings) -> None:
    if settings.method not in LIVE:
        raise DataError(
            f"unknown method {settings.method!r}; a live selection knows {', '.join(LIVE)}"
        )
    for name in ("confidence", "drop"):
        if getattr(settings, name) is not None and not REGISTRY[settings.method].forecasts:
            raise DataError(
                f"{name} needs probabilities of being the best, and {settings.method} gives none; "
                f"{DEFAULT} does"
            )


def _read(settings: LiveSettings) -> Task:
    train, dev = settings.train, settings.dev
    if train.exists() and dev.exists() and train.samefile(dev):
        raise DataError(f"{dev} is the training file; losses must be measured on other rows")
    task = file_task(train, dev, settings.columns)
    if task.train == task.dev:
        raise DataError(f"{dev} holds the rows of {train}; losses must be measured on other rows")
    if (settings.probe or 0) > len(task.train):
        raise DataError(f"probe is {settings.probe}, and {train} has {len(task.train)} rows")
    order = stratified(task.train, settings.data_seed, task.regression)
    return replace(task, train=task.train.chosen(order))


def stratified(rows: Examples, seed: int, regression: bool) -> list[int]:
    """An order of the rows in which the classes of any first few are in proportion.

    Of rows in an order drawn by the seed the k-th (from 0) of a class with n rows comes at
    (k + ½)/n.  Numbers to predict have no classes: there it is the order drawn.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).numpy()
    if regression:
        return order.tolist()
    labels = np.asarray(rows.labels)[order]
    places = np.empty(len(labels))
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        places[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return order[np.argsort(places, kind="stable")].tolist()


def judged_rows(
    settings: LiveSettings,
    candidates: Sequence[CandidateModel],
    target: int,
    sizes: Sequence[int] = (),
) -> int:
    """Dev rows judged on, where none are given.

    So many that judging a model once costs 0.5 % of training it on the target's rows, and 200 at
    least; but judging after all sizes costs a sixth of training on them at most, down to 80 rows.
    """
    if settings.dev_size is not None:
        return settings.dev_size
    training = sum(candidate.training_flops(1, settings.recipe) for candidate in candidates)
    ratio = training / sum(candidate.judging_flops(1) for candidate in candidates)  # of a row
    rows = max(_FEWEST_JUDGED, int(_JUDGING * ratio * target))
    if not sizes:
        return rows
    most = int(_MOST_JUDGING * ratio * sum(sizes) / len(sizes))
    return min(rows, max(most, _ALWAYS_JUDGED))


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
    zero = starts_at_zero(settings)
    needed = REGISTRY[settings.method].fewest_sizes(zero=zero, distribution=deciding)
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


def ladder(
    settings: LiveSettings, candidates: Sequence[CandidateModel], task: Task, target: int
) -> tuple[int, ...]:
    """Subsets from the largest that the budget allows down, each a quarter of the next.

    Quarters and not halves: all sizes together then cost a third more than the largest, and not
    twice as much.  Where that leaves fewer than three sizes above the smallest that makes sense
    (`smallest_rows`), the ratio is less, 2 at least; of a share of the data the largest is then
    less as well, so that all together cost no more, as long as three sizes are left.
    """
    rows, budget, least = len(task.train), settings.budget, smallest_rows(settings)
    if budget.unit == "share":
        largest = min(int(budget.amount * target), rows)
        if largest < least:
            raise DataError(
                f"the budget {budget.text} of {target} rows is {largest}; a subset needs {least} "
                "rows or more: take a larger budget, or give the sizes"
            )
        fits = (_down_from(top, least) for top in range(largest, least - 1, -1))
        found = next(sizes for sizes in fits if sum(sizes) <= _TRAINING * largest)
        return found if len(found) >= _FEWEST else _down_from(largest, least)
    largest = min((target - 1) // 2, rows)
    if settings.order == "algorithm1":
        row = sum(candidate.training_flops(1, settings.recipe) for candidate in candidates)
        judged = min(judged_rows(settings, candidates, target), len(task.dev))
        judging = sum(candidate.judging_flops(judged) for candidate in candidates)

        def cost() -> float:
            sizes = _down_from(largest, least)
            return row * sum(sizes) + judging * len(sizes)

        while largest >= least and cost() > budget.amount:
            largest = largest * 9 // 10
    if largest < least:
        raise DataError(
            f"the budget {budget.text} does not pay for subsets of {least} rows; give a larger one"
        )
    return _down_from(largest, least)


def smallest_rows(settings: LiveSettings) -> int:
    """Rows that an optimiser takes eight steps on, and 16 at least."""
    recipe = settings.recipe
    batches = math.ceil(_STEPS / recipe.epochs)
    return max(SMALLEST, (batches - 1) * recipe.batch_size * recipe.gradient_accumulation + 1)


def _down_from(largest: int, least: int) -> tuple[int, ...]:
    span = largest / least
    ratio = min(_RATIO, max(2.0, span ** (1 / (_FEWEST - 1))))
    count = 1 + int(math.log(span) / math.log(ratio) + 1e-9)
    return tuple(round(largest / ratio**step) for step in reversed(range(count)))


def _check_flops(plan: Plan) -> None:
    """Whether a budget in FLOPs is below the data and pays for the sizes the method needs."""
    budget = plan.settings.budget
    if budget.unit != "flops":
        return
    full = sum(plan.flops(one, plan.target) for one in plan.candidates)
    if budget.amount > full:
        raise DataError(
            f"the budget {budget.text} is above the data: training every model on all "
            f"{plan.target} rows costs {full:.3g} FLOPs"
        )
    zero = 0 in plan.rounds
    needed = plan.sizes[: REGISTRY[plan.settings.method].fewest_sizes(zero=zero)]
    least = sum(plan.flops(one, size) for one in plan.candidates for size in needed)
    if least > budget.amount:
        raise DataError(
            f"the budget {budget.text} does not pay for the {len(needed)} sizes "
            f"{plan.settings.method} needs: they cost {least:.3g} FLOPs"
        )
