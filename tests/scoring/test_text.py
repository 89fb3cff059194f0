import re
import unicodedata
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dagster_datamask.scoring.text import (
    NO_TOKENS,
    NULL_TEXT,
    SURROGATES,
    UltraFineWeb,
    decode_column,
    join_lines,
    normaliser_of,
    screen,
)

LINE_BREAKS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


def bytes_as_string(values: list[bytes | None], large: bool = False) -> pa.Array:
    """A string array over arbitrary bytes, as a foreign writer may have left it in a parquet file."""
    array = pa.array(values, pa.large_binary() if large else pa.binary())
    return pa.Array.from_buffers(
        pa.large_string() if large else pa.string(), len(array), array.buffers(), array.null_count
    )


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2])
def test_valid_text_is_unchanged(n: int, large: bool) -> None:
    texts = ["für 語 😀", None][:n]
    column = pa.array(texts, pa.large_string() if large else pa.string())
    assert decode_column(column) == (texts, 0)
    assert decode_column(pa.chunked_array([column, column])) == (texts * 2, 0)


def test_bad_bytes_are_replaced_and_counted_per_row() -> None:
    raw = [b"ok", None, b"a\xffb\xffc", "x\ud800y".encode("utf-8", "surrogatepass"), b"\xe4"]
    for large in (False, True):
        for column in (bytes_as_string(raw, large), pa.array(raw, pa.large_binary() if large else pa.binary())):
            texts, replaced = decode_column(column)
            assert replaced == 3
            assert texts[:3] == ["ok", None, "a\ufffdb\ufffdc"]
            assert texts[3] is not None and texts[3][0] == "x" and texts[3][-1] == "y" and "\ufffd" in texts[3]
            assert texts[4] == "\ufffd"


@given(st.lists(st.none() | st.binary(max_size=12), max_size=6))
def test_no_bytes_raise_and_every_text_has_a_utf8_form(raw: list[bytes | None]) -> None:
    texts, replaced = decode_column(bytes_as_string(raw))
    assert [text is None for text in texts] == [value is None for value in raw]
    assert replaced == sum(text.encode() != value for text, value in zip(texts, raw, strict=True) if text is not None)


def test_a_slice_decodes_its_own_rows() -> None:
    assert decode_column(pa.array(["a", "b", None, "d"]).slice(1, 2)) == (["b", None], 0)


def test_other_columns() -> None:
    assert decode_column(pa.nulls(2)) == ([None, None], 0)
    with pytest.raises(TypeError, match=r"not int64.*\[source\]"):
        decode_column(pa.array([1]))


@given(st.lists(st.text(max_size=8) | st.sampled_from(LINE_BREAKS), max_size=12).map("".join))
def test_joined_text_is_one_line(text: str) -> None:
    line = join_lines(text)
    assert not any(mark in line for mark in LINE_BREAKS)
    assert len(line.splitlines()) <= 1
    assert join_lines(line) == line
    assert line.split() == text.split()


@pytest.mark.parametrize("mark", LINE_BREAKS)
def test_every_line_break_is_one_space(mark: str) -> None:
    assert join_lines(f"\t a{mark}b{mark}{mark}c \n") == "a b  c"


@pytest.mark.parametrize("n", [0, 1, 2])
def test_screen(n: int) -> None:
    clean, reasons, notes = screen(["a\ud83db", None][:n])
    assert clean == ["a\ufffdb", ""][:n]
    assert reasons == [None, NULL_TEXT][:n]
    assert notes == (Counter({SURROGATES: 1}) if n else Counter())


