"""The forward-mode rule, for functions without a rule of their own: torch's jvp, nested at order 2.

It is registered for the functions listed in `forward_mode_kept.py`.  torch's forward mode can be
silently wrong (for example that of a layer norm), so `python -m python_tests.jet.keep_forward_mode`
lists the functions for which all of torch's own samples agree with finite differences.
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
from .forward_mode_kept import FORWARD_ONLY, FORWARD_REVERSE
from .pointwise import is_half, wide

Tensors = tuple[Tensor, ...]
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def forward_mode_rule(function: Function, has_gradients: bool) -> Rule:
    """Return the forward-mode rule of ``function``.

    Args:
        has_gradients: whether torch's backward through the function's forward mode is right.
    """

    def rule(*args: object, **kwargs: object) -> object:
        leaves, structure = torch_private.pytree.tree_flatten((args, kwargs))
        jet_indices = [n for n, leaf in enumerate(leaves) if isinstance(leaf, JetTensor)]
        stacks = [leaves[n].streams for n in jet_indices]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        _check(function, tensors, has_gradients)
        outputs: list[Any] = []  # leaves and structure of the last call's output

        def call_plain(*points: Tensor) -> Tensors:
            """Call the function with plain tensors in place of the jets; return the tensors of its
            output."""
            inputs = list(leaves)
            for n, point in zip(jet_indices, points, strict=True):
                inputs[n] = point
            new_args, new_kwargs = torch_private.pytree.tree_unflatten(inputs, structure)
            outputs[:] = torch_private.pytree.tree_flatten(function(*new_args, **new_kwargs))
            return tuple(out for out in outputs[0] if isinstance(out, Tensor))

        layout = common_layout(*tensors)
        values: Tensors = ()
        if any(is_half(tensor) for tensor in tensors):
            # In 16 bits torch's forward mode may overflow or cancel although its backward does not:
            # the tangents are computed in float32, and the value in the dtype of the call.
            values = call_plain(*(stack[0] for stack in stacks))
            leaves = [wide(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        try:
            results = _nested_jvp(call_plain, [wide(stack) for stack in stacks], layout)
        except (RuntimeError, NotImplementedError) as error:
            # If the call itself is wrong, this raises torch's own error.
            call_plain(*(stack[0] for stack in stacks))
            reason = str(error).splitlines()[0]
            raise missing_rule(function, f"torch's forward mode: {reason}") from error
        for streams, value in zip(results, values, strict=bool(values)):
            streams[:] = [value, *(stream.to(value.dtype) for stream in streams[1:])]
        _refuse_views(function, [streams[0] for streams in results], stacks)
        if not transformed():
            if function in _SPECTRAL:
                _refuse_repeated_values(function, args, kwargs, stacks[0][0])
            if function in _FACTORS and any(map(_only_value_is_finite, results)):
                raise missing_rule(function, "its matrix is singular, where it has no derivative")
        remaining = iter(results)
        jets = [
            _as_jet(next(remaining), layout) if isinstance(out, Tensor) else out
            for out in outputs[0]
        ]
        result = torch_private.pytree.tree_unflatten(jets, outputs[1])
        info = getattr(result, "info", None)  # cholesky_ex and similar functions return it
        if info is not None and not transformed() and bool(info.any()):
            raise missing_rule(function, "it failed, as its info says")
        return result

    rule.under_autocast = True  # type: ignore[attr-defined]
    return rule


def _check(function: Function, tensors: list[Tensor], has_gradients: bool) -> None:
    """Raise MissingJetRule if an argument is a tensor of another subclass, or if gradients are
    needed and would be wrong."""
    if any(type(t) not in _PLAIN_TYPES and not isinstance(t, JetTensor) for t in tensors):
        raise missing_rule(function, "one of its arguments is a tensor of a class of its own")
    if not has_gradients and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
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
    """Return the list of streams of each output, computed by torch's ``jvp``.

    Order 2 is ``jvp`` of ``jvp``: the derivative of (x, v) ↦ f'(x) v at (x0, x_j) along (x_i, x_ij)
    is f''(x0) x_i x_j + f'(x0) x_ij, the stream ij of f(x).

    Args:
        call_plain: maps the plain tensors in place of the jets to the tensors of the output.
        stacks: the stacks ``[S, ...]`` of the jets.
    """
    outputs: dict[int, Tensors] = {}

    def point(stream: int) -> Tensors:
        return tuple(stack[stream] for stack in stacks)

    def value_and_tangent(*inputs: Tensor) -> tuple[Tensors, Tensors]:
        return jvp(call_plain, inputs[: len(stacks)], inputs[len(stacks) :])  # type: ignore[return-value]

    zeros = tuple(torch.zeros_like(stack[0]) for stack in stacks)
    for i, j, ij in layout.terms():
        # If ij is the stream of the sum of squares, x_ij enters with the first square only.
        second_order = zeros if ij in outputs else point(ij)
        nested: Any = jvp(value_and_tangent, (*point(0), *point(j)), (*point(i), *second_order))
        (value, by_j), (by_i, by_ij) = nested
        if ij in outputs:
            by_ij = tuple(a + b for a, b in zip(outputs[ij], by_ij, strict=True))
        outputs |= {0: value, i: by_i, j: by_j, ij: by_ij}
    for i in range(1, 1 + layout.directions):
        if i not in outputs:
            outputs[0], outputs[i] = jvp(call_plain, point(0), point(i))  # type: ignore[misc]
    return [[outputs[s][n] for s in range(layout.streams)] for n in range(len(outputs[0]))]


for _name in (*FORWARD_REVERSE, *FORWARD_ONLY):
    if (_function := torch_private.find(_name)) is not None:
        register_general_rule(_function, forward_mode_rule(_function, _name in FORWARD_REVERSE))


def _refuse_views(function: Function, values: Iterable[Tensor], stacks: list[Tensor]) -> None:
    """Raise MissingJetRule if a result is a view of an argument: the stack of the result would not
    share the argument's storage."""
    sources = {unwrap(stack).untyped_storage()._cdata for stack in stacks}
    if any(unwrap(value).untyped_storage()._cdata in sources for value in values):
        raise missing_rule(function, "it returned a view, which the forward-mode rule cannot give")


