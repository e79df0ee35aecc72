"""Jets of scaled dot-product attention, in memory linear in the number of tokens.

`backend_of` chooses the backend of a call: the kernels, in several passes if there are more
directions than they support; on a GPU, for many scores, the kernels' forward and a backward by
large matrix products (`attention_chunks`); matrix products only, if no kernel supports the call;
within transforms the pure-torch reference, which builds T × Tk tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import attention_triton
from .attention_chunks import (
    composite_backward,
    composite_forward,
    empty_by_token,
    hybrid_backward,
)
from .attention_reference import (
    Call,
    Settings,
    default_scale,
    reference,
)
from .directions import number_on
from .library import (
    CUDA_DIRECTIONS,
    OPS,
    Results,
    alias,
    available,
    constant_when_compiled,
    define_operator,
    defined,
    in_passes,
    register_operator,
    transformed,
    wide_dtype,
)

# ---- calls that the CUDA kernels support ---------------------------------------------------

_CUDA_HEAD = 256


@constant_when_compiled
def _tile_fits(device: int, element: int, streams: int, size: int, value_size: int) -> bool:
    """Return whether the kernel's smallest tile, for heads of these sizes, fits into this GPU's
    shared memory per block.

    Args:
        device: number of the GPU.
        element: bytes of an element.
        streams: number of streams of a pass.
        size, value_size: head sizes of query and value.
    """
    from .._C import attention_jet_bytes

    properties = torch.cuda.get_device_properties(device)
    limit = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return attention_jet_bytes(element, streams, size, value_size) <= limit


def _kernels_take(query: Tensor, value: Tensor, q: int) -> bool:
    """Return whether the kernels of query's device support these heads, in one pass or several."""
    if query.device.type != "cuda":
        return True
    size, value_size = int(query.shape[-1]), int(value.shape[-1])
    if query.dtype == torch.float64 or max(size, value_size) > _CUDA_HEAD:
        return False
    # The tile of one pass has to fit, and a pass has at most two directions.
    pass_directions = min(q, CUDA_DIRECTIONS)
    streams = 1 + pass_directions + (query.shape[0] > 1 + q)
    device = torch.cuda.current_device() if query.device.index is None else query.device.index
    return _tile_fits(device, query.element_size(), streams, size, value_size)


# ---- backends ------------------------------------------------------------------------------

HYBRID_FROM = 2**24
"""Number of scores of a stream from which on a backward by large products is faster; a quarter of
it for heads above 64. Whether a CUDA graph is captured decides nothing: a replay is the eager step
to the bit."""
TRITON_FROM = 2**22
"""Number of scores of a stream from which on Triton's kernels compute a call: below, a launch from
Python takes longer than the C++ kernels. Modelled, not measured."""


class Backend(NamedTuple):
    """A row of `BACKENDS`: which calls a backend computes, unless an earlier row applies.

    Attributes:
        calls: description of these calls, for the table in the documentation.
        applies: returns whether a call is one of these calls.
        name: "triton": Triton's kernels; the backward of more than a value and its tangent is the
            next applying row's. "fused": the C++ kernels. "hybrid": their forward, and a backward
            by large products. "composite": products and the softmax's operator. "reference": pure
            torch.
    """

    calls: str
    applies: Callable[[Call], bool]
    name: str


def _no_kernel(call: Call) -> bool:
    device, has_sum = call.query.device, call.settings.summed > 0
    return not available("attention_jet", device, sums=has_sum)


def _takes_pairs_only(settings: Settings) -> bool:
    """Return whether the settings have a soft cap or dropout, with which the kernels support at
    most four directions at once and no sum of squares."""
    return bool(settings.softcap or settings.dropout_p)


def _count_scores(call: Call) -> tuple[int, int]:
    """Return the number of scores of a stream, B · H · T · Tk, and of those within the window."""
    settings, keys = call.settings, call.key.shape[3]
    batch, heads, tokens = call.query.shape[1:4]
    rows = batch * heads * tokens  # `numel` of a shape would export the tokens as a constant
    right = 0 if settings.causal else settings.right
    has_window = settings.left >= 0 and right >= 0
    return rows * keys, rows * (min(keys, settings.left + 1 + right) if has_window else keys)


