"""Tables of cells from csv, markdown, JSON, workbooks and pandas."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from .._io import parse_json, read_text, require
from .sheets import SIZE_PATTERN, Questions, Sheet, Source, quote_all
from .table_error import TableError, quote

if TYPE_CHECKING:
    from pandas import DataFrame


def read_sheet(source: Source, number: int | None, questions: Questions) -> Sheet:
    """Read the cells of a file, a DataFrame or a Series as a sheet.

    The index of a DataFrame becomes a column, unless it only numbers the rows.

    Args:
        source: path of a file, DataFrame or Series.
        number: position, from 1, of the table in a file with several tables; None picks one and
            adds a question.
        questions: ambiguities of the table, which may be added to.

    Raises:
        TableError: the source holds no table, or cannot be parsed.
    """
    if isinstance(source, (str, PathLike)):
        return _from_file(Path(source), number, questions)
    if not hasattr(source, "index") or not hasattr(source, "reset_index"):
        raise TableError(f"the table is {type(source).__name__}; expected a path or a DataFrame")
    frame = source
    if not hasattr(frame, "columns"):  # a Series, the result of `DataFrame.stack` or `groupby`
        frame = source.rename("value" if source.name is None else source.name).to_frame()
    elif frame.columns.nlevels > 1:  # the result of `pivot_table`
        levels = ["metric" if name is None else name for name in frame.columns.names]
        index = [name or "model" for name in frame.index.names]
        if "model" in index and all(str(name).isdigit() for name in frame.index):
            raise TableError("the index of the table counts rows; expected the models' names there")
        frame = frame.rename_axis(index=index, columns=levels).melt(ignore_index=False).dropna()
    index = frame.index
    if index.nlevels > 1 or index.name is not None:
        frame = frame.reset_index()
        index = frame.index
    names = [f"{x:.15g}" if isinstance(x, float) else str(x).strip() for x in frame.columns]
    columns = [list(frame.iloc[:, column]) for column in range(len(names))]
    if list(index) != [*range(len(index))]:
        names, columns = ["", *names], [list(index), *columns]
    return Sheet("the table", names, columns)


def _from_file(path: Path, number: int | None, questions: Questions) -> Sheet:
    """Read the cells of a file as a sheet, see `read_sheet`."""
    if path.is_dir():
        raise TableError(f"{path} is a folder; jx.scaling.read_runs reads folders of runs")
    name = str(path)
    if path.suffix.lower() in (".xlsx", ".xlsm", ".xls", ".ods"):
        tables = _workbook_tables(path)
    else:
        text = read_text(path)
        if not text.strip(' ,;\t\r\n"'):
            raise TableError(f"{path} is empty; expected a header and one line a model")
        is_json = re.match(r"\s*(\{|\[\s*[\[{])", text) and path.suffix not in (".md", ".csv")
        if path.suffix in (".json", ".jsonl", ".ndjson") or is_json:
            return replace(read_sheet(_json_frame(path, text), None, questions), name=name)
        tables = _markdown_tables(text)
        if not tables:
            try:
                tables = {"": _csv_rows(text)}
            except csv.Error as error:
                raise TableError(f"{path} is not well-formed: {error}") from None
        if text[-1] not in "\r\n":
            last_line = quote(text.splitlines()[-1][-60:])
            message = f"{path} ends without a newline and may be cut short"
            warnings.warn(f"{message}; its last line is read as {last_line}", stacklevel=2)
    rows = _pick_table(name, tables, number, questions)
    labels = [cell.strip() for cell in rows[0][1]]
    for line, cells in rows[1:]:
        if len(cells) != len(labels):
            cut = f"line {line} of {path} has {len(cells)} cells where the header has {len(labels)}"
            raise TableError(f"{cut}; the file may be half written")
    columns = list(zip(*(cells for _, cells in rows[1:]), strict=True)) or [()] * len(labels)
    return Sheet(name, labels, columns)


Rows = list[tuple[int, list[str]]]
"""The lines of a table, the header first: the line's number in the file, and its cells."""


def _pick_table(
    name: str, tables: Mapping[str, Rows], number: int | None, questions: Questions
) -> Rows:
    """Pick a table of a file.

    Args:
        name: name of the file, for messages.
        tables: title -> lines of the table.
        number: position of the table, from 1; None picks the one with the most sizes in its
            header and, if there are several, adds a question.
        questions: ambiguities of the file.

    Raises:
        TableError: the file has fewer than `number` tables.
    """
    if number is not None and not 0 < number <= len(tables):
        raise TableError(f"{name} has {len(tables)} tables, and sheet is {number}")
    if number is None and len(tables) > 1:
        num_sizes = [
            sum(map(bool, map(SIZE_PATTERN.fullmatch, rows[0][1]))) for rows in tables.values()
        ]
        number = 1 + num_sizes.index(max(num_sizes))
        titles = [
            f"{index} {title or 'of line ' + str(rows[0][0])}"
            for index, (title, rows) in enumerate(tables.items(), 1)
        ]
        text = f"{name} has {len(tables)} tables, {quote_all(titles)}; say which"
        questions.add(text, sheet=number)
    return list(tables.values())[(number or 1) - 1]


