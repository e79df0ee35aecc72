"""What jets cost: steps with JacHess and jets alone, each beside what it stands for.

    python -m benchmarks.derivatives                          # the ratios of the README's table
    python -m benchmarks.derivatives --parts engine_vs_func compiled_block
    python -m benchmarks.derivatives --parts profile --shapes encoder6-T128 --mode plain

    step_vs_plain      a JacHess step (J + H, q = 2, all layers and tokens, |D| = all dimensions, R
                       alone) against a plain step through sdpa attention, and its products alone
    step_vs_published  the same against the published code's protocol, re-enacted
    engine_vs_func     a 2-jet of every layer against torch.func's jvp of jvp
    compiled_step      a JacHess step, eager and compiled by each backend, against a plain step
    trainer_step       a step of `MethodTrainer` with JacHess in mode train, eager and compiled,
                       against one of transformers' Trainer
    jvp_python         a jvp's forward without a graph against a plain one; the note says how many
                       functions it went through, and what each took longer
    train_mode         task loss + R from one forward against a plain step
    graphed            a JacHess step and a plain one as CUDA graphs (`jx.graphed`), against the
                       same steps run by Python; on a CPU both are
    attention_jvp      `jx.jvp` through attention, with a causal mask and without, against
                       torch.func.jvp of attention written out and of torch's "math" backend
    meanflow           a MeanFlow step of a small DiT against a flow-matching step
    compiled_block     the 2-jet of one encoder block, torch.compile against eager
    gemm_libraries     oneDNN's products against torch's at the sizes of jets' linear layers;
                       `jachess_ext/ops/gemm.py` follows what it shows
    profile            operators of a step by self time; prints only

Steps are forward and backward, no optimiser.  Each part appends to results/PART.csv.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import jachess_ext as jx

from .bench_micro import WAYS, attention_step, training_step
from .common import (
    Batch,
    Options,
    Row,
    Shape,
    Step,
    build_model,
    compare_times,
    finish,
    interleaved,
    make_batch,
    parse,
    parser,
    peak_megabytes,
    penalty_step,
    plain_step,
    regulariser,
    synchronize,
    train_step,
)

STREAMS = 4
Steps = dict[str, Step]
"""By what they are called in the rows."""


# Steps against plain ones -----------------------------------------------------------------------


def step_vs_plain(shape: Shape, options: Options) -> Steps:
    """Return a JacHess step, a plain one, and the floor of each."""
    model = build_model(shape, **options.place)
    batch = make_batch(shape, labels=True, device=options.device)
    return {
        "JacHess step": penalty_step(model, batch),
        "plain step": plain_step(model, batch),
        "floor": floor_step(model, batch, shape, STREAMS),
        "plain floor": floor_step(model, batch, shape, 1),
    }


def compiled_step(shape: Shape, options: Options) -> Steps:
    """Return a JacHess step by Python and in a graph of each backend, and a plain one."""
    model = build_model(shape, **options.place)
    batch = make_batch(shape, labels=True, device=options.device)
    return {
        "plain step": plain_step(model, batch),
        "JacHess step, eager": penalty_step(model, batch),
        **{
            f"JacHess step, {backend}": penalty_step(model, batch, compile=backend)
            for backend in ("aot_eager", "inductor")
        },
    }


def trainer_step(shape: Shape, options: Options) -> Steps:
    """Return a training step of transformers' Trainer, and of `MethodTrainer` in three ways."""
    from transformers import Trainer, TrainingArguments

    from jachess_ext.training import JacHess, MethodTrainer

    batch = make_batch(shape, labels=True, device=options.device)
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=options.device.type == "cpu",
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )

    def step_of(backend: str | None, method: JacHess | None) -> Step:
        model = build_model(shape, **options.place)
        model.drawn_modules = ()  # type: ignore[assignment]  # its weights stand for a checkpoint's
        rows: Any = [{name: value[0] for name, value in batch.items()}]
        trainer: Trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        if method is not None:
            trainer = MethodTrainer(
                model=model, args=arguments, train_dataset=rows, method=method, compile=backend
            )
            trainer.begin_training()
        trainer.current_gradient_accumulation_steps = 1  # type: ignore[attr-defined]  # as train()

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            return trainer.training_step(model, dict(batch))

        return step

    method = JacHess(weights="uniform", directions=2, dimensions="all", normalize=False)
    ways = {"eager": None, "aot_eager": "aot_eager", "inductor": "inductor"}
    return {
        "Trainer's step": step_of(None, None),
        **{f"MethodTrainer's, {way}": step_of(backend, method) for way, backend in ways.items()},
    }


