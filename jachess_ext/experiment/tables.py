"""The paper's tables from the records of a results file: no model is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..evaluation.report import Table
from ..evaluation.statistics import Summary, holm_bonferroni, mann_whitney, summarise
from ..compare.runs import Record

REFERENCE = "none"
LEVEL = 0.05
MARK = "†"
Figure = Callable[[Record], float | None]

NOTE = (
    f"Mean ± sample standard deviation over seeds. {MARK}: differs from the unregularised model "
    f"(two-sided Mann–Whitney U, p < {LEVEL} after Holm–Bonferroni over the methods of a column; "
    "all permutations counted, also of equal scores). "
    "With n seeds a side no p is below 2 / C(2n, n): 0.008 for five, 0.1 for three."
)


def at(*names: str) -> Figure:
    """What stands in a record under these names, one within the other; None where nothing does."""

    def figure(record: Any) -> Any:
        for name in names:
            record = (record or {}).get(name)
        return record

    return figure


@dataclass(frozen=True)
class Results:
    """The final runs of a results file, by method and task in the order they stand there."""

    records: tuple[Record, ...]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Results:
        """Those of `records` that count, tuning runs left out.

        Of runs with a curve over epochs the best epoch by validation rows is a method of its own:
        early stopping, by the score (of equals, by NLL) and by NLL.
        """
        final = [r for r in records if r["kind"] == "final"]
        stopped = [found for r in final if r.get("curve") for found in _stopped(r)]
        return cls((*final, *stopped))

    @property
    def methods(self) -> list[str]:
        """In the order of the file."""
        return list(dict.fromkeys(r["method"] for r in self.records))

    @property
    def compared(self) -> list[str]:
        """The methods that stand against `REFERENCE`; none where it was not run."""
        methods = self.methods
        return [m for m in methods if m != REFERENCE] if REFERENCE in methods else []

    @property
    def tasks(self) -> list[str]:
        """In the order of the file."""
        return list(dict.fromkeys(r["task"] for r in self.records))

    def metric(self, task: str) -> str:
        """The name of a task's score."""
        return next(r["metric"] for r in self.records if r["task"] == task)

    def tasks_with(self, figure: Figure) -> list[str]:
        """Those of which some run has the figure."""
        having = {r["task"] for r in self.records if figure(r) is not None}
        return [task for task in self.tasks if task in having]

    def by_seed(self, method: str, task: str, figure: Figure) -> dict[int, float]:
        """seed → figure, of the runs that have it."""
        found = {
            r["seed"]: figure(r)
            for r in self.records
            if r["method"] == method and r["task"] == task and r["score"] is not None
        }
        return {seed: value for seed, value in found.items() if value is not None}

    def average_by_seed(
        self, method: str, tasks: Sequence[str], figure: Figure
    ) -> dict[int, float]:
        """seed → mean over `tasks`, of the seeds that have all of them."""
        each = [self.by_seed(method, task, figure) for task in tasks]
        seeds = set.intersection(*map(set, each)) if each else set()
        return {seed: float(np.mean([found[seed] for found in each])) for seed in sorted(seeds)}

    def values(self, tasks: Sequence[str], figure: Figure) -> dict[str, list[float]]:
        """Method → a figure of each seed, the mean over `tasks`."""
        return {m: list(self.average_by_seed(m, tasks, figure).values()) for m in self.methods}


def _stopped(record: Record) -> list[Record]:
    """The record as of its best epoch, without what was judged after the last one alone."""

    def by_score(point: Record) -> tuple[float, ...]:
        of = point["validation"]
        return of["score"], -(of["nll"] or 0.0), -point["epoch"]

    def by_nll(point: Record) -> tuple[float, ...]:
        return -(point["validation"]["nll"] or 0.0), -point["epoch"]

    found = []
    for name, key in (("score", by_score), ("NLL", by_nll)):
        best = max(record["curve"], key=key)
        kept = {k: v for k, v in record.items() if k not in _OF_THE_LAST_EPOCH}
        figures = {k: v for k, v in best.items() if k not in ("epoch", "validation")}
        found.append(
            kept
            | figures
            | {
                "method": f"{record['method']}, best epoch by {name}",
                "recipe": {**record["recipe"], "epochs": best["epoch"]},
            }
        )
    return found


