"""Loading and registration of the compiled operators, and helpers of their references.

If the binary is missing or broken, the import gives a warning that names the remedy, and
`available` returns False, so that callers use the pure-torch references.

The derivative of a backward operator is computed by differentiating the forward's reference twice:
if none were registered, torch would drop terms of a second backward with only a warning.
"""

import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .. import torch_private

if TYPE_CHECKING:  # torch keeps it private
    from torch.utils._python_dispatch import TorchDispatchMode

F = TypeVar("F", bound=Callable[..., object])
X = TypeVar("X", bound=Tensor)
Results: TypeAlias = Tensor | tuple[Tensor, ...]
Y = TypeVar("Y", bound=Results)
Gradients: TypeAlias = tuple[Tensor | None, ...]

NAMESPACE = "jachess"
"""Namespace of the operators in torch; csrc registers its kernels there."""
OPS = getattr(torch.ops, NAMESPACE)
MAX_DIRECTIONS = 4
CUDA_DIRECTIONS = 2
"""Number of directions that the CUDA kernels support at once."""
IN_PASSES = ("cuda",)
"""Types of devices whose kernels support at most `CUDA_DIRECTIONS`, and run in several passes."""
OLDEST_GPU = (8, 0)
"""The lowest compute capability of a GPU that the CUDA kernels run on."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SUMS = (
    *("activation_jet", "attention_jet", "gated_activation_jet"),
    *("layer_norm_jet", "rms_norm_jet", "softmax_jet"),
)
"""Operators whose CPU kernels support `Streams.summed`, and any number of directions."""
IN_CHECKOUT = (Path(__file__).resolve().parents[2] / "csrc").is_dir()
"""Whether the operators' sources lie beside the package; otherwise it was installed."""
REBUILD = "`make build`" if IN_CHECKOUT else "`pip install --force-reinstall --no-deps jachess_ext`"
"""The command that gets working operators.  Without --no-deps pip would install torch anew, too."""
_WITH_BACKWARD = (
    *("activation_jet", "attention_jet", "gated_activation_jet", "jet_mean_squares"),
    *("layer_norm_jet", "rms_norm_jet", "softmax_jet"),
)
_OPERATORS = (
    *("attention_jet_scores", "attention_jet_delta", "ntk_gram", "sample_directions"),
    *(name + end for name in _WITH_BACKWARD for end in ("", "_backward")),
)

# ---- loading -------------------------------------------------------------------------------


class LibraryState(NamedTuple):
    """State of the compiled operators.

    Attributes:
        path: path of the binary.
        problem: why the binary cannot be used, and the remedy; None if it can be used.
        kernels: pairs (operator, device type) for which there is a kernel.
    """

    path: Path
    problem: str | None
    kernels: frozenset[tuple[str, str]] = frozenset()


def library_path() -> Path:
    """Return the path of the binary: $JACHESS_OPS_LIBRARY (such as a build with sanitizers) if it
    is set, otherwise the path that the build writes to."""
    if override := os.environ.get("JACHESS_OPS_LIBRARY"):
        return Path(override)
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return Path(__file__).resolve().parents[1] / f"_ops{suffix}"


def build_info() -> dict[str, str]:
    """Return information about the build, from the module `_C`; {} if it is missing or broken.

    Keys: torch, compiler, cpu, cuda ("" for a build without CUDA), cuda_archs.

    Examples:
        >>> set(build_info()) <= {"torch", "compiler", "cpu", "cuda", "cuda_archs"}
        True
    """
    try:
        from .._C import build_info as compiled_build_info
    except ImportError:
        return {}
    return dict(compiled_build_info())


def _load(path: Path) -> LibraryState:
    if not path.is_file():
        problem = f"the compiled operators are missing ({path.name} is not in {path.parent})"
        wheel = "install a wheel built for this Python and platform"
        return LibraryState(path, f"{problem}: {f'run {REBUILD}' if IN_CHECKOUT else wheel}.")
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        built = build_info().get("torch", "")
        origin_text = f", built against torch {built}," if built else ""
        problem = f"the compiled operators{origin_text} do not load with torch {torch.__version__}"
        return LibraryState(path, f"{problem} ({reason}): run {REBUILD}.")
    missing = [name for name in _OPERATORS if not hasattr(OPS, name)]
    if missing:
        problem = f"{path.name} is older than this source and lacks {', '.join(missing)}"
        return LibraryState(path, f"{problem}: run {REBUILD}.")
    try:
        has_kernel = torch_private.dispatch_has_kernel
    except torch_private.MissingPrivate as error:
        return LibraryState(path, f"{error}.")
    kernels = frozenset(
        (name, key.lower())
        for name in _OPERATORS
        for key in ("CPU", "CUDA")
        if has_kernel(f"{NAMESPACE}::{name}", key)
    )
    return LibraryState(path, None, kernels)


