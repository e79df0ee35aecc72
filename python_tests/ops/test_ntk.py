"""The NTK of linear layers, forms A (`jachess::ntk_gram`) and B (`ops.ntk_materialised`), against
every gradient written out, and against their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from jachess_ext import ops
from jachess_ext.ops import ntk
from jachess_ext.ops.ntk import WORKSPACE
from python_tests.ops.cases import DEVICES, same_for_any_threads
from python_tests.ops.ntk_sides import BOUNDS, SIZES, Side, error, expected, make_side

FORMS = ["ntk_gram", "ntk_materialised"]


@dataclass(frozen=True)
class Form:
    """One of the two forms, which answer the same question."""

    name: str

    def compiled(self, left: Side, right: Side | None = None) -> Tensor:
        """Form A's compiled operator itself, which takes no reference where it is missing; form B,
        and form A of float64 on a GPU, have none."""
        if self.name == "ntk_gram" and not (left[0].is_cuda and left[0].dtype == torch.float64):
            return torch.ops.jachess.ntk_gram(*arguments(left, right))
        return self.call(*left, *(right or ()))

    @property
    def call(self) -> Callable[..., Tensor]:
        return getattr(ops, self.name)

    @property
    def reference(self) -> Callable[..., Tensor]:
        return getattr(ops, f"{self.name}_reference")


def arguments(left: Side, right: Side | None = None) -> tuple[Any, ...]:
    """Those of the compiled operator."""
    return (*left, *((None, []) if right is None else right))


@pytest.fixture(params=FORMS, scope="module")
def form(request: pytest.FixtureRequest) -> Form:
    return Form(request.param)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sides", ["symmetric", "unequal"])
def test_against_the_sum_written_out(
    form: Form, sides: str, size: str, outputs: int, device: str
) -> None:
    samples, positions, inputs, widths = SIZES[size]
    left = make_side(outputs, samples, positions, inputs, widths, device=device)
    right = left
    if sides == "unequal":
        shape = (outputs, max(1, samples // 2), positions + 5, inputs, widths)
        right = make_side(*shape, seed=1, device=device)
    got = form.compiled(left) if sides == "symmetric" else form.compiled(left, right)
    assert error(got, expected(left, right)) < 1e-13
    reference = form.reference(*left, *(() if sides == "symmetric" else right))
    assert error(reference, expected(left, right)) < 1e-13
    if sides == "symmetric":
        assert torch.equal(got, got.permute(2, 3, 0, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", ["ragged", "long samples", "no positions to sum"])
def test_narrow_types_are_summed_in_single(
    form: Form, size: str, dtype: torch.dtype, device: str
) -> None:
    """Against the rounded operands' own kernel: only the sums may differ, not the operands."""
    samples, positions, inputs, widths = SIZES[size]
    left = make_side(2, samples, positions, inputs, widths, dtype=dtype, device=device)
    right = make_side(2, 7, positions, inputs, widths, seed=1, dtype=dtype, device=device)
    for got, wanted in (
        (form.compiled(left), expected(left, left)),
        (form.compiled(left, right), expected(left, right)),
    ):
        assert got.dtype == torch.float32
        assert error(got, wanted) < 1e-5


