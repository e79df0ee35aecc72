"""What live selections with default sizes cost, lose and say, on classes and on text.

    python -m benchmarks.make_zoo --text … --out zoo
    python -m benchmarks.live_choice --zoo zoo --data snips7 movie_sentences --out runs
    python -m benchmarks.live_choice --zoo zoo --text product_sentences --out runs
    python -m benchmarks.live_choice                        # judges the recorded runs anew

`--data`: folders of labelled rows, for all models of the zoo.  `--text`: folders whose texts are
read as plain text, for its decoders and for as many like them with weights drawn at random.  For
each, `select_live` with its default sizes and dev rows; then every candidate is fine-tuned on the
target's rows and judged on `TRUE_ROWS` dev rows: the truth.  Runs are kept in --out and not
repeated, so a slice that is stopped goes on.

Rows of all runs go to results/live_choice_runs.csv, those of other data stay; what each method
chooses from them, by loss (of text bits per byte) and by accuracy, to live_choice.csv and .md.
Costs are FLOPs of training and judging of what a method reads, as a share of training and judging
every candidate at the target.  Regret is how much higher the true loss of the chosen is than the
best, in per cent, or how many points its true accuracy is below the best.  Intervals are of the
true loss or accuracy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers

from jachess_ext._io import from_json, read_json, write_text
from jachess_ext.compare.runs import run_all
from jachess_ext.compare.settings import Recipe
from jachess_ext.compare.tasks import Task, load_task
from jachess_ext.live import LiveSettings, select_live
from jachess_ext.live.choice import RUNS
from jachess_ext.live.language import text_task
from jachess_ext.live.plan import make_plan
from jachess_ext.live.trial import RunRecord, run
from jachess_ext.scaling import Ask, Search

from .common import RESULTS, commit, markdown, write_frame
from .forecast_scores import coverage

TRUE_ROWS = 600
METHODS = ("blend", "ats", "subtuning", "modelsize")
"""Those that read no more than the default's runs."""
CLASSES, TEXT = (
    LiveSettings(target=1000, recipe=Recipe(epochs=3, batch_size=8, lr=5e-4, max_length=48)),
    LiveSettings(target=2000, recipe=Recipe(epochs=1, batch_size=8, lr=5e-4, max_length=64)),
)
"""What is told beside models and data; the rate is that of `selection_trial`."""
COLUMNS = [
    *("data", "seed", "rank_by", "judged", "target", "model", "parameters", "rows", "loss"),
    *("true_loss", "accuracy", "true_accuracy", "training_flops", "judging_flops", "seconds"),
    "commit",
]
"""Of the runs: `loss` and `accuracy` on the dev rows that the selection judges on (`judged` of
them), the true ones on `TRUE_ROWS`, of the runs on the target's rows."""


def models_of(zoo: Path, *, decoders: bool, out: Path) -> list[str]:
    """Return the zoo's folders; or of its decoders, and of twins with random weights."""
    folders = sorted(path.parent for path in zoo.glob("*/config.json"))
    if not decoders:
        return list(map(str, folders))
    known = [f for f in folders if read_json(f / "config.json")["model_type"] != "bert"]
    for folder in list(known):
        twin = out / f"random-{folder.name}"
        known.append(twin)
        if not (twin / "tokenizer.json").exists():
            torch.manual_seed(0)
            config = transformers.AutoConfig.from_pretrained(folder)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(twin)
            transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(twin)
    return list(map(str, known))


