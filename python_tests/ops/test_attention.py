"""`jachess::attention_jet` against finite differences, its reference, and autograd's own checks."""

import itertools
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from docs.hooks import ROOT, attention_table
from jachess_ext import ops
from jachess_ext.ops import attention, attention_triton, library
from jachess_ext.ops.attention_reference import Call, Settings, dropout_mask
from python_tests import processes
from python_tests.ops.cases import (
    DEVICES,
    STREAMS,
    STREAMS_AND_DTYPES,
    TRACED,
    add_score_products,
    jet_by_differences,
    opcheck_backward,
    random_jet,
    relative_error,
    same_for_any_threads,
)

NAMES = ("attention_jet", "attention_jet_backward")
BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}
WIDE = [
    ("cpu", torch.float64),
    ("cpu", torch.float32),
    pytest.param("cuda", torch.float32, marks=pytest.mark.cuda),
]
"""What each device's kernels compute in; float64 has none on a GPU."""
NUMBERS = (2, 0.5, False, -1, -1, 0.0, 0.0)
"""The operator's settings behind its tensors: two directions, a scale, and nothing else."""


def inputs(
    streams: int = 4,
    *,
    batch: int = 1,
    heads: int = 2,
    key_heads: int | None = None,
    queries: int = 5,
    keys: int | None = None,
    size: int = 4,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[Tensor]:
    """Query, key and value, laid out as a model has them: [S, B, T, H · D], seen as heads."""
    keys = queries if keys is None else keys
    key_heads = heads if key_heads is None else key_heads
    shapes = [
        (queries, heads, size),
        (keys, key_heads, size),
        (keys, key_heads, size if value_size is None else value_size),
    ]
    jets = [
        random_jet(streams, batch, *shape, dtype=dtype, device=device, seed=n)
        for n, shape in enumerate(shapes)
    ]
    return [x.transpose(2, 3).requires_grad_() for x in jets]


def errors_against_the_reference(
    leaves: list[Tensor], mask: Tensor | None = None, **keywords: Any
) -> float:
    """Largest error of the result and the three gradients against the reference in float64."""
    y = ops.attention_jet(*leaves, mask, **keywords)
    gy = random_jet(*y.shape, dtype=y.dtype, device=str(y.device), seed=9)
    got = [y, *torch.autograd.grad(y, leaves, gy)]
    assert all(g.dtype == leaf.dtype for g, leaf in zip(got[1:], leaves, strict=True))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide_y = ops.attention_jet_reference(*wide, mask, **keywords)
    expected = [wide_y, *torch.autograd.grad(wide_y, wide, gy.double())]
    return max(relative_error(g, e) for g, e in zip(got, expected, strict=True))


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any], mask: Tensor | None
) -> Tensor:
    """softmax(q kᵀ) v of the primal alone, in torch's own words."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.mT * settings.get("scale", query.shape[-1] ** -0.5)
    if settings.get("softcap"):
        scores = settings["softcap"] * torch.tanh(scores / settings["softcap"])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    i, j = (torch.arange(n) for n in scores.shape[-2:])
    left, right = settings.get("window", (-1, -1))
    ahead = j - i[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    hidden |= (ahead > 0) & settings.get("causal", False)
    hidden |= (ahead < -left) & (left >= 0)
    hidden |= (ahead > right) & (right >= 0)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    p = settings.get("dropout_p", 0.0)
    if p:
        kept = dropout_mask(*scores.shape, p, settings["dropout_seed"], scores.device)
        weights = weights * kept / (1 - p)
    return weights @ value


def jet_of_plain_attention(
    leaves: list[Tensor], settings: dict[str, Any], mask: Tensor | None = None
) -> Tensor:
    """The jet by finite differences along query, key and value at once."""
    shapes = [x.shape[1:] for x in leaves]
    flat = torch.cat([x.detach().flatten(1) for x in leaves], 1)

    def f(x: Tensor) -> Tensor:
        parts = x.split([math.prod(shape) for shape in shapes])
        q, k, v = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        return plain_attention(q, k, v, settings, mask)

    return jet_by_differences(f, flat, settings["q"])


def masks() -> dict[str, Tensor]:
    """For B = 2, H = 4, T = 5, Tk = 7; every query sees something."""
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(2, 1, 5, 7, generator=generator) > 0.4
    seen[..., 0] = True
    bias = torch.randn(4, 5, 7, generator=generator).double()
    hiding = bias.clone()
    hiding[:, 2, 3:] = -math.inf
    return {
        "bool": seen,
        "padding": (torch.arange(7) < torch.tensor([[7], [4]])).view(2, 1, 1, 7).expand(2, 4, 5, 7),
        "bias": bias,
        "bias with -inf": hiding,
        "bias, 16 bits": bias[:1].bfloat16(),
        "one per query": torch.randn(5, 1, generator=generator),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "causal window": {"causal": True, "window": (1, -1)},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.3, "dropout_seed": -(2**40) - 7},
}


def test_is_available() -> None:
    assert all(ops.available(name, "cpu") for name in NAMES)


@pytest.mark.parametrize(
    ("name", "q", "streams"),
    [*(("plain", *s) for s in STREAMS), *((name, 2, 4) for name in SETTINGS if name != "plain")],
)
def test_agrees_with_finite_differences(name: str, q: int, streams: int) -> None:
    settings = {**SETTINGS[name], "q": q}
    leaves = inputs(streams, heads=4, key_heads=2, queries=6, keys=7, value_size=3)
    expected = jet_of_plain_attention(leaves, settings)
    assert relative_error(ops.attention_jet(*leaves, **settings), expected) < 1e-7
    assert relative_error(ops.attention_jet_reference(*leaves, **settings), expected) < 1e-7


@pytest.mark.parametrize("name", masks())
def test_masks_agree_with_finite_differences(name: str) -> None:
    mask = masks()[name]
    leaves = inputs(batch=2, heads=4, key_heads=2, queries=5, keys=7, value_size=3)
    expected = jet_of_plain_attention(leaves, {"q": 2}, mask)
    assert relative_error(ops.attention_jet(*leaves, mask, q=2), expected) < 1e-7
    assert errors_against_the_reference(leaves, mask, q=2) < 1e-10


def test_agrees_with_torch_attention() -> None:
    """The primal, and the first tangent as torch's derivative of its own attention."""
    leaves = inputs(heads=4, key_heads=2, queries=21, size=8)
    primal = [x.detach()[0] for x in leaves]
    tangent = [x.detach()[1] for x in leaves]

    def attention(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

    y = ops.attention_jet(*leaves, q=2, causal=True)
    torch.testing.assert_close(y[0], attention(*primal))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, expected = torch.func.jvp(attention, tuple(primal), tuple(tangent))
    torch.testing.assert_close(y[1], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("q", "streams", "dtype"), STREAMS_AND_DTYPES)
def test_agrees_with_the_reference(device: str, q: int, streams: int, dtype: torch.dtype) -> None:
    """Result and gradients; ragged sizes, more queries than one block, two chunks of keys."""
    leaves = inputs(
        streams,
        heads=2,
        key_heads=1,
        queries=37,
        keys=150,
        size=24,
        value_size=40,
        dtype=dtype,
        device=device,
    )
    assert errors_against_the_reference(leaves, q=q) < BOUNDS[dtype]


@pytest.mark.parametrize(("device", "dtype"), WIDE)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (70, 300), (200, 40), (3, 33)])
def test_settings_agree_with_the_reference(
    device: str, name: str, queries: int, keys: int, dtype: torch.dtype
) -> None:
    leaves = inputs(queries=queries, keys=keys, size=16, dtype=dtype, device=device)
    assert errors_against_the_reference(leaves, q=2, **SETTINGS[name]) < BOUNDS[dtype]


