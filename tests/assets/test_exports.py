"""dataset_card as an asset: what the UI shows of it, and how it tells that it is out of date."""

import json
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask.settings import Settings
from tests.assets.conftest import execute, failure
from tests.conftest import SNAPSHOTS

CARD = dg.AssetKey("dataset_card")


@pytest.fixture
def instance() -> dg.DagsterInstance:
    return dg.DagsterInstance.ephemeral()


def checks(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    return {e.check_name: e for e in result.get_asset_check_evaluations() if e.asset_key == CARD}


def test_the_job_export_tells_what_it_made_and_where(own_root: Settings, instance: dg.DagsterInstance) -> None:
    result = execute(own_root, instance, "export")
    assert result.success
    (materialisation,) = result.asset_materializations_for_node("dataset_card")
    told = {name: value.value for name, value in materialisation.metadata.items()}
    assert (told["documents"], told["snapshots"], told["dagster/row_count"]) == (14, 2, 14)
    assert told["experiment"] is False
    folder = Path(str(told["path"]))
    assert (folder / "dataset" / "README.md").exists()
    assert json.loads((folder.parent / "current.json").read_text())["fingerprint"] == told["fingerprint"]
    found = checks(result)
    assert {name: check.passed for name, check in found.items() if name != "export_is_current"} == {
        "rows_accounted_for": True,
        "reads_back_as_kept": True,
        "made_under_these_settings": True,
        "every_snapshot_exported": True,
    }
    assert found["export_is_current"].passed


def test_a_snapshot_that_goes_makes_it_outdated(own_root: Settings, instance: dg.DagsterInstance) -> None:
    execute(own_root, instance, "export")
    pointer = Path(own_root.storage.root) / "fineweb_mask" / SNAPSHOTS[1] / "current.json"
    pointer.unlink()
    result = execute(own_root, instance, "export")
    assert result.success
    check = checks(result)["every_snapshot_exported"]
    assert not check.passed and not check.blocking
    assert check.metadata["left_out"].value == f"{SNAPSHOTS[1]} (fineweb_mask not published)"
    assert not checks(result)["export_is_current"].passed


def test_snapshots_of_other_settings_are_refused_with_the_reason(
    own_root: Settings, instance: dg.DagsterInstance
) -> None:
    result = execute(own_root.replace({"select.lambda": 0.3}), instance, "export")
    assert not result.success
    told = failure(result, "dataset_card")
    assert told.startswith("dataset_card was not published: made_under_these_settings: different ")
    assert f"{SNAPSHOTS[0]}: select.lambda = 0.5 (in force: 0.3)" in told
    assert not (Path(own_root.storage.root) / "dataset_card" / "current.json").exists()
