"""Attention by products over chunks: the composite, and the loop of the hybrid's backward, against
the pure-torch reference in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import jachess_ext as jx
from jachess_ext import ops
from jachess_ext.ops import attention, attention_chunks, library
from jachess_ext.ops.attention_reference import Call, ScoreBlock, Settings, default_scale
from jachess_ext.ops.library import Streams
from python_tests.ops.cases import (
    DEVICES,
    TRACED,
    LargestTensor,
    opcheck_backward,
    random_jet,
    relative_error,
)

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SUMS = {2: 2, 3: 1, 5: 5}
"""Directions of a sum of squares, and how many are summed."""
STACKS = [
    *((q, 0, 1 + q + pairs) for q in range(1, 7) for pairs in {0, q * (q - 1) // 2}),
    *((q, summed, 2 + q) for q, summed in SUMS.items()),
]
"""(q, summed, S)."""
QUERIES, KEYS = 20, 23


def masks(kind: str) -> Tensor:
    """[2, 1 or 4, T, Tk]: bool, query 4 sees nothing in one entry; or numbers, −inf too."""
    numbers = random_jet(2, 4, QUERIES, KEYS, seed=8)
    if kind == "bool":
        seen = numbers[:, :1] > -0.5
        seen[1, :, 4] = False
        return seen
    return numbers.masked_fill(numbers > 1, -math.inf)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "causal window": {"causal": True, "window": (3, -1)},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.3, "dropout_seed": -(2**40) - 7},
    "bool mask": {"mask": "bool"},
    "bias": {"mask": "bias"},
    "all": {"mask": "bool", "causal": True, "softcap": 2.0, "dropout_p": 0.2, "dropout_seed": 3},
}


def heads(
    streams: int, *, groups: int = 2, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    """Query, key and value as a model lays them out, [S, B, T, H, D] seen as heads; two entries,
    two key heads, values of another width."""
    shapes = [(QUERIES, 2 * groups, 5), (KEYS, 2, 5), (KEYS, 2, 3)]
    jets = [
        random_jet(streams, 2, *shape, dtype=dtype, device=device, seed=n)
        for n, shape in enumerate(shapes)
    ]
    return [jet.transpose(2, 3).requires_grad_() for jet in jets]


def composite(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    q: int,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    summed: int = 0,
) -> Tensor:
    """The operator, with the arguments of the wrapper."""
    scale = default_scale(query) if scale is None else scale
    settings = Settings(q, scale, causal, *window, softcap, dropout_p, summed)
    seed = torch.tensor(dropout_seed, device=query.device)
    return torch.ops.jachess.attention_jet_composite(query, key, value, mask, seed, *settings)


def with_gradients(operator: Any, leaves: list[Tensor], **settings: Any) -> list[Tensor]:
    settings = dict(settings)
    mask = settings.pop("mask", None)
    mask = masks(mask).to(leaves[0].device) if isinstance(mask, str) else mask
    y = operator(*leaves, mask, **settings)
    gy = random_jet(*y.shape, seed=9).to(y)
    return [y, *torch.autograd.grad(y, leaves, gy)]


def error(leaves: list[Tensor], **settings: Any) -> float:
    """The largest, of result and gradients, stream by stream, against the reference in float64."""
    got = with_gradients(composite, leaves, **settings)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = with_gradients(ops.attention_jet_reference, wide, **settings)
    assert all(g.dtype == leaf.dtype for g, leaf in zip(got[1:], leaves, strict=True))
    return max(relative_error(g, e) for g, e in zip(got, expected, strict=True))


@pytest.fixture(params=[1, 700, 10**9], ids=["rows", "some", "all"])
def scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of one row of a group, of some rows or heads, and one chunk."""
    monkeypatch.setattr(attention_chunks, "COMPOSITE_SCORES", request.param)
    return request.param


