"""Methods that compare or train passes with other dropout masks, noise on the embeddings, or other
tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...smoothness.corruption import chosen_tokens, embedding_scale, known_unknown_token
from ...smoothness.decision import Kind, kl_divergence
from ...smoothness.estimators import hooked_embeddings, in_mode, trained, unwrapped, without_labels
from ..batches import RandomState, drawing_apart
from .base import (
    Batch,
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
    """Two passes with dropout masks of their own: mean task loss, + strength · ½ (KL + KL).

    Liang et al. 2021, *R-Drop*.  The first pass has the plain run's masks.

    """

    def __init__(
        self, strength: float = 1.0, *, smoothing: float = 0.0, placebo: bool = False
    ) -> None:
        super().__init__(strength=strength, smoothing=smoothing, placebo=placebo)

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """Return the mean of both task losses, and the symmetric divergence of the outputs."""
        first, outputs = run(inputs)
        with drawing_apart(self.key()):
            second, others = run(inputs)
        apart = symmetric_divergence(
            logits_of(outputs), logits_of(others), self.kind(model, outputs)
        )
        return Loss((first + second) / 2, outputs, self.strength * (row_mean(apart, inputs) / 2))


class R3F(Method, name="r3f"):
    """+ strength · symmetric divergence under noise (Aghajanyan et al. 2021, R3F).

    f(x) against f(x + z), z ~ U(−ε, ε) or N(0, ε²) on every token embedding.  The second pass draws
    dropout masks of its own.  Noise of 1e-5 is lost in the roundings of bfloat16, so under autocast
    both passes are made in full precision.

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
        """Return the mean over rows (of a language model: over real tokens)."""
        batch, logits, generator = without_labels(inputs), logits_of(outputs), self.generator()
        device, kind = logits.device.type, self.kind(model, outputs)
        run = model

        def add(x: Tensor) -> Tensor:
            noise = token_noise(x, batch, self.noise, self.noise_distribution, generator)
            return x + noise.to(x)

        with ExitStack() as contexts:
            own_numbers = int(torch.randint(2**63 - 1, (), generator=generator))
            contexts.enter_context(drawing_apart(own_numbers))
            # autocast around the model, or within its forward
            if torch.is_autocast_enabled(device) or hasattr(unwrapped(model), "_original_forward"):
                # accelerate wraps forward in autocast and keeps the plain one under this name
                run = getattr(unwrapped(model), "_original_forward", model)
                contexts.enter_context(torch.autocast(device, enabled=False))
                logits = logits_of(run(**batch))
            contexts.enter_context(hooked_embeddings(model, add))
            moved = logits_of(run(**batch))
        return row_mean(symmetric_divergence(logits, moved, kind), batch)


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
        """Return the task loss with noise; dropout masks are the plain run's."""

        def add(x: Tensor) -> Tensor:
            return x + row_noise(x, inputs, self.alpha, self.generator()).to(x.dtype)

        with hooked_embeddings(model, add):
            return Loss(*run(inputs))


class _Adversarial(Method):
    """A method with steps of ascent on noise δ on the embeddings; see its subclasses."""

    def __init__(
        self, *, adv_steps: int, adv_lr: float, adv_start: float, adv_radius: float, **settings: Any
    ) -> None:
        super().__init__(**settings)
        check_count(adv_steps=adv_steps)
        check_positive(adv_lr=adv_lr, adv_start=adv_start)
        check_nonnegative(adv_radius=adv_radius)
        self.adv_steps, self.adv_lr = adv_steps, adv_lr
        self.adv_start, self.adv_radius = adv_start, adv_radius


