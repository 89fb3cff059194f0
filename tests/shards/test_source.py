"""Layouts, listings and unreadable shards."""

import io
import uuid
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dagster_datamask.shards.schemas import BadShard
from dagster_datamask.shards.source import Shard, Source, SourceError


def put(path: Path, table: pa.Table | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": ["a", "b"]}) if table is None else table, path, **options)
    return path


def only(source: Source, snapshot: str = "S") -> Shard:
    (shard,) = source.shards(snapshot)
    return shard


def read(table: pa.Table, tmp_path: Path, columns: list[str] | None = None) -> pa.Table:
    put(tmp_path / "S" / "a.parquet", table)
    source = Source(str(tmp_path))
    return pa.Table.from_batches(list(source.batches(only(source), columns, 1)))


@pytest.mark.parametrize("inside", ["data/", ""])
def test_both_layouts_and_what_is_passed_over(tmp_path: Path, inside: str) -> None:
    base = tmp_path / inside
    for name in ("CC-MAIN-2024-10/b", "CC-MAIN-2024-10/a", "CC-MAIN-2024-10/.hidden", "CC-MAIN-2024-10/_meta", "x.y/a"):
        put(base / f"{name}.parquet")
    put(base / "CC-MAIN-2024-10" / "deeper.parquet" / "a.parquet")
    (base / "CC-MAIN-2024-10" / "README.md").touch()
    for odd in (".git", "_tmp", "has space", "-dash", "dot."):
        (base / odd).mkdir()
    (base / "file.txt").touch()
    source = Source(str(tmp_path))
    assert source.snapshots() == ["CC-MAIN-2024-10", "x.y"]
    assert source.unusable() == ["-dash", "dot.", "has space"]
    assert [shard.name for shard in source.shards("CC-MAIN-2024-10")] == ["a", "b"]


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no source is set: give --source, DATAMASK_SOURCE or"):
        Source("")
    with pytest.raises(SourceError, match="does not exist; set"):
        Source(str(tmp_path / "absent")).snapshots()
    with pytest.raises(SourceError, match="no snapshot folders; expected data/<snapshot>"):
        Source(str(tmp_path)).snapshots()
    put(tmp_path / "S" / "a.parquet")
    (tmp_path / "empty").mkdir()
    source = Source(str(tmp_path))
    with pytest.raises(SourceError, match="has no snapshot 'T'; there are: S, empty"):
        source.shards("T")
    with pytest.raises(SourceError, match=r"snapshot 'empty' has no \.parquet shards"):
        source.shards("empty")
    with pytest.raises(SourceError, match="nosuchprotocol"):
        Source("nosuchprotocol://x")


def test_memory_and_disk_agree_on_content_and_footer(tmp_path: Path) -> None:
    path = put(tmp_path / "S" / "a.parquet")
    disk = Source(str(tmp_path))
    where = f"memory://{uuid.uuid4().hex}"
    with fsspec.open(f"{where}/S/a.parquet", "wb") as file:
        file.write(path.read_bytes())
    memory = Source(where)
    assert memory.snapshots() == disk.snapshots()
    assert memory.content(only(memory)) == disk.content(only(disk))
    assert memory.footer(only(memory)) == disk.footer(only(disk))


def test_a_replaced_shard_changes_listing_content_and_footer(tmp_path: Path) -> None:
    path = put(tmp_path / "S" / "a.parquet")
    source = Source(str(tmp_path))
    before = source.listing_fingerprint("S"), source.content(only(source)), source.footer(only(source))
    assert before == (source.listing_fingerprint("S"), source.content(only(source)), source.footer(only(source)))
    put(path, pa.table({"text": ["a", "b", "c"]}))
    after = source.listing_fingerprint("S"), source.content(only(source)), source.footer(only(source))
    assert all(x != y for x, y in zip(before, after, strict=True))
    landed = source.listing_fingerprint("S")
    put(tmp_path / "S" / "b.parquet")
    assert source.listing_fingerprint("S") != landed


@pytest.mark.parametrize(
    ("bytes_", "why"),
    [(b"", r"is empty \(0 bytes\)"), (b"not parquet at all", "is not readable parquet"), (None, "is not readable")],
)
def test_what_is_no_parquet_is_one_line_naming_the_file(tmp_path: Path, bytes_: bytes | None, why: str) -> None:
    path = put(tmp_path / "S" / "a.parquet")
    path.write_bytes(path.read_bytes()[:-20] if bytes_ is None else bytes_)
    source = Source(str(tmp_path))
    with pytest.raises(BadShard, match=why) as caught:
        source.footer(only(source))
    assert str(path) in str(caught.value)
    assert "on_bad_shard = 'quarantine'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_page_is_found_where_it_is_read(tmp_path: Path) -> None:
    path = put(tmp_path / "S" / "a.parquet", pa.table({"text": [f"{k} words" * 9 for k in range(4000)]}))
    raw = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    raw[start + 40 : start + 400] = bytes(360)
    path.write_bytes(raw)
    source = Source(str(tmp_path))
    assert source.footer(only(source))[0] == 4000
    with pytest.raises(BadShard, match=r"a\.parquet: cannot be decoded \(.+\)\. Replace or remove the file"):
        list(source.batches(only(source), ["text"], 1000))


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (pa.table({"body": ["x"], "id": ["1"]}), "has no column 'text'; its columns are: body, id"),
        (pa.table({"text": [1]}), "column 'text' is int64, not text"),
        (pa.table({"text": ["x"], "id": [1]}), "column 'id' is int64, not text"),
        (pa.table({"text": ["x"], "token_count": ["1"]}), "column 'token_count' is string, not an integer"),
        (pa.table([["x"], ["y"]], names=["text", "text"]), "has the column 'text' more than once"),
        (pa.table([["x"], ["y"], ["z"]], names=["text", "url", "url"]), "has the column 'url' more than once"),
    ],
)
def test_a_schema_that_does_not_fit_names_the_column(tmp_path: Path, table: pa.Table, why: str) -> None:
    put(tmp_path / "S" / "a.parquet", table)
    source = Source(str(tmp_path))
    with pytest.raises(BadShard, match=why):
        source.footer(only(source))


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_encodings_of_a_column_do_not_show(tmp_path: Path, kind: pa.DataType) -> None:
    table = read(pa.table({"text": pa.array(["a", None, "b"]).cast(kind), "n": [1, 2, 3]}), tmp_path)
    assert not pa.types.is_dictionary(table["text"].type)
    assert table["text"].cast(pa.large_binary()).to_pylist() == [b"a", None, b"b"]
    assert table["n"].to_pylist() == [1, 2, 3]


