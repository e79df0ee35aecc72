"""What each rank of a distributed test runs, under torchrun's environment: `main` with a folder, in
which rank 0 leaves the results."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import jachess_ext as jx
from python_tests.processes import die_with_parent
from python_tests.smoothness.tiny_models import LABELS, VOCABULARY, WIDTH, classifier

ROWS, TOKENS = 2, 5
KINDS = ("jet", "jvp", "jvp without a graph")
SETTINGS: dict[str, Any] = {"dimensions": 4, "weights": "uniform", "strength": 1e-3, "seed": 11}


def shard(step: int, rank: int) -> dict[str, Tensor]:
    """A rank's rows of one (micro-)batch: padding on some, another amount on every rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, TOKENS - rank % 3 :] = 0
    labels = torch.randint(0, LABELS, (ROWS,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


ENGINES: dict[str, Callable[[Any], Any]] = {"ddp": ddp, "fsdp": fsdp}


def train(
    model: nn.Module,
    regulariser: jx.JacHess,
    batches: Callable[[int], dict[str, Tensor]],
    *,
    steps: int = 4,
    micro: int = 1,
) -> list[jx.smoothness.JacHessOutput]:
    """`steps` updates by AdamW, each of `micro` micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    outputs = []
    for step in range(steps):
        for number in range(micro):
            last = number == micro - 1
            synchronise(model, last)
            out = regulariser(batches(step * micro + number))
            (out.total / micro).backward()
            outputs.append(out)
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def synchronise(model: Any, wanted: bool) -> None:
    """Gradients are reduced after the last micro-batch alone."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = wanted  # what no_sync() sets
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(wanted)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole, on every rank, by the names of the bare model."""
    found = {}
    for name, value in model.named_parameters():
        found[name.removeprefix("module.")] = whole(value.detach()).clone()
    return found


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def equal_to_one_process(engine: str, micro: int, checkpointing: bool) -> dict[str, Any]:
    model: Any = classifier("bert")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    wrapped = ENGINES[engine](model)
    regulariser = jx.JacHess(wrapped, **SETTINGS)
    train(wrapped, regulariser, lambda step: shard(step, dist.get_rank()), micro=micro)
    return {"parameters": parameters(wrapped)}


def empty_shards(engine: str) -> dict[str, Any]:
    """The last rank has only padding in step 1, and no row at all in step 2."""

    def batch(step: int) -> dict[str, Tensor]:
        given = shard(step, dist.get_rank())
        if dist.get_rank() == dist.get_world_size() - 1 and step == 1:
            given["attention_mask"].zero_()
        if dist.get_rank() == dist.get_world_size() - 1 and step == 2:
            given = {name: value[:0] for name, value in given.items()}
        return given

    wrapped = ENGINES[engine](classifier("bert"))
    outputs = train(wrapped, jx.JacHess(wrapped, **SETTINGS), batch, steps=4)
    return {"parameters": parameters(wrapped), "empty": [out.empty for out in outputs]}


def non_finite(engine: str) -> dict[str, Any]:
    """Rank 1 alone has a norm that is not finite, in layer 1 at step 2: all ranks skip the step."""
    wrapped = ENGINES[engine](classifier("bert"))
    regulariser = jx.JacHess(wrapped, on_nonfinite="skip", **SETTINGS)
    terms = regulariser._layer_terms

    def broken(result: Any) -> Tensor:
        found = terms(result)
        if dist.get_rank() == 1 and regulariser.step == 2:
            found = found * torch.tensor([1.0, float("nan")], dtype=found.dtype)
        return found

    regulariser._layer_terms = broken  # type: ignore[method-assign]
    outputs = train(wrapped, regulariser, lambda step: shard(step, dist.get_rank()), steps=4)
    return {
        "parameters": parameters(wrapped),
        "skipped": [out.skipped for out in outputs],
        "state": regulariser.state_dict(),
    }


def skipped_micro_batch(engine: str) -> dict[str, Any]:
    """Rank 1 alone cannot use the last micro-batch of step 1, after which gradients are reduced."""
    wrapped = ENGINES[engine](classifier("bert"))
    regulariser = jx.JacHess(wrapped, on_nonfinite="skip", **SETTINGS)
    terms = regulariser._layer_terms
    regulariser._layer_terms = lambda result: (
        terms(result)
        * (  # type: ignore[method-assign]
            float("nan") if dist.get_rank() == 1 and regulariser.step == 3 else 1.0
        )
    )
    train(wrapped, regulariser, lambda step: shard(step, dist.get_rank()), steps=3, micro=2)
    return {"parameters": parameters(wrapped), "skipped": regulariser.skipped.total()}


def bad_embeddings(engine: str) -> dict[str, Any]:
    """Step 1 has a token whose embedding is not finite, on rank 1 alone."""
    model: Any = classifier("bert")
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[3] = float("nan")
    wrapped = ENGINES[engine](model)
    regulariser = jx.JacHess(wrapped, on_nonfinite="skip", **SETTINGS)
    for step in range(2):
        batch = shard(step, dist.get_rank())
        batch["input_ids"].clamp_(min=4)
        if (step, dist.get_rank()) == (1, 1):
            batch["input_ids"][0, 0] = 3
        regulariser(batch)
    return {"skipped": dict(regulariser.skipped)}


def bad_row(engine: str) -> dict[str, Any]:
    """A row of rank 1 is all padding, beside a good one: no rank waits for the others."""
    wrapped = ENGINES[engine](classifier("bert"))
    regulariser = jx.JacHess(wrapped, **SETTINGS | {"weights": "softmax"})
    batch = shard(0, dist.get_rank())
    if dist.get_rank() == 1:
        batch["attention_mask"][0] = 0
    errors = []
    for use in (jx.JacHess(wrapped, **SETTINGS), lambda given: regulariser.calibrate([given])):
        try:
            use(batch)
        except ValueError as error:
            errors.append(str(error))
    return {"errors": errors}


def raising(engine: str) -> dict[str, Any]:
    """With on_nonfinite="raise" every rank raises, so none waits for the others."""
    wrapped = ENGINES[engine](classifier("bert"))
    regulariser = jx.JacHess(wrapped, **SETTINGS)
    terms = regulariser._layer_terms
    broken = float("inf") if dist.get_rank() == 1 else 1.0
    regulariser._layer_terms = lambda result: terms(result) * broken  # type: ignore[method-assign]
    try:
        regulariser(shard(0, dist.get_rank()))
    except FloatingPointError as error:
        return {"error": str(error)}
    return {"error": None}


def calibration(engine: str) -> dict[str, Any]:
    """Ranks with unequal numbers of tokens."""
    wrapped = ENGINES[engine](classifier("bert"))
    regulariser = jx.JacHess(wrapped, **SETTINGS | {"weights": "softmax"})
    base = regulariser.calibrate([shard(0, dist.get_rank())])
    return {"base": base.state_dict()}


def directions_differ(engine: str) -> dict[str, Any]:
    """The norms of one and the same batch on every rank."""
    wrapped = ENGINES[engine](classifier("bert"))
    mine = jx.JacHess(wrapped, **SETTINGS)(shard(0, 0)).jacobian.detach()
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return {"jacobian": torch.stack(found)}


def fed_with_embeddings() -> Any:
    """A classifier called with ``inputs_embeds``, so that its table of embeddings is not used."""
    model: Any = classifier("bert", attention="sdpa")
    model.bert.embeddings.word_embeddings.requires_grad_(False)
    return model


def loss_of(kind: str, model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A mean over rows of a jet, or of a jvp, taken straight through the (wrapped) model."""
    real = batch["attention_mask"]
    numbers = torch.arange(3 * real.numel() * WIDTH, dtype=torch.float64).sin()
    x, *directions = numbers.reshape(3, *real.shape, WIDTH)

    def logits(x: Tensor) -> Tensor:
        return model(inputs_embeds=x, attention_mask=real).logits

    if kind == "jet":
        return jx.jet(logits, x, torch.stack(directions)).streams.sin().sum(-1).mean()
    differentiable = kind == "jvp"
    output, tangent = jx.jvp(logits, (x,), (directions[0],), differentiable=differentiable)
    assert tangent.requires_grad == differentiable
    return (output - tangent.sin()).square().sum(-1).mean()


def derivatives(engine: str) -> dict[str, Any]:
    """Gradients of `loss_of` for one and the same batch on every rank, with checkpointing too."""
    found: dict[str, Any] = {}
    wrap = ENGINES[engine]
    ways = {"plain": wrap, "checkpointing": wrap}
    if engine == "ddp":
        ways["unused"] = partial(DistributedDataParallel, find_unused_parameters=True)
    for way, wrapping in ways.items():
        for kind in KINDS if way != "unused" else KINDS[:1]:
            model = fed_with_embeddings()
            if way == "unused":
                model.extra = nn.Linear(1, 1).double()
            if way == "checkpointing":
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.train()
            wrapped = wrapping(model)
            for _ in range(2):  # the second time, hooks are those that the first one left
                wrapped.zero_grad()
                loss_of(kind, wrapped, shard(0, 0)).backward()
            found[f"{kind} {way}"] = {
                name.removeprefix("module."): whole(value.grad)
                for name, value in wrapped.named_parameters()
                if value.requires_grad and "extra" not in name
            }
    return found


def forces(value: Tensor, slope: Tensor) -> Tensor:
    return (slope - 1).square().mean() + value.square().mean()


def with_a_derivative_inside(value: Tensor, slope: Tensor) -> Tensor:
    """A derivative within the loss, which is differentiated in turn."""
    (change,) = torch.autograd.grad(slope.sin().square().sum(), slope, create_graph=True)
    return (change * slope).square().mean()


LOSSES = {loss.__name__: loss for loss in (forces, with_a_derivative_inside)}


def energy_and_point(model: Any, rank: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Every rank has rows of its own."""
    mask = shard(0, rank)["attention_mask"]
    numbers = torch.arange(mask.numel() * WIDTH, dtype=torch.float64) + 1000 * rank
    x = numbers.sin().reshape(*mask.shape, WIDTH)
    return lambda x: model(inputs_embeds=x, attention_mask=mask).logits.sum(-1), x


def gradient_losses(engine: str) -> dict[str, Any]:
    """Gradients of each loss of a gradient, by `jx.gradient_loss`, of one with checkpointing."""
    results: dict[str, Any] = {}
    for name, loss in LOSSES.items():
        model = fed_with_embeddings()
        if name == "with_a_derivative_inside":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        wrapped = ENGINES[engine](model)
        energy, x = energy_and_point(wrapped, dist.get_rank())
        for _ in range(2):  # the second time, hooks are those that the first one left
            wrapped.zero_grad()
            jx.gradient_loss(energy, x, loss).loss.backward()
        results[name] = {
            parameter.removeprefix("module."): whole(value.grad)
            for parameter, value in wrapped.named_parameters()
            if value.requires_grad
        }
    return results


def watched(engine: str) -> dict[str, Any]:
    """Training with a probe between the steps, and without one."""
    found: dict[str, Any] = {}
    for probes in (0, 2):
        model = ENGINES[engine](classifier("bert"))
        probe = jx.SmoothnessProbe(shard(9, 0))
        figures = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
        for step in range(2):
            model(**shard(step, dist.get_rank())).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures += [probe(model) for _ in range(probes)]
        found[f"{probes} probes"] = {"parameters": parameters(model), "figures": figures}
    return found


def gradients_of_smoothness(model: Any, engine: str) -> dict[str, Tensor]:
    """Gradients of both norms' sum, for the same batch on every rank."""
    norms = jx.smoothness(model, shard(0, 0), engine=engine, seed=0, dimensions=4)
    (norms.jacobian.sum() + norms.hessian.sum()).backward()
    return {
        name.removeprefix("module."): whole(value.grad)
        for name, value in model.named_parameters()
        if value.grad is not None
    }


def estimators(engine: str) -> dict[str, Any]:
    """`gradients_of_smoothness`, or the error, by each engine of `jx.smoothness`."""
    found: dict[str, Any] = {}
    for name in ("jet", "reverse"):
        try:
            found[name] = gradients_of_smoothness(ENGINES[engine](classifier("bert")), name)
        except ValueError as error:
            found[name] = str(error)
    return found


def enter_group(**settings: Any) -> None:
    """Join the other ranks."""
    die_with_parent()  # the launcher gives every rank a session of its own
    dist.init_process_group("gloo", **settings)
    torch.set_num_threads(1)


def leave_results(folder: Path, results: dict[str, Any]) -> None:
    """Save the results of all ranks, and leave the group."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, results)
    if dist.get_rank() == 0:
        torch.save(every, folder / "results.partial")
        os.replace(folder / "results.partial", folder / "results.pt")
    dist.barrier()  # gloo's threads abort a process that ends right after a collective, at times
    dist.destroy_process_group()


JOBS: tuple[Callable[[str], dict[str, Any]], ...] = (
    *(empty_shards, non_finite, skipped_micro_batch, raising, bad_embeddings, bad_row),
    *(calibration, directions_differ, derivatives, gradient_losses, watched, estimators),
)


def results_of_wrappers() -> dict[str, Any]:
    """This rank's results of every job under each of `ENGINES`."""
    results: dict[str, Any] = {}
    for engine in ENGINES:
        results[f"{engine} plain"] = equal_to_one_process(engine, 2, checkpointing=False)
        results[f"{engine} checkpointing"] = equal_to_one_process(engine, 1, checkpointing=True)
        results |= {f"{engine} {job.__name__}": job(engine) for job in JOBS}
    return results


def main(folder: str) -> None:
    enter_group()
    leave_results(Path(folder), results_of_wrappers())
