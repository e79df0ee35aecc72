"""The table from torch functions to jet rules, and the errors for calls without a rule."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from operator import attrgetter
from types import CodeType, FrameType, MethodType
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.checkpoint import CheckpointFunction

from .. import torch_private
from ..ops.forward_code import AutogradFunction as AutogradFunction
from ..ops.library import forward_mode_is_on
from ..torch_private import functional as F
from ._types import Args, Function

Rule: TypeAlias = Callable[..., Any]
"""Returns what its torch function returns, with jets for tensors; so does the function itself."""
R = TypeVar("R", bound=Rule)
Functions: TypeAlias = "str | Function | Sequence[Functions]"
"""Torch functions, or names that `spellings` looks up, in nests."""

_RULES: dict[Function, Rule] = {}
_GENERAL: dict[Function, Rule] = {}
_NAMESPACES = (torch, torch.Tensor, F, torch.special, torch_private.find("torch._C._nn"))


_SAME = """
    acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh digamma digamma
    digamma psi erfinv erfinv i0 i0 lgamma gammaln linalg.matrix_power matrix_power matmul matmul
    matrix_exp matrix_exp mvlgamma multigammaln outer ger sigmoid expit trunc fix vstack row_stack
"""
_PAIRS = zip(_SAME.split()[::2], _SAME.split()[1::2], strict=True)
# A jet calls the function itself in place of its other name, and so meets that one's rule.  Torch
# has a C++ entry of its own for each name (``torch.arccos`` is not ``torch.acos``), so that a rule
# registered for one name would not answer the other.
_BY_OTHER_NAME: dict[Function, Rule] = {
    function: first_name
    for first_name, name in ((attrgetter(path)(torch), name) for path, name in _PAIRS)
    for space in (torch, torch.Tensor, torch.special, torch.linalg)
    if (function := getattr(space, name, None)) not in (None, first_name)
}


class MissingJetRule(NotImplementedError):
    """Raised where a jet meets an operation without a rule that covers the call.

    Example:
        >>> jx.jet(torch.poisson, torch.ones(3), torch.ones(1, 3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jachess_ext.jet.registry.MissingJetRule: no jet rule for torch.poisson (called in no ...
    """


def spellings(*names: str) -> list[Rule]:
    """Return every torch function with one of ``names``: ``torch.x``, ``Tensor.x``, ``F.x``, ...

    Raises:
        AttributeError: torch has no function of a name.

    Example:
        >>> spellings("gelu", "sin") == [F.gelu, torch._C._nn.gelu, torch.sin, torch.Tensor.sin]
        True
    """
    functions = []
    for name in names:
        # torch.half is a dtype, torch.cpu a module, torch.__eq__ compares modules.
        spaces = (torch.Tensor,) if name.startswith("__") else _NAMESPACES
        spelled = [f for space in spaces if callable(f := getattr(space, name, None))]
        if not spelled:
            raise AttributeError(f"torch has no function named {name!r} to register a jet rule for")
        functions.extend(spelled)
    return functions


def built_in(name: str) -> list[Rule]:
    """Return the C++ functions that torch's Python function ``name`` calls: one, or none in a torch
    that does not expose it."""
    places = ("torch._C._VariableFunctions", "torch._C._nn")
    functions = [torch_private.find(f"{place}.{name}") for place in places]
    return [function for function in functions if function is not None]


def attribute(name: str) -> Rule:
    """Return the getter that ``__torch_function__`` gets when ``tensor.<name>`` is read."""
    return getattr(torch.Tensor, name).__get__


def jet_rule(*functions: Functions) -> Callable[[R], R]:
    """Register the decorated function as the jet rule of ``functions``.

    The rule has the torch function's own signature; one or more of its tensor arguments are
    `JetTensor`.  It returns what the torch function returns, with a `JetTensor` wherever the result
    depends on one.  Strings are looked up with `spellings`.  A later registration replaces an
    earlier one.

    Example:
        >>> @jet_rule(torch.special.erfcx)
        ... def erfcx(input):
        ...     return torch.exp(input * input) * torch.erfc(input)
    """

    def register(rule: R) -> R:
        for function in _flatten(functions):
            _RULES[function] = rule
        return rule

    return register


def recognise(*functions: Functions) -> Callable[[R], R]:
    """Register a function that is called before the rules of ``functions``.

    It is called as ``recogniser(rule, *args, **kwargs)`` with the ordinary rule, and returns a jet
    (deferred, or of a fused operator), or None to leave the call to the rule.

    Example:
        >>> @recognise(torch.square)
        ... def square_of_a_square_root(rule, input):
        ...     return None  # the ordinary rule serves
    """

    def before(recogniser: Rule, rule: Rule) -> Rule:
        def recognised(*args: object, **kwargs: object) -> object:
            jet = recogniser(rule, *args, **kwargs)
            return rule(*args, **kwargs) if jet is None else jet

        recognised.ordinary = getattr(rule, "ordinary", rule)  # type: ignore[attr-defined]
        return recognised

    def register(recogniser: R) -> R:
        for function in _flatten(functions):
            _RULES[function] = before(recogniser, _RULES[function])
        return recogniser

    return register


def _flatten(functions: Iterable[Functions]) -> Iterator[Function]:
    for function in functions:
        if isinstance(function, str):
            yield from spellings(function)
        elif isinstance(function, Sequence):
            yield from _flatten(function)
        else:
            yield function


def find_rule(function: Function) -> Rule | None:
    """Return the rule of a torch function, else the general one if it serves it, else None."""
    rule = _RULES.get(function) or _GENERAL.get(function) or _BY_OTHER_NAME.get(function)
    if rule is None and is_apply(function):
        return functools.partial(SERVING[0], function.__self__)  # type: ignore[attr-defined]
    if rule is None and getattr(function, "__name__", "") == "custom_function_call":
        return SERVING[0]  # what ``apply`` calls inside a transform of torch.func
    return rule


def own_function(function: Function) -> Function:
    """Return torch's own function, where jets are asked in the name of one that replaces it."""
    has_rule = function in _RULES or function in _GENERAL or function in _BY_OTHER_NAME
    return function if has_rule else torch_private.original_of(function)


def general_rule(function: Function, detail: str) -> Rule:
    """Return the general rule (`rules/forward_mode.py`) for a call that a function's own rule does
    not cover.

    Raises:
        MissingJetRule: it does not serve this function; ``detail`` says what is not covered.
    """
    rule = _GENERAL.get(function)
    if rule is None:
        raise missing_rule(function, detail)
    return rule


def serve_generally(function: Function, rule: Rule) -> None:
    """Register the general rule (`rules/forward_mode.py`) for a function."""
    _GENERAL[function] = rule


def registered_functions() -> tuple[Rule, ...]:
    """Return every torch function that has a rule of its own (for tests)."""
    return tuple(_RULES)


def rule_kinds() -> dict[Function, tuple[str, ...]]:
    """Return for every torch function that takes jets what answers a call, in the order asked.

    docs/rules.md says what each word means.

    Example:
        >>> rule_kinds()[torch.mul], rule_kinds()[torch.eq], rule_kinds()[torch.kron]
        (('recogniser', 'formula'), ('value',), ('forward mode',))
    """
    kinds = {}
    for function in {**_RULES, **_GENERAL, **_BY_OTHER_NAME}:
        rule = _RULES.get(function)
        ordinary = getattr(rule, "ordinary", rule)
        words = ["recogniser"] if ordinary is not rule else []
        if ordinary is not None:
            value = getattr(ordinary, "__qualname__", "").startswith("_on_primal.")
            composed = ordinary.__module__.endswith((".composite", ".functional", ".libraries"))
            words.append("value" if value else "composed" if composed else "formula")
        words += ["forward mode"] if function in _GENERAL else []
        kinds[function] = tuple(words) or ("other name",)
    return kinds


def function_name(function: object) -> str:
    """Return the full name: ``torch.nn.functional.gelu``, ``torch.Tensor.mT.__get__``."""
    if isinstance(function, torch_private.higher_order_operator):
        # torch.compile cannot trace resolve_name.
        return f"torch.ops.higher_order.{function.__name__}"
    full_name = torch.overrides.resolve_name(function) if callable(function) else None
    if full_name is not None:
        return full_name
    name = getattr(function, "__qualname__", None) or str(function)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else name


def last_name(function: object) -> str:
    """Return the name that all spellings of a function share: ``gelu`` or ``mT``."""
    return function_name(function).removesuffix(".__get__").rpartition(".")[2]


_AROUND = (
    "it was called inside a transform of torch.func (vmap, grad, jvp), which hides a jet: take the "
    "pass inside and the transform outside, torch.func.vmap(lambda x: jx.jvp(f, (x,), (t,))), or "
    "write the batch out."
)
_INSIDE = (
    "The function differentiates itself: pass it without that derivative, and take it outside, by "
    "torch.autograd.grad(..., create_graph=True) of what jx.jvp returns."
)
# Advice for functions that no rule can serve, by part of the function's name.
_ADVICE = {
    "aten.": f"{_AROUND} Pass the plain module of an exported one.",
    "nested": "Ragged tensors take no jets: pad them, and mask what was padded.",
    "_make_dual": _AROUND,
    **dict.fromkeys(("autograd.grad", "autograd.backward", "Tensor.backward"), _INSIDE),
    "grouped_mm": "transformers computes its mixtures of experts with it unless told otherwise: "
    'load the model with from_pretrained(..., experts_implementation="eager"), or call '
    'model.set_experts_implementation("eager").',
    "flex_attention": "It takes jets with a block_mask alone, its module imported before the pass: "
    "write a score_mod that hides keys as a mask_mod, else call scaled_dot_product_attention with "
    'an attn_mask (of a transformers model: model.set_attn_implementation("sdpa")).',
}


def missing_rule(function: object, detail: str = "") -> MissingJetRule:
    """Return the error for an operation without a rule; it names operation, module and a fix."""
    name = function_name(function)
    reason = f": {detail}" if detail else ""
    register = (
        f"Register a rule with @jet_rule({name}), after 'from jachess_ext.jet import jet_rule' "
        f"(recipe: jachess_ext/jet/README.md)."
    )
    if isinstance(function, torch.ScriptMethod | torch.jit.ScriptFunction):
        register = "It is a scripted or traced program: pass the plain module that it was made of."
    advice = next((advice for part, advice in _ADVICE.items() if part in name), known_fix(name))
    advice = advice.strip() or register
    return MissingJetRule(
        f"no jet rule for {name}{reason} (called in {_calling_module()}). Derivatives through it "
        f"would be wrong, so the pass stops here. {advice[0].upper()}{advice[1:]}"
    )


def calling_modules() -> list[torch.nn.Module]:
    """Return every ``nn.Module`` whose forward is on the Python stack, innermost first."""
    modules: list[torch.nn.Module] = []
    for frame in frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (not modules or modules[-1] is not owner):
            modules.append(owner)
    return modules


def frames() -> Iterator[FrameType]:
    """Yield the frames of the Python stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _calling_module() -> str:
    """Name the innermost and outermost ``nn.Module`` whose forward is on the Python stack."""
    if torch.compiler.is_compiling():  # which cannot follow the stack
        return "code that is being compiled"
    modules = calling_modules()
    if not modules:
        return "no torch.nn.Module"
    inner, root = modules[0], modules[-1]
    path = next((name for name, module in root.named_modules() if module is inner), "")
    where = f" {path!r} of {type(root).__name__}" if path else ""
    return f"module {type(inner).__name__}{where}"


# ---- autograd Functions ----------------------------------------------------------------------
#
# An autograd Function runs its forward without gradients and has a backward of its own, which knows
# no jets: what it returned would have lost its gradients.  `functions.py` serves some of those that
# have a jet among their arguments; else the pass stops, and the error names the library and a
# setting that avoids the Function.  Jets that a closure or a list carries are seen here, at the
# first torch function that meets one.
#
# torch switches forward-mode differentiation off around a Function's forward, and otherwise only in
# ``torch.inference_mode``; code inside that turns gradients on (a straight-through estimator, a
# solver of fixed points) leaves it off.  Every call reads that switch; only where it is off is the
# stack searched, which takes longer.  Without the switch, the stack is searched at every call.

APPLY, ASKED = torch_private.apply_of_functions()
APPLY_IS_C = ASKED is torch.autograd.Function
FORWARD_CODE: ContextVar[frozenset[AutogradFunction]] = ContextVar(
    "jachess_ext.forward_code", default=frozenset()
)
"""The Functions whose forward's own code runs on jets (`forward_code`)."""
RUN_FORWARDS: set[CodeType] = set()
"""The code that runs these forwards, each of which torch does not run."""
SERVING: list[Rule] = []
"""What answers ``apply`` of every Function, which it takes first (functions.py)."""


def is_apply(function: Function) -> bool:
    """Return whether this is the method ``apply`` of an autograd Function."""
    return isinstance(function, MethodType) and function.__func__ is APPLY


# Part of a Function's module, or of an operator's name → the library, and how to avoid it.
_LIBRARIES = {
    "flash_attn": (
        "FlashAttention",
        'load the model with from_pretrained(..., attn_implementation="sdpa"), or call '
        'model.set_attn_implementation("sdpa")',
    ),
    "xformers": (
        "xFormers",
        "use torch's scaled_dot_product_attention in its place (diffusers: "
        "model.disable_xformers_memory_efficient_attention())",
    ),
    "liger_kernel": (
        "Liger Kernel",
        "leave the model unpatched: TrainingArguments(use_liger_kernel=False), "
        "AutoModelForCausalLM instead of AutoLigerKernelForCausalLM",
    ),
    "unsloth": (
        "Unsloth",
        "load the model with transformers' AutoModelForCausalLM.from_pretrained and peft",
    ),
    "deepspeed": (
        "DeepSpeed",
        'stage 3 of ZeRO wraps every linear layer; set "zero_optimization": {"stage": 2}, or use '
        "DDP or FSDP2 through jx.JacHess",
    ),
    "bitsandbytes": (
        "bitsandbytes",
        "use its layers Linear4bit or Linear8bitLt, imported (import bitsandbytes) before the "
        "pass; other products of it take no jets",
    ),
    "torch.nn.modules._functions": ("a full backward hook of a module", "remove it for the pass"),
    "torch.nn.parallel": ("DDP", "call the model through jx.JacHess"),
    "torch.distributed": (
        "FSDP",
        "use fully_shard (FSDP2), and jx.jet, jx.jvp, jx.smoothness or jx.JacHess around the model",
    ),
}


def known_fix(name: str) -> str:
    """Return `` It belongs to …: …`` for a name of a known library; "" for any other."""
    for part, (library, fix) in _LIBRARIES.items():
        if part in name:
            return f" It belongs to {library}: {fix}."
    return ""


def surrounding_functions() -> int | None:
    """Return how many autograd Functions surround a pass that begins now; None where the switch
    shows that there is none."""
    return None if forward_mode_is_on() else len(_forwards_on_the_stack())


def refuse_opaque_functions(
    function: Function, args: Args, surrounding: int | None, derivative: type[torch.Tensor]
) -> None:
    """Refuse a call from within an autograd Function, or reentrant checkpointing, that began after
    the pass; called where `forward_mode_is_on` is false.

    Args:
        function: the torch function that was called with ``args``.
        surrounding: the result of `surrounding_functions` at the beginning of the pass.
        derivative: the class of tensors with derivatives.

    Raises:
        RuntimeError: the message names the Function and a way to avoid it.
    """
    forwards = _forwards_on_the_stack()
    harmless = (surrounding or 0) + sum(frame.f_code in RUN_FORWARDS for frame in frames())
    # Functions around the whole pass are harmless: they hold no jet.  Those that began since stand
    # before them in the list, the outermost of them last.
    if len(forwards) > harmless:
        forward = forwards[-1 - harmless]
        fix = _bound_too_early(forward, derivative) if APPLY_IS_C else ""
        raise function_refusal(_class_of(forward), fix=fix)
    # After its forward, torch calls this function on what a Function returned as it came.
    returned_as_it_came = function is torch.Tensor.view_as and args[0] is args[-1]
    off_since_the_beginning = surrounding is not None or torch.is_inference_mode_enabled()
    if returned_as_it_came or not off_since_the_beginning:
        raise function_refusal(None)


def function_refusal(function: type | None, detail: str = "", fix: str = "") -> RuntimeError:
    """Return the error for an autograd Function; ``detail`` says what it does that is not served.

    Args:
        function: None where it is not known.
        fix: what to do, if it is not what helps with any Function.
    """
    if function is CheckpointFunction:
        return RuntimeError(
            "a jet went into reentrant gradient checkpointing, which would lose its gradients; "
            "use gradient_checkpointing_enable(gradient_checkpointing_kwargs="
            '{"use_reentrant": False}), or checkpoint(..., use_reentrant=False)'
        )
    if function is None:
        return RuntimeError(
            "a jet went into a torch.autograd.Function, which would lose its gradients. Write what "
            "it computes with torch's own functions. A full backward hook of a module is one: "
            "remove it for the pass."
        )
    name = f"{function.__module__}.{function.__qualname__}"
    reason = detail or "would lose its gradients"
    ways = (
        " Write what it computes with torch's own functions, or give it a jvp staticmethod (first "
        "derivatives). If its backward is the derivative of its forward, "
        f"jx.forward_code({function.__qualname__}) takes it through its forward's own code."
    )
    return RuntimeError(
        f"a jet went into the torch.autograd.Function {name}, which {reason}."
        f"{known_fix(name) or fix or ways}"
    )


def _bound_too_early(forward: FrameType, derivative: type[torch.Tensor]) -> str:
    """Say what to do where a Function was handed a jet without having asked
    (`functions.watch_functions`); "" where none of its arguments is one."""
    names = forward.f_code.co_varnames[: forward.f_code.co_argcount]
    if not any(isinstance(forward.f_locals.get(name), derivative) for name in names):
        return ""
    return (
        " Its apply was bound before jachess_ext was used, in a place where it cannot be replaced "
        "(a tuple, a default, functools.partial): import jachess_ext.jet before what binds it."
    )


def _forwards_on_the_stack() -> list[FrameType]:
    """Return the running calls of ``forward`` of autograd Functions, innermost first."""
    codes = _forward_codes(torch.autograd.Function.__subclasses__()[-1])
    return [frame for frame in frames() if frame.f_code in codes]


@functools.lru_cache(maxsize=1)
def _forward_codes(newest: type) -> frozenset[CodeType | None]:
    """Return the code of every Function's ``forward``; cached until there is a newer Function."""
    return frozenset(_forward_code(function) for function in _classes())


def _classes(
    below: type[torch.autograd.Function] = torch.autograd.Function,
) -> Iterator[type[torch.autograd.Function]]:
    for child in below.__subclasses__():
        yield child
        yield from _classes(child)


def _forward_code(function: type[torch.autograd.Function]) -> CodeType | None:
    """Return the code of a Function's ``forward``, inside decorators that name what they wrap."""
    forward = inspect.unwrap(function.forward)
    while isinstance(forward, functools.partial):
        forward = inspect.unwrap(forward.func)
    called = forward if hasattr(forward, "__code__") else type(forward).__call__
    return getattr(called, "__code__", None)


def _class_of(forward: FrameType) -> type:
    """Return the Function whose ``forward`` this is.

    Functions that share code, as classes defined in a function do, are told apart by their context.
    """
    names = forward.f_code.co_varnames[:1]
    context = forward.f_locals.get(names[0]) if names else None
    function: type | None = getattr(context, "_forward_cls", None)
    return function or [c for c in _classes() if _forward_code(c) is forward.f_code][-1]


# ---- complex numbers -------------------------------------------------------------------------
#
# Functions whose rules hold for complex numbers, which a model may use inside (Fourier transforms,
# rotary embeddings as a complex product): those that are linear, or have a complex derivative.
# Others are refused, such as norms and variances, where |z|² is not z².
# `python_tests/jet/test_complex.py` checks every function of the rule table.

_OF_COMPLEX = """
    real imag view_as_real view_as_complex complex polar abs absolute angle conj conj_physical
    resolve_conj resolve_neg adjoint mH H cfloat cdouble
    fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft2 ihfft2
    hfftn ihfftn fftshift ifftshift
"""
_ALSO_OF_REAL = """
    view reshape view_as reshape_as flatten unflatten transpose t T swapaxes swapdims mT permute
    movedim moveaxis unsqueeze squeeze expand expand_as broadcast_to broadcast_tensors repeat
    tile diagonal repeat_interleave __getitem__ select narrow index_select gather split
    take_along_dim split_with_sizes chunk tensor_split unbind __iter__ cat concat concatenate
    stack roll flip tril triu contiguous clone to type type_as double float cpu cuda masked_fill
    where pad zeros_like new_zeros empty_like new_empty index_add index_copy scatter scatter_add
    hstack vstack dstack column_stack ravel meshgrid diag diag_embed diagflat trace unfold take
    masked_select block_diag
    add __add__ __radd__ sub subtract __sub__ rsub __rsub__ mul multiply __mul__ __rmul__ div
    divide true_divide __truediv__ __div__ __rtruediv__ reciprocal neg negative positive addcmul
    addcdiv lerp outer square pow __pow__ __rpow__ exp expm1 exp2 log log1p log2 log10 sqrt
    rsqrt sin cos tanh sigmoid sum mean cumsum matmul bmm mm mv dot einsum __matmul__
    __rmatmul__ linear addmm baddbmm conv1d conv2d conv3d sinh cosh tan asin acos atan asinh
    acosh atanh addmv addbmm addr inner kron tensordot vdot vecdot cross cumprod prod diff logsumexp
    softmax log_softmax conv_transpose1d conv_transpose2d conv_transpose3d inv solve_triangular
    cholesky pinv matrix_exp matrix_power multi_dot det slogdet logdet
    add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__ neg_ masked_fill_ copy_ fill_
    zero_ __setitem__ index_add_ index_copy_ scatter_ scatter_add_
    eq ne __eq__ __ne__ equal allclose isclose isnan isinf isfinite result_type item tolist
    detach ones_like full_like rand_like randn_like new_ones new_full new_tensor
    is_floating_point is_complex is_conj is_neg is_contiguous stride numel element_size
    get_device nelement is_same_size is_tensor requires_grad_ __format__ is_cuda is_cpu is_mps
    is_meta is_sparse layout data grad is_quantized is_nested is_mkldnn itemsize nbytes is_xla
    is_xpu
"""
OF_COMPLEX = frozenset(_OF_COMPLEX.split())
COVERED = OF_COMPLEX | frozenset(_ALSO_OF_REAL.split())


@cache
def takes_complex(function: Function) -> bool:
    """Return whether a torch function's rule holds for complex numbers."""
    return last_name(_BY_OTHER_NAME.get(function, function)) in COVERED
