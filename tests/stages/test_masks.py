"""Masks of a snapshot: exact sizes over splits, and bounds against every mask there is."""

import itertools
import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from dagster_datamask.selection.budgets import largest_remainder
from dagster_datamask.settings import SettingsError
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.stages.base import Outcome
from tests.conftest import SNAPSHOTS
from tests.project import Project, write_shard
from tests.stages.conftest import copied, failed, rows_of, tree

Finished = tuple[Project, dict[str, Outcome]]
SNAPSHOT = SNAPSHOTS[0]
N, POOL = 65, 36
SOLVERS = ("policy_gradient", "certified", "top_k", "random")


@pytest.fixture
def made(finished: Finished, tmp_path: Path) -> Project:
    """The finished project on a root of its own."""
    return copied(finished[0], tmp_path / "root")


def masks(project: Project, **values: object) -> Outcome:
    changes = {f"select.{name}": value for name, value in values.items()}
    return project.with_settings(**changes).stage("datamask_masks", SNAPSHOT)


def pool_of(project: Project, snapshot: str = SNAPSHOT) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(ids, float64 unit vectors, quality) of the documents that can be chosen, read without the stage's own code."""
    quality = dict(rows_of(project.store.current("pruned_documents", snapshot)).select("doc_id", "quality").iter_rows())
    embedded = project.store.current("e5_embeddings", snapshot)
    ids, vectors = [], []
    for shard in embedded.shards:
        for table in read_batches(embedded.path(shard), None, 100):
            ids += table["doc_id"].to_pylist()
            vectors += table["embedding"].to_pylist()
    wide = np.array(vectors, dtype=np.float64)
    return ids, wide / np.linalg.norm(wide, axis=1, keepdims=True), np.array([quality[i] for i in ids])


def worth(mask: list[int], vectors: np.ndarray, scaled: np.ndarray, lam: float) -> float:
    mean = vectors[mask].mean(axis=0)
    return float(lam * scaled[mask].mean() - (1 - lam) * (mean @ mean))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("split", [1000, 10])
def test_every_solver_meets_the_budget_exactly_and_is_certified(made: Project, solver: str, split: int) -> None:
    outcome = masks(made, solver=solver, split=split, steps=20, budget="20%")
    rows = rows_of(outcome.published)
    assert len(rows) == POOL
    assert rows["selected"].sum() == outcome.facts["kept"] == 13  # floor(0.2 * 65 + 0.5)
    assert rows["doc_id"].to_list() == pool_of(made)[0]
    assert outcome.facts["certificate"]["gap"] >= 0
    assert not failed(outcome)
    assert outcome.facts["splits"] == rows["split"].n_unique() == (1 if split == 1000 else 4)
    assert (outcome.facts["beside"] is None) == (solver == "policy_gradient")


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("split", [9, 16])
def test_splits_share_the_budget_by_largest_remainder_and_their_union_is_valued_as_one(
    made: Project, lam: float, split: int
) -> None:
    outcome = masks(made, split=split, **{"lambda": lam})
    rows = rows_of(outcome.published)
    ids, vectors, quality = pool_of(made)
    sizes = rows["split"].value_counts().sort("split")["count"].to_list()
    assert max(sizes) <= split
    kept = [rows.filter(pl.col("split") == k)["selected"].sum() for k in range(len(sizes))]
    assert kept == largest_remainder(7, sizes, sizes)
    for k in range(len(sizes)):
        assert sorted(rows.filter(pl.col("split") == k)["rank"]) == list(range(1, sizes[k] + 1))

    constants = made.store.current("quality_calibration").facts
    scaled = (quality - constants["q_lo"]) / (constants["q_hi"] - constants["q_lo"])
    chosen = [ids.index(i) for i in rows.filter("selected")["doc_id"]]
    facts = outcome.facts
    assert facts["value"] == pytest.approx(worth(chosen, vectors, scaled, lam), abs=1e-12)
    assert facts["quality_raw"] == pytest.approx(quality[chosen].mean(), abs=1e-12)
    certificate = facts["certificate"]
    assert certificate["gap"] == certificate["upper_bound"] - facts["value"] >= 0
    folder = outcome.published.folder / "splits"
    splits = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]
    weighted = sum(s["kept"] * s["certificate"]["gap"] for s in splits) / 7
    assert facts["split_gaps_weighted"] == pytest.approx(weighted, abs=1e-12)
    assert weighted >= 0
    # no exchange of one document lifts the mask over the bound, and the expectation is that of uniform masks
    outside = [k for k in range(len(ids)) if k not in chosen]
    best = max(worth([*(c for c in chosen if c != o), i], vectors, scaled, lam) for o in chosen for i in outside)
    assert best <= certificate["upper_bound"]
    total = vectors.sum(axis=0)
    cosine = (total @ total - len(ids)) / (len(ids) * (len(ids) - 1))
    assert certificate["baseline"] == pytest.approx(
        lam * scaled.mean() - (1 - lam) * (1 / 7 + (1 - 1 / 7) * cosine), abs=1e-12
    )


