"""`JacHess`: Eq. 7 by hand, calibration, state, precision, LoRA and gradient checkpointing."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import jachess_ext as jx
from jachess_ext.smoothness import layer_profile
from jachess_ext.smoothness.estimators import measure
from jachess_ext.smoothness.settings import Randomness

from .host_reads import HostReads
from .tiny_models import BLOCKS, classifier, parameter_gradients, token_batch

BATCH = token_batch([5, 3])


def calibrated(model: Any = None, **settings: Any) -> jx.JacHess:
    model = classifier("bert") if model is None else model
    reg = jx.JacHess(model, **({"seed": 4, "dimensions": 5} | settings))
    reg.calibrate([token_batch([4, 2]), token_batch([3])])
    return reg


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("scope", ["all", "last"])
@pytest.mark.parametrize("weights", ["uniform", "inverse", "norm", "softmax", [0.5, 2.0]])
def test_equation_7_by_hand(weights: Any, scope: str, squared: bool) -> None:
    settings: dict[str, Any] = {"scope": scope, "squared": squared}
    reg = calibrated(weights=weights, strength=0.3, **settings)
    reg.step = 3
    out = reg(BATCH)
    norms = jx.smoothness(reg.model, BATCH, seed=4, step=3, dimensions=5, **settings)
    if isinstance(weights, str):
        lam = layer_profile(weights, reg.base.jacobian)
    else:
        lam = torch.tensor(weights, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for k in range(BLOCKS):
        for row in range(2):
            for t in range(5):
                j, h = norms.jacobian_tokens[k, row, t], norms.hessian_tokens[k, row, t]
                total = total + lam[k] * (j + h) / 2
    torch.testing.assert_close(out.loss, 0.3 * total, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.jacobian, norms.jacobian, rtol=0, atol=0)
    torch.testing.assert_close(out.hessian, norms.hessian, rtol=0, atol=0)
    torch.testing.assert_close(out.total, out.loss + reg.model(**BATCH).loss, rtol=1e-12, atol=0)


def test_normalised_by_hand() -> None:
    reg = calibrated(weights="norm", normalize=True, strength=0.5)
    lam = layer_profile("norm", reg.base.jacobian)
    out = reg(BATCH)
    norms = jx.smoothness(reg.model, BATCH, seed=4, dimensions=5)
    total = 0.0
    for k in range(BLOCKS):
        for row, count in enumerate((5, 3)):
            jacobian = norms.jacobian_tokens[k, row].sum() / count / reg.base.jacobian[k]
            hessian = norms.hessian_tokens[k, row].sum() / count / reg.base.hessian[k]
            total += lam[k] * (jacobian + hessian) / 2
    torch.testing.assert_close(out.loss, 0.5 * total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("hessian, value", [(True, 2.0), (False, 1.0)])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_normalised_r_starts_at_two(name: str, hessian: bool, value: float) -> None:
    model = classifier(name)
    reg = jx.JacHess(model, strength=1.0, normalize=True, hessian=hessian, seed=0, directions=4)
    rows = token_batch([4] * 200)
    reg.calibrate(rows)
    with torch.no_grad():
        assert reg(rows).loss.item() == pytest.approx(value, rel=0.1)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_hessian_term_without_gradient(normalize: bool) -> None:
    """It counts in the loss; its gradient is that of the loss without it."""
    model = classifier("bert")
    settings: dict[str, Any] = {"normalize": normalize, "weights": "uniform"}
    whole = calibrated(model, hessian_gradient=False, **settings)(BATCH).loss
    both = calibrated(model, **settings)(BATCH).loss
    alone = calibrated(model, hessian=False, **settings)(BATCH).loss
    torch.testing.assert_close(whole, both, rtol=1e-12, atol=0)
    assert whole > 1.1 * alone
    got, want = (parameter_gradients(loss, model) for loss in (whole, alone))
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-9, atol=1e-14)


def test_base_norms_are_means_per_token() -> None:
    reg = calibrated(weights="softmax")
    sums, count = 0, 0
    for number, batch in enumerate([token_batch([4, 2]), token_batch([3])]):
        random = Randomness.from_seed(4, number, calibrating=True)
        norms, _ = measure(reg.model, batch, reg.settings, random)
        sums = sums + norms.jacobian_tokens.sum((-1, -2))
        count += int(batch["attention_mask"].sum())
    torch.testing.assert_close(reg.base.jacobian, sums.detach() / count, rtol=1e-12, atol=0)
    assert reg.base.tokens == count == 9


def test_calibrate_leaves_the_model_as_it_was() -> None:
    model = classifier("bert", dropout=0.5).train()
    model.bert.pooler.eval()
    parameter_gradients(model(**BATCH).loss, model)
    model(**BATCH).loss.backward()
    modes = [module.training for module in model.modules()]
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    base = calibrated(model).base
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(model.get_parameter(n).grad, g) for n, g in grads.items())
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(calibrated(model).base.jacobian, base.jacobian, rtol=0, atol=0)
    assert not base.jacobian.requires_grad


def test_modes_come_back_after_a_failed_calibration() -> None:
    model = classifier("bert").train()
    with pytest.raises(ValueError, match="all padding"):
        jx.JacHess(model).calibrate(BATCH | {"attention_mask": torch.zeros(2, 5).long()})
    assert all(module.training for module in model.modules())


def test_state_goes_through_json_and_the_run_goes_on() -> None:
    reg = calibrated(weights="softmax", normalize=True)
    first = reg(BATCH).loss.item()
    text = json.dumps(reg.state_dict())
    going_on = reg(BATCH).loss.item()
    other = jx.JacHess(classifier("bert"), normalize=True, dimensions=5)
    other.load_state_dict(json.loads(text))
    assert other(BATCH).loss.item() == going_on != first
    assert torch.equal(other.base.jacobian, reg.base.jacobian)
    assert torch.equal(other.base.hessian, reg.base.hessian)
    plain = jx.JacHess(classifier("bert"), weights="uniform", hessian=False, seed=1)
    plain.calibrate(BATCH)
    again = jx.JacHess(classifier("bert"), weights="uniform", hessian=False)
    again.load_state_dict(json.loads(json.dumps(plain.state_dict())))
    assert again.base.hessian is None and again.seed == 1
    with pytest.raises(ValueError, match="state lacks seed, base, skipped"):
        other.load_state_dict({"step": 1})


def test_a_refused_state_changes_nothing() -> None:
    """A layer's number that Python will not read was once found after the step was taken over."""
    reg = calibrated(weights="softmax", normalize=True)
    before = reg.state_dict()
    with pytest.raises(ValueError, match="skipped steps of the layer '1111"):
        reg.load_state_dict(before | {"step": 7, "skipped": {"1" * 5000: 1}})
    assert reg.state_dict() == before


