"""Triton's kernels for attention in its interpreter, against attention written out in float64."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError

from jachess_ext import ops, torch_private
from jachess_ext.ops import attention, attention_triton
from jachess_ext.ops import attention_triton_kernels as kernels
from jachess_ext.ops.attention_reference import Call, Settings, dropout_mask
from jachess_ext.ops.attention_triton import Tile
from python_tests import processes
from python_tests.ops.cases import random_jet
from python_tests.triton import interpreter  # noqa: F401  mends bfloat16

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
Function: TypeAlias = Callable[..., tuple[Tensor, ...]]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
SEED = torch.tensor(-(2**40) - 7)
SHAPE = {"heads": 2, "key_heads": 2, "rows": 48, "keys": 48, "size": 32, "value_size": 32}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal, more keys": {"causal": True, "rows": 33, "keys": 90},
    "causal, more queries": {"causal": True, "rows": 90, "keys": 33},
    "window": {"window": (9, 5)},
    "left window": {"window": (20, 0)},
    "padding": {"mask": "padding"},
    "bias": {"mask": "bias"},
    "causal bias": {"mask": "bias", "causal": True},
    "queries that see nothing": {"mask": "holes"},
    "shared keys": {"key_heads": 1},
    "soft cap": {"softcap": 3.0},
    "scale": {"scale": 0.5},
    "negative scale": {"scale": -0.4},
    "dropout": {"dropout_p": 0.3},
    "sizes": {"size": 24, "value_size": 40, "rows": 37, "keys": 53},
    "by pointers": {"unaligned": True},
    "few keys": {"keys": 5},
    "one query": {"rows": 1, "heads": 1, "key_heads": 1},
    "two keys": {"keys": 2, "causal": True},
    "all at once": {
        **{"mask": "bias", "causal": True, "softcap": 3.0, "dropout_p": 0.2, "key_heads": 1},
        **{"rows": 45, "keys": 61, "size": 40, "value_size": 24},
    },
}
FAST = ("plain", "window", "all at once")
STEPS = ((16, 16), (16, 32), (32, 16))
JETS = {
    "tangent": (2, 1, 0),
    "scores in memory": (2, 1, 0),
    "two tangents": (3, 2, 0),
    "pair": (4, 2, 0),
    "square": (3, 1, 1),
}
"""Streams, directions, and how many squares the last stream sums."""


def make_mask(kind: str | None, batch: int, heads: int, rows: int, keys: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(5)
    if kind == "padding":
        return (torch.arange(keys) < torch.tensor([[keys], [keys - 7]])).view(batch, 1, 1, keys)
    if kind == "bias":
        bias = torch.randn(1, heads, rows, keys, generator=generator)
        bias[..., 2::5] = -math.inf
        return bias
    if kind == "holes":
        seen = torch.rand(batch, 1, rows, keys, generator=generator) < 0.4
        seen[:, :, 3], seen[:, :, 20:40] = False, False
        return seen
    return None


def problem(name: str, dtype: torch.dtype, jet: str = "tangent") -> tuple[Call, Tensor]:
    """A call of two entries, and the result's cotangent."""
    streams, q, summed = JETS[jet]
    case = SHAPE | CASES[name]
    heads, key_heads, rows, keys, size, value_size = (case.pop(key) for key in SHAPE)
    mask = make_mask(case.pop("mask", None), 2, heads, rows, keys)
    shapes = [(heads, rows, size), (key_heads, keys, size), (key_heads, keys, value_size)]
    jets = [random_jet(streams, 2, *shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]
    if case.pop("unaligned", False):
        jets = [torch.cat([x, x[..., :1]], -1)[..., :-1] for x in jets]
    gy = random_jet(streams, 2, heads, rows, value_size, dtype=dtype, seed=9)
    settings = Settings(
        *(q, case.get("scale", size**-0.5), case.get("causal", False)),
        *case.get("window", (-1, -1)),
        *(case.get("softcap", 0.0), case.get("dropout_p", 0.0), summed),
    )
    seed = SEED if settings.dropout_p else None
    return Call(jets[0], jets[1], jets[2], mask, seed, settings), gy


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Attention in torch's own words, and log Σ exp(s); 0 and −inf where a query sees nothing."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    s = settings.scale * query @ key.mT
    if settings.softcap:
        s = settings.softcap * torch.tanh(s / settings.softcap)
    ahead = torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None]
    right = 0 if settings.causal else settings.right
    seen = (ahead >= -settings.left) | (settings.left < 0)
    seen = (seen & ((ahead <= right) | (right < 0))).expand(s.shape)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        seen = seen & (mask != -math.inf)
        s = s + mask.masked_fill(mask == -math.inf, 0.0)
    # −10³⁰ and not −inf, of which torch's derivatives are NaN
    s = s.masked_fill(~seen, -1e30)
    e = torch.exp(s - s.detach().amax(-1, keepdim=True)).where(seen, 0.0)
    total = e.sum(-1, keepdim=True)
    p = e / total.where(total > 0, 1.0)
    if settings.dropout_p:
        p = (
            p
            * dropout_mask(*p.shape, settings.dropout_p, seed, p.device)
            / (1 - settings.dropout_p)
        )
    logs = (s.detach().amax(-1, keepdim=True) + total.log()).where(total > 0, -math.inf)
    return p @ value, logs.squeeze(-1)


