"""torch.nn's own modules: both orders against reverse over reverse and differences, and the
gradients that a penalty on both gives their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import jachess_ext as jx

from . import oracles

Call = Callable[[nn.Module, Any], Any]


def _plain(module: nn.Module, x: Any) -> Any:
    return module(x)


def _first(module: nn.Module, x: Any) -> Any:
    return module(x)[0]


def _rotary(module: nn.Module, x: Any) -> Any:
    """As Llama 4 does: pairs of channels as complex numbers, turned."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    angles = torch.outer(torch.arange(x.shape[1]).double(), torch.tensor([1.0, 0.1]).double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return module(torch.view_as_real(turned).flatten(-2))


def _packed(module: nn.Module, x: Any) -> Any:
    """Every output of a recurrent layer, the padding too, and its last states, in one tensor."""
    x = x + x.square() / 3  # second streams before it is packed
    packed = pack_padded_sequence(x, [2, 4, 1], batch_first=True, enforce_sorted=False)
    out, last = module(packed)
    padded, _ = pad_packed_sequence(out, batch_first=True, padding_value=0.5, total_length=5)
    last = last if isinstance(last, tuple) else (last,)
    return torch.cat([padded.flatten(), *(state.flatten() for state in last)])


def _attend(module: nn.Module, x: Any) -> Any:
    mask = torch.tensor([[False, False, True], [False, False, False]])
    return module(x, x, x, key_padding_mask=mask)[0]


def _decode(module: nn.Module, x: Any) -> Any:
    causal = nn.Transformer.generate_square_subsequent_mask(3).double()
    return module(x, x * x, tgt_mask=causal, tgt_is_causal=True)


def _encoder(norm_first: bool, **named: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, 0.0, "gelu", batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, **named)


TOKENS, IMAGE = (2, 3, 4), (2, 4, 4, 4)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Call]] = {
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), TOKENS, _attend),
    "attention, weights": (
        lambda: nn.MultiheadAttention(4, 2, bias=False, add_zero_attn=True),
        TOKENS,
        lambda module, x: module(x, x, x, need_weights=True)[1],
    ),
    "attention, other widths": (
        lambda: nn.MultiheadAttention(4, 2, kdim=4, vdim=4, add_bias_kv=True),
        TOKENS,
        lambda module, x: module(x, x, x, need_weights=False)[0],
    ),
    "encoder": (lambda: _encoder(False), TOKENS, _plain),
    "encoder, norms first": (lambda: _encoder(True, enable_nested_tensor=False), TOKENS, _plain),
    "encoder, padded": (
        lambda: _encoder(False),
        TOKENS,
        lambda module, x: module(
            x, src_key_padding_mask=torch.tensor([[False, False, True], [False, False, False]])
        )[1],
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(4, 2, 6, 0.0, "gelu", batch_first=True),
        TOKENS,
        _decode,
    ),
    "LSTM": (lambda: nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True), TOKENS, _first),
    "LSTM, projected": (
        lambda: nn.LSTM(4, 3, proj_size=2),
        TOKENS,
        lambda module, x: module(x)[1][1],
    ),
    "GRU": (lambda: nn.GRU(4, 3, 2, bias=False, bidirectional=True), TOKENS, _first),
    "LSTM, packed": (
        lambda: nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True),
        (3, 4, 4),
        _packed,
    ),
    "GRU, packed": (lambda: nn.GRU(4, 3, bias=False, batch_first=True), (3, 4, 4), _packed),
    "RNN": (lambda: nn.RNN(4, 3), TOKENS, _first),
    "LSTM cell": (lambda: nn.LSTMCell(4, 3), (2, 4), lambda module, x: module(x)[1]),
    "GRU cell": (lambda: nn.GRUCell(4, 3), (2, 4), _plain),
    "RNN cell": (lambda: nn.RNNCell(4, 3), (2, 4), _plain),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2, dilation=2, padding=1), TOKENS, _plain),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding="same", groups=2), IMAGE, _plain),
    "conv2d, reflected": (
        lambda: nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"),
        IMAGE,
        _plain,
    ),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1),
        IMAGE,
        _plain,
    ),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE, _plain),
    "batch norm": (lambda: nn.BatchNorm2d(4), IMAGE, _plain),
    "batch statistics": (
        lambda: nn.BatchNorm1d(3, track_running_stats=False),
        TOKENS,
        _plain,
    ),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGE, _plain),
    "instance norm, running": (
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        TOKENS,
        _plain,
    ),
    "average pools": (
        lambda: nn.Sequential(nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)),
        IMAGE,
        lambda module, x: module(x * x),
    ),
    "largest of a window": (
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(1)),
        IMAGE,
        lambda module, x: module(x * x),
    ),
    "resampled": (
        lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"),
        IMAGE,
        lambda module, x: module(x * x),
    ),
    "sampled": (
        lambda: nn.Conv2d(4, 2, 1),
        IMAGE,
        lambda module, x: F.grid_sample(
            module(x).tanh(),
            torch.linspace(-1.3, 1.2, 24).double().view(2, 3, 2, 2),
            align_corners=True,
        ),
    ),
    "folded": (
        lambda: nn.Sequential(nn.Unfold(2), nn.Tanh(), nn.Fold((4, 4), 2)),
        IMAGE,
        _plain,
    ),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), TOKENS, lambda module, x: module(x, x * x)),
    "rotary": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), TOKENS, _rotary),
    "spectrum": (
        lambda: nn.Linear(3, 4),
        TOKENS,
        lambda module, x: module(torch.fft.rfft(x).abs().square()),
    ),
}
# torch has no second derivative of these by its backward.
BY_DIFFERENCES_ALONE = ("LSTM", "GRU", "RNN", "cell", "largest", "resampled")


