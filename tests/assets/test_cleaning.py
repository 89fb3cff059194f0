"""The job clean, and full with removal, as Dagster records them."""

import json
import shutil
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask.definitions import build_definitions
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from dagster_datamask.stages.base import STAGES
from tests.assets.conftest import execute, failure, materialised
from tests.conftest import SNAPSHOTS
from tests.project import settings_for, text_of, write_shard

ASKED = "a careful evaluation question asks how many words in a row two texts may share before one counts"


@pytest.fixture
def settings(tmp_path: Path, fitted_root: Path, labels: Path) -> Settings:
    """A snapshot with a repeated text and an evaluation set in it, removal asked for."""
    source, root = tmp_path / "source", tmp_path / "root"
    shutil.copytree(fitted_root, root)
    texts = [text_of(f"clean/{k}") for k in range(12)]
    texts[5], texts[9] = texts[2], f"{texts[9]} {ASKED}"
    write_shard(source, SNAPSHOTS[0], "000", 12, texts=texts, ids=[f"d{k}" for k in range(12)])
    sets = tmp_path / "asked.jsonl"
    sets.write_text(json.dumps({"question": ASKED}))
    return settings_for(
        source, root, labels, "clean.duplicates=remove", f"clean.evaluation_sets=['{sets}']", "select.compare_steps=0"
    )


def metadata(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, dg.MetadataValue]:
    (materialization,) = result.asset_materializations_for_node(asset)
    return dict(materialization.metadata)


def test_full_removes_what_the_settings_name(settings: Settings) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert execute(settings, instance, "fit_global").success
        result = execute(settings, instance, "full", SNAPSHOTS[0])
    assert result.success
    assert {"text_duplicates", "contaminated_documents"} <= materialised(result)
    duplicates, contaminated = (metadata(result, name) for name in ("text_duplicates", "contaminated_documents"))
    assert duplicates["duplicates_within"].value == 1
    assert duplicates["groups"].value == 1
    assert duplicates["tokens_saved"].value > 0
    (told,) = contaminated["sets"].records
    assert told.data["evaluation_set"] == "asked.jsonl"
    assert told.data["documents"] == 1
    counts = metadata(result, "pruned_documents")
    assert (counts["rows/duplicate"].value, counts["rows/contaminated"].value) == (1, 1)
    manifest = Store(Path(settings.storage.root)).current("fineweb_mask_manifest", SNAPSHOTS[0])
    assert (manifest.facts["duplicate"], manifest.facts["contaminated"]) == (1, 1)
    quality = metadata(result, "quality_scores")
    assert [r.data["first"] for r in quality["correlations"].records] == ["dclm", "dclm", "edu"]
    checks = {e.check_name: e for e in result.get_asset_check_evaluations()}
    assert checks["scorers_vary"].passed and not checks["scorers_vary"].blocking
    assert checks["every_earlier_snapshot_compared"].passed


def test_nothing_of_cleaning_runs_unless_it_is_asked_for(settings: Settings) -> None:
    plain = settings.replace({"clean.duplicates": "report", "clean.evaluation_sets": []})
    for name, asked in (("full", plain), ("score", plain)):
        keys = build_definitions(asked).resolve_job_def(name).asset_layer.executable_asset_keys
        assert not {"text_duplicates", "contaminated_documents"} & {key.to_user_string() for key in keys}
    clean = build_definitions(plain).resolve_job_def("clean")
    assert {key.to_user_string() for key in clean.asset_layer.executable_asset_keys} == {
        name for name, stage in STAGES.items() if stage.group == "cleaning"
    }


def test_the_job_clean_reports_without_deciding(settings: Settings) -> None:
    plain = settings.replace({"clean.duplicates": "report", "clean.evaluation_sets": []})
    with dg.DagsterInstance.ephemeral() as instance:
        assert execute(plain, instance, "fit_global").success
        assert execute(plain, instance, "full", SNAPSHOTS[0]).success
        only = ["text_duplicates", "contaminated_documents"]
        result = execute(plain, instance, "clean", SNAPSHOTS[0], only=only)
    assert result.success and materialised(result) == {*only}
    assert metadata(result, "text_duplicates")["duplicates_within"].value == 1
    assert metadata(result, "contaminated_documents")["contaminated"].value == 0
    assert Store(Path(plain.storage.root)).current("fineweb_mask_manifest", SNAPSHOTS[0]).facts["duplicate"] == 0


def test_a_set_that_is_gone_is_one_line(settings: Settings, tmp_path: Path) -> None:
    gone = settings.replace({"clean.evaluation_sets": [str(tmp_path / "gone.jsonl")]})
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(gone, instance, "score", SNAPSHOTS[0], only=["raw_shards", "contaminated_documents"])
    told = failure(result, "contaminated_documents")
    assert told.startswith("ValueError: clean.evaluation_sets: ")
    assert "gone.jsonl does not exist; correct the path, or remove it from the list" in told
    assert "\n" not in told
