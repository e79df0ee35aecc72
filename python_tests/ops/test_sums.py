"""Operators on stacks that end in Σ D²f[u_i, u_i], of any number of directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from jachess_ext.jet import JetTensor, jet
from jachess_ext.jet.engine.layout import make_layout

from ..models import oracles
from ..operators import OPERATORS
from .cases import ACTIVATIONS, DTYPES, random_jet, relative_error, same_for_any_threads

BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
COUNTS = [(1, 1), (2, 2), (3, 2), (5, 0), (7, 7), (40, 33)]
"""Directions, and how many of them are summed; 0: order 1, beyond the four of a pair's kernel."""
SHAPES = [(2,), (3, 270), (2, 3, 18), (0, 4)]

Call = Callable[..., Tensor]


CASES = [
    *(("activation_jet", {"kind": kind}) for kind in ops.ACTIVATION_KINDS),
    *(("gated_activation_jet", {"kind": kind}) for kind in ("silu", "gelu_tanh")),
    *(("softmax_jet", {"masked": masked}) for masked in (False, True)),
    *((f"{name}_norm_jet", {"eps": 1e-5}) for name in ("layer", "rms", "add_layer", "add_rms")),
]
IDS = [f"{name}-{setting}" for name, settings in CASES for setting in settings.values()]


def run(case: Any, x: Tensor, q: int, summed: int, ending: str = "") -> Tensor:
    """Gate and up are read where they lie; a norm and its sum are the halves of one result."""
    operator, settings = OPERATORS[case[0]], case[1]
    jets = x.chunk(len(operator.jets), -1)
    scales = random_jet(len(operator.parameters), jets[0].shape[-1], seed=3).to(x.dtype).unbind()
    result = operator(*jets, *scales, q=q, summed=summed, ending=ending, **settings)
    return result if isinstance(result, Tensor) else torch.cat(result, -1)


ACTIVATION_DTYPES = torch.float64, torch.float32  # both kernels; of the other kinds all dtypes


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{name}-{dtype}")
        for case, name in zip(CASES, IDS, strict=True)
        for dtype in (ACTIVATION_DTYPES if case[0] == "activation_jet" else DTYPES)
    ],
)
def test_agrees_with_the_reference(case: Any, dtype: torch.dtype) -> None:
    """Results and gradients, against the reference in float64."""
    for q, summed in COUNTS:
        for shape in SHAPES:
            if not case[0].endswith("activation_jet") and len(shape) < 2:
                continue
            x = random_jet(1 + q + (summed > 0), *shape).to(dtype)
            if case[1] == {"masked": True} and x.numel():
                x[0, 0] = -torch.inf
            x.requires_grad_()
            wide = x.detach().double().requires_grad_()
            got = run(case, x, q, summed)
            expected = run(case, wide, q, summed, "_reference")
            assert got.dtype == dtype
            cotangent = random_jet(*got.shape, seed=1).to(dtype)
            (gradient,) = torch.autograd.grad(got, x, cotangent)
            (wanted,) = torch.autograd.grad(expected, wide, cotangent.double())
            if x.numel():
                assert relative_error(got, expected) < BOUNDS[dtype]
                assert relative_error(gradient, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_is_the_laplacian(case: Any) -> None:
    """Against differences of torch's own function, which know no stream."""
    x, directions = random_jet(1, 3, 10)[0], random_jet(6, 3, 10)
    x = x + 0.1 * x.sign()  # away from a kink
    name = case[1].get("kind", "softmax")
    function = ACTIVATIONS.get(name, partial(torch.softmax, dim=-1))
    add, norm = case[0].startswith("add_"), "layer" if "layer" in case[0] else "rms"

    def plain(x: Tensor) -> tuple[Tensor]:
        if case[0] == "gated_activation_jet":
            gate, up = x.chunk(2, -1)
            return (function(gate) * up,)
        if "norm" in case[0]:
            total = sum(x.chunk(2, -1)) if add else x
            scales = random_jet(1 + (norm == "layer"), total.shape[-1], seed=3).unbind()
            of_torch = getattr(torch.nn.functional, f"{norm}_norm")
            normed = of_torch(total, total.shape[-1:], *scales, eps=1e-5)
            return (torch.cat([normed, total], -1) if add else normed,)
        return (function(x),)

    expected = [oracles.mixed_difference(plain, x, u, u)[0] for u in directions[:4]]
    stack = torch.cat([x[None], directions, torch.zeros_like(x)[None]])
    got = run(case, stack, 6, 4)
    torch.testing.assert_close(got[-1], sum(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_second_derivatives_and_threads(case: Any) -> None:
    x = random_jet(6, 2, 6).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: run(case, x, 4, 3), (x,), fast_mode=True)
    large = random_jet(12, 70, 300, dtype=torch.float32).requires_grad_()

    def results() -> list[Tensor]:
        y = run(case, large, 10, 10)
        return [y, *torch.autograd.grad(y.square().sum(), large)]

    assert same_for_any_threads(results)


# Attention ----------------------------------------------------------------------------------------

ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, 2), "scale": 0.3},
    "mask": {"mask": True},
    "bias": {"mask": False},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 7},
}


