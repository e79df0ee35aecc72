"""The README's examples, run as they stand; its length; its figures and links."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import jachess_ext as jx
from benchmarks import quoted
from benchmarks.common import git
from python_tests.snippets import assert_printed, blocks, run

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md", "csrc/*.md",
                    "jachess_ext/**/README.md")
    for path in ROOT.glob(pattern)
)  # fmt: skip
_LINK = re.compile(r"\]\(<?([^)#>\s]*)(#[^)>]*)?>?\)")


def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, one after the other, they print what they say; the last one trains."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    *shown, training = blocks(README)
    for code, printed in shown:
        assert printed is not None
        run(code, names, printed)
    product = [entry.clone() for entry in names["product"]]
    before = [p.detach().clone() for p in names["model"].parameters()]
    run(training[0], names, training[1])
    moved = [
        not torch.equal(a, b) for a, b in zip(before, names["model"].parameters(), strict=True)
    ]
    assert all(moved[:3]) and any(entry.abs().max() > 0 for entry in product)


def test_length() -> None:
    """Prose has 700 words at most: code, tables and link targets left out."""
    text = README.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|^\|.*?$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    assert 300 <= len([word for word in text.split() if re.search(r"\w", word)]) <= 700


@pytest.mark.parametrize("name", quoted.DOCUMENTS)
def test_figures_are_those_of_the_results(name: str) -> None:
    """`python -m benchmarks.quoted --update` makes them so."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.count("<!-- quoted: ") == text.count("<!-- /quoted -->") > 0
    assert quoted.renewed(text) == text
    emptied = re.sub(r"(<!-- quoted: .*? -->\n).*?(<!-- /)", r"\1\2", text, flags=re.DOTALL)
    assert emptied != text and quoted.renewed(emptied) == text


def test_every_pattern_of_the_measured_files_matches_one() -> None:
    """One that matches no file, as after a move, would hide every change of what it was to name."""
    patterns = {pattern for paths in quoted.MEASURES.values() for pattern in paths}
    assert [pattern for pattern in sorted(patterns) if not any(ROOT.glob(pattern))] == []


def test_quoted_figures_are_of_the_code_as_it_is_or_the_page_says_so() -> None:
    """Once files of `quoted.MEASURES` compute something else, measure anew, or name the rows."""
    try:
        checkout = git("rev-parse", "--show-toplevel", "--is-shallow-repository")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git here, or no checkout: nothing tells commits' order")
    if checkout.split("\n") != [str(ROOT), "false"]:
        pytest.skip("a shallow clone, or no checkout of its own: the history is not there")
    outdated = {line.partition(".csv")[0] for line in quoted.outdated()}
    page = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    sentence = re.search(r"changed since they were measured: ([^.]*)\.", page)
    assert outdated == set(re.findall(r"`(\w+)`", sentence[1] if sentence else ""))


def test_a_gpu_s_rows_are_those_of_its_newest_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until there are any but run 4's, these are quoted as what they are."""
    monkeypatch.setattr(quoted, "RESULTS", tmp_path)
    parts = ("{} times as long", "ours", "theirs"), ("with that {}", "that", "theirs")
    assert quoted.gpu("steps", *parts) == "not measured at this commit"
    (tmp_path / "gpu").mkdir()
    lines = ["date,commit,device,figure,baseline,ratio", "1,9cda67b,H100,ours,theirs,2",
             "1,9cda67b,H100,ours,theirs,3.04"]  # fmt: skip
    path = tmp_path / "gpu" / "steps.csv"
    path.write_text("\n".join(lines))
    quoted.rows.cache_clear()
    run_4 = "not measured at this commit; run 4: 2.0 to 3.0 times as long"
    assert quoted.gpu("steps", *parts) == run_4
    lines += ["2,abc,H200,ours,theirs,1.5", "2,abc,H200,ours,theirs,", "2,abc,H200,that,theirs,4"]
    path.write_text("\n".join(lines))
    quoted.rows.cache_clear()
    newest = "1.5 times as long, with that 4.0 (H200, abc)"
    assert quoted.gpu("steps", *parts) == newest
    quoted.rows.cache_clear()


def test_a_program_is_what_it_computes() -> None:
    """Words may change between a measurement and now, and where a function stands; no number."""
    before = (
        '"Say."\nfrom __future__ import annotations\nS = 2.0\n\n'
        'def double(x: Any, *, by: float = S) -> Any:\n    "Say."\n'
        "    late: int\n    def set(): nonlocal late; late = 1\n"
        "    known: Any = x * by\n    return known + 1.5\n\n"
        "class A:\n    size = 4\n    @cache\n    def f(self): return S\n"
    )
    after = [
        "import torch\nS: float = 2.0\n\ndef double(x: Tensor, *, by: float = S) -> Tensor:\n"
        '    """Multiply."""\n    late: object\n    def set() -> None:\n'
        "        nonlocal late\n        late = 1\n    # twice\n"
        "    product = x * by\n    return product + 1.5\n",
        "class B:\n    size: int = 4\n\n    @cache\n    def f(self) -> float:\n        return S\n",
    ]
    assert quoted.program([before]) == quoted.program(after)
    for line, other in (
        *(("1.5", "1.25"), ("x * by", "x / by"), ("S = 2.0", "S = 3.0")),
        *(("size = 4", "size = 5"), ("    @cache\n", "")),
    ):
        assert quoted.program([before]) != quoted.program([before.replace(line, other)])


