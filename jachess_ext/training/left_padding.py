"""Batches padded on the left: what a model has to be told so that padding moves nothing.

Many models count positions from the first column (GPT-2, BERT): they are given ``position_ids``
counted from the mask.  Others need nothing (rotary or relative positions, OPT, RoBERTa).  A head
that reads the first column (BERT's, RoBERTa's) reads padding there, whatever it is told.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import find_labels

from ..smoothness.decision import NO_LABEL
from ..smoothness.estimators import in_mode, unwrapped

_OF_TOKENS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids")


class LeftPadding:
    """Gives a Trainer's batches what its model needs; found out at the first one padded left."""

    def __init__(self) -> None:
        self._counts: bool | None = None

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch, with ``position_ids`` ``[B, T]`` where they put the model right.

        Warns:
            UserWarning: the model takes left padding for text, whatever it is told; once.
        """
        mask = batch.get("attention_mask")
        if not padded_left(mask) or "position_ids" in batch:
            return batch
        assert isinstance(mask, Tensor)
        if self._counts is None:
            padded = (mask[:, 0] == 0) & mask.bool().any(1)  # not a row of padding alone
            if not padded.any():
                return batch
            row = int(padded.long().argmax())
            self._counts = _needs_positions(unwrapped(model), batch, mask, row)
        return {**batch, "position_ids": positions_of(mask)} if self._counts else batch


def padded_left(mask: Any) -> bool:
    """Whether it is a mask ``[B, T]`` with padding before a row's first token."""
    return isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, :1].all())


def positions_of(mask: Tensor) -> Tensor:
    """``[B, T]``: places counted from each row's first real token."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def without_padding_targets(model: nn.Module, batch: Any) -> Any:
    """A causal language model's batch without the targets that padding would have to tell.

    With padding on the left these are the labels up to each row's first token, which no model is
    asked for where padding is on the right.
    """
    if not isinstance(batch, Mapping):
        return batch
    mask: Any = batch.get("attention_mask")
    labels = batch.get("labels")
    if not padded_left(mask) or not isinstance(labels, Tensor) or not _is_causal(model):
        return batch
    if labels.shape != mask.shape:
        return batch
    before = mask.cumsum(1) == 0
    told_by_padding = torch.zeros_like(before)
    told_by_padding[:, 1:] = before[:, :-1]
    kept = labels.masked_fill(told_by_padding.to(labels.device), NO_LABEL)
    # No loss looks at the first column, but the Trainer may count it, as where padding is on the
    # right: it has the first token's label there.
    first = mask.bool().long().argmax(1, keepdim=True).to(labels.device)
    kept[:, :1] = labels.gather(1, first)
    return {**batch, "labels": kept}


def _is_causal(model: nn.Module) -> bool:
    inner: Any = unwrapped(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    named = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return named or getattr(inner, "loss_type", None) == "ForCausalLM"


@torch.no_grad()
def _needs_positions(model: nn.Module, batch: Mapping[str, Any], mask: Tensor, index: int) -> bool:
    """Whether positions have to be told: one row, padded, against the same row alone."""
    takes = "position_ids" in _parameters(model)
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        return takes  # a shard cannot be asked by one rank alone
    if _reads_more_than_text(model, batch):
        return False  # it sees what it sees in a plain Trainer
    start = int(mask[index].bool().long().argmax())
    row = {n: batch[n][index : index + 1] for n in _OF_TOKENS if batch.get(n) is not None}
    alone = {name: value[:, start:] for name, value in row.items()}
    with in_mode(model, training=False):
        wanted = _outputs(model, alone)
        if _same(_outputs(model, row), wanted):
            return False
        told = {**row, "position_ids": positions_of(row["attention_mask"])}
        if takes and _same(_outputs(model, told), wanted):
            return True
    warnings.warn(
        f"the batches are padded on the left, and {type(model).__name__} gives a row so padded "
        "other outputs than the row alone (its head reads the first column, or its positions count "
        "padding); pad on the right: tokenizer.padding_side = 'right'",
        stacklevel=2,
    )
    return False


def _reads_more_than_text(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a row cut to its tokens is no input of the model: images, an encoder's text."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    known = {*_OF_TOKENS, *find_labels(type(unwrapped(model)))}
    return any(name in _parameters(model) and name not in known for name in batch)


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _outputs(model: nn.Module, row: Mapping[str, Tensor]) -> list[Tensor]:
    """The floating-point tensors a model returns, its last hidden state among them if it can."""
    parameters = _parameters(model)
    asked = {"output_hidden_states": True} if "output_hidden_states" in parameters else {}
    if not asked and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        asked = {"output_hidden_states": True}
    found = model(**row, **asked)
    values = list(found.values()) if isinstance(found, Mapping) else list(found)
    values = [v[-1] if isinstance(v, tuple) and v else v for v in values]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def _same(padded: list[Tensor], alone: list[Tensor]) -> bool:
    """To rounding; of outputs per token those of the tokens alone."""
    return all(_close(a, b) for a, b in zip(padded, alone, strict=True))


def _close(padded: Tensor, alone: Tensor) -> bool:
    if padded.shape != alone.shape:
        padded = padded[:, padded.shape[1] - alone.shape[1] :]
    apart = (padded - alone).abs().max()
    return bool(apart <= torch.finfo(alone.dtype).eps ** 0.5 * alone.abs().max())
