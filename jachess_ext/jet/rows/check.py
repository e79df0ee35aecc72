"""The check that rows of a function do not depend on each other, and which calls are checked.

The Laplacian of each row is computed for all N rows at once.  For a function that mixes rows, such
as one with batch norm in training mode, it would silently include derivatives by other rows.  The
check:

1. The pass has one more direction, the mixture v_n = Σ_i a_ni u_ni, with different random factors
   a_ni in each row n, and a_ni = 0 in one row.  If rows are independent, J v is Σ_i a_ni J u_i up
   to rounding, and exactly 0 in the row of zeros (`RowCheck`).
2. No bound on rounding holds for every function (its terms may cancel).  So if J v differs, the
   function runs again along directions that are 0 in half of the rows.  A tangent in these rows is
   exactly 0, or comes from other rows (`Rows.are_mixed`).

If there are few directions, one more stream is expensive in a training loop, which calls the same
function again and again: there not every step is checked (`History`).
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


# ---- the additional direction --------------------------------------------------------------------

_call_numbers = itertools.count()


def random_factors(count: int, num_rows: int, like: Tensor, *, has_zeros: bool = False) -> Tensor:
    """Return random factors ``[count, num_rows]``, different ones at each call.

    NumPy draws them: torch's generators have to keep their state, and `torch.func.vmap` restricts
    their use.

    Args:
        like: the tensor whose dtype and device the factors get.
        has_zeros: whether all factors of one row are 0; it is another row at each call.
    """
    count, num_rows = int(count), int(num_rows)  # while torch.export traces they may be symbols
    make_table = _factor_table if count * num_rows < 2**16 else _factor_table.__wrapped__
    start = next(_call_numbers) % num_rows
    table = torch.from_numpy(make_table(count, num_rows, like.dtype == torch.float64, has_zeros))
    # Each call takes another window of the table: if some factors miss a dependence of rows, the
    # next ones detect it.
    return table[:, start : start + num_rows].to(like.device, like.dtype)


@functools.lru_cache(16)
def _factor_table(count: int, num_rows: int, is_double: bool, has_zeros: bool) -> np.ndarray:
    """Return a table ``[count, 2 num_rows - 1]``, from which `random_factors` takes ``num_rows``
    consecutive columns that begin at random."""
    generator, dtype = np.random.default_rng(0), np.float64 if is_double else np.float32
    table = generator.standard_normal((count, 2 * num_rows - 1), dtype)
    if has_zeros:
        table[:, num_rows - 1] = 0
    return table


def append_dims(factors: Tensor, ndim: int) -> Tensor:
    """Return factors with trailing dimensions of size 1, ``ndim`` in all, for broadcasting."""
    return factors.reshape(*factors.shape, *(1,) * (ndim - factors.ndim))


def as_index(numbers: list[int], device: torch.device) -> Tensor:
    """Return indices as a tensor; consecutive ones are made on the device, without a copy, which
    the capture of a CUDA graph does not allow."""
    start = numbers[0] if numbers else 0
    if numbers == [*range(start, start + len(numbers))]:
        return torch.arange(start, start + len(numbers), device=device)
    return torch.tensor(numbers, dtype=torch.long, device=device)


def half_masks(num_rows: int, device: torch.device) -> Tensor:
    """Return boolean masks ``[h, num_rows]``, each true for about half of the rows; for any ordered
    pair of rows, one of the masks is true for the first and false for the second."""
    # Two row numbers differ in a bit: either the mask of rows with that bit, or the mask of rows
    # without it, is true for the first row only.
    numbers = torch.arange(num_rows, device=device)
    bits = torch.stack([numbers >> bit & 1 for bit in range((num_rows - 1).bit_length())]).bool()
    return torch.stack([bits, ~bits], 1).flatten(0, 1)


def any_true(tensors: Iterable[Tensor]) -> bool:
    """Return whether any entry is true, in any sample of a surrounding torch.func.vmap."""
    return any(bool(unwrap(tensor).any()) for tensor in tensors)


# ---- which calls are checked -------------------------------------------------------------------

_ALWAYS_CHECKED = 16
"""From this number of directions on every call is checked: the stream costs less than 1/16."""
_CHECK_INTERVAL = 64
_MAX_KEYS = 16
ROUNDINGS = 16.0
"""The difference of tangents, in units of the machine epsilon, that is accepted as rounding without
another run; networks reach up to 6."""


class History:
    """The earlier calls of a function.

    Attributes:
        counts: the number of calls for each `call_key`, at most `_MAX_KEYS` keys.
        trained_keys: the keys whose last call had a result that went through a backward.
        max_roundings: largest difference of tangents, in units of the machine epsilon, that counts
            as rounding; above `ROUNDINGS` after a check that found larger rounding.
        max_run_roundings: the same for the difference between two runs in one call.
    """

    def __init__(self) -> None:
        self.counts: dict[object, int] = {}
        self.trained_keys: set[object] = set()
        self.max_roundings = self.max_run_roundings = ROUNDINGS

    def forget(self) -> None:
        """Reset the history, so that the next call is checked."""
        self.counts.clear()
        self.max_roundings = ROUNDINGS

    def is_due(self, key: object) -> bool:
        """Return whether the next call is to be checked: in a training loop the first, second,
        fourth, ... and every 64th call, elsewhere all calls."""
        number = self.counts.get(key, 0) + 1
        is_power_of_two = not number & (number - 1)
        return key not in self.trained_keys or is_power_of_two or number % _CHECK_INTERVAL == 0

    def count(self, key: object, result: Tensor) -> None:
        """Count a call, and record whether its result goes through a backward."""
        with _LOCK:
            number = self.counts.pop(key, 0) + 1
            if len(self.counts) >= _MAX_KEYS:
                del self.counts[next(iter(self.counts))]
            self.counts[key] = number
            self.trained_keys &= self.counts.keys() - {key}
        if result.requires_grad and not transformed():
            result.register_hook(lambda gradient: self.trained_keys.add(key))


_HISTORIES: weakref.WeakKeyDictionary[object, History] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def find_history(fn: object) -> History:
    """Return the history of a function.

    Functions with the same code share a history, so that a function that a loop defines anew keeps
    it.  A callable that cannot be hashed gets a new history at each call.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    with suppress(TypeError), _LOCK:
        return _HISTORIES.setdefault(getattr(fn, "__code__", fn), History())
    return History()


