"""Peak memory: the allocator's on a GPU, the process's resident set on a CPU."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import torch

from .report import ROOT
from .timing import Step, synchronize

_MEGABYTE = 2**20


def peak_megabytes(step: Step, device: torch.device) -> float | None:
    """Peak of allocated bytes on a GPU while ``step`` runs, parameters included, in MiB.

    None on a CPU: there a process that has run other steps has their pages in its heap, so that
    `benchmarks.memory` gives every step a process of its own.
    """
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) / _MEGABYTE


def peak_above(before: float, step: Step, device: torch.device) -> float:
    """`peak_megabytes` less ``before``; on a CPU the resident set's peak less ``before``."""
    peak = peak_megabytes(step, device)
    if peak is None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        step()
        peak = status_megabytes("VmHWM")
    return peak - before


def held_megabytes(device: torch.device) -> float:
    """MiB allocated on a GPU now; on a CPU, resident."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / _MEGABYTE
    return status_megabytes("VmRSS")


def measure_apart(module: str, *arguments: str) -> float:
    """The number that ``python -m module arguments`` prints last, from a process of its own.

    Raises:
        RuntimeError: the process failed; the message ends with what it wrote.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def status_megabytes(field: str) -> float:
    """A field of /proc/self/status in MiB: VmRSS, resident now; VmHWM, its peak so far.

    Raises:
        RuntimeError: the system has no such file or field (it is not Linux).
    """
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"{path} tells no {field}; memory is measured on Linux or on a GPU only")
