"""Calls by which the host reads a tensor's values, and CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from jachess_ext import graphs
from jachess_ext.ops import library

# What C++ calls is seen as an operator alone; a method that reads the memory of a tensor on the
# CPU, as a function alone.
OPERATORS = (
    *("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "allclose"),
    *("masked_select", "_unique2", "unique_dim", "lift_fresh", "bincount"),
)
METHODS = ("tolist", "cpu", "numpy", "__array__")


class _Operators(TorchDispatchMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        masks = args[1] if name.startswith("index") and len(args) > 1 else None
        if isinstance(masks, list | tuple):  # an index of booleans asks how many are true
            name += " by booleans" * any(m is not None and m.dtype == torch.bool for m in masks)
        if name in OPERATORS or "by booleans" in name:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in METHODS and func is getattr(Tensor, name, None):
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


class HostReads:
    """Note the calls for which the host would wait for a GPU, and which no CUDA graph captures.

    Also copies of the host's numbers to a device (`torch.tensor`, an operator ``lift_fresh``).

    Attributes:
        reads: the calls' names, in order.
    """

    def __init__(self) -> None:
        self.reads: list[str] = []
        self._modes = ExitStack()

    def __enter__(self) -> HostReads:
        self._modes.enter_context(_Operators(self.reads))
        self._modes.enter_context(_Methods(self.reads))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()


class Rerun:
    """Stands in for a graph: a replay runs the function, and writes where the first run wrote.

    Args:
        parameters: whose gradients it writes, too.
    """

    def __init__(self, run: Callable[[], list[Tensor]], parameters: Sequence[Tensor]) -> None:
        self.run, self.results, self.parameters = run, run(), parameters
        self.gradients = [parameter.grad for parameter in parameters]
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        if self.replays == 1:  # a capture runs nothing: what it ran here is the first replay
            return
        for result, value in zip(self.results, self.run(), strict=True):
            result.copy_(value)
        for parameter, memory in zip(self.parameters, self.gradients, strict=True):
            if memory is not None:
                memory.copy_(parameter.grad)


def simulate_graphs(
    monkeypatch: pytest.MonkeyPatch, parameters: Sequence[Tensor] = ()
) -> list[str]:
    """Have `graphed` capture and replay on the CPU; return the host's reads meanwhile, a list."""
    reads: list[str] = []

    def capture(run: Callable[[], list[Tensor]]) -> tuple[Rerun, list[Tensor]]:
        def watched() -> list[Tensor]:
            with monkeypatch.context() as patch, HostReads() as host:
                patch.setattr(library, "capturing", lambda: True)
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                results = run()
            reads.extend(host.reads)
            return results

        graph = Rerun(watched, parameters)
        return graph, graph.results

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "side_stream", nullcontext)
    monkeypatch.setattr(graphs, "on_gpu", lambda leaves: True)
    return reads
