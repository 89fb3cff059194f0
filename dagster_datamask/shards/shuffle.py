"""The shuffle pass: documents of all shards into random splits on disk, and results back into shard order.

A split is a range of the keyed hash of `doc_id`, so membership does not depend on shards or their order. Ranges are
cut from a histogram so that no split exceeds its size. Each split is written by one pass and read once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_datamask.keyed import hash64
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.writer import table_file

_BITS = 20
_BUCKETS = 1 << _BITS
# rows of one shard that are put back in order at a time
_BLOCK_ROWS = 65_536
# of each split's result: a snapshot may have hundreds
_READ_ROWS = 4096


@dataclass(frozen=True)
class Splits:
    """Splits as ranges of hash buckets: `edges[k] <= bucket < edges[k+1]` is split k; `sizes[k]` documents."""

    seed: int
    edges: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, ids: Iterable[str]) -> np.ndarray:
        """int64[n]: the split of each id."""
        return np.searchsorted(np.array(self.edges[1:]), _buckets(ids, self.seed), side="right")


def plan(ids: Iterable[list[str]], most: int, seed: int) -> Splits:
    """The fewest splits of nearly equal size with at most `most` documents each.

    Raises ValueError if `most` is so small that one hash bucket (a millionth of the documents) exceeds it.
    """
    histogram = np.zeros(_BUCKETS, dtype=np.int64)
    for batch in ids:
        histogram += np.bincount(_buckets(batch, seed), minlength=_BUCKETS)
    total = int(histogram.sum())
    before = np.concatenate(([0], np.cumsum(histogram)))
    if histogram.max(initial=0) > most:
        raise ValueError(f"select.split = {most} is too small for {total} documents; raise it")
    count = max(1, -(-total // most))
    while True:
        edges = np.searchsorted(before, np.arange(1, count) * total / count, side="left")
        bounds = np.concatenate(([0], edges, [_BUCKETS]))
        sizes = np.diff(before[bounds])
        if sizes.max() <= most:
            return Splits(seed, tuple(int(b) for b in bounds), tuple(int(s) for s in sizes))
        count += 1


def scatter(folder: Path, schema: pa.Schema, splits: Splits, batches: Callable[[], Iterable[pa.Table]]) -> list[Path]:
    """Write every row of `batches()` to the file of its split, in the order read; rows carry `doc_id`."""
    paths = [folder / f"split_{k:05d}.arrow" for k in range(len(splits.sizes))]
    with ExitStack() as stack:
        writers = [stack.enter_context(table_file(path, schema)) for path in paths]
        for table in batches():
            where = splits.of(table["doc_id"].to_pylist())
            for k in np.unique(where):
                writers[k].write(table.filter(pa.array(where == k)))
    return paths


class Gather:
    """Split results (parquet with `shard`, `ordinal`, sorted by both) merged back into shard order.

    Shards are asked for in rising order; each file is read forward once, and a block of rows is in memory.
    """

    def __init__(self, results: Sequence[Path]) -> None:
        self._files = [_Sorted(path) for path in results]

    def shard(self, number: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of one shard, by ordinal, in blocks."""
        for file in self._files:
            file.before(number, 0)
        start = 0
        while any(file.holds(number) for file in self._files):
            start += _BLOCK_ROWS
            parts = [file.before(number, start) for file in self._files]
            yield pa.concat_tables(parts).sort_by("ordinal").select(columns)


class _Sorted:
    """One split's result, read forward."""

    def __init__(self, path: Path) -> None:
        self._batches = read_batches(path, None, _READ_ROWS)
        self._buffer = next(self._batches, None)
        self._empty = pq.read_schema(path).empty_table()

    def before(self, shard: int, ordinal: int) -> pa.Table:
        """Rows not handed out yet that come before (shard, ordinal)."""
        parts = [self._empty]
        while self._buffer is not None:
            shards, ordinals = self._buffer["shard"].to_numpy(), self._buffer["ordinal"].to_numpy()
            inside = int(((shards < shard) | ((shards == shard) & (ordinals < ordinal))).sum())
            parts.append(self._buffer.slice(0, inside))
            self._buffer = self._buffer.slice(inside) if inside < len(self._buffer) else next(self._batches, None)
            if self._buffer is not None and inside < len(shards):
                break
        return pa.concat_tables(parts)

    def holds(self, shard: int) -> bool:
        """Whether the next row is of `shard`."""
        return self._buffer is not None and self._buffer["shard"][0].as_py() == shard


def _buckets(ids: Iterable[str], seed: int) -> np.ndarray:
    return (hash64(ids, seed, "split") >> np.uint64(64 - _BITS)).astype(np.int64)
