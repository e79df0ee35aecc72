"""How the demo's learning rate, strength and form were chosen: on training files only.

Takes sentences of the demo's training split, trains on some and judges on others, for each setting
asked for. The demo's dev split is never read.

    python examples/choose_demo_recipe.py --lr 5e-4 --strength 0.03 0.1 0.3 --seeds 2
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from jachess_ext.compare.judge import judge
from jachess_ext.compare.metrics import ACCURACY
from jachess_ext.compare.models import encode, load_model, load_tokenizer
from jachess_ext.compare.tasks import Examples
from jachess_ext.demo.data import ASSETS
from jachess_ext.demo.finetune import Trainer, finetune_in_turns
from jachess_ext.demo.judge import CONDITIONS
from jachess_ext.demo.options import Method, Options, Recipe
from jachess_ext.demo.text import PACKAGES, is_dev_file, load_text_task
from jachess_ext.smoothness.corruption import embedding_scale


def training_text(train: int, unlabelled: int, judged: int) -> tuple[Examples, ...]:
    """Disjoint parts of the training split; those judged are from files of their own."""
    found = load_text_task(train + unlabelled + 3 * judged, 6, PACKAGES).train
    assert not any(is_dev_file(*file.split("/", 1)) for file in found.files)
    held: set[str] = set()
    for file in sorted(set(found.files), key=lambda name: hash_of(name)):
        if sum(name in held for name in found.files) >= judged:
            break
        held.add(file)
    inside = [i for i, file in enumerate(found.files) if file not in held]
    outside = [i for i, file in enumerate(found.files) if file in held][:judged]

    def pick(indices: list[int]) -> Examples:
        return Examples([found.texts[i] for i in indices], None, [found.labels[i] for i in indices])

    return pick(inside[:train]), pick(inside[train : train + unlabelled]), pick(outside)


def hash_of(name: str) -> str:
    """An order of files unlike that of the split."""
    return name[::-1]


def main() -> None:
    """Prints one line a setting: means over seeds of the judged figures."""
    defaults = Options()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(ASSETS))
    parser.add_argument("--method", nargs="+", default=["none", "train", "unlab"])
    parser.add_argument("--lr", nargs="+", type=float, default=[Recipe.lr])
    parser.add_argument("--strength", nargs="+", type=float, default=[Recipe.strength])
    parser.add_argument("--form", nargs="+", default=["joint"])
    parser.add_argument("--weights", nargs="+", default=[Recipe.weights])
    parser.add_argument("--steps", nargs="+", type=int, default=[Recipe.steps])
    parser.add_argument("--batch-size", type=int, default=Recipe.batch_size)
    parser.add_argument("--train-size", type=int, default=defaults.train_size)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.model)
    parts = training_text(args.train_size, defaults.unlabelled_size, 600)
    train, unlabelled, judged = (encode(p, tokenizer, defaults.max_length) for p in parts)
    print(f"{len(train)} training, {len(unlabelled)} unlabelled, {len(judged)} judged sentences")
    grid = product(args.method, args.lr, args.strength, args.form, args.weights, args.steps)
    done = set()
    for method, lr, strength, form, weights, steps in grid:
        if method == "none":
            strength, form, weights = 0.0, "-", "-"
        elif method == "train":
            form = "-"
        if (method, lr, strength, form, weights, steps) in done:
            continue
        done.add((method, lr, strength, form, weights, steps))
        recipe = replace(
            Recipe(batch_size=args.batch_size, steps=steps, lr=lr),
            strength=strength,
            form="alternating" if form == "alternating" else "joint",
            weights="softmax" if weights == "-" else weights,
        )
        figures = [
            one(method, recipe, seed, args.model, tokenizer, train, unlabelled, judged)
            for seed in range(args.seeds)
        ]
        mean = np.mean(figures, axis=0)
        print(
            f"{method:6} lr {lr:g} strength {strength:g} {form} {weights} steps {steps}: "
            + " ".join(f"{n} {v:.3f}" for n, v in zip(NAMES, mean[:7], strict=True))
            + f" sumJ {mean[7]:.0f} sumH {mean[8]:.0f} last loss {mean[9]:.3f}",
            flush=True,
        )


NAMES = ("acc", "brier", "ece", "corrupt10", "corrupt20", "noise1", "noise2")


def one(  # type: ignore[no-untyped-def]
    method: Method, recipe: Recipe, seed: int, source: str, tokenizer, train, unlabelled, judged
) -> list[float]:
    """Figures of one model, in the order of `NAMES`, then Σ‖J‖, Σ‖H‖ and the last task losses."""
    model = load_model(source, len(PACKAGES), tokenizer, seed)
    scale = embedding_scale(model)
    trainer = Trainer(model, method, recipe, train, unlabelled, seed)
    (log,) = finetune_in_turns([trainer], lambda: None)
    found = judge(model, judged, ACCURACY, scale, CONDITIONS)
    last = float(np.mean([step["task"] for step in log.losses[-20:]]))
    return [
        *(found[name] for name in ("score", "brier", "ece")),
        *(*found["corrupted"].values(), *list(found["noisy"].values())[-2:]),
        *(sum(found["jacobian"]), sum(found["hessian"]), last),
    ]


if __name__ == "__main__":
    main()
