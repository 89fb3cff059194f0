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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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
    apart: Callable[[], AbstractContextManager[Compute]] | None = None,
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
    scratch tells. With fewer rows than `inline_below`, be they done or not, or no other shard, shards are done here.

    A shard that is done here and ends this process ends the run. The next one on this machine knows it by the mark that
    is left, and, where `apart` opens a place for that, does such shards there first, so that Poisoned can tell of them.

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
    # not by what is left: the last one missing may be one that ends its reader
    if inline_below and (len(shards) == 1 or total_rows < inline_below):
        compute = INLINE
    reached = dict.fromkeys(missing, 0)

    def told(task: _Task, rows: int) -> None:
        # what is told late is in the record already
        if task.shard in reached:
            reached[task.shard] = rows
        progress(done + sum(reached.values()), total_rows, task.shard)

    with _at(missing[0]):
        gives = None if given is None else given()
    work = each_shard(
        _Worker(generation, read, kernel, schema, ext, source, group_rows),
        missing,
        generation.work,
        ext,
        items=lambda some: _Tasks(some, origins, gives),
        compute=compute,
        requests=requests,
        told=told,
        apart=apart,
    )
    try:
        # closed whatever happens here: a traceback would keep it, and its workers, at work
        with closing(work):
            for task, record in work:
                del reached[task.shard]
                records[task.shard] = record
                done += record.rows_in
                progress(done + sum(reached.values()), total_rows, task.shard)
    finally:
        # what lost workers left half-written; those of this call have ended
        if apart is not None or not isinstance(compute, Inline):
            remove_temps(generation.folder)
    return [records[shard] for shard in shards]


def each_shard(
    worker: Callable[[], Callable[[Any, Told], Any]],
    shards: Sequence[str],
    scratch: Path,
    ext: str,
    *,
    items: Callable[[Sequence[str]], Sequence[Any]] = lambda shards: shards,
    compute: Compute = INLINE,
    requests: Requests = ONE_CORE,
    told: Callable[[Any, int], None] = lambda item, rows: None,
    apart: Callable[[], AbstractContextManager[Compute]] | None = None,
) -> Generator[tuple[Any, Any]]:
    """Every shard's item with its result, as Compute.each has it; `items` makes those of some shards, told apart by
    their text, which is the shard's name.

    One that is done in this process leaves a mark in `scratch` while it is, by its name and `ext`, for the case that it
    ends this process. Shards with such a mark are done first, where `apart` opens a place for that. Raises Poisoned,
    naming shards, when all others are done.
    """
    marks = _Marks(scratch, ext)
    here = isinstance(compute, Inline) and apart is not None
    # an earlier run began it in its own process, and did not come to an end
    suspect = [shard for shard in shards if here and marks.of(shard).exists()]
    lost: dict[str, str] = {}

    def done(place: Compute, worker: Callable[[], Callable[[Any, Told], Any]], some: Sequence[str]) -> Iterator[Any]:
        try:
            yield from place.each(worker, items(some), requests=requests, told=told)
        except Poisoned as error:
            lost.update({str(item): why for item, why in error.why.items()})

    worker = partial(_named, worker)
    if suspect and apart is not None:
        # before this process holds a model of its own
        with apart() as place:
            for item, result in done(place, worker, suspect):
                marks.of(str(item)).unlink()
                yield item, result
    if rest := [shard for shard in shards if shard not in suspect]:
        yield from done(compute, partial(marks.kept, worker) if here else worker, rest)
    if lost:
        raise Poisoned(lost)


def _named(worker: Callable[[], Callable[[Any, Told], Any]]) -> Callable[[Any, Told], Any]:
    """The worker, of whose errors each has the name of its item's shard."""
    work = worker()

    def named(item: Any, told: Told) -> Any:
        with _at(str(item)):
            return work(item, told)

    return named


@dataclass(frozen=True)
class _Marks:
    """What stands in the scratch of this machine while this process is at a shard."""

    folder: Path
    ext: str

    def of(self, shard: str) -> Path:
        return self.folder / f".began-{shard}{self.ext}"

    def kept(self, worker: Callable[[], Callable[[Any, Told], Any]]) -> Callable[[Any, Told], Any]:
        """The worker, which does each item while its mark stands."""
        work: list[Callable[[Any, Told], Any]] = []

        def marked(item: Any, told: Told) -> Any:
            mark = self.of(str(item))
            mark.touch()
            try:
                if not work:
                    work.append(worker())
                return work[0](item, told)
            finally:
                mark.unlink(missing_ok=True)

        return marked


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
    """Marks what is raised within as of that shard; what names its shards itself stays as it is."""
    try:
        yield
    except Poisoned:
        raise
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
