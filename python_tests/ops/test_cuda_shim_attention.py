"""The attention kernels' .cu sources under the CPU shim against the pure-torch reference.

A few cases run unsanitized in every suite; the slow ones cover every number of streams, dtype and
setting under the address, undefined-behaviour and thread sanitizers.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from jachess_ext._C import attention_jet_bytes
from python_tests.ops.cases import add_score_products, random_jet, relative_error
from python_tests.ops.shim import (
    CSRC,
    LARGE,
    STORAGE,
    Programs,
    programs_of,
    run_program,
    stored,
)

MASKS = [torch.bool, *STORAGE]
BOUNDS = {
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}
BFLOAT16 = torch.bfloat16
SMALL = 99 * 1024  # what a block may have of shared memory on sm_86, sm_89 and sm_120

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for the shim")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The compiled shim with the attention kernels, by sanitizer."""
    return programs_of("run_attention", list(CSRC.glob("attention/*.cu")), tmp_path_factory.mktemp)


def described(tensor: Tensor, *middle: int) -> str:
    """Number of elements stored, then `middle`, then the strides, for run_attention."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return ",".join(map(str, (elements, *middle, *tensor.stride()[:4])))


def run_attention(
    program: Path,
    tensors: dict[str, Tensor],
    mask: Tensor | None,
    saved: list[Tensor],
    settings: dict[str, Any],
    shared_limit: int = LARGE,
    backwards: bool = False,
    plans: bool = False,
    chunk: tuple[int, ...] = (),
) -> bytearray:
    """Run the forward, or the backward if `tensors` has a "gy"; the output's bytes. `plans`: of
    each launch, its warps, stages and bytes of shared memory, as text; no kernel runs. `chunk`:
    run_attention's, for weights and scores' gradients."""
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    q = settings["q"]
    left, right = settings.get("window", (-1, -1))
    options = {
        "storage": STORAGE.index(query.dtype),
        "q": q,
        "pairs": query.shape[0] - 1 - q,
        "batch": query.shape[1],
        "heads": query.shape[2],
        "key_heads": key.shape[2],
        "queries": query.shape[3],
        "keys": key.shape[3],
        "size": query.shape[4],
        "value_size": value.shape[4],
        "scale": settings.get("scale", max(query.shape[4], 1) ** -0.5),
        "softcap": settings.get("softcap", 0.0),
        "dropout_p": settings.get("dropout_p", 0.0),
        "dropout_seed": settings.get("dropout_seed", 0),
        "left": left,
        "right": 0 if settings.get("causal") else right,
        **{name: described(tensor) for name, tensor in tensors.items()},
        **({"plans": 1} if plans else {}),
        **({"chunk": ",".join(map(str, chunk))} if chunk else {}),
    }
    data = [stored(tensors[name]) for name in ("query", "key", "value")]
    if mask is not None:
        full = mask.expand(query.shape[1], query.shape[2], query.shape[3], key.shape[3])
        options["mask"] = described(full, 1 + MASKS.index(mask.dtype))
        data.append(stored(mask))
    data += [stored(tensors[name]) for name in ("gy", "y") if name in tensors]
    data += [stored(tensor) for tensor in saved]
    return run_program(program, options, data, shared_limit=shared_limit, backwards=backwards)


def by_token(data: bytearray, offset: int, like: Tensor) -> tuple[Tensor, int]:
    """A result [S, B, H, T, D] laid out as [S, B, T, H, D], and where the next one starts."""
    streams, batch, heads, tokens, size = like.shape
    values = torch.frombuffer(data, dtype=like.dtype, count=like.numel(), offset=offset)
    dense = values.view(streams, batch, tokens, heads, size)
    return dense.transpose(2, 3), offset + like.numel() * like.element_size()


def inputs(
    q: int,
    streams: int,
    dtype: torch.dtype,
    batch: int = 1,
    heads: int = 2,
    key_heads: int = 2,
    queries: int = 37,
    keys: int = 45,
    size: int = 32,
    value_size: int | None = None,
    aligned: bool = True,
) -> dict[str, Tensor]:
    """query, key and value as views of [S, B, T, H, D]; `aligned`: rows start at 16 bytes."""

    def one(seed: int, heads: int, tokens: int, size: int) -> Tensor:
        wide = random_jet(streams, batch, tokens, heads, size + (not aligned), seed=seed)
        return wide.to(dtype)[..., :size].transpose(2, 3)

    return {
        "query": one(1, heads, queries, size),
        "key": one(2, key_heads, keys, size),
        "value": one(3, key_heads, keys, value_size or size),
    }


def check_case(
    program: Path,
    tensors: dict[str, Tensor],
    mask: Tensor | None = None,
    shared_limit: int = LARGE,
    **settings: Any,
) -> None:
    """Forward and backward against the reference in float64; and the same run backwards, where a
    missing barrier shows as another result."""
    dtype = tensors["query"].dtype
    leaves = [t.double().requires_grad_() for t in tensors.values()]
    expected = ops.attention_jet_reference(*leaves, mask, **settings)
    gy = random_jet(*expected.transpose(2, 3).shape, seed=9).to(dtype).transpose(2, 3)
    gradients = torch.autograd.grad(expected, leaves, gy.double())

    def forward(backwards: bool) -> bytearray:
        return run_attention(program, tensors, mask, [], settings, shared_limit, backwards)

    output = forward(backwards=False)
    y, offset = by_token(output, 0, expected.to(dtype))
    assert relative_error(y, expected) < BOUNDS[dtype]
    assert output == forward(backwards=True)

    stats = torch.frombuffer(output, dtype=torch.float32, offset=offset)
    saved = {**tensors, "gy": gy, "y": y}

    def backward(backwards: bool) -> bytearray:
        return run_attention(program, saved, mask, [stats], settings, shared_limit, backwards)

    output, offset = backward(backwards=False), 0
    for tensor, gradient in zip(tensors.values(), gradients, strict=True):
        got, offset = by_token(output, offset, tensor)
        assert relative_error(got, gradient) < BOUNDS[dtype]
    assert offset == len(output)
    assert output == backward(backwards=True)


def check_scores(
    program: Path,
    tensors: dict[str, Tensor],
    mask: Tensor | None = None,
    rows: int = 64,
    shared_limit: int = LARGE,
    **settings: Any,
) -> None:
    """Weights and scores' gradients of chunks of two heads and `rows` queries: the products made of
    them in float64 are the reference's gradients; and the same run backwards."""
    leaves = [t.double().requires_grad_() for t in tensors.values()]
    expected = ops.attention_jet_reference(*leaves, mask, **settings)
    gy = random_jet(*expected.transpose(2, 3).shape, seed=9).bfloat16().transpose(2, 3)
    gradients = torch.autograd.grad(expected, leaves, gy.double())
    output = run_attention(program, tensors, mask, [], settings, shared_limit)
    y, offset = by_token(output, 0, expected.bfloat16())
    stats = torch.frombuffer(output, dtype=torch.float32, offset=offset)

    (streams, batch, heads, queries, _), (key_heads, all_keys) = y.shape, leaves[1].shape[2:4]
    results = [torch.zeros_like(leaf) for leaf in leaves]
    for head in range(0, batch * heads, 2):
        for row in range(0, queries, rows):
            count, height = min(2, batch * heads - head), min(rows, queries - row)
            keys = min(all_keys, row + height) if settings.get("causal") else all_keys
            line = keys + 4 + keys % 2  # an even number
            scores = [
                run_attention(
                    *(program, {**tensors, "gy": gy, "y": y}, mask, [stats], settings),
                    *(shared_limit, backwards, False, (head, count, row, height, keys, line)),
                )
                for backwards in (False, True)
            ]
            assert scores[0] == scores[1]
            both = torch.frombuffer(scores[0], dtype=torch.bfloat16)
            both = both.view(2, streams, count, height, line)
            assert (both[..., keys:].view(torch.int16) == 0x7F7F).all()  # as the driver left it
            for n in range(count):
                b, h = divmod(head + n, heads)
                of_keys = (slice(None), b, h // (heads // key_heads), slice(keys))
                of_rows = (slice(None), b, h, slice(row, row + height))
                add_score_products(
                    [results[0][of_rows], *(result[of_keys] for result in results[1:])],
                    *both[:, :, n, :, :keys],
                    *(leaves[0][of_rows], leaves[1][of_keys], gy[of_rows]),
                )
    for result, gradient in zip(results, gradients, strict=True):
        assert relative_error(result, gradient) < BOUNDS[torch.bfloat16]


def padding_mask(dtype: torch.dtype, queries: int, keys: int) -> Tensor:
    """[1, 1, T, Tk]: the first tile of keys is hidden from all, the second query sees nothing."""
    shown = torch.ones(queries, keys, dtype=torch.bool)
    shown[:, :33] = False
    shown[1] = False
    if dtype == torch.bool:
        return shown[None, None]
    bias = random_jet(1, queries, keys, seed=5)[0]
    return bias.masked_fill(~shown, -torch.inf).to(dtype)[None, None]


# ---- fast: one build without sanitizers --------------------------------------------------------


def test_second_order(programs: Programs) -> None:
    """Ragged tiles, grouped heads, causal, all in one."""
    tensors = inputs(2, 4, torch.bfloat16, key_heads=1, queries=37, keys=45, size=24)
    check_case(programs("none"), tensors, q=2, causal=True)


def test_mask_and_a_query_that_sees_nothing(programs: Programs) -> None:
    tensors = inputs(2, 3, torch.float16, heads=1, key_heads=1, queries=20, keys=50)
    mask = padding_mask(torch.bool, 20, 50)
    check_case(programs("none"), tensors, mask, q=2)
    output = run_attention(programs("none"), tensors, mask, [], {"q": 2})
    y, offset = by_token(output, 0, tensors["query"])
    assert not y[:, :, :, 1].any()
    assert y[:, :, :, 2].all()
    _check_stats(output, offset, tensors, mask)
    stats = torch.frombuffer(output, dtype=torch.float32, offset=offset).view(3, 1, 1, 20)
    assert stats[0, 0, 0, 1] == -torch.inf and not stats[1:, 0, 0, 1].any()


def test_second_order_weights_fit_float16(programs: Programs) -> None:
    """Tangents of 300 either way: the second-order stream of such weights is 90,000 times the
    weight, beyond float16. Result and gradients are as near as the CPU operator's, whose sums are
    in float32: the stored result is rounded for both, and the query's gradient shows it."""
    query, key, value = inputs(2, 4, torch.float16, 1, 1, 1, 33, 32, 16).values()
    query.zero_()[0, ..., 0] = 1
    key.zero_()[0, ..., 16:, 0] = 3.9
    token = torch.arange(32)
    key[1, ..., 0], key[2, ..., 0] = 300 - 600 * (token % 2), 300 - 600 * (token // 2 % 2)
    value[1:] = 0
    tensors = {"query": query, "key": key, "value": value}
    gy = (random_jet(4, 1, 33, 1, 16, seed=9) / 64).half().transpose(2, 3)

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors.values()]
        y = function(*leaves, q=2, scale=1.0)
        return [y, *torch.autograd.grad(y, leaves, gy.to(dtype))]

    settings = {"q": 2, "scale": 1.0}
    output = run_attention(programs("none"), tensors, None, [], settings)
    expected = run(ops.attention_jet_reference, torch.float64)
    y, offset = by_token(output, 0, expected[0].half())
    stats = torch.frombuffer(output, dtype=torch.float32, offset=offset)
    saved = {**tensors, "gy": gy, "y": y}
    output = run_attention(programs("none"), saved, None, [stats], settings)
    got, offset = [y], 0
    for like in tensors.values():
        gradient, offset = by_token(output, offset, like)
        got.append(gradient)
    for g, cpu, e in zip(got, run(ops.attention_jet, torch.float16), expected, strict=True):
        assert relative_error(g, e) < max(BOUNDS[torch.float16], 2 * relative_error(cpu, e))


def test_gradients_below_the_normal_numbers_of_float16(programs: Programs) -> None:
    """Scores' gradients of 1e-7 are rounded to 11 bits, as others are, where they are summed up."""
    tensors = inputs(2, 4, torch.float16, 1, 1, 1, 20, 90, 16)
    tensors["query"] *= 256
    tensors["key"] *= 256
    check_case(programs("none"), tensors, q=2, scale=2.0**-18)


def test_heads_without_entries(programs: Programs) -> None:
    """Their keys' and queries' gradients have no blocks, and CUDA refuses to launch none."""
    tensors = inputs(2, 4, torch.bfloat16, size=0, value_size=8)
    value = tensors["value"].double().requires_grad_()
    expected = ops.attention_jet_reference(
        tensors["query"].double(), tensors["key"].double(), value, q=2
    )
    (gradient_of_value,) = torch.autograd.grad(expected.sum(), value)
    output = run_attention(programs("none"), tensors, None, [], {"q": 2})
    y, offset = by_token(output, 0, expected.to(torch.bfloat16))
    assert relative_error(y, expected) < BOUNDS[torch.bfloat16]
    stats = torch.frombuffer(output, dtype=torch.float32, offset=offset)
    saved = {**tensors, "gy": torch.ones_like(y), "y": y}
    output = run_attention(programs("none"), saved, None, [stats], {"q": 2})
    assert relative_error(by_token(output, 0, tensors["value"])[0], gradient_of_value) < 2e-2


def _check_stats(
    output: bytearray,
    offset: int,
    tensors: dict[str, Tensor],
    mask: Tensor | None,
    scale: float | None = None,
) -> None:
    """The saved statistics, hidden queries' too, are the CPU operator's."""
    if not ops.available("attention_jet", "cpu"):
        pytest.skip("the compiled operators are missing")
    scale = scale or tensors["query"].shape[4] ** -0.5
    numbers = (2, scale, False, -1, -1, 0.0, 0.0)
    _, expected = torch.ops.jachess.attention_jet(*tensors.values(), mask, None, *numbers)
    got = torch.frombuffer(output, dtype=expected.dtype, offset=offset).view(expected.shape)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("keys", "value_size"), [(0, 8), (6, 0)])
