"""Determinants and linear systems where they are singular; elsewhere they are in the rule table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx


def _determinant(x: Tensor) -> Any:
    """Laplace's expansion, a polynomial, which double backward knows at every matrix."""
    if len(x) == 1:
        return x[0, 0]
    minors = [torch.cat([x[1:, :j], x[1:, j + 1 :]], 1) for j in range(len(x))]
    return sum((-1) ** j * x[0, j] * _determinant(minor) for j, minor in enumerate(minors))


def _grad(value: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(value, x, create_graph=True)[0]


@pytest.mark.parametrize("least", [0.0, 1e-13, 1e-3, 1.0])
def test_a_determinant_at_singular_matrices(least: float) -> None:
    """Of rank n − 1, almost so, and regular: J u, D²f[u, w] and the gradient of the latter."""
    torch.manual_seed(0)
    left, right, u, w = torch.randn(4, 4, 4, dtype=torch.float64)
    sizes = torch.tensor([2.0, 1.0, 0.5, least], dtype=torch.float64)
    x = (torch.linalg.qr(left)[0] * sizes @ torch.linalg.qr(right)[0]).requires_grad_()
    jet = jx.jet(torch.det, x, torch.stack([u, w]))
    slope = _grad(_determinant(x), x)
    curvature = _grad((slope * u).sum(), x)
    expected = (_determinant(x), (slope * u).sum(), (slope * w).sum(), (curvature * w).sum())
    torch.testing.assert_close(jet.streams, torch.stack(expected), rtol=1e-12, atol=1e-13)
    gradients = [_grad(part, x) for part in (jet.second[0], (curvature * w).sum())]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "function, matrix, said",
    [
        (torch.det, torch.zeros(3, 3), "two singular values"),
        (torch.linalg.det, torch.diag(torch.tensor([1.0, 1e-9, 1e-9])), "two singular values"),
        (torch.logdet, SINGULAR, "singular"),
        (torch.slogdet, SINGULAR, "singular"),
        (lambda x: torch.linalg.solve_ex(x, x[0]), SINGULAR, "its info says"),
    ],
)
def test_refused(function: Callable, matrix: Tensor, said: str) -> None:
    with pytest.raises(jx.MissingJetRule, match=said):
        jx.jet(function, matrix.double(), torch.ones(2, *matrix.shape, dtype=torch.float64))


def test_a_logarithm_of_a_negative_determinant_is_nan_as_in_torch() -> None:
    x, u = -torch.eye(3, dtype=torch.float64), torch.ones(1, 3, 3, dtype=torch.float64)
    jet = jx.jet(torch.logdet, x, u)
    assert jet.primal.isnan() and jet.first == -3
