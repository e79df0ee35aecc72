"""`read_table`: tables of losses or scores, wide or long, from a csv file or a DataFrame."""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .._io import parse_json, read_text, require
from .predictive import Array, Index
from .runs import (
    LossTable,
    TableError,
    higher_is_better,
    metric_word,
    sampling_noise,
    shown,
    to_forecast,
    worst_value,
)

NAME_COLUMNS = ("name", "model", "config name", "model_name", "model_name_or_path", "checkpoint")
PARAMETER_COLUMNS = ("size", "parameters", "params", "n_params", "num_parameters")
ROW_COLUMNS = (
    *("size", "rows", "n", "d", "n_train", "num_rows", "train_rows", "train_size", "size_train"),
    *("training_size", "train_samples", "num_train_samples", "max_train_samples", "examples"),
    *("samples", "train_examples", "tokens", "n_tokens", "num_tokens", "train_tokens"),
    *("fraction", "train_fraction", "share"),
)
"""Of training examples, in a long table, tokens, or shares of the data."""
SEED_COLUMNS = ("seed", "random_seed", "trial", "repeat", "replicate", "fold")
VALUE_COLUMNS = ("value", "score")


def read_table(
    source: Any,
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
) -> LossTable:
    """Read a table of losses or scores; a LossTable is returned as it is.

    A wide table has a row a model, and columns named by sizes ("100", "1k", "1,000", 1600.0);
    `size` or `parameters` hold numbers of parameters.  Models are named by a column (name, model,
    "config name"), or by the index of a DataFrame or the first column of a csv file.  A long table
    has a row a run, with columns of the model, the size (rows, n, size, train_samples, …), and the
    value, which may be named by its metric.  A column `seed` says that runs are repeated: losses
    are means then, with their standard errors in `noise`.  Empty cells of a wide table are losses
    that are missing; a row of a long one is a run and has its value.

    Columns of text are ignored.  Any other column that holds numbers is refused, and so is a name
    that begins like a number and is no size: `ignore` says that they are not to be read.

    Args:
        source: path of a csv file (separated by commas, tabs or semicolons), of one with a
            markdown table alone or of JSON lines (.jsonl), pandas DataFrame, or LossTable.
        fewest: models there must be.
        metric: what the numbers are: "loss", "accuracy", "eval_f1", …; None: what a column says,
            else losses.  Of scores, whose best is 1 or 100 %, the methods extrapolate what is
            missing.  In a long table with several, the column to read.
        test_rows: examples a score was measured on: where nothing is missing, half of one is, and
            an accuracy or error rate has the noise of a sample of so many.
        ignore: columns that are not to be read.
        model, size, seed: columns of a long table (of a wide one model and seed) by other names.
        decimal: "," where 0,5 is a half and 1.000 a thousand, in cells and names that are text.
        full: examples of the whole data, of which the sizes are shares: 0.25, "25 %".

    Raises:
        TableError: not readable, no sizes, shares without `full`, one size twice, a column that is
            not understood, too few models, a model (in a long table a size of it) twice, a cell
            that is no number, a line cut short, values out of the metric's range, or losses that
            rise with size where no metric is told.
        DataError: JSON lines that cannot be read, or are no JSON.
        MissingExtra: a long table, or one with seeds, and pandas is not installed.

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
        own = source.metric or "loss"
        if test_rows is not None or plain_name(metric or own) != plain_name(own):
            raise TableError(
                f"the LossTable holds losses made from {own}; another metric, and test_rows, are "
                "of numbers that are yet to be read: give them where the LossTable is made"
            )
        return source
    if decimal not in (".", ","):
        raise TableError(f"decimal is {shown(decimal)}; expected '.' or ','")
    sheet = replace(read_sheet(source, decimal == ","), full=full)
    for label in ignore:
        sheet.place(label, ())  # raises where there is none
    sheet = sheet.keep(lambda place: sheet.labels[place] not in ignore)
    empty = [
        all(text.lower() in MISSING for text in sheet.texts(p)) for p in range(len(sheet.labels))
    ]
    sheet = sheet.keep(lambda place: bool(sheet.labels[place]) or not empty[place])
    repeated = [label for label in sheet.labels if f"{label}.1" in sheet.labels]
    if repeated and sheet.what == "the table":
        raise TableError(
            f"the table has the column {shown(repeated[0])} twice (pandas calls the second "
            f"{shown(repeated[0] + '.1')}); keep each size once"
        )
    sheet, metric = _one_metric(sheet, metric)
    sizes = {} if size is not None else _sizes_of(sheet)
    if sizes:
        records = _wide(sheet, sizes, model, seed)
    else:
        records = _long(sheet, metric, model, size, seed)
    return to_table(records, metric or records.metric, fewest, test_rows)


def _one_metric(sheet: Sheet, metric: str | None) -> tuple[Sheet, str | None]:
    """Return the rows of one metric where a column `metric` names it, and the metric."""
    place = sheet.place(None, ("metric",))
    if place is None or sheet.numeric(place):
        return sheet, metric
    said = sheet.texts(place)
    names = list(dict.fromkeys(said))
    if metric is not None:
        rows = [row for row, name in enumerate(said) if plain_name(name) == plain_name(metric)]
        if not rows:
            raise TableError(
                f"{sheet.what} has no rows of the metric {shown(metric)}; its column "
                f"{shown(sheet.labels[place])} holds {listed(names)}"
            )
        return sheet.rows(rows), metric
    if len({metric_word(name) for name in names}) > 1:
        raise TableError(
            f"{sheet.what} holds several metrics, {listed(names)}; say which: "
            f"metric={shown(names[0])}"
        )
    return sheet, names[0] if names else None


def plain_name(metric: str) -> str:
    """Return a metric's name without what says where it was measured, such as eval_ or val/."""
    name = re.sub(r"^(eval|evaluation|val|valid|validation|dev|test)[_/. -]+", "", metric.lower())
    return re.sub(r"[^a-z0-9]+", "_", name.rpartition(":")[0] or name)


