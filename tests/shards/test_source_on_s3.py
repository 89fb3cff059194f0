"""Sources on a real S3 server: what is asked of it, how many bytes are read, and what becomes of its errors."""

from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from dagster_datamask.failures import is_transient, told
from dagster_datamask.shards.schemas import BadShard, ShardReplaced
from dagster_datamask.shards.source import Source, SourceError, SourceUnreachable
from tests.project import Project, settings_for, write_shard
from tests.s3 import S3Server


@pytest.fixture
def wide(s3: S3Server, tmp_path: Path) -> Source:
    """One shard of 3 MB in six row groups, 1 % of it ids."""
    rows = range(3000)
    table = pa.table({"text": [f"{k} words " * 110 for k in rows], "id": [str(k) for k in rows], "n": list(rows)})
    path = tmp_path / "wide" / "data" / "S" / "a.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(table, path, row_group_size=500, compression=None, use_dictionary=False)
    source = Source(s3.upload(tmp_path / "wide"))
    s3.reset()
    return source


def test_fifty_shards_are_listed_once_and_named_as_on_disk(s3: S3Server, tmp_path: Path) -> None:
    for k in range(50):
        write_shard(tmp_path, "S", f"{k:03}", 2)
    disk, store = Source(str(tmp_path)), Source(s3.upload(tmp_path))
    s3.reset()
    for _ in range(3):
        assert store.snapshots() == store.filled() == ["S"]
        assert [(s.name, s.size) for s in store.shards("S")] == [(s.name, s.size) for s in disk.shards("S")]
        assert {store.content(s, as_listed=True) for s in store.shards("S")}.__len__() == 50
        assert not store.hashes_content()
    # the root, data/ and the snapshot
    assert s3.requests == {"LIST": 3}
    assert disk.hashes_content()


def test_reading_fifty_shards_asks_for_no_more_listings(s3: S3Server, tmp_path: Path, labels: Path) -> None:
    for k in range(50):
        write_shard(tmp_path / "source", "S", f"{k:03}", 2)
    url = s3.upload(tmp_path / "source")
    project = Project(settings_for(Path("x"), tmp_path / "root", labels, f"source.url={url}"))
    s3.reset()
    project.stage("raw_shards", "S")
    # the root and the snapshot
    assert s3.requests["LIST"] == 2
    # footer, ids and rows are read of each, and once more it is asked whether it is still the same
    assert s3.requests["HEAD"] <= 4 * 50
    project.source = Source(url)
    s3.reset()
    project.stage("text_duplicates", "S")
    assert s3.requests["LIST"] == 2
    assert s3.requests["HEAD"] <= 2 * 50


def test_of_few_columns_few_bytes_are_read_and_of_all_in_few_requests(s3: S3Server, wide: Source) -> None:
    (shard,) = wide.shards("S")
    s3.reset()
    wide.footer(shard)
    assert s3.sent <= 1 << 16
    s3.reset()
    ids = [i for batch in wide.batches(shard, ["id"], 1000) for i in batch["id"].to_pylist()]
    assert ids == [str(k) for k in range(3000)]
    assert s3.sent < 0.05 * shard.size
    s3.reset()
    assert [i for batch in wide.batches(shard, ["id"], 1000, [4]) for i in batch["id"].to_pylist()] == ids[2000:2500]
    assert s3.sent < (1 << 16) + 0.01 * shard.size
    s3.reset()
    assert sum(len(batch) for batch in wide.batches(shard, None, 1000)) == 3000
    assert s3.sent < 1.05 * shard.size
    # the footer, and the rest at once
    assert s3.requests["GET"] == 2


