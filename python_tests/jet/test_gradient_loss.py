"""Losses of gradients by one jet, against torch's backward of a backward."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

import jachess_ext as jx
from jachess_ext.jet.compiled import regions as compiled_jets

Loss = Callable[[Tensor, object], Tensor]


class Energy(nn.Module):
    """A number for each of a batch of token sequences, with attention."""

    def __init__(self, width: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.out(torch.tanh(self.dropout(x + y))).sum((1, 2))


class Case(NamedTuple):
    fn: Callable[..., Tensor]
    x: object
    loss: Loss
    parameters: list[Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def forces() -> Case:
    model, x, energies, targets = Energy().double(), draw(3, 5, 12), draw(3), draw(3, 5, 12)

    def loss(value: Tensor, gradient: Tensor) -> Tensor:
        return F.mse_loss(value, energies) + 10 * F.mse_loss(-gradient, targets)

    return Case(model, x, loss, list(model.parameters()))


def gradient_penalty() -> Case:
    """WGAN-GP: of points between data and samples; the critic's own loss is apart."""
    model = Energy().double()
    x = torch.lerp(draw(3, 5, 12), draw(3, 5, 12), torch.rand(3, 1, 1, dtype=torch.float64))

    def loss(value: Tensor, gradient: Tensor) -> Tensor:
        return (gradient.flatten(1).norm(dim=1) - 1).square().mean()

    return Case(model, x, loss, list(model.parameters()))


def score_of_an_energy() -> Case:
    """Denoising score matching; the scale of the noise is learned too, outside of the energy."""
    model, x, noise = Energy().double(), draw(3, 5, 12), draw(3, 5, 12)
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def loss(value: Tensor, gradient: Tensor) -> Tensor:
        return (scale * gradient - noise).square().sum((1, 2)).mean()

    return Case(model, x + 0.3 * noise, loss, [*model.parameters(), scale])


def input_gradient_regularisation() -> Case:
    """A classifier's own loss, and the norm of its gradient at the embeddings, which learn."""
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 4)).double()
    embeddings = nn.Parameter(draw(6, 12))
    labels = torch.tensor([0, 3, 1, 1, 2, 0])

    def fn(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), labels)

    def loss(value: Tensor, gradient: Tensor) -> Tensor:
        return value + 0.1 * gradient.square().sum()

    return Case(fn, embeddings, loss, [*model.parameters(), embeddings])


def one_step_of_sgd() -> Case:
    """A meta-gradient: the loss after a step, by the parameters, the rate and the task's data."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    weights = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    data = draw(7, 4).requires_grad_()
    targets, tests, answers = draw(7, 1), draw(5, 4), draw(5, 1)

    def fn(weights: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(functional_call(model, weights, (data,)), targets)

    def loss(value: Tensor, gradient: dict[str, Tensor]) -> Tensor:
        moved = {name: weights[name] - rate * gradient[name] for name in weights}
        return F.mse_loss(functional_call(model, moved, (tests,)), answers)

    return Case(fn, weights, loss, [*weights.values(), rate, data])


CASES = [
    forces,
    gradient_penalty,
    score_of_an_energy,
    input_gradient_regularisation,
    one_step_of_sgd,
]


def by_double_backward(case: Case) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss and its gradients as `create_graph` gives them, through math attention."""
    leaves = tree_leaves(case.x)
    for leaf in leaves:
        leaf.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        value = case.fn(case.x)
        gradients = iter(torch.autograd.grad(value.sum(), leaves, create_graph=True))
        total = case.loss(value, tree_map(lambda _: next(gradients), case.x))
        results = torch.autograd.grad(total, case.parameters, allow_unused=True)
    return total.detach(), list(results)


def check(case: Case, compute: Callable[[Case], Tensor]) -> None:
    total, expected = by_double_backward(case)
    result = compute(case)
    torch.testing.assert_close(result.detach(), total, rtol=1e-10, atol=0)
    gradients = torch.autograd.grad(result, case.parameters, allow_unused=True)
    for parameter, *both in zip(case.parameters, gradients, expected, strict=True):
        gradient, value = (torch.zeros_like(parameter) if g is None else g for g in both)
        torch.testing.assert_close(gradient, value, rtol=1e-9, atol=1e-12)


