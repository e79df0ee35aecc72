"""`jachess demo`: derivatives that torch refuses, a fine-tuning watched, methods compared."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from timeit import timeit
from typing import TYPE_CHECKING

from ..._io import DataError, require, write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from torch import Tensor

    from ..workbench.page import Picture, Table
    from ..workbench.settings import Recipe
    from ..workbench.tasks import Task

    Tensors = tuple[Tensor, ...]
    Derivative = Callable[[Tensors, Tensors], Tensors]

ASSETS = Path(__file__).parent / "assets"
"""Folder of the encoder, written by `examples/pretrain_demo_encoder.py`."""

SENTENCES = ASSETS / "docstrings"
"""Folder of the task's sentences, written by `examples/docstrings.py`."""

PACKAGES = ("numpy", "python", "scipy", "sklearn", "torch", "transformers")
"""Names of the task's classes: packages."""

FEW_METHODS = ("none", "recommended", "jachess-train")
"""The methods of the small comparison: plain, the recommended one, and JacHess."""

METHODS = ("none", "label-smoothing", "recommended", "jachess-train", "jachess-joint")
"""The methods of `jachess demo --compare`: also a control, and another mode of JacHess."""


# The task: which package is a sentence from?


def docstring_task(train_size: int = 1200, dev_size: int = 480) -> Task:
    """Return the task of classifying the sentences in `SENTENCES` by package; always the same.

    The sentences are from docstrings of six packages (the standard library is ``python``), with
    names masked as ``[NAME]``. Classes are balanced, and no source file has sentences in both
    parts.

    Args:
        train_size, dev_size: Numbers of sentences, rounded down to multiples of six.

    Raises:
        DataError: There are not enough sentences.

    Examples:
        >>> task = docstring_task(6, 6)
        >>> task.classes[1], sorted(task.train.labels)
        ('python', [0, 1, 2, 3, 4, 5])
    """
    from ..workbench.metrics import ACCURACY
    from ..workbench.tasks import Examples, Task

    def part(name: str, size: int) -> Examples:
        missing = dict.fromkeys(PACKAGES, size // len(PACKAGES))
        texts, labels = [], []
        for line in (SENTENCES / f"{name}.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            if missing[row["label"]]:
                missing[row["label"]] -= 1
                texts.append(row["text"])
                labels.append(PACKAGES.index(row["label"]))
        if any(missing.values()):
            raise DataError(
                f"{size} sentences of {name} were asked for; there are {len(texts)}: ask for fewer"
            )
        return Examples(texts, None, labels)

    train = part("train", train_size)
    return Task("docstrings", PACKAGES, train, train, part("dev", dev_size), ACCURACY)


# Derivatives that torch refuses, or makes one by one


def derivative_table(tokens: int = 1024) -> tuple[list[str], Table]:
    """Return torch's error messages for derivatives of fused attention, and a table of the same
    derivatives by this package.

    Errors are relative to torch's own derivatives of attention in plain operations, in float64 on
    256 tokens; times are medians of three alternating measurements in float32 on `tokens` tokens.
    """
    import torch
    from torch.func import grad, hessian, vmap
    from torch.nn.functional import scaled_dot_product_attention as fused

    from ...jet import laplacian
    from ...jet.api import jvp
    from ..workbench.page import Table

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    def loss_of(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *x: attention(*x).square().sum()

    def hvp(x: Tensors, v: Tensors) -> Tensors:
        x = tuple(operand.detach().requires_grad_() for operand in x)
        return torch.autograd.grad(jvp(loss_of(fused), x, v)[1], x)

    def network(x: Tensor) -> Tensor:
        for weight in weights.to(x):
            x = (x @ weight[: x.shape[-1]]).tanh()
        return x.sum(-1)

    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 3, 1, 4, tokens, 64, generator=generator)
    inputs = tuple(draw.unbind() for draw in draws)
    exact = tuple(draw.unbind() for draw in draws[..., :256, :].double())
    weights = torch.randn(4, 128, 128, generator=generator) / 128**0.5
    points = torch.randn(512, 10, generator=generator)
    texts, rows = [], []
    for derivative in (torch.func.jvp, torch.autograd.functional.hvp):
        name = f"{derivative.__name__} through F.scaled_dot_product_attention: torch"
        try:
            derivative(loss_of(fused), *inputs)
            texts.append(f"{name} {torch.__version__} no longer refuses it.")
        except RuntimeError as error:
            texts.append(f'{name} says "{str(error).splitlines()[0]}"')
    for title, theirs, ours, (taken, checked) in (
        (
            "output's tangent",
            lambda x, v: torch.stack(torch.func.jvp(written, x, v)[1:]),
            lambda x, v: torch.stack(jvp(fused, x, v)[1:]),
            (inputs, exact),
        ),
        (
            "Hessian-vector product",
            lambda x, v: torch.stack(torch.func.jvp(grad(loss_of(written), (0, 1, 2)), x, v)[1]),
            lambda x, v: torch.stack(hvp(x, v)),
            (inputs, exact),
        ),
        (
            "Laplacian in 10 inputs",
            lambda x: vmap(hessian(network))(x).diagonal(0, 1, 2).sum(-1),
            lambda x: laplacian(network, x)[2],
            ((points,), (points.double(),)),
        ),
    ):
        reference, result = (call(*checked) for call in (theirs, ours))
        runs = partial(theirs, *taken), partial(ours, *taken)
        # Measured alternately, without the first turn: other load of the machine then affects both,
        # and a turn's ratio compares measurements of one moment.
        turns = [[timeit(run, number=1) for run in runs] for _ in range(4)][1:]
        slow, fast = map(statistics.median, zip(*turns, strict=True))
        low, _, high = sorted(before / after for before, after in turns)
        most, least = map(peak_mebibytes, runs)
        rows.append(
            [
                title,
                f"{float((result - reference).norm() / reference.norm()):.0e}",
                f"{1e3 * slow:.0f} → {1e3 * fast:.0f} ms, {low:.1f} to {high:.1f} ×",
                f"{most:.0f} → {least:.0f} MiB, {most / least:.1f} ×",
            ]
        )
    caption = (
        "torch.func.jvp of attention written out → jx.jvp through fused attention, of "
        f"{tokens} tokens, 4 heads of 64; torch.func.hessian → jx.laplacian of a network on 512 "
        "points. Measured now: relative error in float64; time, three turns, and peak memory (of "
        "torch's allocator, by its profiler) in float32."
    )
    return texts, Table(caption, ["derivative", "error", "time", "memory"], rows)


def peak_mebibytes(call: Callable[[], object]) -> float:
    """Return the peak memory of torch's CPU allocator during a call, in MiB."""
    from torch.autograd.profiler import profile

    stderr = os.dup(2)
    try:
        with TemporaryFile() as discarded:  # the profiler prints when it starts and stops
            os.dup2(discarded.fileno(), 2)
        with profile(use_kineto=False, profile_memory=True) as recorded:
            call()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events)) / 2**20


