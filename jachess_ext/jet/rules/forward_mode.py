"""The forward-mode rule, for functions without a rule of their own: torch's jvp, nested for order
2.

It is registered for the functions listed in `forward_mode_kept.py`.  torch's forward mode can be
silently wrong (through a layer norm it is), so `python -m python_tests.jet.keep_forward_mode` lists
the functions for which all of torch's own samples agree with finite differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import jvp

from ... import torch_private
from ...ops.library import transformed
from ..engine.derivative import carries_derivatives
from ..engine.errors import missing_rule
from ..engine.layout import JetLayout
from ..engine.registry import register_general_rule
from ..engine.strides import stack_with_strides
from ..engine.tensor import JetTensor, common_layout
from ..engine.types import Args, Function, Named, Rule
from .forward_mode_kept import WITH_GRADIENTS, WITHOUT_GRADIENTS
from .pointwise import is_half, wide

Tensors = tuple[Tensor, ...]
_PLAIN = (Tensor, torch.nn.Parameter)


def forward_mode_rule(function: Function, gradients: bool) -> Rule:
    """Return the forward-mode rule of ``function``.

    Args:
        gradients: whether torch's backward through its forward mode is right, too.
    """

    def rule(*args: object, **kwargs: object) -> object:
        leaves, structure = torch_private.pytree.tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, JetTensor)]
        stacks = [leaves[place].streams for place in places]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        _check(function, tensors, gradients)
        outputs: list[Any] = []  # of the last call: its leaves and their structure

        def call_plain(*points: Tensor) -> Tensors:
            """Call the function with tensors in the places of the jets; return the tensors of its
            output."""
            inputs = list(leaves)
            for place, point in zip(places, points, strict=True):
                inputs[place] = point
            new_args, new_kwargs = torch_private.pytree.tree_unflatten(inputs, structure)
            outputs[:] = torch_private.pytree.tree_flatten(function(*new_args, **new_kwargs))
            return tuple(out for out in outputs[0] if isinstance(out, Tensor))

        layout = common_layout(*tensors)
        values: Tensors = ()
        if any(is_half(tensor) for tensor in tensors):
            # In 16 bits torch's forward mode overflows and cancels where its backward does not: the
            # tangents are computed in float32, and the value in the dtype of the call.
            values = call_plain(*(stack[0] for stack in stacks))
            leaves = [wide(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        try:
            streams = _nested_jvp(call_plain, [wide(stack) for stack in stacks], layout)
        except (RuntimeError, NotImplementedError) as error:
            call_plain(
                *(stack[0] for stack in stacks)
            )  # torch's own message, where the call is wrong
            reason = str(error).splitlines()[0]
            raise missing_rule(function, f"torch's forward mode: {reason}") from error
        for parts, value in zip(streams, values, strict=bool(values)):
            parts[:] = [value, *(part.to(value.dtype) for part in parts[1:])]
        _refuse_views(function, [parts[0] for parts in streams], stacks)
        if not transformed():
            if function in _SPECTRAL:
                _refuse_repeated_values(function, args, kwargs, stacks[0][0])
            if function in _FACTORS and any(_only_value_is_finite(parts) for parts in streams):
                raise missing_rule(function, "its matrix is singular, where it has no derivative")
        stacked = iter(streams)
        jets = [
            _as_jet(next(stacked), layout) if isinstance(out, Tensor) else out for out in outputs[0]
        ]
        result = torch_private.pytree.tree_unflatten(jets, outputs[1])
        info = getattr(result, "info", None)  # of cholesky_ex and its like
        if info is not None and not transformed() and bool(info.any()):
            raise missing_rule(function, "it failed, as its info says")
        return result

    rule.under_autocast = True  # type: ignore[attr-defined]
    return rule


def _check(function: Function, tensors: list[Tensor], gradients: bool) -> None:
    """Raise MissingJetRule for other classes of tensors, and where gradients would be wrong."""
    if any(type(t) not in _PLAIN and not isinstance(t, JetTensor) for t in tensors):
        raise missing_rule(function, "one of its arguments is a tensor of a class of its own")
    if not gradients and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise missing_rule(
            function,
            "torch's backward through its forward mode is not right here; the derivatives "
            "themselves are, under torch.no_grad()",
        )


def _as_jet(streams: list[Tensor], layout: JetLayout) -> Tensor:
    primal = streams[0]
    if not carries_derivatives(primal):
        return primal
    return JetTensor(stack_with_strides(torch.stack(streams), primal.stride()), layout)


def _nested_jvp(
    call_plain: Callable[..., Tensors], stacks: list[Tensor], layout: JetLayout
) -> list[list[Tensor]]:
    """Return the list of streams of every output.

    Order 2 is ``jvp`` of ``jvp``: the derivative of (x, v) ↦ f'(x) v at (x0, x_j) along (x_i, x_ij)
    is f''(x0) x_i x_j + f'(x0) x_ij, the stream ij of f(x).
    """
    outputs: dict[int, Tensors] = {}

    def point(stream: int) -> Tensors:
        return tuple(stack[stream] for stack in stacks)

    def first(*inputs: Tensor) -> tuple[Tensors, Tensors]:
        return jvp(call_plain, inputs[: len(stacks)], inputs[len(stacks) :])  # type: ignore[return-value]

    zeros = tuple(torch.zeros_like(stack[0]) for stack in stacks)
    for i, j, ij in layout.terms():
        # The stream of a sum of squares is the tangent of the first square; the others have none.
        last = zeros if ij in outputs else point(ij)
        nested: Any = jvp(first, (*point(0), *point(j)), (*point(i), *last))
        (value, by_j), (by_i, by_ij) = nested
        if ij in outputs:
            by_ij = tuple(a + b for a, b in zip(outputs[ij], by_ij, strict=True))
        outputs |= {0: value, i: by_i, j: by_j, ij: by_ij}
    for i in range(1, 1 + layout.directions):
        if i not in outputs:
            outputs[0], outputs[i] = jvp(call_plain, point(0), point(i))  # type: ignore[misc]
    return [[outputs[s][n] for s in range(layout.streams)] for n in range(len(outputs[0]))]


for _name in (*WITH_GRADIENTS, *WITHOUT_GRADIENTS):
    if (_function := torch_private.find(_name)) is not None:
        register_general_rule(_function, forward_mode_rule(_function, _name in WITH_GRADIENTS))


def _refuse_views(function: Function, values: Iterable[Tensor], stacks: list[Tensor]) -> None:
    """Refuse a view: the stack of the result would not share the argument's storage."""
    sources = {unwrap(stack).untyped_storage()._cdata for stack in stacks}
    if any(unwrap(value).untyped_storage()._cdata in sources for value in values):
        raise missing_rule(function, "it returned a view, which the forward-mode rule cannot give")


def unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of torch.func; for a vmap, the batch."""
    functorch = torch_private.functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


# ---- decompositions ----------------------------------------------------------------------------
#
# Where singular values or eigenvalues are equal, these have no derivative along most directions.
# torch's forward mode divides by their difference: its tangents belong to one of many bases, its
# second derivatives are wrong or NaN, and so is the gradient of the value beside them.

_SINGULAR = ("svd", "Tensor.svd", "linalg.svd", "linalg.svdvals")
_NORMS = ("functional.norm", "linalg.matrix_norm")
_EIGEN = ("linalg.eigh", "linalg.eigvalsh", "linalg.eig", "linalg.eigvals")
_FACTORS = {
    torch_private.find(f"torch.{name}")
    for name in (
        *("linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex", "functional.lu", "Tensor.lu"),
        *("linalg.cholesky_ex", "linalg.qr", "qr", "Tensor.qr", "linalg.inv_ex"),
    )
}
_SPECTRAL = {torch_private.find(f"torch.{name}"): name for name in (*_SINGULAR, *_NORMS, *_EIGEN)}


def _refuse_repeated_values(function: Function, args: Args, kwargs: Named, matrix: Tensor) -> None:
    """Raise MissingJetRule where relevant singular values or eigenvalues are equal, up to
    rounding."""
    values = _spectrum(_SPECTRAL[function], args, kwargs, matrix.detach())
    if values is None or not values.numel():
        return
    # |λ_i − λ_k| [..., k, k]; each pair i < k counts once.
    apart = (values.unsqueeze(-1) - values.unsqueeze(-2)).abs()
    same = torch.ones_like(apart, dtype=torch.bool).tril()
    largest = values.abs().amax(-1)[..., None, None]
    if (apart.masked_fill(same, torch.inf) <= 100 * torch.finfo(matrix.dtype).eps * largest).any():
        raise missing_rule(
            function,
            "singular values or eigenvalues of its matrix are equal, or a singular value is 0, "
            "where it has no derivative; use a function of the matrix that has one (a trace, a "
            "determinant, the Frobenius norm), or add a small perturbation",
        )


def _only_value_is_finite(parts: list[Tensor]) -> bool:
    """Return whether the value of an output is finite, but not all its derivatives."""
    value, *derivatives = (bool(part.detach().isfinite().all()) for part in parts)
    return value and not all(derivatives)


def _spectrum(name: str, args: Args, kwargs: Named, matrix: Tensor) -> Tensor | None:
    """Return the eigenvalues or singular values ``[..., k]`` that must differ; None where the
    function uses none.

    A singular value of 0 stands twice in the list, since its sign is arbitrary.
    """
    if name in _EIGEN:
        symmetric = name in ("linalg.eigh", "linalg.eigvalsh")
        return torch.linalg.eigvalsh(matrix) if symmetric else torch.linalg.eigvals(matrix)
    order: object = "nuc"
    if name in _NORMS:
        order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else "fro"))
        dims = kwargs.get("dim", args[2] if len(args) > 2 else (-2, -1))
        if order != "nuc" and (name == "functional.norm" or order not in (2, -2)):
            return None
        matrix = matrix.movedim(cast("tuple[int, int]", dims or (-2, -1)), (-2, -1))
    values = torch.linalg.svdvals(matrix)
    values = torch.cat([values, torch.zeros_like(values[..., :1])], -1)
    return values[..., :2] if order == 2 else values