@pytest.mark.parametrize("dtype", BOUNDS)
def test_against_the_reference(form: Form, dtype: torch.dtype) -> None:
    """Rounding of the operands included: both round them alike, so this is far inside."""
    left = make_side(3, 9, 14, 65, (40, 17), dtype=dtype)
    right = make_side(3, 6, 10, 65, (40, 17), seed=1, dtype=dtype)
    wanted = form.reference(*left, *right)
    assert error(form.compiled(left, right), wanted.double()) < BOUNDS[dtype]
    assert form.compiled(left, right).dtype == wanted.dtype


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(1, 5),
    samples=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    positions=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    inputs=st.integers(1, 50),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    symmetric=st.booleans(),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_any_size(
    form: Form,
    outputs: int,
    samples: tuple[int, int],
    positions: tuple[int, int],
    inputs: int,
    widths: list[int],
    symmetric: bool,
    share: float,
    seed: int,
) -> None:
    """Any sizes, any positions without a cotangent."""
    sides = [
        make_side(outputs, n, t, inputs, tuple(widths), seed=seed + i)
        for i, (n, t) in enumerate(zip(samples, positions, strict=True))
    ]
    for a, deltas in sides:
        unused = torch.rand(a.shape[:2], generator=torch.Generator().manual_seed(seed)) < share
        for delta in deltas:
            delta.masked_fill_(unused[..., None], 0)
    left, right = sides[0], sides[0] if symmetric else sides[1]
    got = form.compiled(left) if symmetric else form.compiled(left, right)
    wanted = expected(left, right)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-9)


def test_positions_without_cotangents_count_nothing(form: Form) -> None:
    """Whatever their inputs hold; a position that only one output or layer uses does count."""
    left = make_side(2, 40, 12, 24, (10, 6))
    a, deltas = left
    unused = torch.arange(12) % 3 == 1
    for delta in deltas:
        delta[:, :, unused] = 0
    deltas[0][1, 5, 4] = 1.0  # of the second output and the first layer alone
    deltas[1][0, 6, 7, 3] = -2.0
    wanted = expected(left, left)
    keep = torch.zeros(40, 12, dtype=torch.bool)
    keep[5, 4] = keep[6, 7] = True
    spoilt = torch.where(unused[None, :, None] & ~keep[..., None], torch.inf, a)
    for run in (form.call, form.reference):
        torch.testing.assert_close(run(spoilt, deltas), wanted, rtol=1e-12, atol=1e-10)
    silent = [torch.zeros_like(delta) for delta in deltas]
    assert not form.call(a, silent).any()


