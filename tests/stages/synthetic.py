"""A snapshot published without models: what baselines and deduplication read, written from rows and a sharding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from dagster_datamask.settings import Settings, load_settings
from dagster_datamask.shards import schemas
from dagster_datamask.shards.generations import Published, Store
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.base import STAGES
from tests.project import Project

SNAPSHOT = "S"
DIMENSION = 4


@dataclass(frozen=True)
class Row:
    """A document: its scores (None: no score), and a vector with its cluster where it survives."""

    id: str
    quality: float | None = 1.0
    decision: str | None = None
    edu: float | None = 1.0
    dclm: float | None = 0.5
    wiki: float | None = 0.5
    ultra: float | None = 0.5
    tokens: int = 10
    vector: Sequence[float] = field(default=(1.0, 0.0, 0.0, 0.0))
    cluster: int = 0
    closeness: float = 0.5

    @property
    def scored(self) -> bool:
        return self.quality is not None and self.decision in (None, "pruned")

    @property
    def survives(self) -> bool:
        return self.quality is not None and self.decision is None


def project(root: Path, shards: Sequence[Sequence[Row]], **settings: object) -> Project:
    """A project under `root` with these shards published, up to their clusters."""
    found: Settings = load_settings("/dev/null", [f"storage.root={root / 'root'}"], env={})
    (root / "source").mkdir(parents=True, exist_ok=True)
    # nothing is pruned but what the rows say, so that any budget can be asked for
    own = Project(found.replace({"source.url": str(root / "source"), "prune.ratio": 0.0, **settings}))
    names = [f"{k:03d}" for k in range(len(shards))]
    rows = dict(zip(names, shards, strict=True))
    raw = {
        name: pa.table(
            {
                "doc_id": [r.id for r in of],
                "row": list(range(len(of))),
                "decision": [r.decision if r.decision in ("duplicate", "bad_row") else None for r in of],
                "reason": pa.nulls(len(of), pa.string()),
                "token_count": [r.tokens for r in of],
            },
            schema=schemas.RAW,
        )
        for name, of in rows.items()
    }
    _publish(own.store, "raw_shards", raw)
    for part in ("edu", "dclm", "wiki", "ultra"):
        scores = {
            name: pa.table(
                {
                    "doc_id": [r.id for r in of],
                    "score": [getattr(r, part) for r in of],
                    "reason": ["no_tokens" if getattr(r, part) is None else None for r in of],
                },
                schema=schemas.SCORES,
            )
            for name, of in rows.items()
        }
        _publish(own.store, f"{part}_scores", scores)
    every = [r for of in shards for r in of]
    pruned = {
        name: pa.table(
            {
                "doc_id": [r.id for r in of],
                "quality": [r.quality for r in of],
                "decision": [r.decision or (None if r.quality is not None else "unscored") for r in of],
                "stage": pa.nulls(len(of), pa.string()),
                "reason": pa.nulls(len(of), pa.string()),
            },
            schema=schemas.PRUNED,
        )
        for name, of in rows.items()
    }
    n = sum(r.scored for r in every)
    _publish(own.store, "pruned_documents", pruned, {"n": n, "threshold": "per_snapshot"})
    embedded = {name: [r for r in of if r.survives] for name, of in rows.items()}
    vectors = {
        name: pa.table(
            {
                "doc_id": [r.id for r in of],
                "embedding": pa.FixedSizeListArray.from_arrays(
                    pa.array(np.array([r.vector for r in of], np.float16).reshape(-1)), DIMENSION
                ),
                "reason": pa.nulls(len(of), pa.string()),
            },
            schema=schemas.embeddings(DIMENSION),
        )
        for name, of in embedded.items()
    }
    _publish(own.store, "e5_embeddings", vectors, {"dimension": DIMENSION}, ".arrow")
    clusters = {
        name: pa.table(
            {
                "doc_id": [r.id for r in of],
                "cluster": [r.cluster for r in of],
                "similarity": [r.closeness for r in of],
            },
            schema=schemas.CLUSTERS,
        )
        for name, of in embedded.items()
    }
    _publish(own.store, "kmeans_clusters", clusters)
    return own


def _publish(
    store: Store,
    asset: str,
    tables: Mapping[str, pa.Table],
    facts: Mapping[str, object] | None = None,
    ext: str = ".parquet",
) -> Published:
    version = STAGES[asset].version
    with store.generation(asset, SNAPSHOT, code_version=version, settings={}, inputs={}) as generation:
        records = []
        for name, table in tables.items():
            with table_file(generation.folder / f"{name}{ext}", table.schema) as writer:
                writer.write(table)
            rows = len(table)
            records.append(generation.complete(name, ext, rows=rows, rows_in=rows, counts={"there": rows}))
        return generation.publish(records, ext, facts or {})
