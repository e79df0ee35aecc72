"""The kernel of every classifier family against per-sample gradients written out."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch

import jachess_ext as jx
from jachess_ext.ntk import measure_ntk

from .models import CLASSIFIERS, LABELS, batch, classifier
from .oracles import error, kernel

LENGTHS = [7, 4, 5, 3]
# transformers' experts index their weights: known to need gradients sample by sample.
FALLBACK = {"mixtral": "experts"}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_family(name: str) -> None:
    single = (torch.float32, [6, 6, 6], 1e-5)  # no padding
    cases = [(torch.float64, LENGTHS, 1e-10), *([single] if name in ("bert", "gpt2", "t5") else [])]
    for dtype, lengths, tolerance in cases:
        samples, count = batch(lengths), len(lengths)
        warned = pytest.warns(RuntimeWarning, match=r"exact per-sample gradients.*experts")
        with warned if name in FALLBACK else nullcontext():
            found = measure_ntk(classifier(name, dtype), samples)
        assert found.theta.shape == (count, LABELS, count, LABELS)
        assert found.theta.dtype == dtype and not found.theta.requires_grad
        assert error(found.theta, kernel(classifier(name), samples)) < tolerance
        assert all(FALLBACK.get(name, "none") in lost for lost in found.report.fallback)


@pytest.mark.parametrize("method", ["gram", "materialise", "per_sample"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_every_form_gives_the_same(name: str, method: str) -> None:
    model, samples = classifier(name), batch(LENGTHS)
    found = measure_ntk(model, samples, method=method)
    assert error(found.theta, kernel(model, samples)) < 1e-10
    forms = {choice.form for choice in found.report.choices}
    if method == "per_sample":
        assert forms == {"dense"} and len(found.report.fallback) == len(list(model.parameters()))
    else:
        assert {"gram": "A", "materialise": "B"}[method] in forms
        assert {"gram": "B", "materialise": "A"}[method] not in forms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models(dtype: torch.dtype) -> None:
    """Round-off of the model's own passes remains; the contraction adds none of that size."""
    theta = jx.ntk(classifier("bert", dtype), batch([5, 4]))
    expected = kernel(classifier("bert"), batch([5, 4]))
    assert theta.dtype == torch.float32
    assert error(theta, expected) < (0.1 if dtype == torch.bfloat16 else 0.01)


def test_symmetric_and_positive_semidefinite() -> None:
    theta = jx.ntk(classifier("bert"), batch([7, 4, 5, 3, 6]))
    matrix = theta.flatten(2).flatten(0, 1)
    assert torch.equal(matrix, matrix.T)
    values = torch.linalg.eigvalsh(matrix)
    assert values[0] > -1e-12 * values[-1]


def test_unequal_sides() -> None:
    """Other numbers of samples and other lengths on the right."""
    model, left, right = classifier("t5"), batch([7, 4, 5]), batch([4, 3], seed=11)
    theta = jx.ntk(model, left, right)
    assert theta.shape == (3, LABELS, 2, LABELS)
    assert error(theta, kernel(model, left, right)) < 1e-10
    assert error(jx.ntk(model, right, left).permute(2, 3, 0, 1), theta) < 1e-12


