"""Memory is that of a batch and of a split, whatever the number and size of shards."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 300_000
MOST_MB = 60


def write_source(folder: Path, shards: int) -> Path:
    """`ROWS` distinct documents in so many shards, the same documents whatever the number."""
    (folder / "S").mkdir(parents=True)
    size = ROWS // shards
    for k in range(shards):
        rows = range(k * size, (k + 1) * size)
        table = pa.table(
            {
                "text": [f"document {row} speaks of rivers, bridges and the light of {row % 97} moons" for row in rows],
                "id": [f"<urn:uuid:{row:032x}>" for row in rows],
            }
        )
        pq.write_table(table, folder / "S" / f"{k:03d}.parquet", row_group_size=10_000)
    return folder


@pytest.mark.slow
def test_one_large_shard_needs_no_more_than_six_small_ones(tmp_path: Path) -> None:
    told = []
    for shards in (1, 6):
        source = write_source(tmp_path / f"source_{shards}", shards)
        root = tmp_path / f"root_{shards}"
        run = subprocess.run(
            [sys.executable, "-m", "tests.stages.large", str(source), str(root), "S"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        told.append(run.stdout.split())
    (one, *same), (six, *as_this) = told
    assert abs(float(one) - float(six)) < MOST_MB, told
    # and the same documents, in the same number of splits
    assert same == as_this
    assert (int(same[0]), int(same[2])) == (ROWS // 10, 3)
