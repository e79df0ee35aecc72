"""Methods on the weights (L2, L2-SP, WiSE-FT, SAM, TAPT), LoRA, and the placebo of a penalty."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias, cast
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn

from ... import torch_private
from ..._io import require
from ...jet import jvp
from ...models import backbone_of, check_whole, drawn_modules, real_pairs, trained, unwrapped
from ..batches import Batch, RandomState, drawing_apart
from .base import Method, Outputs, Penalised
from .settings import fraction, nonnegative, positive, share

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask")
_OF_THE_TASK = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("max_grad_norm", "train_sampling_strategy", "seed", "bf16", "fp16", "use_cpu"),
)


_Window: TypeAlias = list[tuple[Batch, RandomState, Tensor]]
"""The micro-batches of an optimiser step, each with the generators before it, and its loss."""


class L2(Penalised, name="l2"):
    """+ strength · ½ Σ θ² over trained matrices, without biases and norm weights.

    Σ θ² of an encoder is in the ten thousands.
    """

    needs_outputs = False
    strength: float = nonnegative(1e-5)

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor:
        check_whole(model)
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        return _half_squares(matrices)


def _half_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return ½ Σ |t|², in float32 or wider, on the first one's device."""
    pairs = map(real_pairs, tensors)
    squares = [t.to(torch.promote_types(t.dtype, torch.float32)).square().sum() for t in pairs]
    return torch.stack([s.to(squares[0].device) for s in squares]).sum() / 2


