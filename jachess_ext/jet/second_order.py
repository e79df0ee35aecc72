"""Second derivatives by name: Laplacian, diagonal of the Hessian, divergence, Hessian times vector.

The first three are of a function of the rows of a batch, each by itself, as `torch.func.vmap` would
call it on one: ``[N, d]`` to ``[N, ...]``.  A coordinate is an entry of a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .. import torch_private
from ..ops.library import constant_when_compiled, transformed
from .api import jvp
from .eager import Jet, eager_jet, output_and_aux, paired_leaves, without_tangent
from .layout import JetLayout, Second, map_tensors
from .rules.forward_mode import unwrapped
from .tensor import primal_of

Function = Callable[..., Any]


def laplacian(
    fn: Function,
    x: Any,
    *,
    weights: Sequence[float] | Tensor | None = None,
    directions: Any = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """Compute f(x), its derivatives along directions, and Σ w_i D²f[u_i, u_i], in one pass.

    Along the coordinates and without weights the last is the Laplacian of each row.  D directions
    cost D + 2 streams, since the sum of second derivatives is one stream (the forward Laplacian of
    Li et al. 2024; collapsed Taylor mode, Dangel et al. 2025).

    Args:
        fn: maps ``[N, ...]`` to ``[N, ...]``, each row by itself.  It runs once per chunk, and,
            when it is first given, once on five rows, to see that they do not depend on each other.
        x: floating-point tensor ``[N, ...]``; or a tuple with an entry for each argument of ``fn``;
            or another nest of tensors with the same N.
        weights: ``[q]``, one for each direction: an anisotropic operator.  A direction of weight 0
            has its first derivative alone, such as time in a heat equation.  Weights that require
            a gradient cost 2 D + 1 streams.
        directions: ``[q, *x.shape]``, or ``[q, *x.shape[1:]]`` for the same in each row; of several
            tensors, a nest like ``x``.  None: the coordinates, in the order of x's tensors.
        chunk_size: directions of a pass at most, which bounds memory; None: all at once.
        has_aux: ``fn`` returns ``(output, aux)``; ``aux`` is returned behind the results.

    Returns:
        ``(value, first, laplacian)``, nests like the one ``fn`` returned; ``first`` holds the
        derivatives along each direction, ``[q, N, ...]``.  All are differentiable in parameters,
        ``x``, weights and directions.

    Within ``torch.compile`` (docs/compile.md) ``fn`` has to be an ``nn.Module`` that returns a
    tensor, ``x`` a tensor, and only ``directions`` may be given; anything else breaks the graph and
    runs eagerly.

    Raises:
        ValueError: rows depend on each other, or shapes do not fit.
        TypeError, MissingJetRule: as of `jet`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> jx.laplacian(lambda x: (x**3).sum(-1), x)[2]  # Σ 6 x_i
        tensor([18., 42.])
        >>> jx.laplacian(lambda x: (x**3).sum(-1), x, weights=[0, 1])[2]
        tensor([12., 24.])
    """
    if torch.compiler.is_dynamo_compiling():
        plain = weights is None and chunk_size is None and not has_aux
        in_graph = _in_graph(fn, x, directions, plain)
        if in_graph is not None:
            return in_graph
    rows = _Rows(fn, x, directions, has_aux)
    factors = None if weights is None else rows.weights(weights)
    if factors is not None and _is_differentiated(factors):
        # In a sum a direction is scaled by the root of its weight, which has no gradient at 0.
        *found, second = rows.squares(chunk_size)
        return rows.results(*found, [torch.tensordot(factors, part, 1) for part in second])
    passes = list(rows.passes(_by_sign(factors, rows.count), chunk_size, "sum", factors))
    curved = [[p.sign * jet.second[0] for jet in p.jets] for p in passes if p.squares]
    totals = curved or [[torch.zeros_like(jet.primal) for jet in passes[0].jets]]
    total = [reduce(torch.add, parts) for parts in zip(*totals, strict=True)]
    return rows.results(*rows.values_and_first(passes, factors), total)


def hessian_diagonal(
    fn: Function,
    x: Any,
    *,
    directions: Any = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """Compute f(x), its derivatives along directions, and D²f[u_i, u_i] for each, in one pass.

    Along the coordinates that is the diagonal of each row's Hessian.

    Args:
        fn, x, directions, chunk_size, has_aux: as of `laplacian`.  D directions cost 2 D + 1
            streams.

    Returns:
        ``(value, first, second)``; both derivatives are ``[q, N, ...]``.

    Raises:
        ValueError, TypeError, MissingJetRule: as of `laplacian`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> jx.hessian_diagonal(lambda x: (x**3).sum(-1), x)[2]
        tensor([[ 6.],
                [12.]])
    """
    rows = _Rows(fn, x, directions, has_aux)
    return rows.results(*rows.squares(chunk_size))


def divergence(
    fn: Function,
    x: Any,
    *,
    directions: Any = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """Compute f(x) and Σ_i ∂f_i/∂x_i, the trace of each row's Jacobian, in one pass of order 1.

    Args:
        fn: maps ``x`` to a tensor of its shape, or a nest like it, each row by itself.
        directions: q probes of identity covariance, such as ``torch.randn(q, *x.shape)``, for the
            estimate (1/q) Σ u_iᵀ J u_i of Hutchinson; None: exactly, from all coordinates.
        x, chunk_size, has_aux: as of `laplacian`.

    Returns:
        ``(value, divergence)``; the divergence is ``[N]``.

    Raises:
        ValueError: the value has other shapes than ``x``, or there is no probe; or as of
            `laplacian`.
        TypeError, MissingJetRule: as of `laplacian`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> jx.divergence(torch.square, x)[1]  # Σ 2 x_i
        tensor([ 6., 14.])
    """
    rows = _Rows(fn, x, directions, has_aux)
    if directions is not None and not rows.count:
        raise ValueError("directions hold no probe; expected one at least, or None")
    total = rows.points[0].new_zeros(rows.batch)
    for part in rows.passes([(1, list(range(rows.count)), 0)], chunk_size, "sum"):
        for step, jet in zip(part.steps, part.jets, strict=True):
            if step.shape != jet.first.shape:
                raise ValueError(
                    f"fn returned {list(jet.primal.shape)} for x of {list(step.shape[1:])}; "
                    "expected the same shape"
                )
            total = total + (step * jet.first).flatten(2).sum((0, 2))
    total = total if directions is None else total / rows.count
    (value, *aux) = rows.results([jet.primal for jet in part.jets])
    return value, total, *aux


def hvp(
    fn: Function,
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    has_aux: bool = False,
    differentiable: bool = True,
) -> tuple[Any, ...]:
    """Compute f, its gradient and its Hessian times ``tangents``, from one pass and its backward.

    The backward of the tangent ∇f · t gives H t in the primals, and ∇f in t.

    Args:
        fn: returns a scalar tensor.
        primals, tangents, has_aux: as of `jvp`.
        differentiable: whether gradient and product have a graph, for another derivative.

    Returns:
        ``(value, gradient, product)``, and ``aux`` behind them; gradient and product are nested
        like ``primals``.

    Raises:
        ValueError: ``fn`` returned something other than one number.
        TypeError, MissingJetRule: as of `jvp`.

    Example:
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> jx.hvp(lambda x: (x**3).sum(), (x,), (v,), differentiable=False)
        (tensor(9.), (tensor([ 3., 12.]),), (tensor([6., 0.]),))
    """
    points, steps, structure = paired_leaves(primals, "primals", tangents, "tangents")
    keep = differentiable and torch.is_grad_enabled()
    leaves = [*(point for _, point in points), *steps]
    returned: Any = None

    def nests(leaves: Sequence[Any]) -> list[Any]:
        parts = leaves[: len(points)], leaves[len(points) :]
        return [torch_private.pytree.tree_unflatten(list(part), structure) for part in parts]

    def slope(*leaves: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        nonlocal returned
        value, tangent, *aux = jvp(fn, *nests(leaves), has_aux=has_aux)
        if not isinstance(tangent, Tensor) or tangent.numel() != 1:
            raise ValueError("fn must return one number, whose Hessian is asked for")
        returned, tensors = _apart((value, *aux))
        return tangent.sum(), tuple(tensors)

    with torch.enable_grad():
        if transformed():  # within which torch allows no requires_grad_()
            total, pull, tensors = torch.func.vjp(slope, *leaves, has_aux=True)  # type: ignore[misc]
            found = pull(torch.ones_like(total))
        else:
            # Views, not detached copies: with a graph, results stay connected to the caller's.
            leaves = [_leaf(leaf, keep) for leaf in leaves]
            total, tensors = slope(*leaves)
            if not total.requires_grad:  # of a constant
                total = total + 0 * sum(leaf.sum() for leaf in leaves)
            found = torch.autograd.grad(total, leaves, create_graph=keep, materialize_grads=True)
    if not keep:
        tensors, found = map_tensors((tensors, found), Tensor.detach)
    value, *aux = returned(tensors)
    product, gradient = nests(found)
    return value, gradient, product, *aux


def _leaf(tensor: Any, keep: bool) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor  # jvp says what it expects
    leaf = tensor.view_as(tensor) if keep else tensor.detach()
    return leaf if leaf.requires_grad else leaf.requires_grad_()


def _apart(nest: Any, other: Any = None) -> tuple[Callable[[Any], Any], list[Tensor]]:
    """Return what puts tensors into this nest in place of its own, and its own; `map_tensors`."""
    found: list[Tensor] = []

    def place_of(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return torch.empty(0)

    places = map_tensors(nest, place_of, other)

    def again(tensors: Sequence[Tensor]) -> Any:
        left = iter(tensors)
        return map_tensors(places, lambda _: next(left))

    return again, found


# ---- rows and passes ---------------------------------------------------------------------------

Group = tuple[int, list[int], int]
"""Directions that go through passes together: the sign of their sum, their numbers, and how many of
these, from the first, have squares."""


def _by_sign(weights: Tensor | None, count: int) -> list[Group]:
    """Return the directions by the sign of their weights, those of weight 0 behind others."""
    if weights is None:
        return [(1, list(range(count)), count)]
    signs = weights.detach().sign().tolist()
    plus, zero, minus = ([i for i, s in enumerate(signs) if s == sign] for sign in (1, 0, -1))
    groups = [(1, plus, len(plus)), (-1, minus, len(minus))]
    groups = [group for group in groups if group[1]] or [(1, [], 0)]
    groups[0][1].extend(zero)
    return groups


class _Pass(NamedTuple):
    sign: int
    numbers: list[int]
    squares: int
    steps: list[Tensor]
    jets: list[Jet]


class _Rows:
    """A function of the rows of a batch, and the directions of its derivatives.

    Attributes:
        points: the tensors of x, ``[N, ...]``.
        batch: N.
        count: q, the number of directions.
    """

    def __init__(self, fn: Function, x: Any, directions: Any, has_aux: bool) -> None:
        self._fn, self._x, self._has_aux = fn, x, has_aux
        self._output: Any = None
        self._aux: tuple[Any, ...] = ()
        steps = x if directions is None else directions
        named, given, self._structure = paired_leaves(x, "x", steps, "directions")
        self.points = [point for _, point in named]
        shapes = [list(point.shape) for point in self.points]
        if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(f"x has shape {shapes}; expected the same number of rows, [N, ...]")
        if any(point.is_complex() for point in self.points):
            raise TypeError(
                "x is complex, but coordinates are real numbers: pass torch.view_as_real(x), and "
                "have fn join the parts (torch.view_as_complex)"
            )
        self.batch = shapes[0][0]
        self._given: list[Tensor] | None = None
        if directions is not None:
            pairs = zip(given, self.points, strict=True)
            self._given = [_of_each_row(step, point) for step, point in pairs]
        self._sizes = [point.shape[1:].numel() for point in self.points]
        self.count = sum(self._sizes) if self._given is None else len(self._given[0])
        if self.batch > 1:
            self._check_rows()

    def weights(self, weights: Sequence[float] | Tensor) -> Tensor:
        """Return the weights as a tensor ``[q]`` of x's dtype.

        Raises:
            ValueError: they are not q finite numbers.
        """
        like = self.points[0]
        found = torch.as_tensor(weights, dtype=like.dtype, device=like.device)
        if found.shape != (self.count,) or not unwrapped(found).isfinite().all():
            raise ValueError(
                f"weights have shape {list(found.shape)}; expected [{self.count}], a finite number "
                "for each direction"
            )
        return found

    def passes(
        self,
        groups: list[Group],
        chunk_size: int | None,
        second: Second,
        weights: Tensor | None = None,
    ) -> Iterator[_Pass]:
        """Run ``fn`` once for each chunk of directions.

        Args:
            weights: of squares: a direction goes in times √|w|.
        """
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; expected 1 direction at least, or None")
        for sign, numbers, squares in groups:
            size = chunk_size or max(1, len(numbers))
            for start in range(0, max(1, len(numbers)), size):
                chunk = numbers[start : start + size]
                squared = max(0, min(squares - start, len(chunk)))
                steps = self._steps(chunk)
                if weights is not None:
                    roots = _roots(weights)[chunk]
                    steps = [step * roots.reshape(-1, *(1,) * (step.ndim - 1)) for step in steps]
                yield _Pass(sign, chunk, squared, steps, self._run(self._x, steps, second, squared))

    def values_and_first(
        self, passes: list[_Pass], weights: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values and first derivatives of every tensor, in the directions' order."""
        jets = zip(*(part.jets for part in passes), strict=True)
        first = [torch.cat([jet.first for jet in parts]) for parts in jets]
        if len(passes) > 1 or weights is not None:
            numbers = torch.tensor([number for part in passes for number in part.numbers])
            places = numbers.argsort().to(self.points[0].device)
            first = [each[places] for each in first]
        if weights is not None:
            roots = _roots(weights)
            first = [each / roots.reshape(-1, *(1,) * (each.ndim - 1)) for each in first]
        return [jet.primal for jet in passes[0].jets], first

    def squares(self, chunk_size: int | None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return values, first derivatives and D²f[u_i, u_i] of every tensor."""
        passes = list(self.passes(_by_sign(None, self.count), chunk_size, "squares"))
        jets = zip(*(part.jets for part in passes), strict=True)
        second = [torch.cat([jet.second for jet in parts]) for parts in jets]
        return *self.values_and_first(passes), second

    def results(self, *parts: list[Tensor]) -> tuple[Any, ...]:
        """Return lists of tensors as nests like the output of ``fn``, and ``aux`` behind them."""
        return *map(self._output, parts), *self._aux

    def _steps(self, numbers: list[int]) -> list[Tensor]:
        """Return some of the directions, ``[len(numbers), N, ...]`` of each tensor of x."""
        index = torch.tensor(numbers, dtype=torch.long, device=self.points[0].device)
        if self._given is not None:
            return [step[index] for step in self._given]
        found, start = [], 0
        for size, point in zip(self._sizes, self.points, strict=True):
            own = torch.arange(start, start + size, device=index.device)
            unit = (index.unsqueeze(1) == own).reshape(len(index), 1, *point.shape[1:])
            found.append(unit.to(point.dtype).expand(-1, *point.shape))
            start += size
        return found

    def _run(self, x: Any, steps: list[Tensor], second: Second, squares: int) -> list[Jet]:
        """Return the jets of every tensor that ``fn`` returns."""

        def tensors(*arguments: Any) -> list[Tensor]:
            output = self._fn(*arguments)
            if self._has_aux:
                output, aux = output_and_aux(output)
                self._aux = (map_tensors(aux, primal_of),)
            self._output, found = _apart(output, without_tangent)
            return found

        none = not len(steps[0])  # directions, which no jet has: zeros stand in
        given = [step.new_zeros(1, *step.shape[1:]) for step in steps] if none else steps
        nest = torch_private.pytree.tree_unflatten(given, self._structure)
        jets = eager_jet(tensors, x, nest, 2 if squares else 1, second, squares or None)
        for jet in jets:
            if not isinstance(jet, Jet) or jet.primal.shape[:1] != steps[0].shape[1:2]:
                got = list(jet.primal.shape) if isinstance(jet, Jet) else jet.dtype
                raise ValueError(
                    f"fn returned {got} for {steps[0].shape[1]} rows; expected floating-point "
                    "tensors [N, ...], with a result for each row"
                )
        return [Jet(jet.streams[:1], JetLayout(0, 1)) for jet in jets] if none else jets

    def _check_rows(self) -> None:
        """Raise ValueError where the tangent of one of five rows reaches another: of these alone,
        or of all where ``fn`` holds something of each row.  A function is checked once."""
        mode = getattr(self._fn, "training", None)
        with suppress(TypeError):  # neither hashable nor referable: checked at each call
            if _CHECKED.get(self._fn, ...) == mode:
                return
        try:
            jets = self._along_rows(min(_CHECKED_ROWS, self.batch))
        except Exception:
            jets = self._along_rows(self.batch)
        for jet in jets:
            parts = [(each[:row], each[row + 1 :]) for row, each in enumerate(jet.first)]
            # Of every function that torch.func.vmap calls at once, since it lets none be read; NaN,
            # which is also 0 · ∞, says nothing of rows.
            if any((unwrapped(others).abs() > 0).any() for pair in parts for others in pair):
                raise ValueError(
                    "results of fn depend on other rows of x than their own (a mean over the "
                    "batch, batch norm in training mode?); expected each row by itself"
                )
        with suppress(TypeError):
            _CHECKED[self._fn] = mode

    def _along_rows(self, rows: int) -> list[Jet]:
        points, steps, each = [], [], torch.arange(min(_CHECKED_ROWS, rows))
        for point, size in zip(self.points, self._sizes, strict=True):
            # Nothing drawn: torch.func.vmap would ask how.
            own = torch.arange(1.0, 1 + len(each) * size).sin()
            step = torch.zeros(len(each), rows, *point.shape[1:])
            step[each, each] = own.reshape(len(each), *point.shape[1:])
            step = step.to(point)
            points.append(point[:rows].detach())
            steps.append(step)
        with torch.no_grad():
            x = torch_private.pytree.tree_unflatten(points, self._structure)
            return self._run(x, steps, "sum", 0)


_CHECKED_ROWS = 5  # no multiple of the groups that rows are taken in: pairs, threes, fours
_CHECKED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Functions whose rows were found independent, with their training mode where they have one."""


def _is_differentiated(weights: Tensor) -> bool:
    """Return whether a derivative by weights is asked for, or vmap lets no sign of them be read."""
    dual = forward_ad.unpack_dual(weights).tangent is not None
    return weights.requires_grad or dual or unwrapped(weights) is not weights


def _roots(weights: Tensor) -> Tensor:
    """Return √|w|, and 1 for a weight of 0."""
    return torch.where(weights == 0, 1, weights.abs()).sqrt()


def _of_each_row(step: Any, point: Tensor) -> Any:
    """Return directions that are the same in each row, ``[q, ...]``, as ``[q, N, ...]``."""
    if isinstance(step, Tensor) and step.ndim == point.ndim and step.shape[1:] == point.shape[1:]:
        return step.unsqueeze(1).expand(-1, *point.shape)
    return step


# ---- within torch.compile ----------------------------------------------------------------------


def _in_graph(fn: Any, x: Any, directions: Any, plain: bool) -> tuple[Tensor, ...] | None:
    """Compute `laplacian` while dynamo traces; None where the graph breaks, and it runs eagerly.

    Args:
        plain: whether it was called without weights, chunks or aux.
    """
    # Here, since it imports torch._dynamo, which takes seconds.
    from .compiled import JetGraphError, jet_in_graph, why_not

    held = plain and isinstance(fn, nn.Module) and isinstance(x, Tensor) and x.ndim > 1
    form = "jx.laplacian in a graph takes a module, one tensor, no weights, chunks or aux"
    if why := why_not(fn) or (None if held else form):
        torch._dynamo.graph_break(msg=why)
        return None
    _rows_checked(fn, x)
    if directions is None:
        unit = torch.eye(x.shape[1:].numel(), dtype=x.dtype, device=x.device)
        directions = unit.reshape(-1, *x.shape[1:])
    found = jet_in_graph(fn, x, _of_each_row(directions, x), 2, "sum")
    if not isinstance(found, Jet) or found.primal.shape[:1] != x.shape[:1]:
        raise JetGraphError("fn must return one floating-point tensor [N, ...], a result a row")
    return found.primal, found.first, found.second[0]


@constant_when_compiled
def _rows_checked(fn: Function, x: Tensor) -> bool:
    """Return True, or raise ValueError where rows of ``fn`` depend on each other."""
    _Rows(fn, x.detach(), None, False)
    return True
