"""`jx.ntk`: the empirical neural tangent kernel, without per-sample gradients kept whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from .job import Job
from .outputs import Outputs
from .report import Report
from .samples import Batch
from .selection import Chosen

Method = Literal["auto", "gram", "materialise", "sketch", "per_sample", "explain"]


@dataclass(frozen=True)
class Measurement:
    """A kernel and how it was computed.

    Attributes:
        theta: [N, C, M, C]; None on all but the first rank of a group.
        report: see `Report`.
    """

    theta: Any
    report: Report


def ntk(
    model: nn.Module,
    batch: Batch,
    other: Batch | None = None,
    *,
    outputs: Outputs = "logits",
    parameters: Chosen = None,
    method: Method = "auto",
    memory_budget: int | None = None,
    progress: bool | None = None,
    seed: int | None = None,
    sketch_size: int = 64,
    group: Any = None,
) -> Any:
    """The empirical NTK, Θ[n, c, m, c'] = ∇_θ f_c(x_n) · ∇_θ f_c'(x_m) (LensLLM, Eq. 8), exactly.

    One forward and C backward passes a block of samples give each layer's inputs and output
    cotangents; these are contracted layer by layer (docs/ntk.md, Forms).  The model is put in
    evaluation mode for the call (no dropout); its parameters and their ``.grad`` are untouched.

    Args:
        model: any torch model; logits are its ``.logits``, its "logits", or the tensor it returns.
        batch: a dict of tensors as a collator yields it (or one tensor): N samples.
        other: the M samples of the right side; None: the left ones, each pair computed once.
        outputs: "logits": all C of them; "sum": the pseudo-NTK, NTK of Σ_c logits_c divided by C;
            "label": each sample's label's logit; an int k: k random projections, whose trace over
            outputs Σ_j Θ[n, j, m, j] is unbiased for the trace of the logits' kernel, with variance
            (2/k) Σ_{c≠c'} S_cc'² (S: its symmetric part over outputs); or a callable (model output,
            batch) -> [n, C].  Token-level logits [n, T, L] count at the last real token; "label"
            averages over the labelled tokens (shifted by one for causal language models).
        parameters: None: all that require gradients; names; or a predicate (name, p) -> bool.
        method: "auto" chooses form A or B per layer by counted cost; "gram" and "materialise" force
            A or B; "sketch": form C, unbiased and not exact, where it saves work: layers' gradients
            seen through ``sketch_size`` random columns (variance: `ntk.sketch`; the report has the
            measured error); "per_sample": exact gradients one sample at a time, slow, for any
            model;
            "explain": no kernel, but the `Report` of what would be done.
        memory_budget: bytes that blocks and kernel may take; None: half of the free memory, 4 GiB
            at most.
        progress: a progress bar over blocks (needs tqdm); None: where a terminal looks on.
        seed: of the random projections and of the sketch.
        sketch_size: k, an even number; the sketch's error falls with 1/√k.
        group: a process group of torch.distributed (``torch.distributed.group.WORLD``; gloo or
            nccl): pairs of blocks are shared out among its ranks.  Every rank calls with the same
            model and batches; the group's first rank gets Θ, the others None.

    Returns:
        Θ, [N, C, M, C], on the model's device; fp64 for fp64 models, else fp32.  No graph.

    Raises:
        TypeError, ValueError: bad arguments; a batch without inputs or labels; no parameter to take
            the kernel over; NaN outputs or gradients; a budget too small for one sample.
        RuntimeError: the finished kernel disagrees with a plain backward pass (samples that depend
            on one another); another rank failed.

    Warns:
        RuntimeWarning: parameters used outside covered calls, which get exact per-sample gradients.
    """
    job = Job(
        *(model, batch, other, group),
        outputs=outputs,
        parameters=parameters,
        method=method,
        memory_budget=memory_budget,
        seed=seed,
        sketch_size=sketch_size,
    )
    return job.report if method == "explain" else job.run(progress)


def measure_ntk(
    model: nn.Module,
    batch: Batch,
    other: Batch | None = None,
    *,
    progress: bool | None = None,
    **request: Any,
) -> Measurement:
    """As `ntk`, which has the other arguments, with the `Report` of how it was done."""
    job = Job(model, batch, other, **request)
    theta = job.run(progress)
    return Measurement(theta, job.report)