class _Start(Method):
    """A method that keeps a copy of the pretrained weights that are trained.

    Modules that the checkpoint lacked, such as the new head, are left out: transformers marks the
    weights that it loads, and the model's attribute ``drawn_modules`` goes before.
    """

    def prepare(self) -> None:
        """Copy the weights, before a checkpoint of the run can be loaded."""
        super().prepare()
        model = self._inner(self.trainer.model)
        check_whole(model)
        if hasattr(model, "peft_config"):
            raise self.error(
                "holds on to pretrained weights, which do not change under adapters; fine-tune "
                "without adapters, or use another method"
            )
        drawn = drawn_modules(model)
        if drawn is None:
            raise self.error(
                "holds on to pretrained weights, and nothing tells which of the model's are: load "
                "it by from_pretrained, not as a copy of a model, or name the modules that are "
                "new: model.drawn_modules = ('classifier',), or ()"
            )
        self.start = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name.rpartition(".")[0] not in drawn
        }
        if not self.start:
            raise self.error(
                "holds on to pretrained weights, and none of the model's trained ones is; load it "
                "from a checkpoint, or use another method"
            )

    def _inner(self, model: nn.Module) -> nn.Module:
        """Return the model without the wrappers of accelerate, and as it was before compiling."""
        return unwrapped(self.trainer.accelerator.unwrap_model(model))

    def moved(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each kept parameter with its value before training."""
        check_whole(model)
        parameters = dict(self._inner(model).named_parameters())
        return [(parameters[n], value.to(parameters[n].device)) for n, value in self.start.items()]


class L2SP(_Start, Penalised, name="l2-sp"):
    """+ strength · ½ Σ (θ − θ₀)² over pretrained weights (Li et al. 2018, L²-SP).

    The paper's second term, weight decay of the new head, is left out.
    """

    needs_outputs = False
    strength: float = nonnegative(0.01)

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor:
        return _half_squares(now - start for now, start in self.moved(model))


class WiSEFT(_Start, name="wise-ft"):
    """After training, θ₀ + mix · (θ − θ₀) for pretrained weights (Wortsman et al. 2022, WiSE-FT).

    The head stays the fine-tuned one, since a pretrained encoder has no zero-shot head to mix it
    with.  Checkpoints within the run hold the weights before the interpolation.

    Args:
        mix: share of the fine-tuned weights.
    """

    mix: float = fraction(0.5)

    @torch.no_grad()
    def end(self, model: nn.Module) -> None:
        for now, start in self.moved(model):
            now.copy_(torch.lerp(start, now, self.mix))


class _Repeated(Method):
    """A method that goes once more through an optimiser step's micro-batches after the last one."""

    one_process = True

    def begin(self, model: nn.Module) -> None:
        super().begin(model)
        self._window: _Window = []  # an interrupted run's are dropped

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        """Take the plain step; after the last micro-batch, repeat them all."""
        random = RandomState()
        loss = run(inputs)
        self._window.append((inputs, random, loss))
        if not self.trainer.accelerator.sync_gradients:
            return loss
        window, self._window = self._window, []
        return loss + self.repeat(run, window)

    def repeat(self, run: Callable[[Batch], Tensor], window: _Window) -> Tensor | float:
        """Change the gradients of the step, and return what its loss has more."""
        raise NotImplementedError


class SAM(_Repeated, name="sam"):
    """Sharpness-aware minimisation: the gradient at θ + ρ g/‖g‖ (Foret et al. 2021, Eq. 3).

    It climbs once per optimiser step, along the gradient g of all its micro-batches, and leaves
    the optimiser as it is.  Both passes have the same dropout masks; later steps have those of the
    plain run.

    Args:
        rho: ρ, the radius of the ascent step.
    """

    rho: float = positive(0.05)

    def repeat(self, run: Callable[[Batch], Tensor], window: _Window) -> float:
        after = RandomState()

        def again() -> None:
            for batch, random, _ in window:
                random.restore()
                run(batch)

        sharpness_aware_gradient(self.trainer.model.parameters(), again, self.rho)
        after.restore()
        return 0.0


class GradientNorm(_Repeated, Penalised, name="gradient-norm"):
    """+ strength · ‖∇L‖², L the loss of an optimiser step's whole batch (Barrett & Dherin 2021).

    Its gradient is 2 H ∇L, exact: a second pass over the micro-batches takes the derivative of L
    along ∇L forward, by `jx.jvp`, and the gradient of that.  The second pass draws dropout masks
    of its own, so that on average over them the penalty is that of the mean gradient.
    """

    strength: float = nonnegative(0.01)

    def active_parts(self) -> set[str]:
        return {"loss", "step"}

    def repeat(self, run: Callable[[Batch], Tensor], window: _Window) -> Tensor:
        """Add 2 · strength · H ∇L to the gradients; return strength · ‖∇L‖²."""
        trainer, model = self.trainer, self.trainer.model
        trainer.check_active_parts()  # which the second pass, whose loss is another, has no part in
        weights = {name: p for name, p in model.named_parameters() if p.grad is not None}
        gradients = {name: p.grad.clone() for name, p in weights.items()}
        compute_loss, penalty = trainer.compute_loss, torch.zeros_like(window[0][2])

        # In place of the outermost compute_loss: what a class above the mixin adds is part of L.
        def slope(*args: object, **kwargs: object) -> Tensor:
            def loss(moving: dict[str, Tensor]) -> Tensor:
                swapped = torch_private.reparametrize_module(model, moving, tie_weights=True)
                swaps.enter_context(swapped)
                return compute_loss(*args, **kwargs)

            _, tangent = jvp(loss, (weights,), (gradients,))
            if self.placebo:
                tangent = placebo(tangent, weights.values(), self.key())
            return 2 * self.strength * tangent

        with drawing_apart(self.key()), patch.object(trainer, "compute_loss", slope):
            for batch, *_ in window:
                # The weights are back after the backward, which runs checkpointed blocks again.
                with ExitStack() as swaps:
                    penalty += run(batch) / 2
        trainer.step_log.add(task_loss=sum(loss for *_, loss in window), penalty=penalty)
        return penalty


def sharpness_aware_gradient(
    parameters: Iterable[nn.Parameter], backward: Callable[[], None], rho: float
) -> float:
    """Replace the gradients g at θ by those at θ + ρ g/‖g‖; θ stays bit for bit as it was.

    A gradient of zero, or one that is not finite, is left as it is.

    Args:
        parameters: with gradients g of the whole batch.
        backward: computes the same batch's loss and adds its gradients to ``.grad``.

    Returns:
        ‖g‖.
    """
    moved = [p for p in parameters if p.grad is not None]
    norm = _total_norm([p.grad for p in moved if p.grad is not None]).item()
    if not 0 < norm < float("inf"):
        return norm
    # θ is restored from a copy: θ + ρ g − ρ g is not θ in floating point, and the drift adds up
    before = [p.detach().clone() for p in moved]
    with torch.no_grad():
        for p in moved:
            assert p.grad is not None
            p.add_(p.grad.to(p.dtype), alpha=rho / norm)
            p.grad = None
    try:
        backward()
    finally:
        with torch.no_grad():
            for p, start in zip(moved, before, strict=True):
                p.copy_(start)
    return norm


def placebo(penalty: Tensor, parameters: Iterable[nn.Parameter], seed: int) -> Tensor:
    """Return a scalar with the penalty's value and a random gradient of the same norm.

    Args:
        penalty: attached to the graph, which is kept for the task loss's backward pass.
        parameters: the model's; the direction is uniform over those that are trained.
        seed: of the direction, from 0 up.
    """
    # z ~ N(0, I) over all trained weights has a uniform direction.  With c = ‖∂penalty/∂θ‖ / ‖z‖
    # the scalar c Σ θ z has the gradient c z, as long as the penalty's: what is left of a penalty's
    # effect under its placebo is an effect of the step's length alone.
    leaves = [p for p in parameters if p.requires_grad]
    gradients = torch.autograd.grad(penalty, leaves, retain_graph=True, allow_unused=True)
    trained = [real_pairs(p) for p in leaves]
    norm = _total_norm([g for g in gradients if g is not None])
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(p.shape, generator=generator).to(p) for p in trained]
    scale = norm / _total_norm(drawn)
    along = torch.stack(
        [(p * (scale.to(p) * z)).sum().to(penalty) for p, z in zip(trained, drawn, strict=True)]
    ).sum()
    return penalty.detach() + along - along.detach()  # the gradient of `along`, not its value


