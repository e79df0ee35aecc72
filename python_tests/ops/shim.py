"""The CUDA sources compiled for the CPU by g++, with or without a sanitizer, as one program."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SANITIZERS = {
    "none": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
Programs = Callable[[str], Path]


def programs_of(name: str, kernels: Sequence[Path], folder: Callable[[str], Path]) -> Programs:
    """csrc/testing/``name``.cpp with ``kernels``: a function from sanitizer to program, which
    builds each once, in ``folder(sanitizer)``."""
    built: dict[str, Path] = {}

    def build(sanitizer: str) -> Path:
        if sanitizer not in built:
            target = folder(sanitizer) / name
            sources = [CSRC / "testing" / f"{name}.cpp", *kernels]
            command = ["g++", "-std=c++17", "-O1", "-g0", "-Wno-psabi", *SANITIZERS[sanitizer]]
            command += ["-I", str(CSRC / "testing"), "-x", "c++", *map(str, sources)]
            done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            built[sanitizer] = target
        return built[sanitizer]

    return build
