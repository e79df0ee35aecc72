"""benchmarks/gpu_run.sh with commands that only pretend: a step that was cut did not fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from python_tests import processes

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_run.sh"


@pytest.mark.parametrize(
    ("tests", "status", "words"),
    [
        ("sleep 60", 3, "first: cut (exit 124)"),
        ("echo 'a.py::test_b FAILED [ 1%]'; sleep 60", 1, "first: FAILED (exit 124)"),
        ("exit 1", 1, "first: FAILED (exit 1)"),
    ],
)
def test_cut_is_not_failed(tmp_path: Path, tests: str, status: int, words: str) -> None:
    commands = {"python": f'case "$*" in *pytest*) {tests};; esac', "nvidia-smi": "echo 9.0"}
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHON": str(tmp_path / "python"),
        "OUT": str(tmp_path / "out"),
        "BUDGET": "7",
    }
    done = processes.run(["bash", script], env=environment)
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert words in summary and "build: ok" in summary
    assert done.returncode == status, summary
