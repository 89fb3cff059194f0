"""The manifest's decisions, what it refuses, and the export that others read."""

import json
import shutil
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest

from dagster_datamask.shards.generations import NotPublished
from dagster_datamask.shards.schemas import ADDED, DECISIONS, MANIFEST, InconsistentFiles
from dagster_datamask.stages import manifest, quality
from dagster_datamask.stages.base import STAGES, Outcome
from dagster_datamask.stages.export import dataset_card
from dagster_datamask.stages.manifest import SIDECAR
from dagster_datamask.stages.selection_report import standing
from tests.conftest import SNAPSHOTS
from tests.project import Project, text_of, write_labels, write_shard
from tests.stages.conftest import WILD, copied, failed, rows_of

Finished = tuple[Project, dict[str, Outcome]]
SNAPSHOT = SNAPSHOTS[0]


@pytest.fixture
def made(finished: Finished, tmp_path: Path) -> Project:
    """The finished project on a root of its own."""
    return copied(finished[0], tmp_path / "root")


def refused(project: Project) -> str:
    """Why the manifest of the snapshot is not published under these settings."""
    before = project.store.current("fineweb_mask_manifest", SNAPSHOT)
    outcome = project.stage("fineweb_mask_manifest", SNAPSHOT)
    assert outcome.published is None
    assert project.store.current("fineweb_mask_manifest", SNAPSHOT) == before
    (why,) = failed(outcome).values()
    return why["different"]


class TestWhatIsSetAside:
    """A setting of shards, of which each snapshot's part matters to that snapshot alone."""

    def test_a_snapshot_made_with_a_shard_that_is_set_aside_since_is_refused(self, made: Project) -> None:
        aside = made.with_settings(**{"source.set_aside": [f"{SNAPSHOT}/001_00000"]})
        assert refused(aside) == f"raw_shards: source.set_aside = [] (in force: ['{SNAPSHOT}/001_00000'])"
        assert standing(made.store, made.settings)[SNAPSHOT] == ""
        assert standing(aside.store, aside.settings)[SNAPSHOT] == (
            f"selected under other settings: source.set_aside = [] (in force: ['{SNAPSHOT}/001_00000'])"
        )

    def test_a_shard_that_is_put_back_into_use_is_refused_until_it_is_read(self, made: Project) -> None:
        whole = made.store.current("raw_shards", SNAPSHOT)
        manifest = made.store.current("fineweb_mask_manifest", SNAPSHOT)
        told = manifest.file(SIDECAR).read_bytes()
        shutil.rmtree(manifest.folder)
        aside = made.with_settings(**{"source.set_aside": [f"{SNAPSHOT}/001_00000"]})
        aside.full(SNAPSHOT)
        why = f"source.set_aside = ['{SNAPSHOT}/001_00000'] (in force: [])"
        assert refused(made) == f"raw_shards: {why}"
        assert standing(made.store, made.settings)[SNAPSHOT] == f"selected under other settings: {why}"
        assert standing(aside.store, aside.settings)[SNAPSHOT] == ""
        # and an export in the same words
        assert failed(dataset_card(made.run()))["made_under_these_settings"]["different"] == f"{SNAPSHOT}: {why}"
        made.full(SNAPSHOT)
        assert made.store.current("raw_shards", SNAPSHOT) == whole
        assert made.store.current("fineweb_mask_manifest", SNAPSHOT).file(SIDECAR).read_bytes() == told

    def test_the_other_snapshots_stay_as_they_are_to_the_byte(self, made: Project) -> None:
        before = made.store.current("fineweb_mask_manifest", SNAPSHOT)
        other = made.with_settings(**{"source.set_aside": [f"{SNAPSHOTS[1]}/000_00000", f"{SNAPSHOT}0/001_00000"]})
        assert other.stage("raw_shards", SNAPSHOT).published == made.store.current("raw_shards", SNAPSHOT)
        assert other.stage("fineweb_mask_manifest", SNAPSHOT).published == before
        assert standing(other.store, other.settings)[SNAPSHOT] == ""


