"""The NTK loss F(Θ, t) = ‖exp(−η Θ t) r‖² (LensLLM, Eq. 9, the matrix exponential), and how a
kernel moves during training.

Gradient flow on ½‖f − y‖² with the kernel fixed gives f_t − y = exp(−η Θ t) (f_0 − y).  With
Θ = Q diag(λ) Qᵀ,

    F(t) = Σ_i e^{−2 η λ_i t} (q_iᵀ r)²,    F'(t) = −2 η Σ_i λ_i e^{−2 η λ_i t} (q_iᵀ r)².

    drift      ‖Θ_t − Θ_0‖ / ‖Θ_0‖                                       (Frobenius norms)
    alignment  ⟨K_c, L_c⟩ / (‖K_c‖ ‖L_c‖),  K[n, m] = Σ_c Θ[n, c, m, c],  L = Y Yᵀ,  X_c = H X H

with H = I − 1 1ᵀ/N: centred kernel alignment (Cortes, Mohri & Rostamizadeh 2012).  It is 1 where
the kernel is the labels' own, and 0 where it is unrelated to them.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._io import axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Negative eigenvalues, relative to the largest, that count as round-off of a kernel in double and
# in lower precision.
_ROUND_OFF, _ROUND_OFF_SINGLE = 1e-9, 1e-4
_DECOMPOSITION_ROUND_OFF = 1e-15  # of the eigendecomposition itself in double, per row


@dataclass(frozen=True, repr=False)
class Spectrum:
    """A kernel, symmetrised and decomposed once: Θ = Q diag(λ) Qᵀ, in double precision.

    Attributes:
        eigenvalues: λ, [n], ascending, none negative.
        eigenvectors: Q, [n, n], columns.
        clipped: how many eigenvalues were negative and set to zero.
        most_negative: the lowest eigenvalue before clipping, at most 0.
        asymmetry: ‖Θ − Θᵀ‖ / ‖Θ‖ before symmetrising (Frobenius norms).

    Examples:
        >>> spectrum = Spectrum.of(torch.diag(torch.tensor([1.0, 4.0])))
        >>> spectrum.eigenvalues
        tensor([1., 4.], dtype=torch.float64)
        >>> spectrum.loss(torch.tensor([0.0, 1.0]), t=torch.tensor([0.0, 100.0]), lr=0.01)
        tensor([1.0000e+00, 3.3546e-04], dtype=torch.float64)
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    clipped: int
    most_negative: float
    asymmetry: float

    @classmethod
    def of(cls, theta: Tensor, tolerance: float | None = None) -> Spectrum:
        """Return the spectrum of a kernel.

        Args:
            theta: the kernel, [N, C, N, C] as `jx.ntk` returns it, or [n, n].
            tolerance: the fraction of the largest eigenvalue (for asymmetry: of the norm) that
                counts as round-off; None: 1e-9 for fp64, 1e-4 for other types.

        Raises:
            TypeError: theta holds complex numbers.
            ValueError: theta is not square, not finite or not symmetric, or has a negative
                eigenvalue beyond round-off.

        Warns:
            RuntimeWarning: negative eigenvalues beyond the round-off of the decomposition itself
                were set to zero.
        """
        matrix = _as_square(theta)
        if tolerance is None:
            tolerance = _ROUND_OFF if theta.dtype == torch.float64 else _ROUND_OFF_SINGLE
        norm = float(matrix.norm())
        asymmetry = float((matrix - matrix.T).norm()) / norm if norm else 0.0
        if asymmetry > tolerance:
            raise ValueError(
                f"theta is not symmetric (‖Θ − Θᵀ‖/‖Θ‖ = {asymmetry:.1e}); expected the kernel of "
                "a batch with itself: jx.ntk(model, batch)"
            )
        values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
        lowest, largest = float(values[0]), float(values.abs().max())
        if lowest < -tolerance * largest:
            raise ValueError(
                f"theta has the eigenvalue {lowest:.3e} (the largest is {float(values[-1]):.3e}), "
                "more negative than round-off; a kernel is positive semidefinite"
            )
        is_negative = values < 0
        clipped = int(is_negative.sum())
        if lowest < -_DECOMPOSITION_ROUND_OFF * len(values) * largest:
            warnings.warn(
                f"jachess_ext.ntk: {clipped} of {len(values)} eigenvalues of theta are negative, "
                f"down to {lowest:.1e} (the largest is {largest:.1e}); set to zero as round-off.",
                RuntimeWarning,
                stacklevel=3,
            )
        return cls(values.clamp(min=0), vectors, clipped, min(0.0, lowest), asymmetry)

    def __repr__(self) -> str:
        """Return a summary of the eigenvalues: number, range, trace and effective rank."""
        values = self.eigenvalues
        total, squares = float(values.sum()), float(values.square().sum())
        return (
            f"Spectrum of {len(values)} eigenvalues, {float(values[0]):.3g} to "
            f"{float(values[-1]):.3g}; trace {total:.3g}, effective rank "
            f"{total**2 / squares if squares else 0:.3g}\n"
            f"{self.clipped} below zero (down to {self.most_negative:.1e}) were set to zero; "
            f"asymmetry {self.asymmetry:.1e}"
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the positive eigenvalues, largest first, on logarithmic axes.

        Args:
            ax: matplotlib axes to draw on; None: new axes.

        Returns:
            The axes.

        Raises:
            MissingExtra: matplotlib is not installed.

        Examples:
            >>> axes = Spectrum.of(torch.diag(torch.tensor([1.0, 4.0]))).plot()
            >>> axes.get_lines()[0].get_ydata().tolist()
            [4.0, 1.0]
        """
        ax = axes_or_new(ax)
        values = self.eigenvalues.flip(0).cpu()
        values = values[values > 0]
        ax.plot(range(1, len(values) + 1), values.tolist(), ".-")
        ax.set(xscale="log", yscale="log", xlabel="number", ylabel="eigenvalue of the kernel")
        return ax

    def loss(self, residual: Tensor, t: Tensor | float, lr: float) -> Tensor:
        """Return F(t), of t's shape; arguments and errors as in `ntk_loss`."""
        t, rates, energies = self._terms(residual, t, lr)
        return (torch.exp(-rates * t[..., None]) * energies).sum(-1)

    def log_loss(self, residual: Tensor, t: Tensor | float, lr: float) -> Tensor:
        """Return log F(t), of t's shape, finite and differentiable even where F(t) underflows to 0.

        It is −inf if the residual is zero.
        """
        t, rates, energies = self._terms(residual, t, lr)
        is_positive = energies > 0
        if not is_positive.any():
            return torch.full_like(t, -torch.inf)
        return torch.logsumexp(energies[is_positive].log() - rates[is_positive] * t[..., None], -1)

    def modes(self, residual: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Return the rates and energies of F(t) = Σ_i e^{−rate_i t} energy_i.

        Returns:
            Rates 2 η λ_i and energies (q_iᵀ r)², [n] each; the energies are differentiable with
            respect to the residual.

        Raises:
            TypeError, ValueError: see `ntk_loss`.
        """
        _require_real("residual", residual)
        size = len(self.eigenvalues)
        if residual.numel() != size:
            raise ValueError(
                f"residual is {list(residual.shape)}, but the kernel has {size} rows; expected "
                "f0(X) − y as [N, C] or [N·C], one number for each output of each sample"
            )
        if not torch.isfinite(residual.detach()).all():
            raise ValueError("residual is NaN or infinite; expected f0(X) − y, finite numbers")
        if not 0 <= lr < float("inf"):
            raise ValueError(f"lr is {lr!r}; expected a finite learning rate from 0 up")
        vector = residual.reshape(-1).to(self.eigenvectors)
        return 2 * lr * self.eigenvalues, (self.eigenvectors.T @ vector).square()

    def _terms(
        self, residual: Tensor, t: Tensor | float, lr: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return t as a tensor, and the rates and energies of `modes`."""
        rates, energies = self.modes(residual, lr)
        time = torch.as_tensor(t, dtype=torch.float64, device=rates.device)
        if not bool((time.detach() >= 0).all()):
            raise ValueError("t holds a negative number or NaN; expected training times from 0 up")
        return time, rates, energies


def ntk_loss(theta: Tensor | Spectrum, residual: Tensor, t: Tensor | float, lr: float) -> Tensor:
    """Return F(Θ, t) = ‖exp(−η Θ t) r‖², the squared training residual under a fixed kernel.

    Args:
        theta: Θ, [N, C, N, C] as `jx.ntk` gives it or [n, n]; decomposed once, O(n³).  For many
            calls pass ``Spectrum.of(theta)``, which costs O(n) per t afterwards.
        residual: r = f0(X) − y, [N, C] or [n]; differentiable.
        t: training time (steps), 0 or more; a number or a tensor of any shape; differentiable.
        lr: learning rate η.

    Returns:
        F, of t's shape, fp64.  No gradient reaches theta.  ``Spectrum.log_loss`` gives log F, which
        does not underflow at large η λ t.

    Raises:
        TypeError, ValueError: theta is not square, finite, symmetric and positive semidefinite up
            to round-off; ``residual`` has another number of entries than theta has rows; ``t`` or
            ``lr`` is negative.

    Warns:
        RuntimeWarning: eigenvalues that round-off made negative were set to zero.

    Examples:
        >>> ntk_loss(torch.eye(2), torch.tensor([3.0, 4.0]), t=0.0, lr=0.1)
        tensor(25., dtype=torch.float64)
    """
    return (theta if isinstance(theta, Spectrum) else Spectrum.of(theta)).loss(residual, t, lr)


def _require_real(name: str, values: Tensor) -> None:
    """Raise TypeError for complex numbers, whose imaginary parts a cast would drop."""
    if values.is_complex():
        raise TypeError(
            f"{name} is {values.dtype}; expected real numbers: complex outputs count as pairs, "
            "torch.view_as_real"
        )


def _as_square(theta: Tensor) -> Tensor:
    """Return theta as a matrix [n, n] in double, detached; raise ValueError if it is not square or
    not finite."""
    _require_real("theta", theta)
    shape, half = list(theta.shape), theta.dim() // 2
    if theta.dim() not in (2, 4) or shape[:half] != shape[half:] or not theta.numel():
        raise ValueError(f"theta has shape {shape}; expected [N, C, N, C] or [n, n]")
    matrix = theta.detach().reshape(math.prod(shape[:half]), -1)
    if not torch.isfinite(matrix).all():
        raise ValueError("theta is NaN or infinite; expected finite numbers")
    return matrix.double()


def kernel_drift(theta: Tensor, start: Tensor) -> float:
    """Return ‖Θ − Θ_0‖ / ‖Θ_0‖.

    Args:
        theta, start: the kernels Θ and Θ_0, floating-point tensors of one shape.

    Raises:
        TypeError: a kernel holds complex numbers.
        ValueError: the shapes differ, or Θ_0 is zero or NaN.

    Examples:
        >>> kernel_drift(torch.tensor([[3.0]]), torch.tensor([[2.0]]))
        0.5
    """
    if theta.shape != start.shape:
        raise ValueError(
            f"theta has shape {list(theta.shape)}, but the kernel it is compared with "
            f"{list(start.shape)}; expected the same samples and outputs"
        )
    _require_real("theta", theta)
    _require_real("start", start)
    start_kernel = start.double()
    norm = float(start_kernel.norm())
    if not norm > 0:
        raise ValueError("the kernel to compare with is zero or NaN, so that drift has no scale")
    return float((theta.to(start_kernel) - start_kernel).norm()) / norm


def label_alignment(theta: Tensor, labels: Tensor) -> float:
    """Return the centred alignment of a kernel with labels; NaN if all labels are equal.

    Args:
        theta: the kernel, [N, C, N, C].
        labels: class numbers (integers), [N], or regression targets (floating point), [N] or
            [N, D].

    Raises:
        TypeError: ``theta`` or ``labels`` holds complex numbers.
        ValueError: ``theta`` is not [N, C, N, C], or the number of labels is not N.

    Examples:
        >>> labels = torch.tensor([0, 1, 1])
        >>> kernel = (labels[:, None] == labels[None]).float()[:, None, :, None]
        >>> round(label_alignment(kernel, labels), 6)
        1.0
    """
    if theta.dim() != 4 or theta.shape[:2] != theta.shape[2:]:
        raise ValueError(f"theta has shape {list(theta.shape)}; expected [N, C, N, C]")
    _require_real("theta", theta)
    _require_real("labels", labels)
    targets = _targets(labels)
    if targets.dim() != 2 or targets.shape[0] != theta.shape[0]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}; expected one label for each of "
            f"{theta.shape[0]} samples"
        )
    kernel = _centred(torch.einsum("ncmc->nm", theta.double()))
    targets = targets.to(kernel)
    ideal = _centred(targets @ targets.T)
    size = float(kernel.norm() * ideal.norm())
    return float((kernel * ideal).sum()) / size if size > 0 else float("nan")


def has_one_label_each(labels: Tensor) -> bool:
    """Return whether `label_alignment` accepts these labels: one per sample, not one per token."""
    return labels.dim() == 1 or (labels.dim() == 2 and labels.is_floating_point())


def _targets(labels: Tensor) -> Tensor:
    """Return labels as targets [N, D], one-hot for class numbers."""
    if labels.is_floating_point():
        return labels[:, None] if labels.dim() == 1 else labels
    if labels.dim() != 1:
        return labels
    return (labels[:, None] == torch.unique(labels)[None]).double()


def _centred(kernel: Tensor) -> Tensor:
    kernel = kernel - kernel.mean(0, keepdim=True)
    return kernel - kernel.mean(1, keepdim=True)
