"""Penalties that need no derivatives with respect to the embeddings: L2 and R3F."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..smoothness.decision import Kind, kl_divergence
from ..smoothness.estimators import hooked_embeddings, unwrapped, without_labels
from .method import Batch, Method, logits_of
from .random_state import drawing_apart


def half_square_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """½ Σ θ² over the trained matrices, in float32 or wider; biases and norm weights are left out.

    Raises:
        ValueError: no parameter with two or more dimensions requires a gradient.
    """
    matrices = [p for p in parameters if p.requires_grad and p.ndim > 1]
    if not matrices:
        raise ValueError("L2 acts on trained matrices, and the model has none")
    return half_squares(matrices)


def half_squares(tensors: Iterable[Tensor]) -> Tensor:
    """½ Σ t², in float32 or wider, on the first one's device."""
    squares = [t.to(torch.promote_types(t.dtype, torch.float32)).square().sum() for t in tensors]
    return torch.stack([s.to(squares[0].device) for s in squares]).sum() / 2


def symmetric_divergence(first: Tensor, second: Tensor, kind: Kind = "single") -> Tensor:
    """KL(p‖q) + KL(q‖p) per row, as `kl_divergence`.

    As Σ (p − q)(log p − log q), whose terms are all positive: with noise of 1e-5 the difference of
    two KL sums would be rounding error.
    """
    return kl_divergence(first, second, kind, symmetric=True)


def row_mean(apart: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Mean over rows ``[B]``; of a language model's ``[B, T]``, over real tokens."""
    mask = batch.get("attention_mask")
    if apart.ndim == 2 and mask is not None and mask.shape == apart.shape:
        return apart[mask.bool()].mean()
    return apart.mean()


def r3f_penalty(
    model: nn.Module,
    batch: Mapping[str, Any],
    logits: Tensor,
    *,
    noise: float,
    distribution: str,
    generator: torch.Generator,
    kind: Kind,
) -> Tensor:
    """Mean over rows (of a language model: over real tokens) of the divergence under noise.

    R3F, Aghajanyan et al. 2021: f(x) against f(x + z), z ~ U(−ε, ε) or N(0, ε²) on every token
    embedding. The second pass draws dropout masks of its own. Noise of 1e-5 is lost in the
    roundings of bfloat16, so under autocast both passes are made in full precision.

    Args:
        batch: without labels.
        logits: f(x) of the same batch, ``[B, C]`` or ``[B, T, C]``.
        generator: of z and the second pass's dropout, on the CPU, so that a seed means the same on
            every device.  torch's own generators stay as they are.
    """
    device = logits.device.type
    run = model
    with ExitStack() as contexts:
        own_numbers = int(torch.randint(2**63 - 1, (), generator=generator))
        contexts.enter_context(drawing_apart(own_numbers))
        # autocast around the model, or within its forward
        if torch.is_autocast_enabled(device) or hasattr(unwrapped(model), "_original_forward"):
            # accelerate wraps forward in autocast and keeps the plain one under this name
            run = getattr(unwrapped(model), "_original_forward", model)
            contexts.enter_context(torch.autocast(device, enabled=False))
            logits = logits_of(run(**batch))
        contexts.enter_context(
            hooked_embeddings(
                model, lambda x: x + token_noise(x, batch, noise, distribution, generator).to(x)
            )
        )
        moved = logits_of(run(**batch))
    return row_mean(symmetric_divergence(logits, moved, kind), batch)


def draw_noise(
    shape: torch.Size, size: float, distribution: str, generator: torch.Generator
) -> Tensor:
    """z of a shape ``[n, d]``, float32 on the CPU."""
    z = torch.empty(shape, dtype=torch.float32)
    if distribution == "uniform":
        return z.uniform_(-size, size, generator=generator)
    return z.normal_(0.0, size, generator=generator)


def real_tokens(x: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """``[B, T]`` booleans on the device of the embeddings x ``[B, T, d]``."""
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return mask.to(x.device).bool().reshape(x.shape[:2])


def token_noise(
    x: Tensor,
    batch: Mapping[str, Any],
    size: float,
    distribution: str,
    generator: torch.Generator,
) -> Tensor:
    """z ``[B, T, d]``, zero at padding; a real token's does not depend on where padding is."""
    real = real_tokens(x, batch)
    z = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    drawn = draw_noise(torch.Size((int(real.sum()), x.shape[-1])), size, distribution, generator)
    z[real] = drawn.to(z)
    return z


def row_noise(
    x: Tensor, batch: Mapping[str, Any], size: float, generator: torch.Generator
) -> Tensor:
    """``[B, T, d]``: uniform, ± size / √(n d) in a row of n real tokens, zero at padding."""
    entries = real_tokens(x, batch).sum(1).view(-1, 1, 1) * x.shape[-1]
    noise = token_noise(x, batch, 1.0, "uniform", generator)
    return noise * size / entries.clamp(min=1).sqrt()


class L2(Method):
    """+ strength · ½ Σ θ² over trained matrices; biases and norm weights are left free."""

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor:
        """See `half_square_norm`."""
        return half_square_norm(model.parameters())


class R3F(Method):
    """+ strength · symmetric divergence under noise (Aghajanyan et al. 2021, R3F)."""

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor:
        """See `r3f_penalty`."""
        return r3f_penalty(
            model,
            without_labels(inputs),
            logits_of(outputs),
            noise=self.settings.noise,
            distribution=self.settings.noise_distribution,
            generator=self.generator(),
            kind=self.kind(model, outputs),
        )
