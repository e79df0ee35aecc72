"""Methods on the weights (L2, SAM, ‖∇L‖², TAPT), LoRA, and the placebo of a penalty."""

from __future__ import annotations

import functools
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
from ..batches import Batch, RandomState, collate_unlabelled, seeded_rng
from .base import Method, Outputs, Penalised
from .settings import nonnegative, positive, share

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_TEXT_COLUMNS = ("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask")
_TASK_ARGUMENTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("max_grad_norm", "train_sampling_strategy", "seed", "bf16", "fp16", "use_cpu"),
)


_Window: TypeAlias = list[tuple[Batch, RandomState, Tensor]]
"""The micro-batches of an optimiser step, each with the state of torch's generators before its pass
and its loss."""


class L2(Penalised, name="l2"):
    """Task loss + strength · ½ Σ θ² over trained matrices, without biases and norm weights.

    For an encoder Σ θ² is of the order of 10⁴.
    """

    needs_outputs = False
    strength: float = nonnegative(1e-5)

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor:
        check_whole(model)
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        return half_squares(matrices)


def half_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return ½ Σ |t|² over all entries of all tensors, in float32 or wider, on the first tensor's
    device."""
    pairs = map(real_pairs, tensors)
    squares = [t.to(torch.promote_types(t.dtype, torch.float32)).square().sum() for t in pairs]
    return torch.stack([s.to(squares[0].device) for s in squares]).sum() / 2


class _TwoPasses(Method):
    """A method that, after the last micro-batch of an optimiser step, runs all of them again."""

    one_process = True

    def begin(self, model: nn.Module) -> None:
        super().begin(model)
        self._window: _Window = []

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        """Run the micro-batch's plain pass, and `second_pass` too if it is the step's last one."""
        random = RandomState()
        loss = run(inputs)
        self._window.append((inputs, random, loss))
        if not self.trainer.accelerator.sync_gradients:
            return loss
        window, self._window = self._window, []
        return loss + self.second_pass(run, window)

    def second_pass(self, run: Callable[[Batch], Tensor], window: _Window) -> Tensor | float:
        """Change the gradients of the step; return the summand to add to its loss."""
        raise NotImplementedError


class SAM(_TwoPasses, name="sam"):
    """Sharpness-aware minimisation: the gradient at θ + ρ g/‖g‖ (Foret et al. 2021, Eq. 3).

    There is one ascent step per optimiser step, along the gradient g of all its micro-batches.
    Both passes have the same dropout masks; later steps have the masks of the plain run.

    Args:
        rho: ρ, the radius of the ascent step.
    """

    rho: float = positive(0.05)

    def second_pass(self, run: Callable[[Batch], Tensor], window: _Window) -> float:
        after = RandomState()

        def backward() -> None:
            for batch, random, _ in window:
                random.restore()
                run(batch)

        sharpness_aware_gradient(self.trainer.model.parameters(), backward, self.rho)
        after.restore()
        return 0.0


class GradientNorm(_TwoPasses, Penalised, name="gradient-norm"):
    """Task loss + strength · ‖∇L‖², L the loss of an optimiser step's full batch (Barrett & Dherin
    2021).

    The penalty's gradient, 2 H ∇L, is exact: a second pass over the micro-batches computes the
    derivative of L along ∇L in forward mode, by `jx.jvp`, and its gradient.  The second pass draws
    other dropout masks, so that on average over masks the penalty is that of the mean gradient.
    """

    strength: float = nonnegative(0.01)

    def active_parts(self) -> set[str]:
        return {"loss", "step"}

    def second_pass(self, run: Callable[[Batch], Tensor], window: _Window) -> Tensor:
        """Add 2 · strength · H ∇L to the gradients; return strength · ‖∇L‖²."""
        trainer, model = self.trainer, self.trainer.model
        trainer.check_active_parts()  # before the second pass, which replaces compute_loss
        weights = {name: p for name, p in model.named_parameters() if p.grad is not None}
        gradients = {name: p.grad.clone() for name, p in weights.items()}
        compute_loss, penalty = trainer.compute_loss, torch.zeros_like(window[0][2])

        # Replaces the outermost compute_loss, so that terms added by a class above the mixin are
        # part of L.
        def derivative(*args: object, **kwargs: object) -> Tensor:
            def loss(dual_weights: dict[str, Tensor]) -> Tensor:
                swap = torch_private.reparametrize_module(model, dual_weights, tie_weights=True)
                swaps.enter_context(swap)
                return compute_loss(*args, **kwargs)

            _, tangent = jvp(loss, (weights,), (gradients,))
            if self.placebo:
                tangent = placebo(tangent, weights.values(), self.key())
            return 2 * self.strength * tangent

        with seeded_rng(self.key()), patch.object(trainer, "compute_loss", derivative):
            for batch, *_ in window:
                # The weights are swapped back only after the backward pass, which runs checkpointed
                # blocks again.
                with ExitStack() as swaps:
                    penalty += run(batch) / 2
        trainer.step_log.add(task_loss=sum(loss for *_, loss in window), penalty=penalty)
        return penalty


def sharpness_aware_gradient(
    parameters: Iterable[nn.Parameter], backward: Callable[[], None], rho: float
) -> float:
    """Replace the gradients g at θ by the gradients at θ + ρ g/‖g‖; θ is unchanged bit for bit.

    If ‖g‖ is zero or not finite, the gradients are unchanged.

    Args:
        parameters: the parameters θ, whose ``.grad`` is the full batch's gradient g.
        backward: computes the same batch's loss and adds its gradients to ``.grad``.
        rho: ρ.

    Returns:
        The norm ‖g‖.
    """
    moved = [p for p in parameters if p.grad is not None]
    norm = _total_norm([p.grad for p in moved if p.grad is not None]).item()
    if not 0 < norm < float("inf"):
        return norm
    # θ is restored from a copy: θ + ρ g − ρ g is not θ in floating point, and the error would
    # accumulate.
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
        penalty: the penalty, with its graph, which is retained for the task loss's backward pass.
        parameters: the model's parameters; the gradient's direction is uniformly distributed over
            those that are trained.
        seed: seed of the direction, a number from 0 up.
    """
    # z ~ N(0, I) over all trained weights has a uniform direction.  With c = ‖∂penalty/∂θ‖ / ‖z‖
    # the scalar c Σ θ z has the gradient c z, whose norm is that of the penalty's gradient: an
    # effect that the penalty shares with its placebo comes from the length of the step only.
    leaves = [p for p in parameters if p.requires_grad]
    gradients = torch.autograd.grad(penalty, leaves, retain_graph=True, allow_unused=True)
    trained = [real_pairs(p) for p in leaves]
    norm = _total_norm([g for g in gradients if g is not None])
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(p.shape, generator=generator).to(p) for p in trained]
    scale = norm / _total_norm(drawn)
    pairs = zip(trained, drawn, strict=True)
    product = torch.stack([(p * (scale.to(p) * z)).sum().to(penalty) for p, z in pairs]).sum()
    return penalty.detach() + product - product.detach()  # its gradient, not its value


