"""A general rule for functions without a rule of their own: torch's forward mode, nested for
order 2.

It serves only the functions listed in `forward_mode_kept.py`.  torch's forward mode can be silently
wrong (through a layer norm it is), so `python -m python_tests.jet.keep_forward_mode` lists the
functions for which all of torch's own samples agree with finite differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from ... import torch_private
from ...ops.library import transformed
from ..derivative import carries_derivatives
from ..layout import JetLayout
from ..registry import Rule, missing_rule, serve_generally
from ..strides import stack_laid_out
from ..tensor import JetTensor, common_layout
from .forward_mode_kept import WITH_GRADIENTS, WITHOUT_GRADIENTS
from .pointwise import is_half, wide

Tensors = tuple[Tensor, ...]
_PLAIN = (Tensor, torch.nn.Parameter)


def forward_mode_rule(function: Callable, gradients: bool) -> Rule:
    """Return the general rule of ``function``.

    Args:
        gradients: whether torch's backward through its own forward mode is right, too.
    """

    def rule(*args: Any, **named: Any) -> Any:
        leaves, structure = torch_private.pytree.tree_flatten((args, named))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, JetTensor)]
        stacks = [leaves[place].streams for place in places]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        _check(function, tensors, gradients)
        shown: list[Any] = []

        def plain(*points: Tensor) -> Tensors:
            """Return every output that is a tensor."""
            given = list(leaves)
            for place, point in zip(places, points, strict=True):
                given[place] = point
            inner_args, inner_named = torch_private.pytree.tree_unflatten(given, structure)
            shown[:] = torch_private.pytree.tree_flatten(function(*inner_args, **inner_named))
            return tuple(out for out in shown[0] if isinstance(out, Tensor))

        layout = common_layout(*tensors)
        own: Tensors = ()
        if any(is_half(tensor) for tensor in tensors):
            # In halves torch's forward mode overflows where its backward does not, and subtracts
            # rounded numbers: the tangents are computed in float32, the value is torch's own.
            own = plain(*(stack[0] for stack in stacks))
            leaves = [wide(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        try:
            streams = _streams(plain, [wide(stack) for stack in stacks], layout)
        except (RuntimeError, NotImplementedError) as error:
            plain(*(stack[0] for stack in stacks))  # torch's own message, where the call is wrong
            reason = str(error).splitlines()[0]
            raise missing_rule(function, f"torch's forward mode: {reason}") from error
        for parts, value in zip(streams, own, strict=bool(own)):
            parts[:] = [value, *(part.to(value.dtype) for part in parts[1:])]
        _refuse_views(function, [parts[0] for parts in streams], stacks)
        if not transformed():
            if function in _SPECTRAL:
                _refuse_equal_values(function, args, named, stacks[0][0])
            if function in _FACTORS and any(_is_finite_in_value_alone(parts) for parts in streams):
                raise missing_rule(function, "its matrix is singular, where it has no derivative")
        stacked = iter(streams)
        outputs = [
            _as_jet(next(stacked), layout) if isinstance(out, Tensor) else out for out in shown[0]
        ]
        result = torch_private.pytree.tree_unflatten(outputs, shown[1])
        info = getattr(result, "info", None)  # of cholesky_ex and its like
        if info is not None and not transformed() and bool(info.any()):
            raise missing_rule(function, "it failed, as its info says")
        return result

    rule.under_autocast = True  # type: ignore[attr-defined]
    return rule


def _check(function: Callable, tensors: list[Any], gradients: bool) -> None:
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
    return JetTensor(stack_laid_out(torch.stack(streams), primal.stride()), layout)


def _streams(plain: Callable, stacks: list[Tensor], layout: JetLayout) -> list[list[Tensor]]:
    """Return the streams of every output."""
    outputs: dict[int, Tensors] = {}

    def point(stream: int) -> Tensors:
        return tuple(stack[stream] for stack in stacks)

    def first(*given: Tensor) -> Any:
        return jvp(plain, given[: len(stacks)], given[len(stacks) :])

    zeros = tuple(torch.zeros_like(stack[0]) for stack in stacks)
    for i, j, ij in layout.terms():
        # A sum of squares carries the stream of second order along in the first of them.
        last = zeros if ij in outputs else point(ij)
        both: Any = jvp(first, (*point(0), *point(j)), (*point(i), *last))
        (value, by_j), (by_i, by_both) = both
        if ij in outputs:
            by_both = tuple(a + b for a, b in zip(outputs[ij], by_both, strict=True))
        outputs |= {0: value, i: by_i, j: by_j, ij: by_both}
    for i in range(1, 1 + layout.directions):
        if i not in outputs:
            outputs[0], outputs[i] = jvp(plain, point(0), point(i))  # type: ignore[misc]
    return [[outputs[s][n] for s in range(layout.streams)] for n in range(len(outputs[0]))]


def named(name: str) -> Any:
    """Return the function called ``torch.…``; None in a release of torch without it."""
    function: Any = torch
    for part in name.split(".")[1:]:
        function = getattr(function, part, None)
    return function


for _name in (*WITH_GRADIENTS, *WITHOUT_GRADIENTS):
    if (_function := named(_name)) is not None:
        serve_generally(_function, forward_mode_rule(_function, _name in WITH_GRADIENTS))


def _refuse_views(function: Callable, values: Iterable[Tensor], stacks: list[Tensor]) -> None:
    """Refuse a view, which shares its memory with its source; a new stack would not."""
    sources = {unwrapped(stack).untyped_storage()._cdata for stack in stacks}
    if any(unwrapped(value).untyped_storage()._cdata in sources for value in values):
        raise missing_rule(function, "it returned a view, which the general rule cannot give")


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of torch.func; of a vmap, the whole batch."""
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
    named(f"torch.{name}")
    for name in (
        *("linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex", "functional.lu", "Tensor.lu"),
        *("linalg.cholesky_ex", "linalg.qr", "qr", "Tensor.qr", "linalg.inv_ex"),
    )
}
_SPECTRAL = {named(f"torch.{name}"): name for name in (*_SINGULAR, *_NORMS, *_EIGEN)}


def _refuse_equal_values(function: Callable, args: tuple, given: dict, matrix: Tensor) -> None:
    """Raise MissingJetRule where values that the result depends on are equal, up to rounding."""
    values = _values_that_count(_SPECTRAL[function], args, given, matrix.detach())
    if values is None or not values.numel():
        return
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


def _is_finite_in_value_alone(parts: list[Tensor]) -> bool:
    first, *rest = (part.detach() for part in parts)
    return bool(first.isfinite().all()) and not all(bool(part.isfinite().all()) for part in rest)


def _values_that_count(name: str, args: tuple, given: dict, matrix: Tensor) -> Tensor | None:
    """Return the values ``[..., k]`` that must differ; None where the function has no spectrum.

    A singular value of 0 counts twice, since its sign is free.
    """
    if name in _EIGEN:
        symmetric = name in ("linalg.eigh", "linalg.eigvalsh")
        return torch.linalg.eigvalsh(matrix) if symmetric else torch.linalg.eigvals(matrix)
    order = "nuc"
    if name in _NORMS:
        order = given.get("ord", given.get("p", args[1] if len(args) > 1 else "fro"))
        dims = given.get("dim", args[2] if len(args) > 2 else (-2, -1))
        if order != "nuc" and (name == "functional.norm" or order not in (2, -2)):
            return None
        matrix = matrix.movedim(dims or (-2, -1), (-2, -1))
    values = torch.linalg.svdvals(matrix)
    values = torch.cat([values, torch.zeros_like(values[..., :1])], -1)
    return values[..., :2] if order == 2 else values
