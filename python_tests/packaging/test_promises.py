"""What the package says of itself in several places is the same, and it can be sent elsewhere."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from pathlib import Path

import cloudpickle
import joblib
import pytest
import tomllib
import torch

import jachess_ext as jx
from jachess_ext._io import _DISTRIBUTIONS, NEEDS
from python_tests import processes

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def in_extra(name: str) -> set[str]:
    """Return the distributions of an extra, and of those that it names."""
    names: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][name]:
        inner = re.fullmatch(r"jachess-ext\[(\w+)\]", requirement)
        names |= in_extra(inner[1]) if inner else {re.split(r"[><=~\[ ]", requirement)[0]}
    return names


@pytest.mark.parametrize("part", NEEDS)
def test_what_a_part_needs_is_in_the_extra(part: str) -> None:
    names = {_DISTRIBUTIONS.get(module, module) for module in NEEDS[part]}
    assert names <= in_extra("demo")


def test_one_version() -> None:
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {jx.__version__}\n" in citation


def test_dir_is_what_is_promised() -> None:
    assert [name for name in dir(jx) if not name.startswith("__")] == sorted(jx.__all__)


@pytest.mark.parametrize("module", [pickle, cloudpickle, copy], ids=lambda m: m.__name__)
def test_the_package_itself_is_sent_by_name(module: object) -> None:
    if module is copy:
        assert copy.copy(jx) is copy.deepcopy(jx) is jx
    else:
        assert module.loads(module.dumps(jx)) is jx  # type: ignore[attr-defined]


def test_a_function_that_holds_the_package_runs_elsewhere(tmp_path: Path) -> None:
    sent = cloudpickle.dumps(lambda x: jx.jvp(torch.square, (x,), (torch.ones_like(x),))[1])
    (tmp_path / "function").write_bytes(sent)
    code = (
        "import pickle, sys, torch\n"
        "print(pickle.load(open(sys.argv[1], 'rb'))(torch.tensor(3.0)).item())"
    )
    done = processes.run([sys.executable, "-c", code, tmp_path / "function"], check=True)
    assert done.stdout.strip() == "6.0"


def test_jobs_of_joblib() -> None:
    run = joblib.delayed(lambda x: jx.jvp(torch.square, (x,), (torch.ones_like(x),))[1].item())
    assert joblib.Parallel(n_jobs=2)(run(torch.tensor(x)) for x in (1.0, 3.0)) == [2.0, 6.0]
