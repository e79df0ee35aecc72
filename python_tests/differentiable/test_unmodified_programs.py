"""Programs of others that differentiate a backward, unmodified but for the context around them.

Each is compared with itself on torch's math attention, which it would have to run on otherwise.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
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

    def __init__(self, transformers: ModuleType, activation: str = "silu") -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_act=activation,
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


def test_curvlinops(transformers: ModuleType) -> None:
    curvlinops = pytest.importorskip("curvlinops")

    def program() -> list[Tensor]:
        model = LanguageModel(transformers, "gelu")
        hessian = curvlinops.HessianLinearOperator(
            model, nn.CrossEntropyLoss(), list(model.parameters()), [(IDS, IDS)]
        )
        return [hessian @ torch.randn(hessian.shape[1], dtype=torch.float64)]

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


def test_a_gradient_penalty() -> None:
    """A critic with attention over the places of a picture, as in SAGAN."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 16, 3, 2, 1), nn.Linear(16, 1)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, pictures: Tensor) -> Tensor:
            places = F.leaky_relu(self.conv(pictures), 0.2).flatten(2).mT
            mixed, _ = self.attention(places, places, places, need_weights=False)
            return self.out((places + mixed).mean(1))

    def program() -> list[Tensor]:
        critic = Critic().double()
        real, fake = torch.randn(2, 4, 1, 8, 8, dtype=torch.float64)
        between = torch.lerp(
            real, fake, torch.rand(4, 1, 1, 1, dtype=torch.float64)
        ).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        return gradients_of(loss, list(critic.parameters()))

    check(program)


@pytest.mark.parametrize("steps", [1, 2])
def test_second_order_maml(steps: int) -> None:
    """With two steps the outer gradient holds third derivatives too."""

    def program() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 16), encoder(), nn.Linear(16, 1)).double()
        weights = dict(model.named_parameters())
        x, y = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 1, dtype=torch.float64)
        moved: dict[str, Tensor] = dict(weights)
        for _ in range(steps):
            inner = F.mse_loss(functional_call(model, moved, (x,)), y)
            slopes = torch.autograd.grad(inner, list(moved.values()), create_graph=True)
            moved = {n: w - 0.05 * g for (n, w), g in zip(moved.items(), slopes, strict=True)}
        outer = F.mse_loss(functional_call(model, moved, (x.flip(1),)), y.flip(1))
        return gradients_of(outer, list(weights.values()))

    check(program)


def test_an_influence_function() -> None:
    """(H + λ)⁻¹ g by conjugate gradients over products with the Hessian."""

    def program() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 16), encoder(), nn.Linear(16, 1)).double()
        parameters = list(model.parameters())
        x, y = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(4, 5, 1, dtype=torch.float64)
        loss = F.mse_loss(model(x), y)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        flat = torch.cat([g.flatten() for g in slopes])

        def product(v: Tensor) -> Tensor:
            parts = torch.autograd.grad(flat @ v, parameters, retain_graph=True)
            return torch.cat([p.flatten() for p in parts]) + 10 * v

        right = torch.cat(
            [g.flatten() for g in torch.autograd.grad(F.mse_loss(model(x[:1]), y[:1]), parameters)]
        )
        result, residual = torch.zeros_like(right), right.clone()
        step, size = residual.clone(), residual @ residual
        for _ in range(6):
            pushed = product(step)
            length = size / (step @ pushed)
            result, residual = result + length * step, residual - length * pushed
            size, before = residual @ residual, size
            step = residual + size / before * step
        return [result]

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


@pytest.mark.parametrize("forced", [False, True])
def test_a_consistency_models_tangent(forced: bool) -> None:
    """Without a graph, by `torch.func` or `autograd.functional`, with flash attention off."""

    def program() -> list[Tensor]:
        model, z, v = flow()
        t = torch.full((2, 1, 1), 0.8).double()
        flags = torch.backends.cuda.flash_sdp_enabled()
        torch.backends.cuda.enable_flash_sdp(not forced and flags)
        try:
            with torch.no_grad():
                first = torch.func.jvp(partial(at, model), (z, t), (v, torch.ones_like(t)))
            second = torch.autograd.functional.jvp(
                partial(at, model), (z, t), (v, torch.ones_like(t))
            )
        finally:
            torch.backends.cuda.enable_flash_sdp(flags)
        return [*first, *second]

    check(program)


def test_gradients_of_samples() -> None:
    """As data attribution takes them (TRAK)."""

    def program() -> list[Tensor]:
        model, z, v = flow()
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights: dict[str, Tensor], z: Tensor, v: Tensor) -> Tensor:
            time = torch.full((1, 1, 1), 0.5).double()
            x = torch.cat([z[None], time.expand(1, len(z), 1)], -1)
            return (functional_call(model, weights, (x,)) - v).square().mean()

        rows = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, z, v)
        product = torch.func.jvp(
            torch.func.grad(lambda w: loss(w, z[0], v[0])), (weights,), (weights,)
        )[1]
        return [*rows.values(), *product.values()]

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


def test_forces_with_a_trained_radial_mask() -> None:
    """The bias of attention is a trained function of the distances."""

    def program() -> list[Tensor]:
        positions = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
        radial = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        embed, read = nn.Linear(3, 8).double(), nn.Linear(8, 1).double()
        apart = positions[:, :, None] - positions[:, None]
        distance = (apart.square().sum(-1, keepdim=True) + 0.1).sqrt()
        bias = radial(distance).movedim(-1, 1)
        heads = embed(positions).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
        energy = read(mixed.transpose(1, 2).flatten(2)).tanh().sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        trained = [*radial.parameters(), *embed.parameters(), *read.parameters()]
        return [slope, *gradients_of(slope.square().sum(), trained)]

    check(program)
