"""The advice of a selection: by drawing, and its words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jachess_ext.scaling import LossTable, select
from jachess_ext.scaling.predictive import Student
from python_tests.scaling import tables

LOCATION, WIDTH = np.array([0.0, 0.1, 0.25, 0.3]), 0.2


@pytest.mark.parametrize("dof", [1.5, 4.0])
@pytest.mark.parametrize(("place", "noise"), [(0, 0.0), (1, 0.0), (0, 0.3), (2, 0.1)])
def test_what_a_run_more_would_tell_against_drawing(dof: float, place: int, noise: float) -> None:
    """P(each is the lowest | what was seen), by weighing 4,000 draws of all by the observation."""
    generator = np.random.default_rng(0)
    draws = LOCATION + WIDTH * generator.standard_t(dof, (400_000, 4))
    lowest = draws.argmin(1)
    truth = LOCATION[place] + WIDTH * generator.standard_t(dof, 400_000)
    seen = truth + noise * generator.standard_t(dof, 400_000)
    # neighbours in what was seen: the mean of the largest frequency over cells of it
    observed = draws[:, place] + noise * generator.standard_t(dof, 400_000)
    edges = np.quantile(seen, np.linspace(0, 1, 401))[1:-1]
    cell = np.digitize(observed, edges)
    counts = np.zeros((400, 4))
    np.add.at(counts, (cell, lowest), 1.0)
    expected = counts.max(1).sum() / 400_000
    student = Student(LOCATION, np.full(4, WIDTH), np.full(4, dof))
    found = student.chance_after(place, noise)
    assert found == pytest.approx(expected, abs=0.008)
    now = student.prob_lowest().max()
    assert now - 0.002 <= found <= student.chance_after(place, 0.0) + 0.002


def test_an_observation_that_tells_nothing_leaves_what_is_known() -> None:
    student = Student(LOCATION, np.full(4, WIDTH), np.full(4, 1.5))
    assert student.chance_after(1, 1e4) == pytest.approx(student.prob_lowest().max(), abs=2e-3)


def table_of(*losses: list[float]) -> LossTable:
    names = tuple("abcdef"[: len(losses)])
    sizes = 100.0 * 2.0 ** np.arange(len(losses[0]))
    return LossTable(names, sizes, np.array(losses), np.full(len(names), 1e8))


def test_a_clear_choice_needs_no_run() -> None:
    found = select(table_of([2.0, 1.0, 0.5, 0.25], [2.0, 1.99, 1.98, 1.97]), target=1600)
    assert found.best_probabilities.max() > 0.9
    assert found.advice.startswith("a is the best with probability")
    assert found.advice.endswith("no further run is needed.")


def test_of_those_tied_the_run_that_tells_most_is_named_with_its_cost() -> None:
    table, _ = tables.population(2, models=6)
    found = select(
        replace(table, parameters=np.full(6, 1e9)), 6400, 102400, tokens=128, gpu_flops=1e14
    )
    chances = found.best_probabilities
    tied = [name for name in found.ranking if chances[found.names.index(name)] >= chances.max() / 2]
    assert len(tied) > 1 and all(name in found.advice for name in tied[:4])
    assert " are tied (P(best) " in found.advice
    distribution = found.forecast.apart
    assert distribution is not None
    noise = distribution.scale[0] * np.sqrt(3)  # four doublings are left, three after the run
    after = {name: distribution.chance_after(found.names.index(name), noise) for name in tied}
    best = max(after, key=lambda name: after[name])
    hours = 6 * 1e9 * 12800 * 128 / 1e14 / 3600
    assert f"One run of {best} on 12,800 examples ({hours:#.4g} GPU h) would raise" in found.advice
    assert f"from {100 * chances.max():.0f} % to {100 * after[best]:.0f} %" in found.advice


def test_a_method_without_probabilities_says_so() -> None:
    found = select(tables.population(2, models=3)[0], 6400, 102400, "subtuning")
    assert found.advice == "subtuning gives no probabilities here; it says nothing of what is tied."
    assert found.advice in repr(found)


def test_costs_are_in_the_unit_that_is_asked_for() -> None:
    table = table_of([2.0, 1.6, 1.3, 1.1], [1.9, 1.7, 1.55, 1.45])
    flops = select(table, target=1600, tokens=100)
    hours = select(table, target=1600, tokens=100, gpu_flops=1e13)
    assert [found.cost_unit for found in (flops, hours)] == ["FLOPs", "GPU h"]
    spent = 6 * 1e8 * 1500 * 100
    assert flops.to_frame().cost.tolist() == [pytest.approx(spent)] * 2
    assert hours.to_frame().cost.tolist() == [pytest.approx(spent / 1e13 / 3600)] * 2
    assert hours.to_frame().full_cost[0] == pytest.approx(6e8 * 1600 * 100 / 1e13 / 3600)
    assert flops.cost_text(1.234e15) == "1.23 × 10¹⁵ FLOPs"
    assert hours.cost_text(3.6e16) == "1.000 GPU h"
    assert "cost" not in repr(select(replace(table, parameters=None), target=1600))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpu_flops": 1e14}, "need the tokens of an example"),
        ({"gpu_flops": -1.0, "tokens": 10.0}, "gpu_flops is -1.0; expected a positive"),
    ],
)
def test_rates_that_cannot_be(given: dict[str, float], words: str) -> None:
    table = table_of([2.0, 1.6, 1.3, 1.1], [1.9, 1.7, 1.55, 1.45])
    with pytest.raises(ValueError, match=words):
        select(table, target=1600, **given)
