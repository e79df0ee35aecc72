"""Strides and shared storages: results of rules get the memory layout of torch's own results.

`Tensor.reshape` returns a view or a copy depending on the strides of its argument, and a write in
place changes every view.  If a jet had other strides than torch's result, or shared a storage that
torch's result does not, a write would change other numbers than in the plain program.  Rules need
not care: `match_torch_layout` corrects their results.

No correction is needed if the arguments and the result are contiguous and the result has a new
storage (`_STRIDED_RESULTS` names the exceptions), nor for functions that are the same view of the
primal and of the stack.  Otherwise the function is called with the primals, once for each
combination of shapes, strides, settings and shared storages, and the layout of its result is
cached.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from ... import torch_private
from ...ops import collectives
from ...ops.library import dispatch_modes, transformed, without_dispatch_modes
from .autograd_functions import is_apply
from .errors import MissingJetRule, missing_rule
from .kinds import VIEWS
from .layout import iter_tensors, replace_tensors
from .registry import attribute, spellings
from .types import Args, Function, Named

Jet: TypeAlias = Any  # `JetTensor`, whose file imports this one

# Functions whose results are not corrected. Views, whose rules return the same view of the stack
# ``[S, ...]``, or copy it where torch copies; and collectives, whose results are contiguous, and
# which must not run a second time, perhaps on one rank only.
_STACK_VIEWS = frozenset(
    [
        *spellings(*VIEWS, "view_as", "reshape_as", "expand_as", "__iter__", "adjoint"),
        *spellings("hsplit", "vsplit", "dsplit"),
        *spellings("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"),
        *(attribute(name) for name in ("T", "mT", "H", "mH")),
        torch.linalg.diagonal,
        *(*collectives.NAMES, *collectives.LISTWISE),
    ]
)
_BASIC_INDEX_TYPES = (int, slice, type(None), type(Ellipsis))
# The layouts of torch's results, by call; and the calls whose rule returns the same layout.
_LAYOUTS: dict[Hashable, tuple[Layout, ...]] = {}
_MATCHED_CALLS: set[Hashable] = set()
_CACHE_SIZE = 4096


class Layout(NamedTuple):
    """The memory layout of a result of torch.

    Attributes:
        strides: strides of the result.
        source: index of the tensor argument whose storage the result shares; None for a new
            storage.
        offset: distance, in entries, from the first entry of that argument to the first one of the
            result.
    """

    strides: tuple[int, ...]
    source: int | None
    offset: int | torch.SymInt


def match_torch_layout(function: Function, args: Args, kwargs: Named, result: object) -> object:
    """Return the result of a function's rule with the strides of torch's result, and sharing the
    storages that torch's result shares."""
    if function in _STACK_VIEWS or (
        function is torch.Tensor.__getitem__ and _is_basic_index(args[1])
    ):
        return result
    if is_apply(function):  # its results are torch's, or those of functions corrected already
        return result
    values = iter_tensors(result) if isinstance(result, list | tuple) else [result]
    results = [value for value in values if _is_jet(value)]
    if not results:
        return result
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple | dict):
            tensors.extend(iter_tensors(value))
    is_contiguous, storages = _inspect_arguments(function, tensors, result)
    if is_contiguous and all(_has_new_storage(jet, storages) for jet in results):
        return result
    if len(results) == 1 and any(results[0] is tensor for tensor in tensors):  # a write in place
        return result
    if transformed():  # torch.func hides the storages; and torch may have no derivative to run
        return result
    # Other layouts depend on which kernel torch picks: the strides of a sum of two transposed
    # matrices, of `topk` along an inner dimension, of an attention.  No formula holds for all
    # functions, so torch's own function runs once on the primals, without gradients.
    key = (function, _cache_key(args), _cache_key(kwargs), _shared_storages(tensors))
    computed = [jet for jet in results if jet.streams_if_computed is not None]
    rule_layouts = tuple((jet.streams.stride(), storage_id(jet) in storages) for jet in computed)
    try:
        if (key, rule_layouts) in _MATCHED_CALLS:
            return result
    except TypeError:  # an argument that cannot be hashed
        return _match_layouts(
            result, iter(_torch_layouts(function, args, kwargs, tensors)), tensors
        )
    if key not in _LAYOUTS:
        if len(_LAYOUTS) >= _CACHE_SIZE:  # shapes change with every batch
            _LAYOUTS.clear()
            _MATCHED_CALLS.clear()
        _LAYOUTS[key] = _torch_layouts(function, args, kwargs, tensors)
    matched = _match_layouts(result, iter(_LAYOUTS[key]), tensors)
    if matched is result and computed:
        _MATCHED_CALLS.add((key, rule_layouts))
    return matched


