"""`DualTensor`, a primal with a tangent that has no graph, for `jx.jvp(..., differentiable=False)`.

The primal is computed by torch's own functions, so that its graph is that of a plain call; the
tangent is computed without gradients, so that autograd saves nothing for it.

The tangents of linear functions and of products are computed by the same functions.  For other
functions the rule of `JetTensor` is called, which computes the primal a second time; except for
attention, these cost little compared with matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...ops import collectives
from ...ops.gemm import rows_times
from ...torch_private import functional as F
from ..adapters.quantised import is_quantised
from ..engine.autograd_functions import is_apply
from ..engine.constants import call_on_constants, is_constant, mark_constant, unmark_constant
from ..engine.context import call_rule
from ..engine.derivative import (
    DerivativeTensor,
    call_mask,
    carries_derivatives,
    check_call,
    check_complex,
    check_pass,
)
from ..engine.errors import missing_rule
from ..engine.kinds import LINEAR, PRODUCTS, QUOTIENTS, SUMS, VIEWS
from ..engine.layout import JetLayout, iter_tensors, replace_tensors
from ..engine.registry import R, attribute, original_function, require_rule, spellings
from ..engine.strides import record_storage, refuse_overlap, storage_id
from ..engine.tensor import JetTensor, lift
from ..engine.types import Function, T
from ..rules.collectives import register_wrappers


class DualPass:
    """The state of one call of `jvp`.

    Attributes:
        layout: layout of the jets that rules are called with.
        read_only: storages of primals into which no write is allowed, by id: those of expanded
            primals, and of views whose tangent is a copy.  A write would miss some tangents.
    """

    def __init__(self, layout: JetLayout) -> None:
        self.layout = layout
        self.read_only: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def forbid_writes(self, primal: Tensor) -> None:
        """Refuse writes into this tensor's memory from now on."""
        record_storage(primal, self.read_only)


class DualTensor(DerivativeTensor):
    """A dual tensor x + ε t, with the shape, dtype, device and graph of x.

    Args:
        primal: x, a plain tensor, which may have a graph.
        tangent: t, of x's shape, dtype and device, without a graph.
        dual_pass: the call of `jvp` that it belongs to.
    """

    primal: Tensor
    tangent: Tensor
    dual_pass: DualPass

    @staticmethod
    def __new__(cls, primal: Tensor, tangent: Tensor, dual_pass: DualPass) -> DualTensor:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            primal.shape,
            strides=primal.stride(),
            dtype=primal.dtype,
            device=primal.device,
            requires_grad=True,
        )
        wrapper.primal, wrapper.tangent = primal, _match_strides(primal, tangent)
        wrapper.dual_pass = dual_pass
        return wrapper

    pass_layout = property(attrgetter("dual_pass.layout"))
    autograd_tensor = property(attrgetter("primal"))
    shape = property(attrgetter("primal.shape"))  # type: ignore[assignment]
    dtype = property(attrgetter("primal.dtype"))  # type: ignore[assignment]
    device = property(attrgetter("primal.device"))  # type: ignore[assignment]

    def is_constant(self) -> bool:
        return is_constant(self.primal)

    def make_constant(self, value: Tensor) -> Tensor:
        if not carries_derivatives(value):
            return value
        mark_constant(value)
        return DualTensor(value, torch.zeros_like(value, requires_grad=False), self.dual_pass)

    def with_primal(self, primal: Tensor) -> DualTensor:
        """Return a dual tensor with another primal of the same shape, and the same tangent, cast to
        the new primal's dtype."""
        return DualTensor(primal, self.tangent.to(primal.dtype), self.dual_pass)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"DualTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        func, kwargs = original_function(func), kwargs or {}
        if len(types) > 1 and (out := call_mask(func, types, args, kwargs)) is not NotImplemented:
            return out
        check_call(cls, func, types, args, kwargs)
        result = call_on_constants(func, args, kwargs, DerivativeTensor)
        if result is not NotImplemented:
            return result
        tangent_rule = TANGENT_RULES.get(func)
        result = NotImplemented if tangent_rule is None else tangent_rule(func, args, kwargs)
        result = _apply_jet_rule(func, args, kwargs) if result is NotImplemented else result
        check_pass(func, args, result)
        return result


def _match_strides(primal: Tensor, tangent: Tensor) -> Tensor:
    """Return the tangent with the strides of the primal."""
    # With other strides a reshape could copy one and return a view of the other: a write into the
    # view would then miss the tangent.  An expanded primal (stride 0) takes no writes.
    if tangent.stride() == primal.stride() or 0 in primal.stride():
        return tangent
    return tangent.new_empty_strided(primal.shape, primal.stride()).copy_(tangent)


# ---- dual tensors among arguments ---------------------------------------------------------------


def _find_duals(*values: object) -> list[DualTensor]:
    """Return all dual tensors among the arguments of a call; raise ValueError if they belong to
    different calls of `jvp`."""
    duals = [tensor for tensor in iter_tensors(values) if isinstance(tensor, DualTensor)]
    if any(dual.dual_pass is not duals[0].dual_pass for dual in duals):
        raise ValueError("tensors of two calls of jx.jvp met in one operation; run one at a time")
    return duals


def _replace_duals(value: T, replace: Callable[[DualTensor], object]) -> T:
    """Replace every dual tensor in the arguments of a call."""
    return replace_tensors(value, lambda t: replace(t) if isinstance(t, DualTensor) else t)


def _primals(value: T) -> T:
    """Replace every dual tensor in the arguments of a call by its primal."""
    return replace_tensors(value, lambda t: t.primal if isinstance(t, DualTensor) else t)


# ---- functions whose tangent needs no rule ------------------------------------------------------

TANGENT_RULES: dict[Function, Callable] = {}


def register_tangent(*functions: str | Function) -> Callable[[R], R]:
    """Decorate a tangent rule, ``(func, args, kwargs) -> result``, to register it for torch
    functions or their names.

    The rule computes primal and tangent of the result.  If it returns NotImplemented, the jet rule
    is called instead.
    """

    def register(tangent_rule: R) -> R:
        for function in functions:
            for spelling in spellings(function) if isinstance(function, str) else [function]:
                TANGENT_RULES[spelling] = tangent_rule
        return tangent_rule

    return register


@register_tangent(*VIEWS, *LINEAR, "half", "bfloat16", "__neg__", attribute("T"), attribute("mT"))
@register_tangent("avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d")
def _linear(func: Callable, args: tuple, kwargs: dict) -> object:
    """Apply the function to primal and tangent, if only its first argument is a dual tensor."""
    if len(_find_duals(args, kwargs)) != 1 or not args or not isinstance(args[0], DualTensor):
        return NotImplemented
    dual, *settings = args
    primal = func(dual.primal, *settings, **kwargs)
    with torch.no_grad():
        return _pair_results(primal, func(dual.tangent, *settings, **kwargs), dual)


@register_tangent(*collectives.NAMES)
def _collective(func: Callable, args: tuple, kwargs: dict) -> object:
    """Run a collective on primal and tangent, and wait for the results."""
    register_wrappers()
    name = collectives.NAMES[func]
    dual, *settings = collectives.positional(func, args, kwargs)
    if not collectives.is_linear(name, settings):
        return NotImplemented
    return _linear(collectives.Collective.apply, (dual, name, *settings), {})


@register_tangent("view_as", "reshape_as", "expand_as", "type_as")
def _match_example(func: Callable, args: tuple, kwargs: dict) -> object:
    """Apply a function that uses only the shape or dtype of its second argument."""
    if not isinstance(args[0], DualTensor):
        return NotImplemented
    examples, kwargs = _primals((args[1:], kwargs))
    return _linear(func, (args[0], *examples), kwargs)


@register_tangent("broadcast_tensors")
def _broadcast(func: Callable, args: tuple, kwargs: dict) -> object:
    tensors = args[0] if isinstance(args[0], list | tuple) else args
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return tuple(tensor.expand(shape) for tensor in tensors)


@register_tangent(torch.Tensor.__iter__)
def _iterate(func: Callable, args: tuple, kwargs: dict) -> object:
    return iter(torch.unbind(args[0]))


def _pair_results(primal: object, tangent: Tensor | Sequence[Tensor], source: DualTensor) -> object:
    """Combine the results of a linear function, for a primal and for its tangent, into dual
    tensors."""
    if isinstance(primal, list | tuple):
        pairs = zip(primal, tangent, strict=True)
        return type(primal)([_pair_results(x, t, source) for x, t in pairs])
    if isinstance(primal, Tensor) and isinstance(tangent, Tensor) and carries_derivatives(primal):
        return DualTensor(primal, tangent, source.dual_pass)
    return primal


@register_tangent(*SUMS)
def _sum(func: Callable, args: tuple, kwargs: dict) -> object:
    """Add or subtract the tangents; a constant has a zero tangent."""
    duals = _find_duals(args, kwargs)
    if len(args) != 2 or len(duals) != sum(isinstance(a, DualTensor) for a in args):
        return NotImplemented
    primal = func(*_primals(args), **kwargs)
    with torch.no_grad():
        # A 0-dimensional zero stands for the tangent of a constant; the sum is then expanded and
        # cast to the primal's shape and dtype.
        zero = duals[0].tangent.new_zeros(())
        tangents = [a.tangent if isinstance(a, DualTensor) else zero for a in args]
        tangent = func(*tangents, **kwargs).to(primal.dtype).expand(primal.shape)
        return DualTensor(primal, tangent, duals[0].dual_pass)


