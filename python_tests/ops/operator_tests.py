"""Tests of any operator on jets, which a test file inherits for its cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from jachess_ext.ops import library
from python_tests.operators import OPERATORS
from python_tests.ops.cases import (
    DEVICES,
    STREAMS,
    STREAMS_AND_DTYPES,
    TRACED,
    jet_by_differences,
    opcheck_backward,
    random_jet,
    relative_error,
    same_for_any_threads,
)


@dataclass(frozen=True)
class Case:
    """An operator with its settings, as a function of differentiable tensors.

    Attributes:
        name: the wrapper in `jachess_ext.ops`.
        leaves: returns jets [streams, *shape], then parameters, from (streams, *shape, dtype=,
            device=).
        of_torch: torch's own function of the jets' primals and the parameters.
        shapes: shapes without streams that are compared with the reference.
        bounds: largest relative error against the reference in float64, by dtype.
        operator: returns the arguments of the compiled operator, from (q, *leaves).
        settings: returns the operator's settings, from its first jet; else they are the table's.
        fast_gradients: check gradients along random directions alone.
        registration: dtypes in which `torch.library.opcheck` is run.
    """

    name: str
    leaves: Callable[..., list[Tensor]]
    of_torch: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    bounds: dict[torch.dtype, float]
    operator: Callable[..., tuple[Any, ...]]
    settings: Callable[[Tensor], dict[str, Any]]
    fast_gradients: bool = False
    registration: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)

    def results(self, ending: str, q: int, *leaves: Tensor) -> tuple[Tensor, ...]:
        """The results of the wrapper, or of its reference where `ending` is "_reference"."""
        settings = self.settings(leaves[0])
        results = OPERATORS[self.name](*leaves, q=q, ending=ending, **settings)
        return results if isinstance(results, tuple) else (results,)

    @property
    def jets(self) -> int:
        """The number of leaves that are jets."""
        return len(OPERATORS[self.name].jets)

    def error(self, number: int, got: Tensor, expected: Tensor) -> float:
        """The error of a leaf's gradient: a jet's by stream, a parameter's as a whole."""
        if number < self.jets:
            return relative_error(got, expected)
        return relative_error(got[None], expected[None])

    def with_gradients(self, leaves: Sequence[Tensor], q: int) -> list[Tensor]:
        results = self.results("", q, *leaves)
        cotangents = [random_jet(*y.shape, seed=9).to(y) for y in results]
        return [*results, *torch.autograd.grad(results, leaves, cotangents)]


def requiring(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.detach().requires_grad_() for leaf in leaves]