def test_no_keys_and_values_of_no_width(programs: Programs, keys: int, value_size: int) -> None:
    """There is nothing to multiply, but log Σ e^score is what it is: −inf, or the scores' own."""
    tensors = inputs(2, 4, torch.float32, 1, 1, 1, 20, keys, 16)
    tensors["value"] = tensors["value"][..., :value_size]
    output = run_attention(programs("none"), tensors, None, [], {"q": 2})
    y = torch.frombuffer(output, dtype=torch.float32)[: 4 * 20 * value_size]
    assert not y.any()
    _check_stats(output, 4 * y.numel(), tensors, None)


@pytest.mark.parametrize("spoilt", ["key", "value"])
@pytest.mark.parametrize("boolean", [True, False])
def test_a_hidden_nan_is_a_nan_as_in_torch(programs: Programs, boolean: bool, spoilt: str) -> None:
    """In a tile of keys that is seen in part; the other batch entry stays as it is."""
    tensors = inputs(2, 4, torch.float32, batch=2, heads=1, key_heads=1, queries=5, keys=6, size=8)
    mask = torch.ones(1, 1, 5, 6, dtype=torch.bool)
    mask[..., 5] = False
    mask = mask if boolean else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    clean, _ = by_token(
        run_attention(programs("none"), tensors, mask, [], {"q": 2}), 0, tensors["query"]
    )
    tensors[spoilt][0, 0, 0, 5, 0] = torch.nan
    dirty, _ = by_token(
        run_attention(programs("none"), tensors, mask, [], {"q": 2}), 0, tensors["query"]
    )
    plain = [tensor[0] for tensor in tensors.values()]
    primal = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=mask)
    assert primal[0].isnan().any()
    assert torch.equal(dirty[0].isnan(), primal.isnan())
    assert torch.equal(dirty[:, 1], clean[:, 1])