def test_columns_a_shard_lacks_are_left_out_and_rows_still_counted(tmp_path: Path) -> None:
    put(tmp_path / "S" / "a.parquet")
    source = Source(str(tmp_path))
    batches = list(source.batches(only(source), ["id"], 1))
    assert [len(batch) for batch in batches] == [1, 1]
    assert batches[0].schema.names == []


def test_some_row_groups_only(tmp_path: Path) -> None:
    put(tmp_path / "S" / "a.parquet", pa.table({"text": [str(k) for k in range(6)]}), row_group_size=2)
    source = Source(str(tmp_path))
    rows = [t for b in source.batches(only(source), ["text"], 10, [0, 2]) for t in b["text"].to_pylist()]
    assert rows == ["0", "1", "4", "5"]


def test_links_are_followed(tmp_path: Path) -> None:
    real = put(tmp_path / "elsewhere" / "blob.parquet")
    put(tmp_path / "source" / "S" / "a.parquet")
    (tmp_path / "source" / "S" / "b.parquet").symlink_to(real)
    (tmp_path / "source" / "T").symlink_to(tmp_path / "source" / "S", target_is_directory=True)
    source = Source(str(tmp_path / "source"))
    assert source.snapshots() == ["S", "T"]
    assert [(shard.name, shard.size) for shard in source.shards("T")] == [
        (name, real.stat().st_size) for name in ("a", "b")
    ]


