"""`select_live`: a `Search` whose runs use transformers' Trainer and are kept in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._io import (
    RUN_NEEDS,
    DataError,
    finite,
    from_json,
    read_json,
    require,
    require_all,
    write_json,
)
from ...scaling.search import Ask, Search
from ..workbench.runs import Record, locked, read_results, run_all, write_results
from ..workbench.tasks import Task
from .plan import LiveSettings, Plan, make_plan
from .trial import LOSS, RUN_NAME, RunRecord, Trial, killed, run

if TYPE_CHECKING:
    from pandas import DataFrame

RUNS = "runs"  # subfolder with a file for each run
RECORDS = "records.jsonl"  # file with the records of all runs, one per line
RESULT = "selection.json"
WINNER = "winner"  # the best model, fine-tuned on the target's number of rows


@dataclass(frozen=True)
class LiveSelection:
    """A finished live selection.

    Attributes:
        task: name of the task.
        train_rows: number of rows of the training data.
        search: settings, results and stops of the search; `search.selection(method)` is the
            selection by a method, `search.metric` the metric that is forecast, and
            `search.test_rows` the number of dev rows used.
        records: records of all runs, sorted by size (in the order run), then model, then seed.
        winner: record of the best model's run on the target's number of rows; None if it was not
            requested. Its cost is not included in `flops`.

    Examples:
        >>> from jachess_ext.lab.live import read_selection
        >>> live = read_selection("runs")
        >>> sorted({record.size for record in live.records})
        [8, 16, 31]
    """

    task: str
    train_rows: int
    search: Search
    records: list[RunRecord]
    winner: RunRecord | None = None

    @property
    def rank_by(self) -> str:
        """The metric that is forecast: "loss", one of `CLASS_SCORES` or `NUMBER_SCORES`, or, for
        text, "bpb" (bits per byte)."""
        return str(self.search.metric)

    @property
    def best(self) -> str:
        """The model to fine-tune."""
        return self.search.best()

    @property
    def share(self) -> float:
        """Size of the largest subset that was run, as a fraction of the target."""
        return max(record.size for record in self.records) / self.search.target

    @property
    def stops(self) -> dict[str, str]:
        """Mapping candidate -> why no larger subset was run for it."""
        search = self.search
        return {model: search.stops.get(model, search.stop or "") for model in search.models}

    @property
    def flops(self) -> dict[str, float]:
        """FLOPs by purpose: "training", "judging" (evaluation on dev rows) and "spent", their sum.

        For comparison: "full_tuning", for training every candidate on the target's number of rows
        and judging it once, and "sub_tuning", the same on the largest subset.
        """
        largest = max(record.size for record in self.records)
        costs = (self.search.costs or {}).values()
        return {
            "training": sum(record.training_flops for record in self.records),
            "judging": sum(record.judging_flops for record in self.records),
            "spent": sum(record.flops for record in self.records),
            "full_tuning": sum(judging + row * self.search.target for judging, row in costs),
            "sub_tuning": sum(judging + row * largest for judging, row in costs),
        }

    @property
    def seconds(self) -> float:
        """Wall-clock time of all runs."""
        return sum(record.seconds for record in self.records)

    def to_frame(self) -> DataFrame:
        """Return a pandas DataFrame with a row for each run.

        The columns are the fields of `RunRecord`, and score (of the metric `rank_by`).

        Raises:
            MissingExtra: pandas is not installed.
        """
        scores = [record.score(self.rank_by) for record in self.records]
        frame: DataFrame = require("pandas").DataFrame(self.records)
        return frame.assign(score=scores)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `selection.json`: the choice, its reasons, cost and state."""
        return finite(  # type: ignore[no-any-return]
            {
                "best": self.best,
                "ranking": self.search.selection().to_frame().to_dict("records"),
                "stops": self.stops,
                "stop": self.search.stop,
                "share": self.share,
                "flops": self.flops,
                "seconds": self.seconds,
                "state": {
                    "task": self.task,
                    "train_rows": self.train_rows,
                    "search": self.search.state(),
                    "winner": self.winner and asdict(self.winner),
                },
            }
        )


