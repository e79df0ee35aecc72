"""Micro-benchmarks, timed by pytest-benchmark: what does the same thing is one group.

operators (`test_operator`): each operator by itself, forward and backward, S = 4 streams (q = 2,
second order) at the sizes a step of the shape has:

    operator    the compiled operator (left out where the device has none)
    floor       a copy of as many bytes as it must read and write (each input once, each output
                once); for attention, as many batched matrix products of its own sizes
    composed    attention by the jet rules without operators, which write T × T tensors

attention and MeanFlow (Geng et al. 2025, arXiv 2505.13447) are timed by `python -m
benchmarks.derivatives --parts attention_jvp meanflow`, which takes its programs from here: `jx.jvp`
through attention, 8 heads of 64, one sequence, beside torch.func.jvp, which cannot go through fused
attention, so that its users write it out, or ask for the "math" backend, the same in C++.  Three
ways:

    forward             output and tangent, nothing recorded
    forward + backward  gradients of a function of both, in query, key and value
    target              the tangent is a constant (differentiable=False), as in MeanFlow; the
                        backward goes through the output alone.  torch has no such switch: there
                        the tangent is detached after it was computed

and a step of a small DiT (adaptive layer norms, fused attention) trained towards
u = v - (t - r) du/dt, against a flow-matching step of the same model: forward, loss and backward,
no optimiser.

NTK (`test_gram`): `jachess::ntk_gram` (form A) of one layer against the same contraction by batched
matrix products.  Sides are unequal, so that every form does all the work, and once symmetric, where
the operator computes each pair once and the others, which have no way to, all of it. Products of 16
bits come out in float32, as the operator's do:

    operator    the fused operator
    batched     the T × T' Gram matrices of all pairs of samples and outputs at once
    flat        one [N T, M T'] product per pair of outputs, then multiplied and summed by sample
    floor       one large matrix product (`test_large_product`)

laws (`test_fit`): 30 curves, one law (rectified, 14 sizes and D = 0, noise of 1 %), all at once,
against scipy in a loop over curves and the same starts, with our analytic Jacobian, bounds and
Huber threshold.  ``objective`` in the JSON is the ratio of objectives, scipy's over ours, at its
worst and its mean over the curves: 1 or more means that ours is as good or better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import least_squares
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from benchmarks.common import SHAPES, Shape, Step
from benchmarks.conftest import Timed
from jachess_ext import ops
from jachess_ext.jet.engine.layout import composed_rules, make_layout
from jachess_ext.jet.engine.tensor import JetTensor
from jachess_ext.scaling import fit
from jachess_ext.scaling.laws import LAWS, Law
from python_tests.operators import OPERATORS as TABLE

# Operators ----------------------------------------------------------------------------------------

Q, STREAMS = 2, 4
# Products of streams in the jet of one product (Leibniz, S = 4), and in attention: two products
# forward; backward one of them again, and the gradients of both factors of both.
PAIRS = 9
PRODUCTS = {"forward": 2 * PAIRS, "backward": 5 * PAIRS}


@dataclass(frozen=True)
class Operator:
    """How much an operator moves, on jets ``[S, *rows, n]`` drawn for it.

    Attributes:
        sizes: what follows ``[S, batch]`` in each jet, from the shape.
        moved: jets read or written, forward and backward; empty where products bound it.
    """

    sizes: Callable[[Shape], list[tuple[int, ...]]]
    moved: dict[str, float]


def moved(forward: float, backward: float) -> dict[str, float]:
    return {"forward": forward, "backward": backward}


def wide(count: int) -> Callable[[Shape], list[tuple[int, ...]]]:
    return lambda s: [(s.tokens, s.width)] * count


def inner(count: int) -> Callable[[Shape], list[tuple[int, ...]]]:
    return lambda s: [(s.tokens, s.inner)] * count


def heads(shape: Shape) -> list[tuple[int, ...]]:
    keys = shape.key_value_heads or shape.heads
    return [(n, shape.tokens, shape.width // shape.heads) for n in (shape.heads, keys, keys)]


OPERATORS = {
    "activation_jet": Operator(inner(1), moved(2, 3)),
    "gated_activation_jet": Operator(inner(2), moved(3, 5)),
    "layer_norm_jet": Operator(wide(1), moved(2, 3)),
    "rms_norm_jet": Operator(wide(1), moved(2, 3)),
    "add_layer_norm_jet": Operator(wide(2), moved(4, 4)),
    "add_rms_norm_jet": Operator(wide(2), moved(4, 4)),
    "softmax_jet": Operator(lambda s: [(s.heads, s.tokens, s.tokens)], moved(2, 3)),
    "attention_jet": Operator(heads, {}),
}


def apply_operator(figure: str, shape: Shape, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Call an operator with its jets, then the norm's weight and bias."""
    settings: dict[str, dict[str, bool]] = {
        "attention_jet": {"causal": causal(shape)},
        "softmax_jet": {"masked": False},
    }
    return TABLE[figure](*tensors, q=Q, **settings.get(figure, {}))


