"""Embeddings, clusters, the mask, and what comes out: the manifest and the kept documents."""

from dagster_datamask.assets.base import stage_asset
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import corpus, embeddings, manifest, masks
from dagster_datamask.stages.base import Outcome, Run


@stage_asset("e5_embeddings")
def e5_embeddings(run: Run, source: Source, snapshot: str) -> Outcome:
    return embeddings.e5_embeddings(run, source, snapshot)


@stage_asset("kmeans_clusters")
def kmeans_clusters(run: Run, source: Source, snapshot: str) -> Outcome:
    return embeddings.kmeans_clusters(run, snapshot)


@stage_asset("corpus_selection_state")
def corpus_selection_state(run: Run, source: Source, snapshot: str) -> Outcome:
    return corpus.corpus_selection_state(run, source)


@stage_asset("datamask_masks")
def datamask_masks(run: Run, source: Source, snapshot: str) -> Outcome:
    return masks.datamask_masks(run, source, snapshot)


@stage_asset("fineweb_mask_manifest")
def fineweb_mask_manifest(run: Run, source: Source, snapshot: str) -> Outcome:
    return manifest.fineweb_mask_manifest(run, snapshot)


@stage_asset("fineweb_mask")
def fineweb_mask(run: Run, source: Source, snapshot: str) -> Outcome:
    return manifest.fineweb_mask(run, source, snapshot)
