"""Deferred jets: every spelling reaches its operator, gives what the composed rules give, and
nothing that happens in between can make the result wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jachess_ext as jx
from jachess_ext import ops
from jachess_ext.jet import composed_rules
from python_tests.jet.counted_dropout import attention_with_counted_dropout

pytestmark = pytest.mark.skipif(
    not ops.available("rms_norm_jet", "cpu"), reason="the compiled operators are missing"
)
WEIGHT = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)


def llama_norm(x: Tensor) -> Tensor:
    dtype = x.dtype
    wide = x.to(torch.float32) if dtype == torch.bfloat16 else x
    variance = wide.pow(2).mean(-1, keepdim=True)
    return WEIGHT.to(dtype) * (wide * torch.rsqrt(variance + 1e-6)).to(dtype)


def t5_norm(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype == torch.bfloat16 else x
    variance = wide.pow(2).mean(-1, keepdim=True)
    return WEIGHT.to(x.dtype) * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def gemma_norm(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype == torch.bfloat16 else x
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + WEIGHT.to(out.dtype))).type_as(x)


def gemma3n_norm(x: Tensor) -> Tensor:
    return x * torch.pow(torch.mean(torch.square(x), dim=-1, keepdim=True) + 1e-6, -0.5)


def functional_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (6,), WEIGHT.to(x.dtype), 1e-6)


def pre_norm_block(x: Tensor) -> Tensor:
    """The residual stream is used twice: normalised, and added to."""
    stream = x + torch.tanh(x)
    mixed = torch.matmul(llama_norm(stream), torch.diag(WEIGHT).to(x.dtype))
    return stream + mixed


def post_norm_block(x: Tensor) -> Tensor:
    return F.layer_norm(x + torch.tanh(x), (6,), WEIGHT.to(x.dtype), 1 - WEIGHT.to(x.dtype))


def gated(x: Tensor) -> Tensor:
    return F.silu(2 * x) * torch.sin(x)


def gated_from_the_right(x: Tensor) -> Tensor:
    return torch.sin(x) * F.gelu(2 * x, approximate="tanh")


def gated_chunks(x: Tensor) -> Tensor:
    up, gate = torch.cat([x, 2 * x], -1).chunk(2, dim=-1)
    return up * torch.nn.SiLU()(gate)


SPELLINGS: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (llama_norm, "rms_norm_jet"),
    (t5_norm, "rms_norm_jet"),
    (gemma_norm, "rms_norm_jet"),
    (gemma3n_norm, "rms_norm_jet"),
    (functional_norm, "rms_norm_jet"),
    (pre_norm_block, "add_rms_norm_jet"),
    (post_norm_block, "add_layer_norm_jet"),
    (gated, "gated_activation_jet"),
    (gated_from_the_right, "gated_activation_jet"),
    (gated_chunks, "gated_activation_jet"),
]


def assert_alike(
    function: Callable[[Tensor], Tensor], x: Tensor, directions: Tensor, order: int = 2
) -> Tensor:
    """Compare a jet with that of the composed rules; return its streams."""
    fused = jx.jet(function, x, directions, order).streams
    with composed_rules():
        composed = jx.jet(function, x, directions, order).streams
    torch.testing.assert_close(fused, composed, rtol=1e-11, atol=1e-12)
    return fused


def point(dtype: torch.dtype = torch.float64, q: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(2, 5, 6).to(dtype), torch.randn(q, 2, 5, 6).to(dtype)


@pytest.mark.parametrize("function, operator", SPELLINGS)
@pytest.mark.parametrize("order", [1, 2])
def test_spelling_reaches_its_operator(
    function: Callable[[Tensor], Tensor], operator: str, order: int
) -> None:
    x, directions = point()
    with mock.patch.object(ops, operator, wraps=getattr(ops, operator)) as called:
        fused = assert_alike(function, x, directions, order)
    assert called.call_count == 1
    torch.testing.assert_close(fused[0], function(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function, operator", SPELLINGS)
def test_gradients_are_those_of_the_composed_rules(
    function: Callable[[Tensor], Tensor], operator: str
) -> None:
    x, directions = point()
    torch.manual_seed(5)
    weights = torch.randn(7, 2, 5, 6, dtype=torch.float64)

    def gradients() -> tuple[Tensor, ...]:
        inputs = (x.clone().requires_grad_(), directions.clone().requires_grad_())
        out = jx.jet(function, *inputs)
        return torch.autograd.grad((out.streams * weights).sum(), inputs)

    fused = gradients()
    with composed_rules():
        composed = gradients()
    torch.testing.assert_close(fused, composed, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("function, operator", SPELLINGS)
def test_bfloat16_keeps_its_dtype_and_is_no_worse_than_composed(
    function: Callable[[Tensor], Tensor], operator: str
) -> None:
    """Over enough tokens that one rounding more or less does not decide."""
    torch.manual_seed(4)
    x, directions = torch.randn(40, 5, 6).bfloat16(), torch.randn(3, 40, 5, 6).bfloat16()
    exact = jx.jet(function, x.double(), directions.double()).streams
    fused = jx.jet(function, x, directions).streams
    with composed_rules():
        composed = jx.jet(function, x, directions).streams
    assert fused.dtype == composed.dtype == torch.bfloat16
    ours, theirs = (float((found.double() - exact).norm()) for found in (fused, composed))
    assert ours < 1e-2 * exact.norm() and ours < 1.02 * theirs


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "T5LayerNorm", "GemmaRMSNorm"])
def test_norms_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    family = name.removesuffix("RMSNorm").removesuffix("LayerNorm").lower()
    models = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
    assert transformers
    norm = getattr(models, name)(6).double()
    torch.nn.init.normal_(norm.weight)
    x, directions = point()

    class Float64Casts(torch.overrides.TorchFunctionMode):
        """These classes cast to float32; in float64 the comparison is sharp."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            func = torch.Tensor.double if func is torch.Tensor.float else func
            return func(*args, **(kwargs or {}))

    with Float64Casts(), mock.patch.object(ops, "rms_norm_jet", wraps=ops.rms_norm_jet) as called:
        assert_alike(norm, x, directions)
    assert called.call_count == 1


