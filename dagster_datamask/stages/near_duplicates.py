"""near_duplicates: SemDeDup (arXiv 2303.09540) over a snapshot, cluster by cluster, on disk.

Here: the candidates gathered by cluster from all shards, and which of them a kept one stands for at clean.epsilon. Not
here: the comparison within clusters (`selection.semdedup`), SemDeDup at a budget (`baselines`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from dagster_datamask.selection.semdedup import nearest_earlier, representatives
from dagster_datamask.selection.vectors import as_single
from dagster_datamask.shards import shuffle
from dagster_datamask.shards.engine import map_shards
from dagster_datamask.shards.generations import total_counts
from dagster_datamask.shards.order import tie_hash
from dagster_datamask.shards.schemas import NEAR_DUPLICATES
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.base import STAGES, Outcome, Run, fingerprints, finish
from dagster_datamask.stages.candidates import Candidates
from dagster_datamask.stages.embeddings import vectors_of

# where a row belongs once what is found of it goes back into its shard's order
PLACE = pa.schema([("shard", pa.int32()), ("ordinal", pa.int64())])
_RESULT = pa.schema([*PLACE, *NEAR_DUPLICATES])
# documents of a gathered file, unless there would be more files than a process may have open
_GATHERED = 65_536
_MOST_FILES = 256
# of a vector: float16 as stored, the mapped copy in the order of the ids, float32 to compare
_BYTES_A_NUMBER = 2 + 2 + 4


class Clusters:
    """A snapshot's candidates by cluster: files of whole clusters, of which one is in memory at a time.

    Within a file documents stand in the order of their ids' hash, so that how they were sharded leaves no trace.
    """

    def __init__(self, run: Run, pool: Candidates, folder: Path) -> None:
        self.pool = pool
        self.sizes = self._count()
        edges = _edges(self.sizes)
        largest = max((int(self.sizes[a:b].sum()) for a, b in pairwise(edges)), default=0)
        run.accelerator.plan(
            f"comparing {largest:,} documents with those of their clusters",
            largest * pool.dimension * _BYTES_A_NUMBER,
            "raise cluster.k",
        )
        self._schema = pa.schema([*PLACE, *pool.schema, ("cluster", pa.int32()), ("closeness", pa.float64())])
        self._paths = [folder / f"clusters_{k:05d}.arrow" for k in range(len(edges) - 1)]
        self._scatter(np.array(edges))

    @property
    def documents(self) -> int:
        return int(self.sizes.sum())

    def __len__(self) -> int:
        """Files."""
        return len(self._paths)

    def table(self, number: int) -> pa.Table:
        """A file's documents, by the hash of their ids."""
        with pa.memory_map(str(self._paths[number])) as file:
            found = pa.ipc.open_file(file).read_all()
            return found.take(pa.array(np.argsort(tie_hash(found["doc_id"].to_pylist()), kind="stable")))

    def _count(self) -> np.ndarray:
        """int64[k]: candidates of each cluster."""
        sizes = np.zeros(0, np.int64)
        for shard in self.pool.shards:
            for table in self.pool.clustered(shard):
                counts = np.bincount(table["cluster"].to_numpy(), minlength=sizes.size)
                counts[: sizes.size] += sizes
                sizes = counts
        return sizes

    def _scatter(self, edges: np.ndarray) -> None:
        with ExitStack() as stack:
            writers = [stack.enter_context(table_file(path, self._schema)) for path in self._paths]
            for number, shard in enumerate(self.pool.shards):
                ordinal = 0
                for table in self.pool.clustered(shard):
                    rows = len(table)
                    columns = {"shard": np.full(rows, number, np.int32), "ordinal": np.arange(ordinal, ordinal + rows)}
                    columns |= {name: table[name] for name in self._schema.names[2:]}
                    placed = pa.table(columns, schema=self._schema)
                    where = np.searchsorted(edges[1:], table["cluster"].to_numpy(), side="right")
                    for k in np.unique(where).tolist():
                        writers[k].write(placed.filter(pa.array(where == k)))
                    ordinal += rows


