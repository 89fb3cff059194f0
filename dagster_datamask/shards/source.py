"""Where the documents come from: FineWeb-shaped folders of parquet shards on any fsspec URL.

Listing, the identity of a shard's content, the commit of a source on the hub, and streaming columns belong here.
Nothing here writes. Names become names of files elsewhere, so those that cannot are refused where they are listed.
"""

import io
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from dagster_datamask.keyed import digest
from dagster_datamask.redaction import ITS_PLACE, has_secret, redacted
from dagster_datamask.shards.ranges import RangedFile
from dagster_datamask.shards.schemas import BadShard, check_source, plain

SNAPSHOT_KEY = re.compile(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# a stream reads a column chunk piece by piece, so a 2 GB chunk of text costs one buffer and not two gigabytes
_BUFFER_BYTES = 1 << 20
# Object stores say what a file holds; only where none of these is given is the file itself hashed. An ETag of an upload
# in parts is no hash of the bytes, but every upload of other bytes has another; a generation is one upload.
_CHECKSUMS = ("sha256", "md5Hash", "md5", "content_md5", "checksum", "blob_id", "generation", "ETag", "etag")
# what a shard holds, by what its listing says of it: a process hashes an unchanged file once
_contents: dict[tuple[str, str, int, str], str] = {}
# a side file of raw_shards has this name
_RESERVED = "quarantined_shards"
# a file's name has 255 bytes: the snapshot, endings and the writer's own marks come to a shard's name
_NAME_BYTES = 150
# the fact of raw_shards that holds the commit it read
REVISION = "source_revision"
_COMMIT = re.compile("[0-9a-f]{40}")
# seconds for the hub's first answer: a run must not hang on a machine without network
_HUB_TIMEOUT_S = 10.0


class SourceError(ValueError):
    """The source folder or a snapshot in it is not there or is empty; the message says what is."""


class SourceUnreachable(SourceError):
    """The source's store did not answer or refused to; the cause says whether trying again may help."""


@dataclass(frozen=True)
class Shard:
    """One parquet file of a snapshot. `listed` identifies what the listing says of it (size, checksum or time)."""

    name: str
    path: str
    size: int
    listed: str


class Footer(NamedTuple):
    """What a shard's footer tells: rows, 16 hex digits over it, the schema in plain types, and whether rows may lack a
    token_count. size: the file's bytes, which a listing may tell wrongly."""

    rows: int
    digest: str
    schema: pa.Schema
    uncounted: bool
    size: int


class Source:
    """A folder or URL in FineWeb's layout: `<url>/data/<snapshot>/*.parquet`, or flat `<url>/<snapshot>/*.parquet`.

    Folders are listed once in its life, but for `listing_fingerprint`, which looks again. On the Hugging Face hub all
    is read from one commit, `revision`: that of the argument or the URL, or the one that the URL's branch is at now.

    Raises SourceError for a URL that names no source, SourceUnreachable where the hub does not tell the commit.
    """

    def __init__(self, url: str, revision: str | None = None) -> None:
        if not url:
            raise SourceError(
                "no source is set: give --source, DATAMASK_SOURCE or [source] url in datamask.toml "
                "(a folder or URL with data/<snapshot>/*.parquet)"
            )
        if has_secret(url):
            raise SourceError(
                f"source: its URL has a password or key in it; put that into {ITS_PLACE}, and take it out of the URL"
            )
        self.url = url
        try:
            self.fs, path = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise SourceError(f"source {url}: {error}") from error
        self.revision: str | None = None
        if "hf" in _protocols(self.fs.protocol):
            path, self.revision = _pinned(self.fs, url, revision)
        self.path = path.rstrip("/")
        self._local = isinstance(self.fs, LocalFileSystem)
        self._listings: dict[str, list[dict[str, Any]]] = {}
        # one file system object lives as long as the process, and some keep old listings
        self.fs.invalidate_cache()

    def at(self, revision: str | None) -> Self:
        """This source as it was at a commit of the hub; itself where it is there, or has none."""
        return self if revision in (None, self.revision) else type(self)(self.url, revision)

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
            entries = self._entries(folder)
        except (FileNotFoundError, NotADirectoryError):
            there = ", ".join(self.snapshots())
            raise SourceError(f"source {self.url} has no snapshot {snapshot!r}; there are: {there}") from None
        shards = []
        for entry in entries:
            base = posixpath.basename(entry["name"])
            if base.endswith(".parquet") and base[0] not in "._" and self._is(entry, "file"):
                name = base.removesuffix(".parquet")
                if why := unusable_name(name):
                    raise SourceError(f"{entry['name']!r}: a shard cannot be called {name!r}: {why}; rename it")
                shards.append(
                    Shard(
                        name=name,
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
        """16 hex digits over names, sizes and checksums or times: changes when a shard lands or is replaced.

        Lists the snapshot anew.
        """
        parts = [part for s in self.listed_anew(snapshot) for part in (s.name, s.size, s.listed)]
        return digest(*parts, size=8).hex()

    def listed_anew(self, snapshot: str) -> list[Shard]:
        """As `shards`, from a listing that is made now."""
        self._listings.pop(posixpath.join(self._base(), snapshot), None)
        return self.shards(snapshot)

    def written(self, shard: Shard) -> str:
        """What the store tells now of when a shard was written; "" where its checksum says what it holds.

        If that is the same before and after a read, no other version stood there in between and was taken back.
        """
        if shard.listed.partition("=")[0] in _CHECKSUMS:
            return ""
        return _listed(self._info(shard.path))

    def content(self, shard: Shard, *, as_listed: bool = False) -> str:
        """32 hex digits that identify what the shard holds, wherever it lies: its store's checksum, or its own hash.

        as_listed: what the listing told of it will do, where that holds a checksum; if not, the store is asked now.
        """
        key, _, value = shard.listed.partition("=")
        # what a commit holds stays as it is
        if (as_listed or self.revision) and key in _CHECKSUMS:
            return digest(key, value, size=16).hex()
        info = self._info(shard.path)
        listed = _listed(info)
        key, _, value = listed.partition("=")
        if key in _CHECKSUMS:
            return digest(key, value, size=16).hex()
        seen = (self.url, shard.path, int(info["size"]), listed)
        if not listed or seen not in _contents:
            hasher = blake2b(digest_size=16)
            with self._file(shard) as file:
                while block := file.read(1 << 22):
                    hasher.update(block)
            _contents[seen] = hasher.hexdigest()
        return _contents[seen]

    def hashes_content(self) -> bool:
        """Whether identifying a shard costs reading it: its store gives no checksum."""
        first = self.shards(self.filled()[0])[0]
        return first.listed.partition("=")[0] not in _CHECKSUMS

    @contextmanager
    def open(self, shard: Shard) -> Iterator[pq.ParquetFile]:
        """The shard as a ParquetFile whose schema is checked. Raises BadShard for what is not readable parquet."""
        with self._parquet(shard) as (parquet, _):
            yield parquet

    @contextmanager
    def _parquet(self, shard: Shard) -> Iterator[tuple[pq.ParquetFile, Any]]:
        # a listing may be older than what was uploaded since
        if shard.size == 0 and not self._info(shard.path)["size"]:
            raise BadShard(shard.path, "is empty (0 bytes)")
        with self._file(shard) as file:
            try:
                parquet = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            except (pa.ArrowException, OSError) as error:
                if _is_the_network_s(error):
                    raise
                raise BadShard(shard.path, f"is not readable parquet ({_first_line(error)})") from error
            check_source(shard.path, parquet.schema_arrow)
            yield parquet, file

    def _file(self, shard: Shard) -> Any:
        if self._local:
            return self.fs.open(shard.path, "rb")
        # what a store's client reads ahead by itself is mostly of columns that nobody asked for
        file = self.fs.open(shard.path, "rb", cache_type="none")
        return RangedFile(file, file.seek(0, io.SEEK_END), shard.path)

    def footer(self, shard: Shard) -> Footer:
        """Rows, plain schema, a cheap digest over sizes, offsets and least and greatest values of the columns, whether
        the column token_count is missing or has nulls (or does not tell), and the file's bytes."""
        with self._parquet(shard) as (parquet, file):
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
                file.seek(0, io.SEEK_END),
            )

    def batches(
        self, shard: Shard, columns: Sequence[str] | None, rows: int, groups: Sequence[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Record batches of at most `rows` rows, in order, of all row groups or of `groups`, in plain types.

        Columns the shard lacks are left out. Raises BadShard where a page cannot be decoded.
        """
        with self._parquet(shard) as (parquet, file):
            names = parquet.schema_arrow.names
            wanted = names if columns is None else [c for c in columns if c in names]
            if isinstance(file, RangedFile):
                file.expect(*_chunks(parquet.metadata, set(wanted), groups))
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
        inside = {posixpath.basename(e["name"].rstrip("/")): e for e in self._top(self.path)}
        data = inside.get("data")
        return posixpath.join(self.path, "data") if data and self._is(data, "directory") else self.path

    def _top(self, folder: str) -> list[dict[str, Any]]:
        try:
            return self._entries(folder)
        except (FileNotFoundError, NotADirectoryError):
            raise SourceError(
                f"source {self.url} does not exist; set [source] url in datamask.toml, DATAMASK_SOURCE or --source"
            ) from None

    def _entries(self, folder: str) -> list[dict[str, Any]]:
        """What lies in a folder, listed once. Raises FileNotFoundError and NotADirectoryError as they are."""
        if folder not in self._listings:
            self._forget(folder)
            try:
                # a key that ends in two slashes is listed as a folder in itself
                found = self.fs.ls(folder, detail=True)
                self._listings[folder] = [entry for entry in found if entry["name"].rstrip("/") != folder]
            except (FileNotFoundError, NotADirectoryError):
                raise
            # clients of stores have errors of their own, some of them no OSError
            except Exception as error:
                raise SourceUnreachable(
                    f"source {self.url} cannot be listed: {_first_line(error)}; is it reachable, and may the "
                    "credentials of the environment read it?"
                ) from error
        return self._listings[folder]

    def _info(self, path: str) -> dict[str, Any]:
        self._forget(posixpath.dirname(path))
        found: dict[str, Any] = self.fs.info(path)
        return found

    def _forget(self, folder: str) -> None:
        """Let the file system ask its store again; a commit of the hub stays as it is."""
        if self.revision is None:
            self.fs.invalidate_cache(folder)

    def _folders(self, base: str) -> list[str]:
        entries = self._top(base)
        names = (posixpath.basename(e["name"].rstrip("/")) for e in entries if self._is(e, "directory"))
        return sorted(name for name in names if name and name[0] not in "._")


def unusable_name(shard: str) -> str | None:
    """Why a shard's name cannot be that of a file below a folder, whatever else that holds; None where it can."""
    if shard == _RESERVED:
        return "a side file of raw_shards is"
    if not shard or shard[0] in "._" or any(c in "/\\" or not c.isprintable() for c in shard):
        return "it has to be a file's name, of characters that can be seen"
    if len(os.fsencode(shard)) > _NAME_BYTES:
        return f"it has more than {_NAME_BYTES} bytes"
    return None


def _protocols(protocol: str | Sequence[str]) -> tuple[str, ...]:
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _pinned(fs: Any, url: str, revision: str | None) -> tuple[str, str | None]:
    """The path of a source on the hub at one commit, and the commit; a bucket has none."""
    # slow to import, and needless for other sources
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfUriError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import parse_hf_uri

    try:
        named = parse_hf_uri(url)
    except HfUriError as error:
        raise SourceError(f"source {url}: {_first_line(error)}; write hf://datasets/<org>/<name>[@<commit>]") from error
    if named.is_bucket:
        return fs._strip_protocol(url), None
    asked = revision or named.revision
    commit = asked if asked and _COMMIT.fullmatch(asked) else None
    try:
        commit = (
            commit
            or HfApi(endpoint=fs.endpoint, token=fs.token)
            .repo_info(named.id, repo_type=named.type, revision=asked, timeout=_HUB_TIMEOUT_S)
            .sha
        )
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"source {url}: the hub has no {named.type} {named.id!r}, or not for you; correct source.url, or set "
            "HF_TOKEN where it is private or gated"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"source {url}: {named.id!r} has no revision {asked!r}; correct it in source.url") from error
    except OfflineModeIsEnabled as error:
        raise SourceUnreachable(
            f"source {url}: HF_HUB_OFFLINE is set, and a source on the hub needs the network; unset it, or name a "
            "folder with the files"
        ) from error
    except (HTTPError, OSError) as error:
        raise SourceUnreachable(
            f"source {url}: the hub does not tell its commit: {_first_line(error)}; HF_TOKEN raises the hub's limit of "
            "requests, and without network a folder with the files serves"
        ) from error
    return "/".join(part for part in (f"{named.type}s/{named.id}@{commit}", named.path_in_repo) if part), commit


def _chunks(
    meta: pq.FileMetaData, columns: set[str], groups: Sequence[int] | None
) -> tuple[list[tuple[int, int]], int]:
    """[start, end) of the chunks of `columns` in `groups`, and how many chunks one row group has of them."""
    found, streams = [], 0
    for g in range(meta.num_row_groups) if groups is None else groups:
        group = meta.row_group(g)
        chunks = [group.column(c) for c in range(meta.num_columns)]
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
        streams = max(streams, len(chunks))
        for chunk in chunks:
            # a dictionary lies before the pages that use it
            first = min(at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at is not None)
            found.append((first, first + chunk.total_compressed_size))
    return found, streams


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
            # some stores quote it when they list and not when they are asked for one file
            return f"{key}={str(entry[key]).removeprefix('W/').strip(chr(34))}"
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
    # what a store's client says can name what it signed with, and some of it is published
    return redacted((str(error).splitlines() or [type(error).__name__])[0])
