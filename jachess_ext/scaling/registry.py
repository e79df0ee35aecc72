"""Every selection method: what it needs, what it trains, and where it is offered.

Importing this costs nothing: the command line's choices come from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT = "blend"
"""The method where none is named."""

_FORMER = {"bayes": "blend"}
"""Names that methods had before."""


Needs = Literal["losses", "zero", "parameters", "weights", "kernel", "features"]
Trains = Literal["all", "last", "walk", "none"]


@dataclass(frozen=True)
class Method:
    """One way to choose among models.

    Attributes:
        name: as users write it.
        needs: what it reads: "losses" of fine-tuned models, "zero" (losses before fine-tuning),
            "parameters" (numbers of them), "weights", "kernel" (Θ, r and t of every run),
            "features" (frozen ones of labelled texts).
        trains: the subsets every model is fine-tuned on for it: "all" up to the budget, the "last"
            alone, those a "walk" down from the budget visits, or "none".
        points: losses of one model it needs, the one before fine-tuning counted where it
            `reads_zero`.
        points_for_width: the same for a distribution of its forecast; None: it gives none.
        reads_zero: whether the loss before fine-tuning is one of the points where it is known.
        live: whether a live selection, which fine-tunes the candidates, offers it.
        table: whether a selection from a table of losses offers it.
    """

    name: str
    needs: Needs
    trains: Trains
    points: int
    points_for_width: int | None = None
    reads_zero: bool = False
    live: bool = True
    table: bool = True

    @property
    def forecasts(self) -> bool:
        """Whether the score is a loss forecast at the target, with a distribution."""
        return self.points_for_width is not None

    def fewest_sizes(self, *, zero: bool, distribution: bool = False) -> int:
        """Subsets it needs.

        Args:
            zero: whether the loss before fine-tuning is known.
            distribution: for the distribution of its forecast too.

        Raises:
            ValueError: a distribution of a method that has none.
        """
        points = self.points_for_width if distribution else self.points
        if points is None:
            raise ValueError(f"{self.name} gives no distribution")
        return points - (zero and self.reads_zero)


_ALL = (
    Method("blend", "losses", "all", 3, 3),
    Method("lensllm", "kernel", "all", 4, 5, reads_zero=True),
    Method("rectified", "losses", "all", 4, 5, reads_zero=True),
    Method("power", "losses", "all", 4, 5),
    Method("ats", "losses", "walk", 2, 3),
    Method("subtuning", "losses", "last", 1),
    Method("zeroshot", "zero", "none", 0),
    Method("modelsize", "parameters", "none", 0),
    Method("nlpmetrics", "weights", "none", 0, live=False),
    Method("logme", "features", "none", 0, table=False),
    Method("hscore", "features", "none", 0, table=False),
    Method("knn", "features", "none", 0, table=False),
)

REGISTRY = {method.name: method for method in _ALL}

LIVE = tuple(method.name for method in _ALL if method.live)
"""Names of those a live selection offers.  On a table, which has no Θ, lensllm is the rectified
law: F is then a free number, as D_l is."""

FEATURES = tuple(method.name for method in _ALL if method.needs == "features")
"""Names of those that score frozen features."""


def canonical(name: str) -> str:
    """The name a method has now; unknown names as they are."""
    return _FORMER.get(name, name)
