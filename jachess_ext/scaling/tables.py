"""`read_table`: tables of losses or scores, wide or long, from a file or a DataFrame."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeAlias

import numpy as np

from .predictive import Array, Index
from .runs import (
    LossTable,
    TableError,
    higher_is_better,
    metric_word,
    sampling_noise,
    shown,
    to_forecast,
    words,
    worst_value,
)
from .sheets import DoubtfulSize, Questions, Sheet, Source, is_missing, listed, read_sheet

NAMES = {
    "model": r"model(_name|_id|_name_or_path)?|(config_)?name|checkpoint",
    "parameters": r"size|((n|num|number_of)_)?param(eter)?s|parameter_count",
    "size": r"(max_(?=train))?((n|num|number_of|tr|train|training|few_shot|data|dataset|set|subset|"
    r"sample|labell?ed)_)*(size|rows|samples|examples|instances|tokens|fraction|share|percent|"
    r"percentage|pct|[nd])(_train)?|n_train",
    "seed": r"(random_)?seed|trial|repeat|replicate|fold",
    "value": r"value|score",
    "metric": r"metric",
}
"""Names of columns by what they hold, in lower case and with _ between words."""
_STATUS = words("state status finished completed success converged")
_CHOSEN = _STATUS | words(
    "task tasks dataset data data_set language lang domain benchmark split subset eval_set "
    "test_set corpus"
)
"""Names of columns of words of which the rows of one are wanted, whichever the model."""
_NO_NAMES = _CHOSEN | words(
    "step steps epoch epochs iteration iterations group optimizer layer layers year date time run "
    "lr k shots"
)
"""Names of first columns that name no models."""
_UNFINISHED = words(
    "crashed crash failed failure fail error errored timeout timedout running pruned killed "
    "cancelled canceled aborted pending queued waiting scheduled preempted preempting oom "
    "diverged stopped interrupted terminated incomplete unfinished partial suspended paused"
)
"""Words of a cell that say that its run did not end as it should."""
_SPREADS = words(
    "std stdev stddev sd stderr sem ci variance delta diff difference gap improvement pvalue"
)
"""A name that ends in one of these is no model's."""
_SUMMARIES = _SPREADS | words(
    "se var mean average avg median min minimum max maximum best worst total sum count all "
    "overall gain change rank time runtime seconds hours gpu n ntest ntrain rows samples size "
    "examples tokens params parameters range top rel relative abs absolute error deviation "
    "standard geomean summary iqr mad flops cost memory speed lr epoch epochs step steps batch "
    "learning id date year unique freq checkpoint ckpt iteration iter seed fold trial lowest "
    "highest"
)
_FILLERS = words(
    "of the over across in on per models model name names seeds runs p value test train training "
    "dev num number score scores macro micro geometric harmonic rate quantile percentile t and"
)
"""A name of nothing but these words, and a summary's among them, says something of other rows."""


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
    All that is open is asked in one error, whose arguments answer it.

    Args:
        source: path of a csv file (separated by commas, tabs or semicolons), of a text with
            markdown tables, of JSON (lines: .jsonl) or of a workbook (.xlsx); pandas DataFrame or
            Series, or LossTable.
        fewest: models there must be.
        metric: what the numbers are: "loss", "accuracy", "eval_f1", …; None: what a column says,
            else losses.  Of scores, whose best is 1 or 100 %, the methods extrapolate what is
            missing.  In a long table with several, the column to read.
        test_rows: examples a score was measured on: where nothing is missing, half of one is, and
            an accuracy or error rate has the noise of a sample of so many.
        ignore: columns that are not to be read, and models.
        model, size, seed: columns of a long table (of a wide one model and seed) by other names;
            size="headers": the columns' names are sizes, even where they look like years or layers.
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

    Example:
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
        raise TableError(f"decimal is {shown(decimal)}; expected '.' or ','")
    questions = Questions(ignore)
    try:
        cells = replace(read_sheet(source, decimal == ",", sheet, questions), full=full)
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


