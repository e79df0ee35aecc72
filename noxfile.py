"""The compatibility matrix: each torch with each Python, and the oldest and newest transformers.

    nox                                                      every cell: an hour, gigabytes
    nox -s "matrix-3.12(torch='2.10')" -- --quick            one cell, fewer tests
    nox -s new_torch                                         is the newest torch all right?
    nox -s new_torch -- 2.15.0                               is this one?

A cell installs its torch, then the package from a clean clone of HEAD, as a user does, and runs a
chosen part of the tests on the installed package: with the newest transformers, then with the
oldest that pyproject.toml allows, then those of the operators under every other torch, since one
binary serves them all. docs/compatibility.md has the results.
"""

import shutil
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))
from jachess_build.torches import TESTS

TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
MARKS = "not slow and not sanitizers and not cuda"
# (-k expression, files): tests of a library built against another torch, those that depend on torch
# alone, and those that depend on transformers too; the latter two in full and with --quick.
OPERATORS = (
    ("", "python_tests/ops/test_random_calls.py", "python_tests/ops/test_string_arguments.py"),
)
TORCH = {
    "full": (
        *OPERATORS,
        ("opcheck", "python_tests/ops"),
        ("test_rule", "python_tests/jet/test_rules.py"),
        ("inductor or one_graph", "python_tests/jet/test_compile.py"),
    ),
    "quick": (*OPERATORS, ("inductor and bert", "python_tests/jet/test_compile.py")),
}
TRANSFORMERS = {
    "full": (
        (
            "",
            "python_tests/models/test_derivatives.py",
            "python_tests/smoothness/test_regulariser.py",
            "python_tests/training/test_trainer.py",
        ),
    ),
    "quick": (
        ("none or refuses", "python_tests/models/test_derivatives.py"),
        ("logs_every or resuming", "python_tests/training/test_trainer.py"),
    ),
}
# Tests of an untried torch: import, README's snippets, and all that relies on torch's internals.
NEW_TORCH = (("", *(f"python_tests/{test}" for test in TESTS)),)
nox.options.sessions = ["matrix"]
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
@nox.parametrize("torch", TORCHES)
def matrix(session: nox.Session, torch: str) -> None:
    """Test one torch with one Python."""
    session.env.update(JACHESS_FORCE_CPU="1", OMP_NUM_THREADS="1")
    amount = "quick" if "--quick" in session.posargs else "full"
    clone = install(session, f"torch=={torch}.*")
    oldest = next(
        requirement.partition(">=")[2]
        for requirement in nox.project.load_toml(clone / "pyproject.toml")["project"][
            "optional-dependencies"
        ]["hf"]
        if requirement.startswith("transformers>=")
    )
    run(session, TORCH[amount] + TRANSFORMERS[amount])
    session.install(f"transformers=={oldest}.*")
    run(session, TRANSFORMERS[amount])
    for other in TORCHES:
        if other != torch:
            session.install(f"torch=={other}.*")
            run(session, OPERATORS)


@nox.session
def new_torch(session: nox.Session) -> None:
    """Test an untried torch, the newest or the named one, with the newest transformers."""
    session.env.update(JACHESS_FORCE_CPU="1", OMP_NUM_THREADS="1")
    install(session, f"torch=={session.posargs[0]}" if session.posargs else "torch")
    versions = "import torch, transformers; print(torch.__version__, transformers.__version__)"
    session.run("python", "-c", versions)
    session.run(
        "python",
        "-W",
        "error::RuntimeWarning",
        "-c",
        "import jachess_ext as jx; jx.jet, jx.ntk, jx.ops",
    )
    run(session, NEW_TORCH)


def install(session: nox.Session, torch: str) -> Path:
    """Install this torch and the package from a clean clone of HEAD, which is returned, and go to
    a folder with the tests alone, so that the installed package is tested."""
    folder = Path(session.create_tmp())
    clone, tests = folder / "clone", folder / "tests"
    for left in (clone, tests):
        shutil.rmtree(left, ignore_errors=True)
    session.run("git", "clone", "-q", str(Path(__file__).parent), str(clone), external=True)
    session.install(torch)
    session.install(f"{clone}[demo]", "pytest", "pytest-benchmark", "hypothesis", "expecttest")
    shutil.copytree(clone, tests, ignore=shutil.ignore_patterns("jachess_ext", ".git", "build"))
    session.chdir(tests)
    return clone


def run(session: nox.Session, suites: tuple[tuple[str, ...], ...]) -> None:
    """Run these tests on the installed package."""
    for chosen, *files in suites:
        command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS]
        session.run(*command, "-k", chosen, *files)
