"""What decides the batches of a run: the order of rows, random numbers apart from the task's, and
padding on the left.

Two methods fine-tuned from one seed see the same order of rows and the same dropout masks in their
steps of task loss, and differ by what they do, not by luck.
"""

from __future__ import annotations

import inspect
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

from ..smoothness.decision import NO_LABEL
from ..smoothness.estimators import in_mode, unwrapped, without_labels

Batch = Mapping[str, Any]
_WORD = 2**64
_OF_TOKENS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids")


class RandomState:
    """torch's generators (CPU and CUDA) as they are now, to draw the same dropout masks again."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def mixed_seed(*words: int) -> int:
    """Return one seed for torch, made of several numbers whose order counts."""
    sequence = np.random.SeedSequence([word % _WORD for word in words])
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def drawing_apart(*key: int) -> Iterator[None]:
    """Within it torch's generators draw what the key decides; afterwards they are as before."""
    seed = mixed_seed(*key)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


class SeededOrder(Sampler[int]):
    """`LengthGroupedSampler`'s order, decided by seed and epoch.

    By itself it draws from torch's generator, so that what a method draws in its steps would
    decide the next epoch's order; and a run resumed within an epoch would have another one.

    Args:
        sampler: its generator is replaced.
        seed: from 0 up.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: int) -> None:
        self._sampler, self._seed, self._epoch = sampler, seed, 0
        sampler.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Take note of the epoch; the Trainer's loader calls it before each."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        self._sampler.generator.manual_seed(mixed_seed(self._seed, self._epoch))
        return iter(self._sampler)


class UnlabelledBatches:
    """Rounds over unlabelled data; the seed and the round's number decide the order.

    Each iterator goes from where the last one stopped to the end of its round; where nothing is
    left of it, through the next round.

    Args:
        loader: made with ``generator``, and by it alone shuffled.
        generator: seeded anew for every round.
        seed: its words are mixed (`mixed_seed`); another one on every rank.
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
                yield without_labels(self._prepare(batch))
        over = before > 0 and self._taken == before
        self._round, self._taken = self._round + 1, 0
        if over:
            yield from self

    def next(self) -> Batch:
        """Return the next batch, of the next round where one is over.

        Raises:
            ValueError: there is no data.
        """
        batch = next(self._endless, None)
        if batch is None:
            raise ValueError("unlabelled_dataset gave no batch; expected at least one example")
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return whole rounds done, and batches taken of the one after them."""
        return {"round": self._round, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there; the batches before are read once more, and left out.

        Raises:
            ValueError: it is not what `state_dict` returned.
        """
        done, taken = state.get("round"), state.get("taken")
        if not (type(done) is type(taken) is int and done >= 0 and taken >= 0):
            raise ValueError(
                f"the place in the unlabelled data is {dict(state)}; expected 'round' and 'taken', "
                "whole numbers from 0 up"
            )
        self._round, self._taken = done, taken
        self._endless = endless(self)


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield round after round; end where a round has none."""
    batch: Batch | None = {}
    while batch is not None:
        batch = None
        for batch in batches:
            yield batch


class LeftPadding:
    """Gives batches that are padded on the left what the model needs so that padding moves nothing.

    Many models count positions from the first column (GPT-2, BERT): they are given
    ``position_ids`` counted from the mask.  Others need nothing (rotary or relative positions, OPT,
    RoBERTa).  A head that reads the first column (BERT's, RoBERTa's) reads padding there, whatever
    it is told.  Which it is, the first batch that is padded on the left shows.
    """

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
    for a, b in zip(padded, alone, strict=True):
        if a.shape != b.shape:
            a = a[:, a.shape[1] - b.shape[1] :]
        if not (a - b).abs().max() <= torch.finfo(b.dtype).eps ** 0.5 * b.abs().max():
            return False
    return True
