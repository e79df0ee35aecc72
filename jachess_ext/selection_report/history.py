"""How well every method ranks, budget by budget, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..scaling import pear_corr, rel_acc, select
from ..scaling.predictive import Array
from ..scaling.runs import LossTable, TableError
from ..scaling.selection import METHODS
from .study import History, Step

FREE = tuple(name for name, method in METHODS.items() if method.trains == "none")
"""Methods that train nothing."""

Scores = tuple[Array, Array, float, float]
"""Predicted losses [n] (scores where there are none), scores [n] (what ranks, lower is better), the
largest size read, and FLOPs as a share of FullTuning."""


def over_budgets(
    score: Callable[[str, float], Scores | None],
    budgets: Sequence[float],
    truth: Array | None,
    method: str,
) -> History | None:
    """Every method at every budget against the true losses, or the last forecast of `method`.

    Args:
        score: (method, budget) -> its scores; None where it cannot rank from so little.
        truth: losses at the target, [n], or None.
        method: the one the selection went by.

    Returns:
        None where nothing can be compared (no scores, or all alike).
    """
    reference = truth
    if reference is None:
        last = score(method, budgets[-1])
        reference = None if last is None else last[0]
    if reference is None or len(reference) < 2 or np.ptp(reference) == 0:
        return None
    steps: dict[str, dict[float, Step]] = {}
    for name in METHODS:
        for budget in budgets:
            made = score(name, budget)
            if made is None or np.ptp(made[0]) == 0:
                continue
            forecasts, scores, read, share = made
            quality = pear_corr(forecasts, reference), rel_acc(scores, reference)
            steps.setdefault(name, {})[read] = Step(read, share, *quality)
    found = {name: list(by_size.values()) for name, by_size in steps.items()}
    return History(found, truth is not None)


def of_table(
    table: LossTable,
    method: str,
    budget: float,
    target: float,
    truth: Array | None,
    **settings: Any,
) -> History | None:
    """Of a table: all sizes below the target where the truth is known, else up to the budget.

    `settings` as for `select`.
    """
    below = table.trained[table.trained < target]
    budgets = below if truth is not None else below[below <= budget]

    def score(name: str, size: float) -> Scores | None:
        try:
            found = select(table, size, target, name, **settings)
        except (TableError, ValueError):
            return None  # too few sizes, no size 0, or losses missing there
        read = 0.0 if name in FREE else float(size)
        try:
            share = found.flops / found.full_flops
        except TableError:  # the models' sizes are unknown
            share = float("nan")
        return found.forecasts, found.scores, read, share

    return over_budgets(score, [float(size) for size in budgets], truth, method)
