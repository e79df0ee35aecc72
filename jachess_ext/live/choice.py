"""`select_live`: a `Search` whose runs are done by transformers' Trainer and kept in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .._io import DataError, finite, from_json, read_json, require, write_json
from ..compare.runs import locked, read_results, run_all, write_results
from ..compare.tasks import Task
from ..scaling.search import Ask, Search
from ..scaling.selection import METHODS, Selection
from .plan import Plan, make_plan
from .trial import COSTS, LOSS, RUN_NAME, Record, RunRecord, Trial, killed, run, score_of

RUNS = "runs"  # in a live selection's folder: a file for each run
RECORDS = "records.jsonl"  # the records of all runs, one a line
RESULT = "selection.json"
WINNER = "winner"  # the best model, fine-tuned on the target's rows


@dataclass(frozen=True)
class LiveSelection:
    """A live selection that has ended.

    Attributes:
        task: name of the data.
        train_rows, dev_rows: in the training data, and judged on.
        unloadable: model -> why it could not be loaded.
        search: settings, results and stops; `search.selection(method)` is what a method says, and
            `search.metric` what is forecast.
        records: of all runs, see `RunRecord`; by size in the order run, then model, then seed.
        winner: record of the best model's run on the target's rows, where it was asked for; its
            cost is not in `flops`: it is what the choice was for.

    Example:
        >>> import jachess_ext as jx
        >>> live = jx.live.read_selection("runs")
        >>> sorted({record["size"] for record in live.records})
        [8, 16, 31]
    """

    task: str
    train_rows: int
    dev_rows: int
    unloadable: Mapping[str, str]
    search: Search
    records: list[dict[str, Any]]
    winner: dict[str, Any] | None = None

    @property
    def rank_by(self) -> str:
        """The score forecast: "loss" or one of `CLASS_SCORES` or `NUMBER_SCORES`; of text "bpb"."""
        return str(self.search.metric)

    @property
    def best(self) -> str:
        """The model to fine-tune."""
        return self.search.best()

    @property
    def share(self) -> float:
        """The largest subset that was run, as a share of the target."""
        return max(record["size"] for record in self.records) / self.search.target

    @property
    def stops(self) -> dict[str, str]:
        """Candidate -> why no further size of it was run."""
        search = self.search
        loaded = {model: search.stops.get(model, search.stop or "") for model in search.models}
        return loaded | dict(self.unloadable)

    @property
    def flops(self) -> dict[str, float]:
        """Operations by what they went into: training, judging; spent: their sum.

        Beside them full_tuning, of training every candidate on the target's data and judging it
        once, and sub_tuning, the same on the largest subset.
        """
        parts = {
            name.removesuffix("_flops"): sum(record[name] for record in self.records)
            for name in COSTS
        }
        largest = max(record["size"] for record in self.records)
        each = (self.search.costs or {}).values()
        return parts | {
            "spent": sum(parts.values()),
            "full_tuning": sum(judging + row * self.search.target for judging, row in each),
            "sub_tuning": sum(judging + row * largest for judging, row in each),
        }

    @property
    def seconds(self) -> float:
        """Wall-clock time of all runs."""
        return sum(sum((record["seconds"] or {}).values()) for record in self.records)

    def selections(self) -> tuple[dict[str, Selection], dict[str, str]]:
        """Return the selection of every method that can rank, and for the others the reason."""
        said: dict[str, Selection] = {}
        missing: dict[str, str] = {}
        for method in METHODS:
            try:
                said[method] = self.search.selection(method)
            except ValueError as error:
                missing[method] = str(error)
        return said, missing

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each run.

        Columns: candidate, size, seed, score (by `rank_by`), dev_loss, dev_score (the task's own),
        cost (all FLOPs), steps, time (t), seconds, error.

        Raises:
            MissingExtra: pandas is not installed.
        """
        rows = [
            {
                "candidate": record["model"],
                "size": record["size"],
                "seed": record["seed"],
                "score": score_of(record, self.rank_by),
                "dev_loss": record["dev_loss"],
                "dev_score": record["dev_score"],
                "cost": sum(record[name] for name in COSTS),
                "steps": record["steps"],
                "time": record["time"],
                "seconds": sum((record["seconds"] or {}).values()),
                "error": record["error"],
            }
            for record in self.records
        ]
        return require("pandas").DataFrame(rows)

    def to_dict(self) -> Record:
        """Return the content of `selection.json`: choice, reasons, cost and state."""
        said, missing = self.selections()
        ranking = said[self.search.method].to_frame()
        return finite(
            {
                "best": self.best,
                "ranking": ranking.to_dict("records"),
                "ranks": {method: selection.ranking for method, selection in said.items()},
                "missing": missing,
                "stops": self.stops,
                "stop": self.search.stop,
                "share": self.share,
                "flops": self.flops,
                "seconds": self.seconds,
                "state": {
                    "task": self.task,
                    "train_rows": self.train_rows,
                    "dev_rows": self.dev_rows,
                    "unloadable": dict(self.unloadable),
                    "search": self.search.state(),
                    "winner": self.winner,
                },
            }
        )


