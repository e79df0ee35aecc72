"""The decorator of the formulas that stand in for operators torch refuses to differentiate.

Torch's own operator runs wherever it gives what is asked: where no derivative is, in one level of
reverse mode, and for the first backward of a plain graph, which `_Twice` keeps.  The formula runs
where torch would refuse or be wrong: it is made of operations that torch differentiates to every
order and in every nesting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import torch_private
from ..ops.library import Context, Gradients, alias
from .levels import levels_of
from .registry import ANSWERS, Function, answers

Results = Tensor | tuple[Tensor, ...]
A = TypeVar("A", bound=Function)
# Hooks may belong to a checkpoint, which hands tensors out by their number, having compared shape
# and dtype: run anew outside of the context, torch's operator saves others, and none like this.
_MARKER = torch.empty(0, 3, 13, 0)


class Row(NamedTuple):
    """A row of the page "What torch refuses".

    Attributes:
        name: of torch's operator.
        refuses: the derivatives that torch refuses: forward, second, mixed.
        wrong: the nestings in which torch answers, and is wrong.
        text: how the operator is computed there.
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
    transforms: bool = True,
) -> Callable[[A], A]:
    """Register the decorated function as the formula of torch's ``functions``, of which it has the
    arguments.

    Args:
        refuses: which derivatives torch refuses.
        wrong: in which nestings of forward mode torch's derivatives are wrong; the formula then
            stands for these alone.
        only: called with the arguments, says whether the formula is for them.
        transforms: whether torch's operator runs within the transforms of `torch.func`.
    """

    def register(compute: A) -> A:
        name = compute.__name__.removesuffix("_formula")
        text = (compute.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        TABLE.append(Row(name, refuses, wrong, " ".join(text.split())))
        for function in filter(None, functions):  # this torch may lack one
            answers(function)(_answer(function, compute, bool(refuses), only, transforms))
        return compute

    return register


def in_place(function: Function | None, out_of_place: Function | None) -> None:
    """Register a function that writes the result of another one into its first argument."""
    if function is None or out_of_place is None:
        return

    @answers(function)
    def answer(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        tensors = [x for x in (input, *args, *kwargs.values()) if isinstance(x, Tensor)]
        if not any(levels_of([x for x in tensors if _is_smooth(x)])):
            return function(input, *args, **kwargs)  # type: ignore[no-any-return]
        return input.copy_(ANSWERS[out_of_place](input.clone(), *args, **kwargs))


def _answer(
    function: Function, compute: Function, refused: bool, only: Function | None, transforms: bool
) -> Function:
    def answer(*args: object, **kwargs: object) -> object:
        values = (*args, *kwargs.values())
        places = [i for i, x in enumerate(values) if isinstance(x, Tensor) and _is_smooth(x)]
        inputs = [values[i] for i in places]
        levels = levels_of(inputs)  # type: ignore[arg-type]  # tensors all
        if not any(levels) or (only is not None and not only(*args, **kwargs)):
            return function(*args, **kwargs)
        if not refused:
            return (compute if levels.nested_forward else function)(*args, **kwargs)
        several = levels.reverse + levels.graph > 1
        if levels.forward or several or (levels.reverse and not transforms):
            return compute(*args, **kwargs)
        if levels.reverse:
            return function(*args, **kwargs)

        # What autograd saves is not held here, too: a checkpoint frees it.
        constants = [None if i in places else x for i, x in enumerate(values)]
        count, names = len(args), tuple(kwargs)

        def call(function: Function, *tensors: Tensor) -> Results:
            new = list(constants)
            for i, x in zip(places, tensors, strict=True):
                new[i] = x
            return function(*new[:count], **dict(zip(names, new[count:], strict=True)))

        return _Twice.apply(call, function, compute, *inputs)

    return answer


def _is_smooth(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class _Twice(torch.autograd.Function):
    """Torch's operator with torch's own backward, kept; if that one is to be differentiated, which
    only the backward knows, the formula's backward."""

    @staticmethod
    def forward(
        ctx: Context,
        call: Callable[..., Results],
        function: Function,
        compute: Function,
        *tensors: Tensor,
    ) -> Results:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_MARKER, *tensors)
        inner = None
        # Hooks may offload what is saved, or compute it anew: they get the outer graph alone, and
        # the backward makes the inner one again.
        if torch_private.autograd._top_saved_tensors_default_hooks(False) is None:
            inner = _graph(call, function, tensors)
        ctx.constants = inner, call, function, compute
        results = call(function, *tensors) if inner is None else inner[1]
        if isinstance(results, Tensor):
            return results.detach()
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor | None) -> Gradients:
        _, *saved = ctx.saved_tensors
        inner, call, function, compute = ctx.constants
        incoming = [g for g in gradients if g is not None]
        needed = ctx.needs_input_grad[3:]
        create_graph = torch.is_grad_enabled()
        keep = torch_private.autograd._get_current_graph_task_keep_graph()
        if create_graph or levels_of(incoming).forward:
            with torch.enable_grad():
                # A tensor that came in twice has two gradients.
                leaves = [alias(x) if need else x for x, need in zip(saved, needed, strict=True)]
                inner = leaves, call(compute, *leaves)
        elif inner is None:
            inner = _graph(call, function, saved)
        leaves, results = inner
        several = (results,) if isinstance(results, Tensor) else results
        pairs = [
            (y, g)
            for y, g in zip(several, gradients, strict=True)
            if g is not None and y.requires_grad
        ]
        if not pairs:
            return (None,) * (3 + len(saved))
        of_leaves = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                [x for x, need in zip(leaves, needed, strict=True) if need],
                [g for _, g in pairs],
                retain_graph=keep or create_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
        )
        return (None, None, None, *(next(of_leaves) if need else None for need in needed))


def _graph(
    call: Callable[..., Results], function: Function, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], Results]:
    """Return leaves with the values of the tensors, and the call's results in a graph of theirs."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        return leaves, call(function, *leaves)


# ---- what formulas share ------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """Return halves as float32, in which torch's operators compute them."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@contextmanager
def without_autocast(x: Tensor) -> Iterator[None]:
    """Compute in the dtypes of the tensors, as operators do that autocast does not narrow."""
    with torch.autocast(x.device.type, enabled=False):
        yield


def result_dtype(x: Tensor, devices: Sequence[str] = ("cpu", "cuda")) -> torch.dtype:
    """Return the dtype of the result of an operator that autocast computes in float32 on some
    devices."""
    device = x.device.type
    autocast = device in devices and torch.is_autocast_enabled(device)
    return wide(x).dtype if autocast else x.dtype
