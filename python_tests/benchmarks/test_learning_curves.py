"""The cheap models whose losses judge the choice: by hand, and of the right kind."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn import datasets

from benchmarks import learning_curves
from benchmarks.learning_curves import CLASSIFIERS, REGRESSORS, character_loss, fitted_losses


def test_a_character_model_by_hand() -> None:
    """Order 1 of "xaab": after the first, a twice and b once, 2 kinds; 3 letters in all."""
    p_a, p_b = (2 + 2 / 3) / 5, (1 + 2 / 3) / 5
    assert character_loss("xaab", "xab", 1) == pytest.approx(-math.log(p_a * p_b) / 2)
    # Order 2: after a there were a and b, once each.
    assert character_loss("xxaab", "xxab", 2) == pytest.approx(
        -(math.log(second("a", "x")) + math.log(second("b", "a"))) / 2
    )


def second(letter: str, before: str) -> float:
    single = {"a": (2 + 2 / 3) / 5, "b": (1 + 2 / 3) / 5}[letter]
    seen = {"x": {"a": 1}, "a": {"a": 1, "b": 1}}[before]
    return (seen.get(letter, 0) + len(seen) * single) / (sum(seen.values()) + len(seen))


def test_losses_fall_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_curves, "SEEDS", 1)
    x, y = datasets.load_breast_cancer(return_X_y=True)
    models = {name: CLASSIFIERS[name] for name in ("logistic", "naive Bayes")}
    rows = list(fitted_losses(x, y, models, classes=True))
    assert [(name, size) for name, size, _ in rows] == [
        (name, size) for name in models for size in (32, 64, 128, 256)
    ]
    losses = np.array([loss for *_, loss in rows]).reshape(2, 4)
    assert (losses < math.log(2)).all() and (losses[:, -1] < losses[:, 0]).all()
    x, y = datasets.make_friedman1(400, random_state=0)
    (first, *_, last) = fitted_losses(x, y, {"ridge": REGRESSORS["ridge"]}, classes=False)
    assert last[2] < first[2] < y.var()
