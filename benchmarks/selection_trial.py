"""Eight candidates, three data sets: choosing by small subsets against ASHA and TransformerRanker.

    python -m benchmarks.make_zoo --text … --out zoo
    python -m benchmarks.selection_trial --zoo zoo --encoder MINILM --data snips7 sst2 … --out runs
    python -m benchmarks.selection_trial                 # redraws the tables from the recorded runs
    python -m benchmarks.selection_trial --plan --encoder MINILM --data snips7 sst2 … --out runs

Candidates: the six models of the zoo, the first two layers of a pretrained encoder (MiniLM), and
two such layers with random weights.  For every data set and seed it records

- a live selection at 1/8 (sizes and dev rows as `jachess select-live` took them for the trial;
  today it takes fewer of both for so few rows), and runs of the other sizes in `SIZES`;
- frozen features' scores, of ours and of TransformerRanker, on the same rows, and the weights' mean
  tail exponent;
- every candidate fine-tuned on `ROWS` rows, judged on the same dev rows on the way (`PARTS` of its
  steps) and on `TRUE_ROWS` dev rows at the end: the truth.

Everything is kept in --out and not repeated; it takes some ten minutes of a core a data set.  Rows
go to results/selection_trial_runs.csv; the choices replayed from them, to selection_trial.csv and
.md.  With 0 rows the losses are those before fine-tuning, beside the features' scores.

`--plan` trains nothing: what a selection at 1/8 costs today with its own sizes and dev rows, by its
plan, goes to results/selection_cost.csv.

ASHA is Optuna's `SuccessiveHalvingPruner` over the recorded losses within the full runs, as it
stops and never repeats training; its trials are replayed in `ORDERS` drawn orders.  All methods
choose by the dev loss, and again by the dev accuracy (what is missing of it is forecast).

Costs are FLOPs of training and judging, as a share of training and judging every candidate in full.
A model that ASHA chose is then trained; after any other choice its full training is still to be
paid: "with the winner" counts it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers

from jachess_ext._io import from_json, require, write_text
from jachess_ext.compare.finetune import fine_tune
from jachess_ext.compare.judge import model_outputs
from jachess_ext.compare.models import Encoded, encode, load_tokenizer
from jachess_ext.compare.runs import locked, run_all
from jachess_ext.compare.settings import Recipe
from jachess_ext.compare.tasks import Examples, load_task
from jachess_ext.live import LiveSettings, select_live, trial
from jachess_ext.live.choice import RUNS
from jachess_ext.live.plan import Plan, make_plan
from jachess_ext.scaling import Ask, LossTable, select
from jachess_ext.scaling.runs import to_forecast

from .common import RESULTS, commit, markdown, write_frame
from .forecast_scores import coverage
from .frozen_features import SCORES, frozen_features
from .selection import BINS
from .tails import mean_exponent

ROWS = 800
TRUE_ROWS = 600
PARTS = tuple(2.0**-k for k in range(4, -1, -1))
SIZES = (17, 41, 100, 200)
SCORED_ROWS = 512  # that frozen features are of
LADDERS = {"1/8": SIZES[:3], "1/4": SIZES}
"""Sizes of a selection by budget, from an eighth (a quarter) of the rows down to 17."""
ORDERS = 50
REGRET = 1.0
"""Per cent of the best loss, or points of the best accuracy, that a choice may lose."""
JUDGED_ROWS = 200
"""Dev rows that a selection judges on here."""
_ENCODERS = ((2, False), (2, True))


# Making the runs --------------------------------------------------------------------------------

PLANNED = ((None, Recipe()), (ROWS, Recipe()), (ROWS, Recipe(epochs=3.0, batch_size=8)))


def planned(models: Sequence[Path], data: Path, rows: int | None, recipe: Recipe) -> dict[str, Any]:
    """Return what a default selection at 1/8 would take; costs as shares of full tuning of all.

    Args:
        rows: the target; None: all of the data.
    """
    arguments = arguments_of(models, data, 0, recipe)
    default = replace(arguments["settings"], sizes=None, dev_size=None, target=rows)
    plan = make_plan(**arguments | {"settings": default})
    search, count = plan.search, len(plan.task.dev)
    full = sum(
        candidate.training_flops(search.target, recipe) + candidate.judging_flops(count)
        for candidate in plan.candidates
    )
    training = sum(c.training_flops(size, recipe) for c in plan.candidates for size in search.sizes)
    judging = sum(c.judging_flops(count) for c in plan.candidates) * len(search.sizes)
    return {
        "data": data.name,
        "rows": search.target,
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "sizes": " ".join(map(str, search.sizes)),
        "judged": count,
        "training": training / full,
        "cost": (training + judging) / full,
        "commit": commit(),
    }


def make_candidates(zoo: Path | None, encoder: Path, out: Path) -> list[Path]:
    """Return the zoo's folders, if there is one, and the encoder cut to its first layers."""
    folders = [] if zoo is None else sorted(path.parent for path in zoo.glob("*/config.json"))
    for layers, drawn in _ENCODERS:
        folder = out / f"{'random' if drawn else 'minilm'}-{layers}"
        folders.append(folder)
        if (folder / "tokenizer.json").exists():
            continue
        model = transformers.AutoModel.from_pretrained(encoder)
        model.encoder.layer = model.encoder.layer[:layers]
        model.config.num_hidden_layers = layers
        if drawn:
            torch.manual_seed(0)
            model = type(model)(model.config)
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    return folders


