"""How long a grid will take: each method on each task in small, on this machine, as it is now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..progress import Progress
from ..tasks.examples import Task
from . import one_run
from .grid import Grid
from .jobs import Job, final_jobs, load, tuning_jobs
from .workers import prepare

_FEW, _MORE = 2, 6  # batches of the two small runs whose difference is the price of a batch


@dataclass(frozen=True)
class Estimate:
    """Seconds of one final run of each (task, method), and of the whole grid."""

    runs: dict[tuple[str, str], float]
    total: float


def estimate(
    grid: Grid, *, processes: int = 1, threads: int = 1, progress: Progress | None = None
) -> Estimate:
    """From two small runs of each method on each task, one epoch each; runs already made count.

    The rows of the small runs are spread over the lengths of all. TAPT's first stage is counted
    with one epoch instead of its own.

    Raises:
        DataError: the grid cannot be run.
    """
    progress = progress or Progress()
    loaded = load(grid)
    prepare(threads)
    final, tuning = final_jobs(loaded, {}), tuning_jobs(loaded)
    firsts = {(job.task.name, job.method): job for job in reversed(final)}
    progress.total(len(firsts))
    prices: dict[tuple[str, str], tuple[float, float, float]] = {}
    with progress.stage("measuring"):
        for key, job in sorted(firsts.items()):
            prices[key] = _price(job)
            progress.advance()
    runs = {key: _seconds(job, prices[key], judged=True) for key, job in firsts.items()}
    total = sum(runs[job.task.name, job.method] for job in final)
    total += sum(_seconds(job, prices[job.task.name, job.method], judged=False) for job in tuning)
    return Estimate(runs, total / processes)


def _price(job: Job) -> tuple[float, float, float]:
    """Seconds: fixed, per batch, and per judged row and condition."""
    few, more = (_small(job, batches * job.recipe.batch_size) for batches in (_FEW, _MORE))
    (_, short), (_, long) = one_run.run(few), one_run.run(more)
    start, end = (seconds.get("training", math.nan) for seconds in (short, long))
    per_batch = max(0.0, (end - start) / (_MORE - _FEW))
    fixed = max(0.0, start - _FEW * per_batch)
    return fixed, per_batch, long.get("judging", math.nan) / _judged_rows(more)


def _small(job: Job, rows: int) -> Job:
    recipe = replace(job.recipe, epochs=1.0)
    task = _thinned(job.task, rows)
    shift = tuple(_thinned(target, rows) for target in job.shift)
    return replace(job, task=task, shift=shift, recipe=recipe, curve=())


def _thinned(task: Task, rows: int) -> Task:
    """About `rows` of each part, at even distances in the order of length."""

    def thin(texts: Sequence[str]) -> list[int]:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        count = min(rows, len(order))
        return [order[i * len(order) // count] for i in range(count)]

    return replace(
        task,
        train=task.train.chosen(thin(task.train.texts)),
        unlabelled=task.unlabelled.chosen(thin(task.unlabelled.texts)),
        dev=task.dev.chosen(thin(task.dev.texts)),
        validation=task.validation and task.validation.chosen(thin(task.validation.texts)),
    )


def _judged_rows(job: Job) -> int:
    """Rows that pass through the model in judging."""
    conditions = job.conditions
    passes = 1 + conditions.draws * (len(conditions.corruption) + sum(map(bool, conditions.deltas)))
    passes += len(conditions.texts) + len(job.curve)
    validation = (1 + 2 * len(job.curve)) * len(job.task.validation or ())
    return passes * len(job.task.dev) + validation + sum(len(t.dev) for t in job.shift)


def _seconds(job: Job, price: tuple[float, float, float], *, judged: bool) -> float:
    fixed, per_batch, per_row = price
    batches = job.recipe.epochs * math.ceil(len(job.task.train) / job.recipe.batch_size)
    return fixed + per_batch * batches + per_row * (_judged_rows(job) if judged else 0)


def print_estimate(found: Estimate) -> None:
    """One line a run, then the whole."""
    for (task, method), seconds in found.runs.items():
        print(f"{task:16} {method:40} {seconds:8.0f} s a run")
    print(f"the whole grid: about {found.total / 3600:.1f} hours on this machine as it is now")
