"""Calls that run a function more than once, of functions that are not the same each time.

Each is right, as if the function had run once, or an error.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import jachess_ext as jx


class Changing(nn.Module):
    """Σ_i w_i s φ(x_i), of one number a row, where s changes from run to run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))

    def factor(self, x: Tensor) -> Tensor | float:
        raise NotImplementedError

    def terms(self, x: Tensor) -> Tensor:
        return self.weight * x.square() * self.factor(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.terms(x).sum(-1)


class Counter(Changing):
    calls = 0

    def factor(self, x: Tensor) -> float:
        self.calls += 1
        return 1 + 0.5 * self.calls


class EveryOther(Changing):
    """A term in every other run, as a lazy regulariser has it."""

    calls = 0

    def factor(self, x: Tensor) -> float:
        self.calls += 1
        return 1.5 if self.calls % 2 else 1.0


class EveryThird(EveryOther):
    def factor(self, x: Tensor) -> float:
        self.calls += 1
        return 1.5 if self.calls % 3 == 2 else 1.0


class CounterInABuffer(Changing):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def factor(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 1 + 0.5 * self.calls


class OtherBuffer(Changing):
    """A buffer that is replaced, not written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def factor(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().square().mean()
        return self.mean


class RunningMaximum(Changing):
    """Written, but the same twice: this one may not be refused in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.zeros((), dtype=torch.float64))

    def factor(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.most.copy_(torch.maximum(self.most, x.detach().abs().amax()))
        return self.most.clone()


class OwnGenerator(Changing):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __deepcopy__(self, memo: object) -> OwnGenerator:
        result = OwnGenerator()
        result.generator.set_state(self.generator.get_state())
        return result

    def factor(self, x: Tensor) -> Tensor:
        return torch.rand((), generator=self.generator, dtype=x.dtype)


class NumPy(Changing):
    def factor(self, x: Tensor) -> float:
        return 1 + float(np.random.rand())


class Python(Changing):
    def factor(self, x: Tensor) -> float:
        return random.uniform(0.5, 1.5)


class Noise(Changing):
    def factor(self, x: Tensor) -> Tensor:
        return torch.rand(4, dtype=x.dtype)


class AttentionDropout(Changing):
    def factor(self, x: Tensor) -> Tensor:
        q = torch.ones(1, 1, 4, 4, dtype=x.dtype)
        y = F.scaled_dot_product_attention(q, q, q + torch.arange(4.0)[:, None], dropout_p=0.5)
        return y[0, 0, 0]


class StochasticDepth(Changing):
    def factor(self, x: Tensor) -> float:
        return 2.0 if torch.rand(()) < 0.5 else 1.0


CHANGING = [
    *(Counter, EveryOther, EveryThird, CounterInABuffer, OtherBuffer, RunningMaximum, OwnGenerator),
    *(NumPy, Python, Noise, AttentionDropout, StochasticDepth),
]
IN_A_GRAPH = {Counter, CounterInABuffer, NumPy, Noise}  # in the quick suite: one of each kind
SAME = {RunningMaximum}  # not refused, but in a graph, where torch.func refuses writes


def seed(number: int = 0) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
    torch._dynamo.reset()


def points() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 0.5 + torch.rand(6, 4, dtype=torch.float64, generator=generator)


def right_or_error(
    kind: type[Changing], compute: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
) -> None:
    """``compute`` returns two tensors that are equal of a function that is the same each time."""
    seed()
    x = points()
    if kind in SAME and compute is not compiled_gradient_loss:
        result, expected = compute(kind(), x)
    else:
        try:
            result, expected = compute(kind(), x)
        except (RuntimeError, torch._dynamo.exc.Unsupported):
            return
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
    assert result.abs().sum() > 0


def slopes(value: Tensor, gradient: Tensor) -> Tensor:
    return gradient.square().sum().sqrt() + 0.3 * value.sum()


def eager_gradient_loss(
    model: nn.Module, x: Tensor, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Of degree 1 in the weights: ⟨w, ∂L/∂w⟩ is L."""
    run = lambda x: jx.gradient_loss(model, x, slopes).loss  # noqa: E731
    loss = (torch.compile(run, backend=backend) if backend else run)(x)
    (gradient,) = torch.autograd.grad(loss, [model.weight])
    return (model.weight * gradient).sum().detach(), loss.detach()


def compiled_gradient_loss(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return eager_gradient_loss(model, x, "aot_eager")


# Of degree 2 in x, each row by itself: along x itself the Hessian is twice the value.


def squares(value: Tensor, x: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return (second * x.T.square()).sum(0).detach(), 2 * value.detach()


def in_chunks(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    result = jx.hessian_diagonal(model, x, chunk_size=1, check=False)
    return squares(result.value, x, result.diagonal)


def checked(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    result = jx.hessian_diagonal(model, x, chunk_size=3)
    return squares(result.value, x, result.diagonal)


def of_both_signs(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    directions = torch.diag_embed(x).transpose(0, 1)
    both = torch.cat([directions, directions[:1]])
    result = jx.laplacian(model, x, directions=both, weights=[2.0, 1, 1, 1, -1], check=False)
    return result.laplacian.detach(), 2 * result.value.detach()


def row_weights(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    weights = x.T.square().contiguous()
    result = jx.laplacian(model, x, weights=weights, chunk_size=2, check=False)
    return result.laplacian.detach(), 2 * result.value.detach()


def of_divergence(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each entry by itself and of degree 2: ∂f_i/∂x_i is 2 f_i / x_i."""
    result = jx.divergence(model.terms, x, chunk_size=1, check=False)
    return result.divergence.detach(), (2 * result.value / x).sum(-1).detach()


CALLS = [in_chunks, checked, of_both_signs, row_weights, of_divergence]


@pytest.mark.parametrize("compute", [eager_gradient_loss, *CALLS])
@pytest.mark.parametrize("kind", CHANGING)
def test_right_or_an_error(
    kind: type[Changing], compute: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
) -> None:
    right_or_error(kind, compute)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in IN_A_GRAPH else pytest.mark.slow) for k in CHANGING],
)
def test_right_or_an_error_in_a_graph(kind: type[Changing]) -> None:
    right_or_error(kind, compiled_gradient_loss)


