"""Processes that tests start: ended whole, however the test or pytest itself ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LIMIT = 20 * 60
"""Seconds: stops only what hangs, on a busy machine too."""

_MARK = "JACHESS_TEST_PROCESSES"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the system kill this process once its parent has ended, be it by SIGKILL (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def started(
    command: Sequence[Any], *, env: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A process of one thread, ended whole, descendants too, at the end of the block at the latest.

    `env` and `settings` are those of `subprocess.Popen`.  OMP_NUM_THREADS=1 unless it is set.
    """
    mark = uuid.uuid4().hex
    own = {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env), _MARK: mark}
    process = subprocess.Popen(
        list(map(str, command)),
        env=own,
        start_new_session=True,
        preexec_fn=die_with_parent,
        **settings,
    )
    try:
        yield process
    finally:
        for number in _marked(mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _marked(mark: str) -> list[int]:
    """Processes with this mark in the environment: launchers give ranks sessions of their own."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def run(
    command: Sequence[Any], *, check: bool = False, limit: float = LIMIT, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with its output captured as text; see `started`.

    Raises:
        subprocess.TimeoutExpired: after `limit` seconds; nothing of it runs on.
        subprocess.CalledProcessError: with `check`, the status is not 0.
    """
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
    with started(command, **settings) as process:
        out, err = process.communicate(timeout=limit)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check and done.returncode != 0:
        print(out, err, sep="\n")
        done.check_returncode()
    return done


def results_of_ranks(module: str, *arguments: str, ranks: int = 2, **settings: Any) -> list[Any]:
    """Return what every rank of a job leaves: MODULE's `main(*arguments, folder)` on each.

    Args:
        settings: of `run`.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "python_tests.distributed.ranks", ranks]
        command = [sys.executable, *launch, module, *arguments, folder]
        done = run(command, cwd=Path(__file__).resolve().parents[1], **settings)
        assert done.returncode == 0, done.stderr[-3000:]
        return torch.load(Path(folder) / "results.pt", weights_only=False)
