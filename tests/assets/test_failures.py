"""Failures injected into a real run: what is tried again, what is not, and that nothing half-done is published."""

import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_datamask.assets import base
from dagster_datamask.settings import Settings
from dagster_datamask.shards import writer
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.schemas import BadShard
from dagster_datamask.shards.source import Shard, Source
from dagster_datamask.stages.base import STAGES
from tests.assets.conftest import Ran, failure, materialised
from tests.assets.conftest import execute as execute_job
from tests.conftest import SNAPSHOTS
from tests.project import settings_for, write_shard

FIRST, SECOND = SNAPSHOTS


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries as they are, but for the waiting."""
    assert base.RETRIES.backoff is dg.Backoff.EXPONENTIAL and base.RETRIES.jitter is dg.Jitter.PLUS_MINUS
    monkeypatch.setattr(base, "RETRIES", dg.RetryPolicy(max_retries=base.RETRIES.max_retries, delay=0))


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def fresh(tmp_path: Path, small_source: Path, fitted_root: Path, labels: Path) -> Settings:
    """A source and a root of its own, fitted, with no snapshot published."""
    source, root = tmp_path / "source", tmp_path / "root"
    shutil.copytree(small_source, source)
    shutil.copytree(fitted_root, root)
    return settings_for(source, root, labels)


def execute(settings: Settings, instance: dg.DagsterInstance, asset: str) -> dg.ExecuteInProcessResult:
    """One asset of FIRST, as the UI's "Materialize" runs it."""
    return execute_job(settings, instance, "full", FIRST, only=[asset])


def attempts(result: dg.ExecuteInProcessResult) -> int:
    """How often the run's only step was tried."""
    return 1 + sum(event.event_type_value == "STEP_UP_FOR_RETRY" for event in result.all_events)


def told(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """The metadata of the run's only failed step."""
    (event,) = [event for event in result.all_events if event.is_step_failure]
    data = event.step_failure_data.user_failure_data
    assert data is not None
    return {name: value.value for name, value in data.metadata.items()}


def failing(times: int, error: Callable[[], Exception], work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, which raises for the first `times` calls."""
    left = [times]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error()
        return work(*args, **kwargs)

    return wrapped


def test_a_reset_connection_is_tried_once_more_and_gives_the_same_bytes(
    fresh: Settings, ran: Ran, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset = failing(1, lambda: ConnectionResetError(errno.ECONNRESET, "reset by peer"), Source.footer)
    monkeypatch.setattr(Source, "footer", lambda self, shard: reset(self, shard))
    result = execute(fresh, instance, "raw_shards")
    assert result.success and attempts(result) == 2
    here, there = (Store(Path(s.storage.root)).current("raw_shards", FIRST) for s in (fresh, ran.settings))
    assert here.fingerprint == there.fingerprint
    assert [here.record(shard).sha256 for shard in here.shards] == [there.record(s).sha256 for s in there.shards]


def test_a_store_that_stays_away_is_given_up_after_three_retries_and_said_to_be_transient(
    fresh: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Source, shard: Shard) -> None:
        raise TimeoutError(f"{shard.path}: no answer")

    monkeypatch.setattr(Source, "footer", away)
    result = execute(fresh, instance, "raw_shards")
    assert attempts(result) == 4
    assert told(result)["kind"] == "transient"
    assert Store(Path(fresh.storage.root)).published("raw_shards", FIRST) is None


def test_a_bad_shard_is_tried_once_and_named(fresh: Settings, instance: dg.DagsterInstance) -> None:
    bad = Path(fresh.source.url) / "data" / FIRST / "001_00000.parquet"
    bad.write_bytes(bad.read_bytes()[:200])
    result = execute(fresh, instance, "raw_shards")
    assert attempts(result) == 1
    assert told(result) == {"kind": "permanent", "shard": str(bad)}


def test_a_defect_is_tried_once_and_named_with_its_shard(
    fresh: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Source.batches

    def broken(self: Source, shard: Shard, columns: Any, rows: int, groups: Any = None) -> Any:
        if shard.name == "001_00000" and columns is None:
            raise ZeroDivisionError("a defect")
        return real(self, shard, columns, rows, groups)

    monkeypatch.setattr(Source, "batches", broken)
    result = execute(fresh, instance, "raw_shards")
    assert attempts(result) == 1
    assert told(result) == {"kind": "permanent", "shard": "001_00000"}
    assert failure(result, "raw_shards") == "ZeroDivisionError: a defect"


def test_a_shard_replaced_while_it_is_read_is_read_again(
    fresh: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, replaced = Source.batches, []

    def replacing(self: Source, shard: Shard, columns: Any, rows: int, groups: Any = None) -> Any:
        yield from real(self, shard, columns, rows, groups)
        if columns is None and not replaced:
            replaced.append(write_shard(Path(self.url), FIRST, shard.name, 30))

    monkeypatch.setattr(Source, "batches", replacing)
    result = execute(fresh, instance, "raw_shards")
    assert replaced and result.success and attempts(result) == 2
    published = Store(Path(fresh.storage.root)).current("raw_shards", FIRST)
    assert published.rows == 30 + 25


def test_half_of_the_old_and_half_of_the_new_is_no_bad_shard(
    fresh: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an overwritten file reads like is not held against the shard, and quarantine would be wrong."""
    real, once = Source.footer, []

    def torn(self: Source, shard: Shard) -> Any:
        if not once:
            once.append(write_shard(Path(self.url), FIRST, shard.name, 31))
            raise BadShard(shard.path, "is not readable parquet")
        return real(self, shard)

    monkeypatch.setattr(Source, "footer", torn)
    result = execute(fresh.replace({"source.on_bad_shard": "quarantine"}), instance, "raw_shards")
    assert result.success and attempts(result) == 2
    assert Store(Path(fresh.storage.root)).current("raw_shards", FIRST).facts["quarantined_shards"] == 0


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ENOSPC, "make room"), (errno.EROFS, "grant the right to read and write")]
)
@pytest.mark.parametrize("asset", ["datamask_masks", "fineweb_mask"])
def test_a_disk_that_fills_or_locks_in_mid_write_publishes_nothing_and_the_rerun_is_as_if_it_had_not(
    own_root: Settings,
    ran: Ran,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    says: str,
    asset: str,
) -> None:
    root = Store(Path(own_root.storage.root))
    shutil.rmtree(root.folder(asset, FIRST))
    real = writer.ParquetWriter.close

    def full(self: writer.ParquetWriter) -> None:
        real(self)
        raise OSError(number, "told by the disk", "a file")

    with monkeypatch.context() as patched:
        patched.setattr(writer.ParquetWriter, "close", full)
        result = execute(own_root, instance, asset)
    assert attempts(result) == 1 and told(result)["kind"] == "permanent"
    assert says in failure(result, asset)
    assert materialised(result) == set()
    assert root.published(asset, FIRST) is None
    assert not list(root.root.rglob(".*.tmp")) and not list(root.folder(asset, FIRST).rglob("*.done.json"))
    assert execute(own_root, instance, asset).success
    here, there = root.current(asset, FIRST), Store(Path(ran.settings.storage.root)).current(asset, FIRST)
    assert here.fingerprint == there.fingerprint
    assert [here.record(shard).sha256 for shard in here.shards] == [there.record(s).sha256 for s in there.shards]


def test_a_file_system_that_takes_no_more_bytes_is_told_with_its_remedy(
    own_root: Settings, instance: dg.DagsterInstance
) -> None:
    """A limit on the size of files, which the kernel enforces on every writer alike."""
    root = Store(Path(own_root.storage.root))
    before = root.current("fineweb_mask", FIRST).fingerprint
    shutil.rmtree(root.current("fineweb_mask", FIRST).folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        result = execute(own_root, instance, "fineweb_mask")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert attempts(result) == 1 and told(result)["kind"] == "permanent"
    assert told(result)["shard"] in ("000_00000", "001_00000")
    assert "make room" in failure(result, "fineweb_mask")
    assert execute(own_root, instance, "fineweb_mask").success
    assert root.current("fineweb_mask", FIRST).fingerprint == before


def test_raw_shards_tells_what_the_machine_is(ran: Ran) -> None:
    (made,) = ran.full[FIRST].asset_materializations_for_node("raw_shards")
    rows = {row.data["what"]: row.data["detail"] for row in made.metadata["doctor"].records}
    assert rows["dagster"] == "1.13.27"
    assert rows["accelerator"].startswith("cpu (CPU)")
    assert rows["storage.root"].startswith(ran.settings.storage.root) and "GB free" in rows["storage.root"]
    assert rows["edu as fitted"].rpartition(", ")[2]
    assert "every snapshot is asked for again" in rows["DAGSTER_HOME"]
    assert {"dclm as fitted", "wiki as fitted", "models.encoder", "source"} <= set(rows)
    assert "doctor" not in ran.full[FIRST].asset_materializations_for_node("dclm_scores")[0].metadata


def test_every_stage_s_asset_has_the_retries(ran: Ran) -> None:
    for name in STAGES:
        assert base.StageAsset(STAGES[name], lambda run, source, snapshot: None).build(ran.settings).op.retry_policy  # type: ignore[arg-type, return-value]
