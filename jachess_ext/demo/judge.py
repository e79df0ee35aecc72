"""Under which conditions the demo's models are judged."""

from __future__ import annotations

from ..compare.settings import Conditions

CORRUPTION = (0.1, 0.2)
"""Shares of tokens replaced by the unknown token."""

DELTAS = (0.0, 0.5, 1.0, 2.0)
"""Sizes of the embedding noise, in units of the base model's root mean square embedding entry."""

HEADLINE_DELTA = 1.0
"""The δ whose score stands in the table."""

CONDITIONS = Conditions(corruption=CORRUPTION, deltas=DELTAS)
"""What the demo passes to `compare.judge.judge`."""