_OF_THE_LAST_EPOCH = (
    *("corrupted", "noisy", "perturbed", "accuracies", "jacobian", "hessian", "slopes"),
    *("reliability", "shift", "embedding_growth", "curve"),
)


@dataclass(frozen=True)
class Column:
    """A column of a table: method → its figures over seeds."""

    title: str
    values: dict[str, list[float]]

    def p_values(self) -> dict[str, float]:
        """Method → Holm-adjusted p against `REFERENCE`, for methods with figures on both sides."""
        plain = self.values.get(REFERENCE, [])
        compared = [m for m, v in self.values.items() if m != REFERENCE and v and plain]
        raw = [mann_whitney(self.values[m], plain) for m in compared]
        return dict(zip(compared, holm_bonferroni(raw), strict=True))


def table_of(caption: str, columns: Sequence[Column], *, scale: float, digits: int) -> Table:
    """Methods in rows; cells are mean ± spread times `scale`, marked where significant."""
    methods = list(dict.fromkeys(m for column in columns for m in column.values))
    p = [column.p_values() for column in columns]
    rows = []
    for method in methods:
        cells = [
            cell(column.values.get(method, []), scale, digits)
            + MARK * (found.get(method, 1.0) < LEVEL)
            for column, found in zip(columns, p, strict=True)
        ]
        rows.append([method, *cells])
    return Table(caption, ["method", *(column.title for column in columns)], rows)


def cell(values: Sequence[float], scale: float, digits: int) -> str:
    """Mean ± spread, or a dash without any run."""
    if not values:
        return "–"
    found: Summary = summarise([scale * value for value in values])
    spread = "" if math.isnan(found.spread) else f" ± {found.spread:.{digits}f}"
    return f"{found.mean:.{digits}f}{spread}"


def _columns(
    results: Results, tasks: Sequence[str], figure: Figure, title: Callable[[str], str] = str
) -> list[Column]:
    """One column per task, then the average where there are several."""
    columns = [Column(title(task), results.values([task], figure)) for task in tasks]
    if len(tasks) > 1:
        columns.append(Column("average", results.values(tasks, figure)))
    return columns


def _tables(results: Results, asked: Sequence[tuple[str, Figure, float, int]]) -> list[Table]:
    """One of each (caption, figure, scale, digits), over the tasks that have the figure."""
    return [
        table_of(caption, _columns(results, tasks, figure), scale=scale, digits=digits)
        for caption, figure, scale, digits in asked
        if (tasks := results.tasks_with(figure))
    ]


def groups(tasks: list[str]) -> list[tuple[str, list[str]]]:
    """Each task by itself; where there are several, all of them last."""
    each = [(task, [task]) for task in tasks]
    return [*each, ("average over tasks", tasks)] if len(each) > 1 else each


def score_table(results: Results) -> Table:
    """Scores ×100 per task and on average."""
    columns = _columns(
        *(results, results.tasks, at("score")),
        lambda task: f"{task} ({results.metric(task)})",
    )
    return table_of(f"Scores × 100. {NOTE}", columns, scale=100, digits=1)


def calibration_tables(results: Results) -> list[Table]:
    """Brier score and expected calibration error; none for regression tasks."""
    names = {
        "brier": "Brier score, summed over classes (of two: twice the paper's)",
        "brier_binary": "Brier score as the paper has it, mean (p₁ − y)²",
        "ece": "Expected calibration error, 8 bins",
        "nll": "Negative log-likelihood, nats",
    }
    asked = [
        (f"{title}{where}: lower is better.", at(*scaled, name))
        for where, scaled in (("", ()), (", at the fitted temperature", ("scaled",)))
        for name, title in names.items()
    ]
    asked.append(("Temperature fitted on validation rows.", at("scaled", "temperature")))
    return _tables(results, [(*each, 1, 3) for each in asked])


