"""Which models run through the jet engine: in which setting, and of which type.

    python -m benchmarks.models settings
    python -m benchmarks.models types [--only TYPE …] [--again wrong raises untried] [--limit 60]

settings (results/works_with.csv): six tiny models (float32, random weights) in each setting, every
cell tried.  A cell takes ‖J u‖² + ‖J w‖² + ‖D²f[u, w]‖² of the last hidden states, goes backward,
and compares value and gradients with the same model in its plain form (bf16: the float32 one's
value, to 10 %; LoRA: the merged one's; 4-bit and 8-bit, in training mode: that of the one with
dequantised weights).  DDP and FSDP2 run in one process, on gloo: whether several agree is tested in
python_tests/distributed.  compile: one graph (fullgraph), aot_eager.  second backward: a gradient
penalty with ``create_graph=True`` within `jx.differentiable`, and by torch's math attention.
varlen: flash_attention_2 (stand-ins that compute
the same) of a batch with padding, and sdpa.  Functions: activations in an autograd Function that
`jx.forward_code` names.  varlen has no cell of T5, whose attention has a bias, and none of ViT,
whose pictures have no padding.

types (results/model_sweep.csv): every text model type of transformers, tiny, in float64, through
`jx.jet` at order 2.  J u and D²z[u, w] of the last hidden state against two oracles that know the
plain model alone: extrapolated central differences and, where these disagree (they step over the
kinks of ReLUs and of routing), `torch.autograd.grad` twice, contracted with random vectors.  A type
is

    right      J and H agree with the differences to 1e-6 and 1e-5 of their norms, or with autograd
               to 1e-9; the column ``oracle`` says which
    wrong      they agree with neither, at any step or seed
    raises     the plain model runs and the jet does not; the reason
    untried    no tiny model could be built or run, even without jets; the reason

Every type runs in a process of its own, forked from one that has imported transformers, with a time
limit.  Results are written as they come, and a second run goes on from there.  Types that say they
take images, sound or series, or whose model takes no ``inputs_embeds``, are no text models and are
left out.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import multiprocessing
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
import transformers as hf
import tyro
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModel
from transformers.activations import ACT2CLS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING, MODEL_MAPPING_NAMES

import jachess_ext as jx
from python_tests import flash_stand_ins
from python_tests.models import oracles
from python_tests.models.zoo import randomise

from .common import RESULTS, stamped, write_frame

VERSIONS = {"torch": torch.__version__.split("+")[0], "transformers": hf.__version__}

# Settings ---------------------------------------------------------------------------------------

WIDTH = 64
_SIZES = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "BERT": (hf.BertModel, _ENCODER),
    "GPT-2": (hf.GPT2Model, _GPT2 | _TOKENS | {"pad_token_id": None}),
    "Llama": (hf.LlamaModel, _TOKENS | {"num_key_value_heads": 2}),
    "ModernBERT": (hf.ModernBertModel, _TOKENS | {"cls_token_id": 1, "sep_token_id": 2}),
    "T5 encoder": (hf.T5EncoderModel, {"d_kv": 16, "d_ff": 128, "dropout_rate": 0.0}),
    "ViT": (hf.ViTModel, _ENCODER | {"image_size": 8, "patch_size": 4}),
}


class Last(nn.Module):
    """A model as a function from what enters continuously to the last hidden states."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.takes = "pixel_values" if name == "ViT" else "inputs_embeds"
        self.extra = {"use_cache": False} if name in ("GPT-2", "Llama") else {}

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        return self.model(**{self.takes: x}, **self.extra, **inputs).last_hidden_state

    def of(self, model: nn.Module) -> Last:
        """Return the same function of another form of the model."""
        other = copy.copy(self)
        other._modules = {"model": model}
        return other


def penalty(function: Callable[[Tensor], Tensor], x: Tensor, directions: Tensor) -> Tensor:
    """Return ‖J u‖² + ‖J w‖² + ‖D²f[u, w]‖², in the mean over entries."""
    jet = jx.jet(function, x, directions)
    return jet.first.float().square().mean() + jet.second.float().square().mean()


