"""Running jobs here or in several processes of one thread each."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


class Workers:
    """So many processes, started when there is work, kept until the end; with one, this process.

    A context manager.  A result does not depend on the number of processes or on what ran before;
    it may depend in its last digits on `threads`.
    """

    def __init__(self, processes: int, threads: int) -> None:
        """`threads`: of each process."""
        self._processes, self._threads = processes, threads
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error[0] is None, cancel_futures=True)
            self._pool = None  # entered again, it starts others

    def run_all(
        self,
        jobs: Sequence[Job],
        run: Callable[[Job], Result],
        done: Callable[[Job, Result], None],
        killed: Callable[[Job], Result] | None = None,
    ) -> None:
        """Runs every job and calls `done` in this process as each ends.

        With several processes `run`, jobs and results are pickled.  A process that is killed takes
        the others with it; with `killed`, the jobs it leaves are run again one at a time, and
        `killed` makes the result of one whose process is killed again.
        """
        if self._processes == 1 or not jobs:
            prepare(self._threads)
            for job in jobs:
                done(job, run(job))
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, context, _begin, (self._threads,))
        waiting = {self._pool.submit(run, job): job for job in jobs}
        left = []
        for future in as_completed(waiting):
            try:
                result = future.result()
            except BrokenProcessPool:
                if killed is None:
                    raise
                left.append(waiting[future])
            else:
                done(waiting[future], result)
        if killed is not None and left:
            self._pool = None
            for job in left:
                done(job, self._alone(job, run) or killed(job))

    def _alone(self, job: Job, run: Callable[[Job], Result]) -> Result | None:
        """The job's result from a process of its own; None where that is killed."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, _begin, (self._threads,)) as pool:
            try:
                return pool.submit(run, job).result()
            except BrokenProcessPool:
                return None


def prepare(threads: int) -> None:
    """Quiet libraries and so many threads."""
    import torch
    import transformers

    from ..quiet import quiet_libraries

    quiet_libraries()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _begin(threads: int) -> None:
    """In a new process: an end when the parent ends, however it does, then settings.

    In that order: `prepare` imports for seconds, and nothing before it here imports torch.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    prepare(threads)