def _case(name: str) -> tuple[Callable[[Any], Any], nn.Module, Tensor, Tensor]:
    make, shape, call = MODULES[name]
    torch.manual_seed(0)
    module = make().double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x, *steps = torch.randn(3, *shape, dtype=torch.float64)
    return (lambda x: call(module, x)), module, x, torch.stack(steps)


@pytest.mark.parametrize("name", MODULES)
def test_derivatives(name: str) -> None:
    function, _, x, steps = _case(name)
    jet = jx.jet(function, x, steps)
    with torch.no_grad():
        torch.testing.assert_close(jet.primal, function(x), rtol=1e-12, atol=1e-13)
    for along, step in zip(jet.first, steps, strict=True):
        first = oracles.first_difference(lambda x: (function(x),), x, step)
        assert oracles.relative_error(along, first[0]) < 1e-8
    second = oracles.mixed_difference(lambda x: (function(x),), x, steps[0], steps[1])
    assert (jet.second[0] - second[0]).norm() < 1e-6 * (1 + second[0].norm())
    if any(part in name for part in BY_DIFFERENCES_ALONE):
        return
    v = torch.randn_like(jet.primal)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = oracles.reverse_over_reverse(lambda x: (function(x),), x, *steps, [v])
    for part, expected in zip((jet.first[0], jet.second[0]), found, strict=True):
        assert ((v * part).sum() - expected[0]).abs() < 1e-10 * (1 + v.norm() * part.norm())


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_a_penalty(name: str) -> None:
    function, module, x, steps = _case(name)
    parameters = list(module.parameters())
    x.requires_grad_()

    def penalty() -> Tensor:
        streams = jx.jet(function, x, steps).streams[1:]
        return streams.square().mean() + streams.sum(0).sin().mean()

    given = [*parameters, x]
    gradients = torch.autograd.grad(penalty(), given, materialize_grads=True)
    moves = [(tensor, torch.randn_like(tensor)) for tensor in given]
    expected = oracles.parameter_difference(penalty, moves, 1e-4)  # type: ignore[arg-type]
    found = sum((g * m).sum() for g, (_, m) in zip(gradients, moves, strict=True))
    assert found.isfinite()
    assert found.item() == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_the_fast_path_of_an_encoder_is_not_taken() -> None:
    """Without gradients and in evaluation mode torch would call one fused kernel."""
    function, _, x, steps = _case("encoder")
    with torch.no_grad():
        fast = jx.jet(function, x, steps).streams
        torch.testing.assert_close(fast[0], function(x), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(fast, jx.jet(function, x, steps).streams, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", MODULES)
def test_a_tangent_as_a_target(name: str) -> None:
    function, _, x, steps = _case(name)
    jet = jx.jet(function, x, steps[:1], order=1)
    output, tangent = jx.jvp(function, (x,), (steps[0],), differentiable=False)
    torch.testing.assert_close(output, jet.primal, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(tangent, jet.first[0], rtol=1e-12, atol=1e-13)
