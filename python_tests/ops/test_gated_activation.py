"""`jachess::gated_activation_jet` against differences, its reference and autograd's checks."""

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from python_tests.ops.cases import (
    ACTIVATIONS,
    DEVICES,
    STREAMS,
    away_from_kink,
    dtype_bounds,
    jet_by_differences,
    random_jet,
    relative_error,
)

BOUNDS = dtype_bounds(1e-13)


def gate_and_up(streams: int, *shape: int, kind: str = "gelu", **options) -> tuple[Tensor, Tensor]:
    """Two jets; for relu the gate keeps off its kink."""
    g = away_from_kink(random_jet(streams, *shape), kind).to(**options)
    return g, random_jet(streams, *shape, seed=3).to(**options)


def test_is_available() -> None:
    assert ops.available("gated_activation_jet", "cpu")
    assert ops.available("gated_activation_jet_backward", "cpu")


@pytest.mark.parametrize("kind", ops.ACTIVATION_KINDS)
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_agrees_with_finite_differences(kind: str, q: int, streams: int) -> None:
    """The pair (g, u) is one jet of twice the width, and the function one of both halves."""
    g, u = gate_and_up(streams, 67, kind=kind)

    def gated(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return ACTIVATIONS[kind](gate) * up

    expected = jet_by_differences(gated, torch.cat([g, u], -1), q)
    assert relative_error(torch.ops.jachess.gated_activation_jet(g, u, kind, q), expected) < 1e-7
    assert relative_error(ops.gated_activation_jet_reference(g, u, kind, q), expected) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ops.ACTIVATION_KINDS)
@pytest.mark.parametrize(("q", "streams"), STREAMS)
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_agrees_with_the_reference(
    device: str, kind: str, q: int, streams: int, dtype: torch.dtype, bound: float
) -> None:
    """Forward and gradients, on more elements than a block, against the reference in float64."""
    leaves = gate_and_up(streams, 3, 173, kind=kind, device=device, dtype=dtype)
    gy = random_jet(streams, 3, 173, dtype=dtype, device=device, seed=1)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = ops.gated_activation_jet(*leaves, kind, q)
    assert y.dtype == dtype
    assert y.shape == gy.shape
    got = torch.autograd.grad(y, leaves, gy)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected_y = ops.gated_activation_jet_reference(*wide, kind, q)
    expected = torch.autograd.grad(expected_y, wide, gy.double())
    assert relative_error(y, expected_y) < bound
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == dtype
        assert relative_error(g, e) < bound


@pytest.mark.parametrize("kind", ops.ACTIVATION_KINDS)
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_gradients(kind: str, q: int, streams: int) -> None:
    leaves = [leaf.requires_grad_() for leaf in gate_and_up(streams, 2, kind=kind)]

    def f(g: Tensor, u: Tensor) -> Tensor:
        return ops.gated_activation_jet(g, u, kind, q)

    fast = streams > 5 or kind != "silu"
    assert torch.autograd.gradcheck(f, leaves, fast_mode=fast)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=fast)


@pytest.mark.parametrize("wanted", [0, 1])
def test_gradient_of_one_input_alone(wanted: int) -> None:
    """Also the second derivative, whose cotangent then reaches only one of the two gradients."""
    inputs = list(gate_and_up(4, 3, 9))
    leaf = inputs[wanted].requires_grad_()

    def second(f) -> list[Tensor]:
        (first,) = torch.autograd.grad(
            f(*inputs, "silu", 2).square().sum(), leaf, create_graph=True
        )
        return [first.detach(), *torch.autograd.grad(first.square().sum(), leaf)]

    got, expected = second(ops.gated_activation_jet), second(ops.gated_activation_jet_reference)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_third_derivative_through_the_backward_operator() -> None:
    leaves = [leaf.requires_grad_() for leaf in gate_and_up(4, 5)]

    def third(f) -> list[Tensor]:
        def gradient(value: Tensor) -> Tensor:
            return torch.stack(torch.autograd.grad(value.square().sum(), leaves, create_graph=True))

        return list(gradient(gradient(gradient(f(*leaves, "gelu", 2)))))

    for a, b in zip(
        third(ops.gated_activation_jet), third(ops.gated_activation_jet_reference), strict=True
    ):
        assert relative_error(a, b) < 1e-11


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [5, 300])
def test_halves_of_one_tensor(device: str, dtype: torch.dtype, width: int) -> None:
    """What a fused gate-and-up projection gives; bit for bit what dense copies give."""
    both = random_jet(4, 3, 2, 2 * width, dtype=dtype, device=device)
    gy = random_jet(4, 3, 2, width, dtype=dtype, device=device, seed=1)
    backward = torch.ops.jachess.gated_activation_jet_backward
    g, u = both.chunk(2, -1)
    dense = [g.contiguous(), u.contiguous()]
    for left, right in ((g, u), (dense[0], u), (g, dense[1])):
        got = ops.gated_activation_jet(left, right, "silu", 2)
        assert got.is_contiguous()
        assert torch.equal(got, ops.gated_activation_jet(*dense, "silu", 2))
        for a, b in zip(
            backward(gy, left, right, "silu", 2), backward(gy, *dense, "silu", 2), strict=True
        ):
            assert a.is_contiguous()
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_empty(device: str, dtype: torch.dtype) -> None:
    x = random_jet(8, 6, 7, 6, dtype=dtype, device=device)
    views = [
        x[::2],
        x[:4].transpose(1, 2),
        x[:4].transpose(2, 3),
        x[:4, ::2],
        x[:4, :, ::2],
        x[:4, :, :, ::2],
        x[:1].expand(4, 6, 7, 6),
        x[:4, :1].expand(4, 6, 7, 6),
        x[:4, :, :1].expand(4, 6, 7, 6),
        x[:4, 0, :, :1],
        x[:4, 0, 0, 0],
        x[:4, 0, 0, ::3],
    ]
    backward = torch.ops.jachess.gated_activation_jet_backward
    for g in views:
        u = g.flip(0)
        dense = g.contiguous()
        assert torch.equal(
            ops.gated_activation_jet(g, u, "gelu", 2), ops.gated_activation_jet(dense, u, "gelu", 2)
        )
        for a, b in zip(
            backward(g, u, g, "gelu", 2), backward(dense, u, dense, "gelu", 2), strict=True
        ):
            assert torch.equal(a, b)
    leaves = [leaf.requires_grad_() for leaf in gate_and_up(4, 0, 5, dtype=dtype, device=device)]
    y = ops.gated_activation_jet(*leaves, "gelu", 2)
    assert y.shape == (4, 0, 5)
    y.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.shape == (4, 0, 5) for leaf in leaves)


