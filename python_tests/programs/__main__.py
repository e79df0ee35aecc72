"""Hold the jets of random programs against reverse mode, and shrink those that are wrong.

    python -m python_tests.programs --seeds 0:5000 [--jobs 2] [--progress FILE]

Prints, per mode, how many are right, refused and wrong; refusals by operator; what the programs
exercise; and for each wrong one a smallest program, as Python to paste.  With ``--progress`` the
verdicts are kept in a file, and a run that was cut off goes on from there.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import torch

from .draw import draw
from .oracle import MODES, NotAProgram, verdicts
from .shrink import shrunk


def result(seed: int) -> dict:
    """What the seed's program gives, as data for JSON."""
    torch.set_num_threads(1)
    program = draw(seed)
    try:
        found = verdicts(program)
    except NotAProgram as error:
        return {"seed": seed, "none": str(error), "verdicts": {}, "features": [], "lines": 0}
    features = [name for op in program.ops for name in op.features()]
    return {
        "seed": seed,
        "verdicts": {mode: [v.kind, v.what] for mode, v in found.items()},
        "features": features,
        "lines": len(program.ops),
    }


def results(seeds: range, jobs: int, kept: Path | None) -> Iterator[dict]:
    """Of every seed, from the kept file where it has them."""
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    old = {row["seed"]: row for row in map(json.loads, lines)}
    yield from (old[seed] for seed in seeds if seed in old)
    new = [seed for seed in seeds if seed not in old]
    with get_context("spawn").Pool(jobs) if jobs > 1 else _alone() as pool:
        for row in pool.imap(result, new):
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            yield row


class _alone:
    """A pool of this process."""

    imap = staticmethod(map)

    def __enter__(self) -> _alone:
        return self

    def __exit__(self, *_: object) -> None:
        return None


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
    print(
        f"| mode | right | refused | wrong |\n|---|---|---|---|   ({none} seeds without a program)"
    )
    for mode, count in counts.items():
        print(f"| {mode} | {count['right']} | {count['refused']} | {count['wrong']} |")
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
