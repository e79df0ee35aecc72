"""Compute per-sample gradients of a block of samples from its recorded calls.

A block takes one forward pass, recorded call by call (`Recorder`), and one backward pass for each
output of the model, down to the calls' outputs.  Parameters used in calls that are not covered get
exact per-sample gradients instead; `independence` and `completeness` check the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..models import in_mode
from .calls import CONTRIBUTION_RULES, Call, chain_start
from .contract import Contribution, Dense, add_up, as_real
from .independence import (
    Separation,
    compare_batch_compositions,
    permuted,
    require_same_values,
    spaced_subset,
)
from .outputs import Batch, OutputMap, Samples, require_outputs
from .recorder import Recorder, SampleLayout, owners_of


@dataclass
class Coverage:
    """The chosen parameters of a model, and how the gradients of each are obtained.

    Attributes:
        parameters: the chosen parameters by name.
        local: childless modules that are differentiated as a whole -> their chosen parameters (name
            within the module -> full name).
        fallback: parameter name -> why its exact gradients are computed one sample at a time.
        verified: names of the batches whose first block has passed the independence checks.
    """

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    local: dict[nn.Module, Mapping[str, str]] = field(default_factory=dict)
    fallback: dict[str, str] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)

    @property
    def covered(self) -> dict[int, str]:
        """Mapping id -> name of the parameters whose calls are recorded."""
        return {id(p): name for name, p in self.parameters.items() if name not in self.fallback}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.parameters.items()}

    def active_local(self) -> dict[nn.Module, dict[str, str]]:
        """Return ``local`` without the parameters of ``fallback``."""
        active = {
            module: {key: name for key, name in roles.items() if name not in self.fallback}
            for module, roles in self.local.items()
        }
        return {module: roles for module, roles in active.items() if roles}


@dataclass
class Probe:
    """Reference gradients and contributions of one side (batch) of the kernel; see `completeness`.

    Attributes:
        samples: all samples of the side.
        layout: layout of samples in the outputs of calls.
        weights: w, [N, C]; zero for samples that were not probed.
        gradients: parameter name -> gradient g of Σ_{n,c} w_{n,c} f_{n,c}.
        contributions: the probed samples' contributions to the single output Σ_c w_{n,c} f_{n,c}.
        activation_bytes: bytes that the forward pass saves for one sample's backward pass.
        noise: norm below which a gradient may be round-off alone (the gradient of a bias of
            attention keys is zero in exact arithmetic).
        values: outputs f, [N, C], from batches with other samples together than the blocks; None if
            one block holds all samples.
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
    def num_outputs(self) -> int:
        return self.weights.shape[1]

    def capture_bytes(self) -> int:
        """Return the bytes that the contributions of one sample take, over all outputs and
        parameters: half of the bytes of the two probed samples, rounded up."""
        return -(-sum(term.nbytes(self.num_outputs) for term in self.contributions.values()) // 2)


def learn_layout(coverage: Coverage, outputs: OutputMap, samples: Samples) -> SampleLayout:
    """Return the layout of samples in the outputs of calls, from passes over one sample.

    Parameters used in calls that are not covered are added to ``coverage.local`` (if they are used
    in one childless module only) or to ``coverage.fallback``.
    """
    owners = owners_of(coverage.model, coverage.covered)
    # The first pass finds the modules to differentiate as a whole; the second records the layout
    # with these modules, and parameters that it still does not cover fall back.
    for candidates in (owners, {}):
        layout, added = SampleLayout(), False
        recorder = Recorder(
            coverage.covered, 1, layout, coverage.active_local(), owners=owners, should_learn=True
        )
        with evaluation_mode(coverage.model), torch.no_grad(), recorder:
            outputs(samples.rows([0]))
        coverage.fallback.update(recorder.unbatched)
        for name, modules in layout.unknown.items():
            module = next(iter(modules)) if len(modules) == 1 else None
            if module is not None and name in candidates.get(module, {}).values():
                coverage.local[module] = candidates[module]
                added = True
            else:
                coverage.fallback[name] = "it is used in a call that is not covered"
        if not added:
            break
    return layout


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode (no dropout, running statistics) with gradients enabled
    within the context."""
    with in_mode(model, training=False), torch.inference_mode(False), torch.enable_grad():
        yield


def recorded_forward(
    coverage: Coverage,
    outputs: OutputMap,
    layout: SampleLayout,
    batch: Batch,
    count: int,
    inputs_only: bool = False,
) -> tuple[Tensor, list[Call], dict[str, str]]:
    """Run the model over ``count`` samples and record its calls.

    Args:
        inputs_only: the backward passes will compute no parameter gradients, except of the
            parameters in ``coverage.fallback``.

    Returns:
        f, [n, C], with its graph; the recorded calls; and `Recorder.unbatched`.

    Raises:
        ValueError: f is not finite or depends on no parameter.
    """
    local = coverage.active_local()
    fallback_ids = {id(coverage.parameters[name]) for name in coverage.fallback}
    recorder = Recorder(
        coverage.covered, count, layout, local, inputs_only=inputs_only, fallback_ids=fallback_ids
    )
    with recorder:
        f = outputs(batch)
    require_outputs(f, count)
    return f, recorder.calls, recorder.unbatched


def capture(
    coverage: Coverage, outputs: OutputMap, side: Probe, rows: list[int]
) -> dict[str, Contribution]:
    """Return the contribution of every chosen parameter, by name, for a block of samples.

    Args:
        rows: indices of the block's samples in ``side``.

    Raises:
        RuntimeError: samples depend on one another; a parameter is used in another way than for the
            probed samples.
    """
    samples = side.samples
    is_first = samples.name not in coverage.verified and samples.count > 1
    with evaluation_mode(coverage.model):
        f, calls, unbatched = recorded_forward(
            coverage, outputs, side.layout, samples.rows(rows), len(rows), inputs_only=True
        )
        if unbatched:
            name, reason = next(iter(unbatched.items()))
            raise RuntimeError(
                f"parameter {name!r}: {reason}, which the first samples did not show; "
                "method='per_sample' takes exact gradients sample by sample"
            )
        if side.values is not None:
            require_same_values(rows, f.detach(), side.values[rows])
        elif is_first:
            count = len(rows)
            compare_batch_compositions(
                outputs, samples, f.detach(), [permuted(count), spaced_subset(count)]
            )
        needs_separation = is_first and len(rows) > 1 and (calls or coverage.fallback)
        separation = Separation(f) if needs_separation else None
        by_name = _collect(coverage, f, calls, separation)
        del f, calls
        # A nonzero sum may be rounding; to decide takes further backward passes, and so a second
        # forward pass, since `_collect` has freed the graph of the first.
        if separation is not None and (suspects := separation.suspects()):
            f, calls, _ = recorded_forward(
                coverage, outputs, side.layout, samples.rows(rows), len(rows), inputs_only=True
            )
            separation.require(f, [call.edge for call in calls], suspects)
            del f, calls
        per_sample = _per_sample(coverage, outputs, samples, rows)
        if separation is not None:
            separation.require_per_sample_gradients(per_sample, side.noise)
        coverage.verified.add(samples.name)
        return by_name | per_sample


def _collect(
    coverage: Coverage, f: Tensor, calls: list[Call], separation: Separation | None
) -> dict[str, Contribution]:
    """Run one backward pass for each output; return the contributions of the recorded calls.

    Args:
        separation: independence check to which the passes' cotangents are added; None: no check.
    """
    count, num_outputs = f.shape
    cotangents_by_call: list[list[Tensor | None]] = [[] for _ in calls]
    edges = [call.edge for call in calls]
    if separation is not None:
        separation.begin(f, edges, {name: coverage.parameters[name] for name in coverage.fallback})
    for c in range(num_outputs if calls else 0):
        # Summing over samples gives the cotangents of all in one pass, provided that f_n depends on
        # sample n alone, which `separation` checks.
        cotangents = torch.autograd.grad(
            f[:, c].sum(), edges, retain_graph=c + 1 < num_outputs, allow_unused=True
        )
        if separation is not None:
            separation.add(separation.weights[:, c], cotangents)
        for cotangents_by_output, cotangent in zip(cotangents_by_call, cotangents, strict=True):
            cotangents_by_output.append(cotangent)
    return contributions(coverage, calls, cotangents_by_call, count)


def contributions(
    coverage: Coverage, calls: list[Call], cotangents_by_call: list[list[Tensor | None]], count: int
) -> dict[str, Contribution]:
    """Return the contribution of every covered parameter, from cotangents of calls' outputs.

    Args:
        cotangents_by_call: C cotangents for each call, None where f_c does not depend on the call;
            the lists are emptied to free memory.
        count: number of samples.
    """
    sums: dict[str, list[Contribution]] = {}
    shapes = coverage.shapes
    for call, cotangents in zip(calls, cotangents_by_call, strict=True):
        like = next((c for c in cotangents if c is not None), None)
        if like is None:
            continue
        stacked = like[None]
        if len(cotangents) > 1:
            stacked = torch.stack([torch.zeros_like(like) if c is None else c for c in cotangents])
        cotangents.clear()
        if call.kind == "chain":
            call, stacked = chain_start(call, stacked)
        try:
            terms = CONTRIBUTION_RULES[call.kind](call, stacked, shapes, count)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if call.kind != "local":
                raise
            reason = f"{type(call.options['module']).__name__} does not run under torch.func.vmap"
            coverage.fallback.update(dict.fromkeys(call.roles.values(), reason))
            continue
        for name, term in terms.items():
            sums.setdefault(name, []).append(term)
    return {name: add_up(terms, shapes[name]) for name, terms in sums.items()}


def _per_sample(
    coverage: Coverage, outputs: OutputMap, samples: Samples, rows: list[int]
) -> dict[str, Contribution]:
    """Return the gradients of the parameters in ``fallback``, computed one sample and one output at
    a time."""
    gradients: dict[str, list[Tensor]] = {name: [] for name in coverage.fallback}
    if not gradients:
        return {}
    parameters = [coverage.parameters[name] for name in gradients]
    for row in rows:
        f = outputs(samples.rows([row]))[0]
        passes = (
            torch.autograd.grad(
                value, parameters, retain_graph=c + 1 < len(f), materialize_grads=True
            )
            for c, value in enumerate(f)
        )
        for name, by_output in zip(gradients, zip(*passes, strict=True), strict=True):
            gradients[name].append(torch.stack([as_real(g).flatten() for g in by_output]))
    return {name: Dense(torch.stack(samples, 1)) for name, samples in gradients.items()}
