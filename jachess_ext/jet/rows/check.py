"""The check that rows of a function do not depend on each other, and which calls make it.

A Laplacian by rows runs all N rows at once.  Of a function that mixes them, such as one with batch
norm in training mode, it would add derivatives by other rows without an error.  The check:

1. Its pass carries one direction more, v_n = Σ_i a_ni u_ni with other numbers a_ni in each row n,
   and a_ni = 0 in one row.  Where rows are apart, J v is Σ_i a_ni J u_i, but for rounding, and
   exactly 0 in the row of zeros, since products and sums of zeros are (`RowCheck`).
2. Rounding has no bound that holds for every function (its own terms may cancel).  What is off is
   therefore run again along directions that are 0 in half of the rows.  A tangent there is exactly
   0, or comes from other rows (`Rows.depend`).

Along few directions a stream more is dear, so not every call is checked there: `History` counts the
calls of a function, and `state_of` reads what may change how it treats its rows.
"""

from __future__ import annotations

import functools
import itertools
import numbers
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import torch_private
from ..engine.types import Function
from ..rules.forward_mode import unwrapped

MIXED = (
    "results of fn depend on other rows of x than their own (a mean over the batch, batch norm in "
    "training mode?); expected each row by itself"
)


# ---- the direction that is carried ---------------------------------------------------------------

_calls = itertools.count()


def mixed_factors(count: int, rows: int, like: Tensor, *, zero: bool = False) -> Tensor:
    """Return ``[count, rows]``: numbers that nothing relates, others at each call.

    Torch's generators are left alone; under `torch.func.vmap` they would ask how to draw.

    Args:
        zero: whether those of one row are 0; of another row at each call.
    """
    count, rows = int(count), int(rows)  # while torch.export traces they may be symbols
    make = _table if count * rows < 2**16 else _table.__wrapped__
    first = next(_calls) % rows
    table = torch.from_numpy(make(count, rows, like.dtype == torch.float64, zero))
    # Another window of the table at each call, so that a mixture of rows that cancels with some
    # numbers, or spares the row of zeros, is seen in the next.
    return table[:, first : first + rows].to(like.device, like.dtype)


@functools.lru_cache(16)
def _table(count: int, rows: int, double: bool, zero: bool) -> np.ndarray:
    """Return ``[count, 2 rows - 1]``, of which any ``rows`` columns are such factors."""
    generator = np.random.default_rng(0)
    table = generator.standard_normal((count, 2 * rows - 1), np.float64 if double else np.float32)
    if zero:
        table[:, rows - 1] = 0
    return table


def to_ndim(factors: Tensor, ndim: int) -> Tensor:
    """Return factors with dimensions of size 1 behind theirs, to multiply a tensor of ``ndim``."""
    return factors.reshape(*factors.shape, *(1,) * (ndim - factors.ndim))


def halves(rows: int, device: torch.device) -> Tensor:
    """Return ``[h, rows]``, each true in half of the rows: for any two, one of the first alone."""
    # Two rows differ in some bit of their numbers: the half of those with that bit, or the half
    # without it, holds the first and not the second.
    numbers = torch.arange(rows, device=device)
    bits = torch.stack([numbers >> bit & 1 for bit in range((rows - 1).bit_length())]).bool()
    return torch.stack([bits, ~bits], 1).flatten(0, 1)


def any_true(tensors: Iterable[Tensor]) -> bool:
    """Return whether an entry is true: of all functions that torch.func.vmap calls at once."""
    return any(bool(unwrapped(tensor).any()) for tensor in tensors)


# ---- which calls ask ---------------------------------------------------------------------------

FEW = 16
"""Along fewer directions not every call has the stream more, which costs 1 / (q + 2) of a pass."""
_OFTEN = 64
_STATES = 16
_MOST = 1000  # entries of a container that are read
ROUNDINGS = 16.0
"""How far tangents are off at most before it is looked into; of networks, up to 6."""


