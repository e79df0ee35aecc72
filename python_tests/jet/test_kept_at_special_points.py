"""Functions that torch's own forward mode carries, where it is easily wrong: zeros, equal singular
values, rank one, tangents outside a triangle, shapes with two readings.

The oracle is central differences in float64 of the plain function; where two step sizes disagree it
has no derivative there, and is left out.  A refusal is right, a NaN is not.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from jachess_ext import torch_private
from jachess_ext.jet import MissingJetRule
from jachess_ext.jet.rules.forward_mode_kept import FORWARD_ONLY, FORWARD_REVERSE

EYE, ONES = torch.eye(3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64)
SMOOTH = torch.tensor([[2.0, 0.3, -0.4], [0.1, 1.0, 0.7], [-0.6, 0.2, 3.0]], dtype=torch.float64)
POINTS: dict[str, Tensor] = {
    "zeros": 0 * ONES,
    "identity": EYE,
    "rank one": torch.tensor([1.0, -2.0, 0.5]).double().outer(torch.ones(3).double()),
    "two equal": torch.diag(torch.tensor([2.0, 2.0, 1.0])).double(),
    "triangular": SMOOTH.tril(),
    "positive definite": SMOOTH @ SMOOTH.mT,
    "a row of zeros": SMOOTH * torch.tensor([[1.0], [0.0], [1.0]]).double(),
}
TANGENT = torch.tensor([[0.3, -1.1, 0.4], [0.9, 0.2, -0.5], [-0.7, 0.6, 0.8]]).double()
OTHERS = {  # with rules of their own
    **{f"torch.{name}": torch_private.find(f"torch.{name}") for name in
       ("nn.functional.normalize", "prod", "sinc")},
    **{f"torch.linalg.cond, {p}": (lambda x, p=p: torch.linalg.cond(x, p)) for p in
       (None, 1, 2, -1, -2, math.inf, -math.inf, "fro", "nuc")},
    "torch.linalg.vander": torch.linalg.vander,
    "torch.linalg.svdvals, wide": lambda x: torch.linalg.svdvals(x[:2]),
    "torch.linalg.matrix_norm, nuc": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "torch.linalg.matrix_norm, 2": lambda x: torch.linalg.matrix_norm(x, 2),
    "torch.norm, nuc": lambda x: torch.norm(x, "nuc"),
}  # fmt: skip


_SYMMETRIC = [f"torch.linalg.{name}" for name in ("cholesky", "cholesky_ex", "eigh", "eigvalsh")]


def _of_one_matrix() -> dict[str, Callable[[Any], Any]]:
    names = {*FORWARD_REVERSE, *FORWARD_ONLY}
    names -= {name for name in names if name.replace(".Tensor", "") in names - {name}}  # methods
    found = {name: f for name in sorted(names) if (f := torch_private.find(name)) is not None}
    for name in _SYMMETRIC:  # which read one triangle, and mean both
        found[name] = lambda x, f=found[name]: f(x + x.mT)
    return {name: f for name, f in (found | OTHERS).items() if _takes_a_matrix(f)}


def _takes_a_matrix(function: Callable[[Any], Any]) -> bool:
    """Whether it has real values at one of the points at least."""
    for point in POINTS.values():
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            return bool(_values(function, point).numel())
    return False


def _values(function: Callable[[Any], Any], x: Any) -> Tensor:
    """Every real entry of what a function returns, in a row."""
    result = function(x)
    parts = result if isinstance(result, list | tuple) else [result]
    flat = [p.reshape(-1) for p in parts if isinstance(p, Tensor) and p.is_floating_point()]
    return torch.cat(flat)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    FUNCTIONS = _of_one_matrix()


def _differences(function: Callable[[Any], Any], x: Tensor, t: Tensor, h: float) -> list[Tensor]:
    up, at, down = (_values(function, x + s * h * t) for s in (1, 0, -1))
    return [(up - down) / (2 * h), (up - 2 * at + down) / h**2]


def _smooth(coarse: Tensor, fine: Tensor, tolerance: float) -> bool:
    size = float(coarse.abs().max().clamp_min(1.0))
    return bool(((coarse - fine).abs() < tolerance * size).all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kept_functions_of_a_matrix(name: str) -> None:
    """Derivatives, and the gradient of the value, also where that of a tangent would be NaN."""
    for point in POINTS:
        _check_derivatives(name, point)
        _check_gradient(name, point)


def _check_derivatives(name: str, point: str) -> None:
    """Compare a jet with differences, where the function takes this matrix and has derivatives."""
    function, x, t = FUNCTIONS[name], POINTS[point], TANGENT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first, second = _differences(function, x, t, 1e-4)
            finer, finer_second = _differences(function, x, t, 5e-5)
        except (RuntimeError, TypeError, ValueError):
            return
        if "median" in name and len(x.unique()) < x.numel():
            return  # which of equal entries moves is torch's choice
        kinks = not second.numel() or float(finer_second.abs().max()) * 5e-5 > 1e-2
        if kinks or not (first.isfinite().all() and _smooth(first, finer, 1e-5)):
            return
        try:
            with torch.no_grad():
                jet = jx.jet(lambda x: _values(function, x), x, torch.stack([t, t]))
        except MissingJetRule:
            return
        _close(jet.first[0], first, point, 1e-5)
        if second.isfinite().all() and _smooth(second, finer_second, 1e-4):
            _close(jet.second[0], second, point, 1e-3)


def _close(found: Tensor, expected: Tensor, point: str, tolerance: float | None = None) -> None:
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{point}: {text}"
    )


def _check_gradient(name: str, point: str) -> None:
    """Compare the gradient of the value with plain torch's."""
    function = FUNCTIONS[name]
    x = POINTS[point].clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = _values(function, x)
            (expected,) = torch.autograd.grad(plain.sum(), x)
        except (RuntimeError, TypeError, ValueError):
            return  # not a function of one matrix, or of this one, or not differentiable
        if not (expected.isfinite().all() and plain.isfinite().all()):
            return
        if "norm" in name and not x.any():
            return  # all gradients are NaN where a norm leaves 0 (`euclidean_norm`)
        try:
            value, _ = jx.jvp(lambda x: _values(function, x), (x,), (TANGENT,))
            (found,) = torch.autograd.grad(value.sum(), x)
        except MissingJetRule:
            return
        _close(found, expected, point)