def test_what_is_read_is_what_a_folder_gives(s3: S3Server, tmp_path: Path, labels: Path) -> None:
    write_shard(tmp_path / "source", "S", "a", 30)
    write_shard(tmp_path / "source", "S", "b", 7, ids=[None, "x", "x", *"efgh"])
    url = s3.upload(tmp_path / "source", "deep/down")
    one = Project(settings_for(tmp_path / "source", tmp_path / "one", labels))
    two = Project(settings_for(Path("x"), tmp_path / "two", labels, f"source.url={url}"))
    found = [p.stage("raw_shards", "S").published for p in (one, two)]
    for name in ("a", "b"):
        assert found[0].path(name).read_bytes() == found[1].path(name).read_bytes()


def test_an_upload_in_parts_and_a_change_of_one_byte_show(s3: S3Server, wide: Source) -> None:
    (shard,) = wide.shards("S")
    before, client = wide.content(shard), s3.client
    assert wide.content(shard, as_listed=True) == before
    body = client.cat_file(shard.path)
    large = body + bytes(6 << 20)
    with client.open(shard.path, "wb", block_size=5 << 20) as file:
        file.write(large)
    assert "-" in client.info(shard.path)["ETag"]
    parts = wide.content(shard)
    assert parts != before
    # what was listed is what was listed, until the snapshot is listed again
    assert wide.content(wide.shards("S")[0], as_listed=True) == before
    wide.listing_fingerprint("S")
    assert wide.content(wide.shards("S")[0], as_listed=True) == parts == wide.content(shard)
    listed = wide.listing_fingerprint("S")
    client.pipe_file(shard.path, body[:-1] + b"?")
    assert wide.content(shard) not in (before, parts)
    assert wide.listing_fingerprint("S") != listed


def test_a_shard_replaced_in_mid_read_is_noticed(s3: S3Server, tmp_path: Path, labels: Path) -> None:
    path = write_shard(tmp_path / "source", "S", "a", 60)
    url = s3.upload(tmp_path / "source")
    other = write_shard(tmp_path / "other", "S", "a", 60, texts=["other words"] * 60).read_bytes()
    project = Project(settings_for(Path("x"), tmp_path / "root", labels, f"source.url={url}"))
    replaced, client = count(), s3.client

    def replace(kind: str, key: str) -> None:
        # between the footer and the rows
        if kind == "GET" and next(replaced) == 1:
            client.pipe_file(f"bucket/data/S/{path.name}", other)

    s3.fault = replace
    with pytest.raises(ShardReplaced) as caught:
        project.stage("raw_shards", "S")
    assert is_transient(caught.value)
    assert project.stage("raw_shards", "S").published.rows == 60


def test_a_documents_reader_does_not_take_new_text_for_old(s3: S3Server, tmp_path: Path, labels: Path) -> None:
    write_shard(tmp_path / "source", "S", "a", 6)
    url = s3.upload(tmp_path / "source")
    project = Project(settings_for(Path("x"), tmp_path / "root", labels, f"source.url={url}"))
    project.stage("raw_shards", "S")
    write_shard(tmp_path / "source", "S", "a", 6, texts=["other words"] * 6)
    s3.upload(tmp_path / "source")
    # the listing of this source is the old one, and so it is only noticed behind the read
    for source in (project.source, Source(url)):
        project.source = source
        with pytest.raises(Exception, match=r"a\.parquet was rewritten since raw_shards read it"):
            project.stage("text_duplicates", "S")
    s3.client.rm("bucket/data/S/a.parquet")
    write_shard(tmp_path / "second", "S", "b", 6)
    s3.upload(tmp_path / "second")
    project.source = Source(url)
    with pytest.raises(Exception, match="shard a of S is gone since raw_shards read it"):
        project.stage("text_duplicates", "S")


@pytest.mark.parametrize("status", [500, 503])
def test_a_store_that_is_busy_for_a_moment_is_waited_for(s3: S3Server, wide: Source, status: int) -> None:
    (shard,) = wide.shards("S")
    asked = count()
    s3.fault = lambda kind, path: status if next(asked) in (1, 3) else None
    assert sum(len(batch) for batch in wide.batches(shard, ["id"], 1000)) == 3000
    assert next(asked) > 5


