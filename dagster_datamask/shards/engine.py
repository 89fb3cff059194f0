"""The one primitive: map a kernel over shards, each done once, wholly, and accounted for.

For every shard without a valid completion record: read batches, run the kernel, write one file atomically, record
rows and counts. Resume, progress and accounting live here, so no stage has a loop of its own. Memory holds one batch,
whatever the number or size of shards.
"""

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from dagster_datamask.shards.generations import Generation, ShardRecord
from dagster_datamask.shards.writer import ROW_GROUP_ROWS, table_file

# A batch is what a kernel sees at once: large enough to sort texts by length, small enough for long documents.
BATCH_ROWS = 1024

# how an error is marked with the shard at which it happened
AT_SHARD = "at shard "

Counts = Mapping[str, int]
Kernel = Callable[[Any], tuple[pa.Table, int, Counts]]
Progress = Callable[[int, int, str], None]


class Reader(Protocol):
    def __call__(self, shard: str) -> Iterable[Any]: ...


def map_shards(
    generation: Generation,
    shards: Sequence[str],
    read: Reader,
    kernel: Callable[[], Kernel],
    schema: pa.Schema | Callable[[], pa.Schema],
    *,
    ext: str,
    total_rows: int,
    progress: Progress,
    source: Callable[[str], Mapping[str, Any]] = lambda shard: {},
    origin: Callable[[str], str] = lambda shard: "",
    group_rows: int = ROW_GROUP_ROWS,
) -> list[ShardRecord]:
    """Completion records of all `shards`, computing those that are missing.

    `read(shard)` yields batches of any kind; the kernel turns one into (rows to write, rows it accounts for, counts by
    reason). `kernel` and a callable `schema` are built on the first incomplete shard only, so a finished stage loads
    no model. `progress(rows done, total_rows, shard)` is called after every batch. `source(shard)` is stored in the
    record as what the shard was made from. `origin(shard)` names all that its bytes depend on: a shard that another
    generation has made from the same is taken over, so that a shard that lands does not cost its neighbours' scores.
    """
    records = []
    run: Kernel | None = None
    done = 0
    for shard in shards:
        try:
            record = generation.record(shard, ext)
            made_from = origin(shard) if record is None else ""
            if made_from:
                record = generation.adopt(shard, ext, made_from)
            if record is None:
                if run is None:
                    run = kernel()
                    schema = schema if isinstance(schema, pa.Schema) else schema()
                counts: Counter[str] = Counter()
                rows_in = 0
                assert isinstance(schema, pa.Schema)
                with table_file(generation.folder / f"{shard}{ext}", schema, group_rows) as writer:
                    for batch in read(shard):
                        table, rows, batch_counts = run(batch)
                        writer.write(table)
                        rows_in += rows
                        counts.update(batch_counts)
                        progress(done + rows_in, total_rows, shard)
                record = generation.complete(
                    shard, ext, rows=writer.rows, rows_in=rows_in, counts=counts, source=source(shard), origin=made_from
                )
        except Exception as error:
            error.add_note(f"{AT_SHARD}{shard}")
            raise
        done += record.rows_in
        progress(done, total_rows, shard)
        records.append(record)
    return records


def every_seconds(report: Callable[[str], None], what: str, unit: str = "rows", seconds: float = 5.0) -> Progress:
    """A Progress that says `what`, how much of how much, the rate and a detail, at most once in `seconds`."""
    started = last = time.monotonic()

    def progress(done: int, total: int, detail: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            share = f" ({done / total:.0%})" if total else ""
            rate = f"{done / (now - started):,.0f} {unit}/s"
            report(f"{what}: {done:,} of {total:,} {unit}{share}, {rate}, {detail}")

    return progress


def peak_memory_mb() -> float:
    """Peak resident memory of this process so far, in MB."""
    scale = 1 / 1024 if sys.platform != "darwin" else 1 / 1024**2
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