@pytest.mark.parametrize(("device", "dtype"), WIDE)
@pytest.mark.parametrize("size", [8, 48, 64, 80, 256])
def test_head_sizes(size: int, dtype: torch.dtype, device: str) -> None:
    leaves = inputs(queries=20, keys=40, size=size, dtype=dtype, device=device)
    error = errors_against_the_reference(leaves, q=2, causal=True)
    assert error < BOUNDS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("q", "streams", "dtype"),
    [(2, 4, torch.float64), (4, 11, torch.float32), (2, 4, torch.bfloat16), (4, 11, torch.float16)],
)
@pytest.mark.parametrize(("size", "value_size"), [(64, 256), (256, 64), (128, 128)])
def test_heads_in_pieces(
    size: int, value_size: int, q: int, streams: int, dtype: torch.dtype, device: str
) -> None:
    """On a GPU: more than a block holds in shared memory, and several chunks of value columns."""
    leaves = inputs(
        streams, queries=20, keys=40, size=size, value_size=value_size, dtype=dtype, device=device
    )
    error = errors_against_the_reference(leaves, q=q, causal=True, scale=0.9 * size**-0.5)
    assert error < BOUNDS[dtype]


VISIBLE: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"causal": True}, "padded": {}}
"""What users' models ask of attention; "padded" adds a mask."""


