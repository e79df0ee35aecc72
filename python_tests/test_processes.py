"""What tests start ends with them: at its limit, with the test, and with a pytest killed by -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from python_tests import processes

ROOT = Path(__file__).resolve().parents[1]
# A launcher whose child has a session of its own, as torchrun's ranks have.
LAUNCHER = """
import subprocess, sys, time
sleep = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
if sys.argv[2] == "follows":
    sleep = "from python_tests.processes import die_with_parent as d; d(); " + sleep
child = subprocess.Popen([sys.executable, "-c", sleep, sys.argv[1]], start_new_session=True)
child.wait()
"""


def number_in(file: Path) -> int:
    """The process number that a file holds once it is written."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if file.exists() and file.read_text():
            return int(file.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{file} was not written")


def ends(number: int, seconds: float = 10) -> bool:
    """Whether a process is gone, or a zombie, so many seconds from now."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if ") Z " in Path(f"/proc/{number}/stat").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_the_end_of_a_block_ends_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "number"
    with processes.started([sys.executable, "-c", LAUNCHER, file, "alone"]) as process:
        child = number_in(file)
    assert process.returncode == -signal.SIGKILL and ends(child)


def test_a_limit_is_the_end_of_such_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, started = [], processes.started
    monkeypatch.setattr(
        processes, "started", lambda *a, **k: blocks.append(started(*a, **k)) or blocks[-1]
    )
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run([sys.executable, "-c", "import time; time.sleep(600)"], limit=0.1)
    assert len(blocks) == 1


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    """kill -9 of who started the launcher, as of pytest: launcher and rank go with it."""
    file = tmp_path / "number"
    code = (
        "import sys; from python_tests import processes\n"
        f"processes.run([sys.executable, '-c', {LAUNCHER!r}, sys.argv[1], 'follows'])"
    )
    with processes.started([sys.executable, "-c", code, file], cwd=ROOT) as process:
        child = number_in(file)
        os.kill(process.pid, signal.SIGKILL)
        assert ends(child)


def test_one_thread_unless_the_user_says_more(monkeypatch: pytest.MonkeyPatch) -> None:
    show = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert processes.run(show).stdout == "1\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert processes.run(show).stdout == "3\n"


def test_no_test_starts_processes_another_way() -> None:
    """Every one goes through the helper; what ends by itself with its pytest is named."""
    ways = ("subprocess.run(", "subprocess.Popen(", "subprocess.check_")
    own = {"processes.py", "test_processes.py", "__main__.py", "sanitized_calls.py"}
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((ROOT / "python_tests").rglob("*.py"))
        if path.name not in own
        for line in path.read_text().splitlines()
        if any(way in line for way in ways)
    ]
    assert not found
