"""Passes of a function of rows along groups of its directions, with the check that rows do not mix.

`Rows` is the function, where it is expanded, and the directions.  `Rows.passes` runs it once for
each `Group` of directions and yields the `Derivatives` of that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.library import constant_when_compiled, transformed
from ._types import Function
from .context import without_dynamo
from .eager import (
    Inputs,
    Jet,
    begin_pass,
    check_directions,
    check_finite,
    output_and_aux,
    paired_leaves,
    to_jets,
    without_tangent,
)
from .fsdp import jets_through_fsdp
from .layout import JetLayout, Second, map_tensors
from .passes import open_run
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


class Group(NamedTuple):
    """Directions that go through one pass.

    A pass can only add squares up, so a direction of weight w goes in times √|w|, and the sign of w
    is that of its group: Σ w_i D²f[u_i, u_i] = Σ_groups sign Σ_i D²f[√|w_i| u_i, √|w_i| u_i].

    Attributes:
        sign: 1 or -1, the factor of the group's sum of squares.
        numbers: which directions.
        squares: how many of these, from the first, have D²f[u_i, u_i].
    """

    sign: int
    numbers: list[int]
    squares: int

    def chunks(self, size: int | None) -> Iterator[Group]:
        """Yield groups of ``size`` directions at most; a group without directions as it is."""
        count = max(1, len(self.numbers))
        for start in range(0, count, size or count):
            numbers = self.numbers[start : start + (size or count)]
            yield Group(self.sign, numbers, max(0, min(self.squares - start, len(numbers))))


def groups_by_sign(weights: Tensor) -> list[Group]:
    """Return the directions of these weights ``[q]`` in groups of one sign.

    Those of weight 0 stand at the end of the first group, without squares.
    """
    signs = weights.detach().sign().tolist()
    plus, zero, minus = ([i for i, s in enumerate(signs) if s == sign] for sign in (1, 0, -1))
    curved = [(sign, numbers) for sign, numbers in ((1, plus), (-1, minus)) if numbers]
    (sign, numbers), *others = curved or [(1, [])]
    first = Group(sign, numbers + zero, len(numbers))
    return [first, *(Group(sign, numbers, len(numbers)) for sign, numbers in others)]


class Output(NamedTuple):
    """What ``fn`` returned in one pass.

    Attributes:
        jets: of each tensor in it.
        assemble: puts as many tensors into a nest like the output.
        aux: ``(aux,)`` with has_aux, else ``()``.
    """

    jets: list[Jet]
    assemble: Callable[[Sequence[Tensor]], Any]
    aux: tuple[object, ...]


class Derivatives(NamedTuple):
    """The derivatives that a pass computes along p directions.

    Attributes:
        group: which directions.
        steps: the directions, ``[p, N, ...]`` of each tensor of x.
        primals: the values, ``[N, ...]`` of each tensor that ``fn`` returns.
        first: J u_i, ``[p, N, ...]`` of each.
        second: D²f[u_i, u_i], ``[squares, N, ...]`` of each; or their sum, ``[1, N, ...]``.
        assemble, aux: as of `Output`.
    """

    group: Group
    steps: list[Tensor]
    primals: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    assemble: Callable[[Sequence[Tensor]], Any]
    aux: tuple[object, ...]


def take_apart(
    nest: object, other: Callable[[object], object] | None = None
) -> tuple[Callable[[Sequence[Tensor]], Any], list[Tensor]]:
    """Return what puts other tensors into the places of a nest's own, and its own tensors.

    Args:
        other: as of `map_tensors`.
    """
    tensors: list[Tensor] = []

    def place_of(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return torch.empty(0)

    places = map_tensors(nest, place_of, other)

    def assemble(parts: Sequence[Tensor]) -> Any:
        remaining = iter(parts)
        return map_tensors(places, lambda _: next(remaining))

    return assemble, tensors


class Rows:
    """A function of the rows of a batch, where it is expanded, and the directions.

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
            self._directions = [of_each_row(step, point) for step, point in pairs]
            self.count = len(self._directions[0])
        readable = not (transformed() or torch.compiler.is_exporting())
        for number, (name, point) in enumerate(points):
            if readable:
                check_finite(point, name)
            if self._directions is not None:
                check_directions(self._directions[number], point, name, self._directions[0])
        self._check = check and self.batch > 1 and self.count > 0

    def weights(self, weights: Sequence[float] | Tensor) -> Tensor:
        """Return the weights as a tensor ``[q]`` or ``[q, N]`` of x's dtype.

        Raises:
            ValueError: they are not so many finite numbers.
        """
        like = self.points[0]
        factors = torch.as_tensor(weights, dtype=like.dtype, device=like.device)
        shapes = (self.count,), (self.count, self.batch)
        if factors.shape not in shapes or not unwrapped(factors).isfinite().all():
            raise ValueError(
                f"weights have shape {list(factors.shape)}; expected [{self.count}], a finite "
                f"number for each direction, or [{self.count}, {self.batch}], for each in each row"
            )
        return factors

    def passes(
        self,
        groups: list[Group],
        chunk_size: int | None,
        second: Second,
        weights: Tensor | None = None,
    ) -> Iterator[Derivatives]:
        """Run ``fn`` once for each chunk of a group, each time with the same random numbers.

        Args:
            weights: of squares: a direction goes in times √|w|.

        Raises:
            ValueError: rows depend on each other; the last pass has a direction more to see that.
        """
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; expected 1 direction at least, or None")
        plan = [chunk for group in groups for chunk in group.chunks(chunk_size)]
        check = RowCheck.of(self) if self._check else None
        generators = Generators() if check or len(plan) > 1 else None
        for place, group in enumerate(plan):
            if generators and place:
                generators.restore()
            is_last = place == len(plan) - 1
            roots = None if weights is None else roots_of(weights)[group.numbers]
            steps = self._steps(group.numbers)
            if roots is not None:
                steps = [step * roots.reshape(-1, *(1,) * (step.ndim - 1)) for step in steps]
            mixture = check.direction() if check and is_last else None
            output = self._run(self.points, steps, second, group.squares, mixture)
            first = [jet.first[: len(group.numbers)] for jet in output.jets]
            if check:
                check.add(first, group.numbers, roots)
            if check and is_last and generators:
                check.compare([jet.first[-1].detach() for jet in output.jets], generators)
            primals = [jet.primal for jet in output.jets]
            curved = [jet.second for jet in output.jets]
            # A tensor in aux is a view of all its streams, so those of one pass alone are kept.
            aux = output.aux if is_last else ()
            yield Derivatives(group, steps, primals, first, curved, output.assemble, aux)

    def all_squared(self) -> Group:
        """Return all directions, each with its square."""
        return Group(1, list(range(self.count)), self.count)

    def like_x(self, nest: object) -> list[Tensor]:
        """Return the tensors of an output in the order of x's.

        Raises:
            ValueError: they are not nested as x is.
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
        index = torch.tensor(numbers, dtype=torch.long, device=self.points[0].device)
        if self._directions is not None:
            return [step[index] for step in self._directions]
        # Coordinates are numbered through all tensors of x: one of another tensor has a step of 0
        # in this one.  The steps are the same in each row, so they are expanded, not copied.
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
        second: Second,
        squares: int,
        extra: list[Tensor] | None = None,
    ) -> Output:
        """Run ``fn`` on jets of one pass.

        Args:
            points: ``[N, ...]``, of the shapes of x.
            steps: ``[p, N, ...]`` of each.
            second, squares: which squares are carried, of how many of the directions.
            extra: a direction more without a square, ``[N, ...]`` of each.
        """
        # A jet has one direction at least: without any, zeros stand in.
        is_plain = not len(steps[0])
        if is_plain:
            steps = [step.new_zeros(1, *step.shape[1:]) for step in steps]
        inputs = Inputs(points, steps, self._structure)
        count = inputs.count + (extra is not None)
        layout = begin_pass(count, 2 if squares else 1, second, squares)
        aux: tuple[object, ...] = ()
        try:
            with jets_through_fsdp(), open_run(layout.run):
                value = self.fn(*inputs.jets(layout, extra))
                if self._has_aux:
                    value, beside = output_and_aux(value)
                    aux = (map_tensors(beside, primal_of),)
                assemble, tensors = take_apart(value, without_tangent)
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
            if not isinstance(jet, Jet) or jet.primal.shape[:1] != steps[0].shape[1:2]:
                got = list(jet.primal.shape) if isinstance(jet, Jet) else jet.dtype
                raise ValueError(
                    f"fn returned {got} for {steps[0].shape[1]} rows; expected floating-point "
                    "tensors [N, ...], with a result for each row"
                )
        if is_plain:
            jets = [Jet(jet.streams[:1], JetLayout(0, 1)) for jet in jets]
        return Output(jets, assemble, aux)

    def mixture(self, factors: Tensor) -> list[Tensor]:
        """Return Σ a_qn u_q, ``[N, ...]`` of each tensor of x, for factors ``[q, N]``."""
        if self._directions is not None:
            shaped = [
                factors.reshape(*factors.shape, *(1,) * (u.ndim - 2)) for u in self._directions
            ]
            return [(a * u.detach()).sum(0) for a, u in zip(shaped, self._directions, strict=True)]
        parts = factors.T.split(self._sizes, 1)
        return [
            part.reshape(point.shape).to(point.dtype)
            for part, point in zip(parts, self.points, strict=True)
        ]

    def alike(self) -> bool:
        """Return whether all rows are the same."""
        last = any_true(point[-1] != point[0] for point in self.points)  # of most batches: quick
        return not last and not any_true((point != point[:1]).flatten() for point in self.points)

    def depend(self, generators: Generators, *, nearby: bool = False) -> bool:
        """Return whether tangents of some rows reach rows where they are zero; whatever two rows
        these are, and to the bit.

        Args:
            generators: as they were when the call began.
            nearby: at other points, since what is the same in all rows may hide it.
        """
        points = [point.detach() for point in self.points]
        mixture = self.mixture(mixed_factors(self.count, self.batch, points[0]))
        if nearby:
            pairs = zip(points, mixture, strict=True)
            points = [point + (1 + point.abs()) * part / 128 for point, part in pairs]
        with torch.no_grad(), _unchanged(self.fn):
            for moved in halves(self.batch, points[0].device).split(8):
                # moved [8, N]: in direction h the rows with moved[h] have a tangent, others have 0
                generators.restore()
                masks = [moved.reshape(*moved.shape, *(1,) * (part.ndim - 1)) for part in mixture]
                steps = [mask * part for mask, part in zip(masks, mixture, strict=True)]
                for jet in self._run(points, steps, "sum", 0).jets:
                    inside = moved.reshape(*moved.shape, *(1,) * (jet.first.ndim - 2))
                    if any_true([torch.where(inside, 0, jet.first).abs() > 0]):
                        return True
        return False


@constant_when_compiled
def rows_depend(fn: Function, x: Tensor) -> bool:
    """Return whether rows of ``fn`` depend on each other at ``x``."""
    rows = Rows(fn, x.detach(), None, False)
    if rows.batch < 2 or not rows.count:
        return False
    generators = Generators()
    return rows.depend(generators) or (rows.alike() and rows.depend(generators, nearby=True))


class Generators:
    """The states of torch's generators: of the CPU, and of the GPUs in use."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def _unchanged(fn: Function) -> Iterator[None]:
    """Set torch's generators, and a module's buffers, as they were."""
    generators = Generators()
    buffers = list(fn.buffers()) if isinstance(fn, nn.Module) else []
    copies = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        generators.restore()
        for buffer, copy in zip(buffers, copies, strict=True):
            buffer.copy_(copy)


