"""DistributedDataParallel, FSDP2, `replicate` and a wrapper around a module that holds JacHess
(gloo), against one process on the joined batch; and the Trainer on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from jachess_ext.smoothness import estimators
from jachess_ext.smoothness.directions import DrawCounter, draw_directions
from python_tests import processes
from python_tests.distributed.rank_jobs import (
    ENGINES,
    KINDS,
    LOSSES,
    ROWS,
    SETTINGS,
    energy_and_point,
    fed_with_embeddings,
    gradients_of_smoothness,
    loss_of,
    shard,
)
from python_tests.distributed.scale_job import cases, runs
from python_tests.smoothness.tiny_models import classifier

WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


@cache
def results(world: int) -> list[dict[str, Any]]:
    """Every rank's results; the jobs run once per world size, those of engine_jobs.py on two."""
    if world > 2:
        return processes.results_of_ranks("python_tests.distributed.rank_jobs", ranks=world)
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # the Trainer would take a GPU
    return processes.results_of_ranks("python_tests.distributed.engine_jobs", "torch", env=settings)


def result(name: str, found: Callable[[], list[dict[str, Any]]] = lambda: results(2)) -> list[Any]:
    """One of engine_jobs.py's results on every rank."""
    ranks = [rank[name] for rank in found()]
    assert not any(isinstance(of, dict) and "error" in of for of in ranks), ranks
    return ranks


def joined(shards: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in shards]) for name in shards[0]}


@pytest.fixture
def joined_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process draws for each block of rows what the rank that has them draws."""

    def draw(like: Tensor, count: int, *, mask: Tensor, counter: DrawCounter, **named: Any) -> Any:
        parts = []
        for rank, (x, real) in enumerate(
            zip(like.split(ROWS), mask.split(ROWS), strict=True),
        ):
            own = DrawCounter(counter.seed, counter.use, counter.step, rank, counter.drawn)
            parts.append(draw_directions(x, count, mask=real, counter=own, **named))
        counter.drawn += 1
        return torch.cat(parts, 1)

    monkeypatch.setattr(estimators, "draw_directions", draw)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-6, msg=name)


def one_process(
    world: int,
    steps: int = 4,
    micro: int = 1,
    ranks: Callable[[int], int] | None = None,
    skipped: int = -1,
) -> dict[str, Tensor]:
    """Parameters after one process's steps on the joined batches (with `joined_directions`).

    Args:
        ranks: how many ranks have rows in a batch; None: all.
        skipped: a batch that gives no gradient; a step of nothing else makes no update.
    """
    model = classifier("bert")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    regulariser = jx.JacHess(model, **SETTINGS)
    for step in range(steps):
        for number in range(micro * step, micro * (step + 1)):
            count = ranks(number) if ranks else world
            total = regulariser(joined([shard(number, rank) for rank in range(count)])).total
            if number != skipped:
                (total * count / world / micro).backward()
        if micro > 1 or step != skipped:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


@cache
def training_steps(world: int, micro: int) -> dict[str, Tensor]:
    """`one_process`, which has moved the parameters by far more than `assert_same` allows."""
    expected = one_process(world, micro=micro)
    start = dict(classifier("bert").named_parameters())
    moved = [(expected[name] - p).detach().abs().max() for name, p in start.items()]
    assert torch.stack(moved).max() > 5e-3
    return expected


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["plain", "checkpointing"])
def test_training_steps(world: int, kind: str, joined_directions: None) -> None:
    """The same parameters as one process; "plain" with two micro-batches a step."""
    expected = training_steps(world, 2 if kind == "plain" else 1)
    for rank in results(world):
        for engine in ENGINES:
            assert_same(rank[f"{engine} {kind}"]["parameters"], expected)


@pytest.mark.parametrize("job", ["replicated", "held"])
def test_training_steps_of_other_engines(job: str, joined_directions: None) -> None:
    for rank in result(job):
        assert rank.get("ranks", 2) == 2
        assert_same(rank["parameters"], training_steps(2, 1))


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_without_tokens(world: int, joined_directions: None) -> None:
    """Steps 1 and 2: the gradient is the mean over the ranks with the last one's counted zero."""
    expected = one_process(world, ranks=lambda step: world - 1 if step in (1, 2) else world)
    found = results(world)
    for engine in ENGINES:
        assert found[-1][f"{engine} empty_shards"]["empty"] == [False, True, True, False]
        assert not any(found[0][f"{engine} empty_shards"]["empty"])
        for rank in found:
            assert_same(rank[f"{engine} empty_shards"]["parameters"], expected)


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_skip_a_step(world: int, joined_directions: None) -> None:
    """As one process that makes no update in step 2."""
    expected = one_process(world, skipped=2)
    for rank in results(world):
        for engine in ENGINES:
            found = rank[f"{engine} non_finite"]
            assert found["skipped"] == [None, None, 1, None]
            assert found["state"]["skipped"] == {"1": 1}
            assert_same(found["parameters"], expected)


