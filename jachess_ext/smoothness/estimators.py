"""`jx.smoothness`: how strongly hidden states depend on token embeddings.

Two estimators share a forward pass of the model with replaced token embeddings (`run_model`): the
forward estimator, in this file, computes every layer, token and dimension in one Taylor-mode pass;
the reverse estimator is in `reverse`.
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
from ..models import (
    SEVERAL_EMBEDDINGS_MESSAGE,
    backbone_of,
    hooked_embeddings,
    padding_mask,
    unwrapped,
)
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
_MESSAGE = (
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
        tokens: ``[B, T]`` booleans, true at the real tokens in scope.

    Examples:
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
            hessian_text = "" if self.hessian is None else f", hessian {self.hessian[k].item():.4g}"
            lines.append(f"  layer {k}: jacobian {jacobian:.4g}{hessian_text}")
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

    The block outputs are the model's ``hidden_states[1:]``; x is the output of its embedding layer.
    The result is differentiable unless under ``torch.no_grad()``.  The model runs in its current
    mode: call ``model.eval()`` first for results without dropout noise.

    Args:
        model: a transformers model (or one with ``get_input_embeddings`` and ``hidden_states``).
        batch: a batch as a collator yields it: input_ids or inputs_embeds, attention_mask, ...
        engine: "jet": one Taylor-mode pass. "reverse": Eq. 5 and 6, many backward passes.
        directions: number of random directions (jet; the Hessian needs 2 or more) or projections
            (reverse).
        layers: "all" blocks, a list of block numbers from 0, or "logits".
        scope: "all" real tokens, the "first" ([CLS]) or the "last" real token.
        dimensions: number of output dimensions D to sample per layer, anew in every call; or "all",
            whose sum is scaled by 10/d so that it is comparable.
        hessian: whether to compute second derivatives too.
        seed: any 64-bit integer. The same seed and step give the same directions and dimensions,
            independently of padding, precision and device; None: a seed drawn from torch's global
            CPU generator (`torch.manual_seed`).
        step: number of the step; every step of a seed draws independent directions and dimensions.
        hessian_norm: "per_dimension", Σ_j ‖H_j‖_F as in Eq. 7; "tensor", √(Σ_j ‖H_j‖_F²) over all
            dimensions.
        squared: whether to return squared norms, whose estimators are unbiased.
        distribution: distribution of the directions, "gaussian" or "rademacher".

    Raises:
        TypeError, ValueError: an argument is invalid; the batch has no inputs, an all-padding row
            or a mask of the wrong shape; embeddings are not finite; the model returns no hidden
            states.
        MissingJetRule: the model uses an operation that the jet engine has no rule for.

    Examples:
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
    """Return the smoothness measured by the engine ``settings.engine``, and its forward pass.

    The norms have no graph under ``torch.no_grad()``.
    """
    jacobian, hessian, tokens, result = ENGINES[settings.engine](model, batch, settings, random)
    if not torch.is_grad_enabled():
        jacobian, hessian = jacobian.detach(), None if hessian is None else hessian.detach()
    means = None if hessian is None else hessian.sum(-1).mean(-1)
    return Smoothness(jacobian.sum(-1).mean(-1), means, jacobian, hessian, tokens), result


# ---- a pass of the model ------------------------------------------------------------------------
#
# The batch is passed to the model unchanged, so that position ids, pooling positions and masks are
# those that the model itself derives from ``input_ids``.  A temporary hook replaces the output of
# the embedding layer.


@dataclass
class ForwardPass:
    """Results of a forward pass.

    Attributes:
        embeddings: the plain embeddings x, ``[B, T, d]``.
        mask: ``[B, T]``, true at real tokens.
        blocks: the model's ``hidden_states[1:]``, K tensors or jets ``[B, T, d]``.
        output: the model's output, with plain tensors instead of jets.
        logits: the model's logits, a jet if the jets were passed through the head; None if it
            returns none.
    """

    embeddings: Tensor
    mask: Tensor
    blocks: list[Tensor]
    output: Any
    logits: Tensor | None


def run_model(
    model: nn.Module, batch: Mapping[str, Tensor], enter: Replace, *, through_head: bool = True
) -> ForwardPass:
    """Run ``model(**batch)`` with its embeddings x replaced by ``enter(x, mask)``.

    Args:
        enter: returns a jet with the primal x, or x itself.
        through_head: whether the head gets jets; False: only primals, so that head and loss cost no
            more than without jets.

    Raises:
        ValueError: the model returns no hidden states, or has no embedding layer to hook.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    collected: list[Tensor] = []

    def collect_states(module: nn.Module, args: object, output: object) -> object:
        """Collect the backbone's hidden states; return its output with primals for the head."""
        # The hidden states are collected here since the model's own output will hold only primals.
        states = _field(output, "hidden_states")
        if states and len(states) > 1:
            collected.append(states)
        return map_tensors(output, primal_of)

    def replace(x: Tensor, real: Tensor) -> Tensor:
        if seen:
            raise ValueError(SEVERAL_EMBEDDINGS_MESSAGE)
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
    """Return the batch as arguments of the model's ``forward``, with output_hidden_states=True, and
    with return_dict and use_cache if ``forward`` has these arguments."""
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
    """Return the bias factor c_P = E[χ_P]/√P = √(2/P) Γ((P+1)/2)/Γ(P/2) for P pairs.

    The root mean square of P draws of N(0, σ²) has the expectation c_P σ.  Given u, uᵀHw is
    asymptotically Gaussian: dividing the estimated norm by c_P removes its bias.
    """
    return math.sqrt(2 / pairs) * math.exp(math.lgamma((pairs + 1) / 2) - math.lgamma(pairs / 2))


