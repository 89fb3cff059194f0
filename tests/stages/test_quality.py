"""Quality on real side files: standings in the frozen sample, missing parts, how the scorers agree."""

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import rankdata

from dagster_datamask.reporting.figures import quality_histogram
from dagster_datamask.scoring.quality import PARTS
from dagster_datamask.shards.schemas import SCORES
from dagster_datamask.stages import quality as stage
from dagster_datamask.stages.base import Outcome, lineage
from dagster_datamask.stages.calibration import SAMPLE_FILE
from dagster_datamask.stages.quality import integer_histogram
from tests.conftest import SNAPSHOTS
from tests.project import Project, write_shard
from tests.stages.conftest import failed, rows_of

SCORED = ("raw_shards", "dclm_scores", "edu_scores", "wiki_scores", "quality_scores")


def scored(project: Project, snapshot: str, *more: str) -> dict[str, Outcome]:
    return {name: project.stage(name, snapshot) for name in (*SCORED, *more)}


def parts_of(project: Project, snapshot: str) -> dict[str, np.ndarray]:
    """The three scores on 0..5, in the order of rows."""
    columns = {p: rows_of(project.store.current(f"{p}_scores", snapshot))["score"].to_numpy() for p in PARTS}
    return {part: np.clip(x, 0, 5) if part == "edu" else 5 * x for part, x in columns.items()}


def combined(project: Project, how: str) -> Project:
    """The project under another combination, fitted."""
    changed = project.with_settings(**{"score.combine": how, "score.weights": [1.0, 2.0, 1.0]})
    changed.stage("quality_calibration", "")
    changed.stage("kmeans_centroids", "")
    return changed


@pytest.mark.parametrize("how", ["zscore", "rank"])
def test_both_snapshots_are_measured_against_the_one_sample(project: Project, how: str) -> None:
    changed = combined(project, how)
    assert "quality_calibration" in lineage(["quality_scores"], changed.settings)
    calibration = changed.store.current("quality_calibration")
    sample = pl.read_parquet(calibration.path(SAMPLE_FILE))
    reference = {p: np.clip(sample[p], 0, 5) if p == "edu" else 5 * sample[p].to_numpy() for p in PARTS}

    def expected(parts: dict[str, np.ndarray]) -> np.ndarray:
        total = np.zeros(len(parts["dclm"]))
        for part, weight in zip(PARTS, (1, 2, 1), strict=True):
            own, x = np.asarray(reference[part]), np.asarray(parts[part])
            if how == "zscore":
                total += weight * (x - own.mean()) / own.std()
            else:
                total += weight * ((own < x[:, None]).mean(axis=1) + (own == x[:, None]).mean(axis=1) / 2)
        return 7.5 + 2.5 * total / 4 if how == "zscore" else 15 * total / 4

    for snapshot in SNAPSHOTS:
        outcome = scored(changed, snapshot)["quality_scores"]
        found = rows_of(outcome.published)["score"].to_numpy()
        np.testing.assert_allclose(found, expected(parts_of(changed, snapshot)), rtol=1e-9)
        assert outcome.published.inputs["quality_calibration"] == calibration.fingerprint
        assert sum(outcome.facts["histogram"]) == len(found)
    np.testing.assert_allclose(sample["quality"].to_numpy(), expected(reference), rtol=1e-9)
    assert sample["quality"].mean() == pytest.approx(7.5)
    if how == "rank":
        ranks = sum(w * (rankdata(reference[p]) - 0.5) for p, w in zip(PARTS, (1, 2, 1), strict=True)) / 40
        np.testing.assert_allclose(sample["quality"].to_numpy(), 15 * ranks / 4, rtol=1e-9)
    quality = np.sort(sample["quality"].to_numpy())
    facts = calibration.facts
    for told, part in zip(facts["measured_against"], PARTS, strict=True):
        assert (told["scorer"], told["documents"]) == (part, 40)
        own = np.asarray(reference[part])
        assert [told["mean"], told["sd"], told["median"]] == pytest.approx([own.mean(), own.std(), np.median(own)])
    assert facts["prune_threshold"] == quality[18]
    assert (facts["q_lo"], facts["q_hi"]) == tuple(np.quantile(quality, [0.001, 0.999]))


def test_z_scores_the_whole_way_through_and_what_the_manifest_refuses(project: Project) -> None:
    project.full(SNAPSHOTS[0])
    changed = combined(project, "zscore")
    refused = changed.stage("fineweb_mask_manifest", SNAPSHOTS[0])
    assert "quality_scores: score.combine = 'sum' (in force: 'zscore')" in str(failed(refused))
    outcomes = changed.full(SNAPSHOTS[0])
    assert all(outcome.published is not None for outcome in outcomes.values())
    assert sum(outcomes["quality_scores"].facts["histogram"]) == 65
    assert outcomes["fineweb_mask_manifest"].facts["kept"] == 7
    kept = rows_of(outcomes["fineweb_mask"].published)
    assert kept["quality"].null_count() == 0


def test_the_sum_needs_no_calibration(project: Project) -> None:
    assert "quality_calibration" not in lineage(["quality_scores"], project.settings)
    (project.store.root / "quality_calibration" / "current.json").unlink()
    outcome = scored(project, SNAPSHOTS[0])["quality_scores"]
    parts = parts_of(project, SNAPSHOTS[0])
    np.testing.assert_allclose(rows_of(outcome.published)["score"].to_numpy(), sum(parts.values()))


