"""`jachess select`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import tyro

from .._io import DataError, write_json, write_text
from . import check_ending


def _size(words: list[str]) -> float:
    from ..scaling.tables import parse_size

    return parse_size(words[0])


Rows = Annotated[
    float,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="ROWS",
        instance_from_str=_size,
        is_instance=lambda value: isinstance(value, float),
        str_from_instance=lambda value: [f"{value:g}"],
    ),
]
"""A number of rows as people write it: 10000, 10k, 10,000."""


def select(
    table: tyro.conf.Positional[Path],
    target: Rows,
    metric: str | None = None,
    method: str = "blend",
    budget: Rows | None = None,
    reference: tuple[str, ...] = (),
    read: dict[str, str] = {},  # noqa: B006  tyro's default, not changed
    tokens: float = 1.0,
    epochs: float = 1.0,
    gpu_flops: float | None = None,
    level: float = 0.9,
    out: Path | None = None,
    report: Path | None = None,
) -> None:
    """Rank models by the loss or score they will have in full, from runs on small subsets.

    Args:
        table: csv: a row a model and columns named by sizes, or a row a run; or Trainer's folders.
        target: Size of the full data, such as 10000 or 10k.
        metric: What the numbers are: loss, accuracy, eval_f1, …; None: as the table says.
        method: blend, lensllm, rectified, power, ats, subtuning, zeroshot or modelsize.
        budget: Largest size used; None: the largest below the target.
        reference: Models whose loss at the target is in the table: intervals are calibrated on
            them.
        read: How to read it, in pairs: model, size and seed with the columns of a table (of
            folders with regular expressions), decimal with a decimal comma, test_rows with the
            examples a score was measured on, full with the examples of all the data where sizes are
            shares of it, ignore with columns or runs, separated by commas.
        tokens: Tokens of an example, for the FLOPs.
        epochs: Epochs over every subset, for the FLOPs.
        gpu_flops: FLOPs a second that training reaches, such as 1e14, for costs in GPU hours.
        level: Probability of the intervals.
        out: File for the ranking, .csv or .json.
        report: File for one page of curves, predictions, ranking and cost, .html.

    Raises:
        ValueError: The table or the options cannot be used; no file is written.
        MissingExtra: An optional library is needed and missing.
    """
    from .. import scaling

    check_ending(out, ".csv", ".json")
    check_ending(report, ".html", ".htm")
    reader: Any = scaling.read_runs if table.is_dir() else scaling.read_table
    losses = reader(table, metric=metric, **_reading(read, folder=table.is_dir()))
    settings: dict[str, Any] = {"tokens": tokens, "epochs": epochs, "references": reference}
    settings["gpu_flops"] = gpu_flops
    selection = scaling.select(losses, budget, target, method, **settings)
    costs: dict[str, float | None] = {"flops": None, "full_flops": None}
    with suppress(scaling.TableError):  # the table does not tell the models' sizes
        costs = {"flops": selection.flops, "full_flops": selection.full_flops}
    if report is not None:
        from ..live.report import write_selection

        given = {name: getattr(selection, name) for name in ("method", "budget", "target")}
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
            settings={"table": table.name, **given, **settings},
        )
    if out is not None:  # pandas takes half a second to load
        rows = selection.to_frame(level).drop(columns=["cost", "full_cost"])
        if selection.forecast.predicted is not None:
            rows = rows.drop(columns="score")
        rows = rows.dropna(axis=1, how="all")
        if out.suffix == ".csv":
            write_text(out, rows.to_csv(index=False))
        else:
            facts = {name: getattr(selection, name) for name in ("method", "budget", "target")}
            facts |= {"metric": losses.metric, "advice": selection.advice, "level": level}
            write_json(out, {**facts, **costs, "rows": rows.to_dict("records")})
    print(selection.text(level))
    if costs["flops"] is not None:
        of_all = 100 * selection.flops / selection.full_flops
        spent = selection.cost_text(selection.flops)
        print(f"This cost {spent}, {of_all:.3g} % of training all models in full.")
    for path in filter(None, (out, report)):
        print(f"written to {path}")


def _reading(read: dict[str, str], folder: bool) -> dict[str, Any]:
    """Return the arguments of `read_table` or `read_runs` that `--read` gives."""
    known = ["model", "size", "ignore", "test_rows"]
    known += [] if folder else ["seed", "decimal", "full"]
    if others := sorted(set(read) - set(known)):
        raise DataError(f"--read knows {', '.join(known)} here, not {others[0]!r}")
    given: dict[str, Any] = dict(read)
    if folder and "model" not in read:
        raise DataError("a folder needs --read model PATTERN, such as '^([^/]+)/': see read_runs")
    if "ignore" in read:
        given["ignore"] = [name.strip() for name in read["ignore"].split(",")]
    for name in {"test_rows", "full"} & read.keys():
        given[name] = int(_size([read[name]]))
    return given
