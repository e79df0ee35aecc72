"""The wheel without compiled operators: what is in it, what it says, and that it is right."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from python_tests import processes

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("jachess_ext", "build_backend", "setup.py", "pyproject.toml", "README.md", "LICENSE")
USE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import jachess_ext as jx
    jx.jvp  # comes at first use, and the operators with it
print(jx.__file__)
print([str(w.message) for w in caught if "jachess_ext" in str(w.message)])
import torch, torch.nn.attention
from torch.nn.functional import scaled_dot_product_attention
torch.manual_seed(0)
q, k, v, u = torch.randn(4, 1, 2, 5, 3, dtype=torch.float64)
attend = lambda x: scaled_dot_product_attention(x, k, v)
found = jx.jvp(attend, (q,), (u,))[1]
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    expected = torch.autograd.functional.jvp(attend, q, u)[1]
print(float((found - expected).abs().max()))
from jachess_ext import doctor
print("exit", doctor.main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as `make wheel` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    environment = os.environ | {"JACHESS_SKIP_EXTENSIONS": "1"}
    processes.run([*command, "-w", "dist", "."], cwd=folder, env=environment, check=True)
    (found,) = (folder / "dist").iterdir()
    return found


def test_contents(wheel: Path) -> None:
    """Every module and data file, and nothing compiled (the copy had the compiled modules)."""
    import jachess_ext

    assert wheel.name == f"jachess_ext-{jachess_ext.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        about = Parser().parsestr(archive.read(metadata).decode())
        entry = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    package = ROOT / "jachess_ext"
    modules = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    assert modules <= names and len(modules) > 50
    assets = {
        p.relative_to(ROOT).as_posix()
        for p in (package / "lab" / "demo" / "assets").rglob("*")
        if p.is_file()
    }
    assert assets <= names and "jachess_ext/py.typed" in names and len(assets) >= 5
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert {name.split("/")[0] for name in names} == {
        "jachess_ext",
        metadata.split("/")[0],
    }
    assert "jachess = jachess_ext.lab.cli:main" in entry
    required = [text for text in about.get_all("Requires-Dist") if "extra ==" not in text]
    assert required == ["torch>=2.10", "numpy"]
    assert {"hf", "ray", "docs", "dev", "demo", "examples", "test"} <= set(
        about.get_all("Provides-Extra")
    )
    assert about["Summary"] and about["License-Expression"] == "Apache-2.0"


def test_it_runs_and_says_what_it_lacks(wheel: Path, tmp_path: Path) -> None:
    """Installed alone, in one sentence; its derivative is torch's double backward's."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    processes.run([*command, tmp_path, wheel], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "JACHESS_OPS_LIBRARY"}
    environment["PYTHONPATH"] = str(tmp_path)
    done = processes.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    place, said, error, *rest = done.stdout.splitlines()
    assert place.startswith(str(tmp_path))
    assert said.count("jachess_ext:") == 1 and "install a wheel built for this Python" in said
    assert float(error) < 1e-12
    assert not any(line.startswith("problem:") for line in rest) and rest[-1] == "exit 0"
    assert sum("installation without compiled operators" in line for line in rest) == 1
