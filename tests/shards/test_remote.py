"""Roots on object stores: what counts as done, what two machines make of one root, and what may go wrong in between."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pytest
import s3fs
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dagster_datamask.doctor import examine
from dagster_datamask.failures import is_transient, told
from dagster_datamask.settings import load_settings
from dagster_datamask.shards import remote
from dagster_datamask.shards.engine import map_shards
from dagster_datamask.shards.generations import Generation, NotPublished, Published, ShardRecord, Store
from dagster_datamask.shards.remote import Lease, LeaseLost, RemoteGeneration, RootUnusable, Times, open_store
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.shards.writer import table_file
from tests.s3 import S3Server

pytest_plugins = ("tests.s3",)

SCHEMA = pa.schema([("doc_id", pa.string())])
# no test has to wait for a holder that is gone but the one that is about it
TIMES = Times(renew=10.0, patience=30.0, look=0.02)
# so that nothing hangs for ever
SECONDS = 300
Faults = dict[str, Callable[..., Any]]


class Faulty(MemoryFileSystem):
    """Objects in memory, of which a test spoils what is asked: {"put_file" | "get_file" | …: called instead, with the
    real one first}."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[Faults] = {}
    calls: ClassVar[list[tuple[str, str]]] = []

    def _asked(self, what: str, real: Callable[..., Any], path: str, *more: Any, **options: Any) -> Any:
        type(self).calls.append((what, self._strip_protocol(path)))
        fault = self.faults.get(what)
        return real(path, *more, **options) if fault is None else fault(real, path, *more, **options)

    def put_file(self, lpath, rpath, *more, **options):
        def real(rpath, lpath):
            return super(Faulty, self).pipe_file(rpath, Path(lpath).read_bytes())

        return self._asked("put_file", real, rpath, lpath)

    def get_file(self, rpath, lpath, *more, **options):
        return self._asked("get_file", super().get_file, rpath, lpath)

    def pipe_file(self, path, value, mode="overwrite", **options):
        return self._asked("pipe_file", super().pipe_file, path, value, mode=mode)

    def cat_file(self, path, **options):
        return self._asked("cat_file", super().cat_file, path)


@pytest.fixture
def faulty() -> Iterator[type[Faulty]]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    yield Faulty
    Faulty.faults, Faulty.calls = {}, []
    Faulty.store.clear()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3').url}/root"
    return f"memory://{uuid.uuid4().hex}"


Machine = Callable[[str], Store]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """machine(url): the root as a further machine sees it, with an empty cache."""
    caches = iter(range(100))
    # be this machine's disk as full as it may
    return lambda url: open_store(url, str(tmp_path / f"machine_{next(caches)}"), TIMES, cache_gb=1e6)


def publish(
    store: Store, value: int, *, asset: str = "a", snapshot: str | None = "S", inputs: dict[str, str] | None = None
) -> Published:
    """One generation of one shard with `value` rows and a file beside it."""
    with store.generation(asset, snapshot, code_version="1", settings={"v": value}, inputs=inputs or {}) as generation:
        (generation.folder / "figures").mkdir(exist_ok=True)
        (generation.folder / "figures" / "1.png").write_bytes(b"png")
        return generation.publish([write(generation, "s", value)], ".parquet", {"value": value})


def write(generation: Generation, shard: str, rows: int, origin: str = "") -> ShardRecord:
    with table_file(generation.folder / f"{shard}.parquet", SCHEMA) as out:
        out.write(pa.table({"doc_id": [str(k) for k in range(rows)]}, schema=SCHEMA))
    return generation.complete(shard, ".parquet", rows=rows, rows_in=rows, counts={"good": rows}, origin=origin)


class Work:
    """A stage of one row a shard that notes what it computes."""

    def __init__(self, *shards: str) -> None:
        self.shards, self.computed = shards, list[str]()

    def __call__(self, store: Store, version: str = "1", origin: Callable[[str], str] = lambda shard: "") -> Published:
        def kernel():
            return lambda shard: (
                self.computed.append(shard) or pa.table({"doc_id": [shard]}, schema=SCHEMA),
                1,
                {"good": 1},
            )

        with store.generation("a", "S", code_version=version, settings={}, inputs={}) as generation:
            records = map_shards(
                generation,
                self.shards,
                lambda shard: [shard],
                kernel,
                SCHEMA,
                ext=".parquet",
                total_rows=len(self.shards),
                progress=lambda done, total, shard: None,
                origin=origin,
            )
            return generation.publish(records, ".parquet", {})


def objects(store: Any) -> dict[str, bytes]:
    fs = store.remote.fs
    return {name: fs.cat_file(store.remote.at(name)) for name in store.remote.names()}


def cached(store: Store, pattern: str) -> list[Path]:
    """Files of this machine's cache, without the receipts of their hashes."""
    return [path for path in store.root.rglob(pattern) if ".verified" not in path.parts]


def count_of(store: Any, what: str, part: str) -> int:
    return sum(1 for kind, path in store.remote.fs.calls if kind == what and part in path)


def test_published_objects_are_the_bytes_of_a_folder(url: str, machine: Machine, tmp_path: Path) -> None:
    local, there = Store(tmp_path / "root"), machine(url)
    for store in (local, there):
        publish(store, 2)
        publish(store, 3, asset="stage_1/b", snapshot=None, inputs={"a": "x"})
    disk = {str(path.relative_to(local.root)): path.read_bytes() for path in local.root.rglob("*") if path.is_file()}
    own = ("/.leases/", "/.listing.json", "/.lease")
    assert {name: body for name, body in objects(there).items() if not any(part in name for part in own)} == {
        name: body for name, body in disk.items() if not any(part in name for part in own)
    }
    assert there.snapshots("a") == ["S"]
    assert there.snapshots("stage_1/b") == there.snapshots("none") == []
    with pytest.raises(NotPublished, match=f"c is not published under {url}; run the job fit_global first"):
        there.current("c")


