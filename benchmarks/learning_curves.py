"""Losses of cheap models over training sizes, as tables that the choice was not made on.

    python -m benchmarks.learning_curves curves.csv
    python -m benchmarks.selection families --pretraining curves.csv

Three families, on data that scikit-learn and this package ship, in a few minutes of one core:

- ``classifiers``: log-losses of scikit-learn's classifiers on digits, breast cancer, and the words
  of this package's docstrings (which library is it from?).
- ``regressors``: squared errors of scikit-learn's regressors on Friedman's three functions, with
  noise.
- ``n-grams``: cross-entropies of character models of orders 1 to 7 of the docstrings, by the
  smoothing of Witten and Bell.

Every loss is the mean over SEEDS draws of the training rows; the test rows are the same for all.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import (
    datasets,
    ensemble,
    linear_model,
    naive_bayes,
    neighbors,
    neural_network,
    svm,
    tree,
)
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import log_loss, mean_squared_error
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from jachess_ext.lab import demo

SEEDS = 3
TEXTS = Path(demo.__file__).parent / "assets" / "docstrings"
Row = tuple[str, str, str, int, float]

CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    "logistic": lambda seed: linear_model.LogisticRegression(max_iter=300),
    "logistic, weak prior": lambda seed: linear_model.LogisticRegression(C=100, max_iter=300),
    "naive Bayes": lambda seed: naive_bayes.GaussianNB(var_smoothing=1e-2),
    "5 neighbours": lambda seed: neighbors.KNeighborsClassifier(5),
    "25 neighbours": lambda seed: neighbors.KNeighborsClassifier(25),
    "forest": lambda seed: ensemble.RandomForestClassifier(100, random_state=seed),
    "extra trees": lambda seed: ensemble.ExtraTreesClassifier(100, random_state=seed),
    "small tree": lambda seed: tree.DecisionTreeClassifier(max_depth=3, random_state=seed),
    "network, 8": lambda seed: neural_network.MLPClassifier((8,), max_iter=200, random_state=seed),
    "network, 64": lambda seed: neural_network.MLPClassifier(
        (64,), max_iter=200, random_state=seed
    ),
}
REGRESSORS: dict[str, Callable[[int], Any]] = {
    "ridge": lambda seed: linear_model.Ridge(),
    "5 neighbours": lambda seed: neighbors.KNeighborsRegressor(5),
    "support vectors": lambda seed: svm.SVR(C=10),
    "forest": lambda seed: ensemble.RandomForestRegressor(50, random_state=seed),
    "boosting": lambda seed: ensemble.GradientBoostingRegressor(random_state=seed),
    "tree": lambda seed: tree.DecisionTreeRegressor(min_samples_leaf=4, random_state=seed),
    "network, 16": lambda seed: neural_network.MLPRegressor(
        hidden_layer_sizes=(16,), max_iter=300, random_state=seed
    ),
    "network, 64 x 2": lambda seed: neural_network.MLPRegressor(
        hidden_layer_sizes=(64, 64), max_iter=300, random_state=seed
    ),
}


def texts() -> tuple[list[str], list[str]]:
    """Return the docstrings and the libraries they are from."""
    rows = [json.loads(line) for line in (TEXTS / "train.jsonl").read_text().splitlines()]
    return [row["text"] for row in rows], [row["label"] for row in rows]


def fitted_losses(
    x: np.ndarray, y: np.ndarray, models: dict[str, Callable[[int], Any]], classes: bool
) -> Iterator[tuple[str, int, float]]:
    """Yield (model, size, test loss) for sizes that double from 32."""
    order = np.random.default_rng(0).permutation(len(x))
    test, train = order[: len(x) // 4], order[len(x) // 4 :]
    labels = np.unique(y)
    sizes = [32 * 2**k for k in range(20) if 32 * 2**k <= len(train)]
    for name, model in models.items():
        for size in sizes:
            losses = []
            for seed in range(SEEDS):
                rows = np.random.default_rng(seed).permutation(train)[:size]
                fitted = make_pipeline(StandardScaler(), model(seed)).fit(x[rows], y[rows])
                if not classes:
                    losses.append(mean_squared_error(y[test], fitted.predict(x[test])))
                    continue
                p = np.full((len(test), len(labels)), 1e-3)
                p[:, np.searchsorted(labels, fitted.classes_)] += fitted.predict_proba(x[test])
                losses.append(log_loss(y[test], p / p.sum(1, keepdims=True), labels=labels))
            yield name, size, float(np.mean(losses))


def character_loss(train: str, test: str, order: int) -> float:
    """Return the nats per character of `test` by a Witten–Bell model of an order."""
    counts: list[defaultdict[str, Counter[str]]] = [defaultdict(Counter) for _ in range(order)]
    for place in range(order, len(train)):
        for length in range(order):
            counts[length][train[place - length : place]][train[place]] += 1
    alphabet, total = len({*train, *test}), 0.0
    for place in range(order, len(test)):
        p = 1 / alphabet
        for length in range(order):
            seen = counts[length].get(test[place - length : place])
            if seen:
                kinds, number = len(seen), sum(seen.values())
                p = (seen[test[place]] + kinds * p) / (number + kinds)
        total -= math.log(p)
    return total / (len(test) - order)


def curves() -> Iterator[Row]:
    """Yield (family, table, model, size, loss)."""
    words, libraries = texts()
    tfidf = TfidfVectorizer(max_features=100).fit_transform(words).toarray()
    digits = datasets.load_digits(return_X_y=True)
    tables = {"digits": digits, "breast cancer": datasets.load_breast_cancer(return_X_y=True)}
    tables["docstrings"] = tfidf, np.array(libraries)
    for table, (x, y) in tables.items():
        for row in fitted_losses(x, y, CLASSIFIERS, classes=True):
            yield "classifiers", table, *row
    for number in (1, 2, 3):
        make = getattr(datasets, f"make_friedman{number}")
        for noise in (0.1, 1.0):
            x, y = make(n_samples=5600, random_state=0)
            y = y / y.std() + np.random.default_rng(1).normal(0, noise, len(y))
            for row in fitted_losses(x, y, REGRESSORS, classes=False):
                yield "regressors", f"Friedman {number}, noise {noise}", *row
    for table in range(3):
        shuffled = np.random.default_rng(table).permutation(words)
        text = "\n".join(shuffled)
        test, train = text[:8000], text[8000:]
        for order in range(1, 8):
            size = 500
            while size <= len(train):
                loss = character_loss(train[:size], test, order)
                yield "n-grams", f"order {table} of the lines", f"order {order}", size, loss
                size *= 2


def main(path: str) -> None:
    """Write the csv."""
    warnings.simplefilter("ignore")  # networks that have not converged are models, too
    columns = ["family", "table", "model", "size", "loss"]
    frame = pd.DataFrame(curves(), columns=columns)
    frame.to_csv(path, index=False)
    print(frame.groupby(["family", "table"]).agg({"model": "nunique", "size": "max"}))


if __name__ == "__main__":
    main(*sys.argv[1:])
