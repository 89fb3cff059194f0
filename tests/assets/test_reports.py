"""The reports as Dagster records them: figures and the page's path in the metadata, checks, refusals."""

import json
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask.definitions import build_definitions
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import POINTER, Store
from tests.assets.conftest import Ran, execute, failure, materialised
from tests.conftest import SNAPSHOTS

FIRST, SECOND = SNAPSHOTS


def store(settings: Settings) -> Store:
    return Store(Path(settings.storage.root))


def metadata(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, dg.MetadataValue]:
    (materialization,) = result.asset_materializations_for_node(asset)
    return dict(materialization.metadata)


def current(settings: Settings, instance: dg.DagsterInstance) -> dg.AssetCheckEvaluation:
    """What the check says that anybody can ask for."""
    key = dg.AssetCheckKey(dg.AssetKey("selection_report"), "report_is_current")
    job = build_definitions(settings).resolve_implicit_global_asset_job_def()
    subset = job.get_subset(asset_selection=set(), asset_check_selection={key})
    (evaluation,) = subset.execute_in_process(instance=instance).get_asset_check_evaluations()
    return evaluation


def test_a_snapshot_s_report_shows_its_figures_and_where_its_page_is(ran: Ran) -> None:
    found = metadata(ran.full[FIRST], "snapshot_report")
    published = store(ran.settings).current("snapshot_report", FIRST)
    assert found["page"] == dg.MetadataValue.path(str(published.path("report")))
    assert Path(str(found["page"].value)).stat().st_size == found["page_bytes"].value
    figures = [name for name, value in found.items() if isinstance(value, dg.MarkdownMetadataValue)]
    assert len(figures) == 8 and "A map of the documents" in figures
    assert isinstance(found["quality_kept"], dg.FloatMetadataValue)
    assert found["cosine_kept"].value < found["cosine_choosable"].value
    # Dagster never prunes its log
    assert len(json.dumps({k: str(v.value) for k, v in found.items()})) < 180_000


def test_the_job_report_makes_the_corpus_s_page_and_nothing_else(ran: Ran, own_root: Settings) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(own_root, instance, "report")
        assert result.success
        assert materialised(result) == {"selection_report"}
        assert {e.check_name for e in result.get_asset_check_evaluations() if e.passed} == {
            "rows_accounted_for",
            "made_under_these_settings",
            "every_snapshot_reported",
            "report_is_current",
        }
        found = metadata(result, "selection_report")
        assert Path(str(found["page"].value)) == store(own_root).current("selection_report").path("report")
        assert (found["snapshots"].value, found["waiting"].value, found["rows_in"].value) == (2, 0, 130)
        assert current(own_root, instance).passed


def test_a_missing_snapshot_is_a_warning_and_the_rest_is_reported(own_root: Settings) -> None:
    (store(own_root).folder("fineweb_mask_manifest", SECOND) / POINTER).unlink()
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(own_root, instance, "report")
        assert result.success
        refused = {e.check_name: e for e in result.get_asset_check_evaluations() if not e.passed}
        assert set(refused) == {"every_snapshot_reported", "report_is_current"}
        for missing in refused.values():
            assert not missing.blocking and missing.severity is dg.AssetCheckSeverity.WARN
            assert missing.metadata["snapshots"].value == f"{SECOND} (begun, but not selected)"
        asked = current(own_root, instance)
        assert not asked.passed and asked.metadata["waiting"].value == 1


@pytest.mark.parametrize("job", ["select", "report"])
def test_what_was_selected_under_other_settings_is_refused(own_root: Settings, job: str) -> None:
    changed = own_root.replace({"select.lambda": 0.3})
    with dg.DagsterInstance.ephemeral() as instance:
        if job == "report":
            result, step = execute(changed, instance, "report"), "selection_report"
        else:
            definitions = build_definitions(changed).resolve_implicit_global_asset_job_def()
            instance.add_dynamic_partitions("cc_snapshot", [FIRST])
            result = definitions.get_subset(asset_selection={dg.AssetKey("snapshot_report")}).execute_in_process(
                instance=instance, partition_key=FIRST, raise_on_error=False
            )
            step = "snapshot_report"
        assert not result.success and materialised(result) == set()
        assert "select.lambda = 0.5 (in force: 0.3)" in failure(result, step)
        (check,) = [e for e in result.get_asset_check_evaluations() if not e.passed]
        assert check.check_name == "made_under_these_settings" and check.blocking


def test_no_snapshot_s_asset_leads_to_the_corpus_s_report(ran: Ran) -> None:
    graph = build_definitions(ran.settings).resolve_asset_graph()
    node = graph.get(dg.AssetKey("selection_report"))
    assert node.partitions_def is None and not node.parent_keys
