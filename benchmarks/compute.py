"""The same shards worked on by this process, by processes of this machine and by Ray on it.

`python -m benchmarks.compute [--full] [--only NAME] [--out FILE]`. Two works: documents scored by fastText, and vectors
given their nearest centroid, each from file to file as the stages go. Every place does each work in turn, on two
workers of one thread, which are built before: what starting costs is told beside. The documents are synthetic.
"""

import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fasttext
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import synthetic_web as web
from benchmarks.measure import Row, absent, against, in_turn, run_subjects
from dagster_datamask import keyed
from dagster_datamask.compute.base import INLINE, ONE_CORE, Compute, Requests, Told, use_threads
from dagster_datamask.compute.local import Processes
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.selection.vectors import nearest
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.engine import BATCH_ROWS, map_shards
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.schemas import CLUSTERS, SCORES
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.embeddings import EMBEDDING_ROWS, vectors_of

SHARDS, WORKERS = 8, 2
_LABEL = "__label__hq"
_TOPICS_OF_A_LABEL = web.TOPICS // 2


@dataclass(frozen=True)
class Started:
    """A place whose workers are built, and have their libraries, before the clock starts.

    An item of None does a little of the work, and waits for the others.
    """

    place: Compute
    seconds: list[float]
    little: Callable[[], object] = lambda: None

    @property
    def workers(self) -> int:
        return self.place.workers

    def each(
        self,
        worker: Callable[[], Callable[[Any, Told], Any]],
        items: Sequence[Any],
        *,
        requests: Requests = ONE_CORE,
        told: Callable[[Any, int], None] = lambda item, rows: None,
    ) -> Iterator[tuple[Any, Any]]:
        with self.place.session(partial(_or_wait, worker, self.little), requests=requests) as session:
            workers: set[Any] = set()
            while len(workers) < WORKERS and self.place is not INLINE:
                workers.update(found for _, found in session.each([None] * WORKERS))
            started = time.perf_counter()
            yield from session.each(items)
            self.seconds.append(time.perf_counter() - started)


def _or_wait(
    worker: Callable[[], Callable[[Any, Told], Any]], little: Callable[[], object]
) -> Callable[[Any, Told], Any]:
    work, own = worker(), time.perf_counter_ns()

    def done(item: Any, told: Told) -> Any:
        if item is None:
            little()
            time.sleep(0.5)
            return own
        return work(item, told)

    return done


