"""Tables that could be read as what they are not: each is read right, or refused with a way out.

Every class is made of one table whose losses are known, written in one way after another.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jachess_ext.scaling import LossTable, TableError, read_table, select
from jachess_ext.scaling.metrics import (
    LOGARITHMIC,
    LOWER_IS_BETTER,
    WORST_VALUES,
    metric_word,
    to_loss,
)
from python_tests.scaling.test_tables import MESSY

LOSSES = {"tiny": [2.25, 1.5, 1.125], "base-v2": [2.5, 1.375, 0.875], "big": [3.0, 2.75, 2.0]}
SIZES = [100, 1000, 25000]
WIDE = pd.DataFrame.from_dict(LOSSES, orient="index", columns=["100", "1k", "25,000"])
WIDE = WIDE.rename_axis("model").reset_index()
LONG = pd.DataFrame(
    [(name, size, row[i]) for name, row in LOSSES.items() for i, size in enumerate(SIZES)],
    columns=["model", "rows", "loss"],
)


def check(table: LossTable) -> None:
    """The losses above, and no others."""
    assert sorted(table.names) == sorted(LOSSES) and table.sizes.tolist() == SIZES
    for name, row in zip(table.names, table.losses, strict=True):
        np.testing.assert_allclose(row, LOSSES[name], rtol=1e-12)


def right_or_refused(source: Any, **given: Any) -> dict[str, Any] | None:
    """Return the answers that an error asks for, None where the table was read, and read right."""
    try:
        table = read_table(source, **given)
    except TableError as error:
        return error.options
    check(table)
    return None


def asked_once(source: Any, **given: Any) -> dict[str, Any]:
    """Check that a table is refused, and read right as the error says; return its answers."""
    answers = right_or_refused(source, **given)
    assert answers, "read, or refused without a way out"
    check(read_table(source, **given | answers))
    return answers


def write(frame: pd.DataFrame, form: str, tmp_path: Path) -> Any:
    """Write a frame in one of `FORMS`."""
    path = tmp_path / f"t.{form}"
    if form == "frame":
        return frame
    if form == "index":
        return frame.set_index(frame.columns[0])
    if form == "csv":
        frame.to_csv(path, index=False)
    elif form == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif form == "json":
        frame.to_json(path, orient="records")
    else:
        path.write_text(markdown(frame.astype(str)), encoding="utf-8")
    return path


FORMS = ["frame", "index", "csv", "json", "jsonl", "md"]


def markdown(frame: pd.DataFrame) -> str:
    rows = [[*frame.columns], ["---"] * len(frame.columns), *frame.to_numpy().tolist()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# Words that differ within a model ---------------------------------------------------------------

PAIRS = {
    "State": ("finished", "CRASHED"),
    "converged": (True, False),
    "split": ("test", "train"),
    "task": ("rte", "mnli"),
    "lang": ("en", "de"),
} | dict.fromkeys(
    ["status", "Dataset", "benchmark", "optimizer", "Method", "group", "host", "source"],
    ("one", "two"),
)


def of_two_kinds(label: str) -> pd.DataFrame:
    """Runs of another kind, with other losses, beside those of the first."""
    one, other = PAIRS[label]
    kinds = LONG.assign(**{label: one}), LONG.assign(loss=LONG.loss * 3, **{label: other})
    return pd.concat(kinds).reset_index(drop=True)


@pytest.mark.parametrize("label", PAIRS)
def test_rows_of_two_kinds(label: str) -> None:
    """Each run once, so that a curve would begin as one kind and end as the other; and all runs of
    both, with seeds, so that they would be averaged, or without."""
    one, other = PAIRS[label]
    assert right_or_refused(LONG.assign(**{label: [one, one, other] * 3}))
    frame = of_two_kinds(label)
    with_seeds = frame.assign(seed=np.arange(len(frame)) // len(LONG))
    if label in ("group", "host", "source"):  # which say of rows that they are two of a run
        assert right_or_refused(with_seeds) == {"ignore": [label]}
        with pytest.raises(TableError, match=f"{label}.* at size 100 twice"):
            read_table(frame)
        with pytest.raises(TableError, match="at size 100 twice"):
            read_table(frame, ignore=[label])
        check(read_table(frame, **{label: str(one)}))  # type: ignore[arg-type]
        return
    for source in (frame, with_seeds):
        assert str(asked_once(source)[label]) == str(one)
        table = read_table(source, **{label: one})  # type: ignore[arg-type]
        assert table.left_out == f"9 of 18 rows, whose '{label}' is '{other}'"


UNFINISHED = "CRASHED,Failed,PRUNED,ERROR,TIMEOUT,running,killed,CANCELLED,pending,preempted"
UNFINISHED += ",out of memory (OOM),FAILED (exit 1),NODE_FAIL"


@pytest.mark.parametrize("label", ["State", "note"])
def test_a_run_that_did_not_end(label: str) -> None:
    """Of one row, of all rows of a model, of all."""
    for word in UNFINISHED.split(","):
        for rows in ([2], [0, 1, 2], range(9)):
            states = [word if row in rows else "finished" for row in range(9)]
            assert right_or_refused(LONG.assign(**{label: states})), word
        assert right_or_refused(WIDE.assign(**{label: ["finished", word, "finished"]})), word


@pytest.mark.parametrize("label", ["task", "dataset", "language", "split", "State"])
def test_models_that_were_run_on_different_things(label: str) -> None:
    one, other = PAIRS.get(label, ("x", "y"))
    assert right_or_refused(WIDE.assign(**{label: [one, one, other]}))
    check(read_table(WIDE.assign(**{label: "finished"})))  # one thing for all


@pytest.mark.parametrize("label", ["seed", "trial", "fold", "Random Seed", "replicate"])
def test_repeats_stay_repeats(label: str) -> None:
    frame = pd.concat(
        [LONG.assign(loss=LONG.loss * 0.9), LONG, LONG.assign(loss=LONG.loss * 1.1)]
    ).assign(**{label: np.repeat(["x", "y", "z"], len(LONG))})
    table = read_table(frame.reset_index(drop=True))
    check(table)
    assert table.noise is not None and (table.noise > 0).all()
    both = frame.assign(fold=1, seed=np.repeat([0, 1, 2], len(LONG)))
    check(read_table(both.reset_index(drop=True)))


def test_folds_and_seeds_are_repeats_together() -> None:
    runs = [(0, 0, 0.8), (0, 1, 0.9), (1, 0, 1.1), (1, 1, 1.2)]
    frame = pd.concat(LONG.assign(loss=LONG.loss * x, fold=f, seed=s) for f, s, x in runs)
    check(read_table(frame.reset_index(drop=True)))
    with pytest.raises(TableError, match="with seed 0, 0 twice"):
        read_table(frame.assign(fold=0).reset_index(drop=True))


def test_words_that_say_something_of_a_model_are_no_question() -> None:
    family = LONG.model.map({"tiny": "x", "base-v2": "y", "big": "y"})
    check(read_table(LONG.assign(family=family, pretrained=family == "x")))
    check(read_table(WIDE.assign(family=["x", "y", "y"])))


# Rows that are no models, tables the other way round ---------------------------------------------

SUMMARIES = "std,Average,AVG.,mean,Mean ± std,Best,Δ,p-value,time,n_test,Median,max,min,count,25%"
SUMMARIES += ",Std. Dev.,overall,Δ (big - tiny),n,Total,rank,Average rank,sum,big (std),tiny stderr"
SUMMARIES += ",Training time (h),lr,epochs,# params,±,difference,-,n/a,All,Mean (5 seeds),FLOPs"


def with_a_row(word: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A wide and a long table with a row, or rows, of this name."""
    wide = pd.DataFrame([[word, 1.5, 1.0, 0.5]], columns=WIDE.columns)
    long = pd.DataFrame([(word, size, 1.0) for size in SIZES], columns=LONG.columns)
    return pd.concat([WIDE, wide], ignore_index=True), pd.concat([LONG, long], ignore_index=True)


