"""Random calls of the NTK's operators of linear layers, for `random_calls`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jachess_ext import ops
from python_tests.ops.ntk_sides import BOUNDS, Side, gradients

if TYPE_CHECKING:
    from python_tests.ops.random_calls import Maker


@dataclass(frozen=True)
class NTKCall:
    """One call: sides are inputs [N, T, d] and cotangents [C, N, T, e] of every layer.

    Attributes:
        left: whose kernel it is.
        right: with whom; None: with itself.
        settings: the operator's further arguments.
    """

    name: str
    left: Side
    right: Side | None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        return self.left[0]

    def result(self) -> Tensor:
        sides = [*self.left, *(self.right or ())]
        found = getattr(ops, self.name)(*sides, **self.settings)
        assert isinstance(found, Tensor)
        return found

    def scaled(self, factor: float) -> NTKCall:
        """Both sides' inputs times a factor."""
        right = None if self.right is None else (self.right[0] * factor, self.right[1])
        return replace(self, left=(self.left[0] * factor, self.left[1]), right=right)

    def check(self, values: str, special: Callable[[torch.dtype], Any] | None) -> None:
        """Raises:
        AssertionError: the operator's answer is wrong.
        """
        if special is not None:
            self._check_containment(values, special(self.first.dtype))
            return
        found = self.result()
        assert torch.equal(found, self.result()), "another result the second time"
        if self.right is None:
            assert torch.equal(found, found.permute(2, 3, 0, 1)), "not symmetric"
        left = gradients(self.left)
        right = left if self.right is None else gradients(self.right)
        wanted = torch.einsum("cnp,dmp->cndm", left, right)
        wide = torch.float64 if self.first.dtype == torch.float64 else torch.float32
        assert found.shape == wanted.shape and found.dtype == wide
        if values == "ordinary" and wanted.numel():
            # ⟨g, g'⟩ of two samples cancels; ‖g‖ ‖g'‖ does not
            size = float(left.norm(dim=-1).max() * right.norm(dim=-1).max())
            error = float((found.double() - wanted).abs().max())
            assert error <= BOUNDS[self.first.dtype] * max(size, 1e-12), f"error {error:.2e}"

    def _check_containment(self, values: str, bad: float) -> None:
        """The first number of sample 0 is spoilt: kernels without sample 0 stay as they are."""
        inputs, deltas = self.left
        if not inputs.numel():
            return
        spoilt = inputs.clone(memory_format=torch.contiguous_format)
        spoilt[0, 0, 0] = bad
        clean, dirty = self.result(), replace(self, left=(spoilt, deltas)).result()
        rest = [kernel[:, 1:] for kernel in (clean, dirty)]
        if self.right is None:
            rest = [kernel[..., 1:] for kernel in rest]
        assert torch.equal(*rest), "another sample's kernel has changed"
        used = any(bool(delta[:, 0, 0].any()) for delta in deltas)
        if not used:
            assert torch.equal(clean, dirty), "a position without cotangents counts"
        elif values == "nan" and self.right is None:
            assert dirty[:, 0, :, 0].isnan().any(), "the NaN is lost"


def _count(m: Maker, largest: int) -> int:
    """As `Maker.size`, but rarely zero: of some ten sizes a call's kernel needs all."""
    return m.choose.choice([m.size(largest), *(m.choose.randint(1, largest) for _ in range(4))])


def _side(m: Maker, samples: int, outputs: int, features: int, widths: list[int]) -> Side:
    positions = _count(m, m.choose.choice([12, 150]))
    inputs = m.strided(m.numbers([samples, positions, features]))
    padded = torch.rand(samples, positions, 1, generator=m.generator) < m.choose.choice([0.0, 0.4])
    deltas = [
        m.strided(m.numbers([outputs, samples, positions, e]).masked_fill(padded, 0))
        for e in widths
    ]
    return inputs, deltas


def _maker(name: str) -> Callable[[Maker], NTKCall]:
    def make(m: Maker) -> NTKCall:
        outputs, features = m.choose.choice([1, 1, 2, 3]), _count(m, 70)
        widths = [_count(m, 60) for _ in range(m.choose.randint(1, 3))]
        sides = [_side(m, _count(m, 40), outputs, features, widths) for _ in range(2)]
        settings: dict[str, Any] = {}
        if name == "ntk_materialised":
            settings["workspace"] = m.choose.choice([1, 4096, 2**27])
        return NTKCall(name, sides[0], m.choose.choice([None, sides[1]]), settings)

    return make


NTK_MAKERS = {name: _maker(name) for name in ("ntk_gram", "ntk_materialised")}
