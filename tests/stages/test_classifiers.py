"""The quality models under one fingerprint: trained again to the same bytes, found again, or clearly missing."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.settings import SettingsError
from dagster_datamask.stages.classifiers import open_scorer, scorer_identity
from tests.project import Project, write_labels


def test_what_is_trained_scores_again_as_it_did(project: Project) -> None:
    published = project.store.current("quality_classifiers")
    texts = ["the river carries cold water from the mountain because snow melts", "click here buy now cheap offer"]
    for part in ("dclm", "edu", "wiki"):
        good, bad = open_scorer(part, published, project.settings, Accelerator()).score(texts).scores
        assert good > bad, part
        assert published.facts[part]["trained"]
        assert published.facts[part]["demo_model"]
    assert scorer_identity("edu", published, Accelerator()).endswith(" cpu float32")
    assert scorer_identity("dclm", published, Accelerator()) == published.facts["dclm"]["revision"]


def test_a_lost_model_is_trained_again_to_the_same_bytes_and_the_others_left(project: Project) -> None:
    published = project.store.current("quality_classifiers")
    files = {name: published.folder / name for name in ("dclm.bin", "edu.json", "wiki.bin")}
    before = {name: path.read_bytes() for name, path in files.items()}
    stamps = {name: path.stat().st_mtime_ns for name, path in files.items()}
    files["wiki.bin"].write_bytes(b"cut")
    (published.folder / ".wiki.bin.9.tmp.bin").touch()
    assert project.stage("quality_classifiers", "").published == published
    assert {name: path.read_bytes() for name, path in files.items()} == before
    assert [name for name, path in files.items() if path.stat().st_mtime_ns != stamps[name]] == ["wiki.bin"]
    assert not list(published.folder.glob(".*.tmp*"))


def test_rows_are_counted_by_what_became_of_them(project: Project, tmp_path: Path) -> None:
    labels = write_labels(tmp_path / "labels")
    table = pq.read_table(labels / "dclm.parquet")
    texts = [None, "  ", *table["text"].to_pylist()[2:]]
    pq.write_table(table.set_column(0, "text", [texts]), labels / "dclm.parquet")
    outcome = project.with_settings(**{"score.dclm_labels": str(labels / "dclm.parquet")}).stage(
        "quality_classifiers", ""
    )
    assert outcome.published.record("dclm.bin").counts["no_text"] == 2
    assert outcome.rows_in == sum(outcome.counts.values()) == 240


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"score.wiki_labels": ""}, r"models\.wiki = 'trained' needs score\.wiki_labels, a parquet file with the"),
        ({"score.edu_labels": "/absent/e.parquet"}, r"score\.edu_labels: /absent/e\.parquet does not exist"),
    ],
)
def test_labels_that_are_not_there_are_named(project: Project, values: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        project.with_settings(**values).stage("quality_classifiers", "")
