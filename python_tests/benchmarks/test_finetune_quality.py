"""The comparison on real data, run on made-up data at a tiny size."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from benchmarks import finetune_quality
from jachess_ext.compare.tables import Table
from jachess_ext.experiment.checks import check_methods
from jachess_ext.experiment.grid import make_grid
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
    for name, path in finetune_quality.GRIDS.items():
        content = json.loads(path.read_text())
        given = (content["train_size"], content["unlabelled_size"])
        assert given == rows.get(name, (1000, 1000))
        assert content["seeds"] == list(range(seeds.get(name, 5)))
        assert content["methods"][0] == "none"
        make_grid(content | {"model": "a"})
        check_methods(content["methods"])


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
    assert {(s["squared"], s["scope"], s["dropout"], s["hessian"]) for s in settings} > {
        (True, "all", True, True),
        (False, "first", True, True),
        (False, "all", False, True),
        (False, "all", True, False),
    }


def test_data_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(tmp_path), "--data", str(tmp_path / "no")]
    assert finetune_quality.main(given) == 2
    assert capsys.readouterr().err.count("finetune_quality: ") == 1


def test_tasks_choose_grids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grids = list(finetune_quality.GRIDS)
    assert finetune_quality.chosen_grids(grids, None) == grids
    assert finetune_quality.chosen_grids(grids, ["mrpc"]) == ["main", "before", "few", "sizes"]
    assert set(grids) - set(finetune_quality.chosen_grids(grids, ["sst2", "imdb"])) == {"base"}
    given = ["--model", str(tmp_path), "--data", str(tmp_path), "--tasks", "sst2", "sst"]
    assert finetune_quality.main(given) == 2
    assert "no task 'sst'; the chosen grids have cola, imdb," in capsys.readouterr().err


def test_commits_of_the_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for made in ("aaa", "bbb+", "bbb+"):
        monkeypatch.setattr(finetune_quality, "commit", lambda made=made: made)
        commits = finetune_quality.started_at(tmp_path / "main")
    assert commits == ["aaa", "bbb+"]
    monkeypatch.setattr(finetune_quality, "sections", lambda records: [])
    text = finetune_quality.summary("main", [], "this", commits)
    assert "0 runs, started and gone on with at aaa, bbb+, by" in text


def test_published_results_are_gone_on_from_once(tmp_path: Path) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    finetune_quality.go_on_from(results, "main", out)
    assert not out.exists(), "nothing is published"
    results.mkdir()
    (results / "finetune_main.jsonl").write_text("published\n")
    (results / "finetune_main.commits.txt").write_text("aaa\n")
    finetune_quality.go_on_from(results, "main", out)
    assert (out / "results.jsonl").read_text() == "published\n"
    assert finetune_quality.started_at(out)[0] == "aaa"
    (out / "results.jsonl").write_text("newer\n")
    finetune_quality.go_on_from(results, "main", out)
    assert (out / "results.jsonl").read_text() == "newer\n"


def test_a_varied_grid_has_a_name_of_its_own() -> None:
    own = dict.fromkeys(finetune_quality.VARIATIONS)
    assert finetune_quality.varied("why", Namespace(**own)) == "why"
    given = own | {"methods": ["none", "sam,rho=0.1"], "lr": 2e-5, "epochs": 1.0}
    name = "why_methods=none+sam,rho=0.1_lr=2e-05_epochs=1"
    assert finetune_quality.varied("why", Namespace(**given)) == name


def test_a_grid_with_other_rows_and_wrong_labels() -> None:
    own = dict.fromkeys(finetune_quality.VARIATIONS) | {"quick": False}
    few = Path("model"), Path("data")
    plain = finetune_quality.load_grid("few", *few, Namespace(**own))
    assert (plain.train_size, plain.label_noise) == (500, 0.0)
    given = own | {"rows": 100, "label_noise": 0.2, "epochs": 20.0, "seeds": 2}
    grid = finetune_quality.load_grid("few", *few, Namespace(**given))
    assert (grid.train_size, grid.label_noise, grid.recipe.epochs) == (100, 0.2, 20.0)
    assert grid.seeds == (0, 1)
    name = "few_seeds=2_rows=100_label_noise=0.2_epochs=20"
    assert finetune_quality.varied("few", Namespace(**given)) == name


def test_markdown() -> None:
    table = Table("caption", ["a", "b"], [["1", "2"]])
    assert finetune_quality.markdown(table) == "caption\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_redrawn_tables_say_how_many_runs(tmp_path: Path) -> None:
    lines = (finetune_quality.RESULTS / "finetune_noisy.jsonl").read_text().splitlines()[:4]
    results = tmp_path / "finetune_noisy.jsonl"
    (tmp_path / "finetune_noisy.commits.txt").write_text("aaa\n")
    results.write_text(lines[0] + "\n")
    again = ["--grids", "noisy", "--results", str(tmp_path), "--redraw"]
    assert finetune_quality.main(again) == 0
    tables = tmp_path / "finetune_noisy.md"
    text = tables.read_text()
    assert ", 1 runs, started and gone on with at aaa, by\n" in text
    year = f"{datetime.now(timezone.utc):%Y}"
    tables.write_text(text.replace(year, "1999", 1))
    results.write_text("\n".join(lines) + "\n")
    (tmp_path / "finetune_noisy.commits.txt").write_text("aaa\nbbb\n")
    assert finetune_quality.main(again) == 0
    text = tables.read_text()
    assert ", 4 runs, started and gone on with at aaa, bbb, by\n" in text
    assert "\n1999-" in text, "when they were run"
