"""Passes of a function of rows along groups of directions, with the check that rows do not mix.

`Rows` holds the function, the point x of expansion, and the directions.  `Rows.passes` runs the
function once for each `Group` of directions and yields the `PassResult` of that pass.
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
from .check import (
    Generators,
    RowCheck,
    any_true,
    append_dims,
    as_index,
    call_key,
    find_history,
    half_masks,
    preserve_state,
    random_factors,
)
from .sameness import CAUSES, refuse_irreproducible, require_same

_MESSAGE = (
    "fn runs once for each chunk and sign of weights, and is not the same function each time: "
    f"{CAUSES}. Call eval(), leave out chunk_size, or give weights of one sign"
)


class Group(NamedTuple):
    """The directions of one pass.

    A pass adds up squares without weights.  A direction of weight w is therefore multiplied by
    √|w|, and all weights of a group have the same sign:
    Σ w_i D²f[u_i, u_i] = Σ_groups sign Σ_i D²f[√|w_i| u_i, √|w_i| u_i].

    Attributes:
        sign: 1 or -1, the factor of the group's sum of squares.
        numbers: indices of the directions among the q directions of the call.
        num_squares: the number of directions in ``numbers``, counted from the first, whose
            D²f[u_i, u_i] is computed.
    """

    sign: int
    numbers: list[int]
    num_squares: int

    def chunks(self, chunk_size: int | None) -> Iterator[Group]:
        """Yield this group in chunks of at most ``chunk_size`` directions (None: in one); an empty
        group unchanged."""
        count = max(1, len(self.numbers))
        for start in range(0, count, chunk_size or count):
            numbers = self.numbers[start : start + (chunk_size or count)]
            yield Group(self.sign, numbers, max(0, min(self.num_squares - start, len(numbers))))


class PassResult(NamedTuple):
    """The results of a pass along p directions.

    Attributes:
        group: the indices of the directions.
        steps: the directions, ``[p, N, ...]`` for each tensor of x.
        jets: one for each tensor that ``fn`` returns.
        first: J u_i, ``[p, N, ...]`` for each of these tensors; with weights, times √|w_i|.
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
        """Return the value of each tensor that ``fn`` returns, ``[N, ...]``."""
        return [jet.primal for jet in self.jets]

    @property
    def second(self) -> list[Tensor]:
        """Return D²f[u_i, u_i], ``[num_squares, N, ...]`` each, or their sums, ``[1, N, ...]``."""
        return [jet.second for jet in self.jets]


