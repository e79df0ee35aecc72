"""A package flash_attn of stand-ins: real autograd Functions of the same names, modules and
signatures, whose forward is a formula written out query by query; for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

# ---- the formulas ------------------------------------------------------------------------------


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Compute ``[B, T, H, d]`` query by query, as flash-attn's documentation says it."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    out = []
    for b in range(len(q)):
        for i in range(queries):
            here = i + keys - queries
            left = 0 if window_size[0] < 0 else max(here - window_size[0], 0)
            right = keys if window_size[1] < 0 else here + window_size[1] + 1
            right = min(right, here + 1, keys) if causal else min(right, keys)
            for h in range(q.shape[2]):
                if right <= left:
                    out.append(q[b, i, h] * 0)
                    continue
                near = slice(left, right)
                scores = scale * (k[b, near, h // group] @ q[b, i, h])
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                weights = (scores - scores.max()).exp()
                out.append((weights / weights.sum()) @ v[b, near, h // group])
    return torch.stack(out).reshape(q.shape) if out else q * 0


def formula_of_sequences(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, **settings: Any
) -> Tensor:
    bounds = [zip(s[:-1].tolist(), s[1:].tolist(), strict=True) for s in (starts, key_starts)]
    parts = [
        formula(q[None, a:b], k[None, c:d], v[None, c:d], **settings)[0]
        for (a, b), (c, d) in zip(*bounds, strict=True)
    ]
    return torch.cat(parts)


# ---- stand-ins ---------------------------------------------------------------------------------


def knows_no_jets(ctx: Any, *gradients: Tensor) -> Any:
    raise AssertionError("its backward knows no jets")


class FlashAttnFunc(torch.autograd.Function):
    __module__ = "flash_attn.flash_attn_interface"

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool,
    ) -> Tensor:
        out = formula(q, k, v, softmax_scale, causal, window_size, softcap)
        return torch.empty_like(q).copy_(out)

    backward = staticmethod(knows_no_jets)


class FlashAttnVarlenFunc(torch.autograd.Function):
    __module__ = "flash_attn.flash_attn_interface"

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        block_table: Tensor | None,
        is_grad_enabled: bool,
    ) -> Tensor:
        settings = {"softmax_scale": softmax_scale, "causal": causal}
        settings |= {"window_size": window_size, "softcap": softcap}
        return formula_of_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, **settings)

    backward = staticmethod(knows_no_jets)


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    __module__ = "flash_attn.flash_attn_interface"

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool,
    ) -> Tensor:
        return formula(*qkv.unbind(2), softmax_scale, causal, window_size, softcap)

    backward = staticmethod(knows_no_jets)


class FlashAttnVarlenKVPackedFunc(torch.autograd.Function):
    __module__ = "flash_attn.interface"

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool,
    ) -> Tensor:
        return formula_of_sequences(
            q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal
        )

    backward = staticmethod(knows_no_jets)


class IndexFirstAxis(torch.autograd.Function):
    __module__ = "flash_attn.bert_padding"

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> Tensor:
        return input[indices]

    backward = staticmethod(knows_no_jets)


class IndexPutFirstAxis(torch.autograd.Function):
    __module__ = "flash_attn.bert_padding"

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
        out = torch.zeros(first_axis_dim, *values.shape[1:], dtype=values.dtype)
        out[indices] = values
        return out

    backward = staticmethod(knows_no_jets)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    settings = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return FlashAttnFunc.apply(
        q, k, v, *settings, deterministic, return_attn_probs, torch.is_grad_enabled()
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    settings = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    last = (deterministic, return_attn_probs, block_table, torch.is_grad_enabled())
    return FlashAttnVarlenFunc.apply(q, k, v, *places, *settings, *last)


def unpad_input(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """As flash_attn.bert_padding's."""
    lengths = mask.sum(-1, dtype=torch.int32)
    rows = mask.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return IndexFirstAxis.apply(x.flatten(0, 1), rows), rows, starts, int(lengths.max()), lengths


def pad_input(x: Tensor, rows: Tensor, batch: int, seqlen: int) -> Tensor:
    return IndexPutFirstAxis.apply(x, rows, batch * seqlen).unflatten(0, (batch, seqlen))


@contextmanager
def in_transformers() -> Iterator[None]:
    """Make them what transformers calls for ``attn_implementation="flash_attention_2"``."""
    from transformers import modeling_flash_attention_utils as utils

    functions = (flash_attn_func, flash_attn_varlen_func, None, pad_input, unpad_input)
    names = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn")
    imports = {"_lazy_imports": lambda *_, **__: functions}
    with patch.multiple(utils, **imports, **dict.fromkeys(names)):
        yield
