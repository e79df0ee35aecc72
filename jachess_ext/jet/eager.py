"""`Jet`, and the passes of `jx.jet` and `jx.jvp` outside of ``torch.compile``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import torch_private
from ..ops.library import transformed
from . import rules  # noqa: F401  registers the rules
from .context import without_autocast, without_dynamo
from .derivative import DerivativeTensor, carries_derivatives, kept_too_long
from .dual import DualTensor, Pass
from .fsdp import jets_through_fsdp
from .layout import JetLayout, Second, make_layout, map_tensors
from .passes import open_run
from .rules.quantised import adopt_libraries
from .strides import laid_out_as_input, note_memory, overlaps
from .tensor import JetTensor, different_layouts, lift


@dataclasses.dataclass(frozen=True)
class Jet:
    """The value and derivatives of a function along the directions u_1..u_q.

    Attributes:
        streams: ``[S, *shape]``: all of the below, stacked.
        primal: ``shape``; f(x).
        first: ``[q, *shape]``; J u_i.
        second: ``[P, *shape]``; D²f[u_i, u_j] for ``pairs[p] == (i, j)``; of a sum, that of all
            ``pairs`` in ``second[0]``.
        pairs: list of (i, j): i < j, of squares and their sum (i, i).  Empty at order 1.

    Example:
        >>> jet = jx.jet(torch.square, torch.tensor(3.0), torch.ones(2))
        >>> jet.primal, jet.first, jet.second
        (tensor(9.), tensor([6., 6.]), tensor([2.]))
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


@without_dynamo
def eager_jet(
    fn: Callable[..., Any],
    x: Any,
    directions: Any,
    order: int,
    second: Second = "pairs",
    squares: int | None = None,
    extra: Any = None,
) -> Any:
    """Compute `jet` outside ``torch.compile``.

    Args:
        squares: how many of the directions have squares, as of `make_layout`.
        extra: one direction more, without a square: a nest like ``x``.
    """
    kind = (order, second, squares, extra)
    readable = not (transformed() or torch.compiler.is_exporting())
    arguments, layout = make_arguments(x, directions, *kind, check_values=readable)
    with jets_through_fsdp(), open_run(layout.run):
        return to_jets(fn(*arguments), layout)


def make_arguments(
    x: Any,
    directions: Any,
    order: int,
    second: Second = "pairs",
    squares: int | None = None,
    extra: Any = None,
    *,
    check_values: bool,
) -> tuple[tuple[Any, ...], JetLayout]:
    """Return the arguments of ``fn`` as jets of one pass, and its layout; see `eager_jet`."""
    kind = (order, second, squares)
    if isinstance(x, Tensor):
        jet_input = make_input(x, directions, *kind, extra, check_values=check_values)
        return (jet_input,), jet_input.jet_layout
    points, steps, structure = paired_leaves(x, "x", directions, "directions")
    extras = [None] * len(steps) if extra is None else structure.flatten_up_to(extra)
    layout: JetLayout | None = None
    jets = []
    for (name, point), step, more in zip(points, steps, extras, strict=True):
        named: dict[str, Any] = {"check_values": check_values, "name": name, "layout": layout}
        jet = make_input(point, step, *kind, more, **named)
        layout = jet.jet_layout
        jets.append(jet)
    assert layout is not None
    nest = torch_private.pytree.tree_unflatten(jets, structure)
    return nest if isinstance(x, tuple) else (nest,), layout