def _workbook_tables(path: Path) -> dict[str, Rows]:
    """Return the tables of a workbook, name of the sheet -> lines, without empty sheets.

    Raises:
        TableError: all its sheets are empty.
    """
    tables = {}
    frames = require("pandas").read_excel(path, sheet_name=None, header=None, dtype=object)
    for name, frame in frames.items():
        cells = frame.dropna(how="all").dropna(how="all", axis=1)
        lines = enumerate(cells.astype(object).where(cells.notna(), "").to_numpy().tolist(), 1)
        rows = _strip_preamble([(line, [str(x).strip() for x in row]) for line, row in lines])
        if rows:
            tables[str(name)] = rows
    if not tables:
        raise TableError(f"{path} is empty; expected a header and one line a model")
    return tables


def _json_frame(path: Path, text: str) -> DataFrame:
    """Parse a JSON table: an object on each line, a list of objects, or a dict of columns.

    Args:
        path: path of the file; its suffix marks JSON Lines.
        text: content of the file.

    Raises:
        TableError: the text is not such a table.
    """
    pandas = require("pandas")
    if path.suffix in (".jsonl", ".ndjson"):
        lines = filter(str.strip, text.split("\n"))
        value = [parse_json(line, f"a line of {path}", lenient=True) for line in lines]
    else:
        value = parse_json(text, str(path), lenient=True)
    if isinstance(value, dict) and {"results", "log_history"} & value.keys():
        raise TableError(f"{path} has one model's results; read_runs reads a folder of such files")
    columns: dict[str, object] = value if isinstance(value, dict) else {}
    wrong = [label for label, cells in columns.items() if not isinstance(cells, (list, dict))]
    with suppress(ValueError, AttributeError):
        frame = pandas.DataFrame(value if not wrong else [])
        wrong += [x for x in frame if any(isinstance(cell, (list, dict)) for cell in frame[x])]
        if not wrong:
            return frame
    names = quote_all(list(map(str, wrong or columns)))
    text = f"{path} is no table (see {names}); expected a list of objects of numbers and words"
    raise TableError(f"{text}, one a row, or columns by their names")


# Patterns of code blocks and comments, of lines that end a table, and of the rule below a header.
_HIDDEN = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1|<!--.*?-->", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"[#>]|([-*_])\1\1+$")
_RULE = re.compile(r"\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?")


def _markdown_tables(text: str) -> dict[str, Rows]:
    """Return the tables of a markdown text, heading above the table -> lines.

    As in GitHub's specification, a table is a header, a delimiter row with as many cells, and lines
    until an empty line or another block; bars at the ends may be missing.  Code and comments are
    skipped.
    """
    text = _HIDDEN.sub(lambda match: "\n" * match[0].count("\n"), text)
    lines = [line.strip() for line in text.splitlines()]
    tables: dict[str, Rows] = {}
    heading, end = "", 0
    for row, line in enumerate(lines):
        if line.startswith("#"):
            heading = line.strip("# ")
        header = _markdown_cells(lines[row - 1]) if row > end else []
        if "|" not in lines[row - 1] + line or not _RULE.fullmatch(line):
            continue
        if len(_markdown_cells(line)) != len(header):
            continue
        end = row + 1
        while end < len(lines) and lines[end] and not _BLOCK.match(lines[end]):
            end += 1
        title = heading if heading not in tables else f"{heading} ({len(tables) + 1})"
        rows = [(1 + k, _markdown_cells(lines[k])) for k in range(row + 1, end)]
        tables[title] = [(row, header), *rows]
    return tables


def _markdown_cells(line: str) -> list[str]:
    """Return the cells of a line of a markdown table as text, without markup and escapes."""
    line = re.sub(r"^\||(?<!\\)\|$", "", line.strip())
    cells = []
    for cell in re.split(r"(?<!\\)\|", line):
        cell = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|</?\w+[^>]*>", r"\1", cell)
        cell = re.sub(r"^__(.*)__$", r"\1", cell.strip(" \t*`~"))
        cells.append(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell).strip())
    return cells


def _csv_rows(text: str) -> Rows:
    """Split a text with tabs, semicolons or commas between cells into lines of cells.

    The separator is the first of the three that splits all lines into the same number of cells, at
    least two; if there is none, the separator that splits the header into the most cells.
    """
    # The comma comes last: it occurs in numbers too ("0,5;0,4" is two cells), while tabs and
    # semicolons hardly occur within cells.
    tables = []
    for separator in ("\t", ";", ","):
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        lines = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
        rows = _strip_preamble(lines)
        tables.append(rows)
        counts = {len(row) for _, row in rows}
        if len(counts) == 1 and counts != {1}:
            return rows
    return max(reversed(tables), key=lambda rows: len(rows[0][1]))


def _strip_preamble(rows: Rows) -> Rows:
    """Return the lines of a table without titles and comments above its header."""
    start = 0
    for start, (_, cells) in enumerate(rows):
        is_title = bool(cells[0].strip()) and not any(map(str.strip, cells[1:]))
        is_comment = cells[0].lstrip().startswith("#")
        next_width = [len(row) for _, row in rows[start + 1 : start + 2]]
        if is_comment and next_width == [len(cells)] and not is_title:
            cells[0] = cells[0].strip("# ")  # the header itself
            break
        if not (is_title and len(rows[-1][1]) > 1) and not is_comment:
            break
    return rows[start:]
