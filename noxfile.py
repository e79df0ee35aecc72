"""The compatibility matrix: each torch with each Python, and the oldest and newest transformers.

    nox                                                      every cell: an hour, gigabytes
    nox -s "matrix-3.12(torch='2.10')" -- --quick            one cell, fewer tests

A cell installs its torch, then the package from a clean clone of HEAD, as a user does, and runs a
chosen part of the tests on the installed package: with the newest transformers, then with the
oldest that pyproject.toml allows, then those of the operators under every other torch, since one
binary serves them all. docs/compatibility.md has what was found.
"""

import shutil
from pathlib import Path

import nox

TORCHES = ("2.10", "2.11", "2.12", "2.13")
MARKS = "not slow and not sanitizers and not cuda"
# (-k expression, files): what a library built against another torch is asked, what depends on torch
# alone, and what on transformers too; the latter two in full and with --quick.
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
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
@nox.parametrize("torch", TORCHES)
def matrix(session: nox.Session, torch: str) -> None:
    """One torch with one Python."""
    session.env.update(JACHESS_FORCE_CPU="1", OMP_NUM_THREADS="1")
    amount = "quick" if "--quick" in session.posargs else "full"
    folder = Path(session.create_tmp())
    clone, tests = folder / "clone", folder / "tests"
    for left in (clone, tests):
        shutil.rmtree(left, ignore_errors=True)
    session.run("git", "clone", "-q", str(Path(__file__).parent), str(clone), external=True)
    session.install(f"torch=={torch}.*")
    session.install(f"{clone}[demo]", "pytest", "pytest-benchmark", "hypothesis")
    # The tests without the package beside them, so that the installed one is tested.
    for name in ("python_tests", "build_backend"):
        shutil.copytree(clone / name, tests / name)
    shutil.copy(clone / "pyproject.toml", tests)
    oldest = next(
        requirement.partition(">=")[2]
        for requirement in nox.project.load_toml(clone / "pyproject.toml")["project"][
            "optional-dependencies"
        ]["hf"]
        if requirement.startswith("transformers>=")
    )
    session.chdir(tests)
    run(session, TORCH[amount] + TRANSFORMERS[amount])
    session.install(f"transformers=={oldest}.*")
    run(session, TRANSFORMERS[amount])
    for other in TORCHES:
        if other != torch:
            session.install(f"torch=={other}.*")
            run(session, OPERATORS)


def run(session: nox.Session, suites: tuple[tuple[str, ...], ...]) -> None:
    """These tests on the installed package."""
    for chosen, *files in suites:
        command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS]
        session.run(*command, "-k", chosen, *files)
