"""Checks that a function which runs more than once in a call is the same function each time.

It may draw from a generator that nobody sets back, count its calls, or write what it reads.

`require_same` compares what two runs have in common, such as the value.  Other kernels compute it
in each, and their rounding has no bound that holds for every function; so where it is off, both
runs are repeated: by the same kernels, a function that is the same gives the same.

No value can be read while a graph is made.  `refuse_irreproducible` refuses there what would make
the runs differ: random numbers, and writes into buffers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import torch_private
from ...ops.library import wide
from ..engine.types import Args, Function, Named
from ..rules.forward_mode import unwrap
from .check import ROUNDINGS, find_history

if TYPE_CHECKING:
    from torch._ops import OpOverload

_MAX_ROUNDING = 1 / 8
"""The largest relative difference that is taken for rounding without another look."""
_GPU_FACTOR = 64
"""How much more than a CPU a GPU may round from run to run, since it adds in any order."""
CHANGES = (
    "it draws random numbers (dropout; a generator of its own, NumPy's or Python's; a lazy layer, "
    "until it was called), counts its calls, or writes what it reads (spectral_norm in training)"
)


def require_same(
    fn: Function,
    first: Sequence[Tensor],
    other: Sequence[Tensor],
    repetitions: Iterable[tuple[list[Tensor], ...]],
    message: str,
    groups: Sequence[dist.ProcessGroup] = (),
) -> None:
    """Raise RuntimeError where two runs of ``fn`` differ by more than the rounding of kernels.

    Args:
        first, other: what both computed.
        repetitions: pairs of what a run computed and what its repetition does; read where needed.
        message: of the error.
        groups: process groups whose ranks run ``fn`` together.  One that repeated it alone would
            wait for the others for ever.
    """

    def on_any_rank(flag: bool) -> bool:
        agreed = torch.tensor(int(flag), device=first[0].device)
        for group in groups:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        return bool(agreed)

    off, history = distance(first, other), find_history(fn)
    if not on_any_rank(off > history.roundings_of_runs):
        return
    of_gpu = any(tensor.device.type != "cpu" for tensor in first)
    limit = ROUNDINGS * (_GPU_FACTOR if of_gpu else 1)
    if on_any_rank(max(distance(run, again) for run, again in repetitions) > limit):
        raise RuntimeError(message)
    # So much was rounding; no function is let off more than `_MAX_ROUNDING` for good.
    largest = _MAX_ROUNDING / torch.finfo(_make_readable(first[0]).dtype).eps
    history.roundings_of_runs = max(history.roundings_of_runs, min(4 * off, largest))


def distance(first: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return how far lists of tensors are apart, in roundings of an entry's size and of the usual
    one; NaN is the same as NaN, and infinity as infinity."""
    largest = 0.0
    for a, b in zip(map(_make_readable, first), map(_make_readable, other), strict=True):
        if a.shape != b.shape:
            return torch.inf
        if not torch.equal(a, b):
            size, info = a.abs(), torch.finfo(a.dtype)
            same = (a == b) | (a.isnan() & b.isnan())
            off = (a - b).abs() / (size + size.nanmedian() + info.tiny) / info.eps
            largest = max(largest, float(torch.where(same, 0, off.nan_to_num(torch.inf)).max()))
    return largest


def _make_readable(tensor: Tensor) -> Tensor:
    """Return a tensor that can be read: without wrappers, of 32 bits at least."""
    return wide(unwrap(tensor.detach()))


# ---- in a graph --------------------------------------------------------------------------------


@contextmanager
def refuse_irreproducible(fn: Function) -> Iterator[None]:
    """Refuse what makes a run that is traced here differ from another run of ``fn``.

    Raises:
        RuntimeError: it draws random numbers, or is a module and writes a buffer.
    """
    buffers = dict(fn.named_buffers()) if isinstance(fn, nn.Module) else {}
    versions = {name: buffer._version for name, buffer in buffers.items()}
    states = random.getstate(), repr(np.random.get_state())
    with _no_random_mode()():
        yield
    if states != (random.getstate(), repr(np.random.get_state())):
        raise _random_error("NumPy's or Python's random numbers")
    for name, buffer in buffers.items():
        if buffer._version != versions[name]:
            raise RuntimeError(f"fn writes its buffer {name!r}, and runs twice")


@cache
def _no_random_mode() -> type:
    """Return the class of a context in which torch draws no random numbers."""

    class NoRandom(torch_private.TorchDispatchMode):  # type: ignore[misc]  # looked up
        def __torch_dispatch__(
            self,
            func: OpOverload,
            types: object,
            args: Args,
            kwargs: Named | None = None,
        ) -> object:
            if draws_random_numbers(func, args, kwargs or {}):
                raise _random_error(f"{func}")
            return func(*args, **(kwargs or {}))

    return NoRandom


def draws_random_numbers(operator: OpOverload, args: Args, kwargs: Named) -> bool:
    """Return whether a call of an operator draws random numbers.

    Kernels of attention and recurrent networks are tagged so for the sake of their dropout.
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = operator._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    values = {**defaults, **dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    is_unset = any(values.get(name) == 0 for name in ("dropout_p", "dropout"))
    return not is_unset and not any(values.get(name) is False for name in ("train", "training"))


def _random_error(what: str) -> RuntimeError:
    return RuntimeError(f"fn draws random numbers ({what}), and runs twice")