@pytest.mark.parametrize("lam", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("split", [3, 100])
def test_no_mask_of_the_pool_is_worth_more_than_the_bound(
    project: Project, tmp_path: Path, lam: float, split: int
) -> None:
    write_shard(tmp_path, "S", "a", 6)
    write_shard(tmp_path, "S", "b", 5)
    small = project.with_settings(
        **{"source.url": str(tmp_path), "prune.ratio": 0.0, "select.lambda": lam, "select.split": split}
    ).with_settings(**{"select.budget": "4"})
    for name in ("raw_shards", "dclm_scores", "edu_scores", "wiki_scores", "quality_scores", "pruned_documents"):
        small.stage(name, "S")
    small.stage("e5_embeddings", "S")
    outcome = small.stage("datamask_masks", "S")
    ids, vectors, quality = pool_of(small, "S")
    constants = small.store.current("quality_calibration").facts
    scaled = (quality - constants["q_lo"]) / (constants["q_hi"] - constants["q_lo"])
    best = max(worth(list(mask), vectors, scaled, lam) for mask in itertools.combinations(range(len(ids)), 4))
    assert len(ids) == 11
    assert outcome.facts["splits"] >= (4 if split == 3 else 1)
    assert outcome.facts["value"] <= best + 1e-12
    assert best <= outcome.facts["certificate"]["upper_bound"]


@pytest.mark.parametrize(
    ("budget", "kept"), [("0", 0), ("0%", 0), ("1", 1), ("35", 35), (str(POOL), POOL), ("2.5%", 2), ("0.7%", 0)]
)
@pytest.mark.parametrize("split", [1000, 12])
def test_budgets_to_their_ends(made: Project, budget: str, kept: int, split: int) -> None:
    outcome = masks(made, budget=budget, split=split)
    assert (
        rows_of(outcome.published)["selected"].sum() == outcome.facts["kept"] == outcome.counts.get("kept", 0) == kept
    )
    assert outcome.facts["certificate"]["gap"] >= 0
    assert outcome.facts["certificate"]["feasible_set"]["documents"] == POOL
    assert outcome.facts["certificate"]["feasible_set"]["budget"] == kept


def test_a_budget_above_the_documents_names_both(made: Project) -> None:
    with pytest.raises(SettingsError, match=rf"select\.budget, snapshot {SNAPSHOT}: budget '66' asks .* the 65 doc"):
        masks(made, budget="66")


@pytest.mark.parametrize("budget", ["37", "65"])
def test_a_budget_above_the_survivors_is_an_error_per_snapshot(made: Project, budget: str) -> None:
    with pytest.raises(SettingsError, match=r"of the 65 documents of .*, but pruning and embedding left 36; lower sel"):
        masks(made, budget=budget)


@pytest.mark.parametrize("split", [1000, 9])
def test_with_a_frozen_threshold_all_survivors_are_kept_and_the_shortfall_told(made: Project, split: int) -> None:
    frozen = made.with_settings(**{"prune.threshold": "frozen", "select.budget": "100%", "select.split": split})
    pruned = frozen.stage("pruned_documents", SNAPSHOT)
    threshold = frozen.store.current("quality_calibration").facts["prune_threshold"]
    rows = rows_of(pruned.published)
    assert (rows["decision"].is_null() == (rows["quality"] >= threshold)).all()
    survivors = pruned.counts["survives"]
    assert 0 < survivors < N
    for name in ("e5_embeddings", "kmeans_clusters"):
        frozen.stage(name, SNAPSHOT)
    outcome = frozen.stage("datamask_masks", SNAPSHOT)
    assert (outcome.facts["kept"], outcome.facts["short_by"]) == (survivors, N - survivors)
    manifest = frozen.stage("fineweb_mask_manifest", SNAPSHOT)
    assert not failed(manifest)
    assert (manifest.facts["kept"], manifest.facts["short_by"]) == (survivors, N - survivors)


@pytest.mark.parametrize("scale", ["minmax", "per_pool", "zscore", "raw"])
def test_every_scale_is_certified_and_a_union_without_one_objective_says_so(made: Project, scale: str) -> None:
    one = masks(made, scale=scale)
    assert one.facts["certificate"]["gap"] >= 0
    assert (one.facts["constants"] is None) == (scale != "minmax")
    several = masks(made, scale=scale, split=12)
    assert several.facts["kept"] == 7
    if scale in ("minmax", "raw"):
        assert several.facts["certificate"]["gap"] >= 0
    else:
        assert several.facts["value"] is several.facts["certificate"]["gap"] is None
        assert several.facts["certificate"]["reason"].startswith(f"scale {scale} differs between splits")
        assert several.published is not None


def test_two_runs_give_the_same_bytes_and_other_seeds_other_splits(made: Project, tmp_path: Path) -> None:
    twin = copied(made, tmp_path / "twin")
    trees = []
    for project in (made, twin):
        for solver in SOLVERS:
            masks(project, solver=solver, split=10, steps=15, final="sampled" if solver == "policy_gradient" else "top")
        trees.append(tree(project.store.root))
    assert trees[0] == trees[1]
    one, two = (rows_of(masks(made, split=10, seed=seed).published)["split"] for seed in (0, 1))
    assert one.to_list() != two.to_list()


def test_lambda_zero_needs_no_calibration(made: Project) -> None:
    with_it = masks(made, **{"lambda": 0.0})
    (made.store.root / "quality_calibration" / "current.json").unlink()
    without = masks(made, **{"lambda": 0.0})
    assert without.published.fingerprint == with_it.published.fingerprint
    assert "quality_calibration" not in without.published.inputs


def publish_vectors(project: Project, change: dict[str, str], snapshot: str = SNAPSHOT) -> None:
    """e5_embeddings again, the vectors of the ids in `change` null for the reason given."""
    embedded = project.store.current("e5_embeddings", snapshot)
    with project.store.generation(
        "e5_embeddings",
        snapshot,
        code_version=embedded.code_version,
        settings=embedded.settings,
        inputs={**embedded.inputs, "vectors": "changed by a test"},
    ) as generation:
        records = []
        for shard in embedded.shards:
            table = pa.concat_tables(read_batches(embedded.path(shard), None, 100))
            ids = table["doc_id"].to_pylist()
            vectors = [None if i in change else v for i, v in zip(ids, table["embedding"].to_pylist(), strict=True)]
            changed = pa.table(
                {"doc_id": ids, "embedding": vectors, "reason": [change.get(i) for i in ids]}, schema=table.schema
            )
            with pa.ipc.new_file(str(generation.folder / f"{shard}.arrow"), table.schema) as writer:
                writer.write_table(changed)
            was = embedded.record(shard)
            records.append(generation.complete(shard, ".arrow", rows=len(ids), rows_in=was.rows_in, counts=was.counts))
        generation.publish(records, ".arrow", embedded.facts)


def test_a_document_without_a_vector_is_no_candidate_and_stands_in_the_manifest(made: Project) -> None:
    ids = pool_of(made)[0]
    change = {ids[0]: "non_finite", ids[20]: "zero_vector", ids[-1]: "non_finite"}
    publish_vectors(made, change)
    assert made.stage("kmeans_clusters", SNAPSHOT).counts == {"assigned": POOL - 3, "no_vector": 3}
    outcome = masks(made, budget=str(POOL - 3))
    assert sorted(rows_of(outcome.published)["doc_id"]) == sorted(set(ids) - set(change))
    with pytest.raises(SettingsError, match="left 33"):
        masks(made, budget=str(POOL - 2))
    changed = made.with_settings(**{"select.budget": str(POOL - 3)})
    manifest = changed.stage("fineweb_mask_manifest", SNAPSHOT)
    assert manifest.facts["bad_embedding"] == 3
    for row in rows_of(manifest.published).filter(pl.col("decision") == "bad_embedding").to_dicts():
        assert (row["stage"], row["reason"]) == ("e5_embeddings", change[row["doc_id"]])
        assert row["cluster"] is row["split"] is row["score"] is None
        assert row["quality"] is not None


def test_embedding_every_document_changes_nothing_of_the_mask(made: Project, finished: Finished) -> None:
    everything = made.with_settings(**{"embed.documents": "all"})
    assert everything.stage("e5_embeddings", SNAPSHOT).facts["documents"] == N
    everything.stage("kmeans_clusters", SNAPSHOT)
    again = everything.stage("datamask_masks", SNAPSHOT)
    assert rows_of(again.published).equals(rows_of(finished[1]["datamask_masks"].published))
