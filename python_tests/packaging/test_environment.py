"""The PEP 517 backend builds against the target environment's torch and fetches none beside it."""

import shutil
import sys
from pathlib import Path

import pytest
from jachess_build import backend, environment, prepare


def install_fake_torch(directory: Path, version: str) -> None:
    """Install metadata of a torch that cannot be imported."""
    info = directory / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An isolated build: torch cannot be imported; the target's site-packages is returned."""
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    monkeypatch.setattr(environment, "candidate_site_packages", lambda: [tmp_path / "a", tmp_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_target_torch_is_found_and_put_last(isolated: Path) -> None:
    install_fake_torch(isolated, "2.13.0+cpu")
    assert environment.expose_torch()
    assert sys.path[-1] == str(isolated)
    assert not any("torch" in text for text in backend.get_requires_for_build_wheel())


def test_torch_is_fetched_where_there_is_none(isolated: Path) -> None:
    assert not environment.expose_torch()
    assert "torch>=2.10" in backend.get_requires_for_build_wheel()
    assert backend.get_requires_for_build_sdist() == []


def test_an_old_torch_is_refused(isolated: Path) -> None:
    install_fake_torch(isolated, "2.9.1")
    with pytest.raises(SystemExit, match=r"torch 2\.9; expected 2\.10"):
        environment.expose_torch()


def test_named_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JACHESS_TORCH_PATH", str(tmp_path))
    assert environment.candidate_site_packages()[0] == tmp_path


def test_an_incomplete_venv_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what was written after everything was installed counts, and only for this pyproject."""
    monkeypatch.setattr(prepare, "VENV", tmp_path)
    monkeypatch.setattr(prepare, "PYTHON", Path(sys.executable))
    assert not prepare.complete("[demo]")
    (tmp_path / "complete[test].toml").write_text("of another time")
    assert not prepare.complete("[demo]")
    shutil.copy(prepare.ROOT / "pyproject.toml", tmp_path / "complete[test].toml")
    assert prepare.complete("[demo]") and prepare.complete("[test]")
    assert not prepare.complete("[docs]")
    monkeypatch.setattr(prepare, "PYTHON", tmp_path / "gone")
    assert not prepare.complete("[test]")


def test_what_a_python_lacks() -> None:
    assert prepare.lacking(sys.executable, ("pytest", "no_such_module")) == ["no_such_module"]
    for broken in ("/bin/false", "/no/such/python"):
        assert prepare.lacking(broken, ("pytest",)) == ["pytest", "setuptools", "numpy", "torch"]


def test_goals_need_what_their_extra_brings() -> None:
    """The extras of the Makefile's goals exist in pyproject.toml."""
    text = (prepare.ROOT / "pyproject.toml").read_text()
    for extra, _ in prepare.NEEDS.values():
        assert not extra or f"\n{extra.strip('[]')} = [" in text
