"""A folder of runs: what is run again, in which processes, and what a kill at any moment costs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jachess_ext._io import DataError
from jachess_ext.lab.workbench.runs import (
    Record,
    connect_ray,
    locked,
    read_results,
    run_all,
    write_results,
)
from python_tests import processes
from python_tests.test_processes import ends, number_in

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Square:
    number: int
    folder: Path
    """Gets a file for every call."""

    @property
    def name(self) -> str:
        return f"square-{self.number}"


def square(job: Square) -> Record:
    calls = len(list(job.folder.glob(f"{job.name}-*")))
    (job.folder / f"{job.name}-{calls}").touch()
    if job.number == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"run": job.name, "square": job.number**2}


def jobs(folder: Path, count: int = 4) -> list[Square]:
    (folder / "calls").mkdir(exist_ok=True)
    return [Square(number, folder / "calls") for number in range(count)]


def calls(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "calls").iterdir())


def run(some: list[Square], folder: Path, **settings: Any) -> dict[str, Record]:
    return {job.name: record for job, record in run_all(some, square, folder / "runs", **settings)}


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    first = run(jobs(tmp_path), tmp_path)
    assert run(jobs(tmp_path, 5), tmp_path) == first | {
        "square-4": {"run": "square-4", "square": 16}
    }
    assert calls(tmp_path) == [f"square-{n}-0" for n in range(5)]
    assert json.loads((tmp_path / "runs" / "square-3.json").read_text())["square"] == 9

    def odd(job: Square, record: Record) -> bool:
        return record["square"] % 2 == 1

    run(jobs(tmp_path, 2), tmp_path, is_usable=odd)
    assert "square-0-1" in calls(tmp_path) and "square-1-1" not in calls(tmp_path)


@pytest.mark.parametrize("content", ['{"square": 1', "[]", '{"a": 1, "a": 2}', '{"square": "?"}'])
def test_a_broken_file_costs_its_run_alone(tmp_path: Path, content: str) -> None:
    first = run(jobs(tmp_path), tmp_path)
    path = tmp_path / "runs" / "square-1.json"
    path.write_text(content)
    (tmp_path / "runs" / ".square-2.json.x1").write_text('{"squ')  # left of a killed write

    def is_number(job: Square, record: Record) -> bool:
        if not isinstance(record.get("square"), int):
            raise DataError("its square is no number")
        return True

    with pytest.warns(RuntimeWarning, match=r"renamed to square-1\.broken, and only this run"):
        assert run(jobs(tmp_path), tmp_path, is_usable=is_number) == first
    assert calls(tmp_path) == ["square-0-0", "square-1-0", "square-1-1", "square-2-0", "square-3-0"]
    assert path.with_suffix(".broken").read_text() == content


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    write_results(results, [{"a": 1}, {"text": "a\u2028b", "nan": float("nan")}])
    assert read_results(results) == [{"a": 1}, {"text": "a\u2028b", "nan": None}]
    results.write_text('{"a": 1}\n{half\n')
    with pytest.raises(DataError, match="line 2 is not JSON"):
        read_results(results)


def work(folder: Path) -> None:
    for _ in run_all(jobs(folder, 40), square, folder / "runs"):
        time.sleep(0.01)


def test_killed_work_goes_on(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for finished in (3, 10, 20):
        process = context.Process(target=work, args=(tmp_path,))
        process.start()
        while len(list((tmp_path / "runs").glob("*.json"))) < finished:
            assert process.is_alive()
            time.sleep(0.001)
        process.kill()
        process.join()
    records = run(jobs(tmp_path, 40), tmp_path)
    assert records == {f"square-{n}": {"run": f"square-{n}", "square": n**2} for n in range(40)}
    repeated = [name for name in calls(tmp_path) if not name.endswith("-0")]
    assert len(repeated) <= 3, "a kill costs the run under way"


def hold(folder: Path, other: Any) -> None:
    with locked(folder):
        other.send("locked")
        other.recv()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path / "runs", there))
    process.start()
    here.recv()
    with pytest.raises(DataError, match="is in use by another process"):
        run(jobs(tmp_path), tmp_path)
    process.kill()
    process.join()
    with locked(tmp_path / "runs"):
        assert len(run(jobs(tmp_path), tmp_path)) == 4
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written to"):
        run(jobs(tmp_path), tmp_path / "file")


def test_several_processes(tmp_path: Path) -> None:
    """The same records; a job whose process is killed costs its neighbours nothing."""
    some = [*jobs(tmp_path, 12), Square(99, tmp_path / "calls")]
    records = run(some, tmp_path, processes=2, killed=lambda job: {"lost": job.number})
    assert records.pop("square-99") == {"lost": 99}
    assert records == run(jobs(tmp_path, 12), tmp_path / "here")
    assert not (tmp_path / "runs" / "square-99.json").exists(), "it is tried again next time"


SCRIPT = """
import os, sys, time
from pathlib import Path
from jachess_ext.lab.workbench import runs

class Job:
    def __init__(self, name):
        self.name = name

def sleep(job):
    file = f"{sys.argv[1]}/{job.name}"
    open(file + ".new", "w").write(str(os.getpid()))
    os.replace(file + ".new", file)
    time.sleep(600)

if __name__ == "__main__":
    list(runs.run_all([Job("0"), Job("1")], sleep, Path(sys.argv[1]) / "runs", processes=2))
"""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("sys.argv[1]", repr(str(tmp_path))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with processes.started([sys.executable, script], env=environment) as process:
        workers = [number_in(tmp_path / str(job)) for job in range(2)]
        assert not any(ends(number, 0.1) for number in workers)
        os.kill(process.pid, signal.SIGKILL)
        assert all(ends(number) for number in workers)


@pytest.fixture
def ray() -> Iterator[Any]:
    library = pytest.importorskip("ray", reason="pip install 'jachess-ext[ray]'")
    yield library
    library.shutdown()


@pytest.mark.slow
def test_on_ray(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no Ray cluster answers at 'auto'"):
        connect_ray()
    connect_ray("local")
    some = [*jobs(tmp_path), Square(99, tmp_path / "calls")]
    records = run(some, tmp_path, backend="ray", killed=lambda job: {"lost": job.number})
    assert records.pop("square-99") == {"lost": 99}
    assert records == run(jobs(tmp_path), tmp_path / "here")


@pytest.mark.slow
def test_on_dask(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="dask's scheduler is not installed")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None):
        records = run(jobs(tmp_path), tmp_path, backend="dask", processes=2)
    assert records == run(jobs(tmp_path), tmp_path / "here")
