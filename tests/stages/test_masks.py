"""Masks of a snapshot: exact sizes over splits, and bounds against every mask there is."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.selection.budgets import largest_remainder
from dagster_datamask.settings import SettingsError
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.stages.base import Outcome
from tests.conftest import SNAPSHOTS
from tests.project import SNAPSHOT_STAGES, Project, write_shard
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


@pytest.mark.parametrize(
    ("scope", "split", "quota"), [("split", 1000, "none"), ("split", 9, "cluster"), ("snapshot", 1000, "cluster")]
)
def test_tokens_are_kept_up_to_the_budget_and_counted_in_the_manifest(
    made: Project, scope: str, split: int, quota: str
) -> None:
    asked = made.with_settings(
        **{"select.budget": "900tok", "select.scope": scope, "select.split": split, "select.quota": quota}
    )
    outcome = asked.stage("datamask_masks", SNAPSHOT)
    assert not failed(outcome)
    rows = rows_of(outcome.published)
    counts = rows_of(asked.store.current("raw_shards", SNAPSHOT)).select("doc_id", "token_count")
    kept = rows.filter("selected").join(counts, on="doc_id")["token_count"].to_list()
    facts = outcome.facts
    assert (facts["unit"], facts["budget"], facts["short_by"]) == ("tokens", 900, 0)
    assert sum(kept) == facts["tokens"] <= 900
    assert len(kept) == facts["kept"]
    assert facts["certificate"]["feasible_set"]["unit"] == "tokens"
    assert facts["certificate"]["gap"] >= 0
    manifest = asked.stage("fineweb_mask_manifest", SNAPSHOT)
    assert not failed(manifest)
    assert manifest.facts["tokens_kept"] == sum(kept)
    sidecar = json.loads((manifest.published.folder / "manifest.json").read_text())
    assert sidecar["budget"] == {"asked": 900, "met": sum(kept), "unit": "tokens", "short_by": 0, "n": N}
    assert sidecar["scope"] == scope
    quotas = sidecar["quotas"]
    if quota == "none":
        assert quotas is None
    else:
        assert sum(row["asked"] for row in quotas) == 900
        assert sum(row["kept"] for row in quotas) == sum(kept)
        assert all(row["kept"] <= row["asked"] for row in quotas)


@pytest.mark.parametrize(("budget", "message"), [("9e9tok", "asks for more than the"), ("4500tok", "embedding left")])
def test_more_tokens_than_there_are_or_than_pruning_left_name_both(made: Project, budget: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        masks(made, budget=budget)


def test_with_a_frozen_threshold_all_tokens_are_kept_and_the_shortfall_told(made: Project) -> None:
    frozen = made.with_settings(**{"prune.threshold": "frozen", "select.budget": "4500tok"})
    for name in ("pruned_documents", "e5_embeddings", "kmeans_clusters"):
        frozen.stage(name, SNAPSHOT)
    outcome = frozen.stage("datamask_masks", SNAPSHOT)
    assert outcome.facts["tokens"] + outcome.facts["short_by"] == 4500
    assert rows_of(outcome.published)["selected"].all()
    assert not failed(outcome)


STAGES_BEFORE = SNAPSHOT_STAGES[: SNAPSHOT_STAGES.index("kmeans_clusters") + 1]


def small(project: Project, source: Path, **values: object) -> Project:
    """Another source, nothing pruned, up to the clusters."""
    changed = project.with_settings(**{"source.url": str(source), "prune.ratio": 0.0})
    changed.stage("quality_calibration", "")
    changed.stage("kmeans_centroids", "")
    for name in STAGES_BEFORE:
        changed.stage(name, "S")
    return changed.with_settings(**{f"select.{name}": value for name, value in values.items()})


def test_a_document_without_tokens_makes_a_token_budget_impossible(project: Project, tmp_path: Path) -> None:
    write_shard(tmp_path, "S", "a", 3)
    write_shard(tmp_path, "S", "b", 3, tokens=[5, None, 0])
    with pytest.raises(SettingsError, match=r"of S, shard b, document 'S/b/1' has token_count None; .* mend"):
        small(project, tmp_path, budget="5tok").stage("datamask_masks", "S")


def test_a_domain_is_the_host_of_a_url_and_what_it_cannot_give_goes_to_the_others(
    project: Project, tmp_path: Path
) -> None:
    urls = [f"https://WWW.a.org:80/{k}" for k in range(6)] + ["http://b.org"] * 2 + [None, "no url", "http://[", "x"]
    write_shard(tmp_path, "S", "a", 12, urls=urls)
    wanted = small(project, tmp_path, quota="domain", budget="50%")
    outcome = wanted.stage("datamask_masks", "S")
    told = {row["group"]: (row["asked"], row["kept"]) for row in outcome.facts["quotas"]}
    assert told == {"": (2, 2), "b.org": (1, 1), "www.a.org": (3, 3)}
    assert outcome.facts["redistributed"] == 0
    # of what pruning took from the largest, the others get their part
    pruned = rows_of(wanted.store.current("pruned_documents", "S"))
    gone = dict.fromkeys(pruned["doc_id"].to_list()[:5], "non_finite")
    publish_vectors(wanted, gone, "S")
    again = wanted.stage("datamask_masks", "S")
    told = {row["group"]: (row["asked"], row["kept"]) for row in again.facts["quotas"]}
    assert told == {"": (2, 3), "b.org": (1, 2), "www.a.org": (3, 1)}
    assert (again.facts["redistributed"], again.facts["kept"], again.facts["short_by"]) == (2, 6, 0)
    assert not failed(again)
    # no url column at all: one domain
    table = pq.read_table(tmp_path / "data" / "S" / "a.parquet").drop_columns(["url"])
    pq.write_table(table, tmp_path / "data" / "S" / "a.parquet")
    for name in STAGES_BEFORE:
        wanted.stage(name, "S")
    assert wanted.stage("datamask_masks", "S").facts["quotas"] is None


@pytest.mark.parametrize("split", [1000, 9])
def test_near_duplicates_name_the_document_that_was_kept_and_how_alike_they_are(made: Project, split: int) -> None:
    outcome = masks(made, solver="semdedup", split=split)
    rows = rows_of(outcome.published)
    ids, vectors, _ = pool_of(made)
    place = {i: k for k, i in enumerate(ids)}
    duplicates = rows.filter(pl.col("reason") == "near_duplicate")
    assert len(duplicates) > 0
    assert not duplicates["selected"].any()
    for row in duplicates.to_dicts():
        cosine = float(vectors[place[row["doc_id"]]] @ vectors[place[row["kept_id"]]])
        assert row["similarity"] == pytest.approx(cosine, abs=1e-6)
        assert rows["split"][place[row["doc_id"]]] == rows["split"][place[row["kept_id"]]]
    rest = rows.filter(pl.col("reason").is_null())
    assert rest["kept_id"].null_count() == rest["similarity"].null_count() == len(rest)
    assert outcome.facts["kept"] == 7
    made = made.with_settings(**{"select.solver": "semdedup", "select.split": split})
    manifest = rows_of(made.stage("fineweb_mask_manifest", SNAPSHOT).published)
    assert (manifest["reason"] == "near_duplicate").sum() == len(duplicates)


@pytest.mark.parametrize(
    ("solver", "objective"),
    [
        ("greedy", "facility_location"),
        ("greedy", "pws=0.5,facility_location=0.5"),
        ("conditional_gradient", "disf"),
        ("certified", "disf_second_moment"),
        ("policy_gradient", "pws=0.7,disf=0.3"),
    ],
)
def test_other_objectives_are_kept_to_the_budget_and_valued_where_they_can_be(
    made: Project, solver: str, objective: str
) -> None:
    one = masks(made, solver=solver, objective=objective, steps=20, compare_steps=0)
    assert (one.facts["objective"], one.facts["kept"]) == (objective, 7)
    assert set(one.facts["metrics"]) == {part.partition("=")[0] for part in objective.split(",")}
    certificate = one.facts["certificate"]
    assert (certificate["gap"] is None) == ("disf" in one.facts["metrics"])
    if certificate["gap"] is None:
        assert "no known bound" in certificate["reason"]
    several = masks(made, solver=solver, objective=objective, steps=20, compare_steps=0, split=12)
    assert several.facts["kept"] == 7
    assert several.facts["value"] is several.facts["certificate"]["gap"] is None
    assert several.facts["certificate"]["reason"].startswith(f"objective {objective} is valued within a split alone")
    assert not failed(several)


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_a_snapshot_as_one_pool_has_the_mask_of_its_one_split(made: Project, lam: float) -> None:
    one = masks(made, scope="snapshot", **{"lambda": lam})
    same = masks(made, compare_steps=0, **{"lambda": lam})
    assert rows_of(one.published).equals(rows_of(same.published))
    for name in ("value", "quality", "quality_raw", "diversity", "kept", "n", "pool"):
        assert one.facts[name] == same.facts[name], name
    for name in ("upper_bound", "gap", "baseline"):
        assert one.facts["certificate"][name] == same.facts["certificate"][name], name
    assert one.facts["certificate"]["feasible_set"]["scope"] == "snapshot"
    assert same.facts["certificate"]["feasible_set"]["scope"] == "split"


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
            lost = Counter(f"bad_embedding:{change[i]}" for i in ids if i in change)
            counts = {**was.counts, **lost, "embedded": len(ids) - lost.total()}
            records.append(generation.complete(shard, ".arrow", rows=len(ids), rows_in=was.rows_in, counts=counts))
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
