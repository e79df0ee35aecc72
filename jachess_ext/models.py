"""Helpers for transformers models: backbone, embeddings, padding, mode and device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from .jet.engine.context import FORCE_EAGER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_LABEL = -100


Replace = Callable[[Tensor, Tensor], Tensor]
SEVERAL_EMBEDDINGS_MESSAGE = (
    "the model embeds its tokens more than once in a pass (an encoder-decoder?); derivatives are "
    "taken through one encoder or decoder: pass that part, for example model.get_encoder()"
)
_NO_TABLE = "{} has no get_input_embeddings(); pass inputs_embeds in the batch"


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put all modules into training or evaluation mode within the context; then restore each
    mode."""
    former_modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in former_modes.items():
            module.training = mode


@contextmanager
def trained(flags: Mapping[nn.Parameter, bool]) -> Iterator[None]:
    """Set the flags ``requires_grad`` of parameters within the context; then restore them."""
    former_flags = {parameter: parameter.requires_grad for parameter in flags}
    try:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        yield
    finally:
        for parameter, flag in former_flags.items():
            parameter.requires_grad_(flag)


def real_pairs(tensor: Tensor) -> Tensor:
    """Return a view of a complex tensor ``[...]`` as pairs of real numbers ``[..., 2]``.

    A real tensor is returned unchanged.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def padding_mask(batch: Mapping[str, Tensor], *, check_rows: bool = True) -> Tensor:
    """Return the mask of real tokens in a batch, ``[B, T]`` booleans.

    Args:
        check_rows: whether to check for rows that are all padding, for which the host waits for a
            GPU.

    Raises:
        TypeError, ValueError: the batch is not a mapping, has no input, is empty, has a mask of
            another shape than its inputs, or a row that is all padding.
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


def without_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch without labels, so that the model computes no task loss."""
    labels = ("labels", "label", "label_ids", "start_positions", "end_positions")
    return {key: value for key, value in batch.items() if key not in labels}


def on_device_of(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with its tensors on the model's device."""
    device = next(model.parameters()).device
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's model inside the wrappers of torch.compile, data parallelism and
    DeepSpeed."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:  # wrappers nest in any order
        if isinstance(model, wrappers) or is_deepspeed(model):
            model = cast(nn.Module, model.module)
        elif hasattr(model, "_orig_mod"):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def is_deepspeed(model: nn.Module) -> bool:
    """Return whether the model is an engine of DeepSpeed."""
    # Not imported here: a model can be in an engine only if deepspeed has been imported.
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def without_engine(model: nn.Module) -> nn.Module:
    """Return the module inside a DeepSpeed engine, by which gradients beside those of the training
    step can be computed.

    The engine's own forward prepares the single backward pass of the step.  Any other model is
    returned unchanged.
    """
    return cast(nn.Module, model.module) if is_deepspeed(model) else model


def check_whole(model: nn.Module) -> None:
    """Check that every rank has the full weights.

    Raises:
        ValueError: stage 3 of DeepSpeed's ZeRO has distributed the weights over the ranks.
    """
    if any(hasattr(p, "ds_tensor") for p in model.parameters()):
        raise ValueError(
            "stage 3 of DeepSpeed's ZeRO shares the weights out among the ranks, and what is asked "
            "for here reads them whole; use stage 2 (zero_optimization: stage: 2) or FSDP2"
        )


def token_tables(model: nn.Module) -> dict[nn.Module, bool]:
    """Return the layers that look up token embeddings in ``forward``: layer -> whether it belongs
    to the decoder of an encoder-decoder.

    The encoder's layer comes first.  BART and T5 have a layer in encoder and decoder each, and do
    not call the layer that their ``get_input_embeddings`` returns.
    """
    check_whole(model)
    inner = unwrapped(model)
    stacks = (getattr(inner, f"get_{name}", lambda: None)() for name in ("encoder", "decoder"))
    encoder, decoder = (_table_of(stack) for stack in stacks)
    has_two = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    is_decoder_of = {encoder: False, decoder: has_two and decoder is not encoder}
    tables = {table: is_decoder for table, is_decoder in is_decoder_of.items() if table is not None}
    # A model of one stack has neither an encoder nor a decoder, but a table of its own.
    model_table = None if tables else _table_of(inner)
    return tables if model_table is None else {model_table: False}


def token_table(model: nn.Module) -> nn.Embedding:
    """Return the first of `token_tables`, in which the ids of a batch are looked up.

    Raises:
        ValueError: the model has no layer of token embeddings.
    """
    table = next(iter(token_tables(model)), None)
    if table is None:
        raise ValueError(_NO_TABLE.format(type(unwrapped(model)).__name__))
    return cast(nn.Embedding, table)


def _table_of(stack: nn.Module | None) -> nn.Module | None:
    """Return a stack's layer of token embeddings; None if it has none (a vision model)."""
    try:
        layer = cast("PreTrainedModel", stack).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    # A vision model returns the convolution over its patches, whose weight has four dimensions.
    return layer if getattr(getattr(layer, "weight", None), "ndim", 0) == 2 else None