@register_tangent(*PRODUCTS, torch.Tensor.__rmatmul__)
def _product(func: Callable, args: tuple, kwargs: dict) -> object:
    """Compute a function that is linear in each factor; its tangent is a₁ b₀ + a₀ b₁."""
    duals = _find_duals(args, kwargs)
    if len(args) != 2 or kwargs:
        return NotImplemented
    a, b = args
    primal = func(*_primals(args))
    with torch.no_grad():
        if len(duals) == 1:
            tangent = func(*_replace_duals(args, attrgetter("tangent")))
        else:
            tangent = func(a.tangent, b.primal) + func(a.primal, b.tangent)
        return DualTensor(primal, tangent.to(primal.dtype), duals[0].dual_pass)


@register_tangent(*QUOTIENTS)
def _quotient(func: Callable, args: tuple, kwargs: dict) -> object:
    return NotImplemented if kwargs or len(args) != 2 else _linear(func, args, kwargs)


@register_tangent("cat", "concat", "concatenate", "stack")
def _cat(func: Callable, args: tuple, kwargs: dict) -> object:
    """Concatenate the tangents; constants have zero tangents."""
    if not args or not isinstance(args[0], list | tuple) or _find_duals(args[1:], kwargs):
        return NotImplemented
    tensors, *settings = args
    primal = func(_primals(tensors), *settings, **kwargs)
    with torch.no_grad():
        pieces = [t.tangent if isinstance(t, DualTensor) else torch.zeros_like(t) for t in tensors]
        tangent = func(pieces, *settings, **kwargs)
        return DualTensor(primal, tangent.to(primal.dtype), _find_duals(tensors)[0].dual_pass)


@register_tangent("linear", "conv1d", "conv2d", "conv3d")
def _affine(func: Callable, args: tuple, kwargs: dict) -> object:
    """Apply an affine function to the primal; apply it without its bias to the tangent."""
    names = ("input", "weight", "bias")
    options = dict(zip(names, args, strict=False)) | kwargs
    dual, weight, bias = (options.pop(name, None) for name in names)
    settings = args[len(names) :]
    if _find_duals(weight, bias, settings, options) or is_quantised(weight):
        return NotImplemented
    primal = func(dual.primal, weight, bias, *settings, **options)
    with torch.no_grad():
        is_dense = weight is not None and weight.layout is torch.strided
        if func is F.linear and is_dense and not torch.is_autocast_enabled(dual.device.type):
            tangent = rows_times(dual.tangent, weight)
        else:
            tangent = func(dual.tangent, weight, None, *settings, **options)
        return DualTensor(primal, tangent, dual.dual_pass)


# ---- functions that draw random numbers, the same for primal and tangent ------------------------


@register_tangent("dropout", "dropout_")
def _dropout(func: Callable, args: tuple, kwargs: dict) -> object:
    """Multiply primal and tangent by the same mask, drawn as torch draws it."""
    options = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    dual, p = options["input"], options.get("p", 0.5)
    training = options.get("training", True) and options.get("train", True)
    if not training or p == 0:
        return dual
    with torch.no_grad():
        mask = F.dropout(torch.ones_like(dual.primal), p, True)
    if options.get("inplace", False) or func.__name__.endswith("_"):
        _check_writable(func, dual)
        dual.primal.mul_(mask)
        dual.tangent.mul_(mask)
        return dual
    return DualTensor(dual.primal * mask, dual.tangent * mask, dual.dual_pass)


@register_tangent("scaled_dot_product_attention")
def _attention(func: Callable, args: tuple, kwargs: dict) -> object:
    """With dropout, compute primal and tangent by the jet rule, which draws the mask.

    The primal's graph is then that of a jet with zero tangents, and takes as much memory.
    """
    dropout_p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if dropout_p == 0:
        return NotImplemented
    # The rule runs twice from one state of the generator: without gradients for the tangent, and
    # with them for the primal, as stream 0 of a jet with zero tangents.
    tangent = _draw_tangent(func, args, kwargs)
    jet_args, jet_kwargs = _replace_duals(
        (args, kwargs), lambda d: lift(d.primal, d.dual_pass.layout)
    )
    primal = call_rule(func, require_rule(func), jet_args, jet_kwargs).streams[0]
    return DualTensor(primal, tangent, _find_duals(args, kwargs)[0].dual_pass)


@register_tangent(F.gumbel_softmax)
def _gumbel_softmax(func: Callable, args: tuple, kwargs: dict) -> object:
    tangent = _draw_tangent(func, args, kwargs)
    primal = func(*_primals(args), **_primals(kwargs))
    return DualTensor(primal, tangent, _find_duals(args, kwargs)[0].dual_pass)


