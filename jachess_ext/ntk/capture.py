"""Capturing a block of samples: one forward pass, one backward pass an output, and from these what
every parameter contributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..smoothness.modes import in_mode
from .calls import contributions
from .chains import unchained
from .contributions import Contribution, Dense, add_up
from .outputs import OutputMap
from .recorder import Layout, Recorded, Recorder, owners_of
from .samples import Batch, Samples
from .separation import Separation, require_same_values

Owners = Mapping[nn.Module, Mapping[str, str]]


@dataclass
class Watched:
    """The chosen parameters and how each is covered.

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
        """id -> name of the parameters that are recorded."""
        return {id(p): name for name, p in self.parameters.items() if name not in self.fallback}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.parameters.items()}

    def active_local(self) -> dict[nn.Module, dict[str, str]]:
        """``local`` without parameters that fell back."""
        kept = {
            module: {key: name for key, name in roles.items() if name not in self.fallback}
            for module, roles in self.local.items()
        }
        return {module: roles for module, roles in kept.items() if roles}


def learn_layout(watched: Watched, outputs: OutputMap, samples: Samples) -> Layout:
    """A pass over one sample: how calls lay out samples, and which parameters need other means.

    ``watched.local`` and ``watched.fallback`` are filled.
    """
    owners = owners_of(watched.model, watched.covered)
    layout = _learning_pass(watched, outputs, samples, owners)
    if _sort_unknown(watched, layout, owners):
        layout = _learning_pass(watched, outputs, samples, owners)
        _sort_unknown(watched, layout, {})
    return layout


def _learning_pass(
    watched: Watched, outputs: OutputMap, samples: Samples, owners: Owners
) -> Layout:
    layout = Layout()
    local = watched.active_local()
    recorder = Recorder(watched.covered, 1, layout, local, owners=owners, learn=True)
    with evaluating(watched.model), torch.no_grad(), recorder:
        outputs(samples.rows([0]))
    watched.fallback.update(recorder.unbatched)
    return layout


def _sort_unknown(watched: Watched, layout: Layout, owners: Owners) -> bool:
    """Give parameters of unknown calls to their childless module, or to the fallback.

    Returns whether a module was added.
    """
    added = False
    for name, places in layout.unknown.items():
        place = next(iter(places)) if len(places) == 1 else None
        if place is not None and name in owners.get(place, {}).values():
            watched.local[place] = owners[place]
            added = True
        else:
            watched.fallback[name] = "it is used in a call that is not covered"
    return added


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, running batch statistics) and gradients, for a while."""
    with in_mode(model, training=False), torch.inference_mode(False), torch.enable_grad():
        yield


def watched_forward(
    watched: Watched,
    outputs: OutputMap,
    layout: Layout,
    batch: Batch,
    count: int,
    inputs_only: bool = False,
) -> tuple[Tensor, list[Recorded], dict[str, str]]:
    """Run f over ``count`` samples: f, [n, C] with its graph, the calls, and `Recorder.unbatched`.

    ``inputs_only``: the backward passes will ask for the calls' cotangents, not for gradients of
    parameters.

    Raises:
        ValueError: f is not finite or needs no parameter.
    """
    local = watched.active_local()
    recorder = Recorder(watched.covered, count, layout, local, inputs_only=inputs_only)
    with recorder:
        f = outputs(batch)
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
    return f, recorder.calls, recorder.unbatched


def capture(
    watched: Watched, outputs: OutputMap, layout: Layout, samples: Samples, rows: list[int]
) -> dict[str, Contribution]:
    """What every chosen parameter contributes for these samples.

    Raises:
        RuntimeError: samples depend on one another; a parameter is used in a new way.
    """
    with evaluating(watched.model):
        batch = samples.rows(rows)
        f, calls, unbatched = watched_forward(
            watched, outputs, layout, batch, len(rows), inputs_only=True
        )
        if unbatched:
            name, reason = next(iter(unbatched.items()))
            raise RuntimeError(
                f"parameter {name!r}: {reason}, which the first samples did not show; "
                "method='per_sample' takes exact gradients sample by sample"
            )
        first = samples.name not in watched.separate and len(rows) > 1
        if first:
            require_same_values(outputs, samples, rows, f.detach())
        found = collect(watched, f, calls, check=first)
        if first:
            watched.separate.add(samples.name)
        del f, calls
        return found | per_sample(watched, outputs, samples, rows)


def collect(
    watched: Watched, f: Tensor, calls: list[Recorded], *, check: bool
) -> dict[str, Contribution]:
    """One backward pass an output, to the recorded calls; then their contributions.

    Args:
        check: one more pass shows whether samples depend on one another.

    Raises:
        RuntimeError: they do.
    """
    count, outputs = f.shape
    store: list[list[Tensor | None]] = [[] for _ in calls]
    edges = [recorded.edge for recorded in calls]
    separation = Separation(f, edges) if check and calls else None
    if separation is not None:
        one = torch.ones_like(f[:, 0])
        separation.add(-one, separation.differentiate(one))
    for c in range(outputs if calls else 0):
        cotangents = torch.autograd.grad(
            f[:, c].sum(),
            edges,
            retain_graph=separation is not None or c + 1 < outputs,
            allow_unused=True,
        )
        if separation is not None:
            separation.add(separation.weights[:, c], cotangents)
        for kept, cotangent in zip(store, cotangents, strict=True):
            kept.append(cotangent)
    if separation is not None:
        separation.require()
    return contributions_of(watched, calls, store, count)


def contributions_of(
    watched: Watched, calls: list[Recorded], store: list[list[Tensor | None]], count: int
) -> dict[str, Contribution]:
    """Contribution of every covered parameter, from the calls and their outputs' cotangents.

    Args:
        store: for each call its C cotangents, emptied on the way; None where there is none.
        count: of samples.
    """
    parts: dict[str, list[Contribution]] = {}
    shapes = watched.shapes
    for recorded, kept in zip(calls, store, strict=True):
        stacked = _stacked(kept)
        kept.clear()
        if stacked is None:
            continue
        call = recorded.call
        if call.kind == "chain":
            call, stacked = unchained(call, stacked)
        for name, part in contributions(call, stacked, shapes, count).items():
            parts.setdefault(name, []).append(part)
    return {name: add_up(found, shapes[name]) for name, found in parts.items()}


def _stacked(cotangents: list[Tensor | None]) -> Tensor | None:
    """[C, ...]; None where no output depends on the call."""
    some = next((c for c in cotangents if c is not None), None)
    if some is None:
        return None
    if len(cotangents) == 1:
        return some[None]
    return torch.stack([torch.zeros_like(some) if c is None else c for c in cotangents])


def per_sample(
    watched: Watched, outputs: OutputMap, samples: Samples, rows: list[int]
) -> dict[str, Contribution]:
    """Exact gradients of the parameters that are not covered, one sample and output at a time."""
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
            found = torch.autograd.grad(
                value, parameters, retain_graph=c + 1 < len(f), materialize_grads=True
            )
            for kept, gradient in zip(gradients, found, strict=True):
                kept[-1].append(gradient.flatten())
    stacked = (torch.stack([torch.stack(sample) for sample in kept], 1) for kept in gradients)
    return {name: Dense(gradient) for name, gradient in zip(names, stacked, strict=True)}