def test_another_machine_reads_what_was_published_and_may_lose_its_cache(url: str, machine: Machine) -> None:
    first = publish(machine(url), 3)
    other = machine(url)
    found = other.current("a", "S")
    assert found.where == first.where == f"{url}/a/S/{first.fingerprint}"
    assert not found.folder.exists()
    for _ in range(2):
        assert found.path("s").read_bytes() == first.path("s").read_bytes()
        assert found.file("figures/1.png").read_bytes() == b"png"
        assert sorted(path.name for path in found.file("figures").iterdir()) == ["1.png"]
        assert not found.file("no such file").exists()
        assert found.record("s") == first.record("s")
        remote.shutil.rmtree(other.root)
    assert (found.file("") / "s.parquet").exists()
    assert pickle.loads(pickle.dumps(found)) == found


def test_what_one_machine_did_another_does_not_do_again(url: str, machine: Machine) -> None:
    names = ["x", "a[1]*?", "é %20+&=", "..z"]
    work = Work(*names)
    first, second = work(machine(url)), work(machine(url))
    assert work.computed == names
    assert (second.fingerprint, second.counts) == (first.fingerprint, first.counts)
    for name in names:
        assert second.record(name) == first.record(name)
        assert second.path(name).read_bytes() == first.path(name).read_bytes()


def test_a_folder_that_is_copied_into_a_bucket_is_done_there(url: str, machine: Machine, tmp_path: Path) -> None:
    work = Work("x", "y")
    there: Any = machine(url)
    first = work(Store(tmp_path / "root"))
    for path in (tmp_path / "root").rglob("*"):
        if path.is_file() and path.name != ".lease":
            there.remote.write(path.relative_to(tmp_path / "root").as_posix(), path.read_bytes())
    assert there.current("a", "S").path("x").read_bytes() == first.path("x").read_bytes()
    assert work(there).record("y") == first.record("y")
    assert work.computed == ["x", "y"]


def test_fifty_shards_that_are_done_cost_no_more_requests_than_one(s3: S3Server, machine: Machine) -> None:
    asked = {}
    for shards in (1, 50):
        work, url = Work(*(f"{k:02d}" for k in range(shards))), f"{s3.url}/{shards}"
        work(machine(url))
        other = machine(url)
        s3.reset()
        work(other)
        asked[shards] = sum(s3.requests.values())
        assert len(work.computed) == shards
    assert asked[50] == asked[1] <= 20
    s3.reset()
    published = other.current("a", "S")
    for shard in published.shards:
        published.path(shard)
    # the pointer, the listing, and each file once
    assert sum(s3.requests.values()) == s3.requests["GET"] == 2 + 50


def test_a_run_that_was_cut_off_goes_on_elsewhere_shard_by_shard(url: str, machine: Machine) -> None:
    with (
        pytest.raises(RuntimeError, match="cut off"),
        machine(url).generation("a", "S", code_version="1", settings={}, inputs={}) as generation,
    ):
        (generation.folder / "facts.json").write_text("{}")
        generation.keep("facts.json")
        write(generation, "x", 1)
        (generation.folder / "y.parquet").write_bytes(b"not recorded")
        raise RuntimeError("cut off")
    there = machine(url)
    assert there.published("a", "S") is None
    with there.generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
        assert (generation.folder / "facts.json").read_text() == "{}"
        assert generation.record("x", ".parquet") is not None
        assert generation.record("y", ".parquet") is None
        assert not (generation.folder / "x.parquet").exists()
        assert generation.path("x", ".parquet").exists()


def test_a_shard_counts_with_its_file_and_its_record_alone(url: str, machine: Machine) -> None:
    work = Work("x", "y", "z", "u")
    store: Any = machine(url)
    before = work(store)
    whole = objects(store)
    fs, at = store.remote.fs, lambda name: store.remote.at(f"{before.where.removeprefix(url + '/')}/{name}")
    fs.pipe_file(at("x.parquet"), b"cut")
    fs.rm_file(at("y.parquet"))
    fs.rm_file(at("z.parquet.done.json"))
    kept = Work(*work.shards)
    assert kept(machine(url)).where == before.where
    assert kept.computed == ["x", "y", "z"]
    assert objects(store).items() >= {(k, v) for k, v in whole.items() if "/.leases/" not in k}
    fs.pipe_file(at("u.parquet.done.json"), b'{"shard": "u"')
    fs.pipe_file(at(".listing.json"), b'{"files": {')
    again = Work(*work.shards)
    again(machine(url))
    assert again.computed == ["u"]


def test_what_was_finished_here_and_not_sent_is_sent_and_not_done_again(faulty: type[Faulty], machine: Machine) -> None:
    def fails(real, path, *more):
        raise OSError(errno.EIO, "the store is ill")

    store, work = machine("faulty://root"), Work("x", "y")
    faulty.faults["put_file"] = fails
    with pytest.raises(OSError, match="the store is ill"):
        work(store)
    del faulty.faults["put_file"]
    assert work(store).rows == 2
    assert work.computed == ["x", "y"]
    # what has other bytes than were recorded is no result
    faulty.faults["put_file"] = fails
    with pytest.raises(OSError, match="the store is ill"):
        work(store, "2")
    (path,) = [path for path in cached(store, "x.parquet") if not path.with_name("y.parquet").exists()]
    path.write_bytes(bytes(path.stat().st_size))
    del faulty.faults["put_file"]
    assert work(store, "2").rows == 2
    assert work.computed == ["x", "y", "x", "x", "y"]


