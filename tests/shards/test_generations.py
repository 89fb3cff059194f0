"""Publishing by pointer, leases between processes, and what gc may remove."""

import json
import multiprocessing as mp
import os
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pytest

from dagster_datamask.shards.engine import map_shards
from dagster_datamask.shards.generations import Generation, NotPublished, Published, Store
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.shards.writer import table_file

SCHEMA = pa.schema([("doc_id", pa.string())])


def publish(
    store: Store, value: int, *, asset: str = "a", snapshot: str | None = "S", inputs: dict[str, str] | None = None
) -> Published:
    """One generation of one shard with `value` rows."""
    with store.generation(asset, snapshot, code_version="1", settings={"v": value}, inputs=inputs or {}) as generation:
        with table_file(generation.folder / "s.parquet", SCHEMA) as out:
            out.write(pa.table({"doc_id": [str(k) for k in range(value)]}, schema=SCHEMA))
        record = generation.complete("s", ".parquet", rows=value, rows_in=value, counts={"good": value})
        return generation.publish([record], ".parquet", {"value": value})


def age(published: Published, seconds: int) -> None:
    stamp = time.time() - seconds
    os.utime(published.folder, (stamp, stamp))


def test_what_is_not_published_says_what_to_do(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(NotPublished, match=r"a of snapshot S is not published under .*; materialise it first"):
        store.current("a", "S")
    with pytest.raises(NotPublished, match="run the job fit_global first"):
        store.current("a")
    assert store.published("a", "S") is None
    assert store.snapshots("a") == []


def test_readers_keep_their_generation_when_the_pointer_moves(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = publish(store, 1)
    second = publish(store, 2)
    assert first.folder != second.folder
    assert first.path("s").exists()
    assert first.record("s").rows == first.rows == 1
    assert store.current("a", "S") == second
    assert store.snapshots("a") == ["S"]


def test_an_unpublished_generation_is_never_seen(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = publish(store, 1)
    with (
        pytest.raises(RuntimeError, match="before publishing"),
        store.generation("a", "S", code_version="2", settings={}, inputs={}) as generation,
    ):
        with table_file(generation.folder / "s.parquet", SCHEMA) as out:
            out.write(pa.table({"doc_id": ["x"]}, schema=SCHEMA))
        raise RuntimeError("before publishing")
    assert store.current("a", "S") == first


def test_the_fingerprint_depends_on_each_of_its_parts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    base: dict = {"code_version": "1", "settings": {"k": 1}, "inputs": {"i": "x"}}
    variants = [
        ("a", "S", base),
        ("b", "S", base),
        ("a", "T", base),
        ("a", None, base),
        ("a", "S", base | {"code_version": "2"}),
        ("a", "S", base | {"settings": {"k": 2}}),
        ("a", "S", base | {"inputs": {"i": "y"}}),
    ]
    seen = set()
    for asset, snapshot, parts in variants:
        with store.generation(asset, snapshot, **parts) as generation:
            seen.add(generation.fingerprint)
    assert len(seen) == len(variants)


def test_a_record_is_valid_only_for_a_file_of_its_size(tmp_path: Path) -> None:
    store = Store(tmp_path)
    published = publish(store, 3)
    with store.generation("a", "S", code_version="1", settings={"v": 3}, inputs={}) as generation:
        assert generation.folder == published.folder
        assert generation.record("s", ".parquet") == published.record("s")
        assert generation.record("other", ".parquet") is None
        published.path("s").write_bytes(b"cut")
        assert generation.record("s", ".parquet") is None
        published.path("s").unlink()
        assert generation.record("s", ".parquet") is None


def test_only_shards_without_a_valid_record_are_computed_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    built: list[str] = []
    seen: list[str] = []

    def kernel():
        built.append("kernel")
        return lambda batch: (seen.append(batch) or pa.table({"doc_id": [batch]}, schema=SCHEMA), 1, {"good": 1})

    def run() -> None:
        with store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
            map_shards(
                generation,
                ["x", "y"],
                lambda shard: [shard],
                kernel,
                SCHEMA,
                ext=".parquet",
                total_rows=2,
                progress=lambda done, total, shard: None,
            )

    run()
    run()
    assert (built, seen) == (["kernel"], ["x", "y"])
    (folder,) = (p for p in (tmp_path / "a" / "S").iterdir() if p.is_dir())
    (folder / "y.parquet").write_bytes(b"")
    (folder / ".y.parquet.1.tmp").touch()
    run()
    assert (built, seen) == (["kernel", "kernel"], ["x", "y", "y"])
    assert not list(folder.glob("*.tmp"))


def test_a_failing_kernel_leaves_finished_shards_and_no_temp(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def kernel(batch: str):
        if batch == "y":
            raise RuntimeError("kernel")
        return pa.table({"doc_id": [batch]}, schema=SCHEMA), 1, {"good": 1}

    with (
        pytest.raises(RuntimeError, match="kernel"),
        store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation,
    ):
        map_shards(
            generation,
            ["x", "y"],
            lambda shard: [shard],
            lambda: kernel,
            SCHEMA,
            ext=".parquet",
            total_rows=2,
            progress=lambda done, total, shard: None,
        )
    assert sorted(p.name for p in generation.folder.iterdir()) == [
        ".inputs.json",
        ".lease",
        ".work",
        "x.parquet",
        "x.parquet.done.json",
    ]
    assert store.published("a", "S") is None


def test_publishing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    trees = []
    for root in (tmp_path / "one", tmp_path / "two"):
        publish(Store(root), 2)
        publish(Store(root), 2)
        trees.append({p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()})
    assert trees[0] == trees[1]


def _hold(root: Path, ready: "mp.synchronize.Event", go: "mp.synchronize.Event") -> None:
    with Store(root).generation("a", "S", code_version="1", settings={"v": 1}, inputs={}):
        ready.set()
        go.wait(600)


@pytest.mark.parametrize("how", ["finishes", "is killed"])
def test_a_second_process_waits_until_the_first(tmp_path: Path, how: str) -> None:
    context = mp.get_context("spawn")
    ready, go = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready, go))
    holder.start()
    assert ready.wait(300)
    told: list[str] = []

    def waiting(message: str) -> None:
        told.append(message)
        assert holder.is_alive()
        if how == "finishes":
            go.set()
        else:
            os.kill(holder.pid, signal.SIGKILL)

    with Store(tmp_path).generation("a", "S", code_version="1", settings={"v": 1}, inputs={}, waiting=waiting):
        holder.join(300)
        assert holder.exitcode == (0 if how == "finishes" else -signal.SIGKILL)
    assert len(told) == 1
    assert "another run is writing" in told[0]


def test_other_fingerprints_do_not_wait(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.generation("a", "S", code_version="1", settings={"v": 1}, inputs={}):
        publish(store, 2)
    assert store.current("a", "S").rows == 2


def test_gc_keeps_the_newest_and_what_pointers_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = [publish(store, value) for value in (1, 2, 3, 4)]
    for k, published in enumerate(made):
        age(published, 1000 - k)
    publish(store, 1)
    age(made[0], 5000)
    removed = store.gc(keep=2)
    # the pointer's, though the oldest by time, and one more: the newest of the others
    assert [made[0].folder.exists(), *(p.folder.exists() for p in made[1:])] == [True, False, False, True]
    assert {path for path, _ in removed} == {f"a/S/{p.fingerprint}" for p in made[1:3]}
    assert all(size > 0 for _, size in removed)
    assert store.gc(keep=2) == []
    with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
        store.gc(keep=0)


def test_gc_keeps_what_a_current_generation_was_made_from(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old = publish(store, 1)
    publish(store, 5, asset="b", inputs={"a": old.fingerprint})
    publish(store, 2)
    age(old, 1000)
    assert store.gc(keep=1) == []
    publish(store, 6, asset="b", inputs={"a": store.current("a", "S").fingerprint})
    assert f"a/S/{old.fingerprint}" in [path for path, _ in store.gc(keep=1)]


def test_gc_leaves_what_a_run_is_writing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    publish(store, 1)
    with store.generation("a", "S", code_version="1", settings={"v": 9}, inputs={}) as generation:
        os.utime(generation.folder, (0, 0))
        assert store.gc(keep=1) == []
        assert generation.folder.exists()
    os.utime(generation.folder, (0, 0))
    assert [path for path, _ in store.gc(keep=1)] == [f"a/S/{generation.fingerprint}"]


def test_gc_of_an_empty_root_removes_nothing(tmp_path: Path) -> None:
    assert Store(tmp_path).gc(keep=1) == []
    assert Store(tmp_path / "absent").gc(keep=1) == []


def test_a_stale_temp_of_the_pointer_goes_with_the_next_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    published = publish(store, 1)
    (published.folder / ".current.json.1.tmp").write_text("{")
    publish(store, 1)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        ".inputs.json",
        ".lease",
        "current.json",
        "s.parquet",
        "s.parquet.done.json",
    ]
    assert json.loads((tmp_path / "a" / "S" / "current.json").read_text())["fingerprint"] == published.fingerprint


def test_gc_keeps_what_a_running_stage_reads(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old = publish(store, 1)
    age(old, 100)
    publish(store, 2)
    with store.generation("b", "S", code_version="1", settings={}, inputs={"a": old.fingerprint}):
        assert store.gc(1) == []
    assert [path for path, _ in store.gc(1)] == [f"a/S/{old.fingerprint}"]


def test_gc_looks_again_before_it_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    old = publish(store, 1)
    age(old, 100)
    publish(store, 2)
    wanted = Store._wanted
    calls: list[int] = []

    def and_then_the_old_setting_comes_back(self: Store) -> set[str]:
        found = wanted(self)
        calls.append(1)
        if len(calls) == 1:
            publish(store, 1)
        return found

    monkeypatch.setattr(Store, "_wanted", and_then_the_old_setting_comes_back)
    assert store.gc(1) == []
    assert store.current("a", "S").path("s").exists()


def test_what_a_killed_gc_left_goes_with_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path)
    current = publish(store, 1)
    trash = current.folder.with_name(".trash-0123")
    trash.mkdir()
    (trash / "half").write_text("")
    assert store.gc(2) == []
    assert not trash.exists()
    assert current.path("s").exists()


def test_a_shard_made_from_the_same_is_taken_over(tmp_path: Path) -> None:
    store = Store(tmp_path)
    computed: list[str] = []

    def run(version: str, origins: dict[str, str]) -> Published:
        with store.generation("a", "S", code_version=version, settings={}, inputs={}) as generation:
            records = map_shards(
                generation,
                list(origins),
                lambda shard: [shard],
                lambda: (
                    lambda shard: (
                        computed.append(shard) or pa.table({"doc_id": [origins[shard]]}, schema=SCHEMA),
                        1,
                        {"good": 1},
                    )
                ),
                SCHEMA,
                ext=".parquet",
                total_rows=len(origins),
                progress=lambda done, total, shard: None,
                origin=lambda shard: origins[shard],
            )
            return generation.publish(records, ".parquet", {})

    first = run("1", {"x": "old", "y": "old"})
    second = run("2", {"x": "old", "y": "new", "z": "old"})
    assert computed == ["x", "y", "y", "z"]
    assert second.path("x").samefile(first.path("x"))
    assert second.record("x") == first.record("x")
    assert (second.rows, second.counts) == (3, {"good": 3})


@pytest.mark.parametrize("left", [b"", b'{"bytes": 1', b"[]", b'{"shard": "s"}'])
def test_a_torn_record_tells_of_nothing(tmp_path: Path, left: bytes) -> None:
    """What a disk that lied about fsync leaves of a record after a power failure: its shard is made again."""
    store = Store(tmp_path)
    first = publish(store, 3)
    (first.folder / "s.parquet.done.json").write_bytes(left)
    with store.generation("a", "S", code_version="1", settings={"v": 3}, inputs={}) as generation:
        assert generation.folder == first.folder
        assert generation.record("s", ".parquet") is None
        assert generation.adopt("s", ".parquet", "origin") is None
    assert publish(store, 3) == first
    assert first.record("s").rows == 3


def test_a_damaged_shard_is_not_taken_over_but_made_again_or_taken_from_another(tmp_path: Path) -> None:
    """Bytes of the recorded size that are not what was recorded; and a file that is gone."""
    store = Store(tmp_path)

    def of(version: str) -> AbstractContextManager[Generation]:
        return store.generation("a", "S", code_version=version, settings={}, inputs={})

    folders = []
    for version in "123":
        with of(version) as generation:
            (generation.folder / "s.bin").write_bytes(b"whole")
            record = generation.complete("s", ".bin", rows=1, rows_in=1, counts={"good": 1}, origin="same")
            folders.append(generation.folder)
    folders.sort()
    (folders[0] / "s.bin").unlink()
    (folders[1] / "s.bin").write_bytes(b"wrong")
    with of("4") as generation:
        assert generation.adopt("s", ".bin", "same") == record
        assert generation.path("s", ".bin").read_bytes() == b"whole"
    for folder in (folders[2], generation.folder):
        (folder / "s.bin").unlink()
        (folder / "s.bin").write_bytes(b"wrong")
    with of("5") as generation:
        assert generation.adopt("s", ".bin", "same") is None


def test_a_record_whose_file_is_gone_does_not_speak_for_the_next_file(tmp_path: Path) -> None:
    """Made again with other bytes of the same size, and cut off before its own record."""
    store = Store(tmp_path)
    first = publish(store, 3)
    body = first.path("s").read_bytes()
    first.path("s").unlink()
    for _ in range(2):
        with store.generation("a", "S", code_version="1", settings={"v": 3}, inputs={}) as generation:
            assert generation.record("s", ".parquet") is None
            (generation.folder / "s.parquet").write_bytes(bytes(len(body)))


def test_a_folder_that_was_renamed_is_not_read_as_another_snapshot(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.generation("made", "A", code_version="1", settings={}, inputs={}) as generation:
        generation.publish([], ".parquet", {})
    store.folder("made", "A").rename(store.folder("made", "B"))
    with pytest.raises(InconsistentFiles, match=r"made/B: its current\.json is of made of A; .* move it back"):
        store.current("made", "B")
