"""What each rank runs under further engines of data parallelism, under torchrun's environment:
`main` with "torch", which takes rank_jobs.py's with it, or "deepspeed", and a folder, in which
rank 0 leaves the results."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import DistributedType, PartialState
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from transformers import default_data_collator

import jachess_ext as jx
from jachess_ext.smoothness.parallel import ranks_of
from jachess_ext.training import METHODS, parse_method
from python_tests.distributed import scale_job
from python_tests.distributed.rank_jobs import (
    SETTINGS,
    enter_group,
    leave_results,
    parameters,
    results_of_wrappers,
    shard,
    train,
)
from python_tests.smoothness.tiny_models import classifier
from python_tests.training.runs import examples, trainer
from python_tests.training.test_architectures import LOUD, TOKENIZER, rows_of

STAGES = (1, 2, 3)
RESUMED = "jachess,strength=0.1,mode=joint"


class Holding(nn.Module):
    """A module whose forward computes the penalty, to be wrapped from outside."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.model = classifier("bert")
        self.regulariser = jx.JacHess(self.model, **SETTINGS | settings)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.regulariser(batch).total


def replicated() -> dict[str, Any]:
    model = replicate(classifier("bert"))
    train(model, jx.JacHess(model, **SETTINGS), lambda step: shard(step, dist.get_rank()))
    return {"parameters": parameters(model), "ranks": ranks_of(model).size}


def replicated_base() -> dict[str, Any]:
    """Before the first forward, which makes the reducer."""
    regulariser = jx.JacHess(replicate(classifier("bert")), **SETTINGS | {"weights": "softmax"})
    return regulariser.calibrate([shard(0, dist.get_rank())]).state_dict()


def held() -> dict[str, Any]:
    wrapped = DistributedDataParallel(Holding())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3, eps=1e-4)
    for step in range(4):
        wrapped(shard(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name.removeprefix("model."): value for name, value in parameters(wrapped).items()}
    return {"parameters": found}


def held_base() -> dict[str, Any]:
    """Calibrated outside the wrapper, where a rank does not see the others."""
    wrapped = DistributedDataParallel(Holding(weights="softmax"))
    regulariser = wrapped.module.regulariser
    regulariser.calibrate([shard(0, dist.get_rank())])
    wrapped(shard(0, dist.get_rank()))
    return regulariser.base.state_dict()


def engine_of(stage: int) -> Any:
    """An engine of DeepSpeed around a classifier in float32, with AdamW."""
    import deepspeed

    model = classifier("bert", dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4),
        config=config(stage),
    )
    return engine


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def in_engine(stage: int) -> dict[str, Any]:
    """Norms of three steps on a batch that all ranks share, in an engine and under DDP."""
    found: dict[str, Any] = {}
    plain = DistributedDataParallel(classifier("bert", dtype=torch.float32))
    for name, model in (("engine", engine_of(stage)), ("ddp", plain)):
        regulariser = jx.JacHess(model, **SETTINGS)
        found[name] = [regulariser(shard(0, 0)).jacobian.detach() for _ in range(3)]
    return found


def trained_in_engine(stage: int) -> list[float]:
    """The penalty alone of one batch, over steps of an engine."""
    engine = engine_of(stage)
    regulariser = jx.JacHess(engine, **SETTINGS | {"strength": 1.0})
    losses = []
    for _ in range(8):
        out = regulariser(shard(0, dist.get_rank()))
        engine.backward(out.loss)
        engine.step()
        losses.append(float(out.loss.detach()))
    return losses


