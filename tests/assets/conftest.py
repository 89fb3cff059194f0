"""One instance on which the small project was fitted and both snapshots run in full; tests look, or copy."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask.definitions import build_definitions
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.settings import Settings
from tests.conftest import SNAPSHOTS
from tests.project import settings_for


def execute(
    settings: Settings,
    instance: dg.DagsterInstance,
    job: str,
    snapshot: str | None = None,
    *,
    ops: dict | None = None,
    only: Sequence[str] | None = None,
    **resources: dg.ConfigurableResource,
) -> dg.ExecuteInProcessResult:
    """Run a job of the definitions for `settings`, or `only` some of its assets, errors kept in the result."""
    if snapshot is not None:
        instance.add_dynamic_partitions(cc_snapshot.name or "", [snapshot])
    return (
        build_definitions(settings, **resources)
        .resolve_job_def(job)
        .execute_in_process(
            instance=instance,
            partition_key=snapshot,
            raise_on_error=False,
            run_config={"ops": ops} if ops else None,
            asset_selection=[dg.AssetKey(name) for name in only] if only else None,
        )
    )


def failure(result: dg.ExecuteInProcessResult, step: str) -> str:
    """What the UI shows of a failed step: its Failure's description."""
    for event in result.all_events:
        if event.is_step_failure and event.step_key == step:
            data = event.step_failure_data.user_failure_data
            assert data is not None, (
                f"{step} failed by an exception, not by dg.Failure: {event.step_failure_data.error}"
            )
            return data.description or ""
    raise AssertionError(f"{step} did not fail")


def materialised(result: dg.ExecuteInProcessResult) -> set[str]:
    return {
        event.asset_key.to_user_string()
        for event in result.all_events
        if event.is_step_materialization and event.asset_key is not None
    }


@dataclass(frozen=True)
class Ran:
    """The finished project: settings, instance, and the run of each job."""

    settings: Settings
    instance: dg.DagsterInstance
    fit: dg.ExecuteInProcessResult
    full: dict[str, dg.ExecuteInProcessResult]


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory, small_source: Path, fitted_root: Path, labels: Path) -> Iterator[Ran]:
    root = tmp_path_factory.mktemp("ran") / "root"
    shutil.copytree(fitted_root, root)
    settings = settings_for(small_source, root, labels)
    with dg.DagsterInstance.ephemeral() as instance:
        fit = execute(settings, instance, "fit_global")
        yield Ran(settings, instance, fit, {s: execute(settings, instance, "full", s) for s in SNAPSHOTS})


@pytest.fixture
def own_root(tmp_path: Path, ran: Ran) -> Settings:
    """The finished project's settings on a copy of its root: to run again, or to break."""
    root = tmp_path / "root"
    shutil.copytree(ran.settings.storage.root, root)
    return ran.settings.replace({"storage.root": str(root)})
