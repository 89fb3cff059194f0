"""The benchmark of places at toy size: the same bytes everywhere, a row for each place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks import compute
from dagster_datamask.compute.base import INLINE
from dagster_datamask.compute.local import Processes


@contextmanager
def without_ray() -> Iterator[tuple[dict[str, compute.Started], dict[str, float]]]:
    with Processes(compute.WORKERS, 1) as processes:
        yield {"this process": compute.Started(INLINE, []), "processes": compute.Started(processes, [])}, {}


@pytest.mark.parametrize(
    ("prepare", "work"), [(compute.write_documents, compute.scored), (compute.write_vectors, compute.assigned)]
)
def test_places_are_compared_on_the_same_bytes(monkeypatch: pytest.MonkeyPatch, prepare: object, work: object) -> None:
    monkeypatch.setattr(compute, "_places", without_ray)
    local, ray = compute._compared("work", prepare, work, 8 * compute.SHARDS)  # type: ignore[arg-type]
    assert local.ours is not None and local.other is not None
    assert [len(seconds) for seconds in local.facts["seconds"].values()] == [3, 3]
    assert ray.other == "Ray is not installed"


def test_all_documents_are_scored(tmp_path: Path) -> None:
    compute.write_documents(tmp_path, 5 * compute.SHARDS)
    compute.scored(tmp_path, INLINE)
    files = sorted(tmp_path.rglob("root/**/*.parquet"))
    assert len(files) == compute.SHARDS
    tables = [pq.read_table(file) for file in files]
    assert [table["doc_id"].to_pylist() for table in tables] == [
        [f"{shard}/{k}" for k in range(5)] for shard in range(compute.SHARDS)
    ]
    assert all(0 <= score <= 1.001 for table in tables for score in table["score"].to_pylist())
