"""What the figures show is what the study holds, and every text in them can be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jachess_ext.selection_report import axes, figures
from jachess_ext.selection_report.history import of_table
from jachess_ext.selection_report.study import CandidateView, History, Step, Study, short_labels
from python_tests.selection_report import drawn, studies

LONG = tuple(f"organisation-{n}/a-model-with-a-very-long-name-{n}" for n in range(14))


@pytest.fixture(scope="module")
def study() -> Study:
    return studies.full_study()


def test_the_forecast_figure(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    (figure,) = drawn.figures_of(monkeypatch, lambda: figures.forecast_figure(study))
    (panel,) = figure.axes
    rows = study.candidates
    expected = [([one.predicted], [place]) for place, one in enumerate(rows)]
    assert drawn.lines(panel, "o") == expected
    assert drawn.lines(panel, "x") == [([one.truth], [place]) for place, one in enumerate(rows)]
    bars = [([one.low, one.high], [place, place]) for place, one in enumerate(rows)]
    assert drawn.lines(panel, "None") == bars
    assert [t.get_text() for t in panel.get_yticklabels()] == [one.label for one in rows]
    assert panel.get_ylim()[0] > panel.get_ylim()[1], "the best is on top"


def test_the_curves(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    (figure,) = drawn.figures_of(monkeypatch, lambda: figures.curves_figures(study))
    for panel, one in zip(figure.axes, study.candidates, strict=True):
        read, aside = drawn.lines(panel, "o")
        assert read[0] == [200.0, *one.sizes[1:]], "0 is drawn at half the smallest size"
        assert read[1] == list(one.losses)
        assert aside == (list(one.kept_aside[0]), list(one.kept_aside[1]))
        assert drawn.lines(panel, "D") == [([studies.TARGET], [one.predicted])]
        law, forecast, interval = drawn.lines(panel, "None")
        assert one.law is not None and one.forecast is not None
        assert law[1] == list(one.law.middle)
        assert forecast[0] == [one.sizes[-1], *one.forecast.sizes]
        assert forecast[1] == [one.losses[-1], *one.forecast.middle]
        assert interval == ([studies.TARGET] * 2, [one.low, one.high])
        (band,) = panel.collections
        edge = band.get_paths()[0].vertices
        assert {tuple(v) for v in edge} >= {
            (size, end)
            for ends in (one.forecast.low, one.forecast.high)
            for size, end in zip(one.forecast.sizes, ends, strict=True)
        }
        assert one.label in panel.get_title()


def test_all_panels_have_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    made = studies.full_study(LONG[:8])
    found = drawn.figures_of(monkeypatch, lambda: figures.curves_figures(made))
    panels = [panel for figure in found for panel in figure.axes if panel.get_visible()]
    assert [len(figure.axes) for figure in found] == [6, 2]
    assert len({panel.get_ylim() for panel in panels}) == 1
    assert len({panel.get_xlim() for panel in panels}) == 1
    low, high = panels[0].get_ylim()
    for one in made.candidates:
        assert low < min(one.low, *one.losses) and max(one.high, *one.losses) < high


def test_a_loss_before_fine_tuning_far_above_does_not_squash_the_rest(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = study.candidates[0]
    losses = np.append(1000.0, first.losses[1:])
    made = replace(study, candidates=[replace(first, losses=losses), *study.candidates[1:]])
    (figure,) = drawn.figures_of(monkeypatch, lambda: figures.curves_figures(made))
    top = figure.axes[0].get_ylim()[1]
    assert top < 10
    assert drawn.lines(figure.axes[0], "^") == [([200.0], [top])]
    assert drawn.lines(figure.axes[0], "o")[0][1] == list(losses[1:])
    assert not drawn.lines(figure.axes[1], "^")


def test_the_history(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    assert study.history is not None
    draw = lambda: figures.history_figure(study.history, "blend")  # noqa: E731
    (figure,) = drawn.figures_of(monkeypatch, draw)
    (panel,) = figure.axes
    steps = study.history.steps["blend"]
    line = ([100 * step.share for step in steps], [step.pear_corr for step in steps])
    assert line in drawn.lines(panel, "o")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    free = {"zeroshot (free)", "modelsize (free)"}
    assert free < set(names) and len(names) == len(study.history.steps)
    levels = [y[0] for _, y in drawn.lines(panel, "None")]
    assert levels == [study.history.steps[name][0].pear_corr for name in ("zeroshot", "modelsize")]


def test_a_history_without_parameters_is_over_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = replace(studies.table(), parameters=None)
    history = of_table(losses, "blend", studies.BUDGET, studies.TARGET, None)
    assert history is not None and "modelsize" not in history.steps
    draw = lambda: figures.history_figure(history, "blend")  # noqa: E731
    (figure,) = drawn.figures_of(monkeypatch, draw)
    assert "examples" in figure.axes[0].get_xlabel()
    across, up = drawn.lines(figure.axes[0], "o")[0]
    assert across == [step.budget for step in history.steps["blend"]]
    assert up[-1] == pytest.approx(100.0)


def test_the_kernels(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    assert study.kernels is not None
    (figure,) = drawn.figures_of(monkeypatch, lambda: figures.kernels_figure(study.kernels))
    points = next(iter(study.kernels.points.values()))
    norm, rank, drift, left = figure.axes
    across = [50.0, 100.0, 200.0, 400.0]
    assert drawn.lines(norm, "o")[0] == (across, [p.norm for p in points])
    assert drawn.lines(rank, "o")[0] == (across, [p.rank for p in points])
    known = [p for p in points if p.drift is not None]
    assert drawn.lines(drift, "o")[0] == ([50.0, 200.0, 400.0], [p.drift for p in known])
    predicted, measured = drawn.lines(left, "o")
    assert predicted == ([50.0, 200.0, 400.0], [p.predicted for p in known])
    assert measured == (across, [p.measured for p in points])


def test_intervals_without_an_end(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that leaves the target open: the band ends beyond the axis, the rest is drawn."""
    first = study.candidates[0]
    assert first.forecast is not None
    open_ended = np.full(len(first.forecast.sizes), np.inf)
    band = replace(first.forecast, low=1 / open_ended, high=open_ended)
    rows = [replace(first, forecast=band, low=None, high=None), *study.candidates[1:]]
    made = replace(study, candidates=rows)
    for figure in drawn.figures_of(monkeypatch, lambda: every_figure(made)):
        drawn.assert_legible(figure)
    (figure,) = drawn.figures_of(monkeypatch, lambda: figures.curves_figures(made))
    panel = figure.axes[0]
    edge = panel.collections[0].get_paths()[0].vertices[:, 1]
    assert np.isfinite(edge).all() and edge.max() > panel.get_ylim()[1]
    assert edge.min() < panel.get_ylim()[0]


