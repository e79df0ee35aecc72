"""Wrong arguments: what each operator says of them, and that its reference refuses them, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jachess_ext import ops
from python_tests.ops import bad_calls

ANSWERS = bad_calls.try_all()


@pytest.mark.parametrize(("operator", "way", "what"), ANSWERS)
def test_wrong_calls_get_a_sentence(operator: str, way: str, what: str) -> None:
    """The compiled operator names itself (a norm with a residual is the norm) and says what is
    expected; the references fail as torch does."""
    error = ANSWERS[operator, way, what]
    assert isinstance(error, RuntimeError | ValueError | TypeError | IndexError), error
    if way == "reference" or operator == "ntk_materialised":
        return
    sentence = str(error).splitlines()[0]
    if too_many_bits(what):
        return
    name = operator.removeprefix("add_")
    assert f"jachess::{name}" in sentence
    assert "expected" in sentence or ":" in sentence.split(name, 1)[1]


def too_many_bits(what: str) -> bool:
    """Whether the wrapper refuses: a number that no int64 holds."""
    return what in ("seed: 2**64", "seed: -2**63 - 1", "dropout_seed: 2**64")


GOOD = bad_calls.signatures()
X, A, D = torch.ones(4, 3, 5), torch.ones(3, 4, 5), torch.ones(2, 3, 4, 6)
HEADS = torch.ones(4, 1, 2, 3, 4)
ALONE = {"other_inputs": None, "other_cotangents": None}
DIFFER = "left and right differ in their numbers of layers or outputs, or in their feature sizes"
SENTENCES: list[tuple[str, dict[str, Any], str]] = [
    ("activation_jet", {"q": 0}, "q is 0; expected 1 to 4 directions: split"),
    ("activation_jet", {"x": torch.ones(5, 3)}, "q = 2 expects 3 .first order. or 4"),
    ("activation_jet", {"x": torch.tensor(1.0)}, "x has no dimension; expected streams in front"),
    ("activation_jet", {"x": X.long()}, "x has dtype int64; expected float64, float32, bfloat16"),
    ("activation_jet", {"kind": "swish"}, "kind is 'swish'; expected one of .*quick_gelu"),
    ("gated_activation_jet", {"u": X[:, :2]}, "u is float32.*; expected what g is.*same shape"),
    ("gated_activation_jet", {"u": X.double()}, "u is float64.*; expected what g is, float32"),
    ("layer_norm_jet", {"x": torch.ones(4)}, "the normalised dimension last"),
    ("layer_norm_jet", {"weight": torch.ones(2)}, r"weight has shape \[2\]; expected \[5\]"),
    ("layer_norm_jet", {"bias": torch.ones(5, 1)}, r"bias has shape .*expected \[5\]"),
    ("layer_norm_jet", {"weight": torch.ones(2, 5)}, r"has shape \[2, 5\]; expected \[3, 5\]"),
    ("layer_norm_jet", {"weight": torch.ones(3, 5)}, r"bias has shape \[5\]; expected \[3, 5\]"),
    ("layer_norm_jet", {"summed": 3}, "summed is 3; expected 0 to q = 2"),
    ("rms_norm_jet", {"weight": torch.ones(5).int()}, "weight has dtype int32; expected float64"),
    ("add_rms_norm_jet", {"residual": X[:, :2]}, "residual is float32.*expected what x is"),
    ("softmax_jet", {"x": torch.ones(4)}, "streams in front and the .* last"),
    ("softmax_jet", {"q": 7}, "expected 1 to 4"),
    ("jet_mean_squares", {"x": torch.ones(4), "mask": None}, "dimension to sum over last"),
    ("jet_mean_squares", {"mask": torch.ones(2).bool()}, "mask is bool.*expected bool of x"),
    ("jet_mean_squares", {"mask": torch.ones(3)}, "mask is float32.*true where a token counts"),
    ("jet_mean_squares", {"index": torch.ones(2)}, "index is float32.*expected int64"),
    ("jet_mean_squares", {"index": torch.ones(1, 2).long()}, "index is int64.1, 2.; expected"),
    ("jet_mean_squares", {"index": torch.tensor([0, 5])}, "index holds 5; expected 0 to 4"),
    ("jet_mean_squares", {"index": torch.tensor([-1])}, "index holds -1"),
    ("jet_mean_squares", {"index": torch.tensor([1, 2, 1])}, "index holds 1 twice"),
    ("attention_jet", {"query": HEADS[:, 0]}, r"query .*expected \[S, B, H, T, D\]"),
    ("attention_jet", {"key": torch.ones(4, 1, 2, 3, 8)}, "key has shape .*D of query"),
    ("attention_jet", {"value": torch.ones(4, 1, 2, 6, 4)}, "value has shape .*as in key"),
    ("attention_jet", {"query": torch.ones(4, 1, 3, 3, 4)}, "3 heads and key 2; expected"),
    ("attention_jet", {"key": HEADS.double()}, "key has another dtype .*convert it with .to"),
    ("attention_jet", {"query": HEADS.int()}, "query has dtype int32; expected float64"),
    ("attention_jet", {"mask": torch.ones(2, 3, 4)}, "does not broadcast to .B, H, T, Tk., here"),
    ("attention_jet", {"mask": torch.ones(1, 1, 1, 3, 3)}, "does not broadcast"),
    ("attention_jet", {"mask": torch.ones(3, 3).int()}, "mask has dtype int32; expected bool"),
    ("attention_jet", {"window": (-2, 0)}, "-1 for no limit"),
    ("attention_jet", {"softcap": -1.0}, "softcap is -1; expected a positive bound"),
    ("attention_jet", {"softcap": torch.inf}, "softcap is inf"),
    ("attention_jet", {"dropout_p": 1.0}, "dropout_p is 1; expected a probability below 1"),
    ("ntk_gram", {"inputs": A[0]}, r"inputs is float32\[4, 5\]; expected \[N, T, d\]"),
    ("ntk_gram", {"inputs": A.int()}, "inputs is int32.*of float64, float32, bfloat16 or float16"),
    ("ntk_gram", {"cotangents": []}, "no cotangent for inputs; expected at least one"),
    ("ntk_gram", {"cotangents": [D[:, :2]]}, r"a cotangent has shape \[2, 2, 4, 6\]"),
    ("ntk_gram", {"cotangents": [D, D[:1]]}, "with the same C for every layer"),
    ("ntk_gram", {"cotangents": [D.double()]}, "another dtype or device than inputs: convert"),
    ("ntk_gram", {"other_inputs": None}, "one of other_inputs and other_cotangents is missing"),
    ("ntk_gram", {"other_cotangents": None}, "other_cotangents is missing: give both, or neither"),
    ("ntk_gram", {"cotangents": [D]}, DIFFER),
    ("ntk_gram", {"inputs": A[..., 1:]}, DIFFER),
    ("sample_directions", {"token": torch.ones(2).int()}, "token has dtype int32; .*token_numbers"),
    ("sample_directions", {"q": 2**14 + 1}, "q is 16385; expected 0 to 16384"),
    ("sample_directions", {"d": -1}, "d is -1; expected 0 to 1048576"),
    ("sample_directions", {"offset": 2**62}, "expected 0 to 2.62 - 1: use another seed"),
    ("sample_directions", {"distribution": "cauchy"}, "'cauchy'; expected 'gaussian' or"),
    ("sample_directions", {"dtype": torch.int64}, "dtype is int64; expected float64"),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "changes", "words"), SENTENCES)
def test_sentences(operator: str, changes: dict[str, Any], words: str) -> None:
    """What was wrong, what was expected, and the fix."""
    name = operator.removeprefix("add_")
    with pytest.raises(RuntimeError, match=f"jachess::{name}: .*{words}"):
        getattr(ops, operator)(**(GOOD[operator] | changes))


OF_REFERENCES: list[tuple[str, dict[str, Any], str]] = [
    ("activation_jet", {"kind": "swish"}, "kind is 'swish'; expected one of .*quick_gelu"),
    ("activation_jet", {"x": X.long()}, r"dtype is torch\.int64; expected float64.*convert"),
    ("layer_norm_jet", {"weight": torch.ones(1)}, r"weight has shape \[1\]; expected \[5\]"),
    ("add_rms_norm_jet", {"residual": X[:1]}, r"residual has shape \[1, 3, 5\]; expected"),
    ("attention_jet", {"mask": torch.ones(3, 3).int()}, r"mask has dtype torch\.int32"),
    ("attention_jet", {"window": (-2, 0)}, "window is .*no limit"),
    ("attention_jet", {"softcap": -1.0}, "softcap is -1"),
    ("attention_jet", {"dropout_p": 1.0}, "dropout_p is 1"),
    ("ntk_materialised", {"inputs": A[0]}, r"inputs have shape \[4, 5\]"),
    ("ntk_materialised", {"cotangents": []}, "at least one"),
    ("ntk_materialised", {"cotangents": [D[:, :2]]}, r"expected \[2, 3, 4, 6\]"),
    ("ntk_materialised", {"other_inputs": None}, "pass both other_inputs and other_cotangents"),
    ("ntk_materialised", {"cotangents": [D]}, "left and right differ in their feature sizes"),
    ("ntk_materialised", {"cotangents": [D.double()]} | ALONE, r"has dtype torch\.float64"),
    ("ntk_materialised", {"workspace": 0}, "workspace is 0; expected bytes"),
    ("sample_directions", {"q": 2**14 + 1}, "q is 16385; expected 0 to 16384"),
    ("sample_directions", {"seed": 2**64}, r"seed is .*; expected .*take it modulo 2\*\*64"),
    ("sample_directions", {"token": torch.ones(2).int()}, r"token has dtype .*token_numbers"),
]


@pytest.mark.parametrize(("operator", "changes", "words"), OF_REFERENCES)
def test_sentences_of_references(operator: str, changes: dict[str, Any], words: str) -> None:
    """Where torch would give a number that nobody asked for."""
    ending = "" if operator == "ntk_materialised" else "_reference"
    with pytest.raises((ValueError, TypeError), match=words):
        getattr(ops, operator + ending)(**(GOOD[operator] | changes))
