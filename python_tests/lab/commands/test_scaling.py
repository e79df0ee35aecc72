"""`jachess select` as a user meets it: a table out, or one sentence."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from html import unescape
from pathlib import Path

import pytest

from jachess_ext.lab.cli import main
from jachess_ext.scaling import LossTable, read_table, select
from python_tests import processes
from python_tests.scaling import tables

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def table() -> LossTable:
    return tables.population(0, models=6)[0]


@pytest.fixture
def path(table: LossTable, tmp_path: Path) -> Path:
    return tables.write_csv(tmp_path / "losses.csv", table)


def test_select_prints_and_writes(
    table: LossTable, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "ranking.csv"
    given = ["--budget", "51200", "--target", "1638400", "--out", str(out)]
    assert main(["select", str(path), *given]) == 0
    expected = select(table, 51200, 1638400)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == expected.ranking
    low, _ = expected.interval_ends(0.9)
    place = table.names.index(rows[0]["name"])
    assert float(rows[0]["low"]) == pytest.approx(low[place])
    printed = capsys.readouterr().out
    assert printed.index(expected.ranking[0]) < printed.index(expected.ranking[-1])
    assert "% of training all models" in printed and "3.12 % of the target" in printed


def test_select_writes_a_report(path: Path, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "out" / "r.html"
    given = ["--budget", "1600", "--target", "1638400", "--report", str(page)]
    assert main(["select", str(path), *given]) == 0
    text = page.read_text(encoding="utf-8")
    expected = select(read_table(path), 1600, 1638400)
    assert len(expected.shortlist) > 1
    assert f"{expected.ranking[0]} is most likely the best on 1,638,400 examples (" in text
    assert "this is not decided" in text and "is the model to fine-tune" not in text
    assert "The table holds losses at the target" in text and "<th>measured" in text
    assert all(words in unescape(text) for words in (expected.advice, *expected.notes))
    assert text.index("<th>P(best)") < text.index("<th>loss") and ">FLOPs" not in text
    assert "90 % interval" in text and "losses.csv" in text and text.count("<svg") == 1
    assert str(page) in capsys.readouterr().out


def test_a_report_is_html(path: Path, capsys: Capture) -> None:
    assert main(["select", str(path), "--target", "1638400", "--report", "r.pdf"]) == 2
    assert "'r.pdf' is not a file name that ends in .html" in capsys.readouterr().err


def test_a_report_that_cannot_be_written(path: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "r.csv"
    given = ["--target", "1638400", "--method", "subtuning", "--out", str(out)]
    assert main(["select", str(path), *given, "--report", str(tmp_path / "file" / "r.html")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err and not out.exists()


def test_select_json_with_other_methods(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    given = ["--target", "1638400", "--method", "subtuning", "--out", str(out)]
    assert main(["select", str(path), *given]) == 0
    assert "flops" not in json.loads(out.read_text())
    assert main(["select", str(path), *given, "--tokens", "128"]) == 0
    found = json.loads(out.read_text())
    assert found["budget"] == 819200 and found["method"] == "subtuning"
    assert found["flops"] == pytest.approx(found["full_flops"] / 2)
    assert set(found["rows"][0]) == {"rank", "name", "predicted", "measured"}


BAD = [
    (["select", "{}", "--target", "3276800", "--budget", "9999999"], "is not above the budget"),
    (["select", "{}", "--target", "99999999", "--budget", "9999999"], "outside the table's sizes"),
    (["select", "{}", "--target", "100"], "no size below the target"),
    (["select", "{}.none", "--target", "100"], "cannot be read"),
    (["select", "{}", "--target", "3276800", "--classes", "1"], "classes is 1"),
    (["select", "{}", "--target", "0"], "target is 0"),
    (["select", "{}", "--target", "9", "--read", "colour", "x"], "has no column 'colour'"),
    (["select", "{}", "--target", "9", "--metric", "taste"], "'taste' is not known here"),
    (["select", "{}", "--target", "3276800", "--method", "logme"], "logme"),
    (["select", "{}", "--target", "3276800", "--method", "best"], "unknown method 'best'"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_one_sentence_and_no_file(
    arguments: list[str], words: str, path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    code = main([*(part.format(path) for part in arguments), "--out", str(out)])
    error = capfd.readouterr().err
    assert code == 2 and words in error and "Traceback" not in error
    assert error.startswith(f"jachess {arguments[0]}: ")
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["select"],
        ["select", "t.csv"],
        ["select", "t.csv", "--target", "much"],
        ["select", "t.csv", "--target", "-1"],
        ["select", "t.csv", "--target", "9", "--budget", "1/8"],
        ["select", "t.csv", "--target", "9", "--nonsense"],
    ],
)
def test_bad_options_exit_with_two(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capfd.readouterr().err


ACCURACIES = """model,100,1k,"10,000",100k
a,61,70,79,
b,55,68,80,
c,58,,,
d,70,72,74,
"""


def test_select_from_accuracies(tmp_path: Path, capfd: Capture) -> None:
    path, out, page = (tmp_path / name for name in ("acc.csv", "out.json", "page.html"))
    path.write_text(ACCURACIES)
    given = ["select", str(path), "--target", "100k", "--out", str(out), "--report", str(page)]
    assert main(given) == 2 and not out.exists() and not page.exists()
    assert "rise with size" in capfd.readouterr().err
    assert main([*given, "--metric", "accuracy", "--budget", "10k"]) == 0
    printed = capfd.readouterr().out
    assert "blend: 3 models, sizes up to 10,000, 10 % of the target" in printed
    assert "accuracy (per cent)  90 % interval" in printed
    assert "\nblend needs 3 sizes above 0 or more, and c has 1" in printed
    found = json.loads(out.read_text())
    assert found["metric"] == "accuracy" and found["budget"] == 10_000
    rows = found["rows"]
    assert [row["name"] for row in rows] == ["b", "a", "d", "c"]
    assert 70 < rows[0]["low"] < rows[0]["predicted"] < rows[0]["high"] < 100
    assert rows[3]["rank"] is None and "c has 1" in rows[3]["reason"]
    text = page.read_text(encoding="utf-8")
    assert "Not ranked: blend needs 3 sizes" in text and "accuracy (per cent)" in text


def test_select_from_a_folder_of_runs(tmp_path: Path, capfd: Capture) -> None:
    for name, gap in (("a", 0.5), ("b", 0.4)):
        for size in (100, 200, 400):
            (tmp_path / name / f"{size}").mkdir(parents=True)
            log = json.dumps({"log_history": [{"eval_loss": gap * size**-0.2}]})
            (tmp_path / name / f"{size}" / "trainer_state.json").write_text(log)
    given = ["select", str(tmp_path), "--target", "800", "--read", "size", r"/(\d+)$"]
    assert main([*given, "model", "^(.)/"]) == 0
    assert "2 models, sizes up to 400" in capfd.readouterr().out
    assert main([*given, "seed", "x"]) == 2
    assert "--read knows model, size, value, test_rows here" in capfd.readouterr().err


OPEN = {
    "columns": ("learner,Sizes,lr,epochs,eval_f1\n", "{m},{n},2e-5,3,{v}\n"),
    "words": ("model,rows,State,task,eval_f1\n", "{m},{n},finished,a b,{v}\n{m},{n},FAILED,c,.1\n"),
    "names": ("model,rows,my score,acc\n", "{m},{n},.5,{v}\n{m} std,{n},.1,.1\n"),
    "quotes": ("model,rows,it's,$x,loss\n", "{m},{n},1,2,{v}\n"),
    "shares": ("model,train_fraction,loss\n", "{m},.{n},{v}\n"),
    "commas": ("model;rows;lr;loss\n", "{m};{n};0,1;{c}\n"),
    "rises": ("model,rows,value\n", "{m},{n},.{n}\n"),
    "metrics": ("model,rows,eval_f1,eval_acc\n", "{m},{n},.2,.3\n"),
    "perfect": ("model,rows,acc\n", "{m},{n},1\n"),
}


@pytest.mark.parametrize("kind", OPEN)
def test_the_command_that_is_printed_answers(kind: str, tmp_path: Path, capfd: Capture) -> None:
    """It is asked once, in the command's words, and what is printed can be pasted."""
    head, line = OPEN[kind]
    sizes = [(m, n, round(k * n**-0.2, 4)) for k, m in enumerate("ab", 1) for n in (100, 200, 400)]
    rows = [line.format(m=m, n=n, v=v, c=str(v).replace(".", ",")) for m, n, v in sizes]
    path = tmp_path / "my runs.csv"
    path.write_text(head + "".join(rows))
    assert main(["select", str(path), "--target", "10k"]) == 2
    *said, command = capfd.readouterr().err.splitlines()
    assert not re.search(r"\w=|\*\*|\[", " ".join(said))
    words = shlex.split(
        command.replace("test_rows N", "test_rows 500").replace("full N", "full 999")
    )
    assert words[:2] == ["jachess", "select"] and words[2] == str(path)
    out = tmp_path / "out.json"
    assert main([*words[1:], "--out", str(out)]) == 0, capfd.readouterr().err
    shown = capfd.readouterr().out
    left_out = json.loads(out.read_text())["left_out"]
    assert (
        "90 % interval" in shown
        and bool(left_out) == (kind in ("words", "names"))
        and left_out in shown
    )


