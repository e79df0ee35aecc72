"""The reverse estimator of smoothness: Eq. 5 and 6 of the paper, by backward passes alone.

    ‖J_t‖_F ≈ √( 1/p Σ_i ‖∂(v_i·z_t)/∂x‖² )        ‖H_j‖_F ≈ √( 1/p Σ_i ‖∂(v_i·∂z_j/∂x)/∂x‖² )

The first takes one vector–Jacobian product per layer, token and projection; the second one per
layer, token, projection and sampled dimension, and one more per dimension for ∂z_j/∂x.  Rows do not
depend on each other and share every product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..differentiable.formulas import result_dtype, wide
from ..differentiable.norms import layer_norm
from ..jet.engine.types import Args, Function, Named
from ..jet.passes.eager import check_point
from ..models import padding_mask
from ..torch_private import functional as F
from .directions import draw_directions
from .estimators import ForwardPass, block_tokens, hessian_norm, run_model, safe_sqrt, select_blocks
from .parallel import is_sharded
from .settings import ENGINES, Randomness, Settings, sample_dimensions

# ---- norms whose third derivative is right ----------------------------------------------------
#
# torch's layer norm saves its statistics as constants of the double backward, so that a third
# derivative silently drops the terms through them (torch 2.13: parameter gradients of ‖H‖ off by
# up to a third against finite differences in float64; first and second derivatives are right).
# The same holds for the fused CUDA kernel of RMS norm.


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Compute RMS norm, x (mean x² + ε)^(−1/2) w, in plain operations."""
    x, dims = wide(input), tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    return (y if weight is None else y * weight).to(result_dtype(input))


_COMPOSED: dict[Function, Function] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
}


class ComposedNorms(TorchFunctionMode):
    """A mode in which torch's layer and RMS norms are computed by plain operations."""

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Named | None = None
    ) -> object:
        return _COMPOSED.get(func, func)(*args, **(kwargs or {}))


# ---- the estimator -------------------------------------------------------------------------------


@dataclass
class Graph:
    """Block outputs with their autograd graph down to the embeddings.

    Attributes:
        x: embeddings, ``[B, T, d]``.
        blocks: outputs of the chosen blocks, ``[B, T, d_k]``.
        mask: ``[B, T]``, true at real tokens.
        tokens: ``[B, T']``, true at real tokens in scope (T' = 1 for a classifier's logits).
        result: the forward pass.
        train: whether the norms themselves will be differentiated.
    """

    x: Tensor
    blocks: list[Tensor]
    mask: Tensor
    tokens: Tensor
    result: ForwardPass
    settings: Settings
    random: Randomness
    train: bool

    def gradient(self, scalar: Tensor, create_graph: bool) -> Tensor:
        """Return ∂scalar/∂x, ``[B, T, d]``, zero at padded positions."""
        (gradient,) = torch.autograd.grad(
            scalar, self.x, create_graph=create_graph, retain_graph=True, materialize_grads=True
        )
        return gradient * self.mask.unsqueeze(-1)

    def squares(self, scalar: Tensor) -> Tensor:
        """Return ‖∂scalar/∂x‖² per row, ``[B]``.

        The scalar must be a sum over rows.  A row's outputs do not depend on another row's x, so
        that one backward pass gives the gradient of each row's summand.
        """
        return self.gradient(scalar, self.train).square().sum((-1, -2))

    def draw(self, like: Tensor, mask: Tensor | None) -> Tensor:
        """Draw the projections v_i, ``[p, *like.shape]``, zero where ``mask`` is false."""
        return draw_directions(
            like.detach(),
            self.settings.directions,
            mask=mask,
            distribution=self.settings.distribution,
            counter=self.random.directions,
        )

    def per_token(self, norm: Callable[[int], Tensor]) -> Tensor:
        """Return ``norm(t)``, ``[B]``, of every token t in scope as a tensor ``[B, T]`` that is
        zero elsewhere."""
        zero = self.x.new_zeros(len(self.x))
        # Each token costs a backward pass per projection, so columns without a token in scope are
        # skipped, not multiplied by 0 afterwards.
        in_scope = self.tokens.any(0).tolist()
        columns = [norm(t) if column else zero for t, column in enumerate(in_scope)]
        return torch.stack(columns, 1) * self.tokens