@pytest.mark.parametrize("what", ["", "s.parquet", "s.parquet.done.json", "figures/1.png"])
@pytest.mark.parametrize("ended", ["published", "cut off"])
def test_what_is_deleted_from_the_store_is_made_again_on_the_machine_that_made_it(
    machine: Machine, what: str, ended: str
) -> None:
    """As what a bad device computed: its bytes are in the cache still."""
    url, made = f"memory://{uuid.uuid4().hex}", list[str]()
    store = machine(url)

    def run(rows: int) -> Generation:
        with store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
            picture = generation.folder / "figures" / "1.png"
            if not picture.exists():
                picture.parent.mkdir(exist_ok=True)
                picture.write_bytes(b"png %d" % rows)
                made.append(f"picture {rows}")
            generation.keep("figures")
            record = generation.record("s", ".parquet")
            if record is None:
                made.append(f"s {rows}")
                record = write(generation, "s", rows)
            if (rows, ended) == (1, "cut off"):
                raise RuntimeError("cut off")
            generation.publish([record], ".parquet", {})
            return generation

    if ended == "published":
        run(1)
    else:
        with pytest.raises(RuntimeError, match="cut off"):
            run(1)
    there: Any = store
    (folder,) = {name.partition("/.leases/")[0] for name in there.remote.names() if "/.leases/" in name}
    there.remote.fs.rm(there.remote.at(f"{folder}/{what}".rstrip("/")), recursive=True)
    run(2)
    again = {"": ["picture 2", "s 2"], "figures/1.png": ["picture 2"]}.get(what, ["s 2"])
    assert made == ["picture 1", "s 1", *again]
    published = machine(url).current("a", "S")
    assert published.record("s").rows == (2 if "s 2" in again else 1)
    assert published.path("s").exists()
    assert published.file("figures/1.png").read_bytes() == (b"png 2" if "picture 2" in again else b"png 1")


def test_what_was_not_sent_is_forgotten_once_another_has_made_it(faulty: type[Faulty], machine: Machine) -> None:
    def fails(real, path, *more):
        raise OSError(errno.EIO, "the store is ill")

    store, work, url = machine("faulty://root"), Work("x"), "faulty://root"
    faulty.faults["put_file"] = fails
    with pytest.raises(OSError, match="the store is ill"):
        work(store)
    faulty.faults.clear()
    work(machine(url))
    there: Any = store
    there.remote.remove([name for name in there.remote.names() if "/x.parquet" in name])
    work(store)
    assert work.computed == ["x", "x", "x"]


@pytest.mark.parametrize("sent", ["file and record", "file"])
@pytest.mark.parametrize("lost_with_it", ["", ".done.json", ".listing.json"])
def test_a_lost_shard_that_a_worker_made_anew_is_what_the_worker_recorded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, sent: str, lost_with_it: str
) -> None:
    """Other bytes of the same size, as another device gives; the run is cut off before it publishes."""
    url = f"memory://{uuid.uuid4().hex}"

    def of(store: Store) -> AbstractContextManager[Generation]:
        return store.generation("a", "S", code_version="1", settings={}, inputs={})

    def made(generation: Generation, body: bytes) -> ShardRecord:
        (generation.folder / "s.parquet").write_bytes(body)
        return generation.complete("s", ".parquet", rows=1, rows_in=1, counts={"good": 1})

    store: Any = machine(url)
    with of(store) as generation:
        generation.publish([made(generation, b"the first")], ".parquet", {})
    lost = {"": "", ".done.json": "s.parquet.done.json", ".listing.json": ".listing.json"}[lost_with_it]
    store.remote.remove(f"a/S/{generation.fingerprint}/{name}" for name in ("s.parquet", lost) if name)
    with pytest.raises(RuntimeError, match="cut off"), of(machine(url)) as generation:
        assert generation.record("s", ".parquet") is None
        worker = pickle.loads(pickle.dumps(generation))
        if sent == "file":
            monkeypatch.setattr(RemoteGeneration, "_record", lambda self, record: None)
        made(worker, b"the other")
        monkeypatch.undo()
        raise RuntimeError("cut off")
    with of(machine(url)) as generation:
        record = generation.record("s", ".parquet")
        assert (record is not None) is (sent == "file and record")
        generation.publish([record or made(generation, b"the third")], ".parquet", {})
    published = machine(url).current("a", "S")
    assert published.path("s").read_bytes() == (b"the other" if record else b"the third")


@pytest.mark.parametrize("times", [2, 99])
def test_an_upload_that_is_cut_off_is_no_upload(faulty: type[Faulty], machine: Machine, times: int) -> None:
    left = [times]

    def cut(real, path, lpath):
        real(path, lpath)
        if left[0]:
            left[0] -= 1
            Faulty.store[Faulty._strip_protocol(path)] = fsspec.implementations.memory.MemoryFile(
                None, path, Path(lpath).read_bytes()[:-7]
            )

    faulty.faults["put_file"] = cut
    work = Work("x")
    if times < 3:
        assert work(machine("faulty://root")).rows == 1
    else:
        with pytest.raises(OSError, match="does not have what was uploaded") as caught:
            work(machine("faulty://root"))
        assert is_transient(caught.value)
        assert not [name for name in objects(machine("faulty://root")) if name.endswith(".done.json")]