STATE = _load(library_path())
if STATE.problem is not None:
    warnings.warn(
        f"jachess_ext: {STATE.problem} Until then formulas in torch "
        "are used, which are as right but slower.",
        RuntimeWarning,
        stacklevel=2,
    )

# glibc returns the top of the heap to the system once its free part exceeds twice the largest freed
# block (mallopt(3), at most 64 MiB). A pass frees several stacks of one size, which would then each
# cause page faults anew: freeing a large block here raises the threshold.
torch.empty(2**25 - 2**16, dtype=torch.uint8)


def loaded() -> bool:
    """Return whether the compiled operators are registered in `OPS`."""
    return STATE.problem is None


def constant_when_compiled(function: F) -> F:
    """Mark a function for torch.compile to call without tracing, with a result that is a constant.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def available(name: str, device: torch.device | str, *, sums: bool = False) -> bool:
    """Return whether the compiled operator `name` has a kernel for `device` that can be used here.

    False if the library is missing or broken, on a GPU of compute capability below 8.0, and within
    forward-mode AD and the transforms of torch.func, in which custom operators silently have *zero*
    tangents (docs/how_it_works.md, traps).

    Args:
        name: the operator's name without namespace, such as "activation_jet".
        device: a torch.device or its name; "cuda" without a number is the current GPU.
        sums: whether the kernel has to support sums of squares (`Streams.summed`).

    Examples:
        >>> available("activation_jet", "meta")
        False
    """
    if transformed():
        return False
    device = torch.device(device)
    if (name, device.type) not in STATE.kernels:
        return False
    if sums and (name not in SUMS or device.type != "cpu"):
        return False
    return device.type != "cuda" or gpu_is_supported(device.index)


@constant_when_compiled
def gpu_is_supported(index: int | None = None) -> bool:
    """Return whether the kernels run on GPU number `index`; None: the current GPU.

    True if there is no GPU: CUDA tensors are then fake tensors, without data.
    """
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(index) >= OLDEST_GPU


forward_mode_is_on: Callable[[], bool] = getattr(torch._C, "_is_fwd_grad_enabled", lambda: False)


def transformed() -> bool:
    """Return whether a transform of torch.func or a level of forward-mode AD is active."""
    # Other queries give wrong results while dynamo traces (torch 2.13).
    nested = torch_private.functorch.get_dynamic_layer_stack_depth()
    # Forward mode is switched off in the forward of an autograd Function, whose tensors are plain.
    return nested > 0 or (forward_ad._current_level >= 0 and forward_mode_is_on())


def recorded() -> bool:
    """Return whether export, `make_fx` or `torch.jit.trace` records operators in a graph, which is
    differentiated only later.

    False under torch.compile, which differentiates while it traces.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch.jit.is_tracing() or get_proxy_mode() is not None


def capturing() -> bool:
    """Return whether a CUDA graph is being captured, during which the host cannot read results.

    Call it as ``library.capturing()``, so that a test can replace it in one place.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# ---- dispatch modes ------------------------------------------------------------------------
#
# A mode of torch.utils._python_dispatch intercepts every operator and may keep its result:
# selective checkpointing returns it again when the operator is called again, counting calls by
# operator. So, under a mode, no result is overwritten in place, which torch would not always
# notice; and operators that run only once, or outside of a checkpoint, are hidden from the modes.


def dispatch_modes() -> "list[TorchDispatchMode]":
    """Return the active dispatch modes except torch's own, by which it traces graphs.

    torch's own modes are at the bottom of the stack.
    """
    modes = torch_private.current_dispatch_modes()
    return [mode for mode in modes if getattr(mode, "_mode_key", None) is None]


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Disable the dispatch modes of `dispatch_modes` within the context."""
    modes = dispatch_modes()
    for _ in modes:
        torch_private.pop_dispatch_mode()
    try:
        yield
    finally:
        for mode in modes:
            torch_private.push_dispatch_mode(mode)


