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
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .._io import require
from .predictive import Array
from .runs import (
    LossTable,
    TableError,
    higher_is_better,
    is_share,
    metric_word,
    shown,
    to_forecast,
    worst_value,
)

NAME_COLUMNS = ("name", "model", "config name", "model_name", "checkpoint")
PARAMETER_COLUMNS = ("size", "parameters", "params", "n_params", "num_parameters")
ROW_COLUMNS = (
    *("size", "rows", "n", "d", "n_train", "num_rows", "train_rows", "train_size", "size_train"),
    *("training_size", "train_samples", "num_train_samples", "max_train_samples", "examples"),
    *("samples", "train_examples"),
)
"""Of training examples, in a long table."""
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
        source: path of a csv file (separated by commas, tabs or semicolons, with these perhaps a
            decimal comma), pandas DataFrame, or LossTable.
        fewest: models there must be.
        metric: what the numbers are: "loss", "accuracy", "eval_f1", …; None: what a column says,
            else losses.  Of scores, whose best is 1 or 100 %, the methods extrapolate what is
            missing.  In a long table with several, the column to read.
        test_rows: examples a score was measured on: where nothing is missing, half of one is, and
            an accuracy or error rate has the noise of a sample of so many.
        ignore: columns that are not to be read.
        model, size, seed: columns of a long table (of a wide one model and seed) by other names.

    Raises:
        TableError: not readable, no sizes, one size twice, a column that is not understood, too few
            models, a model (in a long table a size of it) twice, a cell that is no number, a line
            cut short, values out of the metric's range, or losses that rise with size where no
            metric is told.
        MissingExtra: a long table, or one with seeds, and pandas is not installed.

    Example:
        >>> import pandas as pd
        >>> import jachess_ext as jx
        >>> frame = pd.DataFrame({"100": [71.0, 68.0], "1k": [80.0, 83.0]}, index=["a", "b"])
        >>> table = jx.scaling.read_table(frame, metric="accuracy")
        >>> table.sizes, table.losses_at(1000).round(2), table.label
        (array([ 100., 1000.]), array([0.2 , 0.17]), 'accuracy (per cent)')
    """
    if isinstance(source, LossTable):
        known = None if source.metric is None else plain_name(source.metric)
        if metric is not None and plain_name(metric) != known:
            raise TableError(
                f"the LossTable holds losses made from {source.metric or 'losses'}, so its metric "
                f"cannot be {shown(metric)}; leave metric out, or give the numbers to read_table"
            )
        if test_rows is not None:
            raise TableError(
                "test_rows is of numbers that are yet to be read, and a LossTable holds losses; "
                "give it where the LossTable is made"
            )
        return source
    grid = read_grid(source)
    for label in ignore:
        grid.place(label, ())  # raises where there is none
    grid = grid.keep(lambda place: grid.labels[place] not in ignore)
    grid = grid.keep(lambda place: bool(grid.labels[place]) or not grid.empty(place))
    repeated = [label for label in grid.labels if f"{label}.1" in grid.labels]
    if repeated and grid.what == "the table":
        raise TableError(
            f"the table has the column {shown(repeated[0])} twice (pandas calls the second "
            f"{shown(repeated[0] + '.1')}); keep each size once"
        )
    grid, metric = _one_metric(grid, metric)
    if model is None:
        grid = _without_row_numbers(grid)
    sizes = {} if size is not None else _sizes_of(grid)
    if sizes:
        records = _wide(grid, sizes, model, seed)
    else:
        records = _long(grid, metric, model, size, seed)
    return to_table(records, metric or records.metric, fewest, test_rows)


def _one_metric(grid: Grid, metric: str | None) -> tuple[Grid, str | None]:
    """Return the rows of one metric where a column `metric` names it, and the metric."""
    place = grid.place(None, ("metric",))
    if place is None or grid.numeric(place):
        return grid, metric
    said = grid.texts(place)
    names = list(dict.fromkeys(said))
    if metric is not None:
        rows = [row for row, name in enumerate(said) if plain_name(name) == plain_name(metric)]
        if not rows:
            raise TableError(
                f"{grid.what} has no rows of the metric {shown(metric)}; its column "
                f"{shown(grid.labels[place])} holds {listed(names)}"
            )
        return grid.rows(rows), metric
    if len({metric_word(name) for name in names}) > 1:
        raise TableError(
            f"{grid.what} holds several metrics, {listed(names)}; say which: "
            f"metric={shown(names[0])}"
        )
    return grid, names[0] if names else None


def plain_name(metric: str) -> str:
    """Return a metric's name without what says where it was measured, such as eval_ or val/."""
    name = re.sub(r"^(eval|evaluation|val|valid|validation|dev|test)[_/. -]+", "", metric.lower())
    return re.sub(r"[^a-z0-9]+", "_", name.rpartition(":")[0] or name)


