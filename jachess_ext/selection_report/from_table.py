"""The study of a table of losses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..scaling import LossTable, Selection, TableError, fit, select
from ..scaling.predictive import Array
from ..scaling.selection import METHODS
from . import history
from .study import Band, CandidateView, Spending, Study, short_labels

_STEPS = 6  # sizes between the budget and the target at which forecasts are drawn
_FINE = 60  # points of a law's curve


def study_of_table(
    table: LossTable,
    found: Selection,
    source: str,
    *,
    level: float = 0.9,
    references: Sequence[str] = (),
    tokens: float = 1.0,
    epochs: float = 1.0,
    gamma: int = 3,
    tau: float = 5.0,
) -> Study:
    """What the page shows of a selection from a table.

    Args:
        table: all that is known; losses beyond the selection's budget are shown as kept aside, and
            the loss at the target, where every model has one, as the truth.
        found: the selection.
        source: the table's name.
        level: of the intervals.
        references, tokens, epochs, gamma, tau: as they were given to `select`.
    """
    truth = _truth(table, found.target)
    walk: dict[str, Any] = {"gamma": gamma, "tau": tau}
    cost: dict[str, Any] = {"tokens": tokens, "epochs": epochs}
    settings = {
        "table": source,
        **{name: getattr(found, name) for name in ("method", "budget", "target")},
        "references": list(references),
        **walk,
        **cost,
    }
    return Study(
        title="Which model to fine-tune",
        data=f"Losses of {len(table.names)} models in {source}, read up to "
        f"{found.budget:,.0f} examples.",
        method=found.method,
        target=found.target,
        level=level,
        loss="loss",
        unit="",
        candidates=_candidates(table, found, truth, level, None if references else walk),
        stop=None,
        spending=_spending(table, found, cost),
        history=history.of_table(
            table, found.method, found.budget, found.target, truth, **walk, **cost
        ),
        settings=json.dumps(settings, indent=1, ensure_ascii=False),
    )


def _truth(table: LossTable, target: float) -> Array | None:
    if target not in table.sizes:
        return None
    try:
        return table.losses_at(target)
    except TableError:
        return None


def _candidates(
    table: LossTable,
    found: Selection,
    truth: Array | None,
    level: float,
    walk: dict[str, Any] | None,
) -> list[CandidateView]:
    """`walk`: gamma and tau; None where references moved the predictions at the target alone."""
    known = table.up_to(found.budget)
    labels = short_labels(table.names)
    forecasts: Sequence[Band | None] = [None] * len(labels)
    if walk is not None and METHODS[found.method].forecasts:
        forecasts = forecast_bands(known, found, level, walk)
    laws = law_bands(known, found.target)
    views = []
    known_rows = found.to_frame(level).to_dict("records")
    for row in known_rows:
        place = table.names.index(row["name"])
        parameters = np.nan if table.parameters is None else float(table.parameters[place])
        losses = table.losses[place]
        later = (table.sizes > found.budget) & np.isfinite(losses) & (losses > 0)
        views.append(
            CandidateView(
                name=row["name"],
                label=labels[place],
                parameters=parameters if np.isfinite(parameters) else None,
                sizes=known.sizes,
                losses=known.losses[place],
                kept_aside=(table.sizes[later], losses[later]),
                forecast=forecasts[place],
                law=laws[place],
                score=float(found.scores[place]),
                **{
                    key: None if np.isnan(row[key]) else row[key]
                    for key in ("predicted", "low", "high", "prob_best")
                },
                truth=None if truth is None else float(truth[place]),
            )
        )
    return views


def forecast_bands(
    known: LossTable, found: Selection, level: float, walk: dict[str, Any]
) -> Sequence[Band | None]:
    """The method's own predictions between the budget and the target, one band a model."""
    sizes = np.geomspace(found.budget, found.target, _STEPS + 1)[1:-1]
    made = [select(known, found.budget, float(size), found.method, **walk) for size in sizes]
    made.append(found)
    sizes = np.append(sizes, found.target)
    middle = np.stack([one.predicted_losses for one in made], -1)
    if not all(one.has_intervals for one in made):
        return [Band(sizes, row) for row in middle]
    low, high = np.stack([one.interval_ends(level) for one in made], -1)
    return [Band(sizes, *rows) for rows in zip(middle, low, high, strict=True)]


def law_bands(known: LossTable, target: float) -> Sequence[Band | None]:
    """LensLLM's law with F free through the losses, one band a model; None: too few sizes."""
    sizes = np.geomspace(known.trained[0], target, _FINE)
    try:
        fitted = fit(known.sizes, known.losses, "lensllm")
    except ValueError:
        return [None] * len(known.names)
    return [Band(sizes, row) for row in np.atleast_2d(fitted.predict(sizes))]


def _spending(table: LossTable, found: Selection, cost: dict[str, Any]) -> Sequence[Spending]:
    try:
        spent, full = found.flops, found.full_flops
    except TableError:
        return ()
    known = table.up_to(found.budget)
    sub = select(known, found.budget, found.target, "subtuning", **cost)
    return (
        Spending(f"this selection ({found.method})", spent, "all subsets it read"),
        Spending("SubTuning", sub.flops, f"every model on {found.budget:,.0f} examples alone"),
        Spending("FullTuning", full, f"every model on {found.target:,.0f} examples"),
    )
