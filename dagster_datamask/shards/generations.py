"""Published generations: `<root>/<asset>[/<snapshot>]/<fingerprint>/` and the pointer that makes one current.

A generation is a folder written by the one run that holds its lease, shard by shard, each with a completion record.
It counts as published only when `current.json` beside it names it, and that file is replaced atomically after every
shard and every blocking check is done. Published bytes hold no times, hosts or paths: equal inputs, equal bytes.

Here: the rules, and a root on a disk of this machine. A root on an object store is `remote`'s.
"""

import fcntl
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem, LocalFileSystem

from dagster_datamask.keyed import digest
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.shards.writer import atomic, file_sha256, remove_temps, write_json

POINTER = "current.json"
LEASE = ".lease"
INPUTS = ".inputs.json"
DONE = ".done.json"
_TRASH = ".trash-"
WORK = ".work"
# how a record reads of which a power failure left a part, or nothing: what it tells of is not done
_TORN = (ValueError, TypeError, AttributeError)


class NotPublished(LookupError):
    """An asset that is read here has not been materialised for this snapshot."""


@dataclass(frozen=True)
class ShardRecord:
    """What is known of one finished shard file: rows in it, rows counted by reason, its bytes' hash.

    `origin` names all that the bytes are made from, where a stage's shards do not depend on each other.
    """

    shard: str
    file: str
    rows: int
    rows_in: int
    counts: dict[str, int]
    bytes: int
    sha256: str
    source: dict[str, Any] = field(default_factory=dict)
    origin: str = ""


@dataclass(frozen=True)
class Published:
    """A published generation, resolved once: later changes of the pointer do not reach who holds this."""

    asset: str
    snapshot: str | None
    fingerprint: str
    folder: Path
    shards: tuple[str, ...]
    ext: str
    code_version: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    rows: int
    rows_in: int
    counts: dict[str, int]
    facts: dict[str, Any]

    @property
    def where(self) -> str:
        """The generation's place, for people: `folder` is where this machine reads it."""
        return str(self.folder)

    def path(self, shard: str) -> Path:
        return self.file(f"{shard}{self.ext}")

    def file(self, name: str) -> Path:
        """A file of the generation, or a folder with all that is in it, on this machine; "" is the whole generation.

        Of what the generation does not hold, the path of a file that does not exist.
        """
        return self.folder / name

    def place(self, shard: str) -> tuple[str, FileSystem]:
        """Where Arrow reads parts of a shard's file, for what needs few of its bytes."""
        return str(self.path(shard)), LocalFileSystem()

    def schema(self) -> pa.Schema | None:
        """The columns of a generation's shards, None where it has none or they are no tables."""
        if not self.shards or self.ext not in (".parquet", ".arrow"):
            return None
        path, system = self.place(self.shards[0])
        if self.ext == ".parquet":
            return pq.read_schema(path, filesystem=system)
        with system.open_input_file(path) as file:
            return pa.ipc.open_file(file).schema

    def record(self, shard: str) -> ShardRecord:
        return _read_record(self.folder / f"{shard}{self.ext}{DONE}")


