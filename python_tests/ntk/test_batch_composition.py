"""No mixing of samples goes unseen, whatever it passes through, under any memory budget.

Refused is what mixes in the batch that was given, however small the blocks are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import jachess_ext as jx
from python_tests.covering import pairs

from .oracles import error, kernel

Mix = Callable[[Tensor], Tensor]

MIX: dict[str, Mix] = {
    "mean": lambda y: y - y.mean(0),
    "detached mean": lambda y: y - y.mean(0).detach(),
    "gradients alone": lambda y: y + y.mean(0) - y.mean(0).detach(),
    "gradients of a later one": lambda y: y + y[-1:] - y[-1:].detach(),
    "global norm": lambda y: y * (0.1 / y.norm()).clamp(max=1),
    "detached norm": lambda y: y * (0.1 / y.norm().detach()).clamp(max=1),
    "greatest": lambda y: y / y.abs().amax(),
    "detached spread": lambda y: y / (y.var(0, correction=0).detach() + 1e-5).sqrt(),
    "pairs": lambda y: y + y[torch.arange(len(y)).bitwise_xor(1).clamp(max=len(y) - 1)] / 3,
    "nearest": lambda y: y + y[torch.cdist(y, y).fill_diagonal_(9e9).argmin(1)] / 3,
    "ranks": lambda y: y * y.detach().argsort(0).argsort(0),
    "neighbours": lambda y: y + y.roll(1, 0).detach() / 3,
    "the third from last": lambda y: y + y[[max(0, len(y) - 3)]].tanh(),
}


class Chained(nn.Module):
    """[N, 4] to [N, 2]: ``use(self, x, mix)`` with two parameters and a layer."""

    def __init__(self, use: Callable[[Any, Tensor, Mix], Tensor], mix: Mix, least: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.use = use
        self.mix = lambda y: mix(y) if len(y) >= least else y
        self.v = nn.Parameter(torch.randn(4, 4))
        self.w = nn.Parameter(torch.randn(4, 2))
        self.layer = nn.Linear(4, 2)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x, self.mix)


def _generated(self: Any, x: Tensor, mix: Mix) -> Tensor:
    """A layer whose weight is made of another one's outputs for the batch."""
    shift = mix(self.layer(x)) - self.layer(x)
    return F.linear(x, self.w.T) * (1 + shift.mean(1, keepdim=True))


USES: dict[str, Callable[[Any, Tensor, Mix], Tensor]] = {
    "a matrix product": lambda self, x, mix: mix(x @ self.v).tanh() @ self.w,
    "outputs of one": lambda self, x, mix: mix((x @ self.v).tanh() @ self.w),
    "a functional layer": lambda self, x, mix: mix(F.linear(x, self.v)).tanh() @ self.w,
    "tied weights": lambda self, x, mix: mix((x @ self.v).tanh() @ self.v.T) @ self.w,
    "weight norm": lambda self, x, mix: mix(self.normed(x)),
    "einsum": lambda self, x, mix: mix(torch.einsum("ni,io->no", x, self.w)),
    "one factor": lambda self, x, mix: mix(x[:, :2] * (self.w[0] @ self.w.T).sum()),
    "before a layer": lambda self, x, mix: self.layer(mix(x)).tanh(),
    "generated weights": _generated,
    "a power": lambda self, x, mix: mix(x[:, :2].abs() ** self.w[0].exp()),
}