def test_scale(programs: Programs) -> None:
    tensors = inputs(1, 2, torch.float32, heads=1, key_heads=1, queries=9, keys=11, size=8)
    check_case(programs("none"), tensors, q=1, scale=0.7)


@pytest.mark.parametrize(
    ("size", "value_size"),
    [(64, 256), *(pytest.param(n, n, marks=pytest.mark.slow) for n in (64, 128, 256))],
)
def test_large_heads(programs: Programs, size: int, value_size: int) -> None:
    """Several chunks of values; check_case runs each twice."""
    tensors = inputs(2, 4, torch.bfloat16, 1, 1, 1, 18, 34, size, value_size)
    check_case(programs("none"), tensors, q=2, causal=True)


SHARED_STRIPS: list[dict[str, Any]] = [
    {"scale": 0.7, "window": (12, 3)},
    {"causal": True, "softcap": 2.0, "dropout_p": 0.4, "dropout_seed": 7},
]


@pytest.mark.parametrize("settings", SHARED_STRIPS[:1], ids=str)
def test_two_warps_share_a_strip_of_queries(programs: Programs, settings: dict[str, Any]) -> None:
    """Of two directions and values wider than 64: tiles of 32 keys, 16 a warp, of which the band
    leaves one warp none; the last tile has keys for one warp alone."""
    tensors = inputs(2, 4, torch.bfloat16, 1, 2, 1, 37, 75, 24, 88)
    check_case(programs("none"), tensors, q=2, **settings)


