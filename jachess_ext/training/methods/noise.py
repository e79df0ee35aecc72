"""Methods with further passes: other dropout masks, noise on the embeddings, swapped tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...smoothness.corruption import chosen_tokens, embedding_scale, known_unknown_token
from ...smoothness.decision import NO_LABEL, kl_divergence
from ...smoothness.estimators import hooked_embeddings, in_mode, trained, unwrapped, without_labels
from ..batches import Batch, RandomState, drawing_apart, is_causal
from .base import (
    Loss,
    Method,
    Run,
    check_choice,
    check_count,
    check_fraction,
    check_nonnegative,
    check_positive,
    logits_of,
)


class RDrop(Method, name="r-drop"):
    """Mean task loss of two passes with other dropout masks, + strength · ½ (KL + KL).

    R-Drop (Liang et al. 2021).  The first pass has the plain run's masks.
    """

    def __init__(
        self, strength: float = 1.0, *, smoothing: float = 0.0, placebo: bool = False
    ) -> None:
        super().__init__(strength=strength, smoothing=smoothing, placebo=placebo)

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        first, outputs = run(inputs)
        with drawing_apart(self.key()):
            second, others = run(inputs)
        kind = self.kind(model, outputs)
        apart = kl_divergence(logits_of(outputs), logits_of(others), kind, symmetric=True)
        return Loss(
            (first + second) / 2, outputs, self.strength * (row_mean(apart, inputs, model) / 2)
        )


class R3F(Method, name="r3f"):
    """+ strength · (KL + KL) of f(x) and f(x + z), z noise (Aghajanyan et al. 2021, R3F).

    z ~ U(−ε, ε) or N(0, ε²) on every token embedding; dropout masks are drawn anew.  Under
    autocast both passes run in full precision, since bfloat16 rounds noise of 1e-5 away.

    Args:
        noise: ε.
        noise_distribution: "uniform" or "normal".
    """

    def __init__(
        self,
        strength: float = 1.0,
        *,
        noise: float = 1e-5,
        noise_distribution: str = "uniform",
        placebo: bool = False,
    ) -> None:
        super().__init__(strength=strength, placebo=placebo)
        check_positive(noise=noise)
        check_choice(("uniform", "normal"), noise_distribution=noise_distribution)
        self.noise, self.noise_distribution = noise, noise_distribution

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor:
        """Return the mean over rows (of decisions per token: `row_mean`)."""
        batch, logits, kind = (
            told_decoder(model, inputs),
            logits_of(outputs),
            self.kind(model, outputs),
        )
        device = logits.device.type
        # accelerate wraps forward in autocast and keeps the plain one under this name
        run = getattr(unwrapped(model), "_original_forward", model)
        noise = (self.noise, self.noise_distribution, self.generator())

        def add(x: Tensor) -> Tensor:
            return x + token_noise(x, batch, *noise).to(x)

        with ExitStack() as contexts:
            contexts.enter_context(drawing_apart(self.key()))
            if run is not model or torch.is_autocast_enabled(device):
                contexts.enter_context(torch.autocast(device, enabled=False))
                logits = logits_of(run(**batch))
            contexts.enter_context(hooked_embeddings(model, add))
            moved = logits_of(run(**batch))
        return row_mean(kl_divergence(logits, moved, kind, symmetric=True), inputs, model)


class NEFTune(Method, name="neftune"):
    """Uniform noise of size α / √(n d) on a row's n token embeddings (Jain et al. 2023).

    Args:
        alpha: α.
    """

    def __init__(self, alpha: float = 5.0) -> None:
        super().__init__()
        check_positive(alpha=alpha)
        self.alpha = alpha

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        def add(x: Tensor) -> Tensor:
            return x + row_noise(x, inputs, self.alpha, self.generator()).to(x.dtype)

        with hooked_embeddings(model, add):
            return Loss(*run(inputs))


class _Adversarial(Method):
    """A method with steps of ascent on noise δ on the embeddings; the defaults are SMART's."""

    def __init__(
        self,
        strength: float = 1.0,
        *,
        adv_steps: int = 1,
        adv_lr: float = 1.0,
        adv_start: float = 0.1,
        adv_radius: float = 0.5,
        placebo: bool = False,
    ) -> None:
        super().__init__(strength=strength, placebo=placebo)
        check_count(adv_steps=adv_steps)
        check_positive(adv_lr=adv_lr, adv_start=adv_start)
        check_nonnegative(adv_radius=adv_radius)
        self.adv_steps, self.adv_lr = adv_steps, adv_lr
        self.adv_start, self.adv_radius = adv_start, adv_radius


