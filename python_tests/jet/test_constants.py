"""What a model makes with `zeros_like` of a jet is a constant until a jet is written into it: its
tangents are 0 also where a slope is infinite.  The oracle is torch.func.jvp, and 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jachess_ext as jx

MASK = torch.tensor([[True, False, False, True], [False, True, False, False]])

CONSTRUCTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "empty_like, filled": lambda z: torch.empty_like(z).fill_(0.0),
    "new_empty, zeroed": lambda z: z.new_empty(z.shape).zero_(),
    "a mask in place": lambda z: torch.zeros_like(z).masked_fill_(MASK, 1.0),
    "a view": lambda z: torch.zeros_like(z).view(-1).view(z.shape),
    "a sum": lambda z: torch.zeros_like(z) + torch.zeros(z.shape[-1], dtype=z.dtype),
    "cat": lambda z: torch.cat([torch.zeros_like(z)[:1], z.new_ones(1, z.shape[1])]),
    "an entry set": lambda z: torch.zeros_like(z).index_fill_(0, torch.tensor([1]), 1.0),
    "cast": lambda z: torch.zeros_like(z, dtype=torch.float32).to(z.dtype),
    "new_zeros": lambda z: z.new_zeros(z.shape),
    "full_like": lambda z: torch.full_like(z, 0.0),
    "new_full": lambda z: z.new_full(z.shape, 0.0),
}
INFINITE_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.log,
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
    "x ** 0.5": lambda x: x**0.5,
    "norm": lambda x: x.norm(dim=-1),
    "xlogy": lambda x: torch.xlogy(x, x),
    "sqrt_": lambda x: x.sqrt_(),
    "1 / x": lambda x: 1 / x,
    "std": lambda x: x.std(-1),
    "log_": lambda x: x.log_(),
}


def point() -> Tensor:
    return torch.linspace(0.5, 2.0, 8, dtype=torch.float64).view(2, 4)


# Whether a tensor is constant is the constructor's, what follows from it the slope's.
CASES = [
    *((constructor, slope) for constructor in CONSTRUCTORS for slope in ("log", "norm", "sqrt_")),
    *(("a view", slope) for slope in INFINITE_SLOPES if slope not in ("log", "norm", "sqrt_")),
]


@pytest.mark.parametrize("constructor, slope", CASES)
def test_a_constant_has_no_derivative(constructor: str, slope: str) -> None:
    def fn(z: Tensor) -> Tensor:
        return INFINITE_SLOPES[slope](CONSTRUCTORS[constructor](z))

    z = point()
    for differentiable in (True, False):
        value, tangent = jx.jvp(fn, (z,), (z.cos(),), differentiable=differentiable)
        torch.testing.assert_close(value, fn(z), rtol=0, atol=0)
        assert torch.equal(tangent, torch.zeros_like(value))
    for order in (1, 2):
        jet = jx.jet(fn, z, torch.stack([z.cos(), z.sin()]), order)
        assert torch.equal(jet.streams[1:], torch.zeros_like(jet.streams[1:]))


def _setitem(z: Tensor) -> Tensor:
    made = torch.zeros_like(z)
    made[:, :2] = z[:, :2]
    return made


def _through_a_view(z: Tensor) -> Tensor:
    made = torch.zeros_like(z)
    made.view(-1)[:3] = z.reshape(-1)[:3]
    return made


def _after_a_function(z: Tensor) -> Tensor:
    return (torch.zeros_like(z) + 1).mul_(z)


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "setitem": _setitem,
    "through a view": _through_a_view,
    "after a function": _after_a_function,
    "copy_": lambda z: torch.empty_like(z).copy_(z),
    "index_add_": lambda z: torch.zeros_like(z).index_add_(0, torch.tensor([1, 0]), z),
    "masked_fill_": lambda z: torch.zeros_like(z).masked_fill_(MASK, z.sum()),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_jet_that_is_written_into_it_is_seen(write: str) -> None:
    def fn(z: Tensor) -> Tensor:
        return (WRITES[write](z) + 1).log()

    z, t = point(), point().cos()
    _, expected = torch.func.jvp(fn, (z,), (t,))
    for differentiable in (True, False):
        _, tangent = jx.jvp(fn, (z,), (t,), differentiable=differentiable)
        torch.testing.assert_close(tangent, expected)
    assert expected.any()


def test_a_parameter_met_by_a_constant_keeps_its_gradient() -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    for differentiable in (True, False):
        value, _ = jx.jvp(
            lambda z: (torch.zeros_like(z) + weight).log().sum() + z.sum(),
            (point(),),
            (point(),),
            differentiable=differentiable,
        )
        assert torch.equal(torch.autograd.grad(value, weight)[0], torch.full((4,), 2.0).double())


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize(
    "fn",
    [
        lambda z: torch.full_like(z, z.sum()),
        lambda z: torch.full_like(z, fill_value=z.sum()),
        lambda z: z.new_full((2,), z.sum()),
    ],
)
def test_a_number_to_fill_with_is_not_read_out_of_a_jet(fn: Callable, differentiable: bool) -> None:
    """Torch takes no number there that requires a gradient."""
    with pytest.raises(TypeError, match="must be Number"):
        jx.jvp(fn, (point(),), (point(),), differentiable=differentiable)