def arguments_of(models: Sequence[Path], data: Path, seed: int, recipe: Recipe) -> dict[str, Any]:
    """Return the live selection at 1/8, as `make_plan` is told."""
    files = [next(iter(sorted(data.glob(f"{stem}.*")))) for stem in ("train", "dev")]
    return {
        "models": tuple(map(str, models)),
        "task": ":".join(map(str, files)),
        "settings": LiveSettings(
            budget=1 / 8,
            sizes=LADDERS["1/8"],
            dev_size=JUDGED_ROWS,
            target=ROWS,
            seed=seed,
            data_seed=seed,
            recipe=recipe,
        ),
    }


def make_runs(arguments: dict[str, Any], out: Path) -> pd.DataFrame:
    """Make all runs of one data set and seed; those that `out` has are read."""
    selection = select_live(out=out, progress=print, **arguments)
    share = selection.flops["spent"] / selection.flops["full_tuning"]
    print(f"{out.name}: chosen {Path(selection.best).name}, cost {share:.3f}", flush=True)
    plan = make_plan(**arguments)
    seed = arguments["settings"].seed
    dev = load_task(arguments["task"]).dev.part(0, TRUE_ROWS)
    asks = [Ask(c.model, size) for size in (0, *SIZES) for c in plan.candidates]
    jobs = [plan.trial(ask) for ask in asks]
    full = [plan.trial(Ask(c.model, ROWS)) for c in plan.candidates]
    with locked(out):
        done = run_all(jobs, lambda job: asdict(trial.run(job)), out / RUNS)
        records = {job.name: from_json(each, trial.RunRecord, job.name) for job, each in done}
        truth = {
            job.name: record["rows"]
            for job, record in run_all(
                full, lambda job: {"rows": full_run(job, dev)}, out / "full" / RUNS
            )
        }
    rows = [_row_of(records[job.name]) for job in jobs]
    ranked = ranker_scores(plan, out)
    for row, candidate in zip(rows, plan.candidates, strict=False):  # those of 0 rows come first
        row |= ranked[row["model"]] | feature_scores(plan.trial(Ask(candidate.model, 0)), plan)
        path = Path(candidate.model) / "model.safetensors"
        if path.is_file():
            with suppress(ValueError):  # too small for a spectrum
                row["exponent"] = mean_exponent(require("safetensors.torch").load_file(path))
    rows += [row for job in full for row in truth[job.name]]
    data = Path(arguments["task"].partition(":")[0]).parent.name
    return pd.DataFrame([{"data": data, "seed": seed} | row for row in rows], columns=COLUMNS)


