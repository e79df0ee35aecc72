"""Figures of a comparison as PNG, drawn by matplotlib's Agg canvas: no display, no global state."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .calibration import Reliability
from .extras import require

COLOURS = (
    *("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"),
    *("#56b4e9", "#7b3294", "#a6d854", "#e7298a", "#8c510a", "#1a1a80"),
)
MARKERS = "osD^vPX*<>ph"
Styles = Mapping[str, Mapping[str, Any]]
SCALE = 2.0
"""Of the figures of this module: sharp on dense screens; `report.Picture` wants to know it."""


def styles_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each name by its place; no two of up to 144 names share both.

    Made once for a report and given to all its figures, so that a method looks the same in each.
    """
    count = len(COLOURS)
    return {
        name: {"color": COLOURS[i % count], "marker": MARKERS[(i + i // count) % count]}
        for i, name in enumerate(names)
    }


def forest_figure(
    differences: Mapping[str, tuple[float, float]], across: str, styles: Styles
) -> bytes:
    """Differences from a reference: a row each method, a line at zero.

    Args:
        differences: method → (mean, half the interval's width; NaN draws the mean alone).
        across: label of the horizontal axis.
        styles: of all methods, from `styles_of`; they stand below one another in this order.
    """
    names = [name for name in styles if name in differences]
    labels = [wrapped(name) for name in names]
    lines = 1 + max(label.count("\n") for label in labels)
    height = 0.8 + (0.12 + 0.16 * lines) * len(names)
    figure, (panel,) = panels_in_a_row(1, height=height, width=4.6)
    panel.axvline(0, color="#999999", linewidth=1, linestyle="--")
    for row, name in enumerate(names):
        mean, half = differences[name]
        width = None if np.isnan(half) else [half]
        panel.errorbar([mean], [row], xerr=width, capsize=3, markersize=6, **styles[name])
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_yticks(range(len(names)), labels)
    panel.locator_params(axis="x", nbins=4)
    figure.supxlabel(across, fontsize="medium")  # the panel alone may be narrower than its label
    return to_png(figure, SCALE)


def wrapped(name: str, width: int = 26) -> str:
    """A long name in lines of about `width` characters, broken after commas and spaces."""
    lines = [""]
    for part in re.findall(r"[^ ,]*[ ,]*", name):
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def reliability_figure(diagrams: Mapping[str, Reliability], styles: Styles | None = None) -> bytes:
    """One panel a method: accuracy of the predicted class over its mean confidence, per bin.

    Bars show how many examples each bin holds, as a share of all.
    """
    columns = min(2, len(diagrams))  # more could not be read on a phone
    rows = -(-len(diagrams) // columns)
    figure, panels = panels_on_a_grid(rows, columns, width=3.0 * columns, height=3.1 * rows)
    looks = styles or styles_of(list(diagrams))
    for panel in panels[len(diagrams) :]:
        panel.set_visible(False)
    for panel, (name, diagram) in zip(panels, diagrams.items(), strict=False):
        colour = looks[name]["color"]
        share = diagram.counts / diagram.counts.sum()
        filled = diagram.counts > 0
        panel.bar(
            diagram.edges[:-1], share, np.diff(diagram.edges), align="edge", color=colour, alpha=0.2
        )
        panel.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
        panel.plot(
            diagram.confidence[filled], diagram.accuracy[filled], "o-", color=colour, markersize=4
        )
        panel.set(xlabel="confidence", xlim=(0, 1), ylim=(0, 1))
        panel.set_title(wrapped(name), fontsize="medium")
    for panel in panels[::columns]:
        panel.set_ylabel("accuracy (line), share (bars)")
    return to_png(figure, SCALE)


def score_curves_figure(
    places: Sequence[float],
    scores: Mapping[str, npt.ArrayLike],
    across: str,
    up: str,
    styles: Styles | None = None,
) -> bytes:
    """Scores of every method [seeds, D] over `places` [D]: mean over seeds, with its spread."""
    figure, (panel,) = panels_in_a_row(1, height=3.4, width=5.2)
    looks = styles or styles_of(list(scores))
    for name, values in scores.items():
        runs = np.asarray(values, dtype=np.float64)
        spread = runs.std(axis=0, ddof=1) if len(runs) > 1 else None
        panel.errorbar(
            places,
            runs.mean(axis=0),
            yerr=spread,
            label=wrapped(name),
            markersize=4,
            capsize=2,
            linewidth=1.5,
            **looks[name],
        )
    panel.set(xlabel=across, ylabel=up)
    if len(scores) > 5:  # below the curves, which it would cover
        lines = sum(1 + wrapped(name).count("\n") for name in scores)
        figure.set_size_inches(5.2, 3.6 + 0.1 * lines)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    else:
        panel.legend(frameon=False, fontsize="small")
    return to_png(figure, SCALE)


def norms_figure(
    jacobian: Mapping[str, npt.ArrayLike],
    hessian: Mapping[str, npt.ArrayLike],
    reference: str | None = None,
    styles: Styles | None = None,
) -> bytes:
    """‖J‖ and ‖H‖ of every layer, on logarithmic axes; each method [K], layers counted from 1.

    The entry named `reference` is drawn dashed and takes no method's colour.
    """
    figure, panels = panels_on_a_grid(2, 1, width=4.6, height=6.2)
    for panel, title, norms in zip(panels, ("‖J‖", "‖H‖"), (jacobian, hessian), strict=True):
        looks = styles or styles_of([name for name in norms if name != reference])
        for name, values in norms.items():
            heights = np.asarray(values, dtype=np.float64)
            layers = np.arange(1, len(heights) + 1)
            if name == reference:
                panel.plot(layers, heights, "x--", color="#999999", label=name, markersize=5)
                continue
            panel.plot(layers, heights, label=name, markersize=4, **looks[name])
        panel.set(title=title, xlabel="layer", yscale="log")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].legend(frameon=False, fontsize="small")
    return to_png(figure, SCALE)


def panels_in_a_row(panels: int, *, height: float, width: float = 3.0) -> tuple[Any, list[Any]]:
    """A figure and its axes; `width` (inches) is one panel's."""
    return panels_on_a_grid(1, panels, width=width * panels, height=height)


def panels_on_a_grid(
    rows: int, columns: int, *, width: float, height: float, **shared: Any
) -> tuple[Any, list[Any]]:
    """A figure of `width` × `height` inches and its axes, row by row; `shared`: sharex, sharey."""
    canvas = require("matplotlib.figure")
    figure = canvas.Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def to_png(figure: Any, scale: float = 1.0) -> bytes:
    """The figure with `scale` times 100 pixels an inch."""
    backend = require("matplotlib.backends.backend_agg")
    figure.set_dpi(100 * scale)
    buffer = io.BytesIO()
    backend.FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()
