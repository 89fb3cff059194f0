"""retry_failed_snapshots against real failed runs: what is asked for, once, how often, and what is left alone."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask.assets import base
from dagster_datamask.definitions import build_definitions
from dagster_datamask.jobs import build_jobs, of_a_snapshot
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.sensors import retry_failed_snapshots as module
from dagster_datamask.sensors.retry_failed_snapshots import build_retry_failed_snapshots
from dagster_datamask.settings import Settings, load_settings
from dagster_datamask.stages import scores
from tests.project import settings_for, write_shard

FULL = of_a_snapshot(load_settings(os.devnull, env={}))
FOLLOWING = set(FULL) - {"raw_shards", "dclm_scores", "edu_scores"}
SNAPSHOT, OTHER = "CC-A", "CC-B"


class Clock:
    """Time as the sensor sees it: so many seconds after the last run ended, however long a tick takes."""

    ended = ahead = 0.0

    def time(self) -> float:
        return self.ended + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Daemon:
    """Runs and ticks as the daemon makes them: a run key becomes a run once."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance, clock: Clock) -> None:
        self.clock = clock
        self.definitions = build_definitions(settings)
        self.sensor = build_retry_failed_snapshots(settings, build_jobs(settings))
        self.instance = instance
        self.instance.add_dynamic_partitions(cc_snapshot.name or "", [SNAPSHOT, OTHER])
        self.run_keys: set[str | None] = set()

    def run(self, snapshot: str = SNAPSHOT, **launch: object) -> dg.DagsterRun:
        result = self.definitions.resolve_job_def("full").execute_in_process(
            instance=self.instance, partition_key=snapshot, raise_on_error=False, **launch
        )
        return result.dagster_run

    def tick(self) -> list[dg.RunRequest] | str:
        records = self.instance.get_run_records()
        self.clock.ended = max(record.end_time or record.update_timestamp.timestamp() for record in records)
        result = self.sensor(dg.build_sensor_context(instance=self.instance))
        if isinstance(result, dg.SkipReason):
            return result.skip_message or ""
        new = [request for request in result.run_requests if request.run_key not in self.run_keys]
        self.run_keys |= {request.run_key for request in new}
        return new

    def retry(self) -> tuple[dg.RunRequest, dg.DagsterRun]:
        """The one request of a tick, and the run it becomes."""
        requests = self.tick()
        assert not isinstance(requests, str), requests
        (request,) = requests
        assert request.job_name == "full"
        run = self.run(
            request.partition_key or "",
            asset_selection=request.asset_selection,
            run_config=request.run_config,
            tags=dict(request.tags),
        )
        return request, run


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def daemon(tmp_path: Path, fitted_root: Path, labels: Path, instance: dg.DagsterInstance, clock: Clock) -> Daemon:
    source, root = tmp_path / "source", tmp_path / "root"
    for snapshot in (SNAPSHOT, OTHER):
        write_shard(source, snapshot, "000_00000", 40)
    shutil.copytree(fitted_root, root)
    return Daemon(settings_for(source, root, labels, "select.compare_steps=0"), instance, clock)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """wiki_scores cannot reach its store while the list is not empty."""
    left, real = [1], scores.scores

    def away(run: object, source: object, snapshot: str, part: str) -> object:
        if part == "wiki" and left:
            raise TimeoutError("no answer")
        return real(run, source, snapshot, part)  # type: ignore[arg-type]

    monkeypatch.setattr(scores, "scores", away)
    monkeypatch.setattr(base, "RETRIES", None)
    return left  # type: ignore[return-value]


def test_what_failed_and_what_follows_runs_again_and_nothing_else(
    busy: list[int], daemon: Daemon, clock: Clock
) -> None:
    failed = daemon.run(tags={"mine": "1"})
    assert failed.is_failure
    assert str(daemon.tick()).startswith(f"{SNAPSHOT} waits until ")
    clock.ahead = 61
    busy.clear()
    request, run = daemon.retry()
    assert request.partition_key == SNAPSHOT
    assert {key.to_user_string() for key in request.asset_selection or ()} == FOLLOWING
    assert request.run_key == f"{SNAPSHOT}:retry:{failed.run_id}"
    assert run.is_success
    made = {
        entry.dagster_event.asset_key.to_user_string()
        for entry in daemon.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    }
    assert made == FOLLOWING
    assert daemon.tick() == "no snapshot's last run failed in the last week"


def test_a_restart_or_a_reload_asks_for_nothing_twice(busy: list[int], daemon: Daemon, clock: Clock) -> None:
    daemon.run()
    clock.ahead = 61
    assert len(daemon.tick()) == 1
    # the sensor keeps no cursor: every tick is a first one, and the key is the same
    assert daemon.tick() == []


