"""Live selections: what default ones cost, lose and say; and a trial against other ways to choose.

    python -m benchmarks.zoo --text … --out zoo
    python -m benchmarks.live_selection --zoo zoo --data snips7 movie_sentences --out runs
    python -m benchmarks.live_selection --zoo zoo --text product_sentences --out runs

choices (results/live_choice_runs.csv, live_choice.md).  `--data`: folders of labelled rows, for
all models of the zoo.  `--text`: folders whose texts are read as plain text, for its decoders and
for as many like them with weights drawn at random.  For each, `select_live` with its default sizes
and dev rows; then every candidate is fine-tuned on the target's rows and judged on `TRUE_ROWS` dev
rows: the truth.  Runs are kept in --out and not repeated, so a slice that is stopped goes on; it
takes some ten minutes of a core a data set.  The page has what each method chooses from the runs,
by loss (of text bits per byte) and by accuracy.  Intervals are of the true loss or accuracy.

trial (results/selection_trial_runs.csv, selection_trial.md).  Eight candidates (the zoo, the first
two layers of MiniLM, two such layers with random weights) on three data sets, recorded once, by
benchmarks/selection_trial.py of commit 5eb89b9: losses on the `SIZES` and on the way (`PARTS` of
the steps) to `ROWS` rows, the truth on `TRUE_ROWS` dev rows, scores of frozen features (our own and
TransformerRanker's) and the mean exponent of the weights' tails.  Replayed from these: forecasts
and the largest subset alone; ASHA, which is Optuna's `SuccessiveHalvingPruner` over the losses
within the full runs, as it stops and never repeats training, in `ORDERS` drawn orders; the scores.
All choose by the dev loss, and again by the dev accuracy (what is missing of it is forecast).

Costs are FLOPs of training and judging of what a method reads, as a share of training and judging
every candidate in full.  A model that ASHA chose is then trained; after any other choice its full
training is still to be paid: "with the winner" counts it.  Regret is how much higher the true loss
of the chosen is than the best, in per cent, or how many points its true accuracy is below the best.

`python -m benchmarks.quoted --update` draws both pages anew from the recorded runs.
"""

from __future__ import annotations

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
import tyro

from jachess_ext._io import from_json, read_json, require, write_text
from jachess_ext.lab.live import LiveSettings, select_live
from jachess_ext.lab.live.choice import RUNS
from jachess_ext.lab.live.language import text_task
from jachess_ext.lab.live.plan import make_plan
from jachess_ext.lab.live.trial import RunRecord, run
from jachess_ext.lab.workbench.runs import run_all
from jachess_ext.lab.workbench.settings import Recipe
from jachess_ext.lab.workbench.tasks import Task, load_task
from jachess_ext.scaling import Ask, LossTable, Search, select
from jachess_ext.scaling.metrics import to_loss

from .common import RESULTS, commit, markdown, write_frame
from .forecast_scores import coverage
from .selection import BINS

TRUE_ROWS = 600
LABELS = {"snips7": 7, "sst2": 2, "movie_sentences": 2, "product_sentences": 2}
"""Classes of each data set; read as text it has none."""


# Default selections -----------------------------------------------------------------------------

METHODS = ("blend", "ats", "subtuning", "modelsize")
"""Those that read no more than the default's runs."""
CLASSES, TEXT = (
    LiveSettings(target=1000, recipe=Recipe(epochs=3, batch_size=8, lr=5e-4, max_length=48)),
    LiveSettings(target=2000, recipe=Recipe(epochs=1, batch_size=8, lr=5e-4, max_length=64)),
)
"""What is told beside models and data; the rate is that of the trial."""
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
        classes=LABELS.get(runs.data.iloc[0]),
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


def choices_table(frame: pd.DataFrame) -> str:
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


def choices_page(runs: pd.DataFrame) -> str:
    """Return what was chosen from the recorded runs, as Markdown."""
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
    return (
        f"{choices_table(frame)}\n\nTrue losses (accuracies, %) at the target:\n\n{truth}\n\n"
        f"Commits of the runs: {', '.join(sorted(set(runs.commit)))}.\n"
    )


# The trial --------------------------------------------------------------------------------------

ROWS = 800
PARTS = tuple(2.0**-k for k in range(4, -1, -1))
SIZES = (17, 41, 100, 200)
LADDERS = {"1/8": SIZES[:3], "1/4": SIZES}
"""Sizes of a selection by budget, from an eighth (a quarter) of the rows down to 17."""
ORDERS = 50
REGRET = 1.0
"""Per cent of the best loss, or points of the best accuracy, that a choice may lose."""
JUDGED_ROWS = 200
"""Dev rows that a selection judges on here."""
FEATURE_SCORES = ("logme", "hscore", "knn")


