"""Tiny tensors gain nothing from threads, and lose much where cores are shared."""

from collections.abc import Iterator

import pytest
import torch

from .runs import equal_directions  # noqa: F401  a fixture


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