@pytest.mark.parametrize("what", [".done.json", ".listing.json", "current.json"])
@pytest.mark.parametrize("times", [2, 99])
def test_a_small_object_that_is_cut_off_is_written_again(
    faulty: type[Faulty], machine: Machine, what: str, times: int
) -> None:
    left = [times]

    def cut(real, path, value, mode="overwrite"):
        spoilt = path.endswith(what) and left[0] > 0
        left[0] -= spoilt
        real(path, value[:-9] if spoilt else value, mode=mode)

    faulty.faults["pipe_file"] = cut
    work = Work("x")
    if times > 2:
        with pytest.raises(OSError, match=r"of the .* bytes that were written") as caught:
            work(machine("faulty://root"))
        assert is_transient(caught.value)
        faulty.faults.clear()
    assert work(machine("faulty://root")).rows == 1
    assert work.computed == ["x"] * (2 if (what, times) == (".done.json", 99) else 1)


def test_an_upload_of_the_right_size_and_other_bytes_is_no_upload(faulty: type[Faulty], machine: Machine) -> None:
    def other(real, path, lpath):
        spoilt = Path(lpath).with_name(".spoilt")
        spoilt.write_bytes(bytes(Path(lpath).stat().st_size))
        real(path, spoilt)

    faulty.faults["put_file"] = other
    with pytest.raises(OSError, match="does not have what was uploaded"):
        Work("x")(machine("faulty://root"))


@pytest.mark.parametrize(
    ("spoil", "error", "transient"),
    [(lambda body: body[:-1], OSError, True), (lambda body: bytes(len(body)), InconsistentFiles, False)],
    ids=["cut off", "other bytes"],
)
@pytest.mark.parametrize("times", [2, 99])
def test_a_download_that_is_not_what_was_recorded_is_tried_again_and_never_used(
    faulty: type[Faulty], machine: Machine, spoil: Callable, error: type[Exception], transient: bool, times: int
) -> None:
    published = publish(machine("faulty://root"), 3)
    here, left = machine("faulty://root").current("a", "S"), [times]

    def spoilt(real, path, lpath):
        real(path, lpath)
        if left[0]:
            left[0] -= 1
            Path(lpath).write_bytes(spoil(Path(lpath).read_bytes()))

    faulty.faults["get_file"] = spoilt
    if times < 3:
        assert here.path("s").read_bytes() == published.path("s").read_bytes()
        return
    with pytest.raises(error, match=r"faulty://root/a/S/\w+/s.parquet") as caught:
        here.path("s")
    assert is_transient(caught.value) is transient
    assert "\n" not in str(caught.value)
    assert not [path for path in here.folder.rglob("*") if path.is_file()]


def test_a_download_that_fails_leaves_nothing_behind(faulty: type[Faulty], machine: Machine) -> None:
    publish(machine("faulty://root"), 3)
    here = machine("faulty://root").current("a", "S")
    faulty.faults["get_file"] = lambda real, path, lpath: (_ for _ in ()).throw(OSError(errno.EIO, "ill"))
    with pytest.raises(OSError, match="ill"):
        here.path("s")
    assert remote._under_way == {}


def test_what_changed_in_the_cache_is_fetched_again(faulty: type[Faulty], machine: Machine) -> None:
    published = publish(machine("faulty://root"), 3)
    here = machine("faulty://root").current("a", "S")
    body = here.path("s").read_bytes()
    assert count_of(machine("faulty://root"), "get_file", "s.parquet") == 2  # read back, and fetched
    here.path("s").write_bytes(bytes(len(body)))
    # as a file system with coarse times shows it a moment later
    os.utime(here.folder / "s.parquet", (1, 1))
    assert here.path("s").read_bytes() == body == published.path("s").read_bytes()
    here.path("s")
    assert count_of(machine("faulty://root"), "get_file", "s.parquet") == 3


def test_a_shard_of_the_same_origin_is_copied_by_the_store(s3: S3Server, machine: Machine) -> None:
    origins = {"x": "old", "y": "old"}
    work = Work("x", "y", "z")
    first = work(machine(s3.url), "1", lambda shard: f"{shard} {origins.get(shard, 'old')}")
    origins["y"] = "new"
    s3.reset()
    other = machine(s3.url)
    second = work(other, "2", lambda shard: f"{shard} {origins.get(shard, 'old')}")
    assert work.computed == ["x", "y", "z", "y"]
    assert second.record("x") == first.record("x")
    # nothing of the shards that were taken over came here, nor went from here
    assert [path.name for path in cached(other, "?.parquet")] == ["y.parquet"]
    assert second.path("x").read_bytes() == first.path("x").read_bytes()


