"""Frozen quantised layers of bitsandbytes and torchao, against the same model with plain ones.

The oracle holds the dequantised weights in `nn.Linear` and differentiates by autograd twice, so it
shares nothing with the engine or with the libraries' products.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext.jet import MissingJetRule
from python_tests.models.oracles import Float64Casts, parameter_difference, relative_error
from python_tests.models.zoo import FAMILIES, build_model, case_of

SIZE = 64  # bitsandbytes quantises in blocks of 64 values

Derivatives = tuple[Tensor, Tensor]


def _bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def _torchao() -> Any:
    return pytest.importorskip("torchao.quantization", reason="torchao is not installed")


class _Net(nn.Module):
    """Curved between two linear layers, so that second derivatives reach through both."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def _plain_net(seed: int = 0) -> _Net:
    torch.manual_seed(seed)
    return _Net(nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE))


def _replace_linear(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, make(child))
        else:
            _replace_linear(child, make)
    return module


def _four_bit(layer: nn.Linear, dtype: torch.dtype = torch.float64, nested: bool = False) -> Any:
    bnb = _bitsandbytes()
    new = bnb.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        layer.bias is not None,
        compute_dtype=dtype,
        quant_type="nf4",
        compress_statistics=nested,
    )
    new.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    new = new.to("cpu")  # quantises
    assert new.weight.dtype == torch.uint8
    return new


def _four_bit_in_float32(layer: nn.Linear) -> Any:
    return _four_bit(layer, torch.float32)


def _eight_bit(layer: nn.Linear) -> Any:
    bnb = _bitsandbytes()
    new = bnb.nn.Linear8bitLt(
        layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False
    )
    new.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    new = new.to("cpu")
    assert new.weight.dtype == torch.int8
    return new


def _dequantised(layer: Any) -> nn.Linear:
    """A plain float64 layer with the values that the quantised one stands for."""
    bnb = _bitsandbytes()
    if isinstance(layer, bnb.nn.Linear4bit):
        weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    else:
        scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
        weight = layer.weight.data.double() * scales.double().unsqueeze(1) / 127
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None).double()
    with torch.no_grad():
        plain.weight.copy_(weight)
        if layer.bias is not None:
            plain.bias.copy_(layer.bias)
    return plain


def _dequantised_net(net: _Net) -> _Net:
    return _Net(_dequantised(net.first), _dequantised(net.second))


def _by_reverse(
    function: Callable[[Tensor], Tensor], x: Tensor, u: Tensor, w: Tensor, v: Tensor
) -> Derivatives:
    """``v · J u`` and ``v · D²f[u, w]``, differentiable with respect to x and to parameters."""
    (gradient,) = torch.autograd.grad((v * function(x)).sum(), x, create_graph=True)
    along_u = (gradient * u).sum()
    (product,) = torch.autograd.grad(along_u, x, create_graph=True)
    return along_u, (product * w).sum()


