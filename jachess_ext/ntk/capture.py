"""Record a model's calls, take per-sample gradients from them, and check that none is missing.

A block of samples takes one forward pass, watched call by call (`Recorder`), and one backward pass
an output, to the calls' outputs.  Calls are seen as torch functions, not as modules, so that tied
weights, weights that another module reads and functional heads are seen too.  Parameters of calls
that are not covered get exact per-sample gradients instead: `probe` compares what was recorded with
a plain backward pass, and `check_kernel` the finished kernel.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.overrides import TorchFunctionMode

from ..jet.tensor import DerivativeTensor
from ..models import in_mode
from ..ops.gemm import onednn_serves, rows_times
from .contract import (
    Contribution,
    Dense,
    Matches,
    Tied,
    add_up,
    as_real,
    make_factors,
    make_matches,
)
from .outputs import NESTED, RENORMALISED, Batch, OutputMap, Samples

Given = Mapping[str, Any]
Names = Mapping[int, str]  # id of a chosen parameter -> its name
Owners = Mapping[nn.Module, Mapping[str, str]]
Shapes = Mapping[str, torch.Size]
Key = tuple[str, str, int]  # kind of call, parameter, the how many-th of these in the pass

_NO_SAMPLES = "an output it makes has no dimension of samples"
_NOT_WHOLE = "the recorded calls do not give its whole gradient"
_PROBED = 2  # samples; with a single one, an output without samples would look the same
_PROBE_SEED, _SEPARATION_SEED = 0x50524F, 0x534550
# Relative error between two ways of computing a value: far above round-off (that of float32 even in
# float64 models, since transformers' softmax and norms often compute in float32), and below the
# error that a missing call would cause.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_TOLERANCE_16 = 0.1
_SMALL = 0.3  # times √eps


# ---- calls that use a parameter ---------------------------------------------------------------


@dataclass
class Call:
    """A call of a torch function or of a module.

    Attributes:
        kind: of the function, a key of ``_CONTRIBUTE``.
        roles: role ("weight", "bias") -> the parameter's name.
        inputs: the data the parameter meets: [n·s, ...] like the output; None where there is none.
        options: what else the contribution needs.
        edge: where the output is in the graph, once it is recorded.
    """

    kind: str
    roles: dict[str, str]
    inputs: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)
    edge: GradientEdge = field(init=False)


def recognise(
    function: Any, args: tuple[Any, ...], kwargs: Given, names: Names
) -> tuple[Call | None, set[str]]:
    """Return the call, and the names of the parameters in it that play no known role."""
    values = _flat(args, kwargs)
    touched = {names[id(value)] for value in values if id(value) in names}
    if not touched:
        return None, touched
    call = None
    is_complex = any(isinstance(value, Tensor) and value.is_complex() for value in values)
    if function in _READERS and not is_complex:
        order, read = _READERS[function]
        if len(args) <= len(order) and set(kwargs) <= set(order):
            call = read(dict(zip(order, args, strict=False)) | dict(kwargs), names)
    return call, touched - (set(call.roles.values()) if call is not None else set())


def _flat(args: tuple[Any, ...], kwargs: Given) -> list[Any]:
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat.extend(value) if isinstance(value, (list, tuple)) else flat.append(value)
    return flat


def _linear(given: Given, names: Names) -> Call | None:
    if not _plain_weight(given, names):
        return None
    return Call("linear", _roles(given, names), given["input"].detach())


def _addmm(given: Given, names: Names) -> Call | None:
    """Read bias + x W with W [d_in, d_out], transformers' Conv1D."""
    given = {"bias": given["input"], "input": given["mat1"], "weight": given["mat2"]}
    if given["bias"].dim() != 1 or not _plain_weight(given, names):
        return None
    return Call("linear", _roles(given, names), given["input"].detach(), {"transposed": True})


def _embedding(given: Given, names: Names) -> Call | None:
    if given.get("max_norm") is not None:
        raise ValueError(RENORMALISED.format(names.get(id(given["weight"]))))
    if given.get("scale_grad_by_freq") or given.get("sparse"):
        return None
    padding = given.get("padding_idx")
    rows = given["weight"].shape[0]
    if padding is not None and padding < 0:
        padding += rows
    options = {"padding": padding, "rows": rows}
    return Call("embedding", _roles(given, names), given["input"].detach(), options)


def _take(given: Given, names: Names) -> Call | None:
    """Read bias[ids], an embedding of width 1."""
    if id(given["input"]) not in names or given["input"].dim() != 1:
        return None
    if bool((given["index"] < 0).any()):
        return None
    options = {"padding": None, "rows": given["input"].shape[0]}
    return Call("take", {"bias": names[id(given["input"])]}, given["index"], options)


def _norm(kind: str, eps: float | None, given: Given, names: Names) -> Call | None:
    """Read a norm; `eps` is the function's default."""
    if id(given["input"]) in names:
        return None
    options = {"shape": list(given["normalized_shape"]), "eps": given.get("eps", eps)}
    return Call(kind, _roles(given, names), given["input"].detach(), options)


def _product(given: Given, names: Names) -> Call | None:
    """Read weight * x, elementwise."""
    values = list(given.values())
    weights = [i for i, value in enumerate(values) if id(value) in names]
    if len(values) != 2 or len(weights) != 1:
        return None
    weight, other = values[weights[0]], values[1 - weights[0]]
    if not isinstance(other, Tensor) or other.dim() < max(1, weight.dim()):
        return None
    if other.dim() == weight.dim() and weight.shape[0] != 1:
        return None  # the parameter has a number for every row: no sample owns one
    return Call("product", {"weight": names[id(weight)]}, other.detach())


def _sum(given: Given, names: Names) -> Call | None:
    """Read bias + x, elementwise."""
    call = _product(given, names)
    return None if call is None else Call("sum", {"bias": call.roles["weight"]}, None)


def _plain_weight(given: Given, names: Names) -> bool:
    """Tell whether the input is no parameter and the weight is a matrix."""
    return id(given["input"]) not in names and given["weight"].dim() == 2


