"""The PAC-Bayesian bound on the loss of a fine-tuned model (LensLLM, Theorem 2 and Corollary 1).

    L ≤ (1 + ε) L̂ + (1 + ε) √C Σ_i √h_i / √n + O(n^{−3/4}),   h_i = max v_iᵀ H_i⁺ v_i

v_i is the change of layer i by fine-tuning, H_i⁺ the Hessian of the loss in the layer's parameters
without its negative eigenvalues, and the maximum is over the training examples.  The paper calls
the sizes where the last term outweighs the second the pre-power phase, and the others the power
phase.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..jet import hvp

LossFunction = Callable[..., Tensor]
"""(model, batch) -> mean loss of the batch, a scalar."""


@dataclass(frozen=True)
class LayerCurvature:
    """Curvature of the loss along the change of a layer by fine-tuning.

    Attributes:
        name: prefix of the names of the layer's parameters, see `layer_name`.
        parameters: number of parameters.
        distance: norm of the change, ‖v_i‖.
        curvature: h_i, the largest v_iᵀ H_i⁺ v_i of the batches.
        mean_curvature: mean of v_iᵀ H_i⁺ v_i over the batches.
        uncertainty: largest uncertainty of v_iᵀ H_i⁺ v_i, see `positive_curvature`; 0 if exact.
    """

    name: str
    parameters: int
    distance: float
    curvature: float
    mean_curvature: float
    uncertainty: float


@dataclass(frozen=True)
class PacBayesBound:
    """The three terms of the bound, and the curvature of every layer.

    Attributes:
        layers: curvature of each layer, in the order of the model.
        train_loss: L̂, mean loss of the batches.
        empirical: (1 + ε) L̂.
        curvature: (1 + ε) √C Σ_i √h_i / √n.
        remainder: n^{−3/4}; the theorem leaves its factor open, and here it is 1.
        samples: n, the number of training examples.
        loss_bound: C, the upper bound of the loss.
        new_parameters: names of the parameters without a pretrained value, such as those of a new
            head, which the bound leaves out.

    Examples:
        >>> import jachess_ext as jx
        >>> terms = {"empirical": 0.44, "curvature": 0.2, "remainder": 0.01}
        >>> bound = jx.scaling.PacBayesBound(
        ...     (), train_loss=0.4, **terms, samples=500, loss_bound=1.0, new_parameters=()
        ... )
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
    new_parameters: tuple[str, ...]

    @property
    def total(self) -> float:
        """Sum of the three terms."""
        return self.empirical + self.curvature + self.remainder

    @property
    def phase(self) -> str:
        """Corollary 1's phase: "pre-power" if the remainder outweighs the curvature, or "power"."""
        return "pre-power" if self.remainder > self.curvature else "power"


