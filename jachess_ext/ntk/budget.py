"""How many samples a block may hold under a memory budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_WORKSPACE = 128 * 2**20
_SHARE = 0.5  # of the free memory, where no budget is given
_MOST = 4 * 2**30  # by default; larger blocks gain little
_UNKNOWN = 2 * 2**30  # where the system does not say how much is free


@dataclass(frozen=True)
class Budget:
    """Samples per block, and what is left for workspace.

    Attributes:
        block: samples on either side.
        workspace: bytes for materialised gradients.
        bytes: the budget.
        expected: bytes that a pair of blocks is expected to take.
    """

    block: int
    workspace: int
    bytes: int
    expected: int


def plan_blocks(
    limit: int | None,
    *,
    samples: int,
    others: int,
    symmetric: bool,
    result: int,
    capture: int,
    activations: int,
    device: torch.device,
) -> Budget:
    """The largest blocks that fit; one pair of blocks where everything does.

    Args:
        limit: the budget in bytes, or None: half of what is free, 4 GiB at most.
        samples, others: N and M.
        result: bytes of the kernel.
        capture, activations: bytes that one sample's contributions and forward pass take.

    Raises:
        TypeError, ValueError: not a number of bytes; too few for one sample a block.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise TypeError(f"memory_budget is {limit!r}; expected a number of bytes, or None")
    budget = min(_MOST, int(_SHARE * free_memory(device))) if limit is None else limit
    workspace = min(_WORKSPACE, max(1, budget // 8))
    most = max(samples, others)
    at_once = samples * (capture + activations) + (0 if symmetric else others * capture)
    left = budget - result - workspace
    if at_once <= left:
        return Budget(most, workspace, budget, at_once + result + workspace)
    pair = 2 * capture + activations
    block = min(left // pair, most) if left > 0 else 0
    if block < 1:
        raise ValueError(
            f"memory_budget is {budget} bytes, too few for one sample: the kernel takes {result} "
            f"and a pair of samples {pair} bytes; pass at least "
            f"{int((result + pair) * 8 / 7) + 8}, fewer samples, or shorter ones"
        )
    return Budget(int(block), workspace, budget, int(block) * pair + result + workspace)


def free_memory(device: torch.device) -> int:
    """Bytes free on the device, as far as it says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":", 1) for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return _UNKNOWN