def _edges(sizes: np.ndarray) -> list[int]:
    """Where files begin and end, in clusters: as few documents as may be, but never part of a cluster."""
    most = max(_GATHERED, -(-int(sizes.sum()) // _MOST_FILES))
    edges, held = [0], 0
    for cluster, size in enumerate(sizes.tolist()):
        if held and held + size > most:
            edges.append(cluster)
            held = 0
        held += size
    return [*edges, sizes.size] if sizes.size else edges


def unit(table: pa.Table) -> np.ndarray:
    """float32[n, d]: ẑ of the documents of a table."""
    z = as_single(vectors_of(table))
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def compared(table: pa.Table, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float64[n] each document's largest cosine to an earlier one of its cluster, int64[n] its position; −1 for none).

    Farthest from the centroid first, ties by the hash of the ids, in whose order the table is.
    """
    return nearest_earlier(z, table["cluster"].to_numpy(), table["closeness"].to_numpy(), "hard")


def instead(ids: pa.ChunkedArray, kept: np.ndarray, similarity: np.ndarray) -> dict[str, pa.Array]:
    """`kept_id` and `similarity`, of what `selection.semdedup.representatives` found."""
    none = kept < 0
    return {
        "kept_id": ids.combine_chunks().take(pa.array(kept, mask=none)),
        "similarity": pa.array(similarity, mask=none),
    }


def in_place(path: Path, table: pa.Table) -> None:
    """Write results of some clusters, sorted for `shuffle.Gather`."""
    with table_file(path, table.schema) as writer:
        writer.write(table.sort_by([(name, "ascending") for name in PLACE.names]))


def near_duplicates(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish `doc_id, kept_id, similarity, cluster` of every surviving document with a vector.

    kept_id is null for a document that stays: one whose cosine to no earlier document of its cluster exceeds 1 − ε,
    the farthest from the centroid coming first. A document that goes names the kept one that its nearest earlier
    document leads to, and their cosine; the first of a cluster always stays, so no group of near-duplicates is lost.
    """
    stage = STAGES["near_duplicates"]
    inputs = run.inputs(stage, snapshot)
    epsilon = run.settings.clean.epsilon
    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:
        select = run.settings.select.model_copy(update={"quota": "none", "budget": "0"})
        pool = Candidates(snapshot, inputs, select, source, generation.work)

        @cache
        def found() -> shuffle.Gather:
            clusters = Clusters(run, pool, generation.work)
            paths = []
            for number in range(len(clusters)):
                table = clusters.table(number)
                z = unit(table)
                largest, earlier = compared(table, z)
                kept, similarity = representatives(z, earlier, np.flatnonzero(largest <= 1 - epsilon))
                columns = {name: table[name] for name in ("shard", "ordinal", "doc_id", "cluster")}
                columns |= instead(table["doc_id"], kept, similarity)
                paths.append(generation.work / f"found_{number:05d}.parquet")
                in_place(paths[-1], pa.table({name: columns[name] for name in _RESULT.names}, schema=_RESULT))
                run.log(f"near_duplicates {snapshot}: {number + 1} of {len(clusters)} parts, {len(table):,} documents")
            return shuffle.Gather(paths)

        numbers = {shard: number for number, shard in enumerate(pool.shards)}

        def read(shard: str) -> Iterator[pa.Table]:
            return found().shard(numbers[shard], NEAR_DUPLICATES.names)

        def kernel(table: pa.Table) -> tuple[pa.Table, int, dict[str, int]]:
            gone = len(table) - table["kept_id"].null_count
            return table, len(table), {"kept": len(table) - gone, "near_duplicate": gone}

        documents = sum(len(table) for shard in pool.shards for table in pool.counted(shard))
        # in this process: what was found lies in this machine's scratch, and is only to be put in order
        records = map_shards(
            generation,
            pool.shards,
            read,
            lambda: kernel,
            NEAR_DUPLICATES,
            ext=".parquet",
            total_rows=documents,
            progress=run.progress(stage, snapshot),
        )
        counts = Counter(total_counts(records))
        facts = {"epsilon": epsilon, "kept": counts["kept"], "near_duplicates": counts["near_duplicate"]}
        return finish(generation, records, ".parquet", facts=facts, expected_rows=documents)
