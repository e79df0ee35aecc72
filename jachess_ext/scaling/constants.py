"""The constants of the choice of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Constants that cannot be estimated from a single table, fitted on the development tables.

    `python -m benchmarks.selection constants` judges the choice with each constant halved and
    doubled: RelAcc moves by a point at most, so that they are round numbers.

    Attributes:
        spike: how far the fall from a curve's first loss may lie above the median fall of all
            models, in standard deviations of these falls, before it counts as a failed run.
        fade: prior median of the factor φ that a slope of ln L keeps per doubling; ln φ is normal.
        fade_spread: standard deviation of ln φ.
        evidence: log odds of one forecast against another per nat of error and backtest.
        backtests: number of backtests beyond which evidence does not grow.
        draw: weight of the last losses in the differences between forecasts, see `blend.draw`.
        width: prior of a forecast's error, in standard deviations of the process; it counts as the
            backtests from one size.
        fall: error of a model's forecast in standard deviations, over the models, of the forecast
            falls from the last loss.
        no_signal: prior probability that the models of a table do not differ.
        surprise: weight in P(best) of the uniform distribution over the candidates.
        dof: degrees of freedom of the prediction intervals.
        survival: smallest probability of being better than the first model for which a model is
            worth a further run.
        confidence: smallest P(best) of the first model for which no further run is advised.
    """

    spike: float = 3.0
    fade: float = 0.8
    fade_spread: float = 0.5
    evidence: float = 2.0
    backtests: int = 6
    draw: float = 0.5
    width: float = 1.0
    fall: float = 0.7
    no_signal: float = 0.2
    surprise: float = 0.05
    dof: float = 4.0
    survival: float = 0.15
    confidence: float = 0.9


CONSTANTS = Constants()
