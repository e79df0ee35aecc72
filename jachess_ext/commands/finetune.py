"""`jachess finetune` and `jachess evaluate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._io import DataError, from_json, read_json, write_json

if TYPE_CHECKING:
    from ..compare.runs import Record
    from ..compare.settings import Grid


def finetune(options: argparse.Namespace) -> int:
    """Run the grid, print its tables and write the report; return 1 where a run has failed.

    Raises:
        DataError: what was given cannot be used; nothing has been trained.
    """
    from ..compare.finetune import RESULTS, run_grid
    from ..compare.report import print_report, write_report
    from ..compare.runs import connect_ray

    grid = grid_from(options)
    for name in ("processes", "threads"):
        if getattr(options, name) < 1:
            raise DataError(f"--{name} is {getattr(options, name)}; expected at least 1")
    if options.ray is not None:
        connect_ray(options.ray)
    records = run_grid(
        grid,
        options.out,
        processes=options.processes,
        threads=options.threads,
        backend="loky" if options.ray is None else "ray",
        save_models=options.save_models,
        report_to=options.report_to,
        progress=True,
    )
    print_report(records)
    write_report(options.out / "report.html", records)
    print(f"Report: {options.out / 'report.html'}, from {RESULTS} beside it")
    return int(any(record["error"] for record in records))


def evaluate(options: argparse.Namespace) -> int:
    """Draw a results file again, or judge a fine-tuned model.

    Raises:
        DataError: what was given cannot be used.
    """
    from ..compare.finetune import judge_saved, read_records
    from ..compare.report import judged_sections, print_report, write_html, write_report
    from ..compare.runs import prepare
    from .select_live import use_device

    if (options.results is None) == (options.model is None):
        raise DataError("give either a results folder or --model with --tasks")
    if options.results is not None:
        records = read_records(options.results)
        folder = options.results if options.results.is_dir() else options.results.parent
        print_report(records)
        path = options.out or folder / "report.html"
        write_report(path, records)
        print(f"Report: {path}")
        return 0
    options.methods = ["none"]
    grid = grid_from(options)
    use_device(options.device)
    prepare(options.threads)
    judged = list(judge_saved(grid, device="cpu" if options.device == "cpu" else "cuda"))
    for figures in judged:
        _print(figures)
    if options.out is not None and options.out.suffix == ".html":
        write_html(options.out, f"Judged: {grid.model}", judged_sections(judged))
    elif options.out is not None:
        write_json(options.out, judged)
    return 0


def _print(figures: Record) -> None:
    lines = [f"{figures['task']}: {figures['metric']} {figures['score']:.3f}"]
    if figures["brier"] is not None:
        lines.append(f"  Brier {figures['brier']:.3f}, ECE {figures['ece']:.3f}")
    lines += [f"  {float(s):.0%} tokens unknown: {v:.3f}" for s, v in figures["corrupted"].items()]
    lines += [f"  noise δ = {d} rms: {v:.3f}" for d, v in figures["noisy"].items()]
    lines += [f"  {noise}: accuracy {v:.3f}" for noise, v in figures["perturbed"].items()]
    lines += [f"  on {target}: {of['score']:.3f}" for target, of in figures["shift"].items()]
    if figures["jacobian"]:
        norms = sum(figures["jacobian"]), sum(figures["hessian"])
        lines.append(f"  Σ‖J‖ {norms[0]:,.0f}, Σ‖H‖ {norms[1]:,.0f}")
    print("\n".join(lines))


def add_finetune_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, which replace settings of --grid; nothing heavy is imported."""
    what = parser.add_argument_group("what to compare")
    what.add_argument("--grid", type=Path, metavar="FILE", help="JSON with these settings by name")
    what.add_argument("--model", metavar="PATH_OR_HUB_ID")
    what.add_argument(
        "--tasks", nargs="+", metavar="TASK", help="glue/cola, hub:owner/name, folder, train:dev"
    )
    what.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="like none or jachess-unlab,weights=norm"
    )
    what.add_argument("--seeds", nargs="+", type=int, metavar="N", help="default 0 1 2 3 4")
    what.add_argument(
        "--shift", nargs="+", metavar="TASK=TARGET", help="judge models of a task on a target too"
    )
    add_data_options(parser)
    size = parser.add_argument_group("rows (default: all, and 1000 unlabelled)")
    size.add_argument("--train-size", type=int, metavar="N")
    size.add_argument("--unlabelled-size", type=int, metavar="N")
    how = parser.add_argument_group("how to train, the same for all methods")
    how.add_argument("--epochs", type=float)
    how.add_argument("--batch-size", type=int)
    how.add_argument("--lr", type=float, help="default 2e-5, with --lora 1e-4")
    how.add_argument("--lora", action="store_true", default=None, help="peft, r 8, alpha 16")
    how.add_argument("--bf16", action="store_true", default=None)
    how.add_argument("--torch-compile", action="store_true", default=None)
    tune = parser.add_argument_group("strengths to choose from, on training rows alone")
    tune.add_argument(
        "--strengths",
        nargs="+",
        type=strengths,
        metavar="X|METHOD=X,X",
        help="X: of jacobian, cross-holder and jachess, while l2 and r3f are tried at 0.1, 1 and "
        "10 times their default; METHOD=X,X: of that method alone, like r3f=0.3,1,3",
    )
    tune.add_argument("--unlab-rates", nargs="+", type=float, metavar="X", help="mode unlab")
    tune.add_argument("--validation", type=float, metavar="SHARE")
    run = parser.add_argument_group("the run")
    run.add_argument("--out", type=Path, default=Path("jachess-finetune"), metavar="FOLDER")
    run.add_argument("--processes", type=int, default=1, metavar="N")
    run.add_argument("--threads", type=int, default=1, metavar="N", help="of each process")
    run.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="runs on a Ray cluster in place of processes here; local: one started here",
    )
    run.add_argument(
        "--save-models",
        action="store_true",
        help="below <out>/models; finished runs without a model are repeated",
    )
    run.add_argument(
        "--report-to",
        nargs="+",
        default=(),
        metavar="TRACKER",
        help="log losses and penalties of the runs there, each under its name: tensorboard (in "
        "<out>/logs), mlflow, trackio, wandb or another that transformers' Trainer knows",
    )
    run.add_argument("--quick", action="store_true", help="one seed, few rows: does it run?")


