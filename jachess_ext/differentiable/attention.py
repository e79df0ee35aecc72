"""`scaled_dot_product_attention` in every nesting of torch's transforms.

Attention and its derivatives up to order two are five functions with memory linear in the tokens:

| function | its derivative forward | backward |
|---|---|---|
| `Attention` | `Tangent` | `Backward` |
| `Backward` | `Second` | `Second` |
| `Tangent` | `Mixed`, and `Tangent` along the direction's tangent | `Second` |
| `Second`, `Mixed` | their formula, with T × Tk tensors | the same |

Torch's fused kernel computes values and first gradients; jets compute tangents and second
derivatives, or, if the mask has derivatives itself, matrix products in pieces
(`ops.attention_products`).  Tensors are ``[..., B, H, T, D]``.  vmap adds a dimension in front,
which is folded into the batch; if only the directions have it, they become directions of one jet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
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
from .formulas import MARKER
from .levels import levels_of
from .registry import answers

_SDPA = torch_private.scaled_dot_product_attention  # torch's own, even if its name is replaced


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
    """Compute `scaled_dot_product_attention` of the same arguments, so that it can be
    differentiated in any nesting."""
    inputs, mask = (query, key, value), attn_mask
    if (
        not any(levels_of([x for x in (*inputs, mask) if x is not None]))
        or any(x.is_nested or x.ndim < 2 for x in inputs)
        or (mask is not None and is_causal)  # torch raises an error
        or not 0 <= dropout_p < 1
    ):
        return _SDPA(*inputs, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    query, key, value, mask = _cast(*inputs, mask)
    query, key, value, mask = _match_shapes(query, key, value, mask, enable_gqa)
    call = Call(
        default_scale(query) if scale is None else scale,
        is_causal,
        dropout_p,
        # A checkpoint's hooks may allow one use of saved tensors, or run a block again for each
        # graph: the backward then builds the inner graph anew.
        None if _has_hooks() else [],
    )
    # Drawn here, within vmap, whose `randomness` determines whether its entries share the seed.
    seed = fresh_seed_on(query.device) if dropout_p else None
    y = Attention.apply(query, key, value, mask, seed, call)
    lead_shape = inputs[0].shape[:-1] if query.ndim == 4 and inputs[0].ndim < 4 else y.shape[:-1]
    return y.reshape(*lead_shape, y.shape[-1])


def _cast(query: Tensor, *others: Tensor | None) -> list[Any]:
    """Return the tensors in the dtype in which torch's attention computes under autocast."""
    device = query.device.type
    if not torch.is_autocast_enabled(device) or query.dtype == torch.float64:
        return [query, *others]
    dtype = torch.get_autocast_dtype(device)
    operands = query, *others
    return [x if x is None or not x.is_floating_point() else x.to(dtype) for x in operands]


def _match_shapes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors with the same number of dimensions, at least four, and the same leading
    dimensions; key and value have the same number of heads, which divides that of the query."""
    inputs = [x[(None,) * (4 - x.ndim)] for x in (query, key, value)]
    sizes = [x.shape[: -3 if enable_gqa else -2] for x in inputs]
    lead_shape = torch.broadcast_shapes(*sizes)
    inputs = [
        x if size == lead_shape else x.expand(*lead_shape, *x.shape[len(size) - x.ndim :])
        for x, size in zip(inputs, sizes, strict=True)
    ]
    num_heads = inputs[0].shape[-3]
    if inputs[1].shape[-3] != inputs[2].shape[-3]:
        inputs[1:] = [x.repeat_interleave(num_heads // x.shape[-3], -3) for x in inputs[1:]]
    if mask is not None:
        mask = mask[(None,) * (inputs[0].ndim - mask.ndim)]
    return inputs[0], inputs[1], inputs[2], mask


# ---- the functions ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of attention that are not tensors.

    Attributes:
        graph: a list in which `Attention` stores its result and leaves, with torch's own graph
            between them, from which the backward computes the first gradients.  None: the graph is
            not kept, and the backward builds it anew.
        needs_mask_gradient: whether the backward computes the mask's gradient.
    """

    scale: float
    is_causal: bool
    dropout_p: float
    graph: list[tuple[Tensor, list[Tensor]]] | None
    needs_mask_gradient: bool = False

    def arguments(self, tensors: Sequence[Any]) -> products.Arguments:
        """Return the arguments of the formulas in `ops.attention_products`.

        Args:
            tensors: query, key, value, mask, seed and further tensors, which are ignored.
        """
        query, key, value, mask, seed = tensors[:5]
        factor = None
        if self.dropout_p:
            batch, heads, rows = query.shape[-4:-1]
            shape = batch, heads, rows, key.shape[-2]
            keeps = dropout_mask(*shape, self.dropout_p, seed, query.device)
            factor = keeps.to(query.dtype) / (1 - self.dropout_p)
        return products.Arguments(query, key, value, mask, self.scale, self.is_causal, factor)


