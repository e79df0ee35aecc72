"""Tokenizers trained on a user's own text, with every special token a classifier needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jachess_ext._io import require

LONGEST = 128
"""Tokens a text is cut to (`model_max_length`)."""

WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BYTE_PAIR_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
_FEWEST = 3  # times a character occurs, or it is unknown to a WordPiece vocabulary


def train_wordpiece(texts: Iterable[str], size: int, words: Sequence[str] = ()) -> Any:
    """A lower-casing WordPiece vocabulary as BERT has it: [CLS] text [SEP] pair [SEP].

    Args:
        texts: what it is trained on.
        size: tokens of the vocabulary, special ones and `words` among them.
        words: strings that stay one ordinary token wherever they stand.

    Returns:
        A transformers tokenizer; ids 0 to 4 are padding, unknown, class, separator and mask.

    Raises:
        ValueError: a size that the special tokens and words alone fill.
        MissingExtra: transformers is not installed.
    """
    library = require("tokenizers")
    normalizer = library.normalizers.BertNormalizer(lowercase=True)
    texts = list(texts)
    core = library.Tokenizer(
        library.models.WordPiece(
            _wordpieces(texts, size - len(words), normalizer), unk_token=WORDPIECE_SPECIAL[1]
        )
    )
    core.normalizer = normalizer
    core.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    core.decoder = library.decoders.WordPiece()
    core.add_special_tokens(list(WORDPIECE_SPECIAL))
    core.add_tokens([library.AddedToken(word, normalized=False) for word in words])
    _, _, start, end, _ = WORDPIECE_SPECIAL
    _frame(core, library, start, end)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    special = dict(zip(names, WORDPIECE_SPECIAL, strict=True))
    return _wrapped(core, **special, model_input_names=inputs)


def train_byte_pairs(texts: Iterable[str], size: int) -> Any:
    """A byte-level BPE vocabulary as GPT-2 has it, framed: <s> text </s> pair </s>.

    Args, raises: as `train_wordpiece`; the 256 bytes are part of the size.

    Returns:
        A transformers tokenizer; ids 0 to 3 are padding, unknown, start and end.
    """
    library = require("tokenizers")
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    _check_size(size, len(BYTE_PAIR_SPECIAL) + len(alphabet))
    _, unknown, start, end = BYTE_PAIR_SPECIAL
    core = library.Tokenizer(library.models.BPE(unk_token=unknown))
    core.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = library.decoders.ByteLevel()
    special = list(BYTE_PAIR_SPECIAL)
    _train(core, texts, vocab_size=size, special_tokens=special, initial_alphabet=sorted(alphabet))
    _frame(core, library, start, end)
    names = ("pad_token", "unk_token", "bos_token", "eos_token")
    return _wrapped(core, **dict(zip(names, BYTE_PAIR_SPECIAL, strict=True)))


def _wordpieces(texts: Sequence[str], size: int, normalizer: Any) -> dict[str, int]:
    """Piece -> id: special tokens, characters alone and inside words, then merged pieces.

    The library numbers characters inside words (##e) in the order of a hash map that differs from
    run to run, and ties between merges fall by number.  Naming them as special tokens of a throw-
    away tokenizer fixes their numbers, and with them the vocabulary.
    """
    library = require("tokenizers")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    letters = sorted(c for c, n in counts.items() if n >= _FEWEST and not c.isspace())
    first = [*WORDPIECE_SPECIAL, *letters, *("##" + letter for letter in letters)]
    _check_size(size, len(first))
    core = library.Tokenizer(library.models.BPE(continuing_subword_prefix="##"))
    core.normalizer = normalizer
    core.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    _train(
        core,
        texts,
        vocab_size=size,
        special_tokens=first,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix="##",
    )
    return core.get_vocab()


def _train(core: Any, texts: Iterable[str], **settings: Any) -> None:
    trainer = require("tokenizers.trainers").BpeTrainer(show_progress=False, **settings)
    core.train_from_iterator(texts, trainer)


def _check_size(size: int, fewest: int) -> None:
    if size <= fewest:
        raise ValueError(
            f"a vocabulary of {size} tokens has no room for words: {fewest} are special or single "
            "characters; ask for a few thousand"
        )


def _frame(core: Any, library: Any, start: str, end: str) -> None:
    """Start and end tokens around a text, an end token after its pair."""
    core.post_processor = library.processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(token, core.token_to_id(token)) for token in (start, end)],
    )


def _wrapped(core: Any, **settings: Any) -> Any:
    return require("transformers").PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=LONGEST, **settings
    )
