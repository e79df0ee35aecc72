"""`jx.jvp`: a function's value and its directional derivative, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import torch_private
from ..ops.library import transformed
from .api import begin_pass, check_output, make_input, paired_leaves
from .deferred import ending
from .dual import DualTensor, Pass
from .dynamo import without_dynamo
from .fsdp import jets_through_fsdp
from .layout import JetLayout
from .nests import map_tensors
from .strides import laid_out_as_input, overlaps
from .tensor import DerivativeTensor, JetTensor


def jvp(
    fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    has_aux: bool = False,
    differentiable: bool = True,
) -> tuple[Any, ...]:
    """``fn(*primals)`` and J t, its derivative along ``tangents``; `torch.func.jvp`, through
    attention, too, and every other operation that has a jet rule.

    Args:
        fn: any torch callable; it runs once, unmodified.
        primals: a tuple with an entry for each argument of ``fn``: floating-point tensors, or
            nests (lists, dicts, ...) of them.  Bind other arguments with functools.partial.
        tangents: the same for the direction; each tensor of its primal's shape, dtype and device.
        has_aux: ``fn`` returns ``(output, aux)``; ``aux`` comes back as it is, without tangents.
        differentiable: False gives tangents without a graph (they are targets, as in MeanFlow and
            consistency models), whose computation leaves nothing in memory for a backward pass;
            the output's own graph is that of ``fn(*primals)``.

    Returns:
        ``(output, tangent)``, or ``(output, tangent, aux)``: nests like the one ``fn`` returned.
        The tangent of what does not depend on ``primals`` is zero.

    Within ``torch.compile`` (docs/compile.md) ``fn`` has to be an ``nn.Module``, or
    ``functools.partial`` of one; anything else breaks the graph and runs eagerly.

    Raises:
        TypeError: ``primals`` is no tuple, or holds something other than floating-point tensors;
            the tangents are nested otherwise, or have another dtype; ``fn`` returned something
            other than tensors.
        ValueError: a tangent has another shape or is on another device.
        MissingJetRule: ``fn`` calls an operation without a rule.
    """
    if torch.compiler.is_dynamo_compiling():
        from .compiled import jvp_in_graph  # here, since it imports torch._dynamo

        return jvp_in_graph(fn, primals, tangents, has_aux, differentiable)
    return eager_jvp(fn, primals, tangents, has_aux, differentiable)


@without_dynamo
def eager_jvp(
    fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    has_aux: bool,
    differentiable: bool,
) -> tuple[Any, ...]:
    """`jvp` outside ``torch.compile``."""
    # Where no gradients are recorded a jet has no graph, and its operators are fused; dual tensors
    # cannot look behind the wrappers of torch.func.
    as_jets = differentiable or not torch.is_grad_enabled() or transformed()
    arguments, layout = with_tangents(primals, tangents, as_jets)
    with jets_through_fsdp(), ending(layout.run):
        return split_output(fn(*arguments), has_aux, differentiable, layout)


def with_tangents(primals: Any, tangents: Any, as_jets: bool) -> tuple[tuple[Any, ...], JetLayout]:
    """The arguments of ``fn``: jets of order 1, or dual tensors, whose tangents have no graph; and
    the layout of their pass."""
    if not isinstance(primals, tuple):
        raise TypeError(
            f"primals must be a tuple, with an entry for each argument of fn, not "
            f"{type(primals).__name__}; for one argument, write primals=(x,)"
        )
    points, steps, structure = paired_leaves(primals, "primals", tangents, "tangents")
    for (name, point), step in zip(points, steps, strict=True):
        _check_tangent(name, point, step)
    made: list[DerivativeTensor] = []
    layout: JetLayout | None = None
    if as_jets:
        for (_, point), step in zip(points, steps, strict=True):
            jet = make_input(point, step.unsqueeze(0), 1, check_values=False, layout=layout)
            layout = jet.jet_layout
            made.append(jet)
    else:
        of_pass = Pass(begin_pass(1, 1))
        layout = of_pass.layout
        for (_, point), step in zip(points, steps, strict=True):
            # Copies, since fn may write into its arguments; `view_as` would not be one.
            copy = laid_out_as_input(point.clone().unsqueeze(0), point).squeeze(0)
            made.append(DualTensor(copy, step.detach().clone(), of_pass))
            if overlaps(point.shape, point.stride()):
                of_pass.tear(copy)
    assert layout is not None
    return torch_private.pytree.tree_unflatten(made, structure), layout


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
    if tangent.dtype != primal.dtype:
        raise TypeError(
            f"{theirs} is {tangent.dtype}; expected {primal.dtype}, the dtype of {name}: convert "
            f"it with .to({primal.dtype})"
        )
    if tangent.device != primal.device:
        raise ValueError(
            f"{theirs} is on {tangent.device}; expected {primal.device}, where {name} is: move it "
            f"with .to('{primal.device}')"
        )


def split_output(
    result: Any, has_aux: bool, differentiable: bool, layout: JetLayout
) -> tuple[Any, ...]:
    """What ``fn`` returned as `jvp` returns it.

    Raises:
        RuntimeError: some of it is of another pass.
    """
    map_tensors(result, lambda tensor: check_output(tensor, layout))
    if not has_aux:
        return map_tensors(result, _primal), _tangents(result, differentiable)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"with has_aux=True fn must return a tuple (output, aux), not {type(result).__name__}"
        )
    output, aux = result
    return (
        map_tensors(output, _primal),
        _tangents(output, differentiable),
        map_tensors(aux, _primal),
    )


def _tangents(output: Any, differentiable: bool) -> Any:
    others: list[Any] = []
    found = map_tensors(output, _tangent, others.append)
    if not differentiable:
        found = map_tensors(found, torch.Tensor.detach)
    others = [other for other in others if other is not None]
    if others:
        raise TypeError(
            f"fn returned a {type(others[0]).__name__}, which has no tangent; expected tensors, "
            "or nests of them: return anything else as aux, with has_aux=True"
        )
    return found


def _primal(tensor: Tensor) -> Tensor:
    return tensor.primal if isinstance(tensor, JetTensor | DualTensor) else tensor


def _tangent(tensor: Tensor) -> Tensor:
    if isinstance(tensor, JetTensor):
        return tensor.streams[1]
    return tensor.tangent if isinstance(tensor, DualTensor) else torch.zeros_like(tensor)
