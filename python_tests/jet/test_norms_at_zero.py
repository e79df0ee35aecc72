"""Smooth functions of a norm where it is 0: right, or NaN, and never a finite wrong number."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import jachess_ext as jx

Function = Callable[[Tensor], Tensor]

# A norm of each row [N, 3] -> [N], as it can be written.
NORMS: dict[str, Function] = {
    "norm": lambda z: z.norm(dim=-1),
    "torch.norm": lambda z: torch.norm(z, "fro", -1),
    "vector_norm": lambda z: torch.linalg.vector_norm(z, dim=-1),
    "matrix_norm": lambda z: torch.linalg.matrix_norm(z.unsqueeze(-2)),
    "hypot": lambda z: torch.hypot(torch.hypot(z[:, 0], z[:, 1]), z[:, 2]),
    "cdist": lambda z: torch.cdist(z.unsqueeze(1), z.new_zeros(1, 1, 3)).flatten(),
    "dist": lambda z: torch.stack([torch.dist(row, torch.zeros_like(row)) for row in z]),
    "pairwise_distance": lambda z: torch.nn.functional.pairwise_distance(z, z.new_zeros(3), eps=0),
    "root of squares": lambda z: z.square().sum(-1).sqrt(),
    "power of squares": lambda z: z.square().sum(-1) ** 0.5,
    "modulus": lambda z: torch.hypot(torch.complex(z[:, 0], z[:, 1]).abs(), z[:, 2]),
    "std": lambda z: torch.cat([z, -z], -1).std(-1) * (5 / 2) ** 0.5,
    "root of var": lambda z: (torch.cat([z, -z], -1).var(-1) * 5 / 2).sqrt(),
}
# An even function of r, and the same as a smooth function of s = r².
EVEN: dict[str, tuple[Function, Function]] = {
    "square": (lambda r: r**2, lambda s: s),
    "gauss": (lambda r: torch.exp(-(r**2)), lambda s: torch.exp(-s)),
    "log": (lambda r: torch.log1p(r.square()), lambda s: torch.log1p(s)),
    "cosine": (lambda r: r.cos(), lambda s: 1 - s / 2 + s**2 / 24),
    "kink": (lambda r: (r - 1).square() + 2 * r, lambda s: 1 + s),
}
FORMS: dict[str, Callable[[Function, Tensor], list[Tensor]]] = {
    "laplacian": lambda f, x: [jx.laplacian(f, x).laplacian],
    "chunks": lambda f, x: [jx.laplacian(f, x, chunk_size=1).laplacian],
    "diagonal": lambda f, x: [jx.hessian_diagonal(f, x).diagonal],
    "hvp": lambda f, x: [
        jx.hvp(lambda z: f(z).sum(), (x,), (torch.eye(3)[i].expand_as(x),)).product[0]
        for i in range(3)
    ],
    "pairs": lambda f, x: [jx.jet(f, x, torch.eye(3).unsqueeze(1).expand(-1, *x.shape)).second],
}


X = ((0.0, 0.0, 0.0), (0.02, -0.01, 0.03), (0.0, 0.02, 0.0))


@cache
def hessians(even: str) -> Tensor:
    """Return the second derivatives ``[3, 3, 3]`` of a smooth function of the square, by torch."""
    f = lambda row: EVEN[even][1](row.square().sum())  # noqa: E731
    return torch.func.vmap(torch.func.hessian(f))(torch.tensor(X))


def right(even: str, form: str) -> list[Tensor]:
    hessian = hessians(even)
    diagonal = hessian.diagonal(0, 1, 2)
    if form in ("laplacian", "chunks"):
        return [diagonal.sum(-1)]
    if form == "diagonal":
        return [diagonal.T]
    if form == "hvp":
        return list(hessian.unbind(-1))
    return [torch.stack([hessian[:, 0, 1], hessian[:, 0, 2], hessian[:, 1, 2]])]


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("even", EVEN)
@pytest.mark.parametrize("name", NORMS)
def test_right_or_nan(name: str, even: str) -> None:
    for form in FORMS if even in ("square", "gauss", "kink") else ("laplacian",):
        _check_form(name, even, form)


def _check_form(name: str, even: str, form: str) -> None:
    results = FORMS[form](lambda z: EVEN[even][0](NORMS[name](z)), torch.tensor(X))
    for result, truth in zip(results, right(even, form), strict=True):
        # The second axis is the rows' of diagonals and pairs, else the first; only row 0 is at 0.
        rows = 1 if form in ("diagonal", "pairs") else 0
        at_zero, elsewhere = (part.movedim(rows, 0) for part in (result, truth))
        assert bool((at_zero[0].isnan() | torch.isclose(at_zero[0], elsewhere[0])).all())
        torch.testing.assert_close(at_zero[1:2], elsewhere[1:2], rtol=1e-6, atol=1e-6)
        if name != "hypot" and name != "modulus":  # a norm of two of the three is at 0 in row 2
            torch.testing.assert_close(at_zero[2:], elsewhere[2:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_the_first_order_is_torchs_and_nothing_moves_without_a_tangent(name: str) -> None:
    x = torch.zeros(1, 3)
    value, first, second = jx.laplacian(
        lambda z: NORMS[name](z * z.new_tensor([1.0, 1.0, 1.0])), x, directions=torch.zeros(2, 3)
    )
    assert value.item() == 0
    if "root" not in name and "power" not in name:  # whose own slope at 0 is infinite
        assert first.abs().max() == 0 and second.item() == 0
        tangent = jx.jvp(NORMS[name], (x,), (torch.ones(1, 3),))[1]
        assert tangent.item() == 0


@pytest.mark.parametrize("eps", [1e-12, 0.5])
def test_a_norm_with_a_floor_has_no_kink(eps: float) -> None:
    """x / max(‖x‖, ε) is x / ε around 0."""
    x = torch.zeros(2, 3)
    f = lambda z: (torch.nn.functional.normalize(z, dim=-1, eps=eps) * eps).pow(2).sum(-1)  # noqa: E731
    torch.testing.assert_close(jx.laplacian(f, x).laplacian, torch.full((2,), 6.0))
    product = jx.hvp(lambda z: f(z).sum(), (x,), (torch.ones(2, 3),)).product[0]
    torch.testing.assert_close(product, torch.full((2, 3), 2.0))


def test_compiled_and_transformed() -> None:
    class Square(torch.nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z.norm(dim=-1) ** 2

    x = torch.tensor([[0.0, 0.0], [0.3, 0.4]])
    compiled = torch.compile(lambda z: jx.laplacian(Square(), z), backend="aot_eager")
    for result in (
        compiled(x)[2],
        torch.func.vmap(lambda z: jx.laplacian(Square(), z)[2])(x[None])[0],
    ):
        assert result[0].isnan() and torch.isclose(result[1], torch.tensor(4.0))


ROOTS = ("root of squares", "power of squares", "root of var")  # torch's root has no slope at 0


@pytest.mark.parametrize("name", [name for name in NORMS if name not in ROOTS])
def test_what_does_not_move_keeps_its_zeros(name: str) -> None:
    """Row 0 is at 0 and does not move, row 2 is at 0 and does."""
    x = torch.tensor([[0.0, 0.0, 0.0], [0.01, -0.02, 0.01], [0.0, 0.0, 0.0]]).requires_grad_()
    steps = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0))
    steps[:, 0] = 0
    jet = jx.jet(NORMS[name], x, steps, second="squares")
    assert not jet.first[:, 0].any() and not jet.second[:, 0].any()
    assert not jet.first[:, 2].any() and jet.second[:, 2].isnan().all()
    tangent = jx.jvp(NORMS[name], (x,), (steps[0],))[1]
    gradient = torch.autograd.grad(tangent.sum(), x)[0]
    assert gradient[1].isfinite().all() and gradient[2].isnan().any()
    if name not in ("hypot", "modulus"):  # torch's own gradient of hypot(0, 0) is NaN
        assert not gradient[0].any()


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_squares_has_no_second_order_at_zero(name: str) -> None:
    """Where the second order alone moves."""
    x = torch.tensor([[0.0, 0.0, 0.0], [0.1, -0.2, 0.1]])
    result = jx.laplacian(lambda z: NORMS[name](z * z), x).laplacian
    assert result[0].isnan() and result[1].isfinite()


@pytest.mark.parametrize("order", [1.5, 3, 4])
@pytest.mark.parametrize("norm", [torch.norm, torch.linalg.vector_norm])
def test_norms_of_other_orders(norm: Function, order: float) -> None:
    """The square of the p-norm is no smooth function at 0 for p ≠ 2, and is not 0 there."""
    x = torch.tensor([[0.0, 0.0], [0.1, 0.2]])
    result = jx.laplacian(lambda z: norm(z, order, -1) ** 2, x).laplacian
    inner = lambda z: z.abs().pow(order).sum(-1) ** (2 / order)  # noqa: E731
    assert result[0].isnan()
    torch.testing.assert_close(result[1:], jx.laplacian(inner, x[1:]).laplacian)
