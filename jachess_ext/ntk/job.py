"""One kernel: planned when the job is made, computed block by block when it is run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..smoothness.model_pass import unwrapped
from .budget import Budget, plan_blocks
from .capture import Watched, capture, evaluating, learn_layout
from .contraction import Choice, LinearForm, Settings, contract, plan
from .contributions import Contribution, Factors
from .outputs import OutputMap, Outputs
from .probe import Probe, check_kernel, probe
from .ranks import KernelRanks
from .recorder import Layout
from .report import Report
from .samples import Batch, Samples
from .selection import Chosen, choose_parameters
from .sketch import Sketch

_METHODS = ("auto", "gram", "materialise", "sketch", "per_sample", "explain")
_FORMS: dict[str, LinearForm] = {"gram": "A", "materialise": "B"}
_ASKED = "method='per_sample'"
_SKETCH_SEED = 0x534B


class Job:
    """One call of `ntk`, whose arguments it takes."""

    _budget: Budget
    _settings: Settings

    def __init__(
        self, model: nn.Module, batch: Batch, other: Batch | None, group: Any = None, **how: Any
    ) -> None:
        self._ranks = KernelRanks.of(group)
        with self._ranks.failing_together():
            self._prepare(model, batch, other, **how)
        self._ranks.require_same(self._watched.model, self._sides)
        self._budget = self._agreed(self._budget)
        self.report = self._make_report()
        if self._settings.sketch is not None:
            self._settings = replace(self._settings, sketch=self._of_planned(self._settings.sketch))

    def _prepare(
        self,
        model: nn.Module,
        batch: Batch,
        other: Batch | None,
        outputs: Outputs = "logits",
        parameters: Chosen = None,
        method: str = "auto",
        memory_budget: int | None = None,
        seed: int | None = None,
        sketch_size: int = 64,
    ) -> None:
        if method not in _METHODS:
            raise ValueError(f"method is {method!r}; expected one of {str(_METHODS)[1:-1]}")
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
        dtypes = {parameter.dtype for parameter in chosen.values()}
        self._dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
        self._layouts: list[Layout] = []
        self._probes: list[Probe] = []
        with torch.compiler.set_stance("force_eager"):
            with evaluating(inner):
                self._outputs = self._outputs.narrowed(self._sides)
            for side in self._sides:
                self._layouts.append(learn_layout(self._watched, self._outputs, side))
                self._probes.append(probe(self._watched, self._outputs, self._layouts[-1], side))
        self._say_fallback()
        self._budget = self._plan_budget(memory_budget)
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        sketch = None
        if method == "sketch":
            sketch = Sketch(sketch_size, _SKETCH_SEED if seed is None else seed)
        form = _FORMS.get(method, "auto")
        self._settings = Settings(form, self._budget.workspace, wide, sketch)

    def run(self, progress: bool | None) -> Tensor | None:
        """Θ, [N, C, M, C]; None on all but the first rank."""
        left, right = self._sides[0], self._sides[-1]
        outputs = self._probes[0].outputs
        device = next(iter(self._watched.parameters.values())).device
        # The sum over parameters is kept in double: as many terms as parameters, little memory.
        theta = torch.zeros(
            outputs, left.count, outputs, right.count, dtype=torch.float64, device=device
        )
        with self._ranks.failing_together():
            squared_error = self._sum_pairs(theta, progress)
        self._ranks.total(theta)
        squared_error = self._ranks.total_number(squared_error)
        if not self._ranks.is_first:
            return None
        theta = theta.permute(1, 0, 3, 2)
        if self._symmetric:
            theta = (theta + theta.permute(2, 3, 0, 1)) / 2  # round-off leaves the last bits apart
        sketch = self._settings.sketch
        left_probe, right_probe = self._probes[0], self._probes[-1]
        self.report.difference = check_kernel(theta, left_probe, right_probe, self._dtype, sketch)
        if sketch is not None:
            norm = float(theta.norm())
            self.report.sketch_error = squared_error**0.5 / norm if norm else 0.0
        return theta.to(self._settings.dtype).contiguous()

    def _sum_pairs(self, theta: Tensor, progress: bool | None) -> float:
        """Add this rank's pairs of blocks to Θ [C, N, C, M]; the squared error of sketches."""
        squared_error, first, row = 0.0, True, -1
        mine: dict[str, Contribution] = {}
        theirs: dict[str, Contribution] = {}
        lefts, rights = (_blocks(self._sides[side], self._budget.block) for side in (0, -1))
        # Of a symmetric kernel the upper triangle.
        every = product(range(len(lefts)), range(len(rights)))
        pairs = self._ranks.share([(i, j) for i, j in every if j >= i or not self._symmetric])
        shown = progress if self._ranks.is_first else False
        with (
            _bar(shown, len(pairs)) as advance,
            torch.compiler.set_stance("force_eager"),
            torch.no_grad(),
        ):
            for i, j in pairs:
                theirs = {}  # let go of a block before the next is there
                if i != row:
                    mine, row = {}, i
                    mine = self._capture(0, lefts[i])
                same = self._symmetric and j == i
                mirrored = self._symmetric and not same
                theirs = mine if same else self._capture(-1, rights[j])
                choices: list[Choice] = []
                for choice, kernel in contract(mine, theirs, same, self._settings):
                    _check_finite(choice, kernel)
                    _add(theta, kernel, lefts[i], rights[j], mirrored)
                    squared_error += choice.squared_error * (2 if mirrored else 1)
                    choices.append(choice)
                if first:
                    self.report.choices, first = choices, False
                advance()
        return squared_error

    def _capture(self, side: int, rows: list[int]) -> dict[str, Contribution]:
        layout, samples = self._layouts[side], self._sides[side]
        with torch.enable_grad():
            return capture(self._watched, self._outputs, layout, samples, rows)

    def _say_fallback(self) -> None:
        found = self._watched.fallback.items()
        lines = "; ".join(f"{name} ({why})" for name, why in found if why != _ASKED)
        if lines:
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

    def _agreed(self, budget: Budget) -> Budget:
        """Blocks that all ranks agree on and that give each its share."""
        if self._ranks.count == 1:
            return budget
        longest = max(side.count for side in self._sides)
        most = -(-longest // self._ranks.least_blocks(self._symmetric))
        return replace(budget, block=min(self._ranks.least(budget.block), most))

    def _of_planned(self, sketch: Sketch) -> Sketch:
        """The sketch of the parameters that are planned to be sketched, in every block alike."""
        planned = [n for choice in self.report.choices if choice.form == "C" for n in choice.names]
        for side in self._probes:
            planned = [n for n in planned if isinstance(side.contributions.get(n), Factors)]
        return replace(sketch, names=frozenset(planned))

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


def _check_finite(choice: Choice, kernel: Tensor) -> None:
    if not torch.isfinite(kernel).all():
        raise ValueError(
            f"the kernel of parameter {choice.names[0]!r} is NaN or infinite; expected finite "
            "gradients (look for a division by zero or an overflow in the model, or use a "
            "wider dtype)"
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


@contextmanager
def _bar(progress: bool | None, total: int) -> Iterator[Callable[[], Any]]:
    """A progress bar's step; a step that does nothing where none is wanted, or tqdm is missing.

    Args:
        progress: None: where a terminal looks on and there is more than one step.
    """
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
    ) as shown:
        yield shown.update
