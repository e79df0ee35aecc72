"""`mutation.py` finds what the tests hold, and says what they do not."""

from __future__ import annotations

import sys
from subprocess import CompletedProcess

import pytest

from python_tests import mutation, processes


def run(*arguments: str) -> CompletedProcess[str]:
    command = [sys.executable, "-m", "python_tests.mutation", *arguments]
    return processes.run(command)


@pytest.mark.slow
def test_a_mutant_survives_without_its_tests_and_is_noticed_with_them() -> None:
    """Every break of one rule's derivatives."""
    chosen = ("--only", "softsign /")
    found = run(*chosen, "--without", "test_rule[")
    assert found.returncode == 1, found.stdout
    assert "survived: softsign / gradient doubled" in found.stdout
    assert "8 mutants, 2 noticed, 6 survived" in found.stdout
    found = run(*chosen)
    assert found.returncode == 0, found.stdout
    assert "8 mutants, 8 noticed, 0 survived" in found.stdout


def test_nothing_chosen_is_no_success() -> None:
    assert mutation.main(["--only", "no such mutant"]) == 2