def test_rows_that_are_joined_at_once_do_not_show_in_the_bytes(made: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("quality_scores", "pruned_documents", "fineweb_mask_manifest")

    def files() -> dict[str, bytes]:
        return {str(f): f.read_bytes() for name in names for f in (made.store.root / name).rglob("*.*") if f.is_file()}

    before = files()
    assert sum(name.endswith(".parquet") for name in before) >= len(names)
    for module in (quality, manifest):
        monkeypatch.setattr(module, "JOIN_ROWS", 3)
    for name in names:
        shutil.rmtree(made.store.root / name)
    for name in names:
        made.stage(name, SNAPSHOT)
    assert files() == before


def test_vectors_are_not_read_where_none_is_missing(made: Project) -> None:
    """They are by far the largest files, and on an object store a file comes whole."""
    before = {path.name: path.read_bytes() for path in manifest_files(made)}
    shutil.rmtree(made.store.root / "fineweb_mask_manifest")
    vectors = list((made.store.root / "e5_embeddings" / SNAPSHOT).glob("*/*.arrow"))
    assert vectors
    for path in vectors:
        path.unlink()
    made.stage("fineweb_mask_manifest", SNAPSHOT)
    assert {path.name: path.read_bytes() for path in manifest_files(made)} == before


def manifest_files(project: Project) -> list[Path]:
    return sorted((project.store.root / "fineweb_mask_manifest").rglob("*.parquet"))


def test_each_kind_of_row_has_its_decision_stage_and_reason(wild: Finished, finished: Finished) -> None:
    manifest = {row["doc_id"]: row for row in rows_of(wild[1]["fineweb_mask_manifest"].published).to_dicts()}
    for doc_id, expected in {
        "a0": ("kept", "datamask_masks", None),
        "a2": ("bad_row", "raw_shards", "null_text"),
        "a5": ("bad_row", "raw_shards", "blank_text"),
        "a0#9": ("duplicate", "raw_shards", "same id as an earlier row: a0"),
    }.items():
        row = manifest[doc_id]
        assert (row["decision"], row["stage"], row["reason"]) == expected
    assert manifest["a0#9"]["shard"] == "000"
    assert manifest["a0#9"]["row"] == 9
    assert {row["snapshot"] for row in manifest.values()} == {WILD}

    rows = rows_of(finished[1]["fineweb_mask_manifest"].published)
    pruned = rows.filter(pl.col("decision") == "pruned")
    assert set(pruned["stage"]) == {"pruned_documents"}
    assert set(pruned["reason"]) == {"quality below the cut"}
    assert pruned["cluster"].null_count() == pruned["split"].null_count() == len(pruned)
    chosen = rows.filter(pl.col("decision").is_in(["kept", "not_selected"]))
    assert set(chosen["stage"]) == {"datamask_masks"}
    assert chosen["cluster"].null_count() == chosen["score"].null_count() == 0
    assert pruned["quality"].max() <= chosen["quality"].min()
    assert set(rows["strategy"]) == {"datamask"}


def test_a_text_without_tokens_is_unscored_and_takes_no_part(project: Project, tmp_path: Path) -> None:
    # zero-width spaces are no blanks to Unicode, and no tokens to any model
    write_shard(
        tmp_path, "S", "a", 4, texts=["the river carries water", "buy now", "\u200b\u200b", "glass bends light"]
    )
    outcomes = project.with_settings(**{"source.url": str(tmp_path), "select.budget": "1"}).full("S")
    row = rows_of(outcomes["fineweb_mask_manifest"].published).to_dicts()[2]
    assert (row["decision"], row["stage"]) == ("unscored", "quality_scores")
    assert row["reason"] == "dclm:no_tokens,edu:no_tokens,wiki:no_tokens"
    assert row["dclm"] is row["edu"] is row["wiki"] is row["quality"] is None
    assert outcomes["datamask_masks"].facts["n"] == 3
    assert outcomes["pruned_documents"].counts == {"unscored": 1, "pruned": 1, "survives": 2}


def test_schema_counts_and_sidecar_agree(finished: Finished) -> None:
    project, outcomes = finished
    outcome = outcomes["fineweb_mask_manifest"]
    published = outcome.published
    for shard in published.shards:
        assert pq.read_schema(published.path(shard)).equals(MANIFEST)
    sidecar = json.loads((published.folder / SIDECAR).read_text())
    counts = dict(rows_of(published)["decision"].value_counts().iter_rows())
    assert sidecar["decisions"] == {decision: counts.get(decision, 0) for decision in DECISIONS}
    assert sum(sidecar["decisions"].values()) == 65
    assert sidecar["budget"] == {"asked": 7, "met": 7, "unit": "documents", "n": 65, "short_by": 0}
    assert (sidecar["solver"], sidecar["scope"], sidecar["quotas"]) == ("certified", "split", None)
    assert sidecar["settings"]["select.lambda"] == 0.5
    assert sidecar["fingerprints"] == {
        name: project.store.current(name, SNAPSHOT if STAGES[name].partitioned else None).fingerprint
        for name in sidecar["fingerprints"]
    }
    assert sidecar["certificate"]["gap"] >= 0
    kept = rows_of(published).filter(pl.col("decision") == "kept")
    assert sidecar["tokens_kept"] == kept["token_count"].sum() > 0
    assert set(sidecar["models"]) == {"dclm", "edu", "wiki", "encoder"}


def test_tokens_are_unknown_where_a_kept_row_does_not_tell_its_own(wild: Finished) -> None:
    assert wild[1]["fineweb_mask_manifest"].facts["tokens_kept"] is None


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("select.lambda", 0.3, "datamask_masks: select.lambda = 0.5 (in force: 0.3)"),
        ("select.budget", "11%", "datamask_masks: select.budget = '10%' (in force: '11%')"),
        ("prune.ratio", 0.4, "pruned_documents: prune.ratio = 0.45 (in force: 0.4)"),
        ("score.weights", [1.0, 2.0, 1.0], "quality_scores: score.weights = [1.0, 1.0, 1.0]"),
        ("models.encoder_prefix", "query: ", "e5_embeddings: made with another model"),
        ("embed.max_tokens", 8, "e5_embeddings: embed.max_tokens = 16 (in force: 8)"),
        ("score.edu_max_tokens", 8, "edu_scores: score.edu_max_tokens = 16 (in force: 8)"),
        ("cluster.k", 3, "kmeans_centroids: cluster.k = 0 (in force: 3)"),
    ],
)
def test_what_was_made_under_other_settings_is_not_published(made: Project, key: str, value: object, why: str) -> None:
    assert why in refused(made.with_settings(**{key: value}))


