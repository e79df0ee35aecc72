"""`jachess bench` hands its options on and passes the exit status back."""

from __future__ import annotations

import argparse
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
