"""Hold the jets of random programs against reverse mode, and shrink those that are wrong.

    python -m python_tests.programs --seeds 0:5000 [--jobs 2] [--progress FILE]

Prints, per mode, how many are right, refused and wrong; refusals by operator; what the programs
exercise; and for each wrong one a smallest program, as Python to paste.  With ``--progress`` the
verdicts are kept in a file, and a run that was cut off goes on from there.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from .draw import draw
from .oracle import MODES
from .seeds import results
from .shrink import shrunk


def main() -> None:
    """Print the counts and the shrunk programs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:200", help="first:end")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--progress", type=Path, help="JSON lines, one for each seed")
    parser.add_argument("--shrink", type=int, default=10, help="at most so many wrong programs")
    arguments = parser.parse_args()
    first, end = map(int, arguments.seeds.split(":"))
    counts = {mode: Counter() for mode in MODES}
    refusals, features, none, wrong = Counter(), Counter(), 0, []
    for row in results(range(first, end), arguments.jobs, arguments.progress):
        none += "none" in row
        for mode, (kind, what) in row["verdicts"].items():
            counts[mode][kind] += 1
            refusals[what] += kind == "refused"
        bad = {m: what for m, (kind, what) in row["verdicts"].items() if kind == "wrong"}
        if bad:
            wrong.append((row["seed"], bad))
        elif all(kind == "right" for kind, _ in row["verdicts"].values()):
            features.update(row["features"])
    print(f"{none} seeds without a program\n")
    print("| mode | right | refused | unknown | wrong |\n|---|---|---|---|---|")
    for mode, count in counts.items():
        kinds = " | ".join(str(count[kind]) for kind in ("right", "refused", "unknown", "wrong"))
        print(f"| {mode} | {kinds} |")
    print("refused:", ", ".join(f"{k} {n}" for k, n in refusals.most_common() if n))
    print("in right programs:", ", ".join(f"{k} {n}" for k, n in features.most_common()))
    print("wrong:", ", ".join(f"{seed} {bad}" for seed, bad in wrong))
    for seed, bad in wrong[: arguments.shrink]:
        mode = next(iter(bad))
        print(f"\n# seed {seed}, {mode}: {bad[mode]}")
        print(shrunk(draw(seed), mode).script(), flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
