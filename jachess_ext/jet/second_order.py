"""Second derivatives by name: Laplacian, diagonal of the Hessian, divergence, Hessian times vector.

The first three are of a function of the rows of a batch, each by itself, as `torch.func.vmap` would
call it on one: ``[N, d]`` to ``[N, ...]``.  A coordinate is an entry of a row.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .. import torch_private
from ..ops.library import constant_when_compiled, transformed
from .api import jvp
from .context import without_dynamo
from .eager import Jet, eager_jet, output_and_aux, paired_leaves, without_tangent
from .layout import JetLayout, Second, map_tensors
from .registry import MissingJetRule
from .rows import (
    FEW,
    MIXED,
    Comparison,
    any_true,
    halves,
    history_of,
    mixed_factors,
    state_of,
)
from .rules.forward_mode import unwrapped
from .tensor import primal_of

Function = Callable[..., Any]

if TYPE_CHECKING:

    class _Result(tuple[Any, ...]):  # a field more with has_aux
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


@cache
def _with_aux(kind: Any) -> Any:
    return namedtuple(kind.__name__, [*kind._fields, "aux"])


def _result(kind: Any, *parts: Any) -> Any:
    return kind(*parts) if len(parts) == len(kind._fields) else _with_aux(kind)(*parts)


def laplacian(
    fn: Function,
    x: Any,
    *,
    weights: Sequence[float] | Tensor | None = None,
    directions: Any = None,
    chunk_size: int | None = None,
    has_aux: bool = False,
    check: bool = True,
) -> Laplacian:
    """Compute f(x), its derivatives along directions, and Σ w_i D²f[u_i, u_i], in one pass.

    Along the coordinates and without weights the last is the Laplacian of each row.  D directions
    cost D + 2 streams, since the sum of second derivatives is one stream (the forward Laplacian of
    Li et al. 2024; collapsed Taylor mode, Dangel et al. 2025).

    Args:
        fn: maps ``[N, ...]`` to ``[N, ...]``, each row by itself.  It runs once per chunk, each
            time with the same numbers of torch's generators.
        x: floating-point tensor ``[N, ...]``; or a tuple with an entry for each argument of ``fn``;
            or another nest of tensors with the same N.
        weights: ``[q]``, one for each direction: an anisotropic operator; or ``[q, N]``, others in
            each row.  A direction of weight 0 has its first derivative alone, such as time in a
            heat equation.  Weights of each row, or that require a gradient, cost 2 D + 1 streams.
        directions: ``[q, *x.shape]``, or ``[q, *x.shape[1:]]`` for the same in each row; of several
            tensors, a nest like ``x``.  None: the coordinates, in the order of x's tensors.
        chunk_size: directions of a pass at most, which bounds memory; None: all at once.
        has_aux: ``fn`` returns ``(output, aux)``; ``aux`` is returned behind the results.
        check: whether to look for rows that depend on each other.  That costs a stream, in each
            call along 16 directions and more; along fewer in the first, second, fourth, eighth
            call of a function and so on, in each 64th, and after a change that can be seen: of N,
            of attributes, training flags, buffers, layers and hooks of modules, of what a function
            closes over or names globally.

    Returns:
        ``(value, gradient, laplacian)``, a named tuple of nests like the one ``fn`` returned;
        ``gradient`` holds the derivatives along each direction, ``[q, N, ...]``.  All are
        differentiable in parameters, ``x``, weights and directions.

    Rows that depend on each other are seen by their first derivatives at ``x``; what mixes them in
    second derivatives alone is not seen.  A function by rows is never refused: rounding that looks
    like a mixture is looked into, by more calls of ``fn``.

    Within ``torch.compile`` (docs/compile.md) ``fn`` has to be an ``nn.Module`` that returns a
    tensor, ``x`` a tensor, and only ``directions`` may be given; anything else breaks the graph and
    runs eagerly.  Rows are looked at where it is traced, and in a program of ``torch.export`` each
    time it runs: it raises RuntimeError.

    Raises:
        ValueError: rows depend on each other, or shapes do not fit.
        TypeError, MissingJetRule: as of `jet`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> jx.laplacian(lambda x: (x**3).sum(-1), x).laplacian  # Σ 6 x_i
        tensor([18., 42.])
        >>> jx.laplacian(lambda x: (x**3).sum(-1), x, weights=[0, 1]).laplacian
        tensor([12., 24.])
    """
    if torch.compiler.is_dynamo_compiling():
        plain = weights is None and chunk_size is None and not has_aux
        in_graph = _in_graph(fn, x, directions, plain, check)
        if in_graph is not None:
            return in_graph
    return _eager_laplacian(fn, x, weights, directions, chunk_size, has_aux, check)


@without_dynamo
def _eager_laplacian(
    fn: Function,
    x: Any,
    weights: Sequence[float] | Tensor | None,
    directions: Any,
    chunk_size: int | None,
    has_aux: bool,
    check: bool,
) -> Laplacian:
    rows = _Rows(fn, x, directions, has_aux, check)
    factors = None if weights is None else rows.weights(weights)
    if factors is not None and (factors.ndim > 1 or _is_differentiated(factors)):
        # In a sum a direction is scaled by the root of its weight, which has no gradient at 0.
        value, first, second = rows.squares(chunk_size)
        shaped = [factors.reshape(*factors.shape, *(1,) * (p.ndim - factors.ndim)) for p in second]
        total = [(w * part).sum(0) for w, part in zip(shaped, second, strict=True)]
        return rows.results(Laplacian, value, first, total)
    passes = list(rows.passes(_by_sign(factors, rows.count), chunk_size, "sum", factors))
    curved = [[p.sign * second[0] for second in p.second] for p in passes if p.squares]
    totals = curved or [[torch.zeros_like(primal) for primal in passes[0].primals]]
    total = [reduce(torch.add, parts) for parts in zip(*totals, strict=True)]
    return rows.results(Laplacian, *rows.values_and_first(passes, factors), total)


@without_dynamo
def hessian_diagonal(
    fn: Function,
    x: Any,
    *,
    directions: Any = None,
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
        ValueError, TypeError, MissingJetRule: as of `laplacian`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> jx.hessian_diagonal(lambda x: (x**3).sum(-1), x).diagonal
        tensor([[ 6.],
                [12.]])
    """
    rows = _Rows(fn, x, directions, has_aux, check)
    return rows.results(HessianDiagonal, *rows.squares(chunk_size))


