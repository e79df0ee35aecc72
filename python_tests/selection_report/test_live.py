"""The page of a live selection: curves, kernels and costs are those of the folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jachess_ext.evaluation.report import to_html
from jachess_ext.live_selection.predict import fit_measured, predict
from jachess_ext.scaling.baselines import mean_exponent
from jachess_ext.selection_report import heavy_tails
from jachess_ext.selection_report.from_live import study_of_folder
from jachess_ext.selection_report.page import scientific, sections, write_page
from jachess_ext.selection_report.study import Study
from jachess_ext.tasks.examples import DataError
from python_tests.browser import assert_shown
from python_tests.evaluation.test_report import Page
from python_tests.selection_report import drawn, live_folder, studies
from python_tests.selection_report.live_folder import TARGET
from python_tests.selection_report.test_figures import every_figure

TRUTH = {"zoo/a": 0.6, "zoo/b": 0.5, "zoo/c": 0.7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live")
    live_folder.make(path, live_folder.curves())
    return path


@pytest.fixture(scope="module")
def study(folder: Path) -> Study:
    return study_of_folder(folder)


def test_the_candidates(study: Study) -> None:
    made = {curve.model: curve for curve in live_folder.curves()}
    ranking = predict(list(made.values()), TARGET, "blend")
    assert [one.name for one in study.candidates] == [one.model for one in ranking]
    for one, expected in zip(study.candidates, ranking, strict=True):
        curve = made[one.name]
        assert one.label == one.name.removeprefix("zoo/")
        np.testing.assert_array_equal(one.sizes, curve.sizes)
        np.testing.assert_array_equal(one.losses, curve.losses)
        assert (one.predicted, one.prob_best) == (expected.predicted, expected.prob_best)
        assert one.forecast is not None and one.forecast.middle[-1] == expected.predicted
        assert one.law is not None
        law = fit_measured(curve)
        np.testing.assert_allclose(one.law.middle, law.predict(one.law.sizes))
        assert one.truth is None and len(one.kept_aside[0]) == 0


def test_the_kernels_by_their_definitions(study: Study) -> None:
    """Oracle: numpy's norms of Θ itself, and of Θ's square for the effective rank."""
    assert study.kernels is not None and study.kernels.rows == 10
    for curve in live_folder.curves():
        points = study.kernels.points[curve.model.removeprefix("zoo/")]
        start = curve.kernels[0].theta.reshape(10, 10).astype(np.float64)
        for point, record, kernel in zip(points, curve.records, curve.kernels, strict=True):
            theta = kernel.theta.reshape(10, 10).astype(np.float64)
            assert point.size == record.size
            assert point.norm == pytest.approx(np.linalg.norm(theta), rel=1e-5)
            rank = np.trace(theta) ** 2 / np.trace(theta @ theta)
            assert point.rank == pytest.approx(rank, rel=1e-5)
            drift = np.linalg.norm(theta - start) / np.linalg.norm(start)
            assert point.drift == pytest.approx(drift, abs=1e-6)
            assert (point.predicted, point.measured) == (0.75, 0.5)


def test_the_history_counts_what_was_run(study: Study) -> None:
    made = live_folder.curves()
    full = sum(60.0 * curve.records[0].parameters * TARGET for curve in made)
    assert study.history is not None and not study.history.against_truth
    steps = study.history.steps
    assert [step.budget for step in steps["blend"]] == [200.0, 400.0]
    assert steps["blend"][-1].pear_corr == pytest.approx(100.0)
    for step in steps["blend"]:
        spent = sum(r.training_flops for c in made for r in c.records if r.size <= step.budget)
        assert step.share == pytest.approx(spent / full)
    for step in steps["subtuning"]:
        spent = sum(r.training_flops for c in made for r in c.records if r.size == step.budget)
        assert step.share == pytest.approx(spent / full)
    last = steps["lensllm"][-1].share - steps["blend"][-1].share
    assert last == pytest.approx(15 * 1e6 / full), "Eq. 10 pays for its kernels"


def test_full_runs_are_the_truth_and_change_no_forecast(study: Study, tmp_path: Path) -> None:
    live_folder.make(tmp_path, live_folder.curves(), TRUTH)
    known = study_of_folder(tmp_path)
    assert {one.name: one.truth for one in known.candidates} == TRUTH
    for one, other in zip(known.candidates, study.candidates, strict=True):
        assert (one.name, one.predicted) == (other.name, other.predicted)
        np.testing.assert_array_equal(one.sizes, other.sizes)
        assert list(one.kept_aside[0]) == [TARGET]
    assert known.history is not None and known.history.against_truth
    other = next((tmp_path / "runs").glob(f"m0-{TARGET}-*"))
    content = json.loads(other.read_text())
    content["record"]["seed"] = 1
    other.write_text(json.dumps(content))
    truths = {one.name: one.truth for one in study_of_folder(tmp_path).candidates}
    assert truths == {**TRUTH, "zoo/a": None}, "made from another seed"
    other.write_text("half")
    assert {one.name: one.truth for one in study_of_folder(tmp_path).candidates} == truths
    given = study_of_folder(tmp_path, {"zoo/a": 9.0, "zoo/b": 8.0, "zoo/c": 7.0})
    assert {one.truth for one in given.candidates} == {7.0, 8.0, 9.0}


def test_the_costs_are_the_selections(study: Study) -> None:
    flops = live_folder.selection(
        live_folder.curves(), [r for c in live_folder.curves() for r in c.records]
    ).flops
    (table,) = next(s for s in sections(study) if s.title == "Cost").tables
    parts = (flops.training, flops.judging, flops.probe)
    figures = (*parts, sum(parts), flops.sub_tuning, flops.full_tuning)
    assert [row[1] for row in table.rows] == [scientific(value) for value in figures]


def test_a_model_stopped_early(tmp_path: Path) -> None:
    live_folder.make(tmp_path, live_folder.curves(short=1))
    made = study_of_folder(tmp_path)
    last = {one.name: one.sizes[-1] for one in made.candidates}
    assert last == {"zoo/a": 400.0, "zoo/b": 400.0, "zoo/c": 200.0}
    assert all(one.forecast is not None for one in made.candidates)
    assert made.history is not None
    assert [step.budget for step in made.history.steps["blend"]] == [200.0, 400.0]


def test_failed_runs_are_named(tmp_path: Path, folder: Path) -> None:
    made = live_folder.curves()
    live_folder.make(tmp_path, made)
    failed = replace(
        *(made[0].records[-1],), dev_loss=None, kernel=None, error="the loss <is> not finite"
    )
    store = live_folder.SelectionFolder(tmp_path)
    with store.locked():
        kept = [r for curve in made for r in curve.records if r != made[0].records[-1]]
        store.assemble([*kept, failed])
    page = Page(to_html("t", sections(study_of_folder(tmp_path))))
    assert "a on 400: the loss <is> not finite" in page.text
    assert "a method: too few sizes" in page.text


def test_every_name_is_escaped(tmp_path: Path) -> None:
    names = tuple(f"{letter} {studies.HOSTILE} {letter}" for letter in "abc")
    live_folder.make(tmp_path, live_folder.curves(names))
    page = Page(to_html("t", sections(study_of_folder(tmp_path))))
    assert "script" not in page.tags and all(page.text.count(name) >= 5 for name in names)


def test_no_text_lies_over_another(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    for figure in drawn.figures_of(monkeypatch, lambda: every_figure(study)):
        drawn.assert_legible(figure)


def test_an_unfinished_selection_has_no_page(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match="may not have finished"):
        study_of_folder(tmp_path)


@pytest.mark.slow
def test_the_page_in_a_browser(study: Study, tmp_path: Path) -> None:
    write_page(tmp_path / "r.html", study)
    assert assert_shown(tmp_path / "r.html", tmp_path) == 4


def test_heavy_tails_of_models_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    names = tuple(str(tmp_path / letter) for letter in "abc")
    weights = {}
    for name in names:
        Path(name).mkdir()
        weights[name] = {"w": torch.randn(40, 60, generator=draw), "small": torch.ones(3, 3)}
        save_file(weights[name], Path(name) / "model.safetensors")
    made = live_folder.curves(names)
    live_folder.make(tmp_path / "out", made)
    study = study_of_folder(tmp_path / "out")
    table = study.extra[-1]
    expected = {name[-1]: mean_exponent([weights[name]["w"]]) for name in names}
    assert {row[0]: row[3] for row in table.rows} == {k: f"{v:.4g}" for k, v in expected.items()}
    assert study.history is not None
    (step,) = study.history.steps["nlpmetrics"]
    scores = [expected[name[-1]] for name in names]
    last = {one.name: one.predicted for one in study.candidates}
    correlation = np.corrcoef(scores, [last[name] for name in names])[0, 1]
    assert step.pear_corr == pytest.approx(100 * correlation) and step.share == 0.0
    monkeypatch.setattr(heavy_tails, "LARGEST", 10)
    assert heavy_tails.exponents(names) == {}
    again = study_of_folder(tmp_path / "out").history
    assert again is not None and "nlpmetrics" not in again.steps
