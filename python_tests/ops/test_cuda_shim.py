"""The .cu sources, compiled by the C++ compiler under the CPU shim with address and
undefined-behaviour sanitizers, against the CPU operators.

It shows index maps, masks, reductions and barriers right where no GPU is. It cannot show that the
kernels run on a GPU, nor how fast.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from jachess_build import sanitized
from torch import Tensor

from jachess_ext import ops
from python_tests.ops import shim
from python_tests.ops.cases import random_jet, relative_error
from python_tests.ops.shim import CSRC, STORAGE

BOUNDS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
pytestmark = [
    pytest.mark.sanitizers,
    pytest.mark.skipif(not sanitized.available(), reason="needs g++ with its sanitizers"),
]
FLAGS = ["-std=c++17", "-O0", "-g1", "-Wno-psabi", "-I", str(CSRC / "testing")]


JETS = [(1, 2), (2, 3), (2, 4)]  # (q, streams) that the kernels take at once
# `make sanitize` takes fp32 and bf16, `make test-slow` every dtype.
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.slow if dtype in (torch.float64, torch.float16) else [])
    for dtype in STORAGE
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim compiled with the kernels of csrc/cuda, without the NTK's, which have their own
    tests."""
    sanitizer = sanitized.SANITIZERS["address"]
    # launch_error: the CUDA runtime's own words
    apart = ("launch_error", "ntk_gram")
    kernels = [file for file in sorted(CSRC.glob("cuda/*.cu")) if file.stem not in apart]
    sources = [CSRC / "testing" / "run_kernel.cpp", *kernels]
    cache = sanitized.CACHE / f"shim_{sanitizer.name}"
    objects = sanitized.compile_objects(sources, [*FLAGS, *sanitizer.flags], cache)
    target = tmp_path_factory.mktemp("shim") / sanitizer.name
    return sanitized.link(objects, target, sanitizer.flags)


def as_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements in memory order."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def run(
    program: Path,
    op: str,
    x: Tensor,
    q: int,
    inputs: list[Tensor],
    outputs: list[Tensor],
    kind: str = "gelu",
    backwards: bool = False,
    masked: bool = False,
) -> list[Tensor]:
    """Run one launcher of jets x [S, ..., channels]; results as in `run_program`."""
    kinds = int(masked) if op.startswith("softmax") else ops.ACTIVATION_KINDS.index(kind)
    return run_program(program, op, x, q, inputs, outputs, kinds, backwards)


def run_program(
    program: Path,
    op: str,
    x: Tensor,
    q: int,
    inputs: list[Tensor],
    outputs: list[Tensor],
    kind: int,
    backwards: bool = False,
    classes: int = 1,
    positions: int = 1,
    affine: bool = True,
) -> list[Tensor]:
    """Run one launcher; the results have the shapes and dtypes of `outputs`.

    Args:
        classes: of a norm, those of rows with parameters of their own.
        positions: of a norm, neighbouring elements that share an entry of the parameters.
        affine: whether a norm has parameters, and its backward makes their gradients.
    """
    channels = x.shape[-1]
    options = {
        "op": op,
        "storage": STORAGE.index(x.dtype),
        "q": q,
        "pairs": x.shape[0] - 1 - q,
        "rows": x[0].numel() // channels,
        "channels": channels,
        "classes": classes,
        "positions": positions,
        "affine": int(affine),
        "kind": kind,
    }
    data = shim.run_program(program, options, list(map(as_bytes, inputs)), backwards=backwards)
    results, offset = [], 0
    for like in outputs:
        end = offset + like.numel() * like.element_size()
        # frombuffer refuses a buffer of no bytes
        values = torch.frombuffer(data[offset:end], dtype=like.dtype) if end > offset else like
        results.append(values.view(like.shape))
        offset = end
    assert offset == len(data)
    return results


