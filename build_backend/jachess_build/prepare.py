"""Makes an environment that can run a make goal, and writes its Python's path to build/python.

Run by the Makefile with any Python >= 3.10, standard library only:

    python build_backend/jachess_build/prepare.py build|demo|docs|examples|test|check

1. A Python that has torch >= 2.10 and everything the goal needs is used as it is.
2. One that has torch but lacks something lends its packages to .venv; what lacks is added there.
3. Otherwise .venv gets a torch of its own: the CPU build where there is no nvidia-smi.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / "jachess-environment.json"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "2.13.0"
BUILD_TOOLS = ["setuptools>=77", "wheel", "ninja"]
# Import names that a goal needs beyond torch and numpy, and the extra that brings them.
_DEMO = ("transformers", "safetensors", "matplotlib", "rich", "tqdm", "sklearn", "scipy")
_PYTEST = ("pytest", "pytest_benchmark", "xdist", "hypothesis")
_TRAINERS = ("peft", "accelerate", "datasets")
_LIBRARIES = ("bitsandbytes", "torchao", "diffusers")  # whose models and layers are tested
_TEST = (*_DEMO, *_TRAINERS, *_LIBRARIES, *_PYTEST)
NEEDS = {
    "build": ("", ()),
    "demo": ("[demo]", _DEMO),
    "examples": ("[examples]", (*_DEMO, *_TRAINERS, "bitsandbytes", "lightning", "trl")),
    "docs": ("[docs]", ("material", "mkdocs", "mkdocstrings", "mkdocstrings_handlers")),
    "test": ("[test]", _TEST),
    "check": ("[test]", ("mypy", "ruff", "clang_format")),
}
_PROBE = """
import importlib.metadata, importlib.util, json, sys
def release(name):
    try:
        return [int(part) for part in importlib.metadata.version(name).split(".")[:2]]
    except Exception:
        return None
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if "transformers" in sys.argv and (release("transformers") or [0]) < [5, 2]:
    missing.append("transformers>=5.2")
try:
    import torch
    found = release("torch")
except Exception:
    found = None
print(json.dumps({"torch": found, "missing": missing}))
"""


def fail(message: str) -> NoReturn:
    """Stop with one sentence on stderr."""
    raise SystemExit(f"jachess_ext: {message}")


def probe(python: Path | str, names: tuple[str, ...]) -> tuple[list[int] | None, list[str]]:
    """The (major, minor) of `python`'s working torch, or None; and which of `names` it lacks."""
    command = [str(python), "-c", _PROBE, *names, "setuptools", "numpy"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", check=False
    )
    if done.returncode != 0:
        return None, [*names]
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["torch"], answer["missing"]


def pip(*arguments: str, needed: bool = True) -> bool:
    """Run the .venv's pip; where a needed install fails, stop with a sentence.

    An attempt that may fail (needed=False) says nothing.
    """
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "-q", "--no-input"]
    command += ["--disable-pip-version-check", *arguments]
    output = None if needed else subprocess.DEVNULL
    # build_in_place compiles, incrementally; pip would do it in a folder it throws away.
    environment = {**os.environ, "JACHESS_SKIP_EXTENSIONS": "1"}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    if done.returncode != 0 and needed:
        fail(
            f"`{' '.join(command)}` failed (see above): check the network or pip's index, then "
            "run make again; it goes on where it stopped."
        )
    return done.returncode == 0


def create_venv() -> None:
    """Make .venv, or make it anew where its Python or pip does not run."""
    python = VENV / "bin" / "python"
    if python.exists():
        done = subprocess.run(
            [str(python), "-m", "pip", "--version"], capture_output=True, check=False
        )
        if done.returncode == 0:
            return
        print("jachess_ext: .venv is broken; making it anew", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    done_text = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done_text.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        fail(
            f"`{' '.join(command)}` failed ({(done_text.stderr or done_text.stdout).strip()}): "
            "install your system's venv package (Debian: apt install python3-venv) or give "
            "another Python with `make PYTHON=...`."
        )


def lend_packages() -> None:
    """Let .venv see the packages of the Python that runs this, after its own."""
    own = Path(sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)}))
    lent = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (own / "jachess_lent_packages.pth").write_text("\n".join(lent) + "\n")


def install_torch() -> None:
    """Give .venv a torch: the CPU build on machines without an NVIDIA driver."""
    if shutil.which("nvidia-smi") is None and platform.system() == "Linux":
        # "+cpu" names the small build: in pip's own sources (a mirror), or in PyTorch's CPU index.
        small = f"torch=={TORCH}+cpu"
        index = ["--extra-index-url", CPU_INDEX]
        if pip(small, needed=False) or pip(small, *index, needed=False):
            return
    if not pip(f"torch=={TORCH}", needed=False):
        pip("torch>=2.10")


def fingerprint() -> str:
    """Changes when the environment must be looked at again: dependencies or the Python."""
    content = (ROOT / "pyproject.toml").read_bytes() + sys.version.encode()
    return hashlib.sha256(content).hexdigest()


def completed_extras() -> list[str]:
    """The extras that .venv holds in full; [] where it is incomplete or out of date."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return []
    return stamp["extras"] if stamp.get("fingerprint") == fingerprint() else []


def write_atomically(path: Path, text: str) -> None:
    """Write a file all or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def prepare_venv(extra: str, lend: bool) -> Path:
    """Complete .venv for an extra of NEEDS and install the package in place.

    "[test]" has everything but "[docs]".
    """
    python = VENV / "bin" / "python"
    done = completed_extras()
    if python.exists() and (extra in done or ("[test]" in done and extra != "[docs]")):
        return python
    print(f"jachess_ext: setting up .venv{' with ' + extra if extra else ''} ...", flush=True)
    create_venv()
    if lend:
        lend_packages()
    found, _ = probe(python, ())
    if found is None or found < [2, 10]:
        install_torch()
    pip(*BUILD_TOOLS, "numpy")
    pip("--no-build-isolation", "-e", f".{extra}")
    write_atomically(
        STAMP, json.dumps({"fingerprint": fingerprint(), "extras": sorted({*done, extra})})
    )
    return python


def build_in_place(python: Path) -> None:
    """Bring the compiled operators up to date (ninja decides what is out of date)."""
    command = [str(python), "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode != 0:
        print(done.stdout)
        fail("building the operators failed (see above): is a C++ compiler (g++) installed?")


def main(goal: str) -> None:
    """Prepare the environment for `goal` and record its Python in build/python."""
    if sys.version_info < (3, 10):  # noqa: UP036  (any Python may run this file)
        fail(f"Python {platform.python_version()} is too old: give make a Python >= 3.10.")
    extra, names = NEEDS[goal]
    torch, missing = probe(sys.executable, names)
    usable = torch is not None and torch >= [2, 10]
    if usable and not missing and Path(sys.prefix) != VENV:
        python = Path(sys.executable)
    else:
        python = prepare_venv(extra, lend=usable and Path(sys.prefix) != VENV)
    build_in_place(python)
    write_atomically(ROOT / "build" / "python", str(python))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in NEEDS:
        fail(f"usage: prepare.py {'|'.join(NEEDS)}")
    main(sys.argv[1])