def pac_bayes_bound(
    model: nn.Module,
    pretrained: nn.Module | Mapping[str, Tensor],
    batches: Iterable[object],
    samples: int,
    *,
    epsilon: float = 0.1,
    loss_bound: float | None = None,
    steps: int = 20,
    loss: LossFunction | None = None,
) -> PacBayesBound:
    """Compute the PAC-Bayesian bound of a fine-tuned model from its Hessian in every layer.

    The Hessian-vector products are those of `jachess_ext.hvp`, through fused attention.  Call
    ``model.eval()`` first for a Hessian without dropout.

    Args:
        model: the fine-tuned model.
        pretrained: the model before fine-tuning, or its state dict.
        batches: training batches.  The maximum of the theorem is over examples, and so needs
            batches of one example; the maximum over means of larger batches is smaller.
        samples: n, the number of training examples of the fine-tuning.
        epsilon: ε, positive.
        loss_bound: C, an upper bound of the loss; None for the largest loss of the batches.
        steps: largest number of Lanczos steps for each layer and batch, each of them a
            Hessian-vector product; as many vectors of the layer's size are in memory.
        loss: (model, batch) -> loss; None for ``model(**batch).loss``.

    Raises:
        ValueError: there are no batches, or no parameters with a pretrained value; the shape of a
            parameter differs; a loss is not finite, or above `loss_bound`; a number is not
            positive.

    Examples:
        >>> model, pretrained = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> batches = [(torch.randn(1, 3), torch.tensor([0])) for _ in range(4)]
        >>> def loss(model, batch):
        ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> bound = jx.scaling.pac_bayes_bound(model, pretrained, batches, samples=4, loss=loss)
        >>> [layer.name for layer in bound.layers]
        ['weight', 'bias']
    """
    for name, value in (("samples", samples), ("epsilon", epsilon), ("steps", steps)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; expected a positive number")
    changes, new_parameters = _changes(model, pretrained)
    compute_loss = _Loss(model, loss or _model_loss)
    curvatures: dict[str, list[tuple[float, float]]] = {name: [] for name in changes}
    losses = []
    for batch in batches:
        with torch.no_grad():
            losses.append(float(compute_loss(batch)))
        if not math.isfinite(losses[-1]):
            raise ValueError(f"the loss of a batch is {losses[-1]}; expected a finite number")
        # H_i is the block of one layer: the theorem has no terms between layers.
        for name, change in changes.items():
            product = _hessian_product(compute_loss, batch, list(change))
            curvatures[name].append(positive_curvature(product, _flatten(change.values()), steps))
    if not losses:
        raise ValueError("batches is empty; expected training batches")
    upper = max(losses) if loss_bound is None else loss_bound
    if not upper >= max(losses):
        raise ValueError(f"loss_bound is {upper:g}, but a batch has the loss {max(losses):g}")
    layers = []
    for name, change in changes.items():
        values, uncertainties = zip(*curvatures[name], strict=True)
        v, mean = _flatten(change.values()), sum(values) / len(values)
        norm = float(v.norm())
        layers.append(LayerCurvature(name, v.numel(), norm, max(values), mean, max(uncertainties)))
    train_loss = sum(losses) / len(losses)
    roots = sum(math.sqrt(layer.curvature) for layer in layers)
    return PacBayesBound(
        layers=tuple(layers),
        train_loss=train_loss,
        empirical=(1 + epsilon) * train_loss,
        curvature=(1 + epsilon) * math.sqrt(upper / samples) * roots,
        remainder=samples**-0.75,
        samples=samples,
        loss_bound=upper,
        new_parameters=new_parameters,
    )


def layer_name(parameter: str) -> str:
    """Return the prefix of a parameter's name that names its layer.

    The prefix ends with the first number ("bert.encoder.layer.3"), or if there is none with the
    second module.

    Examples:
        >>> layer_name("bert.encoder.layer.3.output.dense.weight")
        'bert.encoder.layer.3'
        >>> layer_name("bert.embeddings.LayerNorm.weight"), layer_name("classifier.weight")
        ('bert.embeddings', 'classifier')
    """
    if numbered := re.match(r"(?:.*?\.)?\d+(?=\.)", parameter):
        return numbered[0]
    return ".".join(parameter.split(".")[:-1][:2]) or parameter


def _changes(
    model: nn.Module, pretrained: nn.Module | Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], tuple[str, ...]]:
    """Return the changes of the parameters by fine-tuning, and the names of new parameters.

    The changes are a dict, layer -> (parameter -> fine-tuned − pretrained value).
    """
    origin = pretrained.state_dict() if isinstance(pretrained, nn.Module) else pretrained
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    changes: dict[str, dict[str, Tensor]] = {}
    for name in filter(origin.__contains__, trained):
        if origin[name].shape != trained[name].shape:
            raise ValueError(
                f"{name} is {list(trained[name].shape)} in the model and "
                f"{list(origin[name].shape)} in the pretrained one; expected the same architecture"
            )
        change = trained[name] - origin[name].detach().to(trained[name])
        changes.setdefault(layer_name(name), {})[name] = change
    if not changes:
        raise ValueError("no trainable parameter of the model has a pretrained value")
    return changes, tuple(name for name in trained if name not in origin)


