"""Tables of a comparison, computed from the records of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._io import DataError, require
from ..._text import DASH
from ..workbench.page import Table
from .metrics import cluster_flip_test, holm, sign_test
from .records import RunRecord

if TYPE_CHECKING:
    from pandas import DataFrame, Series

REFERENCE = "none"  # the unregularised method, which the others are compared with

_PAIRED_NOTES = {
    "": "Mean differences from the unregularised model of the same seed (seeds on which the method "
    "is better / seeds).",
    " ± ": "±: half of the 95 % interval by Student's t.",
    "Brier": "Brier: summed over classes.",
    "scaled": "Scaled: at a temperature fitted on validation rows.",
    "corrupted": "Corrupted: accuracy at the largest share of unknown tokens.",
    "attacked": "Attacked: accuracy under the word attack, of the rows it is tried on.",
    "†": "†: p < 0.05 by the two-sided Mann–Whitney U test, which does not pair the seeds, with "
    "Holm's correction over the methods.",
}
"""Explanations of the tables of `paired_tables`, by the words and signs that they explain."""
OVERALL_NOTE = (
    "Differences from the unregularised model over all pairs of task and seed. p, two-sided, not "
    "adjusted for the number of methods: sign test over pairs; permutation of the mean's sign, all "
    "tasks of a seed together (n seeds give no p below 2/2^n), and all seeds of a task together "
    "(tasks as the sample)."
)


class Figure(NamedTuple):
    """A figure of the runs and its format.

    Attributes:
        title: Title in tables.
        column: Column of `to_frame`.
        scale: Factor that values are multiplied by.
        digits: Number of decimals.
        better: 1 if higher is better, -1 if lower is.
    """

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

# Fields of a record that are not split into several columns.
_UNFLATTENED = ("settings", "recipe", "reliability", "rows")


def to_frame(records: Iterable[RunRecord]) -> DataFrame:
    """Return the final runs as a DataFrame with a row for each run and a column for each figure.

    Mappings in a record become columns such as "scaled.brier" or "shift.imdb.score".

    Raises:
        DataError: there is no final run among the records.

    Examples:
        >>> common = {"run": "", "task": "cola", "control": False, "value": None, "model": "m",
        ...           "metric": "accuracy", "rows": (8, 8, 4), "settings": {}, "recipe": {}}
        >>> scores = {"none": (0.5, 0.6, 0.7), "sam": (0.55, 0.65, 0.75)}
        >>> runs = to_frame(
        ...     RunRecord(method=method, seed=seed, score=score, **common)
        ...     for method, values in scores.items() for seed, score in enumerate(values)
        ... )
        >>> float(differences(runs, "score")["mean"]["sam"].round(3))
        0.05
    """
    final = [record for record in records if record.kind == "final"]
    if not final:
        raise DataError("no run has finished yet, or only runs that choose strengths")
    runs = require("pandas").json_normalize([_fields_of(record) for record in final])
    for name in _UNFLATTENED:
        runs[name] = [getattr(record, name) for record in final]
    return runs  # type: ignore[no-any-return]


def _fields_of(record: RunRecord) -> dict[str, Any]:
    """Return the fields of a record, with sums of norms and the figures under each condition.

    Under noise and on changed texts the figures are accuracies, or scores without an accuracy.
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
    row["noise"] = {f"δ = {d}": accuracies.get(f"noisy {d}", s) for d, s in record.noisy.items()}
    row["texts"] = {name: accuracies.get(name, s) for name, s in record.perturbed.items()}
    row["Σ‖J‖"], row["Σ‖H‖"] = record.jacobian_sum, record.hessian_sum
    row["other accuracy"] = None if record.metric == "accuracy" else record.accuracy
    return row


def methods_of(runs: DataFrame) -> list[str]:
    """Return the names of the methods, in the order of the runs."""
    return list(runs["method"].unique())


def compared_methods(runs: DataFrame) -> list[str]:
    """Return the methods other than the unregularised one; [] if that was not run."""
    methods = methods_of(runs)
    return [m for m in methods if m != REFERENCE] if REFERENCE in methods else []


