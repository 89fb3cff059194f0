"""Where results may go, and what a missing source says."""

from pathlib import Path

import pytest

from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.settings import SettingsError
from dagster_datamask.shards.source import SourceError


def test_a_root_behind_a_url_is_refused_with_the_reason() -> None:
    with pytest.raises(SettingsError, match=r"storage\.root = s3://bucket/x: results go to a folder"):
        StorageResource(source="x", root="s3://bucket/x").store()


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    assert StorageResource(root=f"file://{tmp_path}").store().root == tmp_path


def test_no_source_says_how_to_give_one() -> None:
    with pytest.raises(SourceError, match=r"no source is set: give --source, DATAMASK_SOURCE or \[source\] url"):
        StorageResource(root="x").documents()