@pytest.mark.parametrize("first", [64, 80])
def test_two_warps_share_the_largest_score_and_the_sums(programs: Programs, first: int) -> None:
    """16 keys, those of one warp of the two, have scores 40 above the others', whose weights are
    then nothing. Rows are centred anew, and the statistics are those of both warps' keys."""
    tensors = inputs(2, 4, torch.bfloat16, 1, 1, 1, 20, 96, 16, 72)
    tensors["query"][0, ..., 0], tensors["key"][0, ..., 0] = 2.0, 0.0
    tensors["key"][0, :, :, first : first + 16, 0] = 20.0
    mask, settings = padding_mask(torch.bool, 20, 96), {"q": 2, "scale": 1.0}
    wide = [tensor.double() for tensor in tensors.values()]
    expected = ops.attention_jet_reference(*wide, mask, **settings)  # type: ignore[arg-type]
    output = run_attention(programs("none"), tensors, mask, [], settings)
    y, offset = by_token(output, 0, expected.bfloat16())
    assert relative_error(y, expected) < BOUNDS[torch.bfloat16]
    assert output == run_attention(programs("none"), tensors, mask, [], settings, backwards=True)
    _check_stats(output, offset, tensors, mask, scale=1.0)


@pytest.mark.parametrize("size", [40, 72])
def test_one_direction_over_many_keys(programs: Programs, size: int) -> None:
    """Several tiles of keys, the last one ragged, of heads narrow and wide."""
    tensors = inputs(1, 2, torch.bfloat16, 1, 1, 1, 20, 90, size)
    check_case(programs("none"), tensors, q=1)


