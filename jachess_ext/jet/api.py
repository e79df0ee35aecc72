"""`jx.jet`: the first- and second-order directional derivatives of a function, in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import torch_private
from ..ops.library import transformed
from . import rules  # noqa: F401  registers the rules
from .autocast import without_autocast
from .deferred import ending
from .dynamo import without_dynamo
from .fsdp import jets_through_fsdp
from .layout import MAX_DIRECTIONS, ORDERS, JetLayout, make_layout
from .nests import map_tensors
from .rules.quantised import adopt_libraries
from .strides import laid_out_as_input, note_memory, overlaps
from .tensor import (
    DerivativeTensor,
    JetTensor,
    carries_derivatives,
    different_layouts,
    kept_too_long,
    lift,
)


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


def jet(fn: Callable[..., Any], x: Any, directions: Any, order: int = 2) -> Any:
    """Propagate a Taylor expansion of ``fn`` around ``x``.

    Args:
        fn: any torch callable of tensors, for example a lambda around a model call; it runs once,
            unmodified.
        x: floating-point tensor, the point of expansion; or a tuple, one entry for each argument
            of ``fn``; or another nest (list, dict, ...) of tensors, the one argument of ``fn``.
            The entries of a tuple may be nests, too.
        directions: ``[q, *x.shape]``, q = 1..4, of x's dtype and device; of several tensors, a
            nest like ``x``, with the same q everywhere: direction i is the i-th slice of all of
            them together.
        order: 1 (J u_i only) or 2 (also D²f[u_i, u_j] for all pairs i < j).

    Returns:
        `Jet` where ``fn`` returns a tensor; the same tuple, list, dict or dataclass of `Jet`
        where it returns one of tensors.  Differentiable: its backward is the double backward.
        A tensor that does not depend on ``x`` gives zero derivatives.

    Within ``torch.compile`` (docs/compile.md) ``fn`` has to be an ``nn.Module``, or
    ``functools.partial`` of one; anything else breaks the graph and runs eagerly.  NaN in ``x`` is
    then not looked for, and goes through; nor is it within a transform of ``torch.func``.

    Raises:
        TypeError: ``x`` holds something other than floating-point tensors; the directions are no
            tensor, or of another dtype.
        ValueError: ``x`` is not finite; the directions' shape or device does not fit; order or q
            is outside what is supported.
        MissingJetRule: ``fn`` calls an operation without a rule.
    """
    if torch.compiler.is_dynamo_compiling():
        from .compiled import jet_in_graph  # here, since it imports torch._dynamo

        return jet_in_graph(fn, x, directions, order)
    return eager_jet(fn, x, directions, order)


@without_dynamo
def eager_jet(fn: Callable[..., Any], x: Any, directions: Any, order: int) -> Any:
    """`jet` outside ``torch.compile``."""
    arguments, layout = make_arguments(x, directions, order, check_values=not transformed())
    with jets_through_fsdp(), ending(layout.run):
        return to_jets(fn(*arguments), layout)


def make_arguments(
    x: Any, directions: Any, order: int, *, check_values: bool
) -> tuple[tuple[Any, ...], JetLayout]:
    """The arguments of ``fn`` as jets of one pass, from x and directions as `jet` takes them."""
    if isinstance(x, Tensor):
        jet_input = make_input(x, directions, order, check_values=check_values)
        return (jet_input,), jet_input.jet_layout
    points, steps, structure = paired_leaves(x, "x", directions, "directions")
    layout: JetLayout | None = None
    jets = []
    for (name, point), step in zip(points, steps, strict=True):
        made = make_input(point, step, order, check_values=check_values, name=name, layout=layout)
        layout = made.jet_layout
        jets.append(made)
    assert layout is not None
    nest = torch_private.pytree.tree_unflatten(jets, structure)
    return nest if isinstance(x, tuple) else (nest,), layout


def paired_leaves(
    points: Any, name: str, steps: Any, steps_name: str
) -> tuple[list[tuple[str, Tensor]], list[Any], Any]:
    """The tensors of a nest, each with what to write to reach it (``x[0]['mask']``); the leaves of
    another, nested alike; and the structure.

    Raises:
        TypeError: the first holds no tensor, or something that no jet can start from; the second
            is nested otherwise.
    """
    leaves, structure = torch_private.pytree.tree_flatten_with_path(points)
    if not leaves:
        holds = "hold" if name.endswith("s") else "holds"
        raise TypeError(f"{name} {holds} no tensor; expected at least one floating-point tensor")
    named = [(name + torch_private.pytree.keystr(path), leaf) for path, leaf in leaves]
    for place, leaf in named:
        check_point(leaf, place)
    found, found_structure = torch_private.pytree.tree_flatten(steps)
    if found_structure != structure:
        raise TypeError(
            f"{steps_name} are nested otherwise than {name}; expected a tensor for every tensor of "
            f"{name}, in the same tuples, lists and dicts"
        )
    return named, found, structure


def make_input(
    x: Any,
    directions: Any,
    order: int = 2,
    *,
    check_values: bool = True,
    name: str = "x",
    layout: JetLayout | None = None,
) -> JetTensor:
    """x + Σ ε_i u_i as a `JetTensor`; checks its arguments as `jet` documents.

    Args:
        check_values: False leaves out the one check that has to read x (NaN and infinity).
        name: what messages call x.
        layout: of the pass, where x is not its first tensor.
    """
    check_point(x, name)
    if check_values:
        _check_finite(x, name)
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}, but jets exist for order 1 and 2")
    theirs = "directions" if name == "x" else f"directions{name[1:]}"
    if not isinstance(directions, Tensor):
        raise TypeError(
            f"{theirs} must be a tensor [q, *{name}.shape], not {type(directions).__name__}"
        )
    expected = f"[q, {', '.join(map(str, x.shape))}] with q = 1..{MAX_DIRECTIONS}"
    if directions.ndim != x.ndim + 1 or directions.shape[1:] != x.shape:
        raise ValueError(
            f"{theirs} have shape {list(directions.shape)}, but {name} of shape {list(x.shape)} "
            f"needs {expected}"
        )
    if not 1 <= len(directions) <= MAX_DIRECTIONS:
        raise ValueError(f"{len(directions)} directions were given; expected shape {expected}")
    if layout is not None and len(directions) != layout.directions:
        raise ValueError(
            f"{theirs} hold {len(directions)} directions, but the tensors before them "
            f"{layout.directions}; expected the same number everywhere"
        )
    if directions.dtype != x.dtype:
        raise TypeError(
            f"{theirs} are {directions.dtype}; expected {x.dtype}, the dtype of {name}: convert "
            f"them with .to({x.dtype})"
        )
    if directions.device != x.device:
        raise ValueError(
            f"{theirs} are on {directions.device}; expected {x.device}, where {name} is: move them "
            f"with .to('{x.device}')"
        )
    if layout is None:
        layout = begin_pass(len(directions), order)
    parts = [x.unsqueeze(0), directions]
    if layout.pairs:
        parts.append(x.new_zeros(len(layout.pairs), *x.shape))
    with without_autocast(x.device.type):
        jet = JetTensor(laid_out_as_input(torch.cat(parts), x), layout)
    if layout.run is not None and overlaps(x.shape, x.stride()):
        note_memory(jet, layout.run.expanded)
    return jet


def begin_pass(directions: int, order: int) -> JetLayout:
    """The layout of a new pass, under the settings of this moment."""
    adopt_libraries()
    return make_layout(directions, order).of_a_new_run()


def check_point(x: Any, name: str) -> None:
    """Raises:
    TypeError: ``x`` is not a plain floating-point tensor.
    """
    if not isinstance(x, Tensor) or isinstance(x, JetTensor):
        raise TypeError(
            f"{name} must be a plain tensor, not {type(x).__name__}; bind what carries no "
            "derivative with functools.partial"
        )
    if not x.is_floating_point():
        raise TypeError(
            f"{name} has dtype {x.dtype}, but derivatives need a floating-point tensor: pass "
            "embeddings (model.get_input_embeddings()(input_ids)), not token ids"
        )


def _check_finite(x: Tensor, name: str) -> None:
    if not torch.isfinite(x).all():
        raise ValueError(
            f"{name} contains NaN or infinite values, so every derivative would be NaN; check the "
            "embeddings or the weights they come from"
        )


def check_output(tensor: Tensor, layout: JetLayout) -> None:
    """Raises:
    RuntimeError: a function's result was kept from a pass that has ended.
    ValueError: it is of a pass that goes on around this one.
    """
    if isinstance(tensor, DerivativeTensor) and tensor.layout_of_pass.run is not layout.run:
        run = tensor.layout_of_pass.run
        if run is not None and run.ended:
            raise kept_too_long("the function returned")
        raise different_layouts({tensor.layout_of_pass, layout})


def to_jets(value: Any, layout: JetLayout) -> Any:
    """Every tensor in a function's result as a `Jet`; constants with zero derivatives.

    Raises:
        RuntimeError: the function returned a jet of another pass.
    """
    of_no_run = make_layout(layout.directions, layout.order)

    def as_jet(tensor: Tensor) -> Any:
        check_output(tensor, layout)
        if not isinstance(tensor, JetTensor) and not carries_derivatives(tensor):
            return tensor
        return Jet(lift(tensor, layout).streams, of_no_run)

    return map_tensors(value, as_jet)