class History:
    """The calls of a function.

    Attributes:
        calls: how many there were in each of the last `_STATES` states (`state_of`).
        roundings: how far tangents of independent rows were off.
        roundings_of_runs: how far several runs of the function in a call were.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[object, ...], int] = {}
        self.roundings = self.roundings_of_runs = ROUNDINGS

    def forget(self) -> None:
        """Begin anew, so that the next call asks."""
        self.calls.clear()
        self.roundings = ROUNDINGS

    def is_due(self, state: tuple[object, ...]) -> bool:
        """Return whether a call in this state asks: the first, second, fourth, and each 64th."""
        number = self.calls.get(state, 0) + 1
        is_power_of_two = not number & (number - 1)
        return is_power_of_two or number % _OFTEN == 0

    def count(self, state: tuple[object, ...]) -> None:
        """Count a call."""
        with _LOCK:
            number = self.calls.pop(state, 0) + 1
            if len(self.calls) >= _STATES:
                del self.calls[next(iter(self.calls))]
            self.calls[state] = number


_HISTORIES: weakref.WeakKeyDictionary[object, History] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def history_of(fn: object) -> History:
    """Return the history of a function; of one defined in a loop, that of its code.

    A new one for what can be no key of a dictionary.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    with suppress(TypeError), _LOCK:
        return _HISTORIES.setdefault(getattr(fn, "__code__", fn), History())
    return History()


# ---- what a function reads ---------------------------------------------------------------------

_PLAIN = {
    *(bool, int, float, complex, str, bytes, types.NoneType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size),
}
_CONTAINERS = {dict, OrderedDict, set, list, tuple}
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


def state_of(fn: Function, rows: int) -> tuple[object, ...]:
    """Return what can be seen of a function: modules and their training flags, hooks, numbers,
    flags and names in attributes, closures and global names; versions of buffers.

    Parameters are told apart by identity, since every step of an optimizer changes them, and
    tensors of as many rows as the batch are not, since every batch has others.
    """
    reader = _Reader(rows)
    try:
        reader.read(fn)
    except Exception:  # of an object that answers in its own way: as if it had changed
        return (object(),)
    for name in _GLOBAL_HOOKS:
        reader.values.extend(getattr(nn.modules.module, name, ()))
    return tuple(reader.values)


