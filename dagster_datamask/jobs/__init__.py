"""Named asset selections. Global assets are in `fit_global` only, so no snapshot run can move what is frozen.

Which assets lead to a snapshot's documents depends on the settings (a strategy reads its own masks), so jobs are built
from them; their names are fixed.
"""

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from dagster_datamask.settings import Settings
from dagster_datamask.stages.base import FITTED, STAGES, lineage

FIT_GLOBAL, SCORE, EMBED, SOLVE_CORPUS, SELECT, FULL = (
    "fit_global",
    "score",
    "embed",
    "solve_corpus",
    "select",
    "full",
)
CLEAN, BASELINES, REPORT, EXPORT = "clean", "baselines", "report", "export"


def build_jobs(settings: Settings) -> dict[str, UnresolvedAssetJobDefinition]:
    """{name: job}."""
    score = of_a_snapshot(settings, "pruned_documents")
    embed = of_a_snapshot(settings, "e5_embeddings", "kmeans_clusters")
    full = of_a_snapshot(settings)
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
