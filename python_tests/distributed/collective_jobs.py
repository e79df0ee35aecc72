"""What each of two ranks runs for `test_collectives.py`, under torchrun's environment:
`python -m python_tests.distributed.collective_jobs torch|diffusers FOLDER`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from python_tests.distributed.rank_jobs import enter_group, leave_results

RANKS, ROWS, WIDTH = 2, 4, 6
TOKENS, BATCH, HEADS, SIZE = 8, 2, 4, 3
Program = Callable[[Tensor, Tensor], Tensor]
Numbers = dict[str, Tensor]


# ---- derivatives -------------------------------------------------------------------------------


def derivatives(
    f: Program, x: Tensor, d: Tensor, g: Tensor, h: Tensor, w: Tensor, every: bool = True
) -> Numbers:
    """Torch's own calls, nested; without `every`, those that go the ways of the others."""

    def scalar(x: Tensor) -> Tensor:
        return (f(x, w) * g).sum()

    def tangent(x: Tensor, d: Tensor = d) -> Tensor:
        return jvp(lambda x: f(x, w), (x,), (d,))[1]

    out = {"value": f(x, w), "jvp": tangent(x)}
    with forward_ad.dual_level():
        out["dual numbers"] = forward_ad.unpack_dual(f(forward_ad.make_dual(x, d), w)).tangent
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y, dy = jvp(f, (*leaves,), (d, torch.zeros_like(w)))
    loss = (y * g).sum() + (dy * h).sum()
    out["backward of jvp"], out["backward of jvp: w"] = torch.autograd.grad(loss, leaves)
    out["jvp(jvp)"] = jvp(tangent, (x,), (d,))[1]
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    first = torch.autograd.grad((f(*leaves) * g).sum(), leaves, create_graph=True)
    out["backward"], out["backward: w"] = (t.detach() for t in first)
    second = torch.autograd.grad((first[0] * d).sum(), leaves)
    out["double backward"], out["double backward: w"] = second
    out["vmap(jvp)"] = vmap(lambda d: tangent(x, d), out_dims=1)(torch.stack([d, d.sin()]))
    if not every:
        return {name: value.detach() for name, value in out.items()}
    out["jvp(jvp(jvp))"] = jvp(lambda x: jvp(tangent, (x,), (d,))[1], (x,), (d,))[1]
    out["jvp(grad)"] = jvp(grad(scalar), (x,), (d,))[1]
    out["grad(grad)"] = grad(lambda x: (grad(scalar)(x) * d).sum())(x)
    out["grad(jvp)"] = grad(lambda x: (tangent(x) * h).sum())(x)
    batch, cotangents = torch.stack([x, d], 1), torch.stack([g, h])
    out["jvp(vmap)"] = jvp(vmap(lambda x: f(x, w), 1, 1), (batch,), (batch.cos(),))[1]
    out["vmap(vjp)"] = vmap(vjp(lambda x: f(x, w), x)[1], out_dims=1)(cotangents)[0]
    rows = vmap(grad(lambda x, g: (f(x, w) * g).sum()), (1, 0), 1)
    out["vmap(grad)"] = rows(batch, cotangents)
    leaf = x.clone().requires_grad_()
    batched = torch.autograd.grad(f(leaf, w), leaf, cotangents, is_grads_batched=True)
    out["is_grads_batched"] = batched[0].movedim(0, 1)
    loss = (checkpoint(f, leaf, w, use_reentrant=False) * g).sum()
    first = torch.autograd.grad(loss, leaf, create_graph=True)
    out["double backward, checkpointed"] = torch.autograd.grad((first[0] * d).sum(), leaf)[0]
    return {name: value.detach() for name, value in out.items()}


def jets(f: Program, x: Tensor, d: Tensor, g: Tensor, h: Tensor, w: Tensor) -> Numbers:
    """The same by jets, under the names that they have above."""
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y, dy = jx.jvp(lambda x: f(x, leaves[1]), (leaves[0],), (d,))
    loss = (y * g).sum() + (dy * h).sum()
    both = torch.autograd.grad(loss, leaves)
    second = jx.jet(lambda x: f(x, w), x, torch.stack([d, d])).second[0]
    lean = jx.jvp(lambda x: f(x, w), (x,), (d,), differentiable=False)[1]
    rows = vmap(lambda d: jx.jvp(lambda x: f(x, w), (x,), (d,))[1], out_dims=1)
    return {
        "value": y.detach(),
        "jvp": dy.detach(),
        "dual numbers": lean,
        "backward of jvp": both[0],
        "backward of jvp: w": both[1],
        "jvp(jvp)": second,
        "vmap(jvp)": rows(torch.stack([d, d.sin()])),
    }


