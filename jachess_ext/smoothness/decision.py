"""`jx.DecisionPenalty`: derivatives of a model's decision, not of its hidden states.

With z the logits, p = softmax(z) and D_u = J_z u their derivative along a direction u in embedding
space, three penalties of a row:

- ``fisher``: ½ Σ_c p_c (D_{u,c} − Σ_k p_k D_{u,k})², the second-order term of
  KL(p(x) ‖ p(x + u)).  In nats, so a strength of 1 weighs it as the task loss is weighed.
- ``divergence``: KL(p(z) ‖ p(z + D_u)), the divergence of the model made linear around x; with
  order 2 of z + D_u + ½ D²z[u, u].
- ``margin``: log √(mean_u (∂_u m)²) − log(m + ε) with the margin m = z_y − max_{c≠y} z_c, on rows
  that are right (m > 0): how far x may move before the decision changes (Sokolić et al. 2017,
  *Robust Large Margin Deep Neural Networks*).  Scaling the logits does not change it.
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
from ..jet.api import make_input
from ..jet.directions import DrawCounter, draw_directions
from ..jet.layout import MAX_DIRECTIONS
from ..jet.tensor import JetTensor
from .estimators import in_mode, padding_mask, run_model, unwrapped
from .parallel import has_tokens, ranks_of, stand_in
from .settings import Randomness, StepOutput

_LOG = logging.getLogger("jachess_ext")
NO_LABEL = -100
_SLOPE_FLOOR, _MARGIN_OFFSET = 1e-6, 0.1
_DUAL_RATE, _DUAL_MEMORY, _DUAL_RANGE = 0.02, 0.9, 1e3


Kind = Literal["single", "multi", "regression"]
"""One of several classes; each of several labels or not; a number."""


@dataclass(frozen=True)
class Decisions:
    """What a form of penalty sees of N decisions (rows, or labelled tokens) with C outputs each.

    Attributes:
        logits: ``[N, C]``, float32 or wider.
        first: ``[q, N, C]``, D_u.
        second: ``[q, N, C]``, D²z[u, u], or None at order 1.
        labels: ``[N]`` class numbers: the labels, or the model's own choice.
        kind: "single" (one of C classes), "multi" (each of C labels or not) or "regression".
    """

    logits: Tensor
    first: Tensor
    second: Tensor | None
    labels: Tensor
    kind: Kind


def fisher(at: Decisions) -> Tensor:
    """Return ``[N]``: the mean over u of F_u; of a regression ½ D_u²."""
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
    """Return ``[N]``: the mean over u of KL(p(z) ‖ p(z + D_u + ½ D²z[u, u])), or order 1 of it.

    Of a regression, half the squared step.
    """
    step = at.first if at.second is None else at.first + at.second / 2
    if at.kind == "regression":
        return step.square().sum(-1).mean(0) / 2
    return kl_divergence(at.logits, at.logits + step, at.kind).mean(0)


def kl_divergence(
    first: Tensor, second: Tensor, kind: Kind = "single", *, symmetric: bool = False
) -> Tensor:
    """Return KL(p‖q) per row of logits ``[..., C]``.

    Args:
        kind: "single": one of C classes; "multi": each of C labels or not, their sum; "regression":
            the squared difference in place of a divergence.
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
    """Return ``[N]``: log slope − log margin of rows that are right, 0 of the others."""
    m, slope = margin_and_slope(at)
    right = m > 0
    ratio = slope.log() - (m.clamp(min=0) + _MARGIN_OFFSET).log()
    return torch.where(right, ratio, torch.zeros_like(ratio))


def margin_and_slope(at: Decisions) -> tuple[Tensor, Tensor]:
    """Return ``[N]`` each: z_y − max_{c≠y} z_c, and √(mean_u of its squared derivative along u)."""
    label = at.labels.unsqueeze(-1)
    others = at.logits.scatter(-1, label, -math.inf)
    rival = others.argmax(-1, keepdim=True)

    def difference(values: Tensor) -> Tensor:
        shape = (*values.shape[:-1], 1)
        return (
            values.gather(-1, label.expand(shape)) - values.gather(-1, rival.expand(shape))
        ).squeeze(-1)

    slope = (difference(at.first).square().mean(0) + _SLOPE_FLOOR).sqrt()
    return difference(at.logits), slope


