"""`jx.differentiable`: a second backward through attention, in memory linear in the tokens.

Torch's fused kernels of `scaled_dot_product_attention` have one backward, so that programs with
``create_graph=True`` run its math kernel, which builds T × Tk tensors, or fail.  Here forward and
first backward stay torch's own kernels.  The second backward needs no kernel of its own
(`ops.attention.second_backward`): it is a 1-jet of attention, and that jet's backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import ops, torch_private
from ..ops.attention import second_backward
from ..ops.directions import fresh_seed_on
from ..ops.library import Context, Gradients, transformed
from .registry import answers

_SDPA = torch_private.scaled_dot_product_attention  # not by a name that others replace
# Checkpointing hands tensors out by their number, having compared shape and dtype: where it runs a
# block anew outside of the context, torch's own attention saves fewer, and whatever is saved in
# this one's place has another shape.
_MARKER = torch.empty(0, 2, 11, 0)


@answers(_SDPA)
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` of the same arguments, to be differentiated twice."""
    inputs = (query, key, value)

    def torchs(mask: Tensor | None, *inputs: Tensor) -> Tensor:
        return _SDPA(*inputs, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    mask_learns = attn_mask is not None and attn_mask.requires_grad
    learns = mask_learns or any(x.requires_grad for x in inputs)
    if not torch.is_grad_enabled() or not learns or dropout_p == 1:  # which leaves nothing
        return torchs(attn_mask, *inputs)
    if _below_transforms((*inputs, attn_mask)) and not dropout_p:
        # A transform sees nothing here: a checkpoint runs anew within a vmap of a backward, say.
        with torch_private.pyfunctorch.temporarily_clear_interpreter_stack():
            return attend(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    reason = _unserved(inputs, attn_mask)
    if reason is None:
        attention: Callable[..., Tensor] = partial(
            ops.attention_jet,
            scale=scale,
            causal=is_causal,
            dropout_p=dropout_p,
            # Of torch's own kernels none says which weights it dropped: ours draws them again.
            dropout_seed=fresh_seed_on(query.device) if dropout_p else 0,
        )
        device, dtype = query.device.type, _autocast_dtype(query)
        ours = dropout_p > 0 or query.shape[-1] != value.shape[-1]  # torch's would be math

        def run(mask: Tensor | None, *leaves: Tensor) -> Tensor:
            if not ours:
                return torchs(mask, *leaves)
            jets = [torch.stack([x, torch.zeros_like(x)]) for x in (y.to(dtype) for y in leaves)]
            return attention(*jets, mask=mask, q=1)[0]

        def run_again(mask: Tensor | None, *leaves: Tensor) -> Tensor:
            """Run within a backward, where autocast and this mode may be on or off."""
            if mask is not None and mask.is_floating_point():
                mask = mask.to(dtype)
            with torch.autocast(device, enabled=False), torch_private.disable_torch_function():
                return run(mask, *(x.to(dtype) for x in leaves))

        # Hooks, those of a checkpoint, may keep what is saved for one use, or run a block for each
        # graph that asks: theirs is the outer graph alone, and the backward makes the inner anew.
        hooked = torch_private.autograd._top_saved_tensors_default_hooks(False) is not None
        with saved_tensors_hooks(_same, _same) if hooked else nullcontext():
            leaves = _leaves(inputs, [x.requires_grad for x in inputs])
            out = run(attn_mask, *leaves)
        if ours or _is_fused(out):
            again = run_again if hooked else None
            return _Attention.apply((out, leaves), again, attention, attn_mask, *inputs)
        reason = "torch chose no fused kernel for it"
    _warn_of_math(reason)
    with sdpa_kernel(SDPBackend.MATH):
        return torchs(attn_mask, *inputs)


def _leaves(inputs: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """Return the inputs as leaves of another graph, laid out as torch's fused kernels want them."""
    apart = [x.detach() for x in inputs]
    return [
        (x if x.stride(-1) == 1 else x.contiguous()).requires_grad_(need)
        for x, need in zip(apart, needed, strict=True)
    ]


def _same(x: Tensor) -> Tensor:
    return x


def _autocast_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which torch's attention would compute."""
    device = query.device.type
    autocast = torch.is_autocast_enabled(device) and query.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else query.dtype


def _unserved(inputs: Sequence[Tensor], mask: Tensor | None) -> str | None:
    """Say why the operator cannot give this call's second backward; None: it can."""
    query, key, value = inputs
    if mask is not None and mask.requires_grad:
        return "its mask requires a gradient"
    if transformed():
        return "it runs within a transform of torch.func or forward-mode AD"
    if any(x.is_nested or x.ndim != 4 for x in inputs):
        return "query, key and value are not [batch, heads, tokens, size]"
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        return "query, key and value differ in their batch, or key and value in their heads"
    return None


def _below_transforms(inputs: Sequence[Tensor | None]) -> bool:
    """Return whether transforms of torch.func are active, but none of them has made an input."""
    functorch = torch_private.functorch
    active = functorch.get_dynamic_layer_stack_depth() > 0
    return active and not any(
        x is not None and functorch.is_functorch_wrapped_tensor(x) for x in inputs
    )


def _is_fused(out: Tensor) -> bool:
    """Return whether one of torch's fused kernels, here or in a context around this one, made what
    was computed from leaves."""
    nodes = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if "ScaledDotProduct" in node.name() or node.name() == "_AttentionBackward":
            return True
        nodes += [below for below, _ in node.next_functions]
    return False


_warned: set[str] = set()


def _warn_of_math(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            "jx.differentiable: torch's math attention, which builds a matrix of tokens by "
            f"tokens, computes a call of scaled_dot_product_attention, because {reason}.",
            RuntimeWarning,
            stacklevel=4,
        )


class _Attention(torch.autograd.Function):
    """Attention whose forward has run: ``inner`` is its result and leaves, with a graph of their
    own between them, whose backward is the first one.  Where there is ``again``, the backward makes
    that graph anew with it."""

    @staticmethod
    def forward(
        ctx: Context,
        inner: tuple[Tensor, list[Tensor]],
        again: Callable[..., Tensor] | None,
        attention: Callable[..., Tensor],
        mask: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(_MARKER, mask, *inputs)  # type: ignore[arg-type]  # or None
        ctx.constants = (None if again else inner, again, attention)
        return inner[0].detach()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Gradients:
        _, *saved = ctx.saved_tensors
        inner, again, attention = ctx.constants

        def first(gradient: Tensor) -> Gradients:
            nonlocal inner
            if inner is None:
                with torch.enable_grad():
                    leaves = _leaves(saved[1:], ctx.needs_input_grad[4:])
                    inner = again(saved[0], *leaves), leaves
            return _Backward.apply(inner, attention, gradient, *saved)

        return None, None, None, None, *_one_by_one(first, [gradient])


class _Backward(torch.autograd.Function):
    """The first backward, whose own backward is `ops.attention.second_backward`."""

    @staticmethod
    def forward(
        ctx: Context,
        inner: tuple[Tensor, list[Tensor]],
        attention: Callable[..., Tensor],
        gradient: Tensor,
        mask: Tensor | None,
        *inputs: Tensor,
    ) -> Gradients:
        out, leaves = inner
        ctx.save_for_backward(gradient, mask, *inputs)  # type: ignore[arg-type]  # or None
        ctx.constants = (out.dtype, attention)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        results = iter(torch.autograd.grad(out, wanted, gradient, retain_graph=True))
        return tuple(next(results) if leaf.requires_grad else None for leaf in leaves)

    @staticmethod
    def backward(ctx: Context, *cotangents: Tensor | None) -> Gradients:
        gradient, mask, *inputs = ctx.saved_tensors
        dtype, attention = ctx.constants

        def second(*cotangents: Tensor | None) -> list[Tensor | None]:
            results = second_backward(
                gradient.unsqueeze(0),
                [x.to(dtype).unsqueeze(0) for x in inputs],
                [None if c is None else c.to(dtype).unsqueeze(0) for c in cotangents],
                partial(attention, mask=mask),
            )
            return [None if g is None else g.squeeze(0) for g in results]

        of_gradient, *of_inputs = _one_by_one(second, cotangents)
        return None, None, of_gradient, None, *of_inputs


def _one_by_one(
    backward: Callable[..., Sequence[Tensor | None]], cotangents: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Run a backward for each of the cotangents that `is_grads_batched` or a vmap brings at once.

    To Python they are one tensor, of which a Function would not see that it requires a gradient.
    """
    functorch = torch_private.functorch
    tensors = [c for c in cotangents if c is not None]
    layer = functorch.peek_interpreter_stack()
    below: AbstractContextManager[None] = nullcontext()
    if any(map(functorch.is_legacy_batchedtensor, tensors)):
        level, join = 1, torch_private.add_batch_dim  # of `is_grads_batched`, which nothing nests

        def split(c: Tensor) -> tuple[Tensor, int | None]:
            batched = functorch.is_legacy_batchedtensor(c)
            return (torch_private.remove_batch_dim(c, level, 0, 0), 0) if batched else (c, None)

    elif layer is None:
        return backward(*cotangents)
    else:
        level, join = layer.level(), functorch._add_batch_dim
        if layer.key() != functorch.TransformType.Vmap and any(
            functorch.maybe_get_level(c) == level for c in tensors
        ):
            raise RuntimeError(
                "jx.differentiable: torch.func differentiates a backward whose forward ran "
                "outside of it; expected a vmap alone there: write both as one function, "
                "torch.func.grad or vjp of the forward, or differentiate by torch.autograd.grad."
            )
        below = torch_private.pyfunctorch.temporarily_pop_interpreter_stack()

        def split(c: Tensor) -> tuple[Tensor, int | None]:
            return functorch._unwrap_batched(c, level)  # type: ignore[no-any-return]

    parts = [(None, None) if c is None else split(c) for c in cotangents]
    with below:
        if all(dim is None for _, dim in parts):
            return _one_by_one(backward, [c for c, _ in parts])
        columns = [repeat(c) if c is None or dim is None else c.unbind(dim) for c, dim in parts]
        rows = zip(*columns, strict=False)  # some of which repeat without end
        results = zip(*(_one_by_one(backward, row) for row in rows), strict=True)
        stacks = [None if rows[0] is None else torch.stack(rows) for rows in results]
    return [None if x is None else join(x, 0, level) for x in stacks]
