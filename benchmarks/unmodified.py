"""What derivatives of unmodified programs cost, and how true they are, beside what is done instead.

    python -m benchmarks.unmodified                          # all parts, 15 minutes on two cores
    python -m benchmarks.unmodified --parts forces truth

    forces      a step on energy and forces of a transformer 3 x 256: `create_graph=True` on torch's
                math attention against the same within `jx.differentiable`, against
                `jx.gradient_loss`, and that one compiled
    hessian     a Hessian-vector product of a Llama 4 x 384 by two backwards: math attention against
                `jx.differentiable`
    attention-… attention alone, 4 heads of 64, by torch's own calls: `torch.func.jvp`; a MeanFlow
                step (jvp, then the value's backward); a backward through the tangent; jvp of grad;
                grad of grad: math attention against `jx.differentiable`
    meanflow    a MeanFlow step of diffusers' DiTTransformer2DModel, as it is: `jx.jvp`,
                torch.func.jvp on math attention and central differences against a plain step
    truth       the error of that step's du/dt against float64, relative, in float32 and in bfloat16
                autocast: `jx.jvp` and central differences of three widths
    nested      the squared Laplacian of an MLP 3-64-64-1 by two `torch.func.jacfwd` of
                `jx.laplacian`
                against four derivatives by torch.func

Time in ms of a step; memory in MiB above what is resident before it, in a process of its own.
Every part appends to results/unmodified.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx

from .common import (
    Options,
    Row,
    Spread,
    Step,
    compare_times,
    finish,
    held_megabytes,
    interleaved,
    make_row,
    measure_apart,
    parse,
    parser,
    peak_above,
)

Context = Callable[[], AbstractContextManager[object]]


def math_attention() -> AbstractContextManager[object]:
    return sdpa_kernel(SDPBackend.MATH)


def _backward(model: nn.Module, loss: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    loss.backward()


# Two backwards ----------------------------------------------------------------------------------


def forces(program: str, tokens: int, options: Options) -> Step:
    """Return a step on the mean square of −∂E/∂x − F."""
    torch.manual_seed(0)
    width, layers = (32, 1) if options.quick else (256, 3)
    layer = nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Linear(width, 1)).to(options.device, options.dtype)
    x, target = torch.randn(2, 1, tokens, width, device=options.device, dtype=options.dtype)

    def loss_of(value: Tensor, gradient: Tensor) -> Tensor:
        return (gradient + target).square().mean()

    def twice(context: Context) -> None:
        with context():
            leaf = x.clone().requires_grad_()
            value = model(leaf)
            (gradient,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
            _backward(model, loss_of(value, gradient))

    def loss(x: Tensor) -> Tensor:
        return jx.gradient_loss(model, x, loss_of).loss

    compiled = torch.compile(loss, fullgraph=True) if program == "gradient_loss, compiled" else loss
    if program == "math attention":
        return partial(twice, math_attention)
    if program == "differentiable":
        return partial(twice, jx.differentiable)
    return lambda: _backward(model, compiled(x))


def hessian(program: str, tokens: int, options: Options) -> Step:
    """Return a product of a language model's Hessian with a vector."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width, layers = (32, 1) if options.quick else (384, 4)
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64 or 1,
        max_position_embeddings=tokens,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(options.device, options.dtype)
    ids = torch.randint(4000, (1, tokens), device=options.device)
    parameters = list(model.parameters())
    vector = [torch.randn_like(p) for p in parameters]
    context = math_attention if program == "math attention" else jx.differentiable

    def step() -> None:
        with context():
            loss = model(ids, labels=ids, use_cache=False).loss
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            torch.autograd.grad(gradients, parameters, vector)

    return step


# Torch's own calls ------------------------------------------------------------------------------


