"""The page of the documentation that lists every torch function with a rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from docs.hooks import ROOT, rule_table
from jachess_ext.jet.engine import errors, registry


def test_the_page_names_every_function_of_the_table() -> None:
    served = {*registry.registered_functions(), *registry.GENERAL_RULES, *registry.OTHER_NAMES}
    rows = {tuple(row.split(" | ")[1:]) for row in rule_table().splitlines()[2:]}
    names = {name.strip("`"): kind.strip(" |") for cell, kind in rows for name in cell.split(", ")}
    assert names.keys() == {errors.function_name(function) for function in served}
    page = (ROOT / "docs/rules.md").read_text()
    assert "<!-- table -->" in page
    for word in {word for kind in names.values() for word in kind.split(", ")}:
        assert f"| {word} |" in page, "the page does not say what it means"


@pytest.mark.parametrize(
    "function, kinds",
    [
        (torch.sin, ("formula",)),
        (torch.Tensor.__mul__, ("recogniser", "formula")),
        (F.mse_loss, ("composed",)),
        (F.softmin, ("composed",)),
        (torch.argmax, ("value",)),
        (torch.kron, ("forward mode",)),
        (torch.div, ("formula", "forward mode")),
        (torch.arccos, ("other name",)),
    ],
)
def test_kinds(function: registry.Rule, kinds: tuple[str, ...]) -> None:
    assert registry.rule_kinds()[function] == kinds
