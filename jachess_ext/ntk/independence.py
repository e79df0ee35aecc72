"""Check that the outputs of a sample do not depend on the other samples of its batch.

If a model mixes samples (subtracts a mean over the batch, has a contrastive term or batch
statistics), it has no per-sample kernel.  With random weights w_{n,c}, one more backward pass over
a block gives the cotangents

    Σ_{m,c} w_{m,c} ∂f_{m,c}/∂h_n

where h_n is sample n's row of a recorded call's output.  If no other sample contributes, these are
Σ_c w_{n,c} ∂f_{n,c}/∂h_n, the weighted sum of the backward passes for single outputs; if another
sample contributes, they differ with probability 1, however few samples are mixed.  A difference may
be round-off (of gradients that are zero in exact arithmetic); so a further pass with w_n = 0
decides: it gives sample n exact zeros unless another sample contributes.

The same pass gives the gradients of parameters outside recorded calls, which must equal the
weighted sum of the gradients computed from each sample alone.

Mixing that is detached, or comes before the first parameter, changes the outputs but no gradient:
so the block is run again, once in another order and once as a subset of at most four samples.  If
the samples need several blocks, they are also run all together (`all_samples_gradient`): the
outputs are compared with those of the blocks, and the gradient with the finished kernel, so that
mixing across blocks is found, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .contract import Contribution, Dense, as_real
from .outputs import OutputMap, Samples
from .rounding import PROBED, negligible_norm, norm_of, round_off, tolerance

SEPARATION_SEED = 0x534550
_ROWS_APART = 4


def mixed_samples_error(evidence: str) -> RuntimeError:
    """Return the error to raise if a sample's outputs depend on other samples of its batch."""
    return RuntimeError(
        f"the outputs of a sample depend on the other samples of the batch ({evidence}), so that "
        "they have no kernel; expected a function that treats each sample alone: take what is "
        "computed over the batch (a mean, a contrast, batch statistics) out of it"
    )


def permuted(count: int) -> list[int]:
    """Return a permutation of range(count) without a fixed point (none for count 1)."""
    generator = torch.Generator("cpu").manual_seed(SEPARATION_SEED)
    cycle = torch.randperm(count, generator=generator, device="cpu")
    return cycle.roll(1)[cycle.argsort()].tolist()


def spaced_subset(count: int) -> list[int]:
    """Return the indices of at most four of ``count`` samples, evenly spaced, in descending order.

    They are always fewer than ``count``.
    """
    size = min(_ROWS_APART, count - 1)
    return sorted({round(n * (count - 1) / max(size - 1, 1)) for n in range(size)}, reverse=True)


def compare_batch_compositions(
    outputs: OutputMap, samples: Samples, values: Tensor, subsets: Sequence[list[int]]
) -> None:
    """Run other batches of the samples, and compare their outputs with those of the full batch.

    Args:
        values: outputs f of the full batch, [N, C].
        subsets: indices of the samples in each other batch; empty ones are skipped.

    Raises:
        RuntimeError: the outputs of a sample depend on the other samples.
    """
    for rows in filter(None, subsets):
        with torch.no_grad():
            f = outputs(samples.rows(rows))
        require_same_values(rows, f, values[rows])


def require_same_values(rows: Sequence[int], f: Tensor, expected: Tensor) -> None:
    """Raise RuntimeError if the same samples have different outputs in two batches.

    Args:
        rows: the samples' indices, for the message.
        f, expected: the samples' outputs in the two batches, [n, C] each.
    """
    # Outputs that are 0 in exact arithmetic differ by the rounding of the terms that cancel.
    largest = max(float(expected.abs().max()), torch.finfo(expected.dtype).eps ** 0.5)
    differences = (f - expected).abs().amax(1)
    worst = int(differences.argmax())
    if not float(differences[worst]) <= tolerance(expected.dtype) * largest:
        raise mixed_samples_error(
            f"those of sample {rows[worst]} are {float(differences[worst]):.1e} apart in a batch "
            "of others"
        )


