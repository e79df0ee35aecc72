"""`jx.ntk`: the empirical neural tangent kernel, without per-sample gradients kept whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..smoothness.model_pass import unwrapped
from .budget import Budget, plan_blocks
from .capture import Watched, capture, learn_layout
from .contraction import Choice, LinearForm, Settings, contract, plan
from .contributions import Contribution
from .outputs import OutputMap, Outputs
from .probe import Probe, check_kernel, probe
from .recorder import Layout
from .report import Report
from .samples import Batch, Samples
from .selection import Chosen, choose_parameters

Method = Literal["auto", "gram", "materialise", "per_sample", "explain"]
_FORMS: dict[str, LinearForm] = {
    "auto": "auto",
    "gram": "A",
    "materialise": "B",
    "per_sample": "auto",
    "explain": "auto",
}
_ASKED = "method='per_sample'"


@dataclass(frozen=True)
class Measurement:
    """A kernel and how it was computed.

    Attributes:
        theta: [N, C, M, C].
        report: see `Report`.
    """

    theta: Tensor
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
) -> Any:
    """The empirical NTK, Θ[n, c, m, c'] = ∇_θ f_c(x_n) · ∇_θ f_c'(x_m) (LensLLM, Eq. 8), exactly.

    One forward and C backward passes a block of samples give each layer's inputs and output
    cotangents; these are contracted layer by layer (spec 02, forms A and B).  The model is put in
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
            A or B; "per_sample": exact gradients one sample at a time, slow, for any model;
            "explain": no kernel, but the `Report` of what would be done.
        memory_budget: bytes that blocks and kernel may take; None: half of the free memory, 4 GiB
            at most.
        progress: a progress bar over blocks (needs tqdm); None: where a terminal looks on.
        seed: of the random projections.

    Returns:
        Θ, [N, C, M, C], on the model's device; fp64 for fp64 models, else fp32.  No graph.

    Raises:
        TypeError, ValueError: bad arguments; a batch without inputs or labels; no parameter to take
            the kernel over; NaN outputs or gradients; a budget too small for one sample.
        RuntimeError: the finished kernel disagrees with a plain backward pass (samples that depend
            on one another).

    Warns:
        RuntimeWarning: parameters used outside covered calls, which get exact per-sample gradients.
    """
    if method == "explain":
        return _Job(model, batch, other, outputs, parameters, method, memory_budget, seed).report
    return measure_ntk(
        model,
        batch,
        other,
        outputs=outputs,
        parameters=parameters,
        method=method,
        memory_budget=memory_budget,
        progress=progress,
        seed=seed,
    ).theta


def measure_ntk(
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
) -> Measurement:
    """As `ntk`, with the `Report` of how it was done."""
    job = _Job(model, batch, other, outputs, parameters, method, memory_budget, seed)
    theta = job.run(progress)
    return Measurement(theta, job.report)


class _Job:
    """One call of `ntk`: planned when made, run once."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        other: Batch | None,
        outputs: Outputs,
        parameters: Chosen,
        method: Method,
        memory_budget: int | None,
        seed: int | None,
    ) -> None:
        if method not in _FORMS:
            raise ValueError(
                f"method is {method!r}; expected one of {', '.join(map(repr, _FORMS))}"
            )
        inner = unwrapped(model)
        self._symmetric = other is None
        left = Samples.of(batch)
        self._sides = [left] if other is None else [left, Samples.of(other, "other")]
        self._outputs = OutputMap(inner, outputs, seed)
        for side in self._sides:
            self._outputs.check(side)
        chosen = choose_parameters(inner, parameters)
        self._watched = Watched(inner, chosen)
        if method == "per_sample":
            self._watched.fallback.update(dict.fromkeys(chosen, _ASKED))
        self._dtype = _widest(chosen)
        self._layouts: list[Layout] = []
        self._probes: list[Probe] = []
        with torch.compiler.set_stance("force_eager"):
            for side in self._sides:
                self._layouts.append(learn_layout(self._watched, self._outputs, side))
                self._probes.append(probe(self._watched, self._outputs, self._layouts[-1], side))
        self._say_fallback()
        self._budget = self._plan_budget(memory_budget)
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        self._settings = Settings(_FORMS[method], self._budget.workspace, wide)
        self.report = self._make_report()

    def run(self, progress: bool | None) -> Tensor:
        """Θ, [N, C, M, C]."""
        left, right = self._sides[0], self._sides[-1]
        outputs = self._probes[0].outputs
        device = next(iter(self._watched.parameters.values())).device
        # The sum over parameters is kept in double: as many terms as parameters, little memory.
        theta = torch.zeros(
            outputs, left.count, outputs, right.count, dtype=torch.float64, device=device
        )
        first = True
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            for rows, columns, mine, theirs in self._captured_pairs(progress):
                choices: list[Choice] = []
                for choice, kernel in contract(mine, theirs, mine is theirs, self._settings):
                    self._check_finite(choice, kernel)
                    _add(theta, kernel, rows, columns, self._symmetric and mine is not theirs)
                    choices.append(choice)
                if first:
                    self.report.choices, first = choices, False
        theta = theta.permute(1, 0, 3, 2)
        if self._symmetric:
            theta = (theta + theta.permute(2, 3, 0, 1)) / 2  # round-off leaves the last bits apart
        self.report.difference = check_kernel(theta, self._probes[0], self._probes[-1], self._dtype)
        return theta.to(self._settings.dtype).contiguous()

    def _captured_pairs(
        self, progress: bool | None
    ) -> Iterator[tuple[list[int], list[int], dict[str, Contribution], dict[str, Contribution]]]:
        """Pairs of blocks; of a symmetric kernel the upper triangle."""
        left, right = self._sides[0], self._sides[-1]
        lefts, rights = _blocks(left, self._budget.block), _blocks(right, self._budget.block)
        with _bar(progress, self.report.blocks) as advance:
            for i, rows in enumerate(lefts):
                mine = self._capture(0, rows)
                for j, columns in enumerate(rights):
                    if self._symmetric and j < i:
                        continue
                    same = self._symmetric and j == i
                    theirs = mine if same else self._capture(-1, columns)
                    yield rows, columns, mine, theirs
                    advance()

    def _capture(self, side: int, rows: list[int]) -> dict[str, Contribution]:
        layout, samples = self._layouts[side], self._sides[side]
        with torch.enable_grad():
            return capture(self._watched, self._outputs, layout, samples, rows)

    def _check_finite(self, choice: Choice, kernel: Tensor) -> None:
        if not torch.isfinite(kernel).all():
            raise ValueError(
                f"the kernel of parameter {choice.names[0]!r} is NaN or infinite; expected finite "
                "gradients (look for a division by zero or an overflow in the model, or use a "
                "wider dtype)"
            )

    def _say_fallback(self) -> None:
        found = {n: why for n, why in self._watched.fallback.items() if why != _ASKED}
        if not found:
            return
        lines = "; ".join(f"{name} ({why})" for name, why in found.items())
        warnings.warn(
            f"jachess_ext.ntk: exact per-sample gradients, one sample at a time, for {lines}. "
            "The kernel is exact, only slower.",
            RuntimeWarning,
            stacklevel=5,
        )

    def _plan_budget(self, limit: int | None) -> Budget:
        left, right = self._sides[0], self._sides[-1]
        outputs = self._probes[0].outputs
        fallback = sum(self._watched.parameters[n].numel() for n in self._watched.fallback)
        size = torch.finfo(self._dtype).bits // 8
        capture_bytes = max(p.capture_bytes() for p in self._probes) + fallback * size * outputs
        return plan_blocks(
            limit,
            samples=left.count,
            others=right.count,
            symmetric=self._symmetric,
            # In double: the sum, what is added to it, and the copy that is returned.
            result=left.count * right.count * outputs**2 * 24,
            capture=capture_bytes,
            activations=max(p.activation_bytes for p in self._probes),
            device=next(iter(self._watched.parameters.values())).device,
        )

    def _make_report(self) -> Report:
        left, right = self._sides[0], self._sides[-1]
        block = self._budget.block
        rows, columns = min(block, left.count), min(block, right.count)
        choices = plan(
            self._probes[0].contributions,
            (rows, columns),
            self._probes[0].outputs,
            self._symmetric,
            self._settings,
        )
        down, across = -(-left.count // block), -(-right.count // block)
        local = [name for roles in self._watched.active_local().values() for name in roles.values()]
        return Report(
            samples=left.count,
            others=right.count,
            outputs=self._probes[0].outputs,
            symmetric=self._symmetric,
            parameters=sum(p.numel() for p in self._watched.parameters.values()),
            choices=choices,
            fallback=dict(self._watched.fallback),
            local=local,
            block=block,
            blocks=down * (down + 1) // 2 if self._symmetric else down * across,
            expected_bytes=self._budget.expected,
            budget_bytes=self._budget.bytes,
        )


def _add(theta: Tensor, kernel: Tensor, rows: list[int], columns: list[int], twice: bool) -> None:
    """Add a block to Θ [C, N, C, M]; ``twice``: its mirror image too."""
    here, there = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    theta[:, here, :, there] += kernel
    if twice:
        theta[:, there, :, here] += kernel.permute(2, 3, 0, 1)


def _blocks(samples: Samples, size: int) -> list[list[int]]:
    rows = list(range(samples.count))
    return [rows[start : start + size] for start in range(0, samples.count, size)]


def _widest(parameters: dict[str, nn.Parameter]) -> torch.dtype:
    dtypes = [p.dtype for p in parameters.values()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)


@contextmanager
def _bar(progress: bool | None, total: int) -> Iterator[Callable[[], Any]]:
    """A progress bar's step; a step that does nothing where none is wanted, or tqdm is missing."""
    if progress is False or (progress is None and total == 1):
        yield lambda: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        if progress:
            raise ImportError("progress=True needs tqdm: pip install tqdm") from None
        yield lambda: None
        return
    # disable=None: silent where standard error is no terminal.
    with tqdm(
        total=total, desc="NTK", unit="block", disable=None if progress is None else False
    ) as bar:
        yield bar.update
