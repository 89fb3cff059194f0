"""Copies of a bucket's files on a disk: which go when room is short, and which never do."""

import os
import pickle
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_datamask.shards import cache as cached
from dagster_datamask.shards import remote
from dagster_datamask.shards.cache import INCOMING, Cache, cache, is_verified, verified
from dagster_datamask.shards.generations import Generation, Published, Store
from dagster_datamask.shards.remote import Times, open_store

TIMES = Times(renew=10.0, patience=30.0, look=0.02)


def put(base: Path, generation: str, name: str, size: int, *, used: int, sent: bool = True) -> Path:
    """A copy of `size` bytes in a generation's folder, last used at a second."""
    folder = base / "root" / generation
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    if sent:
        verified(folder, name, size, "0" * 64)
        os.utime(folder / ".verified" / name, (used, used))
    return path


def left(base: Path) -> set[str]:
    return {
        path.relative_to(base / "root").as_posix()
        for path in base.rglob("*")
        if path.is_file() and ".verified" not in path.parts and path.name != ".in-use"
    }


def room(base: Path, most: float | None) -> Cache:
    """The cache as a process sees it that has just begun."""
    found = Cache(base)
    found.most = most
    return found


class TestRoom:
    def test_the_least_recently_used_goes_first_and_no_more_than_is_needed(self, tmp_path: Path) -> None:
        for k, name in enumerate(("c", "a", "d", "b")):
            put(tmp_path, "g", name, 1000, used=100 + k)
        # 4,000 and their receipts are there; 10 % of the limit goes beyond the need
        there = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        room(tmp_path, there + 500).make_room(400)
        assert left(tmp_path) == {"g/c", "g/a", "g/d", "g/b"}
        room(tmp_path, there + 500).make_room(600)
        assert left(tmp_path) == {"g/a", "g/d", "g/b"}
        room(tmp_path, 2000).make_room(0)
        assert left(tmp_path) == {"g/b"}
        assert not is_verified(tmp_path / "root" / "g", "c", 1000, "0" * 64)
        assert is_verified(tmp_path / "root" / "g", "b", 1000, "0" * 64)

    def test_a_file_that_is_used_again_stays(self, tmp_path: Path) -> None:
        put(tmp_path, "g", "old", 1000, used=100)
        put(tmp_path, "h", "new", 1000, used=200)
        cached.used(tmp_path / "root" / "g", "old")
        room(tmp_path, 1500).make_room(0)
        assert left(tmp_path) == {"g/old"}

    def test_what_was_not_sent_and_scratch_stay_and_count(self, tmp_path: Path) -> None:
        put(tmp_path, "g", "not sent", 5000, used=1, sent=False)
        put(tmp_path, "g", ".work/part", 5000, used=1, sent=False)
        put(tmp_path, "g", "sent", 1000, used=999)
        put(tmp_path, "g", "folder/sent", 1000, used=999)
        room(tmp_path, 100).make_room(0)
        assert left(tmp_path) == {"g/not sent", "g/.work/part"}

    def test_its_record_goes_with_a_file(self, tmp_path: Path) -> None:
        put(tmp_path, "g", "s.parquet", 1000, used=1)
        put(tmp_path, "g", "s.parquet.done.json", 10, used=1, sent=False)
        room(tmp_path, 100).make_room(0)
        assert left(tmp_path) == set()

    def test_a_file_under_two_names_counts_once(self, tmp_path: Path) -> None:
        path = put(tmp_path, "g", "x", 1000, used=1)
        other = tmp_path / "root" / "h" / "x"
        other.parent.mkdir()
        os.link(path, other)
        room(tmp_path, 1500).make_room(0)
        assert left(tmp_path) == {"g/x", "h/x"}

    def test_downloads_of_killed_processes_go_and_those_under_way_stay(self, tmp_path: Path) -> None:
        for name in ("dead", "alive"):
            (tmp_path / "root" / INCOMING / name).mkdir(parents=True)
            (tmp_path / "root" / INCOMING / name / "file").write_bytes(b"x")
        os.utime(tmp_path / "root" / INCOMING / "dead", (1, 1))
        room(tmp_path, 1000).make_room(0)
        assert left(tmp_path) == {f"{INCOMING}/alive/file"}

    def test_without_a_limit_its_disk_keeps_a_share_free(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Disk:
            total, free = 100_000, 20_000

        monkeypatch.setattr(cached.shutil, "disk_usage", lambda path: Disk)
        for k in range(10):
            put(tmp_path, "g", str(k), 1000, used=k)
        here = room(tmp_path, None)
        here.make_room(5000)
        assert len(left(tmp_path)) == 10
        # 15,000 are to stay free: 2,000 too few, and a tenth of them beyond
        here.make_room(7000)
        assert left(tmp_path) == {f"g/{k}" for k in range(4, 10)}

    def test_all_is_looked_at_again_only_after_enough_has_come(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[int] = []
        real = Cache._look
        monkeypatch.setattr(Cache, "_look", lambda self: looks.append(1) or real(self))
        here = room(tmp_path, 100_000)
        for _ in range(100):
            here.make_room(100)
        assert len(looks) == 5
        here.make_room(0, written=2000)
        assert len(looks) == 6

    def test_nothing_there(self, tmp_path: Path) -> None:
        room(tmp_path / "none", 1).make_room(10**9)
        assert left(tmp_path / "none") == set()


_OTHER = """
import sys
from pathlib import Path
from dagster_datamask.shards.cache import cache
here = cache(Path(sys.argv[1]), float(sys.argv[3]))
with here.work():
    if sys.argv[2]:
        here.hold(Path(sys.argv[1]) / sys.argv[2])
    else:
        here.make_room(0)
    print("ready", flush=True)
    sys.stdin.readline()
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def process(tmp_path: Path) -> Any:
    """process(folder): another process that uses it, or makes room where "" is given; it goes on when written to."""
    children = []

    def start(generation: str, most: float = 1.0) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-c", _OTHER, str(tmp_path), generation, str(most)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait(60)


class TestInUse:
    def test_what_another_process_uses_stays_until_it_has_ended(
        self, tmp_path: Path, process: Callable[..., "subprocess.Popen[str]"]
    ) -> None:
        for generation in ("a", "b", "c"):
            put(tmp_path, generation, "x", 1000, used=1)
        ends, dies = process("root/a", 1e12), process("root/b", 1e12)
        here = cache(tmp_path, 100)
        here.make_room(0)
        assert left(tmp_path) == {"a/x", "b/x"}
        print(file=ends.stdin, flush=True)
        assert ends.stdout.readline() == "ended\n"
        here.make_room(100)
        assert left(tmp_path) == {"b/x"}
        dies.kill()
        dies.wait(60)
        here.make_room(100)
        assert left(tmp_path) == set()

    def test_what_this_process_uses_is_safe_from_another_until_the_last_work_has_ended(
        self, tmp_path: Path, process: Callable[..., "subprocess.Popen[str]"]
    ) -> None:
        put(tmp_path, "a", "x", 1000, used=1)
        put(tmp_path, "b", "x", 1000, used=1)
        here = cache(tmp_path, 1e12)
        with here.work():
            with here.work():
                here.hold(tmp_path / "root" / "a")
            here.make_room(0)
            process("", 1)
            assert left(tmp_path) == {"a/x"}
        process("", 1)
        assert left(tmp_path) == set()

    def test_a_cache_that_was_emptied_meanwhile_is_locked_anew(
        self, tmp_path: Path, process: Callable[..., "subprocess.Popen[str]"]
    ) -> None:
        here = cache(tmp_path, 1e12)
        with here.work():
            here.hold(tmp_path / "root" / "a")
            (tmp_path / ".in-use").unlink()
            here.hold(tmp_path / "root" / "b")
            put(tmp_path, "a", "x", 1000, used=1)
            put(tmp_path, "b", "x", 1000, used=1)
            process("", 1)
            assert left(tmp_path) == {"a/x", "b/x"}

    def test_a_forked_child_holds_none_of_its_parent_s(self, tmp_path: Path) -> None:
        here = cache(tmp_path, 1e12)
        with here.work():
            here.hold(tmp_path / "root" / "a")
            pid = os.fork()
            if not pid:
                mine = cache(tmp_path, 1e12)
                with mine.if_unused(tmp_path / "root" / "a") as unused:
                    os._exit(3 if mine is not here and not unused else 4)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


# ---- on a store


def publish(store: Store, version: str, rows: int = 10_000, shards: int = 1) -> Published:
    with store.generation("a", "S", code_version=version, settings={}, inputs={}) as generation:
        records = [_write(generation, f"s{k}", rows) for k in range(shards)]
        return generation.publish(records, ".bin", {})


def _write(generation: Generation, shard: str, size: int) -> Any:
    (generation.folder / f"{shard}.bin").write_bytes(shard[:1].encode() * size)
    return generation.complete(shard, ".bin", rows=1, rows_in=1, counts={"good": 1})


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def bins(store: Store) -> list[str]:
    return sorted(
        f"{path.parent.name}/{path.name}" for path in store.root.rglob("*.bin") if ".verified" not in str(path)
    )


def test_a_machine_s_copies_stay_below_the_limit_and_are_fetched_again(url: str, tmp_path: Path) -> None:
    store = open_store(url, str(tmp_path), TIMES, cache_gb=30e-6)
    made = [publish(store, str(version)) for version in range(8)]
    there = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert there <= 30_000 + 8 * 2_000
    # the last that was written is the last that was used
    assert f"{made[-1].fingerprint}/s0.bin" in bins(store) and len(bins(store)) < 4
    for published in made:
        assert published.path("s0").read_bytes() == b"s" * 10_000


def test_what_a_run_reads_stays_though_it_is_more_than_the_limit(url: str, tmp_path: Path) -> None:
    made = publish(open_store(url, str(tmp_path / "there"), TIMES), "1", shards=5)
    store = open_store(url, str(tmp_path / "here"), TIMES, cache_gb=15e-6)
    with store.generation("b", "S", code_version="1", settings={}, inputs={}) as generation:
        paths = [store.current("a", "S").path(shard) for shard in made.shards]
        written = [_write(generation, f"w{k}", 10_000) for k in range(3)]
        assert [path.read_bytes() for path in paths] == [b"s" * 10_000] * 5
        assert [generation.path(record.shard, ".bin").read_bytes() for record in written] == [b"w" * 10_000] * 3
    assert len(bins(store)) <= 1


def test_a_worker_s_copies_are_in_use_as_long_as_it_has_its_generation(url: str, tmp_path: Path) -> None:
    made = publish(open_store(url, str(tmp_path / "there"), TIMES), "1")
    there: Any = open_store(url, str(tmp_path / "driver"), TIMES)
    with there.generation("b", "S", code_version="1", settings={}, inputs={}) as generation:
        generation.remote.__dict__["cache"] = str(tmp_path / "worker")
        sent = pickle.dumps(generation)
        generation.remote.__dict__["cache"] = str(tmp_path / "driver")
        worker = pickle.loads(sent)
        read = pickle.loads(pickle.dumps(remote.RemotePublished(**{**made.__dict__, "remote": worker.remote})))
        path = read.path("s0")
        here = worker.remote.copies
        here.most = 1.0
        here.make_room(1)
        assert path.is_relative_to(tmp_path / "worker") and path.exists()
        del worker
        here.make_room(1)
        assert not path.exists()


def test_two_processes_read_more_than_fits_and_each_gets_its_bytes(url: str, tmp_path: Path) -> None:
    """Threads of this process, and room that is made all the while."""
    made = publish(open_store(url, str(tmp_path / "there"), TIMES), "1", shards=30)
    store = open_store(url, str(tmp_path / "here"), TIMES, cache_gb=20e-6)
    wrong: list[str] = []

    def read() -> None:
        for shard in made.shards:
            if store.current("a", "S").path(shard).read_bytes() != b"s" * 10_000:
                wrong.append(shard)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_gc_leaves_what_another_process_uses(
    url: str, tmp_path: Path, process: Callable[..., "subprocess.Popen[str]"]
) -> None:
    store: Any = open_store(url, str(tmp_path), TIMES)
    made = publish(store, "1")
    store.remote.fs.rm(store.remote.at("a"), recursive=True)
    child = process(made.folder.relative_to(tmp_path).as_posix(), 1e12)
    store._trim(set())
    assert bins(store) == [f"{made.fingerprint}/s0.bin"]
    child.kill()
    child.wait(60)
    store._trim(set())
    assert bins(store) == []
