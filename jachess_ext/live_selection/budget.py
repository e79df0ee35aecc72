"""How much a live selection may use: a share of the data, operations, or minutes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from ..tasks.examples import DataError

_NUMBER = r"\d*\.?\d+(?:[eE][+-]?\d+)?"
_SHARE = re.compile(rf"({_NUMBER})(?:/({_NUMBER}))?(%?)")
_AMOUNT = re.compile(rf"({_NUMBER}) ?(flops|s|min|h)", re.IGNORECASE)
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_EXPECTED = "expected a share of the data such as 1/8, or an amount such as 3e15flops or 20min"


@dataclass(frozen=True)
class Budget:
    """A limit.

    Attributes:
        text: as it was given.
        unit: "share": the largest subset as a share of the training rows; "flops": of all runs
            together, training and probe; "seconds": of all runs together, as their clocks add up.
        amount: in that unit, above 0.
    """

    text: str
    unit: Literal["share", "flops", "seconds"]
    amount: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """From ``1/8``, ``0.125``, ``12.5%``, ``3e15flops``, ``90s``, ``20min`` or ``2h``.

        Raises:
            DataError: none of these, or not above 0, or a share above 1 (more than the data).
        """
        text = text.strip()
        if found := _AMOUNT.fullmatch(text):
            unit = found[2].lower()
            amount = float(found[1]) * _SECONDS.get(unit, 1.0)
            budget = cls(text, "flops" if unit == "flops" else "seconds", amount)
        elif found := _SHARE.fullmatch(text):
            below = float(found[2] or 1) * (100 if found[3] else 1)
            amount = float(found[1]) / below if below else math.inf
            budget = cls(text, "share", amount)
        else:
            raise DataError(f"the budget {text!r} is not understood; {_EXPECTED}")
        if not 0 < budget.amount < math.inf:
            raise DataError(f"the budget {text!r} is not a positive number; {_EXPECTED}")
        if budget.unit == "share" and budget.amount > 1:
            raise DataError(
                f"the budget {text!r} is above the data: a number without a unit is a share of the "
                "training rows, 1 at most"
            )
        return budget
