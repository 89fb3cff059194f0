"""Where results may go, and what a missing source says."""

import re
from pathlib import Path

import pytest

from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.shards.remote import RootUnusable
from dagster_datamask.shards.source import SourceError


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ("hf://datasets/org/name", "two runs could write one folder; it serves as source.url"),
        ("https://example.org/x", "nothing can be written there; give a folder or a bucket"),
        ("nosuchprotocol://x", "nosuchprotocol"),
    ],
)
def test_a_url_that_cannot_be_a_root_is_refused_with_the_reason(root: str, why: str) -> None:
    with pytest.raises(RootUnusable, match=re.escape(why)) as caught:
        StorageResource(source="x", root=root).store()
    assert str(caught.value).startswith(f"storage.root = {root}: ")
    assert "\n" not in str(caught.value)


def test_a_bucket_is_a_root_with_a_cache_of_this_machine(tmp_path: Path) -> None:
    store = StorageResource(root="memory://bucket/x/", cache=str(tmp_path)).store()
    assert (store.where, store.on_disk) == ("memory://bucket/x", False)
    assert store.root.is_relative_to(tmp_path)
    assert store != StorageResource(root="memory://bucket/y", cache=str(tmp_path)).store()


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    assert StorageResource(root=f"file://{tmp_path}").store().root == tmp_path


def test_no_source_says_how_to_give_one() -> None:
    with pytest.raises(SourceError, match=r"no source is set: give --source, DATAMASK_SOURCE or \[source\] url"):
        StorageResource(root="x").documents()
