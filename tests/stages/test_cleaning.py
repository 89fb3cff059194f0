"""Repeated texts and evaluation sets on real side files: what is found, removed, left, and made again."""

import json
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from dagster_datamask.keyed import hash128
from dagster_datamask.shards.generations import NotPublished
from dagster_datamask.shards.schemas import CONTAMINATED, TEXT_DUPLICATES
from dagster_datamask.stages.base import STAGES, Outcome, lineage
from dagster_datamask.stages.cleaning import evaluation_revision
from tests.project import SNAPSHOT_STAGES, Project, text_of, write_shard
from tests.stages.conftest import failed, rows_of, tree

ITEM = "a careful evaluation question asks how many words in a row two texts may share before one counts"
SPAN = "question asks how many words in a row two texts may share"
NEAR = "question asks how many words in a column two texts may share"


def project_of(project: Project, source: Path, **values: object) -> Project:
    return project.with_settings(**{"source.url": str(source), **values})


@pytest.fixture
def repeated(tmp_path: Path) -> Path:
    """Two snapshots: texts repeated within a shard, across shards and across snapshots, and rows that take no part."""
    source = tmp_path / "source"
    a, b, c, d = (text_of(f"repeated/{k}") for k in range(4))
    write_shard(source, "A", "000", 4, texts=[a, b, a, None], ids=["a0", "a1", "a2", "a3"], tokens=[5, 6, 5, 0])
    write_shard(source, "A", "001", 2, texts=[b, c], ids=["a4", "a5"], tokens=[6, 7])
    write_shard(source, "B", "000", 4, texts=[d, b, d, ""], ids=["b0", "b1", "b2", "b3"], tokens=[8, 6, 8, 0])
    # an id that is repeated is decided before its text is looked at
    write_shard(source, "B", "001", 3, texts=[f"{d} ", d, "other words here"], ids=["b4", "b0", "b6"], tokens=[8, 8, 3])
    return source


def why(outcome: Outcome) -> str:
    """Why a manifest was not published."""
    return failed(outcome)["made_under_these_settings"]["different"]


def score(project: Project, snapshot: str, *more: str) -> dict[str, Outcome]:
    names = ("raw_shards", *more, "dclm_scores", "edu_scores", "wiki_scores", "quality_scores", "pruned_documents")
    return {name: project.stage(name, snapshot) for name in names}


