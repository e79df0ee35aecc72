"""`scaled_dot_product_attention` in every nesting of torch's transforms.

Up to order two each derivative is one of five functions, whose memory is linear in the tokens:

| function | its derivative forward | backward |
|---|---|---|
| `Attention` | `Tangent` | `Backward` |
| `Backward` | `Second` | `Second` |
| `Tangent` | `Mixed`, and `Tangent` of the direction's own | `Second` |
| `Second`, `Mixed` | their formula, with T × Tk tensors | the same |

A mask that has derivatives itself is served by products in pieces (`ops.attention_products`), all
else by torch's fused kernel, and by jets from the second order on.  Tensors are
``[..., B, H, T, D]``: vmap adds a dimension in front, which is folded into the batch, unless it
brings nothing but directions: those are directions of one jet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import ops, torch_private
from ..ops import attention_products as products
from ..ops.attention_reference import default_scale, dropout_mask
from ..ops.directions import fresh_seed_on
from ..ops.library import Context, recorded
from .levels import levels_of
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
    """Compute `scaled_dot_product_attention` of the same arguments, to be differentiated."""
    inputs, mask = (query, key, value), attn_mask
    if (
        not any(levels_of([x for x in (*inputs, mask) if x is not None]))
        or any(x.is_nested or x.ndim < 2 for x in inputs)
        or (mask is not None and is_causal)  # which torch refuses
        or not 0 <= dropout_p < 1
    ):
        return _SDPA(*inputs, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    query, key, value, mask = _cast(*inputs, mask)
    query, key, value, mask = _aligned(query, key, value, mask, enable_gqa)
    call = Call(
        default_scale(query) if scale is None else scale,
        is_causal,
        dropout_p,
        # Hooks, those of a checkpoint, may keep what is saved for one use, or run a block for each
        # graph that asks: the backward makes what it needs anew.
        None if _hooked() else [],
    )
    # vmap says by its `randomness` what a draw is.
    seed = fresh_seed_on(query.device) if dropout_p else None
    y = Attention.apply(query, key, value, mask, seed, call)
    lead = inputs[0].shape[:-1] if query.ndim == 4 and inputs[0].ndim < 4 else y.shape[:-1]
    return y.reshape(*lead, y.shape[-1])


def _cast(query: Tensor, *others: Tensor | None) -> list[Any]:
    """Convert to the dtype in which torch's attention would compute under autocast."""
    device = query.device.type
    if not torch.is_autocast_enabled(device) or query.dtype == torch.float64:
        return [query, *others]
    dtype = torch.get_autocast_dtype(device)
    tensors = query, *others
    return [x if x is None or not x.is_floating_point() else x.to(dtype) for x in tensors]


