"""`jx.JacHess` within ``torch.compile``: a step is one graph, in which the pass is one node.

Import this file only where a step is compiled: it imports torch._dynamo, which takes seconds.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from ..jet.compiled.closures import Call, pack_call, unpack_call
from ..jet.compiled.reachable import JetGraphError, opaque_to_dynamo, refuse_attribute_writes
from ..jet.compiled.regions import can_trace, raise_error, refuse_captured, return_error
from ..jet.engine.layout import MAX_DIRECTIONS
from ..models import unwrapped
from ..ops.directions import number_on
from .estimators import ForwardPass, Smoothness, measure
from .parallel import ranks_of
from .settings import Randomness, Settings

Batch = Mapping[str, Tensor]
_LOG = logging.getLogger("jachess_ext")
_MAX_FAILURES = 2
"""Number of steps in a row that could not be traced, after which none is tried again."""
_NOT_REPLAYED = (
    "the model draws NumPy's or Python's random numbers, which would be constants of a graph, or "
    f"writes into its buffers between the passes of more than {MAX_DIRECTIONS} directions"
)
_ON_RANKS = "the model is data-parallel, and its ranks read results on the host in each step"


def can_trace_step(model: nn.Module, refusal: str | None) -> bool:
    """Return whether the graph that dynamo traces can contain a step on the model; if not, break
    the graph.

    Args:
        refusal: why the graph cannot contain the step, whatever the model is; None if it can.
    """
    return can_trace(unwrapped(model), refusal or (_ON_RANKS if _is_data_parallel(model) else None))


@opaque_to_dynamo
def move_step_to_device(regulariser: Any) -> None:
    """Make the regulariser's step a tensor, which a graph can count up, when a trace begins."""
    device = next(regulariser.model.parameters()).device
    regulariser.step = number_on(device, regulariser.step)


@opaque_to_dynamo
def _is_data_parallel(model: nn.Module) -> bool:
    return bool(ranks_of(model).groups)


def measure_in_graph(
    model: nn.Module, batch: Batch, settings: Settings, seed: Tensor, step: Tensor
) -> tuple[Smoothness, ForwardPass]:
    """Compute `measure` while dynamo traces; seed and step are int64 scalars on the model's device.

    The forward pass has no blocks, which are jets.
    """
    call = pack_call((unwrapped(model), settings))
    norms, (embeddings, mask), output = _measure_region(call, batch, seed, step)
    raise_error(norms)
    return (
        Smoothness(
            norms["jacobian"],
            norms.get("hessian"),
            norms["jacobian_tokens"],
            norms.get("hessian_tokens"),
            norms["tokens"],
        ),
        ForwardPass(embeddings, mask, [], output, None),
    )


@torch._dynamo.nonstrict_trace
def _measure_region(call: Call, batch: Batch, seed: Tensor, step: Tensor) -> Any:
    """Run `measure` in a region; return the norms that there are by name, embeddings and mask, and
    the model's output."""
    output: Any = ()
    inputs: Any = ()

    def run() -> Any:
        nonlocal inputs, output
        model, settings = unpack_call(call)
        is_repeated = settings.directions > MAX_DIRECTIONS
        before = _host_state(model, is_repeated)
        with refuse_captured(), refuse_attribute_writes(model):
            norms, result = measure(model, batch, settings, Randomness.from_seed(seed, step))
        if _host_state(model, is_repeated) != before:
            raise JetGraphError(_NOT_REPLAYED)
        inputs, output = (result.embeddings, result.mask), result.output
        return {name: value for name, value in vars(norms).items() if value is not None}

    norms = return_error(run, batch)
    return norms, inputs or (seed, step), output


def _host_state(model: nn.Module, with_buffers: bool) -> object:
    """Return the states of Python's and NumPy's generators, and how often buffers were written."""
    versions = [buffer._version for buffer in model.buffers()] if with_buffers else []
    return random.getstate(), repr(np.random.get_state()), versions


class CompiledStep:
    """A compiled step.

    Attributes:
        model: the model of the last eager step, or None before one.

    Args:
        step: function of a batch, seed and step number, int64 scalars; returns an object with the
            attributes loss, model_output and smoothness.
    """

    def __init__(self, step: Callable[[Batch, Tensor, Tensor], Any], backend: str) -> None:
        self._graph = torch.compile(step, backend=backend, fullgraph=True)
        self._traces = self._failures = 0
        self._unreached: list[Tensor] = []
        self.model: nn.Module | None = None

    @property
    def runs_eagerly(self) -> bool:
        """Whether so many steps could not be traced that none is tried again."""
        return self._failures >= _MAX_FAILURES

    def note_eager(self, model: nn.Module, loss: Tensor) -> None:
        """Look at an eager step: which parameters get no gradient from the loss alone."""
        self.model = model
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [following for following, _ in node.next_functions]
        reached = {id(getattr(node, "variable", None)) for node in seen}
        # A reentrant checkpoint hides the parameters that its nodes reach.
        is_hidden = any("CheckpointFunction" in node.name() for node in seen)
        trained = [] if is_hidden else [p for p in model.parameters() if p.requires_grad]
        self._unreached = [p for p in trained if id(p) not in reached]

    def __call__(self, batch: Batch, seed: Tensor, step: Tensor) -> Any:
        """Return the step's result; None if it cannot be traced, so that it has to run eagerly."""
        start, graphs = time.perf_counter(), counters["stats"]["unique_graphs"]
        try:
            out = self._graph(dict(batch), seed, step)
        except TorchDynamoException as error:
            self._failures += 1
            reason = re.search("debug context: (.+)", str(error)) or re.search("(.+)", str(error))
            text = "" if reason is None else reason[1]
            _LOG.warning("JacHess: this step runs eagerly, outside of a graph: %s", text)
            return None
        self._failures = 0
        if counters["stats"]["unique_graphs"] > graphs:
            self._traces += 1
            _log_trace(self._traces, time.perf_counter() - start)
        self._drop_unreached(out)
        return out

    def _drop_unreached(self, out: Any) -> None:
        """Let a backward from the loss alone leave the gradient of parameters that it does not
        reach None, as eagerly, where the graph's backward gives zeros."""
        node: Any = out.loss.grad_fn
        norms = [t for t in (out.loss, *vars(out.smoothness).values()) if t is not None]
        numbers = {tensor.output_nr for tensor in norms if tensor.grad_fn is node}
        unreached = {*map(id, self._unreached)}

        def drop(gradients: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if any(c is not None for n, c in enumerate(cotangents) if n not in numbers):
                return None
            variables = (getattr(n, "variable", None) for n, _ in node.next_functions)
            pairs = zip(gradients, variables, strict=True)
            return tuple(None if id(v) in unreached else g for g, v in pairs)

        if node is not None and unreached:
            node.register_hook(drop)


def _log_trace(number: int, seconds: float) -> None:
    if number == 1:
        _LOG.info("JacHess: tracing the step took %.0f s", seconds)
    elif number == 2:
        _LOG.warning(
            "JacHess: a batch of another shape, or a changed setting: the step was traced once "
            "more, which took %.0f s (said once)",
            seconds,
        )