class _Loss(nn.Module):
    """The loss of a batch, as a module, whose parameters `functional_call` can replace."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: object) -> Tensor:
        return self.loss(self.model, batch)


def _model_loss(model: nn.Module, batch: Mapping[str, object]) -> Tensor:
    loss: Tensor | None = model(**batch).loss
    if loss is None:
        raise ValueError("the model returns no loss; expected batches with labels")
    return loss


def _hessian_product(
    compute_loss: _Loss, batch: object, names: Sequence[str]
) -> Callable[[Tensor], Tensor]:
    """Return the function u -> H u, where H is the Hessian of a batch's loss with respect to the
    parameters `names`."""
    parameters = {f"model.{name}": compute_loss.model.get_parameter(name) for name in names}

    def layer_loss(layer: dict[str, Tensor]) -> Tensor:
        return functional_call(compute_loss, layer, (batch,))  # type: ignore[no-any-return]

    def product(u: Tensor) -> Tensor:
        slices = u.split([p.numel() for p in parameters.values()])
        pairs = zip(parameters.items(), slices, strict=True)
        tangents = {name: u.view_as(p) for (name, p), u in pairs}
        result = hvp(layer_loss, (parameters,), (tangents,), differentiable=False)
        return _flatten(result.product[0][name] for name in parameters)

    return product


def _flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


_INVARIANT = 1e-10  # of the largest entry of T: below it the Krylov space is exhausted


def positive_curvature(
    product: Callable[[Tensor], Tensor], v: Tensor, steps: int
) -> tuple[float, float]:
    """Compute vᵀ H⁺ v, where H⁺ is the symmetric matrix H without its negative eigenvalues.

    Lanczos quadrature (Golub & Meurant 2010): with the tridiagonal T of the Lanczos process started
    at v/‖v‖, vᵀ f(H) v ≈ ‖v‖² f(T)₁₁, here for f(λ) = max(λ, 0).  It is exact once the Krylov space
    is exhausted.

    Args:
        product: u -> H u, [n] -> [n].
        v: [n].
        steps: largest number of products; as many vectors [n] are in memory.

    Returns:
        The value, and its uncertainty: its change if every Ritz value moves by its residual,
        ‖v‖² Σ_i s_1i² β |s_ki|; 0 if the Krylov space is exhausted.

    Examples:
        >>> positive_curvature(lambda u: 3 * u, torch.ones(4), steps=5)
        (12.0, 0.0)
    """
    norm = v.norm()
    if norm == 0:
        return 0.0, 0.0
    basis = [v / norm]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    while True:
        w = product(basis[-1])
        diagonal.append(float(torch.dot(w, basis[-1])))
        # In floating point the basis loses its orthogonality once a Ritz value has converged, and
        # copies of that eigenvalue would be counted.  To orthogonalise twice is enough (Parlett).
        stacked = torch.stack(basis)
        for _ in range(2):
            w = w - stacked.T @ (stacked @ w)
        beta = float(w.norm())
        largest = max(map(abs, [*diagonal, *off_diagonal]))
        is_exhausted = beta <= _INVARIANT * largest or len(basis) == v.numel()
        if is_exhausted or len(basis) == steps:
            break
        off_diagonal.append(beta)
        basis.append(w / beta)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for offset in (-1, 1) if off_diagonal else ():
        tridiagonal += torch.diag(torch.tensor(off_diagonal, dtype=torch.float64), offset)
    ritz_values, s = torch.linalg.eigh(tridiagonal)
    square, weights = float(norm) ** 2, s[0].square()
    value = square * float(weights @ ritz_values.clamp(min=0))
    return value, 0.0 if is_exhausted else square * beta * float(weights @ s[-1].abs())
