"""How a kernel moves during training, and how well it fits the labels.

    drift      ‖Θ_t − Θ_0‖ / ‖Θ_0‖                                       (Frobenius norms)
    alignment  ⟨K_c, L_c⟩ / (‖K_c‖ ‖L_c‖),  K[n, m] = Σ_c Θ[n, c, m, c],  L = Y Yᵀ,  X_c = H X H

with H = I − 1 1ᵀ/N: centred kernel alignment (Cortes, Mohri & Rostamizadeh 2012).  It is 1 where
the kernel is the labels' own, and 0 where it is unrelated to them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kernel_drift(theta: Tensor, start: Tensor) -> float:
    """‖Θ − Θ_0‖ / ‖Θ_0‖.

    Args:
        theta, start: two kernels of one shape, floating point.

    Raises:
        ValueError: shapes differ; Θ_0 is zero.
    """
    if theta.shape != start.shape:
        raise ValueError(
            f"theta has shape {list(theta.shape)}, but the kernel it is compared with "
            f"{list(start.shape)}; expected the same samples and outputs"
        )
    before = start.double()
    norm = float(before.norm())
    if not norm > 0:
        raise ValueError("the kernel to compare with is zero or NaN, so that drift has no scale")
    return float((theta.to(before) - before).norm()) / norm


def label_alignment(theta: Tensor, labels: Tensor) -> float:
    """Centred alignment of a kernel with labels; NaN where all labels are equal.

    Args:
        theta: [N, C, N, C].
        labels: [N] class numbers (integers) or targets (floating point), or targets [N, D].

    Raises:
        ValueError: shapes that do not fit.
    """
    if theta.dim() != 4 or theta.shape[:2] != theta.shape[2:]:
        raise ValueError(f"theta has shape {list(theta.shape)}; expected [N, C, N, C]")
    targets = _targets(labels)
    if targets.dim() != 2 or targets.shape[0] != theta.shape[0]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}; expected one label for each of "
            f"{theta.shape[0]} samples"
        )
    kernel = _centred(torch.einsum("ncmc->nm", theta.double()))
    targets = targets.to(kernel)
    own = _centred(targets @ targets.T)
    size = float(kernel.norm() * own.norm())
    return float((kernel * own).sum()) / size if size > 0 else float("nan")


def has_one_label_each(labels: Tensor) -> bool:
    """Whether `label_alignment` takes these labels: one of a sample, not one of each token."""
    return labels.dim() == 1 or (labels.dim() == 2 and labels.is_floating_point())


def _targets(labels: Tensor) -> Tensor:
    """[N, D]: one-hot for class numbers."""
    if labels.is_floating_point():
        return labels[:, None] if labels.dim() == 1 else labels
    if labels.dim() != 1:
        return labels
    return (labels[:, None] == torch.unique(labels)[None]).double()


def _centred(kernel: Tensor) -> Tensor:
    kernel = kernel - kernel.mean(0, keepdim=True)
    return kernel - kernel.mean(1, keepdim=True)
