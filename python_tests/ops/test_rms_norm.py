"""`jachess::rms_norm_jet` against finite differences, its twin, and autograd's own checks. What it
shares with layer norm in the residual form is in test_add_norm.py."""

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

EPS = 1e-6
BOUNDS = dtype_bounds(1e-11)


def scale(n: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    """A weight [n]."""
    return random_jet(1, n, dtype=dtype, device=device, seed=7)[0]


def test_is_available() -> None:
    assert ops.available("rms_norm_jet", "cpu")
    assert ops.available("rms_norm_jet_backward", "cpu")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_agrees_with_finite_differences(q: int, streams: int, affine: bool) -> None:
    x, weight = random_jet(streams, 5, 19), scale(19) if affine else None
    expected = jet_by_differences(lambda x: F.rms_norm(x, (19,), weight, EPS), x, q)
    y = torch.ops.jachess.rms_norm_jet(x, None, weight, EPS, q)[0]
    assert relative_error(y, expected) < 1e-7
    assert relative_error(ops.rms_norm_jet_reference(x, weight, EPS, q), expected) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [1, 8, 19, 384])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_agrees_with_twin(
    device: str, channels: int, q: int, streams: int, dtype: torch.dtype, bound: float
) -> None:
    """Forward and all gradients against the twin in float64; 16-bit x meets an fp32 weight."""
    eps = 1.0 if channels == 1 else EPS  # one channel: y is ±1, and eps alone leaves derivatives
    wide_type = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [
        random_jet(streams, 2, 21, channels, dtype=dtype, device=device).requires_grad_(),
        scale(channels, wide_type, device).requires_grad_(),
    ]
    gy = random_jet(streams, 2, 21, channels, dtype=dtype, device=device, seed=1)
    y = ops.rms_norm_jet(*leaves, eps, q)
    assert y.dtype == dtype
    got = torch.autograd.grad(y, leaves, gy)
    assert [g.dtype for g in got] == [dtype, wide_type]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected_y = ops.rms_norm_jet_reference(*wide, eps, q)
    expected = torch.autograd.grad(expected_y, wide, gy.double())
    assert relative_error(y, expected_y) < bound
    assert relative_error(got[0], expected[0]) < bound
    assert relative_error(got[1][None], expected[1][None]) < bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weight_may_have_any_dtype(dtype: torch.dtype) -> None:
    """The same numbers as the weight widened, and its gradient in its own dtype."""
    x, weight = random_jet(4, 3, 9, dtype=torch.float32), scale(9, dtype).requires_grad_()
    y = ops.rms_norm_jet(x, weight, EPS, 2)
    assert torch.equal(y, ops.rms_norm_jet(x, weight.detach().float(), EPS, 2))
    (got,) = torch.autograd.grad(y.square().sum(), weight)
    assert got.dtype == dtype


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_gradients(q: int, streams: int, affine: bool) -> None:
    leaves = [random_jet(streams, 2, 3).requires_grad_()]
    if affine:
        leaves.append(scale(3).requires_grad_())

    def f(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return ops.rms_norm_jet(x, weight, 0.3, q)

    assert torch.autograd.gradcheck(f, leaves, fast_mode=streams > 5)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=streams > 5)


@pytest.mark.parametrize("wanted", [0, 1])
def test_gradient_of_one_input_alone(wanted: int) -> None:
    inputs = [random_jet(4, 3, 9), scale(9)]
    leaf = inputs[wanted].requires_grad_()
    (got,) = torch.autograd.grad(ops.rms_norm_jet(*inputs, EPS, 2).square().sum(), leaf)
    twin = ops.rms_norm_jet_reference(*inputs, EPS, 2).square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(twin, leaf)[0])


def test_saved_statistic_is_the_jet_of_rstd() -> None:
    """The operator's further outputs, by finite differences; and no gradient may leave by them."""
    x = random_jet(4, 5, 19).requires_grad_()
    y, total, rstd = torch.ops.jachess.rms_norm_jet(x, None, None, EPS, 2)
    assert y.requires_grad
    assert not total.requires_grad
    assert total.shape == (0,)
    assert not rstd.requires_grad
    expected = jet_by_differences(lambda x: (x.square().mean(-1) + EPS).rsqrt(), x.detach(), 2)
    assert relative_error(rstd, expected) < 1e-7


