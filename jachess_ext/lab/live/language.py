"""Causal language models in a live selection: pieces of text, rows of tokens, bits per byte."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..._io import DataError
from ...models import drawn_modules, on_device_of, token_table
from ..workbench.metrics import Metric
from ..workbench.models import Batch, Encoded, Model, load_head_model
from ..workbench.tasks import Examples, Task, open_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BITS = "bpb"
"""Bits per byte of the dev text: unlike scores per token, comparable between tokenizers."""
SCORES = (BITS, "perplexity")
"""Names of the scores; the perplexity is per token."""
_ENDINGS = (".txt", ".txt.gz")
NO_LABEL = -100  # no target, in transformers and torch
_MIN_KEPT = 0.99  # fraction of characters that a tokenizer must reproduce
_SAMPLED_PIECES = 200  # number of pieces of text on which this is checked


def _no_metric(predictions: object, references: object) -> float:
    raise TypeError("a language model is judged by its loss")


@dataclass(frozen=True)
class TextTask(Task):
    """A task of text for causal language models; a row is a piece of text without a label.

    Examples:
        >>> task = text_task(["a piece", "another one"], ["a third"])
        >>> len(task.train), task.metric.name
        (2, 'perplexity')
    """

    @property
    def is_regression(self) -> bool:
        """False: only the next token is predicted."""
        return False


def text_task(train: Sequence[str], dev: Sequence[str], name: str = "text") -> TextTask:
    """Return the task of two lists of pieces of text; blank pieces are left out.

    Raises:
        DataError: a list has no text.
    """
    splits = []
    for split, pieces in (("training", train), ("dev", dev)):
        texts = [piece for piece in pieces if piece.strip()]
        if not texts:
            raise DataError(f"{name}: the {split} text is empty; expected pieces of text")
        splits.append(Examples(texts, None, [0] * len(texts)))
    rows, dev_rows = splits
    return TextTask(name, (), rows, rows.slice(0, 0), dev_rows, Metric("perplexity", _no_metric))


def is_text(spec: str) -> bool:
    """Return whether a task's spec names text files: train.txt:dev.txt, or a folder with these."""
    return _text_files(spec) is not None


def load_text(spec: str) -> TextTask:
    """Load train.txt:dev.txt (may be .gz), or a folder with these; a line is a piece of text.

    A prefix ``name=`` renames the task.

    Raises:
        DataError: a file cannot be read as UTF-8, or is empty.
    """
    files = _text_files(spec)
    assert files is not None  # checked by `is_text`
    pieces = []
    for path in files:
        with open_text(path) as lines:
            pieces.append([line.strip() for line in lines])
    name, equals, _ = spec.partition("=")
    return text_task(pieces[0], pieces[1], name if equals else files[0].name.partition(".")[0])


def _text_files(spec: str) -> tuple[Path, Path] | None:
    name, equals, path = spec.partition("=")
    train, colon, dev = (path if equals else name).partition(":")
    if colon:
        names = (train, dev)
        return (Path(train), Path(dev)) if all(n.endswith(_ENDINGS) for n in names) else None
    files = [
        next((p for e in _ENDINGS if (p := Path(train, stem + e)).is_file()), None)
        for stem in ("train", "dev")
    ]
    return None if files[0] is None or files[1] is None else (files[0], files[1])


# Models -----------------------------------------------------------------------------------------


