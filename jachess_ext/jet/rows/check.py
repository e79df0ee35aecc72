"""The check that rows of a function do not depend on each other, and which calls are checked.

A Laplacian by rows runs all N rows at once.  Of a function that mixes them, such as one with batch
norm in training mode, it would add derivatives by other rows without an error.  The check:

1. Its pass carries one direction more, v_n = Σ_i a_ni u_ni with other numbers a_ni in each row n,
   and a_ni = 0 in one row.  Where rows are apart, J v is Σ_i a_ni J u_i, but for rounding, and
   exactly 0 in the row of zeros, since products and sums of zeros are (`RowCheck`).
2. Rounding has no bound that holds for every function (its own terms may cancel).  What is off is
   therefore run again along directions that are 0 in half of the rows.  A tangent there is exactly
   0, or comes from other rows (`Rows.are_mixed`).

Along few directions a stream more is dear in a training loop, which calls the same function again
and again: not every step is checked there (`History`).
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import torch_private
from ...ops.library import transformed
from ..engine.types import Function
from ..rules.forward_mode import unwrap

MIXED = (
    "results of fn depend on other rows of x than their own (a mean over the batch, batch norm in "
    "training mode?); expected each row by itself"
)


# ---- the direction that is carried ---------------------------------------------------------------

_calls = itertools.count()


def random_factors(count: int, rows: int, like: Tensor, *, zero: bool = False) -> Tensor:
    """Return ``[count, rows]``: numbers that nothing relates, others at each call.

    Torch's generators are left alone; under `torch.func.vmap` they would ask how to draw.

    Args:
        zero: whether those of one row are 0; of another row at each call.
    """
    count, rows = int(count), int(rows)  # while torch.export traces they may be symbols
    make = _factor_table if count * rows < 2**16 else _factor_table.__wrapped__
    first = next(_calls) % rows
    table = torch.from_numpy(make(count, rows, like.dtype == torch.float64, zero))
    # Another window of the table at each call, so that a mixture of rows that cancels with some
    # numbers, or spares the row of zeros, is seen in the next.
    return table[:, first : first + rows].to(like.device, like.dtype)


@functools.lru_cache(16)
def _factor_table(count: int, rows: int, double: bool, zero: bool) -> np.ndarray:
    """Return ``[count, 2 rows - 1]``, of which any ``rows`` columns are such factors."""
    generator = np.random.default_rng(0)
    table = generator.standard_normal((count, 2 * rows - 1), np.float64 if double else np.float32)
    if zero:
        table[:, rows - 1] = 0
    return table


def append_dims(factors: Tensor, ndim: int) -> Tensor:
    """Return factors with dimensions of size 1 behind theirs, to multiply a tensor of ``ndim``."""
    return factors.reshape(*factors.shape, *(1,) * (ndim - factors.ndim))


def half_masks(rows: int, device: torch.device) -> Tensor:
    """Return ``[h, rows]``, each true in half of the rows: for any two, one of the first alone."""
    # Two rows differ in some bit of their numbers: the half of those with that bit, or the half
    # without it, holds the first and not the second.
    numbers = torch.arange(rows, device=device)
    bits = torch.stack([numbers >> bit & 1 for bit in range((rows - 1).bit_length())]).bool()
    return torch.stack([bits, ~bits], 1).flatten(0, 1)


def any_true(tensors: Iterable[Tensor]) -> bool:
    """Return whether an entry is true: of all functions that torch.func.vmap calls at once."""
    return any(bool(unwrap(tensor).any()) for tensor in tensors)


# ---- which calls are checked -------------------------------------------------------------------

_ALWAYS_CHECKED = 16
"""Along as many directions every call is checked: a stream more is less than a sixteenth."""
_CHECK_INTERVAL = 64
_MAX_KEYS = 16
ROUNDINGS = 16.0
"""How far tangents are off at most before it is looked into; of networks, up to 6."""


class History:
    """What is remembered of a function.

    Attributes:
        steps: how many calls there were, by `call_key`.
        trained: of which of them the last call's result went through a backward.
        roundings: how far tangents of independent rows were off.
        roundings_of_runs: how far several runs of the function in a call were.
    """

    def __init__(self) -> None:
        self.steps: dict[object, int] = {}
        self.trained: set[object] = set()
        self.roundings = self.roundings_of_runs = ROUNDINGS

    def forget(self) -> None:
        """Begin anew, so that the next call is checked."""
        self.steps.clear()
        self.roundings = ROUNDINGS

    def is_due(self, key: object) -> bool:
        """Return whether a call is checked: of a training loop the first, second, fourth, and each
        64th; of others each."""
        number = self.steps.get(key, 0) + 1
        is_power_of_two = not number & (number - 1)
        return key not in self.trained or is_power_of_two or number % _CHECK_INTERVAL == 0

    def count(self, key: object, result: Tensor) -> None:
        """Count a call, and watch whether its result goes through a backward."""
        with _LOCK:
            number = self.steps.pop(key, 0) + 1
            if len(self.steps) >= _MAX_KEYS:
                del self.steps[next(iter(self.steps))]
            self.steps[key] = number
            self.trained &= self.steps.keys() - {key}
        if result.requires_grad and not transformed():
            result.register_hook(lambda gradient: self.trained.add(key))


_HISTORIES: weakref.WeakKeyDictionary[object, History] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def find_history(fn: object) -> History:
    """Return the history of a function; of one defined in a loop, that of its code.

    A new one for what can be no key of a dictionary.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    with suppress(TypeError), _LOCK:
        return _HISTORIES.setdefault(getattr(fn, "__code__", fn), History())
    return History()


