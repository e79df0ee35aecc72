"""One forward pass of a model with its token embeddings replaced, and its block outputs kept.

The batch goes to the model as it is: position ids, pooling positions and masks stay those the
model itself derives from ``input_ids``; only what the embedding layer returns is replaced, by a
hook that lives for the one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..jet.deferred import end
from ..jet.fsdp import jets_through_fsdp
from ..jet.nests import map_tensors
from ..jet.tensor import JetTensor, primal_of

Enter = Callable[[Tensor], Tensor]
_NO_HIDDEN_STATES = (
    "the model returned no hidden states; expected a transformers model (or one like it) that "
    "accepts output_hidden_states=True and returns .hidden_states = (embeddings, block 1, ...)"
)
_TWO_STACKS = (
    "the model embeds its tokens more than once in a pass (an encoder-decoder?); derivatives are "
    "taken through one encoder or decoder: pass that part, for example model.get_encoder()"
)


@dataclass
class Pass:
    """What a forward pass left.

    Attributes:
        embeddings: ``[B, T, d]``, the plain embeddings x.
        blocks: K tensors ``[B, T, d]``: ``hidden_states[1:]``, as the model returns them.
        output: the model's output, plain tensors only.
        logits: the model's logits (a jet in a jet pass that went through the head), or None.
    """

    embeddings: Tensor
    blocks: list[Tensor]
    output: Any
    logits: Tensor | None


def padding_mask(batch: Mapping[str, Any], *, check_rows: bool = True) -> Tensor:
    """``[B, T]`` booleans, true at real tokens.

    ``check_rows=False`` leaves out the one check that has to read the mask, for which the host
    would wait for a GPU.

    Raises:
        TypeError, ValueError: not a mapping; no input; a mask of another shape; an empty batch; a
            row that is all padding.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batch must be a dict of tensors as a collator yields it, not {type(batch).__name__}"
        )
    inputs = batch.get("input_ids")
    inputs = batch.get("inputs_embeds") if inputs is None else inputs
    if inputs is None:
        raise ValueError("the batch has neither input_ids nor inputs_embeds; one of them is needed")
    for name in ("input_ids", "inputs_embeds", "attention_mask"):
        value = batch.get(name)
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}; expected a tensor: torch.tensor({name})"
            )
    shape = inputs.shape[:2]
    mask = batch.get("attention_mask")
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=inputs.device)
    if mask.shape != shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, but the inputs need {list(shape)} "
            "(one number per token; 1 real, 0 padding)"
        )
    mask = mask.bool()
    if not mask.numel():
        raise ValueError("the batch is empty; expected at least one row and one token")
    empty = (~mask.any(1)).nonzero().flatten().tolist() if check_rows else []
    if empty:
        raise ValueError(
            f"rows {empty} of the batch are all padding, so they have no smoothness; drop them"
        )
    return mask


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without its labels, so that no task loss is computed."""
    labels = ("labels", "label", "label_ids", "start_positions", "end_positions")
    return {key: value for key, value in batch.items() if key not in labels}


def on_device_of(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with its tensors where the model is."""
    device = next(model.parameters()).device
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def run_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    enter: Enter,
    *,
    through_head: bool = True,
    hidden: bool = True,
) -> Pass:
    """Call ``model(**batch)`` with its embeddings x replaced by ``enter(x)``.

    Args:
        enter: gives what the model goes on with: a jet of x, or x itself.
        through_head: False lets what follows the backbone see primals only, so that heads and
            losses cost what they cost without jets.
        hidden: False asks for no hidden states, and leaves ``blocks`` empty.

    Raises:
        ValueError: the model returns no hidden states, or has no embedding layer to hook.
    """
    seen: list[Tensor] = []
    entered: list[Tensor] = []
    collected: list[Any] = []

    def replace(x: Tensor) -> Tensor:
        if seen:
            raise ValueError(_TWO_STACKS)
        seen.append(x)
        entered.append(enter(x))
        return entered[0]

    arguments = _arguments(model, batch, hidden)
    with ExitStack() as hooks:
        if arguments.get("inputs_embeds") is not None:
            arguments["inputs_embeds"] = replace(arguments["inputs_embeds"])
        else:
            hooks.enter_context(hooked_embeddings(model, replace))
        if not through_head:
            hooks.enter_context(_head_on_primals(model, collected))
        hooks.enter_context(jets_through_fsdp())
        hooks.callback(_end_passes, entered)
        try:
            output = model(**arguments)
        except IndexError as error:
            _explain_ids(model, arguments.get("input_ids"), error)
            raise
    if not seen:
        if getattr(getattr(unwrapped(model), "config", None), "is_encoder_decoder", False):
            raise ValueError(_TWO_STACKS)
        raise ValueError(
            "the model did not call the layer that get_input_embeddings() returns, so the "
            "embeddings could not be reached; pass inputs_embeds in the batch"
        )
    states: Any = ()
    if hidden:
        states = collected[0] if collected else hidden_states(output)
    plain = map_tensors(output, primal_of)
    return Pass(seen[0], list(states[1:]), plain, _field(output, "logits"))


