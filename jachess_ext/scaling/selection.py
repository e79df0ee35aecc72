"""What `select` returns: ranking, predictions, intervals, probabilities of being best, cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..evaluation.extras import require
from .arrays import Array
from .methods import Forecast
from .predictive import Student, check_level
from .registry import DEFAULT
from .table import LossTable

OPERATIONS = 6.0
"""Per parameter and token: 2 forward, 4 backward (Kaplan et al. 2020)."""


@dataclass(frozen=True)
class Selection:
    """Candidates as one method sees them from losses up to a budget.

    Attributes:
        method: its name.
        budget: the largest size used.
        target: the size predicted for.
    """

    method: str
    budget: float
    target: float
    _table: LossTable
    _forecast: Forecast
    _tokens: float
    _epochs: float

    @property
    def names(self) -> tuple[str, ...]:
        """The models in the table's order, [n]."""
        return self._table.names

    @property
    def scores(self) -> Array:
        """What the method ranks by, lower is better, [n] in the table's order.

        The predicted losses where it predicts any, but for blend: its choice is more cautious than
        its forecast, so that the first of its ranking need not have the lowest predicted loss.
        """
        return self._forecast.score

    @property
    def ranking(self) -> list[str]:
        """Names, best first; ties in the table's order."""
        return [self.names[place] for place in np.argsort(self.scores, kind="stable")]

    @property
    def predicted(self) -> Any:
        """Losses at the target: a pandas Series over names.

        subtuning and zeroshot predict that the loss stays what it is.

        Raises:
            ValueError: the method ranks without predicting a loss (modelsize, nlpmetrics).
            MissingExtra: pandas is not installed; `predicted_losses` needs none.
        """
        return require("pandas").Series(self.predicted_losses, list(self.names), name="predicted")

    @property
    def predicted_losses(self) -> Array:
        """`predicted` as an array, [n] in the table's order."""
        if self._forecast.predicted is None:
            raise ValueError(f"{self.method} ranks models and predicts no loss; see .scores")
        return self._forecast.predicted

    @property
    def forecasts(self) -> Array:
        """What PearCorr compares with the true losses, [n]: `predicted_losses`, else `scores`."""
        return self.scores if self._forecast.predicted is None else self._forecast.predicted

    def interval(self, level: float = 0.9) -> Any:
        """Where the loss measured at the target lies with probability `level`.

        Returns:
            A pandas DataFrame over names with the columns low and high.

        Raises:
            ValueError: a bad level, or a method without a distribution (see `has_intervals`).
            MissingExtra: pandas is not installed; `interval_ends` needs none.
        """
        low, high = self.interval_ends(level)
        frame = {"low": low, "high": high}
        return require("pandas").DataFrame(frame, index=list(self.names))

    def interval_ends(self, level: float = 0.9) -> tuple[Array, Array]:
        """`interval` as two arrays, [n] in the table's order; an upper end may be infinite."""
        check_level(level)
        low, high = self._known(self._forecast.predictive).interval(level)
        with np.errstate(over="ignore"):  # an end beyond the largest double is infinite
            return np.exp(low), np.exp(high)

    @property
    def has_intervals(self) -> bool:
        """Whether the method gives a distribution here; the others raise at interval, prob_best."""
        return self._forecast.predictive is not None

    @property
    def prob_best(self) -> Any:
        """Probability of having the lowest loss at the target: a pandas Series over names.

        It belongs to the ranking: for blend it is of the cautious distribution that ranks.

        Errors are taken as independent; what shifts all models alike changes nothing in truth but
        widens this, so the probabilities err on the side of doubt.

        Raises:
            ValueError: the method gives no distribution.
            MissingExtra: pandas is not installed; `best_probabilities` needs none.
        """
        return require("pandas").Series(self.best_probabilities, list(self.names), name="prob_best")

    @property
    def best_probabilities(self) -> Array:
        """`prob_best` as an array, [n] in the table's order."""
        return self._known(self._forecast.choosing).prob_lowest()

    @property
    def flops(self) -> float:
        """Operations spent on training all candidates for this, 6 N D an epoch.

        Raises:
            TableError: the table does not tell the models' sizes.
        """
        return self._flops(self._forecast.trained)

    @property
    def full_flops(self) -> float:
        """Operations of training every candidate on the target's data once (FullTuning)."""
        return self._flops(np.full(len(self.names), self.target))

    def _flops(self, examples: Array) -> float:
        """C ≈ 6 N D an epoch, of models trained on so many examples, [n]."""
        each = OPERATIONS * self._table.known_parameters() * examples
        return float((each * self._tokens * self._epochs).sum())

    @property
    def share(self) -> float:
        """Largest subset used, as a share of the target."""
        return self.budget / self.target

    def rows(self, level: float = 0.9) -> list[dict[str, Any]]:
        """A table as records, best first: rank, name, and what the method gives of score,
        predicted, low, high, prob_best."""
        columns: dict[str, Array] = {"score": self.scores}
        if self._forecast.predicted is not None:
            columns = {"predicted": self.predicted_losses}
        if self.has_intervals:
            columns["low"], columns["high"] = self.interval_ends(level)
            columns["prob_best"] = self.best_probabilities
        order = np.argsort(self.scores, kind="stable")
        return [
            {"rank": rank, "name": self.names[place]}
            | {name: float(column[place]) for name, column in columns.items()}
            for rank, place in enumerate(order, start=1)
        ]

    def _known(self, distribution: Student | None) -> Student:
        if distribution is None:
            raise ValueError(
                f"{self.method} gives no distribution here, so there are no intervals and no "
                f"probabilities; {DEFAULT} does, and laws with more sizes than parameters"
            )
        return distribution
