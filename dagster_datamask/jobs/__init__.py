"""Named asset selections. Global assets are in `fit_global` only, so no snapshot run can move what is frozen."""

import dagster as dg

from dagster_datamask.stages.base import FITTED, STAGES

_SCORE = ("raw_shards", "dclm_scores", "edu_scores", "wiki_scores", "quality_scores", "pruned_documents")

fit_global = dg.define_asset_job(
    "fit_global",
    selection=list(FITTED),
    description="Resolve or train the classifiers, fix quality's constants, fit the centroids; frozen afterwards.",
)
score = dg.define_asset_job("score", selection=list(_SCORE), description="Documents, their scores and pruning.")
select = dg.define_asset_job(
    "select",
    selection=[name for name, stage in STAGES.items() if stage.partitioned and name not in _SCORE],
    description="Embeddings, clusters, mask, manifest, the kept documents and the report, from published scores.",
)
full = dg.define_asset_job(
    "full",
    selection=[name for name, stage in STAGES.items() if stage.partitioned],
    description="A snapshot from its shards to the kept documents.",
)

# with select.scope = corpus a snapshot goes this far, then solve_corpus, then select
embed = dg.define_asset_job(
    "embed",
    selection=[*_SCORE, "e5_embeddings", "kmeans_clusters"],
    description="A snapshot from its shards to its vectors: what solve_corpus chooses from.",
)
solve_corpus = dg.define_asset_job(
    "solve_corpus",
    selection=["corpus_selection_state"],
    description="The masks of all embedded snapshots as one pool (select.scope = corpus).",
)

report = dg.define_asset_job(
    "report",
    selection=["selection_report"],
    description="One page over all selected snapshots: figures, certificates, and what is missing or stale.",
)
export = dg.define_asset_job(
    "export",
    selection=["dataset_card"],
    description="The kept documents of all finished snapshots as one folder for others, card and checksums included.",
)

JOBS = [fit_global, score, embed, solve_corpus, select, full, report, export]
