"""Laplacian, diagonal of the Hessian, divergence, and Hessian-vector product.

The first three take a function that maps each row of a batch by itself, ``[N, d]`` to ``[N, ...]``,
as `torch.func.vmap` of a function of one row does.  A coordinate is an entry of a row.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypedDict, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import torch_private
from ..ops.library import transformed
from .api import can_join_graph, jvp
from .engine.context import without_dynamo
from .engine.layout import map_tensors
from .engine.types import Args, Function, T
from .passes.eager import Jet, paired_leaves
from .rows.check import MIXED, append_dims, as_index
from .rows.passes import PassResult, Rows, expand_rows, rows_mix, split_nest
from .rows.weights import Weights, WeightsLike, make_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

    # Python 3.10 has no generic named tuples at runtime.
    class Laplacian(NamedTuple, Generic[T]):
        value: T
        gradient: T
        laplacian: T

    class HessianDiagonal(NamedTuple, Generic[T]):
        value: T
        gradient: T
        diagonal: T

    class Divergence(NamedTuple, Generic[T]):
        value: T
        divergence: Tensor

    class HessianProduct(NamedTuple, Generic[T]):
        value: Tensor
        gradient: T
        product: T

    class Options(TypedDict, total=False):
        directions: object
        chunk_size: int | None
        check: bool

    class Weighted(Options, total=False):
        weights: WeightsLike

else:
    Laplacian = namedtuple("Laplacian", "value gradient laplacian")
    HessianDiagonal = namedtuple("HessianDiagonal", "value gradient diagonal")
    Divergence = namedtuple("Divergence", "value divergence")
    HessianProduct = namedtuple("HessianProduct", "value gradient product")

P = TypeVar("P", bound=Args)
R = TypeVar("R", bound=NamedTuple)


@cache
def _with_aux(result_type: type[R]) -> type[R]:
    return namedtuple(result_type.__name__, [*result_type._fields, "aux"])  # type: ignore[return-value]


def _result(result_type: type[R], *fields: object) -> R:
    """Return the fields as a named tuple of this type; an additional last field is ``aux``."""
    has_aux = len(fields) > len(result_type._fields)
    return (_with_aux(result_type) if has_aux else result_type)._make(fields)


@overload
def laplacian(fn: Callable[..., T], x: object, **kwargs: Unpack[Weighted]) -> Laplacian[T]: ...
@overload
def laplacian(fn: Function, x: object, *, has_aux: bool, **kwargs: Unpack[Weighted]) -> Any: ...
def laplacian(
    fn: Function,
    x: object,
    *,
    weights: WeightsLike = None,
    directions: object = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
    check: bool = True,
) -> Laplacian:
    """Compute f(x), its derivatives along directions, and Σ w_i D²f[u_i, u_i], in one pass.

    The weighted sum of second derivatives along the coordinates, without weights, is the Laplacian
    of each row.  D directions cost D + 2 streams, since the sum is one stream (the forward
    Laplacian of Li et al. 2024; collapsed Taylor mode, Dangel et al. 2025).

    Args:
        fn: maps ``[N, ...]`` to ``[N, ...]``, each row by itself.  It runs once for each chunk of
            directions and each sign of the weights, always with the same state of torch's random
            generators.
        x: floating-point tensor ``[N, ...]``; or a tuple with an entry for each argument of ``fn``;
            or another nest of tensors with the same N.
        weights: ``[q]``, a weight w_i for each direction (an anisotropic operator), as a tensor or
            as a list of numbers and tensors; or ``[q, N]``, different weights in each row (of a
            list, any entry may be ``[N]``).  For a
            direction of weight 0, such as time in a heat equation, only the first derivative is
            computed.  Weights ``[q, N]``, and weights that require a gradient, cost 2 D + 1
            streams.
        directions: ``[q, *x.shape]``, or ``[q, *x.shape[1:]]`` for the same directions in each row;
            if ``x`` holds several tensors, a nest like ``x``.  None: the coordinates, in the order
            of x's tensors.
        chunk_size: largest number of directions of a pass, which bounds memory; None: all at once.
        has_aux: whether ``fn`` returns ``(output, aux)``; ``aux`` is then the last field of the
            result.
        check: whether to check that rows do not depend on each other.  The check costs a stream in
            every call, except in a training loop along fewer than 16 directions (where the result
            of the last call with this function and these shapes went through a backward): there
            the first, second, fourth, ..., 64th and then every 64th step is checked.

    Returns:
        ``(value, gradient, laplacian)``, a named tuple of nests like the one ``fn`` returned;
        ``gradient`` holds the derivatives along each direction, ``[q, N, ...]``.  All are
        differentiable with respect to parameters, ``x``, weights and directions.

    The check detects rows that depend on each other by first derivatives at ``x``; it misses a
    dependence in second derivatives alone.  A function of independent rows is never refused: if
    rounding is unusual, more calls of ``fn`` decide.

    Within ``torch.compile`` (docs/compile.md) ``fn`` has to be an ``nn.Module``, or with
    ``check=False`` a function, that returns one tensor; ``x`` has to be a tensor; and neither
    ``chunk_size`` nor ``has_aux`` may be given.  Anything else breaks the graph and runs eagerly.
    Give constant weights as a list of numbers: a graph does not know the numbers in a tensor, which
    costs 2 D + 1 streams, as weights of both signs do there.
    The check runs during tracing; a program of ``torch.export`` repeats it in each run, and raises
    RuntimeError if rows depend on each other.

    Raises:
        ValueError: rows depend on each other; or the shapes of ``x``, ``directions``, ``weights``
            and of the value of ``fn`` do not fit.
        RuntimeError: ``fn`` runs more than once, and its value changes in between.
        TypeError, MissingJetRule: see `jet`.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> jx.laplacian(lambda x: (x**3).sum(-1), x).laplacian  # Σ 6 x_i
        tensor([18., 42.])
        >>> jx.laplacian(lambda x: (x**3).sum(-1), x, weights=[0, 1]).laplacian
        tensor([12., 24.])
    """
    is_one_pass = chunk_size is None and not has_aux
    can_check = isinstance(fn, nn.Module) or not check
    is_traceable = is_one_pass and can_check and isinstance(x, Tensor) and x.ndim > 1
    if can_join_graph(is_dynamo_compiling(), fn, None if is_traceable else _TRACEABLE_CALLS):
        return _traced_laplacian(fn, x, weights, directions, check)
    return _eager_laplacian(fn, x, weights, directions, chunk_size, has_aux, check)


@without_dynamo
def _eager_laplacian(
    fn: Function,
    x: object,
    weights: WeightsLike,
    directions: object,
    chunk_size: int | None,
    has_aux: bool,
    check: bool,
) -> Laplacian:
    rows = Rows(fn, x, directions, has_aux, check)
    scale = make_weights(weights, rows.count, rows.points[0])
    passes = list(rows.passes(scale.groups, chunk_size, scale.second, scale.roots))
    return _weighted_laplacian(passes, scale)


def _weighted_laplacian(passes: list[PassResult], weights: Weights) -> Laplacian:
    """Return the result of `laplacian`, with directions in the order of the call."""
    factors, roots = weights.factors, weights.roots
    sums = []
    for group, second in [(p.group, p.second) for p in passes if p.group.num_squares]:
        if factors is None or roots is not None:  # one stream, the sum
            sums.append([group.sign * squares[0] for squares in second])
        else:
            of_squares = factors[as_index(group.numbers[: group.num_squares], factors.device)]
            sums.append([(append_dims(of_squares, s.ndim) * s).sum(0) for s in second])
    sums = sums or [[torch.zeros_like(primal) for primal in passes[0].primals]]
    laplacians = [reduce(torch.add, terms) for terms in zip(*sums, strict=True)]
    gradients = _concat([p.first for p in passes])
    direction_numbers = [number for p in passes for number in p.group.numbers]
    if direction_numbers != sorted(direction_numbers):
        order = sorted(range(len(direction_numbers)), key=direction_numbers.__getitem__)
        gradients = [slopes[order] for slopes in gradients]
    if roots is not None:
        gradients = [slopes / append_dims(roots, slopes.ndim) for slopes in gradients]
    return _result_of_rows(Laplacian, passes, gradients, laplacians)


def _concat(derivatives: list[list[Tensor]]) -> list[Tensor]:
    """Concatenate the derivatives of all passes to ``[q, N, ...]`` for each tensor that ``fn``
    returns.

    Args:
        derivatives: for each pass, the derivatives ``[p, N, ...]`` of each of these tensors.
    """
    return [torch.cat(chunks) for chunks in zip(*derivatives, strict=True)]


def _result_of_rows(
    result_type: type[R], passes: list[PassResult], *derivatives: list[Tensor]
) -> R:
    """Return values and derivatives, each as a nest like the output of ``fn``, in a named tuple."""
    assemble, aux = passes[-1].assemble, passes[-1].aux
    return _result(result_type, *map(assemble, (passes[0].primals, *derivatives)), *aux)


@overload
def hessian_diagonal(
    fn: Callable[..., T], x: object, **kwargs: Unpack[Options]
) -> HessianDiagonal[T]: ...
@overload
def hessian_diagonal(
    fn: Function, x: object, *, has_aux: bool, **kwargs: Unpack[Options]
) -> Any: ...
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
    """Compute f(x), its first derivative along each direction u_i, and the second derivative
    D²f[u_i, u_i], in one pass.

    Along the coordinates, the second derivatives are the diagonal of each row's Hessian.

    Args:
        fn, x, directions, chunk_size, has_aux, check: as for `laplacian`.  q directions cost
            2 q + 1 streams.

    Returns:
        ``(value, gradient, diagonal)``, a named tuple; both derivatives are ``[q, N, ...]``.

    Raises:
        ValueError, RuntimeError, TypeError, MissingJetRule: see `laplacian`.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> jx.hessian_diagonal(lambda x: (x**3).sum(-1), x).diagonal
        tensor([[ 6.],
                [12.]])
    """
    rows = Rows(fn, x, directions, has_aux, check)
    passes = list(rows.passes([rows.all_directions(rows.count)], chunk_size, "squares"))
    gradients, diagonals = _concat([p.first for p in passes]), _concat([p.second for p in passes])
    return _result_of_rows(HessianDiagonal, passes, gradients, diagonals)


@overload
def divergence(fn: Callable[..., T], x: object, **kwargs: Unpack[Options]) -> Divergence[T]: ...
@overload
def divergence(fn: Function, x: object, *, has_aux: bool, **kwargs: Unpack[Options]) -> Any: ...
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
        fn: maps ``x`` to a tensor of its shape, or a nest like ``x``, each row by itself.  Dicts
            are paired by their keys.
        directions: q random probes of identity covariance, such as ``torch.randn(q, *x.shape)``,
            for Hutchinson's estimate (1/q) Σ u_iᵀ J u_i; None: the exact divergence, from all
            coordinates.
        x, chunk_size, has_aux, check: as for `laplacian`.

    Returns:
        ``(value, divergence)``, a named tuple; the divergence is ``[N]``.

    Raises:
        ValueError: the value has other shapes than ``x``, or is nested otherwise; ``directions``
            hold no probe; or as for `laplacian`.
        RuntimeError, TypeError, MissingJetRule: see `laplacian`.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> jx.divergence(torch.square, x).divergence  # Σ 2 x_i
        tensor([ 6., 14.])
    """
    rows = Rows(fn, x, directions, has_aux, check)
    if directions is not None and not rows.count:
        raise ValueError("directions hold no probe; expected one at least, or None")
    total = rows.points[0].new_zeros(rows.batch)
    for p in rows.passes([rows.all_directions(num_squares=0)], chunk_size, "sum"):
        for step, product in zip(p.steps, rows.flatten_like_x(p.assemble(p.first)), strict=True):
            if step.shape != product.shape:
                raise ValueError(
                    f"fn returned {list(product.shape[1:])} for x of {list(step.shape[1:])}; "
                    "expected the same shape"
                )
            # step, product [p, N, ...]: u · J u of each row, summed over directions and entries.
            total = total + (step * product).unsqueeze(-1).flatten(2).sum((0, 2))
    total = total if directions is None else total / rows.count
    return _result(Divergence, p.assemble(p.primals), total, *p.aux)


