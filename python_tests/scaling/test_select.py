"""`select` from a table: every method, what comes out, cost, and bad tables."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from jachess_ext._io import DataError
from jachess_ext.scaling import LossTable, Selection, TableError, read_table, select
from jachess_ext.scaling.blend import no_signal_probability
from jachess_ext.scaling.methods import METHODS
from python_tests.scaling import tables

TABLE, CLEAN = tables.population(0)
BUDGET, TARGET = 51200, 1638400
WITH_DISTRIBUTION = ["blend", "rectified", "power", "ats"]


def frame(table: LossTable = TABLE) -> pd.DataFrame:
    result = pd.DataFrame(table.losses, list(table.names), [int(size) for size in table.sizes])
    result["size"] = table.parameters
    result["family"] = "x"
    return result


@cache
def chosen(method: str = "blend") -> Selection:
    return select(TABLE, BUDGET, TARGET, method)


@pytest.mark.parametrize("method", WITH_DISTRIBUTION)
def test_methods_that_predict(method: str) -> None:
    found = chosen(method)
    assert sorted(found.ranking) == sorted(TABLE.names)
    assert found.ranking == [found.names[place] for place in found.scores.argsort()]
    np.testing.assert_array_equal(found.scores, found.predicted_losses)
    frame = found.to_frame()
    assert (frame.low < frame.predicted).all() and (frame.predicted < frame.high).all()
    low, high = found.interval_ends(0.9)
    np.testing.assert_allclose(frame.low, low[found.scores.argsort()], rtol=1e-12)
    wider = found.interval_ends(0.95)
    assert (wider[0] < low).all() and (high < wider[1]).all()
    assert frame.prob_best.sum() == pytest.approx(1.0)
    assert frame.prob_best.idxmax() < 5
    assert frame["rank"].tolist() == list(range(1, 21)) and frame.name.tolist() == found.ranking
    assert frame.cost.sum() == pytest.approx(found.flops / found.full_flops)
    assert "of all in full" in found.text()


def test_methods_that_only_rank() -> None:
    table = TABLE
    last = select(table, BUDGET, TARGET, "subtuning")
    assert last.ranking[0] == table.names[int(table.losses_at(BUDGET).argmin())]
    zero = select(table, BUDGET, TARGET, "zeroshot")
    assert zero.ranking[0] == table.names[int(table.losses[:, 0].argmin())]
    size = select(table, BUDGET, TARGET, "modelsize")
    assert size.ranking[0] == table.names[int(table.parameters.argmax())]
    for found in (zero, size):
        with pytest.raises(ValueError, match="gives no distribution"):
            found.interval_ends()
    with pytest.raises(ValueError, match="predicts no loss"):
        _ = size.predicted_losses
    frame = size.to_frame()
    assert frame.score.notna().all()
    assert frame[["predicted", "low", "prob_best"]].isna().all(axis=None)


def test_the_plot_shows_what_was_read_and_what_is_predicted() -> None:
    axes = chosen().plot()
    drawn = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    losses = TABLE.trained_losses[:, TABLE.trained <= BUDGET]
    for name, row in zip(TABLE.names, losses, strict=True):
        np.testing.assert_array_equal(drawn[name][:, 1], row)
    crosses = [line.get_ydata()[0] for line in axes.get_lines() if line.get_marker() == "x"]
    assert sorted(crosses) == sorted(TABLE.losses_at(TARGET))
    with pytest.raises(ValueError, match="predicts no loss"):
        chosen("modelsize").plot()


def test_what_the_order_and_the_target_need_said() -> None:
    """No order contradicts the forecasts, and a table that holds the answer says so."""
    found = chosen()
    (measured,) = found.notes
    assert found.to_frame().predicted.is_monotonic_increasing
    best = TABLE.names[int(TABLE.losses_at(TARGET).argmin())]
    assert f"{best} has the best, {TABLE.losses_at(TARGET).min():#.4g}." in measured
    assert all(note in found.text() for note in found.notes)
    np.testing.assert_array_equal(
        found.to_frame().set_index("name").measured[[*TABLE.names]], TABLE.losses_at(TARGET)
    )
    assert select(TABLE, BUDGET, TARGET + 1, "power").notes == []
    losses = TABLE.losses.copy()
    losses[3:, -1] = np.nan
    some = select(replace(TABLE, losses=losses), BUDGET, TARGET)
    assert some.measured is not None and np.isfinite(some.measured).sum() == 3
    losses[:, -1] = np.nan
    assert select(replace(TABLE, losses=losses), BUDGET, TARGET).measured is None


def test_only_the_budget_is_read() -> None:
    losses = TABLE.losses.copy()
    losses[:, TABLE.sizes > BUDGET] = np.nan
    hidden = LossTable(TABLE.names, TABLE.sizes, losses, TABLE.parameters)
    for method in WITH_DISTRIBUTION:
        np.testing.assert_array_equal(
            select(hidden, BUDGET, TARGET, method).predicted_losses,
            chosen(method).predicted_losses,
        )


def test_cost_of_every_method() -> None:
    n = TABLE.parameters
    sizes = TABLE.trained[TABLE.trained <= BUDGET]
    everything = 6 * n.sum() * sizes.sum()
    for method in ("blend", "lensllm", "rectified", "power"):
        assert chosen(method).flops == pytest.approx(everything)
    sub = select(TABLE, BUDGET, TARGET, "subtuning", tokens=100, epochs=3)
    assert sub.flops == pytest.approx(300 * 6 * n.sum() * BUDGET)
    assert sub.full_flops == pytest.approx(300 * 6 * n.sum() * TARGET)
    assert chosen("zeroshot").flops == 0
    # Algorithm 1 halves from the budget down and stops: never more than everything.
    early = select(TABLE, BUDGET, TARGET, "ats", tau=1e-9)
    four = sizes[-4:].sum()  # three accepted unseen, the fourth refused
    assert early.flops == pytest.approx(6 * n.sum() * four)
    assert select(TABLE, BUDGET, TARGET, "ats", tau=1e9).flops == pytest.approx(everything)
    bare = LossTable(TABLE.names, TABLE.sizes, TABLE.losses, None)
    with pytest.raises(TableError, match="no column 'size'"):
        _ = select(bare, BUDGET, TARGET, "ats").flops
    assert select(bare, BUDGET, TARGET, "zeroshot").flops == 0


def test_prob_best_against_drawing() -> None:
    """What the models' errors do not share is of one width: from the intervals and the falls."""
    found = chosen("ats")
    fall = np.log(TABLE.up_to(BUDGET).losses[:, -1] / found.predicted_losses)
    assert found.forecast.predictive is not None
    own = np.hypot(np.median(found.forecast.predictive.scale), fall.std())
    draws = np.random.default_rng(0).standard_normal((200_000, 20))
    share = np.bincount((np.log(found.scores) + own * draws).argmin(1), minlength=20) / 200_000
    expected = 0.95 * share + 0.05 / 20  # one in twenty times no forecast tells
    np.testing.assert_allclose(found.best_probabilities, expected, atol=0.005)


