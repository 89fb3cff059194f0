"""Splits: every row in exactly one, none too large, and the way back to the shards' order."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.shards import shuffle
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.writer import table_file

ROWS = pa.schema([("shard", pa.int32()), ("ordinal", pa.int64()), ("doc_id", pa.string())])


def ids_of(n: int) -> list[str]:
    return [f"doc-{k}" for k in range(n)]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 60), most=st.integers(1, 70), seed=st.integers(0, 3), batch=st.integers(1, 9))
def test_every_row_is_in_one_split_of_at_most_that_size(n: int, most: int, seed: int, batch: int) -> None:
    ids = ids_of(n)
    splits = shuffle.plan((ids[k : k + batch] for k in range(0, n, batch)), most, seed)
    where = splits.of(ids)
    assert np.bincount(where, minlength=len(splits.sizes)).tolist() == list(splits.sizes)
    assert max(splits.sizes) <= most
    assert len(splits.sizes) >= max(1, -(-n // most))
    # membership is a matter of the id alone
    assert (shuffle.plan([ids[::-1]], most, seed).of(ids) == where).all()


def test_splits_are_of_nearly_equal_size_and_differ_by_seed() -> None:
    ids = ids_of(3000)
    splits = shuffle.plan([ids], 1000, 0)
    assert splits.sizes == (1000, 1000, 1000)
    assert (shuffle.plan([ids], 1000, 1).of(ids) != splits.of(ids)).any()


def test_a_split_smaller_than_one_hash_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"select\.split = 1 is too small for 2 documents; raise it"):
        shuffle.plan([["same", "same"]], 1, 0)


@pytest.mark.parametrize(("shards", "most"), [([0], 1), ([1], 1), ([2], 1), ([7, 0, 1, 30], 6), ([25, 25], 100)])
def test_there_and_back_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: list[int], most: int) -> None:
    tables = [
        pa.table({"shard": [s] * n, "ordinal": range(n), "doc_id": [f"{s}/{k}" for k in range(n)]}, schema=ROWS)
        for s, n in enumerate(shards)
    ]
    splits = shuffle.plan([t["doc_id"].to_pylist() for t in tables], most, 0)
    paths = shuffle.scatter(tmp_path, ROWS, splits, lambda: iter(tables))
    results = []
    for path, size in zip(paths, splits.sizes, strict=True):
        rows = pa.concat_tables([ROWS.empty_table(), *read_batches(path, None, 100)])
        assert len(rows) == size
        results.append(path.with_suffix(".parquet"))
        with table_file(results[-1], ROWS) as writer:
            writer.write(rows.sort_by([("shard", "ascending"), ("ordinal", "ascending")]))
    monkeypatch.setattr(shuffle, "_BLOCK_ROWS", 4)
    monkeypatch.setattr(shuffle, "_READ_ROWS", 3)
    gathered = shuffle.Gather(results)
    for s, table in enumerate(tables):
        if s == 1:
            continue  # a resumed run asks only for the shards that are missing
        blocks = list(gathered.shard(s, ["doc_id"]))
        assert all(0 < len(block) <= 4 for block in blocks)
        assert [i for block in blocks for i in block["doc_id"].to_pylist()] == table["doc_id"].to_pylist()
