"""The completeness check: nothing that a plain backward pass sees may be missing from the kernel.

With random signs w_{n,c} for a few samples, one ordinary backward pass gives, of every parameter,

    g_θ = Σ_{n,c} w_{n,c} ∂f_{n,c}/∂θ,

which (1) must equal the same sum over what the recorded calls contribute, parameter by parameter:
where it does not, the parameter gets exact per-sample gradients; and (2) gives afterwards a test of
the finished kernel that shares none of its steps:

    wᵀ Θ w' = Σ_θ g_θ · g'_θ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .capture import Watched, contributions_of, evaluating, watched_forward
from .contributions import Contribution, Dense, Factors, Matches, Tied
from .outputs import OutputMap
from .recorder import Layout
from .samples import Samples
from .separation import Separation, require_same_values, round_off, tolerance
from .sketch import Sketch

_PROBED = 2  # samples; one would not tell samples and outputs without samples apart
_SEED = 0x50524F
_NOT_WHOLE = "the recorded calls do not give its whole gradient"


@dataclass
class Probe:
    """What the check of one side left.

    Attributes:
        rows: the samples probed.
        signs: w, [rows, C].
        gradients: g, by parameter.
        contributions: of the probed samples, for w in place of C outputs.
        activation_bytes: memory the forward pass keeps for one sample's backward.
        noise: norm of a gradient below which it may be round-off alone (a bias of attention keys,
            whose gradient is zero in exact arithmetic).
    """

    rows: list[int]
    signs: Tensor
    gradients: dict[str, Tensor]
    contributions: dict[str, Contribution]
    activation_bytes: int
    noise: float

    @property
    def outputs(self) -> int:
        return self.signs.shape[1]

    def capture_bytes(self) -> int:
        """Memory of one sample's contributions, all outputs."""
        return -(-sum(part.nbytes(self.outputs) for part in self.contributions.values()) // 2)


def probe(watched: Watched, outputs: OutputMap, layout: Layout, samples: Samples) -> Probe:
    """Check the first and a middle sample; parameters that fail are added to the fallback."""
    rows = [0, samples.count // 2]  # the same one twice where there is only one
    meter = _Meter(watched)
    with evaluating(watched.model):
        with torch.autograd.graph.saved_tensors_hooks(meter.saved, lambda saved: saved):
            f, calls, unbatched = watched_forward(
                watched, outputs, layout, samples.rows(rows), _PROBED
            )
        generator = torch.Generator().manual_seed(_SEED)
        signs = (torch.randint(0, 2, f.shape, generator=generator) * 2 - 1).to(f)
        names, edges = list(watched.parameters), [recorded.edge for recorded in calls]
        inputs: list[Any] = [*edges, *watched.parameters.values()]
        if rows[0] != rows[1]:
            require_same_values(outputs, samples, rows, f.detach())
            if edges:
                _require_separate_gradients(f, edges)
        found = torch.autograd.grad((f * signs).sum(), inputs, allow_unused=True)
        cotangents: list[list[Tensor | None]] = [[cotangent] for cotangent in found[: len(edges)]]
        noise = max((_noise(c) for c in found[: len(edges)] if c is not None), default=0.0)
        parts = contributions_of(watched, calls, cotangents, _PROBED)
    gradients = {
        name: torch.zeros_like(watched.parameters[name]) if g is None else g
        for name, g in zip(names, found[len(edges) :], strict=True)
    }
    watched.fallback.update(unbatched)
    _compare(watched, gradients, parts, noise)
    parts = {name: part for name, part in parts.items() if name not in watched.fallback}
    return Probe(rows, signs, gradients, parts, -(-meter.total // _PROBED), noise)


def _require_separate_gradients(f: Tensor, edges: list[Any]) -> None:
    """Differentiate with random weights, and with another multiple of these for each sample.

    Raises:
        RuntimeError: samples contribute to one another.
    """
    one, multiples = torch.ones_like(f[:, 0]), torch.tensor([-1.0, 2.0]).to(f)
    separation = Separation(f, edges)
    separation.add(multiples, separation.differentiate(one))
    separation.add(-one, separation.differentiate(multiples))
    separation.require()


def _compare(
    watched: Watched,
    gradients: Mapping[str, Tensor],
    parts: Mapping[str, Contribution],
    noise: float,
) -> None:
    norms = {name: norm_of(g) for name, g in gradients.items()}
    bad = [name for name, norm in norms.items() if not norm < float("inf")]
    if bad:
        raise ValueError(
            f"the gradient of parameter {bad[0]!r} is NaN or infinite; expected finite gradients "
            "(look for a division by zero or an overflow in the model, or use a wider dtype)"
        )
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    for name, gradient in gradients.items():
        if name in watched.fallback:
            continue
        part = parts.get(name)
        missing = norms[name] if part is None else norm_of(left_over(gradient, part))
        # What is below √eps of the whole gradient changes the kernel by less than eps.
        negligible = round_off(gradient.dtype) * whole
        if missing > max(tolerance(gradient.dtype) * norms[name], negligible, noise):
            watched.fallback[name] = _NOT_WHOLE


def left_over(gradient: Tensor, part: Contribution) -> Tensor:
    """gradient − Σ_n G_n, n over the samples, for contributions of one output."""
    if isinstance(part, Tied):
        return left_over(left_over(gradient, part.factors), part.matches)
    if isinstance(part, Dense):
        return gradient - part.gradients[0].sum(0).view(gradient.shape)
    if isinstance(part, Matches):
        rest = gradient.clone()
        rows = rest.view(rest.shape[0], -1)
        rows.index_add_(0, part.ids, part.gradients[0].to(rows), alpha=-1)
        return rest
    delta, a = part.cotangents[0].flatten(0, 1), part.inputs.flatten(0, 1)
    left, right = (a, delta) if part.transposed else (delta, a)
    return torch.addmm(gradient, left.T.to(gradient), right.to(gradient), alpha=-1)


def norm_of(values: Tensor) -> float:
    """‖values‖, in double only where it is needed: gradients are as many as parameters."""
    if values.dtype in (torch.float32, torch.float64):
        norm = float(torch.linalg.vector_norm(values))
        if norm < float("inf"):
            return norm
    return float(values.double().norm())  # squares beyond float32 are no infinite gradient


def _noise(cotangent: Tensor) -> float:
    return round_off(cotangent.dtype) * norm_of(cotangent)


def check_kernel(
    theta: Tensor, left: Probe, right: Probe, dtype: torch.dtype, sketch: Sketch | None = None
) -> float:
    """Compare wᵀ Θ w' with the product of the plain gradients; returns the relative difference.

    Args:
        theta: [N, C, M, C].
        left, right: of the two sides; the same one for a symmetric kernel.
        dtype: the model's.
        sketch: what was sketched; it is linear, so that the plain gradients go through it as well.

    Raises:
        RuntimeError: they differ by more than round-off.
    """
    block = theta[left.rows][:, :, right.rows].double()
    value = torch.einsum("nc,ncmd,md->", left.signs.double(), block, right.signs.double())
    expected = sum(_product(name, left, right, sketch) for name in left.gradients)
    sizes = [sum(norm_of(g) ** 2 for g in side.gradients.values()) ** 0.5 for side in (left, right)]
    scale = max(sizes[0] * sizes[1], float(block.abs().max()), left.noise * right.noise)
    difference = abs(float(value) - expected) / scale if scale else 0.0
    if not difference <= tolerance(dtype):
        raise RuntimeError(
            f"the kernel disagrees with a plain backward pass (relative difference "
            f"{difference:.1e}): do samples of a batch depend on one another in this model?"
        )
    return difference


def _product(name: str, left: Probe, right: Probe, sketch: Sketch | None) -> float:
    """g_θ · g'_θ, of one parameter."""
    x, y = left.gradients[name], right.gradients[name]
    if sketch is not None and name in (sketch.names or ()):
        part = left.contributions[name]
        assert isinstance(part, Factors)
        return sketch.product(name, x, y, part.transposed)
    if x.dtype in (torch.float32, torch.float64):
        return float(torch.dot(x.flatten(), y.flatten()))
    return float((x.double() * y.double()).sum())


class _Meter:
    """Counts what a forward pass keeps for the backward: every storage once, parameters not."""

    def __init__(self, watched: Watched) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in watched.model.parameters()}
        self.total = 0

    def saved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor
