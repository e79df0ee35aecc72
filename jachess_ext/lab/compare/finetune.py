"""Fine-tuning with methods × tasks × seeds: the jobs of a grid, a single run, the whole grid."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import transformers
from torch import Tensor, nn
from transformers.integrations import get_reporting_integration_callbacks

from ..._io import DataError, finite, from_json, require, whole_folder, write_json
from ...smoothness.settings import layer_indices
from ...training import JacHess, Method, parse_method, with_lora
from ...training.batches import mix_seed
from ...training.corruption import embedding_scale, unknown_token_id
from ...training.methods.weights import is_masked
from ..attack import NEAREST, read_synonyms
from ..workbench.models import (
    Encoded,
    Model,
    check_tokens,
    content_digest,
    encode,
    load_config,
    load_model,
    load_tokenizer,
    model_version,
)
from ..workbench.runs import Record, locked, run_all, write_results
from ..workbench.settings import Recipe
from ..workbench.tasks import (
    Task,
    check_shift,
    digest,
    draw_rows,
    hold_out,
    load_task,
    split_validation,
)
from ..workbench.training import fine_tune
from .judge import judge, judge_task
from .noise import add_label_noise
from .records import RESULTS, Figures, RunRecord
from .settings import Conditions, Grid
from .tables import REFERENCE

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_EDITION = 5  # version of the records: increase it with a change of code that changes the results


# The grid's runs


@dataclass(frozen=True)
class Job:
    """Specification of a run: everything that its result depends on.

    Attributes:
        kind: "tuning" for runs that choose a hyperparameter, "final" for those that are reported.
        model: path or hub id of the model.
        version: digest or commit of the model's files.
        task: the task with the rows to use.
        method: the method's text in the grid, which is its name in tables.
        value: value of the method's hyperparameter (knob); None for the method's own.
        seed: seed of the run.
        recipe: settings of fine-tuning.
        conditions: conditions of the evaluation.
        shift: other tasks on whose dev rows the model is evaluated as well.
        label_noise: share of wrong labels in `task`, for the record only.
    """

    kind: Literal["tuning", "final"]
    model: str
    version: str
    task: Task
    method: str
    value: float | None
    seed: int
    recipe: Recipe
    conditions: Conditions
    shift: tuple[Task, ...] = ()
    label_noise: float = 0.0

    @property
    def tuned_method(self) -> Method:
        """The method with its hyperparameter set to `value`."""
        method = parse_method(self.method)
        return method if self.value is None else _set_knob(method, self.value)

    @cached_property
    def name(self) -> str:
        """File name of the run: kind, task, method, seed, and a digest of the specification."""
        # A run whose file exists is not repeated, so that everything that can change a figure has
        # to be in the digest.  It includes the texts and labels of the rows, and the contents of
        # the files of models and synonyms, as the user may edit a file under the same path.
        identity = {
            "edition": _EDITION,
            "task": digest(self.task),
            "shift": [digest(task) for task in self.shift],
            "settings": self.tuned_method.settings,
            "recipe": asdict(self.recipe),
            "conditions": self.conditions.identity,
        }
        sources = _synonyms(self.conditions, [self.tuned_method])
        if files := [Path(source) for source in sources if source != NEAREST]:
            identity["synonyms"] = [content_digest(file) for file in files]
        names = ("kind", "model", "version", "method", "value", "seed")
        text = json.dumps(finite(identity | {name: getattr(self, name) for name in names}))
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.task.name}-{self.method}")[:60]
        return f"{self.kind}-{slug}-s{self.seed}-{key}"


def _set_knob(method: Method, value: float) -> Method:
    """Return the method with its hyperparameter set to a value, if it has one."""
    return method if method.knob is None else method.replace(**{method.knob: value})


@dataclass(frozen=True)
class LoadedGrid:
    """A grid with its tasks loaded and validated, so that no run fails because of the user's input.

    Attributes:
        grid: the grid.
        version: digest or commit of the model's files.
        tasks: the tasks, with the rows that the grid uses.
        shift: name of a task -> other tasks that its models are evaluated on as well.
        tasks_of_seed: seed -> the tasks with the label noise of this seed.
    """

    grid: Grid
    version: str
    tasks: tuple[Task, ...]
    shift: Mapping[str, tuple[Task, ...]]
    tasks_of_seed: Mapping[int, tuple[Task, ...]]


def load(grid: Grid) -> LoadedGrid:
    """Load all data and validate the methods, the model and the shifts of a grid.

    Raises:
        DataError: a task, method, size, shift or tuning that cannot be used.
    """
    tokenizer, config = load_tokenizer(grid.model), load_config(grid.model)
    try:
        transformers.SchedulerType(grid.recipe.scheduler)
        for text in grid.methods:
            method = parse_method(text)
            _check_method(method, tokenizer, config)
            for value in tuning_values(text, grid):
                _set_knob(method, value)
    except ValueError as error:
        raise DataError(str(error)) from error
    _check_conditions(grid, tokenizer)
    full_tasks = [load_task(spec, grid.columns) for spec in grid.tasks]
    tasks = tuple(_draw_task(task, grid, tokenizer) for task in full_tasks)
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        raise DataError(
            f"two tasks have one name: {', '.join(names)}; give another with name=<task>"
        )
    open_methods = {text: parse_method(text).label for text in grid.methods if _has_open_knob(text)}
    if unknown := sorted(set(grid.tuning.methods) - {*open_methods, *open_methods.values()}):
        raise DataError(
            f"tuning names the method {unknown[0]!r}, which is none of the grid's with a value to "
            f"choose; expected one of: {'; '.join(open_methods) or 'none'}"
        )
    shift = {
        name: tuple(_draw_dev_rows(target, grid, tokenizer) for target in targets)
        for name, targets in _shift_targets(grid, tasks).items()
    }
    if any(tuning_values(method, grid) for method in grid.methods):
        for task in tasks:
            hold_out(task, grid.tuning.validation)
    tasks_of_seed = dict.fromkeys(grid.seeds, tasks)
    if grid.label_noise:
        for seed in grid.seeds:
            noise_seed = mix_seed(grid.data_seed, seed, 1)
            tasks_of_seed[seed] = tuple(
                add_label_noise(task, grid.label_noise, noise_seed) for task in tasks
            )
    return LoadedGrid(grid, model_version(grid.model), tasks, shift, tasks_of_seed)


def _synonyms(conditions: Conditions, methods: Iterable[Method]) -> list[str]:
    """Return the sources of synonyms of the attack and of the methods, sorted, without repeats."""
    sources = [conditions.attack, *(getattr(method, "synonyms", None) for method in methods)]
    return sorted({source for source in sources if source is not None})


def _check_conditions(grid: Grid, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if the tokenizer has no token to corrupt with, or synonyms are unreadable."""
    if grid.conditions.corruption and unknown_token_id(tokenizer) is None:
        raise DataError(
            f"{grid.model}: the tokenizer has no unknown and no mask token to corrupt texts with; "
            "set tokenizer.unk_token, or leave conditions.corruption empty"
        )
    for source in _synonyms(grid.conditions, map(parse_method, grid.methods)):
        if source != NEAREST:
            read_synonyms(source)