def every_figure(study: Study) -> None:
    figures.forecast_figure(study)
    figures.curves_figures(study)
    if study.history is not None:
        figures.history_figure(study.history, study.method)
    if study.kernels is not None:
        figures.kernels_figure(study.kernels)


@pytest.mark.parametrize("names", [None, LONG, LONG[:2], LONG[:3]], ids=["6", "14", "2", "3"])
def test_no_text_lies_over_another(
    names: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = studies.full_study(names)
    for figure in drawn.figures_of(monkeypatch, lambda: every_figure(made)):
        drawn.assert_legible(figure)


def view(name: str, loss: float, **rest: Any) -> CandidateView:
    sizes = np.array([50.0, 100.0])
    none = (np.array([]), np.array([]))
    return CandidateView(
        name, name, None, sizes, np.array([loss, loss]), none, None, None, loss, **rest
    )


@pytest.mark.parametrize("scale", [1e-4, 1.0, 3e5])
def test_losses_that_hardly_differ(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [view(f"m{n}", scale * (1 + n / 1000), predicted=scale) for n in range(2)]
    steps = {"subtuning": [Step(50.0, 0.01, 100.0, 100.0)]}
    made = Study(
        *("t", "d", "subtuning", 200.0, 0.9, "loss", "nats", rows, None, ()), History(steps, False)
    )
    for figure in drawn.figures_of(monkeypatch, lambda: every_figure(made)):
        drawn.assert_legible(figure)


@pytest.mark.parametrize(
    "low, high", [(0.31, 0.33), (1.4, 2.4), (0.9, 5.2), (0.01, 300.0), (1e-9, 1e9), (7.0, 8.0)]
)
def test_a_few_round_numbers_within_the_axis(low: float, high: float) -> None:
    found = axes.round_numbers(low, high)
    assert 2 <= len(found) <= 8 and found == sorted(found)
    assert low <= found[0] and found[-1] <= high
    assert all(len(f"{value:.6g}") <= 6 for value in found)


def test_texts() -> None:
    assert axes.letters("$a$") == r"\$a\$"
    assert axes.letters("x" * 40, 11) == "xxxxx…xxxxx" and axes.letters("x" * 11, 11) == "x" * 11
    sizes = (200, 1600, 51200, 1638400, 2.5e9, 0.5)
    assert [axes.size_text(size) for size in sizes] == [
        "200",
        "1.6k",
        "51.2k",
        "1.64M",
        "2.5G",
        "0.5",
    ]
    shares = (0.0, 1e-5, 0.004, 0.314, 0.99, 0.9987, 1.0)
    assert [axes.share_text(p) for p in shares] == (
        ["0.0 %", "< 0.1 %", "0.4 %", "31 %", "99 %", "99.9 %", "100.0 %"]
    )


@pytest.mark.parametrize(
    "names, labels",
    [
        (["/tmp/zoo/bert", "/tmp/zoo/opt"], ["bert", "opt"]),
        (["/tmp/zoo/bert", "/tmp/other/bert"], ["zoo/bert", "other/bert"]),
        (["gpt2", "org/gpt2"], ["gpt2", "org/gpt2"]),
        (["org/a", "org/a/b"], ["a", "a/b"]),
        (["x/one"], ["one"]),
    ],
)
def test_labels_lose_the_shared_folder(names: list[str], labels: list[str]) -> None:
    assert short_labels(names) == labels