def heads_of_models(
    visible: str, size: int, streams: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], Tensor | None]:
    """300 queries, 500 keys (60 and 100 on a CPU, for its time) in two heads, and the mask of a
    batch of two texts, one padded."""
    queries, keys = (300, 500) if device == "cuda" else (60, 100)
    leaves = inputs(
        streams, batch=2, queries=queries, keys=keys, size=size, dtype=dtype, device=device
    )
    if visible != "padded":
        return leaves, None
    lengths = torch.tensor([[keys], [keys * 2 // 3]], device=device)
    return leaves, (torch.arange(keys, device=device) < lengths).view(2, 1, 1, keys)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_heads_of_models(
    dtype: torch.dtype, streams: int, size: int, visible: str, device: str
) -> None:
    """What users run, in 16 bits: heads of 64 and 128, many tiles of keys."""
    leaves, mask = heads_of_models(visible, size, streams, dtype, device)
    keywords = {"q": streams // 2, **VISIBLE[visible]}
    assert errors_against_the_reference(leaves, mask, **keywords) < BOUNDS[dtype]


@pytest.mark.parametrize(("device", "dtype"), WIDE)
def test_everything_at_once(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(2, 1, 200, 200, generator=generator) > 0.5).to(device)
    leaves = inputs(batch=2, heads=2, key_heads=1, queries=200, size=16, dtype=dtype, device=device)
    keywords = {"softcap": 3.0, "dropout_p": 0.2, "dropout_seed": 3, "window": (100, 0)}
    error = errors_against_the_reference(leaves, mask, q=2, causal=True, **keywords)
    assert error < BOUNDS[dtype]


@pytest.mark.parametrize(("device", "dtype"), WIDE)
@pytest.mark.parametrize("keys", [1000, 1500])
def test_split_keys_agree_with_the_reference(keys: int, dtype: torch.dtype, device: str) -> None:
    """Few heads and many keys: the backward sums partial gradients of the queries."""
    leaves = inputs(heads=1, queries=50, keys=keys, size=8, dtype=dtype, device=device)
    for window in ((-1, -1), (-1, 700)):
        error = errors_against_the_reference(leaves, q=2, window=window)
        assert error < BOUNDS[dtype]


def tiny_mask() -> Tensor:
    mask = torch.zeros(3, 4, dtype=torch.float64)
    mask[0, 1], mask[1] = -math.inf, -math.inf
    return mask


@pytest.mark.parametrize(("q", "streams"), [(1, 2), (2, 4), (3, 7)])
def test_gradients(q: int, streams: int) -> None:
    leaves = inputs(streams, heads=2, key_heads=1, queries=2, keys=3, size=2)

    def f(*qkv: Tensor) -> Tensor:
        return ops.attention_jet(*qkv, q=q)

    assert torch.autograd.gradcheck(f, leaves, fast_mode=streams > 4)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize(
    "keywords",
    [
        {"mask": tiny_mask(), "softcap": 1.5},
        {"causal": True, "dropout_p": 0.4, "dropout_seed": 5},
        {"window": (0, 1), "scale": 0.3},
    ],
    ids=["mask and softcap", "causal and dropout", "window"],
)
def test_gradients_with_settings(keywords: dict[str, Any]) -> None:
    leaves = inputs(queries=3, keys=4, size=2)

    def f(*qkv: Tensor) -> Tensor:
        return ops.attention_jet(*qkv, q=2, **keywords)

    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradient_of_one_input_alone(wanted: int) -> None:
    leaves = [x.detach() for x in inputs()]
    leaves[wanted].requires_grad_()
    (got,) = torch.autograd.grad(ops.attention_jet(*leaves, q=2).square().sum(), leaves[wanted])
    reference = ops.attention_jet_reference(*leaves, q=2).square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(reference, leaves[wanted])[0])


def test_saved_statistics() -> None:
    """The jet of log L, by finite differences; it has no gradient."""
    leaves = inputs(heads=1, queries=3, keys=140, size=4)
    y, stats = torch.ops.jachess.attention_jet(*leaves, None, None, *NUMBERS)
    assert y.requires_grad
    assert not stats.requires_grad
    query, key = (x.detach() for x in leaves[:2])
    shapes = [query.shape[1:], key.shape[1:]]

    def log_denominator(x: Tensor) -> Tensor:
        q, k = x.split([shape.numel() for shape in shapes])
        return (0.5 * q.view(shapes[0]) @ k.view(shapes[1]).mT).exp().sum(-1).log()

    jet = jet_by_differences(log_denominator, torch.cat([query.flatten(1), key.flatten(1)], 1), 2)
    torch.testing.assert_close(stats[0], jet[0])
    assert relative_error(stats[1:], jet[1:]) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("traced", TRACED)
def test_opcheck(device: str, traced: bool) -> None:
    keywords = {"dtype": torch.float32, "device": device}
    leaves = inputs(heads=2, key_heads=1, queries=3, keys=5, value_size=8, size=8, **keywords)
    mask = torch.zeros(3, 5, device=device)
    seed, numbers = torch.tensor(7, device=device), (2, 0.5, True, 1, -1, 2.0, 0.25)
    torch.library.opcheck(torch.ops.jachess.attention_jet, (*leaves, mask, seed, *numbers))
    with torch.no_grad():  # plain settings: the reference's second derivative is slow
        y, stats = torch.ops.jachess.attention_jet(*leaves, mask, None, *NUMBERS)
    gy = torch.randn_like(y).requires_grad_()
    arguments = (gy, *leaves, mask, None, y, stats, *NUMBERS)
    opcheck_backward(torch.ops.jachess.attention_jet_backward, arguments, traced)


@pytest.mark.parametrize(("device", "dtype"), WIDE)
@pytest.mark.parametrize("summed", [0, 2])
def test_masks_with_holes(device: str, summed: int, dtype: torch.dtype) -> None:
    """Queries in the middle see fewer keys than those before and behind them, in every other entry
    of the batch; the kernels go over queries and keys in pieces."""
    leaves = inputs(batch=4, queries=24, keys=48, dtype=dtype, device=device)
    mask = torch.ones(4, 1, 24, 48, dtype=torch.bool, device=device)
    mask[1::2, :, 8:16, 16:] = False
    wide = [x.detach().double().requires_grad_() for x in leaves]
    settings = {"q": 2, "summed": summed}
    y = ops.attention_jet(*leaves, mask, **settings)
    expected = ops.attention_jet_reference(*wide, mask, **settings)
    gradients = torch.autograd.grad(y.square().sum(), leaves)
    wanted = torch.autograd.grad(expected.square().sum(), wide)
    for got, want in zip((y, *gradients), (expected, *wanted), strict=True):
        assert relative_error(got, want) < BOUNDS[dtype]


@pytest.mark.parametrize(("device", "dtype"), WIDE)
def test_queries_that_see_nothing(device: str, dtype: torch.dtype) -> None:
    """Zeros in all streams and gradients, as torch's attention; the others are untouched."""
    leaves = inputs(queries=9, keys=6, dtype=dtype, device=device)
    mask = torch.ones(9, 6, dtype=torch.bool, device=device)
    mask[4] = False
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    for hidden in (mask, torch.zeros(9, 6, device=device).masked_fill(~mask, -math.inf)):
        y = ops.attention_jet(*leaves, hidden, q=2)
        assert not y[:, :, :, 4].any()
        full = ops.attention_jet(*leaves, q=2)
        assert torch.equal(y[:, :, :, others], full[:, :, :, others])
        gradients = torch.autograd.grad(y.square().sum(), leaves)
        assert all(torch.isfinite(g).all() for g in gradients)
        assert not gradients[0][:, :, :, 4].any()
        assert gradients[0][:, :, :, others].any()
    nowhere = torch.zeros(1, 6, dtype=torch.bool, device=device)
    y = ops.attention_jet(*leaves, nowhere, q=2)
    assert not y.any()
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), leaves))
    _, stats = torch.ops.jachess.attention_jet(*leaves, mask, None, *NUMBERS)
    assert (stats[0, :, :, 4] == -math.inf).all() and not stats[1:, :, :, 4].any()
    assert torch.isfinite(stats[:, :, :, others]).all()


