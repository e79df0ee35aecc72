"""Tables of losses over sizes, read from a csv file or a DataFrame and checked."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import numpy as np

from .predictive import Array, Index, Mask

NAME_COLUMNS = ("name", "model", "config name")
SIZE_COLUMN = "size"
_ZERO = " (an error rate of 0 has no logarithm; write half a test example, 0.5 / their number)"


class TableError(ValueError):
    """A table that cannot be used: what is wrong, and what was expected."""


@dataclass(frozen=True)
class LossTable:
    """Losses, a row for each model.

    Attributes:
        names: the models, [n], all different.
        sizes: training examples, increasing, [m]; the first may be 0.
        losses: [n, m]; NaN where the table has no number.
        parameters: N of every model, [n]; NaN where unknown, None without the column.

    Example:
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

    def up_to(self, budget: float) -> LossTable:
        """Return the columns of sizes up to the budget, every loss checked.

        Raises:
            TableError: a budget below the first size or above the last, or a loss up to it that is
                missing or not positive.
        """
        kept = self.sizes <= budget
        if not (kept & (self.sizes > 0)).any():
            raise TableError(
                f"the budget {budget:g} is below the smallest subset, {self.trained[0]:g}"
            )
        if budget > self.sizes[-1]:
            raise TableError(
                f"the budget {budget:g} is above the data: the largest size of the table is "
                f"{self.sizes[-1]:g}"
            )
        self._check(kept)
        return LossTable(self.names, self.sizes[kept], self.losses[:, kept], self.parameters)

    def rows(self, places: Index) -> LossTable:
        """Return the models at these rows."""
        names = tuple(self.names[place] for place in places)
        parameters = None if self.parameters is None else self.parameters[places]
        return LossTable(names, self.sizes, self.losses[places], parameters)

    def losses_at(self, size: float) -> Array:
        """Return the losses at a size, [n].

        Raises:
            TableError: no such column, or a loss in it that is missing or not positive.
        """
        kept = self.sizes == size
        if not kept.any():
            listed = ", ".join(f"{known:.0f}" for known in self.sizes)
            raise TableError(f"the table has no column {size:g}; it has {listed}")
        self._check(kept)
        return self.losses[:, kept][:, 0]

    @property
    def trained(self) -> Array:
        """The sizes above 0."""
        return self.sizes[self.sizes > 0]

    @property
    def trained_losses(self) -> Array:
        """Losses at the sizes above 0, [n, number of them]."""
        return self.losses[:, self.sizes > 0]

    def known_parameters(self) -> Array:
        """Return N of every model, [n].

        Raises:
            TableError: the column is missing, or a number in it.
        """
        if self.parameters is None:
            raise TableError(
                f"the table has no column '{SIZE_COLUMN}' with the models' numbers of parameters, "
                "which this needs"
            )
        bad = np.flatnonzero(~(np.isfinite(self.parameters) & (self.parameters > 0)))
        if len(bad):
            raise TableError(
                f"the number of parameters of {self.names[bad[0]]!r} is "
                f"{self.parameters[bad[0]]:g}; expected a positive number"
            )
        return self.parameters

    def _check(self, kept: Mask) -> None:
        try:
            check_losses(self.losses[:, kept], self.sizes[kept], names=self.names)
        except ValueError as error:
            raise TableError(str(error)) from None


def check_sizes(sizes: Array) -> None:
    """Raise ValueError for sizes that are negative, not finite or not strictly increasing."""
    usable = np.isfinite(sizes) & (sizes >= 0)
    if not usable.all():
        raise ValueError(
            f"sizes holds {sizes[~usable][0]:g}; expected numbers of training examples from 0 up"
        )
    falls = np.flatnonzero(np.diff(sizes) <= 0)
    if len(falls):
        first = falls[0]
        raise ValueError(
            f"sizes must increase strictly, but {sizes[first]:g} is followed by "
            f"{sizes[first + 1]:g}; sort them and keep each once"
        )


