"""The compatibility matrix: each torch with each Python, and the oldest and newest transformers.

    PYTHONPATH=build_backend python -m jachess_build.compatibility [--cells 2.10:3.12 ...]

Each cell is a virtual environment of its own, thrown away afterwards: its torch, the package from a
clean clone of HEAD as a user installs it, and a chosen part of the tests, run on the installed
package. Results go to docs/compatibility.csv as they come and docs/compatibility.md is drawn from
them; what the file has is not run again unless named with --again. The operators' library of every
cell is kept under --work, and each later cell runs the operators' tests with the libraries built
against the other torches too.

A CUDA torch needs some 7 GB of disk while its cell runs. `uv`, where found, installs torch: it
links what another cell has unpacked already.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from .compatibility_results import NEWEST, OLDEST, Result, add, read, to_markdown
from .prepare import ROOT, write_atomically

TORCHES = ("2.10", "2.11", "2.12", "2.13")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RESULTS = ROOT / "docs" / "compatibility.csv"
_PYTEST = ("pytest", "pytest-benchmark", "hypothesis")
_MARKS = "not slow and not sanitizers and not cuda"
# (files, -k expression): what depends on torch alone, what on transformers too, and what a library
# built against another torch is asked.
_OPERATORS = (
    ("python_tests/ops/test_random_calls.py", ""),
    ("python_tests/ops/test_string_arguments.py", ""),
)
_TORCH = (
    *_OPERATORS,
    ("python_tests/ops", "opcheck"),
    ("python_tests/jet/test_rules.py", "test_rule"),
    ("python_tests/jet/test_compile.py", "inductor or one_graph"),
)
# Some minutes less: --quick.
_QUICK = (("python_tests/jet/test_compile.py", "inductor and bert"),)
_QUICK_TRANSFORMERS = (
    ("python_tests/models/test_derivatives.py", "none or refuses"),
    ("python_tests/training/test_trainer.py", "logs_every or resuming"),
)
_TRANSFORMERS = (
    ("python_tests/models/test_derivatives.py", ""),
    ("python_tests/smoothness/test_regulariser.py", ""),
    ("python_tests/training/test_trainer.py", ""),
)
_VERSIONS = """
import platform, importlib.metadata as m
print(", ".join(["Python " + platform.python_version()] +
                [n + " " + m.version(n) for n in ("torch", "numpy", "transformers")]))
"""


class StepFailed(Exception):
    """An installation that failed; `line` is the first that says why."""

    def __init__(self, step: str, output: str) -> None:
        super().__init__(step)
        self.step, self.line = step, telling_line(output)


@dataclass
class Counts:
    """Of tests, with the first failure in one line."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    first: str = ""


def telling_line(output: str) -> str:
    """The first line of a build's or installer's output that names an error, else its last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(?i)\berror\b", line) and "WARNING" not in line]
    return (errors or lines[-1:] or ["no output"])[0][:300]


def interpreter(python: str) -> str | None:
    """A Python of this version: python3.12 on the path, or one of pyenv's."""
    if found := shutil.which(f"python{python}"):
        done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
        if done.returncode == 0:  # pyenv's shims exist for versions that are not chosen
            return found
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found_here = sorted(versions.glob(f"{python}.*/bin/python"))
    return str(found_here[-1]) if found_here else None


