"""Compiles the launches of every kernel with their real arguments for a GPU that is not here:
`python -m python_tests.triton.compiled_job ARCHITECTURE`, without Triton's interpreter."""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from jachess_ext.ops import attention_triton
from jachess_ext.ops import attention_triton_kernels as kernels
from jachess_ext.ops.attention_reference import Call, Settings


class AbsentGpu(DriverBase):
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> None:
        return None

    @staticmethod
    def is_active() -> bool:
        return True


class Compiling:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_it(*arguments: Any, **options: Any) -> None:
            self.kernel.warmup(*arguments, grid=grid, **options)
            print(self.kernel.fn.__name__)

        return compile_it


def main(arch: int) -> None:
    driver.set_active(AbsentGpu(arch))
    described = arch in (90, 100)
    attention_triton._has_descriptors = lambda x: described  # type: ignore[assignment]
    for name in ("forward", "query_gradient", "key_gradient", "score_jets"):
        setattr(kernels, name, Compiling(getattr(kernels, name)))
    plain = Settings(1, 0.1, False, -1, -1, 0.0, 0.0, 0)
    everything = Settings(1, 0.1, True, 9, -1, 2.0, 0.1, 0)
    # one head of one entry: Triton takes a size of 1 for a constant
    for size, (batch, heads, key_heads), settings in (
        (64, (1, 1, 1), plain),
        (128 if described else 40, (2, 4, 2), everything),
    ):
        shapes = [(heads, 64, size), (key_heads, 64, size), (key_heads, 64, size)]
        jets = [torch.ones(2, batch, *shape, dtype=torch.bfloat16) for shape in shapes]
        mask = torch.ones(batch, 1, 64, 64, dtype=torch.bool) if settings.dropout_p else None
        call = Call(jets[0], jets[1], jets[2], mask, torch.tensor(5), settings)
        y, logs = attention_triton.forward(call)
        attention_triton.backward(torch.ones_like(y), call, y, logs)
        if size <= 64:
            pair = Call(
                *(x.repeat(2, 1, 1, 1, 1) for x in jets), mask, call.seed, settings._replace(q=2)
            )
            attention_triton.forward(pair)


if __name__ == "__main__":
    main(int(sys.argv[1]))
