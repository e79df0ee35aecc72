"""Options and fixtures of the micro-benchmarks (bench_micro.py), timed by pytest-benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.common import DTYPES, Step, synchronize

Timed = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("jachess")
    group.addoption("--device", default="cpu", help="cpu or cuda")
    group.addoption("--dtype", default="float32", choices=sorted(DTYPES))
    group.addoption("--threads", type=int, default=2, help="CPU threads; default 2")
    group.addoption("--quick", action="store_true", help="tiny sizes: does everything run?")


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("quick")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """device and dtype, as torch's factories take them."""
    device = torch.device(request.config.getoption("device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.fail("--device cuda was asked for, but torch sees no GPU; use --device cpu")
    return {"device": device, "dtype": DTYPES[request.config.getoption("dtype")]}


@pytest.fixture(autouse=True)
def fixed_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads as asked for, and the same random numbers for each program of a group."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("threads"))
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def timed(benchmark: Any, place: dict[str, Any]) -> Timed:
    """``timed(step, group, once=False, **about)``: times the step and returns what it returned.

    ``once``: a single round without a warm-up, for what takes seconds.  ``about`` (operations,
    bytes, ...) goes into the JSON beside the times; ``dtype`` is --dtype where it is not given.
    """

    def time(step: Step, group: str, once: bool = False, **about: Any) -> Any:
        about = {"dtype": str(place["dtype"]).removeprefix("torch.")} | about

        def run() -> Any:
            result = step()
            synchronize(place["device"])
            return result

        benchmark.group = f"{group}, {about['dtype']}"
        benchmark.extra_info.update(about, device=str(place["device"]), torch=torch.__version__)
        if once:
            return benchmark.pedantic(run, rounds=1)
        run()
        return benchmark(run)

    return time
