"""`Search`: choosing a model by ask and tell, with runs by any trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from .._io import DataError, finite, from_json
from .ats import accept_then_stop
from .history import History, Tables
from .loss_table import LossTable, check_sizes
from .methods import DEFAULT, METHODS, MethodSettings, forecast_models
from .metrics import higher_is_better, plain_name, sampling_noise, to_loss, worst_value
from .selection import Selection
from .sheets import Source
from .tables import read_table

ACCEPT_THEN_STOP = "accept-then-stop"
STRATEGIES = ("growing", "dropping", ACCEPT_THEN_STOP)


@dataclass(frozen=True)
class Ask:
    """A request for a run: fine-tune `model` on the first `rows` examples and measure its loss.

    Attributes:
        model: name of a candidate.
        rows: number of training examples; 0 is the model before fine-tuning.

    Examples:
        >>> import jachess_ext as jx
        >>> jx.scaling.Ask("bert-base-uncased", rows=400)
        Ask(model='bert-base-uncased', rows=400)
    """

    model: str
    rows: int


@dataclass(frozen=True)
class Result:
    """The result of a run, see `Search.tell`.

    Attributes:
        loss: measured value converted to a loss by `metrics.to_loss`; None if the run failed.
        cost: cost of the run.
        error: why the run failed; None if it did not.
        added: whether the result was recorded by `Search.add` rather than `tell`.
    """

    loss: float | None = None
    cost: float = 0.0
    error: str | None = None
    added: bool = False


Results = dict[Ask, Result]


@dataclass
class Search:
    """A search for the best candidate, which returns the runs that are needed next.

    Results that exist already are recorded by `add` or `add_table`, and not requested again.  The
    state consists of the settings and the results (`state`, `from_state`): the rounds are computed
    from them, and the order of the results of a round does not matter.

    Attributes:
        models: names of the candidates, two or more.
        sizes: numbers of training examples of the runs, increasing.
        target: number of training examples to predict for, above the sizes.
        metric: name of the metric of the results, such as "accuracy"; None for losses.  For a score
            whose best value is 1 the methods extrapolate 1 − score, and `selection` shows scores.
        test_rows: number of test examples: a perfect score counts as half an error, and an
            accuracy or error rate has binomial noise; None if unknown.
        classes: number of classes, C, of a classification task: intervals are wider, as it is not
            known when a curve leaves the loss of guessing, ln C; None for other tasks.
        method: name in `METHODS` of the method that ranks the models, computes probabilities and
            drops models.
        strategy: "growing" runs every model on the smallest size, then every model on the next;
            "dropping" continues only with the models that are worth a further run
            (`Selection.survivors`), and of these with the best that the budget pays for.  A dropped
            model is not ranked.  "accept-then-stop" is LensLLM's Algorithm 1, with the method ats:
            each model is trained from the largest size down, until a loss deviates from the line
            through those of its larger sizes (`gamma`, `tau`); in the paper sizes are halves of the
            next larger one.
        budget: limit of the sum of all costs; a round that is expected to exceed it is
            not begun.  "dropping" drops models to stay below it, down to two.  None for no limit.
        costs: model -> expected (cost of every run, additional cost of each row); None assumes
            costs in proportion to the rows, from the model's last run.
        parameters: model -> number of parameters, for the method modelsize.
        gamma, tau: settings of the method ats, see `fit`.
        unusable: candidate -> reason; it is neither run nor ranked.
        history: earlier tables of some of the candidates, see `select`.
        results: run -> its result, in the order of `tell` and `add`.
        stops: model -> why it is not run on further sizes.
        failed: models that failed or are unusable; they are not ranked.
        stop: why the search ended, a sentence; None while it continues.

    Raises:
        ValueError: a setting that cannot be used, or an unknown metric.

    Examples:
        >>> import jachess_ext as jx
        >>> search = jx.scaling.Search(["a", "b"], sizes=[100, 200, 400], target=6400)
        >>> while ask := search.ask():
        ...     search.tell(ask, loss=ask.rows ** (-0.3 if ask.model == "a" else -0.1))
        >>> search.best()
        'a'
    """

    models: Sequence[str]
    sizes: Sequence[int]
    target: int
    metric: str | None = None
    test_rows: int | None = None
    classes: int | None = None
    method: str = DEFAULT
    strategy: str = "growing"
    budget: float | None = None
    costs: Mapping[str, Sequence[float]] | None = None
    parameters: Mapping[str, int] | None = None
    gamma: int = 3
    tau: float = 5.0
    unusable: Mapping[str, str] = field(default_factory=dict)
    history: Tables | Sequence[Tables] = field(default=(), repr=False, compare=False)
    results: Results = field(default_factory=dict, init=False)
    stops: dict[str, str] = field(default_factory=dict, init=False)
    failed: set[str] = field(default_factory=set, init=False)
    stop: str | None = field(default=None, init=False)
    _round_index: int = field(default=-1, init=False, repr=False, compare=False)
    _round: list[Ask] = field(default_factory=list, init=False, repr=False, compare=False)
    _ranked: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    _asked: set[Ask] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.models, self.sizes = tuple(map(str, self.models)), tuple(map(int, self.sizes))
        if self.costs is not None:
            self.costs = {m: (float(once), float(row)) for m, (once, row) in self.costs.items()}
        self._check()
        self.history = History.read(self.history)
        self._replay()

    def set_candidates(
        self,
        *,
        test_rows: int,
        costs: Mapping[str, Sequence[float]],
        parameters: Mapping[str, int],
        unusable: Mapping[str, str],
    ) -> None:
        """Set the attributes that are known only after the candidates have been loaded."""
        self.test_rows, self.costs = test_rows, costs
        self.parameters, self.unusable = parameters, unusable
        self._replay()

    @property
    def rounds(self) -> tuple[int, ...]:
        """Sizes in the order of the rounds; the first is 0 if the method uses the initial loss."""
        method = METHODS[self.method]
        if method.trains == "none":
            return (0,)
        if self.strategy == ACCEPT_THEN_STOP:
            return tuple(reversed(self.sizes))
        # If sizes double, each costs about as much as all smaller ones, so that ascending and
        # stopping early saves most.
        return (0, *self.sizes) if method.reads_zero else tuple(self.sizes)

    def ask(self) -> Ask | None:
        """Return the next run to do; None at the end of the search.

        It is the same run until `tell` records its result.
        """
        return next(iter(self.open_runs()), None)

    def open_runs(self) -> list[Ask]:
        """Return all runs that can be done in parallel; an empty list at the end of the search."""
        return [ask for ask in self._round if ask not in self.results]

    def tell(
        self, ask: Ask, loss: float | None = None, *, cost: float = 0.0, error: str | None = None
    ) -> None:
        """Record the result of a run.

        Args:
            ask: a run that `ask` or `open_runs` returned.
            loss: value of the search's `metric`; without one a positive loss, lower is better, such
                as a mean negative log-likelihood or an error rate.
            cost: cost of training and evaluation, in any unit (FLOPs, GPU seconds, money).
            error: why the run failed, if it did; its model is not run again.

        Raises:
            DataError: `ask` is not an open run, or `loss` is outside the metric's range.
        """
        if ask not in self.open_runs():
            raise DataError(f"{ask} is not an open run; tell results of what `ask` returned")
        converted = self._to_loss(loss) if error is None else None
        if error is None and converted is None:
            error = self._invalid_loss(loss)
        self.results[ask] = Result(loss=converted, cost=cost, error=error)
        self._advance()

    def add(self, model: str, rows: int, loss: float, *, cost: float = 0.0) -> None:
        """Record an existing result, at any size below the target.

        The run is not requested again, and all rounds are computed anew.

        Args:
            model: name of a candidate.
            rows: number of training examples.
            loss: as for `tell`; the mean, if there are several seeds.
            cost: cost of the run, which counts towards the budget.

        Raises:
            DataError: `model` is not a candidate, `rows` is not below the target, `loss` is not
                positive, or the run has a result already.

        Examples:
            >>> import jachess_ext as jx
            >>> search = jx.scaling.Search(["a", "b"], sizes=[100, 200, 400], target=6400)
            >>> search.add("a", 100, loss=0.8)
            >>> search.ask()
            Ask(model='b', rows=100)
        """
        self._add({Ask(model, rows): (loss, cost)})

    def add_table(
        self, source: Source | LossTable, metric: str | None = None, **reading: Any
    ) -> None:
        """Record all results of a table, see `add`; either all are recorded or none.

        Args:
            source: anything that `read_table` reads, or a LossTable; seeds are averaged.
            metric: metric of a source to be read; None for the search's.
            reading: other arguments of `read_table`.

        Raises:
            DataError: the table has another metric, or a result that `add` refuses.
            TableError: `source` cannot be read as a table.

        Examples:
            >>> import pandas as pd
            >>> import jachess_ext as jx
            >>> search = jx.scaling.Search(["a", "b"], sizes=[100, 200, 400], target=6400)
            >>> search.add_table(pd.DataFrame({"100": [0.8, 0.7], "200": [0.6, 0.5]}, ["a", "b"]))
            >>> search.ask()
            Ask(model='a', rows=400)
        """
        if isinstance(source, LossTable):
            table = source
        else:
            metric = metric or self.metric
            table = read_table(source, 1, metric=metric, test_rows=self.test_rows, **reading)
        if plain_name(table.metric or "loss") != plain_name(self.metric or "loss"):
            text = f"the table holds {table.metric or 'losses'}"
            raise DataError(f"{text}, and this search is told {self.metric or 'losses'}")
        losses = {
            Ask(model, size): (float(loss), 0.0)
            for model, row in zip(table.names, table.losses, strict=True)
            for size, loss in zip(table.sizes, row, strict=True)
            if not np.isnan(loss)
        }
        self._add(losses, are_losses=True)

    def _add(self, values: Mapping[Ask, tuple[float, float]], are_losses: bool = False) -> None:
        """Record (value, cost) of each run, all or none.

        Args:
            values: run -> (value of the metric, or loss if `are_losses`; cost).
            are_losses: whether the values have been converted to losses.
        """
        results = {}
        for ask, (value, cost) in values.items():
            if ask.model not in self.models:
                candidates = ", ".join(self.models)
                raise DataError(f"{ask.model!r} is none of the candidates, {candidates}")
            if not 0 <= ask.rows < self.target or ask.rows != int(ask.rows):
                text = f"{ask.model!r} has a result at {ask.rows:g} rows"
                raise DataError(f"{text}; expected a whole number below the target's {self.target}")
            ask = replace(ask, rows=int(ask.rows))
            if ask in self.results:
                raise DataError(f"the result of {ask} is known already")
            loss = value if are_losses else self._to_loss(value)
            if loss is None or not 0 < loss < math.inf:
                raise DataError(f"{ask}: {self._invalid_loss(value)}")
            results[ask] = Result(loss=float(loss), cost=cost, added=True)
        self.results |= results
        self._replay()

    def _invalid_loss(self, value: float | None) -> str:
        """Return the error message for a value that cannot be converted to a loss."""
        return f"the {self.metric or 'loss'} is {value}; expected a positive number"

    def _to_loss(self, value: float | None) -> float | None:
        """Convert a value of the metric to a loss; None if it is not positive and finite.

        Raises:
            DataError: a boolean, a value outside the metric's range, or a perfect score without
                `test_rows`.
        """
        name, loss = self.metric, value
        if isinstance(value, (bool, np.bool_)):
            raise DataError(f"the {name or 'loss'} is {value}; expected a number")
        if name is not None and value is not None and math.isfinite(value):
            worst, is_score = worst_value(name), higher_is_better(name)
            if value < worst or (is_score and value > 1):
                limit_text = " and at most 1, no per cent" if is_score else ""
                raise DataError(f"the {name} is {value:g}; expected {worst:g} or more{limit_text}")
            loss = float(to_loss(name, value, self.test_rows or math.inf))
            if is_score and loss == 0:
                text = f"the {name} is {value:g}, the best there is; give Search test_rows="
                raise DataError(f"{text}, and half an example counts as missing")
        return float(loss) if loss is not None and 0 < loss < math.inf else None

    def state(self) -> dict[str, Any]:
        """Return the settings and results as a dict that is serialisable as JSON."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        settings["history"] = History.read(self.history).state()
        results = [asdict(ask) | asdict(result) for ask, result in self.results.items()]
        return finite({**settings, "results": results})

    @classmethod
    def from_state(cls, state: Any) -> Search:
        """Restore a search from its `state`.

        Raises:
            DataError: `state` is not the state of a search.
        """
        try:
            settings = dict(state)
            results = list(settings.pop("results"))
            search = cls(**settings)
            for saved in results:
                record = dict(saved)
                ask = {f.name: record.pop(f.name) for f in fields(Ask)}
                run, result = from_json(ask, Ask, "a run"), from_json(record, Result, "a result")
                allowed_rows = range(search.target) if result.added else (0, *search.sizes)
                is_valid = (result.loss is None) != (result.error is None)
                if run.model not in search.models or run.rows not in allowed_rows or not is_valid:
                    raise ValueError(f"a result is {saved}")
                search.results[run] = result
            search._replay()
        except DataError:
            raise
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is no state of a search ({error})") from error
        return search

    def best(self) -> str:
        """Return the first model of the ranking of `selection`, which raises the same errors."""
        return self.selection().ranking[0]

    def selection(self, method: str | None = None) -> Selection:
        """Rank the candidates from the results so far.

        Each model is forecast from all its own sizes, even if it was stopped early.

        Args:
            method: name in `METHODS`; None for the search's own.

        Raises:
            ValueError: there is no model with a result that the method uses, or a model has fewer
                sizes than the method needs.
        """
        return self._select(self.results, method or self.method)

    def _select(self, results: Results, name: str) -> Selection:
        """Rank the candidates from some of the results by the method `name`."""
        target = float(self.target)
        curves, dropped_reasons = {}, {}
        for model in self.models:
            if self.strategy == "dropping" and model in self.stops and model not in self.failed:
                dropped_reasons[model] = f"{model} was {self.stops[model]}"
                continue
            curve = _curve(results, model)
            sizes = [size for size in curve if size or METHODS[name].trains == "none"]
            if sizes and model not in self.failed:
                curves[model] = curve
        if not curves:
            raise ValueError(f"no run has been told that {name} could read")
        sizes = sorted({size for curve in curves.values() for size in curve})
        counts = self.parameters or {}
        losses = np.array([[c.get(size, np.nan) for size in sizes] for c in curves.values()])
        table = LossTable(
            names=tuple(curves),
            sizes=np.array(sizes, dtype=np.float64),
            losses=losses,
            parameters=np.array([float(counts.get(model, np.nan)) for model in curves]),
            metric=self.metric,
            noise=sampling_noise(self.metric or "loss", losses, self.test_rows),
        )
        settings = MethodSettings(name, self.gamma, self.tau)
        forecast = forecast_models(table, target, settings, self.classes)
        history = History.read(self.history)
        forecast, note = history.adjust(forecast, table.names, table)
        return Selection(
            method=name,
            budget=float(sizes[-1]),
            target=target,
            table=table,
            forecast=forecast,
            costs=np.array([_method_cost(results, model, name) for model in curves]),
            full_costs=np.array([self._expected_cost(results, m, target) for m in curves]),
            unranked=dropped_reasons,
            classes=self.classes,
            history_note=note,
        )

    def curve(self, model: str) -> dict[int, float]:
        """Return the losses of a model so far, size -> loss, sizes ascending."""
        return _curve(self.results, model)

    # Rounds

    def _replay(self) -> None:
        """Compute all rounds anew from the results."""
        self.stops, self.failed, self.stop = dict(self.unusable), set(self.unusable), None
        self._round_index, self._asked, self._ranked = -1, set(), []
        self._next_round()
        self._advance()

    def _advance(self) -> None:
        """End all rounds whose results are complete."""
        while self.stop is None and not self.open_runs():
            self._end_round()

    # All decisions depend on the results alone, so that a search continues from its saved state,
    # and the runs of a round may end in any order: models are dropped once all results of a round
    # are known, by the results of the rounds so far and those that were added (`_seen`).

    @property
    def _seen(self) -> Results:
        """The results of the rounds so far, and the results recorded by `add`."""
        return {a: r for a, r in self.results.items() if r.added or a in self._asked}

    def _active(self) -> list[str]:
        """Return the models that have not been stopped."""
        return [model for model in self.models if model not in self.stops]

    def _next_round(self) -> None:
        """Begin the next round, without models that exceed the budget, or end the search."""
        self._round_index += 1
        self._round = []
        if self._round_index == len(self.rounds):
            self.stop = "every planned size was run"
        elif not self._active():
            self.stop = "every model was stopped"
        elif self._ranked and len(self._active()) == 1:
            self.stop = f"{self._active()[0]} alone is left"
        else:
            size = self.rounds[self._round_index]
            added = {ask.model for ask, r in self.results.items() if r.added and ask.rows == size}
            asks = [Ask(model, size) for model in self._active() if model not in added]
            unaffordable = []
            droppable = [ask for model in self._ranked[2:] if (ask := Ask(model, size)) in asks]
            while not (can_pay := self._can_pay(asks)) and droppable:
                unaffordable.append(droppable.pop())
                asks.remove(unaffordable[-1])
            if not can_pay:
                self.stop = f"the budget {self.budget:g} does not pay for the next size, {size}"
                return
            reason = f"dropped before {size} rows, which the budget does not pay"
            self.stops |= {ask.model: reason for ask in unaffordable}
            self._round = asks
            self._asked.update(asks)

    def _end_round(self) -> None:
        """Stop failed and dropped models after a round, and begin the next round."""
        size = self.rounds[self._round_index]
        for ask in self._round:
            if error := self.results[ask].error:
                self.failed.add(ask.model)
                self.stops.setdefault(ask.model, f"failed at {size} rows: {error}")
        if size and self.strategy == "dropping":
            self._drop(size)
        if self.strategy == ACCEPT_THEN_STOP:
            self._stop_by_deviation(size)
        self._next_round()

    def _can_pay(self, asks: Sequence[Ask]) -> bool:
        """Return whether the budget covers the costs so far and the expected costs of the runs."""
        training_runs = [ask for ask in asks if ask.rows]
        if self.budget is None or not training_runs:
            return True
        seen, earlier_sizes = self._seen, self.rounds[: self._round_index]
        costs = sum(r.cost for a, r in self.results.items() if a in seen or a.rows in earlier_sizes)
        costs += sum(self._expected_cost(seen, ask.model, ask.rows) for ask in training_runs)
        return costs <= self.budget

    def _expected_cost(self, results: Results, model: str, rows: float) -> float:
        """Return the expected cost of a run of a model on `rows` examples; 0 if unknown."""
        if self.costs is not None:
            per_run, per_row = self.costs[model]
            return per_run + per_row * rows
        runs = [(a, r) for a, r in results.items() if a.model == model and a.rows and r.cost]
        return runs[-1][1].cost / runs[-1][0].rows * rows if runs else 0.0

    def _drop(self, size: int) -> None:
        """Drop the models that are not worth a further run."""
        try:
            selection = self._select(self._seen, self.method)
        except ValueError:
            return  # too few sizes yet
        self._ranked = selection.ranking
        count = max(len(selection.survivors), (len(self._ranked) + 1) // 2)
        for rank, name in enumerate(self._ranked[count:], count + 1):
            self.stops[name] = f"dropped at {size} rows as number {rank} of {len(self._ranked)}"

    def _stop_by_deviation(self, smallest: int) -> None:
        """Stop the models whose last loss deviates from the line of their larger sizes.

        Args:
            smallest: size of the round; results that `add` recorded at smaller sizes do not count.
        """
        for model in self._active():
            curve = _curve(self._seen, model)
            sizes = [size for size in curve if size >= smallest]
            if len(sizes) <= self.gamma:
                continue
            losses = np.array([[curve[size] for size in sizes]])
            line = accept_then_stop(np.log(sizes), np.log(losses), self.gamma, self.tau)
            if line.is_stopped[0]:
                self.stops[model] = (
                    f"the loss at {smallest} rows deviates from the line of the {line.count[0]} "
                    f"larger sizes by more than {self.tau:g} standard deviations"
                )

    # Settings

    def _check(self) -> None:
        """Raise ValueError for a setting that cannot be used."""
        models = list(self.models)
        if repeated := [model for model in models if models.count(model) > 1]:
            raise DataError(f"the model {repeated[0]!r} is given twice; expected each model once")
        if len(models) < 2:
            raise DataError(f"{len(models)} model to choose from; expected two or more")
        for name, choices in {"method": list(METHODS), "strategy": list(STRATEGIES)}.items():
            if (value := getattr(self, name)) not in choices:
                raise DataError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
        if self.strategy == ACCEPT_THEN_STOP and self.method != "ats":
            raise DataError(f"{ACCEPT_THEN_STOP} chooses by the method 'ats', not {self.method!r}")
        if self.metric is not None:
            higher_is_better(self.metric)  # raises for an unknown metric
        for name, least in (("test_rows", 1), ("classes", 2), ("gamma", 3)):
            count = getattr(self, name)
            if count is not None and count < least:
                raise DataError(f"{name} is {count}; expected {least} or more")
        for name in ("tau", "budget"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise DataError(f"{name} is {value}; expected a positive number")
        if not self.sizes or min(self.sizes) < 1:
            raise DataError(f"sizes is {list(self.sizes)}; expected numbers of rows from 1 up")
        check_sizes(np.array(self.sizes, dtype=np.float64))
        if self.sizes[-1] >= self.target:
            message = f"the largest subset, {self.sizes[-1]} rows, is not below the target"
            raise DataError(f"{message} {self.target}: nothing would be left to predict")
        needed = METHODS[self.method].fewest_sizes(has_zero=0 in self.rounds)
        if len(self.sizes) < needed:
            count = f"{self.method} needs {needed} sizes or more, and there are {len(self.sizes)}"
            raise DataError(f"{count} ({', '.join(map(str, self.sizes))})")


def _curve(results: Results, model: str) -> dict[int, float]:
    """Return the losses of a model, size -> loss, sizes ascending."""
    losses = {a.rows: r.loss for a, r in results.items() if a.model == model and r.loss is not None}
    return dict(sorted(losses.items()))


def _method_cost(results: Results, model: str, method: str) -> float:
    """Return the total cost of the runs of a model that a method (by name) uses.

    The loss before fine-tuning counts if the method uses it; ats counts every size.
    """
    trains = METHODS[method].trains
    costs = {ask.rows: result.cost for ask, result in results.items() if ask.model == model}
    largest = max(costs, default=0)

    def is_used(size: int) -> bool:
        if not size:
            return METHODS[method].reads_zero
        return trains in ("all", "walk") or (trains == "last" and size == largest)

    return sum(cost for size, cost in costs.items() if is_used(size))
