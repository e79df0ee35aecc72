"""Blocks spread over real processes (gloo): the numbers of one process, and errors on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import jachess_ext as jx
from jachess_ext.ntk.api import Job, KernelRanks

from .rank_worker import WORLD, batch, encoder, work

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    # A fork need not import torch; autograd's threads for GPUs, where there are any, survive none.
    method = "spawn" if torch.cuda.is_available() else "fork"
    mp.start_processes(work, args=(str(folder),), nprocs=WORLD, start_method=method)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def _one_process(block: int) -> torch.Tensor:
    """The same blocks in this process."""
    job = Job(encoder(), batch(5), None)
    job._block = block
    theta = job.run(False)
    assert theta is not None
    return theta


def test_the_first_rank_has_the_numbers_of_one_process(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert second["symmetric"] is None and second["unequal"] is None and second["single"] is None
    assert torch.equal(first["symmetric"], _one_process(first["block"]))
    model = encoder()
    torch.testing.assert_close(first["symmetric"], jx.ntk(model, batch(5)), **CLOSE)
    cross = jx.ntk(model, batch(5), batch(3, seed=1))
    torch.testing.assert_close(first["unequal"], cross, **CLOSE)
    torch.testing.assert_close(first["single"], jx.ntk(model, batch(1)), **CLOSE)


def test_the_work_is_shared(ranks: list[dict[str, Any]]) -> None:
    """Two ranks: three blocks, six pairs, three each."""
    assert [found["blocks"] for found in ranks] == [6, 6]
    assert [found["pairs here"] for found in ranks] == [3, 3]


def test_errors_reach_every_rank(ranks: list[dict[str, Any]]) -> None:
    batches, weights, late, budget = zip(*(found["errors"] for found in ranks), strict=True)
    assert all(s.startswith("ValueError: the ranks have different batches") for s in batches)
    assert all(s.startswith("ValueError: the ranks have different weights") for s in weights)
    assert late[1] == "OverflowError: this rank has had enough"
    assert late[0] == "RuntimeError: rank 1 failed: OverflowError: this rank has had enough"
    assert budget[1].startswith("ValueError: memory_budget is 1 bytes")
    assert budget[0].startswith("RuntimeError: rank 1 failed: ValueError: memory_budget is 1 bytes")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_slices_cover_the_work_once(count: int) -> None:
    work = list(range(7))
    parts = [KernelRanks(None, rank, count).slice(work) for rank in range(count)]
    assert [item for part in parts for item in part] == work
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
