"""Methods with further passes: other dropout masks, noise on the embeddings, swapped tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ...models import (
    NO_LABEL,
    hooked_embeddings,
    in_mode,
    token_table,
    trained,
    unwrapped,
    without_engine,
    without_labels,
)
from ..batches import Batch, RandomState, drawing_apart, is_causal
from ..corruption import chosen_tokens, embedding_scale, unknown_token_id
from ..decision import kl_divergence
from .base import Loss, Method, Outputs, Penalised, Run, WithModes, logits_of
from .settings import choice, count, fraction, nonnegative, positive, share, share_or_zero

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RDrop(Penalised, name="r-drop"):
    """Mean task loss of two passes with other dropout masks, + strength · ½ (KL + KL).

    R-Drop (Liang et al. 2021).  The first pass has the plain run's masks.
    """

    smoothing: float = share_or_zero(0.0)

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        # the first pass draws as the plain run does, the second from a seed of its own: the
        # generators stand afterwards where the plain run's would
        first, outputs = run(inputs)
        with drawing_apart(self.key()):
            second, other_outputs = run(inputs)
        kind = self.kind(model, outputs)
        one, two = (logits_of(output, trained=True) for output in (outputs, other_outputs))
        apart = kl_divergence(one, two, kind, symmetric=True)
        return Loss(
            (first + second) / 2, outputs, self.strength * (row_mean(apart, inputs, model) / 2)
        )


class R3F(Penalised, name="r3f"):
    """+ strength · (KL + KL) of f(x) and f(x + z), z noise (Aghajanyan et al. 2021, R3F).

    z ~ U(−ε, ε) or N(0, ε²) on every token embedding; dropout masks are drawn anew.  Under
    autocast both passes run in full precision, since bfloat16 rounds noise of 1e-5 away.

    Args:
        noise: ε.
        noise_distribution: "uniform" or "normal".
    """

    noise: float = positive(1e-5)
    noise_distribution: str = choice("uniform", ("uniform", "normal"))

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor:
        """Return the mean over rows (of decisions per token: `row_mean`)."""
        kind, logits = self.kind(model, outputs), logits_of(outputs, trained=True)
        device = logits.device.type
        # accelerate wraps forward in autocast and keeps the plain one under this name
        run = getattr(unwrapped(model), "_original_forward", model)
        noise = (self.noise, self.noise_distribution, self.generator())

        def add(x: Tensor, real: Tensor) -> Tensor:
            return x + token_noise(x, real, *noise).to(x)

        with ExitStack() as contexts:
            contexts.enter_context(drawing_apart(self.key()))
            if run is not model or torch.is_autocast_enabled(device):
                contexts.enter_context(torch.autocast(device, enabled=False))
                logits = logits_of(run(**without_labels(inputs)))
            noisy = contexts.enter_context(hooked_embeddings(model, add, inputs))
            moved = logits_of(run(**without_labels(noisy)))
        return row_mean(kl_divergence(logits, moved, kind, symmetric=True), inputs, model)


class NEFTune(Method, name="neftune"):
    """Uniform noise of size α / √(n d) on a row's n token embeddings (Jain et al. 2023).

    Args:
        alpha: α.
    """

    needs_outputs = False
    alpha: float = positive(5.0)

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        def add(x: Tensor, real: Tensor) -> Tensor:
            return x + row_noise(x, real, self.alpha, self.generator()).to(x.dtype)

        with hooked_embeddings(model, add, inputs, trained=True) as noisy:
            return Loss(*run(noisy))


class _Climbing:
    """Noise δ that is drawn in the first pass, and climbs between the passes.

    An encoder-decoder has a δ for each of its stacks.

    Args:
        draw: draws δ of the embeddings x ``[B, T, d]`` and their real tokens ``[B, T]``.
    """

    def __init__(self, draw: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._draw = draw
        self.noise: list[Tensor] = []

    @contextmanager
    def added(self, model: nn.Module, batch: Batch) -> Iterator[dict[str, Tensor]]:
        """Add δ in the pass within, which is to call the model with the batch given."""
        # The hook is called once for each stack: the encoder's δ has place 0, the decoder's place
        # 1.  The first pass draws them, since the shape of x is known only then; later passes use
        # them.
        place = -1

        def add(x: Tensor, real: Tensor) -> Tensor:
            nonlocal place
            place += 1
            if place == len(self.noise):
                self.noise.append(self._draw(x, real).requires_grad_())
            return x + self.noise[place].to(x.dtype)

        with hooked_embeddings(model, add, batch, trained=True) as batch:
            yield batch

    def climb(self, step: Callable[[Tensor, Tensor], Tensor], gradients: Iterable[Tensor]) -> None:
        """Replace each δ by ``step(δ, gradient)``."""
        pairs = zip(self.noise, gradients, strict=True)
        self.noise = [step(noise.detach(), g).requires_grad_() for noise, g in pairs]


class FreeLB(Method, name="freelb"):
    """Mean gradient of the task loss over K steps of ascent on noise δ (Zhu et al. 2020, FreeLB).

    All K passes have the plain run's dropout masks, as in the paper.  Encoder and decoder of one
    model have a δ each.

    Args:
        adv_steps: K.
        adv_lr: length of a step of δ, along g/‖g‖ per row.
        adv_start: δ starts uniform, ± adv_start / √(n d) for a row of n tokens.
        adv_radius: radius of the ball that a row's δ is projected into; 0: no ball.
    """

    one_process, needs_outputs = True, False
    _share = 1.0  # of a pass in the mean
    adv_steps: int = count(3)
    adv_lr: float = positive(0.1)
    adv_start: float = positive(0.1)
    adv_radius: float = nonnegative(0.0)

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        inputs = self.trainer._prepare_inputs(dict(inputs))
        # `run` goes backward in each pass, and the gradients of the K passes add up: with the loss
        # over K the sum is their mean.
        before = RandomState()
        self._share, losses = 1.0 / self.adv_steps, []
        climbing = _Climbing(lambda x, real: row_noise(x, real, self.adv_start, self.generator()))
        for number in range(self.adv_steps):
            if number:
                before.restore()
                # a δ that no pass reached has no gradient, which is an error in the climb
                climbing.climb(
                    self._climbed, [cast(Tensor, noise.grad) for noise in climbing.noise]
                )
            with climbing.added(self.trainer.model, inputs) as noisy:
                losses.append(run(noisy))
        self._share = 1.0
        return torch.stack(losses).sum()

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        task, outputs = run(inputs)
        return Loss(task * self._share, outputs)

    def _climbed(self, noise: Tensor, gradient: Tensor) -> Tensor:
        norm = gradient.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, 1, 1)
        moved = noise + self.adv_lr * (gradient / norm)
        if self.adv_radius > 0:
            norm = moved.flatten(1).norm(dim=1).view(-1, 1, 1)
            moved = moved * (self.adv_radius / norm.clamp(min=1e-30)).clamp(max=1.0)
        return moved


class SMART(Penalised, name="smart"):
    """+ strength · max over |δ| ≤ ε of KL(p ‖ q) + KL(q ‖ p), q at x + δ (Jiang et al. 2020).

    Sizes are in units of the embedding table's root mean square entry before training, since the
    published 1e-5 is below the rounding of bfloat16.  The Bregman proximal point is left out.

    Args:
        adv_steps: steps of ascent, δ ← δ + adv_lr · g/‖g‖_∞ per row.
        adv_lr: their length.
        adv_start: standard deviation of the normal noise that δ starts from.
        adv_radius: half width ε of the box that δ is clamped to.
    """

    adv_steps: int = count(1)
    adv_lr: float = positive(1.0)
    adv_start: float = positive(0.1)
    adv_radius: float = nonnegative(0.5)

    def prepare(self) -> None:
        super().prepare()
        self._scale = embedding_scale(unwrapped(self.trainer.model))

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor:
        """Return the mean over rows in nats; all passes with noise have the same dropout masks."""
        logits, kind = logits_of(outputs, trained=True), self.kind(model, outputs)
        masks, scale = self.key(), self._scale

        def draw(x: Tensor, real: Tensor) -> Tensor:
            return token_noise(x, real, self.adv_start * scale, "normal", self.generator())

        def climbed(noise: Tensor, gradient: Tensor) -> Tensor:
            largest = gradient.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            moved = noise + self.adv_lr * scale * gradient / largest
            return moved.clamp(-self.adv_radius * scale, self.adv_radius * scale)

        climbing = _Climbing(draw)

        def apart(target: Tensor, called: nn.Module = model) -> Tensor:
            with drawing_apart(masks), climbing.added(model, inputs) as noisy:
                moved = logits_of(called(**without_labels(noisy)))
            return row_mean(kl_divergence(target, moved, kind, symmetric=True), inputs, model)

        # The ascent needs the gradient by δ alone: the weights are frozen, and none is computed for
        # them.  An engine of DeepSpeed prepares the step's one backward in its forward; the ascent
        # is not that one, and goes past it.
        for _ in range(self.adv_steps):
            with trained(dict.fromkeys(model.parameters(), False)):
                divergence = apart(logits.detach(), without_engine(model))
                gradients = torch.autograd.grad(divergence, climbing.noise)
            climbing.climb(climbed, gradients)
        return apart(logits)


class _Corruption(Method):
    """A method with copies of its batches in which tokens are swapped.

    Special tokens are neither swapped nor drawn, nor are tokens without a row in the model's
    embedding table.  A tokenizer without an unknown and a mask token gives random tokens alone.

    Args:
        swapped: share of the tokens that are swapped.
        unknown: share of the swapped tokens that become the unknown token, not a random one.
    """

    needs_tokenizer = True
    swapped, unknown = 0.15, 0.5

    def prepare(self) -> None:
        super().prepare()
        if not self.needs_tokenizer:
            return
        tokenizer = cast("PreTrainedTokenizerBase", self.trainer.processing_class)
        table = token_table(self.trainer.model)
        self._special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        self._unknown = unknown_token_id(tokenizer)
        self._padding = tokenizer.pad_token_id
        ids = torch.arange(min(len(tokenizer), getattr(table, "num_embeddings", len(tokenizer))))
        self._words = ids[~torch.isin(ids, self._special)]

    def corrupted(self, inputs: Batch) -> dict[str, Tensor]:
        """Return the batch with a share of its tokens swapped."""
        if "input_ids" not in inputs:
            raise ValueError(f"expected a batch with input_ids to swap; it has {', '.join(inputs)}")
        ids, mask, generator = inputs["input_ids"], inputs.get("attention_mask"), self.generator()
        chosen = chosen_tokens(
            ids,
            torch.ones_like(ids) if mask is None else mask,
            self.swapped,
            special=self._special,
            generator=generator,
            spared=self._padding if self._unknown == self._padding else None,
        )
        count = int(chosen.sum())
        new = self._words[torch.randint(len(self._words), (count,), generator=generator)]
        unknown = torch.rand(count, generator=generator) < self.unknown
        if self._unknown is not None:
            new = torch.where(unknown, self._unknown, new)
        swapped = ids.clone()
        swapped[chosen.to(ids.device)] = new.to(ids)
        return {**inputs, "input_ids": swapped}


class CorruptAugment(_Corruption, name="corrupt-augment"):
    """clean · task loss + (1 − clean) · task loss of a copy with swapped tokens.

    Args (others: `_Corruption`):
        clean: share of the clean rows' loss; 0: a single pass, on the copy.
    """

    needs_outputs = False
    swapped: float = share(0.15)
    unknown: float = fraction(0.5)
    clean: float = fraction(0.5)
    smoothing: float = share_or_zero(0.0)

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        if self.clean == 0:
            return Loss(*run(self.corrupted(inputs)))
        task, outputs = run(inputs)
        with drawing_apart(self.key()):
            other, _ = run(self.corrupted(inputs))
        return Loss(self.clean * task + (1 - self.clean) * other, outputs)


class _Consistency(_Corruption):
    """The penalty of `CorruptConsistency`, for methods with and without its settings."""

    every, dropout = 1, True

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor | None:
        """Return the mean over rows in nats, ``every``-fold in every such step, else None."""
        if self.trainer.state.global_step % self.every:
            return None
        target = outputs
        if self.mode == "joint":
            inputs = self.trainer.next_unlabelled()
            with torch.no_grad(), in_mode(model, False):
                target = model(**inputs)
        passing = nullcontext() if self.dropout else in_mode(model, False)
        with drawing_apart(self.key()), passing:
            corrupted = model(**without_labels(self.corrupted(inputs)))
        kind = self.kind(model, outputs)
        logits = logits_of(target, trained=self.mode == "train")
        apart = kl_divergence(logits, logits_of(corrupted), kind)
        return self.every * row_mean(apart, inputs, model)


class CorruptConsistency(_Consistency, WithModes, name="corrupt-consistency"):
    """+ strength · KL(p(x) ‖ p(x′)), x′ a copy with swapped tokens and other dropout masks.

    Mode train: x is the labelled batch, and gradients go through both passes.  Mode joint: x is an
    unlabelled batch, and p(x) a target without gradient and dropout (Xie et al. 2020,
    *Unsupervised Data Augmentation*).

    Args (others: `_Corruption`, `WithModes`):
        every: apply the penalty in every n-th optimiser step, with n-fold strength.
    """

    modes = ("train", "joint")
    swapped: float = share(0.15)
    unknown: float = fraction(0.5)
    every: int = count(1)
    smoothing: float = share_or_zero(0.0)


class Recommended(_Consistency, name="recommended"):
    """Label smoothing and consistency on unlabelled rows, as docs/finetuning.md recommends.

    Without unlabelled rows only label smoothing is left; with several labels a row, only
    consistency; a regression is trained plainly.  A warning says what is left out.
    """

    any_task = needs_unlabelled = True
    mode, every, smoothing = "joint", 2, 0.1

    def prepare(self) -> None:
        trainer = self.trainer
        regression = self.problem() == "regression"
        self.needs_tokenizer = trainer.unlabelled_dataset is not None and not regression
        super().prepare()
        if trainer.unlabelled_dataset is None and not regression:
            warnings.warn(
                "method='recommended' trains with label smoothing alone: its consistency needs "
                "unlabelled_dataset=..., which was not given",
                stacklevel=2,
            )
        if "labels" not in trainer.label_names and not regression:
            names = ", ".join(trainer.label_names) or "none"
            raise self.error(
                f"is for models whose labels are called 'labels', and these are not ({names}); use "
                "method=none, or a method with noise on the embeddings"
            )

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor | None:
        return super().penalty(model, inputs, outputs) if self.needs_tokenizer else None


def row_mean(apart: Tensor, batch: Batch, model: nn.Module) -> Tensor:
    """Return the mean of ``[B]`` over rows, or of ``[B, T]`` over the tokens the task decides.

    These are the labelled ones, without labels the real ones; in a causal language model those
    that predict one.  Columns before the batch's own are a prompt's.

    Raises:
        ValueError: the labels or the mask are of other tokens than the logits, as in CTC; or there
            are decisions of other things than rows and tokens, as in segmentation.
    """
    if apart.ndim not in (1, 2):
        raise ValueError(
            f"the model's logits have {apart.ndim + 1} dimensions; methods that compare passes "
            "expect a decision for each row [B, C] or token [B, T, C]; use another method"
        )
    if apart.ndim == 1:
        return apart.mean()
    # A mean over all T columns would weigh rows by their padding, and a longest row elsewhere in
    # the batch would change it: only decisions that the task asks for count.
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if getattr(getattr(unwrapped(model), "config", None), "is_encoder_decoder", False) and (
        labels is not None or "decoder_input_ids" in batch
    ):
        mask = batch.get("decoder_attention_mask")
    labelled = labels != NO_LABEL if isinstance(labels, Tensor) else None
    decided = _of_decisions(mask, "attention mask", apart, batch)
    decided &= _of_decisions(labelled, "labels", apart, batch)
    if is_causal(model):
        # Each token decides the next one.  A prompt is seen, though nothing in it is decided.
        context = _of_decisions(mask, "attention mask", apart, batch, prompt=True)
        apart, decided = apart[:, :-1], decided[:, 1:] & context[:, :-1]
    return apart[decided].sum() / decided.sum().clamp(min=1)


def _of_decisions(
    mask: Tensor | None, name: str, apart: Tensor, batch: Batch, prompt: bool = False
) -> Tensor:
    """Return a mask of the batch's tokens as one of the decisions ``[B, T]``; all without one."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return torch.ones_like(apart, dtype=torch.bool)
    before = apart.shape[1] - mask.shape[1]
    tokens = {"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"}
    if before < 0 or (before and tokens.isdisjoint(batch)):
        raise ValueError(
            f"the {name} [B, {mask.shape[1]}] does not match the model's logits [B, "
            f"{apart.shape[1]}, C]: give a label per decision, or use a method that compares none"
        )
    return nn.functional.pad(mask.bool(), (before, 0), value=prompt)


def draw_noise(
    shape: torch.Size, size: float, distribution: str, generator: torch.Generator
) -> Tensor:
    """Draw z ``[n, d]``, float32 on the CPU."""
    z = torch.empty(shape, dtype=torch.float32)
    if distribution == "uniform":
        return z.uniform_(-size, size, generator=generator)
    return z.normal_(0.0, size, generator=generator)


def token_noise(
    x: Tensor, real: Tensor, size: float, distribution: str, generator: torch.Generator
) -> Tensor:
    """Draw z ``[B, T, d]``, zero where ``real`` is false and the same wherever the padding is."""
    z = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    drawn = draw_noise(torch.Size((int(real.sum()), x.shape[-1])), size, distribution, generator)
    z[real] = drawn.to(z)
    return z


def row_noise(x: Tensor, real: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Draw ``[B, T, d]``: uniform, ± size / √(n d) in a row of n real tokens, zero at padding."""
    entries = real.sum(1).view(-1, 1, 1) * x.shape[-1]
    noise = token_noise(x, real, 1.0, "uniform", generator)
    return noise * size / entries.clamp(min=1).sqrt()
