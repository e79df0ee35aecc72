"""Ranks and collectives of data-parallel models; checks of their losses.

A model is data-parallel if DistributedDataParallel or an engine of DeepSpeed wraps it, if it is
called within such a wrapper's forward, if `replicate` was applied to it, or if `fully_shard` has
made its parameters DTensors.  If each rank has a model of its own, no collective is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import torch_private
from ..models import is_deepspeed, real_pairs

NONFINITE_REMEDY = (
    ", and so the penalty; lower the learning rate, use a wider dtype, or on_nonfinite='skip'"
)
_REPLICATE = "torch.distributed._composable.replicate"


@dataclass(frozen=True)
class Ranks:
    """Processes over which a model's batches are distributed.

    Attributes:
        rank: rank of this process.
        size: number of processes.
        groups: process groups; reducing over each of them in turn reduces over all processes.
    """

    rank: int = 0
    size: int = 1
    groups: tuple[dist.ProcessGroup, ...] = ()

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over the ranks; every rank has to call it."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: Tensor) -> Tensor:
        """Return the largest ``value`` over the ranks; every rank has to call it."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size > 1:
            # all_reduce writes in place, and the caller may still need its own value.
            value = value.detach().clone()
            for group in self.groups:
                dist.all_reduce(value, operation, group=group)
        return value


def ranks_of(model: nn.Module) -> Ranks:
    """Return the ranks over which a model's batches are distributed; a single rank if the model is
    not data-parallel."""
    if not dist.is_available() or not dist.is_initialized():
        return Ranks()
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    group = _group_of(model)
    if group is None:
        return _sharded_ranks(model)
    return Ranks(dist.get_rank(group), dist.get_world_size(group), (group,))


def _group_of(model: Any) -> dist.ProcessGroup | None:
    """Return the process group over which an unsharded model's batches are distributed, or None."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _group_of_ddp(model)
    if is_deepspeed(model):
        return model.data_parallel_group
    active: Any = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    parameter = next(model.parameters(), None)
    if active is not None and any(p is parameter for p in active.parameters()):
        return _group_of_ddp(active)
    for module in model.modules():
        if any(base.__module__ == _REPLICATE for base in type(module).__mro__):
            state = torch_private.replicate.state(module)
            if state.has_initialized:
                return _group_of_ddp(state._ddp)
            mesh, group = (state._init_kwargs.get(n) for n in ("device_mesh", "process_group"))
            return group or (dist.group.WORLD if mesh is None else mesh.get_group())
    return None


def _group_of_ddp(model: nn.parallel.DistributedDataParallel) -> dist.ProcessGroup:
    """Return the process group of a model in DistributedDataParallel.

    Raises:
        ValueError: the model has ``static_graph=True``, with which gradients are silently not
            reduced over the ranks in a step that differentiates through the model twice.
    """
    if model.static_graph:
        raise ValueError(
            "DistributedDataParallel has static_graph=True, with which a step that differentiates "
            "through the model twice leaves each rank with gradients of its own: leave it out "
            "(in TrainingArguments, ddp_static_graph)"
        )
    return model.process_group


def _sharded_ranks(model: nn.Module) -> Ranks:
    """Return the ranks of a model under `fully_shard`, whose mesh has one dimension, or two if
    there are replicas; a single rank if the model is not sharded."""
    mesh = next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
    if mesh is None or not is_sharded(model):
        return Ranks()
    rank = 0
    for coordinate, size in zip(mesh.get_coordinate() or [0], mesh.shape, strict=False):
        # Row-major over the mesh, as torchrun numbers the ranks.
        rank = rank * size + coordinate
    return Ranks(rank, mesh.size(), tuple(mesh.get_all_groups()))


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` or FullyShardedDataParallel shards any module of the model."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in model.modules())


def has_tokens(batch: Mapping[str, Tensor]) -> bool:
    """Return whether any row of a batch has a real token."""
    mask = batch.get("attention_mask")
    inputs = [batch.get(name) for name in ("input_ids", "inputs_embeds")]
    if any(isinstance(value, Tensor) and value.numel() == 0 for value in inputs):
        return False
    return not isinstance(mask, Tensor) or bool(mask.any())


def raise_together(ranks: Ranks, check: Callable[[], object], device: torch.device) -> None:
    """Call ``check``, and raise an error on every rank if it raises one on any rank.

    Every rank has to call this function.  Without it, the other ranks would wait in the forward
    pass for the rank that raised.

    Raises:
        ValueError: another rank's check raised.
    """
    error: Exception | None = None
    try:
        check()
    except (TypeError, ValueError) as raised:
        error = raised
    has_failed = bool(ranks.max(torch.tensor(int(error is not None), device=device)))
    if error is not None:
        raise error
    if has_failed:
        raise ValueError("another rank cannot use its batch; its own message says why")


def zero_with_gradients(model: nn.Module) -> Tensor | None:
    """Return a zero loss over the unsharded parameters that already have a gradient, or None if
    there are none.

    DistributedDataParallel reduces the accumulated gradients of earlier micro-batches only in a
    backward pass, which this loss triggers without changing them.  It is zero even if parameters
    are NaN.
    """
    trained = [real_pairs(p) for p in model.parameters() if p.requires_grad and p.grad is not None]
    zeros = [
        torch.where(torch.zeros_like(p, dtype=torch.bool), p, 0).sum().to(trained[0].device)
        for p in trained
        if not hasattr(p, "device_mesh")
    ]
    return torch.stack(zeros).sum() if zeros else None


def placeholder_row(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with the same keys as ``batch``, but one row with one real token.

    A rank without data runs the model on it, to take part in the collectives.
    """
    ids = batch.get("input_ids")
    rows = len(batch["inputs_embeds"] if ids is None else ids)

    def shrink(name: str, value: Tensor) -> Tensor:
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != rows:
            return value
        row = value.new_zeros(1, *(max(1, size) for size in value.shape[1:]))
        if name == "attention_mask":
            row.view(-1)[0] = 1
        return row

    return {name: shrink(name, value) for name, value in batch.items()}


def nonfinite_layer(
    terms: Tensor, loss: Tensor, ranks: Ranks, rows: Tensor | None = None
) -> int | None:
    """Return the index of the first layer whose term is not finite on any rank; None if all terms
    and the loss are finite.  Every rank has to call it.

    Args:
        rows: mask of real tokens, ``[B, T]``. If one of its rows has no real token, the number of
            layers is returned; both checks need only one copy from the GPU, for which the host
            waits. None: not checked.
    """
    values = [terms.detach(), loss.detach().reshape(1)]
    if rows is not None:
        # Infinite where a row has no token.
        values.append(rows.to(terms.device).any(1).reciprocal())
    # 0 times a value that is not finite is NaN, which stays NaN in the sum over the ranks.
    count, zeros = len(terms), ranks.sum(torch.cat(values) * 0).tolist()
    finite = [zero == 0 for zero in zeros]
    if not all(finite[count + 1 :]):
        return count
    # If only the loss, their sum, overflows, the first layer is returned.
    return None if all(finite) else finite.index(False) % count


def nonfinite_text(step: int, layer: int, embeddings: Tensor) -> str:
    text = f"step {step}: layer {layer} (of those chosen) has a non-finite norm"
    is_finite = bool(torch.isfinite(embeddings).all())
    return text if is_finite else f"{text} (this batch's token embeddings are not finite)"