def test_hidden_keys_take_no_part() -> None:
    """Whatever stands in them, NaN apart: as if they were not there."""
    leaves = inputs(queries=5, keys=40, dtype=torch.float32)
    keep = torch.arange(40) < 21
    expected = ops.attention_jet(leaves[0], *(x[..., :21, :] for x in leaves[1:]), q=2)
    with torch.no_grad():
        for x in leaves[1:]:
            x[..., 21:, :] *= 1e3
    torch.testing.assert_close(ops.attention_jet(*leaves, keep, q=2), expected)


@pytest.mark.parametrize(("keys", "bound"), [(40, 1e-5), (300, 1e-3)])
def test_huge_scores(keys: int, bound: float) -> None:
    """Scores of 8192 and constant offsets of the tangents' scores cancel in the softmax.

    All keys share a large component, which shifts a row's scores in every stream. The scores
    themselves are exact in float32; log sum e^s, which joins chunks of keys and which the backward
    starts from, is not: half a unit in the last place of 8192, 5e-4, is an error of the weights.
    """
    leaves = inputs(queries=6, keys=keys, size=8)
    with torch.no_grad():
        for x in leaves[:2]:
            x.copy_((x * 8).round() / 8)
        leaves[1][0, ..., 0] = 64 + (2 * leaves[1][0, ..., 0]).round() / 256
        leaves[1][1:, ..., 0] += 0.25
        leaves[0][0, ..., 0] = 128
        leaves[0][1:, ..., 0] = 0.5
    narrow = [x.detach().float().requires_grad_() for x in leaves]
    y = ops.attention_jet(*narrow, q=2, scale=1.0)
    expected = ops.attention_jet_reference(*leaves, q=2, scale=1.0)
    assert relative_error(y, expected) < bound
    gy = random_jet(*y.shape, seed=9)
    got = torch.autograd.grad(y, narrow, gy.float())
    wanted = torch.autograd.grad(expected, leaves, gy)
    # Σ s̄ = 0 over a row only up to that error, and 64, which all keys share, multiplies the rest.
    for g, w, factor in zip(got, wanted, (64, 1, 1), strict=True):
        assert relative_error(g, w) < factor * 1e-3


def test_nan_is_seen() -> None:
    """In a query it spoils its row; in a key or value all rows of its head that look at it."""
    for which, row in ((0, (slice(None), 0, 1, 4)), (1, (slice(None), 0, 1)), (2, (0, 0, 1))):
        leaves = [x.detach() for x in inputs(queries=20, keys=20, dtype=torch.float32)]
        leaves[which][0, 0, 1, 4, 2] = math.nan
        y = ops.attention_jet(*leaves, q=2)
        spoilt = y[row][..., 2] if which == 2 else y[row]
        assert torch.isnan(spoilt).all()
        assert torch.isfinite(y[:, :, 0]).all()
    leaves[0][0] = math.nan
    assert torch.isnan(ops.attention_jet(*leaves, q=2)[0]).all()


def test_dropout_is_the_references_and_keeps_the_mean() -> None:
    """Weights read off with one-hot values: the same entries are dropped in every stream."""
    query, key, _ = inputs(heads=3, queries=40, keys=64, dtype=torch.float32)
    value = torch.zeros(4, 1, 3, 64, 64)
    value[0] = torch.eye(64)
    settings = {"q": 2, "dropout_p": 0.25, "dropout_seed": 11}
    weights = ops.attention_jet(query, key, value, q=2)
    dropped = ops.attention_jet(query, key, value, **settings)
    kept = dropout_mask(1, 3, 40, 64, 0.25, 11, torch.device("cpu"))
    torch.testing.assert_close(dropped, weights * kept / 0.75)
    # 7,680 draws, standard deviation 0.433 each: four standard errors
    assert abs(kept.double().mean() - 0.75) < 4 * 0.433 / 7680**0.5
    other = ops.attention_jet(query, key, value, q=2, dropout_p=0.25, dropout_seed=12)
    assert ((other[0] == 0) != (dropped[0] == 0)).double().mean() > 0.3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", [ops.attention_jet, ops.attention_jet_reference])
