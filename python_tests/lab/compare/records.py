"""Records made by hand, as a results file holds them."""

from __future__ import annotations

from typing import Any

from jachess_ext.lab.compare.records import RunRecord
from jachess_ext.training import parse_method

BINS = 8


def record(name: str, task: str, seed: int, score: float | None, **settings: Any) -> RunRecord:
    """Return the record of a final run; where the score is None, of one that failed."""
    method = parse_method(name.partition("<")[0])
    base: dict[str, Any] = {
        "run": f"{task}-{name}-{seed}",
        "task": task,
        "method": name,
        "control": method.control or "placebo" in name,
        "value": None,
        "seed": seed,
        "model": "tiny",
        "metric": "accuracy",
        "rows": (10, 10, 10),
        "settings": {"method": method.name, **method.settings},
        "recipe": {"epochs": 3, "lr": 1e-4},
        "score": score,
        "brier": 0.2,
        "ece": 0.1,
        "error": None,
    }
    if score is not None:
        base |= {
            "corrupted": {"0.05": score - 0.01, "0.2": score - 0.1},
            "noisy": {"0.0": score, "1.0": score - 0.2},
            "jacobian": [1.0, 2.0],
            "hessian": [3.0, 4.0],
            "reliability": {
                "edges": [i / BINS for i in range(BINS + 1)],
                "confidence": [None] * 4 + [0.55, 0.7, 0.8, 0.9],
                "accuracy": [None] * 4 + [0.5, 0.5, 0.75, 1.0],
                "counts": [0] * 4 + [2, 2, 4, 2],
            },
            "shift": {},
        }
    return RunRecord(**base | settings)


def by_method(scores: dict[str, Any], tasks: str = "a", **more: Any) -> list[RunRecord]:
    """Return records of method → score by seed, alike on every task, with more settings each."""
    return [
        record(method, task, seed, score, **more.get(method, {}))
        for task in tasks
        for method, values in scores.items()
        for seed, score in enumerate(values)
    ]
