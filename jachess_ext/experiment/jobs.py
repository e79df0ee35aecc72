"""The runs of a grid, in order: first those that choose strengths, then those that count."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..evaluation.judge import Conditions
from ..tasks.batches import check_tokens
from ..tasks.examples import DataError, Task
from ..tasks.model_version import model_version
from ..tasks.spec import (
    check_shift,
    digest,
    held_out,
    load_task,
    selected,
    with_validation,
    with_wrong_labels,
)
from ..training import JacHess, Method, parse_method
from ..training.batches import mixed_seed
from .checks import check_methods, check_model, check_scheduler
from .grid import Grid, Recipe

Record = dict[str, Any]
_EDITION = 4
"""To be raised when a change of the code changes what a run gives: older runs are made anew."""


@dataclass(frozen=True)
class Job:
    """One fine-tuning and its judgement; everything its result depends on.

    Attributes:
        version: changes with the model's files.
        method: as it stands in the grid, which is its name in tables.
        value: of the method's knob; None: as the method has it.
        shift: tasks on whose dev rows the model is judged as well.
        curve: epochs after which it is judged as well.
        label_noise, resampled: how `task` was made, for the record.
    """

    kind: Literal["tuning", "final"]
    model: str
    version: str
    task: Task
    method: str
    value: float | None
    seed: int
    recipe: Recipe
    conditions: Conditions
    shift: tuple[Task, ...] = ()
    curve: tuple[int, ...] = ()
    label_noise: float = 0.0
    resampled: bool = False

    @property
    def arguments(self) -> Method:
        """The method with the knob at `value`."""
        return _arguments(self.method, self.value)

    @cached_property
    def name(self) -> str:
        """Readable, and with a digest of all the run depends on; serves as a file name."""
        content = [
            *(_EDITION, self.kind, self.model, self.version, digest(self.task), self.seed),
            *(self.method, self.value, self.arguments.settings),
            *(asdict(self.recipe), asdict(self.conditions), [digest(t) for t in self.shift]),
            self.curve,
        ]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:10]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.task.name}-{self.method}")[:60]
        return f"{self.kind}-{words}-s{self.seed}-{key}"


def _arguments(method: str, value: float | None) -> Method:
    made = parse_method(method)
    if value is None or made.knob is None:
        return made
    return made.replace(**{made.knob: value})


@dataclass(frozen=True)
class LoadedGrid:
    """A grid and its tasks, checked: nothing that follows can fail for what the user gave.

    `by_seed` has the tasks, in the order of `tasks`, as each seed sees them.
    """

    grid: Grid
    version: str
    tasks: tuple[Task, ...]
    shift: Mapping[str, tuple[Task, ...]]
    by_seed: Mapping[int, tuple[Task, ...]]


def load(grid: Grid) -> LoadedGrid:
    """Loads all data and checks methods, model and shifts, before any training starts.

    Raises:
        DataError: a task, method, size or shift that cannot be used.
    """
    methods = check_methods(grid.methods)
    check_scheduler(grid.recipe.scheduler)
    tokenizer = check_model(grid, methods)
    whole = [load_task(spec, grid.columns) for spec in grid.tasks]
    tasks = tuple(_drawn(task, grid, tokenizer, grid.data_seed) for task in whole)
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        raise DataError(
            f"two tasks have one name: {', '.join(names)}; give another with name=<task>"
        )
    _check_tuned(grid)
    targets = shift_targets(grid, tasks)
    shift = {
        name: tuple(_judged_only(target, grid, tokenizer) for target in found)
        for name, found in targets.items()
    }
    if any(tuned(method, grid) for method in grid.methods):
        for task in tasks:
            held_out(task, grid.tuning.validation)
    by_seed = {}
    for seed in grid.seeds:
        seen = tasks
        if grid.resample:
            of = mixed_seed(grid.data_seed, seed)
            seen = tuple(_drawn(task, grid, tokenizer, of) for task in whole)
        if grid.label_noise:
            of = mixed_seed(grid.data_seed, seed, 1)
            seen = tuple(with_wrong_labels(task, grid.label_noise, of) for task in seen)
        by_seed[seed] = seen
    return LoadedGrid(grid, model_version(grid.model), tasks, shift, by_seed)


def shift_targets(grid: Grid, tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """By each task's name the others it is judged on.

    Raises:
        DataError: the grid names another task, or a target does not fit.
    """
    names = [task.name for task in tasks]
    if unknown := sorted(set(grid.shift) - set(names)):
        raise DataError(f"shift names the task {unknown[0]!r}; the tasks are {', '.join(names)}")
    found = {}
    for task in tasks:
        found[task.name] = [load_task(s, grid.columns) for s in grid.shift.get(task.name, ())]
        for target in found[task.name]:
            check_shift(task, target)
    return found


def _drawn(task: Task, grid: Grid, tokenizer: Any, seed: int) -> Task:
    """The rows of a task that the grid uses, those to train on drawn by `seed`."""
    size = grid.train_size
    if size is not None and grid.fewer:
        size = min(size, len(task.train))
    drawn = selected(task, size, grid.unlabelled_size, grid.dev_size, seed, dev_seed=grid.data_seed)
    check_tokens(drawn, task, tokenizer)
    return with_validation(drawn, grid.validation, grid.data_seed) if grid.validation else drawn


def _judged_only(target: Task, grid: Grid, tokenizer: Any) -> Task:
    """A task of which only the dev rows are needed: the others are not carried about."""
    drawn = selected(target, None, 1, grid.shift_size, grid.data_seed)
    check_tokens(drawn, target, tokenizer, ["dev"])
    return replace(drawn, train=drawn.train.first(1))


def tuned(method: str, grid: Grid) -> tuple[float, ...]:
    """The values to try for a method, see `Tuning`: none where its text sets the knob."""
    made, tuning = parse_method(method), grid.tuning
    names = _tuned_names(method)
    if not names:
        return ()
    own = [tuning.methods[name] for name in names if name in tuning.methods]
    if own:
        return tuple(sorted(own[0]))
    if made.knob == "unlab_lr_ratio":
        return tuple(sorted(tuning.unlab_lr_ratio))
    if isinstance(made, JacHess) or not tuning.strength:
        return tuple(sorted(tuning.strength))
    return tuple(sorted(factor * made.strength for factor in tuning.factors))


def _tuned_names(method: str) -> tuple[str, ...]:
    """By what values for a method may be given; nothing if it has no knob left to choose."""
    made = parse_method(method)
    if made.knob is None or f"{made.knob}=" in method:
        return ()
    return method, made.label


def _check_tuned(grid: Grid) -> None:
    """Whether all values to try are of methods of the grid, and ones these take."""
    names = list(dict.fromkeys(name for method in grid.methods for name in _tuned_names(method)))
    untried = sorted(set(grid.tuning.methods) - set(names))
    if untried:
        raise DataError(
            f"tuning names the method {untried[0]!r}, which is none of the grid's with a value to "
            f"choose; expected one of: {'; '.join(names) or 'none'}"
        )
    for method in grid.methods:
        for value in tuned(method, grid):
            try:
                _arguments(method, value)
            except ValueError as error:
                raise DataError(f"tuning of {method!r}: {error}") from error


def tuning_jobs(loaded: LoadedGrid) -> list[Job]:
    """Every method with values to try, on every task; judged by the clean score alone."""
    grid = loaded.grid
    return [
        Job(
            *("tuning", grid.model, loaded.version, part, method, value, seed),
            *(grid.recipe, grid.conditions.bare),
        )
        for task in loaded.tasks
        for method in grid.methods
        if (values := tuned(method, grid))
        for part in [held_out(task, grid.tuning.validation)]
        for value in values
        for seed in grid.tuning.seeds
    ]


def final_jobs(loaded: LoadedGrid, chosen: Mapping[tuple[str, str], float]) -> list[Job]:
    """Every method on every task from every seed, knobs as `chosen`.

    A seed's runs come together: a grid that is cut short has whole pairs of runs to compare.
    """
    grid = loaded.grid
    return [
        Job(
            *("final", grid.model, loaded.version, task),
            *(method, chosen.get((task.name, method)), seed),
            *(grid.recipe, grid.conditions, loaded.shift[task.name]),
            curve=grid.curve if method in grid.curve_methods else (),
            label_noise=grid.label_noise,
            resampled=grid.resample,
        )
        for seed in grid.seeds
        for task in loaded.by_seed[seed]
        for method in grid.methods
    ]


def choose(records: Sequence[Record]) -> dict[tuple[str, str], float]:
    """(task, method) → the value of the knob, from the records of tuning runs; see `Tuning`."""
    found: dict[tuple[str, str], dict[float, list[tuple[float, float]]]] = {}
    for record in records:
        by_value = found.setdefault((record["task"], record["method"]), {})
        score = -np.inf if record["score"] is None else record["score"]
        brier = 0.0 if record["brier"] is None else record["brier"]
        by_value.setdefault(record["value"], []).append((score, -brier))
    return {
        key: max(sorted(by_value), key=lambda value: tuple(np.mean(by_value[value], axis=0)))
        for key, by_value in found.items()
    }