def test_result_does_not_depend_on_the_threads() -> None:
    g, u = gate_and_up(4, 301, 64, dtype=torch.float32)
    gy = random_jet(4, 301, 64, dtype=torch.float32, seed=1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            gradients = torch.ops.jachess.gated_activation_jet_backward(gy, g, u, "silu", 2)
            results.append([ops.gated_activation_jet(g, u, "silu", 2), *gradients])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", ops.ACTIVATION_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_gates_give_no_nan(kind: str, dtype: torch.dtype) -> None:
    points = torch.tensor([-1e30, -1e8, -300.0, -40.0, 0.0, 40.0, 300.0, 1e8], dtype=dtype)
    g = torch.stack([points, *[torch.ones_like(points)] * 3])
    y = torch.ops.jachess.gated_activation_jet(g, torch.ones_like(g), kind, 2)
    assert torch.isfinite(y).all()
    backward = torch.ops.jachess.gated_activation_jet_backward
    for gradient in backward(torch.ones_like(g), g, torch.ones_like(g), kind, 2):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("g", "u", "kind", "q", "error", "words"),
    [
        (torch.ones(4, 3), torch.ones(4, 3), "gelu", 0, ValueError, "expected 1 to 4"),
        (torch.ones(5, 3), torch.ones(5, 3), "gelu", 2, ValueError, "expects 3 .* or 4"),
        (torch.ones(4, 3).int(), torch.ones(4, 3).int(), "gelu", 2, TypeError, "loat64|Double"),
        (torch.ones(4, 3), torch.ones(4, 2), "gelu", 2, ValueError, "same shape"),
        (torch.ones(4, 3), torch.ones(4, 3).double(), "gelu", 2, TypeError, r"\.to\(|dtype"),
        (torch.ones(4, 3), torch.ones(4, 3), "swish", 2, ValueError, "quick_gelu"),
        (
            torch.ones(4, 3),
            torch.ones(4, 3, device="meta"),
            "gelu",
            2,
            ValueError,
            r"move it with .to\(g.device\)",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(g, u, kind, q, error, words) -> None:
    with pytest.raises(error, match=words):
        ops.gated_activation_jet(g, u, kind, q)
    if not u.is_meta:
        with pytest.raises(RuntimeError, match=words):
            torch.ops.jachess.gated_activation_jet(g, u, kind, q)


def test_backward_refuses_what_does_not_fit_the_gate() -> None:
    g = torch.ones(4, 3)
    for gy in (torch.ones(4, 2), torch.ones(4, 3, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="expected what g is"):
            torch.ops.jachess.gated_activation_jet_backward(gy, g, g, "gelu", 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device: str, dtype: torch.dtype) -> None:
    g, u = (x.requires_grad_() for x in gate_and_up(4, 3, 5, dtype=dtype, device=device))
    gy = random_jet(4, 3, 5, dtype=dtype, device=device, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.jachess.gated_activation_jet, (g, u, "gelu", 2))
    halves = random_jet(4, 3, 10, dtype=dtype, device=device).requires_grad_().chunk(2, -1)
    torch.library.opcheck(torch.ops.jachess.gated_activation_jet, (*halves, "silu", 2))
    torch.library.opcheck(torch.ops.jachess.gated_activation_jet_backward, (gy, g, u, "gelu", 2))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(device: str) -> None:
    def loss(both: Tensor) -> Tensor:
        g, u = (2 * both).chunk(2, -1)
        return ops.gated_activation_jet(g, u, "gelu", 2).square().sum()

    x = random_jet(4, 8, 32, dtype=torch.float32, device=device).requires_grad_()
    (eager,) = torch.autograd.grad(loss(x), x)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), x)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
