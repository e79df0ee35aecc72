"""Rounds, stops, seeds, budgets and predictions of a search whose losses are a formula's."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jachess_ext.scaling import Ask, LossTable, Search, read_table, select
from jachess_ext.scaling import selection as module
from jachess_ext.scaling.methods import METHODS

SIZES = (4, 8, 16, 32, 64)
Loss = Callable[[Ask], float]


def crossing(ask: Ask) -> float:
    """The wide model is worse at first and better in the end; with a little noise."""
    wide = ask.model == "wide"
    scale, beta, floor = (0.9, 0.6, 0.2) if wide else (0.4, 0.25, 0.35)
    noise = 1 + 0.02 * np.cos(7 * ask.rows + wide)
    return (scale / (1 + ask.rows**beta / 3) + floor) * noise


def finished(loss: Loss = crossing, cost: Loss = lambda ask: 0.0, **given: Any) -> Search:
    search = Search(**{"models": ("narrow", "wide"), "sizes": SIZES, "target": 256} | given)
    while ask := search.ask():
        assert search.ask() == ask, "it is asked again until it is told"
        search.tell(ask, loss(ask), cost=cost(ask))
    return search


def test_every_model_on_every_size() -> None:
    search = finished()
    assert [(a.rows, a.model) for a in search.results] == [
        (size, model) for size in SIZES for model in ("narrow", "wide")
    ]
    assert search.stop == "every planned size was run" and search.best() == "wide"


def test_the_state_goes_on_from_any_moment() -> None:
    whole = finished(strategy="dropping")
    search = Search(("narrow", "wide"), SIZES, 256, strategy="dropping")
    while ask := search.ask():
        search = Search.from_state(json.loads(json.dumps(search.state())))
        search.tell(ask, crossing(ask))
    assert search == whole and search.stop == whole.stop
    classes = Search(("a", "b"), SIZES, 256, classes=7)
    assert Search.from_state(classes.state()).classes == 7


@pytest.mark.parametrize("state", [{}, {"results": []}, {"models": ["a", "b"], "results": [1]}])
def test_what_is_no_state(state: dict) -> None:
    with pytest.raises(ValueError, match=r"no state of a search|expected two"):
        Search.from_state(state)


def test_classes_and_test_rows_reach_the_forecast() -> None:
    """How much wider they make it is asked in test_select."""
    plain, guessed, sampled = (
        finished(metric="error", **given).selection().interval_ends(0.9)[1]
        for given in ({}, {"classes": 7}, {"test_rows": 80})
    )
    assert (guessed > plain).all() and (sampled > plain).all()


def test_only_open_runs_are_told() -> None:
    search = Search(("a", "b"), SIZES, 256)
    with pytest.raises(ValueError, match="is not an open run"):
        search.tell(Ask("a", 8), 1.0)
    search.tell(Ask("a", 4), 1.0)
    with pytest.raises(ValueError, match="is not an open run"):
        search.tell(Ask("a", 4), 1.0)


EIGHT = tuple("abcdefgh")


def fanned(ask: Ask) -> float:
    """Eight power laws, a the steepest, with a little noise."""
    place = EIGHT.index(ask.model)
    noise = 1 + 0.01 * math.cos(7 * ask.rows + place)
    return float(ask.rows ** -(0.5 - 0.03 * place) * noise)


def dropping(**given: Any) -> Search:
    """A search of the eight whose rows cost as many units."""
    costs = dict.fromkeys(EIGHT, (0.0, 1.0))
    settings = {"models": EIGHT, "strategy": "dropping", "target": 512, "costs": costs}
    return finished(fanned, lambda ask: float(ask.rows), **settings | given)


def spent(search: Search) -> float:
    return sum(result.cost for result in search.results.values())


def test_who_cannot_be_the_best_is_dropped() -> None:
    """After each round from the third size on: the worse half, without those that may yet win."""
    search, left = dropping(), list(EIGHT)
    for place, size in enumerate(SIZES):
        ran = [ask.model for ask in search.results if ask.rows == size]
        assert ran == left, f"at {size}"
        if place < 2:
            continue
        losses = np.array([[fanned(Ask(m, s)) for s in SIZES[: place + 1]] for m in left])
        sizes = np.array(SIZES[: place + 1], dtype=float)
        found = select(LossTable(tuple(left), sizes, losses, None), float(size), 512)
        kept = max(len(found.survivors), (len(left) + 1) // 2)
        out = found.ranking[kept:]
        for name in out:
            number = found.ranking.index(name) + 1
            assert search.stops[name] == f"dropped at {size} rows as number {number} of {len(left)}"
        left = [m for m in left if m not in out]
        if len(left) == 1:
            break
    assert 0 < len(search.stops) < 8 and search.best() == "a"
    selection = search.selection()
    assert [*selection.names] == left
    assert selection.unranked == {m: f"{m} was {search.stops[m]}" for m in EIGHT if m not in left}
    growing = dropping(strategy="growing")
    assert growing.best() == "a" and not growing.stops and spent(search) < 0.8 * spent(growing)


def test_the_search_ends_with_one_model_left() -> None:
    search = Search(("a", "h"), SIZES, 512, strategy="dropping")
    while ask := search.ask():
        search.tell(ask, ask.rows ** (-0.8 if ask.model == "a" else -0.02))
    assert search.stop == "a alone is left" and search.best() == "a"
    assert max(ask.rows for ask in search.results) == 16
    assert search.stops == {"h": "dropped at 16 rows as number 2 of 2"}


def test_without_probabilities_dropping_is_successive_halving() -> None:
    search, left = dropping(method="subtuning"), [*EIGHT]
    for size, count in zip(SIZES, (8, 4, 2, 0, 0), strict=True):
        assert [a.model for a in search.results if a.rows == size] == left[:count]
        left = sorted(sorted(left, key=lambda m: fanned(Ask(m, size)))[: len(left) // 2])
    assert search.stop == f"{search.best()} alone is left"


def test_a_budget_drops_the_last_and_pays_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the eight, whoever the forecasts put last, until the next size is paid for."""
    monkeypatch.setattr(module, "survivor_count", lambda mixture, order: len(order))
    free = dropping(sizes=(4, 8, 16, 32))
    ranking = dropping(sizes=(4, 8, 16)).selection().ranking
    before = 8 * (4 + 8 + 16)
    for limit in (3, 2):
        search = dropping(sizes=(4, 8, 16, 32), budget=before + 32 * limit + 31.0)
        ran = {ask.model for ask in search.results if ask.rows == 32}
        assert ran == set(ranking[:limit]) < {a.model for a in free.results if a.rows == 32}
        assert spent(search) <= before + 32 * limit + 31
        assert (
            search.stops[ranking[limit]] == "dropped before 32 rows, which the budget does not pay"
        )
        assert [*search.selection().names] == sorted(ran)
    poor = dropping(sizes=(4, 8, 16, 32), budget=before + 63.0)
    assert max(ask.rows for ask in poor.results) == 16
    assert not set(ranking) - set(poor.selection().names), "who is not outrun stays ranked"
    assert poor.stop == f"the budget {before + 63:g} does not pay for the next size, 32"
    early = dropping(sizes=(4, 8, 16, 32), budget=8 * 4 + 60.0)
    assert not early.stops, "two sizes rank nobody"


