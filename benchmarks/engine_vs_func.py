"""One 2-jet, forward and backward, against torch.func's jvp of jvp.

The same four streams of every layer (z, J u, J w, D²z[u, w]), and the parameter gradients of the
sum of squares of the last three.  Ours runs with sdpa attention; nested jvp needs eager attention,
since sdpa kernels have no forward mode.

For timing only: nested jvp is silently wrong through layer_norm (docs/how_it_works.md, traps), so
its values are never compared with ours here.  Dropout is off, whatever --dropout says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import jachess_ext as jx
from benchmarks.common.memory import peak_megabytes
from benchmarks.common.models import Shape, build_model, make_batch
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.timing import Step, interleaved

QUESTION = "engine-vs-func"
TARGET = "≥ 2"
Blocks = Callable[[Tensor], tuple[Tensor, ...]]


def blocks_of(model: nn.Module, mask: Tensor) -> Blocks:
    """Embeddings ``[B, T, d]`` to the K block outputs, each ``[B, T, d]``."""

    def blocks(x: Tensor) -> tuple[Tensor, ...]:
        output = model.base_model(  # type: ignore[operator]
            inputs_embeds=x, attention_mask=mask, output_hidden_states=True, use_cache=False
        )
        return tuple(output.hidden_states[1:])

    return blocks


def jet_step(model: nn.Module, blocks: Blocks, x: Tensor, directions: Tensor) -> Step:
    """One pass of `jx.jet` and its backward."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        jets = jx.jet(blocks, x, directions)
        torch.stack([jet.streams[1:].square().sum() for jet in jets]).sum().backward()

    return step


def nested_jvp_step(model: nn.Module, blocks: Blocks, x: Tensor, directions: Tensor) -> Step:
    """jvp of jvp along the same two directions, and its backward."""
    u, w = directions

    def inner(point: Tensor) -> Any:
        return torch.func.jvp(blocks, (point,), (u,))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        result: Any = torch.func.jvp(inner, (x,), (w,))
        (_, along_u), (along_w, second) = result
        streams = [*along_u, *along_w, *second]
        torch.stack([stream.square().sum() for stream in streams]).sum().backward()

    return step


def measure(shape: Shape, options: Options) -> list[Row]:
    """One row: how many times faster the jet is."""
    place = options.place | {"dropout": 0.0}
    ours, theirs = build_model(shape, **place), build_model(shape, attention="eager", **place)
    mask = make_batch(shape, labels=False, device=options.device)["attention_mask"]
    size = (3, shape.batch, shape.tokens, shape.width)
    x, *directions = torch.randn(size, device=options.device, dtype=options.dtype)
    pair = torch.stack(directions)
    steps = {
        "jet": jet_step(ours, blocks_of(ours, mask), x, pair),
        "func": nested_jvp_step(theirs, blocks_of(theirs, mask), x, pair),
    }
    times = interleaved(steps, repeats=options.repeats, device=options.device)
    row = Row.of(
        (QUESTION, shape.name, options.dtype_name),
        *("2-jet, forward + backward", times.milliseconds("jet")),
        baseline="torch.func jvp of jvp, eager",
        baseline_p50=times.milliseconds("func").p50,
        ratio=times.ratio("func", "jet"),
        peak_mb=peak_megabytes(steps["jet"], options.device),
        target=TARGET,
    )
    return [row]


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    shapes = ["encoder6-T32", "encoder6-T128", "llama6-T128"]
    options = parse(parser(__doc__, shapes, ["tiny"]), argv)
    rows = [row for shape in options.shapes for row in measure(shape, options)]
    return finish(rows, "engine_vs_func", options)


if __name__ == "__main__":
    main(sys.argv[1:])
