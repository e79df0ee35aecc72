"""A greedy attack: words are replaced one by one, the most promising by the gradient first."""

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
        rows: the texts at the end; as they were where the attack did not change the answer.
        clean: whether the answer was right before, [N].
        right: whether it is right after, [N].
        tried: whether the row was attacked, [N]: it was right, and may and can be changed.
        changed: words changed in rows whose answer the attack changed, else 0, [N].
        words: words of each row, [N].
        queries: texts that the model was asked about, one by one, [N]; the gradient's are counted,
            the first pass over all rows is not.

    Examples:
        >>> one, no = np.array([1]), np.array([False])
        >>> done = Attacked([("a fine film",)], ~no, no, ~no, one, 3 * one, 5 * one)
        >>> done.figures["accuracy"], done.figures["attacked"], done.figures["queries"]
        (1.0, 0.0, 5.0)
    """

    rows: list[Row]
    clean: npt.NDArray[np.bool_]
    right: npt.NDArray[np.bool_]
    tried: npt.NDArray[np.bool_]
    changed: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]
    queries: npt.NDArray[np.int64]

    @property
    def figures(self) -> dict[str, float | None]:
        """The attack in figures.

        ``accuracy`` before and ``attacked`` after it, of all rows; ``rows`` attacked; words
        ``changed`` and their ``share`` of the row's, means over the rows whose answer changed;
        ``queries``, mean over the rows attacked.
        """
        won = self.clean & ~self.right
        return {
            "accuracy": float(self.clean.mean()),
            "attacked": float(self.right.mean()),
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
    """Replace words of the rows that a classifier has right until its answer is wrong.

    In each step the gradient of the row's loss by its embeddings g estimates what every candidate
    does: (mean embedding of its tokens − that of the word's) · Σ g over the word's tokens.  The
    texts with the `tries` best are put to the model, and the one with the highest loss is kept,
    until the answer changes, no try raises the loss, or the share of words is used up.  A word is
    replaced at most once, and written as the word was (Good, GOOD).  Nothing is drawn at random.

    Args:
        model: a sequence classifier of transformers.
        tokenizer: its fast tokenizer.
        rows: text, or both texts, of each row; words are runs of letters.
        labels: index of the class of each row.
        candidates: `read_synonyms` or `NearestRows`.
        share: the most words that may change, as a share of the row's words; rows in which that is
            less than one word are left as they are.
        tries: texts that the model is asked about in each step.
        max_length: tokens that texts are cut to; words cut off are not replaced.
        batch: texts at a time.

    Raises:
        ValueError: not a label for each row, a row that is a string, a model that does not choose
            one class a row, settings out of range, or a tokenizer that cannot say where tokens
            stand.
        TypeError, RuntimeError: a label that is no index of a class.
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
        >>> bool((attacked.right <= attacked.clean).all())
        True
    """
    if any(isinstance(row, str) for row in rows):
        raise ValueError("a row is a string; expected a tuple of its texts: (text,)")
    kind = getattr(getattr(unwrapped(model), "config", None), "problem_type", None)
    if kind in ("regression", "multi_label_classification"):
        raise ValueError(
            f"the model's problem_type is {kind}; an attack needs a classifier with one class a row"
        )
    # without a try or a word every row would count as one that withstood the attack
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; expected a share of the words above 0, up to 1")
    if tries < 1:
        raise ValueError(f"tries is {tries}; expected a number from 1 up")
    reader = _Reader(model, tokenizer, candidates, max_length, batch)
    attempts = [_Attempt(row, index(label), share) for row, label in zip(rows, labels, strict=True)]
    with in_mode(model, training=False):
        losses, right = reader.judge([a.texts for a in attempts], [a.label for a in attempts])
        for attempt, loss, clean in zip(attempts, losses, right, strict=True):
            attempt.loss, attempt.clean, attempt.active = loss, clean, clean and attempt.budget > 0
        while going := [attempt for attempt in attempts if attempt.active]:
            for start in range(0, len(going), batch):
                reader.step(going[start : start + batch], tries)
    lost = [attempt.succeeded for attempt in attempts]
    return Attacked(
        rows=[a.texts if a.succeeded else row for a, row in zip(attempts, rows, strict=True)],
        clean=np.array(right),
        right=np.array(right) & ~np.array(lost),
        tried=np.array([a.tried for a in attempts]),
        changed=np.array([len(a.replaced) if a.succeeded else 0 for a in attempts]),
        words=np.array([len(a.words) for a in attempts]),
        queries=np.array([a.queries for a in attempts]),
    )


class _Word(NamedTuple):
    """A word of a row: the text it stands in, and its place among that text's pieces."""

    text: int
    piece: int


class _Attempt:
    """A row under attack.

    Attributes:
        words: of all its texts.
        left: words that may still be replaced.
        replaced: words replaced so far.
    """

    def __init__(self, row: Row, label: int, share: float) -> None:
        # words and what stands between them, in turn: words have odd places
        self._pieces = [_split_words(text) for text in row]
        self.words = [
            _Word(text, piece)
            for text, pieces in enumerate(self._pieces)
            for piece in range(1, len(pieces), 2)
        ]
        self.label = label
        # 0.2 · 5 is 1, and must not come out a rounding error below it
        self.budget = math.floor(share * len(self.words) + 1e-9)
        self.replaced: set[_Word] = set()
        self.loss, self.queries = 0.0, 0
        self.clean = self.active = self.tried = self.succeeded = False

    @property
    def texts(self) -> Row:
        return tuple("".join(pieces) for pieces in self._pieces)

    @property
    def replaceable(self) -> Iterator[tuple[_Word, str, int]]:
        """Words that may be replaced, with their spelling and first character in their text."""
        for word in self.words:
            if word not in self.replaced:
                pieces = self._pieces[word.text]
                yield word, pieces[word.piece], sum(map(len, pieces[: word.piece]))

    def with_word(self, word: _Word, other: str) -> Row:
        """Return the texts with another word."""
        pieces = list(self._pieces[word.text])
        pieces[word.piece] = other
        texts = list(self.texts)
        texts[word.text] = "".join(pieces)
        return tuple(texts)

    def replace(self, word: _Word, other: str) -> None:
        self._pieces[word.text][word.piece] = other
        self.replaced.add(word)
        self.budget -= 1


def _split_words(text: str) -> list[str]:
    pieces, end = [], 0
    for match in WORD.finditer(text):
        pieces += [text[end : match.start()], match.group()]
        end = match.end()
    return [*pieces, text[end:]]


def _match_case(word: str, other: str) -> str:
    """Write a word as another was written: GOOD, Good or good."""
    if len(word) > 1 and word.isupper():
        return other.upper()
    return other[:1].upper() + other[1:] if word[:1].isupper() else other


class _Reader:
    """Losses, answers and gradients of a model on texts."""

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
        """Return a batch padded on the right: encoders' heads read the first token."""
        return self.tokenizer(
            *map(list, zip(*texts, strict=True)),
            truncation=True,
            max_length=self.max_length,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )

    def losses(self, batch: Mapping[str, Tensor], labels: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of each row, float64 [B], and whether its answer is right."""
        logits = self.model(**on_device_of(self.model, batch)).logits.double()
        if logits.ndim != 2 or logits.shape[1] == 1:
            raise ValueError(
                f"the logits have shape {list(logits.shape)}; an attack needs [B, C], those of a "
                "classifier of whole rows with two classes or more"
            )
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the model's outputs are not finite under attack")
        targets = torch.tensor(labels, device=logits.device)
        # cross_entropy would leave a label of -100 out, in place of an error
        losses = -logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
        return losses, logits.argmax(-1) == targets

    @torch.no_grad()
    def judge(self, texts: Sequence[Row], labels: Sequence[int]) -> tuple[list[float], list[bool]]:
        """Return the loss of each row and whether its answer is right."""
        losses, right = [0.0] * len(texts), [False] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: sum(map(len, texts[i])))
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            some = self.losses(self.encode([texts[i] for i in chosen]), [labels[i] for i in chosen])
            for i, loss, good in zip(chosen, *(values.tolist() for values in some), strict=True):
                losses[i], right[i] = loss, good
        return losses, right

    def step(self, attempts: Sequence[_Attempt], tries: int) -> None:
        """Replace a word of each row, or end its attack."""
        swaps = list(self._swaps(attempts, tries))
        pairs = [(a, swap) for a, best in zip(attempts, swaps, strict=True) for swap in best]
        texts = [attempt.with_word(*swap) for attempt, swap in pairs]
        outcomes = zip(*self.judge(texts, [a.label for a, _ in pairs]), strict=True)
        for attempt, best in zip(attempts, swaps, strict=True):
            attempt.queries += 1 + len(best)
            attempt.tried |= bool(best)
            # the first of those that change the answer, else of all, with the highest loss
            tried = [(not right, loss) for loss, right in islice(outcomes, len(best))]
            won, loss = max(tried, default=(False, -math.inf))
            attempt.active = won or loss > attempt.loss
            if attempt.active:
                attempt.replace(*best[tried.index((won, loss))])
                attempt.loss, attempt.succeeded = loss, won
                attempt.active = not won and attempt.budget > 0

    def _swaps(self, attempts: Sequence[_Attempt], tries: int) -> Iterator[list[tuple[_Word, str]]]:
        """Yield the swaps of each row that raise the loss most by the gradient, best first."""
        # To first order a swap changes the loss by (e(new) − e(old)) · Σ g: one backward pass ranks
        # all candidates of all words, and only the best few are asked about.  Words may have
        # several tokens; the mean stands for the word, and the sum of g for what moving them all
        # would do.
        batch = self.encode([attempt.texts for attempt in attempts])
        gradient = self._gradient(batch, [attempt.label for attempt in attempts])
        for row, attempt in enumerate(attempts):
            swaps, gains = [], []
            for word, text, start in attempt.replaceable:
                others = [o for o in self.candidates(text) if o != text.lower()]
                tokens = _tokens(batch, row, word.text, start, start + len(text)) if others else []
                if not tokens:
                    continue
                embedding = self._mean_embedding(batch["input_ids"][row, tokens])
                slope = gradient[row, tokens].sum(0)
                written = [_match_case(text, other) for other in others]
                gains += [((self._embedding(o) - embedding) @ slope).item() for o in written]
                swaps += [(word, other) for other in written]
            order = sorted(range(len(swaps)), key=lambda i: -gains[i])  # equal ones as they stand
            yield [swaps[i] for i in order[:tries]]

    def _gradient(self, batch: BatchEncoding, labels: Sequence[int]) -> Tensor:
        """Return the gradient of each row's loss by its embeddings [B, T, d]."""
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
    """Return the places of the tokens of a text's characters; none where they were cut off."""
    ends = [batch.char_to_token(row, at, sequence_index=text) for at in (start, end - 1)]
    return [] if None in ends else list(range(ends[0], ends[1] + 1))
