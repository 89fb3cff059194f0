"""The views over what is published: complete, resolved once, and all that a query can reach."""

import shutil
from pathlib import Path

import pytest

from dagster_datamask.shards.generations import Store
from dagster_datamask.stages import sql
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.sql import VIEWS, query
from tests.conftest import SNAPSHOTS
from tests.project import SNAPSHOT_STAGES, Project
from tests.stages.conftest import WILD, rows_of, tree

SNAPSHOT = SNAPSHOTS[0]
# those of what every snapshot has; others are there once somebody asked for them
MADE = {view: asset for view, asset in VIEWS.items() if asset in SNAPSHOT_STAGES}
Finished = tuple[Project, dict[str, Outcome]]


@pytest.fixture(scope="module")
def store(finished: Finished, wild: Finished, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two snapshots of very different columns, in a folder whose name needs care."""
    root = tmp_path_factory.mktemp("sql") / "it's [a] root *"
    shutil.copytree(finished[0].store.root, root)
    for asset in MADE.values():
        shutil.copytree(wild[0].store.folder(asset, WILD), root / asset / WILD)
    return Store(root)


@pytest.mark.parametrize("view", MADE)
def test_a_view_holds_every_row_of_its_asset_and_the_snapshot(store: Store, view: str) -> None:
    counted = query(store, f"SELECT snapshot, count(*), count(DISTINCT doc_id) FROM {view} GROUP BY 1 ORDER BY 1").rows
    published = [store.current(VIEWS[view], snapshot) for snapshot in (SNAPSHOT, WILD)]
    assert counted == [[p.snapshot, p.rows, p.rows] for p in published]
    answer = query(store, f"FROM {view} LIMIT 1")
    assert answer.columns[0] == "snapshot"
    assert answer.columns.count("snapshot") == 1


def test_rows_are_those_of_the_files(store: Store, finished: Finished) -> None:
    rows = rows_of(finished[0].store.current("fineweb_mask_manifest", SNAPSHOT))
    told = query(
        store, f"SELECT doc_id, decision, quality FROM manifest WHERE snapshot = '{SNAPSHOT}' ORDER BY shard, row"
    )
    assert told.rows == [list(row) for row in rows.select("doc_id", "decision", "quality").rows()]
    joined = query(store, "SELECT count(*) FROM manifest JOIN masks USING (snapshot, doc_id) WHERE selected").rows
    kept = query(store, "SELECT count(*) FROM manifest WHERE decision = 'kept'").rows
    assert joined == kept == query(store, "SELECT count(*) FROM fineweb_mask").rows


def test_embeddings_are_lists(store: Store) -> None:
    ((least, most),) = query(
        store,
        "SELECT min(norm), max(norm) FROM (SELECT sqrt(list_sum(list_transform(embedding, lambda x: x * x))) AS norm "
        "FROM embeddings WHERE embedding IS NOT NULL)",
    ).rows
    assert 0.99 < least <= most < 1.01


def test_without_a_query_the_views_and_their_columns(store: Store) -> None:
    told = query(store, None)
    assert told.columns == ["view", "column", "type"]
    assert {row[0] for row in told.rows} == set(MADE)
    assert ["manifest", "quality", "DOUBLE"] in told.rows and ["embeddings", "embedding", "FLOAT[384]"] in told.rows


def test_the_first_rows_and_how_many_there_are(store: Store) -> None:
    told = query(store, "SELECT range FROM range(25000)", limit=3)
    assert (told.rows, told.count) == ([[0], [1], [2]], 25_000)
    assert query(store, "SELECT 1 WHERE false", limit=3) == sql.Answer(["1"], [], 0)
    assert query(store, "SELECT 'nan'::DOUBLE, [1, NULL], {'a': DATE '2024-01-02'}").rows == [
        [None, [1, None], {"a": "2024-01-02"}]
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SELEC 1", 'Parser Error: syntax error at or near "SELEC"'),
        (
            "SELECT quaity FROM manifest",
            'Referenced column "quaity" not found in FROM clause! Candidate bindings: "quality"',
        ),
        ("SELECT * FROM datamask_masks", "Table with name datamask_masks does not exist!"),
        ("SELECT * FROM datamask_masks", "The views are: clusters, embeddings, fineweb_mask, manifest, masks, pruned,"),
        ("SELECT error('two\nlines')", "two lines"),
        ("", "give one SELECT"),
        ("SELECT 1; SELECT 2", "give one SELECT"),
        ("CREATE TABLE a AS SELECT 1", "give one SELECT"),
        ("COPY (SELECT 1) TO '{folder}/out.csv'", "give one SELECT"),
        ("ATTACH '{folder}/out.db'", "give one SELECT"),
        ("SET enable_external_access = true", "give one SELECT"),
        ("INSTALL httpfs", "give one SELECT"),
        ("SELECT * FROM read_parquet('{file}')", "file system operations are disabled"),
        ("SELECT * FROM '{file}'", "file system operations are disabled"),
        ("SELECT * FROM read_text('/etc/hostname')", "file system operations are disabled"),
        ("SELECT * FROM glob('/*')", "file system operations are disabled"),
        ("SELECT * FROM store", "Table with name store does not exist!"),
        ("SELECT * FROM text", "Table with name text does not exist!"),
    ],
)
def test_refused_in_one_line(store: Store, tmp_path: Path, text: str, says: str) -> None:
    published = store.current("datamask_masks", SNAPSHOT)
    file = str(published.path(published.shards[0])).replace("'", "''")
    before = tree(store.root)
    with pytest.raises(ValueError) as caught:
        query(store, text.format(folder=tmp_path, file=file) if "{" in text else text)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert tree(store.root) == before and list(tmp_path.iterdir()) == []


def test_pointers_are_read_once(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published while a query runs belongs to the next one."""
    shutil.copytree(finished[0].store.folder("datamask_masks", SNAPSHOT), tmp_path / "datamask_masks" / SNAPSHOT)
    pointer = tmp_path / "datamask_masks" / SNAPSHOT / "current.json"
    rows_of_asset = sql._rows_of

    def removed(found: list) -> object:
        if found:
            pointer.unlink()
        return rows_of_asset(found)

    monkeypatch.setattr(sql, "_rows_of", removed)
    assert query(Store(tmp_path), "SELECT count(*) FROM masks").rows == [[36]]
    assert not pointer.exists()


def test_nothing_published(tmp_path: Path) -> None:
    assert query(Store(tmp_path / "none"), None).rows == []
    with pytest.raises(ValueError, match=r"The views are: none, for nothing is published\."):
        query(Store(tmp_path / "none"), "FROM manifest")
    assert not (tmp_path / "none").exists()


def test_columns_of_later_snapshots_are_null_in_earlier_ones(store: Store, wild: Finished) -> None:
    ((count, known),) = query(
        store, f"SELECT count(*), count(extra) FROM fineweb_mask WHERE snapshot = '{SNAPSHOT}'"
    ).rows
    assert (count, known) == (7, 0)
    extra = rows_of(wild[0].store.current("fineweb_mask", WILD))["extra"]
    assert query(store, "SELECT count(extra), sum(extra) FROM fineweb_mask").rows == [[extra.count(), extra.sum()]]