def call_key(rows: Any) -> object | None:
    """Return the key under which `History` counts a call: the shapes of x, and the objects that
    the function refers to.  None for a call that is always checked.

    Args:
        rows: the function and its arguments, a `Rows` (whose file imports this one).
    """
    if (
        rows.count >= _ALWAYS_CHECKED
        or not torch.is_grad_enabled()
        or torch.compiler.is_exporting()
        # A checkpoint (or another hook) needs the same streams whenever it runs the call.
        or torch_private.autograd._top_saved_tensors_default_hooks(False) is not None
    ):
        return None
    shapes = tuple((point.shape, point.dtype, point.device) for point in rows.points)
    # A function that refers to a list has no key: a list cannot be hashed, its items may change.
    with suppress(TypeError, ValueError, RecursionError):
        key = rows.count, shapes, _function_key(rows.fn)
        hash(key)
        return key
    return None


# A training loop defines its function anew at each step, as a closure over the same network.

_TOKENS: weakref.WeakKeyDictionary[object, object] = weakref.WeakKeyDictionary()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _function_key(value: object) -> object:
    """Return a hashable key that distinguishes functions of the same code.

    The key holds the objects (with their training modes, not their other attributes) and numbers in
    the function's closure, its defaults and the global variables that it reads.  All tensors are
    equal in the key, since they change with every batch.

    Args:
        value: a function; or, in the recursion, a value that a function refers to.
    """
    if isinstance(value, functools.partial):
        return _function_key(value.func), _function_key((*value.args, *value.keywords.values()))
    if isinstance(value, types.MethodType):
        return _function_key(value.__func__), _function_key(value.__self__)
    if isinstance(value, types.FunctionType):
        code, variables = value.__code__, value.__globals__
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        # Functions of other files are compared by identity.
        global_keys = tuple(
            _object_key(item)
            if isinstance(item := variables[name], types.FunctionType)
            and item.__globals__ is not variables
            else _function_key(item)
            for name in code.co_names
            if name in variables
        )
        return code, _function_key((*cells, *defaults)), global_keys
    if isinstance(value, tuple):
        return tuple(map(_function_key, value))
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return Tensor
    return _object_key(value)


def _object_key(value: object) -> object:
    """Return a key for an object and its training mode."""
    with _LOCK:  # a token, since the id may belong to another object once this one is gone
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
        """Return whether random numbers were drawn since this object was made."""
        now = Generators()
        pairs = zip((self._cpu, *self._cuda), (now._cpu, *now._cuda), strict=False)
        return any(not torch.equal(before, after) for before, after in pairs)


