"""Runs shared by the stage tests: made once a session, copied by whoever writes."""

import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.shards.generations import Published
from dagster_datamask.stages.base import Outcome
from tests.conftest import SNAPSHOTS
from tests.project import Project, settings_for, text_of

WILD = "WILD"


def copied(project: Project, root: Path) -> Project:
    """The same project on a copy of its root."""
    shutil.copytree(project.store.root, root)
    return project.with_settings(**{"storage.root": str(root)})


def rows_of(published: Published) -> pl.DataFrame:
    """All shards' rows in the order of the shards."""
    frames = [pl.read_parquet(published.path(shard)) for shard in published.shards]
    return pl.concat(frames) if frames else pl.DataFrame()


def tree(root: Path) -> dict[str, bytes]:
    """{path below root: bytes} of every file."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def failed(outcome: Outcome) -> dict[str, dict]:
    """{name: facts} of the checks that failed."""
    return {check.name: check.facts for check in outcome.checks if not check.passed}


def broken_page(path: Path, column: str) -> None:
    """Overwrite the middle of the first page of a column: the footer stays as it was."""
    meta = pq.read_metadata(path)
    index = meta.schema.to_arrow_schema().names.index(column)
    chunk = meta.row_group(0).column(index)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    raw = bytearray(path.read_bytes())
    raw[start + 30 : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size - 30)
    path.write_bytes(raw)


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, small_source: Path, fitted_root: Path, labels: Path
) -> tuple[Project, dict[str, Outcome]]:
    """The first snapshot of the small project, end to end. Read it, never write into it."""
    root = tmp_path_factory.mktemp("finished") / "root"
    shutil.copytree(fitted_root, root)
    project = Project(settings_for(small_source, root, labels))
    return project, project.full(SNAPSHOTS[0])


def _strings(values: list[bytes | None], kind: pa.DataType) -> pa.Array:
    """A string array of any bytes, as a foreign writer may leave them."""
    return pa.array(values, pa.binary()).view(pa.string()).cast(kind)


@pytest.fixture(scope="session")
def wild_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One snapshot with everything at once: ids, texts, types and columns as they come in the wild."""
    source = tmp_path_factory.mktemp("wild")
    folder = source / WILD
    folder.mkdir()
    (folder / ".hidden.parquet").write_bytes(b"not parquet")

    def put(shard: str, **columns: pa.Array | list) -> None:
        pq.write_table(pa.table(columns), folder / f"{shard}.parquet", row_group_size=5)

    texts = [text_of(f"wild/{k}") for k in range(40)]
    first = {
        "text": [texts[0], texts[1], None, "", " \n\t", "\u2003\u00a0\u2028", texts[2], texts[3], texts[4], texts[0]],
        "id": ["a0", None, "a2", "a3", "a4", "a5", "", "  ", "a8", "a0"],
        "token_count": pa.array([10, 11, None, 0, 0, 0, 12, 13, 14, 10], pa.int32()),
        "extra": pa.array(range(10), pa.int16()),
    }
    put("000", **first)
    put("001_no_id", text=texts[5:11])
    put(
        "002_dictionary",
        text=pa.array(texts[11:17]).dictionary_encode(),
        id=pa.array([f"b{k}" for k in range(6)], pa.large_string()).dictionary_encode(),
        url=pa.array(["u"] * 6).dictionary_encode(),
        token_count=[7] * 6,
    )
    put("003_copy", **first)
    put("004_copy", **first)
    put(
        "005_bytes",
        text=_strings(
            [b"caf\xff " + texts[17].encode(), texts[18].encode(), b"\xff\xfe " + texts[19].encode()], pa.string()
        ),
        id=_strings([b"\xff", b"\xfe", b"a8"], pa.string()),
        url=_strings([b"http://\xff", b"u", None], pa.string()),
    )
    put("006_empty", text=pa.array([], pa.string()), id=pa.array([], pa.string()), extra=pa.array([], pa.int64()))
    put("007_one", text=pa.array([texts[20]], pa.large_string()), id=["c0"], extra=pa.array([2**40]))
    put("008_two", text=pa.array(texts[21:23]).cast(pa.string_view()), id=["c1", "c2"], meta=[{"k": 1}, {"k": 2}])
    put("009_null_text", text=pa.nulls(2), id=["d0", "d1"])
    put("010_binary", text=pa.array([t.encode() for t in texts[23:26]], pa.binary()), id=["e0", "e1", "e2"])
    return source


@pytest.fixture(scope="session")
def wild(
    tmp_path_factory: pytest.TempPathFactory, wild_source: Path, fitted_root: Path, labels: Path
) -> tuple[Project, dict[str, Outcome]]:
    """The wild snapshot end to end with nothing pruned and everything kept that can be. Read it, never write."""
    root = tmp_path_factory.mktemp("wild") / "root"
    shutil.copytree(fitted_root, root)
    project = Project(settings_for(wild_source, root, labels, "prune.ratio=0.0", "select.budget=100%"))
    project.stage("quality_calibration", "")
    project.stage("kmeans_centroids", "")
    return project, project.full(WILD)
