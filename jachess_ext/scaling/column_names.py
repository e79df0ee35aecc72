"""Vocabularies of tables: names of columns, of rows that are no models, of runs that failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .metrics import vocabulary
from .sheets import is_missing

COLUMN_NAMES = {
    "model": r"model(_name|_id|_name_or_path)?|(config_)?name|checkpoint",
    "parameters": r"size|((n|num|number_of)_)?param(eter)?s|parameter_count",
    "size": r"(max_(?=train))?((n|num|number_of|tr|train|training|few_shot|data|dataset|set|subset|"
    r"sample|labell?ed)_)*(size|rows|samples|examples|instances|tokens|fraction|share|percent|"
    r"percentage|pct|[nd])(_train)?|n_train",
    "seed": r"(random_)?seed|trial|repeat|replicate|fold",
    "value": r"value|score",
    "metric": r"metric",
}
"""Patterns of the names of columns, in lower case with _ between words, by the role of a column."""
_STATUS = vocabulary("state status finished completed success converged")
FILTER_COLUMNS = _STATUS | vocabulary(
    "task tasks dataset data data_set language lang domain benchmark split subset eval_set "
    "test_set corpus"
)
"""Names of columns of words of which a table should hold one value, for all models."""
NOT_MODEL_COLUMNS = FILTER_COLUMNS | vocabulary(
    "step steps epoch epochs iteration iterations group optimizer layer layers year date time run "
    "lr k shots"
)
"""Names of first columns that do not name models."""
_UNFINISHED = vocabulary(
    "crashed crash failed failure fail error errored timeout timedout running pruned killed "
    "cancelled canceled aborted pending queued waiting scheduled preempted preempting oom "
    "diverged stopped interrupted terminated incomplete unfinished partial suspended paused"
)
"""Words of a cell that say that its run did not finish."""
_SPREADS = vocabulary(
    "std stdev stddev sd stderr sem ci variance delta diff difference gap improvement pvalue"
)
"""A row whose name ends in one of these is no model."""
_SUMMARIES = _SPREADS | vocabulary(
    "se var mean average avg median min minimum max maximum best worst total sum count all "
    "overall gain change rank time runtime seconds hours gpu n ntest ntrain rows samples size "
    "examples tokens params parameters range top rel relative abs absolute error deviation "
    "standard geomean summary iqr mad flops cost memory speed lr epoch epochs step steps batch "
    "learning id date year unique freq checkpoint ckpt iteration iter seed fold trial lowest "
    "highest"
)
_FILLERS = vocabulary(
    "of the over across in on per models model name names seeds runs p value test train training "
    "dev num number score scores macro micro geometric harmonic rate quantile percentile t and"
)
"""A row whose name has only these and summaries' words, one at least, summarises other rows."""


def snake_case(label: str) -> str:
    """Return a column's name as words with _ between: train_size of "Train Size" or "trainSize"."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", label).lower().replace("%", " percent")
    words = re.sub(r"^(params|metrics|config|summary|hparams|tags)[\W_]+", "", words)
    return "_".join(re.findall(r"[^\W_]+", words))


def is_named(kind: str, label: str) -> bool:
    """Return whether a column's name matches a role of `COLUMN_NAMES`."""
    return re.fullmatch(COLUMN_NAMES[kind], snake_case(label)) is not None


def is_summary_row(name: str) -> bool:
    """Return whether a row of this name summarises other rows, and is no model."""
    text = name.lower().replace("p-value", "pvalue")
    words = re.findall(r"[^\W_]+", text)
    outside = re.findall(r"[^\W_]*[^\W\d_][^\W_]*", re.sub(r"\(.*?\)", "", text))
    marks = name.endswith("%") or re.search(r"±|∆|\bδ\b|\bσ\b", name.lower())
    if marks or is_missing(name) or not re.search(r"\w", name):
        return True
    # "max" sums up and "maxvit" is a model; so is "mean-pooled bert", as "pooled" is no summary's
    # word.  Only a name of nothing but such words, parentheses aside, is taken for one.
    alone = not _SUMMARIES.isdisjoint(outside) and set(outside) <= _SUMMARIES | _FILLERS
    return alone or not _SPREADS.isdisjoint(words[-1:]) or is_named("model", name)


SIZE_WORDS = vocabulary(
    "size rows examples samples train training data shots tokens n instances fraction percent "
    "share subset budget labels labelled labeled sentences amount pct percentage"
)


def says_unfinished(key: str, value: str) -> bool:
    """Return whether a cell, of a column whose snake case is `key`, says that a run failed."""
    no = key in _STATUS and value.lower() in ("false", "no")
    return no or not _UNFINISHED.isdisjoint(re.findall(r"[a-z]+", value.lower()))


def doubt_about_sizes(headers: Sequence[object], sizes: Sequence[float]) -> str | None:
    """Return what else than sizes bare numbers may be (years, layers, …), None if nothing else."""
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
