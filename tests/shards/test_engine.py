"""Mapping a kernel over shards: counts, progress, and what is told of it."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.shards import engine
from dagster_datamask.shards.engine import every_seconds, map_shards, peak_memory_mb
from dagster_datamask.shards.generations import ShardRecord, Store

SCHEMA = pa.schema([("k", pa.int64())])
Told = list[tuple[int, int, str]]


def run(root: Path, shards: dict[str, list[int]], told: Told, schema: object = SCHEMA) -> list[ShardRecord]:
    """A kernel that writes the even numbers and counts both kinds, a batch per number."""

    def kernel(k: int) -> tuple[pa.Table, int, dict[str, int]]:
        return pa.table({"k": [k] if k % 2 == 0 else []}, schema=SCHEMA), 1, {"odd" if k % 2 else "even": 1}

    with Store(root).generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
        return map_shards(
            generation,
            list(shards),
            lambda shard: shards[shard],
            lambda: kernel,
            schema,
            ext=".parquet",
            total_rows=sum(map(len, shards.values())),
            progress=lambda done, total, shard: told.append((done, total, shard)),
            source=lambda shard: {"from": shard},
        )


def test_rows_are_written_and_counted_by_reason(tmp_path: Path) -> None:
    records = run(tmp_path, {"x": [0, 1, 2], "y": [], "z": [3]}, [])
    assert [(r.shard, r.rows, r.rows_in, r.counts) for r in records] == [
        ("x", 2, 3, {"even": 2, "odd": 1}),
        ("y", 0, 0, {}),
        ("z", 0, 1, {"odd": 1}),
    ]
    assert [r.source for r in records] == [{"from": "x"}, {"from": "y"}, {"from": "z"}]
    (folder,) = (path for path in (tmp_path / "a" / "S").iterdir())
    assert pq.read_table(folder / "x.parquet")["k"].to_pylist() == [0, 2]
    assert pq.read_schema(folder / "y.parquet").equals(SCHEMA)


def test_progress_goes_on_from_what_was_done_before(tmp_path: Path) -> None:
    first: Told = []
    run(tmp_path, {"x": [0, 1], "y": [2]}, first)
    assert first == [(1, 3, "x"), (2, 3, "x"), (2, 3, "x"), (3, 3, "y"), (3, 3, "y")]
    again: Told = []
    run(tmp_path, {"x": [0, 1], "y": [2]}, again)
    assert again == [(2, 3, "x"), (3, 3, "y")]


def test_a_schema_that_costs_something_is_made_once_and_only_if_needed(tmp_path: Path) -> None:
    made = []

    def schema() -> pa.Schema:
        made.append(1)
        return SCHEMA

    run(tmp_path, {"x": [0], "y": [2]}, [], schema)
    run(tmp_path, {"x": [0], "y": [2]}, [], schema)
    assert made == [1]


def test_no_shards_no_records(tmp_path: Path) -> None:
    assert run(tmp_path, {}, []) == []


def test_progress_is_told_at_most_once_in_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: now[0])
    told: list[str] = []
    progress = every_seconds(told.append, "raw_shards S", seconds=5.0)
    for at, done in ((101.0, 10), (105.0, 2000), (106.0, 2500), (110.0, 4000)):
        now[0] = at
        progress(done, 8000, "x")
    assert told == [
        "raw_shards S: 2,000 of 8,000 rows (25%), 400 rows/s, x",
        "raw_shards S: 4,000 of 8,000 rows (50%), 400 rows/s, x",
    ]
    now[0] = 120.0
    progress(0, 0, "x")
    assert told[-1].startswith("raw_shards S: 0 of 0 rows, ")


def test_peak_memory_is_that_of_a_process() -> None:
    assert 10 < peak_memory_mb() < 1_000_000
