"""The monitors in real, tiny runs of transformers' and Lightning's Trainers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

import jachess_ext as jx
from python_tests.smoothness.tiny_models import BLOCKS, LABELS, classifier, token_batch

from .runs import assert_same_parameters, examples, trainer

BATCH = token_batch([4, 2, 5, 3])


def oracle(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """By autograd alone, row by row without padding, in evaluation mode."""
    model = copy.deepcopy(model).eval()
    jacobians, distances = [], []
    for ids, mask, label in zip(
        batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True
    ):
        ids = ids[mask.bool()][None]
        x = model.get_input_embeddings()(ids).detach()

        def logits(x: torch.Tensor) -> torch.Tensor:
            return model(inputs_embeds=x).logits[0]

        jacobians.append(torch.autograd.functional.jacobian(logits, x).norm().item())
        x.requires_grad_()
        z = logits(x)
        margin = z[label] - torch.stack([z[c] for c in range(LABELS) if c != label]).max()
        margin.backward()
        distances.append((margin / x.grad.norm()).item())
    return {
        "smoothness/logit_jacobian": sum(jacobians) / len(jacobians),
        "smoothness/margin_over_slope": sum(distances) / len(distances),
    }


def assert_figures(found: dict[str, float], model: Any, rel: float = 1e-4) -> None:
    """Against autograd, and the hidden norms against the public function."""
    for name, value in oracle(model, BATCH).items():
        assert found[name] == pytest.approx(value, rel=rel)
    inputs = {key: value for key, value in BATCH.items() if key != "labels"}
    clean = copy.deepcopy(model).eval()
    norms = jx.smoothness(clean, inputs, seed=0, hessian=False).jacobian
    for block, value in enumerate(norms.tolist()):
        assert found[f"smoothness/jacobian_{block}"] == pytest.approx(value, rel=1e-6)
    assert found["smoothness/jacobian"] == pytest.approx(float(norms.sum()), rel=1e-6)


def noisy_model() -> Any:
    """With dropout, so that a draw of the monitor's would be seen in training."""
    return classifier("bert", dropout=0.3, dtype=torch.float32)


def test_a_run(tmp_path: Path) -> None:
    """Every other step and at both ends; through `Trainer.log`, beside the training losses."""
    model = noisy_model()
    run = trainer(tmp_path, model=model, kind=Trainer, max_steps=5, learning_rate=0.01)
    seen: list[dict] = []
    log = run.log
    run.log = lambda logs, *rest: (seen.append(dict(logs)), log(logs, *rest))
    run.add_callback(jx.SmoothnessMonitor(BATCH, every=2, log=run.log))
    start = copy.deepcopy(model)
    run.train()
    entries = [e for e in run.state.log_history if "smoothness/jacobian" in e]
    assert [entry["step"] for entry in entries] == [0, 2, 4, 5]
    assert sum("smoothness/jacobian" in entry for entry in seen) == 4
    assert_figures(entries[0], start)
    assert_figures(entries[-1], run.model)
    assert entries[0]["smoothness/jacobian"] != entries[-1]["smoothness/jacobian"]
    losses = [entry["step"] for entry in run.state.log_history if "loss" in entry]
    assert losses == [1, 2, 3, 4, 5]  # none gave way to the monitor's entry of the same step


def test_transformers_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], [jx.SmoothnessMonitor(BATCH, every=1, hessian=True)]):
        run = trainer(
            tmp_path / str(len(runs)),
            model=noisy_model(),
            kind=Trainer,
            max_steps=4,
            gradient_accumulation_steps=2,
            options={"callbacks": callbacks},
        )
        run.model.bert.embeddings.eval()  # a module in another mode than the rest
        run.train()
        runs.append((run, torch.get_rng_state()))
    (plain, before), (watched, after) = runs
    assert_same_parameters(plain.model, watched.model, rtol=0, atol=0)
    assert torch.equal(before, after)
    figures = [[e.get("loss"), e.get("grad_norm")] for e in plain.state.log_history if "loss" in e]
    assert figures == [
        [e.get("loss"), e.get("grad_norm")] for e in watched.state.log_history if "loss" in e
    ]
    assert sum("smoothness/hessian" in e for e in watched.state.log_history) == 5


def test_the_probe_leaves_a_model_as_it_was() -> None:
    model = noisy_model().train()
    model.classifier.eval()
    model(**BATCH).loss.backward()
    modes = [module.training for module in model.modules()]
    grads = [p.grad.clone() for p in model.parameters()]
    state, probe = torch.get_rng_state(), jx.SmoothnessProbe(BATCH, hessian=True)
    assert probe(model) == probe(model)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert all(p.requires_grad for p in model.parameters())


def test_without_labels_and_of_language_models() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    unlabelled = {key: value for key, value in BATCH.items() if key != "labels"}
    found = jx.SmoothnessProbe(unlabelled)(classifier("bert"))
    assert "smoothness/logit_jacobian" in found and "smoothness/margin_over_slope" not in found
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    found = jx.SmoothnessProbe(BATCH)(GPT2LMHeadModel(config))
    assert set(found) == {f"smoothness/jacobian{name}" for name in ("", "_0", "_1")}


@pytest.mark.parametrize("settings, sentence", [
    ({"every": 0}, "every is 0; expected a number of steps"),
    ({"batch": {"labels": torch.zeros(2)}}, "input_ids"),
])  # fmt: skip
def test_bad_arguments(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        jx.SmoothnessMonitor(**({"batch": BATCH} | settings))


def lightning_run(callbacks: list[Any], folder: Path) -> tuple[Any, Any]:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = noisy_model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    lightning.seed_everything(0)
    module = Module().train()
    made = lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        accumulate_grad_batches=2,
        logger=CSVLogger(folder),
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    made.fit(module, DataLoader(examples(16), 2, shuffle=True))
    return made, module


def test_lightning(tmp_path: Path) -> None:
    """The same figures in Lightning's logger, and the same parameters bit for bit."""
    _, plain = lightning_run([], tmp_path / "plain")
    state = torch.get_rng_state()
    monitor = jx.LightningSmoothnessMonitor(BATCH, every=2)
    made, module = lightning_run([monitor], tmp_path / "watched")
    assert_same_parameters(plain.model, module.model, rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())
    assert [entry["step"] for entry in monitor.history] == [0, 2, 3]
    assert_figures(monitor.history[0], noisy_model())
    assert_figures(monitor.history[-1], module.model)
    logged = (Path(made.logger.log_dir) / "metrics.csv").read_text()
    assert "smoothness/margin_over_slope" in logged.splitlines()[0]
    assert [line for line in logged.splitlines()[1:] if str(monitor.history[-1][
        "smoothness/logit_jacobian"]) in line]  # fmt: skip


def test_the_plot_shows_the_history(tmp_path: Path) -> None:
    monitor = jx.SmoothnessMonitor(BATCH, every=1)
    with pytest.raises(ValueError, match="nothing was measured yet"):
        monitor.plot()
    trainer(tmp_path, options={"callbacks": [monitor]}).train()
    axes = monitor.plot()
    for block, line in enumerate(axes.get_lines()):
        wanted = [entry[f"smoothness/jacobian_{block}"] for entry in monitor.history]
        assert line.get_ydata().tolist() == wanted and line.get_xdata().tolist() == [0, 1, 2]
    assert len(axes.get_lines()) == BLOCKS and monitor.plot(axes) is axes
