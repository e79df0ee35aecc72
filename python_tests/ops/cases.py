"""Inputs, and oracles that share no code with the operators, for the operator tests."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# (q, number of streams): first order and all pairs; for q = 1 both are two streams
STREAMS = [(1, 2), (2, 3), (2, 4), (3, 4), (3, 7), (4, 5), (4, 11)]
# One body runs on every device; `-m cuda` picks the runs on a GPU.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
STREAMS_AND_DTYPES = [
    *((2, 4, dtype) for dtype in DTYPES),
    *((q, streams, torch.float32) for q, streams in STREAMS if streams != 4),
]
"""Each dtype, and each number of streams, at least once."""
# torch's own form of every kind of activation
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": F.softplus,
    "elu": F.elu,
    "mish": F.mish,
    "sin": torch.sin,
    "cos": torch.cos,
    "exp": torch.exp,
}
# Whether a backward operator is traced with its derivative and unknown sizes, which takes seconds
TRACED = [False, pytest.param(True, marks=pytest.mark.slow)]


def opcheck_backward(operator: Any, arguments: tuple[Any, ...], traced: bool) -> None:
    """Try a backward operator's schema, registration and fake tensors, or all that torch tries."""
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, arguments, **({} if traced else {"test_utils": quick}))


def dtype_bounds(float64: float) -> list[tuple[torch.dtype, float]]:
    """Each dtype with the relative error allowed against the reference in float64."""
    return [
        (torch.float64, float64),
        (torch.float32, 1e-5),
        (torch.bfloat16, 2e-2),
        (torch.float16, 2e-3),
    ]


def random_jet(
    streams: int,
    *shape: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
) -> Tensor:
    """A jet [streams, *shape] of normal numbers, the same for every dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(streams, *shape, generator=generator, dtype=torch.float64)
    return x.to(device, dtype)


def away_from_kink(x: Tensor, kind: str) -> Tensor:
    """Keep the primal of relu and elu at least 0.05 from the kink, where no derivative exists."""
    if kind in ("relu", "elu"):
        x[0] = x[0].sign() * x[0].abs().clamp_min(0.05)
    return x


def jet_by_differences(
    f: Callable[[Tensor], Tensor], x: Tensor, q: int, step: float = 2e-3
) -> Tensor:
    """The jet of f along x's curve, by central finite differences in float64.

    The streams of x are Taylor coefficients of the surface
    X(s) = x_0 + Σ s_i x_i + Σ_{i<j} s_i s_j x_ij, so y_i = ∂f(X)/∂s_i and y_ij = ∂²f(X)/∂s_i∂s_j
    at s = 0. Fourth-order stencils: the error is O(step⁴).
    """
    pairs = [(i, j) for i in range(q) for j in range(i + 1, q)] if x.shape[0] > 1 + q else []
    stencil = {-2: 1 / 12, -1: -2 / 3, 1: 2 / 3, 2: -1 / 12}

    def at(steps: Sequence[float]) -> Tensor:
        point = x[0].clone()
        for i in range(q):
            point += steps[i] * x[1 + i]
        for p, (i, j) in enumerate(pairs):
            point += steps[i] * steps[j] * x[1 + q + p]
        return f(point)

    def unit(i: int, a: float, j: int = -1, b: float = 0.0) -> list[float]:
        steps = [0.0] * q
        steps[i] += a * step
        if j >= 0:
            steps[j] += b * step
        return steps

    streams = [f(x[0])]
    for i in range(q):
        streams.append(sum(w * at(unit(i, a)) for a, w in stencil.items()) / step)
    for i, j in pairs:
        terms = (
            w * v * at(unit(i, a, j, b)) for a, w in stencil.items() for b, v in stencil.items()
        )
        streams.append(sum(terms) / step**2)
    return torch.stack(streams)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest error relative to the largest expected magnitude, per stream; the worst stream.

    Infinite where either holds a NaN or an infinity: a NaN would be lost in ``max`` of numbers.
    """
    assert got.shape == expected.shape, "a difference would broadcast"
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    size = expected.abs().reshape(len(expected), -1).amax(1).clamp_min(1e-12)
    errors = (got - expected).abs().reshape(len(got), -1).amax(1) / size
    return float(errors.nan_to_num(nan=math.inf, posinf=math.inf).max())


def add_score_products(
    gradients: Sequence[Tensor], p: Tensor, gs: Tensor, query: Tensor, key: Tensor, gy: Tensor
) -> None:
    """Add to the gradients [S, tokens, size] of a head's query, key and value what weights p and
    scores' gradients gs [S, T, Tk] make of them; the bits of a stream's number are directions."""
    p, gs, query, key, gy = (x.detach().double() for x in (p, gs, query, key, gy))
    for i, j in itertools.product(range(len(p)), repeat=2):
        if i & j == 0 and i | j < len(p):
            gradients[0][i] += gs[i | j] @ key[j]
            gradients[1][j] += gs[i | j].mT @ query[i]
            gradients[2][j] += p[i].mT @ gy[i | j]


class LargestTensor(TorchDispatchMode):
    """Records the elements and the bytes of the largest tensors that operators returned."""

    elements = bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.numel())
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return results


def same_for_any_threads(run: Callable[[], Sequence[Tensor]]) -> bool:
    """Whether the results are the same bits run to run, and for any number of threads."""
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    return all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )
