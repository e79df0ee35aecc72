"""`jachess select`."""

from __future__ import annotations

import argparse
import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._io import DataError, write_json, write_text
from . import check_ending

if TYPE_CHECKING:
    from ...scaling import LossTable


def size(text: str) -> float:
    """Parse a number of rows in a usual notation: 10000, 10k, 10,000."""
    from ...scaling.sheets import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parsed(words: Sequence[str]) -> partial[None]:
    """Parse the words of a command line; return `select` with the options bound.

    Raises:
        SystemExit: the options are invalid, or the help was requested.
    """
    parser = argparse.ArgumentParser("jachess select", description=select.__doc__)
    option = parser.add_argument
    rows: dict[str, Any] = {"type": size, "metavar": "ROWS"}
    several: dict[str, Any] = {"nargs": "*", "action": "extend"}
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    option(
        "table",
        type=Path,
        help="a row a model and columns named by sizes, or a row a run: csv, markdown, JSON, xlsx; "
        "or a folder of runs of Trainer or lm-evaluation-harness",
    )
    option("--target", required=True, **rows, help="size of the full data, such as 10000 or 10k")
    option(
        "--metric",
        help="what the numbers are: loss, accuracy, eval_f1, …; without it: as the table says",
    )
    option(
        "--method",
        help="blend (the default), lensllm, rectified, power, ats, subtuning, zeroshot, modelsize",
    )
    option("--budget", **rows, help="largest size used; without it: the largest below the target")
    option(
        "--classes",
        type=int,
        metavar="C",
        help="told apart: models still at the level of guessing are named, and intervals widen",
    )
    option(
        "--history",
        **several,
        metavar="FILE|FOLDER",
        help="earlier tables of some of these models, on other data: files, or folders of them",
    )
    option(
        "--read",
        **several,
        metavar="NAME VALUE",
        help="how to read it, in pairs: model, size and seed with the columns of a table (of "
        "folders with regular expressions), decimal with a decimal comma, test_rows with the "
        "examples a score was measured on, full with the examples of all the data where sizes are "
        "shares of it, sheet with the number of one of several tables; and any column of words "
        "with a cell of it, such as task rte, to read those rows alone",
    )
    ignored = "columns or models (of a folder runs) to leave out"
    option("--ignore", **several, metavar="NAME", help=ignored)
    option(
        "--tokens",
        type=float,
        help="tokens of an example (1 where sizes are tokens), for FLOPs; without it costs are "
        "shares",
    )
    option("--epochs", type=float, help="epochs over every subset, for the FLOPs (1)")
    option("--level", type=float, help="probability of the intervals (0.9)")
    option("--out", **file, help="file for the ranking, .csv or .json")
    page = "file for one page of curves, predictions, ranking and cost, .html"
    option("--report", **file, help=page)
    options = {k: v for k, v in vars(parser.parse_args(words)).items() if v is not None}
    words = options.get("read", [])
    if len(words) % 2:
        parser.error(f"--read takes pairs of a name and a value, not {shlex.join(words)}")
    options["read"] = dict(zip(words[::2], words[1::2], strict=True))
    return partial(select, **options)


def select(
    table: Path,
    target: float,
    metric: str | None = None,
    method: str = "blend",
    budget: float | None = None,
    classes: int | None = None,
    history: Sequence[str] = (),
    read: Mapping[str, str] = {},
    ignore: Sequence[str] = (),
    tokens: float | None = None,
    epochs: float = 1.0,
    level: float = 0.9,
    out: Path | None = None,
    report: Path | None = None,
) -> None:
    """Rank models by the loss or score they will have in full, from runs on small subsets."""
    call = dict(locals())  # the arguments only, from which `_command` rebuilds the command line
    from ... import scaling

    check_ending(out, ".csv", ".json")
    check_ending(report, ".html", ".htm")
    reader: Callable[..., LossTable] = scaling.read_runs if table.is_dir() else scaling.read_table
    reading = _reading(read, ignore, folder=table.is_dir())
    settings: dict[str, Any] = {"tokens": tokens, "epochs": epochs, "classes": classes}
    try:
        losses = reader(table, **{"metric": metric, **reading})
        selection = scaling.select(losses, budget, target, method, history=history, **settings)
    except scaling.TableError as error:
        if not error.options:
            raise
        raise DataError(f"{error.args[0]}, as in\n  {_command(call, error.options)}") from None
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
            level=level,
            costs=[(what, cost) for what, cost in parts.items() if cost is not None],
            settings={"table": table.name, **facts, **settings},
        )
    if out is not None:  # pandas takes half a second to load
        rows = selection.to_frame(level).drop(columns=["cost", "full_cost"])
        if selection.forecast.predicted is not None:
            rows = rows.drop(columns="score")
        rows = rows.dropna(axis=1, how="all")
        if out.suffix == ".csv":
            write_text(out, rows.to_csv(index=False))
        else:
            facts |= {"metric": losses.metric, "advice": selection.advice, "level": level}
            facts |= {"history": selection.history_note} if history else {}
            flops = costs if tokens is not None else {}
            write_json(out, {**facts, **flops, "rows": rows.to_dict("records")})
    print(selection.text(level))
    if costs["flops"] is not None:
        percent = 100 * selection.flops / selection.full_flops
        recipe = "" if tokens is None else f"{epochs:g} epochs of {tokens:g} tokens an example"
        spent = f"{selection.cost_text(selection.flops)} ({recipe}), " if recipe else ""
        print(f"This cost {spent}{percent:.3g} % of training all models in full.")
    for path in filter(None, (out, report)):
        print(f"written to {path}")


def _reading(read: Mapping[str, str], ignore: Sequence[str], folder: bool) -> dict[str, Any]:
    """Return the arguments of `read_table` (or, of a folder, `read_runs`) from the values of the
    options `--read` and `--ignore`."""
    names = ["model", "size", "value", "test_rows"]
    if folder and (unknown := sorted(set(read) - {*names, "ignore"})):
        raise DataError(f"--read knows {', '.join(names)} here, not {unknown[0]!r}")
    if folder and "model" not in read:
        raise DataError("a folder needs --read model PATTERN, such as '^([^/]+)/': see read_runs")
    result: dict[str, Any] = dict(read)
    ignored = [name.strip() for name in result.pop("ignore", "").split(",") if name.strip()]
    for name in {"test_rows", "full", "sheet", "fewest"} & read.keys():
        result[name] = int(size(read[name]))
    return result | {"ignore": [*ignore, *ignored]}


def _command(call: Mapping[str, Any], answers: Mapping[str, Any]) -> str:
    """Return the command line of a call of `select`, with the options of ``answers`` added.

    Args:
        call: the arguments of `select`.
        answers: reader arguments that resolve an ambiguity of the table.
    """
    read = dict(call["read"])
    ignore = [*call["ignore"], *read.pop("ignore", "").split(","), *answers.get("ignore", ())]
    options = {**call, "read": read, "ignore": [*filter(None, dict.fromkeys(ignore))]}
    for name in answers.keys() - {"ignore"}:
        target = options if name in ("metric", "tokens") else read
        target[name] = str(answers[name])
    words = ["jachess", "select", str(options.pop("table"))]
    parameters = inspect.signature(select).parameters
    for name, value in options.items():
        if value != parameters[name].default and value not in ([], {}):
            words.append("--" + name.replace("_", "-"))
            values = [word for pair in value.items() for word in pair] if name == "read" else value
            is_number = isinstance(value, float)
            single = [f"{value:.15g}" if is_number else str(value)]
            words += values if isinstance(values, (list, tuple)) else single
    return shlex.join(words)
