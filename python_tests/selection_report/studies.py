"""Studies to draw: of synthetic tables, and one with everything that a page can show."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from jachess_ext.evaluation.report import Table
from jachess_ext.scaling import LossTable, select
from jachess_ext.selection_report.from_table import study_of_table
from jachess_ext.selection_report.study import KernelPoint, Kernels, Study
from python_tests.scaling import tables

BUDGET, TARGET = 25600.0, 1638400.0
HOSTILE = "<script>alert(1)</script> & \"quoted\" 'x' $y_1$"


def table(models: int = 6) -> LossTable:
    """Sizes 0, 400, 1600 … the target."""
    made = tables.population(0, models=models)[0]
    return replace(made, sizes=made.sizes[::2], losses=made.losses[:, ::2])


@cache
def study(method: str = "blend") -> Study:
    """Of `table`; budget and target as above."""
    return of(table(), method)


def of(losses: LossTable, method: str = "blend") -> Study:
    """Of any table."""
    found = select(losses, BUDGET, TARGET, method)
    return study_of_table(losses, found, "losses.csv")


def kernels(labels: list[str]) -> Kernels:
    draw = np.random.default_rng(0)
    points = {
        label: [
            KernelPoint(size, *draw.uniform(1, 40, 2), *draw.uniform(0.01, 1, 3))
            for size in (0.0, 100.0, 200.0, 400.0)
        ]
        for label in labels
    }
    points[labels[0]][1] = replace(points[labels[0]][1], drift=None, predicted=None)
    return Kernels(points, 64)


@cache
def full_study(names: tuple[str, ...] | None = None) -> Study:
    """Truth, kernels, stops and a further table; with names, the six curves under as many."""
    made = study()
    names = names or tuple(one.name for one in made.candidates)
    candidates = [
        replace(
            made.candidates[place % len(made.candidates)],
            name=name,
            label=name,
            stop=f"{name} stopped",
        )
        for place, name in enumerate(names)
    ]
    return replace(
        made,
        candidates=candidates,
        stop="the ranking is decided",
        kernels=kernels([one.label for one in candidates]),
        extra=[Table("runs", ["model", "size"], [[one.label, "1"] for one in candidates])],
    )