class Replay:
    """The recorded runs of one data set and seed, to choose from by "loss" or "accuracy"."""

    def __init__(self, runs: pd.DataFrame, rank_by: str = "loss") -> None:
        self.rank_by = rank_by
        whole = runs[(runs.rows == ROWS) & (runs.part == 1)]
        self.data, self.seed = runs.data.iloc[0], runs.seed.iloc[0]
        self.names = whole.model.tolist()
        self.parameters = whole.parameters.to_numpy(float)
        self.truth = whole.true_loss.to_numpy()
        self.accuracy = whole.true_accuracy.to_numpy()
        self.full = (whole.training_flops + whole.judging_flops).to_numpy()
        self.run = {(row.model, row.rows, row.part): row for row in runs.itertuples()}

    @property
    def best(self) -> np.ndarray:
        """Which candidates are the best in full, of what is ranked by."""
        if self.rank_by == "loss":
            return self.truth == self.truth.min()
        return self.accuracy == self.accuracy.max()

    @property
    def forecast(self) -> np.ndarray:
        """What a forecast is to be compared with."""
        return self.truth if self.rank_by == "loss" else 1 - self.accuracy

    def height(self, name: str, rows: int, part: float = 1.0) -> float:
        """Return the dev loss, or what is missing of the dev accuracy."""
        run: Any = self.run[name, rows, part]
        if self.rank_by == "loss":
            return run.dev_loss
        return to_loss("accuracy", run.accuracy, JUDGED_ROWS)

    def cost(self, rows: int, names: Sequence[str] | None = None) -> float:
        """Return the FLOPs of runs on a subset, of all candidates or of these."""
        runs: list[Any] = [self.run[name, rows, 1.0] for name in names or self.names]
        return sum(run.training_flops + run.judging_flops for run in runs)

    def table(self, sizes: Sequence[int], names: Sequence[str] | None = None) -> LossTable:
        """Return losses on subsets."""
        kept = list(self.names if names is None else names)
        losses = [[self.height(name, size) for size in sizes] for name in kept]
        places = [self.names.index(name) for name in kept]
        return LossTable(
            tuple(kept), np.array(sizes, float), np.array(losses), self.parameters[places]
        )

    def search(self, sizes: Sequence[int]) -> Search:
        """Return a search that was told the runs on subsets, as a live selection is."""
        search = Search(
            self.names,
            list(sizes),
            ROWS,
            metric=self.rank_by,
            test_rows=JUDGED_ROWS,
            classes=LABELS[self.data],
        )
        for name in self.names:
            for size in sizes:
                run: Any = self.run[name, size, 1.0]
                search.add(name, size, run.dev_loss if self.rank_by == "loss" else run.accuracy)
        return search

    def choice(
        self,
        method: str,
        budget: str,
        chosen: str,
        cost: float,
        *,
        trained: bool = False,
        said: float | None = None,
    ) -> dict[str, Any]:
        """Return the row of a choice; costs become shares of full tuning of all.

        Args:
            trained: whether the cost has the chosen model's full training.
            said: P(best) of the chosen, where the method says it.
        """
        place = self.names.index(chosen)
        full = self.full.sum()
        return {
            "data": self.data,
            "seed": self.seed,
            "rank_by": self.rank_by,
            "method": method,
            "budget": budget,
            "chosen": chosen,
            "regret": 100 * (self.truth[place] / self.truth.min() - 1),
            "accuracy_lost": 100 * (self.accuracy.max() - self.accuracy[place]),
            "cost": cost / full,
            "cost_with_winner": (cost + (0 if trained else self.full[place])) / full,
            "said": said,
        }


def choices(replay: Replay) -> Iterator[dict[str, Any]]:
    """Yield every method's."""
    yield from _forecasting(replay)
    yield from _subtuning(replay)
    yield from _promotion(replay)
    yield from _asha(replay)
    yield from _frozen(replay)
    largest = replay.names[int(replay.parameters.argmax())]
    yield replay.choice("modelsize", "", largest, 0.0)
    tails: dict[str, float] = {}
    for name in replay.names:
        run: Any = replay.run[name, 0, 1.0]
        tails[name] = run.exponent
    if not np.isnan(list(tails.values())).any():
        yield replay.choice("nlpmetrics", "", min(tails, key=tails.__getitem__), 0.0)


