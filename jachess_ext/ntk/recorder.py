"""One forward pass watched: every call that uses a chosen parameter, with its inputs and its
place in the graph.

Calls are seen as torch functions, not as modules, so that tied weights, weights that another
module reads and functional heads are seen too.  What is not understood is noted (`unknown`,
`unbatched`), and its parameters get exact per-sample gradients instead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from ..ops.gemm import onednn_serves, rows_times
from .calls import Call, local_call, recognise
from .chains import FOLLOWED, Chains

Key = tuple[str, str, int]  # kind of call, parameter, the how many-th of these in the pass
_NO_SAMPLES = "an output it makes has no dimension of samples"


@dataclass
class Layout:
    """How calls lay out samples, learned from a pass over one sample.

    Attributes:
        rows: rows of each call's output for one sample: 1 where the first dimension numbers
            samples; T where samples and tokens are one dimension; also the length of an output
            without a dimension of samples, which does not grow with them.
        unknown: parameter -> childless modules in which it was used in a way that is not
            understood (None: elsewhere).
    """

    rows: dict[Key, int] = field(default_factory=dict)
    unknown: dict[str, set[nn.Module | None]] = field(default_factory=lambda: defaultdict(set))


@dataclass
class Recorded:
    """A call and where its output is in the graph."""

    call: Call
    edge: GradientEdge


class Recorder(TorchFunctionMode):
    """Watches one forward pass over n samples; a context manager.

    Args:
        names: id of a chosen parameter -> its name.
        samples: n.
        layout: filled when ``learn``, else obeyed.
        local: childless modules that are differentiated as a whole, with their chosen parameters
            (name within the module -> full name).
        learn: a first pass, over one sample.
        inputs_only: nobody will ask for gradients of the model's weights.

    Attributes:
        calls: in order.
        unbatched: parameter -> why its samples cannot be told apart.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        samples: int,
        layout: Layout,
        local: Mapping[nn.Module, Mapping[str, str]],
        *,
        owners: Mapping[nn.Module, Mapping[str, str]] | None = None,
        learn: bool = False,
        inputs_only: bool = False,
    ) -> None:
        super().__init__()
        whole = {name for roles in local.values() for name in roles.values()}
        self._names = {key: name for key, name in names.items() if name not in whole}
        self._samples = samples
        self._layout = layout
        self._local = local
        self._owners = owners or {}
        self._learn = learn
        self._inputs_only = inputs_only
        self._seen: Counter[tuple[str, str]] = Counter()
        self._inside: list[nn.Module] = []
        self._hooks = ExitStack()
        self._chains = Chains()
        self.calls: list[Recorded] = []
        self.unbatched: dict[str, str] = {}

    def __enter__(self) -> Recorder:
        for module, roles in self._local.items():
            hook = partial(self._record_module, roles)
            self._keep(module.register_forward_hook(hook, with_kwargs=True))
        for module in self._owners if self._learn else ():
            self._keep(module.register_forward_pre_hook(lambda m, args: self._inside.append(m)))
            self._keep(module.register_forward_hook(self._leave))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        for call in self._chains.unfinished():
            self._reject(tuple(call.roles.values()), _NO_SAMPLES)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = fast_linear(func, args, kwargs) if self._inputs_only else None
        if output is None:
            output = func(*args, **kwargs)
        call, unknown = recognise(func, args, kwargs, self._names)
        if unknown and _passes_gradients(output, args):
            self._note_unknown(unknown, func)
        if call is not None:
            return self._record(call, output)
        ended, lost = self._chains.follow(func, args, kwargs, output)
        if lost is not None:
            self._reject(tuple(lost.roles.values()), _NO_SAMPLES)
        if ended is None:
            return output
        return self._one_row_each(ended, output)

    def _record(self, call: Call, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        names = tuple(call.roles.values())
        rows = output.shape[0] if output.dim() else 0
        keys = [self._key(call.kind, name) for name in names]
        if self._learn:
            self._layout.rows.update(dict.fromkeys(keys, rows))
            return output
        expected = self._layout.rows.get(keys[0])
        if expected is None:
            self._reject(names, "it is used in other calls from one pass to the next")
            return output
        if not output.requires_grad:
            return output
        if rows == expected * self._samples:
            self.calls.append(Recorded(call, get_gradient_edge(output)))
        elif rows == expected == 1:  # for all samples (position embeddings)
            output = self._one_row_each(call, output)
        elif call.kind in FOLLOWED:
            self._chains.start(call, output)
        else:
            self._reject(names, _NO_SAMPLES)
        return output

    def _one_row_each(self, call: Call, output: Tensor) -> Tensor:
        """[1, ...] as a row a sample, so that cotangents stay apart."""
        output = output.expand(self._samples, *output.shape[1:])
        self.calls.append(Recorded(call, get_gradient_edge(output)))
        return output

    def _key(self, kind: str, name: str) -> Key:
        """Of the next call; by parameter, since others of the call may fall back between passes."""
        key = (kind, name, self._seen[kind, name])
        self._seen[kind, name] += 1
        return key

    def _reject(self, names: tuple[str, ...], reason: str) -> None:
        for name in names:
            self.unbatched.setdefault(name, reason)

    def _note_unknown(self, names: set[str], func: Any) -> None:
        if self._learn:
            for name in names:
                inside = self._inside[-1] if self._inside else None
                self._layout.unknown[name].add(inside)
        else:
            called = getattr(func, "__name__", str(func))
            self._reject(tuple(names), f"it is used by {called}, in a way that is not covered")

    def _record_module(
        self, roles: Mapping[str, str], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        call = local_call(module, roles, args, kwargs, output)
        if call is None:
            self._reject(tuple(roles.values()), f"{type(module).__name__} is not covered")
            return output
        return self._record(call, output)

    def _leave(self, *hook_arguments: Any) -> None:
        self._inside.pop()

    def _keep(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)


def _passes_gradients(output: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call's result may carry gradients; not sizes, dtypes or the tensor itself."""
    values = output if isinstance(output, (list, tuple)) else (output,)
    return any(
        isinstance(value, Tensor)
        and value.is_floating_point()
        and not any(value is argument for argument in args)
        for value in values
    )


def owners_of(model: nn.Module, names: Mapping[int, str]) -> dict[nn.Module, dict[str, str]]:
    """Childless modules that hold chosen parameters: name within -> full name."""
    found: dict[nn.Module, dict[str, str]] = {}
    for module in model.modules():
        own = {key: names[id(p)] for key, p in module._parameters.items() if id(p) in names}
        if own and next(module.children(), None) is None:
            found[module] = own
    return found


# ---- linear layers of a recorded pass --------------------------------------------------------
#
# A capture asks for gradients of calls' outputs, never of weights, so that a linear layer's
# backward is one product, g W.  On processors where oneDNN beats torch's own choice (`ops.gemm`)
# both passes take it.  Calls that this does not serve stay as they are.


class _InputLinear(torch.autograd.Function):
    """x Wᵀ + b with a derivative by x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return rows_times(x, weight, bias=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,), (grad,) = ctx.saved_tensors, grads
        if torch.is_grad_enabled() or not onednn_serves(grad, weight):
            return grad @ weight, None, None
        return rows_times(grad.contiguous(), weight.mT), None, None


def fast_linear(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """``func(*args, **kwargs)`` where it is a linear layer that this serves, else None.

    Served are leaf weights, which nothing but a parameter's own gradient depends on, and inputs
    through which gradients pass.
    """
    if func is not F.linear or not 2 <= len(args) + len(kwargs) <= 3:
        return None
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    leaves = [weight] if bias is None else [weight, bias]
    if (
        not all(type(value) in (Tensor, nn.Parameter) and value.is_leaf for value in leaves)
        or type(x) is not Tensor
        or not x.requires_grad
        or weight.dim() != 2
        or torch.is_autocast_enabled("cpu")
        or (bias is not None and bias.dtype != torch.float32)
        or not onednn_serves(x, weight)
    ):
        return None
    detached = [value.detach() for value in leaves]
    result = _InputLinear.apply(x, detached[0], None if bias is None else detached[1])
    assert isinstance(result, Tensor)
    return result
