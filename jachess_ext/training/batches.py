"""Order of rows, random numbers of a method's own, and left padding.

Two methods fine-tuned from one seed see the same order of rows, and the same dropout masks in
their steps of task loss.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import find_labels

from ..models import NO_LABEL, in_mode, unwrapped, without_labels, without_peft

Batch = Mapping[str, Any]
_WORD = 2**64
_OF_TOKENS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids")


class RandomState:
    """The state of torch's generators (CPU and CUDA), to draw the same dropout masks again."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Set the generators back to this state."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def mixed_seed(*words: int) -> int:
    """Mix numbers, whose order counts, into a seed for torch."""
    sequence = np.random.SeedSequence([word % _WORD for word in words])
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def drawing_apart(*key: int) -> Iterator[None]:
    """Let torch's generators draw what the key decides, and restore them afterwards."""
    seed = mixed_seed(*key)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


class SeededOrder(Sampler[int]):
    """The order of a `LengthGroupedSampler`, decided by seed and epoch alone.

    By itself it draws from torch's generator: a method's draws would change the next epoch's
    order, and a run resumed within an epoch would have another order.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: int) -> None:
        self._sampler, self._seed, self._epoch = sampler, seed, 0
        sampler.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the Trainer's loader calls it before each."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        self._sampler.generator.manual_seed(mixed_seed(self._seed, self._epoch))
        return iter(self._sampler)


class UnlabelledBatches:
    """Rounds over unlabelled data, in an order decided by the seed and the round's number.

    An iterator continues where the last one stopped, to the end of that round; at its end, through
    the next round.

    Args:
        loader: shuffled by ``generator`` alone.
        generator: seeded anew for every round.
        seed: words for `mixed_seed`, other ones on every rank.
        prepare: brings a batch to the model's device.
    """

    def __init__(
        self,
        loader: DataLoader,
        generator: torch.Generator,
        *,
        seed: tuple[int, ...],
        prepare: Callable[[Any], Batch],
    ) -> None:
        self._loader, self._generator = loader, generator
        self._seed, self._prepare = seed, prepare
        self._round = self._taken = 0
        self._endless = endless(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        before = self._taken
        self._generator.manual_seed(mixed_seed(*self._seed, self._round))
        for number, batch in enumerate(self._loader):
            if number >= before:
                self._taken = number + 1
                yield dict(self._prepare(without_labels(batch)))
        over = before > 0 and self._taken == before
        self._round, self._taken = self._round + 1, 0
        if over:
            yield from self

    def next(self) -> Batch:
        """Return the next batch, after a round's last one the next round's first."""
        batch = next(self._endless, None)
        if batch is None:
            raise ValueError("unlabelled_dataset gave no batch; expected at least one example")
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the number of whole rounds, and of batches taken in the round after them."""
        return {"round": self._round, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the place; the round's batches before it are read again and dropped.

        Raises:
            ValueError: it is not what `state_dict` returned.
        """
        place = state.get("round", -1), state.get("taken", -1)
        if not all(type(number) is int and number >= 0 for number in place):
            raise ValueError(
                f"the place in the unlabelled data is {dict(state)}; expected 'round' and 'taken', "
                "whole numbers from 0 up"
            )
        self._round, self._taken = place
        self._endless = endless(self)


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield round after round, until a round is empty."""
    batch: Batch | None = {}
    while batch is not None:
        batch = None
        for batch in batches:
            yield batch


class LeftPadding:
    """Add ``position_ids`` to batches padded on the left, for models that need them.

    Models that count positions from the first column (GPT-2, BERT) get positions counted from the
    mask; others need none (rotary or relative positions, OPT, RoBERTa).  A head that reads the
    first column (BERT's, RoBERTa's) reads padding there in any case.  The first batch with left
    padding is used to tell which of them the model is.
    """

    def __init__(self) -> None:
        self._counts: bool | None = None

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch, with ``position_ids`` ``[B, T]`` where the model needs them.

        Warns:
            UserWarning: once, if the model's outputs depend on left padding in any case.
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
    """Tell whether it is a mask ``[B, T]`` with padding before a row's first token."""
    return isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, :1].all())


