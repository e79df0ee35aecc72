"""`jachess bench` hands its options on and passes the exit status back."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from benchmarks import run_all
from jachess_ext.cli import main
from jachess_ext.commands import bench


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_options(parser)
    return parser.parse_args(given)


def test_options_are_those_of_the_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {}
    monkeypatch.setattr(
        run_all, "run_script", lambda name, given: seen.setdefault(name, given) and []
    )
    given = ("--quick", "--only", "memory", "train_mode", "--device", "cpu", "--threads", "1")
    options = parsed(*given, "--dtype", "float64", "--results", str(tmp_path))
    assert run_all.main(bench.arguments(options)) == 0
    assert list(seen) == ["memory", "train_mode"]
    handed = ["--quick", "--device", "cpu", "--dtype", "float64", "--threads", "1"]
    assert seen["memory"] == [*handed, "--results", str(tmp_path)]


def test_micro_is_pytest_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def ran(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(run_all.subprocess, "run", ran)
    given = ("--only", "micro", "--quick", "--dtype", "float64", "--results", str(tmp_path))
    options = parsed(*given, "--save", "before", "--compare")
    assert run_all.main(bench.arguments(options)) == 1  # the status of pytest
    (command,) = seen
    assert command[1:4] == ["-m", "pytest", "benchmarks"]
    wanted = {"--quick", "--dtype=float64", "--device=cpu", "--threads=2"}
    wanted |= {"--benchmark-save=before", "--benchmark-compare"}
    assert wanted | {f"--benchmark-json={tmp_path / 'micro.json'}"} <= set(command)
    assert run_all.main(["--only", "micro", "--compare", "0007"]) == 1
    assert "--benchmark-compare=0007" in seen[1]


def test_without_pytest_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)
    assert run_all.main(["--only", "micro"]) == 1
    assert "pip install pytest-benchmark" in capsys.readouterr().out


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_is_passed_back(tmp_path: Path, status: int) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "run_all.py").write_text(f"raise SystemExit({status})")
    assert bench.run(parsed(), tmp_path) == status


def test_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.run, "__defaults__", (tmp_path,))
    assert main(["bench"]) == 2
    assert "has no benchmarks/run_all.py" in capsys.readouterr().err
