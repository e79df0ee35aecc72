"""Scores of a selection against the true losses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .predictive import Array


def pear_corr(scores: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    """Return Pearson's correlation of scores (lower is better) and true losses, in per cent.

    NaN where one side is constant.

    Raises:
        ValueError: shapes other than [n] and [n], fewer than two, or a number that is not finite.

    Example:
        >>> import jachess_ext as jx
        >>> round(jx.scaling.pear_corr([1.0, 2.0, 3.0], [1.1, 2.1, 3.1]), 6)
        100.0
    """
    x, y = _pair(scores, losses)
    x, y = x - x.mean(), y - y.mean()
    norm = np.sqrt((x**2).sum() * (y**2).sum())
    return float(100 * (x * y).sum() / norm) if norm > 0 else float("nan")


def rel_acc(scores: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    """Return (worst − chosen) / (worst − best) in per cent; the lowest score is chosen.

    Raises:
        ValueError: as `pear_corr`; or all losses equal, so that no choice is worse than another.

    Example:
        >>> import jachess_ext as jx
        >>> jx.scaling.rel_acc([3.0, 1.0, 2.0], [1.0, 1.5, 3.0])
        75.0
    """
    x, y = _pair(scores, losses)
    if np.ptp(y) == 0:
        raise ValueError("all true losses are equal: there is nothing to choose between")
    return float(100 * (y.max() - y[x.argmin()]) / np.ptp(y))


def log_rmse(predicted: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    """Return the root mean square of ln(predicted / true).

    Raises:
        ValueError: as `pear_corr`, or a value that is not positive.

    Example:
        >>> import jachess_ext as jx
        >>> jx.scaling.log_rmse([1.0, 2.0], [1.0, 2.0])
        0.0
    """
    x, y = _pair(predicted, losses)
    if (x <= 0).any() or (y <= 0).any():
        raise ValueError("predicted and true losses must be positive to compare their logarithms")
    return float(np.sqrt(np.mean(np.log(x / y) ** 2)))


def coverage(low: npt.ArrayLike, high: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    """Return the share of true losses inside their intervals, in per cent.

    Ends may be infinite: an interval of a few degrees of freedom may end beyond the largest double.

    Raises:
        ValueError: as `pear_corr` for the losses, or an end that is NaN.

    Example:
        >>> import jachess_ext as jx
        >>> jx.scaling.coverage(low=[0.0, 2.0], high=[1.0, 3.0], losses=[0.5, 3.5])
        50.0
    """
    a, y = _pair(low, losses, ends=True)
    b, _ = _pair(high, losses, ends=True)
    return float(100 * np.mean((a <= y) & (y <= b)))


def _pair(first: npt.ArrayLike, second: npt.ArrayLike, ends: bool = False) -> tuple[Array, Array]:
    """Return two arrays of equal shape, checked; `ends`: the first may be infinite."""
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or len(x) < 2:
        raise ValueError(
            f"expected two arrays of one shape [n], n ≥ 2; got {list(x.shape)} and {list(y.shape)}"
        )
    bad = np.isnan(x) if ends else ~np.isfinite(x)
    if bad.any() or not np.isfinite(y).all():
        raise ValueError("expected finite numbers; some are NaN or infinite")
    return x, y
