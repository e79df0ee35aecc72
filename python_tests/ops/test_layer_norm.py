"""`jachess::layer_norm_jet` against finite differences, its twin, and autograd's own checks."""

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


def parameters(n: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """A weight and a bias [n]."""
    return list(random_jet(2, n, dtype=dtype, device=device, seed=7).unbind(0))


def test_is_available() -> None:
    assert ops.available("layer_norm_jet", "cpu")
    assert ops.available("layer_norm_jet_backward", "cpu")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_agrees_with_finite_differences(q: int, streams: int, affine: bool) -> None:
    x = random_jet(streams, 5, 19)
    weight, bias = parameters(19) if affine else (None, None)
    expected = jet_by_differences(lambda x: F.layer_norm(x, (19,), weight, bias, EPS), x, q)
    y = torch.ops.jachess.layer_norm_jet(x, None, weight, bias, EPS, q)[0]
    assert relative_error(y, expected) < 1e-7
    assert relative_error(ops.layer_norm_jet_reference(x, weight, bias, EPS, q), expected) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [1, 8, 19, 384])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    dtype_bounds(1e-11),
)
def test_agrees_with_twin(
    device: str, channels: int, q: int, streams: int, dtype: torch.dtype, bound: float
) -> None:
    """Forward and all gradients against the twin in float64; 16-bit x meets an fp32 weight."""
    eps = 1.0 if channels == 1 else EPS  # one channel: no variance at all, eps alone scales
    wide_type = torch.float64 if dtype == torch.float64 else torch.float32
    x = random_jet(streams, 2, 21, channels, dtype=dtype, device=device).requires_grad_()
    gy = random_jet(streams, 2, 21, channels, dtype=dtype, device=device, seed=1)
    leaves = [x, *(p.requires_grad_() for p in parameters(channels, wide_type, device))]
    y = ops.layer_norm_jet(*leaves, eps, q)
    assert y.dtype == dtype
    got = torch.autograd.grad(y, leaves, gy)
    assert [g.dtype for g in got] == [dtype, wide_type, wide_type]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected_y = ops.layer_norm_jet_reference(*wide, eps, q)
    expected = torch.autograd.grad(expected_y, wide, gy.double())
    assert relative_error(y, expected_y) < bound
    assert relative_error(got[0], expected[0]) < bound
    for g, e in zip(got[1:], expected[1:], strict=True):
        assert relative_error(g[None], e[None]) < bound


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_gradients(q: int, streams: int, affine: bool) -> None:
    leaves = [random_jet(streams, 2, 3).requires_grad_()]
    if affine:
        leaves += [p.requires_grad_() for p in parameters(3)]

    def f(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return ops.layer_norm_jet(x, weight, bias, 0.3, q)

    assert torch.autograd.gradcheck(f, leaves, fast_mode=streams > 5)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=streams > 5)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_gradient_of_one_input_alone(wanted: str) -> None:
    x, (weight, bias) = random_jet(4, 3, 9), parameters(9)
    inputs = {"x": x, "weight": weight, "bias": bias}
    inputs[wanted].requires_grad_()
    leaf = inputs[wanted]
    (got,) = torch.autograd.grad(ops.layer_norm_jet(*inputs.values(), EPS, 2).square().sum(), leaf)
    twin = ops.layer_norm_jet_reference(*inputs.values(), EPS, 2).square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(twin, leaf)[0])


