"""This machine's copies of a bucket's files: which are proved whole, which are in use, and which go when room is short.

A copy that was in the store can be fetched again, so the least recently used go first; never one of a generation that
a process of this machine reads or writes, nor what has not been sent. Processes tell each other what they use by locks
on single bytes of one file, which the kernel gives back when a process dies.

Here: copies on a disk. What is fetched, sent and counts as done is `remote`'s.
"""

import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dagster_datamask.keyed import digest
from dagster_datamask.shards.generations import DONE

# beside a generation's files, a receipt for each that is proved and was in the store; its time is that of the last use
RECEIPTS = ".verified"
# downloads under way, in each root's folder
INCOMING = ".incoming"
_IN_USE = ".in-use"
# without a limit of its own the cache leaves so much of its disk free: Kubernetes ends pods below a tenth to a seventh
_LEFT_FREE = 0.15
# of the limit: what may come between two looks at the whole cache, and what is freed beyond the need
_BETWEEN_LOOKS, _AHEAD = 1 / 50, 1 / 10
# no download takes longer: its process was killed
_STALE_SECONDS = 24 * 3600
# the byte that is locked by who makes room; a generation's is above it
_MAKING_ROOM = 0


def verified(folder: Path, name: str, size: int, sha256: str) -> None:
    """Note beside a file of the cache that its bytes are proved, so that they are hashed once."""
    receipt = folder / RECEIPTS / name
    receipt.parent.mkdir(parents=True, exist_ok=True)
    # not named as a writer's temp file, which the holder of the lease clears away
    temp = receipt.with_name(f"{receipt.name}~{os.getpid()}-{threading.get_ident()}")
    temp.write_text(f"{sha256} {size} {(folder / name).stat().st_mtime_ns}", "utf-8")
    temp.replace(receipt)


def is_verified(folder: Path, name: str, size: int, sha256: str) -> bool:
    """Whether the cache has the file with these bytes, untouched since they were proved."""
    try:
        stat, receipt = (folder / name).stat(), (folder / RECEIPTS / name).read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.st_size == size and receipt == f"{sha256} {size} {stat.st_mtime_ns}"


def used(folder: Path, name: str) -> None:
    """Note that a proved file is used now."""
    with suppress(FileNotFoundError):
        os.utime(folder / RECEIPTS / name)


def cache(base: Path, most: float | None = None) -> "Cache":
    """The cache below a folder, as this process uses it.

    most: bytes that it may take; None: what leaves 15 % of its disk free.
    """
    found = _cache(base, os.getpid())
    found.most = most
    return found


@lru_cache(maxsize=64)
def _cache(base: Path, process: int) -> "Cache":
    """One a process: a child holds none of its parent's locks."""
    return Cache(base)


@dataclass(frozen=True)
class _Copy:
    used_ns: int
    folder: Path
    name: str
    size: int