@pytest.mark.parametrize(("name", "sides"), [("gpt2", "symmetric"), ("t5", "unequal")])
def test_blocks(name: str, sides: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Small blocks, the last one ragged, give the numbers of one block; the bar counts them."""
    model, left = classifier(name), batch([7, 4, 5, 3, 6])
    right = batch([4, 3, 5, 6], seed=11) if sides == "unequal" else None
    whole = measure_ntk(model, left, right)
    assert whole.report.blocks == 1
    small = _two_a_block(model, left, right)
    found = measure_ntk(model, left, right, memory_budget=small, progress=True)
    assert found.report.block == 2
    assert found.report.blocks == (6 if right is None else 3 * 2)
    assert found.report.expected_bytes <= small
    assert error(found.theta, whole.theta) < 1e-12
    assert f"{found.report.blocks}/{found.report.blocks}" in capfd.readouterr().err


def _two_a_block(model: torch.nn.Module, left: dict, right: dict | None) -> int:
    """The smallest budget for blocks of two, from the sentence that refuses a tiny one."""
    with pytest.raises(ValueError, match="too few") as refused:
        jx.ntk(model, left, right, method="explain", memory_budget=1)
    numbers = re.search(r"kernel takes (\d+) and a pair of samples (\d+)", str(refused.value))
    assert numbers is not None
    result, pair = map(int, numbers.groups())
    return (result + 2 * pair) * 8 // 7 + 8


def test_one_sample() -> None:
    model, samples = classifier("t5"), batch([5])
    assert error(jx.ntk(model, samples), kernel(model, samples)) < 1e-10


def test_sum_is_the_pseudo_kernel() -> None:
    model, samples = classifier("bert"), batch([7, 4, 5])
    expected = kernel(model, samples).sum((1, 3), keepdim=True) / LABELS
    theta = jx.ntk(model, samples, outputs="sum")
    assert theta.shape == (3, 1, 3, 1)
    assert error(theta, expected) < 1e-10


def test_label_picks_each_samples_logit() -> None:
    model, left, right = classifier("opt"), batch([7, 4, 5]), batch([4, 3], seed=11)
    whole = kernel(model, left, right)
    rows, columns = torch.arange(3)[:, None], torch.arange(2)[None]
    expected = whole[rows, left["labels"][:, None], columns, right["labels"][None]]
    theta = jx.ntk(model, left, right, outputs="label")
    assert error(theta[:, 0, :, 0], expected) < 1e-10


@pytest.mark.slow
def test_random_projections_are_unbiased_with_the_stated_variance() -> None:
    """Over all 2^C sign vectors: the exact mean and variance, not a sample of them."""
    model, samples = classifier("bert"), batch([7, 4, 5])
    full = kernel(model, samples)
    trace = torch.einsum("ncmc->nm", full)
    symmetric = (full + full.permute(0, 3, 2, 1)) / 2
    off_diagonal = symmetric * (1 - torch.eye(LABELS))[None, :, None, :]
    variance = 2 * off_diagonal.square().sum((1, 3))  # k = 1
    by_signs = {}
    for seed in range(200):
        theta = jx.ntk(model, samples, outputs=1, seed=seed)[:, 0, :, 0]
        by_signs[f"{theta[0, 0]:.9e}"] = theta
        if len(by_signs) == 2 ** (LABELS - 1):  # v and −v give the same
            break
    draws = torch.stack(list(by_signs.values()))
    assert len(draws) == 2 ** (LABELS - 1)
    assert error(draws.mean(0), trace) < 1e-10
    assert error(draws.var(0, correction=0), variance) < 1e-9


def test_several_projections_are_their_sum() -> None:
    """Σ_j over k projections is (1/k) Σ_j v_jᵀ Θ v_j, the same signs on both sides."""
    model, samples = classifier("bert"), batch([7, 4])
    theta = jx.ntk(model, samples, outputs=4, seed=3)
    other = jx.ntk(model, samples, {k: v.clone() for k, v in samples.items()}, outputs=4, seed=3)
    assert theta.shape == (2, 4, 2, 4)
    assert error(theta, other) < 1e-12
    assert not torch.equal(theta, jx.ntk(model, samples, outputs=4, seed=4))


def test_outputs_of_ones_own() -> None:
    model, samples = classifier("bert"), batch([7, 4, 5])

    def first_state(batch: dict) -> torch.Tensor:
        given = {k: v for k, v in batch.items() if k != "labels"}
        return model(**given, output_hidden_states=True).hidden_states[-1][:, 0, :2]

    theta = jx.ntk(
        model,
        samples | {"output_hidden_states": True},
        outputs=lambda out, batch: out.hidden_states[-1][:, 0, :2],
    )
    assert error(theta, kernel(model, samples, f=first_state)) < 1e-10


def test_explain_gives_the_plan_and_runs_nothing_else() -> None:
    model, samples = classifier("bert"), batch([7, 4, 5])
    report = jx.ntk(model, samples, method="explain")
    found = measure_ntk(model, samples).report
    assert report.difference is None and found.difference < 1e-9
    for name, _ in model.named_parameters():
        assert report.form_of(name) == found.form_of(name) != "none"
    text = str(report)
    assert "3 samples, 3 outputs" in text and "word_embeddings" in text and "GFLOP A" in text