def _total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all tensors together, float64 on the CPU."""
    squares = [real_pairs(t).double().square().sum().cpu() for t in tensors]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


class TAPT(Method, name="tapt"):
    """Language modelling on the unlabelled text, then the task loss (Gururangan et al. 2020).

    The language model is built around the classifier's own backbone.

    Args:
        tapt_epochs: epochs over the unlabelled text.
        tapt_lr: learning rate of the language modelling.
        tapt_masked: share of the tokens that are masked, for encoders.
    """

    needs_unlabelled = needs_tokenizer = True
    tapt_epochs: float = positive(3.0)
    tapt_lr: float = positive(5e-5)
    tapt_masked: float = share(0.15)

    def prepare(self) -> None:
        super().prepare()
        if self.trainer.is_deepspeed_enabled:
            raise self.error(
                "cannot run under DeepSpeed, whose first engine keeps hold of the weights of the "
                "second; use DistributedDataParallel (leave out deepspeed=)"
            )

    def begin(self, model: nn.Module) -> None:
        super().begin(model)
        if self.trainer.state.global_step == 0:
            self._adapt(model)
        elif hasattr(model, "peft_config"):
            raise self.error(
                "with adapters cannot go on from a checkpoint: it has the adapters alone, not the "
                "backbone that TAPT changed; train from the start"
            )

    def _adapt(self, model: nn.Module) -> None:
        random, trainer = RandomState(), self.trainer
        language = language_model(model)
        tokenizer = cast("PreTrainedTokenizerBase", trainer.processing_class)
        masked = is_masked(language.config)
        texts = cast("Sequence[Mapping[str, object]]", trainer.unlabelled_dataset)
        rows = (texts[i] for i in range(len(texts)))  # a data set of torch's does not say its end
        # LoRA's matrices stay as they are, zero in effect
        backbone = dict(backbone_of(model).named_parameters())
        with trained({parameter: "lora_" not in name for name, parameter in backbone.items()}):
            stage = trainer.plain_trainer(
                model=language,
                args=self._training_arguments(),
                data_collator=transformers.DataCollatorForLanguageModeling(
                    tokenizer, mlm=masked, mlm_probability=self.tapt_masked if masked else None
                ),
                train_dataset=[{n: row[n] for n in _OF_TEXT if n in row} for row in rows],
                processing_class=tokenizer,
            )
            stage.train()
        for parameter in backbone.values():
            parameter.grad = None
        trainer.log({"jachess/tapt_loss": stage.state.log_history[-1]["train_loss"]})
        random.restore()

    def _training_arguments(self) -> transformers.TrainingArguments:
        """Return the task's arguments with TAPT's learning rate and length, without checkpoints."""
        args = self.trainer.args
        return transformers.TrainingArguments(
            output_dir=args.output_dir,
            learning_rate=self.tapt_lr,
            num_train_epochs=self.tapt_epochs,
            warmup_steps=0.06,
            weight_decay=0.01,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **{name: getattr(args, name) for name in _OF_THE_TASK},
        )


def is_masked(config: PreTrainedConfig) -> bool:
    """Tell whether a model family is trained on masked tokens (encoders) or on the next token.

    Raises:
        ValueError: transformers knows no language model of this family.
    """
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(
        config, "is_decoder", False
    ):
        return True
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    raise ValueError(
        f"method='tapt' needs a language model of the family {config.model_type!r}, and "
        "transformers has none"
    )


def language_model(model: nn.Module) -> PreTrainedModel:
    """Return a language model that shares the backbone of ``model``.

    Its head comes from the checkpoint that ``model`` was loaded from, if any; a new head is tied
    to the token embeddings in most families.
    """
    config = cast("PreTrainedModel", unwrapped(model)).config
    auto = getattr(transformers, f"AutoModelFor{'Masked' if is_masked(config) else 'Causal'}LM")
    source = getattr(config, "_name_or_path", "")
    if source:  # without trust_remote_code transformers may ask on the terminal
        language = auto.from_pretrained(source, trust_remote_code=False)
    else:
        language = auto.from_config(config)
    backbone = backbone_of(model)
    parameter = next(backbone.parameters())
    language.to(device=parameter.device, dtype=parameter.dtype)
    setattr(language, language.base_model_prefix, backbone)
    language.tie_weights()
    return language


def with_lora(
    model: PreTrainedModel,
    rank: int = 8,
    alpha: int = 16,
    *,
    seed: int = 0,
    task_type: str = "SEQ_CLS",
) -> PeftModel:
    """Add low-rank adapters by peft; only these and the new head are trained.

    The head is what peft takes for it (``classifier``, ``score``) and what the model's checkpoint
    lacked.  Adapters go where peft puts them for the model's family, or on every linear layer of a
    family that peft does not know.

    Example:
        >>> adapted = with_lora(model, rank=4)
        >>> adapted.peft_config["default"].r
        4

    Args:
        rank: r of the adapters, as in the paper.
        alpha: α of the adapters, as in the paper.
        seed: of the adapters' first values.
        task_type: peft's name of the kind of model, "CAUSAL_LM" for a language model.

    Raises:
        MissingExtra: peft is not installed.
    """
    peft = require("peft")
    families = require("peft.utils").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    config = peft.LoraConfig(
        task_type=task_type,
        r=rank,
        lora_alpha=alpha,
        target_modules=None if model.config.model_type in families else "all-linear",
        lora_dropout=0.0,
        modules_to_save=list(drawn_modules(model) or ()) or None,
    )
    with drawing_apart(seed):
        return peft.get_peft_model(model, config)
