"""What is kept of one finished fine-tuning: its losses, cost and time, and its kernel if asked."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..ntk import Spectrum
from .scores import LOSS, to_forecast

Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Seconds:
    """Wall-clock time of the parts of a run."""

    training: float
    judging: float
    probe: float

    @property
    def total(self) -> float:
        """All three."""
        return self.training + self.judging + self.probe


@dataclass(frozen=True)
class RunRecord:
    """One model fine-tuned on one subset.

    Losses are None where `error` says why the run has none; the kernel's figures also where no
    kernel was asked for.  Records of equal runs are equal: the wall-clock time takes no part in
    the comparison.

    Attributes:
        run: its name, unique to all it depends on; the stem of its files.
        model: the candidate, as it was given (path or hub id).
        parameters: N, all of the model with its head.
        size: training examples D; 0 is the model before fine-tuning, its head drawn from `seed`.
        epochs: passes over the subset.
        steps: optimiser steps.
        seed: of head, order and dropout.
        learning_rate: η, the highest rate of the schedule.
        time: t = Σ_s η_s / η over the steps s, with η_s the step's learning rate: steps at the full
            rate, so that η t = Σ_s η_s.  0 at size 0.
        tokens: of one epoch, without padding.
        dev_loss: mean negative log-likelihood (nats) of the dev rows' labels; in a regression
            their mean squared error.
        dev_score: the task's metric on the dev rows.
        metric: its name.
        scores: the other scores of the dev rows by name (`scores.SCORES`).
        kernel_loss: F(Θ, t) = ‖exp(−η Θ t) r‖² (Eq. 9), Θ of the model as this run left it.
        residual_square: ‖r‖², r = f0(X) − y on the probe before fine-tuning.
        probe_square: ‖f(X) − y‖² after it: what Eq. 9 predicts, measured.
        training_flops: of `cost.training_flops`.
        probe_flops: of Θ: forward, one backward pass an output, and the contraction.
        judging_flops: 2 N × tokens of the rows judged.
        dev_rows: how many these were.
        features: scores of the model's frozen features by name (`transferability.SCORES`), at size
            0 where they were asked for.
        features_flops: 2 N × tokens of their rows.
        kernel: name of the file of Θ, in the folder of kernels.
        seconds: wall-clock time; None where the run failed.
        error: why there are no losses.
        lost: whether the run failed for a reason that may pass (memory, a worker that was killed):
            the same command then makes it again.
    """

    run: str
    model: str
    parameters: int
    size: int
    epochs: float
    steps: int
    seed: int
    learning_rate: float
    time: float
    tokens: int
    metric: str
    dev_loss: float | None = None
    dev_score: float | None = None
    scores: Mapping[str, float] | None = None
    kernel_loss: float | None = None
    residual_square: float | None = None
    probe_square: float | None = None
    training_flops: float = 0.0
    probe_flops: float = 0.0
    judging_flops: float = 0.0
    dev_rows: int = 0
    features: Mapping[str, float] | None = None
    features_flops: float = 0.0
    kernel: str | None = None
    seconds: Seconds | None = field(default=None, compare=False)
    error: str | None = None
    lost: bool = False

    @property
    def flops(self) -> float:
        """What the run cost, all of it."""
        return self.training_flops + self.probe_flops + self.judging_flops + self.features_flops

    def to_rank_by(self, name: str) -> float:
        """What is extrapolated of the score a selection ranks by, see `scores.to_forecast`.

        Raises:
            ValueError: the run has no such score.
        """
        if name == LOSS:
            assert self.dev_loss is not None, "runs that failed are on no curve"
            return self.dev_loss
        if self.scores is None or name not in self.scores:
            raise ValueError(f"the run {self.run} has no score {name!r}")
        return to_forecast(name, self.scores[name], self.dev_rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> RunRecord:
        """Back from `to_dict`.

        Raises:
            TypeError: fields missing or unknown.
        """
        seconds = content.get("seconds")
        return cls(**{**content, "seconds": None if seconds is None else Seconds(**seconds)})


def merged(runs: Sequence[RunRecord], rank_by: str) -> RunRecord:
    """The runs of one model and size as one: the best learning rate, means over its seeds.

    The cost is that of all of them.  Kernel and times are those of the rate's first run.

    Args:
        runs: finished, at least one.
        rank_by: the score by which a rate is the best.
    """
    by_rate: dict[float, list[RunRecord]] = {}
    for run in runs:
        by_rate.setdefault(run.learning_rate, []).append(run)

    def height(group: Sequence[RunRecord]) -> float:
        return float(np.mean([run.to_rank_by(rank_by) for run in group]))

    best = min(by_rate.values(), key=height)
    names = best[0].scores or {}
    summed = ("training_flops", "probe_flops", "judging_flops", "features_flops")
    seconds = [astuple(run.seconds) for run in runs if run.seconds is not None]
    marks = [run.dev_score for run in best if run.dev_score is not None]
    return replace(
        best[0],
        dev_loss=float(np.mean([run.dev_loss for run in best])),
        dev_score=float(np.mean(marks)) if marks else None,
        scores={name: float(np.mean([(run.scores or {})[name] for run in best])) for name in names},
        seconds=Seconds(*map(sum, zip(*seconds, strict=True))) if seconds else None,
        **{name: sum(getattr(run, name) for run in runs) for name in summed},
    )


@dataclass(frozen=True)
class Kernel:
    """The probe as a run left it: n examples, C outputs.

    Attributes:
        theta: Θ, [n, C, n, C], as `jx.ntk` gives it; float32.
        residual: r = f0(X) − y, logits before fine-tuning minus one-hot labels, [n, C]; float64.
        eigenvalues: of Θ, ascending, [n·C]; float64.
        labels: [n].
    """

    theta: Floats
    residual: Floats
    eigenvalues: Floats
    labels: Floats

    def spectrum(self) -> Spectrum:
        """Θ decomposed; eigenvalues below 0 by single precision's round-off are set to 0.

        Raises:
            ValueError: Θ is not symmetric or clearly indefinite.
        """
        with warnings.catch_warnings():
            # In single precision a kernel of low rank always has such eigenvalues.
            warnings.filterwarnings("ignore", "jachess_ext.ntk: .* round-off", RuntimeWarning)
            return Spectrum.of(torch.from_numpy(self.theta))

    def to_bytes(self) -> bytes:
        """As an npz file."""
        file = io.BytesIO()
        np.savez(file, **vars(self))
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Kernel:
        """Back from `to_bytes`.

        Raises:
            ValueError: it is no whole npz file of a kernel.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                found = cls(**{name: arrays[name] for name in arrays.files})
        except Exception as error:  # zipfile, numpy and the constructor raise many kinds
            raise ValueError(f"no whole kernel file ({type(error).__name__})") from error
        n, c = found.residual.shape
        if found.theta.shape != (n, c, n, c) or found.eigenvalues.shape != (n * c,):
            raise ValueError(
                f"a kernel of shape {list(found.theta.shape)} for residuals [{n}, {c}]"
            )
        return found