@pytest.mark.parametrize("method", ["blend", "ats"])
def test_the_first_is_the_most_probable(method: str) -> None:
    table, _ = tables.population(0, models=8, noise=0.05)
    found = select(table, 12800, 204800, method)
    chances = dict(zip(found.names, found.best_probabilities, strict=True))
    assert sorted(found.ranking, key=lambda name: -chances[name]) == found.ranking


def test_noise_that_is_known_widens_intervals_and_doubts() -> None:
    """Standard errors over seeds of a tenth, where the curves themselves are smooth."""
    noise = np.full(TABLE.losses.shape, 0.1) * TABLE.losses
    plain = chosen()
    noisy = select(replace(TABLE, noise=noise), BUDGET, TARGET)
    np.testing.assert_array_equal(noisy.predicted_losses, plain.predicted_losses)
    before, after = (np.log(found.interval_ends(0.9)[1]) for found in (plain, noisy))
    centre, wide = np.log(plain.predicted_losses), student.ppf(0.95, 4)
    expected = np.hypot((before - centre) / wide, 0.1)
    np.testing.assert_allclose((after - centre) / wide, expected, rtol=1e-9)
    assert noisy.best_probabilities.max() < plain.best_probabilities.max()
    one, two = plain.forecast.mixture, noisy.forecast.mixture
    assert one is not None and two is not None
    for before, after in zip(one.components, two.components, strict=True):
        np.testing.assert_allclose(after.scale, np.hypot(before.scale, 0.1), rtol=1e-9)


