"""Processes of a grid: no worker outlives the process that started it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from python_tests import processes
from python_tests.test_processes import ends, number_in

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys, time
from jachess_ext.experiment import workers

if os.environ.get("BUSY"):  # the libraries' import takes long, as on a busy machine
    def prepare(threads):
        leave_number(0)
        time.sleep(600)
    workers.prepare = prepare

def leave_number(job):
    file = f"{sys.argv[1]}/{job}"
    open(file + ".new", "w").write(str(os.getpid()))
    os.replace(file + ".new", file)

def sleep(job):
    leave_number(job)
    time.sleep(600)

if __name__ == "__main__":
    with workers.Workers(2, 1) as pool:
        pool.run_all([0, 1], sleep, lambda *_: None)
"""


@pytest.mark.parametrize("while_starting", [False, True])
def test_workers_end_with_a_killed_grid(tmp_path: Path, while_starting: bool) -> None:
    """kill -9 of the process that has the pool, in the midst of a job or before the first."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BUSY": "1" * while_starting}
    with processes.started([sys.executable, script, tmp_path], env=environment) as process:
        workers = [number_in(tmp_path / str(job)) for job in range(1 if while_starting else 2)]
        time.sleep(0.1)
        assert not any(ends(number, 0.1) for number in workers)
        os.kill(process.pid, signal.SIGKILL)
        assert all(ends(number) for number in workers)
