"""Noise on embeddings and replaced tokens: sizes, counts, seeds and what stays as it was."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2ForSequenceClassification, PreTrainedTokenizerFast

from jachess_ext.lab.compare.judge import corrupt_batches
from jachess_ext.lab.workbench.models import encode, load_tokenizer
from jachess_ext.lab.workbench.tasks import Examples
from jachess_ext.training.corruption import (
    corrupt_tokens,
    embedding_scale,
    perturbed_embeddings,
    unknown_token_id,
)

from .tiny_models import VOCABULARY, WIDTH, classifier


def tiny_bert() -> Any:
    return classifier("bert", dtype=torch.float32)


def token_ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def test_noise_equals_the_same_model_fed_perturbed_embeddings() -> None:
    model, ids = tiny_bert(), token_ids(3, 7)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    noise = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(5))
    embedded = model.get_input_embeddings()(ids) + 0.3 * noise
    expected = model(inputs_embeds=embedded, attention_mask=mask).logits
    with perturbed_embeddings(model, 0.3, torch.Generator().manual_seed(5)):
        got = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(got, expected)


@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_the_hook_is_gone_afterwards_even_after_an_error(delta: float) -> None:
    model, ids = tiny_bert(), token_ids(2, 5)
    before = model(input_ids=ids).logits
    with (
        pytest.raises(RuntimeError, match="stop"),
        perturbed_embeddings(model, delta, torch.Generator()),
    ):
        raise RuntimeError("stop")
    assert torch.equal(model(input_ids=ids).logits, before)


def test_noise_has_standard_deviation_delta() -> None:
    model, ids = tiny_bert(), token_ids(250, 20)
    clean = model.get_input_embeddings()(ids)
    with perturbed_embeddings(model, 0.7, torch.Generator().manual_seed(1)):
        difference = model.get_input_embeddings()(ids) - clean
    assert difference.std().item() == pytest.approx(0.7, rel=0.02)  # 60 000 draws: 0.3 % s.e.
    assert difference.mean().item() == pytest.approx(0.0, abs=0.02)


def test_negative_noise_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="delta"),
        perturbed_embeddings(tiny_bert(), -1.0, torch.Generator()),
    ):
        pass


def test_embedding_scale_is_the_root_mean_square() -> None:
    model = tiny_bert()
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.tensor([3.0, -4.0]).repeat(VOCABULARY, 6))
    assert embedding_scale(model) == pytest.approx(12.5**0.5)


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids 1 (start) and 2 (end) are special, 0 is padding; 20 and 10 ordinary tokens."""
    ids = torch.zeros(2, 24, dtype=torch.long)
    ids[0, :22] = torch.tensor([1, *range(10, 30), 2])
    ids[1, :12] = torch.tensor([1, *range(10, 20), 2])
    return ids, (ids != 0).long(), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(("share", "counts"), [(0.0, [0, 0]), (0.1, [2, 1]), (1.0, [20, 10])])
def test_exact_share_of_ordinary_tokens(share: float, counts: list[int]) -> None:
    ids, mask, special = example()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        got = corrupt_tokens(ids, mask, share, unknown=3, special_ids=special, generator=generator)
        assert (got == 3).sum(1).tolist() == counts
        assert torch.equal(got[got != 3], ids[got != 3])
        assert torch.equal(got[torch.isin(ids, special)], ids[torch.isin(ids, special)])


def test_fractional_counts_are_right_on_average() -> None:
    ids, mask, special = example()
    ids, mask = ids[1:].repeat(4000, 1), mask[1:].repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    got = corrupt_tokens(ids, mask, 0.15, unknown=3, special_ids=special, generator=generator)
    counts = (got == 3).sum(1)
    assert set(counts.tolist()) == {1, 2}
    assert counts.double().mean().item() == pytest.approx(1.5, abs=0.04)  # 5 standard errors
    places = (got == 3).sum(0)[1:11].double() / 4000
    assert places.min() > 0.12 and places.max() < 0.18


def test_corruption_repeats_with_the_seed_and_leaves_its_input_alone() -> None:
    ids, mask, special = example()
    kept = ids.clone()
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    settings = {"unknown": 3, "special_ids": special}
    results = [corrupt_tokens(ids, mask, 0.3, **settings, generator=g) for g in generators]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert torch.equal(ids, kept)


def test_bad_corruption_is_named() -> None:
    ids, mask, special = example()
    settings = {"unknown": 3, "special_ids": special, "generator": torch.Generator()}
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share"):
            corrupt_tokens(ids, mask, share, **settings)


@pytest.mark.parametrize(
    ("unknown", "mask", "padding", "expected"),
    [
        (3, 4, 0, 3),
        (None, 4, 0, 4),
        (0, 4, 0, 4),  # the unknown token is the padding, too: rather the mask
        (0, None, 0, 0),  # GPT-2: the head's token is kept, see below
        (0, None, 7, 0),
        (7, 7, 7, 7),
    ],
)
def test_the_unknown_token(
    unknown: int | None, mask: int | None, padding: int, expected: int
) -> None:
    names = SimpleNamespace(unk_token_id=unknown, mask_token_id=mask, pad_token_id=padding)
    assert unknown_token_id(names) == expected


def test_padding_alone_is_no_unknown_token() -> None:
    """Models look for it to find a text's end: corruption would move what they read."""
    names = SimpleNamespace(unk_token_id=None, mask_token_id=None, pad_token_id=7)
    assert unknown_token_id(names) is None


def gpt2_style_tokenizer(folder: Path) -> Any:
    """As GPT-2's: one token for unknown, start and end; none for padding; none is added."""
    core = Tokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<|endoftext|>"])
    core.add_tokens([f"w{i}" for i in range(40)])
    ends = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=core, **ends).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_corruption_keeps_the_place_a_decoders_head_reads(tmp_path: Path, share: float) -> None:
    tokenizer = gpt2_style_tokenizer(tmp_path)
    assert tokenizer.unk_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id
    draw = random.Random(0)
    words = [[f"w{draw.randrange(40)}" for _ in range(draw.randint(1, 12))] for _ in range(200)]
    rows = Examples([" ".join(row) for row in words], None, [0] * 200)
    (clean,) = encode(rows, tokenizer, 32).in_order(200)
    (made,) = corrupt_batches([clean], tokenizer, share, draw=0)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=41, n_embd=16, n_layer=1, n_head=2, pad_token_id=0)
    model = GPT2ForSequenceClassification(config).eval()
    every: list[torch.Tensor] = []
    model.score.register_forward_hook(lambda _m, _i, output: every.append(output))
    with torch.no_grad():
        read = model(**{k: v for k, v in made.items() if k != "labels"}).logits
    places = [[(at == row).all().item() for at in of] for of, row in zip(every[0], read)]  # noqa: B905
    assert [of.index(True) for of in places] == [len(row) - 1 for row in words]
    changed = (made["input_ids"] != clean["input_ids"]).sum(1)
    others = torch.tensor([len(row) - 1 for row in words])
    if share == 1.0:
        assert torch.equal(changed, others), "all but the one that is read"
    else:
        assert changed.sum() / others.sum() == pytest.approx(share, abs=0.03)
