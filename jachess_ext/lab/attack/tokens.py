"""The attack within a batch of token ids, for training: one gradient, several words at once.

A word is swapped where it and its candidate are a single token each, so that the rows keep their
length and the way from one to the other is a direction in embedding space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .candidates import WORD, Candidates, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenSwaps:
    """Candidate ids for each token of a batch.

    Args:
        tokenizer: the model's.
        candidates: of words.
        rows: rows of the model's embedding table; ids beyond are not used.
        count: the most candidates of a word.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, candidates: Candidates, rows: int, count: int = 8
    ) -> None:
        self._tokenizer, self._candidates = tokenizer, candidates
        self._rows, self.count = rows, count
        self._special = set(tokenizer.all_special_ids)
        self._words: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._word_ends: dict[tuple[int, int], bool] = {}

    def options(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the candidates of each token [B, T, count]; the token itself fills them up.

        Args:
            ids: [B, T], integer.
            mask: [B, T], 1 on real tokens.
        """
        options = ids.cpu().unsqueeze(-1).repeat(1, 1, self.count)
        real = mask.bool().tolist()
        for b, row in enumerate(ids.tolist()):
            for t, token in enumerate(row):
                others = self._single_token_candidates(token) if real[b][t] else ()
                if others and self._ends_word(token, row[t + 1] if t + 1 < len(row) else None):
                    options[b, t, : len(others)] = torch.tensor(others)
        return options.to(ids.device)

    def _single_token_candidates(self, token: int) -> tuple[int, ...]:
        """Return the single-token candidates of a token that is a word by itself."""
        if token not in self._words:
            word = str(self._tokenizer.decode([token])).strip()
            others: tuple[int, ...] = ()
            if token not in self._special and WORD.fullmatch(word):
                candidates = self._candidates(word)
                if token_ids(self._tokenizer, [word]) == [[token]]:
                    others = self._single(candidates)
            self._words[token] = word, tuple(i for i in others if i != token)[: self.count]
        return self._words[token][1]

    def _single(self, words: Sequence[str]) -> tuple[int, ...]:
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        ids = (of[0] for of in token_ids(self._tokenizer, words) if len(of) == 1)
        return tuple(dict.fromkeys(i for i in ids if i < self._rows and i != unknown))

    def _ends_word(self, token: int, following: int | None) -> bool:
        """Return whether a token ends a word, which the following one does not continue."""
        if following is None or following in self._special:
            return True
        if (token, following) not in self._word_ends:
            word, _ = self._words[token]
            suffix = str(self._tokenizer.decode([token, following])).strip()[len(word) :]
            self._word_ends[token, following] = not suffix[:1].isalnum()
        return self._word_ends[token, following]


def swap_counts(ids: Tensor, mask: Tensor, special: Tensor, share: float) -> Tensor:
    """Return the number of tokens to swap in each row, [B]: the share of its real ones, or one."""
    real = mask.bool() & ~torch.isin(ids, special.to(ids))
    return (share * real.sum(1) + 1e-9).floor().long().clamp(min=1)


def steepest_swaps(
    ids: Tensor, options: Tensor, gradient: Tensor, embed: Callable[[Tensor], Tensor], count: Tensor
) -> Tensor:
    """Return the ids after the swaps that raise the loss most, to first order, [B, T].

    Args:
        ids: [B, T].
        options: [B, T, K], of `TokenSwaps`.
        gradient: of each row's loss by its embeddings, [B, T, d].
        embed: gives the embeddings of ids.
        count: the most swaps of each row, [B].
    """
    with torch.no_grad():
        steps = embed(options.flatten(1)).unflatten(1, options.shape[1:])
        steps = steps - embed(ids).unsqueeze(2)  # [B, T, K, d]
        gains = torch.einsum("btd,btkd->btk", gradient.to(steps), steps).float()
        gains = gains.masked_fill(options == ids.unsqueeze(-1), -torch.inf)
        # gains [B, T, K] → the best candidate of each token [B, T], then the best tokens of each
        # row: the rank by two sorts, since `count` differs from row to row and topk takes one
        # number
        best, which = gains.max(-1)
        order = best.argsort(dim=1, descending=True, stable=True)
        rank = order.argsort(dim=1)
        chosen = (rank < count.to(rank).unsqueeze(1)) & (best > 0)
        other = options.gather(-1, which.unsqueeze(-1)).squeeze(-1)
    return torch.where(chosen, other, ids)