def test_numbers_of_the_readme_stand_in_its_tables_alone() -> None:
    """Ratios and scores in prose would have no source: its rows have them all."""
    left_out = r"<!-- quoted.*?/quoted -->|<!-- evidence: begin.*?evidence: end -->|```.*?```"
    text = re.sub(left_out, "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = re.sub(r"torch ≥? ?[\d.]+( to\s+[\d.]+)?|Python ≥? ?[\d.]+( to [\d.]+)?", "", text)
    assert not re.findall(r"\d\.\d", prose.replace("Apache-2.0", ""))


def test_the_evidence_is_that_of_its_page() -> None:
    """Each figure of the README's paragraph on quality stands in docs/finetuning.md."""
    (evidence,) = re.findall(
        r"<!-- evidence: begin -->(.*?)<!-- evidence: end -->", README.read_text(), re.DOTALL
    )
    page = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
    known = {text.lstrip("0") for text in re.findall(r"\d*\.\d+", page)}
    found = [text.lstrip("0") for text in re.findall(r"\d*\.\d+", evidence)]
    assert not [text for text in found if text not in known]


def test_links() -> None:
    """Relative links lead to files, and to headings that are there."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        for target, anchor in _LINK.findall(text):
            if ":" in target:
                continue
            place = (path.parent / target) if target else path
            assert place.exists(), f"{path}: {target}"
            if anchor and place.suffix == ".md":
                assert anchor[1:] in _anchors(place), f"{path}: {target}{anchor}"


@cache
def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {text.replace(" ", "-") for text in plain}


def test_printed_words_and_numbers_are_compared() -> None:
    assert_printed("a 1.001 (2, 3)", "a 1.0 (2, 3)")
    for other in ("a 1.1 (2, 3)", "b 1.0 (2, 3)", "a 1.0 (2, 3) c", "a -1.0 (2, 3)"):
        with pytest.raises(AssertionError):
            assert_printed("a 1.0 (2, 3)", other)


@pytest.mark.parametrize("name", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=str)
def test_tutorials(name: Path) -> None:
    """Each from its first line to its last, in one go, without a network."""
    torch.manual_seed(1)
    names: dict[str, Any] = {}
    found = blocks(name)
    assert len(found) >= 2 and sum(printed is not None for _, printed in found) >= 2
    for code, printed in found:
        run(code, names, printed)
    assert names["jx"] is jx


def test_the_guide_on_embedding() -> None:
    """Its code runs as it stands, and its context is the package's."""
    names: dict[str, Any] = {}
    for code, printed in blocks(ROOT / "docs" / "embedding.md"):
        run(code, names, printed)
    assert names["differentiable"] is jx.differentiable
    vector = names["parameters"]

    def slope(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        gradients = torch.func.grad(names["loss"])(parameters)
        return torch.stack([(gradients[name] * vector[name]).sum() for name in vector]).sum()

    with sdpa_kernel(SDPBackend.MATH):  # two reverse modes, which are right in torch
        expected = torch.func.grad(slope)(vector)
    torch.testing.assert_close(names["product"], expected, rtol=1e-4, atol=1e-6)
    with sdpa_kernel(SDPBackend.MATH):  # as the page says
        without = names["HessianOperator"](names["loss"], vector) @ vector
    errors = [(without[name] - expected[name]).square().sum() for name in vector]
    size = torch.stack([part.square().sum() for part in expected.values()]).sum()
    assert torch.stack(errors).sum() > size / 2


def test_the_first_page() -> None:
    """Its code runs, and its second derivative is one of its first."""
    torch.manual_seed(1)
    names: dict[str, Any] = {}
    ((code, _),) = blocks(ROOT / "docs" / "index.md")
    run(code, names)
    inputs, step = [names[name] for name in ("q", "k", "v", "dq", "dk", "dv")], 1e-3
    inputs = [x.double() for x in inputs]
    ahead, behind = (
        jx.jvp(
            names["attend"],
            tuple(x + s * d for x, d in zip(inputs[:3], inputs[3:], strict=True)),
            tuple(inputs[3:]),
        )[1]
        for s in (step, -step)
    )
    expected = ((ahead - behind) / (2 * step)).float()
    torch.testing.assert_close(names["second"], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=str)
def test_notebooks(path: Path) -> None:
    """Their cells, and that the last line of each is what it was saved with."""
    pytest.importorskip("matplotlib").use("agg")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    compared = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        saved = [out for out in cell["outputs"] if out.get("name") == "stdout"]
        assert not [out for out in cell["outputs"] if out["output_type"] == "error"]
        printed = "".join(text for out in saved for text in out["text"])
        # the last line: before it the Trainer may tell how long it took
        run("".join(cell["source"]), names, printed.splitlines()[-1] if printed else None)
        compared += bool(printed)
    assert compared >= 2
    assert any("image/png" in out.get("data", {}) for c in notebook["cells"] for out in
               c.get("outputs", []))  # fmt: skip
