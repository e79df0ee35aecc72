"""The compatibility matrix's own parts: counting, resuming, drawing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jachess_build import compatibility as matrix
from jachess_build.compatibility_results import NEWEST, OLDEST, Result, add, read, to_markdown

RESULT = Result(
    *("2.10", "3.12", NEWEST, "2.10", "full", "passed", "Python 3.12.1, torch 2.10.0", 30, 0, 2),
    *("", 12.5, "abc", "2026-11-21T23:00+00:00"),
)
JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><skipped/></testcase>
<testcase name="c"><failure message="wrong&#10;very"/></testcase>
<testcase name="d"><error message="broken"/></testcase>
</testsuite></testsuites>"""


def test_results_are_kept_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    assert read(path) == []
    oldest = replace(RESULT, transformers=OLDEST, outcome="tests", failed=1, first_failure="a, b")
    add(path, [RESULT])
    assert add(path, [oldest]) == [RESULT, oldest] == read(path)
    again = replace(RESULT, passed=31)
    assert add(path, [again]) == [again, oldest]
    path.write_text("other,columns\n")
    with pytest.raises(SystemExit, match="has columns other than"):
        read(path)


def test_the_page_shows_every_cell() -> None:
    failed = replace(RESULT, torch="2.11", built_with="2.11", outcome="build", passed=0)
    failed = replace(failed, first_failure="error: no compiler")
    other = replace(
        RESULT, torch="2.11", python="3.10", built_with="2.10", tests="operators", passed=7
    )
    page = to_markdown([RESULT, failed, other], ["2.10", "2.11"], ["3.10", "3.12"])
    assert "| 2.10 | not run | 30/0 · not run |\n| 2.11 | not run | no build · not run |" in page
    assert "| 2.10 | 2.11, Python 3.10 | operators | 7/0 |" in page
    assert "`error: no compiler`" in page and page.count("not run") == 5


def test_counting(tmp_path: Path) -> None:
    report, counts = tmp_path / "junit.xml", matrix.Counts()
    matrix.count_tests(report, 4, "it crashed", counts)
    assert (counts.failed, counts.first) == (1, "it crashed")
    report.write_text(JUNIT)
    matrix.count_tests(report, 1, "", counts)
    assert (counts.passed, counts.failed, counts.skipped) == (1, 3, 1)
    second = matrix.Counts()
    matrix.count_tests(report, 1, "", second)
    assert second.first == "c: wrong"
    report.write_text('<testsuites><testsuite><testcase name="a"/></testsuite></testsuites>')
    matrix.count_tests(report, 3, "a crash after the tests", third := matrix.Counts())
    assert (third.passed, third.failed, third.first) == (1, 1, "a crash after the tests")


def test_the_telling_line() -> None:
    log = "WARNING: error in a mirror\nbuilding\nfile.h:3: error: no such name\nfailed\n"
    assert matrix.telling_line(log) == "file.h:3: error: no such name"
    assert matrix.telling_line("one\nlast\n\n") == "last"
    assert matrix.telling_line("") == "no output"


def test_the_first_cells_hold_every_torch_and_every_python() -> None:
    cells = [name.split(":") for name in matrix.default_order()]
    assert len(cells) == len(set(map(tuple, cells))) == 16
    assert {torch for torch, _ in cells[:4]} == set(matrix.TORCHES)
    assert {python for _, python in cells[:4]} == set(matrix.PYTHONS)
    assert matrix.oldest_transformers() == "5.2"
    assert matrix.interpreter("2.99") is None
