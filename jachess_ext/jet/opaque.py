"""autograd Functions, which a jet cannot enter: who calls one, and what helps where it is known.

An autograd Function runs its forward without gradients and asks its own backward for them.  A jet
has neither the one nor the other in a form that the Function knows: what came out would have lost
its gradients, so the pass stops, and says which library and which setting it is about.

torch switches forward-mode differentiation off around a Function's forward, and so do
``torch.inference_mode`` and nothing else; code inside that turns gradients on (a straight-through
estimator, a solver of fixed points) leaves it off.  That switch is asked at every call; the stack,
which takes longer to read, only where it is off.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

# A torch without the switch has the stack read at every call.
forward_mode_is_on: Callable[[], bool] = getattr(torch._C, "_is_fwd_grad_enabled", lambda: False)

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


def surrounding_functions() -> int | None:
    """How many autograd Functions a pass that begins now is within; None where the switch tells
    that there is none."""
    return None if forward_mode_is_on() else len(_forwards_on_the_stack())


def refuse_opaque_functions(function: Callable, args: Any, surrounding: int | None) -> None:
    """Stop where a call comes from within an autograd Function, or from reentrant checkpointing,
    that began after the pass; called where `forward_mode_is_on` is false.

    Args:
        function: what was called, with ``args``.
        surrounding: what `surrounding_functions` said where the pass began.

    Raises:
        RuntimeError: it does; the message names the Function, and what helps.
    """
    found = _forwards_on_the_stack()
    if len(found) > (surrounding or 0):
        raise _refusal(_class_of(found[-1 - (surrounding or 0)]))
    # What a Function returns as it came in, torch hands to this function, forward being over.
    returned_as_it_came = function is torch.Tensor.view_as and args[0] is args[-1]
    off_since_the_beginning = surrounding is not None or torch.is_inference_mode_enabled()
    if returned_as_it_came or not off_since_the_beginning:
        raise _refusal(None)


def _refusal(function: type | None) -> RuntimeError:
    if function is CheckpointFunction:
        return RuntimeError(
            "a jet went into reentrant gradient checkpointing, which would lose its gradients; "
            "use gradient_checkpointing_enable(gradient_checkpointing_kwargs="
            '{"use_reentrant": False}), or checkpoint(..., use_reentrant=False)'
        )
    name = f" {function.__module__}.{function.__qualname__}" if function is not None else ""
    other = " Write what it computes with torch's own functions."
    return RuntimeError(
        f"a jet went into {'the' if name else 'a'} torch.autograd.Function{name}, which would lose "
        f"its gradients.{known_fix(name) or other}"
    )


def _forwards_on_the_stack() -> list[FrameType]:
    """The calls of ``forward`` of autograd Functions that have not returned, innermost first."""
    codes = _forward_codes(torch.autograd.Function.__subclasses__()[-1])
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            found.append(frame)
        frame = frame.f_back
    return found


@functools.lru_cache(maxsize=1)
def _forward_codes(newest: type) -> frozenset[CodeType | None]:
    """The code of every Function's ``forward``; holds until there is a newer Function."""
    return frozenset(_forward_code(function) for function in _classes())


def _classes(below: type = torch.autograd.Function) -> Iterator[type]:
    children: list[type] = below.__subclasses__()
    for child in children:
        yield child
        yield from _classes(child)


def _forward_code(function: Any) -> CodeType | None:
    """Of a Function's ``forward``, inside decorators that say what they wrap."""
    forward = inspect.unwrap(function.forward)
    while isinstance(forward, functools.partial):
        forward = inspect.unwrap(forward.func)
    called = forward if hasattr(forward, "__code__") else type(forward).__call__
    return getattr(called, "__code__", None)


def _class_of(forward: FrameType) -> type:
    """The Function whose ``forward`` this is; several that were made by one piece of code are told
    apart by the context that they are given."""
    names = forward.f_code.co_varnames[:1]
    context = forward.f_locals.get(names[0]) if names else None
    known: type | None = getattr(context, "_forward_cls", None)
    return known or [c for c in _classes() if _forward_code(c) is forward.f_code][-1]