@contextmanager
def hooked_embeddings(
    model: nn.Module,
    replace: Replace,
    batch: Mapping[str, Tensor] | None = None,
    *,
    needs_gradients: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Replace the token embeddings x in passes within the context by ``replace(x, real)``.

    x ``[B, T, d]`` is the output of a layer of `token_tables`, in an encoder-decoder first the
    encoder's layer and then the decoder's; real ``[B, T]`` is true at tokens other than padding.

    A model compiled by ``torch.compile`` runs uncompiled within the context, since dynamo would
    reuse code compiled without the hooks, or later code compiled with them.

    Args:
        batch: arguments of the model; None: unknown, so that all tokens are taken as real.
        needs_gradients: whether to replace embeddings only in passes with gradients; TRL runs other
            passes beside the training pass, for metrics, a reference or other rows.

    Yields:
        The batch to call the model with, in which ``inputs_embeds`` are already replaced.

    Raises:
        ValueError: the model has no token embeddings, or computed none within the context.
    """
    batch = dict(batch or {})
    calls: list[bool] = []

    def replace_tokens(x: Tensor, is_decoder: bool) -> Tensor:
        if needs_gradients and not torch.is_grad_enabled():
            return x
        calls.append(is_decoder)
        return replace(x, _real_tokens(x, batch, is_decoder))

    for name, is_decoder in (("inputs_embeds", False), ("decoder_inputs_embeds", True)):
        if batch.get(name) is not None:
            batch[name] = replace_tokens(batch[name], is_decoder)
    tables, name = token_tables(model), type(unwrapped(model)).__name__
    if not tables and not calls:
        raise ValueError(_NO_TABLE.format(name))
    with ExitStack() as hooks:
        for table, is_decoder in tables.items():
            handle = table.register_forward_hook(
                lambda module, args, x, is_decoder=is_decoder: replace_tokens(x, is_decoder)
            )
            hooks.callback(handle.remove)
        # Importing dynamo takes seconds; if it has not been imported, nothing is compiled.
        if "torch._dynamo" in sys.modules:
            hooks.enter_context(FORCE_EAGER)
        yield batch
    if not calls or (all(calls) and batch.get("input_ids") is not None):
        raise ValueError(
            f"{name} did not call the layer that get_input_embeddings() returns, so that its token "
            "embeddings could not be reached; let it return the layer that forward calls, or pass "
            "inputs_embeds in the batch"
        )


def _real_tokens(x: Tensor, batch: Mapping[str, Tensor], is_decoder: bool) -> Tensor:
    """Return the mask of real tokens ``[B, T]`` for the embeddings x ``[B, T, d]`` of a stack."""
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    # A decoder's inputs are its own tokens, or the labels or encoder's tokens, shifted by one.
    if is_decoder:
        if isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point():
            mask = labels != -100
        decoder_mask = batch.get("decoder_attention_mask")
        mask = mask if decoder_mask is None else decoder_mask
        mask = None if mask is None or mask.shape != x.shape[:2] else mask
    inputs = {"inputs_embeds": x} if mask is None else {"inputs_embeds": x, "attention_mask": mask}
    return padding_mask(inputs, check_rows=False).to(x.device)


@contextmanager
def leaf_embeddings(
    model: nn.Module, batch: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Tensor], list[Tensor]]]:
    """Make the token embeddings x leaves of the graph of a pass within the context.

    Yields:
        The batch to call the model with, and a list to which the pass appends the leaves.
    """
    leaves: list[Tensor] = []

    def leaf(x: Tensor, real: Tensor) -> Tensor:
        leaves.append(x.detach().requires_grad_())
        return leaves[-1]

    with hooked_embeddings(model, leaf, batch, needs_gradients=True) as batch:
        yield batch, leaves


def gradient_of_tokens(loss: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """Return ∂loss/∂x ``[B, T, d]`` for the embeddings x of the batch's tokens.

    In an encoder-decoder classifier the decoder's inputs are the same tokens, shifted by one, with
    tied embeddings; their gradient is added.

    Args:
        leaves: the leaves of `leaf_embeddings`.
    """
    gradient, *decoder_gradients = torch.autograd.grad(loss, leaves)
    for decoder_gradient, x in zip(decoder_gradients, leaves[1:], strict=True):
        if x.shape == leaves[0].shape and torch.equal(x[:, 1:], leaves[0][:, :-1]):
            # Token t of the encoder is token t + 1 of the decoder, which begins with a start token.
            gradient[:, :-1] += decoder_gradient[:, 1:]
    return gradient


def learns_prompts(model: nn.Module) -> bool:
    """Return whether peft adds learned virtual tokens or a prefix before the model's tokens."""
    config = getattr(unwrapped(model), "active_peft_config", None)
    return getattr(config, "is_prompt_learning", False)


def drawn_modules(model: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the modules whose weights were drawn at random, as the model's checkpoint
    lacked them; None: unknown.

    The attribute ``drawn_modules`` lists them; in a model without it, they are the modules that
    transformers has not marked as loaded.
    """
    inner = unwrapped(model)
    module_names: Iterable[str] | None = getattr(inner, "drawn_modules", None)
    if module_names is not None:
        return tuple(module_names)
    # In a model built from its configuration no parameter is marked: the modules are unknown.
    loaded = {name: getattr(p, "_is_hf_initialized", False) for name, p in inner.named_parameters()}
    if not any(loaded.values()):
        return None
    return tuple(sorted({n.rpartition(".")[0] for n, marked in loaded.items() if not marked}))


def without_peft(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile, data parallelism and peft."""
    inner = unwrapped(model)
    return getattr(inner, "get_base_model", lambda: inner)()


def backbone_of(model: nn.Module) -> nn.Module:
    """Return the model without its head, after removing wrappers and peft."""
    inner = without_peft(model)
    base = getattr(inner, "base_model", inner)
    return base if isinstance(base, nn.Module) else inner
