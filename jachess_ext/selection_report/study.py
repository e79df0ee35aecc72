"""What the page shows of a selection, whether it came from a table or from runs made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..evaluation.report import Table
from ..scaling.predictive import Array


@dataclass(frozen=True)
class Band:
    """A curve over sizes [k], and where measured losses would lie around it (None: not known)."""

    sizes: Array
    middle: Array
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True)
class CandidateView:
    """One model, as the method ranked it.

    Attributes:
        name: as it was given.
        label: short, and unlike any other's.
        parameters: N, if known.
        sizes, losses: what the selection read; size 0 is the model before fine-tuning.
        kept_aside: (sizes, losses) that are known and were not read.
        forecast: of the method, from the largest size read to the target.
        law: Eq. 10 through the losses read; None where there are too few.
        score: what the method ranks by, lower is better.
        predicted, low, high, prob_best: at the target, as far as the method gives them.
        truth: the loss measured at the target, not read by the selection.
        stop: why no further size was run.
    """

    name: str
    label: str
    parameters: float | None
    sizes: Array
    losses: Array
    kept_aside: tuple[Array, Array]
    forecast: Band | None
    law: Band | None
    score: float
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    prob_best: float | None = None
    truth: float | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Step:
    """A method at one budget.

    Attributes:
        budget: the largest size read; 0 where the method reads none.
        share: FLOPs as a share of FullTuning; NaN where the models' sizes are not known.
        pear_corr, rel_acc: against what the history compares with, per cent.
    """

    budget: float
    share: float
    pear_corr: float
    rel_acc: float


@dataclass(frozen=True)
class History:
    """Methods over budgets.

    Attributes:
        steps: method -> steps, budgets ascending.
        against_truth: whether scores are compared with measured losses at the target, or else with
            the method's last prediction.
    """

    steps: Mapping[str, Sequence[Step]]
    against_truth: bool


@dataclass(frozen=True)
class KernelPoint:
    """Θ of one model after training on `size` examples.

    Attributes:
        norm: ‖Θ‖ (Frobenius).
        rank: effective rank, (Σλ)² / Σλ².
        drift: ‖Θ − Θ_0‖ / ‖Θ_0‖; None without the kernel before fine-tuning.
        predicted, measured: F(Θ, t) / ‖r‖² and ‖f(X) − y‖² / ‖r‖²; None where not measured.
    """

    size: float
    norm: float
    rank: float
    drift: float | None
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class Kernels:
    """Points of each model by label, and how many rows Θ has (examples × outputs)."""

    points: Mapping[str, Sequence[KernelPoint]]
    rows: int


@dataclass(frozen=True)
class Spending:
    """FLOPs: a name, the figure, and a remark."""

    what: str
    flops: float
    remark: str = ""


@dataclass(frozen=True)
class Study:
    """All of it.

    Attributes:
        title: of the page.
        data: what the losses are of, one sentence.
        method, target, level: of the selection; `level` of the intervals.
        loss, unit: what is plotted upwards, such as "dev loss" and "nats"; the unit may be "".
        candidates: best first.
        stop: why the selection ended.
        spending: the last entry is FullTuning.
        extra: further tables, shown after the ranking.
        settings: shown as it is.
    """

    title: str
    data: str
    method: str
    target: float
    level: float
    loss: str
    unit: str
    candidates: Sequence[CandidateView]
    stop: str | None
    spending: Sequence[Spending]
    history: History | None
    kernels: Kernels | None = None
    extra: Sequence[Table] = field(default_factory=tuple)
    settings: str = ""

    @property
    def up(self) -> str:
        """What the vertical axis is labelled with."""
        return f"{self.loss} ({self.unit})" if self.unit else self.loss


def short_labels(names: Sequence[str]) -> list[str]:
    """The names without the folder they all lie in, if there is one."""
    parts = [name.split("/") for name in names]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return ["/".join(p[shared:]) for p in parts]