def tasks_with(runs: DataFrame, *metrics: str) -> list[str]:
    """Return the tasks with a run that has one of the metrics (columns), in the order of the
    runs."""
    has_metric = runs.reindex(columns=metrics).notna().any(axis=1)
    return list(runs.loc[has_metric, "task"].unique())


def title_of(runs: DataFrame, figure: Figure, tasks: Sequence[str]) -> str:
    """Return the title of a figure; of the score, the tasks' metric, its unit and number of rows.

    It is "score" if the tasks have different metrics, and without rows if their numbers differ.
    """
    if figure.column != SCORE.column:
        return figure.title
    of_tasks = runs[runs["task"].isin(tasks)]
    metrics, rows = set(of_tasks["metric"]), {counts[2] for counts in of_tasks["rows"]}
    name = metrics.pop() if len(metrics) == 1 else "score"
    where = f" on {rows.pop():,} dev rows" if len(rows) == 1 else ""
    return f"{name}{where}, per cent" if name == "accuracy" else f"{name} × 100{where}"


def at_chance(runs: DataFrame) -> list[str]:
    """Return a sentence on each task on which no method is better than one answer to all rows.

    Better is a mean score over seeds that is above it by more than two standard errors.
    """
    sentences, scores = [], runs.astype({"score": float, "constant": float})
    for task, judged in scores.dropna(subset=["score", "constant"]).groupby("task", sort=False):
        constant, best = judged["constant"].mean(), judged.groupby("method")["score"].mean().max()
        # the variance of a share; of a correlation, which is 0 for one answer, without one it is 1
        error = np.sqrt((constant * (1 - constant) or 1) / judged["rows"].iloc[0][2])
        if best <= constant + 2 * error:
            sentences.append(
                f"At the level of chance, {task}: the best mean score, {100 * best:.1f}, is within "
                f"two standard errors ({200 * error:.1f}) of that of one answer to all rows, "
                f"{100 * constant:.1f}, or below: differences between methods say nothing."
            )
    return sentences


def task_groups(tasks: list[str]) -> list[tuple[str, list[str]]]:
    """Return (title, tasks) for each single task and, if there are several, for their average."""
    single = [(task, [task]) for task in tasks]
    return [*single, ("average", tasks)] if len(single) > 1 else single


def by_pair(runs: DataFrame, metric: str) -> DataFrame:
    """Return a metric (a column of `runs`) of the finished runs as a frame: rows are (task, seed),
    columns are methods."""
    # "last": if a run was repeated, the later one counts
    finished = runs[runs["score"].notna()].astype({metric: float})
    pivoted = finished.pivot_table(metric, ["task", "seed"], "method", aggfunc="last")
    return pivoted.reindex(columns=methods_of(runs))


def by_seed(runs: DataFrame, metric: str, tasks: Sequence[str] | None = None) -> DataFrame:
    """Return the mean of a metric over tasks: rows are seeds, columns are methods.

    The mean is NaN unless the method has the metric for that seed on all of the tasks.

    Args:
        runs: From `to_frame`.
        metric: One of its columns.
        tasks: Tasks to average over; None for all that have the metric.
    """
    # Means over different tasks would compare tasks rather than methods.
    tasks = tasks_with(runs, metric) if tasks is None else tasks
    pairs = by_pair(runs, metric)
    seeds = pairs[pairs.index.isin(tasks, level="task")].groupby("seed")
    return seeds.mean().where(seeds.count() == len(tasks))