def expected(call: Call, gy: Tensor) -> list[Tensor]:
    """The jets of the result and of log Σ exp(s), and three gradients, by torch in float64."""
    leaves = [x.double().requires_grad_() for x in call[:3]]
    mask = call.mask if call.mask is None or call.mask.dtype == torch.bool else call.mask.double()

    def function(*heads: Tensor) -> tuple[Tensor, ...]:
        return attend(*heads, mask, SEED, call.settings)

    def derivative(function: Function, stream: int) -> Function:
        tangents = tuple(x[stream] for x in leaves)
        return lambda *heads: torch.func.jvp(function, heads, tangents)[1]

    primals = tuple(x[0] for x in leaves)
    streams = [function(*primals)]
    streams += [derivative(function, n)(*primals) for n in range(1, len(gy))]
    for i, j, n in call.streams.terms():
        second = derivative(derivative(function, i), j)(*primals)
        streams[n] = tuple(a + b for a, b in zip(streams[n], second, strict=True))
    y, logs = map(torch.stack, zip(*streams, strict=True))
    logs[1:] = logs[1:].where(logs[0] > -math.inf, 0.0)
    return [y.detach(), logs.detach(), *torch.autograd.grad(y, leaves, gy.double())]


def errors(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest error of a stream, of its norm; what is not finite has to be equal."""
    largest = 0.0
    for x, reference in zip(got, wanted, strict=True):
        assert x.shape == reference.shape
        for a, b in zip(x.double(), reference, strict=True):
            finite = b.isfinite()
            assert torch.equal(a[~finite], b[~finite]) and a[finite].isfinite().all()
            largest = max(largest, float((a - b)[finite].norm() / b[finite].norm()))
    return largest


def launched(call: Call, gy: Tensor, rows: int, keys: int, jet: str = "tangent") -> list[Tensor]:
    """Everything that the kernels compute, in tiles of `rows` by `keys`."""
    tile = Tile(rows, keys, 4, 2)
    tiles = dict.fromkeys(attention_triton.TILES, (tile, tile))
    y, logs = attention_triton.forward(call, tiles)
    if len(gy) > 2:
        return [y, logs]
    in_memory = jet == "scores in memory"
    largest = 0 if in_memory else attention_triton.LARGEST_HEAD_WITHOUT_SCORES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_triton, "LARGEST_HEAD_WITHOUT_SCORES", largest)
        return [y, logs, *attention_triton.backward(gy, call, y, logs, tiles)]


TABLE = [
    pytest.param(
        *(name, steps, dtype, jet),
        marks=()
        if name in FAST and (steps, dtype) == ((32, 16), torch.bfloat16)
        else pytest.mark.slow,
        id=f"{name}, {steps[0]} x {steps[1]}, {dtype}, {jet}",
    )
    for n, name in enumerate(CASES)
    for m, steps in enumerate(STEPS)
    for dtype in BOUNDS
    for jet, (streams, *_) in JETS.items()
    if streams == 2 or name in FAST or (n + m) % len(STEPS) == 0
]


@interpreted
@pytest.mark.parametrize("name, steps, dtype, jet", TABLE)
def test_agrees_with_attention_written_out(
    name: str, steps: tuple[int, int], dtype: torch.dtype, jet: str
) -> None:
    call, gy = problem(name, dtype, jet)
    got = launched(call, gy, *steps, jet)
    assert errors(got, expected(call, gy)[: len(got)]) < BOUNDS[dtype]


@interpreted
@pytest.mark.parametrize("jet", JETS)
@pytest.mark.parametrize("name", [*FAST, "shared keys", "queries that see nothing"])
def test_the_cpp_kernels_take_the_same_statistics(name: str, jet: str) -> None:
    """Either backward takes either forward."""
    call, gy = problem(name, torch.float32, jet)
    y, logs = attention_triton.forward(call)
    settings = call.settings
    if settings.summed and settings.softcap:
        pytest.skip("no C++ kernel")
    cpp = torch.ops.jachess.attention_jet(*call[:5], *settings)
    assert errors([y, logs], [x.double() for x in cpp]) < BOUNDS[torch.float32]
    theirs = torch.ops.jachess.attention_jet_backward(gy, *call[:5], y, logs, *settings)
    ours = torch.ops.jachess.attention_jet_triton_backward(gy, *call[:5], *cpp, *settings)
    for gradients in (ours, theirs):
        assert errors([*gradients], expected(call, gy)[2:]) < BOUNDS[torch.float32]


@interpreted
@pytest.mark.parametrize("jet", JETS)
def test_an_offset_of_all_tangents_costs_no_digits(jet: str) -> None:
    """Tangents are centred: bfloat16's error does not grow with what they share."""
    call, gy = problem("plain", torch.bfloat16, jet)
    offset = torch.full((len(gy), 1, 1, 1, 1), 100.0)
    offset[0] = 0.0
    far = call._replace(key=call.key + offset.bfloat16())
    wanted = expected(far, gy)[0]
    y, _ = attention_triton.forward(far)
    assert errors([y], [wanted]) < BOUNDS[torch.bfloat16]


@interpreted
@pytest.mark.parametrize("empty", ["batch", "rows", "keys"])
def test_empty(empty: str) -> None:
    sizes = {"batch": 2, "rows": 3, "keys": 4} | {empty: 0}
    shapes = [(2, sizes["rows"], 16), (1, sizes["keys"], 16), (1, sizes["keys"], 16)]
    jets = [torch.ones(2, sizes["batch"], *shape, dtype=torch.bfloat16) for shape in shapes]
    call = Call(*jets, None, None, Settings(1, 0.25, False, -1, -1, 0.0, 0.0, 0))
    y, logs = attention_triton.forward(call)
    gradients = attention_triton.backward(torch.ones_like(y), call, y, logs)
    for result in (y, *gradients):
        assert torch.equal(result, torch.zeros_like(result))
    assert torch.equal(logs[0], torch.full_like(logs[0], -math.inf))


@interpreted
def test_the_operator_and_its_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ops.attention_jet` calls it: gradients, gradients of gradients, batched cotangents and,
    from torch 2.12 on, a graph: before, dynamo cannot trace which transforms are active."""
    rows = tuple(
        row._replace(applies=lambda call: len(call.query) == 2) if row.name == "triton" else row
        for row in attention.BACKENDS
    )
    call, gy = problem("causal", torch.float32)
    leaves = [x.requires_grad_() for x in call[:3]]

    def derivatives(double: bool) -> list[Tensor]:
        jets = [x.detach().double().requires_grad_() if double else x for x in leaves]
        g = gy.double() if double else gy
        function = ops.attention_jet_reference if double else ops.attention_jet
        y = function(*jets, q=1, causal=True)
        first = torch.autograd.grad(y, jets, g, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), jets)
        return [y.detach(), *(x.detach() for x in first), *second]

    with monkeypatch.context() as patch:
        patch.setattr(attention, "BACKENDS", rows)
        assert attention.backend_of(call) == "triton"
        got = derivatives(double=False)
        y = ops.attention_jet(*leaves, q=1, causal=True)
        pair = torch.stack([gy, 2 * gy])
        batched = torch.autograd.grad(y, leaves, pair, is_grads_batched=True)
        if torch_private.release(torch.__version__) >= (2, 12):
            compiled = torch.compile(
                lambda *x: ops.attention_jet(*x, q=1, causal=True),
                fullgraph=True,
                backend="aot_eager",
            )
            torch.testing.assert_close(compiled(*leaves), y)
    assert errors(got, derivatives(double=True)) < 5e-6
    for x, first in zip(batched, got[1:4], strict=True):
        torch.testing.assert_close(x[1], 2 * first, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [24, 32, 64, 128])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, name, CASES[name] | {"size": size, "value_size": size})
    call, gy = problem(name, torch.bfloat16)
    tensors = [None if x is None else x.cuda() for x in call[:5]]
    if size > 64 and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("heads of 128 need tensor descriptors")
    there = Call(*tensors, call.settings)
    y, logs = attention_triton.forward(there)
    results = [y, logs, *attention_triton.backward(gy.cuda(), there, y, logs)]
    assert errors([x.cpu() for x in results], expected(call, gy)) < BOUNDS[torch.bfloat16]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_launches_compile(arch: int) -> None:
    """With the arguments that they get, by Triton's compiler, where no GPU is."""
    command = [sys.executable, "-m", "python_tests.triton.compiled_job", str(arch)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = processes.run(command, env=environment, check=True)
    names = {"forward", "query_gradient", "key_gradient"}
    assert {*done.stdout.split()} == names | ({"score_jets"} if arch >= 90 else set())


# ---- planted faults --------------------------------------------------------------------------

MUTANTS = [
    ("tl.dot(x[0], y[i], sums[i])", "tl.dot(x[0], y[0], sums[i])"),
    ("n0 = n[0] * shrink[:, None]", "n0 = n[0]"),
    ("recentred += [n[i] * shrink[:, None]", "recentred += [n[i]"),
    ("- n0 * shift[:, None]", "+ n0 * shift[:, None]"),
    ("seen & (keys <= rows + P.value.right)", "seen & (keys < rows + P.value.right)"),
    ("seen & (keys >= rows - P.value.left)", "seen & (keys > rows - P.value.left)"),
    ("(first + AFTER + 1) // STEP", "(first + AFTER + STEP) // STEP"),
    ("whole_lo = tl.maximum(tl.cdiv(tl", "whole_lo = tl.maximum((lambda a, b: a // b)(tl"),
    (
        "lo = tl.maximum(first - BEFORE, 0) // STEP",
        "lo = tl.maximum(first - BEFORE + STEP, 0) // STEP",
    ),
    ("before = total * shrink", "before = total"),
    ("[log_sum] + c)", "[log_sum] + [x * 0.0 for x in c])"),
    ("s[i] * by - centre[:, None]", "s[i] * by"),
    ("tl.dot(across[j], y[j + 1], z)", "tl.dot(across[j], y[j], z)"),
    ("tl.dot(x[i], y[0], tl.dot", "tl.dot(x[i], y[1], tl.dot"),
    ("2.0 * x[1].to(tl.float32)", "1.0 * x[1].to(tl.float32)"),
    ("return [x[2], x[1]]", "return [x[1], x[2]]"),
    ("x[1 if P.value.square else 2]", "x[1]"),
    ("x[1 if P.value.square else 2]", "x[2]"),
    ("t * (2.0 * scale / softcap)", "t * (scale / softcap)"),
    ("if i < P.value.first_order:", "if i <= P.value.first_order:"),
    ("x = s[i] * by + quadratic(z, P)", "x = s[i] * by"),
    ("z += [x - centre[:, None]]", "z += [x]"),
    ("y -= across[j][:, None] * recentred[j + 1]", "y -= across[j][:, None] * recentred[j]"),
    ("(centre - c[i - 1] + bend)", "(centre - c[i - 1] - bend)"),
    ("before * (c[i - 1] + bend)", "before * c[i - 1]"),
    ("y = n[i] * shrink[:, None]", "y = n[i]"),
    ("self.streams == 4 or self.square", "self.streams == 4"),
    ("p0 * G0 + p1 * G1, p0 * G1", "p0 * G0 - p1 * G1, p0 * G1"),
    ("g0 = g0 * slope - g1 * s1", "g0 = g0 * slope + g1 * s1"),
    ("a1 = tl.dot(c0, z1, a1)", "a1 = tl.dot(c1, z1, a1)"),
    ("a1 = tl.dot(c1, z0, a1)", "a1 = tl.dot(c0, z0, a1)"),
    ("a0 = tl.dot(gs1, keys[1], tl", "a0 = tl.dot(gs1, keys[0], tl"),
    ("tl.dot(g[1], tl.trans(v[1]), tl", "tl.dot(g[0], tl.trans(v[1]), tl"),
    ("zero_tiles(p, gs, to, 0, lo, P)", "zero_tiles(p, gs, to, 0, lo * 0, P)"),
    ("zero_tiles(p, gs, to, tl.cdiv(hi, M) * M, width, P)", "pass"),
    ("words >> 8) >= numbers[2]", "words >> 8) >= numbers[2] * 2"),
    ("factor = tl.trans(factor)", "factor = factor"),
    ("p0, z1 = tl.where(seen, p0, 0.0)", "p0, z1 = p0"),
    ("return (p0 * factor, p1 * factor), gs, x", "return (p0, p1), gs, x"),
    ("h = key_head * group + n", "h = key_head * group"),
]
FAULTY = ("causal", "left window", "window", "all at once", "shared keys", "dropout", "sizes")
"""Cases that notice them."""


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("old, new", MUTANTS)
def test_a_planted_fault_is_noticed(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(kernels.__file__).read_text()
    assert source.count(old) == 1
    path = tmp_path / "mutant_kernels.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, mutant)
    spec.loader.exec_module(mutant)
    monkeypatch.setattr(ops, "attention_triton_kernels", mutant)
    assert any(_is_noticed(name, jet) for name in FAULTY for jet in JETS)


@functools.cache
def solved(name: str, jet: str) -> tuple[Call, Tensor, list[Tensor]]:
    call, gy = problem(name, torch.float32, jet)
    return call, gy, expected(call, gy)


def _is_noticed(name: str, jet: str) -> bool:
    call, gy, wanted = solved(name, jet)
    try:
        got = launched(call, gy, 16, 16, jet)
        return errors(got, wanted[: len(got)]) > BOUNDS[torch.float32]
    except (AssertionError, InterpreterError):  # not finite, or of another shape
        return True