def call_key(rows: Any) -> object | None:
    """Return what calls have in common of which not each is checked; None for one that is."""
    if (
        rows.count >= _ALWAYS_CHECKED
        or not torch.is_grad_enabled()
        or torch.compiler.is_exporting()
    ):
        return None
    shapes = tuple((point.shape, point.dtype, point.device) for point in rows.points)
    # A list, which is no key, may hold something else than before.
    with suppress(TypeError, ValueError, RecursionError):
        key = rows.count, shapes, _references(rows.fn)
        hash(key)
        return key
    return None


# A training loop makes its function anew at each step, over the same network and other tensors.

_TOKENS: weakref.WeakKeyDictionary[object, object] = weakref.WeakKeyDictionary()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _references(value: object) -> object:
    """Return what tells a function from others of the same code: the objects, modes and numbers
    that it closes over, not what these hold; equal for tensors, which change with every batch."""
    if isinstance(value, functools.partial):
        return _references(value.func), _references((*value.args, *value.keywords.values()))
    if isinstance(value, types.MethodType):
        return _references(value.__func__), _references(value.__self__)
    if isinstance(value, types.FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        return value.__code__, _references((*cells, *(value.__defaults__ or ())))
    if isinstance(value, tuple):
        return tuple(map(_references, value))
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return Tensor
    with _LOCK:  # an id would be another object's, once this one is gone
        return _TOKENS.setdefault(value, object()), getattr(value, "training", None)


# ---- the check of a call -----------------------------------------------------------------------


class Generators:
    """The states of torch's generators: of the CPU, and of the GPUs in use."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def have_advanced(self) -> bool:
        """Return whether something was drawn since."""
        now = Generators()
        pairs = zip((self._cpu, *self._cuda), (now._cpu, *now._cuda), strict=False)
        return any(not torch.equal(before, after) for before, after in pairs)


@contextmanager
def restoring_state(fn: Function) -> Iterator[None]:
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
    """The check of one call: its tangents along the mixture Σ_i a_ni u_i of its q directions,
    against the mixture of its tangents along each.

    Args:
        rows: the function and its directions.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.generators = Generators()  # as they are when the call begins
        factors = random_factors(rows.count, rows.batch, rows.points[0], zero=True)
        if torch.compiler.is_exporting():  # without rounding to look into: 0 in half of the rows
            factors = factors * (factors[:1] > factors[:1].median())
        self._factors = factors  # [q, N]
        # Of each result Σ a_ni J u_i, and Σ |a_ni J u_i|, by which rounding is measured: [N, ...].
        self._sums: list[Tensor] = []
        self._sizes: list[Tensor] = []

    def direction(self) -> list[Tensor]:
        """Return the direction that the last pass has beside its own, ``[N, ...]`` of each
        tensor of x."""
        return self._rows.mixture(self._factors)

    def add(self, first: list[Tensor], numbers: list[int], roots: Tensor | None) -> None:
        """Add the tangents of every result, ``[p, N, ...]``, along directions times their roots."""
        if roots is not None:
            factors = self._factors[numbers] / roots[numbers].unsqueeze(1)
        else:  # numbers in a row, unlike those of groups by sign: a slice is no copy
            factors = self._factors[numbers[0] : numbers[-1] + 1]
        sums, sizes = [], []
        for tangents in first:
            tangents = tangents.detach()
            tangents = tangents.float() if tangents.dtype.itemsize < 4 else tangents
            parts = append_dims(factors, tangents.ndim) * tangents
            sums.append(parts.sum(0))
            sizes.append(parts.abs().sum(0))
        if self._sums:
            sums = [a + b for a, b in zip(self._sums, sums, strict=True)]
            sizes = [a + b for a, b in zip(self._sizes, sizes, strict=True)]
        self._sums, self._sizes = sums, sizes

    def compare(self, tangents: list[Tensor]) -> None:
        """Raise ValueError where rows depend on each other.

        While torch.export traces nothing is read: the exported program raises RuntimeError.
        """
        if torch.compiler.is_exporting():
            return self._assert_independent(tangents)
        is_mixed = False
        if not self._is_close(tangents):
            # Rounding, or a mixture: `Rows.are_mixed` tells, by more runs of fn.  What rounding
            # alone came to is remembered, so that a function that rounds as much again is not run
            # again.
            error, history = self._largest_error(tangents), find_history(self._rows.fn)
            if error > history.roundings:
                is_mixed = error == torch.inf or self._rows.are_mixed(self.generators)
                history.roundings = 4 * error
        if not is_mixed and self._rows.all_equal():
            with suppress(Exception):  # of a function that is not defined there
                is_mixed = self._rows.are_mixed(self.generators, nearby=True)
        if is_mixed:
            find_history(self._rows.fn).forget()
            raise ValueError(MIXED)

    def _is_close(self, tangents: list[Tensor]) -> bool:
        """Return whether they are equal but for some rounding, and 0 in the row of zeros.

        Quickly; what is not may be more rounding, or not finite (`_largest_error`).
        """
        for tangent, total, size in zip(tangents, self._sums, self._sizes, strict=True):
            if tangent.numel():
                bound = (size + size.median()) * (ROUNDINGS * torch.finfo(tangent.dtype).eps)
                is_close = (tangent - total).abs() <= bound
                # What is 0 along every direction is 0 in the row of zeros and where fn is constant.
                if not unwrap(torch.where(size == 0, tangent == 0, is_close)).all():
                    return False
        return True

    def _largest_error(self, tangents: list[Tensor]) -> float:
        """Return the largest difference, in roundings; infinity where the row of zeros has a
        tangent.

        Relative to a row's largest tangent and to that of half of the rows; what overflowed is left
        out, and what rounds as the smallest numbers do is taken to be of their size.
        """
        errors = [torch.zeros(())]
        for tangent, total, size in zip(tangents, self._sums, self._sizes, strict=True):
            if tangent.numel():
                info = torch.finfo(tangent.dtype)
                error = (
                    (tangent - total).abs().nan_to_num(0, 0, 0).unsqueeze(-1).flatten(1).amax(-1)
                )
                size = size.unsqueeze(-1).flatten(1).amax(-1)
                usual = torch.where(size > 0, size, torch.nan).nanmedian().nan_to_num(0, 0, 0)
                error = (error / (size + usual + info.tiny) / info.eps).nan_to_num(0)
                errors.append(
                    unwrap(torch.where(self._leaking_rows(tangent), torch.inf, error)).max()
                )
        return max(map(float, errors))

    def _assert_independent(self, tangents: list[Tensor]) -> None:
        """Have a program that is being exported raise RuntimeError where a row of zeros has a
        tangent."""
        for tangent in tangents:
            if tangent.numel():
                torch_private.assert_async(~self._leaking_rows(tangent).any(), MIXED)

    def _leaking_rows(self, tangent: Tensor) -> Tensor:
        """Return ``[N]``, the rows that have a tangent where their factors are 0."""
        zero = self._factors[0] == 0
        return zero & (tangent.abs() > 0).unsqueeze(-1).flatten(1).any(-1)