def _sizes_of(sheet: Sheet) -> dict[int, float]:
    """Return the sizes by the places of the columns that are named by them."""
    sizes: dict[int, float] = {}
    for place, header in enumerate(sheet.headers):
        try:
            sizes[place] = sheet.size(header)
        except DoubtfulSize as error:
            raise TableError(f"in the header of {sheet.what}, {error}") from None
        except TableError:  # another column
            continue
    return sizes


@dataclass(frozen=True)
class Records:
    """Values of runs.

    Attributes:
        what: the table's name in errors.
        models, sizes, values: of every run, [k].
        names: the models in the table's order.
        seeds: of every run, or None: no run is repeated.
        parameters: by model; None where no column tells.
        metric: as the table tells it, or None.
        per_cent: whether the values have per cent signs.
    """

    what: str
    models: Sequence[str]
    sizes: Array
    values: Array
    names: Sequence[str]
    seeds: Sequence[str] | None = None
    parameters: dict[str, float] | None = None
    metric: str | None = None
    per_cent: bool = False


def _wide(sheet: Sheet, sizes: dict[int, float], model: str | None, seed: str | None) -> Records:
    named, names = _names(sheet, sizes, model)
    seeded = sheet.place(seed, SEED_COLUMNS)
    counted = sheet.place(None, PARAMETER_COLUMNS)
    _refuse_others(sheet, {*sizes, counted, named, seeded})
    taken: dict[float, int] = {}
    for place, size in sizes.items():
        if size in taken:
            first, second = (sheet.labels[each] for each in (taken[size], place))
            raise TableError(
                f"the columns {shown(first)} and {shown(second)} of {sheet.what} are both of size "
                f"{size:g}; keep each size once"
            )
        taken[size] = place
    values = np.stack([sheet.numbers(place, names) for place in sizes], -1)
    count = len(sizes)
    return Records(
        what=sheet.what,
        models=[name for name in names for _ in range(count)],
        sizes=np.tile(np.array(list(sizes.values())), len(names)),
        values=values.ravel(),
        names=list(dict.fromkeys(names)),
        seeds=None if seeded is None else list(np.repeat(sheet.texts(seeded), count)),
        parameters=_parameters(sheet, counted, names),
        per_cent=sheet.per_cent(list(sizes)),
    )


