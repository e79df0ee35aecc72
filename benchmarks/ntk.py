"""The NTK of a real encoder by `jx.ntk` and by what one would do without it.

    python -m benchmarks.ntk --model FOLDER                # the encoder with a 2-class head
    python -m benchmarks.ntk --model FOLDER --jax PYTHON   # also neural-tangents
    python -m benchmarks.ntk --parts forms                 # rows go to results/ntk_forms.csv

rate, time, memory (results/ntk_methods.csv).  Interleaved in one process: `jx.ntk`, torch.func's
Jacobian contraction, per-sample gradients by vmap(grad), and the pieces of a kernel by torch.func's
NTK-vector products (a block of 2 × 2 samples, scaled by the number of pairs).  neural-tangents runs
in a Python of its own (``--jax``), on a JAX encoder of the same sizes.  Then the peak memory of
each, a process per method, and the rate of the contraction against that of matrix products.
Without ``--model`` the weights are random and of the same shapes: times and memory are the same.

forms: does the cost model pick the faster form of a linear layer's kernel?  Forms A
(`jachess::ntk_gram`) and B (`ops.ntk_materialised`) of one layer, symmetric, over a grid of
positions, features, outputs and samples.  A row each: the faster form's time, the other one's over
it, and what the model chose.  The last row is the time that the model's choices take over all
cases, against always the faster form; its note says for which weights of the bytes of form A and of
form B the choices would have been best.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import jachess_ext as jx
from jachess_ext import ops
from jachess_ext.ntk import contract as cost
from jachess_ext.ntk.api import Job
from jachess_ext.ntk.capture import capture

from .common import (
    Batch,
    Options,
    Row,
    Spread,
    Timings,
    compare_times,
    finish,
    held_megabytes,
    interleaved,
    load_classifier,
    make_row,
    measure_apart,
    parse,
    parser,
    peak_above,
)

OURS = "jx.ntk"
_AGREE = 1e-4  # float32, relative to the kernel's largest entry
_PAIRED = 2  # samples a side of the block that NTK-vector products are measured on


# Kernels as one would write them with torch.func ------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A kernel, or a block of its first samples: ``step`` gives [n, C, m, C].

    Attributes:
        scale: what the step's time is to be multiplied by for the whole kernel.
    """

    step: Callable[[], Tensor]
    scale: float = 1.0


