"""Tables of losses over sizes, and metrics: which direction is better, and what is forecast."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from reprlib import Repr
from typing import Any, TypeVar

import numpy as np

from .predictive import Array, Index, Mask

_ZERO = " (an error rate of 0 has no logarithm; write half a test example, 0.5 / their number)"
_SHORT = Repr()
_SHORT.maxstring = 100
Values = TypeVar("Values", float, Array)
shown = _SHORT.repr
"""Quotes what a user wrote, of long text the ends alone: damaged files have names of any length."""


class TableError(ValueError):
    """A table that cannot be used: what is wrong, and what was expected.

    Attributes:
        options: the arguments of `read_table` or `read_runs` that would answer it, by name.
    """

    def __init__(self, message: str, **options: Any) -> None:
        super().__init__(message)
        self.options = options

    def __str__(self) -> str:
        call = []
        for name, value in self.options.items():
            text = value if value == "N" else repr(value)  # N is the reader's to fill in
            call.append(f"{name}={text}" if name.isidentifier() else f"**{{{name!r}: {text}}}")
        return f"{self.args[0]}: {', '.join(call)}" if call else str(self.args[0])


_WORST = {
    **dict.fromkeys(("matthews", "mcc", "pearson", "pearsonr", "spearman", "spearmanr"), -1.0),
    **dict.fromkeys(("correlation", "kappa"), -1.0),
    **dict.fromkeys(("accuracy", "acc", "f1", "precision", "recall", "match", "em"), 0.0),
    **dict.fromkeys(("auc", "auroc", "map", "mrr", "ndcg", "iou", "dice"), 0.0),
    **dict.fromkeys(("bleu", "sacrebleu", "rouge", "rougel", "rougelsum", "meteor", "chrf"), 0.0),
    **dict.fromkeys(("r2", "higher"), -math.inf),
}
"""The worst value by word of a metric's name, of those whose best is 1."""
_LOGARITHMS = ("perplexity", "ppl")
_LOWER = (
    *("loss", "logloss", "nll", "entropy", "brier", "error", "err", "wer", "cer"),
    *("mae", "mse", "rmse", "bpb", "bpc", "lower"),
    *_LOGARITHMS,
)
"""Words of metrics of which lower is better."""


def words(text: str) -> frozenset[str]:
    """Return the words of a text, of which a vocabulary is written."""
    return frozenset(text.split())


_BEHIND = words(
    "score scores rate value values mean avg average macro micro weighted test val valid "
    "validation dev eval evaluation train final last best top at k m mm matched mismatched norm "
    "none strict flexible extract percent pct per cent token byte char word nats bits coefficient "
    "coef corrcoef corr ovr ovo on the set"
)
"""Words behind a metric's own that leave it what it is; of "acc_stderr" nothing is known."""
_OTHERWISE = words(
    "std stdev stddev stderr sd se sem ste var variance ci delta diff difference gap drop change "
    "gain improvement increase decrease reduction rank ranking count num number n neg negative "
    "minus inv inverse reciprocal one ln exp sqrt log10 log2 relative rel ratio excess regret "
    "grad gradient threshold sum total cumulative time step steps epoch epochs scale scaled"
)
"""Words before a metric's own with which it is another number."""


def metric_word(name: str) -> str | None:
    """Return the word of a metric's name that tells its direction, None where none does.

    The last known word decides: "eval_exact_match" and "macro F1" are known by "match" and "f1".
    Words around it with which it is another number, as in "acc_stderr" or "neg_loss", leave it
    unknown; the logarithm of a perplexity is a loss.  "NAME:lower" and "NAME:higher" (with 1 as the
    best) say it of any other metric.
    """
    # The wrong direction would turn a ranking upside down without any sign of it.  So a name counts
    # only if every word around the metric's own is one that leaves its direction as it is.
    name = name.replace("²", "2")
    text = re.sub(r"[↑↓]|\(?\b(lower|higher) is better\)?", "", name.lower()).strip()
    if text.endswith((":lower", ":higher")):
        return text.rpartition(":")[2]
    if re.search(r"[^\w\s/.,:@()\[\]%&-]|[^\x00-\x7f]|(^|/)(1|100)?\s*-", text):
        return None
    parts = [part for part in re.split(r"[\W_]+", text) if part]
    for place, word in reversed([*enumerate(parts)]):
        for form in (word, word.rstrip("0123456789")):
            if form in ("lower", "higher") or form not in (*_WORST, *_LOWER):
                continue
            before, behind = set(parts[:place]), set(parts[place + 1 :])
            score_error = form in ("err", "error") and before & {*_WORST, *_LOWER}
            if before & _OTHERWISE or score_error:
                return None
            if not all(map(str.isdigit, behind - _BEHIND)):
                return None
            if "log" in before and form != "loss":
                return "loss" if form in _LOGARITHMS else None
            return form
    return None


