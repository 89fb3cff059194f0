"""e5_embeddings and kmeans_clusters: a unit vector for every surviving document, and its nearest frozen centroid."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from dagster_datamask.reporting.figures import cluster_sizes_figure
from dagster_datamask.scoring.batching import ahead
from dagster_datamask.scoring.encoders import Encoder, Prepared
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.selection.vectors import nearest
from dagster_datamask.shards import schemas
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.engine import Counts
from dagster_datamask.shards.source import Source
from dagster_datamask.stages.base import STAGES, Outcome, Run, fingerprints, finish
from dagster_datamask.stages.calibration import encoder_facts, read_centroids, selection_encoder
from dagster_datamask.stages.classifiers import precision

EMBEDDING_ROWS = 8192
# how the records count documents without a vector: this, and why
BAD_EMBEDDING = "bad_embedding"


def e5_embeddings(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish `doc_id, embedding, reason` (Arrow, float16, unit norm) of the documents that pruning left.

    A text that gives no finite, non-zero vector has a null embedding and a reason. With embed.documents = all every
    row with a text that is no duplicate is embedded. A batch is read and tokenised while the one before is encoded.
    """
    stage = STAGES["e5_embeddings"]
    inputs = run.inputs(stage, snapshot)
    raw, pruned = inputs["raw_shards"], inputs["pruned_documents"]
    reader = DocumentReader(source, raw)
    spec = selection_encoder(run.settings)
    everything = run.settings.embed.documents == "all"

    encoder = _LazyEncoder(run, spec.identity)

    def prepared(shard: str) -> Iterator[tuple[pa.Array, Prepared, int]]:
        cursor = Cursor(pruned.path(shard), ["doc_id", "decision"], EMBEDDING_ROWS)
        for batch in reader.batches(shard, ["text"]):
            decisions = cursor.take_all(batch.ids)["decision"]
            wanted = decisions.is_null()
            if everything:
                wanted = pa.compute.invert(pa.compute.is_in(decisions, value_set=pa.array(["bad_row", "duplicate"])))
            texts, _ = decode_column(batch.rows["text"].filter(wanted))
            yield batch.ids.filter(wanted.combine_chunks()), encoder().prepare(texts), len(batch.ids)
        cursor.end()

    keys = {**fingerprints(inputs), "encoder": spec.identity, "precision": precision(run.accelerator)}
    with run.generation(stage, snapshot, keys) as generation:
        records = run.map_shards(
            stage,
            generation,
            raw.shards,
            lambda shard: ahead(prepared(shard)),
            lambda: _Embed(encoder()),
            lambda: schemas.embeddings(spec.dimension),
            ext=".arrow",
            total_rows=raw.rows,
            origin=lambda shard: run.origin(
                stage,
                keys["encoder"],
                keys["precision"],
                *reader.identity(shard),
                # with all rows embedded, what pruning decided does not matter
                "" if everything else pruned.record(shard).sha256,
            ),
        )
        outcome = finish(
            generation,
            records,
            ".arrow",
            facts={
                "documents": sum(record.rows for record in records),
                "dimension": spec.dimension,
                "bytes": sum(record.bytes for record in records),
                "encoder": encoder_facts(spec),
            },
            expected_rows=raw.rows,
        )
    # what this process's device did is told, but is no part of what is published
    done = encoder.made.work() if encoder.made is not None else {}
    return replace(outcome, facts={**outcome.facts, **done})


@dataclass
class _LazyEncoder:
    """The encoder, looked up and made where documents are embedded, once one is to be."""

    run: Run
    identity: str
    made: Encoder | None = None

    def __call__(self) -> Encoder:
        if self.made is None:
            spec = selection_encoder(self.run.settings)
            if spec.identity != self.identity:
                raise ModelUnavailable(
                    f"models.encoder: {self.run.settings.models.encoder} is {spec.identity} on this machine and "
                    f"{self.identity} where the run began"
                )
            self.made = Encoder(spec, self.run.accelerator, self.run.settings.embed.batch_tokens)
        return self.made


class _Embed:
    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._dimension = encoder.spec.dimension

    def __call__(self, batch: tuple[pa.Array, Prepared, int]) -> tuple[pa.Table, int, Counts]:
        ids, prepared, rows = batch
        encoded = self._encoder.encode_prepared(prepared)
        missing = np.array([reason is not None for reason in encoded.reasons], dtype=bool)
        vectors = pa.FixedSizeListArray.from_arrays(
            pa.array(encoded.vectors.ravel()), self._dimension, mask=pa.array(missing)
        )
        table = pa.table(
            {"doc_id": ids, "embedding": vectors, "reason": encoded.reasons}, schema=schemas.embeddings(self._dimension)
        )
        counts = Counter(f"{BAD_EMBEDDING}:{reason}" if reason else "embedded" for reason in encoded.reasons)
        counts["not_wanted"] = rows - len(ids)
        return table, rows, counts


def vectors_of(table: pa.Table) -> np.ndarray:
    """float16[n, d] of a column without nulls: a view where it lies in one piece, as a batch of a file does."""
    column = table["embedding"]
    # combine_chunks copies even the one
    column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), column.type.list_size)


def kmeans_clusters(run: Run, snapshot: str) -> Outcome:
    """Publish `doc_id, cluster, similarity` (cosine to the centroid) of every document with a vector."""
    stage = STAGES["kmeans_clusters"]
    inputs = run.inputs(stage, snapshot)
    embedded, fitted = inputs["e5_embeddings"], inputs["kmeans_centroids"]

    def kernel_of() -> "_Assign":
        centroids = read_centroids(fitted)
        if centroids.shape[1] != embedded.facts["dimension"]:
            raise ValueError(
                f"kmeans_centroids are {centroids.shape[1]}-dimensional but e5_embeddings of {snapshot} are "
                f"{embedded.facts['dimension']}-dimensional; run the job fit_global with the same encoder"
            )
        return _Assign(centroids)

    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:
        records = run.map_shards(
            stage,
            generation,
            embedded.shards,
            lambda shard: read_batches(embedded.path(shard), None, EMBEDDING_ROWS),
            kernel_of,
            schemas.CLUSTERS,
            ext=".parquet",
            total_rows=embedded.rows,
        )
        sizes = np.zeros(fitted.facts["k"], dtype=np.int64)
        for shard in embedded.shards:
            for table in read_batches(generation.path(shard, ".parquet"), ["cluster"], EMBEDDING_ROWS):
                sizes += np.bincount(table["cluster"].to_numpy(), minlength=len(sizes))
        return finish(
            generation,
            records,
            ".parquet",
            facts={
                "clusters": len(sizes),
                "empty_clusters": int((sizes == 0).sum()),
                "largest_cluster": int(sizes.max(initial=0)),
            },
            expected_rows=embedded.rows,
            figures=lambda published: {"cluster sizes": cluster_sizes_figure(sizes.tolist())},
        )


class _Assign:
    def __init__(self, centroids: np.ndarray) -> None:
        self._centroids = centroids

    def __call__(self, batch: pa.Table) -> tuple[pa.Table, int, Counts]:
        # a filter copies the vectors, and most batches have them all
        good = batch.filter(batch["embedding"].is_valid()) if batch["embedding"].null_count else batch
        labels, cosines = nearest(vectors_of(good), self._centroids)
        table = pa.table(
            {"doc_id": good["doc_id"], "cluster": labels.astype(np.int32), "similarity": cosines.astype(np.float64)},
            schema=schemas.CLUSTERS,
        )
        return table, len(batch), {"assigned": len(good), "no_vector": len(batch) - len(good)}