@pytest.fixture(params=["operators", "torch"])
def softmax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax by its operators, or as where there is no kernel."""
    if request.param == "torch":
        monkeypatch.setattr(library, "STATE", library.STATE._replace(kernels=frozenset()))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("q", "summed", "streams"), [(1, 0, 2), (2, 0, 4), (3, 2, 5)])
@pytest.mark.usefixtures("softmax")
def test_settings_agree_with_the_reference(
    q: int, summed: int, streams: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_chunks, "COMPOSITE_SCORES", 700)
    assert error(heads(streams), q=q, summed=summed, **SETTINGS[name]) < 1e-12


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("q", "summed", "streams"), STACKS)
def test_stacks_agree_with_the_reference(
    q: int, summed: int, streams: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_chunks, "COMPOSITE_SCORES", 9 * streams * groups * KEYS)
    # As on a GPU, whose softmax takes two directions at once.
    monkeypatch.setattr(attention_chunks, "IN_PASSES", ("cpu",))
    leaves = heads(streams, groups=groups)
    assert error(leaves, q=q, summed=summed, causal=True) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.usefixtures("scores")
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    for q, summed, streams in [(2, 0, 4), (3, 3, 5)]:
        settings = {"q": q, "summed": summed, **SETTINGS["all"]}
        assert error(heads(streams, dtype=dtype, device=device), **settings) < BOUNDS[dtype]


# ---- derivatives, and what the operator is held to ---------------------------------------------


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize(("q", "summed", "streams"), [(2, 0, 4), (3, 2, 5)])
def test_second_derivatives(q: int, summed: int, streams: int, name: str) -> None:
    leaves = [leaf.detach()[:, :, :, :3, :2].requires_grad_() for leaf in heads(streams, groups=1)]
    settings = {"q": q, "summed": summed, **SETTINGS[name]}
    if "mask" in settings:
        settings["mask"] = masks("bool")[:, :, :3, :3]

    def run(*leaves: Tensor) -> Tensor:
        return composite(*leaves, **settings)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("traced", TRACED)
def test_opcheck(traced: bool) -> None:
    leaves = heads(4, dtype=torch.float32)
    settings = (2, 0.5, True, 3, -1, 2.0, 0.25, 0)
    arguments = (*leaves, masks("bias"), torch.tensor(7), *settings)
    torch.library.opcheck(torch.ops.jachess.attention_jet_composite, arguments)
    with torch.no_grad():
        y = torch.ops.jachess.attention_jet_composite(*arguments)
    gy = torch.randn_like(y).requires_grad_()
    backward = torch.ops.jachess.attention_jet_composite_backward
    plain = (2, 0.5, False, -1, -1, 0.0, 0.0, 0)  # the reference's second derivative is slow
    opcheck_backward(backward, (gy, *leaves, None, None, *plain), traced)


@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys", "size", "value_size"])
def test_empty(empty: str) -> None:
    names = ("batch", "heads", "queries", "keys", "size", "value_size")
    batch, count, queries, keys, size, value_size = (0 if name == empty else 2 for name in names)
    shapes = [(queries, size), (keys, size), (keys, value_size)]
    leaves = [random_jet(4, batch, count, *shape).requires_grad_() for shape in shapes]
    results = [with_gradients(f, leaves, q=2) for f in (composite, ops.attention_jet_reference)]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    results = with_gradients(composite, heads(4), q=2, mask="bool")
    assert not results[0][:, 1, :, 4].any() and not results[1][:, 1, :, 4].any()
    assert results[0][:, 0, :, 4].all() and all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("softmax", ["operators", "torch"], indirect=True)
def test_a_nan_is_seen(softmax: None) -> None:
    """In every result that depends on it, of its own entry alone."""
    for which in range(3):
        leaves = [x.detach().clone() for x in heads(4)]
        leaves[which][2, 1, 0, 3, 1] = math.nan
        leaves = [x.requires_grad_() for x in leaves]
        spoilt = [
            [x.isnan().transpose(0, 1).flatten(1).any(1).tolist() for x in results]
            for results in (
                with_gradients(f, leaves, q=2) for f in (composite, ops.attention_jet_reference)
            )
        ]
        assert spoilt[0] == spoilt[1] and spoilt[0][0] == [False, True]


def test_small_gradients_of_float16_are_not_lost() -> None:
    """Those of scores are about 1e-6, of which float16 has but a few numbers, and the keys large:
    the gradients of queries are well within it."""
    narrow = [leaf.detach() for leaf in heads(4, dtype=torch.float16)]
    narrow[:2] = [32 * x for x in narrow[:2]]
    gy = (0.05 * random_jet(4, 2, 4, QUERIES, 3, seed=9)).half()
    settings = (None, None, 2, 0.5 / 32**2, False, -1, -1, 0.0, 0.0, 0)
    backward = torch.ops.jachess.attention_jet_composite_backward
    expected = backward(gy.double(), *(x.double() for x in narrow), *settings)
    for got, wanted in zip(backward(gy, *narrow, *settings), expected, strict=True):
        assert relative_error(got, wanted) < 3e-3


@pytest.mark.parametrize(
    "place, shape, said",
    [
        (1, (4, 2, 3, KEYS, 5), "query has 4 heads and key 3"),
        (1, (5, 2, 2, KEYS, 5), r"key has shape \[5, 2, 2, 23, 5\]; expected \[4, 2, 2, 23, 5\]"),
        (1, (4, 1, 2, KEYS, 5), "key has shape"),
        (2, (4, 2, 2, KEYS - 1, 5), "value has shape"),
        (0, (4, 2, 4, QUERIES, 6), "key has shape"),
        (0, (3, 2, 4, QUERIES, 5), "key has shape"),
    ],
)
def test_refuses_what_does_not_fit(place: int, shape: tuple[int, ...], said: str) -> None:
    leaves: list[Tensor] = heads(4)
    leaves[place] = torch.ones(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=said):
        composite(*leaves, q=2)


@pytest.mark.slow
def test_compiles_to_one_graph() -> None:
    """A sum of squares with a soft cap, which no kernel takes."""

    def loss(*leaves: Tensor) -> Tensor:
        y = ops.attention_jet(2 * leaves[0], *leaves[1:], q=3, summed=2, softcap=2.0)
        return y.transpose(2, 3).flatten(3).square().sum()

    leaves = heads(5, dtype=torch.float32)
    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for got, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


# ---- what it costs -----------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "streams", "products"), [(1, 2, 3), (2, 3, 5), (2, 4, 9)])
@pytest.mark.parametrize("scores", [10**4, 10**9])
def test_multiplies_no_more_than_a_jet_needs(
    q: int, streams: int, products: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plain attention's two products forward, five backward."""
    monkeypatch.setattr(attention_chunks, "COMPOSITE_SCORES", scores)
    jets = [torch.randn(streams, 1, 2, 70, 16) for _ in range(4)]
    call = Call(*jets[:3], None, None, Settings(q, 0.25, False, -1, -1, 0.0, 0.0, 0))
    plain = 2 * 2 * 70 * 70 * 16
    with FlopCounterMode(display=False) as counter:
        attention_chunks.composite_forward(call)
    assert counter.get_total_flops() == 2 * plain * products
    with FlopCounterMode(display=False) as counter:
        attention_chunks.composite_backward(jets[3], call)
    # The weights and their gradient, then one of each of the three.
    assert counter.get_total_flops() == 5 * plain * products


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_each_stream_is_multiplied_once(streams: int) -> None:
    """For the result and all three gradients: by one product of operands side by side."""
    stacks = Streams(min(streams - 1, 2), order=2 if streams == 4 else 1)
    assert stacks.streams == streams
    for order in ((1, 2, 0), (0, 2, 1), (0, 1, 2), (1, 0, 2)):
        assert len(attention_chunks.StreamProducts(stacks, order).runs) == streams


