"""GneissWeb's rule and its baseline: percentiles by category against sorting, and the texts that are written."""

import math
import shutil
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path

import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.settings import BaselinesSettings, SettingsError
from dagster_datamask.shards.order import tie_hash
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.stages.gneissweb import SCORERS, Rule
from dagster_datamask.stages.substrings import NOTHING_LEFT
from tests.assets.conftest import execute, materialised
from tests.conftest import SNAPSHOTS
from tests.project import Project, settings_for
from tests.stages.conftest import copied, failed, rows_of
from tests.stages.test_substrings import write_bytewise

SNAPSHOT = SNAPSHOTS[0]
Row = tuple[str, float | None, float | None, bool]


def documents(batches: list[list[Row]]) -> Iterator[tuple[pa.Array, Mapping[str, pa.Table]]]:
    """Batches of (id, dclm, edu, whether nothing is left) as the rule takes them."""
    for batch in batches:
        ids = pa.array([row[0] for row in batch], pa.string())
        sides = {
            f"{scorer}_scores": pa.table({"score": pa.array([row[k] for row in batch], pa.float64())})
            for k, scorer in ((1, "dclm"), (2, "edu"))
        }
        empty = pa.array([NOTHING_LEFT if row[3] else None for row in batch], pa.string())
        yield ids, sides | {"exact_substrings": pa.table({"reason": empty})}


def judged(
    batches: list[list[Row]], folder: Path, percentile: float = 0.5, categories: Path | None = None
) -> dict[str, tuple[float, bool, str | None]]:
    chosen = BaselinesSettings(gneissweb_percentile=percentile, gneissweb_categories=str(categories or ""))
    rule = Rule(chosen, folder, lambda: documents(batches))
    told = {}
    for ids, rows in documents(batches):
        score, passes, reasons = rule(ids, rows)
        told |= dict(zip(ids.to_pylist(), zip(score.tolist(), passes.tolist(), reasons, strict=True), strict=True))
    return told


def write_categories(path: Path, labels: Mapping[str, str | None]) -> Path:
    pq.write_table(pa.table({"id": list(labels), "category": pa.array(labels.values(), pa.string())}), path)
    return path


def by_sorting(rows: list[Row], labels: Mapping[str, str | None], percentile: float) -> set[str]:
    """The ids that pass: each category sorted by each score, its lowest share left out."""
    passing = set()
    for category in {labels.get(row[0]) for row in rows}:
        inside = [row for row in rows if labels.get(row[0]) == category and not row[3]]
        kept = []
        for k in (1, 2):
            scored = [row for row in inside if row[k] is not None]
            best = sorted(scored, key=lambda row: (-row[k], int(tie_hash([row[0]])[0])))
            kept.append({row[0] for row in best[: len(best) - math.floor(Fraction(repr(percentile)) * len(best))]})
        passing |= kept[0] & kept[1]
    return passing


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0])),
            st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 2.5, 5.5])),
            st.booleans(),
            st.sampled_from([None, "science", "medicine", "technology"]),
        ),
        max_size=40,
    ),
    st.sampled_from([0.1, 0.29, 0.5, 0.9]),
    st.booleans(),
)
def test_who_passes_is_who_passes_when_each_category_is_sorted(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple], percentile: float, by_category: bool
) -> None:
    folder = tmp_path_factory.mktemp("rule")
    rows: list[Row] = [(f"d{k}", *row[:3]) for k, row in enumerate(found)]
    labels = {f"d{k}": row[3] for k, row in enumerate(found) if by_category and row[3] is not None}
    categories = write_categories(folder / "labels.parquet", labels | {"elsewhere": "x"}) if by_category else None
    batches = [rows[:7], rows[7:7], rows[7:]]
    told = judged(batches, folder, percentile, categories)
    assert {id_ for id_, (_, passes, _) in told.items() if passes} == by_sorting(rows, labels, percentile)
    for id_, _, _, empty in rows:
        score, passes, reason = told[id_]
        assert (reason is None) == passes
        assert math.isnan(score) == empty
        assert not passes or score == len(SCORERS)


def test_the_reason_names_the_scorers_below(tmp_path: Path) -> None:
    rows: list[Row] = [("a", 1.0, 5.0, False), ("b", 0.0, 4.0, False), ("c", 0.9, 0.0, False), ("d", 0.1, 0.1, False)]
    told = judged([[*rows, ("e", 1.0, 5.0, True)]], tmp_path)
    assert told["a"] == (2.0, True, None)
    assert told["b"] == (1.0, False, "below the percentile of dclm")
    assert told["c"] == (1.0, False, "below the percentile of edu")
    assert told["d"] == (0.0, False, "below the percentile of dclm and edu")
    assert told["e"][1:] == (False, NOTHING_LEFT)


