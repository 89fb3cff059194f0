"""A process that takes a snapshot of many rows from raw_shards to its masks and tells its peak memory in MB.

`python -m tests.stages.large SOURCE ROOT SNAPSHOT`. Models have no part in it: scores and 32-dimensional vectors are
written through the engine, under the stages' own names and inputs.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from dagster_datamask.keyed import hash64
from dagster_datamask.shards import schemas
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.engine import map_shards, peak_memory_mb
from dagster_datamask.stages.base import STAGES, fingerprints, finish
from dagster_datamask.stages.embeddings import EMBEDDING_ROWS
from dagster_datamask.stages.scores import SIDE_ROWS
from tests.project import Project, settings_for

DIMENSION = 32


def write_scores(project: Project, snapshot: str, part: str) -> None:
    run, stage = project.run(), STAGES[f"{part}_scores"]
    raw = run.store.current("raw_shards", snapshot)

    def kernel(batch: pa.Table) -> tuple[pa.Table, int, dict[str, int]]:
        score = hash64(batch["doc_id"].to_pylist(), 0, part) / 2.0**64
        table = pa.table(
            {"doc_id": batch["doc_id"], "score": score, "reason": pa.nulls(len(batch), pa.string())},
            schema=schemas.SCORES,
        )
        return table, len(batch), {"scored": len(batch)}

    with run.generation(stage, snapshot, {"raw_shards": raw.fingerprint}) as generation:
        records = map_shards(
            generation,
            raw.shards,
            lambda shard: read_batches(raw.path(shard), ["doc_id"], SIDE_ROWS),
            lambda: kernel,
            schemas.SCORES,
            ext=".parquet",
            total_rows=raw.rows,
            progress=run.progress(stage, snapshot),
        )
        finish(generation, records, ".parquet", facts={}, expected_rows=raw.rows)


def write_vectors(project: Project, snapshot: str) -> None:
    run, stage = project.run(), STAGES["e5_embeddings"]
    inputs = run.inputs(stage, snapshot)
    pruned = inputs["pruned_documents"]

    def kernel(batch: pa.Table) -> tuple[pa.Table, int, dict[str, int]]:
        ids = batch.filter(batch["decision"].is_null())["doc_id"].to_pylist()
        words = [hash64(ids, k, "vector") for k in range(DIMENSION)]
        wide = np.stack(words, axis=1) / 2.0**63 - 1.0
        unit = (wide / np.linalg.norm(wide, axis=1, keepdims=True)).astype(np.float16)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(unit.ravel()), DIMENSION)
        table = pa.table(
            {"doc_id": ids, "embedding": vectors, "reason": pa.nulls(len(ids), pa.string())},
            schema=schemas.embeddings(DIMENSION),
        )
        return table, len(batch), {"embedded": len(ids), "not_wanted": len(batch) - len(ids)}

    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:
        records = map_shards(
            generation,
            pruned.shards,
            lambda shard: read_batches(pruned.path(shard), ["doc_id", "decision"], EMBEDDING_ROWS),
            lambda: kernel,
            schemas.embeddings(DIMENSION),
            ext=".arrow",
            total_rows=pruned.rows,
            progress=run.progress(stage, snapshot),
        )
        finish(generation, records, ".arrow", facts={"dimension": DIMENSION}, expected_rows=pruned.rows)


def main() -> None:
    source, root, snapshot = sys.argv[1:]
    project = Project(
        settings_for(
            Path(source),
            Path(root),
            Path(root),
            "select.scale=raw",
            "select.split=60000",
            "select.compare_steps=0",
            "select.solver=certified",
        )
    )
    project.stage("raw_shards", snapshot)
    for part in ("dclm", "edu", "wiki"):
        write_scores(project, snapshot, part)
    project.stage("quality_scores", snapshot)
    project.stage("pruned_documents", snapshot)
    write_vectors(project, snapshot)
    outcome = project.stage("datamask_masks", snapshot)
    masks = outcome.published
    assert masks is not None
    kept = []
    for shard in masks.shards:
        for table in read_batches(masks.path(shard), ["doc_id", "selected"], SIDE_ROWS):
            kept += table.filter(table["selected"])["doc_id"].to_pylist()
    kept.sort()
    print(peak_memory_mb(), len(kept), hash64(["\n".join(kept)], 0, "kept")[0], outcome.facts["splits"])


if __name__ == "__main__":
    main()
