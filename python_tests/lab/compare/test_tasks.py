"""Tasks: formats of files, the hub, a sentence for every fault, and the rows that are used."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jachess_ext._io import DataError
from jachess_ext.lab.compare.noise import add_label_noise
from jachess_ext.lab.workbench.metrics import ACCURACY
from jachess_ext.lab.workbench.settings import Columns
from jachess_ext.lab.workbench.tasks import (
    Examples,
    Task,
    digest,
    draw_rows,
    file_task,
    folder_task,
    hold_out,
    hub_task,
    load_task,
    split_validation,
)

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
        ("d.csv.gz", gzip.compress(CSV.encode(), mtime=0)),
        ("d.tsv.gz", gzip.compress(CSV.replace(",", "\t").encode(), mtime=0)),
    ],
)
def test_formats(tmp_path: Path, name: str, content: str | bytes) -> None:
    path = write(tmp_path, name, content)
    task = file_task(path, path, Columns())
    assert task.name == "d" and task.train.texts == ["good one", "bad one"]
    assert task.classes == ("no", "yes") and task.train.labels == [1, 0]
    assert task.train.second_texts is None


def test_numeric_labels_keep_their_order_and_json_numbers_work(tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "t", "label": {n}}}\n' for n in (10, 9, 0))
    path = write(tmp_path, "d.jsonl", lines)
    task = file_task(path, path, Columns())
    assert task.classes == ("0", "9", "10") and task.train.labels == [2, 1, 0]


def test_pairs_by_default_name_and_by_choice(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'text,text_pair,label\n"a, b",c,0\nd,e,1\n')
    task = file_task(path, path, Columns())
    assert task.train.texts == ["a, b", "d"] and task.train.second_texts == ["c", "e"]
    other = write(tmp_path, "b.csv", "q,p,y\na,b,0\nc,d,1\n")
    assert file_task(other, other, Columns("q", "p", "y")).dev.second_texts == ["b", "d"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.csv", "", "cannot be read: No columns to parse"),
        ("d.jsonl", "\n", "is empty"),
        ("d.csv", "sentence,label\na,0\n", "no column 'text'; it has 'sentence', 'label'"),
        ("d.csv", "text\na\n", "no column 'label'"),
        (
            "d.csv",
            "text,label\na,0\nb\n",
            "expected a word or a whole number in column 'label'",
        ),
        ("d.csv", "text,label\na, \nb,1\n", "has the label ' '; expected a word"),
        ("d.csv", "label,text\n1,a\n0\n", "record 2 has no text in column 'text'"),
        ("d.jsonl", '{"text": "a", "label": [1]}\n', "; expected a word"),
        ("d.jsonl", '{"text": "a", "label": 0.5}\n', "has the label 0.5; expected"),
        ("d.jsonl", '{"text": 3, "label": 1}\n', "no text in column 'text'"),
        ("d.jsonl", '{"text": "a"}\n', "no column 'label'"),
        ("d.jsonl", "[1]\n", "line 1 is [1]; expected an object"),
        ("d.jsonl", '\n{"text": "a\n{"text": "b", "label": 1}\n', "line 2 is not JSON"),
        ("d.csv", "text,label\na,1\nb,1\n", "every label is '1'"),
        ("d.csv", b"text,label\n\xff\xfe,1\n", "not UTF-8"),
        ("d.doc", CSV, "must end in .csv, .tsv, .jsonl or .txt"),
        ("d.csv.gz", CSV, "is not a whole gzip file"),
        ("d.parquet", CSV, "cannot be read: "),
        ("d.csv", "text,label\na,b,1\nc,0\n", "does not match length of data"),
        ("d.csv", "text,label\na,0\nc,d,1\n", "Expected 2 fields in line 3, saw 3"),
        ("d.csv", "text,label,text\na,1,b\n", "has the column 'text' twice"),
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


def test_parquet_and_texts_that_look_like_numbers(tmp_path: Path) -> None:
    """ "007" and "NA" are texts and names, in whatever format they come."""
    texts, labels = ["007", "NA", "2024-01-01"], ["01", "null", "1"]
    pd.DataFrame({"text": texts, "label": labels}).to_parquet(tmp_path / "d.parquet")
    lines = "".join(f"{text},{label}\n" for text, label in zip(texts, labels, strict=True))
    write(tmp_path, "d.csv", "text,label\n" + lines)
    for path in (tmp_path / "d.parquet", tmp_path / "d.csv"):
        task = file_task(path, path, Columns())
        assert (task.train.texts, task.classes) == (texts, ("01", "1", "null"))
        assert task.train.labels == [0, 2, 1]
    numbers = write(tmp_path, "numbers.csv", "text,label\n007,01\n8,1\n")
    task = file_task(numbers, numbers, Columns())
    assert (task.train.texts, task.classes) == (["007", "8"], ("01", "1"))
    pd.DataFrame({"text": ["a", "b"], "label": [3, 1]}).to_parquet(tmp_path / "n.parquet")
    assert load_task(f"{tmp_path}/n.parquet:{tmp_path}/n.parquet").classes == ("1", "3")


def test_regression_labels_are_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "d.csv", "text,label\na,0.5\nb,-2\n")
    task = file_task(path, path, Columns(regression=True))
    assert task.is_regression and task.outputs == 1
    assert list(task.train.labels) == [0.5, -2.0] and task.metric.name == "Spearman correlation"
    bad = write(tmp_path, "e.csv", "text,label\na,0.5\nb,nan\n")
    with pytest.raises(DataError, match="record 2 has the label 'nan'; expected a number"):
        file_task(bad, bad, Columns(regression=True))


def folder(tmp_path: Path, name: str, labels: Sequence[object] = (0, 1)) -> Path:
    """A folder of rows with these labels."""
    made = tmp_path / name
    made.mkdir()
    lines = "".join(json.dumps({"text": f"is {y}", "label": y}) + "\n" for y in labels)
    for stem in ("train", "dev"):
        (made / f"{stem}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return made


def test_folders(tmp_path: Path) -> None:
    task = folder_task(folder(tmp_path, "cola"), Columns())
    expected = ("cola", ("0", "1"), "Matthews correlation")
    assert (task.name, task.classes, task.metric.name) == expected
    other = folder_task(folder(tmp_path, "mine", ["no", "yes"]), Columns())
    assert other.classes == ("no", "yes") and other.metric.name == "accuracy"


def test_f1_is_of_the_class_labelled_1(tmp_path: Path) -> None:
    """Three of four rows are labelled 1, all predicted so: precision ¾, recall 1, F1 6⁄7.

    Of the other class precision would be ¼ and F1 2⁄5.
    """
    task = folder_task(folder(tmp_path, "mrpc", [1, "1", 1, 0]), Columns())
    assert task.metric([1, 1, 1, 1], task.dev.labels) == pytest.approx(6 / 7)


@pytest.mark.parametrize("labels", [["equivalent", "other"], ["1", "2"], ["0", "1", "2"]])
def test_f1_of_other_labels_is_refused(tmp_path: Path, labels: list[str]) -> None:
    with pytest.raises(DataError, match=f"labels are '{labels[0]}'"):
        folder_task(folder(tmp_path, "mrpc", labels), Columns())
    assert folder_task(folder(tmp_path, "other", labels), Columns()).metric.name == "accuracy"


def test_folders_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no: expected exactly one of train"):
        folder_task(tmp_path / "no", Columns())
    with pytest.raises(DataError, match=r"expected exactly one of train\.jsonl.*it has none"):
        folder_task(tmp_path, Columns())
    made = folder(tmp_path, "two")
    (made / "train.csv").write_text(CSV)
    with pytest.raises(DataError, match=r"it has train\.jsonl\.gz, train\.csv"):
        folder_task(made, Columns())


# The hub, with the loading itself replaced


def made(**splits: dict[str, list[Any]]) -> datasets.DatasetDict:
    return datasets.DatasetDict(
        {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
    )


def load(
    monkeypatch: pytest.MonkeyPatch, name: str, found: Any, columns: Columns | None = None
) -> Task:
    asked: list[tuple[str, ...]] = []

    def fake(*arguments: str) -> Any:
        asked.append(arguments)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(datasets, "load_dataset", fake)
    task = hub_task(name, columns or Columns())
    assert asked == [("glue", name[5:]) if name.startswith("glue/") else (name,)]
    return task


def test_glue_tasks_bring_their_columns_and_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [1, 0]}
    task = load(monkeypatch, "glue/mrpc", made(train=rows, validation=rows))
    assert task.metric.name == "F1" and task.classes == ("0", "1")
    assert (task.train.texts, task.train.second_texts, task.dev.labels) == (
        ["a", "b"],
        ["c", "d"],
        [1, 0],
    )


def test_any_other_name_uses_the_columns_given(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"t": ["a", "b"], "y": ["neg", "pos"]}
    found = made(train=rows, test=rows)
    task = load(monkeypatch, "me/mine", found, Columns(text="t", label="y"))
    assert task.classes == ("neg", "pos") and task.train.labels == [0, 1]


def test_fractions_are_a_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [2.5, 5.0]}
    task = load(monkeypatch, "glue/stsb", made(train=rows, validation=rows))
    assert task.is_regression and task.metric.name == "Spearman correlation"
    assert (task.name, list(task.dev.labels)) == ("stsb", [2.5, 5.0])


def class_labels(names: list[str], train: list[int | None], dev: list[int | None]) -> Any:
    """Splits whose labels are ids of a ClassLabel, as in SNLI; no label is −1 or None there."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    )
    return datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict(
                {"text": [f"{split} {i}" for i in range(len(labels))], "label": labels}, features
            )
            for split, labels in (("train", train), ("validation", dev))
        }
    )


