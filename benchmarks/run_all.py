"""All ratios of the README's table, one after another; one table last.

    python -m benchmarks.run_all                                  # CPU; figures into results/
    python -m benchmarks.run_all --quick                          # tiny shapes, a minute, no CSV
    python -m benchmarks.run_all --device cuda --dtype bfloat16   # on a GPU

Every script runs in a process of its own; one that fails is named at the end, and the exit status
is then 1.  Options other than --only are handed to every script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.report import ROOT, Row, print_table

SCRIPTS = (
    "step_vs_plain",
    "step_vs_published",
    "equal_spread",
    "engine_vs_func",
    "train_mode",
    "memory",
    "attention_operator",
    "ntk_gram",
    "law_fits",
)


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


def main(argv: list[str] | None = None) -> int:
    """Run the scripts, print the table of all rows and what failed; the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    chosen, passed_on = parser.parse_known_args(argv)
    found = {name: run_script(name, passed_on) for name in chosen.only}
    print("\n== all")
    print_table([row for rows in found.values() for row in rows or []])
    failed = [name for name, rows in found.items() if rows is None]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
