"""Every operator on jets, and how it is called: what tests and benchmarks of all operators take.

A new operator adds an entry here, a maker to `ops/random_calls.py`, a test file of its own, and its
kernels to `ops/test_cuda_shim.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jachess_ext import ops


@dataclass(frozen=True)
class Operator:
    """A wrapper of `jachess_ext.ops`, and arguments that are right for it.

    Attributes:
        jets: the arguments [S, *shape].
        parameters: the arguments [n], as long as the jets' last dimension.
        settings: all others but q.
        shape: an example's, behind the streams.
    """

    name: str
    jets: tuple[str, ...] = ("x",)
    parameters: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (3, 5)

    def __call__(self, *tensors: Tensor, q: int, ending: str = "", **settings: Any) -> Any:
        """Call the wrapper, or its reference where `ending` is "_reference".

        Args:
            tensors: the jets, then the parameters; None stands for those that are missing, and
                those that the operator has not are left out.
        """
        names = (*self.jets, *self.parameters)
        arguments = dict.fromkeys(names) | dict(zip(names, tensors, strict=False))
        return getattr(ops, self.name + ending)(**arguments, q=q, **(self.settings | settings))

    def flat(self, *tensors: Tensor, q: int) -> Tensor:
        """Call the wrapper; all results as one tensor."""
        results = self(*tensors, q=q)
        if isinstance(results, Tensor):
            return results
        return torch.cat([result.flatten() for result in results])

    def shapes(self, streams: int) -> list[tuple[int, ...]]:
        """Shapes of an example's jets and parameters."""
        jets = [(streams, *self.shape)] * len(self.jets)
        return [*jets, *([self.shape[-1:]] * len(self.parameters))]

    def arguments(self, tensors: Sequence[Tensor], q: int) -> dict[str, Any]:
        """All arguments by name."""
        named = zip((*self.jets, *self.parameters), tensors, strict=True)
        return {**dict(named), **self.settings, "q": q}


LAYER_NORM: dict[str, Any] = {"parameters": ("weight", "bias"), "settings": {"eps": 1e-5}}
RMS_NORM: dict[str, Any] = {"parameters": ("weight",), "settings": {"eps": 1e-5}}
SUMMED = ("x", "residual")
OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("activation_jet", settings={"kind": "gelu"}),
        Operator("gated_activation_jet", ("g", "u"), settings={"kind": "silu"}),
        Operator("layer_norm_jet", **LAYER_NORM),
        Operator("add_layer_norm_jet", SUMMED, **LAYER_NORM),
        Operator("rms_norm_jet", **RMS_NORM),
        Operator("add_rms_norm_jet", SUMMED, **RMS_NORM),
        Operator("softmax_jet", settings={"masked": True}),
        Operator(
            "attention_jet",
            ("query", "key", "value"),
            settings={"causal": True},
            shape=(1, 2, 3, 4),
        ),
        Operator(
            "jet_mean_squares",
            settings={"mask": torch.ones(3, dtype=torch.bool), "index": torch.tensor([0])},
        ),
    )
}
