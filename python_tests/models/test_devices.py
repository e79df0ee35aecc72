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


def _jets(name: str, attention: str, device: str) -> dict[str, Tensor]:
    """Every layer's streams at the real tokens, and the gradients of their squares, float64."""
    case = build_case(name, attention, padding="right")
    case.model.to(device)
    case.x, case.directions = case.x.to(device), case.directions.to(device)
    case.extra = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.extra.items()}
    jets = jx.jet(case.hidden_states, case.x, case.directions)[1:]
    streams = [jet.streams[:, case.mask.to(device)] for jet in jets]
    torch.stack([s.square().sum() for s in streams]).sum().backward()
    found = {f"layer {n}": s.detach().cpu() for n, s in enumerate(streams)}
    gradients = {n: p.grad.cpu() for n, p in case.model.named_parameters() if p.grad is not None}
    return found | gradients


@pytest.mark.parametrize("name, attention", ALL)
def test_jets_are_the_cpus(name: str, attention: str) -> None:
    """To float32's precision, in which models compute some norms and masks whatever their dtype.

    A bias of the keys has the gradient 0, since a softmax takes no notice of it: what is left of
    its sums is held against the largest gradient of all.
    """
    expected, found = (_jets(name, attention, device) for device in ("cpu", DEVICE))
    assert found.keys() == expected.keys() and len(found) > 4
    largest = max(float(other.abs().max()) for other in expected.values())
    for part, other in expected.items():
        nothing = part.endswith(("key.bias", "key_proj.bias", "k_proj.bias", "k_lin.bias"))
        floor = 1e-5 * (largest if nothing else float(other.abs().max()))
        torch.testing.assert_close(found[part], other, rtol=1e-5, atol=floor, msg=part)
