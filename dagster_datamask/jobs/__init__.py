"""Named asset selections. Global assets are in `fit_global` only, so no snapshot run can move what is frozen.

Which assets lead to a snapshot's documents depends on the settings (a strategy reads its own masks), so jobs are built
from them; their names are fixed.
"""

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from dagster_datamask.partitions import asset_key
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
# of each Group-MATES stage, its number behind
GROUP_MATES_FIT, GROUP_MATES_SELECT, GROUP_MATES_CONTINUE = (
    "group_mates_fit",
    "group_mates_select",
    "group_mates_continue",
)
CLEAN, FIT_BASELINES, BASELINES, REPORT, EXPORT = "clean", "fit_baselines", "baselines", "report", "export"


def build_jobs(settings: Settings) -> dict[str, UnresolvedAssetJobDefinition]:
    """{name: job}."""
    score = of_a_snapshot(settings, "pruned_documents")
    embed = [
        name
        for name in of_a_snapshot(settings, "kmeans_clusters", *candidate_inputs(settings))
        if STAGES[name].group != "group_mates"
    ]
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
        (
            CLEAN,
            [name for name, stage in STAGES.items() if stage.group == "cleaning"],
            "What a snapshot repeats and what of evaluation sets it holds, from what the job full published of it.",
        ),
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
        *(job for number in range(1, settings.group_mates.stages + 1) for job in _of_a_stage(number, settings)),
    )
    return {
        name: dg.define_asset_job(
            name,
            selection=dg.AssetSelection.assets(*map(asset_key, assets)),
            description=description,
        )
        for name, assets, description in jobs
    }


def _of_a_stage(number: int, settings: Settings) -> tuple[tuple[str, list[str], str], ...]:
    """The three jobs of a Group-MATES stage, in their order: fit once, choose of each snapshot, continue once."""
    prefix = f"stage_{number}/"
    first = ["warmup_model"] if number == 1 else []
    last = ["influence_scores", "group_mates_selection"] if number == settings.group_mates.stages else []
    return (
        (
            f"{GROUP_MATES_FIT}_{number}",
            [*first, f"{prefix}rollout_sets", f"{prefix}influence_model"],
            f"Stage {number} of Group-MATES: probe its checkpoint and fit the influence model.",
        ),
        (
            f"{GROUP_MATES_SELECT}_{number}",
            [f"{prefix}influence_scores", f"{prefix}group_mates_selection", *last],
            f"Stage {number} of Group-MATES: a snapshot's influence scores and what is chosen by them.",
        ),
        (
            f"{GROUP_MATES_CONTINUE}_{number}",
            [f"{prefix}continued_model"],
            f"Stage {number} of Group-MATES: train on what was chosen, which the next stage probes.",
        ),
    )


def of_a_snapshot(settings: Settings, *ends: str) -> list[str]:
    """The assets of a snapshot that lead to `ends`, by default to its kept documents and its report."""
    ends = ends or ("fineweb_mask", "snapshot_report", "kmeans_clusters")
    return [name for name in lineage(ends, settings) if STAGES[name].partitioned]
