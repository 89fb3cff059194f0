"""The whole spine of one snapshot, stage after stage: counts, equal bytes, and what must not matter."""

import uuid
from pathlib import Path

import fsspec
import polars as pl
import pyarrow.parquet as pq
import pytest

from dagster_datamask.stages.base import Outcome
from tests.conftest import SNAPSHOTS
from tests.project import SNAPSHOT_STAGES, Project, write_shard
from tests.stages.conftest import copied, failed, rows_of, tree

Finished = tuple[Project, dict[str, Outcome]]


def test_every_row_is_decided_and_the_budget_is_met_exactly(finished: Finished) -> None:
    _, outcomes = finished
    for name, outcome in outcomes.items():
        assert outcome.published is not None, name
        assert outcome.rows_in == sum(outcome.counts.values()), name
    manifest = rows_of(outcomes["fineweb_mask_manifest"].published)
    assert len(manifest) == 65
    assert manifest["doc_id"].n_unique() == 65
    assert (manifest["decision"] == "kept").sum() == 7  # floor(0.1 * 65 + 0.5)
    assert (manifest["decision"] == "pruned").sum() == 29  # floor(0.45 * 65 + 0.5)
    kept = rows_of(outcomes["fineweb_mask"].published)
    assert sorted(kept["doc_id"]) == sorted(manifest.filter(pl.col("decision") == "kept")["doc_id"])


def test_from_memory_and_from_disk_every_published_byte_is_the_same(
    project: Project, finished: Finished, small_source: Path
) -> None:
    there, _ = finished
    url = f"memory://{uuid.uuid4().hex}"
    for path in small_source.rglob("*.parquet"):
        with fsspec.open(f"{url}/{path.relative_to(small_source)}", "wb") as file:
            file.write(path.read_bytes())
    here = project.with_settings(**{"source.url": url})
    here.stage("quality_calibration", "")
    here.stage("kmeans_centroids", "")
    here.full(SNAPSHOTS[0])
    one, two = tree(there.store.root), tree(here.store.root)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


def test_no_published_file_tells_where_or_when_it_was_made(
    finished: Finished, small_source: Path, labels: Path
) -> None:
    project, _ = finished
    files = tree(project.store.root)
    assert len(files) > 40
    marks = [str(path).encode() for path in (project.store.root.parent, small_source, labels)]
    for name, content in files.items():
        for mark in marks:
            assert mark not in content, name


def test_running_again_computes_nothing_and_changes_nothing(finished: Finished, tmp_path: Path) -> None:
    project, outcomes = finished
    again = copied(project, tmp_path / "root")
    before = {path: path.stat().st_mtime_ns for path in again.store.root.rglob("*.arrow")}
    repeated = again.full(SNAPSHOTS[0])
    assert tree(again.store.root) == tree(project.store.root)
    assert {path: path.stat().st_mtime_ns for path in again.store.root.rglob("*.arrow")} == before
    for name, outcome in repeated.items():
        was, now = outcomes[name].published, outcome.published
        assert was is not None and now is not None
        assert (outcome.counts, now.facts) == (outcomes[name].counts, was.facts), name


@pytest.mark.parametrize("group_rows", [1000, 3])
def test_names_order_and_row_groups_of_shards_do_not_change_what_is_kept(
    project: Project, finished: Finished, small_source: Path, tmp_path: Path, group_rows: int
) -> None:
    _, outcomes = finished
    documents = pl.concat(
        [pl.read_parquet(path) for path in sorted((small_source / "data" / SNAPSHOTS[0]).glob("*.parquet"))]
    ).sample(fraction=1.0, shuffle=True, seed=1)
    for shard, part in (("zz", documents[:11]), ("aa", documents[11:50]), ("mm", documents[50:])):
        write_shard(tmp_path, SNAPSHOTS[0], shard, len(part), ids=part["id"], texts=part["text"], group_rows=group_rows)
    here = project.with_settings(**{"source.url": str(tmp_path)})
    again = here.full(SNAPSHOTS[0])
    before = rows_of(outcomes["fineweb_mask_manifest"].published).sort("doc_id")
    after = rows_of(again["fineweb_mask_manifest"].published).sort("doc_id")
    assert after["doc_id"].to_list() == before["doc_id"].to_list()
    assert after["decision"].to_list() == before["decision"].to_list()


def test_an_input_that_changes_makes_a_new_generation_and_leaves_the_old(project: Project) -> None:
    first = project.stage("raw_shards", SNAPSHOTS[0]).published
    second = project.with_settings(**{"source.hash_below": 0.5}).stage("raw_shards", SNAPSHOTS[0]).published
    assert first.folder != second.folder
    assert first.path(first.shards[0]).exists()
    assert project.store.current("raw_shards", SNAPSHOTS[0]).fingerprint == second.fingerprint


def _texts(source: Path, snapshot: str, shards: dict[str, list[str | None]]) -> None:
    for shard, texts in shards.items():
        write_shard(source, snapshot, shard, len(texts), texts=texts)


@pytest.mark.parametrize(
    ("shards", "decisions"),
    [
        ({"a": []}, {}),
        ({"a": [], "b": []}, {}),
        ({"a": ["one river carries cold water"]}, {"not_selected": 1}),
        ({"a": [], "b": ["one river carries cold water"]}, {"not_selected": 1}),
        ({"a": ["one river carries cold water", "buy now cheap offer"]}, {"pruned": 1, "not_selected": 1}),
        ({"a": [None, "", " \u2003\n"]}, {"bad_row": 3}),
        ({"a": [None], "b": ["\u00a0"]}, {"bad_row": 2}),
    ],
    ids=["empty", "two empty", "one row", "empty and one", "two rows", "all bad", "all bad in two"],
)
def test_tiny_snapshots_have_a_defined_result(
    project: Project, tmp_path: Path, shards: dict[str, list[str | None]], decisions: dict[str, int]
) -> None:
    _texts(tmp_path, "S", shards)
    outcomes = project.with_settings(**{"source.url": str(tmp_path)}).full("S")
    rows = sum(map(len, shards.values()))
    for name, outcome in outcomes.items():
        assert outcome.published is not None, (name, failed(outcome))
        assert outcome.rows_in == sum(outcome.counts.values()), name
    manifest = rows_of(outcomes["fineweb_mask_manifest"].published)
    assert len(manifest) == rows
    assert dict(manifest["decision"].value_counts().iter_rows()) == decisions
    masks = outcomes["datamask_masks"].facts
    assert (masks["kept"], masks["value"], masks["certificate"]["gap"]) == (0, 0.0, 0.0)
    export = outcomes["fineweb_mask"].published
    for shard in export.shards:
        assert pq.read_schema(export.path(shard)).names[:2] == ["text", "id"]


@pytest.mark.parametrize("shards", [{"a": ["one river carries cold water"]}, {"a": ["river water", "cheap offer"]}])
def test_the_whole_of_one_and_two_rows_can_be_kept(
    project: Project, tmp_path: Path, shards: dict[str, list[str | None]]
) -> None:
    _texts(tmp_path, "S", shards)
    survivors = 1  # of one row none is pruned, of two rows one
    changed = project.with_settings(**{"source.url": str(tmp_path), "select.budget": str(survivors)})
    outcomes = changed.full("S")
    assert outcomes["fineweb_mask"].published.rows == survivors
    assert outcomes["datamask_masks"].facts["certificate"]["gap"] >= 0
    assert list(outcomes) == list(SNAPSHOT_STAGES)
