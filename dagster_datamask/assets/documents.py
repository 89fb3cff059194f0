"""The snapshot's documents, their quality, and what pruning leaves."""

from dagster_datamask.assets.base import stage_asset
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import ingest, scores
from dagster_datamask.stages.base import Outcome, Run


@stage_asset("raw_shards")
def raw_shards(run: Run, source: Source, snapshot: str) -> Outcome:
    return ingest.raw_shards(run, source, snapshot)


@stage_asset("dclm_scores")
def dclm_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return scores.scores(run, source, snapshot, "dclm")


@stage_asset("edu_scores")
def edu_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return scores.scores(run, source, snapshot, "edu")


@stage_asset("wiki_scores")
def wiki_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return scores.scores(run, source, snapshot, "wiki")


@stage_asset("quality_scores")
def quality_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return scores.quality_scores(run, snapshot)


@stage_asset("pruned_documents")
def pruned_documents(run: Run, source: Source, snapshot: str) -> Outcome:
    return scores.pruned_documents(run, snapshot)
