"""Data sets by name, with the loading itself replaced: no hub is needed."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from jachess_ext.tasks.examples import DataError, Task
from jachess_ext.tasks.files import Columns
from jachess_ext.tasks.hub import hub_task


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
    assert (task.train.texts, task.train.pairs, task.dev.labels) == (
        ["a", "b"],
        ["c", "d"],
        [1, 0],
    )


def test_any_other_name_uses_the_columns_given(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"t": ["a", "b"], "y": ["neg", "pos"]}
    found = made(train=rows, test=rows)
    task = load(monkeypatch, "me/mine", found, Columns(text="t", label="y"))
    assert task.classes == ("neg", "pos") and task.train.labels == [0, 1]


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
        ([0, 1, 2, -1, 0], [0], "row 3 of its train split has the label -1"),
        ([0, 1, None], [0], "row 2 of its train split has the label None"),
        ([0, 1, 2], [0, -1], "row 1 of its dev split has the label -1"),
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
            made(train={"x": ["a"], "label": [0]}, validation={"x": ["a"], "label": [0]}),
            "no column 'text'; it has x, label",
        ),
        (
            made(
                train={"text": ["a", "b"], "label": [1, 1]},
                validation={"text": ["a"], "label": [1]},
            ),
            "two or more classes",
        ),
        (
            made(
                train={"text": ["a", "b"], "label": [0, 1]},
                validation={"text": ["a"], "label": [2]},
            ),
            "labels that train lacks",
        ),
        (
            made(
                train={"text": ["a", "b", "c"], "label": ["x", "y", None]},
                validation={"text": ["a"], "label": ["x"]},
            ),
            "row 2 of its train split has the label None",
        ),
    ],
)
def test_faults_are_one_sentence(monkeypatch: pytest.MonkeyPatch, found: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(monkeypatch, "me/mine", found)
    assert words in str(caught.value) and "\n" not in str(caught.value)