def test_strength() -> None:
    results = [calibrated(strength=s)(BATCH) for s in (0.0, 1.0, 2.5)]
    assert results[0].loss.item() == 0 and torch.isfinite(results[0].total)
    assert results[2].loss.item() == pytest.approx(2.5 * results[1].loss.item(), rel=1e-12)


def test_temperature_and_profiles_reach_the_weights() -> None:
    for temperature in (0.3, 5.0):
        reg = calibrated(weights="softmax", temperature=temperature)
        expected = layer_profile("softmax", reg.base.jacobian, temperature)
        torch.testing.assert_close(reg.layer_weights(), expected)


@pytest.mark.parametrize(
    "settings", [{"weights": "softmax"}, {"weights": "uniform", "normalize": True}]
)
def test_without_calibrate_the_first_batch_is_measured(
    settings: dict, caplog: pytest.LogCaptureFixture
) -> None:
    """In evaluation mode, as `calibrate` measures it; later it would not be the base model's."""
    model = classifier("bert", dropout=0.1).train()
    reg, other = (jx.JacHess(model, seed=0, **settings) for _ in range(2))
    other.calibrate(BATCH)
    found, wanted = ([torch.manual_seed(1), r(BATCH).loss][1] for r in (reg, other))
    assert torch.equal(found, wanted) and model.training
    assert torch.equal(reg.base.jacobian, other.base.jacobian) and reg.step == 1
    assert caplog.text.count("measured on the first batch") == 1
    reg.base = None  # as of a state that was saved without them
    with pytest.raises(
        ValueError, match=r"needs the base model's norms: call calibrate\(batches\)"
    ):
        reg(BATCH)
    assert reg.step == 1