def causal(shape: Shape) -> bool:
    return shape.family != "bert"


def composed_attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """Return the jet of attention by the composed rules."""
    with composed_rules():
        layout = make_layout(Q, 2).begin()  # which remembers that operators are off
    jet: Any = F.scaled_dot_product_attention(
        *(JetTensor(x, layout) for x in (query, key, value)),
        is_causal=causal(shape),
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    return jet.streams


def draw_jets(operator: Operator, shape: Shape, place: dict[str, Any]) -> list[Tensor]:
    """Return the operator's jets; heads lie as a model has them, behind the tokens."""
    jets = []
    for size in operator.sizes(shape):
        if operator.moved:
            jets.append(torch.randn(STREAMS, shape.batch, *size, **place))
        else:
            count, tokens, width = size
            lying = torch.randn(STREAMS, shape.batch, tokens, count, width, **place)
            jets.append(lying.transpose(2, 3))
    return [jet.requires_grad_() for jet in jets]


def in_one_way(call: Callable[..., Any], jets: list[Tensor], way: str) -> Step:
    """Return the forward, without autograd; or the backward alone, of a forward that is kept."""
    if way == "forward":
        plain = [jet.detach() for jet in jets]
        return lambda: call(*plain)
    result = call(*jets)
    outputs = (result,) if isinstance(result, Tensor) else result
    cotangents = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, jets, cotangents, retain_graph=True)


def copying(like: Tensor, jets: float) -> Step:
    """Return a copy that reads and writes as many bytes as ``jets`` tensors like this one."""
    source = torch.randn(int(jets * like.numel() / 2), device=like.device).to(like.dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def multiplying(query: Tensor, shape: Shape, products: int) -> tuple[Step, float]:
    """Return so many batched products of attention's sizes, and their operations; causal: half."""
    batch = max(shape.batch * shape.heads // (2 if causal(shape) else 1), 1)
    token = torch.randn(batch, shape.tokens, query.shape[-1]).to(query)
    square = torch.randn(batch, shape.tokens, shape.tokens).to(query)
    out_token, out_square = torch.empty_like(token), torch.empty_like(square)

    def step() -> None:
        for number in range(products):
            if number % 2:
                torch.bmm(square, token, out=out_token)
            else:
                torch.bmm(token, token.transpose(1, 2), out=out_square)

    return step, 2.0 * products * batch * shape.tokens**2 * query.shape[-1]


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize(
    ("figure", "program"),
    [(figure, program) for figure in OPERATORS for program in ("operator", "floor")]
    + [("attention_jet", "composed")],
)
def test_operator(
    timed: Timed, place: dict[str, Any], size: str, figure: str, program: str, way: str
) -> None:
    # The norms' kernels add a residual themselves.
    if not ops.available(figure.removeprefix("add_"), place["device"]):
        pytest.skip(f"{figure} has no compiled kernel on {place['device']}")
    shape, operator = SHAPES[size], OPERATORS[figure]
    jets = draw_jets(operator, shape, place)
    weight, bias = torch.randn(2, shape.width, **place)
    if operator.moved:
        count = operator.moved[way]
        floor, about = copying(jets[0].detach(), count), {"bytes": count * jets[0].nbytes}
    else:
        floor, operations = multiplying(jets[0].detach(), shape, PRODUCTS[way])
        about = {"operations": operations}
    if program == "floor":
        step = floor
    elif program == "composed":
        step = in_one_way(lambda *x: composed_attention(*x, shape), jets, way)
    else:
        step = in_one_way(lambda *x: apply_operator(figure, shape, *x, weight, bias), jets, way)
    timed(step, f"{figure}, {way}, {shape.name}", **about)


# Attention and MeanFlow ---------------------------------------------------------------------------

HEADS, SIZE = 8, 64
WAYS = ("forward", "forward + backward", "target")
TANGENT_LOSS = "loss on the tangent"
"""A fourth way, of `benchmarks.peers`: gradients of a function of the tangent alone."""
Mask: TypeAlias = Tensor | None
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = True, mask: Mask = None
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)


def written_out(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = True, mask: Mask = None
) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1) @ value


