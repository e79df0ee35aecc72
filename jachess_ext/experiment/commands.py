"""`jachess finetune` and `jachess evaluate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from ..compare.report import judged_sections, print_report, write_html, write_report
from ..evaluation.report import write_json
from ..evaluation.robustness import embedding_scale
from ..commands.select_live import use_device
from ..progress import BarProgress
from ..tasks.batches import check_tokens
from ..tasks.examples import DataError, Task
from ..tasks.models import check_corruptible, load_fine_tuned, load_tokenizer
from ..tasks.spec import load_task, selected
from .arguments import grid_from
from .estimate import estimate, print_estimate
from .grid import Grid
from .jobs import Record, shift_targets
from .one_run import task_figures
from .run import run_grid
from .store import RESULTS, read_results
from .workers import prepare


def finetune(options: argparse.Namespace) -> int:
    """Runs the grid, prints its tables and writes the report; 1 where a run has failed.

    Raises:
        DataError: what was given cannot be used; nothing has been trained.
    """
    grid = grid_from(options)
    for name in ("processes", "threads"):
        if getattr(options, name) < 1:
            raise DataError(f"--{name} is {getattr(options, name)}; expected at least 1")
    size = {"processes": options.processes, "threads": options.threads}
    if options.estimate:
        with BarProgress() as progress:
            found = estimate(grid, **size, progress=progress)
        print_estimate(found)
        return 0
    with BarProgress() as progress:
        records = run_grid(
            *(grid, options.out),
            **size,
            save_models=options.save_models,
            ray=options.ray,
            report_to=options.report_to,
            progress=progress,
        )
    print_report(records)
    write_report(options.out / "report.html", records)
    print(f"Report: {options.out / 'report.html'}, from {RESULTS} beside it")
    return int(any(record["error"] for record in records))


def evaluate(options: argparse.Namespace) -> int:
    """Draws a results file again, or judges a fine-tuned model.

    Raises:
        DataError: what was given cannot be used.
    """
    if (options.results is None) == (options.model is None):
        raise DataError("give either a results folder or --model with --tasks")
    if options.results is not None:
        records = read_results(options.results)
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
    tasks = [load_task(spec, grid.columns) for spec in grid.tasks]
    targets = shift_targets(grid, tasks)
    gpu = options.device != "cpu"
    figures = [_judged(grid, task, targets[task.name], gpu) for task in tasks]
    for found in figures:
        _print(found)
    if options.out is not None and options.out.suffix == ".html":
        write_html(options.out, f"Judged: {grid.model}", judged_sections(figures))
    elif options.out is not None:
        write_json(options.out, figures)
    return 0


def _judged(grid: Grid, whole: Task, shift: Sequence[Task], gpu: bool) -> Record:
    task = selected(whole, None, 1, grid.dev_size, grid.data_seed)
    tokenizer = load_tokenizer(grid.model)
    check_tokens(task, whole, tokenizer, ["dev"])
    if grid.conditions.corruption:
        check_corruptible(tokenizer, grid.model)
    model = load_fine_tuned(grid.model, task.outputs, tokenizer)
    if gpu:
        model.cuda()

    targets = [selected(target, None, 1, grid.shift_size, grid.data_seed) for target in shift]
    figures = task_figures(
        *(model, tokenizer, embedding_scale(model), task, targets, grid.conditions),
        grid.recipe.max_length,
    )
    head: Record = {"task": task.name, "model": grid.model, "metric": task.metric.name}
    head |= {"device": str(next(model.parameters()).device), "rows": len(task.dev)}
    return head | {"conditions": asdict(grid.conditions)} | figures


def _print(found: Record) -> None:
    lines = [f"{found['task']}: {found['metric']} {found['score']:.3f}"]
    if found["brier"] is not None:
        lines.append(f"  Brier {found['brier']:.3f}, ECE {found['ece']:.3f}")
    lines += [f"  {float(s):.0%} tokens unknown: {v:.3f}" for s, v in found["corrupted"].items()]
    lines += [f"  noise δ = {d} rms: {v:.3f}" for d, v in found["noisy"].items()]
    lines += [f"  {kind}: accuracy {v:.3f}" for kind, v in found["perturbed"].items()]
    lines += [f"  on {target}: {of['score']:.3f}" for target, of in found["shift"].items()]
    if found["jacobian"]:
        lines.append(f"  Σ‖J‖ {sum(found['jacobian']):,.0f}, Σ‖H‖ {sum(found['hessian']):,.0f}")
    print("\n".join(lines))