def _parts(model: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """Return parameters, and a sample's logits [C] as a function of them and its ids.

    Attention is written out: the fused kernel has neither a batching rule for vmap, which then
    loops over samples, nor a forward mode.  No row is padded: there is no mask.
    """
    model = deepcopy(model)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach() for name, b in model.named_buffers()}

    def logits(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        inputs = {"input_ids": ids[None]}
        return functional_call(model, (parameters, buffers), (), inputs).logits[0]

    return parameters, logits


def jacobian_contraction(model: nn.Module, batch: Batch) -> Method:
    """Take every sample's Jacobian by vmap of jacrev, then products parameter by parameter."""
    parameters, logits = _parts(model)
    each = vmap(jacrev(logits), (None, 0))

    def step() -> Tensor:
        jacobians = each(parameters, batch["input_ids"])
        return _contracted([j.flatten(2) for j in jacobians.values()])

    return Method(step)


def per_sample_gradients(model: nn.Module, batch: Batch) -> Method:
    """Take vmap of grad, an output at a time; then products parameter by parameter."""
    parameters, logits = _parts(model)

    def step() -> Tensor:
        gradients: list[dict[str, Tensor]] = []
        for c in range(model.config.num_labels):  # type: ignore[union-attr, arg-type]
            output = grad(lambda parameters, ids, c=c: logits(parameters, ids)[c])
            gradients.append(vmap(output, (None, 0))(parameters, batch["input_ids"]))
        kernel: Any = 0
        for name in parameters:
            stacked = torch.stack([each.pop(name).flatten(1) for each in gradients], 1)
            kernel = kernel + _contracted([stacked])
        return kernel

    return Method(step)


def _contracted(jacobians: list[Tensor]) -> Tensor:
    """Return Σ over parameters of J Jᵀ, [N, C, N, C]; J [N, C, size]."""
    kernel: Any = 0
    for j in jacobians:
        flat = j.flatten(0, 1)
        kernel = kernel + flat @ flat.T
    count, outputs = jacobians[0].shape[:2]
    return kernel.view(count, outputs, count, outputs)


def ntk_vector_products(model: nn.Module, batch: Batch) -> Method:
    """Take J_n J_mᵀ e_c by a vjp and a jvp for every pair of the first samples and output."""
    parameters, logits = _parts(model)
    ids = batch["input_ids"]
    some = ids[:_PAIRED]
    basis = torch.eye(model.config.num_labels)  # type: ignore[union-attr, arg-type]

    def pair(ours: Tensor, theirs: Tensor) -> Tensor:
        _, pull = vjp(lambda parameters: logits(parameters, theirs), parameters)

        def column(vector: Tensor) -> Tensor:
            return jvp(lambda given: logits(given, ours), (parameters,), pull(vector))[1]

        return vmap(column, out_dims=1)(basis)

    def step() -> Tensor:
        with torch.no_grad():
            lines = [torch.stack([pair(n, m) for m in some], 1) for n in some]
        return torch.stack(lines)

    return Method(step, scale=(len(ids) / len(some)) ** 2)


METHODS: dict[str, Callable[[nn.Module, Batch], Method]] = {
    "jacobian": jacobian_contraction,
    "vmap-grad": per_sample_gradients,
    "ntk-vector": ntk_vector_products,
}
TARGETS = {"jacobian": "≥ 10", "vmap-grad": "≥ 5", "neural-tangents": "≥ 2.5"}


# Time, memory, rate -----------------------------------------------------------------------------


def _load(options: Options, samples: int, tokens: int) -> tuple[nn.Module, Batch]:
    path = options.extra.model
    return load_classifier(path, samples, tokens, options.device, small=options.quick)


def _row(
    options: Options, samples: int, tokens: int, spread: Spread, baseline_p50: float, **rest: Any
) -> Row:
    pretrained = options.extra.model is not None
    columns = {
        "question": "ntk",
        "shape": f"encoder6-N{samples}-T{tokens}",
        "baseline_p50": baseline_p50,
        "ratio": baseline_p50 / spread.p50,
        "note": "pretrained weights" if pretrained else "random weights of the same shapes",
    }
    return make_row(options, spread, **columns | rest)


def time_rows(options: Options, samples: int, tokens: int) -> list[Row]:
    """Measure how many times faster `jx.ntk` is than each method.

    Raises:
        RuntimeError: a method computes another kernel.
    """
    model, batch = _load(options, samples, tokens)
    methods = {name: METHODS[name](model, batch) for name in options.extra.methods}
    reference = jx.ntk(model, batch)
    for name, method in methods.items():
        kernel = method.step()
        part = reference[: kernel.shape[0], :, : kernel.shape[2]]
        difference = float((kernel - part).abs().max() / reference.abs().max())
        if not difference < _AGREE:
            raise RuntimeError(f"{name} disagrees with jx.ntk by {difference:.1e}")
    steps: dict[str, Callable[[], Tensor]] = {name: each.step for name, each in methods.items()}
    steps[OURS] = lambda: jx.ntk(model, batch, progress=False)
    times = interleaved(steps, repeats=options.rounds(5), device=options.device, warmup=1)
    baselines = {
        name: times.milliseconds(name).p50 * method.scale for name, method in methods.items()
    }
    if options.extra.jax is not None:
        seconds = _neural_tangents(options, samples, tokens)
        baselines["neural-tangents"] = 1e3 * Spread.of(seconds).p50
    return [
        _row(
            options,
            samples,
            tokens,
            times.milliseconds(OURS),
            median,
            figure=OURS,
            baseline=name,
            target=TARGETS.get(name, ""),
        )
        for name, median in baselines.items()
    ]


def _neural_tangents(options: Options, samples: int, tokens: int) -> list[float]:
    """Return seconds of rounds of neural-tangents' structured derivatives, after compilation."""
    script = Path(__file__).parent / "neural_tangents_encoder.py"
    command = [str(options.extra.jax), str(script), "--samples", str(samples)]
    command += ["--tokens", str(tokens), "--rounds", str(options.rounds(5))]
    command += ["--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"neural-tangents failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory_rows(options: Options, samples: int, tokens: int) -> list[Row]:
    """Measure the peak above what the model itself takes, a process per method."""
    names = [OURS, *(name for name in options.extra.methods if name != "ntk-vector")]
    given = ["--samples", str(samples), "--tokens", str(tokens)]
    given += ["--threads", str(torch.get_num_threads()), *(["--quick"] if options.quick else [])]
    given += ["--model", str(options.extra.model)] if options.extra.model else []
    peaks = {name: measure_apart("benchmarks.ntk", "--worker", name, *given) for name in names}
    return [
        _row(
            options,
            samples,
            tokens,
            Spread.of([peaks[OURS]]),
            peaks[name],
            figure="jx.ntk, peak",
            baseline=name,
            target="≥ 8" if name == "jacobian" else "",
            unit="MiB",
            peak_mb=peaks[OURS],
        )
        for name in names[1:]
    ]


def peak_here(method: str, options: Options, samples: int, tokens: int) -> float:
    """Return MiB above model and libraries; in a process that has run nothing else."""

    def step(model: nn.Module, batch: Batch) -> Any:
        if method == OURS:
            return jx.ntk(model, batch, progress=False)
        return METHODS[method](model, batch).step()

    model, batch = _load(options, samples, tokens)
    step(model, {name: value[:2, :4] for name, value in batch.items()})  # first use of libraries
    before = held_megabytes(options.device)
    return peak_above(before, lambda: step(model, batch), options.device)


def rate_rows(options: Options, samples: int, tokens: int) -> list[Row]:
    """Measure counted operations of the chosen forms per second, against those of large products.

    What is not a linear layer (embeddings, norms, biases) takes its time too and counts nothing.
    """
    model, batch = _load(options, samples, tokens)
    job = Job(model, batch, None)
    captured = capture(job._coverage, job._outputs, job._left, list(range(samples)))
    settings = job._settings
    operations = 0.0
    for choice in cost.plan(captured, (samples, samples), 2, True, settings):
        if choice.cost is not None:
            form = choice.cost
            operations += form.gram_flops if choice.form == "A" else form.materialise_flops

    def contraction() -> None:
        with torch.no_grad():
            for _ in cost.contract(captured, captured, True, settings):
                pass

    size = 2048
    a, b = torch.randn(2, size, size, device=options.device).unbind()
    steps = {"contraction": contraction, "gemm": lambda: a @ b}
    times = interleaved(steps, repeats=options.rounds(5), device=options.device, warmup=1)
    ours = Spread.of([operations / t / 1e9 for t in times.seconds["contraction"]])
    highest = Spread.of([2.0 * size**3 / t / 1e9 for t in times.seconds["gemm"]]).p50
    row = _row(
        options,
        samples,
        tokens,
        ours,
        highest,
        figure="contraction",
        baseline="GEMM",
        target="≥ 0.6",
        unit="GFLOP/s",
        ratio=ours.p50 / highest,
    )
    return [row]


# The two forms ----------------------------------------------------------------------------------

POSITIONS = (1, 8, 16, 24, 28, 32, 40, 48, 64)
FEATURES = ((384, 384), (384, 1152), (384, 1536), (768, 768))
OUTPUTS, SAMPLES = (1, 2), (8, 48)


@dataclass(frozen=True)
class Case:
    """A layer's sizes, and the seconds of both forms."""

    size: cost.Size
    seconds: dict[str, float]

    @property
    def name(self) -> str:
        s = self.size
        return f"N{s.samples}-T{s.positions}-C{s.outputs}-d{s.inputs}-e{s.cotangents}"

    @property
    def best(self) -> float:
        return min(self.seconds.values())

    @property
    def chosen(self) -> str:
        """The form that the model picks."""
        return cost.count_cost(self.size).form


def time_forms(size: cost.Size, options: Options) -> tuple[Case, Timings]:
    """Time both forms of one layer."""
    place = {"device": options.device, "dtype": options.dtype}
    inputs = torch.randn(size.samples, size.positions, size.inputs, **place)
    deltas = torch.randn(size.outputs, *inputs.shape[:2], size.cotangents, **place)
    times = interleaved(
        {
            "A": lambda: ops.ntk_gram(inputs, [deltas]),
            "B": lambda: ops.ntk_materialised(inputs, [deltas]),
        },
        repeats=options.rounds(3),
        device=options.device,
        warmup=1,
    )
    # A form's own time is its least: what others on the machine add is not the form's.
    return Case(size, {form: min(seconds) for form, seconds in times.seconds.items()}), times


def excess(cases: Sequence[Case], choose: Callable[[Case], str]) -> float:
    """Return the geometric mean over cases of the chosen form's time over the faster form's."""
    ratios = torch.tensor([case.seconds[choose(case)] / case.best for case in cases])
    return float(ratios.double().log().mean().exp())


def summary(cases: Sequence[Case], options: Options) -> Row:
    """Return the row of all cases."""
    right = sum(case.seconds[case.chosen] == case.best for case in cases)
    always = {form: excess(cases, lambda case, form=form: form) for form in ("A", "B")}
    note = (
        f"faster form picked in {right} of {len(cases)}; always A {always['A']:.2f}, always B "
        f"{always['B']:.2f}"
    )
    value = excess(cases, lambda case: case.chosen)
    return make_row(
        options,
        Spread(value, value, value),
        question="ntk-forms",
        shape="all",
        figure="chosen form",
        baseline="the faster form",
        baseline_p50=1.0,
        ratio=value,
        unit="x",
        note=note,
    )


def form_rows(options: Options) -> list[Row]:
    """Measure both forms over the grid."""
    grid = itertools.product(POSITIONS, FEATURES, OUTPUTS, SAMPLES)
    if options.quick:
        grid = itertools.product((1, 32), ((32, 32),), (2,), (4,))
    cases, rows = [], []
    for positions, (inputs, cotangents), outputs, samples in grid:
        size = cost.Size(
            samples=samples,
            positions=positions,
            other_samples=samples,
            other_positions=positions,
            outputs=outputs,
            inputs=inputs,
            cotangents=cotangents,
            is_symmetric=True,
            bytes_per_number=options.dtype.itemsize,
        )
        case, times = time_forms(size, options)
        cases.append(case)
        faster, slower = sorted(case.seconds, key=lambda form: case.seconds[form])
        row = compare_times(
            options,
            times,
            faster,
            slower,
            question="ntk-forms",
            shape=case.name,
            figure=f"form {faster}",
            baseline=f"form {slower}",
            target="≥ 1",
            note=f"chosen: {case.chosen}",
        )
        row.ratio = case.seconds[slower] / case.best
        rows.append(row)
    rows.append(summary(cases, options))
    print(rows[-1].note)
    return finish(rows, "ntk_forms", options)


PARTS = {"rate": rate_rows, "time": time_rows, "memory": memory_rows}


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print; as a worker, print one number."""
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, help="folder of the 6 × 384 encoder")
    arguments.add_argument("--jax", type=Path, help="a Python that has jax and neural-tangents")
    arguments.add_argument("--samples", type=int, nargs="+")
    arguments.add_argument("--tokens", type=int, nargs="+")
    arguments.add_argument("--methods", nargs="*", choices=tuple(METHODS), default=list(METHODS))
    arguments.add_argument("--parts", nargs="+", choices=(*PARTS, "forms"), default=list(PARTS))
    arguments.add_argument("--worker", choices=(OURS, *METHODS), help="used by the script itself")
    options = parse(arguments, argv)
    samples = options.extra.samples or ([3] if options.quick else [32, 64])
    tokens = options.extra.tokens or ([8] if options.quick else [32, 64])
    if options.extra.worker:
        print(peak_here(options.extra.worker, options, samples[0], tokens[0]))
        return []
    rows: list[Row] = []
    for n, t in itertools.product(samples, tokens):
        for part in options.extra.parts:  # written by part: a later one may run out of memory
            if part != "forms":
                rows += finish(PARTS[part](options, n, t), "ntk_methods", options)
    return rows + (form_rows(options) if "forms" in options.extra.parts else [])


if __name__ == "__main__":
    main(sys.argv[1:])