# ---- one collective, on rows -------------------------------------------------------------------


def parts(x: Tensor) -> list[Tensor]:
    return [*x.chunk(RANKS)]


def gathered(x: Tensor, dim: int = 0) -> Tensor:
    return torch.cat([torch.cat(parts(x), dim)] * RANKS)


def scattered(x: Tensor) -> Tensor:
    return torch.cat([*sum(parts(x)).chunk(RANKS)])


def reduced(x: Tensor) -> Tensor:
    return torch.cat([sum(parts(x))] * RANKS)


def exchanged(x: Tensor, lengths: list[list[int]]) -> Tensor:
    sent = [part.split(row) for part, row in zip(parts(x), lengths, strict=True)]
    return torch.cat([sent[source][rank] for rank in range(RANKS) for source in range(RANKS)])


UNEVEN = [[1, 3], [2, 2]]
"""How many rows each rank sends to each: they receive 3 and 5."""
RECEIVED = [sum(column) for column in zip(*UNEVEN, strict=True)]


def mesh(names: tuple[str, ...] = ("ranks",)) -> Any:
    """A mesh of one dimension; of two, the first of one rank."""
    sizes = (1,) * (len(names) - 1) + (RANKS,)
    return dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def uneven(funcol: Any, x: Tensor, group: Any, end: str = "") -> Tensor:
    rank = dist.get_rank()
    column = [row[rank] for row in UNEVEN]
    return getattr(funcol, f"all_to_all_single{end}")(x, column, UNEVEN[rank], group)


# name → (what a rank calls, what one process with the rows of all ranks computes)
COLLECTIVES: dict[str, tuple[Callable[[Any, Tensor, Any], Tensor], Callable[[Tensor], Tensor]]] = {
    "all_reduce": (lambda c, x, g: c.all_reduce(x, "sum", g), reduced),
    "all_reduce avg": (lambda c, x, g: c.all_reduce(x, "avg", g), lambda x: reduced(x) / RANKS),
    "all_reduce of a number": (
        lambda c, x, g: x * c.all_reduce(x.sum(), "SUM", g),
        lambda x: x * x.sum(),
    ),
    "all_reduce_coalesced": (
        lambda c, x, g: torch.mul(*c.all_reduce_coalesced([x, x.cos()], "sum", g)),
        lambda x: reduced(x) * reduced(x.cos()),
    ),
    "all_gather_tensor": (lambda c, x, g: c.all_gather_tensor(x, 0, g), gathered),
    "all_gather_tensor, columns": (
        lambda c, x, g: c.all_gather_tensor(x, 1, g),
        lambda x: gathered(x, 1),
    ),
    "all_gather_tensor_autograd": (
        lambda c, x, g: c.all_gather_tensor_autograd(x, 0, (mesh(), 0)),
        gathered,
    ),
    "all_gather_into_tensor_coalesced": (
        lambda c, x, g: torch.mul(*c.all_gather_into_tensor_coalesced([x, x.cos()], g)),
        lambda x: gathered(x) * gathered(x.cos()),
    ),
    "reduce_scatter_tensor": (lambda c, x, g: c.reduce_scatter_tensor(x, "sum", 0, g), scattered),
    "reduce_scatter_tensor avg": (
        lambda c, x, g: c.reduce_scatter_tensor(x, "avg", 0, g),
        lambda x: scattered(x) / RANKS,
    ),
    "reduce_scatter_tensor_autograd": (
        lambda c, x, g: c.reduce_scatter_tensor_autograd(x, "sum", 0, g),
        scattered,
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda c, x, g: torch.mul(
            *c.reduce_scatter_tensor_coalesced([x, x.cos()], "sum", [0, 0], g)
        ),
        lambda x: scattered(x) * scattered(x.cos()),
    ),
    "all_to_all_single, uneven": (uneven, lambda x: exchanged(x, UNEVEN)),
    "all_to_all_single_autograd": (
        lambda c, x, g: uneven(c, x, g, "_autograd"),
        lambda x: exchanged(x, UNEVEN),
    ),
    "all_to_all_single, waited": (
        lambda c, x, g: c.wait_tensor(c.all_to_all_single(x, None, None, g)),
        lambda x: exchanged(x, [[2, 2], [2, 2]]),
    ),
    "broadcast": (
        lambda c, x, g: c.broadcast(x, 1, g),
        lambda x: torch.cat([parts(x)[1]] * RANKS),
    ),
    "operator": (
        lambda c, x, g: torch.ops._c10d_functional.wait_tensor.default(
            torch.ops._c10d_functional.all_reduce.default(
                x, reduce_op="sum", group_name=g.group_name
            )
        ),
        reduced,
    ),
}