def plain_name(metric: str) -> str:
    """Return a metric's name without what says where it was measured, such as eval_ or val/."""
    name = re.sub(r"^(eval|evaluation|val|valid|validation|dev|test)[_/. -]+", "", metric.lower())
    return re.sub(r"[^a-z0-9]+", "_", name.rpartition(":")[0] or name)


def alike(metric: str, names: Iterable[str]) -> list[str]:
    """Return the names that are a metric's: the very one, or else all that `plain_name` equates."""
    names = list(names)
    plain = plain_name(metric)
    return [x for x in names if x == metric] or [x for x in names if plain_name(x) == plain]


def _key(label: str) -> str:
    """Return a column's name in lower case with _ between words: "Train Size", "trainSize"."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", label).lower().replace("%", " percent")
    parts = re.sub(r"^(params|metrics|config|summary|hparams|tags)[\W_]+", "", parts)
    return "_".join(re.findall(r"[^\W_]+", parts))


def _is(kind: str, label: str) -> bool:
    """Return whether a column's name is one of a kind of `NAMES`."""
    return re.fullmatch(NAMES[kind], _key(label)) is not None


def _summary(name: str) -> bool:
    """Return whether a row of this name is none of a model."""
    text = name.lower().replace("p-value", "pvalue")
    parts = re.findall(r"[^\W_]+", text)
    outside = re.findall(r"[^\W_]*[^\W\d_][^\W_]*", re.sub(r"\(.*?\)", "", text))
    marks = name.endswith("%") or re.search(r"±|∆|\bδ\b|\bσ\b", name.lower())
    if marks or is_missing(name) or not re.search(r"\w", name):
        return True
    # "max" sums up and "maxvit" is a model; so is "mean-pooled bert", as "pooled" is no summary's
    # word.  Only a name of nothing but such words, parentheses aside, is taken for one.
    alone = not _SUMMARIES.isdisjoint(outside) and set(outside) <= _SUMMARIES | _FILLERS
    return alone or not _SPREADS.isdisjoint(parts[-1:]) or _is("model", name)


@dataclass(frozen=True)
class Records:
    """Values of runs.

    Attributes:
        what: the table's name in errors.
        models, sizes, values: of every run, [k].
        seeds: of every run, or None: no run is repeated.
        parameters: by model; None where no column tells.
        metric: as the table tells it, or None.
        per_cent: whether the values have per cent signs.
    """

    what: str
    models: Sequence[str]
    sizes: Array
    values: Array
    seeds: Sequence[str] | None = None
    parameters: dict[str, float] | None = None
    metric: str | None = None
    per_cent: bool = False

    @property
    def names(self) -> list[str]:
        """The models in the table's order."""
        return list(dict.fromkeys(self.models))


Name: TypeAlias = str | None
"""Of a column or a metric; None: the table is to tell."""
Place: TypeAlias = int | None
"""Of a column, from the left; None: there is none, or it is not yet known."""