class FreeLB(_Adversarial, name="freelb"):
    """Mean gradient of the task loss over K steps of ascent on noise δ (Zhu et al. 2020, FreeLB).

    All K passes have the plain run's dropout masks, as in the paper.

    Args:
        adv_steps: K.
        adv_lr: length of a step of δ, along g/‖g‖ per row.
        adv_start: δ starts uniform, ± adv_start / √(n d) for a row of n tokens.
        adv_radius: radius of the ball that a row's δ is projected into; 0: no ball.
    """

    one_process = True
    _share = 1.0  # of a pass in the mean

    def __init__(
        self,
        *,
        adv_steps: int = 3,
        adv_lr: float = 0.1,
        adv_start: float = 0.1,
        adv_radius: float = 0.0,
    ) -> None:
        super().__init__(
            adv_steps=adv_steps, adv_lr=adv_lr, adv_start=adv_start, adv_radius=adv_radius
        )

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        inputs = self.trainer._prepare_inputs(dict(inputs))
        before = RandomState()
        noise: Tensor | None = None
        self._share, losses = 1.0 / self.adv_steps, []

        def add(embeddings: Tensor) -> Tensor:
            nonlocal noise
            if noise is None:
                noise = row_noise(embeddings, inputs, self.adv_start, self.generator())
                noise.requires_grad_()
            return embeddings + noise.to(embeddings.dtype)

        for number in range(self.adv_steps):
            if number:
                before.restore()
                assert noise is not None
                noise = self._climbed(noise)
            with hooked_embeddings(self.trainer.model, add):
                losses.append(run(inputs))
        self._share = 1.0
        return torch.stack(losses).sum()

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        task, outputs = run(inputs)
        return Loss(task * self._share, outputs)

    def _climbed(self, noise: Tensor) -> Tensor:
        assert noise.grad is not None
        norm = noise.grad.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, 1, 1)
        moved = noise.detach() + self.adv_lr * (noise.grad / norm)
        if self.adv_radius > 0:
            norm = moved.flatten(1).norm(dim=1).view(-1, 1, 1)
            moved = moved * (self.adv_radius / norm.clamp(min=1e-30)).clamp(max=1.0)
        return moved.requires_grad_()


class SMART(_Adversarial, name="smart"):
    """+ strength · max over |δ| ≤ ε of KL(p ‖ q) + KL(q ‖ p), q at x + δ (Jiang et al. 2020).

    Sizes are in units of the embedding table's root mean square entry before training, since the
    published 1e-5 is below the rounding of bfloat16.  The Bregman proximal point is left out.

    Args:
        adv_steps: steps of ascent, δ ← δ + adv_lr · g/‖g‖_∞ per row.
        adv_lr: their length.
        adv_start: standard deviation of the normal noise that δ starts from.
        adv_radius: half width ε of the box that δ is clamped to.
    """

    def prepare(self) -> None:
        super().prepare()
        self._scale = embedding_scale(unwrapped(self.trainer.model))

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor:
        """Return the mean over rows in nats; all passes with noise have the same dropout masks."""
        batch, kind = told_decoder(model, inputs), self.kind(model, outputs)
        logits, masks = logits_of(outputs), self.key()
        noise: Tensor | None = None

        def apart(target: Tensor) -> Tensor:
            with drawing_apart(masks), hooked_embeddings(model, add):
                moved = logits_of(model(**batch))
                return row_mean(kl_divergence(target, moved, kind, symmetric=True), inputs, model)

        def add(embeddings: Tensor) -> Tensor:
            nonlocal noise
            if noise is None:
                size = self.adv_start * self._scale
                noise = token_noise(embeddings, inputs, size, "normal", self.generator())
                noise.requires_grad_()
            return embeddings + noise.to(embeddings.dtype)

        box = self.adv_radius * self._scale
        for _ in range(self.adv_steps):
            with trained(dict.fromkeys(model.parameters(), False)):
                divergence = apart(logits.detach())
                assert noise is not None
                (gradient,) = torch.autograd.grad(divergence, noise)
            largest = gradient.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            moved = noise.detach() + self.adv_lr * self._scale * gradient / largest
            noise = moved.clamp(-box, box).requires_grad_()
        return apart(logits)


