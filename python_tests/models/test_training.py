"""What training adds: gradient checkpointing, dropout, LoRA, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

import jachess_ext as jx
from jachess_ext.jet.engine.tensor import JetTensor
from python_tests.jet.counted_dropout import attention_with_counted_dropout

from . import oracles
from .penalty import penalty_of
from .zoo import Case, build_case, case_of

DROPOUT_NAMES = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"),
)
SEED = 11


def _with_dropout(rate: float) -> Callable[[PreTrainedConfig], None]:
    def change(config: PreTrainedConfig) -> None:
        found = [name for name in DROPOUT_NAMES if hasattr(config, name)]
        assert found, "this family names its dropout otherwise"
        for name in found:
            setattr(config, name, rate)

    return change


def _train_case(name: str, attention: str, rate: float, padding: str = "right") -> Case:
    change = _with_dropout(rate)
    case = build_case(name, attention, padding=padding, change_config=change)
    case.model.train()
    return case


def _seeded_penalty_and_gradients(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    case.model.zero_grad()
    torch.manual_seed(SEED)
    penalty = penalty_of(case)
    penalty.backward()
    named = case.model.named_parameters()
    return penalty.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


# ---- gradient checkpointing --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, attention, rate",
    [
        ("bert", "eager", 0.3),
        ("gpt2", "sdpa", 0.3),
        ("llama", "sdpa", 0.0),
        ("gemma2", "eager", 0.0),
    ],
)
def test_gradient_checkpointing_changes_nothing(name: str, attention: str, rate: float) -> None:
    """Also where a block's last step, ``residual + post_norm(h)``, is deferred: that jet is made
    when the next block, within a checkpoint of its own, first looks at it (Gemma 2)."""
    case = _train_case(name, attention, rate)
    expected, expected_gradients = _seeded_penalty_and_gradients(case)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    layer = next(m for m in case.model.modules() if isinstance(m, GradientCheckpointingLayer))
    linear = next(m for m in layer.modules() if isinstance(m, nn.Linear | Conv1D))
    linear.register_forward_pre_hook(count)
    case.model.gradient_checkpointing_enable()
    actual, gradients = _seeded_penalty_and_gradients(case)
    assert calls == 2, "the first layer was not recomputed, so nothing was tested"
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[parameter], rtol=1e-10, atol=1e-12)


# ---- dropout -----------------------------------------------------------------------------------

DROPOUT_CASES = [
    *(("bert", "sdpa"), ("t5-gated", "eager"), ("deberta-v2", "eager"), ("llama", "sdpa")),
    ("vit", "sdpa"),
]


class CountedDropout(TorchFunctionMode):
    """Plain sdpa attention with the mask that the fused operator draws."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_attention = func is torch.nn.functional.scaled_dot_product_attention
        if is_attention and not any(isinstance(a, JetTensor) for a in args):
            return attention_with_counted_dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name, attention", DROPOUT_CASES)
def test_one_dropout_mask_for_all_streams(name: str, attention: str) -> None:
    """With the same seed the primal is the plain model's output, and the jets are the derivatives
    of the model with that very mask.

    The fused attention counts its mask from a seed; the plain model then drops the same weights.
    """
    padding = "none" if name == "vit" else "right"
    with oracles.Float64Casts(), CountedDropout():
        case = _train_case(name, attention, 0.25, padding)

        def seeded(x: Tensor) -> tuple[Tensor, ...]:
            torch.manual_seed(SEED)
            return case.hidden_states(x)

        jets = jx.jet(seeded, case.x, case.directions)
        with torch.no_grad():
            plain = seeded(case.x)
        u, w = case.directions
        first = oracles.first_difference(seeded, case.x, u)
        second = oracles.mixed_difference(seeded, case.x, u, w)
        torch.manual_seed(SEED + 1)
        other_mask = case.hidden_states(case.x)[-1]
    assert oracles.relative_error(other_mask, plain[-1]) > 1e-2, "dropout was not active"
    for layer, jet in enumerate(jets):
        # Matrix products of S times the rows may round differently in the last bit.
        torch.testing.assert_close(jet.primal, plain[layer], rtol=1e-12, atol=1e-12)
        real = case.mask
        assert oracles.relative_error(jet.first[0][real], first[layer][real]) < 1e-6
        if layer:
            assert oracles.relative_error(jet.second[0][real], second[layer][real]) < 1e-6


# ---- LoRA --------------------------------------------------------------------------------------


def test_lora_trains_the_adapters_alone() -> None:
    with oracles.Float64Casts():
        base, targets = build_case("bert", "sdpa").model, ["query", "value"]
        config = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.2, target_modules=targets)
        model = get_peft_model(base, config).double().train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:  # LoRA's B starts at zero
                    parameter.normal_(std=0.3)
        case = case_of(model, "bert", padding="left")
        _, gradients = _seeded_penalty_and_gradients(case)
        adapters = {n: p for n, p in model.named_parameters() if "lora_" in n}
        assert gradients.keys() == adapters.keys()
        assert len(adapters) == 2 * 2 * len(targets)

        def seeded_penalty() -> Tensor:
            torch.manual_seed(SEED)
            return penalty_of(case)

        torch.manual_seed(4)
        displaced = [(p, torch.randn_like(p)) for p in adapters.values()]
        expected = oracles.parameter_difference(seeded_penalty, displaced, 1e-4)
        pairs = zip(adapters, displaced, strict=True)
        actual = sum((gradients[n] * d).sum().item() for n, (_, d) in pairs)
        assert abs(actual - expected) < 1e-5 * abs(expected)


# ---- mixed precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_autocast_to_bfloat16(name: str) -> None:
    """float32 weights under autocast: finite, the primal in the dtype of the plain model's output,
    the norms within 5 % (see test_orders_and_precision), gradients of every used parameter."""
    case = build_case(name, "sdpa", padding="right", dtype=torch.float32, seed=1)
    exact = jx.jet(case.hidden_states, case.x, case.directions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        jets = jx.jet(case.hidden_states, case.x, case.directions)
        with torch.no_grad():
            plain = case.hidden_states(case.x)
    for layer in range(1, len(jets)):
        assert jets[layer].primal.dtype == plain[layer].dtype
        for part in ("primal", "first", "second"):
            low, high = (getattr(j[layer], part)[..., case.mask, :] for j in (jets, exact))
            assert torch.isfinite(low).all()
            assert abs(low.float().norm() / high.norm() - 1) < 0.05, (layer, part)
    sum(jet.second.float().pow(2).sum() for jet in jets).backward()
    grads = [p.grad for p in case.model.parameters() if p.grad is not None]
    assert grads and all(torch.isfinite(g).all() for g in grads)
