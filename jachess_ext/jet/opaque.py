"""autograd Functions, which a jet cannot enter: who calls one, and what helps where it is known.

An autograd Function runs its forward without gradients and asks its own backward for them.  A jet
has neither the one nor the other in a form that the Function knows: what came out would have lost
its gradients, so the pass stops, and says which library and which setting it is about.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

_CHECKPOINT = CheckpointFunction.forward.__code__
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]

# Part of the module of a Function (or of the name of an operator) → the library, and what helps.
_LIBRARIES = {
    "flash_attn": (
        "FlashAttention",
        'load the model with from_pretrained(..., attn_implementation="sdpa"), or call '
        'model.set_attn_implementation("sdpa")',
    ),
    "xformers": (
        "xFormers",
        "use torch's scaled_dot_product_attention in its place (diffusers: "
        "model.disable_xformers_memory_efficient_attention())",
    ),
    "liger_kernel": (
        "Liger Kernel",
        "leave the model unpatched: TrainingArguments(use_liger_kernel=False), "
        "AutoModelForCausalLM instead of AutoLigerKernelForCausalLM",
    ),
    "unsloth": (
        "Unsloth",
        "load the model with transformers' AutoModelForCausalLM.from_pretrained and peft",
    ),
    "deepspeed": (
        "DeepSpeed",
        'stage 3 of ZeRO wraps every linear layer; set "zero_optimization": {"stage": 2}, or use '
        "DDP or FSDP2 through jx.JacHess",
    ),
    "bitsandbytes": (
        "bitsandbytes",
        "use its layers Linear4bit or Linear8bitLt, imported (import bitsandbytes) before the "
        "pass; other products of it take no jets",
    ),
    "transformer_engine": (
        "Transformer Engine",
        "build the model from torch.nn's layers in its place, without FP8",
    ),
    "apex": ("Apex", "use torch.nn.LayerNorm or torch.nn.RMSNorm in place of its fused norms"),
    "torch.nn.parallel": ("DDP", "call the model through jx.JacHess"),
    "torch.distributed": (
        "FSDP",
        "use fully_shard (FSDP2), and jx.jet, jx.jvp, jx.smoothness or jx.JacHess around the model",
    ),
}


def known_fix(name: str) -> str:
    """`` It belongs to …: …`` for a name of a known library; "" for any other."""
    for part, (library, fix) in _LIBRARIES.items():
        if part in name:
            return f" It belongs to {library}: {fix}."
    return ""


def refuse_opaque_functions() -> None:
    """Stop where a call comes from within an autograd Function, or from reentrant checkpointing.

    Raises:
        RuntimeError: it does; the message names the Function, and what helps.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            raise RuntimeError(
                "a jet went into reentrant gradient checkpointing, which would lose its gradients; "
                "use gradient_checkpointing_enable(gradient_checkpointing_kwargs="
                '{"use_reentrant": False}), or checkpoint(..., use_reentrant=False)'
            )
        if frame.f_code is _APPLY:
            function = frame.f_locals["cls"]
            name = f"{function.__module__}.{function.__qualname__}"
            other = " Write what it computes with torch's own functions."
            raise RuntimeError(
                f"a jet went into the torch.autograd.Function {name}, which would lose its "
                f"gradients.{known_fix(name) or other}"
            )
        frame = frame.f_back
