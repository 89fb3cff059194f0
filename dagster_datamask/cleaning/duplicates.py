"""Texts that occur more than once, within a snapshot and in earlier ones, found on disk.

Two documents are duplicates if their texts are equal byte for byte, as they are stored; nothing is normalised, so
nothing is lost that a reader could tell apart. Texts are compared by 128-bit hash, in partitions small enough for
memory. Not here: where texts come from and what becomes of a duplicate (`stages.cleaning`), equal ids
(`shards.identity`), and texts that are merely alike.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa

from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.shuffle import Gather
from dagster_datamask.shards.writer import TableWriter, table_file

HASH = pa.binary(16)
# 2 million records of about 100 bytes, and as much for their sort
_PARTITION_ROWS = 2_000_000
_MAX_PARTITIONS = 512
_BLOCK_ROWS = 65_536
_RECORDS = pa.schema(
    [
        ("hash", HASH),
        ("source", pa.int32()),
        ("shard", pa.int32()),
        ("ordinal", pa.int64()),
        ("doc_id", pa.string()),
    ]
)
_FOUND = pa.schema(
    [
        ("shard", pa.int32()),
        ("ordinal", pa.int64()),
        ("kept_id", pa.string()),
        ("kept_source", pa.int32()),
        ("opens", pa.bool_()),
    ]
)


def text_hashes(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    """128-bit BLAKE2b of each text's bytes, valid UTF-8 or not, as binary(16); null where the text is null."""
    raw = texts.cast(pa.large_binary()).to_pylist()
    return pa.array([None if text is None else blake2b(text, digest_size=16).digest() for text in raw], HASH)


class TextGroups:
    """Groups of equal texts over `sources`, of which the last is the snapshot asked about.

    A group's first document stands first by (source, shard, ordinal); it is the one that is kept. total_rows: of all
    sources, for the number of partitions. Scratch files lie in `folder`: about 50 bytes and the id of each document.
    """

    def __init__(self, folder: Path, sources: Sequence[str], total_rows: int) -> None:
        self._folder = folder
        self._sources = list(sources)
        self.partitions = min(_MAX_PARTITIONS, max(1, -(-total_rows // _PARTITION_ROWS)))
        self._gather: Gather | None = None

    def find(self, batches: Iterable[tuple[int, int, int, pa.Array, pa.Array]]) -> None:
        """Group the documents of all batches: (source, shard, first ordinal, doc ids, hashes), null hashes left out."""
        with ExitStack() as stack:
            writers = [stack.enter_context(table_file(self._spilled(p), _RECORDS)) for p in range(self.partitions)]
            for source, shard, first, ids, hashes in batches:
                self._spill(writers, source, shard, first, ids, hashes)
        for p in range(self.partitions):
            self._resolve(p)
        self._gather = Gather([self._resolved(p) for p in range(self.partitions)])

    def of(self, shard: int) -> pa.Table:
        """`ordinal, kept_id, kept_source, opens` of the duplicates in a shard of the last source, by ordinal.

        opens: the group's first duplicate in that source, so that their sum counts groups. Shards are asked for in
        rising order, after `find`.
        """
        assert self._gather is not None
        names = ["ordinal", "kept_id", "kept_source", "opens"]
        found = list(self._gather.shard(shard, names))
        return pa.concat_tables(found) if found else _FOUND.empty_table().select(names)

    def _spill(
        self, writers: Sequence[TableWriter], source: int, shard: int, first: int, ids: pa.Array, hashes: pa.Array
    ) -> None:
        rows = pa.table(
            {
                "hash": hashes,
                "source": pa.repeat(pa.scalar(source, pa.int32()), len(ids)),
                "shard": pa.repeat(pa.scalar(shard, pa.int32()), len(ids)),
                "ordinal": np.arange(first, first + len(ids)),
                "doc_id": ids,
            },
            schema=_RECORDS,
        ).filter(hashes.is_valid())
        parts = (_words(rows["hash"])[:, 0] % np.uint64(self.partitions)).astype(np.int64)
        for p in np.unique(parts):
            writers[p].write(rows.filter(pa.array(parts == p)))

    def _resolve(self, p: int) -> None:
        rows = pa.concat_tables([_RECORDS.empty_table(), *read_batches(self._spilled(p), None, _BLOCK_ROWS)])
        words = _words(rows["hash"])
        source, shard, ordinal = (rows[name].to_numpy() for name in ("source", "shard", "ordinal"))
        order = np.lexsort((ordinal, shard, source, words[:, 1], words[:, 0]))
        same = (words[order[1:]] == words[order[:-1]]).all(axis=1)
        starts = np.flatnonzero(np.concatenate((np.ones(min(len(order), 1), dtype=bool), ~same)))
        group = np.searchsorted(starts, np.arange(len(order)), side="right") - 1
        later = np.flatnonzero(source[order] == len(self._sources) - 1)
        later = later[~np.isin(later, starts)]
        opens = np.concatenate((np.ones(min(len(later), 1), dtype=bool), np.diff(group[later]) != 0))
        kept = order[starts[group[later]]] if len(later) else later
        found = pa.table(
            {
                "shard": shard[order[later]],
                "ordinal": ordinal[order[later]],
                "kept_id": rows["doc_id"].take(pa.array(kept)),
                "kept_source": source[kept],
                "opens": opens,
            },
            schema=_FOUND,
        )
        with table_file(self._resolved(p), _FOUND) as writer:
            writer.write(found.sort_by([("shard", "ascending"), ("ordinal", "ascending")]))
        self._spilled(p).unlink()

    def _spilled(self, p: int) -> Path:
        return self._folder / f"texts_{p:03d}.arrow"

    def _resolved(self, p: int) -> Path:
        return self._folder / f"groups_{p:03d}.parquet"


def _words(hashes: pa.ChunkedArray) -> np.ndarray:
    """uint64[n, 2]: a column of 16 bytes each, without nulls, as it lies in memory."""
    words = [
        np.frombuffer(chunk.buffers()[1], "<u8", 2 * len(chunk), 16 * chunk.offset)
        for chunk in hashes.chunks
        if len(chunk)
    ]
    return np.concatenate([np.empty(0, np.uint64), *words]).reshape(-1, 2)
