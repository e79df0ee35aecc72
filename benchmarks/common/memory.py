"""Peak memory: the allocator's on a GPU, the process's resident set on a CPU."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

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
