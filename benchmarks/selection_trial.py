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

Everything is kept in --out and made once; `--estimate` measures one small run a candidate and tells
the time.  Rows go to results/selection_trial_runs.csv; the choices made from them, replayed, to
selection_trial.csv and .md.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.common.report import RESULTS, commit, read_rows, write_rows
from benchmarks.selection_families import BINS, markdown
from jachess_ext._io import require, write_text
from jachess_ext.compare.finetune import Recipe, fine_tune
from jachess_ext.compare.judge import model_outputs
from jachess_ext.compare.models import Encoded, encode, load_tokenizer
from jachess_ext.compare.runs import locked, run_all
from jachess_ext.compare.tasks import Examples, load_task
from jachess_ext.scaling import Ask, LossTable, coverage, live, select, select_live
from jachess_ext.scaling.baselines import mean_exponent
from jachess_ext.scaling.live import Plan, make_plan, to_forecast

ROWS = 800
TRUE_ROWS = 600
PARTS = tuple(2.0**-k for k in range(4, -1, -1))
SIZES = (17, 41, 100, 200)
LADDERS = {"1/8": SIZES[:3], "1/4": SIZES}
"""Sizes of a selection by budget, from an eighth (a quarter) of the rows down to 17."""
ORDERS = 50
SCORES = ("logme", "hscore", "knn")
REGRET = 1.0
"""Per cent of the best loss, or points of the best accuracy, that a choice may lose."""
JUDGED_ROWS = 200
"""Dev rows that a selection judges on here."""
_ENCODERS = ((2, False), (2, True))


@dataclass
class Run:
    """One candidate on so many rows; `part` of the steps of the full run, or 1.

    `true_loss`, `true_accuracy`: on `TRUE_ROWS`, of whole runs on the target's rows.  With 0 rows
    the losses are those before fine-tuning, beside the features' scores.
    """

    data: str
    seed: int
    model: str
    parameters: int
    rows: int
    part: float
    dev_loss: float
    accuracy: float
    training_flops: float
    judging_flops: float
    seconds: float
    true_loss: float | None = None
    true_accuracy: float | None = None
    features_flops: float | None = None
    logme: float | None = None
    hscore: float | None = None
    knn: float | None = None
    ranker_logme: float | None = None
    ranker_hscore: float | None = None
    ranker_knn: float | None = None
    exponent: float | None = None
    commit: str = ""


@dataclass
class Choice:
    """What a method chose for one data set and seed; costs are shares of full tuning of all.

    `said`: P(best) of the chosen, where the method says it.
    """

    data: str
    seed: int
    rank_by: str
    method: str
    budget: str
    chosen: str
    regret: float
    accuracy_lost: float
    cost: float
    cost_with_winner: float
    said: float | None = None


@dataclass
class Planned:
    """A default selection at 1/8 that was not made; costs are shares of full tuning of all."""

    data: str
    rows: int
    epochs: float
    batch_size: int
    sizes: str
    judged: int
    training: float
    cost: float
    commit: str


PLANNED = ((None, Recipe()), (ROWS, Recipe()), (ROWS, Recipe(epochs=3.0, batch_size=8)))


def planned(models: Sequence[Path], data: Path, rows: int | None, recipe: Recipe) -> Planned:
    """What the selection would take and cost.

    Args:
        rows: the target; None: all of the data.
    """
    arguments = arguments_of(models, data, 0, recipe)
    plan = make_plan(**arguments | {"sizes": None, "dev_size": None, "target": rows})
    search, count = plan.search, len(plan.task.dev)
    full = sum(
        one.training_flops(search.target, recipe) + one.judging_flops(count)
        for one in plan.candidates
    )
    runs = [(one, size) for one in plan.candidates for size in search.sizes]
    training = sum(one.training_flops(size, recipe) for one, size in runs)
    judging = sum(one.judging_flops(count) for one, _ in runs)
    return Planned(
        data=data.name,
        rows=search.target,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        sizes=" ".join(map(str, search.sizes)),
        judged=count,
        training=training / full,
        cost=(training + judging) / full,
        commit=commit(),
    )


# Making the runs --------------------------------------------------------------------------------


def make_candidates(zoo: Path | None, encoder: Path, out: Path) -> list[Path]:
    """The zoo's folders, if there is one, and the encoder cut to its first layers."""
    made = [] if zoo is None else sorted(path.parent for path in zoo.glob("*/config.json"))
    for layers, drawn in _ENCODERS:
        folder = out / f"{'random' if drawn else 'minilm'}-{layers}"
        made.append(folder)
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
    return made


