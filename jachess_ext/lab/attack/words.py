"""A greedy attack that replaces words one by one, the most promising by the gradient first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...models import (
    gradient_of_tokens,
    in_mode,
    leaf_embeddings,
    on_device_of,
    token_table,
    unwrapped,
)
from .candidates import WORD, Candidates, token_ids

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

    from ..workbench.models import Model

Row = tuple[str, ...]


@dataclass(frozen=True)
class Attacked:
    """Result of an attack on N rows.

    Attributes:
        rows: the texts after the attack; the original texts if it did not change the prediction.
        correct_before: whether the prediction was correct before the attack, [N].
        correct_after: whether the prediction is correct after the attack, [N].
        tried: whether the model was run on a replacement, [N]: the row was predicted correctly, and
            at least one of its words may be replaced and has a candidate.
        changed: number of replaced words in rows whose prediction changed, otherwise 0, [N].
        words: number of words of each row, [N].
        queries: number of texts that the model was run on for each row, [N], including those for
            gradients, but not the first pass over all rows.

    Examples:
        >>> one, no = np.array([1]), np.array([False])
        >>> done = Attacked([("a fine film",)], ~no, no, ~no, one, 3 * one, 5 * one)
        >>> done.figures["accuracy"], done.figures["attacked"], done.figures["queries"]
        (1.0, 0.0, 5.0)
    """

    rows: list[Row]
    correct_before: npt.NDArray[np.bool_]
    correct_after: npt.NDArray[np.bool_]
    tried: npt.NDArray[np.bool_]
    changed: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]
    queries: npt.NDArray[np.int64]

    @property
    def figures(self) -> dict[str, float | None]:
        """Figures of the attack by name.

        ``accuracy``: accuracy on all rows before the attack; ``attacked``: accuracy after it;
        ``rows``: number of rows tried; ``changed`` and ``share``: number of replaced words and
        their fraction of the row's words, averaged over the rows whose prediction changed;
        ``queries``: mean number of queries of the rows tried.
        """
        won = self.correct_before & ~self.correct_after
        return {
            "accuracy": float(self.correct_before.mean()),
            "attacked": float(self.correct_after.mean()),
            "rows": float(self.tried.sum()),
            "changed": float(self.changed[won].mean()) if won.any() else None,
            "share": float((self.changed / self.words.clip(1))[won].mean()) if won.any() else None,
            "queries": float(self.queries[self.tried].mean()) if self.tried.any() else None,
        }


def attack_words(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    labels: Sequence[int],
    candidates: Candidates,
    *,
    share: float = 0.2,
    tries: int = 8,
    max_length: int = 128,
    batch: int = 64,
) -> Attacked:
    """Replace words of correctly classified rows until the classifier's prediction is wrong.

    In each step the gradient g of the row's loss with respect to its embeddings estimates the
    effect of every candidate: (mean embedding of its tokens − mean embedding of the word's tokens)
    · Σ g over the word's tokens.  The model is run on the texts with the `tries` best candidates,
    and the text with the highest loss is kept, until the prediction changes, no try raises the
    loss, or the share of words is used up.  A word is replaced at most once, and its candidate gets
    its case (Good, GOOD).  Nothing is drawn at random.

    Args:
        model: a sequence classifier of transformers.
        tokenizer: the model's fast tokenizer.
        rows: text, or both texts, of each row; words are runs of letters.
        labels: index of the class of each row.
        candidates: `read_synonyms` or `NearestRows`.
        share: largest fraction of a row's words to change; rows in which that is less than one word
            are not attacked.
        tries: number of texts that the model is run on in each step of a row.
        max_length: number of tokens that texts are cut to; words beyond are not replaced.
        batch: number of texts in a batch.

    Raises:
        ValueError: there is not one label for each row, a row is a string, the model does not
            predict one class per row, a setting is out of range, or the tokenizer has no positions
            of tokens (is not a fast one).
        TypeError, RuntimeError: a label is not the index of a class.
        FloatingPointError: the model's outputs are not finite.

    Examples:
        >>> from jachess_ext.lab.attack import Synonyms
        >>> from jachess_ext.lab.workbench.models import load_model, load_tokenizer
        >>> from jachess_ext.lab.demo import ASSETS
        >>> tokenizer = load_tokenizer(ASSETS)
        >>> model = load_model(ASSETS, 2, tokenizer, seed=0)
        >>> words = Synonyms({"good": ["fine", "great"], "bad": ["poor", "awful"]})
        >>> rows = [("a good film of some length",), ("a bad film of some length",)]
        >>> attacked = attack_words(model, tokenizer, rows, [1, 0], words)
        >>> bool((attacked.correct_after <= attacked.correct_before).all())
        True
    """
    if any(isinstance(row, str) for row in rows):
        raise ValueError("a row is a string; expected a tuple of its texts: (text,)")
    kind = getattr(getattr(unwrapped(model), "config", None), "problem_type", None)
    if kind in ("regression", "multi_label_classification"):
        raise ValueError(
            f"the model's problem_type is {kind}; an attack needs a classifier with one class a row"
        )
    # Without a try or a word every row would count as one that withstood the attack.
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; expected a share of the words above 0, up to 1")
    if tries < 1:
        raise ValueError(f"tries is {tries}; expected a number from 1 up")
    classifier = _Classifier(model, tokenizer, candidates, max_length, batch)
    attempts = [_Attempt(row, index(label), share) for row, label in zip(rows, labels, strict=True)]
    with in_mode(model, training=False):
        losses, correct = classifier.judge([a.texts for a in attempts], [a.label for a in attempts])
        for attempt, loss, is_correct in zip(attempts, losses, correct, strict=True):
            attempt.loss, attempt.is_active = loss, is_correct and attempt.budget > 0
        while active_attempts := [attempt for attempt in attempts if attempt.is_active]:
            for start in range(0, len(active_attempts), batch):
                classifier.step(active_attempts[start : start + batch], tries)
    succeeded = [attempt.has_succeeded for attempt in attempts]
    return Attacked(
        rows=[a.texts if a.has_succeeded else row for a, row in zip(attempts, rows, strict=True)],
        correct_before=np.array(correct),
        correct_after=np.array(correct) & ~np.array(succeeded),
        tried=np.array([a.was_tried for a in attempts]),
        changed=np.array([len(a.replaced) if a.has_succeeded else 0 for a in attempts]),
        words=np.array([len(a.words) for a in attempts]),
        queries=np.array([a.queries for a in attempts]),
    )


class _Word(NamedTuple):
    """A word of a row.

    Attributes:
        text: index of its text in the row.
        piece: index of the word among the pieces of that text.
    """

    text: int
    piece: int


class _Attempt:
    """A row under attack.

    Attributes:
        words: the words of all texts.
        budget: number of words that may still be replaced.
        replaced: the words replaced so far.
        loss: the loss of the present texts.
        queries: number of texts that the model was run on.
        is_active: whether the attack goes on.
        was_tried: whether the model was run on any replacement.
        has_succeeded: whether the prediction has changed.
    """

    def __init__(self, row: Row, label: int, share: float) -> None:
        # Words and the text between them alternate: words have odd indices.
        self._pieces = [_split_words(text) for text in row]
        self.words = [
            _Word(text, piece)
            for text, pieces in enumerate(self._pieces)
            for piece in range(1, len(pieces), 2)
        ]
        self.label = label
        # + 1e-9, since a product such as 0.2 · 5 may be a rounding error below a whole number.
        self.budget = math.floor(share * len(self.words) + 1e-9)
        self.replaced: set[_Word] = set()
        self.loss, self.queries = 0.0, 0
        self.is_active = self.was_tried = self.has_succeeded = False

    @property
    def texts(self) -> Row:
        return tuple("".join(pieces) for pieces in self._pieces)

    @property
    def replaceable(self) -> Iterator[tuple[_Word, str, int]]:
        """Words that may be replaced, with their spelling and the position of their first character
        in their text."""
        for word in self.words:
            if word not in self.replaced:
                pieces = self._pieces[word.text]
                yield word, pieces[word.piece], sum(map(len, pieces[: word.piece]))

    def with_word(self, word: _Word, candidate: str) -> Row:
        """Return the texts with a candidate in place of a word."""
        pieces = list(self._pieces[word.text])
        pieces[word.piece] = candidate
        texts = list(self.texts)
        texts[word.text] = "".join(pieces)
        return tuple(texts)

    def replace(self, word: _Word, candidate: str) -> None:
        self._pieces[word.text][word.piece] = candidate
        self.replaced.add(word)
        self.budget -= 1


def _split_words(text: str) -> list[str]:
    pieces, end = [], 0
    for match in WORD.finditer(text):
        pieces += [text[end : match.start()], match.group()]
        end = match.end()
    return [*pieces, text[end:]]


def _match_case(word: str, candidate: str) -> str:
    """Return a lower-case candidate in the case of a word: GOOD, Good or good."""
    if len(word) > 1 and word.isupper():
        return candidate.upper()
    return candidate[:1].upper() + candidate[1:] if word[:1].isupper() else candidate


class _Classifier:
    """Losses, predictions and gradients of a model on texts, and steps of the attack."""

    def __init__(
        self,
        model: Model,
        tokenizer: PreTrainedTokenizerBase,
        candidates: Candidates,
        max_length: int,
        batch: int,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.candidates, self.batch = candidates, batch
        self.max_length = min(max_length, tokenizer.model_max_length)
        self.embed = token_table(model)
        self.device = next(model.parameters()).device
        self._means: dict[str, Tensor] = {}

    def encode(self, texts: Sequence[Row]) -> BatchEncoding:
        """Return a batch padded on the right, since encoders' heads use the first token."""
        return self.tokenizer(
            *map(list, zip(*texts, strict=True)),
            truncation=True,
            max_length=self.max_length,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )

    def losses(self, batch: Mapping[str, Tensor], labels: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of each row, float64 [B], and whether its prediction is
        correct."""
        logits = self.model(**on_device_of(self.model, batch)).logits.double()
        if logits.ndim != 2 or logits.shape[1] == 1:
            raise ValueError(
                f"the logits have shape {list(logits.shape)}; an attack needs [B, C], those of a "
                "classifier of whole rows with two classes or more"
            )
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the model's outputs are not finite under attack")
        targets = torch.tensor(labels, device=logits.device)
        # cross_entropy would ignore a label of -100 instead of raising an error.
        losses = -logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
        return losses, logits.argmax(-1) == targets

    @torch.no_grad()
    def judge(self, texts: Sequence[Row], labels: Sequence[int]) -> tuple[list[float], list[bool]]:
        """Return the loss of each row and whether its prediction is correct."""
        losses, correct = [0.0] * len(texts), [False] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: sum(map(len, texts[i])))
        for start in range(0, len(order), self.batch):
            some = order[start : start + self.batch]
            results = self.losses(self.encode([texts[i] for i in some]), [labels[i] for i in some])
            for i, loss, is_correct in zip(some, *(x.tolist() for x in results), strict=True):
                losses[i], correct[i] = loss, is_correct
        return losses, correct

    def step(self, attempts: Sequence[_Attempt], tries: int) -> None:
        """Replace one word of each row, or end the row's attack."""
        swaps = list(self._swaps(attempts, tries))
        pairs = [(a, swap) for a, best in zip(attempts, swaps, strict=True) for swap in best]
        texts = [attempt.with_word(*swap) for attempt, swap in pairs]
        outcomes = zip(*self.judge(texts, [a.label for a, _ in pairs]), strict=True)
        for attempt, best in zip(attempts, swaps, strict=True):
            attempt.queries += 1 + len(best)
            attempt.was_tried |= bool(best)
            # The highest loss, of the swaps that change the prediction if there are any.
            tried = [(not is_correct, loss) for loss, is_correct in islice(outcomes, len(best))]
            has_succeeded, loss = max(tried, default=(False, -math.inf))
            attempt.is_active = has_succeeded or loss > attempt.loss
            if attempt.is_active:
                attempt.replace(*best[tried.index((has_succeeded, loss))])
                attempt.loss, attempt.has_succeeded = loss, has_succeeded
                attempt.is_active = not has_succeeded and attempt.budget > 0

    def _swaps(self, attempts: Sequence[_Attempt], tries: int) -> Iterator[list[tuple[_Word, str]]]:
        """Yield for each row the `tries` swaps (word, candidate) that, by the gradient, raise the
        loss most, best first."""
        # To first order a swap changes the loss by (e(new) − e(old)) · Σ g: one backward pass ranks
        # all candidates of all words, and the model is run only on the best few.  For words of
        # several tokens, e is the mean of their embeddings, and g is summed over the tokens.
        batch = self.encode([attempt.texts for attempt in attempts])
        gradient = self._gradient(batch, [attempt.label for attempt in attempts])
        for row, attempt in enumerate(attempts):
            swaps, gains = [], []
            for word, text, start in attempt.replaceable:
                options = [c for c in self.candidates(text) if c != text.lower()]
                tokens = _tokens(batch, row, word.text, start, start + len(text)) if options else []
                if not tokens:
                    continue
                embedding = self._mean_embedding(batch["input_ids"][row, tokens])
                slope = gradient[row, tokens].sum(0)
                options = [_match_case(text, option) for option in options]
                gains += [((self._embedding(o) - embedding) @ slope).item() for o in options]
                swaps += [(word, option) for option in options]
            order = sorted(range(len(swaps)), key=lambda i: -gains[i])  # stable for equal gains
            yield [swaps[i] for i in order[:tries]]

    def _gradient(self, batch: BatchEncoding, labels: Sequence[int]) -> Tensor:
        """Return the gradient of each row's loss with respect to its embeddings, [B, T, d]."""
        inputs = on_device_of(self.model, batch)
        with torch.enable_grad(), leaf_embeddings(self.model, inputs) as (inputs, leaves):
            losses, _ = self.losses(inputs, labels)
        return gradient_of_tokens(losses.sum(), leaves)

    @torch.no_grad()
    def _mean_embedding(self, ids: Tensor) -> Tensor:
        return self.embed(ids.to(self.device).reshape(1, -1))[0].mean(0)

    def _embedding(self, word: str) -> Tensor:
        if word not in self._means:
            (ids,) = token_ids(self.tokenizer, [word])
            self._means[word] = self._mean_embedding(torch.tensor(ids))
        return self._means[word]


def _tokens(batch: BatchEncoding, row: int, text: int, start: int, end: int) -> list[int]:
    """Return the positions of the tokens of characters ``start`` to ``end`` of a row's text; [] if
    they were cut off."""
    ends = [batch.char_to_token(row, at, sequence_index=text) for at in (start, end - 1)]
    return [] if None in ends else list(range(ends[0], ends[1] + 1))
