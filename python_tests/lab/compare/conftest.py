"""A tiny model and sentences, and grids of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jachess_ext._io import from_json
from jachess_ext.lab.compare.settings import Grid
from python_tests.lab.demo.conftest import sentiment, tiny_model  # noqa: F401  fixtures
from python_tests.threads import one_thread  # noqa: F401  a fixture

RECIPE = {"epochs": 1.0, "batch_size": 8, "lr": 5e-3, "max_length": 16}
CONDITIONS = {"corruption": (0.2,), "deltas": (0.0, 1.0), "sequences": 4}
MakeGrid = Callable[..., Grid]


@pytest.fixture
def grid(tiny_model: Path, sentiment: Path) -> MakeGrid:  # noqa: F811
    """Grids of the tiny model on the sentences, one epoch; settings replace the defaults."""
    task = f"{sentiment}:{sentiment}"

    def make(**settings: Any) -> Grid:
        defaults: dict[str, Any] = {
            "model": str(tiny_model),
            "tasks": (f"a={task}",),
            "methods": ("none", "jachess-train"),
            "seeds": (0, 1),
            "unlabelled_size": 16,
            "recipe": RECIPE,
            "conditions": CONDITIONS,
        }
        made: Grid = from_json(defaults | settings, Grid, "the grid")
        return made

    return make