class Cache:
    """What of a cache folder this process uses, and room for what comes.

    What was read or written is in use until the last of those who work (`work`, `enter`) has ended; outside of any, as
    in a command that reads a page, until the process does.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.most: float | None = None
        self._guard = threading.RLock()
        self._file: int | None = None
        self._held: set[Path] = set()
        self._working = 0
        self._making_room = False
        self._since_look: float | None = None
        self._too_much = False

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Work that uses copies; with the end of the last all are given back, and what is too much goes."""
        self.enter()
        try:
            yield
        finally:
            self.leave()
            self.make_room(0)

    def enter(self) -> None:
        with self._guard:
            self._working += 1

    def leave(self) -> None:
        with self._guard:
            self._working -= 1
            # a worker's last object may be collected in the middle of it
            if not self._working and not self._making_room:
                self._give_back()
                # what was in use may go now
                if self._too_much:
                    self._since_look = None

    def hold(self, folder: Path) -> None:
        """The copies of a generation's folder are in use: nobody removes them meanwhile."""
        with self._guard:
            self._open()
            if folder not in self._held:
                assert self._file is not None
                fcntl.lockf(self._file, fcntl.LOCK_SH, 1, self._byte(folder))
                self._held.add(folder)

    @contextmanager
    def if_unused(self, folder: Path) -> Iterator[bool]:
        """Keep all from using the copies of a generation, if none does now; whether that is so."""
        with self._guard:
            self._open()
            if folder in self._held:
                yield False
                return
            with self._alone(self._byte(folder)) as alone:
                yield alone

    def make_room(self, wanted: int, written: int = 0) -> None:
        """Remove copies that nothing uses, the least recently used first, until `wanted` bytes more fit.

        written: bytes that came since the last call and are there. What cannot be removed is no error: the disk says
        so when it is full.
        """
        with self._guard:
            self.base.mkdir(parents=True, exist_ok=True)
            limit = self._limit()
            came, self._since_look = (self._since_look or 0.0) + wanted + written, self._since_look
            look = self._since_look is None or came >= limit * _BETWEEN_LOOKS
            self._since_look = came
            if not look or (self.most is None and self._excess(0, wanted) <= 0):
                return
            self._since_look = 0.0
            self._open()
            self._making_room = True
            try:
                with self._alone(_MAKING_ROOM) as alone:
                    if alone:
                        self._remove(wanted, limit)
            finally:
                self._making_room = False

    def _remove(self, wanted: int, limit: float) -> None:
        total, copies = self._look()
        excess = self._excess(total, wanted)
        self._too_much = excess > 0
        if not self._too_much:
            return
        excess += limit * _AHEAD
        for copy in sorted(copies, key=lambda copy: (copy.used_ns, str(copy.folder), copy.name)):
            if excess <= 0:
                break
            with self.if_unused(copy.folder) as unused:
                if unused:
                    # its receipt last: without one it would count as never sent
                    for path in (copy.folder / copy.name, copy.folder / f"{copy.name}{DONE}"):
                        path.unlink(missing_ok=True)
                    (copy.folder / RECEIPTS / copy.name).unlink(missing_ok=True)
                    excess -= copy.size
        self._too_much = excess > limit * _AHEAD

    def _limit(self) -> float:
        return shutil.disk_usage(self.base).total * _LEFT_FREE if self.most is None else self.most

    def _excess(self, total: int, wanted: int) -> float:
        """Bytes too many, with those that are wanted."""
        if self.most is not None:
            return total + wanted - self.most
        disk = shutil.disk_usage(self.base)
        return disk.total * _LEFT_FREE - disk.free + wanted

    def _look(self) -> tuple[int, list[_Copy]]:
        """(bytes of all that is in the cache, what of it can be fetched again)."""
        total, seen, copies = 0, set[int](), list[_Copy]()
        for where, folders, files in os.walk(self.base):
            at = Path(where)
            if at.name == INCOMING:
                remove_stale(at)
            for name in files:
                with suppress(FileNotFoundError):
                    stat = (at / name).stat()
                    # a shard that was taken over from another generation is one file under two names
                    if stat.st_ino not in seen:
                        seen.add(stat.st_ino)
                        total += stat.st_size
            if RECEIPTS in folders:
                copies += _copies(at)
        return total, copies

    @contextmanager
    def _alone(self, byte: int) -> Iterator[bool]:
        """Hold a byte's lock against all other processes, if it is free; whether it is held."""
        assert self._file is not None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    def _byte(self, folder: Path) -> int:
        return 1 + (int.from_bytes(digest(folder.relative_to(self.base).as_posix(), size=8)) >> 2)

    def _open(self) -> None:
        """The file that is there: a person may have emptied the cache, and with it the one that was."""
        path = self.base / _IN_USE
        if self._file is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), path.stat()):
                    return
        held = self._held
        self._give_back()
        self.base.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        for folder in sorted(held):
            self.hold(folder)

    def _give_back(self) -> None:
        self._held = set()
        if self._file is not None:
            # with it all of its locks
            os.close(self._file)
            self._file = None


def _copies(folder: Path) -> Iterator[_Copy]:
    """A generation's files that have receipts."""
    for receipt in (folder / RECEIPTS).rglob("*"):
        with suppress(FileNotFoundError, NotADirectoryError):
            name = receipt.relative_to(folder / RECEIPTS).as_posix()
            stat = (folder / name).stat()
            if receipt.is_file():
                yield _Copy(receipt.stat().st_mtime_ns, folder, name, stat.st_size)


def remove_stale(incoming: Path) -> None:
    """Remove downloads of killed processes."""
    for temp in incoming.glob("*"):
        with suppress(FileNotFoundError):
            if temp.stat().st_mtime < time.time() - _STALE_SECONDS:
                shutil.rmtree(temp, ignore_errors=True)