def positions_of(mask: Tensor) -> Tensor:
    """Return positions ``[B, T]``, counted from each row's first real token."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def without_padding_targets(model: nn.Module, batch: Any) -> Any:
    """Drop the targets of a causal language model that it would predict from padding.

    With left padding these are the labels up to each row's first token, which are no targets with
    right padding either.
    """
    if not isinstance(batch, Mapping):
        return batch
    mask: Any = batch.get("attention_mask")
    labels = batch.get("labels")
    if not padded_left(mask) or not isinstance(labels, Tensor) or not is_causal(model):
        return batch
    if labels.shape != mask.shape:
        return batch
    before = mask.cumsum(1) == 0
    told_by_padding = torch.zeros_like(before)
    told_by_padding[:, 1:] = before[:, :-1]
    kept = labels.masked_fill(told_by_padding.to(labels.device), NO_LABEL)
    # No loss uses the first column, but the Trainer may count it: as with right padding, it has
    # the first token's label.
    first = mask.bool().long().argmax(1, keepdim=True).to(labels.device)
    kept[:, :1] = labels.gather(1, first)
    return {**batch, "labels": kept}


def is_causal(model: nn.Module) -> bool:
    """Tell whether the model predicts each next token."""
    inner = without_peft(model)
    named = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return named or getattr(inner, "loss_type", None) == "ForCausalLM"


def with_decoder_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """State the decoder's inputs that an encoder-decoder makes from a batch's labels ``[B, T]``.

    Without them, a pass without labels (label smoothing's, a penalty's) would have other inputs.
    Blenderbot, M2M100 and others shift the labels by a function of their file, not by a method.
    """
    inner: Any = without_peft(model)
    labels = batch.get("labels")
    given = any(batch.get(f"decoder_{name}") is not None for name in ("input_ids", "inputs_embeds"))
    if given or not isinstance(labels, Tensor) or labels.ndim != 2:
        return dict(batch)
    if hasattr(inner, "prepare_decoder_input_ids_from_labels"):
        made = inner.prepare_decoder_input_ids_from_labels(labels.clone())  # FSMT's writes into it
        return {**batch, "decoder_input_ids": made}
    shift = getattr(sys.modules[type(inner).__module__], "shift_tokens_right", None)
    if shift is None or not type(inner).__name__.endswith("ForConditionalGeneration"):
        return dict(batch)
    made = shift(labels.clone(), inner.config.pad_token_id, inner.config.decoder_start_token_id)
    return {**batch, "decoder_input_ids": made}


@torch.no_grad()
def _needs_positions(model: nn.Module, batch: Mapping[str, Any], mask: Tensor, index: int) -> bool:
    """Compare a padded row with the same row alone; tell whether it needs ``position_ids``."""
    takes = "position_ids" in _parameters(model)
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        return takes  # a rank alone cannot run a sharded model
    if _reads_more_than_text(model, batch):
        return False  # left as in a plain Trainer
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
    """Tell whether the batch has inputs that cannot be cut to a row's tokens, such as images."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    known = {*_OF_TOKENS, *find_labels(type(unwrapped(model)))}
    return any(name in _parameters(model) and name not in known for name in batch)


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _outputs(model: nn.Module, row: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the model's floating-point outputs, with its last hidden state where it has them."""
    parameters = _parameters(model)
    takes = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes = takes or "output_hidden_states" in parameters
    output = model(**row, **({"output_hidden_states": True} if takes else {}))
    values = list(output.values()) if isinstance(output, Mapping) else list(output)
    values = [v[-1] if isinstance(v, tuple) and v else v for v in values]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def _same(padded: list[Tensor], alone: list[Tensor]) -> bool:
    """Compare outputs up to rounding, those per token on the row's own tokens."""
    for a, b in zip(padded, alone, strict=True):
        if a.shape != b.shape:
            a = a[:, a.shape[1] - b.shape[1] :]
        if not (a - b).abs().max() <= torch.finfo(b.dtype).eps ** 0.5 * b.abs().max():
            return False
    return True