def differences(
    runs: DataFrame, metric: str, reference: str = REFERENCE, tasks: Sequence[str] | None = None
) -> DataFrame:
    """Return the differences of every method from a reference, paired by task and seed.

    Args:
        runs: From `to_frame`, or with its columns method, task, seed, score and the metric.
        metric: One of its columns.
        reference: Name of the reference method.
        tasks: Tasks to average over; None for all that have the metric.

    Returns:
        A row for each method: the mean difference over seeds ("mean"), half of its 95 % interval by
        Student's t ("±", NaN for one seed), the number of seeds that both have ("seeds"), and of
        those on which the method has the higher ("more") or lower ("less") value.

    Examples:
        >>> import pandas
        >>> rows = [("none", 0, 0.5), ("sam", 0, 0.75), ("none", 1, 0.5), ("sam", 1, 0.25)]
        >>> runs = pandas.DataFrame(rows, columns=["method", "seed", "score"]).assign(task="cola")
        >>> differences(runs, "score").loc["sam", ["mean", "more", "seeds"]].tolist()
        [0.0, 1.0, 2.0]
    """
    pandas, stats = require("pandas"), require("scipy.stats")
    # Runs of one seed have the same initial head and order of rows, which affect scores more than
    # the methods do: the interval is that of the differences within seeds,
    # mean ± t₀.₉₇₅(n − 1) · s / √n.
    means = by_seed(runs, metric, tasks)
    paired = means.drop(columns=reference).sub(means[reference], axis=0)
    return pandas.DataFrame(
        {
            "mean": paired.mean(),
            "±": stats.t.ppf(0.975, paired.count() - 1) * paired.sem(),
            "more": (paired > 0).sum(),
            "less": (paired < 0).sum(),
            "seeds": paired.count(),
        }
    )


def significant_methods(
    runs: DataFrame, metric: str, tasks: Sequence[str] | None = None, level: float = 0.05
) -> set[str]:
    """Return the methods whose values differ significantly from the unregularised model's.

    The test is Mann–Whitney's U, two-sided, of the seeds' means over tasks, with Holm's correction
    over the methods.  It is the test of the JacHess paper's tables; `differences`, which pairs the
    runs by seed, detects smaller differences.

    Args:
        runs, metric, tasks: As for `differences`.
        level: Level of significance.

    Examples:
        >>> import pandas
        >>> scores = {"none": [1, 2, 3, 4], "sam": [5, 6, 7, 8], "l2": [1, 2, 3, 5]}
        >>> runs = pandas.DataFrame(
        ...     [(m, seed, score) for m, values in scores.items()
        ...      for seed, score in enumerate(values)], columns=["method", "seed", "score"])
        >>> significant_methods(runs.assign(task="cola"), "score", level=0.06)
        {'sam'}
    """
    means = by_seed(runs, metric, tasks)
    methods = [m for m in compared_methods(runs) if means[m].notna().any()]
    test, plain = require("scipy.stats").mannwhitneyu, means[REFERENCE].dropna()
    # The normal approximation, scipy's choice where values are equal, calls three against three
    # significant, where no p is below 0.1.
    p_values = [test(means[m].dropna(), plain, method="exact").pvalue for m in methods]
    return {m for m, p in zip(methods, holm(p_values), strict=True) if p < level}


def costs(runs: DataFrame) -> dict[str, float]:
    """Return the training cost of each method relative to the plain model.

    It is the ratio of processor seconds of runs of the same task and seed, averaged over these
    pairs; methods without a pair are left out.
    """
    if "seconds.processor" not in runs or REFERENCE not in methods_of(runs):
        return {}
    # processor seconds: wall-clock time depends on how many runs shared the machine
    seconds = by_pair(runs, "seconds.processor")
    ratios = seconds.div(seconds[REFERENCE].replace(0, np.nan), axis=0)
    return ratios.mean().dropna().to_dict()


# --- means over seeds


def mean_cell(values: Series, scale: float = 1.0, num_digits: int = 3) -> str:
    """Format the mean ± the sample standard deviation, times `scale`; a dash without values."""
    mean, std = scale * values.mean(), scale * values.std()
    if np.isnan(mean):
        return DASH
    return f"{mean:.{num_digits}f}" + ("" if np.isnan(std) else f" ± {std:.{num_digits}f}")


