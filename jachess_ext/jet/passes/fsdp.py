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
    """Yield a list, filled when the context ends, of the process groups of the wrapped modules that
    were called with jets within it."""
    groups: list[dist.ProcessGroup] = []
    _groups.clear()
    try:
        yield groups
    finally:
        groups += _groups
        _groups.clear()


def _sharded_modules() -> list[nn.Module]:
    """Return every module of this process that `fully_shard` was called on."""
    if not _dist_is_on() or "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    return [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]


@contextmanager
def jets_through_fsdp() -> Iterator[None]:
    """Call the hooks of `fully_shard` with the plain tensors of jets, while the context lasts.

    The hooks gather and free weights when gradients of a module's inputs and outputs are computed,
    and free weights after its forward.  Autograd records the stack of a jet, or the primal of a
    dual tensor, not the wrapper; and a deferred jet has to be computed before its weights are
    freed.
    """
    changed: list[tuple[dict[int, Function], int, Function]] = []
    for module in _sharded_modules():
        for hooks, wrap_hook in (
            (module._forward_pre_hooks, _wrap_pre_hook),
            (module._forward_hooks, _wrap_hook),
        ):
            for number, hook in hooks.items():
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    changed.append((hooks, number, hook))
                    hooks[number] = wrap_hook(hook)
    try:
        with _jets_through_ddp():
            yield
    finally:
        for hooks, number, hook in changed:
            hooks[number] = hook


def _dist_is_on() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _jets_through_ddp() -> Iterator[None]:
    """Hand DistributedDataParallel the plain tensors of the jets that its module returns.

    To find unused parameters, it traverses the outputs' graphs and passes the outputs to an
    autograd Function.
    """
    if not _dist_is_on():
        yield
        return
    open_modules: list[tuple[RemovableHandle, list[Rebuild]]] = []

    def before(module: nn.Module, args: Args) -> None:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            rebuild: list[Rebuild] = []

            def plain(inner: nn.Module, args: Args, output: T) -> T:
                value, rebuild[:] = _unwrap_jets(output)
                return value

            # DDP's forward calls the inner module, then traverses the graph of its output: only a
            # hook on the inner module runs in between. It runs after the module's other hooks,
            # which are called with jets.
            open_modules.append((module.module.register_forward_hook(plain), rebuild))
            _groups[module.process_group] = None

    def after(module: nn.Module, args: Args, output: T) -> T:
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            return output
        hook, rebuild = open_modules.pop()
        hook.remove()
        return _rewrap_jets(output, rebuild)

    with register_module_forward_pre_hook(before), register_module_forward_hook(after):
        try:
            yield
        finally:
            for hook, _ in open_modules:  # of modules whose forward raised
                hook.remove()


def _wrap_pre_hook(hook: Callable) -> Function:
    def wrapper(module: nn.Module, args: Args, kwargs: Named) -> tuple[Args, Named]:
        plain, rebuild = _unwrap_jets((args, kwargs))
        for parameter in module.parameters():
            if (mesh := getattr(parameter, "device_mesh", None)) is not None:
                _groups.update(dict.fromkeys(mesh.get_all_groups()))
                break
        changed = hook(module, *plain)
        return _rewrap_jets(plain if changed is None else changed, rebuild)

    return wrapper


def _wrap_hook(hook: Callable) -> Function:
    def wrapper(module: nn.Module, args: Args, output: T) -> T:
        plain, rebuild = _unwrap_jets(output)
        changed = hook(module, args, plain)
        return _rewrap_jets(plain if changed is None else changed, rebuild)

    return wrapper


def _unwrap_jets(value: T) -> tuple[T, list[Rebuild]]:
    """Replace jets by their plain tensors; also return the functions that wrap each tensor
    again."""
    rebuild: list[Rebuild] = []

    def plain(tensor: Tensor) -> Tensor:
        if isinstance(tensor, JetTensor):
            rebuild.append(tensor.with_streams)
            return tensor.streams
        if isinstance(tensor, DualTensor):
            rebuild.append(tensor.with_primal)
            return tensor.primal
        rebuild.append(lambda same: same)
        return tensor

    return map_tensors(value, plain), rebuild


def _rewrap_jets(value: T, rebuild: list[Rebuild]) -> T:
    # `map_tensors` has a fixed order, so that each tensor gets the function of its position.
    remaining = iter(rebuild)
    return map_tensors(value, lambda tensor: next(remaining)(tensor))
