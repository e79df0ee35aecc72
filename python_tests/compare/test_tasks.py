"""The user's own files: every format, and one sentence for everything that can be wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from jachess_ext.tasks.examples import DataError
from jachess_ext.tasks.files import Columns, file_task, folder_task

CSV = "text,label\ngood one,yes\nbad one,no\n"


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.csv", CSV),
        ("d.csv", "\ufeff" + CSV),
        ("d.tsv", CSV.replace(",", "\t")),
        ("d.jsonl", '{"text": "good one", "label": "yes"}\n\n{"label": "no", "text": "bad one"}\n'),
    ],
)
def test_formats(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path, name, content)
    task = file_task(path, path, Columns())
    assert task.train.texts == ["good one", "bad one"]
    assert task.classes == ("no", "yes") and task.train.labels == [1, 0]
    assert task.train.pairs is None


def test_strings_with_raw_line_breaks(tmp_path: Path) -> None:
    lines = (
        '{"text": "a\n\nb", "label": 1}\n\n{"text": "c", "label": 0}\n'
        '{"text": "d\re", "label": 1}\n'
    )
    path = write(tmp_path, "d.jsonl", lines)
    task = file_task(path, path, Columns())
    assert task.train.texts == ["a\n\nb", "c", "d\re"] and task.train.labels == [1, 0, 1]


def test_numeric_labels_keep_their_order_and_json_numbers_work(tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "t", "label": {n}}}\n' for n in (10, 9, 0))
    path = write(tmp_path, "d.jsonl", lines)
    task = file_task(path, path, Columns())
    assert task.classes == ("0", "9", "10") and task.train.labels == [2, 1, 0]


def test_pairs_by_default_name_and_by_choice(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'text,text_pair,label\n"a, b",c,0\nd,e,1\n')
    task = file_task(path, path, Columns())
    assert task.train.texts == ["a, b", "d"] and task.train.pairs == ["c", "e"]
    other = write(tmp_path, "b.csv", "q,p,y\na,b,0\nc,d,1\n")
    assert file_task(other, other, Columns("q", "p", "y")).dev.pairs == ["b", "d"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.csv", "", "is empty"),
        ("d.csv", "text,label\n", "is empty"),
        ("d.jsonl", "\n", "is empty"),
        ("d.csv", "sentence,label\na,0\n", "no column 'text'; it has 'sentence', 'label'"),
        ("d.csv", "text\na\n", "no column 'label'"),
        ("d.csv", "text,label\na,0\nb\n", "record 2 has an unreadable label in column 'label'"),
        ("d.csv", "text,label\na, \nb,1\n", "unreadable label"),
        ("d.jsonl", '{"text": "a", "label": [1]}\n', "unreadable label"),
        ("d.jsonl", '{"text": "a", "label": 0.5}\n', "unreadable label"),
        ("d.jsonl", '{"text": "a", "label": null}\n', "unreadable label"),
        ("d.jsonl", '{"text": 3, "label": 1}\n', "no text in column 'text'"),
        ("d.jsonl", '{"text": "a"}\n', "no column 'label'"),
        ("d.jsonl", "{text: a}\n", "line 1 is not JSON"),
        ("d.jsonl", "[1]\n", "not a JSON object"),
        ("d.jsonl", '\n{"text": "a\n{"text": "b", "label": 1}\n', "line 2 is not JSON"),
        ("d.jsonl", '{"text": "a", "label": 1}\n{"text": "b\n', "line 2 is not JSON (it has"),
        ("d.csv", "text,label\na,1\nb,1\n", "every label is '1'"),
        ("d.csv", b"text,label\n\xff\xfe,1\n", "not UTF-8"),
        ("d.txt", CSV, "must end in .csv, .tsv or .jsonl"),
        ("d.csv.gz", CSV, "is not a whole gzip file"),
        ("d.csv.gz", gzip.compress(CSV.encode(), mtime=0)[:-9], "is not a whole gzip file"),
    ],
)
def test_each_fault_is_one_sentence(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        file_task(path, path, Columns())
    assert words in str(caught.value)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        file_task(tmp_path / "none.csv", tmp_path / "none.csv", Columns())
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        file_task(tmp_path / "folder.csv", tmp_path / "folder.csv", Columns())


def test_unknown_dev_label(tmp_path: Path) -> None:
    train = write(tmp_path, "a.csv", CSV)
    dev = write(tmp_path, "b.csv", "text,label\na,maybe\n")
    with pytest.raises(DataError, match="record 1 has the label 'maybe'"):
        file_task(train, dev, Columns())


@pytest.mark.parametrize("name", ["d.csv.gz", "d.tsv.gz"])
def test_compressed_files(tmp_path: Path, name: str) -> None:
    text = CSV.replace(",", "\t") if "tsv" in name else CSV
    path = write(tmp_path, name, gzip.compress(text.encode()))
    task = file_task(path, path, Columns())
    assert task.train.texts == ["good one", "bad one"] and task.name == "d"


def test_regression_labels_are_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "d.csv", "text,label\na,0.5\nb,-2\n")
    task = file_task(path, path, Columns(regression=True))
    assert task.regression and task.outputs == 1
    assert list(task.train.labels) == [0.5, -2.0] and task.metric.name == "Spearman correlation"
    bad = write(tmp_path, "e.csv", "text,label\na,0.5\nb,nan\n")
    with pytest.raises(DataError, match="record 2 has the label 'nan'; expected a number"):
        file_task(bad, bad, Columns(regression=True))


def folder(tmp_path: Path, name: str, classes: object = None) -> Path:
    made = tmp_path / name
    made.mkdir()
    for stem in ("train", "dev"):
        lines = "".join(json.dumps({"text": "t", "label": n}) + "\n" for n in (0, 1))
        (made / f"{stem}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    if classes is not None:
        (made / "labels.json").write_text(json.dumps(classes))
    return made


def test_folders(tmp_path: Path) -> None:
    task = folder_task(folder(tmp_path, "cola", ["0 = bad", "1 = good"]), Columns())
    assert (task.name, task.classes, task.metric.name) == (
        "cola",
        ("bad", "good"),
        "Matthews correlation",
    )
    other = folder_task(folder(tmp_path, "mine", ["no", "yes"]), Columns())
    assert other.classes == ("no", "yes") and other.metric.name == "accuracy"
    assert folder_task(folder(tmp_path, "bare"), Columns()).classes == ("0", "1")


@pytest.mark.parametrize(
    ("classes", "words"), [(["a"], "names all 2 classes"), ({"a": 1}, "must be a list")]
)
def test_bad_class_names(tmp_path: Path, classes: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        folder_task(folder(tmp_path, "x", classes), Columns())


def pairs_folder(tmp_path: Path, name: str, labels: list[str], classes: object = None) -> Path:
    made = tmp_path / name
    made.mkdir()
    lines = "".join(json.dumps({"text": f"is {y}", "label": y}) + "\n" for y in labels)
    for stem in ("train", "dev"):
        (made / f"{stem}.jsonl").write_text(lines)
    if classes is not None:
        (made / "labels.json").write_text(json.dumps(classes))
    return made


@pytest.mark.parametrize(
    ("name", "labels", "classes", "positive"),
    [
        ("mrpc", ["equivalent", "not_equivalent"], None, "equivalent"),
        ("mrpc", ["0", "1"], None, "1"),
        ("mrpc", ["0", "1"], ["equivalent", "not_equivalent"], "0"),
        ("qqp", ["duplicate", "not_duplicate"], None, "duplicate"),
        ("qqp", ["alike", "other"], ["other", "alike"], "alike"),
        ("mrpc", ["True", "False"], None, "True"),
    ],
)
def test_f1_is_of_the_positive_class(
    tmp_path: Path, name: str, labels: list[str], classes: object, positive: str
) -> None:
    """Three of four rows are positive, all predicted second: precision ¾, recall 1, F1 6⁄7.

    Were the other class second, precision would be ¼ and F1 2⁄5.
    """
    (negative,) = set(labels) - {positive}
    made = pairs_folder(tmp_path, name, [positive, positive, positive, negative], classes)
    task = folder_task(made, Columns())
    assert task.metric([1, 1, 1, 1], task.dev.labels) == pytest.approx(6 / 7)
    for part in (task.train, task.unlabelled, task.dev):
        own = {text.removeprefix("is "): y for text, y in zip(part.texts, part.labels, strict=True)}
        assert own == {negative: 0, positive: 1}, "every row keeps its class"


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["alike", "other"], "neither 'alike' nor 'other' is known as the positive one"),
        (["1", "2"], "neither '1' nor '2'"),
        (["0", "1", "2"], "F1 needs two classes, and the labels have 3"),
    ],
)
def test_f1_of_an_unknown_class_is_refused(tmp_path: Path, labels: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        folder_task(pairs_folder(tmp_path, "mrpc", labels), Columns())
    assert folder_task(pairs_folder(tmp_path, "other", labels), Columns()).metric.name == "accuracy"


def test_words_may_be_ordered_by_labels_json(tmp_path: Path) -> None:
    made = pairs_folder(tmp_path, "mine", ["a", "b"], ["b", "none", "a"])
    task = folder_task(made, Columns())
    assert task.classes == ("b", "a") and task.train.labels == [1, 0]


def test_folders_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no folder"):
        folder_task(tmp_path / "no", Columns())
    with pytest.raises(DataError, match=r"expected exactly one of train\.jsonl.*it has none"):
        folder_task(tmp_path, Columns())
    made = folder(tmp_path, "two")
    (made / "train.csv").write_text(CSV)
    with pytest.raises(DataError, match=r"it has train\.jsonl\.gz, train\.csv"):
        folder_task(made, Columns())