def test_one_direction_with_dropout(programs: Programs) -> None:
    """Gradients of keys and values by one kernel, of different sizes, over two heads."""
    tensors = inputs(1, 2, torch.bfloat16, 1, 2, 1, 37, 45, 24, 40)
    keywords = {"causal": True, "softcap": 2.0, "dropout_p": 0.4, "dropout_seed": 7}
    check_case(programs("none"), tensors, q=1, **keywords)


@pytest.mark.parametrize(("q", "streams", "size"), [(1, 2, 40), (2, 4, 72)])
def test_a_tile_that_hides_something_gives_the_same_bits(
    programs: Programs, q: int, streams: int, size: int
) -> None:
    """Queries that see all of 90 keys: the band ends there, or a mask hides what follows; whatever
    follows. The scale is no power of two."""
    long = inputs(q, streams, torch.bfloat16, 1, 1, 1, 20, 130, size)
    short = {name: t if name == "query" else t[:, :, :, :90] for name, t in long.items()}
    mask = (torch.arange(130) < 90)[None, None, None]

    def output(tensors: dict[str, Tensor], mask: Tensor | None, **settings: Any) -> bytearray:
        return run_attention(programs("none"), tensors, mask, [], {"q": q, **settings})

    band = output(short, None)
    assert band == output(long, mask)
    assert band == output(long, mask, window=(-1, 120))
    # the first 64 keys' tile hides something from queries 0 to 5 alone
    seen, _ = by_token(output(short, None, window=(-1, 60)), 0, long["query"])
    first = {name: t if name == "query" else t[:, :, :, :80] for name, t in long.items()}
    whole, _ = by_token(output(first, None), 0, long["query"])
    assert torch.equal(seen[:, :, :, 19], whole[:, :, :, 19])


