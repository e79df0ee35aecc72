"""The NTK of a real encoder: `jx.ntk` against what one would do without it.

    python -m benchmarks.ntk_methods --model FOLDER                # the encoder with a 2-class head
    python -m benchmarks.ntk_methods --model FOLDER --jax PYTHON   # also neural-tangents

Interleaved in one process: `jx.ntk`, torch.func's Jacobian contraction,
per-sample gradients by vmap(grad), and the pieces of a kernel by torch.func's NTK-vector products
(a block of 2 × 2 samples, scaled by the number of pairs).  neural-tangents runs in a Python of its
own (``--jax``), on a JAX encoder of the same sizes.  Then the peak memory of each, a process per
method, and the rate of the contraction against that of matrix products.

Without ``--model`` the weights are random and of the same shapes: times and memory are the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jachess_ext as jx
from benchmarks.common.memory import held_megabytes, measure_apart, peak_above
from benchmarks.common.ntk_baselines import METHODS
from benchmarks.common.ntk_rate import contraction_rate, gemm_rate
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.pretrained import load_classifier
from benchmarks.common.report import Row
from benchmarks.common.timing import Spread, interleaved

QUESTION = "ntk"
OURS = "jx.ntk"
TARGETS = {"jacobian": "≥ 10", "vmap-grad": "≥ 5", "neural-tangents": "≥ 2.5"}
_MEMORY_TARGET = "≥ 8"
_RATE_TARGET = "≥ 0.6"
_AGREE = 1e-4  # float32, relative to the kernel's largest entry


def _name(samples: int, tokens: int) -> str:
    return f"encoder6-N{samples}-T{tokens}"


def _load(options: Options, samples: int, tokens: int) -> tuple[nn.Module, dict[str, Any]]:
    found = options.extra.model
    return load_classifier(found, samples, tokens, options.device, small=options.quick)


# ---- time --------------------------------------------------------------------------------------


def time_rows(options: Options, samples: int, tokens: int) -> list[Row]:
    """A row per method that is compared, `jx.ntk`'s speed-up over it as the ratio."""
    model, batch = _load(options, samples, tokens)
    methods = {
        name: make(model, batch) for name, make in METHODS.items() if name in _wanted(options)
    }
    reference = jx.ntk(model, batch)
    _require_agreement(methods, reference)
    steps = {name: method.step for name, method in methods.items()}
    steps[OURS] = lambda: jx.ntk(model, batch, progress=False)
    times = interleaved(steps, repeats=options.repeats, device=options.device, warmup=1)
    found = {
        name: [seconds * getattr(methods.get(name), "scale", 1.0) for seconds in values]
        for name, values in times.seconds.items()
    }
    if options.extra.jax is not None:
        found["neural-tangents"] = _neural_tangents(options, samples, tokens)
    ours = Spread.of([1e3 * value for value in found[OURS]])
    rows = []
    for name, values in found.items():
        if name == OURS:
            continue
        baseline = Spread.of([1e3 * value for value in values]).p50
        rows.append(
            _row(options, samples, tokens, OURS, ours, name, baseline, TARGETS.get(name, ""))
        )
    return rows


def _wanted(options: Options) -> list[str]:
    return options.extra.methods


def _row(
    options: Options,
    samples: int,
    tokens: int,
    figure: str,
    spread: Spread,
    name: str,
    baseline: float,
    target: str,
) -> Row:
    return Row.of(
        (QUESTION, _name(samples, tokens), options.dtype_name),
        figure,
        spread,
        baseline=name,
        baseline_p50=baseline,
        ratio=baseline / spread.p50,
        target=target,
        note=_note(options),
    )


def _note(options: Options) -> str:
    return "pretrained weights" if options.extra.model else "random weights of the same shapes"


def _require_agreement(methods: dict[str, Any], reference: torch.Tensor) -> None:
    """Every method computes the same kernel, or its part of it."""
    for name, method in methods.items():
        found = method.step()
        rows, columns = found.shape[0], found.shape[2]
        part = reference[:rows, :, :columns]
        difference = float((found - part).abs().max() / reference.abs().max())
        if not difference < _AGREE:
            raise RuntimeError(f"{name} disagrees with jx.ntk by {difference:.1e}")


