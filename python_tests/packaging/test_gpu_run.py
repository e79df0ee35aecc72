"""benchmarks/gpu_run.sh with commands that only pretend: a step that was cut did not fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import common, gpu_bundle
from python_tests import processes

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_run.sh"


@pytest.mark.parametrize(
    ("tests", "status", "words"),
    [
        ("sleep 60", 3, "first: cut (exit 124)"),
        ("echo 'a.py::test_b FAILED [ 1%]'; sleep 60", 1, "first: FAILED (exit 124)"),
        ("exit 1", 1, "first: FAILED (exit 123)"),  # as xargs says it
    ],
)
def test_cut_is_not_failed(tmp_path: Path, tests: str, status: int, words: str) -> None:
    summary, returned = run(tmp_path, f'case "$*" in *pytest*) {tests};; esac', seconds=2)
    assert words in summary and "doctor: ok" in summary and "build" not in summary
    assert returned == status, summary
    with tarfile.open(tmp_path / "out" / "results-tests.tar.gz") as results:
        assert {"./summary.txt", "./machine.txt", "./first.txt"} <= set(results.getnames())


@pytest.mark.parametrize(
    ("build", "status", "words"),
    [("exit 0", 3, "first: ok"), ("exit 1", 1, "Without a library there is nothing to run")],
)
def test_builds_only_where_no_library_loads(
    tmp_path: Path, build: str, status: int, words: str
) -> None:
    python = f'case "$*" in *STATE*) exit 1;; *build_ext*) {build};; esac'
    summary, returned = run(tmp_path, python)
    assert "doctor: FAILED" in summary and "build: " in summary and words in summary
    assert returned == status, summary


def test_stops_where_torch_sees_no_gpu(tmp_path: Path) -> None:
    summary, returned = run(tmp_path, 'case "$*" in *is_available*) exit 1;; esac')
    assert "gpu: FAILED" in summary and "first" not in summary and returned == 1


def test_all_steps_of_the_figures(tmp_path: Path) -> None:
    summary, returned = run(tmp_path, "exit 0", command="figures")
    assert returned == 0 and summary.count(": ok") == len(summary.splitlines()) > 10


STEPS = {
    "triton": 70,
    "new": 20,
    "racecheck": 25,
    "operators": 30,
    "attention": 50,
    "pieces": 15,
    "ncu": 20,
    "peers": 65,
    "meanflow": 15,
    "steps": 20,
    "graphed": 15,
    "laplacian": 20,
    "kernel": 15,
    "gram": 20,
}


@pytest.mark.parametrize("failing", [None, "test_attention"])
def test_short_goes_on_where_a_step_fails(tmp_path: Path, failing: str | None) -> None:
    """In its order, each within its limit, all within the 400 s."""
    python = f'case "$*" in *{failing or "no-such"}*) exit 1;; esac'
    tools = {"compute-sanitizer": "exit 0", "ncu": "exit 0"}
    summary, returned = run(tmp_path, python, command="short", budget=None, tools=tools)
    lines = re.findall(r"^(\w+): (\w+) \(exit \d+\), \d+ s of (\d+)$", summary, re.MULTILINE)
    assert [name for name, *_ in lines] == ["doctor", "gpu", *STEPS]
    assert {name: int(limit) for name, _, limit in lines[2:]} == STEPS
    assert sum(STEPS.values()) <= 400
    failed = {"triton", "new", "operators"} if failing else set()
    assert {name for name, word, _ in lines if word != "ok"} == failed
    assert returned == bool(failing)


def test_rows_of_a_copy_without_history_have_the_commit_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def git(*arguments: str) -> str:
        raise subprocess.CalledProcessError(128, arguments)

    monkeypatch.setattr(common, "git", git)
    monkeypatch.setenv("JACHESS_COMMIT", "0123456789abcdef")
    assert common.commit() == "0123456789"
    monkeypatch.delenv("JACHESS_COMMIT")
    assert common.commit() == "unknown"


def test_the_commit_travels_with_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bundle, "tracked_files", list)
    tmp_path.joinpath("bundle").mkdir()
    gpu_bundle.copy_sources(tmp_path / "bundle")
    assert (tmp_path / "bundle" / "COMMIT").read_text() == common.commit() + "\n"


@pytest.mark.slow
def test_a_doctor_that_is_cut_builds_nothing(tmp_path: Path) -> None:
    summary, returned = run(tmp_path, 'case "$*" in *STATE*) sleep 60;; esac')
    assert "doctor: cut (exit 124)" in summary and "build: " not in summary and returned == 3


@pytest.mark.slow
def test_every_sanitized_test_reaches_a_kernel() -> None:
    """Counted on the CPU, by the same tests there: float64 goes to the reference on a GPU. Two
    streams and four, heads of 64 and of 128, where two warps share 16 queries."""
    (kernels,) = re.findall(r'^KERNELS="(.*)"$', SCRIPT.read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "python_tests.ops.kernel_calls"]
    command += ["python_tests/ops/test_attention.py", "-k"]
    command += [f"heads_of_models and ({kernels}) and cpu"]
    done = processes.run([*command, "-p", "no:cacheprovider"], cwd=SCRIPT.parents[1], check=True)
    lines = re.findall(r"^kernel calls: (\d+) of (\S+) in ", done.stdout, re.MULTILINE)
    calls = {kernel: int(count) for count, kernel in lines}
    assert calls.keys() == {"float16-4-64", "bfloat16-2-128", "bfloat16-4-128"}, done.stdout
    assert all(calls.values()) and len(lines) == 3, done.stdout


@pytest.mark.parametrize("command", ["", "all"])
def test_asks_for_a_command(tmp_path: Path, command: str) -> None:
    done = processes.run(["bash", SCRIPT, *filter(None, [command])])
    assert done.returncode == 2
    assert f"the argument is '{command}'; expected short, tests or figures" in done.stderr


def run(
    tmp_path: Path,
    python: str,
    command: str = "tests",
    seconds: int | None = None,
    budget: str | None = "6",
    tools: dict[str, str] | None = None,
) -> tuple[str, int]:
    """The summary and exit status of the script with a python that does this instead.

    Args:
        seconds: the limit of every step, which by the script's own rules is 5 at least.
        budget: of all steps; None: the script's own.
        tools: what else is installed, and what it does.
    """
    commands = {"python": python, "nvidia-smi": "echo 9.0", **(tools or {})}
    if seconds:
        commands["timeout"] = f'shift 3; exec /usr/bin/timeout -k 5 {seconds} "$@"'
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHON": str(tmp_path / "python"),
        "OUT": str(tmp_path / "out"),
        **({} if budget is None else {"BUDGET": budget}),
    }
    done = processes.run(["bash", script, command], env=environment)
    return (tmp_path / "out" / f"summary-{command}.txt").read_text(), done.returncode


def test_a_bundle_for_a_python_that_is_not_here_is_refused_before_it_is_built() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_bundle", "--python", "no-such"]
    done = processes.run(command, cwd=SCRIPT.parents[1])
    assert done.returncode == 1 and "gpu_bundle: no-such cannot be run here" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_travels_counts_the_checkout_around_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bundle, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_bundle, "tracked_files", lambda: ["a.py", "gone.py"])
    (tmp_path / "a.py").write_bytes(bytes(100))
    for inside, travels in ((tmp_path / "build" / "bundle", 107), (tmp_path.parent / "away", 7)):
        inside.mkdir(parents=True)
        (inside / "b.so").write_bytes(bytes(7))
        assert gpu_bundle.what_travels(inside) == travels
