"""`read_table`: tables of losses or scores, wide or long, from a file or a DataFrame."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from .column_names import (
    CHOICE_COLUMNS,
    FILTER_COLUMNS,
    NOT_MODEL_COLUMNS,
    SIZE_WORDS,
    SPLITS,
    TRAINING,
    doubt_about_sizes,
    has_role,
    is_summary_row,
    marks_unfinished,
    snake_case,
)
from .loss_table import LossTable
from .metrics import matching_names, metric_word, plain_name
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
    """Read a table of losses or scores; a LossTable is returned unchanged.

    A wide table has a row for each model, and columns named by sizes ("100", "1k", "1,000",
    1600.0); a column `size` or `parameters` holds numbers of parameters.  Models are named by a
    column (name, model, "config name"), the index of a DataFrame or the first column of a csv file.
    A long table has a row for each run, with columns for the model, the size (rows, n, size,
    train_samples, …), and the value, which may be named by its metric.  A column `seed`
    distinguishes repeated runs: their losses are averaged, with standard errors in `noise`.  Empty
    cells of a wide table are missing losses; every row of a long table must have a value.

    Ambiguous columns and rows raise an error, rather than being left out silently.  If a column
    holds several tasks, data sets, splits, … or the status of runs, select its rows by an argument
    of its name: `task="rte"`.  Leave out other columns of numbers, of words that differ within a
    model, and rows named mean, std, Δ, …, which are not models, by `ignore`.  All ambiguities are
    reported in one error, whose `options` are arguments that resolve them; rows that are not read
    are counted in `left_out`.  A table with a row for each size and a column for each model is
    recognised, with a warning.

    Args:
        source: path of a csv file (separated by commas, tabs or semicolons), of a text with
            markdown tables, of JSON (or JSON Lines, .jsonl) or of a workbook (.xlsx); pandas
            DataFrame or Series, or LossTable.
        fewest: smallest number of models accepted.
        metric: metric of the values: "loss", "accuracy", "eval_f1", …; None for that named by a
            column, else losses.  For scores, whose best value is 1 or 100 %, the methods
            extrapolate 1 − score.  In a long table with several metrics, the column to read.
        test_rows: number of test examples: a perfect score counts as half an error, and an accuracy
            or error rate has binomial noise.
        ignore: names of columns and models to leave out.
        model, size, seed: names of these columns (in a wide table model and seed); size="headers":
            the names of the columns are sizes, even if they look like years or layers.
        decimal: "," if text cells and names have decimal commas (0,5 is a half, 1.000 a thousand).
        full: number of examples of all data, if sizes are shares of it: 0.25, "25 %".
        sheet: position, from 1, of the table in a file with several tables.
        rows: name of a text column -> the cell whose rows are read.

    Raises:
        TableError: the source cannot be parsed, has no sizes or too few models, has a column or row
            that is ambiguous, a model or size twice, a cell that is not a number, a value outside
            the metric's range, shares without `full`, or, without a metric, losses that rise with
            size.  Its `options` are suggested arguments.
        DataError: the file is not valid text or JSON.
        MissingExtra: pandas is not installed, for JSON or a workbook.

    Examples:
        >>> import pandas as pd
        >>> import jachess_ext as jx
        >>> frame = pd.DataFrame({"100": [71.0, 68.0], "1k": [80.0, 83.0]}, index=["a", "b"])
        >>> table = jx.scaling.read_table(frame, metric="accuracy")
        >>> table.sizes, table.losses_at(1000).round(2), table.label
        (array([ 100., 1000.]), array([0.2 , 0.17]), 'accuracy (per cent)')
    """
    if isinstance(source, LossTable):
        options = (test_rows, model, size, seed, full, *ignore, *rows)
        source_metric = source.metric or "loss"
        is_same_metric = plain_name(metric or source_metric) == plain_name(source_metric)
        if not is_same_metric or any(option is not None for option in options):
            text = f"the LossTable holds losses made from {source_metric}; this comes too late"
            raise TableError(f"{text}: give them where the LossTable is made")
        return source
    if full is not None and not full > 0:
        raise TableError(f"full is {full}; expected the examples of all of a table's data, above 0")
    if decimal not in (".", ","):
        raise TableError(f"decimal is {quote(decimal)}; expected '.' or ','")
    questions = Questions(ignore)
    try:
        cells = read_sheet(source, sheet, questions)
        cells = replace(cells, has_decimal_comma=decimal == ",", full=full)
        reader = _Reader(cells, questions, ignore)
        records = reader.records(metric, model, size, seed, rows)
        other_tables = [] if sheet is None else [f"all tables of the file but {sheet}"]
        records = replace(records, left_out="; ".join(other_tables + reader.left_out))
        table = to_table(records, metric or records.metric, fewest, test_rows)
    except TableError as error:
        questions.add(error.args[0], **error.options)
        if not error.options:  # no arguments resolve this error
            questions.options.clear()
            del questions.texts[:-2]
    if questions.texts:
        raise TableError("; ".join(questions.texts), **questions.options)
    return table


Label: TypeAlias = str | None
"""Name of a column or a metric; None to infer it from the table."""
Column: TypeAlias = int | None
"""Index of a column; None if there is none, or it is not known yet."""


class _Reader:
    """Infers the role of each column of a sheet, and adds a question for each ambiguous column.

    Attributes:
        sheet: the cells, from which columns and rows are removed step by step.
        questions: ambiguities of this sheet.
        unknown: names to ignore that are not columns, and thus have to be models.
        filters: names of the text columns whose rows the user selected.
        row_metric: metric named by a column; None if there is no such column.
        left_out: which rows were removed, and how many.
    """

    def __init__(self, sheet: Sheet, questions: Questions, ignore: Sequence[str]) -> None:
        self.questions, self.left_out = questions, list[str]()
        self.unknown = [label for label in ignore if label not in sheet.labels]
        for label in {*ignore} & {*sheet.labels}:
            sheet.index(label)  # raises if there are two
        sheet = sheet.keep_columns([label not in ignore for label in sheet.labels])
        labels = [re.sub(r"^Unnamed: \d+$", "", label) for label in sheet.labels]
        empty = [all(map(is_missing, column)) for column in sheet.columns]
        mask = [bool(label) or not is_empty for label, is_empty in zip(labels, empty, strict=True)]
        self.sheet = replace(sheet, labels=labels).keep_columns(mask)
        for label in labels:
            if f"{label}.1" in labels and sheet.name == "the table":
                hint = f"(pandas calls the second {quote(label + '.1')})"
                raise TableError(f"the table has the column {quote(label)} twice {hint}")

    def records(
        self, metric: Label, model: Label, size: Label, seed: Label, rows: Mapping[str, object]
    ) -> Records:
        """Return the runs of the sheet; the arguments are those of `read_table`."""
        for label, value in rows.items():
            self._keep_rows(self.sheet.index(label), {str(value)})
        self.filters = set(rows)
        self.row_metric = self._keep_one_metric(metric)
        self._drop_row_numbers()
        # There are three layouts.  Wide: sizes in the header and a column of models.  Transposed:
        # one column holds sizes, and all others hold numbers and are not named by a metric, so that
        # they are named by models.  Any other table is long, with a row for each run.
        sizes = self._header_sizes() if size in (None, "headers") else {}
        model_col = self._column_of("model", model)
        if sizes and model_col is None:
            model_col = self._first_as_models(sizes)
        if sizes and model_col is not None:
            headers = [self.sheet.labels[index] for index in sizes]
            doubt = doubt_about_sizes(headers, list(sizes.values()))
            if doubt and size is None and self.sheet.full is None:
                text = f"the header of {self.sheet.name} has {quote_all(headers)}, which {doubt}"
                text += "; say so if they are numbers of training examples"
                self.questions.add(text, size="headers")
            return self._wide_records(sizes, model_col, seed)
        size_col = self._column_of("size", size)
        sheet, labels = self.sheet, self.sheet.labels
        seeds = self._seeds(seed)
        if size_col is None and labels and not labels[0] and sheet.are_sizes(0):
            size_col = 0
        other_cols = {*range(len(labels))} - {size_col, *seeds}
        other_cols = {p for p in other_cols if sheet.are_numbers(p) or len(set(sheet.texts(p))) > 1}
        values = [p for p in other_cols if metric_word(labels[p]) or has_role("value", labels[p])]
        is_transposed = model_col is None and len(other_cols) > 1 and not values
        if size_col is not None and is_transposed and all(map(sheet.are_numbers, other_cols)):
            return self._melt(size_col, sorted(other_cols), seeds)
        return self._long_records(size_col, model_col, seeds, metric)

    def _keep_rows(self, index: int, values: Collection[str]) -> None:
        """Remove the rows whose text in a column is none of `values`."""
        texts, label = self.sheet.texts(index), self.sheet.labels[index]
        mask = [text in values for text in texts]
        if others := [*dict.fromkeys(text for text in texts if text not in values)]:
            count_text = f"{len(mask) - sum(mask)} of {len(mask)} rows"
            criterion = f"whose {quote(label)} is" if label else "named"
            self.left_out.append(f"{count_text}, {criterion} {quote_all(others, 4)}")
            if not any(mask):
                raise TableError(f"no row of {self.sheet.name} is left without {self.left_out[-1]}")
        self.sheet = self.sheet.keep_rows(mask)

    def _drop_row_numbers(self) -> None:
        """Remove a first column without a name that only numbers the rows."""
        sheet = self.sheet
        if sheet.labels[:1] == [""] and all(text.isdigit() for text in sheet.texts(0)):
            other_cols = range(1, len(sheet.labels))
            has_sizes = any(re.fullmatch(r"\W*\d.*", sheet.labels[index]) for index in other_cols)
            if has_sizes or not all(map(sheet.are_numbers, other_cols)):
                self.sheet = sheet.keep_columns([index > 0 for index in range(len(sheet.labels))])

    def _keep_one_metric(self, metric: Label) -> Label:
        """Keep the rows of one metric if a column `metric` names metrics.

        Args:
            metric: the user's metric; None keeps the first one and, if there are several, adds a
                question.

        Returns:
            The metric; None if there is no such column.
        """
        index = self._column_of("metric", None)
        if index is None or self.sheet.are_numbers(index):
            return None
        texts = self.sheet.texts(index)
        names = list(dict.fromkeys(texts))
        matches = names if metric is None else matching_names(metric, names)
        if len(matches) > 1:
            text = f"{self.sheet.name} holds several metrics, {quote_all(matches)}; say which"
            self.questions.add(text, metric=matches[0])
        self._keep_rows(index, matches[:1])
        return matches[0] if matches else None

    def _column_of(self, role: str, label: Label) -> Column:
        """Return the index of the column of a role, a key of `COLUMN_NAMES`.

        Args:
            role: the role.
            label: the column's name; None or "headers" infers it.
        """
        if label is not None and label != "headers":
            return self.sheet.index(label)
        labels = self.sheet.labels

        def is_unlikely(index: int) -> bool:  # a column "size" may be the size of models
            is_other = not snake_case(labels[index]).startswith(role)
            return has_role("parameters", labels[index]) if role == "size" else is_other

        indices = [index for index, name in enumerate(labels) if has_role(role, name)]
        if len(indices) > 1:
            listed = quote_all([labels[index] for index in indices])
            likeliest, *other_labels = (labels[index] for index in sorted(indices, key=is_unlikely))
            text = f"{self.sheet.name} has the columns {listed}, any of which may be the one that"
            options = {role: likeliest} if role in ("model", "size") else {"ignore": other_labels}
            self.questions.add(f"{text} holds the {role}; say which", **options)
        return min(indices, key=is_unlikely, default=None)

    def _seeds(self, label: Label) -> list[int]:
        """Return the indices of the columns of seeds or folds, which distinguish repeated runs.

        Args:
            label: name of one of them; None infers all.
        """
        label_cols = [] if label is None else [self.sheet.index(label)]
        seeds = [index for index, name in enumerate(self.sheet.labels) if has_role("seed", name)]
        return label_cols + [index for index in seeds if index not in label_cols]

    def _repeat_names(self, indices: Sequence[int]) -> list[str] | None:
        """Return the seed of each row as text, from the columns of seeds; None without any."""
        rows = zip(*(self.sheet.texts(index) for index in indices), strict=True)
        return [", ".join(row) for row in rows] if indices else None

    def _first_as_models(self, sizes: Mapping[int, float]) -> Column:
        """Return 0 if the first column can be the models' column in a table that names none.

        Args:
            sizes: index -> size of the columns that are named by a size.

        Returns:
            0; None if the first column holds training set sizes, and the header names models by
            larger numbers, such as 7B.

        Raises:
            TableError: the first column holds other numbers, or its name is not one of models.
        """
        sheet, label = self.sheet, self.sheet.labels[0]
        named_size = has_role("size", label) and not has_role("parameters", label)
        has_sizes = 0 not in sizes and sheet.are_sizes(0)
        largest = max(map(sheet.size, sheet.columns[0])) if has_sizes and named_size else math.inf
        if largest < min(sizes.values()):
            return None
        is_numeric = 0 in sizes or sheet.are_numbers(0)
        if has_sizes or is_numeric or snake_case(label) in NOT_MODEL_COLUMNS:
            text = f"no column of {sheet.name} names the models, and its first, {quote(label)},"
            options = {"model": label} if label and has_sizes and not is_numeric else {}
            raise TableError(f"{text} holds no names; expected one called name or model", **options)
        return 0

    def _question_unused(self, used: Collection[Column], model_col: Column, strict: bool) -> None:
        """Add a question for each column without a role that may not be ignored silently.

        If a question suggests a value of a text column, only the rows with this value are kept.

        Args:
            used: indices of the columns with a role.
            model_col: index of the column of models; None if a row holds values of all models.
            strict: whether columns of numbers that are named by a metric are questioned, too.
        """
        table, unused = self.sheet.name, []
        for index, label in enumerate(self.sheet.labels):
            if index in used or label in self.filters:
                continue
            has_numbers = self.sheet.are_numbers(index) or self.sheet.are_counts(index)
            if has_numbers or re.match(r"\W*\d", label):
                unused += [label] if strict or metric_word(label) is None else []
                continue
            key, texts = snake_case(label), self.sheet.texts(index)
            if not label and any(map(is_summary_row, texts)):  # the result of `describe`
                raise TableError(f"the rows {quote_all(texts)} of {table} sum others up")
            # A text that is the same in all rows of a model describes the model.  One that differs
            # within a model splits its runs into groups, whose losses lie on different curves.
            values = list(dict.fromkeys(texts))
            models = [""] * len(texts) if model_col is None else self.sheet.texts(model_col)
            pairs = {*zip(texts, models, strict=True)}
            unfinished = [value for value in values if marks_unfinished(key, value)]
            varies = len(pairs) > len(set(models))
            if not (unfinished or varies or (key in FILTER_COLUMNS and len(values) > 1)):
                continue
            choices = [x for x in values if x not in unfinished and x.lower() not in TRAINING]
            is_choice = key in CHOICE_COLUMNS or {x.lower() for x in values} <= SPLITS
            is_choice |= bool(unfinished) and len(choices) == 1
            text = f"the column {quote(label)} of {table} holds"
            if is_choice and choices:
                rows, model_counts = Counter(texts), Counter(value for value, _ in pairs)
                suffix = "" if model_col is None else " of {} models"
                counts = [f"{rows[x]} rows{suffix.format(model_counts[x])}" for x in values[:9]]
                listed = ", ".join(map("{} ({})".format, map(quote, values), counts))
                best = max(choices, key=lambda x: (not is_missing(x), model_counts[x], rows[x]))
                self.questions.add(f"{text} {listed}; say of which the rows count", **{label: best})
                self._keep_rows(index, {best})
            else:
                text = f"{text} {quote_all(values, 4)}; leave it out if its rows are comparable"
                text += f", {quote_all(unfinished)} too" if unfinished else ""
                self.questions.add(text, ignore=[label])
        if unused:
            text = f"{table} has numbers in {quote_all(unused)}, not named by a size such as 1000"
            self.questions.add(f"{text} or 1k; rename, leave out or say what it is", ignore=unused)

    def _keep_models(self, index: int) -> list[str]:
        """Remove ignored models and summary rows (with a question), and return each row's model.

        Args:
            index: of the column of models.

        Raises:
            TableError: the column does not name models, or an ignored name does not exist.
        """
        names, label = self.sheet.texts(index), self.sheet.labels[index]
        if snake_case(label) == "checkpoint" and all(name.isdigit() for name in names):
            raise TableError(f"the column {quote(label)} of {self.sheet.name} names no models")
        for label in self.unknown:
            if label not in names:
                self.sheet.index(label)  # raises, as there is no such column either
        summaries = [x for x in dict.fromkeys(names) if x not in self.unknown and is_summary_row(x)]
        if summaries:
            text = f"{quote_all(summaries)} of {self.sheet.name} say something of models"
            text += " and are none; leave them out, or rename a model"
            self.questions.add(text, ignore=summaries)
        ignored = {*self.unknown, *summaries}
        self._keep_rows(index, {*names} - ignored)
        return self.sheet.texts(index)

    def _wide_records(self, sizes: Mapping[int, float], model_col: int, seed: Label) -> Records:
        """Return the runs of a wide table.

        Args:
            sizes: index -> size of the columns that are named by a size.
            model_col: index of the column of models.
            seed: name of the column of seeds; None infers it.
        """
        seeds = self._seeds(seed)
        count_col = self._column_of("parameters", None)
        count_col = None if count_col == model_col else count_col
        self._question_unused({*sizes, count_col, model_col, *seeds}, model_col, strict=True)
        names, sheet = self._keep_models(model_col), self.sheet
        # A run for every cell, row by row.
        values = np.stack([sheet.numbers(index, names) for index in sizes], -1).ravel()
        models = [name for name in names for _ in sizes]
        cell_sizes = np.tile([*sizes.values()], len(names))
        seed_texts = self._repeat_names(seeds)
        seed_texts = None if seed_texts is None else list(np.repeat(seed_texts, len(sizes)))
        percent, metric = sheet.has_percent_signs(list(sizes)), self.row_metric
        counts = _parameters(sheet, count_col, names)
        roles = f"; models are read from {quote(sheet.labels[model_col])}, sizes from the header"
        runs = sheet.name, models, cell_sizes, values
        return Records(*runs, seed_texts, counts, metric, percent, roles)

    def _melt(self, size_col: int, model_cols: Sequence[int], seeds: Sequence[int]) -> Records:
        """Return the runs of a table with a row for each size and a column for each model.

        Args:
            size_col: index of the column of sizes.
            model_cols: indices of the columns of models.
            seeds: indices of the columns of seeds.
        """
        self._question_unused({size_col, *model_cols, *seeds}, None, strict=True)
        sheet, label = self.sheet, self.sheet.labels[size_col]
        sizes = [self._size(cell, label) for cell in sheet.columns[size_col]]
        if not label and (doubt := doubt_about_sizes(sheet.columns[size_col], sizes)):
            texts = quote_all(sheet.texts(size_col))
            text = f"the first column of {sheet.name} holds {texts}, which {doubt}"
            raise TableError(f"{text}; if they are training examples, call it rows")
        listed = quote_all([sheet.labels[index] for index in model_cols], 4)
        text = f"{sheet.name} is read with sizes down ({quote(label)}) and models across ({listed})"
        warnings.warn(text, stacklevel=4)
        id_cols = [size_col, *seeds]
        cells = [
            (sheet.labels[index], *ids, value)
            for index in model_cols
            for *ids, value in zip(*(sheet.columns[p] for p in (*id_cols, index)), strict=True)
            if not is_missing(value)
        ]
        labels = ["model", *(sheet.labels[index] for index in id_cols), "value"]
        melted = [list(column) for column in zip(*cells, strict=True)] or [[]] * len(labels)
        self.sheet = replace(self.sheet, labels=labels, columns=melted)
        return self._long_records(1, 0, range(2, 1 + len(id_cols)), None)

    def _guess_size_column(self, used: Collection[Column]) -> int:
        """Return the index of the most likely column of sizes in a table that names none.

        A question suggests the column.

        Args:
            used: indices of columns with another role.

        Raises:
            TableError: no column can be that of the sizes.
        """
        sheet, table, labels = self.sheet, self.sheet.name, self.sheet.labels
        size_words = [len(SIZE_WORDS & set(snake_case(label).split("_"))) for label in labels]
        indices = [p for p, label in enumerate(labels) if p not in used and not metric_word(label)]
        times = NOT_MODEL_COLUMNS - SIZE_WORDS  # epochs and steps of one training, years, layers
        indices = [p for p in indices if snake_case(labels[p]) not in times]
        # Ambiguous cells ("0.25", "1.000") are accepted if the column's name is one of sizes.
        indices = [p for p in indices if sheet.are_sizes(p, allow_doubtful=bool(size_words[p]))]
        text = f"{table} has no column named by a number of training examples, such as 1000 or 1k,"
        text += f" and none that holds them (rows, n, train_samples); it has {quote_all(labels)}"
        if not indices:
            raise TableError(text)
        index = max(indices, key=size_words.__getitem__)
        self.questions.add(text, size=labels[index])
        return index

    def _guess_model_column(self, used: Collection[Column]) -> int:
        """Return the index of the most likely column of models in a table that names none.

        A question suggests the column.

        Args:
            used: indices of columns with another role.

        Raises:
            TableError: no column can be that of the models.
        """
        sheet, labels = self.sheet, self.sheet.labels
        indices = [p for p in range(len(labels)) if p not in used]
        indices = [p for p in indices if not sheet.are_numbers(p) and not sheet.are_counts(p)]
        indices = [p for p in indices if snake_case(labels[p]) not in NOT_MODEL_COLUMNS] or indices
        text = f"no column of {sheet.name} names the models; call it name or model"
        if not indices:
            raise TableError(f"{text} (runs of one model alone are for jx.scaling.fit)")
        # Models have several runs each: prefer columns whose cells are neither all equal nor all
        # different.
        index = min(indices, key=lambda p: len(set(sheet.texts(p))) in (1, len(sheet.texts(p))))
        if labels[index]:  # an index without a name is accepted without a question
            self.questions.add(text, model=labels[index])
        return index

    def _long_records(
        self, size_col: Column, model_col: Column, seeds: Sequence[int], metric: Label
    ) -> Records:
        """Return the runs of a table with a row for each run.

        Args:
            size_col, model_col: indices of the columns of sizes and models; None infers them.
            seeds: indices of the columns of seeds.
            metric: name of the metric; None infers it.
        """
        table, labels = self.sheet.name, self.sheet.labels
        if size_col is None:
            size_col = self._guess_size_column({model_col, *seeds})
        if model_col is None:
            model_col = self._guess_model_column({size_col, *seeds})
        is_example_count = not has_role("parameters", labels[size_col])
        count_col = self._column_of("parameters", None) if is_example_count else None
        value_col = self._value_column(metric, {size_col, model_col, *seeds, count_col})
        used = {size_col, model_col, *seeds, value_col, count_col}
        self._question_unused(used, model_col, strict=False)
        names = self._keep_models(model_col)
        sheet, sizes = self.sheet, []
        for cell, name in zip(sheet.columns[size_col], names, strict=True):
            try:
                sizes.append(self._size(cell, labels[size_col]))
            except TableError as error:
                column_text = f"in the column {quote(labels[size_col])} of {quote(name)}"
                options = {"ignore": [name]} if is_missing(cell) else error.options
                raise TableError(f"{column_text}, {error.args[0]}", **options) from None
        label, values = labels[value_col], sheet.numbers(value_col, names)
        seed_texts = self._repeat_names(seeds)
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):  # a mean over the other seeds would hide a run that diverged
            run = wrong[0]
            seed = f" with seed {seed_texts[run]}" if seed_texts else ""
            text = f"the {label} of the run of {quote(names[run])} at size {sizes[run]:g}{seed} is"
            text += f" {values[run]:g} or empty; expected a number"
            raise TableError(f"{text}: leave that row out if the run is not to count")
        metric = self.row_metric or (metric_word(label) and label)
        percent, counts = sheet.has_percent_signs([value_col]), _parameters(sheet, count_col, names)
        columns = quote_all([labels[index] for index in (model_col, size_col, value_col)])
        roles = f"; models, sizes and values are read from {columns}"
        runs = table, names, np.array(sizes), values
        return Records(*runs, seed_texts, counts, metric, percent, roles)

    def _value_column(self, metric: Label, used: Collection[Column]) -> int:
        """Return the index of the column of values, found by the metric or by the column's name.

        A question is added if several columns are possible.

        Args:
            metric: name of the metric; None infers it.
            used: indices of columns with another role.

        Raises:
            TableError: no column can be that of the values.
        """
        table, labels = self.sheet.name, self.sheet.labels
        unused = [p for p in range(len(labels)) if p not in used]
        candidates = [p for p in unused if self.sheet.are_numbers(p)]
        indices = [p for p in candidates if has_role("value", labels[p])]
        # A metric's column may hold a cell that is no number: `Sheet.numbers` names the cell.
        if metric is None:
            indices += [p for p in unused if metric_word(labels[p]) and self.sheet.has_digits(p)]
        elif names := matching_names(metric, [labels[p] for p in unused]):
            indices = [p for p in unused if labels[p] in names]
        listed = quote_all([labels[p] for p in indices or candidates], 3)
        if len(indices) > 1:
            text = f"{table} has several columns of values, {listed}; say which"
            self.questions.add(text, metric=labels[indices[0]])
        if not indices:
            wanted_text = "values" if metric is None else f"the metric {quote(metric)}"
            text = f"{table} has no column named by a size, nor one of {wanted_text} that is known,"
            text += f" among the other columns of numbers ({listed or 'none'}): check its cells"
            if metric is not None or not candidates:
                raise TableError(text)
            label = labels[candidates[0]]
            text += f", or say {quote(label + ':higher')} (the best is 1, or 100 %), or ':lower'"
            self.questions.add(text, metric=f"{label}:higher|lower")
            indices = candidates
        return indices[0]

    def _size(self, value: object, label: str = "") -> float:
        """Return `Sheet.size`; a share of the data is returned unchanged, with a question."""
        try:
            return self.sheet.size(value, label)
        except DoubtfulSize as error:
            if "full" not in error.options:
                raise
            self.questions.add(error.args[0], **error.options)
            self.sheet = replace(self.sheet, full=1)
            return self.sheet.size(value, label)

    def _header_sizes(self) -> dict[int, float]:
        """Return the columns that are named by a size, index -> size."""
        sizes: dict[int, float] = {}
        for index, header in enumerate(self.sheet.labels):
            try:
                sizes[index] = self._size(header)
            except DoubtfulSize as error:
                raise TableError(f"in the header of {self.sheet.name}, {error.args[0]}") from None
            except TableError:  # the column is not named by a size
                continue
        return sizes


def _parameters(sheet: Sheet, index: Column, names: Sequence[str]) -> dict[str, float] | None:
    """Return the number of parameters of each model, name -> count, NaN where it is missing.

    Args:
        sheet: the cells.
        index: index of the column of numbers of parameters; None returns None.
        names: name of the model of each row.

    Raises:
        TableError: a cell is not a number, or a model has two different ones.
    """
    if index is None:
        return None
    counts: dict[str, float] = {}
    for cell, name in zip(sheet.columns[index], names, strict=True):
        if is_missing(cell):
            continue
        try:
            count = sheet.parse_count(cell)
        except TableError:
            label = sheet.labels[index]
            text = f"{quote(cell)} in column {quote(label)} of {quote(name)} is no number of"
            raise TableError(f"{text} parameters such as 110M", ignore=[label]) from None
        if counts.setdefault(name, count) != count:
            raise TableError(f"{sheet.name} has two numbers of parameters of {quote(name)}")
    return dict.fromkeys(names, math.nan) | counts
