"""`jachess select`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._io import DataError, write_json, write_text
from ..._text import scientific_text
from . import check_ending

if TYPE_CHECKING:
    from ...scaling import LossTable


def parsed(words: Sequence[str]) -> partial[None]:
    """Parse the words of a command line; return `select` with the options bound.

    Raises:
        SystemExit: the options are invalid, or the help was requested.
    """
    from ...scaling.sheets import parse_size as size

    parser = argparse.ArgumentParser("jachess select", description=select.__doc__)
    option = parser.add_argument
    rows: dict[str, Any] = {"type": size, "metavar": "ROWS"}
    several: dict[str, Any] = {"nargs": "*", "action": "extend"}
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    text = "csv, markdown, JSON or xlsx with a row a model or a row a run; or a folder of runs"
    option("table", type=Path, help=f"{text} of Trainer or lm-evaluation-harness")
    option("--target", required=True, **rows, help="size of the full data, such as 10000 or 10k")
    text = "what the numbers are: loss, accuracy, eval_f1, …; without it: as the table says"
    option("--metric", help=text)
    option(
        "--method",
        help="blend (the default), lensllm, rectified, power, ats, subtuning, zeroshot, modelsize",
    )
    option("--budget", **rows, help="largest size used; without it: the largest below the target")
    text = "told apart: models still at the level of guessing are named, and intervals widen"
    option("--classes", type=int, metavar="C", help=text)
    text = "earlier tables of some of these models, on other data: files, or folders of them"
    option("--history", **several, metavar="FILE|FOLDER", help=text)
    option("--history-metric", help="what the numbers are in those that do not say it themselves")
    option(
        "--read",
        **several,
        metavar="NAME VALUE",
        help="how to read it, in pairs: model, size and seed with columns (of folders with regular "
        "expressions), decimal, test_rows, full and sheet with what read_table takes; and any "
        "column of words with a cell of it, such as task rte, to read those rows alone",
    )
    text = "columns or models (of a folder runs) to leave out"
    option("--ignore", **several, metavar="NAME", help=text)
    text = "tokens of an example (1 where sizes are tokens), for FLOPs; without it costs are shares"
    option("--tokens", type=float, help=text)
    option("--epochs", type=float, help="epochs over every subset, for the FLOPs (1)")
    option("--out", **file, help="file for the ranking, .csv or .json")
    text = "file for one page of curves, predictions, ranking and cost, .html"
    option("--report", **file, help=text)
    options = {k: v for k, v in vars(parser.parse_args(words)).items() if v is not None}
    read = options.get("read", [])
    if len(read) % 2:
        parser.error(f"--read takes pairs of a name and a value, not {shlex.join(read)}")
    options["read"] = dict(zip(read[::2], read[1::2], strict=True))
    return partial(select, **options, words=words)


def select(
    table: Path,
    target: float,
    metric: str | None = None,
    method: str = "blend",
    budget: float | None = None,
    classes: int | None = None,
    history: Sequence[str] = (),
    history_metric: str | None = None,
    read: Mapping[str, str] = {},
    ignore: Sequence[str] = (),
    tokens: float | None = None,
    epochs: float = 1.0,
    out: Path | None = None,
    report: Path | None = None,
    words: Sequence[str] = (),
) -> None:
    """Rank models by the loss or score they will have in full, from runs on small subsets."""
    from ... import scaling

    check_ending(out, ".csv", ".json")
    check_ending(report, ".html", ".htm")
    reader: Callable[..., LossTable] = scaling.read_runs if table.is_dir() else scaling.read_table
    reading = _reading(read, ignore, folder=table.is_dir())
    settings: dict[str, Any] = {"tokens": tokens, "epochs": epochs, "classes": classes}
    try:
        losses = reader(table, **{"metric": metric, **reading})
        earlier = [(path, history_metric) for path in history]
        selection = scaling.select(losses, budget, target, method, history=earlier, **settings)
    except scaling.TableError as error:
        if not error.options:
            raise
        command = _command(words, ignore, error.options)
        raise DataError(f"{error.args[0]}, as in\n  {command}") from None
    if len(selection.names) < 2:
        reasons = "; ".join((*selection.unranked.values(), *selection.notes))
        raise DataError(f"{selection.names[0]} alone can be ranked, which says nothing; {reasons}")
    # FLOPs, unlike the ranking, need the models' sizes, and are left out if the table lacks them.
    costs: dict[str, float | None] = {"flops": None, "full_flops": None}
    with suppress(scaling.TableError):
        costs = {"flops": selection.flops, "full_flops": selection.full_flops}
    facts = {name: getattr(selection, name) for name in ("method", "budget", "target")}
    if report is not None:
        from ..live.report import write_selection

        parts = {"this selection": costs["flops"], "all models in full": costs["full_flops"]}
        write_selection(
            report,
            selection,
            "Which model to fine-tune",
            [
                f"Losses of {len(losses.names)} models in {table.name}, read up to "
                f"{selection.budget:,.0f} examples.",
                *(f"Not ranked: {reason}." for reason in selection.unranked.values()),
            ],
            costs=[(what, cost) for what, cost in parts.items() if cost is not None],
            in_flops=tokens is not None,
            settings={"table": table.name, **facts, **settings},
        )
    if out is not None:  # pandas takes half a second to load
        rows = selection.to_frame().drop(columns=["cost", "full_cost"])
        if selection.forecast.predicted is not None:
            rows = rows.drop(columns="score")
        rows = rows.dropna(axis=1, how="all")
        if out.suffix == ".csv":
            write_text(out, rows.to_csv(index=False))
        else:
            facts |= {"metric": losses.metric, "advice": selection.advice}
            facts |= {"history": selection.history_note, "left_out": losses.left_out}
            flops = costs if tokens is not None else {}
            write_json(out, {**facts, **flops, "rows": rows.to_dict("records")})
    print(selection.text())
    if costs["flops"] is not None:
        percent = 100 * selection.flops / selection.full_flops
        recipe = "" if tokens is None else f"{epochs:g} epochs of {tokens:g} tokens an example"
        spent = f"{scientific_text(selection.flops)} FLOPs ({recipe}), " if recipe else ""
        print(f"This cost {spent}{percent:.3g} % of training all models in full.")
    for path in filter(None, (out, report)):
        print(f"written to {path}")


def _reading(read: Mapping[str, str], ignore: Sequence[str], folder: bool) -> dict[str, Any]:
    """Return the arguments of `read_table` (or, of a folder, `read_runs`) from the values of the
    options `--read` and `--ignore`."""
    names = ["model", "size", "value", "test_rows"]
    if folder and (unknown := sorted({*read} - {*names})):
        raise DataError(f"--read knows {', '.join(names)} here, not {unknown[0]!r}")
    if folder and "model" not in read:
        raise DataError("a folder needs --read model PATTERN, such as '^([^/]+)/': see read_runs")
    from ...scaling.sheets import parse_size

    counts = {"test_rows", "full", "sheet", "fewest"} & read.keys()
    return {**read, "ignore": ignore, **{name: int(parse_size(read[name])) for name in counts}}


def _command(words: Sequence[str], ignore: Sequence[str], answers: Mapping[str, Any]) -> str:
    """Return a command line of `select` with options added that resolve an ambiguity.

    Args:
        words: the command line, without the command's name.
        ignore: names that it ignores.
        answers: arguments of the reader.
    """
    command = ["jachess", "select", *words]
    for name, value in answers.items():
        if name == "ignore":
            command += ["--ignore", *(x for x in value if x not in ignore)]
        else:
            option = [f"--{name}"] if name in ("metric", "tokens") else ["--read", name]
            command += [*option, str(value)]
    return shlex.join(command)
