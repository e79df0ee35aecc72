"""Take per-sample gradients of a block of samples from its recorded calls.

A block takes one forward pass, watched call by call (`Recorder`), and one backward pass an output,
to the calls' outputs.  Parameters of calls that are not covered get exact per-sample gradients
instead; `independence` and `completeness` check what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..models import in_mode
from .calls import CONTRIBUTE, Call, unchained
from .contract import Contribution, Dense, add_up, as_real
from .independence import Separation, apart, compare_companies, require_same_values, shuffled
from .outputs import Batch, OutputMap, Samples, require_outputs
from .recorder import Recorder, SampleLayout, owners_of


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
        active = {
            module: {key: name for key, name in roles.items() if name not in self.fallback}
            for module, roles in self.local.items()
        }
        return {module: roles for module, roles in active.items() if roles}


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


def learn_layout(watched: Watched, outputs: OutputMap, samples: Samples) -> SampleLayout:
    """Learn from a pass over one sample how calls lay out samples, and which parameters need other
    means.

    ``watched.local`` and ``watched.fallback`` are filled.
    """
    owners = owners_of(watched.model, watched.covered)
    # The first pass finds the modules that are to be differentiated as a whole; the second, with
    # these, learns the layout, and what it does not know either falls back.
    for candidates in (owners, {}):
        layout, added = SampleLayout(), False
        recorder = Recorder(
            watched.covered, 1, layout, watched.active_local(), owners=owners, learn=True
        )
        with evaluating(watched.model), torch.no_grad(), recorder:
            outputs(samples.rows([0]))
        watched.fallback.update(recorder.unbatched)
        for name, places in layout.unknown.items():
            place = next(iter(places)) if len(places) == 1 else None
            if place is not None and name in candidates.get(place, {}).values():
                watched.local[place] = candidates[place]
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


def watched_forward(
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
    require_outputs(f, count)
    return f, recorder.calls, recorder.unbatched


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
        f, calls, unbatched = watched_forward(
            watched, outputs, side.layout, samples.rows(rows), len(rows), inputs_only=True
        )
        if unbatched:
            name, reason = next(iter(unbatched.items()))
            raise RuntimeError(
                f"parameter {name!r}: {reason}, which the first samples did not show; "
                "method='per_sample' takes exact gradients sample by sample"
            )
        if side.values is not None:
            require_same_values(rows, f.detach(), side.values[rows])
        elif first:
            count = len(rows)
            compare_companies(outputs, samples, f.detach(), [shuffled(count), apart(count)])
        needed = first and len(rows) > 1 and (calls or watched.fallback)
        separation = Separation(f) if needed else None
        parts = _collect(watched, f, calls, separation)
        del f, calls
        # A nonzero sum may be rounding: only a graph of its own can decide, and the first one was
        # freed by `_collect`.
        if separation is not None and (suspects := separation.suspects()):
            f, calls, _ = watched_forward(
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
        # Summing over samples gives all their cotangents in one pass, since f_n depends on sample n
        # alone; that this holds is what `separation` checks.
        cotangents = torch.autograd.grad(
            f[:, c].sum(), edges, retain_graph=c + 1 < outputs, allow_unused=True
        )
        if separation is not None:
            separation.add(separation.weights[:, c], cotangents)
        for of_call, cotangent in zip(store, cotangents, strict=True):
            of_call.append(cotangent)
    return contributions(watched, calls, store, count)


def contributions(
    watched: Watched, calls: list[Call], store: list[list[Tensor | None]], count: int
) -> dict[str, Contribution]:
    """Return the contribution of every covered parameter, from cotangents of calls' outputs.

    Args:
        store: for each call its C cotangents, emptied on the way; None where there is none.
        count: of samples.
    """
    parts: dict[str, list[Contribution]] = {}
    shapes = watched.shapes
    for call, cotangents in zip(calls, store, strict=True):
        some = next((c for c in cotangents if c is not None), None)
        if some is None:
            continue
        stacked = some[None]
        if len(cotangents) > 1:
            stacked = torch.stack([torch.zeros_like(some) if c is None else c for c in cotangents])
        cotangents.clear()
        if call.kind == "chain":
            call, stacked = unchained(call, stacked)
        try:
            of_call = CONTRIBUTE[call.kind](call, stacked, shapes, count)
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
        for of_parameter in gradients:
            of_parameter.append([])
        for c, value in enumerate(f):
            whole = torch.autograd.grad(
                value, parameters, retain_graph=c + 1 < len(f), materialize_grads=True
            )
            for of_parameter, gradient in zip(gradients, whole, strict=True):
                of_parameter[-1].append(as_real(gradient).flatten())
    stacked = (torch.stack([torch.stack(rows) for rows in part], 1) for part in gradients)
    return {name: Dense(gradient) for name, gradient in zip(names, stacked, strict=True)}
