"""The NTK kernel's .cu source under the CPU shim against the CPU operator.

A few cases run unsanitized in every suite; the slow ones cover every dtype and shape of tile under
the address, undefined-behaviour and thread sanitizers.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from python_tests.ops.ntk_sides import Side, error, expected, make_side
from python_tests.ops.shim import (
    CSRC,
    LARGE,
    STORAGE,
    Programs,
    programs_of,
    run_program,
    stored,
)

BOUNDS = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-5,  # operands are exact, and sums are fp32's
    torch.float16: 1e-5,
}
SMALL = 76 * 1024  # of shared memory: two stages of operands fit, in LARGE three

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for the shim")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The compiled shim with the NTK kernel, by sanitizer."""
    return programs_of("run_ntk_gram", [CSRC / "cuda/ntk_gram.cu"], tmp_path_factory.mktemp)


def described(tensor: Tensor) -> str:
    """Elements stored, strides by output, sample and position, and the last size."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    output = tensor.stride(0) if tensor.dim() == 4 else 0
    return ",".join(map(str, (elements, output, *tensor.stride()[-3:-1], tensor.shape[-1])))


def run(
    program: Path,
    left: Side,
    right: Side | None,
    shared_limit: int = LARGE,
    backwards: bool = False,
    processors: int = 132,
) -> Tensor:
    """The kernel's result [C, N, C, M], on a device of so many multiprocessors."""
    return run_and_count(program, left, right, shared_limit, backwards, processors)[0]


def run_and_count(
    program: Path,
    left: Side,
    right: Side | None,
    shared_limit: int = LARGE,
    backwards: bool = False,
    processors: int = 132,
) -> tuple[Tensor, int]:
    """The result, and the blocks of the first launch."""
    dtype, outputs = left[0].dtype, left[1][0].shape[0]
    options: dict[str, object] = {
        "storage": STORAGE.index(dtype),
        "outputs": outputs,
        "layers": len(left[1]),
        "symmetric": int(right is None),
        "processors": processors,
    }
    data = []
    for prefix, side in (("", left), ("other_", right)):
        if side is None:
            continue
        inputs, deltas = side
        options[f"{prefix}samples"], options[f"{prefix}positions"] = inputs.shape[:2]
        names = ["inputs", *(f"cotangents{i}" for i in range(len(deltas)))]
        for name, tensor in zip(names, [inputs, *deltas], strict=True):
            options[f"{prefix}{name}"] = described(tensor)
            data.append(stored(tensor))
    output = run_program(program, options, data, shared_limit=shared_limit, backwards=backwards)
    numbers, blocks = output[:-8], int.from_bytes(output[-8:], "little")
    count = (left if right is None else right)[0].shape[0]
    shape = (outputs, left[0].shape[0], outputs, count)
    return torch.frombuffer(numbers, dtype=torch.float32).view(shape), blocks


def check_case(program: Path, left: Side, right: Side | None, shared_limit: int = LARGE) -> None:
    """Against the CPU operator and every gradient written out; and the same run backwards, where a
    missing barrier shows as another result, and with one block for all pairs of outputs."""
    got = run(program, left, right, shared_limit)
    assert ops.available("ntk_gram", "cpu")
    cpu = ops.ntk_gram(*left, *(right or ()))
    bound = BOUNDS[left[0].dtype]
    assert error(got, cpu.double()) < bound
    assert error(got, expected(left, left if right is None else right)) < bound
    assert torch.equal(got, run(program, left, right, shared_limit, backwards=True, processors=1))
    if right is None:
        assert torch.equal(got, got.permute(2, 3, 0, 1))


# samples, positions, inputs, widths: samples that share tiles, that reach over several, that are
# one position; features that end within a stage, and more layers than one launch takes
SIZES = {
    "shared tiles": (7, 20, 40, (24, 8)),
    "long samples": (2, 100, 16, (8,)),
    "single positions": (140, 1, 24, (16,)),
    "many layers": (3, 5, 8, (8,) * 10),
    "many features": (4, 3, 200, (136, 72)),
}


# ---- fast: one build without sanitizers --------------------------------------------------------


@pytest.mark.parametrize("size", ["shared tiles", "long samples", "many layers"])
def test_half_precision(programs: Programs, size: str) -> None:
    left = make_side(2, *SIZES[size], dtype=torch.bfloat16)
    check_case(programs("none"), left, None)


def test_single_precision_of_unequal_and_unaligned_sides(programs: Programs) -> None:
    left = make_side(3, 7, 11, 37, (13, 6), dtype=torch.float32)
    right = make_side(3, 5, 30, 37, (13, 6), seed=1, dtype=torch.float32)
    check_case(programs("none"), left, right, SMALL)


def test_blocks_share_the_pairs_of_outputs(programs: Programs) -> None:
    """Nine pairs, of three tiles, or of nine of which six are wanted: no multiprocessor gets two
    blocks that work where tiles are fewer, and the bits are those of one block a tile."""
    left = make_side(3, 14, 20, 8, (8,), dtype=torch.bfloat16)
    right = make_side(3, 6, 20, 8, (8,), seed=1, dtype=torch.bfloat16)
    for other, blocks in (
        (right, {1: 3, 6: 6, 12: 9, 15: 15, 132: 27}),
        (None, {1: 9, 12: 18, 24: 27, 132: 81}),
    ):
        results = []
        for processors, count in blocks.items():
            result, launched = run_and_count(programs("none"), left, other, processors=processors)
            assert launched == count
            results.append(result)
        assert all(torch.equal(result, results[0]) for result in results)


def test_double_precision_has_no_kernel(programs: Programs) -> None:
    with pytest.raises(AssertionError, match="the launcher returned -1"):
        run(programs("none"), make_side(1, *SIZES["shared tiles"]), None)


def test_positions_without_cotangents_may_hold_anything(programs: Programs) -> None:
    a, deltas = make_side(2, 6, 9, 16, (8,), dtype=torch.float32)
    deltas[0][:, :, 4:] = 0
    wanted = expected((a, deltas), (a, deltas))
    a[:, 4:] = torch.inf
    assert error(run(programs("none"), (a, deltas), None), wanted) < 1e-5
    deltas[0][1, 2, 3, 5] = torch.nan
    got = run(programs("none"), (a, deltas), None)
    finite = torch.ones(2, 6, dtype=torch.bool)
    finite[1, 2] = False
    assert torch.equal(got.isfinite(), finite[:, :, None, None] & finite[None, None])


def test_says_so_where_no_tile_fits(programs: Programs) -> None:
    side = make_side(1, 2, 3, 4, (4,), dtype=torch.float32)
    with pytest.raises(AssertionError, match="the launcher returned -1"):
        run(programs("none"), side, None, shared_limit=4096)


# ---- slow: everything, under sanitizers --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sides", ["symmetric", "unequal"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_everything(programs: Programs, dtype: torch.dtype, size: str, sides: str) -> None:
    """Out-of-bounds accesses excluded; two stages and three."""
    samples, positions, *features = SIZES[size]
    outputs = {"shared tiles": 4, "long samples": 3}.get(size, 1)
    left = make_side(outputs, samples, positions, *features, dtype=dtype)  # type: ignore[arg-type]
    right = None
    if sides == "unequal":
        shape = (outputs, samples // 2, positions + 2)
        right = make_side(*shape, *features, seed=1, dtype=dtype)  # type: ignore[arg-type]
    check_case(programs("address"), left, right, SMALL if outputs > 1 else LARGE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUNDS)
def test_strides_that_are_not_aligned(programs: Programs, dtype: torch.dtype) -> None:
    """Rows of a wider tensor, by output last, and an odd number of features."""
    a, deltas = make_side(2, 7, 20, 19, (11, 9), dtype=dtype)
    spread = [delta.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for delta in deltas]
    check_case(programs("address"), (a.transpose(0, 1).contiguous().transpose(0, 1), spread), None)
    check_case(programs("address"), (a[..., :17], [delta[..., :7] for delta in deltas]), None)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUNDS)
def test_no_race(programs: Programs, dtype: torch.dtype) -> None:
    """Every access of two threads to the same memory has a barrier between."""
    left = make_side(2, 6, 25, 80, (72,), dtype=dtype)
    run(programs("thread"), left, None)
    run(programs("thread"), left, None, SMALL)
