"""Each part of the two papers, by its equation or section, run against something independent.

Jukić & Šnajder, *From Robustness to Improved Generalization and Calibration in Pre-trained Language
Models* (JacHess), and LensLLM, *Unveiling Fine-Tuning Dynamics for LLM Selection*.
"""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares
from scipy.special import huber as scipy_huber
from scipy.stats import linregress
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext.lab.compare.tables import significant_methods, to_frame
from jachess_ext.scaling import (
    Ask,
    LossTable,
    Search,
    fit,
    mean_tail_exponent,
    pac_bayes_bound,
    select,
)
from jachess_ext.scaling.least_squares import huber
from python_tests.lab.compare.records import by_method
from python_tests.smoothness.tiny_models import BLOCKS, WIDTH, classifier, token_batch
from python_tests.training import runs

# JacHess ----------------------------------------------------------------------------------------

TOKENS = 2


@pytest.fixture(scope="module")
def dense() -> tuple[Tensor, Tensor]:
    """Return ‖J_t‖² [K, T] and ‖H_t,j‖² [K, T, d] of a tiny encoder, by dense derivatives."""
    model, batch = classifier("bert"), token_batch([TOKENS])
    x = model.get_input_embeddings()(batch["input_ids"]).detach()

    def states(x: Tensor) -> Tensor:
        output = model(
            inputs_embeds=x, attention_mask=batch["attention_mask"], output_hidden_states=True
        )
        return torch.stack(output.hidden_states[1:])[:, 0]  # [K, T, d]

    jacobian = torch.func.jacrev(states)
    first, second = jacobian(x), torch.func.jacfwd(jacobian)(x)
    squares = first.square().flatten(3).sum((-1, -2)), second.square().flatten(3).sum(-1)
    return squares[0].detach(), squares[1].detach()


@pytest.mark.parametrize(("engine", "directions"), [("jet", 64), ("reverse", 16)])
def test_eq_5_and_6_jacobian_and_hessian_norms(
    engine: Any, directions: int, dense: tuple[Tensor, Tensor]
) -> None:
    """Eq. 5 and 6: ‖J‖² and ‖H‖² of every block's output by the token embeddings, estimated."""
    settings = {"engine": engine, "squared": True, "dimensions": "all", "directions": directions}
    norms = jx.smoothness(classifier("bert"), token_batch([TOKENS]), seed=3, **settings)
    torch.testing.assert_close(norms.jacobian, dense[0].sum(-1), rtol=0.1, atol=0)
    # With all d dimensions the sum is scaled to the ten that the paper draws.
    hessian = dense[1].sum((-1, -2)) * 10 / WIDTH
    torch.testing.assert_close(norms.hessian, hessian, rtol=0.1, atol=0)


def test_eq_7_penalty() -> None:
    """Eq. 7: R = Σ_k λ_k (‖J_k‖ + Σ_j ‖H_k,j‖), added to the task loss."""
    model, batch, weights = classifier("bert"), token_batch([3, 2]), [0.3, 0.7]
    out = jx.JacHess(model, weights=weights, strength=0.5, seed=4)(batch)
    norms = jx.smoothness(model, batch, seed=4)
    assert norms.hessian is not None and len(norms.jacobian) == BLOCKS
    expected = 0.5 * torch.tensor(weights).double() @ (norms.jacobian + norms.hessian)
    torch.testing.assert_close(out.loss.double(), expected.double())
    torch.testing.assert_close(out.total, out.loss + model(**batch).loss)


@pytest.mark.parametrize("mode", ["train", "joint", "unlab"])
def test_training_modes(mode: str, tmp_path: Path) -> None:
    """The modes train, joint and unlab (Dual): each makes a model smoother than plain training."""
    strong = {"strength": 1.0, "unlab_every": 1, "unlab_lr_ratio": 1.0}
    rows = runs.examples(8, seed=1, labels=False)
    settings = {"unlabelled": None if mode == "train" else rows, "max_steps": 6}
    plain = runs.trainer(tmp_path, "none", max_steps=6)
    penalised = runs.trainer(tmp_path, {"mode": mode} | strong, **settings)
    sums = []
    for trainer in (plain, penalised):
        trainer.train()
        norms = jx.smoothness(trainer.model.eval(), token_batch([3, 3, 3]), seed=0)
        assert norms.hessian is not None
        sums.append(float((norms.jacobian + norms.hessian).sum()))
    assert sums[1] < 0.98 * sums[0], sums


@pytest.mark.parametrize(
    "method", ["l2", "jacobian-train", "cross-holder-train", "published-train"]
)
def test_baselines(method: str, tmp_path: Path) -> None:
    """The baselines L2, Jacobian and Cross-Hölder regularisation, and the paper's own code."""
    plain, trainer = (runs.trainer(tmp_path, name) for name in ("none", f"{method},strength=0.3"))
    plain.train()
    loss = trainer.train().training_loss
    assert math.isfinite(loss) and runs.furthest(plain.model, trainer.model) > 1e-6