class CallContext(Context):
    """An autograd context with the `Call`."""

    call: Call


def _map(function: Callable[[Tensor], Any], results: Any) -> Any:
    """Apply a function to a result, or to each of several results that is not None."""
    if isinstance(results, tuple):
        return tuple(None if x is None else function(x) for x in results)
    return function(results)


class _Operator(Function):
    """Base of the five functions, whose arguments are query, key, value, mask, seed, further
    tensors, and a `Call`."""

    @classmethod
    def compute(cls, *inputs: Any) -> Any:
        """Return the function's results, computed on plain tensors."""
        raise NotImplementedError

    @classmethod
    def push_forward(cls, ctx: CallContext, *tangents: Tensor | None) -> Any:
        """Return the results' tangents, by operations that can be differentiated in forward
        mode."""
        raise NotImplementedError

    @classmethod
    def forward(cls, query: Tensor, *inputs: Any) -> Any:
        no_autocast = torch.autocast(query.device.type, enabled=False)
        with torch_private.disable_torch_function(), no_autocast, torch.no_grad():
            # Without a view in it: to a view a dual level gives no tangent.
            return _map(lambda x: x.data, cls.compute(query, *inputs))

    @staticmethod
    def setup_context(ctx: CallContext, inputs: tuple[Any, ...], output: object) -> None:
        *tensors, ctx.call = inputs
        ctx.set_materialize_grads(False)  # no zeros for tensors without a tangent
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @classmethod
    def jvp(cls, ctx: CallContext, *tangents: Tensor | None) -> Any:
        # Torch disables forward mode here, for all levels: a sum of two terms would silently lose
        # the tangents of outer levels.
        with torch_private.set_forward_grad_enabled(True):
            return cls.push_forward(_Primal(ctx), *tangents)  # type: ignore[arg-type]

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        *tensors, call = inputs
        results = _apply_batch(cls, info.batch_size, tensors, in_dims, call)
        return results, _map(lambda _: 0, results)


class _Primal:
    """An autograd context whose saved tensors lack the tangents of the current level."""

    def __init__(self, ctx: CallContext) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ctx, name)
        unpack = torch_private.unpack_dual
        return _map(lambda x: unpack(x, level=0)[0], value) if name == "saved_tensors" else value