BRIEFLY = {
    *("all_reduce_coalesced", "reduce_scatter_tensor_coalesced", "keys gathered"),
    *("all_reduce avg", "all_reduce of a number", "all_gather_tensor, columns"),
    *("all_gather_tensor_autograd", "reduce_scatter_tensor_autograd"),
    "all_to_all_single_autograd",
}
"""Other spellings of collectives and of reductions whose derivatives are taken in every nesting."""


def on_rows(collective: Callable[[Tensor], Tensor]) -> Program:
    return lambda x, w: torch.sin(collective(torch.tanh(x @ w)))


# ---- attention, on tokens [T, B, C] ------------------------------------------------------------

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def on_tokens(attention: Attention) -> Program:
    """Project, attend in [B, T, H, D], and project."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (
            torch.tanh(x.transpose(0, 1) @ w[i]).unflatten(-1, (HEADS, SIZE)) for i in range(3)
        )
        return torch.sin(attention(q, k, v).flatten(-2) @ w[3]).transpose(0, 1)

    return model


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(-1, -2) * SIZE**-0.5).softmax(-1) @ v).transpose(1, 2)


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as funcol

    def to_heads(x: Tensor) -> Tensor:  # [B, T/N, H, D] → [B, H/N, T, D]
        x = x.unflatten(2, (RANKS, HEADS // RANKS)).permute(2, 1, 0, 3, 4).contiguous()
        x = funcol.all_to_all_single(x, None, None, dist.group.WORLD)
        return x.flatten(0, 1).permute(1, 2, 0, 3)

    out = F.scaled_dot_product_attention(*(to_heads(x) for x in (q, k, v)))
    x = out.unflatten(2, (RANKS, TOKENS // RANKS)).permute(2, 1, 3, 0, 4).contiguous()
    x = funcol.all_to_all_single(x, None, None, dist.group.WORLD)  # [N, H/N, T/N, B, D]
    return x.flatten(0, 1).permute(2, 1, 0, 3)


def keys_gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as funcol

    k, v = (funcol.all_gather_tensor(x.contiguous(), 1, dist.group.WORLD) for x in (k, v))
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def of_diffusers() -> Attention:
    """Diffusers' own attention with a ParallelConfig."""
    from diffusers.models import _modeling_parallel, attention_dispatch

    settings = _modeling_parallel.ContextParallelConfig(ulysses_degree=RANKS)
    config = _modeling_parallel.ParallelConfig(context_parallel_config=settings)
    shape = mesh(("ring", "ulysses"))
    config.setup(dist.get_rank(), RANKS, torch.device("cpu"), mesh=shape)
    return lambda q, k, v: attention_dispatch._native_attention(q, k, v, _parallel_config=config)


