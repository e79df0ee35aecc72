"""Programs of others that differentiate a backward, unmodified but for the context around them.

Each is compared with itself on torch's math attention, which it would have to run on otherwise.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from python_tests.models.oracles import math_attention

Context = Callable[[], AbstractContextManager[object]]


def check(program: Callable[[], list[Tensor]]) -> None:
    """Run a program in both ways, from one state of the generator."""
    results = []
    for context in (jx.differentiable, math_attention):
        torch.manual_seed(0)
        with context():
            results.append(program())
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


# ---- libraries ---------------------------------------------------------------------------------


@pytest.fixture
def transformers() -> ModuleType:
    module: ModuleType = pytest.importorskip("transformers")
    return module


class LanguageModel(nn.Module):
    """A Llama as curvature libraries want a model: from ids to what cross entropy takes."""

    def __init__(self, transformers: ModuleType) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="sdpa",
        )
        self.model = transformers.LlamaForCausalLM(config).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits.transpose(1, 2)


IDS = torch.arange(18).view(2, 9) % 11


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_pyhessian(transformers: ModuleType) -> None:
    pyhessian = pytest.importorskip("pyhessian")

    def program() -> list[Tensor]:
        model = LanguageModel(transformers)
        hessian = pyhessian.hessian(model, nn.CrossEntropyLoss(), data=(IDS, IDS), cuda=False)
        values, _ = hessian.eigenvalues(maxIter=8, tol=0, top_n=1)
        return [torch.tensor(values, dtype=torch.float64)]

    check(program)


# ---- what papers' code does --------------------------------------------------------------------


def encoder(width: int = 16) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def gradients_of(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [g for g in gradients if g is not None]


def test_a_force_field() -> None:
    """Energies and forces of atoms that see each other within a radius, padded to one length."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder, self.energy = nn.Linear(3, 16), encoder(), nn.Linear(16, 1)

        def forward(self, positions: Tensor, padding: Tensor) -> Tensor:
            hidden = self.encoder(self.embed(positions), src_key_padding_mask=padding)
            return self.energy(hidden).squeeze(-1).masked_fill(padding, 0).sum(-1)

    def program() -> list[Tensor]:
        field = Field().double()
        positions = torch.randn(3, 6, 3, dtype=torch.float64, requires_grad=True)
        padding = torch.arange(6) >= torch.tensor([[6], [4], [5]])
        energies = field(positions, padding)
        (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        targets = torch.randn_like(slope)
        loss = energies.square().mean() + 100 * F.mse_loss(-slope, targets)
        return gradients_of(loss, list(field.parameters()))

    check(program)


def test_second_order_maml() -> None:
    """Of two steps, so that the outer gradient holds third derivatives too."""

    def program() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 16), encoder(), nn.Linear(16, 1)).double()
        weights = dict(model.named_parameters())
        x, y = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 1, dtype=torch.float64)
        moved: dict[str, Tensor] = dict(weights)
        for _ in range(2):
            inner = F.mse_loss(functional_call(model, moved, (x,)), y)
            slopes = torch.autograd.grad(inner, list(moved.values()), create_graph=True)
            moved = {n: w - 0.05 * g for (n, w), g in zip(moved.items(), slopes, strict=True)}
        outer = F.mse_loss(functional_call(model, moved, (x.flip(1),)), y.flip(1))
        return gradients_of(outer, list(weights.values()))

    check(program)


# ---- torch's forward mode ------------------------------------------------------------------------


def flow() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network of points and times, points, and velocities."""
    model = nn.Sequential(nn.Linear(5, 16), encoder(), nn.Linear(16, 4)).double()
    return model, *torch.randn(2, 2, 6, 4, dtype=torch.float64)


def at(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    return model(torch.cat([z, t.expand(*z.shape[:-1], 1)], -1))


def test_a_meanflow_loss() -> None:
    """A closure, its derivative along the path, and the value's backward."""

    def program() -> list[Tensor]:
        model, z, v = flow()
        t, r = torch.full((2, 1, 1), 0.8).double(), torch.full((2, 1, 1), 0.3).double()

        def u_func(z: Tensor, t: Tensor, r: Tensor) -> Tensor:
            return at(model, z, t) + r * 0

        tangents = (v, torch.ones_like(t), torch.zeros_like(r))
        u, dudt = torch.func.jvp(u_func, (z, t, r), tangents)
        target = (v - (t - r) * dudt).detach()
        return gradients_of((u - target).square().mean(), list(model.parameters()))

    check(program)


def test_an_energy_based_transformer() -> None:
    """Steps down an energy that training differentiates, with math attention forced."""

    def program() -> list[Tensor]:
        model, z, v = flow()
        guess = v.clone().requires_grad_()
        for _ in range(2):
            with sdpa_kernel(SDPBackend.MATH):
                energy = at(model, guess, torch.ones(2, 1, 1).double()).square().sum()
            (slope,) = torch.autograd.grad(energy, guess, create_graph=True)
            guess = guess - 0.1 * slope
        return gradients_of((guess - z).square().mean(), list(model.parameters()))

    check(program)