def write_documents(folder: Path, rows: int) -> None:
    """`rows` texts with ids in SHARDS parquet files, and a fastText model of a DCLM's shape, but smaller."""
    for shard in range(SHARDS):
        rng = keyed.rng(0, "compute/documents", shard)
        with pq.ParquetWriter(
            folder / f"{shard}.parquet", pa.schema([("id", pa.string()), ("text", pa.string())])
        ) as to:
            for first in range(0, rows // SHARDS, web.BLOCK):
                count = min(web.BLOCK, rows // SHARDS - first)
                lengths = rng.lognormal(7.6, 1.0, count).clip(1, 100_000)
                written = web.texts(rng, rng.integers(0, web.TOPICS, count), lengths)
                to.write_table(pa.table({"id": [f"{shard}/{first + k}" for k in range(count)], "text": written}))
    rng = keyed.rng(0, "compute/labels")
    topics = rng.integers(0, web.TOPICS, 1000)
    lines = [
        f"{_LABEL if topic < _TOPICS_OF_A_LABEL else '__label__cc'} {' '.join(text.split())}"
        for topic, text in zip(topics, web.texts(rng, topics, np.full(1000, 600)).to_pylist(), strict=True)
    ]
    (folder / "train.txt").write_text("\n".join(lines), "utf-8")
    model = fasttext.train_supervised(
        str(folder / "train.txt"), wordNgrams=2, epoch=1, dim=100, bucket=100_000, thread=1, verbose=0
    )
    model.save_model(str(folder / "model.bin"))


def write_vectors(folder: Path, rows: int) -> None:
    """`rows` vectors in SHARDS Arrow files, in the form of e5_embeddings, and centroids."""
    schema = pa.schema([("doc_id", pa.string()), ("embedding", pa.list_(pa.float16(), web.DIMENSION))])
    for shard in range(SHARDS):
        first = 0
        with table_file(folder / f"{shard}.arrow", schema) as writer:
            for z in web.vector_blocks(web.Place("S", str(shard), rows // SHARDS)):
                ids = [f"{shard}/{first + k}" for k in range(len(z))]
                vectors = pa.FixedSizeListArray.from_arrays(pa.array(z.ravel()), web.DIMENSION)
                writer.write(pa.table({"doc_id": ids, "embedding": vectors}, schema=schema))
                first += len(z)
    np.save(folder / "centroids.npy", np.tile(web.centroids(), (4, 1)))


def scored(folder: Path, place: Compute) -> str:
    """All documents scored anew; the SHA-256 of what was written."""

    def kernel() -> Callable[[pa.Table], tuple[pa.Table, int, Counter[str]]]:
        scorer = FastTextScorer(folder / "model.bin", _LABEL)

        def score(batch: pa.Table) -> tuple[pa.Table, int, Counter[str]]:
            found = scorer.score(batch["text"].to_pylist())
            columns = {
                "doc_id": batch["id"],
                "score": pa.array(found.scores, from_pandas=True),
                "reason": found.reasons,
            }
            return pa.table(columns, schema=SCORES), len(batch), Counter(reason or "scored" for reason in found.reasons)

        return score

    return _mapped(folder, place, kernel, ".parquet", BATCH_ROWS, SCORES)


def assigned(folder: Path, place: Compute) -> str:
    """All vectors given their nearest centroid anew; the SHA-256 of what was written."""

    def kernel() -> Callable[[pa.Table], tuple[pa.Table, int, dict[str, int]]]:
        centroids = np.load(folder / "centroids.npy")

        def assign(batch: pa.Table) -> tuple[pa.Table, int, dict[str, int]]:
            labels, cosines = nearest(vectors_of(batch), centroids)
            columns = {
                "doc_id": batch["doc_id"],
                "cluster": labels.astype(np.int32),
                "similarity": cosines.astype(float),
            }
            return pa.table(columns, schema=CLUSTERS), len(batch), {"assigned": len(batch)}

        return assign

    return _mapped(folder, place, kernel, ".arrow", EMBEDDING_ROWS, CLUSTERS)


def _one_assigned() -> None:
    # halves, as stored: what widens them is the library that takes longest to load
    one = np.ones((1, web.DIMENSION), np.float16)
    nearest(one, one.astype(np.float32))


def _mapped(folder: Path, place: Compute, kernel: Callable[[], Any], ext: str, rows: int, schema: pa.Schema) -> str:
    shards = [str(shard) for shard in range(SHARDS)]
    with Store(folder / "root").generation("work", "S", code_version="1", settings={}, inputs={}) as generation:
        for file in generation.folder.glob("*.parquet*"):
            file.unlink()
        records = map_shards(
            generation,
            shards,
            lambda shard: read_batches(folder / f"{shard}{ext}", None, rows),
            kernel,
            schema,
            ext=".parquet",
            total_rows=sum(1 for _ in shards),
            progress=lambda done, total, shard: None,
            compute=place,
        )
        return hashlib.sha256("".join(record.sha256 for record in records).encode()).hexdigest()


@contextmanager
def _places() -> Iterator[tuple[dict[str, Started], dict[str, float]]]:
    """This process, processes and, where it is installed, Ray; and the seconds to each one's first answer."""
    use_threads(1)
    places, starting = {"this process": Started(INLINE, [])}, {}
    with ExitStack() as stack:
        offered: dict[str, Compute] = {"processes": Processes(WORKERS, 1)}
        try:
            import ray  # noqa: F401
        except ImportError:
            pass
        else:
            from dagster_datamask.compute.cluster import RayCluster

            offered["Ray"] = RayCluster("", 1, processes=WORKERS)
        for name, place in offered.items():
            stack.callback(place.close)
            started = time.perf_counter()
            assert [found for _, found in place.each(lambda: lambda item, told: item, [1])] == [1]
            starting[name] = time.perf_counter() - started
            places[name] = Started(place, [])
        yield places, starting


def _compared(
    what: str,
    prepare: Callable[[Path, int], None],
    work: Callable[[Path, Compute], str],
    rows: int,
    little: Callable[[], object] = lambda: None,
) -> list[Row]:
    with tempfile.TemporaryDirectory() as name, _places() as (places, starting):
        folder = Path(name)
        prepare(folder, rows)
        places = {place: replace(started, little=little) for place, started in places.items()}
        done = in_turn(3, {place: partial(work, folder, started) for place, started in places.items()})
        assert len({digest for timed in done.values() for digest in timed.results}) == 1, "bytes differ by place"
    best = {place: min(started.seconds) for place, started in places.items()}
    facts = {"rows": rows, "seconds": {place: started.seconds for place, started in places.items()}, "start": starting}
    local = best["processes"]
    found = [
        against(f"{what}: {WORKERS} processes beside this one", local, best["this process"], unit="s", facts=facts),
        absent(f"{what}: Ray beside {WORKERS} processes", "Ray is not installed")
        if "Ray" not in best
        else against(
            f"{what}: Ray with {WORKERS} workers beside {WORKERS} processes", best["Ray"], local, most=1.15, unit="s"
        ),
    ]
    return [*found, *(Row(f"start of {place}", seconds, unit="s") for place, seconds in starting.items())]


SUBJECTS: dict[str, Callable[[bool], list[Row]]] = {
    "fasttext": lambda full: _compared("fastText", write_documents, scored, 200_000 if full else 48_000),
    "clusters": lambda full: _compared(
        "nearest centroid", write_vectors, assigned, 1_000_000 if full else 200_000, _one_assigned
    ),
}

if __name__ == "__main__":
    run_subjects("benchmarks.compute", __doc__, SUBJECTS)
