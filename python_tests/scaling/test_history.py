"""`history=`: what models did on earlier tables moves their forecasts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jachess_ext.lab.cli import main
from jachess_ext.scaling import LossTable, Search, Selection, TableError, select
from python_tests.scaling import tables

BUDGET, TARGET = 51200, 1638400  # 1/32
MODELS = 7


def table(seed: int, models: int = MODELS) -> LossTable:
    whole = tables.population(seed, models, noise=0.02, bend=0.01)[0]
    return replace(whole, sizes=whole.sizes[5:], losses=whole.losses[:, 5:], parameters=None)


TABLE = table(0)
EARLIER = [table(seed) for seed in range(1, 6)]
TODAY = select(TABLE, BUDGET, TARGET)


def frame(losses: LossTable) -> pd.DataFrame:
    columns = [int(size) for size in losses.sizes]
    return pd.DataFrame(losses.losses, list(losses.names), columns)


def moved(*earlier: object, target: float = TARGET, of: LossTable = TABLE) -> Selection:
    return select(of, BUDGET, target, history=list(earlier))  # type: ignore[arg-type]


@cache
def moved_by_all() -> Selection:
    return moved(*EARLIER)


def shift(selection: Selection) -> np.ndarray:
    return np.log(selection.scores / TODAY.scores)


def standardised(losses: LossTable) -> np.ndarray:
    last = np.log(losses.losses[:, -1])
    return (last - last.mean()) / last.std()


def test_forecasts_move_by_the_mean_standing() -> None:
    some = [EARLIER[0].rows(np.arange(5)), EARLIER[1].rows(np.arange(6)), *EARLIER[2:]]
    standings = pd.DataFrame(
        {place: pd.Series(standardised(each), each.names) for place, each in enumerate(some)}
    ).reindex(TABLE.names)
    mean = standings.sum(axis=1) / (standings.notna().sum(axis=1) + 5)
    expected = 0.6 * np.log(TODAY.scores).std() * (mean - mean.mean())
    result = moved(*some)
    np.testing.assert_allclose(shift(result), expected, rtol=0, atol=1e-9)
    assert np.abs(shift(result)).max() > 1e-3
    assert "5 of 5 earlier tables hold 7 of the 7 models; with them" in result.history_note
    assert result.history_note in result.text()


def test_forecast_and_probabilities_move_with_the_score_and_keep_their_widths() -> None:
    result = moved_by_all()
    by = shift(result)
    mixture, moved_worlds = TODAY.forecast.mixture, result.forecast.mixture
    assert mixture is not None and moved_worlds is not None
    np.testing.assert_array_equal(moved_worlds.weights, mixture.weights)
    for before, after in (
        (TODAY.forecast.predictive, result.forecast.predictive),
        *zip(mixture.components, moved_worlds.components, strict=True),
    ):
        assert before is not None and after is not None
        np.testing.assert_allclose(after.location - before.location, by, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(after.scale, before.scale)
    order = np.argsort(result.scores)
    assert (np.diff(result.best_probabilities[order]) <= 0).all()


def test_without_tables_nothing_changes() -> None:
    strangers = replace(EARLIER[0], names=tuple(f"other-{n}" for n in range(MODELS)))
    for result in (moved(), moved(strangers), select(TABLE, BUDGET, TARGET, history=())):
        np.testing.assert_array_equal(result.scores, TODAY.scores)
        np.testing.assert_array_equal(result.predicted_losses, TODAY.predicted_losses)
        np.testing.assert_array_equal(result.best_probabilities, TODAY.best_probabilities)
    assert "0 of 1 earlier tables hold 0 of the 7 models; nothing moved" in moved(strangers).text()
    assert "History" not in TODAY.text()


def test_neither_the_order_of_tables_and_rows_nor_units_nor_spaces_count() -> None:
    order = np.random.default_rng(0).permutation(MODELS)
    others = [
        EARLIER[3].rows(order),
        replace(EARLIER[0], losses=EARLIER[0].losses * 10),
        replace(EARLIER[2], losses=EARLIER[2].losses / np.log(2)),
        replace(EARLIER[4], names=tuple(f" {name} " for name in TABLE.names)),
        EARLIER[1],
    ]
    np.testing.assert_allclose(shift(moved(*others)), shift(moved_by_all()), rtol=0, atol=1e-7)


def test_a_table_of_another_metric_or_of_other_sizes_counts_alike() -> None:
    short = [replace(each, sizes=each.sizes[-2:], losses=each.losses[:, -2:]) for each in EARLIER]
    for others in (short, [select_table(1 - frame(each) / 10) for each in short]):
        np.testing.assert_allclose(shift(moved(*others)), shift(moved_by_all()), rtol=0, atol=1e-9)


def select_table(scores: pd.DataFrame) -> LossTable:
    from jachess_ext.scaling import read_table

    return read_table(scores, metric="accuracy")


def test_one_table_moves_little_and_ten_the_more() -> None:
    first, second = np.argsort(TODAY.scores)[:2]
    losses = TABLE.losses[np.argsort(np.argsort(TODAY.scores))] * 1.3  # any order but today's
    losses[second] = losses.min(0) * 0.9

    def gap(count: int) -> float:
        noise = np.random.default_rng(0).normal(0, 0.01, (count, *losses.shape))
        result = moved(*(replace(TABLE, losses=losses * np.exp(each)) for each in noise))
        return float(np.log(result.scores[first] / result.scores[second]))

    gaps = [gap(count) for count in (0, 1, 10)]
    assert (np.diff(gaps) > 0).all()
    assert gaps[2] - gaps[0] == pytest.approx(4 * (gaps[1] - gaps[0]), rel=0.3)  # 10/15, 1/6


def test_a_model_in_no_table_keeps_its_forecast_and_the_others_their_mean() -> None:
    known = np.arange(1, MODELS)
    result = moved(*(each.rows(known) for each in EARLIER))
    assert result.scores[0] == TODAY.scores[0]
    assert result.predicted_losses[0] == TODAY.predicted_losses[0]
    assert np.abs(shift(result)[1:]).min() > 0 and abs(shift(result).sum()) < 1e-12


def test_runs_of_the_table_itself_are_refused() -> None:
    wider = replace(
        TABLE,
        names=(*TABLE.names, "more"),
        losses=np.vstack([TABLE.losses, np.ones(len(TABLE.sizes))]),
    )
    at_target = replace(TABLE, sizes=TABLE.sizes[-1:], losses=TABLE.losses[:, -1:])
    rounded = replace(TABLE, losses=TABLE.losses.round(3))
    some = TABLE.rows(np.array([3, 1]))
    half = replace(TABLE, losses=TABLE.losses * np.where(np.arange(10) % 2, 1.0, 2.0))
    for same in (TABLE, wider, at_target, rounded, some, half):
        with pytest.raises(TableError, match="table 2 holds runs of the table to choose from"):
            moved(EARLIER[0], same)
    with pytest.raises(TableError, match="table 1 and table 3 hold the same runs"):
        moved(EARLIER[0], EARLIER[1], replace(EARLIER[0], losses=EARLIER[0].losses.round(4)))


def test_files_are_read_as_the_table_and_named_in_errors(tmp_path: Path) -> None:
    expected = moved(*EARLIER[:2]).scores
    for number, each in enumerate(EARLIER[:2]):
        frame(each).to_csv(tmp_path / f"{number}.csv")
    for sources in (str(tmp_path), [tmp_path / "0.csv", frame(EARLIER[1])]):
        result = select(TABLE, BUDGET, TARGET, history=sources)  # type: ignore[arg-type]
        np.testing.assert_allclose(result.scores, expected, rtol=1e-12)
    (tmp_path / "9.csv").write_text("model,100,200\na,1.0,x\nb,1.0,2.0\n")
    with pytest.raises(TableError, match=r"the history's .*9\.csv: .*'x'"):
        select(TABLE, BUDGET, TARGET, history=tmp_path)
    (tmp_path / "9.csv").write_text("model,100,200\na,0.5,0.7\nb,0.6,0.8\n")
    with pytest.raises(
        TableError, match=r"9\.csv: .* rise.*\(by a pair .*, or --history-metric\)"
    ) as raised:
        select(TABLE, BUDGET, TARGET, history=tmp_path)
    assert not raised.value.options  # they would be those of the table to choose from
    assert "2 of 3" in select(TABLE, BUDGET, TARGET, history=[(tmp_path, "loss")]).history_note
    (tmp_path / "9.csv").write_text("model,100,lr\na,0.5,0.7\nb,0.6,0.8\n")
    with pytest.raises(TableError, match=r"'lr', .*\(give the LossTable of read_table, told so\)"):
        select(TABLE, BUDGET, TARGET, history=tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(TableError, match=r"none has no file \.csv"):
        select(TABLE, BUDGET, TARGET, history=[tmp_path / "none"])
    zero = replace(EARLIER[0], losses=EARLIER[0].losses * (np.arange(MODELS) > 0)[:, None])
    with pytest.raises(TableError, match="table 1: the loss of 'model-0' at size"):
        moved(zero)


def test_files_may_tell_another_metric() -> None:
    rows = frame(EARLIER[0]).rename_axis("model").reset_index()
    losses = rows.melt("model", var_name="rows", value_name="eval_loss")
    scores = 1 - frame(TABLE) / 10
    result = select(scores, BUDGET, TARGET, metric="accuracy", history=losses)
    expected = select(scores, BUDGET, TARGET, metric="accuracy", history=EARLIER[0])
    np.testing.assert_array_equal(result.scores, expected.scores)
    named = select(scores, BUDGET, TARGET, metric="accuracy", history=[(losses, "accuracy")])
    np.testing.assert_array_equal(named.scores, expected.scores, "its own name goes before")
    pairs = [(1 - frame(EARLIER[0]) / 10, "accuracy")]
    result = select(scores, BUDGET, TARGET, metric="accuracy", history=pairs)
    expected = select(TABLE, BUDGET, TARGET, history=EARLIER[0])
    np.testing.assert_allclose(result.scores, expected.scores / 10, rtol=1e-9)


@pytest.mark.parametrize("method", ["ats", "subtuning", "modelsize"])
def test_other_methods(method: str) -> None:
    sized = replace(TABLE, parameters=np.arange(1.0, 1 + MODELS))
    before = select(sized, BUDGET, TARGET, method)
    after = select(sized, BUDGET, TARGET, method, history=EARLIER)
    if method == "modelsize":
        assert "the method predicts no loss; nothing moved" in after.history_note
        assert (after.scores == before.scores).all()
    else:
        assert (after.scores != before.scores).all()


def search(**settings: object) -> Search:
    sizes = [int(size) for size in TABLE.sizes if size <= BUDGET]
    return Search(TABLE.names, sizes, TARGET, **settings)  # type: ignore[arg-type]


def test_a_search_chooses_as_select_does_and_keeps_its_history() -> None:
    live = search(history=EARLIER)
    live.add_table(TABLE.up_to(BUDGET))
    np.testing.assert_allclose(live.selection().scores, moved_by_all().scores, rtol=1e-12)
    assert live.selection().history_note == moved_by_all().history_note
    again = Search.from_state(json.loads(json.dumps(live.state())))
    np.testing.assert_array_equal(again.selection().scores, live.selection().scores)
    scores = search(history=select_table(1 - frame(EARLIER[0]) / 10)).state()
    assert Search.from_state(scores).state() == scores
    assert scores["history"][0]["metric"] == "accuracy"
    own = search(history=[TABLE])
    own.add_table(TABLE.up_to(BUDGET))
    with pytest.raises(TableError, match="holds runs of the table to choose from"):
        own.selection()


def test_the_command_says_what_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame(TABLE).to_csv(tmp_path / "losses.csv")
    (tmp_path / "earlier").mkdir()
    for place, each in enumerate(EARLIER[:2]):
        frame(each).to_csv(tmp_path / "earlier" / f"{place}.csv")
    words = ["select", str(tmp_path / "losses.csv"), "--budget", "51200", "--target", "1638400"]
    out = tmp_path / "ranking.json"
    assert main([*words, "--history", str(tmp_path / "earlier"), "--out", str(out)]) == 0
    expected = moved(*EARLIER[:2])
    assert expected.history_note in capsys.readouterr().out
    assert json.loads(out.read_text())["history"] == expected.history_note
    scores = tmp_path / "scores.csv"
    (1 - frame(EARLIER[0]) / 10).to_csv(scores)
    assert main([*words, "--history", str(scores)]) == 2
    assert "--history-metric" in capsys.readouterr().err
    assert main([*words, "--history", str(scores), "--history-metric", "accuracy"]) == 0
    expected = moved(select_table(1 - frame(EARLIER[0]) / 10))
    assert expected.history_note in capsys.readouterr().out
    assert main([*words, "--history", str(tmp_path / "losses.csv")]) != 0
    assert "holds runs of the table to choose from" in capsys.readouterr().err