def _inspect_arguments(
    function: Function, tensors: list[Tensor], result: object
) -> tuple[bool, set[int | None]]:
    """Return whether all arguments and torch's result are contiguous, and the ids of the storages
    of the jets among the arguments.

    Also records in the pass that the function may have saved these jets for backward.
    """
    is_contiguous, storages = function not in _STRIDED_RESULTS, set()
    has_grad = torch.is_grad_enabled()
    for tensor in tensors:
        if not _is_jet(tensor):
            is_dense = tensor.layout is not torch.strided or tensor.is_contiguous()
            is_contiguous = is_contiguous and is_dense
            continue
        streams = tensor.streams_if_computed
        if streams is None or tensor is result:
            continue
        if is_contiguous and not streams.is_contiguous():
            is_contiguous = streams[0].is_contiguous()
        storage = storage_id(tensor)
        storages.add(storage)
        if has_grad and tensor.jet_layout.jet_pass is not None:
            tensor.jet_layout.jet_pass.saved_for_backward.add(storage)
    return is_contiguous, storages


def _has_new_storage(result: Jet, storages: set[int | None]) -> bool:
    """Return whether a result is contiguous, and its storage is not one of ``storages``."""
    streams = result.streams_if_computed
    if streams is None:  # deferred: an operator will allocate it
        return True
    return streams.is_contiguous() and (not storages or storage_id(result) not in storages - {None})


def copy_before_write(target: Jet) -> None:
    """Move a jet that is about to be written into, and all its views, to a new storage, if needed.

    A move is needed if the jet was an argument of a function: the function's rule may have saved
    the streams for backward where torch's function saves nothing, and autograd would refuse the
    backward after the write.  A move is also needed if a dispatch mode may keep the streams.  The
    jet stays in its storage if a plain tensor shares it, which would miss the write.
    """
    jet_pass, storage = target.jet_layout.jet_pass, storage_id(target)
    if jet_pass is None or storage is None:
        return
    if not dispatch_modes() and (
        storage not in jet_pass.saved_for_backward or not torch.is_grad_enabled()
    ):
        return
    if storage in jet_pass.aliased:
        return
    computed = [jet for jet in jet_pass.jets.values() if jet.streams_if_computed is not None]
    views = [(jet, jet.streams) for jet in computed if storage_id(jet) == storage]
    # All views move together, so that a write into one still changes the others.  They have more
    # than one base (``Tensor._base``) if a jet was detached: both bases share the storage, and have
    # separate gradients.
    bases = {id(base): base for base in (_base(view) for _, view in views)}
    with_gradients = [base for base in bases.values() if base.requires_grad]
    if len(with_gradients) > 1:
        return
    old_base = with_gradients[0] if with_gradients else _base(target.streams)
    new_base = old_base.clone()
    if new_base.stride() != old_base.stride():
        return
    new_bases = {n: new_base if b is old_base else new_base.detach() for n, b in bases.items()}
    for jet, view in views:
        jet.set_streams(_rebase_view(view, old_base, new_bases[id(_base(view))]))


def _rebase_view(view: Tensor, old_base: Tensor, new_base: Tensor) -> Tensor:
    """Return the view of ``new_base`` with the offset and strides that ``view`` has in
    ``old_base``.

    Each of the three may be complex, or a view of complex numbers as pairs of real ones.
    """
    if not (view.is_complex() or old_base.is_complex()):
        offset = view.storage_offset() - old_base.storage_offset() + new_base.storage_offset()
        return new_base.as_strided(view.shape, view.stride(), offset)
    # A complex entry is two real ones: strides and offsets are counted in real entries here, since
    # a view of imaginary parts begins at an odd one.
    reals = torch.view_as_real(new_base) if new_base.is_complex() else new_base
    sizes = 1 + view.is_complex(), 1 + old_base.is_complex()  # real entries per entry
    offset = view.storage_offset() * sizes[0] - old_base.storage_offset() * sizes[1]
    offset += reals.storage_offset()
    if not view.is_complex():
        new_view = reals.as_strided(view.shape, view.stride(), offset)
        return torch_private.neg_view(new_view) if view.is_neg() else new_view
    strides = (*(2 * stride for stride in view.stride()), 1)
    new_view = torch.view_as_complex(reals.as_strided((*view.shape, 2), strides, offset))
    return new_view.conj() if view.is_conj() else new_view


def _base(view: Tensor) -> Tensor:
    return view if view._base is None else view._base


