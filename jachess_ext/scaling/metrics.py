"""Direction of a metric from its name, and conversion between metric values and losses."""

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
"""Name of a metric whose best value is 1 -> its worst value."""
LOGARITHMIC = ("perplexity", "ppl")
"""Names of metrics whose logarithm is a loss."""
LOWER_IS_BETTER = (
    *("loss", "logloss", "nll", "entropy", "brier", "error", "err", "wer", "cer"),
    *("mae", "mse", "rmse", "bpb", "bpc", "lower"),
    *LOGARITHMIC,
)
"""Names of metrics for which lower is better."""


def vocabulary(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


_NEUTRAL_SUFFIXES = vocabulary(
    "score scores rate value values mean avg average macro micro weighted test val valid "
    "validation dev eval evaluation train final last best top at k m mm matched mismatched norm "
    "none strict flexible extract percent pct per cent token byte char word nats bits coefficient "
    "coef corrcoef corr ovr ovo on the set"
)
"""Words after a metric's name that do not change its direction; others, as in "acc_stderr", may."""
_CHANGING_PREFIXES = vocabulary(
    "std stdev stddev stderr sd se sem ste var variance ci delta diff difference gap drop change "
    "gain improvement increase decrease reduction rank ranking count num number n neg negative "
    "minus inv inverse reciprocal one ln exp sqrt log10 log2 relative rel ratio excess regret "
    "grad gradient threshold sum total cumulative time step steps epoch epochs scale scaled"
)
"""Words before a metric's name that may change its direction."""


def metric_word(name: str) -> str | None:
    """Return the word of a metric's name that determines its direction, None if there is none.

    It is the last known word: "match" in "eval_exact_match", "f1" in "macro F1".  The result is
    None if other words of the name may change the direction, as in "acc_stderr" or "neg_loss", and
    "loss" for the logarithm of a perplexity.  Unknown metrics can be written as "NAME:lower" or
    "NAME:higher" (best value 1).
    """
    # The wrong direction would silently reverse a ranking.  So every word around the metric's word
    # must be known not to change its direction.
    name = name.replace("²", "2")
    text = re.sub(r"[↑↓]|\(?\b(lower|higher) is better\)?", "", name.lower()).strip()
    if text.endswith((":lower", ":higher")):
        return text.rpartition(":")[2]
    if re.search(r"[^\w\s/.,:@()\[\]%&-]|[^\x00-\x7f]|(^|/)(1|100)?\s*-", text):
        return None
    words = [x for x in re.split(r"[\W_]+", text) if x]
    for index, word in reversed([*enumerate(words)]):
        for stem in (word, word.rstrip("0123456789")):
            if stem in ("lower", "higher") or stem not in (*WORST_VALUES, *LOWER_IS_BETTER):
                continue
            before, after = set(words[:index]), set(words[index + 1 :])
            is_score_error = stem in ("err", "error") and before & {*WORST_VALUES, *LOWER_IS_BETTER}
            if before & _CHANGING_PREFIXES or is_score_error:
                return None
            if not all(map(str.isdigit, after - _NEUTRAL_SUFFIXES)):
                return None
            if "log" in before and stem != "loss":
                return "loss" if stem in LOGARITHMIC else None
            return stem
    return None


def sampling_noise(name: str, losses: Array, rows: int | None) -> Array | None:
    """Return the binomial standard errors of accuracies or error rates; None for other metrics.

    Args:
        name: name of the metric.
        losses: error rates, any shape.
        rows: number of test examples; None if unknown, which returns None.

    Raises:
        TableError: an error rate above 1.
    """
    is_proportion = metric_word(name) in _PROPORTIONS
    if rows is None or not is_proportion or re.search("squared|absolute|mean", name.lower()):
        return None
    if (highest := np.nanmax(losses)) > 1:
        raise TableError(f"the {name} goes up to {highest:g}, and test_rows is for shares up to 1")
    return np.sqrt(losses * (1 - losses) / rows)


def chance_loss(name: str | None, classes: int) -> float | None:
    """Return the expected loss of guessing uniformly among `classes` classes.

    It is ln C for log losses and 1 − 1/C for accuracies and error rates; None for other metrics.
    """
    word = metric_word(name or "loss")
    if word in _PROPORTIONS:
        return 1 - 1 / classes
    return math.log(classes) if word in ("loss", "nll") else None


_PROPORTIONS = ("accuracy", "acc", "match", "em", "error", "err")
"""Names of metrics that are shares of the test examples."""


def _direction_word(name: str) -> str:
    """Return `metric_word`; raise TableError if there is none."""
    word = metric_word(name)
    if word is None:
        name = name.partition(":")[0]
        text = f"the metric {quote(name)} is not known here; say whether lower or higher is better"
        forms = f"{quote(name + ':lower')} or, if its best is 1 or 100 %, {quote(name + ':higher')}"
        raise TableError(f"{text}: {forms}", metric=f"{name}:higher|lower")
    return word


def higher_is_better(name: str) -> bool:
    """Return whether a metric is a score, whose best value is 1; if not, lower is better.

    Raises:
        TableError: the metric is unknown, see `metric_word`.
    """
    return _direction_word(name) in WORST_VALUES


def worst_value(name: str) -> float:
    """Return the lowest possible value of a metric: a score's worst value, any other's best."""
    word = _direction_word(name)
    return WORST_VALUES.get(word, 1.0 if word in LOGARITHMIC else 0.0)


def to_loss(name: str, values: Values, rows: float = math.inf) -> Values:
    """Convert values of a metric to losses, which are positive and lower is better.

    Losses are unchanged, a perplexity becomes its logarithm, and a score whose best value is 1
    becomes max(1 − score, 0.5 / rows): a perfect score counts as half an error.

    Args:
        name: name of the metric.
        values: values of the metric, any shape.
        rows: number of test examples.

    Raises:
        TableError: the metric is unknown, see `metric_word`.
    """
    if higher_is_better(name):
        return np.maximum(1.0 - values, 0.5 / rows)
    return np.log(values) if metric_word(name) in LOGARITHMIC else values


def from_loss(name: str, values: Values) -> Values:
    """Convert losses to values of a metric, the inverse of `to_loss`.

    Scores are clipped below at the metric's worst value.
    """
    if higher_is_better(name):
        return np.maximum(1.0 - values, worst_value(name))
    return np.exp(values) if metric_word(name) in LOGARITHMIC else values


def plain_name(metric: str) -> str:
    """Return a metric's name in snake case, without the prefix of a split (eval_, val/) or
    ":lower"."""
    name = re.sub(r"^(eval|evaluation|val|valid|validation|dev|test)[_/. -]+", "", metric.lower())
    return re.sub(r"[^a-z0-9]+", "_", name.rpartition(":")[0] or name)


def matching_names(metric: str, names: Iterable[str]) -> list[str]:
    """Return the names equal to `metric`; if there are none, those with the same `plain_name`."""
    names = list(names)
    plain = plain_name(metric)
    return [x for x in names if x == metric] or [x for x in names if plain_name(x) == plain]