def gradient_penalty(
    context: Callable[[], AbstractContextManager[object]], function: nn.Module, x: Tensor, _: Tensor
) -> Tensor:
    """Return the mean square of a gradient in ``x``, by a backward of a backward."""
    x = x.clone().requires_grad_()
    with context():
        (slope,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
        return slope.square().mean()


def padded_penalty(
    context: Callable[[], AbstractContextManager[object]],
    function: nn.Module,
    x: Tensor,
    directions: Tensor,
) -> Tensor:
    """Return `penalty` of the tokens of a batch whose first row is shorter."""
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    mask[0, 4:] = 0
    with context():
        return penalty(lambda x: function(x, attention_mask=mask)[mask.bool()], x, directions)


class Setting(NamedTuple):
    """How a model is changed, and what it is compared with then.

    Attributes:
        change: from the model to the changed one, and to the one whose value is expected; None: the
            model as it was, whose gradients are compared as well.
        penalty: what is taken of the changed one.
        plain: what is taken of the other.
        without: models that have no such form.
    """

    change: Callable[[Last], tuple[nn.Module, nn.Module | None]]
    tolerance: float = 1e-4
    dtype: torch.dtype = torch.float32
    penalty: Callable[..., Tensor] = penalty
    plain: Callable[..., Tensor] = penalty
    without: tuple[str, ...] = ()


def _lora(last: Last) -> tuple[nn.Module, nn.Module]:
    import peft

    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(last.model, config)  # type: ignore[arg-type]
    merged = copy.deepcopy(adapted).merge_and_unload().requires_grad_()  # type: ignore[operator]
    return last.of(adapted), last.of(merged)


def _quantised(**settings: Any) -> Callable[[Last], tuple[nn.Module, nn.Module]]:
    def change(last: Last) -> tuple[nn.Module, nn.Module]:
        with tempfile.TemporaryDirectory() as folder:
            last.model.save_pretrained(folder)  # type: ignore[operator]
            model: Any = type(last.model).from_pretrained(  # type: ignore[attr-defined]
                folder, device_map="cpu", quantization_config=hf.BitsAndBytesConfig(**settings)
            )
        assert any("bit" in type(m).__name__ for m in model.modules()), "nothing was quantised"
        plain = copy.deepcopy(model).dequantize().float()
        return last.of(model.train()), last.of(plain.train())

    return change


def _checkpointing(last: Last) -> tuple[nn.Module, None]:
    last.model.gradient_checkpointing_enable(  # type: ignore[operator]
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    return last, None


def _ddp(last: Last) -> tuple[nn.Module, None]:
    return nn.parallel.DistributedDataParallel(last, find_unused_parameters=True), None


def _fsdp2(last: Last) -> tuple[nn.Module, None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(last, mesh=init_device_mesh("cpu", (1,)))
    return last, None


def _as_it_is(last: Last) -> tuple[nn.Module, None]:
    return last, None


def _flash_attention(last: Last) -> tuple[nn.Module, None]:
    last.model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    return last.double(), None  # float32 transformers would cast to what FlashAttention takes


class Activation(torch.autograd.Function):
    """An activation as a library of kernels has it; its backward is not asked."""

    @staticmethod
    def forward(ctx: object, x: Tensor, formula: nn.Module) -> Tensor:
        return formula(x)


class Activated(nn.Module):
    """An activation whose formula no transform sees."""

    def __init__(self, formula: nn.Module) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return Activation.apply(x, self.formula)


def _functions(last: Last) -> tuple[nn.Module, None]:
    kinds = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
    replaced = 0
    for module in list(last.modules()):
        for name, part in module.named_children():
            if isinstance(part, kinds):
                setattr(module, name, Activated(part))
                replaced += 1
    assert replaced, "no activation was replaced"
    return last, None


_COMPILED = torch.compile(penalty, backend="aot_eager", fullgraph=True)
SETTINGS = {
    "bf16": Setting(lambda last: (copy.deepcopy(last).bfloat16(), last), 0.1, torch.bfloat16),
    "LoRA": Setting(_lora, 1e-3),
    "4-bit": Setting(_quantised(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32), 1e-3),
    "8-bit": Setting(_quantised(load_in_8bit=True), 1e-3),
    "checkpointing": Setting(_checkpointing),
    "DDP": Setting(_ddp),
    "FSDP2": Setting(_fsdp2),
    "compile": Setting(_as_it_is, penalty=_COMPILED),
    "second backward": Setting(
        _as_it_is,
        penalty=partial(gradient_penalty, jx.differentiable),
        plain=partial(gradient_penalty, partial(sdpa_kernel, SDPBackend.MATH)),
    ),
    "varlen": Setting(
        _flash_attention,
        dtype=torch.float64,
        penalty=partial(padded_penalty, flash_stand_ins.in_transformers),
        plain=partial(padded_penalty, nullcontext),
        without=("T5 encoder", "ViT"),
    ),
    "Functions": Setting(_functions, penalty=jx.forward_code(Activation)(penalty)),
}


def measure(
    function: nn.Module, x: Tensor, directions: Tensor, how: Callable[..., Tensor] = penalty
) -> tuple[float, dict[str, Tensor]]:
    """Return the value, and the gradients by name (full tensors)."""
    value = how(function, x, directions)
    value.backward()
    gradients = {}
    for name, parameter in function.named_parameters():
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            gradients[name.replace("module.", "").replace("base_layer.", "")] = gradient.float()
    return value.item(), gradients


def compare(
    ours: tuple[float, dict[str, Tensor]], plain: tuple[float, dict[str, Tensor]], tolerance: float
) -> str:
    """Return "works", or what differs."""
    if not ours[1]:
        return "does not (no gradient)"
    # not (… <= …), so that NaN is an error
    if not abs(ours[0] - plain[0]) <= tolerance * abs(plain[0]):
        return f"does not (value {ours[0]:.4g}, expected {plain[0]:.4g})"
    for name, gradient in ours[1].items():
        if not torch.isfinite(gradient).all():
            return f"does not (gradient of {name} is not finite)"
        expected = plain[1].get(name)
        if expected is not None:
            error = (gradient - expected).norm() / (expected.norm() + 1e-6)
            if not error <= 10 * tolerance:
                return f"does not (gradient of {name} off by {error.item():.1e})"
    return "works"


def cell(name: str, setting: Setting) -> str:
    """Return "works", or the first words of the error."""
    torch.manual_seed(0)
    kind, own = MODELS[name]
    last = Last(kind(kind.config_class(**_SIZES | own)).train(), name)  # every dropout rate is zero
    shape = (2, 3, 8, 8) if name == "ViT" else (2, 6, WIDTH)
    x, u = torch.randn(shape), torch.randn(2, *shape)
    torch._dynamo.reset()
    try:
        plain = measure(copy.deepcopy(last), x, u, setting.plain)
        changed, expected = setting.change(last)
        ours = measure(changed, x.to(setting.dtype), u.to(setting.dtype), setting.penalty)
        if expected is not None:
            plain = measure(expected, x, u)[0], {}
        return compare(ours, plain, setting.tolerance)
    except Exception as error:
        return f"does not ({type(error).__name__}: {' '.join(str(error).split())[:100]})"


def settings(
    models: tuple[str, ...] = tuple(MODELS),
    only: tuple[str, ...] = tuple(SETTINGS),
    results: Path = RESULTS,
) -> None:
    """Try every model in every setting, print and write.

    Args:
        models: of `MODELS`.
        only: settings, of `SETTINGS`.
        results: folder of the csv.
    """
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    dist.init_process_group("gloo", rank=0, world_size=1)
    rows = []
    for name in models:
        for setting in (s for s in only if name not in SETTINGS[s].without):
            result = cell(name, SETTINGS[setting])
            rows.append({"model": name, "setting": setting, "result": result})
            print(f"{name}, {setting}: {result}", flush=True)
    dist.destroy_process_group()
    write_frame(pd.DataFrame(rows).assign(**stamped(), **VERSIONS), results / "works_with.csv")


# Types ------------------------------------------------------------------------------------------

RECIPES = json.loads(Path(__file__).with_name("model_recipes.json").read_text(encoding="utf-8"))
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


def types(
    only: tuple[str, ...] = (),
    again: tuple[str, ...] = (),
    limit: float = 60.0,
    results: Path = RESULTS,
) -> None:
    """Try every text model type that has no result yet, print and write as they come.

    Args:
        only: these types alone, those with a result as well.
        again: types with these results are tried once more: wrong, raises, untried.
        limit: seconds for a type.
        results: folder of the csv.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    path = results / "model_sweep.csv"
    rows: dict[str, dict[str, str]] = {}
    if path.exists():
        known = pd.read_csv(path, keep_default_na=False, index_col="type", dtype=str)
        rows = known.to_dict("index")  # type: ignore[assignment]
    for kind in MODEL_MAPPING_NAMES:
        if kind not in CONFIG_MAPPING or (only and kind not in only):
            continue
        if kind in rows and not only and rows[kind]["result"] not in again:
            continue
        rows[kind] = in_a_process(kind, limit)._asdict() | VERSIONS
        frame = pd.DataFrame.from_dict(rows, "index").sort_index()
        write_frame(frame.rename_axis("type").reset_index(), path)
        print(kind, *rows[kind].values(), flush=True)


def types_page(rows: pd.DataFrame) -> str:
    """Return all types by their results, as Markdown; rows as they are in the csv."""
    texts = rows[rows.result.isin(KINDS)]
    counts = Counter(texts.result)
    tried = sum(counts[kind] for kind in KINDS[:3])
    share = 100 * counts["right"] / max(1, tried)
    versions = (f"{name} {', '.join(sorted(set(texts[name])))}" for name in reversed(VERSIONS))
    lines = [
        "# Text model types of transformers through `jx.jet`",
        "",
        f"{', '.join(versions)}; tiny, float64, order 2; `python -m benchmarks.models types` says "
        "what is compared.",
        "",
        f"{tried} types tried, {counts['right']} right ({share:.1f} %), {counts['wrong']} wrong, "
        f"{counts['raises']} refused or raised; {counts['untried']} untried.",
    ]
    for result in KINDS[1:]:
        of = texts[texts.result == result]
        if len(of):
            lines += ["", f"## {result.capitalize()}", "", "| type | reason |", "|---|---|"]
            lines += [f"| {row.type} | {row.reason.replace('|', '/')} |" for row in of.itertuples()]
    for oracle in (DIFFERENCES, AUTOGRAD):
        right = texts[(texts.result == "right") & (texts.oracle == oracle)].type
        lines += ["", f"## Right, by {oracle}: {len(right)}", "", ", ".join(right)]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parts = {"settings": settings, "types": types}
    tyro.extras.subcommand_cli_from_dict(parts, description=__doc__)
