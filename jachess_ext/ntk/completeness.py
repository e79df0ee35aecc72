"""Check the recorded contributions and the finished kernel against a plain backward pass.

With random signs w_{n,c} for two samples (`probe`), or random weights for all of them
(`all_samples_gradient`), one plain backward pass gives, for every parameter,

    g_θ = Σ_{n,c} w_{n,c} ∂f_{n,c}/∂θ,

which serves two checks. (1) For every parameter, g_θ must equal the same weighted sum of the
recorded calls' contributions; if it does not, the parameter gets exact per-sample gradients.
(2) The finished kernel, which shares no step with this pass, must fulfil

    wᵀ Θ w' = Σ_θ g_θ · g'_θ.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .capture import Coverage, Probe, contributions, evaluation_mode, learn_layout, recorded_forward
from .contract import Contribution, Dense, Matches, Tied, as_real
from .independence import SEPARATION_SEED, compare_batch_compositions, permuted, spaced_subset
from .outputs import NESTED, OutputMap, Samples, require_outputs
from .rounding import PROBED, negligible_norm, norm_of, round_off, tolerance

_INCOMPLETE = "the recorded calls do not give its whole gradient"
_PROBE_SEED = 0x50524F


def probe(coverage: Coverage, outputs: OutputMap, samples: Samples) -> Probe:
    """Determine a batch's layout, and check the contributions of its first and a middle sample.

    Parameters whose contributions are incomplete are added to ``coverage.fallback``.
    """
    layout = learn_layout(coverage, outputs, samples)
    rows = [0, samples.count // 2]  # sample 0 twice if there is only one
    meter = _ActivationMeter(coverage)
    with evaluation_mode(coverage.model):
        with torch.autograd.graph.saved_tensors_hooks(meter.add, lambda saved: saved):
            batch = samples.rows(rows)
            f, calls, unbatched = recorded_forward(coverage, outputs, layout, batch, PROBED)
        generator = torch.Generator("cpu").manual_seed(_PROBE_SEED)
        signs = (torch.randint(0, 2, f.shape, generator=generator, device="cpu") * 2 - 1).to(f)
        edges = [call.edge for call in calls]
        # torch's type stub does not allow a list of edges and tensors.
        inputs = cast(list[Tensor], [*edges, *coverage.parameters.values()])
        gradients_of_all = torch.autograd.grad((f * signs).sum(), inputs, allow_unused=True)
        cotangents, param_gradients = gradients_of_all[: len(edges)], gradients_of_all[len(edges) :]
        # A normalisation's backward amplifies the rounding of cancelling terms by up to 1 / √1e-5.
        least_noise = 300 * torch.finfo(f.dtype).eps * norm_of(signs)
        noises = (round_off(c.dtype) * norm_of(c) for c in cotangents if c is not None)
        noise = max([least_noise, *noises])
        captured = contributions(coverage, calls, [[c] for c in cotangents], PROBED)
    gradients = {
        name: as_real(torch.zeros_like(parameter) if g is None else g)
        for (name, parameter), g in zip(coverage.parameters.items(), param_gradients, strict=True)
    }
    coverage.fallback.update(unbatched)
    weights = signs.new_zeros(samples.count, signs.shape[1])
    weights.index_add_(0, torch.tensor(rows, device=signs.device), signs)
    side = Probe(samples, layout, weights, gradients, captured, -(-meter.total // PROBED), noise)
    coverage.fallback.update(dict.fromkeys(_incomplete(coverage, side), _INCOMPLETE))
    for name in coverage.fallback:
        captured.pop(name, None)
    return side


def all_samples_gradient(
    coverage: Coverage, outputs: OutputMap, side: Probe, batch_size: int
) -> None:
    """Run a plain pass over all samples; set ``values``, ``weights`` and ``gradients`` of the side.

    The samples are batched in another order than in the blocks.  The gradients replace the
    gradients of the two probed samples.

    Args:
        batch_size: largest number of samples in a batch.

    Raises:
        RuntimeError: the outputs of a sample depend on the other samples of its batch.
    """
    samples, order = side.samples, permuted(side.samples.count)
    batches = -(-samples.count // batch_size)
    total: dict[str, Tensor] = {}
    # Normal weights, not signs: signs may sum to 0, and would then hide a mean over the batch.
    generator = torch.Generator("cpu").manual_seed(SEPARATION_SEED)
    shape = side.weights.shape
    normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    weights = normal.to(side.weights)
    values = torch.empty_like(weights)
    with evaluation_mode(coverage.model):
        for start in range(batches):
            rows = order[start::batches]
            f = outputs(samples.rows(rows))
            require_outputs(f, len(rows))
            values[rows] = f.detach()
            gradients = torch.autograd.grad(
                (f * weights[rows]).sum(), list(coverage.parameters.values()), allow_unused=True
            )
            for name, gradient in zip(coverage.parameters, gradients, strict=True):
                if gradient is not None:
                    g = as_real(gradient)
                    total[name] = g if name not in total else total[name] + g
        compare_batch_compositions(outputs, samples, values, [spaced_subset(samples.count)])
    side.values = values
    if all(bool(g.isfinite().all()) for g in total.values()):  # their sum may overflow in 16 bits
        side.noise *= norm_of(weights) / norm_of(side.weights)
        side.weights = weights
        side.gradients = {n: total.get(n, torch.zeros_like(g)) for n, g in side.gradients.items()}


def _incomplete(coverage: Coverage, side: Probe) -> list[str]:
    """Return the parameters whose gradient is not the sum of the recorded calls' contributions."""
    norms = {name: norm_of(g) for name, g in side.gradients.items()}
    names = [name for name, norm in norms.items() if not norm < float("inf")]
    if names:
        raise ValueError(
            f"the gradient of parameter {names[0]!r} is NaN or infinite; expected finite gradients "
            "(look for a division by zero or an overflow in the model, or use a wider dtype)"
        )
    total_norm = sum(norm**2 for norm in norms.values()) ** 0.5
    incomplete = []
    for name, gradient in side.gradients.items():
        if name in coverage.fallback:
            continue
        term = side.contributions.get(name)
        missing = norms[name] if term is None else norm_of(_residual(gradient, term))
        if missing > negligible_norm(gradient, total_norm, side.noise):
            incomplete.append(name)
    return incomplete


