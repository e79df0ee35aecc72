"""What a live selection found: ranking, predictions, why it stopped, what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prediction:
    """One candidate as one method sees it; None where the method has no such figure.

    Attributes:
        model: the candidate.
        score: what the method ranks by, lower is better.
        predicted: dev loss at the target.
        low, high: where a measured one lies, with the selection's `level`; `high` is None where the
            method knows no upper end (beyond the largest double).
        prob_best: probability of having the lowest loss of all candidates at the target.
    """

    model: str
    score: float
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    prob_best: float | None = None


@dataclass(frozen=True)
class Candidate:
    """What was run of one model.

    Attributes:
        model: as given.
        parameters: N.
        sizes: subsets it was trained on, ascending; 0 is the model before fine-tuning.
        stop: why no further size was run.
    """

    model: str
    parameters: int
    sizes: tuple[int, ...]
    stop: str


@dataclass(frozen=True)
class Flops:
    """Operations: 6 N × tokens × epochs of every training, and the probes'.

    Attributes:
        training, probe: spent on this selection.
        judging: forward passes over rows judged; not part of the cost (any method needs some).
        full_tuning: training every candidate on the target's data.
        sub_tuning: training every candidate on the largest subset alone.
    """

    training: float
    probe: float
    judging: float
    full_tuning: float
    sub_tuning: float

    @property
    def spent(self) -> float:
        """Training and probes."""
        return self.training + self.probe

    @property
    def share(self) -> float:
        """`spent` as a share of FullTuning."""
        return self.spent / self.full_tuning


@dataclass(frozen=True)
class LiveSelection:
    """A finished live selection.  Equal runs are equal: the time taken is not compared.

    Attributes:
        task: name of the data.
        train_rows, dev_rows: in the files.
        method: whose ranking counts.
        target: training examples predicted for.
        level: of the intervals.
        order: "growing" or "halving".
        budget: as it was given.
        sizes: subsets planned, ascending.
        candidates: in the order given.
        predictions: method -> predictions, best first; methods that had too few points are missing.
        missing: method -> why it has no predictions.
        stop: why the selection ended, one sentence.
        flops: see `Flops`.
        seconds: wall-clock time of all runs.
    """

    task: str
    train_rows: int
    dev_rows: int
    method: str
    target: int
    level: float
    order: str
    budget: str
    sizes: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    predictions: Mapping[str, tuple[Prediction, ...]]
    missing: Mapping[str, str]
    stop: str
    flops: Flops
    seconds: float = field(compare=False)

    @property
    def ranking(self) -> tuple[Prediction, ...]:
        """By `method`, best first."""
        return self.predictions[self.method]

    @property
    def best(self) -> str:
        """The model to fine-tune."""
        return self.ranking[0].model

    @property
    def share(self) -> float:
        """The largest subset that was run, as a share of the target."""
        return max(candidate.sizes[-1] for candidate in self.candidates) / self.target

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LiveSelection:
        """Back from `to_dict`, also after JSON.

        Raises:
            TypeError, KeyError: fields missing or unknown.
        """
        made = dict(content)
        made["sizes"] = tuple(made["sizes"])
        made["candidates"] = tuple(
            Candidate(**{**one, "sizes": tuple(one["sizes"])}) for one in made["candidates"]
        )
        made["predictions"] = {
            method: tuple(Prediction(**one) for one in found)
            for method, found in made["predictions"].items()
        }
        made["flops"] = Flops(**made["flops"])
        return cls(**made)
