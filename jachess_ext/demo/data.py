"""The demo's own task, made from installed packages, and the encoder that comes with it."""

from __future__ import annotations

from pathlib import Path

from .._io import DataError
from ..compare.metrics import ACCURACY
from ..compare.tasks import Task
from .text import PACKAGES, load_text_task

ASSETS = Path(__file__).parent / "assets"
"""Folder of the encoder that `examples/pretrain_demo_encoder.py` made."""


def docstring_task(train_size: int, unlabelled_size: int, dev_size: int) -> Task:
    """The demo's own task (`text.load_text_task`), with further sentences as unlabelled text.

    Raises:
        DataError: a package is missing, or has too few sentences.
    """
    classes = len(PACKAGES)
    try:
        made = load_text_task(
            sum(_whole(size, classes) for size in (train_size, unlabelled_size)),
            _whole(dev_size, classes),
        )
    except ValueError as error:
        raise DataError(str(error)) from error
    return Task(
        name="docstrings",
        description=(
            "which package does a sentence of documentation come from "
            f"({', '.join(made.classes)}; names masked; no source file in both splits)"
        ),
        classes=made.classes,
        train=made.train.part(0, train_size),
        unlabelled=made.train.part(train_size, train_size + unlabelled_size),
        dev=made.dev,
        metric=ACCURACY,
    )


def _whole(size: int, classes: int) -> int:
    """`size` rounded up to a multiple of `classes`."""
    return -(-size // classes) * classes
