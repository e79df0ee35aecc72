"""Jets through modules wrapped by `fully_shard` or DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..engine.layout import map_tensors
from ..engine.tensor import JetTensor
from ..engine.types import Args, Function, Named, T
from .dual import DualTensor

Rebuild = Callable[[Tensor], Tensor]

_groups: dict[dist.ProcessGroup, None] = {}


@contextmanager
def collect_groups() -> Iterator[list[dist.ProcessGroup]]:
    """Return a context that yields a list of process groups, which is filled when the context ends.

    These are the groups of the wrapped modules that were called with jets within the context.
    """
    groups: list[dist.ProcessGroup] = []
    _groups.clear()
    try:
        yield groups
    finally:
        groups += _groups
        _groups.clear()


def _sharded_modules() -> list[nn.Module]:
    """Return all modules of this process that are wrapped by `fully_shard`."""
    if not _dist_is_on() or "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    return [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]


@contextmanager
def jets_through_fsdp() -> Iterator[None]:
    """Pass the plain tensors of jets to the hooks of `fully_shard`, while the context lasts.

    The hooks gather and free weights when gradients of a module's inputs and outputs are computed,
    and free weights after its forward.  They need the tensors that autograd records: the stack of a
    jet, or the primal of a dual tensor, not the wrapper.  A deferred jet has to be computed before
    its weights are freed.
    """
    replaced_hooks: list[tuple[dict[int, Function], int, Function]] = []
    for module in _sharded_modules():
        for hooks, wrap_hook in (
            (module._forward_pre_hooks, _wrap_pre_hook),
            (module._forward_hooks, _wrap_hook),
        ):
            for number, hook in hooks.items():
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    replaced_hooks.append((hooks, number, hook))
                    hooks[number] = wrap_hook(hook)
    try:
        with _jets_through_ddp():
            yield
    finally:
        for hooks, number, hook in replaced_hooks:
            hooks[number] = hook


def _dist_is_on() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _jets_through_ddp() -> Iterator[None]:
    """Give DistributedDataParallel the plain tensors of the jets that its inner module returns.

    To find unused parameters, DDP traverses the graphs of the outputs and passes the outputs to an
    autograd Function, which takes no jets.
    """
    if not _dist_is_on():
        yield
        return
    running: list[tuple[RemovableHandle, list[Rebuild]]] = []  # DDP modules in their forward

    def begin_forward(module: nn.Module, args: Args) -> None:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            rebuild: list[Rebuild] = []

            def unwrap_output(inner: nn.Module, args: Args, output: T) -> T:
                value, rebuild[:] = _unwrap_jets(output)
                return value

            # DDP's forward calls the inner module, then traverses the graph of its output: only a
            # hook on the inner module runs in between. It runs after the module's other hooks,
            # which are called with jets.
            running.append((module.module.register_forward_hook(unwrap_output), rebuild))
            _groups[module.process_group] = None

    def end_forward(module: nn.Module, args: Args, output: T) -> T:
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            return output
        hook, rebuild = running.pop()
        hook.remove()
        return _rewrap_jets(output, rebuild)

    with register_module_forward_pre_hook(begin_forward), register_module_forward_hook(end_forward):
        try:
            yield
        finally:
            for hook, _ in running:  # modules whose forward raised
                hook.remove()


def _wrap_pre_hook(hook: Callable) -> Function:
    def wrapper(module: nn.Module, args: Args, kwargs: Named) -> tuple[Args, Named]:
        plain, rebuild = _unwrap_jets((args, kwargs))
        for parameter in module.parameters():
            if (mesh := getattr(parameter, "device_mesh", None)) is not None:
                _groups.update(dict.fromkeys(mesh.get_all_groups()))
                break
        result = hook(module, *plain)
        return _rewrap_jets(plain if result is None else result, rebuild)

    return wrapper


def _wrap_hook(hook: Callable) -> Function:
    def wrapper(module: nn.Module, args: Args, output: T) -> T:
        plain, rebuilds = _unwrap_jets(output)
        result = hook(module, args, plain)
        return _rewrap_jets(plain if result is None else result, rebuilds)

    return wrapper


def _unwrap_jets(value: T) -> tuple[T, list[Rebuild]]:
    """Replace the jets in a nest by their plain tensors.

    Returns:
        The nest of plain tensors; and for each tensor a function that rebuilds the jet from it.
    """
    rebuild: list[Rebuild] = []

    def unwrap(tensor: Tensor) -> Tensor:
        if isinstance(tensor, JetTensor):
            rebuild.append(tensor.with_streams)
            return tensor.streams
        if isinstance(tensor, DualTensor):
            rebuild.append(tensor.with_primal)
            return tensor.primal
        rebuild.append(lambda plain: plain)
        return tensor

    return map_tensors(value, unwrap), rebuild


def _rewrap_jets(value: T, rebuild: list[Rebuild]) -> T:
    # `map_tensors` has a fixed order, so that each tensor gets the function of its position.
    remaining = iter(rebuild)
    return map_tensors(value, lambda tensor: next(remaining)(tensor))
