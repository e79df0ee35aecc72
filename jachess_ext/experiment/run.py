"""A grid from start to end: tuning, final runs, results file; goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ..evaluation.report import write_json
from ..progress import Progress
from . import one_run
from .grid import Grid
from .jobs import Job, Record, choose, final_jobs, load, tuning_jobs
from .ray_workers import RayWorkers
from .store import Store
from .tracking import Tracking
from .workers import Workers


def run_grid(
    grid: Grid,
    out: Path,
    *,
    processes: int = 1,
    threads: int = 1,
    save_models: bool = False,
    ray: str | None = None,
    report_to: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Record]:
    """Makes all runs that `out` does not have yet; returns the records, in the grid's order.

    With `ray`, the address of a cluster (see `RayWorkers`), runs are made there, as many at a time
    as it has room for, in place of `processes` here.
    Of a folder with nothing but a results file, the runs in it are had.
    With `save_models` finished runs whose model was not kept are made again: a run gives the same
    each time.
    With `report_to`, the names of trackers, each run that is made is logged there under its own.

    Raises:
        DataError: the grid cannot be run, another process works in `out`, or no cluster answers.
        MissingExtra: ray, or what `report_to` names, is asked for and not installed.
    """
    progress = progress or Progress()
    tracking = Tracking(tuple(report_to), (out / "logs").resolve()) if report_to else None
    if tracking is not None:
        tracking.check()
    with progress.stage("reading the data"):
        loaded = load(grid)
    workers: Workers | RayWorkers = Workers(processes, threads)
    if ray is not None:
        workers = RayWorkers(ray, threads=threads)
    store = Store(out)
    tuning = tuning_jobs(loaded)
    progress.total(len(tuning) + len(final_jobs(loaded, {})))

    def make(jobs: Sequence[Job], before: Sequence[Job], folder: Path | None) -> list[Record]:
        missing = [job for job in jobs if not _is_complete(store.finished(job), job, folder)]
        for _ in range(len(jobs) - len(missing)):
            progress.advance()

        def done(job: Job, found: tuple[Record, dict[str, float]]) -> None:
            store.add(job, *found)
            store.assemble([*before, *jobs])
            progress.advance()

        with workers:
            run = partial(one_run.run, models=folder, tracking=tracking)
            workers.run_all(missing, run, done)
        return store.assemble([*before, *jobs])

    with store.locked():
        write_json(out / "grid.json", asdict(grid))
        store.adopt()
        with progress.stage("choosing strengths"):
            chosen = choose(make(tuning, [], None))
        with progress.stage("fine-tuning"):
            return make(final_jobs(loaded, chosen), tuning, out / "models" if save_models else None)


def _is_complete(record: Record | None, job: Job, models: Path | None) -> bool:
    """Whether a run has its record and, where models are kept, its model; a failed run has none."""
    if record is None:
        return False
    return models is None or bool(record["error"]) or (models / job.name).is_dir()