def test_dropping_goes_on_from_any_moment_and_in_any_order() -> None:
    settings: dict[str, Any] = {"strategy": "dropping", "budget": 8 * 28 + 130.0}
    settings["costs"] = dict.fromkeys(EIGHT, (0.0, 1.0))
    search, draw = Search(EIGHT, SIZES, 512, **settings), random.Random(1)
    while asks := search.open_runs():
        ask = draw.choice(asks)
        search = Search.from_state(json.loads(json.dumps(search.state())))
        search.tell(ask, fanned(ask), cost=float(ask.rows))
    whole = dropping(budget=8 * 28 + 130.0)
    assert search.stops == whole.stops != {} and search.stop == whole.stop
    assert search.results == whole.results
    failed = finished(lambda a: math.nan if a == Ask("b", 16) else fanned(a), models=EIGHT,
                      strategy="dropping", target=512)  # fmt: skip
    assert failed.stops["b"].startswith("failed at 16 rows") and "b" not in failed.selection().names
    assert "b" not in failed.selection().unranked


def kinked(ask: Ask) -> float:
    """A line in ln L over ln D down to 16 rows, and off it below; the wide model earlier."""
    edge = 16 if ask.model == "wide" else 8
    line = 2.0 * ask.rows**-0.3 * (1 + 0.001 * (ask.rows % 3))
    return line if ask.rows >= edge else 0.7 * line