def _large_enough_for_hybrid(call: Call) -> bool:
    query, _, value = call[:3]
    if query.dtype != torch.bfloat16 or not available("attention_jet_scores", query.device):
        return False
    factor = 4 if max(int(query.shape[-1]), int(value.shape[-1])) > 64 else 1
    scores, visible = _count_scores(call)
    return visible * factor >= HYBRID_FROM and 2 * visible >= scores


def _large_enough_for_triton(call: Call) -> bool:
    return attention_triton.accepts(call) and _count_scores(call)[1] >= TRITON_FROM


BACKENDS = (
    Backend(
        "within a transform of `torch.func` or forward-mode AD; with a torch that lacks what an "
        "operator in Python needs",
        lambda call: transformed() or not defined("attention_jet_composite"),
        "reference",
    ),
    Backend(
        "with Triton and JACHESS_TRITON=1, on a GPU of 8.0 or later: bfloat16, heads of at most "
        "64, no sum of several squares; a value and its tangent with heads of 128 "
        f"on 9.x and 10.x; from {TRITON_FROM >> 20} M scores in the window on",
        _large_enough_for_triton,
        "triton",
    ),
    Backend(
        "no kernel: the library is missing; a GPU below 8.0, of AMD, another device; on a GPU a "
        "sum of squares",
        _no_kernel,
        "composite",
    ),
    Backend(
        "a sum of squares with a soft cap or dropout",
        lambda call: call.settings.summed > 0 and _takes_pairs_only(call.settings),
        "composite",
    ),
    Backend(
        f"on a GPU float64, heads above {_CUDA_HEAD}, and those of which no tile fits its shared "
        "memory",
        lambda call: not _kernels_take(call.query, call.value, call.settings.q),
        "composite",
    ),
    Backend(
        f"on a GPU bfloat16, from {HYBRID_FROM >> 20} M scores of a stream on, B · H · T · Tk; a "
        "quarter with heads above 64; of a window the scores in it, at least half of all",
        _large_enough_for_hybrid,
        "hybrid",
    ),
    Backend("all others", lambda call: True, "fused"),
)
"""The first row that applies to a call computes it; docs/how_it_works.md prints the table."""
OPERATORS = {
    "fused": "attention_jet",
    "hybrid": "attention_jet_hybrid",
    "triton": "attention_jet_triton",
}
"""The operators with statistics, by backend."""


def backend_of(call: Call) -> str:
    """Return the name of the backend that computes a call.

    Examples:
        >>> heads, settings = torch.ones(2, 1, 1, 3, 4), Settings(1, 0.5, False, -1, -1, 0, 0, 0)
        >>> backend_of(Call(heads, heads, heads, None, None, settings)) in ("fused", "composite")
        True
    """
    for backend in BACKENDS:
        if backend.applies(call):
            return backend.name
    raise AssertionError("the last row applies to every call")


# ---- the operator --------------------------------------------------------------------------