def test_other_labels_make_another_classifier(made: Project, tmp_path: Path) -> None:
    labels = write_labels(tmp_path / "labels") / "dclm.parquet"
    table = pq.read_table(labels)
    pq.write_table(table.slice(1), labels)
    changed = made.with_settings(**{"score.dclm_labels": str(labels)})
    assert "dclm_classifier: made with another model" in refused(changed)
    moved = made.with_settings(**{"score.dclm_labels": str(write_labels(tmp_path / "moved") / "dclm.parquet")})
    assert moved.stage("fineweb_mask_manifest", SNAPSHOT).published is not None


def test_masks_made_with_constants_since_refitted_are_refused(made: Project) -> None:
    refitted = made.with_settings(**{"score.calibration_sample": 30})
    refitted.stage("quality_calibration", "")
    refitted.stage("kmeans_centroids", "")
    why = refused(refitted)
    assert "datamask_masks: made with another generation of quality_calibration" in why
    assert "kmeans_clusters: made with another generation of kmeans_centroids" in why
    refitted.stage("kmeans_clusters", SNAPSHOT)
    refitted.stage("datamask_masks", SNAPSHOT)
    assert refitted.stage("fineweb_mask_manifest", SNAPSHOT).published is not None


def test_an_upstream_published_anew_makes_what_follows_inconsistent(made: Project) -> None:
    changed = made.with_settings(**{"prune.ratio": 0.3})
    changed.stage("pruned_documents", SNAPSHOT)
    with pytest.raises(
        InconsistentFiles,
        match=f"of {SNAPSHOT} was made from another generation of pruned_documents than the published one; materialise",
    ):
        changed.stage("fineweb_mask_manifest", SNAPSHOT)
    with pytest.raises(InconsistentFiles, match=r"e5_embeddings of .* was made from another generation of pruned_docu"):
        changed.stage("datamask_masks", SNAPSHOT)


def test_a_missing_input_says_what_to_materialise(project: Project) -> None:
    with pytest.raises(NotPublished, match=f"raw_shards of snapshot {SNAPSHOT} is not published .*; materialise it"):
        project.stage("fineweb_mask_manifest", SNAPSHOT)


def test_the_export_is_read_by_polars_duckdb_and_datasets_with_all_columns(wild: Finished) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'dev' is not installed")
    project, outcomes = wild
    export = outcomes["fineweb_mask"].published
    files = sorted(str(path) for path in export.folder.glob("*.parquet"))
    kept = rows_of(outcomes["fineweb_mask_manifest"].published).filter(pl.col("decision") == "kept")
    expected = ["text", "id", "token_count", "extra", "url", "meta", *ADDED]
    frame = pl.read_parquet(files)
    assert frame.columns == expected
    assert sorted(frame["doc_id"]) == sorted(kept["doc_id"])
    ((count,),) = duckdb.sql(f"select count(distinct doc_id) from read_parquet({files})").fetchall()
    assert count == len(kept)
    loaded = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(project.store.root.parent / "datasets")
    )
    assert loaded.column_names == expected
    assert sorted(loaded["doc_id"]) == sorted(kept["doc_id"])

    rows = {row["doc_id"]: row for row in frame.to_dicts()}
    assert rows["a0"]["extra"] == 0
    assert rows["c0"]["extra"] == 2**40
    assert rows["b0"]["extra"] is None
    assert rows["b0"]["url"] == "u"
    assert rows["c2"]["meta"] == {"k": 2}
    assert rows["\\xff"]["text"].startswith("caf\ufffd ")
    assert rows["\\xff"]["url"] == "http://\ufffd"
    assert rows["\\xff"]["id"] == "\ufffd"
    assert rows["000#1"]["id"] is None
    assert rows["e0"]["text"] == text_of("wild/23")


def test_the_kept_text_is_the_sources_own(finished: Finished, small_source: Path) -> None:
    export = rows_of(finished[1]["fineweb_mask"].published)
    source = pl.read_parquet(sorted((small_source / "data" / SNAPSHOT).glob("*.parquet")))
    own = source.columns
    assert export.columns == [*own, *ADDED]
    joined = export.join(source, on="id", suffix="_source")
    assert len(joined) == 7
    for name in own:
        if name != "id":
            assert joined[name].to_list() == joined[f"{name}_source"].to_list()
    assert export["id"].to_list() == export["doc_id"].to_list()