FORMS: dict[str, Callable[[Decisions], Tensor]] = {
    "fisher": fisher,
    "divergence": divergence,
    "margin": margin,
}
"""A form of penalty: `Decisions` → ``[N]``.  A new one is a function and its entry here."""


@dataclass
class DecisionOutput(StepOutput):
    """One step's penalty and what came with it.

    Attributes:
        loss: scalar, strength · penalty; differentiable.
        model_output: the model's own output, plain tensors, with its task loss where the batch had
            labels; on the same graph.
        figures: scalars to log: ``penalty`` before its strength and the ``strength``.
        skipped: 0 where the penalty was not finite, so that this step teaches nothing; else None.
        empty: this rank of a data-parallel model had no real token (see `JacHessOutput`).
    """

    loss: Tensor
    model_output: Any
    figures: dict[str, Tensor] = field(default_factory=dict)
    skipped: int | None = None
    empty: bool = False


class DecisionPenalty:
    """Penalise how fast the model's decision changes along directions in embedding space.

    Example:
        >>> penalty = jx.DecisionPenalty(model, perturbation=Substitution(special={0, 1, 2}))
        >>> penalty(batch).total.backward()

    Args:
        model: any transformers model with a head; called as it is, in the mode it is in.
        form: "fisher", "divergence" or "margin"; see this module.
        perturbation: draws the directions: `Isotropic` or `Substitution`.
        directions: how many a step, 1 to 4.
        order: 2 only with "divergence" and one direction.
        path: takes the model to a random point between x and x + u, another one in every row, and
            the derivatives there.  Their mean over the way bounds what the whole step u does, so
            that a function with flat places and cliffs between them gains nothing.  The task loss
            is then of the moved rows, too.
        strength: factor of the penalty, ≥ 0.  With ``target`` where it starts.
        target: holds the penalty at this many times its value before training (needs
            `calibrate`): the strength then rises while the penalty is above that and falls while
            it is below, by dual ascent.  None: the strength stays.
        every: acts in every n-th step with n-fold strength; the others cost a plain step.
        seed: makes the directions reproducible; None: fresh ones from torch's CPU generator.
        on_nonfinite: what to do where the penalty is not finite: "raise", or "skip" the step.

    Attributes:
        step: number of the next step.
        base: the penalty before training, once `calibrate` was called.

    Decisions are rows, or, of a language model or a token classifier, the labelled tokens (all real
    tokens where there are no labels).  A number of labels of 1 (or ``problem_type="regression"``)
    makes it a regression: its forms are "fisher" and "divergence".

    Raises:
        ValueError: bad arguments, or a call that needs `calibrate` before it was called.
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
        if not isinstance(strength, int | float) or not 0 <= strength < math.inf:
            raise ValueError(f"strength is {strength!r}; expected a finite number from 0 up")
        if target is not None and not 0 < target < math.inf:
            raise ValueError(f"target is {target!r}; expected a number above 0, or None")
        if target is not None and strength == 0:
            raise ValueError("strength is 0; expected a number above 0 for a target to start from")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every is {every!r}; expected a whole number from 1 up")
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite is {on_nonfinite!r}; expected 'raise' or 'skip'")
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
        """Tell whether a step needs what `calibrate` measures."""
        return self.target is not None

    @property
    def due(self) -> bool:
        """Tell whether the penalty acts in the next step."""
        return self.step % self.every == 0

    def calibrate(self, batches: Iterable[Mapping[str, Any]]) -> float:
        """Measure the penalty before training, without dropout; kept as ``self.base``.

        Raises:
            ValueError: there is no batch, or the penalty is zero or not finite.
        """
        batches = [batches] if isinstance(batches, Mapping) else batches
        with torch.no_grad(), in_mode(self.model, training=False):
            values = [
                self._measure(batch, self._randomness(number, calibrating=True))[0]
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
        """Take one forward pass: the penalty, and the model's output with it.

        Args:
            batch: a dict as a collator yields it; with labels the model's own loss comes too.
        """
        due, number, self.step = self.due, self.step, self.step + 1
        if not due or self.strength == 0:
            output = self.model(**batch)
            return DecisionOutput(torch.zeros((), device=next(iter(batch.values())).device), output)
        if self.needs_base and self.base is None:
            raise ValueError(
                f"target={self.target} needs the penalty before training: call calibrate(batches)"
            )
        ranks = ranks_of(self.model)
        empty = ranks.size > 1 and not has_tokens(batch)
        value, output = self._measure(
            stand_in(batch) if empty else batch, self._randomness(number, rank=ranks.rank)
        )
        loss = self.strength * self.every * value
        figures = {"penalty": value.detach(), "strength": loss.new_tensor(self.strength)}
        result = DecisionOutput(loss, output, figures, empty=empty)
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
        """Dual ascent on log strength; the margin's penalty is a logarithm already."""
        assert self.base is not None and self.target is not None
        if self.form == "margin":
            excess = level - (self.base + math.log(self.target))
        else:
            excess = math.log(max(level, 1e-30) / (self.base * self.target))
        # The integral finds the strength; the excess itself, on top, keeps it from swinging.
        self._excess = _DUAL_MEMORY * self._excess + (1 - _DUAL_MEMORY) * max(
            -3.0, min(3.0, excess)
        )
        bound = math.log(_DUAL_RANGE)
        self._dual = max(-bound, min(bound, self._dual + _DUAL_RATE * self._excess))
        self.strength = self._first_strength * math.exp(self._dual + self._excess)

    def _randomness(self, number: int, rank: int = 0, calibrating: bool = False) -> Randomness:
        return Randomness.from_seed(self.seed, number, rank=rank, calibrating=calibrating)

    def _measure(self, batch: Mapping[str, Any], random: Randomness) -> tuple[Tensor, Any]:
        """Return the mean penalty over the decisions, and the model's output."""
        mask = padding_mask(batch)

        def enter(x: Tensor) -> JetTensor:
            u = self.perturbation(
                self.model, batch, x, mask, self.directions, random.directions
            ).to(x.dtype)
            if self.path:
                x = x + _shares(len(x), random.directions).to(x) * u[0]
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
            labelled = mask
            # transformers takes a model whose class says nothing for a causal language model
            if getattr(model, "loss_type", "") in ("ForCausalLM", None):  # tells the next token
                # of real tokens: padding before a row's first token tells nothing
                streams, labelled, mask = streams[:, :, :-1], mask[:, 1:], mask[:, :-1]
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
        """Return what a resumed run goes on from."""
        dual = {"strength": self.strength, "dual": self._dual, "excess": self._excess}
        return {"step": self.step, "seed": self.seed, "base": self.base, **dual}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: it is not that; the penalty stays as it was.
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
    """Return ``[B, 1, 1]``: how far each row goes along its direction, uniform on [0, 1)."""
    return torch.rand(rows, 1, 1, generator=generator_of(draw))


