"""From streams and squares to norms: values, gradients, NaN, halves."""

from __future__ import annotations

import math

import pytest
import torch

from jachess_ext.jet.layout import make_layout
from jachess_ext.ops.jet_norms import jet_mean_squares
from jachess_ext.smoothness.estimators import hessian_norm, safe_sqrt


def test_safe_sqrt() -> None:
    x = torch.tensor([0.0, 4.0, 1e-300], dtype=torch.float64, requires_grad=True)
    y = safe_sqrt(x)
    torch.testing.assert_close(y, x.sqrt())
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0, 0.25, 0.5e150], dtype=torch.float64))
    bad = safe_sqrt(torch.tensor([math.nan, math.inf]))
    assert bad[0].isnan() and bad[1].isinf(), "a broken norm must not turn into a smooth one"


@pytest.mark.parametrize("indices", [None, [0, 3]])
@pytest.mark.parametrize("count, order", [(1, 1), (2, 2), (3, 2)])
def test_stream_squares(count: int, order: int, indices: list | None) -> None:
    layout = make_layout(count, order)
    torch.manual_seed(0)
    streams = torch.randn(layout.streams, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    chosen = None if indices is None else torch.tensor(indices)
    tokens = torch.tensor([[True, True, False], [False, True, True]])
    first, second = jet_mean_squares(streams, layout.directions, tokens, chosen)
    mean = sum((streams[1 + i] ** 2).sum(-1) for i in range(count)) / count
    torch.testing.assert_close(first, mean * tokens)
    if layout.pairs:
        kept = streams[1 + count :] if indices is None else streams[1 + count :][..., indices]
        torch.testing.assert_close(second, (kept**2).mean(0) * tokens[..., None])

    def outputs(s: torch.Tensor) -> tuple:
        return jet_mean_squares(s, layout.directions, tokens, chosen)

    assert torch.autograd.gradcheck(outputs, streams)
    assert torch.autograd.gradgradcheck(outputs, streams)


def test_halves_are_summed_in_single() -> None:
    layout = make_layout(2, 2)
    streams = torch.full((layout.streams, 1, 40_000), 0.1, dtype=torch.bfloat16)
    first, second = jet_mean_squares(
        streams, layout.directions, torch.ones(1, dtype=torch.bool), None
    )
    assert first.dtype == second.dtype == torch.float32
    exact = 40_000 * streams[0, 0, 0].double().item() ** 2
    # 40,000 roundings of 2⁻²⁴ bound single precision's error by 2e-3; bfloat16 would stop at 64.
    assert first.item() == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("squared", [False, True])
def test_hessian_norms(squared: bool) -> None:
    squares = torch.tensor([[4.0, 9.0], [1.0, 0.0]], dtype=torch.float64)
    arguments = {"pairs": 0, "scale": 0.5, "squared": squared}
    per_dimension = hessian_norm(squares, per_dimension=True, **arguments)
    tensor = hessian_norm(squares, per_dimension=False, **arguments)
    assert per_dimension.tolist() == ([6.5, 0.5] if squared else [2.5, 0.5])
    assert tensor.tolist() == pytest.approx([13.0, 1.0] if squared else [13**0.5, 1.0])
    corrected = hessian_norm(squares, per_dimension=True, **(arguments | {"pairs": 1}))
    factor = 1.0 if squared else math.sqrt(math.pi / 2)  # 1/c_1, c_1 = E|N(0, 1)|
    torch.testing.assert_close(corrected, per_dimension * factor)
