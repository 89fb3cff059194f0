"""`chaos://<folder>`: a folder that behaves as an object store does, and fails on order.

Objects appear whole or not at all, a read asks the store anew for every range (so that what is rewritten under a reader
shows), and exclusive creation is the store's. `weather` holds what is to go wrong, at the nth call of an operation; it
belongs to the process. Which faults there are, and when they come, is `faults`'.
"""

import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

PROTOCOL = "chaos"
# what a store is asked; a fault names one of them
READS = ("ls", "info", "open", "read")
# "written": an object is there, and the answer that says so is not
WRITES = ("write", "written", "copy", "remove")
# several requests even for the small files of tests
_BLOCK = 2048
_UPLOAD = ".upload"
# parts of paths by which calls are counted
PLACES = ("/CC-", ".parquet", "/stores/")


@dataclass
class Fault:
    """From the `first`th matching call of `operation` on (1: the next), `times` calls in a row get `act`.

    `act(path, answer)` raises, or gives the answer that the caller sees. `inside`: only paths that hold this.
    """

    operation: str
    first: int
    act: Callable[[str, Any], Any]
    times: float = 1
    inside: str = ""
    seen: int = 0
    fired: list[str] = field(default_factory=list)

    def answer(self, path: str, answer: Any) -> Any:
        self.seen += 1
        if self.first <= self.seen < self.first + self.times:
            self.fired.append(path)
            return self.act(path, answer)
        return answer


class Weather:
    """What was asked of the stores of this process, and what is to go wrong."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.asked: Counter[str] = Counter()
        self.fault: Fault | None = None

    def at(self, operation: str, path: str, answer: Any = None) -> Any:
        with self._lock:
            self.asked[operation] += 1
            # what a fault inside a snapshot or at its shards can meet
            for part in PLACES:
                self.asked[f"{operation} {part}"] += part in path
            fault = self.fault
            if fault is not None and fault.operation == operation and fault.inside in path:
                return fault.answer(path, answer)
        return answer

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[Fault]:
        self.fault = fault
        try:
            yield fault
        finally:
            self.fault = None


weather = Weather()


class ChaosFileSystem(AbstractFileSystem):
    """An object store over a folder of this machine."""

    protocol = PROTOCOL
    root_marker = "/"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = LocalFileSystem(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(path).removeprefix(f"{PROTOCOL}://").rstrip("/") or "/"

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        found = self._local.ls(self._strip_protocol(path), detail=True)
        # what is being uploaded is not there yet
        entries = [_entry(entry) for entry in found if not entry["name"].endswith(_UPLOAD)]
        entries = weather.at("ls", path, sorted(entries, key=lambda entry: entry["name"]))
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        entry: dict[str, Any] = weather.at("info", path, _entry(self._local.info(path)))
        return entry

    def _open(self, path: str, mode: str = "rb", **options: Any) -> AbstractBufferedFile:
        if mode not in ("rb", "wb", "xb"):
            raise ValueError(f"{path}: an object cannot be opened with mode {mode!r}")
        if mode == "rb":
            weather.at("open", path)
        return _Object(self, path, mode, block_size=_BLOCK, cache_type="none")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = max(0, size + start) if start is not None and start < 0 else start or 0
            last = size if end is None else size + end if end < 0 else end
            file.seek(first)
            raw: bytes = weather.at("read", path, file.read(max(0, last - first)))
            return raw

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        path = self._strip_protocol(path)
        value = weather.at("write", path, value)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex}{_UPLOAD}")
        part.write_bytes(value)
        try:
            if mode == "create":
                # fails where there is one, as If-None-Match does
                os.link(part, target)
            else:
                part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        weather.at("written", path)

    def put_file(self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **options: Any) -> None:
        if not Path(lpath).is_dir():
            self.pipe_file(rpath, Path(lpath).read_bytes(), mode=mode)

    def get_file(self, rpath: str, lpath: Any, callback: Any = None, outfile: Any = None, **options: Any) -> None:
        rpath = self._strip_protocol(rpath)
        weather.at("open", rpath)
        raw = self.cat_file(rpath)
        if hasattr(lpath, "write"):
            lpath.write(raw)
        else:
            Path(lpath).write_bytes(raw)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        value = weather.at("copy", path2, Path(path1).read_bytes())
        self._local.makedirs(self._parent(path2), exist_ok=True)
        part = Path(f"{path2}.{uuid.uuid4().hex}{_UPLOAD}")
        part.write_bytes(value)
        part.replace(path2)

    def _rm(self, path: str) -> None:
        path = self._strip_protocol(path)
        weather.at("remove", path)
        self._local.rm(path, recursive=Path(path).is_dir())

    def rm_file(self, path: str) -> None:
        self._rm(path)

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Nothing: a store has objects alone."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: a store has objects alone."""

    def created(self, path: str) -> Any:
        return self.info(path)["LastModified"]

    def modified(self, path: str) -> Any:
        return self.info(path)["LastModified"]


class _Object(AbstractBufferedFile):
    """An object read range by range, or gathered and put whole at the end."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))

    def _initiate_upload(self) -> None:
        self._parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self._parts.append(self.buffer.getvalue())
        if final:
            self.fs.pipe_file(self.path, b"".join(self._parts), mode="create" if self.mode == "xb" else "overwrite")
        return True


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """What a store tells of an object: no inode, no mode, a time of its own."""
    return {
        "name": entry["name"],
        "size": entry["size"] if entry["type"] == "file" else 0,
        "type": entry["type"],
        "LastModified": entry["mtime"],
    }


def register() -> None:
    """Make `chaos://` known to fsspec in this process."""
    fsspec.register_implementation(PROTOCOL, ChaosFileSystem, clobber=True)


register()
