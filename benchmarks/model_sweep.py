"""Every text model type of transformers, tiny, in float64, through `jx.jet` at order 2.

    python -m benchmarks.model_sweep [--only TYPE ...] [--again wrong raises untried] [--limit 60]

J u and D²z[u, w] of the last hidden state against extrapolated central differences of the plain
model.  A type is

    right      both agree: to 1e-6 and 1e-5 of their norms
    wrong      they do not, at any step or seed
    raises     the plain model runs and the jet does not; the reason
    untried    no tiny model could be built or run, even without jets; the reason

Every type runs in a process of its own, forked from one that has imported transformers, with a time
limit.  Results go to results/model_sweep.csv as they come, and a second run goes on from there;
results/model_sweep.md is the table.  Types whose configuration holds images or sound, or whose
model takes no ``inputs_embeds``, are no text models and are left out.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import io
import multiprocessing
import warnings
from collections import Counter
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import jachess_ext as jx
from jachess_ext.evaluation.files import write_atomically
from python_tests.models import oracles
from python_tests.models.zoo import randomise

from .model_recipes import GENERAL, RECIPES

RESULTS = Path(__file__).parent / "results" / "model_sweep.csv"
KINDS = ("right", "wrong", "raises", "untried")
OTHER_INPUTS = ("vision", "audio", "image", "pixel", "speech", "video", "codec", "patch_size")
BATCH, TOKENS = 2, 6
STEPS = (oracles.SMOOTH, oracles.KINKED, oracles.Steps(1e-3, 2e-3))
SEEDS = 4


class NoTextError(Exception):
    """The type is no text model."""


def tiny_config(kind: str) -> Any:
    known = CONFIG_MAPPING[kind]
    default = known()
    names = set(default.to_dict()) | set(known.attribute_map)
    if any(part in name for name in names for part in OTHER_INPUTS):
        raise NoTextError
    settings = {name: value for name, value in GENERAL.items() if name in names}
    no_dropout = [n for n in names if "dropout" in n and isinstance(getattr(default, n, 0), float)]
    settings |= dict.fromkeys(no_dropout, 0.0)
    config = known(**settings | RECIPES.get(kind, {}))
    config._experts_implementation = "eager"
    return config


def tiny_model(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = tiny_config(kind)
    try:
        model = AutoModel.from_config(config, attn_implementation="eager")
    except ValueError:
        model = AutoModel.from_config(config)
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        raise NoTextError
    randomise(model)
    return model.double().eval()


def of_embeddings(model: nn.Module) -> Any:
    """The last hidden state as a function of ``[B, T, d]``; an encoder's and its decoder's."""
    taken = inspect.signature(model.forward).parameters
    settings = {"use_cache": False} if "use_cache" in taken else {}

    def run(x: Any) -> tuple[Any]:
        inputs = {"inputs_embeds": x.clone()}  # CTRL writes into it
        if "decoder_inputs_embeds" in taken:
            inputs["decoder_inputs_embeds"] = x.clone()
        found = model(**inputs, **settings, return_dict=True)
        hidden = getattr(found, "last_hidden_state", None)
        return (found[0] if hidden is None else hidden,)

    return run


def judge(kind: str) -> tuple[str, str]:
    """One of `KINDS`, and what is to be said."""
    worst = ""
    for seed in range(SEEDS):
        try:
            with oracles.Float64Casts():
                model = tiny_model(kind, seed)
                width = model.get_input_embeddings().weight.shape[1]
                torch.manual_seed(100 + seed)
                x, u, w = torch.randn(3, BATCH, TOKENS, width, dtype=torch.float64)
                function = of_embeddings(model)
                with torch.no_grad():
                    plain = function(x)[0]
        except NoTextError:
            return "no text", ""
        except Exception as error:
            return "untried", _sentence(error)
        if not plain.isfinite().all():
            return "untried", "the plain model gives NaN"
        try:
            with oracles.Float64Casts(), torch.no_grad():
                (jet,) = jx.jet(function, x, torch.stack([u, w]))
        except Exception as error:
            return "raises", _sentence(error)
        errors = _errors(jet, plain, function, x, u, w)
        if errors is None:
            return "right", ""
        worst = errors
    return "wrong", worst


def _errors(jet: Any, plain: Tensor, function: Any, x: Tensor, u: Tensor, w: Tensor) -> str | None:
    if oracles.relative_error(jet.primal, plain) > 1e-10:
        return "the value differs"
    said = ""
    for steps in STEPS:
        with oracles.Float64Casts():
            first = oracles.first_difference(function, x, u, steps)[0]
            second = oracles.mixed_difference(function, x, u, w, steps)[0]
        one = oracles.relative_error(jet.first[0], first)
        scale = max(second.norm().item(), 1e-3 * first.norm().item())
        two = (jet.second[0] - second).norm().item() / scale
        if one < 1e-6 and two < 1e-5:
            return None
        said = said or f"J off by {one:.1e}, H by {two:.1e}"
    return said


def _sentence(error: Exception) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {' '.join(text.split())[:160]}"


# ---- all types -----------------------------------------------------------------------------------


def _child(kind: str, queue: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    queue.put(judge(kind))


def in_a_process(kind: str, limit: float) -> tuple[str, str]:
    forks = multiprocessing.get_context("fork")
    queue = forks.Queue()
    process = forks.Process(target=_child, args=(kind, queue), daemon=True)
    process.start()
    try:
        return queue.get(timeout=limit)
    except Empty:
        return "untried", f"not done within {limit:.0f} s"
    finally:
        process.kill()
        process.join()


def load() -> dict[str, tuple[str, str]]:
    if not RESULTS.exists():
        return {}
    rows = csv.DictReader(io.StringIO(RESULTS.read_text()))
    return {row["type"]: (row["result"], row["reason"]) for row in rows}


def save(found: dict[str, tuple[str, str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["type", "result", "reason"])
    writer.writerows([kind, *found[kind]] for kind in sorted(found))
    write_atomically(RESULTS, text.getvalue())
    write_atomically(RESULTS.with_suffix(".md"), table(found))


def table(found: dict[str, tuple[str, str]]) -> str:
    texts = {kind: pair for kind, pair in found.items() if pair[0] in KINDS}
    counts = Counter(result for result, _ in texts.values())
    tried = sum(counts[kind] for kind in KINDS[:3])
    share = 100 * counts["right"] / max(1, tried)
    lines = [
        "# Text model types of transformers through `jx.jet`",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}; tiny, "
        "float64, order 2; `python -m benchmarks.model_sweep` says what is compared.",
        "",
        f"{tried} types tried, {counts['right']} right ({share:.1f} %), {counts['wrong']} wrong, "
        f"{counts['raises']} refused or raised; {counts['untried']} untried.",
    ]
    for result in KINDS[1:]:
        rows = sorted(kind for kind in texts if texts[kind][0] == result)
        if rows:
            lines += ["", f"## {result.capitalize()}", "", "| type | reason |", "|---|---|"]
            lines += [f"| {kind} | {texts[kind][1].replace('|', '/')} |" for kind in rows]
    right = sorted(kind for kind in texts if texts[kind][0] == "right")
    lines += ["", "## Right", "", ", ".join(right), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=(), help="model types")
    parser.add_argument("--again", nargs="*", default=(), choices=KINDS, help="results to redo")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a type")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = load()
    for kind in MODEL_MAPPING_NAMES:
        if kind not in CONFIG_MAPPING or (given.only and kind not in given.only):
            continue
        if kind in found and not given.only and found[kind][0] not in given.again:
            continue
        found[kind] = in_a_process(kind, given.limit)
        save(found)
        print(kind, *found[kind], flush=True)


if __name__ == "__main__":
    main()
