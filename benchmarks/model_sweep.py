"""Every text model type of transformers, tiny, in float64, through `jx.jet` at order 2.

    python -m benchmarks.model_sweep [--only TYPE ...] [--again wrong raises untried] [--limit 60]

J u and D²z[u, w] of the last hidden state against two oracles that know the plain model alone:
extrapolated central differences and, where these disagree (they step over the kinks of ReLUs and of
routing), `torch.autograd.grad` twice, contracted with random vectors.  A type is

    right      J and H agree with the differences to 1e-6 and 1e-5 of their norms, or with autograd
               to 1e-9; the column ``oracle`` says which
    wrong      they agree with neither, at any step or seed
    raises     the plain model runs and the jet does not; the reason
    untried    no tiny model could be built or run, even without jets; the reason

Every type runs in a process of its own, forked from one that has imported transformers, with a time
limit.  Results go to results/model_sweep.csv as they come, and a second run goes on from there;
results/model_sweep.md is the table.  Types that say they take images, sound or series, or
whose model takes no ``inputs_embeds``, are no text models and are left out.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import multiprocessing
import warnings
from collections import Counter
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

import pandas as pd
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING, MODEL_MAPPING_NAMES

import jachess_ext as jx
from jachess_ext._io import write_text
from python_tests.models import oracles
from python_tests.models.zoo import randomise

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "model_sweep.csv"
RECIPES = json.loads((HERE / "model_recipes.json").read_text(encoding="utf-8"))
"""Settings that make a model tiny: "general" ones by the names that a configuration knows, and, of
"types" that those do not build, their own."""
INPUTS: dict[str, dict[str, Any]] = {
    "bros": {"bbox": torch.linspace(0, 1, 2 * 6 * 4, dtype=torch.float64).view(2, 6, 4)},
    "fsmt": {"input_ids": None},
}
"""What a model wants beside its embeddings."""
KINDS = ("right", "wrong", "raises", "untried")
OTHER_INPUTS = ("vision", "audio", "image", "pixel", "speech", "video", "codec", "patch_size")
BATCH, TOKENS = 2, 6
STEPS = (oracles.SMOOTH, oracles.KINKED, oracles.Steps(1e-3, 2e-3))
SEEDS = 4
PROBES = 3  # random vectors that what autograd gives is contracted with
DIFFERENCES, AUTOGRAD = "differences", "reverse over reverse"


class NoTextError(Exception):
    """The type is no text model."""


class Verdict(NamedTuple):
    """What is written about a type: one of `KINDS` (or "no text"), why, and what says so."""

    result: str
    reason: str = ""
    oracle: str = ""


def tiny_config(kind: str) -> Any:
    known = CONFIG_MAPPING[kind]
    default = known()
    names = set(default.to_dict()) | set(known.attribute_map)
    if any(part in name for name in names for part in OTHER_INPUTS):
        raise NoTextError
    classes = MODEL_MAPPING[known]
    for model in classes if isinstance(classes, tuple) else (classes,):
        if model.input_modalities not in ("text", ("text",)):
            raise NoTextError
    settings = {name: value for name, value in RECIPES["general"].items() if name in names}
    no_dropout = [n for n in names if "dropout" in n and isinstance(getattr(default, n, 0), float)]
    settings |= dict.fromkeys(no_dropout, 0.0)
    config = known(**settings | RECIPES["types"].get(kind, {}))
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
    """Return the last hidden state as a function of ``[B, T, d]``, an encoder's and decoder's."""
    taken = inspect.signature(model.forward).parameters
    settings = {"use_cache": False} if "use_cache" in taken else {}
    extra = INPUTS.get(model.config.model_type, {})

    def run(x: Any) -> tuple[Any]:
        inputs = {**extra, "inputs_embeds": x.clone()}  # CTRL writes into it
        if "decoder_inputs_embeds" in taken:
            inputs["decoder_inputs_embeds"] = x.clone()
        output = model(**inputs, **settings, return_dict=True)
        hidden = getattr(output, "last_hidden_state", None)
        return (output[0] if hidden is None else hidden,)

    return run


def _width(model: nn.Module) -> int:
    try:
        return model.get_input_embeddings().weight.shape[1]
    except NotImplementedError:  # CANINE hashes its characters
        return model.config.hidden_size


def judge(kind: str) -> Verdict:
    """Return what is written about a type."""
    worst = ""
    for seed in range(SEEDS):
        try:
            with oracles.Float64Casts():
                model = tiny_model(kind, seed)
                width = _width(model)
                torch.manual_seed(100 + seed)
                x, u, w = torch.randn(3, BATCH, TOKENS, width, dtype=torch.float64)
                function = of_embeddings(model)
                with torch.no_grad():
                    plain = function(x)[0]
        except NoTextError:
            return Verdict("no text")
        except Exception as error:
            return Verdict("untried", _sentence(error))
        if not plain.isfinite().all():
            return Verdict("untried", "the plain model gives NaN")
        try:
            with oracles.Float64Casts(), torch.no_grad():
                (jet,) = jx.jet(function, x, torch.stack([u, w]))
        except Exception as error:
            return Verdict("raises", _sentence(error))
        if oracles.relative_error(jet.primal, plain) > 1e-10:
            return Verdict("wrong", "the value differs")
        by_differences = _differences(jet, function, x, u, w)
        if by_differences is None:
            return Verdict("right", oracle=DIFFERENCES)
        by_autograd = _autograd(jet, function, x, u, w)
        if by_autograd is None:
            return Verdict("right", oracle=AUTOGRAD)
        worst = f"{by_differences}; {by_autograd}"
    return Verdict("wrong", worst)


def _differences(jet: Any, function: Any, x: Tensor, u: Tensor, w: Tensor) -> str | None:
    """Return None where a jet agrees with differences, else by how much it does not."""
    differ = ""
    for steps in STEPS:
        with oracles.Float64Casts():
            first = oracles.first_difference(function, x, u, steps)[0]
            second = oracles.mixed_difference(function, x, u, w, steps)[0]
        first_error = oracles.relative_error(jet.first[0], first)
        scale = max(second.norm().item(), 1e-3 * first.norm().item())
        second_error = (jet.second[0] - second).norm().item() / scale
        if first_error < 1e-6 and second_error < 1e-5:
            return None
        differ = differ or f"J off by {first_error:.1e}, H by {second_error:.1e}"
    return differ


def _autograd(jet: Any, function: Any, x: Tensor, u: Tensor, w: Tensor) -> str | None:
    """Return None where a jet agrees with autograd, else by how much it does not."""
    parts = jet.first[0], jet.second[0]
    worst = [0.0, 0.0]
    for _ in range(PROBES):
        v = torch.randn_like(parts[0])
        try:
            with oracles.Float64Casts():
                expected = oracles.reverse_over_reverse(function, x, u, w, (v,))
        except Exception as error:
            return f"autograd: {_sentence(error)}"
        for n, (part, (scalar,)) in enumerate(zip(parts, expected, strict=True)):
            size = v.norm() * max(part.norm(), 1e-3 * parts[0].norm())
            error = ((v * part).sum() - scalar).abs() / size
            worst[n] = max(worst[n], math.inf if error.isnan() else error.item())
    return f"from autograd: J {worst[0]:.1e}, H {worst[1]:.1e}" if max(worst) >= 1e-9 else None


def _sentence(error: Exception) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {' '.join(text.split())[:160]}"


# ---- all types -----------------------------------------------------------------------------------


def _child(kind: str, queue: Any) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    queue.put(judge(kind))


def in_a_process(kind: str, limit: float) -> Verdict:
    forks = multiprocessing.get_context("fork")
    queue = forks.Queue()
    process = forks.Process(target=_child, args=(kind, queue), daemon=True)
    process.start()
    try:
        return queue.get(timeout=limit)
    except Empty:
        return Verdict("untried", f"not done within {limit:.0f} s")
    finally:
        process.kill()
        process.join()


def load() -> dict[str, Verdict]:
    if not RESULTS.exists():
        return {}
    rows = pd.read_csv(RESULTS, keep_default_na=False, index_col="type").itertuples()
    return {row.Index: Verdict(row.result, row.reason, row.oracle) for row in rows}


def save(verdicts: dict[str, Verdict]) -> None:
    frame = pd.DataFrame.from_dict(verdicts, "index", columns=Verdict._fields).sort_index()
    write_text(RESULTS, frame.to_csv(index_label="type"))
    write_text(RESULTS.with_suffix(".md"), table(verdicts))


def table(verdicts: dict[str, Verdict]) -> str:
    texts = {kind: row for kind, row in verdicts.items() if row.result in KINDS}
    counts = Counter(row.result for row in texts.values())
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
        rows = sorted(kind for kind in texts if texts[kind].result == result)
        if rows:
            lines += ["", f"## {result.capitalize()}", "", "| type | reason |", "|---|---|"]
            lines += [f"| {kind} | {texts[kind].reason.replace('|', '/')} |" for kind in rows]
    for oracle in (DIFFERENCES, AUTOGRAD):
        right = sorted(kind for kind in texts if texts[kind][::2] == ("right", oracle))
        lines += ["", f"## Right, by {oracle}: {len(right)}", "", ", ".join(right)]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=(), help="model types")
    parser.add_argument("--again", nargs="*", default=(), choices=KINDS, help="results to redo")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a type")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    verdicts = load()
    for kind in MODEL_MAPPING_NAMES:
        if kind not in CONFIG_MAPPING or (given.only and kind not in given.only):
            continue
        if kind in verdicts and not given.only and verdicts[kind].result not in given.again:
            continue
        verdicts[kind] = in_a_process(kind, given.limit)
        save(verdicts)
        print(kind, *verdicts[kind], flush=True)


if __name__ == "__main__":
    main()
