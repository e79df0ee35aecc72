"""All ratios of the README's table, one after another; their table last; then the micro-benchmarks.

    python -m benchmarks.run_all                                  # CPU; figures into results/
    python -m benchmarks.run_all --quick                          # tiny shapes, a minute, no CSV
    python -m benchmarks.run_all --device cuda --dtype bfloat16   # on a GPU
    python -m benchmarks.run_all --only micro --save before       # then, on another commit:
    python -m benchmarks.run_all --only micro --compare           # operators beside those saved

Every script runs in a process of its own; one that fails is named at the end, and the exit status
is then 1.  "micro" is ``pytest benchmarks`` (pytest-benchmark); other options go to every script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common.report import ROOT, Row, print_table

SCRIPTS = (
    "step_vs_plain",
    "step_vs_published",
    "equal_spread",
    "engine_vs_func",
    "train_mode",
    "memory",
)
MICRO = "micro"


def run_script(name: str, arguments: list[str]) -> list[Row] | None:
    """Run one script in a fresh process; its rows, or None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--rows-to", str(rows)]
        print(f"\n== {name}", flush=True)
        start = time.perf_counter()
        failed = subprocess.run(command, cwd=ROOT).returncode != 0
        print(f"   ({time.perf_counter() - start:.0f} s)", flush=True)
        return None if failed else [Row(**row) for row in json.loads(rows.read_text())]


def run_micro(chosen: argparse.Namespace, passed_on: list[str]) -> bool:
    """The micro-benchmarks; whether all of them ran."""
    print(f"\n== {MICRO}", flush=True)
    if find_spec("pytest_benchmark") is None:
        print("pytest-benchmark is not installed; run: pip install pytest-benchmark")
        return False
    given, rest = micro_parser().parse_known_args(passed_on)
    if rest:
        print(f"not options of the micro-benchmarks, left out: {' '.join(rest)}")
    command = [sys.executable, "-m", "pytest", "benchmarks", "-q", "--benchmark-disable-gc"]
    command += ["--benchmark-columns=min,median,iqr,rounds", "--benchmark-sort=name"]
    command += [f"--{name}={getattr(given, name)}" for name in ("device", "dtype", "threads")]
    if given.quick:
        command += ["--quick", "--benchmark-min-rounds=1", "--benchmark-max-time=0.01"]
    if given.results is not None:
        given.results.mkdir(parents=True, exist_ok=True)
        command.append(f"--benchmark-json={given.results / 'micro.json'}")
    if chosen.save is not None:
        command.append(f"--benchmark-save={chosen.save}")
    if chosen.compare is not None:
        command.append("--benchmark-compare" + (f"={chosen.compare}" if chosen.compare else ""))
    return subprocess.run(command, cwd=ROOT).returncode == 0


def micro_parser() -> argparse.ArgumentParser:
    """Those of the scripts' options that the micro-benchmarks know."""
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("--device", default="cpu")
    found.add_argument("--dtype", default="float32")
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--quick", action="store_true")
    found.add_argument("--results", type=Path)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the scripts, print the table of all rows and what failed; the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    every = [*SCRIPTS, MICRO]
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--save", metavar="NAME", help="keep the micro-benchmarks' times")
    parser.add_argument(
        "--compare", nargs="?", const="", metavar="RUN", help="with those saved; default: the last"
    )
    chosen, passed_on = parser.parse_known_args(argv)
    scripts = [name for name in chosen.only if name != MICRO]
    found = {name: run_script(name, passed_on) for name in scripts}
    failed = [name for name, rows in found.items() if rows is None]
    if found:
        print("\n== all")
        print_table([row for rows in found.values() for row in rows or []])
    if MICRO in chosen.only and not run_micro(chosen, passed_on):
        failed.append(MICRO)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
