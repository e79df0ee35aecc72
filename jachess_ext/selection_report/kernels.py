"""Norm, effective rank and drift of the kernels that runs left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..ntk import kernel_drift
from .study import KernelPoint


def kernels_of(
    records: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]
) -> list[KernelPoint]:
    """One point a run of a model whose Θ was measured, sizes ascending."""
    both = sorted(zip(records, kernels, strict=True), key=lambda pair: pair[0]["size"])
    start = both[0][1] if both[0][0]["size"] == 0 else None
    points = []
    for record, kernel in both:
        values = np.maximum(kernel["eigenvalues"], 0.0)  # round-off below zero
        square = float((values**2).sum())
        drift = None
        if start is not None and np.any(start["theta"]):
            drift = kernel_drift(
                torch.from_numpy(kernel["theta"]), torch.from_numpy(start["theta"])
            )
        residual = record["residual_square"]
        points.append(
            KernelPoint(
                size=float(record["size"]),
                norm=square**0.5,
                rank=float(values.sum() ** 2 / square) if square else 0.0,
                drift=drift,
                predicted=_share(record["kernel_loss"], residual),
                measured=_share(record["probe_square"], residual),
            )
        )
    return points


def _share(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else value / whole