@pytest.mark.parametrize("word", SUMMARIES.split(","))
def test_a_row_that_is_no_model(word: str) -> None:
    for table in with_a_row(word):
        assert asked_once(table) == {"ignore": [word]}


@pytest.mark.parametrize("form", ["index", "csv", "json", "md"])
def test_a_row_that_is_no_model_in_every_form(form: str, tmp_path: Path) -> None:
    for word in ("Mean ± std", "-", "25%"):
        for table in with_a_row(word):
            assert asked_once(write(table, form, tmp_path)) == {"ignore": [word]}


@pytest.mark.parametrize(
    "name", ["t5", "mean-pooled bert", "gpt-n", "maxvit", "average_word_glove"]
)
def test_names_of_models_that_look_like_summaries(name: str) -> None:
    frame = WIDE.replace({"model": {"big": name}})
    assert read_table(frame).names == ("tiny", "base-v2", name)


@pytest.mark.parametrize("form", ["frame", "index", "csv"])
def test_first_columns_that_name_no_models(form: str, tmp_path: Path) -> None:
    for label, cells in (
        *[("n", ["7B", "13B", "70B"]), ("n", [100, 200, 400]), ("tokens", ["1B", "2B", "4B"])],
        *[("steps", [10, 20, 30]), ("checkpoint", [500, 1000, 1500]), ("epoch", [1, 2, 3])],
        *[("checkpoint", ["checkpoint-500", "checkpoint-900", "checkpoint-1500"])],
        *[("task", ["rte", "mnli", "qqp"]), ("Dataset", ["a", "b", "c"]), ("seed", [0, 1, 2])],
        *[("language", ["en", "de", "fr"]), ("step", ["step 1", "step 2", "step 3"])],
        *[("layer", ["l1", "l2", "l3"]), ("lr", [1e-5, 2e-5, 3e-5]), ("split", ["a", "b", "c"])],
    ):
        frame = WIDE.rename(columns={"model": label}).assign(**{label: cells})
        with pytest.raises(TableError):
            read_table(write(frame, form, tmp_path))


