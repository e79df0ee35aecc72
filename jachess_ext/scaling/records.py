"""Values of runs, and the `LossTable` of their means over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .loss_table import LossTable
from .metrics import higher_is_better, sampling_noise, to_loss, worst_value
from .predictive import Array, Index
from .table_error import TableError, quote


@dataclass(frozen=True)
class Records:
    """Values of runs.

    Attributes:
        name: the table's name in errors.
        models, sizes, values: of every run, [k].
        seeds: of every run, or None: no run is repeated.
        parameters: by model; None where no column tells.
        metric: as the table tells it, or None.
        per_cent: whether the values have per cent signs.
    """

    name: str
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


def to_table(
    records: Records, metric: str | None, fewest: int = 2, test_rows: int | None = None
) -> LossTable:
    """Return the losses of runs by model and size, as means over seeds.

    Args:
        records: the runs.
        metric: of the values; None: they are losses, unless they rise.
        fewest, test_rows: as for `read_table`.

    Raises:
        TableError: as `read_table`.
    """
    table = records.name
    if len(records.names) < fewest:
        raise TableError(f"{table} has {len(records.names)} models; expected {fewest} or more")
    scale = 1.0
    values = records.values
    if metric is not None:
        scale = _scale(records, metric)
        with np.errstate(invalid="ignore", divide="ignore"):
            values = to_loss(metric, values / scale)
    sizes, columns = np.unique(records.sizes, return_inverse=True)
    losses, noise = _pivot(replace(records, values=values), columns, sizes)
    if metric is None:
        _refuse_rising(table, losses, records.per_cent)
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
        run = int(wrong.argmax())
        expected = "up to 1, or 100 in per cent" if score else f"from {worst:g} up"
        where = f"{quote(records.models[run])} at size {records.sizes[run]:g}"
        value = f"{records.values[run]:g}; expected one {expected}"
        raise TableError(f"the {metric} of {where} is {value}")
    if scale == 100 and not records.per_cent:
        for name in records.names:
            scores = records.values[finite & (np.array(records.models) == name)]
            if len(scores) and 0 < scores.max() <= 1:
                up_to = f"at most {scores.max():g} and that of others up to {highest:g}"
                text = f"the {metric} of {quote(name)} is {up_to}"
                raise TableError(f"{text}; write all as fractions or all in per cent")
    return scale


def _pivot(records: Records, columns: Index, sizes: Array) -> tuple[Array, Array | None]:
    """Return losses by model and size, [n, m], NaN where missing, and standard errors."""
    seeds = records.seeds or [""] * len(columns)
    runs = Counter(zip(records.models, records.sizes.tolist(), seeds, strict=True))
    (name, size, seed), count = runs.most_common(1)[0]
    if count > 1:
        text = f"{records.name} has the model {quote(name)} at size {size:g}"
        text += f" with seed {seed}" if seed else ""
        text += " twice; expected one row a model and one column a size, or a column 'seed'"
        raise TableError(f"{text} of repeated runs")
    rows = {name: row for row, name in enumerate(records.names)}
    shape = len(rows), len(sizes)
    cells = np.ravel_multi_index(([rows[name] for name in records.models], columns), shape)
    present = ~np.isnan(records.values)
    cells, values = cells[present], records.values[present]

    def cell_sums(values: Array) -> Array:
        return np.bincount(cells, values, len(rows) * len(sizes)).astype(np.float64)

    with np.errstate(invalid="ignore", divide="ignore"):
        repeats = cell_sums(np.ones_like(values))
        means = cell_sums(values) / repeats
        errors = np.sqrt(cell_sums((values - means[cells]) ** 2) / (repeats - 1) / repeats)
    return means.reshape(shape), None if records.seeds is None else errors.reshape(shape)


def _refuse_rising(name: str, losses: Array, per_cent: bool) -> None:
    """Raise TableError where at least as many curves rise as fall, or numbers are in per cent.

    Rising numbers are scores rather than losses, and per cents are scores or error rates.

    Of LCDB's accuracies 97 % of the tables are noticed so, and 7 % of those of its log-losses (in
    which models that overfit rise) are asked about for nothing; of tables with three models and
    four sizes 91 % and 31 %.
    """
    numbers = [curve[np.isfinite(curve)] for curve in losses]
    steps = [curve[-1] - curve[0] for curve in numbers if len(curve)]
    rise, fall = sum(step > 0 for step in steps), sum(step < 0 for step in steps)
    if rise and rise >= fall:
        text = f"the numbers of {name} rise with size in {rise} of {rise + fall} models, and losses"
        text += " fall; say what they are: accuracy, f1, matthews, …, or loss if they are losses"
        raise TableError(text, metric="accuracy")
    if per_cent:
        text = f"the numbers of {name} are in per cent, and fall with size; say whether they are"
        raise TableError(f"{text} error rates or what else", metric="error|accuracy")