def test_three_retries_further_apart_each_time_and_then_it_is_said(
    busy: list[int], daemon: Daemon, clock: Clock
) -> None:
    last = daemon.run()
    for tries, wait in enumerate((60, 300, 1500), start=1):
        clock.ahead = wait - 30
        assert str(daemon.tick()).startswith(f"{SNAPSHOT} waits until ")
        clock.ahead = wait + 1
        request, last = daemon.retry()
        assert request.tags["datamask/retry"] == str(tries)
        assert last.is_failure
    clock.ahead = 10**6
    assert daemon.tick() == (
        f"{SNAPSHOT} was tried again 3 times and is given up: wiki_scores: TimeoutError: no answer (run {last.run_id})"
    )


def test_a_permanent_failure_is_left_alone_and_said(daemon: Daemon, clock: Clock, tmp_path: Path) -> None:
    bad = tmp_path / "source" / "data" / SNAPSHOT / "000_00000.parquet"
    bad.write_bytes(bad.read_bytes()[:100])
    run = daemon.run()
    clock.ahead = 10**6
    told = daemon.tick()
    assert isinstance(told, str)
    assert told.startswith(f"{SNAPSHOT} is left alone, its failure is permanent: raw_shards: BadShard: {bad}")
    assert run.run_id in told


def test_a_permanent_failure_holds_up_no_other_snapshot(
    busy: list[int], daemon: Daemon, clock: Clock, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "source" / "data" / SNAPSHOT / "000_00000.parquet"
    bad.write_bytes(bad.read_bytes()[:100])
    daemon.run()
    daemon.run(OTHER)
    clock.ahead = 61
    (request,) = daemon.tick()
    assert isinstance(request, dg.RunRequest) and request.partition_key == OTHER
    assert f"{SNAPSHOT} is left alone" in capfd.readouterr().err


def test_the_failed_run_s_config_goes_along_for_the_assets_that_are_retried(
    busy: list[int], daemon: Daemon, clock: Clock
) -> None:
    ops = {"raw_shards": {"config": {"on_bad_shard": "quarantine"}}, "datamask_masks": {"config": {"lambda": 0.3}}}
    daemon.run(run_config={"ops": ops})
    clock.ahead = 61
    busy.clear()
    request, run = daemon.retry()
    assert request.run_config == {"ops": {"datamask_masks": ops["datamask_masks"]}}
    # an experiment stays one: the manifest refuses it, which is permanent
    assert run.is_failure and "is left alone" in str(daemon.tick())


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.STARTED])
def test_a_later_run_has_the_say(busy: list[int], daemon: Daemon, clock: Clock, status: dg.DagsterRunStatus) -> None:
    daemon.run()
    clock.ahead = 61
    daemon.instance.create_run_for_job(
        daemon.definitions.resolve_job_def("full"), tags={"dagster/partition": SNAPSHOT}, status=status
    )
    assert daemon.tick() == "no snapshot's last run failed in the last week"


def test_a_lost_process_is_tried_again_unless_dagster_does_it(daemon: Daemon, clock: Clock) -> None:
    job = daemon.definitions.resolve_job_def("full")
    lost = daemon.instance.create_run_for_job(
        job, tags={"dagster/partition": SNAPSHOT}, status=dg.DagsterRunStatus.STARTED
    )
    daemon.instance.report_run_failed(lost, "its process is gone")
    clock.ahead = 61
    (request,) = daemon.tick()
    assert isinstance(request, dg.RunRequest)
    assert {key.to_user_string() for key in request.asset_selection or ()} == set(FULL)
    daemon.instance.add_run_tags(lost.run_id, {"dagster/will_retry": "true"})
    assert daemon.tick() == "no snapshot's last run failed in the last week"


def test_runs_of_other_code_locations_are_none_of_its_business(daemon: Daemon, clock: Clock) -> None:
    @dg.asset
    def theirs() -> None:
        raise TimeoutError

    job = dg.Definitions(assets=[theirs]).resolve_implicit_global_asset_job_def()
    job.execute_in_process(instance=daemon.instance, raise_on_error=False, tags={"dagster/partition": "2024-01-01"})
    clock.ahead = 10**6
    assert daemon.tick() == "no snapshot's last run failed in the last week"


def test_a_clock_that_is_put_back_keeps_no_retry_waiting(busy: list[int], daemon: Daemon, clock: Clock) -> None:
    assert daemon.run().is_failure
    clock.ahead = -5 * 3600
    requests = daemon.tick()
    assert not isinstance(requests, str), requests
    assert [request.partition_key for request in requests] == [SNAPSHOT]