# ---- passes --------------------------------------------------------------------------------


def in_passes(run: Callable[..., Y], jets: Sequence[Tensor], q: int, any_number: bool = False) -> Y:
    """Return run(*jets, q), split into several calls if q exceeds the number of directions that the
    kernels support.

    Args:
        run: maps stacked jets and their number of directions to a stacked jet or a tuple of them.
        jets: stacked jets [S, ...] of the same S.
        any_number: whether the CPU kernel supports any q at order 1, instead of at most 4.
    """
    jet = jets[0]
    most = CUDA_DIRECTIONS if jet.device.type in IN_PASSES else MAX_DIRECTIONS
    is_first_order = jet.shape[:1] == (1 + q,)
    # An invalid q is passed on to the operator, which raises an error.
    is_split = q > most and (is_first_order or q <= MAX_DIRECTIONS)
    if not is_split or (any_number and most == MAX_DIRECTIONS):
        return run(*jets, q)
    return _passes(run, jets, q, most)


def _passes(run: Callable[..., Y], jets: Sequence[Tensor], q: int, most: int) -> Y:
    """Compute `in_passes` by passes of at most ``most`` directions; at order 2, by one pass for
    each pair of directions.

    Gradients of streams that several passes share are summed by autograd.
    """
    pairs = streams_of(jets[0], q).pairs
    groups = [tuple(range(i, min(i + most, q))) for i in range(0, q, most)]
    streams_of_jets = [jet.unbind(0) for jet in jets]
    is_tuple = False
    results: dict[int, tuple[Tensor, ...]] = {}
    for n, directions in enumerate(pairs or groups):
        streams = [0, *(1 + i for i in directions), *([1 + q + n] if pairs else [])]
        inputs = [torch.stack([jet[s] for s in streams]) for jet in streams_of_jets]
        out = run(*inputs, len(directions))
        is_tuple = isinstance(out, tuple)
        outputs = out if isinstance(out, tuple) else (out,)
        columns = zip(*(jet.unbind(0) for jet in outputs), strict=True)
        # If several passes compute a stream, the first result is used.
        for s, column in zip(streams, columns, strict=True):
            results.setdefault(s, column)
    stacked = tuple(map(torch.stack, zip(*(results[s] for s in sorted(results)), strict=True)))
    return stacked if is_tuple else stacked[0]  # type: ignore[return-value]  # as in each pass


# ---- stacks and dtypes ---------------------------------------------------------------------


