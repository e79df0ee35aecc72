"""`jx.smoothness` and `jx.SmoothnessProbe`: how strongly hidden states react to token embeddings.

Two estimators share one forward pass of the model with its token embeddings replaced (`run_model`):

- jet takes every layer, token and dimension from one Taylor-mode pass.
- reverse takes Eq. 5 and 6 of the paper as they stand,

      ‖J_t‖_F ≈ √( 1/p Σ_i ‖∂(v_i·z_t)/∂x‖² )        ‖H_j‖_F ≈ √( 1/p Σ_i ‖∂(v_i·∂z_j/∂x)/∂x‖² ),

  with one vector–Jacobian product per layer, token and projection; per sampled dimension with one
  more, and p on top of it.  Rows do not see each other and share every product.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .._io import axes_or_new
from ..jet.engine.context import without_dynamo
from ..jet.engine.layout import MAX_DIRECTIONS, map_tensors
from ..jet.engine.tensor import JetTensor, primal_of
from ..jet.engine.types import Args, Function, Named
from ..jet.passes.eager import check_point, make_input
from ..jet.passes.fsdp import jets_through_fsdp
from ..jet.passes.scope import open_run
from ..jet.rows.check import Generators
from ..jet.rows.sameness import CHANGES, require_same
from ..models import (
    TWO_STACKS,
    backbone_of,
    hooked_embeddings,
    in_mode,
    leaf_embeddings,
    on_device_of,
    padding_mask,
    unwrapped,
    without_labels,
)
from ..ops import jet_mean_squares, library
from ..ops.library import wide_dtype, widened
from ..ops.norm import normalised_jet
from ..torch_private import functional as F
from .directions import Distribution, draw_directions
from .parallel import is_sharded
from .settings import (
    ENGINES,
    Dimensions,
    Engine,
    HessianNorm,
    Layers,
    Randomness,
    Scope,
    Settings,
    check_every,
    layer_indices,
    sample_dimensions,
    stacked,
    token_weights,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Enter = Callable[[Tensor, Tensor], Tensor]
PREFIX = "smoothness/"
_DIFFERS = (
    f"more than {MAX_DIRECTIONS} directions take several passes, and the model is not the same "
    f"function in each: {CHANGES}. Call eval(), or take {MAX_DIRECTIONS} directions at most"
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
) -> tuple[Smoothness, Pass]:
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
class Pass:
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
    model: nn.Module, batch: Mapping[str, Tensor], enter: Enter, *, through_head: bool = True
) -> Pass:
    """Call ``model(**batch)`` with its embeddings x replaced by ``enter(x, mask)``.

    Args:
        enter: makes a jet of x, or returns x itself.
        through_head: False hands the head primals only, so that head and loss cost what they
            cost without jets.

    Raises:
        ValueError: the model returns no hidden states, or has no embedding layer to hook.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    collected: list[Tensor] = []

    def keep_states(module: nn.Module, args: object, output: object) -> object:
        """Keep the backbone's hidden states, and hand primals on."""
        # Kept here and not taken from the model's output, which then has no jets any more.
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
            hooks.enter_context(open_run(entered.jet_layout.run))
        return entered

    with ExitStack() as hooks:
        arguments = hooks.enter_context(hooked_embeddings(model, replace, _arguments(model, batch)))
        if not through_head:
            hooks.enter_context(backbone_of(model).register_forward_hook(keep_states))
        hooks.enter_context(jets_through_fsdp())
        output = model(**arguments)
    states = collected[0] if collected else _field(output, "hidden_states")
    if not states or len(states) < 2:
        raise ValueError(_NO_HIDDEN_STATES)
    plain = map_tensors(output, primal_of)
    return Pass(*seen[0], list(states[1:]), plain, _field(output, "logits"))


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

    The root of a mean of P squares of a Gaussian is in the mean c_P times its standard deviation.
    Given u, uᵀHw is asymptotically Gaussian: dividing by c_P removes the bias.
    """
    return math.sqrt(2 / pairs) * math.exp(math.lgamma((pairs + 1) / 2) - math.lgamma(pairs / 2))


def safe_sqrt(squares: Tensor) -> Tensor:
    """Take square roots with derivative 0, not infinity, at 0 (a norm's subgradient there)."""
    # 1 stands in for 0, whose root has an infinite slope: it would meet a cotangent of 0 and become
    # NaN. threshold hands no gradient on there; torch.where would launch more kernels.
    return F.threshold(squares, 0, 1).sqrt().add(squares == 0, alpha=-1)


def hessian_norm(squares: Tensor, settings: Settings, *, scale: float, pairs: int = 0) -> Tensor:
    """Sum ‖H_{t,j}‖² of the j in D to the norm of ``settings``: ``[..., |D|]`` → ``[...]``.

    Args:
        scale: of the sum over D, from `sample_dimensions`.
        pairs: how many pairs the squares are means of; 0 where they are exact.
    """
    if settings.squared:
        return squares.sum(-1) * scale
    if not settings.per_dimension:
        return safe_sqrt(squares.sum(-1))
    correction = chi_correction(pairs) if pairs else 1.0
    return safe_sqrt(squares).sum(-1) * (scale / correction)


def chosen_blocks(result: Pass, settings: Settings) -> list[Tensor]:
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
        return token_weights(mask, settings.scope)
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
) -> tuple[Tensor, Tensor | None, Tensor, Pass]:
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
    share, remainder = divmod(settings.directions, passes)
    counts = [share + (number < remainder) for number in range(passes)]
    pairs = sum(math.comb(count, 2) for count in counts)
    jacobian: list[Tensor] = []  # mean squares over the passes
    hessian: list[Tensor] = []
    first: list[Tensor] = []  # the values of the first pass
    generators = Generators() if passes > 1 and not library.capturing() else None

    def repeated(count: int, values: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
        for directions, before in ((count, values), (counts[0], first), (counts[0], first)):
            again = _jet_pass(model, batch, settings, deepcopy(random), directions)
            yield before, [primal_of(block) for block in chosen_blocks(again, settings)]

    for number, count in enumerate(counts):
        this = _jet_pass(model, batch, settings, random, count)
        blocks = [_as_jet(block) for block in chosen_blocks(this, settings)]
        streams = [block.streams for block in blocks]
        if generators and not generators.moved():
            values = [stack[0].detach() for stack in streams]
            if number:
                require_same(model, first, values, repeated(count, values), _DIFFERS)
            else:
                first = [value.clone() for value in values]
        if number == 0:
            # D is drawn once: the squares of all passes are to be means of the same ‖H_{t,j}‖².
            result, tokens = this, block_tokens(blocks[0], this.mask, settings)
            widths, device = [block.shape[-1] for block in blocks], streams[0].device
            sampled = sample_dimensions(widths, settings, random.dimensions, device)
        squares = [
            jet_mean_squares(of_layer, count, tokens.to(of_layer.device), indices)
            for of_layer, (indices, _) in zip(streams, sampled, strict=True)
        ]
        jacobian = _with_share(jacobian, [first for first, _ in squares], count / sum(counts))
        if settings.second_order:
            # Of the tensor norm only the sum over D is wanted, whose root is taken once.
            seconds = [s if settings.per_dimension else s.sum(-1, keepdim=True) for _, s in squares]
            hessian = _with_share(hessian, seconds, math.comb(count, 2) / pairs)
    norms = None
    if settings.second_order:
        # Layers that are one tensor have one width, and so one scale.
        scales = [scale for _, scale in sampled[: len(hessian)]]
        parts = [
            hessian_norm(of_layers, settings, scale=scale, pairs=pairs)
            for of_layers, scale in zip(hessian, scales, strict=True)
        ]
        norms = parts[0] if len(parts) == 1 else torch.cat(parts)
    (means,) = jacobian
    return means if settings.squared else safe_sqrt(means), norms, tokens, result


def _with_share(total: list[Tensor], of_pass: list[Tensor], share: float) -> list[Tensor]:
    """Add the layers' means of a pass, of which there are several where its share is not 1."""
    means = stacked(of_pass)
    if share != 1:
        means = [mean * share for mean in means]
    return [a + b for a, b in zip(total, means, strict=True)] if total else means


def _jet_pass(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    settings: Settings,
    random: Randomness,
    count: int,
) -> Pass:
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


# ---- the reverse estimator ----------------------------------------------------------------------


@dataclass
class Graph:
    """Plain outputs with the graph that leads to the embeddings.

    Attributes:
        x: ``[B, T, d]`` embeddings.
        blocks: the chosen outputs, ``[B, T, d_k]``.
        mask: ``[B, T]``, real tokens.
        tokens: ``[B, T']``, real tokens in scope (T' = 1 for a classifier's logits).
        train: whether the norms will be differentiated.
    """

    x: Tensor
    blocks: list[Tensor]
    mask: Tensor
    tokens: Tensor
    result: Pass
    settings: Settings
    random: Randomness
    train: bool

    def gradient(self, scalar: Tensor, create_graph: bool) -> Tensor:
        """Return ∂scalar/∂x, zero at padded positions."""
        (gradient,) = torch.autograd.grad(
            scalar, self.x, create_graph=create_graph, retain_graph=True, materialize_grads=True
        )
        return gradient * self.mask.unsqueeze(-1)

    def squares(self, scalar: Tensor) -> Tensor:
        """Return ‖∂scalar/∂x‖² per row, ``[B]``.

        The scalar is a sum over the rows.  No row's outputs depend on another row's x, so that one
        backward pass gives each row the gradient of its own summand.
        """
        return self.gradient(scalar, self.train).square().sum((-1, -2))

    def draw(self, like: Tensor, mask: Tensor | None) -> Tensor:
        """Draw projections v_i, ``[p, *like.shape]``."""
        return draw_directions(
            like.detach(),
            self.settings.directions,
            mask=mask,
            distribution=self.settings.distribution,
            counter=self.random.directions,
        )

    def per_token(self, norm: Callable[[int], Tensor]) -> Tensor:
        """Return ``[B, T]``: ``norm(t)``, ``[B]``, at the tokens in scope and zero elsewhere."""
        zero = self.x.new_zeros(len(self.x))
        counted = self.tokens.any(0).tolist()
        # A token costs a backward pass for each projection, so that those out of scope in every row
        # are left out before, not multiplied by 0 afterwards.
        columns = [norm(t) if counts else zero for t, counts in enumerate(counted)]
        return torch.stack(columns, 1) * self.tokens


def measure_reverse(
    model: nn.Module, batch: Mapping[str, Tensor], settings: Settings, random: Randomness
) -> tuple[Tensor, Tensor | None, Tensor, Pass]:
    """Estimate ‖J_t‖ and Σ_j ‖H_{t,j}‖ from ``settings.directions`` projections; differentiable."""
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
        ValueError: in inference mode; with gradient checkpointing, whose backward would build
            another graph; with sharded weights, which a double backward reads after they are freed.
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
        # The fused kernels of attention have one backward each; math attention can be
        # differentiated as often as needed.
        contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        if train:  # a third derivative, where the norm or its gradient is differentiated
            contexts.enter_context(ComposedNorms())
        result = run_model(model, batch, enter)
    blocks = chosen_blocks(result, settings)
    tokens = block_tokens(blocks[0], mask, settings)
    return Graph(entered[0], blocks, mask, tokens, result, settings, random, train)


def _jacobian(graph: Graph, block: Tensor) -> Tensor:
    """Return ``[B, T]``, the norms ‖J_t‖ of a block."""
    # Drawn once for all tokens: at a padded position the draw is 0, so that the numbers of the
    # real tokens do not depend on how far the batch is padded.
    projections = graph.draw(block, graph.mask if block.shape[:2] == graph.mask.shape else None)

    def norm(t: int) -> Tensor:
        squares = torch.stack([graph.squares((v[:, t] * block[:, t]).sum()) for v in projections])
        return squares.mean(0) if graph.settings.squared else safe_sqrt(squares.mean(0))

    return graph.per_token(norm)


def _hessian(graph: Graph, block: Tensor) -> Tensor:
    """Return ``[B, T]``, the sums over D of the norms ‖H_{t,j}‖ of a block."""
    width = block.shape[-1]
    ((indices, scale),) = sample_dimensions(
        [width], graph.settings, graph.random.dimensions, block.device
    )
    chosen = range(width) if indices is None else indices.tolist()

    def norm(t: int) -> Tensor:
        # Sum over the batch inside: rows do not see each other, hence one double backward gives all
        # rows' squares at once.
        squares = torch.stack([_hessian_squares(graph, block[:, t, j]) for j in chosen], -1)
        return hessian_norm(squares, graph.settings, scale=scale)

    return graph.per_token(norm)


def _hessian_squares(graph: Graph, outputs: Tensor) -> Tensor:
    """Return ``[B]``: 1/p Σ_i ‖∂(v_i·∂z_j/∂x)/∂x‖², which estimates ‖∂²z_j/∂x²‖² of each row."""
    gradient = graph.gradient(outputs.sum(), create_graph=True)
    if not gradient.requires_grad:  # z_j is linear in x
        return gradient.new_zeros(len(gradient))
    projections = graph.draw(graph.x, graph.mask)
    return torch.stack([graph.squares((v * gradient).sum()) for v in projections]).mean(0)


ENGINES.update(jet=measure_jet, reverse=measure_reverse)


# ---- norms whose third derivative is right ----------------------------------------------------
#
# torch's layer norm saves its statistics as constants of the double backward, so that a third
# derivative silently drops the terms through them (torch 2.13: parameter gradients of ‖H‖ off by
# up to a third against finite differences in float64; first and second derivatives are right).
# So does the fused CUDA kernel of RMS norm.


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Compute (x − μ) (v + ε)^(−1/2) w + b of plain operations."""
    return _composed(input, normalized_shape, weight, bias, eps, centred=True)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Compute x (mean x² + ε)^(−1/2) w of plain operations."""
    eps = torch.finfo(wide_dtype(input.dtype)).eps if eps is None else eps
    return _composed(input, normalized_shape, weight, None, eps, centred=False)


def _composed(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> Tensor:
    rows = widened(input).flatten(-len(normalized_shape))
    y = normalised_jet(rows.unsqueeze(0), eps, None, centred)[0].reshape(input.shape)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y if torch.is_autocast_enabled(input.device.type) else y.to(input.dtype)


_COMPOSED: dict[Function, Function] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
}


class ComposedNorms(TorchFunctionMode):
    """Replace torch's layer and RMS norms by the composed forms above."""

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Named | None = None
    ) -> object:
        return _COMPOSED.get(func, func)(*args, **(kwargs or {}))


