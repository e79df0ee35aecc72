"""`read_runs`: a table of losses from runs that other tools recorded."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .._io import DataError, MissingExtra, parse_json
from .runs import LossTable, TableError, higher_is_better, metric_word, shown
from .tables import (
    ROW_COLUMNS,
    SEED_COLUMNS,
    Grid,
    Records,
    listed,
    parse_size,
    plain_name,
    read_grid,
    read_table,
    to_table,
)

Said = str | Mapping[str, Any] | Callable[[str], Any]
"""Where something is found of a run: the name of a column or parameter, a regular expression with
one group for the run's name, {run: it}, or a function of the run's name."""

_MODELS = ("model_name_or_path", "model_name", "model", "_name_or_path", "base_model", "checkpoint")
_RECIPE = (
    *("learning_rate", "lr", "num_train_epochs", "epochs", "max_steps", "weight_decay"),
    *("per_device_train_batch_size", "train_batch_size", "batch_size", "warmup_ratio"),
    *("warmup_steps", "optim", "optimizer", "lr_scheduler_type"),
)
"""Settings that repeated runs of a model and size must share."""
_ROWS = re.compile(
    r"(?:^|[^a-z])((?:n|d|size|rows|samples|examples)=[\d.,_]*\d[kmb]?)(?![a-z0-9])", re.IGNORECASE
)
_SEED = re.compile(r"(?:^|(?<=[^a-z]))(?:seed|run|trial|s)[=_-]?(\d+)(?![a-z0-9])", re.IGNORECASE)
_WRITER = re.compile(r"/runs/[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_[^/]*$")  # as transformers names it
_WANDB = {"state", "runtime", "created", "sweep", "notes"}
_FINISHED = "3"  # MLflow's number for it


@dataclass(frozen=True)
class _Run:
    """A run as a tool recorded it.

    Attributes:
        name: its path in the folder, or what the tool calls it.
        fields: what is known of it, as text, by name.
        values: measurements by metric, in their order, NaN for what is no number; none of a run
            that did not finish.
        key: what no other run is called: the name, of several runs with it and what they differ in.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    key: str = ""


def read_runs(
    source: Any,
    metric: str | None = None,
    *,
    model: Said | None = None,
    size: Said | None = None,
    seed: Said | None = None,
    value: str = "last",
    ignore: Sequence[str] = (),
    test_rows: int | None = None,
    fewest: int = 2,
) -> LossTable:
    """Return the table of losses of runs that were recorded elsewhere.

    Read are folders of transformers' Trainer (trainer_state.json), MLflow's folder mlruns, folders
    of TensorBoard's event files or of csv files downloaded from it, MLflow's search_runs and W&B's
    table of runs (each a DataFrame or its csv export), and whatever `read_table` reads.  Several
    runs of a model and size are repeats: their mean counts, with its standard error in `noise`.

    The number of training rows is taken from a parameter such as max_train_samples, from
    train_samples in train_results.json, from what a Trainer logs at the end of training, or from
    the run's name where it says n=1000 or rows=1k; the model from a parameter such as
    model_name_or_path, from config.json, or from the name, less the size and the seed.

    Args:
        source: a folder, file or DataFrame.
        metric: such as "eval_accuracy"; None: the only one there is.
        model, size, seed: where they are found, if elsewhere: a parameter or column, a regular
            expression with one group for the run's name, {run: it} or a function of the name.
        value: "last" or "best" of a run's measurements, all of which have to be finite.
        ignore: names of runs (of columns, where `read_table` reads the source) to leave out; of
            several runs called "a" these are "a (1)", "a (2)", … in the source's order.
        test_rows, fewest: as for `read_table`.

    Raises:
        TableError: as `read_table`; no runs, a run whose model, size or metric is not known or of
            which a measurement is not finite, or a folder with the checkpoints of several runs.
        DataError: a file that is no JSON.
        MissingExtra: pandas or tensorboard is needed and not installed.

    Example:
        >>> import pandas as pd
        >>> import jachess_ext as jx
        >>> rows = [(m, n, s, n**-b) for m, b in (("a", 0.2), ("b", 0.3)) for n in (100, 1000)
        ...         for s in (0, 1)]
        >>> columns = ["params.model", "params.n_train", "params.seed", "metrics.eval_loss"]
        >>> table = jx.scaling.read_runs(pd.DataFrame(rows, columns=columns))
        >>> table.names, table.losses_at(100).round(3)
        (('a', 'b'), array([0.398, 0.251]))
    """
    if value not in ("last", "best"):
        raise TableError(f"value is {shown(value)}; expected 'last' or 'best'")
    path = Path(source) if isinstance(source, (str, PathLike)) else None
    what = "the table" if path is None else str(path)
    if path is not None and path.is_dir():
        runs = _runs_of_folder(path)
    else:
        found = _runs_of_table(read_grid(source))
        if found is None:
            columns = {"model": model, "size": size, "seed": seed}
            for name, said in columns.items():
                if said is not None and not isinstance(said, str):
                    raise TableError(f"{name} is {shown(said)}; of {what} expected a column's name")
            given: Any = columns
            return read_table(
                source, fewest, metric=metric, test_rows=test_rows, ignore=ignore, **given
            )
        runs = found
    runs = _with_keys(runs)
    keys = [run.key for run in runs]
    for name in ignore:
        if name not in keys:
            alike = [run.key for run in runs if run.name == name]
            raise TableError(
                f"{what} has {len(alike)} runs {shown(name)}; say which to ignore: {listed(alike)}"
                if alike
                else f"{what} has no run {shown(name)} to ignore; it has {listed(keys)}"
            )
    runs = [run for run in runs if run.key not in ignore]
    column = _metric(what, runs, metric)
    values = np.array([_value(run, column, value) for run in runs])
    sizes = [_size(run, size) for run in runs]
    models = _models(what, runs, model, sizes)
    _refuse_other_recipes(runs, models, sizes)
    records = Records(
        what=what,
        models=models,
        sizes=np.array(sizes),
        values=values,
        names=list(dict.fromkeys(models)),
        seeds=[_seed(run, seed) for run in runs],
    )
    return to_table(records, metric or column, fewest, test_rows)


# What is said of a run --------------------------------------------------------------------------


def _with_keys(runs: Sequence[_Run]) -> list[_Run]:
    """Return the runs with their keys."""
    names = [run.name for run in runs]
    counted = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [
        replace(run, key=run.name if names.count(run.name) == 1 else f"{run.name} ({number})")
        for run, number in zip(runs, counted, strict=True)
    ]


def _known(run: _Run, names: Sequence[str]) -> dict[str, str]:
    """Return the fields of a run that have one of these names, in the names' order."""
    lower = {name.lower(): (name, text) for name, text in run.fields.items()}
    return {lower[name][0]: lower[name][1] for name in names if name in lower and lower[name][1]}


def _told(run: _Run, said: Said, what: str) -> Any:
    """Return what the argument `what` tells of a run."""
    if isinstance(said, Mapping):
        if run.name not in said:
            raise TableError(f"{what} has no entry for the run {shown(run.name)}")
        return said[run.name]
    if not isinstance(said, str):
        if not callable(said):
            raise TableError(
                f"{what} is {shown(said)}; expected a parameter's name, a regular expression, "
                "{run: it} or a function"
            )
        return said(run.name)
    if said in run.fields:
        return run.fields[said]
    try:
        match = re.search(said, run.name)
    except re.error as error:
        raise TableError(f"{what}={shown(said)} is no regular expression ({error})") from None
    if match is None or match.re.groups != 1 or match[1] is None:
        raise TableError(
            f"{what}={shown(said)} is no parameter of the run {shown(run.name)} (it has "
            f"{listed(list(run.fields)) or 'none'}) and matches no part of its name with one group"
        )
    return match[1]


def _size(run: _Run, said: Said | None) -> float:
    told: Any = None
    if said is not None:
        told = _told(run, said, "size")
    else:
        known = _known(run, ROW_COLUMNS)
        if len(set(known.values())) > 1:
            raise TableError(
                f"the run {shown(run.key)} has the parameters {listed(list(known))}, any of which "
                "may be the number of training examples; say which: "
                f"size={shown(next(iter(known)))}"
            )
        match = _ROWS.search(run.name)
        if known:
            told = next(iter(known.values()))
        elif match is not None:
            told = match[1]
        else:
            raise TableError(
                f"the number of training examples of the run {shown(run.name)} is not known: no "
                "train_samples in its train_results.json, no parameter such as n_train, no n=1000 "
                "in its name; say it by a parameter, a regular expression or a dict, as in "
                r"size=r'-(\d+)'"
            )
    try:
        return parse_size(told)
    except TableError as error:
        raise TableError(f"of the run {shown(run.name)}, {error}") from None


def _models(
    what: str, runs: Sequence[_Run], said: Said | None, sizes: Sequence[float]
) -> list[str]:
    """Return every run's model; where only names can tell, they less the size and the seed.

    A size is taken out of the names only if all of them have theirs: "bert-32" may be a model.
    """
    if said is not None:
        return [str(_told(run, said, "model")) for run in runs]
    known = [_known(run, _MODELS) for run in runs]
    if all(known):
        return [next(iter(each.values())) for each in known]
    names = [run.name for run in runs]
    less = [_without_size(name, rows) for name, rows in zip(names, sizes, strict=True)]
    if None not in less:
        names = [str(name) for name in less]
    names = [re.sub(r"([-_/ ])[-_/ ]*", r"\1", _SEED.sub("", name)).strip("-_/ ") for name in names]
    if "" in names or len(set(names)) == len(names) > 1:
        raise TableError(
            f"the names of the runs of {what} ({listed([run.name for run in runs], 3)}) do not "
            "tell which are of one model; say it by a parameter, a regular expression or a dict, "
            "as in model=r'^([^/]+)/'"
        )
    return names


def _without_size(name: str, rows: float) -> str | None:
    """Return a run's name without its size, None where it has none."""
    match = _ROWS.search(name)
    if match is not None:
        return name[: match.start(1)] + name[match.end(1) :]
    parts = re.split(r"([-_/ ]+)", name)
    for place in reversed(range(len(parts))):
        with suppress(TableError):
            if parse_size(parts[place]) == rows:
                return "".join(parts[:place] + parts[place + 1 :])
    return None


def _seed(run: _Run, said: Said | None) -> str:
    """Return what tells repeats apart: the seed where it is known, else the run's name."""
    if said is not None:
        return str(_told(run, said, "seed"))
    known = _known(run, SEED_COLUMNS)
    return next(iter(known.values())) if known else run.name


def _metric(what: str, runs: Sequence[_Run], metric: str | None) -> str:
    """Return the measurement asked for, or the only one there is.

    One name counts for all runs: those without it must not be judged by another one.
    """
    if not runs:
        raise TableError(f"{what} has no runs")
    every = list(dict.fromkeys(name for run in runs for name in run.values))
    if not every:
        raise TableError(f"no run of {what} has a measurement that can be read, or none finished")
    if metric is None:
        names = [name for name in every if metric_word(name)]
        names.sort(key=lambda name: name.startswith("train"))
    elif metric in every:
        return metric
    else:
        names = [name for name in every if plain_name(name) == plain_name(metric)]
        if not names:
            return metric  # no run has it: `_value` says of the first what it has
    if len(names) != 1:
        raise TableError(
            f"{what} has the measurements {listed(names or every)}; say which: metric="
            f"{shown((names or every)[0])}"
        )
    return names[0]


def _value(run: _Run, metric: str, value: str) -> float:
    """Return the last or best measurement of a metric."""
    values = run.values.get(metric, ())
    wrong = [number for number in values if not math.isfinite(number)]
    if wrong or not values:
        raise TableError(
            f"the run {shown(run.key)} has "
            + (f"a {shown(metric)} of {wrong[0]}" if wrong else f"no {shown(metric)}")
            + (
                ""
                if wrong
                else f" (it has {listed(list(run.values)) or 'none, or did not finish'})"
            )
            + f"; leave it out with ignore=[{shown(run.key)}]"
        )
    if value == "last":
        return values[-1]
    return max(values) if higher_is_better(metric) else min(values)


def _refuse_other_recipes(
    runs: Sequence[_Run], models: Sequence[str], sizes: Sequence[float]
) -> None:
    """Raise TableError where repeats of a model and size differ in more than their seeds."""
    first: dict[tuple[str, float], _Run] = {}
    for run, model, size in zip(runs, models, sizes, strict=True):
        other = first.setdefault((model, size), run)
        ours, theirs = _known(run, _RECIPE), _known(other, _RECIPE)
        differ = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
        if differ:
            raise TableError(
                f"the runs {shown(other.key)} and {shown(run.key)}, both of {model} with "
                f"{size:g} examples, are no repeats: {differ[0]} is {theirs[differ[0]]} and "
                f"{ours[differ[0]]}; leave out those that are not to count with ignore=[…]"
            )


# Where runs are found ---------------------------------------------------------------------------


def _runs_of_folder(folder: Path) -> list[_Run]:
    states = sorted(folder.rglob("trainer_state.json"))
    if states:
        return _trainer_runs(folder, states)
    described = sorted(
        path
        for path in folder.rglob("meta.yaml")
        if (path.parent / "metrics").is_dir() and ".trash" not in path.parts
    )
    if described:
        kept = []
        for path in described:
            with _expected(path.parent):
                kept += _mlflow_runs(path)
        return sorted(kept, key=lambda run: run.name)  # folders have random names
    events = sorted({path.parent for path in folder.rglob("events.out.tfevents.*")})
    if events:
        return [_tensorboard_run(folder, path) for path in _outermost(folder, events)]
    exported = list(_downloads(folder))
    if exported:
        return exported
    raise TableError(
        f"{folder} holds no runs that can be read; expected trainer_state.json of transformers, "
        "mlruns of MLflow, event files of TensorBoard or csv files downloaded from it"
    )


def _trainer_runs(folder: Path, states: Sequence[Path]) -> list[_Run]:
    """Return the runs of transformers' Trainer: folders, with checkpoints in them or without."""
    found: dict[Path, list[tuple[bool, int, Path, dict[str, Any]]]] = {}
    for path in states:
        state = parse_json(_text(path), str(path), lenient=True)
        if not isinstance(state, dict) or "log_history" not in state:
            raise TableError(f"{path} is no state of transformers' Trainer (no log_history)")
        own = not re.fullmatch(r"checkpoint-\d+", path.parent.name)
        home = path.parent if own else path.parent.parent
        with _expected(path):
            step = int(state.get("global_step", 0))
        found.setdefault(home, []).append((own, step, path.parent, state))
    runs = []
    for home, each in found.items():
        with _expected(home):
            *earlier, (own, _, last, state) = sorted(each, key=lambda one: one[:2])
            places = [last]
            for _, _, place, before in reversed(earlier):
                if _goes_on(state, before):
                    places.append(place)
                elif not own:  # which of them is the newest, their numbers do not tell
                    raise TableError(
                        f"{last} does not go on from {place.name}, so {home} holds checkpoints of "
                        "several runs; remove those of the earlier one"
                    )
            runs.append(_trainer_run(folder, home, places, state))
    return runs


def _goes_on(state: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether a log begins as another, so that both are of one run."""
    begun = before["log_history"]
    return repr(state["log_history"][: len(begun)]) == repr(begun)  # NaN is NaN here


def _trainer_run(folder: Path, home: Path, places: Sequence[Path], state: dict[str, Any]) -> _Run:
    """Return the run of a folder from its last state; `places` are that one's and those before."""
    results: dict[str, Any] = {}
    for name in ("train_results.json", "eval_results.json", "all_results.json"):
        if (home / name).exists():
            results |= parse_json(_text(home / name), str(home / name), lenient=True)
    ends = [entry["train_runtime"] for entry in state["log_history"] if "train_runtime" in entry]
    if ends and results.get("train_runtime", ends[-1]) != ends[-1]:
        raise TableError(
            f"the results in {home} are of another training than its trainer_state.json "
            "(train_runtime differs); remove the files of the earlier one"
        )
    values: dict[str, list[float]] = {}
    for entry in [*state["log_history"], results]:
        for name, number in entry.items():
            if re.match(r"eval_|test_|predict_", name):
                values.setdefault(name, []).append(_measured(number))
    fields = {name: str(state[name]) for name in _RECIPE if name in state}
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    if rates:
        fields["learning_rate"] = str(max(rates))
    for name, key in (
        ("adapter_config.json", "base_model_name_or_path"),
        ("config.json", "_name_or_path"),
    ):
        for path in (home / name, *(place / name for place in places)):
            model = (
                parse_json(_text(path), str(path), lenient=True).get(key) if path.exists() else ""
            )
            if model:
                fields.setdefault("_name_or_path", str(model))
    rows = results.get("train_samples") or _rows_trained_on(state)
    if rows:
        fields["train_samples"] = str(rows)
    return _Run(_name(folder, home), fields, values)


def _rows_trained_on(state: dict[str, Any]) -> int | None:
    """Return the training rows by what Trainer logs at the end of training, None where unsure.

    It logs train_runtime and train_samples_per_second = rows · epochs / train_runtime, rounded to
    four and three decimals.  Where max_steps ended the training, rows are not what it counts.
    """
    for entry in reversed(state["log_history"]):
        seconds, speed = entry.get("train_runtime"), entry.get("train_samples_per_second")
        epochs = state.get("num_train_epochs")
        if not seconds or not speed or not epochs or entry.get("epoch") != epochs:
            continue
        rows = seconds * speed / epochs
        error = rows * (0.5e-4 / seconds + 0.5e-3 / speed)
        return round(rows) if error < 0.4 and abs(rows - round(rows)) <= error + 1e-6 else None
    return None


def _mlflow_runs(meta: Path) -> list[_Run]:
    """Return a run of MLflow's file store, none where it was deleted."""
    facts = dict(line.split(": ", 1) for line in _text(meta).splitlines() if ": " in line)
    if facts.get("lifecycle_stage") == "deleted":
        return []
    home = meta.parent
    name = facts.get("run_name", "").strip("'\"") or home.name
    if facts.get("status", _FINISHED) != _FINISHED:
        return [_Run(name)]
    fields = {_name(home / "params", path): _text(path) for path in _files(home / "params")}
    values = {}
    for path in _files(home / "metrics"):
        points = [line.split(" ") for line in _text(path).splitlines() if line.strip()]
        points.sort(key=lambda point: (int(point[2]) if len(point) > 2 else 0, int(point[0])))
        values[_name(home / "metrics", path)] = [float(point[1] or "nan") for point in points]
    return [_Run(name, fields, values)]


def _tensorboard_run(folder: Path, place: Path) -> _Run:
    try:
        # of the two accumulators the one that has scalars of the old and the new style as tensors
        from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ModuleNotFoundError:
        raise MissingExtra(
            "tensorboard is needed for its event files and not installed: pip install tensorboard"
        ) from None
    events = EventAccumulator(str(place), size_guidance={"tensors": 0})
    events.Reload()
    values = {}
    for tag in events.Tags()["tensors"]:
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            points = events.Tensors(tag)
            values[tag] = [float(make_ndarray(point.tensor_proto)) for point in points]
            if any(a.step > b.step for a, b in pairwise(points)):
                raise TableError(
                    f"the steps of {tag} in {place} go back, so it holds the events of several "
                    "runs; remove the files of the earlier one"
                )
    return _Run(_WRITER.sub("", _name(folder, place)), {}, values)


def _outermost(folder: Path, places: Sequence[Path]) -> list[Path]:
    """Leave out folders inside a run's folder: hyperparameters, or scalars of one more writer."""
    return [
        place
        for place in places
        if not any(other in place.parents for other in places if other != folder)
    ]


def _downloads(folder: Path) -> Iterator[_Run]:
    """Yield the runs of csv files as TensorBoard's page saves them: Wall time, Step, Value."""
    runs: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.rglob("*.csv")):
        grid = read_grid(path)
        if [label.lower() for label in grid.labels] != ["wall time", "step", "value"]:
            continue
        name = _name(folder, path.with_suffix(""))
        run, _, tag = name.rpartition("tag-")
        run = re.sub(r"^run[-_]", "", run).rstrip("-_") or name
        points = list(grid.numbers(2, [run] * len(grid.columns[2])))
        runs.setdefault(run, {})[tag or "value"] = points
    for run, values in runs.items():
        yield _Run(run, {}, values)


def _runs_of_table(grid: Grid) -> list[_Run] | None:
    """Return the runs of MLflow's search_runs or of W&B's table of runs; None: it is neither."""
    labels = [label.lower() for label in grid.labels]
    rows = list(zip(*grid.columns, strict=True))
    twice = [label for row, label in enumerate(labels) if label in labels[:row]]
    if twice and {"name", "run_id"} & set(labels):
        raise TableError(f"{grid.what} has the column {shown(twice[0])} twice")
    if any(label.startswith("metrics.") for label in labels):
        return _mlflow_rows(grid, rows)
    if {"summary", "config", "name"} <= set(labels):
        return [_api_row(dict(zip(labels, row, strict=True))) for row in rows]
    if "name" not in labels or not _WANDB & set(labels):
        return None
    return [_wandb_row(grid, row) for row in rows]


def _mlflow_rows(grid: Grid, rows: Sequence[Sequence[Any]]) -> list[_Run]:
    runs = []
    for number, row in enumerate(rows):
        cells = dict(zip(grid.labels, row, strict=True))
        name = _word(cells.get("tags.mlflow.runName")) or _word(cells.get("run_id"))
        if _word(cells.get("status")) not in ("", "FINISHED"):
            runs.append(_Run(name or f"row {number}"))
            continue
        fields = {
            label.removeprefix("params."): _word(cell)
            for label, cell in cells.items()
            if label.startswith("params.")
        }
        values = {
            label.removeprefix("metrics."): numbers
            for label, numbers in _numbers(grid, row).items()
            if label.startswith("metrics.")
        }
        runs.append(_Run(name or f"row {number}", fields, values))
    return runs


def _wandb_row(grid: Grid, row: Sequence[Any]) -> _Run:
    cells = {label: _word(cell) for label, cell in zip(grid.labels, row, strict=True)}
    facts = {label.lower(): word for label, word in cells.items()}
    if facts.get("state", "finished") != "finished":
        return _Run(facts["name"])
    return _Run(facts["name"], cells, _numbers(grid, row))


def _api_row(cells: Mapping[str, Any]) -> _Run:
    """Return a run of the DataFrame that W&B's guide builds of its API: summary, config, name."""
    try:
        config, summary = (
            cell if isinstance(cell, dict) else ast.literal_eval(cell)
            for cell in (cells["config"], cells["summary"])
        )
        fields = {str(name): _word(cell) for name, cell in config.items()}
        pairs = [(str(name), cell) for name, cell in summary.items()]
    except (AttributeError, SyntaxError, TypeError, ValueError):
        raise TableError(
            f"summary or config of the run {shown(_word(cells['name']))} is no dict"
        ) from None
    values = {name: [_measured(cell)] for name, cell in pairs if _is_number(cell)}
    return _Run(_word(cells["name"]), fields, values)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _measured(value: Any) -> float:
    """Return a measurement as a number, NaN where it is none: empty, or told in words."""
    return float(value) if _is_number(value) else math.nan


def _word(cell: Any) -> str:
    text = "" if cell is None else str(cell).strip()
    return "" if text.lower() in ("nan", "none", "<na>") else text


def _numbers(grid: Grid, row: Sequence[Any]) -> dict[str, list[float]]:
    """Return the cells of a row that are numbers, by their columns."""
    values = {}
    for label, cell in zip(grid.labels, row, strict=True):
        try:
            number = grid.number(cell)
        except (TypeError, ValueError):
            continue
        if not math.isnan(number):
            values[label] = [number]
    return values


@contextmanager
def _expected(path: Path) -> Iterator[None]:
    """Turn errors of files that are not as their tool writes them into a sentence."""
    try:
        yield
    except (DataError, TableError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TableError(f"{path} is not as its tool writes it, or damaged ({error})") from None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _name(folder: Path, path: Path) -> str:
    """Return a path in a folder, or the folder's own name."""
    return path.name if path == folder else path.relative_to(folder).as_posix()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path} cannot be read: {error}") from None
