"""Order of rows, a method's random numbers, and batches padded on the left.

Two methods fine-tuned from one seed see the same order of rows, and the same dropout masks in
the passes of the task loss.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import find_labels

from ..models import NO_LABEL, in_mode, unwrapped, without_labels, without_peft

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = Mapping[str, Tensor]
"""What a collator yields, by the names of the model's arguments.  Rows are the first dimension."""
_TOKEN_COLUMNS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids")


class Rows(Protocol):
    """A data set for torch's loaders: rows by index, or a stream (`IterableDataset`)."""

    def __getitem__(self, index: int, /) -> Mapping[str, object]: ...


class RandomState:
    """Saved state of torch's generators (CPU and CUDA), to draw the same dropout masks again."""

    # A method that runs a batch twice under the same masks (SAM) has to return to the state before
    # the plain run's draws: a new seed would give both passes masks that no plain run has.
    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Restore the generators' state."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def mix_seed(*numbers: int) -> int:
    """Return a seed for torch that is a hash of the integers in their order."""
    sequence = np.random.SeedSequence([number % 2**64 for number in numbers])
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def seeded_rng(*key: int) -> Iterator[None]:
    """Seed torch's generators by `mix_seed` of the key within the context, and restore them."""
    # The task's dropout masks come from the global generators.  A method that drew from them would
    # change the masks of every later step, and could not be compared with the plain run.
    seed = mix_seed(*key)
    # CUDA that is not initialised yet is skipped: saving its state would initialise it.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


class SeededOrder(Sampler[int]):
    """Sampler that orders rows as a `LengthGroupedSampler` does, by seed and epoch only.

    `LengthGroupedSampler` itself draws from torch's global generator: the draws of a method, or
    resuming within an epoch, would change the order of the next epoch.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: int) -> None:
        self._sampler, self._seed, self._epoch = sampler, seed, 0
        sampler.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the Trainer's loader calls it before each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        self._sampler.generator.manual_seed(mix_seed(self._seed, self._epoch))
        return iter(self._sampler)


class UnlabelledBatches:
    """Unlabelled batches, round after round, in an order that depends on seed and round only.

    Iterating yields the remaining batches of the current round, or, if none is left, those of the
    next round.

    Args:
        loader: a loader whose shuffling draws from ``generator`` only.
        generator: the loader's generator, which is seeded anew for every round.
        seed: integers for `mix_seed`, different on every rank.
        prepare: function that moves a batch to the model's device.
    """

    def __init__(
        self,
        loader: DataLoader[dict[str, Tensor]],
        generator: torch.Generator,
        *,
        seed: tuple[int, ...],
        prepare: Callable[[dict[str, Tensor]], Batch],
    ) -> None:
        self._loader, self._generator = loader, generator
        self._seed, self._prepare = seed, prepare
        self._round = self._taken = 0
        self._forever = repeat_rounds(self)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        # Two numbers are all that a checkpoint holds: a resumed round is shuffled again in the same
        # way, and its first batches are skipped.
        skipped = self._taken
        self._generator.manual_seed(mix_seed(*self._seed, self._round))
        for number, batch in enumerate(self._loader):
            if number >= skipped:
                self._taken = number + 1
                yield dict(self._prepare(without_labels(batch)))
        # A round resumed after its last batch has none left: go on with the next, since an empty
        # iteration would mean empty data.
        finished = skipped > 0 and self._taken == skipped
        self._round, self._taken = self._round + 1, 0
        if finished:
            yield from self

    def next(self) -> Batch:
        """Return the next batch, from this round or, if it has ended, the next.

        Raises:
            ValueError: the data are empty.
        """
        batch = next(self._forever, None)
        if batch is None:
            raise ValueError("unlabelled_dataset gave no batch; expected at least one example")
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the number of complete rounds, and of batches taken in the current one."""
        return {"round": self._round, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the position; the round's earlier batches will be loaded again and dropped."""
        self._round, self._taken = state["round"], state["taken"]
        self._forever = repeat_rounds(self)


def collate_unlabelled(collate: Callable[..., Batch], rows: Sequence[object]) -> Batch:
    """Return ``collate(rows)`` for rows of the trainer's ``unlabelled_dataset``.

    Raises:
        ValueError: the collator does not take the rows; the message names the argument.
    """
    try:
        return collate(rows)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"unlabelled_dataset: the data collator does not take its rows ({error}); pass rows "
            "with the columns of train_dataset, such as input_ids; labels are not needed"
        ) from error


def repeat_rounds(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Iterate over the batches again and again, until a round yields none."""
    batch: Batch | None = {}
    while batch is not None:
        batch = None
        for batch in batches:
            yield batch


class LeftPadding:
    """Add ``position_ids`` to batches padded on the left, for models that need them.

    Models that count positions from the first column (GPT-2, BERT) get positions counted from the
    mask; other models need none (rotary or relative positions, OPT, RoBERTa).  A head that uses the
    first column (BERT's, RoBERTa's) gets padding there in any case.  The first batch with left
    padding determines which kind of model it is.
    """

    def __init__(self) -> None:
        self._needs_positions: bool | None = None

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch, with ``position_ids`` ``[B, T]`` if it is padded on the left and the
        model needs them.

        Warns:
            UserWarning: once, if the model's outputs depend on left padding even so.
        """
        mask = batch.get("attention_mask")
        if not is_left_padded(mask) or "position_ids" in batch:
            return batch
        if self._needs_positions is None:
            padded = (mask[:, 0] == 0) & mask.bool().any(1)  # without rows that are all padding
            if not padded.any():
                return batch
            row = int(padded.long().argmax())
            self._needs_positions = _needs_positions(unwrapped(model), batch, mask, row)
        return {**batch, "position_ids": count_positions(mask)} if self._needs_positions else batch


def is_left_padded(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether the mask ``[B, T]`` has padding before a row's first token."""
    return isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, :1].all())