def _neural_tangents(options: Options, samples: int, tokens: int) -> list[float]:
    """Seconds of rounds of neural-tangents' structured derivatives, after compilation."""
    script = Path(__file__).parent / "common" / "neural_tangents_encoder.py"
    command = [
        *(str(options.extra.jax), str(script), "--samples", str(samples), "--tokens", str(tokens)),
        *("--rounds", str(options.repeats), "--threads", str(torch.get_num_threads())),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"neural-tangents failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- memory ------------------------------------------------------------------------------------


def memory_rows(options: Options, samples: int, tokens: int) -> list[Row]:
    """Peak above what the model itself takes, a process per method."""
    names = [OURS, *(name for name in _wanted(options) if name != "ntk-vector")]
    peaks = {name: _peak_apart(name, options, samples, tokens) for name in names}
    ours = Spread.of([peaks[OURS]])
    rows = []
    for name in names[1:]:
        target = _MEMORY_TARGET if name == "jacobian" else ""
        row = _row(options, samples, tokens, "jx.ntk, peak", ours, name, peaks[name], target)
        row.unit, row.peak_mb = "MiB", peaks[OURS]
        rows.append(row)
    return rows


def _peak_apart(method: str, options: Options, samples: int, tokens: int) -> float:
    model = ["--model", str(options.extra.model)] if options.extra.model else []
    return measure_apart(
        *("benchmarks.ntk_methods", "--worker", method, "--samples", str(samples)),
        *("--tokens", str(tokens), "--threads", str(torch.get_num_threads())),
        *(model + (["--quick"] if options.quick else [])),
    )


def peak_here(method: str, options: Options, samples: int, tokens: int) -> float:
    """MiB above the model and the libraries' own; in a process that has run nothing else."""

    def step(model: nn.Module, batch: dict[str, Any]) -> Any:
        if method == OURS:
            return jx.ntk(model, batch, progress=False)
        return METHODS[method](model, batch).step()

    model, batch = _load(options, samples, tokens)
    step(model, {name: value[:2, :4] for name, value in batch.items()})  # first use of libraries
    before = held_megabytes(options.device)
    return peak_above(before, lambda: step(model, batch), options.device)


# ---- rate --------------------------------------------------------------------------------------


def rate_rows(options: Options, samples: int, tokens: int) -> list[Row]:
    """Counted operations of the chosen forms per second, against those of large products."""
    model, batch = _load(options, samples, tokens)
    contraction = contraction_rate(model, batch)
    gemm = gemm_rate(options.device)
    steps = {"contraction": contraction.step, "gemm": gemm.step}
    times = interleaved(steps, repeats=options.repeats, device=options.device, warmup=1)
    rates = [contraction.operations / t / 1e9 for t in times.seconds["contraction"]]
    highest = Spread.of([gemm.operations / t / 1e9 for t in times.seconds["gemm"]]).p50
    ours = Spread.of(rates)
    row = _row(options, samples, tokens, "contraction", ours, "GEMM", highest, _RATE_TARGET)
    row.unit, row.ratio = "GFLOP/s", ours.p50 / highest
    return [row]


PARTS = {"rate": rate_rows, "time": time_rows, "memory": memory_rows}


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print; as a worker, print one number."""
    assert __doc__ is not None
    arguments = parser(__doc__, [], [], repeats=5)
    arguments.add_argument("--model", type=Path, help="folder of the 6 × 384 encoder")
    arguments.add_argument("--jax", type=Path, help="a Python that has jax and neural-tangents")
    arguments.add_argument("--samples", type=int, nargs="+")
    arguments.add_argument("--tokens", type=int, nargs="+")
    arguments.add_argument("--methods", nargs="*", choices=tuple(METHODS), default=list(METHODS))
    arguments.add_argument("--parts", nargs="+", choices=tuple(PARTS))
    arguments.add_argument("--worker", choices=(OURS, *METHODS), help="used by the script itself")
    options = parse(arguments, argv)
    quick = options.quick
    samples = options.extra.samples or ([3] if quick else [32, 64])
    tokens = options.extra.tokens or ([8] if quick else [32, 64])
    if options.extra.worker:
        print(peak_here(options.extra.worker, options, samples[0], tokens[0]))
        return []
    parts = options.extra.parts or list(PARTS)
    if not options.extra.model:
        print("no --model: random weights of the same shapes")
    rows: list[Row] = []
    for n, t in product(samples, tokens):
        for part in parts:  # written one by one: a later one may run out of memory
            rows += finish(PARTS[part](options, n, t), "ntk_methods", options)
    if options.extra.rows_to is not None:
        options.extra.rows_to.write_text(json.dumps([asdict(row) for row in rows]))
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
