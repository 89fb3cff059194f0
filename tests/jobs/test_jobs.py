"""Which assets each job runs: what is global runs in fit_global alone."""

import os

import dagster as dg
import pytest

from dagster_datamask.definitions import build_definitions
from dagster_datamask.settings import load_settings
from dagster_datamask.stages.base import active

GLOBAL = {"dclm_classifier", "edu_classifier", "wiki_classifier", "quality_calibration", "kmeans_centroids"}
SCORE = {"raw_shards", "dclm_scores", "edu_scores", "wiki_scores", "quality_scores", "pruned_documents"}
SELECT = {
    *("e5_embeddings", "kmeans_clusters", "datamask_masks", "fineweb_mask_manifest", "fineweb_mask"),
    "snapshot_report",
}


@pytest.fixture(scope="module")
def defs() -> dg.Definitions:
    return build_definitions(load_settings(os.devnull, env={}))


@pytest.mark.parametrize(
    ("job", "assets", "partitioned"),
    [
        ("fit_global", GLOBAL, False),
        ("score", SCORE, True),
        ("select", SELECT, True),
        ("full", SCORE | SELECT, True),
        ("embed", SCORE | {"e5_embeddings", "kmeans_clusters"}, True),
        ("solve_corpus", {"corpus_selection_state"}, False),
        ("report", {"selection_report"}, False),
        ("export", {"dataset_card"}, False),
        ("group_mates_fit_1", {"warmup_model", "stage_1/rollout_sets", "stage_1/influence_model"}, False),
        ("group_mates_select_1", {"stage_1/influence_scores", "stage_1/group_mates_selection"}, True),
        ("group_mates_continue_1", {"stage_1/continued_model"}, False),
        ("group_mates_fit_2", {"stage_2/rollout_sets", "stage_2/influence_model"}, False),
        (
            "group_mates_select_2",
            {
                *("stage_2/influence_scores", "stage_2/group_mates_selection"),
                *("influence_scores", "group_mates_selection"),
            },
            True,
        ),
        ("group_mates_continue_2", {"stage_2/continued_model"}, False),
    ],
)
def test_selection(defs: dg.Definitions, job: str, assets: set[str], partitioned: bool) -> None:
    resolved = defs.resolve_job_def(job)
    assert {key.to_user_string() for key in resolved.asset_layer.executable_asset_keys} == assets
    assert (resolved.partitions_def is not None) == partitioned
    assert resolved.description


def test_every_asset_is_in_a_job(defs: dg.Definitions) -> None:
    keys = {key for job in defs.jobs or () for key in defs.resolve_job_def(job.name).asset_layer.executable_asset_keys}
    assert {key.to_user_string() for key in keys} == set(active(load_settings(os.devnull, env={})))
