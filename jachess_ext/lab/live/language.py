"""Causal language models in a live selection: pieces of text, windows of tokens, bits per byte."""

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
"""Bits per byte of the dev text: comparable over tokenizers, as no figure per token is."""
SCORES = (BITS, "perplexity")
"""The perplexity is a token's."""
_ENDINGS = (".txt", ".txt.gz")
NO_LABEL = -100  # no target, in transformers and torch
_MIN_KEPT = 0.99  # fraction of characters that a tokenizer must reproduce
_SAMPLED_PIECES = 200  # of text that it is tried on


def _no_metric(predictions: object, references: object) -> float:
    raise TypeError("a language model is judged by its loss")


@dataclass(frozen=True)
class TextTask(Task):
    """Text to train and judge causal language models on; a row is a piece of text without label.

    Examples:
        >>> task = text_task(["a piece", "another one"], ["a third"])
        >>> len(task.train), task.metric.name
        (2, 'perplexity')
    """

    @property
    def regression(self) -> bool:
        """False: there is nothing to predict beside the next token."""
        return False


def text_task(train: Sequence[str], dev: Sequence[str], name: str = "text") -> TextTask:
    """Return the task of two lists of pieces of text; pieces of white space are left out.

    Raises:
        DataError: a list without text.
    """
    parts = []
    for what, pieces in (("training", train), ("dev", dev)):
        texts = [piece for piece in pieces if piece.strip()]
        if not texts:
            raise DataError(f"{name}: the {what} text is empty; expected pieces of text")
        parts.append(Examples(texts, None, [0] * len(texts)))
    rows, dev_rows = parts
    return TextTask(name, (), rows, rows.slice(0, 0), dev_rows, Metric("perplexity", _no_metric))


def is_text(spec: str) -> bool:
    """Tell whether a task's spec names text files: train.txt:dev.txt, or a folder of these."""
    return _text_files(spec) is not None


def load_text(spec: str) -> TextTask:
    """Load train.txt:dev.txt (perhaps .gz), or a folder with these; a line is a piece of text.

    ``name=`` before either gives the task another name.

    Raises:
        DataError: a file that cannot be read as UTF-8, or that is empty.
    """
    files = _text_files(spec)
    assert files is not None  # `is_text` told
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
        DataError: it cannot be loaded; what it predicts depends on later tokens (an encoder); or
            its checkpoint lacks the head.
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
    # Some encoders have a causal head class in transformers that sees both ways unless told not to;
    # its loss would be near 0, and it would win every comparison.
    count = len(token_table(model).weight)
    rows = torch.arange(4).repeat(2, 1) % count
    rows[1, -1] = (rows[1, -1] + 1) % count
    logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
    first, second = logits[:, :-1].double()
    return bool((first - second).abs().max() <= 1e-5 * first.abs().max())


def check_lossless(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Check that decoding a tokenizer's tokens gives the text, as bits per byte assume.

    White space does not count.

    Raises:
        DataError: more than one character in a hundred is lost (unknown words, capitals).
    """
    pieces = list(texts[:_SAMPLED_PIECES])
    rows = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
    characters = Counter("".join("".join(pieces).split()))
    back = tokenizer.batch_decode(
        rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    lost = characters - Counter("".join("".join(back).split()))
    share = lost.total() / max(1, characters.total())
    if share > 1 - _MIN_KEPT:
        raise DataError(
            f"the tokenizer of {source!r} loses {100 * share:.2g} % of the characters (such as "
            f"{lost.most_common(1)[0][0]!r}), so that its bits per byte cannot be compared; "
            "expected one that gives the text back, such as byte-level BPE"
        )


# Windows of tokens ------------------------------------------------------------------------------


class Windows(Encoded):
    """Rows of tokens, each but the first predicted from those before it; padding is not."""

    def __getitem__(self, index: int) -> dict[str, object]:
        """Return a row's tokens."""
        return dict(self.rows[index])

    def collate(self, items: Sequence[Mapping[str, object]]) -> Batch:
        """Return a batch of items, with labels [B, T] that transformers shifts itself."""
        batch = super().collate(items)
        hidden = batch["attention_mask"] == 0
        batch["labels"] = batch["input_ids"].masked_fill(hidden, NO_LABEL)
        return batch

    def by_length(self) -> Windows:
        """Return the same rows, shortest first."""
        return Windows(super().by_length().rows, self.labels, self.tokenizer)


def windows(
    examples: Examples, tokenizer: PreTrainedTokenizerBase, length: int, *, end: bool
) -> Windows:
    """Return each piece's tokens in rows of `length` at most, each token predicted once.

    A row begins with the last token of the row before it, the first of a piece with a token that
    begins texts (bos, else eos, cls or pad).

    Args:
        end: whether the token that ends texts, if there is one, is predicted after each piece.
    """
    names = ("bos", "eos", "cls", "pad")
    ids = [getattr(tokenizer, f"{name}_token_id") for name in names]
    start = next(token for token in ids if token is not None)
    after = [tokenizer.eos_token_id] if end and tokenizer.eos_token_id is not None else []
    rows: list[dict[str, list[int]]] = []
    if len(examples):
        token_ids = tokenizer(examples.texts, add_special_tokens=False, verbose=False)["input_ids"]
        for piece in token_ids:
            tokens = [start, *piece, *after]
            # rows overlap by one token: it is the context of the next row's first prediction
            for place in range(0, len(tokens) - 1, length - 1):
                row = tokens[place : place + length]
                rows.append({"input_ids": row, "attention_mask": [1] * len(row)})
    return Windows(rows, [0.0] * len(rows), tokenizer)


def row_length(model: Model, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
    """Return the largest number of tokens in a row that recipe, tokenizer and model allow."""
    positions = getattr(model.config, "max_position_embeddings", None) or math.inf
    return int(min(max_length, tokenizer.model_max_length, positions))


# Judging ----------------------------------------------------------------------------------------


@torch.no_grad()
def judge_text(
    model: Model, examples: Examples, data: Windows, batch_size: int
) -> tuple[float, dict[str, float]]:
    """Return the loss of pieces of text, nats a token, and their `SCORES`.

    Args:
        examples: the pieces.
        data: their `windows`, without ends.
        batch_size: rows at a time.

    Raises:
        FloatingPointError: an output that is not finite.
    """
    nats, count = 0.0, 0
    for batch in data.by_length().in_order(batch_size):
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
    # bits per byte = Σ nats / ln 2 / bytes of the text.  The sum is over all tokens whatever they
    # are, so that a tokenizer with few long tokens and one with many short ones can be compared.
    size = sum(len(text.encode()) for text in examples.texts)
    loss = nats / count
    scores = (nats / math.log(2) / size, float(np.exp(min(loss, 700.0))))
    return loss, dict(zip(SCORES, scores, strict=True))
