"""The comparison on real data, run on made-up data at a tiny size."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import finetune_quality
from jachess_ext._io import from_json
from jachess_ext.compare.settings import Grid
from jachess_ext.training import parse_method
from python_tests.demo.conftest import tiny_model  # noqa: F401  a fixture


def write_folders(data: Path) -> None:
    names = ("cola", "sst2", "mrpc", "imdb", "movie_sentences", "product_sentences", "snips7")
    for name in names:
        (data / name).mkdir(parents=True)
        rows = []
        for number in range(80):
            row = {"text": f"the film was {('good', 'bad')[number % 2]}", "label": number % 2}
            rows.append(row | ({"text_pair": "the book"} if name == "mrpc" else {}))
        content = "".join(json.dumps(row) + "\n" for row in rows)
        for part in ("train", "dev"):
            (data / name / f"{part}.jsonl.gz").write_bytes(gzip.compress(content.encode()))


def test_the_grids_are_what_the_notes_say() -> None:
    rows = {"few": (500, 1500), "develop": (500, 500)}
    rows |= {"sizes": (10000, 1000), "controls": (500, 500), "base": (300, 1000)}
    seeds = {"why": 3, "longer": 3, "before": 1, "few": 10, "develop": 4, "sizes": 3, "controls": 3}
    seeds |= {"base": 3}
    for name, content in finetune_quality.GRIDS.items():
        given = (content["train_size"], content["unlabelled_size"])
        assert given == rows.get(name, (1000, 1000))
        assert content["seeds"] == list(range(seeds.get(name, 5)))
        assert content["methods"][0] == "none"
        from_json(content | {"model": "a"}, Grid, name)
        for method in content["methods"]:
            parse_method(method)


@pytest.mark.slow
def test_all_grids_run(
    tiny_model: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_folders(tmp_path / "data")
    given = ["--model", str(tiny_model), "--data", str(tmp_path / "data"), "--processes", "1"]
    places = ["--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    assert finetune_quality.main([*given, *places, "--quick"]) == 0
    shown = capsys.readouterr().out
    assert "sst2 → imdb" in shown and "movie_sentences → product_sentences" in shown
    assert "cola (Matthews correlation)" in shown and "mrpc (F1)" in shown
    assert not (tmp_path / "results").exists()
    for name in finetune_quality.GRIDS:
        assert (tmp_path / "out" / name / "report.html").is_file()
    results = (tmp_path / "out" / "why" / "results.jsonl").read_text().splitlines()
    settings = [json.loads(line)["settings"] for line in results]
    assert {
        (s["squared"], s["scope"], s["dropout"], s["hessian"]) for s in settings if "squared" in s
    } == {
        (False, "all", True, True),
        (True, "all", True, True),
        (False, "first", True, True),
        (False, "all", False, True),
        (False, "all", True, False),
    }


def test_data_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(tmp_path), "--data", str(tmp_path / "no"), "--out", str(tmp_path)]
    assert finetune_quality.main([*given, "--results", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err.count("finetune_quality: ") == 1
    assert not (tmp_path / "results").exists()


def test_a_run_that_is_stopped_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = (finetune_quality.RESULTS / "finetune_before.jsonl").read_text()

    def stopped(grid: Grid, out: Path, **settings: Any) -> None:
        (out / "results.jsonl").write_text(recorded)
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune_quality, "run_grid", stopped)
    given = ["--model", "m", "--data", "d", "--out", str(tmp_path / "out"), "--grids", "before"]
    with pytest.raises(KeyboardInterrupt):
        finetune_quality.main([*given, "--results", str(tmp_path)])
    assert (tmp_path / "finetune_before.jsonl").read_text() == recorded
    assert "3 runs, started and gone on with at" in (tmp_path / "finetune_before.md").read_text()


def test_tasks_choose_grids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grids = list(finetune_quality.GRIDS)
    assert finetune_quality.chosen_grids(grids, None) == grids
    assert finetune_quality.chosen_grids(grids, ["mrpc"]) == ["main", "before", "few", "sizes"]
    assert set(grids) - set(finetune_quality.chosen_grids(grids, ["sst2", "imdb"])) == {"base"}
    given = ["--model", str(tmp_path), "--data", str(tmp_path), "--tasks", "sst2", "sst"]
    assert finetune_quality.main(given) == 2
    assert "no task 'sst'; the chosen grids have cola, imdb," in capsys.readouterr().err


def test_commits_are_those_of_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("aaa", "bbb", "bbb"):
        monkeypatch.setattr(finetune_quality, "commit", lambda commit=commit: commit)
        commits = finetune_quality.started_at(tmp_path)
    assert commits == ["aaa", "bbb"]


OWN: dict[str, Any] = dict.fromkeys(finetune_quality.VARIATIONS)


def test_a_varied_grid_has_a_name_of_its_own() -> None:
    assert finetune_quality.published_name("why", Namespace(**OWN)) == "why"
    given = OWN | {"methods": ["none", "sam,rho=0.1"], "lr": 2e-5, "epochs": 1.0}
    name = "why_methods=none+sam,rho=0.1_lr=2e-05_epochs=1"
    assert finetune_quality.published_name("why", Namespace(**given)) == name


def test_a_grid_with_other_rows_and_wrong_labels() -> None:
    places = {"quick": False, "model": Path("model"), "data": Path("data")}
    plain = finetune_quality.load_grid("few", Namespace(**OWN | places))
    assert (plain.train_size, plain.label_noise, len(plain.seeds)) == (500, 0.0, 10)
    given = OWN | places | {"rows": 100, "label_noise": 0.2, "epochs": 20.0, "seeds": [1, 4]}
    grid = finetune_quality.load_grid("few", Namespace(**given))
    assert (grid.train_size, grid.label_noise, grid.recipe.epochs) == (100, 0.2, 20.0)
    assert grid.seeds == (1, 4)


def test_recorded_tables_are_redrawn(tmp_path: Path) -> None:
    """The head, and with it the commits, stays; the tables are those of the records."""
    name = "finetune_before"
    for ending in (".jsonl", ".md"):
        content = (finetune_quality.RESULTS / name).with_suffix(ending).read_text()
        (tmp_path / name).with_suffix(ending).write_text(content)
    page = tmp_path / f"{name}.md"
    page.write_text(content.replace("| none |", "| nothing |"))
    assert finetune_quality.main(["--redraw", "--grids", "before", "--results", str(tmp_path)]) == 0
    assert page.read_text() == content
