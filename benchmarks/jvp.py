"""`jx.jvp` through attention, and a MeanFlow step, against what torch offers.

Attention: 8 heads of 64, causal, one sequence.  torch.func.jvp cannot go through fused attention,
so its users write it out, or ask for the "math" backend, which is the same in C++.  Three ways:

    forward             output and tangent, nothing recorded
    forward + backward  gradients of a function of both, in query, key and value
    target              the tangent is a constant (differentiable=False), as in MeanFlow; the
                        backward goes through the output alone.  torch has no such switch: there
                        the tangent is detached after it was computed

MeanFlow (Geng et al. 2025, arXiv 2505.13447): a step of a small DiT (adaptive layer norms, fused
attention) trained towards u = v - (t - r) du/dt, against a flow-matching step of the same model:
forward, loss and backward, no optimiser.

Peak memory: each way in a process of its own; on the CPU the growth of the resident set.

On a GPU, beside the Triton kernels of jvp_flash_attention (pip install jvp_flash_attention):

    python -m benchmarks.jvp --device cuda --dtype bfloat16 \
        --baseline jvp_flash_attention.jvp_attention:attention

which calls that function as ``attention(query, key, value, causal=True)`` within torch.func.jvp, in
place of the written-out one.  That has not been run: it needs a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import math
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from benchmarks.common.memory import peak_megabytes, status_megabytes
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import ROOT, Row
from benchmarks.common.timing import Spread, Step, interleaved

QUESTION = "jvp"
HEADS, SIZE = 8, 64
TOKENS = [128, 256, 512, 1024, 2048]
MEMORY_TOKENS = [1024, 2048]
WAYS = ("forward", "forward + backward", "target")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- attention ---------------------------------------------------------------------------------


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    shown = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    return torch.softmax(scores.masked_fill(~shown, -math.inf), -1) @ value


def math_backend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return fused(query, key, value)


def attention_named(name: str) -> Attend:
    """``MODULE:FUNCTION``, called with causal=True."""
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    return lambda *qkv: found(*qkv, causal=True)


def attention_step(kind: str, way: str, tokens: int, options: Options) -> Step:
    """One jvp along random directions; ``kind`` names the attention, "ours" is `jx.jvp`."""
    torch.manual_seed(0)
    place = {"device": options.device, "dtype": options.dtype}
    primals = tuple(torch.randn(1, HEADS, tokens, SIZE, **place) for _ in range(3))
    tangents = tuple(torch.randn(1, HEADS, tokens, SIZE, **place) for _ in range(3))
    gradients = way != "forward"
    for primal in primals:
        primal.requires_grad_(gradients)

    def derivative() -> tuple[Tensor, Tensor]:
        if kind == "ours":
            return jx.jvp(fused, primals, tangents, differentiable=way != "target")
        attend = {"written out": written_out, "math backend": math_backend}.get(kind)
        found = torch.func.jvp(attend or attention_named(kind), primals, tangents)
        return (found[0], found[1].detach()) if way == "target" else found

    def step() -> None:
        with torch.set_grad_enabled(gradients):
            output, tangent = derivative()
            if gradients:
                torch.autograd.grad((output * tangent).sum(), primals)

    return step


# ---- MeanFlow ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A DiT block: shift, scale and gate of both halves come from the condition."""

    def __init__(self, width: int, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(condition)[:, None].chunk(6, -1)
        h = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        qkv = self.qkv(h).unflatten(-1, (3, -1, SIZE)).permute(2, 0, 3, 1, 4)
        attended = self.attend(*qkv.unbind(0)).transpose(1, 2).flatten(-2)
        x = x + gate * self.out(attended)
        h = F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))


class DiT(nn.Module):
    """Velocity ``[B, T, d]`` of tokens ``[B, T, d]`` between times r and t ``[B]``."""

    def __init__(self, width: int, depth: int, features: int, attend: Attend) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(features, width), nn.Linear(width, features)
        self.times = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, attend) for _ in range(depth))

    def forward(self, x: Tensor, r: Tensor, t: Tensor) -> Tensor:
        rates = torch.arange(1, 17, dtype=x.dtype, device=x.device)
        angles = torch.cat([r[:, None] * rates, t[:, None] * rates], -1)
        condition = F.silu(self.times(torch.cat([angles.sin(), angles.cos()], -1)))
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, condition)
        return self.leave(F.layer_norm(h, h.shape[-1:]))


def everywhere(*qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*qkv)


def everywhere_written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return torch.softmax(scores, -1) @ value


def training_step(kind: str, options: Options) -> Step:
    """Forward, loss and backward; ``kind`` is "plain" (flow matching) or how MeanFlow's
    derivative is taken."""
    torch.manual_seed(0)
    batch, tokens, width, depth = (2, 16, 64, 1) if options.quick else (2, 256, 384, 6)
    attend = everywhere_written_out if kind == "torch.func" else everywhere
    model = DiT(width, depth, 16, attend).to(options.device, options.dtype)
    noise, data = torch.randn(2, batch, tokens, 16, device=options.device, dtype=options.dtype)
    r, t = torch.rand(2, batch, device=options.device, dtype=options.dtype).sort(0).values
    x, velocity = torch.lerp(data, noise, t[:, None, None]), noise - data

    def loss() -> Tensor:
        if kind == "plain":
            return (model(x, t, t) - velocity).square().mean()
        inputs = (x, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t))
        if kind == "torch.func":
            output, slope = torch.func.jvp(model, *inputs)
        else:
            output, slope = jx.jvp(model, *inputs, differentiable=kind == "kept graph")
        target = velocity - (t - r)[:, None, None] * slope.detach()
        return (output - target).square().mean()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return step


