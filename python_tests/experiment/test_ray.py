"""A grid on a Ray cluster of this machine gives the records it gives in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jachess_ext._io import DataError
from jachess_ext.compare.finetune import run_grid

from .conftest import MakeGrid
from .test_run import timeless

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'jachess-ext[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[None]:
    yield
    ray.shutdown()


def test_a_grid_on_a_cluster_is_that_of_one_process(
    grid: MakeGrid, tmp_path: Path, cluster: None
) -> None:
    made = grid(
        methods=("none", "jachess-train"),
        tuning={"strength": (0.01, 0.1), "validation": 0.25, "seeds": (7,)},
    )
    there, here = run_grid(made, tmp_path / "ray", ray="local"), run_grid(made, tmp_path / "here")
    assert timeless(there) == timeless(here)


def test_no_cluster_is_a_sentence(grid: MakeGrid, tmp_path: Path, cluster: None) -> None:
    with pytest.raises(DataError, match="no Ray cluster answers at 'auto'"):
        run_grid(grid(), tmp_path / "out", ray="auto")
    assert not (tmp_path / "out").exists()