@pytest.mark.parametrize("published", [True, False])
def test_a_damaged_shard_is_not_taken_over_from_one_generation_but_from_the_next(
    url: str, machine: Machine, published: bool
) -> None:
    """Bytes of the recorded size that are not what was recorded; and a file that is gone."""
    work, store = Work("x"), machine(url)
    there: Any = store
    names = []
    for version in ("1", "2", "3"):
        one = work(store, version, lambda shard, version=version: f"{shard} {version}")
        record = one.record("x")
        names.append(f"a/S/{one.fingerprint}/x.parquet")
        if not published:
            there.remote.remove([f"a/S/{one.fingerprint}/.listing.json"])
    # all three of one origin, as if they had been made by three machines at once
    assert work.computed == ["x", "x", "x"]
    for name in names:
        told = there.remote.told(f"{name}.done.json")
        there.remote.write(f"{name}.done.json", json.dumps({**told, "origin": "x 4"}).encode())
        listing = there.remote.told(f"{name.rpartition('/')[0]}/.listing.json")
        if listing is not None:
            listing["records"]["x.parquet"]["origin"] = "x 4"
            there.remote.write(f"{name.rpartition('/')[0]}/.listing.json", json.dumps(listing).encode())
    names.sort()
    there.remote.remove(names[:1])
    there.remote.write(names[1], bytes(record.bytes))
    fresh = machine(url)
    assert work(fresh, "4", lambda shard: "x 4").path("x").stat().st_size == record.bytes
    assert work.computed == ["x", "x", "x"]
    assert machine(url).current("a", "S").record("x").sha256 == record.sha256
    assert machine(url).current("a", "S").path("x").exists()
    # and where none is whole it is made again
    for name in [name for name in there.remote.names() if name.endswith("/x.parquet")]:
        there.remote.write(name, bytes(record.bytes))
    work(machine(url), "5", lambda shard: "x 4")
    assert work.computed == ["x", "x", "x", "x"]
    assert machine(url).current("a", "S").path("x").exists()


def test_a_worker_on_another_machine_completes_shards_there(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "driver"))
    store = open_store(url, "", TIMES)
    with store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
        sent = pickle.dumps(generation)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "worker"))
        worker = pickle.loads(sent)
        assert worker.folder.is_relative_to(tmp_path / "worker")
        record = write(worker, "x", 2)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "driver"))
        assert not (generation.folder / "x.parquet").exists()
        assert generation.path("x", ".parquet").read_bytes() == (worker.folder / "x.parquet").read_bytes()
        published = generation.publish([record], ".parquet", {})
    assert published.rows == 2
    assert published.path("x").is_relative_to(tmp_path / "driver")


# ---- leases


class Clock:
    """The clock of one that waits for a lease: from the end of a sleep to that of the next the lease is renewed or
    given back, however long that takes, and most of the patience passes. So a holder lives on a machine however busy.

    naps: told how many sleeps have ended.
    """

    def __init__(self, store: Any, naps: Callable[[int], None] = lambda count: None) -> None:
        self._remote, self._naps = store.remote, naps
        self._now, self._count = 0.0, 0
        self._seen: dict[str, bytes | None] = {}
        self._pause = threading.Event()

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        before = self._seen or self._leases()
        while (now := self._leases()) == before:
            self._pause.wait(0.01)
        self._seen = now
        self._now += 0.9 * self._remote.times.patience
        self._count += 1
        self._naps(self._count)

    def _leases(self) -> dict[str, bytes | None]:
        return {name: self._remote.read(name) for name in self._remote.names() if "/.leases/" in name}


_HOLDER = """
import sys, time
from dagster_datamask.shards.remote import Times, open_store
store = open_store(sys.argv[1], sys.argv[2], Times(renew=0.05, patience=30, look=0.02))
with store.generation("a", "S", code_version="1", settings={"v": 1}, inputs={}) as generation:
    (generation.folder / "s.parquet").write_bytes(b"by the first")
    print("ready", flush=True)
    sys.stdin.readline()
    generation.complete("s", ".parquet", rows=1, rows_in=1, counts={"good": 1})
"""


