"""A batch as rows: how many samples it holds, and the batch of some of them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Batch = Mapping[str, Any] | Tensor
_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")


@dataclass(frozen=True)
class Samples:
    """The samples of one batch.

    Attributes:
        batch: a dict as a collator yields it, or one tensor that is handed to the model as it is.
        count: the number of samples N.
        name: "batch" or "other", for messages.
    """

    batch: Batch
    count: int
    name: str = "batch"

    @classmethod
    def of(cls, batch: Any, name: str = "batch") -> Samples:
        """Find N, the length of the inputs' first dimension.

        Raises:
            TypeError: neither a dict nor a tensor.
            ValueError: no inputs, no samples, or tensors that disagree on how many there are.
        """
        if isinstance(batch, Tensor):
            return cls(batch, _at_least_one(batch, name), name)
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"{name} must be a dict of tensors as a collator yields it, or one tensor, not "
                f"{type(batch).__name__}"
            )
        tensors = {key: v for key, v in batch.items() if isinstance(v, Tensor) and v.dim()}
        first = next((key for key in _INPUTS if key in tensors), next(iter(tensors), None))
        if first is None:
            raise ValueError(
                f"{name} holds no tensor of inputs; expected input_ids or inputs_embeds (or "
                "another tensor with one row a sample)"
            )
        count = _at_least_one(tensors[first], name)
        for key, value in tensors.items():
            if value.shape[0] not in (count, 1):
                raise ValueError(
                    f"{name}[{key!r}] has {value.shape[0]} rows, but {first!r} has {count}; "
                    "expected one row a sample"
                )
        return cls(batch, count, name)

    def rows(self, rows: Sequence[int]) -> Batch:
        """The batch of these samples, in this order; what is not a row a sample stays as it is."""
        if list(rows) == list(range(self.count)):
            return self.batch
        if isinstance(self.batch, Tensor):
            return self._take(self.batch, rows)
        return {key: self._take(value, rows) for key, value in self.batch.items()}

    def _take(self, value: Any, rows: Sequence[int]) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != self.count:
            return value
        return value.index_select(0, torch.tensor(list(rows), device=value.device))


def _at_least_one(inputs: Tensor, name: str) -> int:
    if not inputs.dim() or not inputs.shape[0]:
        raise ValueError(
            f"{name} is empty (its inputs have shape {list(inputs.shape)}); "
            "expected at least one sample"
        )
    return inputs.shape[0]
