"""Row groups through a local layout and through the real hub client against a port where nothing listens."""

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.demo.hub import SHARD, export_fineweb_sample
from dagster_datamask.demo.layout import FINEWEB_SCHEMA, MARKER, ExportError

SNAPSHOTS = ("CC-MAIN-2013-20", "CC-MAIN-2024-18")


def _rows(start: int, stop: int, snapshot: str) -> pa.Table:
    n = range(start, stop)
    return pa.table(
        {
            "text": [f"text {i}" for i in n],
            "id": [f"<urn:uuid:{i}>" for i in n],
            "dump": [snapshot for _ in n],
            "url": [f"https://a.example/{i}" for i in n],
            "date": ["2013-05-18T05:48:54Z" for _ in n],
            "file_path": ["s3://x" for _ in n],
            "language": ["en" for _ in n],
            "language_score": [0.9 for _ in n],
            "token_count": list(n),
        },
        schema=FINEWEB_SCHEMA,
    )


def _layout(root: str, rows: int = 10, group: int = 4, drop: str | None = None) -> str:
    filesystem, path = fsspec.core.url_to_fs(root)
    for snapshot in SNAPSHOTS:
        filesystem.makedirs(f"{path}/data/{snapshot}", exist_ok=True)
        table = _rows(0, rows, snapshot)
        # A further column passes the check and is left behind.
        table = table.append_column("minhash_cluster_size", pa.array([1] * rows, pa.int64()))
        if drop:
            table = table.drop_columns([drop])
        with filesystem.open(f"{path}/data/{snapshot}/{SHARD}", "wb") as file:
            pq.write_table(table, file, row_group_size=group)
    return root


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize(("row_groups", "rows"), [(1, 4), (2, 8), (3, 10)])
def test_takes_the_first_row_groups(tmp_path: Path, scheme: str, row_groups: int, rows: int) -> None:
    root = f"file://{tmp_path}/fineweb" if scheme == "file" else f"memory:///{tmp_path.name}"
    target = tmp_path / "out"
    summary = export_fineweb_sample(target, row_groups=row_groups, snapshots=SNAPSHOTS, source=_layout(root))
    assert summary.rows == dict.fromkeys(SNAPSHOTS, rows)
    assert summary.documents == 2 * rows
    assert summary.tokens == 2 * sum(range(rows))
    for snapshot in SNAPSHOTS:
        got = pq.read_table(target / "data" / snapshot / SHARD, partitioning=None)
        assert got.schema.names == FINEWEB_SCHEMA.names
        assert got.equals(_rows(0, rows, snapshot))


def test_an_export_already_there_needs_no_source(tmp_path: Path) -> None:
    root = _layout(f"file://{tmp_path}/fineweb")
    first = export_fineweb_sample(tmp_path / "out", row_groups=1, snapshots=SNAPSHOTS, source=root)
    for file in (tmp_path / "fineweb").rglob("*.parquet"):
        file.unlink()
    assert export_fineweb_sample(tmp_path / "out", row_groups=1, snapshots=SNAPSHOTS, source=root) == first


def test_reads_a_small_part_of_a_large_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _layout(f"file://{tmp_path}/fineweb", rows=200_000, group=1_000)
    size = (tmp_path / "fineweb" / "data" / SNAPSHOTS[0] / SHARD).stat().st_size
    from fsspec.implementations.local import LocalFileOpener

    read = 0
    original = LocalFileOpener.read

    def counting(self: LocalFileOpener, length: int = -1) -> bytes:
        nonlocal read
        data = original(self, length)
        read += len(data)
        return data

    monkeypatch.setattr(LocalFileOpener, "read", counting)
    export_fineweb_sample(tmp_path / "out", row_groups=1, snapshots=SNAPSHOTS[:1], source=root)
    assert 0 < read < size / 5


@pytest.mark.parametrize(
    ("layout", "row_groups", "message"),
    [
        ({}, 4, "3 row group"),
        ({"drop": "url"}, 1, "no column 'url'"),
        ({"rows": 0}, 2, "1 row group|0 row group"),
    ],
)
def test_what_cannot_be_taken_is_named(tmp_path: Path, layout: dict, row_groups: int, message: str) -> None:
    root = _layout(f"file://{tmp_path}/fineweb", **layout)
    with pytest.raises(ExportError, match=message) as caught:
        export_fineweb_sample(tmp_path / "out", row_groups=row_groups, snapshots=SNAPSHOTS, source=root)
    assert SHARD in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_no_shard_and_no_parquet_say_how_to_go_on(tmp_path: Path) -> None:
    for content in (None, b"not parquet"):
        if content:
            (tmp_path / "data" / SNAPSHOTS[0]).mkdir(parents=True)
            (tmp_path / "data" / SNAPSHOTS[0] / SHARD).write_bytes(content)
        with pytest.raises(ExportError, match=r"set source\.url") as caught:
            export_fineweb_sample(tmp_path / "out", snapshots=SNAPSHOTS, source=f"file://{tmp_path}")
        assert "\n" not in str(caught.value)


def test_row_groups_below_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        export_fineweb_sample(tmp_path / "out", row_groups=0)


def test_an_unreachable_hub_is_one_line_with_a_way_on(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from dagster_datamask.demo.hub import export_fineweb_sample\n"
        "from dagster_datamask.demo.layout import ExportError\n"
        "try: export_fineweb_sample(Path(sys.argv[1]))\n"
        "except ExportError as error: print(error)\n"
    )
    # The hub client reads its endpoint when it is imported, hence another process.
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stderr
    assert "CC-MAIN-2013-20/000_00000.parquet" in lines[0]
    assert "`make demo` without SOURCE=hf" in lines[0]
    assert not (tmp_path / "out" / MARKER).exists()
