"""Peak memory of one step: the allocator's on a GPU, the resident set's high-water mark on CPU."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from .timing import Step, synchronize

_MEGABYTE = 2**20


def peak_megabytes(step: Step, device: torch.device) -> float | None:
    """Peak while ``step`` runs; None where the machine does not tell.

    CUDA: allocated bytes, parameters included.  CPU (Linux): growth of the resident set over
    what it was before the step; pages that an earlier step left in the heap are not seen, so
    figures to be compared come from a process each (`benchmarks.memory`).
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) / _MEGABYTE
    if not _reset_high_water():
        return None
    before = status_megabytes("VmRSS")
    step()
    return max(status_megabytes("VmHWM") - before, 0.0)


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def status_megabytes(field: str) -> float:
    """A field of /proc/self/status in MiB, for example VmHWM, the peak resident set."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(f"/proc/self/status has no field {field}")