def test_significance_marks() -> None:
    """The marks of the tables: Mann–Whitney U, two-sided, p < 0.05 after Holm's correction."""
    scores = {
        "none": [0.50, 0.51, 0.52, 0.53, 0.54],
        "sam": [0.525, 0.56, 0.57, 0.58, 0.59],
        "l2": [0.526, 0.55, 0.56, 0.57, 0.58],
        "r3f": [0.40, 0.41, 0.42, 0.43, 0.44],
    }
    splits = [set(split) for split in combinations(range(10), 5)]

    def p_value(a: list[float], b: list[float]) -> float:
        """The share of the splits of all ten values whose U is as far from its mean."""
        values = np.array([*a, *b])

        def distance(split: set[int]) -> float:
            first, second = values[sorted(split)], values[sorted(set(range(10)) - split)]
            return abs(float((first[:, None] > second).sum()) - 12.5)

        observed = distance(set(range(5)))
        return float(np.mean([distance(split) >= observed for split in splits]))

    p = {name: p_value(values, scores["none"]) for name, values in scores.items() if name != "none"}
    assert [round(p[name] * 252) for name in ("sam", "l2", "r3f")] == [8, 8, 2]
    runs_frame = to_frame(by_method(scores))
    # Holm: r3f 3 · 2/252 = 0.024; sam and l2 2 · 8/252 = 0.063 (by Bonferroni 0.095)
    assert significant_methods(runs_frame, "score") == {"r3f"}
    assert significant_methods(runs_frame, "score", level=0.07) == {"sam", "l2", "r3f"}