def _by_jet(
    function: Callable[[Tensor], Tensor], x: Tensor, u: Tensor, w: Tensor, v: Tensor
) -> Derivatives:
    jet = jx.jet(function, x, torch.stack([u, w]))
    return (v * jet.first[0]).sum(), (v * jet.second[0]).sum()


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, u, w ``[2, 3, SIZE]`` and a cotangent v of the same shape."""
    torch.manual_seed(1)
    x, u, w, v = torch.randn(4, 2, 3, SIZE, dtype=torch.float64).to(dtype)
    return x, u, w, v


def _assert_same_derivatives(
    quantised: nn.Module, plain: nn.Module, tolerance: float, dtype: torch.dtype = torch.float64
) -> None:
    """Values, first and second derivatives, and their gradients to x and to trained biases."""
    x, u, w, v = _inputs()
    reference, point = x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    expected = _by_reverse(plain, reference, u, w, v)
    actual = _by_jet(quantised, point, *(t.to(dtype) for t in (u, w, v)))
    for a, e in zip(actual, expected, strict=True):
        assert abs(a.item() - e.item()) <= tolerance * abs(e.item())
    value = jx.jet(quantised, point, u.to(dtype).unsqueeze(0)).primal
    assert relative_error(value.double(), plain(x)) < tolerance
    sum(expected).backward()  # type: ignore[union-attr]
    sum(actual).backward()  # type: ignore[union-attr]
    assert point.grad is not None and reference.grad is not None
    assert relative_error(point.grad.double(), reference.grad) < tolerance
    for ours, theirs in zip(quantised.children(), plain.children(), strict=True):
        if ours.bias.requires_grad:
            assert relative_error(ours.bias.grad.double(), theirs.bias.grad) < tolerance


@pytest.mark.parametrize(
    "dtype, tolerance, nested", [(torch.float64, 1e-12, True), (torch.float32, 2e-5, False)]
)
def test_four_bit(dtype: torch.dtype, tolerance: float, nested: bool) -> None:
    net = _plain_net()
    _replace_linear(net, lambda layer: _four_bit(layer, dtype, nested))
    _assert_same_derivatives(net, _dequantised_net(net), tolerance, dtype)


def test_four_bit_without_gradients() -> None:
    """Another path of the library, an operator instead of an autograd Function."""
    net = _plain_net()
    _replace_linear(net, _four_bit)
    plain = _dequantised_net(net)
    x, u, w, v = _inputs()
    with torch.no_grad():
        actual = _by_jet(net, x, u, w, v)
    expected = _by_reverse(plain, x.requires_grad_(), u, w, v)
    for a, e in zip(actual, expected, strict=True):
        assert a.item() == pytest.approx(e.item(), rel=1e-12)


def test_four_bit_repacked_by_the_library() -> None:
    """For AVX-512 CPUs evaluation without gradients repacks the weight, with bfloat16 scales."""
    bnb = _bitsandbytes()
    if not bnb.functional.has_avx512bf16():
        pytest.skip("bitsandbytes repacks weights on CPUs with avx512_bf16 alone")
    net = _plain_net()
    _replace_linear(net, _four_bit_in_float32)
    plain = _dequantised_net(net)
    x, u, w, v = _inputs()
    net.eval()
    with torch.no_grad():
        value = net(x.float())
    assert net.first.weight.quant_state.packing_format_for_cpu
    jet = jx.jet(net, x.float(), torch.stack([u, w]).float())
    assert relative_error(jet.primal, value) < 0.02
    assert relative_error(jet.primal.double(), plain(x)) < 0.01
    expected = _by_reverse(plain, x.requires_grad_(), u, w, v)
    for stream, e in zip((jet.first[0], jet.second[0]), expected, strict=True):
        assert ((v * stream).sum() - e).abs() < 0.01 * v.norm() * stream.norm()


def test_eight_bit_in_training() -> None:
    """On a CPU the library then leaves the input as it is."""
    net = _plain_net()
    _replace_linear(net, _eight_bit)
    _assert_same_derivatives(net.train(), _dequantised_net(net), 1e-6)


def test_eight_bit_in_evaluation_has_the_librarys_value_and_unrounded_derivatives() -> None:
    layer = _eight_bit(nn.Linear(SIZE, 2 * SIZE)).eval()
    plain = _dequantised(layer)
    x, u, w, _ = _inputs()
    jet = jx.jet(layer, x, torch.stack([u, w]))
    assert torch.equal(jet.primal, layer(x))
    assert relative_error(jet.primal, plain(x)) > 1e-4, "the library did not round the input"
    for tangent, direction in zip(jet.first, (u, w), strict=True):
        assert relative_error(tangent, F.linear(direction, plain.weight)) < 1e-7
    assert not jet.second.any()


class _Float64Casts(Float64Casts):
    """bitsandbytes' operators say float32 themselves, and return garbage if told float64."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if "bitsandbytes" in str(func):
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _lora(model: nn.Module) -> nn.Module:
    """The model with LoRA on the attention's projections; both of its matrices random."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=r".*(query|value|q_proj|v_proj)")
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


@pytest.mark.parametrize("family, make", [("bert", _eight_bit), ("llama", _four_bit)])
def test_lora_on_a_quantised_model(family: str, make: Callable) -> None:
    """Gradients to the adapter and to the input, through every layer of an unmodified model."""
    base = build_model(family, "eager")
    quantised = _replace_linear(copy.deepcopy(base), make)
    plain = _replace_by(copy.deepcopy(quantised), _dequantised)
    quantised.is_loaded_in_4bit = make is _four_bit  # as from_pretrained does
    quantised.is_loaded_in_8bit = make is _eight_bit
    # Training mode: evaluation rounds the input of 8-bit layers. Every dropout rate is zero.
    models = [_lora(model).train() for model in (quantised, plain)]
    case = case_of(base, family)
    u, w = case.directions
    x, point = nn.Parameter(case.x.clone()), nn.Parameter(case.x.clone())
    v = torch.randn_like(case.x)

    def of(model: nn.Module) -> Callable[[Tensor], Tensor]:
        named = FAMILIES[family].takes
        return lambda x: model(**{named: x, **case.extra}).last_hidden_state

    def expected_sum() -> Tensor:
        with torch.enable_grad():
            return sum(_by_reverse(of(models[1]), x, u, w, v)).detach()  # type: ignore[union-attr]

    tolerance = 1e-7 if make is _four_bit else 1e-5
    with _Float64Casts():
        actual = _by_jet(of(models[0]), point, u, w, v)
        for a, e in zip(actual, _by_reverse(of(models[1]), x, u, w, v), strict=True):
            assert a.item() == pytest.approx(e.item(), rel=tolerance)
        sum(actual).backward()  # type: ignore[union-attr]
        trained = [
            {name: p for name, p in model.named_parameters() if p.requires_grad} for model in models
        ]
        assert len(trained[0]) == 8 and all("lora_" in name for name in trained[0])
        # Differences, since autograd a third time is wrong through torch's layer norm.
        pairs = [(point, x)] + [(p, trained[1][name]) for name, p in trained[0].items()]
        norms = [ours.grad.norm().item() for ours, _ in pairs]
        across = [(theirs, torch.randn_like(theirs)) for _, theirs in pairs]
        slope = parameter_difference(expected_sum, across, 1e-4)
        actual_slope = sum(
            (ours.grad * d).sum().item() for (ours, _), (_, d) in zip(pairs, across, strict=True)
        )
        assert abs(actual_slope - slope) < 10 * tolerance * sum(norms)


def _replace_by(module: nn.Module, make: Callable[[Any], nn.Module]) -> nn.Module:
    """Every quantised layer replaced."""
    for name, child in module.named_children():
        if type(child).__name__ in ("Linear4bit", "Linear8bitLt"):
            setattr(module, name, make(child))
        else:
            _replace_by(child, make)
    return module


def _quantise_with_torchao(net: nn.Module, config: Any) -> nn.Module:
    _torchao().quantize_(net, config)
    return net.requires_grad_(False)


def _plain_from_torchao(net: _Net) -> _Net:
    plain = _plain_net().double()
    with torch.no_grad():
        for ours, theirs in ((plain.first, net.first), (plain.second, net.second)):
            ours.weight.copy_(theirs.weight.dequantize())
            ours.bias.copy_(theirs.bias)
    return plain


def _int8() -> Any:
    return _torchao().Int8WeightOnlyConfig()


def _int4() -> Any:
    per_group = pytest.importorskip("torchao.quantization.granularity").PerGroup(32)
    return _torchao().IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=per_group)


def _float8() -> Any:
    return _torchao().Float8WeightOnlyConfig()


@pytest.mark.parametrize("config", [_int8, _int4, _float8])
def test_torchao_weight_only(config: Callable[[], Any]) -> None:
    net = _quantise_with_torchao(_plain_net(), config())
    assert type(net.first.weight) is not nn.Parameter
    _assert_same_derivatives(net, _plain_from_torchao(net), 2e-5, torch.float32)
    x, u, w, v = _inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert jx.jet(net, x.float(), u.float().unsqueeze(0)).primal.dtype == torch.bfloat16
    net = _quantise_with_torchao(_plain_net().bfloat16(), config())
    plain = _plain_from_torchao(net)
    first, _ = _by_reverse(plain, x.clone().requires_grad_(), u, w, v)
    jet = jx.jet(net, x.bfloat16(), torch.stack([u, w]).bfloat16())
    assert jet.primal.dtype == torch.bfloat16
    assert relative_error(jet.primal.double(), plain(x)) < 0.01
    assert ((v * jet.first[0]).sum() - first).abs() < 0.01 * v.norm() * jet.first[0].norm()


def _saved_by(compute: Callable[[], Any]) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compute()
    return shapes


@pytest.mark.parametrize("make", [_four_bit, "torchao"])
def test_the_dequantised_weight_is_not_kept_for_the_backward(make: Any) -> None:
    net = _plain_net()
    if make == "torchao":
        net = _quantise_with_torchao(net, _int8())
    else:
        _replace_linear(net, _four_bit_in_float32)
    x, u, _, _ = _inputs(torch.float32)
    saved = _saved_by(lambda: jx.jet(net, x.requires_grad_(), u.unsqueeze(0)))
    assert saved, "nothing was recorded for a backward"
    weights = {(2 * SIZE, SIZE), (SIZE, 2 * SIZE)}
    assert not weights.intersection(saved)
    plain = _saved_by(lambda: jx.jet(_plain_net(), x, u.unsqueeze(0)))
    assert weights.issubset(plain), "this test would not notice a kept weight"


@pytest.mark.parametrize("make", [_four_bit_in_float32, _eight_bit])
def test_plain_tensors_reach_the_library_unchanged(make: Callable) -> None:
    bnb = _bitsandbytes()
    net = _plain_net()
    _replace_linear(net, make)
    x, u, _, _ = _inputs(torch.float32)
    jx.jet(net, x, u.unsqueeze(0))
    assert bnb.matmul_4bit.takes_jets
    layer = net.first
    wrapped = layer(x)
    name = "matmul" if make is _eight_bit else "matmul_4bit"
    wrapper = getattr(bnb, name)
    try:
        setattr(bnb, name, wrapper.__wrapped__)
        assert torch.equal(wrapped, layer(x))
    finally:
        setattr(bnb, name, wrapper)


def _refused(net: nn.Module, match: str) -> None:
    x, u, _, _ = _inputs(torch.float32)
    with pytest.raises(MissingJetRule, match=match):
        jx.jet(net, x, u.unsqueeze(0))


def test_weights_that_are_trained_are_refused() -> None:
    bnb = _bitsandbytes()
    _refused(bnb.nn.Linear8bitLt(SIZE, SIZE), "has_fp16_weights=False")
    net = _plain_net()
    _torchao().quantize_(net, _int8())
    net.first.weight.requires_grad_(True)
    _refused(net, "freeze it")


def test_weights_that_round_the_input_are_refused() -> None:
    config = _torchao().Int8DynamicActivationInt8WeightConfig()
    net = _quantise_with_torchao(_plain_net(), config)
    _refused(net, "Int8WeightOnlyConfig")


def test_a_result_written_into_out_is_refused() -> None:
    bnb = _bitsandbytes()
    layer = _four_bit(nn.Linear(SIZE, SIZE), torch.float32)
    out = torch.empty(2, 3, SIZE)
    state = layer.weight.quant_state
    _refused(lambda x: bnb.matmul_4bit(x, layer.weight, state, out=out), "out=")  # type: ignore


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("make", [_four_bit_in_float32, _eight_bit, _int8])
def test_jvp(make: Callable, differentiable: bool) -> None:
    net = _plain_net()
    if make is _int8:
        net = _quantise_with_torchao(net, make())
        plain = _plain_from_torchao(net)
    else:
        _replace_linear(net, make)
        plain = _dequantised_net(net)
    x, u, _, v = _inputs()
    point = x.float().requires_grad_()
    value, tangent = jx.jvp(net, (point,), (u.float(),), differentiable=differentiable)
    assert relative_error(value.double(), plain(x)) < 2e-5
    expected, _ = _by_reverse(plain, x.clone().requires_grad_(), u, u, v)
    error = abs((v * tangent).sum().item() - expected.item())
    assert error < 2e-5 * (v.norm() * tangent.norm()).item()
    assert tangent.requires_grad == differentiable
