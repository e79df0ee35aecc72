"""The advice of a selection: expected regret by drawing, who goes on, and the words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jachess_ext._text import percent
from jachess_ext.scaling import LossTable, select
from jachess_ext.scaling.advice import expected_regret, survivor_count
from jachess_ext.scaling.predictive import Mixture, Student
from jachess_ext.scaling.selection_text import difference_text
from python_tests.scaling import tables


def table_of(*losses: list[float], metric: str | None = None) -> LossTable:
    names = tuple("abcdef"[: len(losses)])
    sizes = 100.0 * 2.0 ** np.arange(len(losses[0]))
    return LossTable(names, sizes, np.array(losses), np.full(len(names), 1e8), metric)


SIZES = 100.0 * 2.0 ** np.arange(4)
CLOSE = table_of([2.0, 1.6, 1.3, 1.1], [1.9, 1.6, 1.3, 1.1])
CLEAR = table_of([2.0, 1.0, 0.5, 0.25], [2.0, 1.99, 1.98, 1.97])


@pytest.mark.parametrize(("dof", "ratio"), [(5.0, True), (np.inf, False)])
def test_expected_regret_against_drawing(dof: float, ratio: bool) -> None:
    generator = np.random.default_rng(0)
    location, scale = generator.normal(0, 0.2, 7), generator.uniform(0.02, 0.3, 7)
    order = generator.permutation(7)
    drawn = location + scale * generator.standard_t(min(dof, 1e9), (100_000, 7))
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
        s = np.hypot(0.05, 0.1)
        expected = gap * stats.norm.cdf(gap / s) + s * stats.norm.pdf(gap / s)
        found = expected_regret(alone(pair), np.array([0, 1]), ratio=True)
        assert found[0] == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_expected_regret_of_a_thousand_is_that_of_drawing() -> None:
    generator = np.random.default_rng(1)
    location = generator.uniform(0, 1, 1000)
    many = Student(location, np.full(1000, 0.1), np.full(1000, np.inf))
    order = np.argsort(location)
    drawn = location[order[:600]] + 0.1 * generator.standard_normal((20_000, 600))
    expected = (drawn[:, 0] - drawn.min(1)).mean()  # the others lie ten widths above and more
    assert expected_regret(alone(many), order, ratio=True)[0] == pytest.approx(expected, rel=0.02)


def test_who_goes_on_may_well_beat_the_first() -> None:
    """0.15 of the draws and more are lower than the first's: the last such, and all before it."""
    random, n = np.random.default_rng(0), 8
    location, scale = np.sort(random.normal(0, 0.1, n)), random.uniform(0.02, 0.1, n)
    order = random.permutation(n)
    x = np.empty(n)
    x[order] = location
    one, other = (Student(x, s * scale, np.full(n, np.inf)) for s in (1, 0.3))
    mixture = Mixture(np.array([0.4, 0.6]), (one, other))
    widths = np.where(random.random((200_000, 1)) < 0.4, scale, 0.3 * scale)
    draws = x + widths * random.standard_normal((200_000, n))
    shares = (draws < draws[:, order[:1]]).mean(0)
    shares[order[0]] = 0.5
    np.testing.assert_allclose(mixture.prob_lower(int(order[0])), shares, atol=0.005)
    assert survivor_count(mixture, order) == 1 + np.flatnonzero(shares[order] >= 0.15)[-1]


def test_more_candidates_never_mean_fewer_survivors() -> None:
    """Newcomers that are no better than the first; the others stay as they are."""
    location = np.random.default_rng(0).normal(0, 0.03, 300)
    location[0] = location.min() - 0.01
    survivors: set[int] = set()
    for n in (2, 5, 20, 40, 60, 120, 300):
        students = Student(location[:n], np.full(n, 0.05), np.full(n, np.inf))
        order = np.argsort(location[:n])
        chosen = set(order[: survivor_count(Mixture(np.ones(1), (students,)), order)].tolist())
        assert survivors <= chosen
        survivors = chosen
    assert len(survivors) > 30


def test_a_clear_choice_needs_no_run() -> None:
    found = select(CLEAR, target=1600)
    assert found.shortlist == ["a"] and found.expected_regret[0] < 0.001 and found.is_decided
    chance = percent(found.best_probabilities[0])
    assert found.advice == (
        f"a is the best with probability {chance}, and is expected within 0.1 % of the best: "
        "no further run is needed."
    )


def test_the_fewest_within_the_tolerance_are_named_with_their_price() -> None:
    table, _ = tables.population(0, models=12)
    n = np.arange(1, 13) * 1e9
    table = replace(table, parameters=n)
    for tolerance in (0.003, 0.01, 0.03):
        found = select(table, 800, 102400, tokens=128, tolerance=tolerance)
        count = next(k for k, lost in enumerate(found.expected_regret, 1) if lost <= tolerance)
        assert found.shortlist == found.ranking[:count] and 1 < count < 12
        price = sum(n[table.names.index(name)] for name in found.shortlist) / n.sum()
        assert found.price == pytest.approx(price)
        survivors = found.survivors
        assert survivors == found.ranking[: len(survivors)] and 1 < len(survivors) < 12
        run_price = sum(n[table.names.index(name)] for name in survivors) / n.sum() / 64
        regret, list_regret = (percent(np.expm1(found.expected_regret[k])) for k in (0, count - 1))
        *names, end = found.shortlist
        named = f"{', '.join(names)} and {end}" if count <= 4 else f"the first {count}"
        cost = f" Choosing {found.ranking[0]} now is expected to cost {regret}."
        assert found.advice.startswith(
            f"The best of {named} is expected within {list_regret} of the best; training these "
            f"{count} in full costs {percent(price)} of all 12."
            + cost
            * bool(found.expected_regret[0] <= 0.1)
            + f" Next, run the first {len(survivors)} on 1,600 ({percent(run_price)} of training "
            f"all in full); the other {12 - len(survivors)} are out."
        )