COLUMNS = [
    *("data", "seed", "model", "parameters", "rows", "part", "dev_loss", "accuracy"),
    *("training_flops", "judging_flops", "seconds", "true_loss", "true_accuracy"),
    *("features_flops", *SCORES, *(f"ranker_{name}" for name in SCORES)),
    "exponent",
]
"""Of the runs.  `part`: of the steps of the full run, or 1; `true_loss`, `true_accuracy`: on
`TRUE_ROWS`, of whole runs on the target's rows."""


def _row_of(record: trial.RunRecord) -> dict[str, Any]:
    if record.error is not None:
        raise ValueError(f"the run {record.run} failed: {record.error}")
    return {
        "model": Path(record.model).name,
        "parameters": record.parameters,
        "rows": record.size,
        "part": 1.0,
        "dev_loss": record.dev_loss,
        "accuracy": record.scores["accuracy"],
        "training_flops": record.training_flops,
        "judging_flops": record.judging_flops,
        "seconds": record.seconds,
    }


def feature_scores(job: trial.Trial, plan: Plan) -> dict[str, float]:
    """Return the scores of an untrained model's features of `SCORED_ROWS` rows, and their FLOPs."""
    tokenizer = load_tokenizer(job.model)
    model = trial.new_model(job, tokenizer)
    data = encode(plan.task.train.part(0, SCORED_ROWS), tokenizer, job.recipe.max_length)
    features, labels = frozen_features(model, data, 64), np.asarray(data.labels)
    parameters, _ = trial.count_parameters(model)
    flops = trial.judging_flops(parameters, trial.count_tokens(data))
    return {"features_flops": flops} | {name: of(features, labels) for name, of in SCORES.items()}


def full_run(job: trial.Trial, more_dev: Examples) -> list[dict[str, Any]]:
    """Fine-tune on the job's rows; return a row for each of `PARTS` of the steps."""
    tokenizer = load_tokenizer(job.model)
    model = trial.new_model(job, tokenizer)
    train, dev, whole = (
        encode(part, tokenizer, job.recipe.max_length)
        for part in (job.task.train, job.task.dev, more_dev)
    )
    parameters, _ = trial.count_parameters(model)
    flops = 6.0 * parameters * sum(len(row["input_ids"]) for row in train.rows) * job.recipe.epochs
    judging = 2.0 * parameters * sum(len(row["input_ids"]) for row in dev.rows)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()

    def judge(part: float) -> None:
        loss, accuracy = _judged(model, dev)
        row = {
            "model": Path(job.model).name,
            "parameters": parameters,
            "rows": job.size,
            "part": part,
            "dev_loss": loss,
            "accuracy": accuracy,
            "training_flops": part * flops,
            "judging_flops": judging,
            "seconds": time.perf_counter() - start,
        }
        rows.append(row)

    fine_tune(model, train, job.recipe, seed=job.seed, callbacks=[_AtParts(judge)])
    true_loss, true_accuracy = _judged(model, whole)
    rows[-1] |= {"true_loss": true_loss, "true_accuracy": true_accuracy}
    return rows


class _AtParts(transformers.TrainerCallback):
    def __init__(self, judge: Callable[[float], None]) -> None:
        self.judge = judge

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for part in PARTS:
            if state.global_step == max(1, round(part * state.max_steps)):
                self.judge(part)


def _judged(model: Any, dev: Encoded) -> tuple[float, float]:
    dev = dev.by_length()
    outputs, labels = model_outputs(model, dev.in_order(64), regression=False), np.array(dev.labels)
    of_label = np.maximum(outputs[np.arange(len(labels)), labels], np.finfo(np.float64).tiny)
    return float(-np.log(of_label).mean()), float((outputs.argmax(1) == labels).mean())


def ranker_scores(plan: Plan, out: Path) -> dict[str, dict[str, float]]:
    """Return, by model, TransformerRanker's scores with its default, the mean over layers.

    They are of the rows that ours are scored on.

    Raises:
        MissingExtra: transformer-ranker or datasets is not installed.
    """
    path = out / "ranker.json"
    if path.exists():
        return json.loads(path.read_text("utf-8"))
    logging.disable(logging.INFO)
    library = require("transformer_ranker")
    examples = plan.task.train.part(0, SCORED_ROWS)
    data = require("datasets").Dataset.from_dict(
        {"text": list(examples.texts), "label": [int(label) for label in examples.labels]}
    )
    ranker = library.TransformerRanker(data, text_column="text", label_column="label")
    scores: dict[str, dict[str, float]] = {}
    for candidate in plan.candidates:  # the library names a model by the end of its path
        mine = scores.setdefault(Path(candidate.model).name, {})
        for name in SCORES:
            result = ranker.run([candidate.model], estimator=name, device="cpu", batch_size=64)
            mine[f"ranker_{name}"] = float(next(iter(result.scores.values())))
    write_text(path, json.dumps(scores))
    return scores


# Replaying the choices --------------------------------------------------------------------------


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
        return to_forecast("accuracy", run.accuracy, JUDGED_ROWS)

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
        for score in SCORES:
            values = {name: getattr(run, prefix + score) for name, run in start.items()}
            yield replay.choice(of + score, "", max(values, key=values.__getitem__), cost)


# The tables -------------------------------------------------------------------------------------


def calibration(replays: Sequence[Replay]) -> pd.DataFrame:
    """Return P(best) of the default said and true, by bin; and coverage of its intervals."""
    said, true = [], []
    inside: dict[float, list[float]] = {0.5: [], 0.9: []}
    for replay in replays:
        for sizes in LADDERS.values():
            selection = select(replay.table(sizes), sizes[-1], ROWS)
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


def summary(frame: pd.DataFrame) -> pd.DataFrame:
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


def redraw(runs: pd.DataFrame, results: Path) -> pd.DataFrame:
    """Replay the choices from recorded runs, write and print them."""
    groups = [group for _, group in runs.groupby(["data", "seed"], sort=False)]
    parts = [
        f"Commits of the runs: {', '.join(sorted(set(runs.commit)))}.",
        f"Loss (accuracy, %) on {TRUE_ROWS} dev rows, fine-tuned in full:\n\n"
        + markdown(truths([Replay(group) for group in groups])),
    ]
    frames = []
    for rank_by in ("loss", "accuracy"):
        replays = [Replay(group, rank_by) for group in groups]
        frames.append(pd.DataFrame([row for replay in replays for row in choices(replay)]))
        parts += [
            f"Chosen by {rank_by}; means, costs as shares of full tuning of all candidates:\n\n"
            + markdown(summary(frames[-1])),
            f"The default's probabilities and intervals of {rank_by}:\n\n"
            + markdown(calibration(replays)),
        ]
    text = "\n\n".join(parts)
    print(text)
    write_text(results / "selection_trial.md", text)
    frame = pd.concat(frames)
    write_frame(frame, results / "selection_trial.csv")
    return frame


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    """Make what is missing where data is given; replay; write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", type=Path, help="folder of model folders")
    parser.add_argument("--encoder", type=Path, help="a BERT encoder to cut into candidates")
    parser.add_argument("--data", type=Path, nargs="+", help="folders: train, dev")
    parser.add_argument("--out", type=Path, help="runs are kept here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--max-length", type=int, default=48)
    parser.add_argument("--plan", action="store_true", help="costs alone; --zoo is not needed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    path = options.results / "selection_trial_runs.csv"
    if options.data is None:
        return redraw(pd.read_csv(path), options.results)
    models = make_candidates(options.zoo, options.encoder, options.out / "candidates")
    if options.plan:
        costs = pd.DataFrame(
            [
                planned(models, data, rows, recipe)
                for data in options.data
                for rows, recipe in PLANNED
            ]
        )
        write_frame(costs, options.results / "selection_cost.csv")
        print(costs.to_string())
        return costs
    recipe = Recipe(
        epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        max_length=options.max_length,
    )
    frames: list[pd.DataFrame] = []
    for seed in options.seeds:
        for data in options.data:
            arguments = arguments_of(models, data, seed, recipe)
            runs = make_runs(arguments, options.out / f"{data.name}-{seed}")
            frames.append(runs.assign(commit=commit()))
            write_frame(pd.concat(frames), path)
    return redraw(pd.concat(frames), options.results)


if __name__ == "__main__":
    main(sys.argv[1:])
