"""`jachess::activation_jet` against finite differences, its reference and autograd's checks."""

import pytest
import torch

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

SMOOTH = [kind for kind in ops.ACTIVATION_KINDS if kind != "relu"]


def test_every_kind_has_an_oracle_and_a_kernel() -> None:
    assert set(ACTIVATIONS) == set(ops.ACTIVATION_KINDS)
    from jachess_ext import _C

    assert _C.activation_kinds() == ops.ACTIVATION_KINDS
    assert ops.available("activation_jet", "cpu")
    assert ops.available("activation_jet", torch.device("cpu"))
    assert not ops.available("activation_jet", "meta")
    assert not ops.available("no_such_operator", "cpu")


@pytest.mark.parametrize("kind", ops.ACTIVATION_KINDS)
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_agrees_with_finite_differences(kind: str, q: int, streams: int) -> None:
    x = away_from_kink(random_jet(streams, 67), kind)
    expected = jet_by_differences(ACTIVATIONS[kind], x, q)
    assert relative_error(torch.ops.jachess.activation_jet(x, kind, q), expected) < 1e-7
    assert relative_error(ops.activation_jet_reference(x, kind, q), expected) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ops.ACTIVATION_KINDS)
@pytest.mark.parametrize(("q", "streams"), STREAMS)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    dtype_bounds(1e-13),
)
def test_agrees_with_the_reference(
    device: str, kind: str, q: int, streams: int, dtype: torch.dtype, bound: float
) -> None:
    """Forward and gradient, on more elements than a block, against the reference in float64."""
    x = away_from_kink(random_jet(streams, 3, 173), kind).to(device, dtype)
    gy = random_jet(streams, 3, 173, dtype=dtype, device=device, seed=1)
    x.requires_grad_()
    y = ops.activation_jet(x, kind, q)
    assert y.dtype == dtype
    assert y.shape == x.shape
    (gx,) = torch.autograd.grad(y, x, gy)
    wide = x.detach().double().requires_grad_()
    expected = ops.activation_jet_reference(wide, kind, q)
    (expected_gx,) = torch.autograd.grad(expected, wide, gy.double())
    assert relative_error(y, expected) < bound
    assert relative_error(gx, expected_gx) < bound


@pytest.mark.parametrize("kind", SMOOTH)
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_gradients(kind: str, q: int, streams: int) -> None:
    x = random_jet(streams, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ops.activation_jet(x, kind, q), x)
    assert torch.autograd.gradgradcheck(lambda x: ops.activation_jet(x, kind, q), x)


def test_gradients_of_relu_away_from_its_kink() -> None:
    x = away_from_kink(random_jet(4, 3), "relu").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ops.activation_jet(x, "relu", 2), x)
    assert torch.autograd.gradgradcheck(lambda x: ops.activation_jet(x, "relu", 2), x)


