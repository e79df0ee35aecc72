"""Fitting one law to 30 curves: ours, all at once, against scipy in a loop over curves and starts.

Same curves (rectified, 14 sizes and D = 0, noise of 1 %), same number of starts from the same grid,
same bounds, same Huber threshold.  The baseline is `scipy.optimize.least_squares`, which is given
our analytic Jacobian; ``--published`` times the published way as well: BFGS on finite differences
from random starts.  The note holds the ratio of objectives, scipy's over ours, at its worst and
its mean over the curves: 1 or more means that ours is as good or better.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize

from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.timing import interleaved
from jachess_ext.scaling import fit
from jachess_ext.scaling.laws import LAWS, Law, Points
from jachess_ext.scaling.least_squares import huber

QUESTION = "law-fits"
TARGET = "≥ 50"
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


def measure(name: str, count: int, options: Options) -> list[Row]:
    """Rows of one law: against least_squares, and against BFGS where asked."""
    sizes, losses = make_curves(count)
    if not LAWS[name].reads_zero:
        sizes, losses = sizes[1:], losses[:, 1:]
    loop = ScipyLoop(LAWS[name](), sizes, losses)

    def ours() -> np.ndarray:
        fitted: Any = fit(sizes, losses, name, huber_delta=DELTA, starts=STARTS)
        return fitted.objective

    baselines = {"least_squares loop": loop.least_squares}
    if options.extra.published:
        baselines["BFGS loop"] = loop.published
    times = interleaved(
        {"ours": ours, **baselines}, repeats=options.repeats, device=options.device, warmup=1
    )
    rows = []
    for baseline, run in baselines.items():
        quality = run() / ours()
        rows.append(
            Row.of(
                (QUESTION, f"{count} curves, {name}", "float64"),
                "fit",
                times.milliseconds("ours"),
                baseline=f"scipy {baseline}",
                baseline_p50=times.milliseconds(baseline).p50,
                ratio=times.ratio(baseline, "ours"),
                target=TARGET,
                note=f"objective scipy/ours: worst {quality.min():.6f} mean {quality.mean():.6f}",
            )
        )
    return rows


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    arguments = parser(__doc__, [], [], repeats=3)
    arguments.add_argument("--laws", nargs="+", default=["rectified", "lensllm", "power"])
    arguments.add_argument("--curves", type=int, help="default 30, quick 3")
    arguments.add_argument("--published", action="store_true", help="BFGS loop too (minutes)")
    options = parse(arguments, argv)
    count = options.extra.curves or (3 if options.quick else 30)
    rows = [row for name in options.extra.laws for row in measure(name, count, options)]
    result = finish(rows, "law_fits", options)
    for row in result:
        print(f"{row.shape}, {row.baseline}: {row.note}")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
