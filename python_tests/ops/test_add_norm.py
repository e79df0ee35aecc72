"""The residual forms of both norms: y = norm(x + residual) and the sum, against finite differences,
the composed form, and autograd's own checks."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jachess_ext import ops
from python_tests.ops.cases import (
    DEVICES,
    STREAMS,
    dtype_bounds,
    jet_by_differences,
    random_jet,
    relative_error,
)

EPS = 1e-5
NORMS = ["layer_norm", "rms_norm"]


def parameters(norm: str, n: int, **options) -> list[Tensor]:
    """The weight, and layer norm's bias."""
    return list(random_jet(2, n, seed=7, **options).unbind(0))[: 2 if norm == "layer_norm" else 1]


def operator(norm: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return getattr(ops, f"add_{norm}_jet")


def reference(norm: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return getattr(ops, f"add_{norm}_jet_reference")


def leaves_of(norm: str, *shape: int, **options) -> list[Tensor]:
    """x, residual and the parameters, all with gradients."""
    tensors = [random_jet(*shape, **options), random_jet(*shape, seed=5, **options)]
    tensors += parameters(norm, shape[-1], **options)
    return [t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_agrees_with_finite_differences(norm: str, q: int, streams: int) -> None:
    """The pair (x, residual) is one jet of twice the width, and the function one of both halves."""
    x, residual = random_jet(streams, 5, 19), random_jet(streams, 5, 19, seed=5)
    given = parameters(norm, 19)

    def add_norm(both: Tensor) -> Tensor:
        total = sum(both.chunk(2, -1))
        return getattr(F, norm)(total, (19,), *given, eps=EPS)

    expected = jet_by_differences(add_norm, torch.cat([x, residual], -1), q)
    y, total = operator(norm)(x, residual, *given, EPS, q)
    assert relative_error(y, expected) < 1e-7
    assert torch.equal(total, x + residual)
    assert relative_error(reference(norm)(x, residual, *given, EPS, q)[0], expected) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("channels", [8, 19, 100])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    dtype_bounds(1e-11),
)
def test_agrees_with_the_reference(
    device: str, norm: str, channels: int, q: int, streams: int, dtype: torch.dtype, bound: float
) -> None:
    """Both outputs and all gradients, with both outputs used, against the reference in float64."""
    leaves = leaves_of(norm, streams, 2, 9, channels, dtype=dtype, device=device)
    cotangents = [
        random_jet(streams, 2, 9, channels, dtype=dtype, device=device, seed=s) for s in (1, 2)
    ]
    outputs = operator(norm)(*leaves, EPS, q)
    got = torch.autograd.grad(outputs, leaves, cotangents)
    assert torch.equal(got[0], got[1])  # one gradient serves x and residual
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    # the sum is rounded before it is normalised, as an unfused model rounds its residual stream
    rounded = outputs[1].detach().double() - (wide[0] + wide[1]).detach()
    expected_outputs = reference(norm)(wide[0] + rounded, *wide[1:], EPS, q)
    expected = torch.autograd.grad(expected_outputs, wide, [c.double() for c in cotangents])
    assert torch.equal(outputs[1], leaves[0] + leaves[1])
    for a, b in zip(outputs[:1] + got[:2], expected_outputs[:1] + expected[:2], strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < bound
    for a, b in zip(got[2:], expected[2:], strict=True):
        assert relative_error(a[None], b[None]) < bound


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("q", "streams"), [(1, 2), (2, 4), (3, 4)])
def test_gradients(norm: str, q: int, streams: int, used: tuple[int, ...]) -> None:
    """First and second, with each output used alone and with both."""

    def f(*leaves: Tensor) -> tuple[Tensor, ...]:
        outputs = operator(norm)(*leaves, 0.3, q)
        return tuple(outputs[i] for i in used)

    leaves = leaves_of(norm, streams, 2, 3)
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.parametrize("norm", NORMS)
def test_only_the_sum_is_kept(norm: str) -> None:
    """Neither x nor residual is saved; without a residual x itself is, nothing else so large."""
    saved: list[Tensor] = []

    def record(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x, residual, *given = leaves_of(norm, 4, 3, 8)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        _, total = operator(norm)(x, residual, *given, EPS, 2)
    pointers = [t.data_ptr() for t in saved if t.numel() == x.numel()]
    assert pointers == [total.data_ptr()]
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        getattr(ops, f"{norm}_jet")(x, *given, EPS, 2)
    assert [t.data_ptr() for t in saved if t.numel() == x.numel()] == [x.data_ptr()]


@pytest.mark.parametrize("norm", NORMS)
def test_an_unused_output_gets_no_zeros(norm: str) -> None:
    """The backward operator gets the gradients that exist, and does not run for the sum alone."""
    calls: list[tuple] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append((str(func), args))
            return func(*args, **(kwargs or {}))

    leaves = leaves_of(norm, 4, 3, 8)
    name = f"jachess.{norm}_jet_backward.default"
    y, _ = operator(norm)(*leaves, EPS, 2)
    with Record():
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    backward = [args for func, args in calls if func == name]
    assert len(backward) == 1
    assert backward[0][1] is None  # gsum
    assert not [func for func, _ in calls if "zeros" in func or "fill" in func]
    calls.clear()
    _, total = operator(norm)(*leaves, EPS, 2)
    with Record():
        gradients = torch.autograd.grad(total, leaves[:2], torch.ones_like(total))
    assert not [func for func, _ in calls if func == name]
    assert all(torch.equal(g, torch.ones_like(total)) for g in gradients)


@pytest.mark.parametrize("norm", NORMS)
def test_results_alias_no_argument_and_none_another(norm: str) -> None:
    x, residual, *given = (leaf.detach() for leaf in leaves_of(norm, 4, 3, 8))
    kept = x.clone(), residual.clone()
    y, total = operator(norm)(x, residual, *given, EPS, 2)
    pointers = {t.data_ptr() for t in (x, residual, y, total)}
    assert len(pointers) == 4
    y.zero_()
    total.zero_()
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_empty(device: str, norm: str, dtype: torch.dtype) -> None:
    x = random_jet(8, 6, 6, dtype=dtype, device=device)
    given = parameters(norm, 6, dtype=dtype, device=device)
    for view in (x[::2], x[:4].transpose(1, 2), x[:1].expand(4, 6, 6)):
        got = operator(norm)(view, view.flip(0), *given, EPS, 2)
        dense = operator(norm)(view.contiguous(), view.flip(0).contiguous(), *given, EPS, 2)
        assert all(torch.equal(a, b) for a, b in zip(got, dense, strict=True))
    for shape in ((0, 6), (3, 0)):
        leaves = leaves_of(norm, 4, *shape, dtype=dtype, device=device)
        y, total = operator(norm)(*leaves, EPS, 2)
        assert y.shape == total.shape == (4, *shape)
        for leaf, grad in zip(
            leaves, torch.autograd.grad(y.sum() + total.sum(), leaves), strict=True
        ):
            assert grad.shape == leaf.shape
            assert not grad.any()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("residual", "error", "words"),
    [
        (torch.ones(4, 2, 2), ValueError, "residual has shape|residual is"),
        (torch.ones(4, 2, 3).double(), TypeError, "residual has dtype|residual is"),
        (torch.ones(4, 2, 3, device="meta"), ValueError, r"move it"),
    ],
)
def test_bad_residual_gets_one_sentence(norm: str, residual: Tensor, error, words: str) -> None:
    x, given = torch.ones(4, 2, 3), [None] * len(parameters(norm, 3))
    with pytest.raises(error, match=words):
        operator(norm)(x, residual, *given, EPS, 2)
    if not residual.is_meta:
        with pytest.raises(RuntimeError, match=words):
            getattr(torch.ops.jachess, f"{norm}_jet")(x, residual, *given, EPS, 2)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", NORMS)
def test_compiles_to_one_graph(device: str, norm: str) -> None:
    def loss(*leaves: Tensor) -> Tensor:
        y, total = operator(norm)(2 * leaves[0], *leaves[1:], EPS, 2)
        return y.square().sum() + total.sum()

    leaves = leaves_of(norm, 4, 8, 16, dtype=torch.float32, device=device)
    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