def _lower(matrix: Any) -> Any:
    return torch.linalg.cholesky(matrix @ matrix.mT + EYE)


FACTORS = torch.stack([SMOOTH.tril(), SMOOTH.tril() * 1.3, SMOOTH.tril() * 0.7])
SYSTEMS: dict[str, tuple[Callable[..., Any], Tensor, Tensor]] = {
    "cholesky_solve": (lambda a, b: torch.cholesky_solve(b, a), SMOOTH.tril(), SMOOTH[:, :2]),
    "cholesky_solve, upper": (
        lambda a, b: torch.cholesky_solve(b, a, upper=True), SMOOTH.triu(), SMOOTH[:, :2]
    ),
    "triangular_solve": (
        lambda a, b: torch.triangular_solve(b, a, upper=False)[0], SMOOTH.tril(), SMOOTH
    ),
    "triangular_solve, transposed": (
        lambda a, b: torch.triangular_solve(b, a, transpose=True, unitriangular=True)[0],
        SMOOTH, SMOOTH,
    ),
    "solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), SMOOTH.tril(), SMOOTH
    ),
    "lu_solve": (
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b), SMOOTH, SMOOTH
    ),
    # n right-hand sides beside n factors: B might be a batch of vectors
    "cholesky_solve, batch": (lambda a, b: torch.cholesky_solve(b, a), FACTORS, SMOOTH),
    "solve_triangular, batch": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), FACTORS, SMOOTH
    ),
    "lu_solve, batch": (
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b), FACTORS, SMOOTH
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems_with_any_tangent(name: str) -> None:
    """Tangents of a factor have entries outside its triangle, which the function does not read."""
    function, a, b = SYSTEMS[name]

    def of_both(x: Any) -> Any:
        return function(x[..., :3], x[..., 3:] if b.ndim == a.ndim else x[0, :, 3 : 3 + b.shape[1]])

    x = torch.cat([a, b.expand(*a.shape[:-1], b.shape[-1])], -1)
    t = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x).sin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = _differences(of_both, x, t, 1e-4)
        jet = jx.jet(lambda x: _values(of_both, x), x, torch.stack([t, t]))
    torch.testing.assert_close(jet.first[0], first, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(jet.second[0], second, rtol=1e-4, atol=1e-4)