class _Reader:
    """A walk through what a function can reach.

    Attributes:
        values: what can be seen, in the order of the walk.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._keys: set[tuple[int, ...]] = set()
        self.values: list[object] = []

    def read(self, value: object, code: types.CodeType | None = None) -> None:
        """Append what can be seen of a value.

        Args:
            code: of the function that names it; of other objects than modules, attributes are read
                that it names.
        """
        kind = type(value)
        if kind in _PLAIN:
            self.values.append(value)
        elif isinstance(value, Tensor):
            self._read_tensor(value)
        elif isinstance(value, nn.Module):
            self._read_module(value)
        elif isinstance(value, list | tuple | Mapping | Set):
            self._read_items(value, code)
        elif isinstance(value, types.FunctionType):
            self._read_function(value)
        elif isinstance(value, types.MethodType):
            self._read_function(value.__func__)
            self.read(value.__self__, value.__func__.__code__)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.read(part, code)
        elif isinstance(value, numbers.Number | np.generic):
            self.values.append(value)
        elif isinstance(value, np.ndarray):
            self.values.append(value.tobytes() if value.size <= 64 else id(value))
        else:
            self._read_object(value, code)

    def _is_new(self, *key: int) -> bool:
        """Return whether these ids are met for the first time, so that a walk in a circle ends."""
        is_new = key not in self._keys
        self._keys.add(key)
        return is_new

    def _read_items(self, value: Collection[object], code: types.CodeType | None) -> None:
        self.values.append(len(value))
        if len(value) > _MOST or not self._is_new(id(value)):
            return
        if isinstance(value, Mapping):
            for key in value:
                self.read(key, code)
                self.read(value[key], code)
        else:
            for item in value:
                self.read(item, code)

    def _read_tensor(self, value: Tensor) -> None:
        wrapped = torch_private.functorch.is_functorch_wrapped_tensor(value)
        if wrapped or (value.requires_grad and not value.is_leaf):
            self.values.append(value.ndim)
        elif value.requires_grad:
            self.values.append(id(value))
        elif value.ndim and len(value) == self._rows:
            self.values.append(value.ndim)
        else:
            version = 0 if value.is_inference() else value._version
            self.values += [id(value), version]
            if value.numel() == 1 and value.device.type == "cpu" and type(value) is Tensor:
                self.values.append(value.item())  # `.data` is changed without a new version

    def _read_module(self, module: nn.Module) -> None:
        self.values.append(id(module))
        if not self._is_new(id(module)):
            return
        values, code = self.values, getattr(type(module).forward, "__code__", None)
        for name, value in vars(module).items():
            kind = type(value)
            if kind in _PLAIN:
                values.append(value)
            elif kind in _CONTAINERS:
                if not value:
                    continue
                if name == "_modules":
                    for child in value.values():
                        if child is not None:
                            self._read_module(child)
                else:
                    self._read_items(value, code)
            else:
                values.append(name)
                self.read(value, code)
        self._read_function(type(module).forward, module)

    def _read_function(self, function: Any, owner: object = None) -> None:
        code = getattr(function, "__code__", None)
        self.values.append(id(code or function))  # a function in a loop is another at each turn
        if code is None or not self._is_new(id(function)):
            return
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                self.read(cell.cell_contents, code)
        self.read(function.__defaults__, code)
        self.read(function.__kwdefaults__, code)
        self.read(vars(function), code)
        if "-packages" in code.co_filename:
            return  # what an installed library names globally does not change
        for name in _names(code):
            if name in function.__globals__:
                self.read(function.__globals__[name], code)
        if owner is not None:
            self._read_methods(owner, code)

    def _read_object(self, value: object, code: types.CodeType | None) -> None:
        """Read what ``code`` names of an object, of a module of Python, or of a class."""
        self.values.append(id(value))
        if not self._is_new(id(value), id(code)):
            return
        inside = getattr(value, "__dict__", {})
        if code is not None and not str(getattr(value, "__name__", "")).startswith("torch"):
            for name in _names(code):
                if name in inside:
                    self.read(inside[name], code)
        if not isinstance(value, type | types.ModuleType):
            self._read_methods(value, code)

    def _read_methods(self, value: object, code: types.CodeType | None) -> None:
        names = ("__call__",) if code is None else ("__call__", *_names(code))
        for name in names:
            method = getattr(type(value), name, None)
            method = method.fget if isinstance(method, property) else method
            if isinstance(method, types.FunctionType):
                self._read_function(method)
                if not isinstance(value, nn.Module):
                    self._read_object(value, method.__code__)


def _names(code: types.CodeType) -> Sequence[str]:
    """Return the names that a function, or one inside of it, reads globally or of objects."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    if not inner:
        return code.co_names
    return [*code.co_names, *itertools.chain.from_iterable(map(_names, inner))]


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

    def moved(self) -> bool:
        """Return whether something was drawn since."""
        now = Generators()
        pairs = zip((self._cpu, *self._cuda), (now._cpu, *now._cuda), strict=False)
        return any(not torch.equal(before, after) for before, after in pairs)


