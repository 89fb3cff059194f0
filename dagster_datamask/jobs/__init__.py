"""Named asset selections. Global assets are in `fit_global` only, so no snapshot run can move what is frozen."""

import dagster as dg

from dagster_datamask.stages.base import STAGES

_SCORE = ("raw_shards", "dclm_scores", "edu_scores", "wiki_scores", "quality_scores", "pruned_documents")

fit_global = dg.define_asset_job(
    "fit_global",
    selection=[name for name, stage in STAGES.items() if not stage.partitioned],
    description="Resolve or train the classifiers, fix quality's constants, fit the centroids; frozen afterwards.",
)
score = dg.define_asset_job("score", selection=list(_SCORE), description="Documents, their scores and pruning.")
select = dg.define_asset_job(
    "select",
    selection=[name for name, stage in STAGES.items() if stage.partitioned and name not in _SCORE],
    description="Embeddings, clusters, mask, manifest and the kept documents, from published scores.",
)
full = dg.define_asset_job(
    "full",
    selection=[name for name, stage in STAGES.items() if stage.partitioned],
    description="A snapshot from its shards to the kept documents.",
)

JOBS = [fit_global, score, select, full]
