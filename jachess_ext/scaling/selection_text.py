"""Text and plot of a `Selection`: formatting of its ranking, its advice and its notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from .._io import axes_or_new
from .._text import number_text, percent
from .loss_table import LossTable
from .metrics import chance_loss, from_loss, higher_is_better
from .predictive import Array
from .sheets import quote_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

_MOST_NAMES = 4
"""Largest number of models listed by name; of a longer list only the length is printed."""


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of text with aligned columns.

    The second column, the names of the models, is aligned to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [str.rjust, str.ljust, *[str.rjust] * (len(widths) - 2)]
    lines = []
    for row in rows:
        cells = [f(cell, width) for f, cell, width in zip(justify, row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def compares_ratios(metric: str | None) -> bool:
    """Return whether losses of a metric are compared by ratio, rather than by difference.

    Scores and logarithms (of a perplexity) are compared by difference.
    """
    return metric is None or from_loss(metric, 1.0) == 1.0


def difference_text(metric: str | None, difference: float) -> str:
    """Format the difference between two models as "3 %" or "2 points".

    Args:
        metric: name of the metric; None for losses.
        difference: of ln L where `compares_ratios`, else of L.
    """
    is_score = metric is not None and higher_is_better(metric)
    with np.errstate(over="ignore"):
        text = percent(max(difference if is_score else float(np.expm1(difference)), 0.001))
    return text.replace("%", "point" if text == "1 %" else "points") if is_score else text


def count_text(count: float) -> str:
    """Return a number of examples or tokens as text: 1,638,400, 2.5B, 40T, 4e+17."""
    for power, letter in ((15, ""), (12, "T"), (9, "B")):
        if count >= 10**power:
            return f"{count / 10**power:.4g}{letter}" if letter else f"{count:.4g}"
    return f"{count:,.0f}"


def names_text(names: Sequence[str], count: int) -> str:
    """Return "A, B and C", or, if there are many names, "the first N" (or "all N").

    Args:
        names: the first models of a ranking.
        count: number of models in the ranking.
    """
    if len(names) > _MOST_NAMES:
        return f"all {count}" if len(names) == count else f"the first {len(names)}"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def chance_note(table: LossTable, classes: int | None) -> str:
    """List the models whose last loss is no better than guessing; "" if there are none.

    Args:
        table: the losses read.
        classes: number of classes; None if unknown, which returns "".
    """
    names = [table.names[row] for row in np.flatnonzero(table.at_chance(classes))]
    if classes is None or not names:
        return ""
    chance = cast(float, chance_loss(table.metric, classes))
    text = f"Still at the level of guessing, {number_text(float(table.to_metric(chance)))}"
    warning = "Leads among such models may be noise."
    return f"{text}: {quote_all(names)}. {warning}"


def measured_note(table: LossTable, measured: Array) -> str:
    """Name the model with the best measured loss at the target, which no forecast has used.

    Args:
        table: the losses of the table, for the names and the metric.
        measured: losses measured at the target, [n], NaN where there is none.
    """
    row = int(np.nanargmin(measured))
    return (
        f"The table holds losses at the target, which were not read: {table.names[row]} "
        f"has the best, {number_text(float(table.to_metric(measured[row])))}."
    )


def plot_selection(
    ax: Axes | None, table: LossTable, frame: DataFrame, target: float, title: str
) -> Axes:
    """Plot losses over sizes and the forecasts at the target, see `Selection.plot`.

    Args:
        ax: matplotlib axes; None creates new ones.
        table: the losses read.
        frame: `Selection.to_frame`.
        target: size of the forecasts.
        title: of the legend.
    """
    ax = axes_or_new(ax)
    losses = dict(zip(table.names, table.to_metric(table.trained_losses), strict=True))
    count = len(table.names)
    step = min(1.06, 1.6 ** (1 / count))
    for rank, row in enumerate(frame.head(count).itertuples()):
        (line,) = ax.plot(table.trained, losses[row.name], "o-", label=row.name)
        bars = [[row.predicted - row.low], [row.high - row.predicted]]
        yerr = bars if np.isfinite(bars).all() else None
        x, color = target * step ** (rank - (count - 1) / 2), line.get_color()
        ax.errorbar(x, row.predicted, yerr, fmt="D", color=color)
        if "measured" in frame:
            ax.plot(x, row.measured, "x", color=color)
    ax.set_xscale("log")
    if table.metric is None or not higher_is_better(table.metric):
        ax.set_yscale("log")
    ax.set_xlabel("training examples")
    ax.set_ylabel(table.label)
    ax.legend(title=title)
    return ax