def oldest_transformers() -> str:
    """The floor that pyproject.toml sets, such as "5.0"."""
    found = re.search(r'"transformers>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


class Cell:
    """One torch with one Python, in the folder `work`."""

    def __init__(self, torch: str, python: str, work: Path) -> None:
        self.torch, self.python, self.work = torch, python, work
        self.folder = work / f"torch{torch}-python{python}"
        self.environment = {**os.environ, "JACHESS_FORCE_CPU": "1", "OMP_NUM_THREADS": "1"}
        if find_links := os.environ.get("PIP_FIND_LINKS"):
            self.environment.setdefault("UV_FIND_LINKS", find_links)

    @property
    def _stamp(self) -> Path:
        return self.folder / "installed-commit"

    @property
    def venv_python(self) -> str:
        """The cell's own interpreter."""
        return str(self.folder / "venv" / "bin" / "python")

    def clone(self) -> str:
        """A clean clone of HEAD, in a folder made anew unless its commit was installed there.

        Returns:
            The commit.
        """
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
        head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if self._stamp.is_file() and self._stamp.read_text() == head:
            return head
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        clone = self.folder / "clone"
        self._run("clone", ["git", "clone", "-q", str(ROOT), str(clone)])
        return head

    def install(self, commit: str) -> None:
        """Make the environment, install torch and then the package with its extras.

        Raises:
            StepFailed: torch could not be installed, or the package not built.
        """
        if self._stamp.is_file():
            return
        clone = self.folder / "clone"
        own = interpreter(self.python)
        if own is None:
            raise StepFailed("python", f"error: no Python {self.python} was found")
        self._run("venv", [own, "-m", "venv", str(self.folder / "venv")])
        self._run("torch", [*self._installer(), f"torch=={self.torch}.*"])
        pip = [self.venv_python, "-m", "pip", "install", "--no-cache-dir"]
        self._run("build", [*pip, f"{clone}[demo]", *_PYTEST])
        # The tests without the package beside them, so that the installed one is tested.
        for name in ("python_tests", "build_backend"):
            shutil.copytree(clone / name, self.folder / "tests" / name)
        shutil.copy(clone / "pyproject.toml", self.folder / "tests")
        self._stamp.write_text(commit)

    def install_transformers(self, version: str) -> None:
        """Another transformers in place of the newest.

        Raises:
            StepFailed: it cannot be installed.
        """
        self._stamp.unlink(missing_ok=True)  # no longer what was installed
        self._run("transformers", [*self._installer(), f"transformers=={version}.*"])

    def _installer(self) -> list[str]:
        if uv := shutil.which("uv"):
            return [uv, "pip", "install", "--python", self.venv_python]
        return [self.venv_python, "-m", "pip", "install", "--no-cache-dir"]

    def _run(self, step: str, command: Sequence[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        (self.folder / f"{step}.log").write_text(done.stdout)
        if done.returncode != 0:
            raise StepFailed(step, done.stdout)
        return done.stdout

    def versions(self) -> str:
        """Python, torch, numpy and transformers of the environment."""
        return self._run("versions", [self.venv_python, "-c", _VERSIONS]).strip()

    def library(self) -> Path:
        """The operators' library that was installed."""
        (found,) = (self.folder / "venv").glob("lib/python*/site-packages/jachess_ext/_ops*.so")
        return found

    def test(self, suites: Sequence[tuple[str, str]], library: Path | None = None) -> Counts:
        """Run the suites one after the other on the installed package (or another library)."""
        environment = dict(self.environment)
        if library is not None:
            environment["JACHESS_OPS_LIBRARY"] = str(library)
        total = Counts()
        for number, (files, chosen) in enumerate(suites):
            report = self.folder / "junit.xml"
            report.unlink(missing_ok=True)
            command = [self.venv_python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["-m", _MARKS, "-k", chosen, "--junitxml", str(report), files]
            done = subprocess.run(
                command,
                cwd=self.folder / "tests",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            (self.folder / f"tests{number}.log").write_text(done.stdout)
            count_tests(report, done.returncode, f"{files}: {telling_line(done.stdout)}", total)
        return total


def count_tests(report: Path, status: int, crash: str, total: Counts) -> None:
    """Add pytest's JUnit report to `total`; a run without one counts as a failure, `crash`."""
    if not report.is_file():
        total.failed += 1
        total.first = total.first or crash
        return
    failed_before = total.failed
    for case in xml.parse(report).iter("testcase"):
        fault = next((case.find(k) for k in ("failure", "error") if case.find(k) is not None), None)
        if fault is not None:
            total.failed += 1
            line = (fault.get("message") or "").strip().splitlines() or [""]
            total.first = total.first or f"{case.get('name')}: {line[0]}"[:300]
        elif case.find("skipped") is not None:
            total.skipped += 1
        else:
            total.passed += 1
    if status != 0 and total.failed == failed_before:
        total.failed += 1
        total.first = total.first or crash


def run_cell(cell: Cell, quick: bool = False) -> list[Result]:
    """Everything about one torch and Python: both transformers, and other cells' libraries."""
    start = time.monotonic()
    now = datetime.now(timezone.utc).isoformat(timespec="minutes")
    commit = cell.clone()
    empty = Result(
        torch=cell.torch,
        python=cell.python,
        transformers=NEWEST,
        built_with=cell.torch,
        tests="quick" if quick else "full",
        outcome="passed",
        versions="",
        passed=0,
        failed=0,
        skipped=0,
        first_failure="",
        minutes=0.0,
        commit=commit,
        date=now,
    )
    models = _QUICK_TRANSFORMERS if quick else _TRANSFORMERS

    def filled(result: Result, counts: Counts) -> Result:
        outcome = "tests" if counts.failed else "passed"
        return replace(
            result,
            outcome=outcome,
            versions=cell.versions(),
            passed=counts.passed,
            failed=counts.failed,
            skipped=counts.skipped,
            first_failure=counts.first,
            minutes=round((time.monotonic() - start) / 60, 1),
        )

    def broken(result: Result, error: StepFailed) -> Result:
        minutes = round((time.monotonic() - start) / 60, 1)
        return replace(result, outcome=error.step, first_failure=error.line, minutes=minutes)

    try:
        cell.install(commit)
    except StepFailed as error:
        return [broken(empty, error)]
    kept = cell.work / f"_ops-{cell.torch}.so"
    shutil.copy(cell.library(), kept)
    results = [filled(empty, cell.test([*(_OPERATORS + _QUICK if quick else _TORCH), *models]))]
    for library in sorted(cell.work.glob("_ops-*.so")):
        built_with = library.stem.removeprefix("_ops-")
        if built_with != cell.torch:
            found = cell.test(_OPERATORS, library)
            other = replace(empty, built_with=built_with, tests="operators")
            results.append(filled(other, found))
    oldest = replace(empty, transformers=OLDEST)
    try:
        cell.install_transformers(oldest_transformers())
        results.append(filled(oldest, cell.test(models)))
    except StepFailed as error:
        results.append(broken(oldest, error))
    return results


def default_order() -> list[str]:
    """Every cell; first those that between them hold each torch and each Python once."""
    count = len(TORCHES)
    shifts = [(i, (i + shift) % count) for shift in range(count) for i in range(count)]
    return [f"{TORCHES[i]}:{PYTHONS[j]}" for i, j in shifts]


def main() -> None:
    """Run the cells that have no result yet, and draw the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", nargs="*", default=default_order(), metavar="TORCH:PYTHON")
    parser.add_argument("--again", action="store_true", help="also cells that have a result")
    parser.add_argument("--quick", action="store_true", help="fewer tests a cell")
    parser.add_argument("--work", type=Path, default=Path("/tmp/jachess-compatibility"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    done = {(r.torch, r.python) for r in read(options.results) if r.built_with == r.torch}
    for name in options.cells:
        torch, _, python = name.partition(":")
        if torch not in TORCHES or python not in PYTHONS:
            raise SystemExit(f"no cell {name!r}; expected one of {', '.join(default_order())}.")
        if (torch, python) in done and not options.again:
            continue
        print(f"torch {torch}, Python {python} ...", flush=True)
        cell = Cell(torch, python, options.work.resolve())
        for result in (found := run_cell(cell, options.quick)):
            print(
                f"  transformers {result.transformers}, built with {result.built_with}: "
                f"{result.outcome}, {result.passed} passed, {result.failed} failed "
                f"{result.first_failure}",
                flush=True,
            )
        draw(options.results, add(options.results, found))
        shutil.rmtree(cell.folder / "venv", ignore_errors=True)
    draw(options.results, read(options.results))


def draw(path: Path, results: list[Result]) -> None:
    """The page beside the results file."""
    write_atomically(path.with_suffix(".md"), to_markdown(results, TORCHES, PYTHONS))


if __name__ == "__main__":
    main()
