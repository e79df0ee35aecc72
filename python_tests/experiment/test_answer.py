"""The top of a report: what the comparison found."""

from __future__ import annotations

import math
import re
from unittest.mock import patch

import pytest
from scipy import stats

from jachess_ext.evaluation import figures
from jachess_ext.evaluation.figures import forest_figure, styles_of, wrapped
from jachess_ext.experiment.answer import answer, forests
from jachess_ext.experiment.tables import Results

from .records import record

PLAIN = (0.50, 0.60, 0.55)


def results(**changes: tuple[float, ...]) -> Results:
    """Methods whose scores differ from the plain ones by these, seed by seed, on two tasks."""
    records = [record("none", task, s, PLAIN[s], brier=0.3) for task in "ab" for s in range(3)]
    records += [
        record(name, task, s, PLAIN[s] + change, brier=0.3 - change)
        for name, by in changes.items()
        for task in "ab"
        for s, change in enumerate(by)
    ]
    return Results.of(records)


def half(values: tuple[float, ...]) -> float:
    """Of Student's interval, by scipy."""
    low, high = stats.t.interval(0.95, len(values) - 1, scale=stats.sem(values))
    return float((high - low) / 2)


def test_better_worse_and_neither() -> None:
    """The seeds' luck (PLAIN) is larger than the differences, and is taken out."""
    up, down, open_ = (0.03, 0.032, 0.028), (-0.05, -0.04, -0.045), (0.05, -0.05, 0.01)
    found = answer(results(sam=up, l2=down, r3f=open_))
    score, brier = found[:2]
    assert score.startswith("Score × 100, 2 tasks, 3 seeds: ")
    assert f"better than the plain model: sam (+3.0 ± {100 * half(up):.1f})" in score
    assert f"worse than the plain model: l2 (−4.5 ± {100 * half(down):.1f})" in score
    assert f"not told apart from it: r3f (+0.3 ± {100 * half(open_):.1f})" in score
    assert "not adjusted for the number of methods" in score
    # less of the Brier score is better
    assert f"better than the plain model: sam (−0.030 ± {half(up):.3f})" in brier
    assert "worse than the plain model: l2 (+0.045" in brier


def test_many_and_zero() -> None:
    names = ("l2", "sam", "r3f", "tapt", "fisher")
    changes = {name: (0.01 * i, -0.01 * i, 0.0001) for i, name in enumerate(names)}
    text = answer(results(**changes))[0]
    assert "not told apart from the plain model: 5 methods, the largest difference" in text
    assert "(+0.0 ± 0.0)" in answer(results(l2=(-1e-6, 0.0, 1e-6)))[0]


def test_fewer_seeds_are_said() -> None:
    score = answer(results(sam=(0.03, 0.032, 0.028), l2=(0.05, 0.05)))[0]
    assert score.startswith("Score × 100, 2 tasks, 3 seeds: ")
    assert re.search(r"sam \(\+3.0 ± [\d.]+\), l2 \(\+5.0 ± 0.0, 2 seeds\)", score)


def test_costs_and_a_single_seed() -> None:
    one = [
        record("none", "a", 0, 0.5, seconds={"processor": 10.0}),
        record("sam", "a", 0, 0.6, seconds={"processor": 21.0}),
        record("l2", "a", 0, 0.6, seconds={"processor": 11.0}),
    ]
    found = answer(Results.of(one))
    assert (
        "One seed cannot tell a difference from chance." in found[0] and "sam (+10.0)" in found[0]
    )
    assert found[-1] == "Training took 1.1 (l2) to 2.1 (sam) times the plain one's processor time."
    assert answer(Results.of(one[1:])) == [] == answer(Results.of(one[:1]))


def test_forests() -> None:
    made = results(sam=(0.1, 0.1, 0.1), l2=(0.0, 0.1, 0.2))
    pictures = forests(made, styles_of(made.methods))
    assert [picture.caption.split(":")[0] for picture in pictures] == [
        *("a, score × 100", "b, score × 100", "a, Brier score", "b, Brier score"),
    ]
    assert "better to the right" in pictures[0].caption
    assert "better to the left" in pictures[2].caption
    assert "95 % interval" in pictures[0].caption
    alone = forests(results(sam=(0.1,)), styles_of(["sam"]))
    assert alone[0].caption == "a, score × 100: the one seed's difference; better to the right."


def test_long_names_leave_room_for_the_differences() -> None:
    """The methods' names are broken into lines: the panel keeps at least half of the width."""
    name = "fisher,directions=1,along=noise,smoothing=0.3,strength=3"
    assert wrapped(name).splitlines() == [
        *("fisher,directions=1,", "along=noise,smoothing=0.3,", "strength=3"),
    ]
    assert wrapped("none, best epoch by NLL") == "none, best epoch by NLL"
    with patch.object(figures, "to_png", lambda figure, scale: figure):
        drawn = forest_figure({name: (1.0, 0.5)}, "score, difference", styles_of([name]))
    drawn.canvas.draw()
    assert drawn.axes[0].get_position().width > 0.5


@pytest.mark.parametrize("half_width", [0.5, math.nan])
def test_a_forest_shows_every_method(half_width: float) -> None:
    from python_tests.evaluation.test_report import colours_of

    names = [f"method {i}" for i in range(12)]
    styles = styles_of(names)
    png = forest_figure({n: (i - 6.0, half_width) for i, n in enumerate(names)}, "x", styles)
    assert {style["color"] for style in styles.values()} <= colours_of(png)