def load_language_model(
    source: str, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Load a causal language model in fp32.

    Raises:
        DataError: the model cannot be loaded; its predictions depend on later tokens (an encoder);
            or its checkpoint lacks the head.
    """
    model = load_head_model(source, "causal", tokenizer, seed)
    model.eval()
    if not _is_causal(model):
        raise DataError(
            f"the model {source!r} is no causal language model: what {model.config.model_type} "
            "predicts depends on later tokens (an encoder); text files need models that predict "
            "the next token, such as GPT-2 or Llama"
        )
    if drawn := drawn_modules(model):
        raise DataError(
            f"the checkpoint {source!r} lacks the weights of {', '.join(drawn)}; "
            "expected a whole language model"
        )
    return model


@torch.no_grad()
def _is_causal(model: PreTrainedModel) -> bool:
    """Return whether logits do not depend on later tokens."""
    # Some encoders have a causal head class in transformers that by default attends to later
    # tokens, too; its loss would be near 0, and it would win every comparison.
    count = len(token_table(model).weight)
    rows = torch.arange(4).repeat(2, 1) % count
    rows[1, -1] = (rows[1, -1] + 1) % count
    logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
    original, changed = logits[:, :-1].double()
    return bool((original - changed).abs().max() <= 1e-5 * original.abs().max())


def check_lossless(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Check that decoding a tokenizer's tokens reproduces the text, which bits per byte assume.

    White space is ignored.

    Args:
        source: name of the model, for the message.

    Raises:
        DataError: more than 1 % of the characters are lost (unknown words, capitals).
    """
    pieces = list(texts[:_SAMPLED_PIECES])
    rows = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
    characters = Counter("".join("".join(pieces).split()))
    decoded = tokenizer.batch_decode(
        rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    lost_counts = characters - Counter("".join("".join(decoded).split()))
    loss = lost_counts.total() / max(1, characters.total())
    if loss > 1 - _MIN_KEPT:
        raise DataError(
            f"the tokenizer of {source!r} loses {100 * loss:.2g} % of the characters (such as "
            f"{lost_counts.most_common(1)[0][0]!r}), so that its bits per byte cannot be compared; "
            "expected one that gives the text back, such as byte-level BPE"
        )


# Windows of tokens ------------------------------------------------------------------------------


class Windows(Encoded):
    """Rows of tokens, in which each token except the first is predicted from the preceding tokens;
    padding is not predicted."""

    def __getitem__(self, index: int) -> dict[str, object]:
        """Return a row's tokens."""
        return dict(self.rows[index])

    def collate(self, items: Sequence[Mapping[str, object]]) -> Batch:
        """Return a batch of items; the labels [B, T] are the ids, which transformers shifts."""
        batch = super().collate(items)
        is_padding = batch["attention_mask"] == 0
        batch["labels"] = batch["input_ids"].masked_fill(is_padding, NO_LABEL)
        return batch

    def by_length(self) -> Windows:
        """Return the same rows sorted by length."""
        return Windows(super().by_length().rows, self.labels, self.tokenizer)


def windows(
    examples: Examples, tokenizer: PreTrainedTokenizerBase, length: int, *, predicts_end: bool
) -> Windows:
    """Return the tokens of each piece of text in rows of at most `length` tokens, so that each
    token is predicted once.

    The first row of a piece begins with the token that begins texts (bos, else eos, cls or pad),
    any other row with the last token of the row before it.

    Args:
        predicts_end: whether the token that ends texts (eos), if there is one, is predicted after
            each piece.
    """
    special_tokens = ("bos", "eos", "cls", "pad")
    ids = [getattr(tokenizer, f"{name}_token_id") for name in special_tokens]
    start = next(token for token in ids if token is not None)
    ending = [tokenizer.eos_token_id] if predicts_end and tokenizer.eos_token_id is not None else []
    rows: list[dict[str, list[int]]] = []
    if len(examples):
        token_ids = tokenizer(examples.texts, add_special_tokens=False, verbose=False)["input_ids"]
        for piece in token_ids:
            tokens = [start, *piece, *ending]
            # Rows overlap by one token, the context of the next row's first prediction.
            for start_index in range(0, len(tokens) - 1, length - 1):
                row = tokens[start_index : start_index + length]
                rows.append({"input_ids": row, "attention_mask": [1] * len(row)})
    return Windows(rows, [0.0] * len(rows), tokenizer)


def row_length(model: Model, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
    """Return the largest number of tokens in a row that the recipe (`max_length`), the tokenizer
    and the model allow."""
    positions = getattr(model.config, "max_position_embeddings", None) or math.inf
    return int(min(max_length, tokenizer.model_max_length, positions))


# Judging ----------------------------------------------------------------------------------------


@torch.no_grad()
def judge_text(
    model: Model, examples: Examples, rows: Windows, batch_size: int
) -> tuple[float, dict[str, float]]:
    """Return a model's loss on pieces of text, in nats per token, and its `SCORES` by name.

    Args:
        examples: the pieces of text.
        rows: the `windows` of the pieces, made with ``predicts_end=False``.
        batch_size: number of rows in a batch.

    Raises:
        FloatingPointError: an output is not finite.
    """
    nats, count = 0.0, 0
    for batch in rows.by_length().in_order(batch_size):
        inputs = on_device_of(model, batch)
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=NO_LABEL, reduction="none"
        )
        nats += float(losses.double().sum())
        count += int((labels != NO_LABEL).sum())
    if not math.isfinite(nats):
        raise FloatingPointError(
            "the model's outputs are not finite: training diverged; lower the learning rate"
        )
    # Bits per byte = Σ nats / ln 2 / bytes of the text.  The sum is over all tokens of the text, so
    # that tokenizers with few long tokens and with many short ones can be compared.
    num_bytes = sum(len(text.encode()) for text in examples.texts)
    loss = nats / count
    scores = (nats / math.log(2) / num_bytes, float(np.exp(min(loss, 700.0))))
    return loss, dict(zip(SCORES, scores, strict=True))
