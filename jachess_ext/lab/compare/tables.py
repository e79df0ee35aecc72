"""The tables of a comparison, from the records of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._io import DataError, require
from ..._text import DASH
from ..workbench.page import Table
from .metrics import cluster_flip_test, sign_test
from .records import RunRecord

if TYPE_CHECKING:
    from pandas import DataFrame, Series

REFERENCE = "none"

PAIRED_NOTE = (
    "Differences from the unregularised model of the same seed, mean ± half of the 95 % interval "
    "by Student's t (seeds on which it is better / seeds). Brier: summed over classes. Scaled: at "
    "a temperature fitted on validation rows. Corrupted: accuracy at the largest share of unknown "
    "tokens. Attacked: accuracy under the word attack, of the rows it is tried on."
)
OVERALL_NOTE = (
    "Differences from the unregularised model over all pairs of task and seed. p, two-sided, not "
    "adjusted for the number of methods: sign test over pairs; permutation of the mean's sign, all "
    "tasks of a seed together (n seeds give no p below 2/2^n), and all seeds of a task together "
    "(tasks as the sample)."
)


class Figure(NamedTuple):
    """A column of the runs, how it is printed, and whether more (1) or less (-1) is better."""

    title: str
    column: str
    scale: float
    digits: int
    better: int


SCORE = Figure("score × 100", "score", 100, 2, 1)
BRIER = Figure("Brier score", "brier", 1, 4, -1)
BRIER_SCALED = Figure("Brier, scaled", "scaled.brier", 1, 4, -1)
CORRUPTED = Figure("corrupted × 100", "most corrupted", 100, 2, 1)
ATTACKED = Figure("attacked × 100", "attack.attacked", 100, 2, 1)
PAIRED = (
    SCORE,
    Figure("accuracy × 100", "accuracy", 100, 2, 1),
    Figure("AUC × 100", "auc", 100, 2, 1),
    BRIER,
    BRIER_SCALED,
    Figure("NLL", "nll", 1, 3, -1),
    Figure("NLL, scaled", "scaled.nll", 1, 4, -1),
    Figure("ECE", "ece", 1, 4, -1),
    Figure("ECE, scaled", "scaled.ece", 1, 4, -1),
    CORRUPTED,
    ATTACKED,
)
TESTED = (SCORE, BRIER, BRIER_SCALED, CORRUPTED, ATTACKED)

# Fields of a record that stay one column.
_UNFLATTENED = ("settings", "recipe", "reliability", "rows")


def to_frame(records: Iterable[RunRecord]) -> DataFrame:
    """Return the final runs as a table with a row for each run and a column for each figure.

    Figures in a record's mappings become columns such as "scaled.brier" or "shift.imdb.score".

    Raises:
        DataError: no final run is among them.

    Examples:
        >>> common = {"run": "", "task": "cola", "control": False, "value": None, "model": "m",
        ...           "metric": "accuracy", "rows": (8, 8, 4), "settings": {}, "recipe": {}}
        >>> scores = {"none": (0.5, 0.6, 0.7), "sam": (0.55, 0.65, 0.75)}
        >>> runs = to_frame(
        ...     RunRecord(method=method, seed=seed, score=score, **common)
        ...     for method, of in scores.items() for seed, score in enumerate(of)
        ... )
        >>> float(differences(runs, "score")["mean"]["sam"].round(3))
        0.05
    """
    final = [record for record in records if record.kind == "final"]
    if not final:
        raise DataError("no run has finished yet, or only runs that choose strengths")
    runs = require("pandas").json_normalize([_row(record) for record in final])
    for name in _UNFLATTENED:
        runs[name] = [getattr(record, name) for record in final]
    return runs  # type: ignore[no-any-return]


def _row(record: RunRecord) -> dict[str, Any]:
    """Return a record with the sums of its norms, and its figures under each condition by title.

    Under noise and on changed texts these are accuracies, or scores where a record has none.
    """
    row = {name: value for name, value in vars(record).items() if name not in _UNFLATTENED}
    row["corruption"] = {"clean": record.score}
    shares = sorted(record.corrupted, key=float)
    for share in shares:
        row["corruption"][f"{100 * float(share):.0f} %"] = record.corrupted[share]
    if shares and None not in (record.score, record.corrupted[shares[-1]]):
        drop = record.score - record.corrupted[shares[-1]]  # type: ignore[operator]
        row["corruption"][f"drop at {100 * float(shares[-1]):.0f} %"] = drop
    row["most corrupted"] = record.most_corrupted
    accuracies = record.accuracies
    row["noise"] = {f"δ = {d}": accuracies.get(f"noisy {d}", of) for d, of in record.noisy.items()}
    row["texts"] = {name: accuracies.get(name, of) for name, of in record.perturbed.items()}
    row["Σ‖J‖"], row["Σ‖H‖"] = record.jacobian_sum, record.hessian_sum
    row["other accuracy"] = None if record.metric == "accuracy" else record.accuracy
    return row


def methods_of(runs: DataFrame) -> list[str]:
    """Return the methods, in the order of the runs."""
    return list(runs["method"].unique())


def compared_methods(runs: DataFrame) -> list[str]:
    """Return the methods other than the unregularised one; none if that was not run."""
    methods = methods_of(runs)
    return [m for m in methods if m != REFERENCE] if REFERENCE in methods else []


def tasks_with(runs: DataFrame, *figures: str) -> list[str]:
    """Return the tasks that have one of the figures in some run, in the order of the runs."""
    having = runs.reindex(columns=figures).notna().any(axis=1)
    return list(runs.loc[having, "task"].unique())


def task_groups(tasks: list[str]) -> list[tuple[str, list[str]]]:
    """Return (title, tasks) of each task, then of all of them where there are several."""
    single = [(task, [task]) for task in tasks]
    return [*single, ("average", tasks)] if len(single) > 1 else single


def by_pair(runs: DataFrame, figure: str) -> DataFrame:
    """Return a figure of the finished runs by task and seed (rows) and method (columns)."""
    # the last of several: a run that was repeated replaces the one before
    finished = runs[runs["score"].notna()].astype({figure: float})
    wide = finished.pivot_table(figure, ["task", "seed"], "method", aggfunc="last")
    return wide.reindex(columns=methods_of(runs))


def by_seed(runs: DataFrame, figure: str, tasks: Sequence[str] | None = None) -> DataFrame:
    """Return a figure's mean over the tasks with a row for each seed and a column for each method.

    A seed's mean is missing (NaN) unless the method has the figure on all of the tasks.

    Args:
        tasks: Tasks to average over; None: all that have the figure.
    """
    # A seed counts where no task is missing: a mean over other tasks would compare tasks, not
    # methods.
    tasks = tasks_with(runs, figure) if tasks is None else tasks
    pairs = by_pair(runs, figure)
    seeds = pairs[pairs.index.isin(tasks, level="task")].groupby("seed")
    return seeds.mean().where(seeds.count() == len(tasks))


def differences(
    runs: DataFrame, figure: str, reference: str = REFERENCE, tasks: Sequence[str] | None = None
) -> DataFrame:
    """Return the differences of every method from `reference`, paired by task and seed.

    Args:
        runs: From `to_frame`, or with its columns method, task, seed, score and the figure.
        figure: One of its columns.
        tasks: Tasks to average over; None: all that have the figure.

    Returns:
        By method: the mean, half of its 95 % interval by Student's t ("±", NaN for one seed), how
        many seeds both have ("seeds"), and on how many the method has more ("more") or less
        ("less").

    Examples:
        >>> import pandas
        >>> rows = [("none", 0, 0.5), ("sam", 0, 0.75), ("none", 1, 0.5), ("sam", 1, 0.25)]
        >>> runs = pandas.DataFrame(rows, columns=["method", "seed", "score"]).assign(task="cola")
        >>> differences(runs, "score").loc["sam", ["mean", "more", "seeds"]].tolist()
        [0.0, 1.0, 2.0]
    """
    pandas, stats = require("pandas"), require("scipy.stats")
    # Two methods of one seed share the head's first weights and the order of rows, which scatter
    # the scores more than the methods do: the interval is of the differences within seeds, mean ±
    # t₀.₉₇₅(n − 1) · s / √n.
    means = by_seed(runs, figure, tasks)
    apart = means.drop(columns=reference).sub(means[reference], axis=0)
    return pandas.DataFrame(
        {
            "mean": apart.mean(),
            "±": stats.t.ppf(0.975, apart.count() - 1) * apart.sem(),
            "more": (apart > 0).sum(),
            "less": (apart < 0).sum(),
            "seeds": apart.count(),
        }
    )


def costs(runs: DataFrame) -> dict[str, float]:
    """Return by method training's processor seconds over the plain run's, mean over the pairs.

    A pair has the same task and seed; methods without a pair are left out.
    """
    if "seconds.processor" not in runs or REFERENCE not in methods_of(runs):
        return {}
    # processor seconds: wall-clock time depends on how many runs shared the machine
    seconds = by_pair(runs, "seconds.processor")
    ratios = seconds.div(seconds[REFERENCE].replace(0, np.nan), axis=0)
    return ratios.mean().dropna().to_dict()


# --- means over seeds


def mean_cell(values: Series, scale: float = 1.0, digits: int = 3) -> str:
    """Return the mean ± the sample standard deviation, or a dash if there is no value."""
    mean, spread = scale * values.mean(), scale * values.std()
    if np.isnan(mean):
        return DASH
    return f"{mean:.{digits}f}" + ("" if np.isnan(spread) else f" ± {spread:.{digits}f}")


def mean_table(
    caption: str, columns: Sequence[tuple[str, DataFrame]], *, scale: float, digits: int
) -> Table:
    """Return a table of methods: mean ± sample standard deviation over seeds, times `scale`.

    Args:
        columns: A title, and a figure as `by_seed` has it.
    """
    cells = {method: [method] for method in columns[0][1]}
    for _, values in columns:
        for method, row in cells.items():
            row.append(mean_cell(values[method], scale, digits))
    return Table(caption, ["method", *(title for title, _ in columns)], list(cells.values()))


def task_tables(runs: DataFrame, wanted: Iterable[tuple[str, str, float, int]]) -> list[Table]:
    """Return a table for each (caption, figure, scale, digits) that some task has.

    A column for each of these tasks, then their average where there are several.
    """
    tables = []
    for caption, figure, scale, digits in wanted:
        columns = [
            (name, by_seed(runs, figure, tasks))
            for name, tasks in task_groups(tasks_with(runs, figure))
        ]
        if columns:
            tables.append(mean_table(caption, columns, scale=scale, digits=digits))
    return tables


def score_tables(runs: DataFrame) -> list[Table]:
    """Return scores × 100, and accuracy and AUC where some task has them beside its score."""
    tasks = list(runs["task"].unique())
    metrics = dict(zip(runs["task"], runs["metric"], strict=True))
    columns = [
        (f"{name} ({metrics[name]})" if name in metrics else name, by_seed(runs, "score", group))
        for name, group in task_groups(tasks)
    ]
    others = [
        ("Accuracy × 100.", "other accuracy", 100, 1),
        ("AUC × 100 (more than two classes: mean one-vs-rest).", "auc", 100, 1),
        (BEST_EPOCH, "best_epoch.score", 100, 1),
    ]
    caption = "Scores × 100, mean ± sample standard deviation over seeds."
    scores = mean_table(caption, columns, scale=100, digits=1)
    return [scores, *task_tables(runs, others)]


BEST_EPOCH = "Score × 100 after the epoch with the best score on validation rows (plain model)."
CALIBRATION = (
    *(
        (f"{title}{where}: lower is better.", prefix + name, 1, 3)
        for where, prefix in (("", ""), (", at the fitted temperature", "scaled."))
        for name, title in (
            ("brier", "Brier score, summed over classes (of two: twice the paper's)"),
            ("brier_binary", "Brier score as the paper has it, mean (p₁ − y)²"),
            ("ece", "Expected calibration error, 8 bins"),
            ("nll", "Negative log-likelihood, nats"),
        )
    ),
    ("Temperature fitted on validation rows.", "scaled.temperature", 1, 3),
)
ATTACK = (
    ("Accuracy × 100 of the rows the attack is tried on, before it.", "attack.accuracy", 100, 1),
    ("Accuracy × 100 after it.", "attack.attacked", 100, 1),
    ("Rows attacked: those that were right, and have words to replace.", "attack.rows", 1, 0),
    ("Words changed where the answer changed, mean.", "attack.changed", 1, 2),
    ("Words changed where the answer changed, % of the row's, mean.", "attack.share", 100, 1),
    ("Texts that the model was asked about for each row attacked, mean.", "attack.queries", 1, 1),
)
SMOOTHNESS = (
    ("‖∂logits/∂embeddings‖ after fine-tuning, mean over rows.", *("slopes.logit_jacobian", 1, 2)),
    (
        "Margin over its slope, mean over rows: about how far, in the embeddings' units, "
        "the decision's border is.",
        *("slopes.margin_over_slope", 1, 3),
    ),
    (
        "Root mean square entry of the embedding table, after over before training: where "
        "it has grown, noise of a given δ is smaller to the model.",
        *("embedding_growth", 1, 4),
    ),
    ("Σ‖J‖ after fine-tuning, all layers.", "Σ‖J‖", 1, 0),
    ("Σ‖H‖ after fine-tuning, all layers.", "Σ‖H‖", 1, 0),
)
CONDITIONS = {
    "corruption": "score × 100 with that share of tokens replaced by the unknown token.",
    "noise": (
        "accuracy × 100 with Gaussian noise on the token embeddings, δ in root mean square "
        "entries of the table before training."
    ),
    "texts": "accuracy × 100 on texts with a share of their words changed.",
}


def condition_tables(runs: DataFrame, name: str) -> list[Table]:
    """Return a table × 100 for each task, their average last, with a column for each condition.

    Args:
        name: One of `CONDITIONS`.
    """
    figures = [column for column in runs if column.startswith(f"{name}.")]
    tasks = tasks_with(runs, *(figure for figure in figures if figure != "corruption.clean"))
    return [
        mean_table(
            f"{'average over tasks' if len(group) > 1 else title}: {CONDITIONS[name]}",
            [(f.removeprefix(f"{name}."), by_seed(runs, f, group)) for f in figures],
            scale=100,
            digits=1,
        )
        for title, group in task_groups(tasks)
    ]


def shift_tables(runs: DataFrame) -> list[Table]:
    """Return the table of scores on other domains, of which no row was trained on."""
    targets = [c[6:-6] for c in runs if c.startswith("shift.") and c.endswith(".score")]
    columns = [
        (f"{task} → {target}", by_seed(runs, f"shift.{target}.score", [task]))
        for task in runs["task"].unique()
        for target in targets
        if task in tasks_with(runs, f"shift.{target}.score")
    ]
    caption = "Domain shift: score × 100 on the target's dev rows; nothing of the target is used."
    return [mean_table(caption, columns, scale=100, digits=1)] if columns else []


def failed_tables(runs: DataFrame) -> list[Table]:
    """Return the table of the runs that failed, and why."""
    failed = runs.loc[runs["error"].notna(), ["method", "task", "seed", "error"]].astype(str)
    header, rows = ["method", "task", "seed", "why"], failed.to_numpy().tolist()
    return [Table("Runs that failed", header, rows, frozenset({3}))] if rows else []


# --- against the unregularised model, pair by pair


def difference_cell(apart: DataFrame, method: str, figure: Figure) -> str:
    """Return mean ± half of the interval, and on how many seeds the method is to the better."""
    row = apart.loc[method]
    if not row["seeds"]:
        return DASH
    half = "" if row["seeds"] < 2 else f" ± {figure.scale * row['±']:.{figure.digits}f}"
    wins = row["more" if figure.better > 0 else "less"]
    return f"{figure.scale * row['mean']:+.{figure.digits}f}{half} ({wins:.0f}/{row['seeds']:.0f})"


def paired_tables(runs: DataFrame) -> list[Table]:
    """Return each method's differences from the plain model on the same seeds.

    On average over the tasks where there are several, then on each task.
    """
    methods = compared_methods(runs)
    if not methods:
        return []
    figures = {figure: tasks_with(runs, figure.column) for figure in PAIRED}
    *single, average = task_groups(list(runs["task"].unique()))
    tables = []
    for title, tasks in (average, *single):
        columns = {}
        for figure, having in figures.items():
            shared = [task for task in having if task in tasks]
            if shared:
                apart = differences(runs, figure.column, tasks=shared)
                columns[figure.title] = [difference_cell(apart, m, figure) for m in methods]
            elif having:
                columns[figure.title] = [DASH] * len(methods)
        tables.append(
            Table(
                f"{title if tasks == [title] else 'average over tasks'}: differences from the "
                "plain model",
                ["method", *columns],
                [list(row) for row in zip(methods, *columns.values(), strict=True)],
            )
        )
    return tables


def overall_tables(runs: DataFrame) -> list[Table]:
    """Return a table for each figure: tests of each method over all pairs of task and seed."""
    tables = []
    for figure in TESTED:
        if figure.column not in runs or not compared_methods(runs):
            continue
        pairs, rows = by_pair(runs, figure.column), []
        for method in compared_methods(runs):
            apart = (pairs[method] - pairs[REFERENCE]).dropna()
            if len(apart) > 1:
                # The pairs of one seed, or of one task, are not independent: signs are flipped for
                # all of them together, once with the seeds as the sample and once with the tasks.
                tests = [sign_test(apart)]
                for level in ("seed", "task"):
                    tests.append(cluster_flip_test([list(of) for _, of in apart.groupby(level)]))
                mean = f"{figure.scale * apart.mean():+.{figure.digits}f}"
                wins = f"{(figure.better * apart > 0).sum()}/{len(apart)}"
                rows.append([method, mean, wins, *(f"{p:.3g}" for p in tests)])
        if rows:
            caption = f"{figure.title}: difference from the plain model"
            header = ["method", "mean", "better", "p, sign", "p, seeds", "p, tasks"]
            tables.append(Table(caption, header, rows))
    return tables


def cost_tables(runs: DataFrame) -> list[Table]:
    """Return the table of training costs."""
    rows = [[method, f"{cost:.2f}"] for method, cost in costs(runs).items()]
    caption = (
        "Training: processor seconds over the plain run's of the same task and seed, mean ratio."
    )
    return [Table(caption, ["method", "times plain"], rows)] if len(rows) > 1 else []


def best_control_tables(runs: DataFrame) -> list[Table]:
    """Return the table of methods against the best control that costs no more."""
    cost = costs(runs)
    controls = [m for m in compared_methods(runs) if runs.loc[runs["method"] == m, "control"].any()]
    apart = {f: differences(runs, f.column) for f in TESTED if controls and f.column in runs}
    rows = []
    for method in (m for m in compared_methods(runs) if m not in controls):
        limit = 1.05 * cost.get(method, np.inf)
        cheap = [control for control in controls if cost.get(control, 0.0) <= limit]
        for figure, from_plain in apart.items():
            means = figure.better * from_plain.loc[cheap, "mean"].dropna()
            if len(means):
                best = means.idxmax()
                cell = difference_cell(differences(runs, figure.column, best), method, figure)
                rows.append([method, figure.title, best, cell])
    caption = (
        "Against the control with the best mean of that figure among those whose training costs "
        "no more (up to 5 %): difference, mean ± half of the 95 % interval over seeds (better / "
        "seeds). The best of several is chosen after the fact, which favours the controls."
    )
    header = ["method", "figure", "best control", "difference"]
    return [Table(caption, header, rows)] if rows else []
