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
from jachess_ext.lab.compare.settings import Grid
from jachess_ext.training import parse_method
from python_tests.lab.demo.conftest import tiny_model  # noqa: F401  a fixture

OWN: dict[str, Any] = dict.fromkeys(finetune_quality.VARIATIONS)


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


def test_every_grid_can_be_read_and_varied() -> None:
    for name, content in finetune_quality.GRIDS.items():
        from_json(content | {"model": "a"}, Grid, name)
        assert content["methods"][0] == "none"
        for method in content["methods"]:
            parse_method(method)
    given = OWN | {"methods": ["none", "sam,rho=0.1"], "lr": 2e-5, "epochs": 1.0}
    name = finetune_quality.published_name("why", Namespace(**given))
    assert name == "why_methods=none+sam,rho=0.1_lr=2e-05_epochs=1"
    given = OWN | {"rows": 100, "label_noise": 0.2, "epochs": 20.0, "seeds": [1, 4]}
    places = {"quick": False, "model": Path("model"), "data": Path("data")}
    grid = finetune_quality.load_grid("few", Namespace(**given | places))
    assert (grid.train_size, grid.label_noise, grid.recipe.epochs) == (100, 0.2, 20.0)
    assert grid.seeds == (1, 4)


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


def test_commits_are_those_of_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("aaa", "bbb", "bbb"):
        monkeypatch.setattr(finetune_quality, "commit", lambda commit=commit: commit)
        commits = finetune_quality.started_at(tmp_path)
    assert commits == ["aaa", "bbb"]


def test_a_recorded_page_is_drawn_anew() -> None:
    """The head, and with it the commits, stays; the tables are those of the records."""
    path = finetune_quality.RESULTS / "finetune_before.jsonl"
    assert finetune_quality.page(path) == path.with_suffix(".md").read_text(encoding="utf-8")