def paired_leaves(
    points: Any, name: str, steps: Any, steps_name: str, labels: bool = False
) -> tuple[list[tuple[str, Tensor]], list[Any], Any]:
    """Flatten two nests: return ``(name, point)`` pairs, the steps, and their common structure.

    The names are those of messages, such as ``x[0]['mask']``.

    Args:
        labels: whether points may hold integers.

    Raises:
        TypeError: there are no points, or some cannot start a jet; the steps are nested otherwise.
    """
    leaves, structure = torch_private.pytree.tree_flatten_with_path(points)
    if not leaves:
        holds = "hold" if name.endswith("s") else "holds"
        raise TypeError(f"{name} {holds} no tensor; expected at least one floating-point tensor")
    named = [(name + torch_private.pytree.keystr(path), leaf) for path, leaf in leaves]
    for place, leaf in named:
        if not (labels and _is_label(leaf)):
            check_point(leaf, place)
    try:
        step_leaves = structure.flatten_up_to(steps)  # dicts by their keys, in whatever order
        if any(isinstance(leaf, list | tuple | dict) for leaf in step_leaves):
            raise ValueError
    except ValueError:
        raise TypeError(
            f"{steps_name} are nested otherwise than {name}; expected a tensor for every tensor of "
            f"{name}, in the same tuples, lists and dicts"
        ) from None
    return named, step_leaves, structure


def make_input(
    x: Any,
    directions: Any,
    order: int = 2,
    second: Second = "pairs",
    squares: int | None = None,
    extra: Tensor | None = None,
    *,
    check_values: bool = True,
    name: str = "x",
    layout: JetLayout | None = None,
) -> JetTensor:
    """Return x + Σ ε_i u_i as a `JetTensor`, with the checks that `jet` documents.

    Args:
        check_values: whether to refuse NaN and infinity, which has to read x.
        name: the name of x in messages.
        layout: layout of the pass, if x is not its first tensor.
    """
    check_point(x, name)
    if check_values and not torch.isfinite(x).all():
        raise ValueError(
            f"{name} contains NaN or infinite values, so every derivative would be NaN; check the "
            "embeddings or the weights they come from"
        )
    theirs = "directions" if name == "x" else f"directions{name[1:]}"
    if not isinstance(directions, Tensor):
        raise TypeError(
            f"{theirs} must be a tensor [q, *{name}.shape], not {type(directions).__name__}"
        )
    expected = f"[q, {', '.join(map(str, x.shape))}]"
    if directions.ndim != x.ndim + 1 or directions.shape[1:] != x.shape:
        raise ValueError(
            f"{theirs} have shape {list(directions.shape)}, but {name} of shape {list(x.shape)} "
            f"needs {expected}"
        )
    parts = [x.unsqueeze(0), directions, *([] if extra is None else [extra.unsqueeze(0)])]
    count = len(directions) + len(parts) - 2
    if layout is not None and count != layout.directions:
        raise ValueError(
            f"{theirs} hold {len(directions)} directions, but the tensors before them "
            f"{layout.directions}; expected the same number everywhere"
        )
    _check_dtype_and_device(directions, f"{theirs} are", x, name)
    if layout is None:
        layout = begin_pass(count, order, second, squares)
    if layout.seconds:
        parts.append(x.new_zeros(layout.seconds, *x.shape))
    with without_autocast(x.device.type):
        jet = JetTensor(laid_out_as_input(torch.cat(parts), x), layout)
    if layout.run is not None and overlaps(x.shape, x.stride()):
        note_memory(jet, layout.run.expanded)
    return jet


def _check_dtype_and_device(step: Tensor, subject: str, x: Tensor, name: str) -> None:
    """Require a step to have x's dtype and device; ``subject`` begins the message."""
    them = "them" if subject.endswith(" are") else "it"
    if step.dtype != x.dtype:
        raise TypeError(
            f"{subject} {step.dtype}; expected {x.dtype}, the dtype of {name}: convert {them} with "
            f".to({x.dtype})"
        )
    if step.device != x.device:
        raise ValueError(
            f"{subject} on {step.device}; expected {x.device}, where {name} is: move {them} with "
            f".to('{x.device}')"
        )


def begin_pass(
    directions: int, order: int, second: Second = "pairs", squares: int | None = None
) -> JetLayout:
    """Return the layout of a pass that begins now."""
    adopt_libraries()
    return make_layout(directions, order, second, squares).of_a_new_run()