def test_the_dropout_seed_as_a_tensor(device: str, operator: Callable[..., Tensor]) -> None:
    leaves = inputs(queries=9, dtype=torch.float32, device=device)
    settings = {"q": 2, "dropout_p": 0.4}
    gy = random_jet(*leaves[0].shape, dtype=torch.float32, device=device, seed=9)
    results = []
    for seed in (-(2**40) - 7, torch.tensor(-(2**40) - 7, device=device)):
        y = operator(*leaves, dropout_seed=seed, **settings)
        results.append([y, *torch.autograd.grad(y, leaves, gy)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropout_asks_for_a_seed() -> None:
    leaves = inputs(queries=3)
    numbers = (2, 0.5, False, -1, -1, 0.0, 0.3)
    for seed, words in (
        (None, "dropout_p is 0.3, but there is no dropout_seed"),
        (torch.tensor(1.0), "dropout_seed is float32.*expected one int64"),
        (torch.tensor([1, 2]), r"dropout_seed is int64\[2\]; expected one int64"),
    ):
        with pytest.raises(RuntimeError, match=f"jachess::attention_jet: {words}"):
            torch.ops.jachess.attention_jet(*leaves, None, seed, *numbers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(device: str, dtype: torch.dtype) -> None:
    """Any strides, also a last one that is not 1, and 0."""
    dense = [
        x.detach().contiguous()
        for x in inputs(8, heads=2, queries=9, size=16, dtype=dtype, device=device)
    ]
    views = [
        [x[::2] for x in dense],
        [x[:4].transpose(-1, -2).contiguous().transpose(-1, -2) for x in dense],
        [x[:1].expand(4, -1, -1, -1, -1) for x in dense],
        [x[:4, :, :1].expand(-1, -1, 2, -1, -1) for x in dense],
    ]
    for view in views:
        leaves = [x.detach().contiguous().requires_grad_() for x in view]
        strided = [x.detach().requires_grad_() for x in view]
        y, expected = (ops.attention_jet(*each, q=2) for each in (strided, leaves))
        assert torch.equal(y, expected)
        gy = random_jet(*y.shape[:-1], 32, dtype=dtype, device=device, seed=9)[..., ::2]
        got = torch.autograd.grad(y, strided, gy)
        wanted = torch.autograd.grad(expected, leaves, gy.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_layout_lets_heads_merge_without_a_copy() -> None:
    leaves = inputs(queries=9, dtype=torch.float32)
    y = ops.attention_jet(*leaves, q=2)
    for x in (y, *torch.autograd.grad(y.sum(), leaves)):
        merged = x.transpose(-3, -2).flatten(-2)
        assert merged.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "empty", ["batch", "heads", "queries", "keys", "size", "value_size", "key_heads"]
)
def test_empty(device: str, empty: str) -> None:
    sizes = {"batch": 2, "heads": 2, "queries": 3, "keys": 4, "size": 8, "value_size": 8}
    sizes |= {"heads": 0, "key_heads": 0} if empty == "key_heads" else {empty: 0}
    leaves = inputs(**sizes, dtype=torch.float32, device=device)
    y = ops.attention_jet(*leaves, q=2)
    expected = ops.attention_jet_reference(*leaves, q=2)
    torch.testing.assert_close(y, expected)
    got = torch.autograd.grad(y.sum(), leaves)
    wanted = torch.autograd.grad(expected.sum(), leaves)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *WIDE,
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda),
    ],
)
def test_is_the_same_run_to_run(device: str, dtype: torch.dtype) -> None:
    """Bit for bit, whatever the number of threads; also where key heads are split."""
    cases = [inputs(batch=2, queries=70, keys=150, dtype=dtype, device=device)]
    cases.append(inputs(heads=1, queries=30, keys=1100, dtype=dtype, device=device))
    cases.append(inputs(4, queries=20, keys=40, size=128, dtype=dtype, device=device))
    for leaves in cases:

        def run(leaves: list[Tensor] = leaves) -> list[Tensor]:
            y = ops.attention_jet(*leaves, q=2, dropout_p=0.1, dropout_seed=1)
            return [y, *torch.autograd.grad(y.square().sum(), leaves)]

        assert same_for_any_threads(run)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [40, 64, 128])
