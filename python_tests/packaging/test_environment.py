"""The PEP 517 backend builds against the target environment's torch and fetches none beside it."""

import json
import sys
from pathlib import Path

import pytest
from jachess_build import backend, environment, prepare


def install_fake_torch(directory: Path, version: str) -> None:
    """A torch that metadata can see but nothing can use."""
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
    """Only a stamp written after everything was installed counts, and only for this pyproject."""
    stamp = tmp_path / "stamp.json"
    monkeypatch.setattr(prepare, "STAMP", stamp)
    assert prepare.completed_extras() == []
    stamp.write_text("{half")
    assert prepare.completed_extras() == []
    stamp.write_text(json.dumps({"fingerprint": "of another time", "extras": ["[test]"]}))
    assert prepare.completed_extras() == []
    prepare.write_atomically(
        stamp, json.dumps({"fingerprint": prepare.fingerprint(), "extras": ["[test]"]})
    )
    assert prepare.completed_extras() == ["[test]"]
    assert list(tmp_path.iterdir()) == [stamp]


def test_probe_names_what_a_python_lacks() -> None:
    torch, missing = prepare.probe(sys.executable, ("pytest", "no_such_module"))
    assert torch is not None
    assert torch >= [2, 10]
    assert missing == ["no_such_module"]
    assert prepare.probe("/bin/false", ("pytest",)) == (None, ["pytest"])


def test_goals_need_what_their_extra_brings() -> None:
    """The extras of the Makefile's goals exist in pyproject.toml."""
    text = (prepare.ROOT / "pyproject.toml").read_text()
    for extra, _ in prepare.NEEDS.values():
        assert not extra or f"\n{extra.strip('[]')} = [" in text