def test_one_model_alone_is_not_ranked(tmp_path: Path, capfd: Capture) -> None:
    path = tmp_path / "t.csv"
    path.write_text("model,task,100,200,400\na,x,3,2,1\nb,x,3,,\nb,y,3,2,1\n")
    assert main(["select", str(path), "--target", "9k", "--read", "task", "x"]) == 2
    error = capfd.readouterr().err
    assert "a alone can be ranked" in error and "b has 1" in error
    assert "1 of 3 rows, whose 'task' is 'y'" in error


def test_ignored_columns_are_an_option(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("model,100,200,400,lr,x y\na,3,2,1,1,1\nb,3,2,1,1,1\n")
    given = ["select", str(path), "--target", "800"]
    assert main([*given, "--ignore", "lr", "x y"]) == 0
    assert main([*given, "--ignore", "lr", "--ignore", "x y"]) == 0
    assert main([*given, "--ignore", "lr"]) == 2


def test_an_error_imports_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("model,100,200,400,lr\na,3,2,1,1\nb,3,2,1,1\n")
    program = (
        "import sys; from jachess_ext.lab.cli import main\n"
        "print(main(sys.argv[1:]), 'torch' in sys.modules, 'pandas' in sys.modules)\n"
    )
    given = [sys.executable, "-c", program, "select", path, "--target", "9k"]
    assert processes.run(given, check=True).stdout.strip() == "2 False False"


def test_a_folder_without_runs(tmp_path: Path, capfd: Capture) -> None:
    given = ["select", str(tmp_path), "--target", "9"]
    assert main([*given, "--read", "model", "(.)"]) == 2
    assert "holds no trainer_state.json" in capfd.readouterr().err
    assert main(given) == 2 and "needs --read model PATTERN" in capfd.readouterr().err
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "trainer_state.json").write_text('{"log_history": [{"eval_loss": 1.0}]}')
    assert main([*given, "--read", "model", "(", "size", "1"]) == 2, "no regular expression"