def test_ids_of_named_classes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a class has no training row: the others keep their names."""
    names = ["entailment", "neutral", "contradiction"]
    task = load(monkeypatch, "me/mine", class_labels(names, [0, 2, 2], [1, 2]))
    assert task.classes == tuple(names)
    assert (task.train.labels, task.dev.labels) == ([0, 2, 2], [1, 2])
    titles = [task.classes[int(y)] for y in task.train.labels]
    assert titles == ["entailment", "contradiction", "contradiction"]


@pytest.mark.parametrize(
    ("train", "dev", "words"),
    [
        ([0, 1, 2, -1, 0], [0], "(train): record 4 has the label -1"),
        ([0, 1, None], [0], "(train): record 3 has the label None"),
        ([0, 1, 2], [0, -1], "(validation): record 2 has the label -1"),
    ],
)
def test_rows_without_a_label_are_named(
    monkeypatch: pytest.MonkeyPatch, train: list[Any], dev: list[Any], words: str
) -> None:
    with pytest.raises(DataError) as caught:
        load(monkeypatch, "me/mine", class_labels(["a", "b", "c"], train, dev))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert "expected an id from 0 to 2: drop such rows" in str(caught.value)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ConnectionError("no route\nto host"), "could not be loaded: no route"),
        (made(train={"text": ["a"], "label": [0]}), "needs the splits train and validation"),
        (
            made(
                train={"text": ["a", "b"], "label": [0, 1]},
                validation={"text": ["a"], "label": [2]},
            ),
            "(validation): record 1 has the label '2', which",
        ),
        (
            made(
                train={"text": ["a", "b", "c"], "label": ["x", "y", None]},
                validation={"text": ["a"], "label": ["x"]},
            ),
            "(train): record 3 has the label None; expected a",
        ),
    ],
)
def test_faults_are_one_sentence(monkeypatch: pytest.MonkeyPatch, found: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(monkeypatch, "me/mine", found)
    assert words in str(caught.value) and "\n" not in str(caught.value)


# The part of a task that a comparison uses


def task(rows: int = 20, dev: int = 10) -> Task:
    def examples(count: int, kind: str) -> Examples:
        return Examples([f"{kind}{i}" for i in range(count)], None, [i % 2 for i in range(count)])

    train = examples(rows, "t")
    return Task("x", ("a", "b"), train, train, examples(dev, "d"), ACCURACY)


@settings(deadline=None)
@given(st.integers(4, 20), st.integers(1, 20), st.integers(1, 10), st.integers(0, 9))
def test_selected_rows(train: int, unlabelled: int, dev: int, seed: int) -> None:
    whole = task()
    try:
        made = draw_rows(whole, train, unlabelled, dev, seed)
    except DataError as error:
        assume("all of one class" not in str(error))
        raise
    assert (len(made.train), len(made.unlabelled), len(made.dev)) == (train, unlabelled, dev)
    for part in (made.train, made.unlabelled, made.dev):
        assert len(set(part.texts)) == len(part), "no row twice"
        assert all(int(t[1:]) % 2 == y for t, y in zip(part.texts, part.labels, strict=True))
    shared = len(set(made.train.texts) & set(made.unlabelled.texts))
    assert shared == max(0, train + unlabelled - 20), "only as many as must be"
    assert made == draw_rows(whole, train, unlabelled, dev, seed)


@pytest.mark.parametrize("part", ["train", "dev"])
@pytest.mark.parametrize("label", [-1, 2, 0.5])
def test_labels_are_indices_of_classes(part: str, label: float) -> None:
    whole = task()
    rows = getattr(whole, part)
    bad = replace(rows, labels=[*rows.labels[:-1], label])
    with pytest.raises(DataError, match=rf"label {label}; expected an index of its 2 classes"):
        replace(whole, **{part: bad})


def test_held_out_rows() -> None:
    made = draw_rows(task(), 12, 4, None, 0)
    part = hold_out(made, 0.25)
    assert part.train.texts + part.dev.texts == made.train.texts
    assert len(part.dev) == 3 and part.unlabelled == made.unlabelled
    every = hold_out(draw_rows(task(), 20, None, None, 0), 0.25)
    assert len(every.dev) == 5 and len(every.unlabelled) == 15, "dev texts are not looked at"
    assert not set(every.dev.texts) & set(every.unlabelled.texts)
    same = replace(made, unlabelled=made.train.slice(9, 12))
    assert hold_out(same, 0.25).unlabelled == same.unlabelled, "or there would be none"
    with pytest.raises(DataError, match="cannot be split into 12 to train on and 0"):
        hold_out(made, 0.01)


def test_digests_follow_texts_and_labels() -> None:
    whole = task()
    flipped = replace(whole.dev, labels=[1 - y for y in whole.dev.labels])
    others = [whole, task(19), task(20, 9), replace(whole, dev=flipped)]
    assert len({digest(other) for other in others}) == 4
    assert digest(whole) == digest(task())


def test_words(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("text,label\na,0\nb,1\n")
    assert load_task(f"{path}:{path}").name == "d"
    assert load_task(f"mine={path}:{path}").name == "mine"
    numbers = load_task(f"{path}:{path}", Columns(regression=True))
    assert numbers.is_regression and list(numbers.dev.labels) == [0.0, 1.0]
    for name in ("train.csv", "dev.csv"):
        (tmp_path / name).write_text(path.read_text())
    assert load_task(str(tmp_path)).name == tmp_path.name
    with pytest.raises(DataError, match="unknown task 'cola'; expected glue/"):
        load_task("cola")
    with pytest.raises(DataError, match="unknown GLUE task 'nope'"):
        load_task("glue/nope")


def test_validation_rows_are_dev_rows_that_are_not_judged_on() -> None:
    made = split_validation(task(), 0.3, 4)
    assert made.validation is not None and len(made.validation) == 3
    parts = [*made.validation.texts, *made.dev.texts]
    assert sorted(parts) == sorted(task().dev.texts)
    assert made.train == task().train
    others = {tuple(split_validation(task(), 0.3, seed).dev.texts) for seed in range(5)}
    assert len(others) > 1
    assert len({digest(made), digest(replace(made, validation=None)), digest(task())}) == 3
    assert hold_out(made, 0.25).validation is None
    with pytest.raises(DataError, match="leaves 0 to validate on and 10 to judge on"):
        split_validation(task(), 0.01, 0)


@pytest.mark.parametrize("classes", [2, 3])
def test_wrong_labels(classes: int) -> None:
    """Exactly the share of training rows; each other class alike; nothing else changes."""
    count = 3000
    rows = Examples([f"t{i}" for i in range(count)], None, [i % classes for i in range(count)])
    whole = replace(task(), classes=("a", "b", "c")[:classes], train=rows)
    made = add_label_noise(whole, 0.4, 1)
    moves = [(b - a) % classes for a, b in zip(rows.labels, made.train.labels, strict=True)]
    assert sum(move != 0 for move in moves) == 1200
    if classes == 3:
        assert abs(moves.count(1) - 600) < 4 * 300**0.5
    assert replace(made, train=rows) == whole
    assert add_label_noise(whole, 0.4, 1) == made != add_label_noise(whole, 0.4, 2)
    assert add_label_noise(whole, 0.0, 1) == whole


def test_label_noise_is_of_classes() -> None:
    with pytest.raises(DataError, match="label noise is of classes"):
        add_label_noise(replace(task(), classes=()), 0.2, 0)