class _Corruption(Method):
    """A method with copies of its batches in which tokens are swapped.

    Special tokens are neither swapped nor drawn, nor are tokens without a row in the model's
    embedding table.  A tokenizer without an unknown and a mask token gives random tokens alone.
    """

    needs_tokenizer = True

    def prepare(self) -> None:
        super().prepare()
        if not self.needs_tokenizer:
            return
        tokenizer: Any = self.trainer.processing_class
        table = unwrapped(self.trainer.model).get_input_embeddings()  # type: ignore[operator]
        self._special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        self._unknown = known_unknown_token(tokenizer)
        self._padding = tokenizer.pad_token_id
        ids = torch.arange(min(len(tokenizer), getattr(table, "num_embeddings", len(tokenizer))))
        self._words = ids[~torch.isin(ids, self._special)]

    def corrupted(self, inputs: Batch) -> dict[str, Any]:
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

    Args (others: `Method`):
        clean: share of the clean rows' loss; 0: a single pass, on the copy.
    """

    def __init__(
        self,
        *,
        swapped: float = 0.15,
        unknown: float = 0.5,
        clean: float = 0.5,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(swapped=swapped, unknown=unknown, smoothing=smoothing)
        check_fraction(clean=clean)
        self.clean = clean

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        if self.clean == 0:
            return Loss(*run(self.corrupted(inputs)))
        task, outputs = run(inputs)
        with drawing_apart(self.key()):
            other, _ = run(self.corrupted(inputs))
        return Loss(self.clean * task + (1 - self.clean) * other, outputs)


class CorruptConsistency(_Corruption, name="corrupt-consistency"):
    """+ strength · KL(p(x) ‖ p(x′)), x′ a copy with swapped tokens and other dropout masks.

    Mode train: x is the labelled batch, and gradients go through both passes.  Mode joint: x is an
    unlabelled batch, and p(x) a target without gradient and dropout (Xie et al. 2020,
    *Unsupervised Data Augmentation*).
    """

    modes = ("train", "joint")

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor | None:
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
            others = model(**told_decoder(model, self.corrupted(inputs)))
        kind = self.kind(model, outputs)
        apart = kl_divergence(logits_of(target), logits_of(others), kind)
        return self.every * row_mean(apart, inputs, model)


class Recommended(CorruptConsistency, name="recommended"):
    """Label smoothing and consistency on unlabelled rows, as docs/finetuning.md recommends.

    Without unlabelled rows only label smoothing is left; with several labels a row, only
    consistency; a regression is trained plainly.  A warning says what is left out.
    """

    any_task = True

    def __init__(self) -> None:
        super().__init__("joint", every=2, smoothing=0.1)

    def prepare(self) -> None:
        trainer = self.trainer
        regression = self.problem() == "regression"
        self.needs_tokenizer = trainer.unlabelled_dataset is not None and not regression
        super().prepare()
        if "labels" not in trainer.label_names and not regression:
            names = ", ".join(trainer.label_names) or "none"
            raise ValueError(
                f"method='recommended' is for models whose labels are called 'labels', and these "
                f"are not ({names}); use method=none, or a method with noise on the embeddings"
            )

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor | None:
        return super().penalty(model, inputs, outputs) if self.needs_tokenizer else None


def row_mean(apart: Tensor, batch: Batch, model: nn.Module) -> Tensor:
    """Return the mean of ``[B]`` over rows, or of ``[B, T]`` over the tokens the task decides.

    These are the labelled ones, without labels the real ones; in a causal language model those
    that predict one.  Columns before the batch's own are a prompt's.
    """
    if apart.ndim != 2:
        return apart.mean()
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if getattr(getattr(unwrapped(model), "config", None), "is_encoder_decoder", False) and (
        labels is not None or "decoder_input_ids" in batch
    ):
        mask = batch.get("decoder_attention_mask")
    shown, decided = (torch.ones_like(apart, dtype=torch.bool) for _ in range(2))
    for given in (mask, None if labels is None else labels != NO_LABEL):
        if isinstance(given, Tensor) and given.ndim == 2:
            before = (apart.shape[1] - given.shape[1], 0)
            decided &= nn.functional.pad(given.bool(), before)
            if given is mask:
                shown &= nn.functional.pad(given.bool(), before, value=True)
    if is_causal(model):
        apart, decided = apart[:, :-1], decided[:, 1:] & shown[:, :-1]
    return apart[decided].sum() / decided.sum().clamp(min=1)


def told_decoder(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Drop the labels, and state the decoder's inputs that the model would make from them."""
    labels, make = batch.get("labels"), None
    if isinstance(labels, Tensor) and labels.ndim == 2 and "decoder_input_ids" not in batch:
        make = getattr(unwrapped(model), "prepare_decoder_input_ids_from_labels", None)
    made = {} if make is None else {"decoder_input_ids": make(labels)}
    return {**without_labels(batch), **made}


def draw_noise(
    shape: torch.Size, size: float, distribution: str, generator: torch.Generator
) -> Tensor:
    """Draw z ``[n, d]``, float32 on the CPU."""
    z = torch.empty(shape, dtype=torch.float32)
    if distribution == "uniform":
        return z.uniform_(-size, size, generator=generator)
    return z.normal_(0.0, size, generator=generator)


def _real_tokens(x: Tensor, batch: Batch) -> Tensor:
    """Return booleans ``[B, T]`` on the device of the embeddings x ``[B, T, d]``."""
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return mask.to(x.device).bool().reshape(x.shape[:2])


def token_noise(
    x: Tensor, batch: Batch, size: float, distribution: str, generator: torch.Generator
) -> Tensor:
    """Draw z ``[B, T, d]``, zero at padding and the same wherever the padding is."""
    real = _real_tokens(x, batch)
    z = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    drawn = draw_noise(torch.Size((int(real.sum()), x.shape[-1])), size, distribution, generator)
    z[real] = drawn.to(z)
    return z


def row_noise(x: Tensor, batch: Batch, size: float, generator: torch.Generator) -> Tensor:
    """Draw ``[B, T, d]``: uniform, ± size / √(n d) in a row of n real tokens, zero at padding."""
    entries = _real_tokens(x, batch).sum(1).view(-1, 1, 1) * x.shape[-1]
    noise = token_noise(x, batch, 1.0, "uniform", generator)
    return noise * size / entries.clamp(min=1).sqrt()
