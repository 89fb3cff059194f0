import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection.diff import causes, diff
from dagster_datamask.selection.objectives import BadInput
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.schemas import MANIFEST, MASKS
from dagster_datamask.shards.writer import table_file, write_json

ID = pa.schema([f.with_name("id") if f.name == "doc_id" else f for f in MASKS])


def mask(path: Path, kept: list[str], order: list[str], schema: pa.Schema = ID, **columns: list[Any]) -> Path:
    """A mask file whose scores fall in the order given."""
    n = len(order)
    rows: dict[str, Any] = {
        schema.names[0]: order,
        "selected": [i in kept for i in order],
        "score": [float(n - k) for k in range(n)],
        "rank": [k + 1 for k in range(n)],
        "split": [0] * n,
        **{name: [None] * n for name in ("reason", "kept_id", "similarity")},
        **columns,
    }
    with table_file(path, schema) as writer:
        writer.write(pa.table({name: pa.array(rows[name], schema.field(name).type) for name in schema.names}))
    return path


def named(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["doc_id"]: row for row in told["changes"]}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_counts_and_changes_of_two_masks(tmp_path: Path, suffix: str) -> None:
    a = mask(tmp_path / f"a.{suffix}", ["x", "y"], ["x", "y", "z", "only-a"])
    # another order of rows, another set of documents
    b = mask(tmp_path / "b.parquet", ["x", "new"], ["new", "x", "z", "y"])
    told = diff(a, b)
    assert {k: v for k, v in told.items() if isinstance(v, int | float)} == {
        "documents_a": 4, "documents_b": 4, "documents_only_in_a": 1, "documents_only_in_b": 1,
        "kept_a": 2, "kept_b": 2, "kept_by_both": 1, "kept_only_by_a": 1, "kept_only_by_b": 1,
        "changed": 2, "jaccard": 1 / 3,
    }  # fmt: skip
    changed = named(told)
    assert set(changed) == {"y", "new"}
    y = changed["y"]
    assert (y["change"], y["decision_a"], y["decision_b"]) == ("removed", "kept", "not_selected")
    assert (y["rank_a"], y["rank_b"], y["score_a"], y["score_b"]) == (2, 4, 3.0, 1.0)
    # two are kept, so the cut is the second score: 3.0 in both
    assert (y["score_from_cut_a"], y["score_from_cut_b"]) == (0.0, -2.0)
    assert (y["places_from_cut_a"], y["places_from_cut_b"]) == (0, -2)
    assert y["why"] == "2 places below the cut of B"
    assert (changed["new"]["change"], changed["new"]["decision_a"]) == ("added", None)
    assert changed["new"]["why"] == "not among the documents of A"
    assert told["causes"] is None
    assert json.loads(json.dumps(told, allow_nan=False)) == told


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_counts_against_python_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [f"d{k}" for k in range(12)]
    sides = []
    with tempfile.TemporaryDirectory() as folder:
        for side in "ab":
            order = rng.permutation(names)[: int(rng.integers(0, 13))].tolist()
            kept = [name for name in order if rng.random() < 0.4]
            mask(Path(folder) / f"{side}.parquet", kept, order)
            sides.append((set(order), set(kept)))
        told = diff(Path(folder) / "a.parquet", Path(folder) / "b.parquet")
        back = diff(Path(folder) / "b.parquet", Path(folder) / "a.parquet")
    (all_a, kept_a), (all_b, kept_b) = sides
    assert (told["documents_a"], told["documents_only_in_a"]) == (len(all_a), len(all_a - all_b))
    assert told["kept_by_both"] == len(kept_a & kept_b)
    assert {r["doc_id"] for r in told["changes"] if r["change"] == "removed"} == kept_a - kept_b
    assert {r["doc_id"] for r in told["changes"] if r["change"] == "added"} == kept_b - kept_a
    assert told["changed"] == len(kept_a ^ kept_b)
    union = len(kept_a | kept_b)
    assert told["jaccard"] == (pytest.approx(len(kept_a & kept_b) / union) if union else None)
    assert sum(row["documents"] for row in told["decisions"]) == len(all_a | all_b)
    assert [r["doc_id"] for r in told["changes"]] == [r["doc_id"] for r in back["changes"]]