@pytest.mark.parametrize("name", ["plain", "all"])
def test_no_tensor_grows_with_the_square_of_the_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of squares, forward and backward; twice the tokens, at most twice the memory."""
    monkeypatch.setattr(attention_chunks, "COMPOSITE_SCORES", 2**14)
    softcap, dropout_p = (2.0, 0.2) if name == "all" else (0.0, 0.0)
    settings = Settings(3, 0.5, name == "all", -1, -1, softcap, dropout_p, 3)
    sizes = []
    for tokens in (64, 128, 256):
        jets = [torch.randn(5, 1, 2, tokens, 8) for _ in range(4)]
        call = Call(*jets[:3], None, torch.tensor(3), settings)
        with LargestTensor() as largest:
            attention_chunks.composite_forward(call)
            attention_chunks.composite_backward(jets[3], call)
        sizes.append(largest.bytes)
    assert sizes[2] <= 2 * sizes[1] <= 4 * sizes[0]
    assert sizes[2] < 4 * 256**2  # a stream of scores


def test_a_laplacian_without_kernels_takes_the_composite(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the reference's streams would be five matrices of scores."""
    monkeypatch.setattr(library, "STATE", library.STATE._replace(kernels=frozenset()))
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(1, 1, 512, 8)
    attend = F.scaled_dot_product_attention
    with LargestTensor() as largest:
        y = jx.jet(lambda x: attend(x @ weight, x, x), x, torch.randn(3, *x.shape), second="sum")
        y.streams[-1].square().sum().backward()
    assert largest.bytes < 512**2


# ---- the hybrid's backward ---------------------------------------------------------------------


def delta_by_hand(gy: Tensor, y: Tensor, q: int) -> Tensor:
    """Stand in for a kernel whose result `scores_by_hand` does not need."""
    DELTA_CALLS.append(gy)
    return gy.new_zeros(gy.shape[:-1])


