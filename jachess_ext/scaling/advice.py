"""What a selection says in words: its table, what is tied, and the one run that would decide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .predictive import Array

if TYPE_CHECKING:
    from .selection import Selection

DASH = "–"
_SURE = 0.9  # probability of being the best that needs no further run
_GAIN = 0.02  # in that probability, the least that a run is advised for
_NAMED = 4  # models of those tied, at most


def number(value: float | None) -> str:
    """Return 0.2500, 1,500, 20,000; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def share(probability: float) -> str:
    """Return 0.314 as 31 %."""
    if math.isnan(probability):
        return DASH
    if 0 < probability < 0.001:
        return "< 0.1 %"
    return f"{100 * probability:.{0 if 0.01 <= probability <= 0.99 else 1}f} %"


def scientific(value: float) -> str:
    """Return 1.23 × 10¹⁵."""
    if not (math.isfinite(value) and value > 0):
        return f"{value:g}"
    mantissa, power = f"{value:.2e}".split("e")
    return f"{mantissa} × 10{str(int(power)).translate(_RAISED)}"


_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def ranking_rows(selection: Selection, level: float = 0.9) -> list[list[str]]:
    """Return the cells of the ranking as text: a header, then the models, best first.

    Args:
        selection: by any method.
        level: of the intervals.
    """
    table = selection.table
    columns = [["", *map(str, range(1, 1 + len(selection.names)))], ["model", *selection.ranking]]
    order = np.argsort(selection.scores, kind="stable")
    if selection.forecast.predicted is not None:
        shown = table.shown(selection.predicted_losses[order])
        columns.append([table.label, *map(number, shown)])
    else:
        columns.append(["score", *map(number, selection.scores[order])])
    if selection.has_intervals:
        ends = [table.shown(end[order]) for end in selection.interval_ends(level)]
        pairs = zip(np.minimum(*ends), np.maximum(*ends), strict=True)
        intervals = [" … ".join(map(number, pair)) for pair in pairs]
        columns.append([f"{100 * level:g} % interval", *intervals])
        columns.append(["P(best)", *map(share, selection.best_probabilities[order])])
    if np.isfinite(selection.costs).any():
        costs = map(selection.cost_number, selection.costs[order])
        columns.append([selection.cost_unit or "cost", *costs])
    return list(map(list, zip(*columns, strict=True)))


def table_text(selection: Selection, level: float = 0.9) -> str:
    """Return `ranking_rows` in lines below a head that says what was read."""
    rows = ranking_rows(selection, level)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place == 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    head = (
        f"{selection.method}: {len(selection.names)} models, sizes up to {selection.budget:,.0f}, "
        f"{100 * selection.share:.3g} % of the target {selection.target:,.0f}"
    )
    return "\n".join([head, *lines])


@dataclass(frozen=True)
class Run:
    """One run more that a selection could be told.

    Attributes:
        model: its name.
        rows: training examples, twice the largest size read or the target.
        cost: in the unit of `Selection.costs`; NaN where unknown.
        now: probability that the first of the ranking is the best.
        after: the same of the first of the ranking after the run, as expected before it.

    Example:
        >>> import jachess_ext as jx
        >>> run = jx.scaling.Run("bert-base-uncased", rows=800.0, cost=1e15, now=0.46, after=0.58)
        >>> run.after > run.now
        True
    """

    model: str
    rows: float
    cost: float
    now: float
    after: float


def next_run(selection: Selection) -> Run | None:
    """Return the run more that would decide best among the models that are tied.

    A run on twice the largest size shows where a model's loss goes up to a part of its error:
    errors apart (`predictive.apart`) are taken to grow as a random walk over doublings.

    Args:
        selection: by any method.

    Returns:
        None where the method gives no probabilities.
    """
    distribution = selection.forecast.apart
    if distribution is None:
        return None
    chances = selection.best_probabilities
    doublings = math.log2(selection.target / selection.budget)
    rows = min(2 * selection.budget, selection.target)
    runs = []
    for place in _tied(selection, chances)[:_NAMED]:
        noise = float(distribution.scale[place]) * math.sqrt(max(doublings - 1, 0.0))
        cost = float(selection.full_costs[place]) * rows / selection.target
        after = distribution.chance_after(place, noise)
        runs.append(Run(selection.names[place], rows, cost, float(chances.max()), after))
    return max(runs, key=lambda run: run.after)


def _tied(selection: Selection, chances: Array) -> list[int]:
    """Return the models with at least half the probability of the first, best first."""
    order = np.argsort(selection.scores, kind="stable").tolist()
    return [place for place in order if chances[place] >= chances[order[0]] / 2]


def advise(selection: Selection) -> str:
    """Return which models are tied, and the run that would decide best (`next_run`), in words.

    Args:
        selection: by any method; one without probabilities gets a sentence that says so.
    """
    run = selection.next_run
    if run is None:
        return f"{selection.method} gives no probabilities here; it says nothing of what is tied."
    chances = selection.best_probabilities
    tied = _tied(selection, chances)
    first = selection.names[tied[0]]
    if run.now >= _SURE:
        return f"{first} is the best with probability {share(run.now)}: no further run is needed."
    text = f"{first} leads with P(best) {share(run.now)}, and no other has half of that."
    if len(tied) > 1:
        named = tied[:_NAMED]
        names = _listed([selection.names[place] for place in named])
        more = f" and {len(tied) - len(named)} more" if len(tied) > len(named) else ""
        values = _listed([share(chances[place]) for place in named])
        text = f"{names}{more} are tied (P(best) {values})."
    if run.after < run.now + _GAIN:
        return (
            f"{text} No single run of them on {run.rows:,.0f} examples would tell: take the one "
            "that suits you in other ways, or train them in full."
        )
    price = f" ({selection.cost_text(run.cost)})" if math.isfinite(run.cost) and run.cost else ""
    return (
        f"{text} One run of {run.model} on {run.rows:,.0f} examples{price} would raise the "
        f"probability of choosing right from {share(run.now)} to {share(run.after)}."
    )


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