def _check_method(
    method: Method, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> None:
    """Raise ValueError for a method that the tokenizer or the layers of the model do not allow."""
    if method.name == "tapt" and is_masked(config) and tokenizer.mask_token is None:
        raise ValueError("method 'tapt' masks tokens, and the tokenizer has no mask token")
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(method, JacHess) or num_layers is None:
        return
    regulariser = method.build_regulariser(nn.Module())
    layers = regulariser.settings.layers
    count = 1 if layers == "logits" else len(layer_indices(layers, num_layers))
    if isinstance(regulariser.weights, Tensor) and len(regulariser.weights) != count:
        raise ValueError(
            f"method {method.label!r} has {len(regulariser.weights)} weights for {count} layers"
        )


def _shift_targets(grid: Grid, tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Load the other tasks that models are evaluated on, name of the task -> other tasks.

    Raises:
        DataError: `grid.shift` names an unknown task, or a task that has other classes.
    """
    names = [task.name for task in tasks]
    if unknown := sorted(set(grid.shift) - set(names)):
        raise DataError(f"shift names the task {unknown[0]!r}; the tasks are {', '.join(names)}")
    targets = {}
    for task in tasks:
        specs = grid.shift.get(task.name, ())
        targets[task.name] = [load_task(spec, grid.columns) for spec in specs]
        for target in targets[task.name]:
            check_shift(task, target)
    return targets


def _draw_task(task: Task, grid: Grid, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Return the task with the rows that the grid uses, and validation rows if it needs them."""
    size = grid.train_size
    if size is not None and grid.fewer:
        size = min(size, len(task.train))
    drawn = draw_rows(task, size, grid.unlabelled_size, grid.dev_size, grid.data_seed)
    check_tokens(drawn, task, tokenizer)
    return split_validation(drawn, grid.validation, grid.data_seed) if grid.validation else drawn


def _draw_dev_rows(target: Task, grid: Grid, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Return the task for an evaluation under domain shift: its dev rows, and one training row,
    since a task must have one."""
    drawn = draw_rows(target, None, 1, grid.shift_size, grid.data_seed)
    check_tokens(drawn, target, tokenizer, ["dev"])
    return replace(drawn, train=drawn.train.slice(0, 1))


def _has_open_knob(text: str) -> bool:
    """Return whether a method has a knob (hyperparameter) that its text in the grid leaves open."""
    knob = parse_method(text).knob
    return knob is not None and f"{knob}=" not in text


def tuning_values(text: str, grid: Grid) -> tuple[float, ...]:
    """Return the values to try for the hyperparameter of a method, ascending; see `Tuning`.

    Args:
        text: the method's text in the grid; if it sets the hyperparameter, there are no values.
        grid: the grid.
    """
    method, tuning = parse_method(text), grid.tuning
    if not _has_open_knob(text):
        return ()
    for name in (text, method.label):
        if name in tuning.methods:
            return tuple(sorted(tuning.methods[name]))
    if method.knob == "unlab_lr_ratio":
        return tuple(sorted(tuning.unlab_lr_ratio))
    if isinstance(method, JacHess) or not tuning.strength:
        return tuple(sorted(tuning.strength))
    return tuple(sorted(factor * method.strength for factor in tuning.factors))


def tuning_jobs(loaded: LoadedGrid) -> list[Job]:
    """Return the tuning runs: one for every method, task, value to try and seed.

    They are evaluated on held-out training rows without noise.
    """
    grid = loaded.grid
    job = partial(Job, "tuning", grid.model, loaded.version)
    return [
        job(tuning_task, method, value, seed, grid.recipe, grid.conditions.clean_only)
        for task in loaded.tasks
        for method in grid.methods
        if (values := tuning_values(method, grid))
        for tuning_task in [hold_out(task, grid.tuning.validation)]
        for value in values
        for seed in grid.tuning.seeds
    ]


def final_jobs(loaded: LoadedGrid, chosen: Mapping[tuple[str, str], float]) -> list[Job]:
    """Return the final runs: one for every method, task and seed.

    They are sorted by seed, so that an interrupted grid has complete pairs to compare.

    Args:
        loaded: the grid.
        chosen: (task, method) -> value of the method's hyperparameter.
    """
    grid = loaded.grid
    job = partial(
        Job,
        "final",
        grid.model,
        loaded.version,
        recipe=grid.recipe,
        conditions=grid.conditions,
        label_noise=grid.label_noise,
    )
    return [
        job(task, method, chosen.get((task.name, method)), seed, shift=loaded.shift[task.name])
        for seed in grid.seeds
        for task in loaded.tasks_of_seed[seed]
        for method in grid.methods
    ]


def choose(records: Iterable[RunRecord]) -> dict[tuple[str, str], float]:
    """Choose the hyperparameter of each method on each task from the records of tuning runs.

    Returns:
        (task, method) -> best value; see `Tuning`.
    """
    # Pairs (score, -Brier) are compared lexicographically: equal scores are frequent with few rows.
    # If both are equal, the smaller value is chosen, as values are sorted and max returns the
    # first.
    scores: dict[tuple[str, str], dict[float, list[tuple[float, float]]]] = {}
    for record in records:
        assert record.value is not None  # a tuning run has one
        by_value = scores.setdefault((record.task, record.method), {})
        score = -np.inf if record.score is None else record.score
        brier = 0.0 if record.brier is None else record.brier
        by_value.setdefault(record.value, []).append((score, -brier))
    return {
        key: max(sorted(by_value), key=lambda value: tuple(np.mean(by_value[value], axis=0)))
        for key, by_value in scores.items()
    }


# One run


@contextmanager
def _without_autocast(model: Model) -> Iterator[None]:
    """Context manager: remove the autocast that accelerate wraps the model's forward in."""
    # accelerate sets model.forward on the instance, where it hides that of the class; without it,
    # the epochs of a bf16 run are evaluated in float32, as the model after the last epoch is
    forward = model.__dict__.pop("forward", None) if hasattr(model, "_original_forward") else None
    try:
        yield
    finally:
        if forward is not None:
            model.__dict__["forward"] = forward


def run(
    job: Job, *, models: Path | None = None, report_to: Sequence[str] = (), logs: Path | None = None
) -> RunRecord:
    """Fine-tune and evaluate a model.

    Args:
        job: specification of the run.
        models: folder of saved models, in which one named as the run is created; None saves none.
        report_to: trackers of transformers' Trainer.
        logs: folder of TensorBoard logs, in which one named as the run is replaced; None for
            TensorBoard's default.

    Returns:
        The record, reproducible except for its ``seconds``.  If the loss is not finite, it has an
        ``error`` and no figures.
    """
    if logs is not None and "tensorboard" in report_to:
        shutil.rmtree(logs / job.name, ignore_errors=True)
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(logs / job.name)
    tokenizer = load_tokenizer(job.model)
    task = job.task
    base = load_model(job.model, task.outputs, tokenizer, job.seed, task.is_regression)
    scale = embedding_scale(base)
    model = with_lora(base, seed=job.seed) if job.recipe.lora else base
    method = job.tuned_method
    record = RunRecord(
        run=job.name,
        kind=job.kind,
        task=task.name,
        method=job.method,
        control=method.control or bool(method.settings.get("placebo")),
        value=job.value,
        seed=job.seed,
        model=job.model,
        metric=task.metric.name,
        rows=(len(task.train), len(task.unlabelled), len(task.dev)),
        validation_rows=len(task.validation or ()),
        label_noise=job.label_noise,
        settings={"method": method.name, **method.settings},
        recipe=asdict(job.recipe),
    )
    needs_best_epoch = job.method == REFERENCE and task.validation is not None
    best = BestEpoch(job, tokenizer) if needs_best_epoch else None
    start = _clock()
    try:
        fine_tune(
            model,
            encode(task.train, tokenizer, job.recipe.max_length),
            job.recipe,
            seed=job.seed,
            method=method,
            unlabelled=encode(task.unlabelled, tokenizer, job.recipe.max_length),
            callbacks=[] if best is None else [best],
            report_to=report_to,
            run_name=job.name,
        )
        trained = _clock()
        figures = judge_task(
            model, tokenizer, scale, task, job.shift, job.conditions, job.recipe.max_length
        )
    except FloatingPointError as error:
        return replace(record, error=str(error))
    finally:
        if "wandb" in report_to:  # its callback leaves the run open for the next Trainer
            importlib.import_module("wandb").finish()
    best_seconds = np.zeros(2) if best is None else best.seconds
    training, processor = (trained - start - best_seconds).tolist()
    judging = float((_clock() - trained + best_seconds)[0])
    if models is not None:
        _save(model, tokenizer, job, models / job.name)
    return replace(
        record,
        **vars(figures),
        embedding_growth=embedding_scale(model) / scale,
        best_epoch=None if best is None else best.figures,
        seconds={"training": training, "processor": processor, "judging": judging},
    )


def _save(model: Model, tokenizer: PreTrainedTokenizerBase, job: Job, path: Path) -> None:
    """Save the model (only the adapters with LoRA) and the tokenizer atomically in a folder."""
    with whole_folder(path) as folder:
        # TAPT changes the weights below LoRA's adapters, too
        has_new_base = job.recipe.lora and job.tuned_method.name == "tapt"
        merged = cast("PeftModel", model).merge_and_unload() if has_new_base else model
        merged.save_pretrained(str(folder))
        tokenizer.save_pretrained(folder)


def _clock() -> np.ndarray:
    """Return wall-clock time and processor time of this process, in seconds, [2]."""
    return np.array([time.perf_counter(), time.process_time()])


class BestEpoch(transformers.TrainerCallback):
    """Evaluates the model after each epoch, and finds the epoch with the best validation score.

    Among epochs with equal scores it is the one with the lowest validation loss, then the first.

    Attributes:
        figures: figures of the best epoch, see `RunRecord.best_epoch`; None before the end of the
            first epoch.
        seconds: time spent on the evaluation, [2], see `_clock`.
    """

    def __init__(self, job: Job, tokenizer: PreTrainedTokenizerBase) -> None:
        self.figures: dict[str, float | None] | None = None
        self.seconds = np.zeros(2)
        self._job = job
        self._best = (-np.inf, -np.inf)
        assert job.task.validation is not None  # `run` creates no BestEpoch without them
        self._dev = encode(job.task.dev, tokenizer, job.recipe.max_length)
        self._validation = encode(job.task.validation, tokenizer, job.recipe.max_length)

    def on_epoch_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Evaluate the model on the validation rows and, if the epoch is the best so far, on the
        dev rows."""
        start = _clock()
        model: Model = kwargs["model"]
        with _without_autocast(model):
            validation = self._judge(model, self._validation)
            assert validation.score is not None  # judge raises where an output is not finite
            key = (validation.score, -(validation.nll or 0.0))
            if key > self._best:
                self._best = key
                dev = self._judge(model, self._dev, self._validation)
                names = ("score", "nll", "brier")
                self.figures = {"epoch": state.epoch} | {n: getattr(dev, n) for n in names}
                self.figures["brier_scaled"] = (dev.scaled or {}).get("brier")
        self.seconds = self.seconds + _clock() - start

    def _judge(self, model: Model, rows: Encoded, validation: Encoded | None = None) -> Figures:
        metric, is_regression = self._job.task.metric, self._job.task.is_regression
        clean = self._job.conditions.clean_only
        return judge(model, rows, metric, 1.0, clean, is_regression, validation=validation)


# The whole grid


def run_grid(
    grid: Grid,
    out: Path,
    *,
    processes: int = 1,
    threads: int = 1,
    backend: str = "loky",
    save_models: bool = False,
    report_to: Sequence[str] = (),
    progress: bool = False,
) -> list[RunRecord]:
    """Run all jobs of a grid that have no record in a folder; return the records of all jobs.

    ``<out>/grid.json`` holds the grid of the last call, ``<out>/runs`` a file for each run, and
    ``<out>/results.jsonl`` the records of all finished runs.  If the process is killed, the same
    call continues, and returns the same records.

    Args:
        grid: the comparison.
        out: folder of the runs; created if needed.
        processes, threads, backend: see `run_all`.
        save_models: whether to save the models in ``<out>/models``; runs without a saved model are
            then repeated.
        report_to: trackers of transformers' Trainer for the new runs, each under its name
            (TensorBoard's files are in ``<out>/logs``).
        progress: whether to show a progress bar on stderr.

    Raises:
        DataError: the grid cannot be run, or another process uses `out`.
        MissingExtra: a required library is not installed.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from jachess_ext.lab.demo import ASSETS
        >>> with TemporaryDirectory() as folder:
        ...     films = Path(folder, "films.csv")
        ...     _ = films.write_text("text,label\\na good film,1\\na bad film,0\\n")
        ...     records = run_grid(
        ...         Grid(model=str(ASSETS), tasks=(f"{films}:{films}",), methods=("none", "sam"),
        ...              seeds=(0,), recipe=Recipe(epochs=1), conditions=Conditions().clean_only),
        ...         Path(folder),
        ...     )
        >>> [record.method for record in records]
        ['none', 'sam']
    """
    for name in report_to:
        try:
            for callback in get_reporting_integration_callbacks([name]):
                callback()
        except (ImportError, RuntimeError, ValueError) as error:
            raise DataError(f"--report-to {name}: {error}") from error
    loaded = load(grid)
    tuning = tuning_jobs(loaded)
    folder, all_jobs, records = out / "runs", list[Job](), dict[str, Record]()
    bar = require("tqdm").tqdm(
        total=len(tuning) + len(final_jobs(loaded, {})), unit="run", disable=not progress
    )

    def write_records() -> None:
        write_results(out / RESULTS, [records[j.name] for j in all_jobs if j.name in records])

    def run_jobs(jobs: Sequence[Job], models: Path | None) -> list[RunRecord]:
        all_jobs.extend(jobs)
        finished = {path.stem for path in folder.glob("*.json")}
        for job, record in run_all(
            jobs,
            partial(_run_record, models=models, report_to=report_to, logs=out.resolve() / "logs"),
            folder,
            processes=processes,
            threads=threads,
            backend=backend,
            is_usable=partial(_is_usable, models=models),
        ):
            records[job.name] = record
            bar.update()
            if job.name not in finished:
                write_records()
        write_records()
        return [_parse(records[job.name]) for job in jobs]

    # There are two stages, as the tuning runs choose hyperparameters of the final runs.  In each,
    # jobs whose file exists are read rather than run, so that a kill costs only the current runs.
    with locked(folder), bar:
        write_json(out / "grid.json", asdict(grid))
        bar.set_description("choosing strengths")
        tuning_records = run_jobs(tuning, None)
        bar.set_description("fine-tuning")
        jobs = final_jobs(loaded, choose(tuning_records))
        return tuning_records + run_jobs(jobs, out / "models" if save_models else None)


def _run_record(job: Job, **settings: Any) -> Record:
    """Run a job; return its record as JSON values."""
    return finite(asdict(run(job, **settings)))  # type: ignore[no-any-return]


def _parse(line: Record) -> RunRecord:
    """Convert JSON values to the record of a run."""
    return from_json(line, RunRecord, "the record")  # type: ignore[no-any-return]


def _is_usable(job: Job, record: Record, models: Path | None) -> bool:
    """Return whether a finished job's record can be used.

    It can if the job failed, if no models are saved, or if the job's model is in `models`.
    """
    failed = _parse(record).error is not None
    return models is None or failed or (models / job.name).is_dir()
