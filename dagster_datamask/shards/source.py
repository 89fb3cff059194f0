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

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from dagster_datamask.keyed import digest
from dagster_datamask.shards.schemas import BadShard, check_source, plain

SNAPSHOT_KEY = re.compile(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# a stream reads a column chunk piece by piece, so a 2 GB chunk of text costs one buffer and not two gigabytes
_BUFFER_BYTES = 1 << 20
# object stores say what a file holds; only where none of these is given is the file itself hashed
_CHECKSUMS = ("sha256", "md5Hash", "md5", "content_md5", "checksum", "blob_id", "ETag", "etag")
# what a shard holds, by what its listing says of it: a process hashes an unchanged file once
_contents: dict[tuple[str, str, int, str], str] = {}
# a side file of raw_shards has this name
_RESERVED = "quarantined_shards"


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
    """What a shard's footer tells: rows, 16 hex digits over it, the schema in plain types, and whether rows may lack a
    token_count."""

    rows: int
    digest: str
    schema: pa.Schema
    uncounted: bool


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
        # one file system object lives as long as the process, and some keep old listings
        self.fs.invalidate_cache()

    def snapshots(self) -> list[str]:
        """Names of the snapshots that hold at least a folder, sorted. Raises SourceError if there are none."""
        names = [name for name in self._folders(self._base()) if SNAPSHOT_KEY.fullmatch(name)]
        if not names:
            raise SourceError(
                f"source {self.url}: no snapshot folders; expected data/<snapshot>/*.parquet or <snapshot>/*.parquet"
            )
        return names

    def filled(self) -> list[str]:
        """The snapshots that have shards. Raises SourceError if none has."""
        names = [name for name in self.snapshots() if self._has_shards(name)]
        if not names:
            raise SourceError(f"source {self.url}: none of its snapshots has .parquet shards")
        return names

    def _has_shards(self, snapshot: str) -> bool:
        try:
            return bool(self.shards(snapshot))
        except SourceError:
            return False

    def unusable(self) -> list[str]:
        """Folders whose name cannot be a partition key, sorted."""
        return [name for name in self._folders(self._base()) if not SNAPSHOT_KEY.fullmatch(name)]

    def shards(self, snapshot: str) -> list[Shard]:
        """The snapshot's shards, sorted by name. Raises SourceError for an unknown snapshot or one without shards."""
        if not SNAPSHOT_KEY.fullmatch(snapshot):
            raise SourceError(
                f"{snapshot!r} cannot be a snapshot: letters, digits, '.', '_' and '-' only; rename its folder"
            )
        folder = posixpath.join(self._base(), snapshot)
        try:
            entries = self.fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            there = ", ".join(self.snapshots())
            raise SourceError(f"source {self.url} has no snapshot {snapshot!r}; there are: {there}") from None
        shards = []
        for entry in entries:
            base = posixpath.basename(entry["name"])
            if base.endswith(".parquet") and base[0] not in "._" and self._is(entry, "file"):
                if base == f"{_RESERVED}.parquet":
                    raise SourceError(f"{entry['name']}: a shard cannot be called {_RESERVED!r}; rename it")
                shards.append(
                    Shard(
                        name=base.removesuffix(".parquet"),
                        path=entry["name"],
                        size=int(self.fs.info(entry["name"])["size"] if entry.get("islink") else entry["size"] or 0),
                        listed=_listed(entry),
                    )
                )
        if not shards:
            inside = [
                posixpath.basename(entry["name"].rstrip("/")) for entry in entries if self._is(entry, "directory")
            ]
            # on an object store a slash in a name looks like a folder in a folder
            slashed = f"; {snapshot + '/' + min(inside)!r} cannot be a snapshot: rename it" if inside else ""
            raise SourceError(f"source {self.url}: snapshot {snapshot!r} has no .parquet shards{slashed}")
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
        seen = (self.url, shard.path, int(info["size"]), _listed(info))
        if not seen[3] or seen not in _contents:
            hasher = blake2b(digest_size=16)
            with self.fs.open(shard.path, "rb") as file:
                while block := file.read(1 << 22):
                    hasher.update(block)
            _contents[seen] = hasher.hexdigest()
        return _contents[seen]

    def hashes_content(self) -> bool:
        """Whether identifying a shard costs reading it: its store gives no checksum."""
        snapshot = self.filled()[0]
        info = self.fs.info(self.shards(snapshot)[0].path)
        return not any(info.get(key) for key in _CHECKSUMS)

    @contextmanager
    def open(self, shard: Shard) -> Iterator[pq.ParquetFile]:
        """The shard as a ParquetFile whose schema is checked. Raises BadShard for what is not readable parquet."""
        if shard.size == 0:
            raise BadShard(shard.path, "is empty (0 bytes)")
        with self.fs.open(shard.path, "rb") as file:
            try:
                parquet = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            except (pa.ArrowException, OSError) as error:
                if _is_the_network_s(error):
                    raise
                raise BadShard(shard.path, f"is not readable parquet ({_first_line(error)})") from error
            check_source(shard.path, parquet.schema_arrow)
            yield parquet

    def footer(self, shard: Shard) -> Footer:
        """Rows, plain schema, a cheap digest over sizes, offsets and least and greatest values of the columns, and
        whether the column token_count is missing or has nulls (or does not tell)."""
        with self.open(shard) as parquet:
            meta = parquet.metadata
            groups = [
                (column.total_compressed_size, column.total_uncompressed_size, column.data_page_offset, _range(column))
                for g in range(meta.num_row_groups)
                for column in (meta.row_group(g).column(c) for c in range(meta.num_columns))
            ]
            schema = parquet.schema_arrow
            return Footer(
                meta.num_rows,
                digest(meta.num_rows, repr(groups), schema.to_string(), size=8).hex(),
                plain(schema),
                meta.num_rows > 0 and _may_lack(meta, "token_count"),
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
                if _is_the_network_s(error):
                    raise
                raise BadShard(shard.path, f"cannot be decoded ({_first_line(error)})") from error

    def _is(self, entry: dict[str, Any], kind: str) -> bool:
        """Whether a listing's entry is a "file" or "directory", links followed."""
        if entry["type"] not in ("file", "directory"):
            return bool(self.fs.isfile(entry["name"]) if kind == "file" else self.fs.isdir(entry["name"]))
        return bool(entry["type"] == kind)

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
        names = (posixpath.basename(e["name"].rstrip("/")) for e in entries if self._is(e, "directory"))
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


def _may_lack(meta: pq.FileMetaData, name: str) -> bool:
    chunks = [
        column
        for g in range(meta.num_row_groups)
        for column in (meta.row_group(g).column(c) for c in range(meta.num_columns))
        if column.path_in_schema == name
    ]
    # a row group of no rows has no statistics and no nulls
    found = [chunk.statistics for chunk in chunks if chunk.num_values]
    return not chunks or any(s is None or not s.has_null_count or s.null_count > 0 for s in found)


def _range(column: pq.ColumnChunkMetaData) -> tuple[Any, Any] | None:
    found = column.statistics
    return (found.min_raw, found.max_raw) if found is not None and found.has_min_max else None


def _is_the_network_s(error: BaseException) -> bool:
    """Whether an error is of reading (connection, permission, open files) and not of what was read.

    Arrow reports broken pages as plain OSErrors without a number; a good shard must not be set aside for a hiccup.
    """
    return isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
