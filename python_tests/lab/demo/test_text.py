"""The demo's task and the script that wrote it: clean masked sentences, balanced, without leaks."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from examples import docstrings
from examples.docstrings import NAME, file_sentences, is_dev_file, source_files
from jachess_ext._io import DataError
from jachess_ext.lab.demo import docstring_task
from jachess_ext.lab.workbench.tasks import Task


def sentences(docstring: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return what the demo makes of a file that does nothing but fail when it is imported."""
    monkeypatch.setattr(docstrings, "root_of", lambda package: folder)
    (folder / "signal.py").write_text(f'def f():\n    r"""{docstring}"""\nraise SystemExit\n')
    return file_sentences("any", "signal.py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The value of `alpha` is used", f"The value of {NAME} is used"),
        ("The my_value is used", f"The {NAME} is used"),
        ("The DataFrame is used", f"The {NAME} is used"),
        ("The value 3 is used", f"The value {NAME} is used"),
        ("The call foo(x, y=2) is used", f"The call {NAME} is used"),
        ("The NumPy library is used", f"The {NAME} library is used"),
        ("The :class:`~a.B` object is used", f"The {NAME} object is used"),
        ('The "mean" mode is used', f"The {NAME} mode is used"),
        ("The a.b, c_d and e1 are used", f"The {NAME} and {NAME} are used"),
        ("The signals of the package are used", f"The {NAME} of the package are used"),
    ],
)
def test_names_are_masked(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sentences(f"{text} for all of the rows.", tmp_path, monkeypatch)
    assert made == [[f"{expected} for all of the rows."]]


def test_what_is_no_prose_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """Return the sum of all the
    values in it. And then the rest of the values.

    Parameters
    ----------
    x : array of the values that are to be summed here.
        The values that are to be added to one another.

    >>> The line below the prompt is not for the reader.
    - An item of a list that is not for the reader.
    .. note:: The directive of the text is not for the reader.
    Too short it is.
    no capital letter at the start of this line here.

    The result x = y is for all of the rows.

    The naïve result is for all of the rows.

    No full stop at the end of this line here
    """
    assert sentences(text, tmp_path, monkeypatch) == [
        [
            "Return the sum of all the values in it.",
            "And then the rest of the values.",
            "The values that are to be added to one another.",
        ]
    ]
    assert sentences('"""def broken(:', tmp_path, monkeypatch) == []


@pytest.fixture(scope="module")
def task() -> Task:
    return docstring_task()


def test_classes_are_balanced_and_named_by_none(task: Task) -> None:
    assert Counter(task.train.labels) == dict.fromkeys(range(6), 200)
    assert Counter(task.dev.labels) == dict.fromkeys(range(6), 80)
    assert Counter(docstring_task(90, 60).train.labels) == dict.fromkeys(range(6), 15)
    for text in task.train.texts + task.dev.texts:
        words = set(re.findall(r"[a-z]+", text.replace(NAME, " ").lower()))
        assert not words & {*task.classes, "pytorch", "np", "scikit"}, text


def test_no_file_serves_both_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: dict[str, set[tuple[str, str]]] = {}

    def spy(package: str, path: str) -> list[list[str]]:
        groups = file_sentences(package, path)
        for text in chain.from_iterable(groups):
            sources.setdefault(text, set()).add((package, path))
        return groups

    monkeypatch.setattr(docstrings, "file_sentences", spy)
    for part, dev in zip(docstrings.docstring_task(60, 30), (False, True), strict=True):
        for text, label in part.items():
            own = {file for file in sources[text] if is_dev_file(*file) == dev}
            assert label in {package for package, _ in own}


def test_no_near_duplicates(task: Task) -> None:
    def runs(text: str) -> set[str]:
        words = re.findall(r"[a-z]+", text.replace(NAME, " ").lower())
        return {" ".join(words[i : i + 4]) for i in range(len(words) - 3)}

    assert not docstrings._is_new("b c d e f g h.", runs("a b c d e f g"))
    train = [runs(text) for text in task.train.texts]
    for own in map(runs, task.dev.texts):
        assert max(len(own & other) / len(own) for other in train) < 0.5


def test_sources_are_without_tests() -> None:
    files = source_files("numpy")
    assert files == sorted(files) and "linalg/_linalg.py" in files
    assert not any("/tests/" in f"/{path}" for path in files)


def test_bad_requests_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="600 sentences of dev were asked for; there are 480"):
        docstring_task(1200, 600)
    monkeypatch.setattr(docstrings, "PACKAGES", ("joblib", "tqdm"))
    with pytest.raises(DataError, match=r"'tqdm' has \d+ sentences to use, and 900 are needed"):
        docstrings.docstring_task(2, 1800)
    with pytest.raises(DataError, match=r"'no_such_package' is not installed.*\[demo\]"):
        source_files("no_such_package")