def _draw_tangent(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Return the tangent, computed by the jet rule; restore the random generator afterwards, so
    that the primal is computed with the same random numbers."""
    dual = _find_duals(args, kwargs)[0]
    devices = [dual.device] if dual.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        jet_args, jet_kwargs = _replace_duals((args, kwargs), _as_jet)
        return call_rule(func, require_rule(func), jet_args, jet_kwargs).streams[1]


@register_tangent("bernoulli", "rand_like", "randn_like")
def _random_numbers(func: Callable, args: tuple, kwargs: dict) -> object:
    return func(*_primals(args), **_primals(kwargs))


# ---- everything else, by the rules of jets ------------------------------------------------------

# Their rules are called before the function: they refuse a call that would change running
# statistics.
_UPDATES_STATISTICS = (F.batch_norm, F.instance_norm)


@register_tangent(*collectives.LISTWISE)
def _call_jet_rule(func: Callable, args: tuple, kwargs: dict) -> object:
    return require_rule(func)(*args, **kwargs)


def _apply_jet_rule(func: Callable, args: tuple, kwargs: dict) -> object:
    """Call the function on the primals, and the jet rule without gradients for the tangents."""
    rule = require_rule(func)
    duals = _find_duals(args, kwargs)
    if any(dual.dtype.is_complex for dual in duals):
        check_complex(func)
    # `func` computes the primal with its graph.  The rule gets copies of primal and tangent as an
    # order-1 jet along one direction, ``[2, ...]``, and only stream 1 of its result is used.  The
    # copies are made before the function may write into a primal; and not in inference mode, where
    # torch counts no writes.
    with torch.inference_mode(False), torch.no_grad():
        jets = {id(dual): _as_jet(dual) for dual in duals}
    versions = {key: jet.streams._version for key, jet in jets.items()}
    jet_args, jet_kwargs = _replace_duals((args, kwargs), lambda dual: jets[id(dual)])

    @torch.no_grad()
    def run_rule() -> object:
        return call_rule(func, rule, jet_args, jet_kwargs)

    # An autograd Function may draw random numbers in both calls, from the same generator state.
    may_draw = is_apply(func)
    is_rule_first = may_draw or func in _UPDATES_STATISTICS
    devices = [duals[0].device] if duals[0].device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=may_draw):
        jet_out = run_rule() if is_rule_first else None
    plain_result = func(*_primals(args), **_primals(kwargs))
    jet_out = jet_out if is_rule_first else run_rule()
    with torch.no_grad():
        for dual in duals:
            jet = jets[id(dual)]
            # The rule wrote into its copy, and the function into the primal: the tangent follows.
            if jet.streams._version != versions[id(dual)]:
                _check_writable(func, dual)
                refuse_overlap(jet, dual.tangent.stride(), func)
                unmark_constant(dual.primal)
                dual.tangent.copy_(jet.streams[1])
        sources = {id(jets[id(dual)]): dual for dual in duals}
        return _attach_tangent(func, jet_out, plain_result, sources)


def _as_jet(dual: DualTensor) -> JetTensor:
    streams = torch.stack([dual.primal.detach(), dual.tangent])
    return JetTensor(streams, dual.dual_pass.layout)


def _attach_tangent(
    func: Callable, jet_out: object, result: Any, sources: dict[int, DualTensor]
) -> object:
    """Return the function's result as dual tensors, with the tangents of the rule's result.

    Args:
        jet_out: the result of the rule.
        result: the result of the function for the primals.
        sources: the dual tensors among the arguments, by the id of the jet that the rule was
            called with.
    """
    if isinstance(jet_out, JetTensor):
        if id(jet_out) in sources:  # the argument itself, perhaps written into
            return sources[id(jet_out)]
        dual_pass = next(iter(sources.values())).dual_pass
        # Torch returned a view of a primal, but the rule's tangent is a copy.
        if any(storage_id(dual.primal) == storage_id(result) for dual in sources.values()):
            dual_pass.forbid_writes(result)
        elif jet_out.is_constant():
            mark_constant(result)
        return DualTensor(result, jet_out.streams[1].to(result.dtype), dual_pass)
    if isinstance(jet_out, list | tuple) and not isinstance(jet_out, torch.Size):
        pairs = zip(jet_out, result, strict=True)
        return type(result)([_attach_tangent(func, jet, item, sources) for jet, item in pairs])
    if jet_out is not None and not isinstance(jet_out, _PLAIN_TYPES):
        raise missing_rule(func, f"jvp(differentiable=False) cannot take its {type(jet_out)} apart")
    return result


_PLAIN_TYPES = (Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Size, torch.layout)


def _check_writable(func: Callable, dual: DualTensor) -> None:
    """Raise MissingJetRule if no write into the dual tensor is allowed."""
    if storage_id(dual.primal) in dual.dual_pass.read_only:
        raise missing_rule(
            func,
            "it writes into an expanded input, or into a tensor of which "
            "jvp(differentiable=False) has copied a view",
        )
