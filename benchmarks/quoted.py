"""One source for the figures that README and docs quote, and for the pages of results.

    python -m benchmarks.quoted [--update]

A document marks a table with ``<!-- quoted: NAME -->`` and ``<!-- /quoted -->``; between the two
stands what the function of that name here makes of the results.  A page of benchmarks/results
(`PAGES`) is made of the csv or jsonl beside it.  Without --update: documents and pages that
differ, and exit status 1 where there are any (tests ask the same).  --update also draws the
README's figure anew.
"""

from __future__ import annotations

import argparse
import ast
import csv
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from types import CodeType
from typing import Any

import pandas as pd

from jachess_ext.lab.workbench.page import COLOURS, MARKERS, panels

from . import finetune_quality, live_selection, models, selection, word_attack
from .bench_micro import WAYS
from .common import RESULTS, ROOT, git
from .derivatives import MASKS, MATH, WRITTEN_OUT

DOCUMENTS = (
    "README.md",
    "docs/measured.md",
    "docs/compile.md",
    "docs/derivatives.md",
    "docs/limits.md",
    "docs/ntk.md",
    "docs/scaling.md",
    "docs/scaling_record.md",
    "docs/refused.md",
    "docs/tutorials/gradient_penalties.md",
    "docs/tutorials/laplacian.md",
    "docs/tutorials/meanflow.md",
    "docs/tutorials/nested.md",
)
FIGURE = ROOT / "docs" / "images" / "attention.png"
_TOKENS = (128, 1024, 2048)
_LONG = _TOKENS[1:]
_ATTENTION_FILES = (
    *("csrc/attention/arguments.h", "csrc/attention/cpu*", "csrc/attention/problem.h"),
    *("csrc/cpu/gemm_tile.h", "csrc/cpu/pack_panels.h"),
    *("jachess_ext/ops/attention.py", "jachess_ext/jet/rules/attention.py"),
)
_KERNEL_FILES = (
    *("csrc/cpu/ntk_gram.cpp", "jachess_ext/ops/ntk.py", "jachess_ext/ops/gemm.py"),
    *("jachess_ext/ntk/calls.py", "jachess_ext/ntk/capture.py", "jachess_ext/ntk/completeness.py"),
    *("jachess_ext/ntk/contract.py", "jachess_ext/ntk/independence.py"),
    *("jachess_ext/ntk/recorder.py", "jachess_ext/ntk/rounding.py"),
)
MEASURES = {
    ("attention_jvp", "jx.jvp"): _ATTENTION_FILES,
    ("memory", "jx.jvp"): _ATTENTION_FILES,
    ("memory", "MeanFlow"): (*_ATTENTION_FILES, "jachess_ext/jet/passes/dual.py"),
    ("meanflow", ""): (*_ATTENTION_FILES, "jachess_ext/jet/passes/dual.py"),
    ("laplacian", ""): (
        *(*_ATTENTION_FILES, "csrc/cpu/activation_jet.cpp", "csrc/cpu/softmax_jet.cpp"),
        *("jachess_ext/ops/softmax.py", "jachess_ext/ops/gemm.py"),
        *("jachess_ext/jet/second_order.py", "jachess_ext/jet/rows/passes.py"),
        *("jachess_ext/jet/rows/check.py", "jachess_ext/jet/rows/weights.py"),
    ),
    ("step_vs_plain", "JacHess step"): (
        *(*_ATTENTION_FILES, "csrc/cpu/activation_jet.cpp", "csrc/cpu/norm_jet.cpp"),
        *("csrc/cpu/jet_mean_squares.cpp", "jachess_ext/ops/gemm.py"),
    ),
    ("unmodified", ""): (
        *(
            *_ATTENTION_FILES,
            "jachess_ext/jet/passes/dual.py",
            "jachess_ext/differentiable/attention.py",
        ),
        *("jachess_ext/jet/gradient_loss.py", "jachess_ext/jet/second_order.py"),
    ),
    ("ntk_methods", "jx.ntk, jacobian"): _KERNEL_FILES,
    ("ntk_methods", "jx.ntk, vmap-grad"): _KERNEL_FILES,
}
"""What quoted rows measure, by results and the beginning of "figure, baseline": files; once these
compute something else, the rows are measured anew, or named in docs/measured.md (`outdated`)."""
_BLOCK = re.compile(r"(<!-- quoted: ([a-z-]+) -->\n).*?(<!-- /quoted -->)", re.DOTALL)


@cache
def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a results file."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def ratios(name: str, shape: str, figure: str, baseline: str) -> list[float]:
    """Return what was measured of this, in the order of the runs.

    Raises:
        LookupError: nothing was.
    """
    measured = [
        (row["date"], float(row["ratio"]))
        for row in rows(name)
        if (row["shape"], row["figure"], row["baseline"]) == (shape, figure, baseline)
    ]
    if not measured:
        raise LookupError(f"{name}.csv has no row {shape}, {figure}, {baseline}")
    return [ratio for _, ratio in sorted(measured)]


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _runs(name: str, shape: str, figure: str, baseline: str, places: int = 1) -> str:
    """Return the last two runs, or the only one, each with its processor."""
    found = [
        (row["date"], f"{float(row['ratio']):.{places}f}", row["device"])
        for row in rows(name)
        if (row["shape"], row["figure"], row["baseline"]) == (shape, figure, baseline)
    ]
    return "; ".join(
        f"{ratio} ({re.sub(r'[(]R[)]| Processor', '', device)})"
        for _, ratio, device in sorted(found)[-2:]
    )