ALGORITHM_1: dict[str, Any] = {"strategy": "accept-then-stop", "method": "ats"}


def test_accept_then_stop() -> None:
    """From the largest size down, every model until a loss deviates from its line."""
    given = ALGORITHM_1 | {"sizes": (2, 4, 8, 16, 32, 64)}
    search = finished(kinked, **given)
    runs = {m: [a.rows for a in search.results if a.model == m] for m in search.models}
    assert runs == {"narrow": [64, 32, 16, 8, 4], "wide": [64, 32, 16, 8]}
    assert search.stops["wide"].startswith("the loss at 8 rows deviates from the line of the 3")
    assert search.stops["narrow"].startswith("the loss at 4 rows deviates from the line of the 4")
    assert search.stop == "every model was stopped"
    selection = search.selection()
    for name, predicted in zip(selection.names, selection.predicted_losses, strict=True):
        line = np.array([s for s in given["sizes"] if s >= (16 if name == "wide" else 8)])
        losses = [kinked(Ask(name, int(size))) for size in line]
        slope, level = np.polyfit(np.log(line), np.log(losses), 1)
        assert predicted == pytest.approx(np.exp(level + slope * np.log(256)))
    assert same(search, Search.from_state(json.loads(json.dumps(search.state()))))
    assert finished(kinked, **given, tau=1e9).stop == "every planned size was run"


def test_accept_then_stop_reads_no_smaller_size_that_was_added() -> None:
    """Losses at 2 and 4 rows, off the line, stop no model earlier than without them."""
    given = ALGORITHM_1 | {"sizes": (8, 16, 32, 64)}
    search = Search(("narrow", "wide"), target=256, **given)
    search.add("narrow", 2, kinked(Ask("narrow", 2)))
    search.add("narrow", 4, kinked(Ask("narrow", 4)))
    while ask := search.ask():
        search.tell(ask, kinked(ask))
    assert search.stops == finished(kinked, **given).stops
    assert [a.rows for a in search.results if a.model == "narrow"] == [2, 4, 64, 32, 16, 8]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 0.0, -1.0])
def test_a_model_without_a_loss_is_left_out(loss: float) -> None:
    search = finished(lambda a: loss if a.model == "wide" and a.rows == 8 else crossing(a))
    reason = f"failed at 8 rows: the loss is {loss}; expected a positive number"
    assert search.stops == {"wide": reason}
    assert search.selection().names == ("narrow",)
    assert [a.rows for a in search.results if a.model == "wide"] == [4, 8]


def test_a_model_that_cannot_be_used_is_neither_run_nor_ranked() -> None:
    """Known at once or after a run, from then on: the other models are as without it."""
    reason = {"wide": "there is no such folder"}
    costs = {"narrow": (1.0, 2.0), "third": (1.0, 2.0)}
    known = {"test_rows": 50, "costs": costs, "parameters": {"narrow": 9}, "unusable": reason}
    search, late = (Search(("narrow", "wide", "third"), SIZES, 256) for _ in range(2))
    late.tell(Ask("wide", 4), 0.1)
    for each in (search, late):
        each.set_candidates(**known)
        while ask := each.ask():
            assert ask.model != "wide"
            each = Search.from_state(json.loads(json.dumps(each.state())))
            each.tell(ask, crossing(ask))
        assert each.stops == reason and each.stop == "every planned size was run"
        expected = finished(models=("narrow", "third")).selection()
        assert each.selection().names == expected.names
        assert each.selection().scores.tolist() == expected.scores.tolist()


def test_costs_are_those_of_what_a_method_reads() -> None:
    price = {0: 1.0, 4: 10.0, 8: 20.0, 16: 40.0}
    search = finished(cost=lambda ask: price[ask.rows], sizes=(4, 8, 16))
    for model in search.models:
        search.add(model, 0, crossing(Ask(model, 0)), cost=price[0])
    for method, each in (
        ("blend", 70.0),
        ("ats", 70.0),
        ("rectified", 71.0),
        ("subtuning", 40.0),
        ("zeroshot", 1.0),
        ("modelsize", 0.0),
    ):
        search.parameters = {"narrow": 10, "wide": 20}
        assert search.selection(method).costs.tolist() == [each, each], method
    assert search.selection().full_costs.tolist() == [40 / 16 * 256] * 2


def test_a_budget_ends_before_it_is_exceeded() -> None:
    costs = {"narrow": (5.0, 1.0), "wide": (5.0, 3.0)}

    def cost(ask: Ask) -> float:
        once, each = costs[ask.model]
        return once + each * ask.rows

    whole = spent(finished(cost=cost))
    for limit, rounds in ((whole, 5), (whole - 1, 4)):
        search = finished(cost=cost, costs=costs, budget=limit)
        assert spent(search) <= limit and search.curve("wide").keys() == set(SIZES[:rounds])
        assert rounds == 5 or "does not pay for the next size, 64" in str(search.stop)
    proportional = finished(cost=lambda a: float(a.rows), budget=2 * (4 + 8 + 16) + 1)
    assert max(proportional.curve("wide")) == 16, "32 rows are expected to cost twice as much as 16"


# Results one already has ------------------------------------------------------------------------


def same(search: Search, other: Search) -> bool:
    return search == other and search.open_runs() == other.open_runs()


def test_what_is_added_is_not_asked_again() -> None:
    search = Search(("narrow", "wide"), SIZES, 256)
    search.add("narrow", 4, crossing(Ask("narrow", 4)))
    search.add("wide", 2, 0.9)
    assert search.open_runs() == [Ask("wide", 4)]
    while ask := search.ask():
        search.tell(ask, crossing(ask))
    assert [a.rows for a in search.results if a.model == "narrow"] == list(SIZES)
    assert search.curve("wide") == {2: 0.9} | finished().curve("wide")
    assert same(search, Search.from_state(json.loads(json.dumps(search.state()))))


def test_a_table_is_added_whole_or_not_at_all() -> None:
    sizes = [4, 8, 16]
    losses = [[crossing(Ask(m, s)) for s in sizes] for m in ("narrow", "wide")]
    frame = pd.DataFrame(losses, ["narrow", "wide"], [str(size) for size in sizes])
    frame.loc["wide", "16"] = np.nan
    search = Search(("narrow", "wide"), SIZES, 256)
    search.add_table(read_table(frame, size="headers"))
    assert search.open_runs() == [Ask("wide", 16)], "a cell that is missing"
    while ask := search.ask():
        search.tell(ask, crossing(ask))
    expected, found = (s.selection().to_frame() for s in (finished(), search))
    assert found.drop(columns="cost").equals(expected.drop(columns="cost"))
    for change, words in (
        ({"narrow": "third"}, "'third' is none of the candidates, narrow, wide"),
        (
            {"16": "256"},
            "'narrow' has a result at 256 rows; expected a whole number below the target's 256",
        ),
        ({"16": "16.5"}, "'16.5' is no whole number"),
    ):
        fresh = Search(("narrow", "wide"), SIZES, 256)
        with pytest.raises(ValueError, match=words):
            fresh.add_table(frame.rename(index=change, columns=change), size="headers")
        assert not fresh.results
    with pytest.raises(ValueError, match=r"the result of Ask\(model='narrow', rows=4.* is known"):
        search.add_table(frame, size="headers")


def test_rounds_are_replayed_after_an_addition() -> None:
    """Told first and added after, or added first: the same state."""
    late, early = (Search(("narrow", "wide"), SIZES, 256, strategy="dropping") for _ in range(2))
    for _ in range(3):
        ask = late.ask()
        assert ask is not None
        late.tell(ask, crossing(ask))
    for search in (late, early):
        for size in (16, 32, 64):
            search.add("wide", size, crossing(Ask("wide", size)))
        while ask := search.ask():
            search.tell(ask, crossing(ask))
    assert late.stop == early.stop and late.stops == early.stops
    assert set(late.results) == set(early.results)
    assert same(late, Search.from_state(late.state()))


def test_costs_above_those_expected_change_no_replay() -> None:
    """A budget of the expected costs, runs twice as dear: the state goes on from any moment."""
    costs = {"narrow": (0.0, 1.0), "wide": (0.0, 1.0)}
    budget = 2.0 * 2 * (4 + 8 + 16) + 1
    whole = finished(cost=lambda a: 2.0 * a.rows, costs=costs, budget=budget)
    search = Search(("narrow", "wide"), SIZES, 256, costs=costs, budget=budget)
    while ask := search.ask():
        search = Search.from_state(search.state())
        search.tell(ask, crossing(ask), cost=2.0 * ask.rows)
    assert same(search, whole) and "does not pay for the next size, 32" in str(search.stop)
    again = Search.from_state(search.state())
    assert same(again, whole)


def test_scores_are_told_and_shown_as_they_are() -> None:
    search = Search(("narrow", "wide"), SIZES, 256, metric="accuracy", test_rows=50)
    while ask := search.ask():
        search.tell(ask, 1 - crossing(ask) if ask.rows < 64 else 1.0)
    frame, plain = (
        search.selection().to_frame(),
        finished(lambda ask: crossing(ask) if ask.rows < 64 else 0.01),
    )
    expected = plain.selection().to_frame()
    assert frame.name.tolist() == expected.name.tolist()
    assert frame.predicted.tolist() == pytest.approx((1 - expected.predicted).tolist())
    accuracies = pd.DataFrame({"4": [0.5, 0.7]}, ["narrow", "wide"])
    table = read_table(accuracies, metric="accuracy", size="headers")
    again = Search(("narrow", "wide"), SIZES, 256, metric="eval_accuracy")
    again.add_table(table)
    assert again.curve("wide") == {4: pytest.approx(0.3)}
    with pytest.raises(
        ValueError, match="the table holds accuracy, and this search is told losses"
    ):
        Search(("narrow", "wide"), SIZES, 256).add_table(table)
    with pytest.raises(ValueError, match="the table holds accuracy, and this search is told f1"):
        Search(("narrow", "wide"), SIZES, 256, metric="f1").add_table(table)


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("accuracy", 93.0, "the accuracy is 93; expected 0 or more and at most 1, no per cent"),
        ("accuracy", 1.0, "the accuracy is 1, the best there is; give Search test_rows="),
        ("matthews", -1.5, "the matthews is -1.5; expected -1 or more"),
        ("perplexity", 0.5, "the perplexity is 0.5; expected 1 or more"),
        ("perplexity", True, "the perplexity is True; expected a number"),
        ("accuracy", False, "the accuracy is False; expected a number"),
        (None, True, "the loss is True; expected a number"),
        (None, np.True_, "the loss is True; expected a number"),
    ],
)
def test_scores_out_of_range_are_refused(metric: str | None, value: float, words: str) -> None:
    search = Search(("a", "b"), SIZES, 256, metric=metric)
    before = search.state()
    for take in (
        lambda: search.tell(Ask("a", 4), value),
        lambda: search.add("a", 4, value),
    ):
        with pytest.raises(ValueError, match=words):
            take()
    assert search.state() == before