def test_models_at_the_level_of_guessing_are_named() -> None:
    """By the loss within 2 %, by an error rate within two standard errors of its test rows."""
    losses = [[1.95, 1.7, 1.2, 0.9], [1.97, 1.96, 1.94, 1.93], [2.0, 1.95, 1.9, 1.86]]
    table = LossTable(tuple("012"), 100.0 * 2 ** np.arange(4), np.array(losses), None)
    selection = select(table, classes=7, target=6400)
    (note,) = [note for note in selection.notes if "guessing" in note]
    assert f"{np.log(7):.4g}: '1'. Leads" in note
    plain = select(table, target=6400)
    assert not any("guessing" in note for note in plain.notes)
    wide = np.hypot(plain.forecast.predictive.scale, 0.15 * np.log(7) * np.log2(6400 / 800))
    np.testing.assert_allclose(selection.forecast.predictive.scale, wide, rtol=1e-12)
    one, two = (found.forecast.mixture.components[0].scale for found in (plain, selection))
    late = np.array([0, 0.15 * np.log(7) * np.log2(6400 / 800), 0])  # of the one that guesses
    np.testing.assert_allclose(two, np.hypot(one, late), rtol=1e-12)
    errors = pd.DataFrame(
        [[0.5, 0.46, 0.44], [0.5, 0.49, 0.34], [0.4, 0.3, 0.2]],
        ["near", "off", "far"],
        [100, 200, 400],
    )
    for rows, names in ((100, "'near'"), (30, "'near', 'off'"), (10_000, None)):
        table = read_table(errors, metric="error", test_rows=rows)
        notes = " ".join(select(table, target=3200, classes=2).notes)
        assert (f"guessing, 0.5000: {names}. Leads" if names else "guessing") in notes or not names
        assert ("guessing" in notes) == bool(names)
    assert "0.7500: 'near'" not in " ".join(select(table, target=3200, classes=4).notes)
    high = read_table(errors + 0.3, metric="error")  # .75 is guessing among four; .74, .64, .5
    assert "guessing, 0.7500: 'near'. L" in " ".join(select(high, target=3200, classes=4).notes)
    scores = read_table(1 - errors, metric="f1")
    assert "guessing" not in " ".join(select(scores, target=3200, classes=2).notes)


CALLS = [
    ({"classes": 1}, "classes is 1; expected 2 or more"),
    ({"method": "magic"}, "unknown method 'magic'"),
    ({"budget": -1}, "budget is -1"),
    ({"target": 51200}, "is not above the budget"),
    ({"budget": 2e6, "target": 3e6}, "outside the table's sizes, "),
    ({"target": None}, "target is missing"),
    ({"budget": 200, "method": "lensllm"}, "lensllm needs 3 sizes .* and model-0 has 1"),
    ({"tokens": 0}, "tokens is 0"),
    ({"method": "ats", "gamma": 1}, "gamma is 1"),
]


