"""Vocabularies of tables: names of columns, of summary rows, and marks of unfinished runs."""

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
"""Role of a column -> pattern of the names of such columns, in snake case."""
_STATUS = vocabulary("state status finished completed success converged")
FILTER_COLUMNS = _STATUS | vocabulary(
    "task tasks dataset data data_set language lang domain benchmark split subset eval_set "
    "test_set corpus"
)
"""Names of text columns that should have the same value in all rows of a table."""
CHOICE_COLUMNS = FILTER_COLUMNS | vocabulary("optimizer method scheduler")
"""Names of text columns of which one value may be chosen, and the rows of others left out."""
TRAINING = vocabulary("train training")
"""Words of a cell whose row, of losses of the training examples, is never proposed."""
SPLITS = TRAINING | vocabulary("dev val valid validation eval evaluation test")
"""Words of the cells of columns, of any name, of which one may be chosen."""
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
"""Words of a status cell that mark its run as unfinished."""
_SPREADS = vocabulary(
    "std stdev stddev sd stderr sem ci variance delta diff difference gap improvement pvalue"
)
"""Last words of the names of rows of spreads or differences, which are no models."""
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
"""Words allowed beside those of `_SUMMARIES` in the name of a summary row."""


def snake_case(label: str) -> str:
    """Return a column's name in snake case, without prefixes.

    "Train Size" and "trainSize" both become "train_size".
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", label).lower().replace("%", " percent")
    words = re.sub(r"^(params|metrics|config|summary|hparams|tags)[\W_]+", "", words)
    return "_".join(re.findall(r"[^\W_]+", words))


def has_role(role: str, label: str) -> bool:
    """Return whether the name of a column matches a role, a key of `COLUMN_NAMES`."""
    return re.fullmatch(COLUMN_NAMES[role], snake_case(label)) is not None


def is_summary_row(name: str) -> bool:
    """Return whether a row of this name summarises other rows, rather than being a model."""
    text = name.lower().replace("p-value", "pvalue")
    words = re.findall(r"[^\W_]+", text)
    outer_words = re.findall(r"[^\W_]*[^\W\d_][^\W_]*", re.sub(r"\(.*?\)", "", text))
    has_mark = name.endswith("%") or re.search(r"±|∆|\bδ\b|\bσ\b", name.lower())
    if has_mark or is_missing(name) or not re.search(r"\w", name):
        return True
    # "max" is a summary but "maxvit" is a model, and so is "mean-pooled bert", as "pooled" is not
    # in the vocabularies.  All words outside parentheses have to be.
    summary = not _SUMMARIES.isdisjoint(outer_words) and set(outer_words) <= _SUMMARIES | _FILLERS
    return summary or not _SPREADS.isdisjoint(words[-1:]) or has_role("model", name)


SIZE_WORDS = vocabulary(
    "size rows examples samples train training data shots tokens n instances fraction percent "
    "share subset budget labels labelled labeled sentences amount pct percentage"
)


def marks_unfinished(column: str, value: str) -> bool:
    """Return whether a cell marks its run as failed or unfinished.

    Args:
        column: the column's name in snake case.
        value: text of the cell.
    """
    is_denied = column in _STATUS and value.lower() in ("false", "no")
    return is_denied or not _UNFINISHED.isdisjoint(re.findall(r"[a-z]+", value.lower()))


def doubt_about_sizes(headers: Sequence[object], sizes: Sequence[float]) -> str | None:
    """Return a text on what plain numbers may be instead of training set sizes; None if nothing.

    Args:
        headers: the column names (or cells) that were read as sizes.
        sizes: their values.

    Returns:
        An end of a sentence, such as "may be years".
    """
    # 7B, 13B are models as often as sizes; 2, 4, 8 are shots, 1, 2, 3 layers and 2021, 2022 years.
    # Only numbers with no other likely meaning are taken for sizes without asking the user.
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