@pytest.mark.parametrize("name", ["to", "to keyword", "float", "type_as"])
def test_a_cast_that_meets_something_else(name: str) -> None:
    x, directions = point(torch.bfloat16)
    other = torch.linspace(0, 1, 6)
    cast: dict[str, Callable[[Tensor], Tensor]] = {
        "to": lambda x: x.to(torch.float32),
        "to keyword": lambda x: x.to(dtype=torch.float32),
        "float": lambda x: x.float(),
        "type_as": lambda x: x.type_as(other),
    }
    out = jx.jet(lambda x: cast[name](x) * other, x, directions).streams
    expected = jx.jet(lambda x: x * other, x.float(), directions.float()).streams
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


NOT_A_NORM: dict[str, Callable[[Tensor], Tensor]] = {
    "another tensor's mean": lambda x: x * torch.rsqrt((2 * x).pow(2).mean(-1, keepdim=True) + 1),
    "another dimension": lambda x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1),
    "no keepdim": lambda x: torch.rsqrt(x.pow(2).mean(-1) + 1),
    "a cube": lambda x: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1),
    "the variance used again": lambda x: (lambda v: x * torch.rsqrt(v + 1) + v)(
        x.pow(2).mean(-1, keepdim=True)
    ),
    "a square used alone": lambda x: x.pow(2),
    "two weights": lambda x: WEIGHT * llama_norm(x),
    "a weight a row": lambda x: torch.arange(5.0).double()[:, None] * gemma3n_norm(x),
    "an activation of its own product": lambda x: (lambda a: a * a)(torch.tanh(x)),
    "two activations": lambda x: torch.tanh(x) * torch.sigmoid(2 * x),
    "an activation used twice": lambda x: (lambda a: a * x + a)(F.gelu(x)),
    "a broadcast gate": lambda x: F.silu(x[..., :1]) * x,
    "a sum of sums": lambda x: (x + torch.sin(x)) + (x + torch.cos(x)),
}


@pytest.mark.parametrize("name", NOT_A_NORM)
def test_spellings_that_only_begin_alike(name: str) -> None:
    assert_alike(NOT_A_NORM[name], *point())


def written_to_in_between(x: Tensor) -> Tensor:
    y = torch.sin(x)
    total = y + x
    gate = F.silu(y)
    y += 1.0
    return F.layer_norm(total, (6,)) * gate + y


def a_view_written_to_in_between(x: Tensor) -> Tensor:
    y = torch.sin(x)
    total = y + x
    y[..., :2] = 0
    y.view(-1).mul_(2)
    return F.layer_norm(total, (6,)) + y


@pytest.mark.parametrize("function", [written_to_in_between, a_view_written_to_in_between])
def test_a_write_in_between_changes_nothing_before_it(function: Callable) -> None:
    x, directions = point()
    fused = assert_alike(function, x, directions)
    torch.testing.assert_close(fused[0], function(x), rtol=1e-12, atol=1e-12)


