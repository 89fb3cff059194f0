"""deploy/dagster.yaml on a real PostgreSQL: what it says is what Dagster does, and runs do not lock each other out."""

import itertools
import os
import re
import shutil
import signal
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.instance.config import PoolGranularity
from dagster._core.run_coordinator import QueuedRunCoordinator

from dagster_datamask.definitions import build_definitions
from dagster_datamask.partitions import cc_snapshot
from tests.conftest import SNAPSHOTS
from tests.deploy.conftest import Postgres
from tests.e2e.conftest import REPO, dagster_dev
from tests.project import Project, settings_for, write_shard

INSTANCE = REPO / "deploy" / "dagster.yaml"
_SCORED = ("raw_shards", "dclm_scores", "wiki_scores")


def home_of(machine: Path) -> str:
    """$DAGSTER_HOME of a machine that has the file."""
    machine.mkdir()
    shutil.copyfile(INSTANCE, machine / "dagster.yaml")
    return str(machine)


def test_two_machines_have_one_history(
    postgres: Postgres, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in postgres.environment.items():
        monkeypatch.setenv(name, value)
    job = build_definitions(project.settings).resolve_job_def("score")
    with dg.DagsterInstance.from_config(home_of(tmp_path / "one")) as one:
        one.add_dynamic_partitions(cc_snapshot.name or "", list(SNAPSHOTS))
        assert job.execute_in_process(instance=one, partition_key=SNAPSHOTS[0]).success
    with dg.DagsterInstance.from_config(home_of(tmp_path / "two")) as two:
        assert sorted(two.get_dynamic_partitions(cc_snapshot.name or "")) == list(SNAPSHOTS)
        made = two.get_materialized_partitions(dg.AssetKey("edu_scores"))
        assert made == {SNAPSHOTS[0]}
        # edu_scores held the pool's one slot and gave it back
        pool = two.event_log_storage.get_concurrency_info("gpu")
        assert (pool.slot_count, pool.active_slot_count, pool.pending_step_count) == (1, 0, 0)
    assert postgres.ask("SELECT count(*) FROM runs") == 1
    assert not list(tmp_path.rglob("*.db")), "history on disk: SQLite was used"


def test_dagster_reads_the_file_as_it_is_meant(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in postgres.environment.items():
        monkeypatch.setenv(name, value)
    with dg.DagsterInstance.from_config(home_of(tmp_path / "home")) as instance:
        assert isinstance(instance.run_coordinator, QueuedRunCoordinator)
        limits = instance.get_concurrency_config()
        assert limits.run_queue_config is not None
        assert limits.run_queue_config.max_concurrent_runs == 8
        assert list(limits.run_queue_config.tag_concurrency_limits) == [
            {"key": "dagster/partition", "value": {"applyLimitPerUniqueValue": True}, "limit": 1}
        ]
        assert (limits.pool_config.default_pool_limit, limits.pool_config.pool_granularity) == (
            1,
            PoolGranularity.OP,
        )
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_start_timeout_seconds == 300
        assert instance.run_retries_enabled and instance.run_retries_max_retries == 2
        assert not instance.run_retries_retry_on_asset_or_op_failure
        assert not instance.telemetry_enabled


@pytest.mark.e2e
def test_a_backfill_runs_in_parallel_through_the_queue(
    postgres: Postgres, tmp_path: Path, fitted_root: Path, labels: Path
) -> None:
    """Snapshots at once, two runs of one snapshot never; a killed run's slot goes to the next."""
    snapshots = tuple(f"CC-MAIN-2025-{week:02d}" for week in range(5, 35, 10))
    source, root = tmp_path / "source", tmp_path / "root"
    for snapshot in snapshots:
        write_shard(source, snapshot, "000_00000", 40)
    shutil.copytree(fitted_root, root)
    settings = settings_for(source, root, labels)
    with dagster_dev(tmp_path, settings, INSTANCE, **postgres.environment) as server:
        server.add_partitions(*snapshots)
        backfill = server.backfill("in parallel", _SCORED, snapshots)
        again = server.launch(snapshots[0], *_SCORED)
        assert server.backfill_end(backfill) == "COMPLETED_SUCCESS"
        runs = server.runs(dagster__backfill=backfill)
        assert [run["status"] for run in runs] == ["SUCCESS"] * len(snapshots)
        # some two ran at one time, which is what SQLite's dagster.yaml keeps rare
        spans = sorted((run["startTime"], run["endTime"]) for run in runs)
        assert any(later < end for (_, end), (later, _) in itertools.pairwise(spans))
        for snapshot in snapshots:
            assert server.store.current("wiki_scores", snapshot).rows == 40
        assert server.run_end(again) == "SUCCESS"
        of_one = [run for run in runs if {"key": "dagster/partition", "value": snapshots[0]} in run["tags"]]
        (_, ended), (started, _) = sorted((run["startTime"], run["endTime"]) for run in (server.run(again), *of_one))
        assert ended <= started

        # long enough to be killed while it holds the pool
        killed_snapshot = "CC-MAIN-2025-40"
        write_shard(source, killed_snapshot, "000_00000", 2500)
        server.add_partitions(killed_snapshot)
        killed = server.launch(killed_snapshot, "raw_shards", "edu_scores", dagster__max_retries="0")
        claimed = "SELECT count(*) FROM concurrency_slots WHERE run_id = '{}' AND NOT deleted"
        server.wait_for("the pool's slot", lambda: postgres.ask(claimed.format(killed)))
        events = server.query(
            """query($run: ID!) { logsForRun(runId: $run) { ... on EventConnection { events {
              ... on MessageEvent { message } } } } }""",
            run=killed,
        )["logsForRun"]["events"]
        (pid,) = {match[1] for event in events if (match := re.search(r"pid: (\d+)", event.get("message", "")))}
        assert os.getsid(int(pid)) == server.pid
        os.kill(int(pid), signal.SIGKILL)
        assert server.run_end(killed) == "FAILURE"
        following = server.launch(snapshots[0], "edu_scores")
        assert server.run_end(following) == "SUCCESS"
        assert postgres.ask(claimed.format(killed)) == 0
        text = server.log.read_text().lower()
        assert "is locked" not in text and "operationalerror" not in text
    assert postgres.ask("SELECT count(*) FROM runs") == len(snapshots) + 3
    assert not list((tmp_path / "home").rglob("*.db")), "history on disk: SQLite was used"