def refuses(program: Path, tensors: dict[str, Tensor], q: int, shared_limit: int) -> None:
    """The backward, which with a soft cap needs most memory, starts no kernel."""
    y = torch.zeros(*tensors["query"].shape[:-1], tensors["value"].shape[-1])
    y = y.to(tensors["query"].dtype)
    stats = torch.zeros(y.shape[:-1])
    saved = {**tensors, "gy": y, "y": y}
    with pytest.raises(AssertionError, match="the launcher returned -1"):
        run_attention(program, saved, None, [stats], {"q": q, "softcap": 2.0}, shared_limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("q", "streams"), [(1, 2), *(pytest.param(2, n, marks=pytest.mark.slow) for n in (3, 4))]
)
def test_the_least_shared_memory_is_what_the_launchers_need(
    programs: Programs, dtype: torch.dtype, q: int, streams: int
) -> None:
    """attention_jet_bytes decides who goes to the formulas in torch: not a byte more or less."""
    tensors = inputs(q, streams, dtype, 1, 1, 1, 17, 17, 40, 24)
    least = attention_jet_bytes(dtype.itemsize, streams, 40, 24)
    check_case(programs("none"), tensors, None, least, q=q, softcap=2.0)
    if dtype == BFLOAT16:
        check_scores(programs("none"), tensors, None, 64, least, q=q, softcap=2.0)
    refuses(programs("none"), tensors, q, least - 1)


AMPERE = 163 * 1024  # of sm_80
PLANS = {
    (LARGE, 2, 64): {
        "forward": [(4, 2, 92160)],
        "backward": [(4, 2, 74752), (4, 2, 74752)],
        "scores": [(8, 2, 111616)],
    },
    (LARGE, 2, 128): {
        "forward": [(4, 2, 104448)],
        "backward": [(4, 2, 105472), (4, 1, 104960), (4, 2, 105472)],
        "scores": [(8, 2, 209920)],
    },
    (LARGE, 4, 64): {
        "forward": [(4, 2, 73728)],
        "backward": [(4, 2, 112640), (4, 2, 111616), (4, 2, 74752)],
        "scores": [(8, 2, 149504)],
    },
    (LARGE, 4, 128): {
        "forward": [(8, 2, 229376)],
        "backward": [(4, 2, 210944), (4, 2, 209920), (4, 1, 104960)],
        "scores": [(8, 1, 210944)],
    },
    (AMPERE, 2, 64): {
        "forward": [(4, 1, 55296)],
        "backward": [(4, 2, 74752), (4, 2, 74752)],
        "scores": [(8, 2, 111616)],
    },
    (AMPERE, 2, 128): {
        "forward": [(4, 1, 69632)],
        "backward": [(2, 1, 52736), (4, 2, 140288), (4, 1, 70144)],
        "scores": [(8, 1, 140288)],
    },
    (AMPERE, 4, 64): {
        "forward": [(4, 2, 73728)],
        "backward": [(4, 2, 112640), (4, 2, 111616), (4, 2, 74752)],
        "scores": [(8, 2, 149504)],
    },
    (AMPERE, 4, 128): {
        "forward": [(8, 1, 159744)],
        "backward": [(2, 2, 140288), (2, 2, 140288), (4, 2, 140288)],
        "scores": [(4, 1, 140288)],
    },
    (SMALL, 2, 64): {
        "forward": [(4, 2, 92160)],
        "backward": [(4, 2, 74752), (4, 2, 74752)],
        "scores": [(8, 1, 74752)],
    },
    (SMALL, 2, 128): {
        "forward": [(4, 1, 69632)],
        "backward": [(4, 1, 88064), (2, 1, 70144), (4, 1, 70144)],
        "scores": [(2, 1, 87296)],
    },
    (SMALL, 4, 64): {
        "forward": [(4, 2, 73728)],
        "backward": [(4, 1, 94208), (4, 1, 92672), (4, 2, 74752)],
        "scores": [(4, 1, 74752)],
    },
    (SMALL, 4, 128): {
        "forward": [(4, 1, 96256)],
        "backward": [(1, 1, 70144), (1, 1, 70144), (2, 1, 70144)],
        "scores": [(1, 1, 70144)],
    },
}
"""By a block's shared memory, streams and size of heads: warps, stages and bytes of each launch
with tiles, in bfloat16 without a mask; a few bytes more can cost a stage or half of the warps."""


def launches(
    program: Path,
    tensors: dict[str, Tensor],
    mask: Tensor | None,
    saved: list[Tensor],
    q: int,
    limit: int,
    chunk: tuple[int, ...] = (),
) -> list[tuple[int, ...]]:
    """Warps, stages and bytes of each launch with tiles."""
    arguments = (program, tensors, mask, saved, {"q": q}, limit)
    text = run_attention(*arguments, plans=True, chunk=chunk).decode()
    plans = [tuple(map(int, line.split())) for line in text.splitlines()]
    return [plan for plan in plans if plan[1]]


