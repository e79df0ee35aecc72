"""Records of runs, and the conversion of their means over seeds to a `LossTable`."""

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
    """The model, size and measured value of each of k runs.

    Attributes:
        name: the name of the table in error messages.
        models, sizes, values: model name, number of training examples and measured value of each
            run, [k].
        seeds: seed of each run, [k]; None if no run is repeated.
        parameters: model name -> number of parameters; None if the table has no such column.
        metric: name of the measured metric; None if the table does not name it.
        has_percent_signs: whether the values are written with per cent signs.
        roles: which columns were read as models, sizes and values, for messages.
        left_out: rows that were not read, see `LossTable`.
    """

    name: str
    models: Sequence[str]
    sizes: Array
    values: Array
    seeds: Sequence[str] | None = None
    parameters: dict[str, float] | None = None
    metric: str | None = None
    has_percent_signs: bool = False
    roles: str = ""
    left_out: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the models, without repeats, in the table's order."""
        return list(dict.fromkeys(self.models))


def to_table(
    records: Records, metric: str | None, fewest: int = 2, test_rows: int | None = None
) -> LossTable:
    """Return a table of losses by model and size, averaged over seeds.

    Args:
        records: the runs.
        metric: name of the metric of the values; None if they are losses.
        fewest: smallest number of models accepted.
        test_rows: number of test examples, see `read_table`.

    Raises:
        TableError: too few models, a run that occurs twice, a value outside the metric's range,
            or, without a metric, values that rise with size.
    """
    table = records.name
    if len(records.names) < fewest:
        text = f"{table} has {len(records.names)} models ({', '.join(records.names)}); expected"
        text += f" {fewest} or more{records.roles}"
        raise TableError(text + (records.left_out and f"; left out are {records.left_out}"))
    scale = 1.0
    values = records.values
    if metric is not None:
        scale = _scale(records, metric)
        with np.errstate(invalid="ignore", divide="ignore"):
            values = to_loss(metric, values / scale)
    sizes, columns = np.unique(records.sizes, return_inverse=True)
    losses, noise = _pivot(replace(records, values=values), columns, sizes)
    if metric is None:
        _refuse_rising(table, losses, records.has_percent_signs)
    elif test_rows is not None:
        if test_rows < 1:
            raise TableError(f"test_rows is {test_rows}; expected a number of examples")
        floored_losses = np.maximum(losses, 0.5 / test_rows)
        sampling = sampling_noise(metric, floored_losses, test_rows)
        if sampling is not None:
            noise = sampling if noise is None else np.hypot(sampling, np.nan_to_num(noise))
        losses = floored_losses if sampling is not None or higher_is_better(metric) else losses
    parameters = None
    if records.parameters is not None:
        parameters = np.array([records.parameters[name] for name in records.names])
    names, left_out = tuple(records.names), records.left_out
    return LossTable(names, sizes, losses, parameters, metric, scale, noise, left_out)


def _scale(records: Records, metric: str) -> float:
    """Return 100 if the values are scores in per cent, else 1.

    Raises:
        TableError: a value outside the metric's range, or scores of some models in per cent and
            of others as fractions.
    """
    is_score, worst_score = higher_is_better(metric), worst_value(metric)
    finite = np.isfinite(records.values)
    highest = float(np.max(records.values, where=finite, initial=-math.inf))
    scale = 100.0 if is_score and (records.has_percent_signs or highest > 1) else 1.0
    is_wrong = np.isinf(records.values) | (records.values < scale * worst_score)
    if is_score:
        is_wrong |= records.values > scale
    if is_wrong.any():
        run = int(is_wrong.argmax())
        expected = "up to 1, or 100 in per cent" if is_score else f"from {worst_score:g} up"
        run_label = f"{quote(records.models[run])} at size {records.sizes[run]:g}"
        value_text = f"{records.values[run]:g}; expected one {expected}"
        raise TableError(f"the {metric} of {run_label} is {value_text}")
    if scale == 100 and not records.has_percent_signs:
        for name in records.names:
            scores = records.values[finite & (np.array(records.models) == name)]
            if len(scores) and 0 < scores.max() <= 1:
                range_text = f"at most {scores.max():g} and that of others up to {highest:g}"
                text = f"the {metric} of {quote(name)} is {range_text}"
                raise TableError(f"{text}; write all as fractions or all in per cent")
    return scale


def _pivot(records: Records, columns: Index, sizes: Array) -> tuple[Array, Array | None]:
    """Return the means over seeds by model and size, [n, m], and their standard errors, [n, m].

    NaN marks cells without a run.  The standard errors are None if the records have no seeds.

    Raises:
        TableError: two runs of the same model, size and seed.
    """
    seeds = records.seeds or [""] * len(columns)
    runs = Counter(zip(records.models, records.sizes.tolist(), seeds, strict=True))
    (name, size, seed), count = runs.most_common(1)[0]
    if count > 1:
        text = f"{records.name} has the model {quote(name)} at size {size:g}"
        text += f" with seed {seed}" if seed else ""
        text += " twice; expected one row a model and one column a size, one task (task='rte'),"
        raise TableError(f"{text} or a column 'seed' of repeated runs (by another name: seed='x')")
    rows = {name: row for row, name in enumerate(records.names)}
    shape = len(rows), len(sizes)
    cell_indices = np.ravel_multi_index(([rows[name] for name in records.models], columns), shape)
    is_present = ~np.isnan(records.values)
    cell_indices, values = cell_indices[is_present], records.values[is_present]

    def cell_sums(values: Array) -> Array:
        return np.bincount(cell_indices, values, len(rows) * len(sizes)).astype(np.float64)

    with np.errstate(invalid="ignore", divide="ignore"):
        counts = cell_sums(np.ones_like(values))
        means = cell_sums(values) / counts
        errors = np.sqrt(cell_sums((values - means[cell_indices]) ** 2) / (counts - 1) / counts)
    return means.reshape(shape), None if records.seeds is None else errors.reshape(shape)


def _refuse_rising(name: str, losses: Array, has_percent_signs: bool) -> None:
    """Raise TableError for a table without a metric whose values are probably not losses.

    Values are taken for scores if at least as many curves rise with size as fall, and for scores or
    error rates if they have per cent signs.

    This detects 97 % of LCDB's tables of accuracies, with 7 % false alarms on its tables of
    log-losses, where the losses of models that overfit rise.  For tables of three models and four
    sizes the figures are 91 % and 31 %.
    """
    finite_curves = [curve[np.isfinite(curve)] for curve in losses]
    changes = [curve[-1] - curve[0] for curve in finite_curves if len(curve)]
    rising, falling = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    if rising and rising >= falling:
        text = f"the numbers of {name} rise with size in {rising} of {rising + falling} models, "
        text += "and losses fall; say what they are: accuracy, f1, matthews, …, or loss"
        raise TableError(text, metric="accuracy")
    if has_percent_signs:
        text = f"the numbers of {name} are in per cent, and fall with size; say whether they are"
        raise TableError(f"{text} error rates or what else", metric="error|accuracy")
