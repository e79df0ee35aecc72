"""`jachess select-live`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..._io import DataError, MissingExtra
from ..workbench.settings import Columns, Recipe

if TYPE_CHECKING:
    from ..live import LiveSelection

REPORT = "report.html"


def _shown(metavar: str, default: str = "") -> Any:
    """Return tyro's settings for how an option is shown in the help.

    Args:
        metavar: description of the option's value.
        default: description of the default.
    """
    hint = f"(default: {default})" if default else ""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


def select_live(
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL …")],
    task: Annotated[str, tyro.conf.arg(metavar="DATA")],
    columns: Columns = Columns(),  # noqa: B008  frozen
    recipe: Recipe = Recipe(),  # noqa: B008  frozen
    target: Annotated[str | None, _shown("ROWS", "all training rows")] = None,
    rank_by: Annotated[str | None, _shown("SCORE", "loss, of text bpb")] = None,
    method: Annotated[str, _shown("NAME", "blend")] = "blend",
    strategy: Annotated[str, _shown("NAME", "growing")] = "growing",
    budget: Annotated[float | None, _shown("SHARE", "0.125, more of few rows")] = None,
    sizes: Annotated[tuple[int, ...] | None, _shown("ROWS …", "quarters of the budget")] = None,
    history: Annotated[tuple[Path, ...], _shown("FILE|FOLDER …")] = (),
    dev_size: Annotated[int | None, _shown("ROWS", "so few that judging is cheap")] = None,
    keep_winner: Annotated[bool, tyro.conf.FlagCreatePairsOff, _shown("")] = False,
    processes: Annotated[str, _shown("N", "1")] = "1",
    out: Annotated[Path, _shown("FOLDER", "jachess-select")] = Path("jachess-select"),
) -> None:
    """Rank models by the loss they will have in full, by fine-tuning them on small subsets.

    Killed, the same command goes on.  jachess_ext.lab.live.select_live has more settings.

    Args:
        models: Two or more to choose from: paths or hub ids.
        task: train.csv:dev.csv (tsv, jsonl, parquet, .gz), a folder, glue/NAME or hub:NAME;
            for language models train.txt:dev.txt, a piece of text a line.
        columns: Names of the columns.
        recipe: How every model is fine-tuned.
        target: Rows to predict for, such as 10000 or 10k.
        rank_by: accuracy, f1, matthews, brier; of numbers mae, pearson, spearman.
        method: blend, ats, rectified, power, lensllm; subtuning: the largest subset alone;
            zeroshot, modelsize: nothing is trained.
        strategy: growing, dropping (who cannot be the best is run no further), or, with the method
            ats, accept-then-stop (LensLLM's Algorithm 1).
        budget: Largest subset as a share of the target.
        sizes: Rows of the subsets, instead.
        history: Earlier tables of some of these models, on other data.
        dev_size: Dev rows judged on.
        keep_winner: Fine-tune the best on the target's rows, and save it in the folder.
        processes: Runs at a time; or "auto", "local", or an address: on this Ray cluster.
        out: Folder of runs, result and report.

    Raises:
        DataError: What was given cannot be used; nothing has been trained.
        MissingExtra: An optional library is needed and missing.
    """
    uses_ray = not processes.lstrip("-").isdecimal()
    if not uses_ray and int(processes) < 1:
        raise DataError(f"--processes is {processes}; expected at least 1, or a Ray cluster")
    from ...scaling.sheets import parse_size
    from ..live import LiveSettings, choice
    from ..live.report import write_live_selection
    from ..workbench.runs import connect_ray

    if uses_ray:
        connect_ray(processes)
    settings = LiveSettings(
        columns=columns,
        recipe=recipe,
        target=None if target is None else int(parse_size(target)),
        rank_by=rank_by,
        method=method,
        strategy=strategy,
        budget=budget,
        sizes=sizes,
        history=history,
        dev_size=dev_size,
    )
    selection = choice.select_live(
        models,
        task,
        out,
        settings,
        keep_winner=keep_winner,
        processes=1 if uses_ray else int(processes),
        backend="ray" if uses_ray else "loky",
        progress=lambda text: print(text, file=sys.stderr),
    )
    _print(selection)
    print(f"Result: {out / choice.RESULT}; the runs: {out / choice.RECORDS}")
    if selection.winner is not None and selection.winner.error is None:
        print(f"Model: {out / choice.WINNER}")
    try:
        write_live_selection(out / REPORT, selection)
        print(f"Report: {out / REPORT}")
    except MissingExtra as error:
        print(f"no report: {error}; then give the same command again", file=sys.stderr)


def _print(live: LiveSelection) -> None:
    from ..live.report import answer

    search, selection = live.search, live.search.selection()
    if not selection.has_signal:
        print(answer(selection))
    print(f"{live.task}, dev rows judged: {search.test_rows:,}")
    print(selection.text())
    last_scores = {record.model: record.scores for record in live.records}
    if any("perplexity" in scores for scores in last_scores.values()):
        figures = (f"{model} {last_scores[model]['perplexity']:.4g}" for model in selection.ranking)
        print(f"perplexity a token after the last run: {', '.join(figures)}")
    for model, reason in live.stops.items():
        if reason != search.stop:
            print(f"{model}: {reason}")
    print(f"stopped: {search.stop}")
    flops = live.flops
    parts = {name: flops[name] for name in ("training", "judging")}
    shares = (f"{name} {100 * cost / flops['spent']:.2g} %" for name, cost in parts.items() if cost)
    print(
        f"cost {flops['spent']:.3g} FLOPs ({', '.join(shares)}), "
        f"{100 * flops['spent'] / flops['full_tuning']:.3g} % of training all models in full"
    )
    if live.winner is not None:
        outcome = live.winner.summary(live.rank_by)
        print(f"{live.winner.model} trained on {live.winner.size} rows: {outcome}")