@pytest.mark.parametrize("outputs", [1, 3])
def test_samples_of_very_different_lengths(form: Form, outputs: int) -> None:
    """Short ones share a tile, on one side or the other, with one that takes several."""
    lengths = torch.tensor([10, 20, 150, 30, 0, 290, 5, 140])
    a, deltas = make_side(outputs, 8, 300, 9, (6, 4))
    for delta in deltas:
        delta[:, torch.arange(300) >= lengths[:, None]] = 0
    right = make_side(outputs, 5, 200, 9, (6, 4), seed=1)
    assert error(form.compiled((a, deltas)), expected((a, deltas), (a, deltas))) < 1e-13
    assert error(form.compiled((a, deltas), right), expected((a, deltas), right)) < 1e-13
    assert error(form.compiled(right, (a, deltas)), expected(right, (a, deltas))) < 1e-13


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_numbers_are_not_lost(form: Form, bad: float) -> None:
    a, deltas = make_side(2, 6, 3, 8, (5,), dtype=torch.float32)
    deltas[0][1, 4, 2, 3] = bad
    got = form.call(a, deltas)
    finite = torch.ones(2, 6, dtype=torch.bool)
    finite[1, 4] = False
    assert torch.equal(got.isfinite(), finite[:, :, None, None] & finite[None, None])
    a, deltas = make_side(2, 6, 3, 8, (5,), dtype=torch.float32)
    a[2, 1, 0] = bad
    assert not form.call(a, deltas)[:, 2].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(form: Form, device: str) -> None:
    a, deltas = make_side(2, 9, 7, 12, (8, 5), device=device)
    wanted = form.compiled((a, deltas))
    spread = [delta.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for delta in deltas]
    assert torch.equal(
        form.compiled((a.transpose(0, 1).contiguous().transpose(0, 1), spread)), wanted
    )
    wide = [torch.cat([delta, delta], -1)[..., : delta.shape[-1]] for delta in deltas]
    assert torch.equal(form.compiled((torch.cat([a, a], 1)[:, :7], wide)), wanted)
    turned = a.transpose(1, 2).contiguous().transpose(1, 2)  # rows that are not dense
    every_other = [torch.stack([delta, delta], -1)[..., 0] for delta in deltas]
    assert torch.equal(form.compiled((turned, every_other)), wanted)
    same = deltas[0][:1].expand(2, -1, -1, -1)
    assert torch.equal(form.compiled((a, [same])), form.compiled((a, [same.contiguous()])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "sizes", [(0, 3, 4, 5, (6,)), (2, 0, 4, 5, (6,)), (2, 3, 0, 5, (6,)), (2, 3, 4, 0, (6,)),
              (2, 3, 4, 5, (0,)), (2, 3, 4, 5, (0, 6))],
)  # fmt: skip
def test_nothing(
    form: Form, sizes: tuple[int, int, int, int, tuple[int, ...]], device: str
) -> None:
    left = make_side(*sizes, device=device)
    got = form.compiled(left)
    assert got.shape == (sizes[0], sizes[1], sizes[0], sizes[1])
    torch.testing.assert_close(got, expected(left, left))
    right = make_side(sizes[0], 4, 2, sizes[3], sizes[4], seed=1, device=device)
    torch.testing.assert_close(form.compiled(left, right), expected(left, right))
    assert form.reference(*left).shape == got.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deterministic(form: Form, dtype: torch.dtype, device: str) -> None:
    """Bit for bit, run to run, and form A for any number of threads."""
    left = make_side(3, 60, 13, 40, (24,), dtype=dtype, device=device)
    first = form.compiled(left)
    if form.name == "ntk_gram":
        assert same_for_any_threads(lambda: [form.compiled(left)])
    assert torch.equal(form.compiled(left), first)


def test_large_offset_keeps_its_digits(form: Form) -> None:
    """Sums of float32 products whose terms share a large mean."""
    a, deltas = make_side(1, 4, 200, 64, (48,))
    left = ((a + 3).float(), [(deltas[0] + 2).float()])
    assert error(form.compiled(left), expected(left, left)) < 1e-6


def test_gradients_come_from_the_reference(form: Form) -> None:
    a, deltas = make_side(2, 3, 4, 5, (3, 2))
    b, others = make_side(2, 2, 3, 5, (3, 2), seed=1)
    leaves = [x.requires_grad_() for x in (a, *deltas, b, *others)]

    def symmetric(a: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return form.call(a, [x, y])

    def unequal(a: Tensor, x: Tensor, y: Tensor, b: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return form.call(a, [x, y], b, [u, v])

    assert torch.autograd.gradcheck(symmetric, leaves[:3])
    assert torch.autograd.gradcheck(unequal, leaves)
    with torch.no_grad():
        assert not form.call(a, deltas).requires_grad


def test_the_compiled_operator_has_no_derivative() -> None:
    a, deltas = make_side(2, 3, 4, 5, (3, 2))
    found = torch.ops.jachess.ntk_gram(*arguments((a.requires_grad_(), deltas)))
    with pytest.raises(RuntimeError, match=r"has no derivative: call jachess_ext\.ops\.ntk_gram"):
        found.sum().backward()


def test_a_position_without_cotangents_still_has_a_gradient(form: Form) -> None:
    """By its cotangents, which are zero but need not stay so."""
    a, (delta,) = make_side(1, 2, 3, 4, (3,))
    delta[:, :, 1] = 0
    assert torch.autograd.gradcheck(lambda d: form.call(a, [d]), [delta.requires_grad_()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("no kernel: the reference takes it")
    left = make_side(2, 3, 4, 5, (3, 2), dtype=dtype, device=device)
    right = make_side(2, 2, 3, 5, (3, 2), seed=1, dtype=dtype, device=device)
    operator = torch.ops.jachess.ntk_gram
    torch.library.opcheck(operator, arguments(left))
    torch.library.opcheck(operator, arguments(left, right))


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float64, False), (torch.float32, True)])
def test_float64_on_a_gpu_goes_to_the_reference(
    dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def reference(inputs: Tensor, *_: Any) -> Tensor:
        calls.append(inputs.dtype)
        return inputs.new_empty(2, 3, 2, 3)

    monkeypatch.setattr(ntk, "available", lambda name, device: True)
    monkeypatch.setattr(ntk, "ntk_gram_reference", reference)
    with FakeTensorMode():
        a, delta = (
            torch.empty(*n, dtype=dtype, device="cuda:0") for n in ((3, 4, 5), (2, 3, 4, 6))
        )
        assert ops.ntk_gram(a, [delta]).shape == (2, 3, 2, 3)
    assert bool(calls) != kernel


@pytest.mark.slow
def test_compiles_to_one_graph() -> None:
    a, deltas = make_side(2, 5, 4, 8, (6,))
    compiled = torch.compile(lambda a, d: 2 * ops.ntk_gram(a, [d]), fullgraph=True)
    assert torch.equal(compiled(a, deltas[0]), 2 * ops.ntk_gram(a, deltas))


# ---- form A by torch's products: on a GPU, but for the dtype of the results of products ---------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 30, 4096])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", SIZES)
def test_by_torch(
    size: str, dtype: torch.dtype, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample a tile, several, and all; layers side by side."""
    monkeypatch.setattr(ntk, "_GPU_TILE_ROWS", rows)
    samples, positions, inputs, widths = SIZES[size]
    samples = min(samples, 20)
    left = make_side(2, samples, positions, inputs, widths, dtype=dtype, device=device)
    right = make_side(2, 7, positions + 2, inputs, widths, seed=1, dtype=dtype, device=device)
    bound = 1e-12 if dtype == torch.float64 else 1e-5  # of products of rounded operands, in float32
    assert error(ntk._gram_by_torch(*left, *right), expected(left, right)) < bound
    got = ntk._gram_by_torch(*left, *left)
    assert error(got, expected(left, left)) < bound
    assert torch.equal(got, got.permute(2, 3, 0, 1))


@pytest.mark.parametrize("run", [ntk._gram_by_torch, ops.ntk_gram_reference, ops.ntk_gram])
def test_other_cotangents_of_the_same_inputs(run: Callable[..., Tensor]) -> None:
    left, (_, others) = make_side(2, 6, 3, 8, (5, 4)), make_side(2, 6, 3, 8, (5, 4), seed=1)
    got = run(*left, left[0], others)
    assert error(got, expected(left, (left[0], others))) < 1e-13


def test_by_torch_of_positions_without_cotangents() -> None:
    """They may hold anything; what is not finite elsewhere is not lost."""
    a, deltas = make_side(2, 6, 3, 8, (5, 4), dtype=torch.float32)
    for delta in deltas:
        delta[:, :, 1] = 0
    wanted = expected((a, deltas), (a, deltas))
    a[:, 1] = torch.inf
    assert error(ntk._gram_by_torch(a, deltas, a, deltas), wanted) < 1e-6
    assert error(ntk._gram_by_torch(a, deltas, a, [*deltas]), wanted) < 1e-6
    deltas[1][1, 4, 1, 3] = torch.nan
    finite = torch.ones(2, 6, dtype=torch.bool)
    finite[1, 4] = False
    a[:, 1] = 1
    got = ntk._gram_by_torch(a, deltas, a, deltas)
    assert torch.equal(got.isfinite(), finite[:, :, None, None] & finite[None, None])


@pytest.mark.parametrize(
    ("positions", "widths", "dtype", "by_torch"),
    [
        ((1, 1), (384,), torch.float32, True),
        ((2, 2), (384,), torch.bfloat16, True),
        ((1, 5), (384,), torch.bfloat16, False),
        ((8, 8), (1616,), torch.bfloat16, False),
        ((8, 8), (1617,), torch.bfloat16, True),
        ((8, 8), (1000, 617), torch.float16, True),
        ((8, 8), (1617,), torch.float32, False),
        ((0, 8), (1617,), torch.bfloat16, False),
        ((1, 1), (384, 0), torch.float32, False),
    ],
)
def test_what_torch_takes_on_a_gpu(
    positions: tuple[int, int], widths: tuple[int, ...], dtype: torch.dtype, by_torch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Up to four pairs of positions, and 16 bits of more than 2,000 features; nothing empty."""
    monkeypatch.setattr(ntk, "available", lambda name, device: True)
    calls = []
    monkeypatch.setattr(ntk, "_gram_by_torch", lambda *operands: calls.append(operands))
    with FakeTensorMode():
        sides = [
            (torch.empty(3, t, 384, dtype=dtype, device="cuda:0"),
             [torch.empty(2, 3, t, e, dtype=dtype, device="cuda:0") for e in widths])
            for t in positions
        ]  # fmt: skip
        ops.ntk_gram(*sides[0], *sides[1])
        products = ntk._products(sides[0][0].flatten(0, 1), sides[1][0].flatten(0, 1))
    assert products.dtype == torch.float32
    assert calls == ([(*sides[0], *sides[1])] if by_torch else [])


# ---- form B alone: how it cuts gradients, weights and workspace --------------------------------

WORKSPACES = [1, 40_000, 10**6, WORKSPACE]


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_workspace(dtype: torch.dtype, workspace: int) -> None:
    """Gradients in one block or many."""
    left = make_side(2, 11, 9, 70, (45, 3, 50), dtype=dtype)
    right = make_side(2, 5, 12, 70, (45, 3, 50), seed=1, dtype=dtype)
    bound = 1e-13 if dtype == torch.float64 else 1e-6
    got = ops.ntk_materialised(*left, workspace=workspace)
    assert error(got, expected(left, left)) < bound
    assert torch.equal(got, got.permute(2, 3, 0, 1))
    unequal = ops.ntk_materialised(*left, *right, workspace=workspace)
    assert error(unequal, expected(left, right)) < bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_more_than_a_block(dtype: torch.dtype) -> None:
    """Many gradients: strips of the upper triangle, samples of which nothing counts."""
    lengths = torch.arange(300) % 4  # of some samples nothing counts
    a, (delta,) = make_side(3, 300, 3, 4, (5,), dtype=dtype)
    delta[:, torch.arange(3) >= lengths[:, None]] = 0
    left, right = (a, [delta]), make_side(3, 280, 2, 4, (5,), seed=1, dtype=dtype)
    bound = 1e-13 if dtype == torch.float64 else 1e-6
    got = ops.ntk_materialised(*left)
    assert error(got, expected(left, left)) < bound
    assert torch.equal(got, got.permute(2, 3, 0, 1))
    assert error(ops.ntk_materialised(*left, *right), expected(left, right)) < bound


@settings(max_examples=30, deadline=None)
@given(
    inputs=st.integers(1, 400),
    widths=st.lists(st.integers(0, 250), min_size=1, max_size=3),
    workspace=st.integers(1, 10**6),
    positions=st.integers(1, 3),
)
def test_any_features(inputs: int, widths: list[int], workspace: int, positions: int) -> None:
    """Blocks of any number of rows, the last one smaller."""
    left = make_side(1, 5, positions, inputs, tuple(widths))
    got = ops.ntk_materialised(*left, workspace=workspace)
    torch.testing.assert_close(got, expected(left, left), rtol=1e-11, atol=1e-9)


def test_long_samples() -> None:
    """A number of a gradient is a sum over many positions."""
    left = make_side(2, 3, 130, 7, (6,), dtype=torch.float32)
    assert error(ops.ntk_materialised(*left), expected(left, left)) < 1e-6
