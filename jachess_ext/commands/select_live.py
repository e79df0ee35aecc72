"""`jachess select-live`: fine-tune the candidates on subsets and rank them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._io import DataError, MissingExtra, require
from .option_types import ending_in, whole
from .records import print_records
from .select import OF_TABLES

if TYPE_CHECKING:
    from ..scaling import LiveSelection

REPORT = "report.html"


def share(text: str) -> float:
    """Return the share that 1/8, 0.125 or 12.5% is.

    Raises:
        argparse.ArgumentTypeError: it is none of these, or not above 0 and at most 1.
    """
    above, slash, below = text.strip().removesuffix("%").partition("/")
    try:
        value = float(above) / (float(below) if slash else 1.0) / (100 if "%" in text else 1)
    except (ValueError, ZeroDivisionError):
        value = float("nan")
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share up to 1, such as 1/8 or 12.5%")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jachess select-live`; those not given are left to `select_live`."""
    what = parser.add_argument_group("what", argument_default=argparse.SUPPRESS)
    what.add_argument(
        "--models", nargs="+", required=True, metavar="PATH_OR_HUB_ID", help="two or more"
    )
    what.add_argument(
        "--task",
        required=True,
        metavar="DATA",
        help="train.csv:dev.csv (or tsv, jsonl, parquet, .gz), a folder, glue/NAME, hub:NAME",
    )
    what.add_argument("--text-column", metavar="NAME", help="default text")
    what.add_argument("--pair-column", metavar="NAME", help="default: text_pair, if there is one")
    what.add_argument("--label-column", metavar="NAME", help="default label")
    what.add_argument("--regression", action="store_true", help="labels are numbers to predict")
    what.add_argument("--target", type=whole, metavar="D", help="default: all training rows")
    what.add_argument(
        "--rank-by",
        metavar="SCORE",
        help="loss (default), accuracy, f1, matthews, brier; regressions: mae, pearson, spearman",
    )
    how = parser.add_argument_group("subsets and stops", argument_default=argparse.SUPPRESS)
    how.add_argument(
        "--method", choices=(*OF_TABLES, "logme", "hscore", "knn"), help="default blend"
    )
    how.add_argument(
        "--budget",
        type=share,
        metavar="SHARE",
        help="the largest subset as a share of the target, at most; default 1/8",
    )
    how.add_argument(
        "--flops", type=float, metavar="N", help="limit of all runs together; default none"
    )
    how.add_argument(
        "--sizes", type=int, nargs="+", metavar="D", help="default: quarters of the largest"
    )
    how.add_argument(
        "--strategy",
        choices=("growing", "algorithm1"),
        help="growing (default): all models on small subsets first; algorithm1: from the largest "
        "down, with --gamma, --tau",
    )
    how.add_argument("--gamma", type=int, help="ats: points accepted unseen, default 3")
    how.add_argument("--tau", type=float, help="ats: deviations that stop it, default 5")
    how.add_argument(
        "--confidence", type=float, metavar="P", help="end when a model is best with probability P"
    )
    how.add_argument(
        "--drop", type=float, metavar="P", help="give up models that are best with less than P"
    )
    how.add_argument(
        "--screen",
        type=share,
        metavar="SHARE",
        help="fine-tune only this share of the models, the best by their frozen features",
    )
    how.add_argument("--screen-by", choices=("logme", "hscore", "knn"), help="default logme")
    how.add_argument("--screen-rows", type=int, metavar="N", help="rows for that, default 512")
    how.add_argument(
        "--seeds", type=int, metavar="N", help="at most, of models the ranking is open among"
    )
    how.add_argument(
        "--probe", type=int, metavar="N", help="rows Θ is measured on, default 0; lensllm: 32"
    )
    how.add_argument(
        "--dev-size", type=int, metavar="N", help="dev rows judged on; default: few, see the docs"
    )
    train = parser.add_argument_group("training", argument_default=argparse.SUPPRESS)
    train.add_argument("--epochs", type=float, metavar="N", help="default 5")
    train.add_argument("--batch-size", type=int, metavar="N", help="default 16")
    train.add_argument("--lr", type=float, metavar="X", help="default 2e-5, with --lora 1e-4")
    train.add_argument("--lora", action="store_true", help="peft, r 8, alpha 16")
    train.add_argument("--bf16", action="store_true")
    train.add_argument("--gradient-accumulation", type=int, metavar="N", help="default 1")
    train.add_argument("--gradient-checkpointing", action="store_true")
    train.add_argument("--max-length", type=int, metavar="TOKENS", help="default 128")
    train.add_argument("--seed", type=int, help="of head, order and dropout, default 0")
    train.add_argument("--data-seed", type=int, help="of which rows a subset has, default 0")
    where = parser.add_argument_group("where", argument_default=argparse.SUPPRESS)
    where.add_argument("--processes", type=whole, metavar="N", help="runs at a time, default 1")
    where.add_argument("--threads", type=whole, metavar="N", help="of each process, default 1")
    where.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; default: the GPU")
    where.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS", help="fan out on a Ray cluster"
    )
    where.add_argument(
        "--keep-winner", action="store_true", help="fine-tune the best on the target, and save it"
    )
    where.add_argument(
        "--out", type=Path, default=Path("jachess-select"), metavar="FOLDER", help="%(default)s"
    )
    where.add_argument(
        "--report", type=ending_in(".html", ".htm"), metavar="FILE.html", help="default: in --out"
    )


