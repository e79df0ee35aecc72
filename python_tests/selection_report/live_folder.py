"""A finished live selection's folder, its runs made up: losses follow Eq. 10 with noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from jachess_ext.live_selection import (
    Candidate,
    Flops,
    LiveSelection,
    RunRecord,
    Seconds,
    SelectionFolder,
)
from jachess_ext.live_selection.predict import Curve, predict
from python_tests.live_selection.test_predict import LAWS, TARGET, curve_of

SIZES = (0, 50, 100, 200, 400)
METHODS = ("blend", "ats", "subtuning")


def curves(names: tuple[str, ...] = ("zoo/a", "zoo/b", "zoo/c"), short: int = 0) -> list[Curve]:
    """Of five sizes; the last model lacks the largest `short` ones."""
    draw = np.random.default_rng(0)
    made = []
    for seed, (name, law) in enumerate(zip(names, LAWS.values(), strict=False)):
        curve, _ = curve_of(name, seed, law, SIZES)
        records = tuple(
            _priced(r, float(np.exp(0.01 * draw.standard_normal()))) for r in curve.records
        )
        kept = len(SIZES) - short * (name == names[-1])
        made.append(Curve(records[:kept], curve.kernels[:kept]))
    return made


def _priced(record: RunRecord, factor: float) -> RunRecord:
    assert record.dev_loss is not None
    parameters = 1000 + 500 * (ord(record.model[-1]) % 3)
    return replace(
        record,
        run=record.run.replace("/", "_"),
        kernel=record.kernel.replace("/", "_") if record.kernel else None,
        parameters=parameters,
        dev_loss=record.dev_loss * factor,
        dev_score=0.5,
        kernel_loss=3.0,
        residual_square=4.0,
        probe_square=2.0,
        training_flops=6.0 * parameters * record.tokens,
        probe_flops=1e6,
        seconds=Seconds(1.0, 0.5, 0.25),
    )


def make(folder: Path, made: list[Curve], truth: dict[str, float] | None = None) -> LiveSelection:
    """Writes the folder; `truth` adds runs at the target that the selection did not read."""
    store = SelectionFolder(folder)
    records = [record for curve in made for record in curve.records]
    with store.locked():
        for curve in made:
            for record, kernel in zip(curve.records, curve.kernels, strict=True):
                store.add(record, kernel)
        full = [
            replace(
                *(curve.records[-1],),
                run=f"m{n}-{TARGET}-s0",
                kernel=None,
                size=TARGET,
                dev_loss=truth[curve.model],
            )
            for n, curve in enumerate(made)
            if truth is not None
        ]
        for record in full:
            store.add(record, None)
        store.assemble(records)
        found = selection(made, records)
        store.write_selection(found)
    return found


def selection(made: list[Curve], records: list[RunRecord]) -> LiveSelection:
    training = sum(record.training_flops for record in records)
    full = sum(60.0 * curve.records[0].parameters * TARGET for curve in made)
    return LiveSelection(
        task="sentiment",
        train_rows=TARGET,
        dev_rows=200,
        method="blend",
        target=TARGET,
        level=0.9,
        order="growing",
        budget="1/16",
        sizes=SIZES[1:],
        candidates=tuple(
            Candidate(
                curve.model,
                curve.records[0].parameters,
                tuple(r.size for r in curve.records),
                "every planned size was run",
                1e-3,
            )
            for curve in made
        ),
        predictions={method: predict(made, TARGET, method) for method in METHODS},
        missing={"a method": "too few sizes"},
        stop="every planned size was run",
        flops=Flops(training, 1e6 * len(records), 1e7, 0.0, full, full / 16),
        seconds=12.0,
    )
