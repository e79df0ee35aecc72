"""`jx.JacHess` within ``torch.compile``: a step is one graph, in which the pass is one node.

Import this file only where a step is compiled: it imports torch._dynamo, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..jet.compiled.closures import Call, pack_call, unpack_call
from ..jet.compiled.reachable import refuse_attribute_writes
from ..jet.compiled.regions import can_trace as can_trace
from ..jet.compiled.regions import raise_if_error, refuse_captured, return_error
from ..jet.engine.layout import MAX_DIRECTIONS
from ..jet.engine.types import Function
from ..jet.rows.sameness import refuse_irreproducible
from ..models import padding_mask, unwrapped
from ..ops import library
from .estimators import ForwardPass, Smoothness, measure
from .parallel import NONFINITE_REMEDY, Ranks, nonfinite_layer, nonfinite_text
from .settings import Randomness, Settings

# As results of a region.
pytree.register_dataclass(Smoothness)
pytree.register_dataclass(ForwardPass)


def measure_in_graph(
    model: nn.Module, batch: Mapping[str, Tensor], settings: Settings, seed: Tensor, step: Tensor
) -> tuple[Smoothness, ForwardPass]:
    """Compute `measure` while dynamo traces; the forward pass is returned without its blocks, which
    are jets.

    Args:
        seed, step: int64 scalars on the model's device.
    """
    call = pack_call(cast(Function, (unwrapped(model), settings)))
    result = _measure_region(call, batch, seed, step)
    raise_if_error(result)
    return result


@torch._dynamo.nonstrict_trace
def _measure_region(
    call: Call, batch: Mapping[str, Tensor], seed: Tensor, step: Tensor
) -> tuple[Smoothness, ForwardPass]:
    def run() -> tuple[Smoothness, ForwardPass]:
        model, settings = unpack_call(call)
        is_repeated = settings.directions > MAX_DIRECTIONS
        guard = refuse_irreproducible(model) if is_repeated else nullcontext()
        with refuse_captured(), refuse_attribute_writes(model), guard:
            norms, result = measure(model, batch, settings, Randomness.from_seed(seed, step))
        return norms, replace(result, blocks=[], logits=None)

    return return_error(run, batch)


@torch.library.custom_op("jachess_ext::raise_nonfinite", mutates_args=())
def raise_nonfinite(
    terms: Tensor, loss: Tensor, mask: Tensor, embeddings: Tensor, step: Tensor
) -> Tensor:
    """Raise the error of an eager step if a term is not finite or a row has no real token.

    Returns:
        A tensor of 0, whose use keeps the check in the graph.
    """
    layer = None if library.capturing() else nonfinite_layer(terms, loss, Ranks(), mask)
    if layer == len(terms):
        padding_mask({"input_ids": mask, "attention_mask": mask})  # raises
    if layer is not None:
        text = nonfinite_text(int(step), layer, embeddings)
        raise FloatingPointError(text + NONFINITE_REMEDY)
    return torch.zeros_like(loss)


raise_nonfinite.register_fake(lambda terms, loss, *_: torch.zeros_like(loss))
