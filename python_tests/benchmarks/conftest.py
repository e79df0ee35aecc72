"""One thread a test: these models are tiny, and threads that wait for each other cost more."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """Put back torch's thread count, which scripts set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
