from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from dagster_datamask.influence.tokens import (
    END_OF_TEXT,
    SMALLEST_VOCABULARY,
    encode,
    end_of_text,
    load_tokenizer,
    pack,
    sequences,
    train_tokenizer,
)
from dagster_datamask.scoring.models import ModelUnavailable

TEXTS = [f"the river carries water to the valley {k} and the valley keeps the river" for k in range(60)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


def test_the_order_of_texts_leaves_no_trace(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(reversed(TEXTS), 300).to_str() == tokenizer.to_str()
    assert train_tokenizer([*TEXTS, None, ""], 300).to_str() == tokenizer.to_str()
    assert train_tokenizer(TEXTS[:30], 300).to_str() != tokenizer.to_str()
    assert tokenizer.get_vocab_size() == 300 and end_of_text(tokenizer) == 0
    assert tokenizer.id_to_token(0) == END_OF_TEXT


def test_a_vocabulary_ends_where_there_is_no_pair_left() -> None:
    assert train_tokenizer(["ab"], 1000).get_vocab_size() == SMALLEST_VOCABULARY + 1
    assert train_tokenizer(["a"], 1000).get_vocab_size() == SMALLEST_VOCABULARY


@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_every_text_comes_back(text: str) -> None:
    # of 257 tokens: all bytes and nothing merged
    tokenizer = train_tokenizer(["a"], SMALLEST_VOCABULARY)
    (document,) = encode(tokenizer, ["a"], [f"x{text}"], 10_000).tokens
    assert tokenizer.decode(document[:-1].tolist()) == f"x{text}"
    assert len(document) == len(f"x{text}".encode()) + 1 and document[-1] == 0


@pytest.mark.parametrize(
    ("vocabulary", "texts", "message"), [(256, TEXTS, "needs 257"), (300, [], "no text"), (300, [None, ""], "no text")]
)
def test_what_no_tokenizer_can_be_trained_on(vocabulary: int, texts: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, vocabulary)


def test_loading(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for ref in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(ref)).to_str() == tokenizer.to_str()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "cutting.json"))
    tokenizer.no_truncation()
    assert len(load_tokenizer(str(tmp_path / "cutting.json")).encode("a b c d e").ids) > 2


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"models\.tokenizer"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(ModelUnavailable, match=r"no file 'tokenizer\.json'"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "junk.json").write_text("{}")
    with pytest.raises(ValueError, match=r"junk\.json: not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "junk.json"))
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "endless.json"))
    with pytest.raises(ValueError, match=r"endless\.json: the tokenizer has no end-of-text token"):
        load_tokenizer(str(tmp_path / "endless.json"))


@pytest.mark.parametrize("n", [0, 1, 2])
def test_documents_and_why_some_are_none(tokenizer: Tokenizer, n: int) -> None:
    ids, texts = ["a", "b"][:n], ["the river", None][:n]
    found = encode(tokenizer, ids, texts, 16)
    assert found.ids == ids[:1] and found.refused == ({"b": "null_text"} if n == 2 else {})
    assert found.lengths.dtype == np.int64 and len(found.tokens) == len(found.lengths) == min(n, 1)


def test_a_long_document_is_its_first_tokens(tokenizer: Tokenizer) -> None:
    ids, texts = ["long", "empty", "exact", "lone"], [TEXTS[0] * 9, "", "the", "\ud800"]
    whole, found = encode(tokenizer, ids, texts, 10_000), encode(tokenizer, ids, texts, 2)
    assert found.ids == ["long", "exact", "lone"] and found.refused == {"empty": "no_tokens"}
    assert [row.tolist() for row in found.tokens] == [row[:2].tolist() for row in whole.tokens]
    assert found.cut.tolist() == [len(row) > 2 for row in whole.tokens] and found.cut[0]
    assert found.lengths.tolist() == [len(row) for row in whole.tokens] and not whole.cut.any()


@settings(deadline=None)
@given(st.lists(st.none() | st.text("ab \n", max_size=40), max_size=12), st.integers(1, 7))
def test_packing_is_one_long_text_cut_into_rows(
    tmp_path_factory: pytest.TempPathFactory, texts: list, context: int
) -> None:
    tokenizer = train_tokenizer(["ab ba"], SMALLEST_VOCABULARY)
    path = tmp_path_factory.mktemp("packed") / "s.npy"
    joined = [t for text in texts if text for t in [*tokenizer.encode(text).ids, 0]]
    rows = len(joined) // context
    if not rows:
        with pytest.raises(ValueError, match="a sequence takes"):
            pack(tokenizer, iter(texts), context, path)
        assert not list(path.parent.iterdir())
        return
    packed = pack(tokenizer, iter(texts), context, path)
    assert sequences(path).tolist() == np.reshape(joined[: rows * context], (rows, context)).tolist()
    assert packed.sequences == rows and packed.tokens == len(joined) == rows * context + packed.left_over
    assert packed.documents == sum(bool(t) for t in texts) and packed.documents + packed.empty == len(texts)


def test_packed_sequences_are_mapped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    # more than one batch of texts
    packed = pack(tokenizer, (t for _ in range(20) for t in TEXTS), 8, tmp_path / "new" / "s.npy")
    found = sequences(tmp_path / "new" / "s.npy")
    assert isinstance(found, np.memmap) and found.dtype == np.uint16 and found.shape == (packed.sequences, 8)
    # the last end is among the four tokens left over
    assert np.count_nonzero(found == 0) + 1 == packed.documents == 1200 and packed.left_over == 4
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["s.npy"]
