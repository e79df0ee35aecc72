"""Runs of a live selection on a Ray cluster: one task per model and size, retried when lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..experiment.ray_workers import RETRIES, RayWorkers
from . import measure
from .jobs import SubsetJob

if TYPE_CHECKING:
    from .engine import Done, Runner


def ray_runner(
    address: str = "auto", *, threads: int = 1, retries: int = RETRIES, gpus: int | None = None
) -> Runner:
    """A runner for `select_live`: `RayWorkers` of these settings.

    A candidate whose worker is lost every time is recorded as failed; the others go on.

    Raises:
        MissingExtra: ray is not installed.
        DataError: no cluster at the address.
    """
    workers = RayWorkers(address, threads=threads, retries=retries, gpus=gpus)

    def run_round(jobs: Sequence[SubsetJob], done: Done) -> None:
        workers.run_all(jobs, measure.run, done, measure.killed)

    return run_round
