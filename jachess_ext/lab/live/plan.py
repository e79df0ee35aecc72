"""The plan of a live selection: candidates that load, subsets, dev rows, and their costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from ..._io import DataError
from ...scaling.methods import DEFAULT, METHODS
from ...scaling.search import Ask, Search
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

_SAMPLED_ROWS = 1000  # rows whose tokens are counted


@dataclass(frozen=True)
class LiveSettings:
    """How the candidates are fine-tuned on subsets, judged and ranked.

    Attributes:
        columns: of the files.
        recipe: how every model is fine-tuned.
        target: training examples to predict for; None: all training rows.
        sizes: subsets, increasing; None: by `subset_sizes`.
        budget: the largest subset as a share of the target, at most; None: that of the sizes, or
            without these 1/8, and more where there are few rows.
        flops: limit of all runs' operations together: a round that would exceed it is not begun.
        rank_by: "loss", or a score of `CLASS_SCORES` (`NUMBER_SCORES` in a regression); None:
            "loss", of text "bpb", bits per byte.
        dev_size: dev rows judged on; None: as many as keep judging cheap, see `dev_row_count`.
        history, method, strategy, gamma, tau: as for `Search`.
        seed: of head, order and dropout of every run.
        data_seed: of the order the training rows are taken in.

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
        model: as given.
        version: digest of its files, or the hub's commit.
        parameters: N, with a head for the task (and LoRA's adapters).
        trained: those that the recipe trains.
        tokens, dev_tokens: a training row and a dev row, on average over the first thousand.
    """

    model: str
    version: str
    parameters: int
    trained: int
    tokens: float
    dev_tokens: float

    def training_flops(self, rows: float, recipe: Recipe) -> float:
        """Return the expected cost of fine-tuning on so many rows."""
        return training_flops(self.parameters, self.trained, self.tokens * rows, recipe)

    def judging_flops(self, rows: float) -> float:
        """Return the expected cost of judging so many dev rows."""
        return judging_flops(self.parameters, self.dev_tokens * rows)


@dataclass(frozen=True)
class Plan:
    """A live selection before its first run.

    Attributes:
        search: of all models, with nothing told; those that do not load are unusable.
        task: its training rows in the order they are taken in, and the dev rows judged on.
        candidates: the models that load, in the order given.
        recipe: how every model is fine-tuned.
        seed: of every run.
    """

    search: Search
    task: Task
    candidates: tuple[Candidate, ...]
    recipe: Recipe
    seed: int

    def trial(self, ask: Ask, keep: Path | None = None) -> Trial:
        """Return the trial of a run; `keep` is the folder to save its model in."""
        rows = self.task.train
        candidate = next(c for c in self.candidates if c.model == ask.model)
        subset = replace(self.task, train=rows.slice(0, ask.rows), unlabelled=rows.slice(0, 0))
        return Trial(candidate.model, candidate.version, subset, self.seed, self.recipe, keep)


def make_plan(
    models: Sequence[str], task: Task | str, settings: LiveSettings = LiveSettings()
) -> Plan:
    """Read the data, load every model once, and decide on the sizes.

    Args:
        models: candidates, hub ids or paths; any sequence classifier that transformers loads, or
            for text any causal language model.
        task: as `compare.tasks.load_task` takes it (a folder, ``train.csv:dev.csv``,
            ``glue/cola``), or text as `language.load_text` does (``train.txt:dev.txt``).
        settings: see `LiveSettings`.

    Raises:
        ValueError: data, models, sizes or settings that cannot be used; nothing was trained.
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
        unit="FLOPs",
        gamma=settings.gamma,
        tau=settings.tau,
        history=settings.history,
    )  # refuses what cannot be used before models are loaded
    # The stratified order decides which dev rows are judged, its first ones; they are judged in the
    # order of the file.
    order = stratified_order(task.dev, settings.data_seed, task.regression)
    train = task.train.take(stratified_order(task.train, settings.data_seed, task.regression))
    task = replace(task, train=train, dev=task.dev.take(order))
    _check_smallest(min(sizes), task, recipe)
    candidates, unusable = _candidates(models, task, settings)
    judged = settings.dev_size or dev_row_count(candidates, recipe, target, sizes)
    places = sorted(range(len(order)), key=order.__getitem__)
    task = replace(task, dev=task.dev.take([place for place in places if place < judged]))
    count = len(task.dev)
    search.set_candidates(
        test_rows=count,
        costs={c.model: (c.judging_flops(count), c.training_flops(1, recipe)) for c in candidates},
        parameters={c.model: c.parameters for c in candidates},
        unusable=unusable,
    )
    return Plan(search, task, candidates, recipe, settings.seed)


def _sizes(rows: int, target: int, settings: LiveSettings) -> Sequence[int]:
    """Return the sizes of the settings, or those that the budget allows."""
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
        return (min(rows, target - 1),)  # nothing is fine-tuned on
    return subset_sizes(rows, target, settings.recipe, budget)


def _ranking_score(task: Task, rank_by: str | None) -> str:
    scores = (LOSS, *(NUMBER_SCORES if task.regression else CLASS_SCORES))
    if isinstance(task, TextTask):
        scores = (BITS,)  # what is counted a token depends on the tokenizer
    if rank_by is not None and rank_by not in scores:
        raise DataError(f"rank_by is {rank_by!r}; expected one of {', '.join(scores)}")
    return rank_by or scores[0]