def _residual(gradient: Tensor, contribution: Contribution) -> Tensor:
    """Return gradient − Σ_n G_n over samples n, for contributions of a single output."""
    if isinstance(contribution, Tied):
        return _residual(_residual(gradient, contribution.factors), contribution.matches)
    if isinstance(contribution, Dense):
        return gradient - contribution.gradients[0].sum(0).view(gradient.shape)
    if isinstance(contribution, Matches):
        remaining = gradient.clone()
        rows = remaining.view(remaining.shape[0], -1)
        rows.index_add_(0, contribution.ids, contribution.gradients[0].to(rows), alpha=-1)
        return remaining
    delta, a = contribution.cotangents[0].flatten(0, 1), contribution.inputs.flatten(0, 1)
    row_factor, column_factor = (a, delta) if contribution.is_transposed else (delta, a)
    return torch.addmm(gradient, row_factor.T.to(gradient), column_factor.to(gradient), alpha=-1)


def check_kernel(theta: Tensor, left: Probe, right: Probe, dtype: torch.dtype) -> float:
    """Compare wᵀ Θ w' with the product of the plain gradients; return the relative difference.

    Args:
        theta: [N, C, M, C], in double.
        left, right: probes of the two sides; the same object for a symmetric kernel.
        dtype: dtype of the model.

    Raises:
        RuntimeError: they differ by more than round-off.
    """
    w, other_w = left.weights.double(), right.weights.double()
    contracted = (torch.tensordot(w, theta, 2) * other_w).sum()
    mean_square = (torch.tensordot(w.square(), theta.square(), 2) * other_w.square()).sum()
    expected = sum(_dot(left.gradients[name], right.gradients[name]) for name in left.gradients)
    norms = [sum(norm_of(g) ** 2 for g in side.gradients.values()) ** 0.5 for side in (left, right)]
    # ‖Θ‖ is the root of the mean square of wᵀ Θ w', which may cancel.
    scale = max(norms[0] * norms[1], float(mean_square.sqrt()), left.noise * right.noise)
    difference = abs(float(contracted) - expected) / scale if scale else 0.0
    if not difference <= tolerance(dtype):
        raise RuntimeError(
            f"the kernel disagrees with a plain backward pass (relative difference "
            f"{difference:.1e}), as it does where the outputs of a sample depend on the other "
            "samples of the batch: take what is computed over the batch out of the function"
        )
    return difference


def _dot(x: Tensor, y: Tensor) -> float:
    """Return the inner product g_θ · g'_θ of a parameter's two gradients."""
    if x.dtype in (torch.float32, torch.float64):
        return float(torch.dot(x.flatten(), y.flatten()))
    return float((x.double() * y.double()).sum())


class _ActivationMeter:
    """Count the bytes that a forward pass keeps for its backward pass, without parameters."""

    def __init__(self, coverage: Coverage) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in coverage.model.parameters()}
        self.total = 0

    def add(self, tensor: Tensor) -> Tensor:
        """Add the bytes of a saved tensor's storage, unless already counted; return the tensor."""
        if tensor.is_nested:
            raise TypeError(NESTED)
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except RuntimeError:  # forward mode's zero tangents have no storage
            return tensor
        if address not in self._seen:
            self._seen.add(address)
            self.total += storage.nbytes()
        return tensor
