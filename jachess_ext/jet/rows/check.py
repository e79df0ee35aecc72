"""The check that rows of a function do not depend on each other, and which calls are checked.

A Laplacian by rows runs all N rows at once.  For a function that mixes them, such as one with batch
norm in training mode, it would silently add derivatives by other rows.  The check:

1. The pass carries another direction, v_n = Σ_i a_ni u_ni with different random factors a_ni in
each
   row n, and a_ni = 0 in one row.  If rows are independent, J v is Σ_i a_ni J u_i up to rounding,
   and exactly 0 in the row of zeros (`RowCheck`).
2. No bound on rounding holds for every function (its terms may cancel).  So where J v differs, the
   function runs again along directions that are 0 in half of the rows.  A tangent there is exactly
   0, or comes from other rows (`Rows.are_mixed`).

Along few directions another stream is expensive in a training loop, which calls the same function
again and again: not every step is checked there (`History`).
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
    """Return random factors ``[count, rows]``, different ones at each call.

    They are NumPy's: torch's generators keep their state, and `torch.func.vmap` restricts their
    use.

    Args:
        zero: whether the factors of one row are 0; of another row at each call.
    """
    count, rows = int(count), int(rows)  # while torch.export traces they may be symbols
    make = _factor_table if count * rows < 2**16 else _factor_table.__wrapped__
    first = next(_calls) % rows
    table = torch.from_numpy(make(count, rows, like.dtype == torch.float64, zero))
    # Another window of the table at each call: a dependence of rows that some factors miss is
    # detected with the next.
    return table[:, first : first + rows].to(like.device, like.dtype)


@functools.lru_cache(16)
def _factor_table(count: int, rows: int, double: bool, zero: bool) -> np.ndarray:
    """Return ``[count, 2 rows - 1]``; any ``rows`` consecutive columns are `random_factors`."""
    generator = np.random.default_rng(0)
    table = generator.standard_normal((count, 2 * rows - 1), np.float64 if double else np.float32)
    if zero:
        table[:, rows - 1] = 0
    return table


def append_dims(factors: Tensor, ndim: int) -> Tensor:
    """Return factors with trailing dimensions of size 1, ``ndim`` in all, for broadcasting."""
    return factors.reshape(*factors.shape, *(1,) * (ndim - factors.ndim))


def half_masks(rows: int, device: torch.device) -> Tensor:
    """Return masks ``[h, rows]`` of half of the rows, so that of any two rows a mask holds the
    first and not the second."""
    # Two row numbers differ in a bit: the mask of rows with that bit, or the one of rows without
    # it, holds the first row alone.
    numbers = torch.arange(rows, device=device)
    bits = torch.stack([numbers >> bit & 1 for bit in range((rows - 1).bit_length())]).bool()
    return torch.stack([bits, ~bits], 1).flatten(0, 1)


def any_true(tensors: Iterable[Tensor]) -> bool:
    """Return whether any entry is true, in any sample of a torch.func.vmap around."""
    return any(bool(unwrap(tensor).any()) for tensor in tensors)


# ---- which calls are checked -------------------------------------------------------------------

_ALWAYS_CHECKED = 16
"""From this number of directions on every call is checked: the stream costs less than 1/16."""
_CHECK_INTERVAL = 64
_MAX_KEYS = 16
ROUNDINGS = 16.0
"""The largest difference of tangents, in roundings, without another run; networks have up to 6."""


class History:
    """The earlier calls of a function.

    Attributes:
        steps: the number of calls, by `call_key`.
        trained: the keys for which the last call's result went through a backward.
        roundings: the largest difference of tangents that was rounding.
        roundings_of_runs: the largest difference between runs of one call that was rounding.
    """

    def __init__(self) -> None:
        self.steps: dict[object, int] = {}
        self.trained: set[object] = set()
        self.roundings = self.roundings_of_runs = ROUNDINGS

    def forget(self) -> None:
        """Reset the history, so that the next call is checked."""
        self.steps.clear()
        self.roundings = ROUNDINGS

    def is_due(self, key: object) -> bool:
        """Return whether a call is checked: the first, second, fourth, ... and every 64th of a
        training loop; every other call."""
        number = self.steps.get(key, 0) + 1
        is_power_of_two = not number & (number - 1)
        return key not in self.trained or is_power_of_two or number % _CHECK_INTERVAL == 0

    def count(self, key: object, result: Tensor) -> None:
        """Count a call, and record whether its result goes through a backward."""
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
    """Return the history of a function, by its code, so that one defined in a loop has one history.

    A new history for a callable that cannot be hashed.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    with suppress(TypeError), _LOCK:
        return _HISTORIES.setdefault(getattr(fn, "__code__", fn), History())
    return History()


