"""Which dtype comes out: casts, and torch's promotion of every mixture of two tensors."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import jachess_ext as jx
from jachess_ext.jet.engine.layout import make_layout
from jachess_ext.jet.passes.eager import make_input

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OTHERS = [*FLOATS, torch.int64, torch.bool]
SHAPES = [((), ()), ((), (2, 3)), ((2, 3), ()), ((3,), (2, 3))]
FUNCTIONS = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "rsub": torch.rsub,
    "maximum": torch.maximum,
    "pow": torch.pow,
    "where": lambda a, b: torch.where(torch.tensor([True, False, True]), a, b),
    "reflected pow": lambda a, b: b**a,
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
}


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(0.5, 2, max(1, torch.Size(shape).numel())).reshape(shape).to(dtype)


def _jets(*points: torch.Tensor) -> list[jx.JetTensor]:
    """Jets of one pass."""
    layout = make_layout(2, 2).begin()
    made = [make_input(x, torch.ones(2, *x.shape).to(x.dtype)).streams for x in points]
    return [jx.JetTensor(streams, layout) for streams in made]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_promotion_is_torch_s(name: str, dtype: torch.dtype) -> None:
    """Scalars, vectors and matrices of every dtype, jets on either side or on both; float16 is
    among the others."""
    function: Any = FUNCTIONS[name]
    tried = 0
    for other, (shape, other_shape) in product(OTHERS, SHAPES):
        a, b = _values(shape, dtype), _values(other_shape, other)
        mixtures: list[Any] = [(*_jets(a), b)]
        if other in FLOATS:
            mixtures += [(a, *_jets(b)), tuple(_jets(a, b))]
        try:
            expected = function(a, b)
        except RuntimeError:  # torch has no such mixture: neither may we
            for mixture in mixtures:
                with pytest.raises((RuntimeError, TypeError)):
                    function(*mixture)
            continue
        for mixture in mixtures:
            actual = function(*mixture)
            said = f"{name} of {dtype}{shape} and {other}{other_shape}"
            assert isinstance(actual, jx.JetTensor), said
            assert actual.dtype == actual.streams.dtype == expected.dtype, said
            assert actual.streams.shape == (4, *expected.shape), said
            limit = 2 * torch.finfo(expected.dtype).eps
            torch.testing.assert_close(actual.primal, expected, rtol=limit, atol=limit, msg=said)
            tried += 1
    assert tried > 24


CASTS = {
    "float": (lambda x: x.float(), torch.float32),
    "half": (lambda x: x.half(), torch.float16),
    "bfloat16": (lambda x: x.bfloat16(), torch.bfloat16),
    "to": (lambda x: x.to(torch.float32), torch.float32),
    "to named": (lambda x: x.to(dtype=torch.float32), torch.float32),
    "type": (lambda x: x.type("torch.FloatTensor"), torch.float32),
    "softmax": (lambda x: x.softmax(-1, dtype=torch.float32), torch.float32),
    "sum": (lambda x: x.sum(0, dtype=torch.float32), torch.float32),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_carry_every_stream(name: str) -> None:
    cast, dtype = CASTS[name]
    x, u, w = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0)).double() / 3
    y = x + 0.5  # no zeros: second streams come from a square before the cast
    jet = jx.jet(lambda x: cast(x * x / 2), y, torch.stack([u, w]))
    assert jet.streams.dtype == dtype
    assert torch.equal(jet.primal, cast(y * y / 2))
    exact = torch.stack([y * y / 2, y * u, y * w, u * w])
    if name == "softmax":
        expected = jx.jet(lambda x: (x * x / 2).softmax(-1), y, torch.stack([u, w])).streams
    else:  # linear: of each stream by itself
        expected = torch.stack([cast(stream) for stream in exact]).double()
    limit = torch.finfo(dtype).eps
    torch.testing.assert_close(jet.streams.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", ["bfloat16", "float", "half"])
def test_casts_carry_gradients(name: str) -> None:
    """Of x² and its slope 2x, in numbers that every dtype holds."""
    x = torch.tensor([0.5, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    jet = jx.jet(lambda x: getattr(x * x, name)(), x, torch.ones(1, 3).double(), order=1)
    (gradient,) = torch.autograd.grad(jet.streams.sum(), x)
    assert torch.equal(gradient, (2 * x + 2).detach())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_casts_to_integers_are_constants(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.5, -2.5])
    for cast in (lambda x: x.to(dtype), lambda x: x.to(dtype=dtype), lambda x: x.type(dtype)):
        out = cast(_jets(x)[0])
        assert not isinstance(out, jx.JetTensor)
        assert torch.equal(out, x.to(dtype))
