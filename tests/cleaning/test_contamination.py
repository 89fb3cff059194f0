"""Words against a plain reading of Unicode, matches against brute force, recall and precision on injected texts."""

import gzip
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask import keyed
from dagster_datamask.cleaning import contamination
from dagster_datamask.cleaning.contamination import (
    EvaluationIndex,
    EvaluationSet,
    Match,
    read_evaluation_sets,
    word_at,
    words_of,
)

SHARED = Path(__file__).parents[3] / "shared" / "data"
shared_only = pytest.mark.skipif(not SHARED.exists(), reason="the shared data sets are not beside this checkout")
ALPHABET = (
    "abAB É é e\u0301 ß ﬁ ² １ ' ’ - _ . , \u00ad \u200b \u2028 \n 中 文 カ ｶﾞ が か\u3099 ー 한 \u1112\u1161\u11ab "
    "ก ็ 😀 ❤\ufe0f ½"
)
TOKENS = [*ALPHABET.split(" "), " "]


def plain(text: str) -> list[str]:
    """The words of a text as NFKC and Python's own classes of characters say, one character at a time."""
    words: list[str] = []
    open_ = False
    for sign in unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text).replace("⁄", "").casefold()):
        kind = unicodedata.category(sign)
        if sign in "'’ʼ" or (kind == "Cf" and sign != "\u200b") or kind == "Me" or sign == "\ufe0f":
            continue
        if kind[0] == "M":
            if open_:
                words[-1] += sign
        elif kind[0] in "LN":
            alone = unicodedata.name(sign, "").startswith(("CJK", "HIRAGANA", "KATAKANA"))
            if alone or not open_ or unicodedata.name(words[-1][0], "").startswith(("CJK", "HIRAGANA", "KATAKANA")):
                words.append(sign)
            else:
                words[-1] += sign
            open_ = True
        else:
            open_ = False
    return words


def read(texts: Sequence[str]) -> list[list[str]]:
    """The words that `words_of` finds, by text."""
    found = words_of(texts)
    return [[word_at(text, int(start))[0] for start in found.starts[found.texts == k]] for k, text in enumerate(texts)]


def index(texts: Sequence[str], n: int = 13) -> EvaluationIndex:
    return EvaluationIndex([EvaluationSet("set.jsonl", [[text] for text in texts], "")], n)


def numbered(count: int, word: str = "w") -> str:
    return " ".join(f"{word}{k}" for k in range(count))


@given(st.lists(st.lists(st.sampled_from(TOKENS), max_size=30).map("".join), max_size=4))
@settings(max_examples=300, deadline=None)
def test_words_are_those_of_a_plain_reading(texts: list[str]) -> None:
    words = [plain(text) for text in texts]
    assert read(texts) == words
    pairs = list(zip([word for one in words for word in one], words_of(texts).hashes.tolist(), strict=True))
    assert all((one == other) == (a == b) for one, a in pairs for other, b in pairs)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \n\u2028\t...!?", []),
        ("Word", ["word"]),
        ("It's “well-known” — isn’t it?", ["its", "well", "known", "isnt", "it"]),
        ("'quoted' snake_case", ["quoted", "snake", "case"]),
        ("ＦＵＬＬ width ﬁne x²", ["full", "width", "fine", "x2"]),
        ("STRASSE Straße", ["strasse", "strasse"]),
        ("zero\u200bwidth soft\u00adhyphen", ["zero", "width", "softhyphen"]),
        ("中文 text中文", ["中", "文", "text", "中", "文"]),
        ("Ｗ杯2026年", ["w", "杯", "2026", "年"]),
        ("ｶﾞ ガ", ["カ\u3099", "カ\u3099"]),
        ("❤\ufe0f \u0301 😀", []),
        ("\u0301a", ["a"]),
        ("''''a''''b", ["ab"]),
    ],
)
def test_known_words(text: str, words: list[str]) -> None:
    assert read([text]) == [words]


def test_a_word_is_one_word_however_it_is_written() -> None:
    for variants in (
        ["café", "CAFÉ", "cafe\u0301", "ｃａｆé", "ca\u00adfé"],
        ["한글", "\u1112\u1161\u11ab\u1100\u1173\u11af"],
        ["don't", "don’t", "DONT"],
        ["ΟΔΟΣ", "οδος", "οδοσ"],
    ):
        assert len(set(words_of(variants).hashes.tolist())) == 1
    assert (
        len(set(words_of(["ab", "ba", "a", "b", "aab", "cafe", "café", "a\u0301b", "ab\u0301"]).hashes.tolist())) == 9
    )


def test_a_span_is_of_the_text_as_it_is_stored() -> None:
    text = "Before. It’s the CAFE\u0301’s  twelve-word\n\nsentence, «quoted» at its end!' After"
    item = "it's the café's twelve word sentence quoted at"
    (match,) = index([item], 8).matches([text])
    assert match == Match(
        "set.jsonl", 0, 8, text.index(" its end"), " ".join(plain("It's the café's twelve word sentence quoted at"))
    )
    assert text[match.start : match.end] == "It’s the CAFE\u0301’s  twelve-word\n\nsentence, «quoted» at"


