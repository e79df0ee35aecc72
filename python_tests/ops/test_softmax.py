"""`jachess::softmax_jet`."""

import pytest
import torch

from jachess_ext import ops
from jachess_ext.ops.library import Streams
from jachess_ext.ops.softmax import softmax_stack
from python_tests.ops.cases import dtype_bounds, random_jet, relative_error
from python_tests.ops.operator_tests import Case, OperatorTests


def _case(masked: bool) -> Case:
    return Case(
        name="softmax_jet",
        leaves=lambda streams, *shape, **options: [random_jet(streams, *shape, **options)],
        of_torch=lambda x: torch.softmax(x, -1),
        shapes=[(2, 21, scores) for scores in (8, 19, 128)],
        bounds=dict(dtype_bounds(1e-11)),
        operator=lambda q, x: (x, q, masked),
        settings=lambda x: {"masked": masked},
    )


CASES = {"plain": _case(masked=False), "masked": _case(masked=True)}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class TestSoftmax(OperatorTests):
    pass


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


@pytest.mark.parametrize("dim", [-1, -2])
def test_reference_over_any_dimension(dim: int) -> None:
    x = random_jet(4, 3, 5)
    x.transpose(-1, dim)[0, 1] = -torch.inf  # a row without any score
    turned = ops.softmax_jet_reference(x.transpose(-1, dim), 2, True).transpose(-1, dim)
    torch.testing.assert_close(softmax_stack(x, Streams(2), True, dim), turned)


def test_a_single_score_has_no_derivative() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = random_jet(4, 2, 21, 1, dtype=dtype).requires_grad_()
        y = ops.softmax_jet(x, 2)
        (gx,) = torch.autograd.grad(y, x, random_jet(4, 2, 21, 1, dtype=dtype, seed=1))
        assert (y.detach()[0] == 1).all()
        assert y.detach()[1:].abs().max() < 1e-6
        assert gx.abs().max() < 1e-5
