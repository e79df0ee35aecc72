"""Checks that a function that runs several times in a call is the same function each time.

A function may not be: it may draw from a generator that is not restored, count its calls, or write
into a tensor that it reads.

`require_same` compares the results that two runs have in common, such as the value.  Both runs may
use different kernels, and no bound on their rounding holds for every function.  So if the results
differ, both runs are repeated: with the same kernels, the same function gives the same results.

While a graph is traced, no value can be read.  There `refuse_irreproducible` refuses the operations
that would make the runs differ: random numbers, and writes into buffers.
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
"""The largest relative difference that `require_same` accepts without repeating the runs, even
after larger rounding was found."""
_GPU_FACTOR = 64
"""The factor by which two runs may differ more on a GPU than on a CPU: a GPU adds in any order."""
CAUSES = (
    "it draws random numbers (dropout; a generator of its own, NumPy's or Python's; a lazy layer, "
    "until it was called), counts its calls, or writes what it reads (spectral_norm in training)"
)


def require_same(
    fn: Function,
    results: Sequence[Tensor],
    repeated_results: Sequence[Tensor],
    repetitions: Iterable[tuple[list[Tensor], ...]],
    message: str,
    groups: Sequence[dist.ProcessGroup] = (),
) -> None:
    """Raise RuntimeError if two runs of ``fn`` differ by more than the rounding of kernels.

    Args:
        results, repeated_results: the results of both runs.
        repetitions: pairs of the results of a run and of its repetition; an iterator, since each
            pair takes another run.
        message: the message of the error.
        groups: process groups whose ranks run ``fn`` together: they repeat it together, since a
            rank alone would wait forever.
    """

    def on_any_rank(is_true: bool) -> bool:
        result = torch.tensor(int(is_true), device=results[0].device)
        for group in groups:
            dist.all_reduce(result, dist.ReduceOp.MAX, group=group)
        return bool(result)

    error, history = distance(results, repeated_results), find_history(fn)
    if not on_any_rank(error > history.max_run_roundings):
        return
    is_on_gpu = any(tensor.device.type != "cpu" for tensor in results)
    limit = ROUNDINGS * (_GPU_FACTOR if is_on_gpu else 1)
    if on_any_rank(max(distance(run, repetition) for run, repetition in repetitions) > limit):
        raise RuntimeError(message)
    # The difference was rounding; later calls allow for it, up to `_MAX_ROUNDING`.
    largest = _MAX_ROUNDING / torch.finfo(_make_readable(results[0]).dtype).eps
    history.max_run_roundings = max(history.max_run_roundings, min(4 * error, largest))


def distance(tensors: Sequence[Tensor], other_tensors: Sequence[Tensor]) -> float:
    """Return the largest difference of an entry a of ``tensors`` and b of ``other_tensors``.

    It is in units of ε (|a| + median |a|); NaN equals NaN, and infinity equals infinity.
    """
    largest = 0.0
    for a, b in zip(map(_make_readable, tensors), map(_make_readable, other_tensors), strict=True):
        if a.shape != b.shape:
            return torch.inf
        if not torch.equal(a, b):
            magnitude, info = a.abs(), torch.finfo(a.dtype)
            is_equal = (a == b) | (a.isnan() & b.isnan())
            gap = (a - b).abs() / (magnitude + magnitude.nanmedian() + info.tiny) / info.eps
            largest = max(largest, float(torch.where(is_equal, 0, gap.nan_to_num(torch.inf)).max()))
    return largest


def _make_readable(tensor: Tensor) -> Tensor:
    """Return a tensor without its torch.func wrappers and its graph; 16-bit dtypes as float32."""
    return wide(unwrap(tensor.detach()))


# ---- in a graph --------------------------------------------------------------------------------


@contextmanager
def refuse_irreproducible(fn: Function) -> Iterator[None]:
    """Context manager around a traced run of ``fn``: refuse random numbers and writes into buffers.

    Raises:
        RuntimeError: ``fn`` draws random numbers, or is a module and writes into a buffer.
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
    """Return the class of a dispatch mode that refuses random numbers."""

    class NoRandom(torch_private.TorchDispatchMode):  # type: ignore[misc]  # looked up
        def __torch_dispatch__(
            self, func: OpOverload, types: object, args: Args, kwargs: Named | None = None
        ) -> object:
            if draws_random_numbers(func, args, kwargs or {}):
                raise _random_error(f"{func}")
            return func(*args, **(kwargs or {}))

    return NoRandom


def draws_random_numbers(operator: OpOverload, args: Args, kwargs: Named) -> bool:
    """Return whether a call of an operator draws random numbers.

    Operators of attention and recurrent networks are tagged as random, but draw only with dropout.
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = operator._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    values = {**defaults, **dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    is_unset = any(values.get(name) == 0 for name in ("dropout_p", "dropout"))
    return not is_unset and not any(values.get(name) is False for name in ("train", "training"))


def _random_error(source: str) -> RuntimeError:
    """Return the error for a function that draws random numbers from ``source``."""
    return RuntimeError(f"fn draws random numbers ({source}), and runs twice")