def _last(name: str, shape: str, figure: str, baseline: str, places: int = 1) -> str:
    return f"{ratios(name, shape, figure, baseline)[-1]:.{places}f}"


def _spread(ratios: Sequence[float], places: int = 1) -> str:
    return " to ".join(dict.fromkeys(f"{end:.{places}f}" for end in (min(ratios), max(ratios))))


class _Bare(ast.NodeTransformer):
    """Takes annotations and docstrings out of a file."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value:
            return ast.Assign([node.target], node.value)
        # Not compiled, but a `nonlocal` of an inner function needs the name.
        name = ast.Assign([node.target], ast.Constant(None))
        return ast.If(ast.Constant(False), [name], [])

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return ast.Pass() if isinstance(node.value, ast.Constant) else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | None:
        # Without its docstring a file would not begin with the import of `annotations`.
        return None if node.module == "__future__" else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node


def _defines(node: ast.stmt) -> bool:
    """Tell whether a statement of a module or class only imports, or defines what is looked at."""
    for_types = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "False")
    return for_types or isinstance(
        node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Pass
    )


def program(sources: Iterable[str]) -> Counter[object]:
    """Return what files compute, wherever in them it stands: the bytecode of their functions,
    without the names of variables, their decorators, and what modules and classes run."""
    parts: Counter[object] = Counter()
    for source in sources:
        tree = ast.fix_missing_locations(_Bare().visit(ast.parse(source)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef):
                parts.update(ast.dump(part) for part in node.body if not _defines(part))
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                parts.update(map(ast.dump, node.decorator_list))
        waiting = [compile(tree, "", "exec")]
        while waiting:
            code = waiting.pop()
            inner = [const for const in code.co_consts if isinstance(const, CodeType)]
            waiting += inner
            if code.co_flags & inspect.CO_OPTIMIZED:  # a function: no module, no class
                plain = tuple(repr(const) for const in code.co_consts if const not in inner)
                parts[code.co_code, code.co_names, plain] += 1
    return parts


@cache  # many rows are of one commit
def _same_program(commit: str, paths: tuple[str, ...]) -> bool:
    """Tell whether these files compute what they did at a commit, which has to be here."""
    try:
        git("merge-base", "--is-ancestor", commit, "HEAD")
    except subprocess.CalledProcessError:
        return False
    changed = git("diff", "--name-only", commit, "HEAD", "--", *paths).split()
    if any(not path.endswith(".py") for path in changed):
        return False

    def sources(revision: str) -> Iterator[str]:
        present = git("ls-tree", "-r", "--name-only", revision, "--", *changed).split()
        return (git("show", f"{revision}:{path}") for path in present)

    return not changed or program(sources(commit)) == program(sources("HEAD"))


def outdated() -> list[str]:
    """Return the newest rows of `MEASURES` of a commit at which the files computed something else,
    or of an unknown one.

    Raises:
        OSError, subprocess.CalledProcessError: there is no git, or no checkout.
    """
    stale = []
    for (name, figure), paths in MEASURES.items():
        newest = {
            (row["shape"], row["figure"], row["baseline"]): row["commit"].removesuffix("+")
            for row in sorted(rows(name), key=lambda row: row["date"])
            if f"{row['figure']}, {row['baseline']}".startswith(figure)
        }
        stale += [
            f"{name}.csv: {', '.join(key)}, of {commit}; changed since, or not here"
            for key, commit in newest.items()
            if not _same_program(commit, paths)
        ]
    return stale


def _faster(tokens: int, way: str, mask: str, other: str = WRITTEN_OUT) -> float:
    """Return how many times faster `jx.jvp` through attention is."""
    shape, rest = f"attention-1x512-B1-T{tokens}", f"{way}, {mask}"
    return ratios("attention_jvp", shape, f"jx.jvp, {rest}", f"{other}, {rest}")[-1]


def _memory(tokens: int, way: str) -> float:
    """Return the peak of `jx.jvp` through causal attention over that of attention written out."""
    shape = f"H8-T{tokens}-D64-causal"
    return ratios("memory", shape, f"jx.jvp, {way}", "torch.func.jvp")[-1]


def attention() -> str:
    """Return `jx.jvp` through attention, by tokens: docs/derivatives.md."""
    return table(
        ["tokens", "mask", "forward", "forward + backward", "tangent as a target"],
        [
            [f"{t:,}", mask]
            + [f"{_faster(t, w, mask):.1f} ({_faster(t, w, mask, MATH):.1f})" for w in WAYS]
            for t in _TOKENS
            for mask in MASKS
        ],
    )


def attention_memory() -> str:
    """Return peaks of memory, by tokens: docs/derivatives.md."""
    return table(
        ["tokens, causal", "forward", "forward + backward", "tangent as a target"],
        [[f"{t:,}", *(f"{_memory(t, way):.2f}" for way in WAYS)] for t in _LONG],
    )


_LAPLACIANS = {
    "mlp-D2-N1024": "MLP, D 2, 1,024 points",
    "mlp-D10-N256": "D 10, 256",
    "mlp-D50-N64": "D 50, 64",
    "mlp-D100-N64": "D 100, 64",
    "transformer-D8-N8": "transformer, D 8, 8",
    "transformer-D8-N32": "D 8, 32",
    "transformer-D32-N32": "D 32, 32",
}


def laplacian() -> str:
    """Return `jx.laplacian`'s time and memory over those of other ways: docs/tutorials."""

    def both(shape: str, way: str, before: str = "", behind: str = "") -> str:
        figures = (f"{before}{figure}{behind}" for figure in ("value", "training step"))
        return ", ".join(f"{ratios('laplacian', shape, f, way)[-1]:.2f}" for f in figures)

    ways = ("double backward", "torch.func.hessian", "collapsed by hand", "folx")
    return table(
        ["value, training step", *ways, "compiled, folx", "peak, double backward"],
        [
            [label, *(both(shape, way) for way in ways)]
            + [both(shape, "folx", behind=", compiled"), both(shape, ways[0], "peak, ")]
            for shape, label in _LAPLACIANS.items()
        ],
    )