def check_point(x: Any, name: str) -> None:
    """Raise TypeError unless ``x`` is a plain tensor of real or complex numbers."""
    if isinstance(x, DerivativeTensor):
        raise TypeError(
            f"{name} belongs to a pass of jx.jet, jx.jvp or jx.laplacian around this one; for a "
            "derivative of a derivative, take torch.func.jvp around the inner one: "
            "torch.func.jvp(lambda x: jx.laplacian(f, x)[2], (x,), (v,))[1], and twice for a second"
        )
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be a plain tensor, not {type(x).__name__}; bind what carries no "
            "derivative with functools.partial"
        )
    if not carries_derivatives(x):
        raise TypeError(
            f"{name} has dtype {x.dtype}, but derivatives need a floating-point tensor: pass "
            "embeddings (model.get_input_embeddings()(input_ids)), not token ids"
        )
    kinds = {
        "nested": x.is_nested,
        "sparse": x.layout is not torch.strided,
        "without data, on the device meta": x.is_meta and type(x) is Tensor,
        str(x.dtype): x.dtype.itemsize == 1,
    }
    if any(kinds.values()):
        kind = next(kind for kind, found in kinds.items() if found)
        raise TypeError(
            f"{name} is {kind}, which jets cannot start from; pass a dense tensor of float64, "
            "float32, bfloat16 or float16 on a device"
        )


def check_output(tensor: Tensor, layout: JetLayout) -> None:
    """Refuse a function's result that belongs to another pass.

    Raises:
        RuntimeError: the pass has ended.
        ValueError: the pass surrounds this one.
    """
    if isinstance(tensor, DerivativeTensor) and tensor.layout_of_pass.run is not layout.run:
        run = tensor.layout_of_pass.run
        if run is not None and run.ended:
            raise kept_too_long("the function returned")
        raise different_layouts({tensor.layout_of_pass, layout})


def to_jets(value: Any, layout: JetLayout) -> Any:
    """Return a function's result with a `Jet` for every tensor; constants have zero derivatives.

    Raises:
        RuntimeError, ValueError: as `check_output`.
    """
    of_no_run = layout.without_run()

    def as_jet(tensor: Tensor) -> Any:
        check_output(tensor, layout)
        if not isinstance(tensor, JetTensor) and not carries_derivatives(tensor):
            return tensor
        return Jet(lift(tensor, layout).streams, of_no_run)

    return map_tensors(value, as_jet)


@without_dynamo
def eager_jvp(
    fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    has_aux: bool,
    differentiable: bool,
) -> tuple[Any, ...]:
    """Compute `jvp` outside ``torch.compile``."""
    # Without gradients a jet has no graph either, and its operators are fused; dual tensors cannot
    # work on the wrappers of torch.func.
    as_jets = differentiable or not torch.is_grad_enabled() or transformed()
    arguments, layout = with_tangents(primals, tangents, as_jets)
    with jets_through_fsdp(), open_run(layout.run):
        return split_output(fn(*arguments), has_aux, differentiable, layout)


