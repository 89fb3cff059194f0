"""The one primitive: map a kernel over shards, each done once, wholly, and accounted for.

For every shard without a valid completion record: read batches, run the kernel, write one file atomically, record
rows and counts. Resume, progress and accounting live here, so no stage has a loop of its own. Memory holds one batch,
whatever the number or size of shards. Where shards are worked on is `compute`'s matter; a place gets what it is to do
by cloudpickle, so what a stage's functions refer to must be such that it can be sent.
"""

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

import pyarrow as pa

from dagster_datamask.compute.base import INLINE, ONE_CORE, Compute, Inline, Poisoned, Requests, Told
from dagster_datamask.shards.generations import Generation, ShardRecord
from dagster_datamask.shards.writer import ROW_GROUP_ROWS, remove_temps, table_file

# A batch is what a kernel sees at once: large enough to sort texts by length, small enough for long documents.
BATCH_ROWS = 1024

# how an error is marked with the shard at which it happened
AT_SHARD = "at shard "

Counts = Mapping[str, int]
Kernel = Callable[[Any], tuple[pa.Table, int, Counts]]
Progress = Callable[[int, int, str], None]


# read(shard), or read(shard, given) where the stage gives its shards something
Reader = Callable[..., Iterable[Any]]
Given = Callable[[str], Any]


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
    given: Callable[[], Given] | None = None,
    compute: Compute = INLINE,
    requests: Requests = ONE_CORE,
    inline_below: int = 0,
) -> list[ShardRecord]:
    """Completion records of all `shards`, computing those that are missing.

    `read(shard)` yields batches of any kind; the kernel turns one into (rows to write, rows it accounts for, counts by
    reason). `progress(rows done, total_rows, shard)` is called after every batch. `source(shard)`, called when a shard
    is read, is stored in the record as what the shard was made from. `origin(shard)` names all that its bytes depend
    on: a shard that another generation has made from the same is taken over, so that a shard that lands does not cost
    its neighbours' scores.

    `read`, `kernel`, `source` and a callable `schema` run where `compute` says, all on one worker; what they share they
    share there, and nothing of it comes back but the record. A worker builds `kernel` and schema on its first shard
    only, so a finished stage loads no model. `given()` is called here, before the first incomplete shard; what it
    returns is called with each of them, and its result handed to `read` as a second argument: what only this machine's
    scratch tells. With fewer rows to do than `inline_below`, or no other shard, shards are done here.

    The error of a shard carries its name as a note. Raises Poisoned, naming shards, when all others are done.
    """
    records: dict[str, ShardRecord] = {}
    origins: dict[str, str] = {}
    done = 0
    for shard in shards:
        with _at(shard):
            record = generation.record(shard, ext)
            if record is None:
                origins[shard] = origin(shard)
                record = generation.adopt(shard, ext, origins[shard]) if origins[shard] else None
        if record is not None:
            records[shard] = record
            done += record.rows_in
            progress(done, total_rows, shard)
    missing = [shard for shard in shards if shard not in records]
    if not missing:
        return [records[shard] for shard in shards]
    # of several the last one missing may be one that ends its reader, so that alone is what it is among others
    if inline_below and (len(shards) == 1 or total_rows - done < inline_below):
        compute = INLINE
    reached = dict.fromkeys(missing, 0)

    def told(task: _Task, rows: int) -> None:
        # what is told late is in the record already
        if task.shard in reached:
            reached[task.shard] = rows
        progress(done + sum(reached.values()), total_rows, task.shard)

    with _at(missing[0]):
        tasks = _Tasks(missing, origins, None if given is None else given())
    worker = _Worker(generation, read, kernel, schema, ext, source, group_rows)
    try:
        for task, record in compute.each(worker, tasks, requests=requests, told=told):
            del reached[task.shard]
            records[task.shard] = record
            done += record.rows_in
            progress(done + sum(reached.values()), total_rows, task.shard)
    except Poisoned as error:
        raise Poisoned({task.shard: why for task, why in error.why.items()}) from error
    finally:
        # what lost workers left half-written; those of this call have ended
        if not isinstance(compute, Inline):
            remove_temps(generation.folder)
    return [records[shard] for shard in shards]


@dataclass(frozen=True)
class _Task:
    """A shard to do, and what of this machine it needs for that."""

    shard: str
    origin: str = field(compare=False)
    given: tuple[Any, ...] = field(compare=False)

    def __str__(self) -> str:
        return self.shard


class _Tasks(Sequence[_Task]):
    """The tasks of `shards`, each made when it is asked for: what all of them are given together may be large."""

    def __init__(self, shards: Sequence[str], origins: Mapping[str, str], given: Given | None) -> None:
        self._shards, self._origins, self._given = shards, origins, given

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, at: int) -> _Task: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[_Task]: ...

    def __getitem__(self, at: int | slice) -> _Task | Sequence[_Task]:
        if isinstance(at, slice):
            return _Tasks(self._shards[at], self._origins, self._given)
        shard = self._shards[at]
        with _at(shard):
            return _Task(shard, self._origins[shard], () if self._given is None else (self._given(shard),))


@dataclass(frozen=True)
class _Worker:
    """What a place to compute is sent: how to do a shard."""

    generation: Generation
    read: Reader
    kernel: Callable[[], Kernel]
    schema: pa.Schema | Callable[[], pa.Schema]
    ext: str
    source: Callable[[str], Mapping[str, Any]]
    group_rows: int

    def __call__(self) -> Callable[[_Task, Told], ShardRecord]:
        built: list[tuple[Kernel, pa.Schema]] = []

        def work(task: _Task, told: Told) -> ShardRecord:
            with _at(task.shard):
                if not built:
                    run = self.kernel()
                    built.append((run, self.schema if isinstance(self.schema, pa.Schema) else self.schema()))
                return self._done(task, told, *built[0])

        return work

    def _done(self, task: _Task, told: Told, run: Kernel, schema: pa.Schema) -> ShardRecord:
        shard, counts, rows_in = task.shard, Counter[str](), 0
        with table_file(self.generation.folder / f"{shard}{self.ext}", schema, self.group_rows) as writer:
            for batch in self.read(shard, *task.given):
                table, rows, batch_counts = run(batch)
                writer.write(table)
                rows_in += rows
                counts.update(batch_counts)
                told(rows_in)
        return self.generation.complete(
            shard,
            self.ext,
            rows=writer.rows,
            rows_in=rows_in,
            counts=counts,
            source=self.source(shard),
            origin=task.origin,
        )


@contextmanager
def _at(shard: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"{AT_SHARD}{shard}")
        raise


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
