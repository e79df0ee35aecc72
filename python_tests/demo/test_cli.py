"""The command line as a user meets it: files at the end, or one sentence and exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

import datasets
import pytest

from jachess_ext.cli import main
from python_tests import processes
from python_tests.browser import assert_shown


def jachess(*arguments: object) -> CompletedProcess[str]:
    return processes.run([sys.executable, "-m", "jachess_ext", *arguments])


def test_demo_from_start_to_end(tiny_model: Path, sentiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = ("--train", sentiment, "--dev", sentiment, "--model", tiny_model)
    size = ("--quick", "--steps", 6, "--lr", 0.005, "--threads", 1)
    done = jachess("demo", *data, *size, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "Naive Bayes on words: accuracy 1.000" in done.stdout
    assert "ratio to plain" in done.stdout and str(out / "report.html") in done.stdout
    found = json.loads((out / "results.json").read_text())
    assert [run["method"] for run in found["runs"]] == ["none", "recommended", "train", "unlab"]
    assert all(len(run["losses"]) == 6 for run in found["runs"])
    assert found["setting"]["recipe"]["lr"] == 0.005
    page = out / "report.html"
    assert page.read_text().count("<svg") == 5
    assert "One seed cannot tell a difference from chance." in " ".join(done.stdout.split())
    assert_shown(page, tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("sentence,label\na,0\n", "no column 'text'"),
        ("", "is empty"),
        ("text,label\na,\n", "unreadable label"),
        ("text,label\na,1\nb,1\n", "at least two classes"),
    ],
)
def test_bad_files_are_one_sentence(
    content: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.csv"
    path.write_text(content)
    code = main(["demo", "--train", str(path), "--dev", str(path), "--out", str(tmp_path / "o")])
    assert_refused(code, capfd, words)
    assert not (tmp_path / "o").exists()


def assert_refused(code: int, capfd: pytest.CaptureFixture[str], words: str) -> None:
    error = capfd.readouterr().err
    sentences = [line for line in error.splitlines() if line.startswith("jachess demo: ")]
    assert code == 2
    assert len(sentences) == 1 and words in sentences[0]
    assert "Traceback" not in error


def test_one_file_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["demo", "--train", "a.csv", "--out", str(tmp_path / "o")])
    assert_refused(code, capfd, "--train and --dev go together")


@pytest.mark.parametrize("given", [("--seeds", "0"), ("--strength", "-1")])
def test_bad_numbers(given: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(main(["demo", *given]), capfd, f"{given[0][2:]} is {given[1]}")


def test_file_and_dataset(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["--train", "a.csv", "--dev", "a.csv", "--dataset", "glue/cola"]
    code = main(["demo", *given, "--out", str(tmp_path / "o")])
    assert_refused(code, capfd, "not both")


def test_regression_data_set(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [0.5, 4.0]}
    split = datasets.Dataset.from_dict(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: {"train": split, "validation": split})
    code = main(["demo", "--dataset", "glue/stsb", "--out", str(tmp_path / "o")])
    assert_refused(code, capfd, "regression")


def test_model_that_is_not_there(
    sentiment: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = ["--train", str(sentiment), "--dev", str(sentiment)]
    code = main(["demo", *data, "--model", str(tmp_path / "no"), "--out", str(tmp_path / "o")])
    assert_refused(code, capfd, "could not be loaded")
    assert not (tmp_path / "o").exists()


def test_output_that_is_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert_refused(main(["demo", "--out", str(out)]), capfd, "is a file, not a folder")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "arguments",
    [["demo", "--seeds", "few"], ["demo", "--unlab", "none"], ["demo", "--nonsense"], [], ["fit"]],
)
def test_bad_options_exit_with_two(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capfd.readouterr().err


def test_refused_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = jachess("demo", "--train", tmp_path / "a.csv", "--dev", tmp_path / "a.csv")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"jachess demo: {tmp_path}/a.csv cannot be read")
    assert "Traceback" not in done.stderr
