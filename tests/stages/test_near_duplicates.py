"""near_duplicates: SemDeDup against its definition, whatever the sharding, and what the candidates and the manifest
make of it."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dagster_datamask.accelerator import Accelerator, MemoryPlanError
from dagster_datamask.shards.order import tie_hash
from dagster_datamask.stages import near_duplicates as module
from dagster_datamask.stages.base import Outcome, Run
from tests.conftest import SNAPSHOTS
from tests.project import Project
from tests.stages.conftest import copied, failed, rows_of, tree
from tests.stages.synthetic import DIMENSION, SNAPSHOT, Row, project

Finished = tuple[Project, dict[str, Outcome]]


def vectors_of(rows: Sequence[Row]) -> np.ndarray:
    z = np.array([r.vector for r in rows], np.float16).astype(np.float64)
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def by_definition(rows: Sequence[Row]) -> dict[str, tuple[float, str | None]]:
    """{id: (its largest cosine to an earlier one of its cluster, that one's id)}, −1 and None for a first."""
    clusters = defaultdict(list)
    for row in rows:
        clusters[row.cluster].append(row)
    found = {}
    for members in clusters.values():
        ties = dict(zip([r.id for r in members], tie_hash([r.id for r in members]).tolist(), strict=True))
        members.sort(key=lambda r: (r.closeness, ties[r.id]))
        cosines = vectors_of(members) @ vectors_of(members).T
        for k, row in enumerate(members):
            best = int(np.argmax(cosines[k, :k])) if k else -1
            found[row.id] = (float(cosines[k, best]), members[best].id) if k else (-1.0, None)
    return found


def stands_for(doc_id: str, found: dict[str, tuple[float, str | None]], kept: set[str]) -> str | None:
    """The kept document that the way over nearest earlier ones ends at."""
    at: str | None = doc_id
    while at is not None and at not in kept:
        at = found[at][1]
    return at


@st.composite
def documents(draw: st.DrawFn) -> list[Row]:
    """Up to 12 documents in up to 3 clusters, some of them copies up to a little noise."""
    n = draw(st.integers(0, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    centres = rng.normal(size=(4, DIMENSION))
    return [
        Row(
            f"d{k}",
            decision=None if rng.random() < 0.8 else "pruned",
            vector=(centres[rng.integers(0, 4)] + 0.2 * rng.normal(size=DIMENSION)).tolist(),
            cluster=int(rng.integers(0, 3)),
            closeness=float(rng.integers(0, 4)) / 4,
        )
        for k in range(n)
    ]


@given(documents(), st.floats(0, 2), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_it_is_semdedup_for_any_order_and_sharding(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], epsilon: float, shards: int, random: object
) -> None:
    random.shuffle(rows)  # type: ignore[attr-defined]
    pieces = [rows[k::shards] for k in range(shards)]
    own = project(tmp_path_factory.mktemp("near"), pieces, **{"clean.epsilon": epsilon})
    outcome = own.stage("near_duplicates", SNAPSHOT)
    told = rows_of(outcome.published)
    survivors = [r for r in rows if r.survives]
    found = by_definition(survivors)
    kept = {name for name, (largest, _) in found.items() if largest <= 1 - epsilon}
    assert told["doc_id"].to_list() == [r.id for piece in pieces for r in piece if r.survives]
    z = dict(zip([r.id for r in survivors], vectors_of(survivors), strict=True)) if survivors else {}
    for row in told.to_dicts():
        if row["doc_id"] in kept:
            assert row["kept_id"] is row["similarity"] is None
        else:
            assert row["kept_id"] == stands_for(row["doc_id"], found, kept)
            assert row["similarity"] == pytest.approx(float(z[row["doc_id"]] @ z[row["kept_id"]]), abs=1e-6)
    assert outcome.counts.get("kept", 0) == len(kept)
    # no group loses every member
    clusters = {r.id: r.cluster for r in survivors}
    assert {clusters[name] for name in kept} == set(clusters.values())


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_hardly_any_documents(tmp_path: Path, rows: int) -> None:
    own = project(tmp_path, [[Row(f"d{k}", closeness=k / 4) for k in range(rows)]])
    outcome = own.stage("near_duplicates", SNAPSHOT)
    told = rows_of(outcome.published).to_dicts()
    assert [row["kept_id"] for row in told] == [None, "d0"][:rows]
    assert [row["similarity"] for row in told] == [None, 1.0][:rows]
    assert outcome.facts == {"epsilon": 0.05, "kept": min(rows, 1), "near_duplicates": max(0, rows - 1)}


def test_epsilon_is_the_edge(tmp_path: Path) -> None:
    """At 1 − ε itself a document stays: it goes where its cosine is greater."""
    own = project(tmp_path, [[Row("a", closeness=0.1), Row("b", closeness=0.2)]], **{"clean.epsilon": 0.0})
    assert own.stage("near_duplicates", SNAPSHOT).facts["near_duplicates"] == 0


def test_files_hold_whole_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows = [
        Row(f"d{k}", vector=rng.normal(size=DIMENSION).tolist(), cluster=k % 7, closeness=k / 60) for k in range(60)
    ]
    whole = rows_of(project(tmp_path / "whole", [rows[:25], rows[25:]]).stage("near_duplicates", SNAPSHOT).published)
    monkeypatch.setattr(module, "_GATHERED", 10)
    own = project(tmp_path / "parts", [rows[:25], rows[25:]])
    parts = rows_of(own.stage("near_duplicates", SNAPSHOT).published)
    assert any("7 of 7 parts" in line for line in own.log)
    assert parts.equals(whole)


def test_a_cluster_larger_than_the_memory_plan_is_an_error_before_any_work(tmp_path: Path) -> None:
    own = project(tmp_path, [[Row(f"d{k}") for k in range(50)]])
    run = own.run()
    little = Run(run.store, run.settings, run.in_force, Accelerator(memory_limit_gb=1e-6), run.log)
    with pytest.raises(MemoryPlanError, match=r"comparing 50 documents .* raise cluster.k"):
        module.near_duplicates(little, own.source, SNAPSHOT)


def removing(finished: Finished, root: Path, **settings: object) -> Project:
    """The finished project on a copy, near-duplicates of half a cosine found and removed."""
    return copied(finished[0], root).with_settings(
        **{"clean.near_duplicates": "remove", "clean.epsilon": 0.3, "select.compare_steps": 0, **settings}
    )


@pytest.mark.parametrize("scope", ["split", "snapshot", "corpus"])
def test_what_is_removed_cannot_be_chosen_and_the_manifest_says_why(
    finished: Finished, tmp_path: Path, scope: str
) -> None:
    own = removing(finished, tmp_path / "root", **{"select.scope": scope, "select.budget": "4"})
    alike = rows_of(own.stage("near_duplicates", SNAPSHOTS[0]).published)
    gone = {row["doc_id"]: row for row in alike.filter(pl.col("kept_id").is_not_null()).to_dicts()}
    assert 0 < len(gone) < len(alike)
    for name in (*(("corpus_selection_state",) if scope == "corpus" else ()), "datamask_masks"):
        outcome = own.stage(name, "" if name == "corpus_selection_state" else SNAPSHOTS[0])
    assert outcome.facts["pool"] == len(alike) - len(gone)
    assert not set(rows_of(outcome.published)["doc_id"]) & set(gone)
    manifest = own.stage("fineweb_mask_manifest", SNAPSHOTS[0])
    assert manifest.published is not None
    rows = rows_of(manifest.published).filter(pl.col("stage") == "near_duplicates")
    assert set(rows["doc_id"]) == set(gone)
    assert set(rows["decision"]) == {"duplicate"}
    for row in rows.to_dicts():
        pair = gone[row["doc_id"]]
        assert row["reason"] == f"near-duplicate of {pair['kept_id']}, cosine {pair['similarity']:.4f}"
    own.stage("snapshot_report", SNAPSHOTS[0])


def test_a_mask_that_was_made_with_them_is_refused_where_they_are_removed(finished: Finished, tmp_path: Path) -> None:
    own = removing(finished, tmp_path / "root")
    own.stage("near_duplicates", SNAPSHOTS[0])
    outcome = own.stage("fineweb_mask_manifest", SNAPSHOTS[0])
    assert outcome.published is None
    why = failed(outcome)["made_under_these_settings"]["different"]
    assert "datamask_masks: clean.near_duplicates = 'report' (in force: 'remove')" in why


def test_made_again_it_has_the_same_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [
        Row(f"d{k}", vector=rng.normal(size=DIMENSION).tolist(), cluster=k % 3, closeness=k / 30) for k in range(30)
    ]
    trees = []
    for name in ("first", "second"):
        own = project(tmp_path / name, [rows])
        own.stage("near_duplicates", SNAPSHOT)
        trees.append(tree(own.store.folder("near_duplicates", SNAPSHOT)))
    assert trees[0] == trees[1]
