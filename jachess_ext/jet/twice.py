"""`jx.twice_differentiable`: a second backward through attention, in memory linear in the tokens.

Torch's fused kernels of `scaled_dot_product_attention` have one backward, so that programs with
``create_graph=True`` run its math kernel, which builds T × Tk tensors, or fail.  Here forward and
first backward stay torch's own kernels.  The second backward needs no kernel of its own
(`ops.attention.second_backward`): it is a 1-jet of attention, and that jet's backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .. import ops
from ..ops.attention import second_backward
from ..ops.library import Context, Gradients, transformed
from ._types import Args, Function, Named
from .derivative import with_plain_mask
from .directions import fresh_seed_on

# Checkpointing hands tensors out by their number, having compared shape and dtype: where it runs a
# block anew outside of the context, torch's own attention saves fewer, and whatever is saved in
# this one's place has another shape.
_MARKER = torch.empty(0, 2, 11, 0)


def twice_differentiable() -> TorchFunctionMode:
    """Make `scaled_dot_product_attention` differentiable twice, as a context for unmodified code.

    Within it ``create_graph=True`` goes through attention: gradient penalties, forces, second-order
    MAML, Hessian-vector products by double backward.  Forward and first backward are torch's own
    kernels, the second backward takes memory linear in the tokens.  Masks, causal attention of
    other lengths, grouped heads, dropout, autocast and checkpointing are served, in
    `nn.MultiheadAttention` too.  Run the forward, and where it is checkpointed the backward,
    within the context; elsewhere the backward may run outside.

    With dropout, or where values are wider than queries, the forward is the operator's, which costs
    two to three times torch's.  A third derivative builds T × Tk tensors.  Under torch.compile the
    code within is torch's, which has no second backward; use `gradient_loss` there.

    Warns:
        RuntimeWarning: once for each reason: a call goes to torch's math attention, which builds
            T × Tk tensors: its mask requires a gradient, say, or its tensors have three dimensions.

    Example:
        >>> q = torch.randn(1, 2, 5, 8, requires_grad=True)
        >>> with jx.twice_differentiable():
        ...     energy = torch.nn.functional.scaled_dot_product_attention(q, q, q).square().sum()
        ...     (force,) = torch.autograd.grad(energy, q, create_graph=True)
        >>> torch.autograd.grad(force.square().sum(), q)[0].shape
        torch.Size([1, 2, 5, 8])
    """
    return _TwiceDifferentiable()


class _TwiceDifferentiable(TorchFunctionMode):
    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Named | None = None
    ) -> object:
        kwargs = kwargs or {}
        attends = func is F.scaled_dot_product_attention
        if not attends and func not in _ENTERED:
            return func(*args, **kwargs)
        # What is compiled has torch's one backward; a jet has an answer of its own.
        compiling = torch.compiler.is_compiling()
        if attends and not compiling and (plain := with_plain_mask(args, kwargs)) is not None:
            args, kwargs = (), plain
        if compiling or not _is_plain((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if attends:
            return _attend(*args, **kwargs)  # type: ignore[arg-type]
        with self:
            return _ENTERED[func](*args, **kwargs)


def _is_plain(values: Sequence[object]) -> bool:
    """Return whether the tensors are of no subclass, as jets are."""
    return all(
        type(x) in (Tensor, torch.nn.Parameter) if isinstance(x, Tensor) else _is_plain(x)
        for x in values
        if isinstance(x, (Tensor, list, tuple))
    )


def _without_question(function: object) -> Function:
    """Copy a function of Python that begins by asking whether a mode wants to answer."""
    assert isinstance(function, FunctionType)
    questions = ("has_torch_function", "has_torch_function_unary")
    names = {**function.__globals__, **{name: lambda *_: False for name in questions}}
    return FunctionType(function.__code__, names, argdefs=function.__defaults__)


# Within its answer a mode is off.  So it would be for what these functions of Python call:
# attention itself, or the forward of a checkpoint that a backward runs anew.
_ENTERED: dict[Function, Function] = {
    function: _without_question(function)
    for function in (
        *(F.multi_head_attention_forward, torch.autograd.grad),
        *(torch.autograd.backward, Tensor.backward),  # the method calls the function, which asks
    )
}


def _attend(
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

    def torchs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    mask_learns = attn_mask is not None and attn_mask.requires_grad
    learns = mask_learns or any(x.requires_grad for x in inputs)
    if not torch.is_grad_enabled() or not learns or dropout_p == 1:  # which leaves nothing
        return torchs(*inputs)
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
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        ours = dropout_p > 0 or query.shape[-1] != value.shape[-1]  # torch's would be math
        if ours:
            dtype = _autocast_dtype(query)
            jets = [torch.stack([x, torch.zeros_like(x)]) for x in (y.to(dtype) for y in leaves)]
            out = attention(*jets, mask=attn_mask, q=1)[0]
        else:
            out = torchs(*leaves)
        if ours or _is_fused(out):
            return _Attention.apply((out, leaves), attention, attn_mask, *inputs)
        reason = "torch chose no fused kernel for it"
    _warn_of_math(reason)
    with sdpa_kernel(SDPBackend.MATH):
        return torchs(*inputs)


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
            "jx.twice_differentiable: torch's math attention, which builds a matrix of tokens by "
            f"tokens, computes a call of scaled_dot_product_attention, because {reason}.",
            RuntimeWarning,
            stacklevel=4,
        )


class _Attention(torch.autograd.Function):
    """Attention whose forward has run: ``inner`` is its result and leaves, with a graph of their
    own between them, whose backward is the first one."""

    @staticmethod
    def forward(
        ctx: Context,
        inner: tuple[Tensor, list[Tensor]],
        attention: Callable[..., Tensor],
        mask: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(_MARKER, mask, *inputs)  # type: ignore[arg-type]  # or None
        ctx.constants = (inner, attention)
        return inner[0].detach()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Gradients:
        _, *saved = ctx.saved_tensors
        return None, None, None, *_Backward.apply(*ctx.constants, gradient, *saved)


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
        of_gradient, *of_inputs = second_backward(
            gradient.unsqueeze(0),
            [x.to(dtype).unsqueeze(0) for x in inputs],
            [None if c is None else c.to(dtype).unsqueeze(0) for c in cotangents],
            partial(attention, mask=mask),
        )
        first = [None if g is None else g.squeeze(0) for g in (of_gradient, *of_inputs)]
        return None, None, first[0], None, *first[1:]
