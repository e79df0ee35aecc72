"""The verdicts on the programs of many seeds, in several processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import joblib

from .draw import draw
from .oracle import NotAProgram, verdicts


def result(seed: int) -> dict:
    """What the seed's program gives, as data for JSON."""
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
    pool = joblib.Parallel(n_jobs=jobs, return_as="generator")
    for row in pool(joblib.delayed(result)(seed) for seed in new):
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps(row) + "\n")
        yield row
