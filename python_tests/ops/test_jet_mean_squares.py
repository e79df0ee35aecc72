"""`jachess::jet_mean_squares` against sums written out, the reference, and autograd's checks."""

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from python_tests.ops.cases import (
    DEVICES,
    DTYPES,
    STREAMS,
    TRACED,
    opcheck_backward,
    random_jet,
    relative_error,
    same_for_any_threads,
)

# Sums of up to 384 squares of numbers that the storage type holds exactly, kept in fp32 or fp64.
SUM_BOUND = {torch.float64: 1e-13}
GRADIENT_BOUND = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}


def some_tokens(*shape: int, device: str = "cpu") -> Tensor:
    """A mask in which about two thirds of the tokens count."""
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(shape, generator=generator) < 0.67).to(device)


def some_dimensions(width: int, device: str = "cpu") -> Tensor:
    """About a third of the dimensions, in no order."""
    generator = torch.Generator().manual_seed(4)
    return torch.randperm(width, generator=generator)[: width // 3 + 1].to(device)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def norms_by_hand(x: Tensor, mask: Tensor | None) -> Tensor:
    """[S − 1, tokens], one number at a time, in float64."""
    rows = x.double().cpu().flatten(1, -2)
    counted = torch.ones(rows.shape[1]) if mask is None else mask.flatten().cpu()
    out = torch.zeros(rows.shape[0] - 1, rows.shape[1], dtype=torch.float64)
    for s in range(1, rows.shape[0]):
        for t in range(rows.shape[1]):
            if counted[t]:
                out[s - 1, t] = sum(value**2 for value in rows[s, t].tolist())
    return out


def test_is_available() -> None:
    assert ops.available("jet_mean_squares", "cpu")
    assert ops.available("jet_mean_squares_backward", "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_sums_by_hand(device: str, masked: bool, dtype: torch.dtype, q: int, streams: int) -> None:
    """Every width, from a few numbers to several vectors with a rest."""
    for width in (1, 8, 45):
        x = random_jet(streams, 2, 5, width, dtype=dtype, device=device)
        mask = some_tokens(2, 5, device=device) if masked else None
        index = some_dimensions(width, device)
        norms = norms_by_hand(x, mask)
        squares = [norms_by_hand(x[..., j : j + 1], mask) for j in range(width)]
        first = norms[:q].mean(0).view(2, 5)
        pairs = torch.stack(squares, -1)[q:]
        second = pairs.mean(0).view(2, 5, width) if streams > 1 + q else torch.zeros(2, 5, 0)
        chosen = second[..., index.cpu()] if streams > 1 + q else second
        for wrapper in (ops.jet_mean_squares, ops.jet_mean_squares_reference):
            for numbers, expected in ((None, second), (index, chosen)):
                got = wrapper(x, q, mask, numbers)
                assert [g.dtype for g in got] == [wide_type(dtype)] * 2
                for g, e in zip(got, (first, expected), strict=True):
                    bound = SUM_BOUND.get(dtype, 1e-6)
                    torch.testing.assert_close(g.cpu().double(), e.double(), rtol=bound, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_gradients_agree_with_the_reference(
    device: str, dtype: torch.dtype, q: int, streams: int
) -> None:
    for width, masked, sampled in ((384, True, True), (37, False, True), (40, True, False)):
        x = random_jet(streams, 3, 7, width, dtype=dtype, device=device).requires_grad_()
        mask = some_tokens(3, 7, device=device) if masked else None
        index = some_dimensions(width, device) if sampled else None
        wide = x.detach().double().requires_grad_()
        pairs = zip(
            ops.jet_mean_squares(x, q, mask, index),
            ops.jet_mean_squares_reference(wide, q, mask, index),
            strict=True,
        )
        for number, (got, expected) in enumerate(pairs):
            weight = random_jet(*expected.shape, device=device, seed=number)
            (gx,) = torch.autograd.grad((got * weight.to(got)).sum(), x, retain_graph=True)
            (want,) = torch.autograd.grad((expected * weight).sum(), wide, retain_graph=True)
            assert gx.dtype == dtype and not gx[0].any()
            assert relative_error(gx, want) < GRADIENT_BOUND[dtype]
            if mask is not None:
                assert not gx[:, ~mask].any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("q", "streams"), STREAMS)
def test_gradients(q: int, streams: int, masked: bool) -> None:
    x = random_jet(streams, 2, 2, 5).requires_grad_()
    mask = torch.tensor([[True, False], [True, True]]) if masked else None
    index = torch.tensor([3, 0])

    def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.jet_mean_squares(x, q, mask, index)

    def every(x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.jet_mean_squares(x, q, mask)

    for f in (chosen, every):
        assert torch.autograd.gradcheck(f, x, fast_mode=streams > 5)
        assert torch.autograd.gradgradcheck(f, x, fast_mode=streams > 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_tokens_are_not_looked_at(device: str, dtype: torch.dtype) -> None:
    """NaN at padding reaches neither sums nor gradients; NaN at a token that counts stays."""
    mask = torch.tensor([True, False, True], device=device)
    x = random_jet(4, 3, 16, dtype=dtype, device=device)
    x[:, 1] = float("nan")
    x.requires_grad_()
    for values in ops.jet_mean_squares(x, 2, mask):
        assert torch.isfinite(values).all()
        (gx,) = torch.autograd.grad(values.sum(), x, retain_graph=True)
        assert torch.isfinite(gx).all() and not gx[:, 1].any()
    for values in ops.jet_mean_squares(x, 2):
        assert torch.isnan(values[1]).all()
        assert torch.isfinite(values[::2]).all()


def test_halves_are_summed_in_single() -> None:
    x = torch.full((4, 1, 40_000), 0.1, dtype=torch.bfloat16)
    exact = 40_000 * x[0, 0, 0].double().item() ** 2
    # 40,000 roundings of 2⁻²⁴ bound single precision's error by 2e-3; bfloat16 would stop at 64.
    assert ops.jet_mean_squares(x, 2)[0].item() == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_same_run_to_run(device: str) -> None:
    """Bit for bit, and on the CPU whatever the number of threads."""
    x = random_jet(4, 301, 70, dtype=torch.float32, device=device).requires_grad_()

    def run() -> list[Tensor]:
        first, second = ops.jet_mean_squares(x, 2)
        total = first.square().sum() + second.square().sum()
        return [first, second, *torch.autograd.grad(total, x)]

    assert same_for_any_threads(run)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_empty(device: str, dtype: torch.dtype) -> None:
    x = random_jet(8, 6, 6, 6, dtype=dtype, device=device)
    mask = some_tokens(6, 6, device=device).t()
    index = torch.arange(6, device=device)[::2]
    for view in (x[::2], x[:4].transpose(2, 3), x[:1].expand(4, 6, 6, 6), x[:4, ..., ::2]):
        numbers = index % view.shape[-1] if view.shape[-1] == 6 else index[:1]
        dense = (view.contiguous(), mask.contiguous(), numbers.contiguous())
        got = ops.jet_mean_squares(view, 2, mask, numbers)
        expected = ops.jet_mean_squares(dense[0], 2, dense[1], dense[2])
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    for shape in ((0, 6), (3, 0)):
        leaf = random_jet(4, *shape, dtype=dtype, device=device).requires_grad_()
        values = ops.jet_mean_squares(leaf, 2)
        assert [v.shape for v in values] == [(shape[0],), shape]
        assert not any(v.any() for v in values)
        (gx,) = torch.autograd.grad(sum(v.sum() for v in values), leaf)
        assert gx.shape == leaf.shape and not gx.any()


@pytest.mark.parametrize(
    ("index", "words"),
    [([0, 3], "holds 3; expected 0 to 2"), ([-1], "holds -1"), ([1, 2, 1], "holds 1 twice")],
)
def test_index_of_wrong_numbers(index: list, words: str) -> None:
    x, numbers = torch.ones(4, 2, 3), torch.tensor(index)
    with pytest.raises(RuntimeError, match=words):
        ops.jet_mean_squares(x, 2, None, numbers)
    gradients = torch.ones(2), torch.ones(2, len(index))
    with pytest.raises(RuntimeError, match=words):
        torch.ops.jachess.jet_mean_squares_backward(*gradients, x, None, numbers, 2)


@pytest.mark.cuda
def test_index_of_wrong_numbers_gives_nan_on_a_gpu() -> None:
    x = random_jet(4, 2, 8, dtype=torch.float32, device="cuda").requires_grad_()
    for index, bad in (([0, 8], 1), ([-1, 2], 0)):
        _, second = ops.jet_mean_squares(x, 2, None, torch.tensor(index, device="cuda"))
        assert second[:, bad].isnan().all() and second[:, 1 - bad].isfinite().all()
    _, second = ops.jet_mean_squares(x, 2, None, torch.tensor([1, 2, 1], device="cuda"))
    (gx,) = torch.autograd.grad(second.sum(), x)
    assert gx[3, :, 1].isnan().all() and gx[3, :, 2].isfinite().all()


def test_backward_refuses_what_does_not_fit_x() -> None:
    x = torch.ones(4, 2, 3)
    backward = torch.ops.jachess.jet_mean_squares_backward
    with pytest.raises(RuntimeError, match=r"gfirst is .*expected 2 elements"):
        backward(torch.ones(3), torch.ones(2, 3), x, None, None, 2)
    with pytest.raises(RuntimeError, match=r"gfirst is float64.*of float32"):
        backward(torch.ones(2).double(), torch.ones(2, 3), x, None, None, 2)
    with pytest.raises(RuntimeError, match=r"gsecond is .*expected 6 elements"):
        backward(torch.ones(2), torch.ones(2, 2), x, None, None, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("traced", TRACED)
def test_opcheck(device: str, dtype: torch.dtype, traced: bool) -> None:
    x = random_jet(4, 3, 5, dtype=dtype, device=device).requires_grad_()
    gfirst, gsecond = (
        random_jet(*shape, dtype=torch.float32, device=device) for shape in ((3,), (3, 2))
    )
    mask = torch.tensor([True, False, True], device=device)
    index = torch.tensor([4, 1], device=device)
    namespace = torch.ops.jachess
    torch.library.opcheck(namespace.jet_mean_squares, (x, mask, index, 2))
    torch.library.opcheck(namespace.jet_mean_squares, (x[:3].detach(), None, None, 2))
    arguments = (gfirst, gsecond, x, mask, index, 2)
    opcheck_backward(namespace.jet_mean_squares_backward, arguments, traced)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(device: str) -> None:
    mask = torch.tensor([True, False, True], device=device)
    index = torch.tensor([4, 1], device=device)

    def loss(x: Tensor) -> Tensor:
        first, second = ops.jet_mean_squares(2 * x, 2, mask, index)
        return first.sum() + second.square().sum()

    x = random_jet(4, 3, 8, dtype=torch.float32, device=device).requires_grad_()
    (eager,) = torch.autograd.grad(loss(x), x)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), x)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
