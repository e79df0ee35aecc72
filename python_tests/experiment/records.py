"""Records made by hand, as a results file holds them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jachess_ext.experiment.grid import Recipe
from jachess_ext.training import parse_method

BINS = 8


def record(method: str, task: str, seed: int, score: float | None, **settings: Any) -> dict:
    parsed = parse_method(method.partition("<")[0])
    counts = [0] * 4 + [2, 2, 4, 2]
    base: dict[str, Any] = {
        "kind": "final",
        "task": task,
        "method": method,
        "value": None,
        "seed": seed,
        "model": "tiny",
        "metric": "accuracy",
        "rows": [10, 10, 10],
        "settings": {"method": parsed.name, **parsed.settings},
        "recipe": asdict(Recipe()),
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
                "counts": counts,
            },
            "shift": {},
        }
    return base | settings