# widths that are and are not a multiple of the four elements a thread takes, and rows wider than
# a block of 256 threads
@pytest.mark.parametrize("channels", [37, 300])
@pytest.mark.parametrize(("q", "streams"), JETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(program: Path, dtype: torch.dtype, q: int, streams: int, channels: int) -> None:
    x = random_jet(streams, 3, channels, dtype=dtype)
    gy = random_jet(streams, 3, channels, dtype=dtype, seed=1)
    for kind in ops.ACTIVATION_KINDS if (q, dtype) == (2, torch.float32) else ["gelu"]:
        (y,) = run(program, "activation_jet", x, q, [x], [x], kind)
        assert relative_error(y, torch.ops.jachess.activation_jet(x, kind, q)) < BOUNDS[dtype]
        (gx,) = run(program, "activation_jet_backward", x, q, [gy, x], [x], kind)
        expected = torch.ops.jachess.activation_jet_backward(gy, x, kind, q)
        assert relative_error(gx, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("channels", [37, 300])
@pytest.mark.parametrize(("q", "streams"), JETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(
    program: Path, dtype: torch.dtype, q: int, streams: int, channels: int
) -> None:
    """Dense, and as halves of one tensor."""
    both = random_jet(streams, 3, 2 * channels, dtype=dtype)
    gy = random_jet(streams, 3, channels, dtype=dtype, seed=1)
    g, u = both.chunk(2, -1)
    for kind in ops.ACTIVATION_KINDS if (q, dtype) == (2, torch.float32) else ["silu"]:
        want = torch.ops.jachess.gated_activation_jet(g, u, kind, q)
        wanted = torch.ops.jachess.gated_activation_jet_backward(gy, g, u, kind, q)
        for name, inputs in (("gated_activation_jet", [g, u]), ("gated_halves_jet", [both])):
            (y,) = run(program, name, gy, q, inputs, [gy], kind)
            assert relative_error(y, want) < BOUNDS[dtype]
            got = run(program, f"{name}_backward", gy, q, [gy, *inputs], [gy, gy], kind)
            for a, b in zip(got, wanted, strict=True):
                assert relative_error(a, b) < BOUNDS[dtype]


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("channels", [37, 300])
@pytest.mark.parametrize(("q", "streams"), JETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(
    program: Path,
    dtype: torch.dtype,
    q: int,
    streams: int,
    channels: int,
    add: bool,
    norm: str,
) -> None:
    x, gy, residual, gsum = (
        random_jet(streams, 3, channels, dtype=dtype, seed=seed) for seed in range(4)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # parameters are read as they are stored
    weight, bias = random_jet(2, channels, dtype=dtype if add else wide, seed=7)
    layer = norm == "layer_norm"
    forward = getattr(torch.ops.jachess, f"{norm}_jet")
    backward = getattr(torch.ops.jachess, f"{norm}_jet_backward")
    parameters = [weight, bias] if layer else [weight]
    y, total, *statistics = forward(x, residual if add else None, *parameters, 1e-5, q)
    name, more = f"{norm}_jet", [total] if add else []
    if add:
        name = f"add_{name}"
    inputs = [x, *([residual] if add else []), *parameters]
    stored = STORAGE.index(weight.dtype)
    got_y, *got = run_program(program, name, x, q, inputs, [y, *more, *statistics], stored)
    assert relative_error(got_y, y) < BOUNDS[dtype]
    if add:
        assert torch.equal(got.pop(0), total)
    for a, b in zip(got, statistics, strict=True):
        assert relative_error(a[None], b[None]) < BOUNDS[wide]  # small streams: as a whole
    x = total if add else x
    given = [gy, gsum if add else None, x, weight, 1e-5, q, *statistics, True]
    gx, *weights = backward(*given)
    inputs = [t for t in given if isinstance(t, Tensor)]
    outputs = [gx, *weights]
    got = run_program(program, f"{name}_backward", x, q, inputs, outputs, stored)
    assert relative_error(got[0], gx) < BOUNDS[dtype]
    for a, b in zip(got[1:], weights, strict=True):
        assert relative_error(a[None], b[None]) < BOUNDS[wide]
    # a missing barrier shows as a result that depends on the order the threads run in
    reordered = run_program(
        program, f"{name}_backward", x, q, inputs, outputs, stored, backwards=True
    )
    assert all(torch.equal(a, b) for a, b in zip(got, reordered, strict=True))


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_overflows(program: Path, dtype: torch.dtype, norm: str) -> None:
    """A row that is NaN, or of RMS norm 0, as the CPU's; the others are as they were."""
    x = random_jet(2, 3, 37, dtype=dtype)
    x[0, 1] *= {torch.float64: 1e200, torch.float16: torch.inf}.get(dtype, 1e25)
    y, _, *statistics = getattr(torch.ops.jachess, f"{norm}_jet")(
        x, None, *([None] * (1 + (norm == "layer_norm"))), 1e-5, 1
    )
    parameters = [torch.ones(37), torch.zeros(37)][: 1 + (norm == "layer_norm")]
    stored = STORAGE.index(torch.float32)
    got, *_ = run_program(program, f"{norm}_jet", x, 1, [x, *parameters], [y, *statistics], stored)
    torch.testing.assert_close(got, y, equal_nan=True)
    assert got[:, [0, 2]].isfinite().all()
    assert norm == "rms_norm" or got[:, 1].isnan().all()


@pytest.mark.parametrize(
    ("rows", "channels"), [(1500, 5), pytest.param(1026, 2050, marks=pytest.mark.slow)]
)
def test_more_rows_than_blocks(program: Path, rows: int, channels: int) -> None:
    """Blocks of the backward take several rows each; a narrow row's sums lie in shared memory."""
    x, gy = (random_jet(2, rows, channels, seed=seed) for seed in range(2))
    weight = random_jet(1, channels, seed=7)[0]
    _, _, mean, rstd = torch.ops.jachess.layer_norm_jet(x, None, weight, None, 1e-5, 1)
    wanted = torch.ops.jachess.layer_norm_jet_backward(
        gy, None, x, weight, 1e-5, 1, mean, rstd, True
    )
    inputs = [gy, x, weight, mean, rstd]
    stored = STORAGE.index(weight.dtype)
    got = run_program(program, "layer_norm_jet_backward", x, 1, inputs, list(wanted), stored)
    for g, w in zip(got, wanted, strict=True):
        assert relative_error(g[None], w[None]) < 1e-12


# the blocks of the backward: one of several rows of a class, and one a class
@pytest.mark.parametrize(
    ("rows", "classes", "channels"),
    [(2, 3, 37), (345, 3, 5), pytest.param(2, 1100, 4, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norm_of_classes(program: Path, norm: str, rows: int, classes: int, channels: int) -> None:
    """Rows with parameters of their own, as the CPU has them."""
    x, gy = (random_jet(4, rows, classes, channels, seed=seed) for seed in range(2))
    parameters = list(random_jet(2, classes, channels, seed=7))[: 1 + (norm == "layer_norm")]
    y, _, *statistics = getattr(torch.ops.jachess, f"{norm}_jet")(x, None, *parameters, 1e-5, 2)
    backward = getattr(torch.ops.jachess, f"{norm}_jet_backward")
    wanted = list(backward(gy, None, x, parameters[0], 1e-5, 2, *statistics, True))
    run = partial(run_program, program, x=x, q=2, kind=STORAGE.index(x.dtype), classes=classes)
    outputs = [y, *statistics]
    got = run(op=f"{norm}_jet", inputs=[x, *parameters], outputs=outputs)
    inputs = [gy, x, parameters[0], *statistics]
    got += run(op=f"{norm}_jet_backward", inputs=inputs, outputs=wanted)
    for ours, theirs in zip(got, [*outputs, *wanted], strict=True):
        assert relative_error(ours[None], theirs[None]) < 1e-12


def group_norm_jet(x: Tensor, affine: list[Tensor], groups: int, q: int) -> Tensor:
    """The jet of a group norm [S, N, C, P], written out and differentiated by torch."""

    def norm(x: Tensor) -> Tensor:
        rows = x.reshape(len(x), groups, -1)
        rows = rows - rows.mean(-1, keepdim=True)
        y = (rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(x.shape)
        return y * affine[0][:, None] + affine[1][:, None] if affine else y

    def slope(x: Tensor, direction: Tensor) -> Tensor:
        return torch.func.jvp(norm, (x,), (direction,))[1]

    streams = [norm(x[0]), *(slope(x[0], first) for first in x[1 : 1 + q])]
    if len(x) == 4:
        streams.append(torch.func.jvp(slope, (x[0], x[1]), (x[2], x[3]))[1])
    return torch.stack(streams)


# samples, channels, groups, positions: a channel that a thread's pack of four exceeds, divides and
# does not divide; one position, one group, a channel a group; channels for the warps of a block,
# more of them than warps and fewer, or so long that the block takes them one by one
GROUPS = [
    *((2, 12, 2, 1), (2, 4, 2, 3), (3, 6, 2, 7), (2, 4, 1, 49), (2, 3, 3, 300)),
    *((1, 20, 2, 256), (1, 2, 1, 1100), (1, 5, 1, 130)),
]


@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize(("q", "streams"), JETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm(
    program: Path, dtype: torch.dtype, q: int, streams: int, shape: tuple[int, int, int, int]
) -> None:
    check_group_norm(program, dtype, q, streams, *shape)


@pytest.mark.parametrize("shape", [(2, 12, 2, 1), (2, 4, 2, 3)])
def test_group_norm_without_parameters(program: Path, shape: tuple[int, int, int, int]) -> None:
    check_group_norm(program, torch.float32, 2, 4, *shape, affine=False)


def test_group_norm_of_more_samples_than_blocks(program: Path) -> None:
    check_group_norm(program, torch.float64, 1, 2, 1030, 2, 1, 3)


def check_group_norm(
    program: Path,
    dtype: torch.dtype,
    q: int,
    streams: int,
    samples: int,
    channels: int,
    groups: int,
    positions: int,
    affine: bool = True,
) -> None:
    """Values and gradients, against those in float64, and in either order of the threads."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, gy = (
        random_jet(streams, samples, channels, positions, dtype=dtype, seed=seed)
        for seed in range(2)
    )
    parameters = list(random_jet(2, channels, dtype=dtype, seed=7)) if affine else []
    leaves = [t.double().requires_grad_() for t in (x, *parameters)]
    expected = group_norm_jet(leaves[0], leaves[1:], groups, q)
    gradients = torch.autograd.grad(expected, leaves, gy.double())

    rows = x.view(streams, samples, groups, -1)
    statistic = torch.empty(rows.shape[:-1], dtype=wide)
    entries = torch.empty(channels, dtype=wide)
    call = partial(run_program, program, x=rows, q=q, kind=STORAGE.index(dtype), classes=groups)
    call = partial(call, positions=positions, affine=affine)
    outputs = [x, statistic, statistic]
    y, *statistics = call(op="layer_norm_jet", inputs=[x, *parameters], outputs=outputs)
    assert relative_error(y, expected) < BOUNDS[dtype]
    backward = partial(
        call,
        op="layer_norm_jet_backward",
        inputs=[gy, x, *parameters[:1], *statistics],
        outputs=[x, entries, entries],
    )
    got = backward()
    assert relative_error(got[0], gradients[0]) < BOUNDS[dtype]
    for ours, theirs in zip(got[1:], gradients[1:], strict=affine):
        assert relative_error(ours[None], theirs[None]) < BOUNDS[wide]
    if samples < 1000:  # which takes long enough
        reordered = backward(backwards=True)
        assert all(torch.equal(a, b) for a, b in zip(got, reordered, strict=True))


def test_memory_of_a_group_norm(program: Path) -> None:
    """Two numbers for each block and channel, whatever the number of positions."""
    x = torch.empty(2, 8, 32, 16 * 64 * 64, dtype=torch.bfloat16, device="meta")
    call = partial(run_program, program, "layer_norm_partials", x, 1, [])
    (got,) = call([torch.empty(1, dtype=torch.int64)], 0, classes=32, positions=64 * 64)
    assert got.item() == 2 * 16 * (8 * 32)


@pytest.mark.parametrize("d", [1, 37, 300])
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_directions(program: Path, dtype: torch.dtype, distribution: str, d: int) -> None:
    """Bit for bit what the CPU operator gives."""
    token = ops.token_numbers(torch.tensor([[0, 1, 1], [1, 1, 0], [0, 1, 0]]))
    seed, offset, q = -(2**40) - 3, 2**50 + 7, 3
    numbers = torch.tensor([seed, offset])
    expected = torch.ops.jachess.sample_directions(token, q, d, *numbers, distribution, dtype)
    inputs = [numbers, token]
    like = torch.empty(1 + q, 9, d, dtype=dtype)
    kind = int(distribution == "rademacher")
    (got,) = run_program(program, "sample_directions", like, q, inputs, [expected], kind)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


# a warp's row, with and without groups of four, and a block's
@pytest.mark.parametrize("scores", [37, 300, 1100])
@pytest.mark.parametrize(("q", "streams"), JETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(program: Path, dtype: torch.dtype, q: int, streams: int, scores: int) -> None:
    x = random_jet(streams, 3, scores, dtype=dtype)
    gy = random_jet(streams, 3, scores, dtype=dtype, seed=1)
    x[0, 1, 3:] = -torch.inf
    x[0, 2] = -torch.inf
    masked = scores != 37
    (y,) = run(program, "softmax_jet", x, q, [x], [x], masked=masked)
    (gx,) = run(program, "softmax_jet_backward", x, q, [gy, x], [x], masked=masked)
    expected_y = torch.ops.jachess.softmax_jet(x, q, masked)
    expected_gx = torch.ops.jachess.softmax_jet_backward(gy, x, q, masked)
    for got, expected in ((y, expected_y), (gx, expected_gx)):
        assert torch.equal(got.isnan(), expected.isnan())
        assert relative_error(got.nan_to_num(), expected.nan_to_num()) < BOUNDS[dtype]
    # a missing barrier shows as a result that depends on the order the threads run in
    (reordered,) = run(
        program, "softmax_jet_backward", x, q, [gy, x], [x], backwards=True, masked=masked
    )
    assert torch.equal(gx.nan_to_num(), reordered.nan_to_num())


@pytest.mark.parametrize("channels", [37, 320])
@pytest.mark.parametrize(("q", "streams"), [(1, 2), (2, 3), (2, 4), (4, 11)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mean_squares(
    program: Path, dtype: torch.dtype, q: int, streams: int, channels: int
) -> None:
    """More tokens than a block has warps; with and without mask and index."""
    operators = torch.ops.jachess
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bound = BOUNDS[wide]
    x = random_jet(streams, 11, channels, dtype=dtype)
    some = torch.arange(11) % 3 != 1
    few = torch.randperm(320)[:300] if channels == 320 else torch.tensor([channels - 1, 0, 7, 3])
    for mask, index in ((None, None), (some, None), (some, few), (None, few)):
        parts = int(mask is not None) + 2 * int(index is not None)
        inputs = [] if mask is None else [mask]
        inputs += [] if index is None else [torch.tensor([len(index)]), index]
        inputs.append(x)
        squares = operators.jet_mean_squares(x, mask, index, q)
        got_both = run_program(program, "jet_mean_squares", x, q, inputs, list(squares), parts)
        for g, w in zip(got_both, squares, strict=True):
            torch.testing.assert_close(g, w, rtol=bound, atol=0)
        weights = [random_jet(*s.shape, dtype=wide, seed=6) for s in squares]
        wanted = operators.jet_mean_squares_backward(*weights, x, mask, index, q)
        name = "jet_mean_squares_backward"
        (gx,) = run_program(program, name, x, q, [*inputs, *weights], [wanted], parts)
        assert relative_error(gx, wanted) < BOUNDS[dtype]


def test_mean_squares_index_of_wrong_numbers(program: Path) -> None:
    """What the host cannot see becomes NaN: out of range forwards, repeated backwards."""
    x = random_jet(4, 3, 8, dtype=torch.float32)
    first, second = torch.empty(3), torch.empty(3, 3)
    inputs = [torch.tensor([3]), torch.tensor([8, 2, -1]), x]
    _, got = run_program(program, "jet_mean_squares", x, 2, inputs, [first, second], 2)
    assert got[:, ::2].isnan().all() and got[:, 1].isfinite().all()
    inputs = [torch.tensor([3]), torch.tensor([5, 2, 5]), x, torch.ones(3), torch.ones(3, 3)]
    (gx,) = run_program(program, "jet_mean_squares_backward", x, 2, inputs, [x], 2)
    assert gx[3, :, 5].isnan().all()
    torch.testing.assert_close(gx[3, :, 2], 2 * x[3, :, 2])
    assert not gx[3][:, [0, 1, 3, 4, 6, 7]].any()
