"""Check that the kernel holds all that a plain backward pass sees.

With random signs w_{n,c} for a few samples (`probe`), or random weights for all (`in_company`), one
ordinary backward pass gives, of every parameter,

    g_θ = Σ_{n,c} w_{n,c} ∂f_{n,c}/∂θ,

which (1) must equal the same sum over what the recorded calls contribute, parameter by parameter:
where it does not, the parameter gets exact per-sample gradients; and (2) gives afterwards a test
of the finished kernel that shares none of its steps:

    wᵀ Θ w' = Σ_θ g_θ · g'_θ.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .capture import Probe, Watched, contributions, evaluating, learn_layout, watched_forward
from .contract import Contribution, Dense, Matches, Tied, as_real
from .independence import SEPARATION_SEED, apart, compare_companies, shuffled
from .outputs import NESTED, OutputMap, Samples, require_outputs
from .rounding import PROBED, negligible, norm_of, round_off, tolerance

_NOT_WHOLE = "the recorded calls do not give its whole gradient"
_PROBE_SEED = 0x50524F


def probe(watched: Watched, outputs: OutputMap, samples: Samples) -> Probe:
    """Learn the layout; check the first and a middle sample.

    Parameters that fail are added to ``watched.fallback``.
    """
    layout = learn_layout(watched, outputs, samples)
    rows = [0, samples.count // 2]  # the same one twice where there is only one
    meter = _Meter(watched)
    with evaluating(watched.model):
        with torch.autograd.graph.saved_tensors_hooks(meter.saved, lambda saved: saved):
            batch = samples.rows(rows)
            f, calls, unbatched = watched_forward(watched, outputs, layout, batch, PROBED)
        generator = torch.Generator("cpu").manual_seed(_PROBE_SEED)
        signs = (torch.randint(0, 2, f.shape, generator=generator, device="cpu") * 2 - 1).to(f)
        edges = [call.edge for call in calls]
        # The stub knows no list of edges and tensors.
        inputs = cast(list[Tensor], [*edges, *watched.parameters.values()])
        gradients_of_all = torch.autograd.grad((f * signs).sum(), inputs, allow_unused=True)
        cotangents, whole = gradients_of_all[: len(edges)], gradients_of_all[len(edges) :]
        # A norm's backward multiplies the rounding of what cancels in it by up to 1 / √1e-5.
        least = 300 * torch.finfo(f.dtype).eps * norm_of(signs)
        noises = (round_off(c.dtype) * norm_of(c) for c in cotangents if c is not None)
        noise = max([least, *noises])
        parts = contributions(watched, calls, [[c] for c in cotangents], PROBED)
    gradients = {
        name: as_real(torch.zeros_like(parameter) if g is None else g)
        for (name, parameter), g in zip(watched.parameters.items(), whole, strict=True)
    }
    watched.fallback.update(unbatched)
    every = signs.new_zeros(samples.count, signs.shape[1])
    every.index_add_(0, torch.tensor(rows, device=signs.device), signs)
    side = Probe(samples, layout, every, gradients, parts, -(-meter.total // PROBED), noise)
    watched.fallback.update(dict.fromkeys(_not_whole(watched, side), _NOT_WHOLE))
    for name in watched.fallback:
        parts.pop(name, None)
    return side


def in_company(watched: Watched, outputs: OutputMap, side: Probe, most: int) -> None:
    """Give a side the outputs and gradients of all its samples, in other company than the blocks'.

    One forward pass and a plain backward pass, which replaces that of the probe.

    Args:
        most: samples a batch.

    Raises:
        RuntimeError: the outputs of a sample depend on the others.
    """
    samples, order = side.samples, shuffled(side.samples.count)
    parts = -(-samples.count // most)
    total: dict[str, Tensor] = {}
    # Not signs: what adds a mean to each sample would not show where they add up to 0.
    generator = torch.Generator("cpu").manual_seed(SEPARATION_SEED)
    shape = side.weights.shape
    normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    weights = normal.to(side.weights)
    values = torch.empty_like(weights)
    with evaluating(watched.model):
        for part in range(parts):
            rows = order[part::parts]
            f = outputs(samples.rows(rows))
            require_outputs(f, len(rows))
            values[rows] = f.detach()
            gradients = torch.autograd.grad(
                (f * weights[rows]).sum(), list(watched.parameters.values()), allow_unused=True
            )
            for name, gradient in zip(watched.parameters, gradients, strict=True):
                if gradient is not None:
                    g = as_real(gradient)
                    total[name] = g if name not in total else total[name] + g
        compare_companies(outputs, samples, values, [apart(samples.count)])
    side.values = values
    if all(bool(g.isfinite().all()) for g in total.values()):  # their sum may overflow in 16 bits
        side.noise *= norm_of(weights) / norm_of(side.weights)
        side.weights = weights
        side.gradients = {n: total.get(n, torch.zeros_like(g)) for n, g in side.gradients.items()}


def _not_whole(watched: Watched, side: Probe) -> list[str]:
    """Return the parameters whose gradient is not what their calls contribute."""
    norms = {name: norm_of(g) for name, g in side.gradients.items()}
    bad = [name for name, norm in norms.items() if not norm < float("inf")]
    if bad:
        raise ValueError(
            f"the gradient of parameter {bad[0]!r} is NaN or infinite; expected finite gradients "
            "(look for a division by zero or an overflow in the model, or use a wider dtype)"
        )
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    wrong = []
    for name, gradient in side.gradients.items():
        if name in watched.fallback:
            continue
        part = side.contributions.get(name)
        missing = norms[name] if part is None else norm_of(_left_over(gradient, part))
        if missing > negligible(gradient, whole, side.noise):
            wrong.append(name)
    return wrong


def _left_over(gradient: Tensor, part: Contribution) -> Tensor:
    """Return gradient − Σ_n G_n over samples n, for contributions of a single output."""
    if isinstance(part, Tied):
        return _left_over(_left_over(gradient, part.factors), part.matches)
    if isinstance(part, Dense):
        return gradient - part.gradients[0].sum(0).view(gradient.shape)
    if isinstance(part, Matches):
        remaining = gradient.clone()
        rows = remaining.view(remaining.shape[0], -1)
        rows.index_add_(0, part.ids, part.gradients[0].to(rows), alpha=-1)
        return remaining
    delta, a = part.cotangents[0].flatten(0, 1), part.inputs.flatten(0, 1)
    left, right = (a, delta) if part.transposed else (delta, a)
    return torch.addmm(gradient, left.T.to(gradient), right.to(gradient), alpha=-1)


def check_kernel(theta: Tensor, left: Probe, right: Probe, dtype: torch.dtype) -> float:
    """Compare wᵀ Θ w' with the product of the plain gradients; return the relative difference.

    Args:
        theta: [N, C, M, C], in double.
        left, right: of the two sides; the same one for a symmetric kernel.
        dtype: the model's.

    Raises:
        RuntimeError: they differ by more than round-off.
    """
    weights, others = left.weights.double(), right.weights.double()
    value = (torch.tensordot(weights, theta, 2) * others).sum()
    squares = (torch.tensordot(weights.square(), theta.square(), 2) * others.square()).sum()
    expected = sum(_dot(left.gradients[name], right.gradients[name]) for name in left.gradients)
    sizes = [sum(norm_of(g) ** 2 for g in side.gradients.values()) ** 0.5 for side in (left, right)]
    # ‖Θ‖ is the root of the mean square of wᵀ Θ w', which may cancel.
    scale = max(sizes[0] * sizes[1], float(squares.sqrt()), left.noise * right.noise)
    difference = abs(float(value) - expected) / scale if scale else 0.0
    if not difference <= tolerance(dtype):
        raise RuntimeError(
            f"the kernel disagrees with a plain backward pass (relative difference "
            f"{difference:.1e}), as it does where the outputs of a sample depend on the other "
            "samples of the batch: take what is computed over the batch out of the function"
        )
    return difference


def _dot(x: Tensor, y: Tensor) -> float:
    """Return g_θ · g'_θ of a parameter."""
    if x.dtype in (torch.float32, torch.float64):
        return float(torch.dot(x.flatten(), y.flatten()))
    return float((x.double() * y.double()).sum())


class _Meter:
    """Bytes that a forward pass keeps for the backward pass, parameters excepted."""

    def __init__(self, watched: Watched) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in watched.model.parameters()}
        self.total = 0

    def saved(self, tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            raise TypeError(NESTED)
        try:
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
        except RuntimeError:  # the zeros of forward mode take no memory
            return tensor
        if place not in self._seen:
            self._seen.add(place)
            self.total += storage.nbytes()
        return tensor
