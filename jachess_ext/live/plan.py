"""The plan of a live selection: candidates that load, subsets, dev rows, and their costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from .._io import DataError
from ..compare.models import load_tokenizer, model_version
from ..compare.settings import Columns, Recipe
from ..compare.tasks import Examples, Task, load_task
from ..scaling.search import Ask, Search
from ..scaling.selection import DEFAULT, METHODS
from .language import BITS, TextTask, check_kept, is_text, load_text
from .trial import (
    CLASS_SCORES,
    LOSS,
    NUMBER_SCORES,
    Trial,
    count_parameters,
    count_tokens,
    encoded,
    judging_flops,
    load_for,
    training_flops,
)

SMALLEST = 16
"""Rows of the smallest subset, at least, where no sizes are given."""
_STEPS = 8  # optimiser steps on it, at least
_RATIO = 4.0  # of one size to the next, at most
_FEWEST = 3  # sizes, as long as the ratio stays at 2 or more
_BUDGET = 1 / 8  # of the target, where no budget is given
_SMALL = (1, 2, 4)  # times the smallest subset, where an eighth has no room for three sizes
_SMALL_SHARE = 2 / 3  # of the target that these may have together
_TRAINING = 4 / 3  # rows of all sizes together, as a share of those of the largest, at most
_JUDGING = 0.005  # cost of judging a model once, as a share of training it on the target's rows
_MOST_JUDGING = 1 / 6  # and of judging after all sizes, as a share of training on them, at most
_FEWEST_JUDGED = 200  # rows, where that allows it
_ALWAYS_JUDGED = 80
_COUNTED = 1000  # rows whose tokens are counted


@dataclass(frozen=True)
class Candidate:
    """A model that loads.

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
        return training_flops(
            self.parameters,
            self.trained,
            self.tokens * rows,
            recipe.epochs,
            recipe.gradient_checkpointing,
        )

    def judging_flops(self, rows: float) -> float:
        """Return the expected cost of judging so many dev rows."""
        return judging_flops(self.parameters, self.dev_tokens * rows)


@dataclass(frozen=True)
class Plan:
    """A live selection that can be run.

    Attributes:
        search: of the models that load, with nothing told.
        task: its training rows in the order they are taken in, and the dev rows judged on.
        candidates: the models that load, in the order given.
        unloadable: the other models, and why.
        recipe: how every model is fine-tuned.
    """

    search: Search
    task: Task
    candidates: tuple[Candidate, ...]
    unloadable: Mapping[str, str]
    recipe: Recipe

    def trial(self, ask: Ask, keep: Path | None = None) -> Trial:
        """Return the trial of a run; `keep` is the folder to save its model in."""
        rows = self.task.train
        candidate = next(c for c in self.candidates if c.model == ask.model)
        return Trial(
            model=candidate.model,
            version=candidate.version,
            task=replace(self.task, train=rows.part(0, ask.rows), unlabelled=rows.part(0, 0)),
            seed=ask.seed,
            recipe=self.recipe,
            keep=keep,
        )


