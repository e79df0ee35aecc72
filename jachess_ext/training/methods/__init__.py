# ruff: noqa: F401  the names are imported from here, and the import registers each method
"""Every fine-tuning method, by name in `METHODS`.

To add a method, write a class ``class Mine(Method, name="mine")`` in a file that is imported
here, and a section of docs/methods.md, which shows how.
"""

from .base import (
    METHODS,
    LabelSmoothing,
    Loss,
    Method,
    Penalised,
    Plain,
    WithModes,
    logits_of,
    parse_method,
)
from .jachess import CrossHolder, DualSchedule, JacHess, Jacobian, Published
from .noise import (
    R3F,
    CorruptAugment,
    CorruptConsistency,
    Recommended,
    row_mean,
    token_noise,
)
from .weights import L2, SAM, TAPT, GradientNorm, half_squares, with_lora
