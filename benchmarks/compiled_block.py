"""Does ``torch.compile`` help? The 2-jet of one encoder block, forward and backward.

The same block, point and two directions, eager and compiled (Inductor, one graph); compilation is
in the warm-up.  The loss is the sum of squares of the tangents.  Dropout is off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import jachess_ext as jx
from benchmarks.common.memory import peak_megabytes
from benchmarks.common.models import Shape, build_model
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.timing import Step, interleaved

QUESTION = "compiled-block"


def first_block(shape: Shape, options: Options) -> nn.Module:
    """Block 1 of an encoder of this shape, in eval mode."""
    model = build_model(shape, **(options.place | {"dropout": 0.0}))
    block: nn.Module = model.base_model.encoder.layer[0]  # type: ignore
    return block.eval()


def jet_step(block: nn.Module, penalty: Callable[..., Tensor], *tensors: Tensor) -> Step:
    """``penalty(*tensors)`` and its gradients in the block's parameters."""

    def step() -> None:
        block.zero_grad(set_to_none=True)
        penalty(*tensors).backward()

    return step


def measure(shape: Shape, options: Options, backend: str) -> list[Row]:
    """One row: the compiled jet against the eager one; below 1, compiling helps."""
    block = first_block(shape, options)
    size = (3, shape.batch, shape.tokens, shape.width)
    x, *directions = torch.randn(size, device=options.device, dtype=options.dtype)

    def penalty(x: Tensor, directions: Tensor) -> Tensor:
        jet = jx.jet(block, x, directions)
        return jet.streams[1:].square().sum()

    compiled = torch.compile(penalty, fullgraph=True, backend=backend)
    tensors = (x, torch.stack(directions))
    steps = {
        "compiled": jet_step(block, compiled, *tensors),
        "eager": jet_step(block, penalty, *tensors),
    }
    times = interleaved(steps, repeats=options.repeats, device=options.device)
    row = Row.of(
        (QUESTION, shape.name, options.dtype_name),
        *("2-jet of a block, compiled", times.milliseconds("compiled")),
        baseline="the same, eager",
        baseline_p50=times.milliseconds("eager").p50,
        ratio=times.ratio("compiled", "eager"),
        peak_mb=peak_megabytes(steps["compiled"], options.device),
        note=f"backend {backend}",
    )
    return [row]


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    arguments = parser(__doc__, ["encoder6-T32", "encoder6-T128", "encoder12-T128"], ["tiny"], 15)
    arguments.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parse(arguments, argv)
    if any(shape.family != "bert" for shape in options.shapes):
        arguments.error("--shapes: expected encoder shapes, whose blocks take x alone")
    rows = [row for s in options.shapes for row in measure(s, options, options.extra.backend)]
    return finish(rows, "compiled_block", options)


if __name__ == "__main__":
    main(sys.argv[1:])