HEADERS = [["2019", "2020", "2021"], ["1", "2", "3"], ["6", "12", "24"], ["1", "5", "10"]]
HEADERS += [["0", "1", "2"], ["7B", "13B", "70B"], ["110M", "340M", "1.5B"], ["101", "102", "103"]]


@pytest.mark.parametrize("form", ["frame", "csv", "json"])
@pytest.mark.parametrize("headers", HEADERS, ids=" ".join)
def test_numbers_that_may_be_no_sizes(headers: list[str], form: str, tmp_path: Path) -> None:
    """Years, k, layers, shots and parameters; they are sizes once it is said."""
    source = write(WIDE.set_axis(["model", *headers], axis=1), form, tmp_path)
    with pytest.raises(TableError) as caught:
        read_table(source)
    assert caught.value.options == {"size": "headers"}
    assert read_table(source, size="headers").losses.tolist() == [*LOSSES.values()]
    said = WIDE.set_axis(["model", *(f"n={header}" for header in headers)], axis=1)
    assert len(read_table(said).sizes) == 3


DOWN = WIDE.set_index("model").T.rename_axis(None, axis=1)
DOWNS: dict[str, pd.DataFrame] = {
    "index": DOWN,
    "numbers": DOWN.set_axis(SIZES),
    "n": DOWN.rename_axis("n").reset_index(),
    "rows": DOWN.set_axis(SIZES).rename_axis("rows").reset_index(),
    "train size": DOWN.rename_axis("Train Size").reset_index(),
    "a family": DOWN.rename_axis("n").reset_index().assign(family="x"),
    "unknown": DOWN.rename_axis("subset").reset_index(),
    "with an average": DOWN.assign(Average=DOWN.mean(axis=1)),
    "with a rate": DOWN.rename_axis("n").reset_index().assign(lr=1e-5),
    "with steps": DOWN.rename_axis("n").reset_index().assign(steps=[1.0, 2.0, 4.0]),
}


@pytest.mark.parametrize("form", ["frame", "csv", "json"])
@pytest.mark.parametrize("kind", DOWNS)
def test_tables_with_sizes_down(kind: str, form: str, tmp_path: Path) -> None:
    """Read so, and said; or refused."""
    frame = DOWNS[kind]
    if form != "frame" and frame.index.dtype != "int64":
        frame = frame.reset_index(names="")
    if kind == "numbers" and form != "frame":
        frame = frame.reset_index(names="")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answers = right_or_refused(write(frame, form, tmp_path))
    if answers is None:
        assert "sizes down" in str(caught[-1].message)
    elif answers:
        with pytest.warns(UserWarning, match="sizes down"):
            check(read_table(write(frame, form, tmp_path), **answers))
    assert kind.startswith(("with", "a ", "unknown")) or answers is None


READABLE = [(text, given) for text, given, expected in MESSY if not isinstance(expected, str)]