@overload
def hvp(
    fn: Callable[..., Tensor], primals: P, tangents: Args, *, differentiable: bool = ...
) -> HessianProduct[P]: ...
@overload
def hvp(
    fn: Function, primals: Args, tangents: Args, *, has_aux: bool, differentiable: bool = ...
) -> Any: ...
def hvp(
    fn: Function,
    primals: tuple[object, ...],
    tangents: tuple[object, ...],
    *,
    has_aux: bool = False,
    differentiable: bool = True,
) -> HessianProduct:
    """Compute f, its gradient and its Hessian times ``tangents``, from one pass and its backward.

    The pass computes the tangent ∇f · t; its backward gives H t for the primals, and ∇f for t.

    Args:
        fn: any torch callable that returns a scalar tensor.
        primals, tangents, has_aux: as for `jvp`.
        differentiable: whether gradient and product have a graph, for another derivative.

    Returns:
        ``(value, gradient, product)``, a named tuple; with ``has_aux`` its last field is ``aux``.
        Gradient and product are nested like ``primals``.

    Raises:
        ValueError: ``fn`` returned something other than one number.
        TypeError, MissingJetRule: see `jvp`.

    Examples:
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> jx.hvp(lambda x: (x**3).sum(), (x,), (v,), differentiable=False).product
        (tensor([6., 0.]),)
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            primals, tangents = map_tensors((primals, tangents), Tensor.clone)
            return hvp(fn, primals, tangents, has_aux=has_aux)
    points, tangent_leaves, structure = paired_leaves(primals, "primals", tangents, "tangents")
    has_graph = differentiable and torch.is_grad_enabled()
    leaves = [*(point for _, point in points), *tangent_leaves]
    assemble: Callable[[Sequence[Tensor]], Any]

    def nest_pair(leaves: Sequence[Tensor]) -> list[Any]:
        halves = leaves[: len(points)], leaves[len(points) :]
        return [torch_private.pytree.tree_unflatten(list(half), structure) for half in halves]

    def slope(*leaves: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        nonlocal assemble
        value, tangent, *aux = jvp(fn, *nest_pair(leaves), has_aux=has_aux)
        if not isinstance(tangent, Tensor) or tangent.numel() != 1:
            raise ValueError("fn must return one number, whose Hessian is asked for")
        assemble, tensors = split_nest((value, *aux))
        return tangent.sum(), tuple(tensors)

    # The slope is g(x, t) = ∇f(x) · t: its derivative by x is H t, that by t is ∇f.
    with torch.enable_grad():
        if transformed():  # a transform of torch.func allows no requires_grad_()
            total, pull_back, tensors = torch.func.vjp(slope, *leaves, has_aux=True)  # type: ignore[misc]
            gradients = pull_back(torch.ones_like(total))
        else:
            # Views, not detached copies: results stay connected to the caller's graph.
            leaves = [_leaf(leaf, has_graph) for leaf in leaves]
            total, tensors = slope(*leaves)
            if not total.requires_grad:  # a constant
                total = total + 0 * sum(leaf.sum() for leaf in leaves)
            gradients = torch.autograd.grad(
                total, leaves, create_graph=has_graph, materialize_grads=True
            )
    if not has_graph:
        tensors, gradients = map_tensors((tensors, gradients), Tensor.detach)
    value, *aux = assemble(tensors)
    product, gradient = nest_pair(gradients)
    return _result(HessianProduct, value, gradient, product, *aux)


def _leaf(tensor: object, has_graph: bool) -> Any:
    """Return a tensor that requires a gradient: a view of ``tensor`` if ``has_graph``, else a
    detached one."""
    if not isinstance(tensor, Tensor):
        return tensor  # jvp raises the error
    leaf = tensor.view_as(tensor) if has_graph else tensor.detach()
    return leaf if leaf.requires_grad else leaf.requires_grad_()


# ---- within torch.compile ----------------------------------------------------------------------

_TRACEABLE_CALLS = (
    "jx.laplacian in a graph takes a module (or check=False), one tensor, no chunk_size or has_aux"
)


def _traced_laplacian(
    fn: Function, x: Any, weights: WeightsLike, directions: object, check: bool
) -> Laplacian:
    """Compute `laplacian` while dynamo traces, for a tensor ``x``."""
    from .compiled.reachable import JetGraphError
    from .compiled.regions import jet_in_graph

    if check and rows_mix(fn, x):
        raise ValueError(MIXED)
    if directions is None:
        unit = torch.eye(x.shape[1:].numel(), dtype=x.dtype, device=x.device)
        directions = unit.reshape(-1, *x.shape[1:])
    steps = expand_rows(directions, x)
    scale = make_weights(weights, steps.shape[0], x)
    (group,) = scale.groups
    if scale.roots is not None:
        steps = steps * append_dims(scale.roots, steps.ndim)
    steps = steps if group.numbers == sorted(group.numbers) else steps[group.numbers]
    jet = jet_in_graph(fn, x, steps, 2 if group.num_squares else 1, scale.second, group.num_squares)
    if not isinstance(jet, Jet) or jet.primal.shape[:1] != x.shape[:1]:
        raise JetGraphError("fn must return one floating-point tensor [N, ...], a result a row")
    result = PassResult(group, [steps], [jet], [jet.first], itemgetter(0), ())
    return _weighted_laplacian([result], scale)
