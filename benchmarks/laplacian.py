"""Laplacians of networks in their inputs: `jx.laplacian` against the other ways there are.

    python -m benchmarks.laplacian                  # rows go to results/laplacian.csv
    python -m benchmarks.laplacian --folx PYTHON    # also folx, by a Python that has jax and folx

The ways, timed in turn, each five times in a row, as in a loop that trains: double backward, a
coordinate at a time; `torch.func.hessian` under vmap; the collapsed form (D + 2 streams) written by
hand in plain torch; `jx.laplacian` within `torch.compile`; folx, jitted, in a process of its own on
the same core.  The networks: an MLP of four layers of 128 with tanh, and the transformer of
examples/laplacian.py, whose attention runs in its plain form in all ways but ours.  "heat" is that
MLP in time and space, in float64, for the residual ∂f/∂t − Δf of a physics-informed network: D − 1
second derivatives of D coordinates, by `jx.laplacian` with a weight of 0, also within
`torch.compile`, and by double backward.  "pinn32" and "pinn64" are the same for four layers of 50
in float32 and float64, "wave32" and "wave64" the residual ∂²f/∂t² − ∂²f/∂x² of these.

float64 beside float32 (`--cases` with the names of `FUNCTIONS`): the jet of two directions and the
sum of their second derivatives, 2,000 x 64 (attention: 10 heads of 200 tokens), through a function,
forward and with its gradient.

Figures: the value, without a graph; a training step, which is the gradient of the Laplacian's mean
square in the parameters; and the most memory that torch's allocator held in each.  Ratios are ours
over theirs, against folx also of the compiled form.  Before anything is timed, every way has to
agree with double backward in float64, and in the dtype that is timed.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from examples.laplacian import HEADS, Network
from jachess_ext.jet.engine.layout import make_layout
from jachess_ext.jet.engine.tensor import JetTensor
from jachess_ext.lab.demo import peak_mebibytes

from .common import (
    Options,
    Row,
    Spread,
    Step,
    compare_times,
    finish,
    interleaved,
    make_row,
    parse,
    parser,
    peak_megabytes,
)

OURS, COMPILED, WIDTH, LAYERS = "jx.laplacian", "jx.laplacian, compiled", 128, 4
FIGURES = ("value", "training step")


class Heat(nn.Sequential):
    """An MLP in time and space; the ways return the residual of the heat equation, ∂f/∂t − Δf."""

    weights = (0.0, 1.0)  # of the second derivatives in time, and in each coordinate of space


class Wave(Heat):
    """An MLP; the ways return the residual of the wave equation, ∂²f/∂t² − Δf."""

    weights = (1.0, -1.0)


class Case(NamedTuple):
    """A network, D coordinates of its inputs, N points."""

    network: str
    coordinates: int
    points: int

    @property
    def name(self) -> str:
        return f"{self.network}-D{self.coordinates}-N{self.points}"

    def make(self) -> tuple[nn.Module, Tensor]:
        """Return the network, from ``[N, D]`` to ``[N]``, and points, from seed 0: float64 for
        "heat" and "pinn64", otherwise float32."""
        torch.manual_seed(0)
        x = torch.randn(self.points, self.coordinates)
        if self.network == "transformer":
            return Network(self.coordinates), x
        width = 50 if self.network.startswith(("pinn", "wave")) else WIDTH
        sizes = (self.coordinates, *[width] * LAYERS)
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        hidden = [part for layer in layers for part in (layer, nn.Tanh())]
        parts = (*hidden, nn.Linear(width, 1), nn.Flatten(0))
        if self.network == "mlp":
            return nn.Sequential(*parts), x
        dtype = torch.float32 if self.network.endswith("32") else torch.float64
        equation = Wave if self.network.startswith("wave") else Heat
        return equation(*parts).to(dtype), x.to(dtype)


CASES = {
    case.name: case
    for case in (
        *(Case("mlp", *sizes) for sizes in ((2, 1024), (10, 256), (50, 64), (100, 64))),
        *(Case("transformer", *sizes) for sizes in ((8, 8), (8, 32), (32, 32))),
        *(Case("heat", *sizes) for sizes in ((2, 256), (2, 1024), (2, 4096), (4, 1024), (10, 256))),
        *(
            Case(f"{network}{bits}", 2, n)
            for network in ("pinn", "wave")
            for bits in (32, 64)
            for n in (256, 500, 1000, 4000)
        ),
        *(Case(network, 3, 4) for network in ("mlp", "transformer", "heat")),
    )
}
QUICK = ["mlp-D3-N4", "transformer-D3-N4", "heat-D3-N4"]
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "exp": torch.exp,
    "softplus": F.softplus,
    "elu": F.elu,
    "mish": F.mish,
    "softmax": partial(F.softmax, dim=-1),
    "layer_norm": partial(F.layer_norm, normalized_shape=(64,)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}
_IN_A_ROW = 5  # a single run finds the data of the other ways in the caches


# The ways ---------------------------------------------------------------------------------------


def by_jx(model: nn.Module, x: Tensor) -> Tensor:
    """Return the Laplacian at each point, ``[N]``, as all ways do."""
    if isinstance(model, Heat):
        in_time, in_space = model.weights
        weights = [in_time] + [in_space] * (x.shape[1] - 1)
        _, slope, laplacian = jx.laplacian(model, x, weights=weights)
        return laplacian if in_time else slope[0] - laplacian
    return jx.laplacian(model, x)[2]


@cache
def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: by_jx(model, x), fullgraph=True)


def by_compiled(model: nn.Module, x: Tensor) -> Tensor:
    """Run a graph made once for each network."""
    return _compiled(model)(x)


def by_double_backward(model: nn.Module, x: Tensor) -> Tensor:
    """Differentiate the gradient once for each coordinate."""
    train = torch.is_grad_enabled()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        second = [
            torch.autograd.grad(entry, x, retain_graph=True, create_graph=train)[0][:, i]
            for i, entry in enumerate(gradient.sum(0).unbind())
            if i or not isinstance(model, Heat) or model.weights[0]
        ]
    if isinstance(model, Wave):
        return second[0] - torch.stack(second[1:]).sum(0)
    laplacian = torch.stack(second).sum(0)
    return gradient[:, 0] - laplacian if isinstance(model, Heat) else laplacian


def by_func_hessian(model: nn.Module, x: Tensor) -> Tensor:
    """Take the trace of each point's whole Hessian, forward over reverse."""

    def f(point: Tensor) -> Tensor:
        return model(point.unsqueeze(0)).squeeze(0)

    with sdpa_kernel(SDPBackend.MATH):
        hessians = torch.func.vmap(torch.func.hessian(f))(x)
    return hessians.diagonal(dim1=1, dim2=2).sum(-1)