def arguments_of(models: Sequence[Path], data: Path, seed: int, recipe: Recipe) -> dict[str, Any]:
    """The live selection at 1/8, as `make_plan` is told."""
    files = [next(iter(sorted(data.glob(f"{stem}.*")))) for stem in ("train", "dev")]
    return {
        "models": tuple(map(str, models)),
        "task": ":".join(map(str, files)),
        "budget": 1 / 8,
        "sizes": LADDERS["1/8"],
        "dev_size": JUDGED_ROWS,
        "target": ROWS,
        "seed": seed,
        "data_seed": seed,
        "recipe": recipe,
    }


def make_runs(arguments: dict[str, Any], out: Path) -> list[Run]:
    """All runs of one data set and seed; those that `out` has are read."""
    selection = select_live(out=out, progress=print, **arguments)
    share = selection.flops["spent"] / selection.flops["full_tuning"]
    print(f"{out.name}: chosen {Path(selection.best).name}, cost {share:.3f}", flush=True)
    plan = make_plan(**arguments)
    scored = make_plan(**arguments | {"screen": 0.999})  # features are scored, and all go on
    data, seed = Path(arguments["task"].partition(":")[0]).parent.name, arguments["seed"]
    dev = load_task(arguments["task"]).dev.part(0, TRUE_ROWS)
    asks = [Ask(c.model, size, seed) for size in (0, *SIZES) for c in plan.candidates]
    jobs = [(plan if ask.rows else scored).job(ask, out) for ask in asks]
    full = [plan.job(Ask(c.model, ROWS, seed), out) for c in plan.candidates]
    with locked(out):
        records = {job.name: r for job, r in run_all(jobs, live.run, out / live.RUNS)}
        truth = {
            job.name: record["rows"]
            for job, record in run_all(
                full, lambda job: {"rows": full_run(job, dev)}, out / "full" / live.RUNS
            )
        }
    rows = [_of_record(records[job.name], data) for job in jobs]
    rows += [Run(data, seed, **row) for job in full for row in truth[job.name]]
    _add_ranker(rows, scored, out)
    tails = {}
    for candidate in plan.candidates:
        path = Path(candidate.model) / "model.safetensors"
        if path.is_file():
            weights = require("safetensors.torch").load_file(path)
            with suppress(ValueError):  # too small for a spectrum
                tails[path.parent.name] = mean_exponent(weights)
    return [replace(row, exponent=None if row.rows else tails.get(row.model)) for row in rows]


def _of_record(record: dict[str, Any], data: str) -> Run:
    if record["error"] is not None:
        raise ValueError(f"the run {record['run']} failed: {record['error']}")
    return Run(
        data=data,
        seed=record["seed"],
        model=Path(record["model"]).name,
        parameters=record["parameters"],
        rows=record["size"],
        part=1.0,
        dev_loss=record["dev_loss"],
        accuracy=record["scores"]["accuracy"],
        training_flops=record["training_flops"],
        judging_flops=record["judging_flops"],
        seconds=sum(record["seconds"].values()),
        features_flops=record["features_flops"] or None,
        **(record["features"] or {}),
    )


def full_run(job: live.Job, more_dev: Examples) -> list[dict[str, Any]]:
    """Fine-tunes on the job's rows; what was judged at `PARTS` of the steps, as fields of `Run`."""
    tokenizer = load_tokenizer(job.model)
    model = live.new_model(job, tokenizer)
    train, dev, whole = (
        encode(part, tokenizer, job.recipe.max_length)
        for part in (job.task.train, job.task.dev, more_dev)
    )
    parameters, _ = live.count_parameters(model)
    flops = 6.0 * parameters * sum(len(row["input_ids"]) for row in train.rows) * job.recipe.epochs
    judging = 2.0 * parameters * sum(len(row["input_ids"]) for row in dev.rows)
    made: list[dict[str, Any]] = []
    start = time.perf_counter()

    def judge(part: float) -> None:
        loss, accuracy = _judged(model, dev)
        made.append(
            {
                **{"model": Path(job.model).name, "parameters": parameters, "rows": job.size},
                **{"part": part, "dev_loss": loss, "accuracy": accuracy},
                **{"training_flops": part * flops, "judging_flops": judging},
                "seconds": time.perf_counter() - start,
            }
        )

    fine_tune(model, train, job.recipe, seed=job.seed, callbacks=[_AtParts(judge)])
    true_loss, true_accuracy = _judged(model, whole)
    made[-1] |= {"true_loss": true_loss, "true_accuracy": true_accuracy}
    return made


