"""Whole files or nothing: temp file, fsync, verification, atomic rename.

Belongs here: how bytes reach a local disk safely. Where files lie and when they count as published is `generations`'.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_ROWS = 65_536


@contextmanager
def atomic(path: Path, verify: Callable[[Path], None] | None = None, scratch: Path | None = None) -> Iterator[Path]:
    """Yield a temp path beside `path`, or in `scratch` on the same disk; on success it is flushed, verified and renamed
    to `path`, else removed."""
    # no process's number: that of a worker on another machine may be the same
    temp = (scratch or path.parent) / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        yield temp
        with temp.open("rb") as file:
            os.fsync(file.fileno())
        if verify is not None:
            verify(temp)
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any, scratch: Path | None = None) -> None:
    """Write `value` as sorted, indented JSON, atomically: equal values give equal bytes."""
    with atomic(path, scratch=scratch) as temp:
        temp.write_bytes(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """`value` as sorted, indented JSON in UTF-8: equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def remove_temps(folder: Path) -> None:
    """Remove what killed writers left in `folder` and below it, files and whole folders."""
    for temp in list(folder.rglob(".*.tmp*")):
        if temp.is_dir() and not temp.is_symlink():
            shutil.rmtree(temp)
        else:
            temp.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    hasher = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()


class TableWriter(Protocol):
    """What a kernel's output is written to: batches of one schema, counted."""

    rows: int

    def write(self, table: pa.Table) -> None: ...

    def close(self) -> None: ...


class ParquetWriter:
    """Batches into a zstd parquet file with fixed row groups, so that batch sizes never show in the bytes."""

    def __init__(self, path: Path, schema: pa.Schema, group_rows: int = ROW_GROUP_ROWS) -> None:
        self.rows = 0
        self._group_rows = group_rows
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._pending: list[pa.Table] = []
        self._pending_rows = 0

    def write(self, table: pa.Table) -> None:
        table = table.cast(self._schema)
        self.rows += len(table)
        self._pending.append(table)
        self._pending_rows += len(table)
        while self._pending_rows >= self._group_rows:
            self._flush(self._group_rows)

    def close(self) -> None:
        if self._pending_rows:
            self._flush(self._pending_rows)
        self._writer.close()

    def _flush(self, rows: int) -> None:
        joined = pa.concat_tables(self._pending)
        self._writer.write_table(joined.slice(0, rows).combine_chunks(), row_group_size=self._group_rows)
        rest = joined.slice(rows)
        self._pending = [rest] if len(rest) else []
        self._pending_rows = len(rest)


class ArrowWriter:
    """Batches into an uncompressed Arrow IPC file, which readers map into memory."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.rows = 0
        self._schema = schema
        self._writer = pa.ipc.new_file(str(path), schema)

    def write(self, table: pa.Table) -> None:
        self.rows += len(table)
        self._writer.write_table(table.cast(self._schema))

    def close(self) -> None:
        self._writer.close()


@contextmanager
def table_file(path: Path, schema: pa.Schema, group_rows: int = ROW_GROUP_ROWS) -> Iterator[TableWriter]:
    """An atomic writer for `path` by its extension (.parquet or .arrow); the footer must tell the rows written.

    `group_rows` is the size of a parquet row group; files that carry text want small ones.
    """
    written = 0

    def verify(temp: Path) -> None:
        rows = count_rows(temp, path.suffix)
        if rows != written:
            raise OSError(f"{path}: {written} rows were written but its footer tells {rows}")

    with atomic(path, verify) as temp:
        writer: TableWriter = (
            ArrowWriter(temp, schema) if path.suffix == ".arrow" else ParquetWriter(temp, schema, group_rows)
        )
        with closing(writer):
            yield writer
        written = writer.rows


def count_rows(path: Path, suffix: str | None = None) -> int:
    """Rows of a parquet or Arrow IPC file, from its footer."""
    if (suffix or path.suffix) == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
