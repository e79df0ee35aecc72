"""An attack on a batch of token ids, for training: several words at once, by one gradient.

Only words that are a single token are swapped, for candidates that are a single token, so that the
rows keep their length and a swap is a difference of two embeddings.
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
        tokenizer: the model's tokenizer.
        candidates: source of candidates for words.
        rows: number of rows of the model's embedding table; larger ids are not used.
        count: largest number of candidates of a word, K.
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
        """Return the candidate ids of each token, [B, T, K], padded with the token itself.

        Args:
            ids: [B, T], integer.
            mask: [B, T], 1 on real tokens.
        """
        options = ids.cpu().unsqueeze(-1).repeat(1, 1, self.count)
        real = mask.bool().tolist()
        for b, row in enumerate(ids.tolist()):
            for t, token in enumerate(row):
                candidates = self._single_token_candidates(token) if real[b][t] else ()
                if candidates and self._ends_word(token, row[t + 1] if t + 1 < len(row) else None):
                    options[b, t, : len(candidates)] = torch.tensor(candidates)
        return options.to(ids.device)

    def _single_token_candidates(self, token: int) -> tuple[int, ...]:
        """Return the ids of the single-token candidates of a token; () if the token is not a word
        by itself."""
        if token not in self._words:
            word = str(self._tokenizer.decode([token])).strip()
            ids: tuple[int, ...] = ()
            if token not in self._special and WORD.fullmatch(word):
                candidates = self._candidates(word)
                if token_ids(self._tokenizer, [word]) == [[token]]:
                    ids = self._single(candidates)
            self._words[token] = word, tuple(i for i in ids if i != token)[: self.count]
        return self._words[token][1]

    def _single(self, words: Sequence[str]) -> tuple[int, ...]:
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        ids = (tokens[0] for tokens in token_ids(self._tokenizer, words) if len(tokens) == 1)
        return tuple(dict.fromkeys(i for i in ids if i < self._rows and i != unknown))

    def _ends_word(self, token: int, following: int | None) -> bool:
        """Return whether a token ends a word, so that the following token does not continue it."""
        if following is None or following in self._special:
            return True
        if (token, following) not in self._word_ends:
            word, _ = self._words[token]
            suffix = str(self._tokenizer.decode([token, following])).strip()[len(word) :]
            self._word_ends[token, following] = not suffix[:1].isalnum()
        return self._word_ends[token, following]


def swap_counts(ids: Tensor, mask: Tensor, special: Tensor, share: float) -> Tensor:
    """Return the number of tokens to swap in each row, [B]: ``share`` of its real, non-special
    tokens, but at least one."""
    real = mask.bool() & ~torch.isin(ids, special.to(ids))
    return (share * real.sum(1) + 1e-9).floor().long().clamp(min=1)


def steepest_swaps(
    ids: Tensor, options: Tensor, gradient: Tensor, embed: Callable[[Tensor], Tensor], count: Tensor
) -> Tensor:
    """Return the ids after the swaps that raise the loss most, to first order, [B, T].

    Args:
        ids: token ids, [B, T].
        options: candidate ids of `TokenSwaps`, [B, T, K].
        gradient: gradient of each row's loss with respect to its embeddings, [B, T, d].
        embed: function from ids to their embeddings.
        count: largest number of swaps in each row, [B].
    """
    with torch.no_grad():
        steps = embed(options.flatten(1)).unflatten(1, options.shape[1:])
        steps = steps - embed(ids).unsqueeze(2)  # [B, T, K, d]
        gains = torch.einsum("btd,btkd->btk", gradient.to(steps), steps).float()
        gains = gains.masked_fill(options == ids.unsqueeze(-1), -torch.inf)
        # gains [B, T, K] → the best candidate of each token [B, T], then the best tokens of each
        # row: the rank by two sorts, since `count` differs from row to row and topk takes one
        # number
        best, best_option = gains.max(-1)
        order = best.argsort(dim=1, descending=True, stable=True)
        rank = order.argsort(dim=1)
        chosen = (rank < count.to(rank).unsqueeze(1)) & (best > 0)
        swapped_ids = options.gather(-1, best_option.unsqueeze(-1)).squeeze(-1)
    return torch.where(chosen, swapped_ids, ids)
