"""Cells of tables as they lie: csv, markdown, JSON, workbooks, pandas; and numbers in them."""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias, cast

import numpy as np

from .._io import parse_json, read_text, require
from .predictive import Array
from .runs import TableError, shown

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Source: TypeAlias = "str | PathLike[str] | DataFrame | Series"
"""What a table is read from: a file's path, or pandas' objects."""
MISSING = ("", "-", "–", "—", "nan", "na", "n/a", "#n/a", "<na>", "null", "none")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_SIZE = re.compile(
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
    """A size that is a number, but may mean another one or a share."""


def is_missing(cell: object) -> bool:
    """Return whether a cell says that it holds nothing."""
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
        match = _SIZE.fullmatch(value.strip().translate(_SPACES))
        if match is not None:
            number, mark = match["number"], match["mark"]
            if mark is not None and number[0] != "0":
                whole = number.replace(mark, "")
                # A size is a whole number, so the comma of "1,000" groups digits.  The point of
                # "1.000" may do so too, or be of a 1 printed as a float; two points can only group.
                if mark == "." and number.count(".") == 1:
                    text = f"{shown(value.strip())} may mean {number.split('.')[0]} or {whole}"
                    raise DoubtfulSize(f"{text}; write it without a point")
                number = whole
            with suppress(ValueError):  # 0,125
                size = float(number) * _UNITS[match["unit"].lower()]
    elif isinstance(value, Real) and not isinstance(value, bool):
        size = float(value)
    if not 0 <= size < math.inf:
        text = f"{shown(value)} is no number of training examples"
        raise TableError(f"{text}; expected one such as 1000, 1k, 1,000 or 2M")
    if size < 1000 and not math.isclose(size, round(size), rel_tol=1e-9):
        raise DoubtfulSize(f"{shown(value)} is no whole number of training examples")
    return size


class Questions:
    """What a table leaves open, each with the argument that would answer it.

    Reading goes on as if every question were answered so, and all are asked at once at the end.
    """

    def __init__(self, ignore: Sequence[str]) -> None:
        self.texts: list[str] = []
        self.options: dict[str, Any] = {}
        self.ignored = [*ignore]  # so far

    def add(self, text: str, **options: Any) -> None:
        """Take a question; the first answer counts, and of `ignore` all add up."""
        self.texts.append(text)
        self.options = options | self.options
        if "ignore" in options:
            self.ignored += options["ignore"]
            self.options["ignore"] = list(dict.fromkeys(self.ignored))


@dataclass(frozen=True)
class Sheet:
    """Columns of cells as they were read.

    Attributes:
        what: the table's name in errors.
        labels: the columns' names; "" of an index without one.
        headers: the same as they were, perhaps numbers.
        columns: their cells.
        comma: whether a comma is the decimal mark of text, and a point marks thousands.
        full: what sizes are shares of; None: they are examples.
    """

    what: str
    labels: Sequence[str]
    headers: Sequence[object]
    columns: Sequence[Sequence[object]]
    comma: bool = False
    full: int | None = None

    def keep(self, mask: Sequence[bool]) -> Sheet:
        """Return the columns where the mask holds."""
        labels, headers = list(compress(self.labels, mask)), list(compress(self.headers, mask))
        columns = list(compress(self.columns, mask))
        return replace(self, labels=labels, headers=headers, columns=columns)

    def rows(self, mask: Sequence[bool]) -> Sheet:
        """Return the rows where the mask holds."""
        return replace(self, columns=[list(compress(column, mask)) for column in self.columns])

    def place(self, label: str) -> int:
        """Return where the column of this name is.

        Raises:
            TableError: there is none, or more than one.
        """
        if label not in self.labels:
            labels = listed(self.labels)
            raise TableError(f"{self.what} has no column {shown(label)}; it has {labels}")
        if list(self.labels).count(label) > 1:
            raise TableError(f"{self.what} has the column {shown(label)} twice; rename one")
        return list(self.labels).index(label)

    def texts(self, place: int) -> list[str]:
        """Return the cells of a column as text."""
        return [str(cell).strip() for cell in self.columns[place]]

    def size(self, value: object, label: str = "") -> float:
        """Return the examples that a cell, of a column of this name, or a header stands for."""
        text = str(value).strip().translate(_DECIMAL_COMMA if self.comma else {})
        share = _SHARE.fullmatch(text)
        sign = share is not None and bool(share["sign"] or _PER_CENT.search(label))
        part = float(share["number"]) / (100 if sign else 1) if share else math.inf
        if self.full is None and share and (sign or 0 < part < 1):
            text = f"{shown(value)} is a share of the data: say of how many examples"
            raise DoubtfulSize(text, full="N")
        if self.full is None or share is None:
            part = self.count(value)  # raises where it is no number at all, such as another name
        if self.full is not None and (share is None or part > 1):
            text = f"{shown(value)} is no share of the data"
            raise DoubtfulSize(f"{text}, from 0 to 1 or in per cent")
        return part * (self.full or 1)

    def sized(self, place: int, doubtful: bool = True) -> bool:
        """Return whether all cells of a column are sizes, or may be where doubtful ones count."""
        for cell in self.columns[place]:
            try:
                self.size(cell)
            except TableError as error:
                if not (doubtful and isinstance(error, DoubtfulSize)):
                    return False
        return bool(self.columns[place])

    def count(self, value: object) -> float:
        """Return what `parse_size` reads of a cell or a column's name."""
        if self.comma and isinstance(value, str):
            value = value.translate(_COMMA_FOR_POINT)
        return parse_size(value)

    def number(self, cell: object) -> float:
        """Return a cell as a number, NaN where it is empty; ValueError where it is none."""
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

    def numeric(self, place: int) -> bool:
        """Return whether a column holds numbers, and nothing but numbers and empty cells."""
        any_number = False
        for cell in self.columns[place]:
            try:
                any_number |= not math.isnan(self.number(cell))
            except (TypeError, ValueError):
                if not _WITH_COMMA.fullmatch(str(cell).strip()):
                    return False
                any_number = True  # which `numbers` refuses, and says how it is read
        return any_number

    def counts(self, place: int) -> bool:
        """Return whether a column holds sizes, such as 300M or 25%, and empty cells alone."""
        texts = [text for text in self.texts(place) if not is_missing(text)]
        return bool(texts) and all(_SIZE.fullmatch(text.rstrip("% ")) for text in texts)

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
                text = str(cell).strip()
                thousand = re.fullmatch(r"[1-9]\d{0,2},\d{3}", text)
                comma = not (self.comma or thousand) and _WITH_COMMA.fullmatch(text)
                hint = _SPREAD if "±" in str(cell) or "+/-" in str(cell) else ""
                where = f"{shown(cell)} in column {shown(self.labels[place])} of {shown(name)}"
                hint, answer = (_DECIMAL, {"decimal": ","}) if comma else (hint, {})
                raise TableError(f"{where} is no number{hint}", **answer) from None
        return np.array(values)

    def per_cent(self, places: Sequence[int]) -> bool:
        """Return whether the cells are written with a per cent sign.

        Raises:
            TableError: some are and others are not.
        """
        cells = [text for place in places for text in self.texts(place)]
        signs = {text.endswith("%") for text in cells if not is_missing(text)}
        if len(signs) > 1:
            raise TableError(f"{self.what} has numbers with and without a per cent sign")
        return signs == {True}


def listed(labels: Sequence[str], most: int = 10) -> str:
    """Return names quoted, of many or long ones the first."""
    text = ", ".join(map(shown, labels[:most])) + (", …" if len(labels) > most else "")
    return text if len(text) < 200 or most == 1 else listed(labels, most - 1)


# From a source -----------------------------------------------------------------------------------


def read_sheet(source: Source, comma: bool, number: int | None, questions: Questions) -> Sheet:
    """Return the cells of a file's table, a DataFrame or a Series; errors are `read_table`'s.

    The index of a DataFrame is a column, but where it only counts rows.

    Args:
        source: as for `read_table`.
        comma: see `Sheet`.
        number: of the table in a file with several.
        questions: which of several, where that is not said.
    """
    if isinstance(source, (str, PathLike)):
        return _from_file(Path(source), comma, number, questions)
    if not hasattr(source, "index") or not hasattr(source, "reset_index"):
        raise TableError(f"the table is {type(source).__name__}; expected a path or a DataFrame")
    frame = source
    if not hasattr(frame, "columns"):  # a Series, as of `DataFrame.stack` or a `groupby`
        frame = source.rename("value" if source.name is None else source.name).to_frame()
    elif frame.columns.nlevels > 1:  # `pivot_table`'s
        levels = ["metric" if name is None else name for name in frame.columns.names]
        index = [name or "model" for name in frame.index.names]
        if "model" in index and all(str(name).isdigit() for name in frame.index):
            raise TableError("the index of the table counts rows; expected the models' names there")
        frame = frame.rename_axis(index=index, columns=levels).melt(ignore_index=False).dropna()
    index = frame.index
    if index.nlevels > 1 or index.name is not None:
        frame = frame.reset_index()
        index = frame.index
    labels = [str(column).strip() for column in frame.columns]
    headers = list(frame.columns)
    columns = [list(frame.iloc[:, place]) for place in range(len(labels))]
    if list(index) != [*range(len(index))]:
        labels, headers, columns = ["", *labels], ["", *headers], [list(index), *columns]
    return Sheet("the table", labels, headers, columns, comma)


def _from_file(path: Path, comma: bool, number: int | None, questions: Questions) -> Sheet:
    if path.is_dir():
        raise TableError(f"{path} is a folder; jx.scaling.read_runs reads folders of runs")
    what = str(path)
    if path.suffix.lower() in (".xlsx", ".xlsm", ".xls", ".ods"):
        tables = _of_workbook(path)
    else:
        text = read_text(path)
        if not text.strip(' ,;\t\r\n"'):
            raise TableError(f"{path} is empty; expected a header and one line a model")
        is_json = re.match(r"\s*(\{|\[\s*[\[{])", text) and path.suffix not in (".md", ".csv")
        if path.suffix in (".json", ".jsonl", ".ndjson") or is_json:
            return replace(read_sheet(_of_json(path, text), comma, None, questions), what=what)
        tables = _of_markdown(text)
        if not tables:
            try:
                tables = {"": _of_csv(text)}
            except csv.Error as error:
                raise TableError(f"{path} is not well-formed: {error}") from None
        if text[-1] not in "\r\n":
            last = shown(text.splitlines()[-1][-60:])
            end = f"{path} ends without a newline and may be cut short"
            warnings.warn(f"{end}; its last line is read as {last}", stacklevel=2)
    rows = _chosen(what, tables, number, questions)
    labels = [cell.strip() for cell in rows[0][1]]
    for line, cells in rows[1:]:
        if len(cells) != len(labels):
            cut = f"line {line} of {path} has {len(cells)} cells where the header has {len(labels)}"
            raise TableError(f"{cut}; the file may be half written")
    columns = list(zip(*(cells for _, cells in rows[1:]), strict=True)) or [()] * len(labels)
    return Sheet(what, labels, labels, columns, comma)


Rows = list[tuple[int, list[str]]]
"""Numbers of lines and their cells, the header first."""


def _chosen(
    what: str, tables: Mapping[str, Rows], number: int | None, questions: Questions
) -> Rows:
    """Return one of a file's tables: the `number`th, or the only one, else the one most likely."""
    if number is not None and not 0 < number <= len(tables):
        raise TableError(f"{what} has {len(tables)} tables, and sheet is {number}")
    if number is None and len(tables) > 1:
        sizes = [sum(map(bool, map(_SIZE.fullmatch, rows[0][1]))) for rows in tables.values()]
        number = 1 + sizes.index(max(sizes))
        heads = [
            f"{place} {title or 'of line ' + str(rows[0][0])}"
            for place, (title, rows) in enumerate(tables.items(), 1)
        ]
        questions.add(f"{what} has {len(tables)} tables, {listed(heads)}; say which", sheet=number)
    return list(tables.values())[(number or 1) - 1]


def _of_workbook(path: Path) -> dict[str, Rows]:
    """Return the tables of a workbook by the names of its sheets, without empty ones."""
    tables = {}
    try:
        frames = require("pandas").read_excel(path, sheet_name=None, header=None, dtype=object)
    except ImportError:  # pandas says which library it needs
        raise
    except Exception as error:  # of a damaged file its readers raise anything
        raise TableError(f"{path} cannot be read as a workbook ({error})") from None
    for name, frame in frames.items():
        cells = frame.dropna(how="all").dropna(how="all", axis=1)
        lines = enumerate(cells.astype(object).where(cells.notna(), "").to_numpy().tolist(), 1)
        if rows := _headed([(line, [str(cell).strip() for cell in row]) for line, row in lines]):
            tables[str(name)] = rows
    if not tables:
        raise TableError(f"{path} is empty; expected a header and one line a model")
    return tables


def _of_json(path: Path, text: str) -> DataFrame:
    """Return a DataFrame of JSON: lines or a list of objects, or columns by name."""
    pandas = require("pandas")
    if path.suffix in (".jsonl", ".ndjson"):
        lines = filter(str.strip, text.split("\n"))
        return pandas.DataFrame([parse_json(x, f"a line of {path}", lenient=True) for x in lines])
    value = parse_json(text, str(path), lenient=True)
    if isinstance(value, dict) and isinstance(value.get("results"), dict):
        raise TableError(f"{path} has one model's results; read_runs reads a folder of such files")
    with suppress(ValueError, AttributeError):
        frame = pandas.DataFrame(value)
        cells = (cell for label in frame for cell in frame[label])
        if not any(isinstance(cell, (list, dict)) for cell in cells):
            return frame
    raise TableError(f"{path} is no table; expected a list of objects, or columns by their names")


_HIDDEN = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1|<!--.*?-->", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"[#>]|([-*_])\1\1+$")
_RULE = re.compile(r"\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?")


def _of_markdown(text: str) -> dict[str, Rows]:
    """Return the tables of a markdown text, by the headings above them.

    As GitHub's specification has them: a header, a rule of as many cells, and lines until an empty
    one or another block; bars at the ends may be missing.  Code and comments hold none.
    """
    text = _HIDDEN.sub(lambda match: "\n" * match[0].count("\n"), text)
    lines = [line.strip() for line in text.splitlines()]
    tables: dict[str, Rows] = {}
    heading, end = "", 0
    for place, line in enumerate(lines):
        if line.startswith("#"):
            heading = line.strip("# ")
        header = _bars(lines[place - 1]) if place > end else []
        if "|" not in lines[place - 1] + line or not _RULE.fullmatch(line):
            continue
        if len(_bars(line)) != len(header):
            continue
        end = place + 1
        while end < len(lines) and lines[end] and not _BLOCK.match(lines[end]):
            end += 1
        title = heading if heading not in tables else f"{heading} ({len(tables) + 1})"
        rows = [(1 + row, _bars(lines[row])) for row in range(place + 1, end)]
        tables[title] = [(place, header), *rows]
    return tables


def _bars(line: str) -> list[str]:
    """Return the cells of a line of markdown as text: no emphasis, code, link or escape."""
    line = re.sub(r"^\||(?<!\\)\|$", "", line.strip())
    cells = []
    for cell in re.split(r"(?<!\\)\|", line):
        cell = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|</?\w+[^>]*>", r"\1", cell)
        cell = re.sub(r"^__(.*)__$", r"\1", cell.strip(" \t*`~"))
        cells.append(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell).strip())
    return cells


def _of_csv(text: str) -> Rows:
    """Return the lines' numbers and cells, separated by tabs, semicolons or commas.

    The first of these counts that splits every line into as many cells, two or more; if there is
    none, the one that splits the header into most.
    """
    # The comma comes last: it stands in numbers too ("0,5;0,4" is two cells), while tabs and
    # semicolons hardly stand in cells.
    tables = []
    for separator in ("\t", ";", ","):
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        rows = _headed([(reader.line_num, row) for row in reader if any(map(str.strip, row))])
        tables.append(rows)
        counts = {len(row) for _, row in rows}
        if len(counts) == 1 and counts != {1}:
            return rows
    return max(reversed(tables), key=lambda rows: len(rows[0][1]))


def _headed(rows: Rows) -> Rows:
    """Return a table without the titles and comments above its header."""
    start = 0
    for start, (_, cells) in enumerate(rows):
        title = bool(cells[0].strip()) and not any(map(str.strip, cells[1:]))
        remark = cells[0].lstrip().startswith("#")
        ahead = [len(row) for _, row in rows[start + 1 : start + 2]]
        if remark and ahead == [len(cells)] and not title:
            cells[0] = cells[0].strip("# ")  # the header itself
            break
        if not (title and len(rows[-1][1]) > 1) and not remark:
            break
    return rows[start:]
