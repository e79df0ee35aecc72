"""Losses over sizes as the user gave them: checked, in double precision, one row a curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arrays import Array, Mask

_ZERO = " (an error rate of 0 has no logarithm; write half a test example, 0.5 / their number)"


@dataclass(frozen=True)
class Curves:
    """Losses of n curves at m sizes.

    Attributes:
        sizes: strictly increasing, [m]; the first may be 0.
        losses: positive, [n, m].
        weights: not negative, [n, m].
        single: whether the caller gave one curve as [m].
    """

    sizes: Array
    losses: Array
    weights: Array
    single: bool

    def joined(self) -> Curves:
        """All rows as one curve (its sizes repeat, for Kaplan's law only)."""
        return Curves(
            np.tile(self.sizes, len(self.losses)),
            self.losses.reshape(1, -1),
            self.weights.reshape(1, -1),
            True,
        )


def check_curves(
    sizes: npt.ArrayLike, losses: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> Curves:
    """The arguments of `fit` as `Curves`.

    Raises:
        ValueError: shapes that do not match, sizes that do not increase, bad losses or weights.
    """
    d = _numbers("sizes", sizes)
    y = _numbers("losses", losses)
    if d.ndim != 1 or y.ndim not in (1, 2) or y.shape[-1] != len(d) or not y.size:
        raise ValueError(
            f"sizes has shape {list(d.shape)} and losses {list(y.shape)}; expected [m], and [m] or "
            "[n, m]"
        )
    check_sizes(d)
    rows = np.atleast_2d(y)
    if weights is None:
        w = np.ones_like(rows)
    else:
        w = _numbers("weights", weights)
        if w.shape not in (y.shape, d.shape) or not (np.isfinite(w) & (w >= 0)).all():
            raise ValueError(
                f"weights has shape {list(w.shape)}; expected {list(y.shape)} or {list(d.shape)}, "
                "finite and not negative"
            )
        w = np.broadcast_to(w, rows.shape)
        if not (w > 0).any(-1).all():
            raise ValueError("all weights of a curve are 0; every curve needs losses that count")
    check_losses(rows, d, w > 0)
    return Curves(d, np.where(w > 0, rows, 1.0), w, y.ndim == 1)


def check_sizes(sizes: Array) -> None:
    """Raises ValueError for sizes that are negative, not finite or not strictly increasing."""
    if not (np.isfinite(sizes) & (sizes >= 0)).all():
        bad = sizes[~(np.isfinite(sizes) & (sizes >= 0))][0]
        raise ValueError(f"sizes holds {bad:g}; expected numbers of training examples from 0 up")
    falls = np.flatnonzero(np.diff(sizes) <= 0)
    if len(falls):
        first = falls[0]
        raise ValueError(
            f"sizes must increase strictly, but {sizes[first]:g} is followed by "
            f"{sizes[first + 1]:g}; sort them and keep each once"
        )


def check_losses(
    losses: Array,
    sizes: Array,
    counted: Mask | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Raises ValueError for a loss that is not a positive finite number, saying which."""
    bad = ~(np.isfinite(losses) & (losses > 0))
    if counted is not None:
        bad &= counted
    places = np.argwhere(bad)
    if len(places):
        row, column = places[0]
        who = f"curve {row}" if names is None else f"{names[row]!r}"
        raise ValueError(
            f"the loss of {who} at size {sizes[column]:g} is {losses[row, column]:g}; expected a "
            f"positive number{_ZERO if losses[row, column] == 0 else ''}"
        )


def _numbers(name: str, values: npt.ArrayLike) -> Array:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} holds something that is no number, or rows of unequal length"
        ) from None
