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
    ],
)
def test_faults_are_one_sentence(monkeypatch: pytest.MonkeyPatch, found: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(monkeypatch, "me/mine", found)
    assert words in str(caught.value) and "\n" not in str(caught.value)
