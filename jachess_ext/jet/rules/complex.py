"""Complex numbers: into them, out of them, and Fourier transforms.

All but the modulus and the angle are linear over the real numbers, so the same on every stream.
What else takes complex jets is listed in `complex_numbers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..registry import attribute, find_rule, jet_rule
from ..tensor import JetTensor
from .reduce import euclidean_norm
from .streamwise import behind_streams, behind_streams_all, lifted_streams, varargs

_PARTS = ("real", "imag", "conj", "conj_physical", "resolve_conj", "resolve_neg")


def _part(function: Callable, *others: Any) -> None:
    @jet_rule(function, *others)
    def rule(input: JetTensor) -> JetTensor:
        return input.with_streams(function(input.streams))


for _name in _PARTS:
    _part(getattr(torch, _name), getattr(Tensor, _name, getattr(torch, _name)))
for _name in ("real", "imag"):
    _part(getattr(torch, _name), attribute(_name))
_part(torch.adjoint, "adjoint", attribute("mH"), attribute("H"))
_part(torch.view_as_real, "view_as_real")


@jet_rule("view_as_complex")
def view_as_complex(input: JetTensor) -> JetTensor:
    streams = input.streams
    *others, last = streams.stride()
    if last != 1 or any(stride % 2 for stride in (*others, streams.storage_offset())):
        streams = streams.contiguous()  # the streams lie an odd number of entries apart
    return input.with_streams(torch.view_as_complex(streams))


@jet_rule("complex")
def complex_(real: Any, imag: Any) -> JetTensor:
    parts = torch.broadcast_tensors(real, imag)
    torch.complex(*(part[:0].detach() if part.ndim else part.detach() for part in parts))
    stacks, jet = lifted_streams(parts)
    return jet.with_streams(torch.complex(*stacks))


@jet_rule("polar")
def polar(abs: Any, angle: Any) -> Any:
    return torch.complex(abs * torch.cos(angle), abs * torch.sin(angle))


def _cast_to(name: str) -> None:
    @jet_rule(name)
    def rule(self: JetTensor, **named: Any) -> JetTensor:
        return self.with_streams(getattr(self.streams, name)())


for _name in ("cfloat", "cdouble"):
    _cast_to(_name)


def _modulus(name: str) -> None:
    of_real = find_rule(getattr(Tensor, name))
    assert of_real is not None

    @jet_rule(name)
    def rule(input: JetTensor) -> Any:
        """Of complex numbers a norm: no derivative at 0 (`euclidean_norm`)."""
        if not input.dtype.is_complex:
            return of_real(input)
        return euclidean_norm(torch.view_as_real(input), -1)


for _name in ("abs", "absolute", "__abs__"):
    _modulus(_name)


# ---- Fourier transforms ------------------------------------------------------------------------


def _transform(name: str, default: Any) -> None:
    function: Callable = getattr(torch.fft, name)
    size = "n" if isinstance(default, int) else "s"

    @jet_rule(function)
    def rule(input: JetTensor, *args: Any, **named: Any) -> JetTensor:
        given = dict(zip((size, "dim", "norm"), args, strict=False)) | named
        sizes, dim = given.get(size), given.get("dim", default)
        if dim is None:
            dim = range(-(input.ndim if sizes is None else len(sizes)), 0)
        place: Any
        if isinstance(dim, int):
            place = behind_streams(dim, input.ndim)
        else:
            place = behind_streams_all(list(dim), input.ndim)
        return input.with_streams(function(input.streams, sizes, place, given.get("norm")))


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    _transform(_name, -1)
    _transform(f"{_name}2", (-2, -1))
    _transform(f"{_name}n", None)


def _shift(function: Callable) -> None:
    @jet_rule(function)
    def rule(input: JetTensor, dim: Any = None) -> JetTensor:
        dims = range(-input.ndim, 0) if dim is None else varargs(dim)
        return input.with_streams(function(input.streams, behind_streams_all(dims, input.ndim)))


_shift(torch.fft.fftshift)
_shift(torch.fft.ifftshift)