def unwrap(tensor: Tensor) -> Tensor:
    """Return a tensor without its torch.func wrappers; a tensor within vmap is returned with its
    batch dimension."""
    functorch = torch_private.functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


# ---- decompositions ----------------------------------------------------------------------------
#
# If singular values or eigenvalues are equal, decompositions have no derivative along most
# directions.  torch's forward mode divides by the difference of these values: its tangents belong
# to one of many bases, and second derivatives and gradients of the value are wrong or NaN.

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
    """Raise MissingJetRule if two of the singular values or eigenvalues that the function uses are
    equal up to rounding."""
    spectrum = _spectrum(_SPECTRAL[function], args, kwargs, matrix.detach())
    if spectrum is None or not spectrum.numel():
        return
    # |λ_i − λ_j| [..., k, k]; only pairs i < j count.
    gaps = (spectrum.unsqueeze(-1) - spectrum.unsqueeze(-2)).abs()
    lower = torch.ones_like(gaps, dtype=torch.bool).tril()
    largest = spectrum.abs().amax(-1)[..., None, None]
    if (gaps.masked_fill(lower, torch.inf) <= 100 * torch.finfo(matrix.dtype).eps * largest).any():
        raise missing_rule(
            function,
            "singular values or eigenvalues of its matrix are equal, or a singular value is 0, "
            "where it has no derivative; use a function of the matrix that has one (a trace, a "
            "determinant, the Frobenius norm), or add a small perturbation",
        )


def _only_value_is_finite(streams: list[Tensor]) -> bool:
    """Return whether the value of an output is finite, but not all its derivatives are."""
    value, *derivatives = (bool(stream.detach().isfinite().all()) for stream in streams)
    return value and not all(derivatives)


def _spectrum(name: str, args: Args, kwargs: Named, matrix: Tensor) -> Tensor | None:
    """Return the eigenvalues or singular values ``[..., k]`` of which no two may be equal; None if
    the call uses none.

    A 0 is appended to singular values, so that a singular value of 0 counts as repeated: its sign
    is arbitrary.

    Args:
        name: the name of the function in `_SPECTRAL`.
        args, kwargs: the arguments of the call.
    """
    if name in _EIGEN:
        is_symmetric = name in ("linalg.eigh", "linalg.eigvalsh")
        return torch.linalg.eigvalsh(matrix) if is_symmetric else torch.linalg.eigvals(matrix)
    order: object = "nuc"
    if name in _NORMS:
        order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else "fro"))
        dims = kwargs.get("dim", args[2] if len(args) > 2 else (-2, -1))
        if order != "nuc" and (name == "functional.norm" or order not in (2, -2)):
            return None
        matrix = matrix.movedim(cast("tuple[int, int]", dims or (-2, -1)), (-2, -1))
    singular_values = torch.linalg.svdvals(matrix)
    singular_values = torch.cat([singular_values, torch.zeros_like(singular_values[..., :1])], -1)
    return singular_values[..., :2] if order == 2 else singular_values
