"""The shuffle pass: documents of all shards into random splits on disk, and results back into shard order.

A split is a range of the keyed hash of `doc_id`, so membership does not depend on shards or their order. Ranges are
cut from a histogram so that no split exceeds its size. Each split is written by one pass and read once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from dagster_datamask.keyed import hash64
from dagster_datamask.shards.writer import table_file

_BITS = 20
_BUCKETS = 1 << _BITS
# rows of one shard that are put back in order at a time
_BLOCK_ROWS = 65_536


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


def gather(results: list[Path], shard: int, columns: list[str]) -> Iterator[pa.Table]:
    """Rows of one shard from all split results (parquet with `shard`, `ordinal`), by ordinal, in blocks."""
    frame = pl.scan_parquet(results).filter(pl.col("shard") == shard)
    last = frame.select(pl.col("ordinal").max()).collect().item()
    for start in range(0, 0 if last is None else last + 1, _BLOCK_ROWS):
        block = frame.filter(pl.col("ordinal").is_between(start, start + _BLOCK_ROWS - 1))
        yield block.sort("ordinal").select(columns).collect().to_arrow()


def _buckets(ids: Iterable[str], seed: int) -> np.ndarray:
    return (hash64(ids, seed, "split") >> np.uint64(64 - _BITS)).astype(np.int64)