@pytest.mark.parametrize("power", [-12, -4, 0, 4, 9])
def test_keeps_its_accuracy_at_any_scale(power: int) -> None:
    """No power of the mean square may overflow or vanish in fp32."""
    x = (random_jet(4, 3, 40) * 10.0**power).float().requires_grad_()
    gy = random_jet(4, 3, 40, seed=1).float()
    eps = 1e-30 if power < -6 else 1e-12
    (got,) = torch.autograd.grad(ops.rms_norm_jet(x, None, eps, 2), x, gy)
    wide = x.detach().double().requires_grad_()
    y = ops.rms_norm_jet_reference(wide, None, eps, 2)
    (expected,) = torch.autograd.grad(y, wide, gy.double())
    assert relative_error(ops.rms_norm_jet(x, None, eps, 2), y) < 1e-5
    assert relative_error(got / got.abs().max(), expected / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_weight_gradients_are_the_same_run_to_run(device: str) -> None:
    """Bit for bit, and on the CPU whatever the number of threads."""
    x = random_jet(4, 301, 64, dtype=torch.float32, device=device).requires_grad_()
    gy = random_jet(4, 301, 64, dtype=torch.float32, device=device, seed=1)
    leaves = [x, scale(64, torch.float32, device).requires_grad_()]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(torch.autograd.grad(ops.rms_norm_jet(*leaves, EPS, 2), leaves, gy))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_empty(device: str, dtype: torch.dtype) -> None:
    x = random_jet(8, 6, 6, dtype=dtype, device=device)
    weight = scale(12, dtype, device)[::2]
    for view in (x[::2], x[:4].transpose(1, 2), x[:1].expand(4, 6, 6)):
        got = ops.rms_norm_jet(view, weight, EPS, 2)
        assert torch.equal(got, ops.rms_norm_jet(view.contiguous(), weight.contiguous(), EPS, 2))
    for shape in ((0, 6), (3, 0)):
        leaves = [random_jet(4, *shape, dtype=dtype, device=device).requires_grad_()]
        leaves.append(scale(shape[-1], dtype, device).requires_grad_())
        y = ops.rms_norm_jet(*leaves, EPS, 2)
        assert y.shape == (4, *shape)
        for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
            assert grad.shape == leaf.shape
            assert not grad.any()


def test_nan_stays_in_its_row() -> None:
    x = random_jet(4, 3, 16, dtype=torch.float32)
    x[0, 1, 5] = float("nan")
    y = ops.rms_norm_jet(x, None, EPS, 2)
    assert torch.isnan(y[:, 1]).all()
    assert torch.isfinite(y[:, [0, 2]]).all()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.ones(4), None, EPS, 2), ValueError, "normalised dimension last"),
        ((torch.ones(5, 3), None, EPS, 2), ValueError, "expects 3 .* or 4"),
        ((torch.ones(4, 3), None, EPS, 7), ValueError, "expected 1 to 4"),
        ((torch.ones(4, 3).int(), None, EPS, 2), TypeError, "loat|Double"),
        ((torch.ones(4, 3), torch.ones(2), EPS, 2), ValueError, r"expected \[3\]"),
        ((torch.ones(4, 3), torch.ones(3).int(), EPS, 2), TypeError, "weight has dtype"),
        ((torch.ones(4, 3), torch.ones(3, device="meta"), EPS, 2), ValueError, "move it with"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        ops.rms_norm_jet(*arguments)
    if arguments[1] is None or not arguments[1].is_meta:
        with pytest.raises(RuntimeError, match=words):
            torch.ops.jachess.rms_norm_jet(arguments[0], None, *arguments[1:])


def test_backward_refuses_what_does_not_fit_x() -> None:
    backward = torch.ops.jachess.rms_norm_jet_backward
    x = torch.ones(4, 2, 3)
    _, _, rstd = torch.ops.jachess.rms_norm_jet(x, None, None, EPS, 2)
    with pytest.raises(RuntimeError, match=r"gy is .* expected what x is"):
        backward(torch.ones(4, 2, 2), None, x, None, EPS, 2, rstd, False)
    with pytest.raises(RuntimeError, match=r"gsum is .* expected what x is"):
        backward(x, torch.ones(4, 2, 2), x, None, EPS, 2, rstd, False)
    with pytest.raises(RuntimeError, match="expected what rms_norm_jet returned"):
        backward(x, None, x, None, EPS, 2, rstd.double(), False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device: str, dtype: torch.dtype) -> None:
    x = random_jet(4, 3, 5, dtype=dtype, device=device).requires_grad_()
    residual = random_jet(4, 3, 5, dtype=dtype, device=device, seed=2).requires_grad_()
    gy = random_jet(4, 3, 5, dtype=dtype, device=device, seed=1)
    weight = scale(5, torch.float32, device).requires_grad_()
    given = (residual, False) if dtype == torch.bfloat16 else (None, True)
    forward = torch.ops.jachess.rms_norm_jet
    torch.library.opcheck(forward, (x, given[0], weight, EPS, 2))
    _, _, rstd = forward(x.detach(), None, weight, EPS, 2)
    torch.library.opcheck(
        torch.ops.jachess.rms_norm_jet_backward,
        (gy, given[0], x, weight, EPS, 2, rstd, given[1]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(device: str) -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm_jet(2 * x, weight, EPS, 2).square().sum()

    leaves = [random_jet(4, 8, 16, dtype=torch.float32, device=device).requires_grad_()]
    leaves.append(scale(16, torch.float32, device).requires_grad_())
    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