class Streams(NamedTuple):
    """The collapsed form by hand: value ``[N, ...]``, derivatives along each coordinate
    ``[D, N, ...]`` (or ``[D, 1, ...]``), and the Laplacian ``[N, ...]``."""

    value: Tensor
    first: Tensor
    laplacian: Tensor

    def each(self, linear: Callable[[Tensor], Tensor]) -> Streams:
        """Apply a linear function, which counts its axes from the last."""
        return Streams(*map(linear, self))

    def plus(self, other: Streams) -> Streams:
        return Streams(*(mine + its for mine, its in zip(self, other, strict=True)))


def _linear(layer: nn.Module, x: Streams) -> Streams:
    weight = layer.weight
    value = F.linear(x.value, weight, layer.bias)
    return Streams(value, F.linear(x.first, weight), F.linear(x.laplacian, weight))


def _tanh(x: Streams) -> Streams:
    y = x.value.tanh()
    slope = 1 - y.square()
    bent = x.laplacian - 2 * y * x.first.square().sum(0)
    return Streams(y, slope * x.first, slope * bent)


def _product(a: Streams, b: Streams) -> Streams:
    crossed = torch.einsum("dnhtc,dnhcs->nhts", a.first, b.first)
    return Streams(
        a.value @ b.value,
        a.first @ b.value + a.value @ b.first,
        a.laplacian @ b.value + a.value @ b.laplacian + 2 * crossed,
    )


def _softmax(x: Streams) -> Streams:
    p = x.value.softmax(-1)
    logs = x.first - (p * x.first).sum(-1, keepdim=True)  # derivatives of log p
    bent = x.laplacian + logs.square().sum(0)
    return Streams(p, p * logs, p * (bent - (p * bent).sum(-1, keepdim=True)))


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """Carry D + 2 streams through formulas written for these networks alone."""
    units = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    h = Streams(x, units.unsqueeze(1), torch.zeros_like(x))
    if isinstance(model, nn.Sequential):
        for layer in model[:-1]:
            h = _tanh(h) if isinstance(layer, nn.Tanh) else _linear(layer, h)
        return h.laplacian.squeeze(-1)
    h = _linear(model.enter, h.each(lambda t: t.unsqueeze(-1)))
    h = h._replace(value=h.value + model.place)
    for project, mix in zip(model.projections, model.mixers, strict=True):
        heads = _linear(project, h).each(
            lambda t: t.unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        )
        q, k, v = (Streams(*parts) for parts in zip(*heads, strict=True))
        keys = k.each(lambda t: t.mT / t.shape[-1] ** 0.5)
        mixed = _product(_softmax(_product(q, keys)), v)
        mixed = mixed.each(lambda t: t.transpose(-2, -3).flatten(-2))
        h = h.plus(_tanh(_linear(mix, mixed)))
    return _linear(model.leave, h).laplacian.mean((-2, -1))


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    OURS: by_jx,
    COMPILED: by_compiled,
    "double backward": by_double_backward,
    "torch.func.hessian": by_func_hessian,
    "collapsed by hand": by_hand,
}