def test_a_score_that_is_null_is_below_nothing(tmp_path: Path) -> None:
    rows: list[Row] = [("a", 1.0, 5.0, False), ("b", 0.0, 4.0, False), ("c", 0.5, 0.0, False)]
    told = judged([[*rows, ("d", None, 5.0, False), ("e", None, 0.0, False), ("f", None, None, False)]], tmp_path)
    assert told["d"] == (1.0, False, "no score of dclm")
    assert told["e"] == (0.0, False, "no score of dclm, below the percentile of edu")
    assert told["f"] == (0.0, False, "no score of dclm and edu")


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_documents_leave_one_at_least(tmp_path: Path, count: int) -> None:
    rows: list[Row] = [(f"d{k}", float(k), float(k), False) for k in range(count)]
    told = judged([rows], tmp_path, 0.9)
    assert [id_ for id_, (_, passes, _) in told.items() if passes] == ([f"d{count - 1}"] if count else [])


def test_what_a_killed_run_left_is_no_document(tmp_path: Path) -> None:
    """The same folder again: keys are appended to files of this rule alone."""
    rows: list[Row] = [(f"d{k}", float(k), float(k), False) for k in range(10)]
    first = judged([rows], tmp_path)
    assert judged([rows], tmp_path) == first
    assert sum(passes for _, passes, _ in first.values()) == 5


def test_categories_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    rows: list[Row] = [("a", 1.0, 1.0, False), ("b", 0.0, 0.0, False)]

    def refused(path: Path) -> str:
        with pytest.raises(SettingsError) as error:
            judged([rows], tmp_path, categories=path)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "absent.parquet is no file; name a parquet file with" in refused(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("id,category\n", "utf-8")
    assert "text.parquet is no parquet file" in refused(tmp_path / "text.parquet")
    pq.write_table(pa.table({"id": ["a"], "label": ["x"]}), tmp_path / "columns.parquet")
    assert "has no column 'category'; its columns are: id, label" in refused(tmp_path / "columns.parquet")
    twice = pa.table({"id": ["b", "a", "a"], "category": ["x", "x", "y"]})
    pq.write_table(twice, tmp_path / "twice's.parquet")
    assert "gives document 'a' two categories, 'x' and 'y'; leave one" in refused(tmp_path / "twice's.parquet")


def test_a_label_given_twice_alike_or_for_a_document_elsewhere_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "labels.parquet"
    pq.write_table(pa.table({"id": ["a", "a", "z", "z"], "category": ["x", "x", "p", "q"]}), path)
    rows: list[Row] = [("a", 0.0, 0.0, False), ("b", 1.0, 1.0, False), ("c", 2.0, 2.0, False)]
    told = judged([rows], tmp_path, categories=path)
    # alone in its category, the lowest of all passes; of the two others one does
    assert [told[id_][1] for id_ in "abc"] == [True, False, True]


BLURB = "This page is provided as it is, without any warranty, and may be copied by all who like it."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, small_source: Path) -> Path:
    """The small source's first snapshot, every third text with a common blurb behind it, the last one nothing else."""
    folder = tmp_path_factory.mktemp("blurbs")
    for path in sorted((small_source / "data" / SNAPSHOT).glob("*.parquet")):
        table = pq.read_table(path)
        texts = [f"{text} {BLURB}" if row % 3 == 0 else text for row, text in enumerate(table["text"].to_pylist()[:-1])]
        column = pa.array([*texts, BLURB], pa.string())
        target = folder / "data" / SNAPSHOT / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.set_column(0, "text", column), target, row_group_size=16)
    return folder


IN_ORDER = (
    *("raw_shards", "dclm_scores", "edu_scores", "wiki_scores", "quality_scores", "pruned_documents"),
    *("e5_embeddings", "kmeans_clusters", "exact_substrings", "baseline_gneissweb", "fineweb_mask_manifest"),
    "fineweb_mask",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, source: Path, fitted_root: Path, labels: Path) -> Project:
    """GneissWeb's strategy over that source, with what mask and texts are made from. Copy it, never write into it."""
    folder = tmp_path_factory.mktemp("gneissweb")
    shutil.copytree(fitted_root, folder / "root")
    tokenizer = write_bytewise(folder / "tokenizer")
    project = Project(
        settings_for(
            source,
            folder / "root",
            labels,
            f"source.tokenizer={tokenizer}",
            "baselines.gneissweb_tokens=90",
            "select.strategy=baseline_gneissweb",
        )
    )
    for name in IN_ORDER:
        assert project.stage(name, SNAPSHOT).published is not None, name
    return project


def published(project: Project, name: str) -> pl.DataFrame:
    return rows_of(project.store.current(name, SNAPSHOT))


