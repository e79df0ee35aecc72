"""Smoothness against quality: grids in which one follows from the other, and one of chance."""

from __future__ import annotations

import numpy as np
from scipy import stats

from jachess_ext.experiment.association import association_table
from jachess_ext.experiment.tables import Results

from .records import record

METHODS = ("none", "l2", "sam", "r3f")


def grid(seeds: int, quality: str = "score", rises: bool = False, **settings: object) -> Results:
    """Norms fall from method to method; quality rises or falls; each seed far from the others."""
    found = []
    for seed in range(seeds):
        for place, method in enumerate(METHODS):
            far = 10.0 * (-1) ** seed * seed
            made = record(method, "a", seed, 0.5, jacobian=[50 + far, 10.0 - place], hessian=[1.0])
            sign = 1 if rises else -1
            found.append(made | {quality: sign * (far + 0.25 * place)} | settings)
    return Results.of(found)


def test_the_seeds_luck_is_taken_out() -> None:
    table = association_table(grid(seeds=4, rises=True))
    assert table is not None
    norm_of_j, norm_of_h = table.rows
    # smoother with every method and better with every method, though the seeds say the contrary
    assert norm_of_j == ["a", "Σ‖J‖", "16", "-1.00", "–", "–"]
    assert norm_of_h == ["a", "Σ‖H‖", "16", "–", "–", "–"], "no norm differs"
    assert association_table(grid(4)).rows[0][3] == "+1.00"  # type: ignore[union-attr]
    assert association_table(grid(4, "brier")).rows[0][3:] == ["–", "+1.00", "–"]  # type: ignore[union-attr]


def test_is_scipys_on_deviations_of_chance() -> None:
    rng = np.random.default_rng(0)
    norms, scores = rng.random((2, 3, len(METHODS)))
    found = Results.of(
        [
            record(method, "a", seed, scores[seed, i], jacobian=[norms[seed, i]])
            for seed in range(3)
            for i, method in enumerate(METHODS)
        ]
    )
    flat = [(x - x.mean(1, keepdims=True)).ravel() for x in (norms, scores)]
    table = association_table(found)
    assert table is not None
    assert table.rows[0][3] == f"{stats.spearmanr(*flat).statistic:+.2f}"


def test_runs_without_a_finite_norm_or_a_figure_are_left_out() -> None:
    broken = [record("none", "a", 9, 0.5, jacobian=[None, 1.0]), record("none", "a", 8, None)]
    regression = grid(3, brier=None, ece=None, task="b").records
    found = Results.of([*grid(3).records, *broken, *regression])
    table = association_table(found)
    assert table is not None
    assert [row[:4] for row in table.rows if row[1] == "Σ‖J‖"] == [
        ["a", "Σ‖J‖", "12", "+1.00"],
        ["b", "Σ‖J‖", "12", "+1.00"],
    ]
    assert [row[4:] for row in table.rows if row[0] == "b"] == [["–", "–"]] * 2


def test_too_few_runs() -> None:
    assert association_table(grid(2)) is None
    assert association_table(grid(3, jacobian=None, hessian=None)) is None
