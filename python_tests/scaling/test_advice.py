"""The advice of a selection: expected regret by drawing, who goes on, and the words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jachess_ext._text import share
from jachess_ext.scaling import LossTable, select
from jachess_ext.scaling import advice as module
from jachess_ext.scaling.advice import expected_regret, survivor_count
from jachess_ext.scaling.predictive import Mixture, Student
from jachess_ext.scaling.selection_text import difference_text
from python_tests.scaling import tables


def table_of(*losses: list[float], metric: str | None = None) -> LossTable:
    names = tuple("abcdef"[: len(losses)])
    sizes = 100.0 * 2.0 ** np.arange(len(losses[0]))
    return LossTable(names, sizes, np.array(losses), np.full(len(names), 1e8), metric)


CLOSE = table_of([2.0, 1.6, 1.3, 1.1], [1.9, 1.6, 1.3, 1.1])
CLEAR = table_of([2.0, 1.0, 0.5, 0.25], [2.0, 1.99, 1.98, 1.97])


@pytest.mark.parametrize(("dof", "ratio"), [(5.0, True), (np.inf, False)])
def test_expected_regret_against_drawing(dof: float, ratio: bool) -> None:
    generator = np.random.default_rng(0)
    location, scale = generator.normal(0, 0.2, 7), generator.uniform(0.02, 0.3, 7)
    order = generator.permutation(7)
    drawn = location + 0.7 * scale * generator.standard_t(min(dof, 1e9), (100_000, 7))
    lowest = np.minimum.accumulate(drawn[:, order] if ratio else np.exp(drawn[:, order]), 1)
    each = lowest - lowest[:, -1:]
    one, other = (Student(location, s, np.full(7, dof)) for s in (scale, scale / 3))
    found = expected_regret(alone(one), order, ratio=ratio)
    errors = each.std(0) / np.sqrt(len(each))
    assert (abs(found - each.mean(0)) <= 5 * errors + 2e-4).all()
    assert found[-1] == 0 and (np.diff(found) <= 0).all() and found[0] > 0.05
    both = expected_regret(Mixture(np.array([0.3, 0.7]), (one, other)), order, ratio=ratio)
    narrow = expected_regret(alone(other), order, ratio=ratio)
    np.testing.assert_allclose(both, 0.3 * found + 0.7 * narrow, rtol=1e-12)


def alone(component: Student) -> Mixture:
    return Mixture(np.ones(1), (component,))


def test_expected_regret_of_two_is_the_closed_form() -> None:
    """E[max(X − Y, 0)] of Gaussians: d Φ(d/s) + s φ(d/s), s² the sum of their variances."""
    stats = pytest.importorskip("scipy.stats")
    for gap in (-0.3, 0.0, 1e-3, 2.0):
        pair = Student(np.array([gap, 0.0]), np.array([0.05, 0.1]), np.full(2, np.inf))
        s = 0.7 * np.hypot(0.05, 0.1)
        expected = gap * stats.norm.cdf(gap / s) + s * stats.norm.pdf(gap / s)
        found = expected_regret(alone(pair), np.array([0, 1]), ratio=True)
        assert found[0] == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_expected_regret_of_a_thousand_is_that_of_drawing() -> None:
    generator = np.random.default_rng(1)
    location = generator.uniform(0, 1, 1000)
    many = Student(location, np.full(1000, 0.1), np.full(1000, np.inf))
    order = np.argsort(location)
    drawn = location[order[:600]] + 0.07 * generator.standard_normal((20_000, 600))
    expected = (drawn[:, 0] - drawn.min(1)).mean()  # the others lie ten widths above and more
    assert expected_regret(alone(many), order, ratio=True)[0] == pytest.approx(expected, rel=0.02)


def test_who_goes_on_is_sure_enough_beyond_what_all_are_given() -> None:
    """0.9 · 0.03 beyond a tenth shared by all: the last such, and whoever comes before."""
    assert survivor_count(np.array([0.8, 0.047, 0.053, 0.1])) == 4
    assert survivor_count(np.array([0.8, 0.053, 0.1, 0.047])) == 3
    assert survivor_count(np.array([0.85, 0.05, 0.05, 0.05])) == 1
    assert survivor_count(np.array([0.4, 0.3, 0.3])) == 3
    assert survivor_count(np.array([0.85, 0.0521, 0.05, 0.0479])) == 2


def test_a_clear_choice_needs_no_run() -> None:
    found = select(CLEAR, target=1600)
    assert found.shortlist == ["a"] and found.expected_regret[0] < 0.001
    assert found.advice == (
        "a is expected within 0.1 % of the best (training it costs 50 % of all 2): "
        "no further run is needed."
    )


def test_the_fewest_within_the_tolerance_are_named_with_their_price() -> None:
    table, _ = tables.population(0, models=12)
    n = np.arange(1, 13) * 1e9
    table = replace(table, parameters=n)
    for tolerance in (0.003, 0.01, 0.05):
        found = select(table, 800, 102400, tokens=128, tolerance=tolerance)
        count = next(k for k, lost in enumerate(found.expected_regret, 1) if lost <= tolerance)
        assert found.shortlist == found.ranking[:count] and 1 < count < 12
        price = sum(n[table.names.index(name)] for name in found.shortlist) / n.sum()
        runs = found.next_runs
        assert runs is not None and runs.size == 1600
        chances = found.to_frame().prob_best
        on = [p >= 0.9 * module.DROP_THRESHOLD + 0.1 / 12 for p in chances]
        assert list(runs.names) == found.ranking[: sum(on)] and count < len(runs.names) < 12
        ours = sum(n[table.names.index(name)] for name in runs.names)
        assert runs.price == pytest.approx(ours / n.sum() / 64)
        first, last = (share(np.expm1(found.expected_regret[k])) for k in (0, count - 1))
        *names, end = found.shortlist
        named = f"{', '.join(names)} and {end}" if count <= 4 else f"the first {count}"
        assert found.advice == (
            f"The best of {named} is expected within {last} of the best; training these {count} in "
            f"full costs {share(price)} of all 12. {found.ranking[0]} alone: within {first}. "
            f"Before that, run the first {len(runs.names)} on 1,600 ({share(runs.price)} of "
            f"training all in full); the other {12 - len(runs.names)} are out."
        )
        assert "more" not in found.advice


def test_where_all_are_needed_or_no_size_is_left() -> None:
    found = select(CLOSE, target=1600, tolerance=0.001)
    assert found.next_runs is None, "1,600 is the target itself"
    assert len(found.shortlist) == 2
    assert found.advice == (
        "Only training all 2 in full is expected within 0.1 % of the best. b alone: within 0.9 %."
    )
    far = select(CLOSE, target=3200).next_runs
    assert far is not None and far.size == 1600 and far.names == tuple(found.ranking)
    unpriced = select(replace(CLOSE, parameters=None), target=3200, tolerance=0.001)
    assert unpriced.advice.endswith("Before that, run b and a on 1,600.")


def test_without_a_mean_all_are_named() -> None:
    """A perplexity whose distribution is so wide that it has none."""
    found = select(table_of([9.0, 8.0, 7.0], [8.0, 9.0, 7.5], metric="perplexity"), target=4e12)
    wide = Student(np.zeros(2), np.full(2, 1e4), np.full(2, np.inf))
    endless = replace(found, forecast=replace(found.forecast, mixture=alone(wide)))
    assert not np.isfinite(endless.expected_regret[0])
    assert endless.shortlist == endless.ranking
    assert endless.advice.startswith("Only training all 2 in full is expected within 1 % of")


def test_stakes_are_in_the_metrics_own_terms() -> None:
    """A share of a loss and of a perplexity, points of a score: by the same forecasts."""
    losses = [[0.4, 0.3, 0.25, 0.22], [0.38, 0.3, 0.26, 0.23]]
    loss, score, perplexity = (
        select(table_of(*losses, metric=metric), target=3200)
        for metric in ("loss", "accuracy", "perplexity")
    )
    assert (loss.scores == score.scores).all() and (loss.scores == perplexity.scores).all()
    assert loss.expected_regret[0] > 3 * score.expected_regret[0] > 0
    assert (score.expected_regret == perplexity.expected_regret).all()
    assert difference_text(None, 0.0677) == "7 %" == difference_text("perplexity", 0.0677)
    assert (
        difference_text("accuracy", 0.0677) == "7 points"
        and difference_text("accuracy", 0.0041) == "0.4 points"
    )
    assert (
        difference_text("accuracy", score.tolerance) == "1 point"
        and difference_text(None, 0.01) == "1 %"
    )
    assert f"within {difference_text('accuracy', score.expected_regret[0])}" in score.advice
    with pytest.raises(ValueError, match="tolerance is 0"):
        select(CLOSE, target=3200, tolerance=0.0)


def test_why_a_model_is_ahead_of_one_with_a_better_forecast() -> None:
    """Of made-up numbers: e.g. ln 1.02 worse, ln 1.1 ahead, and a score in between."""
    found = select(table_of([2.0, 1.6, 1.3, 1.0], [2.2, 1.7, 1.4, 1.1]), target=3200)
    apart, own = np.log([1.0, 1.1]), found.forecast.predictive
    assert own is not None
    location = np.log([0.51, 0.5])
    score = np.exp(0.6 * location + 0.4 * apart)
    forecast = replace(found.forecast, predictive=replace(own, location=location), score=score)
    (note,) = replace(found, forecast=forecast).notes
    assert note == (
        "a is ahead of b though its forecast is 2 % worse: it leads by 10 % at 800, and last "
        "losses count as far as this table's own past speaks for them."
    )
    behind = replace(forecast, score=np.array([0.4, 0.5]))
    table = replace(found.table, losses=found.table.losses[::-1])
    (note,) = replace(found, forecast=behind, table=table).notes
    assert note == "a is ahead of b though its forecast is 2 % worse."
    three = select(table_of([2.0, 1.6, 1.3], [2.2, 1.7, 1.4], [2.4, 1.8, 1.5]), target=3200)
    wide = three.forecast.predictive
    assert wide is not None
    of_three = replace(wide, location=np.log([0.51, 0.6, 0.5]))
    moved = replace(three.forecast, predictive=of_three, score=np.array([0.5, 0.6, 0.7]))
    (note,) = replace(three, forecast=moved).notes
    assert note.startswith("a is ahead of c though its forecast is 2 % worse: it leads by 15 %")
    agreed = replace(forecast, predictive=replace(own, location=np.log(score)))
    assert replace(found, forecast=agreed).notes == []


def test_a_method_without_probabilities_says_so() -> None:
    found = select(tables.population(2, models=3)[0], 6400, 102400, "subtuning")
    assert found.advice == "subtuning gives no probabilities here; it says nothing of what is out."
    assert found.advice in repr(found)
    with pytest.raises(ValueError, match="subtuning gives no distribution"):
        _ = found.shortlist


def test_costs_are_in_the_unit_that_is_asked_for() -> None:
    table = table_of([2.0, 1.6, 1.3, 1.1], [1.9, 1.7, 1.55, 1.45])
    flops = select(table, target=1600, tokens=100)
    assert flops.unit == "FLOPs"
    spent = 6 * 1e8 * 1500 * 100
    assert flops.to_frame().cost.tolist() == [pytest.approx(spent)] * 2
    assert flops.to_frame().full_cost[0] == pytest.approx(6e8 * 1600 * 100)
    assert flops.cost_text(1.234e15) == "1.23 × 10¹⁵ FLOPs"
    assert "cost" not in repr(select(replace(table, parameters=None), target=1600))
    assert module.TOLERANCE == 0.01 == flops.tolerance
