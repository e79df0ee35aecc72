"""`read_runs`: a `LossTable` from a folder of runs of transformers' Trainer, or lm-eval results."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .._io import parse_json, read_text
from .loss_table import LossTable
from .metrics import higher_is_better, matching_names, metric_word
from .records import Records, to_table
from .sheets import parse_size, quote_all
from .table_error import TableError, quote

_RECIPE = ("learning_rate", "num_train_epochs", "max_steps", "train_batch_size")
"""Settings of Trainer that repeated runs of a model and size must have in common."""


State: TypeAlias = Mapping[str, Any]
"""The parsed content of a JSON file."""


@dataclass(frozen=True)
class _Run:
    """A run, as recorded by the files in its folder.

    Attributes:
        directory: folder of the run; for lm-eval, the run's file.
        name: path relative to the folder that is read.
        rows: number of training examples; None if it is not recorded.
        recipe: recorded settings of `_RECIPE` or of lm-eval, by name.
        trial: hyperparameters of a trial of a hyperparameter search, without seeds; None if the
            run is not a trial.
        measurements: metric -> (step, measurement) in the order of the log, NaN for a measurement
            that is not a number.
    """

    directory: Path
    name: str
    rows: int | None
    recipe: Mapping[str, object]
    trial: Mapping[str, object] | None
    measurements: Mapping[str, Sequence[tuple[int | None, float]]]

    def differences(self, other: _Run) -> dict[str, tuple[object, object]]:
        """Return the settings recorded by both runs that differ, name -> (this run's, other's)."""
        pairs = {
            name: (self.recipe[name], other.recipe[name])
            for name in self.recipe
            if name in other.recipe
        }
        if self.trial is not None and other.trial is not None:
            names = sorted({*self.trial, *other.trial})
            pairs |= {name: (self.trial.get(name), other.trial.get(name)) for name in names}
        return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def read_runs(
    folder: PathLike[str] | str,
    metric: str | None = None,
    *,
    model: str,
    size: str | None = None,
    value: str = "last",
    ignore: Sequence[str] = (),
    test_rows: int | None = None,
    fewest: int = 2,
) -> LossTable:
    """Read a table of losses from a folder of runs of transformers' Trainer.

    A run is a folder with a trainer_state.json, or with checkpoints that have one.  If there is
    none, each results*.json of lm-evaluation-harness is a run, with metrics such as "rte/acc".
    Several runs of a model and size are repeats: their losses are averaged, with standard errors in
    `noise`.  Trials of a hyperparameter search are not repeats and raise an error.

    Args:
        folder: folder that contains the runs, at any depth.
        metric: name of the metric, such as "eval_accuracy"; None if there is only one.
        model: regular expression with one group, which matches the model in the relative path of a
            run.
        size: regular expression with one group, which matches the number of training examples in
            the path; None uses train_samples of train_results.json.
        value: "last" or "best" of the measurements of a run, all of which have to be finite.
        ignore: relative paths of runs to leave out, and settings, such as "learning_rate", in which
            repeats may differ.
        test_rows: number of test examples, see `read_table`.
        fewest: smallest number of models accepted.

    Raises:
        TableError: as `read_table`; no runs, a run without a size or the metric or with a
            measurement that is not finite, two different measurements at one step, repeats with
            different settings, a run inside the folder of another, or a folder with checkpoints of
            several runs.
        DataError: a file is not valid text or JSON.

    Examples:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> import jachess_ext as jx
        >>> runs = Path(tempfile.mkdtemp())
        >>> for name, loss in ("a-100", 0.4), ("a-400", 0.3), ("b-100", 0.5), ("b-400", 0.2):
        ...     (runs / name).mkdir()
        ...     state = json.dumps({"log_history": [{"eval_loss": loss}]})
        ...     _ = (runs / name / "trainer_state.json").write_text(state)
        >>> table = jx.scaling.read_runs(runs, model=r"^(.*)-", size=r"-(\\d+)$")
        >>> table.names, table.losses_at(400)
        (('a', 'b'), array([0.3, 0.2]))
    """
    if value not in ("last", "best"):
        raise TableError(f"value is {quote(value)}; expected 'last' or 'best'")
    folder = Path(folder)
    runs = _trainer_runs(folder)
    names = [run.name for run in runs]
    settings = {*_RECIPE, *(name for run in runs for name in (*run.recipe, *(run.trial or ())))}
    unknown = [name for name in ignore if name not in (*names, *settings)]
    if unknown:
        text = f"{folder} has no run {quote(unknown[0])} to ignore"
        raise TableError(f"{text}; it has {quote_all(names)}")
    ignored_runs = [name for name in names if name in ignore]
    left_out = f"{len(ignored_runs)} of {len(runs)} runs, {quote_all(ignored_runs)}"
    left_out = left_out if ignored_runs else ""
    runs = [run for run in runs if run.name not in ignore]
    folders = {run.directory for run in runs}
    nested = [run.name for run in runs if not folders.isdisjoint(run.directory.parents)]
    if nested:
        text = f"the runs {quote_all(nested)} of {folder} lie in folders of other runs"
        raise TableError(f"{text}; leave out the ones or the others", ignore=[*ignore, *nested])
    column = _metric(folder, runs, metric)
    values = np.array([_measurement(run, column, value) for run in runs])
    sizes = [_run_size(run, size) for run in runs]
    models = [_path_group(run, model, "model") for run in runs]
    _refuse_other_recipes(runs, models, sizes, ignore)
    names = [run.name for run in runs]
    records = Records(str(folder), models, np.array(sizes), values, names, left_out=left_out)
    return to_table(records, metric or column, fewest, test_rows)


def _path_group(run: _Run, pattern: str, argument: str) -> str:
    """Return the match of the pattern's only group in the path of a run.

    Args:
        run: the run.
        pattern: regular expression.
        argument: name of the argument of `read_runs` that holds the pattern, for messages.

    Raises:
        re.error: the pattern is no regular expression.
        TableError: the pattern does not match, or has not exactly one group.
    """
    match = re.search(pattern, run.name)
    if match is None or match.re.groups != 1 or match[1] is None:
        text = f"{quote(pattern)}, for the {argument}, matches no part of the run {quote(run.name)}"
        raise TableError(f"{text} with one group")
    return match[1]


def _run_size(run: _Run, pattern: str | None) -> float:
    """Return the number of training examples of a run.

    Args:
        pattern: the argument `size` of `read_runs`.
    """
    if pattern is None and run.rows is None:
        text = f"the number of training examples of the run {quote(run.name)} is not known: say"
        raise TableError(f"{text} by a regular expression where it is", size=r"(\d+)\D*$")
    return parse_size(run.rows if pattern is None else _path_group(run, pattern, "size"))


def _metric(folder: Path, runs: Sequence[_Run], metric: str | None) -> str:
    """Return the recorded name of a metric, the same for all runs.

    Args:
        folder: the folder, for messages.
        runs: all runs.
        metric: name of the metric, which may lack a prefix; None if only one is recorded.

    Raises:
        TableError: there is no measurement, or several match.
    """
    recorded = list(dict.fromkeys(name for run in runs for name in run.measurements))
    if not recorded:
        raise TableError(f"no run of {folder} has a measurement that can be read")
    if metric is None:
        names = [name for name in recorded if metric_word(name)]
    else:
        names = matching_names(metric, recorded) or [metric]  # if unknown, `_measurement` raises
    if len(names) != 1:
        text = f"{folder} has the measurements {quote_all(names or recorded)}; say which"
        raise TableError(text, metric=(names or recorded)[0])
    return names[0]


def _measurement(run: _Run, metric: str, choice: str) -> float:
    """Return a run's measurement of a metric.

    Args:
        run: the run.
        metric: recorded name of the metric.
        choice: "last" or "best".

    Raises:
        TableError: a measurement is missing or not finite, or two at one step differ.
    """
    pairs = run.measurements.get(metric, ())
    values = [number for _, number in pairs]
    nonfinite = [number for number in values if not math.isfinite(number)]
    if nonfinite or not values:
        problem = f"no {quote(metric)} (it has {quote_all(list(run.measurements)) or 'none'})"
        problem = f"a {quote(metric)} of {nonfinite[0]}" if nonfinite else problem
        text = f"the run {quote(run.name)} has {problem}; leave it out"
        raise TableError(text, ignore=[run.name])
    for step in {step for step, _ in pairs if step is not None}:
        # With load_best_model_at_end, the best weights are measured again at the last step, and the
        # numbers equal those of an earlier step.  Then "best" is well defined but "last" is not.
        # Otherwise two numbers at one step are of different data sets.
        at_other_steps = {number for other, number in pairs if other != step}
        at_step = {number for other, number in pairs if other == step}
        is_best_again = len(at_step - at_other_steps) < 2
        if len(at_step) > 1 and not (is_best_again and choice == "best"):
            numbers = quote_all(sorted(map(str, at_step)))
            text = f"the run {quote(run.name)} has several {metric} at step {step}, {numbers}:"
            text += " of other data, or of the best model; leave it out or say that the best counts"
            options = {"value": "best"} if is_best_again else {"ignore": [run.name]}
            raise TableError(text, **options)
    if choice == "last":
        return values[-1]
    return max(values) if higher_is_better(metric) else min(values)


def _refuse_other_recipes(
    runs: Sequence[_Run], models: Sequence[str], sizes: Sequence[float], ignore: Sequence[str]
) -> None:
    """Raise TableError if two runs of a model and size differ in a setting that is not ignored."""
    first_runs: dict[tuple[str, float], _Run] = {}
    for run, model, size in zip(runs, models, sizes, strict=True):
        other = first_runs.setdefault((model, size), run)
        differences = {
            name: f"{name} is {other_value} and {value}"
            for name, (value, other_value) in run.differences(other).items()
            if name not in ignore
        }
        if differences:
            text = f"the runs {quote(other.name)} and {quote(run.name)} of {model} at {size:g} "
            text += f"examples are no repeats: {', '.join(differences.values())}; leave out a run, "
            text += f"or the setting{'s' * (len(differences) > 1)} if it does not matter"
            raise TableError(text, ignore=[*ignore, *differences])


def _trainer_runs(folder: Path) -> list[_Run]:
    """Return the runs of Trainer in a folder, or the runs of lm-eval if Trainer has none there.

    A run's state is the last one in its folder or its checkpoints.

    Raises:
        TableError: a damaged file, a folder with checkpoints of several runs, or no runs.
    """
    states: dict[Path, list[tuple[bool, int, Path, State]]] = {}
    for path in sorted(folder.rglob("trainer_state.json")):
        state = _load(path, "log_history", list)
        is_final = not re.fullmatch(r"checkpoint-\d+", path.parent.name)
        directory = path.parent if is_final else path.parent.parent
        step = int(state.get("global_step") or 0)
        states.setdefault(directory, []).append((is_final, step, path.parent, state))
    if not states:
        return _lm_eval_runs(folder)
    runs = []
    for directory, all_states in states.items():
        # If two runs wrote to one folder, the state with the most steps may be of the older run:
        # then its log does not continue the logs of the other checkpoints.
        *earlier, (is_final, _, last_path, state) = sorted(all_states, key=lambda entry: entry[:2])
        for _, _, earlier_folder, earlier_state in earlier:
            log = earlier_state["log_history"]  # compared as text, as NaN does not equal NaN
            is_continuation = repr(state["log_history"][: len(log)]) == repr(log)
            if not is_final and not is_continuation:
                text = f"{last_path} does not go on from {earlier_folder.name}: {directory} holds"
                raise TableError(f"{text} checkpoints of several runs; remove the earlier one's")
        runs.append(_trainer_run(folder, directory, state))
    return runs


def _load(path: Path, key: str, kind: type) -> State:
    """Return the object in a JSON file; raise an error if `key` has no value of type `kind`."""
    data = parse_json(read_text(path), str(path), lenient=True)
    if not isinstance(data, dict) or not isinstance(data.get(key), kind):
        raise TableError(f"{path} is not as its tool writes it: no {key}")
    return data


def _lm_eval_runs(folder: Path) -> list[_Run]:
    """Return a run for each results*.json of lm-evaluation-harness in a folder.

    Raises:
        TableError: a damaged file, or no such file.
    """
    runs = []
    for path in sorted(folder.rglob("results*.json")):
        results = _load(path, "results", dict)
        values = {
            f"{task}/{metric.removesuffix(',none')}": [(None, float(number))]
            for task, metrics in results["results"].items()
            for metric, number in metrics.items()
            if isinstance(number, (int, float))
        }
        recorded = {**results.get("config", {}), **results}
        recipe_names = {"n-shot", "versions", "limit", "gen_kwargs"} & recorded.keys()
        recipe = {name: recorded[name] for name in sorted(recipe_names)}
        name = path.relative_to(folder).as_posix()
        runs.append(_Run(path, name, None, recipe, None, values))
    if not runs:
        text = f"{folder} holds no trainer_state.json, and no results*.json of lm-eval"
        raise TableError(f"{text}; runs of other tools are read as a table, by read_table")
    return runs


def _trainer_run(folder: Path, directory: Path, state: State) -> _Run:
    """Return the run of Trainer in `directory`, from its last state and its results files.

    Raises:
        TableError: the results files were written by another training than the state.
    """
    results: dict[str, Any] = {}
    for name in ("train_results.json", "eval_results.json", "all_results.json"):
        if (directory / name).exists():
            results |= parse_json(read_text(directory / name), str(directory / name), lenient=True)
    log = state["log_history"]
    runtimes = [entry["train_runtime"] for entry in log if "train_runtime" in entry]
    if runtimes and results.get("train_runtime", runtimes[-1]) != runtimes[-1]:
        text = f"the results in {directory} are of another training than its trainer_state.json"
        raise TableError(f"{text} (train_runtime differs); remove the files of the earlier one")
    logged_values: dict[str, list[tuple[int | None, float]]] = {}
    for entry in [*log, {"step": log[-1].get("step") if log else None, **results}]:
        for name, value in entry.items():
            if re.match(r"eval_|test_|predict_", name):
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                pair = entry.get("step"), float(value) if is_number else math.nan
                logged_values.setdefault(name, []).append(pair)
    recipe = {name: state[name] for name in _RECIPE if state.get(name) is not None}
    trial = state.get("trial_params")  # of Trainer.hyperparameter_search
    if trial is not None:
        trial = {name: value for name, value in trial.items() if "seed" not in name.lower()}
    rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
    if rates:
        recipe["learning_rate"] = max(rates)
    name = directory.name if directory == folder else directory.relative_to(folder).as_posix()
    return _Run(directory, name, results.get("train_samples"), recipe, trial, logged_values)
