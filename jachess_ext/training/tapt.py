"""Task-adaptive pretraining: a language model around a classifier's own backbone (Gururangan et al.
2020, *Don't Stop Pretraining*)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from torch.utils.data import Dataset

from ..smoothness.estimators import backbone_of, trained, unwrapped
from .method import Method
from .random_state import RandomState

if TYPE_CHECKING:
    from .method_arguments import MethodArguments


class TAPT(Method):
    """Language modelling on the unlabelled text, then the task loss."""

    unlabelled = tokenizer = True

    def begin(self, model: nn.Module) -> None:
        """The first stage; not where a checkpoint goes on."""
        super().begin(model)
        if self.trainer.state.global_step == 0:
            self._adapt(model)
        elif hasattr(model, "peft_config"):
            raise ValueError(
                "method='tapt' with adapters cannot go on from a checkpoint: it has the adapters "
                "alone, not the backbone that TAPT changed; train from the start"
            )

    def _adapt(self, model: nn.Module) -> None:
        from .methods import MethodTrainer  # which knows all methods, this one among them

        random, trainer = RandomState(), self.trainer
        made = language_model(model)
        masked = is_masked(made.config)
        # all of the backbone, save LoRA's matrices (zero in effect)
        named = dict(backbone_of(model).named_parameters())
        with trained({parameter: "lora_" not in name for name, parameter in named.items()}):
            stage = MethodTrainer(
                model=made,
                args=training_arguments(trainer.args, self.settings),
                data_collator=collator(trainer.processing_class, masked, self.settings),
                train_dataset=UnlabelledRows(trainer.unlabelled_text),
                processing_class=trainer.processing_class,
            )
            stage.train()
        for parameter in named.values():
            parameter.grad = None
        trainer.log({"jachess/tapt_loss": stage.state.log_history[-1]["train_loss"]})
        random.restore()


def is_masked(config: Any) -> bool:
    """Whether the model family is trained on masked tokens (encoders), not on the next one.

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


def language_model(model: nn.Module) -> Any:
    """A language model whose backbone *is* that of ``model``: training one trains the other.

    The head comes from the checkpoint that ``model`` was loaded from where it has one; else it is
    new, but tied to the token embeddings in most families.
    """
    inner: Any = unwrapped(model)
    config = inner.config
    kind: Any = (
        transformers.AutoModelForMaskedLM
        if is_masked(config)
        else transformers.AutoModelForCausalLM
    )
    source = getattr(config, "_name_or_path", "")
    if source:  # said, since transformers would ask on the terminal
        made = kind.from_pretrained(source, trust_remote_code=False)
    else:
        made = kind.from_config(config)
    backbone = backbone_of(model)
    parameter = next(backbone.parameters())
    made.to(device=parameter.device, dtype=parameter.dtype)
    setattr(made, made.base_model_prefix, backbone)
    made.tie_weights()
    return made


class UnlabelledRows(Dataset):
    """Rows without their labels, so that the language model's are made from the tokens alone."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        kept = ("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask")
        return {name: value for name, value in self._rows[index].items() if name in kept}


def collator(tokenizer: Any, masked: bool, method: MethodArguments) -> Any:
    """Pads, masks tokens (encoders; from torch's global generator) and makes the labels.

    Raises:
        ValueError: an encoder's tokenizer without a mask token.
    """
    if masked and tokenizer.mask_token is None:
        raise ValueError(
            "method='tapt' masks tokens, and the tokenizer has no mask token; set "
            "tokenizer.mask_token"
        )
    return transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm=masked, mlm_probability=method.tapt_masked if masked else None
    )


def training_arguments(args: Any, method: MethodArguments) -> transformers.TrainingArguments:
    """Those of the task's fine-tuning, with TAPT's learning rate and length; nothing is saved."""
    names = (
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm"),
        *("train_sampling_strategy", "bf16", "fp16", "use_cpu", "seed"),
    )
    settings: dict[str, Any] = {name: getattr(args, name) for name in names}
    if args.gradient_checkpointing:
        settings["gradient_checkpointing"] = True
    return transformers.TrainingArguments(
        output_dir=args.output_dir,
        learning_rate=method.tapt_lr,
        num_train_epochs=method.tapt_epochs,
        warmup_steps=0.06,
        weight_decay=0.01,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
