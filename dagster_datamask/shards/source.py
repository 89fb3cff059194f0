"""Where the documents come from: FineWeb-shaped folders of parquet shards on any fsspec URL.

Listing, the identity of a shard's content, and streaming its columns belong here. Nothing here writes.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from dagster_datamask.keyed import digest
from dagster_datamask.shards.schemas import BadShard, check_source, plain

SNAPSHOT_KEY = re.compile(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# a stream reads a column chunk piece by piece, so a 2 GB chunk of text costs one buffer and not two gigabytes
_BUFFER_BYTES = 1 << 20
# object stores say what a file holds; only where none of these is given is the file itself hashed
_CHECKSUMS = ("ETag", "etag", "md5Hash", "md5", "content_md5", "sha256", "checksum", "blob_id")


class SourceError(ValueError):
    """The source folder or a snapshot in it is not there or is empty; the message says what is."""


@dataclass(frozen=True)
class Shard:
    """One parquet file of a snapshot. `listed` identifies what the listing says of it (size, checksum or time)."""

    name: str
    path: str
    size: int
    listed: str


class Footer(NamedTuple):
    """What a shard's footer tells: rows, 16 hex digits over it, and the schema in plain types."""

    rows: int
    digest: str
    schema: pa.Schema


class Source:
    """A folder or URL in FineWeb's layout: `<url>/data/<snapshot>/*.parquet`, or flat `<url>/<snapshot>/*.parquet`."""

    def __init__(self, url: str) -> None:
        if not url:
            raise SourceError(
                "no source is set: give --source, DATAMASK_SOURCE or [source] url in datamask.toml "
                "(a folder or URL with data/<snapshot>/*.parquet)"
            )
        self.url = url
        try:
            self.fs, path = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise SourceError(f"source {url}: {error}") from error
        self.path = path.rstrip("/")

    def snapshots(self) -> list[str]:
        """Names of the snapshots that hold at least a folder, sorted. Raises SourceError if there are none."""
        names = [name for name in self._folders(self._base()) if SNAPSHOT_KEY.fullmatch(name)]
        if not names:
            raise SourceError(
                f"source {self.url}: no snapshot folders; expected data/<snapshot>/*.parquet or <snapshot>/*.parquet"
            )
        return names

    def unusable(self) -> list[str]:
        """Folders whose name cannot be a partition key, sorted."""
        return [name for name in self._folders(self._base()) if not SNAPSHOT_KEY.fullmatch(name)]

    def shards(self, snapshot: str) -> list[Shard]:
        """The snapshot's shards, sorted by name. Raises SourceError for an unknown snapshot or one without shards."""
        folder = posixpath.join(self._base(), snapshot)
        try:
            entries = self.fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            there = ", ".join(self.snapshots())
            raise SourceError(f"source {self.url} has no snapshot {snapshot!r}; there are: {there}") from None
        shards = []
        for entry in entries:
            base = posixpath.basename(entry["name"])
            if entry["type"] == "file" and base.endswith(".parquet") and base[0] not in "._":
                shards.append(
                    Shard(
                        name=base.removesuffix(".parquet"),
                        path=entry["name"],
                        size=int(entry["size"] or 0),
                        listed=_listed(entry),
                    )
                )
        if not shards:
            raise SourceError(f"source {self.url}: snapshot {snapshot!r} has no .parquet shards")
        return sorted(shards, key=lambda shard: shard.name)

    def listing_fingerprint(self, snapshot: str) -> str:
        """16 hex digits over names, sizes and checksums or times: changes when a shard lands or is replaced."""
        parts = [part for s in self.shards(snapshot) for part in (s.name, s.size, s.listed)]
        return digest(*parts, size=8).hex()

    def content(self, shard: Shard) -> str:
        """32 hex digits that identify what the shard holds, wherever it lies: its store's checksum, or its own hash."""
        info = self.fs.info(shard.path)
        for key in _CHECKSUMS:
            if info.get(key):
                return digest(key, str(info[key]), size=16).hex()
        hasher = blake2b(digest_size=16)
        with self.fs.open(shard.path, "rb") as file:
            while block := file.read(1 << 22):
                hasher.update(block)
        return hasher.hexdigest()

    @contextmanager
    def open(self, shard: Shard) -> Iterator[pq.ParquetFile]:
        """The shard as a ParquetFile whose schema is checked. Raises BadShard for what is not readable parquet."""
        if shard.size == 0:
            raise BadShard(shard.path, "is empty (0 bytes)")
        with self.fs.open(shard.path, "rb") as file:
            try:
                parquet = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            except (pa.ArrowInvalid, OSError) as error:
                raise BadShard(shard.path, f"is not readable parquet ({_first_line(error)})") from error
            check_source(shard.path, parquet.schema_arrow)
            yield parquet

    def footer(self, shard: Shard) -> Footer:
        """Rows, plain schema, and a digest that is cheap and different after any rewrite that moved a byte."""
        with self.open(shard) as parquet:
            meta = parquet.metadata
            groups = [
                (column.total_compressed_size, column.total_uncompressed_size, column.data_page_offset)
                for g in range(meta.num_row_groups)
                for column in (meta.row_group(g).column(c) for c in range(meta.num_columns))
            ]
            schema = parquet.schema_arrow
            return Footer(
                meta.num_rows, digest(meta.num_rows, repr(groups), schema.to_string(), size=8).hex(), plain(schema)
            )

    def batches(
        self, shard: Shard, columns: Sequence[str] | None, rows: int, groups: Sequence[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Record batches of at most `rows` rows, in order, of all row groups or of `groups`, in plain types.

        Columns the shard lacks are left out. Raises BadShard where a page cannot be decoded.
        """
        with self.open(shard) as parquet:
            names = parquet.schema_arrow.names
            wanted = names if columns is None else [c for c in columns if c in names]
            try:
                for batch in parquet.iter_batches(batch_size=rows, columns=wanted, row_groups=groups):
                    yield _plain_batch(batch)
            except (pa.ArrowException, OSError) as error:
                raise BadShard(shard.path, f"cannot be decoded ({_first_line(error)})") from error

    def _base(self) -> str:
        data = posixpath.join(self.path, "data")
        return data if self.fs.isdir(data) else self.path

    def _folders(self, base: str) -> list[str]:
        try:
            entries = self.fs.ls(base, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            raise SourceError(
                f"source {self.url} does not exist; set [source] url in datamask.toml, DATAMASK_SOURCE or --source"
            ) from None
        names = (posixpath.basename(entry["name"].rstrip("/")) for entry in entries if entry["type"] == "directory")
        return sorted(name for name in names if name and name[0] not in "._")


def _plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    schema = plain(batch.schema)
    if schema.equals(batch.schema):
        return batch
    columns = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def _listed(entry: dict[str, Any]) -> str:
    for key in (*_CHECKSUMS, "mtime", "LastModified", "last_modified", "updated", "created"):
        if entry.get(key):
            return f"{key}={entry[key]}"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_remote(url: str) -> bool:
    """Whether reading `url` leaves this machine."""
    return fsspec.utils.get_protocol(url) not in ("file", "local", "memory")
