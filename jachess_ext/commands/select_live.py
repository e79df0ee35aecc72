"""`jachess select --models …`: fine-tunes the candidates on subsets and ranks them."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from ..evaluation.extras import MissingExtra
from ..experiment.grid import Recipe
from ..live_selection.budget import Budget
from ..live_selection.engine import select_live
from ..live_selection.result import LiveSelection, Prediction
from ..live_selection.settings import LiveSettings
from ..live_selection.store import RECORDS, RESULT
from ..progress import BarProgress
from ..tasks.files import Columns
from . import live_arguments
from .records import print_records

OUT = Path("jachess-select")
REPORT = "report.html"


def run(options: argparse.Namespace) -> None:
    """Selects, prints, and writes the folder --out.

    Raises:
        ValueError: what was given cannot be used; nothing has been trained.
        MissingExtra: an optional library is needed and missing.
    """
    settings = settings_of(options)
    live = live_arguments.complete(options)
    for name in ("processes", "threads"):
        if live[name] < 1:
            raise ValueError(f"--{name} is {live[name]}; expected at least 1")
    runner = None
    if live["ray"] is not None:
        from ..live_selection.ray_jobs import ray_runner

        runner = ray_runner(live["ray"], threads=live["threads"])
    out = options.out or OUT
    with BarProgress() as progress:
        found = select_live(
            *(settings, out),
            processes=live["processes"],
            threads=live["threads"],
            runner=runner,
            progress=progress,
        )
    _print(found)
    print(f"Result: {out / RESULT}; the runs: {out / RECORDS}")
    _report(out, options)


def _report(folder: Path, options: argparse.Namespace) -> None:
    """Writes the page; without the libraries for it, says so and how to have it later."""
    from ..selection_report.from_live import study_of_folder
    from ..selection_report.page import write_page

    path = options.report or folder / REPORT
    try:
        write_page(path, study_of_folder(folder, gamma=options.gamma, tau=options.tau))
    except MissingExtra as error:
        print(f"no report: {error}; then give the same command again", file=sys.stderr)
        return
    print(f"Report: {path}")


def settings_of(options: argparse.Namespace) -> LiveSettings:
    """The selection asked for.

    Raises:
        DataError: a setting out of range.
        ValueError: an option missing, or one that only tables have.
    """
    live = live_arguments.complete(options)
    for name in ("train", "dev"):
        if live[name] is None:
            raise ValueError(f"--models needs --{name} FILE")
    if options.reference:
        raise ValueError("--reference is for tables; a live selection has no loss at the target")
    if options.target is not None and options.target != int(options.target):
        raise ValueError(f"--target is {options.target:g}; expected a whole number of examples")
    epochs = {} if options.epochs is None else {"epochs": options.epochs}
    names = ("text", "pair", "label")
    same = ("order", "drop", "probe", "seed", "data_seed", "dev_size", "train", "dev")
    settings: dict[str, Any] = {name: getattr(options, name) for name in _SHARED}
    settings |= {name: live[name] for name in same}
    if options.budget is not None:
        settings["budget"] = Budget.parse(options.budget)
    return LiveSettings(
        models=tuple(live["models"]),
        sizes=None if live["sizes"] is None else tuple(live["sizes"]),
        target=None if options.target is None else int(options.target),
        columns=Columns(**{name: live[f"{name}_column"] for name in names}),
        recipe=Recipe(
            batch_size=live["batch_size"], lr=live["lr"], max_length=live["max_length"], **epochs
        ),
        **settings,
    )


_SHARED = ("method", "gamma", "tau", "confidence", "level")


def _print(found: LiveSelection) -> None:
    print(
        f"{found.method}, {found.task}: predicted dev loss with {found.target} rows, from "
        f"{100 * found.share:.3g} % of them"
    )
    runs = {one.model: one for one in found.candidates}
    rows = []
    for rank, one in enumerate(found.ranking, start=1):
        sizes = len(runs[one.model].sizes) - 1
        rows.append({"rank": rank, "model": one.model, "sizes": sizes, **_figures(one)})
    print_records(rows)
    for candidate in found.candidates:
        if candidate.stop != found.stop:
            print(f"{candidate.model}: {candidate.stop}")
    print(f"stopped: {found.stop}")
    flops = found.flops
    print(
        f"cost {flops.spent:.3g} FLOPs (the kernels {100 * flops.probe / flops.spent:.2g} % of it),"
        f" {100 * flops.share:.3g} % of training all models in full, "
        f"{flops.spent / flops.sub_tuning:.3g} times the largest subset alone"
    )


def _figures(one: Prediction) -> dict[str, float]:
    """What the method has of a model; methods have the same of all."""
    if one.predicted is None:
        return {"score": one.score}
    found = {"predicted": one.predicted}
    if one.low is not None and one.prob_best is not None:
        high = math.inf if one.high is None else one.high
        found |= {"low": one.low, "high": high, "prob_best": one.prob_best}
    return found