def test_a_store_that_stays_busy_is_no_verdict_on_a_shard(s3: S3Server, wide: Source, monkeypatch) -> None:
    (shard,) = wide.shards("S")
    monkeypatch.setattr("s3fs.core.asyncio.sleep", _at_once)
    monkeypatch.setattr(type(wide.fs), "retries", 2)
    s3.fault = lambda kind, path: 503 if kind == "GET" else None
    with pytest.raises(OSError, match="SlowDown") as caught:
        wide.footer(shard)
    assert not isinstance(caught.value, BadShard)
    assert is_transient(caught.value)
    s3.fault = lambda kind, path: 503
    with pytest.raises(
        SourceUnreachable, match=r"source s3://bucket cannot be listed: .*SlowDown.*; is it reachable"
    ) as at:
        Source(wide.url).snapshots()
    assert is_transient(at.value)


async def _at_once(seconds: float) -> None:
    pass


def test_what_another_try_cannot_mend_says_so(s3: S3Server, wide: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.fault = lambda kind, path: 403
    with pytest.raises(SourceUnreachable, match="may the credentials of the environment read it") as caught:
        Source(wide.url).snapshots()
    assert not is_transient(caught.value)
    s3.reset()
    with pytest.raises(SourceError, match="source s3://nosuchbucket does not exist"):
        Source("s3://nosuchbucket").snapshots()
    # no host there listens
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(type(wide.fs), "_cache", {})
    monkeypatch.setattr(type(wide.fs), "retries", 1)
    with pytest.raises(SourceUnreachable, match="cannot be listed") as down:
        Source(wide.url).snapshots()
    assert is_transient(down.value)
    assert "\n" not in told(down.value)


def test_fewer_bytes_than_promised_are_an_error_of_the_network(wide: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = wide.shards("S")
    fetch = type(wide.fs.open(shard.path))._fetch_range
    calls = count()

    def short(file: object, start: int, end: int) -> bytes:
        found: bytes = fetch(file, start, end)
        return found if next(calls) < 1 else found[: len(found) // 2]

    monkeypatch.setattr(type(wide.fs.open(shard.path)), "_fetch_range", short)
    with pytest.raises(OSError, match=r"a\.parquet: \d+ of the bytes \d+ to \d+ came") as caught:
        list(wide.batches(shard, ["text"], 1000))
    assert is_transient(caught.value)


@pytest.mark.parametrize("name", ["a\tb", "a\\b", "x" * 151, "quarantined_shards", "\x7f"])
def test_a_key_that_cannot_be_a_file_s_name_is_refused_with_its_name(s3: S3Server, name: str) -> None:
    s3.client.pipe_file(f"bucket/data/S/{name}.parquet", b"PAR1")
    with pytest.raises(SourceError, match=r"a shard cannot be called .*; rename it") as caught:
        Source(s3.url).shards("S")
    assert caught.value.args[0].isprintable()


def test_keys_of_dots_and_slashes_lead_nowhere(s3: S3Server) -> None:
    for key in (
        "data/../../x.parquet",
        "data/S/../T/x.parquet",
        "data/S/..parquet",
        "data//x.parquet",
        "data/.. /y.parquet",
    ):
        s3.client.call_s3("put_object", Bucket="bucket", Key=key, Body=b"PAR1")
    s3.client.pipe_file("bucket/data/S/a.parquet", b"PAR1")
    source = Source(s3.url)
    assert source.snapshots() == ["S"]
    assert [shard.path for shard in source.shards("S")] == ["bucket/data/S/a.parquet"]


def test_a_folder_is_read_as_before(tmp_path: Path) -> None:
    write_shard(tmp_path, "S", "a", 3)
    source = Source(str(tmp_path))
    assert isinstance(source.fs, LocalFileSystem)
    assert source.revision is None
    assert source.at(None) is source
