"""On a GPU the jets of unmodified models, and their gradients, are the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import jachess_ext as jx

from .zoo import FAMILIES, build_case

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
ALL = [(name, kind) for name, family in FAMILIES.items() for kind in family.attentions]


def _jets(name: str, attention: str, device: str) -> list[Tensor]:
    """Every layer's streams at the real tokens, and the gradients of their squares, float64."""
    case = build_case(name, attention, padding="right")
    case.model.to(device)
    case.x, case.directions = case.x.to(device), case.directions.to(device)
    case.extra = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.extra.items()}
    jets = jx.jet(case.hidden_states, case.x, case.directions)[1:]
    streams = [jet.streams[:, case.mask.to(device)] for jet in jets]
    torch.stack([s.square().sum() for s in streams]).sum().backward()
    gradients = [p.grad.cpu() for p in case.model.parameters() if p.grad is not None]
    return [*(s.detach().cpu() for s in streams), *gradients]


@pytest.mark.parametrize("name, attention", ALL)
def test_jets_are_the_cpus(name: str, attention: str) -> None:
    """To float32's precision, in which models compute some norms and masks whatever their dtype;
    and to 1e-13 of the largest entry of all, since a softmax makes the keys' bias's gradient 0."""
    expected, found = (_jets(name, attention, device) for device in ("cpu", DEVICE))
    assert len(found) == len(expected) > 4
    largest = max(float(other.abs().max()) for other in expected)
    for one, other in zip(found, expected, strict=True):
        floor = 1e-5 * float(other.abs().max()) + 1e-13 * largest
        torch.testing.assert_close(one, other, rtol=1e-5, atol=floor)
