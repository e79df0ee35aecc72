"""Results lie in memory as torch's own do: the same strides, and the same numbers shared.

Torch's own samples of its operators are called on plain tensors and on jets that lie in memory in
several ways, contiguous or not.  Then the result is written into, or the argument, and everything
is compared with what plain torch gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from jachess_ext.jet import MissingJetRule, composed_rules

from . import operators


def contiguous(tensor: Any) -> Any:
    return tensor.clone(memory_format=torch.contiguous_format)


def transposed(tensor: Any) -> Any:
    """The same numbers, the first dimension innermost in memory."""
    if tensor.ndim < 2:
        return tensor.clone()
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def sliced(tensor: Any) -> Any:
    """The same numbers, every other one of a memory twice as large."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def narrowed(tensor: Any) -> Any:
    """The same numbers in the front half of the memory: contiguous, but with others behind."""
    return torch.cat([tensor, tensor])[: len(tensor)] if tensor.ndim else tensor.clone()


def expanded(tensor: Any) -> Any:
    """The first row for every row."""
    return tensor[:1].expand(tensor.shape) if tensor.ndim else tensor.clone()


ARRANGEMENTS = (contiguous, transposed, sliced, narrowed, expanded)


class Program:
    """A call whose arguments are arranged in memory, and what is written afterwards.

    Attributes:
        strides: of each result of the last run, before anything was written.
    """

    def __init__(self, call: operators.Call, arrange: Callable, written: str) -> None:
        self.call, self.arrange, self.written = call, arrange, written
        self.strides: list[tuple[int, ...]] = []

    def __call__(self, *points: Any) -> tuple[Any, ...]:
        arranged = [self.arrange(point) for point in points]
        results = list(self.call(*arranged))
        self.strides = [_meaningful(result) for result in results]
        if self.written == "results":
            for result in results:
                result.mul_(2)
        elif self.written == "arguments":
            for argument in arranged:
                argument.mul_(2)
        return *results, *arranged


def _meaningful(tensor: Any) -> tuple[int, ...]:
    """The strides of sizes above 1."""
    if 0 in tensor.shape:
        return ()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in pairs if size != 1)


def compare(program: Program, points: tuple[Tensor, ...]) -> str | None:
    """What differs between a jet's run and plain torch's; None where nothing does."""
    try:
        expected = program(*[point.clone() for point in points])
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # torch refuses the write, or the call
    strides = program.strides
    directions = tuple(torch.ones(1, *point.shape, dtype=point.dtype) for point in points)
    try:
        jets = jx.jet(program, points, directions, order=1)
    except MissingJetRule:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if program.strides != strides:
        return f"strides {program.strides}; torch's are {strides}"
    for place, (jet, plain) in enumerate(zip(jets, expected, strict=True)):
        if not torch.allclose(jet.primal, plain, rtol=1e-6, atol=1e-9, equal_nan=True):
            return f"numbers of output {place}"
    return None


def differences(op: Any, limit: int | None) -> Iterator[str]:
    """Every difference among an operator's samples."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for number, call in enumerate(operators.calls(op, limit)):
            if call.strided or not all(point.isfinite().all() for point in call.points):
                continue
            for arrange in ARRANGEMENTS:
                for written in ("nothing", "results", "arguments"):
                    for rules in (nullcontext, composed_rules):
                        with rules():
                            found = compare(Program(call, arrange, written), call.points)
                        if found is not None:
                            yield f"sample {number}, {arrange.__name__}, {written}: {found}"


@cache
def named() -> dict[str, Any]:
    return {operators.title(op): op for op in operators.operators()}


QUICK = """
    add amax cat clone contiguous cumsum einsum flatten gather index_select masked.sum masked_fill
    matmul max.reduction_no_dim max.reduction_with_dim mean mul nn.functional.gelu
    nn.functional.layer_norm nn.functional.linear nn.functional.pad.constant positive real repeat
    roll sum tanh to where
""".split()  # noqa: SIM905  a list takes a line each


@pytest.mark.parametrize("name", QUICK)
def test_results_lie_in_memory_as_torchs(name: str) -> None:
    assert list(differences(named()[name], limit=2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_results_of_every_operator(part: int) -> None:
    chosen = list(named().items())[part::8]
    assert {name: found for name, op in chosen if (found := list(differences(op, limit=3)))} == {}


TWO_TENSORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "broadcast_tensors": torch.broadcast_tensors,
    "meshgrid": lambda a, b: torch.meshgrid(a[0], b[0], indexing="ij"),
    "atleast_2d": torch.atleast_2d,
    "atleast_3d": torch.atleast_3d,
    "cosine_similarity": lambda a, b: [torch.nn.functional.cosine_similarity(a, b, dim=-1)],
    "expand_as": lambda a, b: [a[:1].expand_as(b)],
    "where": lambda a, b: [torch.where(a > b, a, b)],
}


@pytest.mark.parametrize("function", TWO_TENSORS.values(), ids=TWO_TENSORS)
def test_arguments_that_share_memory_are_not_taken_for_others(function: Any) -> None:
    """How torch lays out a result is remembered; not for tensors that share memory otherwise."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        both = torch.stack([x.sin(), x.cos()])
        tensors = [x * 2, both[0], both[1], x.tanh(), torch.nn.functional.gelu(x)]
        calls = [(a, a) for a in tensors] + list(permutations(tensors, 2))
        return tuple(part * k for k, call in enumerate(calls, 1) for part in function(*call))

    x, u = torch.randn(2, 3, 4, dtype=torch.float64)
    step = 1e-5
    ahead, behind = program(x + step * u), program(x - step * u)
    for jet, value, up, down in zip(
        jx.jet(program, x, u[None]), program(x), ahead, behind, strict=True
    ):
        torch.testing.assert_close(jet.primal, value)
        torch.testing.assert_close(jet.first[0], (up - down) / (2 * step), rtol=1e-6, atol=1e-8)