def math_backend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = True, mask: Mask = None
) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return fused(query, key, value, causal, mask)


def flash(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = True, mask: Mask = None
) -> Tensor:
    """Run jvp_flash_attention's kernels, made for torch.func.jvp; they need Triton."""
    from jvp_flash_attention.jvp_attention import JVPAttn

    if mask is not None:  # of a size for each head; its checks, off here, wait for the GPU
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return JVPAttn.fwd_dual(query, key, value, mask, causal=causal, verify_attn_mask=False)


PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "written out": written_out,
    "math backend": math_backend,
    "jvp_flash_attention": flash,
}


def attention_jvp(
    program: str,
    way: str,
    qkv: Sequence[Tensor],
    directions: Sequence[Tensor],
    causal: bool,
    mask: Mask = None,
) -> tuple[Tensor, Tensor]:
    """Return output and tangent; ``program`` is "ours", `jx.jvp`, or of `PROGRAMS`."""
    primals, tangents = tuple(qkv), tuple(directions)
    attend = partial({"ours": fused, **PROGRAMS}[program], causal=causal, mask=mask)
    if program == "ours":
        return jx.jvp(attend, primals, tangents, differentiable=way != "target")
    output, tangent = torch.func.jvp(attend, primals, tangents)
    return output, tangent.detach() if way == "target" else tangent


def attention_step(
    program: str,
    way: str,
    tokens: int,
    place: dict[str, Any],
    causal: bool = True,
    sizes: tuple[int, int, int] = (1, HEADS, SIZE),
    mask: Mask = None,
) -> Step:
    """Return a jvp along random directions, as `attention_jvp`.

    Args:
        sizes: sequences, heads and their size.
        mask: the visible scores, [T, T], of a step that is not causal.
    """
    torch.manual_seed(0)
    batch, heads, size = sizes
    qkv, directions = torch.randn(2, 3, batch, heads, tokens, size, **place)
    gradients = way != "forward"
    primals = [x.clone().requires_grad_(gradients) for x in qkv]

    def step() -> None:
        with torch.set_grad_enabled(gradients):
            output, tangent = attention_jvp(program, way, primals, directions, causal, mask)
            if gradients:
                factor = tangent if way == TANGENT_LOSS else output
                torch.autograd.grad((factor * tangent).sum(), primals)

    return step


_DIFFERENCE = 5e-3  # near the cube root of float32's rounding


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


def training_step(
    program: str, place: dict[str, Any], quick: bool = False, width: int = 384, depth: int = 6
) -> Step:
    """Return forward, loss and backward.

    Args:
        program: "plain" (flow matching), or how MeanFlow's derivative is taken.
        width, depth: of the DiT, where it is not ``quick``.
    """
    torch.manual_seed(0)
    batch, tokens, width, depth = (2, 16, 64, 1) if quick else (2, 256, width, depth)
    attend = partial(written_out if program == "torch.func" else fused, causal=False)
    model = DiT(width, depth, 16, attend).to(**place)
    noise, data = torch.randn(2, batch, tokens, 16, **place)
    r, t = torch.rand(2, batch, **place).sort(0).values
    x, velocity = torch.lerp(data, noise, t[:, None, None]), noise - data

    def loss() -> Tensor:
        if program == "plain":
            return (model(x, t, t) - velocity).square().mean()
        inputs = (x, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t))
        if program == "torch.func":
            output, slope = torch.func.jvp(model, *inputs)
        elif program == "central differences":
            output = model(x, r, t)
            with torch.no_grad():
                ahead, behind = (
                    model(x + h * velocity, r, t + h) for h in (_DIFFERENCE, -_DIFFERENCE)
                )
            slope = (ahead - behind) / (2 * _DIFFERENCE)
        else:
            output, slope = jx.jvp(model, *inputs, differentiable=program == "kept graph")
        target = velocity - (t - r)[:, None, None] * slope.detach()
        return (output - target).square().mean()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        result = loss()
        result.backward()
        return result.detach()

    return step


