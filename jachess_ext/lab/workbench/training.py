"""Fine-tune a model by a recipe, and compute its outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers

from ...models import in_mode, on_device_of, without_labels
from ...training import Method, MethodTrainer
from .metrics import Floats
from .models import Batch, Encoded, Model
from .settings import Recipe


def fine_tune(
    model: Model,
    train: Encoded,
    recipe: Recipe,
    *,
    seed: int,
    method: Method | str = "none",
    unlabelled: Encoded | None = None,
    callbacks: Sequence[transformers.TrainerCallback] = (),
    report_to: Sequence[str] = (),
    run_name: str | None = None,
) -> None:
    """Train a model in place; the result does not depend on the state of random generators.

    Args:
        model: a sequence classifier or regressor.
        train: labelled rows.
        recipe: epochs, batches, learning rate and so on; its `lora` is not applied here.
        seed: seed of the order of examples and of dropout.
        method: a `Method` or its text, see docs/methods.md.
        unlabelled: rows for the methods that use unlabelled data.
        callbacks: callbacks of the Trainer.
        report_to: trackers of the Trainer, which log losses and penalties under `run_name`.

    Raises:
        FloatingPointError: a loss or penalty is not finite.

    Examples:
        >>> from jachess_ext.lab.workbench.models import encode, load_model, load_tokenizer
        >>> from jachess_ext.lab.workbench.tasks import Examples
        >>> from jachess_ext.lab.demo import ASSETS
        >>> tokenizer = load_tokenizer(ASSETS)
        >>> model = load_model(ASSETS, 2, tokenizer, seed=0)
        >>> films = Examples(["a good film", "a bad film"], None, [1, 0])
        >>> fine_tune(model, encode(films, tokenizer, 16), Recipe(epochs=1), seed=0, method="sam")
    """
    settings: dict[str, Any] = {}
    if recipe.gradient_checkpointing:
        settings["gradient_checkpointing"] = True
    if report_to:
        settings |= {"run_name": run_name, "logging_steps": _LOG_EVERY}
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
                # Batches of rows of similar length have little padding; their order depends on the
                # seed only.
                train_sampling_strategy="group_by_length",
                bf16=recipe.bf16,
                torch_compile=recipe.torch_compile,
                use_cpu=not torch.cuda.is_available(),
                seed=seed,
                save_strategy="no",  # a killed run starts again: it takes only minutes
                logging_strategy="steps" if report_to else "no",
                report_to=list(report_to) or "none",
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
        # accelerate leaves autocast in the model's forward, which evaluation would then use too.
        trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)


_LOG_EVERY = 10  # optimiser steps between two losses sent to a tracker


@torch.no_grad()
def model_outputs(model: Model, batches: Iterable[Batch], is_regression: bool) -> Floats:
    """Return class probabilities [N, C] (regression: predictions [N, 1]) in evaluation mode,
    float64.

    Raises:
        FloatingPointError: an output is not finite.
    """
    # The logits stay on the device until all batches are launched: a copy to the host after each
    # would wait for it.  The softmax is in float64, since the NLL and Brier score of confident
    # predictions need an exact p near 1.
    with in_mode(model, training=False):
        logits = [model(**on_device_of(model, without_labels(b))).logits for b in batches]
    outputs = torch.cat([part.double() for part in logits])
    if not torch.isfinite(outputs).all():
        raise FloatingPointError(
            "the model's outputs are not finite: training diverged; lower the learning rate"
        )
    return (outputs if is_regression else outputs.softmax(-1)).cpu().numpy()