@dataclass(frozen=True)
class Store:
    """The root folder that receives generations."""

    root: Path

    @property
    def where(self) -> str:
        """The root, for people: `root` is where this machine has its files."""
        return str(self.root)

    @property
    def on_disk(self) -> bool:
        """Whether the root is a folder: who shares the work must share that folder."""
        return True

    def folder(self, asset: str, snapshot: str | None) -> Path:
        return self.root / asset / snapshot if snapshot else self.root / asset

    def current(self, asset: str, snapshot: str | None = None) -> Published:
        """The published generation. Raises NotPublished with what to materialise."""
        pointer = self._pointer(asset, snapshot)
        if pointer is None:
            what = f"{asset} of snapshot {snapshot}" if snapshot else asset
            remedy = "run the job fit_global" if snapshot is None else "materialise it"
            raise NotPublished(f"{what} is not published under {self.where}; {remedy} first")
        if (pointer["asset"], pointer["snapshot"]) != (asset, snapshot or None):
            raise InconsistentFiles(
                f"{self.where}/{asset}/{snapshot or ''}: its {POINTER} is of {pointer['asset']} of "
                f"{pointer['snapshot']}; a folder was copied or renamed: move it back, or materialise {asset} anew"
            )
        return self._published(pointer)

    def _pointer(self, asset: str, snapshot: str | None) -> dict[str, Any] | None:
        try:
            pointer: dict[str, Any] = json.loads((self.folder(asset, snapshot) / POINTER).read_text("utf-8"))
        except FileNotFoundError:
            return None
        return pointer

    def _published(self, pointer: Mapping[str, Any]) -> Published:
        return Published(**self._told_by(pointer))

    def _told_by(self, pointer: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of Published that a pointer tells."""
        names = ("asset", "snapshot", "fingerprint", "ext", "code_version", "settings", "inputs")
        return {
            **{name: pointer[name] for name in (*names, "rows", "rows_in", "counts", "facts")},
            "shards": tuple(pointer["shards"]),
            "folder": self.folder(pointer["asset"], pointer["snapshot"]) / pointer["fingerprint"],
        }

    def published(self, asset: str, snapshot: str | None = None) -> Published | None:
        """The published generation, or None."""
        try:
            return self.current(asset, snapshot)
        except NotPublished:
            return None

    def snapshots(self, asset: str) -> list[str]:
        """Snapshots with a published generation of `asset`, sorted."""
        return sorted(pointer.parent.name for pointer in (self.root / asset).glob(f"*/{POINTER}"))

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
    ) -> Iterator["Generation"]:
        """The generation of these inputs, settings and code, held under its lease until the block ends.

        Another run with the same fingerprint waits here, then finds the work done. The lease is a file lock, so a
        killed process gives it back.
        """
        fingerprint = fingerprint_of(asset, snapshot, code_version, settings, inputs)
        folder = self.folder(asset, snapshot) / fingerprint
        with file_lease(folder, waiting):
            remove_temps(folder)
            # so that gc knows what a run is reading, not only what it writes
            write_json(folder / INPUTS, dict(inputs))
            yield Generation(self, asset, snapshot, fingerprint, folder, code_version, dict(settings), dict(inputs))

    def gc(self, keep: int) -> list[tuple[str, int]]:
        """Remove all but the newest `keep` generations of each asset and snapshot; return (path, bytes) of each.

        What a pointer names, what a current generation was made from, and what a run is writing stay.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        for trash in sorted(self.root.glob(f"**/{_TRASH}*")):
            shutil.rmtree(trash)
        removed = []
        for parent in sorted({lease.parent.parent for lease in self.root.glob(f"**/{LEASE}")}):
            generations = sorted(
                (lease.parent for lease in parent.glob(f"*/{LEASE}")),
                key=lambda folder: (folder.stat().st_mtime_ns, folder.name),
                reverse=True,
            )
            wanted = self._wanted()
            spare = [folder for folder in generations if folder.name not in wanted]
            for folder in spare[max(0, keep - (len(generations) - len(spare))) :]:
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                if self._remove_if_spare(folder):
                    removed.append((str(folder.relative_to(self.root)), size))
        return removed

    def _wanted(self) -> set[str]:
        """Fingerprints that a pointer names, a current generation was made from, or a running stage reads."""
        pointers = [json.loads(path.read_text("utf-8")) for path in sorted(self.root.glob(f"**/{POINTER}"))]
        wanted = {p["fingerprint"] for p in pointers} | {f for p in pointers for f in p["inputs"].values()}
        for lease in self.root.glob(f"**/{LEASE}"):
            inputs = lease.with_name(INPUTS)
            if inputs.exists() and is_held(lease):
                wanted |= set(json.loads(inputs.read_text("utf-8")).values())
        return wanted

    def _remove_if_spare(self, folder: Path) -> bool:
        """Remove a generation unless a run holds it or, since the list was made, something has come to need it."""
        with lease_if_free(folder) as free:
            if not free or folder.name in self._wanted():
                return False
            # renamed first: a gc killed midway must not leave half a generation under its name
            trash = folder.with_name(f"{_TRASH}{folder.name}")
            folder.rename(trash)
            shutil.rmtree(trash)
            return True


@dataclass
class Generation:
    """A generation being written by the holder of its lease."""

    store: Store
    asset: str
    snapshot: str | None
    fingerprint: str
    folder: Path
    code_version: str
    settings: dict[str, Any]
    inputs: dict[str, str]

    @property
    def work(self) -> Path:
        """Scratch space on the same disk, gone once the generation is published."""
        folder = self.folder / WORK
        folder.mkdir(exist_ok=True)
        return folder

    def path(self, shard: str, ext: str) -> Path:
        """The file of a shard that has its record, to be read; files are written to `folder`."""
        return self.folder / f"{shard}{ext}"

    def keep(self, *names: str) -> None:
        """Files and folders written into `folder` without a record of their own are whole, and what is recorded next
        may refer to them: whoever goes on with this generation finds them there."""

    def record(self, shard: str, ext: str) -> ShardRecord | None:
        """The completion record of a shard, if its file is there and of the recorded size."""
        file = self.folder / f"{shard}{ext}"
        try:
            record = _read_record(file.with_name(file.name + DONE))
        except (FileNotFoundError, *_TORN):
            return None
        if file.exists() and file.stat().st_size == record.bytes:
            return record
        # the shard is made again: cut off before its record, it must not be taken for what this one says
        file.with_name(file.name + DONE).unlink(missing_ok=True)
        return None

    def complete(
        self,
        shard: str,
        ext: str,
        *,
        rows: int,
        rows_in: int,
        counts: Mapping[str, int],
        source: Mapping[str, Any] | None = None,
        origin: str = "",
    ) -> ShardRecord:
        """Write the completion record of a file that is already in place."""
        file = self.folder / f"{shard}{ext}"
        record = ShardRecord(
            shard=shard,
            file=file.name,
            rows=rows,
            rows_in=rows_in,
            counts={key: int(n) for key, n in sorted(counts.items()) if n},
            bytes=file.stat().st_size,
            sha256=file_sha256(file),
            source=dict(source or {}),
            origin=origin,
        )
        return self._keep(record)

    def adopt(self, shard: str, ext: str, origin: str) -> ShardRecord | None:
        """Take over the shard's file of another generation, made from the same, and its record; None if there is none
        whose bytes are as recorded.

        The file is linked, not copied: files are replaced whole and never written into.
        """
        name = f"{shard}{ext}"
        for other in sorted(self.folder.parent.glob(f"*/{name}{DONE}")):
            try:
                record = _read_record(other)
                found = other.with_name(name)
                if record.origin != origin or found.stat().st_size != record.bytes:
                    continue
                # a damaged file is not taken over, be its size as recorded
                if file_sha256(found) != record.sha256:
                    continue
                with atomic(self.folder / name) as temp:
                    os.link(found, temp)
            except (FileNotFoundError, *_TORN):
                # gc was faster, or a power failure left a part of the record
                continue
            return self._keep(record)
        return None

    def _keep(self, record: ShardRecord) -> ShardRecord:
        file = self.folder / record.file
        write_json(file.with_name(file.name + DONE), {**asdict(record), "fingerprint": self.fingerprint})
        return record

    def publish(self, records: list[ShardRecord], ext: str, facts: Mapping[str, Any]) -> Published:
        """Make this generation the current one. Every shard must have its record."""
        shutil.rmtree(self.folder / WORK, ignore_errors=True)
        # the temp file lies where the next holder of the lease clears it away, should this process be killed
        pointer = self._pointer(records, ext, facts)
        write_json(self.store.folder(self.asset, self.snapshot) / POINTER, pointer, scratch=self.folder)
        return self.store.current(self.asset, self.snapshot)

    def _pointer(self, records: list[ShardRecord], ext: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "asset": self.asset,
            "snapshot": self.snapshot,
            "fingerprint": self.fingerprint,
            "code_version": self.code_version,
            "settings": self.settings,
            "inputs": self.inputs,
            "ext": ext,
            "shards": [record.shard for record in records],
            "rows": sum(record.rows for record in records),
            "rows_in": sum(record.rows_in for record in records),
            "counts": total_counts(records),
            "facts": dict(facts),
            "content": digest(*(r.sha256 for r in records), size=16).hex(),
        }


def fingerprint_of(
    asset: str, snapshot: str | None, code_version: str, settings: Mapping[str, Any], inputs: Mapping[str, str]
) -> str:
    """24 hex digits over all that a generation is made from."""
    return digest(
        asset,
        snapshot or "",
        code_version,
        json.dumps(dict(settings), sort_keys=True),
        json.dumps(dict(inputs), sort_keys=True),
        size=12,
    ).hex()


def total_counts(records: Iterable[ShardRecord]) -> dict[str, int]:
    """Rows by reason over all records, reasons sorted."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record.counts)
    return dict(sorted(counts.items()))


def _read_record(path: Path) -> ShardRecord:
    return record_of(json.loads(path.read_text("utf-8")))


def record_of(told: Mapping[str, Any]) -> ShardRecord:
    """The record that a completion record's JSON tells."""
    return ShardRecord(**{name: value for name, value in told.items() if name != "fingerprint"})


@contextmanager
def file_lease(folder: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease of a folder among the processes of this machine, waiting for it."""
    told = False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LEASE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # gc may have removed the folder between opening and locking; a lock on a deleted file guards nothing
            if _same_file(handle, folder / LEASE):
                break
        except BlockingIOError:
            if not told:
                waiting(f"another run is writing {folder}; waiting for it")
                told = True
            time.sleep(0.2)
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def lease_if_free(folder: Path) -> Iterator[bool]:
    """Hold the lease of a folder if no process of this machine does; whether it is held so."""
    handle = os.open(folder / LEASE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = False
    else:
        free = True
    try:
        yield free
    finally:
        os.close(handle)


def is_held(lease: Path) -> bool:
    """Whether a process of this machine holds the lease of the file's folder."""
    with lease_if_free(lease.parent) as free:
        return not free
