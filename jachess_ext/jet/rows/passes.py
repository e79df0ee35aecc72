"""Passes of a function of rows along groups of its directions, with the check that rows do not mix.

`Rows` is the function, where it is expanded, and the directions.  `Rows.passes` runs it once for
each `Group` of directions and yields the `PassResult` of that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import library
from ...ops.library import constant_when_compiled
from ..engine.context import without_dynamo
from ..engine.errors import MissingJetRule
from ..engine.layout import JetLayout, Second, map_tensors
from ..engine.tensor import primal_of
from ..engine.types import Function
from ..passes.eager import (
    Inputs,
    Jet,
    begin_pass,
    can_read_values,
    check_directions,
    check_finite,
    output_and_aux,
    paired_leaves,
    refuse_non_tensor,
    to_jets,
)
from ..passes.fsdp import jets_through_fsdp
from ..passes.scope import open_pass
from ..rules.forward_mode import unwrap
from .check import (
    Generators,
    RowCheck,
    any_true,
    append_dims,
    call_key,
    find_history,
    half_masks,
    random_factors,
    restoring_state,
)
from .sameness import CHANGES, refuse_irreproducible, require_same

_DIFFERS = (
    "fn runs once for each chunk and sign of weights, and is not the same function each time: "
    f"{CHANGES}. Call eval(), leave out chunk_size, or give weights of one sign"
)


class Group(NamedTuple):
    """The directions of one pass.

    A pass adds squares up without weights, so a direction of weight w is multiplied by √|w|, and
    the sign of w is that of its group: Σ w_i D²f[u_i, u_i] = Σ_groups sign Σ_i D²f[√|w_i| u_i,
    √|w_i| u_i].

    Attributes:
        sign: 1 or -1, the factor of the group's sum of squares.
        numbers: indices of the directions.
        squares: how many of these, from the first on, have D²f[u_i, u_i].
    """

    sign: int
    numbers: list[int]
    squares: int

    def chunks(self, size: int | None) -> Iterator[Group]:
        """Yield groups of at most ``size`` directions; an empty group as it is."""
        count = max(1, len(self.numbers))
        for start in range(0, count, size or count):
            numbers = self.numbers[start : start + (size or count)]
            yield Group(self.sign, numbers, max(0, min(self.squares - start, len(numbers))))


class PassResult(NamedTuple):
    """The results of a pass along p directions.

    Attributes:
        group: the directions.
        steps: the directions, ``[p, N, ...]`` of each tensor of x.
        jets: one for each tensor that ``fn`` returns.
        first: J u_i, ``[p, N, ...]`` of each; with weights, times √|w_i|.
        assemble: puts a list of tensors into a nest like the one that ``fn`` returned.
        aux: ``(aux,)`` with has_aux, else ``()``.
    """

    group: Group
    steps: list[Tensor]
    jets: list[Jet]
    first: list[Tensor]
    assemble: Callable[[Sequence[Tensor]], Any]
    aux: tuple[object, ...]

    @property
    def primals(self) -> list[Tensor]:
        """Return the values, ``[N, ...]``."""
        return [jet.primal for jet in self.jets]

    @property
    def second(self) -> list[Tensor]:
        """Return D²f[u_i, u_i], ``[squares, N, ...]``, or their sum, ``[1, N, ...]``."""
        return [jet.second for jet in self.jets]


def square_roots(weights: Tensor) -> Tensor:
    """Return √|w|, and 1 for a weight of 0, whose direction is not scaled."""
    return torch.where(weights == 0, 1, weights.abs()).sqrt()


def split_nest(
    nest: object, other: Callable[[object], object] | None = None
) -> tuple[Callable[[Sequence[Tensor]], Any], list[Tensor]]:
    """Return a function that builds the same nest of other tensors, and the tensors of the nest.

    Args:
        other: as of `map_tensors`.
    """
    tensors: list[Tensor] = []

    def place_of(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return torch.empty(0)

    # Empty tensors stand in, so that `assemble` holds no memory of the tensors.
    places = map_tensors(nest, place_of, other)

    def assemble(parts: Sequence[Tensor]) -> Any:
        remaining = iter(parts)
        return map_tensors(places, lambda _: next(remaining))

    return assemble, tensors


class Rows:
    """A function of the rows of a batch, its argument x, and the directions.

    Attributes:
        fn: the function.
        points: the tensors of x, ``[N, ...]``.
        batch: N.
        count: q, the number of directions.
    """

    def __init__(
        self, fn: Function, x: object, directions: object, has_aux: bool, check: bool = True
    ) -> None:
        self.fn, self._has_aux = fn, has_aux
        steps = x if directions is None else directions
        points, step_leaves, self._structure = paired_leaves(x, "x", steps, "directions")
        self.points = [point for _, point in points]
        self._has_one_argument = isinstance(x, tuple) and len(x) == 1
        shapes = [list(point.shape) for point in self.points]
        if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(f"x has shape {shapes}; expected the same number of rows, [N, ...]")
        if any(point.is_complex() for point in self.points):
            raise TypeError(
                "x is complex, but coordinates are real numbers: pass torch.view_as_real(x), and "
                "have fn join the parts (torch.view_as_complex)"
            )
        self.batch = shapes[0][0]
        self._sizes = [point.shape[1:].numel() for point in self.points]
        self.count = sum(self._sizes)
        self._directions: list[Tensor] | None = None
        if directions is not None:
            pairs = zip(step_leaves, self.points, strict=True)
            self._directions = [expand_rows(step, point) for step, point in pairs]
            self.count = len(self._directions[0])
        readable = can_read_values()
        for number, (name, point) in enumerate(points):
            if readable:
                check_finite(point, name)
            if self._directions is not None:
                check_directions(self._directions[number], point, name, self._directions[0])
        is_checked = check and not library.capturing()
        self._check = is_checked and self.batch > 1 and self.count > 0

    def weights(self, weights: Sequence[float] | Tensor) -> Tensor:
        """Return the weights as a tensor ``[q]`` or ``[q, N]`` of x's dtype.

        Raises:
            ValueError: they have another shape, or are not finite.
        """
        like = self.points[0]
        factors = torch.as_tensor(weights, dtype=like.dtype, device=like.device)
        shapes = (self.count,), (self.count, self.batch)
        if factors.shape not in shapes or not unwrap(factors).isfinite().all():
            raise ValueError(
                f"weights have shape {list(factors.shape)}; expected [{self.count}], a finite "
                f"number for each direction, or [{self.count}, {self.batch}], for each in each row"
            )
        return factors

    def passes(
        self, groups: list[Group], size: int | None, second: Second, weights: Tensor | None = None
    ) -> Iterator[PassResult]:
        """Run ``fn`` once for each chunk of each group, with the same random numbers.

        Args:
            size: the largest number of directions of a chunk; None: all of a group.
            second: squares one by one, or added up.
            weights: ``[q]``; directions are multiplied by √|w|.

        Raises:
            ValueError: rows depend on each other (the last pass carries another direction for
                that).
            RuntimeError: the values of two passes differ.
        """
        if size is not None and size < 1:
            raise ValueError(f"chunk_size is {size}; expected 1 direction at least, or None")
        plan = [chunk for group in groups for chunk in group.chunks(size)]
        if len(plan) > 1 and library.capturing():
            raise ValueError(
                f"fn has to run {len(plan)} times with the same random numbers, whose state a CUDA "
                "graph cannot set back: leave out chunk_size, and weights of both signs"
            )
        key = call_key(self) if self._check else None
        history = None if key is None else find_history(self.fn)
        is_checked = self._check and (history is None or history.is_due(key))
        check = RowCheck(self) if is_checked else None
        roots = None if weights is None else square_roots(weights)
        # With one state of the generators, dropout draws the same mask in every pass.
        generators = check.generators if check else Generators() if len(plan) > 1 else None
        first: list[Tensor] = []  # the values of the first pass
        exporting = torch.compiler.is_exporting()

        def run(place: int) -> PassResult:
            group, is_last = plan[place], place == len(plan) - 1
            steps = self._steps(group.numbers)
            if roots is not None:
                steps = [step * append_dims(roots[group.numbers], step.ndim) for step in steps]
            mixture = check.direction() if check and is_last else None
            with refuse_irreproducible(self.fn) if exporting and len(plan) > 1 else nullcontext():
                return self._run(self.points, steps, group, second, mixture)

        def repeated(place: int, values: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
            for number, before in ((place, values), (0, first), (0, first)):
                assert generators is not None  # of several passes
                generators.restore()
                yield before, run(number).primals

        for place, group in enumerate(plan):
            if generators and place:
                generators.restore()
            derivatives = run(place)
            values = derivatives.primals
            if not place and len(plan) > 1:
                first = [value.detach().clone() for value in values]
            elif place and not exporting:
                require_same(self.fn, first, values, repeated(place, values), _DIFFERS)
            is_last = place == len(plan) - 1
            if check:
                check.add(derivatives.first, group.numbers, roots)
                if is_last:
                    check.compare([jet.first[-1].detach() for jet in derivatives.jets])
            if history is not None and is_last:
                history.count(key, derivatives.jets[0].streams)
            # A tensor in aux is a view of its stack, so aux of the last pass alone is kept.
            yield derivatives if is_last else derivatives._replace(aux=())

    def groups(self, weights: Tensor | None) -> list[Group]:
        """Return the directions in groups of one sign of their weights ``[q]``.

        Directions of weight 0 are the last of the first group, without squares.
        """
        if weights is None:
            return [self.all_directions(self.count)]
        signs = weights.detach().sign().tolist()
        plus, zero, minus = ([i for i, s in enumerate(signs) if s == sign] for sign in (1, 0, -1))
        curved = [(sign, numbers) for sign, numbers in ((1, plus), (-1, minus)) if numbers]
        (sign, numbers), *others = curved or [(1, [])]
        first = Group(sign, numbers + zero, len(numbers))
        return [first, *(Group(sign, numbers, len(numbers)) for sign, numbers in others)]

    def all_directions(self, squares: int) -> Group:
        """Return the group of all directions; the first ``squares`` have second derivatives."""
        return Group(1, list(range(self.count)), squares)

    def flatten_like_x(self, nest: object) -> list[Tensor]:
        """Return the tensors of an output in the order of x's.

        Raises:
            ValueError: the output is nested otherwise than x.
        """
        if self._has_one_argument and not isinstance(nest, tuple):
            nest = (nest,)
        try:
            tensors = self._structure.flatten_up_to(nest)
        except ValueError:
            tensors = []
        if not all(isinstance(tensor, Tensor) for tensor in tensors) or not tensors:
            raise ValueError(
                "fn must return tensors nested as those of x, in the same tuples, lists and dicts, "
                "since the divergence takes the derivative of each by its own"
            )
        return tensors

    def _steps(self, numbers: list[int]) -> list[Tensor]:
        """Return p of the directions, ``[p, N, ...]`` of each tensor of x."""
        # Consecutive indices, as without weights, are made on the device without a copy.
        device, start = self.points[0].device, numbers[0] if numbers else 0
        if numbers == [*range(start, start + len(numbers))]:
            index = torch.arange(start, start + len(numbers), device=device)
        else:
            index = torch.tensor(numbers, dtype=torch.long, device=device)
        if self._directions is not None:
            return [step[index] for step in self._directions]
        # Coordinates are numbered through all tensors of x; the step of a coordinate is 0 in other
        # tensors.  The steps of all rows are the same, and expanded without a copy.
        steps, start = [], 0
        for size, point in zip(self._sizes, self.points, strict=True):
            entries = torch.arange(start, start + size, device=index.device)
            unit = (index.unsqueeze(1) == entries).reshape(len(index), 1, *point.shape[1:])
            steps.append(unit.to(point.dtype).expand(-1, *point.shape))
            start += size
        return steps

    @without_dynamo
    def _run(
        self,
        points: list[Tensor],
        steps: list[Tensor],
        group: Group,
        second: Second,
        extra: list[Tensor] | None = None,
    ) -> PassResult:
        """Run ``fn`` on jets of one pass.

        Args:
            points: ``[N, ...]``, of the shapes of x.
            steps: the directions of the group, ``[p, N, ...]`` of each.
            second: squares one by one, or added up.
            extra: another direction without a square, ``[N, ...]`` of each.
        """
        # A jet has at least one direction: zeros stand in for none.
        is_plain = not len(steps[0])
        directions = [s.new_zeros(1, *s.shape[1:]) for s in steps] if is_plain else steps
        inputs = Inputs(points, directions, self._structure)
        count, order = inputs.count + (extra is not None), 2 if group.squares else 1
        layout = begin_pass(count, order, second, group.squares)
        aux: tuple[object, ...] = ()
        try:
            with jets_through_fsdp(), open_pass(layout.jet_pass):
                value = self.fn(*inputs.jets(layout, extra))
                if self._has_aux:
                    value, aux_nest = output_and_aux(value)
                    aux = (map_tensors(aux_nest, primal_of),)
                assemble, tensors = split_nest(value, refuse_non_tensor)
                jets = to_jets(tensors, layout)
        except MissingJetRule as error:
            if "transform of torch.func" not in str(error):
                raise
            raise MissingJetRule(
                f"{error} Of torch.vmap(f), write torch.vmap(lambda row: jx.laplacian(lambda x: "
                "f(x[0])[None], row[None]).laplacian[0])(x)."
            ) from error
        if not jets:
            raise TypeError(f"fn returned {value!r}, which holds no tensor; expected [N, ...]")
        for jet in jets:
            if not isinstance(jet, Jet) or jet.primal.shape[:1] != (self.batch,):
                got = list(jet.primal.shape) if isinstance(jet, Jet) else jet.dtype
                raise ValueError(
                    f"fn returned {got} for {self.batch} rows; expected floating-point "
                    "tensors [N, ...], with a result for each row"
                )
        if is_plain:
            jets = [Jet(jet.streams[:1], JetLayout(0, 1)) for jet in jets]
        first = [jet.first[: len(group.numbers)] for jet in jets]
        return PassResult(group, steps, jets, first, assemble, aux)

    def mixture(self, factors: Tensor) -> list[Tensor]:
        """Return Σ a_qn u_q, ``[N, ...]`` of each tensor of x, for factors ``[q, N]``."""
        if self._directions is not None:
            return [(append_dims(factors, u.ndim) * u.detach()).sum(0) for u in self._directions]
        # Along the coordinates Σ a_qn e_q is row n of the factors, cut into the tensors of x.
        parts = factors.T.split(self._sizes, 1)
        return [
            part.reshape(point.shape).to(point.dtype)
            for part, point in zip(parts, self.points, strict=True)
        ]

    def all_equal(self) -> bool:
        """Return whether all rows of x are equal."""
        last = any_true(point[-1] != point[0] for point in self.points)  # differs in most batches
        return not last and not any_true((point != point[:1]).flatten() for point in self.points)

    def are_mixed(self, generators: Generators, *, nearby: bool = False) -> bool:
        """Return whether a tangent of one row changes the result of another, for any two rows.

        Runs ``fn`` with tangents in half of the rows: those of the others have to be exactly 0.

        Args:
            generators: their state at the beginning of the call.
            nearby: at points near x, since rows that are equal may hide a dependence.
        """
        points = [point.detach() for point in self.points]
        mixture = self.mixture(random_factors(self.count, self.batch, points[0]))
        if nearby:
            pairs = zip(points, mixture, strict=True)
            points = [point + (1 + point.abs()) * part / 128 for point, part in pairs]
        with torch.no_grad(), restoring_state(self.fn):
            for masks in half_masks(self.batch, points[0].device).split(8):
                # masks [8, N]: in direction h the rows with masks[h] have a tangent, others 0
                generators.restore()
                steps = [append_dims(masks, 1 + part.ndim) * part for part in mixture]
                group = Group(1, list(range(len(masks))), squares=0)
                for jet in self._run(points, steps, group, "sum").jets:
                    outside = torch.where(append_dims(masks, jet.first.ndim), 0, jet.first)
                    if any_true([outside.abs() > 0]):
                        return True
        return False


@constant_when_compiled
def rows_mix(fn: Function, x: Tensor) -> bool:
    """Return whether rows of ``fn`` depend on each other at ``x``."""
    rows = Rows(fn, x.detach(), None, False)
    if rows.batch < 2 or not rows.count:
        return False
    generators = Generators()
    return rows.are_mixed(generators) or (
        rows.all_equal() and rows.are_mixed(generators, nearby=True)
    )


def expand_rows(step: object, point: Tensor) -> Tensor:
    """Return directions ``[q, N, ...]``; ``[q, ...]`` is expanded to the same in each row."""
    if not isinstance(step, Tensor):
        raise TypeError(f"directions must be a tensor [q, N, ...], not {type(step).__name__}")
    if step.ndim == point.ndim and step.shape[1:] == point.shape[1:]:
        return step.unsqueeze(1).expand(-1, *point.shape)
    return step
