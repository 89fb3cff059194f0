"""The stages of Group-MATES in Dagster: a real run from documents to a manifest, the graph, and what waits for what."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import polars as pl
import pytest

from dagster_datamask import running
from dagster_datamask.definitions import build_definitions
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.source import Source
from tests.conftest import SNAPSHOTS
from tests.project import Project, settings_for
from tests.stages.group_mates import tiny, write_reference

from .conftest import execute, failure, materialised

GOOD, BAD = SNAPSHOTS


@dataclass(frozen=True)
class Staged:
    """Two runs of everything on one instance; of the first, one snapshot lost a shard before it began."""

    settings: Settings
    instance: dg.DagsterInstance
    first: list[running.SnapshotRun]
    second: list[running.SnapshotRun]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory, embedded: Project, labels: Path) -> Iterator[Staged]:
    folder = tmp_path_factory.mktemp("staged")
    shutil.copytree(embedded.store.root, folder / "root")
    shutil.copytree(embedded.settings.source.url, folder / "source")
    overrides = tiny(write_reference(folder / "reference.parquet"), "select.strategy=group_mates")
    settings = settings_for(folder / "source", folder / "root", labels, "select.compare_steps=0", *overrides)
    shard = folder / "source" / "data" / BAD / "001_00000.parquet"
    whole = shard.read_bytes()
    with dg.DagsterInstance.ephemeral() as instance:
        shard.write_bytes(b"no parquet")
        first = running.materialise(settings, Source(settings.source.url), SNAPSHOTS, instance)
        shard.write_bytes(whole)
        second = running.materialise(settings, Source(settings.source.url), SNAPSHOTS, instance)
        yield Staged(settings, instance, first, second)


def test_the_stages_come_in_order_and_a_bad_snapshot_blocks_no_other(staged: Staged) -> None:
    assert [(run.name, run.success) for run in staged.first] == [
        (f"{GOOD} embed", True),
        (f"{BAD} embed", False),
        ("group_mates_fit_1", True),
        (f"{GOOD} group_mates_select_1", True),
        ("group_mates_continue_1", True),
        ("group_mates_fit_2", True),
        (f"{GOOD} group_mates_select_2", True),
        ("group_mates_continue_2", True),
        (f"{GOOD} select", True),
    ]


def test_what_is_fitted_stays_as_it_is_for_a_snapshot_that_comes_later(staged: Staged) -> None:
    assert [run.name for run in staged.second] == [
        *(f"{snapshot} embed" for snapshot in SNAPSHOTS),
        *(f"{snapshot} group_mates_select_1" for snapshot in SNAPSHOTS),
        *(f"{snapshot} group_mates_select_2" for snapshot in SNAPSHOTS),
        *(f"{snapshot} select" for snapshot in SNAPSHOTS),
    ]
    assert all(run.success for run in staged.second)
    store = Store(Path(staged.settings.storage.root))
    assert store.current("stage_1/continued_model").facts["snapshots"] == [GOOD]
    for snapshot in SNAPSHOTS:
        manifest = store.current("fineweb_mask_manifest", snapshot)
        assert manifest.facts["strategy"] == "group_mates" and manifest.facts["kept"] == 7


def test_assets_have_keys_in_their_stage_and_tell_of_it(staged: Staged) -> None:
    event = staged.instance.get_latest_materialization_event(dg.AssetKey(["stage_2", "influence_model"]))
    assert event is not None and event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    assert metadata["card"].value.startswith("# stage_2/influence_model")  # type: ignore[union-attr]
    assert {"spearman_pooled", "alpha", "beta", "clusters", "trajectories_of"} <= metadata.keys()
    used = {row.data["name"]: row.data for row in metadata["trajectories_of"].records}  # type: ignore[union-attr]
    assert set(used) == {"random", "bootstrap"} and set(used["random"]) == {"name", "training", "held_out", "left_out"}
    assert used["random"]["training"] + used["random"]["held_out"] + used["random"]["left_out"] == 12
    trained = staged.instance.get_latest_materialization_event(dg.AssetKey(["stage_1", "continued_model"]))
    assert trained is not None and trained.asset_materialization is not None
    assert {
        "held_out_loss_before",
        "held_out_loss_after",
        "training loss",
    } <= trained.asset_materialization.metadata.keys()


def test_the_summary_counts_what_both_methods_keep(staged: Staged) -> None:
    store = Store(Path(staged.settings.storage.root))
    rows = running.staged_summary(store, staged.settings, SNAPSHOTS)
    assert [(row["stage"], row["chosen"], row["also_in_datamask"]) for row in rows] == [(1, 8, 0), (2, 6, 0)]
    assert all(row["held_out_loss_after"] < row["held_out_loss_before"] for row in rows)
    mask = Project(staged.settings).stage("datamask_masks", GOOD).published
    assert mask is not None
    kept = {
        name: set(pl.read_parquet(published.folder / "*_00000.parquet").filter("selected")["doc_id"])
        for name in ("stage_1/group_mates_selection", "stage_2/group_mates_selection", "datamask_masks")
        if (published := store.current(name, GOOD))
    }
    both = [len(kept[f"stage_{n}/group_mates_selection"] & kept["datamask_masks"]) for n in (1, 2)]
    rows = running.staged_summary(store, staged.settings, SNAPSHOTS)
    assert [row["also_in_datamask"] for row in rows] == both


def test_the_job_full_says_what_has_to_run_first(staged: Staged, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(
        staged.settings.storage.root, root, ignore=lambda folder, names: {"stage_1", "stage_2"} & set(names)
    )
    settings = staged.settings.replace({"storage.root": str(root)})
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(settings, instance, "full", GOOD)
        assert "run the job group_mates_fit_1 first" in failure(result, "stage_1__influence_scores")
        assert {"e5_embeddings", "kmeans_clusters"} <= materialised(result)


def test_no_manifest_is_written_where_the_last_model_cannot_be_made(
    staged: Staged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverges(*args: object, **named: object) -> None:
        raise ValueError("step 26: the loss is nan")

    root = tmp_path / "root"
    shutil.copytree(staged.settings.storage.root, root)
    shutil.rmtree(root / "stage_2" / "continued_model")
    monkeypatch.setattr("dagster_datamask.stages.language_model.pretrain", diverges)
    settings = staged.settings.replace({"storage.root": str(root)})
    with dg.DagsterInstance.ephemeral() as instance:
        runs = running.materialise(settings, Source(settings.source.url), [GOOD], instance)
    assert [(run.name, run.success) for run in runs[-2:]] == [
        (f"{GOOD} group_mates_select_2", True),
        ("group_mates_continue_2", False),
    ]
    assert "the loss is nan" in (runs[-1].failure or "")


def test_without_a_reference_set_nothing_is_run(staged: Staged) -> None:
    settings = staged.settings.replace({"group_mates.reference": ""})
    with (
        dg.DagsterInstance.ephemeral() as instance,
        pytest.raises(SettingsError, match=r"group_mates\.reference is not set"),
    ):
        running.materialise(settings, Source(settings.source.url), SNAPSHOTS, instance)


def test_the_graph_shows_which_checkpoint_chose_which_documents(staged: Staged) -> None:
    def parents(settings: Settings, *key: str) -> set[str]:
        graph = build_definitions(settings).resolve_asset_graph()
        return {parent.to_user_string() for parent in graph.get(dg.AssetKey(list(key))).parent_keys}

    settings = staged.settings
    assert parents(settings, "stage_1", "rollout_sets") == {"warmup_model", "quality_calibration"}
    assert parents(settings, "stage_2", "rollout_sets") == {
        *("warmup_model", "stage_1/continued_model", "quality_calibration")
    }
    assert parents(settings, "stage_2", "continued_model") == {"stage_1/continued_model", "stage_2/influence_model"}
    assert "stage_1/group_mates_selection" in parents(settings, "stage_2", "group_mates_selection")
    assert parents(settings, "group_mates_selection") >= {f"stage_{n}/group_mates_selection" for n in (1, 2)}
    assert "group_mates_selection" in parents(settings, "fineweb_mask_manifest")
    joint = settings.replace({"select.strategy": "joint", "select.influence": 0.2})
    assert {"influence_scores", "e5_embeddings"} <= parents(joint, "datamask_masks")
    assert parents(joint, "influence_scores") == {"stage_2/influence_scores"}
    assert "datamask_masks" in parents(joint, "fineweb_mask_manifest")
