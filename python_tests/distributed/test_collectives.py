"""Derivatives through functional collectives on two ranks (gloo), against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from python_tests import processes
from python_tests.distributed.collective_jobs import JOBS, RANKS, expected

CASES = [
    pytest.param(job, kind, marks=pytest.mark.slow if job == "diffusers" else (), id=kind)
    for job, kinds in JOBS.items()
    for kind in kinds
]


@cache
def results(job: str = "torch") -> list[dict[str, Any]]:
    """Both ranks' results; each job runs once."""
    return processes.results_of_ranks("python_tests.distributed.collective_jobs", job, ranks=RANKS)


@pytest.mark.parametrize("job, kind", CASES)
def test_two_ranks_equal_one_process(job: str, kind: str) -> None:
    reference = expected(kind)
    for how in ("torch", "jets"):
        compare([rank[kind][how] for rank in results(job)], reference, how)


def compare(ranks: list[Any], reference: dict[str, torch.Tensor], how: str) -> None:
    for found in ranks:
        if isinstance(found, str) and found.startswith("skipped"):
            pytest.skip(found)
        assert not isinstance(found, str), found
    assert {*ranks[0]} == {*reference} or how == "jets"
    for name in ranks[0]:
        both = [rank[name] for rank in ranks]
        # Each rank has its part of the weights' gradient.
        joined = sum(both) if name.endswith(": w") else torch.cat(both)
        scale = reference[name].abs().max().item()
        torch.testing.assert_close(joined, reference[name], rtol=0, atol=1e-12 * scale, msg=name)


def test_a_maximum_is_refused() -> None:
    for rank, results_of_rank in enumerate(results()):
        said = results_of_rank["refusals"]
        assert said["value"] == "[1.0, 2.0, 3.0]"
        tangent = str([(rank + i) * (1.0 + i) for i in range(3)])  # of x · max(x), max(x) fixed
        assert [said["detached" + way] for way in ("", ", jet", ", dual")] == [tangent] * 3
        for way in ("jvp", "grad"):
            assert "NotImplementedError: jx.differentiable: all_reduce with 'max'" in said[way]
        for way in ("jet", "dual"):
            assert "MissingJetRule" in said[way] and "'max'" in said[way]


def test_a_collective_in_place_is_refused() -> None:
    for rank in results():
        said = rank["refusals"]
        for way in ("in place", "in place, grad"):
            assert (
                "NotImplementedError: jx.differentiable: torch.distributed.all_reduce" in said[way]
            )
        assert "Error" not in said["in place, constant"]


def test_a_batch_waits_for_a_late_rank() -> None:
    assert all(rank["late"] for rank in results())