def mean_table(
    caption: str, titled_means: Sequence[tuple[str, DataFrame]], *, scale: float, digits: int
) -> Table:
    """Return a table of mean ± sample standard deviation over seeds, with a row for each method.

    Args:
        caption: Caption of the table.
        titled_means: Title and values (from `by_seed`) of each column.
        scale: Factor of the values.
        digits: Number of decimals.
    """
    cells = {method: [method] for method in titled_means[0][1]}
    for _, values in titled_means:
        for method, row in cells.items():
            row.append(mean_cell(values[method], scale, digits))
    return Table(caption, ["method", *(title for title, _ in titled_means)], list(cells.values()))


def task_tables(runs: DataFrame, table_specs: Iterable[tuple[str, str, float, int]]) -> list[Table]:
    """Return a table for each figure that at least one task has.

    A table has a column for each task with the figure and, if there are several, one for their
    average.

    Args:
        runs: From `to_frame`.
        table_specs: (caption, column of `runs`, scale, digits) of each table.
    """
    tables = []
    for caption, metric, scale, digits in table_specs:
        titled_means = [
            (name, by_seed(runs, metric, tasks))
            for name, tasks in task_groups(tasks_with(runs, metric))
        ]
        if titled_means:
            tables.append(mean_table(caption, titled_means, scale=scale, digits=digits))
    return tables


def score_tables(runs: DataFrame) -> list[Table]:
    """Return the tables of scores, of accuracy and AUC where they differ, and of best epochs."""
    tasks = list(runs["task"].unique())
    metrics = dict(zip(runs["task"], runs["metric"], strict=True))
    columns = [
        (f"{name} ({metrics[name]})" if name in metrics else name, by_seed(runs, "score", group))
        for name, group in task_groups(tasks)
    ]
    specs = [
        ("Accuracy × 100.", "other accuracy", 100, 1),
        ("AUC × 100 (more than two classes: mean one-vs-rest).", "auc", 100, 1),
        (BEST_EPOCH, "best_epoch.score", 100, 1),
    ]
    caption = "Scores × 100, mean ± sample standard deviation over seeds."
    scores = mean_table(caption, columns, scale=100, digits=1)
    return [scores, *task_tables(runs, specs)]


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
    "corruption": "{score}, with that share of tokens replaced by the unknown token.",
    "noise": (
        "accuracy × 100 with Gaussian noise on the token embeddings, δ in root mean square "
        "entries of the table before training."
    ),
    "texts": "accuracy × 100 on texts with a share of their words changed.",
}


def condition_tables(runs: DataFrame, name: str) -> list[Table]:
    """Return a table for each task, and their average, with a column for each condition.

    Args:
        runs: From `to_frame`.
        name: Kind of the conditions, one of `CONDITIONS`.
    """
    metrics = [column for column in runs if column.startswith(f"{name}.")]
    tasks = tasks_with(runs, *(figure for figure in metrics if figure != "corruption.clean"))
    return [
        mean_table(
            f"{'average over tasks' if len(group) > 1 else title}: "
            + CONDITIONS[name].format(score=title_of(runs, SCORE, group)),
            [(f.removeprefix(f"{name}."), by_seed(runs, f, group)) for f in metrics],
            scale=100,
            digits=1,
        )
        for title, group in task_groups(tasks)
    ]


def shift_tables(runs: DataFrame) -> list[Table]:
    """Return the table of scores on other tasks, without training on them; [] if there are none."""
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
    """Return the table of failed runs with their errors; [] if there are none."""
    failed = runs.loc[runs["error"].notna(), ["method", "task", "seed", "error"]].astype(str)
    header, rows = ["method", "task", "seed", "why"], failed.to_numpy().tolist()
    return [Table("Runs that failed", header, rows, frozenset({3}))] if rows else []


# --- against the unregularised model, pair by pair