def heads(streams: int, *, keys: int = 300, size: int = 9) -> list[Tensor]:
    """Query, key and value; four heads share two, and neither blocks nor panels are full."""
    shapes = [(2, 4, 37, size), (2, 2, keys, size), (2, 2, keys, 18)]
    return [random_jet(streams, *shape, seed=n) for n, shape in enumerate(shapes)]


def attend(attention: Call, jets: list[Tensor], q: int, summed: int, name: str) -> Tensor:
    settings = dict(ATTENTIONS[name])
    mask = None
    if "mask" in settings:
        mask = random_jet(2, 1, *(jet.shape[-2] for jet in jets[:2]), seed=9)
        mask = mask > 0.4 if settings.pop("mask") else mask
    return attention(*jets, mask, q=q, summed=summed, **settings)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ATTENTIONS),
        *(("plain", dtype) for dtype in DTYPES if dtype != torch.float32),
    ],
)
def test_attention_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    """Results and gradients, stream by stream, against the reference in float64."""
    for q, summed in COUNTS:
        for keys in (5, 300) if q < 9 or name in ("plain", "causal") else (5,):
            narrow = [x.to(dtype).requires_grad_() for x in heads(1 + q + (summed > 0), keys=keys)]
            wide = [x.detach().double().requires_grad_() for x in narrow]
            got = attend(ops.attention_jet, narrow, q, summed, name)
            expected = attend(ops.attention_jet_reference, wide, q, summed, name)
            assert got.dtype == dtype
            cotangent = random_jet(*got.shape, seed=5).to(dtype)
            gradients = torch.autograd.grad(got, narrow, cotangent)
            wanted = torch.autograd.grad(expected, wide, cotangent.double())
            pairs = zip((got, *gradients), (expected, *wanted), strict=True)
            for ours, theirs in pairs:
                for stream, one in zip(ours, theirs, strict=True):
                    assert relative_error(stream, one) < BOUNDS[dtype]


@pytest.mark.parametrize("name", ["plain", "causal", "mask", "bias"])
def test_attention_is_the_laplacian(name: str) -> None:
    """Against differences of torch's own attention, which know no stream; and log Σ e^s."""
    jets = heads(8, keys=21)
    jets = [torch.cat([jet[:7], torch.zeros_like(jet[:1])]) for jet in jets]
    sizes = [jet[0].numel() for jet in jets]

    def parts(x: Tensor) -> list[Tensor]:
        return [p.view(jet.shape[1:]) for p, jet in zip(x.split(sizes), jets, strict=True)]

    def plain(x: Tensor) -> list[Tensor]:
        def of_torch(*qkv: Tensor, **named: Any) -> Tensor:
            q, k, v, mask = qkv
            settings = {"attn_mask": mask, "is_causal": named.get("causal", False)}
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, enable_gqa=True, **settings
            )

        query, key, _ = parts(x)
        scores = query @ key.repeat_interleave(2, 1).mT / 3
        return [attend(of_torch, parts(x), 0, 0, name), scores.logsumexp(-1)]

    x, *directions = torch.cat([jet[:7].flatten(1) for jet in jets], 1)
    differences = [oracles.mixed_difference(plain, x, u, u) for u in directions[:4]]
    output, log_sum = (sum(parts) for parts in zip(*differences, strict=True))
    got = attend(ops.attention_jet, jets, 6, 4, name)
    torch.testing.assert_close(got[-1], output, rtol=1e-5, atol=1e-5)
    if name == "plain":
        _, stats = torch.ops.jachess.attention_jet(
            *jets, None, None, 6, 1 / 3, False, -1, -1, 0.0, 0.0, 4
        )
        torch.testing.assert_close(stats[-1], log_sum, rtol=1e-5, atol=1e-5)


def test_attention_second_derivatives_and_threads() -> None:
    small = [x[..., :3, :2].requires_grad_() for x in heads(6)]

    def run(*jets: Tensor) -> Tensor:
        return ops.attention_jet(*jets, q=4, summed=3)

    assert torch.autograd.gradgradcheck(run, small, fast_mode=True)
    large = [x.float().requires_grad_() for x in heads(12)]

    def results() -> list[Tensor]:
        y = ops.attention_jet(*large, q=10, summed=10)
        return [y, *torch.autograd.grad(y.square().sum(), large)]

    assert same_for_any_threads(results)


def test_refusals() -> None:
    x = torch.randn(5, 3)
    for q, summed, said in [(3, 4, "0 to q = 3"), (4, 4, "expect 6"), (4, -1, "summed is -1")]:
        with pytest.raises(RuntimeError, match=said):
            torch.ops.jachess.activation_jet(x, "tanh", q, summed)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ops.jachess.softmax_jet(torch.ones(5, 3, dtype=torch.int64), 3, False, 3)
    seed = torch.tensor(7)
    for streams, q, summed in [(5, 3, 3), (6, 5, 0)]:
        jets, numbers = [torch.ones(streams, 1, 1, 2, 2)] * 3, (q, 0.5, False, -1, -1)
        for softcap, dropout_p in [(2.0, 0.0), (0.0, 0.5)]:
            with pytest.raises(RuntimeError, match="with a soft cap or dropout the kernels take"):
                torch.ops.jachess.attention_jet(
                    *jets, None, seed, *numbers, softcap, dropout_p, summed
                )


ENGINE = (
    *("activation_jet", "attention_jet", "gated_activation_jet", "softmax_jet"),
    *("layer_norm_jet", "layer_norm_jet", "rms_norm_jet", "add_layer_norm_jet"),
)


def test_the_engine_calls_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sum, and of order 1 along more than four directions; squares one by one are composed."""
    calls: list[tuple[str, int]] = []
    for name in dict.fromkeys(ENGINE):
        own = getattr(ops, name)

        def counted(*args: Any, own: Any = own, name: str = name, **named: Any) -> Tensor:
            calls.append((name, named.get("summed", args[-1])))
            return own(*args, **named)

        monkeypatch.setattr(ops, name, counted)

    def f(x: Any) -> Any:
        heads = [x.view(1, 2, 2, 8)] * 3
        attended = torch.nn.functional.scaled_dot_product_attention(*heads)
        grouped = torch.nn.functional.group_norm(x, 4, torch.ones(8), torch.ones(8))
        normed = torch.nn.functional.layer_norm(x, (4, 8)), torch.nn.functional.rms_norm(x, (8,))
        added = torch.nn.functional.layer_norm(x + attended.view(4, 8), (8,))
        return torch.tanh(x) * x, torch.sigmoid(x), torch.softmax(x, -1), grouped, *normed, added

    x, directions = torch.randn(4, 8), torch.randn(6, 4, 8)
    for settings, summed in [({"second": "sum"}, 6), ({"order": 1}, 0)]:
        jet(f, x, directions, **settings)
        assert sorted(calls) == sorted((name, summed) for name in ENGINE)
        calls.clear()
    jet(f, x, directions, second="squares")
    assert not calls


def test_layout() -> None:
    layout = make_layout(6, 2, "sum", 4)
    assert (layout.streams, layout.num_second, layout.first) == (8, 1, slice(1, 7))
    assert layout.terms() == [(1, 1, 7), (2, 2, 7), (3, 3, 7), (4, 4, 7)]
    assert isinstance(JetTensor(torch.zeros(8, 2), layout), JetTensor)
    with pytest.raises(ValueError, match="8 streams"):
        JetTensor(torch.zeros(7, 2), layout)
    for call, said in [
        ((5, 2, "pairs"), "1 to 4"),
        ((0, 2, "sum"), "no direction"),
        ((2, 2, "cubes"), "pairs, squares, sum"),
        ((2, 3, "sum"), "order is 3"),
    ]:
        with pytest.raises(ValueError, match=said):
            make_layout(*call)