class _AtParts(transformers.TrainerCallback):
    def __init__(self, judge: Callable[[float], None]) -> None:
        self.judge = judge

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for part in PARTS:
            if state.global_step == max(1, round(part * state.max_steps)):
                self.judge(part)


def _judged(model: Any, dev: Encoded) -> tuple[float, float]:
    dev = dev.by_length()
    found, labels = model_outputs(model, dev.in_order(64), regression=False), np.asarray(dev.labels)
    said = np.maximum(found[np.arange(len(labels)), labels], np.finfo(np.float64).tiny)
    return float(-np.log(said).mean()), float((found.argmax(1) == labels).mean())


def _add_ranker(rows: list[Run], plan: Plan, out: Path) -> None:
    """TransformerRanker's scores of the rows ours are scored on; nothing where it is missing."""
    path = out / "ranker.json"
    if path.exists():
        scores = json.loads(path.read_text("utf-8"))
    else:
        scores = {name: ranker_scores(plan, name) for name in SCORES}
        write_text(path, json.dumps(scores))
    for row in rows:
        if row.rows == 0:
            for name in SCORES:
                setattr(row, f"ranker_{name}", scores[name][row.model])


def ranker_scores(plan: Plan, name: str) -> dict[str, float]:
    """Model -> TransformerRanker's score with its default, the mean over layers."""
    logging.disable(logging.INFO)
    library = require("transformer_ranker")
    examples = plan.job(Ask(plan.candidates[0].model, 0), Path()).features
    data = require("datasets").Dataset.from_dict(
        {"text": list(examples.texts), "label": [int(label) for label in examples.labels]}
    )
    ranker = library.TransformerRanker(data, text_column="text", label_column="label")
    models = [candidate.model for candidate in plan.candidates]
    found = {}
    for model in models:  # the library names a model by the end of its path
        result = ranker.run([model], estimator=name, device="cpu", batch_size=64)
        found[Path(model).name] = float(next(iter(result.scores.values())))
    return found


def estimate(arguments: dict[str, Any], out: Path) -> float:
    """Seconds that all runs of one data set and seed take, from one run of 50 rows a candidate."""
    plan = make_plan(**arguments)
    rows, judgings = ROWS + sum(SIZES), len(PARTS) + len(SIZES) + 4  # the last on more rows
    jobs = [plan.job(Ask(c.model, 50, arguments["seed"]), out) for c in plan.candidates]
    seconds = [record["seconds"] for _, record in run_all(jobs, live.run, out / live.RUNS)]
    return sum(s["training"] / 50 * rows + s["judging"] * judgings for s in seconds)


# Replaying the choices --------------------------------------------------------------------------


class Replay:
    """The recorded runs of one data set and seed, to choose from by "loss" or "accuracy"."""

    def __init__(self, rows: Sequence[Run], rank_by: str = "loss") -> None:
        self.rank_by = rank_by
        whole = [row for row in rows if row.rows == ROWS and row.part == 1]
        self.data, self.seed = rows[0].data, rows[0].seed
        self.names = [row.model for row in whole]
        self.parameters = np.array([float(row.parameters) for row in whole])
        self.truth = np.array([float(row.true_loss or np.nan) for row in whole])
        self.accuracy = np.array([float(row.true_accuracy or np.nan) for row in whole])
        self.run = {(row.model, row.rows, row.part): row for row in rows}
        self.full = np.array([row.training_flops + row.judging_flops for row in whole])

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
        """The dev loss, or what is missing of the dev accuracy."""
        run = self.run[name, rows, part]
        if self.rank_by == "loss":
            return run.dev_loss
        return to_forecast("accuracy", run.accuracy, JUDGED_ROWS)

    def cost(self, name: str, rows: int) -> float:
        """FLOPs of one run on a subset."""
        run = self.run[name, rows, 1.0]
        return run.training_flops + run.judging_flops

    def table(self, sizes: Sequence[int], names: Sequence[str] | None = None) -> LossTable:
        """Losses on subsets."""
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
    ) -> Choice:
        """`trained`: whether the cost has the chosen model's full training."""
        place = self.names.index(chosen)
        full = self.full.sum()
        return Choice(
            *(self.data, self.seed, self.rank_by, method, budget, chosen),
            100 * (self.truth[place] / self.truth.min() - 1),
            100 * (self.accuracy.max() - self.accuracy[place]),
            cost / full,
            (cost + (0 if trained else self.full[place])) / full,
            said,
        )


