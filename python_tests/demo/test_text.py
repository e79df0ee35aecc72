"""The demo's own task: the same on every call, balanced, without leaks."""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter

import pytest

from jachess_ext.demo.sentences import NAME, PACKAGE_WORDS
from jachess_ext.demo.text import TextTask, is_dev_file, load_text_task
from python_tests import processes

PACKAGES = ("python", "numpy", "sklearn")


@pytest.fixture(scope="module")
def task() -> TextTask:
    return load_text_task(90, 60, PACKAGES)


def test_it_is_the_same_in_another_process(task: TextTask) -> None:
    code = (
        "from jachess_ext.demo.text import load_text_task as load; import hashlib;"
        f"t = load(90, 60, {PACKAGES}); print(hashlib.sha256(repr(t).encode()).hexdigest())"
    )
    found = {
        processes.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {hashlib.sha256(repr(task).encode()).hexdigest() + "\n"}


def test_classes_are_balanced(task: TextTask) -> None:
    assert Counter(task.train.labels) == dict.fromkeys(range(3), 30)
    assert Counter(task.dev.labels) == dict.fromkeys(range(3), 20)
    assert task.classes == PACKAGES


def test_labels_are_those_of_the_files(task: TextTask) -> None:
    for split in (task.train, task.dev):
        for label, file in zip(split.labels, split.files, strict=True):
            assert file.startswith(f"{PACKAGES[label]}/")


def test_no_file_serves_both_splits(task: TextTask) -> None:
    assert not set(task.train.files) & set(task.dev.files)
    for split, dev in ((task.train, False), (task.dev, True)):
        for file in split.files:
            assert is_dev_file(*file.split("/", 1)) == dev


def runs(text: str) -> set[str]:
    words = re.findall(r"[a-z]+", text.replace(NAME, " ").lower())
    return {" ".join(words[i : i + 4]) for i in range(len(words) - 3)}


def test_no_near_duplicates(task: TextTask) -> None:
    train = [runs(text) for text in task.train.texts]
    for text in task.dev.texts:
        own = runs(text)
        assert max(len(own & other) / len(own) for other in train) < 0.5


def test_no_sentence_names_a_package(task: TextTask) -> None:
    for text in task.train.texts + task.dev.texts:
        words = set(re.findall(r"[a-z]+", text.replace(NAME, " ").lower()))
        assert not words & PACKAGE_WORDS, text


def test_bad_requests_are_named() -> None:
    with pytest.raises(ValueError, match="two packages"):
        load_text_task(90, 60, ("numpy",))
    with pytest.raises(ValueError, match=r"'no_such_package_here' is not installed.*\[demo\]"):
        load_text_task(90, 60, ("numpy", "no_such_package_here"))
    with pytest.raises(ValueError, match=r"'mpmath' has \d+ usable sentences"):
        load_text_task(20_000, 60, ("mpmath", "joblib"))