def trainer() -> str:
    """Return a step of MethodTrainer with JacHess over one of transformers' Trainer:
    docs/compile.md."""
    body = [
        [label]
        + [
            _last("trainer_step", shape, f"MethodTrainer's, {way}", "Trainer's step")
            for way in ("eager", "aot_eager", "inductor")
        ]
        for shape, label in _ENCODERS.items()
        if shape in {row["shape"] for row in rows("trainer_step")}
    ]
    return table(["encoder", "eager", "aot_eager", "Inductor"], body)


PINNS = {"pinn": "∂f/∂t − ∂²f/∂x²", "wave": "∂²f/∂t² − ∂²f/∂x²"}
PINN_POINTS = (256, 500, 1000, 4000)


def pinn() -> str:
    """Return a training step by `jx.laplacian` over one by double backward, of networks in (x, t):
    docs/tutorials."""

    def both(network: str, size: int) -> str:
        measured = "laplacian", f"{network}-D2-N{size}"
        figures = "training step", "training step, compiled"
        return ", ".join(_last(*measured, figure, "double backward", 2) for figure in figures)

    return table(
        ["eager, compiled", *(f"{size:,} points" for size in PINN_POINTS)],
        [
            [f"{equation}, float{bits}", *(both(f"{network}{bits}", size) for size in PINN_POINTS)]
            for network, equation in PINNS.items()
            for bits in (32, 64)
        ],
    )


def _dits(way: str) -> dict[str, str]:
    """Return a MeanFlow step over a plain one in the last two runs, by layers × width."""
    shapes = sorted({row["shape"] for row in rows("meanflow")})
    sizes = {shape: shape.split("-")[1].replace("x", " × ") for shape in shapes}
    return {
        size: _spread(ratios("meanflow", shape, way, "plain")[-2:], 2)
        for shape, size in sizes.items()
    }


def meanflow() -> str:
    """Return MeanFlow's step over a plain one: docs/derivatives.md."""
    shape = "DiT6x384-B2-T256"
    times = [f"time, {size}" for size in _dits("no graph")]
    return table(
        ["a MeanFlow step over a flow-matching step", *times, "peak memory, 6 × 384"],
        [
            [label, *_dits(way).values(),
             _last("memory", shape, f"MeanFlow step, {way}", "plain step", 2)]
            for way, label in (
                ("no graph", "`jx.jvp`, tangent as a target"),
                ("kept graph", "`jx.jvp`, the tangent's graph kept"),
                ("torch.func", "`torch.func.jvp`, attention written out"),
            )
        ],
    )  # fmt: skip


_ENCODERS = {
    "bert-4x64-B2-T16": "4 × 64, B 2, T 16",
    "bert-4x128-B4-T32": "4 × 128, B 4, T 32",
    "bert-6x384-B8-T32": "6 × 384, B 8, T 32",
    "bert-8x512-B8-T32": "8 × 512, B 8, T 32",
    "bert-12x768-B4-T32": "12 × 768, B 4, T 32",
}


def compiled() -> str:
    """Return steps over a plain step, eager and in one graph, by size: docs/compile.md."""
    columns = [
        ("jvp_vs_plain", f"jvp{way}", "plain") for way in ("", ", aot_eager", ", compiled")
    ] + [
        ("compiled_step", f"JacHess step, {way}", "plain step")
        for way in ("eager", "aot_eager", "inductor")
    ]
    shapes = {name: {row["shape"] for row in rows(name)} for name, _, _ in columns}
    ways = ("eager", "aot_eager", "Inductor")
    return table(
        ["encoder", *(f"{what}, {way}" for what in ("`jx.jvp`", "`JacHess`") for way in ways)],
        [
            [label, *(_last(c[0], shape, *c[1:]) if shape in shapes[c[0]] else "" for c in columns)]
            for shape, label in _ENCODERS.items()
        ],
    )


