"""`jachess demo` as a user meets it: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import re
import socket
from functools import cache, partial
from pathlib import Path

import joblib
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import jachess_ext as jx
from jachess_ext.lab import demo
from jachess_ext.lab.cli import main
from jachess_ext.lab.compare.tables import to_frame
from jachess_ext.lab.workbench.metrics import ACCURACY
from jachess_ext.lab.workbench.models import encode, load_model, load_tokenizer
from jachess_ext.lab.workbench.settings import Recipe
from jachess_ext.lab.workbench.tasks import Examples, Task
from python_tests.lab.compare.records import record
from python_tests.threads import one_thread  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("one_thread")


def test_derivatives_in_torchs_words_and_in_numbers() -> None:
    texts, table = demo.derivative_table(256)
    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(NotImplementedError) as refusal:
        torch.func.jvp(scaled_dot_product_attention, (q, q, q), (q, q, q))
    assert str(refusal.value).splitlines()[0] in texts[0]
    assert "hvp" in texts[1] and "is not implemented" in texts[1]
    tangent, product, laplacian = (row[0] for row in table.rows)
    assert (tangent, product) == ("output's tangent", "Hessian-vector product")
    assert laplacian == "Laplacian in 10 inputs"
    for _, error, _, memory in table.rows:
        assert float(error) < 1e-13
        theirs, ours = (float(part.split()[0]) for part in memory.split(" → "))
        assert ours < 0.7 * theirs


def test_it_says_where_torch_refuses_no_longer() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        texts, _ = demo.derivative_table(256)
    assert all("no longer refuses" in text for text in texts)


def test_peak_is_the_allocators(capfd: pytest.CaptureFixture[str]) -> None:
    def call() -> tuple[torch.Tensor, ...]:
        both = torch.empty(2**20), torch.empty(2**20)  # 4 MiB each
        del both
        return (torch.empty(2**18),)

    assert demo.peak_mebibytes(call) == 8
    torch.ones(1)
    assert capfd.readouterr().err == ""
    assert demo.peak_mebibytes(call) == 8, "stderr is what it was"


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
    monkeypatch.setattr(demo, "FEW_METHODS", ("none", "jachess-train"))
    monkeypatch.setattr(demo, "METHODS", ("none", "label-smoothing"))
    monkeypatch.setattr(demo, "derivative_table", cache(partial(demo.derivative_table, 256)))
    monkeypatch.setattr(demo, "docstring_task", cache(demo.docstring_task))
    out = tmp_path / "out"
    assert main(["demo", "--quick", "--out", str(out)]) == 0
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(r["method"], r["seed"]) for r in records] == [("none", 0), ("jachess-train", 0)]
    assert records[0]["rows"] == [240, 120, 120] and records[0]["score"] is not None
    shown = capfd.readouterr().out.partition("In all")[0]
    page = (out / "report.html").read_text()
    parts = (
        *("1. Derivatives", "jvp through F", "Hessian-vector product", "Laplacian", " s\n"),
        *("2. Reading sentences", " s\n", "3. Fine-tuning", "layer", "smoothness.png", " s\n"),
        *(
            "4. Comparing 2 methods on 1 seed",
            "accuracy × 100",
            "are smaller on",
            "--compare",
            " s\n",
        ),
    )
    place = 0
    for part in parts:
        place = shown.index(part, place) + 1
    assert max(len(line) for line in shown.splitlines() if str(out) not in line) <= 80
    assert (out / "smoothness.png").read_bytes().startswith(b"\x89PNG")
    assert "One seed cannot tell" in page and "no longer" not in page
    titles = ("Hessian-vector product", "does to each layer", "Methods compared", "In short")
    places = [page.index(title) for title in titles]
    assert places == sorted(places), "what the package is for comes before the comparison"

    assert main(["demo", "--quick", "--compare", "--out", str(out)]) == 0
    again = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [r["method"] for r in again] == ["none", "label-smoothing"]
    assert again[0] == records[0], "the runs of the small comparison are not repeated"
    assert "One seed cannot tell" in capfd.readouterr().out


def test_layers_are_measured_before_and_after(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ASSETS", tiny_model)
    label = Examples(["good film", "bad book"] * 4, None, [0, 1] * 4)
    task = Task("films", ("bad", "good"), label, label, label, ACCURACY)
    recipe = Recipe(epochs=2, batch_size=2, lr=1e-2, max_length=16)
    table, picture = demo.measure_layers(task, recipe)
    tokenizer = load_tokenizer(tiny_model)
    model = load_model(tiny_model, 2, tokenizer, seed=0).eval()
    norms = jx.smoothness(model, encode(label, tokenizer, 16).batch(range(8)), seed=0)
    assert [row[0] for row in table.rows] == ["1", "2"]
    changes = []
    for row, *of in zip(table.rows, norms.jacobian, norms.hessian, strict=True):
        for cell, before in zip(row[1:], of, strict=True):
            start, change = re.fullmatch(r"(.*) → .* \((.*) %\)", cell).groups()
            assert start == f"{float(before):,.0f}"
            changes.append(int(change.replace("−", "-")))
    assert "8 steps" in table.caption and all(changes)
    first, second = (
        [line for line in panel.lines if line.get_label().startswith("layer")]
        for panel in picture.draw().axes
    )
    drawn = [line for layer in zip(first, second, strict=True) for line in layer]
    assert [line.get_ydata()[0] for line in drawn] == [100] * 4
    assert [round(line.get_ydata()[-1]) - 100 for line in drawn] == changes
    assert list(drawn[0].get_xdata()) == list(range(9))


def test_what_the_penalty_did_is_said_in_numbers() -> None:
    runs = to_frame(
        record(
            *(method, "films", seed, 0.5),
            **{"accuracy": 0.5, "brier": 0.25, "jacobian": [1000.0], "hessian": [hessian]},
            seconds={"processor": seconds},
        )
        for method, seed, hessian, seconds in (
            *(("none", 0, 8e3, 1.0), ("none", 1, 2e3, 1.0), ("none", 2, 2e3, 1.0)),
            *(("jachess-train", 0, 2e3, 3.0), ("jachess-train", 1, 3e3, 2.0)),
            ("jachess-train", 2, 1e3, 2.5),
        )
    )
    text = demo.penalty_summary(runs)
    assert "50 % of the plain" in text and "on 2 of 3 seeds, for 2.5 times" in text
    assert demo.penalty_summary(runs[runs["method"] == "none"]) == ""
    table = demo.summary_table(runs)
    assert table.rows[0] == ["none", "50.0 ± 0.0", "0.250 ± 0.000", "1.0 ± 0.0", "4 ± 3", "1.0"]
    assert table.rows[1][-1] == "2.5"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "{file}"], "cannot be written to"),
        (["--seeds", "0"], "--seeds is 0; expected at least 1"),
    ],
)
def test_refused_in_a_sentence_before_the_work(
    options: list[str],
    words: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(demo, "derivative_table")
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
