"""Running jobs on a Ray cluster: each a task, tried again when its worker is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..evaluation.extras import MissingExtra
from ..tasks.examples import DataError
from .workers import prepare

Job = TypeVar("Job")
Result = TypeVar("Result")

RETRIES = 3


class RayWorkers:
    """As `Workers`, on a cluster; results come back to this process, which alone writes files.

    A task whose worker dies (killed, out of memory, machine lost) is tried again.  Each takes
    `threads` CPUs, and one GPU where the cluster has any.  Workers load models and data by the same
    path or hub id: local paths must be on a file system all machines share.

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

    def __init__(
        self,
        address: str = "auto",
        *,
        threads: int = 1,
        retries: int = RETRIES,
        gpus: int | None = None,
    ) -> None:
        self._ray = ray = _require_ray()
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
        self._threads = threads
        self._task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=retries)(_run)

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        """The cluster stays; it may be others' as well."""

    def run_all(
        self,
        jobs: Sequence[Job],
        run: Callable[[Job], Result],
        done: Callable[[Job, Result], None],
        killed: Callable[[Job], Result] | None = None,
    ) -> None:
        """Runs every job and calls `done` in this process as each ends.

        `run`, jobs and results are pickled.  `killed` makes the result of a job whose worker was
        lost every time; without it that is an error.
        """
        waiting = {self._task.remote(run, job, self._threads): job for job in jobs}
        try:
            while waiting:
                (first,), _ = self._ray.wait(list(waiting), num_returns=1)
                job = waiting.pop(first)
                done(job, self._result(first, job, killed))
        finally:
            for reference in waiting:
                self._ray.cancel(reference, force=True)

    def _result(self, reference: Any, job: Job, killed: Callable[[Job], Result] | None) -> Result:
        errors = self._ray.exceptions
        try:
            result: Result = self._ray.get(reference)
        except errors.RayTaskError:
            raise  # what the run itself raised
        except errors.RayError:
            if killed is None:
                raise
            return killed(job)
        return result


def _run(run: Callable[[Job], Result], job: Job, threads: int) -> Result:
    prepare(threads)
    return run(job)


def _require_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "ray is needed to fan out and not installed: pip install 'jachess-ext[ray]'; without "
            "it, --processes N uses this machine"
        ) from error
    return ray