@dataclass(frozen=True)
class Streams:
    """Layout of a stacked jet ``[S, ...]``: the primal x_0, then x_i along q directions, then P
    streams of second order, each a sum Σ D²f[u_i, u_j] over its terms (i, j).

    Attributes:
        directions: number of directions q.
        order: order of the jet; 1: there are no streams of second order (P = 0).
        squares: number of directions, from the first, that have a stream with the term (i, i);
            0: there is a stream for each pair i < j instead.
        summed: whether the squares have a single stream, their sum, as for a Laplacian.
    """

    directions: int
    order: int = 2
    squares: int = 0
    summed: bool = False

    @property
    def num_second(self) -> int:
        """Return the number P of streams of second order."""
        if self.squares:
            return 1 if self.summed else self.squares
        return 0 if self.order == 1 else self.directions * (self.directions - 1) // 2

    @property
    def streams(self) -> int:
        """Return the number of streams, S = 1 + q + P."""
        return 1 + self.directions + self.num_second

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the terms (i, j) of the streams of second order, one for each stream; if
        ``summed``, all terms of the single stream."""
        if self.squares:
            return tuple((i, i) for i in range(self.squares))
        return tuple(combinations(range(self.directions), 2)) if self.order == 2 else ()

    @property
    def has_operators(self) -> bool:
        """Return whether compiled operators support this layout (not one stream per square)."""
        return not self.squares or self.summed

    def terms(self) -> list[tuple[int, int, int]]:
        """Return ``(stream of x_i, stream of x_j, stream of second order)`` for every term."""
        start = 1 + self.directions
        return [
            (1 + i, 1 + j, start + (0 if self.summed else n)) for n, (i, j) in enumerate(self.pairs)
        ]

    def _squared(self, a: Tensor) -> Tensor:
        return a if len(a) == self.squares else a[: self.squares]

    def quadratic(self, a: Tensor, b: Tensor) -> Tensor:
        """Return Σ a_i b_j over the terms of each stream of second order: ``[P, ...]``.

        Args:
            a, b: ``[q, ...]``, with a_i b_j = a_j b_i.
        """
        if not self.squares:
            return torch.stack([a[i] * b[j] for i, j in self.pairs])
        products = self._squared(a) * self._squared(b)
        return products.sum(0, keepdim=True) if self.summed else products

    def quadratic_gradient(self, g: Tensor, a: Tensor) -> Tensor:
        """Return the gradient of a, ``[q, ...]``, from the gradient g of ``quadratic(a, a)``."""
        gradient = torch.zeros_like(a)
        for i, j, n in self.terms():
            for m, k in ((i, j), (j, i)):
                gradient[m - 1] += g[n - 1 - self.directions] * a[k - 1]
        return gradient

    def crossed(
        self, a: Tensor, b: Tensor, times: Callable[[Tensor, Tensor], Tensor] = torch.mul
    ) -> Tensor:
        """Return Σ (a_i b_j + a_j b_i) over the terms of each stream of second order: ``[P, ...]``.

        Args:
            a, b: ``[q, ...]``.
            times: the product, which multiplies stacks stream by stream; it need not commute.
        """
        if not self.squares:
            mixed = [
                times(a[i : i + 1], b[j : j + 1]) + times(a[j : j + 1], b[i : i + 1])
                for i, j in self.pairs
            ]
            return torch.cat(mixed)
        products = times(2 * self._squared(a), self._squared(b))
        return products.sum(0, keepdim=True) if self.summed else products


def streams_of(x: Tensor, q: int, summed: int = 0) -> Streams:
    """Return the layout of an operator's stacked jet ``[S, ...]`` along q directions.

    Args:
        summed: number of directions whose squares the last stream sums; 0: S determines whether
            there is a stream for each pair of directions.

    Raises:
        ValueError: S does not match q and ``summed``.
    """
    streams = Streams(q, order=2 if x.shape[0] > 1 + q else 1, squares=summed, summed=summed > 0)
    if x.shape[0] != streams.streams:
        raise ValueError(f"{x.shape[0]} streams, of which {q} directions have {streams.streams}")
    return streams


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float64 for float64, else float32.

    Raises:
        TypeError: ``dtype`` is not float64, float32, bfloat16 or float16.
    """
    if dtype not in DTYPES:
        raise TypeError(
            f"dtype is {dtype}; expected float64, float32, bfloat16 or float16: convert with .to()."
        )
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """Return x in the dtype of its sums (`wide_dtype`)."""
    return x.to(wide_dtype(x.dtype))


def wide(x: X) -> X:
    """Return 16-bit floats as float32, in which squares do not overflow; other tensors
    unchanged."""
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if is_half else x  # type: ignore[return-value]  # a jet for a jet


def check_shape(name: str, tensor: Tensor | None, shape: Sequence[int]) -> None:
    """Check the shape of a reference's argument, which torch would otherwise silently broadcast.

    Raises:
        ValueError: the tensor, the argument `name`, has another shape; None is allowed.
    """
    if tensor is not None and tensor.shape != torch.Size(shape):
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; expected {list(shape)}: reshape or expand it."
        )


# ---- registration --------------------------------------------------------------------------


class Context(FunctionCtx):
    """An autograd context with typed attributes.

    Attributes:
        constants: the arguments that are not tensors, set by the forward.
    """

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    constants: tuple[Any, ...]


_PYTHON = torch.library.Library(NAMESPACE, "FRAGMENT")
_DEFINED: set[str] = set()


def define_operator(name: str, signature: str, kernel: Callable[..., Results]) -> None:
    """Define ``jachess::name`` by a Python kernel for every device, even if the library is missing.

    Nothing is defined if torch lacks the private names that this needs (see `defined`).

    Args:
        signature: signature of the schema, such as "(Tensor x) -> Tensor".
        kernel: the kernel, which runs below autograd and transforms; autocast applies to the
            functions that it calls.
    """
    try:
        torch_private.dispatch_has_kernel  # noqa: B018  # torch registers fake kernels with it
    except torch_private.MissingPrivate:
        return
    if name not in _DEFINED:  # a module that is reloaded only replaces its kernels
        _PYTHON.define(name + signature)
        _DEFINED.add(name)
    _PYTHON.impl(name, kernel, "CompositeExplicitAutograd", allow_override=True)