def _explain_ids(model: nn.Module, ids: Any, error: IndexError) -> None:
    """Raise an IndexError that says more, where a token id has no row."""
    layer = getattr(unwrapped(model), "get_input_embeddings", lambda: None)()
    count = getattr(layer, "num_embeddings", None)
    if count is None or not isinstance(ids, Tensor) or not ids.numel():
        return
    lowest, highest = ids.min().item(), ids.max().item()
    if lowest < 0 or highest >= count:
        raise IndexError(
            f"input_ids has ids from {lowest} to {highest}, but the model has embeddings of 0 to "
            f"{count - 1}; use the model's own tokenizer, or model.resize_token_embeddings(...)"
        ) from error


def _end_passes(entered: list[Tensor]) -> None:
    for embeddings in entered:
        if isinstance(embeddings, JetTensor):
            end(embeddings.jet_layout.run)


def hidden_states(output: Any) -> Any:
    """``output.hidden_states`` (or the item of that name).

    Raises:
        ValueError: there is none.
    """
    states = _field(output, "hidden_states")
    if not states or len(states) < 2:
        raise ValueError(_NO_HIDDEN_STATES)
    return states


def _field(output: Any, name: str) -> Any:
    if isinstance(output, Mapping):
        return output.get(name)
    return getattr(output, name, None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside torch.compile and data-parallel wrappers."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def _arguments(model: nn.Module, batch: Mapping[str, Any], hidden: bool) -> dict[str, Any]:
    parameters = inspect.signature(unwrapped(model).forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = dict(batch)
    if hidden:
        if "output_hidden_states" not in parameters and not takes_any:
            raise ValueError(_NO_HIDDEN_STATES)
        arguments["output_hidden_states"] = True
    for name, value in (("return_dict", True), ("use_cache", False)):
        if name in parameters:
            arguments[name] = value
    return arguments


def hooked_embeddings(model: nn.Module, replace: Enter) -> RemovableHandle:
    """Within it the model goes on with ``replace(x)`` in place of its token embeddings x.

    Raises:
        ValueError: the model has no embedding layer to hook.
    """
    inner = unwrapped(model)
    layer = getattr(inner, "get_input_embeddings", lambda: None)()
    if layer is None:
        raise ValueError(
            f"{type(inner).__name__} has no get_input_embeddings(); pass inputs_embeds in the batch"
        )
    return layer.register_forward_hook(lambda module, args, output: replace(output))


def backbone_of(model: nn.Module) -> nn.Module:
    """The model without its head, inside wrappers and peft."""
    inner = unwrapped(model)
    unwrap_peft = getattr(inner, "get_base_model", None)
    if unwrap_peft is not None:
        inner = cast(nn.Module, unwrap_peft())  # type: ignore[operator]
    base = getattr(inner, "base_model", inner)
    return base if isinstance(base, nn.Module) else inner


def _head_on_primals(model: nn.Module, collected: list[Any]) -> RemovableHandle:
    """Keep the backbone's hidden states and hand only primals on."""

    def strip(module: nn.Module, args: Any, output: Any) -> Any:
        states = _field(output, "hidden_states")
        if states and len(states) > 1:
            collected.append(states)
        return map_tensors(output, primal_of)

    return backbone_of(model).register_forward_hook(strip)
