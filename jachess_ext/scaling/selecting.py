"""`select`: which model will be best at the target, from losses up to a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .arrays import Array, Index
from .methods import METHODS, Forecast, Settings
from .predictive import Student
from .registry import DEFAULT, canonical
from .selection import Selection
from .table import LossTable, TableError, read_table

_REFERENCES = 3  # at least


def select(
    table: Any,
    budget: float,
    target: float,
    method: str = DEFAULT,
    *,
    references: Sequence[str] = (),
    gamma: int = 3,
    tau: float = 5.0,
    weights: Mapping[str, Any] | None = None,
    tokens: float = 1.0,
    epochs: float = 1.0,
) -> Selection:
    """Rank models by the loss they will have at the target.

    Only losses at sizes up to the budget are read, and those of the references at the target.

    Args:
        table: csv path, pandas DataFrame or `LossTable`, one row a model; see `read_table`.
        budget: training examples a model may be trained on; up to the table's largest size.
        target: training examples to predict for, above the budget.
        method: blend, lensllm, rectified, power, ats, subtuning, zeroshot, modelsize, nlpmetrics.
            lensllm and rectified read a column 0 where there is one, and zeroshot needs it;
            modelsize needs the column `size`.
        references: names of models (three or more) whose loss at the target is in the table and may
            be read: predictions, intervals and probabilities are calibrated on the errors made for
            them.  They stay among the candidates.
        gamma, tau: ats (Algorithm 1): points accepted unseen, and the deviation that stops.
        weights: for nlpmetrics, {name: state dict or weight matrices}.
        tokens, epochs: tokens an example and passes over every subset, for the FLOPs.

    Returns:
        A Selection.

    Raises:
        TableError: the table, or what of it the method needs, cannot be used.
        ValueError: an unknown method, a target not above the budget, or too few sizes.
    """
    method = canonical(method)
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known are {', '.join(METHODS)}")
    for name, value in (("budget", budget), ("target", target)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value}; expected a positive number of training examples")
    if target <= budget:
        raise ValueError(f"the target {target:g} is not above the budget {budget:g}")
    for name, value in (("tokens", tokens), ("epochs", epochs)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value}; expected a positive number")
    losses = read_table(table)
    known = losses.up_to(budget)
    settings = Settings(gamma, tau, weights or {})
    forecast = METHODS[method](known, float(target), settings)
    if references:
        forecast = _calibrated(forecast, losses, float(target), references, method)
    used = float(known.sizes[-1])
    return Selection(method, used, float(target), known, forecast, tokens, epochs)


def _calibrated(
    forecast: Forecast, losses: LossTable, target: float, references: Sequence[str], method: str
) -> Forecast:
    if forecast.predictive is None or forecast.choosing is None:
        raise ValueError(f"{method} gives no distribution here that references could calibrate")
    unknown = [name for name in references if name not in losses.names]
    if unknown:
        raise TableError(f"the reference {unknown[0]!r} is not in the table")
    rows = np.array([place for place, name in enumerate(losses.names) if name in references])
    truth = losses.rows(rows).losses_at(target)
    if len(rows) < _REFERENCES:
        raise ValueError(
            f"{len(rows)} reference models are too few to calibrate intervals; expected "
            f"{_REFERENCES} or more"
        )
    predictive = _moved(forecast.predictive, rows, truth)
    choosing = _moved(forecast.choosing, rows, truth)
    score, predicted = np.exp(choosing.location), np.exp(predictive.location)
    return Forecast(score, predicted, predictive, forecast.trained, choosing)


def _moved(predictive: Student, references: Index, truth: Array) -> Student:
    """The distribution whose bias and width are those the method had on the references.

    Standardised errors z = (ln true − location) / scale of exchangeable models have a common mean
    and deviation; with z̄ and s estimated from n references, a new model's z is
    z̄ + s √(1 + 1/n) t_{n−1} (exact where z is Gaussian).
    """
    count = len(references)
    z = (np.log(truth) - predictive.location[references]) / predictive.scale[references]
    spread = max(float(z.std(ddof=1)), 1e-6) * np.sqrt(1 + 1 / count)
    return Student(
        predictive.location + predictive.scale * z.mean(),
        predictive.scale * spread,
        np.full(len(predictive.location), count - 1.0),
    )


def sufficient_budget(
    table: Any, target: float, confidence: float, method: str = DEFAULT, **settings: Any
) -> Selection | None:
    """The selection at the smallest budget whose best model is best with the wanted probability.

    Args:
        table, target, method, settings: as for `select`.
        confidence: in (0, 1).

    Returns:
        None where no size of the table below the target suffices.

    Raises:
        TableError, ValueError: as `select`; a method without probabilities.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected a probability such as 0.9")
    losses: LossTable = read_table(table)
    budgets = [float(size) for size in losses.trained if size < target]
    if not budgets:
        raise TableError(f"the table has no size below the target {target:g}")
    largest = select(losses, budgets[-1], target, method, **settings)  # raises what is wrong
    largest.best_probabilities  # noqa: B018 - raises where the method has none
    for budget in budgets:
        try:
            found = select(losses, budget, target, method, **settings)
        except TableError:
            raise
        except ValueError:
            continue  # too few sizes yet: the largest budget was fine
        if found.has_intervals and found.best_probabilities.max() >= confidence:
            return found
    return None