def choices(replay: Replay) -> Iterator[Choice]:
    """Every method's."""
    yield from _forecasting(replay)
    yield from _subtuning(replay)
    yield from _promotion(replay)
    yield from _asha(replay)
    yield from _frozen(replay)
    largest = replay.names[int(replay.parameters.argmax())]
    yield replay.choice("modelsize", "", largest, 0.0)
    tails = {name: replay.run[name, 0, 1.0].exponent for name in replay.names}
    if None not in tails.values():
        yield replay.choice("nlpmetrics", "", min(tails, key=lambda name: tails[name] or 0), 0.0)


FORECASTS: dict[str, dict[str, Any]] = {
    "blend": {"method": "blend"},
    "ats": {"method": "ats"},
    "ats tau=1": {"method": "ats", "tau": 1.0},
    "rectified": {"method": "rectified"},
}


def _forecasting(replay: Replay) -> Iterator[Choice]:
    """All sizes of a ladder for every candidate; rectified reads the loss before fine-tuning."""
    for budget, sizes in LADDERS.items():
        cost = sum(replay.cost(name, size) for name in replay.names for size in sizes)
        for method, given in FORECASTS.items():
            read = (0, *sizes) if method == "rectified" else sizes
            start = sum(replay.cost(name, 0) for name in replay.names if 0 in read)
            found = select(replay.table(read), sizes[-1], ROWS, **given)
            chosen = found.ranking[0]
            said = None
            if method == "blend":
                said = float(found.best_probabilities[replay.names.index(chosen)])
            yield replay.choice(method, budget, chosen, cost + start, said=said)


def _subtuning(replay: Replay) -> Iterator[Choice]:
    """The lowest loss at one size alone."""
    for size in SIZES:
        losses = {name: replay.height(name, size) for name in replay.names}
        cost = sum(replay.cost(name, size) for name in replay.names)
        yield replay.choice("subtuning", str(size), min(losses, key=losses.__getitem__), cost)