def refuse_expanded(target: Jet) -> None:
    """Raise MissingJetRule for a write into an expanded input or a view of it, or into a copy that
    takes the place of a view."""
    jet_pass = target.jet_layout.jet_pass
    if jet_pass is not None and jet_pass.overlapping and storage_id(target) in jet_pass.overlapping:
        raise MissingJetRule(
            "a write in place into an input that is expanded, or into a tensor and its "
            "view_as_complex, which share memory where the streams of a jet cannot: pass "
            "x.contiguous() in its place, or clone the view"
        )


def refuse_overlap(target: Tensor, strides: tuple[int, ...], function: Function) -> None:
    """Raise MissingJetRule for a write into a view whose entries overlap in memory.

    The result would depend on the order in which torch writes the entries.
    """
    if overlaps(target.shape, strides):
        raise missing_rule(function, "it writes into a view whose entries overlap: clone it")


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether two entries of a tensor may have the same address."""
    # In ascending order each stride has to be at least the extent of the dimensions before it.
    extent, pairs = 1, zip(strides, shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def match_input_layout(stack: Tensor, x: Tensor) -> Tensor:
    """Return the stack ``[S, *x.shape]`` with the strides of x in every stream.

    `Tensor.reshape` then copies the stack if and only if it copies x.  If x is expanded, its stack
    is dense.
    """
    if x.is_contiguous() or transformed():
        return stack
    is_expanded = overlaps(x.shape, x.stride())
    return stack_with_strides(
        stack, (torch.empty_like(x, device="meta") if is_expanded else x).stride()
    )


def _is_basic_index(index: object) -> bool:
    """Return whether an index holds only integers, slices, None and Ellipsis, so that indexing
    returns a view."""
    entries = index if isinstance(index, tuple) else (index,)
    return all(isinstance(e, _BASIC_INDEX_TYPES) and not isinstance(e, bool) for e in entries)


def _is_jet(value: object) -> TypeGuard[Jet]:
    return getattr(type(value), "is_jet", False)  # `JetTensor`'s file imports this one


def storage_id(tensor: Tensor) -> int | None:
    """Return the id of a tensor's storage.

    None for a deferred jet, which has no storage yet, and if a transform of torch.func hides it.
    """
    plain = tensor.streams_if_computed if _is_jet(tensor) else tensor
    if plain is None:
        return None
    try:
        return plain.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def record_storage(tensor: Tensor, storages: MutableMapping[int, torch.UntypedStorage]) -> None:
    """Add the storage of a tensor to a (weak) mapping from ids to storages."""
    if (storage := storage_id(tensor)) is not None:
        storages[storage] = _plain(tensor).untyped_storage()


def _cache_key(value: object) -> Hashable:
    """Return the properties of an argument on which torch's layout depends, as a dictionary key."""
    if _is_jet(value) and value.streams_if_computed is None:
        return (value.shape, value.dtype, value.device)
    if isinstance(value, Tensor):
        plain = _plain(value)
        strides = plain.stride() if plain.layout is torch.strided else ()
        flags = plain.is_conj(), plain.is_neg(), plain.is_cuda
        return (plain.shape, strides, plain.dtype, flags, type(value))
    if isinstance(value, list | tuple):
        return (type(value), *map(_cache_key, value))
    if isinstance(value, dict):
        return (dict, *((name, _cache_key(item)) for name, item in sorted(value.items())))
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    return (type(value), value)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.streams if _is_jet(tensor) else tensor


def _shared_storages(tensors: list[Tensor]) -> tuple[tuple[int, int, int | torch.SymInt], ...]:
    """Return (index, source, offset) of each tensor that shares the storage of an earlier one.

    ``source`` is the index of the first tensor in that storage, ``offset`` the distance between
    both in entries.
    """
    first_tensors: dict[int, tuple[int, int | torch.SymInt]] = {}
    sharings = []
    for index, tensor in enumerate(tensors):
        storage = storage_id(tensor)
        if storage is None:
            continue
        begin = _plain(tensor).storage_offset()
        source, start = first_tensors.setdefault(storage, (index, begin))
        if source != index:
            sharings.append((index, source, begin - start))
    return tuple(sharings)


