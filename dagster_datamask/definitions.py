"""The whole system on one screen: assets, jobs, sensor, resources, wired from one set of settings.

Importing this needs no network, no GPU, no credentials and no models; they are looked at when an asset runs.
"""

import dagster as dg

from dagster_datamask.assets import baselines, cleaning, documents, exports, globals, group_mates, reports, selection
from dagster_datamask.assets.base import StageAsset
from dagster_datamask.assets.checks import every_embedded_snapshot_solved
from dagster_datamask.jobs import build_jobs
from dagster_datamask.redaction import redact_logs
from dagster_datamask.resources.accelerator import AcceleratorResource
from dagster_datamask.resources.compute import ComputeResource
from dagster_datamask.resources.console import console
from dagster_datamask.resources.errors import redact_errors
from dagster_datamask.resources.models import ModelsResource
from dagster_datamask.resources.pods import executor
from dagster_datamask.resources.pools import wait_without_spinning
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.sensors.new_embeddings import build_new_embeddings
from dagster_datamask.sensors.new_shards import build_new_shards
from dagster_datamask.sensors.retry_failed_snapshots import build_retry_failed_snapshots
from dagster_datamask.settings import Settings, load_settings
from dagster_datamask.stages.base import active

ASSETS: tuple[StageAsset, ...] = (
    globals.dclm_classifier,
    globals.edu_classifier,
    globals.wiki_classifier,
    globals.quality_calibration,
    globals.kmeans_centroids,
    documents.raw_shards,
    cleaning.text_duplicates,
    cleaning.contaminated_documents,
    documents.dclm_scores,
    documents.edu_scores,
    documents.wiki_scores,
    globals.ultra_classifier,
    documents.ultra_scores,
    documents.quality_scores,
    documents.pruned_documents,
    selection.e5_embeddings,
    selection.kmeans_clusters,
    group_mates.warmup_model,
    *group_mates.STAGE_ASSETS,
    group_mates.influence_scores,
    group_mates.group_mates_selection,
    selection.corpus_selection_state,
    baselines.near_duplicates_,
    baselines.exact_substrings,
    selection.datamask_masks,
    *baselines.BASELINES,
    selection.fineweb_mask_manifest,
    selection.fineweb_mask,
    reports.snapshot_report,
    reports.selection_report,
    exports.dataset_card,
)


def build_definitions(settings: Settings, **resources: dg.ConfigurableResource) -> dg.Definitions:
    """The definitions for `settings`; `resources` replaces storage, accelerator, models or compute."""
    jobs = build_jobs(settings)
    return dg.Definitions(
        assets=[asset.build(settings) for asset in ASSETS if asset.stage.name in active(settings)],
        asset_checks=[
            every_embedded_snapshot_solved(settings),
            exports.export_is_current(settings),
            reports.report_is_current(settings),
        ],
        jobs=list(jobs.values()),
        sensors=[
            build_new_shards(settings, jobs),
            build_retry_failed_snapshots(settings, jobs),
            *([build_new_embeddings(settings, jobs)] if settings.select.scope == "corpus" else []),
        ],
        resources={
            "storage": StorageResource.from_settings(settings),
            "accelerator": AcceleratorResource.from_settings(settings),
            "models": ModelsResource.from_settings(settings),
            "compute": ComputeResource.from_settings(settings),
            **resources,
        },
        loggers={"console": console},
        executor=executor(settings),
    )


wait_without_spinning()
redact_errors()
redact_logs()
defs = build_definitions(load_settings())