def run(options: argparse.Namespace) -> None:
    """Select, print, and write the folder --out.

    Raises:
        ValueError: what was given cannot be used; nothing has been trained.
        MissingExtra: an optional library is needed and missing.
    """
    given = {name: value for name, value in vars(options).items() if name != "command"}
    if "device" in given:
        use_device(given.pop("device"))
    require("transformers")
    from ..compare.runs import connect_ray
    from ..compare.settings import Columns, Recipe
    from ..scaling.live import RECORDS, RESULT, WINNER, select_live

    names = ("text_column", "pair_column", "label_column", "regression")
    columns = {n.removesuffix("_column"): given.pop(n) for n in names if n in given}
    recipe = {f.name: given.pop(f.name) for f in fields(Recipe) if f.name in given}
    if "ray" in given:
        connect_ray(given.pop("ray"))
        given["backend"] = "ray"
    out, report = given.pop("out"), given.pop("report", None)
    live = select_live(
        given.pop("models"),
        given.pop("task"),
        out,
        columns=Columns(**columns),
        recipe=Recipe(**recipe),
        progress=lambda text: print(text, file=sys.stderr),
        **given,
    )
    _print(live)
    print(f"Result: {out / RESULT}; the runs: {out / RECORDS}")
    if live.winner is not None and live.winner["error"] is None:
        print(f"Model: {out / WINNER}")
    _report(live, report or out / REPORT)


def use_device(name: str) -> None:
    """Let this process and those it starts see the device alone.

    Trainer would spread a run over all the GPUs it sees; for several, each with runs of its own,
    there is Ray.

    Args:
        name: "cpu", "cuda" (the first GPU) or "cuda:N".

    Raises:
        DataError: another name, no such GPU, or CUDA is in use already.
    """
    import torch

    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise DataError(f"the device {name!r} is not known; expected cpu, cuda or cuda:N")
    if torch.cuda.is_initialized():
        raise DataError("CUDA is in use in this process; choose the device before anything runs")
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    seen = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    place, count = int(match[1] or 0), torch.cuda.device_count()
    if place >= count:
        raise DataError(f"the device {name} is not there: this machine has {count} GPUs to use")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[place] if seen else str(place)


def _report(live: LiveSelection, path: Path) -> None:
    """Write the page; without the libraries for it, say so and how to have it later."""
    from ..compare.selection import view_of_live, write_selection

    try:
        write_selection(path, view_of_live(live))
    except MissingExtra as error:
        print(f"no report: {error}; then give the same command again", file=sys.stderr)
        return
    print(f"Report: {path}")


def _print(live: LiveSelection) -> None:
    from ..scaling.live import from_forecast, ranked_loss

    search, rank_by = live.search, live.rank_by
    print(
        f"{search.method}, {live.task}: predicted dev {rank_by} with {search.target} rows, "
        f"from {100 * live.share:.3g} % of them"
    )
    runs = live.to_frame()
    trained = runs[(runs["size"] > 0) & runs["loss"].notna()].groupby("candidate")["size"].nunique()
    frame = search.selection().to_frame()
    rows: list[dict[str, Any]] = []
    for row in frame.itertuples():
        rows.append({"rank": row.rank, "model": row.name, "sizes": int(trained.get(row.name, 0))})
        if frame["predicted"].isna().all():
            rows[-1]["score"] = row.score
            continue
        rows[-1]["predicted"] = from_forecast(rank_by, row.predicted)
        if frame["prob_best"].notna().all():
            low, high = sorted(from_forecast(rank_by, end) for end in (row.low, row.high))
            rows[-1] |= {"low": low, "high": high, "prob_best": row.prob_best}
    print_records(rows)
    for model, reason in live.stops.items():
        if reason != search.stop:
            print(f"{model}: {reason}")
    print(f"stopped: {search.stop}")
    flops = live.flops
    parts = {name: flops[name] for name in ("training", "judging", "probe", "features")}
    shares = (f"{name} {100 * cost / flops['spent']:.2g} %" for name, cost in parts.items() if cost)
    print(
        f"cost {flops['spent']:.3g} FLOPs ({', '.join(shares)}), "
        f"{100 * flops['spent'] / flops['full_tuning']:.3g} % of training all models in full"
    )
    winner = live.winner
    if winner is not None and winner["error"] is not None:
        print(f"{winner['model']} could not be trained on all rows: {winner['error']}")
    elif winner is not None:
        loss = ranked_loss(winner, rank_by)
        assert loss is not None, "the run did not fail"
        measured = from_forecast(rank_by, loss)
        print(f"{winner['model']} trained on {winner['size']} rows: dev {rank_by} {measured:.4g}")
