"""How many kernels a step of JacHess launches: the host takes longer for each than a GPU.

Counted on the CPU, as calls of operators that compute something.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification

import jachess_ext as jx
from jachess_ext import torch_private
from jachess_ext.ops import sample_directions
from jachess_ext.smoothness.directions import DrawCounter
from jachess_ext.smoothness.estimators import chi_correction

LAUNCHES = 360
"""Of a step of an encoder of 6 layers, of which a plain step makes 259.  190 are of linear layers:
products, biases and their gradients."""


class Launches(TorchDispatchMode):
    """Count the operators that are called, without those that make a view or empty memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        results = func._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in results)
        if not (view or "empty" in name or name == "_unsafe_view"):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    config = BertConfig(
        hidden_size=48,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=192,
        vocab_size=100,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    ids = torch.randint(5, 100, (8, 32))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    return model, batch


def test_number_of_launches_of_a_step(
    encoder: tuple[nn.Module, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = encoder
    reg = jx.JacHess(model, seed=0, normalize=True, weights="uniform")
    reg.calibrate([batch])
    reg(batch)  # copies weights and base norms
    reg.normalize = False
    # Where a mode looks on, nothing is written in place, which is another number of calls.
    monkeypatch.setattr(torch_private, "current_dispatch_modes", list)
    with Launches() as step:
        reg(batch).total.backward()
    assert step.calls.total() <= LAUNCHES, step.calls.most_common()


# ---- layers of one width are one tensor, and others not -----------------------------------------


class Widths(nn.Module):
    """Hidden states of the widths that are asked for, each a function of every token by itself."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(9, 8)
        sizes = zip([8, *widths], widths, strict=False)
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in sizes])

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def states(self, x: Tensor) -> list[Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).sin())
        return states

    def forward(self, input_ids: Tensor, output_hidden_states: bool = True, **_: Any) -> Any:
        return SimpleNamespace(hidden_states=tuple(self.states(self.embeddings(input_ids))))


@pytest.mark.parametrize("dimensions", [3, "all"])
@pytest.mark.parametrize("widths", [[12, 12], [12, 20], [12, 2, 20]])
@pytest.mark.parametrize("passes", [[2], [3, 2]])
def test_layers_of_any_widths(passes: list[int], widths: list[int], dimensions: Any) -> None:
    """Against torch.func.jvp along every direction and pair of a pass, and its gradient."""
    torch.manual_seed(0)
    model, ids = Widths(widths).double(), torch.randint(9, (2, 3))
    norms = jx.smoothness(
        model, {"input_ids": ids}, dimensions=dimensions, directions=sum(passes), seed=1
    )
    draws = [
        sample_directions(torch.arange(6), q, 8, seed=1, offset=offset, dtype=torch.float64)
        for offset, q in enumerate(passes)
    ]
    along = [u.view(2, 3, 8) for draw in draws for u in draw]
    pairs = [pair for draw in draws for pair in combinations(draw.view(-1, 2, 3, 8), 2)]
    x, counter = model.embeddings(ids), DrawCounter(1, "dimensions")
    for k, width in enumerate(widths):

        def slope(x: Tensor, u: Tensor, k: int = k) -> Tensor:
            return torch.func.jvp(lambda x: model.states(x)[k + 1], (x,), (u,))[1]

        def curve(u: Tensor, w: Tensor, slope: Any = slope) -> Tensor:
            return torch.func.jvp(lambda x: slope(x, u), (x,), (w,))[1]

        squares = torch.stack([slope(x, u).square().sum(-1) for u in along])
        roots = torch.stack([curve(*pair).square() for pair in pairs]).mean(0).sqrt()
        sizes, scale = roots / chi_correction(len(pairs)), 1.0
        offset = counter.next_offset()
        if dimensions == "all":
            scale = min(10, width) / width
        else:
            numbers = sample_directions(torch.tensor(0), 1, width, seed=1, offset=offset)
            sizes = sizes[..., numbers.flatten().argsort()[:dimensions]]
        expected = {"jacobian": squares.mean(0).sqrt(), "hessian": sizes.sum(-1) * scale}
        for name, tokens in expected.items():
            actual = getattr(norms, f"{name}_tokens")[k]
            torch.testing.assert_close(actual, tokens, rtol=1e-10, atol=0)
            gradients = (
                torch.autograd.grad(of, model.embeddings.weight, retain_graph=True)[0]
                for of in (getattr(norms, name)[k], tokens.sum(-1).mean())
            )
            torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
