"""Text and plot of a `Selection`: formatting of its ranking, its advice and its notes."""

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
"""Distance in ln L from the loss of guessing below which a model counts as guessing, even if the
noise of its loss is smaller or unknown."""
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
        text = share(max(difference if is_score else float(np.expm1(difference)), 0.001))
    unit = "point" if text == "1 %" else "points"
    return text.replace("%", unit) if is_score else text


def advice_text(
    shortlist: Sequence[str],
    count: int,
    regrets: Sequence[str],
    tolerance: str,
    price: float,
    next_runs: NextRuns | None,
) -> str:
    """Format which models to train in full, their expected regret, and the next runs.

    Args:
        shortlist: the shortest prefix of the ranking whose expected regret is within the tolerance.
        count: number of all models.
        regrets: text of the expected regret of the first k models, for k = 1 … count.
        tolerance: text of `Selection.tolerance`.
        price: cost of training the shortlist in full, divided by that of training all models in
            full; NaN if unknown.
        next_runs: the runs recommended before that, see `Selection.next_runs`.
    """
    first, *runners_up = shortlist
    cost = "" if math.isnan(price) else f" costs {share(price)} of all {count}"
    if not runners_up:
        cost = cost and f" (training it{cost})"
        text = f"{first} is expected within {regrets[0]} of the best{cost}"
        return f"{text}: no further run is needed."
    text = f"The best of {_names_text(shortlist, count)} is expected within "
    text += f"{regrets[-1 + len(shortlist)]} of the best; training these {len(shortlist)} in full"
    text += cost or " would tell"
    if len(shortlist) == count:
        text = f"Only training all {count} in full is expected within {tolerance} of the best"
    text += f". {first} alone: within {regrets[0]}."
    if next_runs is None:
        return text
    num_out = count - len(next_runs.names)
    dropped = f"; the other {num_out} {'is' if num_out == 1 else 'are'} out" if num_out else ""
    price = next_runs.price
    cost = "" if math.isnan(price) else f" ({share(price)} of training all in full)"
    names = _names_text(next_runs.names, count)
    return f"{text} Before that, run {names} on {next_runs.size:,.0f}{cost}{dropped}."


def _names_text(names: Sequence[str], count: int) -> str:
    """Return "A, B and C", or, if there are many names, "the first N" (or "all N").

    Args:
        names: the first models of a ranking.
        count: number of models in the ranking.
    """
    if len(names) > _MOST_NAMES:
        return f"all {count}" if len(names) == count else f"the first {len(names)}"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def order_note(table: LossTable, scores: Array, predicted: Array) -> str:
    """Explain why a model is ranked before one with a better forecast; "" if there is none.

    Args:
        table: the losses read.
        scores: what the models are ranked by, lower is better, [n].
        predicted: forecast losses at the target, [n].
    """
    order = np.argsort(scores, kind="stable")
    forecasts = predicted[order]
    lowest_after = np.minimum.accumulate(forecasts[::-1])[::-1]
    out_of_order = forecasts > 1.001 * lowest_after  # a difference that the printed digits show
    if not out_of_order.any():
        return ""
    first = int(out_of_order.argmax())
    pair = order[[first, first + int(forecasts[first:].argmin())]]

    def excess(high: float, low: float) -> float:
        return math.log(high / low) if compares_ratios(table.metric) else float(high - low)

    ahead, behind = (table.names[row] for row in pair)
    excess_text = difference_text(table.metric, excess(*predicted[pair]))
    text = f"{ahead} is ahead of {behind} though its forecast is {excess_text} worse"
    losses = table.losses[pair]
    common = np.flatnonzero(np.isfinite(losses).all(0) & (table.sizes > 0))
    if not len(common) or (lead := excess(*losses[::-1, common[-1]])) <= 0:
        return f"{text}."
    lead_text = difference_text(table.metric, lead)
    text = f"{text}: it leads by {lead_text} at {table.sizes[common[-1]]:,.0f}"
    return f"{text}, and last losses count as far as this table's own past speaks for them."


def chance_note(table: LossTable, classes: int | None) -> str:
    """List the models whose last loss is no better than guessing; "" if there are none.

    Args:
        table: the losses read.
        classes: number of classes; None if unknown, which returns "".
    """
    chance = None if classes is None else chance_loss(table.metric, classes)
    if chance is None:
        return ""
    threshold = chance * np.exp(-np.maximum(2 * table.last_noise, _CHANCE_MARGIN))
    names = [table.names[row] for row in np.flatnonzero(table.last_losses >= threshold)]
    text = f"Still at the level of guessing, {number(float(table.to_metric(chance)))}"
    noise = "Leads among such models may be noise."
    return f"{text}: {quote_all(names)}. {noise}" if names else ""


def measured_note(table: LossTable, measured: Array) -> str:
    """Name the model with the best measured loss at the target, which no forecast has used.

    Args:
        table: the losses of the table, for the names and the metric.
        measured: losses measured at the target, [n], NaN where there is none.
    """
    row = int(np.nanargmin(measured))
    return (
        f"The table holds losses at the target, which were not read: {table.names[row]} "
        f"has the best, {number(float(table.to_metric(measured[row])))}."
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
