"""`attn_implementation="jachess"`: transformers' own SDPA attention, within `jx.differentiable`."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..differentiable.levels import is_batched, levels_of
from ..differentiable.mode import differentiable, is_active

NAME = "jachess"
# Arguments of sparse attention and of attention sinks.  A model passes them to a name that it does
# not know, and puts them into the mask for "sdpa" and "eager" alone.
_NOT_SERVED = ("indices", "block_indices", "s_aux")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, as transformers asks for it.

    Raises:
        ValueError: the layer has sparse attention (keys by their indices) or attention sinks.
        RuntimeError: forward mode meets another derivative outside of `jx.differentiable`, in a
            model that may have layer norms, through which torch's answer is wrong.
    """
    for name in _NOT_SERVED:
        if options.get(name) is not None:
            raise ValueError(
                f'attn_implementation="{NAME}" has no {name}, which {type(module).__name__} hands '
                'over; load the model with attn_implementation="sdpa" or "eager"'
            )
    # Models that say so in their configuration normalise by squares alone, in plain operations.
    layer_norms = not hasattr(getattr(module, "config", None), "rms_norm_eps")
    if layer_norms and not is_active() and levels_of((query, key, value)).nested_forward:
        raise RuntimeError(
            "forward mode nested with another derivative is wrong through torch's layer norm, "
            f"which the model of {type(module).__name__} may have; run it within "
            "jx.differentiable()"
        )
    with differentiable():
        return sdpa_attention_forward(module, query, key, value, mask, **options)


def attention_mask(**options: Any) -> Tensor | None:
    """Return transformers' own mask for SDPA, also of padding that vmap batches.

    Raises:
        ValueError: the model's family has no SDPA attention, and would take the mask for another.
    """
    config: PreTrainedConfig = options["config"]
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    classes = vars(sys.modules[name]).values() if name in sys.modules else ()
    served = [
        x._supports_sdpa
        for x in classes
        if getattr(x, "__module__", "") == name and hasattr(x, "_supports_sdpa")
    ]
    if served and not any(served):
        raise ValueError(
            f"{config.model_type} models have no SDPA attention, which "
            f'attn_implementation="{NAME}" needs; load the model with "eager"'
        )
    if is_batched(options.get("attention_mask")):  # vmap answers no question about values
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**options)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, attention_mask)  # without it a model gets no mask at all
