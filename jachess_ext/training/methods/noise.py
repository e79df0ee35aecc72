"""Methods that compare a pass with a second one, on noisy embeddings or on swapped tokens."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ...models import (
    NO_LABEL,
    hooked_embeddings,
    in_mode,
    token_table,
    unwrapped,
    without_labels,
)
from ..batches import Batch, is_causal, seeded_rng
from ..corruption import sample_tokens, unknown_token_id
from ..decision import kl_divergence
from .base import Loss, Method, Outputs, Penalised, Run, WithModes, logits_of
from .settings import choice, count, fraction, positive, share, share_or_zero

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class R3F(Penalised, name="r3f"):
    """Task loss + strength · symmetric KL of f(x) and f(x + z) (R3F, Aghajanyan et al. 2021).

    The noise z ~ U(−ε, ε) or N(0, ε²) is added to every entry of the token embeddings; dropout
    masks are drawn anew.  Under autocast both passes run in full precision, since bfloat16 rounds
    noise of 1e-5 away.

    Args:
        noise: size ε of the noise.
        noise_distribution: "uniform" or "normal".
    """

    noise: float = positive(1e-5)
    noise_distribution: str = choice("uniform", ("uniform", "normal"))

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor:
        """Return the symmetric KL divergence of both passes, averaged by `row_mean`."""
        kind, logits = self.decision_kind(model, outputs), logits_of(outputs, trained=True)
        device = logits.device.type
        # accelerate wraps forward in autocast and keeps the original under this name.
        run = getattr(unwrapped(model), "_original_forward", model)
        noise = (self.noise, self.noise_distribution, self.generator())

        def add_noise(x: Tensor, real: Tensor) -> Tensor:
            return x + token_noise(x, real, *noise).to(x)

        with ExitStack() as contexts:
            contexts.enter_context(seeded_rng(self.key()))
            if run is not model or torch.is_autocast_enabled(device):
                contexts.enter_context(torch.autocast(device, enabled=False))
                logits = logits_of(run(**without_labels(inputs)))
            noisy = contexts.enter_context(hooked_embeddings(model, add_noise, inputs))
            noisy_logits = logits_of(run(**without_labels(noisy)))
        return row_mean(kl_divergence(logits, noisy_logits, kind, symmetric=True), inputs, model)


class _Corruption(Method):
    """A method that uses copies of its batches in which tokens are swapped for others.

    Special tokens are neither swapped nor drawn as replacements, nor are tokens without a row in
    the model's embedding table.  If the tokenizer has neither an unknown nor a mask token, all
    replacements are random tokens.

    Attributes:
        swapped: fraction of the tokens that are swapped.
        unknown: fraction of the swapped tokens that become the unknown token instead of a random
            one.
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

    def corrupt(self, inputs: Batch) -> dict[str, Tensor]:
        """Return the batch with the fraction ``swapped`` of its tokens swapped.

        Raises:
            ValueError: the batch has no ``input_ids``.
        """
        if "input_ids" not in inputs:
            raise ValueError(f"expected a batch with input_ids to swap; it has {', '.join(inputs)}")
        ids, mask, generator = inputs["input_ids"], inputs.get("attention_mask"), self.generator()
        sampled = sample_tokens(
            ids,
            torch.ones_like(ids) if mask is None else mask,
            self.swapped,
            special_ids=self._special,
            generator=generator,
            padding=self._padding if self._unknown == self._padding else None,
        )
        count = int(sampled.sum())
        words = self._words[torch.randint(len(self._words), (count,), generator=generator)]
        is_unknown = torch.rand(count, generator=generator) < self.unknown
        if self._unknown is not None:
            words = torch.where(is_unknown, self._unknown, words)
        swapped_ids = ids.clone()
        swapped_ids[sampled.to(ids.device)] = words.to(ids)
        return {**inputs, "input_ids": swapped_ids}


class CorruptAugment(_Corruption, name="corrupt-augment"):
    """clean · task loss + (1 − clean) · task loss of a copy with swapped tokens.

    Args (``swapped``, ``unknown``: see `_Corruption`):
        clean: weight of the unchanged batch's loss; 0: a single pass, on the copy.
    """

    needs_outputs = False
    swapped: float = share(0.15)
    unknown: float = fraction(0.5)
    clean: float = fraction(0.5)
    smoothing: float = share_or_zero(0.0)

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        if self.clean == 0:
            return Loss(*run(self.corrupt(inputs)))
        task_loss, outputs = run(inputs)
        with seeded_rng(self.key()):
            corrupted_task, _ = run(self.corrupt(inputs))
        return Loss(self.clean * task_loss + (1 - self.clean) * corrupted_task, outputs)


class _Consistency(_Corruption):
    """Implementation of `CorruptConsistency`'s penalty, without its settings."""

    every, dropout = 1, True

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor | None:
        """Return ``every`` times the KL divergence in nats, averaged by `row_mean`, in every
        ``every``-th step; None in the other steps."""
        if self.trainer.state.global_step % self.every:
            return None
        target = outputs
        if self.mode == "joint":
            inputs = self.trainer.next_unlabelled()
            with torch.no_grad(), in_mode(model, False):
                target = model(**inputs)
        mode = nullcontext() if self.dropout else in_mode(model, False)
        with seeded_rng(self.key()), mode:
            corrupted = model(**without_labels(self.corrupt(inputs)))
        kind = self.decision_kind(model, outputs)
        logits = logits_of(target, trained=self.mode == "train")
        divergence = kl_divergence(logits, logits_of(corrupted), kind)
        return self.every * row_mean(divergence, inputs, model)


