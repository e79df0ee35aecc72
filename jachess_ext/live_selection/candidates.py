"""What can be known of a candidate before any training: that it loads, its size, its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ..tasks.batches import encode
from ..tasks.examples import Examples, Task
from ..tasks.model_version import model_version
from ..tasks.models import load_model, load_tokenizer
from .measure import count_parameters

_COUNTED = 1000  # rows whose tokens are counted


@dataclass(frozen=True)
class CandidateModel:
    """A model that loads.

    Attributes:
        model: as given.
        version: digest of its files, or the hub's commit.
        parameters: N, with a head for the task.
        tokens: a training row, on average over the first thousand.
    """

    model: str
    version: str
    parameters: int
    tokens: float


def load_candidate(model: str, task: Task, seed: int, max_length: int) -> CandidateModel:
    """Loads it once and looks.

    Raises:
        DataError: model or tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(model)
    version = model_version(model)
    loaded = load_model(model, task.outputs, tokenizer, seed)
    rows: Examples = task.train.first(_COUNTED)
    lengths = [len(row["input_ids"]) for row in encode(rows, tokenizer, max_length).rows]
    return CandidateModel(model, version, count_parameters(loaded), sum(lengths) / len(lengths))
