"""One thread: the tensors are so small that waking a second one costs more than the work."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from jachess_ext.differentiable import attention as twice


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def warned_anew() -> Iterator[None]:
    """No attention may go to torch's math unnoticed, and each test sees the warnings anew."""
    twice._warned.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="jx.differentiable")
        yield
