"""Broadcasting, reductions and indices over random shapes; the oracle is central differences.

The table of `rule_table` fixes a few shapes for every rule; here hypothesis draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import jachess_ext as jx

from ..models import oracles

STEPS = oracles.Steps(1e-3, 2e-3)
ONCE = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
NON_SCALAR = npst.array_shapes(min_dims=1, max_dims=3, max_side=3)
SIDES = st.sampled_from(["left", "right", "both"])


def check(function: Callable[..., Any], *shapes: tuple[int, ...], active: str = "both") -> None:
    """Jets of ``function`` of one or two tensors, any of them constant, against differences."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    chosen = [active in ("both", side) for side in ("left", "right")][: len(shapes)]
    sizes = [t.numel() if is_active else 0 for t, is_active in zip(tensors, chosen, strict=True)]
    x = torch.cat([t.flatten()[:size] for t, size in zip(tensors, sizes, strict=True)])

    def of_vector(x: Any) -> tuple:
        arguments, start = [], 0
        for tensor, size, is_active in zip(tensors, sizes, chosen, strict=True):
            part = x[start : start + size].reshape(tensor.shape) if is_active else tensor
            arguments.append(part)
            start += size
        result = function(*arguments)
        return tuple(result) if isinstance(result, list | tuple) else (result,)

    u, w = directions = torch.randn(2, len(x), dtype=torch.float64)
    jets, plain = jx.jet(of_vector, x, directions), of_vector(x)
    first = oracles.first_difference(of_vector, x, u, STEPS)
    second = oracles.mixed_difference(of_vector, x, u, w, STEPS)
    for jet, value, along, mixed in zip(jets, plain, first, second, strict=True):
        torch.testing.assert_close(jet.primal, value, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(jet.first[0], along, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(jet.second[0], mixed, rtol=1e-6, atol=1e-6)


@ONCE
@given(npst.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3), SIDES, st.data())
def test_arithmetic_broadcasts(shapes: Any, active: str, data: st.DataObject) -> None:
    function = data.draw(
        st.sampled_from(
            [
                torch.add,
                torch.sub,
                torch.mul,
                lambda a, b: torch.div(a, b * b + 1),
                lambda a, b: torch.pow(a * a + 1, b),
                lambda a, b: torch.where(torch.ones_like(a + b) > 0, a, b),
                lambda a, b: torch.broadcast_tensors(a, b),
                lambda a, b: torch.addcmul(a, a, b),
            ]
        )
    )
    check(function, *shapes.input_shapes, active=active)


@ONCE
@given(st.data(), NON_SCALAR, st.booleans())
def test_reductions(data: st.DataObject, shape: tuple[int, ...], keepdim: bool) -> None:
    dims = data.draw(npst.valid_tuple_axes(len(shape), min_size=1))
    for reduce in (torch.sum, torch.mean, torch.logsumexp, torch.linalg.vector_norm):
        check(lambda x, f=reduce: f(x, dim=dims, keepdim=keepdim), shape, active="left")
    check(lambda x: torch.var(x, dim=dims, correction=0, keepdim=keepdim), shape, active="left")
    (dim,) = data.draw(npst.valid_tuple_axes(len(shape), min_size=1, max_size=1))
    for along in (torch.softmax, torch.log_softmax, torch.cumsum, torch.amax):
        check(lambda x, f=along: f(x, dim), shape, active="left")


@ONCE
@given(st.data(), NON_SCALAR)
def test_indices(data: st.DataObject, shape: tuple[int, ...]) -> None:
    index = data.draw(npst.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    parts = index if isinstance(index, tuple) else (index,)
    if all(not isinstance(p, slice) or p.step is None or p.step > 0 for p in parts):
        check(lambda x: x[index], shape, active="left")
    shared = data.draw(npst.integer_array_indices(shape))
    check(lambda x: x[tuple(torch.from_numpy(np.asarray(i)) for i in shared)], shape, active="left")
    mask = torch.from_numpy(data.draw(npst.arrays(np.bool_, shape)))
    check(lambda x: x[mask], shape, active="left")


@ONCE
@given(st.data(), NON_SCALAR)
def test_tensor_indices_among_slices(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Where the indexed dimensions land depends on whether a slice stands between them."""

    def part(size: int) -> Any:
        some = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2)))
        one = data.draw(st.integers(-size, size - 1))
        return data.draw(st.sampled_from([slice(None), some, one, some.tolist(), some.numpy()]))

    index = tuple(part(size) for size in shape)
    if data.draw(st.booleans()):
        index = (*index[:1], None, *index[1:])
    check(lambda x: x[index], shape, active="left")


@ONCE
@given(st.data(), NON_SCALAR)
def test_shape_changes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    ndim = len(shape)
    order = tuple(data.draw(st.permutations(range(-ndim, 0))))
    dim = data.draw(st.integers(-ndim, ndim - 1))
    other = data.draw(st.integers(-ndim, ndim - 1))
    new = data.draw(st.integers(-ndim - 1, ndim))
    wide = (*data.draw(npst.array_shapes(min_dims=0, max_dims=1, max_side=2)), *shape)
    for function in (
        lambda x: x.permute(order),
        lambda x: x.transpose(dim, other),
        lambda x: x.movedim(dim, other),
        lambda x: x.unsqueeze(new),
        lambda x: x.squeeze(dim),
        lambda x: x.flip(dim),
        lambda x: x.roll(1, dim),
        lambda x: x.unbind(dim),
        lambda x: x.split(2, dim),
        lambda x: x.chunk(2, dim),
        lambda x: x.narrow(dim, 0, 1),
        lambda x: x.select(dim, -1),
        lambda x: x.expand(wide),
        lambda x: x.repeat(wide),
        lambda x: x.reshape(-1, 1),
        lambda x: x.flatten(),
        lambda x: x.repeat_interleave(2, dim),
        lambda x: torch.cat([x, x * x], dim),
        lambda x: torch.stack([x, x * x], new),
        lambda x: torch.nn.functional.pad(x, (1, 0), value=2.0),
        lambda x: (x * x).gather(dim, torch.zeros((1,) * ndim, dtype=torch.long)),
        lambda x: (x * x).index_select(dim, torch.tensor([0, 0])),
    ):
        check(function, shape, active="left")


@pytest.mark.parametrize(
    "function", [lambda y: y.reshape(2, 3), lambda y: y.narrow(0, 1, 4)], ids=["reshape", "narrow"]
)
def test_reshape_and_narrow_alone(function: Callable[[Any], Any]) -> None:
    """The tables cut and reshape a vector first, so that two errors of these may cancel."""
    x, u, w = torch.randn(3, 6, dtype=torch.float64)
    x.requires_grad_()
    jet = jx.jet(lambda x: function(x * x), x, torch.stack([u, w]))
    expected = [function(part.detach()) for part in (x * x, 2 * x * u, 2 * x * w, 2 * u * w)]
    torch.testing.assert_close(jet.streams.detach(), torch.stack(expected))
    (gradient,) = torch.autograd.grad(jet.first[0].sum(), x)
    kept = torch.isin(torch.arange(6), function(torch.arange(6)))
    torch.testing.assert_close(gradient, 2 * u * kept)
