"""Record a forward pass call by call.

Calls of torch functions are recorded, not of modules, so that tied weights, weights used by another
module and functional heads are covered, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from ..jet.engine.derivative import DerivativeTensor
from ..jet.engine.types import Args, Function, Named
from ..ops.gemm import onednn_takes, rows_times
from ..torch_private import functional as F
from .calls import FOLLOWED, INSERTS, MOVES, Arguments, Call, Names, flat, local_call, recognise

Owners = Mapping[nn.Module, Mapping[str, str]]
Key = tuple[str, str, int]  # kind of call, parameter name, index of the call among these in a pass

_NO_SAMPLES = "an output it makes has no dimension of samples"


@dataclass
class SampleLayout:
    """Numbers of rows that calls output for one sample, determined in a pass over one sample.

    Attributes:
        rows: length of the first dimension of each call's output for one sample: 1 if the rows are
            samples, T if they are the tokens of all samples, any length if the number of rows does
            not depend on the number of samples.
        unknown: parameter name -> childless modules that use the parameter in a call that is not
            covered; None stands for a call outside of childless modules.
    """

    rows: dict[Key, int] = field(default_factory=dict)
    unknown: dict[str, set[nn.Module | None]] = field(default_factory=lambda: defaultdict(set))


class Recorder(TorchFunctionMode):
    """Record the calls of one forward pass over n samples; a context manager.

    Args:
        names: id -> name of the chosen parameters.
        num_samples: number of samples n.
        layout: layout of the calls' outputs: filled in if ``should_learn``, otherwise compared with
            the outputs of this pass.
        local: childless modules that are differentiated as a whole -> their chosen parameters
            (name within the module -> full name).
        owners: all childless modules with chosen parameters, in the same format; used if
            ``should_learn``.
        should_learn: whether this pass, over one sample, fills in the layout.
        inputs_only: whether gradients of covered parameters will not be needed.
        fallback_ids: ids of the parameters that get exact per-sample gradients.

    Attributes:
        calls: the recorded calls, in order.
        unbatched: parameter name -> why its contribution cannot be split by samples.
    """

    def __init__(
        self,
        names: Names,
        num_samples: int,
        layout: SampleLayout,
        local: Owners,
        *,
        owners: Owners | None = None,
        should_learn: bool = False,
        inputs_only: bool = False,
        fallback_ids: Set[int] = frozenset(),
    ) -> None:
        super().__init__()
        local_names = {name for roles in local.values() for name in roles.values()}
        self._names = {key: name for key, name in names.items() if name not in local_names}
        self._num_samples = num_samples
        self._layout = layout
        self._local = local
        self._owners = owners or {}
        self._should_learn = should_learn
        self._inputs_only, self._fallback_ids = inputs_only, fallback_ids
        self._counts: Counter[tuple[str, str]] = Counter()
        self._running: list[nn.Module] = []  # stack of the childless modules whose forward runs
        self._hooks = ExitStack()
        # Id of a chain's last tensor -> the tensor (held, so that its id is not reused) and the
        # chain's first call.
        self._chains: dict[int, tuple[Tensor, Call]] = {}
        # Id -> calls whose output has no dimension of samples yet.
        self._waiting: dict[int, Call] = {}
        self.calls: list[Call] = []
        self.unbatched: dict[str, str] = {}

    def __enter__(self) -> Recorder:
        on_exit = self._hooks.callback
        for module, roles in self._local.items():
            hook = partial(self._record_module, roles)
            on_exit(module.register_forward_hook(hook, with_kwargs=True).remove)
        for module in self._owners if self._should_learn else ():
            on_exit(module.register_forward_pre_hook(lambda m, _: self._running.append(m)).remove)
            on_exit(module.register_forward_hook(self._pop_module).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hooks.close()
        for call in self._waiting.values():
            self._reject(call, _NO_SAMPLES)

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Named | None = None
    ) -> object:
        kwargs = kwargs or {}
        output: object = None
        if self._inputs_only and not any(id(v) in self._fallback_ids for v in flat(args, kwargs)):
            output = fast_linear(func, args, kwargs)
        if output is None:
            output = func(*args, **kwargs)
        call, unknown = recognise(func, args, kwargs, self._names)
        if unknown and _passes_gradients(output, args):
            self._note_unknown(unknown, func)
        if call is not None:
            return self._record(call, output)
        return self._follow(func, args, kwargs, output) if self._chains else output

    def _follow(self, func: Function, args: Args, kwargs: Named, output: object) -> object:
        """Extend a chain by a call, or record the chain if the call inserts a dimension of samples.

        Returns:
            The output, expanded to one row for each sample if the chain is recorded.
        """
        values = [*args, *kwargs.values()]
        start = next((self._chains[id(v)][1] for v in values if id(v) in self._chains), None)
        if start is None or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        if func in INSERTS and kwargs.get("dim", args[1] if len(args) > 1 else None) == 0:
            self._waiting.pop(id(start), None)
            chain = Call("chain", start.roles, None, {"call": start, "end": output})
            return self._expand_rows(chain, output)
        if func in MOVES or func in INSERTS:
            self._chains[id(output)] = (output, start)
        else:
            self._reject(start, _NO_SAMPLES)
        return output

    def _record(self, call: Call, output: object) -> object:
        if not isinstance(output, Tensor):
            return output
        rows = output.shape[0] if output.dim() else 0
        keys = [self._key(call.kind, name) for name in call.roles.values()]
        if self._should_learn:
            self._layout.rows.update(dict.fromkeys(keys, rows))
            return output
        expected = self._layout.rows.get(keys[0])
        if expected is None:
            self._reject(call, "it is used in other calls from one pass to the next")
            return output
        if not output.requires_grad:
            return output
        if isinstance(output, DerivativeTensor):
            self._reject(call, "it is used within jx.jvp, jx.jet or jx.laplacian")
            return output
        if rows == expected * self._num_samples:
            call.edge = get_gradient_edge(output)
            self.calls.append(call)
        elif rows == expected == 1:  # one row for all samples (position embeddings)
            output = self._expand_rows(call, output)
        elif call.kind in FOLLOWED:
            call.edge = get_gradient_edge(output)
            self._chains[id(output)] = (output, call)
            self._waiting[id(call)] = call
        else:
            self._reject(call, _NO_SAMPLES)
        return output

    def _expand_rows(self, call: Call, output: Tensor) -> Tensor:
        """Record a call whose output, [1, ...], is the same for all samples; return the output
        expanded to [n, ...], so that the samples get separate cotangents."""
        output = output.expand(self._num_samples, *output.shape[1:])
        call.edge = get_gradient_edge(output)
        self.calls.append(call)
        return output

    def _key(self, kind: str, name: str) -> Key:
        """Return the key of the next call of this kind that uses the parameter."""
        key = (kind, name, self._counts[kind, name])
        self._counts[kind, name] += 1
        return key

    def _reject(self, call: Call, reason: str) -> None:
        for name in call.roles.values():
            self.unbatched.setdefault(name, reason)

    def _note_unknown(self, names: set[str], func: Function) -> None:
        function_name = getattr(func, "__name__", str(func))
        for name in names:
            if self._should_learn:
                self._layout.unknown[name].add(self._running[-1] if self._running else None)
            else:
                reason = f"it is used by {function_name}, in a way that is not covered"
                self.unbatched.setdefault(name, reason)

    def _record_module(
        self, roles: Mapping[str, str], module: nn.Module, args: Args, kwargs: Named, output: object
    ) -> object:
        call = local_call(module, roles, args, kwargs, output)
        if call is not None:
            return self._record(call, output)
        for name in roles.values():
            self.unbatched.setdefault(name, f"{type(module).__name__} is not covered")
        return output

    def _pop_module(self, *hook_arguments: object) -> None:
        self._running.pop()


def _passes_gradients(output: object, args: Args) -> bool:
    """Return whether a call's output has a floating-point or complex tensor that is not one of the
    arguments, through which gradients may flow."""
    values = output if isinstance(output, (list, tuple)) else (output,)
    return any(
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and not any(value is argument for argument in args)
        for value in values
    )


def owners_of(model: nn.Module, names: Names) -> Owners:
    """Return a dict of the childless modules with chosen parameters: module -> (name of a parameter
    within the module -> full name)."""
    owners: dict[nn.Module, dict[str, str]] = {}
    for module in model.modules():
        chosen = {key: names[id(p)] for key, p in module._parameters.items() if id(p) in names}
        if chosen and next(module.children(), None) is None:
            owners[module] = chosen
    return owners


# ---- linear layers of a recorded pass --------------------------------------------------------
#
# `capture` needs gradients with respect to calls' outputs, never to weights, so that a linear
# layer's backward is a single product, g W.  On processors where oneDNN is faster than torch's
# default (`ops.gemm`) both passes use it.  Other calls are unchanged.


class _InputLinear(torch.autograd.Function):
    """Compute a linear layer x Wᵀ + b that has a derivative with respect to x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return rows_times(x, weight, bias=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,), (grad,) = ctx.saved_tensors, grads
        if torch.is_grad_enabled() or not onednn_takes(grad, weight):
            return grad @ weight, None, None
        return rows_times(grad.contiguous(), weight.mT), None, None


def fast_linear(func: Function, args: Args, kwargs: Named) -> Tensor | None:
    """Return ``func(*args, **kwargs)`` for a linear layer that oneDNN computes faster, else None.

    The weight and the bias must be leaves, and the input must require gradients.
    """
    if func is not F.linear or not 2 <= len(args) + len(kwargs) <= 3:
        return None
    arguments: Arguments = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    x, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    leaves = [weight] if bias is None else [weight, bias]
    if (
        not all(type(value) in (Tensor, nn.Parameter) and value.is_leaf for value in leaves)
        or type(x) is not Tensor
        or not x.requires_grad
        or weight.dim() != 2
        or torch.is_autocast_enabled("cpu")
        or (bias is not None and bias.dtype != torch.float32)
        or not onednn_takes(x, weight)
    ):
        return None
    detached = [value.detach() for value in leaves]
    result = _InputLinear.apply(x, detached[0], None if bias is None else detached[1])
    assert isinstance(result, Tensor)
    return result