def _roles(given: Given, names: Names) -> dict[str, str]:
    roles = {role: names.get(id(given.get(role))) for role in ("weight", "bias")}
    return {role: name for role, name in roles.items() if name is not None}


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
_PAIR = ("input", "other")

# Function -> the order of its arguments, and the reader of its call.
_READERS: dict[Any, tuple[tuple[str, ...], Callable[[Given, Names], Call | None]]] = {
    F.linear: (("input", "weight", "bias"), _linear),
    torch.addmm: (("input", "mat1", "mat2"), _addmm),
    F.embedding: ((*_EMBEDDING, "sparse"), _embedding),
    torch.take: (("input", "index"), _take),
    F.layer_norm: (
        ("input", "normalized_shape", "weight", "bias", "eps"),
        partial(_norm, "layer_norm", 1e-5),
    ),
    F.rms_norm: (("input", "normalized_shape", "weight", "eps"), partial(_norm, "rms_norm", None)),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), (_PAIR, _product)),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), (_PAIR, _sum)),
}


# Contributions of a call, from the cotangents [C, n·s, ...] of its output; n: samples.


def _from_linear(
    call: Call, delta: Tensor, shapes: Shapes, samples: int
) -> dict[str, Contribution]:
    a = _rows(call, samples, delta.shape[1])
    parts: dict[str, Contribution] = {}
    delta = delta.reshape(delta.shape[0], samples, -1, delta.shape[-1])
    if "bias" in call.roles:
        parts[call.roles["bias"]] = Dense(delta.sum(2))
    if "weight" in call.roles:
        a = a.reshape(samples, -1, a.shape[-1])
        assert call.inputs is not None
        source = (call.inputs.data_ptr(), call.inputs._version, *call.inputs.shape)
        transposed = call.options.get("transposed", False)
        parts[call.roles["weight"]] = make_factors(a, delta, transposed=transposed, source=source)
    return parts


def _from_rows(call: Call, delta: Tensor, shapes: Shapes, samples: int) -> dict[str, Contribution]:
    """Return the contribution to an embedding's rows; those of `take` have width 1."""
    ids = _rows(call, samples, delta.shape[1]).reshape(samples, -1)
    padding = call.options["padding"]
    keep = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
    width = 1 if call.kind == "take" else delta.shape[-1]
    delta = delta.reshape(delta.shape[0], samples, -1, width)
    (name,) = call.roles.values()
    return {name: make_matches(ids, delta, keep, call.options["rows"])}


def _from_elementwise(
    call: Call, delta: Tensor, shapes: Shapes, samples: int
) -> dict[str, Contribution]:
    """Return the contributions to weight * x, bias + x, and norms, which normalise x first."""
    parts: dict[str, Contribution] = {}
    for role, name in call.roles.items():
        values = delta
        if role == "weight":
            x: Any = call.inputs
            if call.kind != "product":
                x = getattr(F, call.kind)(x, call.options["shape"], eps=call.options["eps"])
            values = delta * x
        parts[name] = _summed(values, shapes[name], samples)
    return parts


def _summed(values: Tensor, shape: torch.Size, samples: int) -> Dense:
    """Sum [C, n·s, ...] over every dimension along which the parameter was broadcast."""
    outputs, rest = values.shape[0], values.shape[2:]  # rest: what follows the dimension of rows
    if len(shape) > len(rest):  # the parameter's own first dimension, of size 1, meets the rows
        shape = shape[1:]
    summed = values.reshape(outputs, samples, -1, *rest).sum(2)
    if len(rest) > len(shape):
        summed = summed.sum(tuple(range(2, 2 + len(rest) - len(shape))))
    single = tuple(2 + i for i, size in enumerate(shape) if size == 1)
    if single:
        summed = summed.sum(single, keepdim=True)
    return Dense(summed.reshape(outputs, samples, -1))


def _rows(call: Call, samples: int, rows: int) -> Tensor:
    """Return the inputs with as many rows as the output, repeated if they have no batch."""
    values = call.inputs
    assert values is not None
    if values.shape[0] == rows:
        return values
    return values.expand(samples, *values.shape).flatten(0, 1)


# Childless modules of any other type (a norm with weight 1 + w, a convolution): their own forward
# is differentiated, sample by sample, from recorded inputs; the rest of the model is not run again.