@without_dispatch_modes()
def _torch_layouts(
    function: Function, args: Args, kwargs: Named, tensors: list[Tensor]
) -> tuple[Layout, ...]:
    """Call the function on the primals, and return the layout of every tensor in its result."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices):
        result = function(*replace_tensors(args, _primal), **replace_tensors(kwargs, _primal))
    sources = {storage_id(tensor): n for n, tensor in reversed(list(enumerate(tensors)))}
    sources.pop(None, None)
    layouts = []
    for tensor in iter_tensors(result):
        source = sources.get(storage_id(tensor))
        start = 0 if source is None else _primal(tensors[source]).storage_offset()
        layouts.append(Layout(tensor.stride(), source, tensor.storage_offset() - start))
    return tuple(layouts)


def _primal(tensor: Tensor) -> Tensor:
    """Return the primal of a jet, and other tensors unchanged.

    For a deferred jet, return zeros of its shape: computing its primal would end the deferral.
    """
    if not _is_jet(tensor):
        return tensor
    if tensor.streams_if_computed is None:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.primal


def _match_layouts(result: object, layouts: Iterator[Layout], tensors: list[Tensor]) -> object:
    """Return a rule's result with each jet in the layout of the corresponding tensor of torch's
    result.

    Args:
        layouts: the layouts of the tensors in torch's result, in their order.
        tensors: the tensor arguments of the call, to which `Layout.source` refers.
    """
    if isinstance(result, Tensor):
        layout = next(layouts)
        return _match_layout(result, layout, tensors) if _is_jet(result) else result
    if isinstance(result, list | tuple):
        items = [_match_layouts(item, layouts, tensors) for item in result]
        is_named = hasattr(result, "_fields")  # a named tuple takes its fields one by one
        return type(result)(*(items if is_named else [items]))  # type: ignore[arg-type]
    return result


def _match_layout(jet: Jet, layout: Layout, tensors: list[Tensor]) -> Jet:
    """Return a jet with the strides of torch's result, as a view of the argument with which torch's
    result shares its storage."""
    if any(jet is tensor for tensor in tensors):
        return jet
    if jet.streams_if_computed is None and layout.source is None:
        contiguous = torch.empty(jet.shape, device="meta").stride()
        if _same_strides(jet.shape, contiguous, layout.strides):
            jet.make_contiguous()
            return jet
    if layout.source is not None:
        source = tensors[layout.source]
        if (
            not _is_jet(source)
            or source.dtype != jet.dtype
            or storage_id(jet) == storage_id(source)
        ):
            return jet
        # Torch returned a view of the argument, and the rule a copy: the same view of the
        # argument's stack replaces the copy, so that a write into either changes both.
        stack = source.streams
        shape, strides = (len(stack), *jet.shape), (stack.stride(0), *layout.strides)
        return jet.with_streams(
            stack.as_strided(shape, strides, stack.storage_offset() + layout.offset)
        )
    streams, storage = jet.streams, storage_id(jet)
    is_shared = storage is not None and any(storage_id(tensor) == storage for tensor in tensors)
    if is_shared or not _same_strides(streams.shape[1:], streams.stride()[1:], layout.strides):
        return jet.with_streams(stack_with_strides(streams, layout.strides, copy=is_shared))
    return jet


def _same_strides(shape: torch.Size, strides: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether strides are equal in all dimensions larger than 1; True for an empty tensor,
    whose strides do not matter."""
    if 0 in shape:
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, expected, strict=True))


def stack_with_strides(streams: Tensor, strides: tuple[int, ...], copy: bool = False) -> Tensor:
    """Return the stack ``[S, ...]`` with every stream in ``strides``.

    Args:
        streams: the stack.
        strides: strides of one stream; entries overlap only where a stride is 0.
        copy: whether to use a new storage in any case.
    """
    shape = streams.shape
    for dim, (size, stride) in enumerate(zip(shape[1:], strides, strict=True), start=1):
        if stride == 0 and size > 1:  # expanded
            streams = streams.narrow(dim, 0, 1)
    # Dense strides, whatever the order of dimensions: a contiguous copy with the largest stride
    # first, permuted back.
    order = sorted(range(1, streams.ndim), key=lambda dim: -strides[dim - 1])
    dense = streams.permute(0, *order)
    dense = dense.clone(memory_format=torch.contiguous_format) if copy else dense.contiguous()
    inverse_order = sorted(range(streams.ndim), key=(0, *order).__getitem__)
    stack = dense.permute(inverse_order).expand(shape)
    if transformed() or _same_strides(shape[1:], stack.stride()[1:], strides):
        return stack
    # Strides with gaps, such as those of a slice: scatter the entries into zeros, an operation that
    # autograd records.
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape[1:], strides, strict=True))
    geometry = (shape, (extent, *strides))
    storage = streams.new_zeros(shape[0], extent)
    return storage.as_strided_scatter(streams, *geometry).as_strided(*geometry)


# Functions whose results in torch may be strided, or views, though all arguments are contiguous,
# while the results of their rules are contiguous and new.
_STRIDED_RESULTS = frozenset(
    [
        *spellings("to", "rot90", "triangular_solve", "orgqr"),
        *(torch.nn.functional.scaled_dot_product_attention, torch.einsum, torch.stft),
        *(torch.Tensor.stft, torch.Tensor.unfold),
        *(torch.linalg.solve, torch.linalg.solve_ex, torch.linalg.householder_product),
    ]
)