@pytest.mark.parametrize(("change", "words"), CALLS)
def test_bad_calls(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        select(**({"table": TABLE, "budget": BUDGET, "target": TARGET} | change))


FRAMES = [
    (lambda f: f.iloc[:1], "has 1 models"),
    (lambda f: f.assign(**{"size": 0.0}), "of 'model-0' is 0; expected a positive"),
    (lambda f: f.drop(columns=[0]), "needs a column 0"),
]


@pytest.mark.parametrize(("change", "words"), FRAMES)
def test_bad_frames(change, words: str) -> None:  # type: ignore[no-untyped-def]
    method = "modelsize" if "of 'model-0' is 0" in words else "zeroshot"
    with pytest.raises(TableError, match=words):
        select(change(frame()), BUDGET, TARGET, method)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.inf, "'model-3' at size 800 is inf; expected a positive number$"),
        (-1.0, "'model-3' at size 800 is -1"),
        (0.0, "is 0; expected a positive number .*half a test example"),
    ],
)
def test_bad_losses(value: float, words: str) -> None:
    bad = frame()
    bad.loc["model-3", 800] = value
    with pytest.raises(TableError, match=words):
        select(bad, BUDGET, TARGET)
    assert select(bad, 400, TARGET, "ats").ranking  # what is not read cannot hurt


FILES = [
    ("name,200,400\na,1,2\nb,1\n", "line 3 .* has 2 cells"),
    ("name,200,400\n", "0 models"),
]


@pytest.mark.parametrize(("content", "words"), FILES)
def test_bad_files(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(TableError, match=words):
        read_table(path)


def test_no_file_and_no_table(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv cannot be read: No such file"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes("n\xe4me,100\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.csv is not UTF-8 text"):
        read_table(tmp_path / "latin.csv")
    with pytest.raises(TableError, match="the table is list"):
        read_table([1, 2])


# What the table of methods says -----------------------------------------------------------------

SIX, _ = tables.population(0, models=6)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.trains != "none"])
def test_fewest_sizes_are_the_fewest(name: str) -> None:
    """One size less is refused; a law has a width from one more on, blend from the fewest."""
    more = name != "blend"  # than the fewest, for a width
    for zero in (True, False) if METHODS[name].reads_zero else (True,):
        table = SIX if zero else LossTable(SIX.names, SIX.trained, SIX.trained_losses, None)
        fewest = METHODS[name].fewest_sizes(has_zero=zero)
        if fewest > 1:
            with pytest.raises(ValueError, match="size"):
                select(table, SIX.trained[fewest - 2], TARGET, name)
        for count in range(fewest, fewest + 2):
            selection = select(table, SIX.trained[count - 1], TARGET, name)
            assert selection.has_intervals == (name != "subtuning" and count >= fewest + more)


@pytest.mark.parametrize(
    ("need", "table"),
    [
        ("zero", LossTable(SIX.names, SIX.trained, SIX.trained_losses, SIX.parameters)),
        ("parameters", LossTable(SIX.names, SIX.sizes, SIX.losses, None)),
    ],
)
def test_what_methods_need(need: str, table: LossTable) -> None:
    for name in METHODS:
        if METHODS[name].needs == need:
            with pytest.raises(TableError, match="needs"):
                select(table, 51200, TARGET, name)
        else:
            assert select(table, 51200, TARGET, name).ranking


def test_without_a_kernel_lensllm_is_the_rectified_law() -> None:
    one, other = (select(SIX, 51200, TARGET, name) for name in ("lensllm", "rectified"))
    np.testing.assert_array_equal(one.predicted_losses, other.predicted_losses)


# Tables out of the ordinary: a sensible answer or a sentence, never a crash ----------------------

DOUBLED = 100.0 * 2.0 ** np.arange(6)

FALL = -0.1 * np.arange(6)
LEVELS = np.array([[1.0], [1.2], [1.5]])

ODD = {
    "rising": LEVELS * np.exp(-3 * FALL),
    "constant": LEVELS * np.ones(6),
    "all one": np.ones((3, 6)),
    "one exact power law": LEVELS * DOUBLED**-0.2,
    "a cliff": LEVELS * np.where(np.arange(6) < 4, 1.0, 1e-3),
    "tiny": 1e-12 * LEVELS * np.exp(FALL),
    "huge": 1e12 * LEVELS * np.exp(FALL),
    "one model": LEVELS[:1] * np.exp(FALL),
}