@pytest.mark.parametrize("program", ["ours", "torch.func", "plain"])
def test_small_operations(timed: Timed, place: dict[str, Any], program: str) -> None:
    """Time 400 operations on 32 numbers: the cost of an operation beside its arithmetic."""
    x, direction = torch.randn(2, 4, 8, **place)

    def chain(x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(x) * 1.01 + x.sin()
        return x

    steps: dict[str, Step] = {
        "ours": lambda: jx.jvp(chain, (x,), (direction,)),
        "torch.func": lambda: torch.func.jvp(chain, (x,), (direction,)),
        "plain": lambda: chain(x),
    }
    timed(steps[program], "jvp of 400 small operations")


# The NTK ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """N samples a side of T positions; d inputs, cotangents of size e of C outputs."""

    samples: int
    positions: int
    inputs: int
    cotangents: int
    outputs: int
    symmetric: bool = False

    def __str__(self) -> str:
        n, t, d, e, c, symmetric = astuple(self)
        return f"N{n}-T{t}-d{d}-e{e}-C{c}" + ("-symmetric" if symmetric else "")

    @property
    def operations(self) -> float:
        """Return those of all pairs of samples; half where symmetric."""
        features = self.inputs + self.outputs**2 * self.cotangents
        every = 2.0 * (self.samples * self.positions) ** 2 * features
        return every * (self.samples + 1) / (2 * self.samples) if self.symmetric else every


# where form A is chosen: a classifier's last block and head (one position), short sentences through
# an encoder's layers, and wide layers
LAYERS = [
    Layer(256, 1, 384, 384, 2),
    Layer(64, 8, 384, 1152, 2),
    Layer(64, 16, 384, 384, 2),
    Layer(64, 16, 384, 384, 2, symmetric=True),
    Layer(64, 16, 384, 1536, 2),
    Layer(64, 16, 384, 1536, 2, symmetric=True),
    Layer(32, 16, 768, 3072, 2),
]
QUICK_LAYERS = [Layer(4, 3, 8, 8, 2), Layer(4, 3, 8, 8, 2, symmetric=True)]


def layers(quick: bool) -> list[Layer]:
    return QUICK_LAYERS if quick else LAYERS


Side = tuple[Tensor, Tensor]


def fused_gram(left: Side, right: Side) -> Tensor:
    if right is left:
        return ops.ntk_gram(left[0], [left[1]])
    return ops.ntk_gram(left[0], [left[1]], right[0], [right[1]])


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ, of 16 bits in float32; torch has such products on a GPU alone."""
    if a.itemsize > 2:
        return a @ b.T
    return torch.mm(a, b.T, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().T


def batched(left: Side, right: Side) -> Tensor:
    """Multiply all at once."""
    (a, deltas), (b, others) = left, right
    gram = product(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:2], 1, *b.shape[:2])
    products = product(deltas.flatten(0, 2), others.flatten(0, 2))
    return (products.view(*deltas.shape[:3], *others.shape[:3]) * gram).sum((2, 5))


def flat(left: Side, right: Side) -> Tensor:
    """Multiply once per pair of outputs, over all positions."""
    (a, deltas), (b, others) = left, right
    count, positions = a.shape[:2]
    gram = product(a.flatten(0, 1), b.flatten(0, 1))
    kernel = gram.new_empty(len(deltas), count, len(others), len(b))
    for c, delta in enumerate(deltas):
        for d, other in enumerate(others):
            one = product(delta.flatten(0, 1), other.flatten(0, 1)).mul_(gram)
            kernel[c, :, d] = one.view(count, positions, len(b), -1).sum((1, 3))
    return kernel


CONTRACTIONS: dict[str, Callable[[Side, Side], Tensor]] = {
    "operator": fused_gram,
    "batched": batched,
    "flat": flat,
}


def sides(layer: Layer, place: dict[str, Any]) -> tuple[Side, Side]:
    """Return random operands, the right ones the left ones themselves where symmetric."""

    def drawn() -> Side:
        inputs = torch.randn(layer.samples, layer.positions, layer.inputs, **place)
        shape = (layer.outputs, layer.samples, layer.positions, layer.cotangents)
        return inputs, torch.randn(*shape, **place)

    left = drawn()
    return left, left if layer.symmetric else drawn()


@pytest.mark.parametrize("program", CONTRACTIONS)
def test_gram(timed: Timed, place: dict[str, Any], size: Layer, program: str) -> None:
    left, right = sides(size, place)
    form = CONTRACTIONS[program]
    wanted = fused_gram(left, right)
    kernel = timed(lambda: form(left, right), f"ntk_gram, {size}", operations=size.operations)
    error = float((kernel - wanted).abs().max() / wanted.abs().max())
    # else they compute different kernels; operands are exact, and sums float32's in 16 bits
    assert error <= (torch.finfo(kernel.dtype).eps * 16 if left[0].itemsize > 2 else 1e-5)


def test_large_product(timed: Timed, place: dict[str, Any], quick: bool) -> None:
    """The rate that is to be reached."""
    size = 64 if quick else 2048
    a, b = torch.randn(2, size, size, **place)
    out = torch.empty_like(a)
    timed(lambda: torch.mm(a, b, out=out), "ntk_gram, floor", operations=2.0 * size**3)


# Laws ---------------------------------------------------------------------------------------------

STARTS = 8


def make_curves(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes [15] and noisy losses [count, 15] of rectified laws."""
    generator = np.random.default_rng(0)
    sizes = np.append(0.0, 200.0 * 2.0 ** np.arange(14))
    beta = generator.uniform(0.25, 0.8, (count, 1))
    transition = np.exp(generator.uniform(np.log(5e2), np.log(1e5), (count, 1)))
    start, floor = generator.uniform(1, 5, (count, 1)), generator.uniform(0.3, 1.5, (count, 1))
    losses = start / (1 + (sizes / transition) ** beta) + floor
    return sizes, losses * np.exp(0.01 * generator.standard_normal(losses.shape))


class ScipyLoop:
    """Fits by one scipy call for each curve and start."""

    def __init__(self, law: Law, sizes: np.ndarray, losses: np.ndarray, deltas: np.ndarray) -> None:
        self.law, self.logs, self.deltas = law, np.log(losses), deltas
        self.sizes = np.broadcast_to(sizes, losses.shape)
        pairs = [(p.coordinate(p.low), p.coordinate(p.high)) for p in law.parameters]
        self.low, self.high = np.array(pairs).T
        self.starts = self._best_starts()

    def _best_starts(self) -> np.ndarray:
        """Return the starts `fit` follows, [n, STARTS, p], strictly inside the bounds."""
        grid = self.law.candidates(self.sizes, self.logs, np.ones_like(self.logs))
        grid = np.clip(grid, self.low + 1e-9, self.high - 1e-9)
        costs = np.stack([self.costs(grid[:, k]) for k in range(grid.shape[1])], -1)
        best = np.argsort(costs, axis=1)[:, :STARTS]
        return np.take_along_axis(grid, best[..., None], axis=1)

    def costs(self, u: np.ndarray) -> np.ndarray:
        """Return half the sum of squares of every curve, [n]."""
        value, _ = self.law.log_loss(u, self.sizes, needs_gradient=False)
        return ((value - self.logs) ** 2).sum(-1) / 2

    def _residual(self, row: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        sizes = self.sizes[row : row + 1]
        return (
            lambda u: (
                self.law.log_loss(u[None], sizes, needs_gradient=False)[0][0] - self.logs[row]
            ),
            lambda u: self.law.log_loss(u[None], sizes)[1][0],
        )

    def least_squares(self) -> np.ndarray:
        """Return the best objective of every curve, [n]."""
        best = np.full(len(self.logs), np.inf)
        for row in range(len(self.logs)):
            residual, jacobian = self._residual(row)
            for start in self.starts[row]:
                solution = least_squares(
                    residual,
                    start,
                    jac=jacobian,
                    bounds=(self.low, self.high),
                    loss="huber",
                    f_scale=self.deltas[row],
                )
                best[row] = min(best[row], solution.cost)
        return best


@pytest.mark.parametrize("program", ["ours", "least_squares"])
@pytest.mark.parametrize("law", ["rectified", "lensllm", "power"])
def test_fit(timed: Timed, size: int, law: str, program: str) -> None:
    sizes, losses = make_curves(size)
    if not LAWS[law].reads_zero:
        sizes, losses = sizes[1:], losses[:, 1:]

    def ours() -> Any:
        return fit(sizes, losses, law)

    group = f"fit, {law}, {size} curves"
    if program == "ours":
        timed(ours, group, dtype="float64")
        return
    fitted = ours()
    loop = ScipyLoop(LAWS[law](), sizes, losses, fitted.delta)
    objective = {"worst": 0.0, "mean": 0.0}
    theirs = timed(loop.least_squares, group, once=True, dtype="float64", objective=objective)
    quality = theirs / fitted.objective
    objective.update(worst=float(quality.min()), mean=float(quality.mean()))
    assert objective["worst"] > 0.999  # ours is as good a fit, or the times compare nothing


# Sizes, full and quick, by test -------------------------------------------------------------------

SIZES: dict[str, tuple[list[Any], list[Any]]] = {
    "test_operator": (
        ["encoder6-T32", "encoder6-T128", "encoder12-T128", "llama6-T128"],
        ["tiny", "llama-tiny"],
    ),
    "test_gram": (LAYERS, QUICK_LAYERS),
    "test_fit": ([30], [2]),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "size" in metafunc.fixturenames:
        full, quick = SIZES[metafunc.function.__name__]
        sizes = quick if metafunc.config.getoption("quick") else full
        metafunc.parametrize("size", sizes, ids=str)