DELTA_CALLS: list[Tensor] = []


def scores_by_hand(*arguments: Any) -> list[Tensor]:
    """Return weights and gradients of q kᵀ as the GPU's kernel does, rows at multiples of 8
    elements: head by head, by products of streams numbered by their sets of directions, 3 for both.
    """
    gy, query, key, value, mask, seed, statistics, delta = arguments[:8]
    call = Call(query, key, value, mask, seed, Settings(*arguments[8:16]))
    first_head, count, first, rows, keys = arguments[16:]
    streams, _, heads, tokens, _ = query.shape
    assert len(statistics) == len(delta) == streams and gy.dtype == query.dtype
    results = [query.new_full((streams, count, rows, -keys // 8 * -8), 7.0) for _ in range(2)]
    for n in range(count):
        b, h = divmod(first_head + n, heads)
        here = slice(first, first + rows)
        q, g = (x[:, b, h, here].double() for x in (query, gy))
        k, v = (x[:, b, h * key.shape[2] // heads, :keys].double() for x in (key, value))
        s = torch.zeros(streams, 1, 1, rows, keys, dtype=torch.float64)
        gp = torch.zeros_like(s)
        for one, other in itertools.product(range(streams), repeat=2):
            if one & other == 0 and one | other < streams:
                s[one | other] += call.settings.scale * q[one] @ k[other].mT
                gp[one] += g[one | other] @ v[other].mT
        if mask is not None:
            mask_here = mask.expand(-1, heads, tokens, -1)[b, h, here, :keys]
        block = ScoreBlock(
            torch.tensor([[b * heads + h]]),
            torch.arange(first, first + rows),
            keys,
            None if mask is None else mask_here,
        )
        p, gs = attention_chunks._weights_and_gradient(s, gp, block, call)
        results[0][:, n, :, :keys] = p[:, 0, 0]
        results[1][:, n, :, :keys] = gs[:, 0, 0] * call.settings.scale
    return [x[..., :keys] for x in results]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU that the hybrid asks, on the CPU."""
    for name, kernel in (("delta", delta_by_hand), ("scores", scores_by_hand)):
        monkeypatch.setattr(torch.ops.jachess, f"attention_jet_{name}", kernel, raising=False)
    monkeypatch.setattr(attention, "backend_of", lambda call: "hybrid")
    DELTA_CALLS.clear()


@pytest.mark.parametrize(
    ("name", "scores"), [*((name, 700) for name in SETTINGS), ("all", 1), ("all", 10**9)]
)
@pytest.mark.parametrize(("q", "streams"), [(1, 2), (2, 3), (2, 4)])
@pytest.mark.usefixtures("by_hand")
def test_the_hybrid_agrees_with_the_reference(
    q: int, streams: int, scores: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_chunks, "HYBRID_SCORES", scores)
    leaves, settings = heads(streams), {"q": q, **SETTINGS[name]}
    got = with_gradients(ops.attention_jet, leaves, **settings)
    expected = with_gradients(ops.attention_jet_reference, leaves, **settings)
    assert max(map(relative_error, got, expected)) < 1e-10
    assert len(DELTA_CALLS) == 1  # once a backward, not once a chunk


@pytest.mark.parametrize(("q", "streams"), [(3, 4), (3, 7)])
@pytest.mark.usefixtures("by_hand")
def test_the_hybrid_in_passes(q: int, streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "IN_PASSES", ("cpu",))
    leaves = heads(streams, dtype=torch.bfloat16)
    got = with_gradients(ops.attention_jet, leaves, q=q, causal=True)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = with_gradients(ops.attention_jet_reference, wide, q=q, causal=True)
    assert max(map(relative_error, got, expected)) < BOUNDS[torch.bfloat16]
    assert len(DELTA_CALLS) == (2 if streams == 4 else 3)


@pytest.mark.cuda
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("q", "streams"), [(1, 2), (2, 3), (2, 4)])
def test_the_hybrid_on_a_gpu(
    q: int, streams: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "HYBRID_FROM", 1)
    monkeypatch.setattr(attention_chunks, "HYBRID_SCORES", 3000)
    leaves = heads(streams, dtype=torch.bfloat16, device="cuda")
    settings = {"q": q, **SETTINGS[name]}
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = with_gradients(ops.attention_jet_reference, wide, **settings)
    got = with_gradients(ops.attention_jet, leaves, **settings)
    assert max(map(relative_error, got, expected)) < BOUNDS[torch.bfloat16]