def sampling_noise(name: str, losses: Array, rows: int | None) -> Array | None:
    """Return standard errors of a share of test rows, right or wrong; None for other metrics."""
    share = metric_word(name) in _SHARES
    if rows is None or not share or re.search("squared|absolute|mean", name.lower()):
        return None
    if (highest := np.nanmax(losses)) > 1:
        raise TableError(f"the {name} goes up to {highest:g}, and test_rows is for shares up to 1")
    return np.sqrt(losses * (1 - losses) / rows)


def guessing(name: str | None, classes: int) -> float | None:
    """Return the loss of guessing among C classes: ln C, of a share of test rows 1 − 1/C."""
    word = metric_word(name or "loss")
    if word in _SHARES:
        return 1 - 1 / classes
    return math.log(classes) if word in ("loss", "nll") else None


_SHARES = ("accuracy", "acc", "match", "em", "error", "err")


def _known_word(name: str) -> str:
    word = metric_word(name)
    if word is None:
        name = name.partition(":")[0]
        text = f"the metric {shown(name)} is not known here; say whether lower or higher is better"
        forms = f"{shown(name + ':lower')} or, if its best is 1 or 100 %, {shown(name + ':higher')}"
        raise TableError(f"{text}: {forms}", metric=f"{name}:higher|lower")
    return word


def higher_is_better(name: str) -> bool:
    """Return whether a metric's best is 1; if not, lower is better.

    Raises:
        TableError: its name does not tell.
    """
    return _known_word(name) in _WORST


def worst_value(name: str) -> float:
    """Return the lowest value of a metric whose best is 1, the lowest possible of others."""
    word = _known_word(name)
    return _WORST.get(word, 1.0 if word in _LOGARITHMS else 0.0)


def to_forecast(name: str, value: Values, rows: float = math.inf) -> Values:
    """Convert scores to the numbers that methods extrapolate: lower is better and above 0.

    A loss is itself, a perplexity its logarithm.  Of a score whose best is 1 it is what is missing,
    1 − value; where nothing is missing in so many rows, half a row's worth.

    Raises:
        TableError: the metric's name does not tell which direction is better.
    """
    if higher_is_better(name):
        return np.maximum(1.0 - value, 0.5 / rows)
    return np.log(value) if metric_word(name) in _LOGARITHMS else value


def from_forecast(name: str, value: Values) -> Values:
    """Return forecasts in the metric's own terms, a score no lower than its worst, or raise."""
    if higher_is_better(name):
        return np.maximum(1.0 - value, worst_value(name))
    return np.exp(value) if metric_word(name) in _LOGARITHMS else value


