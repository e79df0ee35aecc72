"""Philox4x32-10 in torch's integer arithmetic: the same words as csrc/philox.h.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Words are
32-bit numbers held in int64 tensors, so that the same numbers come out on every device.
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a · b; in halves of b, since int64 does not hold 64 unsigned bits."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD


def philox4x32_10(counter: Words, seed: int) -> Words:
    """Four words of random bits for every counter.

    Args:
        counter: four int64 tensors of 32-bit words that broadcast together.
        seed: 64 bits, the key: its low word first; negative numbers by their bit pattern.
    """
    x, y, z, w = counter
    key, key_w = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        high_x, low_x = _product(0xD2511F53, x)
        high_z, low_z = _product(0xCD9E8D57, z)
        x, y, z, w = high_z ^ y ^ key, low_z, high_x ^ w ^ key_w, low_x
        key, key_w = (key + 0x9E3779B9) & _WORD, (key_w + 0xBB67AE85) & _WORD
    broadcast = torch.broadcast_tensors(x, y, z, w)
    return broadcast[0], broadcast[1], broadcast[2], broadcast[3]