FAST_PLANS = (LARGE, 2, 64), (AMPERE, 2, 128), (SMALL, 4, 64)


@pytest.mark.parametrize(
    ("limit", "streams", "size"),
    [pytest.param(*plan, marks=[] if plan in FAST_PLANS else pytest.mark.slow) for plan in PLANS],
)
def test_plans(programs: Programs, limit: int, streams: int, size: int) -> None:
    """Two blocks fit a multiprocessor of sm_90 where each has at most 115,712 bytes, one of sm_80
    where 82,944, and one of sm_86, sm_89 and sm_120 where 50,176. Two warps share 16
    queries, which makes eight a block, only where 32 queries fit."""
    tensors = inputs(streams // 2, streams, BFLOAT16, 1, 1, 1, 64, 64, size)
    y, stats = torch.zeros_like(tensors["query"]), torch.zeros(streams, 1, 1, 64)
    saved = {**tensors, "gy": y, "y": y}
    calls: dict[str, tuple[Any, ...]] = {
        "forward": (tensors, None, []),
        "backward": (saved, None, [stats]),
        "scores": (saved, None, [stats]),
    }
    plans = {}
    for name, arguments in calls.items():
        chunk = (0, 1, 0, 64, 64, 64) if name == "scores" else ()
        plans[name] = launches(programs("none"), *arguments, streams // 2, limit, chunk)
    print(f"{limit} bytes, {streams} streams, heads of {size}: {plans}")
    assert plans == PLANS[limit, streams, size]


def test_each_block_costs_a_kilobyte_more(programs: Programs) -> None:
    """A multiprocessor has one more than a block may take: two blocks of two stages, or of one."""
    tensors = inputs(2, 4, BFLOAT16, 1, 1, 1, 64, 64, 64)
    two, one = (4, 2, 73728), (4, 1, 55296)
    least = 2 * (two[2] + 1024) - 1024
    assert launches(programs("none"), tensors, None, [], 2, least) == [two]
    assert launches(programs("none"), tensors, None, [], 2, least - 1) == [one]


SCORES: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "causal, in chunks": (
        inputs(2, 4, BFLOAT16, key_heads=1, size=24),
        {"causal": True, "rows": 16},
    ),
    "two blocks": (inputs(2, 4, BFLOAT16, heads=3, key_heads=3, queries=70, size=64), {}),
    "one direction": (inputs(1, 2, BFLOAT16, key_heads=1, keys=99, size=24), {"rows": 32}),
    "a window": (inputs(2, 3, BFLOAT16, size=40, value_size=24), {"window": (5, 3)}),
    "a soft cap and dropout": (
        inputs(2, 4, BFLOAT16, 1, 1, 1, keys=64, size=24),
        {"softcap": 3.0, "dropout_p": 0.3, "dropout_seed": 5},
    ),
    "hidden keys": (
        inputs(2, 4, BFLOAT16, 1, 1, 1, 20, 50, 16),
        {"mask": padding_mask(torch.bool, 20, 50)},
    ),
    "a mask of numbers": (
        inputs(2, 4, BFLOAT16, 1, 1, 1, 20, 50, 16),
        {"mask": padding_mask(torch.float32, 20, 50), "shared_limit": SMALL},
    ),
    "wide heads": (inputs(2, 4, BFLOAT16, 1, 1, 1, queries=70, keys=50, size=128), {}),
    "rows anywhere, of two batch entries": (
        inputs(2, 4, BFLOAT16, 2, 3, 3, 9, 11, 18, 7, aligned=False),
        {"scale": -0.7},
    ),
    "a window behind, with dropout": (
        inputs(1, 2, BFLOAT16, 1, 4, 2, queries=50, keys=130, size=16, value_size=72),
        {"window": (4, -1), "dropout_p": 0.5, "dropout_seed": -7, "rows": 20},
    ),
    "one query, wide values": (inputs(2, 3, BFLOAT16, 1, 1, 1, 1, 17, 8, 256), {}),
}
"""Tensors and arguments of `check_scores`."""
SLOW_SCORES = "two blocks", "wide heads", "a window behind, with dropout"


@pytest.mark.parametrize("case", [case for case in SCORES if case not in SLOW_SCORES])
def test_scores(programs: Programs, case: str) -> None:
    tensors, settings = SCORES[case]
    check_scores(programs("none"), tensors, q=(len(tensors["query"]) + 1) // 2, **settings)


# ---- slow: everything, under sanitizers --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("q", "streams"), [(1, 2), (2, 3), (2, 4)])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_streams(programs: Programs, dtype: torch.dtype, q: int, streams: int) -> None:
    """Every number of streams and dtype, out-of-bounds accesses excluded."""
    tensors = inputs(q, streams, dtype, heads=1, key_heads=1, queries=35, keys=41, size=40)
    check_case(programs("address"), tensors, q=q)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"causal": True},
        {"window": (5, 3)},
        {"window": (40, -1), "causal": True},
        {"softcap": 1.5},
        {"scale": 0.7},
        {"dropout_p": 0.4, "dropout_seed": -(2**40) - 3},
        {"causal": True, "softcap": 2.0, "dropout_p": 0.2, "dropout_seed": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settings(programs: Programs, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    tensors = inputs(2, 4, dtype, heads=2, key_heads=1, queries=50, keys=70)
    check_case(programs("address"), tensors, q=2, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MASKS)
def test_masks(programs: Programs, kind: torch.dtype) -> None:
    tensors = inputs(2, 4, torch.float32, queries=20, keys=70)
    check_case(programs("address"), tensors, padding_mask(kind, 20, 70), q=2)
    # one mask per head, and strides of 0 over the queries
    per_head = torch.tensor([0.0, -torch.inf])[:, None, None] * 1.0
    per_head = torch.cat([torch.zeros(1, 1, 70), per_head[1:].expand(1, 1, 70)])
    shown = per_head.masked_fill(torch.arange(70) < 40, 0.0)[None]
    mask = torch.isfinite(shown) if kind == torch.bool else shown.to(kind)
    check_case(programs("address"), tensors, mask, q=2)


@pytest.mark.slow
@pytest.mark.parametrize("shared_limit", [LARGE, SMALL])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("size", "value_size"), [(32, 64), (72, 40), (128, 128), (256, 256)])
@pytest.mark.parametrize(
    ("dtype", "q", "streams"),
    [(torch.bfloat16, 1, 2), (torch.bfloat16, 2, 4), (torch.float32, 1, 2), (torch.float32, 2, 4)],
)
def test_head_sizes(
    programs: Programs,
    dtype: torch.dtype,
    q: int,
    streams: int,
    size: int,
    value_size: int,
    aligned: bool,
    shared_limit: int,
) -> None:
    """Results whole or in chunks, one tile in shared memory or two; rows that start at 16 bytes or
    do not. Where no tile fits, which the operator asks beforehand, the launcher says so."""
    tensors = inputs(q, streams, dtype, 1, 1, 1, 18, 34, size, value_size, aligned)
    if attention_jet_bytes(dtype.itemsize, streams, size, value_size) > shared_limit:
        refuses(programs("none"), tensors, q, shared_limit)
    else:
        check_case(programs("none"), tensors, None, shared_limit, q=q, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SHARED_STRIPS, ids=str)
def test_a_shared_strip_under_the_address_sanitizer(
    programs: Programs, settings: dict[str, Any]
) -> None:
    tensors = inputs(2, 4, torch.bfloat16, 1, 2, 1, 37, 75, 24, 88)
    check_case(programs("address"), tensors, padding_mask(torch.bool, 37, 75), q=2, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("shared_limit", [LARGE, SMALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_access_is_unordered(programs: Programs, dtype: torch.dtype, shared_limit: int) -> None:
    """Under the thread sanitizer every CUDA thread is a thread, and only barriers order them."""
    tensors = inputs(2, 4, dtype, heads=2, key_heads=1, queries=37, keys=70, size=72)
    mask = padding_mask(torch.bool, 37, 70)
    check_case(programs("thread"), tensors, mask, shared_limit, q=2, softcap=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", SCORES)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_scores_sanitized(programs: Programs, case: str, sanitizer: str) -> None:
    tensors, settings = SCORES[case]
    check_scores(programs(sanitizer), tensors, q=(len(tensors["query"]) + 1) // 2, **settings)