@pytest.mark.parametrize("world", WORLDS)
def test_a_skipped_last_micro_batch(world: int, joined_directions: None) -> None:
    """DDP: the first micro-batch's gradients are reduced all the same."""
    expected = one_process(world, steps=3, micro=2, skipped=3)
    for rank in results(world):
        assert rank["ddp skipped_micro_batch"]["skipped"] == 1
        assert_same(rank["ddp skipped_micro_batch"]["parameters"], expected)


def test_a_skipped_last_micro_batch_under_fsdp() -> None:
    """The ranks stay together; the first micro-batch counts in the next step (docs/hardening)."""
    found = [rank["fsdp skipped_micro_batch"] for rank in results(2)]
    assert_same(found[0]["parameters"], found[1]["parameters"])
    assert found[0]["skipped"] == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_embeddings_of_one_rank_that_are_not_finite(engine: str) -> None:
    assert [rank[f"{engine} bad_embeddings"]["skipped"] for rank in results(2)] == [{0: 1}] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_of_padding_on_one_rank(engine: str) -> None:
    other, own = (rank[f"{engine} bad_row"]["errors"] for rank in results(2))
    assert len(own) == 2 and all("rows [0] of the batch are all padding" in line for line in own)
    assert other == ["another rank cannot use its batch; its own message says why"] * 2


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_raise(world: int, engine: str) -> None:
    for rank in results(world):
        assert "step 0: layer 0" in rank[f"{engine} raising"]["error"]


@pytest.mark.parametrize("world", WORLDS)
def test_base_norms_are_over_all_ranks(world: int, joined_directions: None) -> None:
    regulariser = jx.JacHess(classifier("bert"), **SETTINGS | {"weights": "softmax"})
    base = regulariser.calibrate([joined([shard(0, rank) for rank in range(world)])])
    bases = [rank[f"{engine} calibration"]["base"] for rank in results(world) for engine in ENGINES]
    for found in bases + (result("replicated_base") if world == 2 else []):
        assert found["tokens"] == base.tokens
        assert found["jacobian"] == pytest.approx(base.jacobian.tolist(), rel=1e-12)
        assert found["hessian"] == pytest.approx(base.hessian.tolist(), rel=1e-12)