def _check_smallest(smallest: int, task: Task, recipe: Recipe) -> None:
    if not isinstance(task, TextTask) and len(set(task.train.slice(0, smallest).labels)) < 2:
        what = "label" if task.regression else "class"
        raise DataError(
            f"the smallest subset, {smallest} rows, holds one {what} only; begin with more rows, "
            "or draw others with another data seed"
        )
    # A single step is the warm-up's first, whose learning rate is 0: nothing would be trained.
    batches = math.ceil(smallest / (recipe.batch_size * recipe.gradient_accumulation))
    if recipe.epochs * batches <= 1:
        raise DataError(
            f"the smallest subset, {smallest} rows, is trained on in one step, whose learning rate "
            "is 0 (warm-up); take more rows, more epochs or smaller batches"
        )


def _candidates(
    models: Sequence[str], task: Task, settings: LiveSettings
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Return the candidates that load, and why the others do not."""
    # One model that does not load must not cost the user the comparison of the others, and that it
    # does not is known before any of them is trained.
    loaded: list[Candidate] = []
    unusable: dict[str, str] = {}
    for model in models:
        try:
            loaded.append(_load_candidate(model, task, settings))
        except DataError as error:
            unusable[model] = str(error)
        except (MemoryError, RuntimeError, ValueError) as error:  # of peft, or too large a model
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

    def tokens(rows: Examples, trained: bool) -> float:
        counted = rows.slice(0, _SAMPLED_ROWS)
        data = encode_rows(task, counted, loaded, tokenizer, recipe, trained=trained)
        return count_tokens(data) / len(counted)

    counts = tokens(task.train, True), tokens(task.dev, False)
    return Candidate(model, model_version(model), *count_parameters(loaded), *counts)


def stratified_order(rows: Examples, seed: int, regression: bool) -> list[int]:
    """Return a random order of the rows, each of whose prefixes has the classes in proportion.

    In an order drawn by the seed, the k-th (from 0) of n rows of a class is put at (k + ½)/n.  In a
    regression it is the order drawn.
    """
    # A subset is a beginning of this order, so that the smaller subsets lie within the larger ones:
    # the curve over sizes is one of more rows, not of other rows.  With the k-th of n at (k + ½)/n
    # every beginning has each class in proportion to within one row.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).numpy()
    if regression:
        return order.tolist()
    labels = np.asarray(rows.labels)[order]
    places = np.empty(len(labels))
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        places[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return order[np.argsort(places, kind="stable")].tolist()


def subset_sizes(
    rows: int, target: int, recipe: Recipe, budget: float | None = None
) -> tuple[int, ...]:
    """Return the default sizes of subsets: three or more, evenly spaced in ln D.

    The smallest is `smallest_subset`, the largest a share of the target (`budget`, else an eighth),
    and each between a quarter and a half of the next: by quarters all of them have a third more
    rows than the largest, by halves twice as many.  The largest is lowered as far as three need to
    have that third more together.  Where even then no three fit, they are 1, 2 and 4 times the
    smallest, if the largest is within the budget, or without one if the three have two thirds of
    the target's rows together at most.

    Raises:
        DataError: there are too few rows for that.
    """
    # All sizes are paid for, and the forecast is worth what its largest size is: Σ sizes ≤ 4/3 of
    # the largest is what quarters sum up to, 1 + 1/4 + 1/16 + … = 4/3.
    least = smallest_subset(recipe)
    largest = min(int((1 / 8 if budget is None else budget) * target), rows)
    ladders = (_geometric_sizes(least, top) for top in range(largest, 4 * least - 1, -1))
    sizes = next((ladder for ladder in ladders if sum(ladder) <= 4 / 3 * largest), None)
    if sizes is not None:
        return sizes
    sizes = (least, 2 * least, 4 * least)
    small = budget is None and sizes[-1] <= rows and sum(sizes) <= 2 / 3 * target
    if small or sizes[-1] <= largest:
        return sizes
    if budget is not None:
        raise DataError(
            f"the budget {budget:g} of {target} rows is {largest}; three subsets of {least} rows "
            f"and more need {sizes[-1]}: take a larger budget, or give the sizes"
        )
    whole = min(rows, target - 1)
    raise DataError(
        f"{min(rows, target)} rows are too few to forecast from subsets of {least} rows and more; "
        "compare the models on nearly all of them, which forecasts nothing: "
        f"--method subtuning --sizes {whole} (in Python method='subtuning', sizes=[{whole}])"
    )


def _geometric_sizes(least: int, top: int) -> tuple[int, ...]:
    """Return sizes from `least` to `top` with a ratio of at most 4, three at least."""
    ratio = min(4.0, math.sqrt(top / least))
    count = 1 + int(math.log(top / least) / math.log(ratio) + 1e-9)
    return tuple(round(top / ratio**step) for step in reversed(range(count)))


def smallest_subset(recipe: Recipe) -> int:
    """Return the number of rows with eight optimiser steps, 16 at least."""
    batches = math.ceil(8 / recipe.epochs)
    return max(16, (batches - 1) * recipe.batch_size * recipe.gradient_accumulation + 1)


def dev_row_count(
    candidates: Sequence[Candidate], recipe: Recipe, target: int, sizes: Sequence[int]
) -> int:
    """Return the default number of dev rows to judge on.

    So many that judging a model once costs 0.5 % of training it on the target's rows, and 200 at
    least; but judging after all sizes costs a sixth of training on them at most, down to 80 rows.
    """
    # The loss of n dev rows has an error of about 1/√n, and costs n forward passes of every model
    # after every size: beyond these limits the judging would cost more than it tells.
    training = sum(candidate.training_flops(1, recipe) for candidate in candidates)
    ratio = training / sum(candidate.judging_flops(1) for candidate in candidates)  # of a row
    rows = max(200, int(0.005 * ratio * target))
    most = int(ratio * sum(sizes) / len(sizes) / 6)
    return min(rows, max(most, 80))
