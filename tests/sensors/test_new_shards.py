"""new_shards, called as the daemon calls it: partitions and runs for what is new or changed, once."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from fsspec.implementations.local import LocalFileSystem

from dagster_datamask.definitions import build_definitions
from dagster_datamask.jobs import build_jobs
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.sensors import new_shards
from dagster_datamask.sensors.new_shards import build_new_shards
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from tests.project import settings_for, write_shard

PARTITIONS = cc_snapshot.name or ""


_QUIET = new_shards._QUIET_SECONDS


class Clock:
    """Time as the sensor sees it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(new_shards, "time", clock)
    return clock


class Daemon:
    """Ticks of the sensor against one instance, with what the daemon does to cursor and partitions."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance, clock: Clock) -> None:
        self.clock = clock
        self.sensor = build_new_shards(settings, build_jobs(settings))
        self.settings = settings
        self.instance = instance
        self.cursor: str | None = None
        self.run_keys: set[str] = set()

    def once(self) -> list[dg.RunRequest] | str:
        """One tick: the requests that would become runs (a run key counts once), or why it was skipped."""
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor)
        result = self.sensor(context, storage=StorageResource.from_settings(self.settings))
        if isinstance(result, dg.SkipReason):
            return result.skip_message or ""
        self.cursor = result.cursor
        if result.skip_reason is not None:
            assert not result.run_requests and not result.dynamic_partitions_requests
            return result.skip_reason.skip_message or ""
        for request in result.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions(PARTITIONS, list(request.partition_keys))
        new = [request for request in result.run_requests or [] if request.run_key not in self.run_keys]
        self.run_keys |= {request.run_key or "" for request in new}
        return new

    def tick(self) -> list[dg.RunRequest] | str:
        """A tick and, where that waits for quiet, one more after the quiet period."""
        told = self.once()
        if isinstance(told, str) and told.startswith("waiting until"):
            self.clock.now += _QUIET
            told = self.once()
        return told

    def snapshots(self) -> list[str | None]:
        """The partitions of the next tick's requests."""
        requests = self.tick()
        assert not isinstance(requests, str), requests
        return [request.partition_key for request in requests]


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    for snapshot in ("CC-MAIN-2024-10", "CC-MAIN-2024-18"):
        write_shard(source, snapshot, "000_00000", 2)
    return source


@pytest.fixture
def settings(source: Path, fitted_root: Path, labels: Path) -> Settings:
    return settings_for(source, fitted_root, labels)


@pytest.fixture
def daemon(settings: Settings, instance: dg.DagsterInstance, clock: Clock) -> Daemon:
    return Daemon(settings, instance, clock)


def test_new_snapshots_become_partitions_and_one_run_each(daemon: Daemon) -> None:
    requests = daemon.tick()
    assert not isinstance(requests, str)
    assert [request.partition_key for request in requests] == ["CC-MAIN-2024-10", "CC-MAIN-2024-18"]
    assert list(daemon.instance.get_dynamic_partitions(PARTITIONS)) == ["CC-MAIN-2024-10", "CC-MAIN-2024-18"]
    for request in requests:
        fingerprint = (
            StorageResource.from_settings(daemon.settings).documents().listing_fingerprint(request.partition_key or "")
        )
        assert request.run_key == f"{request.partition_key}:{fingerprint}"
        assert request.job_name == "full"