def other_score_tables(results: Results) -> list[Table]:
    """Accuracy, where it is not the score everywhere, and AUC."""

    def accuracy(record: Record) -> float | None:
        return None if record["metric"] == "accuracy" else record.get("accuracy")

    auc = "AUC × 100 (more than two classes: mean one-vs-rest)."
    return _tables(
        results,
        [("Accuracy × 100.", accuracy, 100, 1), (auc, at("auc"), 100, 1)],
    )


def noise_tables(results: Results) -> list[Table]:
    """Accuracy × 100 (of old records, the score) over δ, per task and on average."""
    return _condition_tables(
        *(results, results.tasks_with(lambda r: r.get("noisy") or None)),
        {f"δ = {d}": _struck("noisy", d, f"noisy {d}") for d in _keys(results, "noisy")},
        "{}: accuracy × 100 with Gaussian noise on the token embeddings, δ in root mean square "
        "entries of the table before training.",
    )


def text_tables(results: Results) -> list[Table]:
    """Accuracy × 100 on changed texts, per task and on average."""
    kinds = dict.fromkeys(k for r in results.records for k in (r.get("perturbed") or {}))
    return _condition_tables(
        *(results, results.tasks_with(lambda r: r.get("perturbed") or None)),
        {kind: _struck("perturbed", kind, kind) for kind in kinds},
        "{}: accuracy × 100 on texts with a share of their words changed.",
    )


def _struck(name: str, place: str, condition: str) -> Figure:
    """Accuracy under a condition; of old records, the score."""
    return lambda r: (r.get("accuracies") or {}).get(condition, at(name, place)(r))


def corruption_tables(results: Results) -> list[Table]:
    """Score × 100 over the share of corrupted tokens, per task and on average; and the drop."""
    shares = _keys(results, "corrupted")
    if not shares:
        return []
    last = shares[-1]

    def drop(record: Record) -> float | None:
        corrupted = at("corrupted", last)(record)
        return None if corrupted is None else record["score"] - corrupted

    figures = {"clean": at("score")}
    figures |= {f"{float(share):.0%}": at("corrupted", share) for share in shares}
    figures[f"drop at {float(last):.0%}"] = drop
    return _condition_tables(
        *(results, results.tasks, figures),
        "{}: score × 100 with that share of tokens replaced by the unknown token.",
    )


def _condition_tables(
    results: Results, tasks: list[str], figures: dict[str, Figure], caption: str
) -> list[Table]:
    """A column each figure × 100; a table each task, the average over tasks last."""
    return [
        table_of(
            caption.format(name),
            [Column(title, results.values(group, figure)) for title, figure in figures.items()],
            scale=100,
            digits=1,
        )
        for name, group in groups(tasks)
        if figures
    ]


def _keys(results: Results, name: str) -> list[str]:
    found = {key for r in results.records for key in (r.get(name) or {})}
    return sorted(found, key=float)


def shift_table(results: Results) -> Table | None:
    """Score × 100 on other domains; labelled and unlabelled data are of the task only."""
    pairs = list(
        dict.fromkeys((r["task"], t) for r in results.records for t in (r.get("shift") or {}))
    )
    if not pairs:
        return None

    columns = [
        Column(f"{task} → {target}", results.values([task], at("shift", target, "score")))
        for task, target in pairs
    ]
    caption = "Domain shift: score × 100 on the target's dev rows; nothing of the target is used."
    return table_of(caption, columns, scale=100, digits=1)


def _total(norms: Sequence[float | None] | None) -> float | None:
    """Their sum over layers; None without any, or with one that was not finite."""
    return sum(norms) if norms and None not in norms else None  # type: ignore[arg-type]