class _Reader:
    """Reads one sheet: who is who among its columns, and what that leaves open.

    Attributes:
        sheet: the cells, of which rows that are not wanted go.
        questions: what is open.
        ignore: columns and models to leave out.
    """

    def __init__(self, sheet: Sheet, questions: Questions, ignore: Sequence[str]) -> None:
        self.questions = questions
        self.unknown = [label for label in ignore if label not in sheet.labels]
        for label in ignore:
            if label in sheet.labels:
                sheet.place(label)  # raises where there are two
        sheet = sheet.keep([label not in ignore for label in sheet.labels])
        labels = [re.sub(r"^Unnamed: \d+$", "", label) for label in sheet.labels]
        empty = [all(map(is_missing, column)) for column in sheet.columns]
        columns = [bool(label) or not none for label, none in zip(labels, empty, strict=True)]
        self.sheet = replace(sheet, labels=labels).keep(columns)
        for label in labels:
            if f"{label}.1" in labels and sheet.what == "the table":
                renamed = f"(pandas calls the second {shown(label + '.1')})"
                raise TableError(f"the table has the column {shown(label)} twice {renamed}")

    def records(
        self, metric: Name, model: Name, size: Name, seed: Name, rows: Mapping[str, object]
    ) -> Records:
        """Return the table's values; the arguments are `read_table`'s."""
        for label, value in rows.items():
            texts = self.sheet.texts(self.sheet.place(label))
            if str(value) not in texts:
                column = f"its column {shown(label)}, which holds {listed([*dict.fromkeys(texts)])}"
                raise TableError(f"{self.sheet.what} has no {shown(str(value))} in {column}")
            self.sheet = self.sheet.rows([text == str(value) for text in texts])
        self.chosen = set(rows)
        row_metric = self._one_metric(metric)
        self._drop_counter()
        # Three ways a table may lie.  Sizes in the header and a column of models: wide.  Else, if
        # one column holds sizes and all others hold numbers, without a word on what they measure,
        # these are named by models: sizes down.  Anything else has a row a run.
        sizes = self._header_sizes() if size in (None, "headers") else {}
        model_at = self._role("model", model)
        if sizes and model_at is None:
            model_at = self._first(sizes)
        if sizes and model_at is not None:
            headers = [self.sheet.headers[place] for place in sizes]
            doubt = _doubt(headers, list(sizes.values()))
            if doubt and size is None and self.sheet.full is None:
                heads = listed(list(map(str, headers)))
                text = f"the header of {self.sheet.what} has {heads}, which {doubt}; say so if they"
                self.questions.add(f"{text} are numbers of training examples", size="headers")
            return self._wide(sizes, model_at, seed, row_metric)
        size_at = self._role("size", size)
        sheet, labels = self.sheet, self.sheet.labels
        seeds = self._seeds(seed)
        if size_at is None and labels and not labels[0] and sheet.sized(0):
            size_at = 0
        others = {*range(len(labels))} - {size_at, *seeds}
        others = {p for p in others if sheet.numeric(p) or len(set(sheet.texts(p))) > 1}
        values = [p for p in others if metric_word(labels[p]) or _is("value", labels[p])]
        across = model_at is None and len(others) > 1 and not values
        if size_at is not None and across and all(map(sheet.numeric, others)):
            return self._down(size_at, sorted(others), seeds, row_metric)
        return self._long(size_at, model_at, seeds, metric, row_metric)

    def _drop_counter(self) -> None:
        """Leave out a first column without a name that only counts rows."""
        sheet = self.sheet
        if sheet.labels[:1] == [""] and all(text.isdigit() for text in sheet.texts(0)):
            others = range(1, len(sheet.labels))
            sized = any(re.fullmatch(r"\W*\d.*", sheet.labels[place]) for place in others)
            if sized or not all(map(sheet.numeric, others)):
                self.sheet = sheet.keep([place > 0 for place in range(len(sheet.labels))])

    def _one_metric(self, metric: Name) -> Name:
        """Keep the rows of one metric where a column `metric` names it, and return the metric."""
        place = self._role("metric", None)
        if place is None or self.sheet.numeric(place):
            return None
        texts = self.sheet.texts(place)
        names = list(dict.fromkeys(texts))
        matches = names if metric is None else alike(metric, names)
        if metric is not None and not matches:
            column = f"its column {shown(self.sheet.labels[place])} holds {listed(names)}"
            text = f"{self.sheet.what} has no rows of the metric {shown(metric)}"
            raise TableError(f"{text}; {column}")
        if len(matches) > 1:
            text = f"{self.sheet.what} holds several metrics, {listed(matches)}; say which"
            self.questions.add(text, metric=matches[0])
        self.sheet = self.sheet.rows([text in matches[:1] for text in texts])
        return matches[0] if matches else None

    def _role(self, kind: str, label: Name) -> Place:
        """Return where the column `label` is, or the one with a name of a kind of `NAMES`."""
        if label is not None and label != "headers":
            return self.sheet.place(label)
        labels = self.sheet.labels

        def doubtful(place: int) -> bool:  # "size" may be the models'
            name = labels[place]
            return _is("parameters", name) if kind == "size" else not _key(name).startswith(kind)

        places = [place for place, name in enumerate(labels) if _is(kind, name)]
        if len(places) > 1:
            names = listed([labels[place] for place in places])
            first, *others = (labels[place] for place in sorted(places, key=doubtful))
            text = f"{self.sheet.what} has the columns {names}, any of which may be the one that"
            answer = {kind: first} if kind in ("model", "size") else {"ignore": others}
            self.questions.add(f"{text} holds the {kind}; say which", **answer)
        return min(places, key=doubtful, default=None)

    def _seeds(self, label: Name) -> list[int]:
        """Return the columns that tell repeated runs apart, such as seeds and folds."""
        named = [] if label is None else [self.sheet.place(label)]
        labels = enumerate(self.sheet.labels)
        return named + [place for place, x in labels if _is("seed", x) and place not in named]

    def _repeats(self, places: Sequence[int]) -> list[str] | None:
        rows = zip(*(self.sheet.texts(place) for place in places), strict=True)
        return [", ".join(row) for row in rows] if places else None

    def _first(self, sizes: Mapping[int, float]) -> Place:
        """Return the first column, which names the models where none does by its own name.

        None: sizes stand there, and models are named by larger ones in the header, such as 7B.
        """
        sheet, label = self.sheet, self.sheet.labels[0]
        of_sizes = _is("size", label) and not _is("parameters", label)
        sized = 0 not in sizes and sheet.sized(0)
        if sized and of_sizes and max(map(sheet.size, sheet.columns[0])) < min(sizes.values()):
            return None
        numeric = 0 in sizes or sheet.numeric(0)
        if sized or numeric or _key(label) in _NO_NAMES:
            why = "numbers" if numeric else "sizes" if sized else "something else"
            text = f"no column of {sheet.what} names the models, and its first, {shown(label)},"
            answer = {"model": label} if label and sized and not numeric else {}
            raise TableError(f"{text} holds {why}; expected one called name or model", **answer)
        return 0

    def _others(self, used: Collection[Place], model_at: Place, numbers: bool) -> None:
        """Ask about the columns that are not used, and keep the rows that the answers want.

        Args:
            used: the columns whose part is clear.
            model_at: the column of the models; None: rows are of all models.
            numbers: whether columns of metrics count among the numbers that are asked about.
        """
        what, left = self.sheet.what, []
        for place, label in enumerate(self.sheet.labels):
            if place in used or label in self.chosen:
                continue
            if self.sheet.numeric(place) or self.sheet.counts(place) or re.match(r"\W*\d", label):
                left += [label] if numbers or metric_word(label) is None else []
                continue
            key, texts = _key(label), self.sheet.texts(place)
            if not label and any(map(_summary, texts)):  # as of `describe`
                raise TableError(f"the rows {listed(texts)} of {what} sum others up")
            # A word that is the same in all rows of a model describes the model.  One that differs
            # within a model splits its runs into kinds, whose losses lie on different curves.
            values = list(dict.fromkeys(texts))
            unfinished = [value for value in values if _unfinished(key, value)]
            usable = [x for x in values if not is_missing(x) and x not in unfinished]
            models = [""] * len(texts) if model_at is None else self.sheet.texts(model_at)
            varies = len(set(zip(models, texts, strict=True))) > len(set(models))
            if not (unfinished or varies or (key in _CHOSEN and len(values) > 1)):
                continue
            text = f"the column {shown(label)} of {what} holds {listed(values, 4)}"
            numbered = len(values) == len(texts) and key not in _CHOSEN
            if not usable or numbered or label in _OPTIONS:
                text += "; leave it out if its rows are comparable"
                self.questions.add(text, ignore=[label])
            else:
                self.questions.add(f"{text}; say of which the rows count", **{label: usable[0]})
                self.sheet = self.sheet.rows([text == usable[0] for text in texts])
        if left:
            text = f"{what} has numbers in {listed(left)}, not named by a size that can be read,"
            self.questions.add(
                f"{text} such as 1000, 1k or 1,000; rename or leave out", ignore=left
            )

    def _of_models(self, place: int) -> list[str]:
        """Keep the rows of models that are wanted, ask about rows of none, and return the names."""
        names, label = self.sheet.texts(place), self.sheet.labels[place]
        if _key(label) == "checkpoint" and all(name.isdigit() for name in names):
            raise TableError(f"the column {shown(label)} of {self.sheet.what} names no models")
        for label in self.unknown:
            if label not in names:
                self.sheet.place(label)  # raises
        summaries = [x for x in dict.fromkeys(names) if x not in self.unknown and _summary(x)]
        if summaries:
            text = f"{listed(summaries)} of {self.sheet.what} say something of models and are none"
            self.questions.add(f"{text}; leave them out, or rename a model", ignore=summaries)
        self.sheet = self.sheet.rows([name not in (*self.unknown, *summaries) for name in names])
        return self.sheet.texts(place)

    def _wide(self, sizes: Mapping[int, float], model_at: int, seed: Name, metric: Name) -> Records:
        seeds = self._seeds(seed)
        count_at = self._role("parameters", None)
        count_at = None if count_at == model_at else count_at
        self._others({*sizes, count_at, model_at, *seeds}, model_at, numbers=True)
        names, sheet = self._of_models(model_at), self.sheet
        # A run for every cell, row by row.
        values = np.stack([sheet.numbers(place, names) for place in sizes], -1).ravel()
        models, of_cells = [x for x in names for _ in sizes], np.tile([*sizes.values()], len(names))
        repeats = self._repeats(seeds)
        repeats = None if repeats is None else list(np.repeat(repeats, len(sizes)))
        counts, per_cent = _parameters(sheet, count_at, names), sheet.per_cent(list(sizes))
        return Records(sheet.what, models, of_cells, values, repeats, counts, metric, per_cent)

    def _down(
        self, size_at: int, columns: Sequence[int], seeds: Sequence[int], metric: Name
    ) -> Records:
        """Return the values of a table with sizes down and models across, made a long one."""
        self._others({size_at, *columns, *seeds}, None, numbers=True)
        sheet, label = self.sheet, self.sheet.labels[size_at]
        sizes = [self._size(cell, label) for cell in sheet.columns[size_at]]
        if not label and (doubt := _doubt(sheet.columns[size_at], sizes)):
            text = f"the first column of {sheet.what} holds {listed(sheet.texts(size_at))}, which"
            raise TableError(f"{text} {doubt}; if they are training examples, call it rows")
        across = listed([sheet.labels[place] for place in columns], 4)
        text = f"{sheet.what} is read with sizes down ({shown(label)}) and models across ({across})"
        warnings.warn(text, stacklevel=4)
        heads = [size_at, *seeds]
        cells = [
            (sheet.labels[place], *head, value)
            for place in columns
            for *head, value in zip(*(sheet.columns[p] for p in (*heads, place)), strict=True)
            if not is_missing(value)
        ]
        labels = ["model", *(sheet.labels[place] for place in heads), "value"]
        long = [list(column) for column in zip(*cells, strict=True)] or [[]] * len(labels)
        self.sheet = replace(self.sheet, labels=labels, headers=labels, columns=long)
        return self._long(1, 0, range(2, 1 + len(heads)), None, metric)

    def _size_column(self, others: Collection[Place]) -> int:
        """Return the column most like one of sizes, where no name tells, and ask about it."""
        sheet, what, labels = self.sheet, self.sheet.what, self.sheet.labels
        words_of = [len(_SIZE_WORDS & set(_key(label).split("_"))) for label in labels]
        places = [p for p, label in enumerate(labels) if p not in others and not metric_word(label)]
        # Cells that only may be sizes ("0.25", "1.000") count where the name speaks of a size.
        places = [p for p in places if sheet.sized(p, doubtful=bool(words_of[p]))]
        text = f"{what} has no column named by a number of training examples, such as 1000 or 1k,"
        text += f" and none that holds them (rows, n, train_samples); it has {listed(labels)}"
        if not places and len({*labels}) < len(labels):  # as `pivot_table` writes csv
            text += "; several header rows are for pandas.read_csv(…, header=[0, 1], index_col=0)"
        if not places:
            raise TableError(text)
        place = max(places, key=words_of.__getitem__)
        self.questions.add(text, size=labels[place])
        return place

    def _model_column(self, others: Collection[Place]) -> int:
        """Return the column most like one of models, where no name tells, and ask about it."""
        sheet, labels = self.sheet, self.sheet.labels
        places = [p for p in range(len(labels)) if p not in others]
        places = [p for p in places if not sheet.numeric(p) and not sheet.counts(p)]
        places = [p for p in places if _key(labels[p]) not in _NO_NAMES] or places
        text = f"no column of {sheet.what} names the models; call it name or model"
        if not places:
            raise TableError(f"{text} (runs of one model alone are for jx.scaling.fit)")
        # Models have several runs each: neither the same word in all rows nor another in every row.
        place = min(places, key=lambda p: len(set(sheet.texts(p))) in (1, len(sheet.texts(p))))
        if labels[place]:  # an index without a name may be the models'
            self.questions.add(text, model=labels[place])
        return place

    def _long(
        self, size_at: Place, model_at: Place, seeds: Sequence[int], metric: Name, row_metric: Name
    ) -> Records:
        what, labels = self.sheet.what, self.sheet.labels
        if size_at is None:
            size_at = self._size_column({model_at, *seeds})
        if model_at is None:
            model_at = self._model_column({size_at, *seeds})
        count_at = None if _is("parameters", labels[size_at]) else self._role("parameters", None)
        value_at = self._values(metric, {size_at, model_at, *seeds, count_at})
        self._others({size_at, model_at, *seeds, value_at, count_at}, model_at, numbers=False)
        names = self._of_models(model_at)
        empty = [is_missing(cell) for cell in self.sheet.columns[size_at]]
        if any(empty):
            without = [*dict.fromkeys(compress(names, empty))]
            text = f"{listed(without)} of {what} have no size; leave out"
            self.questions.add(text, ignore=without)
            self.sheet = self.sheet.rows([name not in without for name in names])
            names = self.sheet.texts(model_at)
        sheet, sizes = self.sheet, []
        for cell, name in zip(sheet.columns[size_at], names, strict=True):
            try:
                sizes.append(self._size(cell, labels[size_at]))
            except TableError as error:
                column = f"in the column {shown(labels[size_at])} of {shown(name)}"
                raise TableError(f"{column}, {error.args[0]}", **error.options) from None
        label, values = labels[value_at], sheet.numbers(value_at, names)
        repeats = self._repeats(seeds)
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):  # a mean over the other seeds would hide a run that diverged
            run = wrong[0]
            text = f"the {label} of the run of {shown(names[run])} at size {sizes[run]:g}"
            text += f" with seed {repeats[run]}" if repeats else ""
            text += f" is {values[run]:g} or empty; expected a number"
            raise TableError(f"{text}: leave that row out if the run is not to count")
        metric = row_metric or (metric_word(label) and label)
        counts, per_cent = _parameters(sheet, count_at, names), sheet.per_cent([value_at])
        return Records(what, names, np.array(sizes), values, repeats, counts, metric, per_cent)

    def _values(self, metric: Name, used: Collection[Place]) -> int:
        """Return the column of values, by the metric or by its name."""
        what, labels = self.sheet.what, self.sheet.labels
        free = [p for p in range(len(labels)) if p not in used and self.sheet.numeric(p)]
        places = [p for p in free if _is("value", labels[p])]
        if metric is None:
            places += [p for p in free if metric_word(labels[p]) is not None]
        elif names := alike(metric, [labels[p] for p in free]):
            places = [p for p in free if labels[p] in names]
        columns = listed([labels[p] for p in places or free], 3)
        if len(places) > 1:
            text = f"{what} has several columns of values, {columns}; say which"
            self.questions.add(text, metric=labels[places[0]])
        if not places:
            wanted = "" if metric is None else f" for the metric {shown(metric)}"
            text = f"{what} has no column named by a size, nor one of values that is known{wanted},"
            text += f" among the numbers {columns or 'of no other column'}; call one value"
            if metric is not None or not free:
                raise TableError(text)
            label = labels[free[0]]
            text += f", or say {shown(label + ':higher')} (the best is 1, or 100 %), or ':lower'"
            self.questions.add(text, metric=f"{label}:higher|lower")
            places = free
        return places[0]

    def _size(self, value: object, label: str = "") -> float:
        """Return `Sheet.size`; of a share, the part alone, and ask of how many examples."""
        try:
            return self.sheet.size(value, label)
        except DoubtfulSize as error:
            if "full" not in error.options:
                raise
            self.questions.add(error.args[0], **error.options)
            self.sheet = replace(self.sheet, full=1)
            return self.sheet.size(value, label)

    def _header_sizes(self) -> dict[int, float]:
        """Return the sizes by the places of the columns that are named by them."""
        sizes: dict[int, float] = {}
        for place, header in enumerate(self.sheet.headers):
            try:
                sizes[place] = self._size(header)
            except DoubtfulSize as error:
                raise TableError(f"in the header of {self.sheet.what}, {error.args[0]}") from None
            except TableError:  # another column
                continue
        return sizes