def test_total_without_labels() -> None:
    unlabelled = {key: value for key, value in BATCH.items() if key != "labels"}
    out = calibrated()(unlabelled)
    assert torch.isfinite(out.loss)
    with pytest.raises(ValueError, match=r"no task loss: train mode needs 'labels' in the batch"):
        _ = out.total


@pytest.mark.parametrize("settings", [{}, {"normalize": True}, {"on_nonfinite": "skip"}])
def test_a_step_reads_one_value(settings: dict) -> None:
    """Beside what the model itself reads.  Uniform: other weights are made of the base model's
    norms, which lie on the CPU, for which nobody waits."""
    model = classifier("bert")
    reg = jx.JacHess(model, weights="uniform", seed=0, **settings)
    reg.calibrate([BATCH])
    with HostReads() as plain:
        model(**BATCH).loss.backward()
    with HostReads() as ours:
        reg(BATCH).total.backward()
    assert sorted(ours.reads) == sorted([*plain.reads, "tolist"])


@pytest.mark.parametrize("engine", ["jet", "reverse", "exact"])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_row_that_is_all_padding(on_nonfinite: str, engine: str) -> None:
    """Found after the pass, and still told as what it is; the step was none."""
    batch = {key: value.clone() for key, value in BATCH.items()}
    batch["attention_mask"][1] = 0
    reg = jx.JacHess(
        classifier("bert"),
        weights="uniform",
        engine=engine,
        on_nonfinite=on_nonfinite,
        dimensions=1,
        layers=[0],
    )
    with pytest.raises(ValueError, match=r"rows \[1\] of the batch are all padding"):
        reg(batch)
    assert reg.step == 0 and not reg.skipped