def test_the_run_goes_on_as_far_as_it_is_shared() -> None:
    item = numbered(40)
    text = f"x {numbered(30)} y"
    (match,) = index([item]).matches([text])
    assert (match.start, match.end, match.words) == (2, len(text) - 2, numbered(30))


@pytest.mark.parametrize("n", [2, 5, 13])
def test_n_words_match_and_one_fewer_or_one_changed_do_not(n: int) -> None:
    found = index([numbered(60)], n)
    words = numbered(60).split()
    assert found.matches([" ".join(words[7 : 7 + n])])[0] is not None
    assert found.matches([" ".join(words[7 : 6 + n])]) == [None]
    for changed in range(n):
        near = words[7 : 7 + n]
        near[changed] = "other"
        assert found.matches([" ".join(near)]) == [None]
    assert found.matches([" ".join(reversed(words))]) == [None]


def test_runs_do_not_cross_texts_nor_items() -> None:
    words = numbered(13).split()
    whole = " ".join(words)
    assert index([whole]).matches([" ".join(words[:6]), " ".join(words[6:])]) == [None, None]
    assert index([" ".join(words[:6]), " ".join(words[6:])]).matches([whole]) == [None]


@pytest.mark.parametrize(("size", "matched"), [(7, False), (8, True), (12, True), (13, True)])
def test_a_short_text_counts_where_it_is_whole(size: int, matched: bool) -> None:
    found = index([numbered(size)])
    assert (found.matches([f"x {numbered(size)} y"])[0] is not None) == matched
    assert found.matches([f"x {numbered(size - 1)} y"]) == [None]
    (facts,) = found.facts
    assert facts == {
        "evaluation_set": "set.jsonl",
        "items": 1,
        "texts": 1,
        "matched_whole": int(8 <= size < 13),
        "too_short": int(size < 8),
    }


def test_chinese_text_without_spaces_is_read_by_the_character() -> None:
    item = "这是一个用来评估语言模型的句子"
    found = index([item])
    assert found.matches([f"前面的话。{item[:13]}，后面"])[0] == Match("set.jsonl", 0, 5, 18, " ".join(item[:13]))
    assert found.matches([f"前面的话。{item[:12]}，后面"]) == [None]


def test_the_first_run_then_the_earliest_set_and_row_are_named() -> None:
    sets = [
        EvaluationSet("a", [["short"], [numbered(20, "b"), numbered(20, "a")]], ""),
        EvaluationSet("b", [[numbered(20, "a")], [numbered(20, "a")]], ""),
    ]
    found = EvaluationIndex(sets, 13)
    (match,) = found.matches([f"{numbered(20, 'a')} {numbered(20, 'b')}"])
    assert (match.evaluation_set, match.item, match.start) == ("a", 1, 0)
    assert [facts["texts"] for facts in found.facts] == [3, 1]


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=25).map(" ".join), max_size=4),
    st.lists(st.lists(st.sampled_from("abc"), max_size=25).map(" ".join), max_size=4),
    st.integers(2, 10),
)
@settings(max_examples=200, deadline=None)
def test_against_brute_force(items: list[str], texts: list[str], n: int) -> None:
    def first(text: str) -> int | None:
        words = text.split()
        for at in range(len(words)):
            for item in items:
                other = item.split()
                size = min(n, len(other))
                if size >= min(n, 8) and any(
                    words[at : at + size] == other[k : k + size] and at + size <= len(words)
                    for k in range(len(other) - size + 1)
                ):
                    return 2 * at
        return None

    found = index(items, n).matches(texts)
    assert [None if match is None else match.start for match in found] == [first(text) for text in texts]
    for match, text in zip(found, texts, strict=True):
        if match is not None:
            assert text[match.start : match.end] == match.words
            assert match.words in items[match.item]


def test_equal_hashes_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contamination, "_avalanche", lambda h: np.zeros_like(h))
    found = index([numbered(20), numbered(13, "v")])
    assert found.matches([numbered(30, "x"), numbered(30, "v"), "one two"])[1].item == 1
    assert found.matches([numbered(30, "x")]) == [None]


@pytest.mark.parametrize("texts", [[], [""], ["word"], ["one two"], ["\n" * 5000], ["'" * 5000], ["\u0301" * 5000]])
def test_few_words_and_none(texts: list[str]) -> None:
    assert index([numbered(20)]).matches(texts) == [None] * len(texts)
    assert index(texts).matches([numbered(20)]) == [None]
    assert EvaluationIndex([], 13).matches(texts) == [None] * len(texts)


