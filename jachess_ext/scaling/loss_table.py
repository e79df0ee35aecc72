"""`LossTable`: the losses of several models at several training set sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .metrics import Values, chance_loss, from_loss, higher_is_better
from .predictive import Array, Index, Mask
from .table_error import TableError, quote

_CHANCE_MARGIN = 0.02
"""Distance in ln L from the loss of guessing below which a model counts as guessing, even if the
noise of its loss is smaller or unknown."""
_ZERO = " (an error rate of 0 has no logarithm; write half a test example, 0.5 / their number)"


@dataclass(frozen=True)
class LossTable:
    """The losses of n models at m training set sizes.

    Attributes:
        names: names of the models, [n], all different.
        sizes: numbers of training examples, increasing, [m]; 0 is the model before fine-tuning.
        losses: [n, m]; NaN where the table has no number.
        parameters: number of parameters of every model, [n], NaN where unknown; None if the table
            has no such column.
        metric: the metric that the losses were computed from, see `to_metric`; None if the table
            held losses.
        scale: 100 if the table's scores were in per cent, else 1.
        noise: standard errors of the losses, [n, m], over seeds and, for accuracies and error
            rates, from the number of test examples; NaN where unknown, None if all are unknown.
        left_out: rows of the file that were not read: how many, of how many, and which.

    Examples:
        >>> import numpy as np
        >>> import jachess_ext as jx
        >>> losses = np.array([[2.0, 1.5], [2.1, 1.7]])
        >>> table = jx.scaling.LossTable(("a", "b"), np.array([100.0, 200.0]), losses, None)
        >>> table.up_to(100).losses_at(100)
        array([2. , 2.1])
    """

    names: tuple[str, ...]
    sizes: Array
    losses: Array
    parameters: Array | None
    metric: str | None = None
    scale: float = 1.0
    noise: Array | None = None
    left_out: str = ""

    def to_metric(self, losses: Values) -> Values:
        """Convert losses to values of the table's metric, in per cent if its scores were."""
        return losses if self.metric is None else self.scale * from_loss(self.metric, losses)

    @property
    def label(self) -> str:
        """Name and unit of the values that `to_metric` returns."""
        return f"{self.metric or 'loss'}{' (per cent)' if self.scale == 100 else ''}"

    def up_to(self, budget: float) -> LossTable:
        """Return the table without sizes above the budget and sizes without a loss.

        Raises:
            TableError: the budget is below the first size above 0 or above the last size, there is
                no loss up to it, or one of the losses is not positive.
        """
        smallest, largest = self.trained[0], self.sizes[-1]
        if not smallest <= budget <= largest:
            text = f"the budget {budget:g} is outside the table's sizes"
            raise TableError(f"{text}, {smallest:g} to {largest:g}")
        mask = self.sizes <= budget
        self._check(mask, counted=~np.isnan(self.losses[:, mask]))
        mask &= ~np.isnan(self.losses).all(0)
        if not mask.any():
            raise TableError(f"no model has a loss at a size up to {budget:g}")
        noise = None if self.noise is None else self.noise[:, mask]
        return replace(self, sizes=self.sizes[mask], losses=self.losses[:, mask], noise=noise)

    def rows(self, index: Index) -> LossTable:
        """Return the table of the models at the rows `index`."""
        return replace(
            self,
            names=tuple(self.names[row] for row in index),
            losses=self.losses[index],
            parameters=None if self.parameters is None else self.parameters[index],
            noise=None if self.noise is None else self.noise[index],
        )

    def losses_at(self, size: float) -> Array:
        """Return the losses at one size, [n].

        Raises:
            IndexError: the table does not have this size.
            TableError: a loss there is missing or not positive.
        """
        column = self.sizes == size
        self._check(column)
        return self.losses[:, column][:, 0]

    @property
    def trained(self) -> Array:
        """The sizes above 0, [k]."""
        return self.sizes[self.sizes > 0]

    @property
    def trained_losses(self) -> Array:
        """The losses at the sizes above 0, [n, k]."""
        return self.losses[:, self.sizes > 0]

    @property
    def last_noise(self) -> Array:
        """The standard error of each model's ln L at its largest size, [n]; 0 where unknown."""
        if self.noise is None:
            return np.zeros(len(self.names))
        return np.nan_to_num(self.noise[self._last] / self.losses[self._last])

    def at_chance(self, classes: int | None) -> Mask:
        """Return a mask of the models whose last loss is no better than guessing, [n].

        Args:
            classes: number of classes to guess from.  All entries are False for None, and for a
                metric whose value for a guess is not known.
        """
        chance = None if classes is None else chance_loss(self.metric, classes)
        if chance is None:
            return np.zeros(len(self.names), dtype=bool)
        margin = np.maximum(2 * self.last_noise, _CHANCE_MARGIN)
        return self.last_losses >= chance * np.exp(-margin)

    @property
    def last_losses(self) -> Array:
        """Each model's loss at its largest size, [n]."""
        return self.losses[self._last]

    @property
    def _last(self) -> tuple[Index, Index]:
        """Row and column of each model's loss at its largest size, [n] each."""
        columns = [np.flatnonzero(np.isfinite(row))[-1] for row in self.losses]
        return np.arange(len(columns)), np.array(columns, dtype=np.intp)

    def known_parameters(self) -> Array:
        """Return the number of parameters of every model, [n].

        Raises:
            TableError: the table has no such column, or a number in it is missing or not positive.
        """
        if self.parameters is None:
            raise TableError("this needs numbers of parameters; the table has no column 'size'")
        for name, count in zip(self.names, self.parameters, strict=True):
            if not 0 < count < math.inf:
                text = f"the number of parameters of {quote(name)} is {count:g}"
                raise TableError(f"{text}; expected a positive number")
        return self.parameters

    def _check(self, columns: Mask, counted: Mask | bool = True) -> None:
        """Raise TableError for a loss in the columns that is not positive or, if counted, NaN."""
        losses, sizes = self.losses[:, columns], self.sizes[columns]
        perfect = np.argwhere(losses == 0)
        if len(perfect) and self.metric is not None and higher_is_better(self.metric):
            row, column = perfect[0]
            subject = f"the {self.metric} of {quote(self.names[row])} at size {sizes[column]:g}"
            hint = "give test_rows, the examples it was measured on; half of one is missing then"
            raise TableError(f"{subject} is the best there is; {hint}", test_rows="N")
        check_losses(losses, sizes, counted, self.names)


def check_sizes(sizes: Array) -> None:
    """Raise ValueError if the sizes are not finite, non-negative and strictly increasing."""
    is_usable = np.isfinite(sizes) & (np.diff(sizes, prepend=-1.0) > 0) & (sizes >= 0)
    if not is_usable.all():
        wrong = sizes[~is_usable][0]
        raise ValueError(f"sizes must increase strictly from 0 up, in numbers; {wrong:g} does not")


def check_losses(
    losses: Array, sizes: Array, counted: Mask | bool = True, names: Sequence[str] | None = None
) -> None:
    """Raise TableError for the first loss that is not a positive finite number.

    Args:
        losses: [n, m].
        sizes: [m].
        counted: which losses are checked, [n, m]; True for all.
        names: names of the curves for the message; None numbers them.
    """
    wrong_cells = np.argwhere(counted & ~(np.isfinite(losses) & (losses > 0)))
    if len(wrong_cells):
        row, column = wrong_cells[0]
        name, loss = f"curve {row}" if names is None else quote(names[row]), losses[row, column]
        text = f"the loss of {name} at size {sizes[column]:g} is {loss:g}"
        raise TableError(f"{text}; expected a positive number{_ZERO if loss == 0 else ''}")
