"""Tasks by a word, and the part of one that a comparison uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jachess_ext.evaluation.metrics import ACCURACY
from jachess_ext.tasks.examples import DataError, Examples, Task
from jachess_ext.tasks.files import Columns
from jachess_ext.tasks.spec import (
    digest,
    held_out,
    load_task,
    selected,
    with_validation,
    with_wrong_labels,
)


def task(rows: int = 20, dev: int = 10) -> Task:
    def examples(count: int, kind: str) -> Examples:
        return Examples([f"{kind}{i}" for i in range(count)], None, [i % 2 for i in range(count)])

    train = examples(rows, "t")
    return Task("x", "", ("a", "b"), train, train, examples(dev, "d"), ACCURACY)


@settings(deadline=None)
@given(st.integers(4, 20), st.integers(1, 20), st.integers(1, 10), st.integers(0, 9))
def test_selected_rows(train: int, unlabelled: int, dev: int, seed: int) -> None:
    whole = task()
    try:
        made = selected(whole, train, unlabelled, dev, seed)
    except DataError as error:
        assume("all of one class" not in str(error))
        raise
    assert (len(made.train), len(made.unlabelled), len(made.dev)) == (train, unlabelled, dev)
    for part in (made.train, made.unlabelled, made.dev):
        assert len(set(part.texts)) == len(part), "no row twice"
        assert all(int(t[1:]) % 2 == y for t, y in zip(part.texts, part.labels, strict=True))
    shared = len(set(made.train.texts) & set(made.unlabelled.texts))
    assert shared == max(0, train + unlabelled - 20), "only as many as must be"
    assert made == selected(whole, train, unlabelled, dev, seed)


@pytest.mark.parametrize("part", ["train", "dev"])
@pytest.mark.parametrize("label", [-1, 2, 0.5])
def test_labels_are_indices_of_classes(part: str, label: float) -> None:
    whole = task()
    rows = getattr(whole, part)
    bad = replace(rows, labels=[*rows.labels[:-1], label])
    with pytest.raises(DataError, match=rf"label {label}; expected an index of its 2 classes"):
        replace(whole, **{part: bad})


def test_held_out_rows() -> None:
    made = selected(task(), 12, 4, None, 0)
    part = held_out(made, 0.25)
    assert part.train.texts + part.dev.texts == made.train.texts
    assert len(part.dev) == 3 and part.unlabelled == made.unlabelled
    every = held_out(selected(task(), 20, None, None, 0), 0.25)
    assert len(every.dev) == 5 and len(every.unlabelled) == 15, "dev texts are not looked at"
    assert not set(every.dev.texts) & set(every.unlabelled.texts)
    same = replace(made, unlabelled=made.train.part(9, 12))
    assert held_out(same, 0.25).unlabelled == same.unlabelled, "or there would be none"
    with pytest.raises(DataError, match="cannot be split into 12 to train on and 0"):
        held_out(made, 0.01)


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
    assert numbers.regression and list(numbers.dev.labels) == [0.0, 1.0]
    for name in ("train.csv", "dev.csv"):
        (tmp_path / name).write_text(path.read_text())
    assert load_task(str(tmp_path)).name == tmp_path.name
    with pytest.raises(DataError, match="unknown task 'cola'; expected glue/"):
        load_task("cola")
    with pytest.raises(DataError, match="unknown GLUE task 'nope'"):
        load_task("glue/nope")


def test_validation_rows_are_dev_rows_that_are_not_judged_on() -> None:
    made = with_validation(task(), 0.3, 4)
    assert made.validation is not None and len(made.validation) == 3
    parts = [*made.validation.texts, *made.dev.texts]
    assert sorted(parts) == sorted(task().dev.texts)
    assert made.train == task().train
    others = {tuple(with_validation(task(), 0.3, seed).dev.texts) for seed in range(5)}
    assert len(others) > 1
    assert len({digest(made), digest(replace(made, validation=None)), digest(task())}) == 3
    assert held_out(made, 0.25).validation is None
    with pytest.raises(DataError, match="leaves 0 to validate on and 10 to judge on"):
        with_validation(task(), 0.01, 0)


@pytest.mark.parametrize("classes", [2, 3])
def test_wrong_labels(classes: int) -> None:
    """Exactly the share of training rows; each other class alike; nothing else changes."""
    count = 3000
    rows = Examples([f"t{i}" for i in range(count)], None, [i % classes for i in range(count)])
    whole = replace(task(), classes=("a", "b", "c")[:classes], train=rows)
    made = with_wrong_labels(whole, 0.4, 1)
    moves = [(b - a) % classes for a, b in zip(rows.labels, made.train.labels, strict=True)]
    assert sum(move != 0 for move in moves) == 1200
    if classes == 3:
        assert abs(moves.count(1) - 600) < 4 * 300**0.5
    assert replace(made, train=rows) == whole
    assert with_wrong_labels(whole, 0.4, 1) == made != with_wrong_labels(whole, 0.4, 2)
    assert with_wrong_labels(whole, 0.0, 1) == whole


def test_label_noise_is_of_classes() -> None:
    with pytest.raises(DataError, match="label noise is of classes"):
        with_wrong_labels(replace(task(), classes=()), 0.2, 0)