def of(losses: np.ndarray) -> LossTable:
    names = tuple(f"m{place}" for place in range(len(losses)))
    return LossTable(names, DOUBLED, losses, None)


@pytest.mark.parametrize("method", WITH_DISTRIBUTION)
@pytest.mark.parametrize("kind", ODD)
def test_odd_losses_give_an_answer(kind: str, method: str) -> None:
    found = select(of(ODD[kind]), 1600.0, 12800.0, method)
    assert sorted(found.ranking) == sorted(found.names)
    predicted = found.predicted_losses
    assert np.isfinite(predicted).all() and (predicted > 0).all()
    assert found.has_intervals
    low, high = found.interval_ends(0.9)
    assert not np.isnan(low).any() and (low <= predicted).all() and (predicted <= high).all()
    probability = found.best_probabilities
    assert probability.sum() == pytest.approx(1.0) and (probability >= 0).all()


@pytest.mark.parametrize("place", [(1, 2), (2, 4)])
@pytest.mark.parametrize("value", [1e-308, 1e250])
@pytest.mark.parametrize("method", WITH_DISTRIBUTION)
def test_one_loss_far_from_all_others(method: str, value: float, place: tuple[int, int]) -> None:
    """Numbers, or a refusal: no infinite forecast, and no P(best) that is none."""
    losses = LEVELS * np.exp(FALL)
    losses[place] = value
    try:
        found = select(of(losses), 1600.0, 12800.0, method)
    except TableError:
        raise
    except ValueError:  # no number
        return
    assert np.isfinite([found.predicted_losses, found.best_probabilities, found.scores]).all()
    assert not np.isnan(found.interval_ends()).any()


def test_rising_curves_are_not_forecast_to_fall() -> None:
    """By `blend`: above the last loss less a tenth of what was gained, and in the same order."""
    losses = ODD["rising"]
    found = select(of(losses), 1600.0, 12800.0)
    assert (found.predicted_losses > losses[:, 4] * 0.9).all()
    assert found.ranking == ["m0", "m1", "m2"]


# Candidates whose sizes differ -------------------------------------------------------------------


def with_gaps(*gaps: tuple[int, int | slice]) -> LossTable:
    losses = SIX.losses.copy()
    for row, columns in gaps:
        losses[row, columns] = np.nan
    return LossTable(SIX.names, SIX.sizes, losses, SIX.parameters)


@pytest.mark.parametrize("method", WITH_DISTRIBUTION)
def test_a_missing_cell_leaves_the_other_models_what_they_were(method: str) -> None:
    found = select(with_gaps((2, 5)), BUDGET, TARGET, method)
    others = np.array([0, 1, 3, 4, 5])  # blend learns what curves share from those with all sizes
    whole = select(SIX.rows(others), BUDGET, TARGET, method).predicted_losses
    assert found.names == SIX.names and not found.unranked
    np.testing.assert_allclose(found.predicted_losses[others], whole, rtol=1e-9)
    # the model itself is forecast as in a table without that size
    without = LossTable(SIX.names, np.delete(SIX.sizes, 5), np.delete(SIX.losses, 5, 1), None)
    alone = select(without, BUDGET, TARGET, method).predicted_losses[2]
    full = select(SIX, BUDGET, TARGET, method).predicted_losses[2]
    assert found.predicted_losses[2] == alone != full


