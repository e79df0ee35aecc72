"""Shared pytest configuration: tests marked `cuda` are left out where no GPU is; the exact engine
is an oracle of several folders."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import python_tests.smoothness.exact  # noqa: F401  adds engine="exact"

if not torch.cuda.is_available():  # before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"

# torch.manual_seed notes the seed for a device that is not there, with the whole stack as text:
# under pytest that takes a millisecond and more, thousands of times.
for backend in (torch.cuda, torch.xpu, torch.mtia):
    if not backend.is_available():
        backend.manual_seed_all = lambda seed: None


def _fill_what_nobody_has_written() -> None:
    """Let torch's allocator on the CPU fill its memory with NaN, for C++ as for Python.

    With a test's settings as they are, other than `torch.utils.deterministic`, which needs
    deterministic algorithms.  The pattern is 0x7fedbeaf: every float32 is NaN, of 16 bits every
    second one, and a float64 is 1.7e308, the sum of two of which is infinite.
    """
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    library = Path(torch.__file__).parent / "lib" / f"libc10.{suffix}"
    with contextlib.suppress(OSError, ValueError):  # a build without it
        name = "FLAGS_caffe2_cpu_allocator_do_junk_fill"
        ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), name).value = True


_fill_what_nobody_has_written()


def pytest_report_header() -> str | None:
    """Say why the tests marked `cuda` are left out, where they are."""
    if torch.cuda.is_available():
        return None
    build = "a CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    return f"torch {torch.__version__} ({build}) sees no GPU: tests marked cuda are left out"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--part K/N``: every N-th test, from the K-th on."""
    parser.addoption("--part", default="1/1", metavar="K/N", help="every N-th test from the K-th")


LONG = ("distributed", "test_compile.py", "test_cuda_shim_attention.py")
"""Files and folders of the longest files: a process that met one last would run alone."""


@pytest.hookimpl(wrapper=True)  # after -m and -k
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Leave out every test marked `cuda` unless torch sees a GPU, as thousands of skips take time,
    and the tests of other parts."""
    yield
    items.sort(key=lambda item: not {item.path.name, item.path.parent.name} & {*LONG})
    # a marker, not the keyword, which is also the name of folders
    no_gpu = not torch.cuda.is_available()
    runnable = [item for item in items if not (no_gpu and item.get_closest_marker("cuda"))]
    first, parts = map(int, config.getoption("part").split("/"))
    chosen = runnable[first - 1 :: parts]
    taken = {*chosen}
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = chosen


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """Take what is there before a file of tests out of the garbage collector's sight.

    Accelerate collects after every training; over all tests and libraries that takes half a second,
    more than most trainings here.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def clean_checkout() -> Iterator[None]:
    """Fail a file of tests that leaves a file or folder in the checkout; tmp_path is for these."""
    before = _checkout()
    yield
    left = sorted(_checkout() - before)
    assert not left, f"left in the checkout: {left}"


def _checkout() -> set[str]:
    """The files and folders of the checkout, without caches, environments and what builds write."""
    root = Path(__file__).parents[1]
    found: set[str] = set()
    for folder, folders, files in os.walk(root):
        at_top = Path(folder) == root
        folders[:] = [
            name
            for name in folders
            if name not in (".git", "__pycache__") and not (at_top and name in _NOT_OURS)
        ]
        kept = [name for name in files if not (at_top and name.startswith((".git", ".coverage")))]
        found.update(os.path.relpath(os.path.join(folder, name), root) for name in folders + kept)
    return found


_NOT_OURS = (
    *(".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".benchmarks"),
    *(".nox", "build", "dist"),
)


@pytest.fixture(autouse=True)
def process_wide_settings_of_torch() -> Iterator[None]:
    """Fail the test that leaves one changed, not another that happens to come later."""
    before = _settings_of_torch()
    yield
    changed = {k: v for k, v in _settings_of_torch().items() if before.get(k, v) != v}
    assert not changed, f"left changed: {changed}; before: {before}"


def _settings_of_torch() -> dict[str, Any]:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modes": len(torch.overrides._get_current_function_mode_stack()),
    } | ({} if dynamo is None else {"stance of torch.compile": dynamo._stance.stance})