# LensLLM ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel() -> tuple[Tensor, Tensor]:
    """Return Θ [n, n] of a small network by autograd, and a residual [n]."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double(),
        torch.randn(4, 3),
    )
    x = x.double()
    outputs = model(x).flatten()
    rows = [torch.autograd.grad(y, [*model.parameters()], retain_graph=True) for y in outputs]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    theta = jacobian @ jacobian.T
    torch.testing.assert_close(jx.ntk(model, x).reshape(8, 8), theta)
    return theta, outputs.detach() - torch.tensor([1.0, 0.0] * 4).double()


def test_eq_8_and_9_ntk_term(kernel: tuple[Tensor, Tensor]) -> None:
    """Eq. 8 and 9: the kernel Θ, and F(Θ, t) = ‖exp(−η Θ t) r‖²."""
    theta, residual = kernel
    for t in (0.0, 3.0, 50.0):
        decayed = torch.matrix_exp(-0.01 * theta * t) @ residual
        expected = decayed.square().sum()
        torch.testing.assert_close(jx.ntk_loss(theta, residual, t, lr=0.01), expected)


def test_eq_10_law_with_the_ntk_term(kernel: tuple[Tensor, Tensor]) -> None:
    """Eq. 10: L = B / (F(Θ, t) + D^β) + E, with F of a measured kernel."""
    theta, residual = kernel
    sizes = np.array([20.0, 40, 80, 160, 320, 640, 1280, 2560])
    f = [float((torch.matrix_exp(-0.01 * theta * d) @ residual).square().sum()) for d in sizes / 4]
    losses = 40 / (30 * np.array(f) / 30 + sizes**0.6) + 0.3
    law = fit(sizes, losses, "lensllm", theta=theta, residual=residual, t=sizes / 4, lr=0.01)
    np.testing.assert_allclose(law.predict(sizes), losses, rtol=1e-3)
    assert law.predict(40_960) == pytest.approx(40 / 40_960**0.6 + 0.3, rel=0.01)


SIZES = 100.0 * 2 ** np.arange(12)


def test_rectified_law_and_its_two_phases() -> None:
    """Section 4: L = B / (D_l + D^β) + E is flat before D* = D_l^(1/β), and a power law after."""
    shift, beta = 3200.0**0.5, 0.5
    losses = 60 / (shift + SIZES**beta) + 0.2
    law = fit(SIZES, losses, "rectified")
    assert law.params == pytest.approx({"B": 60, "D_l": shift, "beta": 0.5, "E": 0.2}, rel=1e-3)
    transition = law.transition
    assert transition is not None and transition.size == pytest.approx(3200, rel=1e-3)
    slopes = [
        math.log((law.predict(2 * d) - 0.2) / (law.predict(d) - 0.2)) / math.log(2)
        for d in (100, 1e7)
    ]
    assert slopes[0] > -0.11 and slopes[1] == pytest.approx(-0.5, abs=0.02)


def test_huber_loss_of_the_fit() -> None:
    """Section 4: the laws are fitted with a Huber loss, which an outlier moves little."""
    residuals = np.array([[0.001, -0.02, 0.3]])
    ours = huber(residuals, np.ones((1, 3)), np.array([0.01]))[0]
    assert ours == pytest.approx(scipy_huber(0.01, residuals).sum())
    truth = 60 / (10 + SIZES**0.5) + 0.2
    losses = truth.copy()
    losses[5] *= 3

    def squares(u: np.ndarray) -> np.ndarray:
        return np.log(np.exp(u[0]) / (np.exp(u[1]) + SIZES ** u[2]) + u[3]) - np.log(losses)

    plain = least_squares(squares, [np.log(60), np.log(10), 0.5, 0.2]).x
    worse = np.exp(squares(plain)[-1]) * losses[-1] / truth[-1] - 1
    robust = fit(SIZES, losses, "rectified").predict(SIZES[-1]) / truth[-1] - 1
    assert abs(robust) < 0.02 < abs(worse) / 2, (robust, worse)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_theorem_2_bound_and_the_phases_of_corollary_1() -> None:
    """Theorem 2: (1 + ε) L̂ + (1 + ε) √C Σ √h / √n + n^(−3/4); Corollary 1: its two phases."""
    torch.manual_seed(0)
    model, before = nn.Linear(3, 2, bias=False).double(), nn.Linear(3, 2, bias=False).double()
    batch = (torch.randn(1, 3).double(), torch.tensor([1]))
    p = model(batch[0])[0].softmax(-1).detach()
    # The Hessian of a cross-entropy in the weights is (diag p − p pᵀ) ⊗ x xᵀ, positive as it is.
    logit_change = ((model.weight - before.weight) @ batch[0][0]).detach()
    h = float(logit_change @ (torch.diag(p) - torch.outer(p, p)) @ logit_change)
    loss = float(cross_entropy(model, batch).detach())

    def bound(n: int) -> Any:
        return pac_bayes_bound(model, before, [batch], n, epsilon=0.2, loss=cross_entropy)

    curvature = 1.2 * math.sqrt(loss * h / 50)
    assert bound(50).curvature == pytest.approx(curvature)
    assert bound(50).total == pytest.approx(1.2 * loss + curvature + 50**-0.75)
    # n^(−3/4) = 1.2 √(C h) n^(−1/2) at the border of the phases
    border = (1.2 * math.sqrt(loss * h)) ** -4
    phases = [bound(max(1, round(border * factor))).phase for factor in (0.5, 2)]
    assert phases == ["pre-power", "power"], border


def kinked(rows: float) -> float:
    """A line in ln L over ln D from 200 rows on, and off it below."""
    line = 3 * rows**-0.2 * (1 + 0.001 * (rows % 3))
    return line if rows >= 200 else 0.8 * line


def test_algorithm_1_as_a_fit() -> None:
    """Algorithm 1: the line through the last points, up to the first that leaves it."""
    losses = np.array([kinked(d) for d in SIZES])
    line = linregress(np.log(SIZES[1:]), np.log(losses[1:]))
    expected = math.exp(line.intercept + line.slope * math.log(1e6))
    assert fit(SIZES, losses, "ats").predict(1e6) == pytest.approx(expected)


def test_algorithm_1_as_a_strategy() -> None:
    """Algorithm 1: each model is trained on halves of the budget until the criterion stops it."""
    sizes = [25, 50, 100, 200, 400, 800, 1600]
    search = Search(["a", "b"], sizes, 12_800, strategy="accept-then-stop", method="ats")
    while ask := search.ask():
        search.tell(ask, kinked(ask.rows) * (1 if ask.model == "a" else 1.1))
    for model in "ab":
        trained = [ask.rows for ask in search.results if ask.model == model]
        assert trained == [1600, 800, 400, 200, 100], "the one at 100 rows leaves the line"
    assert search.best() == "a" and Ask("a", 50) not in search.results


def test_baselines_of_the_selection() -> None:
    """Section 5: the rectified law, SubTuning, ZeroShot, ModelSize and NLPmetrics."""
    sizes = np.array([0.0, *SIZES[:6], 102_400])
    curves = ((60, 20, 0.3), (250, 80, 0.6))
    losses = np.array([b / (shift + sizes**beta) + 0.1 for b, shift, beta in curves])
    table = LossTable(("flat", "steep"), sizes, losses, np.array([7e9, 1e9]))
    first = {m: select(table, SIZES[5], 102_400, m).ranking[0] for m in (
        "rectified", "power", "subtuning", "zeroshot", "modelsize")}  # fmt: skip
    assert losses[0, -1] > losses[1, -1] and losses[0, 0] < losses[1, 0]
    assert first["rectified"] == "steep" and first["zeroshot"] == first["modelsize"] == "flat"
    assert first["subtuning"] == ("flat", "steep")[int(losses[:, -2].argmin())]
    forecast = select(table, SIZES[5], 102_400, "rectified").predicted_losses
    np.testing.assert_allclose(forecast, losses[:, -1], rtol=0.02)
    # Eigenvalues of WᵀW at the quantiles of λ^(−3)
    quantiles = torch.arange(1, 201, dtype=torch.float64) / 201
    weights = {"w": torch.diag(quantiles**-0.25), "bias": torch.ones(9)}
    assert mean_tail_exponent(weights) == pytest.approx(3, rel=0.05)