def strengths(text: str) -> float | tuple[str, tuple[float, ...]]:
    """Return a number, or a method and the numbers to try for it: ``r3f=0.3,1,3``.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    method, equals, values = text.rpartition("=")
    try:
        numbers = tuple(float(value) for value in values.split(","))
    except ValueError:
        numbers = ()
    if equals and method and numbers:
        return method, numbers
    if not equals and len(numbers) == 1:
        return numbers[0]
    raise argparse.ArgumentTypeError(
        f"{text!r} is no strength; expected a number, or a method with its own like r3f=0.3,1,3"
    )


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add columns and lengths, of both commands."""
    data = parser.add_argument_group("data")
    data.add_argument("--text-column", metavar="NAME")
    data.add_argument("--pair-column", metavar="NAME")
    data.add_argument("--label-column", metavar="NAME")
    data.add_argument("--regression", action="store_true", default=None, help="labels are numbers")
    data.add_argument("--dev-size", type=int, metavar="N")
    data.add_argument("--max-length", type=int, metavar="TOKENS")


def add_evaluate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a results folder to draw again, or a model to judge."""
    parser.add_argument(
        "results", nargs="?", type=Path, help="folder or results.jsonl of jachess finetune"
    )
    parser.add_argument("--model", metavar="PATH_OR_HUB_ID", help="a fine-tuned model to judge")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="as for jachess finetune")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="of the report: .html, or .json for its figures"
    )
    add_data_options(parser)
    how = parser.add_argument_group("how to judge a model (--model)")
    how.add_argument("--device", default="cpu", metavar="cpu|cuda|cuda:N")
    how.add_argument("--grid", type=Path, metavar="FILE", help="JSON with these settings by name")
    how.add_argument(
        "--shift", nargs="+", metavar="TASK=TARGET", help="judge it on the target's rows too"
    )
    how.add_argument("--corruption", nargs="*", type=float, metavar="SHARE", help="of the tokens")
    how.add_argument("--deltas", nargs="*", type=float, metavar="D", help="sizes of noise")
    how.add_argument("--texts", nargs="+", metavar="KIND", help="typos, case, … (see the methods)")
    how.add_argument("--sequences", type=int, metavar="N", help="rows the norms are measured on")


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# Part of a grid → option → its name there.
_PLACES = {
    "columns": {
        **{f"{name}_column": name for name in ("text", "pair", "label")},
        "regression": "regression",
    },
    "recipe": _same("epochs", "batch_size", "lr", "lora", "bf16", "torch_compile", "max_length"),
    "conditions": _same("corruption", "deltas", "texts", "sequences"),
    "tuning": {"unlab_rates": "unlab_lr_ratio", "validation": "validation"},
}
_TOP = ("model", "tasks", "methods", "seeds", "train_size", "unlabelled_size", "dev_size")


def grid_from(given: argparse.Namespace) -> Grid:
    """Return the grid of --grid with the options given in place of its settings.

    Raises:
        DataError: a setting that is missing, unknown or out of range.
    """
    from ..compare.settings import Grid, quick

    content = read_json(given.grid) if getattr(given, "grid", None) else {}
    if not isinstance(content, dict):
        raise DataError(f"{given.grid} is not a JSON object with the names of settings")
    options = {name: value for name, value in vars(given).items() if value is not None}
    content |= {name: options[name] for name in _TOP if name in options}
    for part, names in _PLACES.items():
        values = {field: options[option] for option, field in names.items() if option in options}
        if values:
            content[part] = {**content.get(part, {}), **values}
    if "strengths" in options:
        content["tuning"] = _with_strengths(content.get("tuning", {}), given.strengths)
    if "shift" in options:
        pairs = [pair.partition("=")[::2] for pair in given.shift]
        content["shift"] = {task: [t for name, t in pairs if name == task] for task, _ in pairs}
    grid: Grid = from_json(content, Grid, "the grid")
    return quick(grid) if options.get("quick") else grid


def _with_strengths(
    tuning: dict[str, Any], given: list[float | tuple[str, tuple[float, ...]]]
) -> dict[str, Any]:
    """Return the part `tuning` of a grid with the values of --strengths."""
    if not isinstance(tuning, dict) or not isinstance(tuning.get("methods", {}), dict):
        return tuning  # for `from_json` to refuse
    numbers = [value for value in given if isinstance(value, float)]
    own = {value[0]: list(value[1]) for value in given if not isinstance(value, float)}
    tuning = {**tuning, "methods": {**tuning.get("methods", {}), **own}}
    return {**tuning, "strength": numbers} if numbers else tuning
