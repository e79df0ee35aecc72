"""One run against its definition: losses, kernel, F and t by other means than the package's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.nn import functional

from jachess_ext.live_selection import measure
from jachess_ext.live_selection.jobs import SubsetJob
from jachess_ext.live_selection.plan import make_plan

from .conftest import MakeSettings


@pytest.fixture
def job(settings: MakeSettings) -> SubsetJob:
    plan = make_plan(settings(sizes=(8, 16, 40), probe=4))
    return plan.job(plan.candidates[0], 16)


def batch_of(job: SubsetJob, part: str) -> dict[str, torch.Tensor]:
    """Token ids from the words, without the package's encoding."""
    from transformers import AutoTokenizer

    examples = job.probe if part == "probe" else getattr(job.task, part)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    made = tokenizer(examples.texts, padding=True, return_tensors="pt")
    return {**made, "labels": torch.tensor(examples.labels)}


def logits_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def explicit_kernel(model: Any, batch: dict[str, torch.Tensor]) -> np.ndarray:
    """J Jᵀ from one backward pass for every number of the output."""
    logits = logits_of(model, batch)
    rows = []
    for value in logits.flatten():
        found = torch.autograd.grad(
            value, list(model.parameters()), retain_graph=True, allow_unused=True
        )
        rows.append(torch.cat([g.flatten() for g in found if g is not None]).double())
    jacobian = torch.stack(rows)
    return (jacobian @ jacobian.T).numpy()


