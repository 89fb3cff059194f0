"""Sources on the hub, read by its real client from a server on loopback: one commit a run, and its errors."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import huggingface_hub
import pytest

from dagster_datamask.failures import is_transient, told
from dagster_datamask.shards.source import REVISION, Source, SourceError, SourceUnreachable
from tests.hub import NAME, Hub, served
from tests.project import Project, settings_for, write_shard


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with served(Hub()) as hub:
        # what HF_ENDPOINT sets when the client is imported
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        fsspec.get_filesystem_class("hf").clear_instance_cache()
        yield hub
        fsspec.get_filesystem_class("hf").clear_instance_cache()


def files(folder: Path, *shards: str, words: str | None = None) -> dict[str, bytes]:
    found = {"README.md": b"about"}
    for shard in shards:
        texts = None if words is None else [words] * 4
        found[f"data/S/{shard}.parquet"] = write_shard(folder, "S", shard, 4, texts=texts).read_bytes()
    return found


URL = f"hf://datasets/{NAME}"


def test_a_branch_is_resolved_once_and_all_is_read_from_its_commit(hub: Hub, tmp_path: Path) -> None:
    first = hub.commit(files(tmp_path, "a", "b"))
    source = Source(URL)
    assert source.revision == first
    hub.commit(files(tmp_path, "a", "c", words="moved"))
    assert [shard.name for shard in source.shards("S")] == ["a", "b"]
    before = source.listing_fingerprint("S")
    rows = [t for s in source.shards("S") for b in source.batches(s, ["text"], 10) for t in b["text"].to_pylist()]
    assert len(rows) == 8 and "moved" not in rows
    moved = Source(URL)
    assert [shard.name for shard in moved.shards("S")] == ["a", "c"]
    assert moved.listing_fingerprint("S") != before == source.listing_fingerprint("S")
    assert moved.content(moved.shards("S")[0]) != source.content(source.shards("S")[0])


def test_requests_do_not_grow_with_the_shards_but_for_reading_them(hub: Hub, tmp_path: Path) -> None:
    hub.commit(files(tmp_path, *(f"{k:02}" for k in range(30))))
    source = Source(URL)
    assert len(source.shards("S")) == 30
    assert {source.content(shard) for shard in source.shards("S")}
    assert not source.hashes_content()
    # the branch, and once more as the client asks whether the commit is there; the root, data/ and the snapshot
    assert hub.asked == {"revision": 2, "tree": 3}


@pytest.mark.parametrize("written", [f"{URL}@other", f"{URL}@{{sha}}", f"{URL}@refs%2Fconvert%2Fparquet"])
def test_a_revision_in_the_url_is_heeded(hub: Hub, tmp_path: Path, written: str) -> None:
    wanted = hub.commit(files(tmp_path, "a"), "other")
    hub.branches["refs/convert/parquet"] = wanted
    hub.commit(files(tmp_path, "z"))
    source = Source(written.format(sha=wanted))
    assert source.revision == wanted
    assert [shard.name for shard in source.shards("S")] == ["a"]
    assert source.at(wanted) is source


def test_what_raw_shards_read_is_what_later_stages_read(hub: Hub, tmp_path: Path, labels: Path) -> None:
    first = hub.commit(files(tmp_path / "one", "a", "b"))
    project = Project(settings_for(Path("x"), tmp_path / "root", labels, f"source.url={URL}"))
    raw = project.stage("raw_shards", "S").published
    assert raw.facts[REVISION] == first
    hub.commit(files(tmp_path / "two", "a", words="the branch has moved"))
    # as the next asset of the run opens it
    project.source = Source(URL)
    assert project.source.revision != first
    assert project.stage("text_duplicates", "S").published.rows == raw.rows == 8
    again = project.stage("raw_shards", "S").published
    assert (again.rows, again.facts[REVISION]) == (4, hub.branches["main"])
    assert again.fingerprint != raw.fingerprint


def test_a_commit_that_left_the_shards_alone_makes_nothing_anew(hub: Hub, tmp_path: Path, labels: Path) -> None:
    hub.commit(files(tmp_path, "a"))
    project = Project(settings_for(Path("x"), tmp_path / "root", labels, f"source.url={URL}"))
    raw = project.stage("raw_shards", "S").published
    second = hub.commit(files(tmp_path, "a") | {"README.md": b"about it, at length"})
    project.source = Source(URL)
    again = project.stage("raw_shards", "S").published
    assert again.fingerprint == raw.fingerprint
    assert again.facts[REVISION] == second


def test_what_the_hub_refuses_is_one_line_with_a_remedy(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit({"README.md": b"about"})
    for url, why in {
        "hf://datasets/org/absent": "the hub has no dataset 'org/absent', or not for you; .*HF_TOKEN",
        f"{URL}@nobranch": "'org/pages' has no revision 'nobranch'; correct it in source.url",
        "hf://datasets": r"write hf://datasets/<org>/<name>\[@<commit>\]",
    }.items():
        with pytest.raises(SourceError, match=why) as caught:
            Source(url)
        assert not is_transient(caught.value)
        assert "\n" not in told(caught.value)
    with pytest.raises(SourceError, match="no snapshot folders"):
        Source(URL).snapshots()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    with pytest.raises(SourceUnreachable, match=r"HF_HUB_OFFLINE is set.*; unset it, or name a folder") as offline:
        Source(URL)
    assert not is_transient(offline.value)


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_is_busy_or_away_is_worth_another_try(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    hub.commit(files(tmp_path, "a"))
    source = Source(URL)
    # the client itself waits for minutes
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.status = status
    with pytest.raises(SourceUnreachable, match=r"the hub does not tell its commit: .*; HF_TOKEN raises") as caught:
        Source(URL)
    assert is_transient(caught.value)
    with pytest.raises(SourceUnreachable, match="cannot be listed") as listing:
        source.shards("S")
    assert is_transient(listing.value)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    fsspec.get_filesystem_class("hf").clear_instance_cache()
    with pytest.raises(SourceUnreachable, match="the hub does not tell its commit") as away:
        Source(URL)
    assert is_transient(away.value)
