from collections.abc import Sequence
from typing import Any

max_directions: int

def build_info() -> dict[str, Any]: ...
def activation_kinds() -> tuple[str, ...]: ...
def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def ntk_cost(
    samples: float,
    positions: float,
    other_samples: float,
    other_positions: float,
    outputs: float,
    inputs: float,
    cotangents: float,
    symmetric: bool,
    bytes_per_number: float,
) -> list[float]: ...
