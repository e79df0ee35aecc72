"""`Search`: the next run that a choice of a model needs, by ask and tell, for any trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from .._io import DataError, finite, from_json
from .baselines import FEATURE_SCORES, accept_then_stop
from .runs import LossTable, check_sizes
from .selection import DEFAULT, METHODS, Known, Selection, forecast_each

STRATEGIES = ("growing", "algorithm1")
_DECIDED = 0.9  # probability of being the best that leaves nothing open
_RIVAL = 0.1  # and the least that leaves a model in question


@dataclass(frozen=True)
class Ask:
    """A run to do: fine-tune `model` on the first `rows` training rows and measure its loss.

    Attributes:
        model: a candidate.
        rows: training examples; 0 is the model before fine-tuning.
        seed: of the run.

    Example:
        >>> import jachess_ext as jx
        >>> jx.scaling.Ask("bert-base-uncased", rows=400)
        Ask(model='bert-base-uncased', rows=400, seed=0)
    """

    model: str
    rows: int
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """The result of a run, see `Search.tell`."""

    loss: float | None = None
    cost: float = 0.0
    features: Mapping[str, float] = field(default_factory=dict)
    features_cost: float = 0.0
    kernel_cost: float = 0.0
    error: str | None = None


@dataclass
class Search:
    """Which runs a choice needs next, and what those told say of the candidates.

    The state is the settings and the results told (`state`, `from_state`); the order in which the
    runs of a round are told does not matter.

    Attributes:
        models: the candidates, two or more.
        sizes: subsets, increasing.
        target: training examples to predict for, above the sizes.
        method: of the ranking, its probabilities and the stops; a name of `METHODS`.
        strategy: "growing": every model on the smallest subset, then every model on the next;
            "algorithm1" (LensLLM): from the largest down, each model until a loss leaves the line
            of its larger sizes (`gamma`, `tau`).
        zero: whether models are measured before fine-tuning; None: where something reads it.
        seeds: runs of a model and size, at most.  Another is asked for while the ranking is open:
            of models that are best with 0.1 or more, none with 0.9.  Means count.
        seed: of the first run of a model and size; further ones count on from it.
        confidence: end when a model is the best with this probability.
        drop: ask no more for a model whose probability of being the best is below this.
        screen: share of the models that is fine-tuned at all, the best by `screen_by`, two at
            least; None: all.
        screen_by: a score of frozen features, told at size 0.
        budget: limit of all costs together, in the unit they are told in: a round that is expected
            to exceed it is not begun.
        costs: model -> expected cost (of any run, of a row more); None: in proportion to the rows
            of the model's last run.
        parameters: model -> N, for the method modelsize.
        gamma, tau: Algorithm 1's points accepted unseen, and deviations that stop it.
        results: run -> what it gave, in the order told.
        kernels: run -> theta, residual, t and lr, for the method lensllm (without, its F is free);
            no part of the state.
        stops: model -> why no further size is run of it.
        failed: models whose runs failed; they are not ranked.
        stop: why the search ended, a sentence; None while it goes on.

    Raises:
        DataError: a setting that cannot be used.

    Example:
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
    method: str = DEFAULT
    strategy: str = "growing"
    zero: bool | None = None
    seeds: int = 1
    seed: int = 0
    confidence: float | None = None
    drop: float | None = None
    screen: float | None = None
    screen_by: str = "logme"
    budget: float | None = None
    costs: Mapping[str, Sequence[float]] | None = None
    parameters: Mapping[str, int] | None = None
    gamma: int = 3
    tau: float = 5.0
    results: dict[Ask, Result] = field(default_factory=dict, init=False)
    kernels: dict[Ask, Mapping[str, Any]] = field(default_factory=dict, init=False, compare=False)
    stops: dict[str, str] = field(default_factory=dict, init=False)
    failed: set[str] = field(default_factory=set, init=False)
    stop: str | None = field(default=None, init=False)
    _place: int = field(default=-1, init=False)
    _round: list[Ask] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.models, self.sizes = tuple(map(str, self.models)), tuple(map(int, self.sizes))
        if self.costs is not None:
            self.costs = {m: (float(once), float(row)) for m, (once, row) in self.costs.items()}
        self._check()
        self._next_round()

    @property
    def rounds(self) -> tuple[int, ...]:
        """Sizes in the order they are run; first 0, the model before fine-tuning, if needed."""
        method = METHODS[self.method]
        reads = method.reads_zero or method.trains == "none" or self.screen is not None
        first = (0,) if (reads if self.zero is None else self.zero) else ()
        if method.trains == "none":
            return first
        down = self.strategy == "algorithm1"
        return (*first, *(reversed(self.sizes) if down else self.sizes))

    def ask(self) -> Ask | None:
        """Return the next run; the same until it is told.  None: the search has ended."""
        return next(iter(self.open_runs()), None)

    def open_runs(self) -> list[Ask]:
        """Return all runs that may be done at the same time; none: the search has ended."""
        return [ask for ask in self._round if ask not in self.results]

    def tell(
        self,
        ask: Ask,
        loss: float | None = None,
        *,
        cost: float = 0.0,
        features: Mapping[str, float] | None = None,
        features_cost: float = 0.0,
        kernel_cost: float = 0.0,
        error: str | None = None,
    ) -> None:
        """Take the result of a run.

        Args:
            ask: a run that is open.
            loss: positive, lower is better, such as a mean negative log-likelihood or an error.
            cost: of training and judging, in any unit (FLOPs, GPU seconds, money).
            features: scores of the model's frozen features by name, at size 0.
            features_cost, kernel_cost: of measuring these, and the run's kernel.
            error: why the run has no loss; its model is given up.

        Raises:
            DataError: the run is not open.
        """
        if ask not in self.open_runs():
            raise DataError(f"{ask} is not an open run; tell results of what `ask` returned")
        if error is None and not (loss is not None and 0 < loss < math.inf):
            error = f"the loss is {loss}; expected a positive number"
        self.results[ask] = Result(
            loss=None if error or loss is None else float(loss),
            cost=cost,
            features=dict(features or {}),
            features_cost=features_cost,
            kernel_cost=kernel_cost,
            error=error,
        )
        while self.stop is None and not self.open_runs():
            self._end_round()

    def state(self) -> dict[str, Any]:
        """Return settings and results as JSON values."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
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
            for told in results:
                given = dict(told)
                ask = {f.name: given.pop(f.name) for f in fields(Ask)}
                result = from_json(given, Result, "a result")
                search.tell(from_json(ask, Ask, "a run"), **vars(result))
        except DataError:
            raise
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is no state of a search ({error})") from error
        return search

    def best(self) -> str:
        """Return the model to fine-tune; errors are those of `selection`."""
        return self.selection().ranking[0]

    def selection(
        self, method: str | None = None, *, target: float | None = None, rows: float = math.inf
    ) -> Selection:
        """Rank the candidates by a method, from the runs told.

        A model's prediction comes from all its own sizes, also where it was stopped early.

        Args:
            method: None: the search's.
            target: training examples to predict for; None: the search's.
            rows: only runs of so many rows or fewer are read.

        Raises:
            ValueError: no model, or a model with fewer sizes than the method needs.
        """
        name = method or self.method
        curves = {}
        for model in self.models:
            curve = self.curve(model, rows)
            read = curve if METHODS[name].trains == "none" else [size for size in curve if size]
            if read and model not in self.failed:
                curves[model] = curve
        if not curves:
            raise ValueError(f"no run has been told that {name} could read")
        sizes = sorted({size for curve in curves.values() for size in curve})
        n = self.parameters or {}
        table = LossTable(
            names=tuple(curves),
            sizes=np.array(sizes, dtype=np.float64),
            losses=np.array([[c.get(size, np.nan) for size in sizes] for c in curves.values()]),
            parameters=np.array([float(n.get(model, np.nan)) for model in curves]),
        )
        known = Known(
            gamma=self.gamma,
            tau=self.tau,
            features={ask.model: r.features for ask, r in self.results.items() if r.features},
            kernels={
                model: kernel
                for model in curves
                if (kernel := self.measured_kernel(model, rows)) is not None
            },
        )
        at = float(target or self.target)
        return Selection(
            method=name,
            budget=float(sizes[-1]),
            target=at,
            table=table,
            forecast=forecast_each(table, at, name, known),
            costs=np.array([self.paid(model, name, rows) for model in curves]),
            full_costs=np.array([self._expected(model, at) for model in curves]),
        )

    def curve(self, model: str, rows: float = math.inf) -> dict[int, float]:
        """Return a model's size -> mean loss over the seeds, sizes ascending, up to `rows`."""
        told: dict[int, list[float]] = {}
        for ask, result in self.results.items():
            if ask.model == model and ask.rows <= rows and result.loss is not None:
                told.setdefault(ask.rows, []).append(result.loss)
        return {size: float(np.mean(told[size])) for size in sorted(told)}

    def measured_kernel(self, model: str, rows: float = math.inf) -> dict[str, Any] | None:
        """Return theta, residual, t and lr of a model's curve, as `fit` takes them.

        Times are in steps at the learning rate of the largest size.  None: a size has no kernel.
        """
        each = [self.kernels.get(Ask(model, size, self.seed)) for size in self.curve(model, rows)]
        whole = [kernel for kernel in each if kernel is not None]
        if not whole or len(whole) < len(each):
            return None
        last = whole[-1]["lr"]
        return {
            "theta": [kernel["theta"] for kernel in whole],
            "residual": [kernel["residual"] for kernel in whole],
            "t": [kernel["t"] * kernel["lr"] / last for kernel in whole],
            "lr": last,
        }

    def paid(self, model: str, method: str, rows: float = math.inf) -> float:
        """Return what choosing by a method costs of a model's runs: of those it reads.

        Losses before fine-tuning are charged to the methods that read them, kernels to lensllm
        alone; ats is taken to visit every size.
        """
        reads = METHODS[method]
        told = [(a, r) for a, r in self.results.items() if a.model == model and a.rows <= rows]
        if reads.needs == "features":
            return sum(result.features_cost for _, result in told)
        largest = max((ask.rows for ask, _ in told), default=0)
        spent = 0.0
        for ask, result in told:
            trained = reads.trains in ("all", "walk") or (
                reads.trains == "last" and ask.rows == largest
            )
            if trained if ask.rows else reads.reads_zero:
                spent += result.cost + (result.kernel_cost if method == "lensllm" else 0.0)
        return spent

    # Rounds

    def _active(self) -> list[str]:
        return [model for model in self.models if model not in self.stops]

    def _next_round(self) -> None:
        self._place += 1
        self._round = []
        if self._place == len(self.rounds):
            self.stop = "every planned size was run"
        elif not self._active():
            self.stop = "every model was stopped"
        else:
            size = self.rounds[self._place]
            asks = [Ask(model, size, self.seed) for model in self._active()]
            if self._above_budget(asks):
                self.stop = f"the budget {self.budget:g} does not pay for the next size, {size}"
            else:
                self._round = asks

    def _end_round(self) -> None:
        """Stop models after a finished round, and begin the next round."""
        size = self.rounds[self._place]
        for ask in self._round:
            if error := self.results[ask].error:
                self.failed.add(ask.model)
                self.stops.setdefault(ask.model, f"failed at {size} rows: {error}")
        if size == 0:
            self._screen_out()
        elif more := self._more_seeds(size):
            self._round += more
            return
        elif self.strategy == "algorithm1":
            self._stop_off_line()
        if size and (self.confidence is not None or self.drop is not None):
            self.stop = self._decide()
        if self.stop is None:
            self._next_round()
        else:
            self._round = []

    def _chances(self) -> dict[str, float]:
        """Return each model's probability of being the best; empty as long as there is none."""
        try:
            selection = self.selection()
        except ValueError:
            return {}  # too few sizes yet
        if not selection.has_intervals:
            return {}
        return dict(zip(selection.names, selection.best_probabilities.tolist(), strict=True))

    def _more_seeds(self, size: int) -> list[Ask]:
        """Return runs of another seed for the models among which the ranking is open."""
        seed = 1 + max(ask.seed for ask in self._round)
        chances = self._chances() if seed < self.seed + self.seeds else {}
        if not chances or max(chances.values()) >= _DECIDED:
            return []
        rivals = [model for model in self._active() if chances.get(model, 0.0) >= _RIVAL]
        asks = [Ask(model, size, seed) for model in rivals]
        return [] if self._above_budget(asks) else asks

    def _above_budget(self, asks: Sequence[Ask]) -> bool:
        """Whether these runs are expected to take more than is left."""
        if self.budget is None or not any(ask.rows for ask in asks):
            return False
        spent = sum(r.cost + r.features_cost + r.kernel_cost for r in self.results.values())
        kernels = {ask.model: r.kernel_cost for ask, r in self.results.items()}
        expected = (
            self._expected(ask.model, ask.rows) + kernels.get(ask.model, 0.0) for ask in asks
        )
        return spent + sum(expected) > self.budget

    def _expected(self, model: str, rows: float) -> float:
        """Return the expected cost of a run, 0 where nothing tells it; without a kernel's."""
        if self.costs is not None:
            once, a_row = self.costs[model]
            return once + a_row * rows
        told = [(a, r) for a, r in self.results.items() if a.model == model and a.rows]
        return told[-1][1].cost / told[-1][0].rows * rows if told else 0.0

    def _screen_out(self) -> None:
        """Keep the models whose frozen features score best."""
        if self.screen is None:
            return
        ranking = self.selection(self.screen_by).ranking
        kept = max(2, math.ceil(self.screen * len(ranking) - 1e-9))
        for rank, model in enumerate(ranking[kept:], start=kept + 1):
            self.stops[model] = (
                f"screened out: {rank} of {len(ranking)} by {self.screen_by}, untrained"
            )

    def _stop_off_line(self) -> None:
        """Stop a model at the first loss that leaves the line of the larger sizes (Algorithm 1)."""
        for model in self._active():
            curve = {size: loss for size, loss in self.curve(model).items() if size}
            if len(curve) <= self.gamma:
                continue
            x, y = np.log(list(curve)), np.log([list(curve.values())])
            if accept_then_stop(x, y, self.gamma, self.tau).stopped[0]:
                self.stops[model] = (
                    f"the loss at {min(curve)} rows left the line of the {len(curve) - 1} larger "
                    f"sizes by more than {self.tau:g} deviations"
                )

    def _decide(self) -> str | None:
        """Return why the search ends here, if it does; drop models that are clearly out."""
        chances = self._chances()
        if not chances:
            return None
        best = max(chances, key=lambda model: chances[model])
        if self.confidence is not None and chances[best] >= self.confidence:
            return (
                f"decided: {best} is the best with probability {chances[best]:.3f}, and "
                f"{self.confidence:g} was asked for"
            )
        for model, chance in chances.items():
            if self.drop is not None and model != best and chance < self.drop:
                self.stops.setdefault(
                    model,
                    f"dropped: the best with probability {chance:.2g} only, below {self.drop:g}",
                )
        left = self._active()
        return f"all but {left[0]} were dropped" if len(left) == 1 and self.drop else None

    # Settings

    def _check(self) -> None:
        models = list(self.models)
        twice = [model for place, model in enumerate(models) if model in models[:place]]
        if twice:
            raise DataError(f"the model {twice[0]!r} is given twice; expected each model once")
        if len(models) < 2:
            raise DataError(f"{len(models)} model to choose from; expected two or more")
        for name, value, choices in (
            ("method", self.method, METHODS),
            ("strategy", self.strategy, STRATEGIES),
            ("screen_by", self.screen_by, FEATURE_SCORES),
        ):
            if value not in choices:
                raise DataError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
        for name in ("confidence", "drop", "screen"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                wanted = "share" if name == "screen" else "probability"
                raise DataError(f"{name} is {value}; expected a {wanted} between 0 and 1")
        decides = next((n for n in ("confidence", "drop") if getattr(self, n) is not None), None)
        if decides and not METHODS[self.method].forecasts:
            raise DataError(
                f"{decides} needs probabilities of being the best, and {self.method} gives none; "
                f"{DEFAULT} does"
            )
        if self.seeds < 1:
            raise DataError(f"seeds is {self.seeds}; expected 1 or more")
        if self.gamma < 3:
            raise DataError(f"gamma is {self.gamma}; expected 3 or more points for a line")
        for name in ("tau", "budget"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise DataError(f"{name} is {value}; expected a positive number")
        if not self.sizes or min(self.sizes) < 1:
            raise DataError(f"sizes is {list(self.sizes)}; expected numbers of rows from 1 up")
        try:
            check_sizes(np.array(self.sizes, dtype=np.float64))
        except ValueError as error:
            raise DataError(str(error)) from None
        if self.sizes[-1] >= self.target:
            raise DataError(
                f"the largest subset, {self.sizes[-1]} rows, is not below the target "
                f"{self.target}: nothing would be left to predict; take smaller sizes"
            )
        needed = METHODS[self.method].fewest_sizes(
            zero=0 in self.rounds, distribution=decides is not None
        )
        if len(self.sizes) < needed:
            raise DataError(
                f"{self.method} needs {needed} sizes or more, and there are {len(self.sizes)} "
                f"({', '.join(map(str, self.sizes))}); give more sizes or a larger budget"
            )