def _names(
    sheet: Sheet, sizes: dict[int, float], model: str | None
) -> tuple[int | None, list[str]]:
    """Return the column of the models' names, None for the index, and the names."""
    place = sheet.place(model, NAME_COLUMNS)
    if place is None and sheet.index is not None:
        return None, [str(name).strip() for name in sheet.index]
    if place is None and (0 in sizes or sheet.numeric(0)):
        raise TableError(
            f"no column of {sheet.what} names the models, and its first, "
            f"{shown(sheet.labels[0])}, holds numbers; expected one called name or model"
        )
    return place or 0, sheet.texts(place or 0)


def _refuse_others(sheet: Sheet, used: set[int | None]) -> None:
    """Raise TableError for a column that is not used and cannot be plain text."""
    for place, label in enumerate(sheet.labels):
        if place in used:
            continue
        like_a_size = re.match(r"[^\w]*\d", label)
        if like_a_size or sheet.numeric(place) or sheet.counts(place):
            holds = "" if like_a_size else "holds numbers and "
            raise TableError(
                f"the column {shown(label)} of {sheet.what} {holds}is no size that can be read; "
                f"name it like 1000, 1k or 1,000, or leave it out with ignore=[{shown(label)}]"
            )


def _parameters(sheet: Sheet, place: int | None, names: Sequence[str]) -> dict[str, float] | None:
    if place is None:
        return None
    found: dict[str, float] = {}
    for cell, name in zip(sheet.columns[place], names, strict=True):
        missing = str(cell).strip().lower() in MISSING
        try:
            count = math.nan if missing else sheet.count(cell)
        except TableError:
            raise TableError(
                f"{shown(cell)} in column {shown(sheet.labels[place])} of {shown(name)} is no "
                "number of parameters; expected one such as 110000000 or 110M"
            ) from None
        if name in found and not (found[name] == count or missing):
            raise TableError(f"{sheet.what} has two numbers of parameters of {shown(name)}")
        found.setdefault(name, count)
    return found


def _long(
    sheet: Sheet, metric: str | None, model: str | None, size: str | None, seed: str | None
) -> Records:
    sized = sheet.place(size, ROW_COLUMNS)
    if sized is None:
        raise TableError(
            f"{sheet.what} has no column named by a number of training examples, such as 1000, 1k "
            f"or 1,000, and none that holds them (rows, n, train_samples); it has "
            f"{listed(sheet.labels)}"
        )
    named = sheet.place(model, NAME_COLUMNS)
    if named is None:
        raise TableError(
            f"{sheet.what} has no column named by a number of training examples, such as 1000 or "
            f"1k; if {shown(sheet.labels[sized])} holds them, a column has to name the models: "
            "call it model, or say model='…'"
        )
    seeded = sheet.place(seed, SEED_COLUMNS)
    valued = _value_column(sheet, metric, {sized, named, seeded})
    counted = None
    for place, label in enumerate(sheet.labels):
        if place not in (sized, named, seeded, valued) and label.lower() in PARAMETER_COLUMNS:
            counted = place
    known = {place for place, label in enumerate(sheet.labels) if metric_word(label) is not None}
    _refuse_others(sheet, {sized, named, seeded, valued, counted, *known})
    names = sheet.texts(named)
    sizes = []
    for cell, name in zip(sheet.columns[sized], names, strict=True):
        try:
            sizes.append(sheet.size(cell))
        except TableError as error:
            raise TableError(
                f"in the column {shown(sheet.labels[sized])} of {shown(name)}, {error}"
            ) from None
    label, values = sheet.labels[valued], sheet.numbers(valued, names)
    seeds = None if seeded is None else sheet.texts(seeded)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):  # a mean over the other seeds would hide a run that diverged
        run = wrong[0]
        raise TableError(
            f"the {label} of the run of {shown(names[run])} at size {sizes[run]:g}"
            f"{f' with seed {seeds[run]}' if seeds else ''} is {values[run]:g} or empty; expected "
            "a number: leave that row out if the run is not to count"
        )
    return Records(
        what=sheet.what,
        models=names,
        sizes=np.array(sizes, dtype=float),
        values=values,
        names=list(dict.fromkeys(names)),
        seeds=seeds,
        parameters=_parameters(sheet, counted, names),
        metric=label if metric_word(label) is not None else None,
        per_cent=sheet.per_cent([valued]),
    )


