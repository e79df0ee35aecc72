"""The PAC-Bayes diagnostic of fine-tuning (LensLLM, Theorem 2 and Corollary 1), layer by layer.

    L ≤ (1 + ε) L̂ + (1 + ε) √C Σ_i √h_i / √n + O(n^{−3/4}),   h_i ≥ max v_iᵀ H_i⁺ v_i

v_i: fine-tuned minus pretrained weights of layer i; H_i⁺: the loss's Hessian in layer i without its
negative eigenvalues; the maximum is over the training examples.  While the last term outweighs the
second, the paper speaks of the pre-power phase; where the second does, of the power phase.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .lanczos import positive_quadratic

LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class LayerCurvature:
    """One layer.

    Attributes:
        name: prefix of its parameters' names.
        parameters: how many numbers.
        distance: ‖v_i‖.
        curvature: h_i, the largest v_iᵀ H_i⁺ v_i over the batches.
        mean_curvature: their mean.
        uncertainty: the largest of `positive_quadratic` over the batches; 0: exact.
    """

    name: str
    parameters: int
    distance: float
    curvature: float
    mean_curvature: float
    uncertainty: float


@dataclass(frozen=True)
class Bound:
    """The three terms, and where the second comes from.

    Attributes:
        layers: in the model's order.
        train_loss: L̂, mean over the batches.
        empirical: (1 + ε) L̂.
        curvature: (1 + ε) √C Σ √h_i / √n.
        remainder: n^{−3/4}; the theorem leaves its constant open, 1 is put here.
        samples: n.
        loss_bound: C.
        new: parameters without a pretrained value, such as a new head's; not in the sum.
    """

    layers: tuple[LayerCurvature, ...]
    train_loss: float
    empirical: float
    curvature: float
    remainder: float
    samples: int
    loss_bound: float
    new: tuple[str, ...]

    @property
    def total(self) -> float:
        """The sum of the three terms."""
        return self.empirical + self.curvature + self.remainder

    @property
    def dominant(self) -> str:
        """The largest term: "empirical", "curvature" or "remainder"."""
        terms = ("empirical", "curvature", "remainder")
        return max(terms, key=lambda term: getattr(self, term))

    @property
    def phase(self) -> str:
        """The paper's reading: "pre-power" while the remainder outweighs the curvature term."""
        return "pre-power" if self.remainder > self.curvature else "power"


def pac_bayes(
    model: nn.Module,
    pretrained: nn.Module | Mapping[str, Tensor],
    batches: Iterable[Any],
    samples: int,
    *,
    epsilon: float = 0.1,
    loss_bound: float | None = None,
    steps: int = 20,
    loss: LossFunction | None = None,
) -> Bound:
    """Measure h_i of every layer and the terms of the bound.

    Hessian–vector products by a second backward; attention runs in torch's composed form, which
    has one.  The model is used as it is: call model.eval() first for a Hessian without dropout.

    Args:
        model: the fine-tuned model.
        pretrained: the model before, or its state dict.
        batches: training batches. The theorem's maximum is over examples: give batches of one for
            it; larger ones give the maximum over batch means, which is smaller.
        samples: n, the number of training examples of the fine-tuning.
        epsilon: ε > 0.
        loss_bound: C, which the loss never exceeds; None: the largest batch loss seen.
        steps: Lanczos steps a layer and batch; as many vectors of a layer's size are kept.
        loss: (model, batch) -> scalar; None: model(**batch).loss.

    Raises:
        ValueError: no batch, nothing to compare, a shape that differs, a loss that is not finite,
            or a bad number.
    """
    for name, value in (("samples", samples), ("epsilon", epsilon), ("steps", steps)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; expected a positive number")
    layers, new = _differences(model, pretrained)
    parameters = dict(model.named_parameters())
    values: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    losses = []
    for batch in batches:
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            out = model(**batch).loss if loss is None else loss(model, batch)
            if out is None:
                raise ValueError(
                    "the model returns no loss for a batch; expected batches with labels"
                )
            losses.append(float(out.detach()))
            if not math.isfinite(losses[-1]):
                raise ValueError(f"the loss of a batch is {losses[-1]}; expected a finite number")
            for name, difference in layers.items():
                chosen = [parameters[key] for key in difference]
                v = _flat(list(difference.values()))
                values[name].append(positive_quadratic(_hessian(out, chosen), v, steps))
    if not losses:
        raise ValueError("batches is empty; expected training batches to measure the loss on")
    measured = tuple(_layer(name, layers[name], values[name]) for name in layers)
    train_loss = sum(losses) / len(losses)
    c = max(losses) if loss_bound is None else loss_bound
    if not c >= max(losses):
        raise ValueError(f"loss_bound is {c:g}, but a batch has the loss {max(losses):g}")
    roots = sum(math.sqrt(layer.curvature) for layer in measured)
    return Bound(
        measured,
        train_loss,
        (1 + epsilon) * train_loss,
        (1 + epsilon) * math.sqrt(c) * roots / math.sqrt(samples),
        samples**-0.75,
        samples,
        c,
        new,
    )


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: up to its first number, else its first two modules.

    "bert.encoder.layer.3.output.dense.weight" -> "bert.encoder.layer.3";
    "bert.embeddings.LayerNorm.weight" -> "bert.embeddings"; "classifier.weight" -> "classifier".
    """
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    if numbered:
        return numbered[0]
    modules = name.split(".")[:-1]
    return ".".join(modules[:2]) or name


def _differences(
    model: nn.Module, pretrained: nn.Module | Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], tuple[str, ...]]:
    """{layer: {parameter: fine-tuned − pretrained}}, and parameters without a pretrained value."""
    before = pretrained.state_dict() if isinstance(pretrained, nn.Module) else pretrained
    layers: dict[str, dict[str, Tensor]] = {}
    new = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name not in before:
            new.append(name)
            continue
        old = before[name]
        if old.shape != parameter.shape:
            raise ValueError(
                f"{name} is {list(parameter.shape)} in the model and {list(old.shape)} in the "
                "pretrained one; expected the same architecture"
            )
        layers.setdefault(layer_of(name), {})[name] = parameter.detach() - old.detach().to(
            parameter
        )
    if not layers:
        raise ValueError(
            "no trainable parameter of the model has a pretrained value; expected the model it was "
            "fine-tuned from"
        )
    return layers, tuple(new)


def _hessian(loss: Tensor, parameters: list[nn.Parameter]) -> Callable[[Tensor], Tensor]:
    """u -> H u in these parameters; what the loss does not depend on twice gives 0."""
    gradients = torch.autograd.grad(
        loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True
    )
    curved = [g for g in gradients if g.requires_grad]

    def product(u: Tensor) -> Tensor:
        if not curved:
            return torch.zeros_like(u)
        pieces = u.split([p.numel() for p in parameters])
        cotangents = [
            c.view_as(g) for g, c in zip(gradients, pieces, strict=True) if g.requires_grad
        ]
        known = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad(curved, parameters, cotangents, **known)
        return _flat([f.detach() for f in found])

    return product


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _layer(
    name: str, difference: dict[str, Tensor], found: list[tuple[float, float]]
) -> LayerCurvature:
    values = [value for value, _ in found]
    v = _flat(list(difference.values()))
    return LayerCurvature(
        name,
        v.numel(),
        float(v.norm()),
        max(values),
        sum(values) / len(values),
        max(uncertainty for _, uncertainty in found),
    )