def eager(case: Case) -> Tensor:
    return jx.gradient_loss(case.fn, case.x, case.loss).loss


@pytest.mark.parametrize("make", CASES)
def test_five_losses(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    check(make(), eager)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=() if make in (forces, one_step_of_sgd) else pytest.mark.slow)
        for make in CASES
    ],
)
def test_one_graph(make: Callable[[], Case], fresh_dynamo: None) -> None:
    case = make()

    @partial(torch.compile, fullgraph=compiled_jets.MODULES_IN_GRAPHS, backend="aot_eager")
    def compiled(x: Tensor) -> Tensor:
        return jx.gradient_loss(case.fn, x, case.loss).loss

    check(case, lambda case: compiled(case.x))


def test_value_and_gradient() -> None:
    """Nested as x is; integers have none."""

    def fn(x: dict[str, Tensor], y: list[Tensor], label: Tensor) -> Tensor:
        return (x["a"].sin() * y[0] ** 2)[label]

    x, y, label = {"a": draw(3)}, [draw(3)], torch.tensor(1)
    result = jx.gradient_loss(
        fn, (x, y, label), lambda value, gradient: value * gradient[0]["a"].sum()
    )
    first, second, third = result.gradient
    torch.testing.assert_close(result.value, fn(x, y, label))
    one = F.one_hot(label, 3)
    torch.testing.assert_close(first["a"], one * x["a"].cos() * y[0] ** 2)
    torch.testing.assert_close(second[0], one * x["a"].sin() * 2 * y[0])
    assert third is None
    assert not result.value.requires_grad and not first["a"].requires_grad


def test_complex_points() -> None:
    weight = draw(3).requires_grad_()
    case = Case(
        lambda x: ((x * weight).abs() ** 2 + (weight * x.real) ** 3).sum(),
        torch.randn(3, dtype=torch.complex128),
        lambda value, gradient: (gradient.abs() ** 2 * torch.arange(3)).sum() + gradient.imag.sum(),
        [weight],
    )
    check(case, eager)


def test_a_loss_of_constants() -> None:
    result = jx.gradient_loss(lambda x: x.new_ones(2), draw(3), lambda value, gradient: value.sum())
    assert result.loss == 2
    assert torch.equal(result.gradient, torch.zeros(3, dtype=torch.float64))


def test_random_numbers_are_refused() -> None:
    model = Energy(dropout=0.5).double()
    with pytest.raises(RuntimeError, match="draws random numbers"):
        jx.gradient_loss(model, draw(3, 5, 12), lambda value, gradient: gradient.square().sum())
    torch.manual_seed(0)
    case = forces()
    model = Energy(dropout=0.5).double().eval()
    check(Case(model, case.x, case.loss, list(model.parameters())), eager)


def test_a_loss_of_several_numbers() -> None:
    with pytest.raises(ValueError, match="expected one number"):
        jx.gradient_loss(torch.sin, draw(3), lambda value, gradient: gradient)


def test_a_lazy_layer_is_refused_until_it_was_called(
    monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    """It draws its weights in the first of two runs, and a graph cannot hold it."""
    monkeypatch.setattr(compiled_jets, "_WARNED_REASONS", set())

    def loss(value: Tensor, gradient: Tensor) -> Tensor:
        return gradient.square().sum()

    def compute(x: Tensor) -> Tensor:
        return jx.gradient_loss(model, x, loss).loss

    x, model = draw(3, 5), nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1)).double()
    with pytest.raises(RuntimeError, match="lazy layer, until it was called"):
        compute(x)
    expected = compute(x)
    model[0] = nn.LazyLinear(4, dtype=torch.float64)
    jvp = torch.compile(lambda x: jx.jvp(model, (x,), (x,)), backend="aot_eager", fullgraph=True)
    reason = "lazy layers" if compiled_jets.MODULES_IN_GRAPHS else "torch 2.12"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        jvp(x)
    model(x)
    assert expected > 0
    if compiled_jets.MODULES_IN_GRAPHS:
        torch.testing.assert_close(jvp(x), jx.jvp(model, (x,), (x,)))
