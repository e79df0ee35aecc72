"""`jx.smoothness`: how strongly hidden states depend on token embeddings.

Two estimators share a forward pass of the model with its token embeddings replaced (`run_model`):
the forward one here takes every layer, token and dimension from one Taylor-mode pass; the other is
in `reverse`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..jet.engine.context import without_dynamo
from ..jet.engine.layout import MAX_DIRECTIONS, map_tensors
from ..jet.engine.tensor import JetTensor, primal_of
from ..jet.passes.eager import make_input
from ..jet.passes.fsdp import jets_through_fsdp
from ..jet.passes.scope import open_pass
from ..jet.rows.check import Generators
from ..jet.rows.sameness import CAUSES, require_same
from ..models import TWO_STACKS, backbone_of, hooked_embeddings, padding_mask, unwrapped
from ..ops import jet_mean_squares, library
from ..torch_private import functional as F
from .directions import Distribution, draw_directions
from .settings import (
    ENGINES,
    Dimensions,
    Engine,
    HessianNorm,
    Layers,
    Randomness,
    Scope,
    Settings,
    layer_indices,
    sample_dimensions,
    stack_equal_shapes,
    tokens_in_scope,
)

Replace = Callable[[Tensor, Tensor], Tensor]
_DIFFERS = (
    f"more than {MAX_DIRECTIONS} directions take several passes, and the model is not the same "
    f"function in each: {CAUSES}. Call eval(), or take {MAX_DIRECTIONS} directions at most"
)
_NO_HIDDEN_STATES = (
    "the model returned no hidden states; expected a transformers model (or one like it) that "
    "accepts output_hidden_states=True and returns .hidden_states = (embeddings, block 1, ...)"
)


@dataclass(frozen=True)
class Smoothness:
    """Norms of the Jacobian and Hessian of each chosen layer.

    Attributes:
        jacobian: ``[K]``; batch mean of Σ_t ‖J_t‖_F.
        hessian: ``[K]``; batch mean of Σ_t Σ_{j∈D} ‖H_{t,j}‖_F; None with ``hessian=False``.
        jacobian_tokens, hessian_tokens: ``[K, B, T]``, per token; zero where a token is padding or
            out of scope.  ``layers="logits"`` of a classifier has T = 1.
        tokens: ``[B, T]`` booleans: the tokens that count.

    Example:
        >>> norms = jx.smoothness(model, batch, hessian=False)
        >>> bool((norms.jacobian == norms.jacobian_tokens.sum(-1).mean(-1)).all())
        True
    """

    jacobian: Tensor
    hessian: Tensor | None
    jacobian_tokens: Tensor
    hessian_tokens: Tensor | None
    tokens: Tensor

    def __repr__(self) -> str:
        rows, count = len(self.tokens), int(self.tokens.sum())
        lines = [f"Smoothness of {count} tokens in {rows} rows:"]
        for k, jacobian in enumerate(self.jacobian.tolist()):
            hessian = "" if self.hessian is None else f", hessian {self.hessian[k].item():.4g}"
            lines.append(f"  layer {k}: jacobian {jacobian:.4g}{hessian}")
        return "\n".join(lines)


def smoothness(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    engine: Engine = "jet",
    directions: int = 2,
    layers: Layers = "all",
    scope: Scope = "all",
    dimensions: Dimensions = 10,
    hessian: bool = True,
    seed: int | None = None,
    step: int = 0,
    hessian_norm: HessianNorm = "per_dimension",
    squared: bool = False,
    distribution: Distribution = "gaussian",
) -> Smoothness:
    """Estimate norms of ∂z/∂x and ∂²z/∂x² of a model's block outputs z (Eq. 5–7 of the paper).

    The block outputs are the model's ``hidden_states[1:]``; the derivatives are with respect to
    what its embedding layer returns.  Differentiable unless under ``torch.no_grad()``.  The model
    runs as it is: call ``model.eval()`` first for a figure without dropout noise.

    Args:
        model: a transformers model (or one with ``get_input_embeddings`` and ``hidden_states``).
        batch: what a collator yields: input_ids or inputs_embeds, attention_mask, ...
        engine: "jet": one Taylor-mode pass. "reverse": Eq. 5 and 6, many backward passes.
        directions: random directions (jet: 1..4, the Hessian needs 2) or projections (reverse).
        layers: "all" blocks, a list of block numbers from 0, or "logits".
        scope: "all" real tokens, the "first" ([CLS]) or the "last" real one.
        dimensions: how many output dimensions D to sample per layer, afresh in every call; or
            "all", whose sum is scaled by 10/d so that it means the same.
        hessian: False computes first derivatives only.
        seed: any 64-bit integer. Same seed and step, same directions and dimensions, however the
            batch is padded, in every precision and on every device; None draws a fresh seed from
            torch's global CPU generator, which `torch.manual_seed` makes repeatable.
        step: other directions and dimensions of the same seed, independent of other steps'.
        hessian_norm: "per_dimension", Σ_j ‖H_j‖_F as in Eq. 7; "tensor", √(Σ_j ‖H_j‖_F²) over all
            dimensions.
        squared: squares in place of norms; every estimator of these is unbiased.
        distribution: of the directions, "gaussian" or "rademacher".

    Raises:
        TypeError, ValueError: bad arguments; a batch without inputs, with an all-padding row or a
            mask of the wrong shape; NaN embeddings; a model without hidden states.
        MissingJetRule: the model uses an operation the jet engine has no rule for.

    Example:
        >>> norms = jx.smoothness(model, batch, layers=[-1], seed=0)
        >>> norms.jacobian.shape, norms.hessian_tokens.shape
        (torch.Size([1]), torch.Size([1, 2, 5]))
        >>> str(norms).splitlines()[0]
        'Smoothness of 9 tokens in 2 rows:'
    """
    settings = Settings(
        engine=engine,
        directions=directions,
        layers=layers,
        scope=scope,
        dimensions=dimensions,
        hessian=hessian,
        hessian_norm=hessian_norm,
        squared=squared,
        distribution=distribution,
        check_values=not library.capturing(),
    )
    return measure(model, batch, settings, Randomness.from_seed(seed, step))[0]


@without_dynamo
def measure(
    model: nn.Module, batch: Mapping[str, Tensor], settings: Settings, random: Randomness
) -> tuple[Smoothness, ForwardPass]:
    """Run the engine that ``settings`` names; without a graph under ``torch.no_grad()``."""
    jacobian, hessian, tokens, result = ENGINES[settings.engine](model, batch, settings, random)
    if not torch.is_grad_enabled():
        jacobian, hessian = jacobian.detach(), None if hessian is None else hessian.detach()
    means = None if hessian is None else hessian.sum(-1).mean(-1)
    return Smoothness(jacobian.sum(-1).mean(-1), means, jacobian, hessian, tokens), result


# ---- a pass of the model ------------------------------------------------------------------------
#
# The batch goes to the model as it is, so that position ids, pooling positions and masks stay those
# that the model itself derives from ``input_ids``.  A hook that lives for the call replaces what
# the embedding layer returns.


@dataclass
class ForwardPass:
    """Results of a forward pass.

    Attributes:
        embeddings: ``[B, T, d]``, the plain embeddings x.
        mask: ``[B, T]``, true at real tokens.
        blocks: K tensors ``[B, T, d]``, the model's ``hidden_states[1:]``.
        output: the model's output, plain tensors only.
        logits: the model's logits (a jet in a jet pass that went through the head), or None.
    """

    embeddings: Tensor
    mask: Tensor
    blocks: list[Tensor]
    output: Any
    logits: Tensor | None


def run_model(
    model: nn.Module, batch: Mapping[str, Tensor], enter: Replace, *, through_head: bool = True
) -> ForwardPass:
    """Call ``model(**batch)`` with its embeddings x replaced by ``enter(x, mask)``.

    Args:
        enter: returns a jet with the primal x, or x itself.
        through_head: False passes only primals to the head, so that head and loss cost no more
            than without jets.

    Raises:
        ValueError: the model returns no hidden states, or has no embedding layer to hook.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    collected: list[Tensor] = []

    def collect_states(module: nn.Module, args: object, output: object) -> object:
        """Collect the backbone's hidden states, and pass primals on to the head."""
        # The model's own output then holds no jets any more.
        states = _field(output, "hidden_states")
        if states and len(states) > 1:
            collected.append(states)
        return map_tensors(output, primal_of)

    def replace(x: Tensor, real: Tensor) -> Tensor:
        if seen:
            raise ValueError(TWO_STACKS)
        seen.append((x, real))
        entered = enter(x, real)
        if isinstance(entered, JetTensor):
            hooks.enter_context(open_pass(entered.jet_layout.jet_pass))
        return entered

    with ExitStack() as hooks:
        arguments = hooks.enter_context(hooked_embeddings(model, replace, _arguments(model, batch)))
        if not through_head:
            hooks.enter_context(backbone_of(model).register_forward_hook(collect_states))
        hooks.enter_context(jets_through_fsdp())
        output = model(**arguments)
    states = collected[0] if collected else _field(output, "hidden_states")
    if not states or len(states) < 2:
        raise ValueError(_NO_HIDDEN_STATES)
    plain = map_tensors(output, primal_of)
    return ForwardPass(*seen[0], list(states[1:]), plain, _field(output, "logits"))


