"""Preparation of an environment for a make goal; its Python's path goes to build/python.

Run by the Makefile with any Python >= 3.10, standard library only:

    python build_backend/jachess_build/prepare.py build|demo|docs|examples|test|check

1. A Python that has torch >= 2.10 and everything the goal needs is used as it is.
2. One that has torch but lacks something lends its packages to .venv, which gets the rest.
3. Otherwise .venv gets a torch of its own: the CPU build where there is no nvidia-smi.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "2.13.0"
# Import names that a goal needs beyond torch and numpy, and the extra that brings them.
_DEMO = (
    *("transformers", "accelerate", "safetensors", "jinja2", "joblib", "matplotlib", "pandas"),
    *("tqdm", "tyro", "sklearn", "scipy"),
)
_PYTEST = ("pytest", "pytest_benchmark", "xdist", "hypothesis")
_TRAINERS = ("peft", "accelerate", "datasets")
_LIBRARIES = ("bitsandbytes", "torchao", "diffusers")  # whose models and layers are tested
_TEST = (*_DEMO, *_TRAINERS, *_LIBRARIES, *_PYTEST)
NEEDS = {
    "build": ("", ()),
    "demo": ("[demo]", _DEMO),
    "examples": ("[examples]", (*_DEMO, *_TRAINERS, "bitsandbytes", "lightning", "trl")),
    "docs": (
        "[docs]",
        (
            *("bs4", "material", "mkdocs", "mkdocs_jupyter", "mkdocstrings"),
            *("mkdocstrings_handlers", "pytest"),
        ),
    ),
    "test": ("[test]", _TEST),
    "check": ("[test]", ("mypy", "ruff", "clang_format")),
}
_PROBE = """
import importlib.metadata, importlib.util, sys
def older(name, *least):
    try:
        version = importlib.metadata.version(name).split(".")
        return [int(part) for part in version[:2]] < list(least)
    except Exception:
        return True
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if "transformers" in sys.argv and older("transformers", 5, 2):
    missing.append("transformers>=5.2")
try:
    import torch
except Exception:
    torch = None
if torch is None or older("torch", 2, 10):
    missing.append("torch")
