"""Reading documents: the source's rows under the ids that `raw_shards` gave them.

The one place where text enters. A batch carries ids and texts; the source shard is proved unchanged since
`raw_shards` read it, because ids belong to rows of that very file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.engine import BATCH_ROWS
from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.schemas import RAW, InconsistentFiles, ShardReplaced
from dagster_datamask.shards.source import REVISION, Shard, Source


@dataclass(frozen=True)
class Documents:
    """Source rows with their raw_shards rows: equal lengths, same order."""

    raw: pa.Table
    rows: pa.Table

    @property
    def ids(self) -> pa.Array:
        return self.raw["doc_id"].combine_chunks()


class DocumentReader:
    """The documents of one snapshot as published by raw_shards."""

    def __init__(self, source: Source, raw: Published) -> None:
        assert raw.snapshot is not None
        # a branch that moved meanwhile moves nothing that was begun
        self._source = source.at(raw.facts.get(REVISION))
        self._raw = raw
        self._shards = {shard.name: shard for shard in self._source.shards(raw.snapshot)}

    def shard(self, name: str) -> Shard:
        """The source shard. Raises InconsistentFiles if it is gone or was rewritten since raw_shards read it."""
        return self._proved(name, as_listed=False)

    def _proved(self, name: str, *, as_listed: bool) -> Shard:
        if name not in self._shards:
            # the listing may be older than the shard
            self._shards = {shard.name: shard for shard in self._source.listed_anew(self._raw.snapshot or "")}
        try:
            shard = self._shards[name]
            content = self._source.content(shard, as_listed=as_listed)
        except (KeyError, FileNotFoundError):
            raise InconsistentFiles(
                f"{self._source.url}: shard {name} of {self._raw.snapshot} is gone since raw_shards read it; "
                "materialise raw_shards again"
            ) from None
        if content != self._raw.record(name).source["content"]:
            raise InconsistentFiles(
                f"{shard.path} was rewritten since raw_shards read it; materialise raw_shards again"
            )
        return shard

    def identity(self, name: str) -> tuple[str, str]:
        """What a shard's documents are: the hash of its raw_shards file, and what the source shard holds."""
        record = self._raw.record(name)
        return record.sha256, record.source["content"]

    def batches(self, name: str, columns: Sequence[str] | None, rows: int = BATCH_ROWS) -> Iterator[Documents]:
        """Batches of at most `rows` documents of a shard; `columns` of the source, None for all it has."""
        shard = self._proved(name, as_listed=True)
        written = self._source.written(shard)
        raw = _Forward(read_batches(self._raw.path(name), None, rows))
        first = 0
        for batch in self._source.batches(shard, columns, rows):
            table = raw.before(first + len(batch))
            positions = table["row"].to_numpy() - first
            yield Documents(table, pa.Table.from_batches([batch]).take(positions))
            first += len(batch)
        # rewritten in place meanwhile, it may have given some old texts and some new ones
        self._proved(name, as_listed=False)
        if self._source.written(shard) != written:
            raise ShardReplaced(f"{shard.path} was written anew while it was read; materialise this asset again")


class _Forward:
    """raw_shards rows read forward by their source row."""

    def __init__(self, batches: Iterator[pa.Table]) -> None:
        self._batches = batches
        self._buffer = next(batches, None)

    def before(self, row: int) -> pa.Table:
        """All rows not handed out yet whose source row is below `row`."""
        if self._buffer is None:
            return RAW.empty_table()
        parts = []
        while True:
            inside = int(np.searchsorted(self._buffer["row"].to_numpy(), row))
            parts.append(self._buffer.slice(0, inside))
            self._buffer = self._buffer.slice(inside)
            if len(self._buffer):
                break
            following = next(self._batches, None)
            if following is None:
                break
            self._buffer = following
        return pa.concat_tables(parts)
