"""Put each mended fault back, in a copy of the checkout, and print which tests notice.

    python -m python_tests.faults                    every fault, as a table
    python -m python_tests.faults --only strides     those whose name has this word

A fault is listed in one of the modules beside this one, in ``FAULTS``.  The command fails where a
test that should notice a fault passes, or where the text to replace is not there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from python_tests import faults
from python_tests.faults import Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("jachess_ext", "python_tests", "build_backend", "benchmarks", "examples", "docs")


def all_faults() -> list[Fault]:
    """Every fault of the modules beside this one."""
    names = sorted(module.name for module in pkgutil.iter_modules(faults.__path__))
    modules = [importlib.import_module(f"{faults.__name__}.{n}") for n in names if n != "__main__"]
    return [fault for module in modules for fault in module.FAULTS]


def copy_checkout(folder: Path) -> None:
    """Copy what the tests need, without caches."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".pytest_cache")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for file in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("*.py"), *ROOT.glob("*.yml")):
        shutil.copy(file, folder)
    shutil.copy(ROOT / "Makefile", folder)


def edited(fault: Fault, folder: Path) -> dict[Path, str]:
    """Return the files of a checkout that the fault changes, with the fault in them.

    Raises:
        SystemExit: a text to replace does not occur exactly once.
    """
    texts: dict[Path, str] = {}
    for edit in fault.edits:
        file = folder / edit.file
        text = texts[file] if file in texts else file.read_text(encoding="utf-8")
        if text.count(edit.mended) != 1:
            count = text.count(edit.mended)
            raise SystemExit(
                f"{fault.name}: {edit.mended!r} occurs {count} times in {edit.file}; expected once"
            )
        texts[file] = text.replace(edit.mended, edit.faulty)
    return texts


def noticed(test: str, folder: Path) -> list[str]:
    """The names of the tests that failed; none where pytest could not run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-rfE"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *shlex.split(test)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 1:  # 2 and more: not run, or nothing collected
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.split()[1] for line in lines]


def row(fault: Fault) -> tuple[str, bool]:
    """The fault's row of the table, and whether every test noticed it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_checkout(folder)
        for file, text in edited(fault, folder).items():
            file.write_text(text, encoding="utf-8")
        found = {test: noticed(test, folder) for test in fault.tests}
    cells = [
        f"`{names[0]}`" if names else f"**{test} failed nothing**" for test, names in found.items()
    ]
    return f"| {fault.name} | {', '.join(cells)} |", all(found.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time")
    arguments = parser.parse_args()
    chosen = [fault for fault in all_faults() if arguments.only in fault.name]
    if not chosen:
        raise SystemExit(f"no fault's name holds {arguments.only!r}")
    print("| fault put back | first test that fails |\n|---|---|")
    whole = True
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for text, good in pool.map(row, chosen):
            print(text, flush=True)
            whole = whole and good
    raise SystemExit(0 if whole else 1)


if __name__ == "__main__":
    main()