@pytest.mark.parametrize(("q", "streams"), [(1, 2), (2, 4)])
def test_a_tile_that_hides_something_gives_the_same_bits(q: int, streams: int, size: int) -> None:
    """Of queries that see all of 90 keys, whatever hides the rest; the scale is no power of two."""
    given = inputs(streams, queries=20, keys=130, size=size, dtype=torch.bfloat16, device="cuda")
    long = [leaf.detach() for leaf in given]
    short = [long[0], *(leaf[:, :, :, :90] for leaf in long[1:])]
    mask = torch.arange(130, device="cuda") < 90

    def run(leaves: list[Tensor], mask: Tensor | None = None, **settings: Any) -> list[Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        y = ops.attention_jet(*leaves, mask, q=q, scale=0.3, **settings)
        return [y, *torch.autograd.grad(y.square().sum(), leaves[:1])]

    whole = run(short)
    for other in (run(long, mask), run(long, mask, window=(-1, 120))):
        for a, b in zip(whole, other, strict=True):
            assert torch.equal(a, b)


_PEAK = """
import torch
from jachess_ext import ops
from benchmarks.common import status_megabytes
torch.set_num_threads(1)
x = [torch.randn(4, 1, 1, {tokens}, 32).requires_grad_() for _ in range(3)]
ops.attention_jet(*(t[..., :16, :] for t in x), q=2).sum().backward()
before = status_megabytes("VmHWM")
ops.attention_jet(*x, q=2).sum().backward()
print(status_megabytes("VmHWM") - before)
"""


def test_memory_is_linear_in_the_number_of_tokens() -> None:
    """At T = 4096 one stream of the scores alone is 64 MiB; the inputs are 2 MiB each.

    y, its gradient and three gradients: 10 MiB; four partial sums of the queries': 8 MiB more.
    """
    command = [sys.executable, "-W", "error", "-c", _PEAK.format(tokens=4096)]
    found = processes.run(command, check=True)
    assert float(found.stdout) < 40


def test_refuses_a_mask_with_a_gradient() -> None:
    with pytest.raises(ValueError, match=r"requires a gradient.*attention_jet_reference"):
        ops.attention_jet(*inputs(), torch.zeros(5, 5).requires_grad_(), q=2)


def test_the_reference_gives_masks_their_gradient() -> None:
    leaves = [x.detach() for x in inputs(queries=3, keys=4)]
    mask = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda mask: ops.attention_jet_reference(*leaves, mask, q=2), mask
    )


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_without_keys_or_width_of_values(device: str) -> None:
    """log Σ e^score is what it is: −inf, or the scores' own."""
    for sizes in ({"keys": 0}, {"value_size": 0}):
        query, key, value = inputs(**sizes, dtype=torch.float32, device=device)
        _, stats = torch.ops.jachess.attention_jet(query, key, value, None, None, *NUMBERS)
        torch.testing.assert_close(stats[0], (0.5 * query[0] @ key[0].mT).logsumexp(-1))
        assert stats[1:].isfinite().all() and bool(stats[1:].any()) == bool(key.numel())


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(("streams", "size"), [(2, 64), (3, 40), (4, 64), (4, 128)])
def test_scores(streams: int, size: int, device: str) -> None:
    """Weights and scores' gradients of causal chunks: the products made of them are the gradients;
    the same run to run."""
    leaves = inputs(
        streams,
        batch=2,
        heads=4,
        key_heads=2,
        queries=150,
        size=size,
        dtype=torch.bfloat16,
        device=device,
    )
    numbers = (streams // 2 + streams % 2, size**-0.5, True, -1, -1, 0.0, 0.0, 0)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = ops.attention_jet_reference(*wide, q=numbers[0], causal=True)
    gy = random_jet(*expected.shape, seed=9).to(device, torch.bfloat16)
    gradients = torch.autograd.grad(expected, wide, gy.double())
    operators = torch.ops.jachess
    y, stats = operators.attention_jet(*leaves, None, None, *numbers)
    delta = operators.attention_jet_delta(gy, y, numbers[0])
    results = [torch.zeros_like(leaf) for leaf in wide]
    chunks = itertools.product([(0, 3), (3, 5)], [(0, 70), (70, 80)])
    for (head, count), (row, height) in chunks:
        arguments = (gy, *leaves, None, None, stats, delta, *numbers)
        place = (head, count, row, height, row + height)
        p, gs = operators.attention_jet_scores(*arguments, *place)
        again = operators.attention_jet_scores(*arguments, *place)
        assert torch.equal(p, again[0]) and torch.equal(gs, again[1])
        for n in range(count):
            b, h = divmod(head + n, 4)
            of_keys = (slice(None), b, h // 2, slice(row + height))
            of_rows = (slice(None), b, h, slice(row, row + height))
            add_score_products(
                [results[0][of_rows], *(result[of_keys] for result in results[1:])],
                *(p[:, n], gs[:, n], leaves[0][of_rows], leaves[1][of_keys], gy[of_rows]),
            )
    for result, gradient in zip(results, gradients, strict=True):
        assert relative_error(result, gradient) < BOUNDS[torch.bfloat16]


def test_shapes_of_scores() -> None:
    """Known without a GPU: rows start at multiples of 16 bytes; and there is no derivative."""
    leaves = inputs(queries=7, keys=11, dtype=torch.bfloat16, device="meta")
    y = leaves[0].new_empty(4, 1, 2, 7, 4).requires_grad_()
    delta = torch.ops.jachess.attention_jet_delta(y, y, 2)
    assert delta.shape == (4, 1, 2, 7) and delta.dtype == torch.float32
    arguments = (y, *leaves, None, None, delta, delta, *NUMBERS, 0, 1, 2, 0, 5, 11)
    for scores in torch.ops.jachess.attention_jet_scores(*arguments):
        assert scores.shape == (4, 2, 5, 11) and scores.stride() == (160, 80, 16, 1)
        assert scores.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"no derivative: call jachess_ext.ops.attention_jet,"):
        delta.sum().backward()


def test_backward_refuses_what_does_not_fit() -> None:
    given = inputs()
    y, stats = torch.ops.jachess.attention_jet(*given, None, None, *NUMBERS)
    backward = torch.ops.jachess.attention_jet_backward
    for gy, given_y in ((y[..., :3], y), (y, y.float())):
        with pytest.raises(RuntimeError, match="expected what attention_jet returned, and"):
            backward(gy, *given, None, None, given_y, stats, *NUMBERS)
    with pytest.raises(RuntimeError, match="expected what attention_jet returned for it"):
        backward(y, *given, None, None, y, stats[:1], *NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(device: str) -> None:
    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        y = ops.attention_jet(2 * query, key, value, q=2, causal=True)
        return y.transpose(2, 3).flatten(3).square().sum()

    leaves = inputs(queries=9, size=8, dtype=torch.float32, device=device)
    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", [ops.attention_jet, ops.attention_jet_reference])
@pytest.mark.parametrize("spoilt", [1, 2])
def test_a_hidden_nan_is_a_nan_as_in_torch(
    device: str, spoilt: int, operator: Callable[..., Tensor]
) -> None:
    """docs/hardening.md: of a hidden key or value; other batch entries stay as they are."""
    leaves = [random_jet(4, 2, 1, tokens, 8, device=device) for tokens in (5, 6, 6)]
    mask = torch.ones(5, 6, dtype=torch.bool, device=device)
    mask[:, 5] = False
    clean = operator(*leaves, mask, q=2)
    leaves[spoilt] = leaves[spoilt].clone()
    leaves[spoilt][0, 0, 0, 5, 0] = float("nan")
    y = operator(*leaves, mask, q=2)
    primal = F.scaled_dot_product_attention(*(leaf[0] for leaf in leaves), attn_mask=mask)
    assert torch.equal(y[0].isnan().any(-1), primal.isnan().any(-1))
    assert torch.equal(y[:, 1], clean[:, 1])


# ---- what the CUDA kernels take ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "streams", "dtype"),
    [(3, 7, torch.float64), (4, 5, torch.float64), (4, 11, torch.bfloat16)],
)
def test_passes_of_two_directions_agree(
    q: int, streams: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result and gradients of three or four directions, as GPUs make them."""
    monkeypatch.setattr(library, "IN_PASSES", ("cpu",))
    leaves = inputs(streams, heads=2, key_heads=1, keys=9, dtype=dtype)
    keywords = {"causal": True, "dropout_p": 0.3, "dropout_seed": 5}
    assert errors_against_the_reference(leaves, q=q, **keywords) < BOUNDS[dtype]
    y = ops.attention_jet(*leaves, q=q)
    merged = y.transpose(-3, -2).flatten(-2)
    assert merged.data_ptr() == y.data_ptr()


def line_of(call: Call) -> int:
    """The number of the first row of `BACKENDS` that applies to a call."""
    line = next(n for n, backend in enumerate(attention.BACKENDS) if backend.applies(call))
    assert attention.BACKENDS[line].name == attention.backend_of(call)
    return line


def call_of(
    streams: int = 4,
    queries: int = 4096,
    keys: int = 4096,
    size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    value_size: int | None = None,
    **settings: Any,
) -> Call:
    """A call of one head, fake."""
    numbers = {"q": 2, "scale": 1.0, "causal": False, "left": -1, "right": -1, "softcap": 0.0}
    numbers |= {"dropout_p": 0.0, "summed": 0} | settings
    with FakeTensorMode():
        shapes = [(queries, size), (keys, size), (keys, value_size or size)]
        jets = [torch.empty(streams, 1, 1, *s, dtype=dtype, device=device) for s in shapes]
    return Call(jets[0], jets[1], jets[2], None, None, Settings(**numbers))


TRITON, NO_KERNEL, CAPPED_SUM, NOT_ON_A_GPU, HYBRID, FUSED = range(1, 7)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        (NO_KERNEL, {"device": "meta"}),
        (NO_KERNEL, {"summed": 2}),
        (CAPPED_SUM, {"summed": 2, "softcap": 1.0, "device": "cpu"}),
        (CAPPED_SUM, {"summed": 2, "dropout_p": 0.1, "device": "cpu"}),
        (NOT_ON_A_GPU, {"dtype": torch.float64}),
        (NOT_ON_A_GPU, {"size": 264}),
        (NOT_ON_A_GPU, {"value_size": 264}),
        (HYBRID, {}),
        (HYBRID, {"causal": True}),
        (HYBRID, {"queries": 2**13, "left": 2047, "causal": True}),
        (FUSED, {"queries": 2**13, "left": 2046, "causal": True}),
        (FUSED, {"queries": 2**13, "keys": 2**13, "left": 64, "right": 64}),
        (HYBRID, {"queries": 2**13, "keys": 2**13, "left": 64}),
        (HYBRID, {"size": 128, "queries": 2048, "keys": 2048}),
        (HYBRID, {"value_size": 72, "queries": 1024}),
        (FUSED, {"keys": 4095}),
        (FUSED, {"size": 128, "queries": 2048, "keys": 2047}),
        (FUSED, {"dtype": torch.float16}),
        (FUSED, {"dtype": torch.float32, "streams": 2, "q": 1}),
        (FUSED, {"device": "cpu"}),
        (FUSED, {"device": "cpu", "softcap": 1.0, "dropout_p": 0.1}),
        (FUSED, {"device": "cpu", "summed": 2}),
        (FUSED, {"device": "cpu", "dtype": torch.float64, "size": 300}),
    ],
)
def test_backends(line: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {(f"attention_jet{end}", "cuda") for end in ("", "_scores")}
    kernels.add(("attention_jet", "cpu"))
    monkeypatch.setattr(library, "STATE", library.STATE._replace(kernels=frozenset(kernels)))
    properties = SimpleNamespace(shared_memory_per_block_optin=LARGEST)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(attention_triton, "enabled", lambda: False)
    call = call_of(**settings)
    assert line_of(call) == line
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert line_of(call) == line, "a captured step is the eager one to the bit"
    kernels.remove(("attention_jet_scores", "cuda"))
    monkeypatch.setattr(library, "STATE", library.STATE._replace(kernels=frozenset(kernels)))
    assert line_of(call) == (FUSED if line == HYBRID else line)
    monkeypatch.setattr(library, "STATE", library.STATE._replace(kernels=frozenset()))
    assert line_of(call) == NO_KERNEL
    with forward_ad.dual_level():
        assert line_of(call) == 0
    assert torch.func.vmap(lambda _: torch.tensor(line_of(call)))(torch.ones(2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("takes", "settings"),
    [
        (True, {}),
        (True, {"streams": 2, "q": 1}),
        (True, {"streams": 2, "q": 1, "queries": 1024}),
        (True, {"streams": 2, "q": 1, "size": 128}),
        (True, {"size": 40, "softcap": 1.0, "dropout_p": 0.1}),
        (True, {"queries": 2**15, "left": 100, "right": 27}),
        (True, {"streams": 3}),
        (True, {"streams": 11, "q": 4}),
        (True, {"streams": 3, "q": 1, "summed": 1}),
        (True, {"streams": 3, "q": 1, "summed": 1, "softcap": 1.0}),
        (False, {"summed": 2}),
        (False, {"size": 128}),
        (False, {"streams": 2, "q": 1, "size": 80}),
        (False, {"streams": 1, "q": 0}),
        (False, {"queries": 1023}),
        (False, {"queries": 2**15, "left": 100, "right": 26}),
        (False, {"dtype": torch.float16}),
        (False, {"device": "cpu"}),
    ],
)
def test_calls_that_triton_takes(
    takes: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_triton, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_triton, "enabled", lambda: True)
    applies = attention.BACKENDS[TRITON].applies
    call = call_of(**settings)
    assert applies(call) == takes
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert applies(call) == takes, "a captured step is the eager one to the bit"


def test_the_page_prints_the_rule() -> None:
    page = (ROOT / "docs/how_it_works.md").read_text(encoding="utf-8")
    assert "<!-- table -->" in page
    rows = attention_table().splitlines()[2:]
    for row, backend in zip(rows, attention.BACKENDS, strict=True):
        assert row == f"| {backend.calls} | {backend.name} |"
        assert f"*{backend.name}*" in page, "the page does not say what it is"
    assert f"from {attention.HYBRID_FROM // 2**20} M scores" in rows[HYBRID]


LARGEST = 227 * 1024  # on sm_90
SMALLEST = 99 * 1024  # what a block may have of shared memory on sm_86, 8.9 and 12.0


@pytest.mark.parametrize(
    ("size", "value_size", "dtype", "q", "streams", "shared", "taken"),
    [
        (64, 64, torch.bfloat16, 2, 4, SMALLEST, True),
        (128, 128, torch.float16, 4, 11, SMALLEST, True),
        (128, 128, torch.float32, 2, 4, SMALLEST, False),
        (128, 128, torch.float32, 4, 11, 163 * 1024, True),
        (256, 256, torch.bfloat16, 2, 4, LARGEST, True),
        (256, 256, torch.float32, 2, 4, LARGEST, False),
        (264, 64, torch.bfloat16, 1, 2, LARGEST, False),
        (64, 264, torch.bfloat16, 1, 2, LARGEST, False),
        (8, 8, torch.float64, 1, 2, LARGEST, False),
    ],
)
def test_which_heads_the_cuda_kernels_take(
    size: int,
    value_size: int,
    dtype: torch.dtype,
    q: int,
    streams: int,
    shared: int,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others go to the composite, without an error."""
    properties = SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        attention, "available", lambda name, device, sums=False: name == "attention_jet"
    )
    with FakeTensorMode():
        query = torch.empty(streams, 1, 2, 3, size, dtype=dtype, device="cuda:0")
        value = torch.empty(streams, 1, 2, 3, value_size, dtype=dtype, device="cuda:0")
        y = ops.attention_jet(query, query, value, q=q)
        settings = Settings(q, 1.0, False, -1, -1, 0.0, 0.0, 0)
        backend = attention.backend_of(Call(query, query, value, None, None, settings))
    assert y.shape == (streams, 1, 2, 3, value_size) and y.dtype == dtype
    assert backend == ("fused" if taken else "composite")


def test_an_old_gpu_gets_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = frozenset({("activation_jet", "cuda"), ("activation_jet", "cpu")})
    monkeypatch.setattr(library, "STATE", library.STATE._replace(kernels=kernels))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capabilities = {0: (7, 5), 1: (8, 0), None: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert not ops.available("activation_jet", "cuda")
    assert not ops.available("activation_jet", torch.device("cuda", 0))
    assert ops.available("activation_jet", "cuda:1")
    assert ops.available("activation_jet", "cpu")
    assert not ops.available("softmax_jet", "cuda:1")


@pytest.mark.parametrize("function", [attention._tile_fits, library.gpu_is_supported])
def test_the_compiler_takes_what_a_gpu_can_for_constant(function: Callable[..., bool]) -> None:
    """It cannot trace into the library, or the driver, that tells it."""

    def marked() -> None: ...

    assert function.__dict__ == torch.compiler.assume_constant_result(marked).__dict__