def train_mode(shape: Shape, options: Options) -> Steps:
    """Return task loss and penalty from one forward, and the task loss alone."""
    model = build_model(shape, **options.place)
    batch = make_batch(shape, labels=True, device=options.device)
    return {"train mode step": train_step(model, batch), "plain step": plain_step(model, batch)}


def graphed(shape: Shape, options: Options) -> Steps:
    """Return a JacHess step, a plain one, and both as CUDA graphs, which leave the same
    gradients."""
    model = build_model(shape, **options.place)
    penalty = regulariser(model)
    losses: dict[str, Callable[[Batch], Tensor]] = {
        "JacHess step": lambda batch: penalty(batch).loss,
        "plain step": lambda batch: model(**batch).loss,
    }
    steps: Steps = {}
    for name, loss in losses.items():
        batch = make_batch(shape, labels=name == "plain step", device=options.device)

        def backward(batch: Batch, loss: Callable[[Batch], Tensor] = loss) -> Tensor:
            result = loss(batch)
            result.backward()
            return result

        ways = {name: backward}
        ways[f"{name}, graphed"] = jx.graphed(backward, parameters=model.parameters())
        for label, run in ways.items():

            def step(run: Callable[[Batch], Tensor] = run, batch: Batch = batch) -> Tensor:
                model.zero_grad(set_to_none=True)
                return run(batch).detach()

            steps[label] = step
    return steps


# The floor under a step: its matrix products alone, at the machine's own rate


@dataclass(frozen=True)
class Linear:
    """A token-wise linear layer's product."""

    rows: int
    inputs: int
    outputs: int