def test_nan_in_the_weights() -> None:
    model = classifier("bert")
    reg = jx.JacHess(model, weights="uniform")
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.weight[0, 0] = math.nan
    with pytest.raises(
        FloatingPointError, match=r"step 0: layer 1 .* non-finite norm.*; lower the learning"
    ):
        reg(BATCH)
    with pytest.raises(ValueError, match=r"Jacobian norms per layer are .* positive, finite"):
        jx.JacHess(model).calibrate(BATCH)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.fill_(math.nan)
    for engine in ("jet", "reverse"):
        settings: dict[str, Any] = {"weights": "uniform", "engine": engine, "dimensions": 1}
        with pytest.raises(
            FloatingPointError, match=r"layer 0 .* token embeddings are not finite.*; lower"
        ):
            jx.JacHess(model, **settings)(BATCH)
        skipping = jx.JacHess(model, on_nonfinite="skip", **settings)
        assert skipping(BATCH).skipped == 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_narrower_dtypes(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """The same seed draws the same directions in every precision; norms are summed in float32."""
    settings: dict[str, Any] = {"weights": "uniform", "seed": 2, "dimensions": 5}
    wide = jx.JacHess(classifier(name, dtype=torch.float32).double(), **settings)
    # float64 draws numbers of its own, so the reference runs on float32's
    narrow = jx.JacHess(classifier(name, dtype=dtype), **settings)
    reference = jx.JacHess(classifier(name, dtype=torch.float32), **settings)(BATCH)
    out = narrow(BATCH)
    assert out.loss.dtype == torch.float32 and out.jacobian.dtype == torch.float32
    assert wide(BATCH).loss.dtype == torch.float64
    torch.testing.assert_close(out.jacobian, reference.jacobian, rtol=tolerance, atol=0)
    torch.testing.assert_close(out.hessian, reference.hessian, rtol=2 * tolerance, atol=0)
    out.total.backward()
    grads = [p.grad for p in narrow.model.parameters() if p.grad is not None]
    assert all(torch.isfinite(g).all() and g.dtype == dtype for g in grads)


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "llama"])
def test_lora(name: str) -> None:
    """At B = 0 LoRA is the base model: the same R; gradients reach the adapters only."""
    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"]}.get(name, ["q_proj", "v_proj"])
    settings: dict[str, Any] = {"weights": "uniform", "seed": 2, "dimensions": 5}
    plain = jx.JacHess(classifier(name), **settings)(BATCH)
    config = LoraConfig(r=2, target_modules=targets, task_type="SEQ_CLS", lora_dropout=0.0)
    model = get_peft_model(classifier(name), config).double()
    out = jx.JacHess(model, **settings)(BATCH)
    torch.testing.assert_close(out.loss, plain.loss, rtol=1e-6, atol=0)
    out.total.backward()
    with_grad = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("lora_B" in n for n in with_grad)
    assert all("lora_" in n or "modules_to_save" in n for n in with_grad)


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "llama"])
def test_gradient_checkpointing(name: str) -> None:
    """Dropout on: the recomputed pass must see the same masks."""

    def gradients(checkpointing: bool) -> dict:
        model = classifier(name, dropout=0.2, dtype=torch.float32).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        reg = jx.JacHess(model, weights="uniform", seed=2, dimensions=5)
        torch.manual_seed(0)
        reg(BATCH).total.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, recomputed = gradients(False), gradients(True)
    assert plain.keys() == recomputed.keys()
    for key, gradient in plain.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(recomputed[key], gradient, rtol=1e-4, atol=1e-4 * scale)


def test_reentrant_checkpointing_is_refused() -> None:
    model = classifier("bert").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RuntimeError, match="reentrant gradient checkpointing"):
        jx.JacHess(model, weights="uniform")(BATCH)


def test_gradient_checkpointing_is_refused_by_the_reverse_engine() -> None:
    model = classifier("bert").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(
        ValueError, match=r"does not work with gradient checkpointing: use engine='jet'"
    ):
        jx.JacHess(model, weights="uniform", engine="reverse")(BATCH)


def test_a_plain_training_loop() -> None:
    """A plain loop lowers task loss and norms together."""
    model = classifier("bert", dtype=torch.float32).train()
    reg = jx.JacHess(model, strength=0.1, normalize=True, seed=0)
    reg.calibrate(BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        out = reg(BATCH)
        optimizer.zero_grad()
        out.total.backward()
        optimizer.step()
        losses.append((out.model_output.loss.item(), out.loss.item()))
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert sum(p for _, p in losses[-5:]) < 0.8 * sum(p for _, p in losses[:5])


def test_repr_has_a_line_per_layer() -> None:
    out = calibrated()(BATCH)
    lines = repr(out).splitlines()
    assert len(lines) == 2 + BLOCKS and str(out.smoothness).splitlines() == lines[1:]
    task = float(out.model_output.loss)
    assert lines[0] == (
        f"JacHessOutput: penalty {float(out.loss):.4g}, beside a task loss of {task:.4g}"
    )
    assert lines[1] == f"Smoothness of {int(BATCH['attention_mask'].sum())} tokens in 2 rows:"
    for k, line in enumerate(lines[2:]):
        norms = f"jacobian {out.jacobian[k].item():.4g}, hessian {out.hessian[k].item():.4g}"
        assert line == f"  layer {k}: {norms}"
    first = jx.smoothness(classifier("bert"), BATCH, hessian=False)
    assert "hessian" not in repr(first)
