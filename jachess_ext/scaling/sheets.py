"""`Sheet`: the cells of a table, and their conversion to numbers and training set sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from numbers import Real
from os import PathLike
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias, cast

import numpy as np

from .predictive import Array
from .table_error import TableError, quote

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Source: TypeAlias = "str | PathLike[str] | DataFrame | Series"
"""Source of a table: the path of a file, or a pandas object."""
MISSING = ("", "-", "–", "—", "nan", "na", "n/a", "#n/a", "<na>", "null", "none", "tbd")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
SIZE_PATTERN = re.compile(
    r"(?:(?:n|d|size|rows|samples|examples)\s*=\s*)?"
    r"(?P<number>\d{1,3}(?:(?P<mark>[., _'’])\d{3})(?:(?P=mark)\d{3})*"
    r"|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
    r"\s*(?P<unit>[kmbt]?)\s*"
    r"(?:(?:training )?(?:row|sample|example|instance|sentence|token)s|-?shots?)?",
    re.IGNORECASE,
)
_SHARE = re.compile(r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*(?P<sign>%?)", re.IGNORECASE)
_WITH_COMMA = re.compile(r"-?\d+,\d+ ?%?")
_PER_CENT = re.compile(r"per[ _-]?cent|pct|%", re.IGNORECASE)
_SPACES = str.maketrans("\u00a0\u2009\u202f", "   ")
_COMMA_FOR_POINT, _DECIMAL_COMMA = str.maketrans(",.", ".,"), str.maketrans(",", ".")


class DoubtfulSize(TableError):
    """Raised for a cell that is ambiguous as a size: "1.000", or 0.25, a share of the data."""


def is_missing(cell: object) -> bool:
    """Return whether a cell is empty or holds a mark of a missing value, such as "-" or "n/a"."""
    return str(cell).strip().lower() in MISSING


def parse_size(value: object) -> float:
    """Parse a number of training examples (or parameters).

    1000, 1000.0, "1e3", "1k", "1,000", "1 000", "1_000", "n=1000" and "1k rows" are the same; k, m,
    b and t stand for thousands, millions, billions and trillions.

    Raises:
        DoubtfulSize: `value` is like "1.000", which may mean 1 or 1000, or not whole, like 0.25.
        TableError: `value` is not a number of examples.
    """
    size = math.nan
    if isinstance(value, str):
        match = SIZE_PATTERN.fullmatch(value.strip().translate(_SPACES))
        if match is not None:
            number, mark = match["number"], match["mark"]
            if mark is not None and number[0] != "0":
                digits = number.replace(mark, "")
                # A size is a whole number, so the comma of "1,000" groups digits.  The point of
                # "1.000" may group digits too, or be the decimal point of a 1 printed as a float;
                # two points can only group digits.
                if mark == "." and number.count(".") == 1:
                    text = f"{quote(value.strip())} may mean {number.split('.')[0]} or {digits}"
                    raise DoubtfulSize(f"{text}; write it without a point")
                number = digits
            with suppress(ValueError):  # 0,125
                size = float(number) * _UNITS[match["unit"].lower()]
    elif isinstance(value, Real) and not isinstance(value, bool):
        size = float(value)
    if not 0 <= size < math.inf:
        text = f"{quote(value)} is no number of training examples"
        raise TableError(f"{text}; expected one such as 1000, 1k, 1,000 or 2M")
    if size < 1000 and not math.isclose(size, round(size), rel_tol=1e-9):
        raise DoubtfulSize(f"{quote(value)} is no whole number of training examples")
    return size


class Questions:
    """Ambiguities of a table, each with an argument of `read_table` that would resolve it.

    The reader continues with these arguments, and reports all questions in one error at the end.

    Attributes:
        texts: the questions.
        options: the suggested arguments, by name.
        ignored: columns that the user, or a suggested argument, ignores.
    """

    def __init__(self, ignore: Sequence[str]) -> None:
        self.texts: list[str] = []
        self.options: dict[str, Any] = {}
        self.ignored = [*ignore]

    def add(self, text: str, **options: Any) -> None:
        """Add a question and the arguments of `read_table` that would resolve it.

        If two questions suggest the same argument, the first suggestion is kept; the lists for
        `ignore` are concatenated.
        """
        self.texts.append(text)
        self.options = options | self.options
        if "ignore" in options:
            self.ignored += options["ignore"]
            self.options["ignore"] = list(dict.fromkeys(self.ignored))


@dataclass(frozen=True)
class Sheet:
    """The columns of a table, before their cells are converted.

    Attributes:
        name: the name of the table in error messages.
        labels: names of the columns as text; "" for an index without a name.
        columns: the cells of each column.
        has_decimal_comma: whether numbers in text have a decimal comma, and points between
            thousands.
        full: number of all examples, if sizes are shares of it; None if sizes are numbers of
            examples.
    """

    name: str
    labels: Sequence[str]
    columns: Sequence[Sequence[object]]
    has_decimal_comma: bool = False
    full: int | None = None

    def keep_columns(self, mask: Sequence[bool]) -> Sheet:
        """Return the sheet with the columns where the mask is true."""
        labels, columns = list(compress(self.labels, mask)), list(compress(self.columns, mask))
        return replace(self, labels=labels, columns=columns)

    def keep_rows(self, mask: Sequence[bool]) -> Sheet:
        """Return the sheet with the rows where the mask is true."""
        return replace(self, columns=[list(compress(column, mask)) for column in self.columns])

    def index(self, label: str) -> int:
        """Return the index of the column named `label`.

        Raises:
            TableError: there is no such column, or more than one.
        """
        if label not in self.labels:
            labels = quote_all(self.labels)
            raise TableError(f"{self.name} has no column {quote(label)}; it has {labels}")
        if list(self.labels).count(label) > 1:
            raise TableError(f"{self.name} has the column {quote(label)} twice; rename one")
        return list(self.labels).index(label)

    def texts(self, index: int) -> list[str]:
        """Return the cells of the column at an index as stripped text."""
        return [str(cell).strip() for cell in self.columns[index]]

    def size(self, value: object, label: str = "") -> float:
        """Convert a cell or a column's name to a number of examples.

        Args:
            value: the cell or name; a share of the data is multiplied by `full`.
            label: name of the cell's column; per cents are shares, see `_PER_CENT`.

        Raises:
            DoubtfulSize: `value` is a share of the data and `full` is None, or `full` is set and
                `value` is not a share.
            TableError: `value` is not a size.
        """
        text = str(value).strip().translate(_DECIMAL_COMMA if self.has_decimal_comma else {})
        match = _SHARE.fullmatch(text)
        in_percent = match is not None and bool(match["sign"] or _PER_CENT.search(label))
        fraction = float(match["number"]) / (100 if in_percent else 1) if match else math.inf
        if self.full is None and match and (in_percent or 0 < fraction < 1):
            text = f"{quote(value)} is a share of the data: say of how many examples"
            raise DoubtfulSize(text, full="N")
        if self.full is None or match is None:
            fraction = self.parse_count(value)  # raises for text that is not a number
        if self.full is not None and (match is None or fraction > 1):
            text = f"{quote(value)} is no share of the data"
            raise DoubtfulSize(f"{text}, from 0 to 1 or in per cent")
        return fraction * (self.full or 1)

    def are_sizes(self, index: int, allow_doubtful: bool = True) -> bool:
        """Return whether a column has cells and all of them are sizes.

        Args:
            index: index of the column.
            allow_doubtful: whether a cell that raises DoubtfulSize counts as a size.
        """
        for cell in self.columns[index]:
            try:
                self.size(cell)
            except TableError as error:
                if not (allow_doubtful and isinstance(error, DoubtfulSize)):
                    return False
        return bool(self.columns[index])

    def parse_count(self, value: object) -> float:
        """Parse a cell or a column's name by `parse_size`, with this table's decimal mark."""
        if self.has_decimal_comma and isinstance(value, str):
            value = value.translate(_COMMA_FOR_POINT)
        return parse_size(value)

    def parse_number(self, cell: object) -> float:
        """Parse a cell as a number.

        Returns:
            The number, NaN for an empty cell.

        Raises:
            TypeError, ValueError: `cell` is neither a number nor empty.
        """
        if is_missing(cell):
            return math.nan
        if isinstance(cell, (bool, np.bool_)) or "_" in str(cell):  # float("1_5") is 15.0
            raise ValueError("not a number")
        if not isinstance(cell, str):
            return float(cast(SupportsFloat, cell))
        text = cell.strip().removesuffix("%").rstrip()
        return float(text.translate(_COMMA_FOR_POINT) if self.has_decimal_comma else text)

    def are_numbers(self, index: int) -> bool:
        """Return whether a column holds a number, and otherwise only numbers and empty cells."""
        has_number = False
        for cell in self.columns[index]:
            try:
                has_number |= not math.isnan(self.parse_number(cell))
            except (TypeError, ValueError):
                if not _WITH_COMMA.fullmatch(str(cell).strip()):
                    return False
                has_number = True  # `numbers` raises for it, with a suggestion
        return has_number

    def has_digits(self, index: int) -> bool:
        """Return whether a cell of a column begins as a number does."""
        return any(re.match(r"[-+.]?\d", text) for text in self.texts(index))

    def are_counts(self, index: int) -> bool:
        """Return whether a column holds only sizes such as 300M or 25%, and empty cells."""
        texts = [text for text in self.texts(index) if not is_missing(text)]
        return bool(texts) and all(SIZE_PATTERN.fullmatch(text.rstrip("% ")) for text in texts)

    def numbers(self, index: int, names: Sequence[str]) -> Array:
        """Return the cells of a column as numbers, [rows], NaN for empty cells.

        Args:
            index: index of the column.
            names: name of the model of each row, for the error message.

        Raises:
            TableError: a cell is neither a number nor empty.
        """
        values = []
        for cell, name in zip(self.columns[index], names, strict=True):
            try:
                values.append(self.parse_number(cell))
            except (TypeError, ValueError):
                text = str(cell).strip()

                unambiguous = self.has_decimal_comma or re.fullmatch(r"[1-9]\d{0,2},\d{3}", text)
                is_decimal_comma = not unambiguous and _WITH_COMMA.fullmatch(text)
                cell_text = f"{quote(cell)} in column {quote(self.labels[index])} of {quote(name)}"
                options = {"decimal": ","} if is_decimal_comma else {}
                hint = "; if its comma is a decimal one, say so" if options else ""
                raise TableError(f"{cell_text} is no number{hint}", **options) from None
        return np.array(values)

    def has_percent_signs(self, indices: Sequence[int]) -> bool:
        """Return whether the cells of the columns at `indices` are written with per cent signs.

        Raises:
            TableError: some cells have a per cent sign and others have none.
        """
        cells = [text for index in indices for text in self.texts(index)]
        signs = {text.endswith("%") for text in cells if not is_missing(text)}
        if len(signs) > 1:
            raise TableError(f"{self.name} has numbers with and without a per cent sign")
        return signs == {True}


def quote_all(labels: Sequence[str], most: int = 10) -> str:
    """Return the names in quotes as text; if they are many or long, only the first few.

    Args:
        labels: the names.
        most: largest number of names listed.
    """
    text = ", ".join(map(quote, labels[:most])) + (", …" if len(labels) > most else "")
    return text if len(text) < 200 or most == 1 else quote_all(labels, most - 1)
