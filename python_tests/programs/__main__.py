"""Hold the jets of random programs against reverse mode, and shrink those that are wrong.

    python -m python_tests.programs --seeds 0:5000 [--jobs 2]

Prints, per mode, how many are right, refused and wrong, and for each wrong one a smallest program,
as Python to paste.
"""

from __future__ import annotations

import argparse
from collections import Counter

import joblib

from .draw import draw
from .oracle import MODES, result
from .shrink import shrunk


def main() -> None:
    """Print the counts and the shrunk programs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:200", help="first:end")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    first, end = map(int, arguments.seeds.split(":"))
    counts: dict[str, Counter[str]] = {mode: Counter() for mode in MODES}
    wrong = []
    pool = joblib.Parallel(n_jobs=arguments.jobs, return_as="generator")
    for row in pool(joblib.delayed(result)(seed) for seed in range(first, end)):
        for mode, verdict in row.verdicts.items():
            counts[mode][verdict.kind] += 1
        wrong += [(row.seed, m, v.what) for m, v in row.verdicts.items() if v.kind == "wrong"]
    print("| mode | right | refused | unknown | wrong |\n|---|---|---|---|---|")
    for mode, count in counts.items():
        kinds = " | ".join(str(count[kind]) for kind in ("right", "refused", "unknown", "wrong"))
        print(f"| {mode} | {kinds} |")
    for seed, mode, what in wrong:
        print(f"\n# seed {seed}, {mode}: {what}\n{shrunk(draw(seed), mode).script()}", flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
