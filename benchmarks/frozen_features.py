"""Scores of frozen features, what `benchmarks.selection_trial` compares forecasts with.

How well a model's frozen features [n, d] fit the labels [n] (classes, or numbers in a regression),
without training: higher is better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
import sklearn.covariance
import sklearn.neighbors
import torch

from jachess_ext._io import DataError
from jachess_ext.compare.models import Encoded
from jachess_ext.scaling.predictive import Array

NEIGHBOURS = 5
_GRID = 121  # ratios of precisions tried before the best of them is refined


def logme(features: Array, labels: Array, regression: bool = False) -> float:
    """Return LogME (You et al. 2021): the largest evidence of a Bayesian linear model, a row.

    For a label vector y (one-hot of each class in turn; their mean is taken), with a prior
    w ~ N(0, I/α) and noise of precision β,
    ln p(y) = ln N(y; 0, FFᵀ/α + I/β), maximised over α and β.  With τ = α/β, the singular values
    s_i of F and z = Uᵀy the best β is n/Q(τ), Q = Σ z_i² τ/(τ + s_i²) + ‖y‖² − ‖z‖², which leaves
    n/2 (ln(n/(2πQ)) − 1) − ½ Σ ln(1 + s_i²/τ) to maximise over τ.  The published iteration finds
    the same maximum where it converges.
    """
    left, singular, _ = np.linalg.svd(features.astype(np.float64), full_matrices=False)
    squares = singular**2
    targets = [labels] if regression else [labels == value for value in np.unique(labels)]

    def evidence(y: Array) -> float:
        parts = (left.T @ y) ** 2
        rest = max(float(y @ y - parts.sum()), 0.0)

        def negative(log_ratio: float) -> float:
            ratio = np.exp(log_ratio)
            spread = max(float((parts * ratio / (ratio + squares)).sum()) + rest, 1e-300)
            fit = len(y) / 2 * (np.log(len(y) / (2 * np.pi * spread)) - 1)
            return float(np.log1p(squares / ratio).sum() / 2 - fit)

        top = np.log(max(squares.max(), 1e-300))
        grid = np.linspace(top - 35, top + 10, _GRID)
        place = int(np.argmin([negative(value) for value in grid]))
        bounds = grid[max(place - 1, 0)], grid[min(place + 1, _GRID - 1)]
        best = scipy.optimize.minimize_scalar(negative, bounds=bounds, method="bounded")
        return -float(best.fun)

    each = [evidence(np.asarray(y, dtype=np.float64)) for y in targets]
    return float(np.mean(each)) / len(labels)


def hscore(features: Array, labels: Array, regression: bool = False) -> float:
    """Return the H-score with Ledoit–Wolf shrinkage (Ibrahim et al. 2022).

    tr(Σ_α⁻¹ (1 − α) Σ_z): Σ_α the shrunken covariance of the features, Σ_z that of their class
    means, every row standing for its class.

    Raises:
        ValueError: labels are numbers, not classes.
    """
    if regression:
        raise ValueError("hscore compares classes, and these labels are numbers; logme takes both")
    centred = features.astype(np.float64) - features.mean(0)
    covariance, shrinkage = sklearn.covariance.ledoit_wolf(centred, assume_centered=True)
    means = np.empty_like(centred)
    for value in np.unique(labels):
        means[labels == value] = centred[labels == value].mean(0)
    between = means.T @ means / len(labels)
    return float((1 - shrinkage) * np.trace(np.linalg.pinv(covariance, hermitian=True) @ between))


def knn(features: Array, labels: Array, regression: bool = False) -> float:
    """Return how well the nearest five other rows tell a row's label, each row in turn.

    The share of rows whose neighbours' most frequent class is theirs (of equally frequent classes
    the first); in a regression the correlation with the neighbours' mean.
    """
    count = min(NEIGHBOURS, len(labels) - 1)
    neighbours = sklearn.neighbors.NearestNeighbors(n_neighbors=count).fit(features)
    near = labels[neighbours.kneighbors(return_distance=False)]
    if regression:
        said = near.mean(1)
        flat = np.ptp(said) == 0 or np.ptp(labels) == 0
        return 0.0 if flat else float(np.corrcoef(said, labels)[0, 1])
    classes = np.unique(labels)
    votes = (near[:, :, None] == classes).sum(1)
    return float((classes[votes.argmax(1)] == labels).mean())


SCORES: dict[str, Callable[..., float]] = {"logme": logme, "hscore": hscore, "knn": knn}


@torch.no_grad()
def frozen_features(model: Any, data: Encoded, batch_size: int) -> Array:
    """Return means over the real tokens and all layers' outputs, [n, d], in the rows' order.

    Args:
        model: a classifier or regressor of transformers; put in evaluation mode.
        batch_size: rows at a time.

    Raises:
        DataError: the model gives no hidden states.
    """
    device = next(model.parameters()).device
    model.eval()
    order = sorted(range(len(data)), key=lambda i: len(data.rows[i]["input_ids"]))
    parts = []
    for start in range(0, len(order), batch_size):
        batch = data.batch(order[start : start + batch_size])
        inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
        outputs = model(**inputs, output_hidden_states=True)
        states = getattr(outputs, "hidden_states", None)
        if states is None:
            states = getattr(outputs, "encoder_hidden_states", None)
        if states is None:
            raise DataError("the model gives no hidden states, which frozen features are made of")
        # the first is the embedding, no layer's output
        layers = torch.stack([state.double() for state in states[1:] or states]).mean(0)
        mask = inputs["attention_mask"].to(layers.dtype)[..., None]
        parts.append(((layers * mask).sum(1) / mask.sum(1)).cpu().numpy())
    return np.concatenate(parts)[np.argsort(order)]