def _value_column(sheet: Sheet, metric: str | None, used: set[int | None]) -> int:
    free = [p for p in range(len(sheet.labels)) if p not in used and sheet.numeric(p)]
    plain = [p for p in free if sheet.labels[p].lower() in VALUE_COLUMNS]
    named = [p for p in free if metric_word(sheet.labels[p]) is not None]
    if metric is not None:
        exact = [p for p in free if sheet.labels[p] == metric]
        alike = [p for p in free if plain_name(sheet.labels[p]) == plain_name(metric)]
        found = exact or alike or plain
    else:
        found = [*plain, *named]
    names = listed([sheet.labels[p] for p in found or free], 3)
    if len(found) > 1:
        raise TableError(
            f"{sheet.what} has several columns of values, {names}; say which: "
            f"metric={shown(sheet.labels[found[0]])}"
        )
    if not found:
        wanted = "" if metric is None else f" for the metric {shown(metric)}"
        raise TableError(
            f"{sheet.what} has no column of values that is known{wanted}, among the numbers "
            f"{names or 'of no other column'}; call one value, or by its metric, such as loss"
        )
    return found[0]


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
        _refuse_rising(what, losses)
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
        raise TableError(
            f"the {metric} of {shown(records.models[place])} at size {records.sizes[place]:g} is "
            f"{records.values[place]:g}; expected one {expected}"
        )
    if scale == 100 and not records.per_cent:
        for name in records.names:
            own = records.values[finite & (np.array(records.models) == name)]
            if len(own) and 0 < own.max() <= 1:
                raise TableError(
                    f"the {metric} of {shown(name)} is at most {own.max():g} and that of others up "
                    f"to {highest:g}; write all as fractions or all in per cent"
                )
    return scale


def _pivot(records: Records, places: Index, sizes: Array) -> tuple[Array, Array | None]:
    """Return losses by model and size, [n, m], NaN where missing, and standard errors."""
    rows = {name: row for row, name in enumerate(records.names)}
    index = np.array([rows[name] for name in records.models], dtype=np.intp)
    seeds = records.seeds or [""] * len(index)
    runs: set[tuple[int, int, str]] = set()
    for run in zip(index.tolist(), places.tolist(), seeds, strict=True):
        if run in runs:
            seed = f" with seed {run[2]}" if records.seeds else ""
            raise TableError(
                f"{records.what} has the model {shown(records.names[run[0]])} at size "
                f"{sizes[run[1]]:g}{seed} twice; expected one row a model, or a column 'seed' that "
                "tells repeated runs apart"
            )
        runs.add(run)
    if records.seeds is None:
        losses = np.full((len(rows), len(sizes)), np.nan)
        losses[index, places] = records.values
        return losses, None
    frame = require("pandas").DataFrame({"row": index, "place": places, "loss": records.values})
    means = frame.groupby(["row", "place"])["loss"].agg(["mean", "sem"]).unstack()
    losses, noise = (
        means[kind].reindex(index=range(len(rows)), columns=range(len(sizes))).to_numpy()
        for kind in ("mean", "sem")
    )
    return losses, noise


def _refuse_rising(what: str, losses: Array) -> None:
    """Raise TableError where as many curves end higher than they begin as end lower, or more.

    Of LCDB's accuracies 97 % of the tables are noticed so, and 7 % of those of its log-losses (in
    which models that overfit rise) are asked about for nothing; of tables with three models and
    four sizes 91 % and 31 %.
    """
    rise = fall = 0
    for curve in losses:
        known = curve[np.isfinite(curve)]
        if len(known) > 1:
            rise, fall = rise + (known[-1] > known[0]), fall + (known[-1] < known[0])
    if rise and rise >= fall:
        raise TableError(
            f"the numbers of {what} rise with size ({rise} of {rise + fall} models end higher than "
            'they begin), and losses fall; say what they are: metric="accuracy" (or f1, matthews, '
            '…), or metric="loss" if they are losses all the same'
        )