def defined(name: str) -> bool:
    """Return whether `define_operator` has defined the operator."""
    return name in _DEFINED


def register(
    name: str,
    *,
    fake: Callable[..., Results],
    fake_backward: Callable[..., Results],
    save: Callable[..., None],
    backward: Callable[..., Gradients],
    save_backward: Callable[..., None],
    double_backward: Callable[..., Gradients],
) -> None:
    """Register fake kernels and derivatives of ``jachess::name`` and ``jachess::name_backward``, if
    these operators exist.

    Args:
        fake, fake_backward: fake kernels of the two operators (`torch.library.register_fake`).
        save, backward: setup_context and backward of the forward operator
            (`torch.library.register_autograd`).
        save_backward, double_backward: setup_context and backward of the backward operator.
    """
    if not (loaded() or defined(name)):
        return
    # Both operators have a backward: that of `name` is `name_backward`, whose own backward is torch
    # code that uses the reference, and can be differentiated any number of times.
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    torch.library.register_fake(f"{NAMESPACE}::{name}_backward", fake_backward)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=save)
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}_backward", double_backward, setup_context=save_backward
    )


def register_operator(
    name: str,
    reference: Callable[..., Results],
    *,
    tensors: int,
    differentiable: int = 1,
    fake: Callable[..., Results] | None = None,
    fake_backward: Callable[..., Results] | None = None,
    has_statistics: bool = False,
    second_backward: Callable[..., Sequence[Tensor | None] | None] | None = None,
) -> None:
    """Register an operator by `register`; the arguments of its backward operator are the gradients
    of the results, then the operator's own arguments.

    Args:
        reference: the pure-torch reference, with the operator's arguments; it returns no
            statistics.
        tensors: number of leading arguments that are tensors or None.
        differentiable: number of leading arguments for which the backward returns gradients.
        fake, fake_backward: fake kernels (`torch.library.register_fake`); None: results like the
            first argument, or like the differentiable arguments.
        has_statistics: whether the last result is only for the backward, which then has all results
            as arguments after the tensors.
        second_backward: function from the backward's gradients, the forward's tensors, the
            cotangents of the backward's results and the constants to the result of
            `gradient_of_backward`, or to None. None: derivatives of the reference are used.
    """
    if not (loaded() or defined(name)):
        return
    schema = getattr(OPS, name).default._schema
    # Arguments and results of the two operators, in order; those in brackets only with statistics:
    #     forward    `tensors` tensors, constants -> `results` results, [statistics]
    #     backward   `results` gradients, `tensors` tensors, [all results, statistics], constants
    #                -> `differentiable` gradients
    arguments, saved_results = len(schema.arguments), len(schema.returns) if has_statistics else 0
    results = len(schema.returns) - has_statistics  # number of gradients that the backward takes

    def gradients_like_inputs(*args: Any) -> Results:
        gradients = tuple(contiguous_like(x) for x in args[results:][:differentiable])
        return gradients if differentiable > 1 else gradients[0]

    def save(ctx: Context, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        if has_statistics:  # saved values, through which no gradient flows
            ctx.mark_non_differentiable(output[-1])
            ctx.set_materialize_grads(False)  # else torch would fill unused zeros for statistics
        ctx.save_for_backward(*inputs[:tensors], *(output if has_statistics else ()))
        ctx.constants = inputs[tensors:]

    def backward(ctx: Context, *gradients: Tensor | None) -> Gradients:
        if gradients[0] is None:  # the results have no gradient
            return _padded((), arguments)
        operator = getattr(OPS, f"{name}_backward")
        input_gradients = operator(*gradients[:results], *ctx.saved_tensors, *ctx.constants)
        return _padded(input_gradients if differentiable > 1 else (input_gradients,), arguments)

    def save_backward(ctx: Context, inputs: tuple, output: Results) -> None:
        ctx.save_for_backward(*inputs[: results + tensors])
        ctx.constants = inputs[results + tensors + saved_results :]

    def double_backward(ctx: Context, *cotangents: Tensor | None) -> Gradients:
        saved = ctx.saved_tensors
        gradients, inputs = saved[:-tensors], saved[-tensors:]

        def forward(*leaves: Tensor) -> Results:
            return reference(*leaves, *inputs[differentiable:], *ctx.constants)

        second = None
        if second_backward is not None:
            second = second_backward(gradients, inputs, cotangents, ctx.constants)
        if second is None:
            second = gradient_of_backward(forward, inputs[:differentiable], gradients, cotangents)
        return _padded(second, results + saved_results + arguments)

    register(
        name,
        fake=fake or (lambda x, *_: contiguous_like(x)),
        fake_backward=fake_backward or gradients_like_inputs,
        save=save,
        backward=backward,
        save_backward=save_backward,
        double_backward=double_backward,
    )


def register_without_derivative(
    name: str, fake: Callable[..., Results], instead: str | None = None
) -> None:
    """Register an operator's fake kernel, and an error as its derivative, which torch would
    otherwise take to be 0.

    Args:
        instead: name of the differentiable function of jachess_ext.ops, for the message; None:
            `name`.
    """

    def backward(ctx: Context, *_: Tensor) -> Gradients:
        raise RuntimeError(
            f"torch.ops.{NAMESPACE}.{name} has no derivative: call jachess_ext.ops."
            f"{instead or name}, which takes its pure-torch reference where a gradient is asked "
            "for."
        )

    if loaded():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward)