def test_saved_statistics_are_the_jet_of_mean_and_rstd() -> None:
    """The operator's further outputs, by finite differences; and no gradient may leave by them."""
    x = random_jet(4, 5, 19).requires_grad_()
    y, total, mean, rstd = torch.ops.jachess.layer_norm_jet(x, None, None, None, EPS, 2)
    assert y.requires_grad
    assert total.shape == (0,)
    assert not total.requires_grad
    assert not mean.requires_grad
    assert not rstd.requires_grad
    torch.testing.assert_close(mean, x.detach().mean(-1))
    expected = jet_by_differences(lambda x: (x.var(-1, correction=0) + EPS).rsqrt(), x.detach(), 2)
    assert relative_error(rstd, expected) < 1e-7


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0, 1e4, 1e9])
def test_keeps_its_accuracy_at_any_scale(scale: float) -> None:
    """No power of the variance may overflow or vanish in fp32."""
    x = (random_jet(4, 3, 40) * scale).float().requires_grad_()
    gy = random_jet(4, 3, 40, seed=1).float()
    eps = 1e-30 if scale < 1e-6 else 1e-12
    (got,) = torch.autograd.grad(ops.layer_norm_jet(x, None, None, eps, 2), x, gy)
    wide = x.detach().double().requires_grad_()
    y = ops.layer_norm_jet_reference(wide, None, None, eps, 2)
    (expected,) = torch.autograd.grad(y, wide, gy.double())
    assert relative_error(ops.layer_norm_jet(x, None, None, eps, 2), y) < 1e-5
    assert relative_error(got / got.abs().max(), expected / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_weight_gradients_are_the_same_run_to_run(device: str) -> None:
    """Bit for bit, and on the CPU whatever the number of threads."""
    x = random_jet(4, 301, 64, dtype=torch.float32, device=device).requires_grad_()
    gy = random_jet(4, 301, 64, dtype=torch.float32, device=device, seed=1)
    leaves = [x, *(p.requires_grad_() for p in parameters(64, torch.float32, device))]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(torch.autograd.grad(ops.layer_norm_jet(*leaves, EPS, 2), leaves, gy))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_empty(device: str, dtype: torch.dtype) -> None:
    x = random_jet(8, 6, 6, dtype=dtype, device=device)
    weight, bias = parameters(12, dtype, device)
    weight = weight[::2]
    for view in (x[::2], x[:4].transpose(1, 2), x[:1].expand(4, 6, 6)):
        got = ops.layer_norm_jet(view, weight, bias[:6], EPS, 2)
        dense = ops.layer_norm_jet(view.contiguous(), weight.contiguous(), bias[:6], EPS, 2)
        assert torch.equal(got, dense)
    for shape in ((0, 6), (3, 0)):
        leaves = [random_jet(4, *shape, dtype=dtype, device=device).requires_grad_()]
        leaves += [p.requires_grad_() for p in parameters(shape[-1], dtype, device)]
        y = ops.layer_norm_jet(*leaves, EPS, 2)
        assert y.shape == (4, *shape)
        for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
            assert grad.shape == leaf.shape
            assert not grad.any()


def test_nan_stays_in_its_row() -> None:
    x = random_jet(4, 3, 16, dtype=torch.float32)
    x[0, 1, 5] = float("nan")
    y = ops.layer_norm_jet(x, None, None, EPS, 2)
    assert torch.isnan(y[:, 1]).all()
    assert torch.isfinite(y[:, [0, 2]]).all()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.ones(4), None, None, EPS, 2), ValueError, "normalised dimension last"),
        ((torch.ones(5, 3), None, None, EPS, 2), ValueError, "expects 3 .* or 4"),
        ((torch.ones(4, 3), None, None, EPS, 7), ValueError, "expected 1 to 4"),
        ((torch.ones(4, 3).int(), None, None, EPS, 2), TypeError, "loat|Double"),
        ((torch.ones(4, 3), torch.ones(2), None, EPS, 2), ValueError, r"expected \[3\]"),
        ((torch.ones(4, 3), None, torch.ones(3, 1), EPS, 2), ValueError, r"expected \[3\]"),
        ((torch.ones(4, 3), torch.ones(3).int(), None, EPS, 2), TypeError, "weight has dtype"),
        (
            (torch.ones(4, 3), torch.ones(3, device="meta"), None, EPS, 2),
            ValueError,
            r"move it with|device",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        ops.layer_norm_jet(*arguments)
    if arguments[1] is None or not arguments[1].is_meta:
        with pytest.raises(RuntimeError, match=words):
            torch.ops.jachess.layer_norm_jet(arguments[0], None, *arguments[1:])


def test_backward_refuses_what_does_not_fit_x() -> None:
    backward = torch.ops.jachess.layer_norm_jet_backward
    x = torch.ones(4, 2, 3)
    _, _, mean, rstd = torch.ops.jachess.layer_norm_jet(x, None, None, None, EPS, 2)
    with pytest.raises(RuntimeError, match=r"gy is .* expected what x is"):
        backward(torch.ones(4, 2, 2), None, x, None, EPS, 2, mean, rstd, False)
    with pytest.raises(RuntimeError, match=r"gsum is .* expected what x is"):
        backward(x, torch.ones(4, 2, 2), x, None, EPS, 2, mean, rstd, False)
    with pytest.raises(RuntimeError, match="expected what layer_norm_jet returned"):
        backward(x, None, x, None, EPS, 2, mean[:, :1], rstd, False)
    with pytest.raises(RuntimeError, match="expected what layer_norm_jet returned"):
        backward(x, None, x, None, EPS, 2, mean, rstd.double(), False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device: str, dtype: torch.dtype) -> None:
    x = random_jet(4, 3, 5, dtype=dtype, device=device).requires_grad_()
    residual = random_jet(4, 3, 5, dtype=dtype, device=device, seed=2).requires_grad_()
    gy = random_jet(4, 3, 5, dtype=dtype, device=device, seed=1)
    weight, bias = (p.requires_grad_() for p in parameters(5, torch.float32, device))
    given = (residual, False) if dtype == torch.bfloat16 else (None, True)
    forward = torch.ops.jachess.layer_norm_jet
    torch.library.opcheck(forward, (x, given[0], weight, bias, EPS, 2))
    _, _, mean, rstd = forward(x.detach(), None, weight, bias, EPS, 2)
    torch.library.opcheck(
        torch.ops.jachess.layer_norm_jet_backward,
        (gy, given[0], x, weight, EPS, 2, mean, rstd, given[1]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(device: str) -> None:
    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.layer_norm_jet(2 * x, weight, bias, EPS, 2).square().sum()

    leaves = [random_jet(4, 8, 16, dtype=torch.float32, device=device).requires_grad_()]
    leaves += [p.requires_grad_() for p in parameters(16, torch.float32, device)]
    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