def _apply_batch(
    function: type[Function],
    count: int,
    tensors: Sequence[Tensor | None],
    dims: Sequence[int | None],
    call: Call,
) -> Any:
    """Apply a function to tensors with a batch dimension, which is the first dimension of the
    results.

    Args:
        count: number of entries of the batch.
        dims: the batch dimension of each tensor; None: not batched.
    """
    if not call.dropout_p:
        return function.apply(
            *(
                x if x is None else x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
                for x, dim in zip(tensors, dims, strict=False)
            ),
            call,
        )
    # With dropout the entries run one by one, so that all of them drop the same weights.
    results = [
        function.apply(
            *(
                x if x is None or dim is None else x.select(dim, n)
                for x, dim in zip(tensors, dims, strict=False)
            ),
            call,
        )
        for n in range(count)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    columns = zip(*results, strict=True)
    return tuple(None if column[0] is None else torch.stack(column) for column in columns)


def _apply_unbatched(function: type[Function], *inputs: Any) -> Any:
    """Call a function within a backward or jvp.

    There `is_grads_batched` may batch tensors, which `vmap` does not handle: they are unwrapped.
    """
    *tensors, call = inputs
    is_batched = torch_private.functorch.is_legacy_batchedtensor
    dims = [0 if x is not None and is_batched(x) else None for x in tensors]
    if not any(dim == 0 for dim in dims):
        return function.apply(*inputs)
    unbatched = [
        x if dim is None else torch_private.remove_batch_dim(x, 1, 0, 0)
        for x, dim in zip(tensors, dims, strict=True)
    ]
    count = next(len(x) for x, dim in zip(unbatched, dims, strict=True) if dim == 0)
    wrap = torch_private.add_batch_dim
    return _map(lambda x: wrap(x, 0, 1), _apply_batch(function, count, unbatched, dims, call))


class Attention(_Operator):
    """Compute attention y; arguments: query, key, value, mask, seed, call."""

    @classmethod
    def compute(cls, *inputs: Any) -> Tensor:
        *tensors, call = inputs
        out, leaves = _attention_with_graph(tensors, call)
        if call.graph is not None:
            call.graph[:] = [(out, leaves)]
        return out.detach().reshape(*tensors[0].shape[:-1], out.shape[-1])

    @staticmethod
    def setup_context(ctx: CallContext, inputs: tuple[Any, ...], output: Any) -> None:
        _Operator.setup_context(ctx, inputs, output)
        # The inner graph shares the result's memory: the result is saved, so that autograd detects
        # in-place writes to it.
        outputs = [output] if ctx.call.graph else []
        ctx.save_for_backward(*inputs[:-1], MARKER, *outputs)

    @staticmethod
    def backward(ctx: CallContext, g: Tensor | None) -> Any:
        if g is None:
            return (None,) * 6
        call = replace(ctx.call, needs_mask_gradient=ctx.needs_input_grad[3])
        return *_apply_unbatched(Backward, *ctx.saved_tensors[:5], g, call), None, None

    @classmethod
    def push_forward(cls, ctx: CallContext, *tangents: Tensor | None) -> Tensor:
        return _apply_unbatched(Tangent, *ctx.saved_tensors[:5], *tangents[:4], ctx.call)


class Backward(_Operator):
    """Compute the gradients of query, key, value and mask from the cotangent g of attention.

    Its arguments are query, key, value, mask, seed, g and the call.
    """

    @classmethod
    def compute(cls, *inputs: Any) -> Any:
        *tensors, g, call = inputs
        if call.needs_mask_gradient:
            return tuple(_by_formula(products.backward, tensors, call, g))
        flat = _flat(*tensors[:3])
        out, leaves = call.graph[0] if call.graph else (None, flat)
        if out is None or not all(map(Tensor.is_set_to, leaves, flat)):
            out, leaves = _attention_with_graph(tensors, call)
        gradients = torch.autograd.grad(out, leaves, g.reshape(out.shape), retain_graph=True)
        pairs = zip(gradients, tensors[:3], strict=True)
        return *(gradient.reshape(x.shape) for gradient, x in pairs), None

    @staticmethod
    def backward(ctx: CallContext, *cotangents: Tensor | None) -> Any:
        if all(c is None for c in cotangents):
            return (None,) * 7
        call = replace(ctx.call, needs_mask_gradient=ctx.needs_input_grad[3])
        *inputs, g = ctx.saved_tensors
        *input_gradients, grad_d = _apply_unbatched(Second, *inputs, None, g, *cotangents, call)[:5]
        return *input_gradients, None, grad_d, None

    @classmethod
    def push_forward(cls, ctx: CallContext, *tangents: Tensor | None) -> Any:
        *inputs, g = ctx.saved_tensors
        *direction, _, dg, _ = tangents
        if all(x is None for x in direction):
            return _apply_unbatched(Backward, *inputs, dg, ctx.call)
        return _apply_unbatched(Second, *inputs, dg, g, *direction, ctx.call)[:4]


class Tangent(_Operator):
    """Compute the tangent J d of attention along the tangents d of query, key, value and mask.

    Its arguments are query, key, value, mask, seed, d (four tensors) and the call.
    """

    @classmethod
    def compute(cls, *inputs: Any) -> Any:
        *tensors, call = inputs
        tensors, direction = tensors[:5], tensors[5:]
        if direction[3] is not None:
            return _by_formula(products.tangent, tensors, call, *direction)[0]
        lead_shape = tensors[0].shape[:-4]
        shape = (*tensors[0].shape[:-1], tensors[2].shape[-1])
        if lead_shape.numel() > 1 and not call.dropout_p and all(map(_is_expanded, tensors[:4])):
            tensors = [x if x is None else x[(0,) * len(lead_shape)] for x in tensors[:4]] + [None]
            directions = [None if d is None else d.flatten(0, -5) for d in direction[:3]]
        else:
            tensors = [*_flat(*tensors[:3]), _flat_mask(tensors), tensors[4]]
            directions = [None if d is None else d.flatten(0, -4)[None] for d in direction[:3]]
        q = next((len(d) for d in directions if d is not None), 1)
        jets = [
            torch.cat([x[None], x.new_zeros(()).expand(q, *x.shape) if d is None else d])
            for x, d in zip(tensors, directions, strict=False)
        ]
        return _attention_jet(tensors, call)(*jets, q=q)[1:].reshape(shape)

    @staticmethod
    def backward(ctx: CallContext, c: Tensor | None) -> Any:
        if c is None:
            return (None,) * 10
        inputs, direction = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        needs_gradient = ctx.needs_input_grad
        call = replace(ctx.call, needs_mask_gradient=needs_gradient[3] or needs_gradient[8])
        if not any(needs_gradient[:4]):
            results = (*(None,) * 5, *_apply_unbatched(Backward, *inputs, c, call))
        else:
            results = _apply_unbatched(Second, *inputs, None, c, *direction, call)
        # The fifth of the nine results is J d; the fifth input, the seed, has no gradient.
        pairs = zip(results[5:], direction, strict=True)
        return *results[:4], None, *(x if d is not None else None for x, d in pairs), None

    @classmethod
    def push_forward(cls, ctx: CallContext, *tangents: Tensor | None) -> Any:
        inputs, direction = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        terms = []
        for function, rest in ((Mixed, (*direction, *tangents[:4])), (Tangent, tangents[5:9])):
            if any(x is not None for x in rest[-4:]):
                terms.append(_apply_unbatched(function, *inputs, *rest, ctx.call))
        return sum(terms[1:], terms[0])


class _SecondOrder(_Operator):
    """Base of the functions of second order, which are differentiated through their formula."""

    formula: products.Formula

    @classmethod
    def _vjp(
        cls, ctx: CallContext
    ) -> tuple[list[int], list[bool], tuple[Tensor, ...], Callable[..., Any]]:
        """Return the vector-Jacobian product of the formula, and what its callers need for it.

        Returns:
            The indices of the saved tensors that can have derivatives; for each result whether it
            exists; the values of the results that exist; and their vjp with respect to the tensors
            at these indices.
        """
        tensors = ctx.saved_tensors
        indices = [n for n, x in enumerate(tensors) if x is not None and x.is_floating_point()]
        # The mask's gradient exists only for an additive mask.
        is_additive = products.is_additive(tensors[3])
        presence = [kind != "m" or is_additive for kind in products.RESULTS[cls.formula]]

        def results(*leaves: Tensor) -> tuple[Tensor, ...]:
            values = [*tensors]
            for n, x in zip(indices, leaves, strict=True):
                values[n] = x
            with torch.autocast(leaves[0].device.type, enabled=False):
                outputs = products.at_once(cls.formula, ctx.call.arguments(values), *values[5:])
            return tuple(x for x in outputs if x is not None)

        return indices, presence, *torch.func.vjp(results, *(tensors[n] for n in indices))

    @classmethod
    def backward(cls, ctx: CallContext, *cotangents: Tensor | None) -> Any:
        indices, presence, values, vjp = cls._vjp(ctx)
        present = [c for c, is_present in zip(cotangents, presence, strict=True) if is_present]
        gradients = dict(zip(indices, vjp(tuple(map(_or_zeros, present, values))), strict=True))
        return *(gradients.get(n) for n in range(len(ctx.saved_tensors))), None

    @classmethod
    def push_forward(cls, ctx: CallContext, *tangents: Tensor | None) -> Any:
        indices, presence, values, vjp = cls._vjp(ctx)
        input_tangents = tuple(_or_zeros(tangents[n], ctx.saved_tensors[n]) for n in indices)
        # The jvp is computed as the vjp of the vjp, which is linear: torch.func.jvp does not work
        # within a jvp.
        zeros = tuple(map(torch.zeros_like, values))
        along = iter(torch.func.vjp(vjp, zeros)[1](input_tangents)[0])
        results = tuple(next(along) if is_present else None for is_present in presence)
        return results if len(results) > 1 else results[0]


def _or_zeros(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x


class Second(_SecondOrder):
    """Compute J d, and the gradients of ⟨gy, y⟩ + ⟨g, J d⟩ with respect to query, key, value, mask
    and their tangents d.

    Its arguments are query, key, value, mask, seed, gy, g, d (four tensors) and the call; its
    results the four gradients of the inputs, J d, and the four gradients of d.
    """

    formula = products.second

    @classmethod
    def compute(cls, *inputs: Any) -> Any:
        *tensors, call = inputs
        tensors, (gy, g, *direction) = tensors[:5], tensors[5:]
        if call.needs_mask_gradient or direction[3] is not None:
            return tuple(_by_formula(products.second, tensors, call, gy, g, *direction))
        jets = [
            torch.stack(_flat(x, _or_zeros(d, x))).requires_grad_()
            for x, d in zip(tensors[:3], direction, strict=False)
        ]
        with torch.enable_grad():
            y = _attention_jet(tensors, call)(*jets, q=1)
        cotangents = torch.stack(_flat(_or_zeros(gy, g), g))
        gradients = torch.autograd.grad(y, jets, cotangents)
        input_gradients, direction_gradients = (
            [gradient[n].reshape(x.shape) for gradient, x in zip(gradients, tensors, strict=False)]
            for n in (0, 1)
        )
        return *input_gradients, None, y[1].detach().reshape(g.shape), *direction_gradients, None


class Mixed(_SecondOrder):
    """Compute the second derivative D²y[d, e] of attention y along two directions d and e.

    Its arguments are query, key, value, mask, seed, d, e (four tensors each) and the call.
    """

    formula = products.mixed

    @classmethod
    def compute(cls, *inputs: Any) -> Tensor:
        *tensors, call = inputs
        tensors, one, other = tensors[:5], tensors[5:9], tensors[9:]
        if one[3] is not None or other[3] is not None:
            return _by_formula(products.mixed, tensors, call, *one, *other)[0]  # type: ignore[return-value]
        jets = [
            torch.stack(_flat(x, *(_or_zeros(y, x) for y in (d, e, None))))
            for x, d, e in zip(tensors[:3], one, other, strict=False)
        ]
        y = _attention_jet(tensors, call)(*jets, q=2)[3]
        return y.reshape(*tensors[0].shape[:-1], y.shape[-1])


# ---- formulas, jets and torch's kernels ------------------------------------------------------


def _by_formula(
    formula: products.Formula, tensors: Sequence[Any], call: Call, *rest: Tensor | None
) -> list[Tensor | None]:
    # Pieces are joined by in-place writes, which a recorded graph (torch.func.linearize) may lose.
    is_one_piece = call.dropout_p or call.is_causal or recorded()
    compute = products.at_once if is_one_piece else products.in_pieces
    return compute(formula, call.arguments(tensors), *rest)


def _is_expanded(x: Tensor | None) -> bool:
    """Return whether a tensor only repeats, along all dimensions before the last four, one tensor
    of four dimensions."""
    return x is None or all(
        size == 1 or stride == 0 for size, stride in zip(x.shape[:-4], x.stride(), strict=False)
    )


def _flat(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with all leading dimensions flattened into one batch dimension."""
    return [x.flatten(0, -4) for x in tensors]


def _flat_mask(tensors: Sequence[Any]) -> Tensor | None:
    """Return the mask, detached, with all leading dimensions flattened into one batch dimension."""
    query, _, _, mask = tensors[:4]
    if mask is None:
        return None
    mask = mask.detach()
    unexpanded = mask[(0,) * (mask.ndim - 4)]
    if _is_expanded(mask) and (mask.ndim == 4 or len(unexpanded) == 1):
        return unexpanded
    return mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)


def _attention_jet(tensors: Sequence[Any], call: Call) -> Callable[..., Tensor]:
    """Return `attention_jet` with all arguments bound except the jets and q."""
    seed = tensors[4]
    return partial(
        ops.attention_jet,
        mask=_flat_mask(tensors),
        scale=call.scale,
        causal=call.is_causal,
        dropout_p=call.dropout_p,
        dropout_seed=0 if seed is None else seed,
    )


def _attention_with_graph(tensors: Sequence[Any], call: Call) -> tuple[Tensor, list[Tensor]]:
    """Return attention, and detached copies of query, key and value from which it has a graph."""
    mask = _flat_mask(tensors)
    # A checkpoint's hooks must apply only to the outer graph.
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x) if _has_hooks() else nullcontext()
    forced = sdpa_kernel([*_FUSED, SDPBackend.MATH]) if math_is_forced() else nullcontext()
    with torch.enable_grad(), hooks, forced:
        leaves = [x.detach() for x in _flat(*tensors[:3])]
        # Torch's kernels need contiguous rows.
        leaves = [x if x.stride(-1) == 1 else x.contiguous() for x in leaves]
        leaves = [x.requires_grad_() for x in leaves]
        options: dict[str, Any] = {
            "scale": call.scale,
            "enable_gqa": leaves[0].shape[1] != leaves[1].shape[1],
        }
        arguments = (*leaves, mask, call.dropout_p, call.is_causal)
        # Torch's kernels do not return which weights they dropped; ours can draw the mask again.
        by_jet = call.dropout_p or torch_private.fused_attention_choice(*arguments, **options) == 0
        if not by_jet:
            return _SDPA(*arguments, **options), leaves
        jets = [torch.stack([x, torch.zeros_like(x)]) for x in leaves]
        return _attention_jet(tensors, call)(*jets, q=1)[0], leaves


def _has_hooks() -> bool:
    """Return whether hooks for saved tensors, such as those of a checkpoint, are active."""
    return torch_private.autograd._top_saved_tensors_default_hooks(False) is not None


_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def math_is_forced() -> bool:
    """Return whether the program has disabled all attention kernels of torch except math."""
    cuda = torch.backends.cuda
    return not (
        cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    )