# ---- gradient_loss against one run with create_graph --------------------------------------------


def by_create_graph(
    model: nn.Module, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    x = x.clone().requires_grad_()
    value = model(x)
    (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    total = loss(value, gradient)
    return [total.detach(), *torch.autograd.grad(total, list(model.parameters()))]


def close(results: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for result, value in zip(results, expected, strict=True):
        off = (result.double() - value).norm() / value.norm()
        assert off < 30 * torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_loss_that_draws_random_numbers(backend: str | None) -> None:
    """Runs once, in a graph too: the number is that of which the gradients are."""
    seed()
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)).double(),
        points(),
    )

    def loss(value: Tensor, gradient: Tensor) -> Tensor:
        return (gradient * torch.rand_like(gradient)).square().sum().sqrt() + F.dropout(value).sum()

    def compute(x: Tensor) -> Tensor:
        return jx.gradient_loss(model, x, loss).loss

    number = (torch.compile(compute, backend=backend) if backend else compute)(x)
    (gradient,) = torch.autograd.grad(number, [model[2].weight])  # in which the loss is linear
    torch.testing.assert_close((model[2].weight * gradient).sum(), number)


def test_spectral_norm() -> None:
    """Its buffers are written in training mode, where it is refused; it is right in eval mode."""
    seed()
    model, x = (
        nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1)).double(),
        points(),
    )
    with pytest.raises(RuntimeError, match="spectral_norm"):
        jx.gradient_loss(model, x, slopes)
    model.eval()
    expected = by_create_graph(model, x, slopes)
    loss = jx.gradient_loss(model, x, slopes).loss
    close([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], expected, x.dtype)


@pytest.mark.parametrize("rows", [4, 4000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_sizes(dtype: torch.dtype, rows: int) -> None:
    """⟨u, g⟩ is twice the loss, and too large for float16 where that is not."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1, bias=False)).double()
    for parameter in wide.parameters():
        parameter.data *= 4
    x = torch.randn(rows, 8, dtype=torch.float64)

    def loss(value: Tensor, gradient: Tensor) -> Tensor:
        return scale * gradient.square().sum()

    scale = 1.0
    scale = 40000 / float(by_create_graph(wide, x, loss)[0])
    expected = by_create_graph(wide, x, loss)
    model = copy.deepcopy(wide).to(dtype)
    total = jx.gradient_loss(model, x.to(dtype), loss).loss
    gradients = torch.autograd.grad(total / 40000, list(model.parameters()))
    close([total.detach(), *(40000 * g.double() for g in gradients)], expected, dtype)


def test_values_that_cancel_are_no_other_function() -> None:
    """The jet's rounding is thousands of times that of the value; and no other run's."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)

    def fn(x: Tensor) -> Tensor:
        return (layer(x).tanh() + 1e4).sum(-1) - 64e4

    x = torch.randn(50, 64)
    for _ in range(3):
        assert torch.isfinite(jx.gradient_loss(fn, x, slopes).loss)
        jx.laplacian(fn, x, chunk_size=5, check=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_16_bits_is_the_same_function(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(3, 16), layer, nn.Linear(16, 1)).to(dtype)
    for _ in range(3):
        x = torch.randn(4, 7, 3, dtype=dtype)
        assert torch.isfinite(jx.gradient_loss(model, x, slopes).loss)
        jx.laplacian(lambda x: model(x).float().sum((1, 2)), x, chunk_size=5, check=False)
