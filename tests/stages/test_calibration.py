"""What is fitted once on a recorded sample: constants, centroids, and what they must not depend on."""

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from dagster_datamask.keyed import hash64
from dagster_datamask.settings import SettingsError
from dagster_datamask.shards.generations import NotPublished
from dagster_datamask.shards.schemas import BadShard
from dagster_datamask.stages.calibration import CENTROIDS_FILE, SAMPLE_FILE, read_centroids
from tests.conftest import SNAPSHOTS
from tests.project import Project, write_shard
from tests.stages.conftest import broken_page


def calibrated(project: Project, **values: object) -> pl.DataFrame:
    outcome = project.with_settings(**values).stage("quality_calibration", "")
    assert outcome.published is not None
    return pl.read_parquet(outcome.published.path(SAMPLE_FILE))


def test_the_sample_is_of_the_smallest_hashes_and_scored(project: Project, small_source: Path) -> None:
    sample = calibrated(project)
    assert len(sample) == 40
    assert sample["doc_id"].n_unique() == 40
    assert sorted(set(sample["snapshot"])) == list(SNAPSHOTS)
    keys = hash64(sample["doc_id"].to_list(), 0, "sample")
    assert (np.diff(keys.astype(object)) > 0).all()
    source = pl.read_parquet(sorted(small_source.rglob("*.parquet")))
    texts = dict(source.select("id", "text").iter_rows())
    assert all(texts[i] == text for i, text in sample.select("doc_id", "text").iter_rows())

    facts = project.store.current("quality_calibration").facts
    quality = np.sort(sample["quality"].to_numpy())
    assert facts["q_lo"] == pytest.approx(np.quantile(quality, 0.001))
    assert facts["q_hi"] == pytest.approx(np.quantile(quality, 0.999))
    assert facts["prune_threshold"] == quality[18]  # floor(0.45 * 40 + 0.5)
    parts = sample["dclm"] * 5 + sample["wiki"] * 5 + sample["edu"].clip(0, 5)
    assert sample["quality"].to_numpy() == pytest.approx(parts.to_numpy())


def test_a_sample_larger_than_the_source_takes_all_of_it(project: Project) -> None:
    assert len(calibrated(project, **{"score.calibration_sample": 1000})) == 130


def test_named_snapshots_only(project: Project) -> None:
    sample = calibrated(project, **{"score.calibration_snapshots": [SNAPSHOTS[1]]})
    assert set(sample["snapshot"]) == {SNAPSHOTS[1]}
    with pytest.raises(SettingsError, match=rf"calibration_snapshots: 'X' is not in .*; there are: {SNAPSHOTS[0]}, "):
        calibrated(project, **{"score.calibration_snapshots": ["X"]})


@pytest.mark.parametrize("how", ["zero bytes", "broken page"])
def test_a_bad_shard_fails_or_is_passed_over(project: Project, tmp_path: Path, how: str) -> None:
    write_shard(tmp_path, "S", "good", 30)
    path = write_shard(tmp_path, "S", "bad", 300, group_rows=300)
    if how == "zero bytes":
        path.write_bytes(b"")
    else:
        broken_page(path, "text")
    with pytest.raises(BadShard, match=r"bad\.parquet"):
        calibrated(project, **{"source.url": str(tmp_path)})
    sample = calibrated(project, **{"source.url": str(tmp_path), "source.on_bad_shard": "quarantine"})
    path.unlink()
    assert sample.equals(calibrated(project, **{"source.url": str(tmp_path)}))
    assert any("quality_calibration: passed over: " in line and str(path) in line for line in project.log)


@pytest.mark.parametrize("texts", [[], [None], ["", " \n"]])
def test_nothing_to_score_is_one_clear_error(project: Project, tmp_path: Path, texts: list[str | None]) -> None:
    write_shard(tmp_path, "S", "a", len(texts), texts=texts)
    before = project.store.current("quality_calibration")
    with pytest.raises(ValueError, match=rf"none of the {len(texts)} sampled rows has a quality; check the scorers'"):
        calibrated(project, **{"source.url": str(tmp_path)})
    assert project.store.current("quality_calibration") == before


@pytest.mark.parametrize("rows", [1, 2])
def test_one_and_two_rows_calibrate_and_cluster(project: Project, tmp_path: Path, rows: int) -> None:
    write_shard(tmp_path, "S", "a", rows)
    changed = project.with_settings(**{"source.url": str(tmp_path)})
    assert len(calibrated(changed)) == rows
    assert changed.stage("kmeans_centroids", "").facts["k"] == 1


def test_centroids_are_unit_vectors_and_never_more_than_distinct_vectors(project: Project, tmp_path: Path) -> None:
    published = project.store.current("kmeans_centroids")
    centroids = read_centroids(published)
    assert np.linalg.norm(centroids, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert len(centroids) == published.facts["k"] == published.facts["k_asked"] == 5  # ceil(sqrt(22))
    write_shard(tmp_path, "S", "a", 12, texts=["the river carries water", "light bends in glass", "a cell divides"] * 4)
    same = project.with_settings(**{"source.url": str(tmp_path), "prune.ratio": 0.0, "cluster.k": 9})
    same.stage("quality_calibration", "")
    fitted = same.stage("kmeans_centroids", "").published
    facts = fitted.facts
    assert (facts["k_asked"], facts["distinct_vectors"]) == (9, 3)
    assert facts["k"] == 3
    sizes = pa.ipc.open_file(pa.memory_map(str(fitted.path(CENTROIDS_FILE)))).read_all()["size"].to_numpy()
    assert sizes.sum() == 12
    assert facts["empty_clusters"] == (sizes == 0).sum() < 3


def test_without_classifiers_the_remedy_is_named(project: Project) -> None:
    (project.store.root / "wiki_classifier" / "current.json").unlink()
    with pytest.raises(NotPublished, match=r"wiki_classifier is not published .*; run the job fit_global first"):
        project.stage("quality_calibration", "")


def test_a_cut_centroid_file_is_fitted_again_to_the_same_bytes(project: Project) -> None:
    path = project.store.current("kmeans_centroids").path(CENTROIDS_FILE)
    before = path.read_bytes()
    path.write_bytes(before[:100])
    project.stage("kmeans_centroids", "")
    assert path.read_bytes() == before
