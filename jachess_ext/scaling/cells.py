"""Cells of csv files and DataFrames: numbers and sizes as people write them."""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .predictive import Array
from .runs import TableError, shown

MISSING = ("", "-", "–", "—", "nan", "na", "n/a", "#n/a", "<na>", "null", "none")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_SIZE = re.compile(
    r"(?:(?:n|d|size|rows|samples|examples)\s*=\s*)?"
    r"(?P<number>\d{1,3}(?:(?P<mark>[., _'’])\d{3})(?:(?P=mark)\d{3})*"
    r"|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
    r"\s*(?P<unit>[kmb]?)\s*(?:(?:training )?(?:rows|samples|examples|instances|sentences))?",
    re.IGNORECASE,
)
_WITH_COMMA = re.compile(r"-?\d+,\d+ ?%?")
_WITH_POINT = re.compile(r"-?(?:0?\.\d+|\d+\.(?!\d{3}$)\d+) ?%?")  # and not 1.000
_SPACES = str.maketrans("\u00a0\u2009\u202f", "   ")
_COMMA_FOR_POINT = str.maketrans(",.", ".,")


def parse_size(value: Any) -> float:
    """Return a number of training examples (or parameters) as people write them.

    1000, 1000.0, "1e3", "1k", "1,000", "1 000", "1_000", "n=1000" and "1k rows" are the same; k, m
    and b stand for thousands, millions and billions.

    Raises:
        TableError: it is no such number, or "1.000", which may mean 1 or 1000.
    """
    size = math.nan
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip().translate(_SPACES))
        if match is not None:
            number, mark = match["number"], match["mark"]
            if mark is not None and number[0] != "0":
                whole = number.replace(mark, "")
                if mark == "." and number.count(".") == 1:
                    raise TableError(
                        f"{shown(value.strip())} may mean {number.split('.')[0]} or {whole}; "
                        "write it without a point"
                    )
                number = whole
            with suppress(ValueError):  # 0,125
                size = float(number) * _UNITS[match["unit"].lower()]
    elif isinstance(value, Real) and not isinstance(value, bool):
        size = float(value)
    if not 0 <= size < math.inf:
        raise TableError(
            f"{shown(value)} is no number of training examples; expected one such as 1000, 1k, "
            "1,000 or 2M"
        )
    return size


@dataclass(frozen=True)
class Grid:
    """Columns of cells as they were read.

    Attributes:
        what: the table's name in errors.
        labels: the columns' names.
        headers: the same as they were, perhaps numbers.
        columns: their cells.
        index: names of the rows, where the columns need not hold them.
        comma: whether a comma is the decimal mark and a point marks thousands.
    """

    what: str
    labels: Sequence[str]
    headers: Sequence[Any]
    columns: Sequence[Sequence[Any]]
    index: Sequence[Any] | None = None
    comma: bool = False

    def keep(self, wanted: Callable[[int], bool]) -> Grid:
        """Return the columns at the places that are wanted."""
        places = [place for place in range(len(self.labels)) if wanted(place)]
        return replace(
            self,
            labels=[self.labels[place] for place in places],
            headers=[self.headers[place] for place in places],
            columns=[self.columns[place] for place in places],
        )

    def rows(self, rows: Sequence[int]) -> Grid:
        """Return these rows."""
        columns = [[column[row] for row in rows] for column in self.columns]
        index = None if self.index is None else [self.index[row] for row in rows]
        return replace(self, columns=columns, index=index)

    def place(self, given: str | None, known: Sequence[str]) -> int | None:
        """Return where the column `given` is, or the one that has a known name.

        Raises:
            TableError: there is no such column, or more than one.
        """
        if given is not None:
            if given not in self.labels:
                raise TableError(
                    f"{self.what} has no column {shown(given)}; it has {listed(self.labels)}"
                )
            if list(self.labels).count(given) > 1:
                raise TableError(
                    f"{self.what} has the column {shown(given)} twice; expected names of which "
                    "each stands once: rename one"
                )
            return list(self.labels).index(given)
        found = [place for place, label in enumerate(self.labels) if label.lower() in known]
        return found[0] if found else None

    def texts(self, place: int) -> list[str]:
        """Return the cells of a column as text."""
        return [str(cell).strip() for cell in self.columns[place]]

    def size(self, value: Any) -> float:
        """Return what `parse_size` reads of a cell or a column's name."""
        swapped = self.comma and isinstance(value, str)
        return parse_size(value.translate(_COMMA_FOR_POINT) if swapped else value)

    def number(self, cell: Any) -> float:
        """Return a cell as a number, NaN where it is empty; ValueError where it is none."""
        if not isinstance(cell, str):
            if isinstance(cell, (bool, np.bool_)):
                raise ValueError("a truth value")
            return math.nan if cell is None or str(cell) == "<NA>" else float(cell)
        text = cell.strip().removesuffix("%").rstrip()
        if text.lower() in MISSING:
            return math.nan
        if "_" in text:
            raise ValueError("not a number as tables write it")
        return float(text.translate(_COMMA_FOR_POINT) if self.comma else text)

    def numeric(self, place: int) -> bool:
        """Return whether a column holds numbers, and nothing but numbers and empty cells."""
        try:
            values = [self.number(cell) for cell in self.columns[place]]
        except (TypeError, ValueError):
            return False
        return not all(map(math.isnan, values))

    def empty(self, place: int) -> bool:
        """Return whether every cell of a column is empty."""
        return all(text.lower() in MISSING for text in self.texts(place))

    def numbers(self, place: int, names: Sequence[str]) -> Array:
        """Return a column's cells as numbers; empty ones as NaN.

        Raises:
            TableError: a cell that is none; the error says of which of the `names`.
        """
        values = []
        for cell, name in zip(self.columns[place], names, strict=True):
            try:
                values.append(self.number(cell))
            except (TypeError, ValueError):
                raise TableError(
                    f"{shown(cell)} in column {shown(self.labels[place])} of {shown(name)} is "
                    "no number"
                ) from None
        return np.array(values)

    def per_cent(self, places: Sequence[int]) -> bool:
        """Return whether the cells are written with a per cent sign.

        Raises:
            TableError: some are and others are not.
        """
        cells = [text for place in places for text in self.texts(place)]
        signs = {text.endswith("%") for text in cells if text.lower() not in MISSING}
        if len(signs) > 1:
            raise TableError(f"{self.what} has numbers with and without a per cent sign")
        return signs == {True}