def make_runs(models: Sequence[str], task: Task, settings: LiveSettings, out: Path) -> Any:
    """Make the selection and the truth of one data set and seed; those that `out` has are read."""
    progress = partial(print, file=sys.stderr)
    live = select_live(models, task, out, settings, progress=progress)
    plan = make_plan(models, task, replace(settings, dev_size=TRUE_ROWS))
    jobs = [plan.trial(Ask(each.model, plan.search.target)) for each in plan.candidates]
    done = run_all(jobs, lambda job: asdict(run(job)), out / "full" / RUNS)
    truth = [from_json(record, RunRecord, job.name) for job, record in done]
    rows = []
    for record in [*live.records, *truth]:
        full = record.size == plan.search.target
        loss, accuracy = record.score(live.rank_by), record.scores.get("accuracy")
        rows.append(
            {
                "data": task.name,
                "seed": record.seed,
                "rank_by": live.rank_by,
                "judged": record.dev_rows,
                "target": plan.search.target,
                "model": Path(record.model).name,
                "parameters": record.parameters,
                "rows": record.size,
                "loss": None if full else loss,
                "true_loss": loss if full else None,
                "accuracy": None if full else accuracy,
                "true_accuracy": accuracy if full else None,
                "training_flops": record.training_flops,
                "judging_flops": record.judging_flops,
                "seconds": record.seconds,
                "commit": commit(),
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


# Judging ----------------------------------------------------------------------------------------


def judged(runs: pd.DataFrame, by: str) -> Iterator[dict[str, Any]]:
    """Yield what each method makes of the runs of one data set and seed.

    Args:
        by: "loss" or "accuracy".
    """
    below = runs[runs.true_loss.isna()]
    whole = runs[runs.true_loss.notna()].set_index("model")
    names, target = list(whole.index), int(runs.target.iloc[0])
    sizes = sorted({int(size) for size in below["rows"] if size})
    search = Search(
        names,
        sizes,
        target,
        metric=by,
        test_rows=int(below.judged.iloc[0]),
        parameters=whole.parameters.to_dict(),
    )
    lower = by == "loss"
    values = whole[f"true_{by}"]
    best = values.min() if lower else values.max()
    once = below.groupby("model").judging_flops.max()
    for row in below.itertuples():
        cost = row.training_flops + row.judging_flops
        search.add(row.model, int(row.rows), getattr(row, by), cost=cost)
    full = (whole.training_flops + once[names]).sum()
    for method in METHODS:
        selection = search.selection(method)
        chosen = selection.ranking[0]
        truth = values[list(selection.names)].to_numpy()
        apart = values[chosen] - best if lower else best - values[chosen]
        row = {
            "data": runs.data.iloc[0],
            "seed": runs.seed.iloc[0],
            "by": runs.rank_by.iloc[0] if lower else by,
            "candidates": len(names),
            "target": target,
            "sizes": " ".join(map(str, sizes)),
            "judged": int(below.judged.iloc[0]),
            "method": method,
            "chosen": chosen,
            "best": values.idxmin() if lower else values.idxmax(),
            "place": int((truth < values[chosen] if lower else truth > values[chosen]).sum()) + 1,
            "regret": 100 * (apart / best if lower else apart),
            "cost": selection.costs.sum() / full,
        }
        if selection.has_intervals:
            place = selection.names.index(chosen)
            row["said"] = float(selection.best_probabilities[place])
            for level in (0.5, 0.9):
                wanted = truth if lower else np.maximum(1 - truth, 0.5 / TRUE_ROWS)
                inside = coverage(*selection.interval_ends(level), wanted) / 100
                row[f"inside_{100 * level:.0f}"] = round(inside * len(truth))
        yield row


def summary(frame: pd.DataFrame) -> str:
    """Return the choices as a table in Markdown, and how often the intervals hold."""
    shown = []
    for row in frame.itertuples():
        inside = ["", ""]
        if not np.isnan(row.inside_90):
            inside = [f"{n:.0f} of {row.candidates}" for n in (row.inside_50, row.inside_90)]
        shown.append(
            {
                "data (seed), by": f"{row.data} ({row.seed}), {row.by}",
                "target; sizes; judged": f"{row.target}; {row.sizes}; {row.judged}",
                "method": row.method,
                "chosen": row.chosen,
                "its true place": f"{row.place} of {row.candidates}",
                "regret, % or points": f"{row.regret:.1f}",
                "cost": f"{row.cost:.3f}",
                "P(best) said": "" if np.isnan(row.said) else f"{row.said:.2f}",
                "inside 50 %": inside[0],
                "inside 90 %": inside[1],
            }
        )
    parts = [markdown(pd.DataFrame(shown))]
    for (method, by), mine in frame.dropna(subset="inside_90").groupby(
        ["method", "by"], sort=False
    ):
        parts.append(
            f"- {method}, {by}: 50 % intervals hold {mine.inside_50.sum():.0f}, those of 90 % "
            f"{mine.inside_90.sum():.0f} of {mine.candidates.sum()} truths."
        )
    return "\n".join(parts)


def redraw(runs: pd.DataFrame, results: Path) -> pd.DataFrame:
    """Judge the runs; write and print."""
    groups = [group for _, group in runs.groupby(["data", "seed"], sort=False)]
    frame = pd.DataFrame(
        [
            row
            for by in ("loss", "accuracy")
            for group in groups
            if group[f"true_{by}"].notna().any()
            for row in judged(group, by)
        ]
    )
    truth = "\n".join(
        f"- {group.data.iloc[0]}, seed {group.seed.iloc[0]}, by {group.rank_by.iloc[0]}: "
        + ", ".join(
            f"{row.model} {row.true_loss:.3f}"
            + ("" if np.isnan(row.true_accuracy) else f" ({100 * row.true_accuracy:.1f})")
            for row in group[group.true_loss.notna()].sort_values("true_loss").itertuples()
        )
        for group in groups
    )
    text = (
        f"{summary(frame)}\n\nTrue losses (accuracies, %) at the target:\n\n{truth}\n\n"
        f"Commits of the runs: {', '.join(sorted(set(runs.commit)))}.\n"
    )
    print(text)
    write_text(results / "live_choice.md", text)
    write_frame(frame, results / "live_choice.csv")
    return frame


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    """Make what is missing where data is given; judge; write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", type=Path, help="folder of model folders")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="labelled rows")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="rows read as text")
    parser.add_argument("--out", type=Path, help="runs are kept here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    path = options.results / "live_choice_runs.csv"
    runs = pd.read_csv(path) if path.is_file() else pd.DataFrame(columns=COLUMNS)
    for seed in options.seeds:
        for folder in (*options.data, *options.text):
            task, settings = load_task(str(folder)), CLASSES
            if folder in options.text:
                words = (task.train.texts, task.dev.texts)
                task, settings = text_task(*words, name=f"{task.name} as text"), TEXT
            task = replace(task, unlabelled=task.unlabelled.part(0, 0))
            models = models_of(options.zoo, decoders=folder in options.text, out=options.out)
            own = replace(settings, seed=seed, data_seed=seed)
            made = make_runs(
                models, task, own, options.out / f"{task.name}-{seed}".replace(" ", "-")
            )
            known = runs.set_index(["data", "seed", "model", "rows"]).commit.to_dict()
            keys = made[["data", "seed", "model", "rows"]].itertuples(index=False, name=None)
            made["commit"] = [
                known.get(key, made_by) for key, made_by in zip(keys, made.commit, strict=True)
            ]
            others = runs[(runs.data != task.name) | (runs.seed != seed)]
            runs = made if others.empty else pd.concat([others, made])
            write_frame(runs, path)
    return redraw(pd.read_csv(path), options.results)


if __name__ == "__main__":
    main(sys.argv[1:])