def test_the_first_changes_are_those_farthest_from_the_cut_and_the_file_has_all(tmp_path: Path) -> None:
    order = [f"d{k:02d}" for k in range(60)]
    a = mask(tmp_path / "a.parquet", order[:25], order)
    b = mask(tmp_path / "b.parquet", order[-25:], order[::-1])
    told = diff(a, b, tmp_path / "changes.parquet")
    assert (told["changed"], len(told["changes"])) == (50, 20)
    # d00 and d59 are 35 places below the other's cut
    assert [row["doc_id"] for row in told["changes"][:4]] == ["d00", "d59", "d01", "d58"]
    every = pl.read_parquet(tmp_path / "changes.parquet").to_dicts()
    assert len(every) == 50 and every[:20] == told["changes"]
    diff(a, b, tmp_path / "changes.csv")
    with (tmp_path / "changes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["doc_id"] for row in rows] == [row["doc_id"] for row in every]
    assert list(rows[0]) == list(every[0])


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    order = [f"d{k}" for k in range(500)]
    a = mask(tmp_path / "a.parquet", order[:100], order)
    b = mask(tmp_path / "b.parquet", order[50:150], order)
    for name in ("one", "two"):
        diff(a, b, tmp_path / f"{name}.parquet")
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


def test_near_duplicates_and_reasons_are_told(tmp_path: Path) -> None:
    a = mask(tmp_path / "a.parquet", ["x", "y", "z"], ["x", "y", "z"], similarity=[float("nan")] * 3)
    b = mask(
        tmp_path / "b.parquet", ["x"], ["x", "y", "z"],
        kept_id=[None, "x", None], similarity=[None, 0.987654, None], reason=[None, "near_duplicate", "no_tokens"],
    )  # fmt: skip
    changed = named(diff(a, b))
    assert changed["y"]["why"] == "B keeps its near-duplicate x (cosine 0.988)"
    assert (changed["y"]["kept_id_b"], changed["y"]["similarity_a"]) == ("x", None)
    assert changed["z"]["why"] == "B: not_selected, no_tokens"


def test_a_document_passed_over_within_the_cut_is_told(tmp_path: Path) -> None:
    a = mask(tmp_path / "a.parquet", ["x"], ["x", "y"])
    b = mask(tmp_path / "b.parquet", ["y"], ["x", "y"])
    assert {row["doc_id"]: row["why"] for row in diff(a, b)["changes"]} == {
        "x": "passed over in B, though within its cut by score",
        "y": "1 place below the cut of A",
    }


def test_cuts_are_those_of_each_split(tmp_path: Path) -> None:
    order = ["p", "q", "r", "s"]
    both = {"split": [0, 0, 1, 1], "rank": [1, 2, 1, 2], "score": [9.0, 8.0, 2.0, 1.0]}
    a = mask(tmp_path / "a.parquet", ["p", "r"], order, **both)
    b = mask(tmp_path / "b.parquet", ["p", "s"], order, **both)
    changed = named(diff(a, b))
    assert changed["s"]["score_from_cut_a"] == -1.0
    assert changed["r"]["places_from_cut_b"] == 0


def manifest(folder: Path, rows: list[tuple[str, str, str, str | None, float | None]], **sidecar: Any) -> Path:
    """A generation with one shard a document, and its sidecar."""
    folder.mkdir(parents=True)
    for k, (doc, decision, stage, reason, score) in enumerate(rows):
        row: dict[str, Any] = dict.fromkeys(MANIFEST.names)
        row |= {"doc_id": doc, "decision": decision, "stage": stage, "reason": reason, "score": score, "split": 0}
        with table_file(folder / f"{k:03d}.parquet", MANIFEST) as writer:
            writer.write(pa.Table.from_pylist([row], schema=MANIFEST))
    write_json(folder / "manifest.json", sidecar)
    return folder


def test_manifests_tell_the_stage_and_what_they_were_made_from(tmp_path: Path) -> None:
    mine, theirs = {"select.lambda": 0.5, "prune.ratio": 0.4}, {"select.lambda": 0.5, "prune.ratio": 0.5}
    versions = {"raw_shards": "1", "datamask_masks": "2"}
    a = manifest(
        tmp_path / "a",
        [
            ("x", "kept", "datamask_masks", None, 3.0),
            ("y", "kept", "datamask_masks", None, 2.0),
            ("z", "not_selected", "datamask_masks", None, 1.0),
            ("w", "unscored", "quality_scores", "no_tokens", None),
        ],
        settings=mine, code_versions=versions, fingerprints={"raw_shards": "f", "pruned_documents": "g"},
    )  # fmt: skip
    b = manifest(
        tmp_path / "b",
        [
            ("z", "kept", "datamask_masks", None, 2.5),
            ("y", "pruned", "pruned_documents", "quality_below_2.31", None),
            ("x", "kept", "datamask_masks", None, 3.0),
            ("w", "duplicate", "raw_shards", None, None),
        ],
        settings=theirs, code_versions=versions, fingerprints={"raw_shards": "f", "pruned_documents": "h"},
    )  # fmt: skip
    told = diff(a, b)
    assert told["causes"] == [
        {"kind": "settings", "name": "prune.ratio", "a": 0.4, "b": 0.5},
        {"kind": "fingerprints", "name": "pruned_documents", "a": "g", "b": "h"},
    ]
    changed = named(told)
    assert list(changed)[-1] == "w", "what neither keeps comes last"
    assert (changed["w"]["change"], changed["y"]["stage_b"]) == ("moved", "pruned_documents")
    assert changed["y"]["why"] == "B: pruned, quality_below_2.31, at pruned_documents"
    assert changed["w"]["why"] == "A: unscored, no_tokens, at quality_scores; B: duplicate, at raw_shards"
    # without ranks of their own, documents are ranked by score
    assert (changed["z"]["rank_a"], changed["z"]["places_from_cut_a"], changed["z"]["score_from_cut_a"]) == (3, -1, -1)
    assert changed["z"]["rank_b"] == 2 and changed["y"]["rank_b"] is None


def test_a_published_folder_is_followed_to_its_generation(tmp_path: Path) -> None:
    def publish(seed: int, kept: list[str]) -> Path:
        store = Store(tmp_path / "root")
        settings_read = {"select.seed": seed}
        with store.generation(
            "datamask_masks", "CC-A", code_version="1", settings=settings_read, inputs={"e5": "f"}
        ) as made:
            mask(made.folder / "000.parquet", kept, ["x", "y", "z"], MASKS)
            write_json(made.folder / "facts.json", {"lambda": 0.5, "seed": seed, "n": 9, "trajectories": {}})
            record = made.complete("000", ".parquet", rows=3, rows_in=3, counts={})
            return made.publish([record], ".parquet", {}).folder

    first = publish(0, ["x"])
    copy = tmp_path / "CC-A"
    copy.mkdir()
    for item in first.parent.rglob("*"):
        if item.is_file():
            target = copy / item.relative_to(first.parent)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(item.read_bytes())
    second = publish(1, ["y"])
    told = diff(copy, second.parent)
    assert (told["kept_only_by_a"], told["kept_only_by_b"]) == (1, 1)
    assert told["causes"] == [{"kind": "settings", "name": "select.seed", "a": 0, "b": 1}]
    # the pointer names the second now: of the first only its own figures are known
    told = diff(first, second)
    assert told["kept_only_by_a"] == 1
    assert told["causes"] == [{"kind": "selection", "name": "seed", "a": 0, "b": 1}]
    assert diff(second, second.parent)["changed"] == 0


def test_only_what_both_sides_tell_is_a_cause() -> None:
    a = {"settings": {"x": 1, "old": 2}, "models": {"dclm": "m"}, "quarantined_shards": ["s"]}
    b = {"settings": {"x": 3, "new": 2}, "quarantined_shards": []}
    assert causes(a, b) == [
        {"kind": "settings", "name": "x", "a": 1, "b": 3},
        {"kind": "quarantined_shards", "name": "quarantined_shards", "a": ["s"], "b": []},
    ]
    assert causes(a, a) == []
    assert causes(a, None) is causes(None, b) is None


def test_a_mask_can_be_compared_with_a_manifest(tmp_path: Path) -> None:
    a = mask(tmp_path / "a.parquet", ["x"], ["x", "y"])
    b = manifest(tmp_path / "b", [("x", "pruned", "pruned_documents", None, None), ("y", "kept", "m", None, 1.0)])
    assert {doc: row["change"] for doc, row in named(diff(a, b)).items()} == {"x": "removed", "y": "added"}


@pytest.mark.parametrize(("rows_a", "rows_b"), [(0, 0), (0, 1), (1, 1), (2, 2)])
def test_smallest_inputs(tmp_path: Path, rows_a: int, rows_b: int) -> None:
    for name, rows in (("a", rows_a), ("b", rows_b)):
        mask(tmp_path / f"{name}.parquet", ["d0"], [f"d{k}" for k in range(rows)])
    told = diff(tmp_path / "a.parquet", tmp_path / "b.parquet", tmp_path / "out.csv")
    assert (told["documents_a"], told["documents_b"]) == (rows_a, rows_b)
    assert told["changed"] == int(rows_a == 0 and rows_b > 0)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + told["changed"]


def test_faults_are_named(tmp_path: Path) -> None:
    good = mask(tmp_path / "good.parquet", ["x"], ["x", "y"])
    twice = mask(tmp_path / "twice.parquet", ["x"], ["x", "y", "z", "y", "z"])
    with pytest.raises(BadInput, match=r"twice\.parquet: the id 'y' stands in 2 rows"):
        diff(good, twice)
    for name, table, says in [
        ("bare", {"score": [1.0]}, "has no column 'doc_id' or 'id', no column 'selected' or 'decision'; its .*: score"),
        ("ids", {"id": ["x"], "rank": [1]}, "has no column 'selected' or 'decision'; its columns are: id, rank"),
    ]:
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
        with pytest.raises(ValueError, match=rf"{name}\.parquet: {says}"):
            diff(good, tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"id": ["x", None], "selected": [True, False]}), tmp_path / "null.parquet")
    with pytest.raises(BadInput, match=r"null\.parquet: 1 row without an id or a decision"):
        diff(good, tmp_path / "null.parquet")
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"cut\.parquet: cannot be read"):
        diff(tmp_path / "cut.parquet", good)
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"text\.parquet: is neither a parquet nor an Arrow"):
        diff(tmp_path / "text.parquet", good)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: holds neither parquet files nor a current\.json"):
        diff(good, tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        diff(good, tmp_path / "no-such.parquet")
    with pytest.raises(ValueError, match=r"out\.txt: write the changes to a file that ends in"):
        diff(good, good, tmp_path / "out.txt")
    bad = pa.table({"id": ["x"], "selected": ["perhaps"]})
    pq.write_table(bad, tmp_path / "type.parquet")
    with pytest.raises(ValueError, match=r"type\.parquet: cannot be read as a mask or manifest .*perhaps"):
        diff(good, tmp_path / "type.parquet")
