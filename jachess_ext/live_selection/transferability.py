"""How well a model's frozen features fit the labels, without training: higher is better.

Features are [n, d] arrays, labels [n]: classes, or numbers in a regression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..evaluation.extras import require

Floats = npt.NDArray[Any]
NEIGHBOURS = 5
_GRID = 121  # ratios of precisions tried before the best of them is refined


def logme(features: Floats, labels: Floats, regression: bool = False) -> float:
    """LogME (You et al. 2021): the largest evidence of a Bayesian linear model, a row.

    For a label vector y (one-hot of each class in turn; their mean is taken), with a prior
    w ~ N(0, I/α) and noise of precision β,
    ln p(y) = ln N(y; 0, FFᵀ/α + I/β), maximised over α and β.  With τ = α/β, the singular values
    s_i of F and z = Uᵀy the best β is n/Q(τ), Q = Σ z_i² τ/(τ + s_i²) + ‖y‖² − ‖z‖², which leaves
    n/2 (ln(n/(2πQ)) − 1) − ½ Σ ln(1 + s_i²/τ) to maximise over τ.  The published iteration finds
    the same maximum where it converges.
    """
    optimize = require("scipy.optimize")
    left, singular, _ = np.linalg.svd(features.astype(np.float64), full_matrices=False)
    squares = singular**2
    targets = [labels] if regression else [labels == value for value in np.unique(labels)]

    def evidence(y: Floats) -> float:
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
        found = optimize.minimize_scalar(negative, bounds=bounds, method="bounded")
        return -float(found.fun)

    each = [evidence(np.asarray(y, dtype=np.float64)) for y in targets]
    return float(np.mean(each)) / len(labels)


def hscore(features: Floats, labels: Floats, regression: bool = False) -> float:
    """The H-score with Ledoit–Wolf shrinkage (Ibrahim et al. 2022).

    tr(Σ_α⁻¹ (1 − α) Σ_z): Σ_α the shrunken covariance of the features, Σ_z that of their class
    means, every row standing for its class.

    Raises:
        ValueError: labels are numbers, not classes.
    """
    if regression:
        raise ValueError("hscore compares classes, and these labels are numbers; logme takes both")
    centred = features.astype(np.float64) - features.mean(0)
    covariance, shrinkage = require("sklearn.covariance").ledoit_wolf(centred, assume_centered=True)
    means = np.empty_like(centred)
    for value in np.unique(labels):
        means[labels == value] = centred[labels == value].mean(0)
    between = means.T @ means / len(labels)
    return float((1 - shrinkage) * np.trace(np.linalg.pinv(covariance, hermitian=True) @ between))


def knn(features: Floats, labels: Floats, regression: bool = False) -> float:
    """How well the nearest five other rows tell a row's label, each row in turn.

    The share of rows whose neighbours' most frequent class is theirs (of equally frequent ones the
    first); in a regression the correlation with the neighbours' mean.
    """
    count = min(NEIGHBOURS, len(labels) - 1)
    found = require("sklearn.neighbors").NearestNeighbors(n_neighbors=count).fit(features)
    near = labels[found.kneighbors(return_distance=False)]
    if regression:
        said = near.mean(1)
        flat = np.ptp(said) == 0 or np.ptp(labels) == 0
        return 0.0 if flat else float(np.corrcoef(said, labels)[0, 1])
    classes = np.unique(labels)
    votes = (near[:, :, None] == classes).sum(1)
    return float((classes[votes.argmax(1)] == labels).mean())


SCORES: dict[str, Callable[..., float]] = {"logme": logme, "hscore": hscore, "knn": knn}
