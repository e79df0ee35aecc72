"""Cells of a table, and the numbers and sizes that they hold."""

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
"""What a table is read from: a file's path, or pandas' objects."""
MISSING = ("", "-", "–", "—", "nan", "na", "n/a", "#n/a", "<na>", "null", "none")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
SIZE_PATTERN = re.compile(
    r"(?:(?:n|d|size|rows|samples|examples)\s*=\s*)?"
    r"(?P<number>\d{1,3}(?:(?P<mark>[., _'’])\d{3})(?:(?P=mark)\d{3})*"
    r"|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
    r"\s*(?P<unit>[kmb]?)\s*"
    r"(?:(?:training )?(?:row|sample|example|instance|sentence|token)s|-?shots?)?",
    re.IGNORECASE,
)
_SHARE = re.compile(r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*(?P<sign>%?)", re.IGNORECASE)
_WITH_COMMA = re.compile(r"-?\d+,\d+ ?%?")
_DECIMAL = "; if its comma is a decimal one, say so"
_PER_CENT = re.compile(r"per[ _-]?cent|pct|%", re.IGNORECASE)
_SPREAD = "; ± may be a standard error, a deviation or an interval: keep the value alone"
_SPACES = str.maketrans("\u00a0\u2009\u202f", "   ")
_COMMA_FOR_POINT, _DECIMAL_COMMA = str.maketrans(",.", ".,"), str.maketrans(",", ".")


class DoubtfulSize(TableError):
    """A cell that may mean two sizes, or a share of the data."""


def is_missing(cell: object) -> bool:
    """Return whether a cell is empty or says so: "-", "n/a", …."""
    return str(cell).strip().lower() in MISSING


def parse_size(value: object) -> float:
    """Return a number of training examples (or parameters) as people write them.

    1000, 1000.0, "1e3", "1k", "1,000", "1 000", "1_000", "n=1000" and "1k rows" are the same; k, m
    and b stand for thousands, millions and billions.

    Raises:
        DoubtfulSize: "1.000", which may mean 1 or 1000, or a number that is no whole one: 0.25.
        TableError: it is no number of examples.
    """
    size = math.nan
    if isinstance(value, str):
        match = SIZE_PATTERN.fullmatch(value.strip().translate(_SPACES))
        if match is not None:
            number, mark = match["number"], match["mark"]
            if mark is not None and number[0] != "0":
                digits = number.replace(mark, "")
                # A size is a whole number, so the comma of "1,000" groups digits.  The point of
                # "1.000" may do so too, or be of a 1 printed as a float; two points can only group.
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
    """Ambiguities of a table, each with an argument that would resolve it.

    The reader goes on with these arguments, and raises all questions in one error at the end.
    """

    def __init__(self, ignore: Sequence[str]) -> None:
        self.texts: list[str] = []
        self.options: dict[str, Any] = {}
        self.ignored = [*ignore]  # so far

    def add(self, text: str, **options: Any) -> None:
        """Add a question, and the reader's arguments that would answer it.

        Where two questions suggest one argument, the first suggestion stands; lists of `ignore` are
        joined.
        """
        self.texts.append(text)
        self.options = options | self.options
        if "ignore" in options:
            self.ignored += options["ignore"]
            self.options["ignore"] = list(dict.fromkeys(self.ignored))


@dataclass(frozen=True)
class Sheet:
    """Columns of cells as they were read.

    Attributes:
        name: the table's name in errors.
        labels: the columns' names; "" of an index without one.
        headers: the same as they were, perhaps numbers.
        columns: their cells.
        comma: whether a comma is the decimal mark of text, and a point marks thousands.
        full: what sizes are shares of; None: they are examples.
    """

    name: str
    labels: Sequence[str]
    headers: Sequence[object]
    columns: Sequence[Sequence[object]]
    comma: bool = False
    full: int | None = None

    def keep_columns(self, mask: Sequence[bool]) -> Sheet:
        """Return the columns where the mask holds."""
        labels, headers = list(compress(self.labels, mask)), list(compress(self.headers, mask))
        columns = list(compress(self.columns, mask))
        return replace(self, labels=labels, headers=headers, columns=columns)

    def keep_rows(self, mask: Sequence[bool]) -> Sheet:
        """Return the rows where the mask holds."""
        return replace(self, columns=[list(compress(column, mask)) for column in self.columns])

    def index(self, label: str) -> int:
        """Return the index of the column of this name.

        Raises:
            TableError: there is none, or more than one.
        """
        if label not in self.labels:
            labels = quote_all(self.labels)
            raise TableError(f"{self.name} has no column {quote(label)}; it has {labels}")
        if list(self.labels).count(label) > 1:
            raise TableError(f"{self.name} has the column {quote(label)} twice; rename one")
        return list(self.labels).index(label)

    def texts(self, index: int) -> list[str]:
        """Return the cells of a column as text."""
        return [str(cell).strip() for cell in self.columns[index]]

    def size(self, value: object, label: str = "") -> float:
        """Return the number of examples of a cell in a column of this name, or of a header."""
        text = str(value).strip().translate(_DECIMAL_COMMA if self.comma else {})
        match = _SHARE.fullmatch(text)
        sign = match is not None and bool(match["sign"] or _PER_CENT.search(label))
        fraction = float(match["number"]) / (100 if sign else 1) if match else math.inf
        if self.full is None and match and (sign or 0 < fraction < 1):
            text = f"{quote(value)} is a share of the data: say of how many examples"
            raise DoubtfulSize(text, full="N")
        if self.full is None or match is None:
            fraction = self.parse_count(
                value
            )  # raises where it is no number at all, such as another name
        if self.full is not None and (match is None or fraction > 1):
            text = f"{quote(value)} is no share of the data"
            raise DoubtfulSize(f"{text}, from 0 to 1 or in per cent")
        return fraction * (self.full or 1)

    def are_sizes(self, index: int, doubtful: bool = True) -> bool:
        """Return whether all cells of a column are sizes, doubtful ones included or not."""
        for cell in self.columns[index]:
            try:
                self.size(cell)
            except TableError as error:
                if not (doubtful and isinstance(error, DoubtfulSize)):
                    return False
        return bool(self.columns[index])

    def parse_count(self, value: object) -> float:
        """Return `parse_size` of a cell or a column's name, with this table's decimal mark."""
        if self.comma and isinstance(value, str):
            value = value.translate(_COMMA_FOR_POINT)
        return parse_size(value)

    def parse_number(self, cell: object) -> float:
        """Return a cell as a number, NaN where it is empty; raise ValueError for anything else."""
        if not isinstance(cell, str):
            if isinstance(cell, (bool, np.bool_)):  # float(True) is 1.0
                raise ValueError("a truth value")
            missing = cell is None or str(cell) == "<NA>"
            return math.nan if missing else float(cast(SupportsFloat, cell))
        text = cell.strip().removesuffix("%").rstrip()
        if text.lower() in MISSING:
            return math.nan
        if "_" in text:  # float("1_5") is 15.0
            raise ValueError("not a number as tables write it")
        return float(text.translate(_COMMA_FOR_POINT) if self.comma else text)

    def are_numbers(self, index: int) -> bool:
        """Return whether a column holds a number, and otherwise only numbers and empty cells."""
        any_number = False
        for cell in self.columns[index]:
            try:
                any_number |= not math.isnan(self.parse_number(cell))
            except (TypeError, ValueError):
                if not _WITH_COMMA.fullmatch(str(cell).strip()):
                    return False
                any_number = True  # which `numbers` refuses, and says how it is read
        return any_number

    def are_counts(self, index: int) -> bool:
        """Return whether a column holds sizes such as 300M or 25%, and empty cells, only."""
        texts = [text for text in self.texts(index) if not is_missing(text)]
        return bool(texts) and all(SIZE_PATTERN.fullmatch(text.rstrip("% ")) for text in texts)

    def numbers(self, index: int, names: Sequence[str]) -> Array:
        """Return a column's cells as numbers; empty ones as NaN.

        Raises:
            TableError: a cell that is no number; the error tells its model, one of `names`.
        """
        values = []
        for cell, name in zip(self.columns[index], names, strict=True):
            try:
                values.append(self.parse_number(cell))
            except (TypeError, ValueError):
                text = str(cell).strip()
                thousand = re.fullmatch(r"[1-9]\d{0,2},\d{3}", text)
                comma = not (self.comma or thousand) and _WITH_COMMA.fullmatch(text)
                hint = _SPREAD if "±" in str(cell) or "+/-" in str(cell) else ""
                where = f"{quote(cell)} in column {quote(self.labels[index])} of {quote(name)}"
                hint, answer = (_DECIMAL, {"decimal": ","}) if comma else (hint, {})
                raise TableError(f"{where} is no number{hint}", **answer) from None
        return np.array(values)

    def has_percent_signs(self, indices: Sequence[int]) -> bool:
        """Return whether the cells are written with a per cent sign.

        Raises:
            TableError: some are and others are not.
        """
        cells = [text for index in indices for text in self.texts(index)]
        signs = {text.endswith("%") for text in cells if not is_missing(text)}
        if len(signs) > 1:
            raise TableError(f"{self.name} has numbers with and without a per cent sign")
        return signs == {True}


def quote_all(labels: Sequence[str], most: int = 10) -> str:
    """Return names in quotes; of many or of long ones the first."""
    text = ", ".join(map(quote, labels[:most])) + (", …" if len(labels) > most else "")
    return text if len(text) < 200 or most == 1 else quote_all(labels, most - 1)
