"""`jx.jvp` through attention, and a MeanFlow step, against what torch offers.

Attention: 8 heads of 64, causal, one sequence.  torch.func.jvp cannot go through fused attention,
so its users write it out, or ask for the "math" backend, which is the same in C++.  Three ways:

    forward             output and tangent, nothing recorded
    forward + backward  gradients of a function of both, in query, key and value
    target              the tangent is a constant (differentiable=False), as in MeanFlow; the
                        backward goes through the output alone.  torch has no such switch: there
                        the tangent is detached after it was computed

MeanFlow (Geng et al. 2025, arXiv 2505.13447): a step of a small DiT (adaptive layer norms, fused
attention) trained towards u = v - (t - r) du/dt, against a flow-matching step of the same model:
forward, loss and backward, no optimiser.  Peak memory is in `benchmarks.memory`.

On a GPU, beside the Triton kernels of jvp_flash_attention (pip install jvp_flash_attention):

    python -m pytest benchmarks/bench_jvp.py --device cuda --dtype bfloat16 \
        --jvp-baseline jvp_flash_attention.jvp_attention:attention

which calls that function as ``attention(query, key, value, causal=True)`` within torch.func.jvp, in
place of the written-out one.  That has not been run: it needs a GPU.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from benchmarks.common.timing import Step
from benchmarks.conftest import Timed

HEADS, SIZE = 8, 64
SIZES, QUICK = [128, 256, 512, 1024, 2048], [32]
WAYS = ("forward", "forward + backward", "target")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- attention ---------------------------------------------------------------------------------


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    shown = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    return torch.softmax(scores.masked_fill(~shown, -math.inf), -1) @ value


def math_backend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return fused(query, key, value)


def attention_named(name: str) -> Attend:
    """``MODULE:FUNCTION``, called with causal=True."""
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    return lambda *qkv: found(*qkv, causal=True)


def attention_step(kind: str, way: str, tokens: int, place: dict[str, Any]) -> Step:
    """One jvp along random directions; ``kind`` names the attention, "ours" is `jx.jvp`."""
    torch.manual_seed(0)
    primals = tuple(torch.randn(1, HEADS, tokens, SIZE, **place) for _ in range(3))
    tangents = tuple(torch.randn(1, HEADS, tokens, SIZE, **place) for _ in range(3))
    gradients = way != "forward"
    for primal in primals:
        primal.requires_grad_(gradients)

    def derivative() -> tuple[Tensor, Tensor]:
        if kind == "ours":
            return jx.jvp(fused, primals, tangents, differentiable=way != "target")
        attend = {"written out": written_out, "math backend": math_backend}.get(kind)
        found = torch.func.jvp(attend or attention_named(kind), primals, tangents)
        return (found[0], found[1].detach()) if way == "target" else found

    def step() -> None:
        with torch.set_grad_enabled(gradients):
            output, tangent = derivative()
            if gradients:
                torch.autograd.grad((output * tangent).sum(), primals)

    return step


# ---- MeanFlow ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A DiT block: shift, scale and gate of both halves come from the condition."""

    def __init__(self, width: int, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(condition)[:, None].chunk(6, -1)
        h = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        qkv = self.qkv(h).unflatten(-1, (3, -1, SIZE)).permute(2, 0, 3, 1, 4)
        attended = self.attend(*qkv.unbind(0)).transpose(1, 2).flatten(-2)
        x = x + gate * self.out(attended)
        h = F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))


class DiT(nn.Module):
    """Velocity ``[B, T, d]`` of tokens ``[B, T, d]`` between times r and t ``[B]``."""

    def __init__(self, width: int, depth: int, features: int, attend: Attend) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(features, width), nn.Linear(width, features)
        self.times = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, attend) for _ in range(depth))

    def forward(self, x: Tensor, r: Tensor, t: Tensor) -> Tensor:
        rates = torch.arange(1, 17, dtype=x.dtype, device=x.device)
        angles = torch.cat([r[:, None] * rates, t[:, None] * rates], -1)
        condition = F.silu(self.times(torch.cat([angles.sin(), angles.cos()], -1)))
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, condition)
        return self.leave(F.layer_norm(h, h.shape[-1:]))


def everywhere(*qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*qkv)


def everywhere_written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return torch.softmax(scores, -1) @ value


def training_step(kind: str, place: dict[str, Any], quick: bool = False) -> Step:
    """Forward, loss and backward; ``kind`` is "plain" (flow matching) or how MeanFlow's
    derivative is taken."""
    torch.manual_seed(0)
    batch, tokens, width, depth = (2, 16, 64, 1) if quick else (2, 256, 384, 6)
    attend = everywhere_written_out if kind == "torch.func" else everywhere
    model = DiT(width, depth, 16, attend).to(**place)
    noise, data = torch.randn(2, batch, tokens, 16, **place)
    r, t = torch.rand(2, batch, **place).sort(0).values
    x, velocity = torch.lerp(data, noise, t[:, None, None]), noise - data

    def loss() -> Tensor:
        if kind == "plain":
            return (model(x, t, t) - velocity).square().mean()
        inputs = (x, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t))
        if kind == "torch.func":
            output, slope = torch.func.jvp(model, *inputs)
        else:
            output, slope = jx.jvp(model, *inputs, differentiable=kind == "kept graph")
        target = velocity - (t - r)[:, None, None] * slope.detach()
        return (output - target).square().mean()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return step


# ---- timing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["ours", "written out", "math backend", "--jvp-baseline"])
@pytest.mark.parametrize("way", WAYS)
def test_attention(
    timed: Timed,
    request: pytest.FixtureRequest,
    place: dict[str, Any],
    size: int,
    way: str,
    program: str,
) -> None:
    if program == "--jvp-baseline":
        program = request.config.getoption("jvp_baseline") or pytest.skip("no --jvp-baseline")
    step = attention_step(program, way, size, place)
    timed(step, f"jvp of attention, {way}, H{HEADS}-T{size}-D{SIZE}-causal")


@pytest.mark.parametrize("program", ["plain", "no graph", "kept graph", "torch.func"])
def test_meanflow(timed: Timed, place: dict[str, Any], quick: bool, program: str) -> None:
    step = training_step(program, place, quick)
    timed(step, "MeanFlow step, " + ("tiny" if quick else "DiT6x384-B2-T256"))
