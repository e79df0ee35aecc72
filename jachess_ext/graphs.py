"""`jx.graphed`: a training step as a CUDA graph, all of whose kernels are launched at once."""

from __future__ import annotations

import enum
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from . import torch_private
from .jet.engine.types import Args, Function, Named

P = ParamSpec("P")
R = TypeVar("R")
if TYPE_CHECKING:
    Leaves = Sequence[tuple[torch_private.pytree.KeyPath, object]]  # of a nest, with their paths


def graphed(
    step: Callable[P, R],
    *,
    parameters: Iterable[Tensor] | None = None,
    warmup: int = 3,
    check_every: int = 100,
) -> Callable[P, R]:
    """Return a function that runs the same training step, as a CUDA graph after the first calls.

    A step with a penalty launches hundreds of small kernels, for which a GPU waits most of the
    time; a graph launches them at once.  Each call is one step: the first ``warmup`` calls run the
    step eagerly, on a side stream, and the next call captures it.  From then on the arguments are
    copied into those of the capture and the graph is replayed, with new random numbers for dropout
    and for the directions of a `JacHess`, whose step counter is moved to the GPU.  Replays equal
    eager steps bit for bit, if both have the same attention mask (eagerly, transformers drops the
    mask of a batch without padding).

    A graph is a list of kernels: Python code does not run again.  Python numbers (a penalty's
    strength) keep their values of the capture, tensors must not be replaced by others (load weights
    by ``load_state_dict``, keep the optimizer), and no result is copied to the host: a step that is
    not finite is neither refused nor skipped.  Errors are raised for changed arguments on the host
    (numbers, arrays, CPU tensors), changed numbers of an optimizer, an optimizer that counts steps
    on the host, and calls of ``train()`` or ``requires_grad_()`` of a model that the step trains.
    Without a GPU the steps run eagerly, with one warning.

    ``torch.cuda.make_graphed_callables`` captures a module's forward and backward as two graphs.
    It does not support jets (their stack is not an argument of the module), runs the warm-up as
    additional steps, and does not include the loss, its penalty and the optimizer.

    Args:
        step: function of nests of tensors of fixed shapes on one GPU (batches padded to one length,
            without a smaller last batch), which returns a nest of tensors.  It calls ``zero_grad``,
            ``backward`` and an optimizer's ``step``.  The optimizer needs ``capturable=True`` if it
            has that setting, and a tensor as its learning rate if the learning rate changes.
        parameters: parameters whose gradients the step leaves for an optimizer outside of it; their
            gradients are set by each call, and must be None when it begins.  None: the step leaves
            no gradients.
        warmup: number of calls before the capture, at least 1; at least 3 for a compiled model.
        check_every: number of calls between two checks that results are finite, each of which
            waits for the GPU.

    Raises:
        ValueError: a call differs from the capture; gradients accumulate over calls; an optimizer's
            step is not capturable; ``warmup`` or ``check_every`` is not positive.
        TypeError: step returns something other than tensors.
        FloatingPointError: a result is not finite.
        RuntimeError: step copies a tensor's value to the host (``.item()``); raised by torch.

    Examples:
        >>> reg = jx.JacHess(model, weights="uniform")
        >>> on_gpu = model.device.type == "cuda"
        >>> optimizer = torch.optim.AdamW(model.parameters(), capturable=on_gpu)
        >>> @jx.graphed
        ... def step(batch):
        ...     optimizer.zero_grad()
        ...     loss = reg(batch).total
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> bool(step(batch).isfinite())
        True
    """
    for name, value in (("warmup", warmup), ("check_every", check_every)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected a number of calls from 1 up")
    return _Graphed(step, None if parameters is None else list(parameters), warmup, check_every)


_step_is_running = False


def is_graphed_step() -> bool:
    """Return whether a step of `graphed` is running, in the warm-up or the capture."""
    return _step_is_running


def on_gpu(leaves: Sequence[object]) -> bool:
    """Return whether any leaf is a tensor on a GPU."""
    return any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the side stream of a GPU, always the same one, since cuBLAS allocates memory for each
    stream."""
    return torch.cuda.Stream(device)


@contextmanager
def side_stream() -> Iterator[None]:
    """Run the code within the context on a side stream, which the warm-up of a capture requires."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def capture(run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Capture ``run``; return its CUDA graph, and its results, which each replay overwrites."""
    graph = torch.cuda.CUDAGraph()
    # The thread of a data loader may pin memory during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return graph, results


class _Backward(TorchFunctionMode):
    """Mode that records whether a backward pass ran, which sets gradients of parameters.

    Attributes:
        has_run: whether a backward pass ran.
    """

    has_run = False

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Named | None = None
    ) -> object:
        self.has_run |= func in (Tensor.backward, torch.autograd.backward)
        return func(*args, **(kwargs or {}))