def test_screen_marks_blank_texts() -> None:
    blanks = ["", " ", "\n\t\u2028", "\u00a0\u3000"]
    assert screen(blanks)[1] == [NO_TOKENS] * 4
    with pytest.raises(TypeError, match=r"row 1.*bytes"):
        screen(["a", b"b"])


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE, DeepSeek-V2's kind, that knows all bytes and a few words with and without their space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("t", "he"), ("\u0120", "the"), ("\u010a", "\u010a")]
    vocabulary = {word: k for k, word in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # lower case; a token's own space and the joining one are squeezed to one; no truncation
        ("The THE the", "the the the"),
        ("theme", "the m e"),
        # three and more newlines are two, which are one token here; newline, return and tab as two characters each
        ("a\n\n\n\n\n", r"a \n\n"),
        ("a\nb\rc\td", r"a \n b \r c \t d"),
        # NFKD without marks: accents go, ligatures and full-width letters come apart, and so does a dotted capital I
        ("Cafe\u0301 \u00c9 \ufb01 \uff21 \u0130", "c a f e e f i a i"),
        # enclosing marks are no non-spacing ones and stay, byte for byte as tokens that are no characters
        ("a\u20dd", "a \ufffd \ufffd \ufffd"),
        ("\u8a9e", "\ufffd \ufffd \ufffd"),
        # ends are stripped, a special token's text is read as one token and kept
        ("  the  ", "the"),
        ("<s>the", "<s> the"),
        ("", ""),
        (" \u00a0 ", ""),
        ("\n", r"\n"),
    ],
)
def test_ultra_finewebs_form(byte_level: Path, text: str, line: str) -> None:
    assert normaliser_of("ultra_fineweb", byte_level)(text) == line


@given(st.text(st.characters() | st.sampled_from("the \n\r\t\u0301"), max_size=40))
def test_ultra_finewebs_form_against_its_definition_step_by_step(byte_level: Path, text: str) -> None:
    text = screen([text])[0][0]
    tokenizer = Tokenizer.from_file(str(byte_level))
    tokenizer.no_truncation()
    plain = unicodedata.normalize("NFKD", re.sub("\n\n\n+", "\n\n", text).lower())
    plain = "".join(character for character in plain if unicodedata.category(character) != "Mn")
    ids = tokenizer.encode(plain, add_special_tokens=False).ids
    line = " ".join(tokenizer.decode([token], skip_special_tokens=False) for token in ids)
    for character, escape in (("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        line = line.replace(character, escape)
    while "  " in line:
        line = line.replace("  ", " ")
    found = normaliser_of("ultra_fineweb", byte_level)(text)
    assert found == line.strip()
    assert "\n" not in found


@given(
    st.lists(
        st.sampled_from(["the", "The", " ", "  ", "\n", "x1", "'s", ".", "\u00e9", "\u8a9e", "\u00b2"]), max_size=30
    )
)
def test_a_long_text_in_parts_reads_as_the_whole(byte_level: Path, pieces: list[str]) -> None:
    whole, parts = UltraFineWeb(byte_level), UltraFineWeb(byte_level)
    parts._part_characters = 3
    text = "".join(pieces)
    assert parts(text) == whole(text)


def test_the_parts_of_a_long_text_are_short(byte_level: Path) -> None:
    form = UltraFineWeb(byte_level)
    form._part_characters = 10
    parts = list(form._parts("the cell divides. 12 of them, and more of them"))
    assert parts == ["the cell divides. 12 of", " them, and", " more of them"]


def test_normalisers_are_named(tmp_path: Path) -> None:
    assert normaliser_of("dclm") is join_lines
    with pytest.raises(ValueError, match=r"'other' is none of: dclm, ultra_fineweb"):
        normaliser_of("other")
    with pytest.raises(ValueError, match=r"needs the model's tokenizer\.json; set models\.ultra_tokenizer"):
        normaliser_of("ultra_fineweb")
    (tmp_path / "t.json").write_text("{")
    for name in ("t.json", "absent.json"):
        with pytest.raises(ValueError, match=rf"{name}: not a tokenizer\.json .*models\.ultra_tokenizer"):
            normaliser_of("ultra_fineweb", tmp_path / name)