def attention_jet(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    q: int,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor = 0,
    summed: int = 0,
) -> Tensor:
    """Return the 2-jet of attention, softmax(scale · q kᵀ + mask) v, without a T × Tk tensor.

    A query that sees no key gives zeros in every stream, as in torch's attention.

    Args:
        query: a stacked jet [S, B, H, T, D].
        key: [S, B, Hk, Tk, D] of query's dtype; Hk divides H, query head h uses key head
            h // (H / Hk).
        value: [S, B, Hk, Tk, Dv] of query's dtype.
        mask: broadcastable to [B, H, T, Tk], applied to the primal scores only: bool (True: the key
            is visible) or floating point (added; −inf allowed); it has no gradient.
        q, summed: as for `activation_jet`.
        scale: factor of the scores; None: D^(−1/2).
        causal: query i sees keys j ≤ i, both counted from the first.
        window: (left, right): query i sees keys i − left ≤ j ≤ i + right; −1 for no limit.
        softcap: scores become softcap · tanh(scores / softcap) before the masks; 0 for none.
        dropout_p: probability that a weight is dropped; the others are divided by 1 − dropout_p.
            All streams, forward and backward, have the same mask.
        dropout_seed: 64-bit seed of dropout's mask (`dropout_mask`): a number, or an int64 scalar
            on query's device, which may change between replays of a CUDA graph.

    Returns:
        [S, B, H, T, Dv] of query's dtype, laid out as [S, B, T, H, Dv], so that
        ``.transpose(-3, -2).flatten(-2)`` copies nothing; differentiable in query, key and value
        (the second backward builds T × Tk tensors).

    Raises:
        ValueError: ``mask`` requires a gradient.

    Examples:
        >>> heads = torch.ones(2, 1, 1, 3, 4)  # one direction, three tokens
        >>> attention_jet(heads, heads, heads, q=1, causal=True).shape
        torch.Size([2, 1, 1, 3, 4])
    """
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "attention_jet: mask requires a gradient, which this operator does not give: detach "
            "it, or use attention_jet_reference."
        )
    scale = default_scale(query) if scale is None else scale
    settings = Settings(q, scale, causal, *window, softcap or 0.0, dropout_p, summed)
    seed = number_on(query.device, dropout_seed) if dropout_p else None
    call = Call(query, key, value, mask, seed, settings)
    backend = backend_of(call)
    if backend == "reference":
        return reference(call)
    if backend == "composite":
        return OPS.attention_jet_composite(*call[:5], *settings)
    operator = getattr(OPS, OPERATORS[backend])

    def run(query: Tensor, key: Tensor, value: Tensor, q: int) -> Tensor:
        y, _ = operator(query, key, value, mask, seed, q, *settings[1:])
        return y.transpose(2, 3)  # contiguous, so that stacked passes keep the layout

    any_number = not _takes_pairs_only(settings)
    return in_passes(run, (query, key, value), q, any_number=any_number).transpose(2, 3)


# ---- a call of torch's attention --------------------------------------------------------------

