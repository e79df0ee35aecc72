"""Switches of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OPERATORS: ContextVar[bool] = ContextVar("jachess_ext.operators", default=True)


def operators_enabled() -> bool:
    """Whether a pass that begins now uses the compiled operators of `jachess_ext.ops`.

    Asked once a pass (`JetLayout.of_a_new_run`); what was begun goes on as it began, also where
    backward runs a checkpoint again, after the context or on another thread.
    """
    return _OPERATORS.get()


@contextmanager
def composed_rules() -> Iterator[None]:
    """In passes that begin within the context every rule is composed of torch functions, until
    their backward is done; for checks and benchmarks."""
    token = _OPERATORS.set(False)
    try:
        yield
    finally:
        _OPERATORS.reset(token)
