"""The PAC-Bayesian bound of LensLLM and its phases, over the number of training examples.

The demo's encoder is fine-tuned on more and more sentences.  After each run the three terms of the
bound are computed from the Hessian of every layer, and the loss of other sentences is measured.

python examples/pac_bayes_phases.py [--tiny] [--out phases.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import jachess_ext as jx
from jachess_ext.lab.demo import ASSETS, docstring_task
from jachess_ext.lab.workbench.models import encode, load_model, load_tokenizer
from jachess_ext.lab.workbench.page import COLOURS, MARKERS, panels
from jachess_ext.lab.workbench.settings import Recipe
from jachess_ext.lab.workbench.training import fine_tune

COLUMNS = {
    "empirical": "(1 + ε) L̂",
    "curvature": "(1 + ε) √C Σ√h / √n",
    "remainder": "n^(−3/4)",
    "bound": "bound",
    "dev": "dev loss",
}


def main() -> None:
    """Prints the terms for every number of examples, and draws them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="two small sizes: does it run?")
    parser.add_argument("--out", type=Path, help="file for a picture")
    options = parser.parse_args()
    sizes = (12, 24) if options.tiny else (25, 50, 100, 200, 400, 800)
    examples, steps, epochs = (2, 2, 1) if options.tiny else (6, 8, 5)
    task, tokenizer = docstring_task(max(sizes), 240), load_tokenizer(ASSETS)
    dev = encode(task.dev, tokenizer, 48)
    rows = []
    for size in sizes:
        model = load_model(ASSETS, task.outputs, tokenizer, 0)
        # The new head has a value before training too: the prior of a PAC-Bayesian bound may be
        # random, as long as it does not depend on the data.
        before = {name: value.clone() for name, value in model.state_dict().items()}
        train = encode(task.train.slice(0, size), tokenizer, 48)
        fine_tune(model, train, Recipe(epochs=epochs, batch_size=8, lr=5e-4), seed=0)
        model.eval()
        with torch.no_grad():
            dev_loss = float(model(**dev.batch(range(len(task.dev)))).loss)
        batches = [train.batch([index]) for index in range(examples)]
        bound = jx.scaling.pac_bayes_bound(model, before, batches, size, steps=steps)
        terms = {name: getattr(bound, name) for name in ("empirical", "curvature", "remainder")}
        rows.append(terms | {"bound": bound.total, "dev": dev_loss})
        figures = ", ".join(f"{COLUMNS[name]} {value:.3g}" for name, value in rows[-1].items())
        print(f"n = {size}: {figures}; {bound.phase}", flush=True)
    # The theorem leaves the factor of n^(−3/4) open: with this one the phases meet at a size.
    factors = [row["curvature"] / row["remainder"] for row in rows]
    print(f"factor of n^(−3/4) at which the terms are equal: {factors[0]:.3g} … {factors[-1]:.3g}")
    if options.out is not None:
        figure, (axis,) = panels(width=5.0, height=3.6)
        for (name, label), colour, marker in zip(COLUMNS.items(), COLOURS, MARKERS, strict=False):
            heights = [row[name] for row in rows]
            axis.plot(sizes, heights, color=colour, marker=marker, label=label)
        axis.set(xscale="log", yscale="log", xlabel="training examples n")
        axis.set_xticks(sizes, map(str, sizes))
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=8)
        figure.savefig(options.out)


if __name__ == "__main__":
    main()