def difference_cell(paired: DataFrame, method: str, figure: Figure) -> str:
    """Format the mean difference of a method ± half of the interval (seeds won / seeds).

    Args:
        paired: From `differences`.
        method: Name of the method.
        figure: The figure.
    """
    row = paired.loc[method]
    if not row["seeds"]:
        return DASH
    half = "" if row["seeds"] < 2 else f" ± {figure.scale * row['±']:.{figure.digits}f}"
    wins = row["more" if figure.better > 0 else "less"]
    return f"{figure.scale * row['mean']:+.{figure.digits}f}{half} ({wins:.0f}/{row['seeds']:.0f})"


def paired_tables(runs: DataFrame) -> list[Table]:
    """Return tables of the differences of each method from the plain model on the same seeds.

    If there are several tasks, the average comes first, then each task.
    """
    methods = compared_methods(runs)
    if not methods:
        return []
    figures = {figure: tasks_with(runs, figure.column) for figure in PAIRED}
    *single, average = task_groups(list(runs["task"].unique()))
    tables = []
    for title, tasks in (average, *single):
        columns = {}
        for figure, tasks_with_figure in figures.items():
            common = [task for task in tasks_with_figure if task in tasks]
            if common:
                paired = differences(runs, figure.column, tasks=common)
                significant = significant_methods(runs, figure.column, common)
                columns[figure.title] = [
                    difference_cell(paired, m, figure) + " †" * (m in significant) for m in methods
                ]
            elif tasks_with_figure:
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


def paired_note(paired: Sequence[Table]) -> str:
    """Return what the columns and signs mean that the tables of `paired_tables` have."""
    shown = "|".join(
        cell for table in paired for row in (table.header, *table.rows) for cell in row
    )
    return " ".join(note for word, note in _PAIRED_NOTES.items() if word in shown)


def overall_tables(runs: DataFrame) -> list[Table]:
    """Return a table for each figure of tests of each method over all pairs of task and seed."""
    tables = []
    for figure in TESTED:
        if figure.column not in runs or not compared_methods(runs):
            continue
        pairs, rows = by_pair(runs, figure.column), []
        for method in compared_methods(runs):
            paired = (pairs[method] - pairs[REFERENCE]).dropna()
            if len(paired) > 1:
                # The pairs of one seed, or of one task, are dependent: their signs are flipped
                # together, once with the seeds as clusters and once with the tasks.
                p_values = [sign_test(paired)]
                for level in ("seed", "task"):
                    p_values.append(cluster_flip_test([list(d) for _, d in paired.groupby(level)]))
                mean_text = f"{figure.scale * paired.mean():+.{figure.digits}f}"
                wins_text = f"{(figure.better * paired > 0).sum()}/{len(paired)}"
                rows.append([method, mean_text, wins_text, *(f"{p:.3g}" for p in p_values)])
        if rows:
            caption = f"{figure.title}: difference from the plain model"
            header = ["method", "mean", "better", "p, sign", "p, seeds", "p, tasks"]
            tables.append(Table(caption, header, rows))
    return tables


def cost_tables(runs: DataFrame) -> list[Table]:
    """Return the table of training costs relative to the plain model; [] without other methods."""
    rows = [[method, f"{cost:.2f}"] for method, cost in costs(runs).items()]
    caption = (
        "Training: processor seconds over the plain run's of the same task and seed, mean ratio."
    )
    return [Table(caption, ["method", "times plain"], rows)] if len(rows) > 1 else []


def best_control_tables(runs: DataFrame) -> list[Table]:
    """Return the table of differences of each method from the best control that costs no more.

    The list is empty without a method and a control to compare.
    """
    cost_of_method = costs(runs)
    controls = [m for m in compared_methods(runs) if runs.loc[runs["method"] == m, "control"].any()]
    by_figure = {f: differences(runs, f.column) for f in TESTED if controls and f.column in runs}
    rows = []
    for method in (m for m in compared_methods(runs) if m not in controls):
        max_cost = 1.05 * cost_of_method.get(method, np.inf)
        cheap = [control for control in controls if cost_of_method.get(control, 0.0) <= max_cost]
        for figure, differences_from_plain in by_figure.items():
            means = figure.better * differences_from_plain.loc[cheap, "mean"].dropna()
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
