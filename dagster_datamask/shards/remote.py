"""A root on an object store: what is done lies there, and a cache of this machine is where files are made and mapped.

Object stores rename nothing and lock nothing. So a file is uploaded, verified, and counts with its record, one object
written last; a generation counts with its pointer, again one object. Who may write is decided by objects that can be
created only once (`Lease`). All that is read comes through the cache, its SHA-256 proved, and may be deleted there at
any time.

Here: what differs from a root on a disk. The rules are `generations`'.
"""

import errno
import inspect
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import md5
from pathlib import Path
from typing import Any

import platformdirs
import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

from dagster_datamask.keyed import digest
from dagster_datamask.redaction import ITS_PLACE, has_secret
from dagster_datamask.shards.cache import INCOMING, RECEIPTS, Cache, cache, is_verified, remove_stale, used, verified
from dagster_datamask.shards.generations import (
    DONE,
    INPUTS,
    LEASE,
    POINTER,
    WORK,
    Generation,
    Published,
    ShardRecord,
    Store,
    file_lease,
    fingerprint_of,
    is_held,
    lease_if_free,
    record_of,
)
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.shards.writer import atomic, file_sha256, json_bytes, remove_temps

# records and other files of a generation, with sizes and hashes, in one object: a reader needs no other
LISTING = ".listing.json"
_LEASES = ".leases"
# the number of the lease under which this machine wrote a generation last
_HELD = ".held"
# what is in a generation's folder of the cache and is none of its files
_OWN = {LEASE, INPUTS, WORK, RECEIPTS, _HELD}
_ATTEMPTS = 3
# requests that are under way at a time
_AT_ONCE = 16
# objects that gc removes before it asks again whether it may
_BETWEEN_CHECKS = 256
# of an upload in parts; an S3 ETag can be told only where their size is known
_PART_BYTES = 64 * 2**20
_MOST_PARTS = 10_000
# what a URL of them begins with; without its second slash it would be a folder
_OF_BUCKETS = frozenset({"s3:", "s3a:", "gs:", "gcs:", "abfs:", "az:", "hf:", "http:", "https:", "file:", "memory:"})
# stores whose files are commits or are read only
_NO_ROOTS = {
    "hf": "the hub takes commits, and nothing there can be created only once, so two runs could write one folder; "
    "it serves as source.url. Give a folder or a bucket (s3://, gs://), and hand the job export's folder to the hub",
    "http": "nothing can be written there; give a folder or a bucket (s3://, gs://)",
    "https": "nothing can be written there; give a folder or a bucket (s3://, gs://)",
}


class RootUnusable(ValueError):
    """The root's store cannot hold results; the message says why and what can."""


class LeaseLost(ConnectionError):
    """Another run has taken over what this one was writing, as it gave no sign of life; trying again may help."""


@dataclass(frozen=True)
class Times:
    """How often a holder shows that it lives, how long another waits for that, and how often it looks; seconds."""

    renew: float = 10.0
    patience: float = 60.0
    look: float = 2.0


def open_store(root: str, cache: str = "", times: Times = Times(), cache_gb: float | None = None) -> Store:
    """The store of a root: a folder, or any fsspec URL whose files can be created only once.

    cache: the folder for what a URL's store holds; "" is one below the user's cache folder. cache_gb: what it may take
    of its disk, in 10⁹ bytes; None: what leaves 15 % of it free.
    Raises RootUnusable for a URL of no known or no usable store, and for one that holds a credential.
    """
    if has_secret(root):
        raise RootUnusable(
            f"storage.root is a URL with a password or key in it; put that into {ITS_PLACE}, and take it out of the URL"
        )
    if "://" not in root:
        if (part := next((part for part in Path(root).parts if part in _OF_BUCKETS), None)) is not None:
            raise RootUnusable(
                f"storage.root = {root}: no folder is meant by {part!r}; write a bucket's URL with two slashes: "
                f"{part}//bucket/folder"
            )
        return Store(Path(root))
    if root.startswith("file://"):
        return Store(Path(root.removeprefix("file://")))
    _check_names(root)
    remote = Remote(root.rstrip("/"), cache, times, None if cache_gb is None else cache_gb * 1e9)
    remote.fs  # noqa: B018 - an unknown protocol or a missing library shows here
    return RemoteStore(remote.local(), remote)


def _check_names(url: str) -> None:
    """Raise RootUnusable for a URL without a bucket, and for one whose parts clients and stores take for different
    names."""
    protocol, _, path = url.partition("://")
    bucket, *folders = path.rstrip("/").split("/")
    # for a store without buckets a path may begin with a slash
    if not bucket and (f"{protocol}:" in _OF_BUCKETS or not folders):
        raise RootUnusable(f"storage.root = {url}: it names no bucket; write {protocol}://bucket/folder")
    if (wrong := next((folder for folder in folders if folder in ("", ".", "..")), None)) is not None:
        raise RootUnusable(
            f"storage.root = {url}: {wrong or '//'} in it is read otherwise by stores than by their clients; write the "
            "folders with one slash between"
        )


def _keys_of() -> tuple[int, ...]:
    """Changes with the files that clients read their keys from, once: whoever lives for long takes up renewed ones."""
    found = []
    for place in (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or "~/.config/gcloud/application_default_credentials.json",
    ):
        try:
            found.append(Path(place).expanduser().stat().st_mtime_ns)
        except (OSError, RuntimeError):
            # none there, or no home to look in
            found.append(0)
    return tuple(found)


@lru_cache(maxsize=8)
def _file_system(url: str, process: int, keys: tuple[int, ...]) -> tuple[AbstractFileSystem, str]:
    """One file system object a process, as connections do not survive a fork, and one for its keys."""
    protocol = url.partition("://")[0].rpartition("::")[2]
    if protocol in _NO_ROOTS:
        raise RootUnusable(f"storage.root = {url}: {_NO_ROOTS[protocol]}")
    try:
        # an old listing is no listing: other machines write here
        fs, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except (ValueError, ImportError) as error:
        extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
        remedy = f"; pip install 'dagster-datamask[{extra}]'" if extra else ""
        raise RootUnusable(f"storage.root = {url}: {error}{remedy}") from error
    return fs, path.rstrip("/")