@contextmanager
def unchanged(fn: Function) -> Iterator[None]:
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
        state: of the function (`state_of`); None where each call is checked.
    """

    def __init__(self, rows: Any, state: tuple[object, ...] | None) -> None:
        self._rows, self._state = rows, state
        self.generators = Generators()  # as they are when the call begins
        factors = mixed_factors(rows.count, rows.batch, rows.points[0], zero=True)
        if torch.compiler.is_exporting():  # without rounding to look into: 0 in half of the rows
            factors = factors * (factors[:1] > factors[:1].median())
        self._factors = factors  # [q, N]
        # Of each result Σ a_ni J u_i, and Σ |a_ni J u_i|, by which rounding is measured: [N, ...].
        self._sums: list[Tensor] = []
        self._sizes: list[Tensor] = []

    @classmethod
    def of(cls, rows: Any) -> RowCheck | None:
        """Return the check; None, and count the call, where this one is not checked."""
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
            parts = to_ndim(factors, tangents.ndim) * tangents
            sums.append(parts.sum(0))
            sizes.append(parts.abs().sum(0))
        if self._sums:
            sums = [a + b for a, b in zip(self._sums, sums, strict=True)]
            sizes = [a + b for a, b in zip(self._sizes, sizes, strict=True)]
        self._sums, self._sizes = sums, sizes

    def compare(self, tangents: list[Tensor]) -> None:
        """Raise ValueError where rows depend on each other; else count the call.

        While torch.export traces nothing is read: the exported program raises RuntimeError.
        """
        if torch.compiler.is_exporting():
            return self._assert_apart(tangents)
        is_mixed = False
        if not self._agrees(tangents):
            # Rounding, or a mixture: `depend` tells, by more runs of fn.  What rounding alone came
            # to is remembered, so that a function that rounds as much again is not run again.
            error, history = self._error(tangents), history_of(self._rows.fn)
            if error > history.roundings:
                is_mixed = error == torch.inf or self._rows.depend(self.generators)
                history.roundings = 4 * error
        if not is_mixed and self._rows.alike():
            with suppress(Exception):  # of a function that is not defined there
                is_mixed = self._rows.depend(self.generators, nearby=True)
        if is_mixed:
            history_of(self._rows.fn).forget()
            raise ValueError(MIXED)
        if self._state is not None:
            history_of(self._rows.fn).count(self._state)

    def _agrees(self, tangents: list[Tensor]) -> bool:
        """Return whether they are equal but for some rounding, and 0 in the row of zeros.

        Quickly; what is not may be more rounding, or not finite (`_error`).
        """
        for tangent, total, size in zip(tangents, self._sums, self._sizes, strict=True):
            if tangent.numel():
                bound = (size + size.median()) * (ROUNDINGS * torch.finfo(tangent.dtype).eps)
                near = (tangent - total).abs() <= bound
                # What is 0 along every direction is 0 in the row of zeros and where fn is constant.
                if not unwrapped(torch.where(size == 0, tangent == 0, near)).all():
                    return False
        return True

    def _error(self, tangents: list[Tensor]) -> float:
        """Return the largest difference, in roundings; infinity where the row of zeros has a
        tangent.

        Relative to a row's largest tangent and to that of half of the rows; what overflowed is left
        out, and what rounds as the smallest numbers do is taken to be of their size.
        """
        errors = [torch.zeros(())]
        for tangent, total, size in zip(tangents, self._sums, self._sizes, strict=True):
            if tangent.numel():
                info = torch.finfo(tangent.dtype)
                off = (tangent - total).abs().nan_to_num(0, 0, 0).unsqueeze(-1).flatten(1).amax(-1)
                size = size.unsqueeze(-1).flatten(1).amax(-1)
                usual = torch.where(size > 0, size, torch.nan).nanmedian().nan_to_num(0, 0, 0)
                off = (off / (size + usual + info.tiny) / info.eps).nan_to_num(0)
                errors.append(unwrapped(torch.where(self._reached(tangent), torch.inf, off)).max())
        return max(map(float, errors))

    def _assert_apart(self, tangents: list[Tensor]) -> None:
        """Have a program that is being exported raise RuntimeError where a row of zeros has a
        tangent."""
        for tangent in tangents:
            if tangent.numel():
                torch_private.assert_async(~self._reached(tangent).any(), MIXED)

    def _reached(self, tangent: Tensor) -> Tensor:
        """Return ``[N]``, the rows that have a tangent where their factors are 0."""
        zero = self._factors[0] == 0
        return zero & (tangent.abs() > 0).unsqueeze(-1).flatten(1).any(-1)
