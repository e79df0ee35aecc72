"""`read_runs`: a table of losses from a folder of runs of Trainer, or of lm-eval's results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .._io import DataError, parse_json, read_text
from .loss_table import LossTable
from .metrics import higher_is_better, matching_names, metric_word
from .records import Records, to_table
from .sheets import parse_size, quote_all
from .table_error import TableError, quote

_RECIPE = ("learning_rate", "num_train_epochs", "max_steps", "train_batch_size")
"""Settings that repeated runs of a model and size must share."""


State: TypeAlias = Mapping[str, Any]
"""A trainer_state.json, as JSON has it."""


@dataclass(frozen=True)
class _Run:
    """A run, as the files in its folder record it.

    Attributes:
        directory: its folder, or its file.
        name: its path in the folder that is read.
        rows: training examples; None where no file says.
        recipe: the recorded settings of `_RECIPE`, and lm-eval's.
        trial: hyperparameters of a trial of a search, without seeds; None without a search.
        values: metric -> (step, measurement) in their order, NaN where it is no number.
    """

    directory: Path
    name: str
    rows: int | None
    recipe: Mapping[str, object]
    trial: Mapping[str, object] | None
    values: Mapping[str, Sequence[tuple[int | None, float]]]

    def differences(self, other: _Run) -> dict[str, tuple[object, object]]:
        """Return the settings in which two runs differ, of those that both record."""
        pairs = {
            name: (self.recipe[name], other.recipe[name])
            for name in self.recipe
            if name in other.recipe
        }
        if self.trial is not None and other.trial is not None:
            names = sorted({*self.trial, *other.trial})
            pairs |= {name: (self.trial.get(name), other.trial.get(name)) for name in names}
        return {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours != theirs}


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
    """Return the table of losses of runs of transformers' Trainer, a folder each.

    A run is a folder with a trainer_state.json, its own or its checkpoints'.  Where there is none,
    each results*.json of lm-evaluation-harness is one, with metrics such as "rte/acc".  Several
    runs of a model and size are repeats: their mean counts, with its standard error in `noise`.
    Trials of a hyperparameter search are none.

    Args:
        folder: the runs, at any depth.
        metric: such as "eval_accuracy"; None: the only one there is.
        model: a regular expression whose one group is the model in a run's path in the folder.
        size: the same for the number of training rows; None: train_samples of train_results.json.
        value: "last" or "best" of a run's measurements, all of which have to be finite.
        ignore: paths in the folder of runs to leave out, and settings, such as "learning_rate", in
            which repeats may differ.
        test_rows, fewest: as for `read_table`.

    Raises:
        TableError: as `read_table`; no runs, a run whose size or metric is not known or of which a
            measurement is not finite, two measurements at one step that differ, a run inside
            another's folder, or a folder with the checkpoints of several runs.
        DataError: a file that cannot be read, or is no JSON.

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
    runs = [run for run in runs if run.name not in ignore]
    folders = {run.directory for run in runs}
    inner = [run.name for run in runs if not folders.isdisjoint(run.directory.parents)]
    if inner:
        text = f"the runs {quote_all(inner)} of {folder} lie in folders of other runs"
        raise TableError(f"{text}; leave out the ones or the others", ignore=[*ignore, *inner])
    column = _metric(folder, runs, metric)
    values = np.array([_measurement(run, column, value) for run in runs])
    sizes = [_run_size(run, size) for run in runs]
    models = [_path_group(run, model, "model") for run in runs]
    _refuse_other_recipes(runs, models, sizes, ignore)
    names = [run.name for run in runs]
    records = Records(str(folder), models, np.array(sizes), values, seeds=names)
    return to_table(records, metric or column, fewest, test_rows)


def _path_group(run: _Run, pattern: str, argument: str) -> str:
    """Return the one group of a pattern, the value of `argument`, in a run's path."""
    try:
        match = re.search(pattern, run.name)
    except re.error as error:
        text = f"{quote(pattern)}, for the {argument}, is no regular expression ({error})"
        raise TableError(text) from None
    if match is None or match.re.groups != 1 or match[1] is None:
        text = f"{quote(pattern)}, for the {argument}, matches no part of the run {quote(run.name)}"
        raise TableError(f"{text} with one group")
    return match[1]


