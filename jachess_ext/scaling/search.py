"""`Search`: the next run that a choice of a model needs, by ask and tell, for any trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from .._io import DataError, finite, from_json
from .history import History, Tables
from .loss_table import LossTable, check_sizes
from .methods import DEFAULT, METHODS, MethodSettings, forecast_models
from .metrics import higher_is_better, plain_name, sampling_noise, to_loss, worst_value
from .selection import Selection
from .sheets import Source
from .tables import read_table

STRATEGIES = ("growing", "dropping")


@dataclass(frozen=True)
class Ask:
    """A run to do: fine-tune `model` on the first `rows` training rows and measure its loss.

    Attributes:
        model: a candidate.
        rows: training examples; 0 is the model before fine-tuning.

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
        loss: the metric as a loss, see `metrics.to_loss`; None: the run failed, with `error`.
        added: whether it came from `Search.add`.
    """

    loss: float | None = None
    cost: float = 0.0
    error: str | None = None
    added: bool = False


Results = dict[Ask, Result]


@dataclass
class Search:
    """A search for the best candidate: which runs it needs next, and the ranking so far.

    Results one already has are added (`add`, `add_table`) and not asked for again.  The state is
    the settings and the results (`state`, `from_state`): the rounds follow from them, and the order
    in which the runs of a round are told does not matter.

    Attributes:
        models: the candidates, two or more.
        sizes: subsets, increasing.
        target: training examples to predict for, above the sizes.
        metric: of the results, such as "accuracy" or "loss"; None: losses.  Of a score whose best
            is 1 the methods extrapolate 1 − score, and `selection` shows scores.
        test_rows: examples the metric is measured on: a perfect score counts as half an error, and
            an accuracy or error rate has binomial noise.
        classes: number of classes, C: no subset tells when a curve leaves the loss of guessing,
            ln C, and intervals widen by that; None: no such start.
        method: of the ranking, its probabilities and the stops; a name of `METHODS`.
        strategy: "growing": every model on the smallest subset, then every model on the next;
            "dropping": the same, but only with the models that are worth a further run
            (`Selection.survivors`), and of these the first that the budget pays for; a dropped
            model is not ranked.
        budget: limit of the sum of all costs, in their unit: a round that is expected to exceed it
            is not begun, by "dropping" not with fewer than two models.
        costs: model -> expected cost (of any run, of a row more); None: in proportion to the rows
            of the model's last run.
        unit: of all costs ("FLOPs", "s", "€"), as `Selection` shows it.
        parameters: model -> N, for the method modelsize.
        gamma, tau: of the method ats (Algorithm 1): points accepted unseen, deviations that stop.
        unusable: candidate -> why no run of it is asked for, and it is not ranked.
        history: earlier tables of some of the candidates, as `select` takes them.
        results: run -> its result, in the order of `tell` and `add`.
        stops: model -> why no further size is run of it.
        failed: models whose runs failed, and those that are unusable; they are not ranked.
        stop: why the search ended, a sentence; None while it goes on.

    Raises:
        ValueError: a setting that cannot be used, or a metric whose name does not tell which
            direction is better.

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
    unit: str = ""
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
        self.history = History.read(self.history, self.metric)
        self._replay()

    def set_candidates(
        self,
        *,
        test_rows: int,
        costs: Mapping[str, Sequence[float]],
        parameters: Mapping[str, int],
        unusable: Mapping[str, str],
    ) -> None:
        """Set the attributes that are known once the candidates are loaded."""
        self.test_rows, self.costs = test_rows, costs
        self.parameters, self.unusable = parameters, unusable
        self._replay()

    @property
    def rounds(self) -> tuple[int, ...]:
        """Sizes in the order they are run; first 0, before fine-tuning, if the method reads it."""
        method = METHODS[self.method]
        if method.trains == "none":
            return (0,)
        # Of sizes that double each costs about as much as all below it, so that going up and ending
        # early saves most.
        return (0, *self.sizes) if method.reads_zero else tuple(self.sizes)

    def ask(self) -> Ask | None:
        """Return the next run; the same until it is told.  None: the search has ended."""
        return next(iter(self.open_runs()), None)

    def open_runs(self) -> list[Ask]:
        """Return all runs that may be done at the same time; none: the search has ended."""
        return [ask for ask in self._round if ask not in self.results]

    def tell(
        self, ask: Ask, loss: float | None = None, *, cost: float = 0.0, error: str | None = None
    ) -> None:
        """Record the result of a run.

        Args:
            ask: a run that is open.
            loss: positive, lower is better, such as a mean negative log-likelihood or an error; the
                metric's value where the search has a `metric`.
            cost: of training and judging, in any unit (FLOPs, GPU seconds, money).
            error: why the run has no loss; its model is given up.

        Raises:
            DataError: the run is not open, or a score is out of the metric's range.
        """
        if ask not in self.open_runs():
            raise DataError(f"{ask} is not an open run; tell results of what `ask` returned")
        number = self._to_loss(loss) if error is None else None
        if error is None and number is None:
            error = self._invalid_loss(loss)
        self.results[ask] = Result(loss=number, cost=cost, error=error)
        self._advance()

    def add(self, model: str, rows: int, loss: float, *, cost: float = 0.0) -> None:
        """Record a result that one already has, of any size below the target.

        This model and size are not asked for again, and all rounds are decided again.

        Args:
            model: a candidate.
            rows: training examples.
            loss: as for `tell`; of several seeds their mean.
            cost: of the run; counted as that of any other.

        Raises:
            DataError: no such candidate, a size that is not below the target, a loss that is not
                positive, or a run whose result is known.

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
        """Record the results of a table, see `add`.

        Args:
            source: what `read_table` reads, or a LossTable of `read_runs`; the mean counts of
                several seeds.
            metric: of what is to be read; None: the search's.
            reading: other arguments of `read_table`.

        Raises:
            DataError: as `add`, and a table of another metric; nothing was added.
            TableError: it cannot be read.

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
        theirs, ours = (name or "losses" for name in (table.metric, self.metric))
        if plain_name(table.metric or "loss") != plain_name(self.metric or "loss"):
            raise DataError(f"the table holds {theirs}, and this search is told {ours}")
        losses = {
            Ask(model, size): (float(loss), 0.0)
            for model, row in zip(table.names, table.losses, strict=True)
            for size, loss in zip(table.sizes, row, strict=True)
            if not np.isnan(loss)
        }
        self._add(losses, are_losses=True)

    def _add(self, values: Mapping[Ask, tuple[float, float]], are_losses: bool = False) -> None:
        """Record values of the metric (or losses) and costs, all or none."""
        results = {}
        for ask, (value, cost) in values.items():
            if ask.model not in self.models:
                names = ", ".join(self.models)
                raise DataError(f"{ask.model!r} is none of the candidates, {names}")
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
        return f"the {self.metric or 'loss'} is {value}; expected a positive number"

    def _to_loss(self, value: float | None) -> float | None:
        """Return a value of the metric as a loss; None where it has no logarithm."""
        name, loss = self.metric, value
        if isinstance(value, (bool, np.bool_)):
            raise DataError(f"the {name or 'loss'} is {value}; expected a number")
        if name is not None and value is not None and math.isfinite(value):
            worst, score = worst_value(name), higher_is_better(name)
            if value < worst or (score and value > 1):
                most = " and at most 1, no per cent" if score else ""
                raise DataError(f"the {name} is {value:g}; expected {worst:g} or more{most}")
            loss = float(to_loss(name, value, self.test_rows or math.inf))
            if score and loss == 0:
                text = f"the {name} is {value:g}, the best there is; give Search test_rows="
                raise DataError(f"{text}, and half an example counts as missing")
        return float(loss) if loss is not None and 0 < loss < math.inf else None

    def state(self) -> dict[str, Any]:
        """Return settings and results as JSON values."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        settings["history"] = History.read(self.history).state()
        results = [asdict(ask) | asdict(result) for ask, result in self.results.items()]
        return finite({**settings, "results": results})

    @classmethod
    def from_state(cls, state: Any) -> Search:
        """Return the search that had this `state`.

        Raises:
            DataError: it is no such state.
        """
        try:
            settings = dict(state)
            results = list(settings.pop("results"))
            search = cls(**settings)
            for saved in results:
                content = dict(saved)
                ask = {f.name: content.pop(f.name) for f in fields(Ask)}
                run, result = from_json(ask, Ask, "a run"), from_json(content, Result, "a result")
                possible = range(search.target) if result.added else (0, *search.sizes)
                usable = (result.loss is None) != (result.error is None)
                if run.model not in search.models or run.rows not in possible or not usable:
                    raise ValueError(f"a result is {saved}")
                search.results[run] = result
            search._replay()
        except DataError:
            raise
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is no state of a search ({error})") from error
        return search

    def best(self) -> str:
        """Return the model to fine-tune; errors are those of `selection`."""
        return self.selection().ranking[0]

    def selection(self, method: str | None = None) -> Selection:
        """Rank the candidates by a method, from the results so far.

        A model's prediction comes from all its own sizes, also where it was stopped early.

        Args:
            method: None: the search's.

        Raises:
            ValueError: no model, or a model with fewer sizes than the method needs.
        """
        return self._selected(self.results, method or self.method)

    def _selected(self, results: Results, name: str) -> Selection:
        target = float(self.target)
        curves, dropped = {}, {}
        for model in self.models:
            if self.strategy == "dropping" and model in self.stops and model not in self.failed:
                dropped[model] = f"{model} was {self.stops[model]}"
                continue
            curve = _curve(results, model)
            sizes = [size for size in curve if size or METHODS[name].trains == "none"]
            if sizes and model not in self.failed:
                curves[model] = curve
        if not curves:
            raise ValueError(f"no run has been told that {name} could read")
        sizes = sorted({size for curve in curves.values() for size in curve})
        n = self.parameters or {}
        losses = np.array([[c.get(size, np.nan) for size in sizes] for c in curves.values()])
        table = LossTable(
            names=tuple(curves),
            sizes=np.array(sizes, dtype=np.float64),
            losses=losses,
            parameters=np.array([float(n.get(model, np.nan)) for model in curves]),
            metric=self.metric,
            noise=sampling_noise(self.metric or "loss", losses, self.test_rows),
        )
        settings = MethodSettings(name, self.gamma, self.tau)
        forecast = forecast_models(table, target, settings, self.classes)
        history = History.read(self.history)
        forecast, note = history.adjust(forecast, table, table, target, settings)
        return Selection(
            method=name,
            budget=float(sizes[-1]),
            target=target,
            table=table,
            forecast=forecast,
            costs=np.array([_method_cost(results, model, name) for model in curves]),
            full_costs=np.array([self._expected_cost(results, m, target) for m in curves]),
            unranked=dropped,
            unit=self.unit,
            classes=self.classes,
            history_note=note,
        )

    def curve(self, model: str) -> dict[int, float]:
        """Return a model's size -> loss, sizes ascending."""
        return _curve(self.results, model)

    # Rounds

    def _replay(self) -> None:
        """Decide all rounds again from the results."""
        self.stops, self.failed, self.stop = dict(self.unusable), set(self.unusable), None
        self._round_index, self._asked, self._ranked = -1, set(), []
        self._next_round()
        self._advance()

    def _advance(self) -> None:
        while self.stop is None and not self.open_runs():
            self._end_round()

    # Everything is decided from the results, so that a search goes on from its saved state, and the
    # runs of a round may end in any order: a round is decided once all its results are known, by
    # those of the rounds up to it (`_seen`) and never by later ones that were added.

    @property
    def _seen(self) -> Results:
        """The results that the rounds so far asked for, and those added."""
        return {a: r for a, r in self.results.items() if r.added or a in self._asked}

    def _active(self) -> list[str]:
        return [model for model in self.models if model not in self.stops]

    def _next_round(self) -> None:
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
            unpaid = []
            last = [ask for model in self._ranked[2:] if (ask := Ask(model, size)) in asks]
            while not (paid := self._can_pay(asks)) and last:
                unpaid.append(last.pop())
                asks.remove(unpaid[-1])
            if not paid:
                self.stop = f"the budget {self.budget:g} does not pay for the next size, {size}"
                return
            reason = f"dropped before {size} rows, which the budget does not pay"
            self.stops |= {ask.model: reason for ask in unpaid}
            self._round = asks
            self._asked.update(asks)

    def _end_round(self) -> None:
        """Stop models after a finished round, and begin the next round."""
        size = self.rounds[self._round_index]
        for ask in self._round:
            if error := self.results[ask].error:
                self.failed.add(ask.model)
                self.stops.setdefault(ask.model, f"failed at {size} rows: {error}")
        if size and self.strategy == "dropping":
            self._drop(size)
        self._next_round()

    def _can_pay(self, asks: Sequence[Ask]) -> bool:
        """Return whether the budget pays for these runs at their expected costs."""
        trained = [ask for ask in asks if ask.rows]
        if self.budget is None or not trained:
            return True
        seen, before = self._seen, self.rounds[: self._round_index]
        costs = sum(r.cost for a, r in self.results.items() if a in seen or a.rows in before)
        costs += sum(self._expected_cost(seen, ask.model, ask.rows) for ask in trained)
        return costs <= self.budget

    def _expected_cost(self, results: Results, model: str, rows: float) -> float:
        """Return the expected cost of a run, 0 where it is unknown."""
        if self.costs is not None:
            once, a_row = self.costs[model]
            return once + a_row * rows
        runs = [(a, r) for a, r in results.items() if a.model == model and a.rows and r.cost]
        return runs[-1][1].cost / runs[-1][0].rows * rows if runs else 0.0

    def _drop(self, size: int) -> None:
        """Drop the models that are not worth a further run."""
        try:
            selection = self._selected(self._seen, self.method)
        except ValueError:
            return  # too few sizes yet
        self._ranked, count = selection.ranking, len(selection.survivors)
        for rank, name in enumerate(self._ranked[count:], count + 1):
            self.stops[name] = f"dropped at {size} rows as number {rank} of {len(self._ranked)}"

    # Settings

    def _check(self) -> None:
        models = list(self.models)
        if twice := [model for model in models if models.count(model) > 1]:
            raise DataError(f"the model {twice[0]!r} is given twice; expected each model once")
        if len(models) < 2:
            raise DataError(f"{len(models)} model to choose from; expected two or more")
        for name, choices in {"method": list(METHODS), "strategy": list(STRATEGIES)}.items():
            if (value := getattr(self, name)) not in choices:
                raise DataError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
        if self.metric is not None:
            higher_is_better(self.metric)  # raises where its name does not tell
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
            largest = f"the largest subset, {self.sizes[-1]} rows, is not below the target"
            raise DataError(f"{largest} {self.target}: nothing would be left to predict")
        needed = METHODS[self.method].fewest_sizes(zero=0 in self.rounds)
        if len(self.sizes) < needed:
            count = f"{self.method} needs {needed} sizes or more, and there are {len(self.sizes)}"
            raise DataError(f"{count} ({', '.join(map(str, self.sizes))})")


def _curve(results: Results, model: str) -> dict[int, float]:
    """Return a model's size -> loss, sizes ascending."""
    losses = {a.rows: r.loss for a, r in results.items() if a.model == model and r.loss is not None}
    return dict(sorted(losses.items()))


def _method_cost(results: Results, model: str, method: str) -> float:
    """Return the cost of a model's runs that a method reads.

    Losses before fine-tuning are charged to the methods that read them; ats is taken to visit every
    size.
    """
    reads = METHODS[method]
    costs = {ask.rows: result.cost for ask, result in results.items() if ask.model == model}
    largest = max(costs, default=0)

    def is_read(size: int) -> bool:
        if not size:
            return reads.reads_zero
        return reads.trains in ("all", "walk") or (reads.trains == "last" and size == largest)

    return sum(cost for size, cost in costs.items() if is_read(size))
