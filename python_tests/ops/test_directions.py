"""`jachess::sample_directions`: its numbers by definition, where they may depend on nothing else,
and their statistics against closed forms.

The statistical bounds are five standard errors of the exact distribution; seeds are fixed, so a
test that passes once passes always.
"""

import math
import random
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

from jachess_ext import _C, ops
from python_tests.ops.cases import DEVICES, same_for_any_threads

DISTRIBUTIONS = ["gaussian", "rademacher"]
SIGMAS = 5


def draw(count: int, tokens: int, d: int, device: str = "cpu", **stream) -> Tensor:
    """[count, tokens, d]."""
    token = torch.arange(tokens, device=device)
    return ops.sample_directions(token, count, d, **({"seed": 0} | stream))


def by_definition(seed: int, offset: int, i: int, n: int, j: int, distribution: str) -> float:
    """The formula in the docstring of jachess_ext/ops/directions.py, in Python's own numbers."""
    group, rest = divmod(j, 32)
    word, lane = divmod(rest, 8)
    counter = [i * 2**18 + 8 * group + lane, n, offset % 2**32, offset // 2**32]
    words = _C.philox4x32_10(counter, [seed % 2**32, seed // 2**32])
    if distribution == "rademacher":
        return -1.0 if words[word] >= 2**31 else 1.0
    a, b = words[word // 2 * 2], words[word // 2 * 2 + 1]
    u = float(torch.tensor((a // 2 + 0.5) / 2**31, dtype=torch.float32))
    radius, angle = math.sqrt(-2 * math.log(u)), 2 * math.pi * b / 2**32
    return radius * (math.sin(angle) if word % 2 else math.cos(angle))


def test_is_available() -> None:
    assert ops.available("sample_directions", "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_numbers_by_definition(device: str, distribution: str) -> None:
    seed, offset = 2**63 + 12345, 2**61 + 2**35 + 3
    stream = {"seed": seed, "offset": offset, "distribution": distribution}
    got = draw(3, 4, 90, device, **stream).cpu()
    reference = ops.sample_directions_reference(torch.arange(4), 3, 90, **stream)
    for i, n in ((0, 0), (2, 1), (1, 3)):
        expected = [by_definition(seed, offset, i, n, j, distribution) for j in range(90)]
        for values in (got, reference):
            torch.testing.assert_close(
                values[i, n].double(), torch.tensor(expected).double(), rtol=0, atol=1e-6
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_agrees_with_the_reference(device: str, distribution: str) -> None:
    token = torch.arange(1000, device=device).view(10, 100)
    stream = {"seed": 7, "offset": 3, "distribution": distribution}
    got = ops.sample_directions(token, 2, 768, **stream)
    reference = ops.sample_directions_reference(token, 2, 768, **stream)
    assert got.shape == (2, 10, 100, 768)
    torch.testing.assert_close(got, reference, rtol=0, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_same_bits_on_every_device(distribution: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        stream = {"seed": 7, "offset": 3, "distribution": distribution, "dtype": dtype}
        gpu = draw(4, 1000, 384, "cuda", **stream).cpu()
        assert torch.equal(gpu, draw(4, 1000, 384, **stream))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrapper", [ops.sample_directions, ops.sample_directions_reference])
def test_depends_on_nothing_else(device: str, wrapper) -> None:
    """Not on the batch's shape, padding, q, d or dtype."""
    whole = wrapper(torch.arange(12, device=device), 4, 100, seed=5, offset=9)
    fewer = wrapper(torch.arange(12, device=device).view(3, 4), 2, 37, seed=5, offset=9)
    assert torch.equal(fewer.flatten(1, 2), whole[:2, :, :37])
    one = wrapper(torch.tensor([11], device=device), 4, 100, seed=5, offset=9)
    assert torch.equal(one[:, 0], whole[:, 11])
    left, right = torch.zeros(2, 3, 9, dtype=torch.bool, device=device)
    left[:, 5:] = True
    right[:, :4] = True
    for mask in (left, right):
        padded = wrapper(ops.token_numbers(mask), 4, 100, seed=5, offset=9)
        assert torch.equal(padded[:, mask], whole)
        assert not padded[:, ~mask].any()
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        other = wrapper(torch.arange(12, device=device), 4, 100, seed=5, offset=9, dtype=dtype)
        assert other.dtype == dtype
        assert torch.equal(other, whole.to(dtype))


def test_does_not_depend_on_threads() -> None:
    assert same_for_any_threads(lambda: [draw(3, 300, 65)])


def test_token_numbers() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    assert ops.token_numbers(mask).tolist() == [[0, 1, -1], [-1, -1, -1], [-1, 2, 3]]


def test_strides_and_empty() -> None:
    token = torch.arange(24).view(4, 6)
    dense = ops.sample_directions(token.t().contiguous(), 2, 9, seed=1)
    assert torch.equal(ops.sample_directions(token.t(), 2, 9, seed=1), dense)
    for wrapper in (ops.sample_directions, ops.sample_directions_reference):
        for shape, q, d in (((0, 3), 2, 5), ((2, 3), 0, 5), ((2, 3), 2, 0), ((), 1, 4)):
            got = wrapper(torch.zeros(shape, dtype=torch.int64), q, d, seed=1)
            assert got.shape == (q, *shape, d)


# ---- statistics ----------------------------------------------------------------------------


def assert_mean(values: Tensor, expected: float, variance: float) -> None:
    """The mean of independent values lies within five standard errors of its expectation."""
    error = math.sqrt(variance / values.numel())
    assert abs(float(values.double().mean()) - expected) < SIGMAS * error


def test_normal_moments() -> None:
    """E x^k = (k−1)!! for even k, 0 for odd; Var x^k = E x^2k − (E x^k)²."""
    x = draw(4, 700, 384, seed=11).double()
    double_factorial = [1, 0, 1, 0, 3, 0, 15, 0, 105, 0, 945, 0, 10395]
    for k in range(1, 7):
        mean = double_factorial[k]
        assert_mean(x**k, mean, double_factorial[2 * k] - mean**2)


def test_normal_distribution_function() -> None:
    """Kolmogorov–Smirnov at level 1e-6, overall, per word of a block, and for |x| > 4."""
    x = draw(2, 1000, 64, seed=12)
    for values in (x, *(x[..., 8 * word : 8 * word + 8] for word in range(4))):
        assert scipy.stats.kstest(values.flatten().double(), "norm").pvalue > 1e-6
    tail = math.erfc(4 / math.sqrt(2))
    assert_mean(draw(4, 1000, 512, seed=13).abs() > 4, tail, tail * (1 - tail))


def test_rademacher_numbers() -> None:
    x = draw(4, 700, 384, seed=11, distribution="rademacher")
    assert set(x.unique().tolist()) == {-1.0, 1.0}
    for word in range(4):
        assert_mean(x.view(-1, 4, 8)[:, word], 0, 1)


def neighbours(distribution: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of numbers that differ in one of the things they depend on."""
    x = draw(2, 512, 256, seed=1, offset=1, distribution=distribution)
    pairs = {"direction": (x[0], x[1]), "token": (x[:, 1:], x[:, :-1])}
    # 1 and 2: lanes; 8: the partner in Box and Muller's pair; 16: the block's other pair; 32
    for step in (1, 2, 8, 16, 32):
        pairs[f"dimension+{step}"] = (x[..., step:], x[..., :-step])
    streams = {
        "seed": (2, 1),
        "seed's high word": (1 + 2**32, 1),
        "offset": (1, 2),
        "offset's high word": (1, 1 + 2**32),
    }
    for name, (seed, offset) in streams.items():
        other = draw(2, 512, 256, seed=seed, offset=offset, distribution=distribution)
        pairs[name] = (x, other)
    return pairs


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_neighbours_are_uncorrelated(distribution: str) -> None:
    """E xy = 0 with Var xy = 1; and of normals E (x²−1)(y²−1) = 0 with variance 4."""
    for x, y in neighbours(distribution).values():
        assert not torch.equal(x, y)
        assert_mean(x * y, 0, 1)
        if distribution == "gaussian":
            assert_mean((x**2 - 1) * (y**2 - 1), 0, 4)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_covariance_is_the_identity(distribution: str) -> None:
    """Every entry of the sample covariance over 2^14 tokens; six errors, for 64² entries."""
    x = draw(1, 2**14, 64, seed=3, distribution=distribution)[0].double()
    covariance = x.T @ x / len(x)
    variances = torch.ones(64, 64) + (torch.eye(64) if distribution == "gaussian" else 0)
    bound = 6 * (variances / len(x)).sqrt() + 1e-12
    assert ((covariance - torch.eye(64)).abs() < bound).all()


# ---- seeds, compile ------------------------------------------------------------------------


def test_seeds_of_64_bits() -> None:
    assert torch.equal(draw(1, 2, 4, seed=2**64 - 5), draw(1, 2, 4, seed=-5))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    token = torch.arange(6, device=device).view(2, 3)
    for dtype in (torch.float32, torch.bfloat16):
        seed, offset = torch.tensor([1, 2], device=device).unbind()
        arguments = (token, 2, 5, seed, offset, "gaussian", dtype)
        torch.library.opcheck(torch.ops.jachess.sample_directions, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(device: str) -> None:
    def f(token: Tensor) -> Tensor:
        return 2 * ops.sample_directions(token, 2, 16, seed=3, offset=1)

    token = torch.arange(6, device=device).view(2, 3)
    assert torch.equal(torch.compile(f, fullgraph=True)(token), f(token))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrapper", [ops.sample_directions, ops.sample_directions_reference])
def test_seed_and_offset_as_tensors(device: str, wrapper) -> None:
    token = torch.arange(12, device=device)
    for seed, offset in ((-5, 0), (2**62 + 7, 2**61 + 2**33 + 9)):
        numbers = torch.tensor([seed, offset], device=device)
        expected = wrapper(token, 2, 37, seed=seed, offset=offset)
        got = wrapper(token, 2, 37, seed=numbers[0], offset=numbers[1])
        assert torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_reads_them_anew(device: str) -> None:
    """One graph serves every seed and offset."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def f(token: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return 2 * ops.sample_directions(token, 2, 16, seed=seed, offset=offset)

    token = torch.arange(6, device=device)
    g = torch.compile(f, backend=backend, fullgraph=True)
    draws = [g(token, *torch.tensor(pair, device=device).unbind()) for pair in ((1, 2), (1, 3))]
    assert len(compiled) == 1
    assert torch.equal(draws[1], f(token, *torch.tensor((1, 3), device=device).unbind()))
    assert not torch.equal(draws[0], draws[1])


# ---- Philox4x32-10, against its authors' known answers and Python's own integers -----------------

# (counter, key, words): the known answers published with the paper (Random123, kat_vectors,
# "philox4x32 10"): all zero, all one, and the digits of pi
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_by_integers(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition, in Python's integers."""
    for _ in range(10):
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (high >> 32) ^ counter[1] ^ key[0],
            high & 0xFFFFFFFF,
            (low >> 32) ^ counter[3] ^ key[1],
            low & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    assert _C.philox4x32_10(words(counter), words(key)) == words(expected)
    assert philox_by_integers(words(counter), words(key)) == words(expected)


def test_agrees_with_the_definition() -> None:
    source = random.Random(0)
    for _ in range(200):
        counter = [source.getrandbits(32) for _ in range(4)]
        key = [source.getrandbits(32) for _ in range(2)]
        assert _C.philox4x32_10(counter, key) == philox_by_integers(counter, key)


def test_refuses_what_is_not_words() -> None:
    for counter, key in (([0] * 3, [0] * 2), ([0] * 4, [2**32, 0]), ([-1] * 4, [0] * 2)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            _C.philox4x32_10(counter, key)
