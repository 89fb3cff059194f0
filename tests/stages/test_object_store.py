"""Source and root on a real S3 server: the whole spine in Dagster, a second machine, secrets that stay put."""

import shutil
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask import running
from dagster_datamask.shards.source import Source
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.sql import query
from tests.conftest import SNAPSHOTS
from tests.project import SNAPSHOT_STAGES, Project, settings_for
from tests.s3 import KEY, SECRET, S3Server
from tests.stages.conftest import tree

pytest_plugins = ("tests.s3",)

SNAPSHOT = SNAPSHOTS[0]
Finished = tuple[Project, dict[str, Outcome]]
# what a bucket needs to be told, and a disk knows by itself
_OWN = (".leases/", ".listing.json", ".lease")


def published(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: body for name, body in files.items() if not any(part in name for part in _OWN)}


def objects(s3: S3Server, folder: str) -> dict[str, bytes]:
    """{path below the folder: bytes} of every object."""
    client, prefix = s3.client, f"bucket/{folder}/"
    return {name.removeprefix(prefix): client.cat_file(name) for name in client.find(prefix)}


def test_a_root_in_a_bucket_holds_the_bytes_of_a_folder_and_another_machine_finds_all_done(
    s3: S3Server, finished: Finished, small_source: Path, labels: Path, tmp_path: Path
) -> None:
    there, outcomes = finished
    here = Project(settings_for(small_source, f"{s3.url}/root", labels, f"storage.cache={tmp_path / 'here'}"))
    here.fit_global()
    here.full(SNAPSHOT)
    one, two = published(tree(there.store.root)), published(objects(s3, "root"))
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []

    other = here.with_settings(**{"storage.cache": str(tmp_path / "there")})
    for name in SNAPSHOT_STAGES:
        s3.reset()
        again = other.stage(name, SNAPSHOT).published
        assert again is not None and again.facts == outcomes[name].published.facts
        # a lease, and nothing else
        assert s3.requests["PUT"] == 2, name
    assert published(objects(s3, "root")) == two

    shutil.rmtree(tmp_path / "there")
    s3.reset()
    counted = query(other.store, "SELECT decision, count(*) FROM manifest GROUP BY 1 ORDER BY 1").rows
    assert counted == query(there.store, "SELECT decision, count(*) FROM manifest GROUP BY 1 ORDER BY 1").rows
    assert not (tmp_path / "there").exists()


@pytest.mark.slow
def test_a_run_on_a_bucket_alone_tells_no_secret_and_makes_what_a_folder_gets(
    s3: S3Server, small_source: Path, labels: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(
        s3.upload(small_source, "source"), f"{s3.url}/root", labels, f"storage.cache={tmp_path / 'cache'}"
    )
    (tmp_path / "home").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        runs = running.materialise(settings, Source(settings.source.url), [SNAPSHOT], instance)
        events = [str(entry) for run in runs for entry in instance.all_logs(run.run_id)]
    assert [run.failure for run in runs] == [None, None]
    assert len(events) > 100
    here = objects(s3, "root")
    shown = [*here.values(), *tree(tmp_path / "home").values(), *tree(tmp_path / "cache").values()]
    shown += [text.encode() for text in (*events, *capfd.readouterr())]
    assert [text for text in shown if SECRET.encode() in text or KEY.encode() in text] == []

    local = Project(settings.replace({"storage.root": str(tmp_path / "root")}))
    local.fit_global()
    local.full(SNAPSHOT)
    one, two = published(tree(tmp_path / "root")), published(here)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