def test_a_run_is_what_it_says(job: SubsetJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is replaced by a known change of the weights, so that its result is at hand."""
    seen: dict[str, Any] = {}

    def change(model: Any, train: Any, recipe: Any, *, seed: int, callbacks: Any) -> None:
        batch = batch_of(job, "probe")
        with torch.no_grad():
            seen["before"] = logits_of(model, batch).double().numpy()
            torch.manual_seed(3)
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        optimiser = torch.optim.SGD(model.parameters(), lr=2e-3)
        for _ in range(5):
            callbacks[0].on_pre_optimizer_step(None, None, None, optimizer=optimiser)
        seen["model"] = model

    monkeypatch.setattr(measure, "fine_tune", change)
    record, kernel = measure.run(job)
    assert kernel is not None
    model, probe = seen["model"], batch_of(job, "probe")
    batch = batch_of(job, "dev")
    with torch.no_grad():
        logits = logits_of(model, batch)
    expected = float(functional.cross_entropy(logits.double(), batch["labels"]))
    assert record.dev_loss == pytest.approx(expected, rel=1e-5)
    right = (logits.argmax(1) == batch["labels"]).double().mean()
    assert record.dev_score == record.scores["accuracy"] == pytest.approx(float(right))
    one_hot = functional.one_hot(batch["labels"], 2)
    brier = (logits.double().softmax(-1) - one_hot).square().sum(-1).mean()
    assert record.scores["brier"] == pytest.approx(float(brier), rel=1e-5)
    assert record.dev_rows == 40
    theta = explicit_kernel(model, probe)
    np.testing.assert_allclose(
        kernel.theta.reshape(8, 8), theta, rtol=1e-4, atol=1e-5 * theta.max()
    )
    np.testing.assert_allclose(
        kernel.eigenvalues, np.linalg.eigvalsh(theta), atol=1e-5 * theta.max()
    )
    one_hot = np.eye(2)[probe["labels"].numpy()]
    residual = seen["before"] - one_hot
    np.testing.assert_allclose(kernel.residual, residual, atol=1e-6)
    assert record.residual_square == pytest.approx((residual**2).sum(), rel=1e-5)
    with torch.no_grad():
        after = logits_of(model, probe).double().numpy() - one_hot
    assert record.probe_square == pytest.approx((after**2).sum(), rel=1e-5)
    assert (record.steps, record.time) == (5, pytest.approx(5 * 2e-3 / 5e-3))
    flow = scipy.linalg.expm(-theta * 5 * 2e-3 / 4) @ residual.flatten()  # Σ η_s / n, n = 4 rows
    assert record.kernel_loss == pytest.approx((flow**2).sum(), rel=1e-4)
    np.testing.assert_array_equal(kernel.labels, probe["labels"])
    assert record.size == 16 and record.kernel == f"{job.name}.npz" and record.error is None


def test_the_cost_is_six_n_d(job: SubsetJob) -> None:
    record, _ = measure.run(job)
    width, words, positions = 8, 20, 16
    embeddings = (words + positions + 2 + 2) * width  # and token types, and the norm
    attention = 4 * (width + 1) * width
    rest = (width + 1) * 2 * width + (2 * width + 1) * width + 4 * width
    ends = (width + 1) * width + (width + 1) * 2  # pooler and head
    parameters = embeddings + attention + rest + ends
    assert record.parameters == parameters
    tokens = 16 * (6 + 2)  # words of a row, [CLS], [SEP]
    assert record.tokens == tokens
    assert record.training_flops == 6 * parameters * tokens * 1.0
    assert record.judging_flops == 2 * parameters * 40 * 8
    # forward three times, and back for both outputs
    assert record.probe_flops > 2 * parameters * 4 * 8 * 5
    bare, kernel = measure.run(replace(job, probe=job.probe.first(0)))
    assert kernel is None and bare.probe_flops == 0 and bare.kernel is None
    assert (bare.dev_loss, bare.flops) == (record.dev_loss, record.flops - record.probe_flops)


@pytest.mark.parametrize(("epochs", "rows"), [(1.0, 40), (3.0, 16)])
def test_time_is_the_sum_of_the_schedule(job: SubsetJob, epochs: float, rows: int) -> None:
    """Linear warm-up over a tenth of the steps (rounded up), then linear decay to 0."""
    task = replace(job.task, train=job.task.train.chosen([i % 16 for i in range(rows)]))
    recipe = replace(job.recipe, epochs=epochs, batch_size=8)
    record, _ = measure.run(replace(job, task=task, recipe=recipe))
    steps = int(epochs * rows / 8)
    warm = int(np.ceil(0.1 * steps))
    rates = [s / warm if s < warm else (steps - s) / (steps - warm) for s in range(steps)]
    assert record.steps == steps
    assert record.time == pytest.approx(sum(rates))


def test_size_zero_is_the_model_before_training(job: SubsetJob) -> None:
    record, kernel = measure.run(replace(job, task=replace(job.task, train=job.probe.first(0))))
    assert (record.size, record.steps, record.time, record.tokens) == (0, 0, 0.0, 0)
    assert record.training_flops == 0 and kernel is not None
    assert record.kernel_loss == pytest.approx(record.residual_square) == record.probe_square
    trained, later = measure.run(job)
    assert later is not None
    np.testing.assert_array_equal(later.residual, kernel.residual)  # one head, one f0
    assert trained.dev_loss != record.dev_loss


def test_a_run_does_not_depend_on_those_before_it(job: SubsetJob) -> None:
    first, kernel = measure.run(job)
    torch.manual_seed(99)
    again, same = measure.run(job)
    assert first == again and kernel is not None and same is not None
    np.testing.assert_array_equal(kernel.theta, same.theta)
    other, _ = measure.run(replace(job, seed=1))
    assert other.dev_loss != first.dev_loss


def test_a_diverged_run_says_so(job: SubsetJob) -> None:
    record, kernel = measure.run(replace(job, recipe=replace(job.recipe, lr=1e30, epochs=3.0)))
    assert kernel is None and record.error is not None and "not finite" in record.error
    assert record.dev_loss is None and record.kernel is None


def test_names_follow_what_a_run_depends_on(job: SubsetJob) -> None:
    others = [
        replace(job, seed=5),
        replace(job, version="another"),
        replace(job, probe=job.probe.first(2)),
        replace(job, features=job.probe),
        replace(job, recipe=replace(job.recipe, epochs=2.0)),
        replace(job, task=replace(job.task, dev=job.task.dev.first(3))),
        replace(job, task=replace(job.task, train=job.task.train.first(3))),
    ]
    assert len({job.name, *(other.name for other in others)}) == 8
    assert replace(job).name == job.name