# ---- measuring ---------------------------------------------------------------------------------


def measure_attention(tokens: int, options: Options) -> list[Row]:
    """A row for every way and every attention of torch's."""
    kinds = ["written out", "math backend", *options.extra.baseline]
    timed = {
        f"{kind} {way}": attention_step(kind, way, tokens, options)
        for way in WAYS
        for kind in ("ours", *kinds)
    }
    times = _times(timed, options)
    target = {1024: "≥ 4", 2048: "≥ 5"}.get(tokens, "")
    return [
        Row.of(
            (QUESTION, f"H{HEADS}-T{tokens}-D{SIZE}-causal", options.dtype_name),
            *(f"jx.jvp, {way}", times.milliseconds(f"ours {way}")),
            baseline=f"torch.func.jvp, {kind}",
            baseline_p50=times.milliseconds(f"{kind} {way}").p50,
            ratio=times.ratio(f"{kind} {way}", f"ours {way}"),
            target=target if way != "target" else "",
            note=_clock_note(options),
        )
        for way in WAYS
        for kind in kinds
    ]


def measure_meanflow(options: Options) -> list[Row]:
    """A MeanFlow step over a plain one: without a graph, with one, and torch's own."""
    kinds = {"no graph": "≤ 1.6", "kept graph": "", "torch.func": ""}
    times = _times({k: training_step(k, options) for k in ("plain", *kinds)}, options)
    return [
        Row.of(
            (QUESTION, "DiT6x384-B2-T256" if not options.quick else "tiny", options.dtype_name),
            *(f"MeanFlow step, {kind}", times.milliseconds(kind)),
            baseline="plain step",
            baseline_p50=times.milliseconds("plain").p50,
            ratio=times.ratio(kind, "plain"),
            target=target,
            note=_clock_note(options),
        )
        for kind, target in kinds.items()
    ]


def _times(timed: dict[str, Step], options: Options) -> Any:
    clock = time.process_time if options.extra.processor_time else time.perf_counter
    place = {"repeats": options.repeats, "device": options.device, "warmup": 1}
    return interleaved(timed, clock=clock, **place)


def _clock_note(options: Options) -> str:
    return "processor time" if options.extra.processor_time else ""


def measure_memory(options: Options) -> list[Row]:
    """Peaks of attention's ways and of the training steps, over torch's."""
    rows = []
    for tokens in options.extra.memory_tokens:
        for way in WAYS:
            peaks = [peak_of(f"{kind}/{way}/{tokens}", options) for kind in ("ours", "written out")]
            shape = f"H{HEADS}-T{tokens}-D{SIZE}-causal"
            rows.append(_memory_row(shape, f"jx.jvp, {way}", peaks, "torch.func.jvp", "≤ 0.25"))
    names = ("no graph", "kept graph", "torch.func")
    plain = peak_of("plain", options)
    for name in names:
        peaks = [peak_of(name, options), plain]
        rows.append(
            _memory_row("DiT6x384-B2-T256", f"MeanFlow step, {name}", peaks, "plain step", "")
        )
    return rows


def _memory_row(shape: str, figure: str, peaks: list[float], baseline: str, target: str) -> Row:
    return Row.of(
        (QUESTION, shape, "float32"),
        *(f"peak memory: {figure}", Spread.of(peaks[:1])),
        baseline=baseline,
        baseline_p50=peaks[1],
        ratio=peaks[0] / peaks[1],
        unit="MiB",
        peak_mb=peaks[0],
        target=target,
    )


def peak_of(what: str, options: Options) -> float:
    """`peak_here` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.jvp", "--peak-of", what]
    command += ["--device", str(options.device), "--dtype", options.dtype_name]
    command += ["--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def peak_here(what: str, options: Options) -> float:
    """Peak MiB of one step in this process, beyond what a small one and the inputs occupy."""

    def make(tokens: int | None) -> Step:
        if "/" not in what:
            return training_step(what, options)
        kind, way, given = what.split("/")
        return attention_step(kind, way, tokens or int(given), options)

    if "/" in what:
        make(16)()  # what libraries load and allocate at first use
    else:
        attention_step("ours", "target", 16, options)()
    step = make(None)
    before = status_megabytes("VmRSS")
    peak = peak_megabytes(step, options.device)
    if peak is not None:
        return peak
    step()
    return status_megabytes("VmHWM") - before


def _arguments() -> argparse.ArgumentParser:
    assert __doc__ is not None
    found = parser(__doc__, [], [], repeats=7)
    found.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    found.add_argument("--memory-tokens", type=int, nargs="*", default=MEMORY_TOKENS)
    found.add_argument("--only", nargs="+", choices=("attention", "meanflow", "memory"))
    found.add_argument("--baseline", nargs="+", default=[], metavar="MODULE:FUNCTION")
    found.add_argument(
        "--processor-time", action="store_true", help="count the CPU's time; with --threads 1"
    )
    found.add_argument("--peak-of", help="KIND/WAY/TOKENS, or a training step: print its peak")
    return found


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    options = parse(_arguments(), argv)
    if options.extra.peak_of:
        print(peak_here(options.extra.peak_of, options))
        return []
    only = options.extra.only or ("attention", "meanflow", "memory")
    rows: list[Row] = []
    if "attention" in only:
        for tokens in [32] if options.quick else options.extra.tokens:
            rows += measure_attention(tokens, options)
    if "meanflow" in only:
        rows += measure_meanflow(options)
    if "memory" in only and not options.quick:
        rows += measure_memory(options)
    return finish(rows, "jvp", options)


if __name__ == "__main__":
    main(sys.argv[1:])
