"""Mapping a kernel over shards: counts, progress, and what is told of it."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.compute.base import INLINE, Poisoned
from dagster_datamask.compute.local import Processes
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


def mapped(root: Path, shards: dict[str, list[int]], told: Told, **options: object) -> list[ShardRecord]:
    """`run`'s kernel on workers: what it counts is shared there with what goes into the record."""
    batches = Counter[str]()

    def read(shard: str, *given: int) -> Iterator[tuple[str, int]]:
        for k in shards[shard]:
            if k < 0:
                raise ValueError(f"{k} is below zero")
            yield shard, k + sum(given)

    def kernel() -> Callable[[tuple[str, int]], tuple[pa.Table, int, dict[str, int]]]:
        def even(batch: tuple[str, int]) -> tuple[pa.Table, int, dict[str, int]]:
            shard, k = batch
            batches[shard] += 1
            return pa.table({"k": [k] if k % 2 == 0 else []}, schema=SCHEMA), 1, {"odd" if k % 2 else "even": 1}

        return even

    with Store(root).generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
        return map_shards(
            generation,
            list(shards),
            read,
            kernel,
            lambda: SCHEMA,
            ext=".parquet",
            total_rows=sum(map(len, shards.values())),
            progress=lambda done, total, shard: told.append((done, total, shard)),
            source=lambda shard: {"batches": batches[shard]},
            **options,  # type: ignore[arg-type]
        )


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2, threads=1) as place:
        yield place


SHARDS = {"x": [0, 1, 2, 3], "y": [], "z": [5], "w": [4, 6]}


def test_two_processes_give_the_records_and_files_of_one_in_the_shards_order(
    tmp_path: Path, processes: Processes
) -> None:
    records, told = {}, {}
    for name, place in (("one", INLINE), ("two", processes)):
        told[name] = []
        records[name] = mapped(tmp_path / name, SHARDS, told[name], compute=place)
        assert max(done for done, _, _ in told[name]) == told[name][-1][0] == 7
        assert {total for _, total, _ in told[name]} == {7}
    assert records["one"] == records["two"]
    assert [(record.shard, record.source) for record in records["two"]] == [
        (shard, {"batches": len(rows)}) for shard, rows in SHARDS.items()
    ]
    again: Told = []
    assert mapped(tmp_path / "two", SHARDS, again, compute=processes) == records["two"]
    assert [done for done, _, _ in again] == [4, 4, 5, 7]


def test_what_shards_are_given_is_made_here_for_the_missing_ones_alone(tmp_path: Path, processes: Processes) -> None:
    asked: list[str] = []

    def given() -> Callable[[str], int]:
        asked.append("given")
        return lambda shard: asked.append(shard) or 10

    first = {"x": SHARDS["x"]}
    mapped(tmp_path, first, [], given=given, compute=processes)
    assert asked == ["given", "x"]
    mapped(tmp_path, SHARDS, [], given=given, compute=processes)
    assert sorted(asked[2:]) == ["given", "w", "y", "z"]
    mapped(tmp_path, SHARDS, [], given=given, compute=processes)
    assert len(asked) == 6
    (folder,) = (tmp_path / "a" / "S").iterdir()
    assert pq.read_table(folder / "w.parquet")["k"].to_pylist() == [14, 16]


@pytest.mark.parametrize("place", ["inline", "processes"])
def test_an_error_names_its_shard_and_leaves_no_half_file(tmp_path: Path, processes: Processes, place: str) -> None:
    compute = INLINE if place == "inline" else processes
    with pytest.raises(ValueError, match="-1 is below zero") as caught:
        mapped(tmp_path, {"x": [0], "y": [1, -1]}, [], compute=compute)
    assert caught.value.__notes__ == ["at shard y"]
    (folder,) = (tmp_path / "a" / "S").iterdir()
    assert sorted(path.name for path in folder.glob("*.parquet")) in (["x.parquet"], [])
    assert not list(folder.glob(".*.tmp"))


def test_a_shard_that_is_lost_thrice_is_named_when_all_others_are_done(tmp_path: Path, processes: Processes) -> None:
    shards, here = {"x": [0], "bad": [1], "y": [2]}, os.getpid()

    def read(shard: str) -> Iterator[int]:
        yield from shards[shard]
        if shard == "bad":
            assert os.getpid() != here, "it would have ended this process"
            os.kill(os.getpid(), signal.SIGKILL)

    def kernel(k: int) -> tuple[pa.Table, int, dict[str, int]]:
        return pa.table({"k": [k]}, schema=SCHEMA), 1, {"all": 1}

    told: Told = []
    # and once more, when few rows are left and all of them deadly
    for _ in range(2):
        with (
            Store(tmp_path).generation("a", "S", code_version="1", settings={}, inputs={}) as generation,
            pytest.raises(Poisoned) as caught,
        ):
            map_shards(
                generation,
                list(shards),
                read,
                lambda: kernel,
                SCHEMA,
                ext=".parquet",
                total_rows=3,
                progress=lambda done, total, shard: told.append((done, total, shard)),
                compute=processes,
                inline_below=3,
            )
        assert caught.value.why == {"bad": "SIGKILL"}
        assert sorted(path.name for path in generation.folder.glob("*.parquet")) == ["x.parquet", "y.parquet"]
        # half-written files of the lost workers are cleared away
        assert not list(generation.folder.glob(".*.tmp"))
        assert max(done for done, _, _ in told) <= 3


