"""Whole files or nothing."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.shards import writer
from dagster_datamask.shards.writer import atomic, count_rows, file_sha256, remove_temps, table_file, write_json

SCHEMA = pa.schema([("k", pa.int64())])
EXTENSIONS = pytest.mark.parametrize("ext", [".parquet", ".arrow"])


def numbers(start: int, stop: int) -> pa.Table:
    return pa.table({"k": range(start, stop)}, schema=SCHEMA)


@EXTENSIONS
def test_a_failure_leaves_nothing_and_keeps_what_was_there(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a{ext}"
    with pytest.raises(RuntimeError, match="kernel"), table_file(path, SCHEMA) as out:
        out.write(numbers(0, 3))
        raise RuntimeError("kernel")
    assert list(tmp_path.iterdir()) == []
    with table_file(path, SCHEMA) as out:
        out.write(numbers(0, 3))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="kernel"), table_file(path, SCHEMA):
        raise RuntimeError("kernel")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@EXTENSIONS
def test_a_file_whose_footer_tells_other_rows_is_not_put_in_place(
    tmp_path: Path, ext: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "count_rows", lambda path, suffix: count_rows(path, suffix) - 1)
    with (
        pytest.raises(OSError, match="3 rows were written but its footer tells 2"),
        table_file(tmp_path / f"a{ext}", SCHEMA) as out,
    ):
        out.write(numbers(0, 3))
    assert list(tmp_path.iterdir()) == []


@EXTENSIONS
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_rows_and_schema_come_back(tmp_path: Path, ext: str, rows: int) -> None:
    path = tmp_path / f"a{ext}"
    with table_file(path, SCHEMA, group_rows=2) as out:
        for k in range(rows):
            out.write(numbers(k, k + 1))
    assert out.rows == count_rows(path) == rows


def test_batch_sizes_do_not_show_in_parquet_bytes(tmp_path: Path) -> None:
    digests = set()
    for batch in (1, 3, 4, 100):
        path = tmp_path / f"{batch}.parquet"
        with table_file(path, SCHEMA, group_rows=4) as out:
            for start in range(0, 11, batch):
                out.write(numbers(start, min(11, start + batch)))
        digests.add(file_sha256(path))
        meta = pq.read_metadata(path)
        assert [meta.row_group(g).num_rows for g in range(meta.num_row_groups)] == [4, 4, 3]
    assert len(digests) == 1


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """As a worker that was thought lost and the one in its place, whose processes may have one number."""
    with atomic(tmp_path / "x") as first, atomic(tmp_path / "x") as second:
        first.write_text("equal")
        second.write_text("equal")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "equal"


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"v": 1})
    with atomic(path) as temp:
        temp.write_text("half")
        assert json.loads(path.read_text()) == {"v": 1}
    assert path.read_text() == "half"


def test_json_is_sorted_and_refuses_what_json_has_no_word_for(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": 2})
    write_json(tmp_path / "b.json", {"a": 2, "b": 1})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "c.json", float("nan"))
    assert not list(tmp_path.glob(".*"))


def test_temps_of_killed_writers_are_removed_wherever_they_lie_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "splits").mkdir()
    stale = [tmp_path / ".a.parquet.7.tmp", tmp_path / ".dclm.bin.7.tmp.bin", tmp_path / "splits" / ".0.json.7.tmp"]
    kept = [tmp_path / "a.parquet", tmp_path / ".lease", tmp_path / "splits" / "0.json", tmp_path / "x.tmp"]
    for path in (*stale, *kept):
        path.touch()
    remove_temps(tmp_path)
    assert not any(path.exists() for path in stale)
    assert all(path.exists() for path in kept)


def test_folders_that_killed_writers_left_are_removed_with_all_that_is_in_them(tmp_path: Path) -> None:
    half = tmp_path / "training" / ".step-00000020.7.tmp"
    (half / "tokenizer").mkdir(parents=True)
    for inside in (half / "model.safetensors", half / "tokenizer" / "a.json", half / ".b.json.7.tmp"):
        inside.touch()
    whole = tmp_path / "training" / "step-00000010"
    whole.mkdir()
    (whole / "model.safetensors").touch()
    remove_temps(tmp_path)
    assert [path.name for path in (tmp_path / "training").iterdir()] == ["step-00000010"]
    assert (whole / "model.safetensors").exists()
