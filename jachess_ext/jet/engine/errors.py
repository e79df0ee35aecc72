"""Errors for calls that no rule covers; they name the call, the module and an alternative."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch

from ... import torch_private


class MissingJetRule(NotImplementedError):
    """Raised when a torch function is called with a jet, and no rule covers the call.

    Examples:
        >>> jx.jet(torch.poisson, torch.ones(3), torch.ones(1, 3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jachess_ext.jet.engine.errors.MissingJetRule: no jet rule for torch.poisson (called ...
    """


def function_name(function: object) -> str:
    """Return the full name of a function, such as ``torch.nn.functional.gelu`` or
    ``torch.Tensor.mT.__get__``."""
    if isinstance(function, torch_private.higher_order_operator):
        # torch.compile cannot trace resolve_name.
        return f"torch.ops.higher_order.{function.__name__}"
    full_name = torch.overrides.resolve_name(function) if callable(function) else None
    if full_name is not None:
        return full_name
    name = getattr(function, "__qualname__", None) or str(function)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else name


def last_name(function: object) -> str:
    """Return the last component of a function's full name: ``gelu`` or ``mT``."""
    return function_name(function).removesuffix(".__get__").rpartition(".")[2]


_TRANSFORM_ADVICE = (
    "it was called inside a transform of torch.func (vmap, grad, jvp), which hides a jet: take the "
    "pass inside and the transform outside, torch.func.vmap(lambda x: jx.jvp(f, (x,), (t,))), or "
    "write the batch out."
)
_NESTED_ADVICE = (
    "The function differentiates itself: pass it without that derivative, and take it outside, by "
    "torch.autograd.grad(..., create_graph=True) of what jx.jvp returns."
)
# Substring of the name of a function that can have no rule → the advice in its error.
_ADVICE = {
    "aten.": f"{_TRANSFORM_ADVICE} Pass the plain module of an exported one.",
    "nested": "Ragged tensors take no jets: pad them, and mask what was padded.",
    "_make_dual": _TRANSFORM_ADVICE,
    **dict.fromkeys(("autograd.grad", "autograd.backward", "Tensor.backward"), _NESTED_ADVICE),
    "grouped_mm": "transformers computes its mixtures of experts with it unless told otherwise: "
    'load the model with from_pretrained(..., experts_implementation="eager"), or call '
    'model.set_experts_implementation("eager").',
    "flex_attention": "It takes jets with a block_mask alone, its module imported before the pass: "
    "write a score_mod that hides keys as a mask_mod, else call scaled_dot_product_attention with "
    'an attn_mask (of a transformers model: model.set_attn_implementation("sdpa")).',
}


def missing_rule(function: object, detail: str = "") -> MissingJetRule:
    """Return the error for an operation without a rule; it names the operation, the calling module
    and a fix.

    Args:
        detail: which call of the function is not covered; "" if the function has no rule at all.
    """
    name = function_name(function)
    reason = f": {detail}" if detail else ""
    fallback = (
        f"Register a rule with @jet_rule({name}), after 'from jachess_ext.jet import jet_rule' "
        f"(recipe: jachess_ext/jet/README.md)."
    )
    if isinstance(function, torch.ScriptMethod | torch.jit.ScriptFunction):
        fallback = "It is a scripted or traced program: pass the plain module that it was made of."
    advice = next(
        (advice for substring, advice in _ADVICE.items() if substring in name), library_advice(name)
    )
    advice = advice.strip() or fallback
    return MissingJetRule(
        f"no jet rule for {name}{reason} (called in {_calling_module()}). Derivatives through it "
        f"would be wrong, so the pass stops here. {advice[0].upper()}{advice[1:]}"
    )


def calling_modules() -> list[torch.nn.Module]:
    """Return every ``nn.Module`` whose forward is on the Python stack, innermost first."""
    modules: list[torch.nn.Module] = []
    for frame in frames():
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and (not modules or modules[-1] is not module):
            modules.append(module)
    return modules


def frames() -> Iterator[FrameType]:
    """Yield the frames of the Python stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _calling_module() -> str:
    """Describe the innermost ``nn.Module`` on the Python stack: its class and its path in the
    model."""
    if torch.compiler.is_compiling():  # dynamo cannot trace a walk along the stack
        return "code that is being compiled"
    modules = calling_modules()
    if not modules:
        return "no torch.nn.Module"
    inner, root = modules[0], modules[-1]
    path = next((name for name, module in root.named_modules() if module is inner), "")
    location = f" {path!r} of {type(root).__name__}" if path else ""
    return f"module {type(inner).__name__}{location}"


# Substring of the full name of a Function or an operator → the library, and how to avoid it.
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
    "torch.nn.modules._functions": ("a full backward hook of a module", "remove it for the pass"),
    "torch.nn.parallel": ("DDP", "call the model through jx.JacHess"),
    "torch.distributed": (
        "FSDP",
        "use fully_shard (FSDP2), and jx.jet, jx.jvp, jx.smoothness or jx.JacHess around the model",
    ),
}


def library_advice(name: str) -> str:
    """Return the sentence that names a function's library and how to avoid it; "" if the function
    belongs to none of `_LIBRARIES`."""
    for substring, (library, fix) in _LIBRARIES.items():
        if substring in name:
            return f" It belongs to {library}: {fix}."
    return ""