_RUN_4 = "9cda67b"  # the last commit that has run on a GPU


def gpu(name: str, *parts: tuple[str, str, str], places: int = 1) -> str:
    """Return what the newest commit's rows of results/gpu say, or that there are none.

    Args:
        parts: words around a spread over shapes, "{} times as long", and the figure and baseline
            that it is of; a part without rows is left out.
    """
    measured = rows(f"gpu/{name}") if (RESULTS / "gpu" / f"{name}.csv").exists() else []
    commit = max(measured, key=lambda row: row["date"])["commit"] if measured else ""
    cells = []
    for words, figure, baseline in parts:
        spread = [
            float(row["ratio"])
            for row in measured
            if (row["commit"], row["figure"], row["baseline"]) == (commit, figure, baseline)
            and row["ratio"]
        ]
        cells += [words.format(_spread(spread, places))] if spread else []
    if not cells:
        return "not measured at this commit"
    text = ", ".join(cells)
    if commit == _RUN_4:
        return f"not measured at this commit; run 4: {text}"
    return f"{text} ({measured[-1]['device']}, {commit})"


def _of_unmodified(shape: str, figure: str, baseline: str, unit: str) -> str:
    """Return the last ratio of times (ms) or of memory (MiB)."""
    measured = [
        (row["date"], float(row["ratio"]))
        for row in rows("unmodified")
        if (row["shape"], row["figure"], row["baseline"], row["unit"])
        == (shape, figure, baseline, unit)
    ]
    return f"{max(measured)[1]:.2f}" if measured else ""


def on_a_gpu() -> str:
    """Return what has been measured on a GPU: docs/derivatives.md."""
    long = "{} times as long"
    return table(
        ["on a GPU", "measured"],
        [
            ["`jx.jvp` through attention, against torch's math backend",
             gpu("peers", ("{} times faster", "jx.jvp, forward", "math backend, forward"))],
            ["a MeanFlow step, against a plain one", gpu("meanflow", (long, "no graph", "plain"))],
            ["a training step with JacHess, against a plain one",
             gpu("step_vs_plain", (long, *_STEP))],
            ["the same in train mode", gpu("train_mode", (long, "train mode step", "plain step"))],
            ["memory of attention's 2-jet, 4,096 tokens, four heads of 64",
             gpu("memory", ("{} of one matrix of scores", "attention", "one T x T matrix"))],
            ["a second backward through attention, against math attention",
             gpu("unmodified", (long, "differentiable", "math attention"), places=2)],
        ],
    )  # fmt: skip


def second_backward() -> str:
    """Return second backwards over those through math attention: docs/tutorials."""
    ways = ("differentiable", "gradient_loss", "gradient_loss, compiled")
    body = [
        [
            f"{program}, {what}",
            *(_of_unmodified(shape, way, "math attention", unit) for way in ways),
        ]
        for unit, what in (("ms", "time"), ("MiB", "memory"))
        for shape, program in (
            *((f"forces-{n}", f"forces, {n:,} tokens") for n in (512, 1024, 2048)),
            ("hessian-1024", "Hessian-vector product, 1,024 tokens"),
        )
    ]
    return table(["", "`differentiable`", "`gradient_loss`", "`gradient_loss`, compiled"], body)


def own_calls() -> str:
    """Return torch's own calls through attention over math attention: docs/refused.md."""
    labels = {
        "jvp": "`torch.func.jvp`",
        "meanflow": "MeanFlow: jvp, then the value's backward",
        "backward(jvp)": "a backward through the tangent",
        "jvp(grad)": "`jvp` of `grad`",
        "grad(grad)": "`grad` of `grad`",
    }
    sizes = (512, 1024, 2048)
    return table(
        ["time; memory over math attention", *(f"{size:,} tokens" for size in sizes)],
        [
            [
                label,
                *(
                    "; ".join(
                        _of_unmodified(
                            f"attention-{order}-{size}", "differentiable", "math attention", unit
                        )
                        for unit in ("ms", "MiB")
                    )
                    for size in sizes
                ),
            ]
            for order, label in labels.items()
        ],
    )


def meanflow_dit() -> str:
    """Return a MeanFlow step of diffusers' DiT over a plain one: docs/tutorials."""
    labels = {
        "jx.jvp": "`jx.jvp`",
        "torch.func": "`torch.func.jvp`, math attention",
        "differences": "central differences",
    }
    return table(
        ["du/dt by", "time", "memory"],
        [
            [label, *(_of_unmodified("meanflow-256", way, "plain", u) for u in ("ms", "MiB"))]
            for way, label in labels.items()
        ],
    )