def with_tangents(primals: Any, tangents: Any, as_jets: bool) -> tuple[tuple[Any, ...], JetLayout]:
    """Return the arguments of ``fn``, as jets of order 1 or as dual tensors, and their layout."""
    if not isinstance(primals, tuple):
        raise TypeError(
            f"primals must be a tuple, with an entry for each argument of fn, not "
            f"{type(primals).__name__}; for one argument, write primals=(x,)"
        )
    named, given, structure = paired_leaves(primals, "primals", tangents, "tangents", labels=True)
    if all(_is_label(point) for _, point in named):
        check_point(named[0][1], named[0][0])
    pairs = list(zip(named, given, strict=True))
    for (name, point), step in pairs:
        if _is_label(point) and not (step is None or (isinstance(step, int) and step == 0)):
            raise TypeError(
                f"{name} has dtype {point.dtype}, which has no derivative; expected None as its "
                "tangent"
            )
    points = [pair for pair, _ in pairs if not _is_label(pair[1])]
    steps = [_full(step, pair[1]) for pair, step in pairs if not _is_label(pair[1])]
    for (name, point), step in zip(points, steps, strict=True):
        _check_tangent(name, point, step)
    arguments: list[Any] = []
    layout: JetLayout | None = None
    if as_jets:
        for (_, point), step in zip(points, steps, strict=True):
            jet = make_input(point, step.unsqueeze(0), 1, check_values=False, layout=layout)
            layout = jet.jet_layout
            arguments.append(jet)
    else:
        of_pass = Pass(begin_pass(1, 1))
        layout = of_pass.layout
        for (_, point), step in zip(points, steps, strict=True):
            # Copies, since fn may write into its arguments.
            copy = laid_out_as_input(point.clone().unsqueeze(0), point).squeeze(0)
            arguments.append(DualTensor(copy, step.detach().clone(), of_pass))
            if overlaps(point.shape, point.stride()):
                of_pass.forbid_writes(copy)
    assert layout is not None
    left = iter(arguments)
    arguments = [point if _is_label(point) else next(left) for _, point in named]
    return torch_private.pytree.tree_unflatten(arguments, structure), layout


def _is_label(point: Any) -> bool:
    return isinstance(point, Tensor) and not carries_derivatives(point)


def _full(tangent: Any, primal: Tensor) -> Any:
    """Return a number as a tangent, and None as 0."""
    tangent = 0 if tangent is None else tangent
    if isinstance(tangent, int | float) and not isinstance(tangent, bool):
        return torch.full_like(primal, tangent, requires_grad=False)
    return tangent


def _check_tangent(name: str, primal: Tensor, tangent: Any) -> None:
    theirs = name.replace("primals", "tangents", 1)
    if not isinstance(tangent, Tensor) or isinstance(tangent, DerivativeTensor):
        raise TypeError(
            f"{theirs} must be a plain tensor like {name}, not {type(tangent).__name__}"
        )
    if tangent.shape != primal.shape:
        raise ValueError(
            f"{theirs} has shape {list(tangent.shape)}; expected {list(primal.shape)}, the shape "
            f"of {name}"
        )
    _check_dtype_and_device(tangent, f"{theirs} is", primal, name)


def split_output(
    result: Any, has_aux: bool, differentiable: bool, layout: JetLayout
) -> tuple[Any, ...]:
    """Split the result of ``fn`` into what `jvp` returns.

    Raises:
        TypeError: the result is not of the form that `jvp` documents.
        RuntimeError, ValueError: as `check_output`.
    """
    map_tensors(result, lambda tensor: check_output(tensor, layout))
    if not has_aux:
        return map_tensors(result, _primal), _tangents(result, differentiable)
    output, aux = output_and_aux(result)
    return (
        map_tensors(output, _primal),
        _tangents(output, differentiable),
        map_tensors(aux, _primal),
    )


def output_and_aux(result: Any) -> tuple[Any, Any]:
    """Split what ``fn`` returned with ``has_aux=True``.

    Raises:
        TypeError: it is no tuple of two.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"with has_aux=True fn must return a tuple (output, aux), not {type(result).__name__}"
        )
    return result


def _tangents(output: Any, differentiable: bool) -> Any:
    tangents = map_tensors(output, _tangent, without_tangent)
    return tangents if differentiable else map_tensors(tangents, torch.Tensor.detach)


def without_tangent(other: Any) -> None:
    """Return None for None, which ``fn`` may return beside tensors; else raise TypeError."""
    if other is not None:
        raise TypeError(
            f"fn returned a {type(other).__name__}, which has no tangent; expected tensors, "
            "or nests of them: return anything else as aux, with has_aux=True"
        )


def _primal(tensor: Tensor) -> Tensor:
    return tensor.primal if isinstance(tensor, JetTensor | DualTensor) else tensor


def _tangent(tensor: Tensor) -> Tensor:
    if isinstance(tensor, JetTensor):
        return tensor.streams[1]
    return tensor.tangent if isinstance(tensor, DualTensor) else torch.zeros_like(tensor)
