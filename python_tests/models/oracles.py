"""Derivatives by means that share nothing with the engine: differences and repeated backward.

Nested ``torch.func.jvp`` is no oracle: it is wrong in silence through ``layer_norm``
(docs/how_it_works.md, traps).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Tensors = Sequence[Tensor]
Function = Callable[[Tensor], Tensors]

LEVELS = 3


@dataclass(frozen=True)
class Steps:
    """The smallest steps of the first and of the mixed differences; the others are 2h and 4h.

    Round-off grows as 1/h (first) and 1/h² (mixed), truncation as h⁶.
    """

    first: float
    mixed: float


SMOOTH = Steps(5e-4, 6e-4)
KINKED = Steps(1e-5, 1e-4)  # between kinks only the attention and the norms are curved


def _extrapolated(estimates: list[list[Tensor]]) -> list[Tensor]:
    """Richardson: estimates at steps h, 2h, 4h with even error terms, each removed in turn."""
    order = 2
    while len(estimates) > 1:
        factor = 2.0**order
        estimates = [
            [(factor * fine - coarse) / (factor - 1) for fine, coarse in zip(a, b, strict=True)]
            for a, b in pairwise(estimates)
        ]
        order += 2
    return estimates[0]


def first_difference(
    function: Function, x: Tensor, u: Tensor, steps: Steps = SMOOTH
) -> list[Tensor]:
    """J u of every output: central differences, extrapolated to O(h⁶)."""

    def central(h: float) -> list[Tensor]:
        pairs = zip(function(x + h * u), function(x - h * u), strict=True)
        return [(plus - minus) / (2 * h) for plus, minus in pairs]

    with torch.no_grad():
        return _extrapolated([central(steps.first * 2**level) for level in range(LEVELS)])


def mixed_difference(
    function: Function, x: Tensor, u: Tensor, w: Tensor, steps: Steps = SMOOTH
) -> list[Tensor]:
    """D²f[u, w] of every output: the four-point mixed difference, extrapolated to O(h⁶)."""

    def central(h: float) -> list[Tensor]:
        corners = [function(x + a * h * u + b * h * w) for a in (1, -1) for b in (1, -1)]
        return [(pp - pm - mp + mm) / (4 * h * h) for pp, pm, mp, mm in zip(*corners, strict=True)]

    with torch.no_grad():
        return _extrapolated([central(steps.mixed * 2**level) for level in range(LEVELS)])


def differences_along(
    function: Function, x: Tensor, u: Tensor, step: float
) -> tuple[list[Tensor], list[Tensor]]:
    """J u and D²f[u, u] of every output: central differences, extrapolated to O(h⁴)."""
    first, second = [], []
    with torch.no_grad():
        centre = function(x)
        for h in (step, 2 * step):
            triples = [*zip(function(x + h * u), centre, function(x - h * u), strict=True)]
            first.append([(plus - minus) / (2 * h) for plus, _, minus in triples])
            second.append([(plus - 2 * at + minus) / (h * h) for plus, at, minus in triples])
    return _extrapolated(first), _extrapolated(second)


@dataclass(frozen=True)
class Differences:
    """Of every output, what belongs to directions u_i: ``[directions or pairs, ...]``.

    Attributes:
        first: J u_i.
        squares: D²f[u_i, u_i].
        pairs: D²f[u_i, u_j] of i < j, from the squares along sums of directions.
    """

    first: Tensor
    squares: Tensor
    pairs: Tensor


def jet_differences(
    function: Function, x: Tensor, directions: Tensor, step: float
) -> list[Differences]:
    """The differences of every output along directions ``[q, ...]``."""
    along = [differences_along(function, x, u, step) for u in directions]
    pairs = [*combinations(range(len(directions)), 2)]
    sums = [
        differences_along(function, x, directions[i] + directions[j], step)[1] for i, j in pairs
    ]
    outputs = []
    for n in range(len(along[0][0])):
        squares = torch.stack([second[n] for _, second in along])
        mixed = [
            (s[n] - squares[i] - squares[j]) / 2 for s, (i, j) in zip(sums, pairs, strict=True)
        ]
        first = torch.stack([first[n] for first, _ in along])
        outputs.append(Differences(first, squares, torch.stack(mixed)))
    return outputs


def reach(u: Tensor, w: Tensor, steps: Steps) -> list[Tensor]:
    """The outermost displacements from x at which the differences evaluate the function."""
    first, mixed = steps.first * 2 ** (LEVELS - 1), steps.mixed * 2 ** (LEVELS - 1)
    corners = [a * mixed * u + b * mixed * w for a in (1, -1) for b in (1, -1)]
    return corners + [sign * first * d for d in (u, w) for sign in (1, -1)]


def reverse_over_reverse(
    function: Function, x: Tensor, u: Tensor, w: Tensor, cotangents: Tensors
) -> tuple[list[Tensor], list[Tensor]]:
    """``v · J u`` and ``v · D²f[u, w]`` of every output, by ``torch.autograd.grad`` twice.

    Args:
        cotangents: one v for each output, of its shape.

    Returns:
        Two lists of scalars, one for each output.
    """
    x = x.detach().requires_grad_()
    first, second = [], []
    for output, v in zip(function(x), cotangents, strict=True):
        (gradient,) = torch.autograd.grad((v * output).sum(), x, create_graph=True)
        along_u = (gradient * u).sum()
        first.append(along_u.detach())
        if not along_u.requires_grad:  # the output is linear in x
            second.append(torch.zeros_like(along_u))
            continue
        (product,) = torch.autograd.grad(along_u, x, retain_graph=True, materialize_grads=True)
        second.append((product * w).sum())
    return first, second


class Float64Casts(TorchFunctionMode):
    """Within this mode a model's own casts to float32 are casts to float64.

    RMS norms, softmaxes and rotary embeddings of transformers compute in float32 whatever the
    model's dtype, which would limit a comparison in float64 to 1e-7 of round-off times 1/h².
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args = tuple(_widened(value) for value in args)
        named = {key: _widened(value) for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*args, **named)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value == torch.float32 else value


