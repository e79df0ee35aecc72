"""`jachess::softmax_jet` against finite differences, its reference, and autograd's own checks."""

import pytest
import torch

from jachess_ext import ops
from python_tests.ops.cases import (
    DEVICES,
    STREAMS,
    dtype_bounds,
    jet_by_differences,
    random_jet,
    relative_error,
)

NAMES = ("softmax_jet", "softmax_jet_backward")


def test_is_available() -> None:
    assert all(ops.available(name, "cpu") for name in NAMES)


@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_agrees_with_finite_differences(q: int, streams: int) -> None:
    x = random_jet(streams, 5, 19)
    expected = jet_by_differences(lambda x: torch.softmax(x, -1), x, q)
    assert relative_error(torch.ops.jachess.softmax_jet(x, q, False), expected) < 1e-7
    assert relative_error(ops.softmax_jet_reference(x, q), expected) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scores", [1, 8, 19, 128])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    dtype_bounds(1e-11),
)
def test_agrees_with_the_reference(
    device: str, scores: int, q: int, streams: int, dtype: torch.dtype, bound: float
) -> None:
    """Forward and gradient against the reference in float64; a single score has no derivative."""
    x = random_jet(streams, 2, 21, scores, dtype=dtype, device=device).requires_grad_()
    gy = random_jet(streams, 2, 21, scores, dtype=dtype, device=device, seed=1)
    y = ops.softmax_jet(x, q)
    assert y.dtype == dtype
    (got,) = torch.autograd.grad(y, x, gy)
    wide = x.detach().double().requires_grad_()
    expected_y = ops.softmax_jet_reference(wide, q)
    (expected,) = torch.autograd.grad(expected_y, wide, gy.double())
    if scores == 1:
        assert (y.detach()[0] == 1).all()
        assert y.detach()[1:].abs().max() < 1e-6
        assert got.abs().max() < 1e-5
        return
    assert relative_error(y, expected_y) < bound
    assert relative_error(got, expected) < bound


@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_gradients(q: int, streams: int) -> None:
    x = random_jet(streams, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ops.softmax_jet(x, q), x, fast_mode=streams > 5)
    assert torch.autograd.gradgradcheck(lambda x: ops.softmax_jet(x, q), x, fast_mode=streams > 5)


@pytest.mark.parametrize("streams", [3, 4])
def test_opcheck(streams: int) -> None:
    x = random_jet(streams, 2, 5).requires_grad_()
    torch.library.opcheck(torch.ops.jachess.softmax_jet, (x, 2, True))
    gy = random_jet(streams, 2, 5, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.jachess.softmax_jet_backward, (gy, x, 2, True))


@pytest.mark.parametrize("masked", [True, False])
def test_rows_without_any_score(masked: bool) -> None:
    """Zeros as in torch's attention, or NaN as in its softmax; their neighbours are untouched."""
    x = random_jet(4, 3, 6, dtype=torch.float32)
    x[0, 1] = -torch.inf
    x.requires_grad_()
    for softmax in (ops.softmax_jet, ops.softmax_jet_reference):
        y = softmax(x, 2, masked)
        others = ops.softmax_jet_reference(x[:, [0, 2]], 2)
        torch.testing.assert_close(y[:, [0, 2]], others)
        if masked:
            assert not y[:, 1].any()
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert torch.isfinite(grad).all()
            assert not grad[:, 1].any()
        else:
            assert torch.isnan(y[:, 1]).all()


def test_masked_scores_take_no_part() -> None:
    """−inf and the most negative number leave the other scores as if the masked were not there."""
    x = random_jet(4, 3, 8, dtype=torch.float32)
    expected = ops.softmax_jet_reference(x[..., :5].double(), 2)
    for hidden in (-torch.inf, torch.finfo(torch.float32).min):
        x[0, :, 5:] = hidden
        y = ops.softmax_jet(x, 2)
        assert relative_error(y[..., :5], expected) < 1e-5
        assert not y[..., 5:].any()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_keeps_its_accuracy_far_from_zero(shift: float) -> None:
    x = random_jet(4, 3, 40, dtype=torch.float32)
    x[0] += shift
    wide = ops.softmax_jet_reference(x.double(), 2)
    assert relative_error(ops.softmax_jet(x, 2), wide) < 1e-5


def test_nan_stays_in_its_row() -> None:
    x = random_jet(4, 3, 16, dtype=torch.float32)
    x[0, 1, 5] = float("nan")
    x[0, 2] = float("nan")
    y = ops.softmax_jet(x, 2, masked=True)
    assert torch.isnan(y[:, 1:]).all()
    assert torch.isfinite(y[:, 0]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_empty(device: str, dtype: torch.dtype) -> None:
    x = random_jet(8, 6, 6, dtype=dtype, device=device)
    for view in (x[::2], x[:4].transpose(1, 2), x[:1].expand(4, 6, 6)):
        assert torch.equal(ops.softmax_jet(view, 2), ops.softmax_jet(view.contiguous(), 2))
    for shape in ((0, 6), (3, 0)):
        leaf = random_jet(4, *shape, dtype=dtype, device=device).requires_grad_()
        y = ops.softmax_jet(leaf, 2)
        assert y.shape == (4, *shape)
        assert torch.autograd.grad(y.sum(), leaf)[0].shape == leaf.shape


def test_is_the_same_run_to_run() -> None:
    """Bit for bit, whatever the number of threads."""
    x = random_jet(4, 301, 64, dtype=torch.float32).requires_grad_()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = ops.softmax_jet(x, 2)
            results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.ones(4), 2), ValueError, "last"),
        ((torch.ones(5, 3), 2), ValueError, "expects 3 .* or 4"),
        ((torch.ones(4, 3), 7), ValueError, "expected 1 to 4"),
        ((torch.ones(4, 3).int(), 2), TypeError, "loat|Double"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        ops.softmax_jet(*arguments)
    with pytest.raises(RuntimeError, match=words):
        torch.ops.jachess.softmax_jet(*arguments, False)


def test_backward_refuses_what_does_not_fit_x() -> None:
    with pytest.raises(RuntimeError, match="expected what x is"):
        torch.ops.jachess.softmax_jet_backward(torch.ones(4, 2, 2), torch.ones(4, 2, 3), 2, False)
