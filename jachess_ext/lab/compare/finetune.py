"""Fine-tune by methods × tasks × seeds: the jobs of a grid, one run, and the whole grid."""

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

_EDITION = 5  # of records: raised by a change of the code that changes them, older runs are redone


# The grid's runs


@dataclass(frozen=True)
class Job:
    """One fine-tuning and its evaluation: everything that the result depends on.

    Attributes:
        kind: tuning runs choose a strength; final runs are reported.
        version: changes with the model's files.
        method: its text in the grid, which is its name in tables.
        value: of the method's knob; None: as the method has it.
        shift: tasks on whose dev rows the model is judged as well.
        label_noise: share of wrong labels in `task`, for the record.
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
    def configured(self) -> Method:
        """The method with its knob set to `value`."""
        method = parse_method(self.method)
        return method if self.value is None else _set_knob(method, self.value)

    @cached_property
    def name(self) -> str:
        """Words and a digest of everything the run depends on; serves as a file name."""
        # The name is the run's file: equal names mean "already done", so that whatever can change
        # a figure has to be in the digest.  Rows count by their texts and labels, models and
        # synonyms by their files, since the user may edit a file under the same path.
        identity = {
            "edition": _EDITION,
            "task": digest(self.task),
            "shift": [digest(task) for task in self.shift],
            "settings": self.configured.settings,
            "recipe": asdict(self.recipe),
            "conditions": self.conditions.identity,
        }
        sources = _synonyms(self.conditions, [self.configured])
        if files := [Path(source) for source in sources if source != NEAREST]:
            identity["synonyms"] = [content_digest(file) for file in files]
        names = ("kind", "model", "version", "method", "value", "seed")
        content = json.dumps(finite(identity | {name: getattr(self, name) for name in names}))
        key = hashlib.sha256(content.encode()).hexdigest()[:10]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.task.name}-{self.method}")[:60]
        return f"{self.kind}-{words}-s{self.seed}-{key}"


def _set_knob(method: Method, value: float) -> Method:
    return method if method.knob is None else method.replace(**{method.knob: value})


@dataclass(frozen=True)
class LoadedGrid:
    """A grid with its tasks, all checked: no run fails because of the user's input.

    Attributes:
        shift: task's name -> other tasks that its models are judged on as well.
        by_seed: seed -> the tasks with the wrong labels that this seed draws.
    """

    grid: Grid
    version: str
    tasks: tuple[Task, ...]
    shift: Mapping[str, tuple[Task, ...]]
    by_seed: Mapping[int, tuple[Task, ...]]


def load(grid: Grid) -> LoadedGrid:
    """Load all data and check methods, model and shifts, before any training starts.

    Raises:
        DataError: a task, method, size or shift that cannot be used.
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
    whole = [load_task(spec, grid.columns) for spec in grid.tasks]
    tasks = tuple(_draw_task(task, grid, tokenizer) for task in whole)
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        raise DataError(
            f"two tasks have one name: {', '.join(names)}; give another with name=<task>"
        )
    open_ = {text: parse_method(text).label for text in grid.methods if _has_open_knob(text)}
    if untried := sorted(set(grid.tuning.methods) - {*open_, *open_.values()}):
        raise DataError(
            f"tuning names the method {untried[0]!r}, which is none of the grid's with a value to "
            f"choose; expected one of: {'; '.join(open_) or 'none'}"
        )
    shift = {
        name: tuple(_draw_dev_rows(target, grid, tokenizer) for target in targets)
        for name, targets in _shift_targets(grid, tasks).items()
    }
    if any(tuning_values(method, grid) for method in grid.methods):
        for task in tasks:
            hold_out(task, grid.tuning.validation)
    by_seed = dict.fromkeys(grid.seeds, tasks)
    if grid.label_noise:
        for seed in grid.seeds:
            drawn_by = mix_seed(grid.data_seed, seed, 1)
            by_seed[seed] = tuple(
                add_label_noise(task, grid.label_noise, drawn_by) for task in tasks
            )
    return LoadedGrid(grid, model_version(grid.model), tasks, shift, by_seed)


def _synonyms(conditions: Conditions, methods: Iterable[Method]) -> list[str]:
    """Return the sources of candidates of the attack and of methods, without duplicates."""
    sources = [conditions.attack, *(getattr(method, "synonyms", None) for method in methods)]
    return sorted({source for source in sources if source is not None})


