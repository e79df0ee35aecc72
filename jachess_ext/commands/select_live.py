"""`jachess select-live`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import tyro

from .._io import DataError, MissingExtra, require
from ..compare.settings import Columns, Recipe
from . import check_ending, print_frame, use_device

if TYPE_CHECKING:
    from ..scaling import LiveSelection

REPORT = "report.html"


class LiveOptions(TypedDict, total=False):
    """Settings that are `select_live`'s own where they are not given.

    Attributes:
        target: Rows to predict for; default all training rows.
        rank_by: loss (default), accuracy, f1, matthews, brier; regressions: mae, pearson, spearman.
        method: As for jachess select, or logme, hscore, knn; default blend.
        budget: Largest subset as a share of the target, at most; default 1/8, more of few rows.
        flops: Limit of all runs' FLOPs together; default none.
        sizes: Subsets' rows; default quarters of the largest.
        strategy: growing (default): all models on small subsets first; algorithm1: from the largest
            down, with gamma and tau.
        gamma: ats and algorithm1: points accepted unseen; default 3.
        tau: ats and algorithm1: deviations that stop it; default 5.
        confidence: End when a model is best with this probability.
        drop: Give up models that are best with less than this probability.
        screen: Fine-tune only this share of the models, the best by their frozen features.
        screen_by: logme (default), hscore or knn.
        screen_rows: Rows for that; default 512.
        seeds: Runs of a model and size, at most, of models the ranking is open among; default 1.
        probe: Rows that Θ is measured on; default 0, with lensllm 32.
        dev_size: Dev rows judged on; default few, see the docs.
        seed: Of head, order and dropout; default 0.
        data_seed: Of which rows a subset has; default 0.
    """

    target: int
    rank_by: str
    method: str
    budget: float
    flops: float
    sizes: tuple[int, ...]
    strategy: Literal["growing", "algorithm1"]
    gamma: int
    tau: float
    confidence: float
    drop: float
    screen: float
    screen_by: Literal["logme", "hscore", "knn"]
    screen_rows: int
    seeds: int
    probe: int
    dev_size: int
    seed: int
    data_seed: int


def select_live(
    models: tuple[str, ...],
    task: str,
    settings: Annotated[LiveOptions, tyro.conf.arg(name="")],
    columns: Columns = Columns(),  # noqa: B008  frozen
    recipe: Recipe = Recipe(),  # noqa: B008  frozen
    processes: int = 1,
    threads: int = 1,
    device: str | None = None,
    ray: str | None = None,
    keep_winner: bool = False,
    out: Path = Path("jachess-select"),
    report: Path | None = None,
) -> None:
    """Rank models by the loss they will have in full, by fine-tuning them on small subsets.

    Args:
        models: Two or more, paths or hub ids.
        task: train.csv:dev.csv (or tsv, jsonl, parquet, .gz), a folder, glue/NAME, hub:NAME.
        settings: What is run and when it stops.
        columns: Columns of the files.
        recipe: How every model is fine-tuned.
        processes: Runs at a time.
        threads: Threads of each process.
        device: cpu, cuda or cuda:N; None: the GPU.
        ray: Run on a Ray cluster: its address, "auto" or "local".
        keep_winner: Fine-tune the best on the target's rows, and save it.
        out: Folder of runs and result; the same command goes on from it.
        report: File of the page, .html; None: in the folder.

    Raises:
        DataError: What was given cannot be used; nothing has been trained.
        MissingExtra: An optional library is needed and missing.
    """
    check_ending(report, ".html", ".htm")
    for name, value in (("processes", processes), ("threads", threads)):
        if value < 1:
            raise DataError(f"--{name} is {value}; expected at least 1")
    if device is not None:
        use_device(device)
    require("transformers", extra="hf")
    from ..compare.runs import connect_ray
    from ..compare.selection import view_of_live, write_selection
    from ..scaling import live

    if ray is not None:
        connect_ray(ray)
    selection = live.select_live(
        models,
        task,
        out,
        columns=columns,
        recipe=recipe,
        keep_winner=keep_winner,
        processes=processes,
        threads=threads,
        backend="loky" if ray is None else "ray",
        progress=lambda text: print(text, file=sys.stderr),
        **settings,
    )
    _print(selection)
    print(f"Result: {out / live.RESULT}; the runs: {out / live.RECORDS}")
    if selection.winner is not None and selection.winner["error"] is None:
        print(f"Model: {out / live.WINNER}")
    try:
        write_selection(report or out / REPORT, view_of_live(selection))
        print(f"Report: {report or out / REPORT}")
    except MissingExtra as error:
        print(f"no report: {error}; then give the same command again", file=sys.stderr)


def _print(live: LiveSelection) -> None:
    from ..scaling.runs import from_forecast
    from ..scaling.trial import ranked_loss

    search, rank_by = live.search, live.rank_by
    print(
        f"{search.method}, {live.task}: predicted dev {rank_by} with {search.target} rows, "
        f"from {100 * live.share:.3g} % of them"
    )
    runs = live.to_frame()
    trained = runs[(runs["size"] > 0) & runs["loss"].notna()].groupby("candidate")["size"].nunique()
    frame = search.selection().to_frame().rename(columns={"name": "model"})
    frame.insert(2, "sizes", frame["model"].map(trained).fillna(0).astype(int))
    columns = ["rank", "model", "sizes", "score"]
    if frame["predicted"].notna().any():
        columns[3:] = ["predicted"]
        if frame["prob_best"].notna().all():
            columns += ["low", "high", "prob_best"]
        ends: Any = from_forecast(rank_by, frame[["low", "high"]])
        frame["low"], frame["high"] = ends.min(axis=1), ends.max(axis=1)
        frame["predicted"] = from_forecast(rank_by, frame["predicted"])
    print_frame(frame[columns])
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