def error_of(run: Callable[[], Any]) -> str:
    """What it raises on this rank, with the error's name."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def not_finite(stage: int, on_nonfinite: str) -> str:
    """Rank 1 alone has a norm that is not finite."""
    regulariser = jx.JacHess(engine_of(stage), on_nonfinite=on_nonfinite, **SETTINGS)
    terms, broken = regulariser._layer_terms, float("nan") if dist.get_rank() == 1 else 1.0
    regulariser._layer_terms = lambda norms: terms(norms) * broken  # type: ignore[method-assign]
    return error_of(lambda: regulariser(shard(0, dist.get_rank())))


def made(folder: Path, method: Any, stage: int, data: Any, **settings: Any) -> Any:
    """A trainer under DDP (stage 0) or DeepSpeed; accelerate does not shard on CPUs by FSDP2."""
    engine: dict[str, Any] = {}
    if stage:
        engine = {"deepspeed": copy.deepcopy(config(stage)), "use_cpu": False}
    return trainer(
        folder,
        method,
        model=classifier("bert", dtype=torch.float32, dropout=0.1),
        data=data,
        unlabelled=rows_of("bert"),
        options={"processing_class": TOKENIZER, "data_collator": default_data_collator},
        **{"per_device_train_batch_size": 2, "ddp_backend": "gloo"} | engine | settings,
    )


def resumed(folder: Path, stage: int, method: str) -> dict[str, Any]:
    """A run of five steps, and another from the checkpoint of its second."""
    found: dict[str, Any] = {}
    for name, start in (("whole", None), ("resumed", folder / "whole" / "checkpoint-2")):
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
        run = made(folder / name, parse_method(method), stage, examples(32), **saving)
        dist.barrier()
        run.train(resume_from_checkpoint=None if start is None else str(start))
        values = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        state = run.method.state_dict()["regulariser"]
        found[name] = {
            "parameters": values,
            "state": state,
            "ranks": ranks_of(run.model_wrapped).size,
        }
        found["engine"] = type(run.model_wrapped).__name__
    return found


def of_every_method(stage: int) -> dict[str, str]:
    """Whether each method moves the weights, or what it says."""

    def weights(name: str) -> Tensor:
        run = made(Path("none"), METHODS[name](**LOUD[name]), stage, rows_of("bert"))
        run.train()
        return nn.utils.parameters_to_vector(run.model.parameters()).detach()

    torch.manual_seed(0)
    plain = None if stage == 3 else weights("none")
    found = {}
    for name in LOUD:
        moved: list[Tensor] = []
        found[name] = error_of(lambda name=name, moved=moved: moved.append(weights(name)))
        if moved and plain is not None and not (moved[0] - plain).norm() > 1e-4 * plain.norm():
            found[name] = "idle"
    return found


def torch_jobs(note: Callable[..., None], folder: Path) -> None:
    for job in (replicated, replicated_base, held, held_base):
        note(job.__name__, job)
    note("resumed ddp", resumed, folder / "ddp", 0, RESUMED)
    note("scale", scale_job.runs, folder / "scale", dist.get_world_size())


def deepspeed_jobs(note: Callable[..., None], folder: Path) -> None:
    # accelerate knows DeepSpeed on GPUs alone, and takes the ranks of a CPU for single processes
    PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_CPU)  # type: ignore[method-assign]
    for stage in STAGES:
        if stage < 3:
            note(f"in_engine {stage}", in_engine, stage)
            note(f"trained {stage}", trained_in_engine, stage)
            for choice in ("raise", "skip"):
                note(f"not_finite {stage} {choice}", not_finite, stage, choice)
            note(f"resumed zero{stage}", resumed, folder / f"zero{stage}", stage, RESUMED)
        note(f"methods {stage}", of_every_method, stage)


def main(jobs: str, folder: str) -> None:
    enter_group()
    results: dict[str, Any] = {}

    def note(name: str, job: Callable[..., Any], *arguments: Any) -> None:
        try:
            results[name] = job(*arguments)
        except Exception:
            results[name] = {"error": traceback.format_exc()}

    if jobs == "torch":
        results |= results_of_wrappers()
    {"torch": torch_jobs, "deepspeed": deepspeed_jobs}[jobs](note, Path(folder))
    leave_results(Path(folder), results)
