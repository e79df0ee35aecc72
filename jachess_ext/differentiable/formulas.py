"""The decorator `formula`, which registers replacements of operators that torch refuses to
differentiate.

Torch's own operator runs without derivatives, in a single level of reverse mode, and, by `_Twice`,
in a plain graph up to the first backward.  The formula, whose operations torch differentiates to
every order and in every nesting, runs where torch would refuse or be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import torch_private
from ..ops.library import Context, Gradients, alias, wide
from .levels import levels_of
from .registry import ANSWERS, Function, answers

Results = Tensor | tuple[Tensor, ...]
A = TypeVar("A", bound=Function)
MARKER = torch.empty(0, 3, 13, 0)
"""A tensor to save for the backward.  A checkpoint identifies saved tensors by number, shape and
dtype: if it runs a block again outside of the context, where torch's operator saves no tensor of
this shape, it raises an error."""


class Row(NamedTuple):
    """A row of the table in docs/refused.md.

    Attributes:
        name: name of torch's operator.
        refuses: the kinds of derivative that torch refuses, as text: "forward, second, mixed" or
            some of them.
        wrong: the combinations of transforms (such as forward over reverse) in which torch's
            derivatives are wrong, as text.
        text: what is computed in these cases, a sentence.
    """

    name: str
    refuses: str
    wrong: str
    text: str


TABLE: list[Row] = []


def formula(
    *functions: Function | None,
    refuses: str = "",
    wrong: str = "",
    only: Function | None = None,
    third: Function | None = None,
    is_nestable: bool = True,
) -> Callable[[A], A]:
    """Return a decorator that registers a function as the formula of torch's ``functions``.

    Args:
        functions: torch's functions, with the formula's arguments; None: a function that this torch
            lacks.
        refuses: derivatives that torch refuses, for `Row`.
        wrong: combinations of transforms in which torch's forward mode is wrong, for `Row`.  If
            `refuses` is empty, the formula replaces torch's operator only in these combinations.
        only: predicate on the arguments of a call; the formula is used for calls for which it is
            true.  None: for all calls.
        third: predicate on the arguments of a call: whether the formula also replaces torch's
            backward from the third order on.  Used only if `refuses` is empty.  None: never.
        is_nestable: whether torch's operator works within the transforms of `torch.func`.
    """

    def register(compute: A) -> A:
        name = compute.__name__.removesuffix("_formula")
        text = (compute.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        TABLE.append(Row(name, refuses, wrong, " ".join(text.split())))
        for function in filter(None, functions):
            answers(function)(_answer(function, compute, bool(refuses), only, third, is_nestable))
        return compute

    return register


def in_place(function: Function | None, out_of_place: Function | None) -> None:
    """Register an answer for an in-place function, which calls the answer of ``out_of_place``.

    Args:
        function: the in-place function; None: this torch lacks it.
        out_of_place: the function without the write, whose formula is registered.
    """
    if function is None or out_of_place is None:
        return

    @answers(function)
    def answer(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        tensors = [x for x in (input, *args, *kwargs.values()) if isinstance(x, Tensor)]
        if not any(levels_of([x for x in tensors if _is_smooth(x)])):
            return function(input, *args, **kwargs)  # type: ignore[no-any-return]
        return input.copy_(ANSWERS[out_of_place](input.clone(), *args, **kwargs))


def _answer(
    function: Function,
    compute: Function,
    is_refused: bool,
    only: Function | None,
    third: Function | None,
    is_nestable: bool,
) -> Function:
    """Return the function to call in place of torch's ``function``.

    Args:
        compute: the formula.
        is_refused: whether torch refuses a derivative.
        only, third, is_nestable: as for `formula`.
    """

    def answer(*args: object, **kwargs: object) -> object:
        arguments = (*args, *kwargs.values())
        indices = [i for i, x in enumerate(arguments) if isinstance(x, Tensor) and _is_smooth(x)]
        inputs = [arguments[i] for i in indices]
        levels = levels_of(inputs)  # type: ignore[arg-type]  # all are tensors
        if not any(levels) or (only is not None and not only(*args, **kwargs)):
            return function(*args, **kwargs)
        if not is_refused and (levels.forward or not (third and third(*args, **kwargs))):
            return (compute if levels.has_nested_forward else function)(*args, **kwargs)
        is_too_deep = levels.reverse + levels.has_graph > (1 if is_refused else 2)
        if levels.forward or is_too_deep or (levels.reverse and not is_nestable):
            return compute(*args, **kwargs)
        if levels.reverse:
            return function(*args, **kwargs)
        if torch_private.functorch.peek_interpreter_stack() is not None:
            # A vmap around a plain graph, which `_Twice` does not support.
            return compute(*args, **kwargs)

        # The closure must not hold the tensors that autograd saves, since a checkpoint frees them.
        constants = [None if i in indices else x for i, x in enumerate(arguments)]
        count, names = len(args), tuple(kwargs)

        def call(function: Function, *tensors: Tensor) -> Results:
            values = list(constants)
            for i, x in zip(indices, tensors, strict=True):
                values[i] = x
            return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

        return _Twice.apply(call, function, compute, *inputs)

    return answer


def _is_smooth(x: Tensor) -> bool:
    """Return whether a tensor's dtype can have derivatives."""
    return x.is_floating_point() or x.is_complex()


