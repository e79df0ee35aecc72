"""`jx.JacHess`: Eq. 7 as a differentiable penalty beside a model's own loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..jet.directions import Distribution
from .calibration import BaseNorms, measure_base
from .estimate import Smoothness, measure_tokens, reduced
from .scope import Dimensions, Layers, Scope
from .settings import Engine, HessianNorm, Randomness, Settings
from .weights import WEIGHTINGS, Weighting, given_profile, layer_profile


@dataclass
class JacHessOutput:
    """One step's penalty and what came with it.

    Attributes:
        loss: scalar, strength · R; differentiable.
        jacobian, hessian: ``[K]``, unweighted batch means as in `Smoothness`; ``hessian`` is None
            where there is no Hessian term.
        model_output: the model's own output for the batch, plain tensors, with its task loss
            where the batch had labels; on the same graph.
        smoothness: per-token norms too.
    """

    loss: Tensor
    jacobian: Tensor
    hessian: Tensor | None
    model_output: Any
    smoothness: Smoothness

    @property
    def total(self) -> Tensor:
        """Task loss + penalty: what train mode minimises.

        Raises:
            ValueError: the model computed no task loss.
        """
        task = getattr(self.model_output, "loss", None)
        if task is None:
            raise ValueError(
                "the model returned no task loss: train mode needs 'labels' in the batch (and a "
                "model with a head); for unlabelled data use .loss"
            )
        return task + self.loss


class JacHess:
    """Jacobian and Hessian regularisation (spec 01, Eq. 7).

    Per sequence, R = Σ_k λ^(k) Σ_t ( ‖J_t^(k)‖_F + Σ_{j∈D} ‖H_{t,j}^(k)‖_F ), averaged over the
    batch; ``loss`` is strength · R, and the λ^(k) sum to 1.  With ``normalize`` each layer's two
    norms are divided by their base values per token (from `calibrate`) and averaged over the
    tokens: R is 2 (or 1 without the Hessian) before training, whatever the model, so that a
    strength means the same everywhere.

    Example:
        >>> reg = JacHess(model, strength=0.01, normalize=True)
        >>> reg.calibrate(loader)
        >>> reg(batch).total.backward()

    Args:
        model: as for `jx.smoothness`; called as it is, in the mode (train or eval) it is in.
        weights: the profile of λ over layers: "uniform", "inverse", "norm", "softmax", or one
            number per layer.  All names but "uniform" need `calibrate` first.
        strength: factor of R, ≥ 0. With ``normalize``, start at 0.01: the demo's small encoder
            lost accuracy at 0.03 and collapsed at 0.1 (examples/README.md).  Without it R is in
            the hundreds or thousands, and the strength has to match.
        directions, hessian, dimensions, layers, scope, squared, engine, hessian_norm,
            distribution: as for `jx.smoothness`.
        seed: makes the sequence of directions reproducible, on every device: step n draws what
            `jx.smoothness` draws with this seed and ``step=n``.  None: every step draws a fresh
            seed from torch's global CPU generator.
        normalize: see above; needs `calibrate`.
        temperature: of the softmax weighting.

    Raises:
        ValueError: bad arguments, or a call that needs `calibrate` before it was called.
        FloatingPointError: R is not finite (the message names the first layer that is not).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: Weighting | Sequence[float] = "softmax",
        strength: float = 0.01,
        directions: int = 2,
        hessian: bool = True,
        dimensions: Dimensions = 10,
        layers: Layers = "all",
        scope: Scope = "all",
        squared: bool = False,
        engine: Engine = "jet",
        seed: int | None = None,
        hessian_norm: HessianNorm = "per_dimension",
        distribution: Distribution = "gaussian",
        normalize: bool = False,
        temperature: float = 1.0,
    ) -> None:
        self.model = model
        self.settings = Settings(
            *(engine, directions, layers, scope, dimensions, hessian, hessian_norm, squared),
            distribution,
        )
        if isinstance(weights, str) and weights not in WEIGHTINGS:
            raise ValueError(
                f"weights is {weights!r}; expected one of {', '.join(WEIGHTINGS)}, or one number "
                "per layer"
            )
        if not isinstance(strength, int | float) or not 0 <= strength < float("inf"):
            raise ValueError(f"strength is {strength!r}; expected a finite number from 0 up")
        self.weights = weights if isinstance(weights, str) else given_profile(weights)
        self.strength = float(strength)
        self.seed = seed
        self.normalize = normalize
        self.temperature = temperature
        self.step = 0
        self.base: BaseNorms | None = None

    def calibrate(self, batches: Iterable[Mapping[str, Any]]) -> BaseNorms:
        """Measure the base model's norms; call it before fine-tuning.

        The model runs in eval mode and without gradients, and is left as it was.

        Args:
            batches: one batch or more, for example a few from the training loader.

        Returns:
            The mean norms per token of every layer, kept as ``self.base``.

        Raises:
            ValueError: there is no batch.
        """
        if isinstance(batches, Mapping):
            batches = [batches]
        self.base = measure_base(self.model, batches, self.settings, self.seed)
        return self.base

    @property
    def needs_base(self) -> bool:
        """Whether a step needs what `calibrate` measures."""
        named = isinstance(self.weights, str) and self.weights != "uniform"
        return self.normalize or named

    def layer_weights(self, count: int | None = None) -> Tensor:
        """``[K]``: λ^(k).  ``count`` is the number of layers, where it is not yet known.

        Raises:
            ValueError: the weighting needs `calibrate`; a given profile has another length.
        """
        if isinstance(self.weights, Tensor):
            if count is not None and len(self.weights) != count:
                raise ValueError(
                    f"weights has {len(self.weights)} numbers, but there are {count} layers"
                )
            return self.weights
        if self.weights == "uniform" and count is not None:
            return torch.full((count,), 1 / count, dtype=torch.float64)
        base = self._require_base(f"weights={self.weights!r}")
        return layer_profile(self.weights, base.jacobian, self.temperature)

    def __call__(self, batch: Mapping[str, Any]) -> JacHessOutput:
        """One forward pass: the penalty, and the model's output with it.

        Args:
            batch: as for `jx.smoothness`; with labels, the model's own loss comes too, as
                ``model_output.loss`` and within ``total``.
        """
        if self.needs_base:
            self._require_base("normalize=True" if self.normalize else f"weights={self.weights!r}")
        random = Randomness.from_seed(self.seed, self.step)
        norms = measure_tokens(self.model, batch, self.settings, random)
        result = reduced(norms)
        terms = self._layer_terms(result)
        loss = self.strength * (terms * self.layer_weights(len(terms)).to(terms)).sum()
        _check_finite(terms, loss)
        self.step += 1
        return JacHessOutput(loss, result.jacobian, result.hessian, norms.model_pass.output, result)

    def _layer_terms(self, result: Smoothness) -> Tensor:
        """``[K]``: Jacobian plus Hessian term of R per layer, before λ."""
        if not self.normalize:
            return result.jacobian if result.hessian is None else result.jacobian + result.hessian
        base = self._require_base("normalize=True")
        counts = result.tokens.sum(1)
        terms = _token_mean(result.jacobian_tokens, counts) / base.jacobian.to(result.jacobian)
        if result.hessian_tokens is not None and base.hessian is not None:
            hessian = _token_mean(result.hessian_tokens, counts)
            terms = terms + hessian / base.hessian.to(hessian)
        return terms

    def _require_base(self, why: str) -> BaseNorms:
        if self.base is None:
            raise ValueError(
                f"{why} needs the base model's norms: call calibrate(batches) before training"
            )
        return self.base

    def state_dict(self) -> dict[str, Any]:
        """Base norms, seed and step: what makes a resumed run go on as it would have.

        Without a seed the directions come from torch's global generator, whose state is not here.
        """
        base = None if self.base is None else self.base.state_dict()
        return {"step": self.step, "seed": self.seed, "base": base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        missing = {"step", "seed", "base"} - set(state)
        if missing:
            raise ValueError(f"the regulariser's state lacks {sorted(missing)}")
        self.step, self.seed = int(state["step"]), state["seed"]
        self.base = None if state["base"] is None else BaseNorms.from_state_dict(state["base"])


def _token_mean(tokens: Tensor, counts: Tensor) -> Tensor:
    """``[K, B, T]`` → ``[K]``: mean over a row's tokens, then over rows."""
    return (tokens.sum(-1) / counts).mean(-1)


def _check_finite(terms: Tensor, loss: Tensor) -> None:
    if torch.isfinite(loss):
        return
    layer = int((~torch.isfinite(terms)).float().argmax())
    raise FloatingPointError(
        f"the penalty is {loss.item()}: layer {layer} (of those chosen) has a non-finite norm; "
        "lower the learning rate, or use a wider dtype"
    )
