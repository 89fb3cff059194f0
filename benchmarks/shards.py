"""What the shard engine costs over its floor: the same bytes read, or read and written, by pyarrow or polars alone.

`python -m benchmarks.shards [--rows N] [--out FILE]`. Documents are synthetic, in FineWeb's columns. Each row of the
table is a stage, the least that any implementation has to do, and how many times that the stage takes, in one run.
Memory is the growth of the process's peak over a stage, at two sizes of snapshot: flat means equal.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.settings import load_settings
from dagster_datamask.shards import shuffle
from dagster_datamask.shards.engine import map_shards
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.schemas import SCORES
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import ingest, quality, scores
from dagster_datamask.stages.base import STAGES, Run, finish

SNAPSHOT = "CC-MAIN-2024-10"
SHARDS = 4
CHARACTERS = 2000


def write_source(folder: Path, rows: int) -> None:
    """`rows` documents of about 2,000 characters in four shards, row groups of 1,000."""
    words = np.array(["".join(chr(97 + (k * p) % 26) for p in (3, 5, 7, 11, 13)) for k in range(4096)])
    for shard in range(SHARDS):
        path = folder / "data" / SNAPSHOT / f"{shard:03d}_00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = keyed.rng(0, "benchmark", shard)
        writer = None
        for start in range(0, rows // SHARDS, 1000):
            texts = [" ".join(words[rng.integers(0, 4096, CHARACTERS // 6)]) for _ in range(1000)]
            table = pa.table(
                {
                    "text": texts,
                    "id": [f"<urn:uuid:{shard}-{start + k}>" for k in range(1000)],
                    "token_count": rng.integers(50, 2000, 1000),
                }
            )
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=1000)
        if writer is not None:
            writer.close()


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read_and_hash(source: Source) -> None:
    for shard in source.shards(SNAPSHOT):
        for _ in pq.ParquetFile(shard.path).iter_batches(batch_size=1024, columns=["id", "text", "token_count"]):
            pass
        with Path(shard.path).open("rb") as file:
            hasher = blake2b(digest_size=16)
            while block := file.read(1 << 22):
                hasher.update(block)


def publish_scores(run: Run, part: str) -> None:
    """Random scores in place of a scorer's: the engine without a model."""
    raw = run.store.current("raw_shards", SNAPSHOT)
    stage = STAGES[f"{part}_scores"]
    with run.generation(stage, SNAPSHOT, {"raw_shards": raw.fingerprint}) as generation:

        def kernel(batch: pa.Table) -> tuple[pa.Table, int, dict[str, int]]:
            values = keyed.hash64(batch["doc_id"].to_pylist(), 0, part) / 2.0**64
            table = pa.table({"doc_id": batch["doc_id"], "score": values, "reason": pa.nulls(len(batch), pa.string())})
            return table.cast(SCORES), len(batch), {"scored": len(batch)}

        records = map_shards(
            generation,
            raw.shards,
            lambda shard: scores.read_batches(raw.path(shard), ["doc_id"], scores.SIDE_ROWS),
            lambda: kernel,
            SCORES,
            ext=".parquet",
            total_rows=raw.rows,
            progress=lambda done, total, shard: None,
        )
        finish(generation, records, ".parquet", facts={}, expected_rows=raw.rows)


def join_with_polars(run: Run, out: Path) -> None:
    parts = []
    for part in ("dclm", "edu", "wiki"):
        published = run.store.current(f"{part}_scores", SNAPSHOT)
        parts.append(pl.scan_parquet(published.folder / "*.parquet").select("doc_id", pl.col("score").alias(part)))
    joined = parts[0].join(parts[1], on="doc_id").join(parts[2], on="doc_id")
    joined.with_columns(quality=pl.sum_horizontal("dclm", "edu", "wiki")).collect().write_parquet(out)