def test_with_scope_corpus_snapshots_are_embedded_and_the_log_says_what_is_next(
    settings: Settings, instance: dg.DagsterInstance, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = Daemon(settings.replace({"select.scope": "corpus"}), instance, clock).tick()
    assert not isinstance(requests, str)
    assert [request.job_name for request in requests] == ["embed", "embed"]
    assert "solve_corpus and then select are next: the sensor new_embeddings" in capfd.readouterr().err


def test_a_second_tick_has_nothing_to_do(daemon: Daemon) -> None:
    assert len(daemon.snapshots()) == 2
    cursor = daemon.cursor
    assert daemon.tick() == "2 snapshots, none new or changed"
    assert daemon.cursor == cursor


def test_a_lost_cursor_asks_again_under_the_same_run_keys(daemon: Daemon) -> None:
    daemon.snapshots()
    daemon.cursor = None
    assert daemon.tick() == []
    assert daemon.tick() == "2 snapshots, none new or changed"


def test_a_dropped_shard_runs_its_own_snapshot_alone(daemon: Daemon, source: Path) -> None:
    daemon.snapshots()
    write_shard(source, "CC-MAIN-2024-18", "001_00000", 2)
    assert daemon.snapshots() == ["CC-MAIN-2024-18"]
    assert daemon.tick() == "2 snapshots, none new or changed"


def test_a_replaced_shard_runs_its_snapshot_again(daemon: Daemon, source: Path) -> None:
    daemon.snapshots()
    shard = write_shard(source, "CC-MAIN-2024-10", "000_00000", 3)
    os.utime(shard, ns=(1, 1))
    assert daemon.snapshots() == ["CC-MAIN-2024-10"]


def test_a_removed_shard_runs_its_snapshot_again(daemon: Daemon, source: Path) -> None:
    extra = write_shard(source, "CC-MAIN-2024-10", "001_00000", 2)
    daemon.snapshots()
    extra.unlink()
    assert daemon.snapshots() == ["CC-MAIN-2024-10"]


def test_files_that_are_no_shards_do_not_launch_anything(daemon: Daemon, source: Path) -> None:
    daemon.snapshots()
    folder = source / "data" / "CC-MAIN-2024-10"
    (folder / "_SUCCESS").touch()
    (folder / ".001_00000.parquet.tmp").write_bytes(b"half")
    (folder / "README.md").write_text("x")
    assert daemon.tick() == "2 snapshots, none new or changed"


def test_twenty_five_a_tick_and_the_rest_on_the_next(daemon: Daemon, source: Path) -> None:
    for k in range(58):
        folder = source / "data" / f"CC-MAIN-2025-{k:02d}"
        folder.mkdir()
        shutil.copyfile(source / "data" / "CC-MAIN-2024-10" / "000_00000.parquet", folder / "000_00000.parquet")
    first, second, third = daemon.snapshots(), daemon.snapshots(), daemon.snapshots()
    assert [len(first), len(second), len(third)] == [25, 25, 10]
    assert len({*first, *second, *third}) == 60
    assert daemon.tick() == "60 snapshots, none new or changed"
    assert sorted(daemon.instance.get_dynamic_partitions(PARTITIONS)) == sorted(json.loads(daemon.cursor or "")["seen"])


def test_the_cursor_outlives_the_process(daemon: Daemon, source: Path) -> None:
    daemon.snapshots()
    restarted = Daemon(daemon.settings, daemon.instance, daemon.clock)
    restarted.cursor = daemon.cursor
    assert restarted.tick() == "2 snapshots, none new or changed"
    write_shard(source, "CC-MAIN-2026-01", "000_00000", 1)
    assert restarted.snapshots() == ["CC-MAIN-2026-01"]


def test_a_missing_source_is_a_reason_and_not_a_failure(daemon: Daemon, source: Path) -> None:
    shutil.rmtree(source)
    reason = daemon.tick()
    assert isinstance(reason, str)
    assert str(source) in reason and "does not exist" in reason and "DATAMASK_SOURCE" in reason


def test_no_source_says_how_to_set_one(settings: Settings, instance: dg.DagsterInstance, clock: Clock) -> None:
    reason = Daemon(settings.replace({"source.url": ""}), instance, clock).tick()
    assert isinstance(reason, str) and reason.startswith("no source is set")


def test_an_empty_snapshot_waits_for_its_shards_and_holds_up_no_other(daemon: Daemon, source: Path) -> None:
    (source / "data" / "CC-MAIN-2024-01").mkdir()
    assert daemon.snapshots() == ["CC-MAIN-2024-10", "CC-MAIN-2024-18"]
    write_shard(source, "CC-MAIN-2024-01", "000_00000", 1)
    assert daemon.snapshots() == ["CC-MAIN-2024-01"]


@pytest.mark.parametrize("name", ["a,b", "with space", "-dash", "dots...", "a|b"])
def test_a_folder_that_cannot_be_a_partition_is_warned_about_and_left(
    daemon: Daemon, source: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (source / "data" / name).mkdir()
    assert daemon.snapshots() == ["CC-MAIN-2024-10", "CC-MAIN-2024-18"]
    warned = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert any(repr(name) in line and "rename it" in line for line in warned)


class TestFitFirst:
    @pytest.fixture
    def unfitted(
        self, source: Path, tmp_path: Path, labels: Path, instance: dg.DagsterInstance, clock: Clock
    ) -> Daemon:
        return Daemon(settings_for(source, tmp_path / "root", labels), instance, clock)

    def request(self, daemon: Daemon) -> dg.RunRequest:
        requests = daemon.tick()
        assert not isinstance(requests, str), requests
        (request,) = requests
        return request

    def start(self, daemon: Daemon, status: dg.DagsterRunStatus) -> str:
        """A run of fit_global as the daemon would have launched it, in a given state."""
        request = self.request(daemon)
        job = build_definitions(daemon.settings).resolve_job_def("fit_global")
        return daemon.instance.create_run_for_job(job, tags=request.tags, status=status).run_id

    def test_fit_global_is_asked_for_alone(self, unfitted: Daemon) -> None:
        request = self.request(unfitted)
        assert request.job_name == "fit_global"
        assert request.partition_key is None
        assert not unfitted.instance.get_dynamic_partitions(PARTITIONS)

    def test_then_the_sensor_waits_and_says_for_which_run(self, unfitted: Daemon) -> None:
        run_id = self.start(unfitted, dg.DagsterRunStatus.STARTED)
        reason = unfitted.tick()
        assert isinstance(reason, str)
        assert reason.startswith(f"waiting for fit_global (run {run_id})")
        assert "dclm_classifier (missing)" in reason

    def test_a_failed_fit_is_told_and_not_repeated_for_ever(self, unfitted: Daemon) -> None:
        run_id = self.start(unfitted, dg.DagsterRunStatus.FAILURE)
        reason = unfitted.tick()
        assert isinstance(reason, str)
        assert f"fit_global failed (run {run_id}); mend its cause and run the job fit_global again" in reason

    def test_a_cancelled_fit_is_told_and_not_begun_again(self, unfitted: Daemon) -> None:
        run_id = self.start(unfitted, dg.DagsterRunStatus.CANCELED)
        for _ in range(2):
            reason = unfitted.tick()
            assert isinstance(reason, str)
            assert f"fit_global was cancelled (run {run_id})" in reason

    def test_a_failure_is_forgotten_once_a_person_has_run_it(self, unfitted: Daemon) -> None:
        self.start(unfitted, dg.DagsterRunStatus.FAILURE)
        assert isinstance(unfitted.tick(), str)
        by_hand = build_definitions(unfitted.settings).resolve_job_def("fit_global")
        unfitted.instance.create_run_for_job(by_hand, status=dg.DagsterRunStatus.SUCCESS)
        # what that fitted is out of date again
        assert self.request(unfitted).job_name == "fit_global"

    def test_each_change_of_what_is_fitted_is_a_new_fit(self, unfitted: Daemon, fitted_root: Path) -> None:
        """As of labels that are replaced again and again: settings and code are the same all the time."""
        self.start(unfitted, dg.DagsterRunStatus.SUCCESS)
        root = Path(unfitted.settings.storage.root)
        keys = set()
        for outdated in ("kmeans_centroids", "quality_calibration", "dclm_classifier"):
            shutil.copytree(fitted_root, root, dirs_exist_ok=True)
            (root / outdated / "current.json").unlink()
            request = self.request(unfitted)
            keys.add(request.run_key)
            job = build_definitions(unfitted.settings).resolve_job_def("fit_global")
            unfitted.instance.create_run_for_job(job, tags=request.tags, status=dg.DagsterRunStatus.SUCCESS)
        assert len(keys) == 3

    def test_files_removed_after_a_finished_fit_are_fitted_again(self, unfitted: Daemon) -> None:
        self.start(unfitted, dg.DagsterRunStatus.SUCCESS)
        assert self.request(unfitted).job_name == "fit_global"

    def test_where_runs_write_elsewhere_no_third_fit_follows_the_second(self, unfitted: Daemon) -> None:
        first, second = (self.start(unfitted, dg.DagsterRunStatus.SUCCESS) for _ in range(2))
        reason = str(unfitted.tick())
        assert f"(runs {first} and {second})" in reason and unfitted.settings.storage.root in reason
        assert "do the code server and the runs have one root" in reason

    def test_no_second_fit_while_one_runs_whoever_started_it(self, unfitted: Daemon) -> None:
        definitions = build_definitions(unfitted.settings)
        by_hand = definitions.resolve_job_def("fit_global")
        from_the_graph = definitions.resolve_implicit_global_asset_job_def()
        one_asset = frozenset({dg.AssetKey("kmeans_centroids")})
        for job, assets in ((by_hand, None), (from_the_graph, one_asset)):
            started = unfitted.instance.create_run_for_job(
                job, asset_selection=assets, status=dg.DagsterRunStatus.STARTED
            )
            assert str(unfitted.tick()).startswith(f"waiting for fit_global (run {started.run_id})")
            unfitted.instance.report_run_canceled(started)
        assert self.request(unfitted).job_name == "fit_global"

    def test_the_fit_waits_for_quiet_but_not_for_ever(self, unfitted: Daemon, source: Path) -> None:
        began = unfitted.clock.now
        assert str(unfitted.once()).startswith("waiting until")
        unfitted.clock.now += _QUIET
        write_shard(source, "CC-MAIN-2024-18", "001_00000", 2)
        assert str(unfitted.once()).startswith("fit_global goes first, once no shards land: CC-MAIN-2024-18 changed")
        unfitted.clock.now = began + new_shards._LONGEST_WAIT_SECONDS
        write_shard(source, "CC-MAIN-2024-18", "002_00000", 2)
        assert self.request(unfitted).job_name == "fit_global"

    def test_once_fitted_the_snapshots_follow(self, unfitted: Daemon, fitted_root: Path) -> None:
        self.start(unfitted, dg.DagsterRunStatus.SUCCESS)
        shutil.copytree(fitted_root, unfitted.settings.storage.root)
        assert unfitted.snapshots() == ["CC-MAIN-2024-10", "CC-MAIN-2024-18"]

    def test_changed_settings_need_a_new_fit_and_say_which_asset(self, daemon: Daemon) -> None:
        changed = Daemon(daemon.settings.replace({"cluster.k": 3}), daemon.instance, daemon.clock)
        assert self.start(changed, dg.DagsterRunStatus.STARTED)
        reason = changed.tick()
        assert isinstance(reason, str) and "kmeans_centroids (fitted under other settings)" in reason

    def test_another_settings_failure_is_not_held_against_these(self, unfitted: Daemon) -> None:
        self.start(unfitted, dg.DagsterRunStatus.FAILURE)
        changed = Daemon(unfitted.settings.replace({"cluster.k": 3}), unfitted.instance, unfitted.clock)
        assert self.request(changed).job_name == "fit_global"


def test_an_unusable_root_is_a_reason(settings: Settings, instance: dg.DagsterInstance, clock: Clock) -> None:
    reason = Daemon(settings.replace({"storage.root": "hf://datasets/a/b"}), instance, clock).tick()
    assert isinstance(reason, str) and "the hub takes commits" in reason


def test_the_root_is_only_looked_at(daemon: Daemon) -> None:
    root = Store(Path(daemon.settings.storage.root)).root
    before = sorted(str(path) for path in root.rglob("*"))
    daemon.tick()
    assert sorted(str(path) for path in root.rglob("*")) == before


def test_a_listing_that_comes_back_is_run_again(daemon: Daemon, source: Path) -> None:
    daemon.snapshots()
    extra = write_shard(source, "CC-MAIN-2024-10", "001_00000", 2)
    assert daemon.snapshots() == ["CC-MAIN-2024-10"]
    extra.unlink()
    assert daemon.snapshots() == ["CC-MAIN-2024-10"]
    assert daemon.tick() == "2 snapshots, none new or changed"


def test_slow_listings_starve_no_snapshot(daemon: Daemon, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # every listing takes longer than a tick may: one snapshot a tick, and each gets its turn
    ticks = iter(range(1000))
    monkeypatch.setattr(daemon.clock, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(new_shards, "_DEADLINE_SECONDS", 1.5)
    both = ["CC-MAIN-2024-10", "CC-MAIN-2024-18"]

    def asked_for() -> list[str]:
        asked = []
        for _ in range(6):
            told = daemon.once()
            asked += [] if isinstance(told, str) else [str(request.partition_key) for request in told]
            daemon.clock.now += _QUIET
        return sorted(asked)

    assert asked_for() == both
    for snapshot in both:
        write_shard(source, snapshot, "001_00000", 2)
    assert asked_for() == both


class TestQuiet:
    def test_nothing_is_run_while_shards_land(self, daemon: Daemon, source: Path) -> None:
        assert str(daemon.once()).startswith("waiting until 45 s have passed without a change: CC-MAIN-2024-10, CC-")
        asked: list[str | None] = []
        for k in range(4):
            daemon.clock.now += _QUIET - 1
            write_shard(source, "CC-MAIN-2024-10", f"{k + 1:03d}_00000", 2)
            told = daemon.once()
            asked += [] if isinstance(told, str) else [request.partition_key for request in told]
        # the other snapshot was quiet meanwhile
        assert asked == ["CC-MAIN-2024-18"]
        daemon.clock.now += _QUIET
        (request,) = daemon.once()
        assert isinstance(request, dg.RunRequest)
        listing = StorageResource.from_settings(daemon.settings).documents().listing_fingerprint("CC-MAIN-2024-10")
        assert request.run_key == f"CC-MAIN-2024-10:{listing}"
        assert daemon.once() == "2 snapshots, none new or changed"

    def test_the_wait_outlives_the_process(self, daemon: Daemon) -> None:
        daemon.once()
        daemon.clock.now += _QUIET
        restarted = Daemon(daemon.settings, daemon.instance, daemon.clock)
        restarted.cursor = daemon.cursor
        assert len(restarted.once()) == 2

    def test_a_change_that_is_taken_back_runs_nothing(self, daemon: Daemon, source: Path) -> None:
        daemon.snapshots()
        extra = write_shard(source, "CC-MAIN-2024-10", "001_00000", 2)
        assert str(daemon.once()).startswith("waiting until")
        extra.unlink()
        daemon.clock.now += _QUIET
        assert daemon.once() == "2 snapshots, none new or changed"
        assert json.loads(daemon.cursor or "")["pending"] == {}

    def test_a_snapshot_that_is_gone_is_waited_for_no_longer(self, daemon: Daemon, source: Path) -> None:
        daemon.once()
        shutil.rmtree(source / "data" / "CC-MAIN-2024-18")
        daemon.clock.now += _QUIET
        assert [request.partition_key for request in daemon.once() if isinstance(request, dg.RunRequest)] == [
            "CC-MAIN-2024-10"
        ]
        assert json.loads(daemon.cursor or "")["pending"] == {}

    def test_the_cursor_of_an_earlier_version_is_read(self, daemon: Daemon) -> None:
        daemon.snapshots()
        old = json.loads(daemon.cursor or "")
        del old["pending"]
        daemon.cursor = json.dumps(old)
        assert daemon.once() == "2 snapshots, none new or changed"


def test_the_refused_names_are_in_the_message_of_a_tick_that_asks_for_nothing(daemon: Daemon, source: Path) -> None:
    daemon.snapshots()
    (source / "data" / "CC,MAIN").mkdir()
    (source / "data" / "CC MAIN").mkdir()
    assert daemon.once() == "2 snapshots, none new or changed; refused: 'CC MAIN', 'CC,MAIN'"


def test_a_slash_in_a_name_is_refused_by_its_whole_name(
    daemon: Daemon, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_shard(source, "CC/MAIN", "000_00000", 2)
    assert daemon.snapshots() == ["CC-MAIN-2024-10", "CC-MAIN-2024-18"]
    assert "'CC/MAIN' cannot be a snapshot: rename it" in capfd.readouterr().err


def test_an_unset_home_is_warned_of_with_what_is_lost(
    daemon: Daemon, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    daemon.once()
    assert "DAGSTER_HOME is not set: when Dagster stops, the history of runs" in capfd.readouterr().err
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    daemon.once()
    assert "DAGSTER_HOME" not in capfd.readouterr().err


def test_ten_thousand_shards_cost_one_listing_a_snapshot(
    daemon: Daemon, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a tick asks of the storage grows with the snapshots and not with the shards, on any store."""
    for k in range(20):
        folder = source / "data" / f"CC-MAIN-2025-{k:02d}"
        folder.mkdir()
        for shard in range(500):
            (folder / f"{shard:03d}_00000.parquet").touch()
    asked: list[str] = []

    def counted(name: str) -> None:
        real = getattr(LocalFileSystem, name)

        def method(self: LocalFileSystem, *args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(LocalFileSystem, name, method)

    for name in ("ls", "info", "isdir", "isfile", "exists", "_open"):
        counted(name)
    daemon.once()
    # a local folder is looked at once more for each entry, without a request; so `info` is counted apart
    asked_for = Counter(asked)
    assert asked_for["ls"] <= 22 + 3
    assert asked_for["_open"] == 0
    assert asked_for["isdir"] + asked_for["isfile"] + asked_for["exists"] <= 22 + 5
    daemon.clock.now += _QUIET
    assert len(daemon.once()) == 22


def test_a_clock_that_is_put_back_by_hours_costs_a_quiet_period_and_no_more(daemon: Daemon, clock: Clock) -> None:
    assert isinstance(daemon.once(), str)
    clock.now -= 5 * 3600
    assert isinstance(daemon.once(), str)
    clock.now += _QUIET
    requests = daemon.once()
    assert not isinstance(requests, str), requests
    assert len(requests) == 2