def listed(labels: Sequence[str], most: int = 10) -> str:
    """Return names quoted, of many the first."""
    return ", ".join(map(shown, labels[:most])) + (", …" if len(labels) > most else "")


def read_grid(source: Any) -> Grid:
    """Return the cells of a csv file or a DataFrame; errors are those of `read_table`."""
    if isinstance(source, (str, PathLike)):
        return _from_csv(Path(source))
    if hasattr(source, "columns") and hasattr(source, "index"):
        return _from_frame(source)
    raise TableError(
        f"the table is {type(source).__name__}; expected a csv file's path or a pandas DataFrame"
    )


def _from_csv(path: Path) -> Grid:
    if path.is_dir():
        raise TableError(f"{path} is a folder; jx.scaling.read_runs reads folders of runs")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path} cannot be read ({error}); expected a csv file in UTF-8") from None
    if not text.strip(' ,;\t\r\n"'):
        raise TableError(f"{path} is empty; expected a header and one line a model")
    try:
        rows, separator = _split(text)
    except csv.Error as error:
        raise TableError(f"{path} is not well-formed: {error}") from None
    labels = [cell.strip() for cell in rows[0][1]]
    for number, line in rows[1:]:
        if len(line) != len(labels):
            raise TableError(
                f"line {number} of {path} has {len(line)} cells where the header has "
                f"{len(labels)}; the file may be half written"
            )
    if text[-1] not in "\r\n":
        warnings.warn(
            f"{path} ends without a newline, as spreadsheets write it or as it is when cut short; "
            f"its last cell is read as {shown(rows[-1][1][-1].strip())}",
            stacklevel=2,
        )
    lines = [line for _, line in rows[1:]]
    columns = list(zip(*lines, strict=True)) or [()] * len(labels)
    cells = [cell.strip() for line in lines for cell in line]
    comma = separator != "," and any(_WITH_COMMA.fullmatch(cell) for cell in cells)
    comma = comma and not any(_WITH_POINT.fullmatch(cell) for cell in cells)
    return Grid(str(path), labels, labels, columns, None, comma)


def _split(text: str) -> tuple[list[tuple[int, list[str]]], str]:
    """Return the lines' numbers and cells, and the separator: tab, semicolon or comma.

    It is the first that splits every line into as many cells, two or more; if there is none, the
    one that splits the header into most.
    """
    read = {}
    for separator in ("\t", ";", ","):
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        read[separator] = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
        counts = {len(row) for _, row in read[separator]}
        if len(counts) == 1 and counts != {1}:
            return read[separator], separator
    separator = max(reversed(read), key=lambda mark: len(read[mark][0][1]))
    return read[separator], separator


def _from_frame(frame: Any) -> Grid:
    labels = [str(column).strip() for column in frame.columns]
    columns = [list(frame.iloc[:, place]) for place in range(len(labels))]
    index = list(frame.index)
    return Grid("the table", labels, list(frame.columns), columns, index)
