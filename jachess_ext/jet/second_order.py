"""Second derivatives by name: Laplacian, diagonal of the Hessian, divergence, Hessian times vector.

The first three take a function of independent rows of a batch, ``[N, d]`` to ``[N, ...]``, as
`torch.func.vmap` of a function of one row.  A coordinate is an entry of a row.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import torch_private
from ..ops.library import transformed
from .api import graph_holds, jvp
from .engine.context import without_dynamo
from .engine.layout import map_tensors
from .engine.types import Function
from .passes.eager import Jet, paired_leaves
from .rows.check import MIXED, append_dims
from .rows.passes import PassResult, Rows, expand_rows, rows_mix, split_nest, square_roots
from .rules.forward_mode import unwrap

if TYPE_CHECKING:

    class _Result(tuple[Any, ...]):  # a field more with has_aux
        _fields: tuple[str, ...]
        value: Any
        aux: Any

    class Laplacian(_Result):
        gradient: Any
        laplacian: Any

    class HessianDiagonal(_Result):
        gradient: Any
        diagonal: Any

    class Divergence(_Result):
        divergence: Tensor

    class HessianProduct(_Result):
        gradient: Any
        product: Any

else:
    Laplacian = namedtuple("Laplacian", "value gradient laplacian")
    HessianDiagonal = namedtuple("HessianDiagonal", "value gradient diagonal")
    Divergence = namedtuple("Divergence", "value divergence")
    HessianProduct = namedtuple("HessianProduct", "value gradient product")

R = TypeVar("R", bound="_Result")


@cache
def _with_aux(kind: type[R]) -> type[R]:
    return namedtuple(kind.__name__, [*kind._fields, "aux"])  # type: ignore[return-value]


def _result(kind: type[R], *parts: object) -> R:
    kind = kind if len(parts) == len(kind._fields) else _with_aux(kind)
    return kind(*parts)  # type: ignore[arg-type]  # a named tuple


def laplacian(
    fn: Function,
    x: object,
    *,
    weights: Sequence[float] | Tensor | None = None,
    directions: object = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
    check: bool = True,
) -> Laplacian:
    """Compute f(x), its derivatives along directions, and Σ w_i D²f[u_i, u_i], in one pass.

    Along the coordinates and without weights the last is the Laplacian of each row.  D directions
    cost D + 2 streams, since the sum of second derivatives is one stream (the forward Laplacian of
    Li et al. 2024; collapsed Taylor mode, Dangel et al. 2025).

    Args:
        fn: maps ``[N, ...]`` to ``[N, ...]``, each row by itself.  It runs once per chunk, and
            for weights of each sign, each time with the same numbers of torch's generators.
        x: floating-point tensor ``[N, ...]``; or a tuple with an entry for each argument of ``fn``;
            or another nest of tensors with the same N.
        weights: ``[q]``, one for each direction: an anisotropic operator; or ``[q, N]``, others in
            each row.  A direction of weight 0 has its first derivative alone, such as time in a
            heat equation.  Weights of each row, or that require a gradient, cost 2 D + 1 streams.
        directions: ``[q, *x.shape]``, or ``[q, *x.shape[1:]]`` for the same in each row; of several
            tensors, a nest like ``x``.  None: the coordinates, in the order of x's tensors.
        chunk_size: largest number of directions of a pass, which bounds memory; None: all at once.
        has_aux: ``fn`` returns ``(output, aux)``; ``aux`` is returned behind the results.
        check: whether to check that rows do not depend on each other.  That costs a stream in every
            call, except in a training loop along fewer than 16 directions, where the results of
            the last call of the same function and shapes went through a backward: there the
            first, second, fourth, ..., 64th and each 64th step is checked.

    Returns:
        ``(value, gradient, laplacian)``, a named tuple of nests like the one ``fn`` returned;
        ``gradient`` holds the derivatives along each direction, ``[q, N, ...]``.  All are
        differentiable in parameters, ``x``, weights and directions.

    Rows that depend on each other are detected by first derivatives at ``x``; a dependence in
    second derivatives alone is not.  A function of independent rows is never refused: unusual
    rounding is examined by more calls of ``fn``.

    Within ``torch.compile`` (docs/compile.md) ``fn`` has to be an ``nn.Module`` that returns a
    tensor, or with ``check=False`` a function of one, ``x`` a tensor, and only ``directions`` may
    be given; anything else breaks the graph and runs eagerly.  Rows are looked at where it is
    traced, and in a program of ``torch.export`` each time it runs: it raises RuntimeError.

    Raises:
        ValueError: rows depend on each other, or shapes do not fit.
        RuntimeError: ``fn`` runs more than once, and its value changes in between.
        TypeError, MissingJetRule: as of `jet`.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> jx.laplacian(lambda x: (x**3).sum(-1), x).laplacian  # Σ 6 x_i
        tensor([18., 42.])
        >>> jx.laplacian(lambda x: (x**3).sum(-1), x, weights=[0, 1]).laplacian
        tensor([12., 24.])
    """
    is_plain = weights is None and chunk_size is None and not has_aux
    checked = isinstance(fn, nn.Module) or not check
    fits = is_plain and checked and isinstance(x, Tensor) and x.ndim > 1
    if graph_holds(is_dynamo_compiling(), fn, None if fits else _FORM):
        return _in_graph(fn, x, directions, check)
    return _eager_laplacian(fn, x, weights, directions, chunk_size, has_aux, check)


@without_dynamo
def _eager_laplacian(
    fn: Function,
    x: object,
    weights: Sequence[float] | Tensor | None,
    directions: object,
    chunk_size: int | None,
    has_aux: bool,
    check: bool,
) -> Laplacian:
    rows = Rows(fn, x, directions, has_aux, check)
    factors = None if weights is None else rows.weights(weights)
    if factors is not None and (factors.ndim > 1 or _is_differentiated(factors)):
        # Directions scaled by √|w|, whose derivative is infinite at 0, need one sign in all rows.
        # So each square has a stream, which w multiplies here.
        passes = list(rows.passes(rows.groups(None), chunk_size, "squares"))
        squares = _concat([part.second for part in passes])
        total = [(append_dims(factors, square.ndim) * square).sum(0) for square in squares]
        first = _concat([part.first for part in passes])
        return _result_of_rows(Laplacian, passes, first, total)
    passes = list(rows.passes(rows.groups(factors), chunk_size, "sum", factors))
    # The second order of a pass is one stream, the sum of squares.
    sums = [[p.group.sign * second[0] for second in p.second] for p in passes if p.group.squares]
    sums = sums or [[torch.zeros_like(primal) for primal in passes[0].primals]]
    total = [reduce(torch.add, parts) for parts in zip(*sums, strict=True)]
    first = _concat([part.first for part in passes])
    if factors is not None:  # from the groups back to the directions, in their order
        numbers = [number for part in passes for number in part.group.numbers]
        order = torch.tensor(numbers, dtype=torch.long, device=factors.device).argsort()
        first = [part[order] for part in first]
        first = [part / append_dims(square_roots(factors), part.ndim) for part in first]
    return _result_of_rows(Laplacian, passes, first, total)


def _concat(parts: list[list[Tensor]]) -> list[Tensor]:
    """Concatenate the derivatives of all passes to ``[q, N, ...]`` for each tensor that ``fn``
    returns."""
    return [torch.cat(of_tensor) for of_tensor in zip(*parts, strict=True)]


def _result_of_rows(kind: type[R], passes: list[PassResult], *parts: list[Tensor]) -> R:
    """Return the values and derivatives, as nests like the output of ``fn``, in a named tuple."""
    assemble, aux = passes[-1].assemble, passes[-1].aux
    return _result(kind, *map(assemble, (passes[0].primals, *parts)), *aux)


@without_dynamo
def hessian_diagonal(
    fn: Function,
    x: object,
    *,
    directions: object = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
    check: bool = True,
) -> HessianDiagonal:
    """Compute f(x), its derivatives along directions, and D²f[u_i, u_i] for each, in one pass.

    Along the coordinates that is the diagonal of each row's Hessian.

    Args:
        fn, x, directions, chunk_size, has_aux, check: as of `laplacian`.  D directions cost 2 D + 1
            streams.

    Returns:
        ``(value, gradient, diagonal)``, a named tuple; both derivatives are ``[q, N, ...]``.

    Raises:
        ValueError, RuntimeError, TypeError, MissingJetRule: as of `laplacian`.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> jx.hessian_diagonal(lambda x: (x**3).sum(-1), x).diagonal
        tensor([[ 6.],
                [12.]])
    """
    rows = Rows(fn, x, directions, has_aux, check)
    passes = list(rows.passes(rows.groups(None), chunk_size, "squares"))
    first, second = _concat([p.first for p in passes]), _concat([p.second for p in passes])
    return _result_of_rows(HessianDiagonal, passes, first, second)


@without_dynamo
def divergence(
    fn: Function,
    x: object,
    *,
    directions: object = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
    check: bool = True,
) -> Divergence:
    """Compute f(x) and Σ_i ∂f_i/∂x_i, the trace of each row's Jacobian, in one pass of order 1.

    Args:
        fn: maps ``x`` to a tensor of its shape, or a nest like it, each row by itself.  Dicts are
            paired by their keys.
        directions: q probes of identity covariance, such as ``torch.randn(q, *x.shape)``, for the
            estimate (1/q) Σ u_iᵀ J u_i of Hutchinson; None: exactly, from all coordinates.
        x, chunk_size, has_aux, check: as of `laplacian`.

    Returns:
        ``(value, divergence)``, a named tuple; the divergence is ``[N]``.

    Raises:
        ValueError: the value has other shapes than ``x``, or is nested otherwise, or there is no
            probe; or as of `laplacian`.
        RuntimeError, TypeError, MissingJetRule: as of `laplacian`.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> jx.divergence(torch.square, x).divergence  # Σ 2 x_i
        tensor([ 6., 14.])
    """
    rows = Rows(fn, x, directions, has_aux, check)
    if directions is not None and not rows.count:
        raise ValueError("directions hold no probe; expected one at least, or None")
    total = rows.points[0].new_zeros(rows.batch)
    for part in rows.passes([rows.all_directions(squares=0)], chunk_size, "sum"):
        for step, first in zip(
            part.steps, rows.flatten_like_x(part.assemble(part.first)), strict=True
        ):
            if step.shape != first.shape:
                raise ValueError(
                    f"fn returned {list(first.shape[1:])} for x of {list(step.shape[1:])}; "
                    "expected the same shape"
                )
            # step, first [p, N, ...]: u · J u of each row, summed over directions and entries.
            total = total + (step * first).unsqueeze(-1).flatten(2).sum((0, 2))
    total = total if directions is None else total / rows.count
    return _result(Divergence, part.assemble(part.primals), total, *part.aux)


def hvp(
    fn: Function,
    primals: tuple[object, ...],
    tangents: tuple[object, ...],
    *,
    has_aux: bool = False,
    differentiable: bool = True,
) -> HessianProduct:
    """Compute f, its gradient and its Hessian times ``tangents``, from one pass and its backward.

    The backward of the tangent ∇f · t gives H t in the primals, and ∇f in t.

    Args:
        fn: returns a scalar tensor.
        primals, tangents, has_aux: as of `jvp`.
        differentiable: whether gradient and product have a graph, for another derivative.

    Returns:
        ``(value, gradient, product)``, a named tuple, and ``aux`` behind them; gradient and product
        are nested like ``primals``.

    Raises:
        ValueError: ``fn`` returned something other than one number.
        TypeError, MissingJetRule: as of `jvp`.

    Examples:
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> jx.hvp(lambda x: (x**3).sum(), (x,), (v,), differentiable=False).product
        (tensor([6., 0.]),)
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            primals, tangents = map_tensors((primals, tangents), Tensor.clone)
            return hvp(fn, primals, tangents, has_aux=has_aux)
    points, steps, structure = paired_leaves(primals, "primals", tangents, "tangents")
    keep = differentiable and torch.is_grad_enabled()
    leaves = [*(point for _, point in points), *steps]
    assemble: Callable[[Sequence[Tensor]], Any]

    def nests(leaves: Sequence[Tensor]) -> list[Any]:
        parts = leaves[: len(points)], leaves[len(points) :]
        return [torch_private.pytree.tree_unflatten(list(part), structure) for part in parts]

    def slope(*leaves: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        nonlocal assemble
        value, tangent, *aux = jvp(fn, *nests(leaves), has_aux=has_aux)
        if not isinstance(tangent, Tensor) or tangent.numel() != 1:
            raise ValueError("fn must return one number, whose Hessian is asked for")
        assemble, tensors = split_nest((value, *aux))
        return tangent.sum(), tuple(tensors)

    # The slope is g(x, t) = ∇f(x) · t: its derivative by x is H t, that by t is ∇f.
    with torch.enable_grad():
        if transformed():  # within which torch allows no requires_grad_()
            total, pull, tensors = torch.func.vjp(slope, *leaves, has_aux=True)  # type: ignore[misc]
            gradients = pull(torch.ones_like(total))
        else:
            # Views, not detached copies: results stay connected to the caller's graph.
            leaves = [_leaf(leaf, keep) for leaf in leaves]
            total, tensors = slope(*leaves)
            if not total.requires_grad:  # of a constant
                total = total + 0 * sum(leaf.sum() for leaf in leaves)
            gradients = torch.autograd.grad(
                total, leaves, create_graph=keep, materialize_grads=True
            )
    if not keep:
        tensors, gradients = map_tensors((tensors, gradients), Tensor.detach)
    value, *aux = assemble(tensors)
    product, gradient = nests(gradients)
    return _result(HessianProduct, value, gradient, product, *aux)


def _leaf(tensor: object, keep: bool) -> Any:
    """Return a tensor that requires a gradient: a view with a graph if ``keep``, else detached."""
    if not isinstance(tensor, Tensor):
        return tensor  # jvp raises the error
    leaf = tensor.view_as(tensor) if keep else tensor.detach()
    return leaf if leaf.requires_grad else leaf.requires_grad_()


def _is_differentiated(weights: Tensor) -> bool:
    """Return whether weights have a derivative, or are batched by vmap, so that no sign can be
    read."""
    dual = forward_ad.unpack_dual(weights).tangent is not None
    return weights.requires_grad or dual or unwrap(weights) is not weights


# ---- within torch.compile ----------------------------------------------------------------------

_FORM = (
    "jx.laplacian in a graph takes a module (or check=False), one tensor, no weights, chunks or aux"
)


def _in_graph(fn: Function, x: Any, directions: object, check: bool) -> Laplacian:
    """Compute `laplacian` while dynamo traces, of one tensor and without weights."""
    from .compiled.reachable import JetGraphError
    from .compiled.regions import jet_in_graph

    if check and rows_mix(fn, x):
        raise ValueError(MIXED)
    if directions is None:
        unit = torch.eye(x.shape[1:].numel(), dtype=x.dtype, device=x.device)
        directions = unit.reshape(-1, *x.shape[1:])
    jet = jet_in_graph(fn, x, expand_rows(directions, x), 2, "sum")
    if not isinstance(jet, Jet) or jet.primal.shape[:1] != x.shape[:1]:
        raise JetGraphError("fn must return one floating-point tensor [N, ...], a result a row")
    return _result(Laplacian, jet.primal, jet.first, jet.second[0])
