"""The registry of methods says what the methods do."""

from __future__ import annotations

import numpy as np
import pytest

from jachess_ext.scaling import LossTable, TableError, select
from jachess_ext.scaling.methods import METHODS
from jachess_ext.scaling.registry import DEFAULT, LIVE, REGISTRY, canonical
from python_tests.scaling import tables

TABLE, _ = tables.population(0, models=6)
TARGET = 1638400


def test_every_method_has_an_entry() -> None:
    assert {name for name, method in REGISTRY.items() if method.table} == set(METHODS)
    assert set(LIVE) == set(REGISTRY) - {"nlpmetrics"} and DEFAULT in LIVE


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("name", [n for n, m in REGISTRY.items() if m.trains != "none"])
def test_fewest_sizes_are_the_fewest(name: str, zero: bool) -> None:
    """One size less is refused; at the count of a width there is one, and below it none."""
    table = TABLE if zero else LossTable(TABLE.names, TABLE.trained, TABLE.trained_losses, None)
    method = REGISTRY[name]
    fewest = method.fewest_sizes(zero=zero)
    assert select(table, TABLE.trained[fewest - 1], TARGET, name).ranking
    if fewest > 1:
        with pytest.raises(ValueError, match="size"):
            select(table, TABLE.trained[fewest - 2], TARGET, name)
    if not method.forecasts:
        assert not select(table, 51200, TARGET, name).has_intervals
        with pytest.raises(ValueError, match="no distribution"):
            method.fewest_sizes(zero=zero, distribution=True)
        return
    for count in range(fewest, fewest + 3):
        found = select(table, TABLE.trained[count - 1], TARGET, name)
        assert found.has_intervals == (count >= method.fewest_sizes(zero=zero, distribution=True))


@pytest.mark.parametrize("name", [n for n, m in REGISTRY.items() if m.table])
def test_what_is_trained(name: str) -> None:
    n, sizes = TABLE.parameters, TABLE.trained[TABLE.trained <= 51200]
    assert n is not None
    if name == "nlpmetrics":
        with pytest.raises(TableError, match="reads the models' weights"):
            select(TABLE, 51200, TARGET, name)
        return
    flops = select(TABLE, 51200, TARGET, name).flops
    everything, last = 6 * n.sum() * sizes.sum(), 6 * n.sum() * sizes[-1]
    low, high = {
        "all": (everything, everything),
        "last": (last, last),
        "walk": (last, everything),
        "none": (0, 0),
    }[REGISTRY[name].trains]
    assert low * (1 - 1e-12) <= flops <= high * (1 + 1e-12)


@pytest.mark.parametrize(
    ("need", "table"),
    [
        ("zero", LossTable(TABLE.names, TABLE.trained, TABLE.trained_losses, TABLE.parameters)),
        ("parameters", LossTable(TABLE.names, TABLE.sizes, TABLE.losses, None)),
    ],
)
def test_needs(need: str, table: LossTable) -> None:
    for name, method in REGISTRY.items():
        if method.needs == "weights" or not method.table:
            continue
        if method.needs == need:
            with pytest.raises(TableError, match="needs"):
                select(table, 51200, TARGET, name)
        else:
            assert select(table, 51200, TARGET, name).ranking


def test_without_a_kernel_lensllm_is_the_rectified_law() -> None:
    one, other = (select(TABLE, 51200, TARGET, name) for name in ("lensllm", "rectified"))
    np.testing.assert_array_equal(one.predicted_losses, other.predicted_losses)


def test_former_names_are_accepted() -> None:
    found = select(TABLE, 51200, TARGET, "bayes")
    assert found.method == DEFAULT == canonical("bayes") and canonical("ats") == "ats"
