"""What Dagster shows as stale after a change: what reads it and what follows, nothing else."""

import shutil
from collections.abc import Set
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from dagster_datamask.definitions import build_definitions
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from dagster_datamask.stages.base import FITTED, STAGES
from tests.assets.conftest import Ran, execute
from tests.conftest import SNAPSHOTS
from tests.project import SNAPSHOT_STAGES, settings_for, write_shard

FIRST, SECOND = SNAPSHOTS
FROM_MANIFEST = {"fineweb_mask_manifest", "fineweb_mask", "snapshot_report"}
FROM_SELECTION = {"datamask_masks", *FROM_MANIFEST}


# those that the scope "split" makes; the state of the corpus is missing there, and rightly so
FITTED_AND_SNAPSHOTS = {*FITTED, *SNAPSHOT_STAGES}


def not_fresh(
    settings: Settings, instance: dg.DagsterInstance, snapshot: str, more: Set[str] = frozenset()
) -> dict[str, StaleStatus]:
    """Assets that the graph would not show as fresh, the global ones included, under these settings."""
    graph = build_definitions(settings).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    found = {
        name: resolver.get_status(dg.AssetKey(name), snapshot if stage.partitioned else None)
        for name, stage in STAGES.items()
        if name in FITTED_AND_SNAPSHOTS | more
    }
    return {name: status for name, status in found.items() if status is not StaleStatus.FRESH}


def test_all_is_fresh_after_a_complete_run(ran: Ran) -> None:
    for snapshot in SNAPSHOTS:
        assert not_fresh(ran.settings, ran.instance, snapshot) == {}


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ({"select.lambda": 0.3}, FROM_SELECTION),
        ({"select.seed": 1}, FROM_SELECTION),
        (
            {"score.edu_max_tokens": 32},
            {
                *("edu_classifier", "quality_calibration", "kmeans_centroids"),
                *(set(SNAPSHOT_STAGES) - {"raw_shards", "dclm_scores", "wiki_scores"}),
            },
        ),
        (
            {"models.wiki_label": "__label__other"},
            {
                *("wiki_classifier", "quality_calibration", "kmeans_centroids"),
                *(set(SNAPSHOT_STAGES) - {"raw_shards", "dclm_scores", "edu_scores"}),
            },
        ),
        ({"models.ultra_label": "__label__other", "compute.processes": 3}, set()),
        # a code version is of an asset, and not of one of its snapshots
        ({"source.set_aside": [f"{SECOND}/000_00000"]}, set(SNAPSHOT_STAGES)),
        ({"cluster.k": 3}, {"kmeans_centroids", "kmeans_clusters", *FROM_MANIFEST}),
        ({"storage.root": "/elsewhere", "compute.memory_limit_gb": 4.0}, set()),
    ],
)
def test_a_changed_setting_makes_stale_what_reads_it_and_what_follows(
    ran: Ran, changed: dict[str, object], stale: set[str]
) -> None:
    found = not_fresh(ran.settings.replace(changed), ran.instance, FIRST)
    assert set(found) == stale
    assert set(found.values()) <= {StaleStatus.STALE}


def test_a_shard_that_is_put_back_into_use_shows_until_its_rows_are_read_again(own_root: Settings) -> None:
    without = own_root.replace({"source.set_aside": [f"{FIRST}/000_00000"]})

    def shows(settings: Settings) -> bool:
        return "raw_shards" in not_fresh(settings, instance, FIRST)

    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(cc_snapshot.name or "", [FIRST])
        for settings, other in ((without, own_root), (own_root, without)):
            job = build_definitions(settings).resolve_implicit_global_asset_job_def()
            job.get_subset(asset_selection={dg.AssetKey("raw_shards")}).execute_in_process(
                instance=instance, partition_key=FIRST
            )
            assert (shows(settings), shows(other)) == (False, True)