class TestDuplicates:
    def test_within_and_across_snapshots_by_name(self, project: Project, repeated: Path) -> None:
        changed = project_of(project, repeated)
        for snapshot in ("A", "B"):
            changed.stage("raw_shards", snapshot)
        first = changed.stage("text_duplicates", "A")
        rows = {row["doc_id"]: row for row in rows_of(first.published).to_dicts()}
        assert {name: row["kept_id"] for name, row in rows.items()} == {
            "a0": None,
            "a1": None,
            "a2": "a0",
            "a3": None,
            "a4": "a1",
            "a5": None,
        }
        texts = pl.read_parquet(sorted((repeated / "data" / "A").glob("*.parquet")))
        hashes = {i: hash128([text])[0].tobytes() for i, text in texts.select("id", "text").iter_rows() if text}
        assert {name: row["text_hash"] for name, row in rows.items()} == hashes | {"a3": None}
        assert first.counts == {"decided_before": 1, "duplicate_within": 2, "first": 3}
        assert first.facts == {
            "documents": 5,
            "duplicates_within": 2,
            "duplicates_of_earlier": 0,
            "groups": 2,
            "tokens_saved": 11,
            "earlier_snapshots": 0,
        }
        second = changed.stage("text_duplicates", "B")
        found = rows_of(second.published).filter(pl.col("kept_id").is_not_null())
        assert found.select("doc_id", "kept_id", "kept_snapshot").rows() == [("b1", "a1", "A"), ("b2", "b0", "B")]
        assert second.counts == {
            "decided_before": 2,
            "duplicate_of_earlier": 1,
            "duplicate_within": 1,
            "first": 3,
        }
        assert second.facts["tokens_saved"] == 14 and second.facts["groups"] == 2
        assert second.published.inputs["text_duplicates A"] == first.published.fingerprint
        assert not failed(second)
        assert pq.read_schema(second.published.path("000")).equals(TEXT_DUPLICATES)

    def test_an_earlier_snapshot_that_was_not_compared_is_named(self, project: Project, repeated: Path) -> None:
        changed = project_of(project, repeated)
        for snapshot in ("A", "B"):
            changed.stage("raw_shards", snapshot)
        alone = changed.stage("text_duplicates", "B")
        assert failed(alone) == {"every_earlier_snapshot_compared": {"waiting": "A: text_duplicates not published"}}
        assert alone.published is not None and alone.facts["duplicates_of_earlier"] == 0
        late = changed.stage("text_duplicates", "A")
        assert failed(late) == {"no_later_snapshot_compared_before": {"materialise_again": "B", "order": "by name"}}
        with_a = changed.stage("text_duplicates", "B")
        assert not failed(with_a) and with_a.published.fingerprint != alone.published.fingerprint
        write_shard(repeated, "A", "002", 1, texts=["new"], ids=["a9"])
        changed.stage("raw_shards", "A")
        assert failed(changed.stage("text_duplicates", "B")) == {
            "every_earlier_snapshot_compared": {"waiting": "A: its documents were published anew"}
        }

    def test_snapshots_out_of_order_keep_no_text_twice(self, project: Project, repeated: Path) -> None:
        """B is published before A: its manifest waits until it was compared with A, and then again when A changes."""
        changed = project_of(project, repeated, **{"clean.duplicates": "remove", "select.budget": "1"})
        names = [name for name in lineage(["fineweb_mask_manifest"], changed.settings) if STAGES[name].partitioned]

        def run(snapshot: str) -> dict[str, Outcome]:
            return {name: changed.stage(name, snapshot) for name in names}

        def texts() -> list[str]:
            """Texts that could be chosen, of both snapshots."""
            found = []
            for snapshot in ("A", "B"):
                left = rows_of(changed.store.current("pruned_documents", snapshot))
                ids = left.filter(pl.col("decision").is_null() | (pl.col("decision") == "pruned"))["doc_id"].to_list()
                source = pl.read_parquet(sorted((repeated / "data" / snapshot).glob("*.parquet")))
                found += source.filter(pl.col("id").is_in(ids)).unique("id", keep="first")["text"].to_list()
            return sorted(found)

        assert run("B")["fineweb_mask_manifest"].published
        first = run("A")
        assert first["fineweb_mask_manifest"].published
        assert failed(first["text_duplicates"])["no_later_snapshot_compared_before"]["materialise_again"] == "B"
        # what was published stays so until it is asked for again
        assert len(texts()) == len({*texts()}) + 1
        told = why(changed.stage("fineweb_mask_manifest", "B"))
        assert (
            told.startswith("text_duplicates: A came or changed after its documents were compared") and "order" in told
        )
        second = run("B")
        assert second["fineweb_mask_manifest"].published and not failed(second["text_duplicates"])
        assert len(texts()) == len({*texts()})
        # a shard more in A holds what only B had
        write_shard(repeated, "A", "002", 1, texts=["other words here"], ids=["a9"], tokens=[3])
        again = run("A")
        assert failed(again["text_duplicates"])["no_later_snapshot_compared_before"]["materialise_again"] == "B"
        assert why(changed.stage("fineweb_mask_manifest", "B")).startswith("text_duplicates: A came or changed")
        assert run("B")["fineweb_mask_manifest"].published
        assert len(texts()) == len({*texts()})
        assert not failed(run("A")["text_duplicates"])

    def test_what_is_only_reported_keeps_no_manifest_back(self, project: Project, repeated: Path) -> None:
        changed = project_of(project, repeated, **{"select.budget": "1"})
        assert changed.full("B")["fineweb_mask_manifest"].published
        changed.stage("text_duplicates", "B")
        changed.stage("raw_shards", "A")
        assert failed(changed.stage("text_duplicates", "A"))
        assert changed.stage("fineweb_mask_manifest", "B").published

    def test_removed_duplicates_leave_n_and_each_group_keeps_one(self, project: Project, repeated: Path) -> None:
        changed = project_of(project, repeated, **{"clean.duplicates": "remove", "prune.ratio": 0.0})
        assert "text_duplicates" in lineage(["pruned_documents"], changed.settings)
        score(changed, "A", "text_duplicates")
        pruned = score(changed, "B", "text_duplicates")["pruned_documents"]
        rows = {row["doc_id"]: row for row in rows_of(pruned.published).to_dicts()}
        told = {name: (row["decision"], row["stage"], row["reason"]) for name, row in rows.items()}
        assert told == {
            "b0": (None, None, None),
            "b1": ("duplicate", "text_duplicates", "same text as a1 of A"),
            "b2": ("duplicate", "text_duplicates", "same text as b0"),
            "b3": ("bad_row", "raw_shards", "blank_text"),
            "b4": (None, None, None),
            "b0#1": ("duplicate", "raw_shards", "same id as an earlier row: b0"),
            "b6": (None, None, None),
        }
        assert pruned.facts["n"] == 3
        removed = rows_of(changed.store.current("text_duplicates", "B")).filter(pl.col("kept_id").is_not_null())
        kept = {*removed["kept_id"]}
        assert not kept & {*removed["doc_id"]}
        assert {rows[name]["decision"] for name in kept if name in rows} == {None}

    def test_the_manifest_names_the_stage_and_counts_add_up(self, project: Project, repeated: Path) -> None:
        changed = project_of(project, repeated, **{"clean.duplicates": "remove", "select.budget": "1"})
        for name in lineage(("fineweb_mask", "snapshot_report"), changed.settings):
            if STAGES[name].partitioned:
                outcome = changed.stage(name, "A")
                assert outcome.published is not None, (name, failed(outcome))
        manifest = rows_of(changed.store.current("fineweb_mask_manifest", "A"))
        removed = manifest.filter(pl.col("stage") == "text_duplicates")
        assert removed.select("doc_id", "decision", "reason").rows() == [
            ("a2", "duplicate", "same text as a0"),
            ("a4", "duplicate", "same text as a1"),
        ]
        assert changed.store.current("fineweb_mask_manifest", "A").facts["duplicate"] == 2
        assert changed.store.current("datamask_masks", "A").facts["n"] == 3

    @pytest.mark.parametrize("texts", [[], ["one text"], ["one text", "one text"], [None]])
    def test_none_one_and_two_rows(self, project: Project, tmp_path: Path, texts: list[str | None]) -> None:
        write_shard(tmp_path, "S", "a", len(texts), texts=texts)
        changed = project_of(project, tmp_path)
        changed.stage("raw_shards", "S")
        outcome = changed.stage("text_duplicates", "S")
        assert outcome.published.rows == len(texts)
        assert outcome.facts["duplicates_within"] == max(0, len(texts) - 1)

    def test_tokens_are_unknown_where_a_duplicate_has_no_count(self, project: Project, tmp_path: Path) -> None:
        write_shard(tmp_path, "S", "a", 3, texts=["a b", "a b", "a b"], tokens=[2, None, 2])
        changed = project_of(project, tmp_path)
        changed.stage("raw_shards", "S")
        assert changed.stage("text_duplicates", "S").facts["tokens_saved"] is None

    def test_a_broken_off_run_goes_on_to_the_same_bytes(
        self, project: Project, repeated: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changed = project_of(project, repeated)
        changed.stage("raw_shards", "A")
        whole = changed.stage("text_duplicates", "A")
        bytes_of = tree(whole.published.folder)
        (whole.published.folder / "001.parquet").unlink()
        again = changed.stage("text_duplicates", "A")
        assert again.facts == whole.facts and again.counts == whole.counts
        assert tree(whole.published.folder) == bytes_of


@pytest.fixture
def evaluated(tmp_path: Path) -> tuple[Path, Path]:
    """(a source with a contaminated document, a near miss and others; an evaluation set)."""
    source = tmp_path / "source"
    texts = [
        text_of("clean/0"),
        f"{text_of('clean/1')} And: {SPAN.upper()}, before! {text_of('clean/2')}",
        f"{text_of('clean/3')} {NEAR} {text_of('clean/4')}",
        None,
        f"{ITEM}.",
    ]
    write_shard(source, "S", "a", 4, texts=texts[:4], ids=["clean", "span", "near", "null"])
    write_shard(source, "S", "b", 1, texts=texts[4:], ids=["whole"])
    sets = tmp_path / "asked.jsonl"
    sets.write_text("".join(json.dumps(row) + "\n" for row in ({"q": "short one"}, {"q": ITEM, "a": "yes"})))
    return source, sets


class TestContamination:
    def test_set_row_and_span_are_told(self, project: Project, evaluated: tuple[Path, Path]) -> None:
        source, sets = evaluated
        changed = project_of(project, source, **{"clean.evaluation_sets": [str(sets)], "clean.ngram": 12})
        changed.stage("raw_shards", "S")
        outcome = changed.stage("contaminated_documents", "S")
        rows = rows_of(outcome.published).to_dicts()
        assert [(row["doc_id"], row["evaluation_set"], row["item"]) for row in rows] == [
            ("span", "asked.jsonl", 1),
            ("whole", "asked.jsonl", 1),
        ]
        text = pl.read_parquet(source / "data" / "S" / "a.parquet")["text"][1]
        assert text[rows[0]["start"] : rows[0]["end"]] == f"{SPAN.upper()}, before"
        assert rows[0]["words"] == f"{SPAN} before"
        assert rows[1]["words"] == ITEM
        assert outcome.counts == {"clean": 2, "contaminated": 2, "decided_before": 1}
        assert outcome.rows_in == 5
        assert outcome.facts == {
            "contaminated": 2,
            "ngram": 12,
            "sets": [
                {
                    "evaluation_set": "asked.jsonl",
                    "items": 2,
                    "texts": 3,
                    "matched_whole": 0,
                    "too_short": 2,
                    "documents": 2,
                }
            ],
        }
        assert pq.read_schema(outcome.published.path("a")).equals(CONTAMINATED)

    def test_they_are_decided_with_set_and_span_and_leave_n(
        self, project: Project, evaluated: tuple[Path, Path]
    ) -> None:
        source, sets = evaluated
        values = {"clean.evaluation_sets": [str(sets)], "clean.ngram": 12, "prune.ratio": 0.0}
        changed = project_of(project, source, **values)
        assert "contaminated_documents" in lineage(["pruned_documents"], changed.settings)
        pruned = score(changed, "S", "contaminated_documents")["pruned_documents"]
        told = {
            row["doc_id"]: (row["decision"], row["stage"], row["reason"])
            for row in rows_of(pruned.published).to_dicts()
        }
        assert told["clean"] == told["near"] == (None, None, None)
        decision, stage, reason = told["span"]
        assert (decision, stage) == ("contaminated", "contaminated_documents")
        match = rows_of(changed.store.current("contaminated_documents", "S")).to_dicts()[0]
        assert reason == f"13 words of asked.jsonl, item 1, at characters {match['start']} to {match['end']}"
        assert pruned.facts["n"] == 2
        assert pruned.counts == {"bad_row": 1, "contaminated": 2, "survives": 2}

    def test_without_sets_no_text_is_read_and_pruning_does_not_ask(
        self, project: Project, evaluated: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, _ = evaluated
        changed = project_of(project, source)
        line = lineage(["pruned_documents"], changed.settings)
        assert not {"text_duplicates", "contaminated_documents"} & {*line, *SNAPSHOT_STAGES}
        changed.stage("raw_shards", "S")
        monkeypatch.setattr(changed.source, "batches", None)
        outcome = changed.stage("contaminated_documents", "S")
        assert outcome.published.rows == 0 and outcome.facts["sets"] == []
        assert outcome.counts == {"clean": 4, "decided_before": 1}

    def test_a_moved_set_changes_nothing_and_a_changed_one_all(
        self, project: Project, evaluated: tuple[Path, Path], tmp_path: Path
    ) -> None:
        source, sets = evaluated
        changed = project_of(project, source, **{"clean.evaluation_sets": [str(sets)]})
        changed.stage("raw_shards", "S")
        first = changed.stage("contaminated_documents", "S").published
        moved = tmp_path / "moved" / sets.name
        moved.parent.mkdir()
        moved.write_bytes(sets.read_bytes())
        elsewhere = changed.with_settings(**{"clean.evaluation_sets": [str(moved)]})
        assert elsewhere.stage("contaminated_documents", "S").published == first
        assert all(str(sets.parent).encode() not in content for content in tree(first.folder.parent).values())
        moved.write_text('"something else altogether, long enough to be compared with others of its kind today"\n')
        assert evaluation_revision(elsewhere.settings) != evaluation_revision(changed.settings)
        second = elsewhere.stage("contaminated_documents", "S").published
        assert second.fingerprint != first.fingerprint and second.rows == 0

    def test_a_shard_that_lands_does_not_have_the_others_read_again(
        self, project: Project, evaluated: tuple[Path, Path]
    ) -> None:
        source, sets = evaluated
        changed = project_of(project, source, **{"clean.evaluation_sets": [str(sets)], "clean.ngram": 12})
        changed.stage("raw_shards", "S")
        first = changed.stage("contaminated_documents", "S").published
        write_shard(source, "S", "c", 1, texts=[ITEM], ids=["late"])
        changed.stage("raw_shards", "S")
        second = changed.stage("contaminated_documents", "S").published
        assert rows_of(second)["doc_id"].to_list() == ["span", "whole", "late"]
        assert second.path("a").stat().st_ino == first.path("a").stat().st_ino

    def test_the_manifest_refuses_what_was_made_without_the_sets_in_force(
        self, project: Project, evaluated: tuple[Path, Path]
    ) -> None:
        source, sets = evaluated
        changed = project_of(project, source, **{"select.budget": "1", "clean.ngram": 12})
        changed.full("S")
        asked = changed.with_settings(**{"clean.evaluation_sets": [str(sets)]})
        with pytest.raises(NotPublished, match="contaminated_documents of snapshot S is not published"):
            asked.stage("fineweb_mask_manifest", "S")
        asked.stage("contaminated_documents", "S")
        refused = asked.stage("fineweb_mask_manifest", "S")
        assert refused.published is None
        assert why(refused) == "pruned_documents: made without contaminated_documents"
        for name in lineage(("fineweb_mask",), asked.settings):
            if STAGES[name].partitioned:
                assert asked.stage(name, "S").published is not None, name
        manifest = rows_of(asked.store.current("fineweb_mask_manifest", "S"))
        assert manifest.filter(pl.col("decision") == "contaminated")["doc_id"].to_list() == ["span", "whole"]
        sets.write_text("")
        assert "contaminated_documents: made with other evaluation sets" in why(
            asked.stage("fineweb_mask_manifest", "S")
        )
        assert "pruned_documents: made with contaminated_documents" in why(changed.stage("fineweb_mask_manifest", "S"))
