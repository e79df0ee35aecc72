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
import csv
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pandas as pd

from jachess_ext.compare.report import COLOURS, MARKERS, panels

from . import finetune_quality, live_selection, models, word_attack
from .common import RESULTS, ROOT

DOCUMENTS = ("README.md", "docs/measured.md", "docs/derivatives.md", "docs/limits.md")
FIGURE = ROOT / "docs" / "images" / "attention.png"
_TOKENS = (128, 256, 512, 1024, 2048)
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
    """Return the last two runs, or the only one."""
    return "; ".join(f"{ratio:.{places}f}" for ratio in ratios(name, shape, figure, baseline)[-2:])


def _last(name: str, shape: str, figure: str, baseline: str, places: int = 1) -> str:
    return f"{ratios(name, shape, figure, baseline)[-1]:.{places}f}"


def _spread(ratios: Sequence[float], places: int = 1) -> str:
    return f"{min(ratios):.{places}f} to {max(ratios):.{places}f}"


def attention() -> str:
    """Return `jx.jvp` through causal attention, by tokens: docs/derivatives.md."""

    def cell(tokens: int, figure: str) -> str:
        shape = f"H8-T{tokens}-D64-causal"
        plain, mathematical = (
            _last("jvp", shape, f"jx.jvp, {figure}", f"torch.func.jvp, {name}")
            for name in ("written out", "math backend")
        )
        return f"{plain} ({mathematical})"

    figures = ("forward", "forward + backward", "target")
    return table(
        ["tokens", "forward", "forward + backward", "tangent as a target"],
        [[f"{t:,}", *(cell(t, figure) for figure in figures)] for t in _TOKENS],
    )


def front() -> str:
    """Return the README's four rows."""
    shape, meanflow = "H8-T1024-D64-causal", "DiT6x384-B2-T256"
    faster, fast = (
        _last("jvp", shape, "jx.jvp, forward", f"torch.func.jvp, {way}")
        for way in ("written out", "math backend")
    )
    memory = _last("jvp", shape, "peak memory: jx.jvp, forward", "torch.func.jvp", 2)
    step = _last("jvp", meanflow, "MeanFlow step, no graph", "plain step", 2)
    func = _last("jvp", meanflow, "MeanFlow step, torch.func", "plain step", 2)
    plain = [ratio for shape in _STEPS for ratio in ratios("step_vs_plain", shape, *_STEP)[-2:]]
    kernels = [
        ratios("ntk_methods", f"encoder6-{size}", "jx.ntk", other)[-1]
        for size in ("N32-T32", "N32-T64", "N64-T64")
        for other in ("jacobian", "vmap-grad")
    ]
    return table(
        ["what", "measured"],
        [
            ["J u through causal attention, 1,024 tokens, against `torch.func.jvp` of attention "
             "written out",
             f"{faster} times faster (than torch's math backend {fast}), {memory} of its memory"],
            ["a MeanFlow step of a small DiT, against a plain step", f"{step} times as long "
             f"(with `torch.func.jvp` {func})"],
            ["a training step with JacHess, against a plain one",
             f"{_spread(plain)} times as long"],
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
    wide = frame.pivot(index="model", columns="setting", values="result").loc[names[0], names[1]]
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


TABLES: dict[str, Callable[[], str]] = {
    "attention": attention,
    "front": front,
    "steps": steps,
    "sweep": sweep,
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
    for index, (name, label) in enumerate(
        (("forward", "forward"), ("forward + backward", "forward + backward"),
         ("target", "tangent as a target"))
    ):  # fmt: skip
        style = {"color": COLOURS[index + 1], "marker": MARKERS[index + 1], "markersize": 4}
        heights = [
            ratios("jvp", f"H8-T{t}-D64-causal", f"jx.jvp, {name}", "torch.func.jvp, written out")
            for t in _TOKENS
        ]
        time.plot(_TOKENS, [each[-1] for each in heights], label=label, **style)
        saved = [
            1 / ratios("jvp", f"H8-T{t}-D64-causal", f"peak memory: jx.jvp, {name}",
                       "torch.func.jvp")[-1]
            for t in _TOKENS[3:]
        ]  # fmt: skip
        memory.plot(_TOKENS[3:], saved, **style)
    for panel, title in ((time, "times faster"), (memory, "times less memory")):
        panel.axhline(1, color="#999999", linewidth=1, linestyle="--")
        panel.set(title=title, xlabel="tokens", xscale="log", ylim=(0, None))
        panel.minorticks_off()
    time.set_xticks(_TOKENS, [str(t) for t in _TOKENS])
    memory.set_xticks(_TOKENS[3:], [str(t) for t in _TOKENS[3:]])
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
