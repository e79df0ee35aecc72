"""Model and batch of `jachess ntk`."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from .._io import DataError
from ..compare.models import load_config, load_head_model, load_model, load_tokenizer
from ..compare.tasks import open_text, read_records

_IGNORED = -100
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_MOST_CLASSES = 100_000  # a head of them is made where the model has none
# How an architecture's name ends, and what it is.
_ENDINGS = {
    "ForSequenceClassification": "classifier",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "seq2seq",
}


@dataclass(frozen=True)
class Sample:
    """A record: its text, perhaps a second one, perhaps a label (a class number or name)."""

    text: str
    pair: str | None
    label: int | str | None


def read_samples(options: Namespace, most: int | None = None) -> list[Sample]:
    """The samples of the file, so many of them at most.

    Raises:
        DataError: the file is missing, empty, of another format, or without the named columns.
    """
    name = options.file.name.lower()
    if name.endswith((".txt", ".txt.gz")):
        with open_text(options.file) as file:
            lines = (Sample(line.strip(), None, None) for line in file if line.strip())
            samples = list(islice(lines, most))
    else:
        samples = list(islice(_samples_of_records(options), most))
    if not samples:
        raise DataError(f"{options.file} is empty; expected at least one text")
    return samples


def _samples_of_records(options: Namespace) -> Iterator[Sample]:
    for number, record in enumerate(read_records(options.file), start=1):
        texts = [record.get(options.text_column)]
        if options.pair_column is not None:
            texts.append(record.get(options.pair_column))
        if not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{options.file}: record {number} has no text in column "
                f"{options.text_column!r}"
                + (f" or {options.pair_column!r}" if options.pair_column else "")
                + "; choose with --text-column and --pair-column"
            )
        label = record.get(options.label_column)
        known = isinstance(label, (int, str)) and not isinstance(label, bool)
        pair = texts[1] if len(texts) == 2 else None
        yield Sample(str(texts[0]), pair, label if known else None)


def class_numbers(samples: list[Sample]) -> list[int] | None:
    """Labels as class numbers, names in sorted order; None where a sample has none.

    Raises:
        DataError: a number that no class has.
    """
    labels = [sample.label for sample in samples]
    if any(label is None for label in labels):
        return None
    if all(isinstance(label, int) or _WHOLE.fullmatch(str(label)) for label in labels):
        numbers = [int(label) for label in labels if label is not None]
        bad = next((n for n in numbers if not 0 <= n < _MOST_CLASSES), None)
        if bad is not None:
            raise DataError(
                f"the label {bad} cannot be the number of a class; expected 0 to "
                f"{_MOST_CLASSES - 1}, or names"
            )
        return numbers
    order = {name: i for i, name in enumerate(sorted(set(map(str, labels))))}
    return [order[str(label)] for label in labels]


def load(options: Namespace, labels: list[int] | None) -> tuple[nn.Module, Any, str]:
    """(model in evaluation mode, tokenizer, what it is: a key of HEADS).

    Raises:
        DataError: it cannot be loaded, or is none of the kinds of HEADS.
    """
    tokenizer = load_tokenizer(options.model)
    config = load_config(options.model)
    names = getattr(config, "architectures", None) or ()
    heads = (h for name in names for ending, h in _ENDINGS.items() if name.endswith(ending))
    own = next(heads, None)
    head = options.head if options.head != "auto" else own or "classifier"
    if head == "classifier":
        keep = own == "classifier" and options.classes is None
        classes = config.num_labels if keep else options.classes or 1 + max([1, *(labels or ())])
        model = load_model(options.model, classes, tokenizer, options.seed)
    else:
        model = load_head_model(options.model, head, tokenizer, options.seed)
    dtype = getattr(torch, options.dtype)
    try:
        model = model.to(device=options.device, dtype=dtype)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"--device {options.device} cannot be used: {reason}") from error
    return model.eval(), tokenizer, head


def make_batch(
    samples: list[Sample], labels: list[int] | None, tokenizer: Any, head: str, options: Namespace
) -> dict[str, Tensor]:
    """What `jx.ntk` takes; of language models the labels are the tokens themselves."""
    texts: list[Any] = [[sample.text for sample in samples]]
    if options.pair_column is not None:
        texts.append([sample.pair for sample in samples])
    length = min(options.max_length, tokenizer.model_max_length)
    if hasattr(tokenizer, "padding_side"):
        tokenizer.padding_side = "right"
    encoded = tokenizer(
        *texts, padding=True, truncation=True, max_length=length, return_tensors="pt"
    )
    batch = {name: value.to(options.device) for name, value in encoded.items()}
    if head == "classifier":
        if labels is not None:
            batch["labels"] = torch.tensor(labels, device=options.device)
    else:
        real = batch["attention_mask"] != 0
        batch["labels"] = batch["input_ids"].masked_fill(~real, _IGNORED)
    return batch
