"""`Jet`, and the passes of `jx.jet` and `jx.jvp` outside of ``torch.compile``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import torch_private
from ...ops import library
from ...ops.attention_blocks import watch_flex_attention
from ...ops.library import transformed
from .. import rules  # noqa: F401  registers the rules

from .. import adapters  # noqa: F401  isort: skip  registers theirs
from ..adapters.libraries import register_varlen_attention
from ..adapters.quantised import register_bitsandbytes
from ..engine.context import without_autocast, without_dynamo
from ..engine.derivative import DerivativeTensor, carries_derivatives, stale_tensor_error
from ..engine.layout import JetLayout, Second, make_layout, map_tensors
from ..engine.strides import match_input_layout, overlaps, record_storage
from ..engine.tensor import JetTensor, layout_error, lift
from ..engine.types import Function
from ..rules.collectives import register_wrappers as register_collective_wrappers
from .dual import DualPass, DualTensor
from .fsdp import jets_through_fsdp
from .scope import open_pass


@dataclasses.dataclass(frozen=True)
class Jet:
    """The value and derivatives of a function along the directions u_1..u_q.

    Attributes:
        streams: ``[S, *shape]``: primal, first and second, concatenated.
        primal: ``shape``; f(x).
        first: ``[q, *shape]``; J u_i.
        second: ``[P, *shape]``; ``second[p]`` is D²f[u_i, u_j] with ``(i, j) = pairs[p]``.  With
            ``second="sum"`` P is 1, and ``second[0]`` the sum over all ``pairs``.
        pairs: list of (i, j) with i < j; with ``second="squares"`` or ``"sum"`` of (i, i).  Empty
            at order 1.

    Examples:
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
    fn: Function, x: object, directions: object, order: int, second: Second = "pairs"
) -> Any:
    """Compute `jet` outside ``torch.compile``."""
    inputs = check_inputs(x, directions, check_values=can_read_values())
    return run_pass(fn, inputs, begin_pass(inputs.count, order, second))


def can_read_values() -> bool:
    """Return whether Python can read the values of tensors: not within a transform of torch.func,
    torch.export or the capture of a CUDA graph."""
    return not (transformed() or torch.compiler.is_exporting() or library.capturing())


