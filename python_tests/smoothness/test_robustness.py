"""Two regularisers on a model, casts, exceptions, threads, processes and pickles."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx
from python_tests import processes
from python_tests.smoothness.tiny_models import VOCABULARY, classifier

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {"weights": "uniform", "dimensions": 4, "strength": 1e-3}


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3}


def hooks(model: nn.Module) -> int:
    """Count the hooks on the model's modules."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


def gradients(regulariser: jx.JacHess, rows: dict[str, Tensor]) -> list[Tensor]:
    total = regulariser(rows).total
    return list(torch.autograd.grad(total, list(regulariser.model.parameters())))


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_two_regularisers_on_one_model() -> None:
    """Steps in turn give what each gives alone; both losses in one backward are the sum."""
    model = classifier("bert")
    alone = [gradients(jx.JacHess(model, seed=seed, **SETTINGS), batch()) for seed in (1, 2)]
    one, two = (jx.JacHess(model, seed=seed, **SETTINGS) for seed in (1, 2))
    assert_equal(gradients(one, batch()), alone[0])
    assert_equal(gradients(two, batch()), alone[1])
    one, two = (jx.JacHess(model, seed=seed, **SETTINGS) for seed in (1, 2))
    both = one(batch()).total + two(batch()).total
    together = torch.autograd.grad(both, list(model.parameters()))
    for sum_, a, b in zip(together, *alone, strict=True):
        torch.testing.assert_close(sum_, a + b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast_after_construction(dtype: torch.dtype) -> None:
    model = classifier("bert")
    regulariser = jx.JacHess(model, seed=1, **SETTINGS)
    exact = regulariser(batch()).loss
    model.to(dtype)
    again = jx.JacHess(model, seed=1, **SETTINGS)(batch()).loss
    assert again.dtype == (dtype if dtype == torch.float32 else again.dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(again.double(), exact, rtol=tolerance, atol=0)
    assert torch.isfinite(regulariser(batch()).loss)


class _Interruption(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Interruption


@pytest.mark.parametrize(
    "where, engine",
    [
        ("embeddings", "jet"),
        ("first block", "jet"),
        ("first block", "reverse"),
        ("second block", "jet"),
        ("head", "jet"),
    ],
)
def test_an_exception_leaves_the_model_clean(where: str, engine: str) -> None:
    """No hook stays behind, and the next step gives what it would have given."""
    model: Any = classifier("bert")
    model(**batch(), output_hidden_states=True)  # transformers adds hooks of its own
    before = hooks(model)
    settings = SETTINGS | {"engine": engine, "layers": [1], "scope": "last", "seed": 1}
    expected = gradients(jx.JacHess(model, **settings), batch())
    assert hooks(model) == before
    module = {
        "embeddings": model.bert.embeddings.LayerNorm,
        "first block": model.bert.encoder.layer[0].output.dense,
        "second block": model.bert.encoder.layer[1].attention.self.value,
        "head": model.classifier,
    }[where]
    regulariser = jx.JacHess(model, **settings)
    handle = module.register_forward_pre_hook(_stop)
    with pytest.raises(_Interruption):
        regulariser(batch())
    handle.remove()
    assert hooks(model) == before and regulariser.step == 0
    assert_equal(gradients(regulariser, batch()), expected)


def test_smoothness_measured_in_a_hook_of_a_pass() -> None:
    """A hook of the user's that measures the same model's smoothness in the middle of a pass."""
    model: Any = classifier("bert")
    other = classifier("gpt2")
    expected = gradients(jx.JacHess(model, seed=1, **SETTINGS), batch())
    inner = jx.smoothness(other, batch(), seed=3).jacobian
    seen: list[Tensor] = []

    def measure(*_: Any) -> None:
        seen.append(jx.smoothness(other, batch(), seed=3).jacobian)

    handle = model.bert.encoder.layer[1].register_forward_pre_hook(measure)
    actual = gradients(jx.JacHess(model, seed=1, **SETTINGS), batch())
    handle.remove()
    assert_equal(actual, expected)
    torch.testing.assert_close(seen[0], inner)


def test_threads_of_python() -> None:
    """Four threads, each with a model of its own, give what they give in turn."""
    models = [classifier("bert", seed=seed) for seed in range(4)]

    def work(seed: int) -> list[Tensor]:
        return gradients(jx.JacHess(models[seed], seed=seed, **SETTINGS), batch(seed))

    expected = [work(seed) for seed in range(4)]
    results: dict[int, list[Tensor]] = {}

    def store(seed: int) -> None:
        for _ in range(3):
            results[seed] = work(seed)

    threads = [threading.Thread(target=store, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert_equal(results[seed], expected[seed])


def test_number_of_threads_changes_nothing() -> None:
    threads = torch.get_num_threads()
    try:
        losses = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            losses.append(jx.JacHess(classifier("bert"), seed=1, **SETTINGS)(batch()).loss)
        assert losses[0] == losses[1] == losses[2]
    finally:
        torch.set_num_threads(threads)


def test_a_copy_goes_on_as_the_original_does() -> None:
    """On its own model."""
    regulariser = jx.JacHess(classifier("bert"), seed=1, **SETTINGS)
    regulariser(batch())
    other = copy.deepcopy(regulariser)
    assert other.model is not regulariser.model and other.step == 1
    assert_equal(gradients(other, batch()), gradients(regulariser, batch()))


def test_pickles() -> None:
    """Before the first call: afterwards transformers' own hooks keep the model from it."""
    regulariser = jx.JacHess(classifier("bert"), seed=1, **SETTINGS)
    other = pickle.loads(pickle.dumps(regulariser))
    assert other.model is not regulariser.model
    assert_equal(gradients(other, batch()), gradients(regulariser, batch()))


_LOADER = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
from jachess_ext import ops

def value(_=None):
    x = torch.linspace(-1, 1, 4 * 64 * 1024).view(4, 64, 1024)
    return ops.layer_norm_jet(ops.activation_jet(x, "gelu", 2), None, None, 1e-5, 2)

class Items(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return value()

if __name__ == "__main__":
    torch.set_num_threads(2)
    expected = value()                      # starts the parent's thread pool
    loader = DataLoader(Items(), num_workers=1, multiprocessing_context=sys.argv[1])
    assert all(torch.equal(item[0], expected) for item in loader)
    print("same")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_operators_in_a_loader_worker(method: str, tmp_path: Path) -> None:
    """After the parent has used its threads; `spawn` imports the script anew."""
    script = tmp_path / "script.py"
    script.write_text(_LOADER)
    run = processes.run(
        [sys.executable, str(script), method],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.stdout.strip() == "same", run.stderr[-2000:]
