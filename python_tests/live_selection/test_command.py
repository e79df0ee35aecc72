"""`jachess select --models …` as a user meets it: real runs of tiny models, killed and resumed."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jachess_ext.cli import main
from jachess_ext.live_selection import (
    LiveSelection,
    SelectionFolder,
    measure,
    read_records,
    read_selection,
)
from python_tests.scaling import tables

Command = Callable[..., list[str]]
Whole = tuple[Path, LiveSelection]


@pytest.fixture(scope="module")
def command(models: tuple[str, str], files: tuple[Path, Path]) -> Command:
    """The command line of a small selection; arguments are added."""

    def make(*more: str) -> list[str]:
        return [
            *("select", "--models", *models, "--train", str(files[0]), "--dev", str(files[1])),
            *("--sizes", "8", "16", "32", "64", "--budget", "1/4", "--probe", "4"),
            *("--epochs", "2", "--lr", "5e-3", "--batch-size", "8", "--max-length", "16", *more),
        ]

    return make


@pytest.fixture(scope="module")
def whole(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An undisturbed selection: its folder and its result."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(command("--out", str(out))) == 0
    return out, read_selection(out)


def kernels_of(folder: Path) -> dict[str, bytes]:
    """Θ, residual and eigenvalues of every run (npz files hold the time they were written at)."""
    store = SelectionFolder(folder)
    return {
        record.run: b"".join(part.tobytes() for part in vars(store.kernel(record)).values())
        for record in read_records(folder)
    }


def test_from_files_to_a_ranking(whole: Whole) -> None:
    out, found = whole
    records = read_records(out)
    assert [record.size for record in records] == [s for s in (0, 8, 16, 32, 64) for _ in "ab"]
    assert set(found.missing) == {"logme", "hscore", "knn"} and len(found.predictions) == 8
    for method, predictions in found.predictions.items():
        assert len({one.model for one in predictions}) == 2
        scores = [one.score for one in predictions]
        assert scores == sorted(scores), method
    assert found.ranking[0].prob_best is not None and 0 < found.flops.share < 1
    assert all(record.time == pytest.approx(record.steps / 2, abs=1) for record in records)
    last = {record.model: record for record in records if record.size == 64}
    for one in found.predictions["subtuning"]:
        assert one.predicted == last[one.model].dev_loss


def test_a_report_is_beside_the_result(whole: Whole) -> None:
    out, found = whole
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3 and found.stop in page
    assert all(Path(one.model).name in page for one in found.ranking)


def test_without_matplotlib_the_result_stays(
    command: Command,
    whole: Whole,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shutil.copytree(whole[0], tmp_path / "out")
    page = tmp_path / "r.html"
    assert main(command("--out", str(tmp_path / "out"), "--report", str(page))) == 0
    shown = capsys.readouterr()
    assert "no report: matplotlib is needed" in shown.err and "Result:" in shown.out
    assert not page.exists()


def test_a_finished_selection_is_read_not_made(
    command: Command,
    whole: Whole,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, found = whole
    monkeypatch.setattr(measure, "run", lambda job: pytest.fail("a finished run was repeated"))
    assert main(command("--out", str(out))) == 0 and read_selection(out) == found
    printed = capsys.readouterr().out
    first, second = (Path(one.model).name for one in found.ranking)
    assert printed.index(first) < printed.index(second)
    assert "stopped: every planned size was run" in printed and "% of training all" in printed


def _select_quietly(arguments: list[str]) -> None:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    main(arguments)


def test_killed_selections_go_on(command: Command, whole: Whole, tmp_path: Path) -> None:
    """Kills with -9 at random moments; no finished run is made twice, and the end is the same."""
    out, found = whole
    context = multiprocessing.get_context("fork")
    draws, kills = random.Random(0), 0
    ended: dict[str, float] = {}
    for further in range(4):  # runs, and not seconds: those hang on what else the machine does
        process = context.Process(
            target=_select_quietly, args=(command("--out", str(tmp_path / "killed")),)
        )
        process.start()
        runs = tmp_path / "killed" / "runs"
        while process.is_alive() and len(list(runs.glob("*.json"))) < len(ended) + further:
            time.sleep(0.01)
        process.join(timeout=draws.uniform(0, 0.3))
        kills += process.is_alive()
        process.kill()
        process.join()
        now = {path.name: path.stat().st_mtime for path in runs.glob("*.json")}
        assert ended.items() <= now.items(), "a finished run was made again"
        ended = now
    assert kills, "every selection ended before it was killed"
    assert main(command("--out", str(tmp_path / "killed"))) == 0
    assert read_selection(tmp_path / "killed") == found
    assert read_records(tmp_path / "killed") == read_records(out)
    assert kernels_of(tmp_path / "killed") == kernels_of(out)
    assert not list((tmp_path / "killed").rglob("*.broken"))


def test_half_a_record_is_a_sentence_and_one_run(
    command: Command, whole: Whole, tmp_path: Path
) -> None:
    out, found = whole
    shutil.copytree(out, tmp_path / "copy")
    victim = next((tmp_path / "copy" / "runs").glob("*wide-64-*"))
    victim.write_bytes(victim.read_bytes()[:60])
    with pytest.warns(RuntimeWarning, match=r"is not a whole record of a run .* only this run"):
        assert main(command("--out", str(tmp_path / "copy"))) == 0
    assert read_selection(tmp_path / "copy") == found
    assert kernels_of(tmp_path / "copy") == kernels_of(out)


@pytest.mark.slow
def test_processes_do_not_change_the_result(command: Command, whole: Whole, tmp_path: Path) -> None:
    out, found = whole
    assert main(command("--out", str(tmp_path), "--processes", "2")) == 0
    assert read_selection(tmp_path) == found and kernels_of(tmp_path) == kernels_of(out)


BAD = [
    (["select"], "give either a table of losses or --models"),
    (["select", "{table}", "--models", "a", "b"], "give either a table of losses or --models"),
    (["select", "--models", "a", "b"], "--models needs --train FILE"),
    (["select", "--models", "a", "b", "--train", "x.csv"], "--models needs --dev FILE"),
    (["select", "{table}", "--budget", "400"], "a table needs --target"),
    (["select", "{table}", "--target", "9999999", "--budget", "1/8"], "is no number of training"),
    (["select", "{table}", "--target", "9999999", "--probe", "3"], "--probe is of a live"),
    (
        ["select", "{table}", "--target", "99", "--budget", "9", "--confidence", ".9"],
        "give either --budget or --confidence",
    ),
    (["select", "{table}", "--target", "99", "--out", "x.txt"], "--out: 'x.txt' is not a file"),
]
BAD_LIVE = [
    (["--budget", "2"], "the budget '2' is above the data"),
    (["--budget", "1/32"], "is above the budget 1/32 of 256 rows"),
    (["--sizes", "8", "8"], "sizes must increase strictly"),
    (["--sizes", "8", "16", "999"], "is above the data"),
    (["--target", "100.5"], "expected a whole number"),
    (["--reference", "a"], "--reference is for tables"),
    (["--processes", "0"], "--processes is 0"),
    (["--lr", "-1"], "lr is -1.0"),
    (["--text-column", "words"], "has no column 'words'"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = tables.write_csv(tmp_path / "t.csv", tables.population(0, models=3)[0])
    assert main([part.format(table=table) for part in arguments]) == 2
    error = capfd.readouterr().err
    assert words in error and error.startswith("jachess select: ") and "Traceback" not in error


@pytest.mark.parametrize(("arguments", "words"), BAD_LIVE)
def test_bad_live_input_is_one_sentence_and_no_folder(
    command: Command,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(command(*arguments, "--out", str(tmp_path / "out"))) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert words in error and error.startswith("jachess select: ")
    assert not (tmp_path / "out").exists()


def test_without_ray_a_sentence(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(command("--ray", "local")) == 2
    error = capfd.readouterr().err
    assert "ray is needed" in error and "pip install 'jachess-ext[ray]'" in error


def test_a_missing_library_is_a_sentence_before_any_training(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    monkeypatch.setattr(measure, "run", lambda job: pytest.fail("something was trained"))
    assert main(command()) == 2
    assert "scipy is needed for this and not installed" in capfd.readouterr().err