def attention(order: str, program: str, tokens: int, options: Options) -> Step:
    """Return derivatives of attention alone, by torch's own calls."""
    torch.manual_seed(0)
    kind = {"device": options.device, "dtype": options.dtype}
    x, along = torch.randn(2, 3, 1, 4, tokens, 64, **kind).unbind(0)  # type: ignore[call-overload]
    points, directions = tuple(x), tuple(along)
    attend = torch.nn.functional.scaled_dot_product_attention
    context = math_attention if program == "math attention" else jx.differentiable
    slopes = torch.func.grad(lambda *x: attend(*x).square().sum(), (0, 1, 2))

    def squared(*x: Tensor) -> Tensor:
        return torch.stack([(a * b).sum() for a, b in zip(slopes(*x), along, strict=True)]).sum()

    def step() -> None:
        with context():
            if order == "jvp(grad)":
                torch.func.jvp(slopes, points, directions)
            elif order == "grad(grad)":
                torch.func.grad(squared, (0, 1, 2))(*points)
            elif order == "jvp":
                torch.func.jvp(attend, points, directions)
            else:
                leaves = tuple(y.clone().requires_grad_() for y in points)
                value, tangent = torch.func.jvp(attend, leaves, directions)
                through = tangent if order == "backward(jvp)" else (value - tangent).detach()
                (value * through).sum().backward()

    return step


# MeanFlow ---------------------------------------------------------------------------------------