def test_a_model_that_is_ahead_is_forecast_with_the_others_and_moved() -> None:
    """One size more of one model: what it showed beyond the joint forecast moves it, all of it."""
    gaps = [(row, slice(-1, None)) for row in (0, 1, 2, 4, 5)]
    table = with_gaps(*gaps)
    size, target = float(table.sizes[-1]), 4 * float(table.sizes[-1])
    before = LossTable(SIX.names, SIX.sizes[:-1], SIX.losses[:, :-1], SIX.parameters)
    near, far = select(before, target=size), select(before, target=target)
    found = select(table, target=target)
    moved = far.predicted_losses * table.losses[3, -1] / near.predicted_losses
    np.testing.assert_allclose(found.predicted_losses[3], moved[3], rtol=1e-9)
    others = [0, 1, 2, 4, 5]
    stays = found.predicted_losses[others], far.predicted_losses[others]
    np.testing.assert_allclose(*stays, rtol=1e-9)
    # the error grows with the doublings, two of which are left after the last size
    left = 2 / np.log2(target / before.sizes[-1])
    width = np.log(found.interval_ends(0.9)[1] / found.predicted_losses)
    full = np.log(far.interval_ends(0.9)[1] / far.predicted_losses)
    np.testing.assert_allclose(width[3], full[3] * left, rtol=1e-9)
    assert found.forecast.mixture is not None
    widths = found.forecast.mixture.components[0].scale
    np.testing.assert_allclose(widths[3] / widths[others], left, rtol=1e-9)
    assert found.forecast.trained[3] == table.trained.sum()


def test_no_signal_of_a_table_is_the_mean_over_its_models() -> None:
    """Three of six models stopped a size early, so that they are forecast by other sizes."""
    random = np.random.default_rng(1)
    losses = np.exp(random.normal(0, 0.02, (6, 5)) + 0.02 * np.arange(6)[:, None])
    losses[:3, -1] = np.nan
    table = of(np.column_stack([losses, np.full(6, np.nan)]))
    forecast = select(table, target=TARGET).forecast
    groups = ((slice(3, 6), 5), (slice(None), 4))
    own = [no_signal_probability(np.log(losses[rows, :m]), DOUBLED[:m]) for rows, m in groups]
    assert 0.05 < np.mean(own) < 0.5 and abs(own[0] - own[1]) > 0.01
    assert forecast.mixture is not None
    np.testing.assert_allclose(forecast.mixture.weights[1], np.mean(own), rtol=1e-9)


def test_a_model_with_too_few_sizes_is_listed_and_not_ranked() -> None:
    table = with_gaps((1, slice(3, None)), (4, slice(None)))  # two sizes and size 0; nothing at all
    found = select(table, BUDGET, TARGET)
    kept = [0, 2, 3, 5]
    assert found.names == tuple(SIX.names[place] for place in kept)
    assert found.unranked == {
        "model-1": "blend needs 3 sizes above 0 or more, and model-1 has 2",
        "model-4": "blend needs 3 sizes above 0 or more, and model-4 has 0",
    }
    alone = select(SIX.rows(np.array(kept)), BUDGET, TARGET)
    np.testing.assert_array_equal(found.predicted_losses, alone.predicted_losses)
    frame = found.to_frame()
    assert frame["rank"].tolist()[:4] == [1, 2, 3, 4] and frame["rank"].isna()[4:].all()
    assert frame["name"].tolist() == [*found.ranking, "model-1", "model-4"]
    assert frame["reason"].tolist()[4:] == list(found.unranked.values())
    assert frame["reason"].isna().tolist()[:4] == [True] * 4
    assert "reason" not in alone.to_frame()
    labels = [line.get_label() for line in found.plot().get_lines()]
    assert "model-0" in labels and "model-1" not in labels


def test_the_loss_before_fine_tuning_may_be_missing_of_some() -> None:
    found = select(with_gaps((3, 0)), BUDGET, TARGET, "zeroshot")
    assert list(found.unranked) == ["model-3"] and "before fine-tuning" in found.unranked["model-3"]
    assert select(with_gaps((3, 0)), BUDGET, TARGET, "lensllm").names == SIX.names


