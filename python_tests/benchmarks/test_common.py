"""What the benchmark scripts share: timing order, result files, the floor's shapes, options."""

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.common import (
    SHAPES,
    Row,
    Spread,
    Timings,
    append_rows,
    build_model,
    interleaved,
    make_batch,
    penalty_step,
    plain_step,
    train_step,
)
from benchmarks.derivatives import Linear, floor_step, linear_products

CPU = torch.device("cpu")


def gradient_norm(model: nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def test_steps_are_timed_in_rounds_and_warm_up_does_not_count() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "AB"}
    times = interleaved(steps, repeats=8, device=CPU, warmup=2)
    rounds = ["".join(order[start : start + 2]) for start in range(0, 20, 2)]
    assert len(rounds) == 10 and {*rounds} == {"AB", "BA"}
    assert {name: len(values) for name, values in times.seconds.items()} == {"A": 8, "B": 8}
    spread = Spread.of([float(value) for value in range(11)])
    assert (spread.p20, spread.p50, spread.p80) == pytest.approx((2.0, 5.0, 8.0))
    times = Timings({"ours": [0.4, 0.1, 0.2], "theirs": [0.1, 9.0, 0.05]})
    assert times.ratio("ours", "theirs") == pytest.approx(2.0)
    assert times.milliseconds("ours").p50 == pytest.approx(200.0)


def test_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timing.csv"
    texts = {"question": "q", "shape": "s", "dtype": "float32", "figure": "f", "baseline": "b"}
    numbers = {"p20": 1.0, "p50": 2.0, "p80": 3.0, "baseline_p50": 4.0, "ratio": 0.5}
    row = Row(**texts, **numbers, note="a, with a comma")  # type: ignore[arg-type]
    for _ in range(2):
        append_rows([row], path, CPU)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [each["note"] for each in rows] == ["a, with a comma"] * 2
    assert all(each["torch"] == torch.__version__ and each["commit"] for each in rows)
    assert rows[0]["peak_mb"] == "" and float(rows[0]["ratio"]) == 0.5
    path.write_text("date,ratio\n2026,4\n")
    with pytest.raises(ValueError, match="move it away"):
        append_rows([row], path, CPU)
    assert path.read_text() == "date,ratio\n2026,4\n"


def test_the_floor_has_the_models_own_products() -> None:
    model, batch = build_model(SHAPES["tiny"]), make_batch(SHAPES["tiny"], labels=False)
    # Per layer: query, key, value, attention output; in; out.  Pooler and head are not token-wise.
    expected = {Linear(16, 64, 64): 8, Linear(16, 64, 128): 2, Linear(16, 128, 64): 2}
    assert linear_products(model, batch) == Counter(expected)
    floor_step(model, batch, SHAPES["tiny"], 4)()


@pytest.mark.parametrize("name", ["tiny", "llama-tiny", "opt-tiny"])
def test_every_step_leaves_gradients(name: str) -> None:
    model, batch = build_model(SHAPES[name]), make_batch(SHAPES[name], labels=True)
    norms = []
    for step in (plain_step(model, batch), penalty_step(model, batch, seed=0)):
        step()
        norms.append(gradient_norm(model))
    train_step(model, batch, seed=0)()
    train, (plain, penalty) = gradient_norm(model), norms
    assert min(plain, penalty, train) > 0
    # The gradient of the sum: within the triangle inequality, and neither term alone.
    assert abs(penalty - plain) * 0.999 <= train <= (penalty + plain) * 1.001
    assert train != pytest.approx(penalty, rel=1e-9)
