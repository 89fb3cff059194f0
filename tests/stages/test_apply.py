"""From ids to documents: what fineweb_mask holds comes back from its source, by id alone, and nothing else does."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.schemas import ADDED, InconsistentFiles
from dagster_datamask.shards.source import Shard, Source
from dagster_datamask.stages.apply import apply_manifest
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.export import CARD, dataset_card
from tests.conftest import SNAPSHOTS
from tests.project import Project
from tests.stages.conftest import WILD, broken_page, copied, rows_of, tree

SNAPSHOT = SNAPSHOTS[0]
Finished = tuple[Project, dict[str, Outcome]]


@pytest.fixture(scope="module")
def exported(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The finished project with an export. Read it, never write into it."""
    project = copied(finished[0], tmp_path_factory.mktemp("exported") / "root")
    dataset_card(project.run())
    return project


@pytest.fixture
def ids(exported: Project, tmp_path: Path) -> Path:
    """The exported ids as somebody receives them."""
    path = tmp_path / "ids"
    shutil.copytree(exported.store.current(CARD).folder / "dataset" / "ids", path)
    return path


@pytest.fixture
def held(small_source: Path, tmp_path: Path) -> Path:
    """A copy of the source: the first snapshot, as somebody else holds it."""
    path = tmp_path / "held"
    shutil.copytree(small_source / "data" / SNAPSHOT, path / "data" / SNAPSHOT)
    return path


def kept(project: Project) -> pl.DataFrame:
    return rows_of(project.store.current("fineweb_mask", SNAPSHOT)).drop(*ADDED)


def written(out: Path, snapshot: str = SNAPSHOT) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(path) for path in sorted((out / "data" / snapshot).glob("*.parquet"))])


def same_bytes(out: Path, published: Published) -> None:
    """The source's columns of every shard, and no other, byte for byte, types and nulls included."""
    files = {path.stem: path for path in (out / "data" / str(published.snapshot)).iterdir()}
    assert set(files) == {shard for shard in published.shards if published.record(shard).rows}
    for shard, path in files.items():
        own = pq.read_table(published.path(shard)).drop_columns(list(ADDED))
        assert pq.read_table(path).equals(own)


class TestSameSource:
    def test_the_kept_documents_byte_for_byte(self, exported: Project, ids: Path, tmp_path: Path) -> None:
        told = apply_manifest(ids, exported.source, tmp_path / "out")
        same_bytes(tmp_path / "out", exported.store.current("fineweb_mask", SNAPSHOT))
        counts = ("wanted", "found", "rows", "missing", "duplicates", "by_place")
        assert {name: told[name] for name in counts} == {
            "wanted": 7,
            "found": 7,
            "rows": 7,
            "missing": 0,
            "duplicates": 0,
            "by_place": 0,
        }
        assert told["files"] == 2 and json.loads(json.dumps(told)) == told
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]

    def test_what_the_wild_holds(self, wild: Finished, tmp_path: Path) -> None:
        project = copied(wild[0], tmp_path / "root")
        dataset_card(project.run())
        told = apply_manifest(project.store.folder(CARD, None), project.source, tmp_path / "out")
        published = project.store.current("fineweb_mask", WILD)
        same_bytes(tmp_path / "out", published)
        assert told["rows"] == published.rows and told["missing"] == 0
        # rows without an id, and those that only look like one
        assert told["by_place"] == rows_of(published)["doc_id"].str.contains("#").sum() > 0
        named = {row["doc_id"]: row["times"] for row in told["duplicates_named"]}
        # 000 is there three times over, and has a0 twice itself; 005 repeats a8
        assert named["a0"] == 6 and named["a8"] == 4
        assert pl.read_parquet(tmp_path / "out" / "duplicates.parquet").height == told["duplicates"]

    @pytest.mark.parametrize("what", ["generation", "snapshot", "export", "dataset", "file"])
    def test_every_kind_of_manifest(self, exported: Project, tmp_path: Path, what: str) -> None:
        store = exported.store
        manifest = store.current("fineweb_mask_manifest", SNAPSHOT)
        card = store.current(CARD)
        path = {
            "generation": manifest.folder,
            "snapshot": store.folder("fineweb_mask_manifest", SNAPSHOT),
            "export": store.folder(CARD, None),
            "dataset": card.folder / "dataset",
            "file": tmp_path / "one.parquet",
        }[what]
        if what == "file":
            rows_of(manifest).filter(pl.col("decision") == "kept").select("snapshot", "doc_id").write_parquet(path)
        apply_manifest(path, exported.source, tmp_path / "out")
        assert written(tmp_path / "out").equals(kept(exported))


