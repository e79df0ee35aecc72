"""Predictions from records: Eq. 10 with a measured F by its formula, the others as `select`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg

from jachess_ext.live_selection.predict import Curve, fit_measured, make_curve, predict
from jachess_ext.live_selection.records import Kernel, RunRecord
from jachess_ext.scaling import LossTable, select
from jachess_ext.scaling.registry import LIVE, REGISTRY

SIZES = (0, 25, 50, 100, 200, 400, 800)
ROWS, OUTPUTS, RATE = 5, 2, 1e-3
TARGET = 6400


def kernel_of(seed: int, size: int) -> Kernel:
    """A kernel that grows with training, and residuals that all sizes share."""
    draw = np.random.default_rng(seed)
    n = ROWS * OUTPUTS
    root = draw.standard_normal((n, n))
    residual = draw.standard_normal((ROWS, OUTPUTS))
    theta = root @ root.T * (1 + np.log1p(size))
    return Kernel(
        theta.astype(np.float32).reshape(ROWS, OUTPUTS, ROWS, OUTPUTS),
        residual,
        np.linalg.eigvalsh(theta),
        np.arange(ROWS) % OUTPUTS,
    )


def flow_loss(kernel: Kernel, time: float) -> float:
    """‖exp(−η Θ t / n) r‖² by scipy's matrix exponential."""
    theta = kernel.theta.reshape(ROWS * OUTPUTS, -1).astype(np.float64)
    return float(
        ((scipy.linalg.expm(-RATE * theta * time / ROWS) @ kernel.residual.ravel()) ** 2).sum()
    )


def record_of(model: str, size: int, loss: float, parameters: int = 1000) -> RunRecord:
    return RunRecord(
        run=f"{model}-{size}",
        model=model,
        parameters=parameters,
        size=size,
        epochs=1.0,
        steps=size // 5,
        seed=0,
        learning_rate=RATE,
        time=size / 5,
        tokens=10 * size,
        metric="accuracy",
        dev_loss=loss,
        kernel=f"{model}-{size}.npz",
    )


def curve_of(
    model: str, seed: int, law: tuple[float, float, float], sizes: tuple[int, ...] = SIZES
) -> tuple[Curve, float]:
    """Losses that follow Eq. 10 exactly, and the one at the target (the last kernel's)."""
    scale, beta, floor = law
    kernels = {size: kernel_of(seed, size) for size in sizes}

    def loss(size: int, kernel: Kernel) -> float:
        return scale / (flow_loss(kernel, size / 5) + (size**beta if size else 0.0)) + floor

    records = [record_of(model, size, loss(size, kernels[size])) for size in sizes]
    curve = make_curve(records, lambda record: kernels[record.size])
    return curve, loss(TARGET, kernels[sizes[-1]])


LAWS = {"a": (30.0, 0.5, 0.2), "b": (20.0, 0.3, 0.1), "c": (60.0, 0.9, 0.4)}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_with_measured_kernels_is_recovered(name: str) -> None:
    curve, truth = curve_of(name, 7, LAWS[name])
    fitted = fit_measured(curve)
    scale, beta, floor = LAWS[name]
    assert fitted.params["B"] == pytest.approx(scale, rel=1e-3)
    assert fitted.params["beta"] == pytest.approx(beta, rel=1e-3)
    assert fitted.params["E"] == pytest.approx(floor, rel=1e-3)
    assert fitted.params["t"] == pytest.approx(1.0, rel=1e-2), "times are not stretched"
    assert fitted.predict(TARGET) == pytest.approx(truth, rel=1e-4)


def test_a_measured_law_ranks() -> None:
    made = {name: curve_of(name, seed, law) for seed, (name, law) in enumerate(LAWS.items())}
    found = predict([curve for curve, _ in made.values()], TARGET, "lensllm")
    truth = {name: loss for name, (_, loss) in made.items()}
    assert [one.model for one in found] == sorted(truth, key=lambda name: truth[name])
    for one in found:
        assert one.predicted == pytest.approx(truth[one.model], rel=1e-3) == one.score
        assert one.low is not None and one.low <= one.predicted <= one.high
    assert sum(one.prob_best for one in found) == pytest.approx(1.0)
    assert found[0].prob_best > 0.99


@pytest.fixture(scope="module")
def curves() -> list[Curve]:
    draw = np.random.default_rng(0)
    made = []
    for seed, (name, law) in enumerate(LAWS.items()):
        curve, _ = curve_of(name, seed, law)
        noisy = tuple(
            replace(
                r, dev_loss=r.dev_loss * np.exp(0.02 * draw.standard_normal()), parameters=seed + 9
            )
            for r in curve.records
        )
        made.append(Curve(noisy, curve.kernels))
    return made


@pytest.mark.parametrize("method", [m for m in LIVE if REGISTRY[m].table and m != "lensllm"])
def test_other_methods_are_those_of_select(curves: list[Curve], method: str) -> None:
    table = LossTable(
        tuple(curve.model for curve in curves),
        curves[0].sizes,
        np.stack([curve.losses for curve in curves]),
        np.array([9.0, 10.0, 11.0]),
    )
    expected = {row["name"]: row for row in select(table, 800, TARGET, method).rows()}
    found = predict(curves, TARGET, method)
    assert [one.model for one in found] == list(expected)
    for one in found:
        row = expected[one.model]
        for name in ("predicted", "low", "high", "prob_best"):
            value = getattr(one, name)
            assert value is None if name not in row else value == pytest.approx(row[name])


def test_a_model_stopped_early_keeps_its_own_sizes(curves: list[Curve]) -> None:
    """Its forecast is the one of the table up to its last size; the others' is without it."""
    short = Curve(curves[0].records[:5], curves[0].kernels[:5])
    mixed = {one.model: one for one in predict([short, *curves[1:]], TARGET, "blend")}
    up_to = [Curve(curve.records[:5], curve.kernels[:5]) for curve in curves]
    alone = {one.model: one for one in predict(up_to, TARGET, "blend")}
    others = {one.model: one for one in predict(curves[1:], TARGET, "blend")}
    assert mixed["a"].predicted == pytest.approx(alone["a"].predicted)
    for name in ("b", "c"):
        assert mixed[name].predicted == pytest.approx(others[name].predicted)
    assert sum(one.prob_best for one in mixed.values()) == pytest.approx(1.0)


def test_failed_runs_and_short_curves(curves: list[Curve]) -> None:
    failed = replace(curves[0].records[3], dev_loss=None, kernel=None, error="diverged")
    records = [*curves[0].records[:3], failed]
    curve = make_curve(records, lambda record: curves[0].kernels[0])
    assert list(curve.sizes) == [0, 25, 50]
    with pytest.raises(ValueError, match="blend needs 3 sizes above 0 or more, and a has 2"):
        predict([curve, *curves[1:]], TARGET, "blend")


def test_an_interval_without_an_upper_end_has_none() -> None:
    """A law with one degree of freedom left on a jump: its interval reaches beyond any double."""
    losses = {"a": (2.0, 2.0, 2.0, 1.999, 0.02), "b": (2.0, 1.9, 1.8, 1.7, 1.6)}
    curves = []
    for name, values in losses.items():
        kernel = kernel_of(0, 0)
        records = tuple(record_of(name, s, v) for s, v in zip(SIZES, values, strict=False))
        curves.append(Curve(records, (kernel,) * len(records)))
    found = predict(curves, 1e9, "rectified", level=0.999999)
    assert any(one.low is not None and one.high is None for one in found)
    assert all(one.high is None or np.isfinite(one.high) for one in found)