def check_losses(
    losses: Array,
    sizes: Array,
    counted: Mask | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Raise ValueError for a loss that is not a positive finite number, saying which."""
    bad = ~(np.isfinite(losses) & (losses > 0))
    if counted is not None:
        bad &= counted
    places = np.argwhere(bad)
    if len(places):
        row, column = places[0]
        who = f"curve {row}" if names is None else f"{names[row]!r}"
        raise ValueError(
            f"the loss of {who} at size {sizes[column]:g} is {losses[row, column]:g}; expected a "
            f"positive number{_ZERO if losses[row, column] == 0 else ''}"
        )


def read_table(source: Any, fewest: int = 2) -> LossTable:
    """Read a table from a csv file or a DataFrame; a LossTable is returned as it is.

    Columns whose name is a whole number are sizes; `size` holds numbers of parameters; others are
    ignored.  Models are named by the index of a DataFrame or by the first column of a csv file
    (a column called name, model or "config name" goes before both).

    Args:
        source: path, pandas DataFrame, or LossTable.
        fewest: models there must be.

    Raises:
        TableError: not readable, no size column, sizes that do not increase, too few models, a
            model named twice, a cell that is no number, or a line cut short.

    Example:
        >>> import pandas as pd
        >>> import jachess_ext as jx
        >>> frame = pd.DataFrame({100: [2.0, 2.1], 200: [1.5, 1.7]}, index=["a", "b"])
        >>> jx.scaling.read_table(frame).losses_at(200)
        array([1.5, 1.7])
    """
    if isinstance(source, LossTable):
        return source
    if isinstance(source, (str, PathLike)):
        return _from_csv(Path(source), fewest)
    if hasattr(source, "columns") and hasattr(source, "index"):
        header = [str(column).strip() for column in source.columns]
        columns = [tuple(source.iloc[:, place]) for place in range(len(header))]
        return _build("the table", header, columns, source.index, fewest)
    raise TableError(
        f"the table is {type(source).__name__}; expected a csv file's path or a pandas DataFrame"
    )


def _from_csv(path: Path, fewest: int) -> LossTable:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path} cannot be read ({error}); expected a csv file in UTF-8") from None
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise TableError(f"{path} is not well-formed: {error}") from None
    if not rows or not any(rows[0]):
        raise TableError(f"{path} is empty; expected a header and one line a model")
    header, lines = [cell.strip() for cell in rows[0]], rows[1:]
    for number, line in enumerate(lines, start=2):
        if line and len(line) != len(header):
            raise TableError(
                f"line {number} of {path} has {len(line)} cells where the header has "
                f"{len(header)}; the file may be half written"
            )
    if text[-1] not in "\r\n":
        raise TableError(
            f"{path} ends without a newline, so its last number may be cut short; end the file "
            "with a newline if it is whole"
        )
    columns = list(zip(*[line for line in lines if line], strict=True)) or [()] * len(header)
    return _build(str(path), header, columns, columns[0], fewest)


def _build(what: str, header: list[str], columns: list[Any], names: Any, fewest: int) -> LossTable:
    """`names`: those of the models where no column holds them."""
    named = (
        column for name, column in zip(header, columns, strict=True) if name.lower() in NAME_COLUMNS
    )
    names = tuple(str(name).strip() for name in next(named, names))
    if len(names) < fewest:
        raise TableError(f"{what} has {len(names)} models; expected {fewest} or more")
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise TableError(f"{what} has the model {shown(twice[0])} twice; expected one row a model")
    places = [place for place, name in enumerate(header) if name.isdecimal()]
    if not places:
        raise TableError(
            f"{what} has no column named by a number of training examples; it has "
            f"{', '.join(map(shown, header[:10]))}"
        )
    sizes = np.array([float(header[place]) for place in places])
    try:
        check_sizes(sizes)
    except ValueError as error:
        raise TableError(f"in the header of {what}, {error}") from None
    losses = np.stack([_numbers(columns[place], header[place], names) for place in places], -1)
    parameters = None
    if SIZE_COLUMN in header:
        parameters = _numbers(columns[header.index(SIZE_COLUMN)], SIZE_COLUMN, names)
    return LossTable(names, sizes, losses, parameters)


def _numbers(cells: Any, column: str, names: tuple[str, ...]) -> Array:
    """Return cells as numbers; empty ones as NaN."""
    values = []
    for cell, name in zip(cells, names, strict=True):
        text = cell.strip() if isinstance(cell, str) else cell
        try:
            values.append(math.nan if text is None or text == "" else float(text))
        except (TypeError, ValueError):
            raise TableError(
                f"{shown(cell)} in column {column!r} of {shown(name)} is no number"
            ) from None
    return np.array(values)
