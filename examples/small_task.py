"""What the short examples train on: the demo's encoder and sentences, no network needed."""

from __future__ import annotations

import argparse
from typing import Any

from jachess_ext.lab.demo import ASSETS, docstring_task
from jachess_ext.lab.workbench.models import Encoded, encode, load_model, load_tokenizer


def parse(summary: str | None) -> argparse.Namespace:
    """``--tiny``, and the strength of the penalty."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--tiny", action="store_true", help="a few steps: does it run?")
    parser.add_argument("--strength", type=float, default=0.01)
    return parser.parse_args()


def load(tiny: bool, seed: int = 0) -> tuple[Any, Encoded, Encoded, Encoded]:
    """(model, labelled rows, unlabelled rows, dev rows): which package is a sentence from?"""
    size = 48 if tiny else 600
    task = docstring_task(2 * size, 48 if tiny else 480)
    tokenizer = load_tokenizer(ASSETS)
    model = load_model(ASSETS, task.outputs, tokenizer, seed)
    parts = task.train.slice(0, size), task.train.slice(size, 2 * size), task.dev
    train, unlabelled, dev = (encode(part, tokenizer, 48) for part in parts)
    return model, train, unlabelled, dev


def accuracy(model: Any, data: Encoded) -> float:
    """Share of the rows whose class the model predicts."""
    from jachess_ext.lab.workbench.training import model_outputs

    found = model_outputs(model, data.in_order(32), is_regression=False).argmax(1)
    return float((found == data.labels).mean())