def inputs(samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(samples, 4, generator=generator, dtype=torch.float64)


def _budget(model: nn.Module, x: Tensor, blocks: int) -> int:
    """Return the bytes under which the samples take about so many blocks."""
    with pytest.raises(ValueError, match="too few") as caught:
        jx.ntk(model, x, memory_budget=100)
    message = str(caught.value)
    kernel = int(message.split("the kernel takes ")[1].split(" ")[0])
    pair = int(message.split("a pair of samples ")[1].split(" ")[0])
    return int((kernel + pair * max(1, len(x) // blocks)) * 8 / 7) + 64


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jachess_ext.ntk: exact per-sample", RuntimeWarning)
        yield


def _answered(model: nn.Module, x: Tensor, blocks: int) -> Tensor | None:
    """Return the kernel, None where it was refused for mixing."""
    try:
        return jx.ntk(model, x, memory_budget=_budget(model, x, blocks))
    except RuntimeError as refusal:
        if "depend on the other samples" in str(refusal):
            return None
        raise


HARMLESS = [("before a layer", "gradients alone"), ("before a layer", "gradients of a later one")]
"""Ways that change neither outputs nor gradients of parameters."""


def _require_refused(use: str, mix: str, least: int, samples: int, *others: int) -> None:
    model, x = Chained(USES[use], MIX[mix], least), inputs(samples)
    expected = kernel(model, x) if (use, mix) in HARMLESS else None
    for blocks in (1, 3, *others):
        theta = _answered(model, x, blocks)
        if expected is None:
            assert theta is None, f"answered in {blocks} blocks"
        else:
            assert theta is not None and error(theta, expected) < 1e-10


@pytest.mark.parametrize("mix, use", pairs(MIX, USES, each=3))
def test_mixing_is_refused_under_every_budget(mix: str, use: str) -> None:
    """In batches of five at least, where two or four samples show nothing."""
    _require_refused(use, mix, 5, 7)


@pytest.mark.slow
@pytest.mark.parametrize(("least", "samples"), [(2, 2), (5, 5), (20, 24)])
@pytest.mark.parametrize("mix", MIX)
@pytest.mark.parametrize("use", USES)
def test_mixing_is_refused_in_every_batch(use: str, mix: str, least: int, samples: int) -> None:
    _require_refused(use, mix, least, samples, samples)


# ---- right models are answered ----------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(2, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.unflatten(1, (2, 2)))[0][:, -1])


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.Conv1d(1, 4, 3),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


def _functional(use: Callable[[Any, Tensor, Mix], Tensor]) -> nn.Module:
    return Chained(use, lambda y: y, 2)


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
    "a constant before a norm": lambda: nn.Sequential(
        nn.Linear(4, 5), nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 2)
    ),
    "outputs that cancel": lambda: nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)),
    "dead": lambda: nn.Sequential(nn.Linear(4, 5), nn.Threshold(9.0, 0.0), nn.Linear(5, 2)),
    "recurrent": Recurrent,
    "convolutional": _convolutional,
    "large": lambda: nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 2), Scale(1e4)),
    "small": lambda: nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 2), Scale(1e-4)),
    **{f"uses {name}": lambda use=use: _functional(use) for name, use in USES.items()},
}


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("name", RIGHT)
def test_right_models_are_answered(name: str) -> None:
    torch.manual_seed(5)
    model = RIGHT[name]().eval()
    for dtype, samples, equal in (
        (torch.float64, 5, True),
        (torch.float32, 2, False),
        (torch.float32, 9, False),
    ):
        x = inputs(samples).to(dtype)
        x = x[:1].repeat(samples, 1) if equal else x
        expected = kernel(model.to(dtype), x)
        for blocks in (1, samples):
            theta = jx.ntk(model, x, memory_budget=_budget(model, x, blocks))
            assert error(theta, expected) < (1e-10 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("name", [name for name in RIGHT if not name.startswith("uses")])
def test_right_models_in_narrow_types_are_answered(name: str) -> None:
    torch.manual_seed(5)
    model = RIGHT[name]().eval()
    for dtype, blocks in ((torch.bfloat16, 1), (torch.float16, 6)):
        x = inputs(6).to(dtype)
        jx.ntk(model.to(dtype), x, memory_budget=_budget(model, x, blocks))


def test_not_a_number_in_a_later_block_is_named() -> None:
    model, x = RIGHT["layers"]().double(), inputs(9)
    x[7] = torch.nan
    with pytest.raises(ValueError, match="outputs are NaN or infinite"):
        jx.ntk(model, x, memory_budget=_budget(model, inputs(9), 9))


def test_parameters_that_nothing_depends_on_have_no_kernel() -> None:
    model, x = Chained(USES["outputs of one"], lambda y: y, 2), inputs(5)
    for blocks in (1, 5):
        budget = _budget(model, x, blocks)
        theta = jx.ntk(model, x, parameters=["layer.weight"], memory_budget=budget)
        assert not theta.any()