def truth() -> str:
    """Return the error of du/dt, by how it is taken: docs/tutorials."""
    errors = {
        (row["figure"], row["note"]): f"{float(row['ratio']):.2g}"
        for row in sorted(rows("unmodified"), key=lambda row: row["date"])
        if row["question"] == "truth"
    }
    notes = ("float32", "bfloat16 autocast")
    figures = dict.fromkeys(figure for figure, _ in errors)
    return table(
        ["", *notes],
        [
            [figure.removeprefix("du/dt, "), *(errors[figure, note] for note in notes)]
            for figure in figures
        ],
    )


def nested() -> str:
    """Return what Δ² costs: docs/tutorials."""
    ratio = _of_unmodified("nested-1000", "jx.laplacian", "torch.func", "ms")
    return table(["", "time"], [["two `torch.func.jacfwd` of `jx.laplacian`", ratio]])


def front() -> str:
    """Return the README's rows."""
    forward, backward, mathematical = (
        _spread([_faster(t, way, mask, other) for t in _TOKENS for mask in MASKS])
        for way, other in ((WAYS[0], WRITTEN_OUT), (WAYS[1], WRITTEN_OUT), (WAYS[1], MATH))
    )
    memory = _spread([_memory(t, way) for t in _LONG for way in WAYS], 2)
    step, func = (
        ", ".join(f"{times} at {size}" for size, times in _dits(way).items())
        for way in ("no graph", "torch.func")
    )
    plain = [ratio for shape in _STEPS for ratio in ratios("step_vs_plain", shape, *_STEP)[-2:]]
    graph = [
        ratios("compiled_step", shape, "JacHess step, inductor", "plain step")[-1]
        for shape in ("bert-4x64-B2-T16", "bert-6x384-B8-T32")
    ]
    kernels = [
        ratios("ntk_methods", f"encoder6-{size}", "jx.ntk", other)[-1]
        for size in ("N32-T32", "N32-T64", "N64-T64")
        for other in ("jacobian", "vmap-grad")
    ]
    laplacians = [
        _spread([ratios("laplacian", s, figure, "double backward")[-1] for s in _LAPLACIANS], 2)
        for figure in ("value", "training step")
    ]
    networks = [f"{name}{bits}-D2-N{n}" for name in PINNS for bits in (32, 64) for n in PINN_POINTS]
    pinns = [
        _spread(
            [ratios("laplacian", shape, figure, "double backward")[-1] for shape in networks], 2
        )
        for figure in ("training step", "training step, compiled")
    ]
    return table(
        ["what", "on a CPU"],
        [
            ["J u through attention, causal or not, 128 to 2,048 tokens, against `torch.func.jvp` "
             "of attention written out",
             f"{forward} times faster; with its backward {backward} (than torch's math backend "
             f"{mathematical})"],
            ["the same, causal, 1,024 and 2,048 tokens", f"{memory} of its memory"],
            ["a MeanFlow step of a small DiT (layers × width), against a plain step",
             f"{step}, in plain steps (with `torch.func.jvp` {func})"],
            ["a training step with JacHess, against a plain one",
             f"{_spread(plain)} times as long; {_spread(graph)} in one graph (4 × 64 and 6 × 384)"],
            ["Laplacians of MLPs and transformers, against double backward",
             f"{laplacians[0]} of its time; a training step {laplacians[1]}"],
            ["a step of a network in (x, t), 256 to 4,000 points, against double backward",
             f"{pinns[1]} of its time compiled, {pinns[0]} eager"],
            ["the NTK of a 6-layer encoder, against per-sample gradients by `torch.func`",
             f"{_spread(kernels)} times faster"],
        ],
    )  # fmt: skip


_STEP = ("JacHess step", "plain step")
_STEPS = {
    "bert-6x384-B8-T32": "6 × 384, B 8, T 32",
    "bert-6x384-B8-T128": "6 × 384, B 8, T 128",
    "bert-12x768-B4-T128": "12 × 768, B 4, T 128",
    "llama-6x512-B8-T128": "Llama-shaped 6 × 512, GQA, B 8, T 128",
}
_PUBLISHED = ("published, 10 projections", "published, 10 dimensions")
_ATTENTION = {
    "B8-H12-Hk12-T32-D32": "B 8, 12 heads of 32, T 32",
    "B8-H12-Hk12-T128-D32": "B 8, 12 heads of 32, T 128",
    "B4-H12-Hk12-T128-D64": "B 4, 12 heads of 64, T 128",
    "B8-H8-Hk2-T128-D64-causal": "B 8, 8 heads of 64 on 2 key heads, causal, T 128",
}


