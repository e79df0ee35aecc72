"""Random directions by a counter-based generator.

The value at direction i, token n and dimension j is a function of (seed, offset, i, n, j) only.
Dimension j = 32 g + 8 w + l is word w of Philox4x32-10 (Salmon et al., SC 2011) at the counter

    (i · 2^18 + 8 g + l,  n,  offset mod 2^32,  offset div 2^32)        key: the seed

Normals are Box and Muller's (1958): words (a, b) give √(−2 ln u) cos φ and √(−2 ln u) sin φ with
u = (⌊a/2⌋ + ½)/2^31 and φ = 2π b/2^32; a Rademacher number is −1 where the word's top bit is set.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from .library import NAMESPACE, OPS, available, loaded, wide_dtype

Distribution = Literal["gaussian", "rademacher"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)
MAX_DRAWN, MAX_DIMENSIONS, MAX_OFFSET = 2**14, 2**20, 2**62 - 1
_LANES, _WORDS = 8, 4
_WORD = 0xFFFFFFFF
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def token_numbers(mask: Tensor) -> Tensor:
    """Number the real tokens row by row, from 0, and return these numbers for `sample_directions`;
    −1 at padding.

    Args:
        mask: [B, T], true (or not zero) at real tokens; padding may be on either side.

    Returns:
        [B, T] int64.

    Examples:
        >>> token_numbers(torch.tensor([[1, 1, 0], [0, 1, 1]]))
        tensor([[ 0,  1, -1],
                [-1,  2,  3]])
    """
    real = mask.bool()
    return real.flatten().cumsum(0).view(real.shape) * real - 1


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32-bit word of a · b."""
    # The product of two words has 64 bits, one more than a signed int64 holds; so b is split in two
    # halves.
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD


def fresh_seed_on(device: torch.device) -> Tensor:
    """Return a seed of 63 random bits from a device's global generator, as an int64 scalar on it.

    Gradient checkpointing restores that generator, and each replay of a CUDA graph draws anew.
    """
    return torch.randint(2**63 - 1, (), device=device)


def number_on(device: torch.device, number: int | Tensor) -> Tensor:
    """Return a 64-bit number as an int64 scalar on the device, without a copy from the host.

    A tensor, which may change between the replays of a CUDA graph, is returned unchanged.

    Raises:
        ValueError: ``number`` has more than 64 bits.
    """
    if isinstance(number, Tensor):
        return number
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{number} has more than 64 bits: take it modulo 2**64.")
    signed = number - 2**64 if number >= 2**63 else number
    return torch.full((), signed, dtype=torch.int64, device=device)


def philox4x32_10(counter: Words, seed: int | Tensor) -> Words:
    """Return four 32-bit words of random bits for every counter: Philox4x32-10, as in
    csrc/philox.h.

    Args:
        counter: the counters' four words, int64 tensors that broadcast together, to the shape of
            the results.
        seed: the 64-bit key (low word first), an int64 scalar on the counter's device, or a number;
            a negative number stands for its bit pattern.
    """
    x, y, z, w = counter
    key, key_w = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        high_x, low_x = _product(0xD2511F53, x)
        high_z, low_z = _product(0xCD9E8D57, z)
        x, y, z, w = high_z ^ y ^ key, low_z, high_x ^ w ^ key_w, low_x
        key, key_w = (key + 0x9E3779B9) & _WORD, (key_w + 0xBB67AE85) & _WORD
    x, y, z, w = torch.broadcast_tensors(x, y, z, w)
    return x, y, z, w


def _check(
    token: Tensor,
    q: int,
    d: int,
    seed: int | Tensor,
    offset: int | Tensor,
    distribution: str,
    dtype: torch.dtype,
) -> None:
    """Raise TypeError or ValueError for arguments with which wrong numbers would be drawn."""
    if token.dtype != torch.int64:
        raise TypeError(
            f"token has dtype {token.dtype}; expected int64, a token's number or -1 at padding: "
            "use token_numbers(mask)."
        )
    wide_dtype(dtype)
    limits = {
        "q": (q, 0, MAX_DRAWN, "draw more with another offset"),
        "d": (d, 0, MAX_DIMENSIONS, "draw more with another offset"),
        "seed": (seed, -(2**63), 2**64 - 1, "take it modulo 2**64"),
        "offset": (offset, 0, MAX_OFFSET, "use another seed"),
    }
    for name, (value, low, high, fix) in limits.items():
        if not isinstance(value, Tensor) and not low <= value <= high:
            raise ValueError(f"{name} is {value}; expected {low} to {high}: {fix}.")
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution is {distribution!r}; expected 'gaussian' or 'rademacher'.")