def _total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors' entries, float64 on the CPU."""
    squares = [real_pairs(t).double().square().sum().cpu() for t in tensors]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


class TAPT(Method, name="tapt"):
    """Language modelling on the unlabelled text, then training on the task loss (Gururangan et al.
    2020).

    The language model shares the classifier's backbone.

    Args:
        tapt_epochs: epochs over the unlabelled text.
        tapt_lr: learning rate of the language modelling.
        tapt_masked: fraction of the tokens that are masked, for encoders.
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
        is_mlm = is_masked(language.config)
        texts = cast("Sequence[Mapping[str, object]]", trainer.unlabelled_dataset)
        # By index: iterating over a torch data set need not end.
        rows = (texts[i] for i in range(len(texts)))
        collator = transformers.DataCollatorForLanguageModeling(
            tokenizer, mlm=is_mlm, mlm_probability=self.tapt_masked if is_mlm else None
        )
        # LoRA's matrices are not trained, so that the adapters stay zero in effect.
        backbone = dict(backbone_of(model).named_parameters())
        with trained({parameter: "lora_" not in name for name, parameter in backbone.items()}):
            stage = trainer.plain_trainer(
                model=language,
                args=self._training_arguments(),
                data_collator=functools.partial(collate_unlabelled, collator),
                train_dataset=[{n: row[n] for n in _TEXT_COLUMNS if n in row} for row in rows],
                processing_class=tokenizer,
            )
            stage.train()
        for parameter in backbone.values():
            parameter.grad = None
        trainer.log({"jachess/tapt_loss": stage.state.log_history[-1]["train_loss"]})
        random.restore()

    def _training_arguments(self) -> transformers.TrainingArguments:
        """Return the task's training arguments with TAPT's learning rate and number of epochs,
        without checkpoints and logs."""
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
            **{name: getattr(args, name) for name in _TASK_ARGUMENTS},
        )


def is_masked(config: PreTrainedConfig) -> bool:
    """Return whether a model family predicts masked tokens (encoders); False: the next token.

    Raises:
        ValueError: transformers has no language model of this family.
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

    Its head is loaded from the checkpoint of ``model``, if there is one, and is otherwise new; in
    most families a new head is tied to the token embeddings.
    """
    config = cast("PreTrainedModel", unwrapped(model)).config
    auto = getattr(transformers, f"AutoModelFor{'Masked' if is_masked(config) else 'Causal'}LM")
    source = getattr(config, "_name_or_path", "")
    if source:  # if trust_remote_code is not set, transformers may prompt on the terminal
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
    """Return the model with low-rank adapters by peft; only these and the head are trained.

    The head consists of the modules that peft takes for it (``classifier``, ``score``) and those
    that the model's checkpoint lacked.  Adapters are added to the layers that peft chooses for the
    model's family, or to every linear layer if peft does not support the family.

    Examples:
        >>> adapted = with_lora(model, rank=4)
        >>> adapted.peft_config["default"].r
        4

    Args:
        rank: rank r of the adapters.
        alpha: scale α of the adapters: the update is α/r · B A.
        seed: seed of the adapters' initial values.
        task_type: peft's name of the kind of model: "SEQ_CLS", "CAUSAL_LM", ...

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
    with seeded_rng(seed):
        return peft.get_peft_model(model, config)
