"""Whether each sample of a batch has outputs of its own: where samples are mixed (a mean over the
batch taken away, a contrast, batch statistics) there is no kernel to speak of.

With random weights w_{n,c}, one more backward pass over a block gives the cotangents

    Σ_{m,c} w_{m,c} ∂f_{m,c}/∂h_n

of what every recorded call makes of sample n.  Where no other sample contributes, these are
Σ_c w_{n,c} ∂f_{n,c}/∂h_n, the weighted sum of the passes over single outputs; where another does,
they are not, with probability 1, however few samples are mixed and however far apart they are.
What looks different may be round-off (of gradients that are zero in exact arithmetic); so it is
held against a pass with w_n = 0, which gives sample n exact zeros unless another contributes.

What is detached, or mixed before the first parameter, shows in the values: the block is run again
in other batches, so that any two of its samples are apart once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .outputs import OutputMap
from .samples import Samples

_SEED = 0x534550
# Relative error of values computed another way, far above round-off (that of float32 even in
# float64 models: transformers' softmax and norms often compute in float32) and below what a
# missing call would leave.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_TOLERANCE_16 = 0.1
_SMALL = 0.3  # times √eps


def tolerance(dtype: torch.dtype) -> float:
    """Relative error that is round-off at most."""
    return _TOLERANCE.get(dtype, _TOLERANCE_16)


def round_off(dtype: torch.dtype) -> float:
    """The share of a whole gradient below which one of its parts may be round-off alone; it
    changes the kernel by less than eps."""
    return _SMALL * torch.finfo(dtype).eps ** 0.5


def mixed_samples(evidence: str) -> RuntimeError:
    """The error for a model that mixes the samples of a batch."""
    return RuntimeError(
        f"the outputs of a sample depend on the other samples of the batch ({evidence}), so that "
        "they have no kernel; expected a function that treats each sample alone: take what is "
        "computed over the batch (a mean, a contrast, batch statistics) out of it"
    )


def require_same_values(
    outputs: OutputMap, samples: Samples, rows: Sequence[int], together: Tensor
) -> None:
    """Hold the outputs of a block, f [n, C], against those of the same samples in other batches.

    Two passes over the block, in √n parts each: n = g² samples as a square, by rows and by columns,
    so that any two samples are apart in one of them; in reverse order.

    Raises:
        RuntimeError: the outputs of a sample depend on the others.
    """
    count = len(rows)
    size = math.ceil(math.sqrt(count))
    places = list(range(count))[::-1]
    parts = [places[start::size] for start in range(size)]
    parts += [places[start : start + size] for start in range(0, count, size)]
    limit = tolerance(together.dtype) * float(together.abs().max())
    for part in parts if count > 1 else []:
        with torch.no_grad():
            apart = outputs(samples.rows([rows[place] for place in part]))
        differences = (apart - together[part]).abs().amax(1)
        worst = int(differences.argmax())
        if not float(differences[worst]) <= limit:
            raise mixed_samples(
                f"those of sample {rows[part[worst]]} are {float(differences[worst]):.1e} apart "
                "in a batch of others"
            )


class Separation:
    """Compares backward passes over the same graph, of which Σ_k a_{k,n} δ_{k,n} should be 0 for
    every sample n and recorded call: cotangents δ_k of pass k, its weights a_k.

    Only a random product of each sample's cotangents is kept.

    Args:
        f: the outputs, [n, C], with their graph.
        edges: of the calls' outputs, [n·s, ...] each.
    """

    def __init__(self, f: Tensor, edges: Sequence[GradientEdge]) -> None:
        self._f, self._edges = f, edges
        self._vectors: list[Tensor | None] = [None] * len(edges)
        self._rests: list[Tensor | None] = [None] * len(edges)
        self._sizes = [0.0] * len(edges)
        self._generator = torch.Generator().manual_seed(_SEED)
        normal = torch.randn(f.shape, generator=self._generator, dtype=torch.float64)
        self.weights = normal.to(f)

    def differentiate(self, factors: Tensor) -> tuple[Tensor | None, ...]:
        """Cotangents of Σ_{n,c} factors_n w_{n,c} f_{n,c}; factors [n]."""
        total = (self._f * self.weights * factors[:, None]).sum()
        return torch.autograd.grad(total, self._edges, retain_graph=True, allow_unused=True)

    def add(self, times: Tensor, cotangents: Sequence[Tensor | None]) -> None:
        """One pass.

        Args:
            times: a, [n].
            cotangents: of each call; None: zero.
        """
        for call, cotangent in enumerate(cotangents):
            if cotangent is None or not cotangent.numel():
                continue
            rows = cotangent.reshape(len(times), -1)
            wide = rows.dtype if rows.dtype == torch.float64 else torch.float32
            vector = self._vectors[call]
            if vector is None:
                vector = torch.randn(rows.shape[1], generator=self._generator).to(rows)
                self._vectors[call] = vector
            product = (rows @ vector).to(wide) * times.to(wide)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide) * times.to(wide).abs()
            rest = self._rests[call]
            self._rests[call] = product if rest is None else rest + product
            self._sizes[call] = max(self._sizes[call], float(norms.max()))

    def require(self) -> None:
        """Raises:
        RuntimeError: samples contribute to one another.
        """
        dtype, suspects = self._f.dtype, set()
        least = round_off(dtype) * max(self._sizes)
        for rest, size in zip(self._rests, self._sizes, strict=True):
            # NaN has an error of its own.
            if rest is not None and float(rest.abs().max()) > max(tolerance(dtype) * size, least):
                suspects.add(int(rest.abs().argmax()))
        for sample in suspects:
            factors = torch.ones_like(self._f[:, 0])
            factors[sample] = 0.0
            for cotangent in self.differentiate(factors):
                if cotangent is None or not cotangent.numel():
                    continue
                rows = cotangent.reshape(len(factors), -1).double()
                if bool((rows[sample].abs() > 0).any()):
                    share = float(rows[sample].norm() / rows.norm())
                    raise mixed_samples(f"{share:.1%} of a gradient are another sample's")