def select_live(
    models: Sequence[str],
    task: Task | str,
    out: Path | str,
    *,
    keep_winner: bool = False,
    processes: int = 1,
    threads: int = 1,
    backend: str = "loky",
    progress: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> LiveSelection:
    """Fine-tune the candidates on subsets and rank them by the loss they will have in full.

    Runs that `out` has are not repeated: after a kill the same call goes on, to equal records.

    Args:
        models, task: as for `make_plan`.
        out: folder of records and result.
        keep_winner: whether the best model is fine-tuned on the target's rows and saved.
        processes, threads, backend: as for `compare.runs.run_all`.
        progress: told of every run, in a line of text.
        settings: further arguments of `make_plan`, those of `Search` among them.

    Returns:
        The selection, written to `out` as well.

    Raises:
        DataError: what was given cannot be used, and nothing was trained; or the runs ended before
            the method had sizes enough, and are kept.
        MissingExtra: transformers, scipy or another library is not installed.

    Example:
        >>> import jachess_ext as jx
        >>> live = jx.live.select_live(models, "train.csv:dev.csv", "runs", sizes=[8, 16, 31])
        >>> live.best in models
        True
    """
    for library in ("transformers", "accelerate", "scipy.stats", "sklearn", "pandas"):
        require(library)  # before hours of training, not after
    out = Path(out)
    progress("reading data and models")
    plan = make_plan(models, task, **settings)
    search = plan.search
    records: dict[Ask, Record] = {}

    def in_order() -> list[Record]:
        def place(ask: Ask) -> tuple[int, int, int]:
            return search.rounds.index(ask.rows), search.models.index(ask.model), ask.seed

        return [records[ask] for ask in sorted(records, key=place)]

    def usable(trial: Trial, record: Record) -> bool:
        from_json(record, RunRecord, "the record")
        return not record["lost"]

    def run_trials(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Record]]:
        return run_all(
            trials,
            run,
            out / RUNS,
            processes=processes,
            threads=threads,
            backend=backend,
            usable=usable,
            killed=killed,
        )

    with locked(out):
        while asks := search.open_runs():
            trials = {(trial := plan.trial(ask)).name: (trial, ask) for ask in asks}
            for trial, record in run_trials([trial for trial, _ in trials.values()]):
                ask = trials[trial.name][1]
                records[ask] = record
                search.tell(
                    ask,
                    score_of(record, str(search.metric)),
                    cost=record["training_flops"] + record["judging_flops"],
                    error=record["error"],
                )
                write_results(out / RECORDS, in_order())
                progress(f"{ask.model} on {ask.rows} rows: {said(record, str(search.metric))}")
        if len(search.failed) == len(search.models):
            raise DataError(f"no model could be trained; {next(iter(search.stops.values()))}")
        selection = LiveSelection(
            task=plan.task.name,
            train_rows=len(plan.task.train),
            dev_rows=len(plan.task.dev),
            unloadable=plan.unloadable,
            search=search,
            records=in_order(),
        )
        try:
            search.selection()
        except ValueError as error:
            raise DataError(
                f"no ranking yet ({search.stop}): {error}; the runs are kept, and the same command "
                "with a larger limit goes on from them; with the method subtuning it ranks by the "
                "largest size that every model was run on"
            ) from error
        write_json(out / RESULT, selection.to_dict())
        if keep_winner:
            progress(f"{selection.best} on {search.target} rows, to keep")
            selection = replace(selection, winner=_winner(plan, selection.best, out, run_trials))
            write_json(out / RESULT, selection.to_dict())
    return selection


def said(record: Record, rank_by: str) -> str:
    """Return in words what a run gave, or why it failed."""
    score = score_of(record, rank_by)
    return str(record["error"]) if score is None else f"dev {rank_by} {score:.4g}"


def _winner(
    plan: Plan,
    best: str,
    out: Path,
    run_trials: Callable[[Sequence[Trial]], Iterator[tuple[Trial, Record]]],
) -> Record:
    """Return the record of the best model on the target's rows, and save that model."""
    trial = plan.trial(Ask(best, plan.search.target, plan.search.seed), keep=out / WINNER)
    try:
        kept = (out / WINNER / RUN_NAME).read_text(encoding="utf-8") == trial.name
    except OSError:
        kept = False
    if not kept:  # its record alone is not enough
        (out / RUNS / f"{trial.name}.json").unlink(missing_ok=True)
    ((_, record),) = run_trials([trial])
    return record


def read_selection(folder: Path | str) -> LiveSelection:
    """Read a finished live selection from its folder.

    Raises:
        DataError: it has not finished, or a file is not whole.

    Example:
        >>> import jachess_ext as jx
        >>> len(jx.live.read_selection("runs").records)
        6
    """
    folder = Path(folder)
    path = folder / RESULT
    if not path.exists():
        raise DataError(
            f"{path} is not there; the selection may not have finished: run it again, and it goes "
            "on where it was stopped"
        )
    state = from_json(read_json(path), dict[str, Any], str(path)).get("state")
    state = dict(from_json(state, dict[str, Any], f"{path}: the state"))
    state["search"] = search = Search.from_state(state.get("search"))
    state["records"] = [
        asdict(from_json(record, RunRecord, f"{folder / RECORDS}: a record"))
        for record in read_results(folder / RECORDS)
    ]
    try:
        search.selection()
    except ValueError as error:
        raise DataError(f"{path}: no state of a selection that has ended ({error})") from error
    selection: LiveSelection = from_json(state, LiveSelection, f"{path}: the state")
    finished = [record for record in selection.records if record["error"] is None]
    if not all(search.metric in {LOSS, *(record["scores"] or {})} for record in finished):
        raise DataError(
            f"{path}: the metric is {search.metric!r}; expected {LOSS!r} or a score of each run in "
            f"{RECORDS}"
        )
    return selection
