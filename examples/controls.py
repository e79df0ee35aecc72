"""R-Drop, NEFTune, FreeLB, SMART, L2-SP and WiSE-FT, added by the public class `Method`.

Importing this file registers them: afterwards `MethodTrainer(method="r-drop,strength=2")` finds
them by name, as it finds the package's own.  Each class overrides the one step in which it differs
from plain training; docs/methods.md, "A method of your own", says what there is to override.

python examples/controls.py [--tiny]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from jachess_ext.models import (
    check_whole,
    drawn_modules,
    hooked_embeddings,
    trained,
    unwrapped,
    without_engine,
    without_labels,
)
from jachess_ext.training import Method, MethodTrainer
from jachess_ext.training.batches import Batch, RandomState, seeded_rng
from jachess_ext.training.corruption import embedding_scale
from jachess_ext.training.decision import kl_divergence
from jachess_ext.training.methods import (
    Loss,
    Penalised,
    half_squares,
    logits_of,
    row_mean,
    token_noise,
)
from jachess_ext.training.methods.base import Outputs, Run
from jachess_ext.training.methods.settings import (
    count,
    fraction,
    nonnegative,
    positive,
    share_or_zero,
)

# ---- a second pass ------------------------------------------------------------------------------


class RDrop(Penalised, name="r-drop"):
    """Mean task loss of two passes with other dropout masks, + strength · ½ (KL + KL).

    R-Drop (Liang et al. 2021).  The first pass has the plain run's masks.
    """

    smoothing: float = share_or_zero(0.0)

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        task, outputs = run(inputs)
        with seeded_rng(self.key()):
            second_task, second_outputs = run(inputs)
        first, second = (logits_of(x, trained=True) for x in (outputs, second_outputs))
        divergence = kl_divergence(
            first, second, self.decision_kind(model, outputs), symmetric=True
        )
        penalty = row_mean(divergence, inputs, model) / 2
        return Loss((task + second_task) / 2, outputs, self.strength * penalty)


# ---- noise on the embeddings --------------------------------------------------------------------


def row_noise(x: Tensor, real: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Draw ``[B, T, d]``: uniform, ± size / √(n d) in a row of n real tokens, zero at padding."""
    entries = real.sum(1).view(-1, 1, 1) * x.shape[-1]
    noise = token_noise(x, real, 1.0, "uniform", generator)
    return noise * size / entries.clamp(min=1).sqrt()


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

        with hooked_embeddings(model, add, inputs, needs_gradients=True) as noisy:
            return Loss(*run(noisy))


class AdversarialNoise:
    """Noise δ on the embeddings, drawn in the first pass and moved between the passes.

    An encoder-decoder has a δ for each of its two stacks.

    Args:
        draw: draws δ for embeddings x ``[B, T, d]`` with real tokens ``[B, T]``.
    """

    def __init__(self, draw: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._draw = draw
        self.noise: list[Tensor] = []

    @contextmanager
    def added(self, model: nn.Module, batch: Batch) -> Iterator[dict[str, Tensor]]:
        """Add δ in the pass within; yield the batch to call the model with."""
        stack = -1  # the hook is called for the encoder's table, then for the decoder's

        def add(x: Tensor, real: Tensor) -> Tensor:
            nonlocal stack
            stack += 1
            if stack == len(self.noise):  # the first pass: only now is the shape known
                self.noise.append(self._draw(x, real).requires_grad_())
            return x + self.noise[stack].to(x.dtype)

        with hooked_embeddings(model, add, batch, needs_gradients=True) as noisy:
            yield noisy

    def ascend(
        self, step: Callable[[Tensor, Tensor], Tensor], gradients: Iterable[Tensor | None]
    ) -> None:
        """Replace each δ by ``step(δ, gradient)``."""
        moved = []
        for noise, gradient in zip(self.noise, gradients, strict=True):
            assert gradient is not None, "no pass reached this noise"
            moved.append(step(noise.detach(), gradient).requires_grad_())
        self.noise = moved


class FreeLB(Method, name="freelb"):
    """Mean gradient of the task loss over K steps of ascent on noise δ (Zhu et al. 2020, FreeLB).

    All K passes have the plain run's dropout masks, as in the paper.

    Args:
        adv_steps: K.
        adv_lr: length of a step of δ, along g/‖g‖ per row.
        adv_start: δ starts uniform, ± adv_start / √(n d) for a row of n tokens.
        adv_radius: radius of the ball that a row's δ is projected into; 0: no ball.
    """

    one_process, needs_outputs = True, False
    adv_steps: int = count(3)
    adv_lr: float = positive(0.1)
    adv_start: float = positive(0.1)
    adv_radius: float = nonnegative(0.0)

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        # Each `run` goes backward, and the gradients add up: `loss` divides by K, so that their sum
        # is the mean.
        inputs = self.trainer._prepare_inputs(dict(inputs))
        masks, losses = RandomState(), []
        adversary = AdversarialNoise(
            lambda x, real: row_noise(x, real, self.adv_start, self.generator())
        )
        for number in range(self.adv_steps):
            if number:
                masks.restore()
                adversary.ascend(self._ascend, (noise.grad for noise in adversary.noise))
            with adversary.added(self.trainer.model, inputs) as noisy:
                losses.append(run(noisy))
        return torch.stack(losses).sum()

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        task, outputs = run(inputs)
        return Loss(task / self.adv_steps, outputs)

    def _ascend(self, noise: Tensor, gradient: Tensor) -> Tensor:
        def norms(x: Tensor) -> Tensor:
            return x.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, 1, 1)

        moved = noise + self.adv_lr * gradient / norms(gradient)
        if self.adv_radius > 0:
            moved = moved * (self.adv_radius / norms(moved)).clamp(max=1.0)
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
        logits, kind = logits_of(outputs, trained=True), self.decision_kind(model, outputs)
        masks, scale = self.key(), self._scale
        adversary = AdversarialNoise(
            lambda x, real: token_noise(x, real, self.adv_start * scale, "normal", self.generator())
        )

        def divergence(target: Tensor, called: nn.Module = model) -> Tensor:
            with seeded_rng(masks), adversary.added(model, inputs) as noisy:
                moved = logits_of(called(**without_labels(noisy)))
            return row_mean(kl_divergence(target, moved, kind, symmetric=True), inputs, model)

        def ascend(noise: Tensor, gradient: Tensor) -> Tensor:
            largest = gradient.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            moved = noise + self.adv_lr * scale * gradient / largest
            return moved.clamp(-self.adv_radius * scale, self.adv_radius * scale)

        # The ascent needs the gradient by δ alone, so the weights are frozen meanwhile.  An engine
        # of DeepSpeed prepares the step's one backward in its forward: the ascent goes past it.
        for _ in range(self.adv_steps):
            with trained(dict.fromkeys(model.parameters(), False)):
                reached = divergence(logits.detach(), without_engine(model))
                gradients = torch.autograd.grad(reached, adversary.noise)
            adversary.ascend(ascend, gradients)
        return divergence(logits)