def test_without_a_budget_the_largest_size_below_the_target_is_read() -> None:
    found = select(SIX, target=f"{TARGET:,}")
    assert found.budget == 819200
    np.testing.assert_array_equal(
        found.predicted_losses, select(SIX, 819200, TARGET).predicted_losses
    )
    everywhere = with_gaps(*((row, -2) for row in range(6)))  # nobody has 819200
    assert select(everywhere, target=TARGET).budget == 409600
    with pytest.raises(TableError, match="no size below the target 100"):
        select(SIX, target=100)


def test_a_score_is_forecast_as_what_is_missing_and_shown_as_it_was() -> None:
    losses = SIX.losses / 10
    numbers = [int(size) for size in SIX.sizes]
    scores = pd.DataFrame(100 * (1 - losses), list(SIX.names), numbers)
    found = select(scores, BUDGET, TARGET, metric="accuracy")
    errors = select(LossTable(SIX.names, SIX.sizes, losses, None), BUDGET, TARGET)
    np.testing.assert_allclose(found.predicted_losses, errors.predicted_losses, rtol=1e-9)
    assert found.ranking == errors.ranking
    frame, plain = found.to_frame(), errors.to_frame()
    np.testing.assert_allclose(frame["predicted"], 100 * (1 - plain["predicted"]), rtol=1e-9)
    np.testing.assert_allclose(frame["low"], 100 * (1 - plain["high"]), rtol=1e-9)
    np.testing.assert_allclose(frame["high"], 100 * (1 - plain["low"]), rtol=1e-9)
    axes = found.plot()
    assert axes.get_ylabel() == "accuracy (per cent)" and axes.get_yscale() == "linear"
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    np.testing.assert_allclose(
        lines["model-0"], 100 * (1 - losses[0, 1 : len(lines["model-0"]) + 1])
    )
    assert errors.plot().get_yscale() == "log"


@pytest.mark.parametrize("method", WITH_DISTRIBUTION)
@pytest.mark.parametrize("target", [1e100, 1e300])
@pytest.mark.filterwarnings("ignore:overflow|divide by zero|invalid value:RuntimeWarning")
def test_a_target_out_of_reach_has_a_forecast_or_a_sentence(method: str, target: float) -> None:
    if method == "blend" and target > 1e100:
        with pytest.raises(ValueError, match="blend forecasts no number for the target 1e"):
            select(SIX, BUDGET, target, method)
        return
    found = select(SIX, BUDGET, target, method)
    assert (found.predicted_losses > 0).all() and not np.isnan(found.interval_ends()).any()
    assert not np.isnan(found.best_probabilities).any()


@pytest.mark.parametrize("method", METHODS)
def test_models_without_a_loss(method: str) -> None:
    """One of them is left out where losses are read; a table of nothing else is a sentence."""
    columns = frame(SIX)
    one, all_of_them = columns.copy(), columns.copy()
    one.loc["model-0", [int(size) for size in SIX.sizes]] = np.nan
    all_of_them[[int(size) for size in SIX.sizes]] = np.nan
    found = select(one, BUDGET, TARGET, method)
    reads_none = METHODS[method].trains == "none" and METHODS[method].needs != "zero"
    assert ("model-0" in found.ranking) == reads_none
    assert ("model-0" in found.unranked) != reads_none
    with pytest.raises(TableError, match="no model has a loss at a size up to 51200"):
        select(all_of_them, BUDGET, TARGET, method)


def test_a_perfect_score_counts_by_its_test_rows() -> None:
    """As the error says, `select` takes them."""
    scores = 1 - frame(SIX)[[int(size) for size in SIX.sizes]] / 10
    scores.iloc[0, 5] = 1.0
    with pytest.raises(TableError, match=r"is the best there is; give test_rows,"):
        select(scores, BUDGET, TARGET, metric="accuracy")
    read = read_table(scores, metric="accuracy", test_rows=50)
    expected = select(read, BUDGET, TARGET)
    assert select(scores, BUDGET, TARGET, metric="accuracy", test_rows=50).text() == expected.text()
    with pytest.raises(TableError, match="give them where the LossTable is made"):
        select(read, BUDGET, TARGET, test_rows=50)