class TestOtherSource:
    def test_documents_are_found_wherever_they_lie(
        self, exported: Project, ids: Path, held: Path, tmp_path: Path
    ) -> None:
        """Other shards, another order, no row where the manifest says: the id decides."""
        files = sorted((held / "data" / SNAPSHOT).iterdir())
        rows = pl.concat([pl.read_parquet(path) for path in files]).sample(fraction=1, shuffle=True, seed=3)
        for path in files:
            path.unlink()
        for k, part in enumerate(rows.iter_slices(9)):
            part.write_parquet(held / "data" / SNAPSHOT / f"part-{k}.parquet", row_group_size=4)
        told = apply_manifest(ids, Source(str(held)), tmp_path / "out")
        assert told["found"] == told["rows"] == 7
        assert written(tmp_path / "out").equals(rows.filter(pl.col("id").is_in(kept(exported)["id"].to_list())))

    def test_what_is_missing_is_named_and_nothing_is_written(
        self, exported: Project, ids: Path, held: Path, tmp_path: Path
    ) -> None:
        (held / "data" / SNAPSHOT / "001_00000.parquet").unlink()
        gone = sorted(i for i in kept(exported)["id"] if "001_00000" in i)
        told = apply_manifest(ids, Source(str(held)), tmp_path / "out")
        assert told["missing"] == len(gone) == 7 - told["found"] > 0
        assert told["missing_named"] == [{"snapshot": SNAPSHOT, "doc_id": i} for i in gone]
        assert pl.read_parquet(tmp_path / "out" / "missing.parquet")["doc_id"].to_list() == gone
        assert (told["rows"], told["files"]) == (0, 0) and not (tmp_path / "out" / "data").exists()

        told = apply_manifest(ids, Source(str(held)), tmp_path / "out", allow_missing=True)
        assert told["rows"] == told["found"] == 7 - len(gone)
        assert written(tmp_path / "out").equals(kept(exported).filter(~pl.col("id").is_in(gone)))

    def test_a_snapshot_that_is_not_held_is_missing(self, ids: Path, held: Path, tmp_path: Path) -> None:
        (held / "data" / SNAPSHOT).rename(held / "data" / "other")
        assert apply_manifest(ids, Source(str(held)), tmp_path / "out")["missing"] == 7
        (held / "data" / SNAPSHOT).mkdir()
        assert apply_manifest(ids, Source(str(held)), tmp_path / "out")["missing"] == 7

    def test_of_two_rows_with_one_id_the_first_counts(
        self, exported: Project, ids: Path, held: Path, tmp_path: Path
    ) -> None:
        whole = kept(exported)
        folder = held / "data" / SNAPSHOT
        again = whole.head(2).with_columns(text=pl.lit("again"))
        again.write_parquet(folder / "zzz.parquet")
        told = apply_manifest(ids, Source(str(held)), tmp_path / "out")
        assert told["duplicates"] == 2
        assert told["duplicates_named"] == [
            {"snapshot": SNAPSHOT, "doc_id": i, "times": 2} for i in sorted(again["id"])
        ]
        assert written(tmp_path / "out").equals(whole)
        # now before the others
        (folder / "zzz.parquet").rename(folder / "0.parquet")
        apply_manifest(ids, Source(str(held)), tmp_path / "first")
        assert written(tmp_path / "first").equals(pl.concat([again, whole.tail(5)]))

    def test_an_unreadable_shard_is_named_and_its_documents_are_missing(
        self, exported: Project, ids: Path, held: Path, tmp_path: Path
    ) -> None:
        path = held / "data" / SNAPSHOT / "000_00000.parquet"
        broken_page(path, "id")
        told = apply_manifest(ids, Source(str(held)), tmp_path / "out", allow_missing=True)
        assert list(told["unreadable_shards"]) == [f"{SNAPSHOT}/000_00000"]
        assert told["missing"] + told["rows"] == 7 and told["missing"] > 0
        assert written(tmp_path / "out").equals(kept(exported).filter(pl.col("id").str.contains("001_00000")))

    def test_a_source_that_changes_meanwhile(self, ids: Path, held: Path, tmp_path: Path) -> None:
        class Changing(Source):
            def footer(self, shard: Shard):  # type: ignore[no-untyped-def]
                table = pl.read_parquet(shard.path)
                table.sample(fraction=1, shuffle=True, seed=1).write_parquet(shard.path)
                return super().footer(shard)

        with pytest.raises(InconsistentFiles, match=r"\.parquet changed while it was read; run the command again"):
            apply_manifest(ids, Changing(str(held)), tmp_path / "out")

    def test_a_failing_disk_is_no_missing_document(self, ids: Path, held: Path, tmp_path: Path) -> None:
        class Failing(Source):
            def batches(self, *args: object) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
                raise PermissionError(13, "no access", "shard")

        with pytest.raises(PermissionError, match="no access"):
            apply_manifest(ids, Failing(str(held)), tmp_path / "out")


