"""What has to be fitted before a snapshot can run, and why."""

from pathlib import Path

import pyarrow.parquet as pq

from dagster_datamask.stages.base import FITTED
from dagster_datamask.stages.freshness import unfitted
from tests.project import Project, write_labels


def why(project: Project) -> dict[str, str]:
    return unfitted(project.store, project.settings, project.source)


def test_nothing_where_all_is_fitted_under_these_settings(project: Project) -> None:
    assert why(project) == {}


def test_settings_that_no_global_asset_reads_leave_it_fitted(project: Project) -> None:
    assert why(project.with_settings(**{"select.lambda": 0.3, "prune.threshold": "frozen"})) == {}


def test_other_settings_and_what_rests_on_them(project: Project) -> None:
    assert why(project.with_settings(**{"prune.ratio": 0.3})) == {
        "quality_calibration": "fitted under other settings",
        "kmeans_centroids": "rests on quality_calibration",
    }
    assert why(project.with_settings(**{"cluster.k": 3})) == {"kmeans_centroids": "fitted under other settings"}


def test_other_labels_under_the_same_settings(project: Project, tmp_path: Path) -> None:
    labels = write_labels(tmp_path / "labels") / "wiki.parquet"
    changed = project.with_settings(**{"score.wiki_labels": str(labels)})
    assert why(changed) == {}
    pq.write_table(pq.read_table(labels).slice(1), labels)
    assert why(changed)["wiki_classifier"] == "fitted with other models or labels"
    assert why(changed)["kmeans_centroids"] == "rests on quality_calibration"


def test_what_is_missing_and_what_was_fitted_on_something_else(project: Project) -> None:
    again = project.with_settings(**{"score.calibration_sample": 30})
    again.stage("quality_calibration", "")
    assert why(again) == {"kmeans_centroids": "fitted on another generation of its inputs"}
    for name in FITTED:
        (project.store.root / name / "current.json").unlink()
    assert why(project) == dict.fromkeys(FITTED, "missing")
    assert set(FITTED) == {
        *("dclm_classifier", "edu_classifier", "wiki_classifier"),
        *("quality_calibration", "kmeans_centroids"),
    }


def test_a_new_model_makes_its_own_classifier_unfitted_and_what_rests_on_it(project: Project, tmp_path: Path) -> None:
    labels = write_labels(tmp_path / "labels") / "dclm.parquet"
    pq.write_table(pq.read_table(labels).slice(1), labels)
    assert why(project.with_settings(**{"score.dclm_labels": str(labels)})) == {
        "dclm_classifier": "fitted with other models or labels",
        "quality_calibration": "rests on dclm_classifier",
        "kmeans_centroids": "rests on quality_calibration",
    }


def test_whoever_has_no_ultra_fineweb_model_is_not_stopped(project: Project) -> None:
    absent = {"models.ultra": "/absent/ultra.bin", "models.ultra_tokenizer": "/absent/tokenizer.json"}
    assert why(project.with_settings(**absent)) == {}