class OperatorTests:
    """Tests of the fixture `case`, which the file defines."""

    def test_is_available(self, case: Case) -> None:
        operator = case.name.removeprefix("add_")
        assert ops.available(operator, "cpu")
        assert ops.available(f"{operator}_backward", torch.device("cpu"))

    @pytest.mark.parametrize(("q", "streams"), STREAMS)
    def test_agrees_with_finite_differences(self, case: Case, q: int, streams: int) -> None:
        """Several jets are one, of all their numbers."""
        leaves = case.leaves(streams, 5, 19)
        jets, parameters = leaves[: case.jets], leaves[case.jets :]

        def of_all(point: Tensor) -> Tensor:
            parts = [part.view(5, 19) for part in point.chunk(case.jets)]
            return case.of_torch(*parts, *parameters)

        expected = jet_by_differences(of_all, torch.cat([x.flatten(1) for x in jets], 1), q)
        for ending in ("", "_reference"):
            y, *sums = case.results(ending, q, *leaves)
            assert relative_error(y, expected) < 1e-7
            assert all(torch.equal(total, jets[0] + jets[1]) for total in sums)

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize(("q", "streams", "dtype"), STREAMS_AND_DTYPES)
    def test_agrees_with_the_reference(
        self, case: Case, device: str, q: int, streams: int, dtype: torch.dtype
    ) -> None:
        """Results and all gradients, against the reference in float64."""
        bound = case.bounds[dtype]
        for shape in case.shapes:
            leaves = requiring(case.leaves(streams, *shape, dtype=dtype, device=device))
            results = case.results("", q, *leaves)
            wide = requiring([leaf.double() for leaf in leaves])
            expected = case.results("_reference", q, *wide)
            cotangents = [random_jet(*y.shape, seed=1).to(y) for y in results]
            got = torch.autograd.grad(results, leaves, cotangents)
            wanted = torch.autograd.grad(expected, wide, [c.double() for c in cotangents])
            for y, e in zip(results, expected, strict=True):
                assert y.dtype == dtype and y.is_contiguous()
                assert relative_error(y, e) < bound
            for n, (leaf, g, w) in enumerate(zip(leaves, got, wanted, strict=True)):
                assert g.dtype == leaf.dtype
                assert case.error(n, g, w) < bound

    @pytest.mark.parametrize(("q", "streams"), [(3, 7), (4, 5)])
    def test_passes_of_two_directions_agree(
        self, case: Case, q: int, streams: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Results and gradients of three or four directions, as GPUs make them."""
        leaves = requiring(case.leaves(streams, 5, 19))
        at_once = case.with_gradients(leaves, q)
        passes = Mock(wraps=library._passes)
        monkeypatch.setattr(library, "_passes", passes)
        monkeypatch.setattr(library, "IN_PASSES", ("cpu",))
        for got, wanted in zip(case.with_gradients(leaves, q), at_once, strict=True):
            torch.testing.assert_close(got, wanted)
            assert got.is_contiguous()
        passes.assert_called_once()

    @pytest.mark.parametrize(("q", "streams"), [(1, 2), (2, 4), (3, 7)])
    def test_gradients(self, case: Case, q: int, streams: int) -> None:
        leaves = requiring(case.leaves(streams, 1, 3))
        function = partial(case.results, "", q)
        fast = case.fast_gradients or streams > 5
        assert torch.autograd.gradcheck(function, leaves, fast_mode=fast)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=fast)

    def test_gradient_of_one_input_alone(self, case: Case) -> None:
        """Also the second derivative, whose cotangent then reaches only one of the gradients."""
        constants = case.leaves(4, 3, 9)
        for n, constant in enumerate(constants):
            leaf = constant.clone().requires_grad_()
            inputs = [*constants[:n], leaf, *constants[n + 1 :]]

            def derivatives(ending: str, inputs: list = inputs, leaf: Tensor = leaf) -> list:
                y = case.results(ending, 2, *inputs)[0]
                (first,) = torch.autograd.grad(y.pow(3).sum(), leaf, create_graph=True)
                return [first.detach(), *torch.autograd.grad(first.square().sum(), leaf)]

            for got, expected in zip(derivatives(""), derivatives("_reference"), strict=True):
                torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_strides(self, case: Case, device: str, dtype: torch.dtype) -> None:
        wide = case.leaves(8, 6, 12, dtype=dtype, device=device)
        parameters = [p[::2] for p in wide[case.jets :]]
        for view in (
            lambda x: x[::2, :, :6],
            lambda x: x[:4, :, ::2],
            lambda x: x[:4, :, :6].transpose(1, 2),
            lambda x: x[:1, :, 6:].expand(4, 6, 6),
        ):
            leaves = [*(view(x) for x in wide[: case.jets]), *parameters]
            got = case.with_gradients(requiring(leaves), 2)
            dense = case.with_gradients(requiring([leaf.contiguous() for leaf in leaves]), 2)
            assert all(torch.equal(a, b) for a, b in zip(got, dense, strict=True))

    @pytest.mark.parametrize("device", DEVICES)
    def test_empty(self, case: Case, device: str) -> None:
        for shape in ((0, 6), (3, 0)):
            leaves = requiring(case.leaves(4, *shape, dtype=torch.float32, device=device))
            results = case.results("", 2, *leaves)
            assert all(y.shape == (4, *shape) for y in results)
            gradients = torch.autograd.grad(sum(y.sum() for y in results), leaves)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                assert gradient.shape == leaf.shape and not gradient.any()

    def test_same_run_to_run(self, case: Case) -> None:
        leaves = requiring(case.leaves(4, 301, 64, dtype=torch.float32))
        assert same_for_any_threads(lambda: case.with_gradients(leaves, 2))

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("traced", TRACED)
    def test_opcheck(self, case: Case, device: str, dtype: torch.dtype, traced: bool) -> None:
        """Of the backward operator, too; those of the norms take what the forward saved."""
        if dtype not in case.registration:
            return  # another case of this operator is checked in it
        leaves = requiring(case.leaves(4, 3, 5, dtype=dtype, device=device))
        name = case.name.removeprefix("add_")
        arguments = case.operator(2, *leaves)
        torch.library.opcheck(getattr(torch.ops.jachess, name), arguments)
        backward = getattr(torch.ops.jachess, f"{name}_backward")
        gy = random_jet(4, 3, 5, dtype=dtype, device=device, seed=1)
        if not name.endswith("norm_jet"):
            opcheck_backward(backward, (gy.requires_grad_(), *arguments), traced)
            return
        x, residual, weight, *_ = arguments
        with torch.no_grad():
            _, _, *saved = getattr(torch.ops.jachess, name)(x, None, *arguments[2:])
        need_weight = dtype == torch.float32
        arguments = (gy, residual, x, weight, *arguments[-2:], *saved, need_weight)
        opcheck_backward(backward, arguments, traced)

    @pytest.mark.slow
    @pytest.mark.parametrize("device", DEVICES)
    def test_compiles_to_one_graph(self, case: Case, device: str) -> None:
        def loss(*leaves: Tensor) -> Any:
            return sum(y.square().sum() for y in case.results("", 2, 2 * leaves[0], *leaves[1:]))

        leaves = requiring(case.leaves(4, 8, 16, dtype=torch.float32, device=device))
        eager = torch.autograd.grad(loss(*leaves), leaves)
        torch._dynamo.reset()
        compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
        for a, b in zip(compiled, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * math.sqrt(len(b)))
