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
# Arguments of sparse attention and of attention sinks.  A model passes them to an implementation
# that it does not recognise by name; only for "sdpa" and "eager" it puts them into the mask.
_UNSUPPORTED = ("indices", "block_indices", "s_aux")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, with the signature of transformers' attention functions.

    Raises:
        ValueError: the layer uses sparse attention (`indices`, `block_indices`) or attention sinks
            (`s_aux`), which this implementation does not support.
        RuntimeError: forward mode is nested with another derivative outside of
            `jx.differentiable`, in a model that may have layer norms, whose derivatives torch then
            computes wrongly.
    """
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(
                f'attn_implementation="{NAME}" has no {name}, which {type(module).__name__} hands '
                'over; load the model with attn_implementation="sdpa" or "eager"'
            )
    # Models with rms_norm_eps in their configuration have RMS norms in plain operations only.
    may_layer_norm = not hasattr(getattr(module, "config", None), "rms_norm_eps")
    if may_layer_norm and not is_active() and levels_of((query, key, value)).has_nested_forward:
        raise RuntimeError(
            "forward mode nested with another derivative is wrong through torch's layer norm, "
            f"which the model of {type(module).__name__} may have; run it within "
            "jx.differentiable()"
        )
    with differentiable():
        return sdpa_attention_forward(module, query, key, value, mask, **options)


def attention_mask(**options: Any) -> Tensor | None:
    """Return transformers' own mask for SDPA, also if the attention mask is batched by vmap.

    Raises:
        ValueError: the model's family has no SDPA attention, so that it would misinterpret the
            mask.
    """
    config: PreTrainedConfig = options["config"]
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    classes = vars(sys.modules[name]).values() if name in sys.modules else ()
    supports_sdpa = [
        x._supports_sdpa
        for x in classes
        if getattr(x, "__module__", "") == name and hasattr(x, "_supports_sdpa")
    ]
    if supports_sdpa and not any(supports_sdpa):
        raise ValueError(
            f"{config.model_type} models have no SDPA attention, which "
            f'attn_implementation="{NAME}" needs; load the model with "eager"'
        )
    if is_batched(options.get("attention_mask")):  # under vmap no branch may depend on values
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**options)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, attention_mask)  # without it a model gets no mask at all
