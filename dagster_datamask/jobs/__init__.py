"""Named asset selections. Global assets are in `fit_global` only, so no snapshot run can move what is frozen.

Which assets lead to a snapshot's documents depends on the settings (a strategy reads its own masks), so jobs are built
from them; their names are fixed.
"""

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from dagster_datamask.settings import Settings
from dagster_datamask.stages.base import FITTED, STAGES, candidate_inputs, lineage

FIT_GLOBAL, SCORE, EMBED, SOLVE_CORPUS, SELECT, FULL = (
    "fit_global",
    "score",
    "embed",
    "solve_corpus",
    "select",
    "full",
)
CLEAN, FIT_BASELINES, BASELINES, REPORT, EXPORT = "clean", "fit_baselines", "baselines", "report", "export"


def build_jobs(settings: Settings) -> dict[str, UnresolvedAssetJobDefinition]:
    """{name: job}."""
    score = of_a_snapshot(settings, "pruned_documents")
    embed = of_a_snapshot(settings, "kmeans_clusters", *candidate_inputs(settings))
    full = of_a_snapshot(settings)
    extra = [name for name, stage in STAGES.items() if stage.group == "baselines"]
    compared = [name for name in extra if STAGES[name].partitioned]
    jobs = (
        (FIT_GLOBAL, FITTED, "Resolve or train the classifiers, fix quality's constants, fit the centroids."),
        (SCORE, score, "Documents, their scores and pruning."),
        # with select.scope = corpus a snapshot goes this far, then solve_corpus, then select
        (EMBED, embed, "A snapshot from its shards to its vectors: what solve_corpus chooses from."),
        (SOLVE_CORPUS, ["corpus_selection_state"], "The masks of all embedded snapshots as one pool."),
        (
            SELECT,
            [name for name in full if name not in score],
            "Embeddings, clusters, mask, manifest, the kept documents and the report, from published scores.",
        ),
        (FULL, full, "A snapshot from its shards to the kept documents."),
        # what is fitted once stays out of every snapshot's runs
        (
            FIT_BASELINES,
            [name for name in extra if name not in compared],
            "The classifiers that baselines alone need, resolved or trained.",
        ),
        (
            BASELINES,
            [name for name in of_a_snapshot(settings, *compared) if name in compared or name not in full],
            "Every selection to compare with, at the same budget, from what the job full published of the snapshot.",
        ),
        (REPORT, ["selection_report"], "One page over all selected snapshots: figures, certificates, what is stale."),
        (EXPORT, ["dataset_card"], "The kept documents of all finished snapshots as one folder for others."),
    )
    return {
        name: dg.define_asset_job(name, selection=list(assets), description=description)
        for name, assets, description in jobs
    }


def of_a_snapshot(settings: Settings, *ends: str) -> list[str]:
    """The assets of a snapshot that lead to `ends`, by default to its kept documents and its report."""
    ends = ends or ("fineweb_mask", "snapshot_report", "kmeans_clusters")
    return [name for name in lineage(ends, settings) if STAGES[name].partitioned]
