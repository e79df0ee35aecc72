"""Fitting one law to 30 curves: ours, all at once, against scipy in a loop over curves and starts.

Same curves (rectified, 14 sizes and D = 0, noise of 1 %), same number of starts from the same grid,
same bounds, same Huber threshold.  The baseline is `scipy.optimize.least_squares`, which is given
our analytic Jacobian; ``--published`` times the published way as well: BFGS on finite differences
from random starts.  ``objective`` in the JSON is the ratio of objectives, scipy's over ours, at
its worst and its mean over the curves: 1 or more means that ours is as good or better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.optimize import least_squares, minimize

from benchmarks.conftest import Timed
from jachess_ext.scaling import fit
from jachess_ext.scaling.fitting import huber
from jachess_ext.scaling.laws import LAWS, Law, Points

SIZES, QUICK = [30], [2]
DELTA = 0.01
STARTS = 8


def make_curves(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes [15] and noisy losses [count, 15] of rectified laws."""
    generator = np.random.default_rng(0)
    sizes = np.append(0.0, 200.0 * 2.0 ** np.arange(14))
    beta = generator.uniform(0.25, 0.8, (count, 1))
    transition = np.exp(generator.uniform(np.log(5e2), np.log(1e5), (count, 1)))
    start, floor = generator.uniform(1, 5, (count, 1)), generator.uniform(0.3, 1.5, (count, 1))
    losses = start / (1 + (sizes / transition) ** beta) + floor
    return sizes, losses * np.exp(0.01 * generator.standard_normal(losses.shape))


class ScipyLoop:
    """One scipy call for each curve and start."""

    def __init__(self, law: Law, sizes: np.ndarray, losses: np.ndarray) -> None:
        self.law, self.logs = law, np.log(losses)
        self.points = Points(np.broadcast_to(sizes, losses.shape))
        pairs = [(p.coordinate(p.low), p.coordinate(p.high)) for p in law.parameters]
        self.low, self.high = np.array(pairs).T
        self.starts = self._best_starts()

    def _best_starts(self) -> np.ndarray:
        """The starts `fit` follows, [n, STARTS, p]; strictly inside the bounds, as scipy wants."""
        grid = self.law.candidates(self.points, self.logs, np.ones_like(self.logs))
        grid = np.clip(grid, self.low + 1e-9, self.high - 1e-9)
        costs = np.stack([self.costs(grid[:, k]) for k in range(grid.shape[1])], -1)
        best = np.argsort(costs, axis=1)[:, :STARTS]
        return np.take_along_axis(grid, best[..., None], axis=1)

    def costs(self, u: np.ndarray, delta: float = np.inf) -> np.ndarray:
        """Huber objective of every curve, [n]."""
        value, _ = self.law.log_loss(u, self.points, gradient=False)
        return huber(value - self.logs, np.ones_like(value), np.full(len(u), delta))

    def _residual(self, row: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        points = self.points.rows(np.array([row]))
        return (
            lambda u: self.law.log_loss(u[None], points, gradient=False)[0][0] - self.logs[row],
            lambda u: self.law.log_loss(u[None], points)[1][0],
        )

    def least_squares(self) -> np.ndarray:
        """Best objective of every curve, [n]."""
        best = np.full(len(self.logs), np.inf)
        for row in range(len(self.logs)):
            residual, jacobian = self._residual(row)
            for start in self.starts[row]:
                found = least_squares(
                    residual,
                    start,
                    jac=jacobian,
                    bounds=(self.low, self.high),
                    loss="huber",
                    f_scale=DELTA,
                )
                best[row] = min(best[row], found.cost)
        return best

    def published(self) -> np.ndarray:
        """BFGS on finite differences of the Huber objective, from random points of the grid."""
        best = np.full(len(self.logs), np.inf)
        for row in range(len(self.logs)):
            residual, _ = self._residual(row)

            def objective(u: np.ndarray, residual: Callable[..., Any] = residual) -> float:
                value = residual(np.clip(u, self.low, self.high))
                return float(huber(value, np.ones_like(value), np.array(DELTA)))

            for start in self.starts[row]:
                best[row] = min(best[row], minimize(objective, start, method="BFGS").fun)
        return best


@pytest.mark.parametrize("program", ["ours", "least_squares", "published"])
@pytest.mark.parametrize("law", ["rectified", "lensllm", "power"])
def test_fit(
    timed: Timed, request: pytest.FixtureRequest, size: int, law: str, program: str
) -> None:
    if program == "published" and not request.config.getoption("published"):
        pytest.skip("takes minutes: --published")
    sizes, losses = make_curves(size)
    if not LAWS[law].reads_zero:
        sizes, losses = sizes[1:], losses[:, 1:]

    def ours() -> np.ndarray:
        fitted: Any = fit(sizes, losses, law, huber_delta=DELTA, starts=STARTS)
        return fitted.objective

    group = f"fit, {law}, {size} curves"
    if program == "ours":
        timed(ours, group, dtype="float64")
        return
    loop = ScipyLoop(LAWS[law](), sizes, losses)
    found = {"worst": 0.0, "mean": 0.0}
    quality = (
        timed(getattr(loop, program), group, once=True, dtype="float64", objective=found) / ours()
    )
    found.update(worst=float(quality.min()), mean=float(quality.mean()))
    assert found["worst"] > 0.999  # ours is as good a fit, or the times compare nothing
