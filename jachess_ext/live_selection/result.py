"""What a live selection found: ranking, predictions, why it stopped, what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..scaling.registry import canonical
from .records import RunRecord
from .scores import LOSS


@dataclass(frozen=True)
class Prediction:
    """One candidate as one method sees it; None where the method has no such figure.

    Attributes:
        model: the candidate.
        score: what the method ranks by, lower is better; with blend, whose choice is more cautious
            than its forecast, not the predicted loss.
        predicted: dev loss at the target (of another score: `scores.to_forecast`).
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
        rate: the learning rate that was best on the largest of them; None where none was trained.
    """

    model: str
    parameters: int
    sizes: tuple[int, ...]
    stop: str
    rate: float | None = None


@dataclass(frozen=True)
class Flops:
    """Operations (`cost.training_flops`).

    Attributes:
        training, probe, judging, features: spent on this selection: on fine-tuning, on Θ, on
            forward passes over dev rows, and over the rows whose frozen features were scored.
        full_tuning: training every candidate on the target's data with one learning rate, and
            judging each once.
        sub_tuning: the same on the largest subset.
    """

    training: float
    probe: float
    judging: float
    features: float
    full_tuning: float
    sub_tuning: float

    @property
    def spent(self) -> float:
        """All of this selection."""
        return self.training + self.probe + self.judging + self.features

    @property
    def share(self) -> float:
        """`spent` as a share of FullTuning."""
        return self.spent / self.full_tuning


@dataclass(frozen=True)
class LiveSelection:
    """A finished live selection.  Equal runs are equal: the time taken is not compared.

    Attributes:
        task: name of the data.
        train_rows, dev_rows: in the training file, and judged on.
        method: whose ranking counts.
        rank_by: the score forecast, "loss" or a name of `scores`.
        target: training examples predicted for.
        level: of the intervals.
        order: of `settings.ORDERS`.
        budget: as it was given.
        sizes: subsets planned, ascending.
        candidates: in the order given.
        predictions: method -> predictions, best first; methods that had too few points are missing.
        missing: method -> why it has no predictions.
        stop: why the selection ended, one sentence.
        flops: see `Flops`.
        seconds: wall-clock time of all runs.
        winner: the best model fine-tuned on the target's rows, where it was asked for; its cost is
            not in `flops`: it is what the choice was made for.
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
    rank_by: str = LOSS
    winner: RunRecord | None = None

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
        return max(max(candidate.sizes, default=0) for candidate in self.candidates) / self.target

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
            canonical(method): tuple(Prediction(**one) for one in found)
            for method, found in made["predictions"].items()
        }
        made["method"] = canonical(made["method"])
        made["flops"] = Flops(**made["flops"])
        if made.get("winner") is not None:
            made["winner"] = RunRecord.from_dict(made["winner"])
        return cls(**made)
