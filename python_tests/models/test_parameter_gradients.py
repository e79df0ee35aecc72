"""The backward of a jet pass: gradients of R with respect to the model's parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from . import oracles
from .penalty import penalty_of
from .zoo import FAMILIES, Case, build_case

CASES = [
    (name, family.attentions[number % len(family.attentions)])
    for number, (name, family) in enumerate(FAMILIES.items())
]
"""Each family with one form of attention, of which the rules are the same in all."""
Displacements = list[tuple[nn.Parameter, Tensor]]


def _everywhere(parameters: list[nn.Parameter]) -> Displacements:
    return [(p, torch.randn_like(p)) for p in parameters]


def _one_tensor(parameters: list[nn.Parameter]) -> Displacements:
    chosen = parameters[int(torch.randint(len(parameters), ()))]
    return [(chosen, torch.randn_like(chosen))]


def _crosses(case: Case, displaced: Displacements, distance: float) -> bool:
    """Whether a ReLU changes side when the parameters are moved as far as the differences do."""

    def pattern(s: float) -> list[Tensor]:
        with torch.no_grad(), oracles.recorded_kinks() as patterns:
            for parameter, displacement in displaced:
                parameter.add_(s * displacement)
            case.hidden_states(case.x)
            for parameter, displacement in displaced:
                parameter.sub_(s * displacement)
        return patterns

    here = pattern(0.0)
    ends = (pattern(distance), pattern(-distance))
    return any(not torch.equal(a, b) for end in ends for a, b in zip(here, end, strict=True))


def _displacement(
    case: Case, draw: Callable[[list[nn.Parameter]], Displacements], step: float
) -> Displacements:
    """A displacement that leaves every ReLU on its side."""
    used = [p for p in case.model.parameters() if p.grad is not None]
    for _ in range(50):
        displaced = draw(used)
        if not case.family.kinked or not _crosses(case, displaced, 4 * step):
            return displaced
    raise AssertionError("every displacement steps over a kink: lower the step")


@pytest.mark.parametrize("name, attention", CASES)
def test_gradients_of_the_penalty(name: str, attention: str) -> None:
    with oracles.Float64Casts():
        padding = "right" if attention == "eager" else "left"
        case = build_case(name, attention, padding=padding)
        penalty_of(case).backward()
        gradients = {p: p.grad for p in case.model.parameters() if p.grad is not None}
        assert gradients
        scale = max(gradient.abs().max().item() for gradient in gradients.values())
        step = 1e-6 if case.family.kinked else 1e-4
        torch.manual_seed(3)
        for kind in (_everywhere, _one_tensor):
            displaced = _displacement(case, kind, step)
            expected = oracles.parameter_difference(lambda: penalty_of(case), displaced, step)
            actual = sum((gradients[p] * d).sum().item() for p, d in displaced)
            size = max(abs(expected), 1e-2 * scale)
            message = f"{kind.__name__}: {actual:.10g} against {expected:.10g}"
            assert abs(actual - expected) < 1e-5 * size, message


def test_parameters_without_influence_get_no_gradient() -> None:
    """Word embeddings are bypassed by inputs_embeds; BERT's pooler is behind every layer."""
    case = build_case("bert")
    penalty_of(case).backward()
    without = {name for name, p in case.model.named_parameters() if p.grad is None}
    assert without == {
        "embeddings.word_embeddings.weight",
        "pooler.dense.weight",
        "pooler.dense.bias",
    }
