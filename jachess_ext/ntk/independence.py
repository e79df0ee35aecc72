"""Check that each sample has outputs of its own.

Where samples are mixed (a mean over the batch taken away, a contrast, batch statistics) there is
no kernel to speak of.  With random weights w_{n,c}, one more backward pass over a block gives the
cotangents

    Σ_{m,c} w_{m,c} ∂f_{m,c}/∂h_n

of what every recorded call makes of sample n.  Where no other sample contributes, these are
Σ_c w_{n,c} ∂f_{n,c}/∂h_n, the weighted sum of the passes over single outputs; where another does,
they are not, with probability 1, however few samples are mixed and however far apart they are.
A difference may be round-off (of gradients that are zero in exact arithmetic); so a further pass
with w_n = 0 decides: it gives sample n exact zeros unless another contributes.

The same pass gives the gradients of parameters outside recorded calls, which have to be the
weighted sum of those that samples have alone.

Mixing that is detached, or comes before the first parameter, shows in the values only: the
samples are run again in other company, once all in another order, and a few without the rest.
Where not all are in one block, all together (`in_company`) are the other company of each block:
their values are held against the blocks', and their gradient against the finished kernel, so that
no mixing goes unseen in small blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .contract import Contribution, Dense, as_real
from .outputs import OutputMap, Samples
from .rounding import PROBED, negligible, norm_of, round_off, tolerance

SEPARATION_SEED = 0x534550
_ROWS_APART = 4


def mixed_samples(evidence: str) -> RuntimeError:
    return RuntimeError(
        f"the outputs of a sample depend on the other samples of the batch ({evidence}), so that "
        "they have no kernel; expected a function that treats each sample alone: take what is "
        "computed over the batch (a mean, a contrast, batch statistics) out of it"
    )


def shuffled(count: int) -> list[int]:
    """Return samples in another order, each in the place of another one."""
    generator = torch.Generator("cpu").manual_seed(SEPARATION_SEED)
    cycle = torch.randperm(count, generator=generator, device="cpu")
    return cycle.roll(1)[cycle.argsort()].tolist()


def apart(count: int) -> list[int]:
    """Return the last of ``count`` samples, the first and two between, or fewer than all."""
    few = min(_ROWS_APART, count - 1)
    return sorted({round(n * (count - 1) / max(few - 1, 1)) for n in range(few)}, reverse=True)


def compare_companies(
    outputs: OutputMap, samples: Samples, values: Tensor, companies: Sequence[list[int]]
) -> None:
    """Compare the outputs of all samples, f [N, C], with those in other company.

    Raises:
        RuntimeError: the outputs of a sample depend on the others.
    """
    for company in companies:
        if company:
            with torch.no_grad():
                f = outputs(samples.rows(company))
            require_same_values(company, f, values[company])


def require_same_values(rows: Sequence[int], f: Tensor, others: Tensor) -> None:
    """Raise RuntimeError where outputs of samples in one company differ from those in another.

    Args:
        rows: which samples.
        f, others: [n, C].
    """
    # Outputs that are 0 in exact arithmetic differ by the rounding of what cancelled in them.
    largest = max(float(others.abs().max()), torch.finfo(others.dtype).eps ** 0.5)
    differences = (f - others).abs().amax(1)
    worst = int(differences.argmax())
    if not float(differences[worst]) <= tolerance(others.dtype) * largest:
        raise mixed_samples(
            f"those of sample {rows[worst]} are {float(differences[worst]):.1e} apart in a batch "
            "of others"
        )


class Separation:
    """Weighted sum of backward passes over a graph, which is 0 unless samples are mixed.

    With cotangents δ_k and weights a_k of pass k, Σ_k a_{k,n} δ_{k,n} should be 0 for every sample
    n and recorded call, outputs f [n, C].  A random product of each sample's cotangents is kept.
    """

    def __init__(self, f: Tensor) -> None:
        # By the call's number.
        self._vectors: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._sizes: dict[int, float] = {}
        self._outside: dict[str, Tensor] = {}
        self._generator = torch.Generator("cpu").manual_seed(SEPARATION_SEED)
        normal = torch.randn(f.shape, generator=self._generator, dtype=torch.float64, device="cpu")
        self.weights = normal.to(f)

    def begin(
        self, f: Tensor, edges: Sequence[GradientEdge], outside: Mapping[str, nn.Parameter]
    ) -> None:
        """Take the pass over all samples; f's graph is kept.

        Args:
            edges: as `differentiate` takes them.
            outside: parameters whose gradients no recorded call gives.
        """
        ones = torch.ones_like(f[:, 0])
        cotangents = self.differentiate(f, [*edges, *outside.values()], ones)
        self.add(-ones, cotangents[: len(edges)])
        gradients = cotangents[len(edges) :]
        for (name, parameter), gradient in zip(outside.items(), gradients, strict=True):
            whole = torch.zeros_like(parameter) if gradient is None else gradient
            self._outside[name] = as_real(whole).flatten()

    def require_alone(self, alone: Mapping[str, Contribution], noise: float) -> None:
        """Raise RuntimeError where parameters outside of calls have other gradients in the block.

        Args:
            alone: their gradients, each sample's by itself.
            noise: as of `Probe`.
        """
        whole = sum(norm_of(gradient) ** 2 for gradient in self._outside.values()) ** 0.5
        noise *= max(1.0, len(self.weights) / PROBED) ** 0.5
        for name, gradient in self._outside.items():
            part = alone[name]
            assert isinstance(part, Dense)
            wide = part.gradients.to(gradient)
            missing = norm_of(gradient - torch.einsum("nc,cnp->p", self.weights, wide))
            if missing > negligible(gradient, whole, noise):
                raise mixed_samples(
                    f"the gradients of parameter {name!r} that samples have alone do not add up to "
                    "those of the batch"
                )

    def differentiate(
        self, f: Tensor, edges: Sequence[GradientEdge | Tensor], factors: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the cotangents of Σ_{n,c} factors_n w_{n,c} f_{n,c} at the calls' outputs.

        Args:
            f: with its graph, which is kept.
            edges: of the calls' outputs, [n·s, ...] each, or parameters.
            factors: [n].
        """
        total = (f * self.weights * factors[:, None]).sum()
        inputs = cast(Sequence[Tensor], edges)  # torch's stub knows no list of edges and tensors
        return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)

    def add(self, times: Tensor, cotangents: Sequence[Tensor | None]) -> None:
        """Add a pass.

        Args:
            times: a, [n].
            cotangents: of each call; None: zero.
        """
        for call, cotangent in enumerate(cotangents):
            if cotangent is None or not cotangent.numel():
                continue
            rows = as_real(cotangent).reshape(len(times), -1)
            wide = rows.dtype if rows.dtype == torch.float64 else torch.float32
            if call not in self._vectors:
                vector = torch.randn(rows.shape[1], generator=self._generator, device="cpu")
                self._vectors[call] = vector.to(rows)
            product = (rows @ self._vectors[call]).to(wide) * times.to(wide)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide) * times.to(wide).abs()
            self._sums[call] = self._sums.get(call, 0.0) + product
            self._sizes[call] = max(self._sizes.get(call, 0.0), float(norms.max()))

    def suspects(self) -> set[int]:
        """Return samples to which others seem to contribute: they may, or it is rounding."""
        dtype, samples = self.weights.dtype, set()
        least = round_off(dtype) * max(self._sizes.values(), default=0.0)
        for call, sum_of_passes in self._sums.items():
            limit = max(tolerance(dtype) * self._sizes[call], least)
            if float(sum_of_passes.abs().max()) > limit:  # NaN has an error of its own
                samples.add(int(sum_of_passes.abs().argmax()))
        return samples

    def require(self, f: Tensor, edges: Sequence[GradientEdge], suspects: set[int]) -> None:
        """Raise RuntimeError where other samples contribute to one of the suspects."""
        for sample in suspects:
            factors = torch.ones_like(f[:, 0])
            factors[sample] = 0.0
            for cotangent in self.differentiate(f, edges, factors):
                if cotangent is None or not cotangent.numel():
                    continue
                rows = as_real(cotangent).reshape(len(factors), -1).double()
                if bool((rows[sample].abs() > 0).any()):
                    share = float(rows[sample].norm() / rows.norm())
                    raise mixed_samples(f"{100 * share:.1f} % of a gradient are another sample's")