def _promotion(replay: Replay) -> Iterator[Choice]:
    """Successive halving by the forecasts: the better half goes on to the next size."""
    left, cost = list(replay.names), 0.0
    for place, size in enumerate(SIZES):
        cost += sum(replay.cost(name, size) for name in left)
        if place < 2:
            continue  # too few sizes for a forecast
        ranking = select(replay.table(SIZES[: place + 1], left), size, ROWS).ranking
        yield replay.choice("blend, promotion", f"{size} rows", ranking[0], cost)
        left = ranking[: max(2, -(-len(left) // 2))]


def _asha(replay: Replay) -> Iterator[Choice]:
    """Optuna's, over the losses recorded within the full runs."""
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
    """FLOPs of all trials, and the last losses of those that ran to the end.

    At every rung the trials arrive in the order of the names, so that it is the same whether they
    run one after another or side by side.
    """
    pruned = require("optuna").trial.TrialState.PRUNED
    cost, reached = 0.0, {}
    for name in names:
        trial, before = study.ask(), 0.0
        for part in PARTS:
            run, height = replay.run[name, ROWS, part], replay.height(name, ROWS, part)
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


def _frozen(replay: Replay) -> Iterator[Choice]:
    """Features of the untrained models: ours, and TransformerRanker's."""
    start = {name: replay.run[name, 0, 1.0] for name in replay.names}
    cost = sum(run.features_flops or 0.0 for run in start.values())
    for of, prefix in (("", ""), ("TransformerRanker ", "ranker_")):
        for score in SCORES:
            found = {name: getattr(run, prefix + score) for name, run in start.items()}
            yield replay.choice(of + score, "", max(found, key=found.__getitem__), cost)


def calibration(replays: Sequence[Replay]) -> list[list[str]]:
    """P(best) of the default: said, true, and of how many, by bin; coverage of its intervals."""
    said, true = [], []
    inside: dict[float, list[float]] = {0.5: [], 0.9: []}
    for replay in replays:
        for sizes in LADDERS.values():
            found = select(replay.table(sizes), sizes[-1], ROWS)
            said += found.best_probabilities.tolist()
            true += replay.best.tolist()
            for level, shares in inside.items():
                shares.append(coverage(*found.interval_ends(level), replay.forecast))
    place = np.clip(np.digitize(said, BINS) - 1, 0, 4)
    rows = [["P(best) said", "mean said", "true", "candidates"]]
    for number in range(5):
        mine = place == number
        if mine.any():
            means = [f"{np.asarray(values)[mine].mean():.2f}" for values in (said, true)]
            rows.append([f"{BINS[number]:.1f} to {BINS[number + 1]:.1f}", *means, str(mine.sum())])
    for level, shares in inside.items():
        title = f"{100 * level:.0f} % intervals cover"
        rows.append([title, "", f"{np.mean(shares):.0f} %", ""])
    return rows


def summary(found: Sequence[Choice]) -> list[list[str]]:
    """Means over data sets and seeds (of ASHA also over the orders); the head first."""
    rows = [
        [
            *("method", "budget", "regret of loss, %", "accuracy lost, points"),
            *(f"loss within {REGRET:g} %", f"accuracy within {REGRET:g} point"),
            *("cost", "cost with the winner"),
        ]
    ]
    groups = dict.fromkeys((one.method, one.budget) for one in found)
    for method, budget in groups:
        mine = [one for one in found if (one.method, one.budget) == (method, budget)]
        regrets = np.array([one.regret for one in mine])
        lost = np.array([one.accuracy_lost for one in mine])
        rows.append(
            [
                *(method, budget, f"{regrets.mean():.1f}"),
                f"{lost.mean():.1f}",
                f"{100 * (regrets <= REGRET).mean():.0f}",
                f"{100 * (lost <= REGRET).mean():.0f}",
                f"{np.mean([one.cost for one in mine]):.3f}",
                f"{np.mean([one.cost_with_winner for one in mine]):.3f}",
            ]
        )
    return rows


def truths(replays: Sequence[Replay]) -> list[list[str]]:
    """Candidates down, true losses and accuracies across."""
    names = sorted({name for replay in replays for name in replay.names})
    rows = [["candidate", *(f"{replay.data}, seed {replay.seed}" for replay in replays)]]
    for name in names:
        cells = []
        for replay in replays:
            place = replay.names.index(name)
            cells.append(f"{replay.truth[place]:.3f} ({100 * replay.accuracy[place]:.1f})")
        rows.append([name, *cells])
    return rows


def redraw(rows: Sequence[Run], results: Path) -> list[Choice]:
    """The choices made from recorded runs, written and printed."""
    groups = dict.fromkeys((row.data, row.seed) for row in rows)
    apart = [[row for row in rows if (row.data, row.seed) == key] for key in groups]
    parts = [
        f"Commits of the runs: {', '.join(sorted({row.commit for row in rows}))}.",
        f"Loss (accuracy, %) on {TRUE_ROWS} dev rows, fine-tuned in full:\n\n"
        + markdown(truths([Replay(group) for group in apart])),
    ]
    found: list[Choice] = []
    for rank_by in ("loss", "accuracy"):
        replays = [Replay(group, rank_by) for group in apart]
        made = [choice for replay in replays for choice in choices(replay)]
        found += made
        parts += [
            f"Chosen by {rank_by}; means, costs as shares of full tuning of all candidates:\n\n"
            + markdown(summary(made)),
            f"The default's probabilities and intervals of {rank_by}:\n\n"
            + markdown(calibration(replays)),
        ]
    text = "\n\n".join(parts)
    print(text)
    write_text(results / "selection_trial.md", text)
    write_rows(found, results / "selection_trial.csv")
    return found


def main(argv: list[str] | None = None) -> list[Choice]:
    """Make what is missing where data is given; judge; write."""
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
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--plan", action="store_true", help="costs alone; --zoo is not needed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    path = options.results / "selection_trial_runs.csv"
    if options.data is None:
        return redraw(read_rows(path, Run), options.results)
    models = make_candidates(options.zoo, options.encoder, options.out / "candidates")
    if options.plan:
        costs = [planned(models, data, *case) for data in options.data for case in PLANNED]
        write_rows(costs, options.results / "selection_cost.csv")
        for one in costs:
            print(one)
        return []
    recipe = Recipe(
        epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        max_length=options.max_length,
    )
    rows: list[Run] = []
    for seed in options.seeds:
        for data in options.data:
            arguments, out = arguments_of(models, data, seed, recipe), f"{data.name}-{seed}"
            if options.estimate:
                seconds = estimate(arguments, options.out / out)
                print(f"{out}: about {seconds / 60:.1f} minutes", flush=True)
                continue
            made = make_runs(arguments, options.out / out)
            for row in made:
                row.commit = commit()
            rows += made
            write_rows(rows, path)
    return [] if options.estimate else redraw(rows, options.results)


if __name__ == "__main__":
    main(sys.argv[1:])