def _run_size(run: _Run, pattern: str | None) -> float:
    if pattern is None and run.rows is None:
        text = f"the number of training examples of the run {quote(run.name)} is not known: say"
        raise TableError(f"{text} by a regular expression where it is", size=r"(\d+)\D*$")
    try:
        return parse_size(run.rows if pattern is None else _path_group(run, pattern, "size"))
    except TableError as error:
        raise TableError(f"of the run {quote(run.name)}, {error}") from None


def _metric(folder: Path, runs: Sequence[_Run], metric: str | None) -> str:
    """Return the name of the measurement `metric`, or of the only one.

    It is one name for all runs: a run without it must not be judged by another measurement.
    """
    every = list(dict.fromkeys(name for run in runs for name in run.values))
    if not every:
        raise TableError(f"no run of {folder} has a measurement that can be read")
    if metric is None:
        names = [name for name in every if metric_word(name)]
    else:
        names = matching_names(metric, every) or [metric]  # `_measurement` says which run lacks it
    if len(names) != 1:
        text = f"{folder} has the measurements {quote_all(names or every)}; say which"
        raise TableError(text, metric=(names or every)[0])
    return names[0]


def _measurement(run: _Run, metric: str, value: str) -> float:
    """Return the last or best measurement of a metric."""
    pairs = run.values.get(metric, ())
    values = [number for _, number in pairs]
    wrong = [number for number in values if not math.isfinite(number)]
    if wrong or not values:
        problem = f"no {quote(metric)} (it has {quote_all(list(run.values)) or 'none'})"
        problem = f"a {quote(metric)} of {wrong[0]}" if wrong else problem
        text = f"the run {quote(run.name)} has {problem}; leave it out"
        raise TableError(text, ignore=[run.name])
    for step in {step for step, _ in pairs if step is not None}:
        # With load_best_model_at_end a run is measured once more at its last step, and the numbers
        # are those of an earlier step: no second data set, but not of the last weights either.
        elsewhere = {number for other, number in pairs if other != step}
        at_step = {number for other, number in pairs if other == step}
        again = len(at_step - elsewhere) < 2
        if len(at_step) > 1 and not (again and value == "best"):
            numbers = quote_all(sorted(map(str, at_step)))
            text = f"the run {quote(run.name)} has several {metric} at step {step}, {numbers}:"
            text += " of other data, or of the best model; leave it out or say that the best counts"
            answer = {"value": "best"} if again else {"ignore": [run.name]}
            raise TableError(text, **answer)
    if value == "last":
        return values[-1]
    return max(values) if higher_is_better(metric) else min(values)


def _refuse_other_recipes(
    runs: Sequence[_Run], models: Sequence[str], sizes: Sequence[float], ignore: Sequence[str]
) -> None:
    """Raise TableError where repeats of a model and size differ in more than their seeds."""
    first: dict[tuple[str, float], _Run] = {}
    for run, model, size in zip(runs, models, sizes, strict=True):
        other = first.setdefault((model, size), run)
        different = {
            name: f"{name} is {theirs} and {ours}"
            for name, (ours, theirs) in run.differences(other).items()
            if name not in ignore
        }
        if different:
            text = f"the runs {quote(other.name)} and {quote(run.name)} of {model} at {size:g} "
            text += f"examples are no repeats: {', '.join(different.values())}; leave out a run, "
            text += f"or the setting{'s' * (len(different) > 1)} if it does not matter"
            raise TableError(text, ignore=[*ignore, *different])