def _normal_pair(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return two standard normal numbers from two random words, by Box and Muller's method."""
    # float32, as in the kernels: near 1, the logarithm depends on u's last bit.
    u = ((a >> 1).float().double() * 2**-31 + 2**-32).float()
    radius = torch.sqrt(-2 * torch.log(u.double()))
    angle = b.double() * (2 * math.pi / 2**32)
    return [radius * torch.cos(angle), radius * torch.sin(angle)]


def sample_directions_reference(
    token: Tensor,
    q: int,
    d: int,
    *,
    seed: int | Tensor,
    offset: int | Tensor = 0,
    distribution: Distribution = "gaussian",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute `sample_directions` in pure torch: the same random words, normals within 1e-6."""
    _check(token, q, d, seed, offset, distribution, dtype)
    groups = -(-d // (_LANES * _WORDS))

    def index(n: int) -> Tensor:
        return torch.arange(n, dtype=torch.int64, device=token.device)

    number = token.reshape(1, -1, 1).clamp_min(0)
    block = (index(q) << 18).view(-1, 1, 1) + index(groups * _LANES)
    # The offset's words as tensors, so that the host does not wait if the offset is on the device.
    low, high = (torch.ones_like(number) * word for word in (offset & _WORD, offset >> 32))
    words = philox4x32_10((block, number, low, high), seed)
    if distribution == "gaussian":
        values = [*_normal_pair(words[0], words[1]), *_normal_pair(words[2], words[3])]
    else:
        values = [1.0 - 2.0 * (word >> 31) for word in words]
    # Dimension 32 g + 8 w + l is group g, word w and lane l.
    lanes = [v.float().view(q, token.numel(), groups, _LANES) for v in values]
    rows = torch.stack(lanes, 3).flatten(2)[..., :d]
    rows = rows.masked_fill(token.reshape(1, -1, 1) < 0, 0)
    return rows.reshape(q, *token.shape, d).to(dtype)


def sample_directions(
    token: Tensor,
    q: int,
    d: int,
    *,
    seed: int | Tensor,
    offset: int | Tensor = 0,
    distribution: Distribution = "gaussian",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw independent random directions with identity covariance, one per token.

    The number at direction i, token n and dimension j depends on (seed, offset, i, n, j) only, and
    has the same bits in the kernels of CPU and CUDA; it is drawn in float32 and converted. Seed and
    offset may be tensors, which are inputs of compiled code and may change between replays of a
    CUDA graph; as numbers they are constants there.

    Args:
        token: int64 [...], from `token_numbers`; tokens with a number below 0 get zeros.
        q: number of directions, up to 2^14.
        d: number of dimensions, up to 2^20.
        seed: the generator's key, any 64-bit integer, as a number or as an int64 scalar on token's
            device.
        offset: a number from 0 to 2^62 − 1, or an int64 scalar on token's device; different offsets
            of a seed give independent directions.
        distribution: "gaussian", N(0, 1), or "rademacher", ±1.
        dtype: dtype of the result: fp64, fp32, bf16 or fp16.

    Returns:
        [q, ..., d] on token's device.

    Examples:
        >>> tokens = token_numbers(torch.tensor([[1, 1, 0]]))
        >>> sample_directions(tokens, q=2, d=8, seed=0, distribution="rademacher").shape
        torch.Size([2, 1, 3, 8])
    """
    if token.device.type != "cpu":  # the CPU's operator checks its arguments itself
        _check(token, q, d, seed, offset, distribution, dtype)
    if not available("sample_directions", token.device):
        return sample_directions_reference(
            token, q, d, seed=seed, offset=offset, distribution=distribution, dtype=dtype
        )
    seed, offset = number_on(token.device, seed), number_on(token.device, offset)
    return OPS.sample_directions(token, q, d, seed, offset, distribution, dtype)


def _fake(
    token: Tensor, q: int, d: int, seed: Tensor, offset: Tensor, kind: str, dtype: torch.dtype
) -> Tensor:
    return token.new_empty((q, *token.shape, d), dtype=dtype)


if loaded():
    torch.library.register_fake(f"{NAMESPACE}::sample_directions", _fake)