def _sizes_of(grid: Grid) -> dict[int, float]:
    """Return the sizes by the places of the columns that are named by them."""
    sizes: dict[int, float] = {}
    for place, header in enumerate(grid.headers):
        try:
            sizes[place] = grid.size(header)
        except TableError as error:
            if "may mean" in str(error):
                raise TableError(f"in the header of {grid.what}, {error}") from None
    return sizes


def _without_row_numbers(grid: Grid) -> Grid:
    """Leave out the first column where it is a DataFrame's default index and names no model."""
    first = grid.labels and re.fullmatch(r"|Unnamed: 0|index", grid.labels[0])
    count = len(grid.columns[0]) if grid.columns else 0
    if first and grid.texts(0) == [str(row) for row in range(count)]:
        rest = grid.keep(lambda place: place > 0)
        if rest.place(None, NAME_COLUMNS) is not None or (rest.labels and not rest.numeric(0)):
            return rest
    return grid


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


def _wide(grid: Grid, sizes: dict[int, float], model: str | None, seed: str | None) -> Records:
    named, names = _names(grid, sizes, model)
    seeded = grid.place(seed, SEED_COLUMNS)
    counted = [
        place
        for place, label in enumerate(grid.labels)
        if label.lower() in PARAMETER_COLUMNS and place not in sizes
    ]
    if len(counted) > 1:
        raise TableError(
            f"{grid.what} has the columns {listed([grid.labels[p] for p in counted])}, all of them "
            "numbers of parameters; keep one"
        )
    _refuse_others(grid, {*sizes, *counted, named, seeded})
    taken: dict[float, int] = {}
    for place, size in sizes.items():
        if size in taken:
            first, second = (grid.labels[each] for each in (taken[size], place))
            raise TableError(
                f"the columns {shown(first)} and {shown(second)} of {grid.what} are both of size "
                f"{size:g}; keep each size once"
            )
        taken[size] = place
    if seeded is None:
        _refuse_repeated(grid.what, names)
    values = np.stack([grid.numbers(place, names) for place in sizes], -1)
    count = len(sizes)
    return Records(
        what=grid.what,
        models=[name for name in names for _ in range(count)],
        sizes=np.tile(np.array(list(sizes.values())), len(names)),
        values=values.ravel(),
        names=list(dict.fromkeys(names)),
        seeds=None if seeded is None else list(np.repeat(grid.texts(seeded), count)),
        parameters=_parameters(grid, counted[0] if counted else None, names),
        per_cent=grid.per_cent(list(sizes)),
    )


def _names(grid: Grid, sizes: dict[int, float], model: str | None) -> tuple[int | None, list[str]]:
    """Return the column of the models' names, None for the index, and the names."""
    place = grid.place(model, NAME_COLUMNS)
    numbered = grid.index is not None and list(grid.index) == list(range(len(grid.index)))
    if place is None and (grid.index is None or numbered):
        place = 0
        if 0 in sizes and grid.index is None:
            raise TableError(
                f"the first column of {grid.what} is of size {sizes[0]:g}, and no column names the "
                "models; expected one called name or model"
            )
        if 0 in sizes or grid.numeric(0):
            place = None if numbered else 0
    if place is None:
        assert grid.index is not None, "files have a first column"
        return None, [str(name).strip() for name in grid.index]
    return place, grid.texts(place)


