"""Figures of the page: sharp on dense screens, legible on a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluation.extras import require
from ..evaluation.figures import SCALE, panels_on_a_grid, styles_of, to_png
from .axes import letters, log_size_axis, plain_log_axis, share_text, spread_of
from .study import CandidateView, History, KernelPoint, Kernels, Study

_WIDTH = 6.4  # inches; a phone shows them at some three fifths
_MEASURED, _FORECAST, _LAW, _TRUTH = "#222222", "#0072b2", "#999999", "#d55e00"
_FAR = 1.5  # times the highest of the others
_LETTERS = 13  # of a legend, an inch
PANELS = 6
"""Candidates in one picture of curves."""


def forecast_figure(study: Study) -> bytes:
    """Predicted loss at the target with its interval, a row a model, best on top."""
    rows = study.candidates
    height = 1.1 + 0.3 * len(rows)
    figure, (panel,) = panels_on_a_grid(1, 1, width=_WIDTH, height=height)
    values: list[float] = []
    for place, one in enumerate(rows):
        ends = [end for end in (one.low, one.high) if end is not None]
        if len(ends) == 2:
            panel.plot(ends, [place, place], color=_FORECAST, linewidth=5, alpha=0.35)
        if one.predicted is not None:
            panel.plot([one.predicted], [place], "o", color=_FORECAST, markersize=6)
        if one.truth is not None:
            panel.plot([one.truth], [place], "x", color=_TRUTH, markersize=7, markeredgewidth=2)
        values += [v for v in (*ends, one.predicted, one.truth) if v is not None]
    panel.set_yticks(range(len(rows)), [letters(one.label) for one in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.grid(axis="x", color="#dddddd")
    panel.set_axisbelow(True)
    panel.set_xlabel(f"{study.up} at {study.target:,.0f} examples")
    plain_log_axis(panel, "x", spread_of(values))
    keys = {"predicted": ("o", _FORECAST, "None")}
    if any(one.low is not None for one in rows):
        keys[f"{100 * study.level:g} % interval"] = ("", _FORECAST, "-")
    if any(one.truth is not None for one in rows):
        keys["measured"] = ("x", _TRUTH, "None")
    _legend(figure, keys)
    return to_png(figure, SCALE)


def curves_figures(study: Study) -> list[bytes]:
    """ln loss over ln examples, a panel a model, the same axes in all; `PANELS` in a picture."""
    limits = spread_of(_heights(study.candidates))
    return [
        _curves(study, study.candidates[first : first + PANELS], first, limits)
        for first in range(0, len(study.candidates), PANELS)
    ]


def _heights(candidates: Sequence[CandidateView]) -> list[float]:
    """What the axis of the curves must hold: not losses before fine-tuning far above the rest."""
    values: list[float] = []
    for one in candidates:
        values += [*one.losses[one.sizes > 0], *one.kept_aside[1]]
        values += [v for v in (one.predicted, one.low, one.high, one.truth) if v is not None]
    before = [float(one.losses[0]) for one in candidates if one.sizes[0] == 0]
    return values + [value for value in before if value <= _FAR * max(values)]


def _curves(
    study: Study, part: Sequence[CandidateView], first: int, limits: tuple[float, float]
) -> bytes:
    columns = min(2, len(part))
    rows = math.ceil(len(part) / columns)
    figure, panels = panels_on_a_grid(
        *(rows, columns), width=_WIDTH * columns / 2, height=0.9 + 2.25 * rows, sharey=True
    )
    sizes = np.concatenate([one.sizes for one in study.candidates])
    for panel in panels[len(part) :]:
        panel.set_visible(False)
    for place, (panel, one) in enumerate(zip(panels, part, strict=False)):
        _curve(panel, one, study.target, limits)
        title = letters(f"{first + place + 1}. {one.label}", 30)
        if one.prob_best is not None:
            title += f"\nP(best) {share_text(one.prob_best)}"
        panel.set_title(title, fontsize=9)
        log_size_axis(panel, sizes[sizes > 0].min(), study.target, (sizes == 0).any())
        plain_log_axis(panel, "y", limits)
        panel.tick_params(labelleft=True)
        panel.set_xlabel("training examples" if place + columns >= len(part) else "")
        panel.set_ylabel(study.up if place % columns == 0 else "")
    keys = {"read": ("o", _MEASURED, "None")}
    if any(len(one.kept_aside[0]) for one in part):
        keys["kept aside"] = ("o-hollow", _MEASURED, "None")
    if any(one.forecast is not None for one in part):
        keys[f"{study.method}, {100 * study.level:g} %"] = ("D", _FORECAST, "-")
    if any(one.law is not None for one in part):
        keys["law (Eq. 10)"] = ("", _LAW, "--")
    _legend(figure, keys)
    return to_png(figure, SCALE)


def _curve(panel: Any, one: CandidateView, target: float, limits: tuple[float, float]) -> None:
    bottom, top = limits
    shown = np.where(one.sizes > 0, one.sizes, one.sizes[one.sizes > 0].min() / 2)
    if one.law is not None:
        panel.plot(one.law.sizes, one.law.middle, "--", color=_LAW, linewidth=1.2)
    if one.forecast is not None:
        join = np.append(one.sizes[-1], one.forecast.sizes)
        panel.plot(join, np.append(one.losses[-1], one.forecast.middle), color=_FORECAST)
        if one.forecast.low is not None and one.forecast.high is not None:
            low, high = (
                np.append(one.losses[-1], np.clip(end, bottom / _FAR, top * _FAR))
                for end in (one.forecast.low, one.forecast.high)
            )
            panel.fill_between(join, low, high, color=_FORECAST, alpha=0.2, linewidth=0)
    inside = one.losses <= top
    panel.plot(shown[inside], one.losses[inside], "o", color=_MEASURED, markersize=4)
    for size in shown[~inside]:
        panel.plot([size], [top], "^", color=_MEASURED, markersize=5, clip_on=False)
    panel.plot(*one.kept_aside, "o", color=_MEASURED, markersize=4, markerfacecolor="white")
    if one.predicted is not None:
        panel.plot([target], [one.predicted], "D", color=_FORECAST, markersize=5)
        if one.low is not None and one.high is not None:
            panel.plot([target, target], [one.low, one.high], color=_FORECAST, linewidth=1.5)


def history_figure(history: History, method: str) -> bytes:
    """PearCorr over what it cost, a line a method; methods that cost nothing as level lines."""
    figure, (panel,) = panels_on_a_grid(1, 1, width=_WIDTH, height=4.4)
    priced = all(np.isfinite(step.share) for steps in history.steps.values() for step in steps)
    keys: dict[str, tuple[str, str, str]] = {}
    places: list[float] = []
    looks = styles_of(list(history.steps))
    for name, steps in history.steps.items():
        colour, marker = looks[name]["color"], looks[name]["marker"]
        heights = [step.pear_corr for step in steps]
        wide = 2.6 if name == method else 1.3
        if all(step.budget == 0 for step in steps):
            panel.axhline(heights[0], color=colour, linewidth=1.3, linestyle=":")
            keys[name + " (free)"] = ("", colour, ":")
            continue
        across = [100 * step.share if priced else step.budget for step in steps]
        places += across
        panel.plot(
            across, heights, color=colour, marker=marker, markersize=5, linewidth=wide, zorder=wide
        )
        keys[name] = (marker, colour, "-")
    plain_log_axis(panel, "x", spread_of(places))
    panel.set_xlabel(
        "FLOPs, % of FullTuning" if priced else "training examples of the largest subset"
    )
    panel.set_ylabel("PearCorr, %")
    panel.grid(color="#eeeeee")
    _legend(figure, keys)
    return to_png(figure, SCALE)


_KERNEL_PANELS = {
    "‖Θ‖": "norm",
    "effective rank of Θ": "rank",
    "drift ‖Θ − Θ₀‖ / ‖Θ₀‖": "drift",
    "residual left, of ‖r‖²": "predicted",
}


def kernels_figure(kernels: Kernels) -> bytes:
    """Norm, effective rank and drift of Θ over sizes, and F(Θ, t) beside the measured residual."""
    figure, panels = panels_on_a_grid(2, 2, width=_WIDTH, height=6.0)
    trained = [p.size for points in kernels.points.values() for p in points if p.size > 0]
    zero = any(p.size == 0 for points in kernels.points.values() for p in points)
    looks = styles_of(list(kernels.points))
    for panel, (title, name) in zip(panels, _KERNEL_PANELS.items(), strict=True):
        values: list[float] = []
        for label, points in kernels.points.items():
            style = {**looks[label], "markersize": 4}
            values += _line(panel, points, name, min(trained) / 2, **style)
            if name == "predicted":
                open_ = {**style, "linestyle": "None", "markerfacecolor": "white"}
                values += _line(panel, points, "measured", min(trained) / 2, **open_)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("training examples", fontsize=9)
        log_size_axis(panel, min(trained), max(trained), zero)
        if values and min(values) > 0 and name != "rank":
            plain_log_axis(panel, "y", spread_of(values))
    keys = {
        letters(label): (looks[label]["marker"], looks[label]["color"], "-")
        for label in kernels.points
    }
    _legend(figure, keys)
    return to_png(figure, SCALE)


def _line(
    panel: Any, points: Sequence[KernelPoint], name: str, zero: float, **style: Any
) -> list[float]:
    """Draws one quantity over sizes, size 0 at `zero`; returns what was drawn.

    Zeros have no place on a logarithmic axis: the drift at size 0, which is 0 by definition.
    """
    pairs = [(p.size or zero, getattr(p, name)) for p in points]
    kept = [(size, value) for size, value in pairs if value and np.isfinite(value)]
    if kept:
        panel.plot(*zip(*kept, strict=True), **style)
    return [value for _, value in kept]


def _legend(figure: Any, keys: Mapping[str, tuple[str, str, str]]) -> None:
    """Below the panels: name -> marker ("o-hollow" for an open circle), colour, line style."""
    line = require("matplotlib.lines").Line2D
    handles = []
    for marker, colour, style in keys.values():
        fill = {"markerfacecolor": "white"} if marker == "o-hollow" else {}
        handles.append(
            line([], [], color=colour, marker=marker.partition("-")[0], linestyle=style, **fill)
        )
    room = figure.get_figwidth() * _LETTERS
    columns = max(1, min(4, int(room // (max(map(len, keys)) + 8))))
    figure.legend(
        *(handles, list(keys)), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
