"""`jachess select --models …`: fine-tunes the candidates on subsets and ranks them."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from ..evaluation.extras import MissingExtra
from ..experiment.grid import Recipe
from ..live_selection.budget import Budget
from ..live_selection.devices import use_device
from ..live_selection.engine import select_live
from ..live_selection.result import LiveSelection, Prediction
from ..live_selection.scores import from_forecast
from ..live_selection.settings import FORMER_ORDER, LiveSettings
from ..live_selection.store import RECORDS, RESULT
from ..progress import BarProgress
from ..tasks.files import Columns
from . import live_arguments
from .option_types import fields_in
from .records import print_records

OUT = Path("jachess-select")
REPORT = "report.html"


def run(options: argparse.Namespace) -> None:
    """Selects, prints, and writes the folder --out.

    Raises:
        ValueError: what was given cannot be used; nothing has been trained.
        MissingExtra: an optional library is needed and missing.
    """
    live = live_arguments.given(options)
    if "device" in live:
        use_device(live["device"])
    settings = settings_of(options)
    size = {name: live.get(name, 1) for name in ("processes", "threads")}
    for name, count in size.items():
        if count < 1:
            raise ValueError(f"--{name} is {count}; expected at least 1")
    runner = None
    if "ray" in live:
        from ..live_selection.ray_jobs import ray_runner

        gpus = 0 if live.get("device") == "cpu" else None
        runner = ray_runner(live["ray"], threads=size["threads"], gpus=gpus)
    out = options.out or OUT
    with BarProgress() as progress:
        found = select_live(settings, out, **size, runner=runner, progress=progress)
    _print(found)
    print(f"Result: {out / RESULT}; the runs: {out / RECORDS}")
    if found.winner is not None and found.winner.error is None:
        print(f"Model: {out / 'winner'}")
    _report(out, options)


def _report(folder: Path, options: argparse.Namespace) -> None:
    """Writes the page; without the libraries for it, says so and how to have it later."""
    from ..compare.selection import view_of_live, write_selection
    from ..scaling.live import read_selection

    path = options.report or folder / REPORT
    try:
        write_selection(path, view_of_live(read_selection(folder)))
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
    live = live_arguments.given(options)
    for name in ("train", "dev"):
        if name not in live:
            raise ValueError(f"--models needs --{name} FILE")
    if options.reference:
        raise ValueError("--reference is for tables; a live selection has no loss at the target")
    if options.target is not None and options.target != int(options.target):
        raise ValueError(f"--target is {options.target:g}; expected a whole number of examples")
    live |= {name: value for name in _SHARED if (value := getattr(options, name)) is not None}
    rates = tuple(live.pop("lr", ()))
    columns = {name.removesuffix("_column"): value for name, value in live.items()}
    settings = fields_in(LiveSettings, live)
    if settings.get("order") == FORMER_ORDER:
        settings["order"] = "algorithm1"
        print(
            "note: --order halving is now called algorithm1; successive halving is promotion",
            file=sys.stderr,
        )
    if options.budget is not None:
        settings["budget"] = Budget.parse(options.budget)
    if options.target is not None:
        settings["target"] = int(options.target)
    return LiveSettings(
        columns=Columns(**fields_in(Columns, columns)),
        rates=rates,
        recipe=Recipe(lr=rates[0] if rates else None, **fields_in(Recipe, live)),
        **settings,
    )


_SHARED = ("method", "gamma", "tau", "confidence", "level", "epochs")


def _print(found: LiveSelection) -> None:
    print(
        f"{found.method}, {found.task}: predicted dev {found.rank_by} with {found.target} rows, "
        f"from {100 * found.share:.3g} % of them"
    )
    runs = {one.model: one for one in found.candidates}
    rates = {one.rate for one in found.candidates}
    rows = []
    for rank, one in enumerate(found.ranking, start=1):
        sizes = sum(size > 0 for size in runs[one.model].sizes)
        tried = {"lr": f"{runs[one.model].rate:g}"} if len(rates) > 1 else {}
        figures = _figures(one, found.rank_by)
        rows.append({"rank": rank, "model": one.model, "sizes": sizes, **tried, **figures})
    print_records(rows)
    for candidate in found.candidates:
        if candidate.stop != found.stop:
            print(f"{candidate.model}: {candidate.stop}")
    print(f"stopped: {found.stop}")
    flops = found.flops
    parts = {name: getattr(flops, name) for name in ("training", "judging", "probe", "features")}
    shares = (f"{name} {100 * part / flops.spent:.2g} %" for name, part in parts.items() if part)
    print(
        f"cost {flops.spent:.3g} FLOPs ({', '.join(shares)}), {100 * flops.share:.3g} % of "
        "training all models in full"
    )
    winner = found.winner
    if winner is not None and winner.error is not None:
        print(f"{winner.model} could not be trained on all rows: {winner.error}")
    elif winner is not None:
        measured = from_forecast(found.rank_by, winner.to_rank_by(found.rank_by))
        print(
            f"{winner.model} trained on {winner.size} rows: dev {found.rank_by} {measured:.4g}; "
            f"that took another {winner.flops:.3g} FLOPs"
        )


def _figures(one: Prediction, rank_by: str) -> dict[str, float]:
    """What the method has of a model, in the score's own terms; methods have the same of all."""
    if one.predicted is None:
        return {"score": one.score}
    found = {"predicted": from_forecast(rank_by, one.predicted)}
    if one.low is not None and one.prob_best is not None:
        ends = (one.low, math.inf if one.high is None else one.high)
        low, high = sorted(from_forecast(rank_by, end) for end in ends)
        found |= {"low": low, "high": high, "prob_best": one.prob_best}
    return found
