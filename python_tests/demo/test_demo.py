"""`jachess demo` as a user meets it: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import socket
from functools import cache, partial
from pathlib import Path

import joblib
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from jachess_ext import demo
from jachess_ext.cli import main
from python_tests.threads import one_thread  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("one_thread")


def test_attention_in_torchs_words_and_in_numbers() -> None:
    texts, table = demo.attention_table(256)
    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(NotImplementedError) as refusal:
        torch.func.jvp(scaled_dot_product_attention, (q, q, q), (q, q, q))
    assert str(refusal.value).splitlines()[0] in texts[0]
    assert "hvp" in texts[1] and "is not implemented" in texts[1]
    assert [row[0] for row in table.rows] == ["output's tangent", "Hessian-vector product"]
    for _, error, _, memory in table.rows:
        assert float(error) < 1e-13
        theirs, ours = (float(part.split()[0]) for part in memory.split(" → "))
        assert ours < 0.7 * theirs


def test_it_says_where_torch_refuses_no_longer() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        texts, _ = demo.attention_table(256)
    assert all("no longer refuses" in text for text in texts)


def test_peak_is_the_allocators(capfd: pytest.CaptureFixture[str]) -> None:
    def call(x: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        both = torch.empty(2**20), torch.empty(2**20)  # 4 MiB each
        del both
        return (torch.empty(2**18),)

    assert demo._peak_mebibytes(call, (), ()) == 8
    torch.ones(1)
    assert capfd.readouterr().err == ""
    assert demo._peak_mebibytes(call, (), ()) == 8, "stderr is what it was"


def test_from_start_to_end_without_a_network(
    tiny_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_network(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(joblib, "cpu_count", lambda: 1)
    monkeypatch.setattr(demo, "ASSETS", tiny_model)
    monkeypatch.setattr(demo, "METHODS", ("none", "jachess-train"))
    monkeypatch.setattr(demo, "attention_table", cache(partial(demo.attention_table, 256)))
    monkeypatch.setattr(demo, "docstring_task", cache(demo.docstring_task))
    out = tmp_path / "out"
    records = []
    for folder in (out, out, tmp_path / "other"):
        assert main(["demo", "--quick", "--out", str(folder)]) == 0
        lines = (folder / "results.jsonl").read_text().splitlines()
        records.append([json.loads(line) for line in lines])
    assert [(r["method"], r["seed"]) for r in records[0]] == [("none", 0), ("jachess-train", 0)]
    assert records[0][0]["rows"] == [240, 120, 120] and records[0][0]["score"] is not None
    assert records[1] == records[0], "finished runs are not repeated"
    assert records[2][0].pop("seconds") != records[0][0].pop("seconds")
    assert records[2][0] == records[0][0], "the same on every call"
    shown = capfd.readouterr().out.partition("In all")[0]
    page = (out / "report.html").read_text()
    parts = (
        "jvp through F",
        "Hessian-vector",
        " s\n",
        "Reading docstrings",
        "One seed",
        "times plain",
    )
    places = [shown.index(part) for part in parts]
    assert places == sorted(places), "attention, then the task, then the answer before tables"
    assert "One seed cannot tell" in page and "no longer" not in page
    assert page.index("One seed") < page.index("<table>") < page.index("Hessian-vector product")


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--out", "{file}"], "cannot be written to"), (["--seeds", "0"], "seeds is []")],
)
def test_refused_in_a_sentence_before_the_work(
    options: list[str],
    words: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(demo, "attention_table")
    (tmp_path / "file").write_text("kept")
    assert main(["demo", *(part.format(file=tmp_path / "file") for part in options)]) == 2
    error = capfd.readouterr().err
    assert error.startswith("jachess demo: ") and words in error and "Traceback" not in error
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "arguments", [["demo", "--seeds", "few"], ["demo", "--nonsense"], [], ["fit"]]
)
def test_bad_options_exit_with_two(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capfd.readouterr().err
