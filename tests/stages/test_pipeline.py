"""The whole spine of one snapshot, stage after stage."""

import polars as pl

from tests.conftest import SNAPSHOTS
from tests.project import Project


def test_every_row_is_decided_and_the_budget_is_met_exactly(project: Project) -> None:
    outcomes = project.full(SNAPSHOTS[0])
    for name, outcome in outcomes.items():
        assert outcome.published is not None, name
        assert outcome.rows_in == sum(outcome.counts.values()), name
    manifest = pl.read_parquet(outcomes["fineweb_mask_manifest"].published.folder / "*.parquet")
    assert len(manifest) == 65
    assert manifest["doc_id"].n_unique() == 65
    assert (manifest["decision"] == "kept").sum() == 7  # floor(0.1 * 65 + 0.5)
    assert (manifest["decision"] == "pruned").sum() == 29  # floor(0.45 * 65 + 0.5)
    kept = pl.read_parquet(outcomes["fineweb_mask"].published.folder / "*.parquet")
    assert sorted(kept["doc_id"]) == sorted(manifest.filter(pl.col("decision") == "kept")["doc_id"])
