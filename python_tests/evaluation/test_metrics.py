"""GLUE metrics against their definitions, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from jachess_ext.evaluation.metrics import GLUE, glue_metric

PREDICTIONS = np.array([1, 1, 1, 0, 0, 0, 1, 0, 1, 1])
REFERENCES = np.array([1, 0, 1, 0, 1, 0, 1, 0, 0, 1])
TP, FP, FN, TN = 4, 2, 1, 3


def test_accuracy() -> None:
    assert glue_metric("sst2")(PREDICTIONS, REFERENCES) == pytest.approx((TP + TN) / 10)


def test_f1() -> None:
    assert glue_metric("mrpc")(PREDICTIONS, REFERENCES) == pytest.approx(
        2 * TP / (2 * TP + FP + FN)
    )


def test_matthews() -> None:
    expected = (TP * TN - FP * FN) / math.sqrt((TP + FP) * (TP + FN) * (TN + FP) * (TN + FN))
    assert glue_metric("cola")(PREDICTIONS, REFERENCES) == pytest.approx(expected)


def test_spearman_is_the_rank_formula() -> None:
    predictions, references = [0.1, 0.5, 0.3, 9.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0]
    ranks = [1, 3, 2, 5, 4]
    squares = sum((a - b) ** 2 for a, b in zip(ranks, range(1, 6), strict=True))
    expected = 1 - 6 * squares / (5 * 24)
    assert glue_metric("stsb")(predictions, references) == pytest.approx(expected)


@pytest.mark.parametrize("task", sorted(GLUE))
def test_perfect_and_constant_predictions(task: str) -> None:
    references = [0.5, 1.0, 2.0, 3.0] if task == "stsb" else [0, 1, 0, 1]
    assert glue_metric(task)(references, references) == pytest.approx(1.0)
    if task not in ("mrpc", "qqp"):
        chance = 0.5 if GLUE[task].name == "accuracy" else 0.0
        assert glue_metric(task)([1, 1, 1, 1], references) == pytest.approx(
            chance if task != "stsb" else 0.0
        )


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="unknown GLUE task 'wnli2'"):
        glue_metric("wnli2")
    with pytest.raises(ValueError, match="one shape"):
        glue_metric("rte")([1, 0], [1])
    with pytest.raises(ValueError, match="finite"):
        glue_metric("stsb")([float("nan"), 1.0], [1.0, 2.0])