def steps() -> str:
    """Return the cost of JacHess, with the targets set before: docs/measured.md."""
    body = [
        ["JacHess step / plain fine-tuning step (two runs)", label,
         _runs("step_vs_plain", shape, *_STEP), "≤ 4.0"]
        for shape, label in _STEPS.items()
    ]  # fmt: skip
    for shape, label, target in (
        ("bert-6x384-B8-T32", "6 × 384, B 8, T 32", "≥ 20"),
        ("bert-12x768-B4-T32", "12 × 768, B 4, T 32", "≥ 40"),
    ):
        faster = [
            ratios("step_vs_published", shape, "JacHess step", other)[-1] for other in _PUBLISHED
        ]
        question = "the published code's protocol / JacHess step"
        body.append([question, label, _spread(faster, 0), target])
    func = ("2-jet, forward + backward", "torch.func jvp of jvp, eager")
    for shape in ("bert-6x384-B8-T32", "bert-6x384-B8-T128"):
        body.append(
            ["`torch.func` jvp∘jvp / one 2-jet, forward + backward", _STEPS[shape],
             _last("engine_vs_func", shape, *func), "≥ 2"]
        )  # fmt: skip
    for shape in ("bert-6x384-B8-T32", "bert-6x384-B8-T128"):
        body.append(
            ["train mode (task loss + penalty) / plain step", _STEPS[shape],
             _last("train_mode", shape, "train mode step", "plain step"), "≤ 4.1"]
        )  # fmt: skip
    for shape, label in _ATTENTION.items():
        passes = "; ".join(
            _last("attention_operator", shape, f"attention {name}", "composed rules")
            for name in ("forward", "backward")
        )
        body.append(
            ["composed rules / the attention operator, forward; backward", label, passes, "≥ 1.5"]
        )
    peaks = [
        _last("memory", "bert-6x384-B8-T128", f"peak, {mode} mode", "plain step")
        for mode in ("unlab", "train")
    ]
    body.append(
        ["peak memory of the step / plain step's", "6 × 384, B 8, T 128 (train mode)",
         f"{peaks[0]} ({peaks[1]})", "≤ 4"]
    )  # fmt: skip
    every = [
        _last("equal_spread", "bert-6x384-B2-T8, all",
              f"jet, all dimensions{more}: time × variance", "reverse, |D| = 10", 0)
        for more in ("", ", 4 directions")
    ]  # fmt: skip
    first = _last("equal_spread", "bert-6x384-B8-T32, first",
                  "jet, all dimensions: time × variance", "reverse, |D| = 10", 2)  # fmt: skip
    body += [
        ["reverse form (Eq. 5–6) / ours, time × variance of R, every token", "6 × 384, B 2, T 8",
         f"{every[0]} (4 directions: {every[1]})", "≥ 25"],
        ["the same, classifier token only (before the fused operators)", "6 × 384, B 8, T 32",
         f"**{first}**", "≥ 25"],
    ]  # fmt: skip
    return table(["question", "shape (layers × width, batch, tokens)", "ratio", "target"], body)


def works_with() -> str:
    """Return the matrix of `benchmarks.models settings`: model × setting."""
    frame = pd.read_csv(RESULTS / "works_with.csv")
    names = [frame[column].unique() for column in ("model", "setting")]
    wide = frame.pivot(index="model", columns="setting", values="result").fillna("")
    wide = wide.loc[names[0], names[1]]
    return table(["", *wide.columns], [[name, *cells] for name, *cells in wide.itertuples()])


def sweep() -> str:
    """Return numbers of model types of `benchmarks.models types`: docs/derivatives.md."""
    texts = [row for row in rows("model_sweep") if row["result"] != "no text"]
    counts = Counter(row["result"] for row in texts)
    oracles = Counter(row["oracle"] for row in texts)
    tried = len(texts) - counts["untried"]
    return table(
        ["tried", "right", "of these by reverse over reverse", "wrong", "refused", "untried"],
        [[str(tried), f"{counts['right']} ({100 * counts['right'] / tried:.1f} %)",
          *map(str, (oracles["reverse over reverse"], counts["wrong"], counts["raises"],
                     counts["untried"]))]],
    )  # fmt: skip


CHOICES = {
    "flan": "15 language models",
    "flan, few": "3 to 6 of them",
    "llm": "3 models of 7 to 8B, accuracy",
    "lcdb logloss": "classifiers, log-loss",
    "lcdb accuracy": "the same, accuracy",
    "lcdb auc": "the same, AUC",
}
"""Families of tables in selection_families_B.csv, in words."""


def choices() -> str:
    """Return what half B says of the choices of `blend`, P(best) and intervals."""
    figures = {(row["family"], row["method"]): row for row in rows("selection_families_B")}
    head = ["tables of", "cases", "RelAcc", "of the last loss", "P(best) of the first: said, true",
            "50, 90 % intervals hold"]  # fmt: skip
    body = []
    for family, words in CHOICES.items():
        row = figures[family, "blend"]
        pairs = ("top said", "top true"), ("50 %", "90 %")
        said = [", ".join(row[name] for name in pair) for pair in pairs]
        last = figures[family, "subtuning"]["RelAcc"]
        body.append([words, row["cases"], row["RelAcc"], last, *said])
    return table(head, body)


DEVELOPED = {
    **{"flan": "FLAN", "llm": "tasks", "adam settings": "Adam", "corpora": "corpora"},
    **{"lr and batch": "rates", "lcdb f1": "F1", "lcdb auc": "AUC", "mean": "mean"},
}
"""Families of tables in selection_development.csv, in words."""
_AS_IT_IS = "as it is"


