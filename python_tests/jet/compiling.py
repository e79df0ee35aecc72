"""What tests of `torch.compile` share, without an import of torch._dynamo, which takes seconds."""

from collections.abc import Iterator

import pytest
import torch

from jachess_ext.torch_private import release

NEEDS_MODULES_IN_GRAPHS = pytest.mark.skipif(
    release(torch.__version__) < (2, 12),
    reason=f"torch {torch.__version__} takes no nn.Module into a graph; see test_compile_breaks",
)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget the graphs of other tests, and this one's afterwards."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
