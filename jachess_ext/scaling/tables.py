"""`read_table`: tables of losses or scores, wide or long, from a file or a DataFrame."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import TypeAlias

import numpy as np

from .column_names import (
    FILTER_COLUMNS,
    NOT_MODEL_COLUMNS,
    SIZE_WORDS,
    doubt_about_sizes,
    has_role,
    is_summary_row,
    marks_unfinished,
    snake_case,
)
from .loss_table import LossTable
from .metrics import matching_names, metric_word, plain_name, vocabulary
from .records import Records, to_table
from .sheets import DoubtfulSize, Questions, Sheet, Source, is_missing, quote_all
from .sources import read_sheet
from .table_error import TableError, quote


def read_table(
    source: Source | LossTable,
    /,
    fewest: int = 2,
    *,
    metric: str | None = None,
    test_rows: int | None = None,
    ignore: Sequence[str] = (),
    model: str | None = None,
    size: str | None = None,
    seed: str | None = None,
    decimal: str = ".",
    full: int | None = None,
    sheet: int | None = None,
    **rows: object,
) -> LossTable:
    """Read a table of losses or scores; a LossTable is returned as it is.

    A wide table has a row a model, and columns named by sizes ("100", "1k", "1,000", 1600.0);
    `size` or `parameters` hold numbers of parameters.  Models are named by a column (name, model,
    "config name"), or by the index of a DataFrame or the first column of a csv file.  A long table
    has a row a run, with columns of the model, the size (rows, n, size, train_samples, …), and the
    value, which may be named by its metric.  A column `seed` says that runs are repeated: losses
    are means then, with their standard errors in `noise`.  Empty cells of a wide table are losses
    that are missing; a row of a long one is a run and has its value.

    Nothing is left out in silence.  A column of words that differ within a model, or tell of a task
    or of how a run ended, is asked about: `task="rte"` (its name, and a cell) reads those rows
    alone.  So are columns of other numbers, and rows named mean, std, Δ, …, which are no models:
    `ignore` leaves both out.  A table with sizes down and models across is read so, with a warning.
    All questions are raised in one error, and its `options` answer them.

    Args:
        source: path of a csv file (separated by commas, tabs or semicolons), of a text with
            markdown tables, of JSON (lines: .jsonl) or of a workbook (.xlsx); pandas DataFrame or
            Series, or LossTable.
        fewest: models there must be.
        metric: of the numbers: "loss", "accuracy", "eval_f1", …; None: that of a column, else
            losses.  Of scores, whose best is 1 or 100 %, the methods extrapolate 1 − score.  In a
            long table with several metrics, the column to read.
        test_rows: examples the metric was measured on: a perfect score counts as half an error, and
            an accuracy or error rate has binomial noise.
        ignore: columns that are not to be read, and models.
        model, size, seed: names of these columns, of a wide table model and seed; size="headers":
            the columns' names are sizes, even where they look like years or layers.
        decimal: "," where 0,5 is a half and 1.000 a thousand, in cells and names that are text.
        full: examples of the whole data, of which the sizes are shares: 0.25, "25 %".
        sheet: which table of a file with several, from 1.
        rows: columns of words, and the cell whose rows are to be read.

    Raises:
        TableError: not readable, no sizes, shares without `full`, one size twice, a column that is
            not understood, too few models, a model (in a long table a size of it) twice, a cell
            that is no number, a line cut short, values out of the metric's range, or losses that
            rise with size where no metric is told; its `options` are the arguments that help.
        DataError: a file that cannot be read as text, or as JSON.
        MissingExtra: JSON or a workbook, and pandas is not installed.

    Examples:
        >>> import pandas as pd
        >>> import jachess_ext as jx
        >>> frame = pd.DataFrame({"100": [71.0, 68.0], "1k": [80.0, 83.0]}, index=["a", "b"])
        >>> table = jx.scaling.read_table(frame, metric="accuracy")
        >>> table.sizes, table.losses_at(1000).round(2), table.label
        (array([ 100., 1000.]), array([0.2 , 0.17]), 'accuracy (per cent)')
    """
    if full is not None and (not full > 0 or isinstance(source, LossTable)):
        raise TableError(f"full is {full}; expected the examples of all of a table's data, above 0")
    if isinstance(source, LossTable):
        made_from = source.metric or "loss"
        reading = {"test_rows": test_rows, "model": model, "size": size, "seed": seed} | rows
        asked = ignore or any(value is not None for value in reading.values())
        if asked or plain_name(metric or made_from) != plain_name(made_from):
            text = f"the LossTable holds losses made from {made_from}; this comes too late"
            raise TableError(f"{text}: give them where the LossTable is made")
        return source
    if decimal not in (".", ","):
        raise TableError(f"decimal is {quote(decimal)}; expected '.' or ','")
    questions = Questions(ignore)
    try:
        cells = read_sheet(source, sheet, questions)
        cells = replace(cells, has_decimal_comma=decimal == ",", full=full)
        reader = _Reader(cells, questions, ignore)
        records = reader.records(metric, model, size, seed, rows)
        table = to_table(records, metric or records.metric, fewest, test_rows)
    except TableError as error:
        questions.add(error.args[0], **error.options)
        if not error.options:  # no answers to the others would do
            questions.options.clear()
            del questions.texts[:-2]
    if questions.texts:
        raise TableError("; ".join(questions.texts), **questions.options)
    return table


Label: TypeAlias = str | None
"""Name of a column or a metric; None: the table is to tell."""
Column: TypeAlias = int | None
"""Index of a column; None: there is none, or it is not yet known."""


class _Reader:
    """Finds the role of each column of a sheet, and asks about the columns whose role is unclear.

    Attributes:
        sheet: the cells, from which rows are removed step by step.
        questions: those about this sheet.
        row_metric: metric of the rows, where a column names it.
        ignore: columns and models to leave out.
    """

    def __init__(self, sheet: Sheet, questions: Questions, ignore: Sequence[str]) -> None:
        self.questions = questions
        self.unknown = [label for label in ignore if label not in sheet.labels]
        for label in ignore:
            if label in sheet.labels:
                sheet.index(label)  # raises where there are two
        sheet = sheet.keep_columns([label not in ignore for label in sheet.labels])
        labels = [re.sub(r"^Unnamed: \d+$", "", label) for label in sheet.labels]
        empty = [all(map(is_missing, column)) for column in sheet.columns]
        columns = [bool(label) or not none for label, none in zip(labels, empty, strict=True)]
        self.sheet = replace(sheet, labels=labels).keep_columns(columns)
        for label in labels:
            if f"{label}.1" in labels and sheet.name == "the table":
                renamed = f"(pandas calls the second {quote(label + '.1')})"
                raise TableError(f"the table has the column {quote(label)} twice {renamed}")

    def records(
        self, metric: Label, model: Label, size: Label, seed: Label, rows: Mapping[str, object]
    ) -> Records:
        """Return the table's values; the arguments are `read_table`'s."""
        for label, value in rows.items():
            texts = self.sheet.texts(self.sheet.index(label))
            if str(value) not in texts:
                cells = quote_all([*dict.fromkeys(texts)])
                column = f"its column {quote(label)}, which holds {cells}"
                raise TableError(f"{self.sheet.name} has no {quote(str(value))} in {column}")
            self.sheet = self.sheet.keep_rows([text == str(value) for text in texts])
        self.chosen = set(rows)
        self.row_metric = self._keep_one_metric(metric)
        self._drop_row_numbers()
        # Three ways a table may lie.  Sizes in the header and a column of models: wide.  Else, if
        # one column holds sizes and all others hold numbers, without a word on what they measure,
        # these are named by models: sizes down.  Anything else has a row a run.
        sizes = self._header_sizes() if size in (None, "headers") else {}
        model_at = self._column_of("model", model)
        if sizes and model_at is None:
            model_at = self._first_as_models(sizes)
        if sizes and model_at is not None:
            headers = [self.sheet.headers[index] for index in sizes]
            doubt = doubt_about_sizes(headers, list(sizes.values()))
            if doubt and size is None and self.sheet.full is None:
                heads = quote_all(list(map(str, headers)))
                text = f"the header of {self.sheet.name} has {heads}, which {doubt}; say so if they"
                self.questions.add(f"{text} are numbers of training examples", size="headers")
            return self._wide(sizes, model_at, seed)
        size_at = self._column_of("size", size)
        sheet, labels = self.sheet, self.sheet.labels
        seeds = self._seeds(seed)
        if size_at is None and labels and not labels[0] and sheet.are_sizes(0):
            size_at = 0
        others = {*range(len(labels))} - {size_at, *seeds}
        others = {p for p in others if sheet.are_numbers(p) or len(set(sheet.texts(p))) > 1}
        values = [p for p in others if metric_word(labels[p]) or has_role("value", labels[p])]
        across = model_at is None and len(others) > 1 and not values
        if size_at is not None and across and all(map(sheet.are_numbers, others)):
            return self._sizes_down(size_at, sorted(others), seeds)
        return self._long(size_at, model_at, seeds, metric)

    def _drop_row_numbers(self) -> None:
        """Remove a first column without a name that only numbers the rows."""
        sheet = self.sheet
        if sheet.labels[:1] == [""] and all(text.isdigit() for text in sheet.texts(0)):
            others = range(1, len(sheet.labels))
            sized = any(re.fullmatch(r"\W*\d.*", sheet.labels[index]) for index in others)
            if sized or not all(map(sheet.are_numbers, others)):
                self.sheet = sheet.keep_columns([index > 0 for index in range(len(sheet.labels))])

    def _keep_one_metric(self, metric: Label) -> Label:
        """Keep the rows of one metric where a column `metric` names it, and return the metric."""
        index = self._column_of("metric", None)
        if index is None or self.sheet.are_numbers(index):
            return None
        texts = self.sheet.texts(index)
        names = list(dict.fromkeys(texts))
        matches = names if metric is None else matching_names(metric, names)
        if metric is not None and not matches:
            column = f"its column {quote(self.sheet.labels[index])} holds {quote_all(names)}"
            text = f"{self.sheet.name} has no rows of the metric {quote(metric)}"
            raise TableError(f"{text}; {column}")
        if len(matches) > 1:
            text = f"{self.sheet.name} holds several metrics, {quote_all(matches)}; say which"
            self.questions.add(text, metric=matches[0])
        self.sheet = self.sheet.keep_rows([text in matches[:1] for text in texts])
        return matches[0] if matches else None

    def _column_of(self, kind: str, label: Label) -> Column:
        """Return the column `label`, or the one with a name of a kind of `COLUMN_NAMES`."""
        if label is not None and label != "headers":
            return self.sheet.index(label)
        labels = self.sheet.labels

        def allow_doubtful(index: int) -> bool:  # "size" may be the models'
            name = labels[index]
            if kind == "size":
                return has_role("parameters", name)
            return not snake_case(name).startswith(kind)

        indices = [index for index, name in enumerate(labels) if has_role(kind, name)]
        if len(indices) > 1:
            names = quote_all([labels[index] for index in indices])
            first, *others = (labels[index] for index in sorted(indices, key=allow_doubtful))
            text = f"{self.sheet.name} has the columns {names}, any of which may be the one that"
            answer = {kind: first} if kind in ("model", "size") else {"ignore": others}
            self.questions.add(f"{text} holds the {kind}; say which", **answer)
        return min(indices, key=allow_doubtful, default=None)

    def _seeds(self, label: Label) -> list[int]:
        """Return the columns that distinguish repeated runs, such as seeds and folds."""
        first = [] if label is None else [self.sheet.index(label)]
        labels = enumerate(self.sheet.labels)
        return first + [index for index, x in labels if has_role("seed", x) and index not in first]

    def _repeat_names(self, indices: Sequence[int]) -> list[str] | None:
        rows = zip(*(self.sheet.texts(index) for index in indices), strict=True)
        return [", ".join(row) for row in rows] if indices else None

    def _first_as_models(self, sizes: Mapping[int, float]) -> Column:
        """Return the first column as that of the models, where no column has such a name.

        None: it holds sizes, and the header names models by larger ones, such as 7B.
        """
        sheet, label = self.sheet, self.sheet.labels[0]
        named_size = has_role("size", label) and not has_role("parameters", label)
        sized = 0 not in sizes and sheet.are_sizes(0)
        if sized and named_size and max(map(sheet.size, sheet.columns[0])) < min(sizes.values()):
            return None
        numeric = 0 in sizes or sheet.are_numbers(0)
        if sized or numeric or snake_case(label) in NOT_MODEL_COLUMNS:
            why = "numbers" if numeric else "sizes" if sized else "something else"
            text = f"no column of {sheet.name} names the models, and its first, {quote(label)},"
            answer = {"model": label} if label and sized and not numeric else {}
            raise TableError(f"{text} holds {why}; expected one called name or model", **answer)
        return 0

    def _ask_unused(self, used: Collection[Column], model_at: Column, numbers: bool) -> None:
        """Ask about the columns without a role, and keep the rows that the answers choose.

        Args:
            used: the columns with a role.
            model_at: the column of the models; None: a row holds values of all models.
            numbers: whether to ask about columns of numbers that are named by a metric, too.
        """
        table, left = self.sheet.name, []
        for index, label in enumerate(self.sheet.labels):
            if index in used or label in self.chosen:
                continue
            if (
                self.sheet.are_numbers(index)
                or self.sheet.are_counts(index)
                or re.match(r"\W*\d", label)
            ):
                left += [label] if numbers or metric_word(label) is None else []
                continue
            key, texts = snake_case(label), self.sheet.texts(index)
            if not label and any(map(is_summary_row, texts)):  # as of `describe`
                raise TableError(f"the rows {quote_all(texts)} of {table} sum others up")
            # A word that is the same in all rows of a model describes the model.  One that differs
            # within a model splits its runs into kinds, whose losses lie on different curves.
            values = list(dict.fromkeys(texts))
            unfinished = [value for value in values if marks_unfinished(key, value)]
            usable = [x for x in values if not is_missing(x) and x not in unfinished]
            models = [""] * len(texts) if model_at is None else self.sheet.texts(model_at)
            varies = len(set(zip(models, texts, strict=True))) > len(set(models))
            if not (unfinished or varies or (key in FILTER_COLUMNS and len(values) > 1)):
                continue
            text = f"the column {quote(label)} of {table} holds {quote_all(values, 4)}"
            numbered = len(values) == len(texts) and key not in FILTER_COLUMNS
            if not usable or numbered or label in _OPTIONS:
                text += "; leave it out if its rows are comparable"
                self.questions.add(text, ignore=[label])
            else:
                self.questions.add(f"{text}; say of which the rows count", **{label: usable[0]})
                self.sheet = self.sheet.keep_rows([text == usable[0] for text in texts])
        if left:
            text = f"{table} has numbers in {quote_all(left)}, not named by a size that can be"
            text += " read, such as 1000, 1k or 1,000; rename or leave out"
            self.questions.add(text, ignore=left)

    def _keep_models(self, index: int) -> list[str]:
        """Remove ignored models, ask about rows that are none, and return the rows' models."""
        names, label = self.sheet.texts(index), self.sheet.labels[index]
        if snake_case(label) == "checkpoint" and all(name.isdigit() for name in names):
            raise TableError(f"the column {quote(label)} of {self.sheet.name} names no models")
        for label in self.unknown:
            if label not in names:
                self.sheet.index(label)  # raises
        summaries = [x for x in dict.fromkeys(names) if x not in self.unknown and is_summary_row(x)]
        if summaries:
            text = f"{quote_all(summaries)} of {self.sheet.name} say something of models"
            text += " and are none; leave them out, or rename a model"
            self.questions.add(text, ignore=summaries)
        ignored = {*self.unknown, *summaries}
        self.sheet = self.sheet.keep_rows([name not in ignored for name in names])
        return self.sheet.texts(index)

    def _wide(self, sizes: Mapping[int, float], model_at: int, seed: Label) -> Records:
        seeds = self._seeds(seed)
        count_at = self._column_of("parameters", None)
        count_at = None if count_at == model_at else count_at
        self._ask_unused({*sizes, count_at, model_at, *seeds}, model_at, numbers=True)
        names, sheet = self._keep_models(model_at), self.sheet
        # A run for every cell, row by row.
        values = np.stack([sheet.numbers(index, names) for index in sizes], -1).ravel()
        models, cell_sizes = (
            [x for x in names for _ in sizes],
            np.tile([*sizes.values()], len(names)),
        )
        repeats = self._repeat_names(seeds)
        repeats = None if repeats is None else list(np.repeat(repeats, len(sizes)))
        counts, per_cent = _parameters(sheet, count_at, names), sheet.has_percent_signs(list(sizes))
        return Records(
            sheet.name, models, cell_sizes, values, repeats, counts, self.row_metric, per_cent
        )

    def _sizes_down(self, size_at: int, columns: Sequence[int], seeds: Sequence[int]) -> Records:
        """Melt a table with sizes down and models across into a long one, and return its values."""
        self._ask_unused({size_at, *columns, *seeds}, None, numbers=True)
        sheet, label = self.sheet, self.sheet.labels[size_at]
        sizes = [self._size(cell, label) for cell in sheet.columns[size_at]]
        if not label and (doubt := doubt_about_sizes(sheet.columns[size_at], sizes)):
            texts = quote_all(sheet.texts(size_at))
            text = f"the first column of {sheet.name} holds {texts}, which {doubt}"
            raise TableError(f"{text}; if they are training examples, call it rows")
        across = quote_all([sheet.labels[index] for index in columns], 4)
        text = f"{sheet.name} is read with sizes down ({quote(label)}) and models across ({across})"
        warnings.warn(text, stacklevel=4)
        heads = [size_at, *seeds]
        cells = [
            (sheet.labels[index], *head, value)
            for index in columns
            for *head, value in zip(*(sheet.columns[p] for p in (*heads, index)), strict=True)
            if not is_missing(value)
        ]
        labels = ["model", *(sheet.labels[index] for index in heads), "value"]
        long = [list(column) for column in zip(*cells, strict=True)] or [[]] * len(labels)
        self.sheet = replace(self.sheet, labels=labels, headers=labels, columns=long)
        return self._long(1, 0, range(2, 1 + len(heads)), None)

    def _size_column(self, others: Collection[Column]) -> int:
        """Return the column that looks most like sizes, where no name says so, and ask about it."""
        sheet, table, labels = self.sheet, self.sheet.name, self.sheet.labels
        size_words = [len(SIZE_WORDS & set(snake_case(label).split("_"))) for label in labels]
        indices = [
            p for p, label in enumerate(labels) if p not in others and not metric_word(label)
        ]
        # Cells that only may be sizes ("0.25", "1.000") count where the name speaks of a size.
        indices = [p for p in indices if sheet.are_sizes(p, allow_doubtful=bool(size_words[p]))]
        text = f"{table} has no column named by a number of training examples, such as 1000 or 1k,"
        text += f" and none that holds them (rows, n, train_samples); it has {quote_all(labels)}"
        if not indices and len({*labels}) < len(labels):  # as `pivot_table` writes csv
            text += "; several header rows are for pandas.read_csv(…, header=[0, 1], index_col=0)"
        if not indices:
            raise TableError(text)
        index = max(indices, key=size_words.__getitem__)
        self.questions.add(text, size=labels[index])
        return index

    def _model_column(self, others: Collection[Column]) -> int:
        """Return the column that looks most like models, where no name says so, and ask."""
        sheet, labels = self.sheet, self.sheet.labels
        indices = [p for p in range(len(labels)) if p not in others]
        indices = [p for p in indices if not sheet.are_numbers(p) and not sheet.are_counts(p)]
        indices = [p for p in indices if snake_case(labels[p]) not in NOT_MODEL_COLUMNS] or indices
        text = f"no column of {sheet.name} names the models; call it name or model"
        if not indices:
            raise TableError(f"{text} (runs of one model alone are for jx.scaling.fit)")
        # Models have several runs each: neither the same word in all rows nor another in every row.
        index = min(indices, key=lambda p: len(set(sheet.texts(p))) in (1, len(sheet.texts(p))))
        if labels[index]:  # an index without a name may be the models'
            self.questions.add(text, model=labels[index])
        return index

    def _long(
        self, size_at: Column, model_at: Column, seeds: Sequence[int], metric: Label
    ) -> Records:
        """Return the values of a table with a row a run."""
        table, labels = self.sheet.name, self.sheet.labels
        if size_at is None:
            size_at = self._size_column({model_at, *seeds})
        if model_at is None:
            model_at = self._model_column({size_at, *seeds})
        of_models = not has_role("parameters", labels[size_at])
        count_at = self._column_of("parameters", None) if of_models else None
        value_at = self._value_column(metric, {size_at, model_at, *seeds, count_at})
        self._ask_unused({size_at, model_at, *seeds, value_at, count_at}, model_at, numbers=False)
        names = self._keep_models(model_at)
        empty = [is_missing(cell) for cell in self.sheet.columns[size_at]]
        if any(empty):
            without = [*dict.fromkeys(compress(names, empty))]
            text = f"{quote_all(without)} of {table} have no size; leave out"
            self.questions.add(text, ignore=without)
            self.sheet = self.sheet.keep_rows([name not in without for name in names])
            names = self.sheet.texts(model_at)
        sheet, sizes = self.sheet, []
        for cell, name in zip(sheet.columns[size_at], names, strict=True):
            try:
                sizes.append(self._size(cell, labels[size_at]))
            except TableError as error:
                column = f"in the column {quote(labels[size_at])} of {quote(name)}"
                raise TableError(f"{column}, {error.args[0]}", **error.options) from None
        label, values = labels[value_at], sheet.numbers(value_at, names)
        repeats = self._repeat_names(seeds)
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):  # a mean over the other seeds would hide a run that diverged
            run = wrong[0]
            text = f"the {label} of the run of {quote(names[run])} at size {sizes[run]:g}"
            text += f" with seed {repeats[run]}" if repeats else ""
            text += f" is {values[run]:g} or empty; expected a number"
            raise TableError(f"{text}: leave that row out if the run is not to count")
        metric = self.row_metric or (metric_word(label) and label)
        counts, per_cent = _parameters(sheet, count_at, names), sheet.has_percent_signs([value_at])
        return Records(table, names, np.array(sizes), values, repeats, counts, metric, per_cent)

    def _value_column(self, metric: Label, used: Collection[Column]) -> int:
        """Return the column of values, by the metric or by its name."""
        table, labels = self.sheet.name, self.sheet.labels
        free = [p for p in range(len(labels)) if p not in used and self.sheet.are_numbers(p)]
        indices = [p for p in free if has_role("value", labels[p])]
        if metric is None:
            indices += [p for p in free if metric_word(labels[p]) is not None]
        elif names := matching_names(metric, [labels[p] for p in free]):
            indices = [p for p in free if labels[p] in names]
        columns = quote_all([labels[p] for p in indices or free], 3)
        if len(indices) > 1:
            text = f"{table} has several columns of values, {columns}; say which"
            self.questions.add(text, metric=labels[indices[0]])
        if not indices:
            wanted = "" if metric is None else f" for the metric {quote(metric)}"
            text = f"{table} has no column named by a size, nor one of values that is known"
            text += f"{wanted}, among the numbers {columns or 'of no other column'}; call one value"
            if metric is not None or not free:
                raise TableError(text)
            label = labels[free[0]]
            text += f", or say {quote(label + ':higher')} (the best is 1, or 100 %), or ':lower'"
            self.questions.add(text, metric=f"{label}:higher|lower")
            indices = free
        return indices[0]

    def _size(self, value: object, label: str = "") -> float:
        """Return `Sheet.size`; for a share of the data the share, and ask of how many examples."""
        try:
            return self.sheet.size(value, label)
        except DoubtfulSize as error:
            if "full" not in error.options:
                raise
            self.questions.add(error.args[0], **error.options)
            self.sheet = replace(self.sheet, full=1)
            return self.sheet.size(value, label)

    def _header_sizes(self) -> dict[int, float]:
        """Return index -> size of the columns that are named by a size."""
        sizes: dict[int, float] = {}
        for index, header in enumerate(self.sheet.headers):
            try:
                sizes[index] = self._size(header)
            except DoubtfulSize as error:
                raise TableError(f"in the header of {self.sheet.name}, {error.args[0]}") from None
            except TableError:  # another column
                continue
        return sizes


_OPTIONS = vocabulary("fewest metric test_rows ignore model size seed decimal full sheet")


def _parameters(sheet: Sheet, index: Column, names: Sequence[str]) -> dict[str, float] | None:
    if index is None:
        return None
    counts: dict[str, float] = {}
    for cell, name in zip(sheet.columns[index], names, strict=True):
        missing = is_missing(cell)
        try:
            count = math.nan if missing else sheet.parse_count(cell)
        except TableError:
            label = sheet.labels[index]
            text = f"{quote(cell)} in column {quote(label)} of {quote(name)} is no number of"
            raise TableError(f"{text} parameters such as 110M", ignore=[label]) from None
        if name in counts and not (counts[name] == count or missing):
            raise TableError(f"{sheet.name} has two numbers of parameters of {quote(name)}")
        counts.setdefault(name, count)
    return counts
