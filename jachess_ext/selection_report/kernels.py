"""Norm, effective rank and drift of the kernels that runs left."""

from __future__ import annotations

import numpy as np
import torch

from ..live_selection.predict import Curve
from ..ntk import kernel_drift
from .study import KernelPoint


def kernels_of(curve: Curve) -> list[KernelPoint]:
    """One point a run of the model whose Θ was measured, sizes ascending."""
    start = curve.kernels[0] if curve.has_zero else None
    points = []
    for record, kernel in zip(curve.records, curve.kernels, strict=True):
        if kernel is None:
            continue
        values = np.maximum(kernel.eigenvalues, 0.0)  # round-off below zero
        square = float((values**2).sum())
        drift = None
        if start is not None and np.any(start.theta):
            drift = kernel_drift(torch.from_numpy(kernel.theta), torch.from_numpy(start.theta))
        points.append(
            KernelPoint(
                size=float(record.size),
                norm=float(np.sqrt(square)),
                rank=float(values.sum() ** 2 / square) if square > 0 else 0.0,
                drift=drift,
                predicted=_share(record.kernel_loss, record.residual_square),
                measured=_share(record.probe_square, record.residual_square),
            )
        )
    return points


def _share(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else value / whole
