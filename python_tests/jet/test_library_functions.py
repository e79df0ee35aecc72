"""Functions of libraries that are not installed here: stand-ins of the same names and signatures,
which are real autograd Functions, against torch.func of a formula written out query by query."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from jachess_ext.jet import composed_rules
from python_tests import flash_stand_ins
from python_tests.covering import pairs
from python_tests.flash_stand_ins import (
    FlashAttnFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenKVPackedFunc,
    IndexFirstAxis,
    IndexPutFirstAxis,
    flash_attn_func,
    flash_attn_varlen_func,
    formula,
    formula_of_sequences,
    knows_no_jets,
)

NUMBERS = torch.Generator().manual_seed(5)
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=NUMBERS)


# ---- the comparison ----------------------------------------------------------------------------


def check(fn: Callable[..., Any], plain: Callable[..., Any], *points: Tensor) -> None:
    """Compare values, first and second derivatives, their gradients, and jvp's other kind."""
    steps = tuple(draw(2, *point.shape) for point in points)
    inputs = tuple(point.clone().requires_grad_() for point in points)

    def along(n: int, of: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *x: torch.func.jvp(of, x, tuple(step[n] for step in steps))[1]

    expected = [plain(*inputs), along(0, plain)(*inputs), along(1, plain)(*inputs)]
    expected.append(along(1, along(0, plain))(*inputs))
    streams = torch.stack(expected)
    jet = jx.jet(fn, inputs, steps)
    torch.testing.assert_close(jet.streams, streams, **CLOSE)
    mixed = draw(*streams.shape)
    found = torch.autograd.grad((jet.streams * mixed).sum(), inputs)
    wanted = torch.autograd.grad((streams * mixed).sum(), inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    both = along(0, along(0, plain))(*points) + along(1, along(1, plain))(*points)
    for second in ("squares", "sum"):
        squares = jx.jet(fn, points, steps, second=second).second.sum(0)
        torch.testing.assert_close(squares, both, **CLOSE)
    first = tuple(step[0] for step in steps)
    value, tangent = jx.jvp(fn, points, first, differentiable=False)
    torch.testing.assert_close((value, tangent), (expected[0], expected[1]), **CLOSE)
    with composed_rules():
        torch.testing.assert_close(jx.jet(fn, points, steps).streams, streams, **CLOSE)


# ---- FlashAttention ----------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"softmax_scale": 0.7, "causal": True},
    "window": {"window_size": (2, 1)},
    "one side": {"window_size": (-1, 0)},
    "causal window": {"window_size": (1, 5), "causal": True},
    "softcap": {"softcap": 1.5},
    "all": {"softcap": 2.0, "window_size": (2, -1), "causal": True, "softmax_scale": 0.9},
}


@pytest.mark.parametrize("name, lengths", pairs(SETTINGS, [(4, 4), (2, 4), (4, 2)]))
def test_flash_attn_func(name: str, lengths: tuple[int, int]) -> None:
    """Of other lengths the last query stands beside the last key."""
    queries, keys = lengths
    points = draw(1, queries, 2, 3), draw(1, keys, 1, 3), draw(1, keys, 1, 3)
    settings = SETTINGS[name]
    check(
        lambda *x: flash_attn_func(*x, **settings),
        lambda *x: formula(*x, **settings),
        *points,
    )


def test_constant_keys_and_other_strides() -> None:
    k, v = draw(1, 2, 5, 3).transpose(1, 2), draw(1, 5, 2, 3)
    x = draw(1, 2, 5, 3)

    def heads(attention: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.sin(attention(x.transpose(1, 2), k, v, causal=True))

    check(heads(flash_attn_func), heads(formula), x)
    plain = heads(flash_attn_func)(x)
    assert not plain.is_contiguous()
    _, tangent = jx.jvp(heads(flash_attn_func), (x,), (x,))
    assert tangent.stride() == plain.stride()
    check(lambda v: flash_attn_func(x, x, v), lambda v: formula(x, x, v), draw(1, 2, 5, 3))


@pytest.mark.parametrize("name", ["plain", "causal window", "all"])
def test_flash_attn_varlen_func(name: str) -> None:
    starts = torch.tensor([0, 2, 2, 6, 7], dtype=torch.int32)  # the second has no query,
    key_starts = torch.tensor([0, 3, 4, 8, 8], dtype=torch.int32)  # the last no key
    settings = SETTINGS[name]
    check(
        lambda *x: flash_attn_varlen_func(*x, starts, key_starts, 4, 4, **settings),
        lambda *x: formula_of_sequences(*x, starts, key_starts, **settings),
        *(draw(7, 2, 3), draw(8, 2, 3), draw(8, 2, 3)),
    )


def test_packed() -> None:
    last = (0.0, None, True, (-1, -1), 0.0, None, False, False, True)
    check(
        lambda x: FlashAttnQKVPackedFunc.apply(x, *last),
        lambda x: formula(*x.unbind(2), causal=True),
        draw(1, 3, 3, 2, 3),
    )
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    check(
        lambda q, kv: FlashAttnVarlenKVPackedFunc.apply(q, kv, starts, starts, 3, 3, *last),
        lambda q, kv: formula_of_sequences(q, *kv.unbind(1), starts, starts, causal=True),
        *(draw(5, 2, 3), draw(5, 2, 2, 3)),
    )


def test_padding() -> None:
    rows = torch.tensor([0, 2, 3])
    check(lambda x: IndexFirstAxis.apply(x, rows), lambda x: x[rows], draw(5, 2, 2))
    check(
        lambda x: IndexPutFirstAxis.apply(x * x, rows, 5),
        lambda x: torch.zeros(5, 2, dtype=x.dtype).index_copy(0, rows, x * x),
        draw(3, 2),
    )


@pytest.mark.parametrize(
    "settings",
    [{"dropout_p": 0.1}, {"alibi_slopes": torch.ones(2)}, {"return_attn_probs": True}],
)
def test_what_has_no_rule(settings: dict[str, Any]) -> None:
    x = draw(1, 3, 2, 4)
    with pytest.raises(RuntimeError, match=r"which has no rule\. It belongs to FlashAttention"):
        jx.jvp(lambda x: flash_attn_func(x, x, x, **settings), (x,), (x,))


def test_another_library_with_a_function_of_this_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashAttnFunc, "__module__", "mine")
    x = draw(1, 3, 2, 4)
    with pytest.raises(RuntimeError, match=r"jx\.forward_code\(FlashAttnFunc\)"):
        jx.jvp(lambda x: flash_attn_func(x, x, x), (x,), (x,))


@pytest.fixture
def varlen() -> ModuleType:
    module = pytest.importorskip("torch.nn.attention.varlen")
    if "seqused_k" not in inspect.signature(module.varlen_attn).parameters:
        pytest.skip("torch 2.10 has it with fewer arguments")
    return module


@pytest.mark.parametrize(("window", "scale"), [((-1, 0), 0.8), ((2, 1), None)])
def test_varlen_attn_of_torch(
    varlen: ModuleType, window: tuple[int, int], scale: float | None
) -> None:
    """On the CPU torch has no kernel of it: the jets alone run."""
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    x, steps = draw(6, 2, 4), draw(2, 6, 2, 4)
    settings = {"scale": scale, "window_size": window}
    jet = jx.jet(
        lambda x: varlen.varlen_attn(x, x, x * x, starts, starts, 4, 4, **settings), x, steps
    )

    def plain(x: Tensor) -> Tensor:
        places = (starts, starts)
        return formula_of_sequences(x, x, x * x, *places, softmax_scale=scale, window_size=window)

    def along(x: Tensor) -> Tensor:
        return torch.func.jvp(plain, (x,), (steps[0],))[1]

    expected = [plain(x), along(x), torch.func.jvp(plain, (x,), (steps[1],))[1]]
    expected.append(torch.func.jvp(along, (x,), (steps[1],))[1])
    torch.testing.assert_close(jet.streams, torch.stack(expected), **CLOSE)


def test_what_varlen_attn_has_no_rule_for(varlen: ModuleType) -> None:
    starts, x = torch.tensor([0, 2, 6], dtype=torch.int32), draw(6, 2, 4)
    for name, value in (("return_aux", varlen.AuxRequest(lse=True)), ("seqused_k", starts[1:])):
        fn = partial(varlen.varlen_attn, **{name: value})
        places = (starts, starts, 4, 4)
        with pytest.raises(jx.MissingJetRule, match=name):
            jx.jvp(lambda x, fn=fn, places=places: fn(x, x, x, *places), (x,), (x,))


# ---- transformers' attn_implementation="flash_attention_2" ---------------------------------------


@pytest.mark.parametrize("family, padded", [("Gemma2", True), ("Llama", False)])
def test_a_model_with_flash_attention(
    monkeypatch: pytest.MonkeyPatch, family: str, padded: bool
) -> None:
    """A model with padding, against torch.func of its eager attention."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    own = {"sliding_window": 2, "attn_logit_softcapping": 3.0} if family == "Gemma2" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **own)
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}Model")(config).double().eval()
    for module in list(model.modules()):  # transformers' norms round to float32
        for name, norm in module.named_children():
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(module, name, torch.nn.RMSNorm(8, 1e-6, dtype=torch.float64))
    x, steps = draw(2, 4, 8), draw(2, 2, 4, 8)
    mask = torch.ones(2, 4, dtype=torch.long)
    mask[0, : 2 * padded] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)

    def states(x: Tensor) -> Tensor:
        out = model(
            inputs_embeds=x, attention_mask=mask, position_ids=places, use_cache=False
        ).last_hidden_state
        return out[mask.bool()]

    def along(x: Tensor) -> Tensor:
        return torch.func.jvp(states, (x,), (steps[0],))[1]

    # In float32, as eager attention asks it, the softmax of a row that is all padding is NaN.
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim)
    )
    expected = [states(x), along(x), torch.func.jvp(states, (x,), (steps[1],))[1]]
    expected.append(torch.func.jvp(along, (x,), (steps[1],))[1])
    parameters = [p for p in model.parameters() if p.requires_grad and p.ndim > 1][1:]
    wanted = torch.autograd.grad(expected[3].sin().sum(), parameters)
    config._attn_implementation = "flash_attention_2"
    with flash_stand_ins.in_transformers():
        jet = jx.jet(states, x, steps)
    torch.testing.assert_close(jet.streams, torch.stack(expected), rtol=1e-8, atol=1e-9)
    found = torch.autograd.grad(jet.second.sin().sum(), parameters)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


# ---- Liger Kernel ------------------------------------------------------------------------------


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        return rms_norm(X, W, eps, offset)

    backward = staticmethod(knows_no_jets)


class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
    ) -> Tensor:
        return silu_mul(a, b, gate_multiplier, down_multiplier)

    backward = staticmethod(knows_no_jets)


class LigerRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1,
        rotary_dim: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        angles = (cos[..., : (rotary_dim or cos.shape[-1]) // 2], sin)
        return rotated(q, *angles), rotated(k, *angles)

    backward = staticmethod(knows_no_jets)


class LigerCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> tuple[Tensor, None, None, None]:
        loss = cross_entropy(_input, target, weight, label_smoothing, reduction, softcap)
        _input.zero_()  # where Liger keeps the gradient
        return loss, None, None, None

    backward = staticmethod(knows_no_jets)


def rms_norm(x: Tensor, w: Tensor | None, eps: float, offset: float) -> Tensor:
    normed = x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    return normed if w is None else normed * (offset + w)


def silu_mul(a: Tensor, b: Tensor, gate: float, down: float) -> Tensor:
    return gate * a / (1 + (-gate * a).exp()) * b * down


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of entries i and i + r / 2 of ``[B, H, T, d]``, as complex numbers."""
    half = cos.shape[-1]
    angle = torch.complex(cos, sin[..., :half])
    angle = angle[None, None] if angle.ndim == 2 else angle[:, None]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * angle
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    smoothing: float,
    reduction: str,
    softcap: float | None,
) -> Tensor:
    """Compute it row by row; without smoothing where there is a weight."""
    x = softcap * torch.tanh(x / softcap) if softcap else x
    rows, scales = [], []
    for row, label in zip(x, target.tolist(), strict=True):
        if label == -100:
            rows.append(row.sum() * 0)
            continue
        logs = row - row.exp().sum().log()
        scales.append(1.0 if weight is None else float(weight[label]))
        rows.append(-scales[-1] * ((1 - smoothing) * logs[label] + smoothing * logs.mean()))
    losses = torch.stack(rows)
    if reduction == "none":
        return losses
    return losses.sum() / sum(scales) if reduction == "mean" else losses.sum()


