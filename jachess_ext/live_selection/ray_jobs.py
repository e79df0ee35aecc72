"""Runs of a live selection on a Ray cluster: one task per model and size, retried when lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..evaluation.extras import MissingExtra
from ..experiment.workers import prepare
from ..tasks.examples import DataError
from . import measure
from .jobs import SubsetJob
from .records import Kernel, RunRecord

if TYPE_CHECKING:
    from .engine import Done, Runner

RETRIES = 3


def ray_runner(
    address: str = "auto", *, threads: int = 1, retries: int = RETRIES, gpus: int | None = None
) -> Runner:
    """A runner for `select_live`: records come back to this process, which alone writes them.

    A task whose worker dies (killed, out of memory, machine lost) is tried again, and in the end
    recorded as failed; the others go on.  Each task takes `threads` CPUs, and one GPU where the
    cluster has any.  Workers load models by the same path or hub id: local paths must be on a file
    system all machines share.

    Args:
        address: "auto": the cluster this machine belongs to; "local": one started here and ended
            with this process; or a cluster's address.
        threads: of each task.
        retries: how often a task is tried again.
        gpus: of each task; None: one where the cluster has any.  Tasks on different GPUs run at
            the same time.

    Raises:
        MissingExtra: ray is not installed.
        DataError: no cluster at the address.
    """
    ray = _require_ray()
    if not ray.is_initialized():
        quiet = {"include_dashboard": False, "log_to_driver": False}
        try:
            ray.init(**({} if address == "local" else {"address": address}), **quiet)
        except (ConnectionError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"no Ray cluster answers at {address!r} ({reason}); start one with `ray start "
                "--head`, or use --ray local"
            ) from error
    if gpus is None:
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
    task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=retries)(_run)

    def run_round(jobs: Sequence[SubsetJob], done: Done) -> None:
        waiting = {task.remote(job, threads): job for job in jobs}
        try:
            while waiting:
                (first,), _ = ray.wait(list(waiting), num_returns=1)
                job = waiting.pop(first)
                done(job, _result(ray, first, job))
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)

    return run_round


def _result(ray: Any, reference: Any, job: SubsetJob) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise  # what the run itself raised
    except ray.exceptions.RayError:
        return measure.killed(job)


def _run(job: SubsetJob, threads: int) -> tuple[RunRecord, Kernel | None]:
    prepare(threads)
    return measure.run(job)


def _require_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "ray is needed to fan out and not installed: pip install 'jachess-ext[ray]'; without "
            "it, --processes N uses this machine"
        ) from error
    return ray
