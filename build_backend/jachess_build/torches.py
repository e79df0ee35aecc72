"""Tests under the newest and the oldest torch that the package takes, as `.ci/run` has them.

    python build_backend/jachess_build/torches.py fetch      # minutes of download, no computing
    PYTHONPATH=build_backend python -m jachess_build.torches # `make torches`

Each torch has an environment of its own, build/torch-2.15.0 and so on, which sees the packages of
the Python that runs the tests after its own; the operators are those built in place, since one
binary serves every torch.  `fetch` needs the standard library alone, so that it can begin before
anything else is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCHES = ("2.15.0", "2.10.0")
TESTS = {
    "packaging/test_imports.py::test_every_public_name_is_there": 1,
    "packaging/test_imports.py::test_private_names_are_found": 1,
    "test_readme.py::test_examples": 1,
    "test_readme.py::test_the_first_page": 1,
    "test_readme.py::test_tutorials": 1,
    "jet/test_served_functions.py": 1,
    "jet/test_transforms.py": 1,
    "jet/test_opaque.py": 1,
    "smoothness/test_graphed.py": 1,
    "triton/test_attention.py": 1,  # these torches come with Triton
    "jet/test_checkpointing.py": 3,
    "jet/test_gradient_loss.py": 3,
    "jet/test_library_functions.py": 3,
    "jet/test_functions.py": 1,
    "differentiable/test_create_graph.py": 4,
    "differentiable/test_nestings.py": 4,
    "differentiable/test_refused.py": 8,
    "jet/test_compile.py": 4,
    "ops/test_random_calls.py": 8,
    "training/test_trainer.py": 8,
    "smoothness/test_regulariser.py": 8,
    "ntk/test_kernel.py": 8,
    "jet/test_masks_of_a_class.py": 4,
    "jet/test_number_arguments.py": 20,
    "jet/test_further_derivatives.py": 14,
    "jet/test_rules.py": 12,
}
"""Tests of what leans on torch's inner workings, and of which CI takes every how many-th; a new
torch takes all of them (noxfile.py)."""
CALL = "import jachess_ext as jx; jx.jvp, jx.jet, jx.laplacian, jx.ntk, jx.ops"


def python_of(torch: str) -> Path:
    """Return the Python of the environment that has this torch."""
    return ROOT / "build" / f"torch-{torch}" / "bin" / "python"


def fetch(torch: str) -> subprocess.CompletedProcess[str]:
    """Make the environment of a torch, if it is not there yet, and install that torch."""
    python = python_of(torch)
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
    return subprocess.run(
        # Triton's interpreter of torch 2.10 does not work with a newer NumPy.
        [python, "-m", "pip", "install", "--no-input", "-q", f"torch=={torch}", "numpy<2.4"],
        env={**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test(torch: str) -> tuple[int, str]:
    """Run the tests under a torch; return the first status that is no success, and the output."""
    python = python_of(torch)
    packages = next(python.parents[1].glob("lib/python*/site-packages"))
    lent = [path for path in sys.path if path.endswith("-packages")]
    (packages / "jachess_lent_packages.pth").write_text("\n".join(lent) + "\n")
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m"]
    pytest.append("not slow and not sanitizers and not cuda")
    commands = [[python, "-W", "error::RuntimeWarning", "-c", CALL]]
    for every in sorted({*TESTS.values()}):
        chosen = [f"python_tests/{test}" for test, n in TESTS.items() if n == every]
        commands.append([*pytest, "--part", f"1/{every}", *chosen])
    said = f"torch {torch}\n"
    for command in commands:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        said += done.stdout
        if done.returncode:
            return done.returncode, said
    return 0, said


def main(goal: str) -> int:
    """Fetch the torches, then run the tests if asked to, both at once; return 1 where one fails."""
    with ThreadPoolExecutor() as pool:
        for torch, done in zip(TORCHES, pool.map(fetch, TORCHES), strict=True):
            if done.returncode:
                print(f"torches: torch {torch} could not be installed:\n{done.stdout}")
                return 1
        if goal == "fetch":
            return 0
        results = list(pool.map(test, TORCHES))
    for torch, (status, said) in zip(TORCHES, results, strict=True):
        passed = [line for line in said.splitlines() if " passed" in line]
        print(f"torches: {torch}: {said if status else '; '.join(passed)}", flush=True)
    return int(any(status for status, _ in results))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["test"]))