def count_positions(mask: Tensor) -> Tensor:
    """Return position ids ``[B, T]``, counted from 0 at each row's first real token."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def drop_padding_targets(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch without the labels that a causal language model would predict from padding.

    In a row padded on the left these are the labels up to its first real token, which is not
    predicted with right padding either.
    """
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if not is_left_padded(mask) or not isinstance(labels, Tensor) or not is_causal(model):
        return batch
    if labels.shape != mask.shape:
        return batch
    is_padding = mask.cumsum(1) == 0
    # The model predicts column t from column t - 1, so the targets to drop are those whose
    # predecessor is padding: one column more than the padding itself.
    after_padding = nn.functional.pad(is_padding[:, :-1], (1, 0))
    targets = labels.masked_fill(after_padding.to(labels.device), NO_LABEL)
    # No loss uses the first column, but the Trainer counts its label: put the first real token's
    # label there, as with right padding.
    first_token = mask.bool().long().argmax(1, keepdim=True).to(labels.device)
    targets[:, :1] = labels.gather(1, first_token)
    return {**batch, "labels": targets}


def is_causal(model: nn.Module) -> bool:
    """Return whether the model is a causal language model."""
    inner = without_peft(model)
    is_listed = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return is_listed or getattr(inner, "loss_type", None) == "ForCausalLM"


def add_decoder_inputs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the batch with ``decoder_input_ids``, computed from the labels ``[B, T]`` as an
    encoder-decoder computes them; the batch of any other model is returned unchanged.

    A pass without labels (for label smoothing or a penalty) then has the same decoder inputs as a
    pass with labels.  Blenderbot, M2M100 and others shift the labels by a function of their module,
    not by a method.
    """
    inner = cast("PreTrainedModel", without_peft(model))
    labels = batch.get("labels")
    inputs = (batch.get(f"decoder_{name}") for name in ("input_ids", "inputs_embeds"))
    if any(x is not None for x in inputs) or not isinstance(labels, Tensor) or labels.ndim != 2:
        return dict(batch)
    labels = labels.clone()  # FSMT's method writes into it
    shift = getattr(sys.modules[type(inner).__module__], "shift_tokens_right", None)
    if prepare := getattr(inner, "prepare_decoder_input_ids_from_labels", None):
        ids = prepare(labels)
    elif shift is not None and type(inner).__name__.endswith("ForConditionalGeneration"):
        ids = shift(labels, inner.config.pad_token_id, inner.config.decoder_start_token_id)
    else:
        return dict(batch)
    return {**batch, "decoder_input_ids": ids}


@torch.no_grad()
def _needs_positions(model: nn.Module, batch: Batch, mask: Tensor, index: int) -> bool:
    """Return whether row ``index``, padded on the left, needs ``position_ids`` to have the same
    outputs as without padding.

    Warns:
        UserWarning: the outputs differ even with ``position_ids``.
    """
    # No attribute of a model tells how it counts positions, so both ways are tried.
    accepts = "position_ids" in _parameters(model)
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        return accepts  # one rank cannot run a sharded model
    if _has_other_inputs(model, batch):
        return False  # as in a plain Trainer
    start = int(mask[index].bool().long().argmax())
    row = {n: batch[n][index : index + 1] for n in _TOKEN_COLUMNS if batch.get(n) is not None}
    unpadded = {name: value[:, start:] for name, value in row.items()}
    with in_mode(model, training=False):
        expected = _outputs(model, unpadded)
        if _all_close(_outputs(model, row), expected):
            return False
        positions = count_positions(row["attention_mask"])
        if accepts and _all_close(_outputs(model, {**row, "position_ids": positions}), expected):
            return True
    warnings.warn(
        f"the batches are padded on the left, and {type(model).__name__} gives a row so padded "
        "other outputs than the row alone (its head reads the first column, or its positions count "
        "padding); pad on the right: tokenizer.padding_side = 'right'",
        stacklevel=2,
    )
    return False


def _has_other_inputs(model: nn.Module, batch: Batch) -> bool:
    """Return whether the batch has inputs that cannot be cut to a row's real tokens (images)."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    text = {*_TOKEN_COLUMNS, *find_labels(type(unwrapped(model)))}
    return any(name in _parameters(model) and name not in text for name in batch)


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _outputs(model: nn.Module, row: Batch) -> list[Tensor]:
    """Return the model's floating-point outputs, including its last hidden state if available."""
    parameters = _parameters(model)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    has_states = takes_any or "output_hidden_states" in parameters
    output = model(**row, **({"output_hidden_states": True} if has_states else {}))
    values = output.values() if isinstance(output, Mapping) else output
    last = (v[-1] if isinstance(v, tuple) and v else v for v in values)
    return [v for v in last if isinstance(v, Tensor) and v.is_floating_point()]


def _all_close(padded: list[Tensor], unpadded: list[Tensor]) -> bool:
    """Return whether the outputs of a row padded on the left equal those of the unpadded row, up to
    rounding; columns of padding are ignored."""
    for a, b in zip(padded, unpadded, strict=True):
        if a.shape != b.shape:
            a = a[:, a.shape[1] - b.shape[1] :]
        if not (a - b).abs().max() <= torch.finfo(b.dtype).eps ** 0.5 * b.abs().max():
            return False
    return True