def again(frame: pd.DataFrame, expected: LossTable, given: dict[str, Any]) -> None:
    """Check that a frame of a table's cells is refused, or read as the table itself is."""
    given = {name: value for name, value in given.items() if name not in ("model", "size")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            table = read_table(frame, **given)
        except TableError:
            return
    assert table.names == expected.names and table.sizes.tolist() == expected.sizes.tolist()
    np.testing.assert_allclose(table.losses, expected.losses)


@pytest.mark.parametrize(("text", "given"), READABLE)
def test_every_table_of_the_tests_the_other_way_round(
    text: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """Transposed, with a row that sums it up, and with each of its columns as the index."""
    (tmp_path / "t.csv").write_bytes(text.encode())
    expected = read_table(tmp_path / "t.csv", **given)
    separator = next((mark for mark in "\t;" if mark in text), ",")
    frame = pd.read_csv(io.StringIO(text.lstrip("\ufeff")), sep=separator, dtype=str)
    frame = frame.dropna(axis=1, how="all").fillna("")
    places = range(len(frame.columns))
    for place in places:
        again(frame.set_index(frame.columns[place]), expected, given)
        down = frame.set_index(frame.columns[place]).T
        again(down, expected, given)
        again(down.rename_axis(None, axis=1), expected, given)
        again(down.reset_index(), expected, given)
        row = frame.iloc[-1:].copy()
        row.iloc[0, place] = "Average"
        again(pd.concat([frame, row]).reset_index(drop=True), expected, given)
    again(frame.T, expected, given)
    again(frame.T.reset_index(), expected, given)
    again(frame.describe(), expected, given)


@pytest.mark.parametrize("models", [["7B", "13B", "70B"], ["1B", "2B", "4B"], ["110M", "1B", "7B"]])
def test_models_that_are_named_by_their_size(models: list[str]) -> None:
    """Across, with sizes down, and down, with sizes across: right or refused in each."""
    across = DOWN.set_axis(models, axis=1).rename_axis("n").reset_index()
    with pytest.warns(UserWarning, match="sizes down"):
        table = read_table(across)
    assert list(table.names) == models and table.losses.tolist() == [*LOSSES.values()]
    down = WIDE.assign(model=models)
    assert list(read_table(down).names) == models
    for label in ("", "size", "n", "subset", "params"):
        try:
            table = read_table(down.rename(columns={"model": label}))
        except TableError:
            continue
        assert list(table.names) == models and table.sizes.tolist() == SIZES


def test_a_pivot_of_two_metrics_is_asked_about(tmp_path: Path) -> None:
    long = LONG.assign(eval_f1=0.5)
    pivot = long.pivot_table(index="model", columns="rows", values=["loss", "eval_f1"])
    with pytest.raises(TableError, match="several metrics, 'eval_f1', 'loss'; say which"):
        read_table(pivot)
    check(read_table(pivot, metric="loss"))
    for frame in (pivot.reset_index(), pivot.reset_index(drop=True)):
        assert right_or_refused(frame, metric="loss") is not None
    pivot.to_csv(tmp_path / "t.csv")
    assert right_or_refused(tmp_path / "t.csv") is not None
    check(read_table(pd.read_csv(tmp_path / "t.csv", header=[0, 1], index_col=0), metric="loss"))
    LONG.pivot_table(index="model", columns="rows", values=["loss"]).to_csv(tmp_path / "t.csv")
    assert right_or_refused(tmp_path / "t.csv") is not None


@pytest.mark.parametrize("seeds", [1, 2])
def test_an_index_of_several_levels_is_read_by_its_names(seeds: int) -> None:
    frame = pd.concat(WIDE.assign(seed=seed) for seed in range(seeds))
    check(read_table(frame.set_index(["model", "seed"])))
    check(read_table(frame.set_index(["seed", "model"])))
    long = pd.concat(LONG.assign(seed=seed) for seed in range(seeds))
    check(read_table(long.set_index(["model", "rows", "seed"])))
    check(read_table(long.set_index(["model", "rows", "seed"]).loss))  # a Series
    check(read_table(long.groupby(["model", "rows"]).loss.mean()))
    for columns in (["rows"], ["rows", "seed"], ["seed", "rows"]):
        check(read_table(long.pivot_table(index="model", columns=columns, values=["loss"])))
        pivot = long.pivot_table(index="model", columns=columns, values="loss")
        check(read_table(pivot))
        unnamed = pivot.rename_axis(index=None, columns=[None] * len(columns))
        assert right_or_refused(unnamed) is None or len(columns) > 1
    unnamed = long.set_index(["model", "rows", "seed"]).loss.rename_axis([None] * 3)
    assert right_or_refused(unnamed) != {} or seeds == 2, "which level has the seeds is not said"


# Markdown, and text around tables -----------------------------------------------------------------

HEAD, ROWS = [*WIDE.columns], [[str(cell) for cell in row] for row in WIDE.to_numpy()]


def lines(rows: list[list[str]], rule: str, left: str = "| ", right: str = " |") -> str:
    bars = [f"{left}{' | '.join(row)}{right}" for row in rows]
    return "\n".join([bars[0], rule, *bars[1:]]) + "\n"


RULE = "|---|---|---|---|"
EVERY = [HEAD, *ROWS]
PLAIN = lines(EVERY, RULE)
SPELLINGS = {
    "plain": PLAIN,
    "no bars at the ends": lines(EVERY, "---|---|---|---", left="", right=""),
    "closing bars in the header alone": lines([HEAD], RULE)
    + "".join(f"| {' | '.join(row)}\n" for row in ROWS),
    "alignment": lines(EVERY, "| :--- | ---: | :-: | - |"),
    "a rule with spaces": lines(EVERY, "  |  ---  |:---  |  ---:|---  |  "),
    "indented": "".join(f"   {line}   \n" for line in PLAIN.splitlines()),
    "windows": PLAIN.replace("\n", "\r\n"),
    "no padding": PLAIN.replace(" | ", "|").replace("| ", "|"),
    "bold and code": PLAIN.replace("tiny", "`tiny`").replace("0.875", "**0.875**"),
    "underscores and italics": PLAIN.replace("1.125", "__1.125__").replace("tiny", "*tiny*"),
    "links": PLAIN.replace("tiny", "[tiny](https://example.org/a)"),
    "escapes and tags": PLAIN.replace("base-v2", r"base\-v2").replace("0.875", "<b>0.875</b>"),
    "a blank line and prose behind": PLAIN + "\nSome words, with | a bar.\n",
    "prose before": "# Results\n\nWords, more words | and a bar.\n\n" + PLAIN,
    "a paragraph right before": "Losses by size:\n" + PLAIN,
    "code before": "```\n| a | 100 |\n|---|---|\n| x | 1 |\n```\n\n" + PLAIN,
    "a comment before": "<!-- | a | 100 |\n|---|---|\n| x | 1 | -->\n\n" + PLAIN,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_table_in_every_spelling(spelling: str, tmp_path: Path) -> None:
    path = tmp_path / "README"
    path.write_bytes(SPELLINGS[spelling].encode())
    check(read_table(path))


def test_bars_in_cells_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "t.md"
    for written in (r"a\|b", r"`a\|b`", r"**a\|b**"):
        path.write_text(lines([HEAD, [written, *ROWS[0][1:]], *ROWS[1:]], RULE))
        assert read_table(path).names == ("a|b", "base-v2", "big")
    path.write_text(lines([HEAD, ["`a|b`", *ROWS[0][1:]], *ROWS[1:]], RULE))  # splits, by GitHub
    with pytest.raises(TableError, match="has 5 cells where the header has 4"):
        read_table(path)


OTHER = [["learner", "1k", "2k"], ["x", "9", "8"], ["y", "7", "6"]]


@pytest.mark.parametrize("between", ["\n", "\n## Other\n\n", "## Other\n"])
@pytest.mark.parametrize("first", [True, False])
def test_of_two_tables_one_is_asked_for(first: bool, between: str, tmp_path: Path) -> None:
    tables = [lines(EVERY, RULE), lines(OTHER, "|---|---|---|")]
    path = tmp_path / "t.md"
    path.write_text(between.join(tables if first else tables[::-1]))
    with pytest.raises(TableError, match=r"has 2 tables, .*; say which: sheet="):
        read_table(path)
    check(read_table(path, sheet=1 if first else 2))
    other = read_table(path, sheet=2 if first else 1)
    assert other.names == ("x", "y")
    assert other.left_out == f"all tables of the file but {2 if first else 1}"
    with pytest.raises(TableError, match="has 2 tables, and sheet is 3"):
        read_table(path, sheet=3)


CSV = WIDE.to_csv(index=False)
ABOVE = {
    "a title": "Losses by number of examples\n",
    "a title and a blank line": "Losses\n\n",
    "remarks": "# made by a script\n# on 2024-05-01, with seeds 1, 2, 3, 4\n",
    "a remark": "# lower is better\n",
    "a remark with as many commas": "# Losses, in nats, of models, by size\n",
}


@pytest.mark.parametrize("above", ABOVE)
def test_lines_above_a_table(above: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(ABOVE[above] + CSV)
    answers = right_or_refused(path)
    assert answers is None or above in ("a title and a blank line", "a remark with as many commas")
    path.write_text(f"# {CSV}")  # the header is the remark
    check(read_table(path))


WRONG = {
    "two csv tables": CSV + "\n" + CSV,
    "a title like a header": "Losses,May,2023,2024\n" + CSV,
    "a footer": CSV + "Source: our own runs\n",
    "prose": "Some words, and more.\nOther words, as many.\nWords, again.\n",
    "yaml": "model: a\nrows: 100\nloss: 2\n",
    "a psql table": "model | 100 | 1k\n------+-----+----\n a | 2 | 1\n b | 3 | 2\n",
    "a fenced table": "```\n" + lines(EVERY, RULE) + "```\n",
    "html": "<table><tr><td>model</td><td>100</td></tr></table>\n",
    "a json number": "[1, 2, 3]\n",
}


@pytest.mark.parametrize("name", ["t.md", "t.csv"])
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_table(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(WRONG[kind])
    with pytest.raises(ValueError, match=r"t\.(md|csv|txt)"):
        read_table(path)


@pytest.mark.parametrize("orient", ["records", "columns", "index"])
@pytest.mark.parametrize("suffix", ["json", "txt"])
def test_json(orient: Any, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{suffix}"
    LONG.to_json(path, orient=orient)
    answers = right_or_refused(path)
    assert answers is None or orient == "index"
    WIDE.set_index("model").to_json(path, orient="columns" if orient == "records" else orient)
    assert right_or_refused(path) is None


ROW_OBJECTS = LONG.to_dict("records")
SHAPES: dict[str, tuple[Any, str]] = {
    # content of a JSON file that is no table -> what the error names
    "objects inside": ([{**row, "config": {"lr": 1e-5}} for row in ROW_OBJECTS], "'config'"),
    "lists inside": ([{**row, "log": [1, 2]} for row in ROW_OBJECTS], "'log'"),
    "runs": ({"runs": ROW_OBJECTS}, "'runs'"),
    "settings": ({"train": {"lr": 0.1}, "eval": {"loss": [1, 2]}}, "'eval'"),
    "pandas' split": (json.loads(LONG.to_json(orient="split")), "'columns', 'index', 'data'"),
    "pandas' table": (json.loads(LONG.to_json(orient="table")), "'schema', 'data'"),
    "trainer_state": ({"log_history": [{"loss": 1.0}], "epoch": 3}, "read_runs reads a folder"),
}


@pytest.mark.parametrize("suffix", ["json", "jsonl", "txt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_json_of_other_shapes_is_named_by_its_keys(shape: str, suffix: str, tmp_path: Path) -> None:
    content, words = SHAPES[shape]
    path = tmp_path / f"t.{suffix}"
    lines = content if suffix == "jsonl" and isinstance(content, list) else [content]
    path.write_text("\n".join(map(json.dumps, lines)))
    if suffix == "jsonl" and not isinstance(content, list):
        words = ""  # one object of a row
    with pytest.raises(TableError, match=words) as caught:
        read_table(path)
    assert not caught.value.options and str(path) in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_text_in_utf_16(encoding: str, tmp_path: Path) -> None:
    """As spreadsheets write "Unicode text"; the mark at its beginning says so."""
    text = WIDE.to_csv(index=False, sep="\t")
    path = tmp_path / "t.txt"
    path.write_bytes((text if encoding == "utf-16" else f"\ufeff{text}").encode(encoding))
    check(read_table(path))
    path.write_bytes(path.read_bytes()[:-3])  # cut within a character
    with pytest.warns(UserWarning, match="cut short"), pytest.raises(TableError):
        read_table(path)
    path.write_bytes(text.encode("utf-16-le"))  # without the mark
    with pytest.raises(ValueError, match=r"t\.txt"):
        read_table(path)


def test_a_workbook(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    path = tmp_path / "t.xlsx"
    numbers = WIDE.set_axis(["model", *SIZES], axis=1)
    numbers.to_excel(path, index=False)
    check(read_table(path))
    LONG.to_excel(path)  # with a column that counts
    check(read_table(path))
    numbers.to_excel(path, index=False, startrow=3, startcol=2)
    check(read_table(path))
    with pd.ExcelWriter(path) as writer:
        pd.DataFrame({"to do": ["x"]}).to_excel(writer, sheet_name="notes", index=False)
        numbers.to_excel(writer, sheet_name="runs", index=False)
        pd.DataFrame().to_excel(writer, sheet_name="empty")
    assert asked_once(path) == {"sheet": 2}


# Words around a metric's name --------------------------------------------------------------------

BEHIND = (
    "stderr,std,gap,delta,rank,drop,count,stdev,sem,ci,variance,diff,change,gain,improvement,err"
)
BEHIND += ",error,lower,upper,low,high,time,steps,threshold,weight,scale,ratio,p value,±,(std),n"
BEHIND += ",increase,decrease,reduction,slope,half width,z score of x"
BEFORE = "log,neg,negative,std,stderr of,delta,drop in,rank by,gap in,Δ,ln,exp,minus,-,1 -,100-,1-"
BEFORE += ",relative,n,num,inverse,sqrt"


@pytest.mark.parametrize(
    "word", [word for word in (*WORST_VALUES, *LOWER_IS_BETTER) if word not in ("higher", "lower")]
)
def test_words_around_a_metric(word: str) -> None:
    """They make another number of it, which is refused; the logarithm of a perplexity is a loss."""
    assert metric_word(word) == metric_word(f"eval_{word}") == word
    wrong = []
    for form in ("{}_{}", "{} {}", "{}-{}", "eval/{}.{}"):
        names = [(form.format(word, behind), "") for behind in BEHIND.split(",")]
        names += [(form.format(before, word), before) for before in BEFORE.split(",")]
        for name, before in names:
            found = metric_word(name)
            right = {"loss"} if before == "log" and word in ("loss", *LOGARITHMIC) else set()
            if found is not None and found not in right:
                wrong.append((name, found))
    assert not wrong


@pytest.mark.parametrize("name", ["log_perplexity", "log ppl", "eval/log_perplexity"])
def test_the_logarithm_of_a_perplexity_gets_no_second(name: str) -> None:
    assert to_loss(name, math.e) == math.e


def test_a_column_of_deviations_is_no_column_of_scores() -> None:
    frame = LONG.rename(columns={"loss": "eval_loss"}).assign(eval_loss_std=0.1)
    assert asked_once(frame) == {"ignore": ["eval_loss_std"]}


# Asked once ---------------------------------------------------------------------------------------

NAMES = "Train Size,trainSize,tr_size,Few-shot Size,train-size,num_train_examples,# examples,nTrain"
NAMES += ",number of training examples,Sample size,Training set size,n_samples,params.train_size"
NAMES += ",Training Examples,Tokens,max_train_samples"


def test_sizes_by_other_names() -> None:
    for name in NAMES.split(","):
        check(read_table(LONG.rename(columns={"rows": name})))


@pytest.mark.parametrize(
    "name", ["batch_size", "test_size", "max_tokens", "eval_samples", "hidden n"]
)
def test_sizes_of_something_else(name: str) -> None:
    """Beside the sizes they are refused; in their place they are asked about, or refused."""
    assert asked_once(LONG.assign(**{name: 512})) == {"ignore": [name]}
    assert right_or_refused(LONG.rename(columns={"rows": name})) is not None


@pytest.mark.parametrize("name", ["data_percent", "Train %", "pct", "train percentage"])
def test_sizes_in_per_cent(name: str) -> None:
    frame = LONG.assign(rows=LONG.rows.map({100: 0.4, 1000: 4, 25000: 100}))
    frame = frame.rename(columns={"rows": name})
    answers = right_or_refused(frame)
    assert answers is not None and answers["full"] == "N"
    check(read_table(frame, **answers | {"full": 25000}))


@pytest.mark.parametrize("form", FORMS)
def test_all_that_is_open_is_asked_at_once(form: str, tmp_path: Path) -> None:
    other = LONG.assign(task="mnli", loss=9.0)
    frame = pd.concat([LONG.assign(task="rte"), other]).reset_index(drop=True)
    frame = frame.rename(columns={"model": "learner", "rows": "Examples used"})
    frame = frame.assign(lr=1e-5, epochs=3, note="x", run=[f"r{k}" for k in range(len(frame))])
    frame = frame[["learner", "Examples used", "task", "lr", "epochs", "run", "note", "loss"]]
    answers = asked_once(write(frame, form, tmp_path))
    assert answers == {
        "size": "Examples used",
        "model": "learner",
        "task": "rte",
        "ignore": ["run", "lr", "epochs"],
    }
    again = right_or_refused(write(frame, form, tmp_path), ignore=["lr"])
    assert again is not None and again["ignore"] == ["lr", "run", "epochs"]


def test_per_cents_are_of_something() -> None:
    """They are errors or scores, falling or rising, and never plain losses."""
    falling = WIDE.set_index("model").map(lambda loss: f"{10 * loss} %")
    with pytest.raises(TableError, match="in per cent, and fall") as caught:
        read_table(falling)
    assert caught.value.options == {"metric": "error|accuracy"}, "one has to be chosen"
    with pytest.raises(TableError, match=r"'error\|accuracy' is not known here"):
        read_table(falling, **caught.value.options)
    np.testing.assert_allclose(read_table(falling, metric="error").losses / 10, [*LOSSES.values()])
    rising = WIDE.set_index("model").map(lambda loss: f"{100 - 10 * loss}%")
    assert right_or_refused(rising) == {"metric": "accuracy"}


@pytest.mark.parametrize("form", ["frame", "csv", "json"])
def test_runs_without_a_size_are_asked_about(form: str, tmp_path: Path) -> None:
    row = pd.DataFrame([["chance", "-", 9.0]], columns=LONG.columns)
    frame = pd.concat([LONG.astype({"rows": object}), row]).reset_index(drop=True)
    assert asked_once(write(frame, form, tmp_path)) == {"ignore": ["chance"]}


@pytest.mark.parametrize("form", ["frame", "csv"])
def test_a_column_of_values_that_is_not_known(form: str, tmp_path: Path) -> None:
    """Its direction is asked for, and not guessed."""
    source = write(LONG.rename(columns={"loss": "Taste (mean)"}), form, tmp_path)
    answers = right_or_refused(source)
    assert answers == {"metric": "Taste (mean):higher|lower"}
    with pytest.raises(TableError, match=r"say whether .*: 'Taste \(mean\):lower' or"):
        read_table(source, **answers)
    check(read_table(source, metric="Taste (mean):lower"))
    shares = LONG.assign(loss=1 - LONG.loss / 4).rename(columns={"loss": "Taste (mean)"})
    table = read_table(write(shares, form, tmp_path), metric="Taste (mean):higher")
    np.testing.assert_allclose(table.losses * 4, [*LOSSES.values()])


@pytest.mark.parametrize("cell", ["1,200", "15,873"])
def test_a_comma_of_thousands_is_no_decimal_one(cell: str) -> None:
    frame = WIDE.astype(object)
    frame.iloc[0, 1] = cell
    with pytest.raises(TableError, match=f"'{cell}' in column '100' of 'tiny' is no number$"):
        read_table(frame)


def test_few_shots_are_sizes_once_it_is_said() -> None:
    frame = WIDE.set_axis(["model", "1-shot", "5-shot", "16 shots"], axis=1)
    assert right_or_refused(frame) == {"size": "headers"}
    assert read_table(frame, size="headers").sizes.tolist() == [1, 5, 16]


def test_select_takes_what_its_errors_say() -> None:
    frame = LONG.assign(lr=1e-5, task="rte").rename(columns={"rows": "amount"})
    frame = pd.concat([frame, frame.assign(task="mnli")]).reset_index(drop=True)
    with pytest.raises(TableError) as caught:
        select(frame, target=1_000_000)
    assert select(frame, target=1_000_000, **caught.value.options).ranking
    with pytest.raises(TableError, match=r"\(pass 'method' to read_table, and its table"):
        select(frame.rename(columns={"task": "method"}), target=1_000_000)


def test_a_choice_that_is_not_there() -> None:
    with pytest.raises(TableError, match=r"no row .* without 9 of 9 rows, whose 'task' is 'rte'"):
        read_table(LONG.assign(task="rte"), task="x")
    with pytest.raises(TableError, match="has no column 'colour'; it has 'model'"):
        read_table(LONG, colour="x")
    with pytest.raises(TableError, match="the LossTable holds losses"):
        read_table(read_table(LONG), task="rte")