def ways_of(model: nn.Module, wanted: Sequence[str] | None = None) -> list[str]:
    """Return which ways a network is timed in, ours among them: all, or of those ``wanted``."""
    ways = [OURS, COMPILED, "double backward"] if isinstance(model, Heat) else list(WAYS)
    return [way for way in ways if way == OURS or wanted is None or way in wanted]


def value(way: str, model: nn.Module, x: Tensor) -> Tensor:
    """Return the Laplacian without a graph."""
    with torch.no_grad():
        return WAYS[way](model, x)


def training_step(way: str, model: nn.Module, x: Tensor) -> Tensor:
    """Return the gradient of the Laplacian's mean square in all parameters, end to end."""
    loss = WAYS[way](model, x).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


# folx -------------------------------------------------------------------------------------------


class Folx:
    """folx in a process of its own, which holds the network and times itself.

    Attributes:
        seconds: of every run asked for, by figure.
        found: its values and its gradient, end to end in the order of the parameters.
    """

    def __init__(self, python: Path, model: nn.Module, x: Tensor, folder: Path) -> None:
        self.seconds: dict[str, list[float]] = {figure: [] for figure in FIGURES}
        parameters = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
        np.savez(folder / "network.npz", x_=x.cpu().numpy(), **parameters)
        script = Path(__file__).with_name("laplacian_folx.py")
        command = [str(python), str(script), str(folder), str(HEADS)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()
        results = np.load(folder / "results.npz")
        self.found = {
            "value": torch.from_numpy(results["value_"]),
            "training step": torch.cat(
                [torch.from_numpy(results[name]).flatten() for name in parameters]
            ),
        }

    def run(self, figure: str) -> None:
        """Run once, and keep the seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{figure}\n")
        self._process.stdin.flush()
        self.seconds[figure].append(float(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("folx failed; its own words are above")
        return line

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextmanager
def folx(python: Path | None, model: nn.Module, x: Tensor) -> Iterator[Folx | None]:
    """Start folx, where a Python for it was given, and end it."""
    if python is None:
        yield None
        return
    with TemporaryDirectory() as folder:
        process = Folx(python, model, x, Path(folder))
        try:
            yield process
        finally:
            process.close()


# Checks, times, memory --------------------------------------------------------------------------


def check(
    model: nn.Module, x: Tensor, other: Folx | None, wanted: Sequence[str] | None = None
) -> None:
    """Hold every way, or those ``wanted``, against double backward in float64.

    Raises:
        RuntimeError: relative errors in L2 above the square root of the dtype's rounding.
    """
    torch._dynamo.reset()  # graphs of other networks, of which there is a limit
    exact = copy.deepcopy(model).double(), x.double()
    for figure, run in zip(FIGURES, (value, training_step), strict=True):
        expected = run("double backward", *exact)
        ways = ways_of(model, wanted)
        found = {(way, torch.float64): run(way, *exact) for way in ways}
        found |= {(way, x.dtype): run(way, model, x) for way in ways}
        if other is not None:
            found["folx", torch.float32] = other.found[figure].to(x.device)
        for (way, dtype), result in found.items():
            error = float((result.double() - expected).norm() / expected.norm())
            if not error < torch.finfo(dtype).eps ** 0.5:
                raise RuntimeError(f"{way}, {figure}: off by {error:.1e} in {dtype}")


def measure(case: Case, options: Options) -> list[Row]:
    """Return a case's rows: times and memory of both figures against each way."""
    model, x = case.make()
    options = replace(options, dtype=x.dtype) if isinstance(model, Heat) else options
    model, x = model.to(options.device, options.dtype), x.to(options.device, options.dtype)
    frozen = copy.deepcopy(model).requires_grad_(False)
    rows = []
    with folx(None if isinstance(model, Heat) else options.extra.folx, model, x) as other:
        check(model, x, other, options.extra.ways)
        for figure in FIGURES:
            steps: dict[str, Step] = {
                way: partial(value, way, frozen, x)
                if figure == "value"
                else partial(training_step, way, model, x)
                for way in ways_of(model, options.extra.ways)
            }
            runs = steps if other is None else steps | {"folx": partial(other.run, figure)}
            times = interleaved(
                runs, repeats=options.rounds(), device=options.device, in_a_row=_IN_A_ROW
            )
            if other is not None:  # less what the two processes say to each other
                counted = np.array(other.seconds[figure][-options.rounds() * _IN_A_ROW :])
                times.seconds["folx"] = counted.reshape(-1, _IN_A_ROW).mean(1).tolist()
            peaks = {way: _peak(step, options.device) for way, step in steps.items()}
            for way in runs:
                if way == OURS:
                    continue
                named: dict[str, Any] = {"question": "laplacian", "shape": case.name}
                named |= {"baseline": way, "target": _target(case, figure, way)}
                rows.append(compare_times(options, times, OURS, way, figure=figure, **named))
                is_compared = way == "folx" or (
                    way == "double backward" and isinstance(model, Heat)
                )
                if is_compared and COMPILED in runs:
                    own = {**named, "figure": f"{figure}, compiled"}
                    rows.append(compare_times(options, times, COMPILED, way, **own))
                if way in peaks:
                    named["target"] = _target(case, "peak", way)
                    rows.append(
                        make_row(
                            options,
                            Spread.of([peaks[OURS]]),
                            figure=f"peak, {figure}",
                            baseline_p50=peaks[way],
                            ratio=peaks[OURS] / peaks[way],
                            unit="MiB",
                            peak_mb=peaks[OURS],
                            **named,
                        )
                    )
    return rows


def measure_function(name: str, options: Options) -> list[Row]:
    """Return the rows of a function: float64 over float32, forward and with its gradient."""
    heads = 2 if options.quick else 10
    layout = make_layout(2, 2, "sum")

    def streams(x: Tensor) -> Tensor:
        return cast(JetTensor, FUNCTIONS[name](JetTensor(x, layout.begin()))).streams

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            return streams(x)

    def step(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(streams(x), x, torch.ones_like(x))[0]

    torch.manual_seed(0)
    x = torch.randn(layout.streams, heads, 200, 64, dtype=torch.float64, device=options.device)
    rows = []
    for figure, run in (("forward", forward), ("forward and gradient", step)):
        steps = {str(dtype): partial(run, x.to(dtype)) for dtype in (torch.float64, torch.float32)}
        times = interleaved(
            steps, repeats=options.rounds(), device=options.device, in_a_row=_IN_A_ROW
        )
        named = {"question": "laplacian", "shape": name, "figure": figure, "target": "≤ 2.3"}
        ours, theirs = steps
        rows.append(
            compare_times(
                replace(options, dtype=torch.float64),
                times,
                ours,
                theirs,
                baseline="float32",
                **named,
            )
        )
    return rows


def _peak(step: Step, device: torch.device) -> float:
    peak = peak_megabytes(step, device)
    return peak_mebibytes(step) if peak is None else peak


def _target(case: Case, figure: str, way: str) -> str:
    if case.network == "heat":  # none was set before
        return ""
    if case.network.startswith(("pinn", "wave")):
        return "≤ 1" if figure == "training step" else ""
    many = case.coordinates >= 10
    if way == "double backward":
        few_many = {"value": (1 / 1.2, 1 / 3), "training step": (1 / 1.2, 1 / 2), "peak": (1, 0.5)}
        return f"≤ {few_many[figure][many]:.2g}"
    if figure == "peak":
        return ""
    return {"collapsed by hand": "≤ 1", "folx": "≤ 1.2"}.get(way, "")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, append each case's rows to the CSV, print them."""
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.set_defaults(threads=1)
    names = [*CASES, *FUNCTIONS]
    arguments.add_argument("--cases", nargs="+", choices=names, help="default: all but tiny ones")
    arguments.add_argument("--ways", nargs="+", choices=WAYS, help="beside ours; default: all")
    arguments.add_argument("--folx", type=Path, help="a Python that has jax and folx")
    options = parse(arguments, argv)
    if options.extra.folx is not None:
        if options.dtype != torch.float32 or options.device.type != "cpu":
            arguments.error("--folx: it runs in float32 on the CPU; leave --dtype and --device out")
        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        os.sched_setaffinity(0, cores)  # of both processes: the same cores
    wanted = [name for name in names if name not in QUICK]
    rows = []
    for name in options.extra.cases or (QUICK if options.quick else wanted):
        measured = (
            measure_function(name, options) if name in FUNCTIONS else measure(CASES[name], options)
        )
        rows += finish(measured, "laplacian", options)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