def linear_products(model: nn.Module, batch: Batch) -> Counter[Linear]:
    """Count how often a forward pass multiplies which shapes, token-wise linear layers only."""
    seen: Counter[Linear] = Counter()

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        if args[0].ndim == 3:  # poolers and heads see one token a row
            rows = args[0].shape[0] * args[0].shape[1]
            seen[Linear(rows, args[0].shape[-1], output.shape[-1])] += 1

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def floor_step(model: nn.Module, batch: Batch, shape: Shape, streams: int) -> Step:
    """Return a step of nothing but the matrix products of ``streams`` streams.

    A jet of S streams multiplies S times the rows of every linear layer forward, and twice that
    backward (for the input's and the weight's gradient); attention's two products per head count S
    times forward and 2 S times backward as well.  That is a lower bound for attention, whose jet of
    a product of two jets needs 9 products where S = 4.  Causal products count half.
    """
    parameter = next(model.parameters())
    place = {"device": parameter.device, "dtype": parameter.dtype}
    linear = []
    for key, count in linear_products(model, batch).items():
        x = torch.randn(streams * key.rows, key.inputs, **place)
        weight = torch.randn(key.outputs, key.inputs, **place)
        y = torch.randn(streams * key.rows, key.outputs, **place)
        results = torch.empty_like(y), torch.empty_like(x), torch.empty_like(weight)
        linear.append((x, weight, y, results, count))
    heads = max(streams * shape.batch * shape.heads // (1 if shape.family == "bert" else 2), 1)
    token = torch.randn(heads, shape.tokens, shape.width // shape.heads, **place)
    square = torch.randn(heads, shape.tokens, shape.tokens, **place)
    out_token, out_square = torch.empty_like(token), torch.empty_like(square)

    def step() -> None:
        for x, weight, y, (out, grad_x, grad_weight), count in linear:
            for _ in range(count):
                torch.mm(x, weight.t(), out=out)
                torch.mm(y, weight, out=grad_x)
                torch.mm(y.t(), x, out=grad_weight)
        for _ in range(shape.layers):
            for _ in range(2):  # q kᵀ forward, ∂weights backward
                torch.bmm(token, token.transpose(1, 2), out=out_square)
            for _ in range(4):  # weights·v forward; ∂v, ∂q, ∂k backward
                torch.bmm(square, token, out=out_token)

    return step


# The published protocol -------------------------------------------------------------------------

PROJECTIONS = 10
Products = Literal["dimensions", "projections"]


def step_vs_published(shape: Shape, options: Options) -> Steps:
    """Return our step, and theirs per reading of the protocol's "10 Hessian products"."""
    ours = build_model(shape, **options.place)
    theirs = build_model(shape, attention="eager", **options.place)
    batch = make_batch(shape, labels=False, device=options.device)
    return {
        "JacHess step": penalty_step(ours, batch),
        "published, 10 dimensions": published_step(theirs, batch, "dimensions"),
        "published, 10 projections": published_step(theirs, batch, "projections"),
    }


def published_step(model: nn.Module, batch: Batch, products: Products = "dimensions") -> Step:
    """Return forward and backward of the published code's penalty, from a description of it.

    Per layer: one forward pass of the whole model with eager attention, of which only the
    classifier token's hidden state is used; 10 random projections of it differentiated with respect
    to the embeddings, with a graph (so that training needs the double backward); 10 Hessian
    products whose results are copied out, so that the Hessian term adds to the loss's value but has
    no gradient.  Norms are squared.  What is re-enacted is its cost: it is not to be trained with.

    Each layer's loss is differentiated before the next layer's forward: the sum's gradient at the
    same cost, and memory for one layer's graphs only.

    Args:
        model: a sequence classifier with eager attention; sdpa has no double backward.
        products: how its 10 Hessian products are read: one each for 10 sampled output dimensions
            (Eq. 6 with |D| = 10), or the cheaper 10 projections of one dimension's gradient.
    """
    layers = int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for layer in range(layers):
            layer_penalty(model, batch, layer, products).backward()

    return step


def layer_penalty(model: nn.Module, batch: Batch, layer: int, products: Products) -> Tensor:
    """Return the squared Jacobian norm plus detached squared Hessian norms of one layer; scalar."""
    embeddings = model.get_input_embeddings()(batch["input_ids"])  # type: ignore[operator]
    output = model.base_model(  # type: ignore[operator]
        inputs_embeds=embeddings, attention_mask=batch["attention_mask"], output_hidden_states=True
    )
    token = output.hidden_states[layer + 1][:, 0]
    jacobian = token.new_zeros(())
    for _ in range(PROJECTIONS):
        gradient = _gradient((torch.randn_like(token) * token).sum(), embeddings, create_graph=True)
        jacobian = jacobian + gradient.square().sum()
    return jacobian / PROJECTIONS + hessian_squares(token, embeddings, products)


def hessian_squares(token: Tensor, x: Tensor, products: Products) -> Tensor:
    """Return squared Hessian products, copied out: without a gradient, as in the published code."""
    count = PROJECTIONS if products == "dimensions" else 1
    squares = []
    for j in torch.randperm(token.shape[-1])[:count].tolist():
        gradient = _gradient(token[:, j].sum(), x, create_graph=True)
        for _ in range(PROJECTIONS // count):
            along = (torch.randn_like(gradient) * gradient).sum()
            squares.append(_gradient(along, x, create_graph=False).square().sum())
    return torch.stack(squares).detach().sum() / (PROJECTIONS // count)


def _gradient(scalar: Tensor, x: Tensor, *, create_graph: bool) -> Tensor:
    (gradient,) = torch.autograd.grad(scalar, x, create_graph=create_graph, retain_graph=True)
    return gradient


# Jets alone -------------------------------------------------------------------------------------


def engine_vs_func(shape: Shape, options: Options) -> Steps:
    """Return a 2-jet, forward and backward, and torch.func's jvp of jvp.

    The same four streams of every layer (z, J u, J w, D²z[u, w]), and the parameter gradients of
    the sum of squares of the last three.  Ours runs with sdpa attention; nested jvp needs eager
    attention, since sdpa kernels have no forward mode.  For timing only: nested jvp is silently
    wrong through layer_norm (docs/how_it_works.md, traps), so its values are never compared.
    """
    place = options.place | {"dropout": 0.0}
    ours, theirs = build_model(shape, **place), build_model(shape, attention="eager", **place)
    mask = make_batch(shape, labels=False, device=options.device)["attention_mask"]
    size = (3, shape.batch, shape.tokens, shape.width)
    x, u, w = torch.randn(size, device=options.device, dtype=options.dtype)

    def blocks_of(model: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
        def blocks(x: Tensor) -> tuple[Tensor, ...]:
            output = model.base_model(
                inputs_embeds=x, attention_mask=mask, output_hidden_states=True, use_cache=False
            )
            return tuple(output.hidden_states[1:])

        return blocks

    def jet_step() -> None:
        ours.zero_grad(set_to_none=True)
        jets = jx.jet(blocks_of(ours), x, torch.stack([u, w]))
        torch.stack([jet.streams[1:].square().sum() for jet in jets]).sum().backward()

    def nested_step() -> None:
        theirs.zero_grad(set_to_none=True)
        result: Any = torch.func.jvp(
            lambda point: torch.func.jvp(blocks_of(theirs), (point,), (u,)), (x,), (w,)
        )
        (_, along_u), (along_w, second) = result
        streams = [*along_u, *along_w, *second]
        torch.stack([stream.square().sum() for stream in streams]).sum().backward()

    return {"2-jet, forward + backward": jet_step, "torch.func jvp of jvp, eager": nested_step}


MASKS = {"causal": True, "no mask": False}
WRITTEN_OUT, MATH = "torch.func.jvp, written out", "torch.func.jvp, math backend"


def attention_jvp(shape: Shape, options: Options) -> Steps:
    """Return a jvp through attention in three programs, each three ways with and without a mask."""
    place = {"device": options.device, "dtype": options.dtype}
    names = {"jx.jvp": "ours", WRITTEN_OUT: "written out", MATH: "math backend"}
    return {
        f"{name}, {way}, {mask}": attention_step(program, way, shape.tokens, place, causal)
        for mask, causal in MASKS.items()
        for way in WAYS
        for name, program in names.items()
    }


def meanflow(shape: Shape, options: Options) -> Steps:
    """Return MeanFlow's steps and a flow-matching step of the same model."""
    place = {"device": options.device, "dtype": options.dtype}
    programs = ("no graph", "kept graph", "torch.func", "central differences", "plain")
    size = (shape.family != "dit", shape.width, shape.layers)
    return {name: training_step(name, place, *size) for name in programs}


def compiled_block(shape: Shape, options: Options) -> Steps:
    """Return the jet of an encoder's first block, compiled and eager.

    One graph (Inductor); compilation is in the warm-up.  The loss is the sum of squares of the
    tangents; dropout is off.
    """
    if shape.family != "bert":
        raise ValueError(f"{shape.name}: expected an encoder, whose blocks take x alone")
    model = build_model(shape, **(options.place | {"dropout": 0.0}))
    block: nn.Module = model.base_model.encoder.layer[0].eval()  # type: ignore
    size = (3, shape.batch, shape.tokens, shape.width)
    x, *directions = torch.randn(size, device=options.device, dtype=options.dtype)
    along = torch.stack(directions)

    def penalty(x: Tensor, directions: Tensor) -> Tensor:
        return jx.jet(block, x, directions).streams[1:].square().sum()

    def step_of(function: Callable[..., Tensor]) -> Step:
        def step() -> None:
            block.zero_grad(set_to_none=True)
            function(x, along).backward()

        return step

    compiled = torch.compile(penalty, fullgraph=True, backend=options.extra.backend)
    return {"2-jet of a block, compiled": step_of(compiled), "the same, eager": step_of(penalty)}


class Hidden(nn.Module):
    """An encoder as a function from embeddings to its last hidden states."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(inputs_embeds=x).last_hidden_state


def _encoder(shape: Shape, options: Options) -> tuple[Hidden, Tensor, Tensor]:
    """Return an encoder without dropout, its embeddings and a direction."""
    model = build_model(shape, **(options.place | {"dropout": 0.0}))
    hidden = Hidden(model.base_model).eval()  # type: ignore[arg-type]
    size = (2, shape.batch, shape.tokens, shape.width)
    x, direction = torch.randn(size, device=options.device, dtype=options.dtype)
    hidden(x)  # transformers writes into a model in its first pass
    return hidden, x, direction


def jvp_vs_plain(shape: Shape, options: Options) -> Steps:
    """Return a jvp of a whole encoder and its backward, eager and in one graph, and a plain step.

    Compilation is in the warm-up.  The loss is the sum of squares; dropout is off.
    """
    hidden, x, direction = _encoder(shape, options)

    def tangents(x: Tensor, direction: Tensor) -> Tensor:
        return jx.jvp(hidden, (x,), (direction,))[1].square().sum()

    def plain(x: Tensor, direction: Tensor) -> Tensor:
        return hidden(x).square().sum()

    def step_of(function: Callable[..., Tensor]) -> Step:
        def step() -> None:
            hidden.zero_grad(set_to_none=True)
            function(x, direction).backward()

        return step

    backends = {"aot_eager": "aot_eager", "compiled": options.extra.backend}
    compiled = {
        name: torch.compile(tangents, fullgraph=True, backend=b) for name, b in backends.items()
    }
    return {
        "plain": step_of(plain),
        "jvp": step_of(tangents),
        **{f"jvp, {name}": step_of(function) for name, function in compiled.items()},
    }


def jvp_python(shape: Shape, options: Options) -> Steps:
    """Return a whole encoder's jvp and its plain pass, forward and without a graph."""
    hidden, x, direction = _encoder(shape, options)

    @torch.no_grad()
    def plain() -> None:
        hidden(x)

    @torch.no_grad()
    def jvp() -> None:
        jx.jvp(hidden, (x,), (direction,))

    return {"jvp, no graph": jvp, "plain, no graph": plain}


class _FunctionCount(TorchFunctionMode):
    """Count the calls of torch's functions and methods."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.__name__ != "__get__"  # an attribute
        return func(*args, **(kwargs or {}))


def functions_of(step: Step) -> int:
    """Return how many functions of torch a step calls."""
    with _FunctionCount() as counted:
        step()
    return counted.count


def gemm_libraries(shape: Shape, options: Options) -> Steps:
    """Return a linear layer's three products, each by oneDNN and by torch (MKL on x86)."""
    steps: Steps = {}
    count = STREAMS * shape.batch * shape.tokens
    onednn = torch.ops.mkldnn._linear_pointwise
    sizes = [(shape.width, shape.width), (shape.width, shape.inner), (shape.inner, shape.width)]
    for inner, outer in sizes:
        x, g, w = torch.randn(count, inner), torch.randn(count, outer), torch.randn(outer, inner)
        products = {
            "forward": (x, w),
            "input gradient": (g, w.mT),
            "weight gradient": (g.mT, x.mT),
        }
        for name, (a, b) in products.items():
            label = f"{name} {inner}->{outer}"
            steps[f"oneDNN {label}"] = lambda a=a, b=b: onednn(a, b, None, "none", [], "")
            steps[f"torch {label}"] = lambda a=a, b=b: torch.mm(a, b.mT)
    return steps


# Where the time of a step goes ------------------------------------------------------------------


def profile_step(shape: Shape, options: Options) -> None:
    """Run a step under the profiler; print its operators by self time.

    Times are self times summed over the threads that record them; a profiler slows small
    operators, so shares are approximate and no figure comes from here.
    """
    model = build_model(shape, **options.place)
    kinds = {"plain": plain_step, "train": train_step, "unlab": penalty_step}
    step = kinds[options.extra.mode](model, make_batch(shape, labels=True, device=options.device))
    print(f"\n{shape.name}, {options.extra.mode}, torch {torch.__version__}")
    cuda = options.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    for _ in range(2):
        step()
    with profile(activities=activities, record_shapes=options.extra.by_shape) as recorded:
        for _ in range(options.rounds()):
            step()
        synchronize(options.device)
    averages = recorded.key_averages(group_by_input_shape=options.extra.by_shape)
    column = "self_device_time_total" if cuda else "self_cpu_time_total"
    limit = options.extra.rows
    print(averages.table(sort_by=column, row_limit=limit, max_name_column_width=48))


# The command ------------------------------------------------------------------------------------

_ENCODERS = ("encoder6-T32", "encoder6-T128")
_ALL = (*_ENCODERS, "encoder12-T128", "llama6-T128")


@dataclass(frozen=True)
class Part:
    """Steps that are timed in turn, and the pairs of them that are compared.

    Attributes:
        pairs: (figure, baseline, target); none: every two that follow one another.
        floors: by figure, the step that is its floor.
        counts: the step whose functions are counted; empty: none are.
    """

    steps: Callable[[Shape, Options], Steps]
    shapes: Sequence[str]
    pairs: Sequence[tuple[str, str, str]] = ()
    floors: Mapping[str, str] = field(default_factory=dict)
    quick: Sequence[str] = ("tiny",)
    repeats: int = 9
    warmup: int = 2
    counts: str = ""


PARTS = {
    "step_vs_plain": Part(
        step_vs_plain,
        _ALL,
        [("JacHess step", "plain step", "≤ 4.0"), ("plain step", "plain step", "")],
        floors={"JacHess step": "floor", "plain step": "plain floor"},
        quick=("tiny", "llama-tiny"),
    ),
    "step_vs_published": Part(
        step_vs_published,
        ("encoder6-T32", "encoder12-T32"),
        [
            ("JacHess step", f"published, 10 {reading}", "≥ 20")
            for reading in ("dimensions", "projections")
        ],
        repeats=7,
        warmup=1,  # a round takes as long as hundreds of plain steps
    ),
    "engine_vs_func": Part(
        engine_vs_func,
        (*_ENCODERS, "llama6-T128"),
        [("2-jet, forward + backward", "torch.func jvp of jvp, eager", "≥ 2")],
    ),
    "jvp_vs_plain": Part(
        jvp_vs_plain,
        ("encoder4-T16", "encoder4-T32", "encoder6-T32", "encoder8-T32", "encoder12-T32"),
        [(f"jvp{way}", "plain", "") for way in ("", ", aot_eager", ", compiled")],
        quick=("encoder4-T16",),
    ),
    "train_mode": Part(train_mode, _ALL, [("train mode step", "plain step", "≤ 4.1")]),
    "compiled_step": Part(
        compiled_step,
        ("encoder4-T16", "encoder6-T32"),
        [(f"JacHess step, {way}", "plain step", "") for way in ("eager", "aot_eager", "inductor")],
    ),
    "trainer_step": Part(
        trainer_step,
        ("encoder4-T16", "encoder6-T32"),
        [
            (f"MethodTrainer's, {way}", "Trainer's step", "")
            for way in ("eager", "aot_eager", "inductor")
        ],
    ),
    "jvp_python": Part(
        jvp_python,
        ("encoder4-T16", "encoder12-T32"),
        [("jvp, no graph", "plain, no graph", "")],
        repeats=51,
        counts="plain, no graph",
    ),
    "graphed": Part(
        graphed,
        ("encoder6-T32",),
        [
            ("JacHess step, graphed", "plain step", ""),
            ("JacHess step, graphed", "JacHess step", ""),
            ("JacHess step, graphed", "plain step, graphed", ""),
        ],
        warmup=5,  # three calls run as they are, the fourth is captured
    ),
    "attention_jvp": Part(
        attention_jvp,
        ("attention-T128", "attention-T1024", "attention-T2048"),
        [
            (f"jx.jvp, {way}, {mask}", f"{other}, {way}, {mask}", "≥ 1")
            for mask in MASKS
            for way in WAYS
            for other in (WRITTEN_OUT, MATH)
        ],
        repeats=5,
        warmup=1,
    ),
    "meanflow": Part(
        meanflow,
        ("dit4-T256", "dit6-T256"),
        [
            (way, "plain", "")
            for way in ("no graph", "kept graph", "torch.func", "central differences")
        ],
    ),
    "compiled_block": Part(
        compiled_block,
        (*_ENCODERS, "encoder12-T128"),
        [("2-jet of a block, compiled", "the same, eager", "")],
        repeats=15,
    ),
    "gemm_libraries": Part(gemm_libraries, _ENCODERS),
}
_PUBLISHED_TARGETS = {6: "≥ 20", 12: "≥ 40", 24: "≥ 100"}  # by layers


def measure(name: str, shape: Shape, options: Options) -> list[Row]:
    """Time a part's steps in turn; a row a pair, a speed-up where the target is one."""
    part = PARTS[name]
    steps = part.steps(shape, options)
    times = interleaved(
        steps, repeats=options.rounds(part.repeats), device=options.device, warmup=part.warmup
    )
    names, rows = list(steps), []
    pairs = part.pairs or [(a, b, "") for a, b in zip(names[::2], names[1::2], strict=True)]
    for figure, baseline, target in pairs:
        floor = part.floors.get(figure)
        row = compare_times(
            options,
            times,
            figure,
            baseline,
            speed_up=target.startswith("≥"),
            question=name.replace("_", "-"),
            shape=shape.name,
            figure=figure,
            baseline="torch" if name == "gemm_libraries" else baseline,
            floor_ratio=times.ratio(figure, floor) if floor else None,
            peak_mb=peak_megabytes(steps[figure], options.device),
            target=target,
            note=f"backend {options.extra.backend}" if "compiled" in figure else "",
        )
        if part.counts:
            count = functions_of(steps[part.counts])
            more = 1e3 * (row.p50 - row.baseline_p50) / count
            row.note = f"{count} functions, {more:.1f} µs more each"
        if name == "step_vs_published":
            row.target = _PUBLISHED_TARGETS.get(shape.layers, "")
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure the parts, append to their CSVs, print."""
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument(
        "--parts", nargs="+", choices=[*PARTS, "profile"], default=list(PARTS)[:4]
    )
    arguments.add_argument("--backend", default="inductor", help="of torch.compile")
    arguments.add_argument("--mode", default="unlab", choices=("unlab", "train", "plain"))
    arguments.add_argument("--rows", type=int, default=25, help="operators of the profile")
    arguments.add_argument("--by-shape", action="store_true", help="split operators by input shape")
    options = parse(arguments, argv)
    rows: list[Row] = []
    for name in options.extra.parts:
        if name == "profile":
            for shape in options.shapes_or(_ENCODERS):
                profile_step(shape, options)
            continue
        shapes = options.shapes_or(PARTS[name].shapes, PARTS[name].quick)
        rows += finish([r for s in shapes for r in measure(name, s, options)], name, options)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
