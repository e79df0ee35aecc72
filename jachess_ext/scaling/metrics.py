"""Metrics by their names: which direction is better, and their conversion to losses and back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from .predictive import Array
from .table_error import TableError, quote

Values = TypeVar("Values", float, Array)

WORST_VALUES = {
    **dict.fromkeys(("matthews", "mcc", "pearson", "pearsonr", "spearman", "spearmanr"), -1.0),
    **dict.fromkeys(("correlation", "kappa"), -1.0),
    **dict.fromkeys(("accuracy", "acc", "f1", "precision", "recall", "match", "em"), 0.0),
    **dict.fromkeys(("auc", "auroc", "map", "mrr", "ndcg", "iou", "dice"), 0.0),
    **dict.fromkeys(("bleu", "sacrebleu", "rouge", "rougel", "rougelsum", "meteor", "chrf"), 0.0),
    **dict.fromkeys(("r2", "higher"), -math.inf),
}
"""Word of a metric whose best is 1 -> its worst value."""
LOGARITHMIC = ("perplexity", "ppl")
LOWER_IS_BETTER = (
    *("loss", "logloss", "nll", "entropy", "brier", "error", "err", "wer", "cer"),
    *("mae", "mse", "rmse", "bpb", "bpc", "lower"),
    *LOGARITHMIC,
)
"""Words of metrics of which lower is better."""


def vocabulary(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


_NEUTRAL_AFTER = vocabulary(
    "score scores rate value values mean avg average macro micro weighted test val valid "
    "validation dev eval evaluation train final last best top at k m mm matched mismatched norm "
    "none strict flexible extract percent pct per cent token byte char word nats bits coefficient "
    "coef corrcoef corr ovr ovo on the set"
)
"""Words after a metric's word that do not change its direction; others, as of "acc_stderr", may."""
_CHANGING_BEFORE = vocabulary(
    "std stdev stddev stderr sd se sem ste var variance ci delta diff difference gap drop change "
    "gain improvement increase decrease reduction rank ranking count num number n neg negative "
    "minus inv inverse reciprocal one ln exp sqrt log10 log2 relative rel ratio excess regret "
    "grad gradient threshold sum total cumulative time step steps epoch epochs scale scaled"
)
"""Words before a metric's word that may change its direction."""


def metric_word(name: str) -> str | None:
    """Return the word of a metric's name that tells its direction, None where none does.

    It is the last known word: "match" of "eval_exact_match", "f1" of "macro F1".  With words around
    it that may change the direction, as in "acc_stderr" or "neg_loss", there is none; the logarithm
    of a perplexity is a loss.  Of other metrics "NAME:lower" and "NAME:higher" (best value 1) tell
    the direction.
    """
    # The wrong direction would turn a ranking upside down without any sign of it.  So every word
    # around the metric's word must be known not to change it.
    name = name.replace("²", "2")
    text = re.sub(r"[↑↓]|\(?\b(lower|higher) is better\)?", "", name.lower()).strip()
    if text.endswith((":lower", ":higher")):
        return text.rpartition(":")[2]
    if re.search(r"[^\w\s/.,:@()\[\]%&-]|[^\x00-\x7f]|(^|/)(1|100)?\s*-", text):
        return None
    words = [x for x in re.split(r"[\W_]+", text) if x]
    for index, word in reversed([*enumerate(words)]):
        for form in (word, word.rstrip("0123456789")):
            if form in ("lower", "higher") or form not in (*WORST_VALUES, *LOWER_IS_BETTER):
                continue
            before, behind = set(words[:index]), set(words[index + 1 :])
            score_error = form in ("err", "error") and before & {*WORST_VALUES, *LOWER_IS_BETTER}
            if before & _CHANGING_BEFORE or score_error:
                return None
            if not all(map(str.isdigit, behind - _NEUTRAL_AFTER)):
                return None
            if "log" in before and form != "loss":
                return "loss" if form in LOGARITHMIC else None
            return form
    return None


def sampling_noise(name: str, losses: Array, rows: int | None) -> Array | None:
    """Return the binomial standard errors of accuracies or error rates; None for other metrics."""
    share = metric_word(name) in _PROPORTIONS
    if rows is None or not share or re.search("squared|absolute|mean", name.lower()):
        return None
    if (highest := np.nanmax(losses)) > 1:
        raise TableError(f"the {name} goes up to {highest:g}, and test_rows is for shares up to 1")
    return np.sqrt(losses * (1 - losses) / rows)


def chance_loss(name: str | None, classes: int) -> float | None:
    """Return the loss of guessing among C classes: ln C, or 1 − 1/C of accuracies and errors."""
    word = metric_word(name or "loss")
    if word in _PROPORTIONS:
        return 1 - 1 / classes
    return math.log(classes) if word in ("loss", "nll") else None


_PROPORTIONS = ("accuracy", "acc", "match", "em", "error", "err")


def _direction_word(name: str) -> str:
    word = metric_word(name)
    if word is None:
        name = name.partition(":")[0]
        text = f"the metric {quote(name)} is not known here; say whether lower or higher is better"
        forms = f"{quote(name + ':lower')} or, if its best is 1 or 100 %, {quote(name + ':higher')}"
        raise TableError(f"{text}: {forms}", metric=f"{name}:higher|lower")
    return word


def higher_is_better(name: str) -> bool:
    """Return whether a metric's best is 1; if not, lower is better.

    Raises:
        TableError: its name does not tell.
    """
    return _direction_word(name) in WORST_VALUES


def worst_value(name: str) -> float:
    """Return the lowest value of a metric whose best is 1, the lowest possible of others."""
    word = _direction_word(name)
    return WORST_VALUES.get(word, 1.0 if word in LOGARITHMIC else 0.0)


def to_loss(name: str, value: Values, rows: float = math.inf) -> Values:
    """Return a metric's values as losses, which methods extrapolate: positive, lower is better.

    A loss stays, a perplexity becomes its logarithm, a score whose best is 1 becomes 1 − value, at
    least half an error in `rows` test rows, 0.5 / rows.

    Raises:
        TableError: the metric's name does not tell which direction is better.
    """
    if higher_is_better(name):
        return np.maximum(1.0 - value, 0.5 / rows)
    return np.log(value) if metric_word(name) in LOGARITHMIC else value


def from_loss(name: str, value: Values) -> Values:
    """Return losses as values of a metric, as `to_loss` inverted; a score is its worst at least."""
    if higher_is_better(name):
        return np.maximum(1.0 - value, worst_value(name))
    return np.exp(value) if metric_word(name) in LOGARITHMIC else value


def plain_name(metric: str) -> str:
    """Return a metric's name without the prefix of its data set, such as eval_ or val/."""
    name = re.sub(r"^(eval|evaluation|val|valid|validation|dev|test)[_/. -]+", "", metric.lower())
    return re.sub(r"[^a-z0-9]+", "_", name.rpartition(":")[0] or name)


def matching_names(metric: str, names: Iterable[str]) -> list[str]:
    """Return the names equal to a metric's, or else those with the same `plain_name`."""
    names = list(names)
    plain = plain_name(metric)
    return [x for x in names if x == metric] or [x for x in names if plain_name(x) == plain]