# ---- the pretrained weights ---------------------------------------------------------------------


class _PretrainedWeights(Method):
    """A method that keeps a copy of the pretrained weights that are trained.

    Modules that the checkpoint lacked, such as the new head, are left out: transformers marks the
    weights that it loads; the model's attribute ``drawn_modules``, if it has one, is used instead.
    """

    def prepare(self) -> None:
        """Copy the weights, before a checkpoint of the run can be loaded."""
        super().prepare()
        model = self._unwrap(self.trainer.model)
        check_whole(model)
        drawn = drawn_modules(model)
        self.start = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if drawn is not None and parameter.requires_grad
            if name.rpartition(".")[0] not in drawn
        }
        if not self.start or hasattr(model, "peft_config"):
            raise self.error(
                "needs pretrained weights that are trained: fine-tune without adapters a model "
                "that from_pretrained loaded, or name the modules that are new: "
                "model.drawn_modules = ('classifier',), or ()"
            )

    def _unwrap(self, model: nn.Module) -> nn.Module:
        return unwrapped(self.trainer.accelerator.unwrap_model(model))

    def pairs(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each copied parameter with its value before training."""
        check_whole(model)
        parameters = dict(self._unwrap(model).named_parameters())
        return [(parameters[n], start.to(parameters[n].device)) for n, start in self.start.items()]


class L2SP(_PretrainedWeights, Penalised, name="l2-sp"):
    """+ strength · ½ Σ (θ − θ₀)² over pretrained weights (Li et al. 2018, L²-SP).

    The paper's second term, weight decay of the new head, is left out.
    """

    needs_outputs = False
    strength: float = nonnegative(0.01)

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor:
        return half_squares(now - start for now, start in self.pairs(model))


class WiSEFT(_PretrainedWeights, name="wise-ft"):
    """After training, θ₀ + mix · (θ − θ₀) for pretrained weights (Wortsman et al. 2022, WiSE-FT).

    The head stays the fine-tuned one, since a pretrained encoder has no zero-shot head to mix it
    with.  Checkpoints within the run hold the weights before the interpolation.

    Args:
        mix: share of the fine-tuned weights.
    """

    mix: float = fraction(0.5)

    @torch.no_grad()
    def end(self, model: nn.Module) -> None:
        for now, start in self.pairs(model):
            now.copy_(torch.lerp(start, now, self.mix))


def main() -> None:
    """Fine-tunes with each and prints the accuracies."""
    from small_task import accuracy, load, parse
    from transformers import TrainingArguments

    options, accuracies = parse(__doc__), []
    for method in (RDrop(), NEFTune(), FreeLB(), SMART(), L2SP(), WiSEFT()):
        model, train, _, dev = load(options.tiny)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                num_train_epochs=1 if options.tiny else 2,
                per_device_train_batch_size=8,
                learning_rate=1e-3,
                save_strategy="no",
                report_to="none",
            )
            MethodTrainer(
                model=model,
                args=arguments,
                train_dataset=train,
                data_collator=train.collate,
                method=method,
            ).train()
        accuracies.append(f"{method.name} {accuracy(model, dev):.3f}")
    print(f"accuracy: {', '.join(accuracies)}")


if __name__ == "__main__":
    main()
