"""Fine-tuning by one recipe and one method: what every run of the project does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from ..tasks.batches import Encoded
from ..training import Method, MethodTrainer
from .grid import Recipe
from .tracking import EVERY


def fine_tune(
    model: Any,
    train: Encoded,
    recipe: Recipe,
    *,
    seed: int,
    method: Method | str = "none",
    unlabelled: Encoded | None = None,
    callbacks: Sequence[transformers.TrainerCallback] = (),
    log_as: str | None = None,
) -> None:
    """Trains `model` in place; the same on every call, whatever ran before.

    Args:
        model: a sequence classifier or regressor.
        train: what to train on.
        recipe: epochs, batches, learning rate and the rest; its `lora` is the caller's to apply.
        seed: of the order of examples and of dropout.
        method: one of docs/methods.md, or its text.
        unlabelled: for the methods that use it.
        callbacks: the Trainer's.
        log_as: the run's name, under which they get losses while it trains; None: they get none.

    Raises:
        FloatingPointError: a loss or penalty that is not finite.
    """
    settings: dict[str, Any] = {}
    if recipe.gradient_checkpointing:
        settings["gradient_checkpointing"] = True
    if log_as is not None:
        settings |= {"run_name": log_as, "logging_steps": EVERY}
    with tempfile.TemporaryDirectory() as folder:
        trainer = MethodTrainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=recipe.batch_size,
                gradient_accumulation_steps=recipe.gradient_accumulation,
                num_train_epochs=recipe.epochs,
                learning_rate=recipe.learning_rate,
                weight_decay=recipe.weight_decay,
                warmup_steps=recipe.warmup,
                lr_scheduler_type=recipe.scheduler,
                train_sampling_strategy="group_by_length",
                bf16=recipe.bf16,
                torch_compile=recipe.torch_compile,
                use_cpu=not torch.cuda.is_available(),
                seed=seed,
                save_strategy="no",
                logging_strategy="no" if log_as is None else "steps",
                report_to="none",
                disable_tqdm=True,
                **settings,
            ),
            train_dataset=train,
            unlabelled_dataset=unlabelled,
            data_collator=train.collate,
            processing_class=train.tokenizer,
            method=method,
            callbacks=list(callbacks),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        # accelerate leaves the forward in autocast, in which the model would be judged, too
        trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)


@contextmanager
def in_own_precision(model: Any) -> Iterator[Any]:
    """Within it the model computes without the autocast that accelerate wraps its forward in."""
    wrapped = model.__dict__.pop("forward", None) if hasattr(model, "_original_forward") else None
    try:
        yield model
    finally:
        if wrapped is not None:
            model.forward = wrapped