@contextmanager
def preserve_state(fn: Function) -> Iterator[None]:
    """Restore the states of torch's generators, and the buffers if ``fn`` is a module, when the
    context ends."""
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
    """The check of one call: it compares the tangent along the mixture Σ_i a_ni u_i of the q
    directions with the mixture of the tangents along each direction.

    Args:
        rows: the function and its directions, a `Rows` (whose file imports this one).
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.generators = Generators()  # as they are when the call begins
        factors = random_factors(rows.count, rows.batch, rows.points[0], has_zeros=True)
        if torch.compiler.is_exporting():  # no second run is possible, so 0 in half of the rows
            factors = factors * (factors[:1] > factors[:1].median())
        self._factors = factors  # [q, N]
        # [N, ...] for each result: Σ_i a_ni J u_i, and Σ_i |a_ni J u_i|, the scale of rounding.
        self._sums: list[Tensor] = []
        self._magnitudes: list[Tensor] = []

    def direction(self) -> list[Tensor]:
        """Return the additional direction of the last pass, ``[N, ...]`` for each tensor of x."""
        return self._rows.mixture(self._factors)

    def add(self, all_tangents: list[Tensor], numbers: list[int], roots: Tensor | None) -> None:
        """Add Σ_i a_ni J u_i over the directions of one pass to the mixture of tangents that
        `compare` checks.

        Args:
            all_tangents: the tangents J u_i of every result, ``[p, N, ...]``.
            numbers: the indices of the pass's p directions.
            roots: ``[q]``, √|weight| by which the directions were multiplied, undone here; None:
                they were not multiplied.
        """
        index = as_index(numbers, self._factors.device)
        factors = self._factors[index]
        if roots is not None:
            factors = factors / roots[index].unsqueeze(1)
        sums, magnitudes = [], []
        for tangents in all_tangents:
            tangents = tangents.detach()
            tangents = tangents.float() if tangents.dtype.itemsize < 4 else tangents
            terms = append_dims(factors, tangents.ndim) * tangents
            sums.append(terms.sum(0))
            magnitudes.append(terms.abs().sum(0))
        if self._sums:
            sums = [a + b for a, b in zip(self._sums, sums, strict=True)]
            magnitudes = [a + b for a, b in zip(self._magnitudes, magnitudes, strict=True)]
        self._sums, self._magnitudes = sums, magnitudes

    def compare(self, tangents: list[Tensor]) -> None:
        """Compare the tangents ``[N, ...]`` of every result along the mixture with the mixture of
        tangents; raise ValueError if rows depend on each other.

        While torch.export traces, add an assertion to the exported program instead.
        """
        if torch.compiler.is_exporting():
            return self._assert_independent(tangents)
        is_mixed = False
        if not self._is_close(tangents):
            # `Rows.are_mixed` tells rounding from mixed rows by more runs of fn.  The size of the
            # rounding is recorded, so that later calls with as much rounding need no more runs.
            error, history = self._largest_error(tangents), find_history(self._rows.fn)
            if error > history.max_roundings:
                is_mixed = error == torch.inf or self._rows.are_mixed(self.generators)
                history.max_roundings = 4 * error
        if not is_mixed and self._rows.all_equal():
            with suppress(Exception):  # fn may not be defined at the points near x
                is_mixed = self._rows.are_mixed(self.generators, uses_nearby_points=True)
        if is_mixed:
            find_history(self._rows.fn).forget()
            raise ValueError(MIXED)

    def _is_close(self, tangents: list[Tensor]) -> bool:
        """Return whether the tangents match up to usual rounding, and are 0 in the row of zeros.

        This is a quick test, which also fails for values that are not finite; `_largest_error`
        leaves such values out.
        """
        for tangent, total, size in zip(tangents, self._sums, self._magnitudes, strict=True):
            if tangent.numel():
                bound = (size + size.median()) * (ROUNDINGS * torch.finfo(tangent.dtype).eps)
                is_close = (tangent - total).abs() <= bound
                # The sum of sizes is 0 in the row of zeros, and where fn is constant.
                if not unwrap(torch.where(size == 0, tangent == 0, is_close)).all():
                    return False
        return True

    def _largest_error(self, tangents: list[Tensor]) -> float:
        """Return the largest difference of tangents, in units of the machine epsilon; infinity if
        the row of zeros has a tangent.

        A difference is relative to the row's largest tangent plus the median over all rows.
        Entries that overflowed are left out; the smallest normal number is added to the
        denominator, for subnormal tangents.
        """
        errors = [torch.zeros(())]
        for tangent, total, size in zip(tangents, self._sums, self._magnitudes, strict=True):
            if tangent.numel():
                info = torch.finfo(tangent.dtype)
                error = (
                    (tangent - total).abs().nan_to_num(0, 0, 0).unsqueeze(-1).flatten(1).amax(-1)
                )
                size = size.unsqueeze(-1).flatten(1).amax(-1)
                median = torch.where(size > 0, size, torch.nan).nanmedian().nan_to_num(0, 0, 0)
                error = (error / (size + median + info.tiny) / info.eps).nan_to_num(0)
                errors.append(
                    unwrap(torch.where(self._leaking_rows(tangent), torch.inf, error)).max()
                )
        return max(map(float, errors))

    def _assert_independent(self, tangents: list[Tensor]) -> None:
        """Add an assertion to the exported program: rows whose factors are 0 have no tangent."""
        for tangent in tangents:
            if tangent.numel():
                torch_private.assert_async(~self._leaking_rows(tangent).any(), MIXED)

    def _leaking_rows(self, tangent: Tensor) -> Tensor:
        """Return the mask ``[N]`` of rows that have a tangent though their factors are 0."""
        return (self._factors[0] == 0) & (tangent.abs() > 0).unsqueeze(-1).flatten(1).any(-1)