_SIZE_WORDS = words(
    "size rows examples samples train training data shots tokens n instances fraction percent "
    "share subset budget labels labelled labeled sentences amount pct percentage"
)
_OPTIONS = words("fewest metric test_rows ignore model size seed decimal full sheet")


def _unfinished(key: str, value: str) -> bool:
    """Return whether a cell, of a column with this key, says that a run did not end well."""
    no = key in _STATUS and value.lower() in ("false", "no")
    return no or not _UNFINISHED.isdisjoint(re.findall(r"[a-z]+", value.lower()))


def _doubt(headers: Sequence[object], sizes: Sequence[float]) -> str | None:
    """Return what sizes that are told by nothing but their numbers may be instead, or None."""
    # 7B, 13B are models as often as sizes; 2, 4, 8 are shots, 1, 2, 3 layers and 2021, 2022 years.
    # Only what no other reading fits is taken for numbers of examples without asking.
    texts = [str(header).strip() for header in headers]
    steps = np.diff(sorted(sizes))
    if all(re.fullmatch(r"\d+(\.\d+)?\s*[mMbB]", text) for text in texts) and texts:
        return "may be models' numbers of parameters"
    if not texts or not all(re.fullmatch(r"\d+(\.0)?(\W?shots?)?", text) for text in texts):
        return None
    if max(sizes) < 100:
        return "are few, as layers, shots, folds or ranks are"
    if len(steps) and (steps == 1).all():
        return "count up by one"
    return "may be years" if len(steps) and min(sizes) >= 1900 and max(sizes) <= 2100 else None


