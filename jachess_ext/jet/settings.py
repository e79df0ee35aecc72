"""Switches of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OPERATORS: ContextVar[bool] = ContextVar("jachess_ext.operators", default=True)


def operators_enabled() -> bool:
    """Whether rules use the compiled operators of `jachess_ext.ops` where there is one."""
    return _OPERATORS.get()


@contextmanager
def composed_rules() -> Iterator[None]:
    """Within the context every rule is composed of torch functions; for checks and benchmarks."""
    token = _OPERATORS.set(False)
    try:
        yield
    finally:
        _OPERATORS.reset(token)