def decision_kind(model: Any, logits: Tensor) -> Kind:
    """Tell what the logits decide, from the model's config as transformers reads it."""
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
            draw: says which random numbers; the same on every device.
        """


@dataclass(frozen=True)
class Isotropic:
    """Gaussian noise on every real token, with the root mean square of the batch's embeddings.

    The size is relative to the embeddings as they are now, and differentiable: a model cannot
    shrink its derivatives by growing its embedding table.

    Attributes:
        size: standard deviation over that root mean square.
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

    Every real token that is not special is swapped with probability ``share``.  A swapped token
    becomes the unknown token with probability ``unknown_share``, else a token of this batch drawn
    at random, so that common words come as often as they do in the text.  Both embeddings are
    differentiable: a model gains nothing by growing its embedding table.

    Attributes:
        special: ids that are neither swapped nor drawn.
        unknown: id of the unknown (or mask) token; None: only tokens of the batch are drawn.
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
        """Take the special and unknown tokens of a transformers tokenizer.

        The mask token stands in where a tokenizer knows no unknown token.
        """
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
        # One number a free token, so that padding does not change what is drawn.
        other, unknown, chosen = torch.rand(3, count, len(pool), generator=generator).to(ids.device)
        new = pool[(other * len(pool)).long().clamp_(max=max(0, len(pool) - 1))]
        if self.unknown is not None:
            new = new.masked_fill(unknown < self.unknown_share, self.unknown)
        swapped = ids.repeat(count, 1, 1)
        swapped[:, free] = torch.where(chosen < self.share, new, pool)
        return swapped


def generator_of(draw: DrawCounter) -> torch.Generator:
    """Return a CPU generator for one draw, of its seed and offset."""
    seed = (draw.seed * 0x9E3779B97F4A7C15 + draw.next_offset()) % 2**63
    return torch.Generator().manual_seed(seed)
