"""Damaged files to every reader: a result, or one sentence and nothing written; see `fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .fuzz import attempt
from .mutations import hostile, mutated
from .readers import READERS, SLOW

SEEDS = 40


@pytest.mark.parametrize("name", READERS)
def test_the_valid_file_is_read(tmp_path: Path, name: str) -> None:
    assert attempt(READERS[name], tmp_path, READERS[name].valid) == "read"


@pytest.mark.parametrize("name", READERS)
def test_hostile_files(tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    answers = []
    for number, (damage, content) in enumerate(hostile(reader.valid).items()):
        try:
            answers.append(attempt(reader, tmp_path / str(number), content))
        except AssertionError as error:
            raise AssertionError(f"{damage}: {error}") from error
    if name not in ("ntk txt", "run file"):  # any text is a text; a damaged run is made again
        assert answers.count("refused") > 15


@pytest.mark.parametrize("name", READERS)
def test_random_damage(tmp_path: Path, name: str) -> None:
    """The same files every time; `python -m python_tests.hardening.fuzz` makes more of them."""
    reader = READERS[name]
    for seed in range(SEEDS // 4 if name in SLOW else SEEDS):
        try:
            attempt(reader, tmp_path / str(seed), mutated(reader.valid, seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("kind", ["missing", "folder", "link to itself"])
@pytest.mark.parametrize("name", READERS)
def test_no_file(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / READERS[name].file
    path.parent.mkdir(exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path)
    # what is not there is not read
    optional = name in ("labels.json", "run file", "checkpoint")
    expected = {"refused", "read"} if optional else {"refused"}
    assert attempt(READERS[name], tmp_path) in expected


@pytest.mark.parametrize("name", READERS)
def test_a_link_is_followed(tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    (tmp_path / "elsewhere").write_bytes(reader.valid)
    path = tmp_path / "here" / reader.file
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere")
    assert attempt(reader, tmp_path / "here") == "read"
