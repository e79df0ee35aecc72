"""What a kernel computation did, or would do: for people to read."""

from __future__ import annotations

from dataclasses import dataclass, field

from .contraction import Choice


@dataclass
class Report:
    """How a kernel was, or would be, computed.

    Attributes:
        samples, others, outputs: N, M and C.
        symmetric: one side only; each pair computed once.
        parameters: how many numbers the kernel sums over.
        choices: how each parameter, or group of linear layers with the same inputs, is contracted
            (those of the first pair of blocks).
        fallback: parameter -> why it gets exact gradients, sample by sample.
        local: parameters whose module alone is differentiated sample by sample.
        block: samples a block; ``blocks``: pairs of blocks.
        expected_bytes, budget_bytes: memory, as estimated, and the limit.
        difference: of the completeness check, relative; None before the kernel is there.
        sketch_error: estimate of ‖Θ̂ − Θ‖ / ‖Θ̂‖ (Frobenius) where layers were sketched, else None.
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
    difference: float | None = field(default=None)
    sketch_error: float | None = field(default=None)

    def form_of(self, name: str) -> str:
        """The form of one parameter: "A", "B", "C", "matches", "tied", "dense" or "per_sample";
        "none" where no output depends on it."""
        if name in self.fallback:
            return "per_sample"
        return next((choice.form for choice in self.choices if name in choice.names), "none")

    def __str__(self) -> str:
        sides = f"{self.samples} samples" + ("" if self.symmetric else f" × {self.others}")
        lines = [
            f"NTK of {sides}, {self.outputs} outputs, {self.parameters:,} parameters; "
            f"{self.blocks} pairs of blocks of {self.block}; about "
            f"{self.expected_bytes / 2**20:.0f} MiB of {self.budget_bytes / 2**20:.0f} MiB",
            f"{'form':<8} {'T kept':>6} {'GFLOP A':>9} {'GFLOP B':>9}  parameters",
        ]
        lines += [_line(choice) for choice in self.choices if choice.names[0] not in self.fallback]
        lines += [f"{'per_sample':<36}{name}: {why}" for name, why in self.fallback.items()]
        if self.local:
            lines.append(f"module alone differentiated: {', '.join(self.local)}")
        if self.sketch_error is not None:
            lines.append(f"sketched: relative error about {self.sketch_error:.1e}")
        if self.difference is not None:
            lines.append(
                f"against a plain backward pass: relative difference {self.difference:.1e}"
            )
        return "\n".join(lines)


def _line(choice: Choice) -> str:
    names = ", ".join(choice.names)
    if choice.cost is None:
        return f"{choice.form:<8} {'':>6} {'':>9} {'':>9}  {names}"
    gram, dense = choice.cost.gram_flops / 1e9, choice.cost.materialise_flops / 1e9
    return f"{choice.form:<8} {choice.positions:>6} {gram:>9.3g} {dense:>9.3g}  {names}"
