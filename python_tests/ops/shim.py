"""The CUDA sources compiled for the CPU by g++, with or without a sanitizer, as one program."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from python_tests import processes

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SANITIZERS = {
    "none": ["-O0"],  # a sixth of the time to compile, and the same to run: threads' switches
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
STORAGE = [torch.float64, torch.float32, torch.bfloat16, torch.float16]  # as csrc/dtypes.h
Programs = Callable[[str], Path]
LARGE = 227 * 1024  # what a block may have of shared memory on sm_90


def programs_of(name: str, kernels: Sequence[Path], folder: Callable[[str], Path]) -> Programs:
    """csrc/testing/``name``.cpp with ``kernels``: a function from sanitizer to program, which
    builds each once, in ``folder(sanitizer)``."""
    built: dict[str, Path] = {}

    def build(sanitizer: str) -> Path:
        if sanitizer not in built:
            target = folder(sanitizer) / name
            sources = [CSRC / "testing" / f"{name}.cpp", *kernels]
            command = ["g++", "-std=c++17", "-g0", "-Wno-psabi", *SANITIZERS[sanitizer]]
            command += ["-I", str(CSRC / "testing"), "-x", "c++", *map(str, sources)]
            done = processes.run([*command, "-o", target])
            assert done.returncode == 0, done.stderr
            built[sanitizer] = target
        return built[sanitizer]

    return build


def run_program(
    program: Path,
    options: Mapping[str, object],
    data: Sequence[bytes],
    *,
    shared_limit: int = LARGE,
    backwards: bool = False,
) -> bytearray:
    """Run a program of csrc/testing on these tensors' bytes; the bytes of its results.

    Args:
        backwards: the threads of a block in the other order.
    """
    source, target = program.parent / "input", program.parent / "output"
    source.write_bytes(b"".join(data))
    options = {**options, "shared_limit": shared_limit, "backwards": int(backwards)}
    # the fibers' stacks are not the thread's
    own = {
        "ASAN_OPTIONS": "detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = processes.run(
        [program, source, target, *(f"{name}={value}" for name, value in options.items())],
        env={**os.environ, **own},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return bytearray(target.read_bytes())


def stored(tensor: Tensor) -> bytes:
    """The elements of a tensor's whole storage."""
    return bytes(tensor.detach().untyped_storage())