def test_where_progress_raises_no_worker_goes_on(tmp_path: Path) -> None:
    """While the error, with its traceback, is still held."""

    def read(shard: str) -> Iterator[int]:
        if shard == "slow":
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(600)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        yield 1

    def progress(done: int, total: int, shard: str) -> None:
        raise OSError("the log is gone")

    with (
        Processes(2, threads=1) as place,
        Store(tmp_path / "root").generation("a", "S", code_version="1", settings={}, inputs={}) as generation,
    ):
        with pytest.raises(OSError, match="the log is gone") as caught:
            map_shards(
                generation,
                ["fast", "slow"],
                read,
                lambda: lambda k: (pa.table({"k": [k]}, schema=SCHEMA), 1, {"all": 1}),
                SCHEMA,
                ext=".parquet",
                total_rows=2,
                progress=progress,
                compute=place,
            )
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
        assert caught.traceback


DEADLY = """
import os, signal, sys
from functools import partial
from pathlib import Path
import pyarrow as pa
from dagster_datamask.compute.base import Poisoned
from dagster_datamask.compute.local import Processes
from dagster_datamask.shards.engine import map_shards
from dagster_datamask.shards.generations import Store

root, deadly = Path(sys.argv[1]), sys.argv[2]
schema = pa.schema([("pid", pa.int64())])

def read(shard):
    yield shard
    if shard == deadly:
        os.kill(os.getpid(), signal.SIGKILL)

def kernel(shard):
    return pa.table({"pid": [os.getpid()]}, schema=schema), 1, {"all": 1}

print(os.getpid(), flush=True)
with Store(root).generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
    try:
        map_shards(generation, ["x", "bad", "y"], read, lambda: kernel, schema, ext=".parquet", total_rows=3,
                   progress=lambda done, total, shard: None, apart=partial(Processes, 1, 1))
    except Poisoned as error:
        print(error)
"""


def test_a_shard_that_ended_a_run_is_done_apart_from_the_next(tmp_path: Path) -> None:
    """The first run ends with it; the second tells of it when all others are done; without fault it is done as any."""

    def go(deadly: str) -> tuple[int, list[str]]:
        run = subprocess.run([sys.executable, "-c", DEADLY, tmp_path, deadly], capture_output=True, text=True)
        return run.returncode, run.stdout.splitlines()

    def pids() -> dict[str, int]:
        (folder,) = (tmp_path / "a" / "S").iterdir()
        assert not list(folder.glob(".*.tmp"))
        return {path.stem: pq.read_table(path)["pid"][0].as_py() for path in folder.glob("*.parquet")}

    code, (first,) = go("bad")
    assert code == -signal.SIGKILL
    for _ in range(2):
        code, (_, *told) = go("bad")
        assert (code, told) == (0, ["the worker was lost each time it was given: bad (SIGKILL)"])
        found = pids()
        assert found.keys() == {"x", "y"} and found["x"] == int(first)
    code, (last,) = go("none")
    assert code == 0
    assert pids().keys() == {"x", "bad", "y"} and pids()["bad"] not in (int(first), int(last))
    assert not list(tmp_path.rglob(".began-*"))


def test_an_error_leaves_no_mark_of_a_shard(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="-1 is below zero"):
            mapped(tmp_path, {"x": [0], "y": [1, -1]}, [], apart=lambda: pytest.fail("it ended no process"))
        assert not list(tmp_path.rglob(".began-*"))


@pytest.mark.parametrize(("below", "used"), [(0, True), (7, True), (8, False)])
def test_few_rows_are_done_here(tmp_path: Path, processes: Processes, below: int, used: bool) -> None:
    def kernel() -> Callable[[int], tuple[pa.Table, int, dict[str, int]]]:
        pid = os.getpid()
        return lambda k: (pa.table({"k": [pid]}, schema=SCHEMA), 1, {"all": 1})

    with Store(tmp_path).generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
        map_shards(
            generation,
            list(SHARDS),
            lambda shard: SHARDS[shard],
            kernel,
            SCHEMA,
            ext=".parquet",
            total_rows=7,
            progress=lambda done, total, shard: None,
            compute=processes,
            inline_below=below,
        )
        pids = {
            pid for shard in SHARDS for pid in pq.read_table(generation.folder / f"{shard}.parquet")["k"].to_pylist()
        }
    assert (os.getpid() not in pids) is used
