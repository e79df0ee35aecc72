"""`whole_folder`: a folder is there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from jachess_ext.evaluation.files import whole_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_there_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "models" / "a"
    with whole_folder(target) as folder:
        (folder / "one").write_text("1")
        assert not target.exists() and folder.parent == target.parent
    assert names(target) == ["one"] and names(target.parent) == ["a"]
    assert target.stat().st_mode == target.parent.stat().st_mode
    with whole_folder(target) as folder:
        (folder / "two").write_text("2")
    assert names(target) == ["two"] and names(target.parent) == ["a"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_one(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "a"
    target.mkdir()
    (target / "old").touch()

    def broken() -> None:
        with whole_folder(target) as folder:
            (folder / "new").touch()
            raise error

    with pytest.raises(error):
        broken()
    assert names(target) == ["old"] and names(tmp_path) == ["a"]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    target = tmp_path / "a"
    killed = whole_folder(target)
    (killed.__enter__() / "half").touch()
    with whole_folder(target) as folder:
        (folder / "one").touch()
    assert names(target) == ["one"] and names(tmp_path) == ["a"]
