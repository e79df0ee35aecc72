"""`jx.jet`: the first- and second-order directional derivatives of a function, in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import rules  # noqa: F401  registers the rules
from .dynamo import without_dynamo
from .layout import MAX_DIRECTIONS, ORDERS, JetLayout, make_layout
from .tensor import JetTensor, lift


@dataclasses.dataclass(frozen=True)
class Jet:
    """The 2-jet of a function's output along the directions u_1..u_q.

    Attributes:
        streams: ``[S, *shape]``: all of the below, stacked.
        primal: ``shape``; f(x).
        first: ``[q, *shape]``; J u_i.
        second: ``[P, *shape]``; D²f[u_i, u_j] for ``pairs[p] == (i, j)``, i < j.
        pairs: list of (i, j); empty at order 1 and for a single direction.
    """

    streams: Tensor
    layout: JetLayout

    @property
    def primal(self) -> Tensor:
        return self.streams[0]

    @property
    def first(self) -> Tensor:
        return self.streams[self.layout.first]

    @property
    def second(self) -> Tensor:
        return self.streams[self.layout.second]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(self.layout.pairs)


def jet(fn: Callable[[Any], Any], x: Tensor, directions: Tensor, order: int = 2) -> Any:
    """Propagate a Taylor expansion of ``fn`` around ``x`` (spec 03-engine).

    Args:
        fn: any torch callable of one tensor, for example a lambda around a model call; it runs
            once, unmodified.
        x: floating-point tensor, the point of expansion.
        directions: ``[q, *x.shape]``, q = 1..4.
        order: 1 (J u_i only) or 2 (also D²f[u_i, u_j] for all pairs i < j).

    Returns:
        `Jet` where ``fn`` returns a tensor; the same tuple, list, dict or dataclass of `Jet`
        where it returns one of tensors.  Differentiable: its backward is the double backward.
        A tensor that does not depend on ``x`` gives zero derivatives.

    Within ``torch.compile`` (docs/compile.md) ``fn`` has to be an ``nn.Module``, or
    ``functools.partial`` of one; anything else breaks the graph and runs eagerly.  NaN in ``x`` is
    then not looked for, and goes through.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: ``x`` is not finite; the directions' shape does not fit; order or q is outside
            what is supported.
        MissingJetRule: ``fn`` calls an operation without a rule.
    """
    if torch.compiler.is_dynamo_compiling():
        from .compiled import jet_in_graph  # here, since it imports torch._dynamo

        return jet_in_graph(fn, x, directions, order)
    return eager_jet(fn, x, directions, order)


@without_dynamo
def eager_jet(fn: Callable[[Any], Any], x: Tensor, directions: Tensor, order: int) -> Any:
    """`jet` outside ``torch.compile``."""
    jet_input = make_input(x, directions, order)
    return to_jets(fn(jet_input), jet_input.jet_layout)


def make_input(
    x: Tensor, directions: Tensor, order: int = 2, *, check_values: bool = True
) -> JetTensor:
    """x + Σ ε_i u_i as a `JetTensor`; checks its arguments as `jet` documents.

    ``check_values=False`` leaves out the one check that has to read x (NaN and infinity).
    """
    _check_point(x)
    if check_values:
        _check_finite(x)
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}, but jets exist for order 1 and 2")
    if not isinstance(directions, Tensor):
        raise TypeError(
            f"directions must be a tensor [q, *x.shape], not {type(directions).__name__}"
        )
    expected = f"[q, {', '.join(map(str, x.shape))}] with q = 1..{MAX_DIRECTIONS}"
    if directions.ndim != x.ndim + 1 or directions.shape[1:] != x.shape:
        raise ValueError(
            f"directions have shape {list(directions.shape)}, but x of shape {list(x.shape)} "
            f"needs {expected}"
        )
    if not 1 <= len(directions) <= MAX_DIRECTIONS:
        raise ValueError(f"{len(directions)} directions were given; expected shape {expected}")
    if directions.device != x.device:
        raise ValueError(f"directions are on {directions.device}, but x is on {x.device}")
    layout = make_layout(len(directions), order).of_a_new_run()
    zeros = x.new_zeros(len(layout.pairs), *x.shape)
    return JetTensor(torch.cat([x.unsqueeze(0), directions.to(x.dtype), zeros]), layout)


def _check_point(x: Any) -> None:
    if not isinstance(x, Tensor) or isinstance(x, JetTensor):
        raise TypeError(f"x must be a plain tensor, not {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(
            f"x has dtype {x.dtype}, but derivatives need a floating-point tensor: pass "
            "embeddings (model.get_input_embeddings()(input_ids)), not token ids"
        )


def _check_finite(x: Tensor) -> None:
    if not torch.isfinite(x).all():
        raise ValueError(
            "x contains NaN or infinite values, so every derivative would be NaN; check the "
            "embeddings or the weights they come from"
        )


def map_tensors(value: Any, apply: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor replaced; tuples, lists, dicts and dataclasses are rebuilt."""
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, dict):
        return _rebuilt_mapping(value, {k: map_tensors(v, apply) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(item, apply) for item in value])
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(item, apply) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(getattr(value, f.name), apply) for f in _fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _rebuilt_mapping(value: dict, items: dict) -> Any:
    """transformers' ModelOutput is a dict and takes its items as keywords."""
    return items if type(value) is dict else type(value)(**items)


def _fields(value: Any) -> tuple:
    return tuple(f for f in dataclasses.fields(value) if f.init)


def to_jets(value: Any, layout: JetLayout) -> Any:
    """Every tensor in a function's result as a `Jet`; constants with zero derivatives.

    Raises:
        ValueError: the function returned a jet of another pass.
    """
    of_no_run = make_layout(layout.directions, layout.order)

    def as_jet(tensor: Tensor) -> Any:
        if not isinstance(tensor, JetTensor) and not tensor.is_floating_point():
            return tensor
        return Jet(lift(tensor, layout).streams, of_no_run)

    return map_tensors(value, as_jet)