def _trainer_runs(folder: Path) -> list[_Run]:
    """Return the runs of a folder, with checkpoints in them or without."""
    states: dict[Path, list[tuple[bool, int, Path, State]]] = {}
    for path in sorted(folder.rglob("trainer_state.json")):
        state = parse_json(read_text(path), str(path), lenient=True)
        if not isinstance(state, dict) or "log_history" not in state:
            raise TableError(f"{path} is no state of transformers' Trainer (no log_history)")
        final = not re.fullmatch(r"checkpoint-\d+", path.parent.name)
        directory = path.parent if final else path.parent.parent
        with _refuse_damaged(path):
            step = int(state.get("global_step", 0))
        states.setdefault(directory, []).append((final, step, path.parent, state))
    if not states:
        return _lm_eval_runs(folder)
    runs = []
    for directory, all_states in states.items():
        with _refuse_damaged(directory):
            # A folder that two runs wrote to has checkpoints of both: the state with the most steps
            # may be the older run's, and then its log does not begin as the others' do.
            *earlier, (final, _, last, state) = sorted(all_states, key=lambda one: one[:2])
            for _, _, earlier_folder, before in earlier:
                begun = before["log_history"]  # compared as text, where NaN is NaN
                goes_on = repr(state["log_history"][: len(begun)]) == repr(begun)
                if not final and not goes_on:
                    text = f"{last} does not go on from {earlier_folder.name}: {directory}"
                    text += " holds checkpoints of several runs; remove the earlier one's"
                    raise TableError(text)
            runs.append(_trainer_run(folder, directory, state))
    return runs


def _lm_eval_runs(folder: Path) -> list[_Run]:
    """Return a run for each file of lm-evaluation-harness's results."""
    runs = []
    for path in sorted(folder.rglob("results*.json")):
        content = parse_json(read_text(path), str(path), lenient=True)
        with _refuse_damaged(path):
            values = {
                f"{task}/{metric.removesuffix(',none')}": [(None, float(number))]
                for task, metrics in content["results"].items()
                for metric, number in metrics.items()
                if isinstance(number, (int, float))
            }
            recipe = {name: content[name] for name in ("n-shot", "versions") if name in content}
            config = content.get("config", {})
            recipe |= {name: config[name] for name in ("limit", "gen_kwargs") if name in config}
        name = path.relative_to(folder).as_posix()
        runs.append(_Run(path, name, None, recipe, None, values))
    if not runs:
        text = f"{folder} holds no trainer_state.json, and no results*.json of lm-eval"
        raise TableError(f"{text}; runs of other tools are read as a table, by read_table")
    return runs


def _trainer_run(folder: Path, directory: Path, state: State) -> _Run:
    """Return the run of a folder from its last state."""
    results: dict[str, Any] = {}
    for name in ("train_results.json", "eval_results.json", "all_results.json"):
        if (directory / name).exists():
            results |= parse_json(read_text(directory / name), str(directory / name), lenient=True)
    log = state["log_history"]
    ends = [entry["train_runtime"] for entry in log if "train_runtime" in entry]
    if ends and results.get("train_runtime", ends[-1]) != ends[-1]:
        text = f"the results in {directory} are of another training than its trainer_state.json"
        raise TableError(f"{text} (train_runtime differs); remove the files of the earlier one")
    values: dict[str, list[tuple[int | None, float]]] = {}
    for entry in [*log, {"step": log[-1].get("step") if log else None, **results}]:
        for name, number in entry.items():
            if re.match(r"eval_|test_|predict_", name):  # empty or told in words: no number
                real = isinstance(number, (int, float)) and not isinstance(number, bool)
                pair = entry.get("step"), float(number) if real else math.nan
                values.setdefault(name, []).append(pair)
    recipe = {name: state[name] for name in _RECIPE if state.get(name) is not None}
    trial = state.get("trial_params")  # of Trainer.hyperparameter_search
    if trial is not None:
        trial = {name: value for name, value in trial.items() if "seed" not in name.lower()}
    rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
    if rates:
        recipe["learning_rate"] = max(rates)
    name = directory.name if directory == folder else directory.relative_to(folder).as_posix()
    return _Run(directory, name, results.get("train_samples"), recipe, trial, values)


@contextmanager
def _refuse_damaged(path: Path) -> Iterator[None]:
    """Raise TableError for files that are not as Trainer or lm-eval writes them."""
    try:
        yield
    except (DataError, TableError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TableError(f"{path} is not as its tool writes it, or damaged ({error})") from None
