"""`jachess bench`: the benchmark set of the source checkout and its tables."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class NoBenchmarks(RuntimeError):
    """The benchmark scripts are not beside the package."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options; `benchmarks.run_all` checks their values."""
    parser.add_argument("--quick", action="store_true", help="tiny shapes, a minute, no CSV")
    parser.add_argument(
        "--only", nargs="+", metavar="SCRIPT", help="scripts, or micro; default: all"
    )
    parser.add_argument("--device", help="cpu (default) or cuda")
    parser.add_argument("--dtype", help="float32 (default), bfloat16 or float64")
    parser.add_argument("--threads", type=int, help="of the CPU, default 2")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="of the CSVs")
    parser.add_argument("--save", metavar="NAME", help="keep the micro-benchmarks' times")
    parser.add_argument(
        "--compare",
        nargs="?",
        const="",
        metavar="RUN",
        help="set the micro-benchmarks beside a saved run (default: the last), of another commit",
    )


def run(options: argparse.Namespace, root: Path = ROOT) -> int:
    """Runs the set in a process of its own; returns its exit status.

    Raises:
        NoBenchmarks: the package was installed without its source checkout.
    """
    if not (root / "benchmarks" / "run_all.py").is_file():
        raise NoBenchmarks(
            f"{root} has no benchmarks/run_all.py: the benchmarks are in the source checkout only; "
            "run `jachess bench` from a checkout installed with pip install -e ."
        )
    command = [sys.executable, "-m", "benchmarks.run_all", *arguments(options)]
    return subprocess.run(command, cwd=root, check=False).returncode


def arguments(options: argparse.Namespace) -> list[str]:
    """The options as `benchmarks.run_all` takes them."""
    given: list[str] = ["--quick"] if options.quick else []
    if options.only:
        given += ["--only", *options.only]
    for name in ("device", "dtype", "threads", "save"):
        if getattr(options, name) is not None:
            given += [f"--{name}", str(getattr(options, name))]
    if options.compare is not None:
        given += ["--compare"] + ([options.compare] if options.compare else [])
    if options.results is not None:
        given += ["--results", str(options.results.resolve())]
    return given
