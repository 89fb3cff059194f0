"""Backfills that fail, are mended and are cancelled; runs that meet; a run that is killed: by GraphQL, one server."""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from dagster_datamask.settings import Settings
from tests.e2e.conftest import Server
from tests.project import Project, settings_for, write_shard

pytestmark = pytest.mark.e2e
# cheap to run, three deep
_ASSETS = ("raw_shards", "dclm_scores", "wiki_scores")


def published(settings: Settings, snapshot: str) -> dict[str, str | None]:
    """{asset: fingerprint of what is published}."""
    store = Project(settings).store
    found = {name: store.published(name, snapshot) for name in _ASSETS}
    return {name: generation and generation.fingerprint for name, generation in found.items()}


def clean_run(server: Server, folder: Path, fitted_root: Path, labels: Path, snapshots: list[str]) -> dict[str, Any]:
    """{snapshot: fingerprints} of runs in which nothing happened, on a root of their own."""
    root = folder / "clean"
    shutil.copytree(fitted_root, root)
    settings = settings_for(server.source, root, labels)
    for snapshot in snapshots:
        for name in _ASSETS:
            Project(settings).stage(name, snapshot)
    return {snapshot: published(settings, snapshot) for snapshot in snapshots}


def assets_of(run: dict[str, Any]) -> set[str]:
    return {key["path"][0] for key in run["assetSelection"] or ()}


def test_from_failure_runs_exactly_what_failed(server: Server) -> None:
    good, poisoned = "CC-MAIN-2025-01", "CC-MAIN-2025-02"
    for snapshot in (good, poisoned):
        write_shard(server.source, snapshot, "000_00000", 30)
    shard = server.source / "data" / poisoned / "000_00000.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:300])
    server.add_partitions(good, poisoned)
    backfill = server.backfill("one poisoned", _ASSETS, (good, poisoned))
    assert server.backfill_end(backfill) == "COMPLETED_FAILED"
    before = published(server.settings, good)
    assert None not in before.values() and set(published(server.settings, poisoned).values()) == {None}

    shard.write_bytes(whole)
    again = server.query(
        """mutation($params: ReexecutionParams) { reexecutePartitionBackfill(reexecutionParams: $params) {
          __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }""",
        params={"parentRunId": backfill, "strategy": "FROM_FAILURE"},
    )["reexecutePartitionBackfill"]
    assert again["__typename"] == "LaunchBackfillSuccess", again
    assert server.backfill_end(again["backfillId"]) == "COMPLETED_SUCCESS"
    (run,) = server.runs(dagster__backfill=again["backfillId"])
    assert {tag["key"]: tag["value"] for tag in run["tags"]}["dagster/partition"] == poisoned
    assert assets_of(run) == set(_ASSETS)
    assert None not in published(server.settings, poisoned).values()
    assert published(server.settings, good) == before


def test_a_cancelled_backfill_leaves_nothing_half_done(
    server: Server, tmp_path: Path, fitted_root: Path, labels: Path
) -> None:
    snapshots = [f"CC-MAIN-2025-1{k}" for k in range(4)]
    for snapshot in snapshots:
        write_shard(server.source, snapshot, "000_00000", 30)
    server.add_partitions(*snapshots)
    backfill = server.backfill("to be cancelled", _ASSETS, snapshots)

    def at_work() -> bool:
        return any(run["status"] == "STARTED" for run in server.runs(dagster__backfill=backfill))

    server.wait_for("a run of the backfill", at_work)
    server.query("""mutation($id: String!) { cancelPartitionBackfill(backfillId: $id) { __typename } }""", id=backfill)
    assert server.backfill_end(backfill) == "CANCELED"
    assert any(None in published(server.settings, snapshot).values() for snapshot in snapshots), "cancelled too late"
    # what is there is whole: the pointer's shards have their files
    for snapshot in snapshots:
        for name in _ASSETS:
            generation = server.store.published(name, snapshot)
            for shard in generation.shards if generation else ():
                assert generation.path(shard).stat().st_size == generation.record(shard).bytes
    again = server.backfill("after the cancelled one", _ASSETS, snapshots)
    assert server.backfill_end(again) == "COMPLETED_SUCCESS"
    clean = clean_run(server, tmp_path, fitted_root, labels, snapshots)
    assert {snapshot: published(server.settings, snapshot) for snapshot in snapshots} == clean
    assert not list(server.store.root.rglob(".*.tmp"))


def test_of_two_runs_on_one_snapshot_the_second_waits(server: Server) -> None:
    snapshot = "CC-MAIN-2025-20"
    write_shard(server.source, snapshot, "000_00000", 30)
    server.add_partitions(snapshot)
    first, second = server.launch(snapshot, *_ASSETS), server.launch(snapshot, *_ASSETS)
    assert [server.run_end(run) for run in (first, second)] == ["SUCCESS", "SUCCESS"]
    spans = sorted((run["startTime"], run["endTime"]) for run in map(server.run, (first, second)))
    assert spans[0][1] <= spans[1][0]
    for name in _ASSETS:
        # one generation, found done by the second
        assert len(list(server.store.folder(name, snapshot).glob("*/.lease"))) == 1


def test_a_killed_run_gives_its_slot_to_the_retry_of_what_it_did_not_finish(server: Server) -> None:
    """The process that holds the pool is killed hard, and Dagster is told not to start it anew: the sensor does."""
    snapshot = "CC-MAIN-2025-30"
    write_shard(server.source, snapshot, "000_00000", 2500)
    server.add_partitions(snapshot)
    killed = server.launch(snapshot, "raw_shards", "edu_scores", dagster__max_retries="0")

    def holders() -> list[str]:
        data = server.query('{ instance { concurrencyLimit(concurrencyKey: "gpu") { claimedSlots { runId } } } }')
        return [slot["runId"] for slot in data["instance"]["concurrencyLimit"]["claimedSlots"]]

    server.wait_for("the pool's slot", lambda: killed in holders())
    events = server.query(
        """query($run: ID!) { logsForRun(runId: $run) { ... on EventConnection { events {
          ... on MessageEvent { message } } } } }""",
        run=killed,
    )["logsForRun"]["events"]
    (pid,) = {match[1] for event in events if (match := re.search(r"pid: (\d+)", event.get("message", "")))}
    assert os.getsid(int(pid)) == server.pid
    os.kill(int(pid), signal.SIGKILL)
    assert server.run_end(killed) == "FAILURE"
    server.turn("retry_failed_snapshots", on=True)
    try:
        (retry,) = server.wait_for("the retry", lambda: server.runs(datamask__retry_of=killed))
        assert server.run_end(retry["runId"]) == "SUCCESS"
    finally:
        server.turn("retry_failed_snapshots", on=False)
    assert retry["jobName"] == "full" and assets_of(retry) == {"edu_scores"}
    assert killed not in holders()
    assert server.store.current("edu_scores", snapshot).rows == 2500
