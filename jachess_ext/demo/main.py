"""`jachess demo`: runs, prints the table, writes the report."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from .._io import DataError
from ..compare.settings import Columns
from .options import Form, Options, Recipe

if TYPE_CHECKING:
    from .results import Outcome


def demo(
    model: str | None = None,
    train: Path | None = None,
    dev: Path | None = None,
    dataset: str | None = None,
    columns: Columns = Columns(),  # noqa: B008  frozen
    max_length: int = Options.max_length,
    seeds: int = Options.seeds,
    steps: int = Recipe.steps,
    quick: bool = False,
    threads: int = Options.threads,
    strength: float = Recipe.strength,
    lr: float | None = None,
    batch_size: int = Recipe.batch_size,
    weights: Literal["uniform", "inverse", "norm", "softmax"] = "softmax",
    form: Annotated[Form, tyro.conf.arg(name="unlab")] = Recipe.form,
    out: Path = Options.out,
) -> None:
    """Fine-tune on real text with and without JacHess.  Model and data come with the package.

    Args:
        model: Path or hub id of any sequence classifier.
        train: csv, tsv or jsonl to train on.
        dev: csv, tsv or jsonl to judge on.
        dataset: Of the datasets library, like glue/cola.
        columns: Columns of the files.
        max_length: Tokens that texts are cut to.
        seeds: Runs of each method.
        steps: Steps of a run.
        quick: One seed, few steps: does it run?
        threads: Threads of torch.
        strength: Of JacHess.
        lr: Learning rate; None: 1e-3, or 2e-5 with --model.
        batch_size: Rows of a step.
        weights: Of the layers.
        form: JacHess-unlab: one step on both losses, or a step on each in turn.
        out: Folder of the report.

    Raises:
        DataError: The data, the model or the output folder cannot be used.
        MissingExtra: A library the demo needs is not installed.
    """
    from .run import run
    from .write import check_folder, write_outcome

    lr = lr if lr is not None else 2e-5 if model else Recipe.lr
    whole = {"seeds": seeds, "steps": steps, "threads": threads, "batch_size": batch_size}
    for name, value in (whole | {"max_length": max_length}).items():
        if value < 1:
            raise DataError(f"{name} is {value}; expected at least 1")
    for name, number in (("strength", strength), ("lr", lr)):
        if not 0 <= number < float("inf"):
            raise DataError(f"{name} is {number}; expected a finite number from 0 up")
    recipe = Recipe(
        steps=steps, batch_size=batch_size, lr=lr, strength=strength, weights=weights, form=form
    )
    options = Options(
        out=out,
        model=model,
        train=train,
        dev=dev,
        dataset=dataset,
        columns=columns,
        seeds=seeds,
        recipe=recipe,
        max_length=max_length,
        threads=threads,
    )
    options = options.quick() if quick else options
    check_folder(options.out)
    outcome = run(options, progress=True)
    print_table(outcome)
    written = write_outcome(outcome, options.out)
    print(f"Report: {written[0]} (figures and results.json beside it)")


def print_table(outcome: Outcome, width: int | None = None) -> None:
    """Prints the task, the baseline, what was found, and the table.

    `width` replaces the terminal's width; 80 columns suffice.
    """
    from ..compare.report import to_text, wrap
    from .results import table
    from .write import main_table, paragraphs

    width = width or shutil.get_terminal_size().columns
    rows = table(outcome)
    print()
    for paragraph in paragraphs(outcome, rows):
        print(wrap(paragraph, width))
    caption = "mean ± spread over seeds; ↑ higher is better, ↓ lower is better"
    print(to_text(main_table(outcome, rows, caption), width))
