"""What each of two processes does in `test_ranks`; without transformers, which takes long to
import."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext.ntk import measure_ntk
from jachess_ext.ntk.api import KernelRanks

WORLD = 2


class Encoder(nn.Module):
    """A small transformer of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.first, self.second = nn.Linear(16, 40), nn.Linear(40, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.norm(x + self.second(torch.tanh(self.first(x))))
        weights = torch.softmax(x @ x.transpose(1, 2), -1)
        return self.head((weights @ x).mean(1))


def encoder() -> Encoder:
    torch.manual_seed(4)
    return Encoder().double()


def batch(samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, 20, (samples, 6), generator=generator)}


class FailsLate(nn.Module):
    """Fails on one rank only, and only after planning."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.rank, self.calls = encoder(), rank, 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        if self.rank == 1 and self.calls > 2:
            raise OverflowError("this rank has had enough")
        return self.inner(input_ids)


def work(rank: int, folder: str) -> None:
    """Results and sentences go into a file of this rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD
    )
    group = dist.group.WORLD
    measured = measure_ntk(encoder(), batch(5), group=group)
    found = {
        "symmetric": measured.theta,
        "blocks": measured.report.blocks,
        "block": measured.report.block,
        "pairs here": len(KernelRanks.of(group).slice(range(measured.report.blocks))),
        "unequal": jx.ntk(encoder(), batch(5), batch(3, seed=1), group=group),
        "single": jx.ntk(encoder(), batch(1), group=group),
        "errors": [_sentence(call) for call in _bad_calls(rank, group)],
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _bad_calls(rank: int, group: Any) -> list[Any]:
    other = encoder()
    with torch.no_grad():
        other.head.weight.mul_(1 + rank)
    budget = [10**9, 1][rank]
    return [
        lambda: jx.ntk(encoder(), batch(5, seed=rank), group=group),
        lambda: jx.ntk(other, batch(5), group=group),
        lambda: jx.ntk(FailsLate(rank), batch(5), group=group),
        lambda: jx.ntk(encoder(), batch(5), group=group, memory_budget=budget),
    ]


def _sentence(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