def select_live(
    models: Sequence[str],
    task: Task | str,
    out: Path | str,
    settings: LiveSettings = LiveSettings(),  # noqa: B008  frozen
    *,
    keep_winner: bool = False,
    processes: int = 1,
    threads: int = 1,
    backend: str = "loky",
    progress: Callable[[str], None] = lambda text: None,
) -> LiveSelection:
    """Fine-tune the candidates on subsets, and rank them by their forecast loss on the full data.

    Runs with a record in `out` are not repeated: after a kill, the same call continues, and gives
    the same records.

    Args:
        models, task: as for `make_plan`.
        out: folder for records and result.
        settings: subsets, recipe, method and so on, see `LiveSettings`.
        keep_winner: whether to fine-tune the best model on the target's number of rows, and save
            it.
        processes, threads, backend: as for `workbench.runs.run_all`.
        progress: function that is called with a line of text for every run.

    Returns:
        The selection, which is also written to `out`.

    Raises:
        ValueError: an argument cannot be used, and nothing was trained; or the runs ended before
            the method had enough sizes (the runs are kept).
        MissingExtra: transformers, scipy or another library is not installed.

    Examples:
        >>> from jachess_ext.lab.live import LiveSettings, select_live
        >>> settings = LiveSettings(sizes=[8, 16, 31])
        >>> live = select_live(models, "train.csv:dev.csv", "runs", settings)
        >>> live.best in models
        True
    """
    require_all("select_live", RUN_NEEDS)  # before hours of training, not after
    out = Path(out)
    progress("reading data and models")
    plan = make_plan(models, task, settings)
    search = plan.search
    records: dict[Ask, RunRecord] = {}

    def sorted_records() -> list[RunRecord]:
        def position(ask: Ask) -> tuple[int, int]:
            return search.rounds.index(ask.rows), search.models.index(ask.model)

        return [records[ask] for ask in sorted(records, key=position)]

    def run_trials(trials: Sequence[Trial]) -> Iterator[tuple[Trial, RunRecord]]:
        runs = run_all(
            trials,
            _run_record,
            out / RUNS,
            processes=processes,
            threads=threads,
            backend=backend,
            # More memory may be free now.
            is_usable=lambda trial, record: not _parse(record).lost,
            killed=lambda trial: asdict(killed(trial)),
        )
        return ((trial, _parse(record)) for trial, record in runs)

    # The search decides which runs to do; the folder holds their results.  After a kill the search
    # starts anew and requests the same runs in the same order; those with a file are answered at
    # once, so that it reaches the same state without having been saved.
    with locked(out):
        while asks := search.open_runs():
            trials = {(trial := plan.trial(ask)).name: (trial, ask) for ask in asks}
            for trial, record in run_trials([trial for trial, _ in trials.values()]):
                ask = trials[trial.name][1]
                records[ask] = record
                score = record.score(str(search.metric))
                search.tell(ask, score, cost=record.flops, error=record.error)
                write_results(out / RECORDS, map(asdict, sorted_records()))
                progress(f"{ask.model} on {ask.rows} rows: {record.summary(str(search.metric))}")
        if len(search.failed) == len(search.models):
            raise DataError(f"no model could be trained; {next(iter(search.stops.values()))}")
        selection = LiveSelection(plan.task.name, len(plan.task.train), search, sorted_records())
        try:
            search.selection()
        except ValueError as error:
            raise DataError(
                f"no ranking yet ({search.stop}): {error}; the runs are kept, and the same command "
                "with a larger limit goes on from them; with the method subtuning it ranks by the "
                "largest size that every model was run on"
            ) from error
        # Written before the winner is trained, which may take longer than the selection.
        write_json(out / RESULT, selection.to_dict())
        if keep_winner:
            progress(f"{selection.best} on {search.target} rows, to keep")
            selection = replace(selection, winner=_run_best(plan, selection.best, out, run_trials))
            write_json(out / RESULT, selection.to_dict())
    return selection


def _run_record(trial: Trial) -> Record:
    """Run a trial; return its record as a dict, the content of its file."""
    return asdict(run(trial))


def _parse(record: object, name: str = "the record") -> RunRecord:
    return from_json(record, RunRecord, name)  # type: ignore[no-any-return]


def _run_best(
    plan: Plan,
    best: str,
    out: Path,
    run_trials: Callable[[Sequence[Trial]], Iterator[tuple[Trial, RunRecord]]],
) -> RunRecord:
    """Fine-tune the best model on the target's number of rows, save it, and return its record.

    Nothing is repeated if the folder already holds this model.
    """
    # The saved model may be from another run (other rows or another best model): it is kept only if
    # the file RUN_NAME has the name of this trial.
    trial = plan.trial(Ask(best, plan.search.target), keep=out / WINNER)
    try:
        is_saved = (out / WINNER / RUN_NAME).read_text(encoding="utf-8") == trial.name
    except OSError:
        is_saved = False
    if not is_saved:  # a record without the saved model is not enough
        (out / RUNS / f"{trial.name}.json").unlink(missing_ok=True)
    ((_, record),) = run_trials([trial])
    return record


def read_selection(folder: Path | str) -> LiveSelection:
    """Read a finished live selection from its folder.

    Raises:
        DataError: the selection has not finished, or a file is damaged.

    Examples:
        >>> from jachess_ext.lab.live import read_selection
        >>> len(read_selection("runs").records)
        6
    """
    folder = Path(folder)
    path = folder / RESULT
    state = from_json(read_json(path), dict[str, Any], str(path)).get("state")
    state = dict(from_json(state, dict[str, Any], f"{path}: the state"))
    state["search"] = search = Search.from_state(state.get("search"))
    state["records"] = [
        _parse(record, f"{folder / RECORDS}: a record") for record in read_results(folder / RECORDS)
    ]
    try:
        search.selection()
    except ValueError as error:
        raise DataError(f"{path}: no state of a selection that has ended ({error})") from error
    selection: LiveSelection = from_json(state, LiveSelection, f"{path}: the state")
    finished = [record for record in selection.records if record.error is None]
    if not all(search.metric in {LOSS, *record.scores} for record in finished):
        raise DataError(
            f"{path}: the metric is {search.metric!r}; expected {LOSS!r} or a score of each run in "
            f"{RECORDS}"
        )
    return selection
