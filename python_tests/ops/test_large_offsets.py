"""Tensors whose element offsets pass 2^31, in bf16, within 12 GB: the far end must be computed as
it is alone.  Large inputs are expanded where that tests the same offsets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from python_tests.operators import OPERATORS

pytestmark = pytest.mark.slow
PAST = 2**31 + 2**12
D = 64
ROWS = PAST // 2 // D  # of [2, ROWS, D]
TAIL = 32


def tall(rows: int = ROWS, width: int = D) -> Tensor:
    """[2, rows, width], ones but for the last rows; 4.3 GB."""
    x = torch.ones(2, rows, width, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    x[:, -TAIL:] = torch.randn(2, TAIL, width, generator=generator).bfloat16()
    assert x.numel() > 2**31
    return x


def assert_tail(whole: Tensor, alone: Tensor) -> None:
    assert torch.equal(whole[:, -TAIL:], alone)


def test_gated_activation_of_halves() -> None:
    """The second half lies past 2^31 in the storage of both."""
    gate, up = tall().chunk(2, -1)
    whole = ops.gated_activation_jet(gate, up, "gelu", 1)
    assert_tail(whole, ops.gated_activation_jet(gate[:, -TAIL:], up[:, -TAIL:], "gelu", 1))


@pytest.mark.parametrize(
    "name", ["activation_jet", "layer_norm_jet", "rms_norm_jet", "softmax_jet"]
)
def test_rows(name: str) -> None:
    x, operator = tall(), OPERATORS[name]
    parameters = [torch.ones(D)] * len(operator.parameters)
    whole = operator(x, *parameters, q=1)
    assert_tail(whole, operator(x[:, -TAIL:], *parameters, q=1))


def test_mean_squares_and_their_gradient() -> None:
    x = tall().requires_grad_()
    whole, _ = ops.jet_mean_squares(x, 1)
    assert torch.equal(whole[-TAIL:], ops.jet_mean_squares(x.detach()[:, -TAIL:], 1)[0])
    (gradient,) = torch.autograd.grad(whole, x, torch.ones_like(whole))
    assert torch.equal(gradient[1, -TAIL:], 2 * x.detach()[1, -TAIL:])
    assert not gradient[0, -TAIL:].any()


def test_attention() -> None:
    """One query and one key a head: y, [2, B, 1, 1, 256], passes 2^31; inputs are expanded."""
    size = 256
    batch = PAST // 2 // size
    part = torch.randn(2, 1, 1, 1, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    heads = part.expand(2, batch, 1, 1, size)
    y = ops.attention_jet(heads, heads, heads, q=1)
    assert y.numel() > 2**31
    alone = ops.attention_jet(part, part, part, q=1)
    assert torch.equal(y[:, -1:], alone)


def test_directions() -> None:
    token = torch.arange(ROWS)
    whole = ops.sample_directions(token, 2, D, seed=0, dtype=torch.bfloat16)
    assert whole.numel() > 2**31
    alone = ops.sample_directions(token[-TAIL:], 2, D, seed=0, dtype=torch.bfloat16)
    assert_tail(whole, alone)