def safe_sqrt(squares: Tensor) -> Tensor:
    """Return square roots whose derivative at 0 is 0 (a subgradient of the norm), not infinity."""
    # 0 is replaced by 1, since an infinite slope times a cotangent of 0 is NaN. The gradient of
    # threshold is 0 there; torch.where would launch more kernels.
    return F.threshold(squares, 0, 1).sqrt().add(squares == 0, alpha=-1)


def hessian_norm(squares: Tensor, settings: Settings, *, scale: float, pairs: int = 0) -> Tensor:
    """Return the Hessian norm that ``settings`` describes, ``[...]``.

    Args:
        squares: ‖H_{t,j}‖² of all j in D, ``[..., |D|]``.
        scale: factor of the sum over D, from `sample_dimensions`.
        pairs: number of pairs of directions over which the squares are averaged; 0: no bias
            correction.
    """
    if settings.squared:
        return squares.sum(-1) * scale
    if not settings.per_dimension:
        return safe_sqrt(squares.sum(-1))
    correction = chi_correction(pairs) if pairs else 1.0
    return safe_sqrt(squares).sum(-1) * (scale / correction)


def select_blocks(result: ForwardPass, settings: Settings) -> list[Tensor]:
    """Return the outputs chosen by ``settings.layers``; a classifier's logits are returned with one
    token, ``[B, 1, C]``.

    Raises:
        TypeError: a hidden state is complex.
        ValueError: ``layers`` is invalid, or "logits" and the model returned none.
    """
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
    """Return the tokens in scope, booleans ``[B, T]``; ``[B, 1]``, all true, for a classifier's
    logits.

    Raises:
        ValueError: the block has other tokens than the mask.
    """
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

    The mean over directions of ‖(J u_i)_t‖² has the expectation ‖J_t‖²; the mean over pairs of
    (u_iᵀ H_{t,j} u_i')² has the expectation ‖H_{t,j}‖², since u_i and u_i' are independent.  More
    than 4 directions are split over several passes, about equally; the squares of all passes are
    averaged before roots are taken.  Each pass draws its own dropout masks, as in a CUDA graph, so
    that the means are over masks, too.

    Returns:
        The norms of the Jacobian and of the Hessian (or None), ``[K, B, T]``; the tokens in scope;
        and the forward pass.

    Raises:
        RuntimeError: several passes are needed, the model draws no random numbers (dropout), and
            yet its outputs differ between passes.
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
    can_read = not (library.capturing() or torch.compiler.is_compiling())
    generators = Generators() if passes > 1 and can_read else None

    def repeated(count: int, values: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
        for directions, expected in ((count, values), (counts[0], first), (counts[0], first)):
            again = _jet_pass(model, batch, settings, deepcopy(random), directions)
            yield expected, [primal_of(block) for block in select_blocks(again, settings)]

    for number, count in enumerate(counts):
        forward_pass = _jet_pass(model, batch, settings, random, count)
        blocks = [_as_jet(block) for block in select_blocks(forward_pass, settings)]
        streams = [block.streams for block in blocks]
        if generators and not generators.have_advanced():
            values = [stack[0].detach() for stack in streams]
            if number:
                require_same(model, first, values, repeated(count, values), _MESSAGE)
            else:
                first = [value.clone() for value in values]
        if number == 0:
            # D is drawn once: the squares of all passes are averaged per dimension.
            result, tokens = forward_pass, block_tokens(blocks[0], forward_pass.mask, settings)
            widths, device = [block.shape[-1] for block in blocks], streams[0].device
            sampled = sample_dimensions(widths, settings, random.dimensions, device)
        squares = [
            jet_mean_squares(stack, count, tokens.to(stack.device), indices)
            for stack, (indices, _) in zip(streams, sampled, strict=True)
        ]
        jacobian = _add_weighted(jacobian, [mean for mean, _ in squares], count / sum(counts))
        if settings.second_order:
            # The tensor norm is the root of the sum over D.
            second = [s if settings.per_dimension else s.sum(-1, keepdim=True) for _, s in squares]
            hessian = _add_weighted(hessian, second, math.comb(count, 2) / pairs)
    norms = None
    if settings.second_order:
        # Layers in one stack have the same width, and so the same scale.
        scales = [scale for _, scale in sampled[: len(hessian)]]
        stacks = [
            hessian_norm(stack, settings, scale=scale, pairs=pairs)
            for stack, scale in zip(hessian, scales, strict=True)
        ]
        norms = stacks[0] if len(stacks) == 1 else torch.cat(stacks)
    (means,) = jacobian
    return means if settings.squared else safe_sqrt(means), norms, tokens, result


def _add_weighted(total: list[Tensor], means: list[Tensor], weight: float) -> list[Tensor]:
    """Return the total of the previous passes plus weight · the layers' means of this pass.

    Args:
        total: stacks like those that `stack_equal_shapes` returns; [] before the first pass.
    """
    means = stack_equal_shapes(means)
    if weight != 1:
        means = [mean * weight for mean in means]
    return [a + b for a, b in zip(total, means, strict=True)] if total else means


def _jet_pass(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    settings: Settings,
    random: Randomness,
    num_directions: int,
) -> ForwardPass:
    def enter(x: Tensor, mask: Tensor) -> JetTensor:
        directions = draw_directions(
            x.detach(),
            num_directions,
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
