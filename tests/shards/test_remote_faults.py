"""What goes wrong between a run and its bucket, on a real S3 server: answers lost, keys renewed, holders held up."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dagster_datamask.failures import is_transient, told
from dagster_datamask.shards import remote
from dagster_datamask.shards.remote import Lease, LeaseLost, RootUnusable, open_store
from tests.s3 import S3Server
from tests.shards.test_remote import TIMES, Faulty, faulty, machine, publish  # noqa: F401 - fixtures

pytest_plugins = ("tests.s3",)

NAME = "a/S/" + "0" * 24


@pytest.fixture
def there(s3: S3Server, tmp_path: Path) -> Any:
    return open_store(f"{s3.url}/root", str(tmp_path / "cache"), TIMES, cache_gb=1e6)


# ---- an object that can be created only once


def test_a_creation_whose_answer_was_lost_is_this_run_s_own(s3: S3Server, there: Any) -> None:
    """The client asks again by itself, and the store says that the object is there."""
    left = [1]

    def lost(kind: str, path: str) -> int | None:
        if kind == "PUT" and path.endswith("/.leases/1") and left:
            return left.pop() and 500
        return None

    s3.lost = lost
    lease = Lease(there.remote, NAME, "here")
    lease.acquire(lambda message: pytest.fail(message))
    assert not left and lease.number == 1
    lease.check()
    lease.release()


def test_a_creation_that_another_was_first_with_is_not_this_run_s(s3: S3Server, there: Any) -> None:
    """Between the look and the creation, and with the answer to the first try lost."""
    foreign = Lease(there.remote, NAME, "there")

    def first(kind: str, path: str) -> int | None:
        if kind == "PUT" and path.endswith("/.leases/1"):
            s3.fault = lambda kind, path: None
            assert foreign._take(1)
            return 500
        return None

    s3.fault = first
    lease = Lease(there.remote, NAME, "here")
    assert not lease._take(1)
    assert remote.holds(there.remote, f"{NAME}/.leases", 1, foreign.holder)


def test_a_creation_that_two_make_at_once_is_refused_to_one(s3: S3Server, there: Any) -> None:
    """S3 answers 409 to who comes in the middle of another's creation."""
    s3.fault = lambda kind, path: 409 if kind == "PUT" else None
    lease = Lease(there.remote, NAME, "here")
    assert not lease._take(1)
    s3.reset()
    assert lease._take(1)


# ---- holders that were held up


def test_a_lease_that_gc_removed_is_not_given_back_in_another_s_name(there: Any) -> None:
    """Its holder stood still; gc removed the generation, and another run began it anew under the same number."""
    held_up = Lease(there.remote, NAME, "here")
    held_up.acquire(lambda message: None)
    there.remote.remove(list(there.remote.names()))
    other = Lease(there.remote, NAME, "there")
    other.acquire(lambda message: None)
    assert other.number == held_up.number == 1
    held_up.release()
    other.check()
    other.release()


