"""`DualSchedule` by itself, without the Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jachess_ext as jx
from jachess_ext.training import DualSchedule
from python_tests.smoothness.tiny_models import classifier, token_batch

from .runs import assert_same_parameters, parameters


def schedule(batches: Any = None, **settings: Any) -> DualSchedule:
    reg = jx.JacHess(classifier("bert"), weights="uniform", dimensions=3, seed=0)
    batches = [token_batch([4, 3]), token_batch([3, 3])] if batches is None else batches
    return DualSchedule(reg, batches, **({"lr": 1e-3} | settings))


def test_a_pass_is_adamw_on_r_alone() -> None:
    """Against the same steps written out with ``torch.optim.AdamW``."""
    dual = schedule(max_grad_norm=None)
    summary = dual.run()
    model = classifier("bert")
    reg = jx.JacHess(model, weights="uniform", dimensions=3, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    model.train()
    outs = []
    for batch in dual.batches:
        optimizer.zero_grad()
        outs.append(reg(batch))
        outs[-1].loss.backward()
        optimizer.step()
    assert_same_parameters(dual.regulariser.model, model, rtol=0, atol=0)
    assert dual.regulariser.step == 2
    for name, attribute in (("penalty", "loss"), ("jacobian",) * 2, ("hessian",) * 2):
        values = [getattr(out, attribute).detach() for out in outs]
        torch.testing.assert_close(summary[name], (values[0] + values[1]) / 2)


def test_when_passes_are_due() -> None:
    by_epoch = schedule()
    assert [by_epoch.after_step() for _ in range(3)] == [None] * 3
    assert by_epoch.after_epoch() is not None and by_epoch.regulariser.step == 2
    by_steps = schedule(every=2, steps=1)
    due = [by_steps.after_step() is not None for _ in range(5)]
    assert due == [False, True, False, True, False] and by_steps.after_epoch() is None


def test_short_passes_go_on_where_the_last_one_ended() -> None:
    seen: list[int] = []

    class Recorded:
        def __iter__(self) -> Any:
            for number in range(3):
                seen.append(number)
                yield token_batch([2 + number])

    dual = schedule(Recorded(), steps=2)
    for _ in range(3):
        dual.run()
    assert seen == [0, 1, 2, 0, 1, 2]


def test_labels_are_dropped_and_gradients_and_modes_kept() -> None:
    dual = schedule()
    model = dual.regulariser.model
    model.eval()
    model.bert.pooler.train()
    modes = [module.training for module in model.modules()]
    head = model.classifier.weight
    head.grad = torch.ones_like(head)
    before = head.detach().clone()
    dual.run()
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(head.grad, torch.ones_like(head)), "the task's gradient is its own affair"
    assert torch.equal(head, before), "R does not depend on the head, and no weight decay acts"


def test_the_learning_rate_is_asked_for_at_each_step() -> None:
    rates = iter([9.0, 1e-3, 0.0])  # the first builds the optimiser
    dual = schedule(lr=lambda: next(rates), steps=1)
    dual.run()
    after = parameters(dual.regulariser.model)
    dual.run()
    assert all(torch.equal(p, after[n]) for n, p in parameters(dual.regulariser.model).items())
    assert dual.optimizer.param_groups[0]["lr"] == 0.0


def test_state_round_trip() -> None:
    whole = schedule(every=1)
    for _ in range(2):
        whole.after_step()
    first = schedule(every=1)
    first.after_step()
    second = schedule(every=1)
    second.regulariser.model.load_state_dict(first.regulariser.model.state_dict())
    second.regulariser.load_state_dict(first.regulariser.state_dict())
    second.load_state_dict(first.state_dict())
    second.after_step()
    assert second.taken == 2
    assert_same_parameters(whole.regulariser.model, second.regulariser.model, rtol=0, atol=0)


@pytest.mark.parametrize("steps", [None, 2])
def test_no_batches(steps: int | None) -> None:
    with pytest.raises(ValueError, match="there are no unlabelled batches"):
        schedule([], steps=steps).run()