def _parameters(sheet: Sheet, place: int | None, names: Sequence[str]) -> dict[str, float] | None:
    if place is None:
        return None
    counts: dict[str, float] = {}
    for cell, name in zip(sheet.columns[place], names, strict=True):
        missing = is_missing(cell)
        try:
            count = math.nan if missing else sheet.count(cell)
        except TableError:
            label = sheet.labels[place]
            text = f"{shown(cell)} in column {shown(label)} of {shown(name)} is no number of"
            raise TableError(f"{text} parameters such as 110M", ignore=[label]) from None
        if name in counts and not (counts[name] == count or missing):
            raise TableError(f"{sheet.what} has two numbers of parameters of {shown(name)}")
        counts.setdefault(name, count)
    return counts


def to_table(
    records: Records, metric: str | None, fewest: int = 2, test_rows: int | None = None
) -> LossTable:
    """Return the table of some runs: losses by model and size, means over seeds.

    Args:
        records: the runs.
        metric: of the values; None: they are losses, unless they rise.
        fewest, test_rows: as for `read_table`.

    Raises:
        TableError: as `read_table`.
    """
    what = records.what
    if len(records.names) < fewest:
        raise TableError(f"{what} has {len(records.names)} models; expected {fewest} or more")
    scale = 1.0
    values = records.values
    if metric is not None:
        scale = _scale(records, metric)
        with np.errstate(invalid="ignore", divide="ignore"):
            values = to_forecast(metric, values / scale)
    sizes, places = np.unique(records.sizes, return_inverse=True)
    losses, noise = _pivot(replace(records, values=values), places, sizes)
    if metric is None:
        _refuse_rising(what, losses, records.per_cent)
    elif test_rows is not None:
        if test_rows < 1:
            raise TableError(f"test_rows is {test_rows}; expected a number of examples")
        least = np.maximum(losses, 0.5 / test_rows)
        sampling = sampling_noise(metric, least, test_rows)
        if sampling is not None:
            noise = sampling if noise is None else np.hypot(sampling, np.nan_to_num(noise))
        losses = least if sampling is not None or higher_is_better(metric) else losses
    parameters = None
    if records.parameters is not None:
        parameters = np.array([records.parameters[name] for name in records.names])
    return LossTable(tuple(records.names), sizes, losses, parameters, metric, scale, noise)