class Separation:
    """Check that samples do not influence each other, by a backward pass over all outputs and one
    for each output.

    The first pass differentiates Σ_{n,c} w_{n,c} f_{n,c} with random weights w; its cotangents are
    added with factor −1, those of the pass of output c with factors w_{n,c}.  If no sample
    influences another, the sum is 0 for every sample and recorded call.  To save memory, only the
    inner product of each cotangent with one random vector is stored.

    Args:
        f: outputs of the block, [n, C].

    Attributes:
        weights: random weights w, [n, C].
    """

    def __init__(self, f: Tensor) -> None:
        # Keys: the call's index within the pass.
        self._vectors: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._sizes: dict[int, float] = {}
        self._gradients: dict[str, Tensor] = {}  # of parameters outside recorded calls
        self._generator = torch.Generator("cpu").manual_seed(SEPARATION_SEED)
        normal = torch.randn(f.shape, generator=self._generator, dtype=torch.float64, device="cpu")
        self.weights = normal.to(f)

    def begin(
        self, f: Tensor, edges: Sequence[GradientEdge], outside: Mapping[str, nn.Parameter]
    ) -> None:
        """Run the backward pass of Σ_{n,c} w_{n,c} f_{n,c}, and add its cotangents with factor −1.

        The gradients of ``outside`` are stored, and f's graph is retained.

        Args:
            edges: see `differentiate`.
            outside: parameters by name whose gradients are not computed from recorded calls.
        """
        ones = torch.ones_like(f[:, 0])
        cotangents = self.differentiate(f, [*edges, *outside.values()], ones)
        self.add(-ones, cotangents[: len(edges)])
        gradients = cotangents[len(edges) :]
        for (name, parameter), gradient in zip(outside.items(), gradients, strict=True):
            dense = torch.zeros_like(parameter) if gradient is None else gradient
            self._gradients[name] = as_real(dense).flatten()

    def require_per_sample_gradients(
        self, per_sample: Mapping[str, Contribution], noise: float
    ) -> None:
        """Check the gradients of parameters outside recorded calls.

        Args:
            per_sample: parameter name -> gradients computed from each sample alone.
            noise: see `Probe`.

        Raises:
            RuntimeError: the block's gradient is not the weighted sum of the per-sample gradients.
        """
        total_norm = sum(norm_of(gradient) ** 2 for gradient in self._gradients.values()) ** 0.5
        noise *= max(1.0, len(self.weights) / PROBED) ** 0.5
        for name, gradient in self._gradients.items():
            dense = per_sample[name]
            assert isinstance(dense, Dense)
            wide = dense.gradients.to(gradient)
            missing = norm_of(gradient - torch.einsum("nc,cnp->p", self.weights, wide))
            if missing > negligible_norm(gradient, total_norm, noise):
                raise mixed_samples_error(
                    f"the gradients of parameter {name!r} that samples have alone do not add up to "
                    "those of the batch"
                )

    def differentiate(
        self, f: Tensor, edges: Sequence[GradientEdge | Tensor], factors: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of Σ_{n,c} factors_n w_{n,c} f_{n,c} with respect to ``edges``.

        Args:
            f: outputs, [n, C], with their graph, which is retained.
            edges: gradient edges of the calls' outputs, [n·s, ...] each, or parameters.
            factors: [n].
        """
        total = (f * self.weights * factors[:, None]).sum()
        inputs = cast(Sequence[Tensor], edges)  # torch's stub knows no list of edges and tensors
        return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)

    def add(self, factors: Tensor, cotangents: Sequence[Tensor | None]) -> None:
        """Add the cotangents of one backward pass to the weighted sums.

        Args:
            factors: factor a_n of each sample in this pass, [n].
            cotangents: cotangent of each recorded call's output, [n·s, ...]; None: zero.
        """
        for call_index, cotangent in enumerate(cotangents):
            if cotangent is None or not cotangent.numel():
                continue
            rows = as_real(cotangent).reshape(len(factors), -1)
            dtype = rows.dtype if rows.dtype == torch.float64 else torch.float32
            if call_index not in self._vectors:
                vector = torch.randn(rows.shape[1], generator=self._generator, device="cpu")
                self._vectors[call_index] = vector.to(rows)
            product = (rows @ self._vectors[call_index]).to(dtype) * factors.to(dtype)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=dtype) * factors.to(dtype).abs()
            self._sums[call_index] = self._sums.get(call_index, 0.0) + product
            self._sizes[call_index] = max(self._sizes.get(call_index, 0.0), float(norms.max()))

    def suspects(self) -> set[int]:
        """Return the indices of samples whose weighted sum exceeds round-off: other samples may
        contribute to their cotangents."""
        dtype, samples = self.weights.dtype, set()
        least_sum = round_off(dtype) * max(self._sizes.values(), default=0.0)
        for call, sum_of_passes in self._sums.items():
            limit = max(tolerance(dtype) * self._sizes[call], least_sum)
            if float(sum_of_passes.abs().max()) > limit:  # NaN is refused elsewhere
                samples.add(int(sum_of_passes.abs().argmax()))
        return samples

    def require(self, f: Tensor, edges: Sequence[GradientEdge], suspects: set[int]) -> None:
        """Raise RuntimeError if another sample contributes to the cotangents of a suspect.

        Args:
            f: outputs, [n, C], with their graph, which is retained.
            edges: gradient edges of the recorded calls' outputs.
            suspects: see `suspects`.
        """
        for sample in suspects:
            factors = torch.ones_like(f[:, 0])
            factors[sample] = 0.0
            for cotangent in self.differentiate(f, edges, factors):
                if cotangent is None or not cotangent.numel():
                    continue
                rows = as_real(cotangent).reshape(len(factors), -1).double()
                if bool((rows[sample].abs() > 0).any()):
                    share = float(rows[sample].norm() / rows.norm())
                    raise mixed_samples_error(
                        f"{100 * share:.1f} % of a gradient are another sample's"
                    )
