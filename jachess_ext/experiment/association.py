"""Is the smoother of two models the better one?  Over a grid's runs, whatever made them smooth."""

from __future__ import annotations

import numpy as np

from ..evaluation.extras import require
from ..evaluation.report import Table
from .tables import NORMS, Figure, Results, at

_FEWEST = 10
"""Runs of a task below which no correlation is shown: of fewer, chance alone makes ± 0.6."""

_QUALITIES = {"score": at("score"), "Brier score": at("brier"), "ECE": at("ece")}


def association_table(results: Results) -> Table | None:
    """Rank correlations of Σ‖J‖ and of Σ‖H‖ with quality, of tasks with enough runs."""
    rows = []
    for task in results.tasks:
        for title, norm in NORMS.items():
            pairs = [_pairs(results, task, norm, quality) for quality in _QUALITIES.values()]
            if len(pairs[0]) >= _FEWEST:
                rows.append([task, title, str(len(pairs[0])), *map(_correlation, pairs)])
    if not rows:
        return None
    caption = (
        "Smoothness and quality over runs: Spearman's rank correlation, both taken from the mean "
        "of their seed's runs. Where smoother models are better ones, the score's is negative and "
        "the other two positive."
    )
    return Table(caption, ["task", "norm", "runs", *_QUALITIES], rows)


def _pairs(results: Results, task: str, norm: Figure, quality: Figure) -> np.ndarray:
    """``[n, 2]``: norm and quality of the runs that have both, without the mean of their seed."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for record in results.records:
        found = norm(record), quality(record)
        if record["task"] == task and found[0] is not None and found[1] is not None:
            by_seed.setdefault(record["seed"], []).append((found[0], found[1]))
    several = [np.array(runs) for runs in by_seed.values() if len(runs) > 1]
    return np.concatenate([np.zeros((0, 2)), *(runs - runs.mean(0) for runs in several)])


def _correlation(pairs: np.ndarray) -> str:
    """Spearman's ρ; a dash of too few runs, or where one side differs by rounding alone."""
    if len(pairs) < _FEWEST or np.ptp(pairs, 0).min() < 1e-9:
        return "–"
    return f"{require('scipy.stats').spearmanr(*pairs.T).statistic:+.2f}"