LIGER = (LigerRMSNormFunction, LigerSiLUMulFunction, LigerRopeFunction, LigerCrossEntropyFunction)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in LIGER:
        monkeypatch.setattr(function, "__module__", f"liger_kernel.ops.{function.__name__}")


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_liger_rms_norm(offset: float) -> None:
    apply = LigerRMSNormFunction.apply
    by_formula = lambda x, w, eps, offset, *_: rms_norm(x, w, eps, offset)  # noqa: E731
    settings = (1e-3, offset, "gemma", False)
    weight = draw(6)
    check(
        lambda x: apply(x, weight, *settings),
        lambda x: rms_norm(x, weight, 1e-3, offset),
        draw(3, 6),
    )
    check(
        lambda x, w: apply(x, w, *settings),
        lambda x, w: rms_norm(x, w, 1e-3, offset),
        draw(3, 6),
        weight,
    )
    x, steps = draw(3, 6), draw(2, 3, 6)
    weight.requires_grad_()  # and carries no derivative
    jets = [jx.jet(lambda x, f=f: f(x, weight, *settings), x, steps) for f in (apply, by_formula)]
    found, wanted = (torch.autograd.grad(jet.streams.sin().sum(), weight) for jet in jets)
    torch.testing.assert_close(found, wanted, **CLOSE)
    check(lambda x: apply(x, None, 1e-3), lambda x: rms_norm(x, None, 1e-3, 0.0), draw(2, 3, 6))


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize("multipliers", [(), (0.7, 1.3)])
def test_liger_silu_mul(multipliers: tuple[float, ...]) -> None:
    check(
        lambda a, b: LigerSiLUMulFunction.apply(a, b, *multipliers),
        lambda a, b: silu_mul(a, b, *(multipliers or (1.0, 1.0))),
        *(draw(3, 5), draw(3, 5)),
    )


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize("batch, part", [((), False), ((1,), True), ((2,), False)])
def test_liger_rope(batch: tuple[int, ...], part: bool) -> None:
    angles = draw(*batch, 3, 2)
    # Liger reads the first half alone.
    cos, sin = (torch.cat([t, t + 1], -1) for t in (angles.cos(), angles.sin()))
    d = 6 if part else 4

    def sides(rotate: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda q, k: torch.cat([t.flatten(1) for t in rotate(q * 1, k * 1, cos, sin)], 1)

    check(
        sides(LigerRopeFunction.apply),
        sides(lambda q, k, cos, sin: [rotated(t, cos[..., :2], sin) for t in (q, k)]),
        *(draw(2, 4, 3, d), draw(2, 2, 3, d)),
    )
    # A rotary_dim that cos and sin alone do not say.
    half = (cos[..., :2], sin[..., :2])
    found = jx.jvp(
        lambda q: LigerRopeFunction.apply(q, q, *half, None, 1, 4)[0],
        *[(q := draw(2, 1, 3, d),)] * 2,
    )
    torch.testing.assert_close(found[1], rotated(q, *half), **CLOSE)


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize(
    ("reduction", "weighted", "smoothing", "softcap"),
    [
        *(("mean", True, 0.0, None), ("sum", True, 0.0, 3.0), ("none", False, 0.2, 3.0)),
    ],
)
def test_liger_cross_entropy(
    reduction: str, weighted: bool, smoothing: float, softcap: float | None
) -> None:
    target = torch.tensor([1, -100, 0, 4])
    weight = draw(5).abs() if weighted else None
    last = (-100, 0.0, smoothing, reduction, softcap)
    check(
        lambda x: LigerCrossEntropyFunction.apply(x * 1, target, weight, *last)[0],
        lambda x: cross_entropy(x, target, weight, smoothing, reduction, softcap),
        draw(4, 5),
    )
    with pytest.raises(RuntimeError, match=r"which has no rule\. It belongs to Liger Kernel"):
        jx.jvp(
            lambda x: LigerCrossEntropyFunction.apply(x, target, None, -100, 1e-4)[0],
            *[(draw(4, 5),)] * 2,
        )


def _loss(apply: Callable[..., Any], x: Tensor) -> Tensor:
    return apply(x * 1, torch.tensor([1, -100, 0, 4], device=x.device), None)[0]


def _turned(apply: Callable[..., Any], x: Tensor) -> Tensor:
    cos, sin = torch.ones(3, 4, device=x.device), torch.full((3, 4), 0.5, device=x.device)
    return apply(*[x[:, None, :3, :4].expand(4, 2, 3, 4) * 1] * 2, cos, sin)[1]


REAL = {
    "rms_norm.LigerRMSNormFunction": lambda apply, x: apply(x, x[0, 0], 1e-3, 1.0, "gemma", False),
    "swiglu.LigerSiLUMulFunction": lambda apply, x: apply(x, x * x),
    "cross_entropy.LigerCrossEntropyFunction": lambda apply, x: _loss(apply, x[:, 0]),
    "rope.LigerRopeFunction": _turned,
}


@pytest.mark.parametrize("name", REAL)
def test_liger_itself(name: str) -> None:
    """On a GPU, or in triton's interpreter as far as that goes (TRITON_INTERPRET=1)."""
    triton = pytest.importorskip("triton")
    module, _, function = name.partition(".")
    ops = pytest.importorskip(f"liger_kernel.ops.{module}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("triton has no GPU here")
    x, u = (draw(4, 5, 6).float().to(device) for _ in range(2))
    apply = getattr(ops, function).apply
    try:
        expected = REAL[name](apply, x)
    except triton.runtime.errors.InterpreterError as error:
        pytest.skip(str(error))
    stand_in = globals()[function].apply
    slope = torch.func.jvp(lambda x: REAL[name](_without_context(stand_in), x), (x,), (u,))[1]
    found = jx.jvp(lambda x: REAL[name](apply, x), (x,), (u,))
    torch.testing.assert_close(found, (expected, slope.float()), rtol=1e-4, atol=1e-5)
    assert found[0].stride() == expected.stride()


def _without_context(apply: Any) -> Callable[..., Any]:
    """Return the formula of a stand-in, which torch.func cannot take through ``apply``."""
    return lambda *args: apply.__self__.forward(None, *args)