def rescored(project: Project, part: str, scores: dict[str, float | None]) -> None:
    """Give documents other scores, or none with a reason, in the published side file of a scorer."""
    path = project.store.current(f"{part}_scores", "S").path("a")
    table = pq.read_table(path)
    old = {row["doc_id"]: row["score"] for row in table.to_pylist()}
    new = [scores.get(name, old[name]) for name in old]
    reasons = ["non_finite" if score is None else None for score in new]
    pq.write_table(pa.table({"doc_id": list(old), "score": new, "reason": reasons}, schema=SCORES), path)


@pytest.mark.parametrize("missing", ["null", "others"])
def test_a_document_without_one_score(project: Project, tmp_path: Path, missing: str) -> None:
    write_shard(tmp_path, "S", "a", 4, texts=["river water", "gap here", "glass light", None], ids=list("abcd"))
    changed = project.with_settings(
        **{"source.url": str(tmp_path), "score.missing": missing, "prune.ratio": 0.0, "score.weights": [1.0, 3.0, 1.0]}
    )
    changed.stage("raw_shards", "S")
    for part in PARTS:
        changed.stage(f"{part}_scores", "S")
    rescored(changed, "edu", {"b": None})
    outcome = changed.stage("quality_scores", "S")
    rows = {row["doc_id"]: row for row in rows_of(outcome.published).to_dicts()}
    parts = parts_of(changed, "S")
    assert rows["b"]["reason"] == "edu:non_finite"
    assert rows["d"]["score"] is None and rows["d"]["reason"].startswith("dclm:null_text")
    np.testing.assert_allclose(rows["a"]["score"], 3 * np.dot([1, 3, 1], [parts[p][0] for p in PARTS]) / 5)
    pruned = changed.stage("pruned_documents", "S")
    decided = {row["doc_id"]: (row["decision"], row["reason"]) for row in rows_of(pruned.published).to_dicts()}
    assert decided["a"] == decided["c"] == (None, None)
    if missing == "null":
        assert rows["b"]["score"] is None
        assert outcome.counts == {"scored": 2, "unscored": 2}
        assert decided["b"] == ("unscored", "edu:non_finite")
    else:
        assert rows["b"]["score"] == pytest.approx(3 * (parts["dclm"][1] + parts["wiki"][1]) / 2)
        assert outcome.counts == {"scored": 2, "scored_in_part": 1, "unscored": 1}
        assert decided["b"] == (None, None)


def test_how_the_scorers_agree_is_told_and_drawn(project: Project) -> None:
    outcome = scored(project, SNAPSHOTS[0])["quality_scores"]
    parts = parts_of(project, SNAPSHOTS[0])
    columns = {p: rows_of(project.store.current(f"{p}_scores", SNAPSHOTS[0]))["score"].to_numpy() for p in PARTS}
    told = {(pair["first"], pair["second"]): pair for pair in outcome.facts["correlations"]}
    assert told["dclm", "wiki"]["pearson"] == pytest.approx(np.corrcoef(parts["dclm"], parts["wiki"])[0, 1])
    assert told["dclm", "edu"]["spearman"] == pytest.approx(
        np.corrcoef(rankdata(columns["dclm"]), rankdata(columns["edu"]))[0, 1]
    )
    assert {pair["documents"] for pair in told.values()} == {65}
    assert set(outcome.figures) == {"quality by integer score", "how the scorers agree"}
    assert not failed(outcome)


def test_a_scorer_that_gives_all_one_score_is_a_warning(project: Project, tmp_path: Path) -> None:
    write_shard(tmp_path, "S", "a", 120)
    changed = project.with_settings(**{"source.url": str(tmp_path)})
    changed.stage("raw_shards", "S")
    for part in PARTS:
        changed.stage(f"{part}_scores", "S")
    rescored(changed, "wiki", dict.fromkeys((f"S/a/{k}" for k in range(120)), 0.5))
    outcome = changed.stage("quality_scores", "S")
    assert outcome.published is not None
    (facts,) = failed(outcome).values()
    assert "wiki: standard deviation 0 on a scale of 1, 100.0% of 120 documents have the score 0.5" in str(facts)


def test_the_sample_is_of_the_least_hashes_however_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f"d{k}" for k in range(500)]
    columns = {part: pa.table({"score": np.arange(500.0) + 1000 * k}) for k, part in enumerate(PARTS)}

    def batches(size: int) -> list:
        return [
            (pa.array(ids[a : a + size]), {part: table.slice(a, size) for part, table in columns.items()})
            for a in range(0, 500, size)
        ]

    whole = stage._sample(batches(500))
    assert len(whole["dclm"]) == 500
    monkeypatch.setattr(stage, "_SAMPLED", 40)
    few = [stage._sample(batches(size)) for size in (7, 64, 500)]
    for sample in few:
        for k, part in enumerate(PARTS):
            assert sample[part].tolist() == (whole["dclm"][:40] + 1000 * k).tolist()
    assert {part: len(x) for part, x in stage._sample([]).items()} == dict.fromkeys(PARTS, 0)


def test_the_ends_of_the_histogram_hold_what_lies_beyond() -> None:
    assert integer_histogram(np.array([-3.0, -0.2, 0.5, 14.6, 15.4, 18.0])).tolist() == [3, *[0] * 14, 3]
    assert integer_histogram(np.empty(0)).tolist() == [0] * 16
    counts = [1] * 16
    assert quality_histogram(counts) != quality_histogram(counts, beside_paper=False)
