"""Running jobs here or in several processes of one thread each."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from . import one_run
from .jobs import Job, Record

Done = Callable[[Job, Record, dict[str, float]], None]


def run_all(
    jobs: Sequence[Job], done: Done, *, processes: int, threads: int, models: Path | None
) -> None:
    """Runs every job and calls `done` as each ends; with one process, in this one.

    A result does not depend on the number of processes or on what ran before; it may depend in
    its last digits on `threads`.
    """
    if processes == 1:
        prepare(threads)
        for job in jobs:
            done(job, *one_run.run(job, models))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(processes, max(1, len(jobs))), context, _begin, (threads,)
    ) as pool:
        waiting = {pool.submit(one_run.run, job, models): job for job in jobs}
        try:
            for future in as_completed(waiting):
                done(waiting[future], *future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def prepare(threads: int) -> None:
    """Quiet libraries and so many threads."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _begin(threads: int) -> None:
    """In a new process: settings, and an end when the parent ends, however it does."""
    prepare(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