def measure_reverse(
    model: nn.Module, batch: Mapping[str, Tensor], settings: Settings, random: Randomness
) -> tuple[Tensor, Tensor | None, Tensor, ForwardPass]:
    """Estimate ‖J_t‖ and Σ_j ‖H_{t,j}‖ from ``settings.directions`` projections; differentiable.

    Returns:
        The norms of the Jacobian and of the Hessian (or None), ``[K, B, T]``; the tokens in scope;
        and the forward pass.
    """
    train = torch.is_grad_enabled()
    with torch.enable_grad():
        graph = build_graph(model, batch, settings, random, train)
        jacobian = torch.stack([_jacobian(graph, block) for block in graph.blocks])
        hessian = None
        if settings.second_order:
            hessian = torch.stack([_hessian(graph, block) for block in graph.blocks])
    return jacobian, hessian, graph.tokens, graph.result


def build_graph(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    settings: Settings,
    random: Randomness,
    train: bool,
) -> Graph:
    """Run the model once, without SDPA's fused kernels, which have no double backward.

    Raises:
        ValueError: inference mode is on; the model uses gradient checkpointing, whose backward
            would build another graph; or its weights are sharded, and freed before a double
            backward needs them.
    """
    if is_sharded(model):
        raise ValueError(
            f"engine={settings.engine!r} does not work with FSDP, which frees weights that its "
            "backward passes read: use engine='jet', or DistributedDataParallel"
        )
    if any(getattr(m, "gradient_checkpointing", False) and m.training for m in model.modules()):
        raise ValueError(
            f"engine={settings.engine!r} does not work with gradient checkpointing: use "
            "engine='jet', or call model.gradient_checkpointing_disable()"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"engine={settings.engine!r} takes gradients, which torch.inference_mode() forbids: "
            "use torch.no_grad(), or engine='jet'"
        )
    mask = padding_mask(batch)
    entered: list[Tensor] = []

    def enter(x: Tensor, mask: Tensor) -> Tensor:
        check_point(x, "x")
        x = x if x.requires_grad else x.detach().requires_grad_()
        if settings.check_values and not torch.isfinite(x).all():
            raise ValueError("the embeddings contain NaN or infinite values; check the weights")
        entered.append(x)
        return x

    with ExitStack() as contexts:
        # Fused attention can be differentiated only once, math attention any number of times.
        contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        if train:  # a third derivative, where the norm or its gradient is differentiated
            contexts.enter_context(ComposedNorms())
        result = run_model(model, batch, enter)
    blocks = select_blocks(result, settings)
    tokens = block_tokens(blocks[0], mask, settings)
    return Graph(entered[0], blocks, mask, tokens, result, settings, random, train)


def _jacobian(graph: Graph, block: Tensor) -> Tensor:
    """Return the norms ‖J_t‖ of a block, ``[B, T]``."""
    # Drawn once for all tokens, and 0 at padding, so that the numbers of the real tokens do not
    # depend on the length of the padding.
    projections = graph.draw(block, graph.mask if block.shape[:2] == graph.mask.shape else None)

    def norm(t: int) -> Tensor:
        squares = torch.stack([graph.squares((v[:, t] * block[:, t]).sum()) for v in projections])
        return squares.mean(0) if graph.settings.squared else safe_sqrt(squares.mean(0))

    return graph.per_token(norm)


def _hessian(graph: Graph, block: Tensor) -> Tensor:
    """Return the sums over D of the norms ‖H_{t,j}‖ of a block, ``[B, T]``."""
    width = block.shape[-1]
    ((indices, scale),) = sample_dimensions(
        [width], graph.settings, graph.random.dimensions, block.device
    )
    output_indices = range(width) if indices is None else indices.tolist()

    def norm(t: int) -> Tensor:
        # Rows are independent: one double backward of their sum gives the squares of all rows.
        squares = torch.stack([_hessian_squares(graph, block[:, t, j]) for j in output_indices], -1)
        return hessian_norm(squares, graph.settings, scale=scale)

    return graph.per_token(norm)


def _hessian_squares(graph: Graph, outputs: Tensor) -> Tensor:
    """Estimate ‖∂²z_j/∂x²‖² of each row by 1/p Σ_i ‖∂(v_i·∂z_j/∂x)/∂x‖², ``[B]``."""
    gradient = graph.gradient(outputs.sum(), create_graph=True)
    if not gradient.requires_grad:  # z_j is linear in x
        return gradient.new_zeros(len(gradient))
    projections = graph.draw(graph.x, graph.mask)
    return torch.stack([graph.squares((v * gradient).sum()) for v in projections]).mean(0)


ENGINES["reverse"] = measure_reverse