@without_dynamo
def divergence(
    fn: Function,
    x: Any,
    *,
    directions: Any = None,
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
        TypeError, MissingJetRule: as of `laplacian`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> jx.divergence(torch.square, x).divergence  # Σ 2 x_i
        tensor([ 6., 14.])
    """
    rows = _Rows(fn, x, directions, has_aux, check)
    if directions is not None and not rows.count:
        raise ValueError("directions hold no probe; expected one at least, or None")
    total = rows.points[0].new_zeros(rows.batch)
    for part in rows.passes([(1, list(range(rows.count)), 0)], chunk_size, "sum"):
        for step, first in zip(part.steps, rows.like_x(part.first), strict=True):
            if step.shape != first.shape:
                raise ValueError(
                    f"fn returned {list(first.shape[1:])} for x of {list(step.shape[1:])}; "
                    "expected the same shape"
                )
            total = total + (step * first).unsqueeze(-1).flatten(2).sum((0, 2))
    total = total if directions is None else total / rows.count
    return rows.results(Divergence, part.primals, total)


def hvp(
    fn: Function,
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
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

    Example:
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
    return _result(HessianProduct, value, gradient, product, *aux)


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
    """A pass along some directions: of every result values, first and second derivatives."""

    sign: int
    numbers: list[int]
    squares: int
    steps: list[Tensor]
    primals: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]


class _Generators:
    """The states of torch's generators: of the CPU, and of the GPUs in use."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


class _Rows:
    """A function of the rows of a batch, and the directions of its derivatives.

    Attributes:
        points: the tensors of x, ``[N, ...]``.
        fn: the function.
        batch: N.
        count: q, the number of directions.
    """

    def __init__(
        self, fn: Function, x: Any, directions: Any, has_aux: bool, check: bool = True
    ) -> None:
        self.fn, self._x, self._has_aux = fn, x, has_aux
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
        self._check = check and self.batch > 1 and self.count > 0

    def weights(self, weights: Sequence[float] | Tensor) -> Tensor:
        """Return the weights as a tensor ``[q]`` or ``[q, N]`` of x's dtype.

        Raises:
            ValueError: they are not so many finite numbers.
        """
        like = self.points[0]
        found = torch.as_tensor(weights, dtype=like.dtype, device=like.device)
        shapes = (self.count,), (self.count, self.batch)
        if found.shape not in shapes or not unwrapped(found).isfinite().all():
            raise ValueError(
                f"weights have shape {list(found.shape)}; expected [{self.count}], a finite number "
                f"for each direction, or [{self.count}, {self.batch}], for each in each row"
            )
        return found

    def passes(
        self,
        groups: list[Group],
        chunk_size: int | None,
        second: Second,
        weights: Tensor | None = None,
    ) -> Iterator[_Pass]:
        """Run ``fn`` once for each chunk of directions, each time with the same random numbers.

        Args:
            weights: of squares: a direction goes in times √|w|.

        Raises:
            ValueError: rows depend on each other; the last pass has a direction more to see that.
        """
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; expected 1 direction at least, or None")
        plan = []
        for sign, numbers, squares in groups:
            size = chunk_size or max(1, len(numbers))
            for start in range(0, max(1, len(numbers)), size):
                chunk = numbers[start : start + size]
                plan.append((sign, chunk, max(0, min(squares - start, len(chunk)))))
        check = _Check.of(self) if self._check else None
        generators = _Generators() if check or len(plan) > 1 else None
        for place, (sign, chunk, squared) in enumerate(plan):
            if generators and place:
                generators.restore()
            steps = self._steps(chunk)
            roots = None if weights is None else _roots(weights)[chunk]
            if roots is not None:
                steps = [step * roots.reshape(-1, *(1,) * (step.ndim - 1)) for step in steps]
            extra = check.direction() if check and place == len(plan) - 1 else None
            jets = self._run(self._x, steps, second, squared, extra)
            first = [jet.first[: len(chunk)] for jet in jets]
            if check:
                check.add(first, chunk, roots)
            if check and extra and generators:
                check.compare([jet.first[-1].detach() for jet in jets], generators)
            primals, seconds = [jet.primal for jet in jets], [jet.second for jet in jets]
            yield _Pass(sign, chunk, squared, steps, primals, first, seconds)

    def values_and_first(
        self, passes: list[_Pass], weights: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values and first derivatives of every tensor, in the directions' order."""
        first = [torch.cat(parts) for parts in zip(*(p.first for p in passes), strict=True)]
        if len(passes) > 1 or weights is not None:
            order = np.argsort([number for part in passes for number in part.numbers])
            places = torch.from_numpy(order).to(self.points[0].device)
            first = [each[places] for each in first]
        if weights is not None:
            roots = _roots(weights)
            first = [each / roots.reshape(-1, *(1,) * (each.ndim - 1)) for each in first]
        return passes[0].primals, first

    def squares(self, chunk_size: int | None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return values, first derivatives and D²f[u_i, u_i] of every tensor."""
        passes = list(self.passes(_by_sign(None, self.count), chunk_size, "squares"))
        second = [torch.cat(parts) for parts in zip(*(p.second for p in passes), strict=True)]
        return *self.values_and_first(passes), second

    def results(self, kind: Any, *parts: list[Tensor] | Tensor) -> Any:
        """Return lists of tensors as nests like the output of ``fn``, and ``aux`` behind them."""
        nests = [part if isinstance(part, Tensor) else self._output(part) for part in parts]
        return _result(kind, *nests, *self._aux)

    def like_x(self, parts: list[Tensor]) -> list[Tensor]:
        """Return a tensor for each that ``fn`` returned, in the order of x's.

        Raises:
            ValueError: they are not nested as x is.
        """
        nest, structure = self._output(parts), self._structure
        if isinstance(self._x, tuple) and len(self._x) == 1 and not isinstance(nest, tuple):
            nest = (nest,)
        try:
            tensors = structure.flatten_up_to(nest)
        except ValueError:
            tensors = []
        if not all(isinstance(tensor, Tensor) for tensor in tensors) or not tensors:
            raise ValueError(
                "fn must return tensors nested as those of x, in the same tuples, lists and dicts, "
                "since the divergence takes the derivative of each by its own"
            )
        return tensors

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

    def _run(
        self,
        x: Any,
        steps: list[Tensor],
        second: Second,
        squares: int,
        extra: list[Tensor] | None = None,
    ) -> list[Jet]:
        """Return the jets of every tensor that ``fn`` returns."""

        def tensors(*arguments: Any) -> list[Tensor]:
            output = self.fn(*arguments)
            if self._has_aux:
                output, aux = output_and_aux(output)
                self._aux = (map_tensors(aux, primal_of),)
            self._output, found = _apart(output, without_tangent)
            if not found:
                raise TypeError(f"fn returned {output!r}, which holds no tensor; expected [N, ...]")
            return found

        none = not len(steps[0])  # directions, which no jet has: zeros stand in
        given = [step.new_zeros(1, *step.shape[1:]) for step in steps] if none else steps
        unflatten = torch_private.pytree.tree_unflatten
        more = None if extra is None else unflatten(extra, self._structure)
        kind = (2 if squares else 1, second, squares or None, more)
        try:
            jets = eager_jet(tensors, x, unflatten(given, self._structure), *kind)
        except MissingJetRule as error:
            if "transform of torch.func" not in str(error):
                raise
            raise MissingJetRule(
                f"{error} Of torch.vmap(f), write torch.vmap(lambda row: jx.laplacian(lambda x: "
                "f(x[0])[None], row[None]).laplacian[0])(x)."
            ) from error
        for jet in jets:
            if not isinstance(jet, Jet) or jet.primal.shape[:1] != steps[0].shape[1:2]:
                got = list(jet.primal.shape) if isinstance(jet, Jet) else jet.dtype
                raise ValueError(
                    f"fn returned {got} for {steps[0].shape[1]} rows; expected floating-point "
                    "tensors [N, ...], with a result for each row"
                )
        return [Jet(jet.streams[:1], JetLayout(0, 1)) for jet in jets] if none else jets

    def mixture(self, factors: Tensor) -> list[Tensor]:
        """Return Σ a_qn u_q, ``[N, ...]`` of each tensor of x, for factors ``[q, N]``."""
        if self._given is not None:
            wide = [factors.reshape(*factors.shape, *(1,) * (u.ndim - 2)) for u in self._given]
            return [(a * u.detach()).sum(0) for a, u in zip(wide, self._given, strict=True)]
        parts = factors.T.split(self._sizes, 1)
        return [
            part.reshape(point.shape).to(point.dtype)
            for part, point in zip(parts, self.points, strict=True)
        ]

    def alike(self) -> bool:
        """Return whether all rows are the same."""
        last = any_true(point[-1] != point[0] for point in self.points)  # of most batches: quick
        return not last and not any_true((point != point[:1]).flatten() for point in self.points)

    def depend(self, generators: _Generators, *, nearby: bool = False) -> bool:
        """Return whether tangents of some rows reach rows where they are zero; whatever two rows
        these are, and to the bit.

        Args:
            generators: as they were when the call began.
            nearby: at other points, since what is the same in all rows may hide it.
        """
        before = self._output, self._aux
        points = [point.detach() for point in self.points]
        mixture = self.mixture(mixed_factors(self.count, self.batch, points[0]))
        if nearby:
            pairs = zip(points, mixture, strict=True)
            points = [point + (1 + point.abs()) * part / 128 for point, part in pairs]
        x = torch_private.pytree.tree_unflatten(points, self._structure)
        with torch.no_grad(), _unchanged(self.fn):
            for some in halves(self.batch, points[0].device).split(8):
                generators.restore()
                shaped = [some.reshape(*some.shape, *(1,) * (part.ndim - 1)) for part in mixture]
                steps = [mask * part for mask, part in zip(shaped, mixture, strict=True)]
                for jet in self._run(x, steps, "sum", 0):
                    inside = some.reshape(*some.shape, *(1,) * (jet.first.ndim - 2))
                    if any_true([torch.where(inside, 0, jet.first).abs() > 0]):
                        return True
        self._output, self._aux = before
        return False


@contextmanager
def _unchanged(fn: Function) -> Iterator[None]:
    """Set torch's generators, and a module's buffers, as they were."""
    generators = _Generators()
    buffers = list(fn.buffers()) if isinstance(fn, nn.Module) else []
    copies = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        generators.restore()
        for buffer, copy in zip(buffers, copies, strict=True):
            buffer.copy_(copy)


class _Check:
    """The question of a call whether rows depend on each other."""

    def __init__(self, rows: _Rows, state: Any) -> None:
        self._rows, self._state = rows, state
        factors = mixed_factors(rows.count, rows.batch, rows.points[0], zero=True)
        self._comparison = Comparison(factors)

    @classmethod
    def of(cls, rows: _Rows) -> _Check | None:
        """Return the question; None, and count the call, where it is not asked in this one."""
        state = None
        if rows.count < FEW and not torch.compiler.is_exporting():
            shapes = tuple((point.shape, point.dtype, point.device) for point in rows.points)
            state = rows.count, shapes, state_of(rows.fn, rows.batch)
            history = history_of(rows.fn)
            if not history.is_due(state):
                history.count(state)
                return None
        return cls(rows, state)

    def direction(self) -> list[Tensor]:
        """Return the direction that the last pass has beside its own, ``[N, ...]`` of each
        tensor of x."""
        return self._rows.mixture(self._comparison.factors)

    def add(self, first: list[Tensor], numbers: list[int], roots: Tensor | None) -> None:
        """Add the first derivatives of a pass, of directions that were scaled by these roots."""
        factors = self._comparison.factors
        if roots is not None:
            factors = factors[numbers] / roots.unsqueeze(1)
        elif len(numbers) < len(factors):
            factors = factors[numbers[0] : numbers[-1] + 1]
        self._comparison.add(first, factors)

    def compare(self, tangents: list[Tensor], generators: _Generators) -> None:
        """Raise ValueError where rows depend on each other; else count the call.

        While torch.export traces nothing is read: the exported program raises RuntimeError.
        """
        if torch.compiler.is_exporting():
            return self._comparison.assert_apart(tangents)
        mixed = False
        if not self._comparison.agrees(tangents):
            error, history = self._comparison.error(tangents), history_of(self._rows.fn)
            if error > history.roundings:
                mixed = error == torch.inf or self._rows.depend(generators)
                history.roundings = 4 * error
        if not mixed and self._rows.alike():
            with suppress(Exception):  # of a function that is not defined there
                mixed = self._rows.depend(generators, nearby=True)
        if mixed:
            history_of(self._rows.fn).forget()
            raise ValueError(MIXED)
        if self._state is not None:
            history_of(self._rows.fn).count(self._state)


def _is_differentiated(weights: Tensor) -> bool:
    """Return whether a derivative by weights is asked for, or vmap lets no sign of them be read."""
    dual = forward_ad.unpack_dual(weights).tangent is not None
    return weights.requires_grad or dual or unwrapped(weights) is not weights


def _roots(weights: Tensor) -> Tensor:
    """Return √|w|, and 1 for a weight of 0."""
    return torch.where(weights == 0, 1, weights.abs()).sqrt()


def _of_each_row(step: Any, point: Tensor) -> Any:
    """Return directions that are the same in each row, ``[q, ...]``, as ``[q, N, ...]``."""
    if not isinstance(step, Tensor):
        raise TypeError(f"directions must be a tensor [q, N, ...], not {type(step).__name__}")
    if step.ndim == point.ndim and step.shape[1:] == point.shape[1:]:
        return step.unsqueeze(1).expand(-1, *point.shape)
    return step


# ---- within torch.compile ----------------------------------------------------------------------


def _in_graph(fn: Any, x: Any, directions: Any, plain: bool, check: bool) -> Laplacian | None:
    """Compute `laplacian` while dynamo traces; None where the graph breaks, and it runs eagerly.

    Args:
        plain: whether it was called without weights, chunks or aux.
    """
    # Here, since it imports torch._dynamo, which takes seconds.
    from .compiled import JetGraphError, jet_in_graph, warn_of_break, why_not

    held = plain and isinstance(fn, nn.Module) and isinstance(x, Tensor) and x.ndim > 1
    form = "jx.laplacian in a graph takes a module, one tensor, no weights, chunks or aux"
    if why := why_not(fn) or (None if held else form):
        torch._dynamo.graph_break(msg=why)
        warn_of_break(why)
        return None
    if check and _rows_depend(fn, x):
        raise ValueError(MIXED)
    if directions is None:
        unit = torch.eye(x.shape[1:].numel(), dtype=x.dtype, device=x.device)
        directions = unit.reshape(-1, *x.shape[1:])
    found = jet_in_graph(fn, x, _of_each_row(directions, x), 2, "sum")
    if not isinstance(found, Jet) or found.primal.shape[:1] != x.shape[:1]:
        raise JetGraphError("fn must return one floating-point tensor [N, ...], a result a row")
    return _result(Laplacian, found.primal, found.first, found.second[0])


@constant_when_compiled
def _rows_depend(fn: Function, x: Tensor) -> bool:
    """Return whether rows of ``fn`` depend on each other at ``x``."""
    rows = _Rows(fn, x.detach(), None, False)
    if rows.batch < 2 or not rows.count:
        return False
    generators = _Generators()
    return rows.depend(generators) or (rows.alike() and rows.depend(generators, nearby=True))
