"""Synonyms from a plain file, from files in WordNet's format, and from an embedding table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jachess_ext._io import DataError
from jachess_ext.lab.attack import NearestRows, candidates_from, read_synonyms
from jachess_ext.lab.demo import ASSETS
from jachess_ext.lab.workbench.models import load_model, load_tokenizer

LICENCE = "  1 This software and database is being provided to you ...\n"
DATA = (  # as wndb(5WN) has it: four words, a pointer, a gloss; an adjective's place in brackets
    "00000100 00 a 04 good 0 fine 1 well_made 0 Rome 0 001 ! 00000200 a 0101 | of high quality\n"
    "00000200 00 s 02 good(p) 2 sound(a) 0 000 | in order; good condition\n"
    "00000300 00 a 02 good 3 rare 0 000 | never seen in tagged texts\n"
    "00000400 00 a 0a in 0 b 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 j 0 000 | ten words, in hexadecimal\n"
)
INDEX = (
    "good a 3 2 ! & 3 2 00000200 00000100 00000300  \n"
    "fine a 1 0 1 0 00000100  \n"
    "in a 1 0 1 0 00000400  \n"
    "well_made a 1 0 1 0 00000100  \n"
)


def wordnet(folder: Path, data: str = DATA, index: str = INDEX) -> Path:
    (folder / "data.adj").write_text(LICENCE + data)
    (folder / "index.adj").write_text(LICENCE + index)
    return folder


def test_wordnet(tmp_path: Path) -> None:
    words = read_synonyms(wordnet(tmp_path))
    assert words("Good") == ("sound", "fine")  # two tagged senses, in the index's order
    assert words("fine") == ("good",)  # no tagged sense: the first; neither well_made nor Rome
    assert words("in") == words("well_made") == words("sound") == ()
    assert words.source == f"WordNet in {tmp_path}"


@pytest.mark.parametrize(
    "data, index, words",
    [
        (DATA, "good a x\n", r"index.adj: line 2 is 'good a x'; expected WordNet's format"),
        ("00000100 00 a good 0 fine 1\n", INDEX, "data.adj: line 2 is"),
        (DATA, "in a 1 0 1 0 00000400\n", "has no word with a synonym"),
    ],
)
def test_wordnet_that_is_not(tmp_path: Path, data: str, index: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_synonyms(wordnet(tmp_path, data, index))


def test_a_folder_without_wordnet_or_half_of_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no word with a synonym.*apt install wordnet-base"):
        read_synonyms(tmp_path)
    wordnet(tmp_path)
    (tmp_path / "data.adj").unlink()
    with pytest.raises(DataError, match=r"data.adj cannot be read: No such file"):
        read_synonyms(tmp_path)


def test_plain_file(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("# films\ngood Fine great good\n\nbad poor # not: evil\ngood great nice\n")
    words = candidates_from(file, None, None)
    assert words("good") == ("fine", "great", "nice")
    assert words("BAD") == ("poor",) and words("fine") == ()
    assert words.source == str(file)


@pytest.mark.parametrize(
    "text, words",
    [
        ("good fine\nbad poor, awful\n", "line 2 has 'poor,'; expected words of letters"),
        ("good\n", "has no word with a synonym"),
        ("\n", "has no word with a synonym"),
        ("good good\n", "has no word with a synonym"),
    ],
)
def test_plain_file_that_is_not(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "words.txt").write_text(text)
    with pytest.raises(DataError, match=words):
        read_synonyms(tmp_path / "words.txt")


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_bytes(b"good f\xffne\n")
    with pytest.raises(DataError, match="not UTF-8 text"):
        read_synonyms(tmp_path / "words.txt")


def test_nearest_rows_against_all_cosines() -> None:
    tokenizer = load_tokenizer(ASSETS)
    model = load_model(ASSETS, 2, tokenizer, seed=0)
    nearest = NearestRows(model, tokenizer, count=5)
    table = model.get_input_embeddings().weight.detach().double()
    words = {
        token: i
        for token, i in tokenizer.get_vocab().items()
        if token.isalpha() and tokenizer.tokenize(token) == [token]
    }
    own = table[words["good"]]
    likeness = {w: torch.cosine_similarity(table[i], own, dim=0).item() for w, i in words.items()}
    del likeness["good"]
    assert list(nearest("Good")) == sorted(likeness, key=lambda w: -likeness[w])[:5]
    assert nearest("film") == ()  # two tokens
    assert "nearest rows" in candidates_from("embeddings", model, tokenizer).source