class RowCheck:
    """The question of a call whether rows depend on each other."""

    def __init__(self, rows: Rows, state: tuple[object, ...] | None) -> None:
        self._rows, self._state = rows, state
        factors = mixed_factors(rows.count, rows.batch, rows.points[0], zero=True)
        self._comparison = Comparison(factors)

    @classmethod
    def of(cls, rows: Rows) -> RowCheck | None:
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

    def compare(self, tangents: list[Tensor], generators: Generators) -> None:
        """Raise ValueError where rows depend on each other; else count the call.

        While torch.export traces nothing is read: the exported program raises RuntimeError.
        """
        if torch.compiler.is_exporting():
            return self._comparison.assert_apart(tangents)
        is_mixed = False
        if not self._comparison.agrees(tangents):
            # Rounding, or a mixture: `depend` tells, by more runs of fn.  What rounding alone came
            # to is remembered, so that a function that rounds as much again is not run again.
            error, history = self._comparison.error(tangents), history_of(self._rows.fn)
            if error > history.roundings:
                is_mixed = error == torch.inf or self._rows.depend(generators)
                history.roundings = 4 * error
        if not is_mixed and self._rows.alike():
            with suppress(Exception):  # of a function that is not defined there
                is_mixed = self._rows.depend(generators, nearby=True)
        if is_mixed:
            history_of(self._rows.fn).forget()
            raise ValueError(MIXED)
        if self._state is not None:
            history_of(self._rows.fn).count(self._state)


def roots_of(weights: Tensor) -> Tensor:
    """Return √|w|, and 1 for a weight of 0."""
    return torch.where(weights == 0, 1, weights.abs()).sqrt()


def of_each_row(step: object, point: Tensor) -> Tensor:
    """Return directions that are the same in each row, ``[q, ...]``, as ``[q, N, ...]``."""
    if not isinstance(step, Tensor):
        raise TypeError(f"directions must be a tensor [q, N, ...], not {type(step).__name__}")
    if step.ndim == point.ndim and step.shape[1:] == point.shape[1:]:
        return step.unsqueeze(1).expand(-1, *point.shape)
    return step
