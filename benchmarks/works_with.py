"""Which models the jet engine runs through in which setting: a table, every cell tried.

python -m benchmarks.works_with [--out benchmarks/results/works_with.md]

A cell takes ‖J u‖² + ‖D²f[u, w]‖² of the last hidden states of a tiny model (float32, random
weights), goes backward, and compares value and gradients with the same model in its plain form
(bf16: the float32 one, to 10 %; LoRA: the merged one; 4-bit and 8-bit, in training mode: the one
with dequantised weights). DDP and FSDP2 run in one process, on gloo: whether
several agree is tested in python_tests/distributed. compile: one graph (fullgraph), aot_eager.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn

import jachess_ext as jx

from .common import commit

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
MODELS: dict[str, Callable[[], tuple[type, Any]]] = {
    "BERT": lambda: (hf.BertModel, hf.BertConfig(**_SIZES, **_ENCODER)),
    "GPT-2": lambda: (
        hf.GPT2Model,
        hf.GPT2Config(
            vocab_size=32,
            n_embd=WIDTH,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **{**_TOKENS, "pad_token_id": None},
        ),
    ),
    "Llama": lambda: (hf.LlamaModel, hf.LlamaConfig(**_SIZES, num_key_value_heads=2, **_TOKENS)),
    "ModernBERT": lambda: (
        hf.ModernBertModel,
        hf.ModernBertConfig(**_SIZES, **_TOKENS, cls_token_id=1, sep_token_id=2),
    ),
    "T5 encoder": lambda: (
        hf.T5EncoderModel,
        hf.T5Config(
            vocab_size=32, d_model=WIDTH, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            dropout_rate=0.0,
        ),
    ),
    "ViT": lambda: (
        hf.ViTModel,
        hf.ViTConfig(
            **{k: v for k, v in _SIZES.items() if k != "vocab_size"},
            **_ENCODER, image_size=8, patch_size=4,
        ),
    ),
}  # fmt: skip


class Last(nn.Module):
    """A model as a function from what enters continuously to the last hidden states."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.takes = "pixel_values" if name == "ViT" else "inputs_embeds"
        self.extra = {"use_cache": False} if name in ("GPT-2", "Llama") else {}

    def forward(self, x: Tensor) -> Tensor:
        return self.model(**{self.takes: x}, **self.extra).last_hidden_state


def penalty(function: nn.Module, x: Tensor, directions: Tensor) -> Tensor:
    """‖J u‖² + ‖J w‖² + ‖D²f[u, w]‖², in the mean over entries."""
    jet = jx.jet(function, x, directions)
    return jet.first.float().square().mean() + jet.second.float().square().mean()


def measure(function: nn.Module, x: Tensor, directions: Tensor, how: Any = penalty) -> tuple:
    """The value, and the gradients by name (full tensors)."""
    value = how(function, x, directions)
    value.backward()
    gradients = {}
    for name, parameter in function.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            gradients[name.replace("module.", "").replace("base_layer.", "")] = gradient.float()
    return value.item(), gradients


def compare(ours: tuple, plain: tuple, tolerance: float) -> str:
    """works, or what differs."""
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


def _bf16(model: nn.Module, name: str, x: Tensor, u: Tensor) -> str:
    plain = measure(Last(copy.deepcopy(model), name), x, u)[0], {}
    ours = measure(Last(model.bfloat16(), name), x.bfloat16(), u.bfloat16())
    return compare(ours, plain, 0.1)


def _lora(model: nn.Module, name: str, x: Tensor, u: Tensor) -> str:
    import peft

    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    ours = measure(Last(adapted, name), x, u)
    merged = measure(Last(copy.deepcopy(adapted).merge_and_unload().requires_grad_(), name), x, u)
    return compare(ours, (merged[0], {}), 1e-3)


def _quantised(bits: int) -> Callable[[nn.Module, str, Tensor, Tensor], str]:
    def run(model: nn.Module, name: str, x: Tensor, u: Tensor) -> str:
        settings: dict[str, Any] = {"load_in_8bit": True}
        if bits == 4:
            settings = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            quantised = type(model).from_pretrained(
                folder, device_map="cpu", quantization_config=hf.BitsAndBytesConfig(**settings)
            )
        assert any("bit" in type(m).__name__ for m in quantised.modules()), "nothing was quantised"
        ours = measure(Last(quantised.train(), name), x, u)
        plain = measure(Last(quantised.dequantize().float().train(), name), x, u)
        return compare(ours, (plain[0], {}), 1e-3)

    return run


def _checkpointing(model: nn.Module, name: str, x: Tensor, u: Tensor) -> str:
    plain = measure(Last(copy.deepcopy(model), name), x, u)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return compare(measure(Last(model, name), x, u), plain, 1e-4)


def _ddp(model: nn.Module, name: str, x: Tensor, u: Tensor) -> str:
    plain = measure(Last(copy.deepcopy(model), name), x, u)
    last = Last(model, name)
    wrapped = nn.parallel.DistributedDataParallel(last, find_unused_parameters=True)
    value, gradients = measure(wrapped, x, u)
    short = {key.removeprefix("module."): gradient for key, gradient in gradients.items()}
    return compare((value, short), plain, 1e-4)


def _fsdp2(model: nn.Module, name: str, x: Tensor, u: Tensor) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = measure(Last(copy.deepcopy(model), name), x, u)
    last = Last(model, name)
    fully_shard(last, mesh=init_device_mesh("cpu", (1,)))
    return compare(measure(last, x, u), plain, 1e-4)


def _compile(model: nn.Module, name: str, x: Tensor, u: Tensor) -> str:
    plain = measure(Last(copy.deepcopy(model), name), x, u)
    torch._dynamo.reset()
    compiled = torch.compile(penalty, backend="aot_eager", fullgraph=True)
    return compare(measure(Last(model, name), x, u, compiled), plain, 1e-4)


SETTINGS = {
    "bf16": _bf16,
    "LoRA": _lora,
    "4-bit": _quantised(4),
    "8-bit": _quantised(8),
    "checkpointing": _checkpointing,
    "DDP": _ddp,
    "FSDP2": _fsdp2,
    "compile": _compile,
}


def cell(name: str, setting: str) -> str:
    """works, or why not in the first words of the error."""
    torch.manual_seed(0)
    kind, config = MODELS[name]()
    model = kind(config).train()  # every dropout rate is zero
    shape = (2, 3, 8, 8) if name == "ViT" else (2, 6, WIDTH)
    x, u = torch.randn(shape), torch.randn(2, *shape)
    try:
        return SETTINGS[setting](model, name, x, u)
    except Exception as error:
        return f"does not ({type(error).__name__}: {str(error).splitlines()[0][:100]})"


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    dist.init_process_group("gloo", rank=0, world_size=1)
    rows = ["| | " + " | ".join(SETTINGS) + " |", "|---" * (len(SETTINGS) + 1) + "|"]
    for name in MODELS:
        cells = []
        for setting in SETTINGS:
            start = time.perf_counter()
            cells.append(cell(name, setting))
            took = time.perf_counter() - start
            print(f"{name}, {setting}: {cells[-1]} ({took:.0f} s)", flush=True)
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    dist.destroy_process_group()
    print("\n".join(rows))
    if options.out:
        head = (
            f"`python -m benchmarks.works_with` at {commit()}, torch {torch.__version__}, "
            f"transformers {hf.__version__}, on the CPU: tiny models, every cell tried in this "
            "run.\n\n"
        )
        options.out.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