def call_key(rows: Any) -> object | None:
    """Return the key of calls that share one count of steps; None for a call that is always
    checked."""
    if (
        rows.count >= _ALWAYS_CHECKED
        or not torch.is_grad_enabled()
        or torch.compiler.is_exporting()
    ):
        return None
    shapes = tuple((point.shape, point.dtype, point.device) for point in rows.points)
    # A list cannot be hashed: its items may have changed.
    with suppress(TypeError, ValueError, RecursionError):
        key = rows.count, shapes, _references(rows.fn)
        hash(key)
        return key
    return None


# A training loop defines its function anew at each step, as a closure over the same network.

_TOKENS: weakref.WeakKeyDictionary[object, object] = weakref.WeakKeyDictionary()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _references(value: object) -> object:
    """Return a key of a function among those of the same code: the objects, training modes and
    numbers in its closure, its defaults and the global variables that it reads, not their
    attributes; tensors, which change with every batch, are all equal."""
    if isinstance(value, functools.partial):
        return _references(value.func), _references((*value.args, *value.keywords.values()))
    if isinstance(value, types.MethodType):
        return _references(value.__func__), _references(value.__self__)
    if isinstance(value, types.FunctionType):
        code, variables = value.__code__, value.__globals__
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        # Functions of other files are the same as long as they are the same object.
        globals_read = tuple(
            _token(item)
            if isinstance(item := variables[name], types.FunctionType)
            and item.__globals__ is not variables
            else _references(item)
            for name in code.co_names
            if name in variables
        )
        return code, _references((*cells, *defaults)), globals_read
    if isinstance(value, tuple):
        return tuple(map(_references, value))
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return Tensor
    return _token(value)


def _token(value: object) -> object:
    """Return a key of an object and its training mode."""
    with _LOCK:  # an id would be another object's, once this one is gone
        return _TOKENS.setdefault(value, object()), getattr(value, "training", None)


# ---- the check of a call -----------------------------------------------------------------------


class Generators:
    """The states of torch's random generators, of the CPU and of all GPUs."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def have_advanced(self) -> bool:
        """Return whether random numbers were drawn since."""
        now = Generators()
        pairs = zip((self._cpu, *self._cuda), (now._cpu, *now._cuda), strict=False)
        return any(not torch.equal(before, after) for before, after in pairs)


@contextmanager
def restoring_state(fn: Function) -> Iterator[None]:
    """Restore torch's generators, and a module's buffers, when the context ends."""
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
        if torch.compiler.is_exporting():  # no second run is possible: 0 in half of the rows
            factors = factors * (factors[:1] > factors[:1].median())
        self._factors = factors  # [q, N]
        # For each result Σ a_ni J u_i, and Σ |a_ni J u_i|, the scale of its rounding: [N, ...].
        self._sums: list[Tensor] = []
        self._sizes: list[Tensor] = []

    def direction(self) -> list[Tensor]:
        """Return the additional direction of the last pass, ``[N, ...]`` of each tensor of x."""
        return self._rows.mixture(self._factors)

    def add(self, first: list[Tensor], numbers: list[int], roots: Tensor | None) -> None:
        """Add the tangents of every result, ``[p, N, ...]``, along directions multiplied by
        ``roots``."""
        if roots is not None:
            factors = self._factors[numbers] / roots[numbers].unsqueeze(1)
        else:  # consecutive, unlike those of groups by sign: a slice without a copy
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

        While torch.export traces, the exported program gets an assertion instead.
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
        """Return whether the tangents match up to some rounding, and are 0 in the row of zeros.

        A quick test; `_largest_error` then allows for values that are not finite.
        """
        for tangent, total, size in zip(tangents, self._sums, self._sizes, strict=True):
            if tangent.numel():
                bound = (size + size.median()) * (ROUNDINGS * torch.finfo(tangent.dtype).eps)
                is_close = (tangent - total).abs() <= bound
                # The sum of sizes is 0 in the row of zeros, and where fn is constant.
                if not unwrap(torch.where(size == 0, tangent == 0, is_close)).all():
                    return False
        return True

    def _largest_error(self, tangents: list[Tensor]) -> float:
        """Return the largest difference, in roundings; infinity where the row of zeros has a
        tangent.

        Relative to the row's largest tangent plus the median of all rows'; entries that overflowed
        are left out, and the smallest normal number is added for subnormal ones.
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
        """Add an assertion to the exported program: no tangent in rows whose factors are 0."""
        for tangent in tangents:
            if tangent.numel():
                torch_private.assert_async(~self._leaking_rows(tangent).any(), MIXED)

    def _leaking_rows(self, tangent: Tensor) -> Tensor:
        """Return the mask ``[N]`` of rows that have a tangent though their factors are 0."""
        zero = self._factors[0] == 0
        return zero & (tangent.abs() > 0).unsqueeze(-1).flatten(1).any(-1)