def _refuse_repeated(what: str, names: Sequence[str]) -> None:
    twice = [name for row, name in enumerate(names) if name in names[:row]]
    if twice:
        raise TableError(
            f"{what} has the model {shown(twice[0])} twice; expected one row a model, or a column "
            "'seed' if its runs were repeated"
        )


def _refuse_others(grid: Grid, used: set[int | None]) -> None:
    """Raise TableError for a column that is not used and cannot be plain text."""
    for place, label in enumerate(grid.labels):
        if place in used:
            continue
        if re.match(r"[^\w]*\d", label):
            raise TableError(
                f"the column {shown(label)} of {grid.what} is no size that can be read; name it "
                f"like 1000, 1k or 1,000, or leave it out with ignore=[{shown(label)}]"
            )
        if grid.numeric(place):
            raise TableError(
                f"the column {shown(label)} of {grid.what} holds numbers and is no size that can "
                "be read; name it like 1000, 1k or 1,000, or leave it out with "
                f"ignore=[{shown(label)}]"
            )


def _parameters(grid: Grid, place: int | None, names: Sequence[str]) -> dict[str, float] | None:
    if place is None:
        return None
    found: dict[str, float] = {}
    for cell, name in zip(grid.columns[place], names, strict=True):
        missing = str(cell).strip().lower() in MISSING
        try:
            count = math.nan if missing else grid.size(cell)
        except TableError:
            raise TableError(
                f"{shown(cell)} in column {shown(grid.labels[place])} of {shown(name)} is no "
                "number of parameters; expected one such as 110000000 or 110M"
            ) from None
        if name in found and not (found[name] == count or missing):
            raise TableError(f"{grid.what} has two numbers of parameters of {shown(name)}")
        found.setdefault(name, count)
    return found


def _long(
    grid: Grid, metric: str | None, model: str | None, size: str | None, seed: str | None
) -> Records:
    sized = _size_column(grid, size)
    named = grid.place(model, NAME_COLUMNS)
    if named is None:
        raise TableError(
            f"{grid.what} has no column named by a number of training examples, such as 1000 or "
            f"1k; if {shown(grid.labels[sized])} holds them, a column has to name the models "
            "(call it model, or say model='…'); a table with a column a model has to be turned "
            f"first: frame.set_index({shown(grid.labels[sized])}).T"
        )
    seeded = grid.place(seed, SEED_COLUMNS)
    valued = _value_column(grid, metric, {sized, named, seeded})
    counted = None
    for place, label in enumerate(grid.labels):
        if place not in (sized, named, seeded, valued) and label.lower() in PARAMETER_COLUMNS:
            counted = place
    known = {place for place, label in enumerate(grid.labels) if metric_word(label) is not None}
    _refuse_others(grid, {sized, named, seeded, valued, counted, *known})
    names = grid.texts(named)
    sizes = []
    for cell, name in zip(grid.columns[sized], names, strict=True):
        try:
            sizes.append(grid.size(cell))
        except TableError as error:
            raise TableError(
                f"in the column {shown(grid.labels[sized])} of {shown(name)}, {error}"
            ) from None
    label, values = grid.labels[valued], grid.numbers(valued, names)
    for value, name, number in zip(values, names, sizes, strict=True):
        if not np.isfinite(value):  # a mean over the other seeds would hide a run that diverged
            raise TableError(
                f"the {label} of a run of {shown(name)} at size {number:g} is {value:g} or empty; "
                "expected a number: leave that row out if the run is not to count"
            )
    return Records(
        what=grid.what,
        models=names,
        sizes=np.array(sizes, dtype=float),
        values=values,
        names=list(dict.fromkeys(names)),
        seeds=None if seeded is None else grid.texts(seeded),
        parameters=_parameters(grid, counted, names),
        metric=label if metric_word(label) is not None else None,
        per_cent=grid.per_cent([valued]),
    )