def test_a_replaced_shard_makes_its_own_snapshot_stale_once_its_rows_are_read_again(
    tmp_path: Path, ran: Ran, small_source: Path, labels: Path
) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    shutil.copytree(small_source, source)
    shutil.copytree(ran.settings.storage.root, root)
    settings = settings_for(source, root, labels)
    with dg.DagsterInstance.ephemeral() as instance:
        execute(settings, instance, "fit_global")
        for snapshot in SNAPSHOTS:
            assert execute(settings, instance, "full", snapshot).success
        write_shard(source, FIRST, "001_00000", 30)
        read_again = build_definitions(settings).resolve_implicit_global_asset_job_def()
        read_again.get_subset(asset_selection={dg.AssetKey("raw_shards")}).execute_in_process(
            instance=instance, partition_key=FIRST
        )
        # changed data shows where it is read; what reads that follows as soon as it changes in turn
        assert set(not_fresh(settings, instance, FIRST)) == {
            name for name in SNAPSHOT_STAGES if "raw_shards" in STAGES[name].inputs
        }
        assert not_fresh(settings, instance, SECOND) == {}
        assert execute(settings, instance, "full", FIRST).success
        assert not_fresh(settings, instance, FIRST) == {}


@pytest.mark.parametrize("part", ["dclm", *(pytest.param(part, marks=pytest.mark.slow) for part in ("edu", "wiki"))])
def test_a_new_version_of_a_model_makes_exactly_its_scores_stale(own_root: Settings, tmp_path: Path, part: str) -> None:
    """The label file changes under one name: no setting and no code moves, the content of the model alone."""
    labels = tmp_path / f"{part}.parquet"
    shutil.copyfile(own_root.score.model_dump()[f"{part}_labels"], labels)
    settings = own_root.replace({f"score.{part}_labels": str(labels)})
    store = Store(Path(own_root.storage.root))
    with dg.DagsterInstance.ephemeral() as instance:
        assert execute(settings, instance, "fit_global").success
        assert execute(settings, instance, "full", FIRST).success
        assert not_fresh(settings, instance, FIRST) == {}
        before = {name: store.current(name, FIRST).fingerprint for name in SNAPSHOT_STAGES}
        pq.write_table(pq.read_table(labels).slice(0, 60), labels)
        assert execute(settings, instance, "fit_global", only=[f"{part}_classifier"]).success
        # changed data shows where it is read; what reads that follows as soon as it changes in turn
        assert set(not_fresh(settings, instance, FIRST)) == {f"{part}_scores", "quality_calibration"}
        assert execute(settings, instance, "fit_global").success
        assert execute(settings, instance, "full", FIRST).success
        assert not_fresh(settings, instance, FIRST) == {}
        after = {name: store.current(name, FIRST).fingerprint for name in SNAPSHOT_STAGES}
    others = {f"{other}_scores" for other in ("dclm", "edu", "wiki") if other != part}
    assert {name for name in before if before[name] == after[name]} >= {"raw_shards", *others}
    assert before[f"{part}_scores"] != after[f"{part}_scores"]


def test_a_new_ultra_fineweb_model_makes_its_scores_stale_and_nothing_that_selects(
    own_root: Settings, tmp_path: Path
) -> None:
    labels = tmp_path / "ultra.parquet"
    shutil.copyfile(own_root.score.ultra_labels, labels)
    settings = own_root.replace({"score.ultra_labels": str(labels)})
    job = build_definitions(settings).resolve_implicit_global_asset_job_def()

    def make(instance: dg.DagsterInstance, name: str, snapshot: str | None = None) -> None:
        of_one = job.get_subset(asset_selection={dg.AssetKey(name)})
        assert of_one.execute_in_process(instance=instance, partition_key=snapshot).success

    ultra = {"ultra_classifier", "ultra_scores"}
    with dg.DagsterInstance.ephemeral() as instance:
        assert execute(settings, instance, "fit_global").success
        assert execute(settings, instance, "full", FIRST).success
        make(instance, "ultra_classifier")
        make(instance, "ultra_scores", FIRST)
        assert not_fresh(settings, instance, FIRST, ultra) == {}
        pq.write_table(pq.read_table(labels).slice(0, 60), labels)
        make(instance, "ultra_classifier")
        assert set(not_fresh(settings, instance, FIRST, ultra)) == {"ultra_scores"}