def slope_tables(results: Results) -> list[Table]:
    """The logits' Jacobian, the margin over its slope, and the growth of the embedding table."""
    return _tables(
        results,
        [
            (
                "‖∂logits/∂embeddings‖ after fine-tuning, mean over rows.",
                *(at("slopes", "logit_jacobian"), 1, 2),
            ),
            (
                "Margin over its slope, mean over rows: about how far, in the embeddings' units, "
                "the decision's border is.",
                *(at("slopes", "margin_over_slope"), 1, 3),
            ),
            (
                "Root mean square entry of the embedding table, after over before training: where "
                "it has grown, noise of a given δ is smaller to the model.",
                *(at("embedding_growth"), 1, 4),
            ),
        ],
    )


NORMS: dict[str, Figure] = {
    "Σ‖J‖": lambda r: _total(r.get("jacobian")),
    "Σ‖H‖": lambda r: _total(r.get("hessian")),
}


def smoothness_tables(results: Results) -> list[Table]:
    """Σ over layers of ‖J‖ and of ‖H‖ after fine-tuning, per task and on average."""
    return _tables(
        results,
        [(f"{title} after fine-tuning, all layers.", norm, 1, 0) for title, norm in NORMS.items()],
    )


ABLATIONS = {"weights": "layer weighting (strategy)", "dimensions": "output dimensions |D|"}


def ablation_tables(results: Results) -> list[Table]:
    """Average score × 100 over a setting, for methods that differ in nothing else."""
    found = []
    for field, title in ABLATIONS.items():
        groups: dict[tuple[str, str], dict[str, str]] = {}
        for method in results.methods:
            first = next(r for r in results.records if r["method"] == method)
            settings: dict[str, Any] = first["settings"]
            if settings["method"] != "jachess":
                continue
            # a strength chosen on validation rows is the method's own; one given is a setting
            own = {field} if first["value"] is None else {field, *_TUNED}
            rest = {k: v for k, v in settings.items() if k not in own}
            group = f"jachess-{settings['mode']}", str(sorted(rest.items()))
            groups.setdefault(group, {})[str(settings[field])] = method
        for (name, _), members in groups.items():
            if len(members) > 1:
                found.append(_ablation_table(results, name, title, members))
    return found


_TUNED = ("strength", "unlab_lr_ratio")


def _ablation_table(results: Results, name: str, title: str, members: dict[str, str]) -> Table:
    groups = [*([task] for task in results.tasks), results.tasks]
    columns = [results.values(tasks, at("score")) for tasks in groups]
    rows = [
        [value, *(cell(column[method], 100, 1) for column in columns)]
        for value, method in members.items()
    ]
    header = [title, *results.tasks, "average"]
    return Table(f"{name}: score × 100 over the {title}.", header, rows)


def chosen_table(results: Results) -> Table | None:
    """Which value of its knob each method was given on each task."""
    if all(r["value"] is None for r in results.records):
        return None
    rows = []
    for method in results.methods:
        values = [
            {r["value"] for r in results.records if r["method"] == method and r["task"] == task}
            for task in results.tasks
        ]
        shown = [
            " ".join("as given" if v is None else f"{v:g}" for v in sorted(found, key=str))
            for found in values
        ]
        if any(shown):
            rows.append([method, *shown])
    caption = (
        "Strength (mode unlab: learning-rate ratio of the pass) chosen on a validation share of "
        "the training rows."
    )
    return Table(caption, ["method", *results.tasks], rows)


def failed_table(results: Results) -> Table | None:
    """Runs without figures, and why."""
    rows = [
        [r["method"], r["task"], str(r["seed"]), r["error"]]
        for r in results.records
        if r.get("error")
    ]
    if not rows:
        return None
    return Table("Runs that failed", ["method", "task", "seed", "why"], rows, frozenset({3}))