def _size_column(grid: Grid, size: str | None) -> int:
    found = [place for place, label in enumerate(grid.labels) if label.lower() in ROW_COLUMNS]
    if size is None and len(found) > 1:
        raise TableError(
            f"{grid.what} has the columns {listed([grid.labels[p] for p in found])}, any of which "
            "may be the number of training examples; say which: "
            f"size={shown(grid.labels[found[0]])}"
        )
    place = grid.place(size, ROW_COLUMNS)
    if place is None:
        raise TableError(
            f"{grid.what} has no column named by a number of training examples, such as 1000, 1k "
            f"or 1,000, and none that holds them (rows, n, train_samples); it has "
            f"{listed(grid.labels)}"
        )
    return place


def _value_column(grid: Grid, metric: str | None, used: set[int | None]) -> int:
    free = [p for p in range(len(grid.labels)) if p not in used and grid.numeric(p)]
    plain = [p for p in free if grid.labels[p].lower() in VALUE_COLUMNS]
    named = [p for p in free if metric_word(grid.labels[p]) is not None]
    if metric is not None:
        exact = [p for p in free if grid.labels[p] == metric]
        alike = [p for p in free if plain_name(grid.labels[p]) == plain_name(metric)]
        found = exact or alike or plain
    else:
        found = [*plain, *named]
    if len(found) != 1:
        names = listed([grid.labels[p] for p in found or free])
        raise TableError(
            f"{grid.what} has no column of values that is known"
            + (f" for the metric {shown(metric)}" if metric else "")
            + f"; it has the numbers {names or 'of no other column'}; call one value, or by its "
            "metric, such as loss"
            if not found
            else f"{grid.what} has several columns of values, {names}; say which: "
            f"metric={shown(grid.labels[found[0]])}"
        )
    return found[0]


# Values -> losses -------------------------------------------------------------------------------


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
    losses, noise = _pivot(replace(records, values=values), places, len(sizes))
    if metric is None:
        _refuse_rising(what, losses)
    elif test_rows is not None and (higher_is_better(metric) or is_share(metric)):
        if test_rows < 1:
            raise TableError(f"test_rows is {test_rows}; expected a number of examples")
        losses = np.maximum(losses, 0.5 / test_rows)
        if is_share(metric):
            sampling = losses * (1 - losses) / test_rows
            noise = np.sqrt(sampling if noise is None else sampling + np.nan_to_num(noise) ** 2)
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


def _pivot(records: Records, places: Any, count: int) -> tuple[Array, Array | None]:
    """Return losses by model and size, [n, count], NaN where missing, and standard errors."""
    rows = {name: row for row, name in enumerate(records.names)}
    index = np.array([rows[name] for name in records.models], dtype=np.intp)
    if records.seeds is None:
        twice = _first_repeated(list(zip(index.tolist(), places.tolist(), strict=True)))
        if twice is not None:
            raise TableError(
                f"{records.what} has the model {shown(records.models[twice])} at size "
                f"{records.sizes[twice]:g} twice; expected one row a model and size, or a column "
                "'seed' if its runs were repeated"
            )
        losses = np.full((len(rows), count), np.nan)
        losses[index, places] = records.values
        return losses, None
    runs = list(zip(index.tolist(), places.tolist(), records.seeds, strict=True))
    twice = _first_repeated(runs)
    if twice is not None:
        raise TableError(
            f"{records.what} has the model {shown(records.models[twice])} at size "
            f"{records.sizes[twice]:g} with seed {records.seeds[twice]} twice"
        )
    frame = require("pandas").DataFrame({"row": index, "place": places, "loss": records.values})
    means = frame.groupby(["row", "place"])["loss"].agg(["mean", "sem"]).unstack()
    losses, noise = (
        means[kind].reindex(index=range(len(rows)), columns=range(count)).to_numpy()
        for kind in ("mean", "sem")
    )
    return losses, noise


def _first_repeated(keys: Sequence[Any]) -> int | None:
    seen: set[Any] = set()
    for place, key in enumerate(keys):
        if key in seen:
            return place
        seen.add(key)
    return None


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


# ---- cells as people write them ----------------------------------------------------------------

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