FORECASTS: dict[str, dict[str, Any]] = {
    "blend": {"method": "blend"},
    "ats": {"method": "ats"},
    "ats tau=1": {"method": "ats", "tau": 1.0},
    "rectified": {"method": "rectified"},
}


def _forecasting(replay: Replay) -> Iterator[dict[str, Any]]:
    """Forecast from all sizes of a ladder; rectified reads the loss before fine-tuning."""
    for budget, sizes in LADDERS.items():
        cost = sum(replay.cost(size) for size in sizes)
        for method, given in FORECASTS.items():
            zero = method == "rectified"
            table = replay.table((0, *sizes) if zero else sizes)
            selection = select(table, sizes[-1], ROWS, **given)
            chosen, said = selection.ranking[0], None
            if method == "blend":
                said = float(selection.best_probabilities[replay.names.index(chosen)])
            start = replay.cost(0) if zero else 0.0
            yield replay.choice(method, budget, chosen, cost + start, said=said)


def _subtuning(replay: Replay) -> Iterator[dict[str, Any]]:
    """Take the lowest loss at one size alone."""
    for size in SIZES:
        chosen = min(replay.names, key=lambda name, size=size: replay.height(name, size))
        yield replay.choice("subtuning", str(size), chosen, replay.cost(size))


def _promotion(replay: Replay) -> Iterator[dict[str, Any]]:
    """Halve successively by the forecasts."""
    left, cost = list(replay.names), 0.0
    for place, size in enumerate(SIZES):
        cost += replay.cost(size, left)
        if place < 2:
            continue  # too few sizes for a forecast
        ranking = select(replay.table(SIZES[: place + 1], left), size, ROWS).ranking
        yield replay.choice("blend, promotion", f"{size} rows", ranking[0], cost)
        left = ranking[: max(2, -(-len(left) // 2))]


def _asha(replay: Replay) -> Iterator[dict[str, Any]]:
    """Run Optuna's over the losses recorded within the full runs."""
    optuna = require("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for factor in (2, 4):
        for order in range(ORDERS):
            names = np.random.default_rng(order).permutation(replay.names).tolist()
            pruner = optuna.pruners.SuccessiveHalvingPruner(1, reduction_factor=factor)
            study = optuna.create_study(direction="minimize", pruner=pruner)
            cost, reached = _replayed(replay, study, names)
            best = min(reached, key=reached.__getitem__)
            yield replay.choice(f"asha, factor {factor}", "", best, cost, trained=True)


def _replayed(replay: Replay, study: Any, names: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Return the FLOPs of all trials, and the last losses of those that ran to the end.

    At every rung the trials arrive in the order of the names, so that it is the same whether they
    run one after another or side by side.
    """
    pruned = require("optuna").trial.TrialState.PRUNED
    cost, reached = 0.0, {}
    for name in names:
        trial, before = study.ask(), 0.0
        for part in PARTS:
            run: Any = replay.run[name, ROWS, part]
            height = replay.height(name, ROWS, part)
            cost += run.training_flops - before + run.judging_flops
            before = run.training_flops
            trial.report(height, round(part / PARTS[0]))
            if part == 1:
                reached[name] = height
                study.tell(trial, height)
            elif trial.should_prune():
                study.tell(trial, state=pruned)
                break
    return cost, reached


def _frozen(replay: Replay) -> Iterator[dict[str, Any]]:
    """Take features of the untrained models: ours, and TransformerRanker's."""
    start: dict[str, Any] = {name: replay.run[name, 0, 1.0] for name in replay.names}
    cost = sum(run.features_flops for run in start.values())
    for of, prefix in (("", ""), ("TransformerRanker ", "ranker_")):
        for score in FEATURE_SCORES:
            values = {name: getattr(run, prefix + score) for name, run in start.items()}
            yield replay.choice(of + score, "", max(values, key=values.__getitem__), cost)


def calibration(replays: Sequence[Replay]) -> pd.DataFrame:
    """Return P(best) of the default said and true, by bin; and coverage of its intervals."""
    said, true = [], []
    inside: dict[float, list[float]] = {0.5: [], 0.9: []}
    for replay in replays:
        for sizes in LADDERS.values():
            selection = replay.search(sizes).selection()
            said += selection.best_probabilities.tolist()
            true += replay.best.tolist()
            for level, shares in inside.items():
                shares.append(coverage(*selection.interval_ends(level), replay.forecast))
    place = np.clip(np.digitize(said, BINS) - 1, 0, 4)
    rows = []
    for number in sorted(set(place)):
        mine = place == number
        means = [f"{np.asarray(values)[mine].mean():.2f}" for values in (said, true)]
        rows.append([f"{BINS[number]:.1f} to {BINS[number + 1]:.1f}", *means, str(mine.sum())])
    for level, shares in inside.items():
        rows.append([f"{100 * level:.0f} % intervals cover", "", f"{np.mean(shares):.0f} %", ""])
    return pd.DataFrame(rows, columns=["P(best) said", "mean said", "true", "candidates"])


def trial_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return means over data sets and seeds (of ASHA also over the orders), as text."""
    rows = []
    for (method, budget), mine in frame.groupby(["method", "budget"], sort=False):
        close = mine.accuracy_lost <= REGRET
        row = {
            "method": method,
            "budget": budget,
            "regret of loss, %": f"{mine.regret.mean():.1f}",
            "accuracy lost, points": f"{mine.accuracy_lost.mean():.1f}",
            f"loss within {REGRET:g} %": f"{100 * (mine.regret <= REGRET).mean():.0f}",
            f"accuracy within {REGRET:g} point": f"{100 * close.mean():.0f}",
            "cost": f"{mine.cost.mean():.3f}",
            "cost with the winner": f"{mine.cost_with_winner.mean():.3f}",
        }
        rows.append(row)
    return pd.DataFrame(rows)


def truths(replays: Sequence[Replay]) -> pd.DataFrame:
    """Return true losses and accuracies: candidates down, data sets across."""
    columns = {
        f"{replay.data}, seed {replay.seed}": {
            name: f"{loss:.3f} ({100 * accuracy:.1f})"
            for name, loss, accuracy in zip(
                replay.names, replay.truth, replay.accuracy, strict=True
            )
        }
        for replay in replays
    }
    return pd.DataFrame(columns).sort_index().rename_axis("candidate").reset_index()


def trial_page(runs: pd.DataFrame) -> str:
    """Return what is chosen when the recorded runs are replayed, as Markdown."""
    groups = [group for _, group in runs.groupby(["data", "seed"], sort=False)]
    parts = [
        f"Commits of the runs: {', '.join(sorted(set(runs.commit)))}.",
        f"Loss (accuracy, %) on {TRUE_ROWS} dev rows, fine-tuned in full:\n\n"
        + markdown(truths([Replay(group) for group in groups])),
    ]
    for rank_by in ("loss", "accuracy"):
        replays = [Replay(group, rank_by) for group in groups]
        chosen = pd.DataFrame([row for replay in replays for row in choices(replay)])
        parts += [
            f"Chosen by {rank_by}; means, costs as shares of full tuning of all candidates:\n\n"
            + markdown(trial_table(chosen)),
            f"The default's probabilities and intervals of {rank_by}:\n\n"
            + markdown(calibration(replays)),
        ]
    return "\n\n".join(parts)


# The command ------------------------------------------------------------------------------------


def main(
    zoo: Path,
    out: Path,
    data: tuple[Path, ...] = (),
    text: tuple[Path, ...] = (),
    seeds: tuple[int, ...] = (0,),
    results: Path = RESULTS,
) -> None:
    """Make the runs that are missing, write them, and judge all that are recorded.

    Args:
        zoo: folder of model folders.
        out: runs are kept here.
        data: folders of labelled rows.
        text: folders of rows read as text.
        seeds: of rows, heads and training.
        results: folder of the files written.
    """
    path = results / "live_choice_runs.csv"
    runs = pd.read_csv(path) if path.is_file() else pd.DataFrame(columns=COLUMNS)
    for seed in seeds:
        for folder in (*data, *text):
            task, settings = load_task(str(folder)), CLASSES
            if folder in text:
                words = (task.train.texts, task.dev.texts)
                task, settings = text_task(*words, name=f"{task.name} as text"), TEXT
            task = replace(task, unlabelled=task.unlabelled.slice(0, 0))
            models = models_of(zoo, decoders=folder in text, out=out)
            own = replace(settings, seed=seed, data_seed=seed)
            made = make_runs(models, task, own, out / f"{task.name}-{seed}".replace(" ", "-"))
            known = runs.set_index(["data", "seed", "model", "rows"]).commit.to_dict()
            keys = made[["data", "seed", "model", "rows"]].itertuples(index=False, name=None)
            made["commit"] = [
                known.get(key, made_by) for key, made_by in zip(keys, made.commit, strict=True)
            ]
            others = runs[(runs.data != task.name) | (runs.seed != seed)]
            runs = made if others.empty else pd.concat([others, made])
            write_frame(runs, path)
    page = choices_page(pd.read_csv(path))
    print(page)
    write_text(results / "live_choice.md", page)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
