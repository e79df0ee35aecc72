"""Keeping ``torch.compile`` out of the engine where the engine runs eagerly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
_REASON = "the jet engine runs eagerly: dynamo cannot trace it (docs/compile.md)"


def without_dynamo(fn: F) -> F:
    """``fn`` with ``torch.compile`` switched off while it runs.

    Dynamo cannot follow a `JetTensor`; left on, it would try at every frame of a model that the
    user compiled, break off, and leave a hundred fragments behind.  A compiled model called by
    ``fn`` runs its own Python instead.  Costs nothing until somebody imports torch._dynamo (which
    takes seconds, so this file does not).
    """
    switched_off: F | None = None

    @functools.wraps(fn)
    def run(*args: Any, **named: Any) -> Any:
        nonlocal switched_off
        if switched_off is None:
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **named)
            switched_off = _switched_off(fn)
        return switched_off(*args, **named)

    return cast(F, run)


def _switched_off(fn: F) -> F:
    import torch._dynamo

    def run(*args: Any, **named: Any) -> Any:
        # The stance reaches what `disable` does not: models that were compiled on their own.
        with torch.compiler.set_stance("force_eager"):
            return fn(*args, **named)

    return torch._dynamo.disable(run, reason=_REASON)
