"""`jx.JacHess`: Eq. 7 as a differentiable penalty to add to a model's loss."""

from __future__ import annotations

import logging
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._io import DataError, from_json
from ..graphs import is_graphed_step
from ..jet.engine.context import without_dynamo
from ..models import in_mode, is_deepspeed, padding_mask, unwrapped
from ..ops import library
from ..ops.directions import fresh_seed_on, number_on
from ..ops.library import Gradients
from .directions import Distribution
from .estimators import Smoothness, measure
from .parallel import (
    NONFINITE_REMEDY,
    Ranks,
    has_tokens,
    nonfinite_layer,
    nonfinite_text,
    placeholder_row,
    raise_together,
    ranks_of,
    zero_with_gradients,
)
from .settings import (
    Dimensions,
    Engine,
    HessianNorm,
    Layers,
    Randomness,
    Scope,
    Settings,
    check_choice,
)

OnNonfinite = Literal["raise", "skip"]
Weighting = Literal["uniform", "inverse", "norm", "softmax", "raw_softmax"]
WEIGHTINGS = get_args(Weighting)
_LOG = logging.getLogger("jachess_ext")
_MAX_FAILURES = 2
"""Number of steps in a row that cannot be traced, after which all steps run eagerly."""


def layer_profile(weighting: Weighting, norms: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the weights λ of K layers, ``[K]``, positive and summing to 1.

    - uniform: 1/K.
    - inverse: j_k / Σj, so that smoother layers have smaller weights.
    - norm: (Σj − j_k) / ((K−1) Σj).
    - softmax: softmax of −j, standardised over the layers, divided by ``temperature``.
    - raw_softmax: softmax of −j / ``temperature``, as in the paper's code; it saturates if the
      norms differ by orders of magnitude.

    Args:
        norms: Jacobian norms j of the base model's layers, ``[K]``, positive and finite.

    Raises:
        ValueError: ``weighting`` is unknown, ``norms`` are not positive and finite, or
            ``temperature`` is not above 0.

    Examples:
        >>> layer_profile("inverse", torch.tensor([1.0, 3.0]))
        tensor([0.2500, 0.7500])
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weights is {weighting!r}; expected one of {', '.join(WEIGHTINGS)}")
    # In a graph the norms are those that `calibrate` has checked.
    is_checked = is_dynamo_compiling() or (torch.isfinite(norms).all() and (norms > 0).all())
    if norms.ndim != 1 or not is_checked:
        raise ValueError(
            f"the base model's Jacobian norms are {norms.tolist()}; expected one positive, finite "
            "number per layer"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature!r}; expected a finite number above 0")
    count = len(norms)
    if weighting == "uniform" or count == 1:
        return torch.full_like(norms, 1 / count)
    if weighting == "inverse":
        return norms / norms.sum()
    if weighting == "norm":
        return (norms.sum() - norms) / ((count - 1) * norms.sum())
    if weighting == "raw_softmax":
        return torch.softmax(-norms / temperature, 0)
    spread = norms.std(correction=0)
    profile = torch.softmax((norms.mean() - norms) / (spread * temperature), 0)
    return torch.where(spread == 0, 1 / count, profile)


@dataclass(frozen=True)
class BaseNorms:
    """The base model's norms, averaged over tokens in scope; float64 on the CPU.

    Attributes:
        jacobian: mean Jacobian norm per token of each layer, ``[K]``.
        hessian: mean Hessian norm per token of each layer, ``[K]``; None without a Hessian term.
        tokens: number of tokens that the norms are averaged over.

    Examples:
        >>> base = jx.JacHess(model).calibrate(batch)
        >>> base.jacobian.shape, base.tokens
        (torch.Size([2]), 9)
    """

    jacobian: Tensor
    hessian: Tensor | None
    tokens: int

    def state_dict(self) -> dict[str, object]:
        """Return the norms as plain numbers and lists, which can be stored as JSON."""
        hessian = None if self.hessian is None else self.hessian.tolist()
        return {"jacobian": self.jacobian.tolist(), "hessian": hessian, "tokens": self.tokens}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> BaseNorms:
        """Return the norms of a state that `state_dict` returned."""
        hessian = state["hessian"]
        return cls(
            torch.tensor(state["jacobian"], dtype=torch.float64),
            None if hessian is None else torch.tensor(hessian, dtype=torch.float64),
            int(state["tokens"]),
        )


def measure_base(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], settings: Settings, seed: int | None
) -> BaseNorms:
    """Return the norms of ``model`` in evaluation mode, averaged over the tokens of all batches of
    all ranks.

    This is a collective: every rank has to call it.

    Raises:
        ValueError: ``batches`` is empty, or a layer's norm is zero or not finite.
    """
    ranks = ranks_of(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if ranks.size > 1:
        # An iterable may end or fail on one rank only: all batches are loaded, and checked by all
        # ranks together, before any rank enters a collective.
        batches = list(batches)
        raise_together(ranks, lambda: [padding_mask(batch) for batch in batches], device)
    sums: list[Any] = [0, 0 if settings.second_order else None]
    count = 0
    with torch.no_grad(), in_mode(model, training=False):
        for number, batch in enumerate(batches):
            padding_mask(batch)  # raises where a row has no token
            random = Randomness.from_seed(seed, number, rank=ranks.rank, calibrating=True)
            norms, _ = measure(model, batch, settings, random)
            for index, values in enumerate((norms.jacobian_tokens, norms.hessian_tokens)):
                if values is not None:
                    sums[index] = sums[index] + values.sum((-1, -2))
            count += int(norms.tokens.sum())
    if ranks.max(torch.tensor(int(count == 0), device=device)):
        rank_text = f" (rank {ranks.rank} had {count} tokens)" if ranks.size > 1 else ""
        raise ValueError(f"calibrate got no batches{rank_text}; expected at least one")
    base = _mean_over_ranks(sums, count, ranks, device)
    for name, mean in (("Jacobian", base.jacobian), ("Hessian", base.hessian)):
        if mean is not None and not (torch.isfinite(mean) & (mean > 0)).all():
            raise ValueError(
                f"the base model's {name} norms per layer are {mean.tolist()}; expected positive, "
                "finite numbers. A block that is linear in the embeddings has no Hessian: "
                "pass hessian=False or choose other layers"
            )
    return base


def _mean_over_ranks(
    sums: Iterable[Tensor | None], count: int, ranks: Ranks, device: torch.device
) -> BaseNorms:
    """Return the norms per token, averaged over the tokens of all ranks; every rank has to call it.

    Args:
        sums: sums over this rank's tokens of the Jacobian norms and of the Hessian norms (or None),
            ``[K]`` each.
        count: number of this rank's tokens.
        device: device of the collective's tensors.
    """
    tokens = int(ranks.sum(torch.tensor(count, device=device)))
    jacobian, hessian = (
        None if total is None else (ranks.sum(total.to(device)) / tokens).cpu().double()
        for total in sums
    )
    assert jacobian is not None
    return BaseNorms(jacobian, hessian, tokens)


@dataclass(kw_only=True)
class JacHessOutput:
    """Penalty of a step, with the model's output and the norms.

    Attributes:
        loss: strength · R, a scalar; differentiable.
        model_output: the model's own output for the batch, in plain tensors on the same graph; it
            has the task loss if the batch has labels.
        skipped: index, among the chosen layers, of the first one whose norm was not finite;
            ``loss`` and ``total`` are then a zero that gives no parameter a gradient, so that the
            step is skipped.  None if the penalty was finite.
        empty: whether this rank of a data-parallel model had no real token.  To take part in the
            collectives, it ran on a placeholder of one token: ``loss`` and ``total`` are zero with
            zero gradients, and the norms are the placeholder's.
        jacobian, hessian: unweighted batch means of the norms, ``[K]``, as in `Smoothness`;
            ``hessian`` is None without a Hessian term.
        smoothness: the norms per token and their means.

    Examples:
        >>> out = JacHess(model, weights="uniform")(batch)
        >>> bool(out.total == out.loss + out.model_output.loss)
        True
    """

    loss: Tensor
    model_output: Any
    skipped: int | None = None
    empty: bool = False
    smoothness: Smoothness

    @property
    def jacobian(self) -> Tensor:
        return self.smoothness.jacobian

    @property
    def hessian(self) -> Tensor | None:
        return self.smoothness.hessian

    def __repr__(self) -> str:
        task = getattr(self.model_output, "loss", None)
        task_text = "" if task is None else f", beside a task loss of {float(task):.4g}"
        state_text = "empty" if self.empty else f"penalty {float(self.loss):.4g}"
        state_text = state_text if self.skipped is None else f"skipped at layer {self.skipped}"
        return f"JacHessOutput: {state_text}{task_text}\n{self.smoothness!r}"

    @property
    def total(self) -> Tensor:
        """Task loss + ``loss``, to be minimised.

        Raises:
            ValueError: the model computed no task loss.
        """
        if self.skipped is not None or self.empty:
            return self.loss
        task = getattr(self.model_output, "loss", None)
        if task is None:
            raise ValueError(
                "the model returned no task loss: train mode needs 'labels' in the batch (and a "
                "model with a head); for unlabelled data use .loss"
            )
        return task + self.loss


class JacHess:
    """Jacobian and Hessian regularisation (Eq. 7, docs/how_it_works.md).

    Per sequence, ``R = Σ_k λ^(k) Σ_t ( ‖J_t^(k)‖_F + Σ_{j∈D} ‖H_{t,j}^(k)‖_F )``, averaged over
    the batch; ``loss`` is strength · R, and the λ^(k) sum to 1.  With ``normalize`` each layer's
    two norms are divided by their base values per token (from `calibrate`) and averaged over the
    tokens: before training R is then 2 (or 1 without the Hessian) for every model, so that
    strengths are comparable between models.

    Examples:
        >>> reg = JacHess(model, strength=0.01, normalize=True)
        >>> base = reg.calibrate([batch])
        >>> reg(batch).total.backward()

    Args:
        model: as for `jx.smoothness`; it runs in its current mode (train or eval).
        weights: the weights λ of the layers: "uniform", "inverse", "norm", "softmax",
            "raw_softmax" (see `layer_profile`), or one number per layer.  All names but "uniform"
            need base norms: those of `calibrate`, or else of the first step's batch.
        strength: factor of R, ≥ 0. With ``normalize``, start at 0.01: the demo's small encoder
            lost accuracy at 0.03 and collapsed at 0.1 (examples/README.md).  Without ``normalize``
            R is in the hundreds or thousands, and the strength has to be smaller accordingly.
        directions, hessian, dimensions, layers, scope, squared, engine, hessian_norm,
            distribution: as for `jx.smoothness`.
        seed: step n draws the directions and dimensions of `jx.smoothness` with this seed and
            ``step=n``.  None: every step draws a seed from torch's global CPU generator.
        normalize: whether to divide by base norms, see above.
        hessian_gradient: whether the Hessian term is differentiated; False, as in the paper's code:
            it only adds its value.
        temperature: temperature of the softmax weightings.
        on_nonfinite: what to do if R is not finite: "raise", or "skip" the step (see
            `JacHessOutput`), log it and count it in ``skipped``.
        compile: backend of torch.compile, "aot_eager" or "inductor", for a graph that takes each
            step but a model's first (docs/compile.md); None: no graph.  A step that cannot be
            traced runs eagerly, with a warning.

    Attributes:
        step: number of the next step.  In a graph (``compile``, `jx.graphed`) it is an int64 scalar
            on the model's device, which every run increments, so that it draws other directions;
            without a ``seed``, seeds are then drawn from the device's generator.  A captured step
            is not checked for norms that are not finite.
        skipped: layer index -> number of steps in which it was the first layer whose norm was not
            finite.

    A model may be wrapped in DistributedDataParallel or an engine of DeepSpeed, or be under
    ``replicate`` or ``fully_shard``; it may also be called within a wrapped module's forward.  Its
    ranks draw different directions but the same D, agree on skipping a step, and average the base
    norms of `calibrate`, which every rank has to call.  A rank without real tokens contributes a
    zero loss to the mean over the ranks.

    Raises:
        ValueError: an argument is invalid; or a step after the first lacks the base norms it needs.
        FloatingPointError: R is not finite (the message names the first such layer).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: Weighting | Sequence[float] = "softmax",
        strength: float = 0.01,
        directions: int = 2,
        hessian: bool = True,
        dimensions: Dimensions = 10,
        layers: Layers = "all",
        scope: Scope = "all",
        squared: bool = False,
        engine: Engine = "jet",
        seed: int | None = None,
        hessian_norm: HessianNorm = "per_dimension",
        distribution: Distribution = "gaussian",
        normalize: bool = False,
        hessian_gradient: bool = True,
        temperature: float = 1.0,
        on_nonfinite: OnNonfinite = "raise",
        compile: str | None = None,
    ) -> None:
        self.model = model
        self.compile = compile
        self._graph: Callable[..., JacHessOutput] | None = None
        self._traced_model: nn.Module | None = None  # has run eagerly before
        self._unreached: list[Tensor] = []
        self._failures = self._traces = 0
        self.settings = Settings(
            engine=engine,
            directions=directions,
            layers=layers,
            scope=scope,
            dimensions=dimensions,
            hessian=hessian,
            hessian_norm=hessian_norm,
            squared=squared,
            distribution=distribution,
            check_values=False,
        )
        if not isinstance(strength, int | float) or not 0 <= strength < float("inf"):
            raise ValueError(f"strength is {strength!r}; expected a finite number from 0 up")
        check_choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        self.on_nonfinite = on_nonfinite
        # Called for its checks of the name and the temperature.
        layer_profile(
            weights if isinstance(weights, str) else "uniform", torch.ones(1), temperature
        )
        if isinstance(weights, str):
            self.weights: Weighting | Tensor = weights
        else:
            profile = torch.as_tensor(list(weights), dtype=torch.float64)
            usable = profile.ndim == 1 and len(profile) > 0 and bool(torch.isfinite(profile).all())
            if not usable or profile.lt(0).any():
                raise ValueError(
                    f"weights is {list(weights)}; expected non-negative finite numbers"
                )
            self.weights = profile
        self.strength = float(strength)
        self.seed = seed
        self.normalize = normalize
        self.hessian_gradient = hessian_gradient
        self.temperature = temperature
        self.step: int | Tensor = 0
        self.skipped: Counter[int] = Counter()
        self._copies: dict[str, tuple[tuple[object, ...], Tensor]] = {}
        self._captured: list[Tensor] = []
        self.base: BaseNorms | None = None
        self._base_is_local = False  # whether the base norms are from this rank's batches only

    def calibrate(self, batches: Iterable[Mapping[str, Tensor]]) -> BaseNorms:
        """Measure the base model's norms before fine-tuning, store them in ``base``, return them.

        The model runs in evaluation mode, without gradients; its mode is restored.  Every rank of a
        data-parallel model has to call this method.

        Args:
            batches: a batch or several, for example a few from the training loader.

        Raises:
            ValueError: there is no batch, or a norm is not positive and finite.
        """
        batches = [batches] if isinstance(batches, Mapping) else batches
        self.base = measure_base(self.model, batches, self.settings, self.seed)
        self._base_is_local = ranks_of(self.model).size == 1
        return self.base

    @property
    def needs_base(self) -> bool:
        """Whether a step needs the base norms of `calibrate`."""
        by_name = isinstance(self.weights, str) and self.weights != "uniform"
        return self.normalize or by_name

    def layer_weights(self, count: int | None = None) -> Tensor:
        """Return λ^(k), ``[K]``.

        Args:
            count: number of layers; None: that of the base norms.

        Raises:
            ValueError: the weighting needs `calibrate`, or ``weights`` are not ``count`` numbers.
        """
        if isinstance(self.weights, Tensor):
            if count is not None and len(self.weights) != count:
                raise ValueError(
                    f"weights has {len(self.weights)} numbers, but there are {count} layers"
                )
            return self.weights
        if self.weights == "uniform" and count is not None:
            return torch.full((count,), 1 / count, dtype=torch.float64)
        return layer_profile(self.weights, self._require_base().jacobian, self.temperature)

    def __call__(self, batch: Mapping[str, Tensor]) -> JacHessOutput:
        """Compute the penalty and the model's output in a single forward pass.

        Args:
            batch: as for `jx.smoothness`; if it has labels, the model's own loss is computed too
                (``model_output.loss``), and is part of ``total``.
        """
        if is_dynamo_compiling():
            return self._step_in_graph(batch)
        if self.compile is None or is_graphed_step():
            return self._step(batch)
        return self._compiled_step(dict(batch))

    def _compiled_step(self, batch: dict[str, Tensor]) -> JacHessOutput:
        """Take a step in a compiled graph; eagerly if it cannot be traced, or if it is the model's
        first step, in which a model may set its own attributes."""
        from torch._dynamo.exc import TorchDynamoException  # takes seconds
        from torch._dynamo.utils import counters

        is_new = self._traced_model is not self.model
        if is_new or self._failures == _MAX_FAILURES:
            out = self._step(batch)
            if is_new and out.loss.requires_grad and out.skipped is None:
                self._traced_model, self._unreached = self.model, _unreached(self.model, out.loss)
                self._failures = 0
            return out
        if self._graph is None:
            backend = str(self.compile)
            self._graph = torch.compile(self._step_in_graph, backend=backend, fullgraph=True)
        graphs = counters["stats"]["unique_graphs"]
        try:
            out = self._graph(batch)
        except TorchDynamoException as error:
            self._failures += 1
            reason = re.search("debug context: (.+)", str(error)) or re.search("(.+)", str(error))
            _LOG.warning("a step runs eagerly, outside of a graph: %s", reason and reason[1])
            return self._step(batch)
        self._failures = 0
        self._traces += counters["stats"]["unique_graphs"] > graphs
        if self._traces == 2:
            self._traces += 1
            _LOG.warning("another shape or setting: the step is traced once more (said once)")
        _drop_zero_gradients(out, self._unreached)
        return out

    def _step_in_graph(self, batch: Mapping[str, Tensor]) -> JacHessOutput:
        """Take a step while dynamo traces; eagerly, after a graph break, if a graph cannot hold it.

        A norm that is not finite raises the eager step's error when the graph runs.
        """
        from .compiled import can_trace, measure_in_graph, raise_nonfinite

        if not can_trace(unwrapped(self.model), self._prepare_graph()):
            return self._step(batch)
        count = cast(Tensor, self.step)
        device, step = count.device, count.clone()
        seed = fresh_seed_on(device) if self.seed is None else number_on(device, self.seed)
        norms, result = measure_in_graph(self.model, batch, self.settings, seed, step)
        terms, loss = self._weighted(norms)
        # What the check returns is used, so that it is not left out of the graph.
        checked = terms.detach(), loss.detach(), result.mask, result.embeddings.detach(), step
        loss = loss + raise_nonfinite(*checked)
        count += 1
        return JacHessOutput(loss=loss, model_output=result.output, smoothness=norms)

    @without_dynamo
    def _step(self, batch: Mapping[str, Tensor]) -> JacHessOutput:
        """Take a step eagerly."""
        if self.needs_base and self.base is None and int(self.step) == 0:
            _LOG.warning("the base norms are measured on the first batch; calibrate takes more")
            self.calibrate([batch])
        if self.needs_base:
            self._require_base()
        if (is_graphed_step() or library.capturing()) and (refusal := self._prepare_graph()):
            raise ValueError(refusal)
        ranks = ranks_of(self.model)
        empty = ranks.size > 1 and not has_tokens(batch)
        if ranks.size > 1:
            device = next(self.model.parameters()).device
            if self._base_is_local and (base := self.base) is not None:
                # calibrate ran before the model was wrapped: each rank has the norms of its own
                # batches, and the penalty needs their mean over the ranks.
                sums = (x if x is None else x * base.tokens for x in (base.jacobian, base.hessian))
                self.base = _mean_over_ranks(sums, base.tokens, ranks, device)
                self._base_is_local = False
            raise_together(ranks, lambda: empty or padding_mask(batch), device)
        random = Randomness.from_seed(self.seed, self.step, rank=ranks.rank)
        norms, result = measure(
            self.model, placeholder_row(batch) if empty else batch, self.settings, random
        )
        terms, loss = self._weighted(norms)
        # A row without a real token makes a term NaN, as an overflow does. With several ranks this
        # was checked above; on one rank it is checked here, so that the host waits only once.
        rows = result.mask if ranks.size == 1 else None
        layer = None if library.capturing() else nonfinite_layer(terms, loss, ranks, rows)
        if layer == len(terms):  # rows without a real token
            padding_mask(batch)  # raises
        if layer is not None:
            self._note_nonfinite(layer, result.embeddings)
            loss = self.zero_loss(loss, ranks)
        self.step += 1
        out = JacHessOutput(loss=loss, model_output=result.output, skipped=layer, smoothness=norms)
        if empty and layer is None:
            task = getattr(result.output, "loss", None)  # zero, with gradients for the collectives
            out.loss, out.empty = (loss if task is None else loss + task) * 0, True
        return out

    def _weighted(self, norms: Smoothness) -> tuple[Tensor, Tensor]:
        """Return the terms of R, ``[K]``, and strength · R."""
        terms = self._layer_terms(norms)
        sources = self.weights, self.base, self.temperature
        weights = self._constant("weights", sources, lambda: self.layer_weights(len(terms)), terms)
        return terms, self.strength * terms.dot(weights)

    @library.constant_when_compiled
    def _prepare_graph(self) -> str | None:
        """Move the step counter to the device, where a graph increments it.

        Returns:
            None; or the reason why a step with these settings cannot be in a graph.
        """
        size = ranks_of(self.model).size
        host_reads = {
            f"engine={self.settings.engine!r}": self.settings.engine != "jet",
            "on_nonfinite='skip'": self.on_nonfinite == "skip",
            f"a model on {size} ranks": size > 1,
        }
        for setting in (setting for setting, applies in host_reads.items() if applies):
            return (
                f"{setting} needs results on the host, which a graph does not read; use "
                "engine='jet', on_nonfinite='raise' and one process, or run steps as they are"
            )
        if self.needs_base and self.base is None:
            return "the base norms are not measured: call calibrate, or take a step, before"
        if isinstance(self.step, int):
            if library.capturing():
                return (
                    "step is a number, which stays the same in every replay of a CUDA graph: use "
                    "jx.graphed, or set it to torch.tensor(0, device='cuda') and take a step first"
                )
            self.step = number_on(next(self.model.parameters()).device, self.step)
        return None

    def _constant(
        self, name: str, sources: tuple[object, ...], compute: Callable[[], Tensor], like: Tensor
    ) -> Tensor:
        """Return ``compute()`` with the dtype and on the device of ``like``, from a cache.

        The result is cached under ``name`` as long as ``sources`` are the same objects: a copy to a
        GPU would stall the host, and a CUDA graph cannot capture it.
        """
        if is_dynamo_compiling():
            return compute().to(like)
        old_sources, copy = self._copies.get(name, (sources, None))
        is_current = all(map(operator.is_, old_sources, sources))
        if copy is None or not is_current or _format(copy) != _format(like):
            copy = compute().to(like)
            self._copies[name] = sources, copy
        if library.capturing():
            self._captured.append(copy)  # the graph's replays use its memory
        return copy

    def zero_loss(self, loss: Tensor, ranks: Ranks) -> Tensor:
        """Return a zero loss that skips a step: its backward changes no gradient, but makes DDP
        reduce the gradients of earlier micro-batches.

        Args:
            loss: the loss to replace, for dtype and device.

        Raises:
            FloatingPointError: the model is in an engine of DeepSpeed, which cannot skip a step.
        """
        if is_deepspeed(self.model):
            raise FloatingPointError(
                "a loss is not finite, and on_nonfinite='skip' cannot leave out DeepSpeed's step, "
                "whose optimiser takes every one: lower the learning rate or use a wider dtype"
            )
        zero = zero_with_gradients(self.model) if ranks.size > 1 else None
        if zero is not None:
            return zero.to(loss)
        # The optimiser skips parameters whose gradient is None; with a gradient of zero, AdamW
        # would move them by momentum and weight decay.
        return torch.zeros_like(loss.detach(), requires_grad=True)

    def _note_nonfinite(self, layer: int, embeddings: Tensor) -> None:
        """Count and log a skipped step, or raise FloatingPointError, depending on ``on_nonfinite``.

        Args:
            layer: index, among the chosen layers, of the first one whose norm is not finite.
        """
        text = nonfinite_text(int(self.step), layer, embeddings)
        if self.on_nonfinite == "raise":
            raise FloatingPointError(text + NONFINITE_REMEDY)
        self.skipped[layer] += 1
        _LOG.warning("%s; the step is skipped, %d so far", text, self.skipped.total())

    def _layer_terms(self, norms: Smoothness) -> Tensor:
        """Return the terms of R before they are weighted by λ, one per layer, ``[K]``."""
        jacobian, hessian = norms.jacobian, norms.hessian
        if self.normalize:
            base, counts = self._require_base(), norms.tokens.sum(1)
            jacobian = _token_mean(norms.jacobian_tokens, counts)
            jacobian = jacobian / self._constant(
                "jacobian", (base,), lambda: base.jacobian, jacobian
            )
            if norms.hessian_tokens is not None and (base_hessian := base.hessian) is not None:
                mean = _token_mean(norms.hessian_tokens, counts)
                hessian = mean / self._constant("hessian", (base,), lambda: base_hessian, mean)
        if hessian is None:
            return jacobian
        return jacobian + (hessian if self.hessian_gradient else hessian.detach())

    def _require_base(self) -> BaseNorms:
        if self.base is None:
            setting = "normalize=True" if self.normalize else f"weights={self.weights!r}"
            raise ValueError(
                f"{setting} needs the base model's norms: call calibrate(batches) before training"
            )
        return self.base

    def state_dict(self) -> dict[str, object]:
        """Return the state of a run to resume: base norms, layer weights, seed, step, ``skipped``.

        Without a seed, seeds come from torch's global generator, whose state is not included.
        """
        return {
            "step": int(self.step),
            "seed": self.seed,
            "base": None if self.base is None else self.base.state_dict(),
            "skipped": {str(layer): count for layer, count in self.skipped.items()},
            "layer_weights": self._layer_weights_or_none(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        The layer weights are computed from the base norms and this regulariser's settings; a
        warning is logged if they differ from those in the state.

        Raises:
            ValueError: the state is invalid; the regulariser is then unchanged.
        """
        _check_state(state)
        base = None if state["base"] is None else BaseNorms.from_state_dict(state["base"])
        skipped = {int(layer): count for layer, count in state["skipped"].items()}
        self.seed = state["seed"]
        if isinstance(self.step, Tensor):
            self.step.fill_(state["step"])  # in place: graphs hold it
        else:
            self.step = state["step"]
        self.base, self.skipped = base, Counter(skipped)
        saved, current = state["layer_weights"], self._layer_weights_or_none()
        if saved is None or current is None:
            return
        if len(saved) != len(current) or not np.allclose(saved, current, rtol=1e-6, atol=0):
            _LOG.warning("the state was saved with other layer weights: %s, now %s", saved, current)

    def _layer_weights_or_none(self) -> list[float] | None:
        if isinstance(self.weights, Tensor):
            return self.weights.tolist()
        return None if self.base is None else self.layer_weights(len(self.base.jacobian)).tolist()


def _format(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _token_mean(tokens: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over each row's tokens, then over rows: ``[K, B, T]`` → ``[K]``.

    Args:
        tokens: values per token, zero outside of the scope.
        counts: number of tokens in scope of each row, ``[B]``.
    """
    return (tokens.sum(-1) / counts).mean(-1)


def _unreached(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """Return the trained parameters to which the loss has no gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [p for p, g in zip(parameters, gradients, strict=True) if g is None]


def _drop_zero_gradients(out: JacHessOutput, unreached: list[Tensor]) -> None:
    """Have a backward of the penalty leave the gradients of the parameters ``unreached`` None, as
    in an eager step; a graph's backward would give zeros."""
    node = out.loss.grad_fn
    if node is None or not unreached:
        return
    edges = [getattr(n, "variable", None) for n, _ in node.next_functions]
    penalty = {t.output_nr for t in (out.loss, *vars(out.smoothness).values()) if t is not None}
    ids = {*map(id, unreached)}

    def drop(gradients: Gradients, cotangents: Gradients) -> Gradients | None:
        if any(c is not None for n, c in enumerate(cotangents) if n not in penalty):
            return None
        pairs = zip(gradients, edges, strict=True)
        return tuple(None if id(variable) in ids else g for g, variable in pairs)

    node.register_hook(drop)


class _Base(TypedDict):
    jacobian: list[float]
    hessian: list[float] | None
    tokens: int


class _State(TypedDict):
    step: int
    seed: int | None
    base: _Base | None
    skipped: Mapping[str, int]
    layer_weights: list[float] | None


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise DataError (a ValueError) unless `state` is what `JacHess.state_dict` returned."""
    from_json(state, _State, "the regulariser's state")
    for layer in state["skipped"]:
        if not layer.isdecimal() or len(layer) > 9:  # Python refuses to read thousands of digits
            raise DataError(
                f"the regulariser's state counts skipped steps of the layer {layer[:40]!r}"
            )
    base = state["base"]
    if base is None:
        return
    norms = [base["jacobian"], *([base["hessian"]] if base["hessian"] is not None else [])]
    if len({len(values) for values in norms}) != 1 or not norms[0]:
        raise DataError("the regulariser's state has base norms of unequal numbers of layers")
    if min(min(values) for values in norms) <= 0:
        raise DataError("the regulariser's state has base norms that are not positive")
