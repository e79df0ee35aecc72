"""Drift and alignment of kernels against their definitions written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from jachess_ext.ntk import kernel_drift, label_alignment


def _kernel(samples: int, outputs: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(samples * outputs, 9, dtype=torch.float64, generator=generator)
    return (features @ features.T).view(samples, outputs, samples, outputs)


def test_drift() -> None:
    start, theta = _kernel(4, 2, 0), _kernel(4, 2, 1)
    x, y = start.numpy().ravel(), theta.numpy().ravel()
    expected = math.sqrt(((y - x) ** 2).sum() / (x**2).sum())
    assert kernel_drift(theta, start) == pytest.approx(expected, rel=1e-12)
    assert kernel_drift(start, start) == 0
    assert kernel_drift(3 * start, start) == pytest.approx(2, rel=1e-12)


def _by_definition(theta: np.ndarray, targets: np.ndarray) -> float:
    """Alignment as a correlation: centred features' cosine, written with loops over pairs."""
    n = len(targets)
    kernel = sum(theta[:, c, :, c] for c in range(theta.shape[1]))
    h = np.eye(n) - np.ones((n, n)) / n
    a, b = h @ kernel @ h, h @ (targets @ targets.T) @ h
    dot = sum(a[i, j] * b[i, j] for i in range(n) for j in range(n))
    return dot / math.sqrt(np.trace(a @ a.T) * np.trace(b @ b.T))


@pytest.mark.parametrize("outputs", [1, 3])
def test_alignment(outputs: int) -> None:
    theta, labels = _kernel(6, outputs, 2), torch.tensor([0, 2, 2, 5, 0, 5])
    one_hot = np.eye(6)[labels.numpy()]
    found = label_alignment(theta, labels)
    assert found == pytest.approx(_by_definition(theta.numpy(), one_hot), rel=1e-12)
    numbers = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = label_alignment(theta, numbers)
    assert found == pytest.approx(
        _by_definition(theta.numpy(), numbers.numpy()[:, None]), rel=1e-12
    )


def test_alignment_of_the_labels_own_kernel_is_one() -> None:
    labels = torch.tensor([0, 1, 1, 2, 0])
    own = (labels[:, None] == labels[None]).double()[:, None, :, None]
    assert label_alignment(7 * own + 3, labels) == pytest.approx(1, rel=1e-12)
    assert math.isnan(label_alignment(own, torch.zeros(5).long()))


def test_what_does_not_fit() -> None:
    theta = _kernel(4, 2, 0)
    with pytest.raises(ValueError, match=r"shape \[4, 2, 4, 2\], but .*\[3, 2, 3, 2\]"):
        kernel_drift(theta, _kernel(3, 2, 0))
    with pytest.raises(ValueError, match="zero or NaN"):
        kernel_drift(theta, torch.zeros_like(theta))
    with pytest.raises(ValueError, match="one label for each of 4"):
        label_alignment(theta, torch.zeros(3).long())
    with pytest.raises(ValueError, match="one label for each of 4"):
        label_alignment(theta, torch.zeros(4, 7, 2).long())
    with pytest.raises(ValueError, match=r"\[8, 8\]; expected \[N, C, N, C\]"):
        label_alignment(theta.view(8, 8), torch.zeros(8).long())
