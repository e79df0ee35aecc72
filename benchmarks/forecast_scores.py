"""How near scores, forecasts and intervals of a selection come to the losses in full, [n] each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pear_corr(scores: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    """Return Pearson's correlation in per cent; NaN where one side is constant."""
    x, y = _finite(scores, losses)
    return float(100 * np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else float("nan")


def rel_acc(scores: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    """Return (worst − chosen) / (worst − best) in per cent; the lowest score is chosen."""
    x, y = _finite(scores, losses)
    if np.ptp(y) == 0:
        raise ValueError("all true losses are equal: there is nothing to choose between")
    return float(100 * (y.max() - y[x.argmin()]) / np.ptp(y))


def log_rmse(predicted: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    """Return the root mean square of ln(predicted / true)."""
    x, y = _finite(*np.log(_finite(predicted, losses)))
    return float(np.sqrt(np.mean((x - y) ** 2)))


def cross_entropy(logs: npt.ArrayLike, shares: npt.ArrayLike) -> float:
    """Return −Σ share ln P, with P of these logarithms up to a constant; 0 ln 0 counts as 0.

    The shares are those of the true best: 1, or equal parts where several are.
    """
    x, y = np.asarray(logs, float), np.asarray(shares, float)
    top = x.max()
    log_p = x - top - np.log(np.exp(x - top).sum())
    return float(-y[y > 0] @ log_p[y > 0])


def coverage(low: npt.ArrayLike, high: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    """Return the share of losses inside their intervals, in per cent; ends may be infinite."""
    ends, (y, _) = np.array([low, high], dtype=np.float64), _finite(losses, losses)
    if np.isnan(ends).any():
        raise ValueError("an end of an interval is NaN")
    return float(100 * np.mean((ends[0] <= y) & (y <= ends[1])))


def _finite(first: npt.ArrayLike, second: npt.ArrayLike) -> np.ndarray:
    both = np.array([first, second], dtype=np.float64)
    if both.ndim != 2 or both.shape[1] < 2 or not np.isfinite(both).all():
        raise ValueError("expected two arrays of finite numbers, [n] each, n ≥ 2")
    return both