def _field(output: object, name: str) -> Any:
    if isinstance(output, Mapping):
        return output.get(name)
    return getattr(output, name, None)


def _arguments(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the batch with the switches that the model's ``forward`` takes."""
    parameters = inspect.signature(unwrapped(model).forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "output_hidden_states" not in parameters and not takes_any:
        raise ValueError(_NO_HIDDEN_STATES)
    arguments: dict[str, Any] = {**batch, "output_hidden_states": True}
    for name, value in (("return_dict", True), ("use_cache", False)):
        if name in parameters:
            arguments[name] = value
    return arguments


# ---- norms of a block -------------------------------------------------------------------------


def chi_correction(pairs: int) -> float:
    """Return c_P = E[χ_P]/√P = √(2/P) Γ((P+1)/2)/Γ(P/2).

    The root of the mean of P squared draws of N(0, σ²) has the expectation c_P σ.  Given u, uᵀHw is
    asymptotically Gaussian: dividing by c_P removes the bias.
    """
    return math.sqrt(2 / pairs) * math.exp(math.lgamma((pairs + 1) / 2) - math.lgamma(pairs / 2))


def safe_sqrt(squares: Tensor) -> Tensor:
    """Take square roots with derivative 0, not infinity, at 0 (a norm's subgradient there)."""
    # 0, whose root has an infinite slope, is replaced by 1: infinity times a cotangent of 0 is NaN.
    # threshold passes no gradient on there; torch.where would launch more kernels.
    return F.threshold(squares, 0, 1).sqrt().add(squares == 0, alpha=-1)


def hessian_norm(squares: Tensor, settings: Settings, *, scale: float, pairs: int = 0) -> Tensor:
    """Combine ‖H_{t,j}‖² of the j in D into the norm of ``settings``: ``[..., |D|]`` → ``[...]``.

    Args:
        scale: factor of the sum over D, from `sample_dimensions`.
        pairs: number of pairs of directions that the squares are means over; 0: they are exact.
    """
    if settings.squared:
        return squares.sum(-1) * scale
    if not settings.per_dimension:
        return safe_sqrt(squares.sum(-1))
    correction = chi_correction(pairs) if pairs else 1.0
    return safe_sqrt(squares).sum(-1) * (scale / correction)


def select_blocks(result: ForwardPass, settings: Settings) -> list[Tensor]:
    """Return the outputs that ``settings.layers`` names; a classifier's logits have one token."""
    if settings.layers != "logits":
        blocks = [result.blocks[k] for k in layer_indices(settings.layers, len(result.blocks))]
        for block in blocks:
            if block.is_complex():
                raise TypeError(
                    f"a hidden state is {block.dtype}; expected real numbers: let the model return "
                    "torch.view_as_real(state).flatten(-2)"
                )
        return blocks
    logits = result.logits
    if logits is None:
        raise ValueError("layers='logits' was asked for, but the model returned no logits")
    if logits.ndim != 2:
        return [logits]
    if isinstance(logits, JetTensor):  # whose pass has ended
        return [logits.with_streams(logits.streams.unsqueeze(2))]
    return [logits.unsqueeze(1)]


def block_tokens(block: Tensor, mask: Tensor, settings: Settings) -> Tensor:
    """Return ``[B, T]``, the tokens in scope; the one token of a classifier's logits always is."""
    if block.shape[:2] == mask.shape:
        return tokens_in_scope(mask, settings.scope)
    if block.shape[1] == 1:
        return torch.ones_like(mask[:, :1])
    raise ValueError(
        f"a block output of shape {list(block.shape)} does not match the batch's tokens "
        f"{list(mask.shape)}; a model that adds tokens of its own (prompt tuning) cannot be "
        "measured: use LoRA"
    )


# ---- the forward estimator ----------------------------------------------------------------------


def measure_jet(
    model: nn.Module, batch: Mapping[str, Tensor], settings: Settings, random: Randomness
) -> tuple[Tensor, Tensor | None, Tensor, ForwardPass]:
    """Estimate ‖J_t‖ and Σ_j ‖H_{t,j}‖ of the chosen layers; differentiable.

    The mean over directions of ‖(J u_i)_t‖² has the expectation ‖J_t‖²; that over pairs of
    (u_iᵀ H_{t,j} u_i')² has ‖H_{t,j}‖², since u_i and u_i' are independent.  More than 4 directions
    take several passes of about as many each; their squares are averaged before any root.  Dropout
    draws anew in each, as a CUDA graph has to, so that the means are over its masks, too.

    Raises:
        RuntimeError: the model draws nothing, and is not the same function in each pass.
    """
    if settings.check_values:
        padding_mask(batch)  # raises where a row has no token
    passes = math.ceil(settings.directions / MAX_DIRECTIONS)
    # Passes of nearly equal size: a pass of one direction would have no pair, and no Hessian.
    quotient, remainder = divmod(settings.directions, passes)
    counts = [quotient + (number < remainder) for number in range(passes)]
    pairs = sum(math.comb(count, 2) for count in counts)
    jacobian: list[Tensor] = []  # mean squares over the passes
    hessian: list[Tensor] = []
    first: list[Tensor] = []  # block outputs of the first pass
    generators = Generators() if passes > 1 and not library.capturing() else None

    def repeated(count: int, values: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
        for directions, before in ((count, values), (counts[0], first), (counts[0], first)):
            again = _jet_pass(model, batch, settings, deepcopy(random), directions)
            yield before, [primal_of(block) for block in select_blocks(again, settings)]

    for number, count in enumerate(counts):
        this = _jet_pass(model, batch, settings, random, count)
        blocks = [_as_jet(block) for block in select_blocks(this, settings)]
        streams = [block.streams for block in blocks]
        if generators and not generators.have_advanced():
            values = [stack[0].detach() for stack in streams]
            if number:
                require_same(model, first, values, repeated(count, values), _DIFFERS)
            else:
                first = [value.clone() for value in values]
        if number == 0:
            # D is drawn once: the squares of all passes are averaged per dimension.
            result, tokens = this, block_tokens(blocks[0], this.mask, settings)
            widths, device = [block.shape[-1] for block in blocks], streams[0].device
            sampled = sample_dimensions(widths, settings, random.dimensions, device)
        squares = [
            jet_mean_squares(stack, count, tokens.to(stack.device), indices)
            for stack, (indices, _) in zip(streams, sampled, strict=True)
        ]
        jacobian = _add_weighted(jacobian, [mean for mean, _ in squares], count / sum(counts))
        if settings.second_order:
            # The tensor norm is the root of the sum over D.
            seconds = [s if settings.per_dimension else s.sum(-1, keepdim=True) for _, s in squares]
            hessian = _add_weighted(hessian, seconds, math.comb(count, 2) / pairs)
    norms = None
    if settings.second_order:
        # Layers that are stacked have one width, and so one scale.
        scales = [scale for _, scale in sampled[: len(hessian)]]
        stacks = [
            hessian_norm(stack, settings, scale=scale, pairs=pairs)
            for stack, scale in zip(hessian, scales, strict=True)
        ]
        norms = stacks[0] if len(stacks) == 1 else torch.cat(stacks)
    (means,) = jacobian
    return means if settings.squared else safe_sqrt(means), norms, tokens, result


def _add_weighted(total: list[Tensor], means: list[Tensor], weight: float) -> list[Tensor]:
    """Add the layers' means of one pass, times its weight, to the total of the passes before."""
    means = stack_equal_shapes(means)
    if weight != 1:
        means = [mean * weight for mean in means]
    return [a + b for a, b in zip(total, means, strict=True)] if total else means


def _jet_pass(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    settings: Settings,
    random: Randomness,
    count: int,
) -> ForwardPass:
    def enter(x: Tensor, mask: Tensor) -> JetTensor:
        directions = draw_directions(
            x.detach(),
            count,
            mask=mask,
            distribution=settings.distribution,
            counter=random.directions,
        )
        order = 2 if settings.second_order else 1
        return make_input(x, directions, order=order, check_values=settings.check_values)

    return run_model(model, batch, enter, through_head=settings.layers == "logits")


def _as_jet(block: Tensor) -> JetTensor:
    if not isinstance(block, JetTensor):
        raise ValueError(
            "a hidden state does not depend on the embeddings (detached, or another input's); "
            "its derivatives would be zero"
        )
    return block


ENGINES["jet"] = measure_jet