class _Graphed(Generic[R]):
    """The function that `graphed` returns."""

    def __init__(
        self, step: Callable[..., R], parameters: list[Tensor] | None, warmup: int, check_every: int
    ) -> None:
        self._step, self._parameters = step, parameters
        self._warmup, self._check_every = warmup, check_every
        self._calls, self._is_eager = 0, False
        self._optimizers: list[Optimizer] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *args: object, **kwargs: object) -> R:
        flat, nest = torch_private.pytree.tree_flatten_with_path((args, kwargs))
        if not self._calls and not on_gpu([leaf for _, leaf in flat]):
            self._is_eager = True
            warnings.warn(
                "no argument of the step is a tensor on a GPU, so that its steps run as they are: "
                "a CUDA graph needs the batch on the GPU",
                stacklevel=2,
            )
        self._calls += 1
        if self._is_eager:
            return self._step(*args, **kwargs)
        if any(p.grad is not None for p in self._parameters or ()):
            raise ValueError(
                "parameters have gradients when the step begins, to which a graph adds nothing: "
                "it has no gradient accumulation; call zero_grad() after each optimizer's step"
            )
        if self._calls <= self._warmup:
            results = self._warm_up(args, kwargs)
        else:
            results = self._replay(flat, nest)
        return torch_private.pytree.tree_unflatten(results, self._nest)

    def _warm_up(self, args: Sequence[object], kwargs: dict[str, object]) -> list[Tensor]:
        self._has_stepped = False
        with side_stream(), self._observe_optimizers(), _Backward() as backward:
            results = self._run(args, kwargs)
        if backward.has_run and not self._has_stepped and self._parameters is None:
            raise ValueError(
                "a call of the step ended without an optimizer's step, so that gradients would "
                "add up over calls: a graph has no gradient accumulation; let the step take "
                "all micro-batches, or pass parameters= where the optimizer is outside"
            )
        return results

    def _replay(self, flat: Leaves, nest: torch_private.pytree.TreeSpec) -> list[Tensor]:
        if self._graph is None:
            self._capture(flat, nest)
        assert self._graph is not None
        self._check(flat, nest)
        with torch.no_grad():
            for static, (_, leaf) in zip(self._static, flat, strict=True):
                if isinstance(static, Tensor) and isinstance(leaf, Tensor):
                    static.copy_(leaf, non_blocking=True)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters or (), self._gradients, strict=True):
            parameter.grad = gradient
        passed = self._calls % self._check_every or all(r.isfinite().all() for r in self._results)
        if not passed:
            raise FloatingPointError(
                f"call {self._calls}: a result of the step is not finite, which is looked for in "
                f"every {self._check_every} calls: lower the learning rate, use a wider dtype, and "
                "go on from an earlier checkpoint"
            )
        return [result.clone() for result in self._results]

    def _record_optimizer(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Record an optimizer before its step, and its numbers on the host; raise ValueError if it
        is not capturable."""
        if any(group.get("capturable") is False for group in optimizer.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__} counts its steps on the host: a graph needs "
                "capturable=True"
            )
        self._has_stepped = True
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self._host_state = _host_state(optimizer)

    def _check_host_state(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Raise ValueError if an optimizer's step changed a number on the host."""
        new_state = _host_state(optimizer)
        for path, before in self._host_state.items():
            if new_state.get(path, before) != before:
                leaf = torch_private.pytree.keystr(path[1:])
                raise ValueError(
                    f"{type(optimizer).__name__} changes its {leaf} on the host, which no replay "
                    "does: take an optimizer with capturable=True, such as torch.optim.AdamW, or "
                    "leave its step outside (parameters=)"
                )

    @contextmanager
    def _observe_optimizers(self) -> Iterator[None]:
        """Record and check the steps of all optimizers within the context."""
        pre_hook = register_optimizer_step_pre_hook(self._record_optimizer)
        post_hook = register_optimizer_step_post_hook(self._check_host_state)
        try:
            yield
        finally:
            pre_hook.remove()
            post_hook.remove()

    def _run(self, args: Sequence[object], kwargs: dict[str, object]) -> list[Tensor]:
        """Run the step; return the tensors of its result, detached."""
        global _step_is_running
        _step_is_running = True
        try:
            result = self._step(*args, **kwargs)
        finally:
            _step_is_running = False
        tensors, self._nest = torch_private.pytree.tree_flatten(result)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"the step returned a {type(tensor).__name__}, which no replay computes anew; "
                    "expected tensors, or nests of them"
                )
        return [tensor.detach() for tensor in tensors]

    def _capture(self, flat: Leaves, nest: torch_private.pytree.TreeSpec) -> None:
        self._static = [_copy(leaf) for _, leaf in flat]
        self._arguments = nest
        self._numbers = [_numbers(optimizer) for optimizer in self._optimizers]
        args, kwargs = torch_private.pytree.tree_unflatten(self._static, nest)
        with self._observe_optimizers():
            self._graph, self._results = capture(lambda: self._run(args, kwargs))
        groups = [group["params"] for o in self._optimizers for group in o.param_groups]
        self._trained = [*(self._parameters or ()), *(p for group in groups for p in group)]
        self._modules = _modules_with(self._trained)
        self._flags = self._current_flags()
        self._gradients = [parameter.grad for parameter in self._parameters or ()]

    def _current_flags(self) -> list[bool]:
        """Return the flags `requires_grad` and `training` of the trained parameters and modules."""
        flags = [parameter.requires_grad for parameter in self._trained]
        return flags + [module.training for module in self._modules]

    def _check(self, flat: Leaves, nest: torch_private.pytree.TreeSpec) -> None:
        """Raise ValueError if a replay would differ from the step with these arguments."""
        if nest != self._arguments:
            raise ValueError(
                "the step's arguments are nested otherwise than those of the captured step; "
                "expected the same names and numbers of tensors"
            )
        if self._current_flags() != self._flags:
            raise ValueError(
                "train(), eval() or requires_grad_() changed a model since its step was captured, "
                "which no replay sees: call jx.graphed again after the change"
            )
        for static, (path, leaf) in zip(self._static, flat, strict=True):
            expected, actual = _description(static), _description(leaf)
            path_text = torch_private.pytree.keystr(path[1:])
            if expected == actual and not _is_same(static, leaf):
                raise ValueError(
                    f"the step's argument {path_text} has other values than when it was captured, "
                    "which a graph does not see on the host: pass a tensor on the GPU"
                )
            if expected != actual:
                raise ValueError(
                    f"the step's argument {path_text} is {actual}, but was {expected} when it was "
                    "captured: pad batches to one length, and drop a smaller last one "
                    "(drop_last=True)"
                )
        for optimizer, groups in zip(self._optimizers, self._numbers, strict=True):
            for captured_group, group in zip(groups, optimizer.param_groups, strict=True):
                for name, number in captured_group.items():
                    if group[name] != number:
                        raise ValueError(
                            f"{name} of {type(optimizer).__name__} is {group[name]}, but was "
                            f"{number} when its step was captured: pass a tensor on the GPU, "
                            f"{name}=torch.tensor({number}, device='cuda'), which schedulers fill"
                        )


