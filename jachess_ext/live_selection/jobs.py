"""One fine-tuning of a live selection, and everything its result depends on."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cached_property

from ..experiment.grid import Recipe
from ..tasks.examples import Examples, Task
from ..tasks.spec import digest


@dataclass(frozen=True)
class SubsetJob:
    """A model to fine-tune on a subset.

    Attributes:
        model: path or hub id.
        version: changes with the model's files.
        task: its training rows are the subset (none: the model is only judged), its dev rows the
            ones to judge on; unlabelled rows play no part.
        probe: the rows Θ is measured on; none: no Θ.
        features: the rows whose frozen features are scored; none but at size 0.
        seed: of head, order and dropout.
        recipe: how to train.
    """

    model: str
    version: str
    task: Task
    probe: Examples
    features: Examples
    seed: int
    recipe: Recipe

    @property
    def size(self) -> int:
        """D."""
        return len(self.task.train)

    @cached_property
    def name(self) -> str:
        """Readable, and with a digest of all the run depends on; serves as a file name."""
        parts = [[p.texts, p.pairs, list(p.labels)] for p in (self.probe, self.features)]
        content = [self.model, self.version, digest(self.task), parts, self.seed]
        text = json.dumps([*content, asdict(self.recipe)])
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", self.model.rstrip("/"))[-40:].strip("-.")
        return f"{words}-{self.size}-s{self.seed}-{key}"