print(*missing)
"""


# Lines of pip's output that are shown as they come; all of them where it fails.
_PIP_SHOWN = ("Downloading ", "Building ", "Installing collected", "WARNING:", "ERROR:")


def fail(message: str) -> NoReturn:
    """Stop with an error message."""
    raise SystemExit(f"jachess_ext: {message}")


def lacking(python: Path | str, names: Sequence[str]) -> list[str]:
    """Return which of `names`, torch >= 2.10 and the needs of a build a Python lacks."""
    wanted = [*names, "setuptools", "numpy"]
    try:
        found = run([python, "-c", _PROBE, *wanted], cwd="/")
    except OSError:
        return [*wanted, "torch"]
    return found.stdout.splitlines()[-1].split() if found.returncode == 0 else [*wanted, "torch"]


def run(command: Sequence[Path | str], **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its status and output."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": ROOT, **settings}
    return subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        **settings,
    )  # type: ignore[call-overload]


def follow(
    command: Sequence[Path | str], shown: tuple[str, ...], **settings: Any
) -> tuple[int, str]:
    """Run a command, print lines that begin with one of `shown` as they come, and return its status
    and output."""
    said = []
    with subprocess.Popen(
        [str(part) for part in command],
        **{"cwd": ROOT, **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.lstrip().startswith(shown):
                print(line.strip()[:110], flush=True)
    return process.returncode, "".join(said)


def pip(*arguments: str, needed: bool = True) -> bool:
    """Run .venv's pip, showing its downloads and time, and return whether it succeeded.

    Where a needed install fails, stop with an error.
    """
    command: list[Path | str] = [PYTHON, "-m", "pip", "install", "--no-input"]
    command += ["--progress-bar", "off", "--disable-pip-version-check", *arguments]
    what = " ".join(one for one in arguments if not one.startswith(("-", "http")))
    print(f"jachess_ext: pip install {what} ...", flush=True)
    start = time.monotonic()
    # build_in_place compiles, incrementally; pip would do it in a folder it throws away.
    environment = {**os.environ, "JACHESS_SKIP_EXTENSIONS": "1"}
    status, said = follow(command, _PIP_SHOWN, env=environment)
    outcome = "done" if status == 0 else "failed"
    print(f"jachess_ext: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
    if status != 0 and needed:
        print(said)
        fail(
            f"`{' '.join(map(str, command))}` failed (see above): check the network or pip's "
            "index, then run make again; it goes on where it stopped."
        )
    return status == 0


def make_venv(extra: str, lend: bool) -> None:
    """Complete .venv for an extra and install the package in place; replace a broken .venv."""
    print(f"jachess_ext: setting up .venv{' with ' + extra if extra else ''} ...", flush=True)
    if not PYTHON.exists() or run([PYTHON, "-m", "pip", "--version"]).returncode != 0:
        command: list[Path | str] = [sys.executable, "-m", "venv", "--clear", VENV]
        done = run(command)
        if done.returncode != 0:
            shutil.rmtree(VENV, ignore_errors=True)
            fail(
                f"`{' '.join(map(str, command))}` failed ({done.stdout.strip()}): install your "
                "system's venv package (Debian: apt install python3-venv) or give another Python "
                "with `make PYTHON=...`."
            )
    if lend:  # .venv sees this Python's packages after its own
        own = Path(sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)}))
        lent = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        (own / "jachess_lent_packages.pth").write_text("\n".join(lent) + "\n")
    if "torch" in lacking(PYTHON, ()):
        install_torch()
    pip("setuptools>=77", "wheel", "ninja", "numpy")
    pip("--no-build-isolation", "-e", f".{extra}")
    shutil.copy(ROOT / "pyproject.toml", VENV / f"complete{extra}.toml")


def complete(extra: str) -> bool:
    """Return whether .venv has an extra of this pyproject.toml; [test] covers all but [docs]."""
    now = (ROOT / "pyproject.toml").read_bytes()
    names = {extra, "[test]"} - ({"[test]"} if extra == "[docs]" else set())
    stamps = [VENV / f"complete{name}.toml" for name in names]
    return PYTHON.exists() and any(s.is_file() and s.read_bytes() == now for s in stamps)


def install_torch() -> None:
    """Install torch in .venv: the CPU build on machines without an NVIDIA driver."""
    if shutil.which("nvidia-smi") is None and platform.system() == "Linux":
        # "+cpu" names the small build: in pip's own sources (a mirror), or in PyTorch's CPU index.
        small = f"torch=={TORCH}+cpu"
        index = ["--extra-index-url", CPU_INDEX]
        if pip(small, needed=False) or pip(small, *index, needed=False):
            return
    if not pip(f"torch=={TORCH}", needed=False):
        pip("torch>=2.10")


def main(goal: str) -> None:
    """Prepare the environment for `goal`, build in place, and record its Python."""
    if sys.version_info < (3, 10):  # noqa: UP036  (any Python may run this file)
        fail(f"Python {platform.python_version()} is too old: give make a Python >= 3.10.")
    extra, names = NEEDS[goal]
    python: Path | str = sys.executable
    missing = lacking(python, names)
    if missing:
        python = PYTHON
        if not complete(extra):
            own = Path(sys.prefix) == VENV
            make_venv(extra, lend="torch" not in missing and not own)
    status, said = follow([python, "setup.py", "-q", "build_ext", "--inplace"], ("jachess_ext:",))
    if status != 0:
        print(said)
        fail("building the operators failed (see above): is a C++ compiler (g++) installed?")
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "python").write_text(str(python))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in NEEDS:
        fail(f"usage: prepare.py {'|'.join(NEEDS)}")
    main(sys.argv[1])
