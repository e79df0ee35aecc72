"""Every method trains a complex parameter as the pair of its real and imaginary part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from jachess_ext.smoothness.parallel import zero_with_gradients
from jachess_ext.training import METHODS, parse_method
from python_tests.smoothness.tiny_models import classifier

from .runs import trainer
from .test_architectures import TOKENIZER, rows_of

WIDTH = 12


class Filter(nn.Module):
    """Mixes a state [..., d] by complex weights [d, d], stored as they are or as pairs."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        numbers = torch.randn(WIDTH, WIDTH, 2, generator=torch.Generator().manual_seed(1)).double()
        self.weight = nn.Parameter(numbers if pairs else torch.view_as_complex(numbers))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        real, imaginary = torch.view_as_real(weight).unbind(-1)
        return x + 0.3 * (x @ real).tanh() * (x @ imaginary)


def filtered(pairs: bool) -> Any:
    """A classifier whose head reads the filtered state of the first token."""
    model: Any = classifier("bert")
    model.classifier = nn.Sequential(Filter(pairs), model.classifier)
    model.drawn_modules = ()
    return model


STRONG: dict[str, dict[str, Any]] = {
    "l2": {"strength": 0.1},
    "sam": {"rho": 0.5},
    "gradient-norm": {"strength": 0.1},
    "r3f": {"strength": 5.0, "noise": 0.1},
    "tapt": {"tapt_epochs": 1.0},
    "jachess-unlab": {"unlab_every": 1},
}
OWN = ("none", "l2", "sam", "gradient-norm", "r3f", "tapt", "jachess", "jachess-unlab")
OWN += ("l2+placebo", "gradient-norm+placebo")
"""Those that do something of their own with parameters; for the others the tests are slow."""
OTHERS = [*METHODS, "jachess-joint", "corrupt-consistency-joint", "jachess+placebo", "r3f+placebo"]


def weights(folder: Path, name: str, pairs: bool) -> list[Tensor]:
    """Every parameter after two steps, complex ones as pairs."""
    name, _, placebo = name.partition("+")
    method = parse_method(name).replace(**STRONG.get(name, {}))
    made = trainer(
        folder,
        method.replace(placebo=True) if placebo else method,
        model=filtered(pairs),
        data=rows_of("bert"),
        unlabelled=rows_of("bert"),
        options={"processing_class": TOKENIZER, "data_collator": tf.default_data_collator},
        **{"optim": "sgd", "learning_rate": 0.01, "max_steps": 2, "max_grad_norm": 1.0},
    )
    made.train()
    found = [p.detach() for p in made.model.parameters()]
    return [torch.view_as_real(p) if p.is_complex() else p for p in found]


@pytest.mark.parametrize(
    "name",
    [
        *OWN,
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS if name not in OWN),
    ],
)
def test_complex_parameters_train_as_pairs_of_real_numbers(tmp_path: Path, name: str) -> None:
    paired, found = (weights(tmp_path, name, pairs) for pairs in (True, False))
    for a, b in zip(paired, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)


def test_zero_loss_of_complex_parameters() -> None:
    model = filtered(pairs=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    zero = zero_with_gradients(model)
    assert zero is not None and not zero.is_complex()
    zero.backward()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
