"""Form C: a random sketch of a linear layer's per-sample gradients.

With G_{n,c} = Σ_t δ_{n,c,t} a_{n,t}ᵀ ∈ R^{e×d}, and k columns ω_j ∈ {±1}^d of one sign matrix Ω
that serves every sample,

    K̂[c, n, c', m] = (1/k) ⟨G_{n,c} Ω, G_{m,c'} Ω⟩ = (1/k) Σ_j ω_jᵀ (G_{n,c}ᵀ G_{m,c'}) ω_j

(or Ωᵀ G, where e > d: the wider side is sketched).  This is Hutchinson's estimator of the trace of
G_{n,c}ᵀ G_{m,c'}: unbiased, and with S the symmetric part of that matrix

    Var K̂[c, n, c', m] = (2/k) Σ_{i≠j} S_ij².

Layers are sketched independently, so that their variances add up.  K̂ is a Gram matrix itself, hence
positive semidefinite.  GΩ = Σ_t δ (Ωᵀa)ᵀ costs k/d of G, and so does the product of two.

The error is measured, too: the halves K₁ and K₂ of the columns are independent, K̂ = (K₁ + K₂)/2,
and E‖(K₁ − K₂)/2‖² = E‖K̂ − K‖² (Frobenius norms).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .contributions import Factors
from .cost import Size


@dataclass(frozen=True)
class Sketch:
    """What is sketched, and how.

    Attributes:
        size: k, an even number of columns.
        seed: of the signs, with the parameter's name; the same on both sides and in every block.
        names: the parameters; None: those where it saves work (for planning).
    """

    size: int
    seed: int
    names: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 2:
            raise ValueError(f"sketch_size is {self.size!r}; expected an even number from 2 up")
        if self.size % 2:
            raise ValueError(
                f"sketch_size is {self.size}; expected an even number (its halves give the error)"
            )

    def serves(self, names: tuple[str, ...], size: Size, exact_flops: float) -> bool:
        """Whether layers with the same inputs are to be sketched."""
        if self.names is not None:
            return set(names) <= self.names
        return sketch_flops(size, self.size) < exact_flops

    def signs(self, name: str, width: int, like: Tensor) -> Tensor:
        """Ω/√(k/2), [width, k]: each half of the columns alone is unbiased."""
        # torch's CPU generator heeds 32 bits of its seed: both are hashed into them.
        key = zlib.crc32(f"{self.seed} {name}".encode())
        generator = torch.Generator().manual_seed(key)
        signs = torch.randint(0, 2, (width, self.size), generator=generator) * 2 - 1
        return signs.to(like) * (2 / self.size) ** 0.5

    def product(self, name: str, left: Tensor, right: Tensor, transposed: bool) -> float:
        """⟨GΩ, G'Ω⟩/k for two whole gradients of one parameter: what the sketch makes of them.

        Args:
            left, right: of the parameter's shape, [e, d], or [d, e] where ``transposed``.
        """

        def seen(gradient: Tensor) -> Tensor:
            g = gradient.double() if gradient.itemsize != 4 else gradient
            g = g.T if transposed else g
            g = g.T if g.shape[0] > g.shape[1] else g
            return (g @ self.signs(name, g.shape[1], g)).flatten()

        x = seen(left)
        return float(torch.dot(x, x if right is left else seen(right))) / 2


def sketch_flops(size: Size, columns: int) -> float:
    """Counted operations of form C (compare `cost.count_cost`)."""
    wide, narrow = max(size.inputs, size.cotangents), min(size.inputs, size.cotangents)
    rows = size.samples * size.positions
    vectors = size.samples
    pairs = size.samples * size.other_samples * size.outputs**2
    if not size.symmetric:
        rows += size.other_samples * size.other_positions
        vectors += size.other_samples
    project = 2 * rows * wide * columns * (1 if wide == size.inputs else size.outputs)
    share = 0.5 if size.symmetric else 1.0
    return (
        project
        + 2 * rows * size.outputs * narrow * columns
        + share * 2 * pairs * narrow * columns
        + 2 * vectors * size.outputs * narrow * columns
    )


def contract_sketched(
    name: str,
    left: Factors,
    right: Factors,
    symmetric: bool,
    sketch: Sketch,
    dtype: torch.dtype,
) -> tuple[Tensor, float]:
    """(K̂ [C, N, C, M] of ``dtype``, ‖(K₁ − K₂)/2‖²); ``symmetric`` says that right is left."""
    outputs, count = left.cotangents.shape[:2]
    other_count = right.cotangents.shape[1]
    x = _sketched(name, left, sketch, dtype)
    y = x if symmetric else _sketched(name, right, sketch, dtype)
    halves = torch.bmm(x, y.transpose(1, 2))  # [2, n C, m C]
    kernel = halves.mean(0).view(count, outputs, other_count, outputs).permute(1, 0, 3, 2)
    return kernel, float((halves[0] - halves[1]).double().square().sum()) / 4


def _sketched(name: str, factors: Factors, sketch: Sketch, dtype: torch.dtype) -> Tensor:
    """GΩ (or ΩᵀG), [2, n C, narrow · k/2]: the halves of the columns apart."""
    a, delta = factors.inputs.to(dtype), factors.cotangents.to(dtype)
    outputs, count, positions, e = delta.shape
    if e > a.shape[-1]:
        delta = delta @ sketch.signs(name, e, a)
    else:
        a = a @ sketch.signs(name, a.shape[-1], a)
    # [n, C k, t] @ [n, t, d], or [n, C e, t] @ [n, t, k]
    rows = delta.permute(1, 0, 3, 2).reshape(count, -1, positions)
    product = torch.bmm(rows, a).view(count * outputs, delta.shape[-1], a.shape[-1])
    if e > factors.inputs.shape[-1]:
        product = product.transpose(1, 2)
    half = sketch.size // 2
    parts = product.unflatten(2, (2, half)).permute(2, 0, 1, 3)
    return parts.reshape(2, count * outputs, -1)
