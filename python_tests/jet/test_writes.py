"""Writes in place, after which backward has to be right: whatever was read before the write.

Plain torch saves the result of some functions (tanh) and nothing of others (relu), so that a
program may write into what they read; rules save more.  The oracle is double backward through the
same program in which every function reads a copy.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jachess_ext as jx
from jachess_ext.jet import MissingJetRule, composed_rules

Function = Callable[[Any], Any]
FUNCTIONS: dict[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in ("relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "sin", "square", "erf")
    },
    **{name: getattr(F, name) for name in ("gelu", "silu", "elu", "softplus", "mish")},
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "power": lambda x: x**3,
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "matmul": lambda x: x @ x.mT @ x,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}
# The gradient of torch's double backward of a layer norm is wrong (torch 2.13).
WRITTEN_OUT: dict[str, Function] = {
    "layer_norm": lambda x: (
        (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    )
}


def through_an_index(function: Function, x: Any, w: Any) -> Any:
    h = x * w
    h[..., :3] = function(h[..., :3])
    return h.sum(0) * w[0]


def after_it_was_read(function: Function, x: Any, w: Any) -> Any:
    h = x * w
    y = function(h)
    h.mul_(2)
    h[0] = y[1]
    return h.sum(0) + y.sum(0)


def through_a_view(function: Function, x: Any, w: Any) -> Any:
    h = x * w
    view = h.t()[:3]
    y = function(view)
    view.add_(1.0)
    z = h[:, :3].clone() * y.t()
    h[:, 1] = 3.0
    return torch.cat([z.sum(0), h.sum(0)])


def again_and_again(function: Function, x: Any, w: Any) -> Any:
    h = x * w
    h[0] = h[1]
    for row in range(1, len(h)):
        h[row] += function(h[row - 1 : row])[0]
    return h.sum(0)


PROGRAMS = (through_an_index, after_it_was_read, through_a_view, again_and_again)


def _tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.rand(2, 4, 5, dtype=torch.float64) + 0.3
    return x.requires_grad_(), w.requires_grad_(), *torch.randn(2, 4, 5, dtype=torch.float64)


def _gradient(of: Tensor, to: Tensor) -> Tensor:
    """Zero where there is none."""
    found = torch.autograd.grad(of, to, create_graph=True, allow_unused=True)[0]
    return torch.zeros_like(to) if found is None else found


def streams_by_double_backward(program: Callable[[Any], Any], x: Tensor, u: Any, v: Any) -> Tensor:
    steps = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    y = program(x + steps[0] * u + steps[1] * v)
    first = torch.stack([_gradient(entry, steps) for entry in y])
    second = torch.stack([_gradient(entry, steps)[1] for entry in first[:, 0]])
    return torch.stack([y, first[:, 0], first[:, 1], second])


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_after_a_write(name: str, program: Callable) -> None:
    x, w, u, v = _tensors()
    function = FUNCTIONS[name]
    written = WRITTEN_OUT.get(name, function)
    expected = streams_by_double_backward(
        lambda x: program(lambda part: written(part.clone()), x, w), x, u, v
    )
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weights).sum(), (x, w))
    for rules in (nullcontext, composed_rules):
        with rules():
            streams = jx.jet(lambda x: program(function, x, w), x, torch.stack([u, v])).streams
        torch.testing.assert_close(streams, expected, rtol=1e-9, atol=1e-9)
        found = torch.autograd.grad((streams * weights).sum(), (x, w))
        torch.testing.assert_close(found, gradients, rtol=1e-8, atol=1e-8)


def test_overlapping_entries_are_refused() -> None:
    def program(x: Any) -> Any:
        return x.clone().unfold(0, 2, 1).mul_(2)

    with pytest.raises(MissingJetRule, match="overlap"):
        jx.jet(program, torch.rand(5), torch.rand(1, 5))


@pytest.mark.parametrize(
    "program",
    [lambda x: 2.0**x, lambda x: x.clone().fill_(3)],
)
def test_no_number_is_copied_to_the_device(
    program: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph cannot be captured where one is: numbers are written on the device."""
    as_tensor = torch.as_tensor

    def without_numbers(value: Any, **settings: Any) -> Tensor:
        assert isinstance(value, Tensor), value
        return as_tensor(value, **settings)

    monkeypatch.setattr(torch, "as_tensor", without_numbers)
    jx.jet(program, torch.rand(5), torch.rand(2, 5))


# ---- views between real and complex numbers ------------------------------------------------------

VIEWS: dict[str, Callable[[Any], Any]] = {
    "first": lambda h: h[..., :1],
    "last row": lambda h: h[-1:],
    "transposed": lambda h: h.transpose(0, 1),
    "real": lambda h: h.real if h.is_complex() else h,
    "imag": lambda h: h.imag if h.is_complex() else h,
    "conj": lambda h: h.conj() if h.is_complex() else h,
    "other numbers": lambda h: (
        torch.view_as_real(h.resolve_conj()) if h.is_complex() else torch.view_as_complex(h)
    ),
}
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "mul_": lambda h, x: h.mul_(1.5),
    "by x": lambda h, x: h.mul_(x.sum()),
    "add_": lambda h, x: h.add_(x[0, 0]),
    "copy_": lambda h, x: h.copy_(x[0, 1].exp().to(h.dtype)),
    "setitem": lambda h, x: h.__setitem__(0, 2.0),
    "setitem of x": lambda h, x: h.__setitem__((slice(None), 0), x[1, 0].to(h.dtype)),
}


def _random_views(seed: int) -> Callable[[Any], Any]:
    """A program that takes views of views, reads and writes some, and returns what all hold."""
    chosen = random.Random(seed)
    begins_complex = chosen.random() < 0.5
    steps = [
        (chosen.choice(["view", "write", "read"]), chosen.random(), name)
        for name in (chosen.choice([*VIEWS]) for _ in range(8))
    ]
    names = [chosen.choice([*WRITES]) for _ in steps]

    def program(x: Any) -> Any:
        base = torch.complex(x, x * x) if begins_complex else torch.stack([x, x * x], -1)
        held, out = [base], base.real.sum() if begins_complex else base.sum()
        for (kind, place, view), write in zip(steps, names, strict=True):
            h = held[int(place * len(held))]
            if kind == "view":
                held.append(VIEWS[view](h))
            elif kind == "write":
                WRITES[write](h, x)
            else:
                out = out + (h * h).sum().real
        parts = [torch.view_as_real(h.resolve_conj()) if h.is_complex() else h for h in held]
        return torch.stack([out, *((part * (n + 1)).sum() for n, part in enumerate(parts))])

    return program


@pytest.mark.parametrize("seed", range(40))
def test_views_between_real_and_complex_numbers(seed: int) -> None:
    """Against torch.func.jvp, and its gradient against differences of it."""
    program = _random_views(seed)
    x = torch.linspace(0.4, 1.6, 6, dtype=torch.float64).view(3, 2).requires_grad_()
    t = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)
    try:
        value, expected = torch.func.jvp(program, (x,), (t,))
    except RuntimeError:  # what torch refuses without jets, too
        pytest.skip("torch refuses these views")
    found_value, found = jx.jvp(program, (x,), (t,))
    torch.testing.assert_close((found_value, found), (value, expected))
    with contextlib.suppress(MissingJetRule):  # it says that it has copied a view
        without = jx.jvp(program, (x,), (t,), differentiable=False)[1]
        torch.testing.assert_close(without, expected.detach())
    try:
        torch.autograd.grad(program(x).sum(), x)
    except RuntimeError:  # a write into what plain autograd has saved
        return
    (gradient,) = torch.autograd.grad(found.sum(), x)
    steps = 1e-5 * torch.eye(6, dtype=torch.float64).view(6, 3, 2)
    with torch.no_grad():
        ends = [[torch.func.jvp(program, (x + e,), (t,))[1].sum() for e in (h, -h)] for h in steps]
    differences = torch.stack([(up - down) / 2e-5 for up, down in ends]).view(3, 2)
    torch.testing.assert_close(gradient, differences, rtol=1e-6, atol=1e-5)


def test_a_write_into_a_view_that_had_to_be_copied_is_refused() -> None:
    def program(x: Any) -> Any:
        y = x * 2  # of three entries: its second stream starts at an odd one
        torch.view_as_complex(y[:2]).mul_(2.0)
        return y

    with pytest.raises(MissingJetRule, match="clone the view"):
        jx.jvp(program, (torch.ones(3),), (torch.ones(3),))