def test_a_pointer_is_not_left_to_name_what_gc_has_removed(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stands still before its last write, for so long that gc takes its generation for a dead run's."""
    write = remote.Remote.write

    def held_up(self: Any, name: str, value: bytes) -> None:
        if name.endswith("current.json"):
            folder = next(part.partition("/.leases/")[0] for part in self.names() if "/.leases/" in part)
            self.remove(f"{folder}/{part}" for part in list(self.names(folder)))
        write(self, name, value)

    monkeypatch.setattr(remote.Remote, "write", held_up)
    with pytest.raises(LeaseLost) as caught:
        publish(there, 3)
    assert is_transient(caught.value)
    monkeypatch.undo()
    # what Dagster then does
    assert publish(there, 3).path("s").exists()
    assert there.current("a", "S").record("s").rows == 3


# ---- more than a page of names


def test_names_beyond_a_page_are_seen(s3: S3Server, there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 tells 1,000 names at a time, this server ten."""
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    fs, at = there.remote.fs, there.remote.at
    there.remote.each(lambda k: fs.pipe_file(at(f"a/{k:02d}/current.json"), b"{}"), range(12))
    there.remote.each(lambda k: fs.pipe_file(at(f"{NAME}/.leases/{k + 1}"), b"{}"), range(12))
    s3.reset()
    assert there.remote.folders("a") == [*(f"{k:02d}" for k in range(12)), "S"]
    assert len(there.remote.names("a")) == 24
    assert remote.lease_numbers(there.remote, f"{NAME}/.leases") == list(range(1, 13))
    assert s3.requests["LIST"] == 2 + 3 + 2


# ---- keys


def test_keys_that_have_expired_are_told_with_their_remedy(s3: S3Server, there: Any) -> None:
    s3.fault = lambda kind, path: 400
    for ask in (lambda: there.current("a", "S"), lambda: there.snapshots("a"), lambda: publish(there, 1)):
        with pytest.raises(OSError) as caught:
            ask()
        assert told(caught.value).endswith("; renew the store's keys where whatever runs this takes them from")
        assert not is_transient(caught.value)


def test_a_process_takes_up_keys_that_were_renewed_in_their_file(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "credentials"

    def write(token: str, second: int) -> None:
        keys.write_text(f"[default]\naws_access_key_id=k\naws_secret_access_key=s\naws_session_token={token}\n")
        os.utime(keys, (second, second))

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    write("first", 1)
    valid = ["first"]
    s3.fault = lambda kind, path: None if s3.environ.get("HTTP_X_AMZ_SECURITY_TOKEN") in valid else 400
    store = open_store(f"{s3.url}/root", str(tmp_path / "cache"), TIMES)
    with store.generation("a", "S", code_version="1", settings={}, inputs={}) as generation:
        # the first ones end in the middle of a run, after the second were written
        write("second", 2)
        valid[:] = ["second"]
        (generation.folder / "s.bin").write_bytes(b"x")
        record = generation.complete("s", ".bin", rows=1, rows_in=1, counts={"good": 1})
        generation.publish([record], ".bin", {})
    assert store.current("a", "S").path("s").read_bytes() == b"x"


@pytest.mark.usefixtures("faulty")
def test_an_answer_that_does_not_come_is_no_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec takes any error for the answer that nothing is there, and Arrow asks it."""
    store = open_store("faulty://root", str(tmp_path), TIMES)
    published = publish(store, 3)
    path, files = published.place("s")

    def down(self: Any, path: str, **options: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    with monkeypatch.context() as patch:
        patch.setattr(Faulty, "info", down)
        with pytest.raises(OSError, match="Input/output error"):
            store.snapshots("a")
        with files.open_input_file(path) as file:
            assert file.read() == published.path("s").read_bytes()
    assert store.snapshots("a") == ["S"] and store.snapshots("b") == []
    with pytest.raises(FileNotFoundError):
        files.open_input_file(f"{path}.other")


# ---- URLs


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ("s3://", "it names no bucket; write s3://bucket/folder"),
        ("s3:///root", "it names no bucket"),
        ("gs://", "it names no bucket; write gs://bucket/folder"),
        ("s3://bucket//root", "// in it is read otherwise by stores"),
        ("s3://bucket/a/../b", ".. in it is read otherwise"),
        ("s3:/bucket/root", "no folder is meant by 's3:'; write a bucket's URL with two slashes: s3://bucket/folder"),
        # as a relative path in datamask.toml becomes
        ("/data/gs:/bucket/root", "no folder is meant by 'gs:'"),
    ],
)
def test_a_url_that_is_read_in_two_ways_is_refused(root: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(RootUnusable) as caught:
        open_store(root, str(tmp_path))
    assert str(caught.value).startswith(f"storage.root = {root}: ") and why in str(caught.value)


@pytest.mark.usefixtures("faulty")
def test_a_store_without_buckets_may_have_a_path_that_begins_with_a_slash(tmp_path: Path) -> None:
    store = open_store("faulty:///deep/root", str(tmp_path), TIMES)
    publish(store, 1)
    assert store.snapshots("a") == ["S"]


def test_a_cache_of_fsspec_s_before_a_bucket_is_no_root(s3: S3Server, tmp_path: Path) -> None:
    with pytest.raises(RootUnusable, match="cannot create an object only once"):
        publish(open_store(f"simplecache::{s3.url}/root", str(tmp_path), TIMES), 1)


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_a_slash_at_the_end_is_none(s3: S3Server, tmp_path: Path, end: str) -> None:
    for bucket in (s3.url, f"{s3.url}/deep/root"):
        store = open_store(f"{bucket}{end}", str(tmp_path), TIMES)
        assert store.where == bucket
        publish(store, 1)
        assert store.snapshots("a") == ["S"]


def test_a_root_beside_one_whose_name_it_begins_with(s3: S3Server, tmp_path: Path) -> None:
    one, two = (open_store(f"{s3.url}/{name}", str(tmp_path / name), TIMES) for name in ("root", "root2"))
    made = publish(two, 1)
    assert one.gc(1) == [] and one.snapshots("a") == [] and one.published("a", "S") is None
    publish(one, 2)
    assert two.current("a", "S").fingerprint == made.fingerprint
