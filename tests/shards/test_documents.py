"""Source rows under the ids of raw_shards: equal lengths, the same order, whatever the batches."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.schemas import RAW, InconsistentFiles, ShardReplaced
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file


def reader_of(folder: Path, present: list[bool], group_rows: int = 4) -> DocumentReader:
    """A shard of which raw_shards kept the rows marked present."""
    (folder / "source" / "S").mkdir(parents=True)
    texts = [f"text {k}" for k in range(len(present))]
    table = pa.table({"text": pa.array(texts, pa.string()), "n": pa.array(range(len(present)), pa.int64())})
    pq.write_table(table, folder / "source" / "S" / "a.parquet", row_group_size=group_rows)
    source = Source(str(folder / "source"))
    (shard,) = source.shards("S")
    rows = [k for k, here in enumerate(present) if here]
    columns = {"doc_id": [f"d{k}" for k in rows], "row": rows}
    nulls = {name: pa.nulls(len(rows), RAW.field(name).type) for name in ("decision", "reason", "token_count")}
    store = Store(folder / "root")
    with store.generation("raw_shards", "S", code_version="1", settings={}, inputs={}) as generation:
        with table_file(generation.folder / "a.parquet", RAW, group_rows) as writer:
            writer.write(pa.table(columns | nulls, schema=RAW))
        record = generation.complete(
            "a",
            ".parquet",
            rows=len(rows),
            rows_in=len(present),
            counts={},
            source={"content": source.content(shard)},
        )
        return DocumentReader(source, generation.publish([record], ".parquet", {}))


@settings(max_examples=30, deadline=None)
@given(present=st.lists(st.booleans(), max_size=25), rows=st.integers(1, 9), group_rows=st.integers(1, 9))
def test_every_id_comes_with_its_own_text(
    tmp_path_factory: pytest.TempPathFactory, present: list[bool], rows: int, group_rows: int
) -> None:
    reader = reader_of(tmp_path_factory.mktemp("documents"), present, group_rows)
    seen = []
    for batch in reader.batches("a", ["text"], rows):
        assert len(batch.ids) == len(batch.rows) <= rows
        assert batch.rows.column_names == ["text"]
        seen += zip(batch.ids.to_pylist(), batch.rows["text"].to_pylist(), strict=True)
    assert seen == [(f"d{k}", f"text {k}") for k, here in enumerate(present) if here]


def test_all_columns_where_none_are_named(tmp_path: Path) -> None:
    (batch,) = reader_of(tmp_path, [True, False]).batches("a", None)
    assert batch.rows.to_pydict() == {"text": ["text 0"], "n": [0]}


def test_a_rewritten_or_lost_shard_is_refused(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, [True])
    with pytest.raises(InconsistentFiles, match="shard b of S is gone since raw_shards read it"):
        reader.shard("b")
    pq.write_table(pa.table({"text": ["longer than it was before"]}), tmp_path / "source" / "S" / "a.parquet")
    with pytest.raises(InconsistentFiles, match=r"a\.parquet was rewritten since raw_shards read it"):
        next(reader.batches("a", None))


def test_a_shard_rewritten_while_it_is_read_is_noticed_at_its_end(tmp_path: Path) -> None:
    batches = reader_of(tmp_path, [True] * 4, group_rows=2).batches("a", ["text"], 2)
    assert next(batches).ids.to_pylist() == ["d0", "d1"]
    path = tmp_path / "source" / "S" / "a.parquet"
    with path.open("r+b") as file:
        # in place, as a store without atomic replacement does it
        file.seek(0, 2)
        file.write(b"more")
    assert next(batches).ids.to_pylist() == ["d2", "d3"]
    with pytest.raises(InconsistentFiles, match=r"a\.parquet was rewritten since raw_shards read it"):
        next(batches)


def test_a_shard_that_a_listing_lacked_is_looked_for_again(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, [True])
    reader._shards.clear()
    assert reader.shard("a").name == "a"


def test_another_version_that_came_and_went_while_it_was_read_is_no_shard_s_text(tmp_path: Path) -> None:
    """The content is proved before and after; in between anything may have been read, which the file's time tells."""
    reader = reader_of(tmp_path, [True] * 8)
    path = tmp_path / "source" / "S" / "a.parquet"
    own = path.read_bytes()
    batches = reader.batches("a", ["text"], 4)
    next(batches)
    path.write_bytes(bytes(len(own)))
    path.write_bytes(own)
    with pytest.raises(ShardReplaced, match=r"a\.parquet was written anew while it was read"):
        list(batches)
    assert len(list(reader.batches("a", ["text"], 4))) == 2
