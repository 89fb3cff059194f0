"""select.scope = corpus as Dagster runs it: embed, solve_corpus, select, and what a later snapshot makes stale."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import StaleStatus

from dagster_datamask.definitions import build_definitions
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from tests.assets.conftest import execute, failure, materialised
from tests.assets.test_staleness import not_fresh
from tests.conftest import SNAPSHOTS

FIRST, SECOND = SNAPSHOTS
SELECTED = {
    *("e5_embeddings", "kmeans_clusters", "datamask_masks", "fineweb_mask_manifest", "fineweb_mask"),
    "snapshot_report",
}


@pytest.fixture
def corpus(own_root: Settings) -> Settings:
    """The finished project under scope corpus; the second snapshot has no embeddings yet."""
    (Path(own_root.storage.root) / "e5_embeddings" / SECOND / "current.json").unlink()
    return own_root.replace({"select.scope": "corpus", "select.compare_steps": 0})


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def checks(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    return {e.check_name: e for e in result.get_asset_check_evaluations() if not e.passed}


def test_from_embeddings_to_masks_and_a_later_snapshot(corpus: Settings, instance: dg.DagsterInstance) -> None:
    assert execute(corpus, instance, "fit_global").success
    assert execute(corpus, instance, "embed", FIRST).success
    refused = execute(corpus, instance, "select", FIRST)
    assert "corpus_selection_state is not published" in failure(refused, "datamask_masks")
    assert "run the job solve_corpus first" in failure(refused, "datamask_masks")

    first = execute(corpus, instance, "solve_corpus")
    assert first.success
    assert materialised(first) == {"corpus_selection_state"}
    (skipped,) = checks(first).values()
    assert (skipped.check_name, skipped.blocking, skipped.severity) == (
        "every_snapshot_embedded",
        False,
        dg.AssetCheckSeverity.WARN,
    )
    assert skipped.metadata["skipped"].value == f"{SECOND} (e5_embeddings not published)"
    (made,) = first.asset_materializations_for_node("corpus_selection_state")
    assert made.metadata["kept"].value == made.metadata["budget"].value == 7
    assert made.metadata["gap"].value >= 0
    chosen = execute(corpus, instance, "select", FIRST)
    assert chosen.success
    assert materialised(chosen) == SELECTED
    assert not_fresh(corpus, instance, FIRST, {"corpus_selection_state"}) == {}
    store = Store(Path(corpus.storage.root))
    before = {name: store.current(name, FIRST).fingerprint for name in SELECTED}

    assert execute(corpus, instance, "embed", SECOND).success
    late = execute(corpus, instance, "select", SECOND)
    assert f"{SECOND} is not in corpus_selection_state; run the job solve_corpus" in failure(late, "datamask_masks")
    asked = build_definitions(corpus).resolve_implicit_global_asset_job_def()
    key = dg.AssetCheckKey(dg.AssetKey("corpus_selection_state"), "every_embedded_snapshot_solved")
    alone = asked.get_subset(asset_selection=set(), asset_check_selection={key}).execute_in_process(instance=instance)
    (waiting,) = checks(alone).values()
    assert (waiting.metadata["waiting"].value, waiting.metadata["snapshots"].value) == (1, f"{SECOND} (new)")

    second = execute(corpus, instance, "solve_corpus")
    assert second.success
    assert checks(second) == {}
    # the state is another one, so the masks look at it again, find their part as it was, and nothing follows
    assert not_fresh(corpus, instance, FIRST, {"corpus_selection_state"}) == {"datamask_masks": StaleStatus.STALE}
    assert execute(corpus, instance, "select", FIRST).success
    assert not_fresh(corpus, instance, FIRST, {"corpus_selection_state"}) == {}
    assert {name: store.current(name, FIRST).fingerprint for name in SELECTED} == before
    assert execute(corpus, instance, "select", SECOND).success
    assert store.current("fineweb_mask", SECOND).rows == 7


def test_a_value_changed_in_the_launchpad_is_an_experiment_that_the_manifest_refuses(
    corpus: Settings, instance: dg.DagsterInstance
) -> None:
    ops = {"corpus_selection_state": {"config": {"lambda": 0.3}}}
    result = execute(corpus, instance, "solve_corpus", ops=ops)
    (made,) = result.asset_materializations_for_node("corpus_selection_state")
    assert made.metadata["experiment"].value is True
    refused = execute(corpus, instance, "select", FIRST)
    assert "corpus_selection_state: select.lambda = 0.3 (in force: 0.5)" in failure(refused, "fineweb_mask_manifest")