class CorruptConsistency(_Consistency, WithModes, name="corrupt-consistency"):
    """Task loss + strength · KL(p(x) ‖ p(x′)), x′ a copy of x with swapped tokens.

    The pass on x′ has other dropout masks.  Mode train: x is the labelled batch, and gradients flow
    through both passes.  Mode joint: x is an unlabelled batch, and p(x) a target without gradient
    and dropout (Xie et al. 2020, *Unsupervised Data Augmentation*).

    Further arguments: those of `_Corruption` and `WithModes`.

    Args:
        every: apply the penalty in every n-th optimiser step only, with n-fold strength.
    """

    modes = ("train", "joint")
    swapped: float = share(0.15)
    unknown: float = fraction(0.5)
    every: int = count(1)
    smoothing: float = share_or_zero(0.0)


class Recommended(_Consistency, name="recommended"):
    """Label smoothing and consistency on unlabelled rows, as docs/finetuning.md recommends.

    With several labels a row only consistency is applied, and a regression is trained plainly; a
    warning says so.
    """

    any_task = needs_unlabelled = True
    mode, every, smoothing = "joint", 2, 0.1

    def prepare(self) -> None:
        self.needs_unlabelled = self.needs_tokenizer = self.problem_type() != "regression"
        super().prepare()

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor | None:
        return super().penalty(model, inputs, outputs) if self.needs_tokenizer else None


def row_mean(values: Tensor, batch: Batch, model: nn.Module) -> Tensor:
    """Return the mean of values ``[B]`` over rows, or of values ``[B, T]`` over the task's
    decisions.

    The decisions are at labelled tokens, or, in a batch without labels, at real tokens; for a
    causal language model at the tokens before them.  If T exceeds the number of tokens in
    the batch, the first values belong to a soft prompt.

    Raises:
        ValueError: the labels or the mask belong to other positions than the logits (CTC), or the
            decisions are neither per row nor per token (segmentation).
    """
    if values.ndim not in (1, 2):
        raise ValueError(
            f"the model's logits have {values.ndim + 1} dimensions; methods that compare passes "
            "expect a decision for each row [B, C] or token [B, T, C]; use another method"
        )
    if values.ndim == 1:
        return values.mean()
    # A mean over all T columns would weigh rows by their padding, and depend on the longest row of
    # the batch.
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if getattr(getattr(unwrapped(model), "config", None), "is_encoder_decoder", False) and (
        labels is not None or "decoder_input_ids" in batch
    ):
        mask = batch.get("decoder_attention_mask")
    labelled = labels != NO_LABEL if isinstance(labels, Tensor) else None
    decided = _align_with_values(mask, "attention mask", values, batch)
    decided &= _align_with_values(labelled, "labels", values, batch)
    if is_causal(model):
        # Each token predicts the next one.  A prompt is context; no token of it is predicted.
        context = _align_with_values(mask, "attention mask", values, batch, prompt=True)
        values, decided = values[:, :-1], decided[:, 1:] & context[:, :-1]
    return values[decided].sum() / decided.sum().clamp(min=1)


def _align_with_values(
    mask: Tensor | None, name: str, values: Tensor, batch: Batch, prompt: bool = False
) -> Tensor:
    """Return a mask of the batch's tokens as booleans of the shape of ``values``, ``[B, T]``.

    Args:
        mask: ``[B, T']``; None: all true.
        name: name of the mask, for the message.
        prompt: value of the mask at the T − T' tokens of a soft prompt, which come first.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return torch.ones_like(values, dtype=torch.bool)
    prompt_length = values.shape[1] - mask.shape[1]
    tokens = {"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"}
    if prompt_length < 0 or (prompt_length and tokens.isdisjoint(batch)):
        raise ValueError(
            f"the {name} [B, {mask.shape[1]}] does not match the model's logits [B, "
            f"{values.shape[1]}, C]: give a label per decision, or use a method that compares none"
        )
    return nn.functional.pad(mask.bool(), (prompt_length, 0), value=prompt)


def draw_noise(
    shape: torch.Size, size: float, distribution: str, generator: torch.Generator
) -> Tensor:
    """Return noise of a shape, float32 on the CPU: U(−size, size) for the distribution "uniform",
    N(0, size²) for "normal"."""
    z = torch.empty(shape, dtype=torch.float32)
    if distribution == "uniform":
        return z.uniform_(-size, size, generator=generator)
    return z.normal_(0.0, size, generator=generator)


def token_noise(
    x: Tensor, real: Tensor, size: float, distribution: str, generator: torch.Generator
) -> Tensor:
    """Return noise for token embeddings, ``[B, T, d]``, zero at padding; the noise of the real
    tokens does not depend on the padding.

    Args:
        x: the embeddings, ``[B, T, d]``.
        real: ``[B, T]``, false at padding.
        size, distribution: see `draw_noise`.
    """
    noise = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    shape = torch.Size((int(real.sum()), x.shape[-1]))
    noise[real] = draw_noise(shape, size, distribution, generator).to(noise)
    return noise