def test_a_write_that_no_rule_sees_is_an_error() -> None:
    x, directions = point()
    weight = WEIGHT.clone()

    def changed(x: Tensor) -> Tensor:
        out = weight * gemma3n_norm(x)
        with torch._C.DisableTorchFunctionSubclass():
            x.streams.mul_(2)  # type: ignore[attr-defined]
        return out

    with pytest.raises(RuntimeError, match="changed in place"):
        jx.jet(changed, x.clone(), directions)


def _without_gradients(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return function(x)


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)


def _normed_and_scaled(x: Tensor) -> Tensor:
    """The norm carries gradients, the inverse root in the middle of its spelling does not."""
    square = x.pow(2)
    return x * _without_gradients(lambda s: torch.rsqrt(s.mean(-1, keepdim=True) + 0.1), square)


def _gate_asked_without_gradients(x: Tensor) -> Tensor:
    activated = F.silu(2 * x)
    return _without_gradients(lambda a: a * torch.sin(x), activated) + activated


HALF_DETACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda x: F.layer_norm(_without_gradients(lambda x: x + torch.sin(x), x), (6,)) + x,
    "a gate": lambda x: _without_gradients(F.silu, 2 * x) * torch.sin(x),
    "the gate's product": _gate_asked_without_gradients,
    "an inverse root": lambda x: x * _without_gradients(_inverse_rms, x),
    "the middle of a norm": _normed_and_scaled,
    "a norm before its weight": lambda x: _without_gradients(gemma3n_norm, x) * WEIGHT + x,
}


@pytest.mark.parametrize("name", HALF_DETACHED)
def test_no_grad_inside_the_function_keeps_its_meaning(name: str) -> None:
    """Of Σ ‖f + D²f‖² with and without fusion; of Σ f² also as autograd has it, without a jet."""
    x, directions = point()
    x.requires_grad_()
    function = HALF_DETACHED[name]

    def gradients() -> tuple[Tensor, Tensor]:
        streams = jx.jet(function, x, directions).streams
        (of_all,) = torch.autograd.grad(streams.square().sum(), x, retain_graph=True)
        (of_primal,) = torch.autograd.grad(streams[0].square().sum(), x)
        return of_all, of_primal

    fused = gradients()
    with composed_rules():
        composed = gradients()
    (plain,) = torch.autograd.grad(function(x).square().sum(), x)
    torch.testing.assert_close(fused, composed, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(fused[1], plain, rtol=1e-10, atol=1e-11)


def test_deferred_jets_answer_questions_about_themselves() -> None:
    x, directions = point()
    seen: list[Any] = []

    def asked(x: Tensor) -> Tensor:
        total = x + torch.sin(x)
        seen.extend([total.shape, total.dtype, total.device, total.ndim, len(total), total.size(1)])
        seen.append(total.is_contiguous())
        return total

    jx.jet(asked, x, directions)
    assert seen == [(2, 5, 6), torch.float64, x.device, 3, 2, 5, True]


@pytest.mark.parametrize("causal", [False, True])
def test_repeated_key_heads_are_not_copied(causal: bool) -> None:
    torch.manual_seed(6)
    x, directions = torch.randn(2, 4, 5, 6).double(), torch.randn(2, 2, 4, 5, 6).double()

    def attend(query: Tensor) -> Tensor:
        key = torch.sin(query[:, :2])
        value = torch.cos(query[:, :2])
        key, value = (t[:, :, None].expand(2, 2, 2, 5, 6).reshape(2, 4, 5, 6) for t in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    with mock.patch.object(ops, "attention_jet", wraps=ops.attention_jet) as called:
        assert_alike(attend, x, directions)
    if ops.available("attention_jet", "cpu"):
        assert called.call_args.args[1].shape == (4, 2, 2, 5, 6)


def test_dropout_in_attention_is_the_counted_mask() -> None:
    """The seed comes from torch's generator; weights, mask and values by the formula."""
    torch.manual_seed(6)
    x, directions = torch.randn(2, 2, 5, 6).double(), torch.randn(2, 2, 2, 5, 6).double()

    def attend(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return F.scaled_dot_product_attention(x, torch.sin(x), torch.cos(x), dropout_p=0.4)

    def written_out(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return attention_with_counted_dropout(x, torch.sin(x), torch.cos(x), dropout_p=0.4)

    fused = jx.jet(attend, x, directions)
    with composed_rules():
        expected = jx.jet(written_out, x, directions)
        torchs_mask = jx.jet(attend, x, directions)
    torch.testing.assert_close(fused.streams, expected.streams, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torchs_mask.primal, attend(x), rtol=1e-12, atol=1e-12)
