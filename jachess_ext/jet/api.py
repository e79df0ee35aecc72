"""`jx.jet` and `jx.jvp`: the value and directional derivatives of a function, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .engine.layout import Second
from .engine.types import A, Args, Function, T
from .passes.eager import Jet, eager_jet, eager_jvp


def can_join_graph(is_tracing: bool, fn: Function, refusal: str | None = None) -> bool:
    """Return whether dynamo traces this call and can make the derivative of ``fn`` a graph node.

    If so, `compiled/regions.py` traces the pass as one node.  Else `passes/eager.py` runs the pass,
    after a graph break if dynamo is tracing.  `rows/passes.py` is never traced: in a graph
    `laplacian` is one pass.

    Args:
        is_tracing: the result of `torch.compiler.is_dynamo_compiling` in the caller (not here:
            where dynamo skips the caller's frame, it still traces the functions called there).
        refusal: the reason why a graph cannot contain this call, whatever ``fn`` is; None if there
            is none.
    """
    if not is_tracing:
        return False
    from .compiled.regions import can_trace  # imports torch._dynamo, which takes seconds

    return can_trace(fn, refusal)


@overload
def jet(
    fn: Callable[..., Tensor], x: object, directions: object, order: int = ..., second: Second = ...
) -> Jet: ...
@overload  # Any is the same nest of `Jet` as the nest of tensors that fn returns
def jet(
    fn: Function, x: object, directions: object, order: int = ..., second: Second = ...
) -> Any: ...
def jet(
    fn: Function, x: object, directions: object, order: int = 2, second: Second = "pairs"
) -> object:
    """Propagate a Taylor expansion of ``fn`` around ``x``.

    Args:
        fn: any torch callable of tensors, for example a lambda around a model call; it runs once,
            unmodified.
        x: tensor of real or complex numbers, the point of expansion; or a tuple with an entry for
            each argument of ``fn``; or another nest (list, dict, ...) of tensors, the only argument
            of ``fn``.  The entries of a tuple may be nests, too.
        directions: ``[q, *x.shape]``, of x's dtype and device.  If ``x`` holds several tensors, a
            nest like ``x`` with the same q everywhere: direction i is the i-th slice of all of
            them together.  With ``second="pairs"`` q is 1 to 4.
        order: 1 (J u_i only) or 2 (also second derivatives).
        second: which second derivatives to compute: ``"pairs"``, D²f[u_i, u_j] for all i < j;
            ``"squares"``, D²f[u_i, u_i] for all i; or ``"sum"``, the sum of these squares, which
            costs q + 2 streams instead of 2q + 1.

    Returns:
        A `Jet` if ``fn`` returns a tensor; if it returns a tuple, list, dict or dataclass of
        tensors, the same nest of `Jet`.  The result is differentiable: its backward is the double
        backward of ``fn``.  A tensor that does not depend on ``x`` has zero derivatives.

    Within ``torch.compile`` (docs/compile.md) ``fn`` is an ``nn.Module``, or a function that closes
    over modules, tensors, numbers and nests of them; anything else breaks the graph and runs
    eagerly.  NaN in ``x`` is not refused within ``torch.compile`` or a transform of ``torch.func``.

    Raises:
        TypeError: ``x`` holds something other than real or complex tensors; ``directions`` is no
            tensor, or has another dtype than ``x``.
        ValueError: ``x`` is not finite; the shape or device of ``directions`` does not fit ``x``;
            ``order`` or q is not supported.
        MissingJetRule: ``fn`` calls an operation without a rule.

    Examples:
        >>> result = jx.jet(torch.sin, torch.zeros(3), torch.ones(2, 3))
        >>> result.first.shape, result.second.shape, result.pairs
        (torch.Size([2, 3]), torch.Size([1, 3]), [(0, 1)])
    """
    if can_join_graph(is_dynamo_compiling(), fn):
        from .compiled.regions import jet_in_graph  # imports torch._dynamo, which takes seconds

        return jet_in_graph(fn, x, directions, order, second, None)
    return eager_jet(fn, x, directions, order, second)


# ---- one derivative --------------------------------------------------------------------------


@overload
def jvp(
    fn: Callable[..., T], primals: Args, tangents: Args, *, differentiable: bool = ...
) -> tuple[T, T]: ...
@overload
def jvp(
    fn: Callable[..., tuple[T, A]],
    primals: Args,
    tangents: Args,
    *,
    has_aux: Literal[True],
    differentiable: bool = ...,
) -> tuple[T, T, A]: ...
@overload
def jvp(
    fn: Function, primals: Args, tangents: Args, *, has_aux: bool, differentiable: bool = ...
) -> tuple[Any, ...]: ...
def jvp(
    fn: Function,
    primals: tuple[object, ...],
    tangents: tuple[object, ...],
    *,
    has_aux: bool = False,
    differentiable: bool = True,
) -> tuple[object, ...]:
    """Compute ``fn(*primals)`` and its Jacobian-vector product J t along ``tangents``, in one pass.

    Like `torch.func.jvp`, but through attention and every other operation that has a jet rule.

    Args:
        fn: any torch callable; it runs once, unmodified.
        primals: a tuple with an entry for each argument of ``fn``: real or complex tensors, or
            nests (lists, dicts, ...) of them.  Bind other arguments with functools.partial.
            Integers, such as class labels, pass as they are.
        tangents: the direction t, nested like ``primals``: for each tensor a tensor of the same
            shape, dtype and device, or a number for all of its entries.  None is 0; integer
            tensors take None or zeros.
        has_aux: ``fn`` returns ``(output, aux)``; ``aux`` is returned without tangents.
        differentiable: whether the tangents have a graph.  Tangents without one serve as targets
            (MeanFlow, consistency models): they leave nothing in memory for a backward pass, and
            the output's graph is that of ``fn(*primals)``.

    Returns:
        ``(output, tangent)``, or ``(output, tangent, aux)``: nests like the one ``fn`` returned.
        An output that does not depend on ``primals`` has a zero tangent.

    Within ``torch.compile`` (docs/compile.md) ``fn`` is an ``nn.Module``, or a function that closes
    over modules, tensors, numbers and nests of them; anything else breaks the graph and runs
    eagerly.

    Raises:
        TypeError: ``primals`` is no tuple, or holds something other than tensors of numbers;
            ``tangents`` are nested otherwise than ``primals``, or have another dtype; ``fn``
            returned something other than tensors.
        ValueError: a tangent has another shape or is on another device.
        MissingJetRule: ``fn`` calls an operation without a rule.

    Examples:
        >>> jx.jvp(torch.square, (torch.tensor(3.0),), (torch.tensor(1.0),))
        (tensor(9.), tensor(6.))
    """
    if can_join_graph(is_dynamo_compiling(), fn):
        from .compiled.regions import jvp_in_graph

        return jvp_in_graph(fn, primals, tangents, has_aux, differentiable)
    return eager_jvp(fn, primals, tangents, has_aux, differentiable)
