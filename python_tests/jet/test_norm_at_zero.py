"""Smooth functions of a norm where it is 0: right or NaN, as torch's double backward, never finite
and wrong."""

import math

import pytest
import torch
import torch.nn.functional as F

import jachess_ext as jx

ORIGIN, NEAR = torch.zeros(3, dtype=torch.float64), torch.tensor([0.01, -0.02, 0.01]).double()
POINTS = torch.stack([ORIGIN, NEAR, ORIGIN])
NORMS = {
    "norm": lambda x: x.norm(dim=-1),
    "norm fro": lambda x: torch.norm(x.unsqueeze(1), "fro", dim=(1, 2)),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=-1),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x.unsqueeze(1)),
    "hypot": lambda x: torch.hypot(x[:, 0], torch.hypot(x[:, 1], x[:, 2])),
    "cdist": lambda x: torch.cdist(x.unsqueeze(1), ORIGIN.expand(1, 1, 3)).flatten(),
    "dist": lambda x: torch.stack([torch.dist(row, ORIGIN) for row in x.unbind()]),
    "pairwise_distance": lambda x: F.pairwise_distance(x, torch.zeros_like(x), eps=0.0),
    "complex abs": lambda x: torch.hypot(torch.complex(x[:, 0], x[:, 1]).abs(), x[:, 2]),
    "root of sum": lambda x: x.square().sum(-1).sqrt(),
    "power of mean": lambda x: (3 * x.square().mean(-1)) ** 0.5,
    "std": lambda x: 2**0.5 * torch.cat([x, -x], -1).std(-1, correction=2),
}
# Of the norm, and the same of its square, to the order that counts at POINTS.
EVEN = {
    "exp(−r²)": (lambda r: torch.exp(-(r**2)), lambda s: torch.exp(-s)),
    "r²": (lambda r: r**2, lambda s: s),
    "r·r": (lambda r: r * r, lambda s: s),
    "square": (lambda r: r.square(), lambda s: s),
    "r⁴": (lambda r: r**4, lambda s: s * s),
    "log(1 + r²)": (lambda r: torch.log1p(r * r), torch.log1p),
    "1/(1 + r²)": (lambda r: 1 / (1 + r**2), lambda s: 1 / (1 + s)),
    "cos": (torch.cos, lambda s: 1 - s / 2 + s**2 / 24 - s**3 / 720),
    "cosh": (torch.cosh, lambda s: 1 + s / 2 + s**2 / 24 + s**3 / 720),
    "sinc": (
        lambda r: torch.sinc(r / math.pi),
        lambda s: 1 - s / 6 + s**2 / 120 - s**3 / 5040,
    ),
}
DIRECTIONS = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0)).double()


def _jet(second):
    def call(f, x):
        return jx.jet(f, x, DIRECTIONS, second=second).second

    return call


CALLS = {
    "laplacian": lambda f, x: jx.laplacian(f, x)[2].reshape(1, 3),
    "hessian_diagonal": lambda f, x: jx.hessian_diagonal(f, x)[2],
    "hvp": lambda f, x: _tensor(jx.hvp(lambda z: f(z).sum(), (x,), (DIRECTIONS[0],))).T,
    "pairs": _jet("pairs"),
    "squares": _jet("squares"),
    "sum": _jet("sum"),
}


def _tensor(result):
    while not isinstance(result, torch.Tensor):
        result = result[-1]
    return result


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("norm", NORMS)
def test_even_functions_of_a_norm_are_right_or_nan_at_zero(norm, call):
    for name, (of_norm, of_square) in EVEN.items():
        result = CALLS[call](lambda x, f=of_norm: f(NORMS[norm](x)), POINTS)
        right = CALLS[call](lambda x, f=of_square: f(x.square().sum(-1)), POINTS)
        assert result.shape == right.shape
        close = torch.isclose(result, right, rtol=1e-6, atol=1e-6)
        assert (close | result.isnan())[..., [0, 2]].all(), name
        assert close[..., 1].all(), f"{name}: away from 0"


@pytest.mark.parametrize("norm", NORMS)
def test_what_does_not_move_stays_zero_at_a_norms_zero(norm):
    if norm in ("root of sum", "power of mean"):
        pytest.skip("torch's root has no slope at 0")
    still = DIRECTIONS.clone()
    still[:, 0] = 0
    points = POINTS.clone().requires_grad_()
    jet = jx.jet(NORMS[norm], points, still, second="squares")
    assert (jet.first[:, 0] == 0).all() and (jet.second[:, 0] == 0).all()
    assert jet.second[:, 2].isnan().all() and (jet.first[:, 2] == 0).all()
    tangent = jx.jvp(NORMS[norm], (points,), (still[0],))[1]
    gradient = torch.autograd.grad(tangent.sum(), points)[0]
    assert gradient[1].isfinite().all() and gradient[2].isnan().any()
    if norm not in ("hypot", "complex abs"):  # torch's gradient of hypot(0, 0) itself is NaN
        assert (gradient[0] == 0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_squares_has_no_second_order_at_zero(norm):
    result = jx.laplacian(lambda x: NORMS[norm](x * x), POINTS)[2]
    assert result[[0, 2]].isnan().all() and result[1].isfinite()
