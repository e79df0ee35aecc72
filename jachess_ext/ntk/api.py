"""`jx.ntk`: the empirical neural tangent kernel, block by block of samples."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._io import is_installed, require
from ..jet.engine.context import FORCE_EAGER
from ..models import unwrapped
from .capture import Coverage, Probe, capture, evaluation_mode
from .completeness import all_samples_gradient, check_kernel, probe
from .contract import Choice, Contribution, LinearForm, Settings, contract, plan
from .outputs import Batch, OutputMap, Outputs, Parameters, Samples, check_model, choose_parameters

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Options(TypedDict, total=False):
        outputs: Outputs
        parameters: Parameters
        memory_budget: int | None
        progress: bool | None
        seed: int | None

    class Alone(Options, total=False):
        method: Literal["auto", "gram", "materialise", "per_sample"]

    class Shared(Options, total=False):
        method: Method
        group: dist.ProcessGroup | None


Method = Literal["auto", "gram", "materialise", "per_sample", "explain"]
T = TypeVar("T")

_FORMS: dict[str, LinearForm] = {"gram": "A", "materialise": "B"}
_REQUESTED = "method='per_sample'"  # the reason of a fallback that the user requested: no warning
_MAX_WORKSPACE = 128 * 2**20
# The default budget: this fraction of free memory, but at most 4 GiB; larger blocks gain little.
_MEMORY_FRACTION, _MAX_BUDGET = 0.5, 4 * 2**30
_ASSUMED_MEMORY = 2 * 2**30  # where free memory cannot be read
_WEIGHT_TOLERANCE = 1e-6
_FULL_BATCH_BYTES = 16 * 2**20  # bytes that a batch of all samples may take, whatever the budget


@dataclass(repr=False)
class Report:
    """Report of how a kernel was computed, or would be computed.

    Attributes:
        samples, others, outputs: the sizes N, M and C of the kernel [N, C, M, C].
        symmetric: whether the kernel is that of a batch with itself; each pair of samples is then
            computed once.
        parameters: number of scalar parameters that the kernel sums over.
        choices: how each parameter, or group of linear layers with the same inputs, is contracted
            in the first pair of blocks.
        fallback: parameter name -> why its gradients are computed one sample at a time.
        local: names of the parameters whose gradients are computed by differentiating their module
            alone, sample by sample.
        block: number of samples in a block.
        blocks: number of pairs of blocks.
        expected_bytes, budget_bytes: estimated memory, and its limit.
        difference: relative difference between the kernel and a plain backward pass; None before
            the kernel is computed.

    Examples:
        >>> report = jx.ntk(torch.nn.Linear(3, 2), torch.randn(5, 3), method="explain")
        >>> report.parameters, report.block, report.form_of("bias")
        (8, 5, 'dense')
    """

    samples: int
    others: int
    outputs: int
    symmetric: bool
    parameters: int
    choices: list[Choice]
    fallback: dict[str, str]
    local: list[str]
    block: int
    blocks: int
    expected_bytes: int
    budget_bytes: int
    difference: float | None = None

    def form_of(self, name: str) -> str:
        """Return how a parameter is contracted: "A", "B", "matches", "tied", "dense" or
        "per_sample" (see `Choice`); "none" if no output depends on the parameter."""
        if name in self.fallback:
            return "per_sample"
        return next((choice.form for choice in self.choices if name in choice.names), "none")

    def __repr__(self) -> str:
        size_text = f"{self.samples} samples" + ("" if self.symmetric else f" × {self.others}")
        lines = [
            f"NTK of {size_text}, {self.outputs} outputs, {self.parameters:,} parameters; "
            f"{self.blocks} pairs of blocks of {self.block}; about "
            f"{self.expected_bytes / 2**20:.0f} MiB of {self.budget_bytes / 2**20:.0f} MiB",
            f"{'form':<8} {'T kept':>6} {'GFLOP A':>9} {'GFLOP B':>9}  parameters",
        ]
        for choice in self.choices:
            if choice.names[0] in self.fallback:
                continue
            cost_text = f"{'':>6} {'':>9} {'':>9}"
            if choice.cost is not None:
                gram, dense = choice.cost.gram_flops / 1e9, choice.cost.materialise_flops / 1e9
                cost_text = f"{choice.positions:>6} {gram:>9.3g} {dense:>9.3g}"
            lines.append(f"{choice.form:<8} {cost_text}  {', '.join(choice.names)}")
        lines += [f"{'per_sample':<36}{name}: {why}" for name, why in self.fallback.items()]
        if self.local:
            lines.append(f"module alone differentiated: {', '.join(self.local)}")
        if self.difference is not None:
            lines.append(
                f"against a plain backward pass: relative difference {self.difference:.1e}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Measurement:
    """The result of `measure_ntk`: a kernel, and the report of how it was computed.

    Attributes:
        theta: the kernel, [N, C, M, C]; None on all but the first rank of a process group.
        report: how the kernel was computed.

    Examples:
        >>> measured = measure_ntk(torch.nn.Linear(3, 2), torch.randn(5, 3))
        >>> measured.report.difference < 1e-6
        True
    """

    theta: Tensor | None
    report: Report

    def __repr__(self) -> str:
        shape_text = "on another rank" if self.theta is None else list(self.theta.shape)
        return f"kernel {shape_text}\n{self.report}"


@overload
def ntk(
    model: nn.Module, batch: Batch, other: Batch | None = ..., **request: Unpack[Alone]
) -> Tensor: ...
@overload  # Any: a Report with method="explain"; None on other ranks than a group's first
def ntk(
    model: nn.Module, batch: Batch, other: Batch | None = ..., **request: Unpack[Shared]
) -> Any: ...
def ntk(
    model: nn.Module,
    batch: Batch,
    other: Batch | None = None,
    *,
    outputs: Outputs = "logits",
    parameters: Parameters = None,
    method: Method = "auto",
    memory_budget: int | None = None,
    progress: bool | None = None,
    seed: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor | Report | None:
    """Compute the empirical NTK, Θ[n, c, m, c'] = ∇_θ f_c(x_n) · ∇_θ f_c'(x_m), exactly.

    This is Eq. 8 of LensLLM.  For each block of samples, one forward pass and C backward passes
    give each layer's inputs and output cotangents, which are contracted layer by layer
    (docs/ntk.md, Forms).  The model is put in evaluation mode for the call (no dropout); its
    parameters and their ``.grad`` are not changed.

    Args:
        model: any torch model; logits are its ``.logits``, its "logits", or the tensor it returns.
        batch: a dict of tensors as a collator yields it (or one tensor): N samples.
        other: the M samples of the kernel's second axis; None: those of ``batch``, with each pair
            computed once.
        outputs: "logits": all C logits; "sum": the pseudo-NTK, the NTK of Σ_c logits_c divided by
            C; "label": the logit of each sample's label; an int k: k random projections, whose
            trace over outputs Σ_j Θ[n, j, m, j] is an unbiased estimate of the trace of the logits'
            kernel, with variance (2/k) Σ_{c≠c'} S_cc'² (S: the kernel's symmetric part over
            outputs); or a callable (model output, batch) -> [n, C].  Token-level logits [n, T, L]
            are taken at the last real token; "label" averages over the labelled tokens (shifted by
            one for causal language models).
        parameters: None: all parameters that require gradients; names; or a predicate
            (name, parameter) -> bool.
        method: "auto" chooses form A or B for each layer by the number of operations and bytes;
            "gram" and "materialise" force A or B; "per_sample": exact gradients one sample at a
            time, slow, for any model; "explain": no kernel, but the `Report` of what would be done.
        memory_budget: bytes that blocks and kernel may take; None: half of the free memory, 4 GiB
            at most.  It changes neither the kernel nor which models are refused.
        progress: show a progress bar over blocks (needs tqdm); None: only on a terminal.
        seed: seed of the random projections.
        group: a process group of torch.distributed (``torch.distributed.group.WORLD``; gloo or
            nccl): pairs of blocks are divided among its ranks.  Every rank makes the call, with the
            same model and batches; the group's first rank gets Θ, the others None.

    Returns:
        Θ, [N, C, M, C], on the model's device; fp64 for fp64 models, else fp32.  No graph.

    Raises:
        TypeError, ValueError: an argument is invalid; a batch has no inputs, or not the labels that
            ``outputs`` needs; no parameter is selected; outputs or gradients are NaN or infinite;
            ``memory_budget`` is too small for one sample.
        RuntimeError: the finished kernel disagrees with a plain backward pass (samples that depend
            on one another); another rank failed.

    Warns:
        RuntimeWarning: parameters used outside covered calls, which get exact per-sample gradients.

    Examples:
        >>> model = torch.nn.Linear(3, 2)
        >>> jx.ntk(model, torch.randn(5, 3)).shape
        torch.Size([5, 2, 5, 2])
    """
    job = Job(
        model,
        batch,
        other,
        outputs=outputs,
        parameters=parameters,
        method=method,
        memory_budget=memory_budget,
        seed=seed,
        group=group,
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
    """Compute the kernel as `ntk` does, and return it with its `Report`.

    Args:
        model, batch, other, progress: as for `ntk`.
        request: further arguments of `ntk`.

    Examples:
        >>> measured = measure_ntk(torch.nn.Linear(3, 2), torch.randn(5, 3))
        >>> measured.theta.shape, measured.report.form_of("bias")
        (torch.Size([5, 2, 5, 2]), 'dense')
    """
    job = Job(model, batch, other, **request)
    return Measurement(job.run(progress), job.report)


class Job:
    """A call of `ntk`: the constructor checks and plans it, `run` computes it."""

    _block: int
    _full_batch: int

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        other: Batch | None,
        *,
        group: dist.ProcessGroup | None = None,
        **arguments: Any,
    ) -> None:
        self._ranks = KernelRanks.of(group)
        with self._ranks.raise_on_all():
            self._prepare(model, batch, other, **arguments)
        self._ranks.require_same(self._coverage.model, [self._left.samples, self._right.samples])
        if self._ranks.count > 1:  # the same block size on all ranks, and work for each of them
            longest = max(self._left.samples.count, self._right.samples.count)
            # The same number of pairs on each of R ranks: 2R − 1 blocks a side give R (2R − 1)
            # pairs of a symmetric kernel; R blocks a side give R² pairs otherwise.
            count = self._ranks.count
            largest = -(-longest // (2 * count - 1 if self._is_symmetric else count))
            self._block = min(*self._ranks.gather(self._block), largest)
        self.report = self._make_report()

    def _prepare(
        self,
        model: nn.Module,
        batch: Batch,
        other: Batch | None,
        outputs: Outputs = "logits",
        parameters: Parameters = None,
        method: str = "auto",
        memory_budget: int | None = None,
        seed: int | None = None,
    ) -> None:
        if method not in get_args(Method):
            raise ValueError(f"method is {method!r}; expected one of {str(get_args(Method))[1:-1]}")
        inner_model = unwrapped(model)
        check_model(inner_model)
        self._is_symmetric = other is None
        sides = [Samples.of(batch)]
        if other is not None:
            sides.append(Samples.of(other, "other"))
        self._outputs = OutputMap(inner_model, outputs, seed)
        for side in sides:
            self._outputs.check(side)
        selected = choose_parameters(inner_model, parameters)
        self._device = next(iter(selected.values())).device
        self._coverage = Coverage(inner_model, selected)
        if method == "per_sample":
            self._coverage.fallback.update(dict.fromkeys(selected, _REQUESTED))
        dtypes = {parameter.dtype.to_real() for parameter in selected.values()}
        self._dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
        with FORCE_EAGER:
            with evaluation_mode(inner_model):
                self._outputs = self._outputs.with_narrow_head(sides)
            probes = [probe(self._coverage, self._outputs, side) for side in sides]
        self._left, self._right = probes[0], probes[-1]
        self._warn_of_fallback()
        workspace = self._plan_blocks(memory_budget)
        wide_dtype = torch.float64 if self._dtype == torch.float64 else torch.float32
        self._settings = Settings(_FORMS.get(method, "auto"), workspace, wide_dtype)

    def run(self, progress: bool | None) -> Tensor | None:
        """Compute Θ, [N, C, M, C]; None on all but the first rank."""
        left, right, out_dim = self._left.samples, self._right.samples, self._left.num_outputs
        # The sum over parameters is kept in double: as many terms as parameters, little memory.
        theta = torch.zeros(
            out_dim, left.count, out_dim, right.count, dtype=torch.float64, device=self._device
        )
        with self._ranks.raise_on_all():
            self._sum_pairs(theta, progress)
        self._ranks.reduce(theta)
        if self._ranks.rank != 0:
            return None
        theta = theta.permute(1, 0, 3, 2)
        if self._is_symmetric:
            theta = (theta + theta.permute(2, 3, 0, 1)) / 2  # remove round-off's asymmetry
        self.report.difference = check_kernel(theta, self._left, self._right, self._dtype)
        return theta.to(self._settings.dtype).contiguous()

    def _sum_pairs(self, theta: Tensor, progress: bool | None) -> None:
        """Add this rank's pairs of blocks to Θ [C, N, C, M]."""
        is_first, row = True, -1
        left: dict[str, Contribution] = {}
        right: dict[str, Contribution] = {}
        lefts, rights = self._blocks(self._left), self._blocks(self._right)
        grid = product(range(len(lefts)), range(len(rights)))
        # A symmetric kernel needs the upper triangle only.
        pairs = self._ranks.slice([(i, j) for i, j in grid if j >= i or not self._is_symmetric])
        with (
            _bar(progress if self._ranks.rank == 0 else False, len(pairs)) as advance,
            FORCE_EAGER,
            torch.no_grad(),
        ):
            for side in [self._left] if self._is_symmetric else [self._left, self._right]:
                if side.samples.count > self._block:
                    all_samples_gradient(self._coverage, self._outputs, side, self._full_batch)
            for i, j in pairs:
                right = {}  # free a block before the next is captured
                if i != row:
                    left, row = {}, i
                    left = capture(self._coverage, self._outputs, self._left, lefts[i])
                is_diagonal = self._is_symmetric and j == i
                right = left
                if not is_diagonal:
                    right = capture(self._coverage, self._outputs, self._right, rights[j])
                choices: list[Choice] = []
                for choice, kernel in contract(left, right, is_diagonal, self._settings):
                    if not torch.isfinite(kernel).all():
                        raise ValueError(
                            f"the kernel of parameter {choice.names[0]!r} is NaN or infinite; "
                            "expected finite gradients (look for a division by zero or an overflow "
                            "in the model, or use a wider dtype)"
                        )
                    _add(theta, kernel, lefts[i], rights[j], self._is_symmetric and not is_diagonal)
                    choices.append(choice)
                if is_first:
                    self.report.choices, is_first = choices, False
                advance()

    def _blocks(self, side: Probe) -> list[list[int]]:
        rows = list(range(side.samples.count))
        return [rows[start : start + self._block] for start in range(0, len(rows), self._block)]

    def _warn_of_fallback(self) -> None:
        reasons = self._coverage.fallback.items()
        reasons_text = "; ".join(f"{name} ({why})" for name, why in reasons if why != _REQUESTED)
        if reasons_text:
            warnings.warn(
                f"jachess_ext.ntk: exact per-sample gradients, one sample at a time, for "
                f"{reasons_text}. The kernel is exact, only slower.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _plan_blocks(self, limit: int | None) -> int:
        """Set the size of the largest blocks that fit into ``limit`` bytes; return the number of
        bytes of the workspace.

        Raises:
            ValueError: the limit is too small for a block of one sample.
        """
        default = min(_MAX_BUDGET, int(_MEMORY_FRACTION * free_memory(self._device)))
        budget = default if limit is None else limit
        workspace = min(_MAX_WORKSPACE, max(1, budget // 8))
        left_count, right_count = self._left.samples.count, self._right.samples.count
        num_outputs = self._left.num_outputs
        num_fallback_scalars = sum(
            _count_scalars(self._coverage.parameters[name]) for name in self._coverage.fallback
        )
        bytes_per_scalar = torch.finfo(self._dtype).bits // 8
        capture_bytes = max(self._left.capture_bytes(), self._right.capture_bytes())
        one_capture = capture_bytes + num_fallback_scalars * bytes_per_scalar * num_outputs
        activation_bytes = max(self._left.activation_bytes, self._right.activation_bytes)
        # Three tensors in double: the sum, the term added to it, and the returned copy.
        result_bytes = left_count * right_count * num_outputs**2 * 24
        single_block = left_count * (one_capture + activation_bytes)
        single_block += 0 if self._is_symmetric else right_count * one_capture
        self._block = largest = max(left_count, right_count)
        self._budget, self._expected = budget, single_block + result_bytes + workspace
        available = budget - result_bytes - workspace
        self._full_batch = max(2, max(available, _FULL_BATCH_BYTES) // max(activation_bytes, 1))
        if single_block > available:
            one_pair = 2 * one_capture + activation_bytes
            self._block = min(available // one_pair, largest) if available > 0 else 0
            if self._block < 1:
                raise ValueError(
                    f"memory_budget is {budget} bytes, too few for one sample: the kernel takes "
                    f"{result_bytes} and a pair of samples {one_pair} bytes; pass at least "
                    f"{int((result_bytes + one_pair) * 8 / 7) + 8}, fewer samples, or shorter ones"
                )
            self._expected = self._block * one_pair + result_bytes + workspace
        return workspace

    def _make_report(self) -> Report:
        left, block = self._left, self._block
        left_count, right_count = left.samples.count, self._right.samples.count
        down, across = -(-left_count // block), -(-right_count // block)
        local_names = [
            name for roles in self._coverage.active_local().values() for name in roles.values()
        ]
        return Report(
            samples=left_count,
            others=right_count,
            outputs=left.num_outputs,
            symmetric=self._is_symmetric,
            parameters=sum(map(_count_scalars, self._coverage.parameters.values())),
            choices=plan(
                left.contributions,
                (min(block, left_count), min(block, right_count)),
                left.num_outputs,
                self._is_symmetric,
                self._settings,
            ),
            fallback=dict(self._coverage.fallback),
            local=local_names,
            block=block,
            blocks=down * (down + 1) // 2 if self._is_symmetric else down * across,
            expected_bytes=self._expected,
            budget_bytes=self._budget,
        )


def _count_scalars(parameter: nn.Parameter) -> int:
    """Return the number of real scalars in a parameter: two for each complex entry."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _add(theta: Tensor, kernel: Tensor, rows: list[int], columns: list[int], mirror: bool) -> None:
    """Add a block to Θ [C, N, C, M], and its transpose across the diagonal if ``mirror``."""
    row_slice, column_slice = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    theta[:, row_slice, :, column_slice] += kernel
    if mirror:
        theta[:, column_slice, :, row_slice] += kernel.permute(2, 3, 0, 1)


def free_memory(device: torch.device) -> int:
    """Return the number of free bytes on the device; 2 GiB if they cannot be determined."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":", 1) for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return _ASSUMED_MEMORY


@contextmanager
def _bar(progress: bool | None, total: int) -> Iterator[Callable[[], object]]:
    """Yield a function that advances a progress bar, or does nothing if no bar is shown.

    Args:
        progress: None: show a bar on a terminal, if tqdm is installed and there are several steps.
    """
    if progress is False or (progress is None and (total == 1 or not is_installed("tqdm"))):
        yield lambda: None
        return
    # None: silent unless standard error is a terminal.
    disable = None if progress is None else False
    tqdm = require("tqdm.auto").tqdm
    with tqdm(total=total, desc="NTK", unit="block", disable=disable) as bar:
        yield bar.update


# ---- several processes ------------------------------------------------------------------------
#
# Every rank holds the model and both batches; pairs of blocks are shared out, and the group's first
# rank receives the sum.  A pair is computed by a single rank, so that the result equals that of one
# process with the same blocks.


@dataclass(frozen=True)
class KernelRanks:
    """Processes among which the pairs of blocks are divided.

    Attributes:
        group: of torch.distributed; None: this process alone.
        rank: this process's rank in the group.
        count: number of processes in the group.
    """

    group: dist.ProcessGroup | None
    rank: int
    count: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> KernelRanks:
        """Return the ranks of ``group``.

        Raises:
            ValueError: this process is not in the group.
        """
        if group is None:
            return cls(None, 0, 1)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group; call ntk on the group's ranks only")
        return cls(group, rank, dist.get_world_size(group))

    def slice(self, work: Sequence[T]) -> Sequence[T]:
        """Return this rank's contiguous slice of the items, as neighbouring pairs share a block."""
        size, remainder = divmod(len(work), self.count)
        start = self.rank * size + min(self.rank, remainder)
        return work[start : start + size + (self.rank < remainder)]

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Return a context that raises an error on every rank if its code raises one on any rank.

        The other ranks would otherwise wait forever.
        """
        try:
            yield
        except Exception as error:
            self.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, message in enumerate(self.gather(None)):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed: {message}")

    def require_same(self, model: nn.Module, sides: Sequence[Samples]) -> None:
        """Raise ValueError where the ranks' batches or weights differ."""
        if self.count == 1:
            return
        total = sum(float(p.detach().abs().sum(dtype=torch.float64)) for p in model.parameters())
        batches, weights = zip(*self.gather((_checksum(sides), total)), strict=True)
        if len(set(batches)) > 1:
            raise ValueError(
                "the ranks have different batches; expected the same batch and other on every "
                "rank (ntk itself shares out the work)"
            )
        if max(weights) - min(weights) > _WEIGHT_TOLERANCE * max(map(abs, weights)):
            raise ValueError("the ranks have different weights; expected the same model on all")

    def reduce(self, values: Tensor) -> None:
        """Sum values over ranks, in place; only the first rank's values are defined afterwards."""
        if self.count > 1:
            dist.reduce(values, group=self.group, group_dst=0)

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, in the order of ranks."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values


def _checksum(sides: Sequence[Samples]) -> int:
    """Return one checksum over all tensors of the batches."""
    checksum = 0
    for side in sides:
        values = {"": side.batch} if isinstance(side.batch, Tensor) else side.batch
        for name in sorted(values):
            value = values[name]
            if isinstance(value, Tensor):
                plain = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
                checksum = zlib.crc32(plain.numpy().tobytes(), zlib.crc32(name.encode(), checksum))
                checksum = zlib.crc32(str(list(value.shape)).encode(), checksum)
    return checksum
