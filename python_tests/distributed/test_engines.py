"""Other engines of data parallelism: `replicate`, a wrapper around a module that holds JacHess,
and DeepSpeed; and runs that are resumed under each."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import jachess_ext as jx
from python_tests import processes
from python_tests.distributed.engine_jobs import STAGES
from python_tests.distributed.rank_jobs import SETTINGS, shard
from python_tests.distributed.scale_job import cases, runs
from python_tests.distributed.test_data_parallel import (  # noqa: F401  a fixture among them
    assert_same,
    joined,
    joined_directions,
    training_steps,
)
from python_tests.smoothness.tiny_models import classifier
from python_tests.training.test_architectures import LOUD

needs_deepspeed = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="needs deepspeed: DS_BUILD_OPS=0 pip install deepspeed",
    ),
]


@cache
def results(jobs: str) -> list[dict[str, Any]]:
    """Every rank's results; each kind of jobs runs once."""
    # deepspeed looks at its folder of kernels; on a machine with a GPU it would take it
    settings = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    module = "python_tests.distributed.engine_jobs"
    return processes.results_of_ranks(module, jobs, env=os.environ | settings)


def result(jobs: str, name: str) -> list[Any]:
    """One job's results on every rank."""
    found = [rank[name] for rank in results(jobs)]
    assert not any(isinstance(of, dict) and "error" in of for of in found), found
    return found


def base_of_all() -> dict[str, Any]:
    regulariser = jx.JacHess(classifier("bert"), **SETTINGS | {"weights": "softmax"})
    return regulariser.calibrate([joined([shard(0, rank) for rank in range(2)])]).state_dict()


@pytest.mark.parametrize("job", ["replicated", "held"])
def test_training_steps(job: str, joined_directions: None) -> None:  # noqa: F811
    """As one process on the joined batch: the ranks draw what it draws for their rows."""
    for rank in result("torch", job):
        assert_same(rank["parameters"], training_steps(2, 1))


def test_base_norms_of_a_replicated_model(joined_directions: None) -> None:  # noqa: F811
    for base in result("torch", "replicated_base"):
        assert base["tokens"] == base_of_all()["tokens"]
        assert base["jacobian"] == pytest.approx(base_of_all()["jacobian"], rel=1e-12)


def test_base_norms_measured_by_each_rank_are_averaged() -> None:
    parts = []
    for rank in range(2):
        regulariser = jx.JacHess(classifier("bert"), **SETTINGS | {"weights": "softmax"})
        parts.append(regulariser.calibrate([shard(0, rank)]))
    tokens = [part.tokens for part in parts]
    found = result("torch", "held_base")
    assert found[0] == found[1] and found[0]["tokens"] == sum(tokens)
    for name in ("jacobian", "hessian"):
        mean = sum(getattr(p, name) * p.tokens for p in parts) / sum(tokens)
        assert found[0][name] == pytest.approx(mean.tolist(), rel=1e-12)


RESUMED = [
    ("torch", "ddp", "DistributedDataParallel"),
    *(
        pytest.param("deepspeed", f"zero{stage}", "DeepSpeedEngine", marks=needs_deepspeed)
        for stage in (1, 2)
    ),
]


@pytest.mark.parametrize("jobs, name, engine", RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(jobs: str, name: str, engine: str) -> None:
    for rank in result(jobs, f"resumed {name}"):
        assert rank["engine"] == engine
        whole, resumed = rank["whole"], rank["resumed"]
        assert whole["ranks"] == resumed["ranks"] == 2
        assert whole["state"] == resumed["state"] and whole["state"]["step"] == 5
        for of, value in whole["parameters"].items():
            assert torch.equal(resumed["parameters"][of], value), of


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, torch.Tensor]]:
    return runs(tmp_path_factory.mktemp("scale"), 1)


@pytest.mark.parametrize("method, kind", cases())
def test_the_task_loss_has_one_size(in_one_process: Any, method: str, kind: str) -> None:
    """On however many ranks and micro-batches a step is spread."""
    expected = in_one_process[method, kind, 1]
    for found in (in_one_process, *result("torch", "scale")):
        for micro in (1, 2):
            for name, value in found[method, kind, micro].items():
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-6, atol=1e-8, msg=f"{micro} {name}"
                )


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=needs_deepspeed) for stage in (1, 2)])
def test_an_engine_of_deepspeed(stage: int) -> None:
    """Each rank draws other directions, those that it draws under DistributedDataParallel."""
    first, second = result("deepspeed", f"in_engine {stage}")
    for rank in (first, second):
        for engine, ddp in zip(rank["engine"], rank["ddp"], strict=True):
            torch.testing.assert_close(engine, ddp)
    for mine, other in zip(first["engine"], second["engine"], strict=True):
        assert not torch.allclose(mine, other, rtol=1e-3)
    for losses in result("deepspeed", f"trained {stage}"):
        assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("choice", ["raise", "skip"])
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=needs_deepspeed) for stage in (1, 2)])
def test_one_rank_that_is_not_finite(stage: int, choice: str) -> None:
    """All ranks say so at once, and none waits for another."""
    words = {"raise": "step 0: layer 0", "skip": "cannot leave out DeepSpeed's step"}
    for error in result("deepspeed", f"not_finite {stage} {choice}"):
        assert error.startswith("FloatingPointError") and words[choice] in error


WITHOUT_WEIGHTS = ("none", "label-smoothing")


@pytest.mark.parametrize("method", LOUD)
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=needs_deepspeed) for stage in STAGES])
def test_every_method_acts_or_says_why_not(stage: int, method: str) -> None:
    for rank in result("deepspeed", f"methods {stage}"):
        said = rank[method]
        if method in ("sam", "gradient-norm"):
            assert "runs in one process" in said
        elif method == "tapt":
            assert "cannot run under DeepSpeed" in said
        elif stage == 3 and method not in WITHOUT_WEIGHTS:
            assert "use stage 2 (zero_optimization: stage: 2)" in said
        elif method in ("jacobian", "cross-holder"):
            assert "no jet rule for torch.Tensor.register_hook (called in module Deep" in said
        else:
            assert said == ("idle" if method == "none" and stage < 3 else "")
