"""Gaussian noise on token embeddings, and tokens replaced by the unknown token."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..models import hooked_embeddings, token_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def perturbed_embeddings(
    model: nn.Module, delta: float, generator: torch.Generator
) -> AbstractContextManager[object]:
    """Return a context that adds noise δ v, v ~ N(0, I), to the model's token embeddings.

    The model must be called with `input_ids`: `inputs_embeds` are not perturbed.

    Args:
        model: a transformers model.
        delta: standard deviation of the noise, in the units of the embedding's entries.
        generator: CPU generator of the noise, which is the same on any device.

    Raises:
        ValueError: δ is negative or not finite, or the model embedded no tokens in the context.
    """
    if not (delta >= 0 and delta < float("inf")):
        raise ValueError(f"delta must be a finite number of at least 0; got {delta}")

    def add_noise(x: Tensor, real: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float32)
        return x + delta * noise.to(x)

    return hooked_embeddings(model, add_noise)


def embedding_scale(model: nn.Module) -> float:
    """Return the root mean square of the token embedding table's entries, the natural unit of δ."""
    table = token_table(model).weight
    return float(table.detach().double().square().mean().sqrt())


def corrupt_tokens(
    input_ids: Tensor,
    attention_mask: Tensor,
    share: float,
    *,
    unknown: int,
    special_ids: Tensor,
    generator: torch.Generator,
    padding: int | None = None,
) -> Tensor:
    """Replace a share of each sequence's real, non-special tokens by the unknown token.

    Of n such tokens, ⌊share · n + U⌋ with U uniform on [0, 1) are replaced: share · n on average,
    and exactly so if that is a whole number.

    The heads of decoders in transformers use the rightmost token that is not the padding id.
    If the unknown token has that id (GPT-2 has one token for unknown, end and padding), this
    rightmost token is neither replaced nor counted, so that the head uses the same position.

    Args:
        input_ids: [B, T], integer.
        attention_mask: [B, T], 1 on real tokens.
        share: between 0 and 1.
        unknown: id of the unknown token.
        special_ids: ids that are never replaced (`tokenizer.all_special_ids`), [k] or empty.
        generator: CPU generator.
        padding: the model's padding id (`config.pad_token_id`), if any.

    Returns:
        New ids [B, T] on the device of `input_ids`.

    Raises:
        ValueError: the share is outside [0, 1].

    Examples:
        >>> ids = torch.tensor([[2, 7, 8, 3]])
        >>> corrupt_tokens(
        ...     ids, torch.ones_like(ids), 1.0,
        ...     unknown=1, special_ids=torch.tensor([2, 3]), generator=torch.Generator(),
        ... ).tolist()
        [[2, 1, 1, 3]]
    """
    sampled = sample_tokens(
        input_ids,
        attention_mask,
        share,
        special_ids=special_ids,
        generator=generator,
        padding=padding if unknown == padding else None,
    )
    return torch.where(sampled, unknown, input_ids.cpu()).to(input_ids.device)


def sample_tokens(
    input_ids: Tensor,
    attention_mask: Tensor,
    share: float,
    *,
    special_ids: Tensor,
    generator: torch.Generator,
    padding: int | None = None,
) -> Tensor:
    """Draw the mask of the tokens that `corrupt_tokens` replaces, booleans [B, T] on the CPU.

    Args:
        padding: the padding id, if tokens are replaced by it: each row's last token other than this
            id is then excluded. None: no token is excluded.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must lie in [0, 1]; got {share}")
    ids = input_ids.cpu()
    real = attention_mask.cpu().bool()
    candidates = real & ~torch.isin(ids, special_ids.cpu().to(ids.dtype))
    if padding is not None:
        columns = torch.arange(ids.shape[1])
        last = torch.where(ids != padding, columns, -1).amax(1, keepdim=True)
        candidates = candidates & (columns != last)
    # One number for each real token, so that the width of the padding does not change the draw.
    keys = torch.full(ids.shape, 2.0)
    keys[real] = torch.rand(int(real.sum()), generator=generator)
    rank = keys.masked_fill(~candidates, 2.0).argsort(dim=1).argsort(dim=1)
    extra = torch.rand(len(ids), generator=generator, dtype=torch.float64)
    # + 1e-9, since share · n may be a rounding error below a whole number.
    count = (share * candidates.sum(1).double() + 1e-9 + extra * (1 - 1e-8)).floor()
    return candidates & (rank < count.unsqueeze(1))


def unknown_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the tokenizer's unknown token, or else of its mask token, or None.

    A token that is not also the padding token is preferred.
    """
    names = ("unk_token_id", "mask_token_id")
    ids = [int(i) for name in names if (i := getattr(tokenizer, name, None)) is not None]
    padding = getattr(tokenizer, "pad_token_id", None)
    return next((value for value in ids if value != padding), ids[0] if ids else None)