def contiguous_like(x: Tensor) -> Tensor:
    """Return an empty contiguous tensor of x's shape, dtype and device."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _padded(gradients: Sequence[Tensor | None], length: int) -> Gradients:
    return (*gradients, *([None] * (length - len(gradients))))


def alias(tensor: Tensor) -> Tensor:
    """Return a view that requires a gradient, as an input for `torch.autograd.grad`; the view stays
    connected to the tensor's own graph."""
    view = tensor.view_as(tensor)
    return view if view.requires_grad else view.requires_grad_()


def gradient_of_backward(
    forward: Callable[..., Results],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of Σ_k <cotangents_k, g_k> with respect to [*gradients, *inputs], where
    (g_1, ...) = backward(*gradients, *inputs) is the backward of (y_1, ...) = forward(*inputs).

    An entry is None if the sum does not depend on the tensor.

    Args:
        forward: the pure-torch reference, twice differentiable.
        inputs: the forward's differentiable tensors.
        gradients: gradients of y_1, ..., of their shapes.
        cotangents: cotangents of g_1, ..., one for each input; None: zero.
    """
    # The backward operator is the linear map  gradients ↦ Jᵀ gradients.  Differentiating the
    # reference's own backward gives both of its derivatives: with respect to `gradients`, in which
    # it is linear, and with respect to `inputs`, through J, by second derivatives of the reference.
    keep_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        seeds, aliases = [alias(g) for g in gradients], [alias(tensor) for tensor in inputs]
        y = forward(*aliases)
        first = torch.autograd.grad(y, aliases, seeds, create_graph=True, allow_unused=True)
        pairs = [
            (g, c.to(g.dtype))
            for g, c in zip(first, cotangents, strict=True)
            if g is not None and c is not None and g.requires_grad
        ]
        if not pairs:
            return [None] * (len(seeds) + len(aliases))
        outputs, weights = zip(*pairs, strict=True)
        return list(
            torch.autograd.grad(
                outputs, [*seeds, *aliases], weights, create_graph=keep_graph, allow_unused=True
            )
        )


# ---- operators with CUDA kernels only --------------------------------------------------------


def _fake_delta(gy: Tensor, y: Tensor, q: int) -> Tensor:
    return y.new_empty(y.shape[:-1], dtype=wide_dtype(y.dtype))


def _fake_scores(gy: Tensor, query: Tensor, *numbers: int) -> tuple[Tensor, ...]:
    _, heads, _, rows, keys = numbers[-5:]
    line = (keys + 7) // 8 * 8
    shape, strides = (len(query), heads, rows, keys), (heads * rows * line, rows * line, line, 1)
    return tuple(query.new_empty_strided(shape, strides) for _ in range(2))


register_without_derivative("attention_jet_delta", _fake_delta, "attention_jet")
register_without_derivative("attention_jet_scores", _fake_scores, "attention_jet")
