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

LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class LayerCurvature:
    """What was measured of a layer.

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

    Example:
        >>> import jachess_ext as jx
        >>> bound = jx.scaling.Bound((), 0.4, 0.44, 0.2, 0.01, samples=500, loss_bound=1.0, new=())
        >>> round(bound.total, 2), bound.phase
        (0.65, 'power')
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
        """Sum of the three terms."""
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
        batches: training batches. The theorem's maximum is over examples: give batches of a single
            example for it; larger batches give the maximum over batch means, which is smaller.
        samples: n, the number of training examples of the fine-tuning.
        epsilon: ε > 0.
        loss_bound: C, which the loss never exceeds; None: the largest batch loss seen.
        steps: Lanczos steps a layer and batch; as many vectors of a layer's size are kept.
        loss: (model, batch) -> scalar; None: model(**batch).loss.

    Raises:
        ValueError: no batch, nothing to compare, a shape that differs, a loss that is not finite,
            or a bad number.

    Example:
        >>> import torch
        >>> import jachess_ext as jx
        >>> tuned, before = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> batches = [(torch.randn(1, 3), torch.tensor([0])) for _ in range(4)]
        >>> def loss(model, batch):
        ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> bound = jx.scaling.pac_bayes(tuned, before, batches, samples=4, loss=loss)
        >>> bound.phase in ("pre-power", "power")
        True
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
                raise ValueError("the model returns no loss; expected batches with labels")
            losses.append(float(out.detach()))
            if not math.isfinite(losses[-1]):
                raise ValueError(f"the loss of a batch is {losses[-1]}; expected a finite number")
            # Layer by layer: H_i is the block of the layer's own parameters, and the theorem has no
            # terms between layers.
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
    empirical = (1 + epsilon) * train_loss
    curvature = (1 + epsilon) * math.sqrt(c) * roots / math.sqrt(samples)
    return Bound(measured, train_loss, empirical, curvature, samples**-0.75, samples, c, new)


def layer_of(name: str) -> str:
    """Return the layer a parameter belongs to: up to its first number, else its first two modules.

    "bert.encoder.layer.3.output.dense.weight" -> "bert.encoder.layer.3";
    "bert.embeddings.LayerNorm.weight" -> "bert.embeddings"; "classifier.weight" -> "classifier".
    """
    if numbered := re.match(r"(?:.*?\.)?\d+(?=\.)", name):
        return numbered[0]
    return ".".join(name.split(".")[:-1][:2]) or name


def _differences(
    model: nn.Module, pretrained: nn.Module | Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], tuple[str, ...]]:
    """Return {layer: {parameter: fine-tuned − pretrained}}, and parameters that are new."""
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
        difference = parameter.detach() - old.detach().to(parameter)
        layers.setdefault(layer_of(name), {})[name] = difference
    if not layers:
        raise ValueError("no trainable parameter of the model has a pretrained value")
    return layers, tuple(new)


def _hessian(loss: Tensor, parameters: list[nn.Parameter]) -> Callable[[Tensor], Tensor]:
    """Return u -> H u in these parameters; what the loss does not depend on twice gives 0."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    # A gradient that no parameter enters, of a layer the loss is linear in, has no graph.
    curved = [g for g in gradients if g.requires_grad]

    def product(u: Tensor) -> Tensor:
        if not curved:
            return torch.zeros_like(u)
        pieces = u.split([p.numel() for p in parameters])
        cotangents = [
            c.view_as(g) for g, c in zip(gradients, pieces, strict=True) if g.requires_grad
        ]
        products = torch.autograd.grad(
            curved, parameters, cotangents, retain_graph=True, materialize_grads=True
        )
        return _flat([p.detach() for p in products])

    return product


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _layer(
    name: str, difference: dict[str, Tensor], measured: list[tuple[float, float]]
) -> LayerCurvature:
    values, uncertainties = zip(*measured, strict=True)
    v, mean = _flat(list(difference.values())), sum(values) / len(values)
    size, distance = v.numel(), float(v.norm())
    return LayerCurvature(name, size, distance, max(values), mean, max(uncertainties))


_INVARIANT = 1e-10  # of the largest entry of T: the Krylov space is exhausted


def positive_quadratic(
    product: Callable[[Tensor], Tensor], v: Tensor, steps: int
) -> tuple[float, float]:
    """Return vᵀ H⁺ v for a symmetric H known by its products, H⁺ without negative eigenvalues.

    Lanczos quadrature (Golub & Meurant 2010): with the tridiagonal T_k started at v/‖v‖,
    vᵀ f(H) v ≈ ‖v‖² (f(T_k))₁₁, here with f(λ) = max(λ, 0); exact once the Krylov space is
    exhausted.  Full reorthogonalisation, twice.

    Args:
        product: u -> H u, [n] -> [n].
        v: [n].
        steps: products at most; as many vectors of v's size are kept.

    Returns:
        The value and its uncertainty: what it changes by if every Ritz value moves by its residual,
        ‖v‖² Σ_i s_1i² β_k |s_ki|; 0 where the Krylov space is exhausted.
    """
    # H has as many rows as the layer has parameters, millions, and is known by products only.  A
    # sum over its eigenvalues weighted by (qᵀ v)² is what Lanczos started at v gives: k products
    # integrate polynomials in H of degree 2k − 1 exactly.  max(λ, 0) is no polynomial, and its kink
    # at 0 is what the uncertainty is for.
    norm = v.norm()
    if norm == 0:
        return 0.0, 0.0
    square = float(norm) ** 2
    basis = [v / norm]
    diagonal: list[float] = []
    beside: list[float] = []
    last = min(steps, v.numel())
    while True:
        w = product(basis[-1])
        diagonal.append(float(torch.dot(w, basis[-1])))
        # Three terms suffice in exact arithmetic.  In floating point the basis loses its
        # orthogonality as soon as a Ritz value has converged, and copies of that eigenvalue turn
        # up, which the quadrature would count as further ones.  Twice is enough (Parlett).
        stacked = torch.stack(basis)
        for _ in range(2):
            w = w - stacked.T @ (stacked @ w)
        size = float(w.norm())
        largest = max(map(abs, [*diagonal, *beside]))
        if size <= _INVARIANT * largest or len(basis) == v.numel():
            return square * _first_entry(diagonal, beside)[0], 0.0
        if len(basis) == last:
            value, residual = _first_entry(diagonal, beside)
            return square * value, square * size * residual
        beside.append(size)
        basis.append(w / size)


def _first_entry(diagonal: list[float], beside: list[float]) -> tuple[float, float]:
    """Return (max(T, 0))₁₁ of the tridiagonal T, and Σ_i s_1i² |s_ki| of its eigenvectors s."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
        matrix = matrix + off + off.T
    values, vectors = torch.linalg.eigh(matrix)
    weights = vectors[0].square()
    return float(weights @ values.clamp(min=0)), float(weights @ vectors[-1].abs())
