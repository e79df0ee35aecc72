"""torch's flex_attention under block masks, and `ops.attention_by_blocks`.

The oracle is attention written out with the whole mask, by torch.func and double backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from jachess_ext import ops
from jachess_ext.jet import MissingJetRule
from jachess_ext.torch_private import release
from python_tests.covering import pairs

DOCUMENTS = torch.tensor([0] * 5 + [1] * 9 + [2] * 1 + [3] * 7)
OF_BATCH = torch.stack([DOCUMENTS, DOCUMENTS.flip(0)])
LENGTHS = torch.tensor([13, 22])
WINDOWS = torch.tensor([2, 3, 9, 30])


class Kind(NamedTuple):
    """A mask, of a block size; B and H are those of the block mask, Hk the heads of keys."""

    mask_mod: Callable[..., Tensor]
    block: int | tuple[int, int] = 4
    batch: int | None = None
    heads: int | None = None
    key_heads: int = 4
    keys: int = 22
    separate: bool = True


KINDS = {
    "causal": Kind(lambda b, h, i, j: i >= j),
    "blocks of queries and of keys": Kind(lambda b, h, i, j: i >= j, (8, 4)),
    "one block": Kind(lambda b, h, i, j: i >= j, 128),
    "full blocks not apart": Kind(lambda b, h, i, j: i >= j, separate=False),
    "packed, causal": Kind(lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)),
    "packed, grouped heads": Kind(lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j], key_heads=2),
    "rows that see nothing": Kind(lambda b, h, i, j: (i >= j) & (i != 6) & (i // 4 != 3)),
    "nothing": Kind(lambda b, h, i, j: i < 0),
    "everything": Kind(lambda b, h, i, j: i >= 0),
    "of a batch": Kind(lambda b, h, i, j: OF_BATCH[b, i] == OF_BATCH[b, j], batch=2),
    "of heads": Kind(lambda b, h, i, j: (i - j).abs() <= WINDOWS[h], heads=4),
    "of grouped heads": Kind(lambda b, h, i, j: (i >= j) & (h != 2) | (j < h), 4, None, 4, 2),
    "of both": Kind(lambda b, h, i, j: (i >= j) & (j >= h + b), 4, 2, 4, 1),
    # In the blocks that are seen in part, torch asks with the batch and head that it is at.
    "of all heads alike, by blocks": Kind(lambda b, h, i, j: (i >= j) & ((j + h + b) % 4 != 0), 22),
    "more keys": Kind(lambda b, h, i, j: j <= i + 8, keys=30),
    "fewer keys": Kind(lambda b, h, i, j: j <= i - 8, keys=14),
}


class Net(torch.nn.Module):
    """``[B, T, 8]`` through attention of four heads, whose keys are the last or repeated tokens."""

    def __init__(self, kind: Kind, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.attention = kind, attention
        sizes = (8, 8 * kind.key_heads // 4, 12 * kind.key_heads // 4)
        self.weights = torch.nn.ParameterList(
            torch.randn(8, size, dtype=torch.float64) / 2 for size in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        others = torch.cat([x, x], 1)[:, -self.kind.keys :]
        heads = (4, self.kind.key_heads, self.kind.key_heads)
        q, k, v = (
            (part @ w).unflatten(-1, (n, -1)).transpose(1, 2)
            for part, w, n in zip((x, others, others), self.weights, heads, strict=True)
        )
        out = self.attention(q, k, v, enable_gqa=self.kind.key_heads != 4)
        return out.transpose(1, 2).flatten(2)


def block_mask_of(kind: Kind) -> BlockMask:
    mask = create_block_mask(
        kind.mask_mod, kind.batch, kind.heads, 22, kind.keys, "cpu", kind.block
    )
    if kind.separate:
        return mask
    seen = mask.to_dense()
    return BlockMask.from_kv_blocks(
        seen.sum(-1),
        seen.argsort(dim=-1, descending=True, stable=True),
        BLOCK_SIZE=kind.block,
        mask_mod=kind.mask_mod,
        seq_lengths=(22, kind.keys),
    )


def whole_mask(kind: Kind) -> Tensor:
    places = (torch.arange(size) for size in (2, 4, 22, kind.keys))
    return kind.mask_mod(*torch.meshgrid(*places, indexing="ij"))


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **_: object) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).exp() * mask
    return weights / weights.sum(-1, True).clamp_min(1e-300) @ v  # rows that see nothing are 0


# ---- derivatives -------------------------------------------------------------------------------

X, *U = torch.randn(3, 2, 22, 8, dtype=torch.float64, generator=torch.manual_seed(1))


def jet_of(net: Net, x: Tensor) -> list[Tensor]:
    jet = jx.jet(net, x, torch.stack(U))
    return [jet.primal, *jet.first, *jet.second]


def jet_by_torch(net: Net, x: Tensor) -> list[Tensor]:
    def along(f: Callable[[Tensor], Any], u: Tensor) -> Callable[[Tensor], Any]:
        return lambda x: torch.func.jvp(f, (x,), (u,))[1]

    first = [along(net, u) for u in U]
    return [net(x), *(f(x) for f in first), along(first[0], U[1])(x)]


def gradients(net: Net, jet: Callable[[Net, Tensor], list[Tensor]], order: int) -> list[Tensor]:
    x = X.clone().requires_grad_()
    inputs = [x, *net.parameters()]
    parts = [part.sin() for part in jet(net, x)]
    for _ in range(order):
        weights = (torch.arange(part.numel()).reshape(part.shape).double().cos() for part in parts)
        result = sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))
        parts = [*torch.autograd.grad(result, inputs, create_graph=True, materialize_grads=True)]
    return parts


def by_jets(net: Net, way: str) -> list[Tensor]:
    if way == "tangent alone":
        return [*jx.jvp(net, (X,), (U[0],), differentiable=False)]
    if way == "jet":
        return jet_of(net, X)
    return gradients(net, jet_of, 1 + (way == "second gradient"))


def by_torch(net: Net, way: str) -> list[Tensor]:
    if way in ("tangent alone", "jet"):
        return jet_by_torch(net, X)[: 2 if way == "tangent alone" else None]
    return gradients(net, jet_by_torch, 1 + (way == "second gradient"))


def error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert all(a.shape == b.shape and a.isfinite().all() for a, b in zip(ours, theirs, strict=True))
    return max(
        float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-3))
        for a, b in zip(ours, theirs, strict=True)
    )


WAYS = ("tangent alone", "jet", "gradient", "second gradient")


@pytest.mark.parametrize("name, way", pairs(KINDS, WAYS))
def test_block_masks(name: str, way: str) -> None:
    kind = KINDS[name]
    block_mask = block_mask_of(kind)
    net = Net(kind, partial(flex_attention, block_mask=block_mask))
    oracle = Net(kind, partial(written_out, mask=whole_mask(kind)))
    assert error(by_jets(net, way), by_torch(oracle, way)) < 1e-12


# ---- calls ---------------------------------------------------------------------------------------

CAUSAL = block_mask_of(KINDS["causal"])
HEADS = torch.randn(3, 2, 4, 22, 6, dtype=torch.float64, generator=torch.manual_seed(3))


def attend(x: Tensor, **settings: Any) -> Tensor:
    q, k, v = x.unbind()
    return flex_attention(q, k, v, **settings)


@pytest.mark.parametrize("settings", [{}, {"scale": 0.3}, {"scale": 0.3, "kernel_options": {}}])
def test_without_a_mask(settings: dict[str, Any]) -> None:
    ours = jx.jet(partial(attend, **settings), HEADS, torch.stack([HEADS.cos(), HEADS.sin()]))

    def plain(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*x.unbind(), scale=settings.get("scale"))

    theirs = jx.jet(plain, HEADS, torch.stack([HEADS.cos(), HEADS.sin()]))
    assert error([ours.streams], [theirs.streams]) < 1e-14


def test_one_entry_of_keys_for_all() -> None:
    def attended(x: Tensor, keys: int) -> Tensor:
        q, k, v = x.unbind()
        k, v = (y[:1].expand(keys, -1, -1, -1) for y in (k, v))
        return flex_attention(q, k, v, block_mask=block_mask_of(KINDS["of a batch"]))

    of_one, of_both = (jx.jet(partial(attended, keys=n), HEADS, HEADS[None]) for n in (1, 2))
    assert torch.equal(of_one.streams, of_both.streams)


@pytest.mark.parametrize("name", ["causal", "of a batch"])
def test_an_empty_batch(name: str) -> None:
    block_mask = block_mask_of(KINDS[name]._replace(batch=None))
    jet = jx.jet(partial(attend, block_mask=block_mask), HEADS[:, :0], HEADS[None, :, :0])
    assert jet.streams.shape == (2, 0, 4, 22, 6)


def test_what_hidden_tiles_hold_is_not_read() -> None:
    def attended(x: Tensor, last: float) -> Tensor:
        hidden = torch.full((2, 4, 4, 6), last, dtype=x.dtype)
        k, v = (torch.cat([y[:, :, :18], hidden], -2) for y in x[1:])
        return flex_attention(x[0], k, v, block_mask=CAUSAL)[:, :, :16]

    theirs, ours = (jx.jet(partial(attended, last=n), HEADS, HEADS[None]) for n in (0.0, torch.nan))
    assert torch.equal(ours.streams, theirs.streams)


@pytest.mark.parametrize(
    "settings",
    [
        {"score_mod": lambda score, b, h, i, j: score + i},
        {"return_lse": True},
        {"return_aux": AuxRequest(lse=True)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_is_refused(settings: dict[str, Any]) -> None:
    name = next(iter(settings))
    message = f"called with {name} .*call scaled_dot_product_attention with an attn_mask"
    for mask in (None, CAUSAL):
        with pytest.raises(MissingJetRule, match=message):
            jx.jet(partial(attend, block_mask=mask, **settings), HEADS, HEADS[None])


def test_masks_that_do_not_fit() -> None:
    shorter = create_block_mask(KINDS["causal"].mask_mod, None, None, 21, 22, "cpu", 4)
    with pytest.raises(ValueError, match=r"for \(21, 22\) .*; expected \(22, 22\): create"):
        jx.jet(partial(attend, block_mask=shorter), HEADS, HEADS[None])
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        jx.jet(partial(attend, block_mask=CAUSAL[:, :]), HEADS, HEADS[None])


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 3, 2)], ids=str)
def test_results_lie_as_torchs(order: tuple[int, ...]) -> None:
    if order[-1] != 3 and release(torch.__version__) < (2, 13):
        pytest.skip("older torch keeps a last stride that is not 1")
    back = [order.index(dim) for dim in range(4)]
    x = HEADS[0].permute(order).contiguous().permute(back)
    heads = partial(flex_attention, block_mask=CAUSAL)
    theirs = heads(x, x, x)
    ours = jx.jet(lambda x: heads(x, x, x), x, x[None])
    assert ours.primal.stride() == theirs.stride()
    assert torch.allclose(ours.primal, theirs, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    x = HEADS.float()
    with torch.autocast("cpu", dtype=dtype):
        jet = jx.jet(partial(attend, block_mask=CAUSAL), x, x[None])
    exact = jx.jet(partial(attend, block_mask=CAUSAL), x, x[None])
    assert jet.primal.dtype == dtype
    assert float((jet.streams - exact.streams).abs().max()) < 0.05


def test_plain_calls_are_torchs() -> None:
    """Also within a pass, and compiled; the function shows its own arguments."""
    q, k, v = HEADS.float()
    before = jx.jet(lambda x: flex_attention(q, k, v, block_mask=CAUSAL) + 0 * x, q, q[None]).primal
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    scored = partial(flex_attention, score_mod=lambda score, b, h, i, j: score * 1)
    for attention in (flex_attention, compiled, scored):
        assert torch.equal(attention(q, k, v, block_mask=CAUSAL), before)
    signature = inspect.signature(flex_attention)
    assert [*signature.parameters][:5] == ["query", "key", "value", "score_mod", "block_mask"]
    assert "Tensor" in str(signature.parameters["query"].annotation)


# ---- borders -------------------------------------------------------------------------------------


def checkpointed(heads: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(heads, x, use_reentrant=False)


BORDERS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "compiled": lambda heads: torch.compile(heads, backend="eager"),
    "checkpointed": checkpointed,
}


@pytest.mark.parametrize("border", BORDERS)
def test_borders(border: str) -> None:
    def gradient(heads: Callable[..., Tensor]) -> Tensor:
        x = HEADS.clone().requires_grad_()
        jet = jx.jet(heads, x, torch.stack([HEADS.cos(), HEADS.sin()]))
        return torch.autograd.grad(jet.streams.sin().sum(), x)[0]

    heads = partial(attend, block_mask=CAUSAL)
    assert torch.equal(gradient(BORDERS[border](heads)), gradient(heads))


def test_transforms() -> None:
    def tangent(x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        return jx.jvp(lambda x: attention(*x.unbind()), (x,), (x.sin(),))[1]

    ours = partial(tangent, attention=partial(flex_attention, block_mask=CAUSAL))
    theirs = partial(tangent, attention=partial(written_out, mask=whole_mask(KINDS["causal"])))
    batch = torch.stack([HEADS, HEADS.cos()])
    for transform in (
        lambda f: torch.func.vmap(f)(batch),
        lambda f: torch.func.jvp(f, (HEADS,), (HEADS.cos(),))[1],
        lambda f: torch.func.grad(lambda x: f(x).sin().sum())(HEADS),
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum()))(batch),
    ):
        assert error([transform(ours)], [transform(theirs)]) < 1e-12


def test_within_a_compiled_step() -> None:
    """The blocks are read, so that the graph breaks there and the pass runs eagerly."""
    net = Net(KINDS["causal"], partial(flex_attention, block_mask=CAUSAL))
    torch._dynamo.reset()

    def step(x: Tensor) -> Tensor:
        return jx.jet(net, x, torch.stack(U)).streams

    assert torch.equal(torch.compile(step, backend="eager")(X), step(X))


# ---- hidden tiles --------------------------------------------------------------------------------

LONG = 1536


class Largest(TorchDispatchMode):
    """Note the bytes of the largest memory in which any operator returns a tensor."""

    memory = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, list | tuple) else [result]
        sizes = [part.untyped_storage().nbytes() for part in parts if isinstance(part, Tensor)]
        self.memory = max([self.memory, *sizes])
        return result


LONG_MASKS: dict[str, Callable[..., Tensor]] = {
    "packed": lambda b, h, i, j: i // 128 == j // 128,
    "no whole block": lambda b, h, i, j: (i + j) % 2 == 0,
}


@pytest.mark.parametrize("name", LONG_MASKS)
def test_no_tensor_of_tokens_by_tokens(name: str) -> None:
    """Nor of bytes, as a mask is: no operator, in three derivatives, returns T × T bytes."""
    block_mask = create_block_mask(LONG_MASKS[name], None, None, LONG, LONG, "cpu")
    x = torch.randn(3, 1, 1, LONG, 4).requires_grad_()
    with Largest() as largest:
        jet = jx.jet(partial(attend, block_mask=block_mask), x, torch.randn(1, *x.shape))
        (first,) = torch.autograd.grad(jet.streams.sin().sum(), x, create_graph=True)
        torch.autograd.grad(first.sin().sum(), x)
    assert 0 < largest.memory < LONG * LONG


def test_hidden_tiles_are_skipped() -> None:
    """Blocks that see the same keys, in full, are one call without a mask; what is hidden none."""

    def calls(mask_mod: Callable[..., Tensor]) -> list[tuple[int, int, bool]]:
        block_mask = create_block_mask(mask_mod, None, None, 128, 128, "cpu", 16)
        noted = []

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            noted.append((q.shape[-2], k.shape[-2], mask is not None))
            return ops.attention_jet(q, k, v, mask, q=1)

        x = torch.randn(2, 1, 1, 128, 4)
        y = ops.attention_by_blocks(x, x, x, block_mask, attention)
        places = torch.arange(128)
        dense = mask_mod(torch.tensor(0), torch.tensor(0), places[:, None], places)
        assert torch.allclose(y, ops.attention_jet(x, x, x, dense, q=1), atol=1e-5)
        return sorted(noted)

    assert calls(lambda b, h, i, j: i // 64 == j // 64) == [(64, 64, False)] * 2
    assert calls(lambda b, h, i, j: i >= j) == [(16, 16 * n, True) for n in range(1, 9)]
    assert calls(lambda b, h, i, j: (i < 32) & (j < 16)) == [(32, 16, False)]
