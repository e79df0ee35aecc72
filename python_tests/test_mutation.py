"""`mutation.py` finds what the tests hold, and says what they do not."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess

from python_tests import mutation, processes


def run(*arguments: str) -> CompletedProcess[str]:
    command = [sys.executable, "-m", "python_tests.mutation", *arguments]
    return processes.run(command)


def test_without_its_tests_a_mutant_survives() -> None:
    found = run("--only", "softsign / gradient doubled", "--without", "test_backward_of_rule")
    assert found.returncode == 1, found.stdout
    assert "survived: softsign / gradient doubled" in found.stdout


def test_a_small_part_of_the_mutants_is_noticed(tmp_path: Path) -> None:
    """Breaks of one rule's second derivatives.  What a log says was noticed is taken from it; what
    survived is tried again."""
    log = tmp_path / "log"
    kinds = ("wrong sign", "last stream zero")
    names = [f"softsign / second order: {kind}" for kind in kinds]
    log.write_text(f"noticed: {names[0]}\nsurvived: {names[1]}\nnoticed: of another run\n")
    found = run("--only", "softsign / second order", "--log", str(log))
    assert found.returncode == 0, found.stdout
    assert "2 mutants, 2 noticed, 0 survived" in found.stdout
    assert log.read_text().splitlines()[3:] == [f"noticed: {names[1]}"]


def test_nothing_chosen_is_no_success() -> None:
    assert mutation.main(["--only", "no such mutant"]) == 2