class FreeLB(_Adversarial, name="freelb"):
    """The task loss's gradient, mean over K steps of ascent on noise δ (Zhu et al. 2020, FreeLB).

    All K passes have the plain run's dropout masks, as the paper has it.

    Args:
        adv_steps: K.
        adv_lr: how far δ moves in a step, along g/‖g‖ per row.
        adv_start: δ starts uniform, ± adv_start / √(n d) for a row of n tokens.
        adv_radius: norm of a row's δ, into whose ball it is put back; 0: anywhere.
    """

    one_process = True
    _share = 1.0  # of one pass in the loss

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
        """Go K times forward and backward; the logged loss is the mean."""
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
        """Return one pass's share of the mean."""
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

    The maximum by ascent, put back into the box.  The published sizes (an absolute 1e-5) move p by
    less than the roundings of bfloat16: here they are in units of the embedding table's root mean
    square entry before training.  Their second part, the Bregman proximal point, is left out.

    Args:
        adv_steps: steps of ascent, δ ← δ + adv_lr · g/‖g‖_∞ per row.
        adv_lr: their length.
        adv_start: deviation of the normal noise that δ starts from.
        adv_radius: half width of the box, ε.
    """

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
        super().__init__(
            adv_steps=adv_steps,
            adv_lr=adv_lr,
            adv_start=adv_start,
            adv_radius=adv_radius,
            strength=strength,
            placebo=placebo,
        )

    def prepare(self) -> None:
        """Measure the embedding table."""
        super().prepare()
        self._scale = embedding_scale(unwrapped(self.trainer.model))

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor:
        """Return the mean over rows, in nats; the passes with noise share dropout masks."""
        batch, kind = without_labels(inputs), self.kind(model, outputs)
        logits, masks = logits_of(outputs), self.key()
        noise: Tensor | None = None

        def apart(target: Tensor) -> Tensor:
            with drawing_apart(masks), hooked_embeddings(model, add):
                return symmetric_divergence(target, logits_of(model(**batch)), kind)

        def add(embeddings: Tensor) -> Tensor:
            nonlocal noise
            if noise is None:
                size = self.adv_start * self._scale
                noise = token_noise(embeddings, inputs, size, "normal", self.generator())
                noise.requires_grad_()
            return embeddings + noise.to(embeddings.dtype)

        box = self.adv_radius * self._scale
        for _ in range(self.adv_steps):
            # the ascent's backward pass is of δ alone
            with trained(dict.fromkeys(model.parameters(), False)):
                divergence = row_mean(apart(logits.detach()), inputs)
                assert noise is not None
                (gradient,) = torch.autograd.grad(divergence, noise)
            largest = gradient.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            moved = noise.detach() + self.adv_lr * self._scale * gradient / largest
            noise = moved.clamp(-box, box).requires_grad_()
        return row_mean(apart(logits), inputs)


class _Corruption(Method):
    """A method with copies of its batches with swapped tokens."""

    needs_tokenizer = True

    def prepare(self) -> None:
        """Make the swaps."""
        super().prepare()
        if self.needs_tokenizer:
            trainer = self.trainer
            self._swaps = TokenSwaps(
                trainer.processing_class, trainer.model, self.swapped, self.unknown
            )

    def corrupted(self, inputs: Batch) -> dict[str, Any]:
        """Return the batch with other tokens; special tokens stay."""
        return self._swaps(inputs, self.generator())


class CorruptAugment(_Corruption, name="corrupt-augment"):
    """clean · task loss + (1 − clean) · task loss of a copy with swapped tokens.

    Args (others: `Method`):
        clean: share of the clean rows' loss; 0: one pass, of the copy alone.
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
        """Return the mixed loss."""
        if self.clean == 0:
            return Loss(*run(self.corrupted(inputs)))
        task, outputs = run(inputs)
        with drawing_apart(self.key()):
            other, _ = run(self.corrupted(inputs))
        return Loss(self.clean * task + (1 - self.clean) * other, outputs)


class CorruptConsistency(_Corruption, name="corrupt-consistency"):
    """+ strength · KL(p(x) ‖ p(x′)), x′ a copy with swapped tokens.

    With dropout masks of its own in the copy's pass, which has no labels.  Mode train: x is the
    labelled batch; gradients through both passes.  Mode joint: x is an unlabelled batch, and p(x)
    a target without gradient and dropout (Xie et al. 2020, *Unsupervised Data Augmentation*).
    """

    modes = ("train", "joint")

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor | None:
        """Return nats, mean over rows; every ``every``-th step ``every``-fold, else None."""
        if self.trainer.state.global_step % self.every:
            return None
        target = outputs
        if self.mode == "joint":
            inputs = self.trainer.next_unlabelled()
            with torch.no_grad(), in_mode(model, False):
                target = model(**inputs)
        passing = nullcontext() if self.dropout else in_mode(model, False)
        with drawing_apart(self.key()), passing:
            others = model(**without_labels(self.corrupted(inputs)))
        kind = self.kind(model, outputs)
        apart = kl_divergence(logits_of(target), logits_of(others), kind)
        return self.every * row_mean(apart, inputs)


class Recommended(CorruptConsistency, name="recommended"):
    """What the comparisons of docs/finetuning.md chose: label smoothing, and consistency under
    swapped tokens on unlabelled rows.

    Without unlabelled rows label smoothing alone, of rows with several labels consistency alone; a
    regression is trained plainly.  A warning says what is left out.
    """

    any_task = True

    def __init__(self) -> None:
        super().__init__("joint", every=2, smoothing=0.1)

    def prepare(self) -> None:
        """Find out what the task and the data allow."""
        trainer = self.trainer
        regression = self.problem() == "regression"
        self.needs_tokenizer = trainer.unlabelled_dataset is not None and not regression
        super().prepare()
        if "labels" not in trainer.label_names and not regression:
            names = ", ".join(trainer.label_names) or "none"
            raise ValueError(
                f"method='recommended' is for models whose labels are called 'labels', and these "
                f"are not ({names}); use method=none, or a method that acts on embeddings"
            )

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor | None:
        """Return the penalty that the task and the data allow."""
        return super().penalty(model, inputs, outputs) if self.needs_tokenizer else None


class TokenSwaps:
    """Copies of batches in which tokens are swapped for the unknown token or for random ones.

    Args:
        tokenizer: its special tokens stay; all others can come that the model has a row for.
        model: whose embedding table says which those are.
        share: of the tokens swapped.
        unknown: share of those that become the unknown token; none do where the tokenizer has
            neither that nor a mask token.
    """

    def __init__(self, tokenizer: Any, model: nn.Module, share: float, unknown: float) -> None:
        self._special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        self._unknown = known_unknown_token(tokenizer)
        self._share, self._unknown_share = share, 0.0 if self._unknown is None else unknown
        table: Any = unwrapped(model).get_input_embeddings()  # type: ignore[operator]
        ids = torch.arange(min(len(tokenizer), getattr(table, "num_embeddings", len(tokenizer))))
        self._words = ids[~torch.isin(ids, self._special)]
        self._padding = tokenizer.pad_token_id

    def __call__(self, batch: Batch, generator: torch.Generator) -> dict[str, Any]:
        """Return the batch with other ``input_ids``, on its device; the generator is the CPU's.

        Raises:
            ValueError: it has no ``input_ids``.
        """
        if "input_ids" not in batch:
            raise ValueError(f"expected a batch with input_ids to swap; it has {', '.join(batch)}")
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        chosen = chosen_tokens(
            ids,
            torch.ones_like(ids) if mask is None else mask,
            self._share,
            special=self._special,
            generator=generator,
            spared=self._padding if self._unknown == self._padding else None,
        )
        count = int(chosen.sum())
        words = self._words[torch.randint(len(self._words), (count,), generator=generator)]
        unknown = torch.rand(count, generator=generator) < self._unknown_share
        swapped = ids.clone()
        swapped[chosen.to(ids.device)] = torch.where(unknown, self._unknown or 0, words).to(ids)
        return {**batch, "input_ids": swapped}


def symmetric_divergence(first: Tensor, second: Tensor, kind: Kind = "single") -> Tensor:
    """Return KL(p‖q) + KL(q‖p) per row, as `kl_divergence`.

    As Σ (p − q)(log p − log q), whose terms are all positive: with noise of 1e-5 the difference of
    two KL sums would be rounding error.
    """
    return kl_divergence(first, second, kind, symmetric=True)


def row_mean(apart: Tensor, batch: Batch) -> Tensor:
    """Return the mean over rows ``[B]``; of a language model's ``[B, T]``, over real tokens."""
    mask = batch.get("attention_mask")
    if apart.ndim == 2 and mask is not None and mask.shape == apart.shape:
        return apart[mask.bool()].mean()
    return apart.mean()


def draw_noise(
    shape: torch.Size, size: float, distribution: str, generator: torch.Generator
) -> Tensor:
    """Return z of a shape ``[n, d]``, float32 on the CPU."""
    z = torch.empty(shape, dtype=torch.float32)
    if distribution == "uniform":
        return z.uniform_(-size, size, generator=generator)
    return z.normal_(0.0, size, generator=generator)


def _real_tokens(x: Tensor, batch: Batch) -> Tensor:
    """Return ``[B, T]`` booleans on the device of the embeddings x ``[B, T, d]``."""
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return mask.to(x.device).bool().reshape(x.shape[:2])


def token_noise(
    x: Tensor, batch: Batch, size: float, distribution: str, generator: torch.Generator
) -> Tensor:
    """Return z ``[B, T, d]``, zero at padding; a real token's does not depend on where that is."""
    real = _real_tokens(x, batch)
    z = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    drawn = draw_noise(torch.Size((int(real.sum()), x.shape[-1])), size, distribution, generator)
    z[real] = drawn.to(z)
    return z


def row_noise(x: Tensor, batch: Batch, size: float, generator: torch.Generator) -> Tensor:
    """Return ``[B, T, d]``: uniform, ± size / √(n d) in a row of n real tokens, zero at padding."""
    entries = _real_tokens(x, batch).sum(1).view(-1, 1, 1) * x.shape[-1]
    noise = token_noise(x, batch, 1.0, "uniform", generator)
    return noise * size / entries.clamp(min=1).sqrt()
