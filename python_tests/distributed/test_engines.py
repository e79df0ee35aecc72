"""DeepSpeed's engines, and runs that are resumed under them."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from python_tests import processes
from python_tests.distributed.engine_jobs import STAGES
from python_tests.distributed.test_data_parallel import assert_resumed
from python_tests.distributed.test_data_parallel import result as result_of
from python_tests.training.test_architectures import LOUD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="needs deepspeed: DS_BUILD_OPS=0 pip install deepspeed",
    ),
]


@cache
def results() -> list[dict[str, Any]]:
    """Every rank's results; the jobs run once."""
    # deepspeed looks at its folder of kernels; on a machine with a GPU it would take it
    settings = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    module = "python_tests.distributed.engine_jobs"
    return processes.results_of_ranks(module, "deepspeed", env=os.environ | settings)


def result(name: str) -> list[Any]:
    """One job's results on every rank."""
    return result_of(name, results)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit(stage: int) -> None:
    assert_resumed(result(f"resumed zero{stage}"), "DeepSpeedEngine")


@pytest.mark.parametrize("stage", [1, 2])
def test_an_engine_of_deepspeed(stage: int) -> None:
    """Each rank draws other directions, those that it draws under DistributedDataParallel."""
    first, second = result(f"in_engine {stage}")
    for rank in (first, second):
        for engine, ddp in zip(rank["engine"], rank["ddp"], strict=True):
            torch.testing.assert_close(engine, ddp)
    for mine, other in zip(first["engine"], second["engine"], strict=True):
        assert not torch.allclose(mine, other, rtol=1e-3)
    for losses in result(f"trained {stage}"):
        assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("choice", ["raise", "skip"])
@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_that_is_not_finite(stage: int, choice: str) -> None:
    """All ranks say so at once, and none waits for another."""
    words = {"raise": "step 0: layer 0", "skip": "cannot leave out DeepSpeed's step"}
    for error in result(f"not_finite {stage} {choice}"):
        assert error.startswith("FloatingPointError") and words[choice] in error


WITHOUT_WEIGHTS = ("none", "label-smoothing")


@pytest.mark.parametrize("method", LOUD)
@pytest.mark.parametrize("stage", STAGES)
def test_every_method_acts_or_says_why_not(stage: int, method: str) -> None:
    for rank in result(f"methods {stage}"):
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