def test_base_norms_measured_by_each_rank_are_averaged() -> None:
    parts = []
    for rank in range(2):
        regulariser = jx.JacHess(classifier("bert"), **SETTINGS | {"weights": "softmax"})
        parts.append(regulariser.calibrate([shard(0, rank)]))
    tokens = [part.tokens for part in parts]
    found = result("held_base")
    assert found[0] == found[1] and found[0]["tokens"] == sum(tokens)
    for name in ("jacobian", "hessian"):
        mean = sum(getattr(p, name) * p.tokens for p in parts) / sum(tokens)
        assert found[0][name] == pytest.approx(mean.tolist(), rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_draw_other_directions(engine: str) -> None:
    found = results(2)[0][f"{engine} directions_differ"]["jacobian"]
    assert not torch.allclose(found[0], found[1], rtol=1e-3)


def test_a_job_of_independent_models_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks, but a model of its own on each: no collective, rank 0's directions."""
    from jachess_ext.smoothness import parallel

    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    assert parallel.ranks_of(classifier("bert")) == parallel.Ranks(0, 1, ())


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("late", [False, True])
def test_a_static_graph_is_refused(late: bool, one_rank: None) -> None:
    """Its gradients differ from rank to rank, 29 % off, in a step that differentiates twice."""
    model = torch.nn.parallel.DistributedDataParallel(classifier("bert"), static_graph=not late)
    if late:
        model._set_static_graph()
    batch = {name: value for name, value in shard(0, 0).items() if name != "labels"}
    for wrapped in (model, torch.compile(model)):
        with pytest.raises(ValueError, match=r"static_graph=True.*leave it out"):
            jx.JacHess(wrapped, strength=0.1)(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_straight_through_a_wrapped_model(kind: str) -> None:
    """jx.jet and jx.jvp of a lambda around it; every rank has the same batch."""
    model = fed_with_embeddings()
    loss_of(kind, model, shard(0, 0)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    wrapped = [("ddp", "unused")] if kind == "jet" else []
    wrapped += [(engine, way) for engine in ENGINES for way in ("plain", "checkpointing")]
    for rank in results(2):
        for engine, way in wrapped:
            found = rank[f"{engine} derivatives"][f"{kind} {way}"]
            assert set(found) == set(expected)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_a_gradient(name: str, world: int) -> None:
    """The mean over the ranks of torch's own backward of a backward, in one process."""
    model = fed_with_embeddings()
    for rank in range(world):
        energy, x = energy_and_point(model, rank)
        x.requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            value = energy(x)
            (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            (LOSSES[name](value, slope) / world).backward()
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    for engine in ENGINES:
        for of_rank in results(world):
            gradients = of_rank[f"{engine} gradient_losses"][name]
            assert set(gradients) == set(expected)
            for parameter, value in expected.items():
                torch.testing.assert_close(
                    gradients[parameter], value, rtol=1e-12, atol=1e-12, msg=parameter
                )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_probe_between_the_steps(engine: str) -> None:
    """The same figures on every rank, those of the bare model; the same parameters as without."""
    found = [rank[f"{engine} watched"] for rank in results(2)]
    for rank in found:
        pairs = zip(
            rank["0 probes"]["parameters"].items(),
            rank["2 probes"]["parameters"].values(),
            strict=True,
        )
        for (name, plain), value in pairs:
            assert torch.equal(plain, value), name
    assert found[0]["2 probes"]["figures"] == found[1]["2 probes"]["figures"]
    model = classifier("bert")
    model.load_state_dict(found[0]["2 probes"]["parameters"])
    expected = jx.SmoothnessProbe(shard(9, 0))(model)
    assert len(expected) == 5
    for name, value in found[0]["2 probes"]["figures"][-1].items():
        assert value == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["jet", "reverse"])
def test_each_estimator_under_each_wrapper(engine: str, name: str) -> None:
    """The gradients of the bare model, or a sentence where torch would end in a crash."""
    expected = gradients_of_smoothness(classifier("bert"), name)
    for rank in results(2):
        found = rank[f"{engine} estimators"][name]
        if (engine, name) == ("fsdp", "reverse"):
            assert "engine='reverse' does not work with FSDP" in found
        else:
            assert set(expected) <= set(found)
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)


# ---- the Trainer ---------------------------------------------------------------------------------


def assert_resumed(ranks: list[Any], engine: str) -> None:
    """A resumed run gives the whole one's weights and state, bit for bit."""
    for rank in ranks:
        assert rank["engine"] == engine
        whole, resumed = rank["whole"], rank["resumed"]
        assert whole["ranks"] == resumed["ranks"] == 2
        assert whole["state"] == resumed["state"] and whole["state"]["step"] == 5
        for of, value in whole["parameters"].items():
            assert torch.equal(resumed["parameters"][of], value), of


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    assert_resumed(result("resumed ddp"), "DistributedDataParallel")


def test_the_task_loss_has_one_size(tmp_path: Path) -> None:
    """On however many ranks and micro-batches a step is spread; in one process, micro-batches are
    those of training/test_methods.py and test_accumulation.py."""
    expected = runs(tmp_path, 1, micro_batches=[1])
    for method, kind in cases():
        for found in result("scale"):
            for micro in (1, 2):
                for name, value in found[method, kind, micro].items():
                    wanted = expected[method, kind, 1][name]
                    torch.testing.assert_close(
                        value, wanted, rtol=1e-6, atol=1e-8, msg=f"{method} {kind} {micro} {name}"
                    )
