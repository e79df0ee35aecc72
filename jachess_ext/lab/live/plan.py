"""The plan of a live selection: loadable candidates, subsets, dev rows, and their costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from ..._io import DataError
from ...scaling.methods import DEFAULT, METHODS
from ...scaling.search import ACCEPT_THEN_STOP, Ask, Search
from ..workbench.models import load_tokenizer, model_version
from ..workbench.settings import Columns, Recipe
from ..workbench.tasks import Examples, Task, load_task
from .language import BITS, TextTask, check_lossless, is_text, load_text
from .trial import (
    CLASS_SCORES,
    LOSS,
    NUMBER_SCORES,
    Trial,
    count_parameters,
    count_tokens,
    encode_rows,
    judging_flops,
    load_task_model,
    training_flops,
)

_SAMPLED_ROWS = 1000  # number of rows over which tokens are counted


@dataclass(frozen=True)
class LiveSettings:
    """Settings of how the candidates are fine-tuned on subsets, judged and ranked.

    Attributes:
        columns: names of the files' columns.
        recipe: recipe by which every model is fine-tuned.
        target: number of training examples that the loss is forecast for; None: all training rows.
        sizes: sizes of the subsets, increasing; None: those of `subset_sizes`, or of `halved_sizes`
            for the strategy "accept-then-stop".
        budget: largest allowed subset as a fraction of the target; None: the largest of the sizes,
            or, without sizes, 1/8, and more if there are few rows.
        flops: limit of the FLOPs of all runs: a round of runs that would exceed it is not begun.
        rank_by: metric to forecast: "loss", or a score of `CLASS_SCORES` (`NUMBER_SCORES` in a
            regression); None: "loss", or, for text, "bpb", bits per byte.
        dev_size: number of dev rows to judge on; None: a number that keeps judging cheap, see
            `dev_row_count`.
        history, method, strategy, gamma, tau: as for `Search`.
        seed: seed of every run, for head, order and dropout.
        data_seed: seed of the order in which training rows are taken.

    Examples:
        >>> from jachess_ext.lab.live import LiveSettings
        >>> LiveSettings(budget=1 / 4, method="ats").strategy
        'growing'
    """

    columns: Columns = field(default_factory=Columns)
    recipe: Recipe = field(default_factory=Recipe)
    target: int | None = None
    sizes: Sequence[int] | None = None
    budget: float | None = None
    flops: float | None = None
    rank_by: str | None = None
    dev_size: int | None = None
    history: Sequence[Path] = ()
    method: str = DEFAULT
    strategy: str = "growing"
    gamma: int = 3
    tau: float = 5.0
    seed: int = 0
    data_seed: int = 0


@dataclass(frozen=True)
class Candidate:
    """A model that can be loaded.

    Attributes:
        model: the model's path or hub id.
        version: digest of the model's files, or the hub's commit.
        parameters: number of parameters N, with a head for the task (and LoRA's adapters).
        trained: number of parameters that the recipe trains.
        tokens, dev_tokens: mean number of tokens of a training row and of a dev row, over the first
            thousand.
    """

    model: str
    version: str
    parameters: int
    trained: int
    tokens: float
    dev_tokens: float

    def training_flops(self, rows: float, recipe: Recipe) -> float:
        """Return the expected FLOPs of fine-tuning on a number of rows."""
        return training_flops(self.parameters, self.trained, self.tokens * rows, recipe)

    def judging_flops(self, rows: float) -> float:
        """Return the expected FLOPs of judging a number of dev rows."""
        return judging_flops(self.parameters, self.dev_tokens * rows)


@dataclass(frozen=True)
class Plan:
    """A live selection before its first run.

    Attributes:
        search: search over all models, without results; models that do not load are unusable in it.
        task: the task, with its training rows in the order in which they are taken, and the dev
            rows to judge on.
        candidates: the models that load, in the user's order.
        recipe: recipe by which every model is fine-tuned.
        seed: seed of every run.
    """

    search: Search
    task: Task
    candidates: tuple[Candidate, ...]
    recipe: Recipe
    seed: int

    def trial(self, ask: Ask, keep: Path | None = None) -> Trial:
        """Return the trial for a requested run.

        Args:
            keep: folder to save the fine-tuned model in; None: it is not saved.
        """
        rows = self.task.train
        candidate = next(c for c in self.candidates if c.model == ask.model)
        subset = replace(self.task, train=rows.slice(0, ask.rows), unlabelled=rows.slice(0, 0))
        return Trial(candidate.model, candidate.version, subset, self.seed, self.recipe, keep)


def make_plan(
    models: Sequence[str], task: Task | str, settings: LiveSettings = LiveSettings()
) -> Plan:
    """Load the data, load every model once, and determine the sizes of subsets.

    Args:
        models: candidates, hub ids or paths; any sequence classifier that transformers loads, or,
            for text, any causal language model.
        task: specification for `workbench.tasks.load_task` (a folder, ``train.csv:dev.csv``,
            ``glue/cola``) or, for text, `language.load_text` (``train.txt:dev.txt``).
        settings: see `LiveSettings`.

    Raises:
        ValueError: data, models, sizes or settings cannot be used; nothing was trained.
        MissingExtra: transformers is not installed.
    """
    if isinstance(task, str):
        task = load_text(task) if is_text(task) else load_task(task, settings.columns)
    if task.train == task.dev:
        raise DataError("the dev rows are the training rows; losses must be measured on other rows")
    recipe, rows = settings.recipe, len(task.train)
    target = rows if settings.target is None else settings.target
    sizes = _sizes(rows, target, settings)
    search = Search(
        models,
        sizes,
        target,
        metric=_ranking_score(task, settings.rank_by),
        classes=len(task.classes) or None,
        method=settings.method,
        strategy=settings.strategy,
        budget=settings.flops,
        gamma=settings.gamma,
        tau=settings.tau,
        history=settings.history,
    )  # raises an error for invalid settings before models are loaded
    # The dev rows to judge on are the first ones of a stratified order; they are then put back into
    # the order of the file.
    order = stratified_order(task.dev, settings.data_seed, task.is_regression)
    train = task.train.take(stratified_order(task.train, settings.data_seed, task.is_regression))
    task = replace(task, train=train, dev=task.dev.take(order))
    _check_smallest(min(sizes), task, recipe)
    candidates, unusable = _candidates(models, task, settings)
    dev_size = settings.dev_size or dev_row_count(candidates, recipe, target, sizes)
    positions = sorted(range(len(order)), key=order.__getitem__)
    task = replace(task, dev=task.dev.take([i for i in positions if i < dev_size]))
    count = len(task.dev)
    search.set_candidates(
        test_rows=count,
        costs={c.model: (c.judging_flops(count), c.training_flops(1, recipe)) for c in candidates},
        parameters={c.model: c.parameters for c in candidates},
        unusable=unusable,
    )
    return Plan(search, task, candidates, recipe, settings.seed)


def _sizes(rows: int, target: int, settings: LiveSettings) -> Sequence[int]:
    """Return the sizes in the settings, or else default sizes within the budget."""
    for name, value in (("dev_size", settings.dev_size), ("target", target)):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}; expected 1 or more")
    budget, largest = settings.budget, max(settings.sizes or (0,))
    if largest > rows:
        raise DataError(f"the size {largest} is above the data: there are {rows} training rows")
    if budget is not None and (not 0 < budget <= 1 or largest > budget * target):
        raise DataError(
            f"the budget is {budget:g}, a share of the target's {target} rows"
            + (f"; the size {largest} is above it" if largest > budget * target else "")
            + "; expected a share up to 1, and sizes within it"
        )
    if settings.sizes is not None:
        return settings.sizes
    if settings.method in METHODS and METHODS[settings.method].trains == "none":
        return (min(rows, target - 1),)  # the method does not fine-tune
    if settings.strategy == ACCEPT_THEN_STOP:
        return halved_sizes(rows, target, settings.recipe, budget)
    return subset_sizes(rows, target, settings.recipe, budget)


def _ranking_score(task: Task, rank_by: str | None) -> str:
    scores = (LOSS, *(NUMBER_SCORES if task.is_regression else CLASS_SCORES))
    if isinstance(task, TextTask):
        scores = (BITS,)  # scores per token would depend on the tokenizer
    if rank_by is not None and rank_by not in scores:
        raise DataError(f"rank_by is {rank_by!r}; expected one of {', '.join(scores)}")
    return rank_by or scores[0]


def _check_smallest(smallest: int, task: Task, recipe: Recipe) -> None:
    if not isinstance(task, TextTask) and len(set(task.train.slice(0, smallest).labels)) < 2:
        what = "label" if task.is_regression else "class"
        raise DataError(
            f"the smallest subset, {smallest} rows, holds one {what} only; begin with more rows, "
            "or draw others with another data seed"
        )
    # A single step is the first of the warm-up, whose learning rate is 0: nothing would be trained.
    batches = math.ceil(smallest / (recipe.batch_size * recipe.gradient_accumulation))
    if recipe.epochs * batches <= 1:
        raise DataError(
            f"the smallest subset, {smallest} rows, is trained on in one step, whose learning rate "
            "is 0 (warm-up); take more rows, more epochs or smaller batches"
        )


def _candidates(
    models: Sequence[str], task: Task, settings: LiveSettings
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Return the candidates that load, and model -> why it cannot be used for the others."""
    # A model that does not load must not prevent the comparison of the others, and has to be found
    # before any of them is trained.
    loaded: list[Candidate] = []
    unusable: dict[str, str] = {}
    for model in models:
        try:
            loaded.append(_load_candidate(model, task, settings))
        except DataError as error:
            unusable[model] = str(error)
        except (MemoryError, RuntimeError, ValueError) as error:  # from peft, or out of memory
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            unusable[model] = f"the model {model!r} could not be loaded: {reason}"
    if len(loaded) < 2:
        raise DataError(
            f"{len(loaded)} of {len(models)} models can be used, and a choice needs two: "
            + "; ".join(unusable.values())
        )
    return tuple(loaded), unusable


def _load_candidate(model: str, task: Task, settings: LiveSettings) -> Candidate:
    recipe = settings.recipe
    tokenizer = load_tokenizer(model)
    loaded = load_task_model(model, task, tokenizer, settings.seed, recipe)
    if isinstance(task, TextTask):
        check_lossless(task.dev.texts, tokenizer, model)

    def tokens(rows: Examples, is_training: bool) -> float:
        sample = rows.slice(0, _SAMPLED_ROWS)
        encoded = encode_rows(task, sample, loaded, tokenizer, recipe, is_training=is_training)
        return count_tokens(encoded) / len(sample)

    counts = tokens(task.train, True), tokens(task.dev, False)
    return Candidate(model, model_version(model), *count_parameters(loaded), *counts)


def stratified_order(rows: Examples, seed: int, is_regression: bool) -> list[int]:
    """Return a random order of the rows in which every prefix has the classes in proportion.

    The rows are permuted by the seed, and then sorted by (k + ½)/n for the k-th (from 0) of the n
    rows of a class.  In a regression the order is the permutation.
    """
    # Subsets are prefixes of this order, so that smaller ones are contained in larger ones, and the
    # curve over sizes is not one of different rows.  By the keys (k + ½)/n every prefix has each
    # class in proportion to within one row.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).numpy()
    if is_regression:
        return order.tolist()
    labels = np.asarray(rows.labels)[order]
    keys = np.empty(len(labels))
    for label in np.unique(labels):
        indices = np.flatnonzero(labels == label)
        keys[indices] = (np.arange(len(indices)) + 0.5) / len(indices)
    return order[np.argsort(keys, kind="stable")].tolist()


def subset_sizes(
    rows: int, target: int, recipe: Recipe, budget: float | None = None
) -> tuple[int, ...]:
    """Return the default sizes of subsets: three or more, evenly spaced in ln D.

    The smallest is `smallest_subset`, the largest a fraction of the target (`budget`, or 1/8), and
    each is between a quarter and a half of the next.  Together they have at most 4/3 as many rows
    as the allowed largest subset; the largest is reduced until three sizes fulfil this.  If that is
    impossible, the sizes are 1, 2 and 4 times the smallest, provided that the largest is within the
    budget, or, without a budget, that the three have at most two thirds of the target's rows.

    Raises:
        DataError: there are too few rows.
    """
    # All sizes cost training, but the largest one determines the quality of the forecast. 4/3 is
    # the sum of quarters, 1 + 1/4 + 1/16 + ….
    least = smallest_subset(recipe)
    largest = min(int((1 / 8 if budget is None else budget) * target), rows)
    ladders = (_geometric_sizes(least, top) for top in range(largest, 4 * least - 1, -1))
    sizes = next((ladder for ladder in ladders if sum(ladder) <= 4 / 3 * largest), None)
    if sizes is not None:
        return sizes
    sizes = (least, 2 * least, 4 * least)
    fits_without_budget = budget is None and sizes[-1] <= rows and sum(sizes) <= 2 / 3 * target
    if fits_without_budget or sizes[-1] <= largest:
        return sizes
    if budget is not None:
        raise DataError(
            f"the budget {budget:g} of {target} rows is {largest}; three subsets of {least} rows "
            f"and more need {sizes[-1]}: take a larger budget, or give the sizes"
        )
    most = min(rows, target - 1)
    raise DataError(
        f"{min(rows, target)} rows are too few to forecast from subsets of {least} rows and more; "
        "compare the models on nearly all of them, which forecasts nothing: "
        f"--method subtuning --sizes {most} (in Python method='subtuning', sizes=[{most}])"
    )


def halved_sizes(
    rows: int, target: int, recipe: Recipe, budget: float | None = None
) -> tuple[int, ...]:
    """Return the sizes of Algorithm 1: a fraction of the target (`budget`, or 1/8), and halves of
    it down to `smallest_subset`."""
    sizes = [min(int((1 / 8 if budget is None else budget) * target), rows)]
    while sizes[0] // 2 >= smallest_subset(recipe):
        sizes.insert(0, sizes[0] // 2)
    return tuple(sizes)


def _geometric_sizes(least: int, top: int) -> tuple[int, ...]:
    """Return at least three sizes from `least` to `top`, in equal ratios of at most 4."""
    ratio = min(4.0, math.sqrt(top / least))
    count = 1 + int(math.log(top / least) / math.log(ratio) + 1e-9)
    return tuple(round(top / ratio**step) for step in reversed(range(count)))


def smallest_subset(recipe: Recipe) -> int:
    """Return the smallest number of rows on which the recipe takes eight optimiser steps, but at
    least 16."""
    batches = math.ceil(8 / recipe.epochs)
    return max(16, (batches - 1) * recipe.batch_size * recipe.gradient_accumulation + 1)


def dev_row_count(
    candidates: Sequence[Candidate], recipe: Recipe, target: int, sizes: Sequence[int]
) -> int:
    """Return the default number of dev rows to judge on.

    Judging a model once should cost 0.5 % of training it on the target's rows, with at least 200
    rows; but judging after all sizes should cost at most a sixth of training on them, down to 80
    rows.
    """
    # The loss of n dev rows has an error of about 1/√n, and costs n forward passes of every model
    # after every size: more rows would cost more than the smaller error is worth.
    training_cost = sum(candidate.training_flops(1, recipe) for candidate in candidates)
    ratio = training_cost / sum(candidate.judging_flops(1) for candidate in candidates)  # of a row
    wanted_rows = max(200, int(0.005 * ratio * target))
    max_rows = int(ratio * sum(sizes) / len(sizes) / 6)
    return min(wanted_rows, max(max_rows, 80))