@contextmanager
def recorded_kinks() -> Iterator[list[Tensor]]:
    """Collect the sign pattern of every ReLU's input and the choice of every ``topk`` (the routing
    of a mixture of experts) evaluated within the context, in order."""
    patterns: list[Tensor] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            if func in (F.relu, torch.relu, torch.Tensor.relu):
                patterns.append((args[0] > 0).clone())
            result = func(*args, **(kwargs or {}))
            if func in (torch.topk, torch.Tensor.topk):
                patterns.append(result.indices.clone())
            return result

    with Recorder():
        yield patterns


def crosses_a_kink(function: Function, x: Tensor, displacements: Tensors) -> bool:
    """Whether any ReLU or routing changes side between x and one of the displaced points."""

    def pattern(point: Tensor) -> list[Tensor]:
        with torch.no_grad(), recorded_kinks() as patterns:
            function(point)
        assert patterns, "the model is said to have kinks, but none was met"
        return patterns

    here = pattern(x)
    return any(
        not torch.equal(a, b)
        for displacement in displacements
        for a, b in zip(here, pattern(x + displacement), strict=True)
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ (both zero: 0; infinite with a NaN anywhere)."""
    assert actual.shape == expected.shape, "a difference would broadcast"
    scale = expected.norm().item()
    error = (actual - expected).norm().item()
    relative = error / scale if scale else error
    return math.inf if math.isnan(relative) else relative


def parameter_difference(
    value: Callable[[], Tensor], displaced: Sequence[tuple[nn.Parameter, Tensor]], step: float
) -> float:
    """d value / ds along ``parameter + s · displacement``, central and extrapolated to O(h⁶)."""
    originals = [parameter.detach().clone() for parameter, _ in displaced]

    def at(s: float) -> Tensor:
        for (parameter, displacement), original in zip(displaced, originals, strict=True):
            parameter.copy_(original + s * displacement)
        return value()

    with torch.no_grad():
        steps = [step * 2**level for level in range(LEVELS)]
        out = _extrapolated([[(at(h) - at(-h)) / (2 * h)] for h in steps])
        at(0.0)
    return out[0].item()


def math_attention() -> AbstractContextManager[object]:
    """Return the context in which torch's attention is written out, and differentiable anyhow."""
    return sdpa_kernel(SDPBackend.MATH)