def _local_call(
    module: nn.Module, roles: Mapping[str, str], args: Any, kwargs: Any, output: Any
) -> Call | None:
    """Return a module's call; None unless inputs and output have equally many rows."""
    values = [v.detach() if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not isinstance(output, Tensor) or not output.dim() or not tensors:
        return None
    if any(not tensor.dim() or tensor.shape[0] != output.shape[0] for tensor in tensors):
        return None
    options = {"module": module, "values": values, "keywords": tuple(kwargs)}
    return Call("local", dict(roles), None, options)


def _from_local(
    call: Call, cotangents: Tensor, shapes: Shapes, samples: int
) -> dict[str, Contribution]:
    """Return the module's per-sample gradients, [C, n, numel] for each parameter."""
    module, keywords = call.options["module"], call.options["keywords"]
    parameters = {key: module._parameters[key].detach() for key in call.roles}
    values = tuple(_split(value, samples) for value in call.options["values"])
    dims = tuple(0 if isinstance(value, Tensor) else None for value in values)
    plain = len(values) - len(keywords)

    def of_sample(values: tuple[Any, ...], delta: Tensor) -> dict[str, Tensor]:
        named = dict(zip(keywords, values[plain:], strict=True))

        def forward(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(module, parameters, values[:plain], named)

        pull = vjp(forward, parameters)[1]
        return vmap(lambda d: pull(d)[0])(delta)

    delta = cotangents.unflatten(1, (samples, -1))
    with torch.enable_grad():
        gradients = vmap(of_sample, in_dims=(dims, 1), out_dims=1)(values, delta)
    # [C, n, numel]; a parameter may have no dimension.
    return {
        name: Dense(as_real(gradients[key]).unsqueeze(-1).flatten(2))
        for key, name in call.roles.items()
    }


def _split(value: Any, samples: int) -> Any:
    """Split a tensor into [n, rows a sample, ...]; a single row is repeated for every sample."""
    if not isinstance(value, Tensor):
        return value
    if value.shape[0] == 1 and samples > 1:
        value = value.expand(samples, *value.shape[1:])
    return value.unflatten(0, (samples, -1))


_CONTRIBUTE: dict[str, Callable[[Call, Tensor, Shapes, int], dict[str, Contribution]]] = {
    "linear": _from_linear,
    "embedding": _from_rows,
    "take": _from_rows,
    **dict.fromkeys(("layer_norm", "rms_norm", "product", "sum"), _from_elementwise),
    "local": _from_local,
}


# ---- outputs without a dimension of samples that are given one later --------------------------
#
# T5's relative position bias is an embedding [T, T, heads], permuted, then put in front of every
# sample by ``unsqueeze(0)``.  The call's output is followed through operations that only move
# numbers.  Where a first dimension of size 1 appears, it is expanded to one row a sample, so that
# cotangents stay apart; they are carried back to the call's output through the same operations' own
# backward.

_FOLLOWED = ("linear", "embedding")  # kinds of calls
_MOVES = {
    Tensor.permute,
    Tensor.transpose,
    Tensor.contiguous,
    Tensor.view,
    Tensor.reshape,
    torch.permute,
    torch.transpose,
}
_INSERTS = {Tensor.unsqueeze, torch.unsqueeze}


def _unchained(call: Call, cotangents: Tensor) -> tuple[Call, Tensor]:
    """Return the call at the start of a chain and its output's cotangents, [C, n·s, ...].

    Args:
        cotangents: [C, n, ...], of the chain's end.
    """
    end, start = call.options["end"], call.options["call"]
    outputs, samples = cotangents.shape[:2]
    flat = cotangents.flatten(0, 1)[:, None]  # [C n, 1, ...]: one cotangent of the end each
    (moved,) = torch.autograd.grad(
        end, [start.edge], flat, retain_graph=True, is_grads_batched=True
    )
    return start, moved.unflatten(0, (outputs, samples)).flatten(1, 2)


# ---- one forward pass watched -------------------------------------------------------------------


@dataclass
class SampleLayout:
    """Layout of samples in the outputs of calls, learned from a pass over one sample.

    Attributes:
        rows: rows of each call's output for one sample: 1 where the first dimension numbers
            samples; T where samples and tokens are one dimension; also the length of an output
            without a dimension of samples, which does not grow with them.
        unknown: parameter -> childless modules with a use of it that is not covered (None:
            elsewhere).
    """

    rows: dict[Key, int] = field(default_factory=dict)
    unknown: dict[str, set[nn.Module | None]] = field(default_factory=lambda: defaultdict(set))


class Recorder(TorchFunctionMode):
    """Watch one forward pass over n samples; a context manager.

    Args:
        names: of the chosen parameters.
        samples: n.
        layout: filled when ``learn``, else obeyed.
        local: childless modules that are differentiated as a whole, with their chosen parameters
            (name within the module -> full name).
        learn: a first pass, over one sample.
        inputs_only: no gradients of covered parameters will be asked for.
        outside: ids of the parameters that fell back.

    Attributes:
        calls: in order.
        unbatched: parameter -> why its samples cannot be told apart.
    """

    def __init__(
        self,
        names: Names,
        samples: int,
        layout: SampleLayout,
        local: Owners,
        *,
        owners: Owners | None = None,
        learn: bool = False,
        inputs_only: bool = False,
        outside: Set[int] = frozenset(),
    ) -> None:
        super().__init__()
        whole = {name for roles in local.values() for name in roles.values()}
        self._names = {key: name for key, name in names.items() if name not in whole}
        self._samples = samples
        self._layout = layout
        self._local = local
        self._owners = owners or {}
        self._learn = learn
        self._inputs_only, self._outside = inputs_only, outside
        self._seen: Counter[tuple[str, str]] = Counter()
        self._inside: list[nn.Module] = []
        self._hooks = ExitStack()
        # Chains: by the id of the last tensor (held, so that its id stays its own), and calls whose
        # output has no dimension of samples yet.
        self._chains: dict[int, tuple[Tensor, Call]] = {}
        self._waiting: dict[int, Call] = {}
        self.calls: list[Call] = []
        self.unbatched: dict[str, str] = {}

    def __enter__(self) -> Recorder:
        keep = self._hooks.callback
        for module, roles in self._local.items():
            hook = partial(self._record_module, roles)
            keep(module.register_forward_hook(hook, with_kwargs=True).remove)
        for module in self._owners if self._learn else ():
            keep(module.register_forward_pre_hook(lambda m, _: self._inside.append(m)).remove)
            keep(module.register_forward_hook(self._leave).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        for call in self._waiting.values():
            self._reject(call, _NO_SAMPLES)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = None
        if self._inputs_only and not any(id(v) in self._outside for v in _flat(args, kwargs)):
            output = fast_linear(func, args, kwargs)
        if output is None:
            output = func(*args, **kwargs)
        call, unknown = recognise(func, args, kwargs, self._names)
        if unknown and _passes_gradients(output, args):
            self._note_unknown(unknown, func)
        if call is not None:
            return self._record(call, output)
        return self._follow(func, args, kwargs, output) if self._chains else output

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Given, output: Any) -> Any:
        """Follow the output of a call without a dimension of samples to where it gets one."""
        values = [*args, *kwargs.values()]
        start = next((self._chains[id(v)][1] for v in values if id(v) in self._chains), None)
        if start is None or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        if func in _INSERTS and kwargs.get("dim", args[1] if len(args) > 1 else None) == 0:
            self._waiting.pop(id(start), None)
            chain = Call("chain", start.roles, None, {"call": start, "end": output})
            return self._one_row_each(chain, output)
        if func in _MOVES or func in _INSERTS:
            self._chains[id(output)] = (output, start)
        else:
            self._reject(start, _NO_SAMPLES)
        return output

    def _record(self, call: Call, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        rows = output.shape[0] if output.dim() else 0
        keys = [self._key(call.kind, name) for name in call.roles.values()]
        if self._learn:
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
        if rows == expected * self._samples:
            call.edge = get_gradient_edge(output)
            self.calls.append(call)
        elif rows == expected == 1:  # for all samples (position embeddings)
            output = self._one_row_each(call, output)
        elif call.kind in _FOLLOWED:
            call.edge = get_gradient_edge(output)
            self._chains[id(output)] = (output, call)
            self._waiting[id(call)] = call
        else:
            self._reject(call, _NO_SAMPLES)
        return output

    def _one_row_each(self, call: Call, output: Tensor) -> Tensor:
        """Expand [1, ...] to a row a sample, so that cotangents stay apart."""
        output = output.expand(self._samples, *output.shape[1:])
        call.edge = get_gradient_edge(output)
        self.calls.append(call)
        return output

    def _key(self, kind: str, name: str) -> Key:
        """Return the next call's key, which names one parameter: others may fall back meanwhile."""
        key = (kind, name, self._seen[kind, name])
        self._seen[kind, name] += 1
        return key

    def _reject(self, call: Call, reason: str) -> None:
        for name in call.roles.values():
            self.unbatched.setdefault(name, reason)

    def _note_unknown(self, names: set[str], func: Any) -> None:
        if self._learn:
            for name in names:
                inside = self._inside[-1] if self._inside else None
                self._layout.unknown[name].add(inside)
        else:
            called = getattr(func, "__name__", str(func))
            for name in names:
                reason = f"it is used by {called}, in a way that is not covered"
                self.unbatched.setdefault(name, reason)

    def _record_module(
        self, roles: Mapping[str, str], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        call = _local_call(module, roles, args, kwargs, output)
        if call is not None:
            return self._record(call, output)
        for name in roles.values():
            self.unbatched.setdefault(name, f"{type(module).__name__} is not covered")
        return output

    def _leave(self, *hook_arguments: Any) -> None:
        self._inside.pop()


def _passes_gradients(output: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether a result may carry gradients: no sizes, dtypes or the argument itself."""
    values = output if isinstance(output, (list, tuple)) else (output,)
    return any(
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and not any(value is argument for argument in args)
        for value in values
    )


def _owners_of(model: nn.Module, names: Names) -> Owners:
    """Return childless modules with their chosen parameters, name within -> full name."""
    owners: dict[nn.Module, dict[str, str]] = {}
    for module in model.modules():
        own = {key: names[id(p)] for key, p in module._parameters.items() if id(p) in names}
        if own and next(module.children(), None) is None:
            owners[module] = own
    return owners


# ---- linear layers of a recorded pass --------------------------------------------------------
#
# A capture asks for gradients of calls' outputs, never of weights, so that a linear layer's
# backward is a single product, g W.  On processors where oneDNN is faster than torch's own choice
# (`ops.gemm`) both passes use it.  Other calls stay as they are.


class _InputLinear(torch.autograd.Function):
    """Linear layer x Wᵀ + b with a derivative by x alone."""

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


def fast_linear(func: Any, args: tuple[Any, ...], kwargs: Given) -> Tensor | None:
    """Return ``func(*args, **kwargs)`` where it is a linear layer that this serves, else None.

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


# ---- capturing a block of samples -------------------------------------------------------------


@dataclass
class Watched:
    """Chosen parameters of a model, and how each is covered.

    Attributes:
        parameters: by name.
        local: childless modules differentiated as a whole.
        fallback: parameter -> why it gets exact per-sample gradients, sample by sample.
        separate: batches in whose first block no sample depends on another.
    """

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    local: dict[nn.Module, Mapping[str, str]] = field(default_factory=dict)
    fallback: dict[str, str] = field(default_factory=dict)
    separate: set[str] = field(default_factory=set)

    @property
    def covered(self) -> dict[int, str]:
        """Return id -> name of the parameters that are recorded."""
        return {id(p): name for name, p in self.parameters.items() if name not in self.fallback}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.parameters.items()}

    def active_local(self) -> dict[nn.Module, dict[str, str]]:
        """Return ``local`` without parameters that fell back."""
        kept = {
            module: {key: name for key, name in roles.items() if name not in self.fallback}
            for module, roles in self.local.items()
        }
        return {module: roles for module, roles in kept.items() if roles}


def learn_layout(watched: Watched, outputs: OutputMap, samples: Samples) -> SampleLayout:
    """Learn from a pass over one sample how calls lay out samples, and which parameters need other
    means.

    ``watched.local`` and ``watched.fallback`` are filled.
    """
    owners = _owners_of(watched.model, watched.covered)
    for known in (owners, {}):
        layout, added = SampleLayout(), False
        recorder = Recorder(
            watched.covered, 1, layout, watched.active_local(), owners=owners, learn=True
        )
        with evaluating(watched.model), torch.no_grad(), recorder:
            outputs(samples.rows([0]))
        watched.fallback.update(recorder.unbatched)
        for name, places in layout.unknown.items():
            place = next(iter(places)) if len(places) == 1 else None
            if place is not None and name in known.get(place, {}).values():
                watched.local[place] = known[place]
                added = True
            else:
                watched.fallback[name] = "it is used in a call that is not covered"
        if not added:
            break
    return layout


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold the model in evaluation mode (no dropout, running statistics), gradients enabled."""
    with in_mode(model, training=False), torch.inference_mode(False), torch.enable_grad():
        yield


def _watched_forward(
    watched: Watched,
    outputs: OutputMap,
    layout: SampleLayout,
    batch: Batch,
    count: int,
    inputs_only: bool = False,
) -> tuple[Tensor, list[Call], dict[str, str]]:
    """Run f over ``count`` samples: f, [n, C] with its graph, the calls, and `Recorder.unbatched`.

    ``inputs_only``: the backward passes will ask for the calls' cotangents, and for gradients of
    parameters that fell back.

    Raises:
        ValueError: f is not finite or needs no parameter.
    """
    local = watched.active_local()
    outside = {id(watched.parameters[name]) for name in watched.fallback}
    recorder = Recorder(
        watched.covered, count, layout, local, inputs_only=inputs_only, outside=outside
    )
    with recorder:
        f = outputs(batch)
    _require_outputs(f, count)
    return f, recorder.calls, recorder.unbatched


def _require_outputs(f: Tensor, count: int) -> None:
    """Raise ValueError where f is not [count, C] of finite real numbers with a graph."""
    if f.is_complex():
        raise ValueError(
            f"the outputs are {f.dtype}; a kernel is of real outputs: pass outputs=lambda out, "
            "batch: torch.view_as_real(out).flatten(1), or the part of them that counts"
        )
    if f.shape[0] != count:
        raise ValueError(f"the model gives {f.shape[0]} rows of outputs for {count} samples")
    if not torch.isfinite(f).all():
        rows = (~torch.isfinite(f)).any(1).nonzero()[:, 0].tolist()
        raise ValueError(
            f"the model's outputs are NaN or infinite for samples {rows} of a block; expected "
            "finite logits"
        )
    if not f.requires_grad:
        raise ValueError("the outputs do not depend on any parameter that requires gradients")


def capture(
    watched: Watched, outputs: OutputMap, side: Probe, rows: list[int]
) -> dict[str, Contribution]:
    """Return what every chosen parameter contributes for these samples of a side.

    Raises:
        RuntimeError: samples depend on one another; a parameter is used in a new way.
    """
    samples = side.samples
    first = samples.name not in watched.separate and samples.count > 1
    with evaluating(watched.model):
        f, calls, unbatched = _watched_forward(
            watched, outputs, side.layout, samples.rows(rows), len(rows), inputs_only=True
        )
        if unbatched:
            name, reason = next(iter(unbatched.items()))
            raise RuntimeError(
                f"parameter {name!r}: {reason}, which the first samples did not show; "
                "method='per_sample' takes exact gradients sample by sample"
            )
        if side.values is not None:
            _require_same_values(rows, f.detach(), side.values[rows])
        elif first:
            count = len(rows)
            _compare_companies(outputs, samples, f.detach(), [_shuffled(count), _apart(count)])
        needed = first and len(rows) > 1 and (calls or watched.fallback)
        separation = Separation(f) if needed else None
        parts = _collect(watched, f, calls, separation)
        del f, calls
        if separation is not None and (suspects := separation.suspects()):
            f, calls, _ = _watched_forward(
                watched, outputs, side.layout, samples.rows(rows), len(rows), inputs_only=True
            )
            separation.require(f, [call.edge for call in calls], suspects)
            del f, calls
        alone = _per_sample(watched, outputs, samples, rows)
        if separation is not None:
            separation.require_alone(alone, side.noise)
        watched.separate.add(samples.name)
        return parts | alone


def _collect(
    watched: Watched, f: Tensor, calls: list[Call], separation: Separation | None
) -> dict[str, Contribution]:
    """Take one backward pass an output, to the recorded calls; then their contributions.

    Args:
        separation: given these passes, and one more; None: no such check.
    """
    count, outputs = f.shape
    store: list[list[Tensor | None]] = [[] for _ in calls]
    edges = [call.edge for call in calls]
    if separation is not None:
        separation.begin(f, edges, {name: watched.parameters[name] for name in watched.fallback})
    for c in range(outputs if calls else 0):
        cotangents = torch.autograd.grad(
            f[:, c].sum(), edges, retain_graph=c + 1 < outputs, allow_unused=True
        )
        if separation is not None:
            separation.add(separation.weights[:, c], cotangents)
        for kept, cotangent in zip(store, cotangents, strict=True):
            kept.append(cotangent)
    return _contributions(watched, calls, store, count)


def _contributions(
    watched: Watched, calls: list[Call], store: list[list[Tensor | None]], count: int
) -> dict[str, Contribution]:
    """Return the contribution of every covered parameter, from cotangents of calls' outputs.

    Args:
        store: for each call its C cotangents, emptied on the way; None where there is none.
        count: of samples.
    """
    parts: dict[str, list[Contribution]] = {}
    shapes = watched.shapes
    for call, kept in zip(calls, store, strict=True):
        some = next((c for c in kept if c is not None), None)
        if some is None:
            continue
        stacked = some[None]
        if len(kept) > 1:
            stacked = torch.stack([torch.zeros_like(some) if c is None else c for c in kept])
        kept.clear()
        if call.kind == "chain":
            call, stacked = _unchained(call, stacked)
        try:
            of_call = _CONTRIBUTE[call.kind](call, stacked, shapes, count)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if call.kind != "local":
                raise
            why = f"{type(call.options['module']).__name__} does not run under torch.func.vmap"
            watched.fallback.update(dict.fromkeys(call.roles.values(), why))
            continue
        for name, part in of_call.items():
            parts.setdefault(name, []).append(part)
    return {name: add_up(several, shapes[name]) for name, several in parts.items()}


def _per_sample(
    watched: Watched, outputs: OutputMap, samples: Samples, rows: list[int]
) -> dict[str, Contribution]:
    """Return exact gradients of parameters not covered, one sample and output at a time."""
    names = list(watched.fallback)
    if not names:
        return {}
    parameters = [watched.parameters[name] for name in names]
    gradients: list[list[list[Tensor]]] = [[] for _ in names]  # parameter, sample, output
    for row in rows:
        f = outputs(samples.rows([row]))[0]
        for kept in gradients:
            kept.append([])
        for c, value in enumerate(f):
            whole = torch.autograd.grad(
                value, parameters, retain_graph=c + 1 < len(f), materialize_grads=True
            )
            for kept, gradient in zip(gradients, whole, strict=True):
                kept[-1].append(as_real(gradient).flatten())
    stacked = (torch.stack([torch.stack(sample) for sample in kept], 1) for kept in gradients)
    return {name: Dense(gradient) for name, gradient in zip(names, stacked, strict=True)}


# ---- whether each sample has outputs of its own -------------------------------------------------
#
# Where samples are mixed (a mean over the batch taken away, a contrast, batch statistics) there is
# no kernel to speak of.  With random weights w_{n,c}, one more backward pass over a block gives the
# cotangents
#
#     Σ_{m,c} w_{m,c} ∂f_{m,c}/∂h_n
#
# of what every recorded call makes of sample n.  Where no other sample contributes, these are
# Σ_c w_{n,c} ∂f_{n,c}/∂h_n, the weighted sum of the passes over single outputs; where another does,
# they are not, with probability 1, however few samples are mixed and however far apart they are.
# A difference may be round-off (of gradients that are zero in exact arithmetic); so a further pass
# with w_n = 0 decides: it gives sample n exact zeros unless another contributes.
#
# The same pass gives the gradients of parameters outside recorded calls, which have to be the
# weighted sum of those that samples have alone.
#
# Mixing that is detached, or comes before the first parameter, shows in the values only: the
# samples are run again in other company, once all in another order, and a few without the rest.
# Where not all are in one block, all together (`in_company`) are the other company of each block:
# their values are held against the blocks', and their gradient against the finished kernel, so that
# no mixing goes unseen in small blocks.


def _tolerance(dtype: torch.dtype) -> float:
    """Return the relative error up to which a difference is round-off."""
    return _TOLERANCE.get(dtype, _TOLERANCE_16)


def _round_off(dtype: torch.dtype) -> float:
    """Return the share of a whole gradient that changes the kernel by less than eps."""
    return _SMALL * torch.finfo(dtype).eps ** 0.5


def _mixed_samples(evidence: str) -> RuntimeError:
    return RuntimeError(
        f"the outputs of a sample depend on the other samples of the batch ({evidence}), so that "
        "they have no kernel; expected a function that treats each sample alone: take what is "
        "computed over the batch (a mean, a contrast, batch statistics) out of it"
    )


_ROWS_APART = 4


def _shuffled(count: int) -> list[int]:
    """Return samples in another order, each in the place of another one."""
    generator = torch.Generator("cpu").manual_seed(_SEPARATION_SEED)
    cycle = torch.randperm(count, generator=generator, device="cpu")
    return cycle.roll(1)[cycle.argsort()].tolist()


def _apart(count: int) -> list[int]:
    """Return the last of ``count`` samples, the first and two between, or fewer than all."""
    few = min(_ROWS_APART, count - 1)
    return sorted({round(n * (count - 1) / max(few - 1, 1)) for n in range(few)}, reverse=True)


def _compare_companies(
    outputs: OutputMap, samples: Samples, values: Tensor, companies: Sequence[list[int]]
) -> None:
    """Compare the outputs of all samples, f [N, C], with those in other company.

    Raises:
        RuntimeError: the outputs of a sample depend on the others.
    """
    for company in companies:
        if company:
            with torch.no_grad():
                f = outputs(samples.rows(company))
            _require_same_values(company, f, values[company])


def _require_same_values(rows: Sequence[int], f: Tensor, others: Tensor) -> None:
    """Raise RuntimeError where outputs of samples in one company differ from those in another.

    Args:
        rows: which samples.
        f, others: [n, C].
    """
    # Outputs that are 0 in exact arithmetic differ by the rounding of what cancelled in them.
    largest = max(float(others.abs().max()), torch.finfo(others.dtype).eps ** 0.5)
    differences = (f - others).abs().amax(1)
    worst = int(differences.argmax())
    if not float(differences[worst]) <= _tolerance(others.dtype) * largest:
        raise _mixed_samples(
            f"those of sample {rows[worst]} are {float(differences[worst]):.1e} apart in a batch "
            "of others"
        )


class Separation:
    """Weighted sum of backward passes over a graph, which is 0 unless samples are mixed.

    With cotangents δ_k and weights a_k of pass k, Σ_k a_{k,n} δ_{k,n} should be 0 for every sample
    n and recorded call, outputs f [n, C].  A random product of each sample's cotangents is kept.
    """

    def __init__(self, f: Tensor) -> None:
        # By the call's number.
        self._vectors: dict[int, Tensor] = {}
        self._rests: dict[int, Tensor] = {}
        self._sizes: dict[int, float] = {}
        self._outside: dict[str, Tensor] = {}
        self._generator = torch.Generator("cpu").manual_seed(_SEPARATION_SEED)
        normal = torch.randn(f.shape, generator=self._generator, dtype=torch.float64, device="cpu")
        self.weights = normal.to(f)

    def begin(
        self, f: Tensor, edges: Sequence[GradientEdge], outside: Mapping[str, nn.Parameter]
    ) -> None:
        """Take the pass over all samples; f's graph is kept.

        Args:
            edges: as `differentiate` takes them.
            outside: parameters whose gradients no recorded call gives.
        """
        ones = torch.ones_like(f[:, 0])
        both = self.differentiate(f, [*edges, *outside.values()], ones)
        self.add(-ones, both[: len(edges)])
        for (name, parameter), gradient in zip(outside.items(), both[len(edges) :], strict=True):
            whole = torch.zeros_like(parameter) if gradient is None else gradient
            self._outside[name] = as_real(whole).flatten()

    def require_alone(self, alone: Mapping[str, Contribution], noise: float) -> None:
        """Raise RuntimeError where parameters outside of calls have other gradients in the block.

        Args:
            alone: their gradients, each sample's by itself.
            noise: as of `Probe`.
        """
        whole = sum(_norm_of(gradient) ** 2 for gradient in self._outside.values()) ** 0.5
        noise *= max(1.0, len(self.weights) / _PROBED) ** 0.5
        for name, gradient in self._outside.items():
            part = alone[name]
            assert isinstance(part, Dense)
            wide = part.gradients.to(gradient)
            missing = _norm_of(gradient - torch.einsum("nc,cnp->p", self.weights, wide))
            if missing > _negligible(gradient, whole, noise):
                raise _mixed_samples(
                    f"the gradients of parameter {name!r} that samples have alone do not add up to "
                    "those of the batch"
                )

    def differentiate(
        self, f: Tensor, edges: Sequence[GradientEdge | Tensor], factors: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the cotangents of Σ_{n,c} factors_n w_{n,c} f_{n,c} at the calls' outputs.

        Args:
            f: with its graph, which is kept.
            edges: of the calls' outputs, [n·s, ...] each, or parameters.
            factors: [n].
        """
        total = (f * self.weights * factors[:, None]).sum()
        inputs: Any = edges  # torch's stubs do not know a sequence of both
        return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)

    def add(self, times: Tensor, cotangents: Sequence[Tensor | None]) -> None:
        """Add a pass.

        Args:
            times: a, [n].
            cotangents: of each call; None: zero.
        """
        for call, cotangent in enumerate(cotangents):
            if cotangent is None or not cotangent.numel():
                continue
            rows = as_real(cotangent).reshape(len(times), -1)
            wide = rows.dtype if rows.dtype == torch.float64 else torch.float32
            if call not in self._vectors:
                vector = torch.randn(rows.shape[1], generator=self._generator, device="cpu")
                self._vectors[call] = vector.to(rows)
            product = (rows @ self._vectors[call]).to(wide) * times.to(wide)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide) * times.to(wide).abs()
            self._rests[call] = self._rests.get(call, 0.0) + product
            self._sizes[call] = max(self._sizes.get(call, 0.0), float(norms.max()))

    def suspects(self) -> set[int]:
        """Return samples to which others seem to contribute: they may, or it is rounding."""
        dtype, found = self.weights.dtype, set()
        least = _round_off(dtype) * max(self._sizes.values(), default=0.0)
        for call, rest in self._rests.items():
            limit = max(_tolerance(dtype) * self._sizes[call], least)
            if float(rest.abs().max()) > limit:  # NaN has an error of its own
                found.add(int(rest.abs().argmax()))
        return found

    def require(self, f: Tensor, edges: Sequence[GradientEdge], suspects: set[int]) -> None:
        """Raise RuntimeError where other samples contribute to one of the suspects."""
        for sample in suspects:
            factors = torch.ones_like(f[:, 0])
            factors[sample] = 0.0
            for cotangent in self.differentiate(f, edges, factors):
                if cotangent is None or not cotangent.numel():
                    continue
                rows = as_real(cotangent).reshape(len(factors), -1).double()
                if bool((rows[sample].abs() > 0).any()):
                    share = float(rows[sample].norm() / rows.norm())
                    raise _mixed_samples(f"{100 * share:.1f} % of a gradient are another sample's")


# ---- the completeness check -------------------------------------------------------------------
#
# The kernel must hold all that a plain backward pass sees.  With random signs w_{n,c} for a few
# samples (`probe`), or random weights for all (`in_company`), one ordinary backward pass gives, of
# every parameter,
#
#     g_θ = Σ_{n,c} w_{n,c} ∂f_{n,c}/∂θ,
#
# which (1) must equal the same sum over what the recorded calls contribute, parameter by parameter:
# where it does not, the parameter gets exact per-sample gradients; and (2) gives afterwards a test
# of the finished kernel that shares none of its steps:
#
#     wᵀ Θ w' = Σ_θ g_θ · g'_θ.


@dataclass
class Probe:
    """Result of the check of a side.

    Attributes:
        samples: all samples of the side.
        layout: how calls lay them out.
        weights: w, [N, C]; zero for samples that were not probed.
        gradients: g, by parameter.
        contributions: of the probed samples, for w in place of C outputs.
        activation_bytes: memory the forward pass keeps for one sample's backward.
        noise: norm of a gradient below which it may be round-off alone (a bias of attention keys,
            whose gradient is zero in exact arithmetic).
        values: f, [N, C], in other company than the blocks'; None where one block holds all.
    """

    samples: Samples
    layout: SampleLayout
    weights: Tensor
    gradients: dict[str, Tensor]
    contributions: dict[str, Contribution]
    activation_bytes: int
    noise: float
    values: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.weights.shape[1]

    def capture_bytes(self) -> int:
        """Return the memory of one sample's contributions, all outputs."""
        return -(-sum(part.nbytes(self.outputs) for part in self.contributions.values()) // 2)


def probe(watched: Watched, outputs: OutputMap, samples: Samples) -> Probe:
    """Learn the layout; check the first and a middle sample.

    Parameters that fail are added to ``watched.fallback``.
    """
    layout = learn_layout(watched, outputs, samples)
    rows = [0, samples.count // 2]  # the same one twice where there is only one
    meter = _Meter(watched)
    with evaluating(watched.model):
        with torch.autograd.graph.saved_tensors_hooks(meter.saved, lambda saved: saved):
            f, calls, unbatched = _watched_forward(
                watched, outputs, layout, samples.rows(rows), _PROBED
            )
        generator = torch.Generator("cpu").manual_seed(_PROBE_SEED)
        signs = (torch.randint(0, 2, f.shape, generator=generator, device="cpu") * 2 - 1).to(f)
        edges = [call.edge for call in calls]
        inputs: list[Any] = [*edges, *watched.parameters.values()]
        both = torch.autograd.grad((f * signs).sum(), inputs, allow_unused=True)
        cotangents, whole = both[: len(edges)], both[len(edges) :]
        # A norm's backward multiplies the rounding of what cancels in it by up to 1 / √1e-5.
        least = 300 * torch.finfo(f.dtype).eps * _norm_of(signs)
        noises = (_round_off(c.dtype) * _norm_of(c) for c in cotangents if c is not None)
        noise = max([least, *noises])
        parts = _contributions(watched, calls, [[c] for c in cotangents], _PROBED)
    gradients = {
        name: as_real(torch.zeros_like(parameter) if g is None else g)
        for (name, parameter), g in zip(watched.parameters.items(), whole, strict=True)
    }
    watched.fallback.update(unbatched)
    every = signs.new_zeros(samples.count, signs.shape[1])
    every.index_add_(0, torch.tensor(rows, device=signs.device), signs)
    found = Probe(samples, layout, every, gradients, parts, -(-meter.total // _PROBED), noise)
    watched.fallback.update(dict.fromkeys(_not_whole(watched, found), _NOT_WHOLE))
    for name in watched.fallback:
        parts.pop(name, None)
    return found


def in_company(watched: Watched, outputs: OutputMap, side: Probe, most: int) -> None:
    """Give a side the outputs and gradients of all its samples, in other company than the blocks'.

    One forward pass and a plain backward pass, which replaces that of the probe.

    Args:
        most: samples a batch.

    Raises:
        RuntimeError: the outputs of a sample depend on the others.
    """
    samples, order = side.samples, _shuffled(side.samples.count)
    parts = -(-samples.count // most)
    total: dict[str, Tensor] = {}
    # Not signs: what adds a mean to each sample would not show where they add up to 0.
    generator = torch.Generator("cpu").manual_seed(_SEPARATION_SEED)
    weights = torch.randn(
        side.weights.shape, generator=generator, dtype=torch.float64, device="cpu"
    )
    weights = weights.to(side.weights)
    values = torch.empty_like(weights)
    with evaluating(watched.model):
        for part in range(parts):
            rows = order[part::parts]
            f = outputs(samples.rows(rows))
            _require_outputs(f, len(rows))
            values[rows] = f.detach()
            gradients = torch.autograd.grad(
                (f * weights[rows]).sum(), list(watched.parameters.values()), allow_unused=True
            )
            for name, gradient in zip(watched.parameters, gradients, strict=True):
                if gradient is not None:
                    g = as_real(gradient)
                    total[name] = g if name not in total else total[name] + g
        _compare_companies(outputs, samples, values, [_apart(samples.count)])
    side.values = values
    if all(bool(g.isfinite().all()) for g in total.values()):  # their sum may overflow in 16 bits
        side.noise *= _norm_of(weights) / _norm_of(side.weights)
        side.weights = weights
        side.gradients = {n: total.get(n, torch.zeros_like(g)) for n, g in side.gradients.items()}


def _negligible(gradient: Tensor, whole: float, noise: float) -> float:
    """Return the norm of a part of a gradient up to which it is round-off.

    Args:
        whole: norm of the gradient by all parameters. A part below √eps of it changes the kernel
            by less than eps.
        noise: as of `Probe`.
    """
    dtype = gradient.dtype
    return max(_tolerance(dtype) * _norm_of(gradient), _round_off(dtype) * whole, noise)


def _not_whole(watched: Watched, found: Probe) -> list[str]:
    """Return the parameters whose gradient is not what their calls contribute."""
    norms = {name: _norm_of(g) for name, g in found.gradients.items()}
    bad = [name for name, norm in norms.items() if not norm < float("inf")]
    if bad:
        raise ValueError(
            f"the gradient of parameter {bad[0]!r} is NaN or infinite; expected finite gradients "
            "(look for a division by zero or an overflow in the model, or use a wider dtype)"
        )
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    wrong = []
    for name, gradient in found.gradients.items():
        if name in watched.fallback:
            continue
        part = found.contributions.get(name)
        missing = norms[name] if part is None else _norm_of(_left_over(gradient, part))
        if missing > _negligible(gradient, whole, found.noise):
            wrong.append(name)
    return wrong


def _left_over(gradient: Tensor, part: Contribution) -> Tensor:
    """Return gradient − Σ_n G_n over samples n, for contributions of a single output."""
    if isinstance(part, Tied):
        return _left_over(_left_over(gradient, part.factors), part.matches)
    if isinstance(part, Dense):
        return gradient - part.gradients[0].sum(0).view(gradient.shape)
    if isinstance(part, Matches):
        rest = gradient.clone()
        rows = rest.view(rest.shape[0], -1)
        rows.index_add_(0, part.ids, part.gradients[0].to(rows), alpha=-1)
        return rest
    delta, a = part.cotangents[0].flatten(0, 1), part.inputs.flatten(0, 1)
    left, right = (a, delta) if part.transposed else (delta, a)
    return torch.addmm(gradient, left.T.to(gradient), right.to(gradient), alpha=-1)


def _norm_of(values: Tensor) -> float:
    """Return ‖values‖, in double only if needed, since gradients are as large as the model."""
    values = as_real(values)
    if values.dtype in (torch.float32, torch.float64):
        norm = float(torch.linalg.vector_norm(values))
        if norm < float("inf"):
            return norm
    return float(values.double().norm())  # squares beyond float32 are no infinite gradient


def check_kernel(theta: Tensor, left: Probe, right: Probe, dtype: torch.dtype) -> float:
    """Compare wᵀ Θ w' with the product of the plain gradients; return the relative difference.

    Args:
        theta: [N, C, M, C], in double.
        left, right: of the two sides; the same one for a symmetric kernel.
        dtype: the model's.

    Raises:
        RuntimeError: they differ by more than round-off.
    """
    weights, others = left.weights.double(), right.weights.double()
    value = (torch.tensordot(weights, theta, 2) * others).sum()
    squares = (torch.tensordot(weights.square(), theta.square(), 2) * others.square()).sum()
    expected = sum(_dot(left.gradients[name], right.gradients[name]) for name in left.gradients)
    sizes = [
        sum(_norm_of(g) ** 2 for g in side.gradients.values()) ** 0.5 for side in (left, right)
    ]
    # ‖Θ‖ is the root of the mean square of wᵀ Θ w', which may cancel.
    scale = max(sizes[0] * sizes[1], float(squares.sqrt()), left.noise * right.noise)
    difference = abs(float(value) - expected) / scale if scale else 0.0
    if not difference <= _tolerance(dtype):
        raise RuntimeError(
            f"the kernel disagrees with a plain backward pass (relative difference "
            f"{difference:.1e}), as it does where the outputs of a sample depend on the other "
            "samples of the batch: take what is computed over the batch out of the function"
        )
    return difference


def _dot(x: Tensor, y: Tensor) -> float:
    """Return g_θ · g'_θ of a parameter."""
    if x.dtype in (torch.float32, torch.float64):
        return float(torch.dot(x.flatten(), y.flatten()))
    return float((x.double() * y.double()).sum())


class _Meter:
    """Bytes that a forward pass keeps for the backward pass, parameters excepted."""

    def __init__(self, watched: Watched) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in watched.model.parameters()}
        self.total = 0

    def saved(self, tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            raise TypeError(NESTED)
        try:
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
        except RuntimeError:  # the zeros of forward mode take no memory
            return tensor
        if place not in self._seen:
            self._seen.add(place)
            self.total += storage.nbytes()
        return tensor