def test_a_snapshot_without_shards_is_left_out_of_those_that_are_filled(tmp_path: Path) -> None:
    put(tmp_path / "S" / "a.parquet")
    (tmp_path / "T").mkdir()
    assert Source(str(tmp_path)).filled() == ["S"]
    (tmp_path / "S" / "a.parquet").unlink()
    with pytest.raises(SourceError, match=r"none of its snapshots has \.parquet shards"):
        Source(str(tmp_path)).filled()


def test_the_name_of_a_side_file_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "S" / "quarantined_shards.parquet")
    with pytest.raises(SourceError, match=r"quarantined_shards\.parquet': a shard cannot be called"):
        Source(str(tmp_path)).shards("S")


class _Hiccup(io.BytesIO):
    """A file whose connection breaks after its footer has been read."""

    def __init__(self, raw: bytes, error: OSError) -> None:
        super().__init__(raw)
        self.error = error
        self.broken = False

    def read(self, size: int | None = -1) -> bytes:
        if self.broken:
            raise self.error
        return super().read(size)


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), OSError(24, "too many files"), TimeoutError()])
def test_an_error_of_the_network_is_no_verdict_on_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    texts = [f"{k} " * 1000 for k in range(2000)]
    path = put(tmp_path / "S" / "a.parquet", pa.table({"text": texts}), compression=None, row_group_size=100)
    source = Source(str(tmp_path))
    shard = only(source)
    opened: list[_Hiccup] = []

    def connect(*args: object, **kwargs: object) -> _Hiccup:
        opened.append(_Hiccup(path.read_bytes(), error))
        opened[-1].broken = broken_at_once
        return opened[-1]

    monkeypatch.setattr(source.fs, "open", connect)
    broken_at_once = True
    with pytest.raises(type(error)):
        source.footer(shard)
    broken_at_once = False
    batches = source.batches(shard, None, 10)
    next(batches)
    opened[-1].broken = True
    with pytest.raises(type(error)):
        list(batches)


def test_a_change_that_leaves_all_sizes_shows_in_content_and_footer(tmp_path: Path) -> None:
    options = {"compression": None, "use_dictionary": False}
    path = put(tmp_path / "S" / "a.parquet", pa.table({"text": ["abc", "xyz"]}), **options)
    source = Source(str(tmp_path))
    before = source.footer(only(source)).digest, source.content(only(source))
    put(path, pa.table({"text": ["abd", "xyw"]}), **options)
    after = source.footer(only(source)).digest, source.content(only(source))
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_a_shard_that_a_listing_calls_empty_is_asked_for_before_it_is_judged(tmp_path: Path) -> None:
    put(tmp_path / "S" / "a.parquet")
    source = Source(str(tmp_path))
    listed = only(source)
    footer = source.footer(Shard(listed.name, listed.path, 0, listed.listed))
    assert (footer.rows, footer.size) == (2, listed.size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_more_than_two_gigabytes_of_text_lose_no_row(tmp_path: Path, kind: pa.DataType) -> None:
    """An array of texts holds two gigabytes, and 2,500 rows of these documents are more."""
    long, short, rows = "a" * (1 << 20), "b", 2600
    parts = [pa.array([short], kind)] * 400 + [pa.array([long], kind)] * (rows - 400)
    table = pa.table({"id": [str(k) for k in range(rows)], "text": pa.chunked_array(parts)})
    put(tmp_path / "S" / "a.parquet", table, row_group_size=rows, use_dictionary=False, write_statistics=False)
    source = Source(str(tmp_path))
    ids, length = [], 0
    for batch in source.batches(only(source), None, 2500):
        ids += batch["id"].to_pylist()
        length += pc.sum(pc.binary_length(batch["text"])).as_py()
    assert ids == [str(k) for k in range(rows)]
    assert length == 400 + (rows - 400) * (1 << 20) > 1 << 31
