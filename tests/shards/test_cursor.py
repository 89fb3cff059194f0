"""The streaming join against a dictionary join, and its proofs."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.shards.cursor import Cursor, read_batches, scatter
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.shards.writer import table_file

SCHEMA = pa.schema([("doc_id", pa.string()), ("value", pa.int64())])


def side_file(path: Path, ids: list[str], batch: int = 3) -> Path:
    with table_file(path, SCHEMA, group_rows=batch) as writer:
        for start in range(0, len(ids), batch):
            part = ids[start : start + batch]
            writer.write(pa.table({"doc_id": part, "value": [int(i) for i in part]}, schema=SCHEMA))
    return path


@settings(max_examples=50, deadline=None)
@given(
    present=st.lists(st.booleans(), max_size=20),
    asked=st.integers(1, 6),
    rows=st.integers(1, 6),
    ext=st.sampled_from([".parquet", ".arrow"]),
)
def test_taking_by_batches_is_a_dictionary_join(
    tmp_path_factory: pytest.TempPathFactory, present: list[bool], asked: int, rows: int, ext: str
) -> None:
    ids = [str(k) for k in range(len(present))]
    kept = [i for i, here in zip(ids, present, strict=True) if here]
    cursor = Cursor(side_file(tmp_path_factory.mktemp("c") / f"side{ext}", kept), None, rows)
    joined: dict[str, int] = {}
    for start in range(0, len(ids), asked):
        batch = ids[start : start + asked]
        table, positions = cursor.take(pa.array(batch, pa.string()))
        assert [batch[p] for p in positions] == table["doc_id"].to_pylist()
        joined |= dict(zip(table["doc_id"].to_pylist(), table["value"].to_pylist(), strict=True))
    cursor.end()
    assert joined == {i: int(i) for i in kept}


@pytest.mark.parametrize("ext", [".parquet", ".arrow"])
@pytest.mark.parametrize("ids", [[], ["0"], ["0", "1"]])
def test_taking_all_of_no_one_and_two_rows(tmp_path: Path, ids: list[str], ext: str) -> None:
    cursor = Cursor(side_file(tmp_path / f"side{ext}", ids), None, 2)
    table = cursor.take_all(pa.array(ids, pa.string()))
    cursor.end()
    assert table["doc_id"].to_pylist() == ids
    assert table.schema.equals(SCHEMA)


def test_a_missing_id_is_named(tmp_path: Path) -> None:
    cursor = Cursor(side_file(tmp_path / "side.parquet", ["0", "2"]), None, 2)
    with pytest.raises(InconsistentFiles, match="has no row for doc_id '1'"):
        cursor.take_all(pa.array(["0", "1", "2"]))


def test_rows_out_of_order_or_repeated_are_refused(tmp_path: Path) -> None:
    for name, ids in (("order", ["1", "0"]), ("repeat", ["0", "0"])):
        cursor = Cursor(side_file(tmp_path / f"{name}.parquet", ids), None, 4)
        with pytest.raises(InconsistentFiles, match="out of order or repeated"):
            cursor.take(pa.array(["0", "1"]))


@pytest.mark.parametrize("ids", [["0", "9", "1"], ["9", "0", "1"], ["0", "1", "9"], ["0", "1", "1"]])
def test_a_row_nobody_asked_for_never_passes(tmp_path: Path, ids: list[str]) -> None:
    cursor = Cursor(side_file(tmp_path / "side.parquet", ids), None, 2)
    with pytest.raises(InconsistentFiles, match=r"side\.parquet"):
        for one in ("0", "1"):
            cursor.take(pa.array([one]))
        cursor.end()


def test_scatter_puts_values_in_place_and_null_elsewhere() -> None:
    values = pa.chunked_array([[7], [8]], pa.int64())
    assert scatter(values, np.array([2, 0]), 4).to_pylist() == [8, None, 7, None]
    assert scatter(pa.chunked_array([], pa.int64()), np.empty(0, np.int64), 2).to_pylist() == [None, None]
    assert scatter(pa.chunked_array([], pa.int64()), np.empty(0, np.int64), 0).to_pylist() == []


@pytest.mark.parametrize("ext", [".parquet", ".arrow"])
def test_batches_hold_at_most_the_rows_asked_for(tmp_path: Path, ext: str) -> None:
    path = side_file(tmp_path / f"side{ext}", [str(k) for k in range(10)], batch=4)
    tables = list(read_batches(path, ["value"], 3))
    assert max(map(len, tables)) <= 3
    assert pa.concat_tables(tables)["value"].to_pylist() == list(range(10))
    assert tables[0].column_names == ["value"]
