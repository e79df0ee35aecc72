"""Where the time of a JacHess step goes: operators by self time, and their groups' shares.

    python -m benchmarks.profile_step --shapes encoder6-T128
    python -m benchmarks.profile_step --shapes encoder6-T128 --mode plain

Times are self times summed over the threads that record them; a profiler slows small operators,
so shares are approximate and no figure of the benchmark table comes from here.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.models import Shape, build_model, make_batch
from benchmarks.common.options import Options, parse, parser
from benchmarks.common.steps import penalty_step, plain_step, train_step
from benchmarks.common.timing import Step, synchronize

_GROUPS = (
    ("jachess operators", ("jachess::",)),
    ("matrix products", ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "mkl", "gemm")),
    ("sdpa", ("scaled_dot_product",)),
    ("copies and layout", ("copy_", "cat", "stack", "contiguous", "clone", "index", "slice_back")),
    ("fills", ("aten::fill_", "aten::zero_", "aten::empty", "aten::ones")),
    ("softmax and norms", ("softmax", "layer_norm", "rms_norm")),
    ("reductions", ("aten::sum", "aten::mean", "aten::amax", "aten::max")),
    ("pointwise", ("add", "mul", "sub", "div", "pow", "neg", "where", "masked", "sqrt", "exp")),
)


def group_of(name: str) -> str:
    """The group an operator or kernel counts under; views and bookkeeping are "other"."""
    lowered = name.lower()
    for group, parts in _GROUPS:
        if any(part in lowered for part in parts):
            return group
    return "other"


def profile_step(step: Step, options: Options, rows: int, by_shape: bool) -> None:
    """Run ``step`` under the profiler and print the operator table and the groups."""
    activities = [ProfilerActivity.CPU]
    cuda = options.device.type == "cuda"
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    for _ in range(2):
        step()
    with profile(activities=activities, record_shapes=by_shape) as recorded:
        for _ in range(options.repeats):
            step()
        synchronize(options.device)
    averages = recorded.key_averages(group_by_input_shape=by_shape)
    column = "self_device_time_total" if cuda else "self_cpu_time_total"
    print(averages.table(sort_by=column, row_limit=rows, max_name_column_width=48))
    _print_groups(averages, column, options.repeats)


def _print_groups(averages: list, column: str, repeats: int) -> None:
    totals: dict[str, float] = defaultdict(float)
    for event in averages:
        # On a GPU an operator's own device time is that of the kernels it launched, which are
        # listed as well: count the kernels only.
        if column == "self_device_time_total" and event.device_type.name == "CPU":
            continue
        totals[group_of(event.key)] += getattr(event, column)
    whole = sum(totals.values()) or 1.0
    print(f"{'group':22}{'ms per step':>12}{'share':>8}")
    for group, total in sorted(totals.items(), key=lambda item: -item[1]):
        print(f"{group:22}{total / 1e3 / repeats:12.2f}{100 * total / whole:7.1f}%")


def _step(shape: Shape, options: Options) -> Step:
    model = build_model(shape, device=options.device, dtype=options.dtype, dropout=options.dropout)
    batch = make_batch(shape, labels=True, device=options.device)
    kinds = {"plain": plain_step, "train": train_step, "unlab": penalty_step}
    return kinds[options.extra.mode](model, batch)


def main(argv: list[str] | None = None) -> None:
    """Profile every shape asked for."""
    assert __doc__ is not None
    arguments = parser(__doc__.splitlines()[0], ["encoder6-T32", "encoder6-T128"], ["tiny"])
    arguments.add_argument("--mode", default="unlab", choices=("unlab", "train", "plain"))
    arguments.add_argument("--rows", type=int, default=25, help="operators listed")
    arguments.add_argument("--by-shape", action="store_true", help="split operators by input shape")
    options = parse(arguments, argv)
    for shape in options.shapes:
        print(f"\n{shape.name}, {options.extra.mode}, torch {torch.__version__}")
        profile_step(_step(shape, options), options, options.extra.rows, options.extra.by_shape)


if __name__ == "__main__":
    main(sys.argv[1:])
