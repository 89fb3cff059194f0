"""new_embeddings, called as the daemon calls it: solve once all is embedded, then the masks, nothing twice."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask.definitions import build_definitions
from dagster_datamask.jobs import build_jobs
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.sensors.new_embeddings import build_new_embeddings
from tests.conftest import SNAPSHOTS
from tests.project import Project

FIRST, SECOND = SNAPSHOTS


class Daemon:
    """Ticks of the sensor against one instance."""

    def __init__(self, project: Project, instance: dg.DagsterInstance) -> None:
        self.project, self.instance = project, instance
        self.cursor: str | None = None
        self.asked: set[str] = set()

    def tick(self) -> list[tuple[str, str | None]] | str:
        """(job, snapshot) of the requests that become runs, or why the tick was skipped."""
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor)
        settings = self.project.settings
        result = build_new_embeddings(settings, build_jobs(settings))(
            context, storage=StorageResource.from_settings(settings)
        )
        if isinstance(result, dg.SkipReason):
            return result.skip_message or ""
        self.cursor = result.cursor or self.cursor
        new = [request for request in result.run_requests or [] if request.run_key not in self.asked]
        self.asked |= {request.run_key or "" for request in new}
        return [(request.job_name or "", request.partition_key) for request in new]


@pytest.fixture
def daemon(embedded: Project, tmp_path: Path) -> Iterator[Daemon]:
    shutil.copytree(embedded.store.root, tmp_path / "root")
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(cc_snapshot.name or "", list(SNAPSHOTS))
        yield Daemon(embedded.with_settings(**{"storage.root": str(tmp_path / "root")}), instance)


def started(daemon: Daemon, job: str, status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED) -> str:
    definition = build_definitions(daemon.project.settings).resolve_job_def(job)
    return daemon.instance.create_run_for_job(definition, status=status).run_id


def test_what_is_embedded_is_solved_and_then_selected_once(daemon: Daemon) -> None:
    assert daemon.tick() == [("solve_corpus", None)]
    # asked for already: a run that failed is not repeated for ever
    assert daemon.tick() == []
    daemon.project.stage("corpus_selection_state", "")
    assert daemon.tick() == [("select", FIRST), ("select", SECOND)]
    assert daemon.tick() == "2 snapshots without the state's masks, each asked for already"
    for snapshot in SNAPSHOTS:
        daemon.project.stage("datamask_masks", snapshot)
    assert daemon.tick() == "0 snapshots without the state's masks, each asked for already"


def test_a_later_snapshot_is_solved_and_selected_alone(daemon: Daemon) -> None:
    pointer = daemon.project.store.folder("e5_embeddings", SECOND) / "current.json"
    hidden = pointer.rename(pointer.with_name("hidden.json"))
    daemon.project.stage("corpus_selection_state", "")
    daemon.project.stage("datamask_masks", FIRST)
    assert daemon.tick() == "0 snapshots without the state's masks, each asked for already"
    hidden.rename(pointer)
    assert daemon.tick() == [("solve_corpus", None)]
    daemon.project.stage("corpus_selection_state", "")
    assert daemon.tick() == [("select", SECOND)]


def test_other_settings_solve_and_select_anew(daemon: Daemon) -> None:
    daemon.project.stage("corpus_selection_state", "")
    for snapshot in SNAPSHOTS:
        daemon.project.stage("datamask_masks", snapshot)
    daemon.project = daemon.project.with_settings(**{"select.lambda": 0.3})
    assert daemon.tick() == [("solve_corpus", None)]
    daemon.project.stage("corpus_selection_state", "")
    assert daemon.tick() == [("select", FIRST), ("select", SECOND)]


@pytest.mark.parametrize("job", ["fit_global", "solve_corpus"])
def test_runs_under_way_are_waited_for(daemon: Daemon, job: str) -> None:
    run_id = started(daemon, job)
    assert daemon.tick() == f"waiting for {job} (run {run_id})"


def test_a_run_that_failed_is_not_waited_for(daemon: Daemon) -> None:
    started(daemon, "solve_corpus", dg.DagsterRunStatus.FAILURE)
    assert daemon.tick() == [("solve_corpus", None)]


def test_snapshots_that_are_no_partitions_are_not_asked_for(daemon: Daemon) -> None:
    daemon.project.stage("corpus_selection_state", "")
    daemon.instance.delete_dynamic_partition(cc_snapshot.name or "", SECOND)
    assert daemon.tick() == [("select", FIRST)]


def test_an_unusable_root_is_a_reason(daemon: Daemon) -> None:
    daemon.project.settings = daemon.project.settings.replace({"storage.root": "hf://datasets/a/b"})
    assert "the hub takes commits" in daemon.tick()