MISSING = ("", "-", "–", "—", "nan", "na", "n/a", "#n/a", "<na>", "null", "none")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_SIZE = re.compile(
    r"(?:(?:n|d|size|rows|samples|examples)\s*=\s*)?"
    r"(?P<number>\d{1,3}(?:(?P<mark>[., _'’])\d{3})(?:(?P=mark)\d{3})*"
    r"|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
    r"\s*(?P<unit>[kmb]?)\s*(?:(?:training )?(?:row|sample|example|instance|sentence|token)s)?",
    re.IGNORECASE,
)
_SHARE = re.compile(r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*(?P<sign>%?)", re.IGNORECASE)
_WITH_COMMA = re.compile(r"-?\d+,\d+ ?%?")
_DECIMAL = "; if its comma is a decimal one, say decimal=',' to read_table (--read decimal ,)"
_SPREAD = (
    "; ± may be a standard error, a deviation over seeds or an interval: keep the value alone, or "
    "a row for each run and a column seed"
)
_SPACES = str.maketrans("\u00a0\u2009\u202f", "   ")
_COMMA_FOR_POINT, _DECIMAL_COMMA = str.maketrans(",.", ".,"), str.maketrans(",", ".")


class DoubtfulSize(TableError):
    """A size that is a number, but may mean another one or a share."""


def parse_size(value: Any) -> float:
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
                if mark == "." and number.count(".") == 1:
                    raise DoubtfulSize(
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
    if size < 1000 and not math.isclose(size, round(size), rel_tol=1e-9):
        raise DoubtfulSize(f"{shown(value)} is no whole number of training examples")
    return size


@dataclass(frozen=True)
class Sheet:
    """Columns of cells as they were read.

    Attributes:
        what: the table's name in errors.
        labels: the columns' names.
        headers: the same as they were, perhaps numbers.
        columns: their cells.
        index: names of the rows, None where the columns hold them.
        comma: whether a comma is the decimal mark of text, and a point marks thousands.
        full: what sizes are shares of; None: they are examples.
    """

    what: str
    labels: Sequence[str]
    headers: Sequence[Any]
    columns: Sequence[Sequence[Any]]
    index: Sequence[Any] | None = None
    comma: bool = False
    full: int | None = None

    def keep(self, wanted: Callable[[int], bool]) -> Sheet:
        """Return the columns at the places that are wanted."""
        places = [place for place in range(len(self.labels)) if wanted(place)]
        return replace(
            self,
            labels=[self.labels[place] for place in places],
            headers=[self.headers[place] for place in places],
            columns=[self.columns[place] for place in places],
        )

    def rows(self, rows: Sequence[int]) -> Sheet:
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
        if len(found) > 1:
            named = [self.labels[place] for place in found]
            raise TableError(
                f"{self.what} has the columns {listed(named)}, any of which may be the one meant; "
                f"say which by model=, size= or seed=, or leave the others out: ignore={named[1:]}"
            )
        return found[0] if found else None

    def texts(self, place: int) -> list[str]:
        """Return the cells of a column as text."""
        return [str(cell).strip() for cell in self.columns[place]]

    def size(self, value: Any) -> float:
        """Return the examples that a cell or a column's name stands for."""
        share = _SHARE.fullmatch(str(value).strip().translate(_DECIMAL_COMMA if self.comma else {}))
        part = float(share["number"]) / (100 if share["sign"] else 1) if share else math.inf
        if self.full is None and share and (share["sign"] or 0 < part < 1):
            raise DoubtfulSize(
                f"{shown(value)} is a share of the data: say of how many examples, full= "
                "(--read full N)"
            )
        if self.full is None or share is None:
            part = self.count(value)  # raises where it is no number at all, such as another name
        if self.full is not None and (share is None or part > 1):
            raise DoubtfulSize(
                f"{shown(value)} is no share of the data, from 0 to 1 or in per cent, as full= "
                "says that sizes are"
            )
        return part * (self.full or 1)

    def count(self, value: Any) -> float:
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
        found = False
        for cell in self.columns[place]:
            try:
                found |= not math.isnan(self.number(cell))
            except (TypeError, ValueError):
                if not _WITH_COMMA.fullmatch(str(cell).strip()):
                    return False
                found = True  # which `numbers` refuses, and says how it is read
        return found

    def counts(self, place: int) -> bool:
        """Return whether a column holds sizes, such as 300M or 25%, and empty cells alone."""
        texts = [text for text in self.texts(place) if text.lower() not in MISSING]
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
                comma = not self.comma and _WITH_COMMA.fullmatch(str(cell).strip())
                hint = _SPREAD if "±" in str(cell) or "+/-" in str(cell) else ""
                raise TableError(
                    f"{shown(cell)} in column {shown(self.labels[place])} of {shown(name)} is no "
                    f"number{_DECIMAL if comma else hint}"
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


def read_sheet(source: Any, comma: bool = False) -> Sheet:
    """Return the cells of a csv file or a DataFrame; errors are those of `read_table`.

    A first column without a name is the index.  An index of whole numbers counts rows: it names no
    models.
    """
    if isinstance(source, (str, PathLike)) and Path(source).suffix in (".jsonl", ".ndjson"):
        lines = [line for line in read_text(Path(source)).split("\n") if line.strip()]
        runs = [parse_json(line, f"a line of {source}", lenient=True) for line in lines]
        sheet = replace(read_sheet(require("pandas").DataFrame(runs), comma), what=str(source))
    elif isinstance(source, (str, PathLike)):
        sheet = _from_csv(Path(source), comma)
    elif hasattr(source, "columns") and hasattr(source, "index"):
        labels = [str(column).strip() for column in source.columns]
        columns = [list(source.iloc[:, place]) for place in range(len(labels))]
        index = list(source.index)
        sheet = Sheet("the table", labels, list(source.columns), columns, index, comma)
    else:
        raise TableError(
            f"the table is {type(source).__name__}; expected a csv file's path or a pandas "
            "DataFrame"
        )
    if sheet.labels and sheet.labels[0] in ("", "Unnamed: 0"):
        sheet = replace(sheet.keep(lambda place: place > 0), index=sheet.columns[0])
    if sheet.index is not None and all(str(name).strip().isdigit() for name in sheet.index):
        sheet = replace(sheet, index=None)
    return sheet


def _from_csv(path: Path, comma: bool) -> Sheet:
    if path.is_dir():
        raise TableError(f"{path} is a folder; jx.scaling.read_runs reads folders of runs")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path} cannot be read ({error}); expected a csv file in UTF-8") from None
    if not text.strip(' ,;\t\r\n"'):
        raise TableError(f"{path} is empty; expected a header and one line a model")
    try:
        rows = _markdown(text) if text.lstrip().startswith("|") else _split(text)
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
    return Sheet(str(path), labels, labels, columns, None, comma)


def _markdown(text: str) -> list[tuple[int, list[str]]]:
    """Return the lines' numbers and cells, without bold type; one that does not end is left out."""
    cells = partial(re.split, r"(?<!\\)\|")
    return [
        (number, [each.strip(" *`").replace("\\|", "|") for each in cells(line.strip())[1:-1]])
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip(" |:-\t")  # neither empty nor the line below the header
    ]


def _split(text: str) -> list[tuple[int, list[str]]]:
    """Return the lines' numbers and cells, separated by tabs, semicolons or commas.

    The first of these counts that splits every line into as many cells, two or more; if there is
    none, the one that splits the header into most.
    """
    read = []
    for separator in ("\t", ";", ","):
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        read.append([(reader.line_num, row) for row in reader if any(map(str.strip, row))])
        counts = {len(row) for _, row in read[-1]}
        if len(counts) == 1 and counts != {1}:
            return read[-1]
    return max(reversed(read), key=lambda lines: len(lines[0][1]))