class TestRefused:
    @pytest.mark.parametrize(
        ("table", "says"),
        [
            (
                {"doc_id": ["a"], "snapshot": ["../../elsewhere"]},
                "names the snapshot '../../elsewhere', which cannot be",
            ),
            ({"doc_id": ["a"], "snapshot": ["/etc"]}, "names the snapshot '/etc', which cannot be a folder's name"),
            ({"doc_id": ["a", "a"], "snapshot": ["S", "S"]}, "the id 'a' of S is null or there twice"),
            ({"doc_id": pa.array([None], pa.string()), "snapshot": ["S"]}, "the id None of S is null or there twice"),
            ({"doc_id": ["a"], "snapshot": pa.array([None], pa.string())}, "the id 'a' of None is null or there twice"),
            ({"id": ["a"], "snapshot": ["S"]}, "has no column 'doc_id'; its columns are: id, snapshot"),
            ({"doc_id": ["a"]}, "has no column 'snapshot'"),
        ],
    )
    def test_a_manifest_of_something_else(self, held: Path, tmp_path: Path, table: dict, says: str) -> None:
        pq.write_table(pa.table(table), tmp_path / "m.parquet")
        before = tree(tmp_path)
        with pytest.raises(ValueError, match=r"m\.parquet: ") as caught:
            apply_manifest(tmp_path / "m.parquet", Source(str(held)), tmp_path / "out")
        assert says in str(caught.value) and "\n" not in str(caught.value)
        assert tree(tmp_path) == before

    def test_what_is_no_manifest(self, held: Path, tmp_path: Path) -> None:
        (tmp_path / "text.parquet").write_text("no parquet")
        with pytest.raises(ValueError, match=r"text\.parquet: cannot be read as parquet"):
            apply_manifest(tmp_path / "text.parquet", Source(str(held)), tmp_path / "out")
        with pytest.raises(ValueError, match=r"held: has no column 'doc_id'"):
            apply_manifest(held, Source(str(held)), tmp_path / "out")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=r"empty: no manifest; name an exported folder"):
            apply_manifest(tmp_path / "empty", Source(str(held)), tmp_path / "out")

    @pytest.mark.parametrize("change", ["bytes", "gone", "more"])
    def test_ids_that_are_not_as_their_checksums_say(self, ids: Path, held: Path, tmp_path: Path, change: str) -> None:
        path = ids / "data" / SNAPSHOT / "000_00000.parquet"
        if change == "bytes":
            pl.read_parquet(path).head(1).write_parquet(path)
        elif change == "gone":
            path.unlink()
        else:
            shutil.copyfile(path, path.with_name("more.parquet"))
        with pytest.raises(ValueError, match=r"\.parquet is not as .*manifest\.json says; get the manifest again"):
            apply_manifest(ids, Source(str(held)), tmp_path / "out")

    def test_a_folder_that_holds_data(self, ids: Path, held: Path) -> None:
        before = tree(held)
        with pytest.raises(ValueError, match="already holds data; name another folder"):
            apply_manifest(ids, Source(str(held)), held)
        assert tree(held) == before


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_few_ids(held: Path, tmp_path: Path, rows: int) -> None:
    own = pl.read_parquet(held / "data" / SNAPSHOT / "000_00000.parquet")
    chosen = own.sample(rows, seed=1, shuffle=False)
    chosen.select(doc_id="id", snapshot=pl.lit(SNAPSHOT)).write_parquet(tmp_path / "m.parquet")
    told = apply_manifest(tmp_path / "m.parquet", Source(str(held)), tmp_path / "out")
    assert told["wanted"] == told["rows"] == rows
    if rows:
        assert written(tmp_path / "out").equals(own.filter(pl.col("id").is_in(chosen["id"].to_list())))
    else:
        assert not (tmp_path / "out" / "data").exists()