def test_where_all_are_needed_or_no_size_is_left() -> None:
    found = select(CLOSE, target=1600, tolerance=0.001)
    assert len(found.shortlist) == 2 and not found.is_decided
    assert found.advice.startswith("Not decided yet: any of the 2 may be the best. Choosing ")
    assert "run" not in found.advice, "1,600 is the target itself"
    unpriced = select(replace(CLOSE, parameters=None), target=3200, tolerance=0.001)
    first, second = unpriced.ranking
    assert unpriced.advice.endswith(f"Next, run {first} and {second} on 1,600.")


def test_a_first_model_that_is_not_sure_is_no_decision() -> None:
    """Within the tolerance, but with P(best) below .9: it says so, and names the next runs."""
    found = select(CLOSE, target=3200, tolerance=0.5)
    assert len(found.shortlist) == 1 and found.best_probabilities.max() < 0.9
    assert not found.is_decided and "no further run" not in found.advice
    assert "Next, run " in found.advice


def test_halving_is_advised_where_the_order_is_not_forecast_to_change() -> None:
    table, _ = tables.population(0, models=12)
    last = table.up_to(800).last_losses
    for tolerance in (0.01, 0.03):
        found = select(table, 800, 102400, tolerance=tolerance)
        order = sorted(found.survivors, key=lambda name: last[table.names.index(name)])
        assert len(order) > 2
        assert ("halve them" in found.advice) == (order == found.survivors)


def test_a_regret_that_says_nothing_is_not_printed() -> None:
    found = select(table_of([9.0, 8.0, 7.0], [8.0, 9.0, 7.5], metric="perplexity"), target=4e12)
    wide = Student(np.zeros(2), np.full(2, 1e4), np.full(2, np.inf))
    endless = replace(found, forecast=replace(found.forecast, mixture=alone(wide)))
    assert endless.expected_regret[0] > 0.1 or not np.isfinite(endless.expected_regret[0])
    assert endless.shortlist == endless.ranking
    assert "expected to cost" not in endless.advice


@pytest.mark.parametrize("kind", ["coin", "equal", "permuted"])
@pytest.mark.parametrize(("models", "sizes"), [(2, 3), (3, 4), (3, 6), (10, 4)])
def test_tables_without_a_signal_decide_nothing(kind: str, models: int, sizes: int) -> None:
    """Accuracies of coin flips on 80 rows, equal ones, and a table permuted at each size."""
    random, nothing = np.random.default_rng(0), 0
    for seed in range(12):
        losses = random.binomial(80, 0.5, (models, sizes)) / 80
        if kind == "equal":
            losses = np.full((models, sizes), 0.5)
        if kind == "permuted" and models > 2:  # two models may well keep their order by chance
            table, _ = tables.population(seed, models=models)
            losses = random.permuted(table.trained_losses[:, :sizes], axis=0)
        d = 100.0 * 2.0 ** np.arange(sizes)
        names = tuple("abcdefghij"[:models])
        for classes in (None, 2):
            metric = None if kind == "permuted" and models > 2 else "accuracy"
            found = select(
                LossTable(names, d, losses, None, metric), None, 8 * d[-1], classes=classes
            )
            assert not found.is_decided and "no further run" not in found.advice
            if not found.has_signal:
                nothing += 1
                assert found.advice.startswith(f"Nothing tells these {models} models apart yet")
                np.testing.assert_allclose(found.best_probabilities, 1 / models, atol=1e-3)
    assert nothing >= {"equal": 24, "coin": 12 if models == 10 else 0, "permuted": 0}[kind]


def test_models_at_the_level_of_guessing_are_alike() -> None:
    """Lasting differences, but within the noise of guessing: 1 / n each where classes are known."""
    d, level = SIZES, np.array([0.500, 0.497, 0.494])
    table = LossTable(("a", "b", "c"), d, np.repeat(level[:, None], 4, 1), None, "accuracy")
    noisy = replace(table, noise=np.full((3, 4), 0.02))
    found = select(noisy, None, 3200, classes=2)
    assert not found.has_signal
    np.testing.assert_allclose(found.best_probabilities, 1 / 3, atol=1e-6)
    assert select(noisy, None, 3200).has_signal


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


def test_a_method_without_probabilities_says_so() -> None:
    found = select(tables.population(2, models=3)[0], 6400, 102400, "subtuning")
    assert found.advice == "subtuning gives no probabilities here; it says nothing of what is out."
    assert found.advice in repr(found)
    with pytest.raises(ValueError, match="subtuning gives no distribution"):
        _ = found.shortlist


def test_costs_are_shares_of_training_all_in_full() -> None:
    table = table_of([2.0, 1.6, 1.3, 1.1], [1.9, 1.7, 1.55, 1.45])
    found = select(table, target=1600, tokens=100)
    assert found.flops == pytest.approx(2 * 6 * 1e8 * 1500 * 100)
    assert found.full_flops == pytest.approx(2 * 6e8 * 1600 * 100)
    assert found.to_frame().cost.tolist() == [pytest.approx(1500 / 3200)] * 2
    assert found.to_frame().full_cost.tolist() == [0.5, 0.5] and "of all in full" in repr(found)
    assert "in full" not in repr(select(replace(table, parameters=None), target=1600))
