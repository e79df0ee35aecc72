"""Columns of a data set and a recipe for fine-tuning; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..._io import DataError


def check(settings: object, expected: str, is_valid: Callable[[float], bool], *names: str) -> None:
    """Check settings that are numbers or tuples of numbers; None is valid.

    Args:
        settings: object whose attributes ``names`` are checked.
        expected: description of the valid numbers, for the message.
        is_valid: returns whether a number is valid.

    Raises:
        DataError: a number is not valid; the message names the setting.
    """
    for name in names:
        value = getattr(settings, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not is_valid(number):
                verb = "has" if isinstance(value, tuple) else "is"
                raise DataError(f"{name} {verb} {number}; expected {expected}")


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a file or data set.

    Attributes:
        text: column of the text.
        pair: column of the second text; None: ``text_pair`` if a file has it.
        label: column of the label.
        regression: whether labels are numbers to predict, not classes.
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    regression: bool = False


@dataclass(frozen=True)
class Recipe:
    """Settings of fine-tuning, the same for all methods.

    Attributes:
        epochs: number of passes over the training rows; may be a fraction.
        batch_size: number of rows of a batch on each device.
        lr: highest learning rate; None: the paper's 2e-5, with LoRA 1e-4.
        weight_decay: weight decay of AdamW.
        warmup: fraction of the steps during which the learning rate rises.
        scheduler: transformers' name of the learning rate's schedule, which passes of mode unlab
            follow only if the method says ``unlab_schedule=follow``.
        max_length: tokens that texts are cut to.
        lora: whether only adapters are trained (peft, r 8, alpha 16).
        bf16: whether to train under bf16 autocast.
        gradient_accumulation: number of batches of a step.
        gradient_checkpointing: whether activations are recomputed to save memory.
        torch_compile: whether the model is compiled.
    """

    epochs: float = 5.0
    batch_size: int = 16
    lr: float | None = None
    weight_decay: float = 0.0
    warmup: float = 0.1
    scheduler: str = "linear"
    max_length: int = 128
    lora: bool = False
    bf16: bool = False
    gradient_accumulation: int = 1
    gradient_checkpointing: bool = False
    torch_compile: bool = False

    @property
    def learning_rate(self) -> float:
        """`lr`, or the paper's learning rate if `lr` is None."""
        return self.lr if self.lr is not None else (1e-4 if self.lora else 2e-5)

    def __post_init__(self) -> None:
        counts = ("epochs", "batch_size", "max_length", "gradient_accumulation")
        check(self, "more than 0", lambda n: n > 0, *counts)
        check(self, "a number above 0", lambda x: 0 < x < float("inf"), "lr")
        check(self, "a number from 0 up", lambda x: 0 <= x < float("inf"), "weight_decay")
        check(self, "a share of the steps, below 1", lambda x: 0 <= x < 1, "warmup")
