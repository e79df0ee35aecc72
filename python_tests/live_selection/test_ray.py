"""Fan-out on a Ray cluster of this machine: the same result, also when a worker is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jachess_ext.live_selection.engine import select_live
from jachess_ext.live_selection.store import read_records
from jachess_ext.tasks.examples import DataError

from .conftest import MakeSettings

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'jachess-ext[ray]'")
from jachess_ext.live_selection.ray_jobs import ray_runner  # noqa: E402

pytestmark = pytest.mark.slow
SIZES = (8, 16, 32, 64)


@pytest.fixture
def cluster() -> Iterator[None]:
    yield
    ray.shutdown()


def _parent(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid"))


def _is_ours(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = _parent(pid)
    return pid == os.getpid()


def _workers() -> list[int]:
    """Processes below this one that are running a task of ours."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().replace(b"\0", b" ").strip()
        except OSError:
            continue
        if title.startswith(b"ray::_run") and _is_ours(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


class Killer(threading.Thread):
    """Kills workers with -9 while they run a task, so many of them."""

    def __init__(self, kills: int) -> None:
        super().__init__(daemon=True)
        self.left, self.killed, self.ended = kills, set[int](), False

    def run(self) -> None:
        while not self.ended and self.left:
            for pid in _workers():
                if pid not in self.killed and self.left:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.add(pid)
                    self.left -= 1
            time.sleep(0.05)


@pytest.mark.parametrize("kills", [0, 2])
def test_the_result_is_that_of_one_process(
    settings: MakeSettings, tmp_path: Path, cluster: None, kills: int
) -> None:
    given = settings(sizes=SIZES)
    expected = select_live(given, tmp_path / "here")
    killer = Killer(kills)
    killer.start()
    found = select_live(given, tmp_path / "ray", runner=ray_runner("local"))
    killer.ended = True
    killer.join()
    assert len(killer.killed) == kills
    assert found == expected
    assert read_records(tmp_path / "ray") == read_records(tmp_path / "here")


def test_a_run_lost_too_often_is_a_sentence(
    settings: MakeSettings, tmp_path: Path, cluster: None
) -> None:
    given = settings(sizes=SIZES)
    killer = Killer(1000)
    runner = ray_runner("local", retries=1)
    killer.start()
    with pytest.raises(DataError, match=r"no model could be trained; .* its process was killed"):
        select_live(given, tmp_path / "ray", runner=runner)
    killer.ended = True
    killer.join()
    ray.shutdown()
    assert select_live(given, tmp_path / "ray") == select_live(given, tmp_path / "here")


def test_no_cluster_is_a_sentence(cluster: None) -> None:
    with pytest.raises(DataError, match="no Ray cluster answers at 'auto'"):
        ray_runner()