def split_nest(
    nest: object, replace_other: Callable[[object], object] | None = None
) -> tuple[Callable[[Sequence[Tensor]], Any], list[Tensor]]:
    """Return a function that builds a nest of the same structure from a list of tensors, and the
    list of tensors of the nest.

    Args:
        replace_other: replaces leaves that are no tensors, as for `map_tensors`.
    """
    tensors: list[Tensor] = []

    def extract(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return torch.empty(0)

    # The template holds empty tensors, so that `assemble` keeps none of the tensors in memory.
    template = map_tensors(nest, extract, replace_other)

    def assemble(leaves: Sequence[Tensor]) -> Any:
        remaining = iter(leaves)
        return map_tensors(template, lambda _: next(remaining))

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
        can_read = can_read_values()
        for number, (name, point) in enumerate(points):
            if can_read:
                check_finite(point, name)
            if self._directions is not None:
                check_directions(self._directions[number], point, name, self._directions[0])
        is_checked = check and not library.capturing()
        self._check = is_checked and self.batch > 1 and self.count > 0

    def passes(
        self, groups: list[Group], size: int | None, second: Second, roots: Tensor | None = None
    ) -> Iterator[PassResult]:
        """Run ``fn`` once for each chunk of each group, with the same random numbers.

        The last pass has one more direction, for the check that rows do not mix.

        Args:
            size: the largest number of directions of a chunk; None: each group is one chunk.
            second: "squares" for each D²f[u_i, u_i], or "sum" for their sum.
            roots: ``[q]``, √|w|, by which directions are multiplied; None: they are not.

        Raises:
            ValueError: rows depend on each other; or ``size`` is less than 1.
            RuntimeError: the values of two passes differ.
        """
        if size is not None and size < 1:
            raise ValueError(f"chunk_size is {size}; expected 1 direction at least, or None")
        chunks = [chunk for group in groups for chunk in group.chunks(size)]
        if len(chunks) > 1 and library.capturing():
            raise ValueError(
                f"fn has to run {len(chunks)} times with the same random numbers, whose state a "
                "CUDA graph cannot set back: leave out chunk_size"
            )
        key = call_key(self) if self._check else None
        history = None if key is None else find_history(self.fn)
        is_checked = self._check and (history is None or history.is_due(key))
        check = RowCheck(self) if is_checked else None
        # With one state of the generators, dropout draws the same mask in every pass.
        generators = check.generators if check else Generators() if len(chunks) > 1 else None
        first_values: list[Tensor] = []  # the values of the first pass
        is_traced = torch.compiler.is_exporting()

        def run(index: int) -> PassResult:
            group, is_last = chunks[index], index == len(chunks) - 1
            steps = self._steps(group.numbers)
            if roots is not None:
                steps = [step * append_dims(roots[group.numbers], step.ndim) for step in steps]
            mixture = check.direction() if check and is_last else None
            with refuse_irreproducible(self.fn) if is_traced and len(chunks) > 1 else nullcontext():
                return self._run_pass(self.points, steps, group, second, mixture)

        def repeat_runs(index: int, values: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
            for i, former in ((index, values), (0, first_values), (0, first_values)):
                assert generators is not None  # as there are several passes
                generators.restore()
                yield former, run(i).primals

        for index, group in enumerate(chunks):
            if generators and index:
                generators.restore()
            result = run(index)
            values = result.primals
            if not index and len(chunks) > 1:
                first_values = [value.detach().clone() for value in values]
            elif index and not is_traced:
                require_same(self.fn, first_values, values, repeat_runs(index, values), _MESSAGE)
            is_last = index == len(chunks) - 1
            if check:
                check.add(result.first, group.numbers, roots)
                if is_last:
                    check.compare([jet.first[-1].detach() for jet in result.jets])
            if history is not None and is_last:
                history.count(key, result.jets[0].streams)
            # A tensor in aux is a view that keeps its stack in memory: keep only that of the last
            # pass.
            yield result if is_last else result._replace(aux=())

    def all_directions(self, num_squares: int) -> Group:
        """Return the group of all directions; the first ``num_squares`` have second derivatives."""
        return Group(1, list(range(self.count)), num_squares)

    def flatten_like_x(self, nest: object) -> list[Tensor]:
        """Return the tensors of an output of ``fn`` as a list, in the order of the tensors of x.

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
        """Return the p directions with these indices, ``[p, N, ...]`` for each tensor of x."""
        index = as_index(numbers, self.points[0].device)
        if self._directions is not None:
            return [step[index] for step in self._directions]
        # The coordinates of all tensors of x are numbered consecutively; the step of a coordinate
        # is 0 in the other tensors.  All rows have the same steps, expanded without a copy.
        steps, start = [], 0
        for num_entries, point in zip(self._sizes, self.points, strict=True):
            entries = torch.arange(start, start + num_entries, device=index.device)
            unit = (index.unsqueeze(1) == entries).reshape(len(index), 1, *point.shape[1:])
            steps.append(unit.to(point.dtype).expand(-1, *point.shape))
            start += num_entries
        return steps

    @without_dynamo
    def _run_pass(
        self,
        points: list[Tensor],
        steps: list[Tensor],
        group: Group,
        second: Second,
        extra_direction: list[Tensor] | None = None,
    ) -> PassResult:
        """Run ``fn`` on jets of one pass.

        Args:
            points: tensors ``[N, ...]`` of the shapes of x.
            steps: the directions of the group, ``[p, N, ...]`` for each tensor of x.
            second: "squares" for each D²f[u_i, u_i], or "sum" for their sum.
            extra_direction: one more direction, ``[N, ...]`` for each tensor of x, for which only
                the first derivative is computed.
        """
        # A jet has at least one direction: an empty group takes one of zeros.
        is_empty = not len(steps[0])
        directions = [s.new_zeros(1, *s.shape[1:]) for s in steps] if is_empty else steps
        inputs = Inputs(points, directions, self._structure)
        count, order = inputs.count + (extra_direction is not None), 2 if group.num_squares else 1
        layout = begin_pass(count, order, second, group.num_squares)
        aux: tuple[object, ...] = ()
        try:
            with jets_through_fsdp(), open_pass(layout.jet_pass):
                value = self.fn(*inputs.jets(layout, extra_direction))
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
                output = list(jet.primal.shape) if isinstance(jet, Jet) else jet.dtype
                raise ValueError(
                    f"fn returned {output} for {self.batch} rows; expected floating-point "
                    "tensors [N, ...], with a result for each row"
                )
        if is_empty:
            jets = [Jet(jet.streams[:1], JetLayout(0, 1)) for jet in jets]
        first = [jet.first[: len(group.numbers)] for jet in jets]
        return PassResult(group, steps, jets, first, assemble, aux)

    def mixture(self, factors: Tensor) -> list[Tensor]:
        """Return the direction Σ_i a_in u_i, ``[N, ...]`` for each tensor of x, for factors a
        ``[q, N]``."""
        if self._directions is not None:
            return [(append_dims(factors, u.ndim) * u.detach()).sum(0) for u in self._directions]
        # For the coordinates, row n of Σ_i a_in e_i is column n of the factors, split among the
        # tensors of x.
        columns = factors.T.split(self._sizes, 1)
        return [
            column.reshape(point.shape).to(point.dtype)
            for column, point in zip(columns, self.points, strict=True)
        ]

    def all_equal(self) -> bool:
        """Return whether all rows of x are equal."""
        # Compare the last row first: it differs in most batches.
        differs = any_true(point[-1] != point[0] for point in self.points)
        return not differs and not any_true((point != point[:1]).flatten() for point in self.points)

    def are_mixed(self, generators: Generators, *, uses_nearby_points: bool = False) -> bool:
        """Return whether the derivative of any row's result by another row is not 0.

        ``fn`` runs with tangents in half of the rows: if rows are independent, the tangents of the
        results are exactly 0 in the other half.

        Args:
            generators: the state of the random generators at the beginning of the call.
            uses_nearby_points: whether to run at points near x, since equal rows may hide a
                dependence.
        """
        points = [point.detach() for point in self.points]
        mixture = self.mixture(random_factors(self.count, self.batch, points[0]))
        if uses_nearby_points:
            pairs = zip(points, mixture, strict=True)
            points = [point + (1 + point.abs()) * step / 128 for point, step in pairs]
        with torch.no_grad(), preserve_state(self.fn):
            for masks in half_masks(self.batch, points[0].device).split(8):
                # masks [8, N]: direction h is 0 in rows where masks[h] is false
                generators.restore()
                steps = [append_dims(masks, 1 + step.ndim) * step for step in mixture]
                group = Group(1, list(range(len(masks))), num_squares=0)
                for jet in self._run_pass(points, steps, group, "sum").jets:
                    leaked_tangents = torch.where(append_dims(masks, jet.first.ndim), 0, jet.first)
                    if any_true([leaked_tangents.abs() > 0]):
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
        rows.all_equal() and rows.are_mixed(generators, uses_nearby_points=True)
    )


def expand_rows(step: object, point: Tensor) -> Tensor:
    """Return directions as ``[q, N, ...]``; directions ``[q, ...]`` are expanded over the rows.

    Args:
        point: the tensor of x ``[N, ...]`` that the directions are for.
    """
    if not isinstance(step, Tensor):
        raise TypeError(f"directions must be a tensor [q, N, ...], not {type(step).__name__}")
    if step.ndim == point.ndim and step.shape[1:] == point.shape[1:]:
        return step.unsqueeze(1).expand(-1, *point.shape)
    return step