def _developed(variant: str, group: str, *figures: str, digits: int = 1) -> str:
    """Return figures of the development tables; variant "before": of the earlier rule."""
    name = "selection_development" + "_before" * (variant == "before")
    row = next(r for r in rows(name) if (r["variant"], r["group"]) == (variant, group))
    return ", ".join(
        f"{float(row[figure]):.{digits}f}" if row[figure] else "" for figure in figures
    )


def development() -> str:
    """Return the figures of the choice on the development tables, and of the rule before."""
    before = ("RelAcc", 1), ("−ln P", 2), ("RMSE ln L", 3), ("PearCorr", 1)
    lines: list[tuple[str, str, tuple[str, ...], int]] = []
    for figure, digits in before:
        name = {"RMSE ln L": "RMSE of ln L"}.get(figure, figure)
        lines += [(f"{name}, before", "before", (figure,), digits)]
        lines += [(f"{name}, now", _AS_IT_IS, (figure,), digits)]
        if figure == "RelAcc":
            for words, column in (("the last loss", "last"), ("halving", "halving")):
                lines.append((f"of {words}", _AS_IT_IS, (column,), 1))
                high = (f"less {column}, high",)
                lines.append(
                    (f"now less {words}: upper end of the 95 % interval", _AS_IT_IS, high, 1)
                )
        elif figure != "−ln P":
            undrawn = f"{figure.split()[0]}, undrawn"
            lines.append((f"{name} before the draw, now", _AS_IT_IS, (undrawn,), digits))
    for words, figures, digits in (
        ("regret: said, true, now", ("regret said", "regret true"), 1),
        ("50, 90 % intervals hold, now", ("50 %", "90 %"), 0),
        (
            "% of the models go on; the best is out in % of the cases, now",
            ("go on", "best is out"),
            0,
        ),
        ("% of the cases that need no further run, now", ("decided",), 0),
    ):
        lines.append((words, _AS_IT_IS, figures, digits))
    cases = [
        next(r["cases"] for r in rows("selection_development") if r["group"] == family)
        for family in DEVELOPED
    ]
    body = [
        [words, *(_developed(variant, family, *figures, digits=digits) for family in DEVELOPED)]
        for words, variant, figures, digits in lines
    ]
    return table(["", *DEVELOPED.values()], [["cases", *cases], *body])  # fmt: skip


def development_sizes() -> str:
    """Return RelAcc on the development tables by the number of their sizes."""
    groups = selection.SIZES
    head = ["RelAcc, tables of", *groups]
    ways = {
        **{"now": (_AS_IT_IS, "RelAcc"), "before": ("before", "RelAcc")},
        **{"the last loss": (_AS_IT_IS, "last"), "halving": (_AS_IT_IS, "halving")},
    }
    return table(head, [[words, *(_developed(variant, group, figure) for group in groups)]
                        for words, (variant, figure) in ways.items()])  # fmt: skip


def development_parts() -> str:
    """Return the choice on the development tables with parts of it switched off."""
    few = [name.replace("flan", "FLAN") for name in selection.FEW]
    head = ["", "RelAcc: mean", "Adam", "FLAN", *few, "RMSE of ln L: mean", "FLAN"]
    head += ["PearCorr: mean", "FLAN"]
    cells = [("RelAcc", group, 1) for group in ("mean", "adam settings", "flan", *selection.FEW)]
    cells += [(figure, group, digits) for figure, digits in (("RMSE ln L", 3), ("PearCorr", 1))
              for group in ("mean", "flan")]  # fmt: skip
    variants = ["before", *selection.VARIANTS]
    return table(head, [[variant, *(_developed(variant, g, f, digits=d) for f, g, d in cells)]
                        for variant in variants])  # fmt: skip


def development_chances() -> str:
    """Return P(best) said and true by bins, and what is said of tables of coin flips."""
    current = [r for r in rows("selection_development") if r["variant"] == _AS_IT_IS]
    bins = [r for r in current if r["group"].startswith("P(best)")]
    shown = [f"{float(r['P said']):.2f}, {float(r['P true']):.2f} ({r['cases']})" for r in bins]
    return table([r["group"] for r in bins], [shown])


def development_coins() -> str:
    """Return how often tables of coin flips are said to tell nothing."""
    coins = [r for r in rows("selection_development") if r["group"].startswith("coins")]
    head = ["tables of coin flips", "number", "told as no signal, %", "decided, %"]
    return table(head, [[r["group"].removeprefix("coins, "), r["cases"],
                         f"{float(r['no signal']):.0f}", f"{float(r['decided']):.0f}"]
                        for r in coins])  # fmt: skip