class _Twice(torch.autograd.Function):
    """Call torch's operator, with torch's backward unless the backward is itself differentiated.

    In that case, which is known only when the backward runs, the formula is differentiated.
    """

    @staticmethod
    def forward(
        ctx: Context,
        call: Callable[..., Results],
        function: Function,
        compute: Function,
        *tensors: Tensor,
    ) -> Results:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(MARKER, *tensors)
        inner_graph = None
        # Hooks may offload saved tensors, or recompute them: they apply to the outer graph only,
        # and the backward builds the inner graph again.
        if torch_private.autograd._top_saved_tensors_default_hooks(False) is None:
            inner_graph = _graph(call, function, tensors)
        ctx.constants = inner_graph, call, function, compute
        results = call(function, *tensors) if inner_graph is None else inner_graph[1]
        if isinstance(results, Tensor):
            return results.detach()
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor | None) -> Gradients:
        _, *saved = ctx.saved_tensors
        inner, call, function, compute = ctx.constants
        incoming = [g for g in gradients if g is not None]
        is_needed = ctx.needs_input_grad[3:]
        create_graph = torch.is_grad_enabled()
        retain = torch_private.autograd._get_current_graph_task_keep_graph()
        if create_graph or levels_of(incoming).forward:
            with torch.enable_grad():
                # Aliases, since a tensor that is passed twice has two gradients.
                leaves = [alias(x) if need else x for x, need in zip(saved, is_needed, strict=True)]
                inner = leaves, call(compute, *leaves)
        elif inner is None:
            inner = _graph(call, function, saved)
        leaves, results = inner
        outputs = (results,) if isinstance(results, Tensor) else results
        pairs = [
            (y, g)
            for y, g in zip(outputs, gradients, strict=True)
            if g is not None and y.requires_grad
        ]
        if not pairs:
            return (None,) * (3 + len(saved))
        leaf_gradients = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                [x for x, need in zip(leaves, is_needed, strict=True) if need],
                [g for _, g in pairs],
                retain_graph=retain or create_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
        )
        return (None, None, None, *(next(leaf_gradients) if need else None for need in is_needed))


def _graph(
    call: Callable[..., Results], function: Function, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], Results]:
    """Return detached copies of the tensors, and the call's results with a graph to the copies."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        return leaves, call(function, *leaves)


# ---- dtypes -------------------------------------------------------------------------------------


@contextmanager
def without_autocast(x: Tensor) -> Iterator[None]:
    """Disable autocast for a tensor's device within the context."""
    with torch.autocast(x.device.type, enabled=False):
        yield


def result_dtype(x: Tensor, devices: Sequence[str] = ("cpu", "cuda")) -> torch.dtype:
    """Return the dtype of an operator's result for an input x.

    Args:
        devices: types of devices on which autocast computes the operator in float32.
    """
    device = x.device.type
    return (wide(x) if device in devices and torch.is_autocast_enabled(device) else x).dtype