def _check_conditions(grid: Grid, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without an unknown token, and synonyms that cannot be read."""
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
    if method.name == "tapt" and is_masked(config) and tokenizer.mask_token is None:
        raise ValueError("method 'tapt' masks tokens, and the tokenizer has no mask token")
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(method, JacHess) or count is None:
        return
    regulariser = method.build_regulariser(nn.Module())
    layers = regulariser.settings.layers
    chosen = 1 if layers == "logits" else len(layer_indices(layers, count))
    if isinstance(regulariser.weights, Tensor) and len(regulariser.weights) != chosen:
        raise ValueError(
            f"method {method.label!r} has {len(regulariser.weights)} weights for {chosen} layers"
        )


def _shift_targets(grid: Grid, tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Return for each task's name the other tasks that it is judged on."""
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
    """Return the task with the rows that the grid uses."""
    size = grid.train_size
    if size is not None and grid.fewer:
        size = min(size, len(task.train))
    drawn = draw_rows(task, size, grid.unlabelled_size, grid.dev_size, grid.data_seed)
    check_tokens(drawn, task, tokenizer)
    return split_validation(drawn, grid.validation, grid.data_seed) if grid.validation else drawn


def _draw_dev_rows(target: Task, grid: Grid, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Return the task with its dev rows and, since a task has some, one training row."""
    drawn = draw_rows(target, None, 1, grid.shift_size, grid.data_seed)
    check_tokens(drawn, target, tokenizer, ["dev"])
    return replace(drawn, train=drawn.train.slice(0, 1))


def _has_open_knob(text: str) -> bool:
    """Return whether a method has a knob that its text leaves open."""
    knob = parse_method(text).knob
    return knob is not None and f"{knob}=" not in text


def tuning_values(text: str, grid: Grid) -> tuple[float, ...]:
    """Return the values to try for a method, see `Tuning`: none where its text sets the knob."""
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
    """Return a run for every method, task and value to try, judged on clean training rows."""
    grid = loaded.grid
    job = partial(Job, "tuning", grid.model, loaded.version)
    return [
        job(part, method, value, seed, grid.recipe, grid.conditions.clean_only)
        for task in loaded.tasks
        for method in grid.methods
        if (values := tuning_values(method, grid))
        for part in [hold_out(task, grid.tuning.validation)]
        for value in values
        for seed in grid.tuning.seeds
    ]


def final_jobs(loaded: LoadedGrid, chosen: Mapping[tuple[str, str], float]) -> list[Job]:
    """Return a run for every method, task and seed, with the knobs `chosen` by (task, method).

    A seed's runs come together, so that a grid that is cut short has whole pairs to compare.
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
        for task in loaded.by_seed[seed]
        for method in grid.methods
    ]


def choose(records: Iterable[RunRecord]) -> dict[tuple[str, str], float]:
    """Choose the value of the knob by (task, method) from records of tuning runs; see `Tuning`."""
    # Pairs (score, -Brier) in lexicographic order: equal scores, which few dev rows often give, are
    # decided by calibration.  Values are sorted, and max takes the first: equal in both, the
    # smaller.
    tried: dict[tuple[str, str], dict[float, list[tuple[float, float]]]] = {}
    for record in records:
        assert record.value is not None  # a tuning run tries one
        by_value = tried.setdefault((record.task, record.method), {})
        score = -np.inf if record.score is None else record.score
        brier = 0.0 if record.brier is None else record.brier
        by_value.setdefault(record.value, []).append((score, -brier))
    return {
        key: max(sorted(by_value), key=lambda value: tuple(np.mean(by_value[value], axis=0)))
        for key, by_value in tried.items()
    }


# One run


@contextmanager
def _without_autocast(model: Model) -> Iterator[None]:
    """Remove the autocast that accelerate wraps the model's forward in, within a block."""
    # accelerate sets model.forward on the instance, where it hides the class's; without it, the
    # epochs of a bf16 run are judged in float32, as the model after the last epoch is
    wrapped = model.__dict__.pop("forward", None) if hasattr(model, "_original_forward") else None
    try:
        yield
    finally:
        if wrapped is not None:
            model.__dict__["forward"] = wrapped


def run(
    job: Job, *, models: Path | None = None, report_to: Sequence[str] = (), logs: Path | None = None
) -> RunRecord:
    """Fine-tune and judge; return the record, the same on every call but for its ``seconds``.

    A run whose loss is not finite is recorded with its ``error`` and without figures.

    Args:
        models: folder to save the fine-tuned model in, below the run's name; None: not saved.
        report_to: trackers that transformers' Trainer knows.
        logs: folder of TensorBoard's files, below the run's name; what is there is replaced.
    """
    if logs is not None and "tensorboard" in report_to:
        shutil.rmtree(logs / job.name, ignore_errors=True)
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(logs / job.name)
    tokenizer = load_tokenizer(job.model)
    task = job.task
    whole = load_model(job.model, task.outputs, tokenizer, job.seed, regression=task.regression)
    scale = embedding_scale(whole)
    model = with_lora(whole, seed=job.seed) if job.recipe.lora else whole
    method = job.configured
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
    plain = job.method == REFERENCE and task.validation is not None
    best = BestEpoch(job, tokenizer) if plain else None
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
        if "wandb" in report_to:  # whose callback leaves its run open for the next Trainer
            importlib.import_module("wandb").finish()
    aside = np.zeros(2) if best is None else best.seconds
    training, processor = (trained - start - aside).tolist()
    judging = float((_clock() - trained + aside)[0])
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
    with whole_folder(path) as folder:
        # TAPT changes the weights below LoRA's adapters, too
        below = job.recipe.lora and job.configured.name == "tapt"
        whole = cast("PeftModel", model).merge_and_unload() if below else model
        whole.save_pretrained(str(folder))
        tokenizer.save_pretrained(folder)


def _clock() -> np.ndarray:
    """Return the time in seconds [2]: of the clock, and of this process on all its processors."""
    return np.array([time.perf_counter(), time.process_time()])


class BestEpoch(transformers.TrainerCallback):
    """Judge the model after each epoch, and keep the one with the best score on validation rows.

    Of epochs with equal scores it is the one with the least loss there, then the first.

    Attributes:
        figures: those of `RunRecord.best_epoch`; None before the first epoch has ended.
        seconds: time spent [2], see `_clock`.
    """

    def __init__(self, job: Job, tokenizer: PreTrainedTokenizerBase) -> None:
        self.figures: dict[str, float | None] | None = None
        self.seconds = np.zeros(2)
        self._job = job
        self._best = (-np.inf, -np.inf)
        assert job.task.validation is not None  # there is no best epoch without them
        self._dev = encode(job.task.dev, tokenizer, job.recipe.max_length)
        self._validation = encode(job.task.validation, tokenizer, job.recipe.max_length)

    def on_epoch_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Judge the validation rows, and the dev rows if no epoch before was better."""
        start = _clock()
        model: Model = kwargs["model"]
        with _without_autocast(model):
            held = self._judged(model, self._validation)
            assert held.score is not None  # judge raises where an output is not finite
            reached = (held.score, -(held.nll or 0.0))
            if reached > self._best:
                self._best = reached
                dev = self._judged(model, self._dev, self._validation)
                names = ("score", "nll", "brier")
                self.figures = {"epoch": state.epoch} | {n: getattr(dev, n) for n in names}
                self.figures["brier_scaled"] = (dev.scaled or {}).get("brier")
        self.seconds = self.seconds + _clock() - start

    def _judged(self, model: Model, rows: Encoded, validation: Encoded | None = None) -> Figures:
        metric, regression = self._job.task.metric, self._job.task.regression
        bare = self._job.conditions.clean_only
        return judge(model, rows, metric, 1.0, bare, regression=regression, validation=validation)


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
    """Run the jobs of a grid that the folder has no record of; return all records in order.

    ``<out>/grid.json`` has what was asked for last, ``runs`` a file a run, ``results.jsonl`` the
    records of all finished runs.  After a kill at any moment the same call goes on, and ends with
    the same records.

    Args:
        grid: what to compare.
        out: folder of the runs; created if needed.
        processes, threads, backend: see `run_all`.
        save_models: keep the models below ``<out>/models``; runs that lack one are repeated.
        report_to: trackers of transformers' Trainer for the new runs, each under its name
            (TensorBoard's files are below ``<out>/logs``).
        progress: whether a bar on stderr shows the runs and the time left.

    Raises:
        DataError: the grid cannot be run, or another process works in `out`.
        MissingExtra: a library that is asked for is not installed.

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
    folder, asked, lines = out / "runs", list[Job](), dict[str, Record]()
    bar = require("tqdm").tqdm(
        total=len(tuning) + len(final_jobs(loaded, {})), unit="run", disable=not progress
    )

    def write_lines() -> None:
        write_results(out / RESULTS, [lines[job.name] for job in asked if job.name in lines])

    def run_jobs(jobs: Sequence[Job], models: Path | None) -> list[RunRecord]:
        asked.extend(jobs)
        stored = {path.stem for path in folder.glob("*.json")}
        for job, line in run_all(
            jobs,
            partial(_run_record, models=models, report_to=report_to, logs=out.resolve() / "logs"),
            folder,
            processes=processes,
            threads=threads,
            backend=backend,
            usable=partial(_is_usable, models=models),
        ):
            lines[job.name] = line
            bar.update()
            if job.name not in stored:
                write_lines()
        write_lines()
        return [_parse(lines[job.name]) for job in jobs]

    # Two stages, since the final runs have the strengths that the tuning runs choose.  In each,
    # jobs whose file is there are read, not run: a kill costs the runs under way.
    with locked(folder), bar:
        write_json(out / "grid.json", asdict(grid))
        bar.set_description("choosing strengths")
        tried = run_jobs(tuning, None)
        bar.set_description("fine-tuning")
        final = final_jobs(loaded, choose(tried))
        return tried + run_jobs(final, out / "models" if save_models else None)


def _run_record(job: Job, **settings: Any) -> Record:
    """Run a job; return its line of the results file."""
    return finite(asdict(run(job, **settings)))  # type: ignore[no-any-return]


def _parse(line: Record) -> RunRecord:
    return from_json(line, RunRecord, "the record")  # type: ignore[no-any-return]


def _is_usable(job: Job, record: Record, models: Path | None) -> bool:
    """Return whether a run has its saved model, if models are saved; failed runs need none."""
    failed = _parse(record).error is not None
    return models is None or failed or (models / job.name).is_dir()
