"""chaos:// behaves as an object store does, and fails where it is told to."""

from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.chaos.filesystem import PROTOCOL, ChaosFileSystem, Fault, weather


@pytest.fixture
def store(tmp_path: Path) -> tuple[ChaosFileSystem, str]:
    fs, path = fsspec.core.url_to_fs(f"{PROTOCOL}://{tmp_path}/bucket")
    assert isinstance(fs, ChaosFileSystem)
    return fs, path


def test_objects_are_whole_and_created_once(store: tuple[ChaosFileSystem, str]) -> None:
    fs, at = store
    fs.pipe_file(f"{at}/a/b", b"0123456789")
    assert fs.cat_file(f"{at}/a/b", 2, -3) == b"23456"
    assert fs.info(f"{at}/a/b")["size"] == 10
    assert fs.find(at) == [f"{at}/a/b"]
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{at}/a/b", b"x", mode="create")
    with fs.open(f"{at}/c", "wb") as file:
        file.write(b"x" * 5000)
        assert not fs.exists(f"{at}/c")
    assert fs.cat_file(f"{at}/c") == b"x" * 5000
    fs.cp_file(f"{at}/c", f"{at}/d")
    fs.rm(f"{at}/c")
    assert fs.find(at) == [f"{at}/a/b", f"{at}/d"]


def test_a_table_is_read_range_by_range(store: tuple[ChaosFileSystem, str]) -> None:
    fs, at = store
    table = pa.table({"n": range(10_000)})
    with fs.open(f"{at}/t.parquet", "wb") as file:
        pq.write_table(table, file)
    before = weather.asked["read"]
    with fs.open(f"{at}/t.parquet") as file:
        assert pq.read_table(file) == table
    # the footer, and columns apart from it
    assert weather.asked["read"] >= before + 2


def test_what_is_rewritten_under_an_open_file_shows(store: tuple[ChaosFileSystem, str]) -> None:
    fs, at = store
    fs.pipe_file(f"{at}/a", b"0" * 5000)
    with fs.open(f"{at}/a") as file:
        assert file.read(2) == b"00"
        fs.pipe_file(f"{at}/a", b"1" * 5000)
        assert file.read(2) == b"11"


def test_a_fault_comes_at_its_call_and_goes(store: tuple[ChaosFileSystem, str]) -> None:
    fs, at = store
    fs.pipe_file(f"{at}/a", b"0123")
    fs.pipe_file(f"{at}/other", b"0123")
    fault = Fault("read", 2, lambda path, raw: raw[:1], times=2, inside="/a")
    with weather.with_fault(fault):
        assert fs.cat_file(f"{at}/other") == b"0123"
        assert [fs.cat_file(f"{at}/a") for _ in range(4)] == [b"0123", b"0", b"0", b"0123"]
    assert fault.fired == [f"{at}/a"] * 2
    assert fs.cat_file(f"{at}/a") == b"0123"


def test_a_lost_answer_is_of_an_object_that_is_there(store: tuple[ChaosFileSystem, str]) -> None:
    fs, at = store

    def lost(path: str, answer: object) -> None:
        raise TimeoutError(path)

    with weather.with_fault(Fault("written", 1, lost)), pytest.raises(TimeoutError):
        fs.pipe_file(f"{at}/a", b"0123")
    assert fs.cat_file(f"{at}/a") == b"0123"