class MeanFlow:
    """diffusers' DiT as it is, at points and times of a path, with the velocity along it."""

    def __init__(self, tokens: int, options: Options) -> None:
        from diffusers import DiTTransformer2DModel

        torch.manual_seed(0)
        side = 2 * int(tokens**0.5)
        heads, layers = (1, 1) if options.quick else (6, 6)
        self.model = DiTTransformer2DModel(
            num_attention_heads=heads, attention_head_dim=64, num_layers=layers, sample_size=side
        )
        for parameter in self.model.parameters():  # adaLN-Zero begins with zeros: nothing to see
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        self.model.to(options.device).eval()  # without its dropout of classes
        noise, data = torch.randn(2, 2, 4, side, side, device=options.device)
        self.t = torch.tensor([0.3, 0.8], device=options.device)
        self.x = torch.lerp(data, noise, self.t[:, None, None, None])
        self.velocity = noise - data
        self.classes = torch.tensor([1, 7], device=options.device)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return self.model(x, 1000 * t, self.classes, return_dict=False)[0]

    def slope(
        self, width: float | None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return u and du/dt along the path, by `jx.jvp` or by differences of a width."""
        x, t, v = self.x, self.t, self.velocity
        if width is None:
            return jx.jvp(self, (x, t), (v, torch.ones_like(t)), differentiable=False)
        with torch.no_grad():
            ahead, behind = self(x + width * v, t + width), self(x - width * v, t - width)
        return self(x, t), (ahead - behind) / (2 * width)


FASTGEN_WIDTH = 5e-3
"""Half of the step of central differences that NVIDIA's FastGen takes."""


def meanflow(program: str, tokens: int, options: Options) -> Step:
    """Return forward, loss and backward."""
    flow = MeanFlow(tokens, options)

    def loss() -> Tensor:
        if program == "plain":
            return (flow(flow.x, flow.t) - flow.velocity).square().mean()
        if program == "torch.func":
            tangents = flow.velocity, torch.ones_like(flow.t)
            with math_attention():
                output, slope = torch.func.jvp(flow, (flow.x, flow.t), tangents)
        else:
            output, slope = flow.slope(FASTGEN_WIDTH if program == "differences" else None)
        return (output - (flow.velocity - 0.5 * slope.detach())).square().mean()

    return lambda: _backward(flow.model, loss())


def truth(options: Options) -> Iterator[Row]:
    """Yield the relative errors of du/dt."""
    tokens = 16 if options.quick else 256
    flow = MeanFlow(tokens, options)
    flow.model.double()
    with math_attention():
        x, t, v = (y.double() for y in (flow.x, flow.t, flow.velocity))
        _, exact = torch.func.jvp(flow, (x, t), (v, torch.ones_like(t)))
    exact = exact.detach()
    flow.model.float()
    widths = {f"differences, step {2 * w:g}": w for w in (FASTGEN_WIDTH, 1e-3, 1e-4)}
    for name, width in {"jx.jvp": None, **widths}.items():
        for autocast in (False, True):
            device = options.device.type
            with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
                _, slope = flow.slope(width)
            error = float((slope.double() - exact).norm() / exact.norm())
            yield make_row(
                options,
                Spread.of([error]),
                question="truth",
                shape=f"DiT6x384-B2-T{tokens}",
                figure=f"du/dt, {name}",
                baseline="float64",
                baseline_p50=0.0,
                ratio=error,
                unit="relative error",
                note="bfloat16 autocast" if autocast else "float32",
            )


# Fourth derivatives -----------------------------------------------------------------------------


def nested(program: str, rows: int, options: Options) -> Step:
    """Return Δ²f of rows: the Laplacian of the Laplacian, as a Hessian by a shift of all rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    net.to(options.device, options.dtype)
    x = torch.randn(rows, 3, device=options.device, dtype=options.dtype)

    def laplacian(x: Tensor) -> Tensor:
        if program == "jx.laplacian":
            return jx.laplacian(net, x).laplacian.squeeze(-1)
        hessian = torch.func.vmap(torch.func.hessian(lambda row: net(row).sum()))
        return hessian(x).diagonal(dim1=-2, dim2=-1).sum(-1)

    def step() -> None:
        of_shift = torch.func.jacfwd(torch.func.jacfwd(lambda shift: laplacian(x + shift)))
        hessian = of_shift(x.new_zeros(3))  # forwards twice: there are as many rows as results
        hessian.diagonal(dim1=-2, dim2=-1).sum(-1)

    return step


# The command ------------------------------------------------------------------------------------

ORDERS = ("jvp", "meanflow", "backward(jvp)", "jvp(grad)", "grad(grad)")
PROGRAMS: dict[str, tuple[Callable[[str, int, Options], Step], dict[str, str], Sequence[int]]] = {
    **{
        f"attention-{order}": (
            partial(attention, order),
            {"differentiable": "math attention"},
            (512, 1024, 2048),
        )
        for order in ORDERS
    },
    "forces": (
        forces,
        {
            "differentiable": "math attention",
            "gradient_loss": "math attention",
            "gradient_loss, compiled": "math attention",
        },
        (512, 1024, 2048),
    ),
    "hessian": (hessian, {"differentiable": "math attention"}, (1024,)),
    "meanflow": (meanflow, dict.fromkeys(("jx.jvp", "torch.func", "differences"), "plain"), (256,)),
    "nested": (nested, {"jx.laplacian": "torch.func"}, (1000,)),
}
"""A part's steps, what each program is compared with, and the tokens or rows."""


def measure(part: str, size: int, options: Options) -> Iterator[Row]:
    """Yield a part's rows of time, and of memory."""
    make, baselines, _ = PROGRAMS[part]
    names = dict.fromkeys([*baselines, *baselines.values()])
    steps = {name: make(name, size, options) for name in names}
    times = interleaved(steps, repeats=options.rounds(5), device=options.device, warmup=1)
    shape = f"{part}-{size}"
    for figure, baseline in baselines.items():
        yield compare_times(
            options,
            times,
            figure,
            baseline,
            question=part,
            shape=shape,
            figure=figure,
            baseline=baseline,
        )
    if options.device.type == "cuda" or part == "nested":
        return
    peaks = {}
    for name in (name for name in names if "compiled" not in name):  # a compiler is large
        worker = ["--worker", part, name, str(size), "--dtype", options.dtype_name]
        worker += ["--threads", str(torch.get_num_threads()), *(["--quick"] * options.quick)]
        peaks[name] = measure_apart("benchmarks.unmodified", *worker)
    for figure, baseline in ((f, b) for f, b in baselines.items() if f in peaks):
        yield make_row(
            options,
            Spread.of([peaks[figure]]),
            question=f"{part}-memory",
            shape=shape,
            figure=figure,
            baseline=baseline,
            baseline_p50=peaks[baseline],
            ratio=peaks[figure] / (peaks[baseline] or float("nan")),
            unit="MiB",
        )


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure the parts, append to the CSV, print; as a worker, print one number."""
    assert __doc__ is not None
    arguments = parser(__doc__)
    parts = [*PROGRAMS, "truth"]
    arguments.add_argument("--parts", nargs="+", choices=parts, default=parts)
    arguments.add_argument("--worker", nargs=3, help="used by the script itself")
    options = parse(arguments, argv)
    if options.extra.worker:
        part, program, size = options.extra.worker
        make = PROGRAMS[part][0]
        make(program, 16, replace(options, quick=True))()  # what it loads is no part of it
        step = make(program, int(size), options)
        print(peak_above(held_megabytes(options.device), step, options.device))
        return []
    rows: list[Row] = []
    for part in options.extra.parts:
        if part == "truth":
            rows += finish(list(truth(options)), "unmodified", options)
            continue
        for size in (16,) if options.quick else PROGRAMS[part][2]:
            rows += finish(list(measure(part, size, options)), "unmodified", options)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
