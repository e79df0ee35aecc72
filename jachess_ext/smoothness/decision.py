"""`jx.DecisionPenalty`: derivatives of a model's decision, not of its hidden states.

With z the logits, p = softmax(z) and D_u = J_z u their derivative along a direction u in embedding
space, the penalty of a row has three forms:

- ``fisher``: ½ Σ_c p_c (D_{u,c} − Σ_k p_k D_{u,k})², the second-order term of
  KL(p(x) ‖ p(x + u)).  Its unit is the nat, as of the task loss.
- ``divergence``: KL(p(z) ‖ p(z + D_u)), the divergence of the model made linear around x; with
  order 2 KL(p(z) ‖ p(z + D_u + ½ D²z[u, u])).
- ``margin``: log √(mean_u (∂_u m)²) − log(m + ε) with the margin m = z_y − max_{c≠y} z_c, on rows
  that are right (m > 0): how far x may move before the decision changes (Sokolić et al. 2017,
  *Robust Large Margin Deep Neural Networks*).  Scaling the logits hardly changes it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict

import torch
from torch import Tensor, nn

from .._io import from_json
from ..jet.directions import DrawCounter, draw_directions
from ..jet.eager import make_input
from ..jet.layout import MAX_DIRECTIONS
from ..jet.tensor import JetTensor
from ..models import in_mode, padding_mask, unwrapped
from .estimators import run_model
from .parallel import has_tokens, ranks_of, stand_in
from .settings import Randomness, StepOutput, check_every, check_penalty

_LOG = logging.getLogger("jachess_ext")
NO_LABEL = -100
_SLOPE_FLOOR, _MARGIN_OFFSET = 1e-6, 0.1
_DUAL_RATE, _DUAL_MEMORY, _DUAL_RANGE = 0.02, 0.9, 1e3

# What the outputs say: a class of several, each of several labels or not, or numbers.
Kind = Literal["single", "multi", "regression"]


@dataclass(frozen=True)
class Decisions:
    """N decisions (rows, or labelled tokens) with C outputs each, and their derivatives.

    Attributes:
        logits: ``[N, C]``, float32 or wider.
        first: ``[q, N, C]``, D_u.
        second: ``[q, N, C]``, D²z[u, u], or None at order 1.
        labels: ``[N]`` class numbers: the labels, or the model's own choice.
        kind: of the problem, see `decision_kind`.
    """

    logits: Tensor
    first: Tensor
    second: Tensor | None
    labels: Tensor
    kind: Kind


def fisher(at: Decisions) -> Tensor:
    """Return the mean over u of the second-order term, ``[N]``; of a regression that of ½ D_u²."""
    if at.kind == "regression":
        per_direction = at.first.square().sum(-1)
    elif at.kind == "multi":
        p = at.logits.sigmoid()
        per_direction = (p * (1 - p) * at.first.square()).sum(-1)
    else:
        p = at.logits.softmax(-1)
        centred = at.first - (p * at.first).sum(-1, keepdim=True)
        per_direction = (p * centred.square()).sum(-1)
    return per_direction.mean(0) / 2


def divergence(at: Decisions) -> Tensor:
    """Return the mean over u of the divergence, ``[N]``; of a regression half the squared step."""
    step = at.first if at.second is None else at.first + at.second / 2
    if at.kind == "regression":
        return step.square().sum(-1).mean(0) / 2
    return kl_divergence(at.logits, at.logits + step, at.kind).mean(0)


def kl_divergence(
    first: Tensor, second: Tensor, kind: Kind = "single", *, symmetric: bool = False
) -> Tensor:
    """Return KL(p‖q) of logits ``[..., C]``, or KL(p‖q) + KL(q‖p), per row.

    Args:
        kind: see `decision_kind`.  "multi" sums over the labels; "regression" takes the squared
            difference in place of a divergence.
    """
    wide = torch.promote_types(first.dtype, torch.float32)
    first, second = first.to(wide), second.to(wide)
    if kind == "regression":
        return (first - second).square().sum(-1)
    if kind == "multi":
        first, second = (torch.stack([z, torch.zeros_like(z)], -1) for z in (first, second))
    log_p, log_q = first.log_softmax(-1), second.log_softmax(-1)
    weight = log_p.exp() - log_q.exp() if symmetric else log_p.exp()
    apart = (weight * (log_p - log_q)).sum(-1)
    return apart.sum(-1) if kind == "multi" else apart


def margin(at: Decisions) -> Tensor:
    """Return log slope − log margin of rows that are right and 0 of the others, ``[N]``."""
    label = at.labels.unsqueeze(-1)
    rival = at.logits.scatter(-1, label, -math.inf).argmax(-1, keepdim=True)

    def difference(values: Tensor) -> Tensor:
        """Return z_y − max_{c≠y} z_c of the last dimension, or its derivative."""
        own, other = (i.expand(*values.shape[:-1], 1) for i in (label, rival))
        return (values.gather(-1, own) - values.gather(-1, other)).squeeze(-1)

    slope = (difference(at.first).square().mean(0) + _SLOPE_FLOOR).sqrt()
    m = difference(at.logits)
    ratio = slope.log() - (m.clamp(min=0) + _MARGIN_OFFSET).log()
    return torch.where(m > 0, ratio, torch.zeros_like(ratio))


# Forms of the penalty, `Decisions` → ``[N]``.
FORMS: dict[str, Callable[[Decisions], Tensor]] = {
    "fisher": fisher,
    "divergence": divergence,
    "margin": margin,
}


@dataclass(kw_only=True)
class DecisionOutput(StepOutput):
    """Penalty of a step, with the model's output.

    Attributes:
        loss, model_output, skipped, empty: as in `StepOutput`.
        figures: scalars to log: the ``penalty`` before its strength, and the ``strength``.

    Example:
        >>> out = DecisionPenalty(model, strength=0.5)(batch)
        >>> bool(out.loss == 0.5 * out.figures["penalty"])
        True
    """

    figures: dict[str, Tensor] = field(default_factory=dict)


class DecisionPenalty:
    """Penalise how fast the model's decision changes along directions in embedding space.

    Example:
        >>> penalty = jx.DecisionPenalty(model, perturbation=Substitution(special={0, 1, 2}))
        >>> penalty(batch).total.backward()

    Args:
        model: a transformers model with a head; called as it is, in the mode it is in.
        form: "fisher", "divergence" or "margin" (of several classes only): half the squared
            derivative of the decision, the divergence of its expansion, or slope over margin.
        perturbation: draws the directions: `Isotropic` or `Substitution`.
        directions: how many a step, 1 to 4.
        order: of the expansion; 2 needs "divergence" and a single direction.
        path: take the model and its derivatives at a random point between x and x + u, drawn for
            each row.  Their mean over the way bounds the change over the whole step u, so that a
            function gains nothing by being flat with cliffs between.  The task loss is then of the
            moved rows, too.
        strength: factor of the penalty, ≥ 0; with ``target`` its first value.
        target: hold the penalty at this many times its value before training (needs `calibrate`):
            dual ascent raises the strength while the penalty is above that and lowers it below.
        every: apply the penalty in every n-th step, with n-fold strength.
        seed: of the directions; None: fresh ones from torch's CPU generator.
        on_nonfinite: what to do where the penalty is not finite: "raise", or "skip" the step.

    Attributes:
        step: number of the next step.
        base: the penalty before training, once `calibrate` was called.

    Decisions are rows, or, of a language model or a token classifier, the labelled tokens (all real
    tokens where there are no labels).  ``problem_type="regression"`` or a single output makes them
    a regression.

    Raises:
        ValueError: bad arguments, or a call that needs `calibrate` first.
        FloatingPointError: the penalty is not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        form: str = "fisher",
        perturbation: Perturbation | None = None,
        directions: int = 2,
        order: int = 1,
        path: bool = False,
        strength: float = 1.0,
        target: float | None = None,
        every: int = 1,
        seed: int | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"form is {form!r}; expected one of {', '.join(FORMS)}")
        if order not in (1, 2) or (order == 2 and (form != "divergence" or directions != 1)):
            raise ValueError(
                f"order is {order!r}; expected 1, or 2 with form='divergence' and directions=1"
            )
        if not isinstance(directions, int) or not 1 <= directions <= MAX_DIRECTIONS:
            raise ValueError(f"directions is {directions!r}; expected 1 to {MAX_DIRECTIONS}")
        check_penalty(strength, on_nonfinite)
        check_every(every)
        if target is not None and not 0 < target < math.inf:
            raise ValueError(f"target is {target!r}; expected a number above 0, or None")
        if target is not None and strength == 0:
            raise ValueError("strength is 0; expected a number above 0 for a target to start from")
        self.model = model
        self.form, self.perturbation = form, perturbation or Isotropic()
        self.directions, self.order, self.path = directions, order, path
        self.strength = self._first_strength = float(strength)
        self.target, self.every, self.seed = target, every, seed
        self.on_nonfinite = on_nonfinite
        self.step = 0
        self.base: float | None = None
        self._dual = self._excess = 0.0

    @property
    def needs_base(self) -> bool:
        """Whether a step needs the base value of `calibrate`."""
        return self.target is not None

    @property
    def due(self) -> bool:
        """Whether the next step has a penalty."""
        return self.step % self.every == 0

    def calibrate(self, batches: Iterable[Mapping[str, Any]]) -> float:
        """Measure the penalty before training, without dropout, and keep it as ``self.base``.

        Raises:
            ValueError: there is no batch, or the penalty is zero or not finite.
        """
        batches = [batches] if isinstance(batches, Mapping) else batches
        with torch.no_grad(), in_mode(self.model, training=False):
            values = [
                self._measure(batch, Randomness.from_seed(self.seed, number, calibrating=True))[0]
                for number, batch in enumerate(batches)
            ]
        if not values:
            raise ValueError("there is no batch to measure the penalty on; expected one or more")
        ranks = ranks_of(self.model)
        base = float(ranks.sum(torch.stack(values).mean()) / ranks.size)
        if not math.isfinite(base) or base == 0 or (base < 0 and self.form != "margin"):
            raise ValueError(f"the penalty before training is {base}; expected a number above 0")
        self.base = base
        return base

    def __call__(self, batch: Mapping[str, Any]) -> DecisionOutput:
        """Compute the penalty and the model's output in a single forward pass.

        Args:
            batch: a dict as a collator yields it; with labels, the model's own loss comes too.
        """
        due, number, self.step = self.due, self.step, self.step + 1
        if not due or self.strength == 0:
            zero = torch.zeros((), device=next(iter(batch.values())).device)
            return DecisionOutput(loss=zero, model_output=self.model(**batch))
        if self.needs_base and self.base is None:
            raise ValueError(
                f"target={self.target} needs the penalty before training: call calibrate(batches)"
            )
        ranks = ranks_of(self.model)
        empty = ranks.size > 1 and not has_tokens(batch)
        random = Randomness.from_seed(self.seed, number, rank=ranks.rank)
        value, output = self._measure(stand_in(batch) if empty else batch, random)
        loss = self.strength * self.every * value
        figures = {"penalty": value.detach(), "strength": loss.new_tensor(self.strength)}
        result = DecisionOutput(loss=loss, model_output=output, figures=figures, empty=empty)
        if empty:
            result.loss = result.stand_in_loss()
        level = float(ranks.sum(value.detach().double()) / ranks.size)
        if not math.isfinite(level):
            return self._skipped(result, number)
        if self.target is not None:
            self._ascend(level)
        return result

    def _skipped(self, result: DecisionOutput, number: int) -> DecisionOutput:
        if self.on_nonfinite == "raise":
            raise FloatingPointError(
                f"step {number}: the penalty is not finite; lower the learning rate, use a wider "
                "dtype, or on_nonfinite='skip'"
            )
        _LOG.warning("step %d: the penalty is not finite; the step is skipped", number)
        result.loss, result.skipped = torch.zeros_like(result.loss, requires_grad=True), 0
        return result

    def _ascend(self, level: float) -> None:
        """Move the strength by dual ascent on its logarithm."""
        assert self.base is not None and self.target is not None
        if self.form == "margin":  # is a logarithm already
            excess = level - (self.base + math.log(self.target))
        else:
            excess = math.log(max(level, 1e-30) / (self.base * self.target))
        # The integral leads to the strength; the excess on top keeps it from swinging.
        excess = max(-3.0, min(3.0, excess))
        self._excess = _DUAL_MEMORY * self._excess + (1 - _DUAL_MEMORY) * excess
        bound = math.log(_DUAL_RANGE)
        self._dual = max(-bound, min(bound, self._dual + _DUAL_RATE * self._excess))
        self.strength = self._first_strength * math.exp(self._dual + self._excess)

    def _measure(self, batch: Mapping[str, Any], random: Randomness) -> tuple[Tensor, Any]:
        """Return the mean penalty over the decisions, and the model's output."""
        mask = padding_mask(batch)

        def enter(x: Tensor) -> JetTensor:
            draw = random.directions
            u = self.perturbation(self.model, batch, x, mask, self.directions, draw).to(x.dtype)
            if self.path:
                x = x + _shares(len(x), draw).to(x) * u[0]
            u = torch.cat([u, u]) if self.order == 2 else u
            return make_input(x, u, order=self.order, check_values=False)

        result = run_model(self.model, batch, enter, hidden=False)
        if not isinstance(result.logits, JetTensor):
            raise ValueError(
                "the model returned no logits that depend on its embeddings; expected a "
                "transformers model with a head"
            )
        at = self._decisions(result.logits, batch, mask)
        return FORMS[self.form](at).mean(), result.output

    def _decisions(self, logits: JetTensor, batch: Mapping[str, Any], mask: Tensor) -> Decisions:
        streams = logits.streams
        streams = streams.to(torch.promote_types(streams.dtype, torch.float32))
        model: Any = unwrapped(self.model)
        kind = decision_kind(model, logits)
        labels = batch.get("labels")
        if logits.ndim == 3:  # a decision a token
            prompt = streams.shape[2] - mask.shape[1]  # virtual tokens before the batch's own
            if prompt < 0:
                raise ValueError(
                    f"the logits are of {streams.shape[2]} tokens and the batch has "
                    f"{mask.shape[1]}, so that its padding cannot be told; expected a model with "
                    "logits for each of its tokens"
                )
            labelled = nn.functional.pad(mask, (prompt, 0))
            mask = nn.functional.pad(mask, (prompt, 0), value=True)
            if labels is not None:
                labels = nn.functional.pad(
                    labels, (streams.shape[2] - labels.shape[1], 0), value=NO_LABEL
                )
            # A causal language model decides the next token, from real tokens alone.  transformers
            # takes a model without a loss_type for one.
            if getattr(model, "loss_type", "") in ("ForCausalLM", None):
                streams, labelled, mask = streams[:, :, :-1], labelled[:, 1:], mask[:, :-1]
                labels = None if labels is None else labels[:, 1:]
            chosen = mask & (labelled if labels is None else labels != NO_LABEL)
            streams = streams[:, chosen]
            labels = None if labels is None else labels[chosen]
        if kind != "single":
            if self.form == "margin":
                raise ValueError(
                    f"form='margin' needs one of several classes, but this is a {kind} problem; "
                    "use form='fisher'"
                )
            labels = streams[0].new_zeros(len(streams[0]))
        elif labels is None:
            labels = streams[0].detach().argmax(-1)
        if not streams.shape[1]:
            raise ValueError("no token of the batch has a label, so there is no decision")
        first = streams[logits.jet_layout.first]
        if self.order == 1:
            return Decisions(streams[0], first, None, labels, kind)
        return Decisions(streams[0], first[:1], streams[logits.jet_layout.second], labels, kind)

    def state_dict(self) -> dict[str, Any]:
        """Return step, seed, base and strength, for a run to be resumed."""
        return {
            "step": self.step,
            "seed": self.seed,
            "base": self.base,
            "strength": self.strength,
            "dual": self._dual,
            "excess": self._excess,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: it is not such a state; the penalty stays as it was.
        """
        from_json(state, _State, "the penalty's state")
        self.step, self.seed, self.base = state["step"], state["seed"], state["base"]
        self.strength, self._dual = float(state["strength"]), float(state["dual"])
        self._excess = float(state["excess"])


class _State(TypedDict):
    step: int
    seed: int | None
    base: float | None
    strength: float
    dual: float
    excess: float


def _shares(rows: int, draw: DrawCounter) -> Tensor:
    """Draw how far each row goes along its direction, uniform on [0, 1): ``[B, 1, 1]``."""
    return torch.rand(rows, 1, 1, generator=generator_of(draw))


def decision_kind(model: Any, logits: Tensor) -> Kind:
    """Return "single", "multi" or "regression", as transformers reads the model's config."""
    stated = getattr(getattr(model, "config", None), "problem_type", None)
    if stated == "regression" or (stated is None and logits.shape[-1] == 1):
        return "regression"
    return "multi" if stated == "multi_label_classification" else "single"


class Perturbation(Protocol):
    """Draw directions u for a batch."""

    def __call__(
        self, model: nn.Module, batch: Any, x: Tensor, mask: Tensor, count: int, draw: DrawCounter
    ) -> Tensor:
        """Return ``[count, B, T, d]``, zero where ``mask`` is false.

        Args:
            x: ``[B, T, d]``, the batch's token embeddings.
            mask: ``[B, T]`` booleans, true at real tokens.
            draw: counter of the random numbers, which are the same on every device.
        """


@dataclass(frozen=True)
class Isotropic:
    """Gaussian noise on every real token, as large as the batch's embeddings.

    The size is differentiable: a model gains nothing by growing its embedding table.

    Attributes:
        size: standard deviation of the noise over the root mean square of the embeddings.

    Example:
        >>> penalty = jx.DecisionPenalty(model, perturbation=Isotropic(size=0.5))
    """

    size: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.size < float("inf"):
            raise ValueError(f"size is {self.size}; expected a number above 0")

    def __call__(
        self, model: nn.Module, batch: Any, x: Tensor, mask: Tensor, count: int, draw: DrawCounter
    ) -> Tensor:
        unit = draw_directions(x.detach(), count, mask=mask, counter=draw)
        return self.size * x[mask].square().mean().sqrt() * unit


@dataclass(frozen=True)
class Substitution:
    """Steps from a token's embedding to another token's: u_t = e(w'_t) − e(w_t), else 0.

    A swapped token becomes the unknown token or a token of this batch drawn at random, so that
    common words come as often as they do in the text.  Both embeddings are differentiable: a
    model gains nothing by growing its embedding table.

    Attributes:
        special: ids that are neither swapped nor drawn.
        unknown: id of the unknown (or mask) token; None: only tokens of the batch are drawn.
        share: probability that a real token which is not special is swapped.
        unknown_share: probability that a swapped token becomes the unknown token.

    Example:
        >>> swaps = Substitution(special={0, 1, 2}, unknown=3)
        >>> penalty = jx.DecisionPenalty(model, perturbation=swaps)
    """

    special: Collection[int] = field(default=())
    unknown: int | None = None
    share: float = 0.15
    unknown_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; expected a number above 0, up to 1")
        if not 0 <= self.unknown_share <= 1:
            raise ValueError(f"unknown_share is {self.unknown_share}; expected 0 to 1")

    @classmethod
    def of(cls, tokenizer: Any, **settings: float) -> Substitution:
        """Take the special and the unknown (else the mask) token of a transformers tokenizer."""
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is None:
            unknown = getattr(tokenizer, "mask_token_id", None)
        return cls(frozenset(tokenizer.all_special_ids), unknown, **settings)

    def __call__(
        self, model: nn.Module, batch: Any, x: Tensor, mask: Tensor, count: int, draw: DrawCounter
    ) -> Tensor:
        ids = batch.get("input_ids")
        if ids is None:
            raise ValueError(
                "swapping tokens needs input_ids, but the batch has inputs_embeds; use isotropic "
                "directions"
            )
        swapped = self.swap(ids, mask, count, draw)
        layer: Any = unwrapped(model).get_input_embeddings()  # type: ignore[operator]
        return layer.forward(swapped) - x  # .forward: this runs within a hook of the layer

    def swap(self, ids: Tensor, mask: Tensor, count: int, draw: DrawCounter) -> Tensor:
        """Return the token ids with a share of them swapped, ``[count, B, T]``."""
        special = torch.tensor(sorted(self.special), dtype=ids.dtype, device=ids.device)
        free = mask & ~torch.isin(ids, special)
        pool = ids[free]
        generator = generator_of(draw)
        # A number for each free token, so that padding does not change what is drawn.
        other, unknown, chosen = torch.rand(3, count, len(pool), generator=generator).to(ids.device)
        new = pool[(other * len(pool)).long().clamp_(max=max(0, len(pool) - 1))]
        if self.unknown is not None:
            new = new.masked_fill(unknown < self.unknown_share, self.unknown)
        swapped = ids.repeat(count, 1, 1)
        swapped[:, free] = torch.where(chosen < self.share, new, pool)
        return swapped


def generator_of(draw: DrawCounter) -> torch.Generator:
    """Return a CPU generator for a draw, from the counter's seed and next offset."""
    seed = (int(draw.seed) * 0x9E3779B97F4A7C15 + int(draw.next_offset())) % 2**63
    return torch.Generator().manual_seed(seed)
