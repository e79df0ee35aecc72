"""Run jobs in local processes, by Dask or on Ray, with a JSON file for each run in a folder."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from filelock import FileLock, Timeout

from ..._io import (
    DataError,
    finite,
    parse_json,
    quiet_libraries,
    read_json,
    read_text,
    require,
    write_json,
    write_text,
)

Record = dict[str, Any]
_RAY_RETRIES = 3


class Job(Protocol):
    """Description of a run; its name is also the name of the run's file."""

    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=Job)


def run_all(
    jobs: Sequence[J],
    run: Callable[[J], Record],
    folder: Path,
    *,
    processes: int = 1,
    threads: int = 1,
    backend: str = "loky",
    is_usable: Callable[[J, Record], bool] = lambda job, record: True,
    killed: Callable[[J], Record] | None = None,
) -> Iterator[tuple[J, Record]]:
    """Yield each job with its record: first the records already in `folder`, then those of the
    other jobs as they finish.

    A record is written to ``<folder>/<name>.json``, atomically, before it is yielded: if the
    process is killed, only the runs in progress are lost.  A record does not depend on the number
    of processes; its last digits may depend on `threads`.

    Args:
        jobs: the jobs to run; a job's name is the name of its file.
        run: computes a job's record, a dict of JSON values; with several processes it is pickled.
        folder: folder of the runs' files; created if needed.
        processes: number of processes; 1: jobs run in this process.  On Ray, ignored.
        threads: number of threads of each process.
        backend: joblib's "loky" (local processes) or "dask" (the cluster of the open `Client`), or
            "ray" (see `connect_ray`).
        is_usable: returns whether a record from a file can be used; raises DataError if it is
            broken.
        killed: returns the record, which is not written, of a job whose process was killed twice;
            jobs that were running beside it are run again.  None: a killed process is an error.

    Raises:
        DataError: another process uses the folder, or it cannot be written to.
        MissingExtra: joblib or the backend is not installed.

    Warns:
        RuntimeWarning: a file is broken; it is renamed, and its run repeated.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from types import SimpleNamespace
        >>> jobs = [SimpleNamespace(name=f"square-{n}", n=n) for n in (2, 3)]
        >>> with TemporaryDirectory() as folder:
        ...     runs = run_all(jobs, lambda job: {"square": job.n**2}, Path(folder))
        ...     records = [record for job, record in runs]
        >>> records
        [{'square': 4}, {'square': 9}]
    """
    with locked(folder):
        unfinished: dict[str, J] = {}
        for job in jobs:
            record = _read_record(folder / f"{job.name}.json", functools.partial(is_usable, job))
            if record is None:
                unfinished[job.name] = job
            else:
                yield job, record
        run_job = functools.partial(_run_job, run=run, threads=threads)
        if backend == "ray":
            computed = _run_on_ray(unfinished, run, threads)
        elif processes == 1 and backend == "loky":
            computed = map(run_job, unfinished.values())
        else:
            computed = _by_joblib(unfinished, run_job, processes, backend, killed is not None)
        for name, result in computed:
            # Written before it is yielded, so that a record that the caller has is never
            # recomputed.
            if not isinstance(result, Exception):
                write_json(folder / f"{name}.json", result)
            elif killed is None:
                raise result
            else:
                result = killed(unfinished[name])
            yield unfinished[name], result