# A fine-tuning, watched


def measure_layers(task: Task, recipe: Recipe, measurements: int = 5) -> tuple[Table, Picture]:
    """Fine-tune the encoder without a penalty, and measure its layers' smoothness during training.

    Args:
        measurements: number of measurements after the first.

    Returns:
        A table of each layer's norms before and after training, and a picture of them over the
        steps.
    """
    from ...training import SmoothnessMonitor
    from ..workbench.models import encode, load_model, load_tokenizer
    from ..workbench.page import Picture, Table
    from ..workbench.training import fine_tune

    tokenizer = load_tokenizer(ASSETS)
    model = load_model(ASSETS, task.outputs, tokenizer, seed=0)
    train, dev = (encode(part, tokenizer, recipe.max_length) for part in (task.train, task.dev))
    steps = int(recipe.epochs * -(-len(train) // recipe.batch_size))
    monitor = SmoothnessMonitor(
        dev.batch(range(min(32, len(dev)))), every=max(1, steps // measurements), hessian=True
    )
    fine_tune(model, train, recipe, seed=0, callbacks=[monitor])
    history = monitor.history
    first, last = history[0], history[-1]
    count = sum(name.startswith("smoothness/jacobian_") for name in first)
    rows = []
    for layer in range(count):
        cells = [str(layer + 1)]
        for name in ("jacobian", "hessian"):
            before, after = (entry[f"smoothness/{name}_{layer}"] for entry in (first, last))
            change = f"{round(100 * after / before) - 100:+d}".replace("-", "−")
            cells.append(f"{before:,.0f} → {after:,.0f} ({change} %)")
        rows.append(cells)
    caption = (
        "How strongly each layer's output depends on the token embeddings (‖J‖), and how much that "
        f"changes with them (‖H‖), before and after {last['step']:.0f} steps of plain fine-tuning."
    )
    drawn = Picture(
        "Norms of each layer's first and second derivatives with respect to the token embeddings, "
        "as shares of those before the fine-tuning.",
        partial(layers_figure, history, count),
    )
    return Table(caption, ["layer", "‖J‖", "‖H‖"], rows), drawn


def layers_figure(history: Sequence[dict[str, float]], layers: int) -> Figure:
    """Return a figure of each layer's norms over the steps, in per cent of their values before the
    first step."""
    from ..workbench.page import panels, styles_of

    figure, axes = panels(1, 2, width=7.2, height=3.4, sharex=True)
    steps = [entry["step"] for entry in history]
    styles = styles_of([f"layer {layer + 1}" for layer in range(layers)])
    for panel, (name, title) in zip(
        axes,
        (("jacobian", "first derivatives, ‖J‖"), ("hessian", "second derivatives, ‖H‖")),
        strict=True,
    ):
        panel.axhline(100, color="#999999", linewidth=1, linestyle="--")
        for layer, (label, style) in enumerate(styles.items()):
            heights = [entry[f"smoothness/{name}_{layer}"] for entry in history]
            percent = [100 * height / heights[0] for height in heights]
            panel.plot(steps, percent, label=label, markersize=4, **style)
        panel.set(title=title, xlabel="step of fine-tuning")
    axes[0].set_ylabel("% of its value before")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(6, layers), frameon=False)
    return figure


# The comparison


def summary_table(runs: DataFrame) -> Table:
    """Return a table of each method's accuracy, Brier score, norms and cost, as means over seeds.

    Args:
        runs: The runs, as `compare.tables.to_frame` returns them.
    """
    from ..compare import tables

    cost = tables.costs(runs)
    columns = (
        ("accuracy × 100", "accuracy", 100, 1),
        ("Brier", "brier", 1, 3),
        ("Σ‖J‖ / 1000", "Σ‖J‖", 1e-3, 1),
        ("Σ‖H‖ / 1000", "Σ‖H‖", 1e-3, 0),
    )
    figures = [(tables.by_seed(runs, name), scale, digits) for _, name, scale, digits in columns]
    rows = [
        [
            method,
            *(tables.mean_cell(of[method], scale, digits) for of, scale, digits in figures),
            f"{cost[method]:.1f}" if method in cost else tables.DASH,
        ]
        for method in tables.methods_of(runs)
    ]
    caption = (
        "Mean ± standard deviation over seeds. Σ: sum over layers, after fine-tuning. Time: "
        "training's processor time over the plain one's."
    )
    return tables.Table(caption, ["method", *(title for title, *_ in columns), "time"], rows)


def penalty_summary(runs: DataFrame, method: str = "jachess-train") -> str:
    """Return a sentence that compares a penalised method's norms with those of plain training; ""
    if the runs lack either."""
    from ..compare import tables

    norms = tables.by_seed(runs, "Σ‖H‖")
    if not {tables.REFERENCE, method} <= set(norms.dropna(axis=1, how="all")):
        return ""
    pairs = norms[[tables.REFERENCE, method]].dropna()
    ratio = pairs[method].mean() / pairs[tables.REFERENCE].mean()
    smaller = int((pairs[method] < pairs[tables.REFERENCE]).sum())
    return (
        f"{method} penalises derivatives: the second ones, Σ‖H‖, end at {100 * ratio:.0f} % of the "
        f"plain model's, and are smaller on {smaller} of {len(pairs)} seeds, for "
        f"{tables.costs(runs)[method]:.1f} times the training time."
    )


# The command


def demo(
    out: Path = Path("jachess-demo"),
    compare: bool = False,
    seeds: int | None = None,
    quick: bool = False,
) -> None:
    """Show derivatives that torch refuses and what a fine-tuning does, then compare methods.

    No network is needed: the encoder and the texts come with the package.  Finished runs in the
    folder are not repeated.

    Args:
        out: Folder of the task, the runs, the picture and the report.
        compare: Five methods and three seeds, in place of three methods and two seeds.
        seeds: Number of runs of each method, in place of those.
        quick: One seed, few steps: does it run?

    Raises:
        DataError: The text or the folder cannot be used.
        MissingExtra: A library is not installed.
    """
    start = time.perf_counter()
    seeds = (3 if compare else 2) if seeds is None else seeds
    if seeds < 1:
        raise DataError(f"--seeds is {seeds}; expected at least 1")
    import torch

    from ..compare.report import answer, sections
    from ..compare.settings import Conditions, Grid
    from ..compare.tables import to_frame
    from ..workbench.page import Section, pluralise, to_text, wrap, write_html
    from ..workbench.runs import locked, prepare_process
    from ..workbench.settings import Recipe

    with locked(out / "runs"):
        pass  # raises, before any work, if the folder cannot be used
    torch.set_num_threads(1)
    page, title = out / "report.html", "jachess_ext: the demo"
    width = shutil.get_terminal_size().columns
    train, unlabelled, dev = (240, 120, 120) if quick else (600, 600, 480)
    recipe = Recipe(
        epochs=1 if quick else 2, batch_size=8, lr=1e-3, weight_decay=0.01, max_length=48
    )
    with _stage("1. Derivatives that torch refuses, or makes one by one, and ours. One thread"):
        texts, table = derivative_table()
        print(*(wrap(text, width) for text in texts), to_text(table, width), sep="\n")
    with _stage("2. Reading sentences: of which package's documentation is each?"):
        task = docstring_task(train + unlabelled, dev)
        for name, part in (("train", task.train), ("dev", task.dev)):
            rows = zip(part.texts, part.labels, strict=True)
            lines = (json.dumps({"text": t, "label": task.classes[int(y)]}) + "\n" for t, y in rows)
            write_text(out / "docstrings" / f"{name}.jsonl", "".join(lines))
    with _stage("3. Fine-tuning a small encoder on them, its smoothness measured on the way"):
        prepare_process(threads=1)
        watched = replace(task, train=task.train.slice(0, train * 2 // 3))
        layers, picture = measure_layers(watched, recipe)
        write_bytes(out / "smoothness.png", picture.png())
        print(to_text(layers, width), f"Picture: {out / 'smoothness.png'}", sep="\n")
    shown = [
        Section("Derivatives that torch refuses, or makes one by one", texts, [table]),
        Section("What a fine-tuning does to each layer", (), [layers], [picture]),
    ]
    write_html(page, title, shown)
    grid = Grid(
        model=str(ASSETS),
        tasks=(f"docstrings={out / 'docstrings'}",),
        methods=METHODS if compare else FEW_METHODS,
        seeds=tuple(range(1 if quick else seeds)),
        train_size=train,
        unlabelled_size=unlabelled,
        recipe=recipe,
        conditions=Conditions(corruption=(0.2,), deltas=()),
    )
    count = len(grid.methods) * len(grid.seeds)
    processes = min(require("joblib").cpu_count(), count, 4)  # of 0.8 GB each
    seeds_text = pluralise(len(grid.seeds), "seed")
    with _stage(
        f"4. Comparing {len(grid.methods)} methods on {seeds_text}: {train} sentences to "
        f"train on, {dev} to judge; {processes} at a time, one thread each"
    ):
        from ..compare.finetune import run_grid

        records = run_grid(grid, out, processes=processes, progress=True)
        runs = to_frame(records)
        summary = summary_table(runs)
        print(to_text(summary, width))
        penalty = [text] if (text := penalty_summary(runs)) else []
        more = "No score of so few runs is told apart from another's: `jachess demo --compare`."
        paragraphs = answer(runs) if compare else [more]
        print(*(wrap(text, width) + "\n" for text in [*penalty, *paragraphs]), sep="\n")
    compared = Section("Methods compared", penalty, [summary])
    write_html(page, title, [*shown, compared, *sections(records)])
    print(f"All tables and figures: {page}. In all {time.perf_counter() - start:.0f} s.")


@contextmanager
def _stage(title: str) -> Iterator[None]:
    print(textwrap.fill(f"{title} …", shutil.get_terminal_size().columns), flush=True)
    start = time.perf_counter()
    yield
    print(f"… {time.perf_counter() - start:.1f} s\n", flush=True)
