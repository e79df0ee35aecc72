"""What CI leaves out: which torches are tested, and when the sanitizers run."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from jachess_build import prepare, sanitized, torches

from python_tests import processes

TESTS = prepare.ROOT / "python_tests"


def test_the_newest_and_the_oldest_torch_are_those_that_are_promised() -> None:
    newest, oldest = (release.removesuffix(".0") for release in torches.TORCHES)
    promised = f"torch {oldest} to {newest}"
    for page in ("README.md", "docs/compatibility.md"):
        assert promised in (prepare.ROOT / page).read_text(), page
    assert f'"torch>={oldest}"' in (prepare.ROOT / "pyproject.toml").read_text()
    matrix = re.search(r"TORCHES = \((.*)\)", (prepare.ROOT / "noxfile.py").read_text())
    assert matrix and matrix[1].startswith(f'"{oldest}"') and matrix[1].endswith(f'"{newest}"')


def test_their_files_are_there() -> None:
    """Pytest itself looks for functions."""
    files = [test.partition("::")[0] for test in torches.TESTS]
    assert [file for file in files if not (TESTS / file).is_file()] == []


@pytest.mark.parametrize(
    "changed, seen",
    [("cpu/norm_jet.cpp", True), ("cuda/new_kernel.cu", True), ("sanitized.txt", False)],
)
def test_a_change_of_csrc_is_seen_by_the_sanitizers(
    changed: str, seen: bool, tmp_path: Path
) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(sanitized.CSRC, csrc)
    before = sanitized.digest(sanitized.CSRC)
    assert sanitized.digest(csrc) == before
    with (csrc / changed).open("a") as file:
        file.write("// more\n")
    assert (sanitized.digest(csrc) != before) is seen


def test_a_part_is_of_the_tests_that_a_mark_leaves(tmp_path: Path) -> None:
    """`--part` of conftest.py."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_numbers.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(7))\n"
        "@pytest.mark.parametrize('kind', ['a', pytest.param('b', marks=pytest.mark.slow)])\n"
        "def test(n, kind): assert kind == 'a' and n in (1, 4)\n"
    )
    options = ["-m", "pytest", "-q", "-m", "not slow", "--part", "2/3", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(prepare.ROOT)}
    done = processes.run([sys.executable, *options, tmp_path], env=environment, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout
