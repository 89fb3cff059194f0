"""What fails, by whatever road it reaches Dagster's storage, is kept there without secrets.

Each road is walked in a real run or a real evaluation on an instance on disk, and every byte of that is searched.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._grpc.impl import get_external_sensor_execution
from dagster._utils.error import serializable_error_info_from_exc_info

from dagster_datamask.definitions import build_definitions
from dagster_datamask.jobs import build_jobs
from dagster_datamask.resources.compute import ComputeResource
from dagster_datamask.resources.errors import redact_errors
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.sensors.new_embeddings import build_new_embeddings
from dagster_datamask.sensors.new_shards import build_new_shards
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.source import Source, SourceError
from tests.conftest import SNAPSHOTS
from tests.project import settings_for, write_shard

SECRETS = {"HF_TOKEN": "marker-of-a/secret+4711", "STORE_PASSWORD": "two lines\nof marker 4712"}
# as it is, in a URL, and as Python and JSON write a line's end
TOLD = ("marker-of-a", "of marker 4712", "signed-4713", "in-a-url-4714")


def fail(*args: object, **kwargs: object) -> Any:
    """As a store's client does, in an error behind an error."""
    logging.getLogger("store").warning("tried %s", SECRETS["HF_TOKEN"])
    try:
        raise KeyError(SECRETS["STORE_PASSWORD"])
    except KeyError as error:
        raise ValueError(
            f"GET https://u:in-a-url-4714@cdn/x?Signature=signed-4713 with {SECRETS['HF_TOKEN']}, "
            "marker-of-a%2Fsecret%2B4711"
        ) from error


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def own(tmp_path: Path, labels: Path) -> Settings:
    write_shard(tmp_path / "source", SNAPSHOTS[0], "a", 3)
    return settings_for(tmp_path / "source", tmp_path / "root", labels)


class Kept:
    """An instance on disk and all that is in it."""

    def __init__(self, home: Path, instance: dg.DagsterInstance) -> None:
        self.home, self.instance = home, instance

    def run(self, settings: Settings, asset: str = "raw_shards", **resources: Any) -> dg.ExecuteInProcessResult:
        job = build_definitions(settings, **resources).resolve_implicit_global_asset_job_def()
        partitioned = asset == "raw_shards"
        return job.execute_in_process(
            instance=self.instance,
            partition_key=SNAPSHOTS[0] if partitioned else None,
            asset_selection=[dg.AssetKey(asset)],
            raise_on_error=False,
        )

    def told(self) -> list[str]:
        """Which of the secrets can be read somewhere in the storage; it must hold masks, or nothing was kept."""
        data = b"".join(path.read_bytes() for path in self.home.rglob("*") if path.is_file()).decode("latin-1")
        assert "***" in data
        return [text for text in TOLD if text in data]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    home = tmp_path / "home"
    home.mkdir()
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        instance.add_dynamic_partitions("cc_snapshot", [SNAPSHOTS[0]])
        yield Kept(home, instance)


def messages(result: dg.ExecuteInProcessResult) -> str:
    """The errors of a run that failed, with their causes and stacks."""
    assert not result.success
    errors = [e.step_failure_data.error for e in result.all_events if e.is_step_failure]
    errors += [e.event_specific_data.error for e in result.all_events if e.is_run_failure]  # type: ignore[union-attr]
    return "\n".join(str(error) for error in errors if error is not None)


def test_a_stage_s_work(kept: Kept, own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Source, "footer", fail)
    told = messages(kept.run(own))
    assert "ValueError: GET https://u:***@cdn/x?Signature=*** with ***, ***" in told
    # where it happened is not lost
    assert "in footer" in told or "in fail" in told
    assert kept.told() == []


def test_what_follows_the_work(kept: Kept, own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Published, "schema", fail)
    assert "ValueError: GET https://u:***@cdn/x?" in messages(kept.run(own))
    assert kept.told() == []


def test_a_check(kept: Kept, own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageResource, "store", fail)
    definitions = build_definitions(own)
    result = dg.materialize(
        list(definitions.asset_checks or []),
        instance=kept.instance,
        resources=definitions.resources,
        selection=dg.AssetSelection.all_asset_checks(),
        raise_on_error=False,
    )
    assert "ValueError: GET https://u:***@cdn/x?" in messages(result)
    assert kept.told() == []


def test_the_end_of_a_run_s_resources(kept: Kept, own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeResource, "close", fail)
    kept.run(own)
    assert kept.told() == []


def test_a_resource_that_is_not_had(kept: Kept, own: Settings) -> None:
    class Refused(ComputeResource):
        def setup_for_execution(self, context: dg.InitResourceContext) -> None:
            fail()

    result = kept.run(own, compute=Refused.from_settings(own))
    (failed,) = [event for event in result.all_events if event.is_run_failure]
    assert "ValueError: GET https://u:***@cdn/x?" in str(failed.event_specific_data.error)  # type: ignore[union-attr]
    assert kept.told() == []


@pytest.mark.parametrize("at", ["snapshots", "unusable"])
def test_a_sensor_s_tick(kept: Kept, own: Settings, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """The code server's own function, whose answer the daemon puts into the tick."""
    monkeypatch.setattr(Source, at, fail)
    found = get_external_sensor_execution(
        build_definitions(own).get_repository_def(),
        None,  # type: ignore[arg-type]  # where the code lies, which no message tells
        kept.instance.get_ref(),
        "new_shards",
        None,
        None,
        None,
        ["tick", "1"],
        None,
    )
    told = str(found)
    assert "ValueError: GET https://u:***@cdn/x?" in told
    assert [text for text in TOLD if text in told] == []


def test_why_a_tick_asks_for_nothing(kept: Kept, own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = StorageResource.from_settings(own)
    context = dg.build_sensor_context(instance=kept.instance)
    monkeypatch.setattr(
        StorageResource, "documents", raising(SourceError(f"source s3://bucket: {SECRETS['HF_TOKEN']}"))
    )
    monkeypatch.setattr(StorageResource, "store", raising(SettingsError(f"storage.root: {SECRETS['HF_TOKEN']}")))
    for build in (build_new_shards, build_new_embeddings):
        result = build(own, build_jobs(own))(context, storage=storage)
        assert isinstance(result, dg.SkipReason)
        assert (result.skip_message or "").endswith(": ***")


def raising(error: Exception) -> Callable[..., Any]:
    def raises(*args: object) -> Any:
        raise error

    return raises


def test_what_an_asset_logs_of_an_error(kept: Kept, own: Settings, capfd: pytest.CaptureFixture[str]) -> None:
    @dg.asset
    def logs(context: dg.AssetExecutionContext) -> None:
        try:
            fail()
        except ValueError:
            context.log.exception("went on after %s", SECRETS["HF_TOKEN"])

    defs = dg.Definitions(assets=[logs], loggers=build_definitions(own).loggers)
    job = defs.resolve_implicit_global_asset_job_def()
    assert job.execute_in_process(instance=kept.instance, run_config={"loggers": {"console": {"config": {}}}}).success
    assert kept.told() == []
    printed = capfd.readouterr().err
    assert "went on after ***" in printed
    assert [text for text in TOLD if text in printed] == []


def test_an_error_without_secrets_is_kept_as_it_is() -> None:
    def told() -> Any:
        try:
            try:
                raise KeyError("a")
            except KeyError as error:
                raise ValueError("b") from error
        except ValueError:
            return serializable_error_info_from_exc_info(sys.exc_info())

    redact_errors()
    once = told()
    redact_errors()
    assert told() == once
    assert (once.message, once.cls_name, once.cause.cls_name) == ("ValueError: b\n", "ValueError", "KeyError")
    assert 'raise ValueError("b") from error' in "".join(once.stack)
