"""The base model's norms per token, which λ over layers and the normalisation are made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .estimate import measure_tokens
from .model_pass import padding_mask
from .modes import in_mode
from .parallel import raise_together, ranks_of
from .settings import Randomness, Settings


@dataclass(frozen=True)
class BaseNorms:
    """Mean norm per counted token, float64 on the CPU.

    Attributes:
        jacobian: ``[K]``.
        hessian: ``[K]``, or None without a Hessian term.
        tokens: over how many tokens.
    """

    jacobian: Tensor
    hessian: Tensor | None
    tokens: int

    def state_dict(self) -> dict[str, Any]:
        """As plain numbers, to be stored as JSON."""
        hessian = None if self.hessian is None else self.hessian.tolist()
        return {"jacobian": self.jacobian.tolist(), "hessian": hessian, "tokens": self.tokens}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> BaseNorms:
        """The inverse of `state_dict`."""
        hessian = state["hessian"]
        return cls(
            torch.tensor(state["jacobian"], dtype=torch.float64),
            None if hessian is None else torch.tensor(hessian, dtype=torch.float64),
            int(state["tokens"]),
        )


def measure_base(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    settings: Settings,
    seed: int | None,
) -> BaseNorms:
    """Norms of ``model`` in eval mode, averaged over the tokens of all batches of all ranks.

    Raises:
        ValueError: there is no batch, or a layer's norm is zero or not finite.
    """
    ranks = ranks_of(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if ranks.size > 1:
        batches = list(batches)
        raise_together(ranks, lambda: [padding_mask(batch) for batch in batches], device)
    sums: list[Any] = [0, 0 if settings.second_order else None]
    count = 0
    with torch.no_grad(), in_mode(model, training=False):
        for number, batch in enumerate(batches):
            padding_mask(batch)  # raises where a row has no token
            random = Randomness.from_seed(seed, number, rank=ranks.rank, calibrating=True)
            norms = measure_tokens(model, batch, settings, random)
            for place, values in enumerate((norms.jacobian, norms.hessian)):
                if values is not None:
                    sums[place] = sums[place] + values.sum((-1, -2))
            count += int(norms.tokens.sum())
    if ranks.max(torch.tensor(int(count == 0), device=device)):
        where = f" (rank {ranks.rank} had {count} tokens)" if ranks.size > 1 else ""
        raise ValueError(f"calibrate got no batches{where}; expected at least one")
    count = int(ranks.sum(torch.tensor(count, device=device)))
    means = [None if total is None else (ranks.sum(total) / count).cpu().double() for total in sums]
    for name, mean in zip(("Jacobian", "Hessian"), means, strict=True):
        if mean is not None and not (torch.isfinite(mean) & (mean > 0)).all():
            raise ValueError(
                f"the base model's {name} norms per layer are {mean.tolist()}; expected positive, "
                "finite numbers. A block that is linear in the embeddings has no Hessian: "
                "pass hessian=False or choose other layers"
            )
    assert means[0] is not None
    return BaseNorms(means[0], means[1], count)