_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def with_plain_mask(args: Sequence, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by name of a call of torch's attention whose mask is a `CausalBias`,
    with `is_causal` or a boolean mask in its place; None for any other mask.

    A `CausalBias` is a tensor of uninitialised memory, which only its class can interpret.
    """
    call: dict[str, Any] = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
    bias: Any = call.get("attn_mask")
    # By its name, since its module takes seconds to import.
    kind = f"{type(bias).__module__}.{type(bias).__name__}"
    if kind != "torch.nn.attention.bias.CausalBias" or call.get("is_causal"):
        return None
    rows, keys = bias.seq_len_q, bias.seq_len_kv
    causal = bias.variant.name == "UPPER_LEFT" or rows == keys
    ones = torch.ones(rows, keys, dtype=torch.bool, device=call["query"].device)
    return call | {"is_causal": causal, "attn_mask": None if causal else ones.tril(keys - rows)}


# ---- the second backward -------------------------------------------------------------------


def second_backward(
    gy: Tensor,
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    attention: Callable[..., Tensor],
) -> list[Tensor | None]:
    """Return the gradients of Σ_k <cotangents_k, g_k> with respect to [gy, *inputs], where
    (g_1, g_2, g_3) are attention's gradients for gy at inputs; in memory linear in the tokens.

    The sum equals <gy, J c>, where J c is the derivative of attention along the cotangents c.
    J c is a stream of a jet of the next order.  It is itself the gradient with respect to gy, and
    the backward of this jet gives the gradients with respect to inputs.

    Args:
        gy: gradient of the result, [S, B, H, T, Dv]; S = 1 for attention itself, S = 2 for the
            operator with q = 1.
        inputs: query, key and value, [S, ...].
        cotangents: cotangents of the gradients g_k; None: zero.
        attention: `attention_jet` with all arguments but the jets and q.
    """
    keep_graph, streams = torch.is_grad_enabled(), len(gy)
    with torch.enable_grad():
        points = [alias(x) for x in inputs]
        jets = [
            torch.cat([x, torch.zeros_like(x) if c is None else c])
            for x, c in zip(points, cotangents, strict=True)
        ]
        along = attention(*jets, q=streams)[streams:]
        gradients = torch.autograd.grad(along, points, gy, create_graph=keep_graph)
    return [along if keep_graph else along.detach(), *gradients]


def _second_backward(
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    constants: Sequence[Any],
) -> list[Tensor | None] | None:
    """Return `second_backward` of an operator with at most one direction and no second order.

    Otherwise return None: the second backward of the reference, which builds T × Tk tensors, is
    then used.
    """
    settings, (gy,), (*jets, mask, seed) = Settings(*constants), gradients, inputs
    if len(gy) > 2:
        return None
    attention = partial(
        attention_jet,
        mask=mask,
        scale=settings.scale,
        causal=settings.causal,
        window=(settings.left, settings.right),
        softcap=settings.softcap,
        dropout_p=settings.dropout_p,
        dropout_seed=0 if seed is None else seed,
    )
    return second_backward(gy, jets, cotangents, attention)


# ---- registration --------------------------------------------------------------------------

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? dropout_seed"
_SETTINGS = (  # without defaults: the dispatcher does not pass default values to Python kernels
    "int q, float scale, bool causal, int window_left, int window_right, float softcap, "
    "float dropout_p, int summed"
)
_GRADIENTS = "(Tensor gquery, Tensor gkey, Tensor gvalue)"


def _fake_result(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return empty_by_token(query, query.shape[2], query.shape[3], value.shape[-1])


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    statistics = query.new_empty(query.shape[:-1], dtype=wide_dtype(query.dtype))
    return _fake_result(query, key, value), statistics


def _fake_backward(gy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(empty_by_token(x, *x.shape[2:]) for x in inputs[:3])


def _call(arguments: Sequence) -> Call:
    """Return the arguments of an operator (five tensors, then the settings) as a `Call`."""
    query, key, value, mask, seed, *numbers = arguments
    return Call(query, key, value, mask, seed, Settings(*numbers))


def _register(name: str, fake: Callable[..., Results], has_statistics: bool) -> None:
    register_operator(
        name,
        lambda *arguments: reference(_call(arguments)),
        tensors=5,
        differentiable=3,
        fake=fake,
        fake_backward=_fake_backward,
        has_statistics=has_statistics,
        second_backward=_second_backward,
    )


define_operator(
    "attention_jet_composite",
    f"({_TENSORS}, {_SETTINGS}) -> Tensor y",
    lambda *arguments: composite_forward(_call(arguments)),
)
define_operator(
    "attention_jet_composite_backward",
    f"(Tensor gy, {_TENSORS}, {_SETTINGS}) -> {_GRADIENTS}",
    lambda gy, *arguments: composite_backward(gy, _call(arguments)),
)
define_operator(
    "attention_jet_hybrid",
    f"({_TENSORS}, {_SETTINGS}) -> (Tensor y, Tensor stats)",
    lambda *arguments: OPS.attention_jet(*arguments),
)
define_operator(
    "attention_jet_hybrid_backward",
    f"(Tensor gy, {_TENSORS}, Tensor y, Tensor stats, {_SETTINGS}) -> {_GRADIENTS}",
    lambda gy, q, k, v, mask, seed, y, statistics, *settings: hybrid_backward(
        gy, _call((q, k, v, mask, seed, *settings)), y, statistics
    ),
)


def _triton_backward(
    gy: Tensor, call: Call, y: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients, computed by Triton's kernels if they take the jet, otherwise by the
    next backend."""
    if len(gy) == 2:
        return attention_triton.backward(gy, call, y, statistics)
    rows = BACKENDS[[row.name for row in BACKENDS].index("triton") + 1 :]
    backend = next(row.name for row in rows if row.applies(call))
    if backend == "composite":
        return composite_backward(gy, call)
    operator = getattr(OPS, f"{OPERATORS[backend]}_backward")
    return operator(gy, *call[:5], y, statistics, *call.settings)


define_operator(
    "attention_jet_triton",
    f"({_TENSORS}, {_SETTINGS}) -> (Tensor y, Tensor stats)",
    lambda *arguments: attention_triton.forward(_call(arguments)),
)
define_operator(
    "attention_jet_triton_backward",
    f"(Tensor gy, {_TENSORS}, Tensor y, Tensor stats, {_SETTINGS}) -> {_GRADIENTS}",
    lambda gy, q, k, v, mask, seed, y, statistics, *settings: _triton_backward(
        gy, _call((q, k, v, mask, seed, *settings)), y, statistics
    ),
)
_register("attention_jet", _fake, has_statistics=True)
_register("attention_jet_triton", _fake, has_statistics=True)
_register("attention_jet_hybrid", _fake, has_statistics=True)
_register("attention_jet_composite", _fake_result, has_statistics=False)
