"""Two tiny models, rows to train and to judge on, and what `make_plan` is given of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from python_tests.lab.live.tiny import save_model, write_rows
from python_tests.threads import one_thread  # noqa: F401  a fixture

Settings = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of the two models."""
    folder = tmp_path_factory.mktemp("models")
    return str(save_model(folder / "narrow", 8, 1)), str(save_model(folder / "wide", 16, 2))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """256 rows to train on and 40 to judge on."""
    folder = tmp_path_factory.mktemp("rows")
    return write_rows(folder / "train.csv", 256, 0), write_rows(folder / "dev.csv", 40, 1)


@pytest.fixture
def settings(models: tuple[str, str], files: tuple[Path, Path]) -> Settings:
    """Arguments of `make_plan` for the two models, one epoch; given ones replace them."""
    from jachess_ext.lab.live import LiveSettings
    from jachess_ext.lab.workbench.settings import Recipe

    def arguments(**given: Any) -> dict[str, Any]:
        train, dev = given.pop("train", files[0]), given.pop("dev", files[1])
        data = {"models": given.pop("models", models), "task": f"{train}:{dev}"}
        recipe = Recipe(epochs=1.0, batch_size=2, lr=5e-3, max_length=16)
        how = LiveSettings(**{"budget": 1 / 4, "recipe": recipe} | given)
        return data | {"settings": how}

    return arguments
