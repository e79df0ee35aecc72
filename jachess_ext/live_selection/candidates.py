"""What can be known of a candidate before any training: that it loads, its size, its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ..experiment.grid import Recipe
from ..tasks.batches import encode
from ..tasks.examples import Examples, Task
from ..tasks.model_version import model_version
from ..tasks.models import load_model, load_tokenizer
from ..training import with_lora
from .cost import FORWARD, training_flops
from .measure import count_parameters

_COUNTED = 1000  # rows whose tokens are counted


@dataclass(frozen=True)
class CandidateModel:
    """A model that loads.

    Attributes:
        model: as given.
        version: digest of its files, or the hub's commit.
        parameters: N, with a head for the task (and LoRA's adapters).
        trained: those that the recipe trains.
        tokens, dev_tokens: a training row and a dev row, on average over the first thousand.
    """

    model: str
    version: str
    parameters: int
    trained: int
    tokens: float
    dev_tokens: float

    def training_flops(self, rows: float, recipe: Recipe) -> float:
        """Expected of fine-tuning on so many rows."""
        return training_flops(
            *(self.parameters, self.trained, self.tokens * rows),
            *(recipe.epochs, recipe.gradient_checkpointing),
        )

    def judging_flops(self, rows: float) -> float:
        """Expected of judging so many dev rows."""
        return FORWARD * self.parameters * self.dev_tokens * rows


def load_candidate(model: str, task: Task, seed: int, recipe: Recipe) -> CandidateModel:
    """Loads it once and looks.

    Raises:
        DataError: model or tokenizer cannot be loaded.
        MissingExtra: a library is not installed (with LoRA: peft).
    """
    tokenizer = load_tokenizer(model)
    version = model_version(model)
    loaded = load_model(model, task.outputs, tokenizer, seed, regression=task.regression)
    if recipe.lora:
        loaded = with_lora(loaded, seed=seed)

    def tokens(rows: Examples) -> float:
        found = encode(rows.first(_COUNTED), tokenizer, recipe.max_length).rows
        return sum(len(row["input_ids"]) for row in found) / len(found)

    return CandidateModel(
        model, version, *count_parameters(loaded), tokens(task.train), tokens(task.dev)
    )
