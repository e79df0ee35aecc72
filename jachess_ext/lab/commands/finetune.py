"""`jachess finetune` and `jachess evaluate`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from ..._io import DataError, from_json, read_json
from ..compare.settings import Grid, Tuning

T = TypeVar("T")


def _by_name(
    metavar: str, value_type: type, split: Callable[[str], tuple[str, str, str]]
) -> PrimitiveConstructorSpec[Mapping]:
    """Return tyro's specification of an option that maps names to values, each as ``name=value``.

    Args:
        metavar: description of a value in the help.
        value_type: type of the values.
        split: splits an argument into name, "=" and value.
    """

    def parse(words: list[str]) -> dict[str, tuple[object, ...]]:
        values: dict[str, tuple[object, ...]] = {}
        for text in words:
            name, _, value = split(text)
            if not (name and value):
                raise ValueError(f"{text!r} is not {metavar}")
            values[name] = (*values.get(name, ()), value_type(value))
        return values

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{metavar} ...]",
        instance_from_str=parse,
        is_instance=lambda values: isinstance(values, Mapping),
        str_from_instance=lambda values: [f"{name}={v}" for name in values for v in values[name]],
    )


Targets = Annotated[
    Mapping[str, tuple[str, ...]], _by_name("TASK=TARGET", str, lambda text: text.partition("="))
]
# Split at the last "=", since a method's text may contain "=" as well.
Strengths = Annotated[
    Mapping[str, tuple[float, ...]], _by_name("METHOD=X", float, lambda text: text.rpartition("="))
]


@dataclass(frozen=True)
class TuningOptions(Tuning):
    __doc__ = Tuning.__doc__

    methods: Strengths = field(default_factory=dict)


@dataclass(frozen=True)
class GridOptions(Grid):
    __doc__ = Grid.__doc__

    shift: Targets = field(default_factory=dict)
    tuning: TuningOptions = field(default_factory=TuningOptions)


def with_grid_file(
    function: Callable[..., T], words: Sequence[str]
) -> tuple[Callable[..., T], list[str]]:
    """Remove ``--grid FILE`` from the command-line words; the file's settings become the function's
    defaults.

    Returns:
        The function with the file's grid as default, and the remaining words.

    Raises:
        DataError: The file cannot be read, or has a setting that is unknown or out of range.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--grid", type=Path)
    file, remaining = parser.parse_known_args(words)
    content = {} if file.grid is None else read_json(file.grid)
    content = from_json(content, dict[str, Any], str(file.grid))
    # These settings are required, from the file or the options, but tyro needs a complete Grid as
    # defaults: placeholders are filled in, checked with the rest, and then marked as missing.
    needed: dict[str, Any] = {"model": "-", "tasks": ["-"], "methods": ["-"]}
    grid = from_json(needed | content, GridOptions, "the grid")
    for name in needed.keys() - content.keys():
        object.__setattr__(grid, name, tyro.MISSING)
    return functools.partial(function, grid=grid), remaining


def finetune(
    grid: Annotated[GridOptions, tyro.conf.arg(name="")],
    out: Path = Path("jachess-finetune"),
    processes: int = 1,
    threads: int = 1,
    ray: str | None = None,
    save_models: bool = False,
    report_to: tuple[str, ...] = (),
) -> int:
    """Compare methods over tasks and seeds; the same command goes on where it was stopped.

    ``--grid FILE`` reads a JSON object with the names of these options, "recipe": {"lr": 1e-5} for
    ``--recipe.lr 1e-5``; options that are given as well replace its settings.

    Args:
        grid: What to compare.
        out: Folder of the runs, tables and report.
        processes: Runs at a time.
        threads: Threads of each process.
        ray: Run on a Ray cluster: its address, "auto" (the one this machine belongs to) or "local"
            (one started here).
        save_models: Keep the models below <out>/models; finished runs without one are repeated.
        report_to: Trackers of transformers' Trainer to log losses and penalties to, each run under
            its name: tensorboard (in <out>/logs), mlflow, trackio, wandb, …

    Returns:
        1 where a run has failed.

    Raises:
        DataError: What was given cannot be used; nothing has been trained.
    """
    from ..compare.finetune import run_grid
    from ..compare.records import RESULTS
    from ..compare.report import print_report, write_report
    from ..workbench.runs import connect_ray

    for name, value in (("processes", processes), ("threads", threads)):
        if value < 1:
            raise DataError(f"--{name} is {value}; expected at least 1")
    if ray is not None:
        connect_ray(ray)
    records = run_grid(
        grid,
        out,
        processes=processes,
        threads=threads,
        backend="loky" if ray is None else "ray",
        save_models=save_models,
        report_to=report_to,
        progress=True,
    )
    print_report(records)
    write_report(out / "report.html", records)
    print(f"Report: {out / 'report.html'}, from {RESULTS} beside it")
    return int(any(record.error for record in records))


def evaluate(results: tyro.conf.Positional[Path], out: Path | None = None) -> None:
    """Draw a comparison's tables and report again.

    Args:
        results: Folder or results.jsonl of jachess finetune.
        out: File of the report; None: report.html beside the results.

    Raises:
        DataError: There are no results, or they cannot be read.
    """
    from ..compare.records import read_records
    from ..compare.report import print_report, write_report

    records = read_records(results)
    path = out or (results if results.is_dir() else results.parent) / "report.html"
    print_report(records)
    write_report(path, records)
    print(f"Report: {path}")