def by_dimensions() -> Attention:
    """Attention between diffusers' exchanges of one dimension for another."""
    from diffusers.models.attention_dispatch import SeqAllToAllDim

    group = dist.group.WORLD

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (SeqAllToAllDim.apply(group, x, 2, 1).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return SeqAllToAllDim.apply(group, out.contiguous(), 1, 2)

    return attention


ATTENTIONS: dict[str, Callable[[], Attention]] = {
    "ulysses": lambda: ulysses,
    "keys gathered": lambda: keys_gathered,
    "diffusers": of_diffusers,
    "diffusers' dimensions": by_dimensions,
}


JOBS = {
    "torch": (*COLLECTIVES, "ulysses", "keys gathered"),
    "diffusers": tuple(name for name in ATTENTIONS if "diffusers" in name),
}


# ---- the numbers of both -----------------------------------------------------------------------


def inputs(kind: str) -> tuple[list[Tensor], Tensor]:
    """x, d, g, h of all ranks, cotangents for either shape; and weights."""
    torch.manual_seed(3)
    if kind in ATTENTIONS:
        width = HEADS * SIZE
        rows = torch.randn(4, TOKENS, BATCH, width, dtype=torch.float64)
        return [*rows], torch.randn(4, width, width, dtype=torch.float64) / width**0.5
    rows = torch.randn(2, RANKS * ROWS, WIDTH, dtype=torch.float64)
    like = COLLECTIVES[kind][1](rows[0])
    cotangents = torch.randn(2, *like.shape, dtype=torch.float64)
    return [*rows, *cotangents], torch.randn(WIDTH, WIDTH, dtype=torch.float64)


def expected(kind: str) -> Numbers:
    """The numbers of one process."""
    if kind in ATTENTIONS:
        program = on_tokens(whole)
    else:
        program = on_rows(COLLECTIVES[kind][1])
    rows, w = inputs(kind)
    return derivatives(program, *rows, w, every=kind not in BRIEFLY)


def measured(kind: str) -> dict[str, Numbers | str]:
    """This rank's, by torch's calls in the context and by jets; or the error."""
    from torch.distributed import _functional_collectives as funcol

    rows, w = inputs(kind)
    rank = dist.get_rank()
    uneven = kind in ("all_to_all_single, uneven", "all_to_all_single_autograd")
    rows = [
        *(x.chunk(RANKS)[rank].contiguous() for x in rows[:2]),
        *(g.split(RECEIVED if uneven else len(g) // RANKS)[rank].contiguous() for g in rows[2:]),
    ]
    if kind in ATTENTIONS:
        try:
            program = on_tokens(ATTENTIONS[kind]())
        except ImportError as error:
            return {"torch": f"skipped: {error}", "jets": f"skipped: {error}"}
    else:
        program = on_rows(lambda x: COLLECTIVES[kind][0](funcol, x, dist.group.WORLD))
    found: dict[str, Numbers | str] = {}
    nested = partial(jx.differentiable()(derivatives), every=kind not in BRIEFLY)
    for how, numbers in (("torch", nested), ("jets", jets)):
        try:
            found[how] = numbers(program, *rows, w)
        except Exception as error:
            found[how] = f"{type(error).__name__}: {error}"
    return found


def refusals() -> dict[str, str]:
    """What a maximum over the ranks says, and its value."""
    from torch.distributed import _functional_collectives as funcol

    x = torch.arange(3.0) + dist.get_rank()

    def program(x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "max", dist.group.WORLD) * 1

    def said(call: Callable[[], object]) -> str:
        try:
            return str(call())
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def in_place(x: Tensor) -> Tensor:
        y = x.sin()
        dist.all_reduce(y)
        return y

    def constant(x: Tensor) -> Tensor:
        return x * program(x.detach())

    with jx.differentiable():
        return {
            "in place": said(lambda: jvp(in_place, (x,), (x,))),
            "in place, grad": said(lambda: grad(lambda x: in_place(x).sum())(x)),
            "in place, constant": said(lambda: jvp(lambda t: in_place(x) * t, (x,), (x,))),
            "value": said(lambda: program(x).tolist()),
            "detached": said(lambda: jvp(constant, (x,), (x,))[1].tolist()),
            "detached, jet": said(lambda: jx.jvp(constant, (x,), (x,))[1].tolist()),
            "detached, dual": said(
                lambda: jx.jvp(constant, (x,), (x,), differentiable=False)[1].tolist()
            ),
            "jvp": said(lambda: jvp(program, (x,), (x,))),
            "grad": said(lambda: grad(lambda x: program(x).sum())(x)),
            "jet": said(lambda: jx.jvp(program, (x,), (x,))),
            "dual": said(lambda: jx.jvp(program, (x,), (x,), differentiable=False)),
        }


def late() -> bool:
    """Whether vmap of an exchange is what a loop gives, where rank 1 comes late."""
    from torch.distributed import _functional_collectives as funcol

    def program(x: Tensor) -> Tensor:
        return funcol.all_to_all_single(x, None, None, dist.group.WORLD) * 1

    x = torch.randn(8, RANKS, 40000) + dist.get_rank()
    loop = torch.stack([program(row) for row in x])
    dist.barrier()
    time.sleep(0.05 * dist.get_rank())
    with jx.differentiable():
        return torch.equal(vmap(program)(x), loop)


def main(job: str, folder: str) -> None:
    enter_group(timeout=timedelta(seconds=60))
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {kind: measured(kind) for kind in JOBS[job]}
    results |= {"refusals": refusals(), "late": late()}
    leave_results(Path(folder), results)