def make_plan(
    models: Sequence[str],
    task: Task | str,
    *,
    columns: Columns = Columns(),  # noqa: B008  frozen
    sizes: Sequence[int] | None = None,
    budget: float | None = None,
    flops: float | None = None,
    target: int | None = None,
    rank_by: str | None = None,
    dev_size: int | None = None,
    data_seed: int = 0,
    recipe: Recipe = Recipe(),  # noqa: B008  frozen
    method: str = DEFAULT,
    strategy: str = "growing",
    zero: bool | None = None,
    seed: int = 0,
    confidence: float | None = None,
    drop: float | None = None,
    gamma: int = 3,
    tau: float = 5.0,
) -> Plan:
    """Read the data, load every model once, and decide on the sizes.

    Args:
        models: candidates, hub ids or paths; any sequence classifier that transformers loads, or
            for text any causal language model.
        task: as `compare.tasks.load_task` takes it (a folder, ``train.csv:dev.csv``,
            ``glue/cola``), or text as `language.load_text` does (``train.txt:dev.txt``).
        columns: of the files.
        sizes: subsets, increasing; None: from the largest that the budget allows down, see
            `size_ladder`.
        budget: the largest subset as a share of the target, at most; None: that of the sizes, or
            without these 1/8, and more where there are few rows, see `default_sizes`.
        flops: limit of all runs' operations together: a round that would exceed it is not begun.
        target: training examples to predict for; None: all training rows.
        rank_by: "loss", or a score of `CLASS_SCORES` (`NUMBER_SCORES` in a regression); None:
            "loss", of text "bpb", bits per byte.
        dev_size: dev rows judged on; None: as many as keep judging cheap, see `judged_rows`.
        data_seed: of the order the training rows are taken in.
        recipe: how every model is fine-tuned.
        method, strategy, zero, seed, confidence, drop, gamma, tau: as for `Search`.

    Raises:
        DataError: data, models, sizes or settings that cannot be used; nothing was trained.
        MissingExtra: transformers is not installed.
    """
    if isinstance(task, str):
        task = load_text(task) if is_text(task) else load_task(task, columns)
    if rank_by is None:
        rank_by = BITS if isinstance(task, TextTask) else LOSS
    if task.train == task.dev:
        raise DataError("the dev rows are the training rows; losses must be measured on other rows")
    rows = len(task.train)
    target = rows if target is None else target
    _check_numbers(task, target, rank_by, dev_size)
    largest = max(sizes or (0,))
    if largest > rows:
        raise DataError(f"the size {largest} is above the data: there are {rows} training rows")
    if budget is not None and (not 0 < budget <= 1 or largest > budget * target):
        raise DataError(
            f"the budget is {budget:g}, a share of the target's {target} rows"
            + (f"; the size {largest} is above it" if largest > budget * target else "")
            + "; expected a share up to 1, and sizes within it"
        )
    if sizes is None and budget is not None:
        sizes = size_ladder(rows, target, budget, recipe)
    elif sizes is None and method in METHODS and METHODS[method].trains == "none":
        sizes = (min(rows, target - 1),)  # nothing is fine-tuned on
    elif sizes is None:
        sizes = default_sizes(rows, target, recipe)
    search = Search(
        models,
        sizes,
        target,
        metric=rank_by,
        method=method,
        strategy=strategy,
        zero=zero,
        seed=seed,
        confidence=confidence,
        drop=drop,
        budget=flops,
        unit="FLOPs",
        gamma=gamma,
        tau=tau,
    )  # refuses what cannot be used before models are loaded
    order = stratified(task.dev, data_seed, task.regression)
    train = task.train.chosen(stratified(task.train, data_seed, task.regression))
    task = replace(task, train=train, dev=task.dev.chosen(order))
    _check_smallest(min(sizes), task, recipe)
    candidates, unloadable = _candidates(models, task, seed, recipe)
    judged = dev_size or judged_rows(candidates, recipe, target, sizes)
    places = sorted(range(len(order)), key=order.__getitem__)
    task = replace(task, dev=task.dev.chosen([place for place in places if place < judged]))
    return Plan(
        search=replace(
            search,
            models=[candidate.model for candidate in candidates],
            test_rows=len(task.dev),
            costs={
                candidate.model: (
                    candidate.judging_flops(len(task.dev)),
                    candidate.training_flops(1, recipe),
                )
                for candidate in candidates
            },
            parameters={candidate.model: candidate.parameters for candidate in candidates},
        ),
        task=task,
        candidates=candidates,
        unloadable=unloadable,
        recipe=recipe,
    )


def _check_numbers(task: Task, target: int, rank_by: str, dev_size: int | None) -> None:
    for name, value in (("dev_size", dev_size), ("target", target)):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}; expected 1 or more")
    scores = (LOSS, *(NUMBER_SCORES if task.regression else CLASS_SCORES))
    if isinstance(task, TextTask):
        scores = (BITS,)  # what is counted a token depends on the tokenizer
    if rank_by not in scores:
        raise DataError(f"rank_by is {rank_by!r}; expected one of {', '.join(scores)}")