def shuffle_rows(folder: Path, rows: int) -> tuple[float, float]:
    """(seconds of the floor: the rows written once; of plan and scatter into 8 splits)."""
    schema = pa.schema([("doc_id", pa.string()), ("embedding", pa.list_(pa.float16(), 768))])
    block = keyed.rng(0, "benchmark").random((4096, 768), dtype=np.float32).astype(np.float16)

    def batches() -> Any:
        for start in range(0, rows, 4096):
            count = min(4096, rows - start)
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(block[:count].ravel()), 768)
            yield pa.table({"doc_id": [f"d{start + k}" for k in range(count)], "embedding": vectors}, schema=schema)

    def copy() -> None:
        with shuffle.table_file(folder / "copy.arrow", schema) as writer:
            for table in batches():
                writer.write(table)

    def scatter() -> None:
        splits = shuffle.plan((t["doc_id"].to_pylist() for t in batches()), rows // 8 + 1000, 0)
        shuffle.scatter(folder, schema, splits, batches)

    return timed(copy), timed(scatter)


def measure(rows: int, folder: Path) -> list[dict[str, Any]]:
    write_source(folder / "source", rows)
    source = Source(str(folder / "source"))
    settings = load_settings(None, [f"source.url={folder / 'source'}", f"storage.root={folder / 'root'}"], env={})
    run = Run(Store(folder / "root"), settings, settings, Accelerator(), lambda message: None)
    size = sum(shard.size for shard in source.shards(SNAPSHOT))
    results = []

    def compare(stage: str, floor: str, floor_seconds: float, seconds: float) -> None:
        results.append(
            {
                "stage": stage,
                "floor": floor,
                "floor_seconds": floor_seconds,
                "seconds": seconds,
                "ratio": seconds / floor_seconds,
                "rows_per_second": rows / seconds,
            }
        )

    read_and_hash(source)
    floor = timed(lambda: read_and_hash(source))
    compare("raw_shards", "decode the columns and hash the bytes", floor, timed(lambda: _raw(run, source)))
    compare("raw_shards, done before", "the same", floor, timed(lambda: _raw(run, source)))
    for part in ("dclm", "edu", "wiki"):
        publish_scores(run, part)
    floor = timed(lambda: join_with_polars(run, folder / "joined.parquet"))
    compare(
        "quality_scores",
        "polars: three files joined in memory, one written",
        floor,
        timed(lambda: quality.quality_scores(run, SNAPSHOT)),
    )
    compare("pruned_documents", "the same", floor, timed(lambda: quality.pruned_documents(run, SNAPSHOT)))
    copy, scattered = shuffle_rows(folder, rows)
    compare("shuffle into 8 splits, 768-d", "the rows written once", copy, scattered)
    for row in results:
        row |= {"rows": rows, "source_bytes": size}
    return results


def _raw(run: Run, source: Source) -> None:
    ingest.raw_shards(run, source, SNAPSHOT)


def peak_of(rows: int) -> float:
    """Peak memory in MB of a fresh process that runs the stages on `rows` documents."""
    code = (
        "import sys, tempfile; from pathlib import Path; from benchmarks.shards import measure\n"
        "from dagster_datamask.shards.engine import peak_memory_mb\n"
        "with tempfile.TemporaryDirectory() as folder: measure(int(sys.argv[1]), Path(folder))\n"
        "print(peak_memory_mb())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(rows)], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="documents in the snapshot (a multiple of 4,000)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments.rows, Path(folder))
    table = Table(title=f"{arguments.rows:,} documents, {rows[0]['source_bytes'] / 1e6:,.0f} MB in {SHARDS} shards")
    for name in ("stage", "floor", "times the floor", "rows/s"):
        table.add_column(name, justify="right" if name in ("times the floor", "rows/s") else "left")
    for row in rows:
        table.add_row(row["stage"], row["floor"], f"{row['ratio']:.1f}", f"{row['rows_per_second']:,.0f}")
    console.print(table)
    small, large = peak_of(arguments.rows // 4 // 4000 * 4000 or 4000), peak_of(arguments.rows)
    console.print(f"peak memory: {small:,.0f} MB at a quarter of the rows, {large:,.0f} MB at all of them")
    load = os.getloadavg()[0]
    console.print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} (a loaded machine shows worse ratios)")
    if arguments.out is not None:
        memory = {"quarter_mb": small, "all_mb": large}
        figures = {"python": sys.version.split()[0], "load": load, "rows": rows, "peak_memory": memory}
        arguments.out.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