def ntk() -> str:
    """Return the time and memory of `jx.ntk` beside other ways; what misses its target is bold."""
    newest = {
        (row["shape"], row["figure"], row["baseline"]): row
        for row in sorted(rows("ntk_methods"), key=lambda row: row["date"])
    }
    sizes = {f"encoder6-N{n}-T{t}": f"N {n}, T {t}" for n, t in ((32, 32), (32, 64), (64, 64))}

    def line(
        words: Sequence[str],
        key: tuple[str, str],
        digits: int,
        target: float = 0,
        of: str = "ratio",
    ) -> list[str]:
        cells = []
        for size in sizes:
            if row := newest.get((size, *key)):
                number = float(row[of]) / (1000 if of == "p50" else 1)  # seconds
                mark = "**" * (number < target)
                cells.append(f"{mark}{number:.{digits}f}{mark}")
            else:
                cells.append("")
        return [*words, *cells, f"≥ {target:g}" if target else ""]

    ours = "jx.ntk"
    return table(
        ["`jx.ntk`", "against", *sizes.values(), "target"],
        [
            line(("time, exact, s", ""), (ours, "jacobian"), 1, of="p50"),
            line(("", "Jacobian contraction, `torch.func`"), (ours, "jacobian"), 1, 10),
            line(("", "per-sample gradients, vmap(grad)"), (ours, "vmap-grad"), 1, 5),
            line(("", "NTK-vector products, `torch.func` (2 × 2 samples, scaled)"),
                 (ours, "ntk-vector"), 0),
            line(("", "neural-tangents, structured"), (ours, "neural-tangents"), 1, 2.5),
            line(("peak memory, MiB", ""), (f"{ours}, peak", "jacobian"), 0, of="peak_mb"),
            line(("", "Jacobian contraction, times less"), (f"{ours}, peak", "jacobian"), 0, 8),
            line(("rate of the contraction", "large matrix products"),
                 ("contraction", "GEMM"), 2, 0.6),
        ],
    )  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "attention": attention,
    "attention-memory": attention_memory,
    "choices": choices,
    "compiled": compiled,
    "development": development,
    "development-chances": development_chances,
    "development-coins": development_coins,
    "development-parts": development_parts,
    "development-sizes": development_sizes,
    "front": front,
    "laplacian": laplacian,
    "pinn": pinn,
    "trainer": trainer,
    "meanflow": meanflow,
    "meanflow-dit": meanflow_dit,
    "nested": nested,
    "ntk": ntk,
    "on-a-gpu": on_a_gpu,
    "second-backward": second_backward,
    "own-calls": own_calls,
    "steps": steps,
    "sweep": sweep,
    "truth": truth,
    "works-with": works_with,
}


def _runs_of(name: str, **read: Any) -> pd.DataFrame:
    return pd.read_csv(RESULTS / f"{name}.csv", **read)


PAGES: dict[str, Callable[[], str]] = {
    "live_choice": lambda: live_selection.choices_page(_runs_of("live_choice_runs")),
    "selection_trial": lambda: live_selection.trial_page(_runs_of("selection_trial_runs")),
    "model_sweep": lambda: models.types_page(
        _runs_of("model_sweep", keep_default_na=False, dtype=str)
    ),
    "word_attack": lambda: word_attack.tables(_runs_of("word_attack")),
    **{
        path.stem: partial(finetune_quality.page, path)
        for path in sorted(RESULTS.glob("finetune_*.jsonl"))
    },
}
"""What draws each page of benchmarks/results."""


def renewed(text: str) -> str:
    """Return a document with its tables renewed."""
    return _BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def draw() -> Any:
    """Draw time and memory of a derivative through attention, over the tokens."""
    figure, (time, memory) = panels(columns=2, width=7.2, height=2.6)
    for index, way in enumerate(WAYS):
        style = {"color": COLOURS[index + 1], "marker": MARKERS[index + 1], "markersize": 4}
        label = {"target": "tangent as a target"}.get(way, way)
        for mask, line in zip(MASKS, ("-", ":"), strict=True):
            heights = [_faster(t, way, mask) for t in _TOKENS]
            shown = label if mask == "causal" else None
            time.plot(_TOKENS, heights, label=shown, linestyle=line, **style)
        memory.plot(_LONG, [1 / _memory(t, way) for t in _LONG], **style)
    for panel, title in ((time, "times faster"), (memory, "times less memory")):
        panel.axhline(1, color="#999999", linewidth=1, linestyle="--")
        panel.set(title=title, xlabel="tokens", xscale="log", ylim=(0, None))
        panel.minorticks_off()
    time.set_xticks(_TOKENS, [str(t) for t in _TOKENS])
    memory.set_xticks(_LONG, [str(t) for t in _LONG])
    memory.set_xlim(900, 2300)
    time.legend(frameon=False, fontsize="small")
    return figure


def main() -> int:
    """Compare or renew; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true")
    update = parser.parse_args().update
    texts = {ROOT / name: lambda text: renewed(text) for name in DOCUMENTS}
    for name, page in PAGES.items():
        texts[RESULTS / f"{name}.md"] = lambda text, page=page: page()
    changed = False
    for path, renew in texts.items():
        before = path.read_text(encoding="utf-8")
        after = renew(before)
        if after != before:
            changed = True
            name = path.relative_to(ROOT)
            print(f"{name}: {'renewed' if update else 'differs from benchmarks/results'}")
            if update:
                path.write_text(after, encoding="utf-8")
    if update:
        draw().savefig(FIGURE, dpi=150, metadata={"Software": None})
    return int(changed and not update)


if __name__ == "__main__":
    sys.exit(main())