def rows_of_source(source: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((source / "data" / SNAPSHOT).glob("*.parquet")):
        yield from pl.read_parquet(path)["id", "text"].iter_rows()


def test_the_mask_is_the_rule_s_drawn_to_the_budget(made: Project) -> None:
    frame = published(made, "baseline_gneissweb")
    scores = {part: dict(published(made, f"{part}_scores")["doc_id", "score"].iter_rows()) for part in SCORERS}
    empty = published(made, "exact_substrings").filter(pl.col("reason") == NOTHING_LEFT)["doc_id"].to_list()
    # the blurb alone, in the second shard's last row as in the first's
    assert len(empty) == 2
    rows = [(i, scores["dclm"][i], scores["edu"][i], i in empty) for i in frame["doc_id"]]
    passing = by_sorting(rows, {}, 0.5)
    facts = made.store.current("baseline_gneissweb", SNAPSHOT).facts
    assert facts["passing"] == len(passing) >= facts["kept"] == 7
    chosen = set(frame.filter(pl.col("selected"))["doc_id"])
    assert len(chosen) == 7
    assert chosen <= passing
    why = dict(frame["doc_id", "reason"].iter_rows())
    assert [why[i] for i in empty] == [NOTHING_LEFT] * 2


def test_the_written_texts_are_the_source_s_without_what_brute_force_finds(made: Project, source: Path) -> None:
    kept = dict(published(made, "fineweb_mask")["doc_id", "text"].iter_rows())
    assert len(kept) == 7
    expected = {}
    for path in sorted((source / "data" / SNAPSHOT).glob("*.parquet")):
        before: list[bytes] = []
        for row in pq.read_table(path, columns=["id", "text"]).to_pylist():
            text = row["text"].encode()
            cut = np.zeros(len(text), bool)
            for start in range(len(text) - 90 + 1):
                window = text[start : start + 90]
                if any(window in other for other in before) or text.find(window) < start:
                    cut[start : start + 90] = True
            expected[row["id"]] = bytes(np.frombuffer(text, np.uint8)[~cut]).decode()
            before.append(text)
    assert kept == {id_: expected[id_] for id_ in kept}
    whole = dict(rows_of_source(source))
    changed = [id_ for id_ in kept if kept[id_] != whole[id_]]
    assert 0 < len(changed) < len(kept)


def test_another_length_means_cutting_and_choosing_anew(made: Project, tmp_path: Path) -> None:
    mine = copied(made, tmp_path / "root").with_settings(**{"baselines.gneissweb_tokens": 60})
    mine.stage("exact_substrings", SNAPSHOT)
    for name in ("fineweb_mask_manifest", "fineweb_mask"):
        with pytest.raises(
            InconsistentFiles, match="was made from another generation of exact_substrings than the pub"
        ):
            mine.stage(name, SNAPSHOT)
    for name in ("baseline_gneissweb", "fineweb_mask_manifest", "fineweb_mask"):
        assert mine.stage(name, SNAPSHOT).published is not None


def test_what_was_made_with_other_tokens_or_categories_is_refused(made: Project, tmp_path: Path) -> None:
    mine = copied(made, tmp_path / "root")
    ids = published(mine, "raw_shards")["doc_id"].to_list()
    categories = write_categories(tmp_path / "labels.parquet", dict.fromkeys(ids[::2], "x"))
    labelled = mine.with_settings(**{"baselines.gneissweb_categories": str(categories)})
    assert "baseline_gneissweb: made with other categories" in refused(labelled)
    first = labelled.stage("baseline_gneissweb", SNAPSHOT).published
    assert labelled.stage("fineweb_mask_manifest", SNAPSHOT).published is not None
    write_categories(categories, dict.fromkeys(ids[::3], "x"))
    assert "baseline_gneissweb: made with other categories" in refused(labelled)
    second = labelled.stage("baseline_gneissweb", SNAPSHOT).published
    assert first.fingerprint != second.fingerprint
    tokenizer = shutil.copytree(mine.settings.source.tokenizer, tmp_path / "tokenizer")
    text = (tokenizer / "tokenizer.json").read_text("utf-8")
    (tokenizer / "tokenizer.json").write_text(text.replace("  ", " "), "utf-8")
    other = labelled.with_settings(**{"source.tokenizer": str(tokenizer)})
    assert "exact_substrings: made with another model" in refused(other)


def refused(project: Project) -> str:
    outcome = project.stage("fineweb_mask_manifest", SNAPSHOT)
    assert outcome.published is None
    return str(failed(outcome)["made_under_these_settings"]["different"])


def test_a_token_budget_is_not_exceeded(made: Project, tmp_path: Path) -> None:
    mine = copied(made, tmp_path / "root").with_settings(**{"select.budget": "900tok"})
    outcome = mine.stage("baseline_gneissweb", SNAPSHOT)
    assert outcome.published is not None
    assert 900 - outcome.facts["slack"] < outcome.facts["tokens"] <= 900


def test_the_assets_in_a_run_of_dagster(made: Project, tmp_path: Path) -> None:
    mine = copied(made, tmp_path / "root")
    shutil.rmtree(tmp_path / "root" / "fineweb_mask")
    shutil.rmtree(tmp_path / "root" / "exact_substrings")
    names = ("exact_substrings", "baseline_gneissweb", "fineweb_mask_manifest", "fineweb_mask")
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(mine.settings, instance, "full", SNAPSHOT, only=names)
        assert result.success
        assert materialised(result) == set(names)
        told = result.asset_materializations_for_node("exact_substrings")[0].metadata
    assert told["removed_bytes"].value == published(made, "exact_substrings")["removed_bytes"].sum() > 0
    assert published(mine, "fineweb_mask").equals(published(made, "fineweb_mask"))