def _run_job(job: Job, run: Callable[[Any], Record], threads: int) -> tuple[str, Record]:
    prepare_process(threads)
    return job.name, run(job)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes within the context; a killed process leaves no lock.

    Within the context this process may call `run_all` with the folder.

    Raises:
        DataError: another process uses the folder, or it cannot be created or written to.
    """
    # The kernel releases the lock when the process ends in any way.  is_singleton: one lock object
    # per file, so that a nested call in this process acquires the lock again.
    folder = folder.resolve()
    lock = FileLock(folder / ".lock", timeout=0, is_singleton=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise DataError(
            f"{folder} is in use by another process; wait for it, or choose another folder"
        ) from None
    except OSError as error:
        raise DataError(f"{folder} cannot be written to: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _read_record(path: Path, is_usable: Callable[[Record], bool]) -> Record | None:
    """Return a finished run's record from its file; None if there is none or it is not usable.

    A broken file is renamed, with a warning, so that its run is repeated.
    """
    if not path.is_file():
        return None
    try:
        record = read_json(path)
        if not isinstance(record, dict):
            raise DataError("it is not an object")
        return record if is_usable(record) else None
    except DataError as error:
        broken = path.with_suffix(".broken")
        os.replace(path, broken)
        warnings.warn(
            f"{path} is not a whole record of a run ({error}); it was renamed to {broken.name}, "
            "and only this run is repeated",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def write_results(path: Path, records: Iterable[Record]) -> None:
    """Write records to a file, one JSON object per line."""
    write_text(path, "".join(json.dumps(finite(r), ensure_ascii=False) + "\n" for r in records))


def read_results(path: Path) -> list[Record]:
    """Return the records of a file that `write_results` wrote.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or a line is not a JSON object.
    """
    records = []
    # Not splitlines, which also splits at U+2028, a character that JSON strings may contain.
    lines = read_text(path).removesuffix("\n").split("\n")
    for number, line in enumerate(lines if any(lines) else (), start=1):
        record = parse_json(line, f"{path}: line {number}")
        if not isinstance(record, dict):
            raise DataError(f"{path}: line {number} is not the record of a run")
        records.append(record)
    if not records:
        raise DataError(f"{path} is empty: no run has finished yet")
    return records


Results = Iterator[tuple[str, Record | Exception]]


def _by_joblib(
    jobs: Mapping[str, J],
    run: Callable[[J], tuple[str, Record]],
    processes: int,
    backend: str,
    should_retry: bool,
) -> Results:
    """Yield each job's name as the job ends, with its record or the error of its killed process.

    Args:
        should_retry: whether jobs left over by a killed process are run again, each in a process of
            its own; False: the error is raised.
    """
    joblib = require("joblib")
    options = {"initializer": _exit_with, "initargs": (os.getpid(),)} if backend == "loky" else {}

    def results(names: Iterable[str], processes: int) -> Iterator[tuple[str, Record]]:
        with joblib.parallel_config(backend, n_jobs=processes, **options):
            parallel = joblib.Parallel(batch_size=1, return_as="generator_unordered")
        return parallel(joblib.delayed(run)(jobs[name]) for name in names)

    # If one worker is killed, mostly for memory, loky shuts down the whole pool.  All unfinished
    # jobs are then run one by one: the job whose process is killed again is the cause.
    unfinished = list(jobs)
    killed = joblib.externals.loky.process_executor.TerminatedWorkerError
    try:
        for name, record in results(list(unfinished), processes):
            unfinished.remove(name)
            yield name, record
    except killed:
        if not should_retry:
            raise
    for name in unfinished:
        try:
            yield from results([name], max(processes, 2))  # with 1, joblib would start no process
        except killed as error:
            yield name, error


def _exit_with(parent: int) -> None:
    """Make this worker process exit once its parent process, number ``parent``, has ended."""

    # A killed parent does not notify its children, but they then have another parent.
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def prepare_process(threads: int) -> None:
    """Set the number of this process's threads, and silence libraries."""
    import torch
    import transformers

    quiet_libraries()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def connect_ray(address: str = "auto") -> None:
    """Connect this process to a Ray cluster, for the backend "ray".

    Workers load models and data by the same path or hub id: local paths must be on a file system
    that all machines share.

    Args:
        address: "auto": the cluster that this machine belongs to; "local": a new cluster on this
            machine, which ends with this process; or a cluster's address.

    Raises:
        MissingExtra: ray is not installed.
        DataError: there is no cluster at the address.
    """
    ray = require("ray")
    if ray.is_initialized():
        return
    options = {"include_dashboard": False, "log_to_driver": False}
    try:
        ray.init(**({} if address == "local" else {"address": address}), **options)
    except (ConnectionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"no Ray cluster answers at {address!r} ({reason}); start one with `ray start --head`, "
            "or give 'local', which starts one here"
        ) from error


def _run_on_ray(jobs: Mapping[str, J], run: Callable[[J], Record], threads: int) -> Results:
    """Yield each job's name as the job ends, with its record or the error of its killed process.

    (joblib's own Ray backend yields nothing until all jobs have ended.)  A task whose worker dies
    is retried.  Each task has `threads` CPUs, and a GPU if the cluster has any.
    """
    connect_ray()
    ray = require("ray")
    # A task sees only GPUs that it has requested: without this all would run on CPUs.
    num_gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
    task = ray.remote(num_cpus=threads, num_gpus=num_gpus, max_retries=_RAY_RETRIES)(_run_job)
    running = {task.remote(job, run, threads): name for name, job in jobs.items()}
    try:
        while running:
            (task_reference,), _ = ray.wait(list(running), num_returns=1)
            name = running.pop(task_reference)
            try:
                yield ray.get(task_reference)
            except ray.exceptions.RayTaskError:
                raise  # the run itself raised an error
            except ray.exceptions.RayError as error:
                yield name, error
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
