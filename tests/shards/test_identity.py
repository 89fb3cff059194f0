"""Ids and duplicates against a dictionary, in partitions of a few rows."""

from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.shards import identity
from dagster_datamask.shards.identity import OWN_ROW, SAME_ROW, Duplicates, IdCollision, base_ids, hashes, renamed

SHARDS = st.lists(st.lists(st.sampled_from(["a", "b", "c", "d", "ü"]), max_size=8), max_size=5)


def found(folder: Path, shards: list[list[str]], partition_rows: int = 3, batch: int = 2) -> list[dict[int, int]]:
    """What Duplicates says of each shard, with batches and partitions of a few rows."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"s{k}" for k in range(len(shards))]

    def read(name: str):
        ids = shards[names.index(name)]
        for first in range(0, len(ids), batch):
            yield first, ids[first : first + batch]

    with mock.patch.object(identity, "_PARTITION_ROWS", partition_rows):
        duplicates = Duplicates(folder, sum(map(len, shards)))
    duplicates.find(names, read, ((name, hashes(read(name))) for name in names))
    return [duplicates.of(name) for name in names]


def expected(shards: list[list[str]]) -> list[dict[int, int]]:
    """The rule in words: every later row of an id is a duplicate; of a repeated (id, row) pair all but the first also
    take their shard's name."""
    seen: set[str] = set()
    rows: set[tuple[str, int]] = set()
    result = []
    for ids in shards:
        kinds = {}
        for row, doc_id in enumerate(ids):
            if doc_id in seen:
                kinds[row] = SAME_ROW if (doc_id, row) in rows else OWN_ROW
                rows.add((doc_id, row))
            seen.add(doc_id)
        result.append(kinds)
    return result


@settings(max_examples=60, deadline=None)
@given(shards=SHARDS, partition_rows=st.integers(1, 5), batch=st.integers(1, 4))
def test_duplicates_are_those_of_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[str]], partition_rows: int, batch: int
) -> None:
    folder = tmp_path_factory.mktemp("dup")
    result = found(folder, shards, partition_rows, batch)
    assert result == expected(shards)
    ids = [
        renamed(doc_id, row, f"s{k}", result[k][row]) if row in result[k] else doc_id
        for k, shard in enumerate(shards)
        for row, doc_id in enumerate(shard)
    ]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("shards", [[], [[]], [["a"]], [["a", "a"]], [["a"], ["a"]]])
def test_no_one_and_two_rows(tmp_path: Path, shards: list[list[str]]) -> None:
    assert found(tmp_path, shards) == expected(shards)


def test_a_shard_copied_twice_gives_three_distinct_ids(tmp_path: Path) -> None:
    kinds = found(tmp_path, [["x"], ["x"], ["x"]])
    assert [renamed("x", 0, f"s{k}", kind[0]) for k, kind in enumerate(kinds) if kind] == ["x#0", "x#0#s2"]


@pytest.mark.parametrize("partition_rows", [1, 100])
def test_an_id_made_for_a_duplicate_must_not_be_another_documents_own(tmp_path: Path, partition_rows: int) -> None:
    with pytest.raises(IdCollision, match=r"shard s1, row 0: the id 'x#0' made for this duplicate row"):
        found(tmp_path, [["x", "x#0"], ["x"]], partition_rows)


def test_finding_again_in_one_folder_starts_over(tmp_path: Path) -> None:
    assert found(tmp_path, [["a", "a"], ["a"]]) == found(tmp_path, [["a", "a"], ["a"]])
    assert found(tmp_path, [["a", "b"], ["c"]]) == [{}, {}]


def test_missing_ids_are_named_by_shard_and_row() -> None:
    ids, made = base_ids(pa.array(["a", None, "", " \t", "\u2003", "b"]), "s", 10, 6)
    assert ids == ["a", "s#11", "s#12", "s#13", "s#14", "b"]
    assert made.tolist() == [False, True, True, True, True, False]
    assert base_ids(None, "s", 0, 2)[0] == base_ids(pa.nulls(2), "s", 0, 2)[0] == ["s#0", "s#1"]
    assert base_ids(None, "s", 5, 0)[0] == []


def test_broken_bytes_keep_distinct_ids_distinct() -> None:
    ids, made = base_ids(pa.array([b"\xff", b"\xfe", b"\xf0\x9f"], pa.binary()), "s", 0, 3)
    assert len(set(ids)) == 3
    assert not made.any()
    for doc_id in ids:
        assert doc_id.encode("utf-8")