def _check_smallest(smallest: int, task: Task, recipe: Recipe) -> None:
    if not isinstance(task, TextTask) and len(set(task.train.part(0, smallest).labels)) < 2:
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
    models: Sequence[str], task: Task, seed: int, recipe: Recipe
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Return the candidates that load, and why the others do not."""
    loaded: list[Candidate] = []
    unloadable: dict[str, str] = {}
    for model in models:
        try:
            loaded.append(_load_candidate(model, task, seed, recipe))
        except DataError as error:
            unloadable[model] = str(error)
        except (MemoryError, RuntimeError, ValueError) as error:  # of peft, or too large a model
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            unloadable[model] = f"the model {model!r} could not be loaded: {reason}"
    if len(loaded) < 2:
        raise DataError(
            f"{len(loaded)} of {len(models)} models can be used, and a choice needs two: "
            + "; ".join(unloadable.values())
        )
    return tuple(loaded), unloadable


def _load_candidate(model: str, task: Task, seed: int, recipe: Recipe) -> Candidate:
    tokenizer = load_tokenizer(model)
    version = model_version(model)
    loaded = load_for(model, task, tokenizer, seed, recipe)
    if isinstance(task, TextTask):
        check_kept(task.dev.texts, tokenizer, model)

    def tokens(rows: Examples, trained: bool) -> float:
        counted = rows.part(0, _COUNTED)
        data = encoded(task, counted, loaded, tokenizer, recipe, trained=trained)
        return count_tokens(data) / len(counted)

    counts = tokens(task.train, True), tokens(task.dev, False)
    return Candidate(model, version, *count_parameters(loaded), *counts)


def stratified(rows: Examples, seed: int, regression: bool) -> list[int]:
    """Return an order of the rows in which the classes of any first few are in proportion.

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


def size_ladder(rows: int, target: int, budget: float, recipe: Recipe) -> tuple[int, ...]:
    """Return subsets from the largest that the budget allows down, each a quarter of the next.

    Quarters and not halves: all sizes together then cost a third more than the largest, and not
    twice as much.  Where that leaves fewer than three sizes above the smallest that makes sense
    (`smallest_rows`), the ratio is less, 2 at least; the largest is then less as well, so that all
    together cost no more, as long as three sizes are left.

    Raises:
        DataError: the budget is less than the smallest subset.
    """
    least, largest = smallest_rows(recipe), min(int(budget * target), rows)
    if largest < least:
        raise DataError(
            f"the budget {budget:g} of {target} rows is {largest}; a subset needs {least} rows or "
            "more: take a larger budget, or give the sizes"
        )
    fits = (_down_from(top, least) for top in range(largest, least - 1, -1))
    sizes = next(sizes for sizes in fits if sum(sizes) <= _TRAINING * largest)
    return sizes if len(sizes) >= _FEWEST else _down_from(largest, least)


def default_sizes(rows: int, target: int, recipe: Recipe) -> tuple[int, ...]:
    """Return subsets up to an eighth of the target, where three of them fit.

    Where they do not, 1, 2 and 4 times the smallest that makes sense (`smallest_rows`), if these
    have two thirds of the target's rows together at most.

    Raises:
        DataError: there are too few rows for that, too.
    """
    least = smallest_rows(recipe)
    if int(_BUDGET * target) >= least:
        sizes = size_ladder(rows, target, _BUDGET, recipe)
        if len(sizes) >= _FEWEST:
            return sizes
    sizes = tuple(times * least for times in _SMALL)
    if sizes[-1] <= rows and sum(sizes) <= _SMALL_SHARE * target:
        return sizes
    whole = min(rows, target - 1)
    raise DataError(
        f"{min(rows, target)} rows are too few to forecast from subsets of {least} rows and more; "
        "compare the models on nearly all of them, which forecasts nothing: "
        f"--method subtuning --sizes {whole} (in Python method='subtuning', sizes=[{whole}])"
    )


def smallest_rows(recipe: Recipe) -> int:
    """Return how many rows an optimiser takes eight steps on, 16 at least."""
    batches = math.ceil(_STEPS / recipe.epochs)
    return max(SMALLEST, (batches - 1) * recipe.batch_size * recipe.gradient_accumulation + 1)


def _down_from(largest: int, least: int) -> tuple[int, ...]:
    span = largest / least
    ratio = min(_RATIO, max(2.0, span ** (1 / (_FEWEST - 1))))
    count = 1 + int(math.log(span) / math.log(ratio) + 1e-9)
    return tuple(round(largest / ratio**step) for step in reversed(range(count)))


def judged_rows(
    candidates: Sequence[Candidate], recipe: Recipe, target: int, sizes: Sequence[int]
) -> int:
    """Return how many dev rows are judged on, where no number is given.

    So many that judging a model once costs 0.5 % of training it on the target's rows, and 200 at
    least; but judging after all sizes costs a sixth of training on them at most, down to 80 rows.
    """
    training = sum(candidate.training_flops(1, recipe) for candidate in candidates)
    ratio = training / sum(candidate.judging_flops(1) for candidate in candidates)  # of a row
    rows = max(_FEWEST_JUDGED, int(_JUDGING * ratio * target))
    most = int(_MOST_JUDGING * ratio * sum(sizes) / len(sizes))
    return min(rows, max(most, _ALWAYS_JUDGED))