@dataclass(frozen=True)
class Remote:
    """The objects below a URL, by their names relative to it, and their copies in a folder of this machine."""

    url: str
    cache: str = ""
    times: Times = Times()
    most: float | None = None

    @property
    def fs(self) -> AbstractFileSystem:
        return _file_system(self.url, os.getpid(), _keys_of())[0]

    def at(self, name: str) -> str:
        return f"{_file_system(self.url, os.getpid(), _keys_of())[1]}/{name}"

    def local(self, *names: str) -> Path:
        """Where this machine keeps what the store has under a name."""
        return self._base.joinpath(digest(self.url, size=8).hex(), *names)

    @property
    def copies(self) -> Cache:
        """The cache, as this process uses it."""
        return cache(self._base, self.most)

    @property
    def _base(self) -> Path:
        return Path(self.cache) if self.cache else platformdirs.user_cache_path("datamask") / "roots"

    def names(self, folder: str = "") -> dict[str, int]:
        """{name below `folder`: bytes} of all objects there, in one listing."""
        return {name: int(info["size"] or 0) for name, info in self.listed(folder).items()}

    def listed(self, folder: str = "") -> dict[str, dict[str, Any]]:
        """{name below `folder`: what the store tells of it}."""
        path = self.at(folder).rstrip("/")
        try:
            found = self.fs.find(path, detail=True)
        except FileNotFoundError:
            return {}
        prefix = self.fs._strip_protocol(path).rstrip("/") + "/"
        return {name.removeprefix(prefix): info for name, info in sorted(found.items()) if name.startswith(prefix)}

    def folders(self, folder: str) -> list[str]:
        """Names of the folders right below `folder`."""
        try:
            entries = self.fs.ls(self.at(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory")

    def has(self, name: str) -> bool:
        """Whether there is such an object. fsspec's own `exists` takes any error for its absence."""
        try:
            self.fs.info(self.at(name))
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """The bytes of an object, None where there is none."""
        # what is read here is small: S3's client would ask for its size first
        whole = {"max_concurrency": 1} if _is_s3(self.fs) else {}
        try:
            return bytes(self.fs.cat_file(self.at(name), **whole))
        except FileNotFoundError:
            return None

    def told(self, name: str) -> dict[str, Any] | None:
        """The JSON object of a name, None where there is none. Raises InconsistentFiles where it is cut off."""
        for _ in range(_ATTEMPTS):
            found = self.read(name)
            if found is None:
                return None
            with suppress(ValueError):
                told = json.loads(found)
                if isinstance(told, dict):
                    return told
        raise InconsistentFiles(f"{self.url}/{name} is cut off or no JSON; materialise its asset again")

    def told_if_whole(self, name: str) -> dict[str, Any] | None:
        """The JSON object of a name; None where there is none, or none whole, which counts for nothing."""
        with suppress(InconsistentFiles):
            return self.told(name)
        return None

    def many(self, names: Iterable[str]) -> dict[str, dict[str, Any] | None]:
        """{name: its JSON object, None where that is not whole}, asked for side by side."""
        return dict(self.each(lambda name: (name, self.told_if_whole(name)), names))

    def each(self, do: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(do, names))

    def write(self, name: str, value: bytes) -> None:
        """Put a small object in the place of an earlier one, and prove that the store has the whole of it.

        Raises OSError where on every try it has not.
        """
        self._make_folder(name)
        for _ in range(_ATTEMPTS):
            self.fs.pipe_file(self.at(name), value)
            if (size := int(self.fs.info(self.at(name))["size"])) == len(value):
                return
        raise OSError(f"{self.url}/{name}: the store has {size:,} of the {len(value):,} bytes that were written")

    def create(self, name: str, value: bytes) -> bool:
        """Put an object that is not there yet; False where one is, be it another's or of this very call's first try."""
        self._make_folder(name)
        if not _has_exclusive_create(self.fs):
            raise RootUnusable(_cannot_create(self.url))
        try:
            self.fs.pipe_file(self.at(name), value, mode="create")
        except FileExistsError:
            return False
        except (TypeError, ValueError, NotImplementedError) as error:
            raise RootUnusable(_cannot_create(self.url)) from error
        except OSError as error:
            if error.errno == errno.ENOSYS:
                raise RootUnusable(_cannot_create(self.url)) from error
            if not _says_exists(error):
                raise
            return False
        return True

    def remove(self, names: Iterable[str]) -> None:
        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self.at(name))

        self.each(remove, names)

    def upload(self, path: Path, name: str, size: int, sha256: str) -> None:
        """Put a file, and prove that the store has it: its size, and its checksum or else its bytes read back.

        Raises OSError where on every try it has not.
        """
        self._make_folder(name)
        parts = {"chunksize": max(_PART_BYTES, -(-size // _MOST_PARTS))} if _is_s3(self.fs) else {}
        for _ in range(_ATTEMPTS):
            self.fs.put_file(str(path), self.at(name), **parts)
            info = self.fs.info(self.at(name))
            if info["size"] == size and (
                _same_checksum(info, path, parts.get("chunksize", 0)) or self._reads_as(name, sha256)
            ):
                return
        raise OSError(f"{self.url}/{name}: the store does not have what was uploaded; it tells {info['size']} bytes")

    def copy(self, name: str, to: str) -> int:
        """Have the store copy an object; the copy's size. Raises FileNotFoundError."""
        self._make_folder(to)
        self.fs.cp_file(self.at(name), self.at(to))
        return int(self.fs.info(self.at(to))["size"])

    def fetch(self, folder: str, name: str, size: int, sha256: str) -> Path:
        """The file `name` of a generation's `folder`, in the cache: fetched where it is not, its size and hash proved.

        Raises InconsistentFiles where the store has something else than was recorded, OSError where it comes cut off.
        """
        path = self.local(folder, name)
        # before it is looked for: what is in use stays
        self.copies.hold(self.local(folder))
        if is_verified(self.local(folder), name, size, sha256):
            used(self.local(folder), name)
            return path
        with _fetching(path):
            if is_verified(self.local(folder), name, size, sha256):
                return path
            self.copies.make_room(size)
            why = ""
            for _ in range(_ATTEMPTS):
                with self._incoming() as temp:
                    try:
                        self.fs.get_file(self.at(f"{folder}/{name}"), str(temp))
                    except FileNotFoundError:
                        raise InconsistentFiles(
                            f"{self.url}/{folder}/{name} is gone, though it is recorded; materialise "
                            f"{folder.rpartition('/')[0]} again"
                        ) from None
                    got, found = temp.stat().st_size, file_sha256(temp)
                    if (got, found) == (size, sha256):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        temp.replace(path)
                        verified(self.local(folder), name, size, sha256)
                        return path
                    why = f"{got:,} of {size:,} bytes came" if got != size else f"its SHA-256 is {found[:16]}…"
            place = f"{self.url}/{folder}/{name}"
            if int(self.fs.info(self.at(f"{folder}/{name}"))["size"]) == size and got != size:
                raise OSError(f"{place}: on each of {_ATTEMPTS} tries {why}")
            raise InconsistentFiles(
                f"{place} is not what was recorded: {why}, not {sha256[:16]}… of {size:,} bytes; delete the object and "
                f"materialise {folder.rpartition('/')[0]} again"
            )

    @contextmanager
    def _incoming(self) -> Iterator[Path]:
        """A place for what is under way, on the cache's disk but in no generation, which its writer tidies."""
        folder = self.local(INCOMING)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{os.getpid()}-") as temp:
            yield Path(temp) / "file"

    def _reads_as(self, name: str, sha256: str) -> bool:
        with self._incoming() as temp:
            self.fs.get_file(self.at(name), str(temp))
            return file_sha256(temp) == sha256

    def _make_folder(self, name: str) -> None:
        """Stores without folders make none; what is mounted as one does."""
        if not _is_object_store(self.fs):
            self.fs.makedirs(self.at(name).rpartition("/")[0], exist_ok=True)


def _is_s3(fs: AbstractFileSystem) -> bool:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return "s3" in protocols


class _Handler(FSSpecHandler):
    """As Arrow's, which asks first whether there is a file, and takes any error for the answer no."""

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(self.fs.open(path, mode="rb"), mode="r")


def _is_object_store(fs: AbstractFileSystem) -> bool:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not {"s3", "gs", "gcs", "abfs", "az"}.isdisjoint(protocols)


def _has_exclusive_create(fs: AbstractFileSystem) -> bool:
    """Whether the file system has its own way to create a file only once: fsspec's looks first and then writes."""
    if fs.async_impl:
        # one that stands before another store has none of its own
        own = getattr(type(fs), "_pipe_file", None)
        return own is not None and "mode" in inspect.signature(own).parameters
    return type(fs).pipe_file is not AbstractFileSystem.pipe_file


def _says_exists(error: BaseException) -> bool:
    """Precondition failed, or another creates it at this moment (S3's 409)."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        if status in (409, 412) or getattr(cause, "code", None) in (409, 412):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _cannot_create(url: str) -> str:
    return (
        f"storage.root = {url}: this store cannot create an object only once, so two runs could write one folder; give "
        "a folder, or a bucket of a store that has conditional writes (s3://, gs://)"
    )


def _same_checksum(info: Mapping[str, Any], path: Path, part: int) -> bool:
    """Whether the store's own checksum tells that it holds the file. False too where it tells none, or one of another
    making (S3's ETag of what it encrypts itself)."""
    etag = str(info.get("ETag") or "").strip('"')
    if etag and part:
        return etag == _etag(path, part)
    given = info.get("md5Hash")
    return isinstance(given, str) and given == b64encode(_md5(path)).decode()


def _sum_of(info: Mapping[str, Any]) -> str:
    """The store's own checksum of an object, whatever it is made from; "" where it tells none."""
    return str(info.get("ETag") or info.get("md5Hash") or "").strip('"')


def _etag(path: Path, part: int) -> str:
    """S3's checksum of a file: MD5, or where it came in parts that of their MD5s, and how many there were."""
    if path.stat().st_size < 2 * part:
        return _md5(path).hex()
    parts = []
    with path.open("rb") as file:
        while block := file.read(part):
            parts.append(md5(block, usedforsecurity=False).digest())
    return f"{md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def _md5(path: Path) -> bytes:
    hasher = md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
    return hasher.digest()


_under_way: dict[Path, threading.Lock] = {}
_under_way_guard = threading.Lock()


@contextmanager
def _fetching(path: Path) -> Iterator[None]:
    """One thread of this process at a time fetches a file."""
    with _under_way_guard:
        lock = _under_way.setdefault(path, threading.Lock())
    try:
        with lock:
            yield
    finally:
        with _under_way_guard:
            _under_way.pop(path, None)


class Lease:
    """The right to write a generation, held by one run among all machines.

    Lease objects are numbered and each can be created only once; the highest counts. Its holder rewrites it every
    `renew` seconds with a higher count, and gives it back by saying so in it. Another run creates the next number when
    it is given back, or when its bytes stood still for `patience` seconds by the waiting run's own clock, which runs
    evenly: no clock is compared with another. A holder that was held up (stopped, cut off) finds the higher number
    before it records or publishes anything. The objects of a generation that is done stay, so that numbers only rise.
    """

    def __init__(self, remote: Remote, folder: str, place: str) -> None:
        """place: names the local lock that is held with it: who holds that lock has outlived its earlier holder."""
        self._remote, self._folder, self._place = remote, f"{folder}/{_LEASES}", place
        self.holder, self._number, self._count = uuid.uuid4().hex, 0, 0
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._renewing: threading.Thread | None = None

    def acquire(self, waiting: Callable[[str], None]) -> None:
        """Wait for the lease and hold it. Raises RootUnusable where the store creates an object twice."""
        told = False
        seen, since = b"", time.monotonic()
        while True:
            # before it is read and after: were this process stopped in between, no stop of the holder's is seen in it
            before = time.monotonic()
            number = self._highest()
            held = self._remote.read(f"{self._folder}/{number}") if number else None
            if held != seen:
                seen, since = held or b"", time.monotonic()
            if self._is_free(held, before - since) and self._take(number + 1):
                break
            if not told:
                place = f"{self._remote.url}/{self._folder.removesuffix('/' + _LEASES)}"
                waiting(f"another run is writing {place}; waiting for it")
                told = True
            time.sleep(self._remote.times.look)
        self._keep()

    def acquire_as_seen(self, number: int, body: bytes) -> bool:
        """Hold the lease if nobody has had it, nor renewed it, since its object `number` was read as `body`."""
        if self._highest() != number or self._remote.read(f"{self._folder}/{number}") != body:
            return False
        if not self._take(number + 1):
            return False
        self._keep()
        return True

    def check(self) -> None:
        """Raise LeaseLost where another run holds the lease now."""
        if self._lost.is_set() or not holds(self._remote, self._folder, self._number, self.holder):
            self._lost.set()
            raise lost(self._remote, self._folder)

    @property
    def number(self) -> int:
        return self._number

    def stop(self) -> None:
        """Renew the lease no more, and do not give it back."""
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join()

    def release(self) -> None:
        """Give the lease back, where it is still held."""
        self.stop()
        if not self._lost.is_set():
            # what cannot be given back is taken over, and what is published stays so
            with suppress(Exception):
                # where gc has removed the generation meanwhile, its number may be another's
                if holds(self._remote, self._folder, self._number, self.holder):
                    self._remote.write(f"{self._folder}/{self._number}", self._body(released=True))
                    # lower numbers say nothing any more
                    self._remote.remove(f"{self._folder}/{n}" for n in self._numbers() if n < self._number)

    def _is_free(self, held: bytes | None, still: float) -> bool:
        if held is None or _fact(held, "released") is True:
            return True
        return _fact(held, "place") == self._place or still >= self._remote.times.patience

    def _take(self, number: int) -> bool:
        self._number = number
        name, body = f"{self._folder}/{number}", self._body()
        if not self._remote.create(name, body):
            # the answer to a first try may have been lost on its way
            return self._remote.read(name) == body
        if self._remote.url not in _creates_once:
            if self._remote.create(name, body):
                raise RootUnusable(_cannot_create(self._remote.url))
            _creates_once.add(self._remote.url)
        return True

    def _keep(self) -> None:
        self._renewing = threading.Thread(target=self._renew, daemon=True, name="datamask-lease")
        self._renewing.start()

    def _renew(self) -> None:
        while not self._ended.wait(self._remote.times.renew):
            # a store that does not answer is asked again at the next turn, whatever its client calls that
            with suppress(Exception):
                if not holds(self._remote, self._folder, self._number, self.holder):
                    self._lost.set()
                    return
                self._count += 1
                self._remote.write(f"{self._folder}/{self._number}", self._body())

    def _body(self, released: bool = False) -> bytes:
        return json_bytes({"holder": self.holder, "place": self._place, "count": self._count, "released": released})

    def _numbers(self) -> list[int]:
        return lease_numbers(self._remote, self._folder)

    def _highest(self) -> int:
        return max(self._numbers(), default=0)


# stores that were seen to refuse a second creation, by this process
_creates_once: set[str] = set()


def lease_numbers(remote: Remote, folder: str) -> list[int]:
    try:
        entries = remote.fs.ls(remote.at(folder), detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for entry in entries if (name := entry.rpartition("/")[2]).isdigit())


def holds(remote: Remote, folder: str, number: int, holder: str) -> bool:
    """Whether the lease object `number` is the highest and still `holder`'s: where gc has removed a generation,
    numbers begin anew."""
    if max(lease_numbers(remote, folder), default=0) != number:
        return False
    try:
        told = remote.told(f"{folder}/{number}")
    except InconsistentFiles:
        # cut off on its way: the number says enough
        return True
    return told is not None and told.get("holder") == holder


def lost(remote: Remote, folder: str) -> LeaseLost:
    place = f"{remote.url}/{folder.removesuffix('/' + _LEASES)}"
    return LeaseLost(f"another run has taken over {place}, as this one gave no sign of life; run it again")


def _fact(body: bytes, name: str) -> Any:
    try:
        return json.loads(body)[name]
    except (ValueError, KeyError, TypeError):
        return None


def _is_released(lease: tuple[int, bytes] | None) -> bool:
    return lease is not None and _fact(lease[1], "released") is True


@dataclass(frozen=True)
class RemotePublished(Published):
    """A published generation of an object store. `folder` is its place in the cache, which holds what was read."""

    remote: Remote = field(kw_only=True)

    @property
    def name(self) -> str:
        return _name_of(self.asset, self.snapshot, self.fingerprint)

    @property
    def where(self) -> str:
        return f"{self.remote.url}/{self.name}"

    def file(self, name: str) -> Path:
        known = self._listing.known
        parts = [name] if name in known else [part for part in known if not name or part.startswith(f"{name}/")]
        for part in parts:
            self.remote.fetch(self.name, part, *known[part])
        if not parts and (record := self._record_apart(name)) is not None:
            self.remote.fetch(self.name, name, record.bytes, record.sha256)
        return self.folder / name

    def place(self, shard: str) -> tuple[str, FileSystem]:
        """In the store: to read a few columns of many shards fetches none of them."""
        name = f"{self.name}/{shard}{self.ext}"
        return self.remote.at(name), PyFileSystem(_Handler(self.remote.fs))

    def record(self, shard: str) -> ShardRecord:
        name = f"{shard}{self.ext}"
        record = self._listing.records.get(name) or self._record_apart(name)
        if record is None:
            raise FileNotFoundError(f"{self.where}/{name}{DONE} does not exist")
        return record

    @cached_property
    def _listing(self) -> "_Listing":
        return _Listing.read(self.remote, self.name)

    def _record_apart(self, name: str) -> ShardRecord | None:
        """The record of a file that the listing does not tell of, as when its generation is being mended."""
        return _whole(self.remote.told_if_whole(f"{self.name}/{name}{DONE}"))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "folder"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # the cache of the machine that it has come to
        self.__dict__["folder"] = self.remote.local(self.name)


@dataclass(frozen=True)
class _Listing:
    """What a generation's listing tells: {file without a record: (bytes, SHA-256)}, {file: record}, and
    {recorded file: the store's own checksum of it when it was published first}, where the store tells one."""

    files: dict[str, tuple[int, str]]
    records: dict[str, ShardRecord]
    sums: dict[str, str]

    @classmethod
    def read(cls, remote: Remote, folder: str) -> "_Listing":
        told = remote.told_if_whole(f"{folder}/{LISTING}") or {"files": {}, "records": {}}
        records = {name: _whole(record) for name, record in told["records"].items()}
        return cls(
            {name: (int(size), str(sha256)) for name, (size, sha256) in told["files"].items()},
            {name: record for name, record in records.items() if record is not None},
            dict(told.get("sums", {})),
        )

    @cached_property
    def known(self) -> dict[str, tuple[int, str]]:
        """{file: (bytes, SHA-256)} of both."""
        return self.files | {name: (record.bytes, record.sha256) for name, record in self.records.items()}

    def bytes(self) -> bytes:
        records = {name: asdict(record) for name, record in self.records.items()}
        return json_bytes({"files": self.files, "records": records, "sums": self.sums})


def _whole(told: Mapping[str, Any] | None) -> ShardRecord | None:
    """The record that is told, where all of it is."""
    with suppress(TypeError):
        return None if told is None else record_of(told)
    return None


def _name_of(asset: str, snapshot: str | None, fingerprint: str = "") -> str:
    return "/".join(part for part in (asset, snapshot, fingerprint) if part)


@dataclass(frozen=True)
class RemoteStore(Store):
    """A root on an object store; `root` is its folder in the cache."""

    remote: Remote

    @property
    def where(self) -> str:
        return self.remote.url

    @property
    def on_disk(self) -> bool:
        return False

    def reached(self) -> str:
        """In words, what the store and the cache answer. Raises what the store's client raises where it cannot be
        reached."""
        try:
            there = len(self.remote.fs.ls(self.remote.at("").rstrip("/"), detail=False))
        except FileNotFoundError as error:
            # a store that says so itself misses the bucket; a folder that is missing is made by the first run
            if error.__cause__ is not None:
                raise
            there = 0
        at = next(path for path in (self.root, *self.root.parents) if path.exists())
        return f"{there} assets; cache {self.root}, {shutil.disk_usage(at).free / 1e9:,.1f} GB free"

    def __reduce__(self) -> tuple[Any, ...]:
        return _on_this_machine, (self.remote,)

    def _pointer(self, asset: str, snapshot: str | None) -> dict[str, Any] | None:
        return self.remote.told(f"{_name_of(asset, snapshot)}/{POINTER}")

    def _published(self, pointer: Mapping[str, Any]) -> Published:
        return RemotePublished(**self._told_by(pointer), remote=self.remote)

    def snapshots(self, asset: str) -> list[str]:
        names = self.remote.folders(asset)
        there = self.remote.each(lambda name: self.remote.has(f"{asset}/{name}/{POINTER}"), names)
        return [name for name, is_there in zip(names, there, strict=True) if is_there]

    @contextmanager
    def generation(
        self,
        asset: str,
        snapshot: str | None,
        *,
        code_version: str,
        settings: Mapping[str, Any],
        inputs: Mapping[str, str],
        waiting: Callable[[str], None] = lambda message: None,
    ) -> Iterator[Generation]:
        fingerprint = fingerprint_of(asset, snapshot, code_version, settings, inputs)
        folder = self.folder(asset, snapshot) / fingerprint
        name = _name_of(asset, snapshot, fingerprint)
        with self.remote.copies.work(), file_lease(folder, waiting):
            self.remote.copies.hold(folder)
            lease = Lease(self.remote, name, _lock_identity(folder / LEASE))
            lease.acquire(waiting)
            try:
                remove_temps(folder)
                generation = RemoteGeneration(
                    self, asset, snapshot, fingerprint, folder, code_version, dict(settings), dict(inputs),
                    remote=self.remote, number=lease.number, holder=lease.holder,
                )  # fmt: skip
                generation.begin()
                yield generation
            finally:
                lease.release()

    def gc(self, keep: int) -> list[tuple[str, int]]:
        """As of a folder; and what this machine's cache holds of generations that are gone goes with them."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        there, leases, held = self._judged()
        # after the leases: what was given back before they were read is published by now
        reading = self._read_by(held)
        wanted = self._published_and_made_from(there) | reading
        removed = []
        for name in there.spare(keep, wanted):
            lease = Lease(self.remote, name, "")
            # whoever has begun it since, be it to publish it, has changed its lease
            if name in held or not lease.acquire_as_seen(*leases[name]):
                continue
            with suppress(LeaseLost):
                self._remove(name, lease)
                removed.append((name, there.bytes_of(name)))
        self._trim(reading)
        return removed

    def _judged(self) -> tuple["_Everything", dict[str, tuple[int, bytes]], set[str]]:
        """What is there, the last lease of each generation, and whose was not given back and is renewed: a killed
        run's, or a killed gc's, stands still."""
        there = _Everything.listed(self.remote)
        leases = self._last_leases(there)
        unreleased = {name for name in there.generations if not _is_released(leases.get(name))}
        if not unreleased:
            return there, leases, set()
        time.sleep(self.remote.times.patience)
        before, there = leases, _Everything.listed(self.remote)
        leases = self._last_leases(there)
        held = {
            name
            for name in there.generations
            if name not in leases or (not _is_released(leases[name]) and leases[name] != before.get(name))
        }
        return there, leases, held

    def _last_leases(self, there: "_Everything") -> dict[str, tuple[int, bytes]]:
        """{generation: (number, body) of its highest lease}, without those that went meanwhile."""
        numbers = {name: max(found) for name, found in there.generations.items()}
        bodies = self.remote.each(self.remote.read, [f"{name}/{_LEASES}/{n}" for name, n in numbers.items()])
        found = zip(numbers.items(), bodies, strict=True)
        return {name: (number, body) for (name, number), body in found if body is not None}

    def _remove(self, name: str, lease: Lease) -> None:
        """Records first, leases last: what a killed gc leaves is a generation of which nothing counts as done.

        Raises LeaseLost where another run has taken over from this gc.
        """
        try:
            names = [f"{name}/{part}" for part in self.remote.names(name)]
            leases = [part for part in names if f"/{_LEASES}/" in part]
            records = [part for part in names if part.endswith((DONE, f"/{LISTING}"))]
            for some in (records, sorted(set(names) - set(records) - set(leases))):
                for k in range(0, len(some), _BETWEEN_CHECKS):
                    lease.check()
                    self.remote.remove(some[k : k + _BETWEEN_CHECKS])
            lease.check()
        except BaseException:
            lease.release()
            raise
        lease.stop()
        own = f"{name}/{_LEASES}/{lease.number}"
        self.remote.remove(part for part in leases if part != own)
        self.remote.remove([own])

    def _published_and_made_from(self, there: "_Everything") -> set[str]:
        """Fingerprints that a pointer names, or a current generation was made from. Raises InconsistentFiles."""
        names = {*there.pointers, *(f"{name.rpartition('/')[0]}/{POINTER}" for name in there.generations)}
        # one that cannot be read would leave its generation unprotected
        pointers = [told for told in self.remote.each(self.remote.told, sorted(names)) if told is not None]
        return {p["fingerprint"] for p in pointers} | {f for p in pointers for f in p["inputs"].values()}

    def _read_by(self, generations: Iterable[str]) -> set[str]:
        """Fingerprints that the runs of these generations read."""
        inputs = self.remote.each(self.remote.told, [f"{name}/{INPUTS}" for name in sorted(generations)])
        return {fingerprint for told in inputs for fingerprint in (told or {}).values()}

    def _trim(self, reading: set[str]) -> None:
        """Remove from this machine's cache what the store has no more, and no run writes here or reads."""
        there = _Everything.listed(self.remote).generations.keys()
        # a generation that was only read here has no lease of this machine
        folders = sorted({path.parent for kept in (LEASE, RECEIPTS) for path in self.root.glob(f"**/{kept}")})
        names = {folder: folder.relative_to(self.root).as_posix() for folder in folders}
        written = [name for folder, name in names.items() if (folder / LEASE).exists() and is_held(folder / LEASE)]
        reading = reading | self._read_by(written)
        for folder, name in names.items():
            if name in there or folder.name in reading:
                continue
            with self.remote.copies.if_unused(folder) as unused, lease_if_free(folder) as free:
                if unused and free:
                    shutil.rmtree(folder, ignore_errors=True)
        remove_stale(self.root / INCOMING)


def _on_this_machine(remote: Remote) -> RemoteStore:
    return RemoteStore(remote.local(), remote)


def _lock_identity(lock: Path) -> str:
    """Names the local lock file among those of all machines, since the machine was started."""
    stat = lock.stat()
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        machine = f"{uuid.getnode():x}"
    return digest(machine, stat.st_dev, stat.st_ino, size=12).hex()


@dataclass(frozen=True)
class _Everything:
    """One listing of the root: pointers, and generations with the numbers of their leases."""

    pointers: list[str]
    generations: dict[str, list[int]]
    infos: dict[str, dict[str, Any]]

    @classmethod
    def listed(cls, remote: Remote) -> "_Everything":
        infos = remote.listed()
        generations: dict[str, list[int]] = {}
        for name in infos:
            folder, _, number = name.rpartition("/")
            if folder.endswith(f"/{_LEASES}") and number.isdigit():
                generations.setdefault(folder.removesuffix(f"/{_LEASES}"), []).append(int(number))
        pointers = [name for name in infos if name.rpartition("/")[2] == POINTER]
        return cls(pointers, generations, infos)

    def spare(self, keep: int, wanted: set[str]) -> list[str]:
        """All but the newest `keep` of each asset and snapshot, and none that is wanted."""
        of: dict[str, list[str]] = {}
        for name in self.generations:
            of.setdefault(name.rpartition("/")[0], []).append(name)
        found = []
        for _, names in sorted(of.items()):
            newest = sorted(names, key=lambda name: (self._time_of(name), name), reverse=True)
            spare = [name for name in newest if name.rpartition("/")[2] not in wanted]
            found += spare[max(0, keep - (len(newest) - len(spare))) :]
        return found

    def bytes_of(self, name: str) -> int:
        return sum(int(info["size"] or 0) for part, info in self.infos.items() if part.startswith(f"{name}/"))

    def _time_of(self, name: str) -> str:
        """When the generation was last begun, by the store's clock."""
        info = self.infos[f"{name}/{_LEASES}/{max(self.generations[name])}"]
        told = next((info[key] for key in ("LastModified", "updated", "mtime", "created") if info.get(key)), "")
        return f"{told:020.6f}" if isinstance(told, int | float) else str(told)


@dataclass
class RemoteGeneration(Generation):
    """A generation being written: files in the cache, and whatever is done in the store.

    Workers get it by pickle and complete shards by themselves; the lease is held and renewed by who opened it, and
    `number` and `holder` are what they check before a record.
    """

    remote: Remote = field(kw_only=True)
    number: int = field(kw_only=True)
    holder: str = field(kw_only=True)
    _sizes: dict[str, int] | None = field(default=None, init=False, repr=False)
    _listing: _Listing | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        return _name_of(self.asset, self.snapshot, self.fingerprint)

    def begin(self) -> None:
        """As the holder of the lease: what is done is known, and neither the store nor the cache tells of more."""
        self._take_stock()
        assert self._sizes is not None
        if INPUTS not in self._sizes:
            # so that gc knows what a run is reading, not only what it writes
            self.remote.write(f"{self.name}/{INPUTS}", json_bytes(dict(self.inputs)))
        # before workers make them anew, who know of no listing
        self._withdraw(*[name for name in self._stock.records if self._known(name) is None])
        self._forget()

    def _take_stock(self) -> None:
        """One listing of the generation and, where it is, what it says of itself."""
        self._sizes = self.remote.names(self.name)
        self._listing = _Listing.read(self.remote, self.name) if LISTING in self._sizes else _Listing({}, {}, {})
        apart = [
            name for name in self._sizes if name.endswith(DONE) and name.removesuffix(DONE) not in self._listing.records
        ]
        for told in self.remote.many(f"{self.name}/{name}" for name in apart).values():
            if (record := _whole(told)) is not None:
                self._listing.records[record.file] = record
        # stages look for these in the folder; what has a record is asked for by it
        for name, (size, sha256) in list(self._listing.files.items()):
            try:
                if self._sizes.get(name) == size:
                    self.remote.fetch(self.name, name, size, sha256)
                    continue
            except InconsistentFiles:
                pass
            # it is made again
            del self._listing.files[name]

    def _forget(self) -> None:
        """Remove from the cache what was in the store and is there no more: who deleted it wants it made again. And,
        where another run has held the lease since this machine did, whatever it has not sent."""
        last = self.folder / _HELD
        goes_on = last.exists() and last.read_text("ascii") == str(self.number - 1)
        last.write_text(str(self.number), "ascii")
        for path in [path for path in sorted(self.folder.rglob("*")) if path.is_file()]:
            name = path.relative_to(self.folder).as_posix()
            if name.partition("/")[0] in _OWN or name.endswith(DONE):
                continue
            if name not in self._stock.files and self._known(name) is None and (not goes_on or self._was_sent(name)):
                path.unlink()
                path.with_name(path.name + DONE).unlink(missing_ok=True)
                (self.folder / RECEIPTS / name).unlink(missing_ok=True)

    def _was_sent(self, name: str) -> bool:
        return (self.folder / RECEIPTS / name).exists()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "folder": None, "_sizes": None, "_listing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.folder = self.remote.local(self.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        # as long as the worker has it, what it reads and writes is in use
        copies = self.remote.copies
        copies.enter()
        copies.hold(self.folder)
        weakref.finalize(self, copies.leave)

    def path(self, shard: str, ext: str) -> Path:
        name = f"{shard}{ext}"
        record = self._known(name)
        if record is None:
            record = _whole(self.remote.told_if_whole(f"{self.name}/{name}{DONE}"))
            if record is None:
                return self.folder / name
            self._stock.records[name] = record
        return self.remote.fetch(self.name, name, record.bytes, record.sha256)

    def record(self, shard: str, ext: str) -> ShardRecord | None:
        """As of a folder. A file that is no shard of many is fetched with its record, as who asks reads it."""
        record = self._known(f"{shard}{ext}") or self._sent_after_all(f"{shard}{ext}")
        if record is not None and not ext:
            self.path(shard, ext)
        return record

    @property
    def _stock(self) -> _Listing:
        """What is known to be done."""
        if self._sizes is None or self._listing is None:
            self._take_stock()
        assert self._listing is not None
        return self._listing

    def _known(self, name: str) -> ShardRecord | None:
        record = self._stock.records.get(name)
        assert self._sizes is not None
        if record is None or f"{name}{DONE}" not in self._sizes or self._sizes.get(name) != record.bytes:
            return None
        return record

    def _sent_after_all(self, name: str) -> ShardRecord | None:
        """A shard that this machine has finished, and whose upload did not end: what it cost is not paid again."""
        record = super().record(name, "")
        if record is None or self._was_sent(name) or file_sha256(self.folder / name) != record.sha256:
            return None
        self._send(record)
        return record

    def _keep(self, record: ShardRecord) -> ShardRecord:
        super()._keep(record)
        if self._listing is None or self._known(record.file) != record:
            self._send(record)
        return record

    def _send(self, record: ShardRecord) -> None:
        """Upload a file, then its record, if the lease is still held: asked before either, as a run that was stopped
        for long must not overwrite what another has made meanwhile."""
        name = record.file
        # of an earlier file of that name
        (self.folder / RECEIPTS / name).unlink(missing_ok=True)
        self._check()
        self._withdraw(name)
        self.remote.upload(self.folder / name, f"{self.name}/{name}", record.bytes, record.sha256)
        # no sooner: what has its receipt was in the store
        verified(self.folder, name, record.bytes, record.sha256)
        self._record(record)
        self.remote.copies.make_room(0, written=record.bytes)

    def _record(self, record: ShardRecord) -> None:
        body = json_bytes({**asdict(record), "fingerprint": self.fingerprint})
        self._check()
        self.remote.write(f"{self.name}/{record.file}{DONE}", body)
        if self._sizes is not None and self._listing is not None:
            self._sizes[record.file], self._sizes[record.file + DONE] = record.bytes, len(body)
            self._listing.records[record.file] = record
            self._listing.sums.pop(record.file, None)

    def _withdraw(self, *names: str) -> None:
        """Neither listing nor record says anything any more of files that are about to change: cut off in between,
        a file must not be taken for what an earlier one of its size was recorded as.

        Workers know of no listing: they are given what `begin` has withdrawn.
        """
        if self._listing is None or self._sizes is None:
            return
        withdrawn = [name for name in names if self._listing.records.pop(name, None) is not None]
        if not withdrawn:
            return
        for name in withdrawn:
            self._listing.sums.pop(name, None)
        self._check()
        self._write_listing()
        self.remote.remove(f"{self.name}/{name}{DONE}" for name in withdrawn)
        for name in withdrawn:
            self._sizes.pop(name + DONE, None)

    def _check(self) -> None:
        """Raise LeaseLost where another run has taken over."""
        folder = f"{self.name}/{_LEASES}"
        if not holds(self.remote, folder, self.number, self.holder):
            raise lost(self.remote, folder)

    def keep(self, *names: str) -> None:
        if self._upload_others([file for name in names for file in self._files(name)]):
            self._check()
            self._write_listing()

    def _files(self, name: str) -> list[str]:
        """Files below `name` that stages wrote, relative to the folder; none of what this package keeps there."""
        top = self.folder / name
        paths = [top] if top.is_file() else [path for path in sorted(top.rglob("*")) if path.is_file()]
        names = (path.relative_to(self.folder).as_posix() for path in paths)
        return [n for n in names if not n.startswith(".") and "/." not in n and not n.endswith(DONE)]

    def _upload_others(self, names: Iterable[str]) -> bool:
        """Upload those files that the store has not, or not as they are; whether there were any."""
        stock, changed = self._stock, False
        assert self._sizes is not None
        for name in names:
            size = (self.folder / name).stat().st_size
            given = stock.files.get(name)
            if given and self._sizes.get(name) == size and is_verified(self.folder, name, *given):
                continue
            sha256 = file_sha256(self.folder / name)
            if given != (size, sha256) or self._sizes.get(name) != size:
                self.remote.upload(self.folder / name, f"{self.name}/{name}", size, sha256)
                stock.files[name], self._sizes[name] = (size, sha256), size
                changed = True
            verified(self.folder, name, size, sha256)
        return changed

    def _write_listing(self) -> None:
        body = self._stock.bytes()
        self.remote.write(f"{self.name}/{LISTING}", body)
        assert self._sizes is not None
        self._sizes[LISTING] = len(body)

    @cached_property
    def _siblings(self) -> dict[tuple[str, str], list[tuple[str, ShardRecord, bool]]]:
        """{(file, origin): [(generation, record, whether the store's checksum is still that of the record's bytes)]} of
        the other generations that have the file: a listing each, and no more where it was published."""
        parent = _name_of(self.asset, self.snapshot)
        found: dict[tuple[str, str], list[tuple[str, ShardRecord, bool]]] = {}
        for fingerprint in self.remote.folders(parent):
            if fingerprint == self.fingerprint:
                continue
            folder = f"{parent}/{fingerprint}"
            infos, listing = self.remote.listed(folder), _Listing.read(self.remote, folder)
            records = listing.records
            if not records:
                apart = [f"{folder}/{name}" for name in infos if name.endswith(DONE)]
                told = map(_whole, self.remote.many(apart).values())
                records = {record.file: record for record in told if record is not None}
            for name, record in records.items():
                if record.origin and name in infos and infos[name]["size"] == record.bytes:
                    proved = bool(summed := _sum_of(infos[name])) and listing.sums.get(name) == summed
                    found.setdefault((name, record.origin), []).append((folder, record, proved))
        return found

    def adopt(self, shard: str, ext: str, origin: str) -> ShardRecord | None:
        """Take over the shard's file of another generation, made from the same: the store copies it.

        What is damaged there is not taken over: where the store has no checksum that proves it whole, it is fetched.
        """
        name = f"{shard}{ext}"
        for folder, record, proved in self._siblings.get((name, origin), ()):
            self._check()
            self._withdraw(name)
            try:
                if not proved:
                    self.remote.fetch(folder, name, record.bytes, record.sha256)
                size = self.remote.copy(f"{folder}/{name}", f"{self.name}/{name}")
            except (FileNotFoundError, InconsistentFiles):
                # gc was faster, or it is damaged
                continue
            if size != record.bytes:
                continue
            other = self.remote.local(folder)
            self.remote.copies.hold(other)
            if is_verified(other, name, record.bytes, record.sha256):
                with atomic(self.folder / name) as temp:
                    os.link(other / name, temp)
                verified(self.folder, name, record.bytes, record.sha256)
            self._record(record)
            return record
        return None

    def publish(self, records: list[ShardRecord], ext: str, facts: Mapping[str, Any]) -> Published:
        """Everything is there and proved to be, then what it is in one object, then the pointer, if the lease is held.

        Raises OSError where an object has gone meanwhile.
        """
        shutil.rmtree(self.folder / WORK, ignore_errors=True)
        recorded = {record.file for record in records} | self._stock.records.keys()
        self._upload_others([name for name in self._files("") if name not in recorded])
        infos = self.remote.listed(self.name)
        self._sizes = {name: int(info["size"] or 0) for name, info in infos.items()}
        stock = self._stock
        stock.records.update({record.file: record for record in records})
        for file in stock.records.keys() & infos.keys() - stock.sums.keys():
            # proved by who uploaded it; one that is told already is not renewed, as the object may have changed
            if summed := _sum_of(infos[file]):
                stock.sums[file] = summed
        wanted = {name: size for name, (size, _) in stock.files.items()} | {r.file: r.bytes for r in records}
        gone = [name for name, size in wanted.items() if self._sizes.get(name) != size]
        gone += [name + DONE for name in recorded & wanted.keys() if name + DONE not in self._sizes]
        if gone:
            raise OSError(f"{self.remote.url}/{self.name}/{gone[0]} is not there any more; run it again")
        self._check()
        if self.remote.read(f"{self.name}/{LISTING}") != stock.bytes():
            self._write_listing()
        name = f"{_name_of(self.asset, self.snapshot)}/{POINTER}"
        body = json_bytes(self._pointer(records, ext, facts))
        if self.remote.read(name) != body:
            self.remote.write(name, body)
            # held up before that for so long that gc has taken the generation, this run makes it again
            self._check()
        return self.store._published(json.loads(body))