def _aligned(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors with one number of dimensions, four or more, and one batch; heads of keys
    and values the same, dividing those of the query."""
    inputs = [x[(None,) * (4 - x.ndim)] for x in (query, key, value)]
    sizes = [x.shape[: -3 if grouped else -2] for x in inputs]
    lead = torch.broadcast_shapes(*sizes)
    inputs = [
        x if size == lead else x.expand(*lead, *x.shape[len(size) - x.ndim :])
        for x, size in zip(inputs, sizes, strict=True)
    ]
    heads = inputs[0].shape[-3]
    if inputs[1].shape[-3] != inputs[2].shape[-3]:
        inputs[1:] = [x.repeat_interleave(heads // x.shape[-3], -3) for x in inputs[1:]]
    if mask is not None:
        mask = mask[(None,) * (inputs[0].ndim - mask.ndim)]
    return inputs[0], inputs[1], inputs[2], mask


# ---- the functions ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Call:
    """What a call of attention takes beside tensors.

    Attributes:
        graph: holds, once `Attention` has run, its result and leaves, with a graph of torch's own
            between them, which is the first backward; None: it is not kept.
        mask_learns: whether the mask's gradient is asked for.
    """

    scale: float
    causal: bool
    dropout_p: float
    graph: list[tuple[Tensor, list[Tensor]]] | None
    mask_learns: bool = False

    def products(self, tensors: Sequence[Any]) -> products.Products:
        """Return the arguments of formulas, from query, key, value, mask, seed and what follows."""
        query, key, value, mask, seed = tensors[:5]
        factor = None
        if self.dropout_p:
            batch, heads, rows = query.shape[-4:-1]
            kept = dropout_mask(
                batch, heads, rows, key.shape[-2], self.dropout_p, seed, query.device
            )
            factor = kept.to(query.dtype) / (1 - self.dropout_p)
        return products.Products(query, key, value, mask, self.scale, self.causal, factor)


class CallContext(Context):
    """What a forward hands on to its derivatives."""

    call: Call


class _Operator(Function):
    """A function of query, key, value, mask, seed and further tensors, with the `Call` last."""

    @staticmethod
    def setup_context(ctx: CallContext, inputs: tuple[Any, ...], output: object) -> None:
        *tensors, ctx.call = inputs
        ctx.set_materialize_grads(False)  # what does not move costs nothing
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        *tensors, call = inputs
        results = _for_each(cls, info.batch_size, tensors, in_dims, call)
        if isinstance(results, Tensor):
            return results, 0
        return results, tuple(None if x is None else 0 for x in results)


def _for_each(
    function: type[Function],
    size: int,
    tensors: Sequence[Tensor | None],
    dims: Sequence[int | None],
    call: Call,
) -> Any:
    """Call a function for each of ``size`` places along a dimension of some tensors, and return its
    results with that dimension in front."""
    if not call.dropout_p:
        return function.apply(
            *(
                x if x is None else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
                for x, dim in zip(tensors, dims, strict=False)
            ),
            call,
        )
    # A place in a batch has weights of its own dropped, which all places here share.
    rows = [
        function.apply(
            *(
                x if x is None or dim is None else x.select(dim, n)
                for x, dim in zip(tensors, dims, strict=False)
            ),
            call,
        )
        for n in range(size)
    ]
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    columns = zip(*rows, strict=True)
    return tuple(None if column[0] is None else torch.stack(column) for column in columns)


def _apply(function: type[Function], *inputs: Any) -> Any:
    """Call a function within a backward or jvp, where torch's older batched tensors, those of
    `is_grads_batched`, may come: to Python they are one tensor without a history."""
    *tensors, call = inputs
    batched = torch_private.functorch.is_legacy_batchedtensor
    dims = [0 if x is not None and batched(x) else None for x in tensors]
    if not any(dim == 0 for dim in dims):
        return function.apply(*inputs)
    plain = [
        x if dim is None else torch_private.remove_batch_dim(x, 1, 0, 0)
        for x, dim in zip(tensors, dims, strict=True)
    ]
    size = next(len(x) for x, dim in zip(plain, dims, strict=True) if dim == 0)
    results = _for_each(function, size, plain, dims, call)
    join = torch_private.add_batch_dim
    if isinstance(results, Tensor):
        return join(results, 0, 1)
    return tuple(None if x is None else join(x, 0, 1) for x in results)


def _plainly(forward: Callable[..., Any]) -> Any:
    """Make a forward, which is handed plain tensors, free of modes and of autocast.

    What it returns is in nobody's hands, and no view, to which a dual level gives no tangent.
    """

    @wraps(forward)
    def run(query: Tensor, *inputs: Any) -> Any:
        off = torch.autocast(query.device.type, enabled=False)
        with torch_private.disable_torch_function(), off, torch.no_grad():
            results = forward(query, *inputs)
        if isinstance(results, Tensor):
            return results.data
        return tuple(None if x is None else x.data for x in results)

    return staticmethod(run)


class _Primal:
    """The context of a function whose tensors have the tangents of outer levels alone."""

    def __init__(self, ctx: CallContext) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ctx, name)
        if name != "saved_tensors":
            return value
        unpack = torch_private.unpack_dual
        return tuple(None if x is None else unpack(x, level=0)[0] for x in value)


def _forward_mode(jvp: Callable[..., Any]) -> Any:
    """Make a jvp differentiable by outer levels of forward mode.

    torch switches forward mode off in it, for all levels: a sum of two terms would lose the
    tangents of the outer ones without a word.
    """

    @wraps(jvp)
    def run(ctx: CallContext, *tangents: Tensor | None) -> Any:
        with torch_private.set_forward_grad_enabled(True):
            return jvp(_Primal(ctx), *tangents)

    return staticmethod(run)


class Attention(_Operator):
    """Attention: query, key, value, mask, seed, call -> y."""

    @_plainly
    def forward(*inputs: Any) -> Tensor:
        *tensors, call = inputs
        out, leaves = _run(tensors, call)
        if call.graph is not None:
            call.graph[:] = [(out, leaves)]
        return out.detach().reshape(*tensors[0].shape[:-1], out.shape[-1])

    @staticmethod
    def setup_context(ctx: CallContext, inputs: tuple[Any, ...], output: Any) -> None:
        _Operator.setup_context(ctx, inputs, output)
        # The graph has the result's memory: saved, it tells who writes into it.
        kept = [output] if ctx.call.graph else []
        ctx.save_for_backward(*inputs[:-1], _MARKER, *kept)

    @staticmethod
    def backward(ctx: CallContext, g: Tensor | None) -> Any:
        if g is None:
            return (None,) * 6
        call = replace(ctx.call, mask_learns=ctx.needs_input_grad[3])
        return *_apply(Backward, *ctx.saved_tensors[:5], g, call), None, None

    @_forward_mode
    def jvp(ctx: CallContext, *tangents: Tensor | None) -> Tensor:
        return _apply(Tangent, *ctx.saved_tensors[:5], *tangents[:4], ctx.call)


class Backward(_Operator):
    """The gradients of attention: query, key, value, mask, seed, g, call -> gradients of four."""

    @_plainly
    def forward(*inputs: Any) -> Any:
        *tensors, g, call = inputs
        if call.mask_learns:
            return tuple(_by_formula(products.backward, tensors, call, g))
        flat = _flat(*tensors[:3])
        out, leaves = call.graph[0] if call.graph else (None, flat)
        if out is None or not all(map(Tensor.is_set_to, leaves, flat)):
            out, leaves = _run(tensors, call)
        gradients = torch.autograd.grad(out, leaves, g.reshape(out.shape), retain_graph=True)
        pairs = zip(gradients, tensors[:3], strict=True)
        return *(gradient.reshape(x.shape) for gradient, x in pairs), None

    @staticmethod
    def backward(ctx: CallContext, *cotangents: Tensor | None) -> Any:
        if all(c is None for c in cotangents):
            return (None,) * 7
        call = replace(ctx.call, mask_learns=ctx.needs_input_grad[3])
        *inputs, g = ctx.saved_tensors
        *of_inputs, along = _apply(Second, *inputs, None, g, *cotangents, call)[:5]
        return *of_inputs, None, along, None

    @_forward_mode
    def jvp(ctx: CallContext, *tangents: Tensor | None) -> Any:
        *inputs, g = ctx.saved_tensors
        *moves, _, dg, _ = tangents
        if all(x is None for x in moves):
            return _apply(Backward, *inputs, dg, ctx.call)
        return _apply(Second, *inputs, dg, g, *moves, ctx.call)[:4]


class Tangent(_Operator):
    """The derivative J d: query, key, value, mask, seed, their tangents d, call -> J d."""

    @_plainly
    def forward(*inputs: Any) -> Any:
        *tensors, call = inputs
        tensors, direction = tensors[:5], tensors[5:]
        if direction[3] is not None:
            return _by_formula(products.tangent, tensors, call, *direction)[0]
        lead = tensors[0].shape[:-4]
        shape = (*tensors[0].shape[:-1], tensors[2].shape[-1])
        if lead.numel() > 1 and not call.dropout_p and all(map(_is_shared, tensors[:4])):
            tensors = [x if x is None else x[(0,) * len(lead)] for x in tensors[:4]] + [None]
            many = [None if d is None else d.flatten(0, -5) for d in direction[:3]]
        else:
            tensors = [*_flat(*tensors[:3]), _flat_mask(tensors), tensors[4]]
            many = [None if d is None else d.flatten(0, -4)[None] for d in direction[:3]]
        number = next((len(d) for d in many if d is not None), 1)
        jets = [
            torch.cat([x[None], x.new_zeros(()).expand(number, *x.shape) if d is None else d])
            for x, d in zip(tensors, many, strict=False)
        ]
        return _jet(tensors, call)(*jets, q=number)[1:].reshape(shape)

    @staticmethod
    def backward(ctx: CallContext, c: Tensor | None) -> Any:
        if c is None:
            return (None,) * 10
        inputs, direction = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        needed = ctx.needs_input_grad
        call = replace(ctx.call, mask_learns=needed[3] or needed[8])
        if not any(needed[:4]):
            results = (*(None,) * 5, *_apply(Backward, *inputs, c, call))
        else:
            results = _apply(Second, *inputs, None, c, *direction, call)
        # The fifth is J d, in the place of the seed; what does not move has no gradient.
        moves = [x if d is not None else None for x, d in zip(results[5:], direction, strict=True)]
        return *results[:4], None, *moves, None

    @_forward_mode
    def jvp(ctx: CallContext, *tangents: Tensor | None) -> Any:
        inputs, direction = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        moves, turns = tangents[:4], tangents[5:9]
        result = None
        if any(x is not None for x in moves):
            result = _apply(Mixed, *inputs, *direction, *moves, ctx.call)
        if any(x is not None for x in turns):
            turned = _apply(Tangent, *inputs, *turns, ctx.call)
            result = turned if result is None else result + turned
        return result


class _Last(_Operator):
    """A function of second order, whose derivatives are its formula's."""

    formula: products.Formula

    @classmethod
    def _closed(cls, ctx: CallContext) -> tuple[list[int], Any, Callable[..., Any]]:
        """Return which tensors have derivatives, and the formula's results and vjp at these."""
        tensors = ctx.saved_tensors
        places = [n for n, x in enumerate(tensors) if x is not None and x.is_floating_point()]

        def results(*moving: Tensor) -> tuple[Tensor, ...]:
            values = [*tensors]
            for n, x in zip(places, moving, strict=True):
                values[n] = x
            with torch.autocast(moving[0].device.type, enabled=False):
                found = products.whole(cls.formula, ctx.call.products(values), *values[5:])
            return tuple(x for x in found if x is not None)

        return places, *torch.func.vjp(results, *(tensors[n] for n in places))

    @classmethod
    def _gradients(
        cls, ctx: CallContext, cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        places, values, vjp = cls._closed(ctx)
        present = [c for c, there in zip(cotangents, cls._there(ctx), strict=True) if there]
        gradients = dict(zip(places, vjp(tuple(map(_or_zeros, present, values))), strict=True))
        return [*(gradients.get(n) for n in range(len(ctx.saved_tensors))), None]

    @classmethod
    def _there(cls, ctx: CallContext) -> list[bool]:
        """Return which results there are: all but the gradient of a mask that has none."""
        return [
            kind != "m" or products.learns(ctx.saved_tensors[3])
            for kind in products.RESULTS[cls.formula]
        ]

    @classmethod
    def _along(cls, ctx: CallContext, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        places, values, vjp = cls._closed(ctx)
        moves = tuple(_or_zeros(tangents[n], ctx.saved_tensors[n]) for n in places)
        # The vjp is linear, and its own vjp is the jvp, which torch.func.jvp is not within a jvp.
        zeros = tuple(map(torch.zeros_like, values))
        along = iter(torch.func.vjp(vjp, zeros)[1](moves)[0])
        return [next(along) if there else None for there in cls._there(ctx)]


def _or_zeros(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x


class Second(_Last):
    """The gradients of <gy, y> + <g, J d> in the four and in d, and J d: query, key, value, mask,
    seed, gy, g, d, call -> four, J d, four."""

    formula = products.second

    @_plainly
    def forward(*inputs: Any) -> Any:
        *tensors, call = inputs
        tensors, (gy, g, *direction) = tensors[:5], tensors[5:]
        if call.mask_learns or direction[3] is not None:
            return tuple(_by_formula(products.second, tensors, call, gy, g, *direction))
        jets = [
            torch.stack(_flat(x, _or_zeros(d, x))).requires_grad_()
            for x, d in zip(tensors[:3], direction, strict=False)
        ]
        with torch.enable_grad():
            y = _jet(tensors, call)(*jets, q=1)
        cotangents = torch.stack(_flat(_or_zeros(gy, g), g))
        gradients = torch.autograd.grad(y, jets, cotangents)
        of_inputs, of_direction = (
            [gradient[n].reshape(x.shape) for gradient, x in zip(gradients, tensors, strict=False)]
            for n in (0, 1)
        )
        return *of_inputs, None, y[1].detach().reshape(g.shape), *of_direction, None

    @staticmethod
    def backward(ctx: CallContext, *cotangents: Tensor | None) -> Any:
        return tuple(Second._gradients(ctx, cotangents))

    @_forward_mode
    def jvp(ctx: CallContext, *tangents: Tensor | None) -> Any:
        return tuple(Second._along(ctx, tangents))


class Mixed(_Last):
    """The second derivative along d and e: query, key, value, mask, seed, d, e, call -> y."""

    formula = products.mixed

    @_plainly
    def forward(*inputs: Any) -> Any:
        *tensors, call = inputs
        tensors, one, other = tensors[:5], tensors[5:9], tensors[9:]
        if one[3] is not None or other[3] is not None:
            return _by_formula(products.mixed, tensors, call, *one, *other)[0]
        jets = [
            torch.stack(_flat(x, *(_or_zeros(y, x) for y in (d, e, None))))
            for x, d, e in zip(tensors[:3], one, other, strict=False)
        ]
        y = _jet(tensors, call)(*jets, q=2)[3]
        return y.reshape(*tensors[0].shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: CallContext, c: Tensor | None) -> Any:
        return tuple(Mixed._gradients(ctx, [c]))

    @_forward_mode
    def jvp(ctx: CallContext, *tangents: Tensor | None) -> Any:
        return Mixed._along(ctx, tangents)[0]


# ---- who computes ----------------------------------------------------------------------------


def _by_formula(
    formula: products.Formula, tensors: Sequence[Any], call: Call, *rest: Tensor | None
) -> list[Tensor | None]:
    # A recorded graph may lose what is written in place, as pieces are (torch.func.linearize).
    at_once = call.dropout_p or call.causal or recorded()
    compute = products.whole if at_once else products.in_pieces
    return compute(formula, call.products(tensors), *rest)


def _is_shared(x: Tensor | None) -> bool:
    """Return whether the leading dimensions repeat one tensor of four."""
    return x is None or all(
        size == 1 or stride == 0 for size, stride in zip(x.shape[:-4], x.stride(), strict=False)
    )


def _flat(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with one batch dimension."""
    return [x.flatten(0, -4) for x in tensors]


def _flat_mask(tensors: Sequence[Any]) -> Tensor | None:
    """Return the mask, of which nobody asks a gradient, with one batch dimension."""
    query, _, _, mask = tensors[:4]
    if mask is None:
        return None
    mask = mask.detach()
    first = mask[(0,) * (mask.ndim - 4)]
    if _is_shared(mask) and (mask.ndim == 4 or len(first) == 1):
        return first
    return mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)


def _jet(tensors: Sequence[Any], call: Call) -> Callable[..., Tensor]:
    """Return `attention_jet` with what it takes beside jets and q."""
    seed = tensors[4]
    return partial(
        ops.attention_jet,
        mask=_flat_mask(tensors),
        scale=call.scale,
        causal=call.causal,
        dropout_p=call.dropout_p,
        dropout_seed=0 if seed is None else seed,
    )


def _run(tensors: Sequence[Any], call: Call) -> tuple[Tensor, list[Tensor]]:
    """Return attention and leaves, with a graph between them whose backward is the first one."""
    mask = _flat_mask(tensors)
    # Those of a checkpoint are the outer graph's.
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x) if _hooked() else nullcontext()
    forced = sdpa_kernel([*_FUSED, SDPBackend.MATH]) if math_is_forced() else nullcontext()
    with torch.enable_grad(), hooks, forced:
        leaves = [_as_kernels_take(x.flatten(0, -4).detach()).requires_grad_() for x in tensors[:3]]
        options: dict[str, Any] = {
            "scale": call.scale,
            "enable_gqa": leaves[0].shape[1] != leaves[1].shape[1],
        }
        arguments = (*leaves, mask, call.dropout_p, call.causal)
        # Of torch's own kernels none says which weights it dropped: ours draws them again.
        ours = call.dropout_p or torch_private.fused_attention_choice(*arguments, **options) == 0
        if not ours:
            return _SDPA(*arguments, **options), leaves
        jets = [torch.stack([x, torch.zeros_like(x)]) for x in leaves]
        return _jet(tensors, call)(*jets, q=1)[0], leaves


def _hooked() -> bool:
    """Return whether hooks see what autograd saves."""
    return torch_private.autograd._top_saved_tensors_default_hooks(False) is not None


def _as_kernels_take(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


_FUSED = (
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION),
)


def math_is_forced() -> bool:
    """Return whether the program allows no kernel of attention but math."""
    cuda = torch.backends.cuda
    return not (
        cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    )
