"""`read_table` on tables as people have them: what each gives, or the sentence that refuses it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jachess_ext.scaling import LossTable, TableError, read_table
from jachess_ext.scaling.metrics import (
    from_loss,
    higher_is_better,
    metric_word,
    plain_name,
    to_loss,
)
from jachess_ext.scaling.sheets import parse_size
from python_tests import processes

# Sizes ------------------------------------------------------------------------------------------

SIZES = [
    *[("100", 100), ("1k", 1e3), ("1K", 1e3), ("1.6k", 1600), ("2M", 2e6), ("1b", 1e9)],
    *[("1,000", 1e3), ("1 000", 1e3), ("1_000", 1e3), ("1\u202f000", 1e3), ("1'000", 1e3)],
    *[("1,638,400", 1638400), ("1.638.400", 1638400), ("1600.0", 1600), ("1.6e3", 1600)],
    *[("1E5", 1e5), (" 200 ", 200), ("n=100", 100), ("D = 1k", 1e3), ("rows=1,000", 1e3)],
    *[("10K rows", 1e4), ("10 000 training examples", 1e4), ("5k samples", 5e3), ("0", 0)],
    *[("100.", 100), ("33.3k", 33300), ("0.5k", 500)],
    *[("400B", 4e11), ("15T tokens", 1.5e13), ("4e17", 4e17), (4e17, 4e17)],
    *[(100, 100), (1e3, 1e3), (np.int64(7), 7)],
]


def test_sizes_as_people_write_them() -> None:
    for written, size in SIZES:
        assert parse_size(written) == size, written


NO_SIZES = "|k|100 %|10%|1..6|1/8|-5|1,00|1,0000|1 0000|1,000,00|1,000 000|1600,5|1e|e5|x100|100x"
NO_SIZES += "|lr=0.1|1k2|nan|inf|1e999|0,125|size"


def test_what_is_no_size() -> None:
    for written in (*NO_SIZES.split("|"), math.nan, math.inf, -1, True, None):
        with pytest.raises(TableError, match="is no number of training examples; expected one su"):
            parse_size(written)


def test_a_point_before_three_digits_is_asked_about() -> None:
    with pytest.raises(TableError, match=r"'1.000' may mean 1 or 1000; write it without a point"):
        parse_size("1.000")


def test_a_share_is_no_whole_number_where_none_is_expected() -> None:
    with pytest.raises(TableError, match=r"'16\.5' is no whole number of training examples$"):
        parse_size("16.5")


# Metrics ----------------------------------------------------------------------------------------

HIGHER = (
    "accuracy,eval_Accuracy,val_acc,macro F1,eval/exact_match,exact_string_match_accuracy,rougeL"
)
HIGHER += (
    ",rouge2,BLEU-4,matthews_correlation,roc_auc_ovr,taste:higher,loss of accuracy,Acc ↑,f1_macro"
)
HIGHER += ",F1-score,Acc. (%),accuracy@1,5-shot accuracy,matthews_corrcoef"
LOWER = (
    "taste:lower,eval_loss,NLL,brier,mae,RMSE,mean squared error,perplexity (lower is better),wer"
)
LOWER += ",error_rate,log_loss,accuracy_loss,best_val_loss,loss (nats)"


def test_the_direction_of_metrics() -> None:
    for names, higher in ((HIGHER, True), (LOWER, False)):
        for name in names.split(","):
            assert higher_is_better(name) is higher, name
    assert metric_word("acc_norm,none") == "acc" and metric_word("test/rouge2") == "rouge"


def test_metrics_that_are_not_known() -> None:
    assert metric_word("taste") is None and metric_word("") is None
    for convert in (higher_is_better, lambda name: to_loss(name, 1.0)):
        with pytest.raises(TableError, match=r"'taste' is not known here; say .*'taste:lower'"):
            convert("taste")


def test_what_is_forecast_of_a_metric() -> None:
    values = np.array([0.25, 1.0])
    np.testing.assert_array_equal(to_loss("f1", values, 50), [0.75, 0.01])
    np.testing.assert_array_equal(to_loss("f1", values), [0.75, 0.0])
    np.testing.assert_array_equal(to_loss("mae", values, 50), values)
    np.testing.assert_allclose(from_loss("ppl", to_loss("ppl", np.array([2.0, 9]))), [2, 9])
    assert to_loss("perplexity", math.e) == pytest.approx(1)
    assert from_loss("accuracy", 1.5) == 0 and from_loss("matthews", 1.5) == -0.5
    assert from_loss("matthews", 2.5) == -1 and from_loss("accuracy", math.inf) == 0
    assert math.isnan(to_loss("accuracy", math.nan, 50))


def test_names_without_where_they_were_measured() -> None:
    assert plain_name("eval_loss") == plain_name("val/loss") == plain_name("LOSS") == "loss"
    assert plain_name("train_loss") == "train_loss" != plain_name("eval_loss")


# Tables -----------------------------------------------------------------------------------------

N = math.nan
WIDE = [[2.0, 1.5, 1.0], [3.0, 2.5, 2.0]]
ERRORS = [[0.5, 0.4, 0.25], [0.375, 0.25, 0.125]]
MESSY: list[tuple[str, dict[str, Any], list[list[float]] | str]] = [
    # wide tables of models a and b at 100, 1000 and 10000
    ("name,100,1k,10K\na,2,1.5,1\nb,3,2.5,2\n", {}, WIDE),
    ('name,100,"1,000","10,000"\na,2,1.5,1\nb,3,2.5,2\n', {}, WIDE),
    ("name,n=100,n=1000,n=10k\na,2,1.5,1\nb,3,2.5,2\n", {}, WIDE),
    ("name,10000,100,1000\na,1,2,1.5\nb,2,3,2.5\n", {}, WIDE),  # in any order
    ("\ufeffname,100,1k,10k\r\na,2,1.5,1\r\n\r\nb,3,2.5,2\r\n", {}, WIDE),
    ("name\t100\t1 000\t10 000\na\t2\t1.5\t1\nb\t3\t2.5\t2\n", {}, WIDE),
    ("name;100;1000;10000\na;2;1.5;1\nb;3;2.5;2\n", {}, WIDE),
    ("name;100;1.000;10.000\na;2;1,5;1\nb;3;2,5;2\n", {"decimal": ","}, WIDE),
    ("learner,100,1k,10k\na,2,1.5,1\nb,3,2.5,2\n", {}, WIDE),  # the first column has the names
    (",name,100,1k,10k\n0,a,2,1.5,1\n1,b,3,2.5,2\n", {}, WIDE),  # DataFrame.to_csv
    ("size,family,name,100,1k,10k\n110M,x,a,2,1.5,1\n1.1b,y,b,3,2.5,2\n", {}, WIDE),
    ("name,100,1k,10k,\na,2,1.5,1,\nb,3,2.5,2,\n", {}, WIDE),  # a separator too many
    ("name,100,1k,10k\na,2,,1\nb,n/a,2.5,2\n", {}, [[2, N, 1], [N, 2.5, 2]]),
    ("name,100,1k,10k\na,2,TBD,1\nb,tbd,2.5,2\n", {}, [[2, N, 1], [N, 2.5, 2]]),
    ("name,100,1k,10k,lr\na,2,1.5,1,.1\nb,3,2.5,2,.1\n", {"ignore": ["lr"]}, WIDE),
    ("name,seed,100,1k,10k\na,0,1,1,1\na,1,3,2,1\nb,0,3,2.5,2\n", {}, WIDE),
    # scores
    ("name,100,1k,10k\na,50,60,75\nb,62.5,75,87.5\n", {"metric": "accuracy"}, ERRORS),
    ("name,100,1k,10k\na,50%,60 %,75%\nb,62.5%,75%,87.5%\n", {"metric": "auc"}, ERRORS),
    ("name,metric,100,1k,10k\na,acc,.5,.6,.75\nb,acc,.625,.75,.875\n", {}, ERRORS),
    (
        "name,100,1k,10k\na,50,60,100\nb,60,70,80\n",
        {"metric": "em", "test_rows": 20},
        [[0.5, 0.4, 0.025], [0.4, 0.3, 0.2]],
    ),
    ("name,100,1k,10k\na,2,3,4\nb,3,4,5\n", {"metric": "loss"}, [[2, 3, 4], [3, 4, 5]]),
    # long tables
    ("model,size,loss\na,100,2\na,1k,1.5\na,10k,1\nb,100,3\nb,1k,2.5\nb,10k,2\n", {}, WIDE),
    (
        "model,n,seed,loss\na,1k,0,1\na,1k,1,2\na,100,0,2\na,10k,5,1\nb,100,0,3\nb,1k,0,2\nb,1k,1,3\n"
        "b,10k,0,2\n",
        {},
        WIDE,
    ),
    (
        "model,rows,eval_loss,eval_accuracy\na,100,2,.5\na,1k,1,.6\nb,100,3,.4\n",
        {"metric": "accuracy"},
        [[0.5, 0.4], [0.6, N]],
    ),
    (
        "model,rows,metric,value\na,9,loss,2\na,9,f1,.5\nb,9,loss,3\nb,9,f1,.25\n",
        {"metric": "f1"},
        [[0.5], [0.75]],
    ),
    ("who,amount,run,loss\na,100,x,2\nb,100,y,3\n", {"model": "who", "size": "amount"}, [[2], [3]]),
    ("model;train_samples;loss\na;1.000;0,5\nb;1.000;0,25\n", {"decimal": ","}, [[0.5], [0.25]]),
    ("model,rows,eval_loss,test_loss\na,100,2,3\nb,100,4,5\n", {"metric": "test_loss"}, [[3], [5]]),
    # what is refused
    (",\n;\n", {}, "is empty; expected a header"),
    (
        "model,rows,eval_f1,test_f1\na,1,.2,.2\nb,1,.3,.3\n",
        {"metric": "f1"},
        "'eval_f1', 'test_f1'",
    ),
    ("name,100,1k,1..6\na,2,1.5,1\nb,3,2.5,2\n", {}, r"numbers in '1\.\.6', not named"),
    ("name,100 %,50 %\na,2,3\nb,3,4\n", {}, "'100 %' is a share of the data"),
    ("name,100,1k,lr\na,2,1.5,1\nb,3,2.5,2\n", {}, r"numbers in 'lr', .*ignore=\['lr'\]"),
    ("name,1k,1000\na,2,1.5\nb,3,2.5\n", {}, "'a' at size 1000 twice; expected one row"),
    ("name,1.000,2.000\na,2,1.5\nb,3,2.5\n", {}, "in the header .* '1.000' may mean 1 or 1000"),
    ("name,size,parameters,100\na,1,1,2\nb,1,1,3\n", {}, "'size', 'parameters', any"),
    ("name,size,100\na,big,2\nb,1,3\n", {}, "'big' in column 'size' of 'a' is no number of param"),
    ("100,1k,10k\n2,1.5,1\n3,2.5,2\n", {}, "no column .* names the models, and its first, '100'"),
    ("lr,100,1k\n.1,2,1.5\n.2,3,2.5\n", {}, "no column .* names the models, and its first, 'lr'"),
    ("name;100;1k\na;2;1,5\nb;3;2,5\n", {}, "'1,5' in column '1k' of 'a' .* say so: decimal=','"),
    ("model;rows;loss\na;1k;0,5\nb;1k;0,25\n", {}, "'0,5' in column 'loss' .* say so: decimal=','"),
    ("name;100\na;1.5\nb;2,5\n", {"decimal": ","}, "'1.5' in column '100' of 'a' is no number$"),
    ("name;100\na;1\nb;2\n", {"decimal": ";"}, "decimal is ';'; expected '.' or ','"),
    (
        "name,100,1k\na,2,1.5\na,3,2.5\nb,3,2.5\n",
        {},
        "'a' at size 100 twice; .* or a column 'seed'",
    ),
    ("name,seed,100\na,1,2\na,1,3\nb,1,3\n", {}, "'a' at size 100 with seed 1 twice"),
    ("name,100,1k\na,2,1_0\nb,3,2.5\n", {}, "'1_0' in column '1k' of 'a' is no number"),
    ("name,100,1k\na,50,60\nb,40,70\n", {}, r"rise with size in 2 of 2 models"),
    ("name,100,1k\na,2,3\nb,4,3\n", {}, r"rise with size in 1 of 2 models"),
    ("name,100,1k\na,50,60\nb,.4,.7\n", {"metric": "f1"}, "'b' is at most 0.7 and that of others"),
    ("name,100,1k\na,50,160\nb,4,7\n", {"metric": "f1"}, "'a' at size 1000 is 160; exp"),
    ("name,100,1k\na,-5,60\nb,4,7\n", {"metric": "acc"}, "'a' at size 100 is -5; exp"),
    ("name,100,1k\na,.5,2\nb,4,7\n", {"metric": "ppl"}, "at size 100 is 0.5; .* from 1"),
    ("name,100,1k\na,50%,60\nb,4,7\n", {"metric": "acc"}, "with and without a per cent sign"),
    ("name,100,1k\na,2,1\nb,4,3\n", {"metric": "taste"}, "metric 'taste' is not known here"),
    ("name,100,1k\na,2,1\nb,4,3\n", {"ignore": ["lr"]}, "has no column 'lr'; it has 'name', '100'"),
    ("name,metric,100\na,f1,.5\na,loss,2\n", {}, "holds several metrics, 'f1', 'loss'; say which"),
    (
        "name,metric,100\na,f1,.5\nb,f1,2\n",
        {"metric": "auc"},
        "2 of 2 rows, whose 'metric' is 'f1'",
    ),
    ("model,rows,n,loss\na,1,1,2\nb,1,1,3\n", {}, "'rows', 'n', any of which may be"),
    ("model,rows,loss\na,1,2\nb,half,3\n", {}, "in the column 'rows' of 'b', 'half' is no number"),
    ("model,rows,loss\na,1,2\nb,1,x\n", {}, "'x' in column 'loss' of 'b' is no number$"),
    ("model,rows,loss\na,1,2\nb,1,x\n", {"metric": "loss"}, "'x' in column 'loss' of 'b' is no"),
    ("model,rows,train_loss,eval_loss\na,1,2,2\nb,1,3,3\n", {}, "several columns of val"),
    ("name,100,1k\na,2,1\nb,4,3\n", {"size": "rows"}, "has no column 'rows'"),
    ("model,rows,lr\na,1,2\nb,1,3\n", {}, "nor one of values that is known"),
    # a model card's table of one training
    (
        "Training Loss,Epoch,Step,Validation Loss\n.5,1,100,.4\n.4,2,200,.3\n",
        {},
        "it has 'Training Loss', 'Epoch', 'Step', 'Validation Loss'$",
    ),
    (
        "model,n_train,n_request,loss\na,100,100,2\na,25000,all,1\nb,100,100,3\nb,25000,all,2\n",
        {},
        r"'n_request' .* holds '100', 'all'; leave it out .*: ignore=\['n_request'\]$",
    ),
    # read as something else once: names of runs, sizes of models, spreads, sizes that are words
    ("name,model,rows,loss\nr1,a,1,2\nr2,b,1,3\n", {}, "'name', 'model', any of which may be"),
    ("model,size,tokens,loss\na,1B,300M,2\nb,1B,300M,3\n", {}, "'size', 'tokens', any of which"),
    ("model,rows,part,loss\na,1k,25%,2\nb,1k,50%,3\n", {}, "numbers in 'part', n"),
    ("name,100\na,84.1±0.3\nb,80 +/- 1\n", {}, "84.1±0.3' in column '100' of 'a' is no number$"),
    (
        "model,size,tokens,loss\na,1B,100,2\na,1B,1k,1.5\na,1B,10K tokens,1\nb,2B,100,3\n"
        "b,2B,1k,2.5\nb,2B,10k,2\n",
        {"size": "tokens"},
        WIDE,
    ),
    ("name,family\na,x\nb,y\n", {}, "no column named by a number of training examples"),
]


@pytest.mark.parametrize(("text", "given", "expected"), MESSY)
def test_messy_tables(
    text: str, given: dict[str, Any], expected: list[list[float]] | str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode("utf-8"))
    if isinstance(expected, str):
        with pytest.raises(TableError, match=expected):
            read_table(path, **given)
        return
    table = read_table(path, **given)
    assert sorted(table.names) == ["a", "b"]
    assert set(table.sizes) <= {9.0, 100.0, 1e3, 1e4} and (np.diff(table.sizes) > 0).all()
    np.testing.assert_allclose(table.losses, expected, rtol=1e-12)


def test_what_a_table_keeps(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("name,seed,size,100,1k\na,0,,50,60\na,1,110M,54,61\nb,0,1.1b,70,80\nb,1,,,80\n")
    table = read_table(path, metric="eval_accuracy")
    assert table.metric == "eval_accuracy" and table.scale == 100
    assert table.label == "eval_accuracy (per cent)"
    np.testing.assert_allclose(table.losses, [[0.48, 0.395], [0.3, 0.2]])
    assert table.noise is not None and table.parameters is not None
    np.testing.assert_allclose(table.noise, [[0.02, 0.005], [N, 0.0]], atol=1e-15)
    np.testing.assert_array_equal(table.parameters, [110e6, 1.1e9])
    np.testing.assert_allclose(table.to_metric(table.losses), [[52, 60.5], [70, 80]])
    one = table.rows(np.array([1])).up_to(100)
    assert one.metric == table.metric and one.scale == 100 and one.noise is not None
    assert one.noise.shape == (1, 1) and one.parameters == 1.1e9


def test_where_nothing_is_missing_the_test_rows_are_asked_for() -> None:
    frame = pd.DataFrame({"100": [0.5, 0.6], "1k": [0.75, 1.0]}, index=["a", "b"])
    table = read_table(frame, metric="accuracy")
    with pytest.raises(TableError, match=r"accuracy of 'b' at size 1000 is the best .* test_rows="):
        table.up_to(1000)
    assert table.up_to(100).losses_at(100).tolist() == [0.5, 0.4]
    assert read_table(frame, metric="accuracy", test_rows=200).losses_at(1000).tolist() == [
        0.25,
        0.0025,
    ]
    with pytest.raises(TableError, match="test_rows is 0"):
        read_table(frame, metric="accuracy", test_rows=0)


def test_an_accuracy_has_the_noise_of_its_test_rows() -> None:
    """Of 400 test rows, by drawing; over seeds both parts add up."""
    frame = pd.DataFrame({"100": [0.5, 0.6], "1k": [0.75, 0.9]}, index=["a", "b"])
    noise = read_table(frame, metric="accuracy", test_rows=400).noise
    drawn = np.random.default_rng(0).random((20_000, 400))
    expected = [[(drawn < score).mean(1).std() for score in row] for row in frame.to_numpy()]
    assert noise is not None
    np.testing.assert_allclose(noise, expected, rtol=0.03)
    assert read_table(frame, metric="f1", test_rows=400).noise is None
    assert read_table(frame, metric="mean squared error", test_rows=400).noise is None, "no share"
    runs = {"model": list("aabb"), "rows": 100, "seed": [0, 1, 0, 1], "error": [0.2, 0.4, 0.3, 0.3]}
    both = read_table(pd.DataFrame(runs), metric="error", test_rows=400).noise
    assert both is not None
    sampling = 0.3 * 0.7 / 400
    np.testing.assert_allclose(both[:, 0] ** 2, [0.1**2 + sampling, sampling], rtol=1e-9)


FRAME = pd.DataFrame({100: [2.0, 3.0], 1000: [1.5, 2.5]}, index=["a", "b"])


@pytest.mark.parametrize(
    "frame",
    [
        FRAME,
        FRAME.rename(columns=float),
        FRAME.rename(columns=np.float64),
        FRAME.rename(columns=str),
        FRAME.rename(columns={100: "n=100", 1000: "1k"}),
        FRAME.rename_axis("name").reset_index(),
        FRAME.reset_index(names="checkpoint"),
        FRAME.reset_index(names="who"),  # names in a first column, as in a csv file
        FRAME.reset_index(names="who").set_index(pd.Index([5, 3])),  # rows of a larger one
        FRAME.assign(family="x", best=[True, False]),
        FRAME.astype(object).where(FRAME > 0, None),
        FRAME.convert_dtypes(),
        FRAME.stack().rename("loss").rename_axis(["model", "size"]).reset_index(),
    ],
)
def test_frames(frame: pd.DataFrame) -> None:
    table = read_table(frame)
    assert table.names == ("a", "b") and table.sizes.tolist() == [100, 1000]
    assert table.losses.tolist() == [[2, 1.5], [3, 2.5]]


def test_frames_that_are_refused() -> None:
    with pytest.raises(TableError, match=r"column '100' twice .pandas calls the second '100.1'"):
        read_table(FRAME.assign(**{"100.1": 1.0}).rename(columns=str))
    with pytest.raises(TableError, match="the table has numbers in 'year', not named by a size"):
        read_table(FRAME.assign(year=2024))
    with pytest.raises(TableError, match="no column of the table names the models, and its first"):
        read_table(FRAME.reset_index(drop=True))
    with pytest.raises(TableError, match="the table has numbers in '-5', not named by a size"):
        read_table(FRAME.assign(**{"-5": 1.0}))


def test_a_loss_table_has_its_metric_already() -> None:
    table = read_table(FRAME)
    assert read_table(table) is table
    scores = read_table(FRAME / 10, metric="accuracy")
    assert read_table(scores, metric="accuracy") is scores
    for source, metric in ((table, "accuracy"), (scores, "loss")):
        with pytest.raises(TableError, match="the LossTable holds losses made from"):
            read_table(source, metric=metric)


def test_a_file_without_a_last_newline_is_read_with_a_warning(tmp_path: Path) -> None:
    """So spreadsheets write csv; but the last cell may also be half of what it was."""
    path = tmp_path / "t.csv"
    path.write_text("name,200,400\na,2,1\nb,2,1.5")
    with pytest.warns(UserWarning, match="its last line is read as 'b,2,1.5'"):
        table = read_table(path)
    np.testing.assert_array_equal(table.losses, [[2, 1], [2, 1.5]])


def test_a_folder_is_for_read_runs(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"is a folder; jx.scaling.read_runs"):
        read_table(tmp_path)


def test_a_csv_file_is_read_without_pandas(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("name,100,1k\na,2,1\nb,3,2\n")
    program = (
        "import sys; sys.modules['pandas'] = None\n"
        "from jachess_ext.scaling import read_table\n"
        "for path in sys.argv[1:]: print(read_table(path).losses.tolist())\n"
    )
    seeds = tmp_path / "seeds.csv"
    seeds.write_text("name,seed,100\na,0,2\na,1,1\nb,0,2\n")
    result = processes.run([sys.executable, "-c", program, path, seeds], check=True)
    assert result.stdout.split("\n")[:2] == ["[[2.0, 1.0], [3.0, 2.0]]", "[[1.5], [2.0]]"]


def test_losses_of_a_table_made_by_hand_are_shown_as_they_are() -> None:
    table = LossTable(("a",), np.array([1.0]), np.array([[2.0]]), None)
    assert table.to_metric(2.0) == 2.0 and table.label == "loss" and table.noise is None


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan, math.inf])
def test_numbers_of_parameters_are_positive(count: float) -> None:
    table = LossTable(("a", "b"), np.array([1.0]), np.ones((2, 1)), np.array([1e6, count]))
    with pytest.raises(TableError, match=f"number of parameters of 'b' is {count:g}; expected a"):
        table.known_parameters()


def test_two_numbers_of_parameters_of_one_model_are_refused() -> None:
    frame = pd.DataFrame(
        {"model": ["a", "a", "b", "b"], "params": ["1M", "2M", "3M", "3M"], "rows": [10, 20] * 2}
    )
    with pytest.raises(TableError, match="the table has two numbers of parameters of 'a'"):
        read_table(frame.assign(loss=[2.0, 1.0, 3.0, 2.0]))


SHARES = {"0.02": 20, "7.5%": 75}


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("written", ["csv", "commas", "frame", "jsonl"])
@pytest.mark.parametrize("share", ["0.02", "7.5%"])
def test_shares_of_the_data_are_sizes_once_it_is_said_of_how_many(
    written: str, long: bool, share: str, tmp_path: Path
) -> None:
    """Never 0.25 examples: in every form of a table, refused or a share of what `full` says."""
    decimal = "," if written == "commas" else "."
    text = share.replace(".", decimal)
    frame = pd.DataFrame({"model": ["a", "b"], text: [2.0, 3.0], "1": [1.0, 2.0]})
    if long:
        frame = frame.melt("model", var_name="rows", value_name="loss")
    source: Any = frame if written == "frame" else tmp_path / f"table.{written}"
    if written == "jsonl":
        frame.to_json(source, orient="records", lines=True)
    elif written != "frame":
        frame.to_csv(source, index=False, sep=";", decimal=decimal)
    with pytest.raises(TableError, match=r"full=N"):
        read_table(source, decimal=decimal)
    table = read_table(source, decimal=decimal, full=1000)
    assert table.sizes.tolist() == pytest.approx([SHARES[share], 1000], rel=1e-12)
    assert table.losses.tolist() == [[2, 1], [3, 2]]


@pytest.mark.parametrize(
    "header", ["1000", "1k", "1,000", "101 %", "1.5", "n=1000", "n=1", "1 rows"]
)
def test_what_is_no_share(header: str) -> None:
    frame = pd.DataFrame({"model": ["a", "b"], "0.5": [2.0, 3.0], header: [1.0, 2.0]})
    with pytest.raises(TableError, match=rf"'{header}' is no share of the data, from 0 to 1"):
        read_table(frame, full=1000)


@pytest.mark.parametrize("full", [0, -5])
def test_full_is_a_number_of_examples(full: int) -> None:
    frame = pd.DataFrame({"model": ["a", "b"], "0.5": [1.0, 2.0], "1": [2.0, 3.0]})
    with pytest.raises(TableError, match=f"full is {full}; expected the examples"):
        read_table(frame, full=full, metric="loss")
    with pytest.raises(TableError, match="the LossTable holds losses"):
        read_table(read_table(frame, full=1000, metric="loss"), full=7)


def test_shares_leave_numbers_of_parameters_alone() -> None:
    frame = pd.DataFrame({"model": ["a", "b"], "params": ["110M", "7B"], "50%": [2, 3], 1: [1, 2]})
    table = read_table(frame, full=1000)
    assert table.parameters is not None and table.parameters.tolist() == [110e6, 7e9]
    with pytest.raises(TableError, match=r"1.3 in column 'params' .* is no number of parameters"):
        read_table(frame.assign(params=[1.3, 7.0]), full=1000)


def test_error_rates_in_per_cent_have_no_sampling_noise() -> None:
    frame = pd.DataFrame({100: [24.0, 23.0], 1000: [21.0, 19.0]}, index=["a", "b"])
    assert read_table(frame, metric="error rate:lower").noise is None
    with pytest.raises(TableError, match="error goes up to 24, and test_rows is for shares"):
        read_table(frame, metric="error", test_rows=400)
    noise = read_table(frame / 100, metric="error", test_rows=400).noise
    assert noise is not None and noise[0, 0] == pytest.approx((0.24 * 0.76 / 400) ** 0.5)


@pytest.mark.parametrize("last", ["| b | 3", "| b", "| b | 3 | 2 | 1 |"])
def test_a_markdown_table_that_is_cut(last: str, tmp_path: Path) -> None:
    path = tmp_path / "t.md"
    path.write_text(f"| name | 100 | 1k |\n|---|---|---|\n| a | 2 | 1.5 |\n{last}\n")
    with pytest.raises(TableError, match=r"line 4 of .* cells where the header has 3"):
        read_table(path)