def test_third_derivative_through_the_backward_operator() -> None:
    """Nothing is dropped when the backward's own gradient is differentiated once more."""
    x = random_jet(4, 5).requires_grad_()

    def third(f):
        (g,) = torch.autograd.grad(f(x, "gelu", 2).square().sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        return torch.autograd.grad(gg.square().sum(), x)[0]

    assert relative_error(third(ops.activation_jet), third(ops.activation_jet_reference)) < 1e-11


@pytest.mark.parametrize("kind", ops.ACTIVATION_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_and_missing_values(kind: str, dtype: torch.dtype) -> None:
    """Saturated inputs give the limits, not NaN; NaN stays NaN in every stream."""
    points = torch.tensor([-1e30, -1e8, -300.0, -40.0, 0.0, 40.0, 300.0, 1e8, 1e30], dtype=dtype)
    x = torch.stack([points, *[torch.ones_like(points)] * 3])
    expected = ACTIVATIONS[kind](points.double().clamp(-1e10, 1e10))
    inside = points.abs() <= 1e8
    for f in (torch.ops.jachess.activation_jet, ops.activation_jet_reference):
        y = f(x, kind, 2)
        assert torch.isfinite(y).all()
        torch.testing.assert_close(y[0].double()[inside], expected[inside], rtol=2e-6, atol=1e-7)
        gx = torch.ops.jachess.activation_jet_backward(torch.ones_like(x), x, kind, 2)
        assert torch.isfinite(gx).all()
    x[0, 3] = float("nan")
    y = ops.activation_jet(x, kind, 2)
    assert torch.isnan(y[0, 3])
    assert torch.isfinite(y[:, [0, 1, 2, 4, 5]]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_empty(device: str, dtype: torch.dtype) -> None:
    x = random_jet(8, 6, 5, dtype=dtype, device=device)
    for view in (x[::2], x[:4].transpose(1, 2), x[:4, ::2], x[:1].expand(4, 6, 5)):
        dense = view.contiguous()
        assert torch.equal(
            ops.activation_jet(view, "gelu", 2), ops.activation_jet(dense, "gelu", 2)
        )
        strided = torch.ops.jachess.activation_jet_backward(view, view, "gelu", 2)
        assert torch.equal(
            strided, torch.ops.jachess.activation_jet_backward(dense, dense, "gelu", 2)
        )
    empty = random_jet(4, 0, 5, dtype=dtype, device=device).requires_grad_()
    y = ops.activation_jet(empty, "gelu", 2)
    assert y.shape == (4, 0, 5)
    y.sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (4, 0, 5)


def test_sixteen_bit_rounding_is_torchs() -> None:
    """relu's primal is x itself: every finite half and bfloat16 comes back bit for bit."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        x = x[torch.isfinite(x) & (x >= 0)]
        y = ops.activation_jet(torch.stack([x, x]), "relu", 1)
        assert torch.equal(y[0], x)
        # and the product is rounded to nearest even from fp32, subnormals and overflow included
        silu = ops.activation_jet(torch.stack([-x, x]), "silu", 1)
        exact = ops.activation_jet(torch.stack([-x.float(), x.float()]), "silu", 1)
        assert torch.equal(silu, exact.to(dtype))


@pytest.mark.parametrize(
    ("x", "kind", "q", "error", "words"),
    [
        (torch.ones(4, 3), "gelu", 0, ValueError, "expected 1 to 4"),
        (torch.ones(16, 3), "gelu", 5, ValueError, "expected 1 to 4"),
        (torch.ones(5, 3), "gelu", 2, ValueError, "expects 3 .* or 4"),
        (torch.tensor(1.0), "gelu", 2, ValueError, "streams in front"),
        (torch.ones(4, 3, dtype=torch.int64), "gelu", 2, TypeError, "float64"),
        (torch.ones(4, 3), "swish", 2, (ValueError, RuntimeError), "quick_gelu"),
    ],
)
def test_bad_arguments_get_one_sentence(x, kind, q, error, words) -> None:
    with pytest.raises(error, match=words):
        ops.activation_jet(x, kind, q)
    words = words.replace("float64", "Double").replace("streams in front", "[streams|dimension]")
    with pytest.raises(RuntimeError, match=words):
        torch.ops.jachess.activation_jet(x, kind, q)


def test_backward_refuses_what_does_not_fit_x() -> None:
    x = torch.ones(4, 3)
    for gy in (torch.ones(4, 2), torch.ones(4, 3, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="expected what x is"):
            torch.ops.jachess.activation_jet_backward(gy, x, "gelu", 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device: str, dtype: torch.dtype) -> None:
    x = random_jet(4, 3, 5, dtype=dtype, device=device).requires_grad_()
    gy = random_jet(4, 3, 5, dtype=dtype, device=device, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.jachess.activation_jet, (x, "gelu", 2))
    torch.library.opcheck(torch.ops.jachess.activation_jet, (x.transpose(1, 2), "silu", 2))
    torch.library.opcheck(torch.ops.jachess.activation_jet_backward, (gy, x, "gelu", 2))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(device: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return ops.activation_jet(2 * x, "gelu", 2).square().sum()

    x = random_jet(4, 8, 16, dtype=torch.float32, device=device).requires_grad_()
    (eager,) = torch.autograd.grad(loss(x), x)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), x)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