def test_a_text_longer_than_a_piece_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{numbered(200, 'x')} {numbered(20)} {numbered(200, 'y')}"
    expected = index([numbered(20)]).matches([text, numbered(20)])
    for piece in (7, 50, 333):
        monkeypatch.setattr(contamination, "_PIECE", piece)
        assert index([numbered(20)]).matches([text, numbered(20)]) == expected
    assert expected[0].start == text.index(numbered(20))


@pytest.fixture(scope="module")
def contexts() -> list[str]:
    """Texts of real evaluation sets."""
    table = pq.read_table(SHARED / "downstream_rc0shot_500each.parquet", columns=["context"])
    texts = sorted({text for text in table["context"].to_pylist() if len(text) >= 250})
    return texts[:: max(1, len(texts) // 150)][:150]


@pytest.fixture(scope="module")
def pages() -> list[str]:
    """Real pages."""
    path = sorted((SHARED / "fineweb_layout" / "data").glob("*/*.parquet"))[0]
    return pq.read_table(path, columns=["text"])["text"].to_pylist()[:150]


@shared_only
class TestInjected:
    """Real downstream texts put into real pages."""

    def spans(self, contexts: list[str], kind: str) -> list[list[str]]:
        spans = []
        for k, context in enumerate(contexts):
            words = plain(context)
            at = int(keyed.rng(0, "span", k).integers(0, len(words) - 13))
            span = words[at : at + 13]
            if kind == "near miss":
                span[k % 13] = "zqx"
            spans.append(span)
        return spans

    @pytest.mark.parametrize("separator", [" ", "  \n", ", ", " — ", "\u00a0", "_"])
    def test_recall_of_thirteen_words_and_precision_of_near_misses(
        self, contexts: list[str], pages: list[str], separator: str
    ) -> None:
        found = index(contexts)
        clean = [page for page, match in zip(pages, found.matches(pages), strict=True) if match is None]
        assert len(clean) > 100
        for kind in ("span", "near miss"):
            injected = []
            for k, span in enumerate(self.spans(contexts, kind)):
                page = clean[k % len(clean)]
                middle = page.rfind(" ", 0, len(page) // 2) + 1
                body = separator.join(word.upper() if k % 2 else word for word in span)
                injected.append(f"{page[:middle]}\u2028zzz {body} zzz\n{page[middle:]}")
            matches = found.matches(injected)
            assert sum(match is not None for match in matches) == (len(contexts) if kind == "span" else 0)
            for match, span in zip(matches, self.spans(contexts, kind), strict=True):
                assert match is None or match.words == " ".join(span)


class TestFiles:
    def test_every_string_of_a_row_is_a_text(self, tmp_path: Path) -> None:
        row = {"question": "q", "choices": ["a", "b"], "answer": {"text": ["t"], "start": [3]}, "n": 1, "none": None}
        (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps("bare") + "\n")
        pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "b.parquet")
        (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
        found = read_evaluation_sets([str(tmp_path / name) for name in ("a.jsonl", "b.parquet", "c.jsonl.gz")])
        assert [s.name for s in found] == ["a.jsonl", "b.parquet", "c.jsonl.gz"]
        assert found[0].items == [["q", "a", "b", "t"], ["bare"]]
        assert [sorted(item) for item in found[1].items] == [["a", "b", "q", "t"]] * 2
        assert found[2].items == found[0].items[:1]
        assert len({s.revision for s in found}) == 3

    def test_the_revision_is_of_the_content(self, tmp_path: Path) -> None:
        for name in ("x", "y"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "a.jsonl").write_text('"text"\n')
        one, two = (read_evaluation_sets([str(tmp_path / name / "a.jsonl")])[0] for name in ("x", "y"))
        assert one == two
        (tmp_path / "y" / "a.jsonl").write_text('"other"\n')
        assert read_evaluation_sets([str(tmp_path / "y" / "a.jsonl")])[0].revision != one.revision

    def test_an_empty_set_holds_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("")
        assert read_evaluation_sets([str(tmp_path / "a.jsonl")])[0].items == []
        assert read_evaluation_sets([]) == []

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.csv", b"x", r"a\.csv is neither parquet nor JSON lines; name a file"),
            ("a.jsonl", b'{"a": 1}\n{"a"', r"a\.jsonl, line 2 is not JSON \(.*\); write a JSON value a line"),
            ("a.jsonl", b"\xff\xfe\n", r"a\.jsonl, line 1 is not JSON"),
            ("a.parquet", b"PAR1", r"a\.parquet cannot be read \(.*\); replace the file"),
            ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz cannot be read \(.*\); replace the file"),
            ("absent.jsonl", None, r"absent\.jsonl does not exist; correct the path"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            read_evaluation_sets([str(tmp_path / name)])
        assert "\n" not in str(caught.value)

    def test_two_files_of_one_name_are_refused(self, tmp_path: Path) -> None:
        for name in ("x", "y"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "a.jsonl").write_text('"text"\n')
        with pytest.raises(ValueError, match=r"two files are called a\.jsonl; rename one"):
            read_evaluation_sets([str(tmp_path / name / "a.jsonl") for name in ("x", "y")])