@pytest.mark.parametrize("loss", [math.nan, -1.0, 0.0, math.inf])
def test_no_loss_can_be_added(loss: float) -> None:
    search = Search(("a", "b"), SIZES, 256)
    with pytest.raises(ValueError, match="expected a positive number"):
        search.add("a", 4, loss)
    assert not search.results


# Predictions ------------------------------------------------------------------------------------

TARGET = 6400
MEASURED = (0, 25, 50, 100, 200, 400, 800)
LAWS = {"a": (30.0, 0.5, 0.2), "b": (20.0, 0.3, 0.1), "c": (60.0, 0.9, 0.4)}


@pytest.fixture(scope="module")
def noisy() -> Search:
    """Losses that follow a rectified law, with a little noise."""
    draw = np.random.default_rng(0)
    parameters = {"a": 9, "b": 10, "c": 11}
    given = {"method": "rectified", "parameters": parameters}
    search = Search(list(LAWS), MEASURED[1:], TARGET, **given)
    while ask := search.ask():
        scale, beta, floor = LAWS[ask.model]
        loss = scale / (20 + (ask.rows**beta if ask.rows else 0.0)) + floor
        search.tell(ask, loss * np.exp(0.02 * draw.standard_normal()), cost=1.0)
    return search


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_those_of_select(noisy: Search, method: str) -> None:
    table = LossTable(
        names=("a", "b", "c"),
        sizes=np.array(MEASURED, dtype=float),
        losses=np.array([list(noisy.curve(name).values()) for name in "abc"]),
        parameters=np.array([9.0, 10.0, 11.0]),
    )
    columns = ["cost", "full_cost"]
    expected = select(table, 800, TARGET, method).to_frame().drop(columns=columns)
    assert noisy.selection(method).to_frame().drop(columns=columns).equals(expected)


def test_too_few_sizes_are_a_sentence() -> None:
    search = Search(("a", "b"), SIZES, 256)
    for _ in range(4):
        search.tell(search.ask(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="blend needs 3 sizes above 0 or more, and a has 2"):
        search.best()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sizes": (16, 64, 32)}, "sizes must increase strictly from 0 up, in numbers; 32 does not"),
    ({"sizes": (0, 16, 32)}, "expected numbers of rows from 1 up"),
    ({"sizes": ()}, "expected numbers of rows from 1 up"),
    ({"sizes": (16, 32)}, "blend needs 3 sizes or more, and there are 2"),
    ({"sizes": (8, 16, 32), "method": "power"}, "power needs 4 sizes or more"),
    ({"sizes": (8, 16), "method": "rectified"}, "rectified needs 3 sizes or more"),
    ({"sizes": (8, 16, 256)}, "256 rows, is not below the target 256: nothing would be left"),
    ({"method": "oracle"}, "method is 'oracle'; expected one of blend"),
    ({"gamma": 2}, "gamma is 2"),
    ({"tau": 0.0}, "tau is 0.0"),
    ({"budget": -1.0}, "budget is -1.0"),
    ({"strategy": "sideways"}, "strategy is 'sideways'; expected one of growing, dropping"),
    ({"strategy": "accept-then-stop"}, "chooses by the method 'ats', not 'blend'"),
    ({"test_rows": 0}, "test_rows is 0"),
    ({"classes": 1}, "classes is 1; expected 2 or more"),
    (
        {"metric": "goodness"},
        "the metric 'goodness' is not known here; say whether lower or higher",
    ),
    ({"models": ("a",)}, "1 model to choose from"),
    ({"models": ("a", "b", "a")}, "the model 'a' is given twice"),
]


@pytest.mark.parametrize(("given", "words"), BAD)
def test_settings_that_cannot_be_used(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Search(**{"models": ("a", "b"), "sizes": SIZES, "target": 256} | given)