def run_pass(fn: Function, inputs: Inputs, layout: JetLayout) -> Any:
    """Run ``fn`` on jets of the inputs; return its result with every tensor replaced by a `Jet`."""
    with jets_through_fsdp(), open_pass(layout.jet_pass):
        return to_jets(fn(*inputs.jets(layout)), layout)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The tensors at which a pass starts, and its directions.

    Attributes:
        points: the tensors of x.
        steps: the directions, ``[q, *shape]`` for each tensor of x.
        structure: the pytree structure of x; None if x is a tensor.
    """

    points: list[Tensor]
    steps: list[Tensor]
    structure: torch_private.pytree.TreeSpec | None = None

    @property
    def count(self) -> int:
        """Return q."""
        return len(self.steps[0])

    def jets(self, layout: JetLayout, extra: list[Tensor] | None = None) -> tuple[Any, ...]:
        """Return the arguments of ``fn`` as jets of one pass.

        Args:
            extra: one more direction, a tensor of its shape for each tensor of x; its second
                derivative is not computed.
        """
        extras: Sequence[Tensor | None] = extra or [None] * len(self.points)
        triples = zip(self.points, self.steps, extras, strict=True)
        jets = [jet_at(point, steps, layout, last_step) for point, steps, last_step in triples]
        if self.structure is None:
            return (jets[0],)
        nest = torch_private.pytree.tree_unflatten(jets, self.structure)
        return nest if isinstance(nest, tuple) else (nest,)


def check_inputs(x: object, directions: object, *, check_values: bool) -> Inputs:
    """Check the arguments as `jet` documents; return x and its directions as lists of tensors.

    Args:
        check_values: whether to refuse NaN and infinity, for which the values of x are read.
    """
    steps: list[Any]
    structure: torch_private.pytree.TreeSpec | None
    if isinstance(x, Tensor):
        check_point(x, "x")
        points, steps, structure = [("x", x)], [directions], None
    else:
        points, steps, structure = paired_leaves(x, "x", directions, "directions")
    for (name, point), step in zip(points, steps, strict=True):
        if check_values:
            check_finite(point, name)
        check_directions(step, point, name, steps[0])
    return Inputs([point for _, point in points], steps, structure)


def paired_leaves(
    points: object, name: str, steps: object, steps_name: str, may_be_labels: bool = False
) -> tuple[list[tuple[str, Tensor]], list[Any], torch_private.pytree.TreeSpec]:
    """Flatten two nests: return ``(name, point)`` pairs, the steps, and their common structure.

    A name is for messages: the path of a tensor in its nest, such as ``x[0]['mask']``.

    Args:
        points: the nest of tensors at which the pass starts.
        name, steps_name: the names of both nests in messages.
        steps: the nest of their directions.
        may_be_labels: whether points may hold integer tensors.

    Raises:
        TypeError: ``points`` holds no tensor, or one that cannot start a jet; ``steps`` are nested
            otherwise than ``points``.
    """
    leaves, structure = torch_private.pytree.tree_flatten_with_path(points)
    if not leaves:
        verb = "hold" if name.endswith("s") else "holds"
        raise TypeError(f"{name} {verb} no tensor; expected at least one floating-point tensor")
    named_points = [(name + torch_private.pytree.keystr(path), leaf) for path, leaf in leaves]
    for leaf_name, leaf in named_points:
        if not (may_be_labels and _is_label(leaf)):
            check_point(leaf, leaf_name)
    # flatten_up_to goes no deeper than x, so the step of a tensor of x may still be a nest.
    try:
        step_leaves = structure.flatten_up_to(steps)  # dicts by their keys, in whatever order
        if any(isinstance(leaf, list | tuple | dict) for leaf in step_leaves):
            raise ValueError
    except ValueError:
        raise TypeError(
            f"{steps_name} are nested otherwise than {name}; expected a tensor for every tensor of "
            f"{name}, in the same tuples, lists and dicts"
        ) from None
    return named_points, step_leaves, structure


def make_input(
    x: Tensor, directions: Tensor, order: int = 2, *, check_values: bool = True
) -> JetTensor:
    """Begin a pass, and return its input x as a jet; the arguments are those of `check_inputs`."""
    inputs = check_inputs(x, directions, check_values=check_values)
    return jet_at(x, directions, begin_pass(inputs.count, order))


def jet_at(
    x: Tensor, directions: Tensor, layout: JetLayout, extra: Tensor | None = None
) -> JetTensor:
    """Return the jet x + Σ ε_i u_i.

    Args:
        directions: u_i, ``[q, *x.shape]``.
        extra: one more direction, of x's shape, placed after ``directions``; None for none.
    """
    # x + Σ ε_i u_i is linear in ε, so its second-order streams are 0; those of fn(x) are not.
    streams = [x.unsqueeze(0), directions, *([] if extra is None else [extra.unsqueeze(0)])]
    if layout.num_second:
        streams.append(x.new_zeros(layout.num_second, *x.shape))
    with without_autocast(x.device.type):
        jet = JetTensor(match_input_layout(torch.cat(streams), x), layout)
    # The stack of an expanded x is dense: a write would change one entry, where torch changes all
    # entries at the same address.  So writes into it are refused.
    if layout.jet_pass is not None and overlaps(x.shape, x.stride()):
        record_storage(jet, layout.jet_pass.overlapping)
    return jet


def check_finite(x: Tensor, name: str) -> None:
    """Raise ValueError if ``x`` holds NaN or infinity."""
    if not torch.isfinite(x).all():
        raise ValueError(
            f"{name} contains NaN or infinite values, so every derivative would be NaN; check the "
            "embeddings or the weights they come from"
        )


def check_directions(directions: object, x: Tensor, name: str, first_directions: Tensor) -> None:
    """Refuse directions that do not fit a tensor of x.

    Args:
        x: the tensor of x.
        name: its name in messages.
        first_directions: the directions of the first tensor of x, which determine the number of
            directions.

    Raises:
        TypeError: ``directions`` is no tensor, or has another dtype than ``x``.
        ValueError: its shape or device does not fit ``x``, or its number of directions that of
            ``first_directions``.
    """
    label = "directions" if name == "x" else f"directions{name[1:]}"
    if not isinstance(directions, Tensor):
        raise TypeError(
            f"{label} must be a tensor [q, *{name}.shape], not {type(directions).__name__}"
        )
    if directions.ndim != x.ndim + 1 or directions.shape[1:] != x.shape:
        raise ValueError(
            f"{label} have shape {list(directions.shape)}, but {name} of shape {list(x.shape)} "
            f"needs [q, {', '.join(map(str, x.shape))}]"
        )
    if len(directions) != len(first_directions):
        raise ValueError(
            f"{label} hold {len(directions)} directions, but the tensors before them "
            f"{len(first_directions)}; expected the same number everywhere"
        )
    _check_dtype_and_device(directions, f"{label} are", x, name)


def _check_dtype_and_device(step: Tensor, subject: str, x: Tensor, name: str) -> None:
    """Raise TypeError or ValueError unless a direction or tangent (``step``) has x's dtype and
    device.

    Args:
        subject: the beginning of the message, such as "directions are".
        name: the name of x in the message.
    """
    pronoun = "them" if subject.endswith(" are") else "it"
    # torch.cat would promote the stack, and the model would compute in another dtype than x's.
    if step.dtype != x.dtype:
        raise TypeError(
            f"{subject} {step.dtype}; expected {x.dtype}, the dtype of {name}: convert {pronoun} "
            f"with .to({x.dtype})"
        )
    if step.device != x.device:
        raise ValueError(
            f"{subject} on {step.device}; expected {x.device}, where {name} is: move {pronoun} "
            f"with .to('{x.device}')"
        )


def begin_pass(
    directions: int, order: int, second: Second = "pairs", squares: int | None = None
) -> JetLayout:
    """Begin a pass, and return the layout of its jets; see `make_layout` for the arguments."""
    register_bitsandbytes()
    register_varlen_attention()
    watch_flex_attention()
    register_collective_wrappers()
    return make_layout(directions, order, second, squares).begin()


def check_point(x: object, name: str) -> None:
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
    unsupported_kinds = {
        "nested": x.is_nested,
        "sparse": x.layout is not torch.strided,
        "without data, on the device meta": x.is_meta and type(x) is Tensor,
        str(x.dtype): x.dtype.itemsize == 1,  # float8, which has no arithmetic in torch
    }
    for kind in (kind for kind, applies in unsupported_kinds.items() if applies):
        raise TypeError(
            f"{name} is {kind}, which jets cannot start from; pass a dense tensor of float64, "
            "float32, bfloat16 or float16 on a device"
        )


def check_output(tensor: Tensor, layout: JetLayout) -> None:
    """Refuse a tensor of a function's result that belongs to another pass.

    Raises:
        RuntimeError: that pass has ended.
        ValueError: that pass is still open, around this one.
    """
    if isinstance(tensor, DerivativeTensor) and tensor.pass_layout.jet_pass is not layout.jet_pass:
        jet_pass = tensor.pass_layout.jet_pass
        if jet_pass is not None and jet_pass.ended:
            raise stale_tensor_error("the function returned")
        raise layout_error({tensor.pass_layout, layout})


def to_jets(value: object, layout: JetLayout) -> Any:
    """Return a function's result with every real or complex tensor replaced by a `Jet`; constants
    have zero derivatives.

    Raises:
        RuntimeError, ValueError: see `check_output`.
    """
    # A result belongs to no pass: jets of a pass that has ended are refused.
    result_layout = layout.without_pass()

    def as_jet(tensor: Tensor) -> Jet | Tensor:
        check_output(tensor, layout)
        if not isinstance(tensor, JetTensor) and not carries_derivatives(tensor):
            return tensor
        return Jet(lift(tensor, layout).streams, result_layout)

    return map_tensors(value, as_jet)


@without_dynamo
def eager_jvp(
    fn: Function, primals: object, tangents: object, has_aux: bool, differentiable: bool
) -> tuple[Any, ...]:
    """Compute `jvp` outside ``torch.compile``."""
    # If gradients are off, jets have no graph either, and use fused operators; and dual tensors
    # cannot hold the wrappers of torch.func.
    uses_jets = differentiable or not torch.is_grad_enabled() or transformed()
    arguments, layout = attach_tangents(primals, tangents, uses_jets)
    with jets_through_fsdp(), open_pass(layout.jet_pass):
        return split_output(fn(*arguments), has_aux, differentiable, layout)


def attach_tangents(
    primals: object, tangents: object, uses_jets: bool
) -> tuple[tuple[Any, ...], JetLayout]:
    """Return the arguments of ``fn``, as jets of order 1 or as dual tensors, and the layout of the
    pass."""
    if not isinstance(primals, tuple):
        raise TypeError(
            f"primals must be a tuple, with an entry for each argument of fn, not "
            f"{type(primals).__name__}; for one argument, write primals=(x,)"
        )
    points, steps, structure = paired_leaves(primals, "primals", tangents, "tangents", True)
    if all(_is_label(point) for _, point in points):
        check_point(points[0][1], points[0][0])
    layout = begin_pass(1, 1)
    dual_pass = DualPass(layout)

    # Class labels and token ids may stand among the primals, with None or zeros as tangents.
    def attach(name: str, point: Tensor, step: object) -> Tensor:
        if _is_label(point):
            if not (step is None or (isinstance(step, int) and step == 0) or _is_zero(step, point)):
                raise TypeError(
                    f"{name} has dtype {point.dtype}, which has no derivative; expected None, or "
                    "zeros of its shape, as its tangent"
                )
            return point
        tangent = _check_tangent(step, point, name)
        if uses_jets:
            return jet_at(point, tangent.unsqueeze(0), layout)
        return _make_dual(point, tangent, dual_pass)

    leaves = [attach(*point, step) for point, step in zip(points, steps, strict=True)]
    return torch_private.pytree.tree_unflatten(leaves, structure), layout


def _make_dual(point: Tensor, step: Tensor, dual_pass: DualPass) -> DualTensor:
    """Return the dual tensor x + ε t; both are copied, since ``fn`` may write into its
    arguments."""
    copy = match_input_layout(point.clone().unsqueeze(0), point).squeeze(0)
    if overlaps(point.shape, point.stride()):
        dual_pass.forbid_writes(copy)
    return DualTensor(copy, step.detach().clone(), dual_pass)


def _is_label(point: object) -> bool:
    return isinstance(point, Tensor) and not carries_derivatives(point)


def _is_zero(step: object, point: Tensor) -> bool:
    """Return whether a step is a tensor of zeros of the point's shape; if values cannot be read,
    only the shape is checked."""
    if not isinstance(step, Tensor) or step.shape != point.shape:
        return False
    return torch.compiler.is_compiling() or not can_read_values() or not step.any()


def _check_tangent(tangent: object, primal: Tensor, name: str) -> Tensor:
    """Return the tangent as a tensor of the primal's shape: a number is expanded, None means 0.

    Raises:
        TypeError: the tangent is no plain tensor or number, or has another dtype than the primal.
        ValueError: the tangent has another shape or is on another device.
    """
    tangent = 0 if tangent is None else tangent
    if isinstance(tangent, int | float) and not isinstance(tangent, bool):
        return torch.full_like(primal, tangent, requires_grad=False)
    label = name.replace("primals", "tangents", 1)
    if not isinstance(tangent, Tensor) or isinstance(tangent, DerivativeTensor):
        raise TypeError(f"{label} must be a plain tensor like {name}, not {type(tangent).__name__}")
    if tangent.shape != primal.shape:
        raise ValueError(
            f"{label} has shape {list(tangent.shape)}; expected {list(primal.shape)}, the shape "
            f"of {name}"
        )
    _check_dtype_and_device(tangent, f"{label} is", primal, name)
    return tangent


def split_output(
    result: object, has_aux: bool, differentiable: bool, layout: JetLayout
) -> tuple[Any, ...]:
    """Split the result of ``fn`` into the tuple that `jvp` returns.

    Raises:
        TypeError: the result is not of the form that `jvp` documents.
        RuntimeError, ValueError: see `check_output`.
    """
    # Check aux, too: a tensor of another pass has the tangents of that pass.
    map_tensors(result, lambda tensor: check_output(tensor, layout))
    output, *aux = output_and_aux(result) if has_aux else (result,)
    tangents = map_tensors(output, _tangent, refuse_non_tensor)
    if not differentiable:
        tangents = map_tensors(tangents, Tensor.detach)
    return map_tensors(output, _primal), tangents, *map_tensors(aux, _primal)


def output_and_aux(result: object) -> tuple[object, object]:
    """Split the result of ``fn`` with ``has_aux=True`` into output and aux.

    Raises:
        TypeError: the result is no tuple of two.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"with has_aux=True fn must return a tuple (output, aux), not {type(result).__name__}"
        )
    return result


def refuse_non_tensor(leaf: object) -> None:
    """Raise TypeError unless the leaf is None, which ``fn`` may return beside tensors.

    Args:
        leaf: a leaf of the result of ``fn`` that is no tensor.
    """
    if leaf is not None:
        raise TypeError(
            f"fn returned a {type(leaf).__name__}, which has no tangent; expected tensors, "
            "or nests of them: return anything else as aux, with has_aux=True"
        )


def _primal(tensor: Tensor) -> Tensor:
    return tensor.primal if isinstance(tensor, JetTensor | DualTensor) else tensor


def _tangent(tensor: Tensor) -> Tensor:
    if isinstance(tensor, JetTensor):
        return tensor.streams[1]
    return tensor.tangent if isinstance(tensor, DualTensor) else torch.zeros_like(tensor)