@pytest.fixture
def holder(s3: S3Server, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of another machine that holds the lease, until it is written to."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, f"{s3.url}/root", str(tmp_path / "holder")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()


def test_another_machine_waits_while_the_holder_lives(
    s3: S3Server, holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def naps(count: int) -> None:
        # its patience has passed four times
        if count == 5:
            print(file=holder.stdin, flush=True)

    store = open_store(f"{s3.url}/root", str(tmp_path / "waiter"), TIMES)
    monkeypatch.setattr(remote, "time", Clock(store, naps))
    with store.generation("a", "S", code_version="1", settings={"v": 1}, inputs={}, waiting=told.append) as generation:
        assert holder.wait(SECONDS) == 0
        record = generation.record("s", ".parquet")
        assert record is not None
        assert generation.path("s", ".parquet").read_bytes() == b"by the first"
    assert told == [f"another run is writing {s3.url}/root/a/S/{generation.fingerprint}; waiting for it"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_gives_no_sign_of_life_is_taken_over_from(
    s3: S3Server, holder: subprocess.Popen[str], tmp_path: Path, how: signal.Signals
) -> None:
    holder.send_signal(how)
    store = open_store(f"{s3.url}/root", str(tmp_path / "waiter"), Times(0.05, 0.5, 0.02))
    with store.generation("a", "S", code_version="1", settings={"v": 1}, inputs={}) as generation:
        assert generation.record("s", ".parquet") is None
        record = write(generation, "s", 4)
        if how is signal.SIGSTOP:
            # it wakes up in the middle of its work
            holder.send_signal(signal.SIGCONT)
            _, error = holder.communicate("\n", SECONDS)
            assert holder.returncode == 1
            assert "LeaseLost: another run has taken over" in error
        published = generation.publish([record], ".parquet", {})
    assert published.record("s").rows == 4
    assert published.path("s").read_bytes() == generation.path("s", ".parquet").read_bytes()


def test_a_run_of_the_same_machine_need_not_wait_for_a_dead_one(
    s3: S3Server, holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    holder.kill()
    holder.wait(SECONDS)
    told: list[str] = []
    store = open_store(f"{s3.url}/root", str(tmp_path / "holder"), Times(0.05, 10_000, 10_000))
    with store.generation("a", "S", code_version="1", settings={"v": 1}, inputs={}, waiting=told.append):
        pass
    assert told == []


def test_a_stop_of_the_waiting_run_is_no_stop_of_the_holder(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours pass for the waiting run alone, again and again: it still waits."""
    held, other = (open_store(url, str(tmp_path / name), Times(0.02, 30.0, 0.02)) for name in ("held", "other"))
    with held.generation("a", "S", code_version="1", settings={"v": 1}, inputs={}) as generation:
        reads, real = [0], remote.Remote.read
        leap = [0.0]
        # of leases alone: what goes over the network has a clock of its own
        now = SimpleNamespace(monotonic=lambda: time.monotonic() + leap[0], sleep=time.sleep, time=time.time)
        monkeypatch.setattr(remote, "time", now)
        pause = threading.Event()
        released = threading.Event()
        got: list[str] = []

        def read(self, name):
            body = real(self, name)
            if threading.current_thread() is waiter and "/.leases/" in name and not got:
                # stopped between an answer and what follows from it
                leap[0] += 3600
                reads[0] += 1
                if reads[0] == 5:
                    released.set()
                # the holder lives: it renews, until it gives its lease back
                while body and not json.loads(body)["released"] and real(self, name) == body:
                    pause.wait(0.01)
            return body

        monkeypatch.setattr(remote.Remote, "read", read)

        def wait() -> None:
            with other.generation("a", "S", code_version="1", settings={"v": 1}, inputs={}):
                got.append("held")

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert released.wait(SECONDS)
        assert got == []
        write(generation, "s", 1)
    waiter.join(SECONDS)
    assert got == ["held"] and not waiter.is_alive()


def test_a_lease_outlives_a_store_that_does_not_answer_for_a_while(
    faulty: type[Faulty], machine: Machine, tmp_path: Path
) -> None:
    class EndpointConnectionError(Exception):
        """As botocore's, which is no OSError."""

    tried, renewed = threading.Semaphore(0), threading.Event()

    def fails(real, path, *more, **options):
        tried.release()
        raise EndpointConnectionError

    def works(real, path, *more, **options):
        real(path, *more, **options)
        renewed.set()

    store: Any = open_store("faulty://root", str(tmp_path), Times(0.02, 30.0, 0.02))
    with store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
        name = f"{generation.name}/.leases/1"
        faulty.faults["pipe_file"] = fails
        for _ in range(3):
            assert tried.acquire(timeout=SECONDS)
        before = store.remote.read(name)
        faulty.faults["pipe_file"] = works
        assert renewed.wait(SECONDS)
        assert store.remote.read(name) != before
        write(generation, "x", 1)
        faulty.faults["pipe_file"] = fails
    faulty.faults.clear()
    # not given back, as it could not be: a run of this machine need not wait
    with store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
        assert generation.record("x", ".parquet") is not None


def test_numbers_of_leases_rise_and_old_ones_go(url: str, machine: Machine) -> None:
    store: Any = machine(url)
    for _ in range(3):
        publish(store, 1)
    (folder,) = {name.rpartition("/")[0] for name in store.remote.names() if "/.leases/" in name}
    assert remote.lease_numbers(store.remote, folder) == [3]


def test_a_holder_whose_lease_is_another_s_records_and_publishes_nothing(url: str, machine: Machine) -> None:
    store: Any = machine(url)
    with (
        pytest.raises(LeaseLost, match="has taken over") as caught,
        store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation,
    ):
        record = write(generation, "x", 1)
        other = Lease(store.remote, generation.name, "elsewhere")
        assert other._take(generation.number + 1)
        with pytest.raises(LeaseLost):
            write(generation, "y", 1)
        generation.publish([record], ".parquet", {})
    assert is_transient(caught.value)
    names = store.remote.names()
    assert not [name for name in names if name.endswith(("y.parquet.done.json", "current.json"))]


def test_the_answer_to_a_creation_may_be_lost(faulty: type[Faulty], machine: Machine) -> None:
    """The client asks again, and the store says that the object is there: it is this run's own."""

    def twice(real, path, value, mode="overwrite"):
        real(path, value, mode=mode)
        if mode == "create":
            raise FileExistsError(path)

    faulty.faults["pipe_file"] = twice
    assert publish(machine("faulty://root"), 1).rows == 1


def test_a_store_that_creates_twice_is_no_root(
    faulty: type[Faulty], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_creates_once", set())
    faulty.faults["pipe_file"] = lambda real, path, value, mode="overwrite": real(path, value)
    with pytest.raises(RootUnusable, match="cannot create an object only once, so two runs could write one folder"):
        publish(machine("faulty://root"), 1)


def test_a_file_system_without_exclusive_creation_is_no_root(tmp_path: Path) -> None:
    class Plain(MemoryFileSystem):
        protocol = "plain"
        pipe_file = AbstractFileSystem.pipe_file

    fsspec.register_implementation("plain", Plain, clobber=True)
    with pytest.raises(RootUnusable, match="give a folder, or a bucket of a store that has conditional writes"):
        publish(open_store("plain://root", str(tmp_path)), 1)


# ---- gc


def fingerprints(removed: list[tuple[str, int]]) -> set[str]:
    assert all(size > 0 for _, size in removed)
    return {path.rpartition("/")[2] for path, _ in removed}


def test_gc_keeps_the_newest_and_what_pointers_name(machine: Machine) -> None:
    store: Any = machine(f"memory://{uuid.uuid4().hex}")
    made = [publish(store, value).fingerprint for value in (1, 2, 3, 4)]
    time.sleep(0.01)
    publish(store, 1)
    # the pointer's, and the newest of the others
    assert fingerprints(store.gc(2)) == {made[1], made[2]}
    there = {name.split("/")[2] for name in store.remote.names() if name.count("/") > 2}
    assert there == {made[0], made[3]}
    assert store.current("a", "S").path("s").exists()
    # this machine's copies of what is gone are gone
    assert {path.parent.name for path in cached(store, "s.parquet")} == {made[0], made[3]}
    assert store.gc(2) == []
    with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
        store.gc(0)


def test_gc_of_nothing_removes_nothing(url: str, machine: Machine) -> None:
    assert machine(url).gc(1) == []


def test_gc_keeps_what_a_current_generation_was_made_from(url: str, machine: Machine) -> None:
    store = machine(url)
    old = publish(store, 1)
    publish(store, 5, asset="b", inputs={"a": old.fingerprint})
    publish(store, 2)
    assert store.gc(1) == []
    publish(store, 6, asset="b", inputs={"a": store.current("a", "S").fingerprint})
    assert old.fingerprint in fingerprints(store.gc(1))


def test_gc_leaves_what_a_run_elsewhere_writes_and_reads(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Times(renew=0.05, patience=0.4, look=0.02)
    here, there = (open_store(url, str(tmp_path / name), times) for name in "ht")
    monkeypatch.setattr(remote, "time", Clock(here))
    old = publish(here, 1)
    publish(here, 2)
    with there.generation("b", "S", code_version="1", settings={}, inputs={"a": old.fingerprint}) as generation:
        write(generation, "x", 1)
        assert here.gc(1) == []
        assert generation.record("x", ".parquet") is not None
    assert fingerprints(here.gc(1)) == {old.fingerprint}


def test_a_killed_run_s_lease_keeps_nothing_but_what_it_wrote(url: str, tmp_path: Path) -> None:
    times = Times(renew=0.05, patience=0.3, look=0.02)
    store: Any = open_store(url, str(tmp_path), times)
    old = publish(store, 1)
    publish(store, 2)
    dead = Lease(store.remote, f"b/S/{'0' * 24}", "elsewhere")
    assert dead._take(1)
    store.remote.write(f"b/S/{'0' * 24}/.inputs.json", json.dumps({"a": old.fingerprint}).encode())
    assert fingerprints(store.gc(1)) == {old.fingerprint}


def test_gc_collects_what_a_killed_run_left(tmp_path: Path) -> None:
    store: Any = open_store(f"memory://{uuid.uuid4().hex}", str(tmp_path), Times(0.05, 0.2, 0.02))
    left = f"a/S/{'0' * 24}"
    assert Lease(store.remote, left, "elsewhere")._take(1)
    store.remote.write(f"{left}/s.parquet", bytes(1000))
    time.sleep(0.01)
    made = [publish(store, value).fingerprint for value in (1, 2)]
    assert fingerprints(store.gc(1)) == {"0" * 24, made[0]}
    assert {name.split("/")[2] for name in store.remote.names() if name.count("/") > 2} == {made[1]}


def test_a_lease_of_a_generation_that_was_removed_and_begun_anew_is_lost(machine: Machine) -> None:
    """Its number is the other's, too."""
    store: Any = machine(f"memory://{uuid.uuid4().hex}")
    with (
        pytest.raises(LeaseLost),
        store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation,
    ):
        name = f"{generation.name}/.leases/{generation.number}"
        store.remote.remove([name])
        assert Lease(store.remote, generation.name, "elsewhere")._take(1)
        assert remote.lease_numbers(store.remote, f"{generation.name}/.leases") == [generation.number]
        write(generation, "x", 1)


@pytest.mark.parametrize("dead_elsewhere", [False, True])
def test_gc_leaves_what_is_published_while_it_waits_or_removes(tmp_path: Path, dead_elsewhere: bool) -> None:
    """The old setting comes back after gc has judged, for one generation before its removal, for the other during
    that of the first."""
    url, times = f"memory://{uuid.uuid4().hex}", Times(0.05, 0.3, 0.02)
    store, other = (open_store(url, str(tmp_path / name), times) for name in ("here", "there"))
    made = [publish(store, value) for value in (1, 2, 3)]
    if dead_elsewhere:
        assert Lease(store.remote, f"b/S/{'0' * 24}", "elsewhere")._take(1)  # type: ignore[attr-defined]
    remove, removed = remote.RemoteStore._remove, []

    def and_then_the_old_setting_comes_back(self: Any, name: str, lease: Lease) -> None:
        removed.append(name)
        kept = next(old for old in made if old.fingerprint != name.rpartition("/")[2])
        publish(other, int(kept.facts["value"]))
        # longer than a waiting run is patient
        time.sleep(0.5)
        remove(self, name, lease)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote.RemoteStore, "_remove", and_then_the_old_setting_comes_back)
        assert len(store.gc(1)) == len(removed) == 1
    current = open_store(url, str(tmp_path / "reader"), times).current("a", "S")
    assert current.fingerprint not in removed[0]
    assert current.path("s").exists()


def test_gc_holds_what_it_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that wants a generation which is being removed waits for the end of it, then makes all of it."""
    url, times = f"memory://{uuid.uuid4().hex}", Times(0.05, 0.3, 0.02)
    store, other = (open_store(url, str(tmp_path / name), times) for name in ("here", "there"))
    waited = threading.Event()
    # its patience has passed four times
    monkeypatch.setattr(remote, "time", Clock(store, lambda count: waited.set() if count == 5 else None))
    old = publish(store, 1)
    publish(store, 2)
    remove, runs = remote.RemoteStore._remove, list[threading.Thread]()

    def slowly(self: Any, name: str, lease: Lease) -> None:
        runs.append(threading.Thread(target=publish, args=(other, 1)))
        runs[0].start()
        assert waited.wait(SECONDS)
        assert self.current("a", "S").fingerprint != old.fingerprint
        remove(self, name, lease)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote.RemoteStore, "_remove", slowly)
        assert fingerprints(store.gc(1)) == {old.fingerprint}
    runs[0].join(SECONDS)
    current = open_store(url, str(tmp_path / "reader"), times).current("a", "S")
    assert current.fingerprint == old.fingerprint
    assert current.path("s").exists()


def test_gc_leaves_in_the_cache_what_a_run_here_reads(machine: Machine) -> None:
    store: Any = machine(f"memory://{uuid.uuid4().hex}")
    old = publish(store, 1)
    gone = publish(store, 2)
    read: Any = machine(store.remote.url)
    with read.remote.copies.work():
        read.current("a", "S").path("s")
    with store.generation("b", "S", code_version="1", settings={}, inputs={"a": old.fingerprint}):
        store.remote.fs.rm(store.remote.at("a"), recursive=True)
        store._trim(set())
        assert {path.parent.name for path in cached(store, "s.parquet")} == {old.fingerprint}
    store._trim({old.fingerprint})
    assert {path.parent.name for path in cached(store, "s.parquet")} == {old.fingerprint}
    store._trim(set())
    assert cached(store, "s.parquet") == []
    # nor does a machine that only read keep it
    assert {path.parent.name for path in cached(read, "s.parquet")} == {gone.fingerprint}
    read._trim(set())
    assert cached(read, "s.parquet") == []


def test_what_a_killed_gc_left_counts_for_nothing(faulty: type[Faulty], machine: Machine) -> None:
    store: Any = machine("faulty://root")
    old = publish(store, 1)
    publish(store, 2)
    real, removed = remote.Remote.remove, []

    class Killed(BaseException):
        pass

    def killed(self, names):
        removed.append(list(names))
        real(self, removed[-1])
        if len(removed) == 1:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(remote.Remote, "remove", killed)
        store.gc(1)
    assert all(name.endswith((".done.json", ".listing.json")) for name in removed[0])
    # the lease that the killed gc held stands still
    late = open_store("faulty://root", str(store.root / "late"), Times(0.05, 0.2, 0.02))
    with late.generation("a", "S", code_version="1", settings={"v": 1}, inputs={}) as generation:
        assert generation.fingerprint == old.fingerprint
        assert generation.record("s", ".parquet") is None
    assert fingerprints(late.gc(1)) == {old.fingerprint}
    assert isinstance(generation, RemoteGeneration)


# ---- what stores answer


def test_what_a_store_refuses_is_told_with_its_remedy(s3: S3Server, tmp_path: Path) -> None:
    answers = {
        "s3://no-such-bucket/root": "; make the bucket, or name another in storage.root or source.url",
        f"{s3.url}/root": "; grant the right to read and write there and run it again",
    }
    for url, remedy in answers.items():
        s3.fault = lambda kind, path: None if "no-such" in path else 403
        with pytest.raises(OSError) as caught, _begun(url, tmp_path):
            pass
        assert told(caught.value).endswith(remedy)
        assert not is_transient(caught.value)


@pytest.mark.parametrize("status", [500, 503])
def test_a_store_that_is_ill_for_long_passes(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    _asks_once(monkeypatch)
    s3.fault = lambda kind, path: status if kind == "PUT" else None
    with pytest.raises(OSError) as caught, _begun(f"{s3.url}/root", tmp_path):
        pass
    assert is_transient(caught.value)


def test_a_store_that_is_not_there_passes(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    _asks_once(monkeypatch)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9") as caught, _begun(f"{s3.url}/root", tmp_path):
        pass
    assert is_transient(caught.value)


def _asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not wait for a server that is ill, in this test alone."""
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(remote, "_file_system", lru_cache(remote._file_system.__wrapped__))


def _begun(url: str, cache: Path) -> AbstractContextManager[Any]:
    return open_store(url, str(cache)).generation("a", "S", code_version="1", settings={}, inputs={})


def test_the_doctor_tells_whether_a_bucket_can_be_reached(s3: S3Server, machine: Machine, tmp_path: Path) -> None:
    def row(root: str) -> tuple[str, str]:
        settings = load_settings(os.devnull, [f"storage.root={root}", f"storage.cache={tmp_path}"], env={})
        checks = {row["what"]: row for row in examine(settings, models=False)["checks"]}
        return checks["storage.root"]["state"], checks["storage.root"]["detail"]

    url = f"{s3.url}/root"
    assert row(url)[0] == "ok" and row(url)[1].startswith(f"{url}, 0 assets; cache {tmp_path}")
    publish(machine(url), 1)
    assert row(url)[1].startswith(f"{url}, 1 assets")
    state, detail = row("s3://no-such-bucket/root")
    assert state == "missing" and "make the bucket" in detail
    s3.fault = lambda kind, path: 403
    assert row(url)[0] == "missing" and "grant the right" in row(url)[1]
    assert row("hf://datasets/a/b")[0] == "missing"