def _scale(records: Records, metric: str) -> float:
    """Return 100 for scores in per cent, else 1, and check the values' range."""
    score, worst = higher_is_better(metric), worst_value(metric)
    finite = np.isfinite(records.values)
    highest = float(np.max(records.values, where=finite, initial=-math.inf))
    scale = 100.0 if score and (records.per_cent or highest > 1) else 1.0
    wrong = np.isinf(records.values) | (records.values < scale * worst)
    if score:
        wrong |= records.values > scale
    if wrong.any():
        place = int(wrong.argmax())
        expected = "up to 1, or 100 in per cent" if score else f"from {worst:g} up"
        where = f"{shown(records.models[place])} at size {records.sizes[place]:g}"
        value = f"{records.values[place]:g}; expected one {expected}"
        raise TableError(f"the {metric} of {where} is {value}")
    if scale == 100 and not records.per_cent:
        for name in records.names:
            scores = records.values[finite & (np.array(records.models) == name)]
            if len(scores) and 0 < scores.max() <= 1:
                up_to = f"at most {scores.max():g} and that of others up to {highest:g}"
                text = f"the {metric} of {shown(name)} is {up_to}"
                raise TableError(f"{text}; write all as fractions or all in per cent")
    return scale


def _pivot(records: Records, places: Index, sizes: Array) -> tuple[Array, Array | None]:
    """Return losses by model and size, [n, m], NaN where missing, and standard errors."""
    seeds = records.seeds or [""] * len(places)
    runs = Counter(zip(records.models, records.sizes.tolist(), seeds, strict=True))
    (name, size, seed), count = runs.most_common(1)[0]
    if count > 1:
        text = f"{records.what} has the model {shown(name)} at size {size:g}"
        text += f" with seed {seed}" if seed else ""
        text += " twice; expected one row a model and one column a size, or a column 'seed'"
        raise TableError(f"{text} of repeated runs")
    rows = {name: row for row, name in enumerate(records.names)}
    shape = len(rows), len(sizes)
    cells = np.ravel_multi_index(([rows[name] for name in records.models], places), shape)
    present = ~np.isnan(records.values)
    cells, values = cells[present], records.values[present]

    def total(values: Array) -> Array:
        return np.bincount(cells, values, len(rows) * len(sizes)).astype(np.float64)

    with np.errstate(invalid="ignore", divide="ignore"):
        repeats = total(np.ones_like(values))
        means = total(values) / repeats
        errors = np.sqrt(total((values - means[cells]) ** 2) / (repeats - 1) / repeats)
    return means.reshape(shape), None if records.seeds is None else errors.reshape(shape)


def _refuse_rising(what: str, losses: Array, per_cent: bool) -> None:
    """Raise TableError where as many curves end higher than they begin as end lower, or more.

    And where numbers are in per cent, which falling scores and error rates are.

    Of LCDB's accuracies 97 % of the tables are noticed so, and 7 % of those of its log-losses (in
    which models that overfit rise) are asked about for nothing; of tables with three models and
    four sizes 91 % and 31 %.
    """
    numbers = [curve[np.isfinite(curve)] for curve in losses]
    steps = [curve[-1] - curve[0] for curve in numbers if len(curve)]
    rise, fall = sum(step > 0 for step in steps), sum(step < 0 for step in steps)
    if rise and rise >= fall:
        text = f"the numbers of {what} rise with size in {rise} of {rise + fall} models, and losses"
        text += " fall; say what they are: accuracy, f1, matthews, …, or loss if they are losses"
        raise TableError(text, metric="accuracy")
    if per_cent:
        text = f"the numbers of {what} are in per cent, and fall with size; say whether they are"
        raise TableError(f"{text} error rates or what else", metric="error|accuracy")