@dataclass(frozen=True)
class LossTable:
    """Losses, a row for each model.

    Attributes:
        names: the models, [n], all different.
        sizes: training examples, increasing, [m]; the first may be 0.
        losses: [n, m]; NaN where the table has no number.
        parameters: N of every model, [n]; NaN where unknown, None without the column.
        metric: what the numbers were before they became losses (see `shown`); None: losses, as far
            as is known.
        scale: 100 where its scores were in per cent.
        noise: standard errors of the losses, [n, m], NaN where unknown: over seeds, and of an
            accuracy from the number of its test rows; None where there are none.

    Example:
        >>> import numpy as np
        >>> import jachess_ext as jx
        >>> losses = np.array([[2.0, 1.5], [2.1, 1.7]])
        >>> table = jx.scaling.LossTable(("a", "b"), np.array([100.0, 200.0]), losses, None)
        >>> table.up_to(100).losses_at(100)
        array([2. , 2.1])
    """

    names: tuple[str, ...]
    sizes: Array
    losses: Array
    parameters: Array | None
    metric: str | None = None
    scale: float = 1.0
    noise: Array | None = None

    def shown(self, losses: Values) -> Values:
        """Return losses in the terms that the table was in: accuracies, per cent, ..."""
        return losses if self.metric is None else self.scale * from_forecast(self.metric, losses)

    @property
    def label(self) -> str:
        """What `shown` returns, in words."""
        return f"{self.metric or 'loss'}{' (per cent)' if self.scale == 100 else ''}"

    def up_to(self, budget: float) -> LossTable:
        """Return the columns of sizes up to the budget that have a loss, every loss checked.

        Raises:
            TableError: a budget below the first size or above the last, no loss up to it, or one
                that is not positive.
        """
        smallest, largest = self.trained[0], self.sizes[-1]
        if not smallest <= budget <= largest:
            text = f"the budget {budget:g} is outside the table's sizes"
            raise TableError(f"{text}, {smallest:g} to {largest:g}")
        within = self.sizes <= budget
        self._check(within, counted=~np.isnan(self.losses[:, within]))
        within &= ~np.isnan(self.losses).all(0)
        if not within.any():
            raise TableError(f"no model has a loss at a size up to {budget:g}")
        noise = None if self.noise is None else self.noise[:, within]
        return replace(self, sizes=self.sizes[within], losses=self.losses[:, within], noise=noise)

    def rows(self, places: Index) -> LossTable:
        """Return the models at these rows."""
        return replace(
            self,
            names=tuple(self.names[place] for place in places),
            losses=self.losses[places],
            parameters=None if self.parameters is None else self.parameters[places],
            noise=None if self.noise is None else self.noise[places],
        )

    def losses_at(self, size: float) -> Array:
        """Return the losses at a size, [n].

        Raises:
            TableError: no such column, or a loss in it that is missing or not positive.
        """
        column = self.sizes == size
        if not column.any():
            raise TableError(f"the table has no column {size:g}; it has {self.sizes.tolist()}")
        self._check(column)
        return self.losses[:, column][:, 0]

    @property
    def trained(self) -> Array:
        """The sizes above 0."""
        return self.sizes[self.sizes > 0]

    @property
    def trained_losses(self) -> Array:
        """Losses at the sizes above 0, [n, number of them]."""
        return self.losses[:, self.sizes > 0]

    @property
    def last_noise(self) -> Array:
        """The standard error of each model's ln L at its largest size, [n]; 0 where unknown."""
        if self.noise is None:
            return np.zeros(len(self.names))
        return np.nan_to_num(self.noise[self._last] / self.losses[self._last])

    @property
    def last_losses(self) -> Array:
        """Each model's loss at its largest size, [n]."""
        return self.losses[self._last]

    @property
    def _last(self) -> tuple[Index, Index]:
        places = [np.flatnonzero(np.isfinite(row))[-1] for row in self.losses]
        return np.arange(len(places)), np.array(places, dtype=np.intp)

    def known_parameters(self) -> Array:
        """Return N of every model, [n].

        Raises:
            TableError: the column is missing, or a number in it.
        """
        if self.parameters is None:
            raise TableError("this needs numbers of parameters; the table has no column 'size'")
        for name, count in zip(self.names, self.parameters, strict=True):
            if not 0 < count < math.inf:
                text = f"the number of parameters of {shown(name)} is {count:g}"
                raise TableError(f"{text}; expected a positive number")
        return self.parameters

    def _check(self, columns: Mask, counted: Mask | bool = True) -> None:
        losses, sizes = self.losses[:, columns], self.sizes[columns]
        perfect = np.argwhere(losses == 0)
        if len(perfect) and self.metric is not None and higher_is_better(self.metric):
            row, column = perfect[0]
            score = f"the {self.metric} of {shown(self.names[row])} at size {sizes[column]:g}"
            hint = "give test_rows, the examples it was measured on; half of one is missing then"
            raise TableError(f"{score} is the best there is; {hint}", test_rows="N")
        check_losses(losses, sizes, counted, self.names)


def check_sizes(sizes: Array) -> None:
    """Raise ValueError for sizes that are negative, not finite or not strictly increasing."""
    usable = np.isfinite(sizes) & (np.diff(sizes, prepend=-1.0) > 0) & (sizes >= 0)
    if not usable.all():
        wrong = sizes[~usable][0]
        raise ValueError(f"sizes must increase strictly from 0 up, in numbers; {wrong:g} does not")


def check_losses(
    losses: Array, sizes: Array, counted: Mask | bool = True, names: Sequence[str] | None = None
) -> None:
    """Raise TableError for a loss that is not a positive finite number, saying which."""
    places = np.argwhere(counted & ~(np.isfinite(losses) & (losses > 0)))
    if len(places):
        row, column = places[0]
        who, loss = f"curve {row}" if names is None else shown(names[row]), losses[row, column]
        text = f"the loss of {who} at size {sizes[column]:g} is {loss:g}"
        raise TableError(f"{text}; expected a positive number{_ZERO if loss == 0 else ''}")
