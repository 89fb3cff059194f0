"""Joining side files by doc_id in one streaming pass.

Every side file holds its shard's documents in the shard's order, some of them left out. So a join reads each file
once, keeps one batch of it, and proves on the way that ids agree: no positions, no hash tables, flat memory.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dagster_datamask.shards.schemas import InconsistentFiles


def read_batches(path: Path, columns: Sequence[str] | None, rows: int) -> Iterator[pa.Table]:
    """Tables of at most `rows` rows of a parquet or (memory-mapped) Arrow IPC file, in order."""
    if path.suffix == ".arrow":
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                table = pa.Table.from_batches([reader.get_batch(index)])
                table = table if columns is None else table.select(columns)
                for start in range(0, len(table), rows):
                    yield table.slice(start, rows)
        return
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        for batch in parquet.iter_batches(batch_size=rows, columns=None if columns is None else list(columns)):
            yield pa.Table.from_batches([batch])


class Cursor:
    """A side file read forward, handing out the rows that a batch of ids asks for."""

    def __init__(self, path: Path, columns: Sequence[str] | None, rows: int) -> None:
        self.path = path
        self._batches = read_batches(path, columns, rows)
        self._buffer: pa.Table | None = None
        self._ended = False

    def take(self, ids: pa.Array) -> tuple[pa.Table, np.ndarray]:
        """(rows of this file whose doc_id is in `ids`, in order; int64 positions of those rows within `ids`).

        Raises InconsistentFiles where the file does not hold a subsequence of the ids asked so far.
        """
        self._fill(len(ids))
        if self._buffer is None or not len(self._buffer):
            return self._empty(), np.empty(0, dtype=np.int64)
        window = self._buffer.slice(0, len(ids))
        found = pc.index_in(window["doc_id"].combine_chunks(), value_set=ids).to_numpy(zero_copy_only=False)
        absent = np.isnan(found) if found.dtype.kind == "f" else np.zeros(len(found), dtype=bool)
        taken = int(np.argmax(absent)) if absent.any() else len(found)
        positions = found[:taken].astype(np.int64)
        if not absent[taken:].all() or (np.diff(positions) <= 0).any():
            raise InconsistentFiles(
                f"{self.path}: doc_id {window['doc_id'][max(0, taken - 1)].as_py()!r} is out of order or repeated; "
                "the file does not belong to these documents. Remove its generation folder and materialise again"
            )
        self._buffer = self._buffer.slice(taken)
        return window.slice(0, taken), positions

    def take_all(self, ids: pa.Array) -> pa.Table:
        """The rows of exactly these ids. Raises InconsistentFiles naming the first id that is missing."""
        table, positions = self.take(ids)
        if len(positions) != len(ids):
            present = np.zeros(len(ids), dtype=bool)
            present[positions] = True
            missing = ids[int(np.argmin(present))].as_py()
            raise InconsistentFiles(
                f"{self.path}: has no row for doc_id {missing!r}; materialise the asset of that file again"
            )
        return table

    def end(self) -> None:
        """Raise InconsistentFiles if rows are left over that no batch asked for."""
        self._fill(1)
        if self._buffer is not None and len(self._buffer):
            raise InconsistentFiles(
                f"{self.path}: doc_id {self._buffer['doc_id'][0].as_py()!r} is not among the documents it belongs to; "
                "materialise the asset of that file again"
            )

    def _fill(self, rows: int) -> None:
        while not self._ended and (self._buffer is None or len(self._buffer) < rows):
            batch = next(self._batches, None)
            if batch is None:
                self._ended = True
            else:
                self._buffer = batch if self._buffer is None else pa.concat_tables([self._buffer, batch])

    def _empty(self) -> pa.Table:
        if self._buffer is not None:
            return self._buffer.slice(0, 0)
        suffix_schema = (
            pq.read_schema(self.path)
            if self.path.suffix == ".parquet"
            else pa.ipc.open_file(pa.memory_map(str(self.path))).schema
        )
        return suffix_schema.empty_table()


def scatter(values: pa.ChunkedArray, positions: np.ndarray, rows: int) -> pa.Array:
    """An array of `rows` values: `values[j]` at `positions[j]`, null elsewhere."""
    indices = np.full(rows, -1, dtype=np.int64)
    indices[positions] = np.arange(len(positions))
    return values.combine_chunks().take(pa.array(indices, mask=indices < 0))