# ---- measuring without penalising -------------------------------------------------------------


class SmoothnessProbe:
    """Measure a model on a fixed batch along the same directions each time.

    The model runs in evaluation mode and is left as it was, torch's random numbers included.  The
    figures are

    - ``smoothness/jacobian_k``: mean over the rows of Σ_t ‖∂h_t/∂x‖_F of block k, estimated along
      random directions; ``smoothness/jacobian``: their sum over the blocks;
    - ``smoothness/hessian_k``, ``smoothness/hessian``: the same of second derivatives;
    - ``smoothness/logit_jacobian``, ``smoothness/margin_over_slope``: see `decision_slopes`.

    Example:
        >>> probe = jx.SmoothnessProbe(batch)
        >>> sorted(probe(model))[:3]
        ['smoothness/jacobian', 'smoothness/jacobian_0', 'smoothness/jacobian_1']

    Args:
        batch: rows as a collator yields them: input_ids, attention_mask, and "labels" for the
            margin.  It is moved to the model's device.
        every: optimiser steps between two measurements of a callback.
        hessian: whether to measure second derivatives too.
        directions: how many random directions, as for `jx.smoothness`.
        seed: of these directions.

    Attributes:
        history: the figures of each measurement of a callback, with its "step".

    Raises:
        ValueError: ``every`` is not a whole number from 1 up, or a row of the batch is all padding.
    """

    def __init__(
        self,
        batch: Mapping[str, Tensor],
        *,
        every: int = 100,
        hessian: bool = False,
        directions: int = 2,
        seed: int = 0,
    ) -> None:
        check_every(every)
        padding_mask(batch)  # refuses a batch that cannot be measured
        self.batch = dict(batch)
        self.every, self.seed = every, seed
        self.hessian, self.directions = hessian, directions
        self.history: list[dict[str, float]] = []

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the figures by name.

        Raises:
            MissingJetRule: the model uses an operation that the engine has no rule for.
        """
        batch = on_device_of(model, self.batch)
        how: dict[str, Any] = {"hessian": self.hessian, "directions": self.directions}
        with torch.no_grad(), in_mode(model, training=False):
            norms = smoothness(model, without_labels(batch), seed=self.seed, **how)
        figures: dict[str, float] = {}
        for name, values in (("jacobian", norms.jacobian), ("hessian", norms.hessian)):
            if values is not None:
                figures[name] = float(values.sum())
                figures |= {f"{name}_{k}": value for k, value in enumerate(values.tolist())}
        figures |= decision_slopes(model, batch)
        return {PREFIX + name: value for name, value in figures.items()}

    def measure(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the figures and add them to ``history``."""
        figures = self(model)
        self.history.append({"step": step, **figures})
        return figures

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the Jacobian norms of ``history`` over the steps, a line a block.

        Args:
            ax: matplotlib axes to draw on; None: new axes.

        Returns:
            The axes.

        Raises:
            ValueError: nothing was measured yet.
            MissingExtra: matplotlib is not installed.
        """
        if not self.history:
            raise ValueError("nothing was measured yet; train with the monitor first")
        ax = axes_or_new(ax)
        steps = [entry["step"] for entry in self.history]
        block = 0
        while (name := f"{PREFIX}jacobian_{block}") in self.history[0]:
            ax.plot(steps, [entry[name] for entry in self.history], "o-", label=f"block {block}")
            block += 1
        ax.set_yscale("log")
        ax.set_xlabel("optimiser step")
        ax.set_ylabel("Jacobian norm")
        ax.legend()
        return ax

    def measured(self, step: int) -> bool:
        """Tell whether the last measurement was at this step."""
        return bool(self.history) and self.history[-1]["step"] == step


def decision_slopes(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Measure how fast the logits and the margin change with the embeddings x, by exact gradients.

    The model runs in evaluation mode, and padding has no part in x.

    Args:
        batch: on the model's device; with class numbers ``[N]`` under "labels" for the margin.

    Returns:
        ``logit_jacobian``: mean over rows of ‖∂z/∂x‖_F; and ``margin_over_slope``: mean over rows
        of m/‖∂m/∂x‖ with the margin m = z_y − max_{c≠y} z_c of the label y.  That is about the
        distance of x from the decision's border (Sokolić et al. 2017), negative where the row is
        wrong, and does not change with a scale of the logits.  Without class numbers there is no
        margin; where the logits are not ``[N, C]`` (language models, token classifiers), nothing.

    Example:
        >>> sorted(decision_slopes(model, batch))
        ['logit_jacobian', 'margin_over_slope']
    """
    batch = dict(batch)
    labels = batch.pop("labels", None)
    hooked = leaf_embeddings(model, batch)
    with torch.enable_grad(), in_mode(model, training=False), hooked as (batch, leaves):
        logits = model(**batch).logits
        if logits.ndim != 2:
            return {}
        if len(leaves) > 1:
            raise ValueError(TWO_STACKS)
        real = padding_mask(batch).unsqueeze(-1)

        def norms(of: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(of.sum(), leaves, retain_graph=True)
            return (gradient * real).flatten(1).double().norm(dim=1)

        squares = torch.stack([norms(z).square() for z in logits.unbind(1)])
        result = {"logit_jacobian": squares.sum(0).sqrt().mean().item()}
        classes = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
        if labels is not None and classes and logits.shape[1] > 1:
            right = logits.gather(1, labels.unsqueeze(1))[:, 0]
            others = logits.scatter(1, labels.unsqueeze(1), -math.inf).amax(1)
            margin = right - others
            distance = margin.detach().double() / norms(margin)
            result["margin_over_slope"] = distance.mean().item()
    return result
