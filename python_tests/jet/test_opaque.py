"""What is said where a jet meets an autograd Function of a library that has no rule.

The libraries need a GPU, so the Functions here only carry their modules' names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import jachess_ext as jx
from jachess_ext.jet import MissingJetRule

LIBRARIES = {
    "flash_attn.flash_attn_interface": ("FlashAttention", 'attn_implementation="sdpa"'),
    "flash_attn_interface": ("FlashAttention", 'set_attn_implementation("sdpa")'),
    "xformers.ops.fmha": ("xFormers", "disable_xformers_memory_efficient_attention()"),
    "liger_kernel.ops.rms_norm": ("Liger Kernel", "use_liger_kernel=False"),
    "deepspeed.runtime.zero.linear": ("DeepSpeed", '"zero_optimization": {"stage": 2}'),
    "bitsandbytes.research.autograd._functions": ("bitsandbytes", "Linear4bit"),
    "unsloth.kernels.rms_layernorm": ("Unsloth", "AutoModelForCausalLM.from_pretrained"),
    "torch.distributed.fsdp._fully_shard": ("FSDP", "jx.JacHess"),
    "torch.nn.parallel.distributed": ("DDP", "jx.JacHess"),
    "somebody.kernels": ("", "Write what it computes with torch's own functions"),
}


def _by_an_operator(x: Tensor) -> Tensor:
    """Below what a tensor's own class is asked for, as a compiled extension goes."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.aten.mul(x, x)


def _function(module: str) -> Any:
    """An autograd Function named ``<module>.TheFunction``."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _by_an_operator(x)

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "__module__": module,
    }
    return type("TheFunction", (torch.autograd.Function,), members)


class _Layer(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


@pytest.mark.parametrize("module", LIBRARIES)
def test_the_error_names_the_library_and_what_helps(module: str) -> None:
    library, fix = LIBRARIES[module]
    layer = _Layer(_function(module))
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        jx.jet(layer, x, torch.randn(2, 2, 4))
    said = str(caught.value)
    assert f"{module}.TheFunction" in said
    assert fix in said
    assert f"It belongs to {library}" in said if library else "It belongs" not in said


@pytest.mark.parametrize("differentiable", [True, False])
def test_jvp_says_the_same(differentiable: bool) -> None:
    layer = _Layer(_function("flash_attn.flash_attn_interface"))
    x = torch.randn(2, 4)
    with pytest.raises(RuntimeError, match='attn_implementation="sdpa"'):
        jx.jvp(layer, (x,), (x,), differentiable=differentiable)


def test_an_operator_of_a_library_without_a_function_around_it() -> None:
    """FlashAttention registers its kernels with torch.library as well."""
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define("jachess_test(Tensor q) -> Tensor")
    library.impl("jachess_test", lambda q: q, "CPU")
    x = torch.randn(2, 4)
    with pytest.raises(MissingJetRule, match='attn_implementation="sdpa"'):
        jx.jet(torch.ops.flash_attn.jachess_test, x, torch.randn(1, 2, 4))


def test_compiled_flex_attention_names_what_to_call_instead() -> None:
    attend = torch.compile(flex_attention, backend="eager")
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(MissingJetRule, match="call scaled_dot_product_attention with an attn_mask"):
        jx.jet(lambda x: attend(x, x, x, lambda s, *_: s + 1), x, torch.ones(1, *x.shape))
