"""A grid from start to end: tuning, final runs, results file; goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..progress import Progress
from .grid import Grid
from .jobs import Job, LoadedGrid, Record, choose, final_jobs, load, tuning_jobs
from .store import Store
from .workers import run_all


def run_grid(
    grid: Grid,
    out: Path,
    *,
    processes: int = 1,
    threads: int = 1,
    save_models: bool = False,
    progress: Progress | None = None,
) -> list[Record]:
    """Makes all runs that `out` does not have yet; returns the records, in the grid's order.

    Raises:
        DataError: the grid cannot be run, or another process works in `out`.
    """
    progress = progress or Progress()
    with progress.stage("reading the data"):
        loaded = load(grid)
    store = Store(out)
    with store.locked():
        store.write_grid(asdict(grid))
        return _run(
            loaded, store, processes, threads, out / "models" if save_models else None, progress
        )


def _run(
    loaded: LoadedGrid,
    store: Store,
    processes: int,
    threads: int,
    models: Path | None,
    progress: Progress,
) -> list[Record]:
    tuning = tuning_jobs(loaded)
    progress.total(len(tuning) + len(final_jobs(loaded, {})))

    def make(jobs: Sequence[Job], before: Sequence[Job], folder: Path | None) -> list[Record]:
        missing = [job for job in jobs if store.finished(job) is None]
        for _ in range(len(jobs) - len(missing)):
            progress.advance()

        def done(job: Job, record: Record, seconds: dict[str, float]) -> None:
            store.add(job, record, seconds)
            store.assemble([*before, *jobs])
            progress.advance()

        run_all(missing, done, processes=processes, threads=threads, models=folder)
        return store.assemble([*before, *jobs])

    with progress.stage("choosing strengths"):
        chosen = choose(make(tuning, [], None))
    with progress.stage("fine-tuning"):
        return make(final_jobs(loaded, chosen), tuning, models)