def _numbers(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return the settings of each parameter group that are no tensors, and thus constants of a
    graph."""
    return [
        {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)}
        for group in optimizer.param_groups
    ]


def _host_state(optimizer: Optimizer) -> dict[torch_private.pytree.KeyPath, str]:
    """Return an optimizer's numbers and its tensors on the host as text, by their path."""
    numbers = {
        k: v for k, v in vars(optimizer).items() if k[0] != "_" and isinstance(v, int | float)
    }
    leaves, _ = torch_private.pytree.tree_flatten_with_path([numbers, *optimizer.state.values()])
    return {
        path: str(leaf.tolist() if isinstance(leaf, Tensor) else leaf)
        for path, leaf in leaves
        if isinstance(leaf, int | float) or (isinstance(leaf, Tensor) and not on_gpu([leaf]))
    }


def _modules_with(parameters: Sequence[Tensor]) -> list[nn.Module]:
    """Return all modules of the models that hold at least one of the parameters."""
    ids = {*map(id, parameters)}
    modules = [value for value in gc.get_objects() if isinstance(value, nn.Module)]
    holders = [module for module in modules if ids & {*map(id, module.parameters())}]
    return [*dict.fromkeys(submodule for module in holders for submodule in module.modules())]


# Types of constants with a unique `repr`.
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), slice, range, enum.Enum, np.generic),
    *(torch.dtype, torch.device, torch.Size),
)


def _copy(leaf: object) -> object:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()  # the caller may write into the array
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _description(leaf: object) -> str:
    """Return the dtype, shape and device of an argument, or the `repr` of a constant."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {list(leaf.shape)} on {leaf.device}"
    if isinstance(leaf, np.ndarray):
        return f"an array {leaf.dtype} {list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, _VALUES) else f"{type(leaf).__name__} at {id(leaf):#x}"


def _is_same(static: object, leaf: object) -> bool:
    """Return whether an argument on the host equals the captured one; True for other arguments."""
    if isinstance(static, np.ndarray) and isinstance(leaf, np.ndarray):
        return static.tobytes() == leaf.tobytes()
    if isinstance(static, Tensor) and isinstance(leaf, Tensor) and not on_gpu([static]):
        return torch.equal(static, leaf)
    return True
