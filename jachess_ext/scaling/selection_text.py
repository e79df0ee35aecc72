"""The words and the plot of a selection: its ranking, its advice and its notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .._io import axes_or_new
from .._text import number, share
from .advice import NextRuns
from .loss_table import LossTable
from .metrics import chance_loss, from_loss, higher_is_better
from .predictive import Array
from .sheets import quote_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

_CHANCE_MARGIN = 0.02
"""Of ln L: a loss this near to that of guessing counts as guessing where its noise is unknown."""
_MOST_NAMES = 4
"""A longer list of models is told by its length."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line of text for each row of cells; the second column, the models, to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.rjust, str.ljust, *[str.rjust] * (len(widths) - 2)]
    lines = []
    for row in rows:
        cells = [f(cell, width) for f, cell, width in zip(align, row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def compares_ratios(metric: str | None) -> bool:
    """Return whether losses are compared by their ratio: neither scores nor logarithms are."""
    return metric is None or from_loss(metric, 1.0) == 1.0


def difference_text(metric: str | None, difference: float) -> str:
    """Return a difference of ln L, or of L where ratios do not count, as 3 % or 2 points."""
    is_score = metric is not None and higher_is_better(metric)
    with np.errstate(over="ignore"):
        text = share(max(difference if is_score else float(np.expm1(difference)), 0.001))
    points = "point" if text == "1 %" else "points"
    return text.replace("%", points) if is_score else text


def advice_text(
    shortlist: Sequence[str],
    count: int,
    regrets: Sequence[str],
    tolerance: str,
    price: float,
    next_runs: NextRuns | None,
) -> str:
    """Return the fewest models to train in full, the expected regret and the next runs as text.

    Args:
        shortlist: the fewest first models whose best is expected within the tolerance.
        count: all models.
        regrets: the expected regret of the first k, k = 1 … count.
        tolerance: see `Selection`.
        price: of training the shortlist in full, as a share of training all; NaN where unknown.
        next_runs: see `Selection.next_runs`.
    """
    first, *others = shortlist
    cost = "" if math.isnan(price) else f" costs {share(price)} of all {count}"
    if not others:
        cost = cost and f" (training it{cost})"
        text = f"{first} is expected within {regrets[0]} of the best{cost}"
        return f"{text}: no further run is needed."
    text = f"The best of {_names_text(shortlist, count)} is expected within "
    text += f"{regrets[len(others)]} of the best; training these {len(shortlist)} in full"
    text += cost or " would tell"
    if len(shortlist) == count:
        text = f"Only training all {count} in full is expected within {tolerance} of the best"
    text += f". {first} alone: within {regrets[0]}."
    if next_runs is None:
        return text
    out = count - len(next_runs.names)
    dropped = f"; the other {out} {'is' if out == 1 else 'are'} out" if out else ""
    price = next_runs.price
    cost = "" if math.isnan(price) else f" ({share(price)} of training all in full)"
    names = _names_text(next_runs.names, count)
    return f"{text} Before that, run {names} on {next_runs.size:,.0f}{cost}{dropped}."


def _names_text(names: Sequence[str], count: int) -> str:
    """Return "A, B and C", or how far many names go in the ranking of `count` models."""
    if len(names) > _MOST_NAMES:
        return f"all {count}" if len(names) == count else f"the first {len(names)}"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def order_note(table: LossTable, scores: Array, predicted: Array) -> str:
    """Return why a model is ranked before one with a better forecast; "" where none is."""
    order = np.argsort(scores, kind="stable")
    forecasts = predicted[order]
    lowest_after = np.minimum.accumulate(forecasts[::-1])[::-1]
    late = forecasts > 1.001 * lowest_after  # a difference that the printed digits show
    if not late.any():
        return ""
    first = int(late.argmax())
    pair = order[[first, first + int(forecasts[first:].argmin())]]

    def excess(high: float, low: float) -> float:
        return math.log(high / low) if compares_ratios(table.metric) else float(high - low)

    ahead, behind = (table.names[row] for row in pair)
    worse = difference_text(table.metric, excess(*predicted[pair]))
    text = f"{ahead} is ahead of {behind} though its forecast is {worse} worse"
    losses = table.losses[pair]
    common = np.flatnonzero(np.isfinite(losses).all(0) & (table.sizes > 0))
    if not len(common) or (lead := excess(*losses[::-1, common[-1]])) <= 0:
        return f"{text}."
    lead_text = difference_text(table.metric, lead)
    text = f"{text}: it leads by {lead_text} at {table.sizes[common[-1]]:,.0f}"
    return f"{text}, and last losses count as far as this table's own past speaks for them."


def chance_note(table: LossTable, classes: int | None) -> str:
    """Return which models are still at the level of guessing among the classes, "" for none."""
    level = None if classes is None else chance_loss(table.metric, classes)
    if level is None:
        return ""
    near = level * np.exp(-np.maximum(2 * table.last_noise, _CHANCE_MARGIN))
    names = [table.names[row] for row in np.flatnonzero(table.last_losses >= near)]
    text = f"Still at the level of guessing, {number(float(table.to_metric(level)))}"
    noise = "Leads among such models may be noise."
    return f"{text}: {quote_all(names)}. {noise}" if names else ""


def measured_note(table: LossTable, measured: Array) -> str:
    """Return the best of the losses at the target, which the forecasts did not read."""
    row = int(np.nanargmin(measured))
    return (
        f"The table holds losses at the target, which were not read: {table.names[row]} "
        f"has the best, {number(float(table.to_metric(measured[row])))}."
    )


def plot_selection(
    ax: Axes | None, table: LossTable, frame: DataFrame, target: float, title: str
) -> Axes:
    """Draw the losses of a table and the forecasts of a frame, see `Selection.plot`."""
    ax = axes_or_new(ax)
    losses = dict(zip(table.names, table.to_metric(table.trained_losses), strict=True))
    count = len(table.names)
    step = min(1.06, 1.6 ** (1 / count))
    for rank, row in enumerate(frame.head(count).itertuples()):
        (line,) = ax.plot(table.trained, losses[row.name], "o-", label=row.name)
        ends = [[row.predicted - row.low], [row.high - row.predicted]]
        bars = ends if np.isfinite(ends).all() else None
        x, color = target * step ** (rank - (count - 1) / 2), line.get_color()
        ax.errorbar(x, row.predicted, bars, fmt="D", color=color)
        if "measured" in frame:
            ax.plot(x, row.measured, "x", color=color)
    ax.set_xscale("log")
    if table.metric is None or not higher_is_better(table.metric):
        ax.set_yscale("log")
    ax.set_xlabel("training examples")
    ax.set_ylabel(table.label)
    ax.legend(title=title)
    return ax
